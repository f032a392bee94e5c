/*
 * model_fixture.h - a loaded checkpoint with its cache, and reference tensors, for the C tests.
 *
 * Every helper fails the running cmocka test instead of returning an error.
 */
#ifndef TV_TESTS_SUPPORT_MODEL_FIXTURE_H
#define TV_TESTS_SUPPORT_MODEL_FIXTURE_H

#include <stdint.h>

#include "cache/cache.h"
#include "model/model.h"
#include "model/safetensors.h"

struct tv_fixture {
    struct tv_kernels *kernels;
    struct tv_model *model;
    struct tv_cache *cache;
};

struct tv_fixture_options {
    const char *backend; /* "ref" or "cpu" */
    const char *dir;     /* of the checkpoint */
    int32_t page_size, rows_max, requests_max, max_len;
    int32_t prefill_rows; /* 0: rows_max */
    int64_t pages;
    int32_t threads;
    enum tv_dtype kv_dtype;
    enum tv_cache_prefix prefix;
    enum tv_products products;
};

/* Directory of a bundled checkpoint; static storage, valid until the next call. */
const char *tv_fixture_dir(const char *name);
/* Whether pools are poisoned: as TREEVERIFY_POISON says, which the daemons under test read too; on
 * without it. Every pool that a test creates asks this, except in the tests of the cache alone. */
int tv_fixture_poison(void);
void tv_fixture_open(struct tv_fixture *fixture, const struct tv_fixture_options *options);
void tv_fixture_close(struct tv_fixture *fixture);

/* Reserve, prefill in pieces of `piece` tokens and commit. Logits of the last token are returned,
 * valid until the next pass. */
const float *tv_fixture_prefill(struct tv_fixture *fixture, struct tv_cache_seq *seq,
                                const int32_t *tokens, int32_t count, int32_t piece);
/* One tree: reserve and verify, the scratch stays. depths are worked out here. */
const float *tv_fixture_verify(struct tv_fixture *fixture, struct tv_cache_seq *seq,
                               const int32_t *tokens, const int32_t *parents, int32_t rows);
/* The same as a chain. */
const float *tv_fixture_chain(struct tv_fixture *fixture, struct tv_cache_seq *seq,
                              const int32_t *tokens, int32_t rows);
void tv_fixture_commit(struct tv_fixture *fixture, struct tv_cache_seq *seq, const int32_t *nodes,
                       int32_t count);

/* A tensor of dir/refs.safetensors: integers as int32, or floats; malloc'd, the caller's. NULL when
 * there is none of that name. */
int32_t *tv_refs_ints(const char *dir, const char *name, int32_t *ret_count);
float *tv_refs_floats(const char *dir, const char *name, int64_t *ret_count);

struct tv_fixture_difference {
    double max_abs;
    int64_t argmax_wrong; /* rows whose best token differs */
};
/* Join the difference of rows of `width` logits to *difference. */
void tv_fixture_compare(const float *got, const float *want, int64_t rows, int64_t width,
                        struct tv_fixture_difference *difference);
/* 5e-4 * max(1, std / 1.6) of the reference: the bound of the numerics contract. */
double tv_fixture_bound(const float *want, int64_t count);

#endif
