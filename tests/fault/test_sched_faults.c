/*
 * test_sched_faults.c - a scheduler whose n-th allocation or thread fails, from submit to answer.
 *
 * After each failure: a problem with committed false (or, where not even that could be written, no
 * answer at all), the session as it was, no block left, and the same body succeeds afterwards. A
 * round that did commit is never denied.
 */
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "faults.h"
#include "test_sched_fixture.h"

#define BODY_BYTES 4096

static void a_start_that_fails_leaves_nothing(void **state)
{
    static const unsigned kinds[] = {FAULT_MEMORY, FAULT_THREAD, FAULT_RANDOM, FAULT_CLOCK};
    static const int expected[] = {-ENOMEM, -EAGAIN, -EIO, -EINVAL};
    struct fixture fixture;
    (void)state;
    fixture_start(&fixture);
    for (size_t k = 0; k < sizeof kinds / sizeof kinds[0]; k++) {
        for (int n = 1;; n++) {
            struct tv_sched *sched = NULL;
            int64_t blocks = fault_blocks();
            fault_arm(kinds[k], n);
            int rc = tv_sched_create(&fixture.config, fixture.engine, NULL, &fixture.stats, &sched);
            int failed = fault_disarm();
            assert_int_equal(rc, failed ? expected[k] : 0);
            if (failed) {
                assert_null(sched);
            }
            tv_sched_destroy(sched);
            assert_int_equal(fault_blocks(), blocks);
            if (!failed) {
                assert_true(n > 1);
                break;
            }
        }
    }
    fixture_stop(&fixture);
}

/* What a failed call may answer: a problem that says what happened, or nothing. */
static void assert_denied(struct tv_call *call)
{
    if (call->reply.body.failed != 0) {
        assert_int_equal(call->reply.body.failed, -ENOMEM);
        assert_true(call->reply.http_status >= 400);
        return;
    }
    assert_true(call->reply.http_status == 500 || call->reply.http_status == 503);
    assert_refused(call, call->reply.http_status,
                   call->reply.http_status == 500 ? "internal" : "overloaded");
}

/* The body of a round that goes on from where the client is. */
struct round_form {
    const char *name;
    enum tv_call_kind kind;
    const char *rest; /* behind expected_len; NULL: a tree of three nodes that are all accepted */
    const char *want; /* of a verify */
    int32_t commits;
};

static void round_body(struct fixture *fixture, const struct client *client,
                       const struct round_form *form, char *ret_body)
{
    if (form->kind == TV_CALL_VERIFY) {
        (void)client_chain(fixture, client, 3, ret_body, BODY_BYTES);
        size_t used = strlen(ret_body) - 1; /* before the closing brace */
        (void)snprintf(ret_body + used, BODY_BYTES - used, "%s}", form->want);
        return;
    }
    (void)snprintf(ret_body, BODY_BYTES, "{\"seq\":%d,\"epoch\":\"%s\",\"expected_len\":%d,%s}",
                   client->seq, client->epoch, client->len, form->rest);
}

/* An extend by tokens 5, 6 with the pending one before them. */
static void client_extended(struct fixture *fixture, struct client *client)
{
    const int32_t added[] = {client->pending, 5, 6};
    for (int i = 0; i < 3; i++) {
        client->tokens[client->len++] = added[i];
        tv_digest_push(&client->digest, added[i]);
    }
    client->pending = tv_fixed_engine_token(fixture->engine, client->len);
    client->seq++;
}

static void round_sweep(struct fixture *fixture, struct client *client,
                        const struct round_form *form)
{
    char body[BODY_BYTES];
    int sizes = 0;
    for (int n = 1;; n++) {
        int64_t blocks = fault_blocks();
        round_body(fixture, client, form, body);
        struct tv_call *call = call_make(fixture, form->kind, client->id, "%s", body);
        fault_arm(FAULT_MEMORY, n);
        call_start(fixture, call);
        (void)call_wait(call);
        if (!fault_disarm()) {
            sizes = n;
            assert_reply(call, 200);
            call_free(call);
            break;
        }
        assert_denied(call);
        call_free(call);
        client_check(fixture, client);
        assert_int_equal(fault_blocks(), blocks);
    }
    if (form->kind == TV_CALL_EXTEND) {
        client_extended(fixture, client);
    } else if (form->kind == TV_CALL_ROLLBACK) {
        client_roll(client, 10, -1);
    } else {
        client_advance(fixture, client, form->commits);
    }
    client_check(fixture, client);
    print_message("%s: %d allocations\n", form->name, sizes - 1);
    assert_true(sizes > (form->kind == TV_CALL_ROLLBACK ? 3 : 4));
}

