/*
 * amx_attn.c - attention over a tile of 64 tokens on the matrix unit.
 *
 * Keys are the first operand of scores, [16 tokens][32 of dim], and packed queries the second;
 * probabilities are the first operand of values, [16 rows][32 tokens], and tokens the second.
 * Compiled with the flags of AMX and AVX-512 alone.
 */
#include "amx.h"

#include "amx_tiles.h"

enum {
    TOKENS = 64,
    GROUP = 4,                         /* tiles of sums at a time */
    CHUNK = 64,                        /* of dim or latent: what is packed at a time */
    PACKED = TOKENS * CHUNK / 512 * 3, /* its tiles: half of the first-level cache */
};

/* Elements [at, at + 64) of the tokens as keys: packed[16 tokens][step][piece][token][32]. */
static void pack_keys(const float *const token[TOKENS], int32_t at, char *packed)
{
    for (int j = 0; j < TOKENS; j++) {
        char *to = packed + j / ROWS * 2 * 3 * TILE + j % ROWS * LINE;
        UNROLL
        for (int step = 0; step < 2; step++) {
            const float *x = token[j] + at + step * STEP;
            __m512i low[3], high[3];
            tv_amx_split(_mm512_loadu_ps(x), low);
            tv_amx_split(_mm512_loadu_ps(x + 16), high);
            UNROLL
            for (int part = 0; part < 3; part++) {
                _mm512_store_si512(to + (step * 3 + part) * TILE,
                                   tv_amx_pair(low[part], high[part]));
            }
        }
    }
    PUBLISH();
}

/* The same as values: packed[16 of latent][step of tokens][piece][pair of tokens][16]. */
static void pack_values(const float *const token[TOKENS], int32_t at, char *packed)
{
    for (int j = 0; j < TOKENS / 2; j++) {
        const int first = j / ROWS * STEP + j % ROWS; /* its partner is 16 further */
        char *to = packed + j / ROWS * 3 * TILE + j % ROWS * LINE;
        UNROLL
        for (int d = 0; d < CHUNK / ROWS; d++, to += 2 * 3 * TILE) {
            const float *even_row = token[first] + at + d * ROWS;
            const float *odd_row = token[first + ROWS] + at + d * ROWS;
            __m512i even[3], odd[3];
            tv_amx_split(_mm512_loadu_ps(even_row), even);
            tv_amx_split(_mm512_loadu_ps(odd_row), odd);
            UNROLL
            for (int part = 0; part < 3; part++) {
                _mm512_store_si512(to + part * TILE, tv_amx_pair(even[part], odd[part]));
            }
        }
    }
    PUBLISH();
}

/* Load a tile into 4 and multiply it by one or two others. Neighbours in the program work on
 * different sums, since a sum is ready for its next product only after three others. */
#define TIMES1(sum, from, a)                                                                       \
    do {                                                                                           \
        _tile_loadd(4, from, LINE);                                                                \
        _tile_dpbf16ps(sum, 4, a);                                                                 \
    } while (0)
#define TIMES2(sum, from, a, b)                                                                    \
    do {                                                                                           \
        TIMES1(sum, from, a);                                                                      \
        _tile_dpbf16ps(sum, 4, b);                                                                 \
    } while (0)

