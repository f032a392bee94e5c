/*
 * model.c - loading a checkpoint into a model, and what a model tells about itself.
 *
 * Owns every device allocation of weights and activations: all of them are made here, none during a
 * pass.
 */
#include "model/model.h"

#include <errno.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "base/digest.h"
#include "model/model_config.h"
#include "model/model_impl.h"
#include "model/refuse.h"

#define TOKENIZER_BYTES_MAX (256u << 20)

void *tv_model_alloc(struct tv_model *model, size_t bytes)
{
    if (model->device_count == model->device_capacity) {
        size_t capacity = model->device_capacity > 0 ? 2 * model->device_capacity : 256;
        void **device = realloc(model->device, capacity * sizeof *device);
        if (device == NULL) {
            return NULL;
        }
        model->device = device;
        model->device_capacity = capacity;
    }
    void *memory = model->kernels->alloc(model->kernels, bytes);
    if (memory != NULL) {
        model->device[model->device_count++] = memory;
    }
    return memory;
}

/* The folder's last component, without trailing slashes. */
static char *name_of(const char *dir)
{
    size_t end = strlen(dir);
    while (end > 1 && dir[end - 1] == '/') {
        end--;
    }
    size_t begin = end;
    while (begin > 0 && dir[begin - 1] != '/') {
        begin--;
    }
    return strndup(dir + begin, end - begin);
}

static int tokenizer_hash(struct tv_model *model, int folder_fd, struct tv_model_error *ret_error)
{
    char *data = NULL;
    size_t bytes = 0;
    int err =
        tv_checkpoint_file_read(folder_fd, "tokenizer.json", TOKENIZER_BYTES_MAX, &data, &bytes);
    if (err == -ENOENT) {
        return 0;
    }
    if (err == -EFBIG || err == -EIO) {
        return tv_model_refuse(ret_error, "tokenizer.json cannot be read");
    }
    if (err != 0) {
        return err;
    }
    struct tv_sha256 hash;
    tv_sha256_init(&hash);
    tv_sha256_update(&hash, data, bytes);
    tv_sha256_finish(&hash, model->tokenizer);
    model->has_tokenizer = 1;
    free(data);
    return 0;
}

static int options_set(struct tv_model *model, const struct tv_model_options *options,
                       struct tv_model_error *ret_error)
{
    model->options = *options;
    model->options.progress = NULL;
    model->products = options->products;
    if (options->max_len > model->config.max_position && !options->synthetic) {
        (void)tv_model_refuse(ret_error,
                              "max_len %d is above max_position_embeddings %d of config.json",
                              options->max_len, model->config.max_position);
        return -ERANGE; /* the setting's fault, not the folder's */
    }
    if (options->max_len == 0) {
        model->options.max_len = model->config.max_position;
    }
    model->options.projection = NULL; /* the caller's, for the load alone */
    if (options->max_len < 0 || options->rows_max < 1 || options->requests_max < 1) {
        return -EINVAL;
    }
    if (options->prefill_rows < options->rows_max) {
        model->options.prefill_rows = options->rows_max;
    }
    return 0;
}

/* The files count what is read of them; each served tensor is read twice. */
static void progress_begin(struct tv_checkpoint *checkpoint, struct tv_model_progress *progress)
{
    int64_t bytes = 0;
    for (size_t i = 0; i < checkpoint->entry_count; i++) {
        bytes += checkpoint->entries[i].tensor->bytes;
    }
    for (size_t i = 0; i < checkpoint->file_count; i++) {
        checkpoint->files[i].bytes_read = &progress->bytes_read;
    }
    atomic_store_explicit(&progress->bytes_total, 2 * bytes, memory_order_relaxed);
}

/* Nothing more is read: what there was is the total. */
static void progress_end(struct tv_model_progress *progress)
{
    int64_t bytes = atomic_load_explicit(&progress->bytes_read, memory_order_relaxed);
    atomic_store_explicit(&progress->bytes_total, bytes, memory_order_relaxed);
}

