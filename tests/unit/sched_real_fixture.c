/*
 * sched_real_fixture.c - a scheduler on the real engine with its oracles, every round judged.
 */
#include "sched_real_fixture.h"

#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>

#include <cmocka.h>

#include "shadow/round.h"

/* One of each for the process: a table's functions have no context of their own. */
static struct {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    int closed[2], inside[2]; /* by gate; guarded by the lock */
    int let[2];               /* that may pass a closed one */
    int (*naive)(struct tv_kernels *k, const struct tv_verify_attn *args);
} gates = {.lock = PTHREAD_MUTEX_INITIALIZER, .changed = PTHREAD_COND_INITIALIZER};

static void gate_pass(enum gate gate)
{
    (void)pthread_mutex_lock(&gates.lock);
    gates.inside[gate]++;
    (void)pthread_cond_broadcast(&gates.changed);
    while (gates.closed[gate] && gates.let[gate] == 0) {
        (void)pthread_cond_wait(&gates.changed, &gates.lock);
    }
    gates.let[gate] -= gates.let[gate] > 0;
    gates.inside[gate]--;
    (void)pthread_mutex_unlock(&gates.lock);
}

static int naive_gated(struct tv_kernels *k, const struct tv_verify_attn *args)
{
    gate_pass(GATE_KERNEL);
    return gates.naive(k, args);
}

/* The linker gives the oracle's calls to the second of these; no round here samples the path. */
int __real_tv_path_forward(const struct tv_path_source *source, const struct tv_path_rows *rows,
                           const int32_t *wanted, int32_t wanted_count,
                           const struct tv_path_watch *watch, float **ret_logits);
int __wrap_tv_path_forward(const struct tv_path_source *source, const struct tv_path_rows *rows,
                           const int32_t *wanted, int32_t wanted_count,
                           const struct tv_path_watch *watch, float **ret_logits);

int __wrap_tv_path_forward(const struct tv_path_source *source, const struct tv_path_rows *rows,
                           const int32_t *wanted, int32_t wanted_count,
                           const struct tv_path_watch *watch, float **ret_logits)
{
    gate_pass(GATE_PATH);
    return __real_tv_path_forward(source, rows, wanted, wanted_count, watch, ret_logits);
}

static void gate_set(enum gate gate, int closed)
{
    (void)pthread_mutex_lock(&gates.lock);
    gates.closed[gate] = closed;
    gates.let[gate] = 0;
    (void)pthread_cond_broadcast(&gates.changed);
    (void)pthread_mutex_unlock(&gates.lock);
}

void gate_close(enum gate gate)
{
    gate_set(gate, 1);
}

void gate_open(enum gate gate)
{
    gate_set(gate, 0);
}

void gate_let(enum gate gate, int count)
{
    (void)pthread_mutex_lock(&gates.lock);
    gates.let[gate] = count;
    (void)pthread_cond_broadcast(&gates.changed);
    (void)pthread_mutex_unlock(&gates.lock);
}

void gate_await(enum gate gate)
{
    (void)pthread_mutex_lock(&gates.lock);
    while (gates.inside[gate] == 0) {
        (void)pthread_cond_wait(&gates.changed, &gates.lock);
    }
    (void)pthread_mutex_unlock(&gates.lock);
}

int real_setup(void **state)
{
    struct tv_engine_fixture_options options = {.model = "v2lite", .max_len = 256};
    struct tv_shadow_params params = {.probability = 1.0, .queue_bytes_max = 64u << 20};
    struct real *real = calloc(1, sizeof *real);
    assert_non_null(real);
    tv_engine_fixture_open(&real->engine, &options);
    assert_int_equal(
        tv_shadow_create(&params, real->engine.base.model, real->engine.base.cache, &real->shadow),
        0);
    /* before the first round: no oracle has looked at the tables yet */
    gates.naive = real->shadow->ref->verify_attn_naive;
    real->shadow->ref->verify_attn_naive = naive_gated;
    struct tv_cache_counts counts;
    tv_cache_counts(real->engine.base.cache, &counts);
    real->free_at_start = counts.free;
    struct tv_config *config = &real->fixture.config;
    (void)snprintf(config->backend, sizeof config->backend, "cpu");
    config->page_size = 64;
    config->max_nodes = 64;
    config->max_depth = 32;
    config->max_sessions = 4;
    config->queue_max = 8;
    config->launch_max_s = 30;
    config->inline_bytes = 1 << 20;
    real->fixture.engine = real->engine.engine;
    assert_int_equal(tv_sched_create(config, real->engine.engine, real->shadow,
                                     &real->fixture.stats, &real->fixture.sched),
                     0);
    *state = real;
    return 0;
}

int real_teardown(void **state)
{
    struct real *real = *state;
    struct tv_cache_counts counts;
    gate_open(GATE_PATH);
    tv_sched_destroy(real->fixture.sched); /* must not need the kernel oracle's word */
    gate_open(GATE_KERNEL);
    tv_shadow_destroy(real->shadow);
    tv_cache_counts(real->engine.base.cache, &counts);
    assert_int_equal(counts.free, real->free_at_start); /* no session, no pin left a page behind */
    tv_engine_fixture_close(&real->engine);
    free(real);
    return 0;
}
