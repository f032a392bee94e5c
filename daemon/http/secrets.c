/*
 * secrets.c - keys and certificate in force, and their exchange while calls go on.
 *
 * Both change together or not at all: a reload that finds anything wrong leaves everything as it
 * was. A certificate that will soon be over is said once a day.
 */
#include <errno.h>
#include <string.h>
#include <time.h>

#include "base/clock.h"
#include "base/log.h"
#include "http/conn.h"

#define LOOK_US (86400 * 1000000LL)

struct secrets {
    struct tv_keys keys;
    struct http_tls *tls; /* NULL: no TLS */
};

static void secrets_finish(struct secrets *secrets)
{
    tv_keys_finish(&secrets->keys);
    tv_http_tls_unref(secrets->tls);
    secrets->tls = NULL;
}

static int tls_read(const struct tv_config *config, struct http_tls **ret_tls, char *error,
                    size_t error_bytes)
{
    char cert[sizeof config->tls_cert], key[sizeof config->tls_key];
    if (config->tls_cert[0] == '\0') {
        return 0;
    }
    if (!tv_http_tls_built()) {
        (void)snprintf(error, error_bytes,
                       "tls_cert: this build, or its libmicrohttpd, has no TLS");
        return -EBADMSG;
    }
    int rc = tv_config_path(config->tls_cert, cert, sizeof cert, error, error_bytes);
    if (rc == 0) {
        rc = tv_config_path(config->tls_key, key, sizeof key, error, error_bytes);
    }
    return rc == 0 ? tv_http_tls_load(cert, key, ret_tls, error, error_bytes) : rc;
}

/* What the files of this configuration say now. 0 or -EBADMSG with text. */
static int secrets_read(const struct tv_config *config, struct secrets *ret_secrets, char *error,
                        size_t error_bytes)
{
    struct secrets secrets = {.tls = NULL};
    int rc = 0;
    if (config->api_key_file[0] != '\0') {
        rc = tv_keys_load(config->api_key_file, &secrets.keys, error, error_bytes);
    }
    if (rc == 0) {
        rc = tls_read(config, &secrets.tls, error, error_bytes);
    }
    if (rc != 0) {
        secrets_finish(&secrets);
        return rc;
    }
    *ret_secrets = secrets;
    return 0;
}

int tv_http_check(const struct tv_config *config, char *error, size_t error_bytes)
{
    struct secrets secrets;
    int rc = secrets_read(config, &secrets, error, error_bytes);
    if (rc == 0) {
        secrets_finish(&secrets);
    }
    return rc;
}

int tv_http_secrets_load(struct tv_http *http, char *error, size_t error_bytes)
{
    struct secrets fresh, old;
    int rc = secrets_read(http->config, &fresh, error, error_bytes);
    if (rc != 0) {
        return rc;
    }
    if (fresh.keys.count > 0) {
        tv_log(TV_LOG_INFO, "%d keys are in force", fresh.keys.count);
    }
    if (fresh.tls != NULL) {
        tv_http_tls_log(fresh.tls, (int64_t)time(NULL));
        atomic_store_explicit(&http->stats->tls_not_after_s, tv_http_tls_not_after_s(fresh.tls),
                              memory_order_relaxed);
    }
    (void)pthread_mutex_lock(&http->secrets_lock);
    old = (struct secrets){.keys = http->keys, .tls = http->tls};
    http->keys = fresh.keys;
    http->tls = fresh.tls;
    (void)pthread_mutex_unlock(&http->secrets_lock);
    secrets_finish(&old); /* connections hold what they use */
    return 0;
}

int tv_http_reload(struct tv_http *http, const struct tv_config *config, char *error,
                   size_t error_bytes)
{
    int rc = tv_http_secrets_load(http, error, error_bytes);
    if (rc == 0) {
        (void)pthread_mutex_lock(&http->lock);
        http->answers_bytes_max = (size_t)config->answers_bytes;
        http->event_readers_max = config->event_readers_max;
        (void)pthread_mutex_unlock(&http->lock);
        tv_http_streams_review(http);
    }
    return rc;
}

struct http_tls *tv_http_tls_current(struct tv_http *http)
{
    (void)pthread_mutex_lock(&http->secrets_lock);
    struct http_tls *tls = tv_http_tls_ref(http->tls);
    (void)pthread_mutex_unlock(&http->secrets_lock);
    return tls;
}

void tv_http_tls_look(struct tv_http *http)
{
    int64_t now_us = tv_clock_us();
    if (http->tls_looked_us == 0 || now_us - http->tls_looked_us < LOOK_US) {
        http->tls_looked_us = http->tls_looked_us == 0 ? now_us : http->tls_looked_us;
        return;
    }
    struct http_tls *tls = tv_http_tls_current(http);
    http->tls_looked_us = now_us;
    if (tls != NULL) {
        tv_http_tls_log(tls, (int64_t)time(NULL));
    }
    tv_http_tls_unref(tls);
}

void tv_http_secrets_finish(struct tv_http *http)
{
    struct secrets last = {.keys = http->keys, .tls = http->tls};
    secrets_finish(&last);
}
