/*
 * verify.c - the absorbed pass over draft trees, and some known tokens that ride along.
 *
 * The query of a head is multiplied into the latent space once (k_up transposed), attention runs on
 * the cached rows as they are, and v_up brings its result back. All trees of a pass are packed, row
 * after row; the mask follows from the parents. A rider's rows come behind them: everything but
 * attention runs over all rows together, and theirs is the expanded one, as in prefill.c.
 */
#include <errno.h>

#include "model/forward.h"

/* Device lists of a verify pass beside those of struct tv_forward. */
struct trees {
    int32_t rows; /* of all trees; a rider's are those behind them */
    int32_t count, q_len, max_pages, kv_len_max;
    const int32_t *parents, *row_start, *prefix_len, *node_count, *page_table;
    const struct tv_model_rider *rider; /* or NULL */
    const int32_t *rider_pages;
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

static int rider_check(const struct tv_model *model, const struct tv_model_rider *rider,
                       int32_t tree_rows)
{
    const struct tv_model_options *options = &model->options;
    const struct tv_cache_seq *seq = rider->seq;
    if (rider->count < 1 || rider->count > options->prefill_rows - tree_rows ||
        rider->count > seq->scratch || rider->count > options->max_len - seq->len ||
        (rider->draws && tree_rows == options->rows_max)) {
        return -EINVAL;
    }
    for (int32_t i = 0; i < rider->count; i++) {
        if (rider->tokens[i] < 0 || rider->tokens[i] >= model->config.vocab) {
            return -EINVAL;
        }
    }
    return 0;
}

/* Host side of the stage. */
struct staged {
    int64_t *slots;
    int32_t *tokens, *positions, *parents;       /* [rows] */
    int32_t *starts, *prefixes, *counts, *pages; /* [count], pages [count, max_pages] */
    int32_t *rider_pages;                        /* [pages of its sequence] */
};

/* Cut the stage for the pass's rows and the trees' count and max_pages: nothing else decides where
 * a list is, so a recording finds it again. A rider's own list comes behind these. */
static int stage_cut(struct tv_forward *pass, struct trees *trees, struct staged *ret)
{
    struct tv_model_stage *stage = &pass->model->buffers.stage;
    size_t rows = (size_t)pass->rows, count = (size_t)trees->count;
    const void *slots, *tokens, *positions, *parents, *starts, *prefixes, *counts, *pages;
    stage->used = 0;
    ret->slots = tv_forward_stage(stage, rows * sizeof *ret->slots, &slots);
    ret->tokens = tv_forward_stage(stage, rows * sizeof *ret->tokens, &tokens);
    ret->positions = tv_forward_stage(stage, rows * sizeof *ret->positions, &positions);
    ret->parents = tv_forward_stage(stage, rows * sizeof *ret->parents, &parents);
    ret->starts = tv_forward_stage(stage, count * sizeof *ret->starts, &starts);
    ret->prefixes = tv_forward_stage(stage, count * sizeof *ret->prefixes, &prefixes);
    ret->counts = tv_forward_stage(stage, count * sizeof *ret->counts, &counts);
    ret->pages =
        tv_forward_stage(stage, count * (size_t)trees->max_pages * sizeof *ret->pages, &pages);
    if (ret->slots == NULL || ret->tokens == NULL || ret->positions == NULL ||
        ret->parents == NULL || ret->starts == NULL || ret->prefixes == NULL ||
        ret->counts == NULL || ret->pages == NULL) {
        return -EINVAL;
    }
    pass->slots = slots;
    pass->tokens = tokens;
    pass->positions = positions;
    trees->parents = parents;
    trees->row_start = starts;
    trees->prefix_len = prefixes;
    trees->node_count = counts;
    trees->page_table = pages;
    if (trees->rider != NULL) {
        size_t own = (size_t)trees->rider->seq->page_count;
        ret->rider_pages = tv_forward_stage(stage, own * sizeof *ret->rider_pages, &pages);
        trees->rider_pages = pages;
    }
    return trees->rider == NULL || ret->rider_pages != NULL ? 0 : -EINVAL;
}

/* Per row: slot, token, position, parent. Rows that only fill up a recording belong to no tree:
 * they have no token, which makes them NaN, and no slot, so that they are stored nowhere. */
static void stage_rows(const struct tv_forward *pass, const struct trees *trees,
                       const struct tv_model_item *items, const struct staged *to)
{
    int32_t row = 0;
    for (int32_t b = 0; b < trees->count; b++) {
        const struct tv_model_item *item = &items[b];
        for (int32_t i = 0; i < item->rows; i++, row++) {
            to->slots[row] = tv_cache_slot(pass->cache, item->seq, item->seq->len + i);
            to->tokens[row] = item->tokens[i];
            to->positions[row] = item->seq->len + item->depths[i];
            to->parents[row] = item->parents[i];
        }
    }
    const struct tv_model_rider *rider = trees->rider;
    for (int32_t i = 0; rider != NULL && i < rider->count; i++, row++) {
        to->slots[row] = tv_cache_slot(pass->cache, rider->seq, rider->seq->len + i);
        to->tokens[row] = rider->tokens[i];
        to->positions[row] = rider->seq->len + i;
        to->parents[row] = -1;
    }
    for (; row < pass->rows; row++) {
        to->slots[row] = -1;
        to->tokens[row] = -1;
        to->positions[row] = 0;
        to->parents[row] = -1;
    }
}

/* Per tree: first row, lengths, page table. */
static void stage_trees(const struct trees *trees, const struct tv_model_item *items,
                        const struct staged *to)
{
    int32_t row = 0;
    for (int32_t b = 0; b < trees->count; b++) {
        const struct tv_cache_seq *seq = items[b].seq;
        to->starts[b] = row;
        to->prefixes[b] = seq->len;
        to->counts[b] = items[b].rows;
        row += items[b].rows;
        int32_t *table = to->pages + (int64_t)b * trees->max_pages;
        for (int32_t i = 0; i < trees->max_pages; i++) {
            table[i] = i < seq->page_count ? seq->pages[i] : -1;
        }
    }
    for (int32_t i = 0; trees->rider != NULL && i < trees->rider->seq->page_count; i++) {
        to->rider_pages[i] = trees->rider->seq->pages[i];
    }
}

/* The bounds of exactly these trees. */
static void trees_measure(struct trees *trees, const struct tv_model_item *items)
{
    for (int32_t b = 0; b < trees->count; b++) {
        const struct tv_cache_seq *seq = items[b].seq;
        int32_t kv_len = seq->len + items[b].rows;
        trees->q_len = items[b].rows > trees->q_len ? items[b].rows : trees->q_len;
        trees->kv_len_max = kv_len > trees->kv_len_max ? kv_len : trees->kv_len_max;
        trees->max_pages = seq->page_count > trees->max_pages ? seq->page_count : trees->max_pages;
    }
}

/* Bounds that hold for any `count` trees of `rows` rows together. */
static void trees_bound(const struct tv_model *model, int32_t rows, struct trees *trees)
{
    const struct tv_model_options *options = &model->options;
    int32_t q_len = rows - trees->count + 1; /* the others have one node each */
    trees->q_len = q_len < TV_TREE_NODES_MAX ? q_len : TV_TREE_NODES_MAX;
    trees->kv_len_max = options->max_len + TV_TREE_NODES_MAX;
    trees->max_pages = trees->kv_len_max / options->page_size + 1;
}

static struct tv_query query_args(const struct tv_forward *pass, int32_t layer)
{
    const struct tv_model *model = pass->model;
    const struct tv_model_config *config = &model->config;
    const struct tv_model_buffers *b = &model->buffers;
    struct tv_query args = {
        .heads = config->heads,
        .nope_dim = config->nope_dim,
        .q = b->q,
        .k_up_t = model->extra[layer].k_up_t,
        .w_dtype = model->layers[layer].k_up.dtype,
        .out_dtype = tv_cache_params(pass->cache)->dtype,
        .products = model->products,
    };
    args.out = args.out_dtype == TV_F32 ? (void *)b->q_abs : (void *)b->q_abs_bf16;
    tv_forward_latent_args(pass, layer, &args.latent);
    return args;
}

/* The same as queries_apart, in fewer launches; -ENOTSUP: the backend does not take these weights.
 */
static int queries_joined(struct tv_forward *pass, int32_t layer)
{
    struct tv_kernels *kernels = pass->model->kernels;
    struct tv_query args = query_args(pass, layer);
    int err = tv_forward_products(pass, layer);
    return err == 0 ? kernels->query(kernels, &args) : err;
}

/* q_abs[r][h] = k_up^T . q[r][h], of vectors that are q_stride apart; the rope part is there. */
static int absorb(struct tv_forward *pass, int32_t layer, int32_t q_stride)
{
    struct tv_model *model = pass->model;
    const struct tv_model_config *config = &model->config;
    int32_t row_dim = config->kv_lora + config->rope_dim;
    struct tv_linear args = {
        .rows = pass->rows,
        .n = config->kv_lora,
        .k = config->nope_dim,
        .groups = config->heads,
        .x = model->buffers.q,
        .x_row_stride = (int64_t)config->heads * q_stride,
        .x_group_stride = q_stride,
        .w = model->extra[layer].k_up_t,
        .w_dtype = model->layers[layer].k_up.dtype,
        .w_group_stride = (int64_t)config->kv_lora * config->nope_dim,
        .y = model->buffers.q_abs,
        .y_row_stride = (int64_t)config->heads * row_dim,
        .y_group_stride = row_dim,
        .products = model->products,
    };
    return model->kernels->linear(model->kernels, &args);
}

/* Absorbed queries [rows, heads, kv_lora + rope]: k_up^T . q_nope beside the rotated q_rope. */
static int queries_apart(struct tv_forward *pass, int32_t layer)
{
    struct tv_model *model = pass->model;
    struct tv_kernels *kernels = model->kernels;
    const struct tv_model_config *config = &model->config;
    struct tv_model_buffers *b = &model->buffers;
    int32_t head_dim = config->nope_dim + config->rope_dim;
    int32_t row_dim = config->kv_lora + config->rope_dim;
    const struct tv_model_tensor *weight;
    struct tv_linear args = {
        .rows = pass->rows, .groups = config->heads, .products = model->products};
    const float *input;
    int err = tv_forward_latent(pass, layer, &weight, &input, &args.k);
    if (err != 0) {
        return err;
    }
    /* The same input for every head, whose rows of the weight are nope rows, then rope rows. */
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
    return absorb(pass, layer, config->nope_dim);
}

/* Queries in the type of the pages. */
static int queries_cast(struct tv_forward *pass)
{
    struct tv_model *model = pass->model;
    struct tv_model_buffers *b = &model->buffers;
    if (tv_cache_params(pass->cache)->dtype == TV_F32) {
        return 0;
    }
    int64_t count = (int64_t)pass->rows * model->config.heads *
                    (model->config.kv_lora + model->config.rope_dim);
    return model->kernels->to_bf16(model->kernels, count, b->q_abs, b->q_abs_bf16);
}

/* Full queries of all rows in one product, then those of the trees absorbed. */
static int queries_shared(struct tv_forward *pass, const struct trees *trees, int32_t layer)
{
    struct tv_model *model = pass->model;
    const struct tv_model_config *config = &model->config;
    struct tv_model_buffers *b = &model->buffers;
    struct tv_forward own = *pass;
    size_t head = (size_t)(config->nope_dim + config->rope_dim) * sizeof(float);
    size_t row = (size_t)(config->kv_lora + config->rope_dim) * sizeof(float);
    own.rows = trees->rows;
    int err = tv_forward_queries(pass, layer);
    if (err == 0) {
        err = model->kernels->copy(
            model->kernels, b->q_abs + config->kv_lora, row, b->q + config->nope_dim, head,
            (size_t)config->rope_dim * sizeof(float), own.rows * config->heads);
    }
    if (err == 0) {
        err = absorb(&own, layer, config->nope_dim + config->rope_dim);
    }
    return err == 0 ? queries_cast(&own) : err;
}

static int queries(struct tv_forward *pass, const struct trees *trees, int32_t layer,
                   const void **ret_queries)
{
    struct tv_model *model = pass->model;
    int is_f32 = tv_cache_params(pass->cache)->dtype == TV_F32;
    int err = -ENOTSUP;
    if (trees->rider != NULL) {
        err = queries_shared(pass, trees, layer);
    } else if (model->kernels->query != NULL && !model->queries_apart) {
        err = queries_joined(pass, layer);
    }
    if (err == -ENOTSUP) {
        model->queries_apart = 1;
        err = queries_apart(pass, layer);
        err = err != 0 ? err : queries_cast(pass);
    }
    *ret_queries = is_f32 ? (void *)model->buffers.q_abs : (void *)model->buffers.q_abs_bf16;
    return err;
}

/* values[r][h] = v_up[h] . latent[r][h], of the trees' rows */
static struct tv_linear values_args(const struct tv_forward *pass, const struct trees *trees,
                                    int32_t layer)
{
    const struct tv_model *model = pass->model;
    const struct tv_model_config *config = &model->config;
    return (struct tv_linear){
        .rows = trees->rows,
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
        .products = model->products,
    };
}

static int attention(struct tv_forward *pass, const struct trees *trees, int32_t layer,
                     const void *queries, tv_model_layer_hook *hook, void *hook_context)
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
        .q = queries,
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
    int err = model->kernels->verify_attn(model->kernels, &args);
    if (err == 0 && hook != NULL) {
        hook(hook_context, layer, &args);
    }
    return err;
}

