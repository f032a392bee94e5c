/*
 * verify.c - the absorbed pass over draft trees.
 *
 * The query of a head is multiplied into the latent space once (k_up transposed), attention runs on
 * the cached rows as they are, and v_up brings its result back. All trees of a pass are packed, row
 * after row; the mask follows from the parents.
 */
#include <errno.h>

#include "model/forward.h"

/* Device lists of a verify pass beside those of struct tv_forward. */
struct trees {
    int32_t count, q_len, max_pages, kv_len_max;
    const int32_t *parents, *row_start, *prefix_len, *node_count, *page_table;
};

static int item_check(const struct tv_model *model, const struct tv_model_item *item)
{
    const struct tv_cache_seq *seq = item->seq;
    if (item->rows < 1 || item->rows > TV_TREE_NODES_MAX || item->rows > seq->scratch) {
        return -EINVAL;
    }
    for (int32_t i = 0; i < item->rows; i++) {
        int32_t parent = item->parents[i], depth = item->depths[i];
        int root = i == 0 ? parent == -1 && depth == 0 : parent >= 0 && parent < i;
        if (!root || item->tokens[i] < 0 || item->tokens[i] >= model->config.vocab || depth < 0 ||
            depth >= model->options.max_len - seq->len) {
            return -EINVAL;
        }
    }
    return 0;
}

static int items_check(const struct tv_model *model, const struct tv_cache *cache,
                       const struct tv_model_item *items, int32_t count, int32_t *ret_rows)
{
    int64_t rows = 0;
    if (count < 1 || count > model->options.requests_max || !tv_forward_cache_fits(model, cache)) {
        return -EINVAL;
    }
    for (int32_t i = 0; i < count; i++) {
        int err = item_check(model, &items[i]);
        if (err != 0) {
            return err;
        }
        rows += items[i].rows;
    }
    if (rows > model->options.rows_max) {
        return -EINVAL;
    }
    *ret_rows = (int32_t)rows;
    return 0;
}

/* Per row: slot, token, position, parent. */
static int stage_rows(struct tv_forward *pass, struct trees *trees,
                      const struct tv_model_item *items)
{
    struct tv_model_stage *stage = &pass->model->buffers.stage;
    size_t rows = (size_t)pass->rows;
    const void *device_slots, *device_tokens, *device_positions, *device_parents;
    stage->used = 0;
    int64_t *slots = tv_forward_stage(stage, rows * sizeof *slots, &device_slots);
    int32_t *tokens = tv_forward_stage(stage, rows * sizeof *tokens, &device_tokens);
    int32_t *positions = tv_forward_stage(stage, rows * sizeof *positions, &device_positions);
    int32_t *parents = tv_forward_stage(stage, rows * sizeof *parents, &device_parents);
    if (slots == NULL || tokens == NULL || positions == NULL || parents == NULL) {
        return -EINVAL;
    }
    int32_t row = 0;
    for (int32_t b = 0; b < trees->count; b++) {
        const struct tv_model_item *item = &items[b];
        for (int32_t i = 0; i < item->rows; i++, row++) {
            slots[row] = tv_cache_slot(pass->cache, item->seq, item->seq->len + i);
            tokens[row] = item->tokens[i];
            positions[row] = item->seq->len + item->depths[i];
            parents[row] = item->parents[i];
        }
    }
    pass->slots = device_slots;
    pass->tokens = device_tokens;
    pass->positions = device_positions;
    trees->parents = device_parents;
    return 0;
}

