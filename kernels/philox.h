/*
 * philox.h - Philox4x32-10, the counter generator behind every random choice.
 *
 * Owns the generator and the Gumbel value built on it. Holds no state: a draw is a function of its
 * key and counter, so the order in which tokens are looked at cannot matter. Written in the common
 * subset of C17 and CUDA C++; proto/README.md, "Sampling", defines the counters.
 */
#ifndef TV_KERNELS_PHILOX_H
#define TV_KERNELS_PHILOX_H

#include <math.h>
#include <stdint.h>

#ifdef __CUDACC__
#define TV_PHILOX_FN __host__ __device__ static inline
#else
#define TV_PHILOX_FN static inline
#endif

/* What a counter is used for; a (position, token, purpose) is used at most once per session. */
enum tv_philox_purpose {
    TV_PHILOX_TARGET = 0,   /* draw of the target's token */
    TV_PHILOX_COIN = 1,     /* ratio_wor: coin of a child token */
    TV_PHILOX_RESIDUAL = 2, /* ratio_wor: draw from the residual */
    TV_PHILOX_WEIGHTS = 3,  /* synthetic weights, under a seed of their own */
};

struct tv_philox_block {
    uint32_t word[4];
};

/* Ten rounds over `counter` under the 64-bit `key` (low word first). */
TV_PHILOX_FN struct tv_philox_block tv_philox_generate(struct tv_philox_block counter, uint64_t key)
{
    uint32_t key0 = (uint32_t)key;
    uint32_t key1 = (uint32_t)(key >> 32);
    struct tv_philox_block c = counter;
    for (int round = 0; round < 10; round++) {
        uint64_t product0 = (uint64_t)0xD2511F53u * c.word[0];
        uint64_t product1 = (uint64_t)0xCD9E8D57u * c.word[2];
        struct tv_philox_block next;
        next.word[0] = (uint32_t)(product1 >> 32) ^ c.word[1] ^ key0;
        next.word[1] = (uint32_t)product1;
        next.word[2] = (uint32_t)(product0 >> 32) ^ c.word[3] ^ key1;
        next.word[3] = (uint32_t)product0;
        c = next;
        key0 += 0x9E3779B9u;
        key1 += 0xBB67AE85u;
    }
    return c;
}

/* Word 0 for a token at an absolute position. */
TV_PHILOX_FN uint32_t tv_philox_word(uint64_t seed, uint32_t position, uint32_t token,
                                     uint32_t purpose)
{
    struct tv_philox_block counter = {{position, token, purpose, 0}};
    return tv_philox_generate(counter, seed).word[0];
}

/* Random weights 4 * block .. 4 * block + 3 of a tensor. */
TV_PHILOX_FN struct tv_philox_block tv_philox_weights(uint64_t seed, uint32_t tensor,
                                                      uint64_t block)
{
    struct tv_philox_block counter = {
        {(uint32_t)block, (uint32_t)(block >> 32), TV_PHILOX_WEIGHTS, tensor}};
    return tv_philox_generate(counter, seed);
}

/* The signed value of a word: a multiple of 2^-23 in [-1, 1), exact in f32. */
TV_PHILOX_FN float tv_philox_signed(uint32_t word)
{
    return (float)((int32_t)(word >> 8) - (1 << 23)) * (1.0f / 8388608.0f);
}

/* The uniform value of a word: in (0, 1), never at either end. */
TV_PHILOX_FN double tv_philox_uniform(uint32_t word)
{
    return ((double)word + 0.5) * (1.0 / 4294967296.0);
}

/* Gumbel value: logarithms in f64, rounded once. */
TV_PHILOX_FN float tv_philox_gumbel(uint32_t word)
{
    return (float)-log(-log(tv_philox_uniform(word)));
}

/* An upper bound of every Gumbel value (word 2^32 - 1 gives 22.8738). */
#define TV_PHILOX_GUMBEL_MAX 22.875f

#endif
