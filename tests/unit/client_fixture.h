/*
 * client_fixture.h - a scripted HTTP server on loopback for tests of the client library.
 *
 * A thread reads one request per step and answers, stays silent or hangs up as the script says; it
 * keeps every request, so tests compare what was really sent.
 */
#ifndef TV_TEST_CLIENT_FIXTURE_H
#define TV_TEST_CLIENT_FIXTURE_H

#include <pthread.h>
#include <stdint.h>

#include "clients/c/treeverify-client.h"

#define STEPS_MAX     8
#define REQUEST_BYTES 16384

/* One connection: what to send back. NULL answers nothing; silent_ms keeps it open meanwhile. */
struct step {
    const char *status, *type, *body, *headers;
    int hang_up, silent_ms;
};

struct server {
    int fd;
    char url[64];
    pthread_t thread;
    const struct step *steps;
    int step_count, served;
    char requests[STEPS_MAX][REQUEST_BYTES];
};

/* Digests are of these tokens under a model_id of zeros, computed elsewhere (Python's hashlib). */
#define ZEROS      "0000000000000000000000000000000000000000000000000000000000000000"
#define DIGEST_123 "f713afc22b399b0f475f8aac35bf8c13"
#define DIGEST_6   "fee1cd74d37fc4c608c85f6959d4c460" /* 1 2 3 5 11 12 */
#define DIGEST_5   "a85a40e6dc3dc665f671315a6fcb424f" /* 1 2 3 5 20 */

extern const char model[], created[];
extern const int32_t prompt[3];      /* 1 2 3 */
extern const int32_t tree_tokens[4]; /* {5 {10, 11 {12}}} */
extern const int32_t tree_parents[4];
extern const char round_1[]; /* accepts 11 12 of that tree, and draws 77 */

/* The two steps in front of every session's. */
#define OPENING                                                                                    \
    {.status = "200 OK", .type = "application/json", .body = model},                               \
    {                                                                                              \
        .status = "201 Created", .type = "application/json", .body = created                       \
    }

/* A server, a client of it, and a session that it has opened. */
struct scene {
    struct server server;
    struct tv_client *client;
    struct tv_client_session *session;
};

struct tv_client_session *begin(struct scene *scene, const struct step *steps, int count);
/* Behind stop: what of the scene is the client's. */
void end(struct scene *scene);

void start(struct server *server, const struct step *steps, int count);
void stop(struct server *server);
struct tv_client *client_of(const struct server *server);
struct tv_client_session *session_of(struct tv_client *client);
void assert_fresh(const struct tv_client_session *session);
int64_t now_ms(void);

#endif
