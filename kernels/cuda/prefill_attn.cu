/*
 * prefill_attn.cu - expanded causal attention for prefill and extend: which form, and its launches.
 *
 * The sequence is taken in segments of PREFILL_SEGMENT tokens, so that the workspace does not grow
 * with the context: keys and values of a segment are expanded for all heads (linear.cuh), once for
 * all rows of the call, then every block goes on with its rows' online softmax over the segment. A
 * row's state waits in `out` and the workspace between segments, unchanged, so a row's result
 * depends on its position and the cache alone.
 */
#include "launch.cuh"
#include "linear_launch.cuh"
#include "linear_sm90.h"
#include "ops.h"
#include "prefill_attn_any.cuh"
#include "prefill_attn_mma.cuh"
#include "prefill_attn_tiles.cuh"

#define VALUES_MAX   256 /* v_dim */
#define BLOCKS_LEAST 96  /* fewer large blocks leave most of a device idle */

/* Keys or values of a segment: rows of the cache times the up-projection of every head. */
template <typename KV, bool TILES> struct expand_problem {
    typedef KV X;
    static constexpr bool paired = false, streamed = false;
    const char *w;
    const KV *pages;
    const int32_t *page_table;
    char *y;             /* f32 [heads, SEGMENT, n], or tiles: at the keys or at the values */
    const float *scales; /* tiles alone */
    int64_t w_group_bytes;
    int32_t row_dim, page_size, first, rows, n, k;
    int32_t width, low; /* of a tile's row in halves; bytes from a high half to its low one, or 0 */
    bool vector;

    struct tile {
        const void *w[1];
        char *y;
        int32_t at, n, k, rows;
    };

    __device__ __forceinline__ bool open(tile &t, int32_t index, int32_t group,
                                         int32_t block_rows) const
    {
        t.at = index * block_rows;
        t.w[0] = w + group * w_group_bytes;
        t.y = y + (int64_t)group * (TILES ? (int64_t)(PREFILL_SEGMENT / TILE_TOKENS) * TILE_BYTES
                                          : (int64_t)PREFILL_SEGMENT * n * (int64_t)sizeof(float));
        t.n = n;
        t.k = k;
        t.rows = min(block_rows, rows - t.at);
        return true;
    }

    __device__ __forceinline__ const KV *x_row(const tile &t, int32_t row) const
    {
        int32_t token = first + t.at + row;
        int64_t page = page_table[token / page_size];
        return pages + (page * page_size + token % page_size) * row_dim;
    }

    __device__ __forceinline__ void store(const tile &t, int32_t row, int32_t column,
                                          float value) const
    {
        uint32_t at = (uint32_t)(t.at + row);
        if constexpr (TILES) {
            uint32_t tile = at / TILE_TOKENS, in_tile = at % TILE_TOKENS;
            float scale = scales[(tile * 3 + SCALE_UP) * TILE_TOKENS + in_tile];
            char *high = t.y + (int64_t)tile * TILE_BYTES;
            tile_store(high + tile_offset(width, (int32_t)in_tile, column), low, value * scale);
        } else {
            ((float *)t.y)[(int64_t)at * n + column] = value;
        }
    }
};

static int args_check(const struct tv_prefill_attn *a)
{
    bool page =
        a->page_size == 16 || a->page_size == 32 || a->page_size == 64 || a->page_size == 128;
    bool shape = a->rows >= 0 && a->start >= 0 &&
                 a->rows <= INT32_MAX - PREFILL_SEGMENT - a->start && a->heads >= 1 &&
                 a->heads <= TV_HEADS_MAX && a->nope_dim >= 0 && a->rope_dim >= 0 &&
                 a->nope_dim + a->rope_dim >= 1 && a->v_dim >= 1 && a->latent_dim >= 1 &&
                 a->key_first == 0 && a->key_count == 0;
    bool types = tv_args_dtype_known(a->w_dtype) && tv_args_dtype_kv(a->kv_dtype) &&
                 tv_args_products_known(a->products);
    return page && shape && types ? 0 : -EINVAL;
}

/* Bytes of the workspace's parts; each a multiple of 256. */
struct workspace_parts {
    size_t expanded, values, scales, largest, state;
};

static size_t padded(size_t bytes)
{
    return (bytes + 255) / 256 * 256;
}

static void workspace_cut(const struct tv_prefill_attn *a, struct workspace_parts *ret)
{
    size_t heads = (size_t)a->heads * PREFILL_SEGMENT, f = sizeof(float);
    struct workspace_parts parts = {};
    if (prefill_uses_tiles(a)) {
        parts.expanded = padded(heads / TILE_TOKENS * TILE_BYTES);
        parts.scales = padded(PREFILL_SEGMENT / TILE_TOKENS * SCALE_BYTES);
        parts.largest = padded(LARGEST_PARTS * f);
    } else {
        parts.expanded = padded(heads * (size_t)a->nope_dim * f);
        parts.values = padded(heads * (size_t)a->v_dim * f);
    }
    parts.state = padded((size_t)a->rows * (size_t)a->heads * f);
    *ret = parts;
}

