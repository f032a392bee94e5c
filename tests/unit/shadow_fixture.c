/*
 * shadow_fixture.c - an engine, its shadow and one prefilled round, with faults to plant.
 */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "folder.h"
#include "shadow_fixture.h"

static void planted_layer(void *context, int32_t layer, const struct tv_verify_attn *attn)
{
    struct planted *planted = context;
    struct tv_verify_attn broken = *attn;
    size_t row = (size_t)(attn->latent_dim + attn->rope_dim);
    int32_t parents[64];
    if (layer != planted->layer || planted->fault == FAULT_NONE) {
        tv_shadow_layer(planted->round, layer, attn);
        return;
    }
    /* the model goes on with the right rows: only what is captured is broken */
    size_t rows = (size_t)attn->q_len * (size_t)attn->heads;
    size_t out_bytes = rows * (size_t)attn->latent_dim * sizeof(float);
    broken.out = malloc(out_bytes);
    broken.lse = malloc(rows * sizeof *broken.lse);
    assert_non_null(broken.out);
    assert_non_null(broken.lse);
    memcpy(broken.out, attn->out, out_bytes);
    memcpy(broken.lse, attn->lse, rows * sizeof *broken.lse);
    switch (planted->fault) {
    case FAULT_OUTPUT: /* what the fast kernel wrote is wrong in one element */
        ((float *)broken.out)[1234] += 0.01f;
        break;
    case FAULT_NAN:
        ((float *)broken.out)[77] = NAN;
        break;
    case FAULT_LSE:
        broken.lse[3] += 1e-3f;
        break;
    case FAULT_PAGE: { /* a bit of a prefix row flips after the kernel read it */
        uintptr_t address = (uintptr_t)attn->kv_pages;
        size_t at = ((size_t)attn->page_table[0] * (size_t)attn->page_size + 5) * row + 17;
        if (attn->dtype == TV_F32) { /* a bit of the exponent */
            ((uint32_t *)address)[at] ^= UINT32_C(1) << 24;
        } else {
            ((uint16_t *)address)[at] ^= UINT16_C(1) << 8;
        }
        break;
    }
    case FAULT_MASK: /* the kernel saw another ancestor than the tree says */
        memcpy(parents, attn->parents, (size_t)attn->q_len * sizeof *parents);
        parents[attn->q_len - 1] = parents[attn->q_len - 1] == 0 ? 1 : 0;
        broken.parents = parents;
        break;
    case FAULT_NONE:
        break;
    }
    tv_shadow_layer(planted->round, layer, &broken);
    free(broken.out);
    free(broken.lse);
}

static void planted_committed(void *context, const struct tv_cache_seq *seq, const int32_t *nodes,
                              int32_t count)
{
    struct planted *planted = context;
    tv_shadow_committed(planted->round, seq, nodes, count);
}

void waiter_done(void *context, const struct tv_shadow_block *block)
{
    struct waiter *waiter = context;
    (void)pthread_mutex_lock(&waiter->lock);
    waiter->block = *block;
    waiter->done = 1;
    (void)pthread_cond_signal(&waiter->changed);
    (void)pthread_mutex_unlock(&waiter->lock);
}

struct tv_shadow_block waiter_wait(struct waiter *waiter)
{
    (void)pthread_mutex_lock(&waiter->lock);
    while (!waiter->done) {
        (void)pthread_cond_wait(&waiter->changed, &waiter->lock);
    }
    (void)pthread_mutex_unlock(&waiter->lock);
    return waiter->block;
}

void bench_open(struct bench *bench, const char *model, int32_t page_size, double probability,
                size_t queue_bytes, int with_dir)
{
    bench_open_kv(bench, model, page_size, TV_F32, probability, queue_bytes, with_dir);
}

