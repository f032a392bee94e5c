/*
 * weights.c - binding a checkpoint's tensors to the model's layers.
 *
 * Owns the names and shapes of the DeepSeek-V2/V3 family and the arrangement in memory: kv_b split
 * per head into keys and values (per head the K part comes first), keys also transposed for the
 * absorbed query, rope rows always in interleaved order. Linear weights keep their stored type;
 * norms, router and bias become f32.
 */
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/log.h"
#include "model/refuse.h"
#include "model/weights_read.h"

#define NORM_FLAGS (TV_WEIGHTS_VECTOR | TV_WEIGHTS_F32)

int tv_model_layer_is_moe(const struct tv_model_config *config, int32_t layer)
{
    return config->experts > 0 && layer >= config->first_k_dense &&
           layer % config->moe_layer_freq == 0;
}

static void name_set(struct tv_weights_tensor *tensor, const char *format, va_list arguments)
{
    (void)vsnprintf(tensor->name, sizeof tensor->name, format, arguments); /* fits by design */
}

/* Fetch and upload one tensor as it is. */
static int bind(struct tv_weights_read *read, struct tv_model_tensor *ret_tensor, int32_t rows,
                int32_t cols, int flags, const char *format, ...)
    __attribute__((format(printf, 6, 7)));

static int bind(struct tv_weights_read *read, struct tv_model_tensor *ret_tensor, int32_t rows,
                int32_t cols, int flags, const char *format, ...)
{
    struct tv_weights_tensor tensor = {.rows = rows, .cols = cols, .flags = flags};
    va_list arguments;
    va_start(arguments, format);
    name_set(&tensor, format, arguments);
    va_end(arguments);
    if (read->checkpoint->synthetic) {
        return tv_weights_invent(read, &tensor, ret_tensor);
    }
    int err = tv_weights_fetch(read, &tensor);
    const void *device = NULL;
    if (err == 0) {
        err = tv_weights_store(read, tensor.data, tensor.bytes, &device);
    }
    if (err != 0) {
        return err;
    }
    if ((flags & TV_WEIGHTS_F32) == 0) {
        read->dtypes_seen |= 1 << tensor.dtype;
    }
    *ret_tensor =
        (struct tv_model_tensor){.data = device, .dtype = tensor.dtype, .rows = rows, .cols = cols};
    return 0;
}

/* Bring rope rows from halves to interleaved order: row 2i from i, row 2i + 1 from half + i. */
static void rope_rows_interleave(char *rows, size_t row_bytes, int32_t rope_dim, char *scratch)
{
    int32_t half = rope_dim / 2;
    memcpy(scratch, rows, (size_t)rope_dim * row_bytes);
    for (int32_t i = 0; i < half; i++) {
        memcpy(rows + (size_t)(2 * i) * row_bytes, scratch + (size_t)i * row_bytes, row_bytes);
        memcpy(rows + (size_t)(2 * i + 1) * row_bytes, scratch + (size_t)(half + i) * row_bytes,
               row_bytes);
    }
}

/* A projection whose last rope_dim rows of each of `heads` groups are rotated. */
static int bind_rope(struct tv_weights_read *read, struct tv_model_tensor *ret_tensor,
                     int32_t heads, int32_t head_rows, int32_t cols, const char *name,
                     int32_t layer)
{
    const struct tv_model_config *config = &read->model->config;
    int32_t rows = heads * head_rows;
    /* what is invented is as good in one order as in the other */
    if (config->rope_interleave || read->checkpoint->synthetic) {
        return bind(read, ret_tensor, rows, cols, 0, "model.layers.%d.self_attn.%s.weight", layer,
                    name);
    }
    struct tv_weights_tensor tensor = {.rows = rows, .cols = cols};
    (void)snprintf(tensor.name, sizeof tensor.name, "model.layers.%d.self_attn.%s.weight", layer,
                   name);
    int err = tv_weights_fetch(read, &tensor);
    if (err != 0) {
        return err;
    }
    size_t row_bytes = (size_t)cols * tv_dtype_size(tensor.dtype);
    err = tv_weights_wide(read, (size_t)config->rope_dim * row_bytes);
    if (err != 0) {
        return err;
    }
    for (int32_t head = 0; head < heads; head++) {
        size_t first = (size_t)head * head_rows + (size_t)(head_rows - config->rope_dim);
        rope_rows_interleave(read->host + first * row_bytes, row_bytes, config->rope_dim,
                             read->wide);
    }
    const void *device = NULL;
    err = tv_weights_store(read, read->host, tensor.bytes, &device);
    if (err != 0) {
        return err;
    }
    read->dtypes_seen |= 1 << tensor.dtype;
    *ret_tensor =
        (struct tv_model_tensor){.data = device, .dtype = tensor.dtype, .rows = rows, .cols = cols};
    return 0;
}

