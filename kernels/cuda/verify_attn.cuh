/*
 * verify_attn.cuh - what the flash kernels of verify attention share: their parameters, the cut of
 * a launch into blocks, the tree mask of a block's nodes, and the end of a row.
 *
 * Owns no kernel. verify_attn.cu launches, verify_attn_bf16.cu and verify_attn_f32.cu compute,
 * verify_attn_combine.cu joins splits.
 */
#ifndef TV_KERNELS_CUDA_VERIFY_ATTN_CUH
#define TV_KERNELS_CUDA_VERIFY_ATTN_CUH

#include <math_constants.h>

#include "internal.h"
#include "plan.h"
#include "ptx.cuh"

struct tv_flash_params {
    const void *q;             /* [rows, heads, 576] */
    const void *kv;            /* [pages, page_size, 576] */
    const int32_t *page_table; /* [batch, max_pages] */
    const int32_t *prefix_len;
    const int32_t *node_count;
    const int32_t *parents;
    const int32_t *row_start;
    void *out;
    float *lse;
    float *partial_out;   /* [batch, partial_rows, 512], normalised within their split */
    float *partial_lse;   /* [batch, partial_rows], base 2; a row's splits lie side by side */
    int64_t partial_rows; /* of one request */
    int64_t pool_rows;    /* rows of kv */
    float scale_log2;     /* softmax_scale * log2(e) */
    int32_t heads;
    int32_t q_len;
    int32_t kv_len_max;
    int32_t max_pages;
    int32_t page_tiles_log2; /* log2(page_size / 16) */
    int32_t out_bf16;
    int32_t mask_words; /* 32-bit words of one node's ancestor set, ceil(q_len / 32) */
    struct tv_plan_device device;
};

/* Launchers, one per kernel file; blocks is tv_plan_bound's. */
int tv_flash_bf16_launch(const struct tv_cuda *cuda, const struct tv_flash_params *p, int32_t batch,
                         int32_t blocks, cudaStream_t stream);
int tv_flash_bf16_prepare(void);
/* The same for sm_90a; in the library where TV_CUDA_SM90 is defined. */
int tv_flash_sm90_launch(const struct tv_cuda *cuda, const struct tv_flash_params *p, int32_t batch,
                         int32_t blocks, cudaStream_t stream);
int tv_flash_sm90_prepare(void);
int tv_flash_f32_launch(const struct tv_flash_params *p, int32_t batch, int32_t blocks,
                        cudaStream_t stream);
int tv_flash_f32_prepare(void);
int tv_flash_combine_launch(const struct tv_flash_params *p, int32_t batch, int32_t splits,
                            cudaStream_t stream);
int tv_flash_combine_prepare(void);
int tv_flash_combine_image(int32_t *ret_image);
/* m-tiles that a block of each kernel holds. */
#define TV_FLASH_BF16_M_TILES 4
#define TV_FLASH_F32_M_TILES  1

/* -ENOTSUP unless the compiled kernel stays within the promised shared memory with `dynamic`
 * bytes of it, and keeps nothing in local memory. Raises the kernel's dynamic limit. */
int tv_flash_prepare_kernel(const void *kernel, int32_t dynamic);
/* The same within `most` bytes, for a kernel of one device alone. */
int tv_flash_prepare_within(const void *kernel, int32_t dynamic, int32_t most);

/*
 * Launch a kernel that may start while the launch before it on the stream still runs. It must call
 * ptx_wait_dependence before it touches global memory, in every block. The flash kernels let the
 * next launch come behind their own wait, so that the combine may read before its own what they
 * only read.
 */
int tv_flash_launch(const void *kernel, dim3 grid, int32_t threads, int32_t shared,
                    cudaStream_t stream, void **args);

#ifdef __CUDACC__