/* Add a chunk to sums[tile of tokens][token][row]: the small products, then the large ones. */
static void score_tiles(int first, const char *query, const char *keys, float *sums)
{
    const int64_t next = 2 * 3 * TILE; /* 16 tokens */
    if (first) {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    } else {
        _tile_loadd(0, sums, LINE);
        _tile_loadd(1, sums + ROWS * ROWS, LINE);
        _tile_loadd(2, sums + 2 * ROWS * ROWS, LINE);
        _tile_loadd(3, sums + 3 * ROWS * ROWS, LINE);
    }
    for (int step = 0; step < 2; step++) {
        const char *q = query + step * 3 * TILE, *k = keys + step * 3 * TILE;
        _tile_loadd(5, q, LINE);
        _tile_loadd(6, q + TILE, LINE);
        _tile_loadd(7, q + 2 * TILE, LINE);
        TIMES1(0, k + 2 * TILE, 5);
        TIMES1(1, k + 2 * TILE + next, 5);
        TIMES1(2, k + 2 * TILE + 2 * next, 5);
        TIMES1(3, k + 2 * TILE + 3 * next, 5);
        TIMES2(0, k + TILE, 6, 5);
        TIMES2(1, k + TILE + next, 6, 5);
        TIMES2(2, k + TILE + 2 * next, 6, 5);
        TIMES2(3, k + TILE + 3 * next, 6, 5);
        TIMES2(0, k, 7, 6);
        TIMES2(1, k + next, 7, 6);
        TIMES2(2, k + 2 * next, 7, 6);
        TIMES2(3, k + 3 * next, 7, 6);
    }
    for (int step = 0; step < 2; step++) {
        const char *k = keys + step * 3 * TILE;
        _tile_loadd(5, query + step * 3 * TILE, LINE);
        TIMES1(0, k, 5);
        TIMES1(1, k + next, 5);
        TIMES1(2, k + 2 * next, 5);
        TIMES1(3, k + 3 * next, 5);
    }
    _tile_stored(0, sums, LINE);
    _tile_stored(1, sums + ROWS * ROWS, LINE);
    _tile_stored(2, sums + 2 * ROWS * ROWS, LINE);
    _tile_stored(3, sums + 3 * ROWS * ROWS, LINE);
}

/* Four tiles [token][row] to 16 rows of 64 tokens, in place. */
static void turn_scores(float *s)
{
    __m512 out[GROUP][ROWS];
    for (int i = 0; i < GROUP; i++) {
        tv_amx_transpose(s + i * ROWS * ROWS, out[i]);
    }
    for (int row = 0; row < ROWS; row++) {
        for (int i = 0; i < GROUP; i++) {
            _mm512_storeu_ps(s + row * TOKENS + i * ROWS, out[i][row]);
        }
    }
}

/* Ask for the tokens of the next tile, row by row: share `part` of `parts`. */
static void ask_ahead(const float *const *token, int32_t dim, int32_t part, int32_t parts)
{
    const int32_t end = TOKENS * (part + 1) / parts;
    for (int32_t j = TOKENS * part / parts; token && j < end; j++) {
        for (int32_t i = 0; i < dim; i += 2 * LINE / (int32_t)sizeof(float)) {
            __builtin_prefetch(token[j] + i, 0, 2);
        }
    }
}

void tv_amx_scores(int32_t rows, int32_t dim, const char *queries, const float *const token[TOKENS],
                   const float *const *ahead, float *s)
{
    char keys[PACKED * TILE] __attribute__((aligned(64)));
    const int64_t tile = (int64_t)tv_cpu_amx_bytes(ROWS, dim);
    const int32_t parts = (rows + ROWS - 1) / ROWS * (dim / CHUNK);
    int32_t part = 0;
    _tile_loadconfig(&tv_amx_whole_tiles);
    for (int32_t at = 0; at < dim; at += CHUNK) {
        const char *query = queries + (int64_t)at / STEP * 3 * TILE;
        pack_keys(token, at, keys);
        for (int32_t r = 0; r < rows; r += ROWS, query += tile) {
            score_tiles(at == 0, query, keys, s + r * TOKENS);
            ask_ahead(ahead, dim, part++, parts);
        }
    }
    _tile_release();
    for (int32_t r = 0; r < rows; r += ROWS) {
        turn_scores(s + r * TOKENS);
    }
}

/* Pieces of the probabilities: packed[step][piece][row][32 tokens]; missing rows stay as they are.
 */
static void pack_probabilities(int32_t rows, const float *p, char *packed)
{
    for (int32_t r = 0; r < rows; r++) {
        for (int step = 0; step < 2; step++) {
            __m512i low[3], high[3];
            tv_amx_split(_mm512_loadu_ps(p + r * TOKENS + step * STEP), low);
            tv_amx_split(_mm512_loadu_ps(p + r * TOKENS + step * STEP + 16), high);
            for (int part = 0; part < 3; part++) {
                _mm512_store_si512(packed + (step * 3 + part) * TILE + r * LINE,
                                   tv_amx_pair(low[part], high[part]));
            }
        }
    }
    PUBLISH();
}