static void rounds_that_fail_change_nothing(void **state)
{
    static const struct round_form forms[] = {
        {"verify", TV_CALL_VERIFY, NULL, "", 3},
        {"verify with top-k", TV_CALL_VERIFY, NULL,
         ",\"want\":{\"top_k\":5,\"rows\":\"all\",\"logprobs\":true}", 3},
        {"verify with logits", TV_CALL_VERIFY, NULL,
         ",\"want\":{\"logits\":{\"rows\":\"all\",\"dtype\":\"bf16\"}}", 3},
        {"verify with logits to fetch", TV_CALL_VERIFY, NULL,
         ",\"want\":{\"logits\":{\"rows\":\"path\",\"via\":\"fetch\"}}", 3},
        {"decode", TV_CALL_DECODE, "\"max_tokens\":6", NULL, 6},
        {"rollback", TV_CALL_ROLLBACK, "\"len\":10", NULL, 0},
        {"extend", TV_CALL_EXTEND, "\"tokens\":[5,6],\"keep_pending\":true", NULL, 3},
    };
    struct fixture *fixture = *state;
    struct client client;
    client_open(fixture, &client, 40, "");
    for (int warm = 0; warm < 2; warm++) { /* what the fixed engine and a session take only once */
        char body[BODY_BYTES];
        round_body(fixture, &client, &forms[2 + warm], body);
        expect(fixture, 200, TV_CALL_VERIFY, client.id, "%s", body);
        client_advance(fixture, &client, 3);
    }
    for (size_t i = 0; i < sizeof forms / sizeof forms[0]; i++) {
        struct client fresh;
        char body[BODY_BYTES];
        client_open(fixture, &fresh, 40, "");
        round_body(fixture, &fresh, &forms[0], body); /* so that an answer is kept throughout */
        expect(fixture, 200, TV_CALL_VERIFY, fresh.id, "%s", body);
        client_advance(fixture, &fresh, 3);
        round_sweep(fixture, &fresh, &forms[i]);
    }
}

struct plain_form {
    const char *name;
    enum tv_call_kind kind;
    const char *body;
    int status, takes_session;
};

static const struct plain_form plain_forms[] = {
    {"create", TV_CALL_CREATE, "{\"tokens\":[1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17]}", 201, 0},
    {"create with a key", TV_CALL_CREATE, "{\"tokens\":[1,2,3]}", 201, 0},
    {"one-shot", TV_CALL_ONESHOT,
     "{\"tokens\":[1,2,3],\"tree\":{\"tokens\":[4,5],\"parents\":[-1,0]},"
     "\"want\":{\"top_k\":3,\"logits\":{}}}",
     200, 0},
    {"score", TV_CALL_SCORE, "{\"tokens\":[1,2,3],\"tree\":{\"tokens\":[4,5],\"parents\":[-1,0]}}",
     200, 0},
    {"fork", TV_CALL_FORK, NULL, 201, 1},
    {"batch", TV_CALL_BATCH, "{\"items\":[{},{\"seq\":1}]}", 200, 0},
    {"state", TV_CALL_STATE, NULL, 200, 1},
    {"list", TV_CALL_LIST, NULL, 200, 0},
    {"renew", TV_CALL_RENEW, "{\"lease_s\":100}", 200, 1},
    {"tensor", TV_CALL_TENSOR, NULL, 200, 1},
    {"events", TV_CALL_EVENTS, NULL, 200, 1},
    {"model", TV_CALL_MODEL, NULL, 200, 0},
    {"ready", TV_CALL_READY, NULL, 200, 0},
    {"health", TV_CALL_HEALTH, NULL, 200, 0},
    {"status", TV_CALL_STATUS, NULL, 200, 0},
    {"parity totals", TV_CALL_PARITY_TOTALS, NULL, 200, 0},
    {"a reproducer that is not there", TV_CALL_PARITY_VIOLATION, NULL, 404, 0},
};

