/*
 * micro_body.h - the inner loops, written against a handful of vector primitives.
 *
 * Included once by each micro_<set>.c after it defined `vf` (a vector of VL floats), the vf_*
 * primitives, MICRO_ROWS (6 or 4: rows of a dot tile), MICRO_COLS (its columns), MICRO_MIX (vectors
 * of a mix tile) and MICRO_TABLE, MICRO_NAME. Tiles have constant sizes so that accumulators live
 * in registers; the order of each sum is the same in every tile size.
 */
#include <math.h>
#include <stddef.h>

#include "micro.h"

#define INLINE static inline __attribute__((always_inline))
#ifdef __clang__
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif

INLINE vf load_w(const void *w, enum tv_dtype dtype, int32_t i)
{
    if (dtype == TV_F32) {
        return vf_load((const float *)w + i);
    }
    const uint16_t *bits = (const uint16_t *)w + i;
    return dtype == TV_BF16 ? vf_load_bf16(bits) : vf_load_f16(bits);
}

/* Ask for what the next tile will load from the same place of its column, `ahead` bytes on. */
INLINE void prefetch_w(const void *w, enum tv_dtype dtype, int32_t i, ptrdiff_t ahead)
{
    ptrdiff_t offset = (ptrdiff_t)i * (dtype == TV_F32 ? 4 : 2) + ahead;
    __builtin_prefetch((const void *)((uintptr_t)w + (uintptr_t)offset));
}

/* The last, incomplete vector; missing lanes are zero. */
INLINE vf load_w_part(const void *w, enum tv_dtype dtype, int32_t i, int32_t count)
{
    if (dtype == TV_F32) {
        return vf_load_part((const float *)w + i, count);
    }
    uint16_t padded[VL] = {0};
    memcpy(padded, (const uint16_t *)w + i, (size_t)count * sizeof *padded);
    return dtype == TV_BF16 ? vf_load_bf16(padded) : vf_load_f16(padded);
}

struct dot_args {
    int32_t k;
    const float *x;
    int64_t x_stride;
    float *y;
    int64_t y_stride;
    int accumulate;
};

/* Sums of a tile's lanes, four at a time where the tile has four neighbours in a row or a column:
 * vf_sum4 pairs lanes exactly as vf_sum does. */
INLINE void dot_store(const int rows, const int cols, const struct dot_args *a, vf acc[8][8])
{
    const int by_row = cols % 4 == 0;
    const int by_column = !by_row && rows % 4 == 0;
    UNROLL
    for (int r = 0; r < rows; r += by_column ? 4 : 1) {
        UNROLL
        for (int c = 0; c < cols; c += by_row ? 4 : 1) {
            float *y = a->y + r * a->y_stride + c;
            const int64_t step = by_row ? 1 : a->y_stride;
            const int count = by_row || by_column ? 4 : 1;
            float sums[4];
            if (by_row) {
                vf_sum4(acc[r][c], acc[r][c + 1], acc[r][c + 2], acc[r][c + 3], sums);
            } else if (by_column) {
                vf_sum4(acc[r][c], acc[r + 1][c], acc[r + 2][c], acc[r + 3][c], sums);
            } else {
                sums[0] = vf_sum(acc[r][c]);
            }
            UNROLL
            for (int i = 0; i < count; i++) {
                y[i * step] = a->accumulate ? y[i * step] + sums[i] : sums[i];
            }
        }
    }
}