/* One [rows, cols] matrix to [cols, rows]. */
static void transpose(const char *from, char *to, int32_t rows, int32_t cols, size_t element)
{
    for (int32_t r = 0; r < rows; r++) {
        for (int32_t c = 0; c < cols; c++) {
            memcpy(to + ((size_t)c * rows + r) * element, from + ((size_t)r * cols + c) * element,
                   element);
        }
    }
}

/* kv_b [heads, nope + v, kv_lora] to keys, transposed keys and values. */
static int bind_kv_b(struct tv_weights_read *read, struct tv_model_layer_weights *weights,
                     struct tv_model_layer_extra *extra, int32_t layer)
{
    const struct tv_model_config *config = &read->model->config;
    int32_t heads = config->heads, nope = config->nope_dim, v = config->v_dim;
    int32_t latent = config->kv_lora;
    struct tv_weights_tensor tensor = {.rows = heads * (nope + v), .cols = latent};
    (void)snprintf(tensor.name, sizeof tensor.name, "model.layers.%d.self_attn.kv_b_proj.weight",
                   layer);
    if (read->checkpoint->synthetic) {
        return tv_weights_invent_kv_b(read, &tensor, &weights->k_up, &weights->v_up,
                                      &extra->k_up_t);
    }
    int err = tv_weights_fetch(read, &tensor);
    if (err == 0) {
        err = tv_weights_wide(read, tensor.bytes);
    }
    if (err != 0) {
        return err;
    }
    size_t element = tv_dtype_size(tensor.dtype);
    size_t key_bytes = (size_t)nope * latent * element, value_bytes = (size_t)v * latent * element;
    char *keys = read->wide, *values = read->wide + (size_t)heads * key_bytes;
    const void *k_up = NULL, *v_up = NULL, *k_up_t = NULL;
    for (int32_t head = 0; head < heads; head++) {
        const char *from = read->host + (size_t)head * (key_bytes + value_bytes);
        memcpy(keys + (size_t)head * key_bytes, from, key_bytes);
        memcpy(values + (size_t)head * value_bytes, from + key_bytes, value_bytes);
    }
    err = tv_weights_store(read, keys, (size_t)heads * key_bytes, &k_up);
    if (err == 0) {
        err = tv_weights_store(read, values, (size_t)heads * value_bytes, &v_up);
    }
    for (int32_t head = 0; head < heads; head++) {
        transpose(read->host + (size_t)head * (key_bytes + value_bytes),
                  keys + (size_t)head * key_bytes, nope, latent, element);
    }
    if (err == 0) {
        err = tv_weights_store(read, keys, (size_t)heads * key_bytes, &k_up_t);
    }
    if (err != 0) {
        return err;
    }
    read->dtypes_seen |= 1 << tensor.dtype;
    weights->k_up = (struct tv_model_tensor){k_up, tensor.dtype, heads * nope, latent};
    weights->v_up = (struct tv_model_tensor){v_up, tensor.dtype, heads * v, latent};
    extra->k_up_t = k_up_t;
    return 0;
}

