/*
 * amx.c - the tile kernels of amx.h. Compiled with the flags of AMX and AVX-512 alone, reached only
 * when the processor has both.
 *
 * Weights are the unit's first operand, as they lie in memory: 16 columns of y by 32 of k. Packed
 * rows are the second, so a tile of results is transposed: [16 columns of y][16 rows].
 */
#include "amx.h"

#include <errno.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "amx_tiles.h"

enum { COLUMNS = 3 }; /* up to here, rows of a tile are packed and stored one by one */

int tv_cpu_amx_permit(void)
{
    enum { ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18 };
    return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0 ? 0 : -ENOTSUP;
}

/* One step of 16 rows into its three tiles: pairs of neighbours, or of elements 16 apart. */
INLINE void pack_tile(const int apart, const float *const row[ROWS], int32_t at, char *to)
{
    for (int j = 0; j < (apart ? 16 : 32); j += 4) {
        __m512 x[4], y[4];
        const int pairs = apart ? 4 : 2, first = apart ? j : j / 2;
        tv_amx_transpose4(row, at + j, x);
        if (apart) {
            tv_amx_transpose4(row, at + 16 + j, y);
        }
        UNROLL
        for (int p = 0; p < pairs; p++) {
            __m512i even[3], odd[3];
            tv_amx_split(apart ? x[p] : x[2 * p], even);
            tv_amx_split(apart ? y[p] : x[2 * p + 1], odd);
            UNROLL
            for (int part = 0; part < 3; part++) {
                _mm512_store_si512(to + part * TILE + (first + p) * LINE,
                                   tv_amx_pair(even[part], odd[part]));
            }
        }
    }
}

/* The same for one row, column `column` of the tiles. */
static void pack_column(const float *x, int32_t column, char *to)
{
    const __m512i firsts =
        _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    const __m512i seconds = _mm512_add_epi32(firsts, _mm512_set1_epi32(1));
    const __m512i lines = _mm512_slli_epi32(firsts, 3); /* 16 elements each */
    __m512i low[3], high[3];
    tv_amx_split(_mm512_loadu_ps(x), low);
    tv_amx_split(_mm512_loadu_ps(x + 16), high);
    for (int part = 0; part < 3; part++) {
        __m512i even = _mm512_permutex2var_epi32(low[part], firsts, high[part]);
        __m512i odd = _mm512_permutex2var_epi32(low[part], seconds, high[part]);
        _mm512_i32scatter_epi32(to + part * TILE + column * 4, lines, tv_amx_pair(even, odd), 4);
    }
}

static void pack_step(const float *const row[ROWS], int32_t rows, int32_t at, char *to)
{
    if (rows > COLUMNS) {
        pack_tile(0, row, at, to);
        return;
    }
    for (int32_t r = 0; r < rows; r++) {
        pack_column(row[r] + at, r, to);
    }
}

static void pack(int32_t rows, int32_t k, const float *x, int64_t x_stride, char *packed)
{
    for (int32_t first = 0; first < rows; first += ROWS) {
        int32_t count = rows - first < ROWS ? rows - first : ROWS;
        const float *row[ROWS];
        float tail[ROWS][STEP];
        for (int32_t r = 0; r < ROWS; r++) {
            row[r] = x + (first + (r < count ? r : count - 1)) * x_stride;
        }
        int32_t at = 0;
        for (; at + STEP <= k; at += STEP, packed += 3 * TILE) {
            pack_step(row, count, at, packed);
        }
        if (at < k) {
            memset(tail, 0, sizeof tail);
            for (int32_t r = 0; r < ROWS; r++) {
                memcpy(tail[r], row[r] + at, (size_t)(k - at) * sizeof(float));
                row[r] = tail[r];
            }
            pack_step(row, count, 0, packed);
            packed += 3 * TILE;
        }
    }
    PUBLISH();
}

static void pack_queries(int32_t rows, int32_t dim, const float *x, char *packed)
{
    for (int32_t first = 0; first < rows; first += ROWS) {
        const float *row[ROWS];
        for (int32_t r = 0; r < ROWS; r++) {
            row[r] = x + (int64_t)(first + r < rows ? first + r : rows - 1) * dim;
        }
        for (int32_t at = 0; at < dim; at += STEP, packed += 3 * TILE) {
            pack_tile(1, row, at, packed);
        }
    }
    PUBLISH();
}

/* A few tiles of weights against one tile of rows. */
struct block {
    const uint16_t *w;
    const char *x; /* packed */
    int32_t k;
    int32_t cols;  /* of w that exist, 1 .. 64 */
    int32_t ahead; /* columns behind them that are wanted next */
    uint16_t (*edge)[STEP];
};

/* Step `at` of the weights; where some are missing, a copy with zeros in place of those. */
INLINE const char *step_weights(const int tiles, const struct block *b, int32_t at,
                                int64_t *ret_stride)
{
    if (b->cols == tiles * ROWS && at + STEP <= b->k) {
        *ret_stride = (int64_t)b->k * (int64_t)sizeof *b->w;
        return (const char *)(b->w + at);
    }
    int32_t count = b->k - at < STEP ? b->k - at : STEP;
    memset(b->edge, 0, (size_t)tiles * TILE);
    for (int32_t c = 0; c < b->cols; c++) {
        memcpy(b->edge[c], b->w + (int64_t)c * b->k + at, (size_t)count * sizeof *b->w);
    }
    PUBLISH();
    *ret_stride = LINE;
    return (const char *)b->edge;
}