INLINE void dot_tile(const int rows, const int cols, const enum tv_dtype dtype,
                     const struct dot_args *a, const void *const *w, ptrdiff_t ahead)
{
    vf acc[8][8];
    UNROLL
    for (int r = 0; r < rows; r++) {
        UNROLL
        for (int c = 0; c < cols; c++) {
            acc[r][c] = vf_zero();
        }
    }
    const int32_t full = a->k / VL * VL;
    for (int32_t i = 0; i < full; i += VL) {
        vf wv[8];
        UNROLL
        for (int c = 0; c < cols; c++) {
            wv[c] = load_w(w[c], dtype, i);
            prefetch_w(w[c], dtype, i, ahead);
        }
        UNROLL
        for (int r = 0; r < rows; r++) {
            vf xv = vf_load(a->x + r * a->x_stride + i);
            UNROLL
            for (int c = 0; c < cols; c++) {
                acc[r][c] = vf_fma(xv, wv[c], acc[r][c]);
            }
        }
    }
    if (full < a->k) {
        const int32_t part = a->k - full;
        UNROLL
        for (int c = 0; c < cols; c++) {
            vf wv = load_w_part(w[c], dtype, full, part);
            UNROLL
            for (int r = 0; r < rows; r++) {
                vf xv = vf_load_part(a->x + r * a->x_stride + full, part);
                acc[r][c] = vf_fma(xv, wv, acc[r][c]);
            }
        }
    }
    dot_store(rows, cols, a, acc);
}

/* All columns for one tile of rows; `cols_tile` columns at a time, then one by one. */
INLINE void dot_rows(const int rows, const int cols_tile, const enum tv_dtype dtype,
                     struct dot_args a, int32_t cols, const void *const *w)
{
    int32_t c = 0;
    for (; c + cols_tile <= cols; c += cols_tile) {
        ptrdiff_t ahead = 0;
        if (c + 2 * cols_tile <= cols) {
            ahead = (ptrdiff_t)((uintptr_t)w[c + cols_tile] - (uintptr_t)w[c]);
        }
        dot_tile(rows, cols_tile, dtype, &a, w + c, ahead);
        a.y += cols_tile;
    }
    for (; c < cols; c++) {
        dot_tile(rows, 1, dtype, &a, w + c, 0);
        a.y++;
    }
}

INLINE void dot_dtype(const enum tv_dtype dtype, int32_t rows, int32_t cols, struct dot_args a,
                      const void *const *w)
{
    int32_t r = 0;
#if MICRO_ROWS > 4
    /* Eight rows are better off as two tiles of four than as six and two. */
    for (; r + MICRO_ROWS <= rows && rows - r != 8; r += MICRO_ROWS) {
        dot_rows(MICRO_ROWS, MICRO_COLS, dtype, a, cols, w);
        a.x += MICRO_ROWS * a.x_stride;
        a.y += MICRO_ROWS * a.y_stride;
    }
#endif
    for (; r + 4 <= rows; r += 4) {
        dot_rows(4, MICRO_COLS, dtype, a, cols, w);
        a.x += 4 * a.x_stride;
        a.y += 4 * a.y_stride;
    }
    for (; r + 2 <= rows; r += 2) {
        dot_rows(2, 4, dtype, a, cols, w);
        a.x += 2 * a.x_stride;
        a.y += 2 * a.y_stride;
    }
    if (r < rows) {
        dot_rows(1, 8, dtype, a, cols, w);
    }
}

static void dot(int32_t rows, int32_t cols, int32_t k, const float *x, int64_t x_stride,
                const void *const *w, enum tv_dtype dtype, float *y, int64_t y_stride,
                int accumulate)
{
    struct dot_args a = {k, x, x_stride, y, y_stride, accumulate};
    if (dtype == TV_F32) {
        dot_dtype(TV_F32, rows, cols, a, w);
    } else if (dtype == TV_BF16) {
        dot_dtype(TV_BF16, rows, cols, a, w);
    } else {
        dot_dtype(TV_F16, rows, cols, a, w);
    }
}

struct mix_args {
    int32_t count;
    const float *p;
    int64_t p_stride;
    const float *const *v;
    const float *rescale;
    float *o;
    int64_t o_stride;
};

