/*
 * test_sched_fixture.h - a scheduler on the engine with fixed answers, and calls made from JSON.
 *
 * What the tests of sched/ share; no sockets.
 */
#ifndef TV_TESTS_SCHED_FIXTURE_H
#define TV_TESTS_SCHED_FIXTURE_H

#include <stdint.h>

#include "base/digest.h"
#include "fixed_engine.h"
#include "sched/job.h"

struct fixture {
    struct tv_config config;
    struct tv_engine *engine;
    struct tv_stats stats;
    struct tv_sched *sched;
    char principal[33]; /* of the calls that are made from now on */
};

/* vocab 307, context 512, trees of 64 nodes, 4 rounds a launch, slices of 16. */
void fixture_start(struct fixture *fixture);
/* The same, and contexts have their rows in so many pages of 16. */
void fixture_start_pages(struct fixture *fixture, int64_t pages);
void fixture_stop(struct fixture *fixture);
/* cmocka setup and teardown around them; *state is a struct fixture. */
int fixture_setup(void **state);
/* A row of logits is large: vocab 6000. */
int fixture_setup_wide(void **state);
int fixture_teardown(void **state);

/* TV_TEST_SCALE (a factor, default 1) times `count`, at least 1. */
int32_t fixture_scaled(int32_t count);

/* A call of `kind` on `session` ("" for none) with this body (NULL: none); not yet submitted. A
 * body that the decoder refuses fails the test. */
struct tv_call *call_make(struct fixture *fixture, enum tv_call_kind kind, const char *session,
                          const char *format, ...) __attribute__((format(printf, 4, 5)));
/* Submit; `call_wait` returns when it is complete. */
void call_start(struct fixture *fixture, struct tv_call *call);
int call_is_done(struct tv_call *call);
struct tv_call *call_wait(struct tv_call *call);
void call_free(struct tv_call *call);
/* Make, submit, wait; *format as above. */
struct tv_call *ask(struct fixture *fixture, enum tv_call_kind kind, const char *session,
                    const char *format, ...) __attribute__((format(printf, 4, 5)));
/* Make, submit, wait, check the status, free. */
void expect(struct fixture *fixture, int http_status, enum tv_call_kind kind, const char *session,
            const char *format, ...) __attribute__((format(printf, 5, 6)));

/* Members of the answer by path, "session_state/committed_len"; absent ones fail the test, unless
 * asked for by reply_has. null reads as -1. */
int64_t reply_int(const struct tv_call *call, const char *path);
void reply_text(const struct tv_call *call, const char *path, char *ret_text, size_t bytes);
int32_t reply_ints(const struct tv_call *call, const char *path, int32_t *ret_items, int32_t max);
int reply_has(const struct tv_call *call, const char *path);
int reply_mentions(const struct tv_call *call, const char *text);
int reply_flag(const struct tv_call *call, const char *path);
/* Status and problem code of a refusal, committed false. */
void assert_refused(const struct tv_call *call, int http_status, const char *code);
#define assert_reply(call, status) assert_int_equal((call)->reply.http_status, status)

/* A client: what a session should be, kept by the test. */
struct client {
    char id[32], epoch[17];
    int32_t tokens[4096];
    int32_t len, pending, seq; /* seq: the next one */
    struct tv_digest digest;
};
/* Create with `count` prompt tokens 1, 2, 3 ..; options is a JSON fragment such as
 * ",\"lease_s\":5".
 */
void client_open(struct fixture *fixture, struct client *client, int32_t count,
                 const char *options);
/* The body of a verify of a chain of `count` nodes that the engine accepts whole. */
const char *client_chain(struct fixture *fixture, const struct client *client, int32_t count,
                         char *ret_body, size_t bytes);
/* The round committed `count` tokens: the pending one and what the engine draws after it. */
void client_advance(struct fixture *fixture, struct client *client, int32_t count);
/* A rollback went to `len`, with this token pending there (-1: the one that stood there). */
void client_roll(struct client *client, int32_t len, int32_t pending);
/* GET state says what the client believes; the context's length too. */
void client_check(struct fixture *fixture, const struct client *client);

/* A verify of a chain of `count` nodes, submitted. */
struct tv_call *call_chain(struct fixture *fixture, const struct client *client, int32_t count);
/* The same, under way inside the engine, which is held. */
struct tv_call *call_running(struct fixture *fixture, struct client *client, int32_t count);
/* Two clients of 5 and 6 tokens, and such a call of the first. */
struct tv_call *pair_running(struct fixture *fixture, struct client *running, struct client *other,
                             int32_t count);
/* As many as there are clients, of 5, 6, .. tokens. */
struct tv_call *first_running(struct fixture *fixture, struct client *clients, int32_t client_count,
                              int32_t count);
/* Let the engine go on, await the call's answer, free it. */
void call_release(struct fixture *fixture, struct tv_call *call, int http_status);

#endif