static int model_fill(struct tv_model *model, struct tv_checkpoint *checkpoint,
                      const struct tv_model_options *options, struct tv_model_error *ret_error)
{
    int err = tv_model_config_read(checkpoint->config, &model->config, ret_error);
    if (err == 0) {
        err = options_set(model, options, ret_error);
    }
    if (err == 0) {
        err = tokenizer_hash(model, checkpoint->folder_fd, ret_error);
    }
    if (err == 0) {
        if (options->progress != NULL && !options->synthetic) { /* nothing is read of those */
            progress_begin(checkpoint, options->progress);
        }
        err = tv_model_weights_load(model, checkpoint, ret_error);
    }
    if (err == 0 && options->products == TV_PRODUCTS_BF16 &&
        strcmp(model->weights_dtype, "f32") == 0) {
        (void)tv_model_refuse(ret_error, "bf16 products need bf16 weights, these are f32");
        err = -ERANGE;
    }
    if (err == 0) {
        err = tv_model_id_compute(&model->config, checkpoint, model->id, ret_error);
    }
    if (err == 0 && options->progress != NULL) {
        progress_end(options->progress);
    }
    if (err == 0) {
        err = tv_model_taps_load(model, options->projection, ret_error);
    }
    if (err == 0) {
        err = tv_model_buffers_take(model);
    }
    return err;
}

int tv_model_load(struct tv_kernels *kernels, const char *dir,
                  const struct tv_model_options *options, struct tv_model **ret_model,
                  struct tv_model_error *ret_error)
{
    struct tv_checkpoint checkpoint;
    struct tv_model *model = calloc(1, sizeof *model);
    if (model == NULL) {
        return -ENOMEM;
    }
    model->kernels = kernels;
    model->name = name_of(dir);
    int err = model->name == NULL ? -ENOMEM
              : options->synthetic
                  ? tv_checkpoint_invent(dir, options->synthetic_seed, &checkpoint, ret_error)
                  : tv_checkpoint_open(dir, &checkpoint, ret_error);
    if (err == 0) {
        err = model_fill(model, &checkpoint, options, ret_error);
        tv_checkpoint_finish(&checkpoint);
    }
    if (err != 0) {
        tv_model_destroy(model);
        return err;
    }
    *ret_model = model;
    return 0;
}

void tv_model_destroy(struct tv_model *model)
{
    if (model == NULL) {
        return;
    }
    tv_model_recordings_free(model);
    for (size_t i = 0; i < model->device_count; i++) {
        model->kernels->free(model->kernels, model->device[i]);
    }
    free(model->device);
    for (int32_t layer = 0; model->layers != NULL && layer < model->config.layers; layer++) {
        /* The public view is read only; this file's folder allocated it. */
        free((void *)(uintptr_t)model->layers[layer].experts);
    }
    free(model->layers);
    free(model->extra);
    free(model->buffers.stage.host);
    free(model->aside.stage.host);
    free(model->taps_host);
    free(model->name);
    free(model);
}

const struct tv_model_config *tv_model_config(const struct tv_model *model)
{
    return &model->config;
}

const char *tv_model_name(const struct tv_model *model)
{
    return model->name;
}

const char *tv_model_weights_dtype(const struct tv_model *model)
{
    return model->weights_dtype;
}

const uint8_t *tv_model_id(const struct tv_model *model)
{
    return model->id;
}

const uint8_t *tv_model_tokenizer_sha256(const struct tv_model *model)
{
    return model->has_tokenizer ? model->tokenizer : NULL;
}

int64_t tv_model_bytes(const struct tv_model *model)
{
    return model->weight_bytes;
}

const struct tv_model_options *tv_model_options(const struct tv_model *model)
{
    return &model->options;
}

void tv_model_products_set(struct tv_model *model, enum tv_products products)
{
    model->products = products;
}

const struct tv_model_weights *tv_model_weights(const struct tv_model *model)
{
    return &model->weights;
}