/* Per tree: first row, lengths, page table. */
static int stage_trees(struct tv_model *model, struct trees *trees,
                       const struct tv_model_item *items)
{
    struct tv_model_stage *stage = &model->buffers.stage;
    size_t count = (size_t)trees->count;
    const void *device_starts, *device_prefixes, *device_counts, *device_pages;
    for (int32_t b = 0; b < trees->count; b++) {
        const struct tv_cache_seq *seq = items[b].seq;
        int32_t kv_len = seq->len + items[b].rows;
        trees->q_len = items[b].rows > trees->q_len ? items[b].rows : trees->q_len;
        trees->kv_len_max = kv_len > trees->kv_len_max ? kv_len : trees->kv_len_max;
        trees->max_pages = seq->page_count > trees->max_pages ? seq->page_count : trees->max_pages;
    }
    int32_t *starts = tv_forward_stage(stage, count * sizeof *starts, &device_starts);
    int32_t *prefixes = tv_forward_stage(stage, count * sizeof *prefixes, &device_prefixes);
    int32_t *counts = tv_forward_stage(stage, count * sizeof *counts, &device_counts);
    int32_t *pages =
        tv_forward_stage(stage, count * (size_t)trees->max_pages * sizeof *pages, &device_pages);
    if (starts == NULL || prefixes == NULL || counts == NULL || pages == NULL) {
        return -EINVAL;
    }
    int32_t row = 0;
    for (int32_t b = 0; b < trees->count; b++) {
        const struct tv_cache_seq *seq = items[b].seq;
        starts[b] = row;
        prefixes[b] = seq->len;
        counts[b] = items[b].rows;
        row += items[b].rows;
        int32_t *table = pages + (int64_t)b * trees->max_pages;
        for (int32_t i = 0; i < trees->max_pages; i++) {
            table[i] = i < seq->page_count ? seq->pages[i] : -1;
        }
    }
    trees->row_start = device_starts;
    trees->prefix_len = device_prefixes;
    trees->node_count = device_counts;
    trees->page_table = device_pages;
    return 0;
}

/* Absorbed queries [rows, heads, kv_lora + rope]: k_up^T . q_nope beside the rotated q_rope. */
static int queries(struct tv_forward *pass, int32_t layer)
{
    struct tv_model *model = pass->model;
    struct tv_kernels *kernels = model->kernels;
    const struct tv_model_config *config = &model->config;
    struct tv_model_buffers *b = &model->buffers;
    int32_t head_dim = config->nope_dim + config->rope_dim;
    int32_t row_dim = config->kv_lora + config->rope_dim;
    const struct tv_model_tensor *weight;
    struct tv_linear args = {.rows = pass->rows, .groups = config->heads};
    const float *input;
    int err = tv_forward_latent(pass, layer, &weight, &input, &args.k);
    if (err != 0) {
        return err;
    }
    /* The same input for every head; each head's rows of the weight are nope rows, then rope rows.
     */
    args.x = input;
    args.x_row_stride = args.k;
    args.w_dtype = weight->dtype;
    args.w_group_stride = (int64_t)head_dim * args.k;
    args.w = weight->data;
    args.n = config->nope_dim;
    args.y = b->q;
    args.y_row_stride = (int64_t)config->heads * config->nope_dim;
    args.y_group_stride = config->nope_dim;
    err = kernels->linear(kernels, &args);
    if (err != 0) {
        return err;
    }
    size_t nope_bytes = (size_t)config->nope_dim * (size_t)args.k * tv_dtype_size(weight->dtype);
    args.w = (const char *)weight->data + nope_bytes;
    args.n = config->rope_dim;
    args.y = b->q_abs + config->kv_lora;
    args.y_row_stride = (int64_t)config->heads * row_dim;
    args.y_group_stride = row_dim;
    err = kernels->linear(kernels, &args);
    if (err != 0) {
        return err;
    }
    struct tv_rope rope = {
        .rows = pass->rows,
        .heads = config->heads,
        .x = b->q_abs + config->kv_lora,
        .row_stride = (int64_t)config->heads * row_dim,
        .head_stride = row_dim,
        .positions = pass->positions,
        .table = model->rope,
    };
    err = kernels->rope(kernels, &rope);
    if (err != 0) {
        return err;
    }
    struct tv_linear absorb = {
        .rows = pass->rows,
        .n = config->kv_lora,
        .k = config->nope_dim,
        .groups = config->heads,
        .x = b->q,
        .x_row_stride = (int64_t)config->heads * config->nope_dim,
        .x_group_stride = config->nope_dim,
        .w = model->extra[layer].k_up_t,
        .w_dtype = model->layers[layer].k_up.dtype,
        .w_group_stride = (int64_t)config->kv_lora * config->nope_dim,
        .y = b->q_abs,
        .y_row_stride = (int64_t)config->heads * row_dim,
        .y_group_stride = row_dim,
    };
    return kernels->linear(kernels, &absorb);
}

