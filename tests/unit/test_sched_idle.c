/*
 * test_sched_idle.c - leases that nobody uses do not shut the server: who gives pages when a call
 * lacks some, who does not, and that nobody gives any in vain.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "test_sched_fixture.h"

#define PAGES  24 /* of 16 rows */
#define SECOND INT64_C(1000000)

/* The real clock, and what a test puts before it. */
static _Atomic int64_t ahead_us;

int64_t __real_tv_clock_us(void);
int64_t __wrap_tv_clock_us(void);
int64_t __wrap_tv_clock_us(void)
{
    return __real_tv_clock_us() + atomic_load(&ahead_us);
}

static int setup(void **state)
{
    struct fixture *fixture = malloc(sizeof *fixture);
    assert_non_null(fixture);
    fixture_start_pages(fixture, PAGES);
    fixture->config.idle_pages_s = 3000; /* no machine is so slow */
    *state = fixture;
    return 0;
}

static void pass(int64_t seconds)
{
    (void)atomic_fetch_add(&ahead_us, seconds * SECOND);
}

/* A create of `count` tokens whose prompt has no page in common with any other, submitted. */
static struct tv_call *create_start(struct fixture *fixture, const char *principal, int32_t count,
                                    struct client *client)
{
    static const uint8_t model_id[32];
    static int32_t serial;
    char body[4096];
    int at = snprintf(body, sizeof body, "{\"lease_s\":3600,\"tokens\":[");
    serial++;
    memset(client, 0, sizeof *client);
    tv_digest_start(&client->digest, model_id, "", 0);
    for (int32_t i = 0; i < count; i++) {
        client->tokens[client->len++] = i % 16 == 0 ? 100 + serial : i % 90;
        tv_digest_push(&client->digest, client->tokens[i]);
        at += snprintf(body + at, sizeof body - (size_t)at, "%s%d", i > 0 ? "," : "",
                       client->tokens[i]);
    }
    (void)snprintf(body + at, sizeof body - (size_t)at, "]}");
    (void)snprintf(fixture->principal, sizeof fixture->principal, "%s", principal);
    struct tv_call *call = call_make(fixture, TV_CALL_CREATE, "", "%s", body);
    call_start(fixture, call);
    return call;
}

static struct tv_call *create(struct fixture *fixture, const char *principal, int32_t count,
                              struct client *client)
{
    struct tv_call *call = call_wait(create_start(fixture, principal, count, client));
    if (call->reply.http_status == 201) {
        reply_text(call, "session", client->id, sizeof client->id);
        reply_text(call, "epoch", client->epoch, sizeof client->epoch);
        client->pending = (int32_t)reply_int(call, "pending");
        client->seq = 1;
    }
    return call;
}

static void open_as(struct fixture *fixture, struct client *client, const char *principal,
                    int32_t count)
{
    struct tv_call *call = create(fixture, principal, count, client);
    assert_reply(call, 201);
    call_free(call);
}

static void assert_full(struct fixture *fixture, const char *principal, int32_t count)
{
    struct client none;
    struct tv_call *call = create(fixture, principal, count, &none);
    assert_refused(call, 503, "kv-full");
    call_free(call);
}

static int is_open(struct fixture *fixture, const struct client *client, const char *principal)
{
    (void)snprintf(fixture->principal, sizeof fixture->principal, "%s", principal);
    struct tv_call *call = ask(fixture, TV_CALL_STATE, client->id, NULL);
    int http_status = call->reply.http_status;
    call_free(call);
    assert_true(http_status == 200 || http_status == 410);
    return http_status == 200;
}

static void assert_conserved(struct fixture *fixture)
{
    struct tv_cache_counts counts;
    tv_cache_counts(fixture->engine->cache, &counts);
    assert_int_equal(counts.free + counts.cached + counts.held, PAGES);
    const struct tv_sessions *table = &fixture->sched->table;
    assert_int_equal(table->created_count,
                     table->count + table->closed_count + table->expired_count);
}

static void test_pages_are_its_own_for_a_while(void **state)
{
    struct fixture *fixture = *state;
    struct client first, second, fresh;
    open_as(fixture, &first, "a", 160);
    pass(1000);
    open_as(fixture, &second, "a", 160);
    pass(1500);
    assert_full(fixture, "b", 100); /* 7 pages; 4 are left */
    assert_true(is_open(fixture, &first, "a") && is_open(fixture, &second, "a"));
    pass(1000); /* now the first one's time is over, though it has been asked after */
    open_as(fixture, &fresh, "b", 100);
    assert_false(is_open(fixture, &first, "a"));
    assert_true(is_open(fixture, &second, "a"));
    assert_int_equal(fixture->sched->idle_closed, 1);
    assert_conserved(fixture);
    client_check(fixture, &second); /* is what it was, and goes on */
    struct tv_call *round = call_wait(call_chain(fixture, &second, 2));
    assert_reply(round, 200);
    call_free(round);
}

