/*
 * shadow_fixture.h - an engine, its shadow and one prefilled round, for the tests of the shadow.
 *
 * Faults are planted between the engine and the capture, as a broken kernel would: an output
 * element, a bit of a page, a bit of the mask. Every helper fails the running cmocka test instead
 * of returning an error.
 */
#ifndef TV_TESTS_UNIT_SHADOW_FIXTURE_H
#define TV_TESTS_UNIT_SHADOW_FIXTURE_H

#include <pthread.h>
#include <stddef.h>
#include <stdint.h>

#include "engine_fixture.h"
#include "shadow/shadow.h"
#include "verify/engine.h"

#define QUEUE_BYTES (64u << 20)
#define PREFIX_LEN  70

enum fault { FAULT_NONE, FAULT_OUTPUT, FAULT_PAGE, FAULT_MASK, FAULT_LSE, FAULT_NAN };

/* A hook in front of tv_shadow_layer that breaks one layer. */
struct planted {
    struct tv_shadow_round *round;
    enum fault fault;
    int32_t layer;
};

/* The block of one round, waited for. */
struct waiter {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    int done;
    struct tv_shadow_block block;
};

struct bench {
    struct tv_engine_fixture fixture;
    struct tv_shadow *shadow;
    struct tv_context *context;
    struct tv_tree tree;
    struct tv_round_rule rule;
    int32_t prefix[PREFIX_LEN];
    char dir[128];
};

void waiter_done(void *context, const struct tv_shadow_block *block);
struct tv_shadow_block waiter_wait(struct waiter *waiter);

/* A folder of its own is made in any case, and removed by bench_close. */
void bench_open(struct bench *bench, const char *model, int32_t page_size, double probability,
                size_t queue_bytes, int with_dir);
void bench_open_kv(struct bench *bench, const char *model, int32_t page_size,
                   enum tv_dtype kv_dtype, double probability, size_t queue_bytes, int with_dir);
void bench_close(struct bench *bench);

struct tv_parity_case case_of(const struct bench *bench, const struct tv_round_out *out,
                              struct tv_shadow_round *round);
/* One round of the bench, its layers through the plant when that has a round. */
void round_run(struct bench *bench, struct planted *planted, struct tv_round_out *out);
/* The mask is captured with the first layer, everything else with its own. */
int32_t layer_of(enum fault fault);
/* One forced round, judged; `pending_change` turns the fast answer wrong before it is attached. */
struct tv_shadow_block judged(struct bench *bench, enum fault fault, int32_t pending_change);
/* At most 32 violations. */
struct tv_parity_totals totals_of(struct bench *bench, struct tv_parity_violation *violations);

#endif
