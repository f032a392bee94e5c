/*
 * checkpoint.h - a Hugging Face folder as one table of tensors, whatever files they lie in.
 */
#ifndef TV_MODEL_CHECKPOINT_H
#define TV_MODEL_CHECKPOINT_H

#include "model/model.h"
#include "model/safetensors.h"

struct tv_checkpoint_entry {
    const struct tv_safetensors *file;
    const struct tv_safetensors_tensor *tensor;
    int served; /* the model took it */
};

struct tv_checkpoint {
    int folder_fd;
    struct tv_json *config; /* config.json, an object */
    struct tv_json *index;  /* model.safetensors.index.json, or NULL */
    struct tv_safetensors *files;
    size_t file_count;
    struct tv_checkpoint_entry *entries; /* [entry_count], sorted by name */
    size_t entry_count;
    /* Without files: tensors as the model asks for them, their values a function of the seed. */
    int synthetic;
    uint64_t seed;
    struct tv_safetensors_tensor *invented; /* [entry_count], names and extents */
    size_t invented_capacity;
};

/* Open the folder: config.json, and either model.safetensors or the index with every shard it
 * names. -EBADMSG with *ret_error; -ENOMEM; -EIO. */
int tv_checkpoint_open(const char *dir, struct tv_checkpoint *ret_checkpoint,
                       struct tv_model_error *ret_error);
/* Open config.json alone; -EBADMSG, -ENOMEM, -EIO. */
int tv_checkpoint_invent(const char *dir, uint64_t seed, struct tv_checkpoint *ret_checkpoint,
                         struct tv_model_error *ret_error);
/* One more tensor of a checkpoint without files, a vector when rows is 0; entries are for
 * tv_checkpoint_invented. *ret_number: how many came before. -ENOMEM. */
int tv_checkpoint_invent_tensor(struct tv_checkpoint *checkpoint, const char *name,
                                enum tv_dtype dtype, int32_t rows, int32_t cols,
                                uint32_t *ret_number);
/* Every tensor has been asked for: make the table of them. -ENOMEM. */
int tv_checkpoint_invented(struct tv_checkpoint *checkpoint);
void tv_checkpoint_finish(struct tv_checkpoint *checkpoint);
/* NULL when there is none of that name. */
struct tv_checkpoint_entry *tv_checkpoint_find(const struct tv_checkpoint *checkpoint,
                                               const char *name);
/* Whole file folder/name: *ret_data malloc'd, the caller's. -ENOENT; -EFBIG; -ENOMEM; -EIO. */
int tv_checkpoint_file_read(int folder_fd, const char *name, size_t bytes_max, char **ret_data,
                            size_t *ret_bytes);

#endif
