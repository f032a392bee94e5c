/*
 * weights_read.h - one tensor of a checkpoint: found, checked, brought to the host or the device.
 */
#ifndef TV_MODEL_WEIGHTS_READ_H
#define TV_MODEL_WEIGHTS_READ_H

#include "model/model_impl.h"

enum {
    TV_WEIGHTS_VECTOR = 1, /* rank 1: [cols]; otherwise rank 2: [rows, cols] */
    TV_WEIGHTS_F32 = 2,    /* converted, which is exact from bf16 and f16 */
    TV_WEIGHTS_BIAS = 4,   /* around zero when it is invented; other vectors are around one */
};

/* A load under way. */
struct tv_weights_read {
    struct tv_model *model;
    struct tv_checkpoint *checkpoint;
    struct tv_model_error *error;
    char *host, *wide; /* staging: as stored, and converted or rearranged */
    size_t host_bytes, wide_bytes;
    int dtypes_seen; /* of linear weights: bit 1 << enum tv_dtype */
};

/* What the caller wants and, after a fetch, what it got. */
struct tv_weights_tensor {
    char name[192];
    int32_t rows, cols;
    int flags;
    enum tv_dtype dtype;
    const void *data; /* host, valid until the next fetch */
    size_t bytes;
};

/* The stored type of a tensor. -EBADMSG when it is missing or of no served type. */
int tv_weights_dtype(struct tv_weights_read *read, const char *name, enum tv_dtype *ret_dtype);
/* Find, check and read; marks the tensor served. A value that is not finite is refused. -EBADMSG
 * with the sentence set; -ENOMEM; -EIO. */
int tv_weights_fetch(struct tv_weights_read *read, struct tv_weights_tensor *tensor);
/* Copy host bytes to new device memory of the model. -ENOMEM, -EIO. */
int tv_weights_store(struct tv_weights_read *read, const void *data, size_t bytes,
                     const void **ret_device);
/* A tensor of a checkpoint without files, made on the device: bf16 matrices whose products keep the
 * size of what they multiply, f32 where a real one would become it. -ENOMEM, or the device's word.
 */
int tv_weights_invent(struct tv_weights_read *read, const struct tv_weights_tensor *tensor,
                      struct tv_model_tensor *ret_tensor);
/* The three parts of a kv_b [heads * (nope + v), latent] of that kind. */
int tv_weights_invent_kv_b(struct tv_weights_read *read, const struct tv_weights_tensor *tensor,
                           struct tv_model_tensor *ret_k_up, struct tv_model_tensor *ret_v_up,
                           const void **ret_k_up_t);
/* Staging of at least `bytes` in read->wide. -ENOMEM. */
int tv_weights_wide(struct tv_weights_read *read, size_t bytes);

#endif
