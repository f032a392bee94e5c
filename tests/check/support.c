/*
 * support.c - deterministic numbers, device buffers and comparison for checkkern.
 */
#include <errno.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#include "tests/check/check.h"

uint64_t check_random(struct check *c)
{
    /* splitmix64 */
    uint64_t z = (c->rng += 0x9E3779B97F4A7C15u);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
}

int32_t check_range(struct check *c, int32_t low, int32_t high)
{
    return low + (int32_t)(check_random(c) % ((uint64_t)(high - low) + 1));
}

float check_normal(struct check *c)
{
    double u = ((double)(check_random(c) >> 11) + 0.5) * 0x1p-53;
    double v = ((double)(check_random(c) >> 11) + 0.5) * 0x1p-53;
    return (float)(sqrt(-2.0 * log(u)) * cos(6.283185307179586 * v));
}

static void die(const char *what)
{
    fprintf(stderr, "checkkern: %s\n", what);
    exit(2);
}

void *check_host(struct check *c, size_t bytes)
{
    void *memory = calloc(1, bytes ? bytes : 1);
    if (!memory || c->host_count == CHECK_BUFFERS_MAX) {
        die("out of host buffers");
    }
    c->host[c->host_count++] = memory;
    return memory;
}

float *check_normals(struct check *c, int64_t count, float scale)
{
    float *values = check_host(c, (size_t)count * sizeof *values);
    for (int64_t i = 0; i < count; i++) {
        values[i] = check_normal(c) * scale;
    }
    return values;
}

/* Round to nearest even for the normal range the checks use. */
static uint16_t f32_to_f16(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    uint16_t sign = (uint16_t)((bits >> 16) & 0x8000u);
    int32_t exponent = (int32_t)((bits >> 23) & 0xffu) - 112;
    if (exponent <= 0) {
        /* subnormal: a multiple of 2^-24 */
        return (uint16_t)(sign | (uint16_t)lrintf(fabsf(value) * 0x1p24f));
    }
    uint32_t mantissa = bits & 0x7fffffu;
    uint32_t half = (uint32_t)exponent << 10 | mantissa >> 13;
    uint32_t rest = mantissa & 0x1fffu;
    half += rest > 0x1000u || (rest == 0x1000u && (half & 1u));
    return (uint16_t)(sign | half);
}

void *check_weights(struct check *c, enum tv_dtype dtype, const float *values, int64_t count)
{
    void *data = check_host(c, (size_t)count * tv_dtype_size(dtype));
    for (int64_t i = 0; i < count; i++) {
        if (dtype == TV_F32) {
            ((float *)data)[i] = values[i];
        } else if (dtype == TV_BF16) {
            ((uint16_t *)data)[i] = tv_f32_to_bf16(values[i]);
        } else {
            ((uint16_t *)data)[i] = f32_to_f16(values[i]);
        }
    }
    return data;
}

static void *device_alloc(struct check *c, size_t bytes)
{
    void *device = c->k->alloc(c->k, bytes ? bytes : 1);
    if (!device || c->buffer_count == CHECK_BUFFERS_MAX) {
        die("out of device buffers");
    }
    c->buffers[c->buffer_count++] = device;
    return device;
}

void *check_upload(struct check *c, const void *host, size_t bytes)
{
    void *device = device_alloc(c, bytes);
    if (c->k->upload(c->k, device, host, bytes) != 0) {
        die("upload failed");
    }
    return device;
}

void *check_poisoned(struct check *c, size_t bytes)
{
    void *device = device_alloc(c, bytes);
    if (c->k->fill(c->k, device, 0xff, bytes) != 0) {
        die("fill failed");
    }
    return device;
}

void check_download(struct check *c, void *host, const void *device, size_t bytes)
{
    if (c->k->download(c->k, host, device, bytes) != 0 || c->k->sync(c->k) != 0) {
        die("download failed");
    }
}

void check_release(struct check *c)
{
    (void)c->k->sync(c->k);
    while (c->buffer_count > 0) {
        c->k->free(c->k, c->buffers[--c->buffer_count]);
    }
    while (c->host_count > 0) {
        free(c->host[--c->host_count]);
    }
}

void check_fail(struct check *c, const char *format, ...)
{
    va_list list;
    c->failures++;
    if (c->failures > 40) {
        return; /* the first ones say enough */
    }
    fprintf(stdout, "FAIL %s: ", c->name);
    va_start(list, format);
    vfprintf(stdout, format, list);
    va_end(list);
    fprintf(stdout, " (seed %llu)\n", (unsigned long long)c->seed);
}

int check_ok(struct check *c, int rc, const char *what)
{
    if (rc != 0) {
        check_fail(c, "%s returned %d", what, rc);
        return 0;
    }
    return 1;
}

int check_has_products(struct check *c)
{
    struct tv_linear a = {.rows = 1, .n = 1, .k = 8, .groups = 1, .w_dtype = TV_BF16};
    a.x_row_stride = 8;
    a.y_row_stride = 1;
    a.x = check_upload(c, check_normals(c, 8, 1.0f), 8 * sizeof(float));
    a.w = check_upload(c, check_weights(c, TV_BF16, check_normals(c, 8, 1.0f), 8), 16);
    a.y = check_poisoned(c, sizeof(float));
    a.products = TV_PRODUCTS_BF16;
    int rc = c->k->linear(c->k, &a);
    check_release(c);
    return rc == -ENOTSUP ? 0 : check_ok(c, rc, "linear with bf16 products");
}

void check_near(struct check *c, const float *value, const float *expected, int64_t count,
                double absolute, double relative, const char *what)
{
    double worst = -1.0;
    int64_t worst_index = 0;
    for (int64_t i = 0; i < count; i++) {
        double bound = absolute + relative * fabs((double)expected[i]);
        double margin = fabs((double)value[i] - (double)expected[i]) / bound;
        if (value[i] == expected[i]) {
            margin = 0.0; /* equal infinities too */
        }
        if (!(margin <= worst)) {
            worst = margin;
            worst_index = i;
            if (isnan(margin)) {
                break;
            }
        }
    }
    if (!(worst <= c->margin)) {
        c->margin = worst;
    }
    if (!(worst <= 1.0) && count > 0) {
        check_fail(c, "%s[%lld] = %.9g, expected %.9g, margin %.3g", what, (long long)worst_index,
                   (double)value[worst_index], (double)expected[worst_index], worst);
    }
}

void check_same(struct check *c, const void *a, const void *b, size_t bytes, const char *what)
{
    if (memcmp(a, b, bytes) != 0) {
        size_t at = 0;
        while (((const char *)a)[at] == ((const char *)b)[at]) {
            at++;
        }
        check_fail(c, "%s: bits differ at byte %zu of %zu", what, at, bytes);
    }
}

double check_rel_l2(struct check *c, const float *value, const float *expected, int64_t count,
                    double bound, const char *what)
{
    double error = 0.0;
    double norm = 0.0;
    for (int64_t i = 0; i < count; i++) {
        double difference = (double)value[i] - (double)expected[i];
        error += difference * difference;
        norm += (double)expected[i] * (double)expected[i];
    }
    double rel = norm > 0.0 ? sqrt(error / norm) : sqrt(error);
    if (!(rel / bound <= c->margin)) {
        c->margin = rel / bound;
    }
    if (!(rel <= bound)) {
        check_fail(c, "%s: rel_l2 %.3g above %.3g", what, rel, bound);
    }
    return rel;
}
