/*
 * linear_sm90.cuh - the matrix product of linear.cuh on Hopper: wgmma, weights and rows by the copy
 * engine. For sm_90a alone.
 *
 * The same products in the same order as linear_wide, and the same bits: wgmma adds 16 products to
 * a sum as mma.sync does (kernels/README.md). Which 16 go together linear_wide has told, four of
 * each eight of 32; so x lies in that order (sm90_position), in its pieces of bf16, and weights are
 * read to registers, eight k in a row a lane.
 *
 * A block makes 128 rows of weights (64 of either matrix when paired) by some rows of x, and then
 * the next such tile. 64 k of both are a place of a ring in shared memory, which one warp keeps
 * full. Either of two warpgroups has half of the weights and all rows of x. Sums of a chunk of 128
 * k join the total while the other warpgroup's products run. With one piece there are two sums of
 * up to 128 rows, one after the other, with three pieces one and what the lower pieces add to it.
 *
 * A problem type P: pieces; paired; made (its maps were made on the device); groups; box_rows (of x
 * in a copy); second_map (from the map of the first half of the weights to that of the second);
 * struct tile : sm90_tile; find (item -> tile, false behind the last); store (two columns of a row)
 * or store_pair (a column of either matrix of two rows).
 */
#ifndef TV_KERNELS_CUDA_LINEAR_SM90_CUH
#define TV_KERNELS_CUDA_LINEAR_SM90_CUH

#include <cuda.h>

#include "linear.cuh"
#include "wgmma.cuh"

#define SM90_WEIGHTS 128 /* rows of weights of a tile */
#define SM90_SUM     128 /* rows of x of a sum, at most */
#define SM90_UNIT    64  /* k of a place */
#define SM90_THREADS 384
#define SM90_LINE    (SM90_UNIT * 2) /* bytes */
#define SM90_HALF    (SM90_WEIGHTS / 2 * SM90_LINE)
#define SM90_X       (SM90_SUM * SM90_LINE)

/* The ring, of a number of pieces. */
template <int PIECES> struct sm90_ring {
    static constexpr int sums = PIECES == 1 ? 2 : 1;
    static constexpr int copies = PIECES == 1 ? 2 : PIECES; /* of rows of x */
    static constexpr int places = PIECES == 1 ? 4 : 3;
    static constexpr uint32_t place = 2 * SM90_HALF + copies * SM90_X;
    static constexpr uint32_t full = places * place, empty = full + 8 * places;
    static constexpr uint32_t bytes = empty + 8 * places;
    static constexpr int tile_rows = sums * SM90_SUM;
};

/* A place, and how often the ring has gone round. */
struct sm90_turn {
    uint32_t place, parity;
};

template <int PIECES> TV_DEVICE void sm90_next(struct sm90_turn *turn)
{
    bool last = turn->place == sm90_ring<PIECES>::places - 1;
    turn->place = last ? 0 : turn->place + 1;
    turn->parity ^= last;
}

struct sm90_tile {
    const CUtensorMap *w_map;
    int32_t w_row, w_group, x_row, x_group; /* x_group: of the first piece */
    int32_t rows, k;
};

TV_DEVICE void sm90_tensor_copy(uint32_t shared, const CUtensorMap *map, int32_t k, int32_t row,
                                int32_t group, uint32_t barrier)
{
    asm volatile("cp.async.bulk.tensor.3d.shared::cta.global.tile.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%2, %3, %4}], [%5];" ::"r"(shared),
                 "l"(map), "r"(k), "r"(row), "r"(group), "r"(barrier)
                 : "memory");
}

/* A map that another launch made. */
TV_DEVICE void sm90_map_acquire(const CUtensorMap *map)
{
    asm volatile("fence.proxy.tensormap::generic.acquire.gpu [%0], 128;" ::"l"(map) : "memory");
}

/* Rows of a tile's first sum. */
template <int PIECES> TV_DEVICE int32_t sm90_share(int32_t rows)
{
    return PIECES == 1 ? (rows + 31) / 32 * 16 : rows;
}