static int bind_attention(struct tv_weights_read *read, int32_t layer)
{
    const struct tv_model_config *config = &read->model->config;
    struct tv_model_layer_weights *w = &read->model->layers[layer];
    int32_t head_rows = config->nope_dim + config->rope_dim;
    int32_t hidden = config->hidden, q_lora = config->q_lora;
    int err = bind(read, &w->input_norm, 1, hidden, NORM_FLAGS,
                   "model.layers.%d.input_layernorm.weight", layer);
    if (err == 0) {
        err = bind(read, &w->post_norm, 1, hidden, NORM_FLAGS,
                   "model.layers.%d.post_attention_layernorm.weight", layer);
    }
    if (err == 0 && q_lora == 0) {
        err = bind_rope(read, &w->q, config->heads, head_rows, hidden, "q_proj", layer);
    }
    if (err == 0 && q_lora > 0) {
        err = bind(read, &w->q_a, q_lora, hidden, 0, "model.layers.%d.self_attn.q_a_proj.weight",
                   layer);
    }
    if (err == 0 && q_lora > 0) {
        err = bind(read, &w->q_a_norm, 1, q_lora, NORM_FLAGS,
                   "model.layers.%d.self_attn.q_a_layernorm.weight", layer);
    }
    if (err == 0 && q_lora > 0) {
        err = bind_rope(read, &w->q_b, config->heads, head_rows, q_lora, "q_b_proj", layer);
    }
    if (err == 0) {
        err = bind_rope(read, &w->kv_a, 1, config->kv_lora + config->rope_dim, hidden,
                        "kv_a_proj_with_mqa", layer);
    }
    if (err == 0) {
        err = bind(read, &w->kv_a_norm, 1, config->kv_lora, NORM_FLAGS,
                   "model.layers.%d.self_attn.kv_a_layernorm.weight", layer);
    }
    if (err == 0) {
        err = bind_kv_b(read, w, &read->model->extra[layer], layer);
    }
    if (err == 0) {
        err = bind(read, &w->o, hidden, config->heads * config->v_dim, 0,
                   "model.layers.%d.self_attn.o_proj.weight", layer);
    }
    return err;
}

static int bind_mlp(struct tv_weights_read *read, struct tv_model_mlp_weights *ret_mlp,
                    int32_t inter, int flags, int32_t layer, const char *part)
{
    int32_t hidden = read->model->config.hidden;
    int err = bind(read, &ret_mlp->gate, inter, hidden, flags,
                   "model.layers.%d.mlp.%sgate_proj.weight", layer, part);
    if (err == 0) {
        err = bind(read, &ret_mlp->up, inter, hidden, flags, "model.layers.%d.mlp.%sup_proj.weight",
                   layer, part);
    }
    if (err == 0) {
        err = bind(read, &ret_mlp->down, hidden, inter, flags,
                   "model.layers.%d.mlp.%sdown_proj.weight", layer, part);
    }
    return err;
}

/* The experts operation takes one type for all: mixed ones are all widened, which is exact. */
static int experts_flags(struct tv_weights_read *read, int32_t layer, int *ret_flags)
{
    static const char *const parts[] = {"gate_proj", "up_proj", "down_proj"};
    int seen = 0;
    if (read->checkpoint->synthetic) {
        *ret_flags = 0; /* all bf16 */
        return 0;
    }
    for (int32_t e = 0; e < read->model->config.experts; e++) {
        for (size_t p = 0; p < 3; p++) {
            char name[192];
            enum tv_dtype dtype;
            (void)snprintf(name, sizeof name, "model.layers.%d.mlp.experts.%d.%s.weight", layer, e,
                           parts[p]);
            int err = tv_weights_dtype(read, name, &dtype);
            if (err != 0) {
                return err;
            }
            seen |= 1 << dtype;
        }
    }
    *ret_flags = (seen & (seen - 1)) != 0 ? TV_WEIGHTS_F32 : 0;
    read->dtypes_seen |= seen;
    return 0;
}

