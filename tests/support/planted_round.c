/*
 * planted_round.c - treeverifyd-planted: faults of single launches, in any backend's memory, while
 * the file of TV_PLANT_FILE exists.
 *
 * "output": one element of what attention gave; "page": one bit of a KV row, and "mask-bit": one
 * node's parent, as attention reads them (what is stored stays right, as with a fault on the way).
 * "fault": a kernel reads where no memory is, which loses a real device; "hiccup": a call that the
 * runtime refuses, after which all is as before. A recording runs as it was captured, without them.
 */
#include <errno.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "plant.h"

#define ROW_VALUES 64 /* of a row, in which the bit is */

enum fault { FAULT_OUTPUT, FAULT_PAGE, FAULT_MASK, FAULT_KERNEL, FAULT_HICCUP, FAULT_COUNT };

static const char *const names[FAULT_COUNT] = {"output", "page", "mask-bit", "fault", "hiccup"};

static struct tv_kernels real; /* the table as it was */
static enum fault planted;
static int recording;
static int32_t *parents_device; /* [TV_TREE_NODES_MAX] */

static int is_on(void)
{
    const char *file = getenv("TV_PLANT_FILE");
    return !recording && file != NULL && access(file, F_OK) == 0;
}

static int fetch(struct tv_kernels *k, void *host, const void *device, size_t bytes)
{
    int rc = real.download(k, host, device, bytes);
    return rc == 0 ? real.sync(k) : rc;
}

/* The first element is off by one. */
static int output_spoil(struct tv_kernels *k, const struct tv_verify_attn *args)
{
    float value = 0.0f; /* the model's attention is f32, whatever its rows are */
    if (args->out_dtype != TV_F32) {
        return -ENOTSUP;
    }
    int rc = fetch(k, &value, args->out, sizeof value);
    value += 1.0f;
    return rc == 0 ? real.upload(k, args->out, &value, sizeof value) : rc;
}

/* The largest of a row's first values. */
static size_t largest_at(const uint16_t *row, size_t step)
{
    size_t best = 0;
    for (size_t i = 0; i < ROW_VALUES; i++) { /* the upper halves order f32 as they do bf16 */
        size_t at = i * step + step - 1;
        best = (row[at] & 0x7fffu) > (row[best * step + step - 1] & 0x7fffu) ? i : best;
    }
    return best * step + step - 1;
}

/* The launch reads its first KV row with one sign turned over. */
static int page_spoil(struct tv_kernels *k, const struct tv_verify_attn *args)
{
    int32_t page = 0;
    size_t step = args->dtype == TV_F32 ? 2 : 1; /* in halves of a word */
    uint16_t row[2 * ROW_VALUES];
    size_t bytes = step * ROW_VALUES * sizeof row[0];
    int rc = fetch(k, &page, args->page_table, sizeof page);
    size_t row_bytes = (size_t)(args->latent_dim + args->rope_dim) * step * sizeof row[0];
    char *to =
        (char *)(uintptr_t)args->kv_pages + (size_t)page * (size_t)args->page_size * row_bytes;
    rc = rc == 0 ? fetch(k, row, to, bytes) : rc;
    if (rc != 0) {
        return rc;
    }
    size_t at = largest_at(row, step);
    row[at] ^= 0x8000u;
    rc = real.upload(k, to, row, bytes);
    rc = rc == 0 ? real.verify_attn(k, args) : rc;
    row[at] ^= 0x8000u;
    return rc == 0 ? real.upload(k, to, row, bytes) : rc;
}

/* The last node sees one row more: that of the node before it, which is not its ancestor. */
static int mask_spoil(struct tv_kernels *k, const struct tv_verify_attn *args)
{
    int32_t parents[TV_TREE_NODES_MAX];
    struct tv_verify_attn wrong = *args;
    size_t bytes = (size_t)args->q_len * sizeof parents[0];
    int rc = fetch(k, parents, args->parents, bytes);
    parents[args->q_len - 1] = args->q_len - 2;
    rc = rc == 0 ? real.upload(k, parents_device, parents, bytes) : rc;
    wrong.parents = parents_device;
    return rc == 0 ? real.verify_attn(k, &wrong) : rc;
}

static int planted_verify_attn(struct tv_kernels *k, const struct tv_verify_attn *args)
{
    if (is_on() && planted == FAULT_PAGE) {
        return page_spoil(k, args);
    }
    if (is_on() && planted == FAULT_MASK && args->batch == 1 && args->q_len > 1) {
        return mask_spoil(k, args);
    }
    int rc = real.verify_attn(k, args);
    return rc == 0 && is_on() && planted == FAULT_OUTPUT ? output_spoil(k, args) : rc;
}

/* Every pass begins with an upload. */
static int planted_upload(struct tv_kernels *k, void *device, const void *host, size_t bytes)
{
    float *nowhere = (float *)(uintptr_t)4096;
    int rc = 0;
    if (is_on() && planted == FAULT_KERNEL) {
        rc = real.swiglu(k, 1, 1024, nowhere, nowhere);
    } else if (is_on() && planted == FAULT_HICCUP) {
        rc = real.copy(k, device, 1, host, 1, 2, 1); /* a stride below the row */
    }
    return rc == 0 ? real.upload(k, device, host, bytes) : rc;
}

static int planted_record_begin(struct tv_kernels *k)
{
    recording = 1;
    return real.record_begin(k);
}

static int planted_record_end(struct tv_kernels *k, void **ret_recording)
{
    recording = 0;
    return real.record_end(k, ret_recording);
}

int tv_plant_round(struct tv_kernels *kernels, const char *name)
{
    for (int i = 0; i < FAULT_COUNT; i++) {
        if (strcmp(names[i], name) == 0) {
            planted = (enum fault)i;
            real = *kernels;
            parents_device =
                kernels->alloc(kernels, TV_TREE_NODES_MAX * sizeof *parents_device); /* for good */
            kernels->verify_attn = planted_verify_attn;
            kernels->upload = planted_upload;
            if (kernels->record_begin != NULL) {
                kernels->record_begin = planted_record_begin;
                kernels->record_end = planted_record_end;
            }
            return parents_device == NULL ? -ENOMEM : 0;
        }
    }
    return -EINVAL;
}
