/*
 * gpu_watch.h - what a GPU's driver says of its health: memory errors, rows that cannot be
 * remapped, Xid events.
 *
 * By NVML, opened at run time. What was there before the watch began is reported, not judged.
 */
#ifndef TV_GPU_WATCH_H
#define TV_GPU_WATCH_H

#include <stddef.h>

#include "sched/sched.h"

struct tv_gpu_watch;

/* 0 or a negative errno with why there is none, in words. */
int tv_gpu_watch_open(struct tv_gpu_watch **ret_watch, char *reason, size_t bytes);
/* Microseconds that the driver may take; its thread is the only one that looks. */
void tv_gpu_watch_look(struct tv_gpu_watch *watch, struct tv_sched_gpu *ret_gpu);
void tv_gpu_watch_close(struct tv_gpu_watch *watch);

#endif
