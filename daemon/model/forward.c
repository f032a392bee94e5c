/*
 * forward.c - what verify and prefill have in common: embedding, latent, experts, head.
 *
 * Speaks to the operation table only. The result of a row depends on that row, its position and the
 * cache, never on what else is in the pass: every operation promises that.
 */
#include "model/forward.h"

#include <errno.h>
#include <string.h>

#define SECTION_BYTES 64

void *tv_forward_stage(struct tv_model_stage *stage, size_t bytes, const void **ret_device)
{
    size_t at = (stage->used + SECTION_BYTES - 1) / SECTION_BYTES * SECTION_BYTES;
    if (at > stage->bytes || bytes > stage->bytes - at) {
        return NULL;
    }
    stage->used = at + bytes;
    *ret_device = stage->device + at;
    return stage->host + at;
}

int tv_forward_cache_fits(const struct tv_model *model, const struct tv_cache *cache)
{
    const struct tv_cache_params *params = tv_cache_params(cache);
    return params->layers == model->config.layers &&
           params->row_dim == model->config.kv_lora + model->config.rope_dim &&
           params->page_size == model->options.page_size;
}

/* y (+)= w . x of dense rows */
static struct tv_linear product(enum tv_products products, int32_t rows,
                                const struct tv_model_tensor *w, const float *x, float *y,
                                int32_t accumulate)
{
    return (struct tv_linear){
        .rows = rows,
        .n = w->rows,
        .k = w->cols,
        .groups = 1,
        .x = x,
        .x_row_stride = w->cols,
        .w = w->data,
        .w_dtype = w->dtype,
        .y = y,
        .y_row_stride = w->rows,
        .accumulate = accumulate,
        .products = products,
    };
}

int tv_forward_linear(struct tv_model *model, int32_t rows, const struct tv_model_tensor *w,
                      const float *x, float *y, int32_t accumulate)
{
    struct tv_linear args = product(model->products, rows, w, x, y, accumulate);
    return model->kernels->linear(model->kernels, &args);
}

/* y = RMSNorm(x) of dense rows. */
static int norm(struct tv_model *model, int32_t rows, const struct tv_model_tensor *weight,
                double eps, const float *x, float *y)
{
    return model->kernels->rmsnorm(model->kernels, rows, weight->cols, x, weight->cols,
                                   weight->data, (float)eps, y, weight->cols);
}

int tv_forward_upload(struct tv_model *model)
{
    const struct tv_model_stage *stage = &model->buffers.stage;
    return model->kernels->upload(model->kernels, stage->device, stage->host, stage->used);
}

int tv_forward_embed(struct tv_forward *pass)
{
    struct tv_model *model = pass->model;
    const struct tv_model_config *config = &model->config;
    const struct tv_model_tensor *embed = &model->weights.embed;
    return model->kernels->embed(model->kernels, pass->rows, config->hidden, config->vocab,
                                 embed->data, embed->dtype, pass->tokens, model->buffers.x);
}

void tv_forward_latent_args(const struct tv_forward *pass, int32_t layer,
                            struct tv_latent_write *ret_args)
{
    const struct tv_model *model = pass->model;
    const struct tv_model_config *config = &model->config;
    const struct tv_cache_params *params = tv_cache_params(pass->cache);
    *ret_args = (struct tv_latent_write){
        .rows = pass->rows,
        .latent_dim = config->kv_lora,
        .ckv = model->buffers.ckv,
        .row_stride = config->kv_lora + config->rope_dim,
        .norm_weight = model->layers[layer].kv_a_norm.data,
        .eps = (float)config->lora_rms_eps,
        .positions = pass->positions,
        .table = model->rope,
        .slots = pass->slots,
        .kv_pages = tv_cache_layer(pass->cache, layer),
        .slot_count = params->pages * params->page_size,
        .kv_dtype = params->dtype,
    };
}

static int latent_write(struct tv_forward *pass, int32_t layer)
{
    struct tv_model *model = pass->model;
    struct tv_latent_write args;
    tv_forward_latent_args(pass, layer, &args);
    int err = tv_forward_linear(model, pass->rows, &model->layers[layer].kv_a, model->buffers.h,
                                model->buffers.ckv, 0);
    return err != 0 ? err : model->kernels->latent_write(model->kernels, &args);
}

