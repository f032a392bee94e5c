/*
 * dense.c - checks of the operations that work row by row: embedding, norm, linear, rotation,
 * latent write, activation, moves.
 */
#include <errno.h>
#include <math.h>
#include <stdio.h>

#include "tests/check/check.h"

static const enum tv_dtype dtypes[] = {TV_F32, TV_BF16, TV_F16};

static void one_embed(struct check *c, enum tv_dtype dtype)
{
    int32_t rows = check_range(c, 1, 9), hidden = check_range(c, 1, 70), vocab = 50;
    float *values = check_normals(c, (int64_t)vocab * hidden, 1.0f);
    void *table = check_weights(c, dtype, values, (int64_t)vocab * hidden);
    int32_t *ids = check_host(c, (size_t)rows * sizeof *ids);
    size_t bytes = (size_t)rows * (size_t)hidden * sizeof(float);
    float *y = check_host(c, bytes), *expected = check_host(c, bytes);
    for (int32_t r = 0; r < rows; r++) {
        ids[r] = check_range(c, 0, vocab - 1);
    }
    void *d_table = check_upload(c, table, (size_t)vocab * (size_t)hidden * tv_dtype_size(dtype));
    void *d_y = check_poisoned(c, bytes);
    void *d_ids = check_upload(c, ids, (size_t)rows * sizeof *ids);
    if (check_ok(c, c->k->embed(c->k, rows, hidden, vocab, d_table, dtype, d_ids, d_y), "embed")) {
        (void)c->ref->embed(c->ref, rows, hidden, vocab, table, dtype, ids, expected);
        check_download(c, y, d_y, bytes);
        check_same(c, y, expected, bytes, "embed");
    }
    /* Ids outside the table must not be read (B43); only host memory can be checked per call. */
    if (c->k->host_memory) {
        ids[0] = vocab;
        if (c->k->embed(c->k, rows, hidden, vocab, table, dtype, ids, y) != -EINVAL) {
            check_fail(c, "embed took id %d of %d", ids[0], vocab);
        }
    }
    check_release(c);
}

static void one_rmsnorm(struct check *c, int32_t dim, float scale)
{
    int32_t rows = check_range(c, 1, 40);
    int64_t x_stride = dim + check_range(c, 0, 3), y_stride = dim + check_range(c, 0, 3);
    /* Small rows, so that epsilon matters (B32). */
    float *x = check_normals(c, rows * x_stride, scale);
    float *weight = check_normals(c, dim, 1.0f);
    size_t bytes = (size_t)(rows * y_stride) * sizeof(float);
    float *y = check_host(c, bytes), *expected = check_host(c, bytes);
    void *d_y = check_upload(c, y, bytes);
    void *d_x = check_upload(c, x, (size_t)(rows * x_stride) * sizeof(float));
    void *d_w = check_upload(c, weight, (size_t)dim * sizeof(float));
    int rc = c->k->rmsnorm(c->k, rows, dim, d_x, x_stride, d_w, 1e-5f, d_y, y_stride);
    if (check_ok(c, rc, "rmsnorm")) {
        (void)c->ref->rmsnorm(c->ref, rows, dim, x, x_stride, weight, 1e-5f, expected, y_stride);
        check_download(c, y, d_y, bytes);
        check_near(c, y, expected, rows * y_stride, 1e-7, 2e-6, "rmsnorm");
    }
    check_release(c);
}

