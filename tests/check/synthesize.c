/*
 * synthesize.c - checks of synthetic weights against the reference, bit for bit; the reference
 * itself is pinned by tests/unit/test_kernels_synthesize.c.
 */
#include "tests/check/check.h"

static void one_synthesize(struct check *c, enum tv_dtype dtype, int32_t transposed)
{
    struct tv_synthesize a = {.groups = check_range(c, 1, 5),
                              .rows = check_range(c, 1, 70),
                              .cols = check_range(c, 1, 700),
                              .transposed = transposed,
                              .dtype = dtype,
                              .scale = check_normal(c),
                              .offset = check_range(c, 0, 1) ? 1.0f : 0.0f,
                              .seed = check_random(c),
                              .tensor = (uint32_t)check_random(c)};
    struct tv_synthesize b = a;
    size_t bytes = (size_t)a.groups * (size_t)a.rows * (size_t)a.cols * tv_dtype_size(dtype);
    void *got = check_host(c, bytes);
    b.to = check_host(c, bytes);
    a.to = check_poisoned(c, bytes);
    if (check_ok(c, c->k->synthesize(c->k, &a), "synthesize")) {
        (void)c->ref->synthesize(c->ref, &b);
        check_download(c, got, a.to, bytes);
        check_same(c, got, b.to, bytes, "synthesize");
    }
    check_release(c);
}

void check_synthesize(struct check *c)
{
    for (int32_t n = 0; n < 8 * c->scale; n++) {
        one_synthesize(c, n % 2 ? TV_F32 : TV_BF16, n / 2 % 2);
    }
}