size_t tv_cuda_prefill_attn_workspace(const struct tv_kernels *k,
                                      const struct tv_prefill_attn *args)
{
    struct workspace_parts parts;
    (void)k;
    if (args_check(args) < 0) {
        return 0;
    }
    workspace_cut(args, &parts);
    return parts.expanded + parts.values + parts.scales + parts.largest + 2 * parts.state;
}

template <typename KV, bool TILES>
static int expand(const struct tv_kernels *k, const struct tv_prefill_attn *a,
                  const struct prefill_segment *s, bool keys)
{
    struct expand_problem<KV, TILES> p;
    const void *w = keys ? a->k_up : a->v_up;
    size_t element = tv_dtype_size(a->w_dtype);
    p.n = keys ? a->nope_dim : a->v_dim;
    p.w = (const char *)w;
    p.pages = (const KV *)a->kv_pages;
    p.page_table = a->page_table;
    p.scales = s->scales;
    p.y = keys                ? (char *)s->expanded
          : s->scales == NULL ? (char *)s->values
                              : (char *)s->expanded + TILE_V;
    p.width = keys ? TILE_KEY : TILE_VALUE;
    p.low = !prefill_has_low(*a) ? 0 : keys ? TILE_K_LOW : TILE_V_LOW;
    p.w_group_bytes = (int64_t)p.n * a->latent_dim * (int64_t)element;
    p.row_dim = a->latent_dim + a->rope_dim;
    p.page_size = a->page_size;
    p.first = s->first;
    p.rows = s->end - s->first;
    p.k = a->latent_dim;
    p.vector = (uintptr_t)a->kv_pages % 16 == 0 && p.row_dim * (int64_t)sizeof(KV) % 16 == 0;
    bool mma = linear_uses_mma(a->w_dtype, p.k);
    if (mma && (uintptr_t)w % 16 != 0) {
        return -EINVAL;
    }
    int32_t block_rows = mma ? WIDE_ROWS : LINEAR_ANY;
    uint32_t tiles = linear_blocks(p.rows, block_rows);
    return linear_launch(k, p, a->products, a->w_dtype, block_rows, tiles, a->heads, p.n, p.k);
}

static int expand_either(const struct tv_kernels *k, const struct tv_prefill_attn *a,
                         const struct prefill_segment *s, bool keys)
{
    if (s->scales == NULL) {
        return a->kv_dtype == TV_F32 ? expand<float, false>(k, a, s, keys)
                                     : expand<__nv_bfloat16, false>(k, a, s, keys);
    }
    return a->kv_dtype == TV_F32 ? expand<float, true>(k, a, s, keys)
                                 : expand<__nv_bfloat16, true>(k, a, s, keys);
}

static int expand_segment(const struct tv_kernels *k, const struct tv_prefill_attn *a,
                          const struct prefill_segment *s, const float *largest)
{
    cudaStream_t stream = tv_cuda_stream(k);
    int rc = 0;
    if (s->scales != NULL) {
        int32_t tokens = prefill_tiles(s->end - s->first) * TILE_TOKENS;
        dim3 grid((uint32_t)(tokens / TOKEN_WARPS), a->heads >= 16 ? 4 : 1);
        prefill_tokens<<<grid, TOKEN_WARPS * 32, 0, stream>>>(*a, *s, largest, (float *)s->scales,
                                                              (char *)s->expanded);
        rc = tv_cuda_errno(cudaGetLastError());
    }
    const struct tv_cuda *cuda = (const struct tv_cuda *)k->impl;
    bool mma = linear_uses_mma(a->w_dtype, a->latent_dim);
    if (rc == 0 && s->scales != NULL && mma && !cuda->portable) {
        rc = tv_prefill_expand_sm90(k, a, s);
        if (rc != -ENOTSUP) {
            return rc;
        }
        rc = 0;
    }
    if (rc == 0 && a->nope_dim > 0) {
        rc = expand_either(k, a, s, true);
    }
    return rc < 0 ? rc : expand_either(k, a, s, false);
}

template <int WARPS, enum mma_low LOW> static int mma_prepare(void)
{
    constexpr int BYTES = mma_shape<LOW>::shared(WARPS);
    static_assert(BYTES <= TV_CUDA_SHARED_MAX, "fits every promised device");
    return tv_cuda_errno(cudaFuncSetAttribute((const void *)prefill_attn_mma<WARPS, LOW>,
                                              cudaFuncAttributeMaxDynamicSharedMemorySize, BYTES));
}

template <enum mma_low LOW> static int mma_prepare_both(void)
{
    int rc = mma_prepare<4, LOW>();
    return rc < 0 ? rc : mma_prepare<8, LOW>();
}

