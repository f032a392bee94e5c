/*
 * fixed_control.c - what tests do to the engine with fixed answers, and ask of it, from any thread.
 */
#include "fixed_impl.h"

void tv_fixed_engine_fail(struct tv_engine *engine, enum tv_code code, int32_t count)
{
    struct fixed_engine *fixed = (struct fixed_engine *)engine;
    (void)pthread_mutex_lock(&fixed->lock);
    fixed->fail_code = code;
    fixed->fail_count = count;
    (void)pthread_mutex_unlock(&fixed->lock);
}

void tv_fixed_engine_lose(struct tv_engine *engine)
{
    struct fixed_engine *fixed = (struct fixed_engine *)engine;
    (void)pthread_mutex_lock(&fixed->lock);
    fixed->lost = 1;
    (void)pthread_mutex_unlock(&fixed->lock);
}

void tv_fixed_engine_hold(struct tv_engine *engine, int held)
{
    struct fixed_engine *fixed = (struct fixed_engine *)engine;
    (void)pthread_mutex_lock(&fixed->lock);
    fixed->held = held;
    (void)pthread_cond_broadcast(&fixed->changed);
    (void)pthread_mutex_unlock(&fixed->lock);
}

void tv_fixed_engine_hold_moves(struct tv_engine *engine, int held)
{
    struct fixed_engine *fixed = (struct fixed_engine *)engine;
    (void)pthread_mutex_lock(&fixed->lock);
    fixed->moves_held = held;
    (void)pthread_cond_broadcast(&fixed->changed);
    (void)pthread_mutex_unlock(&fixed->lock);
}

void tv_fixed_engine_slow(struct tv_engine *engine, int64_t microseconds)
{
    atomic_store_explicit(&((struct fixed_engine *)engine)->slow_us, microseconds,
                          memory_order_relaxed);
}

void tv_fixed_engine_await_held(struct tv_engine *engine)
{
    struct fixed_engine *fixed = (struct fixed_engine *)engine;
    (void)pthread_mutex_lock(&fixed->lock);
    while (!fixed->inside) {
        (void)pthread_cond_wait(&fixed->changed, &fixed->lock);
    }
    (void)pthread_mutex_unlock(&fixed->lock);
}

void tv_fixed_engine_break(struct tv_engine *engine, int broken)
{
    struct fixed_engine *fixed = (struct fixed_engine *)engine;
    (void)pthread_mutex_lock(&fixed->lock);
    fixed->broken = broken;
    (void)pthread_mutex_unlock(&fixed->lock);
}

int64_t tv_fixed_engine_launches(struct tv_engine *engine)
{
    return atomic_load_explicit(&((struct fixed_engine *)engine)->launches, memory_order_relaxed);
}

int64_t tv_fixed_engine_shared(struct tv_engine *engine)
{
    return atomic_load_explicit(&((struct fixed_engine *)engine)->shared, memory_order_relaxed);
}

int64_t tv_fixed_engine_commits(struct tv_engine *engine)
{
    return atomic_load_explicit(&((struct fixed_engine *)engine)->commits, memory_order_relaxed);
}

int32_t tv_fixed_engine_contexts(struct tv_engine *engine)
{
    struct fixed_engine *fixed = (struct fixed_engine *)engine;
    (void)pthread_mutex_lock(&fixed->lock);
    int32_t contexts = fixed->contexts;
    (void)pthread_mutex_unlock(&fixed->lock);
    return contexts;
}
