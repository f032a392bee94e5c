/*
 * verify_attn_sm90.cuh - shapes of the Hopper flash kernel and its shared memory: what the score
 * warpgroup and the value warpgroups agree on. verify_attn_sm90.cu explains the whole.
 */
#ifndef TV_KERNELS_CUDA_VERIFY_ATTN_SM90_CUH
#define TV_KERNELS_CUDA_VERIFY_ATTN_SM90_CUH

#include <cstddef>

#include "verify_attn.cuh"

#define GROUP_WARPS     4
#define GROUP_LANES     (GROUP_WARPS * 32)
#define VALUE_GROUPS    2
#define VALUE_LANES     (VALUE_GROUPS * GROUP_LANES)
#define THREADS         (GROUP_LANES + VALUE_LANES)
#define SCORE_REGISTERS 184 /* 28 fragments of Q; in all what the launch gives, 3 * 168 */
#define VALUE_REGISTERS 160 /* 64 x 256 sums of a warpgroup */
#define M_TILES_MAX     TV_FLASH_BF16_M_TILES
#define ROW_BYTES       (TV_MLA_ROW * 2)
#define PAIR_TOKENS     (2 * TV_PLAN_TOKENS)
#define BLOCK_BYTES     128 /* a row is 9 of them; 16-byte pieces are swizzled within one */
#define BLOCKS          (ROW_BYTES / BLOCK_BYTES)
#define BLOCK_STEPS     4 /* products of 16 dims in one */
#define Q_BLOCKS        2 /* of a row of Q in shared memory, RoPE the last of them */
#define STEPS           (BLOCKS * BLOCK_STEPS)
#define STEPS_HELD      (STEPS - Q_BLOCKS * BLOCK_STEPS) /* whose Q is in registers */
#define BLOCK_STRIDE    (PAIR_TOKENS * BLOCK_BYTES)
#define GROUP_BLOCKS    (TV_MLA_LATENT / VALUE_GROUPS * 2 / BLOCK_BYTES) /* of a value warpgroup */
#define COLUMNS         (TV_MLA_LATENT / VALUE_GROUPS)
#define STAGE_BYTES     (BLOCKS * BLOCK_STRIDE)
#define STAGES          5                              /* pairs in shared memory */
#define P_STAGES        2                              /* probabilities of pairs */
#define PIECES          (M_TILES_MAX * TV_PLAN_M * 16) /* eight tokens, or dims, of all rows */
#define P_BYTES         (PAIR_TOKENS / 8 * PIECES)
#define Q_BYTES         (Q_BLOCKS * BLOCK_BYTES / 16 * PIECES)
#define RESULT_BYTES    512 /* of a row of results on its way out */
#define Q_SHARE         6 /* rows of an m-tile of Q that one of three warps starts the copies of */
#define Q_STRIDE        (ROW_BYTES + 16) /* of a row that waits to become fragments */
#define Q_TILE_BYTES    (TV_PLAN_M * Q_STRIDE)

/* Shared memory behind the stages; the mask comes last. */
struct __align__(16) sm90_fixed
{
    uint8_t p[P_STAGES][P_BYTES]; /* probabilities of a pair: 4 times 8 tokens of 64 rows */
    uint8_t q[Q_BYTES];           /* the last blocks of all rows of Q */
    float alpha[P_STAGES][M_TILES_MAX][TV_PLAN_M]; /* factor of the values so far, if moved */
    uint32_t moved[P_STAGES][M_TILES_MAX];         /* the m-tile's reference moved in this pair */
    float inverse[M_TILES_MAX][TV_PLAN_M];         /* 1 / sum of each row, at the end */
    uint64_t kv_full[STAGES][VALUE_GROUPS];        /* a half of a pair has arrived; the second has
                                                      the RoPE block too */
    uint64_t p_full[P_STAGES];                     /* a pair's probabilities are written */
    uint64_t p_empty[P_STAGES];                    /* ... and have been read */
    uint64_t q_full[M_TILES_MAX];                  /* an m-tile's rows have arrived */
    uint64_t q_taken;                              /* all rows are in registers */
    uint64_t mask_full;                            /* the ancestor sets are built */
    uint64_t sum_full;                             /* the rows' sums are written */
    int32_t pairs;                                 /* of tiles, of the block */
    int32_t tree;                                  /* the first of them that holds tree nodes */
    struct flash_block block;
};

#define SM90_AT(member) sm90_at((uint32_t)offsetof(struct sm90_fixed, member))

/* Named barrier of a value warpgroup; the next numbers for the second and the score warpgroup. */
#define BARRIER_GROUP 1
#define BARRIER_SCORE (BARRIER_GROUP + VALUE_GROUPS)

#define SM90_SHARED (STAGES * STAGE_BYTES + (int32_t)sizeof(struct sm90_fixed))

/* What a block of an sm_90 device may have (227 KB). */
#define SM90_SHARED_MAX 232448

static_assert(SM90_SHARED + M_TILES_MAX * TV_PLAN_M * TV_TREE_NODES_MAX / 8 <= SM90_SHARED_MAX,
              "the widest mask must fit");
static_assert(M_TILES_MAX * Q_TILE_BYTES < STAGES * STAGE_BYTES, "Q waits in the last stages");
static_assert(GROUP_BLOCKS * BLOCK_STRIDE == 2 * TV_PLAN_M * RESULT_BYTES &&
                  COLUMNS * 2 == RESULT_BYTES,
              "two warps' results take a warpgroup's columns of a pair");
static_assert(GROUP_WARPS == M_TILES_MAX, "a warp of a warpgroup has the rows of one m-tile");

/* A block's shared memory: stages, then the structure, then the mask. Its places are constants, so
 * that no register needs to hold any. */
extern __shared__ __align__(1024) unsigned char sm90_memory[];

TV_DEVICE struct sm90_fixed *sm90_fixed_part(void)
{
    return (struct sm90_fixed *)(sm90_memory + STAGES * STAGE_BYTES);
}

TV_DEVICE uint32_t *sm90_mask(void)
{
    return (uint32_t *)(sm90_fixed_part() + 1);
}

TV_DEVICE const struct flash_block &sm90_block(void)
{
    return sm90_fixed_part()->block;
}

/* Shared-space addresses. */
TV_DEVICE uint32_t sm90_stage(int32_t pair)
{
    return ptx_shared(sm90_memory) + pair % STAGES * STAGE_BYTES;
}

TV_DEVICE uint32_t sm90_at(uint32_t offset)
{
    return ptx_shared(sm90_memory) + STAGES * STAGE_BYTES + offset;
}

/* Phases of a barrier that completes once for every pair that uses its stage. */
TV_DEVICE uint32_t pair_parity(int32_t pair)
{
    return (uint32_t)(pair / STAGES) & 1u;
}

/* The same of P's. */
TV_DEVICE uint32_t p_parity(int32_t pair)
{
    return (uint32_t)(pair / P_STAGES) & 1u;
}

#endif