static void one_linear(struct check *c, enum tv_dtype dtype, int32_t rows, int32_t n, int32_t k)
{
    struct tv_linear a = {.rows = rows, .n = n, .k = k, .w_dtype = dtype};
    a.groups = check_range(c, 1, 3);
    a.accumulate = check_range(c, 0, 1);
    a.x_row_stride = k + check_range(c, 0, 5);
    a.x_group_stride = rows * a.x_row_stride + check_range(c, 0, 5);
    a.w_group_stride = (int64_t)n * k + 8 * check_range(c, 0, 2);
    a.y_row_stride = n + check_range(c, 0, 5);
    a.y_group_stride = rows * a.y_row_stride + check_range(c, 0, 5);
    int64_t x_count = a.groups * a.x_group_stride, w_count = a.groups * a.w_group_stride;
    int64_t y_count = a.groups * a.y_group_stride;
    float *x = check_normals(c, x_count, 1.0f), *w = check_normals(c, w_count, 1.0f);
    float *y = check_normals(c, y_count, 1.0f);
    void *weights = check_weights(c, dtype, w, w_count);
    float *expected = check_host(c, (size_t)y_count * sizeof(float));
    memcpy(expected, y, (size_t)y_count * sizeof(float));
    struct tv_linear r = a;
    r.x = x, r.w = weights, r.y = expected;
    a.x = check_upload(c, x, (size_t)x_count * sizeof(float));
    a.w = check_upload(c, weights, (size_t)w_count * tv_dtype_size(dtype));
    a.y = check_upload(c, y, (size_t)y_count * sizeof(float));
    if (check_ok(c, c->k->linear(c->k, &a), "linear")) {
        (void)c->ref->linear(c->ref, &r);
        check_download(c, y, a.y, (size_t)y_count * sizeof(float));
        /* k products of unit scale: the forward bound is k roundings, gaps stay untouched */
        check_near(c, y, expected, y_count, 6e-8 * k + 1e-6, 2e-7, "linear");
    }
    check_release(c);
}

/* A row alone and the same row among others give the same bits. */
static void linear_rows_independent(struct check *c, enum tv_dtype dtype, int32_t n, int32_t k)
{
    enum { ROWS = 34 };
    float *x = check_normals(c, (int64_t)ROWS * k, 1.0f);
    float *w = check_normals(c, (int64_t)n * k, 1.0f);
    void *weights = check_weights(c, dtype, w, (int64_t)n * k);
    float *all = check_host(c, (size_t)ROWS * (size_t)n * sizeof(float));
    float *one = check_host(c, (size_t)n * sizeof(float));
    void *d_y = check_poisoned(c, (size_t)ROWS * (size_t)n * sizeof(float));
    float *d_x = check_upload(c, x, (size_t)ROWS * (size_t)k * sizeof(float));
    struct tv_linear a = {.rows = ROWS, .n = n, .k = k, .groups = 1, .w_dtype = dtype};
    a.x_row_stride = k;
    a.y_row_stride = n;
    a.w = check_upload(c, weights, (size_t)n * (size_t)k * tv_dtype_size(dtype));
    a.x = d_x;
    a.y = d_y;
    (void)check_ok(c, c->k->linear(c->k, &a), "linear");
    check_download(c, all, d_y, (size_t)ROWS * (size_t)n * sizeof(float));
    float *again = check_host(c, (size_t)ROWS * (size_t)n * sizeof(float));
    /* poison, so that a row that is not written cannot pass for an equal one */
    (void)c->k->fill(c->k, d_y, 0xff, (size_t)ROWS * (size_t)n * sizeof(float));
    if (c->other && check_ok(c, c->other->linear(c->other, &a), "linear")) {
        check_download(c, again, d_y, (size_t)ROWS * (size_t)n * sizeof(float));
        check_same(c, again, all, (size_t)ROWS * (size_t)n * sizeof(float),
                   "linear with another thread count");
    }
    for (int32_t count = 1; count <= 9; count++) {
        for (int32_t row = 0; row + count <= ROWS; row += 11) {
            a.rows = count;
            a.x = d_x + (int64_t)row * k;
            (void)check_ok(c, c->k->linear(c->k, &a), "linear");
            check_download(c, one, d_y, (size_t)n * sizeof(float));
            check_same(c, one, all + (int64_t)row * n, (size_t)n * sizeof(float),
                       "linear row among others");
        }
    }
    check_release(c);
}

/* Many rows, which other kernels of a device serve than few, have the bits of few. `shape` has
 * rows, n, k, groups and products; backwards: the first group's weights lie behind the others',
 * of which the driver of a device makes no map. */
