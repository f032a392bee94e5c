/*
 * test_sched_model.c - random operations on sessions against a plain array model.
 *
 * After every operation the committed tokens, length, digest, digests at page borders, pending
 * token and the engine's own length are what the model says; at the end every context is closed.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/clock.h"
#include "test_sched_fixture.h"

#define CLIENTS 6
#define LEN_MAX 440 /* the model ends at 512 */
#define PAGE    16  /* of the fixture */

struct world {
    struct fixture *fixture;
    struct client clients[CLIENTS];
    char last[CLIENTS][4096]; /* the body of the last round that committed, or "" */
    enum tv_call_kind last_kind[CLIENTS];
    uint64_t random;
};

static int32_t below(struct world *world, int32_t limit)
{
    world->random = world->random * 6364136223846793005u + 1442695040888963407u;
    return (int32_t)((world->random >> 33) % (uint64_t)limit);
}

static void reopen(struct world *world, int32_t i)
{
    struct client *client = &world->clients[i];
    if (client->id[0] != '\0') {
        expect(world->fixture, 204, TV_CALL_DELETE, client->id, NULL);
        expect(world->fixture, 404, TV_CALL_STATE, client->id, NULL);
    }
    client_open(world->fixture, client, below(world, 70) + 1, "");
    world->last[i][0] = '\0';
}

/* A random tree in which a chain of `right` nodes is what the engine draws, with wrong leaves. */
static int32_t random_tree(struct world *world, const struct client *client, char *tokens,
                           char *parents, size_t bytes)
{
    int32_t right = below(world, 8) + 1, count = 1, at = 0;
    int t = snprintf(tokens, bytes, "%d", client->pending);
    int p = snprintf(parents, bytes, "-1");
    for (int32_t depth = 1; depth < right || count == 1; depth++) {
        int32_t drawn = tv_fixed_engine_token(world->fixture->engine, client->len + depth);
        int32_t wrong = below(world, 3), node = -1;
        for (int32_t k = 0; k <= wrong; k++) { /* siblings; the right one comes last */
            int32_t token = k == wrong && depth < right ? drawn : (drawn + k + 1) % 307;
            t += snprintf(tokens + t, bytes - (size_t)t, ",%d", token);
            p += snprintf(parents + p, bytes - (size_t)p, ",%d", at);
            node = count++;
        }
        at = node;
        if (depth >= right) {
            break;
        }
    }
    return right;
}

static void commit(struct world *world, int32_t i, enum tv_call_kind kind, const char *body)
{
    (void)snprintf(world->last[i], sizeof world->last[i], "%s", body);
    world->last_kind[i] = kind;
}

static void round_verify(struct world *world, int32_t i)
{
    struct client *client = &world->clients[i];
    char tokens[1024], parents[1024], body[4096];
    int32_t right = random_tree(world, client, tokens, parents, sizeof tokens);
    (void)snprintf(body, sizeof body,
                   "{\"seq\":%d,\"epoch\":\"%s\",\"expected_len\":%d,\"tree\":{\"tokens\":[%s],"
                   "\"parents\":[%s]}}",
                   client->seq, client->epoch, client->len, tokens, parents);
    struct tv_call *call = ask(world->fixture, TV_CALL_VERIFY, client->id, "%s", body);
    assert_reply(call, 200);
    assert_int_equal(reply_int(call, "committed_len"), client->len + right);
    call_free(call);
    client_advance(world->fixture, client, right);
    commit(world, i, TV_CALL_VERIFY, body);
}

static void round_decode(struct world *world, int32_t i)
{
    struct client *client = &world->clients[i];
    char body[256];
    int32_t count = below(world, 20) + 1;
    (void)snprintf(body, sizeof body,
                   "{\"seq\":%d,\"epoch\":\"%s\",\"expected_len\":%d,\"max_tokens\":%d}",
                   client->seq, client->epoch, client->len, count);
    expect(world->fixture, 200, TV_CALL_DECODE, client->id, "%s", body);
    client_advance(world->fixture, client, count);
    commit(world, i, TV_CALL_DECODE, body);
}