int tv_forward_latent(struct tv_forward *pass, int32_t layer,
                      const struct tv_model_tensor **ret_query, const float **ret_input,
                      int32_t *ret_dim)
{
    struct tv_model *model = pass->model;
    const struct tv_model_config *config = &model->config;
    struct tv_model_buffers *b = &model->buffers;
    const struct tv_model_layer_weights *w = &model->layers[layer];
    int err = norm(model, pass->rows, &w->input_norm, config->rms_eps, b->x, b->h);
    if (err == 0) {
        err = latent_write(pass, layer);
    }
    if (err == 0 && config->q_lora > 0) {
        err = tv_forward_linear(model, pass->rows, &w->q_a, b->h, b->q_low, 0);
    }
    if (err == 0 && config->q_lora > 0) {
        err = norm(model, pass->rows, &w->q_a_norm, config->lora_rms_eps, b->q_low, b->q_low);
    }
    if (err != 0) {
        return err;
    }
    *ret_query = config->q_lora > 0 ? &w->q_b : &w->q;
    *ret_input = config->q_lora > 0 ? b->q_low : b->h;
    *ret_dim = (*ret_query)->cols;
    return 0;
}

/* Both products of a layer's normed rows. */
static void products_args(const struct tv_forward *pass, int32_t layer, struct tv_linear *ret_query,
                          struct tv_linear *ret_kv)
{
    const struct tv_model_buffers *b = &pass->model->buffers;
    const struct tv_model_layer_weights *w = &pass->model->layers[layer];
    enum tv_products products = pass->model->products;
    *ret_kv = product(products, pass->rows, &w->kv_a, b->h, b->ckv, 0);
    *ret_query = pass->model->config.q_lora > 0
                     ? product(products, pass->rows, &w->q_a, b->h, b->q_low, 0)
                     : product(products, pass->rows, &w->q, b->h, b->q, 0);
}

int tv_forward_products(struct tv_forward *pass, int32_t layer)
{
    struct tv_model *model = pass->model;
    const struct tv_model_config *config = &model->config;
    struct tv_model_buffers *b = &model->buffers;
    const struct tv_model_layer_weights *w = &model->layers[layer];
    struct tv_linear query, kv;
    products_args(pass, layer, &query, &kv);
    int err = norm(model, pass->rows, &w->input_norm, config->rms_eps, b->x, b->h);
    if (err == 0) {
        err = model->kernels->linear_pair(model->kernels, &query, &kv);
    }
    if (err == 0 && config->q_lora > 0) {
        err = norm(model, pass->rows, &w->q_a_norm, config->lora_rms_eps, b->q_low, b->q_low);
    }
    if (err == 0 && config->q_lora > 0) {
        err = tv_forward_linear(model, pass->rows, &w->q_b, b->q_low, b->q, 0);
    }
    return err;
}

/* x += down . (silu(gate . h) * (up . h)) */
static int mlp(struct tv_forward *pass, const struct tv_model_mlp_weights *w)
{
    struct tv_model *model = pass->model;
    struct tv_model_buffers *b = &model->buffers;
    int err = tv_forward_linear(model, pass->rows, &w->gate, b->h, b->gate, 0);
    if (err == 0) {
        err = tv_forward_linear(model, pass->rows, &w->up, b->h, b->up, 0);
    }
    if (err == 0) {
        err = model->kernels->swiglu(model->kernels, pass->rows, w->gate.rows, b->gate, b->up);
    }
    if (err == 0) {
        err = tv_forward_linear(model, pass->rows, &w->down, b->gate, b->x, 1);
    }
    return err;
}

/* The parts of a layer with experts; moe's workspace is experts'. 0: the shared ones are of another
 * type, and left out. */
