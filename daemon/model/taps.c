/*
 * taps.c - hidden rows for drafters: what passes keep of the residual stream, and its projection.
 *
 * Owns the check of the taps and the projection's file. In host memory passes that nobody asks keep
 * nothing. On a device every pass keeps them, a copy a tap, so that recordings serve those that are
 * asked too; what is asked for comes to the host then.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>

#include "model/forward.h"
#include "model/refuse.h"
#include "model/weights_read.h"

#define PROJECTION_NAME "fc.weight"
#define PROJECTION_BIAS "fc.bias"

/* The settings are at fault, not the checkpoint. */
static int refused(int err)
{
    return err == -EBADMSG ? -ERANGE : err;
}

static int taps_check(const struct tv_model *model, struct tv_model_error *ret_error)
{
    const struct tv_model_options *options = &model->options;
    if (options->tap_count < 0 || options->tap_count > TV_MODEL_TAPS_MAX) {
        return -EINVAL;
    }
    for (int32_t i = 0; i < options->tap_count; i++) {
        int32_t tap = options->taps[i];
        if (tap < 0 || tap > model->config.layers) {
            return refused(tv_model_refuse(
                ret_error, "taps: %d is outside of 0 to %d, the layers of config.json", tap,
                model->config.layers));
        }
        for (int32_t j = 0; j < i; j++) {
            if (options->taps[j] == tap) {
                return refused(tv_model_refuse(ret_error, "taps: %d is listed twice", tap));
            }
        }
    }
    return 0;
}

static const struct tv_safetensors_tensor *tensor_find(const struct tv_safetensors *file,
                                                       const char *name)
{
    for (size_t i = 0; i < file->count; i++) {
        if (strcmp(file->tensors[i].name, name) == 0) {
            return &file->tensors[i];
        }
    }
    return NULL;
}

/* The file has the one matrix, of a shape that fits the taps; *ret_rows are its own. */
static int matrix_check(const struct tv_model *model, const struct tv_safetensors *file,
                        int32_t *ret_rows, struct tv_model_error *ret_error)
{
    const struct tv_safetensors_tensor *matrix = tensor_find(file, PROJECTION_NAME);
    int64_t cols = (int64_t)model->options.tap_count * model->config.hidden;
    if (matrix == NULL) {
        return tv_model_refuse(ret_error, "taps_projection: %.200s has no tensor %s among %zu",
                               file->name, PROJECTION_NAME, file->count);
    }
    if (tensor_find(file, PROJECTION_BIAS) != NULL) {
        return tv_model_refuse(ret_error,
                               "taps_projection: %.200s has a bias (%s), which is not served",
                               file->name, PROJECTION_BIAS);
    }
    if (matrix->rank != 2 || matrix->shape[1] != cols || matrix->shape[0] < 1 ||
        matrix->shape[0] > 1 << 20) {
        return tv_model_refuse(
            ret_error,
            "taps_projection: %s of %.200s has rank %d and shape [%lld, %lld]; %d taps of %d "
            "values need [n, %lld]",
            PROJECTION_NAME, file->name, matrix->rank,
            (long long)(matrix->rank > 0 ? matrix->shape[0] : 0),
            (long long)(matrix->rank > 1 ? matrix->shape[1] : 0), model->options.tap_count,
            model->config.hidden, (long long)cols);
    }
    *ret_rows = (int32_t)matrix->shape[0];
    return 0;
}

static int matrix_load(struct tv_model *model, struct tv_safetensors *file, int32_t rows,
                       struct tv_model_error *ret_error)
{
    struct tv_checkpoint_entry entry = {.file = file, .tensor = tensor_find(file, PROJECTION_NAME)};
    struct tv_checkpoint alone = {
        .files = file, .file_count = 1, .entries = &entry, .entry_count = 1};
    struct tv_weights_read read = {.model = model, .checkpoint = &alone, .error = ret_error};
    struct tv_weights_tensor tensor = {.name = PROJECTION_NAME,
                                       .rows = rows,
                                       .cols = model->options.tap_count * model->config.hidden};
    const void *device = NULL;
    int err = tv_weights_fetch(&read, &tensor);
    if (err == 0) {
        err = tv_weights_store(&read, tensor.data, tensor.bytes, &device);
    }
    free(read.host);
    free(read.wide);
    if (err == 0) {
        model->projection = (struct tv_model_tensor){
            .data = device, .dtype = tensor.dtype, .rows = tensor.rows, .cols = tensor.cols};
    }
    return err;
}