static void linear_many_rows(struct check *c, const struct tv_linear *shape, int backwards)
{
    enum { FEW = 16 };
    struct tv_linear a = *shape;
    int32_t rows = a.rows, k = a.k;
    a.w_dtype = TV_BF16;
    a.accumulate = check_range(c, 0, 1);
    a.x_group_stride = k + 2 * check_range(c, 0, 3);
    a.x_row_stride = a.groups * a.x_group_stride;
    a.w_group_stride = (int64_t)a.n * k;
    a.y_group_stride = a.n + 2 * check_range(c, 0, 3);
    a.y_row_stride = a.groups * a.y_group_stride;
    int64_t w_count = a.groups * a.w_group_stride, y_count = rows * a.y_row_stride;
    size_t y_bytes = (size_t)y_count * sizeof(float);
    float *x = check_normals(c, rows * a.x_row_stride, 1.0f), *w = check_normals(c, w_count, 1.0f);
    float *y = check_normals(c, y_count, 1.0f), *expected = check_host(c, y_bytes);
    a.x = check_upload(c, x, (size_t)(rows * a.x_row_stride) * sizeof(float));
    a.w = check_upload(c, check_weights(c, TV_BF16, w, w_count), (size_t)w_count * 2);
    if (backwards) {
        a.w = (const uint16_t *)a.w + (a.groups - 1) * a.w_group_stride;
        a.w_group_stride = -a.w_group_stride;
    }
    struct tv_linear few = a;
    a.y = check_upload(c, y, y_bytes);
    few.y = check_upload(c, y, y_bytes);
    (void)check_ok(c, c->k->linear(c->k, &a), "linear");
    for (int32_t row = 0; row < rows; row += FEW) {
        few.rows = rows - row < FEW ? rows - row : FEW;
        (void)check_ok(c, c->k->linear(c->k, &few), "linear");
        few.x += FEW * a.x_row_stride;
        few.y += FEW * a.y_row_stride;
    }
    check_download(c, expected, few.y - (rows + FEW - 1) / FEW * FEW * a.y_row_stride, y_bytes);
    check_download(c, y, a.y, y_bytes);
    check_same(c, y, expected, y_bytes, "linear of many rows");
    check_release(c);
}

/* TV_PRODUCTS_BF16 has the bits of the exact product of rows that were rounded before, and with
 * other weights than bf16 those of the rows as they are; rows alone as among others. */
static void linear_products(struct check *c, enum tv_dtype dtype, int32_t rows, int32_t n,
                            int32_t k)
{
    int64_t x_count = (int64_t)rows * k, w_count = (int64_t)n * k;
    size_t y_bytes = (size_t)rows * (size_t)n * sizeof(float);
    float *x = check_normals(c, x_count, 1.0f), *w = check_normals(c, w_count, 1.0f);
    float *rounded = check_host(c, (size_t)x_count * sizeof(float));
    float *y = check_host(c, y_bytes), *expected = check_host(c, y_bytes);
    for (int64_t i = 0; i < x_count; i++) {
        rounded[i] = dtype == TV_BF16 ? tv_bf16_to_f32(tv_f32_to_bf16(x[i])) : x[i];
    }
    void *weights = check_weights(c, dtype, w, w_count);
    struct tv_linear a = {.rows = rows, .n = n, .k = k, .groups = 1, .w_dtype = dtype};
    a.x_row_stride = k;
    a.y_row_stride = n;
    a.w = check_upload(c, weights, (size_t)w_count * tv_dtype_size(dtype));
    a.y = check_poisoned(c, y_bytes);
    a.x = check_upload(c, rounded, (size_t)x_count * sizeof(float));
    (void)check_ok(c, c->k->linear(c->k, &a), "linear");
    check_download(c, expected, a.y, y_bytes);
    float *d_x = check_upload(c, x, (size_t)x_count * sizeof(float));
    a.x = d_x;
    a.products = TV_PRODUCTS_BF16;
    (void)c->k->fill(c->k, a.y, 0xff, y_bytes);
    (void)check_ok(c, c->k->linear(c->k, &a), "linear with bf16 products");
    check_download(c, y, a.y, y_bytes);
    check_same(c, y, expected, y_bytes, "linear with bf16 products");
    for (int32_t row = 0; row < rows; row += 7) {
        a.rows = 1;
        a.x = d_x + (int64_t)row * k;
        (void)check_ok(c, c->k->linear(c->k, &a), "linear with bf16 products");
        check_download(c, y, a.y, (size_t)n * sizeof(float));
        check_same(c, y, expected + (int64_t)row * n, (size_t)n * sizeof(float),
                   "linear with bf16 products, a row among others");
    }
    check_release(c);
}