/* One block's share of the launch. */
struct flash_block {
    int32_t request;
    int32_t prefix, nodes;
    int32_t last;       /* slot that is in use */
    int32_t row_first;  /* in the request's folded rows */
    int32_t rows;       /* of the request */
    int32_t m_tiles;    /* of this block */
    int32_t tile_first; /* KV tiles [tile_first, tile_end) */
    int32_t tile_end;
    int32_t splits;       /* of its row tile; 1: write results, else partial sums */
    bool alone;           /* no other row tile reads its tokens */
    bool tree;            /* some of this block's tiles hold tree nodes */
    int64_t base;         /* folded row 0 of the request in q, out and lse */
    int64_t partial_base; /* row `row_first` of this split in the partial sums */
    int64_t partial_lse;  /* its lse; the next row's lies `splits` further */
};

/* What a request is like. Whatever lengths the device has, it is within the host's bounds: page
 * table, workspace and shared memory hold what follows from it. row_start is trusted, since nobody
 * says here how many rows there are. */
struct flash_request {
    int32_t prefix, nodes;
    int64_t base; /* folded row 0 in q, out and lse */
};

TV_DEVICE struct flash_request flash_request_read(const struct tv_flash_params &p, int32_t request)
{
    struct flash_request r;
    uint32_t nodes = (uint32_t)ptx_load_device(p.node_count + request);
    uint32_t prefix = (uint32_t)ptx_load_device(p.prefix_len + request);
    int64_t row = (int64_t)request * p.q_len;
    if (p.row_start != NULL) {
        row = ptx_load_device(p.row_start + request);
    }
    r.nodes = (int32_t)min(nodes, (uint32_t)min(p.q_len, p.kv_len_max));
    r.prefix = (int32_t)min(prefix, (uint32_t)(p.kv_len_max - r.nodes));
    r.base = row * p.heads;
    return r;
}

/* m_tiles is 0 when the block has no rows (the launch is sized for the longest request).
 * m_tiles_max is p.device's, as a constant: quotients by it then cost nothing. */
TV_DEVICE void flash_block_init(struct flash_block *b, const struct tv_flash_params &p,
                                const struct flash_request &request, int32_t m_tiles_max)
{
    int32_t index = (int32_t)blockIdx.x;
    b->request = (int32_t)blockIdx.y;
    b->prefix = request.prefix;
    b->nodes = request.nodes;
    b->base = request.base;
    struct tv_plan_device device = p.device;
    device.m_tiles_max = m_tiles_max;
    struct tv_plan plan = tv_plan_request(device, b->nodes, p.heads, b->prefix);
    if (index >= tv_plan_blocks(&plan)) {
        b->m_tiles = 0;
        return;
    }
    struct tv_plan_block block = tv_plan_block(&plan, index);
    b->m_tiles = block.m_tiles;
    b->row_first = block.m_first * TV_PLAN_M;
    b->rows = plan.rows;
    b->tile_first = block.tile_first;
    b->tile_end = block.tile_end;
    b->splits = block.splits;
    b->alone = plan.full.row_tiles + plan.rest.row_tiles == 1;
    b->tree = b->tile_end * TV_PLAN_TOKENS > b->prefix;
    b->last = b->prefix + b->nodes - 1;
    int64_t partial = (int64_t)b->request * p.partial_rows;
    b->partial_base = partial + block.slot * TV_PLAN_M;
    b->partial_lse = partial + block.slot_first * TV_PLAN_M + block.split;
}

/* The padded layout's rows past node_count: out = 0, lse = -inf. Shared out over the launch's
 * blocks of the request, by `threads` threads of a block. */