static int pointers_store(struct tv_weights_read *read, const struct tv_model_mlp_weights *experts,
                          size_t member, const void *const **ret_device)
{
    size_t count = (size_t)read->model->config.experts;
    int err = tv_weights_wide(read, count * sizeof(void *));
    if (err != 0) {
        return err;
    }
    const void **pointers = (const void **)(void *)read->wide;
    for (size_t e = 0; e < count; e++) {
        const struct tv_model_tensor *tensor = (const void *)((const char *)&experts[e] + member);
        pointers[e] = tensor->data;
    }
    const void *device = NULL;
    err = tv_weights_store(read, pointers, count * sizeof(void *), &device);
    *ret_device = device;
    return err;
}

static int bind_experts(struct tv_weights_read *read, int32_t layer)
{
    struct tv_model *model = read->model;
    const struct tv_model_config *config = &model->config;
    struct tv_model_layer_extra *extra = &model->extra[layer];
    struct tv_model_mlp_weights *experts = calloc((size_t)config->experts, sizeof *experts);
    if (experts == NULL) {
        return -ENOMEM;
    }
    model->layers[layer].experts = experts;
    int flags = 0;
    int err = experts_flags(read, layer, &flags);
    for (int32_t e = 0; err == 0 && e < config->experts; e++) {
        char part[32];
        (void)snprintf(part, sizeof part, "experts.%d.", e);
        err = bind_mlp(read, &experts[e], config->moe_intermediate, flags, layer, part);
    }
    if (err == 0) {
        err = pointers_store(read, experts, offsetof(struct tv_model_mlp_weights, gate),
                             &extra->expert_gate);
    }
    if (err == 0) {
        err = pointers_store(read, experts, offsetof(struct tv_model_mlp_weights, up),
                             &extra->expert_up);
    }
    if (err == 0) {
        err = pointers_store(read, experts, offsetof(struct tv_model_mlp_weights, down),
                             &extra->expert_down);
    }
    return err;
}

static int bind_feed_forward(struct tv_weights_read *read, int32_t layer)
{
    const struct tv_model_config *config = &read->model->config;
    struct tv_model_layer_weights *w = &read->model->layers[layer];
    if (!tv_model_layer_is_moe(config, layer)) {
        return bind_mlp(read, &w->mlp, config->intermediate, 0, layer, "");
    }
    int err = bind(read, &w->router, config->experts, config->hidden, TV_WEIGHTS_F32,
                   "model.layers.%d.mlp.gate.weight", layer);
    if (err == 0 && config->topk_method == TV_TOPK_NOAUX_TC) {
        err = bind(read, &w->router_bias, 1, config->experts, NORM_FLAGS | TV_WEIGHTS_BIAS,
                   "model.layers.%d.mlp.gate.e_score_correction_bias", layer);
    }
    if (err == 0) {
        err = bind_experts(read, layer);
    }
    if (err == 0 && config->shared_experts > 0) {
        err = bind_mlp(read, &w->mlp, config->moe_intermediate * config->shared_experts, 0, layer,
                       "shared_experts.");
    }
    return err;
}

/* A tied head is the embedding, as in the library that trained it; a stored one is ignored. */
static int bind_head(struct tv_weights_read *read)
{
    struct tv_model *model = read->model;
    const struct tv_model_config *config = &model->config;
    if (!config->tied_head) {
        return bind(read, &model->weights.head, config->vocab, config->hidden, 0, "lm_head.weight");
    }
    model->weights.head = model->weights.embed;
    if (read->checkpoint->synthetic) {
        return 0;
    }
    const struct tv_checkpoint_entry *head = tv_checkpoint_find(read->checkpoint, "lm_head.weight");
    if (head == NULL) {
        return 0;
    }
    struct tv_weights_tensor stored = {.rows = config->vocab, .cols = config->hidden};
    (void)snprintf(stored.name, sizeof stored.name, "lm_head.weight");
    int err = tv_weights_fetch(read, &stored);
    if (err == 0) {
        err = tv_weights_wide(read, stored.bytes);
    }
    if (err != 0) {
        return err;
    }
    memcpy(read->wide, stored.data, stored.bytes);
    struct tv_weights_tensor embed = {.rows = config->vocab, .cols = config->hidden};
    (void)snprintf(embed.name, sizeof embed.name, "model.embed_tokens.weight");
    err = tv_weights_fetch(read, &embed);
    if (err != 0) {
        return err;
    }
    if (embed.bytes != stored.bytes || memcmp(read->wide, embed.data, embed.bytes) != 0) {
        tv_log(TV_LOG_WARNING, "lm_head.weight differs from the embedding but "
                               "tie_word_embeddings is true: the embedding is served");
    }
    return 0;
}

