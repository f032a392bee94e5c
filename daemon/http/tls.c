/*
 * tls.c - certificate and key of the listeners: read, judged, shared, handed to handshakes.
 *
 * The only file that talks to GnuTLS; the sessions are libmicrohttpd's. Refuses a pair that could
 * not serve anybody (a key that is not the certificate's, a weak one, anything unreadable) as a
 * whole; one that is out of date is served, and said.
 */
#include "http/tls.h"

#include <errno.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "base/log.h"
#include "http/conn.h"
#include "http/have_tls.h"

#if TV_HAVE_TLS
#include <gnutls/abstract.h>
#include <gnutls/gnutls.h>
#include <gnutls/x509.h>

#define FILE_BYTES_MAX ((size_t)256 << 10)
#define CHAIN_MAX      16
#define WARN_S         (14 * 86400LL)
#define ID_BYTES       32

struct http_tls {
    atomic_int refs; /* relaxed to take one; acq_rel to give one back, as the last one frees */
    gnutls_pcert_st certs[CHAIN_MAX];
    unsigned int count;
    gnutls_privkey_t key; /* NULL: not yet read */
    int64_t not_before_s, not_after_s;
    char subject[256];
};

int tv_http_tls_built(void)
{
    return MHD_is_feature_supported(MHD_FEATURE_TLS) == MHD_YES &&
           MHD_is_feature_supported(MHD_FEATURE_HTTPS_CERT_CALLBACK) == MHD_YES;
}

/* A whole file; *ret_bytes of *ret_data, which is the caller's. NULL, or what is wrong. */
static const char *file_read(const char *path, int is_secret, unsigned char **ret_data,
                             size_t *ret_bytes)
{
    unsigned char *data = malloc(FILE_BYTES_MAX);
    FILE *file = data == NULL ? NULL : fopen(path, "re");
    const char *wrong = data == NULL ? "no memory" : file == NULL ? strerror(errno) : NULL;
    struct stat status;
    size_t bytes = 0;
    if (file != NULL) {
        (void)setvbuf(file, NULL, _IONBF, 0); /* no copy of a key stays in a buffer */
        if (is_secret && fstat(fileno(file), &status) == 0 &&
            (status.st_mode & (S_IRWXO | S_IWGRP)) != 0) {
            tv_log(TV_LOG_WARNING, "tls_key: others may read or write it (mode %03o)",
                   (unsigned int)status.st_mode & 0777u);
        }
        bytes = fread(data, 1, FILE_BYTES_MAX, file);
        if (ferror(file)) {
            wrong = "it cannot be read";
        } else if (bytes == FILE_BYTES_MAX) {
            wrong = "it is too large";
        }
        (void)fclose(file); /* only read */
    }
    if (wrong != NULL) {
        free(data);
        return wrong;
    }
    *ret_data = data;
    *ret_bytes = bytes;
    return NULL;
}

static void secret_free(unsigned char *data, size_t bytes)
{
    if (data != NULL) {
        explicit_bzero(data, bytes);
        free(data);
    }
}

/* Dates and subject of the chain; the first one is the server's. */
static void dates_take(struct http_tls *tls, gnutls_x509_crt_t *certs, unsigned int count)
{
    size_t bytes = sizeof tls->subject;
    for (unsigned int i = 0; i < count; i++) {
        int64_t from_s = gnutls_x509_crt_get_activation_time(certs[i]);
        int64_t to_s = gnutls_x509_crt_get_expiration_time(certs[i]);
        tls->not_before_s = i == 0 || from_s > tls->not_before_s ? from_s : tls->not_before_s;
        tls->not_after_s = i == 0 || to_s < tls->not_after_s ? to_s : tls->not_after_s;
    }
    if (gnutls_x509_crt_get_dn(certs[0], tls->subject, &bytes) != 0) {
        (void)snprintf(tls->subject, sizeof tls->subject, "a subject without a name");
    }
}

/* The chain in the order in which it is sent. NULL, or what is wrong. */
static const char *chain_take(struct http_tls *tls, unsigned char *data, size_t bytes,
                              unsigned char ret_id[ID_BYTES])
{
    gnutls_datum_t text = {.data = data, .size = (unsigned int)bytes};
    gnutls_x509_crt_t *certs = NULL;
    unsigned int count = 0, kept;
    size_t id_bytes = ID_BYTES;
    int rc = gnutls_x509_crt_list_import2(&certs, &count, &text, GNUTLS_X509_FMT_PEM, 0);
    if (rc < 0 || count == 0) {
        return rc < 0 ? gnutls_strerror(rc) : "it has no certificate";
    }
    kept = count;
    rc = count > CHAIN_MAX
             ? GNUTLS_E_CERTIFICATE_LIST_UNSORTED
             : gnutls_pcert_import_x509_list(tls->certs, certs, &kept, GNUTLS_X509_CRT_LIST_SORT);
    if (rc == 0) {
        tls->count = kept;
        dates_take(tls, certs, count);
        rc = gnutls_pubkey_get_key_id(tls->certs[0].pubkey, GNUTLS_KEYID_USE_SHA256, ret_id,
                                      &id_bytes);
    }
    for (unsigned int i = 0; i < count; i++) {
        gnutls_x509_crt_deinit(certs[i]);
    }
    gnutls_free(certs);
    return rc == 0             ? NULL
           : count > CHAIN_MAX ? "there are more than 16 certificates"
                               : gnutls_strerror(rc);
}

