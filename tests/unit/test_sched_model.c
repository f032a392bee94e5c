/*
 * test_sched_model.c - random operations on sessions against a plain array model.
 *
 * Through the whole scheduler, its queue, its worker and a real pool of pages that is too small for
 * all: after every operation the session's length, digest, pending token, numbers, lease and pages
 * are what the arrays say, every page has as many holders as there are sessions with it, and none
 * is lost; now and then every token, row and digest is looked at, and the server starts anew.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>

#include <cmocka.h>

#include "sched_world.h"

/* A million by default; TV_TEST_SCALE makes it more or fewer. */
static void b10_random_operations_equal_an_array_model(void **state)
{
    struct world *world = calloc(1, sizeof *world);
    int32_t operations = fixture_scaled(1000000);
    (void)state;
    assert_non_null(world);
    world->random = 20261129;
    world_open(world);
    for (int32_t n = 0; n < operations; n++) {
        int32_t i = below(world, SLOTS);
        world_operation(world, i);
        world_check(world, i);
        if (n % 8 == 0) {
            world_pass(world, below(world, 40) == 0 ? below(world, 20) * SECOND_US
                                                    : below(world, 1000000));
        }
        if (n % 64 == 0) {
            world_check_whole(world);
        }
        if (n % 4096 == 4095) {
            restart(world);
        }
    }
    world_check_whole(world);
    world_close(world);
    print_message(
        "full %lld, repeated %lld, expired %lld, held then %lld, evicted %lld, reused "
        "%lld, skipped %lld, guessed %lld, restarted %lld, launches with a prompt %lld\n",
        (long long)world->counts[WORLD_FULL], (long long)world->counts[WORLD_REPEATED],
        (long long)world->counts[WORLD_EXPIRED], (long long)world->counts[WORLD_EXPIRED_HELD],
        (long long)world->counts[WORLD_EVICTED], (long long)world->counts[WORLD_REUSED],
        (long long)world->counts[WORLD_SKIPPED], (long long)world->counts[WORLD_GUESSED],
        (long long)world->counts[WORLD_RESTARTED], (long long)world->counts[WORLD_SHARED]);
    for (int32_t n = 0; operations >= 20000 && n < WORLD_COUNTS; n++) {
        assert_true(world->counts[n] > 0); /* nothing that is listed went untried */
    }
    free(world);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(b10_random_operations_equal_an_array_model),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
