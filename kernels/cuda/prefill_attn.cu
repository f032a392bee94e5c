/*
 * prefill_attn.cu - expanded causal attention for prefill and extend.
 *
 * The sequence is taken in segments of SEGMENT tokens, so that the workspace does not grow with the
 * context: keys and values of a segment are expanded for all heads (linear.cuh), then every block,
 * 64 rows of one head, goes on with its online softmax over the segment's tiles of 64 tokens. A
 * row's state waits in `out` and the workspace between segments, unchanged, so a row's result
 * depends on its position and the cache alone. Products and sums are f32.
 */
#include "launch.cuh"
#include "linear_launch.cuh"
#include "ops.h"

#define THREADS      256
#define ROWS         64 /* of a block */
#define TOKENS       64 /* of a tile */
#define DEPTH        32 /* of keys in shared memory at a time */
#define PAD          4
#define SEGMENT      4096
#define VALUES_MAX   256 /* v_dim */
#define VALUE_FLOATS 2048

/* What the kernel below needs of the launch beside the arguments. */
struct prefill_segment {
    const float *keys;   /* [heads, SEGMENT, nope] */
    const float *values; /* [heads, SEGMENT, v] */
    float *top, *total;  /* [rows, heads]: running maximum and sum */
    int32_t first, end;  /* tokens of the segment */
};

/* Keys or values of a segment: rows of the cache times the up-projection of every head. */
template <typename KV> struct expand_problem {
    typedef KV X;
    static constexpr bool paired = false, has_late = false;
    const char *w;
    const KV *pages;
    const int32_t *page_table;
    float *y;
    int64_t w_group_bytes;
    int32_t row_dim, page_size, first, rows, tiles, groups, n, k;
    bool vector;

    struct tile {
        const void *w[1];
        float *y;
        int32_t token, n, k, rows;
    };

    int64_t items_bound(int32_t width) const
    {
        return (int64_t)tiles * linear_blocks(n, width) * groups;
    }

    __device__ __forceinline__ void early(int32_t width, struct stream_items *ret) const
    {
        stream_dense(tiles, groups, n, width, ret);
    }

    __device__ __forceinline__ void late(int32_t, struct stream_items *) const
    {
    }

    __device__ __forceinline__ void place(int32_t item, int32_t width, int32_t *tile,
                                          int32_t *group, int32_t *column) const
    {
        stream_dense_place(item, tiles, n, width, tile, group, column);
    }

    __device__ __forceinline__ bool open(tile &t, int32_t index, int32_t group,
                                         int32_t block_rows) const
    {
        int32_t at = index * block_rows;
        t.w[0] = w + group * w_group_bytes;
        t.y = y + ((int64_t)group * SEGMENT + at) * n;
        t.token = first + at;
        t.n = n;
        t.k = k;
        t.rows = min(block_rows, rows - at);
        return true;
    }

    __device__ __forceinline__ const KV *x_row(const tile &t, int32_t row) const
    {
        int32_t token = t.token + row;
        int64_t page = page_table[token / page_size];
        return pages + (page * page_size + token % page_size) * row_dim;
    }

    __device__ __forceinline__ void store(const tile &t, int32_t row, int32_t column,
                                          float value) const
    {
        t.y[(int64_t)row * n + column] = value;
    }
};

/* Element d of the key of a token of the segment. */
TV_DEVICE float key_element(const struct tv_prefill_attn &a, const struct prefill_segment &s,
                            int32_t head, int32_t token, int32_t d)
{
    if (d < a.nope_dim) {
        return s.keys[((int64_t)head * SEGMENT + token - s.first) * a.nope_dim + d];
    }
    int64_t page = a.page_table[token / a.page_size];
    int64_t row = page * a.page_size + token % a.page_size;
    return load_f32(a.kv_pages, a.kv_dtype,
                    row * (a.latent_dim + a.rope_dim) + a.latent_dim + d - a.nope_dim);
}

