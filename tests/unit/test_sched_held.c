/*
 * test_sched_held.c - rounds that wait for the client's word: what it may say, what may run
 * meanwhile, and what becomes of the rows.
 */
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "test_sched_fixture.h"

/* A verify whose tree is the accepted chain 0, 1, 2 and a branch 3 (token 5), 4 (token 6) under
 * node 1; more members in `rest`. */
static struct tv_call *hold_make(struct fixture *fixture, const struct client *client,
                                 const char *rest)
{
    return call_make(
        fixture, TV_CALL_VERIFY, client->id,
        "{\"seq\":%d,\"epoch\":\"%s\",\"expected_len\":%d,\"tree\":{\"tokens\":[%d,%d,%d,5,6],"
        "\"parents\":[-1,0,1,1,3]}%s}",
        client->seq, client->epoch, client->len, client->pending,
        tv_fixed_engine_token(fixture->engine, client->len + 1),
        tv_fixed_engine_token(fixture->engine, client->len + 2), rest);
}

static struct tv_call *hold(struct fixture *fixture, const struct client *client, const char *rest)
{
    struct tv_call *call = hold_make(fixture, client, rest);
    call_start(fixture, call);
    return call_wait(call);
}

static struct tv_call *commit(struct fixture *fixture, const struct client *client,
                              const char *members)
{
    return ask(fixture, TV_CALL_COMMIT, client->id, "{\"seq\":%d,\"epoch\":\"%s\",%s}", client->seq,
               client->epoch, members);
}

static int64_t state_int(struct fixture *fixture, const struct client *client, const char *member)
{
    struct tv_call *call = ask(fixture, TV_CALL_STATE, client->id, NULL);
    assert_reply(call, 200);
    int64_t number = reply_int(call, member);
    call_free(call);
    return number;
}

/* The client's own choice: node 1's branch, and a token of its own behind it. */
static void client_branch(struct fixture *fixture, struct client *client, int32_t next)
{
    int32_t path[] = {client->pending, tv_fixed_engine_token(fixture->engine, client->len + 1), 5};
    for (int32_t i = 0; i < 3; i++) {
        client->tokens[client->len++] = path[i];
        tv_digest_push(&client->digest, path[i]);
    }
    client->pending = next;
}

static void assert_status(const struct tv_call *call, const char *status)
{
    char text[32];
    assert_reply(call, 200);
    reply_text(call, "status", text, sizeof text);
    assert_string_equal(text, status);
}

static void test_a_held_round_changes_nothing(void **state)
{
    struct fixture *fixture = *state;
    struct client client;
    int32_t items[8];
    client_open(fixture, &client, 20, "");
    struct tv_call *call = hold(fixture, &client, ",\"commit\":\"hold\"");
    assert_status(call, "held");
    assert_int_equal(reply_ints(call, "accepted/nodes", items, 8), 3);
    assert_int_equal(reply_ints(call, "new_tokens", items, 8), 3);
    assert_int_equal(reply_int(call, "committed_len"), 20);
    assert_int_equal(reply_int(call, "next_seq"), 2);
    assert_true(reply_flag(call, "lossless"));
    call_free(call);
    client.seq++;
    client_check(fixture, &client);
    assert_int_equal(state_int(fixture, &client, "held_seq"), 1);
    assert_int_equal(tv_fixed_engine_commits(fixture->engine), 0);
}

static void test_what_was_proposed_is_committed(void **state)
{
    struct fixture *fixture = *state;
    struct client client;
    char members[64];
    client_open(fixture, &client, 20, "");
    call_free(hold(fixture, &client, ",\"commit\":\"hold\""));
    client.seq++;
    (void)snprintf(members, sizeof members, "\"path\":[0,1,2],\"next\":%d",
                   tv_fixed_engine_token(fixture->engine, 23));
    for (int32_t i = 0; i < 2; i++) { /* the second is a retry */
        struct tv_call *call = commit(fixture, &client, members);
        assert_status(call, "committed");
        assert_int_equal(reply_int(call, "committed_len"), 23);
        assert_true(reply_flag(call, "lossless"));
        assert_int_equal(reply_flag(call, "replayed"), i);
        call_free(call);
    }
    client_advance(fixture, &client, 3);
    client_check(fixture, &client);
    assert_int_equal(state_int(fixture, &client, "held_seq"), -1);
    struct tv_call *next = call_chain(fixture, &client, 2); /* and the session goes on */
    assert_reply(call_wait(next), 200);
    call_free(next);
}

