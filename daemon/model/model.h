/*
 * model.h - a DeepSeek-V2/V3-family checkpoint: loading, checks, and the forward pass.
 *
 * Owns the weights on the device and the activations of one pass. Refuses at load, by name, what it
 * cannot serve exactly. Forward functions belong to the worker thread; the rest is immutable.
 */
#ifndef TV_MODEL_MODEL_H
#define TV_MODEL_MODEL_H

#include <stdint.h>

#include "cache/cache.h"
#include "kernels/kernels.h"

struct tv_model;

enum tv_topk_method { TV_TOPK_GREEDY, TV_TOPK_GROUP_LIMITED, TV_TOPK_NOAUX_TC };

/* The served fields of config.json, checked. */
struct tv_model_config {
    char architecture[32]; /* "deepseek_v2" or "deepseek_v3" */
    int32_t vocab, hidden, layers, heads;
    int32_t q_lora, kv_lora, rope_dim, nope_dim, v_dim; /* q_lora 0 = none */
    int32_t intermediate, moe_intermediate;
    int32_t experts, shared_experts, experts_per_token; /* experts 0 = dense model */
    int32_t n_group, topk_group, first_k_dense, moe_layer_freq;
    enum tv_topk_method topk_method;
    enum tv_router_scoring scoring;
    int norm_topk_prob;
    double routed_scaling_factor;
    double rms_eps;      /* of the layer norms and the last norm */
    double lora_rms_eps; /* of q_a_layernorm and kv_a_layernorm */
    double rope_theta;
    int yarn;
    double yarn_factor, yarn_beta_fast, yarn_beta_slow;
    double yarn_mscale, yarn_mscale_all_dim; /* 0 = absent */
    int32_t yarn_original_max;
    int yarn_truncate;            /* correction range rounded to whole dims (the default) */
    double yarn_attention_factor; /* as the file says; 0 = absent */
    double rope_attention_factor; /* derived: multiplies cos and sin; 1 without YaRN */
    int rope_interleave;          /* of the file; in memory rope rows are always interleaved */
    int tied_head;
    int32_t max_position; /* the context limit */
    float softmax_scale;  /* derived: with YaRN's mscale^2 */
};

#define TV_MODEL_TAPS_MAX 16

/* How far a load is; any thread may look, and a number may be a moment old. Tensors are read twice,
 * to bring them and to name them; what is not served is never read, so the total may not be
 * reached.
 */
struct tv_model_progress {
    _Atomic int64_t bytes_read, bytes_total; /* relaxed */
};

struct tv_model_options {
    int32_t max_len;      /* 0 = the checkpoint's; may not exceed it */
    int32_t rows_max;     /* rows of one verify pass */
    int32_t prefill_rows; /* of one prefill pass; never fewer than rows_max, which 0 stands for */
    int32_t requests_max; /* items of one verify pass */
    int32_t page_size;    /* of the cache it will run on */
    /* 1: random weights of this seed in place of the folder's, of which config.json alone is read.
     * For measurements: then max_len may exceed what the checkpoint was made for. */
    int synthetic;
    uint64_t synthetic_seed;
    /* Where the residual stream can be looked at: tap L is what enters layer L, the embedding for
     * 0; `layers` is what leaves the last one, before the last norm. */
    int32_t tap_count;
    int32_t taps[TV_MODEL_TAPS_MAX]; /* [tap_count], each once */
    /* safetensors file whose fc.weight [dim, tap_count * hidden] projects them; NULL: none. Not
     * looked at after the load. */
    const char *projection;
    struct tv_model_progress *progress; /* of the load, or NULL; not used after it */
    /* Of every product but the router's; bf16: -ERANGE for a checkpoint without bf16 weights. */
    enum tv_products products;
};

/* Why a checkpoint was refused: file, tensor or field, byte counts. */
struct tv_model_error {
    char text[512];
};

/* Read and check the folder `dir`; -EBADMSG with *ret_error for a bad or missing checkpoint (exit
 * 65), -ERANGE with it for an option that does not fit the checkpoint, the projection's file
 * included (exit 78), -ENOMEM, -EIO.
 * kernels outlives the model. */
int tv_model_load(struct tv_kernels *kernels, const char *dir,
                  const struct tv_model_options *options, struct tv_model **ret_model,
                  struct tv_model_error *ret_error);
void tv_model_destroy(struct tv_model *model);
const struct tv_model_config *tv_model_config(const struct tv_model *model);
const char *tv_model_name(const struct tv_model *model);          /* the folder's last component */
const char *tv_model_weights_dtype(const struct tv_model *model); /* "bf16", "f32", "mixed" */
const uint8_t *tv_model_id(const struct tv_model *model);         /* [32] */
/* SHA-256 of tokenizer.json [32], or NULL when the folder has none. */
const uint8_t *tv_model_tokenizer_sha256(const struct tv_model *model);
int64_t tv_model_bytes(const struct tv_model *model); /* weights on the device */
/* The options it was loaded with; max_len resolved (never 0). */
const struct tv_model_options *tv_model_options(const struct tv_model *model);

/* The weights, read only, for the path oracle of shadow/. Device pointers, row-major [rows, cols];
 * data NULL = the checkpoint has no such tensor. */