/* A round that lacks pages goes with the next launch, as if there had been room. */
static void test_a_round_gets_them_too(void **state)
{
    struct fixture *fixture = *state;
    struct client idle, busy;
    open_as(fixture, &idle, "a", 160);
    pass(3500);
    open_as(fixture, &busy, "b", 220); /* 10 + 14 pages: none is left, 4 rows are */
    struct tv_call *call = call_wait(call_chain(fixture, &busy, 20));
    assert_reply(call, 200);
    call_free(call);
    client_advance(fixture, &busy, 20);
    client_check(fixture, &busy);
    assert_false(is_open(fixture, &idle, "a"));
    (void)snprintf(fixture->principal, sizeof fixture->principal, "b");
    expect(fixture, 200, TV_CALL_DECODE, busy.id,
           "{\"seq\":2,\"epoch\":\"%s\",\"expected_len\":%d,\"max_tokens\":100}", busy.epoch,
           busy.len);
    assert_conserved(fixture);
}

static void test_nobody_gives_in_vain(void **state)
{
    struct fixture *fixture = *state;
    struct client idle, used;
    open_as(fixture, &idle, "a", 100);
    open_as(fixture, &used, "a", 200);
    pass(3500);
    struct tv_call *round = call_wait(call_chain(fixture, &used, 1));
    assert_reply(round, 200);
    call_free(round);
    assert_full(fixture, "b", 250); /* 16 pages: 4 are left, idle has 7 */
    assert_true(is_open(fixture, &idle, "a") && is_open(fixture, &used, "a"));
    assert_int_equal(fixture->sched->idle_closed, 0);
    assert_conserved(fixture);
}

/* Forks share their pages: closing all of them frees these once, and none while one is in use. */
static void test_what_forks_share_is_counted_once(void **state)
{
    struct fixture *fixture = *state;
    struct client first, other, fresh;
    open_as(fixture, &first, "a", 100); /* 7 pages, whoever forks */
    for (int i = 0; i < 4; i++) {
        expect(fixture, 201, TV_CALL_FORK, first.id, "{\"epoch\":\"%s\"}", first.epoch);
    }
    open_as(fixture, &other, "b", 100);
    pass(3500);
    assert_full(fixture, "c", 390); /* 25 pages: more than there are */
    (void)snprintf(fixture->principal, sizeof fixture->principal, "b");
    struct tv_call *round = call_wait(call_chain(fixture, &other, 1));
    assert_reply(round, 200);
    call_free(round);
    assert_full(fixture, "c", 280); /* 18: 10 are free, 7 would come */
    assert_int_equal(fixture->sched->idle_closed, 0);
    open_as(fixture, &fresh, "c", 270); /* 17 */
    assert_int_equal(fixture->sched->idle_closed, 5);
    assert_false(is_open(fixture, &first, "a"));
    assert_true(is_open(fixture, &other, "b"));
    assert_conserved(fixture);
}

/* A session keeps what it shares with those that would go. */
static void test_what_a_used_fork_shares_does_not_come(void **state)
{
    struct fixture *fixture = *state;
    struct client parent;
    open_as(fixture, &parent, "a", 100);
    struct tv_call *call =
        ask(fixture, TV_CALL_FORK, parent.id, "{\"epoch\":\"%s\",\"len\":96}", parent.epoch);
    assert_reply(call, 201);
    call_free(call);
    pass(3500);
    call = call_wait(call_chain(fixture, &parent, 1));
    assert_reply(call, 200);
    call_free(call);
    assert_full(fixture, "c", 280); /* 18: 17 are free, and the fork has none of its own */
    assert_int_equal(fixture->sched->idle_closed, 0);
    assert_conserved(fixture);
}