int tv_model_taps_load(struct tv_model *model, const char *projection,
                       struct tv_model_error *ret_error)
{
    enum tv_safetensors_fault fault = TV_SAFETENSORS_OK;
    struct tv_safetensors file;
    int32_t rows = 0;
    int err = taps_check(model, ret_error);
    if (err != 0 || projection == NULL) {
        return err;
    }
    if (model->options.tap_count == 0) {
        return refused(tv_model_refuse(ret_error, "taps_projection: there are no taps to project"));
    }
    err = tv_safetensors_open(AT_FDCWD, projection, &file, &fault, ret_error);
    if (err != 0) {
        return refused(err);
    }
    err = matrix_check(model, &file, &rows, ret_error);
    if (err == 0) {
        err = matrix_load(model, &file, rows, ret_error);
    }
    tv_safetensors_finish(&file);
    return refused(err);
}

int tv_forward_tap(const struct tv_forward *pass, int32_t layer)
{
    const struct tv_model *model = pass->model;
    const struct tv_model_options *options = &model->options;
    size_t row = (size_t)model->config.hidden * sizeof(float);
    int32_t tap = 0;
    if (!pass->taps) {
        return 0;
    }
    while (tap < options->tap_count && options->taps[tap] != layer) {
        tap++;
    }
    if (tap == options->tap_count) {
        return 0;
    }
    return model->kernels->copy(model->kernels, (char *)model->buffers.taps + (size_t)tap * row,
                                (size_t)options->tap_count * row, model->buffers.x, row, row,
                                pass->rows);
}

int tv_forward_taps(const struct tv_model *model)
{
    return model->options.tap_count > 0 && (model->taps_on || !model->kernels->host_memory);
}

void tv_model_taps_set(struct tv_model *model, int on)
{
    model->taps_on = on && model->options.tap_count > 0;
}

/* `rows` rows of a device array from `first` on, of so many values, in host memory; those of other
 * rows stay where they are. */
static int rows_fetch(struct tv_model *model, const float *device, int32_t first, int32_t rows,
                      size_t width, const float **ret_rows)
{
    struct tv_kernels *kernels = model->kernels;
    const float *from = device + (size_t)first * width;
    if (kernels->host_memory) {
        *ret_rows = from;
        return 0;
    }
    float *to = model->taps_host + (size_t)first * model->taps_host_width;
    int err = kernels->download(kernels, to, from, (size_t)rows * width * sizeof *to);
    if (err == 0) {
        err = kernels->sync(kernels);
    }
    if (err == 0) {
        *ret_rows = to;
    }
    return err;
}

int tv_model_taps_rows(struct tv_model *model, int32_t first, int32_t rows, const float **ret_rows)
{
    size_t width = (size_t)model->options.tap_count * (size_t)model->config.hidden;
    if (width == 0 || first < 0 || rows < 1 || rows > model->options.prefill_rows - first) {
        return -EINVAL;
    }
    return rows_fetch(model, model->buffers.taps, first, rows, width, ret_rows);
}

int32_t tv_model_taps_project_dim(const struct tv_model *model)
{
    return model->projection.rows;
}

int tv_model_taps_project(struct tv_model *model, int32_t first, int32_t rows,
                          const float **ret_rows)
{
    const struct tv_model_tensor *matrix = &model->projection;
    if (matrix->data == NULL || first < 0 || rows < 1 ||
        rows > model->options.prefill_rows - first) {
        return -EINVAL;
    }
    int err = tv_forward_linear(model, rows, matrix,
                                model->buffers.taps + (size_t)first * (size_t)matrix->cols,
                                model->projected + (size_t)first * (size_t)matrix->rows, 0);
    if (err == 0) {
        err = rows_fetch(model, model->projected, first, rows, (size_t)matrix->rows, ret_rows);
    }
    return err;
}