/* The warp that fills the ring, by one lane. */
template <typename P> TV_DEVICE void sm90_produce(const P &p, uint32_t memory)
{
    typedef sm90_ring<P::pieces> ring;
    struct sm90_turn turn = {0, 1};
    typename P::tile t;
    for (int32_t item = (int32_t)blockIdx.x; p.find(item, &t); item += (int32_t)gridDim.x) {
        int32_t end = (t.k + LINEAR_CHUNK - 1) / LINEAR_CHUNK * LINEAR_CHUNK;
        int32_t share = P::pieces == 1 ? sm90_share<1>(t.rows) : 0;
        if constexpr (P::made) {
            sm90_map_acquire(t.w_map);
            sm90_map_acquire(t.w_map + p.second_map);
        }
#pragma unroll 1
        for (int32_t k = 0; k < end; k += SM90_UNIT) {
            uint32_t to = memory + turn.place * ring::place;
            uint32_t full = memory + ring::full + turn.place * 8;
            ptx_mbarrier_wait(memory + ring::empty + turn.place * 8, turn.parity);
            ptx_mbarrier_expect(full, 2 * SM90_HALF + ring::copies * p.box_rows * SM90_LINE);
            sm90_tensor_copy(to, t.w_map, k, t.w_row, t.w_group, full);
            sm90_tensor_copy(to + SM90_HALF, t.w_map + p.second_map, k,
                             P::paired ? t.w_row : t.w_row + SM90_WEIGHTS / 2, t.w_group, full);
#pragma unroll
            for (int i = 0; i < ring::copies; i++) {
                sm90_tensor_copy(to + 2 * SM90_HALF + i * SM90_X, &p.x_map, k, t.x_row + i * share,
                                 P::pieces == 1 ? t.x_group : t.x_group + i * p.groups, full);
            }
            sm90_next<P::pieces>(&turn);
        }
    }
}

/* The first of the two columns of a lane, or the one of either matrix. Which rows of weights a
 * lane's fragments have is free; the other lane of a pair that reads at the same time has rows four
 * further, whose pieces lie in the other half of a line. */
template <bool PAIRED> TV_DEVICE int32_t sm90_lane_column(void)
{
    int32_t warp = ptx_thread() >> 5, g = (ptx_thread() & 31) >> 2;
    return PAIRED ? warp * 8 + (g >> 1 | (g & 1) << 2)
                  : warp * 16 + ((g & 4) | (g & 1) << 1 | (g & 2) >> 1) * 2;
}

/* Where a lane's weights of a place begin. */
template <bool PAIRED> TV_DEVICE uint32_t sm90_lane_weights(void)
{
    int32_t row = sm90_lane_column<PAIRED>();
    return (uint32_t)(row * SM90_LINE + (((ptx_thread() & 3) ^ (row & 7)) * 16));
}

/* A warp's fragments of 64 k. */
template <bool PAIRED> TV_DEVICE void sm90_fragments(uint32_t (&a)[4][4], uint32_t weights)
{
#pragma unroll
    for (int s = 0; s < 2; s++) {
        uint32_t top[4], bottom[4];
        ptx_load4(top, weights ^ (s * 64));
        ptx_load4(bottom, PAIRED ? (weights ^ (s * 64)) + SM90_HALF
                                 : (weights ^ (s * 64 + 16)) + SM90_LINE);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            a[2 * s + i][0] = top[2 * i];
            a[2 * s + i][1] = bottom[2 * i];
            a[2 * s + i][2] = top[2 * i + 1];
            a[2 * s + i][3] = bottom[2 * i + 1];
        }
    }
}

/* The products of one place, of N rows of x from x on, in the order of linear_wide; add 0: from
 * zero. */
template <int PIECES, int N>
TV_DEVICE void sm90_products(float (&sum)[N / 8][4], float (&rest)[N / 8][4],
                             const uint32_t (&a)[4][4], uint32_t x, int add)
{
    uint64_t hi = ptx_wgmma_operand(ptx_wgmma_swizzled(16), x);
    ptx_wgmma_fence();
#pragma unroll
    for (int s = 0; s < 4; s++) {
        if (PIECES > 1) {
            ptx_wgmma_held(rest, a[s], hi + 2 * SM90_X / 16 + 2 * s, s > 0 || add);
            ptx_wgmma_held(rest, a[s], hi + SM90_X / 16 + 2 * s, 1);
        }
        ptx_wgmma_held(sum, a[s], hi + 2 * s, s > 0 || add);
    }
    ptx_wgmma_commit();
}

/* Until all but the last products are through, so that their weights may be replaced. */
TV_DEVICE void sm90_wait_first(uint32_t (&a)[4][4])
{
    asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
#pragma unroll
    for (int s = 0; s < 4; s++) {
        asm volatile("" : "+r"(a[s][0]), "+r"(a[s][1]), "+r"(a[s][2]), "+r"(a[s][3])::"memory");
    }
}

