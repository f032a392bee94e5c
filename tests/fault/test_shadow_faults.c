/*
 * test_shadow_faults.c - the shadow while the n-th allocation, thread or file call fails.
 *
 * A round that the oracle could not judge is counted as skipped, never as exact; the answer that
 * it watched is bit for bit the one without a shadow; no page stays pinned, no block and no file
 * is left.
 */
#include <dirent.h>
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <cmocka.h>

#include "faults.h"
#include "shadow/round.h"
#include "shadow_fixture.h"
#include "tiny_engine.h"

static void creation_or_nothing(void **state)
{
    struct world *world = *state;
    struct tv_shadow_params params = {.probability = 1.0,
                                      .queue_bytes_max = QUEUE_BYTES,
                                      .state_dir = world->dir,
                                      .device = world->kernels};
    static const unsigned kinds[] = {FAULT_MEMORY, FAULT_THREAD, FAULT_FILE};
    static const int codes[] = {-ENOMEM, -EAGAIN, 0}; /* a folder that cannot be read is no end */
    for (size_t k = 0; k < 3; k++) {
        for (int n = 1;; n++) {
            struct tv_shadow *shadow = NULL;
            int64_t blocks = fault_blocks(), descriptors = fault_descriptors();
            fault_arm(kinds[k], n);
            int rc = tv_shadow_create(&params, world->model, world->cache, &shadow);
            int failed = fault_disarm();
            assert_int_equal(rc, failed ? codes[k] : 0);
            assert_int_equal(shadow != NULL, rc == 0);
            tv_shadow_destroy(shadow);
            assert_int_equal(fault_blocks(), blocks);
            assert_int_equal(fault_descriptors(), descriptors);
            if (!failed) {
                assert_true(n > 1);
                break;
            }
        }
    }
}

/* The round that is watched, and what it answers. */
struct answer {
    int32_t accepted, pending, nodes[NODES];
    float logits[NODES * VOCAB];
};

static void round_answer(struct world *world, struct tv_context *context, struct tv_shadow *shadow,
                         struct waiter *waiter, struct answer *answer, int *ret_captured)
{
    struct tv_round_in in;
    struct tv_round_out out;
    struct tv_shadow_round *round = shadow != NULL ? tv_shadow_begin(shadow, 0) : NULL;
    round_set(world, &in, context);
    in.commit = 0;
    in.hook = round != NULL ? tv_shadow_layer : NULL;
    in.hook_context = round;
    assert_int_equal(world->engine->ops->verify(world->engine, &in, 1, &out), 0);
    assert_int_equal(out.code, TV_OK);
    memset(answer, 0, sizeof *answer);
    answer->accepted = out.accepted_count;
    answer->pending = out.end.token;
    memcpy(answer->nodes, out.nodes, (size_t)out.accepted_count * sizeof *out.nodes);
    memcpy(answer->logits, out.logits, sizeof answer->logits);
    *ret_captured = round != NULL;
    if (round != NULL) {
        struct tv_parity_case fast = {.prefix = world->prefix,
                                      .prefix_len = PREFIX,
                                      .tree = &world->tree,
                                      .rule = in.rule,
                                      .logits = out.logits,
                                      .accepted_nodes = out.nodes,
                                      .accepted_count = out.accepted_count,
                                      .pending = out.end.token,
                                      .noise = world->engine->noise,
                                      .round = round};
        tv_shadow_attach(shadow, round, &fast);
        tv_shadow_submit(shadow, round, waiter_done, waiter);
    }
}

static struct tv_shadow_block round_judged(struct world *world, struct tv_context *context,
                                           struct tv_shadow *shadow, struct answer *answer)
{
    struct waiter waiter = {.lock = PTHREAD_MUTEX_INITIALIZER, .changed = PTHREAD_COND_INITIALIZER};
    struct tv_shadow_block block = {0};
    int captured = 0;
    round_answer(world, context, shadow, &waiter, answer, &captured);
    if (captured) {
        block = waiter_wait(&waiter);
    }
    return block;
}

/* Stores that are kept, once the oracle's thread has given the last round back. */
static int32_t stores_kept(struct tv_shadow *shadow)
{
    struct tv_shadow_pool *pool = &shadow->pool;
    for (;;) {
        (void)pthread_mutex_lock(&pool->lock);
        int32_t count = pool->bytes_held == 0 ? pool->idle_count : -1;
        (void)pthread_mutex_unlock(&pool->lock);
        if (count >= 0) {
            return count;
        }
        (void)nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
    }
}

/* Every allocation of a round fails once, each time on a shadow that is new, or `warm`: a round was
 * judged before. Returns how many there are. */