/* What is not finite must show up, in its own row and nowhere else, whichever pieces a backend cuts
 * a float into: an infinity as itself or as NaN, NaN as NaN. The quiet bit of one NaN is clear. */
static void linear_not_finite(struct check *c, enum tv_dtype dtype, int32_t rows)
{
    enum { N = 40, K = 72 };
    struct tv_linear a = {.rows = rows, .n = N, .k = K, .groups = 1, .w_dtype = dtype};
    const uint32_t signalling = 0x7f800001u;
    float bad[3] = {INFINITY, -INFINITY, 0.0f};
    float *x = check_normals(c, (int64_t)rows * K, 1.0f), *w = check_normals(c, N * K, 1.0f);
    float *y = check_host(c, (size_t)rows * N * sizeof(float));
    memcpy(&bad[2], &signalling, sizeof signalling);
    for (int32_t r = 0; r < rows; r += 2) {
        x[(int64_t)r * K + check_range(c, 0, K - 1)] = bad[r / 2 % 3];
    }
    a.x_row_stride = K;
    a.y_row_stride = N;
    a.x = check_upload(c, x, (size_t)rows * K * sizeof(float));
    void *weights = check_weights(c, dtype, w, N * K);
    a.w = check_upload(c, weights, (size_t)N * K * tv_dtype_size(dtype));
    a.y = check_poisoned(c, (size_t)rows * N * sizeof(float));
    (void)check_ok(c, c->k->linear(c->k, &a), "linear");
    check_download(c, y, a.y, (size_t)rows * N * sizeof(float));
    for (int64_t i = 0; i < (int64_t)rows * N; i++) {
        int is_bad = i / N % 2 == 0, is_nan = is_bad && i / N / 2 % 3 == 2;
        if (is_bad == !!isfinite(y[i]) || (is_nan && !isnan(y[i]))) {
            check_fail(c, "linear of what is not finite: row %d of %d gives %g", (int)(i / N), rows,
                       (double)y[i]);
        }
    }
    check_release(c);
}

static float *rope_table(struct check *c, int32_t positions, int32_t rope_dim)
{
    int32_t half = rope_dim / 2;
    float *table = check_host(c, (size_t)positions * (size_t)rope_dim * sizeof(float));
    for (int32_t p = 0; p < positions; p++) {
        for (int32_t i = 0; i < half; i++) {
            double angle = p * pow(10000.0, -2.0 * i / rope_dim);
            table[(int64_t)p * rope_dim + i] = (float)cos(angle);
            table[(int64_t)p * rope_dim + half + i] = (float)sin(angle);
        }
    }
    return table;
}

static void one_rope(struct check *c, int32_t rope_dim)
{
    struct tv_rope a = {.rows = check_range(c, 1, 20), .heads = check_range(c, 1, 9)};
    a.head_stride = rope_dim + check_range(c, 0, 64);
    a.row_stride = a.heads * a.head_stride;
    int64_t count = a.rows * a.row_stride;
    float *x = check_normals(c, count, 1.0f), *table = rope_table(c, 100, rope_dim);
    int32_t *positions = check_host(c, (size_t)a.rows * sizeof *positions);
    for (int32_t r = 0; r < a.rows; r++) {
        positions[r] = check_range(c, 0, 99);
    }
    a.table = (struct tv_rope_table){table, 100, rope_dim};
    struct tv_rope device = a;
    device.x = check_upload(c, x, (size_t)count * sizeof(float));
    device.positions = check_upload(c, positions, (size_t)a.rows * sizeof *positions);
    device.table.cos_sin = check_upload(c, table, 100u * (size_t)rope_dim * sizeof(float));
    float *y = check_host(c, (size_t)count * sizeof(float));
    if (check_ok(c, c->k->rope(c->k, &device), "rope")) {
        a.x = x;
        a.positions = positions;
        (void)c->ref->rope(c->ref, &a);
        check_download(c, y, device.x, (size_t)count * sizeof(float));
        check_near(c, y, x, count, 1e-6, 1e-6, "rope");
    }
    check_release(c);
}

