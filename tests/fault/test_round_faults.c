/*
 * test_round_faults.c - rounds through the scheduler and the real engine on a failing device.
 *
 * A failed round is a 500 that says kernel-fault and committed false, or, without memory, an
 * internal error; length, digest, tail, pending token, next number and pages are those of before.
 * The same body then gives, byte for byte, the tokens of a session that met no failure.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "faults.h"
#include "test_sched_fixture.h"
#include "tiny_engine.h"

#define PROMPT "\"tokens\":[3,1,4,1,5,9,2,6,5,3,5,8,9,7,9,3,2,3,8,4]"

struct setup {
    struct fixture fixture; /* first, so that helpers of a fixture take it */
    struct world *world;
};

static int setup(void **state)
{
    struct setup *setup = calloc(1, sizeof *setup);
    struct tv_config *config = &setup->fixture.config;
    void *world = NULL;
    assert_non_null(setup);
    assert_int_equal(world_setup(&world), 0);
    setup->world = world;
    (void)snprintf(config->backend, sizeof config->backend, "cpu");
    config->page_size = 16;
    config->max_nodes = 32;
    config->max_depth = 16;
    config->max_sessions = 4;
    config->queue_max = 8;
    config->launch_max_s = 30;
    config->inline_bytes = 1 << 20;
    setup->fixture.engine = setup->world->engine;
    assert_int_equal(tv_sched_create(config, setup->world->engine, NULL, &setup->fixture.stats,
                                     &setup->fixture.sched),
                     0);
    *state = setup;
    return 0;
}

static int teardown(void **state)
{
    struct setup *setup = *state;
    void *world = setup->world;
    tv_sched_destroy(setup->fixture.sched);
    free(setup);
    return world_teardown(&world); /* every page is free */
}

/* Everything that a session shows, and what it holds. */
struct view {
    int64_t len, pending, next_seq, pages_free;
    char digest[64];
    int32_t tail[256], tail_count;
};

static void view_take(struct setup *setup, const char *session, struct view *view)
{
    struct tv_call *call = call_make(&setup->fixture, TV_CALL_STATE, session, NULL);
    memset(view, 0, sizeof *view);
    call->request.tail = 256;
    call_start(&setup->fixture, call);
    assert_reply(call_wait(call), 200);
    view->len = reply_int(call, "committed_len");
    view->pending = reply_int(call, "pending");
    view->next_seq = reply_int(call, "next_seq");
    reply_text(call, "digest", view->digest, sizeof view->digest);
    view->tail_count = reply_ints(call, "tail", view->tail, 256);
    call_free(call);
    view->pages_free = pages_free(setup->world);
}

static void session_open(struct setup *setup, char *ret_session, char *ret_epoch)
{
    struct tv_call *call =
        ask(&setup->fixture, TV_CALL_CREATE, "", "{" PROMPT ",\"sampling\":{\"seed\":\"9\"}}");
    assert_reply(call, 201);
    reply_text(call, "session", ret_session, 32);
    reply_text(call, "epoch", ret_epoch, 17);
    call_free(call);
}

static const struct form {
    const char *name;
    enum tv_call_kind kind;
    const char *rest; /* behind expected_len; NULL: a tree on the pending token */
    const char *want; /* beside the tree */
} forms[] = {
    {"verify", TV_CALL_VERIFY, NULL, "{\"top_k\":3,\"logits\":{\"rows\":\"all\"}}"},
    {"verify with hidden rows", TV_CALL_VERIFY, NULL,
     "{\"hidden\":{\"rows\":\"all\",\"dtype\":\"bf16\"}}"},
    {"verify with hidden rows to fetch", TV_CALL_VERIFY, NULL,
     "{\"hidden\":{\"taps\":[1],\"via\":\"fetch\"}}"},
    {"verify with projected rows", TV_CALL_VERIFY, NULL, "{\"hidden\":{\"project\":true}}"},
    {"extend", TV_CALL_EXTEND, "\"tokens\":[1,2,3],\"keep_pending\":true", NULL},
    {"decode", TV_CALL_DECODE, "\"max_tokens\":4", NULL},
};

static struct tv_call *form_call(struct setup *setup, const struct form *form, const char *session,
                                 const char *epoch, const struct view *view)
{
    char rest[512], body[1024];
    if (form->rest == NULL) {
        (void)snprintf(rest, sizeof rest,
                       "\"tree\":{\"tokens\":[%d,0,1,2,3,4,5,6,7,8,9,10],"
                       "\"parents\":[-1,0,0,0,0,0,0,0,0,0,0,0]},\"want\":%s",
                       (int)view->pending, form->want);
    } else {
        (void)snprintf(rest, sizeof rest, "%s", form->rest);
    }
    (void)snprintf(body, sizeof body, "{\"seq\":%d,\"epoch\":\"%s\",\"expected_len\":%d,%s}",
                   (int)view->next_seq, epoch, (int)view->len, rest);
    return call_make(&setup->fixture, form->kind, session, "%s", body);
}