/* The key, which must be that of this id and good enough. NULL, or what is wrong. */
static const char *key_take(struct http_tls *tls, unsigned char *data, size_t bytes,
                            const unsigned char cert_id[ID_BYTES])
{
    gnutls_datum_t text = {.data = data, .size = (unsigned int)bytes};
    gnutls_pubkey_t public = NULL;
    unsigned char id[ID_BYTES];
    unsigned int bits = 0;
    size_t id_bytes = sizeof id;
    int rc = gnutls_privkey_init(&tls->key);
    if (rc == 0) {
        rc = gnutls_privkey_import_x509_raw(tls->key, &text, GNUTLS_X509_FMT_PEM, NULL, 0);
    }
    if (rc == 0) {
        rc = gnutls_pubkey_init(&public);
    }
    if (rc == 0) {
        rc = gnutls_pubkey_import_privkey(public, tls->key, 0, 0);
    }
    if (rc == 0) {
        rc = gnutls_pubkey_get_key_id(public, GNUTLS_KEYID_USE_SHA256, id, &id_bytes);
    }
    int kind = rc == 0 ? gnutls_pubkey_get_pk_algorithm(public, &bits) : GNUTLS_PK_UNKNOWN;
    gnutls_pubkey_deinit(public);
    if (rc != 0) {
        return gnutls_strerror(rc);
    }
    if (memcmp(id, cert_id, ID_BYTES) != 0) {
        return "the key is not the certificate's";
    }
    if (gnutls_pk_bits_to_sec_param((gnutls_pk_algorithm_t)kind, bits) < GNUTLS_SEC_PARAM_MEDIUM) {
        return "the key is too short (RSA from 2048 bits)";
    }
    return NULL;
}

static void tls_free(struct http_tls *tls)
{
    for (unsigned int i = 0; i < tls->count; i++) {
        gnutls_pcert_deinit(&tls->certs[i]);
    }
    gnutls_privkey_deinit(tls->key);
    free(tls);
}

int tv_http_tls_load(const char *cert_path, const char *key_path, struct http_tls **ret_tls,
                     char *error, size_t error_bytes)
{
    unsigned char *cert = NULL, *key = NULL, id[ID_BYTES];
    size_t cert_bytes = 0, key_bytes = 0;
    const char *what = "tls_cert", *path = cert_path, *wrong = NULL;
    struct http_tls *tls = calloc(1, sizeof *tls);
    if (tls == NULL) {
        wrong = "no memory";
    } else {
        atomic_init(&tls->refs, 1);
        wrong = file_read(cert_path, 0, &cert, &cert_bytes);
        wrong = wrong != NULL ? wrong : chain_take(tls, cert, cert_bytes, id);
    }
    if (wrong == NULL) {
        what = "tls_key";
        path = key_path;
        wrong = file_read(key_path, 1, &key, &key_bytes);
        wrong = wrong != NULL ? wrong : key_take(tls, key, key_bytes, id);
    }
    free(cert);
    secret_free(key, key_bytes);
    if (wrong != NULL) {
        (void)snprintf(error, error_bytes, "%s %.300s: %.200s", what, path, wrong);
        tv_http_tls_unref(tls);
        return -EBADMSG;
    }
    *ret_tls = tls;
    return 0;
}

struct http_tls *tv_http_tls_ref(struct http_tls *tls)
{
    if (tls != NULL) {
        (void)atomic_fetch_add_explicit(&tls->refs, 1, memory_order_relaxed);
    }
    return tls;
}

void tv_http_tls_unref(struct http_tls *tls)
{
    if (tls != NULL && atomic_fetch_sub_explicit(&tls->refs, 1, memory_order_acq_rel) == 1) {
        tls_free(tls);
    }
}

int64_t tv_http_tls_not_after_s(const struct http_tls *tls)
{
    return tls->not_after_s;
}

void tv_http_tls_log(const struct http_tls *tls, int64_t now_s)
{
    long long left_s = tls->not_after_s - now_s;
    if (tls->not_before_s > now_s) {
        tv_log(TV_LOG_WARNING, "tls: the certificate of %.200s is not valid yet: clients refuse it",
               tls->subject);
    } else if (left_s <= 0) {
        tv_log(TV_LOG_WARNING,
               "tls: the certificate of %.200s is over since %lld days: clients refuse it",
               tls->subject, -left_s / 86400);
    } else {
        tv_log(left_s < WARN_S ? TV_LOG_WARNING : TV_LOG_INFO,
               "tls: the certificate of %.200s is good for %lld days", tls->subject,
               left_s / 86400);
    }
}

