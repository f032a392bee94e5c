/*
 * prefill.c - the expanded pass over tokens that are already known.
 *
 * Per head, keys and values are expanded from the latent by prefill_attn. A row's result does not
 * depend on how the prompt was cut into passes.
 */
#include <errno.h>
#include <string.h>

#include "model/forward.h"

/* What a round may have to wait for on host memory: so many rows of a layer's linear parts, or
 * TV_PREFILL_KEYS tokens of its attention, which over a long prefix is most of a pass. */
#define PART_ROWS 128
/* A pass of fewer rows on a device takes no longer than one over a tree: it is left alone. */
#define DEVICE_ROWS_MIN 64

/* Tokens, positions, slots and the page table of one sequence. */
static int stage_fill(struct tv_forward *pass, const struct tv_cache_seq *seq,
                      const int32_t *tokens, const int32_t **ret_page_table)
{
    struct tv_model_stage *stage = &pass->model->buffers.stage;
    size_t rows = (size_t)pass->rows;
    const void *device_slots, *device_tokens, *device_positions, *device_pages;
    stage->used = 0;
    int64_t *slots = tv_forward_stage(stage, rows * sizeof *slots, &device_slots);
    int32_t *ids = tv_forward_stage(stage, rows * sizeof *ids, &device_tokens);
    int32_t *positions = tv_forward_stage(stage, rows * sizeof *positions, &device_positions);
    int32_t *pages =
        tv_forward_stage(stage, (size_t)seq->page_count * sizeof *pages, &device_pages);
    if (slots == NULL || ids == NULL || positions == NULL || pages == NULL) {
        return -EINVAL;
    }
    for (int32_t i = 0; i < pass->rows; i++) {
        slots[i] = tv_cache_slot(pass->cache, seq, seq->len + i);
        ids[i] = tokens[i];
        positions[i] = seq->len + i;
    }
    for (int32_t i = 0; i < seq->page_count; i++) {
        pages[i] = seq->pages[i];
    }
    pass->slots = device_slots;
    pass->tokens = device_tokens;
    pass->positions = device_positions;
    *ret_page_table = device_pages;
    return 0;
}

int tv_forward_queries(struct tv_forward *pass, int32_t layer)
{
    struct tv_model *model = pass->model;
    const struct tv_model_config *config = &model->config;
    int32_t head_dim = config->nope_dim + config->rope_dim;
    const struct tv_model_tensor *weight;
    const float *input;
    int32_t dim;
    int err = tv_forward_latent(pass, layer, &weight, &input, &dim);
    if (err == 0) {
        err = tv_forward_linear(model, pass->rows, weight, input, model->buffers.q, 0);
    }
    if (err != 0) {
        return err;
    }
    struct tv_rope rope = {
        .rows = pass->rows,
        .heads = config->heads,
        .x = model->buffers.q + config->nope_dim,
        .row_stride = (int64_t)config->heads * head_dim,
        .head_stride = head_dim,
        .positions = pass->positions,
        .table = model->rope,
    };
    return model->kernels->rope(model->kernels, &rope);
}

static void swap(void *a, void *b, size_t bytes)
{
    char kept[sizeof(struct tv_model_stage)];
    memcpy(kept, a, bytes);
    memcpy(a, b, bytes);
    memcpy(b, kept, bytes);
}

/* Change between the buffers of a prefill pass and those of verify passes. */
static void step_aside(struct tv_model *model)
{
    struct tv_model_buffers *b = &model->buffers;
    if (model->aside.x != NULL) {
        swap(&b->x, &model->aside.x, sizeof b->x);
        swap(&b->q, &model->aside.q, sizeof b->q);
        swap(&b->values, &model->aside.values, sizeof b->values);
        swap(&b->taps, &model->aside.taps, sizeof b->taps);
        swap(&b->stage, &model->aside.stage, sizeof b->stage);
    }
}

static int is_interruptible(const struct tv_forward *pass)
{
    const struct tv_model *model = pass->model;
    return model->between != NULL && model->aside.x != NULL &&
           (model->kernels->host_memory || pass->rows >= DEVICE_ROWS_MIN);
}

/* Nothing of this pass is in the other buffers now. A device is waited for: what came behind all
 * that was launched would be no sooner done. */
static int between(const struct tv_forward *pass)
{
    struct tv_model *model = pass->model;
    if (!is_interruptible(pass)) {
        return 0;
    }
    int err = model->kernels->sync(model->kernels);
    if (err == 0) {
        step_aside(model);
        model->between(model->between_context);
        step_aside(model);
    }
    return err;
}

void tv_model_between_set(struct tv_model *model, void (*between_run)(void *context), void *context)
{
    model->between = between_run;
    model->between_context = context;
}