static void test_another_path_is_committed(void **state)
{
    struct fixture *fixture = *state;
    struct client client;
    int32_t items[8];
    client_open(fixture, &client, 20, "");
    call_free(hold(fixture, &client, ",\"commit\":\"hold\""));
    client.seq++;
    struct tv_call *call = commit(fixture, &client, "\"path\":[0,1,3],\"next\":99");
    assert_status(call, "committed");
    assert_int_equal(reply_ints(call, "accepted/nodes", items, 8), 3);
    assert_int_equal(reply_ints(call, "new_tokens", items, 8), 3);
    assert_true(items[1] == 5 && items[2] == 99);
    assert_false(reply_flag(call, "lossless"));
    call_free(call);
    client_branch(fixture, &client, 99);
    client.seq++;
    client_check(fixture, &client);
}

static void test_an_empty_path_discards(void **state)
{
    struct fixture *fixture = *state;
    struct client client;
    client_open(fixture, &client, 20, "");
    call_free(hold(fixture, &client, ",\"commit\":\"hold\""));
    client.seq++;
    struct tv_call *call = commit(fixture, &client, "\"path\":[]");
    assert_status(call, "committed");
    assert_int_equal(reply_int(call, "committed_len"), 20);
    assert_int_equal(reply_int(call, "pending"), client.pending);
    call_free(call);
    client.seq++;
    client_check(fixture, &client);
    struct tv_call *next = call_chain(fixture, &client, 4);
    assert_reply(call_wait(next), 200);
    call_free(next);
}

/* A client may not choose a path that leaves no room for the token behind it. */
static void test_a_path_ends_with_the_session(void **state)
{
    struct fixture *fixture = *state;
    struct client client;
    client_open(fixture, &client, 20, ",\"stop\":{\"max_len\":23}");
    struct tv_call *call = hold(fixture, &client, ",\"rule\":\"client\"");
    assert_status(call, "held");
    call_free(call);
    client.seq++;
    call = commit(fixture, &client, "\"path\":[0,1,3],\"next\":7");
    assert_refused(call, 422, "context-full");
    call_free(call);
    call = commit(fixture, &client, "\"path\":[0,1],\"next\":7");
    assert_status(call, "finished");
    assert_int_equal(reply_int(call, "committed_len"), 22);
    call_free(call);
}

static void test_rule_client_proposes_nothing(void **state)
{
    struct fixture *fixture = *state;
    struct client client;
    client_open(fixture, &client, 20, "");
    struct tv_call *call =
        hold(fixture, &client, ",\"rule\":\"client\",\"want\":{\"top_k\":2,\"rows\":\"all\"}");
    assert_status(call, "held");
    assert_int_equal(reply_int(call, "accepted"), -1); /* null, as the next two */
    assert_int_equal(reply_int(call, "pending"), -1);
    assert_int_equal(reply_int(call, "new_tokens"), -1);
    assert_int_equal(reply_int(call, "committed_len"), 20);
    assert_false(reply_flag(call, "lossless"));
    int32_t rows[8];
    assert_int_equal(reply_ints(call, "topk/rows", rows, 8), 5);
    call_free(call);
    client.seq++;
    call = commit(fixture, &client, "\"path\":[0,1,3],\"next\":7");
    assert_status(call, "committed");
    assert_false(reply_flag(call, "lossless"));
    call_free(call);
    client_branch(fixture, &client, 7);
    client.seq++;
    client_check(fixture, &client);
    call = hold(fixture, &client, ",\"rule\":\"client\",\"want\":{\"logprobs\":true}");
    assert_refused(call, 422, "wrong-value");
    call_free(call);
    /* the whole session may have the rule; without a tree the server draws as ever */
    client_open(fixture, &client, 20, ",\"sampling\":{\"rule\":\"client\"}");
    expect(fixture, 200, TV_CALL_DECODE, client.id,
           "{\"seq\":1,\"epoch\":\"%s\",\"expected_len\":20,\"max_tokens\":2}", client.epoch);
    client_advance(fixture, &client, 2);
    client_check(fixture, &client);
    call = hold(fixture, &client, "");
    assert_status(call, "held");
    call_free(call);
    call = hold(fixture, &client, ",\"commit\":\"auto\""); /* the body is the same: a replay */
    assert_status(call, "held");
    call_free(call);
    client.seq++;
    call = commit(fixture, &client, "\"path\":[]");
    assert_status(call, "committed");
    call_free(call);
    client.seq++;
    call = hold(fixture, &client, ",\"commit\":\"auto\""); /* it would be held all the same */
    assert_refused(call, 422, "wrong-value");
    assert_true(reply_mentions(call, "\"pointer\":\"/commit\""));
    call_free(call);
    client_check(fixture, &client);
    call = hold(fixture, &client, ",\"commit\":\"auto\",\"rule\":\"greedy\"");
    assert_status(call, "committed");
    call_free(call);
}