/* Ask for the next block's share of this step, in the order of memory. */
INLINE void prefetch_step(const struct block *b, int32_t at)
{
    const char *next = (const char *)(b->w + (int64_t)b->cols * b->k + (int64_t)b->ahead * at);
    for (int32_t line = 0; line < b->ahead; line++) {
        __builtin_prefetch(next + (int64_t)line * LINE, 0, 2);
    }
}

/* One tile of weights times all pieces of the rows, small ones first. */
#define TRIPLE(sum)                                                                                \
    do {                                                                                           \
        _tile_dpbf16ps(sum, 4, 7);                                                                 \
        _tile_dpbf16ps(sum, 4, 6);                                                                 \
        _tile_dpbf16ps(sum, 4, 5);                                                                 \
    } while (0)

/* Tiles 0 to 3 are sums, 4 weights, 5 to 7 the pieces of the rows. sums[tile][column][row] */
INLINE void block_products(const int tiles, const struct block *b, float sums[4][ROWS * ROWS])
{
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int32_t at = 0; at < b->k; at += STEP) {
        int64_t stride;
        const char *w = step_weights(tiles, b, at, &stride);
        const char *x = b->x + (int64_t)at / STEP * 3 * TILE;
        prefetch_step(b, at);
        _tile_loadd(5, x, LINE);
        _tile_loadd(6, x + TILE, LINE);
        _tile_loadd(7, x + 2 * TILE, LINE);
        _tile_loadd(4, w, stride);
        TRIPLE(0);
        if (tiles > 1) {
            _tile_loadd(4, w + ROWS * stride, stride);
            TRIPLE(1);
        }
        if (tiles > 2) {
            _tile_loadd(4, w + 2 * ROWS * stride, stride);
            TRIPLE(2);
            _tile_loadd(4, w + 3 * ROWS * stride, stride);
            TRIPLE(3);
        }
    }
    _tile_stored(0, sums[0], LINE);
    _tile_stored(1, sums[1], LINE);
    _tile_stored(2, sums[2], LINE);
    _tile_stored(3, sums[3], LINE);
}

struct result {
    float *y;
    int64_t stride;
    int accumulate;
};

INLINE void store_row(const struct result *to, int32_t r, int32_t c, int32_t cols, __m512 sum)
{
    const __mmask16 mask = (__mmask16)((1u << cols) - 1u);
    float *y = to->y + r * to->stride + c;
    if (to->accumulate) {
        sum = _mm512_add_ps(sum, _mm512_maskz_loadu_ps(mask, y));
    }
    _mm512_mask_storeu_ps(y, mask, sum);
}

INLINE __m512 gather_column(const float *sums)
{
    const __m512i lines =
        _mm512_setr_epi32(0, 16, 32, 48, 64, 80, 96, 112, 128, 144, 160, 176, 192, 208, 224, 240);
    return _mm512_i32gather_ps(lines, sums, 4);
}

/* Rows [r, r + rows) and columns [c, c + cols) of the result. */
static void store_tile(const float sums[ROWS * ROWS], int32_t r, int32_t rows, int32_t c,
                       int32_t cols, const struct result *to)
{
    __m512 out[ROWS];
    if (rows > COLUMNS) {
        tv_amx_transpose(sums, out);
    }
    for (int32_t i = 0; i < rows; i++) {
        store_row(to, r + i, c, cols, rows > COLUMNS ? out[i] : gather_column(sums + i));
    }
}

static void block_run(const struct block *b, int32_t r, int32_t rows, int32_t c,
                      const struct result *to)
{
    float sums[4][ROWS * ROWS] __attribute__((aligned(64)));
    if (b->cols > 2 * ROWS) {
        block_products(4, b, sums);
    } else if (b->cols > ROWS) {
        block_products(2, b, sums);
    } else {
        block_products(1, b, sums);
    }
    for (int32_t i = 0; i * ROWS < b->cols; i++) {
        int32_t cols = b->cols - i * ROWS < ROWS ? b->cols - i * ROWS : ROWS;
        store_tile(sums[i], r, rows, c + i * ROWS, cols, to);
    }
}

static void dot(int32_t rows, int32_t cols, int32_t k, const char *packed, const uint16_t *w,
                float *y, int64_t y_stride, int accumulate)
{
    const int64_t tile = (int64_t)tv_cpu_amx_bytes(ROWS, k);
    const struct result to = {y, y_stride, accumulate};
    uint16_t edge[4 * ROWS][STEP] __attribute__((aligned(64)));
    int32_t width;
    _tile_loadconfig(&tv_amx_whole_tiles);
    for (int32_t c = 0; c < cols; c += width) {
        struct block b = {.w = w + (int64_t)c * k, .k = k, .edge = edge};
        int32_t left = cols - c;
        width = (left >= 4 * ROWS ? 4 : left >= 2 * ROWS ? 2 : 1) * ROWS;
        b.cols = left < width ? left : width;
        b.ahead = left - b.cols < width ? left - b.cols : width;
        for (int32_t r = 0; r < rows; r += ROWS) {
            b.x = packed + r / ROWS * tile;
            block_run(&b, r, rows - r < ROWS ? rows - r : ROWS, c, &to);
            b.ahead = 0;
        }
    }
    _tile_release();
}

const struct tv_cpu_amx tv_cpu_amx_tiles = {
    .pack = pack,
    .dot = dot,
    .pack_queries = pack_queries,
    .scores = tv_amx_scores,
    .values = tv_amx_values,
};
