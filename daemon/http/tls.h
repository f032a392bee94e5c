/*
 * tls.h - certificate and key of the listeners; private to http/.
 *
 * A pair is shared and counted: a connection holds the one that was in force when it came until
 * its TLS session has ended, so another can take its place at any time.
 */
#ifndef TV_HTTP_TLS_H
#define TV_HTTP_TLS_H

#include <microhttpd.h>
#include <stddef.h>
#include <stdint.h>

#define HTTP_TLS_OPTIONS 2

struct http_conn;
struct http_tls;

/* Was this build made with GnuTLS, and the library under the listeners too? */
int tv_http_tls_built(void);
/* Read and judge a certificate (its chain behind it) and its key, both PEM. 0 with one reference;
 * -EBADMSG with text. */
int tv_http_tls_load(const char *cert_path, const char *key_path, struct http_tls **ret_tls,
                     char *error, size_t error_bytes);
/* Any thread; NULL is fine. */
struct http_tls *tv_http_tls_ref(struct http_tls *tls);
void tv_http_tls_unref(struct http_tls *tls);
/* The earliest end of a certificate in it, in seconds of the wall clock. */
int64_t tv_http_tls_not_after_s(const struct http_tls *tls);
/* One line in the log: whose it is, and for how long; a warning when that is soon over. */
void tv_http_tls_log(const struct http_tls *tls, int64_t now_s);
/* What a listener's daemon needs to be told; min: 12 or 13. */
void tv_http_tls_options(int32_t min, struct MHD_OptionItem ret_options[HTTP_TLS_OPTIONS]);
/* The connection's own thread, past libmicrohttpd: bytes that fit into the socket at once go out,
 * then the end of our side. */
void tv_http_tls_write(const struct http_conn *conn, const void *head, size_t head_bytes,
                       const void *body, size_t body_bytes);

#endif
