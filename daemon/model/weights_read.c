/*
 * weights_read.c - reading one tensor, with every check that its values allow.
 *
 * Owns the staging buffers. Refuses by file, tensor and byte counts.
 */
#include "model/weights_read.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "model/refuse.h"

#define FINITE_BLOCK ((size_t)1 << 16) /* values between looks at the count */

static int buffer_grow(char **buffer, size_t *capacity, size_t bytes)
{
    if (bytes <= *capacity) {
        return 0;
    }
    char *grown = realloc(*buffer, bytes);
    if (grown == NULL) {
        return -ENOMEM;
    }
    *buffer = grown;
    *capacity = bytes;
    return 0;
}

int tv_weights_wide(struct tv_weights_read *read, size_t bytes)
{
    return buffer_grow(&read->wide, &read->wide_bytes, bytes);
}

static int dtype_of(const char *name, enum tv_dtype *ret_dtype)
{
    if (strcmp(name, "BF16") == 0) {
        *ret_dtype = TV_BF16;
    } else if (strcmp(name, "F32") == 0) {
        *ret_dtype = TV_F32;
    } else if (strcmp(name, "F16") == 0) {
        *ret_dtype = TV_F16;
    } else {
        return -EINVAL;
    }
    return 0;
}

/* Which files were searched, and how much they hold. */
static int missing_refuse(struct tv_weights_read *read, const char *name)
{
    const struct tv_checkpoint *checkpoint = read->checkpoint;
    long long bytes = 0;
    for (size_t i = 0; i < checkpoint->entry_count; i++) {
        bytes += (long long)checkpoint->entries[i].tensor->bytes;
    }
    return tv_model_refuse(
        read->error,
        "tensor '%s' is missing: %s%.100s%s no such one among %zu tensors of "
        "%lld bytes",
        name, checkpoint->file_count > 1 ? "the files from " : "", checkpoint->files[0].name,
        checkpoint->file_count > 1 ? " on have" : " has", checkpoint->entry_count, bytes);
}

static int entry_find(struct tv_weights_read *read, const char *name,
                      struct tv_checkpoint_entry **ret_entry, enum tv_dtype *ret_dtype)
{
    struct tv_checkpoint_entry *entry = tv_checkpoint_find(read->checkpoint, name);
    if (entry == NULL) {
        return missing_refuse(read, name);
    }
    if (dtype_of(entry->tensor->dtype, ret_dtype) != 0) {
        return tv_model_refuse(
            read->error, "%.100s: tensor '%s' is %s (%lld bytes), served are BF16, F16, F32",
            entry->file->name, name, entry->tensor->dtype, (long long)entry->tensor->bytes);
    }
    *ret_entry = entry;
    return 0;
}

int tv_weights_dtype(struct tv_weights_read *read, const char *name, enum tv_dtype *ret_dtype)
{
    struct tv_checkpoint_entry *entry = NULL;
    return entry_find(read, name, &entry, ret_dtype);
}

static int shape_check(struct tv_weights_read *read, const struct tv_weights_tensor *tensor,
                       const struct tv_checkpoint_entry *entry)
{
    const struct tv_safetensors_tensor *stored = entry->tensor;
    int vector = (tensor->flags & TV_WEIGHTS_VECTOR) != 0;
    int same = vector ? stored->rank == 1 && stored->shape[0] == tensor->cols
                      : stored->rank == 2 && stored->shape[0] == tensor->rows &&
                            stored->shape[1] == tensor->cols;
    if (same) {
        return 0;
    }
    long long wanted = (long long)tensor->rows * tensor->cols * (stored->bits / 8);
    return tv_model_refuse(
        read->error,
        "%.100s: tensor '%s' has rank %d, shape [%lld, %lld] and %lld bytes; config.json needs "
        "%s[%d, %d] of %lld bytes",
        entry->file->name, tensor->name, stored->rank,
        (long long)(stored->rank > 0 ? stored->shape[0] : 0),
        (long long)(stored->rank > 1 ? stored->shape[1] : 0), (long long)stored->bytes,
        vector ? "a vector of " : "", tensor->rows, tensor->cols, wanted);
}

/* binary16 to f32; exact. */
static float f16_to_f32(uint16_t bits)
{
    float sign = (bits & 0x8000u) != 0 ? -1.0f : 1.0f;
    int exponent = bits >> 10 & 31;
    int mantissa = bits & 0x3ff;
    if (exponent == 31) {
        return mantissa != 0 ? NAN : sign * INFINITY;
    }
    if (exponent == 0) {
        return sign * ldexpf((float)mantissa, -24);
    }
    return sign * ldexpf((float)(mantissa + 1024), exponent - 25);
}

