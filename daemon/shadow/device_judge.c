/*
 * device_judge.c - the kernel oracle on a device: the naive slot over a captured round, layer by
 * layer, on the shadow thread's own table; the numbers are compared on the host.
 *
 * Owns its host buffers for the time of one round. Refuses to widen a bound: the size of scores is
 * taken from the log-sum-exps, which can only make it smaller than it is.
 */
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "shadow/device.h"

struct judge {
    struct tv_shadow *shadow;
    struct tv_shadow_round *round;
    struct tv_shadow_device *device;
    struct tv_shadow_layout layout;
    size_t rows;        /* [nodes, heads] */
    float *out, *lse;   /* host: the oracle's */
    float *rounded;     /* host: the oracle's with bf16 probabilities */
    float *rounded_lse; /* host */
    char *fast;         /* host: what the layer's kernel was given and gave, as in the arena */
};

static const float *fast_lse(const struct judge *judge)
{
    return (const float *)(const void *)(judge->fast + judge->layout.lse_at);
}

static void judge_finish(struct judge *judge)
{
    free(judge->out);
    free(judge->lse);
    free(judge->rounded);
    free(judge->rounded_lse);
    free(judge->fast);
}

/* Host buffers, and the lists that are the same for all layers. */
static int judge_take(struct judge *judge)
{
    const struct tv_shadow_round *round = judge->round;
    struct tv_kernels *side = judge->device->side;
    size_t values = judge->rows * (size_t)round->latent_dim;
    size_t count = 2 + (size_t)round->nodes + (size_t)round->full_pages;
    judge->out = malloc(values * sizeof *judge->out);
    judge->lse = malloc(judge->rows * sizeof *judge->lse);
    judge->rounded = malloc(values * sizeof *judge->rounded);
    judge->rounded_lse = malloc(judge->rows * sizeof *judge->rounded_lse);
    judge->fast = malloc(judge->layout.stride);
    int32_t *lists = malloc(count * sizeof *lists);
    int rc = judge->out == NULL || judge->lse == NULL || judge->rounded == NULL ||
                     judge->rounded_lse == NULL || judge->fast == NULL || lists == NULL
                 ? -ENOMEM
                 : 0;
    if (rc == 0) {
        lists[0] = round->prefix_len;
        lists[1] = round->nodes;
        memcpy(lists + 2, round->parents, (size_t)round->nodes * sizeof *lists);
        memcpy(lists + 2 + round->nodes, round->pages, (size_t)round->full_pages * sizeof *lists);
        rc = side->upload(side, judge->device->integers, lists, count * sizeof *lists);
    }
    int sync_rc = rc == 0 ? side->sync(side) : rc; /* before the lists are freed */
    free(lists);
    return sync_rc;
}

static struct tv_verify_attn attn_of(const struct judge *judge, int32_t layer, int32_t round_p)
{
    const struct tv_shadow_round *round = judge->round;
    const struct tv_shadow_device *device = judge->device;
    return (struct tv_verify_attn){
        .batch = 1,
        .q_len = round->nodes,
        .heads = round->heads,
        .latent_dim = round->latent_dim,
        .rope_dim = round->rope_dim,
        .softmax_scale = round->softmax_scale,
        .dtype = round->dtype,
        .out_dtype = TV_F32,
        .q = device->arena + round->arena_at + (size_t)layer * judge->layout.stride,
        .kv_pages = tv_cache_layer(round->cache, layer),
        .page_count = tv_cache_params(round->cache)->pages,
        .page_size = round->page_size,
        .max_pages = round->full_pages,
        .page_table = device->integers + 2 + round->nodes,
        .prefix_len = device->integers,
        .node_count = device->integers + 1,
        .parents = device->integers + 2,
        .kv_len_max = round->prefix_len + round->nodes,
        .round_p_bf16 = round_p,
        .sum_f32 = round->dtype == TV_BF16, /* a thousandth of what bf16 rows are held to */
        .blocks_max = TV_SHADOW_BLOCKS,
        .out = device->out,
        .lse = device->lse,
        .workspace = device->workspace,
        .workspace_bytes = device->workspace_bytes,
    };
}

