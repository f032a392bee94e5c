/*
 * tiny_model.h - builds checkpoint folders of a few kilobytes, right ones and wrong ones.
 *
 * Starts as a complete two-layer deepseek_v3 model; tests then change config fields and tensors
 * before it is written. Fails the running cmocka test on any error of its own.
 */
#ifndef TV_TESTS_SUPPORT_TINY_MODEL_H
#define TV_TESTS_SUPPORT_TINY_MODEL_H

#include <stddef.h>
#include <stdint.h>

#include "folder.h"

#define TV_TINY_TENSORS_MAX 128
#define TV_TINY_FIELDS_MAX  64

struct tv_tiny_tensor {
    char name[128];
    char dtype[16]; /* "F32" at first; bytes follow the shape unless bytes is set by hand */
    int32_t rank;
    int64_t shape[4];
    float *values; /* owned; written as dtype */
    size_t count;  /* elements of values */
    int shard;     /* file it is written to, from 0 */
};

struct tv_tiny_model {
    struct tv_tiny_tensor tensors[TV_TINY_TENSORS_MAX];
    int32_t tensor_count;
    struct {
        char name[64], json[256];
    } fields[TV_TINY_FIELDS_MAX];
    int32_t field_count;
    int32_t shards;        /* 0: one model.safetensors, no index */
    char index_extra[512]; /* further text for weight_map, each entry after a comma */
};

void tv_tiny_init(struct tv_tiny_model *tiny, uint64_t seed);
void tv_tiny_finish(struct tv_tiny_model *tiny);
/* Set a config field to a JSON text; NULL removes it. */
void tv_tiny_field(struct tv_tiny_model *tiny, const char *name, const char *json);
struct tv_tiny_tensor *tv_tiny_find(struct tv_tiny_model *tiny, const char *name);
void tv_tiny_remove(struct tv_tiny_model *tiny, const char *name);
/* A new random tensor; cols 0 = a vector of `rows`. */
struct tv_tiny_tensor *tv_tiny_add(struct tv_tiny_model *tiny, const char *name, int64_t rows,
                                   int64_t cols);
/* Write config.json, the shards and the index into dir, replacing what was there. */
void tv_tiny_write(const struct tv_tiny_model *tiny, const char *dir);

/* Write dir/name with these bytes. */
void tv_tiny_file(const char *dir, const char *name, const void *data, size_t bytes);
/* Write dir/name, a safetensors file of one f32 matrix fc.weight whose values are 1/8, 2/8 .. 16/8,
 * 1/8 .. */
void tv_tiny_projection(const char *dir, const char *name, int32_t rows, int32_t cols);

#endif