/* The rider's rows over their own sequence. */
static int rider_attention(struct tv_forward *pass, const struct trees *trees, int32_t layer)
{
    struct tv_prefill_attn args;
    if (trees->rider == NULL) {
        return 0;
    }
    tv_forward_prefill_args(pass, layer, trees->rows, trees->rider->seq->len, trees->rider_pages,
                            &args);
    return pass->model->kernels->prefill_attn(pass->model->kernels, &args);
}

/* What follows a layer's attention; *ret_queries: also the queries of the next layer. */
static int layer_finish(struct tv_forward *pass, const struct trees *trees, int32_t layer,
                        int *ret_queries)
{
    struct tv_model *model = pass->model;
    struct tv_kernels *kernels = model->kernels;
    struct tv_linear values = values_args(pass, trees, layer);
    struct tv_query next;
    int goes_on = layer + 1 < model->config.layers && model->config.q_lora == 0 &&
                  kernels->query != NULL && !model->queries_apart;
    if (goes_on) {
        next = query_args(pass, layer + 1);
    }
    int err = -ENOTSUP;
    if (trees->rider == NULL) {
        err = tv_forward_between(pass, layer, &values, goes_on ? &next : NULL);
    }
    *ret_queries = err == 0 && goes_on;
    if (err != -ENOTSUP) {
        return err;
    }
    err = kernels->linear(kernels, &values);
    if (err == 0) {
        err = rider_attention(pass, trees, layer);
    }
    return err == 0 ? tv_forward_rest(pass, layer) : err;
}

