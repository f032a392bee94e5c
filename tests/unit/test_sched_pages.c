/*
 * test_sched_pages.c - rollback and fork through the scheduler: what they answer, refuse, store and
 * undo, on the engine with fixed answers; and that what follows is what a new session would draw,
 * with no page lost, on the real one.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "sched_real_fixture.h"

#define PROMPT 130 /* two pages of 64 and a bit */
#define DRAWN  20

static struct tv_call *roll(struct fixture *fixture, const struct client *client, int32_t len,
                            const char *options)
{
    return ask(fixture, TV_CALL_ROLLBACK, client->id,
               "{\"seq\":%d,\"epoch\":\"%s\",\"expected_len\":%d,\"len\":%d%s}", client->seq,
               client->epoch, client->len, len, options);
}

static void a_rollback_restores_every_length(void **state)
{
    static const int32_t lens[] = {69, 65, 64, 63, 48, 47, 17, 16, 15, 1};
    struct fixture *fixture = *state;
    struct client client;
    client_open(fixture, &client, 70, "");
    for (size_t i = 0; i < sizeof lens / sizeof lens[0]; i++) {
        struct tv_call *call = roll(fixture, &client, lens[i], "");
        assert_reply(call, 200);
        client_roll(&client, lens[i], -1);
        assert_int_equal(reply_int(call, "committed_len"), client.len);
        assert_int_equal(reply_int(call, "pending"), client.pending);
        assert_int_equal(reply_int(call, "next_seq"), client.seq);
        assert_int_equal(reply_flag(call, "replayed"), 0);
        call_free(call);
        client_check(fixture, &client);
    }
    /* it goes on from there: digests at borders are written anew */
    for (int32_t i = 0; i < 4; i++) {
        call_release(fixture, call_chain(fixture, &client, 12), 200);
        client_advance(fixture, &client, 12);
        client_check(fixture, &client);
    }
    assert_int_equal(tv_fixed_engine_launches(fixture->engine), 4);
}

static void a_rollback_is_a_round_like_any_other(void **state)
{
    struct fixture *fixture = *state;
    struct client client;
    char text[32];
    client_open(fixture, &client, 40, "");
    struct tv_call *call = roll(fixture, &client, 41, "");
    assert_refused(call, 422, "wrong-value");
    call_free(call);
    client_check(fixture, &client);
    client.len--; /* a client that is behind */
    call = roll(fixture, &client, 10, "");
    assert_refused(call, 409, "length-mismatch");
    assert_int_equal(reply_int(call, "session_state/committed_len"), 40);
    call_free(call);
    client.len++;
    /* the same seq and body, whatever its lease: the stored answer */
    call = roll(fixture, &client, 20, ",\"pending\":123");
    struct tv_call *again = roll(fixture, &client, 20, ",\"pending\":123,\"lease_s\":9");
    assert_reply(call, 200);
    assert_reply(again, 200);
    assert_int_equal(reply_flag(again, "replayed"), 1);
    assert_memory_equal(call->reply.body.data, again->reply.body.data,
                        call->reply.body.bytes - strlen("false}"));
    reply_text(call, "status", text, sizeof text);
    assert_string_equal(text, "committed");
    call_free(again);
    call_free(call);
    again = roll(fixture, &client, 21, ",\"pending\":123");
    assert_refused(again, 422, "seq-reused");
    call_free(again);
    client_roll(&client, 20, 123);
    client_check(fixture, &client);
    /* to where it is: only the pending token may change */
    call = roll(fixture, &client, 20, ",\"pending\":5");
    assert_reply(call, 200);
    call_free(call);
    client_roll(&client, 20, 5);
    client_check(fixture, &client);
    call_release(fixture, call_chain(fixture, &client, 3), 200);
    client_advance(fixture, &client, 3);
    client_check(fixture, &client);
    /* not while a round runs */
    struct tv_call *running = call_running(fixture, &client, 2);
    call = roll(fixture, &client, 5, "");
    assert_refused(call, 422, "seq-reused"); /* the running one has that number */
    call_free(call);
    client.seq++;
    call = roll(fixture, &client, 5, "");
    assert_refused(call, 409, "session-busy");
    call_free(call);
    client.seq--;
    call_release(fixture, running, 200);
    client_advance(fixture, &client, 2);
    client_check(fixture, &client);
}