static int watched_sweep(struct world *world, struct tv_context *context,
                         const struct answer *expected, int warm, int32_t *ret_kept)
{
    const struct tv_shadow_params params = {
        .probability = 1.0, .queue_bytes_max = QUEUE_BYTES, .device = world->kernels};
    struct tv_parity_violation violations[32];
    struct tv_parity_totals totals;
    int64_t free_before = pages_free(world), blocks = fault_blocks();
    for (int n = 1;; n++) {
        struct tv_shadow *shadow = NULL;
        struct answer answer;
        assert_int_equal(tv_shadow_create(&params, world->model, world->cache, &shadow), 0);
        if (warm) {
            assert_int_equal(round_judged(world, context, shadow, &answer).ran, 1);
            assert_true(stores_kept(shadow) > 0);
        }
        fault_arm(FAULT_MEMORY, n);
        struct tv_shadow_block block = round_judged(world, context, shadow, &answer);
        int failed = fault_disarm();
        *ret_kept = stores_kept(shadow); /* behind it, all pages and counts are settled */
        tv_shadow_totals(shadow, &totals, violations, 32);
        assert_memory_equal(&answer, expected, sizeof answer);
        assert_int_equal(block.ran, !failed);
        assert_int_equal(totals.exact - warm, !failed);
        assert_int_equal(totals.skipped, failed);
        assert_int_equal(totals.violation, 0);
        assert_int_equal(pages_free(world), free_before);
        tv_shadow_destroy(shadow);
        assert_int_equal(fault_blocks(), blocks);
        if (!failed) {
            assert_int_equal(block.tokens_equal, 1);
            return n - 1;
        }
    }
}

static void a_round_that_is_not_judged_is_skipped(void **state)
{
    struct world *world = *state;
    struct tv_drawn drawn;
    struct answer expected;
    int captured = 0;
    int32_t kept = 0, kept_after = 0;
    struct tv_context *context = context_make(world, &drawn);
    world->tokens[0] = drawn.token;
    round_answer(world, context, NULL, NULL, &expected, &captured);
    int first = watched_sweep(world, context, &expected, 0, &kept);
    int later = watched_sweep(world, context, &expected, 1, &kept_after);
    print_message("a watched round: %d allocations, the next one %d\n", first, later);
    assert_true(first > 8);
    assert_true(kept > 0);
    assert_int_equal(later, first - kept); /* its copies go where those of the first were */
    assert_int_equal(kept_after, kept);
    world->engine->ops->context_close(world->engine, context);
}

/* Names in a folder that are no reproducer's final one. */
static int32_t strays(const char *dir)
{
    DIR *folder = opendir(dir);
    int32_t count = 0;
    assert_non_null(folder);
    for (struct dirent *item = readdir(folder); item != NULL; item = readdir(folder)) {
        const char *end = strrchr(item->d_name, '.');
        count += item->d_name[0] != '.' && (end == NULL || strcmp(end, ".kdtr") != 0);
    }
    (void)closedir(folder);
    return count;
}

/* A disk that fails loses the reproducer; the violation stays counted and listed. */
static void reproducers_that_cannot_be_written(void **state)
{
    (void)state;
    struct bench bench;
    struct tv_parity_violation violations[32];
    int64_t violated = 0;
    bench_open(&bench, "v3", 64, 1.0, QUEUE_BYTES, 1);
    for (int n = 1;; n++) {
        int64_t descriptors = fault_descriptors();
        fault_arm(FAULT_FILE, n);
        struct tv_shadow_block block = judged(&bench, FAULT_OUTPUT, 0);
        struct tv_parity_totals totals = totals_of(&bench, violations);
        int failed = fault_disarm();
        violated++;
        assert_int_equal(block.ran, 1);
        assert_int_equal(totals.violation, violated);
        assert_int_equal(fault_descriptors(), descriptors);
        assert_int_equal(strays(bench.dir), 0);
        if (!failed) {
            const char *kind = NULL;
            char *data = NULL;
            size_t bytes = 0;
            int32_t newest = violations[totals.violation_count - 1].n;
            assert_true(n > 2); /* open, write, rename */
            fault_arm(FAULT_FILE, 1);
            assert_true(tv_shadow_reproducer(bench.shadow, newest, &kind, &data, &bytes) < 0);
            assert_int_equal(fault_disarm(), 1);
            assert_null(data);
            assert_int_equal(tv_shadow_reproducer(bench.shadow, newest, &kind, &data, &bytes), 0);
            assert_true(bytes > 1000);
            free(data);
            break;
        }
    }
    bench_close(&bench);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(creation_or_nothing, world_setup, world_teardown),
        cmocka_unit_test_setup_teardown(a_round_that_is_not_judged_is_skipped, world_setup,
                                        world_teardown),
        cmocka_unit_test(reproducers_that_cannot_be_written),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
