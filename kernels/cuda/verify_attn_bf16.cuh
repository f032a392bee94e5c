/*
 * verify_attn_bf16.cuh - shapes of the bf16 flash kernel and its shared memory: what the score
 * warps and the value warps agree on. Holds no arithmetic; verify_attn_bf16.cu explains the whole.
 */
#ifndef TV_KERNELS_CUDA_VERIFY_ATTN_BF16_CUH
#define TV_KERNELS_CUDA_VERIFY_ATTN_BF16_CUH

#include "verify_attn.cuh"

#define SCORE_WARPS  4
#define VALUE_WARPS  8
#define THREADS      ((SCORE_WARPS + VALUE_WARPS) * 32)
#define M_TILES_MAX  TV_FLASH_BF16_M_TILES
#define ROW_BYTES    (TV_MLA_ROW * 2)
#define BLOCK_BYTES  128 /* a row is 9 of them; 16-byte pieces are swizzled within one */
#define BLOCKS       (ROW_BYTES / BLOCK_BYTES)
#define BLOCK_STRIDE (TV_PLAN_TOKENS * BLOCK_BYTES)
#define TILE_BYTES   (TV_PLAN_TOKENS * ROW_BYTES)
#define PAIR_BYTES   (2 * TILE_BYTES)
#define PAIRS_MAX    2   /* pairs of tiles in shared memory */
#define FRAGMENT     512 /* bytes of a 16 x 16 bf16 operand, 16 a lane */
#define Q_STEPS      (TV_MLA_ROW / 16)
#define Q_SHARED     11 /* of the steps, kept in shared memory */
#define Q_REGISTERS  (Q_STEPS - Q_SHARED)
#define COLUMNS      (TV_MLA_LATENT / VALUE_WARPS)
#define RESCALE_LOG2 8.0f
#define BARRIER_MASK 1

/* Shared memory besides the KV tiles, which come first, and the mask, which comes last. */
struct __align__(16) shared_fixed
{
    uint8_t q[M_TILES_MAX][Q_SHARED][FRAGMENT];
    uint8_t p[2][M_TILES_MAX][FRAGMENT];    /* of one pair of tiles */
    float alpha[M_TILES_MAX * TV_PLAN_M];   /* factor of the values so far, where moved is set */
    float inverse[M_TILES_MAX * TV_PLAN_M]; /* 1 / sum, at the end */
    uint32_t moved[M_TILES_MAX];            /* the m-tile's reference moved in this pair */
    uint64_t kv_full[PAIRS_MAX];            /* a pair of tiles has arrived */
    uint64_t kv_empty[PAIRS_MAX];           /* every value warp is through with it, and its P */
    uint64_t p_full;                        /* the pair's probabilities are written */
    uint64_t sum_full;                      /* the rows' sums are written */
    struct flash_block block;
};

#define MASK_BYTES(pairs)                                                                          \
    (TV_CUDA_SHARED_MAX - (int32_t)sizeof(struct shared_fixed) - (pairs)*PAIR_BYTES)

static_assert(SCORE_WARPS == M_TILES_MAX, "a score warp owns an m-tile");
static_assert(sizeof(struct shared_fixed) % 16 == 0, "pieces are loaded 16 bytes at a time");
static_assert(TILE_BYTES % 1024 == 0 && COLUMNS * 2 == BLOCK_BYTES,
              "tiles start a swizzle pattern, and a value warp's columns are one block of a row");
static_assert(MASK_BYTES(PAIRS_MAX) >= 0, "the block must fit sm_120");
static_assert(MASK_BYTES(PAIRS_MAX - 1) >= M_TILES_MAX * TV_PLAN_M * TV_TREE_NODES_MAX / 8,
              "the widest mask must fit");

/* A block's shared memory. */
struct layout {
    unsigned char *kv;
    struct shared_fixed *fixed;
    uint32_t *mask;
};

template <int PAIRS> TV_DEVICE struct layout layout_of(unsigned char *memory)
{
    struct layout l;
    l.kv = memory;
    l.fixed = (struct shared_fixed *)(memory + PAIRS * PAIR_BYTES);
    l.mask = (uint32_t *)(l.fixed + 1);
    return l;
}

/* Where the block's i-th pair of tiles is kept, and the parity of its barriers' phase. */
template <int PAIRS> TV_DEVICE int32_t pair_place(int32_t i)
{
    return i & (PAIRS - 1);
}

template <int PAIRS> TV_DEVICE uint32_t pair_parity(int32_t i)
{
    return (uint32_t)(i / PAIRS) & 1u;
}

/*
 * Where piece `piece` (16 bytes, of 8) of a row lies in a block of a tile. The copy engine lays a
 * tile out as 9 blocks of 16 rows of 128 bytes, and swizzles the pieces of a row, so that eight
 * rows of one column lie in eight different groups of banks without any padding.
 */
TV_DEVICE uint32_t tile_piece(int32_t row, int32_t piece)
{
    return (uint32_t)(row * BLOCK_BYTES + ((piece ^ (row & 7)) << 4));
}

#endif