/* One launch of the oracle and its result on the host, while the round's pages are its own. */
static int layer_run(struct judge *judge, int32_t layer, int32_t round_p, float *out, float *lse)
{
    struct tv_shadow_device *device = judge->device;
    struct tv_kernels *side = device->side;
    const struct tv_verify_attn attn = attn_of(judge, layer, round_p);
    if (!tv_shadow_pages_enter(judge->round)) {
        return -ECANCELED;
    }
    int rc = side->verify_attn_naive(side, &attn);
    if (rc ==
        0) { /* a copy to such memory that waits for a kernel keeps other threads' calls out */
        rc = side->sync(side);
    }
    if (rc == 0) {
        rc = side->download(side, out, device->out,
                            judge->rows * (size_t)judge->round->latent_dim * sizeof *out);
    }
    if (rc == 0) {
        rc = side->download(side, lse, device->lse, judge->rows * sizeof *lse);
    }
    if (rc == 0) {
        rc = side->download(side, judge->fast, attn.q, judge->layout.stride);
    }
    int sync_rc = side->sync(side);
    tv_shadow_pages_leave(judge->round);
    return rc != 0 ? rc : sync_rc;
}

/* Not above s of the contract: a row's largest score is at least its lse less ln of its length. */
static double score_scale(const struct judge *judge)
{
    double rest = log((double)(judge->round->prefix_len + judge->round->nodes)), largest = 0.0;
    for (size_t i = 0; i < judge->rows; i++) {
        largest = fmax(largest, (double)judge->lse[i] - rest);
    }
    return fmax(1.0, largest / 16.0);
}

static int layer_within(struct judge *judge, int32_t layer,
                        const struct tv_shadow_difference *difference, int *ret_within)
{
    const struct tv_shadow_round *round = judge->round;
    int f32 = round->dtype == TV_F32;
    double s = score_scale(judge), rel_l2 = difference->kernel.rel_l2;
    double lse_bound = f32 ? TV_SHADOW_LSE_ABS_F32 : TV_SHADOW_LSE_ABS_BF16;
    double rel_bound = f32 ? TV_SHADOW_REL_L2_F32 * s : TV_SHADOW_REL_L2_BF16;
    *ret_within = rel_l2 <= rel_bound && difference->lse_abs <= lse_bound * s;
    if (!*ret_within || f32 || rel_l2 <= TV_SHADOW_REL_L2_F32 * s) {
        return 0;
    }
    int rc = 0;
    *ret_within = 0;
    for (int32_t k = 1; rc == 0 && !*ret_within && k <= TV_SHADOW_ROUNDINGS; k++) {
        rc = layer_run(judge, layer, k, judge->rounded, judge->rounded_lse);
        if (rc == 0) {
            struct tv_shadow_difference rounded = tv_shadow_difference_of(
                round, judge->out, judge->lse, judge->rounded, TV_F32, judge->rounded_lse);
            *ret_within = rel_l2 <= 2.0 * rounded.kernel.rel_l2;
        }
    }
    return rc;
}

/* The layer's rows as pages on the host, those that are not there NaN. */
static int kv_fetch(const struct judge *judge, int32_t layer, char *kv)
{
    const struct tv_shadow_round *round = judge->round;
    struct tv_kernels *side = judge->device->side;
    size_t row_bytes = tv_shadow_round_row_bytes(round);
    size_t page_bytes = (size_t)round->page_size * row_bytes;
    int32_t end = round->prefix_len + round->nodes;
    int rc = 0;
    memset(kv, 0xff, (size_t)round->full_pages * page_bytes);
    for (int32_t p = 0; rc == 0 && p < round->full_pages; p++) {
        int32_t rows = end - p * round->page_size;
        rows = rows < round->page_size ? rows : round->page_size;
        if (!tv_shadow_pages_enter(round)) {
            return -ECANCELED;
        }
        rc = side->download(side, kv + (size_t)p * page_bytes,
                            (const char *)tv_cache_layer(round->cache, layer) +
                                (size_t)round->pages[p] * page_bytes,
                            (size_t)rows * row_bytes);
        int sync_rc = side->sync(side);
        rc = rc != 0 ? rc : sync_rc;
        tv_shadow_pages_leave(round);
    }
    return rc;
}

