/*
 * device.h - what checkkern --bench needs of a CUDA device beside the operation table: a stream
 * that can be captured, the time of a launch inside a graph, and what the device can do at most.
 *
 * Only in builds with the CUDA library (TV_CHECK_DEVICE). Plain C; handles are those of the
 * runtime. Also a driver that refuses, which no argument makes it do.
 */
#ifndef TV_TESTS_CHECK_DEVICE_H
#define TV_TESTS_CHECK_DEVICE_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Rates that nothing computed on this device exceeds, measured. */
struct device_ceilings {
    double flops; /* bf16 mma.sync with f32 sums from registers alone, FLOP/s */
    double bytes; /* a copy inside device memory, bytes read and written, per second */
};

/* A launch on the stream that it was prepared for: 0 or a negative errno. */
typedef int device_launch(void *what);

/* All return 0 or -EIO. The stream is the caller's to destroy. */
int device_stream_create(void **ret_stream);
void device_stream_destroy(void *stream);
int device_measure_ceilings(void *stream, struct device_ceilings *ret_ceilings);
/* Median over replays of a graph of `calls` launches behind each other, divided by their number. */
int device_time(void *stream, device_launch *launch, void *what, int calls, int replays,
                double *ret_seconds);

/* How many devices there are, and which one the calls above are for. */
int device_count(void);
void device_use(int device);

/* Of the maps that a table of the cuda backend has the driver make for copies, those for kernels
 * that a portable one can stand in for are refused from here on; and how many that were so far. */
struct tv_kernels;
void device_maps_refuse(struct tv_kernels *k);
uint64_t device_maps_refused(void);

#ifdef __cplusplus
}
#endif

#endif