static int is_keyed(const struct plain_form *form)
{
    return strcmp(form->name, "create with a key") == 0;
}

static struct tv_call *plain_call(struct fixture *fixture, const struct client *client,
                                  const struct plain_form *form)
{
    const char *session = form->takes_session ? client->id : "";
    if (form->kind == TV_CALL_FORK) {
        return call_make(fixture, TV_CALL_FORK, session, "{\"epoch\":\"%s\"}", client->epoch);
    }
    struct tv_call *call = form->body != NULL
                               ? call_make(fixture, form->kind, session, "%s", form->body)
                               : call_make(fixture, form->kind, session, NULL);
    if (is_keyed(form)) {
        (void)snprintf(call->key, sizeof call->key, "key");
    }
    call->request.tail = form->kind == TV_CALL_STATE ? 40 : 0;
    call->request.seq = form->kind == TV_CALL_TENSOR ? 1 : 0;
    call->request.deep = form->kind == TV_CALL_READY;
    return call;
}

static void plain_sweep(struct fixture *fixture, const struct client *client,
                        const struct plain_form *form)
{
    char created[32] = "";
    int64_t idle = fault_blocks();
    for (int n = 1;; n++) {
        struct tv_call *call = plain_call(fixture, client, form);
        fault_arm(FAULT_MEMORY, n);
        call_start(fixture, call);
        (void)call_wait(call);
        int failed = fault_disarm();
        if (failed) {
            assert_denied(call);
        } else {
            assert_reply(call, form->status);
            if (form->status == 201) {
                reply_text(call, "session", created, sizeof created);
            }
        }
        call_free(call);
        client_check(fixture, client);
        if (!failed) {
            print_message("%s: %d allocations\n", form->name, n - 1);
            assert_true(n > 1);
            break;
        }
        fault_settle(idle); /* the worker buries a create's session */
        assert_int_equal(fixture->sched->table.count, 1);
    }
    if (created[0] != '\0') {
        expect(fixture, 204, TV_CALL_DELETE, created, NULL);
    }
    fault_settle(idle + is_keyed(form)); /* the answer that a repeat would get */
    assert_int_equal(tv_sched_in_flight(fixture->sched), 0);
}

static void calls_without_a_round_leave_nothing(void **state)
{
    struct fixture *fixture = *state;
    struct client client;
    char body[BODY_BYTES];
    client_open(fixture, &client, 40, "");
    (void)client_chain(fixture, &client, 3, body, sizeof body);
    body[strlen(body) - 1] = '\0';
    expect(fixture, 200, TV_CALL_VERIFY, client.id,
           "%s,\"want\":{\"logits\":{\"rows\":\"all\",\"via\":\"fetch\"}}}", body);
    client_advance(fixture, &client, 3);
    for (size_t i = 0; i < sizeof plain_forms / sizeof plain_forms[0]; i++) {
        plain_sweep(fixture, &client, &plain_forms[i]);
    }
}

/* Refusals of a round, with the state and the tail that they bring. */
static void refusals_stay_what_they_are(void **state)
{
    static const struct {
        int32_t seq, len_off;
        int status;
        const char *code;
    } cases[] = {{0, -3, 409, "length-mismatch"}, {2, 0, 409, "seq-gap"}};
    struct fixture *fixture = *state;
    struct client client;
    client_open(fixture, &client, 40, "");
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        for (int n = 1;; n++) {
            int64_t blocks = fault_blocks();
            struct tv_call *call =
                call_make(fixture, TV_CALL_DECODE, client.id,
                          "{\"seq\":%d,\"epoch\":\"%s\",\"expected_len\":%d,\"max_tokens\":1}",
                          client.seq + cases[i].seq, client.epoch, client.len + cases[i].len_off);
            fault_arm(FAULT_MEMORY, n);
            call_start(fixture, call);
            (void)call_wait(call);
            int failed = fault_disarm();
            if (n == 1) { /* not even a job: nothing was looked at */
                assert_denied(call);
            } else {
                assert_refused(call, cases[i].status, cases[i].code);
                assert_int_equal(reply_has(call, "session_state/tail"), !failed);
            }
            call_free(call);
            client_check(fixture, &client);
            assert_int_equal(fault_blocks(), blocks);
            if (!failed) {
                assert_true(n > 4);
                break;
            }
        }
    }
}