/* B29: one hot pair at position 1 against a rotation by hand. */
static void rope_hot_pair(struct check *c)
{
    enum { ROPE = 64, HALF = 32 };
    float x[ROPE] = {3.0f, 4.0f}, y[ROPE], expected[ROPE] = {0};
    float *table = rope_table(c, 2, ROPE);
    int32_t position = 1;
    struct tv_rope a = {.rows = 1, .heads = 1, .row_stride = ROPE, .head_stride = ROPE};
    a.x = check_upload(c, x, sizeof x);
    a.positions = check_upload(c, &position, sizeof position);
    a.table = (struct tv_rope_table){check_upload(c, table, 2 * ROPE * sizeof(float)), 2, ROPE};
    expected[0] = (float)(3.0 * cos(1.0) - 4.0 * sin(1.0));
    expected[HALF] = (float)(4.0 * cos(1.0) + 3.0 * sin(1.0));
    (void)check_ok(c, c->k->rope(c->k, &a), "rope");
    check_download(c, y, a.x, sizeof y);
    check_near(c, y, expected, ROPE, 1e-6, 0.0, "rope hot pair (B29)");
    check_release(c);
}

static void one_latent(struct check *c, enum tv_dtype dtype, int32_t latent)
{
    enum { SLOTS = 200, ROPE = 64 };
    struct tv_latent_write a = {.rows = check_range(c, 1, 40), .latent_dim = latent};
    int32_t dim = latent + ROPE;
    a.row_stride = dim + check_range(c, 0, 7);
    a.eps = 1e-6f;
    a.slot_count = SLOTS;
    a.kv_dtype = dtype;
    size_t pool_bytes = (size_t)SLOTS * (size_t)dim * tv_dtype_size(dtype);
    float *x = check_normals(c, a.rows * a.row_stride, 1.0f);
    float *weight = check_normals(c, latent, 1.0f), *table = rope_table(c, 50, ROPE);
    int32_t *positions = check_host(c, (size_t)a.rows * sizeof *positions);
    int64_t *slots = check_host(c, (size_t)a.rows * sizeof *slots);
    for (int32_t r = 0; r < a.rows; r++) {
        positions[r] = check_range(c, 0, 49);
        slots[r] = 5 * r % SLOTS;
    }
    struct tv_latent_write d = a;
    void *pool = check_host(c, pool_bytes), *expected = check_host(c, pool_bytes);
    d.ckv = check_upload(c, x, (size_t)(a.rows * a.row_stride) * sizeof(float));
    d.norm_weight = check_upload(c, weight, (size_t)latent * sizeof(float));
    d.positions = check_upload(c, positions, (size_t)a.rows * sizeof *positions);
    d.slots = check_upload(c, slots, (size_t)a.rows * sizeof *slots);
    d.kv_pages = check_upload(c, pool, pool_bytes);
    d.table = (struct tv_rope_table){check_upload(c, table, 50 * ROPE * sizeof(float)), 50, ROPE};
    a.ckv = x, a.norm_weight = weight, a.positions = positions, a.slots = slots;
    a.table = (struct tv_rope_table){table, 50, ROPE};
    a.kv_pages = expected;
    if (check_ok(c, c->k->latent_write(c->k, &d), "latent_write")) {
        (void)c->ref->latent_write(c->ref, &a);
        check_download(c, pool, d.kv_pages, pool_bytes);
        float *value = check_host(c, (size_t)SLOTS * (size_t)dim * sizeof(float));
        float *wanted = check_host(c, (size_t)SLOTS * (size_t)dim * sizeof(float));
        for (int64_t i = 0; i < (int64_t)SLOTS * dim; i++) {
            value[i] = dtype == TV_F32 ? ((float *)pool)[i] : tv_bf16_to_f32(((uint16_t *)pool)[i]);
            wanted[i] = dtype == TV_F32 ? ((float *)expected)[i]
                                        : tv_bf16_to_f32(((uint16_t *)expected)[i]);
        }
        /* bf16: the last bit may fall either way where f32 and f64 round differently */
        check_near(c, value, wanted, (int64_t)SLOTS * dim, 1e-6, dtype == TV_F32 ? 2e-6 : 0x1p-7,
                   "latent_write");
    }
    check_release(c);
}

