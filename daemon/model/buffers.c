/*
 * buffers.c - the memory of a pass: activations, rope table, workspace, staged integers.
 *
 * Everything is sized for rows_max, prefill_rows, requests_max and max_len at load; a pass
 * allocates nothing.
 */
#include <errno.h>
#include <stdlib.h>

#include "base/checked.h"
#include "model/model_config.h"
#include "model/model_impl.h"

/* An array of rows * width elements; sets *err and returns NULL on failure. Never of 0 bytes. */
static void *rows_take(struct tv_model *model, int32_t rows, int64_t width, size_t element,
                       int *err)
{
    size_t count = 0, bytes = 0;
    if (*err != 0 || width <= 0) {
        return NULL;
    }
    if (tv_size_mul((size_t)rows, (size_t)width, &count) != 0 ||
        tv_size_mul(count, element, &bytes) != 0) {
        *err = -ENOMEM;
        return NULL;
    }
    void *memory = tv_model_alloc(model, bytes);
    if (memory == NULL) {
        *err = -ENOMEM;
    }
    return memory;
}

/* For the rows of any pass. */
static void *array_take(struct tv_model *model, int64_t width, size_t element, int *err)
{
    return rows_take(model, model->options.prefill_rows, width, element, err);
}

static int rope_table_take(struct tv_model *model)
{
    const struct tv_model_config *config = &model->config;
    size_t count = (size_t)model->options.max_len * (size_t)config->rope_dim;
    float *host = malloc(count * sizeof *host);
    if (host == NULL) {
        return -ENOMEM;
    }
    tv_model_rope_table(config, model->options.max_len, host);
    float *device = tv_model_alloc(model, count * sizeof *host);
    int err = device == NULL ? -ENOMEM : 0;
    if (err == 0) {
        err = model->kernels->upload(model->kernels, device, host, count * sizeof *host);
    }
    if (err == 0) {
        err = model->kernels->sync(model->kernels);
    }
    free(host);
    model->rope = (struct tv_rope_table){
        .cos_sin = device, .positions = model->options.max_len, .rope_dim = config->rope_dim};
    return err;
}

static size_t larger(size_t a, size_t b)
{
    return a > b ? a : b;
}

/* The largest workspace any pass can ask for. */
static size_t workspace_need(const struct tv_model *model)
{
    const struct tv_model_config *config = &model->config;
    const struct tv_model_options *options = &model->options;
    struct tv_kernels *kernels = model->kernels;
    size_t need = 64;
    struct tv_verify_attn verify = {
        .heads = config->heads,
        .latent_dim = config->kv_lora,
        .rope_dim = config->rope_dim,
        .dtype = TV_F32,
        .out_dtype = TV_F32,
        .page_count = 1,
        .page_size = options->page_size,
        .kv_len_max = options->max_len + TV_TREE_NODES_MAX,
    };
    verify.max_pages = verify.kv_len_max / options->page_size + 1;
    int32_t batch_max =
        options->requests_max < options->rows_max ? options->requests_max : options->rows_max;
    for (int32_t batch = 1; batch <= batch_max; batch++) {
        int32_t q_len = options->rows_max - batch + 1; /* the others have one node each */
        verify.batch = batch;
        verify.q_len = q_len < TV_TREE_NODES_MAX ? q_len : TV_TREE_NODES_MAX;
        for (int bf16 = 0; bf16 < 2; bf16++) {
            verify.dtype = bf16 ? TV_BF16 : TV_F32; /* the cache comes later: either */
            need = larger(need, kernels->verify_attn_workspace(kernels, &verify));
        }
    }
    struct tv_prefill_attn prefill = {
        .rows = options->prefill_rows,
        .start =
            options->max_len > options->prefill_rows ? options->max_len - options->prefill_rows : 0,
        .heads = config->heads,
        .nope_dim = config->nope_dim,
        .rope_dim = config->rope_dim,
        .v_dim = config->v_dim,
        .latent_dim = config->kv_lora,
        .kv_dtype = TV_F32,
        .page_size = options->page_size,
    };
    need = larger(need, kernels->prefill_attn_workspace(kernels, &prefill));
    struct tv_experts experts = {
        .rows = options->prefill_rows,
        .hidden = config->hidden,
        .inter = config->moe_intermediate,
        .experts = config->experts,
        .top_k = config->experts_per_token,
    };
    if (config->experts == 0) {
        return need;
    }
    if (kernels->moe_workspace != NULL) {
        struct tv_moe moe = {.experts = experts};
        moe.shared_inter = config->moe_intermediate * config->shared_experts;
        need = larger(need, kernels->moe_workspace(kernels, &moe));
    }
    return larger(need, kernels->experts_workspace(kernels, &experts));
}

