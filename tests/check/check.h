/*
 * check.h - what the parts of checkkern share: deterministic numbers, device buffers, comparison.
 *
 * Owns nothing of the kernels. Every check builds host inputs, runs the backend and the reference
 * on copies of them and reports the worst margin (error divided by its bound).
 */
#ifndef TV_TESTS_CHECK_H
#define TV_TESTS_CHECK_H

#include "kernels/kernels.h"

enum { CHECK_BUFFERS_MAX = 128 };

/* One run: the backend under test, the oracle, and what was found so far. */
struct check {
    struct tv_kernels *k;
    struct tv_kernels *ref;
    struct tv_kernels *other; /* cpu: the same with another thread count; else NULL */
    uint64_t taken;           /* allocations of k when it was new */
    uint64_t seed;
    uint64_t rng;
    int32_t scale;    /* size of the loops: 1 is the default of the test suite */
    const char *name; /* of the running check */
    double margin;    /* worst of the running check */
    int32_t failures;
    int32_t buffer_count;
    void *buffers[CHECK_BUFFERS_MAX]; /* device buffers of the running case */
    void *host[CHECK_BUFFERS_MAX];    /* host buffers of the running case */
    int32_t host_count;
};

/* Random numbers; the sequence depends on the seed alone. */
uint64_t check_random(struct check *c);
int32_t check_range(struct check *c, int32_t low, int32_t high); /* both ends included */
float check_normal(struct check *c);

/* Zeroed host memory that lives until check_release. */
void *check_host(struct check *c, size_t bytes);
float *check_normals(struct check *c, int64_t count, float scale);
/* `count` values as the given dtype, rounded once. */
void *check_weights(struct check *c, enum tv_dtype dtype, const float *values, int64_t count);
/* Device copy of host data that lives until check_release. */
void *check_upload(struct check *c, const void *host, size_t bytes);
/* Device memory full of NaN. */
void *check_poisoned(struct check *c, size_t bytes);
void check_download(struct check *c, void *host, const void *device, size_t bytes);
/* Free what the case allocated. */
void check_release(struct check *c);

/* Count a failure with a formatted reason. */
void check_fail(struct check *c, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* An operation must have returned 0; -ENOTSUP and NULL slots are handled by the caller. */
int check_ok(struct check *c, int rc, const char *what);
/* |value - expected| <= absolute + relative * |expected| for every element. */
void check_near(struct check *c, const float *value, const float *expected, int64_t count,
                double absolute, double relative, const char *what);
void check_same(struct check *c, const void *a, const void *b, size_t bytes, const char *what);
/* rel_l2 = |value - expected| / |expected| <= bound; NaN fails. */
double check_rel_l2(struct check *c, const float *value, const float *expected, int64_t count,
                    double bound, const char *what);

/* Whether the backend has TV_PRODUCTS_BF16; one that has not must say so. */
int check_has_products(struct check *c);

/* The parts. */
void check_dense(struct check *c); /* embed, norms, linear, rope, latent, activation, moves */
void check_experts(struct check *c);
void check_verify(struct check *c); /* both attention slots */
void check_prefill(struct check *c);
void check_draw(struct check *c);
void check_synthesize(struct check *c);
void check_copy(struct check *c);    /* and timer, side */
void check_record(struct check *c);  /* recordings, and what a device says of itself */
void check_fused(struct check *c);   /* slots that stand for several operations */
void check_refused(struct check *c); /* kinds that no slot knows */
/* peers: a folder of libraries as peer.h describes them, or NULL. */
void check_bench(struct check *c, const char *peers);

#endif
