/*
 * sched_real_fixture.h - a scheduler on the real engine with its oracles, every round judged.
 *
 * The oracles can be held: a gate in front of the thread's naive attention (kernel oracle) or of
 * the forward pass of comparisons on demand (path oracle).
 */
#ifndef TV_TESTS_SCHED_REAL_FIXTURE_H
#define TV_TESTS_SCHED_REAL_FIXTURE_H

#include "engine_fixture.h"
#include "test_sched_fixture.h"

struct real {
    struct fixture fixture; /* first, so that helpers of a fixture take it */
    struct tv_engine_fixture engine;
    struct tv_shadow *shadow;
    int64_t free_at_start; /* the engine keeps a page for its self-test */
};

/* cmocka setup and teardown; *state is a struct real. The teardown opens the gates, ends all in
 * the daemon's order and checks that no page is left behind. */
int real_setup(void **state);
int real_teardown(void **state);

enum gate { GATE_KERNEL, GATE_PATH };
void gate_close(enum gate gate);
void gate_open(enum gate gate);
/* So many may pass while it stays closed. */
void gate_let(enum gate gate, int count);
/* Wait until an oracle is inside the closed gate. */
void gate_await(enum gate gate);

#endif