static void a_rollback_reopens(void **state)
{
    struct fixture *fixture = *state;
    struct client client;
    char options[64], text[16];
    int32_t stop = tv_fixed_engine_token(fixture->engine, 14);
    (void)snprintf(options, sizeof options, ",\"stop\":{\"token_ids\":[%d],\"max_len\":20}", stop);
    client_open(fixture, &client, 12, options);
    call_release(fixture, call_chain(fixture, &client, 6), 200); /* stops at 14 */
    client_advance(fixture, &client, 2);
    client_check(fixture, &client);
    expect(fixture, 409, TV_CALL_DECODE, client.id,
           "{\"seq\":2,\"epoch\":\"%s\",\"expected_len\":14,\"max_tokens\":1}", client.epoch);
    struct tv_call *call = roll(fixture, &client, 14, ""); /* go on behind the stop token */
    assert_reply(call, 200);
    reply_text(call, "finish", text, sizeof text);
    assert_string_equal(text, "null");
    call_free(call);
    client_roll(&client, 14, -1);
    assert_int_equal(client.pending, stop);
    call_release(fixture, call_chain(fixture, &client, 8), 200); /* until there is no room */
    client_advance(fixture, &client, 5);
    client_check(fixture, &client);
    call = roll(fixture, &client, 19, ""); /* no room there for another token */
    assert_reply(call, 200);
    reply_text(call, "finish", text, sizeof text);
    assert_string_equal(text, "length");
    call_free(call);
    client_roll(&client, 19, -1);
    call = roll(fixture, &client, 18, "");
    assert_reply(call, 200);
    reply_text(call, "finish", text, sizeof text);
    assert_string_equal(text, "null");
    call_free(call);
    client_roll(&client, 18, -1);
    call_release(fixture, call_chain(fixture, &client, 1), 200);
    client_advance(fixture, &client, 1);
    client_check(fixture, &client);
}

static void fork_client(struct fixture *fixture, const struct client *parent, int32_t len,
                        const char *options, struct client *ret_child)
{
    struct tv_call *call =
        ask(fixture, TV_CALL_FORK, parent->id, "{\"epoch\":\"%s\"%s}", parent->epoch, options);
    assert_reply(call, 201);
    *ret_child = *parent;
    client_roll(ret_child, len, -1);
    ret_child->seq = 1;
    reply_text(call, "session", ret_child->id, sizeof ret_child->id);
    assert_string_not_equal(ret_child->id, parent->id);
    assert_int_equal(reply_int(call, "next_seq"), 1);
    assert_int_equal(reply_int(call, "committed_len"), len);
    assert_int_equal(reply_int(call, "cached_len"), len);
    assert_int_equal(reply_int(call, "pending"), ret_child->pending);
    call_free(call);
    client_check(fixture, ret_child);
    client_check(fixture, parent);
}

static void a_fork_goes_its_own_way(void **state)
{
    struct fixture *fixture = *state;
    struct client parent, same, shorter;
    char seed[24], mine[24];
    client_open(fixture, &parent, 40, ",\"sampling\":{\"seed\":\"99\"},\"lease_s\":600");
    call_release(fixture, call_chain(fixture, &parent, 5), 200);
    client_advance(fixture, &parent, 5);
    fork_client(fixture, &parent, 45, "", &same);
    fork_client(fixture, &parent, 33, ",\"len\":33,\"seed\":\"7\",\"lease_s\":1000", &shorter);
    assert_int_equal(tv_fixed_engine_contexts(fixture->engine), 3);
    struct tv_call *call = ask(fixture, TV_CALL_STATE, same.id, NULL);
    reply_text(call, "sampling/seed", seed, sizeof seed);
    call_free(call);
    call = ask(fixture, TV_CALL_STATE, shorter.id, NULL);
    reply_text(call, "sampling/seed", mine, sizeof mine);
    call_free(call);
    assert_string_equal(seed, "99");
    assert_string_equal(mine, "7");
    /* each moves alone */
    call_release(fixture, call_chain(fixture, &shorter, 4), 200);
    client_advance(fixture, &shorter, 4);
    call_release(fixture, call_chain(fixture, &parent, 2), 200);
    client_advance(fixture, &parent, 2);
    client_check(fixture, &parent);
    client_check(fixture, &same);
    client_check(fixture, &shorter);
    expect(fixture, 204, TV_CALL_DELETE, parent.id, NULL);
    client_check(fixture, &same);
    call_release(fixture, call_chain(fixture, &same, 9), 200);
    client_advance(fixture, &same, 9);
    client_check(fixture, &same);
}