static void floats_widen(const void *data, enum tv_dtype dtype, size_t count, float *ret_floats)
{
    const uint16_t *half = data;
    for (size_t i = 0; dtype != TV_F32 && i < count; i++) {
        ret_floats[i] = dtype == TV_BF16 ? tv_bf16_to_f32(half[i]) : f16_to_f32(half[i]);
    }
    if (dtype == TV_F32) {
        memcpy(ret_floats, data, count * sizeof(float));
    }
}

/* The exponent's bits, which are all set in infinities and NaNs and in nothing else. */
static uint32_t exponent_mask(enum tv_dtype dtype)
{
    switch (dtype) {
    case TV_BF16:
        return 0x7f80u;
    case TV_F16:
        return 0x7c00u;
    default:
        return 0x7f800000u;
    }
}

/* How many values are not finite. Without a branch on a value, so that compilers vectorise it. */
static size_t bad_count(const void *data, enum tv_dtype dtype, size_t first, size_t count)
{
    uint32_t mask = exponent_mask(dtype), bad = 0;
    if (dtype == TV_F32) {
        const uint32_t *words = (const uint32_t *)data + first;
        for (size_t i = 0; i < count; i++) {
            bad += (words[i] & mask) == mask;
        }
        return bad;
    }
    const uint16_t *halves = (const uint16_t *)data + first;
    uint16_t half_mask = (uint16_t)mask;
    for (size_t i = 0; i < count; i++) {
        bad += (uint16_t)(halves[i] & half_mask) == half_mask;
    }
    return bad;
}

/* One value that is not finite poisons every row that meets it: none is served. */
static int finite_check(struct tv_weights_read *read, const struct tv_weights_tensor *tensor,
                        const struct tv_checkpoint_entry *entry, enum tv_dtype stored, size_t count)
{
    size_t bad = 0, first = 0;
    for (size_t block = 0; block < count; block += FINITE_BLOCK) {
        size_t in_block = count - block < FINITE_BLOCK ? count - block : FINITE_BLOCK;
        size_t found = bad_count(read->host, stored, block, in_block);
        if (found > 0 && bad == 0) {
            first = block;
            while (bad_count(read->host, stored, first, 1) == 0) {
                first++;
            }
        }
        bad += found;
    }
    if (bad == 0) {
        return 0;
    }
    return tv_model_refuse(read->error,
                           "%.100s: tensor '%s': %zu of %zu values are not finite (first: element "
                           "%zu; %lld bytes)",
                           entry->file->name, tensor->name, bad, count, first,
                           (long long)entry->tensor->bytes);
}

int tv_weights_fetch(struct tv_weights_read *read, struct tv_weights_tensor *tensor)
{
    struct tv_checkpoint_entry *entry = NULL;
    enum tv_dtype stored = TV_F32;
    int err = entry_find(read, tensor->name, &entry, &stored);
    if (err == 0) {
        err = shape_check(read, tensor, entry);
    }
    if (err != 0) {
        return err;
    }
    /* The shape is that of the config and the bytes are those of the shape: neither overflows. */
    size_t bytes = (size_t)entry->tensor->bytes;
    size_t count = bytes / tv_dtype_size(stored);
    err = buffer_grow(&read->host, &read->host_bytes, bytes);
    if (err == 0) {
        err = tv_safetensors_read(entry->file, entry->tensor, 0, read->host, bytes, read->error);
    }
    if (err == 0) {
        err = finite_check(read, tensor, entry, stored, count);
    }
    if (err != 0) {
        return err;
    }
    entry->served = 1;
    tensor->data = read->host;
    tensor->dtype = stored;
    tensor->bytes = bytes;
    if ((tensor->flags & TV_WEIGHTS_F32) == 0) {
        return 0;
    }
    err = tv_weights_wide(read, count * sizeof(float));
    if (err != 0) {
        return err;
    }
    floats_widen(read->host, stored, count, (float *)(void *)read->wide);
    tensor->data = read->wide;
    tensor->dtype = TV_F32;
    tensor->bytes = count * sizeof(float);
    return 0;
}

int tv_weights_store(struct tv_weights_read *read, const void *data, size_t bytes,
                     const void **ret_device)
{
    struct tv_kernels *kernels = read->model->kernels;
    void *device = tv_model_alloc(read->model, bytes);
    if (device == NULL) {
        return -ENOMEM;
    }
    int err = kernels->upload(kernels, device, data, bytes);
    if (err == 0) {
        err = kernels->sync(kernels); /* the staging buffer is used again at once */
    }
    if (err != 0) {
        return err;
    }
    read->model->weight_bytes += (int64_t)bytes;
    *ret_device = device;
    return 0;
}
