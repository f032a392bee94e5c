/*
 * fuzz_calls.c - bytes as a sequence of API calls, against plain arrays.
 *
 * Each byte, or two, decides one thing: which session, which call, its tokens, its lies, how much
 * time passes. The scheduler with its queue, worker and pool of pages must agree with the arrays
 * after every call (tests/unit/sched_world.h).
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#include <cmocka.h>

#include "base/log.h"
#include "fuzz.h"
#include "sched_world.h"

#define OPERATIONS_MOST 300

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    static struct world world; /* large */
    world = (struct world){.bytes = data, .left = bytes};
    tv_log_level_set(TV_LOG_ERROR);
    world_open(&world);
    for (int32_t n = 0; n < OPERATIONS_MOST && world.left > 0; n++) {
        int32_t i = below(&world, SLOTS);
        world_operation(&world, i);
        world_check(&world, i);
        if (n % 8 == 7) {
            int32_t seconds = below(&world, 64);
            world_pass(&world, seconds < 32 ? seconds * (SECOND_US / 32) : seconds * SECOND_US);
        }
        if (below(&world, 128) == 127) {
            restart(&world);
        }
    }
    world_check_whole(&world);
    world_close(&world);
    return 0;
}
