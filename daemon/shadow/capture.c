/*
 * capture.c - copies of what a round's kernels were given and gave, and pins on its prefix pages.
 *
 * Owns a round's copies, for all layers taken at once with the first. Refuses to wait or to fail a
 * round: what does not fit marks the round as not judged, before anything is copied.
 */
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "shadow/device.h"

void tv_shadow_round_free(struct tv_shadow *shadow, struct tv_shadow_round *round)
{
    if (round == NULL) {
        return;
    }
    tv_shadow_unpin(shadow, round);
    tv_shadow_device_give_back(shadow, round);
    tv_shadow_pool_give_back(&shadow->pool, round->stores);
    free(round);
}

static int copies_by_kernels(const struct tv_shadow *shadow)
{
    return shadow->params.device != NULL && !shadow->params.device->host_memory;
}

int tv_shadow_fetch(const struct tv_shadow *shadow, void *host, const void *device, size_t bytes)
{
    struct tv_kernels *kernels = shadow->params.device;
    if (copies_by_kernels(shadow)) {
        return kernels->download(kernels, host, device, bytes);
    }
    memcpy(host, device, bytes);
    return 0;
}

int tv_shadow_fetch_sync(const struct tv_shadow *shadow)
{
    struct tv_kernels *kernels = shadow->params.device;
    return copies_by_kernels(shadow) ? kernels->sync(kernels) : 0;
}

size_t tv_shadow_round_row_bytes(const struct tv_shadow_round *round)
{
    return (size_t)(round->latent_dim + round->rope_dim) * tv_dtype_size(round->dtype);
}

/* Bytes of a layer's copies. */
struct sizes {
    size_t lse, q, out, tail;
};

static struct sizes sizes_of(const struct tv_shadow_round *round)
{
    size_t rows = (size_t)round->nodes * (size_t)round->heads;
    size_t row_bytes = tv_shadow_round_row_bytes(round);
    size_t tail_rows = (size_t)(round->prefix_len + round->nodes - round->tail_start);
    return (struct sizes){.lse = rows * sizeof(float),
                          .q = rows * row_bytes,
                          .out = rows * (size_t)round->latent_dim * tv_dtype_size(round->out_dtype),
                          .tail = tail_rows * row_bytes};
}

/* Memory for all layers, cut among them: wider elements first, so that all are aligned. */
static int layers_take(struct tv_shadow_round *round)
{
    struct sizes sizes = sizes_of(round);
    size_t count = (size_t)round->layer_count;
    size_t stride = sizes.lse + sizes.out + sizes.q + sizes.tail;
    stride = (stride + sizeof(float) - 1) / sizeof(float) * sizeof(float);
    round->layers = tv_shadow_round_take(round, count * sizeof *round->layers);
    char *at = round->layers != NULL ? tv_shadow_round_take(round, count * stride) : NULL;
    if (at == NULL) {
        return -ENOMEM;
    }
    for (int32_t layer = 0; layer < round->layer_count; layer++) {
        struct tv_shadow_layer_copy *copy = &round->layers[layer];
        copy->lse = (float *)(void *)at;
        copy->out = at + sizes.lse;
        copy->q = at + sizes.lse + sizes.out;
        copy->kv_tail = at + sizes.lse + sizes.out + sizes.q;
        at += stride;
    }
    return 0;
}

void tv_shadow_round_shape(struct tv_shadow_round *round, const struct tv_verify_attn *attn)
{
    round->nodes = attn->q_len;
    round->heads = attn->heads;
    round->latent_dim = attn->latent_dim;
    round->rope_dim = attn->rope_dim;
    round->page_size = attn->page_size;
    round->softmax_scale = attn->softmax_scale;
    round->dtype = attn->dtype;
    round->out_dtype = attn->out_dtype;
}

/* What is the same for all layers, the mask, the pins, and the memory. */
static int round_open(struct tv_shadow *shadow, struct tv_shadow_round *round,
                      const struct tv_verify_attn *attn)
{
    tv_shadow_round_shape(round, attn);
    size_t nodes = (size_t)round->nodes;
    round->parents = tv_shadow_round_take(round, nodes * sizeof *round->parents);
    int rc =
        tv_shadow_fetch(shadow, &round->prefix_len, attn->prefix_len, sizeof round->prefix_len);
    if (rc != 0 || round->parents == NULL) {
        return rc != 0 ? rc : -ENOMEM;
    }
    rc = tv_shadow_fetch(shadow, round->parents, attn->parents, nodes * sizeof *round->parents);
    if (rc == 0) {
        rc = tv_shadow_fetch_sync(shadow);
    }
    if (rc != 0) {
        return rc;
    }
    if (copies_by_kernels(shadow)) {
        return layers_take(
            round); /* the shadow thread cannot read the device: every row is copied */
    }
    int32_t full = round->prefix_len / round->page_size;
    round->pages = tv_shadow_round_take(round, (size_t)full * sizeof *round->pages);
    if (round->pages == NULL) {
        return -ENOMEM;
    }
    memcpy(round->pages, attn->page_table, (size_t)full * sizeof *round->pages);
    round->full_pages = full;
    round->tail_start = full * round->page_size;
    rc = layers_take(round);
    return rc == 0 ? tv_shadow_pin(shadow, round) : rc;
}