static void assert_end(const struct tv_call *call, const char *finish, int32_t len)
{
    char text[16];
    reply_text(call, "finish", text, sizeof text);
    assert_string_equal(text, finish);
    assert_int_equal(reply_int(call, "committed_len"), len);
}

/* Its stop tokens and its limit are the parent's, and at its full length so is its end. */
static void a_fork_ends_where_its_parent_would(void **state)
{
    struct fixture *fixture = *state;
    struct client parent, child;
    char stop[64];
    (void)snprintf(stop, sizeof stop, ",\"stop\":{\"token_ids\":[%d]}",
                   tv_fixed_engine_token(fixture->engine, 45));
    const char *ends[2] = {stop, ",\"stop\":{\"max_len\":46}"};
    for (int i = 0; i < 2; i++) {
        client_open(fixture, &parent, 40, ends[i]);
        fork_client(fixture, &parent, 40, "", &child);
        struct tv_call *call = call_wait(call_chain(fixture, &child, 9));
        assert_end(call, i == 0 ? "stop" : "length", 45);
        call_free(call);
        call = ask(fixture, TV_CALL_FORK, child.id, "{\"epoch\":\"%s\"}", child.epoch);
        assert_end(call, i == 0 ? "stop" : "length", 45);
        call_free(call);
        call = ask(fixture, TV_CALL_FORK, child.id, "{\"epoch\":\"%s\",\"len\":44}", child.epoch);
        assert_int_equal(reply_int(call, "finish"), -1); /* null: it may go on */
        call_free(call);
    }
}

static void forks_are_refused(void **state)
{
    struct fixture *fixture = *state;
    struct client client, child;
    client_open(fixture, &client, 20, "");
    struct tv_call *call =
        ask(fixture, TV_CALL_FORK, client.id, "{\"epoch\":\"%s\",\"len\":21}", client.epoch);
    assert_refused(call, 422, "wrong-value");
    call_free(call);
    call = ask(fixture, TV_CALL_FORK, client.id, "{\"epoch\":\"0123456789abcdef\"}");
    assert_refused(call, 409, "epoch-changed");
    call_free(call);
    call = ask(fixture, TV_CALL_FORK, "s_none", "{\"epoch\":\"%s\"}", client.epoch);
    assert_refused(call, 404, "session-not-found");
    call_free(call);
    struct tv_call *running = call_running(fixture, &client, 2);
    call = ask(fixture, TV_CALL_FORK, client.id, "{\"epoch\":\"%s\"}", client.epoch);
    assert_refused(call, 409, "session-busy");
    call_free(call);
    call_release(fixture, running, 200);
    client_advance(fixture, &client, 2);
    fixture->config.max_sessions = 1;
    call = ask(fixture, TV_CALL_FORK, client.id, "{\"epoch\":\"%s\"}", client.epoch);
    assert_refused(call, 429, "rate-limited");
    call_free(call);
    fixture->config.max_sessions = 16;
    client_check(fixture, &client);
    assert_int_equal(fixture->sched->table.count, 1);
    assert_int_equal(tv_fixed_engine_contexts(fixture->engine), 1);
    fork_client(fixture, &client, 22, "", &child);
}

/* A queued fork whose client leaves, whose parent is deleted, or that a stop ends, leaves nothing;
 * meanwhile the parent is busy. */
static void queued_forks_leave_nothing(void **state)
{
    struct fixture *fixture = *state;
    struct client client, other;
    client_open(fixture, &other, 5, "");
    client_open(fixture, &client, 20, "");
    for (int how = 0; how < 2; how++) {
        struct tv_call *running = call_running(fixture, &other, 1);
        struct tv_call *fork =
            call_make(fixture, TV_CALL_FORK, client.id, "{\"epoch\":\"%s\"}", client.epoch);
        call_start(fixture, fork);
        assert_int_equal(fixture->sched->table.count, 3);
        struct tv_call *verify = call_chain(fixture, &client, 1);
        assert_refused(call_wait(verify), 409, "session-busy");
        call_free(verify);
        if (how == 0) {
            tv_sched_cancel(fixture->sched, fork);
            assert_refused(call_wait(fork), 504, "deadline");
        } else {
            expect(fixture, 204, TV_CALL_DELETE, client.id, NULL);
            assert_refused(call_wait(fork), 404, "session-not-found");
        }
        call_free(fork);
        call_release(fixture, running, 200);
        client_advance(fixture, &other, 1);
        assert_int_equal(fixture->sched->table.count, how == 0 ? 2 : 1);
        if (how == 0) {
            client_check(fixture, &client);
        }
    }
    client_check(fixture, &other);
}