int tv_cuda_prefill_attn_prepare(const struct tv_cuda *cuda)
{
    int rc = cuda->portable ? 0 : tv_prefill_expand_sm90_prepare();
    rc = rc < 0 ? rc : linear_prepare<struct expand_problem<float, false>>();
    rc = rc < 0 ? rc : linear_prepare<struct expand_problem<__nv_bfloat16, false>>();
    rc = rc < 0 ? rc : linear_prepare<struct expand_problem<float, true>>();
    rc = rc < 0 ? rc : linear_prepare<struct expand_problem<__nv_bfloat16, true>>();
    rc = rc < 0 ? rc : mma_prepare<4, MMA_LOW_NONE>();
    rc = rc < 0 ? rc : mma_prepare_both<MMA_LOW_EXPANDED>();
    return rc < 0 ? rc : mma_prepare_both<MMA_LOW_ALL>();
}

template <int WARPS, enum mma_low LOW>
static void attend_launch(const struct tv_prefill_attn *a, const struct prefill_segment *segment,
                          cudaStream_t stream)
{
    struct prefill_segment s = *segment;
    dim3 grid(linear_blocks(a->rows, WARPS * 16), (uint32_t)a->heads);
    s.last_row = (int32_t)(grid.x - 1) * (WARPS * 16);
    prefill_attn_mma<WARPS, LOW>
        <<<grid, WARPS * 32, mma_shape<LOW>::shared(WARPS), stream>>>(*a, s);
}

template <enum mma_low LOW>
static void attend_lows(const struct tv_prefill_attn *a, const struct prefill_segment *s,
                        cudaStream_t stream)
{
    if (linear_blocks(a->rows, 128) * (int64_t)a->heads >= BLOCKS_LEAST) {
        attend_launch<8, LOW>(a, s, stream);
    } else {
        attend_launch<4, LOW>(a, s, stream);
    }
}

/* Without low halves registers are few enough for three small blocks, whose warps hide more. */
static void attend_tiles(const struct tv_prefill_attn *a, const struct prefill_segment *s,
                         cudaStream_t stream)
{
    if (!prefill_has_low(*a)) {
        attend_launch<4, MMA_LOW_NONE>(a, s, stream);
    } else if (a->kv_dtype == TV_F32) {
        attend_lows<MMA_LOW_ALL>(a, s, stream);
    } else {
        attend_lows<MMA_LOW_EXPANDED>(a, s, stream);
    }
}

static int attend(const struct tv_prefill_attn *a, const struct prefill_segment *s,
                  cudaStream_t stream)
{
    dim3 grid(linear_blocks(a->rows, ROWS), (uint32_t)a->heads);
    if (s->scales != NULL) {
        attend_tiles(a, s, stream);
    } else if (a->v_dim <= 64) {
        prefill_attn_any<4><<<grid, THREADS, 0, stream>>>(*a, *s);
    } else if (a->v_dim <= 128) {
        prefill_attn_any<8><<<grid, THREADS, 0, stream>>>(*a, *s);
    } else {
        prefill_attn_any<16><<<grid, THREADS, 0, stream>>>(*a, *s);
    }
    return tv_cuda_errno(cudaGetLastError());
}

int tv_cuda_prefill_attn(struct tv_kernels *k, const struct tv_prefill_attn *args)
{
    int rc = args_check(args);
    if (rc < 0) {
        return rc;
    }
    if (args->v_dim > VALUES_MAX) {
        return -ENOTSUP;
    }
    if (args->workspace_bytes < tv_cuda_prefill_attn_workspace(k, args)) {
        return -ENOSPC;
    }
    TV_CUDA_ENTER(k);
    struct workspace_parts parts;
    workspace_cut(args, &parts);
    char *workspace = (char *)args->workspace;
    struct prefill_segment s = {};
    s.expanded = workspace;
    workspace += parts.expanded;
    s.values = (float *)workspace;
    workspace += parts.values;
    s.scales = parts.scales > 0 ? (float *)workspace : NULL;
    workspace += parts.scales;
    float *largest = (float *)workspace;
    workspace += parts.largest;
    s.top = (float *)workspace;
    s.total = (float *)(workspace + parts.state);
    cudaStream_t stream = tv_cuda_stream(k);
    if (s.scales != NULL && args->rows > 0) {
        int64_t heads_latent = (int64_t)args->heads * args->latent_dim;
        prefill_largest<<<LARGEST_PARTS, LARGEST_THREADS, 0, stream>>>(
            args->k_up, heads_latent * args->nope_dim, args->v_up, heads_latent * args->v_dim,
            args->w_dtype, largest);
        rc = tv_cuda_errno(cudaGetLastError());
    }
    int32_t tokens = args->rows > 0 ? args->start + args->rows : 0;
    for (s.first = 0; rc == 0 && s.first < tokens; s.first += PREFILL_SEGMENT) {
        s.end = tokens - s.first < PREFILL_SEGMENT ? tokens : s.first + PREFILL_SEGMENT;
        rc = expand_segment(k, args, &s, largest);
        rc = rc < 0 ? rc : attend(args, &s, stream);
    }
    return rc;
}
