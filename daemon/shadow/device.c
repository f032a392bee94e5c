/*
 * device.c - rounds captured inside a device, for the kernel oracle there.
 *
 * Owns the second table and its memory, all taken at the start: an arena for what the next layer
 * overwrites, buffers of one judgement. What the commit moves goes to pages of the pool that only
 * judgements hold. Refuses to wait, to take pages that anybody lacks, and what does not fit: such a
 * round is not judged.
 */
#include "shadow/device.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#define ALIGNMENT   256 /* of everything in the arena */
#define ROUND_NODES 64  /* the arena has room for two rounds of so many */
#define ROUNDS      2
#define ARENA_MIN   ((size_t)16 << 20)
#define ARENA_MAX   ((size_t)1 << 30)
#define NODES_MAX   256 /* larger trees are not judged */

static size_t aligned(size_t bytes)
{
    return (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
}

struct tv_shadow_layout tv_shadow_layout_of(const struct tv_shadow_round *round)
{
    size_t rows = (size_t)round->nodes * (size_t)round->heads;
    size_t row_bytes = tv_shadow_round_row_bytes(round);
    struct tv_shadow_layout layout = {
        .q = rows * row_bytes,
        .out = rows * (size_t)round->latent_dim * tv_dtype_size(round->out_dtype),
        .lse = rows * sizeof(float),
    };
    layout.out_at = aligned(layout.q);
    layout.lse_at = layout.out_at + aligned(layout.out);
    layout.stride = layout.lse_at + aligned(layout.lse);
    layout.moved_at = layout.stride * (size_t)round->layer_count;
    layout.bytes =
        layout.moved_at + aligned((size_t)round->layer_count * (size_t)round->nodes * row_bytes);
    return layout;
}

static void *take(struct tv_kernels *kernels, size_t bytes, int *err)
{
    void *memory = *err == 0 ? kernels->alloc(kernels, bytes) : NULL;
    *err = memory == NULL ? -ENOMEM : *err;
    return memory;
}

static size_t arena_size(const struct tv_model_config *config, size_t element)
{
    size_t row = (size_t)(config->kv_lora + config->rope_dim) * element;
    size_t head = row + (size_t)config->kv_lora * sizeof(float) + sizeof(float);
    size_t bytes = ROUNDS * (size_t)ROUND_NODES * (size_t)config->layers *
                   ((size_t)config->heads * head + row);
    bytes += ROUNDS * 4 * ALIGNMENT * (size_t)config->layers;
    bytes = bytes > ARENA_MIN ? bytes : ARENA_MIN;
    return aligned(bytes < ARENA_MAX ? bytes : ARENA_MAX);
}

/* What one shadow takes. */
struct sizes {
    int32_t nodes, pages; /* of one round at most */
    size_t arena, integers, out, lse, workspace;
};

static struct sizes sizes_of(const struct tv_kernels *device, const struct tv_model *model,
                             enum tv_dtype kv_dtype, int32_t page_size)
{
    const struct tv_model_config *config = tv_model_config(model);
    const struct tv_model_options *options = tv_model_options(model);
    struct sizes sizes = {
        .nodes = options->rows_max < NODES_MAX ? options->rows_max : NODES_MAX,
        .pages = (options->max_len + TV_TREE_NODES_MAX) / page_size + 2,
        .arena = arena_size(config, tv_dtype_size(kv_dtype)),
    };
    size_t rows = (size_t)sizes.nodes * (size_t)config->heads;
    /* the launch of the oracle that needs most */
    const struct tv_verify_attn attn = {
        .batch = 1,
        .q_len = sizes.nodes,
        .heads = config->heads,
        .latent_dim = config->kv_lora,
        .rope_dim = config->rope_dim,
        .dtype = kv_dtype,
        .out_dtype = TV_F32,
        .page_count = 1,
        .page_size = page_size,
        .max_pages = sizes.pages,
        .kv_len_max = options->max_len + TV_TREE_NODES_MAX,
        .blocks_max = TV_SHADOW_BLOCKS,
    };
    sizes.integers = (size_t)(2 + sizes.nodes + sizes.pages) * sizeof(int32_t);
    sizes.out = rows * (size_t)config->kv_lora * sizeof(float);
    sizes.lse = rows * sizeof(float);
    sizes.workspace = device->verify_attn_naive_workspace(device, &attn);
    return sizes;
}

size_t tv_shadow_device_bytes(const struct tv_kernels *device, const struct tv_model *model,
                              enum tv_dtype kv_dtype, int32_t page_size)
{
    if (device->host_memory || device->side == NULL) {
        return 0;
    }
    struct sizes sizes = sizes_of(device, model, kv_dtype, page_size);
    return sizes.arena + sizes.integers + sizes.out + sizes.lse + sizes.workspace;
}

int tv_shadow_device_create(struct tv_kernels *worker, const struct tv_model *model,
                            const struct tv_cache *cache, struct tv_shadow_device **ret_device)
{
    *ret_device = NULL;
    if (worker == NULL || worker->host_memory || worker->side == NULL || model == NULL ||
        cache == NULL) {
        return 0;
    }
    const struct tv_cache_params *params = tv_cache_params(cache);
    struct tv_shadow_device *device = calloc(1, sizeof *device);
    if (device == NULL) {
        return -ENOMEM;
    }
    (void)pthread_mutex_init(&device->lock, NULL); /* default attributes cannot fail */
    device->worker = worker;
    int err = worker->side(worker, &device->side);
    if (err == 0) {
        struct sizes sizes = sizes_of(worker, model, params->dtype, params->page_size);
        device->nodes_max = sizes.nodes;
        device->pages_max = sizes.pages;
        device->arena_bytes = sizes.arena;
        device->workspace_bytes = sizes.workspace;
        device->arena = take(device->side, sizes.arena, &err);
        device->integers = take(device->side, sizes.integers, &err);
        device->out = take(device->side, sizes.out, &err);
        device->lse = take(device->side, sizes.lse, &err);
        device->workspace = take(device->side, sizes.workspace, &err);
    }
    if (err != 0) {
        tv_shadow_device_destroy(device);
        return err;
    }
    *ret_device = device;
    return 0;
}

void tv_shadow_device_destroy(struct tv_shadow_device *device)
{
    if (device == NULL) {
        return;
    }
    struct tv_kernels *side = device->side;
    void *memory[] = {device->arena, device->integers, device->out, device->lse, device->workspace};
    for (size_t i = 0; side != NULL && i < sizeof memory / sizeof memory[0]; i++) {
        if (memory[i] != NULL) {
            side->free(side, memory[i]);
        }
    }
    if (side != NULL) {
        side->destroy(side);
    }
    (void)pthread_mutex_destroy(&device->lock);
    free(device);
}

/* A free part of the arena, the first that is large enough. -ENOSPC. */
static int arena_take(struct tv_shadow_device *device, size_t bytes, size_t *ret_at)
{
    int rc = -ENOSPC;
    pthread_mutex_lock(&device->lock);
    size_t at = 0;
    int32_t i = 0;
    while (i < device->used_count && device->used[i].at - at < bytes) {
        at = device->used[i].at + device->used[i].bytes;
        i++;
    }
    if (device->used_count < TV_SHADOW_EXTENTS_MAX && device->arena_bytes - at >= bytes) {
        memmove(&device->used[i + 1], &device->used[i],
                (size_t)(device->used_count - i) * sizeof device->used[0]);
        device->used[i] = (struct tv_shadow_extent){.at = at, .bytes = bytes};
        device->used_count++;
        *ret_at = at;
        rc = 0;
    }
    pthread_mutex_unlock(&device->lock);
    return rc;
}

void tv_shadow_device_give_back(struct tv_shadow *shadow, struct tv_shadow_round *round)
{
    struct tv_shadow_device *device = shadow->device;
    if (!round->on_device || round->arena_bytes == 0) {
        return;
    }
    pthread_mutex_lock(&device->lock);
    int32_t i = 0;
    while (device->used[i].at != round->arena_at) {
        i++;
    }
    device->used_count--;
    memmove(&device->used[i], &device->used[i + 1],
            (size_t)(device->used_count - i) * sizeof device->used[0]);
    pthread_mutex_unlock(&device->lock);
    round->arena_bytes = 0;
}

/* Pages for a copy of the rows behind the last whole page; they are held by the round's pin alone.
 * -ENOSPC: others might need them. */
static int tail_pages_take(struct tv_shadow *shadow, struct tv_shadow_round *round,
                           const int32_t *table)
{
    struct tv_cache *cache = shadow->cache;
    struct tv_cache_seq seq = {.pages = NULL};
    struct tv_cache_shortage shortage;
    struct tv_cache_counts counts;
    int32_t full = round->prefix_len / round->page_size;
    int32_t tail_rows = round->prefix_len + round->nodes - full * round->page_size;
    int32_t tail = (tail_rows + round->page_size - 1) / round->page_size;
    round->pages = tv_shadow_round_take(round, (size_t)(full + tail) * sizeof *round->pages);
    if (round->pages == NULL) {
        return -ENOMEM;
    }
    tv_cache_counts(cache, &counts);
    int rc = counts.free < tail ? -ENOSPC : tv_cache_reserve(cache, &seq, tail_rows, &shortage);
    if (rc == 0) {
        memcpy(round->pages, table, (size_t)full * sizeof *round->pages);
        memcpy(round->pages + full, seq.pages, (size_t)tail * sizeof *round->pages);
        round->full_pages = full + tail;
        rc = tv_shadow_pin(shadow, round);
        round->full_pages = rc == 0 ? round->full_pages : 0;
    }
    tv_cache_seq_finish(cache, &seq);
    return rc;
}

static int round_open(struct tv_shadow *shadow, struct tv_shadow_round *round,
                      const struct tv_verify_attn *attn)
{
    struct tv_shadow_device *device = shadow->device;
    int32_t nodes = attn->q_len;
    if (nodes > device->nodes_max || attn->max_pages > device->pages_max) {
        return -ENOSPC;
    }
    tv_shadow_round_shape(round, attn);
    round->parents = tv_shadow_round_take(round, (size_t)nodes * sizeof *round->parents);
    round->table = tv_shadow_round_take(round, (size_t)attn->max_pages * sizeof *round->table);
    if (round->parents == NULL || round->table == NULL) {
        return -ENOMEM;
    }
    int rc =
        tv_shadow_fetch(shadow, &round->prefix_len, attn->prefix_len, sizeof round->prefix_len);
    if (rc == 0) {
        rc = tv_shadow_fetch(shadow, round->parents, attn->parents,
                             (size_t)nodes * sizeof *round->parents);
    }
    if (rc == 0) {
        rc = tv_shadow_fetch(shadow, round->table, attn->page_table,
                             (size_t)attn->max_pages * sizeof *round->table);
    }
    if (rc == 0) {
        rc = tv_shadow_fetch_sync(shadow);
    }
    if (rc == 0) {
        round->tail_start = round->prefix_len / round->page_size * round->page_size;
        rc = tail_pages_take(shadow, round, round->table);
    }
    if (rc == 0) {
        size_t bytes = tv_shadow_layout_of(round).bytes;
        rc = arena_take(device, bytes, &round->arena_at);
        round->arena_bytes = rc == 0 ? bytes : 0;
    }
    return rc;
}

/* `count` rows of every layer from a slot of the pool. */
static int rows_copy(struct tv_shadow *shadow, char *to, size_t to_stride, int64_t slot,
                     int32_t count, size_t row_bytes)
{
    const struct tv_cache_params *params = tv_cache_params(shadow->cache);
    struct tv_kernels *kernels = shadow->device->worker;
    size_t layer_bytes = (size_t)params->pages * (size_t)params->page_size * row_bytes;
    const char *pool = tv_cache_layer(shadow->cache, 0);
    return kernels->copy(kernels, to, to_stride, pool + (size_t)slot * row_bytes, layer_bytes,
                         (size_t)count * row_bytes, params->layers);
}

/* All layers have written: the rows that the commit moves, to the round's own pages. */
static int tail_copy(struct tv_shadow *shadow, struct tv_shadow_round *round)
{
    const struct tv_cache_params *params = tv_cache_params(shadow->cache);
    size_t row_bytes = tv_shadow_round_row_bytes(round);
    size_t layer_bytes = (size_t)params->pages * (size_t)params->page_size * row_bytes;
    char *pool = tv_cache_layer(shadow->cache, 0);
    int32_t end = round->prefix_len + round->nodes;
    int rc = 0;
    for (int32_t row = round->tail_start; rc == 0 && row < end; row += round->page_size) {
        int32_t page = row / round->page_size;
        int32_t count = end - row < round->page_size ? end - row : round->page_size;
        size_t to = (size_t)round->pages[page] * (size_t)round->page_size * row_bytes;
        rc = rows_copy(shadow, pool + to, layer_bytes,
                       (int64_t)round->table[page] * round->page_size, count, row_bytes);
    }
    return rc;
}

int tv_shadow_device_layer(struct tv_shadow *shadow, struct tv_shadow_round *round, int32_t layer,
                           const struct tv_verify_attn *attn)
{
    struct tv_kernels *kernels = shadow->device->worker;
    int rc = layer == 0 ? round_open(shadow, round, attn) : 0;
    if (rc != 0) {
        return rc;
    }
    struct tv_shadow_layout layout = tv_shadow_layout_of(round);
    char *to = shadow->device->arena + round->arena_at + (size_t)layer * layout.stride;
    rc = kernels->copy(kernels, to, layout.q, attn->q, layout.q, layout.q, 1);
    if (rc == 0) {
        rc = kernels->copy(kernels, to + layout.out_at, layout.out, attn->out, layout.out,
                           layout.out, 1);
    }
    if (rc == 0) {
        rc = kernels->copy(kernels, to + layout.lse_at, layout.lse, attn->lse, layout.lse,
                           layout.lse, 1);
    }
    return rc == 0 && layer == round->layer_count - 1 ? tail_copy(shadow, round) : rc;
}

int tv_shadow_device_committed(struct tv_shadow *shadow, struct tv_shadow_round *round,
                               const struct tv_cache_seq *seq, const int32_t *nodes, int32_t count)
{
    size_t row_bytes = tv_shadow_round_row_bytes(round);
    char *to = shadow->device->arena + round->arena_at + tv_shadow_layout_of(round).moved_at;
    int rc = 0;
    round->moved = tv_shadow_round_take(round, (size_t)count * sizeof *round->moved);
    if (round->moved == NULL) {
        return -ENOMEM;
    }
    memcpy(round->moved, nodes, (size_t)count * sizeof *round->moved);
    round->moved_count = count;
    for (int32_t i = 0; rc == 0 && i < count;) {
        int32_t row = seq->len - count + i;
        int32_t rest = round->page_size - row % round->page_size;
        int32_t piece = rest < count - i ? rest : count - i;
        rc = rows_copy(shadow, to + (size_t)i * row_bytes, (size_t)count * row_bytes,
                       tv_cache_slot(shadow->cache, seq, row), piece, row_bytes);
        i += piece;
    }
    return rc == 0 ? tv_shadow_fetch_sync(shadow) : rc;
}