/* A replay without memory is no answer at all: a problem would say that nothing was committed. */
static void a_committed_round_is_never_denied(void **state)
{
    struct fixture *fixture = *state;
    struct client client;
    char body[BODY_BYTES];
    client_open(fixture, &client, 40, "");
    (void)client_chain(fixture, &client, 3, body, sizeof body);
    expect(fixture, 200, TV_CALL_VERIFY, client.id, "%s", body);
    client_advance(fixture, &client, 3);
    for (int n = 1;; n++) {
        struct tv_call *call = call_make(fixture, TV_CALL_VERIFY, client.id, "%s", body);
        fault_arm(FAULT_MEMORY, n);
        call_start(fixture, call);
        (void)call_wait(call);
        int failed = fault_disarm();
        if (failed && n > 1) { /* the first is the job: an ordinary refusal of the retry */
            assert_int_equal(call->reply.body.failed, -ENOMEM);
        } else if (!failed) {
            assert_reply(call, 200);
            assert_int_equal(reply_flag(call, "replayed"), 1);
        }
        call_free(call);
        client_check(fixture, &client);
        if (!failed) {
            assert_true(n > 2);
            return;
        }
    }
}

/* The round, a retry that joined it, and somebody who waits for it. */
static void a_joined_round_answers_all_or_denies_none(void **state)
{
    struct fixture *fixture = *state;
    struct client client;
    char body[BODY_BYTES];
    int denied = 0, silent = 0;
    client_open(fixture, &client, 40, "");
    for (int n = 1;; n++) {
        struct tv_call *calls[3];
        (void)client_chain(fixture, &client, 2, body, sizeof body);
        calls[0] = call_make(fixture, TV_CALL_VERIFY, client.id, "%s", body);
        calls[1] = call_make(fixture, TV_CALL_VERIFY, client.id, "%s", body);
        calls[2] = call_make(fixture, TV_CALL_ROUND, client.id, NULL);
        calls[2]->request.seq = client.seq;
        calls[2]->request.wait_ms = 60000;
        tv_fixed_engine_hold(fixture->engine, 1);
        call_start(fixture, calls[0]);
        tv_fixed_engine_await_held(fixture->engine);
        call_start(fixture, calls[1]);
        call_start(fixture, calls[2]);
        fault_arm(FAULT_MEMORY, n);
        tv_fixed_engine_hold(fixture->engine, 0);
        for (int i = 0; i < 3; i++) {
            (void)call_wait(calls[i]);
        }
        int failed = fault_disarm();
        if (calls[0]->reply.http_status == 200) { /* it committed */
            client_advance(fixture, &client, 2);
            for (int i = 1; i < 3; i++) {
                if (calls[i]->reply.body.failed != 0) {
                    silent++;
                } else {
                    assert_reply(calls[i], 200);
                    assert_int_equal(reply_flag(calls[i], "replayed"), 1);
                }
            }
        } else {
            assert_true(failed);
            assert_denied(calls[0]);
            assert_denied(calls[1]);
            assert_refused(calls[2], 404, "round-not-found");
            denied++;
        }
        for (int i = 0; i < 3; i++) {
            call_free(calls[i]);
        }
        client_check(fixture, &client);
        if (!failed) {
            break;
        }
        if (client.len > 400) {
            expect(fixture, 204, TV_CALL_DELETE, client.id, NULL);
            client_open(fixture, &client, 40, "");
        }
    }
    assert_true(denied > 3);
    assert_true(silent >= 2);
}

#define CASE(name) cmocka_unit_test_setup_teardown(name, fixture_setup, fixture_teardown)

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_start_that_fails_leaves_nothing),
        CASE(rounds_that_fail_change_nothing),
        CASE(calls_without_a_round_leave_nothing),
        CASE(refusals_stay_what_they_are),
        CASE(a_committed_round_is_never_denied),
        CASE(a_joined_round_answers_all_or_denies_none),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
