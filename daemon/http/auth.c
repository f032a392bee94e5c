/*
 * auth.c - who calls: the bearer key of a request against the keys of the file.
 *
 * Owns who needs which scope. Without a key file every route is open (such listeners are on
 * loopback); with one, everything but the probes and the static page needs a key, also what does
 * not exist.
 */
#include <errno.h>
#include <string.h>

#include "http/conn.h"

/* Which scope a call needs; 0: none. */
static int scope_of(enum tv_call_kind kind)
{
    switch (kind) {
    case TV_CALL_HEALTH:
    case TV_CALL_READY:
    case TV_CALL_PAGE:
        return 0;
    case TV_CALL_METRICS:
        return TV_SCOPE_METRICS;
    case TV_CALL_PARITY_VIOLATION:
    case TV_CALL_STATUS:
    case TV_CALL_DRAIN:
    case TV_CALL_UNDRAIN:
        return TV_SCOPE_ADMIN;
    default:
        return TV_SCOPE_VERIFY;
    }
}

/* The name and scopes of the request's key: 0, or -EACCES. */
static int key_of(struct tv_http *http, const struct http_headers *headers, char *ret_name,
                  size_t name_bytes, int *ret_scopes)
{
    (void)pthread_mutex_lock(&http->secrets_lock);
    const struct tv_key *key = tv_keys_find(&http->keys, headers->secret, headers->secret_bytes);
    if (key != NULL) {
        memcpy(ret_name, key->name, name_bytes < sizeof key->name ? name_bytes : sizeof key->name);
        *ret_scopes = key->scopes;
    }
    (void)pthread_mutex_unlock(&http->secrets_lock);
    return key != NULL ? 0 : -EACCES;
}

int tv_http_key_named(struct tv_http *http, const char *name)
{
    int found = 0;
    (void)pthread_mutex_lock(&http->secrets_lock);
    for (int32_t i = 0; i < http->keys.count; i++) {
        const struct tv_key *key = &http->keys.keys[i];
        found |= strcmp(key->name, name) == 0 && (key->scopes & TV_SCOPE_VERIFY) != 0;
    }
    (void)pthread_mutex_unlock(&http->secrets_lock);
    return found;
}

int tv_http_authorize(struct http_conn *conn, const struct http_headers *headers, int is_routed,
                      struct tv_problem *problem)
{
    struct tv_http *http = conn->http;
    int needed = is_routed ? scope_of(conn->route.kind) : 0, scopes = 0;
    if (http->config->api_key_file[0] == '\0' || (is_routed && needed == 0)) {
        return 0;
    }
    if (headers->credentials == 0) {
        tv_problem_set(problem, TV_UNAUTHENTICATED, NULL,
                       "a key is needed (Authorization: Bearer)");
        return -EINVAL;
    }
    if (headers->secret_bytes == 0 ||
        key_of(http, headers, conn->call->principal, sizeof conn->call->principal, &scopes) != 0) {
        tv_problem_set(problem, TV_UNAUTHENTICATED, NULL, "the key is not known");
        return -EINVAL;
    }
    if ((scopes & needed) != needed) {
        tv_problem_set(problem, TV_FORBIDDEN, NULL, "the key does not have the scope %s",
                       needed == TV_SCOPE_METRICS ? "metrics"
                       : needed == TV_SCOPE_ADMIN ? "admin"
                                                  : "verify");
        return -EINVAL;
    }
    return 0;
}