struct tv_model_tensor {
    const void *data;
    enum tv_dtype dtype;
    int32_t rows, cols;
};
struct tv_model_mlp_weights {
    struct tv_model_tensor gate, up, down; /* [inter, hidden] twice, [hidden, inter] */
};
struct tv_model_layer_weights {
    struct tv_model_tensor input_norm, post_norm; /* [1, hidden] f32 */
    struct tv_model_tensor q;                     /* [heads * (nope + rope), hidden]; q_lora 0 */
    struct tv_model_tensor q_a, q_a_norm, q_b;    /* q_lora > 0 */
    struct tv_model_tensor kv_a;                  /* [kv_lora + rope, hidden] */
    struct tv_model_tensor kv_a_norm;             /* [1, kv_lora] f32 */
    struct tv_model_tensor k_up;                  /* [heads * nope, kv_lora]: keys of kv_b */
    struct tv_model_tensor v_up;                  /* [heads * v, kv_lora]: values of kv_b */
    struct tv_model_tensor o;                     /* [hidden, heads * v] */
    struct tv_model_mlp_weights mlp;              /* dense layers; else shared experts, or none */
    struct tv_model_tensor router;                /* [experts, hidden]; NULL: a dense layer */
    struct tv_model_tensor router_bias;           /* [1, experts] f32, noaux_tc */
    const struct tv_model_mlp_weights *experts;   /* [experts], or NULL */
};
/* Rope rows of q, q_b and kv_a are in the interleaved order that tv_rope takes. */
struct tv_model_weights {
    struct tv_model_tensor embed;                /* [vocab, hidden] */
    struct tv_model_tensor final_norm;           /* [1, hidden] f32 */
    struct tv_model_tensor head;                 /* [vocab, hidden]; the embedding when tied */
    const struct tv_model_layer_weights *layers; /* [layers] */
};
const struct tv_model_weights *tv_model_weights(const struct tv_model *model);

/* Called after each layer's verify attention with exactly what the kernel was given and gave. */
typedef void tv_model_layer_hook(void *context, int32_t layer, const struct tv_verify_attn *attn);

/* One tree of a verify pass. The sequence has `rows` scratch rows reserved. */
struct tv_model_item {
    const struct tv_cache_seq *seq;
    int32_t rows;
    const int32_t *tokens;  /* host [rows] */
    const int32_t *parents; /* host [rows] */
    const int32_t *depths;  /* host [rows]; position = seq->len + depth */
};

/* One absorbed pass over all trees; writes their KV into the scratch rows. *ret_logits: device
 * [sum of rows, vocab], item after item, the model's own buffer, valid until the next pass.
 * hook may be NULL. -EINVAL: over rows_max / requests_max, a token or position out of range. A
 * backend's timer starts with the pass. */
int tv_model_verify(struct tv_model *model, struct tv_cache *cache,
                    const struct tv_model_item *items, int32_t count, tv_model_layer_hook *hook,
                    void *hook_context, const float **ret_logits);
/* Known tokens of one more sequence, which ride along in a verify pass. */
struct tv_model_rider {
    const struct tv_cache_seq *seq; /* none of the items'; has `count` scratch rows reserved */
    const int32_t *tokens;          /* host [count], behind the committed rows */
    int32_t count;
    int draws; /* the logits of the last one are wanted */
};

/* tv_model_verify, and in the same pass what tv_model_prefill does of the rider's tokens; the bits
 * of both are those of passes of their own. All weights are read once; attention is a call for
 * either. Rows of both together may be prefill_rows. *ret_logits has one row more, the last, when
 * the rider draws. Never a replay of a recording. */
int tv_model_verify_shared(struct tv_model *model, struct tv_cache *cache,
                           const struct tv_model_item *items, int32_t count,
                           const struct tv_model_rider *rider, tv_model_layer_hook *hook,
                           void *hook_context, const float **ret_logits);
/* Let a backend that can do so record the verify passes over this cache, once, at the start: later
 * passes without a hook are replays. The cache outlives the last pass, not the model. */
int tv_model_record(struct tv_model *model, struct tv_cache *cache);
/* How passes that begin, or are recorded, from now on multiply; at first as the options say. */
void tv_model_products_set(struct tv_model *model, enum tv_products products);
/* How many passes that records; 0 where the backend gains nothing by it. */
int64_t tv_model_record_count(const struct tv_model *model);
/* One expanded pass over `count` (<= prefill_rows) tokens that follow the committed rows; the
 * sequence has them reserved; the caller commits. *ret_logits: device [1, vocab] of the last token,
 * or pass NULL to skip the head. */
int tv_model_prefill(struct tv_model *model, struct tv_cache *cache, const struct tv_cache_seq *seq,
                     const int32_t *tokens, int32_t count, const float **ret_logits);
/* Passes that begin while this is on keep what the taps see of their rows. Off at first. */
void tv_model_taps_set(struct tv_model *model, int on);
/* `rows` rows of the last such pass from `first` on: host [rows, tap_count, hidden], valid until
 * the next pass, or until these rows are asked for again. -EINVAL: no taps, or no such rows. */
int tv_model_taps_rows(struct tv_model *model, int32_t first, int32_t rows, const float **ret_rows);
/* Values of a projected row; 0: there is no projection. */
int32_t tv_model_taps_project_dim(const struct tv_model *model);
/* `rows` rows of the last such pass from `first` on, projected, likewise: host [rows, dim]. */
int tv_model_taps_project(struct tv_model *model, int32_t first, int32_t rows,
                          const float **ret_rows);
/* A prefill pass calls `between` where it can be interrupted: for verify passes over other
 * sequences, and what moves their rows or gives them back: with the same result as elsewhere. On a
 * device not with taps. NULL: it is left alone. */
void tv_model_between_set(struct tv_model *model, void (*between)(void *context), void *context);

#endif
