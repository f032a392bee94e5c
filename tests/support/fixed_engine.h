/*
 * fixed_engine.h - an engine with fixed answers behind struct tv_engine, for HTTP and protocol
 * tests and measurements.
 *
 * The token at position p is (7 p + 3) mod vocabulary, whatever the context and the sampling; the
 * walk, stop tokens and the length limit are the daemon's own. Never linked into the daemon.
 */
#ifndef TV_TESTS_FIXED_ENGINE_H
#define TV_TESTS_FIXED_ENGINE_H

#include <stdint.h>

#include "verify/verify.h"

struct tv_fixed_engine_params {
    int32_t vocab;        /* >= 2 */
    int32_t max_len;      /* context limit */
    int32_t nodes_max;    /* nodes of one tree */
    int32_t requests_max; /* rounds of one verify call */
    int32_t prefill_rows; /* largest slice */
    int32_t rider_rows;   /* tokens of a prompt in a launch of rounds; 0: none */
    /* > 0: contexts keep their rows in a pool of so many pages, with reuse of prefixes, rows of
     * rounds included; each row is one f32, its token. 0: a length is all they have. */
    int64_t pages;
    int32_t page_size;
};

/* 0, -EINVAL or -ENOMEM. Destroy through engine->ops->destroy. */
int tv_fixed_engine_create(const struct tv_fixed_engine_params *params,
                           struct tv_engine **ret_engine);

/* The token that every round draws for absolute position `position`. */
int32_t tv_fixed_engine_token(const struct tv_engine *engine, int32_t position);

/* Any thread. The next `count` prefills or rounds fail with `code`: TV_KV_FULL, TV_NUMERIC_FAULT or
 * TV_KERNEL_FAULT. */
void tv_fixed_engine_fail(struct tv_engine *engine, enum tv_code code, int32_t count);
/* Any thread. From now on the device is lost: every call that would use one says so. */
void tv_fixed_engine_lose(struct tv_engine *engine);
/* Any thread. While held, prefill and verify wait inside the engine, as a long round does. */
void tv_fixed_engine_hold(struct tv_engine *engine, int held);
/* Any thread. The same of settle, truncate and fork, which a device may hang in as well. */
void tv_fixed_engine_hold_moves(struct tv_engine *engine, int held);
/* Any thread. Every verify call takes at least so long from now on. */
void tv_fixed_engine_slow(struct tv_engine *engine, int64_t microseconds);
/* Any thread. Wait until the worker is inside a held call. */
void tv_fixed_engine_await_held(struct tv_engine *engine);
/* Any thread. Makes self_test fail from now on (1) or pass again (0). */
void tv_fixed_engine_break(struct tv_engine *engine, int broken);
/* Any thread. verify calls so far, those of them with tokens of a prompt, rounds of them that were
 * committed, contexts that are open. */
int64_t tv_fixed_engine_launches(struct tv_engine *engine);
int64_t tv_fixed_engine_shared(struct tv_engine *engine);
int64_t tv_fixed_engine_commits(struct tv_engine *engine);
int32_t tv_fixed_engine_contexts(struct tv_engine *engine);
/* Where a context's rows are, with pages; not while the worker uses it. */
const struct tv_cache_seq *tv_fixed_engine_seq(const struct tv_context *context);

#endif