/* Scores of a tile: score[i][j] of row 4 * (thread / 16) + i and token 4 * (thread % 16) + j. */
TV_DEVICE void tile_scores(const struct tv_prefill_attn &a, const struct prefill_segment &s,
                           int32_t row0, int32_t token0, float (*q)[ROWS + PAD],
                           float (*keys)[TOKENS + PAD], float (&score)[4][4])
{
    int32_t head = (int32_t)blockIdx.y, thread = (int32_t)threadIdx.x;
    int32_t dim = a.nope_dim + a.rope_dim, ty = thread / 16, tx = thread % 16;
    for (int32_t d0 = 0; d0 < dim; d0 += DEPTH) {
        __syncthreads();
#pragma unroll
        for (int32_t i = 0; i < ROWS * DEPTH / THREADS; i++) {
            int32_t e = thread + i * THREADS, d = e % DEPTH, at = e / DEPTH;
            bool deep = d0 + d < dim;
            q[d][at] = deep && row0 + at < a.rows
                           ? a.q[((int64_t)(row0 + at) * a.heads + head) * dim + d0 + d]
                           : 0.0f;
            keys[d][at] =
                deep && token0 + at < s.end ? key_element(a, s, head, token0 + at, d0 + d) : 0.0f;
        }
        __syncthreads();
#pragma unroll
        for (int32_t d = 0; d < DEPTH; d++) {
            float4 x = *(const float4 *)&q[d][4 * ty], y = *(const float4 *)&keys[d][4 * tx];
            const float rows[4] = {x.x, x.y, x.z, x.w}, tokens[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
            for (int i = 0; i < 4; i++) {
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    score[i][j] = fmaf(rows[i], tokens[j], score[i][j]);
                }
            }
        }
    }
}

/* Maximum or sum over the 16 threads that share rows; the same bits in each. */
template <bool MAXIMUM> TV_DEVICE float row_reduce(float x)
{
    for (int i = 8; i > 0; i >>= 1) {
        float y = __shfl_xor_sync(0xffffffffu, x, i);
        x = MAXIMUM ? fmaxf(x, y) : x + y;
    }
    return x;
}

/*
 * Online softmax over the tile: scores become probabilities in p[token][row]; alpha rescales what
 * was summed before. A row that sees none of the tile is left as it is: its alpha is 1, its
 * probabilities are 0.
 */
TV_DEVICE void tile_softmax(float scale, int32_t position0, int32_t token0, float (&score)[4][4],
                            float (&top)[4], float (&total)[4], float (&alpha)[4],
                            float (*p)[ROWS + PAD])
{
    int32_t ty = (int32_t)threadIdx.x / 16, tx = (int32_t)threadIdx.x % 16;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        float most = -CUDART_INF_F, sum = 0.0f;
#pragma unroll
        for (int j = 0; j < 4; j++) {
            bool seen = token0 + 4 * tx + j <= position0 + 4 * ty + i;
            score[i][j] = seen ? score[i][j] * scale : -CUDART_INF_F;
            most = fmaxf(most, score[i][j]);
        }
        most = fmaxf(top[i], row_reduce<true>(most));
        alpha[i] = expf(top[i] - most);
        top[i] = most;
#pragma unroll
        for (int j = 0; j < 4; j++) {
            score[i][j] = expf(score[i][j] - most);
            sum += score[i][j];
            p[4 * tx + j][4 * ty + i] = score[i][j];
        }
        total[i] = fmaf(total[i], alpha[i], row_reduce<false>(sum));
    }
}

/* sum[i][j] += p . values for row 4 * (thread / 16) + i and value thread % 16 + 16 * j. */
template <int C>
TV_DEVICE void tile_values(const struct tv_prefill_attn &a, const struct prefill_segment &s,
                           int32_t token0, const float (*p)[ROWS + PAD], float *values,
                           float (&sum)[4][C])
{
    constexpr int32_t WIDTH = 16 * C, STEP = VALUE_FLOATS / WIDTH;
    int32_t head = (int32_t)blockIdx.y, thread = (int32_t)threadIdx.x;
    int32_t ty = thread / 16, tx = thread % 16;
    for (int32_t t0 = 0; t0 < TOKENS; t0 += STEP) {
        __syncthreads();
#pragma unroll
        for (int32_t i = 0; i < VALUE_FLOATS / THREADS; i++) {
            int32_t e = thread + i * THREADS, c = e % WIDTH, token = token0 + t0 + e / WIDTH;
            values[e] = c < a.v_dim && token < s.end
                            ? s.values[((int64_t)head * SEGMENT + token - s.first) * a.v_dim + c]
                            : 0.0f;
        }
        __syncthreads();
#pragma unroll
        for (int32_t t = 0; t < STEP; t++) {
            float4 x = *(const float4 *)&p[t0 + t][4 * ty];
            const float rows[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
            for (int j = 0; j < C; j++) {
                float value = values[t * WIDTH + tx + 16 * j];
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    sum[i][j] = fmaf(rows[i], value, sum[i][j]);
                }
            }
        }
    }
}