/* A session of the real engine that decodes; greedy, so that no seed is needed. */
struct real_client {
    char id[32], epoch[17];
    int32_t seq, len;
};

static void real_open(struct fixture *fixture, struct real_client *client)
{
    char body[1024];
    int at = snprintf(body, sizeof body, "{\"sampling\":{\"rule\":\"greedy\"},\"tokens\":[3");
    for (int32_t i = 1; i < PROMPT; i++) {
        at += snprintf(body + at, sizeof body - (size_t)at, ",%d", (i * 31 + 7) % 307);
    }
    struct tv_call *call = ask(fixture, TV_CALL_CREATE, "", "%s]}", body);
    assert_reply(call, 201);
    reply_text(call, "session", client->id, sizeof client->id);
    reply_text(call, "epoch", client->epoch, sizeof client->epoch);
    client->seq = 1;
    client->len = PROMPT;
    call_free(call);
}

static void real_decode(struct fixture *fixture, struct real_client *client, int32_t count,
                        int32_t *ret_tokens)
{
    struct tv_call *call =
        ask(fixture, TV_CALL_DECODE, client->id,
            "{\"seq\":%d,\"epoch\":\"%s\",\"expected_len\":%d,\"max_tokens\":%d}", client->seq++,
            client->epoch, client->len, count);
    assert_reply(call, 200);
    assert_int_equal(reply_ints(call, "new_tokens", ret_tokens, count), count);
    client->len += count;
    call_free(call);
}

/* What is drawn after a rollback or in a fork is what was drawn at first, while the others write
 * into copies of the page they shared. */
static void real_tokens_are_drawn_again(void **state)
{
    struct fixture *fixture = &((struct real *)*state)->fixture;
    struct real_client parent, child;
    int32_t plain[DRAWN], tokens[DRAWN];
    real_open(fixture, &parent);
    real_decode(fixture, &parent, DRAWN, plain);
    struct tv_call *call = ask(fixture, TV_CALL_FORK, parent.id, "{\"epoch\":\"%s\",\"len\":%d}",
                               parent.epoch, PROMPT);
    assert_reply(call, 201);
    reply_text(call, "session", child.id, sizeof child.id);
    memcpy(child.epoch, parent.epoch, sizeof child.epoch);
    child.seq = 1;
    child.len = PROMPT;
    call_free(call);
    /* rows 130 .. 133 of the shared page are the parent's; the child writes other ones */
    expect(fixture, 200, TV_CALL_ROLLBACK, child.id,
           "{\"seq\":1,\"epoch\":\"%s\",\"expected_len\":%d,\"len\":%d,\"pending\":11}",
           child.epoch, PROMPT, PROMPT);
    child.seq++;
    real_decode(fixture, &child, 4, tokens);
    expect(fixture, 200, TV_CALL_ROLLBACK, parent.id,
           "{\"seq\":2,\"epoch\":\"%s\",\"expected_len\":%d,\"len\":%d}", parent.epoch, parent.len,
           PROMPT + 4);
    parent.seq++;
    parent.len = PROMPT + 4;
    real_decode(fixture, &parent, DRAWN - 4, tokens);
    assert_memory_equal(tokens, plain + 4, (DRAWN - 4) * sizeof plain[0]);
    /* and back to the child's beginning, with the first pending token */
    expect(fixture, 200, TV_CALL_ROLLBACK, parent.id,
           "{\"seq\":%d,\"epoch\":\"%s\",\"expected_len\":%d,\"len\":%d}", parent.seq++,
           parent.epoch, parent.len, PROMPT - 60);
    parent.len = PROMPT - 60; /* two pages less: one is the child's too */
    call =
        ask(fixture, TV_CALL_FORK, child.id, "{\"epoch\":\"%s\",\"len\":%d}", child.epoch, PROMPT);
    assert_reply(call, 201);
    struct real_client grandchild = {.seq = 1, .len = PROMPT};
    reply_text(call, "session", grandchild.id, sizeof grandchild.id);
    memcpy(grandchild.epoch, child.epoch, sizeof grandchild.epoch);
    assert_int_equal(reply_int(call, "pending"), 11);
    call_free(call);
    expect(fixture, 204, TV_CALL_DELETE, child.id, NULL);
    expect(fixture, 204, TV_CALL_DELETE, parent.id, NULL);
    real_decode(fixture, &grandchild, 4, tokens);
    expect(fixture, 204, TV_CALL_DELETE, grandchild.id, NULL);
    expect(fixture, 404, TV_CALL_STATE, grandchild.id, NULL);
    struct real_client fresh;
    real_open(fixture, &fresh);
    real_decode(fixture, &fresh, DRAWN, tokens);
    assert_memory_equal(tokens, plain, sizeof plain);
}