static void one_swiglu(struct check *c)
{
    int32_t rows = check_range(c, 1, 9), dim = check_range(c, 1, 99);
    int64_t count = (int64_t)rows * dim;
    float *gate = check_normals(c, count, 4.0f), *up = check_normals(c, count, 1.0f);
    gate[0] = -200.0f; /* exp of it overflows when done the wrong way round */
    gate[count - 1] = 200.0f;
    void *d_gate = check_upload(c, gate, (size_t)count * sizeof(float));
    void *d_up = check_upload(c, up, (size_t)count * sizeof(float));
    float *y = check_host(c, (size_t)count * sizeof(float));
    if (check_ok(c, c->k->swiglu(c->k, rows, dim, d_gate, d_up), "swiglu")) {
        (void)c->ref->swiglu(c->ref, rows, dim, gate, up);
        check_download(c, y, d_gate, (size_t)count * sizeof(float));
        check_near(c, y, gate, count, 1e-7, 2e-6, "swiglu");
    }
    check_release(c);
}

/* Rounding is exact: ties, subnormals and infinities included. */
static void one_to_bf16(struct check *c)
{
    int32_t count = check_range(c, 1, 999);
    float *x = check_host(c, (size_t)count * sizeof(float));
    uint16_t *y = check_host(c, (size_t)count * sizeof *y);
    uint16_t *expected = check_host(c, (size_t)count * sizeof *y);
    for (int32_t i = 0; i < count; i++) {
        uint32_t bits = (uint32_t)check_random(c);
        bits = i % 3 == 0 ? (bits & 0xffff0000u) | 0x8000u : bits; /* a tie */
        memcpy(&x[i], &bits, sizeof bits);
        x[i] = x[i] != x[i] ? 0.0f : x[i];
    }
    void *d_x = check_upload(c, x, (size_t)count * sizeof(float));
    void *d_y = check_upload(c, y, (size_t)count * sizeof *y);
    if (check_ok(c, c->k->to_bf16(c->k, count, d_x, d_y), "to_bf16")) {
        (void)c->ref->to_bf16(c->ref, count, x, expected);
        check_download(c, y, d_y, (size_t)count * sizeof *y);
        check_same(c, y, expected, (size_t)count * sizeof *y, "to_bf16");
    }
    check_release(c);
}

static void one_move(struct check *c)
{
    enum { SLOTS = 100, ROW = 40 };
    int64_t src[20], dst[20];
    int32_t count = check_range(c, 0, 20);
    uint32_t *pool = check_host(c, SLOTS * ROW), *expected = check_host(c, SLOTS * ROW);
    for (int32_t i = 0; i < SLOTS * ROW / 4; i++) {
        pool[i] = expected[i] = (uint32_t)check_random(c);
    }
    for (int32_t i = 0; i < count; i++) {
        dst[i] = 10 + i; /* forward in place, as a commit does it */
        src[i] = 10 + 4 * i;
    }
    void *d_pool = check_upload(c, pool, SLOTS * ROW);
    void *d_src = check_upload(c, src, sizeof src), *d_dst = check_upload(c, dst, sizeof dst);
    int rc = c->k->kv_move(c->k, d_pool, ROW, SLOTS, d_src, d_dst, count);
    if (check_ok(c, rc, "kv_move")) {
        (void)c->ref->kv_move(c->ref, expected, ROW, SLOTS, src, dst, count);
        check_download(c, pool, d_pool, SLOTS * ROW);
        check_same(c, pool, expected, SLOTS * ROW, "kv_move");
    }
    check_release(c);
}