static int stage_take(struct tv_model *model, struct tv_model_stage *stage)
{
    const struct tv_model_options *options = &model->options;
    size_t rows = (size_t)options->prefill_rows, requests = (size_t)options->requests_max;
    size_t pages = ((size_t)options->max_len + TV_TREE_NODES_MAX) / (size_t)options->page_size + 1;
    stage->bytes = rows * (sizeof(int64_t) + 3 * sizeof(int32_t)) +
                   requests * (3 + pages) * sizeof(int32_t) + pages * sizeof(int32_t) +
                   16 * 64; /* a prompt's pages, and the gaps */
    stage->host = malloc(stage->bytes);
    stage->device = tv_model_alloc(model, stage->bytes);
    return stage->host == NULL || stage->device == NULL ? -ENOMEM : 0;
}

static int aside_take(struct tv_model *model)
{
    const struct tv_model_config *config = &model->config;
    struct tv_model_aside *aside = &model->aside;
    int64_t heads = config->heads;
    int err = 0;
    aside->x = array_take(model, config->hidden, sizeof(float), &err);
    aside->q =
        array_take(model, heads * (config->nope_dim + config->rope_dim), sizeof(float), &err);
    aside->values = array_take(model, heads * config->v_dim, sizeof(float), &err);
    if (model->kernels->host_memory) {
        aside->running = array_take(model, 2 * heads, sizeof(float), &err);
    }
    aside->taps =
        array_take(model, (int64_t)model->options.tap_count * config->hidden, sizeof(float), &err);
    return err == 0 ? stage_take(model, &aside->stage) : err;
}

/* Where rows at the taps come to, when they are asked for. */
static int taps_host_take(struct tv_model *model)
{
    size_t width = (size_t)model->options.tap_count * (size_t)model->config.hidden, count = 0;
    width = larger(width, (size_t)model->projection.rows);
    if (model->kernels->host_memory || width == 0) {
        return 0;
    }
    if (tv_size_mul((size_t)model->options.prefill_rows, width, &count) != 0) {
        return -ENOMEM;
    }
    model->taps_host_width = width;
    model->taps_host = calloc(count, sizeof *model->taps_host);
    return model->taps_host == NULL ? -ENOMEM : 0;
}

int tv_model_buffers_take(struct tv_model *model)
{
    const struct tv_model_config *config = &model->config;
    struct tv_model_buffers *b = &model->buffers;
    int32_t row_dim = config->kv_lora + config->rope_dim;
    int64_t heads = config->heads;
    int32_t rows = model->options.rows_max;
    int32_t shared = config->moe_intermediate * config->shared_experts;
    int32_t inter = shared > config->intermediate ? shared : config->intermediate;
    int err = 0;
    b->x = array_take(model, config->hidden, sizeof(float), &err);
    b->h = array_take(model, config->hidden, sizeof(float), &err);
    b->q_low = array_take(model, config->q_lora, sizeof(float), &err);
    b->q = array_take(model, heads * (config->nope_dim + config->rope_dim), sizeof(float), &err);
    b->q_abs = rows_take(model, rows, heads * row_dim, sizeof(float), &err);
    b->q_abs_bf16 = rows_take(model, rows, heads * row_dim, sizeof(uint16_t), &err);
    b->ckv = array_take(model, row_dim, sizeof(float), &err);
    b->latent = rows_take(model, rows, heads * config->kv_lora, sizeof(float), &err);
    b->lse = rows_take(model, rows, heads, sizeof(float), &err);
    b->values = array_take(model, heads * config->v_dim, sizeof(float), &err);
    b->gate = array_take(model, inter, sizeof(float), &err);
    b->up = array_take(model, inter, sizeof(float), &err);
    b->scores = array_take(model, config->experts, sizeof(float), &err);
    b->ids = array_take(model, config->experts_per_token, sizeof(int32_t), &err);
    b->weights = array_take(model, config->experts_per_token, sizeof(float), &err);
    b->logits = rows_take(model, rows, config->vocab, sizeof(float), &err);
    b->taps =
        array_take(model, (int64_t)model->options.tap_count * config->hidden, sizeof(float), &err);
    model->projected = array_take(model, model->projection.rows, sizeof(float), &err);
    if (err == 0) {
        err = taps_host_take(model);
    }
    if (err == 0) {
        b->workspace_bytes = workspace_need(model);
        b->workspace = tv_model_alloc(model, b->workspace_bytes);
        err = b->workspace == NULL ? -ENOMEM : 0;
    }
    if (err == 0) {
        err = rope_table_take(model);
    }
    if (err == 0) {
        err = stage_take(model, &b->stage);
    }
    /* a device's recordings write rows at the taps to one place: passes there are not interrupted
     */
    if (err == 0 && (model->kernels->host_memory || model->options.tap_count == 0)) {
        err = aside_take(model);
    }
    return err;
}