/* Fail call after call; ret_view is what the round that succeeds leaves. */
static void form_sweep(struct setup *setup, const struct form *form, unsigned kind,
                       const char *session, const char *epoch, struct view *ret_view)
{
    struct view before, after;
    view_take(setup, session, &before);
    for (int n = 1;; n++) {
        struct tv_call *call = form_call(setup, form, session, epoch, &before);
        fault_arm(kind, n);
        call_start(&setup->fixture, call);
        (void)call_wait(call);
        int failed = fault_disarm();
        if (!failed) {
            assert_reply(call, 200);
            call_free(call);
            print_message("%s: %d calls\n", form->name, n - 1);
            assert_true(n > 3);
            break;
        }
        if (call->reply.body.failed == 0) {
            assert_refused(call, 500, kind == FAULT_DEVICE ? "kernel-fault" : "internal");
        }
        call_free(call);
        view_take(setup, session, &after);
        assert_memory_equal(&after, &before, sizeof before);
    }
    view_take(setup, session, ret_view);
    assert_true(ret_view->len > before.len);
    assert_int_equal(ret_view->next_seq, before.next_seq + 1);
}

static void sweep(struct setup *setup, unsigned kind)
{
    char clean[32], failing[32], epoch[17];
    session_open(setup, clean, epoch);
    session_open(setup, failing, epoch);
    for (size_t f = 0; f < sizeof forms / sizeof forms[0]; f++) {
        struct view expected, got;
        view_take(setup, clean, &expected);
        struct tv_call *call = form_call(setup, &forms[f], clean, epoch, &expected);
        call_start(&setup->fixture, call);
        assert_reply(call_wait(call), 200);
        call_free(call);
        view_take(setup, clean, &expected);
        form_sweep(setup, &forms[f], kind, failing, epoch, &got);
        expected.pages_free = got.pages_free; /* the other session's are taken meanwhile */
        assert_memory_equal(&got, &expected, sizeof got);
    }
}

static void rounds_on_a_failing_device(void **state)
{
    sweep(*state, FAULT_DEVICE);
}

static void rounds_without_memory(void **state)
{
    sweep(*state, FAULT_MEMORY);
}

/* A create that fails is no session and holds no page. */
static void create_sweep(struct setup *setup, unsigned kind, const char *want)
{
    expect(&setup->fixture, 200, TV_CALL_ONESHOT, "", /* opens the principal's account */
           "{" PROMPT ",\"tree\":{\"tokens\":[1],\"parents\":[-1]}}");
    int64_t free_before = pages_free(setup->world);
    int64_t blocks = fault_blocks();
    for (int n = 1;; n++) {
        struct tv_call *call =
            call_make(&setup->fixture, TV_CALL_CREATE, "", "{" PROMPT "%s}", want);
        fault_arm(kind, n);
        call_start(&setup->fixture, call);
        (void)call_wait(call);
        if (!fault_disarm()) {
            assert_reply(call, 201);
            assert_int_equal(reply_has(call, "hidden"), want[0] != '\0');
            call_free(call);
            assert_true(n > (kind == FAULT_DEVICE ? 20 : 6));
            return;
        }
        if (kind == FAULT_DEVICE) {
            assert_refused(call, 500, "kernel-fault");
        } else {
            assert_true(call->reply.http_status >= 500);
        }
        call_free(call);
        fault_settle(blocks); /* the worker buries the session */
        assert_int_equal(pages_free(setup->world), free_before);
    }
}

static void creates_on_a_failing_device(void **state)
{
    create_sweep(*state, FAULT_DEVICE, "");
}

static void creates_with_hidden_rows_on_a_failing_device(void **state)
{
    create_sweep(*state, FAULT_DEVICE, ",\"want\":{\"hidden\":{\"project\":true}}");
}

static void creates_with_hidden_rows_without_memory(void **state)
{
    create_sweep(*state, FAULT_MEMORY, ",\"want\":{\"hidden\":{\"rows\":\"window:7\"}}");
}

#define CASE(name) cmocka_unit_test_setup_teardown(name, setup, teardown)

int main(void)
{
    const struct CMUnitTest tests[] = {
        CASE(rounds_on_a_failing_device),
        CASE(rounds_without_memory),
        CASE(creates_on_a_failing_device),
        CASE(creates_with_hidden_rows_on_a_failing_device),
        CASE(creates_with_hidden_rows_without_memory),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