static void test_paths_that_are_none(void **state)
{
    static const char *const bad[] = {
        "\"path\":[0,2],\"next\":1",       /* 2 is no child of 0 */
        "\"path\":[0,1,4],\"next\":1",     /* nor 4 of 1 */
        "\"path\":[0,1,2,3],\"next\":1",   /* nor 3 of 2 */
        "\"path\":[0,1,3,4,5],\"next\":1", /* beyond the tree */
    };
    struct fixture *fixture = *state;
    struct client client;
    client_open(fixture, &client, 20, ",\"stop\":{\"token_ids\":[6],\"max_len\":24}");
    call_free(hold(fixture, &client, ",\"commit\":\"hold\""));
    client.seq++;
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        struct tv_call *call = commit(fixture, &client, bad[i]);
        assert_refused(call, 422, "wrong-value");
        call_free(call);
    }
    struct tv_call *call = commit(fixture, &client, "\"path\":[0,1,3,4],\"next\":1");
    assert_refused(call, 422, "wrong-value"); /* through a stop token */
    assert_true(reply_mentions(call, "/path/3"));
    call_free(call);
    client_check(fixture, &client);
    call = commit(fixture, &client, "\"path\":[0,1,3],\"next\":6");
    assert_status(call, "finished"); /* before it, at the limit: stop wins */
    char finish[16];
    reply_text(call, "finish", finish, sizeof finish);
    assert_string_equal(finish, "stop");
    call_free(call);
    client_branch(fixture, &client, 6);
    client.seq++;
    client_check(fixture, &client);
}

/* The first node under the pending token counts as any other. */
static void test_a_path_whose_first_draft_is_a_stop(void **state)
{
    struct fixture *fixture = *state;
    struct client client;
    char options[64], members[64], finish[16];
    int32_t stop = tv_fixed_engine_token(fixture->engine, 21);
    (void)snprintf(options, sizeof options, ",\"stop\":{\"token_ids\":[%d]}", stop);
    client_open(fixture, &client, 20, options);
    struct tv_call *call = hold(fixture, &client, ",\"commit\":\"hold\"");
    assert_status(call, "held");
    assert_int_equal(reply_int(call, "pending"), stop); /* so the walk ends before it too */
    call_free(call);
    client.seq++;
    call = commit(fixture, &client, "\"path\":[0,1],\"next\":1");
    assert_refused(call, 422, "wrong-value");
    assert_true(reply_mentions(call, "\"pointer\":\"/path/1\""));
    call_free(call);
    client_check(fixture, &client);
    (void)snprintf(members, sizeof members, "\"path\":[0],\"next\":%d", stop);
    call = commit(fixture, &client, members);
    assert_status(call, "finished");
    reply_text(call, "finish", finish, sizeof finish);
    assert_string_equal(finish, "stop");
    call_free(call);
    client_advance(fixture, &client, 1);
    client_check(fixture, &client);
}