/* Layers behind the last one are for multi-token prediction; anything else is worth a warning. */
static void rest_log(const struct tv_weights_read *read)
{
    const struct tv_checkpoint *checkpoint = read->checkpoint;
    size_t extra_count = 0, unknown_count = 0;
    long long extra_bytes = 0, unknown_bytes = 0;
    const char *unknown = NULL;
    for (size_t i = 0; i < checkpoint->entry_count; i++) {
        const struct tv_checkpoint_entry *entry = &checkpoint->entries[i];
        int layer = -1;
        if (entry->served || strcmp(entry->tensor->name, "lm_head.weight") == 0) {
            continue;
        }
        if (sscanf(entry->tensor->name, "model.layers.%9d.", &layer) == 1 &&
            layer >= read->model->config.layers) {
            extra_count++;
            extra_bytes += (long long)entry->tensor->bytes;
        } else {
            unknown = unknown == NULL ? entry->tensor->name : unknown;
            unknown_count++;
            unknown_bytes += (long long)entry->tensor->bytes;
        }
    }
    if (extra_count > 0) {
        tv_log(TV_LOG_INFO, "%zu tensors (%lld bytes) of multi-token-prediction layers are ignored",
               extra_count, extra_bytes);
    }
    if (unknown_count > 0) {
        tv_log(TV_LOG_WARNING, "%zu unknown tensors (%lld bytes) are ignored, first '%.200s'",
               unknown_count, unknown_bytes, unknown);
    }
}

static const char *dtypes_name(int seen)
{
    switch (seen) {
    case 1 << TV_F32:
        return "f32";
    case 1 << TV_BF16:
        return "bf16";
    case 1 << TV_F16:
        return "f16";
    default:
        return "mixed";
    }
}

int tv_model_weights_load(struct tv_model *model, struct tv_checkpoint *checkpoint,
                          struct tv_model_error *ret_error)
{
    const struct tv_model_config *config = &model->config;
    struct tv_weights_read read = {.model = model, .checkpoint = checkpoint, .error = ret_error};
    model->layers = calloc((size_t)config->layers, sizeof *model->layers);
    model->extra = calloc((size_t)config->layers, sizeof *model->extra);
    if (model->layers == NULL || model->extra == NULL) {
        return -ENOMEM;
    }
    model->weights.layers = model->layers;
    int err = bind(&read, &model->weights.embed, config->vocab, config->hidden, 0,
                   "model.embed_tokens.weight");
    for (int32_t layer = 0; err == 0 && layer < config->layers; layer++) {
        err = bind_attention(&read, layer);
        if (err == 0) {
            err = bind_feed_forward(&read, layer);
        }
    }
    if (err == 0) {
        err = bind(&read, &model->weights.final_norm, 1, config->hidden, NORM_FLAGS,
                   "model.norm.weight");
    }
    if (err == 0) {
        err = bind_head(&read);
    }
    if (err == 0 && checkpoint->synthetic) {
        err = tv_checkpoint_invented(checkpoint);
    }
    if (err == 0) {
        rest_log(&read);
        model->weights_dtype = dtypes_name(read.dtypes_seen);
    }
    free(read.host);
    free(read.wide);
    return err;
}
