/*
 * engine_fixture.h - the real engine on a bundled checkpoint, and trees to give it, for the C
 * tests.
 *
 * Every helper fails the running cmocka test instead of returning an error.
 */
#ifndef TV_TESTS_SUPPORT_ENGINE_FIXTURE_H
#define TV_TESTS_SUPPORT_ENGINE_FIXTURE_H

#include <stdint.h>

#include "model_fixture.h"
#include "verify/verify.h"

struct tv_engine_fixture {
    struct tv_fixture base;
    struct tv_engine *engine;
    char detail[200]; /* of the self-test */
};

struct tv_engine_fixture_options {
    const char *model;      /* bundled checkpoint */
    const char *backend;    /* NULL: "cpu" */
    int32_t page_size;      /* 0: 64 */
    int32_t rows_max;       /* 0: 256 */
    int32_t requests_max;   /* 0: 4 */
    int32_t max_len;        /* 0: the checkpoint's */
    int64_t pages;          /* 0: 4096 rows */
    enum tv_dtype kv_dtype; /* 0: f32 */
    enum tv_cache_prefix prefix;
    int apart; /* 1: memory is told as a device's, of which nothing is read in place */
};

void tv_engine_fixture_open(struct tv_engine_fixture *fixture,
                            const struct tv_engine_fixture_options *options);
/* The engine on fixture->base, judged by the path oracle: tv_verify_engine_create's word. */
int tv_engine_fixture_judge(struct tv_engine_fixture *fixture);
void tv_engine_fixture_close(struct tv_engine_fixture *fixture);

/* TV_TEST_SCALE (a factor, default 1) times `count`, at least 1. */
int32_t tv_test_scaled(int32_t count);

/* A small generator of its own, so that tests do not depend on libc's. */
struct tv_test_random {
    uint64_t state;
};
uint32_t tv_test_random_next(struct tv_test_random *random);
int32_t tv_test_random_below(struct tv_test_random *random, int32_t limit);

/* Trees; tv_tree_finish frees them. tokens may be NULL: random ones below vocab, no two siblings
 * equal. */
void tv_test_tree(struct tv_tree *tree, int32_t count, const int32_t *tokens,
                  const int32_t *parents);
void tv_test_tree_chain(struct tv_tree *tree, const int32_t *tokens, int32_t count);
void tv_test_tree_random(struct tv_tree *tree, int32_t count, int32_t vocab, int32_t root_token,
                         struct tv_test_random *random);

/* Rules without stop tokens or length limit. */
struct tv_round_rule tv_test_greedy(const struct tv_engine *engine);
struct tv_round_rule tv_test_sampled(const struct tv_engine *engine, float temperature,
                                     uint64_t seed);

struct tv_context *tv_test_context(struct tv_engine *engine);
/* Prefill in slices and draw the next token by `rule` (NULL: -1 is returned). */
int32_t tv_test_prefill(struct tv_engine *engine, struct tv_context *context, const int32_t *tokens,
                        int32_t count, const struct tv_round_rule *rule);
/* One round; its code must be TV_OK. */
void tv_test_verify(struct tv_engine *engine, struct tv_context *context,
                    const struct tv_tree *tree, const struct tv_round_rule *rule, int commit,
                    struct tv_round_out *ret_out);

/* Random tokens below `vocab`. */
void tv_test_prefix_fill(int32_t *prefix, int32_t count, int32_t vocab, uint64_t seed);
/* One KV row of the fixture's cache, host memory. */
const char *tv_test_kv_row(const struct tv_fixture *base, const struct tv_cache_seq *seq,
                           int32_t layer, int32_t row, size_t *ret_bytes);

#endif
