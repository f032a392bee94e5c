/*
 * internal.h - what the files of libtreeverify-client share; not installed.
 */
#ifndef TV_CLIENT_INTERNAL_H
#define TV_CLIENT_INTERNAL_H

#include "clients/c/treeverify-client.h"
#include "proto/json_read.h"

/* Empty problem with a printf-style detail; committed -1, node -1. */
void tv_client_problem_set(struct tv_client_problem *problem, const char *format, ...)
    __attribute__((format(printf, 2, 3)));
/* Map a problem document; members that are absent or of another type keep their defaults. */
void tv_client_problem_read(const struct tv_json *doc, int32_t http_status,
                            struct tv_client_problem *ret_problem);

/* tv_client_request with an Idempotency-Key (NULL for none). */
int tv_client_request_keyed(struct tv_client *client, const char *method, const char *path,
                            const char *body, size_t body_bytes, const char *key,
                            struct tv_client_answer *ret_answer,
                            struct tv_client_problem *ret_problem);

/* Members of an answer. 0, or -EBADMSG when absent, of another type, or too large. A string longer
 * than its field is cut only by _text_cut. */
int tv_client_get_int32(const struct tv_json *doc, const struct tv_json_value *object,
                        const char *name, int32_t *ret);
int tv_client_get_text(const struct tv_json_value *object, const char *name, char *ret,
                       size_t ret_bytes);
void tv_client_get_text_cut(const struct tv_json_value *object, const char *name, char *ret,
                            size_t ret_bytes);

#endif