/* Slices are 16 rows, so most of the refused prompt would have had room. */
static void test_a_prompt_has_room_for_all_before_its_first_slice(void **state)
{
    struct fixture *fixture = *state;
    struct client used, fits;
    open_as(fixture, &used, "a", 300);
    const _Atomic uint64_t *computed = &fixture->sched->stats->prefill_tokens;
    uint64_t before = atomic_load(computed);
    assert_int_equal(before, 300);
    assert_full(fixture, "b", 81); /* 6 pages; 5 are left */
    assert_int_equal(atomic_load(computed), before);
    assert_conserved(fixture);
    open_as(fixture, &fits, "b", 80);
    assert_int_equal(atomic_load(computed), before + 80);
    (void)snprintf(fixture->principal, sizeof fixture->principal, "a");
    call_release(fixture, call_chain(fixture, &used, 2), 200); /* its last page has room */
    assert_conserved(fixture);
}

/* Each would fit alone: the one that came first has its pages although it has taken few of them,
 * and the other is refused before anything of it is computed. */
static void test_two_prompts_do_not_stop_each_other(void **state)
{
    struct fixture *fixture = *state;
    struct client clients[2];
    struct tv_call *calls[2];
    tv_fixed_engine_hold(fixture->engine, 1);
    for (int i = 0; i < 2; i++) { /* 13 pages of 24 */
        calls[i] = create_start(fixture, i == 0 ? "a" : "b", 200, &clients[i]);
        tv_fixed_engine_await_held(fixture->engine);
    }
    tv_fixed_engine_hold(fixture->engine, 0);
    assert_reply(call_wait(calls[0]), 201);
    assert_refused(call_wait(calls[1]), 503, "kv-full");
    assert_int_equal(reply_int(calls[1], "pages_needed"), 13);
    assert_int_equal(reply_int(calls[1], "pages_free"), PAGES - 13);
    assert_int_equal(atomic_load(&fixture->sched->stats->prefill_tokens), 200);
    call_free(calls[0]);
    call_free(calls[1]);
    assert_conserved(fixture);
}

/* The key that holds most gives first, also where another's session is idle for longer. */
static void test_who_has_most_gives(void **state)
{
    struct fixture *fixture = *state;
    struct client modest, greedy[3], fresh;
    open_as(fixture, &modest, "modest", 64);
    for (int i = 0; i < 3; i++) {
        pass(10);
        open_as(fixture, &greedy[i], "greedy", 96);
    }
    pass(3500);
    open_as(fixture, &fresh, "new", 100); /* 7 pages; 2 are left */
    assert_true(is_open(fixture, &modest, "modest"));
    assert_false(is_open(fixture, &greedy[0], "greedy")); /* idle for longest of them */
    assert_true(is_open(fixture, &greedy[1], "greedy") && is_open(fixture, &greedy[2], "greedy"));
    assert_conserved(fixture);
}

/* Whatever is under way keeps its session, and so does a lease where the option is off. */
static void test_what_is_used_stays(void **state)
{
    struct fixture *fixture = *state;
    struct client running, other, fresh;
    open_as(fixture, &running, "a", 200);
    open_as(fixture, &other, "a", 100);
    pass(3500);
    fixture->config.idle_pages_s = 0;
    assert_full(fixture, "b", 150);
    fixture->config.idle_pages_s = 3000;
    (void)snprintf(fixture->principal, sizeof fixture->principal, "a");
    struct tv_call *round = call_running(fixture, &running, 1);
    (void)snprintf(fixture->principal, sizeof fixture->principal, "b");
    struct tv_call *waiting = call_make(fixture, TV_CALL_ONESHOT, "",
                                        "{\"tokens\":[9],\"tree\":{\"tokens\":[1],"
                                        "\"parents\":[-1]}}");
    call_start(fixture, waiting);
    call_release(fixture, round, 200);
    assert_reply(call_wait(waiting), 200);
    call_free(waiting);
    open_as(fixture, &fresh, "b", 150); /* 10 pages: 3 or 4 are left, other has 7 */
    assert_true(is_open(fixture, &running, "a"));
    assert_false(is_open(fixture, &other, "a"));
    assert_conserved(fixture);
}

#define CASE(name) cmocka_unit_test_setup_teardown(name, setup, fixture_teardown)

int main(void)
{
    const struct CMUnitTest tests[] = {
        CASE(test_pages_are_its_own_for_a_while),
        CASE(test_a_round_gets_them_too),
        CASE(test_nobody_gives_in_vain),
        CASE(test_what_forks_share_is_counted_once),
        CASE(test_what_a_used_fork_shares_does_not_come),
        CASE(test_a_prompt_has_room_for_all_before_its_first_slice),
        CASE(test_two_prompts_do_not_stop_each_other),
        CASE(test_who_has_most_gives),
        CASE(test_what_is_used_stays),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