/* The same with the loaded tile as second operand. */
#define BY1(sum, from, a)                                                                          \
    do {                                                                                           \
        _tile_loadd(4, from, LINE);                                                                \
        _tile_dpbf16ps(sum, a, 4);                                                                 \
    } while (0)
#define BY2(sum, from, a, b)                                                                       \
    do {                                                                                           \
        BY1(sum, from, a);                                                                         \
        _tile_dpbf16ps(sum, b, 4);                                                                 \
    } while (0)
#define BY3(sum, from, a, b, c)                                                                    \
    do {                                                                                           \
        BY2(sum, from, a, b);                                                                      \
        _tile_dpbf16ps(sum, c, 4);                                                                 \
    } while (0)

/* sums[row][64 of latent] */
static void value_tiles(const char *p, const char *v, float sums[ROWS * GROUP * ROWS])
{
    const int64_t next = 2 * 3 * TILE; /* 16 of latent */
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int step = 0; step < 2; step++, p += 3 * TILE, v += 3 * TILE) {
        _tile_loadd(5, p, LINE);
        _tile_loadd(6, p + TILE, LINE);
        _tile_loadd(7, p + 2 * TILE, LINE);
        BY1(0, v + 2 * TILE, 5);
        BY1(1, v + 2 * TILE + next, 5);
        BY1(2, v + 2 * TILE + 2 * next, 5);
        BY1(3, v + 2 * TILE + 3 * next, 5);
        BY2(0, v + TILE, 6, 5);
        BY2(1, v + TILE + next, 6, 5);
        BY2(2, v + TILE + 2 * next, 6, 5);
        BY2(3, v + TILE + 3 * next, 6, 5);
        BY3(0, v, 7, 6, 5);
        BY3(1, v + next, 7, 6, 5);
        BY3(2, v + 2 * next, 7, 6, 5);
        BY3(3, v + 3 * next, 7, 6, 5);
    }
    _tile_stored(0, sums, GROUP * LINE);
    _tile_stored(1, sums + ROWS, GROUP * LINE);
    _tile_stored(2, sums + 2 * ROWS, GROUP * LINE);
    _tile_stored(3, sums + 3 * ROWS, GROUP * LINE);
}

static void add_values(int32_t rows, int32_t latent, const float *sums, const float *rescale,
                       float *o)
{
    for (int32_t r = 0; r < rows; r++) {
        const __m512 factor = _mm512_set1_ps(rescale[r]);
        UNROLL
        for (int i = 0; i < GROUP; i++) {
            float *to = o + (int64_t)r * latent + i * ROWS;
            __m512 sum = _mm512_load_ps(sums + (r * GROUP + i) * ROWS);
            _mm512_storeu_ps(to, _mm512_fmadd_ps(_mm512_loadu_ps(to), factor, sum));
        }
    }
}

void tv_amx_values(int32_t rows, int32_t latent, const float *p, const float *const token[TOKENS],
                   const float *rescale, char *packed, float *o)
{
    char values[PACKED * TILE] __attribute__((aligned(64)));
    /* Two buffers: one tile's sums are added while the unit works on the next. */
    float sums[2][ROWS * GROUP * ROWS] __attribute__((aligned(64)));
    const int32_t tiles = (rows + ROWS - 1) / ROWS;
    for (int32_t t = 0; t < tiles; t++) {
        int32_t count = rows - t * ROWS < ROWS ? rows - t * ROWS : ROWS;
        pack_probabilities(count, p + t * ROWS * TOKENS, packed + t * 2 * 3 * TILE);
    }
    _tile_loadconfig(&tv_amx_whole_tiles);
    for (int32_t at = 0; at < latent; at += CHUNK) {
        pack_values(token, at, values);
        for (int32_t t = 0; t <= tiles; t++) {
            if (t < tiles) {
                value_tiles(packed + t * 2 * 3 * TILE, values, sums[t % 2]);
            }
            if (t > 0) {
                int32_t r = (t - 1) * ROWS;
                add_values(rows - r < ROWS ? rows - r : ROWS, latent, sums[(t - 1) % 2],
                           rescale + r, o + (int64_t)r * latent + at);
            }
        }
    }
    _tile_release();
}