static void round_extend(struct world *world, int32_t i)
{
    struct client *client = &world->clients[i];
    char body[1024], tokens[512] = "";
    int32_t count = below(world, 40) + 1, keep = below(world, 2), at = 0;
    if (keep) {
        client->tokens[client->len++] = client->pending;
        tv_digest_push(&client->digest, client->pending);
    }
    int32_t expected = client->len - keep;
    for (int32_t k = 0; k < count; k++) {
        int32_t token = below(world, 307);
        at += snprintf(tokens + at, sizeof tokens - (size_t)at, k > 0 ? ",%d" : "%d", token);
        client->tokens[client->len++] = token;
        tv_digest_push(&client->digest, token);
    }
    (void)snprintf(body, sizeof body,
                   "{\"seq\":%d,\"epoch\":\"%s\",\"expected_len\":%d,\"tokens\":[%s],"
                   "\"keep_pending\":%s}",
                   client->seq, client->epoch, expected, tokens, keep ? "true" : "false");
    expect(world->fixture, 200, TV_CALL_EXTEND, client->id, "%s", body);
    client->pending = tv_fixed_engine_token(world->fixture->engine, client->len);
    client->seq++;
    commit(world, i, TV_CALL_EXTEND, body);
}

static void retry(struct world *world, int32_t i)
{
    if (world->last[i][0] != '\0') {
        int64_t launches = tv_fixed_engine_launches(world->fixture->engine);
        struct tv_call *call =
            ask(world->fixture, world->last_kind[i], world->clients[i].id, "%s", world->last[i]);
        assert_reply(call, 200);
        assert_int_equal(reply_flag(call, "replayed"), 1);
        call_free(call);
        assert_int_equal(tv_fixed_engine_launches(world->fixture->engine), launches);
    }
}

/* A round that the engine fails at, or that the session refuses. */
static void failure(struct world *world, int32_t i)
{
    static const enum tv_code codes[] = {TV_KV_FULL, TV_NUMERIC_FAULT, TV_KERNEL_FAULT};
    const struct client *client = &world->clients[i];
    int32_t off = below(world, 3) - 1;
    if (off == 0) {
        tv_fixed_engine_fail(world->fixture->engine, codes[below(world, 3)], 1);
    }
    struct tv_call *call = ask(world->fixture, TV_CALL_DECODE, client->id,
                               "{\"seq\":%d,\"epoch\":\"%s\",\"expected_len\":%d,\"max_tokens\":3}",
                               client->seq, client->epoch, client->len + off);
    assert_true(call->reply.http_status >= 400);
    if (off != 0) {
        assert_refused(call, 409, "length-mismatch");
    }
    call_free(call);
}

/* A round that lies about one thing: refused with that thing's code, and nothing else happens. */
static void lie(struct world *world, int32_t i)
{
    static const struct {
        const char *code;
        int status, has_state;
    } lies[] = {{"seq-reused", 422, 0},       {"round-evicted", 410, 1},
                {"seq-gap", 409, 1},          {"seq-gap", 409, 1},
                {"epoch-changed", 409, 0},    {"digest-mismatch", 409, 1},
                {"pending-mismatch", 409, 1}, {"session-not-found", 404, 0}};
    const struct client *client = &world->clients[i];
    int what = below(world, 8);
    int32_t kept = client->seq - 1 < TV_REPLAY_ROUNDS_MAX ? client->seq - 1 : TV_REPLAY_ROUNDS_MAX;
    int32_t gone = client->seq - 1 - kept; /* evicted ones have the numbers up to it */
    int32_t seq = what == 0   ? (kept > 0 ? client->seq - 1 - below(world, kept) : 0)
                  : what == 1 ? (gone > 0 ? 1 + below(world, gone) : 0)
                  : what == 2 ? client->seq + 1 + below(world, 3)
                  : what == 3 ? INT32_MAX
                              : client->seq;
    if (seq < 1) {
        return; /* nothing was used up yet */
    }
    struct tv_call *call =
        call_make(world->fixture, TV_CALL_VERIFY, client->id,
                  "{\"seq\":%d,\"epoch\":\"%s\",\"expected_len\":%d%s,\"tree\":{\"tokens\":[%d],"
                  "\"parents\":[-1]},\"want\":{\"top_k\":7}}",
                  seq, what == 4 ? "fedcba9876543210" : client->epoch, client->len,
                  what == 5 ? ",\"expected_digest\":\"00000000000000000000000000000000\"" : "",
                  what == 6 ? (client->pending + 1) % 307 : client->pending);
    if (what == 7) {
        (void)snprintf(call->principal, sizeof call->principal, "somebody");
    }
    int64_t launches = tv_fixed_engine_launches(world->fixture->engine);
    call_start(world->fixture, call);
    assert_refused(call_wait(call), lies[what].status, lies[what].code);
    assert_int_equal(reply_has(call, "session_state"), lies[what].has_state);
    if (lies[what].has_state) {
        assert_int_equal(reply_int(call, "session_state/committed_len"), client->len);
        assert_int_equal(reply_int(call, "session_state/next_seq"), client->seq);
        assert_int_equal(reply_int(call, "session_state/pending"), client->pending);
    }
    call_free(call);
    assert_int_equal(tv_fixed_engine_launches(world->fixture->engine), launches);
}