static void reproduce(struct judge *judge, int32_t layer)
{
    struct tv_shadow_round *round = judge->round;
    char *kv = malloc((size_t)round->full_pages * (size_t)round->page_size *
                      tv_shadow_round_row_bytes(round));
    struct tv_shadow_layer_copy *layers = calloc((size_t)round->layer_count, sizeof *layers);
    if (kv == NULL || layers == NULL || kv_fetch(judge, layer, kv) != 0) {
        tv_shadow_files_add(judge->shadow, "kernel", NULL, 0); /* listed without a reproducer */
    } else {
        layers[layer] = (struct tv_shadow_layer_copy){
            .q = judge->fast,
            .out = judge->fast + judge->layout.out_at,
            .lse = (float *)(void *)(judge->fast + judge->layout.lse_at),
        };
        round->layers = layers;
        tv_shadow_reproduce_kernel(judge->shadow, round, layer, kv, judge->out, judge->lse);
        round->layers = NULL;
    }
    free(layers);
    free(kv);
}

/* Are the committed rows, of every layer, those that its kernel read? */
static int moved_look(struct judge *judge)
{
    struct tv_shadow_round *round = judge->round;
    struct tv_kernels *side = judge->device->side;
    size_t row_bytes = tv_shadow_round_row_bytes(round);
    size_t bytes = (size_t)round->layer_count * (size_t)round->moved_count * row_bytes;
    char *moved = malloc(bytes + row_bytes), *row = moved + bytes;
    if (moved == NULL) {
        return -ENOMEM;
    }
    int rc = side->download(side, moved,
                            judge->device->arena + round->arena_at + judge->layout.moved_at, bytes);
    for (int32_t layer = 0; rc == 0 && layer < round->layer_count; layer++) {
        for (int32_t i = 0; rc == 0 && i < round->moved_count; i++) {
            int32_t at = round->prefix_len + round->moved[i];
            size_t slot = (size_t)round->pages[at / round->page_size] * (size_t)round->page_size +
                          (size_t)(at % round->page_size);
            if (!tv_shadow_pages_enter(round)) {
                rc = -ECANCELED;
                break;
            }
            rc = side->download(
                side, row, (const char *)tv_cache_layer(round->cache, layer) + slot * row_bytes,
                row_bytes);
            int sync_rc = side->sync(side);
            rc = rc != 0 ? rc : sync_rc;
            tv_shadow_pages_leave(round);
            size_t place = (size_t)layer * (size_t)round->moved_count + (size_t)i;
            round->moved_wrong |= rc == 0 && memcmp(moved + place * row_bytes, row, row_bytes) != 0;
        }
    }
    free(moved);
    return rc;
}

static int layer_judge(struct judge *judge, int32_t layer, struct tv_parity_kernel *worst,
                       int *within)
{
    struct tv_shadow_round *round = judge->round;
    int layer_ok = 0;
    int rc = layer_run(judge, layer, 0, judge->out, judge->lse);
    if (rc != 0) {
        return rc;
    }
    struct tv_shadow_difference difference =
        tv_shadow_difference_of(round, judge->out, judge->lse, judge->fast + judge->layout.out_at,
                                round->out_dtype, fast_lse(judge));
    rc = layer_within(judge, layer, &difference, &layer_ok);
    tv_shadow_worst_join(worst, &difference.kernel);
    if (rc == 0 && !layer_ok) {
        if (*within) { /* the first violating layer explains those behind it */
            reproduce(judge, layer);
        }
        *within = 0;
    }
    return rc;
}

int tv_shadow_device_judge(struct tv_shadow *shadow, struct tv_shadow_round *round,
                           struct tv_parity_kernel *ret_worst, int *ret_within)
{
    struct judge judge = {.shadow = shadow,
                          .round = round,
                          .device = shadow->device,
                          .layout = tv_shadow_layout_of(round),
                          .rows = (size_t)round->nodes * (size_t)round->heads};
    struct tv_parity_kernel worst = {0};
    int within = 1;
    int rc = judge_take(&judge);
    for (int32_t layer = 0; rc == 0 && layer < round->layer_count; layer++) {
        rc = tv_shadow_stopping(shadow) ? -ECANCELED : layer_judge(&judge, layer, &worst, &within);
    }
    if (rc == 0) {
        rc = moved_look(&judge);
    }
    rc = within ? rc : 0; /* a violation that was found stays one */
    judge_finish(&judge);
    if (rc == 0) {
        *ret_worst = worst;
        *ret_within = within;
    }
    return rc;
}