/* By all lanes of a warp: it is through with a place. */
TV_DEVICE void sm90_release(uint32_t empty)
{
    if ((ptx_thread() & 31) == 0) {
        ptx_mbarrier_arrive(empty);
    }
}

/* A lane's totals: of N rows, and of the N behind them where there are two sums. */
template <typename P, int N>
TV_DEVICE void sm90_sums(int32_t k, uint32_t memory, struct sm90_turn *turn,
                         float (&total)[sm90_ring<P::pieces>::sums][N / 8][4])
{
    typedef sm90_ring<P::pieces> ring;
    uint32_t weights = memory + sm90_lane_weights<P::paired>();
    uint32_t first[4][4], second[4][4];
    ptx_mbarrier_wait(memory + ring::full + turn->place * 8, turn->parity);
    sm90_fragments<P::paired>(first, weights + turn->place * ring::place);
#pragma unroll 1
    for (; k > 0; k -= LINEAR_CHUNK) {
        struct sm90_turn before = *turn;
        sm90_next<P::pieces>(turn);
        uint32_t x = memory + 2 * SM90_HALF, last = turn->place;
#pragma unroll
        for (int i = 0; i < ring::sums; i++) {
            float sum[N / 8][4], rest[N / 8][4];
            sm90_products<P::pieces, N>(sum, rest, first,
                                        x + before.place * ring::place + i * SM90_X, 0);
            if (i == 0) {
                ptx_mbarrier_wait(memory + ring::full + turn->place * 8, turn->parity);
                sm90_fragments<P::paired>(second, weights + turn->place * ring::place);
            }
            sm90_products<P::pieces, N>(sum, rest, second, x + last * ring::place + i * SM90_X, 1);
            if (i == ring::sums - 1) {
                sm90_wait_first(first);
                sm90_release(memory + ring::empty + before.place * 8);
                sm90_next<P::pieces>(turn);
                if (k > LINEAR_CHUNK) {
                    /* The next chunk's first weights, while products run. */
                    ptx_mbarrier_wait(memory + ring::full + turn->place * 8, turn->parity);
                    sm90_fragments<P::paired>(first, weights + turn->place * ring::place);
                }
            }
            ptx_wgmma_wait(sum);
            if (P::pieces > 1) {
                ptx_wgmma_wait(rest);
            }
#pragma unroll
            for (int j = 0; j < N / 2; j++) {
                float joins = sum[j / 4][j % 4];
                total[i][j / 4][j % 4] += P::pieces > 1 ? joins + rest[j / 4][j % 4] : joins;
            }
        }
        sm90_release(memory + ring::empty + last * 8);
    }
}

template <typename P, int N>
TV_DEVICE void sm90_consume(const P &p, int32_t item, int32_t k, uint32_t memory,
                            struct sm90_turn *turn)
{
    typedef sm90_ring<P::pieces> ring;
    float total[ring::sums][N / 8][4] = {};
    sm90_sums<P, N>(k, memory, turn, total);
    /* Found again, since registers are few. */
    typename P::tile t;
    (void)p.find(item, &t);
    int32_t column = sm90_lane_column<P::paired>(), share = sm90_share<P::pieces>(t.rows);
#pragma unroll
    for (int i = 0; i < ring::sums; i++) {
        int32_t end = min((i + 1) * share, t.rows);
#pragma unroll
        for (int j = 0; j < N / 8; j++) {
            int32_t row = i * share + j * 8 + (ptx_thread() & 3) * 2;
            const float(&sums)[4] = total[i][j];
            if constexpr (P::paired) {
                p.store_pair(t, row, end, column, sums);
            } else {
                if (row < end) {
                    p.store(t, row, column, make_float2(sums[0], sums[2]));
                }
                if (row + 1 < end) {
                    p.store(t, row + 1, column, make_float2(sums[1], sums[3]));
                }
            }
        }
    }
}

/* A warpgroup that computes. Products of fewer rows than a tile can have take less time. */
template <typename P> TV_DEVICE void sm90_consumer(const P &p, uint32_t memory)
{
    struct sm90_turn turn = {0, 0};
    typename P::tile t;
    for (int32_t item = (int32_t)blockIdx.x; p.find(item, &t); item += (int32_t)gridDim.x) {
        int32_t share = sm90_share<P::pieces>(t.rows);
        if (share <= 32) {
            sm90_consume<P, 32>(p, item, t.k, memory, &turn);
        } else if (share <= 64) {
            sm90_consume<P, 64>(p, item, t.k, memory, &turn);
        } else if (share <= 96) {
            sm90_consume<P, 96>(p, item, t.k, memory, &turn);
        } else if (P::made && share <= 112) {
            sm90_consume<P, 112>(p, item, t.k, memory, &turn);
        } else {
            sm90_consume<P, 128>(p, item, t.k, memory, &turn);
        }
    }
}