/* Columns [d, d + width * VL) of `rows` rows, or with width 1 and part > 0 the last few. */
INLINE void mix_tile(const int rows, const int width, const struct mix_args *a, int32_t d,
                     int32_t part)
{
    vf acc[6][MICRO_MIX];
    UNROLL
    for (int r = 0; r < rows; r++) {
        UNROLL
        for (int i = 0; i < width; i++) {
            acc[r][i] = vf_zero();
        }
    }
    for (int32_t j = 0; j < a->count; j++) {
        const float *v = a->v[j] + d;
        vf vv[MICRO_MIX];
        UNROLL
        for (int i = 0; i < width; i++) {
            vv[i] = part ? vf_load_part(v, part) : vf_load(v + i * VL);
        }
        UNROLL
        for (int r = 0; r < rows; r++) {
            vf p = vf_set1(a->p[r * a->p_stride + j]);
            UNROLL
            for (int i = 0; i < width; i++) {
                acc[r][i] = vf_fma(p, vv[i], acc[r][i]);
            }
        }
    }
    UNROLL
    for (int r = 0; r < rows; r++) {
        float *o = a->o + r * a->o_stride + d;
        vf rescale = vf_set1(a->rescale[r]);
        UNROLL
        for (int i = 0; i < width; i++) {
            if (part) {
                vf_store_part(o, vf_fma(vf_load_part(o, part), rescale, acc[r][i]), part);
            } else {
                vf_store(o + i * VL, vf_fma(vf_load(o + i * VL), rescale, acc[r][i]));
            }
        }
    }
}

INLINE void mix_rows(const int rows, const int width, struct mix_args *a, int32_t d, int32_t part)
{
    mix_tile(rows, width, a, d, part);
    a->p += rows * a->p_stride;
    a->o += rows * a->o_stride;
    a->rescale += rows;
}

INLINE void mix_columns(const int width, struct mix_args a, int32_t rows, int32_t d, int32_t part)
{
    int32_t r = 0;
#if MICRO_ROWS > 4
    for (; r + MICRO_ROWS <= rows && rows - r != 8; r += MICRO_ROWS) {
        mix_rows(MICRO_ROWS, width, &a, d, part);
    }
#endif
    for (; r + 4 <= rows; r += 4) {
        mix_rows(4, width, &a, d, part);
    }
    for (; r + 2 <= rows; r += 2) {
        mix_rows(2, width, &a, d, part);
    }
    if (r < rows) {
        mix_rows(1, width, &a, d, part);
    }
}

static void mix(int32_t rows, int32_t count, int32_t dim, const float *p, int64_t p_stride,
                const float *const *v, const float *rescale, float *o, int64_t o_stride)
{
    struct mix_args a = {count, p, p_stride, v, rescale, o, o_stride};
    int32_t d = 0;
    for (; d + MICRO_MIX * VL <= dim; d += MICRO_MIX * VL) {
        mix_columns(MICRO_MIX, a, rows, d, 0);
    }
    for (; d + VL <= dim; d += VL) {
        mix_columns(1, a, rows, d, 0);
    }
    if (d < dim) {
        mix_columns(1, a, rows, d, dim - d);
    }
}

/* exp for arguments <= 0: 2^n times a Taylor series of degree 7 on |r| <= ln2 / 2, whose remainder
 * is 6e-9. Below -87 the result stays at 1e-38 instead of becoming subnormal. NaN stays NaN
 * because the second operand of vf_max is returned for it. */
INLINE vf vf_exp(vf x)
{
    x = vf_max(vf_set1(-87.0f), x);
    vf n = vf_round(vf_mul(x, vf_set1(1.44269504f)));
    vf r = vf_fma(n, vf_set1(-0.693359375f), x);
    r = vf_fma(n, vf_set1(2.12194440e-4f), r);
    vf y = vf_set1(1.0f / 5040.0f);
    y = vf_fma(y, r, vf_set1(1.0f / 720.0f));
    y = vf_fma(y, r, vf_set1(1.0f / 120.0f));
    y = vf_fma(y, r, vf_set1(1.0f / 24.0f));
    y = vf_fma(y, r, vf_set1(1.0f / 6.0f));
    y = vf_fma(y, r, vf_set1(0.5f));
    y = vf_fma(y, r, vf_set1(1.0f));
    y = vf_fma(y, r, vf_set1(1.0f));
    return vf_mul(y, vf_pow2(n));
}

