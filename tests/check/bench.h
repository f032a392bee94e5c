/*
 * bench.h - how checkkern --bench takes and prints a time; the parts of it.
 */
#ifndef TV_TESTS_CHECK_BENCH_H
#define TV_TESTS_CHECK_BENCH_H

#include "tests/check/check.h"

/* What a time is compared with; zeroes where nothing is known. */
struct bench {
    struct check *c;
    const char *peers;                   /* folder, or NULL */
    void *stream;                        /* device: what launches are captured on, else NULL */
    double ceiling_flops, ceiling_bytes; /* measured, per second */
};

typedef int bench_fn(struct check *c, const void *arg);

/* Seconds of one call: on a device the median of graph replays, in host memory the best of several
 * repetitions, each long enough for the clock. Negative: it failed, and was reported. */
double bench_seconds(const struct bench *b, const char *name, bench_fn *fn, const void *arg);
/* Prints name, time, rates and their share of the ceilings, without the end of the line. */
void bench_row(const struct bench *b, const char *name, double seconds, double flop, double bytes);

/* Verify attention at the points of the measurement plan, beside the peers that are there. */
void bench_attn_points(const struct bench *b);

#endif
