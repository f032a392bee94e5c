/*
 * faults.h - makes the n-th allocation, thread, file or device call fail, and counts what is left.
 *
 * The linker puts these functions in front of libc's (--wrap, see meson.build); a device's table
 * gets them by fault_device_wrap. Refuses nothing on its own: without fault_arm every call works.
 * Any thread may meet the failing call; arming and asking belong to the test's own thread.
 */
#ifndef TV_TESTS_FAULT_FAULTS_H
#define TV_TESTS_FAULT_FAULTS_H

#include <stdint.h>

struct tv_kernels;

enum fault_kind {
    FAULT_MEMORY = 1, /* malloc, calloc, realloc, aligned_alloc, strdup, strndup: NULL */
    FAULT_THREAD = 2, /* pthread_create: EAGAIN */
    FAULT_FILE = 4,   /* open, openat, fstat, pread, read, opendir, rename, write, fallocate: EIO */
    FAULT_RANDOM = 8, /* getrandom: EIO */
    FAULT_CLOCK = 16, /* pthread_condattr_setclock: EINVAL; the clocks themselves cannot fail */
    FAULT_DEVICE = 32, /* alloc of a wrapped table: NULL; its other operations: -EIO */
    FAULT_AGAIN = 64,  /* pread: EINTR once, to be tried again */
    FAULT_SHORT = 128, /* pread: one byte less than there is */
    FAULT_END = 256,   /* pread: the file ends here */
    FAULT_KILL = 512,  /* write: half of it, and the process ends */
};

/* The n-th call of these kinds from now on fails, once. */
void fault_arm(unsigned kinds, int n);
/* No call fails any more. 1: the n-th came and failed; 0: there were fewer. */
int fault_disarm(void);

/* Blocks from the wrapped allocators that are not freed, and descriptors that are not closed. */
int64_t fault_blocks(void);
int64_t fault_descriptors(void);
/* Wait until there are `blocks`: what another thread still frees. More of them fail the test. */
void fault_settle(int64_t blocks);

/* 1, or with a TV_TEST_SCALE below 1 its inverse: how far a very long sweep may step. */
int fault_stride(void);

/* Put the faults in front of a backend's operations; one table at a time. */
void fault_device_wrap(struct tv_kernels *kernels);

#endif
