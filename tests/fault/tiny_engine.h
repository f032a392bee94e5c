/*
 * tiny_engine.h - the real engine on a model of a few kilobytes, on a device that can fail.
 *
 * One tree of six nodes and one prefix serve all tests. The pool is not poisoned, so that every
 * device call is one that a result needs. Every helper fails the running cmocka test instead of
 * returning an error.
 */
#ifndef TV_TESTS_FAULT_TINY_ENGINE_H
#define TV_TESTS_FAULT_TINY_ENGINE_H

#include <stdint.h>

#include "model/model.h"
#include "verify/engine.h"

#define PREFIX 20
#define NODES  6
#define VOCAB  11
#define PAGES  24

struct world {
    char dir[512];
    struct tv_kernels *kernels;
    struct tv_model *model;
    struct tv_cache *cache;
    struct tv_engine *engine;
    int32_t prefix[PREFIX], tokens[NODES], parents[NODES], depths[NODES];
    struct tv_tree tree; /* on the arrays above; tokens[0] is the test's to set */
};

/* cmocka setup and teardown; *state is a struct world. The teardown finds every page free. */
int world_setup(void **state);
int world_teardown(void **state);

/* Free pages; no page has two holders. */
/* One more engine on the same model and cache, judged as at a start. */
int engine_make(struct world *world, struct tv_engine **ret_engine, char *detail,
                size_t detail_bytes);
int64_t pages_free(struct world *world);
struct tv_round_rule rule_of(const struct world *world);
/* A context with the prefix in it; *ret_drawn is what its prefill drew. */
struct tv_context *context_make(struct world *world, struct tv_drawn *ret_drawn);
/* A round of the tree that commits. */
void round_set(struct world *world, struct tv_round_in *in, struct tv_context *context);

#endif