static void test_what_may_run_meanwhile(void **state)
{
    struct fixture *fixture = *state;
    struct client client;
    client_open(fixture, &client, 20, "");
    call_free(hold(fixture, &client, ",\"commit\":\"hold\""));
    client.seq++;
    struct tv_call *call = call_chain(fixture, &client, 2);
    assert_refused(call_wait(call), 409, "round-held");
    assert_int_equal(reply_int(call, "session_state/held_seq"), 1);
    call_free(call);
    expect(fixture, 409, TV_CALL_EXTEND, client.id,
           "{\"seq\":2,\"epoch\":\"%s\",\"expected_len\":20,\"tokens\":[1]}", client.epoch);
    expect(fixture, 409, TV_CALL_DECODE, client.id,
           "{\"seq\":2,\"epoch\":\"%s\",\"expected_len\":20,\"max_tokens\":1}", client.epoch);
    expect(fixture, 409, TV_CALL_FORK, client.id, "{\"epoch\":\"%s\"}", client.epoch);
    expect(fixture, 200, TV_CALL_RENEW, client.id, "{\"lease_s\":60}");
    client_check(fixture, &client);
    expect(fixture, 200, TV_CALL_ROLLBACK, client.id,
           "{\"seq\":2,\"epoch\":\"%s\",\"expected_len\":20,\"len\":20}", client.epoch);
    client.seq++;
    client_check(fixture, &client);
    assert_int_equal(state_int(fixture, &client, "held_seq"), -1);
    call = commit(fixture, &client, "\"path\":[]");
    assert_refused(call, 404, "round-not-found");
    call_free(call);
    call = call_chain(fixture, &client, 2);
    assert_reply(call_wait(call), 200);
    call_free(call);
    call_free(hold(fixture, &client, ",\"commit\":\"hold\""));
    expect(fixture, 204, TV_CALL_DELETE, client.id, NULL);
}

/* The body of a one-node verify that settles round `seq` as the branch first. */
static struct tv_call *prev(struct fixture *fixture, const struct client *client, int32_t seq,
                            int32_t next)
{
    return ask(
        fixture, TV_CALL_VERIFY, client->id,
        "{\"seq\":%d,\"epoch\":\"%s\",\"expected_len\":%d,\"tree\":{\"tokens\":[%d],\"parents\":"
        "[-1]},\"commit_prev\":{\"seq\":%d,\"path\":[0,1,3],\"next\":%d}}",
        client->seq, client->epoch, client->len, client->pending, seq, next);
}

static void assert_ran(struct tv_call *call, int32_t len)
{
    assert_status(call, "committed");
    assert_int_equal(reply_int(call, "committed_len"), len);
    call_free(call);
}

/* A round of one node behind the held one, numbered `seq`, that guesses how that one ends. */
static struct tv_call *guess(struct fixture *fixture, const struct client *client, int32_t seq,
                             int32_t leaf, int32_t pending)
{
    struct tv_call *call =
        call_make(fixture, TV_CALL_VERIFY, client->id,
                  "{\"seq\":%d,\"epoch\":\"%s\",\"expected_len\":%d,\"tree\":{\"tokens\":[%d],"
                  "\"parents\":[-1]},\"if\":{\"seq\":%d,\"leaf\":%d,\"pending\":%d}}",
                  seq, client->epoch, client->len + leaf + 1, pending, seq - 1, leaf, pending);
    call_start(fixture, call);
    return call;
}

/* The same with every end that the proposal may have as an alternative. */
static struct tv_call *guess_all(struct fixture *fixture, const struct client *client, int32_t seq)
{
    char ends[512] = "";
    for (int32_t leaf = 0; leaf < 3; leaf++) {
        int32_t pending = tv_fixed_engine_token(fixture->engine, client->len + leaf + 1);
        size_t at = strlen(ends);
        (void)snprintf(ends + at, sizeof ends - at,
                       "%s{\"leaf\":%d,\"pending\":%d,\"tree\":{\"tokens\":[%d],\"parents\":[-1]}}",
                       leaf > 0 ? "," : "", leaf, pending, pending);
    }
    struct tv_call *call =
        call_make(fixture, TV_CALL_VERIFY, client->id,
                  "{\"seq\":%d,\"epoch\":\"%s\",\"if\":{\"seq\":%d},\"alternatives\":[%s]}", seq,
                  client->epoch, seq - 1, ends);
    call_start(fixture, call);
    return call;
}