/* C: values a thread holds of a row, 16 * C >= v_dim. */
template <int C>
static __global__ void __launch_bounds__(THREADS)
    prefill_attn(const __grid_constant__ struct tv_prefill_attn a,
                 const __grid_constant__ struct prefill_segment s)
{
    __shared__ __align__(16) float q[DEPTH][ROWS + PAD], keys[DEPTH][TOKENS + PAD];
    __shared__ __align__(16) float p[TOKENS][ROWS + PAD], values[VALUE_FLOATS];
    int32_t row0 = (int32_t)blockIdx.x * ROWS, head = (int32_t)blockIdx.y;
    int32_t ty = (int32_t)threadIdx.x / 16, tx = (int32_t)threadIdx.x % 16;
    ptx_launch_dependents();
    ptx_wait_dependence();
    /* One past the last token that a row of this block sees. */
    int32_t seen = a.start + min(row0 + ROWS, a.rows);
    if (s.first >= seen) {
        return;
    }
    float top[4], total[4], alpha[4], sum[4][C];
    float *out[4];
    int64_t state[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        int32_t row = min(row0 + 4 * ty + i, a.rows - 1);
        state[i] = (int64_t)row * a.heads + head;
        out[i] = a.out + state[i] * a.v_dim;
        top[i] = s.first > 0 ? s.top[state[i]] : -CUDART_INF_F;
        total[i] = s.first > 0 ? s.total[state[i]] : 0.0f;
#pragma unroll
        for (int j = 0; j < C; j++) {
            int32_t c = tx + 16 * j;
            sum[i][j] = s.first > 0 && c < a.v_dim ? out[i][c] : 0.0f;
        }
    }
    for (int32_t token0 = s.first; token0 < min(s.end, seen); token0 += TOKENS) {
        float score[4][4] = {};
        tile_scores(a, s, row0, token0, q, keys, score);
        tile_softmax(a.softmax_scale, a.start + row0, token0, score, top, total, alpha, p);
#pragma unroll
        for (int i = 0; i < 4; i++) {
#pragma unroll
            for (int j = 0; j < C; j++) {
                sum[i][j] *= alpha[i];
            }
        }
        tile_values(a, s, token0, p, values, sum);
    }
    bool last = s.end >= seen;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        if (row0 + 4 * ty + i >= a.rows) {
            continue;
        }
#pragma unroll
        for (int j = 0; j < C; j++) {
            if (tx + 16 * j < a.v_dim) {
                out[i][tx + 16 * j] = last ? sum[i][j] / total[i] : sum[i][j];
            }
        }
        if (tx == 0) {
            s.top[state[i]] = top[i];
            s.total[state[i]] = total[i];
        }
    }
}

static int args_check(const struct tv_prefill_attn *a)
{
    bool page =
        a->page_size == 16 || a->page_size == 32 || a->page_size == 64 || a->page_size == 128;
    bool shape = a->rows >= 0 && a->start >= 0 && a->rows <= INT32_MAX - SEGMENT - a->start &&
                 a->heads >= 1 && a->heads <= TV_HEADS_MAX && a->nope_dim >= 0 &&
                 a->rope_dim >= 0 && a->nope_dim + a->rope_dim >= 1 && a->v_dim >= 1 &&
                 a->latent_dim >= 1 && a->head_first == 0 && a->head_count == 0;
    return page && shape && a->kv_dtype != TV_F16 ? 0 : -EINVAL;
}

/* Floats of keys, of values, and of one of the two state arrays; each a multiple of 64. */
static void workspace_cut(const struct tv_prefill_attn *a, size_t *keys, size_t *values,
                          size_t *state)
{
    size_t heads = (size_t)a->heads * SEGMENT;
    *keys = (heads * (size_t)a->nope_dim + 63) / 64 * 64;
    *values = (heads * (size_t)a->v_dim + 63) / 64 * 64;
    *state = ((size_t)a->rows * (size_t)a->heads + 63) / 64 * 64;
}