/* values[r][h] = v_up[h] . latent[r][h] */
static int values_up(struct tv_forward *pass, int32_t layer)
{
    struct tv_model *model = pass->model;
    const struct tv_model_config *config = &model->config;
    struct tv_linear args = {
        .rows = pass->rows,
        .n = config->v_dim,
        .k = config->kv_lora,
        .groups = config->heads,
        .x = model->buffers.latent,
        .x_row_stride = (int64_t)config->heads * config->kv_lora,
        .x_group_stride = config->kv_lora,
        .w = model->layers[layer].v_up.data,
        .w_dtype = model->layers[layer].v_up.dtype,
        .w_group_stride = (int64_t)config->v_dim * config->kv_lora,
        .y = model->buffers.values,
        .y_row_stride = (int64_t)config->heads * config->v_dim,
        .y_group_stride = config->v_dim,
    };
    return model->kernels->linear(model->kernels, &args);
}

/* Queries in the type of the pages. */
static int queries_cast(struct tv_forward *pass, const void **ret_queries)
{
    struct tv_model *model = pass->model;
    struct tv_model_buffers *b = &model->buffers;
    if (tv_cache_params(pass->cache)->dtype == TV_F32) {
        *ret_queries = b->q_abs;
        return 0;
    }
    int64_t count = (int64_t)pass->rows * model->config.heads *
                    (model->config.kv_lora + model->config.rope_dim);
    *ret_queries = b->q_abs_bf16;
    return model->kernels->to_bf16(model->kernels, count, b->q_abs, b->q_abs_bf16);
}

static int attention(struct tv_forward *pass, const struct trees *trees, int32_t layer,
                     tv_model_layer_hook *hook, void *hook_context)
{
    struct tv_model *model = pass->model;
    const struct tv_model_config *config = &model->config;
    const struct tv_cache_params *params = tv_cache_params(pass->cache);
    struct tv_verify_attn args = {
        .batch = trees->count,
        .q_len = trees->q_len,
        .heads = config->heads,
        .latent_dim = config->kv_lora,
        .rope_dim = config->rope_dim,
        .softmax_scale = config->softmax_scale,
        .dtype = params->dtype,
        .out_dtype = TV_F32,
        .kv_pages = tv_cache_layer(pass->cache, layer),
        .page_count = params->pages,
        .page_size = params->page_size,
        .max_pages = trees->max_pages,
        .page_table = trees->page_table,
        .prefix_len = trees->prefix_len,
        .node_count = trees->node_count,
        .parents = trees->parents,
        .row_start = trees->row_start,
        .kv_len_max = trees->kv_len_max,
        .out = model->buffers.latent,
        .lse = model->buffers.lse,
        .workspace = model->buffers.workspace,
        .workspace_bytes = model->buffers.workspace_bytes,
    };
    int err = queries_cast(pass, &args.q);
    if (err == 0) {
        err = model->kernels->verify_attn(model->kernels, &args);
    }
    if (err == 0 && hook != NULL) {
        hook(hook_context, layer, &args);
    }
    return err;
}

int tv_model_verify(struct tv_model *model, struct tv_cache *cache,
                    const struct tv_model_item *items, int32_t count, tv_model_layer_hook *hook,
                    void *hook_context, const float **ret_logits)
{
    struct tv_forward pass = {.model = model, .cache = cache};
    struct trees trees = {.count = count};
    int err = items_check(model, cache, items, count, &pass.rows);
    if (err == 0) {
        err = stage_rows(&pass, &trees, items);
    }
    if (err == 0) {
        err = stage_trees(model, &trees, items);
    }
    if (err == 0) {
        err = tv_forward_begin(&pass);
    }
    for (int32_t layer = 0; err == 0 && layer < model->config.layers; layer++) {
        err = queries(&pass, layer);
        if (err == 0) {
            err = attention(&pass, &trees, layer, hook, hook_context);
        }
        if (err == 0) {
            err = values_up(&pass, layer);
        }
        if (err == 0) {
            err = tv_forward_rest(&pass, layer);
        }
    }
    if (err == 0) {
        err = tv_forward_head(&pass, 0, pass.rows);
    }
    if (err == 0) {
        *ret_logits = model->buffers.logits;
    }
    return err;
}