static int experts_args(const struct tv_forward *pass, int32_t layer, struct tv_moe *ret_args)
{
    const struct tv_model *model = pass->model;
    const struct tv_model_config *config = &model->config;
    const struct tv_model_buffers *b = &model->buffers;
    const struct tv_model_layer_weights *w = &model->layers[layer];
    const struct tv_model_layer_extra *extra = &model->extra[layer];
    *ret_args = (struct tv_moe){
        .logits = product(TV_PRODUCTS_EXACT, pass->rows, &w->router, b->h, b->scores, 0)};
    ret_args->router = (struct tv_router){
        .rows = pass->rows,
        .experts = config->experts,
        .top_k = config->experts_per_token,
        .n_group = config->n_group,
        .topk_group = config->topk_group,
        .scoring = config->scoring,
        .normalise = config->norm_topk_prob,
        .scale = (float)config->routed_scaling_factor,
        .logits = b->scores,
        .bias = w->router_bias.data,
        .ids = b->ids,
        .weights = b->weights,
    };
    ret_args->experts = (struct tv_experts){
        .rows = pass->rows,
        .hidden = config->hidden,
        .inter = config->moe_intermediate,
        .experts = config->experts,
        .top_k = config->experts_per_token,
        .x = b->h,
        .ids = b->ids,
        .weights = b->weights,
        .gate = extra->expert_gate,
        .up = extra->expert_up,
        .down = extra->expert_down,
        .w_dtype = w->experts[0].gate.dtype,
        .y = b->x,
        .workspace = b->workspace,
        .workspace_bytes = b->workspace_bytes,
        .products = model->products,
    };
    enum tv_dtype dtype = ret_args->experts.w_dtype;
    if (w->mlp.gate.data == NULL) {
        return 1;
    }
    if (w->mlp.gate.dtype != dtype || w->mlp.up.dtype != dtype || w->mlp.down.dtype != dtype) {
        return 0;
    }
    ret_args->shared_gate = w->mlp.gate.data;
    ret_args->shared_up = w->mlp.up.data;
    ret_args->shared_down = w->mlp.down.data;
    ret_args->shared_inter = w->mlp.gate.rows;
    return 1;
}

/* x += the experts of h, chosen and shared. */
static int experts(struct tv_forward *pass, int32_t layer)
{
    struct tv_model *model = pass->model;
    struct tv_kernels *kernels = model->kernels;
    const struct tv_model_layer_weights *w = &model->layers[layer];
    struct tv_moe args;
    int err = -ENOTSUP, one_dtype = experts_args(pass, layer, &args);
    if (kernels->moe != NULL && one_dtype) {
        err = kernels->moe(kernels, &args);
    }
    if (err != -ENOTSUP) {
        return err;
    }
    err = kernels->linear(kernels, &args.logits);
    if (err == 0) {
        err = kernels->router(kernels, &args.router);
    }
    if (err == 0) {
        err = kernels->experts(kernels, &args.experts);
    }
    return err == 0 && w->mlp.gate.data != NULL ? mlp(pass, &w->mlp) : err;
}

int tv_forward_rest(struct tv_forward *pass, int32_t layer)
{
    struct tv_model *model = pass->model;
    struct tv_model_buffers *b = &model->buffers;
    const struct tv_model_layer_weights *w = &model->layers[layer];
    int err = tv_forward_linear(model, pass->rows, &w->o, b->values, b->x, 1);
    if (err == 0) {
        err = norm(model, pass->rows, &w->post_norm, model->config.rms_eps, b->x, b->h);
    }
    if (err != 0) {
        return err;
    }
    return w->router.data != NULL ? experts(pass, layer) : mlp(pass, &w->mlp);
}

int tv_forward_between(struct tv_forward *pass, int32_t layer, const struct tv_linear *values,
                       const struct tv_query *next)
{
    struct tv_model *model = pass->model;
    struct tv_model_buffers *b = &model->buffers;
    const struct tv_model_layer_weights *w = &model->layers[layer];
    if (model->kernels->layer == NULL || w->router.data == NULL) {
        return -ENOTSUP;
    }
    struct tv_layer args = {
        .values = *values,
        .output = product(model->products, pass->rows, &w->o, b->values, b->x, 1),
        .norm_weight = w->post_norm.data,
        .norm_eps = (float)model->config.rms_eps,
        .next_norm_eps = (float)model->config.rms_eps,
    };
    if (!experts_args(pass, layer, &args.moe)) {
        return -ENOTSUP;
    }
    if (next != NULL) {
        args.next_norm_weight = w[1].input_norm.data;
        args.query = *next;
        products_args(pass, layer + 1, &args.next_query, &args.next_kv);
    }
    return model->kernels->layer(model->kernels, &args);
}

int tv_forward_head(struct tv_forward *pass, int32_t first, int32_t rows)
{
    struct tv_model *model = pass->model;
    struct tv_model_buffers *b = &model->buffers;
    const float *x = b->x + (int64_t)first * model->config.hidden;
    int err = norm(model, rows, &model->weights.final_norm, model->config.rms_eps, x, b->h);
    if (err == 0) {
        err = tv_forward_linear(model, rows, &model->weights.head, b->h, b->logits, 0);
    }
    return err;
}