static int64_t pages_free(const struct real *real)
{
    struct tv_cache_counts counts;
    tv_cache_counts(real->engine.base.cache, &counts);
    return counts.free;
}

/* A guess about a held round is refused without a page: none is taken, none of the held is lost.
 * The teardown counts what is left. */
static void a_refused_guess_takes_no_page(void **state)
{
    struct real *real = *state;
    struct fixture *fixture = &real->fixture;
    struct real_client client;
    real_open(fixture, &client);
    struct tv_call *call = ask(fixture, TV_CALL_STATE, client.id, NULL);
    int32_t pending = (int32_t)reply_int(call, "pending");
    call_free(call);
    call = ask(fixture, TV_CALL_VERIFY, client.id,
               "{\"seq\":1,\"epoch\":\"%s\",\"expected_len\":%d,\"commit\":\"hold\",\"tree\":"
               "{\"tokens\":[%d,7],\"parents\":[-1,0]}}",
               client.epoch, PROMPT, pending);
    assert_reply(call, 200);
    int32_t next = (int32_t)reply_int(call, "pending");
    int32_t accepted[2], count = reply_ints(call, "accepted/nodes", accepted, 2);
    call_free(call);
    int64_t before = pages_free(real);
    for (int32_t i = 0; i < 4; i++) { /* right, and wrong */
        expect(
            fixture, 409, TV_CALL_VERIFY, client.id,
            "{\"seq\":2,\"epoch\":\"%s\",\"expected_len\":%d,\"tree\":{\"tokens\":[%d],\"parents\":"
            "[-1]},\"if\":{\"seq\":1,\"leaf\":%d,\"pending\":%d}}",
            client.epoch, PROMPT + count, next + i, count - 1, next + i);
        assert_int_equal(pages_free(real), before);
    }
    expect(fixture, 200, TV_CALL_VERIFY, client.id,
           "{\"seq\":2,\"epoch\":\"%s\",\"expected_len\":%d,\"tree\":{\"tokens\":[%d],\"parents\":["
           "-1]},"
           "\"commit_prev\":{\"seq\":1,\"path\":[0],\"next\":%d}}",
           client.epoch, PROMPT + 1, next, next);
    assert_int_equal(pages_free(real), before); /* 132 rows, as before */
    client.seq = 3;
    client.len = PROMPT + 2;
    int32_t tokens[4];
    real_decode(fixture, &client, 4, tokens);
    expect(fixture, 204, TV_CALL_DELETE, client.id, NULL);
}

#define CASE(name) cmocka_unit_test_setup_teardown(name, fixture_setup, fixture_teardown)

int main(void)
{
    const struct CMUnitTest tests[] = {
        CASE(a_rollback_restores_every_length),
        CASE(a_rollback_is_a_round_like_any_other),
        CASE(a_rollback_reopens),
        CASE(a_fork_goes_its_own_way),
        CASE(a_fork_ends_where_its_parent_would),
        CASE(forks_are_refused),
        CASE(queued_forks_leave_nothing),
        cmocka_unit_test_setup_teardown(real_tokens_are_drawn_again, real_setup, real_teardown),
        cmocka_unit_test_setup_teardown(a_refused_guess_takes_no_page, real_setup, real_teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