void tv_forward_prefill_args(const struct tv_forward *pass, int32_t layer, int32_t first,
                             int32_t start, const int32_t *page_table,
                             struct tv_prefill_attn *ret_args)
{
    const struct tv_model *model = pass->model;
    const struct tv_model_config *config = &model->config;
    const struct tv_cache_params *params = tv_cache_params(pass->cache);
    int64_t heads = config->heads;
    *ret_args = (struct tv_prefill_attn){
        .rows = pass->rows - first,
        .start = start,
        .heads = config->heads,
        .nope_dim = config->nope_dim,
        .rope_dim = config->rope_dim,
        .v_dim = config->v_dim,
        .latent_dim = config->kv_lora,
        .softmax_scale = config->softmax_scale,
        .q = model->buffers.q + first * heads * (config->nope_dim + config->rope_dim),
        .k_up = model->layers[layer].k_up.data,
        .v_up = model->layers[layer].v_up.data,
        .w_dtype = model->layers[layer].k_up.dtype,
        .kv_pages = tv_cache_layer(pass->cache, layer),
        .kv_dtype = params->dtype,
        .page_count = params->pages,
        .page_size = params->page_size,
        .page_table = page_table,
        .out = model->buffers.values + first * heads * config->v_dim,
        .workspace = model->buffers.workspace,
        .workspace_bytes = model->buffers.workspace_bytes,
        .products = model->products,
    };
}

static int attention(struct tv_forward *pass, int32_t layer, int32_t start,
                     const int32_t *page_table)
{
    struct tv_model *model = pass->model;
    struct tv_prefill_attn args;
    tv_forward_prefill_args(pass, layer, 0, start, page_table, &args);
    if (!is_interruptible(pass) || !model->kernels->host_memory) {
        return model->kernels->prefill_attn(model->kernels, &args);
    }
    int32_t tokens = start + pass->rows;
    int err = 0;
    args.running = model->aside.running;
    for (int32_t key = 0; err == 0 && key < tokens; key += TV_PREFILL_KEYS) {
        err = between(pass);
        if (err == 0) {
            args.key_first = key;
            args.key_count = tokens - key < TV_PREFILL_KEYS ? tokens - key : TV_PREFILL_KEYS;
            err = model->kernels->prefill_attn(model->kernels, &args);
        }
    }
    return err;
}

/* The rest of the layer; between its parts nothing is kept but the rows' own values. */
static int rest(struct tv_forward *pass, int32_t layer)
{
    struct tv_model *model = pass->model;
    const struct tv_model_config *config = &model->config;
    if (!is_interruptible(pass) || !model->kernels->host_memory) {
        return tv_forward_rest(pass, layer);
    }
    int32_t rows = pass->rows;
    int err = 0;
    for (int32_t first = 0; err == 0 && first < rows; first += PART_ROWS) {
        err = between(pass);
        if (err != 0) {
            break;
        }
        struct tv_model_buffers *b = &model->buffers;
        float *x = b->x, *values = b->values;
        b->x += (int64_t)first * config->hidden;
        b->values += (int64_t)first * config->heads * config->v_dim;
        pass->rows = rows - first < PART_ROWS ? rows - first : PART_ROWS;
        err = tv_forward_rest(pass, layer);
        b->x = x;
        b->values = values;
    }
    pass->rows = rows;
    return err;
}

static int layers_run(struct tv_forward *pass, const struct tv_cache_seq *seq,
                      const int32_t *page_table)
{
    int err = tv_forward_embed(pass);
    for (int32_t layer = 0; err == 0 && layer < pass->model->config.layers; layer++) {
        err = tv_forward_tap(pass, layer);
        if (err == 0) {
            err = tv_forward_queries(pass, layer);
        }
        if (err == 0) {
            err = attention(pass, layer, seq->len, page_table);
        }
        if (err == 0) {
            err = rest(pass, layer);
        }
        if (err == 0) {
            err = between(pass);
        }
    }
    return err == 0 ? tv_forward_tap(pass, pass->model->config.layers) : err;
}

int tv_model_prefill(struct tv_model *model, struct tv_cache *cache, const struct tv_cache_seq *seq,
                     const int32_t *tokens, int32_t count, const float **ret_logits)
{
    if (count < 1 || count > model->options.prefill_rows || count > seq->scratch ||
        count > model->options.max_len - seq->len || !tv_forward_cache_fits(model, cache)) {
        return -EINVAL;
    }
    for (int32_t i = 0; i < count; i++) {
        if (tokens[i] < 0 || tokens[i] >= model->config.vocab) {
            return -EINVAL;
        }
    }
    struct tv_forward pass = {
        .model = model, .cache = cache, .rows = count, .taps = tv_forward_taps(model)};
    const int32_t *page_table = NULL;
    step_aside(model);
    int err = stage_fill(&pass, seq, tokens, &page_table);
    if (err == 0) {
        err = tv_forward_upload(model);
    }
    if (err == 0) {
        err = layers_run(&pass, seq, page_table);
    }
    if (err == 0 && ret_logits != NULL) {
        err = tv_forward_head(&pass, count - 1, 1);
    }
    if (err == 0 && ret_logits != NULL) {
        *ret_logits = model->buffers.logits;
    }
    step_aside(model);
    if (pass.taps && model->aside.taps != NULL) { /* what it kept is what is asked for next */
        swap(&model->buffers.taps, &model->aside.taps, sizeof model->buffers.taps);
    }
    return err;
}