static float softmax(int32_t count, float scale, float *s, float *max, float *sum)
{
    vf tops = vf_set1(*max);
    vf factor = vf_set1(scale);
    int32_t j = 0;
    for (; j + VL <= count; j += VL) {
        vf v = vf_mul(vf_load(s + j), factor);
        vf_store(s + j, v);
        tops = vf_max(v, tops);
    }
    float padded[VL];
    vf_store(padded, tops);
    float top = *max;
    for (int i = 0; i < VL; i++) {
        top = padded[i] > top ? padded[i] : top;
    }
    for (; j < count; j++) {
        s[j] *= scale;
        top = s[j] > top ? s[j] : top;
    }
    vf total = vf_zero();
    vf shift = vf_set1(-top);
    for (j = 0; j + VL <= count; j += VL) {
        vf p = vf_exp(vf_add(vf_load(s + j), shift));
        vf_store(s + j, p);
        total = vf_add(total, p);
    }
    if (j < count) {
        vf p = vf_exp(vf_add(vf_load_part(s + j, count - j), shift));
        vf_store(padded, p);
        for (int32_t i = count - j; i < VL; i++) {
            padded[i] = 0.0f;
        }
        memcpy(s + j, padded, (size_t)(count - j) * sizeof *s);
        total = vf_add(total, vf_load(padded));
    }
    float rescale = isinf(*max) ? 0.0f : expf(*max - top);
    *sum = *sum * rescale + vf_sum(total);
    *max = top;
    return rescale;
}

/* The f64 loops are plain: elements are independent, so the compiler's vectors change no bit. */
static void join(int32_t dim, const float *restrict o, double o_factor, double *restrict total,
                 double total_factor)
{
    for (int32_t d = 0; d < dim; d++) {
        total[d] = total[d] * total_factor + (double)o[d] * o_factor;
    }
}

static void narrow(int32_t dim, const double *restrict total, double factor, float *restrict y)
{
    for (int32_t d = 0; d < dim; d++) {
        y[d] = (float)(total[d] * factor);
    }
}

/* x * sigmoid(x), with exponents that are never positive. */
INLINE vf vf_silu(vf x)
{
    vf top = vf_exp(vf_min(vf_zero(), x));
    vf tail = vf_exp(vf_min(vf_mul(x, vf_set1(-1.0f)), x));
    return vf_mul(x, vf_div(top, vf_add(vf_set1(1.0f), tail)));
}

static void swiglu(int64_t count, float *gate, const float *up)
{
    int64_t i = 0;
    for (; i + VL <= count; i += VL) {
        vf_store(gate + i, vf_mul(vf_silu(vf_load(gate + i)), vf_load(up + i)));
    }
    if (i < count) {
        int32_t part = (int32_t)(count - i);
        vf g = vf_silu(vf_load_part(gate + i, part));
        vf_store_part(gate + i, vf_mul(g, vf_load_part(up + i, part)), part);
    }
}

static void rmsnorm(int32_t dim, const float *x, const float *weight, float eps, float *y)
{
    vf squares = vf_zero();
    int32_t i = 0;
    for (; i + VL <= dim; i += VL) {
        vf v = vf_load(x + i);
        squares = vf_fma(v, v, squares);
    }
    if (i < dim) {
        vf v = vf_load_part(x + i, dim - i);
        squares = vf_fma(v, v, squares);
    }
    vf factor = vf_set1((float)(1.0 / sqrt((double)vf_sum(squares) / dim + (double)eps)));
    for (i = 0; i + VL <= dim; i += VL) {
        vf_store(y + i, vf_mul(vf_mul(vf_load(x + i), factor), vf_load(weight + i)));
    }
    if (i < dim) {
        vf v = vf_mul(vf_load_part(x + i, dim - i), factor);
        vf_store_part(y + i, vf_mul(v, vf_load_part(weight + i, dim - i)), dim - i);
    }
}

static void widen(int32_t count, const uint16_t *bits, float *values)
{
    int32_t i = 0;
    for (; i + VL <= count; i += VL) {
        vf_store(values + i, vf_load_bf16(bits + i));
    }
    for (; i < count; i++) {
        values[i] = tv_bf16_to_f32(bits[i]);
    }
}

const struct tv_cpu_micro MICRO_TABLE = {
    .name = MICRO_NAME,
    .dot = dot,
    .mix = mix,
    .softmax = softmax,
    .join = join,
    .narrow = narrow,
    .swiglu = swiglu,
    .rmsnorm = rmsnorm,
    .widen = widen,
};
