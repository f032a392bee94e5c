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
};

/* Open the folder: config.json, and either model.safetensors or the index with every shard it
 * names. -EBADMSG with *ret_error; -ENOMEM; -EIO. */
int tv_checkpoint_open(const char *dir, struct tv_checkpoint *ret_checkpoint,
                       struct tv_model_error *ret_error);
void tv_checkpoint_finish(struct tv_checkpoint *checkpoint);
/* NULL when there is none of that name. */
struct tv_checkpoint_entry *tv_checkpoint_find(const struct tv_checkpoint *checkpoint,
                                               const char *name);
/* Whole file folder/name: *ret_data malloc'd, the caller's. -ENOENT; -EFBIG; -ENOMEM; -EIO. */
int tv_checkpoint_file_read(int folder_fd, const char *name, size_t bytes_max, char **ret_data,
                            size_t *ret_bytes);

#endif
