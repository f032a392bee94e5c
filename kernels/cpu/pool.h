/*
 * pool.h - a fork-join pool of persistent threads.
 *
 * Owns the threads. One job at a time, started by one caller, who works along; which thread runs
 * an item is left open, so items must not depend on it beyond their scratch.
 */
#ifndef TV_KERNELS_CPU_POOL_H
#define TV_KERNELS_CPU_POOL_H

#include <stdint.h>

struct tv_cpu_pool;

/* `thread` is below the pool's thread count; 0 is the caller. */
typedef void tv_cpu_pool_fn(void *arg, int32_t item, int32_t thread);

/* threads >= 1 counts the caller. -ENOMEM, -EAGAIN (a thread could not be started). */
int tv_cpu_pool_create(int32_t threads, struct tv_cpu_pool **ret_pool);
/* Stops and joins the threads. No job may be running. NULL is fine. */
void tv_cpu_pool_destroy(struct tv_cpu_pool *pool);
int32_t tv_cpu_pool_threads(const struct tv_cpu_pool *pool);
/* One more step of work is done: every item is one, long items tell of their parts. Any thread. */
void tv_cpu_pool_step(struct tv_cpu_pool *pool);
/* Steps so far, modulo 2^64. Any thread. */
uint64_t tv_cpu_pool_steps(const struct tv_cpu_pool *pool);
/* Run fn(arg, item, thread) for item in [0, items) and return when all have finished. Inline on the
 * caller when `parallel` is 0. Items are taken in ascending order. */
void tv_cpu_pool_run(struct tv_cpu_pool *pool, int32_t items, int parallel, tv_cpu_pool_fn *fn,
                     void *arg);

#endif