template <typename P>
static __global__ void __launch_bounds__(SM90_THREADS, 1) linear_sm90(const __grid_constant__ P p)
{
    typedef sm90_ring<P::pieces> ring;
    extern __shared__ __align__(1024) unsigned char sm90_memory[];
    uint32_t memory = ptx_shared(sm90_memory);
    if (threadIdx.x == 0) {
        for (int i = 0; i < ring::places; i++) {
            ptx_mbarrier_init(memory + ring::full + i * 8, 1);
            ptx_mbarrier_init(memory + ring::empty + i * 8, 8); /* warps */
        }
        ptx_fence_async();
    }
    __syncthreads();
    ptx_wait_dependence();
    ptx_launch_dependents();
    if (ptx_warp() >= 8) {
        ptx_registers_keep<24>();
        if (ptx_warp() == 8 && ptx_elect()) {
            sm90_produce(p, memory);
        }
    } else {
        ptx_registers_take<240>();
        sm90_consumer(p, memory);
    }
}

/* Where element `at` of each 32 of a row of x lies: sums take first the first four of every eight,
 * then the last four; of each four, two go to either half of a step. */
TV_DEVICE int32_t sm90_position(int32_t at)
{
    return (at & 4) * 4 + (at & 2) * 4 + (at >> 3) * 2 + (at & 1);
}

/* Two neighbours: rounded, or cut into pieces that add up to them. */
template <int PIECES> TV_DEVICE void sm90_cut(float a, float b, uint32_t (&word)[PIECES])
{
    if constexpr (PIECES == 1) {
        word[0] = ptx_pack(a, b);
    } else {
#pragma unroll
        for (int i = 0; i < PIECES; i++) {
            word[i] = linear_upper(a, b);
            a = linear_remainder(a);
            b = linear_remainder(b);
        }
    }
}

TV_DEVICE float2 sm90_pair(const float *x)
{
    return *(const float2 *)x;
}

TV_DEVICE float2 sm90_pair(const __nv_bfloat16 *x)
{
    return __bfloat1622float2(*(const __nv_bfloat162 *)x);
}

/* Rows of x in pieces of bf16, `apart` elements apart, each row a multiple of 32 long, behind k
 * zeros. S: row of the result -> row of x (of f32, or of bf16: one piece has all), or NULL. */
template <typename S, int PIECES>
static __global__ void __launch_bounds__(256) sm90_rows(const __grid_constant__ S s, int32_t rows,
                                                        int32_t k, int64_t apart, __nv_bfloat16 *to)
{
    ptx_wait_dependence();
    ptx_launch_dependents();
    int32_t quads = (k + 31) / 32 * 4; /* eight elements of the result each */
    int64_t all = (int64_t)rows * quads;
    for (int64_t i = (int64_t)blockIdx.x * 256 + threadIdx.x; i < all;
         i += (int64_t)gridDim.x * 256) {
        const auto *x = s.row((int32_t)(i / quads));
        int32_t quad = (int32_t)(i % quads);
        uint32_t word[4][PIECES];
#pragma unroll
        for (int j = 0; j < 4; j++) {
            int32_t at = quad / 4 * 32 + j * 8 + quad % 4 * 2;
            float2 v = {};
            if (x != NULL && at < k) {
                v = sm90_pair(x + at);
            }
            sm90_cut<PIECES>(v.x, v.y, word[j]);
        }
#pragma unroll
        for (int n = 0; n < PIECES; n++) {
            *(uint4 *)(to + n * apart + i * 8) =
                make_uint4(word[0][n], word[1][n], word[2][n], word[3][n]);
        }
    }
}

/* linear_sm90 of P. Once per device and problem type, before the first launch: its shared memory.
 */
template <typename P> static int sm90_prepare(void)
{
    return tv_cuda_errno(cudaFuncSetAttribute((const void *)linear_sm90<P>,
                                              cudaFuncAttributeMaxDynamicSharedMemorySize,
                                              sm90_ring<P::pieces>::bytes));
}

#endif
