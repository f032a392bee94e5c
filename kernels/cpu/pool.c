/*
 * pool.c - fork-join over a single ticket word.
 *
 * The ticket holds the job's number and how many items are left; an item is taken by a
 * compare-and-swap that lowers the count. Because the number is part of the word, a thread that
 * wakes up late cannot take an item of a job whose fields it read too early. Threads spin briefly
 * between jobs (the operations of one forward pass follow within microseconds) and then sleep.
 */
#include "pool.h"

#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>

#if defined(__x86_64__)
#include <immintrin.h>
#define RELAX() _mm_pause()
#else
#define RELAX() ((void)0)
#endif

enum {
    SPIN_WORKER = 2000, /* about 50 us, then the thread sleeps */
    SPIN_JOIN = 200,    /* then the caller yields: the machine may have fewer processors */
};

struct worker {
    struct tv_cpu_pool *pool;
    pthread_t thread;
    int32_t index;
};

struct tv_cpu_pool {
    int32_t threads;
    int32_t started;
    /* All orders are sequentially consistent: publishing the ticket and looking at `sleeping` is
     * one side of a Dekker pair, announcing sleep and looking at the ticket the other. */
    _Atomic uint64_t ticket; /* job number << 32 | items left */
    _Atomic int32_t finished;
    _Atomic int32_t sleeping;
    _Atomic int stop;
    _Atomic uint64_t steps; /* relaxed: somebody looks now and then whether it moves */
    /* The job; written while no item is left, read before an item is taken. */
    _Atomic(tv_cpu_pool_fn *) fn;
    _Atomic(void *) arg;
    _Atomic int32_t items;
    pthread_mutex_t lock; /* guards the wait on `wake` */
    pthread_cond_t wake;
    struct worker *workers;
};

/* Take and run one item; 0 when none is left. */
static int run_one(struct tv_cpu_pool *pool, int32_t thread)
{
    uint64_t ticket = atomic_load(&pool->ticket);
    while ((uint32_t)ticket != 0) {
        tv_cpu_pool_fn *fn = atomic_load(&pool->fn);
        void *arg = atomic_load(&pool->arg);
        int32_t items = atomic_load(&pool->items);
        if (atomic_compare_exchange_weak(&pool->ticket, &ticket, ticket - 1)) {
            fn(arg, items - (int32_t)(uint32_t)ticket, thread);
            tv_cpu_pool_step(pool);
            atomic_fetch_add(&pool->finished, 1);
            return 1;
        }
    }
    return 0;
}

static int work_visible(struct tv_cpu_pool *pool)
{
    return (uint32_t)atomic_load(&pool->ticket) != 0 || atomic_load(&pool->stop);
}

static void wait_for_work(struct tv_cpu_pool *pool)
{
    for (int i = 0; i < SPIN_WORKER; i++) {
        if (work_visible(pool)) {
            return;
        }
        RELAX();
    }
    (void)pthread_mutex_lock(&pool->lock); /* cannot fail: own, initialised, not recursive */
    atomic_fetch_add(&pool->sleeping, 1);
    while (!work_visible(pool)) {
        (void)pthread_cond_wait(&pool->wake, &pool->lock); /* spurious wakes are looked at again */
    }
    atomic_fetch_sub(&pool->sleeping, 1);
    (void)pthread_mutex_unlock(&pool->lock);
}

static void *worker_main(void *arg)
{
    struct worker *worker = arg;
    while (!atomic_load(&worker->pool->stop)) {
        if (!run_one(worker->pool, worker->index)) {
            wait_for_work(worker->pool);
        }
    }
    return NULL;
}

static void wake_sleepers(struct tv_cpu_pool *pool)
{
    if (atomic_load(&pool->sleeping) > 0) {
        (void)pthread_mutex_lock(&pool->lock);
        (void)pthread_cond_broadcast(&pool->wake);
        (void)pthread_mutex_unlock(&pool->lock);
    }
}

void tv_cpu_pool_run(struct tv_cpu_pool *pool, int32_t items, int parallel, tv_cpu_pool_fn *fn,
                     void *arg)
{
    if (!parallel || items <= 1 || pool->threads == 1) {
        for (int32_t item = 0; item < items; item++) {
            fn(arg, item, 0);
            if (parallel) { /* what is not is too short to be counted */
                tv_cpu_pool_step(pool);
            }
        }
        tv_cpu_pool_step(pool);
        return;
    }
    uint64_t job = (atomic_load(&pool->ticket) >> 32) + 1;
    atomic_store(&pool->fn, fn);
    atomic_store(&pool->arg, arg);
    atomic_store(&pool->items, items);
    atomic_store(&pool->finished, 0);
    atomic_store(&pool->ticket, job << 32 | (uint32_t)items);
    wake_sleepers(pool);
    while (run_one(pool, 0)) {
    }
    for (int spins = 0; atomic_load(&pool->finished) != items; spins++) {
        if (spins < SPIN_JOIN) {
            RELAX();
        } else {
            (void)sched_yield(); /* never fails on Linux */
        }
    }
}

int32_t tv_cpu_pool_threads(const struct tv_cpu_pool *pool)
{
    return pool->threads;
}

void tv_cpu_pool_step(struct tv_cpu_pool *pool)
{
    (void)atomic_fetch_add_explicit(&pool->steps, 1, memory_order_relaxed);
}

uint64_t tv_cpu_pool_steps(const struct tv_cpu_pool *pool)
{
    return atomic_load_explicit(&pool->steps, memory_order_relaxed);
}

void tv_cpu_pool_destroy(struct tv_cpu_pool *pool)
{
    if (!pool) {
        return;
    }
    atomic_store(&pool->stop, 1);
    (void)pthread_mutex_lock(&pool->lock);
    (void)pthread_cond_broadcast(&pool->wake);
    (void)pthread_mutex_unlock(&pool->lock);
    for (int32_t i = 0; i < pool->started; i++) {
        (void)pthread_join(pool->workers[i].thread, NULL); /* ours, joinable, joined once */
    }
    (void)pthread_cond_destroy(&pool->wake);
    (void)pthread_mutex_destroy(&pool->lock);
    free(pool->workers);
    free(pool);
}

int tv_cpu_pool_create(int32_t threads, struct tv_cpu_pool **ret_pool)
{
    struct tv_cpu_pool *pool = calloc(1, sizeof *pool);
    if (!pool) {
        return -ENOMEM;
    }
    pool->threads = threads;
    (void)pthread_mutex_init(&pool->lock, NULL); /* default attributes cannot fail on Linux */
    (void)pthread_cond_init(&pool->wake, NULL);
    pool->workers = calloc((size_t)threads, sizeof *pool->workers);
    if (!pool->workers) {
        tv_cpu_pool_destroy(pool);
        return -ENOMEM;
    }
    for (int32_t i = 0; i < threads - 1; i++) {
        struct worker *worker = &pool->workers[i];
        worker->pool = pool;
        worker->index = i + 1;
        int rc = pthread_create(&worker->thread, NULL, worker_main, worker);
        if (rc != 0) {
            tv_cpu_pool_destroy(pool);
            return -rc;
        }
        pool->started++;
    }
    *ret_pool = pool;
    return 0;
}
