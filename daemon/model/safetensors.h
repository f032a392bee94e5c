/*
 * safetensors.h - one safetensors file: its header, checked in full, and bounded reads of its data.
 *
 * Accepts what the format says and nothing more: the tensors cover the data area without a gap or
 * an overlap, and every length is the one its shape and type ask for.
 */
#ifndef TV_MODEL_SAFETENSORS_H
#define TV_MODEL_SAFETENSORS_H

#include <stddef.h>
#include <stdint.h>

#include "model/model.h"
#include "proto/json_read.h"

#define TV_SAFETENSORS_RANK_MAX         8
#define TV_SAFETENSORS_HEADER_BYTES_MAX 100000000u

/* What is wrong with a file; each has a sentence of its own. */
enum tv_safetensors_fault {
    TV_SAFETENSORS_OK,
    TV_SAFETENSORS_UNREADABLE,     /* cannot be opened or read */
    TV_SAFETENSORS_SHORT,          /* no room for the header's length */
    TV_SAFETENSORS_HEADER_EMPTY,   /* header length 0 */
    TV_SAFETENSORS_HEADER_LARGE,   /* over the format's limit */
    TV_SAFETENSORS_HEADER_CUT,     /* header runs past the end of the file */
    TV_SAFETENSORS_JSON,           /* not strict JSON */
    TV_SAFETENSORS_NOT_OBJECT,     /* JSON, but not an object */
    TV_SAFETENSORS_DUPLICATE,      /* two members of one name */
    TV_SAFETENSORS_METADATA,       /* __metadata__ is not an object of strings */
    TV_SAFETENSORS_ENTRY,          /* an entry is not {dtype, shape, data_offsets} */
    TV_SAFETENSORS_DTYPE,          /* unknown type name */
    TV_SAFETENSORS_SHAPE,          /* not an array of exact integers >= 0, or too many of them */
    TV_SAFETENSORS_SHAPE_OVERFLOW, /* elements or bytes do not fit 63 bits */
    TV_SAFETENSORS_OFFSETS,        /* not two exact integers >= 0 */
    TV_SAFETENSORS_OFFSETS_ORDER,  /* begin > end */
    TV_SAFETENSORS_OFFSETS_END,    /* end past the file */
    TV_SAFETENSORS_SIZE,           /* bytes are not shape * type */
    TV_SAFETENSORS_OVERLAP,        /* two tensors share bytes */
    TV_SAFETENSORS_GAP,            /* bytes that belong to no tensor */
    TV_SAFETENSORS_TAIL,           /* bytes behind the last tensor */
};

struct tv_safetensors_tensor {
    const char *name;  /* the document's */
    const char *dtype; /* static text, "BF16" */
    int32_t bits;      /* of one element */
    int32_t rank;
    int64_t shape[TV_SAFETENSORS_RANK_MAX];
    int64_t begin, bytes; /* in the data area */
};

struct tv_safetensors {
    char *name; /* file name, for messages */
    int fd;
    int64_t file_bytes, data_begin;
    _Atomic int64_t *bytes_read; /* what has been read of tensors is added; or NULL */
    struct tv_json *header;
    struct tv_safetensors_tensor *tensors; /* [count], in order of their bytes */
    size_t count;
};

/* Open folder_fd/name and check its header. -EBADMSG with *ret_fault and *ret_error; -ENOMEM. */
int tv_safetensors_open(int folder_fd, const char *name, struct tv_safetensors *ret_file,
                        enum tv_safetensors_fault *ret_fault, struct tv_model_error *ret_error);
void tv_safetensors_finish(struct tv_safetensors *file);
/* Read bytes [offset, offset + bytes) of a tensor. 0; -EBADMSG with *ret_error: the file became
 * shorter; -EIO. Any thread. */
int tv_safetensors_read(const struct tv_safetensors *file,
                        const struct tv_safetensors_tensor *tensor, int64_t offset, void *buffer,
                        size_t bytes, struct tv_model_error *ret_error);

#endif