/* Logits of the trees' rows and, behind them, of the rider's last one, which takes the place of its
 * first: all that is left of the pass. */
static int head(struct tv_forward *pass, const struct trees *trees)
{
    struct tv_model *model = pass->model;
    size_t row = (size_t)model->config.hidden * sizeof(float);
    int draws = trees->rider != NULL && trees->rider->draws;
    int32_t rows = trees->rows;
    int err = 0;
    if (draws && pass->rows > rows + 1) {
        const char *x = (const char *)model->buffers.x;
        err = model->kernels->copy(model->kernels, (char *)model->buffers.x + (size_t)rows * row,
                                   row, x + (size_t)(pass->rows - 1) * row, row, row, 1);
    }
    return err == 0 ? tv_forward_head(pass, 0, rows + draws) : err;
}

/* Everything behind the upload of the stage. */
static int layers_run(struct tv_forward *pass, const struct trees *trees, tv_model_layer_hook *hook,
                      void *hook_context)
{
    const void *rows = NULL;
    int queried = 0; /* the layer before has made this one's queries */
    int err = tv_forward_embed(pass);
    for (int32_t layer = 0; err == 0 && layer < pass->model->config.layers; layer++) {
        err = tv_forward_tap(pass, layer);
        if (err == 0 && !queried) {
            err = queries(pass, trees, layer, &rows);
        }
        if (err == 0) {
            err = attention(pass, trees, layer, rows, hook, hook_context);
        }
        if (err == 0) {
            err = layer_finish(pass, trees, layer, &queried);
        }
    }
    if (err == 0) {
        err = tv_forward_tap(pass, pass->model->config.layers);
    }
    return err == 0 ? head(pass, trees) : err;
}

