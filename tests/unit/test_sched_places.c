/*
 * test_sched_places.c - places of sliced calls: whoever has none under way gets one, however many
 * others have taken.
 */
#include <semaphore.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "test_sched_fixture.h"

#define LONG   300 /* slices are of 16 rows */
#define OTHERS (TV_SCHED_SLICED_MAX + 4)

/* In the order of their ends; the worker thread writes, who waited for all reads. */
static struct tv_call *ended[OTHERS + 1];
static int ended_count;
static void (*fixture_done)(struct tv_call *call);

static void note_done(struct tv_call *call)
{
    ended[ended_count++] = call;
    fixture_done(call);
}

static struct tv_engine_ops ops; /* the engine's, which stops at one slice; lives as long as it */
static int (*slice)(struct tv_engine *engine, struct tv_context *context, const int32_t *tokens,
                    int32_t count, const struct tv_round_rule *rule, struct tv_drawn *ret_drawn,
                    struct tv_cache_shortage *ret_shortage);
static sem_t taken, go_on;
static int slices;

/* By its second slice every prompt that has a place has had one. */
static int slice_or_stop(struct tv_engine *engine, struct tv_context *context,
                         const int32_t *tokens, int32_t count, const struct tv_round_rule *rule,
                         struct tv_drawn *ret_drawn, struct tv_cache_shortage *ret_shortage)
{
    if (++slices == TV_SCHED_SLICED_MAX + 2) {
        (void)sem_post(&taken);
        (void)sem_wait(&go_on);
    }
    return slice(engine, context, tokens, count, rule, ret_drawn, ret_shortage);
}

static struct tv_call *create(struct fixture *fixture, const char *principal, int32_t count)
{
    char body[2048] = "{\"tokens\":[1";
    for (int32_t i = 1; i < count; i++) {
        (void)snprintf(body + strlen(body), sizeof body - strlen(body), ",%d", i % 90);
    }
    (void)snprintf(fixture->principal, sizeof fixture->principal, "%s", principal);
    struct tv_call *call = call_make(fixture, TV_CALL_CREATE, "", "%s]}", body);
    fixture_done = call->done;
    call->done = note_done;
    call_start(fixture, call);
    return call;
}

/* One principal has more long prompts than there are places; another's short one does not wait for
 * the end of any. */
static void who_has_none_gets_one(void **state)
{
    struct fixture *fixture = *state;
    struct tv_call *calls[OTHERS];
    assert_int_equal(sem_init(&taken, 0, 0), 0);
    assert_int_equal(sem_init(&go_on, 0, 0), 0);
    tv_sched_lock(fixture->sched);
    ops = *fixture->engine->ops;
    slice = ops.prefill;
    ops.prefill = slice_or_stop;
    fixture->engine->ops = &ops;
    tv_sched_unlock(fixture->sched);
    fixture->config.queue_max = 2 * OTHERS; /* nobody has called yet */
    tv_fixed_engine_hold(fixture->engine, 1);
    for (int i = 0; i < OTHERS; i++) {
        calls[i] = create(fixture, "many", LONG);
        tv_fixed_engine_await_held(fixture->engine);
    }
    tv_fixed_engine_hold(fixture->engine, 0);
    assert_int_equal(sem_wait(&taken), 0);
    struct tv_call *one = create(fixture, "one", 5);
    assert_int_equal(sem_post(&go_on), 0);
    assert_reply(call_wait(one), 201);
    for (int i = 0; i < OTHERS; i++) {
        assert_reply(call_wait(calls[i]), 201);
    }
    assert_ptr_equal(ended[0], one);
    call_free(one);
    for (int i = 0; i < OTHERS; i++) {
        call_free(calls[i]);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(who_has_none_gets_one, fixture_setup, fixture_teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
