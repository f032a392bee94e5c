/*
 * weights_invent.c - random weights in place of a checkpoint's, for measurements at real sizes.
 *
 * Owns their scale: the product of a matrix with values of size one has size one, so that logits
 * are finite at any depth. Values are a function of the seed and of the order in which tensors are
 * asked for; nothing is read or copied.
 */
#include <errno.h>
#include <math.h>

#include "model/weights_read.h"

/* Uniform values in [-1, 1) have a standard deviation of 1 / sqrt(3). */
#define UNIFORM_SPREAD 3.0
#define VECTOR_SCALE   0.1f
#define SECOND_PART    (1u << 31) /* more tensors than this has no model */

/* [groups, rows, cols] of the device's; one part of the tensor `number`. */
static int make(struct tv_weights_read *read, const struct tv_synthesize *what,
                const void **ret_device)
{
    struct tv_model *model = read->model;
    struct tv_synthesize args = *what;
    size_t count = (size_t)args.groups * (size_t)args.rows * (size_t)args.cols;
    size_t bytes = count * tv_dtype_size(args.dtype);
    args.seed = read->checkpoint->seed;
    args.to = tv_model_alloc(model, bytes);
    if (args.to == NULL) {
        return -ENOMEM;
    }
    int err = model->kernels->synthesize(model->kernels, &args);
    if (err == 0) {
        model->weight_bytes += (int64_t)bytes;
        *ret_device = args.to;
    }
    return err;
}

static float matrix_scale(int32_t cols)
{
    return (float)sqrt(UNIFORM_SPREAD / (double)cols);
}

int tv_weights_invent(struct tv_weights_read *read, const struct tv_weights_tensor *tensor,
                      struct tv_model_tensor *ret_tensor)
{
    int vector = (tensor->flags & TV_WEIGHTS_VECTOR) != 0;
    struct tv_synthesize args = {
        .groups = 1,
        .rows = tensor->rows,
        .cols = tensor->cols,
        .dtype = (tensor->flags & TV_WEIGHTS_F32) != 0 ? TV_F32 : TV_BF16,
        .scale = vector ? VECTOR_SCALE : matrix_scale(tensor->cols),
        .offset = vector && (tensor->flags & TV_WEIGHTS_BIAS) == 0 ? 1.0f : 0.0f,
    };
    const void *device = NULL;
    int err = tv_checkpoint_invent_tensor(read->checkpoint, tensor->name, args.dtype,
                                          vector ? 0 : tensor->rows, tensor->cols, &args.tensor);
    if (err == 0) {
        err = make(read, &args, &device);
    }
    if (err != 0) {
        return err;
    }
    if (args.dtype == TV_BF16) {
        read->dtypes_seen |= 1 << TV_BF16;
    }
    *ret_tensor = (struct tv_model_tensor){
        .data = device, .dtype = args.dtype, .rows = tensor->rows, .cols = tensor->cols};
    return 0;
}

int tv_weights_invent_kv_b(struct tv_weights_read *read, const struct tv_weights_tensor *tensor,
                           struct tv_model_tensor *ret_k_up, struct tv_model_tensor *ret_v_up,
                           const void **ret_k_up_t)
{
    const struct tv_model_config *config = &read->model->config;
    struct tv_synthesize keys = {.groups = config->heads,
                                 .rows = config->nope_dim,
                                 .cols = config->kv_lora,
                                 .dtype = TV_BF16,
                                 .scale = matrix_scale(config->kv_lora)};
    const void *k_up = NULL, *v_up = NULL;
    int err = tv_checkpoint_invent_tensor(read->checkpoint, tensor->name, TV_BF16, tensor->rows,
                                          tensor->cols, &keys.tensor);
    struct tv_synthesize values = keys;
    values.rows = config->v_dim;
    values.tensor |= SECOND_PART; /* beside the keys of the same tensor */
    if (err == 0) {
        err = make(read, &keys, &k_up);
    }
    keys.transposed = 1;
    if (err == 0) {
        err = make(read, &keys, ret_k_up_t);
    }
    if (err == 0) {
        err = make(read, &values, &v_up);
    }
    if (err != 0) {
        return err;
    }
    read->dtypes_seen |= 1 << TV_BF16;
    *ret_k_up =
        (struct tv_model_tensor){k_up, TV_BF16, config->heads * config->nope_dim, config->kv_lora};
    *ret_v_up =
        (struct tv_model_tensor){v_up, TV_BF16, config->heads * config->v_dim, config->kv_lora};
    return 0;
}