static void products(struct check *c)
{
    for (int32_t i = 0; i < 3; i++) {
        for (int32_t n = 0; n < 4 * c->scale; n++) {
            linear_products(c, dtypes[i], check_range(c, 1, 70), check_range(c, 1, 150),
                            check_range(c, 1, 300));
        }
        linear_products(c, dtypes[i], 1, 64, 136);
        linear_products(c, dtypes[i], 130, 300, 520);
        linear_products(c, dtypes[i], 34, 12400, 136); /* wide: other tiles on a device */
    }
    for (int32_t n = 0; n < 6 * c->scale && !c->k->host_memory; n++) {
        struct tv_linear a = {.products = n % 2 == 0 ? TV_PRODUCTS_EXACT : TV_PRODUCTS_BF16};
        a.rows = check_range(c, 65, 530);
        a.n = 6200 + 2 * check_range(c, 0, 60);
        a.k = 8 * check_range(c, 1, 40);
        a.groups = n < 2 ? 2 : check_range(c, 1, 2);
        linear_many_rows(c, &a, n < 2);
        a.n = 240 + 2 * check_range(c, 0, 60); /* as many groups as a model has heads */
        a.k = 8 * check_range(c, 18, 40);
        a.groups = 32;
        linear_many_rows(c, &a, n % 3 == 2);
    }
}

void check_dense(struct check *c)
{
    static const int32_t shapes[][3] = {{1, 260, 256},  {33, 64, 576}, {7, 31, 40},
                                        {64, 128, 129}, {5, 1, 7},     {2, 300, 1408}};
    for (int32_t i = 0; i < 3; i++) {
        if (c->k->embed) {
            one_embed(c, dtypes[i]);
        }
        for (size_t s = 0; s < sizeof shapes / sizeof shapes[0] && c->k->linear; s++) {
            one_linear(c, dtypes[i], shapes[s][0], shapes[s][1], shapes[s][2]);
        }
        for (int32_t n = 0; n < 10 * c->scale && c->k->linear; n++) {
            one_linear(c, dtypes[i], check_range(c, 1, 70), check_range(c, 1, 150),
                       check_range(c, 1, 300));
        }
        if (c->k->linear) {
            linear_not_finite(c, dtypes[i], 1);
            linear_not_finite(c, dtypes[i], 37);
            linear_rows_independent(c, dtypes[i], 77, 523);
            linear_rows_independent(c, dtypes[i], 77, 520);
            linear_rows_independent(c, dtypes[i], 12400, 136); /* wide: other tiles on a device */
        }
    }
    if (c->k->linear && check_has_products(c)) {
        products(c);
    }
    for (int backwards = 0; backwards < 2 && c->k->linear; backwards++) {
        struct tv_linear a = {.rows = 70, .n = 200, .k = 176, .groups = 32};
        linear_many_rows(c, &a, backwards);
    }
    for (int32_t n = 0; n < 4 * c->scale; n++) {
        if (c->k->rmsnorm) {
            one_rmsnorm(c, check_range(c, 1, 700), 1e-3f);
            one_rmsnorm(c, 512, 1.0f);
        }
        if (c->k->rope) {
            one_rope(c, n % 2 ? 64 : 2 * check_range(c, 1, 40));
            rope_hot_pair(c);
        }
        if (c->k->latent_write) {
            one_latent(c, TV_F32, 512);
            one_latent(c, TV_BF16, 8 * check_range(c, 1, 64));
        }
        if (c->k->swiglu) {
            one_swiglu(c);
        }
        if (c->k->to_bf16) {
            one_to_bf16(c);
        }
        if (c->k->kv_move) {
            one_move(c);
        }
    }
}
