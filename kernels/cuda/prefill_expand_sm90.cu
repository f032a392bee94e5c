/*
 * prefill_expand_sm90.cu - keys and values of a prefill segment on Hopper: the latents of many
 * tokens times k_up and v_up of all heads. For sm_90a alone; linear_sm90.cuh computes.
 *
 * One launch makes both, from rows that another has gathered from their pages. A bf16 latent is its
 * own first piece, so one product is exact. The bits of linear_wide. Refuses (-ENOTSUP) rows of
 * f32, other weights than bf16, and few tokens.
 */
#define TV_CUDA_SM90 1 /* that this file is built */

#include "linear_sm90.h"

#include "linear_sm90.cuh"
#include "linear_sm90_launch.cuh"
#include "prefill_attn.cuh"

#define TOKENS_LEAST 256

/* Of keys or of values. */
struct expand_part {
    CUtensorMap w_map;
    char *tiles; /* of the first head: at its keys or at its values */
    int32_t n, width, low;
};

struct expand_sm90 {
    static constexpr int pieces = 1;
    static constexpr bool paired = false, made = false;
    static constexpr int32_t second_map = 0, groups = 1;
    CUtensorMap x_map;
    struct expand_part part[2];
    const float *scales;
    int32_t tokens, k, heads, box_rows, tile_rows, row_tiles;

    struct tile : sm90_tile {
        char *tiles; /* of the head */
        int32_t first, n, width, low;
    };

    __device__ __forceinline__ bool find(int32_t item, tile *t) const
    {
        int32_t rest = item / row_tiles, head = rest % heads;
        const struct expand_part &mine = rest < heads ? part[0] : part[1];
        t->w_map = &mine.w_map;
        t->w_row = t->x_group = 0;
        t->w_group = head;
        t->first = t->x_row = item % row_tiles * tile_rows;
        t->rows = min(tile_rows, tokens - t->x_row);
        t->k = k;
        t->tiles =
            mine.tiles + (int64_t)head * (PREFILL_SEGMENT / TILE_TOKENS) * (int64_t)TILE_BYTES;
        t->n = mine.n;
        t->width = mine.width;
        t->low = mine.low;
        return rest < 2 * heads;
    }

    __device__ __forceinline__ void store(const tile &t, int32_t row, int32_t column,
                                          float2 sums) const
    {
        int32_t token = t.first + row, at = token / TILE_TOKENS, in_tile = token % TILE_TOKENS;
        if (column < t.n) {
            float scale = scales[(at * 3 + SCALE_UP) * TILE_TOKENS + in_tile];
            char *high = t.tiles + (int64_t)at * TILE_BYTES;
            tile_store_pair(high + tile_offset(t.width, in_tile, column), t.low, sums.x * scale,
                            sums.y * scale);
        }
    }
};

/* Token of the segment -> its latent. */
struct expand_rows {
    const __nv_bfloat16 *pages;
    const int32_t *page_table;
    int32_t first, page_size, row_dim;

    __device__ __forceinline__ const __nv_bfloat16 *row(int32_t at) const
    {
        int32_t token = first + at;
        int64_t page = page_table[token / page_size];
        return pages + (page * page_size + token % page_size) * row_dim;
    }
};

static bool takes(const struct tv_prefill_attn *a, int32_t tokens)
{
    return a->kv_dtype == TV_BF16 && tokens >= TOKENS_LEAST && a->nope_dim > 0 &&
           a->nope_dim % 2 == 0 && a->v_dim % 2 == 0 && a->rope_dim % 2 == 0 &&
           (uintptr_t)a->k_up % 16 == 0 && (uintptr_t)a->v_up % 16 == 0 &&
           (uintptr_t)a->kv_pages % 4 == 0;
}

static int part_make(const struct tv_cuda *cuda, const struct tv_prefill_attn *a, const void *w,
                     int32_t n, struct expand_part *ret)
{
    ret->n = n;
    return sm90_encode(cuda, w, a->latent_dim, n, a->heads, a->latent_dim,
                       (int64_t)n * a->latent_dim, SM90_WEIGHTS / 2, &ret->w_map);
}

int tv_prefill_expand_sm90_prepare(void)
{
    return sm90_prepare<struct expand_sm90>();
}

int tv_prefill_expand_sm90(const struct tv_kernels *k, const struct tv_prefill_attn *args,
                           const struct prefill_segment *segment)
{
    const struct tv_cuda *cuda = (const struct tv_cuda *)k->impl;
    struct expand_sm90 p = {};
    int32_t tokens = segment->end - segment->first, padded = (args->latent_dim + 31) / 32 * 32;
    bool low = prefill_has_low(*args);
    if (cuda->scratch == NULL || !takes(args, tokens) ||
        (int64_t)tokens * padded * 2 > (int64_t)cuda->scratch_bytes) {
        return -ENOTSUP;
    }
    p.tile_rows = sm90_tile_rows(cuda->sm_count, sm90_ring<1>::tile_rows, tokens, 2 * args->heads);
    p.box_rows = p.tile_rows / sm90_ring<1>::sums;
    p.row_tiles = (tokens + p.tile_rows - 1) / p.tile_rows;
    p.tokens = tokens;
    p.k = args->latent_dim;
    p.heads = args->heads;
    p.scales = segment->scales;
    p.part[0].tiles = (char *)segment->expanded;
    p.part[0].width = TILE_KEY;
    p.part[0].low = low ? TILE_K_LOW : 0;
    p.part[1].tiles = (char *)segment->expanded + TILE_V;
    p.part[1].width = TILE_VALUE;
    p.part[1].low = low ? TILE_V_LOW : 0;
    int rc = part_make(cuda, args, args->k_up, args->nope_dim, &p.part[0]);
    rc = rc < 0 ? rc : part_make(cuda, args, args->v_up, args->v_dim, &p.part[1]);
    rc = rc < 0 ? rc
                : sm90_encode(cuda, cuda->scratch, padded, tokens, 1, padded,
                              (int64_t)tokens * padded, p.box_rows, &p.x_map);
    struct expand_rows rows = {(const __nv_bfloat16 *)args->kv_pages, args->page_table,
                               segment->first, args->page_size, args->latent_dim + args->rope_dim};
    rc = rc < 0 ? rc
                : sm90_rows_launch<struct expand_rows, 1>(k, rows, tokens, args->latent_dim, 0,
                                                          cuda->scratch);
    return rc < 0 ? rc : sm90_launch(k, p, (int64_t)p.row_tiles * 2 * args->heads);
}
