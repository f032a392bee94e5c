/*
 * verify_attn_bf16.cuh - shapes of the bf16 flash kernel and its shared memory: what the score
 * warps and the value warps agree on. Holds no arithmetic; verify_attn_bf16.cu explains the whole.
 */
#ifndef TV_KERNELS_CUDA_VERIFY_ATTN_BF16_CUH
#define TV_KERNELS_CUDA_VERIFY_ATTN_BF16_CUH

#include <cstddef>

#include "verify_attn.cuh"

#define SCORE_WARPS  4
#define VALUE_WARPS  8
#define SCORE_LANES  (SCORE_WARPS * 32)
#define VALUE_LANES  (VALUE_WARPS * 32)
#define THREADS      ((SCORE_WARPS + VALUE_WARPS) * 32)
#define M_TILES_MAX  TV_FLASH_BF16_M_TILES
#define ROW_BYTES    (TV_MLA_ROW * 2)
#define BLOCK_BYTES  128 /* a row is 9 of them; 16-byte pieces are swizzled within one */
#define BLOCKS       (ROW_BYTES / BLOCK_BYTES)
#define BLOCK_STRIDE (TV_PLAN_TOKENS * BLOCK_BYTES)
#define TILE_BYTES   (TV_PLAN_TOKENS * ROW_BYTES)
#define PLACES_MAX   4            /* KV tiles in shared memory; 2 when the mask is very wide */
#define FRAGMENT     512          /* bytes of a 16 x 16 bf16 operand, 16 a lane */
#define Q_SHARED     11           /* of a score warp's 36 fragments of Q, kept in shared memory */
#define ROPE_BLOCK   (BLOCKS - 1) /* of a tile; value warps do not read it */
#define COLUMNS      (TV_MLA_LATENT / VALUE_WARPS)

/* Named barriers: who arrives, then who waits. Where the word is missing, both are the same. */
enum {
    BARRIER_MASK = 1, /* value warps; softmax warps: the ancestor sets are built */
    BARRIER_FREE,     /* value warps; value warp 0: a place may be filled again. Taken in turn with
                         the next number, since who arrives may be one tile ahead of who waits */
    BARRIER_FREE_ODD,
    BARRIER_P_EMPTY, /* value warps; softmax warps: a pair's probabilities have been used */
    BARRIER_SCORE,   /* all score warps */
    BARRIER_GROUP    /* score warps that share two m-tiles; the next number for the others */
};

/* What a score warp keeps, and hands to others. */
struct __align__(16) shared_warp
{
    uint8_t q[Q_SHARED][FRAGMENT]; /* blocks of one m-tile: sums exchanged */
    uint8_t p[2][FRAGMENT];        /* probabilities of a pair of tiles, of the warp's m-tile */
    float alpha[TV_PLAN_M];        /* factor of the values so far, if moved */
    uint32_t moved;                /* the m-tile's reference moved in this pair */
};

/* Shared memory besides the KV tiles, which come first, and the mask, which comes last. */
struct __align__(16) shared_fixed
{
    struct shared_warp warp[SCORE_WARPS];
    uint64_t kv_full[PLACES_MAX]; /* a tile has arrived */
    uint64_t p_full;              /* a pair's probabilities are written */
    uint64_t q_taken;             /* the last two places are free of Q */
    uint64_t sum_full;            /* the rows' sums are written */
    int32_t count;                /* tiles of the block */
    int32_t masked;               /* first tile of the first pair to be masked */
    int32_t tree_first;           /* ... that holds tree nodes */
    struct flash_block block;
};

#define MASK_BYTES(places)                                                                         \
    (TV_CUDA_SHARED_MAX - (int32_t)sizeof(struct shared_fixed) - (places)*TILE_BYTES)

static_assert(SCORE_WARPS == M_TILES_MAX, "two score warps share two m-tiles");
static_assert(sizeof(struct shared_fixed) % 16 == 0, "pieces are loaded 16 bytes at a time");
static_assert(TILE_BYTES % 1024 == 0 && COLUMNS * 2 == BLOCK_BYTES,
              "tiles start a swizzle pattern, and a value warp's columns are one block of a row");
static_assert(MASK_BYTES(PLACES_MAX) >= 0, "the block must fit sm_120");
static_assert(MASK_BYTES(PLACES_MAX / 2) >= M_TILES_MAX * TV_PLAN_M * TV_TREE_NODES_MAX / 8,
              "the widest mask must fit");

/* Shared-space offsets of members. */
#define FIXED_AT(member) ((uint32_t)offsetof(struct shared_fixed, member))
#define WARP_AT(member)  ((uint32_t)offsetof(struct shared_warp, member))
#define WARP_BYTES       ((uint32_t)sizeof(struct shared_warp))

/* A block's shared memory. */
struct layout {
    unsigned char *kv;
    struct shared_fixed *fixed;
    uint32_t *mask;
};

template <int PLACES> TV_DEVICE struct layout layout_of(unsigned char *memory)
{
    struct layout l;
    l.kv = memory;
    l.fixed = (struct shared_fixed *)(memory + PLACES * TILE_BYTES);
    l.mask = (uint32_t *)(l.fixed + 1);
    return l;
}

/* Threads of the softmax and the value warps: one softmax warp for one m-tile, else four. */
TV_DEVICE constexpr int32_t softmax_threads(int32_t m_tiles)
{
    return (m_tiles == 1 ? 32 : SCORE_LANES) + VALUE_LANES;
}

/* Where the block's k-th tile is kept, and the parity of its barrier's phase. */
template <int PLACES> TV_DEVICE int32_t tile_place(int32_t k)
{
    return k & (PLACES - 1);
}

template <int PLACES> TV_DEVICE uint32_t tile_parity(int32_t k)
{
    return (uint32_t)(k / PLACES) & 1u;
}

/* 1 / sum of the 16 rows of m-tile m, at the end, where its warp's Q was. */
TV_DEVICE float *layout_inverse(const struct layout &l, int32_t m)
{
    return (float *)l.fixed->warp[m].q;
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
