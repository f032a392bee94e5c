/*
 * test_sched_budget.c - which drafts count in the share that one principal may have rejected: those
 * of rounds that nobody settles and of one-shots too; and who goes on when it is used up.
 *
 * test_sched_fair.c has the share itself.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>

#include <cmocka.h>

#include "test_sched_fixture.h"

#define NODES     64
#define LEAST     (TV_SCHED_REJECT_NODES / (NODES - 1))
#define TREE_TEXT (NODES * 8 + 64)

static int start(void **state)
{
    int rc = fixture_setup(state);
    struct fixture *fixture = *state;
    fixture->config.principal_rejected = 0.98; /* nobody has called yet */
    return rc;
}

/* A star on `pending` whose drafts are all wrong behind `len` tokens. */
static const char *wrong_tree(struct fixture *fixture, int32_t len, int32_t pending,
                              char ret_text[TREE_TEXT])
{
    int32_t right = tv_fixed_engine_token(fixture->engine, len + 1);
    size_t at = (size_t)snprintf(ret_text, TREE_TEXT, "{\"tokens\":[%d", pending);
    for (int32_t i = 1; i < NODES; i++) {
        at += (size_t)snprintf(ret_text + at, TREE_TEXT - at, ",%d", (right + i) % 307);
    }
    at += (size_t)snprintf(ret_text + at, TREE_TEXT - at, "],\"parents\":[-1");
    for (int32_t i = 1; i < NODES; i++) {
        at += (size_t)snprintf(ret_text + at, TREE_TEXT - at, ",0");
    }
    (void)snprintf(ret_text + at, TREE_TEXT - at, "]}"); /* fits */
    return ret_text;
}

static struct tv_call *wrong_round(struct fixture *fixture, const struct client *client,
                                   const char *members)
{
    char tree[TREE_TEXT];
    return ask(fixture, TV_CALL_VERIFY, client->id,
               "{\"seq\":%d,\"epoch\":\"%s\",\"expected_len\":%d,\"tree\":%s%s}", client->seq,
               client->epoch, client->len, wrong_tree(fixture, client->len, client->pending, tree),
               members);
}

static struct tv_call *wrong_oneshot(struct fixture *fixture)
{
    char tree[TREE_TEXT];
    return ask(fixture, TV_CALL_ONESHOT, "", "{\"tokens\":[1,2,3,4,5],\"tree\":%s}",
               wrong_tree(fixture, 5, 7, tree));
}

/* Nobody says what becomes of a round, and its session is deleted. */
static void b53_deleting_does_not_save_the_budget(void **state)
{
    struct fixture *fixture = *state;
    int32_t rounds = 0;
    for (;; rounds++) {
        struct client hostile;
        assert_true(rounds < 10 * LEAST);
        client_open(fixture, &hostile, 5, "");
        struct tv_call *call = wrong_round(fixture, &hostile, ",\"commit\":\"hold\"");
        int refused = call->reply.http_status != 200;
        if (refused) {
            assert_refused(call, 429, "work-budget");
        }
        call_free(call);
        call = ask(fixture, TV_CALL_DELETE, hostile.id, NULL);
        assert_reply(call, 204);
        call_free(call);
        if (refused) {
            break;
        }
    }
    assert_in_range(rounds, LEAST, 3 * LEAST);
}

static void b53_one_shots_do_not_save_the_budget(void **state)
{
    struct fixture *fixture = *state;
    int32_t rounds = 0;
    struct tv_call *call = wrong_oneshot(fixture);
    while (call->reply.http_status == 200) {
        assert_true(rounds < 10 * LEAST);
        call_free(call);
        rounds++;
        call = wrong_oneshot(fixture);
    }
    assert_refused(call, 429, "work-budget");
    call_free(call);
    assert_in_range(rounds, LEAST, 3 * LEAST);
}

/* Without drafts nothing is drafted in vain: the plain step that is left to such a client. */
static void a_round_without_drafts_goes_on(void **state)
{
    struct fixture *fixture = *state;
    struct client client;
    client_open(fixture, &client, 5, "");
    struct tv_call *call = wrong_round(fixture, &client, "");
    while (call->reply.http_status == 200) {
        call_free(call);
        client_advance(fixture, &client, 1);
        call = wrong_round(fixture, &client, "");
    }
    assert_refused(call, 429, "work-budget");
    call_free(call);
    call = call_wait(call_chain(fixture, &client, 1));
    assert_reply(call, 200);
    call_free(call);
    client_advance(fixture, &client, 1);
    call = ask(fixture, TV_CALL_ONESHOT, "",
               "{\"tokens\":[1,2,3],\"tree\":{\"tokens\":[4],\"parents\":[-1]}}");
    assert_reply(call, 200);
    call_free(call);
    call = wrong_round(fixture, &client, "");
    assert_refused(call, 429, "work-budget");
    call_free(call);
    client_check(fixture, &client);
}

#define CASE(name) cmocka_unit_test_setup_teardown(name, start, fixture_teardown)

int main(void)
{
    const struct CMUnitTest tests[] = {
        CASE(b53_deleting_does_not_save_the_budget),
        CASE(b53_one_shots_do_not_save_the_budget),
        CASE(a_round_without_drafts_goes_on),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