size_t tv_cuda_prefill_attn_workspace(const struct tv_kernels *k,
                                      const struct tv_prefill_attn *args)
{
    size_t keys, values, state;
    (void)k;
    if (args_check(args) < 0) {
        return 0;
    }
    workspace_cut(args, &keys, &values, &state);
    return (keys + values + 2 * state) * sizeof(float);
}

template <typename KV>
static int expand(const struct tv_kernels *k, const struct tv_prefill_attn *a,
                  const struct prefill_segment *s, const void *w, int32_t n, float *y)
{
    struct expand_problem<KV> p;
    size_t element = tv_dtype_size(a->w_dtype);
    p.w = (const char *)w;
    p.pages = (const KV *)a->kv_pages;
    p.page_table = a->page_table;
    p.y = y;
    p.w_group_bytes = (int64_t)n * a->latent_dim * (int64_t)element;
    p.row_dim = a->latent_dim + a->rope_dim;
    p.page_size = a->page_size;
    p.first = s->first;
    p.rows = s->end - s->first;
    p.n = n;
    p.k = a->latent_dim;
    p.vector = (uintptr_t)a->kv_pages % 16 == 0 && p.row_dim * (int64_t)sizeof(KV) % 16 == 0;
    bool mma = linear_uses_mma(a->w_dtype, p.k);
    if (mma && (uintptr_t)w % 16 != 0) {
        return -EINVAL;
    }
    int32_t block_rows = linear_block_rows(mma, false, a->heads, p.rows, n);
    p.tiles = (int32_t)linear_blocks(p.rows, block_rows);
    p.groups = a->heads;
    return linear_launch(k, p, a->w_dtype, block_rows, (uint32_t)p.tiles, a->heads, n, p.k);
}

static int expand_segment(const struct tv_kernels *k, const struct tv_prefill_attn *a,
                          const struct prefill_segment *s)
{
    float *keys = (float *)s->keys, *values = (float *)s->values;
    int rc = 0;
    if (a->nope_dim > 0) {
        rc = a->kv_dtype == TV_F32 ? expand<float>(k, a, s, a->k_up, a->nope_dim, keys)
                                   : expand<__nv_bfloat16>(k, a, s, a->k_up, a->nope_dim, keys);
    }
    if (rc == 0) {
        rc = a->kv_dtype == TV_F32 ? expand<float>(k, a, s, a->v_up, a->v_dim, values)
                                   : expand<__nv_bfloat16>(k, a, s, a->v_up, a->v_dim, values);
    }
    return rc;
}

int tv_cuda_prefill_attn_prepare(void)
{
    int rc = linear_prepare<struct expand_problem<float>>();
    return rc < 0 ? rc : linear_prepare<struct expand_problem<__nv_bfloat16>>();
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
    size_t key_floats, value_floats, state_floats;
    workspace_cut(args, &key_floats, &value_floats, &state_floats);
    float *workspace = (float *)args->workspace;
    struct prefill_segment s;
    s.keys = workspace;
    s.values = workspace + key_floats;
    s.top = workspace + key_floats + value_floats;
    s.total = s.top + state_floats;
    dim3 grid(linear_blocks(args->rows, ROWS), (uint32_t)args->heads);
    cudaStream_t stream = tv_cuda_stream(k);
    int32_t tokens = args->rows > 0 ? args->start + args->rows : 0;
    for (s.first = 0; rc == 0 && s.first < tokens; s.first += SEGMENT) {
        s.end = tokens - s.first < SEGMENT ? tokens : s.first + SEGMENT;
        rc = expand_segment(k, args, &s);
        if (rc < 0) {
            return rc;
        }
        if (args->v_dim <= 64) {
            rc = launch(prefill_attn<4>, grid, THREADS, 0, stream, *args, s);
        } else if (args->v_dim <= 128) {
            rc = launch(prefill_attn<8>, grid, THREADS, 0, stream, *args, s);
        } else {
            rc = launch(prefill_attn<16>, grid, THREADS, 0, stream, *args, s);
        }
    }
    return rc;
}