static void assert_held(struct fixture *fixture, struct tv_call *call)
{
    assert_refused(call_wait(call), 409, "round-held");
    assert_int_equal(reply_int(call, "session_state/held_seq"), 1);
    assert_int_equal(reply_int(call, "session_state/next_seq"), 2);
    assert_int_equal(reply_int(call, "session_state/committed_len"), 20);
    call_free(call);
    tv_sched_lock(fixture->sched);
    assert_int_equal(fixture->sched->queue_count, 0); /* its place is free again */
    assert_int_equal(fixture->sched->in_flight, 0);
    tv_sched_unlock(fixture->sched);
}

/* Guess `which` of those that there are: the proposal itself, another leaf, another token, all. */
#define GUESSES 4
static struct tv_call *guess_of(struct fixture *fixture, const struct client *client, int32_t which)
{
    int32_t leaf = which == 1 ? 1 : 2;
    int32_t pending = tv_fixed_engine_token(fixture->engine, client->len + leaf + 1);
    return which == 3 ? guess_all(fixture, client, 2)
                      : guess(fixture, client, 2, leaf, which == 2 ? pending + 1 : pending);
}

/* How a held round ends is the client's to say: no guess about it holds, whether it comes when the
 * round is held or is staged behind it while it runs. Its number and its place are free after. */
static void test_a_guess_about_a_held_round(void **state)
{
    struct fixture *fixture = *state;
    struct client client;
    char members[64];
    for (int32_t which = 0; which < GUESSES; which++) {
        client_open(fixture, &client, 20, "");
        int64_t launches = tv_fixed_engine_launches(fixture->engine);
        int64_t commits = tv_fixed_engine_commits(fixture->engine);
        tv_fixed_engine_hold(fixture->engine, 1);
        struct tv_call *held = hold_make(fixture, &client, ",\"commit\":\"hold\"");
        call_start(fixture, held);
        tv_fixed_engine_await_held(fixture->engine);
        struct tv_call *staged = guess_of(fixture, &client, which);
        assert_false(call_is_done(staged));
        tv_fixed_engine_hold(fixture->engine, 0);
        assert_status(call_wait(held), "held");
        call_free(held);
        assert_held(fixture, staged);
        for (int32_t again = 0; again < 2; again++) { /* nothing was stored for the number */
            assert_held(fixture, guess_of(fixture, &client, which));
        }
        client.seq++;
        client_check(fixture, &client);
        assert_int_equal(tv_fixed_engine_launches(fixture->engine), launches + 1);
        assert_int_equal(tv_fixed_engine_commits(fixture->engine), commits);

        if (which % 2 == 0) { /* the same number settles it: with a round, or alone */
            client_branch(fixture, &client, 99);
            assert_ran(prev(fixture, &client, 1, 99), 24);
            client_advance(fixture, &client, 1);
        } else {
            (void)snprintf(members, sizeof members, "\"path\":[0,1,2],\"next\":%d",
                           tv_fixed_engine_token(fixture->engine, 23));
            assert_ran(commit(fixture, &client, members), 23);
            client_advance(fixture, &client, 3);
        }
        client_check(fixture, &client);
        struct tv_call *next = call_chain(fixture, &client, 4);
        assert_ran(call_wait(next), client.len + 4);
        client_advance(fixture, &client, 4);
        client_check(fixture, &client);
        expect(fixture, 204, TV_CALL_DELETE, client.id, NULL); /* the teardown counts contexts */
    }
}

/* What settles a round does not guess about it: the decoder refuses both in one body. */
static void test_commit_prev_goes_with_no_guess(void **state)
{
    static const char body[] =
        "{\"seq\":2,\"epoch\":\"0123456789abcdef\",\"expected_len\":23,\"tree\":{\"tokens\":[4],"
        "\"parents\":[-1]},\"if\":{\"seq\":1,\"leaf\":2,\"pending\":4},"
        "\"commit_prev\":{\"seq\":1,\"path\":[0,1,2],\"next\":4}}";
    struct fixture *fixture = *state;
    struct tv_call *call = tv_call_create();
    struct tv_problem problem = {0};
    assert_int_equal(tv_request_decode(TV_CALL_VERIFY, body, strlen(body),
                                       tv_sched_limits(fixture->sched), &call->request, &problem),
                     -EINVAL);
    assert_int_equal(problem.code, TV_WRONG_VALUE);
    assert_string_equal(problem.pointer, "/if");
    tv_problem_finish(&problem);
    tv_call_destroy(call);
}