int tv_model_verify_record(struct tv_model *model, struct tv_cache *cache, int32_t rows,
                           int32_t count, void **ret_recording)
{
    struct tv_kernels *kernels = model->kernels;
    struct tv_forward pass = {
        .model = model, .cache = cache, .rows = rows, .taps = tv_forward_taps(model)};
    struct trees trees = {.rows = rows, .count = count};
    struct staged staged;
    void *recording = NULL;
    trees_bound(model, rows, &trees);
    int err = stage_cut(&pass, &trees, &staged);
    if (err != 0) {
        return err;
    }
    err = kernels->record_begin(kernels);
    if (err != 0) {
        return err;
    }
    err = layers_run(&pass, &trees, NULL, NULL);
    int end_err = kernels->record_end(kernels, &recording);
    if (err != 0 && end_err == 0) {
        kernels->recording_free(kernels, recording);
    }
    err = err != 0 ? err : end_err;
    if (err == 0) {
        *ret_recording = recording;
    }
    return err;
}

int tv_model_verify_shared(struct tv_model *model, struct tv_cache *cache,
                           const struct tv_model_item *items, int32_t count,
                           const struct tv_model_rider *rider, tv_model_layer_hook *hook,
                           void *hook_context, const float **ret_logits)
{
    struct tv_kernels *kernels = model->kernels;
    struct tv_forward pass = {.model = model, .cache = cache, .taps = tv_forward_taps(model)};
    struct trees trees = {.count = count, .rider = rider};
    struct staged staged;
    const struct tv_model_recording *recording = NULL;
    int err = items_check(model, cache, items, count, &trees.rows);
    if (err == 0 && rider != NULL) {
        err = rider_check(model, rider, trees.rows);
    }
    if (err != 0) {
        return err;
    }
    if (hook == NULL && rider == NULL) {
        recording = tv_model_recording_find(model, cache, trees.rows, count);
    }
    if (recording != NULL) {
        trees.rows = recording->rows;
        trees_bound(model, trees.rows, &trees);
    } else {
        trees_measure(&trees, items);
    }
    pass.rows = trees.rows + (rider != NULL ? rider->count : 0);
    err = stage_cut(&pass, &trees, &staged);
    if (err != 0) {
        return err;
    }
    stage_rows(&pass, &trees, items, &staged);
    stage_trees(&trees, items, &staged);
    err = tv_forward_upload(model);
    if (err == 0 && kernels->timer != NULL) {
        err = kernels->timer(kernels, 0);
    }
    if (err == 0) {
        err = recording != NULL ? kernels->replay(kernels, recording->handle)
                                : layers_run(&pass, &trees, hook, hook_context);
    }
    if (err == 0) {
        *ret_logits = model->buffers.logits;
    }
    return err;
}

int tv_model_verify(struct tv_model *model, struct tv_cache *cache,
                    const struct tv_model_item *items, int32_t count, tv_model_layer_hook *hook,
                    void *hook_context, const float **ret_logits)
{
    return tv_model_verify_shared(model, cache, items, count, NULL, hook, hook_context, ret_logits);
}
