/*
 * model_impl.h - the inside of struct tv_model, for the files of this folder.
 */
#ifndef TV_MODEL_MODEL_IMPL_H
#define TV_MODEL_MODEL_IMPL_H

#include <stddef.h>

#include "model/checkpoint.h"
#include "model/model.h"

/* What the forward pass needs of a layer beside its weights. */
struct tv_model_layer_extra {
    const void *k_up_t; /* device [heads, kv_lora, nope], k_up transposed */
    const void *const *expert_gate, *const *expert_up; /* device arrays [experts] */
    const void *const *expert_down;
};

/* One device copy of all host integers of a pass; sections begin at multiples of 64 bytes. */
struct tv_model_stage {
    char *host, *device;
    size_t bytes, used;
};

/* Activations of one pass, all device, taken at load. R = prefill_rows, V = rows_max. */
struct tv_model_buffers {
    float *x;             /* [R, hidden] residual stream */
    float *h;             /* [R, hidden] normed */
    float *q_low;         /* [R, q_lora] */
    float *q;             /* [R, heads, nope + rope] */
    float *q_abs;         /* [V, heads, kv_lora + rope] */
    uint16_t *q_abs_bf16; /* the same, for bf16 pages */
    float *ckv;           /* [R, kv_lora + rope] */
    float *latent;        /* [V, heads, kv_lora] attention output */
    float *lse;           /* [V, heads] */
    float *values;        /* [R, heads, v] */
    float *gate, *up;     /* [R, widest intermediate] */
    float *scores;        /* [R, experts] */
    int32_t *ids;         /* [R, experts_per_token] */
    float *weights;       /* [R, experts_per_token] */
    float *logits;        /* [V, vocab] */
    float *taps;          /* [R, tap_count, hidden]; NULL without taps */
    void *workspace;
    size_t workspace_bytes;
    struct tv_model_stage stage;
};

/* Stand-ins for the members of the same names. */
struct tv_model_aside {
    float *x, *q, *values, *taps;
    float *running; /* [heads, 2, R]: of attention that is cut; for prefill passes alone */
    struct tv_model_stage stage;
};

/* A verify pass as the backend recorded it: any `count` trees of at most `rows` rows together. */
struct tv_model_recording {
    int32_t rows, count;
    void *handle;
};

struct tv_model {
    struct tv_kernels *kernels;
    struct tv_model_config config;
    struct tv_model_options options;
    char *name;
    const char *weights_dtype;
    uint8_t id[32], tokenizer[32];
    int has_tokenizer;
    struct tv_model_weights weights;
    struct tv_model_layer_weights *layers; /* [layers] */
    struct tv_model_layer_extra *extra;    /* [layers] */
    struct tv_rope_table rope;
    struct tv_model_buffers buffers;
    /* Where a prefill pass keeps what lives across its parts, so that verify passes may come
     * between; NULL on a device with taps. */
    struct tv_model_aside aside;
    void (*between)(void *context);
    void *between_context;
    int queries_apart; /* the backend does not take these weights in its slot query */
    int64_t weight_bytes;
    void **device; /* every device allocation, freed with the model */
    size_t device_count, device_capacity;
    enum tv_products products;         /* of passes that begin now */
    int taps_on;                       /* they keep their rows at the taps */
    struct tv_model_tensor projection; /* [dim, tap_count * hidden]; data NULL: none */
    float *projected;                  /* device [R, dim] */
    float *taps_host;                  /* [R, taps_host_width]; NULL in host memory */
    size_t taps_host_width;            /* of the wider of both */
    const struct tv_cache *recorded;   /* the cache that the recordings read and write */
    struct tv_model_recording *recordings;
    size_t recording_count, recording_capacity;
};

/* 1: the layer's feed-forward part is routed experts. */
int tv_model_layer_is_moe(const struct tv_model_config *config, int32_t layer);
/* Device memory that the model frees; NULL when there is none. */
void *tv_model_alloc(struct tv_model *model, size_t bytes);
/* Bind, check and upload every weight. -EBADMSG, -ENOMEM, -EIO. */
int tv_model_weights_load(struct tv_model *model, struct tv_checkpoint *checkpoint,
                          struct tv_model_error *ret_error);
/* Activations, rope table and workspace. -ENOMEM, -EIO. */
int tv_model_buffers_take(struct tv_model *model);
/* Check the taps against the layers and load the projection. -ERANGE with the sentence set;
 * -ENOMEM, -EIO. */
int tv_model_taps_load(struct tv_model *model, const char *projection,
                       struct tv_model_error *ret_error);
/* Record one verify pass (verify.c); the caller owns *ret_recording. */
int tv_model_verify_record(struct tv_model *model, struct tv_cache *cache, int32_t rows,
                           int32_t count, void **ret_recording);
/* The recording with the fewest rows that serves such a pass, or NULL. */
const struct tv_model_recording *tv_model_recording_find(const struct tv_model *model,
                                                         const struct tv_cache *cache, int32_t rows,
                                                         int32_t count);
void tv_model_recordings_free(struct tv_model *model);
/* SHA-256 over the served fields and tensors: the definition of model_id. -EBADMSG, -ENOMEM. */
int tv_model_id_compute(const struct tv_model_config *config,
                        const struct tv_checkpoint *checkpoint, uint8_t ret_id[32],
                        struct tv_model_error *ret_error);

#endif