void bench_open_kv(struct bench *bench, const char *model, int32_t page_size,
                   enum tv_dtype kv_dtype, double probability, size_t queue_bytes, int with_dir)
{
    struct tv_test_random random = {.state = 17};
    struct tv_engine_fixture_options options = {
        .model = model, .page_size = page_size, .kv_dtype = kv_dtype};
    memset(bench, 0, sizeof *bench);
    tv_engine_fixture_open(&bench->fixture, &options);
    struct tv_engine *engine = bench->fixture.engine;
    tv_tiny_folder(bench->dir, sizeof bench->dir);
    struct tv_shadow_params params = {.probability = probability,
                                      .queue_bytes_max = queue_bytes,
                                      .state_dir = with_dir ? bench->dir : NULL,
                                      .device = bench->fixture.base.kernels};
    assert_int_equal(tv_shadow_create(&params, bench->fixture.base.model, bench->fixture.base.cache,
                                      &bench->shadow),
                     0);
    bench->context = tv_test_context(engine);
    for (int32_t i = 0; i < PREFIX_LEN; i++) {
        bench->prefix[i] = tv_test_random_below(&random, engine->vocab);
    }
    bench->rule = tv_test_sampled(engine, 0.9f, 3);
    int32_t pending =
        tv_test_prefill(engine, bench->context, bench->prefix, PREFIX_LEN, &bench->rule);
    tv_test_tree_random(&bench->tree, 33, engine->vocab, pending, &random);
}

void bench_close(struct bench *bench)
{
    tv_shadow_destroy(bench->shadow);
    tv_tree_finish(&bench->tree);
    bench->fixture.engine->ops->context_close(bench->fixture.engine, bench->context);
    tv_engine_fixture_close(&bench->fixture);
    tv_tiny_folder_remove(bench->dir);
}

struct tv_parity_case case_of(const struct bench *bench, const struct tv_round_out *out,
                              struct tv_shadow_round *round)
{
    return (struct tv_parity_case){.prefix = bench->prefix,
                                   .prefix_len = PREFIX_LEN,
                                   .tree = &bench->tree,
                                   .rule = bench->rule,
                                   .logits = out->logits,
                                   .accepted_nodes = out->nodes,
                                   .accepted_count = out->accepted_count,
                                   .pending = out->end.token,
                                   .noise = tv_engine_near_tie(bench->fixture.engine),
                                   .round = round};
}

void round_run(struct bench *bench, struct planted *planted, struct tv_round_out *out)
{
    struct tv_engine *engine = bench->fixture.engine;
    struct tv_round_in in = {.context = bench->context,
                             .tree = &bench->tree,
                             .rule = bench->rule,
                             .lend_logits = 1,
                             .hook = planted->round != NULL ? planted_layer : NULL,
                             .committed = planted->round != NULL ? planted_committed : NULL,
                             .hook_context = planted};
    assert_int_equal(engine->ops->verify(engine, &in, 1, out), 0);
    assert_int_equal(out->code, TV_OK);
}

int32_t layer_of(enum fault fault)
{
    return fault == FAULT_MASK ? 0 : 1;
}

struct tv_shadow_block judged(struct bench *bench, enum fault fault, int32_t pending_change)
{
    struct planted planted = {.fault = fault, .layer = layer_of(fault)};
    struct waiter waiter = {.lock = PTHREAD_MUTEX_INITIALIZER, .changed = PTHREAD_COND_INITIALIZER};
    struct tv_round_out out;
    planted.round = tv_shadow_begin(bench->shadow, 1);
    assert_non_null(planted.round);
    round_run(bench, &planted, &out);
    struct tv_parity_case parity_case = case_of(bench, &out, planted.round);
    parity_case.pending = (parity_case.pending + pending_change) % bench->fixture.engine->vocab;
    tv_shadow_attach(bench->shadow, planted.round, &parity_case);
    tv_shadow_submit(bench->shadow, planted.round, waiter_done, &waiter);
    return waiter_wait(&waiter);
}

struct tv_parity_totals totals_of(struct bench *bench, struct tv_parity_violation *violations)
{
    struct tv_parity_totals totals;
    tv_shadow_totals(bench->shadow, &totals, violations, 32);
    return totals;
}