/* GnuTLS asks which pair a handshake shall use: the one of its connection. */
static int pair_pick(gnutls_session_t session, const gnutls_datum_t *authorities,
                     int authorities_count, const gnutls_pk_algorithm_t *kinds, int kinds_count,
                     gnutls_pcert_st **ret_certs, unsigned int *ret_count,
                     gnutls_privkey_t *ret_key)
{
    (void)authorities; /* there is one pair, whoever asks */
    (void)authorities_count;
    (void)kinds;
    (void)kinds_count;
    struct MHD_Connection *connection = gnutls_session_get_ptr(session);
    const union MHD_ConnectionInfo *info =
        MHD_get_connection_info(connection, MHD_CONNECTION_INFO_SOCKET_CONTEXT);
    const struct http_conn *conn = info == NULL ? NULL : info->socket_context;
    if (conn == NULL || conn->tls == NULL) {
        return -1; /* there was no memory when it came */
    }
    *ret_certs = conn->tls->certs;
    *ret_count = conn->tls->count;
    *ret_key = conn->tls->key;
    return 0;
}

void tv_http_tls_options(int32_t min, struct MHD_OptionItem ret_options[HTTP_TLS_OPTIONS])
{
    static const char newest[] = "SECURE128:-VERS-ALL:+VERS-TLS1.3:%SERVER_PRECEDENCE";
    static const char both[] =
        "SECURE128:-VERS-ALL:+VERS-TLS1.3:+VERS-TLS1.2:-RSA:%SERVER_PRECEDENCE";
    gnutls_certificate_retrieve_function2 *pick = pair_pick;
    union {
        const char *text;
        void *pointer;
    } priorities = {.text = min >= 13 ? newest : both};
    ret_options[0] = (struct MHD_OptionItem){MHD_OPTION_HTTPS_PRIORITIES, 0, priorities.pointer};
    ret_options[1] = (struct MHD_OptionItem){MHD_OPTION_HTTPS_CERT_CALLBACK, 0, NULL};
    /* POSIX: a pointer to a function fits; C has no cast for it */
    _Static_assert(sizeof pick == sizeof ret_options[1].ptr_value, "as POSIX says");
    memcpy(&ret_options[1].ptr_value, &pick, sizeof pick);
}

void tv_http_tls_write(const struct http_conn *conn, const void *head, size_t head_bytes,
                       const void *body, size_t body_bytes)
{
    const union MHD_ConnectionInfo *info =
        MHD_get_connection_info(conn->connection, MHD_CONNECTION_INFO_GNUTLS_SESSION);
    gnutls_session_t session = info == NULL ? NULL : info->tls_session;
    /* a peer that is gone already needs no answer; nor does one that takes only half of it */
    if (session != NULL && gnutls_record_send(session, head, head_bytes) > 0 &&
        (body_bytes == 0 || gnutls_record_send(session, body, body_bytes) > 0)) {
        (void)gnutls_bye(session, GNUTLS_SHUT_WR);
    }
}

#else

int tv_http_tls_built(void)
{
    return 0;
}

int tv_http_tls_load(const char *cert_path, const char *key_path, struct http_tls **ret_tls,
                     char *error, size_t error_bytes)
{
    (void)key_path;
    (void)ret_tls;
    (void)snprintf(error, error_bytes, "tls_cert %.300s: this build has no TLS", cert_path);
    return -EBADMSG;
}

struct http_tls *tv_http_tls_ref(struct http_tls *tls)
{
    return tls; /* NULL: none can be loaded */
}

void tv_http_tls_unref(struct http_tls *tls)
{
    (void)tls; /* NULL */
}

int64_t tv_http_tls_not_after_s(const struct http_tls *tls)
{
    (void)tls; /* NULL */
    return 0;
}

void tv_http_tls_log(const struct http_tls *tls, int64_t now_s)
{
    (void)tls; /* NULL */
    (void)now_s;
}

void tv_http_tls_options(int32_t min, struct MHD_OptionItem ret_options[HTTP_TLS_OPTIONS])
{
    (void)min; /* no listener has TLS */
    for (int i = 0; i < HTTP_TLS_OPTIONS; i++) {
        ret_options[i] = (struct MHD_OptionItem){MHD_OPTION_END, 0, NULL};
    }
}

void tv_http_tls_write(const struct http_conn *conn, const void *head, size_t head_bytes,
                       const void *body, size_t body_bytes)
{
    (void)conn; /* no connection has TLS */
    (void)head;
    (void)head_bytes;
    (void)body;
    (void)body_bytes;
}

#endif
