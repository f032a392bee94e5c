/*
 * device_memory.h - where the memory of a device goes: how many pages it has room for, and the
 * start's report.
 *
 * For devices with memory of their own; the host's is not accounted for. Arithmetic and text only.
 */
#ifndef TV_DEVICE_MEMORY_H
#define TV_DEVICE_MEMORY_H

#include <stddef.h>
#include <stdint.h>

#include "kernels/kernels.h"

/* Bytes free on the device as a start goes on, and what is known of the parts. */
struct tv_device_memory {
    size_t total;
    size_t begun;          /* before the model */
    size_t loaded;         /* weights and scratch are taken */
    size_t pooled;         /* pages too */
    size_t ready;          /* passes are recorded: nothing is taken any more */
    size_t weights, pages; /* bytes of these */
};

enum tv_device_part {
    TV_DEVICE_OTHERS, /* contexts and other processes */
    TV_DEVICE_WEIGHTS,
    TV_DEVICE_SCRATCH,
    TV_DEVICE_PAGES,
    TV_DEVICE_GRAPHS,
    TV_DEVICE_RESERVE, /* what stays free */
    TV_DEVICE_PARTS
};

/* The parts; a difference that others have turned round counts as 0. */
void tv_device_memory_parts(const struct tv_device_memory *memory,
                            size_t ret_parts[TV_DEVICE_PARTS]);

/* How pages share what is free. */
struct tv_device_room {
    size_t free_bytes;
    size_t reserve_bytes; /* stays free */
    size_t graphs_bytes;  /* will be taken after the pages */
    size_t page_bytes;    /* of one page in all layers */
    int32_t page_size;    /* rows: no pool has more than 2^31 - 1 */
    double share;         /* of the rest, in (0, 1] */
};
/* Pages that fit; 0: not one. */
int64_t tv_device_memory_pages(const struct tv_device_room *room);

/* What recorded passes may take, by the most that a launch of one has been seen to need. */
size_t tv_device_memory_graphs(int64_t recordings, int32_t layers);

/* "NVIDIA H200 sm_90, compute capability 9.0, ..."; cut at `bytes`. */
void tv_device_memory_describe(const struct tv_kernels *kernels, char *ret_text, size_t bytes);
/* The table as one line: "of 143771 MiB: weights 30590, ...". */
void tv_device_memory_text(const struct tv_device_memory *memory, char *ret_text, size_t bytes);

#endif