/* Rows tail_start .. prefix_len + nodes of the layer, page by page. */
static int tail_fetch(struct tv_shadow *shadow, const struct tv_shadow_round *round,
                      const struct tv_verify_attn *attn, const int32_t *page_table, char *ret_tail)
{
    size_t row_bytes = tv_shadow_round_row_bytes(round);
    int32_t end = round->prefix_len + round->nodes;
    int rc = 0;
    for (int32_t row = round->tail_start; rc == 0 && row < end;) {
        int32_t in_page = row % round->page_size;
        int32_t count = round->page_size - in_page;
        count = count < end - row ? count : end - row;
        int64_t slot = (int64_t)page_table[row / round->page_size] * round->page_size + in_page;
        rc = tv_shadow_fetch(shadow, ret_tail + (size_t)(row - round->tail_start) * row_bytes,
                             (const char *)attn->kv_pages + (size_t)slot * row_bytes,
                             (size_t)count * row_bytes);
        row += count;
    }
    return rc;
}

static int layer_fetch(struct tv_shadow *shadow, struct tv_shadow_round *round, int32_t layer,
                       const struct tv_verify_attn *attn)
{
    const struct tv_shadow_layer_copy *copy = &round->layers[layer];
    struct sizes sizes = sizes_of(round);
    int32_t *owned = NULL;
    const int32_t *page_table = attn->page_table;
    int rc = 0;
    if (copies_by_kernels(shadow)) {
        size_t table_bytes = (size_t)attn->max_pages * sizeof *owned;
        owned = malloc(table_bytes);
        rc =
            owned == NULL ? -ENOMEM : tv_shadow_fetch(shadow, owned, attn->page_table, table_bytes);
        rc = rc != 0 ? rc : tv_shadow_fetch_sync(shadow);
        page_table = owned;
    }
    rc = rc != 0 ? rc : tv_shadow_fetch(shadow, copy->q, attn->q, sizes.q);
    rc = rc != 0 ? rc : tv_shadow_fetch(shadow, copy->out, attn->out, sizes.out);
    rc = rc != 0 ? rc : tv_shadow_fetch(shadow, copy->lse, attn->lse, sizes.lse);
    rc = rc != 0 ? rc : tail_fetch(shadow, round, attn, page_table, copy->kv_tail);
    rc = rc != 0 ? rc : tv_shadow_fetch_sync(shadow);
    free(owned);
    return rc;
}

void tv_shadow_capture(struct tv_shadow *shadow, struct tv_shadow_round *round, int32_t layer,
                       const struct tv_verify_attn *attn)
{
    if (round->failed != 0 || layer < 0 || layer >= round->layer_count) {
        return;
    }
    int rc = layer == round->captured ? 0 : -EPROTO; /* they come in order, each once */
    if (rc == 0 && round->on_device) {
        rc = tv_shadow_device_layer(shadow, round, layer, attn);
    } else if (rc == 0) {
        rc = layer == 0 ? round_open(shadow, round, attn) : 0;
        rc = rc == 0 ? layer_fetch(shadow, round, layer, attn) : rc;
    }
    if (rc != 0) {
        round->failed = rc;
        return;
    }
    round->captured++;
}

int32_t tv_shadow_round_page_count(const struct tv_shadow_round *round)
{
    return (round->prefix_len + round->nodes + round->page_size - 1) / round->page_size;
}

size_t tv_shadow_round_kv_bytes(const struct tv_shadow_round *round)
{
    return (size_t)tv_shadow_round_page_count(round) * (size_t)round->page_size *
           tv_shadow_round_row_bytes(round);
}

int tv_shadow_round_kv(const struct tv_shadow_round *round, int32_t layer, void *kv)
{
    size_t row_bytes = tv_shadow_round_row_bytes(round);
    size_t page_bytes = (size_t)round->page_size * row_bytes;
    char *to = kv;
    memset(to, 0xff, tv_shadow_round_kv_bytes(round)); /* NaN in f32 and bf16 alike */
    for (int32_t p = 0; p < round->full_pages; p++) {
        if (!tv_shadow_pages_enter(round)) {
            return -ECANCELED;
        }
        memcpy(to + (size_t)p * page_bytes,
               (const char *)tv_cache_layer(round->cache, layer) +
                   (size_t)round->pages[p] * page_bytes,
               page_bytes);
        tv_shadow_pages_leave(round);
    }
    memcpy(to + (size_t)round->tail_start * row_bytes, round->layers[layer].kv_tail,
           (size_t)(round->prefix_len + round->nodes - round->tail_start) * row_bytes);
    return 0;
}

float tv_shadow_round_kv_at(const struct tv_shadow_round *round, int32_t layer, int32_t row,
                            int32_t i)
{
    size_t width = (size_t)(round->latent_dim + round->rope_dim);
    const void *rows = round->layers[layer].kv_tail;
    size_t at = (size_t)(row - round->tail_start) * width;
    if (row < round->tail_start) {
        rows = tv_cache_layer(round->cache, layer);
        at = ((size_t)round->pages[row / round->page_size] * (size_t)round->page_size +
              (size_t)(row % round->page_size)) *
             width;
    }
    at += (size_t)i;
    return round->dtype == TV_F32 ? ((const float *)rows)[at]
                                  : tv_bf16_to_f32(((const uint16_t *)rows)[at]);
}

float tv_shadow_round_out_at(const struct tv_shadow_round *round, int32_t layer, size_t i)
{
    const void *out = round->layers[layer].out;
    return round->out_dtype == TV_F32 ? ((const float *)out)[i]
                                      : tv_bf16_to_f32(((const uint16_t *)out)[i]);
}