static void test_commit_prev(void **state)
{
    struct fixture *fixture = *state;
    struct client client;
    client_open(fixture, &client, 20, "");
    call_free(hold(fixture, &client, ",\"commit\":\"hold\""));
    client.seq++;
    struct client before = client;
    client_branch(fixture, &client, 99);
    struct tv_call *call = prev(fixture, &client, 2, 99); /* another round is held */
    assert_refused(call, 404, "round-not-found");
    call_free(call);
    client.len--; /* as the client would count without the branch's last node */
    call = prev(fixture, &client, 1, 99);
    assert_refused(call, 409, "length-mismatch");
    call_free(call);
    client.len++;
    client_check(fixture, &before); /* a refusal settles nothing */
    assert_int_equal(state_int(fixture, &before, "held_seq"), 1);
    for (int32_t i = 0; i < 2; i++) {
        call = prev(fixture, &client, 1, 99);
        assert_status(call, "committed");
        assert_int_equal(reply_int(call, "committed_len"), 24);
        assert_int_equal(reply_flag(call, "replayed"), i);
        call_free(call);
    }
    client_advance(fixture, &client, 1);
    client_check(fixture, &client);
}

/* The round that settles fails after it has: the problem says so, and its retry need not. */
static void test_commit_prev_of_a_round_that_fails(void **state)
{
    struct fixture *fixture = *state;
    struct client client;
    char code[32];
    client_open(fixture, &client, 20, "");
    call_free(hold(fixture, &client, ",\"commit\":\"hold\""));
    client.seq++;
    client_branch(fixture, &client, 99);
    tv_fixed_engine_fail(fixture->engine, TV_KV_FULL, 1);
    struct tv_call *call = prev(fixture, &client, 1, 99);
    assert_reply(call, 503);
    reply_text(call, "code", code, sizeof code);
    assert_string_equal(code, "kv-full");
    assert_true(reply_flag(call, "committed"));
    call_free(call);
    client_check(fixture, &client);
    assert_int_equal(state_int(fixture, &client, "held_seq"), -1);
    call = prev(fixture, &client, 1, 98); /* settled otherwise */
    assert_refused(call, 404, "round-not-found");
    call_free(call);
    call = prev(fixture, &client, 1, 99);
    assert_status(call, "committed");
    call_free(call);
    client_advance(fixture, &client, 1);
    client_check(fixture, &client);
}

/* A held round that fails leaves no rows behind. */
static void test_a_held_round_that_fails(void **state)
{
    struct fixture *fixture = *state;
    struct client client;
    client_open(fixture, &client, 20, "");
    tv_fixed_engine_fail(fixture->engine, TV_NUMERIC_FAULT, 1);
    struct tv_call *call = hold(fixture, &client, ",\"commit\":\"hold\"");
    assert_refused(call, 500, "numeric-fault");
    call_free(call);
    client_check(fixture, &client);
    assert_int_equal(state_int(fixture, &client, "held_seq"), -1);
    call = call_chain(fixture, &client, 2);
    assert_reply(call_wait(call), 200);
    call_free(call);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, fixture_setup, fixture_teardown)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(test_a_held_round_changes_nothing),
        TEST(test_what_was_proposed_is_committed),
        TEST(test_another_path_is_committed),
        TEST(test_an_empty_path_discards),
        TEST(test_a_path_ends_with_the_session),
        TEST(test_rule_client_proposes_nothing),
        TEST(test_paths_that_are_none),
        TEST(test_a_path_whose_first_draft_is_a_stop),
        TEST(test_what_may_run_meanwhile),
        TEST(test_a_guess_about_a_held_round),
        TEST(test_commit_prev_goes_with_no_guess),
        TEST(test_commit_prev),
        TEST(test_commit_prev_of_a_round_that_fails),
        TEST(test_a_held_round_that_fails),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