/* The session itself is what the model says, down to the digests at page borders and the engine's
 * length. Nothing runs on it now, so under the lock its context may be looked at. */
static void session_check(struct world *world, const struct client *client)
{
    static const uint8_t model_id[32];
    struct tv_sched *sched = world->fixture->sched;
    struct tv_session *session = NULL;
    struct tv_digest digest;
    tv_sched_lock(sched);
    assert_int_equal(tv_sessions_find(&sched->table, client->id, "", tv_clock_us(), &session),
                     TV_OK);
    assert_int_equal(session->len, client->len);
    assert_int_equal(session->pending, client->pending);
    assert_int_equal(session->next_seq, client->seq);
    assert_int_equal(session->busy, 0);
    assert_memory_equal(session->tokens, client->tokens,
                        (size_t)client->len * sizeof *session->tokens);
    assert_int_equal(world->fixture->engine->ops->context_len(session->context), client->len);
    tv_digest_start(&digest, model_id, "", 0);
    for (int32_t t = 0; t < client->len; t++) {
        tv_digest_push(&digest, client->tokens[t]);
        if ((t + 1) % PAGE == 0) {
            assert_memory_equal(&digest, &session->borders[t / PAGE], sizeof digest);
        }
    }
    assert_memory_equal(&digest, &session->digest, sizeof digest);
    assert_memory_equal(&digest, &client->digest, sizeof digest);
    tv_sched_unlock(sched);
}

/* Through the whole scheduler, its queue and its worker: 2e5 operations; TV_TEST_SCALE=5 for all
 * of the million that test_accounting.c runs on the accounting alone. */
static void b10_random_operations_equal_an_array_model(void **state)
{
    struct world *world = calloc(1, sizeof *world);
    int32_t operations = fixture_scaled(200000);
    assert_non_null(world);
    world->fixture = *state;
    world->random = 20261129;
    for (int32_t i = 0; i < CLIENTS; i++) {
        reopen(world, i);
    }
    for (int32_t n = 0; n < operations; n++) {
        int32_t i = below(world, CLIENTS), what = below(world, 100);
        if (world->clients[i].len > LEN_MAX || what < 2) {
            reopen(world, i);
        } else if (what < 50) {
            round_verify(world, i);
        } else if (what < 62) {
            round_decode(world, i);
        } else if (what < 74) {
            round_extend(world, i);
        } else if (what < 82) {
            retry(world, i);
        } else if (what < 90) {
            lie(world, i);
        } else {
            failure(world, i);
        }
        session_check(world, &world->clients[i]);
        if (n % 16 == 0) { /* and so is what GET tells of it */
            client_check(world->fixture, &world->clients[i]);
        }
    }
    assert_int_equal(world->fixture->sched->table.count, CLIENTS);
    free(world);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(b10_random_operations_equal_an_array_model, fixture_setup,
                                        fixture_teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