TV_DEVICE void flash_fill_padding(const struct tv_flash_params &p, const struct flash_block &b,
                                  int32_t thread, int32_t threads)
{
    if (p.row_start != NULL) {
        return;
    }
    int32_t end = p.q_len * p.heads, i = b.nodes * p.heads + (int32_t)blockIdx.x;
    int32_t words = p.out_bf16 ? TV_MLA_LATENT / 2 : TV_MLA_LATENT;
    for (; i < end; i += (int32_t)gridDim.x) {
        uint32_t *out = (uint32_t *)p.out + (b.base + i) * words;
        for (int32_t c = thread; c < words; c += threads) {
            out[c] = 0;
        }
        if (thread == 0) {
            p.lse[b.base + i] = -CUDART_INF_F;
        }
    }
}

/* Node of a folded row; rows that pad the last m-tile borrow the last node. */
TV_DEVICE int32_t flash_node(const struct flash_block &b, int32_t row, int32_t heads)
{
    return min(row, b.rows - 1) / heads;
}

/* Ancestor sets of up to 32 nodes, one a lane, by doubling: after n rounds a lane has the nodes
 * less than 2^n steps above it, and the one 2^n above it (or -1). */
TV_DEVICE uint32_t flash_ancestors(const int32_t *parents, int32_t nodes, int32_t lane)
{
    int32_t above = lane < nodes ? parents[lane] : -1;
    uint32_t set = 1u << lane;
    /* A parent that is not below its node is refused by callers; it must not lead outside. */
    above = above < lane ? above : -1;
#pragma unroll
    for (int n = 0; n < 5; n++) {
        uint32_t more = __shfl_sync(0xffffffffu, set, above);
        int32_t next = __shfl_sync(0xffffffffu, above, above);
        if (above >= 0) {
            set |= more;
            above = next;
        }
    }
    return set;
}

/*
 * Ancestor sets (self included) of the nodes in this block's rows, from the parents, by `threads`
 * threads from `thread` on, whole warps: for small trees the last of them, else one thread a node.
 * mask [nodes of the block, mask_words] in shared memory; the caller's barrier comes after.
 */
TV_DEVICE void flash_build_mask(const struct tv_flash_params &p, const struct flash_block &b,
                                uint32_t *mask, int32_t thread, int32_t threads)
{
    const int32_t *parents = p.parents + b.base / p.heads;
    int32_t first = flash_node(b, b.row_first, p.heads);
    int32_t last = flash_node(b, b.row_first + b.m_tiles * TV_PLAN_M - 1, p.heads);
    if (p.mask_words == 1) {
        int32_t lane = thread & 31;
        if (thread >= threads - 32) {
            uint32_t set = flash_ancestors(parents, b.nodes, lane);
            if (lane >= first && lane <= last) {
                mask[lane - first] = set;
            }
        }
        return;
    }
    for (int32_t i = thread; i <= last - first; i += threads) {
        uint32_t *set = mask + i * p.mask_words;
        for (int32_t w = 0; w < p.mask_words; w++) {
            set[w] = 0;
        }
        int32_t node = first + i;
        while (node >= 0) {
            set[node >> 5] |= 1u << (node & 31);
            int32_t parent = parents[node];
            /* A parent that is not below its node is refused by callers; it must not hang us. */
            node = parent < node ? parent : -1;
        }
    }
}

/* Bits of 32 consecutive slots, the first `slot` nodes behind the prefix (negative: before its
 * end), that a node with this ancestor set attends to. */
TV_DEVICE uint32_t flash_mask_window(const uint32_t *set, int32_t words, int32_t slot)
{
    if (slot < 0) {
        return slot <= -32 ? 0xffffffffu : (set[0] << -slot) | ((1u << -slot) - 1u);
    }
    int32_t word = slot >> 5;
    uint32_t low = word < words ? set[word] : 0u;
    uint32_t high = word + 1 < words ? set[word + 1] : 0u;
    return __funnelshift_r(low, high, (uint32_t)slot & 31u);
}

/* log2 of the sum of exp2, from the reference exponent and the sum scaled by it. */
TV_DEVICE float flash_lse2(float reference, float sum)
{
    return sum > 0.0f ? reference + log2f(sum) : -CUDART_INF_F;
}

#endif

#endif
