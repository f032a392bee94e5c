/*
 * tiny_engine.c - the real engine on a model of a few kilobytes, on a device that can fail.
 */
#include "tiny_engine.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "faults.h"
#include "shadow/shadow.h"
#include "tiny_model.h"

static void model_open(struct world *world)
{
    char projection[600];
    struct tv_model_options options = {.rows_max = 32,
                                       .requests_max = 2,
                                       .page_size = 16,
                                       .tap_count = 2,
                                       .taps = {2, 1},
                                       .projection = projection};
    struct tv_tiny_model *tiny = malloc(sizeof *tiny);
    struct tv_model_error error = {{0}};
    assert_non_null(tiny);
    tv_tiny_folder(world->dir, sizeof world->dir);
    tv_tiny_init(tiny, 42);
    tv_tiny_write(tiny, world->dir);
    tv_tiny_finish(tiny);
    free(tiny);
    (void)snprintf(projection, sizeof projection, "%s/drafter.safetensors", world->dir);
    tv_tiny_projection(world->dir, "drafter.safetensors", 3, 2 * 16);
    assert_int_equal(tv_model_load(world->kernels, world->dir, &options, &world->model, &error), 0);
}

int world_setup(void **state)
{
    static const int32_t tokens[] = {3, 1, 2, 4, 5, 6}, parents[] = {-1, 0, 0, 1, 1, 3};
    static const int32_t depths[] = {0, 1, 1, 2, 2, 3};
    struct tv_kernels_options kernel_options = {.threads = 1, .cpu_flags_mask = ~UINT64_C(0)};
    struct tv_cache_params params = {
        .layers = 2, .page_size = 16, .row_dim = TV_MLA_ROW, .pages = PAGES};
    struct world *world = calloc(1, sizeof *world);
    char detail[200];
    assert_non_null(world);
    assert_int_equal(tv_kernels_create("cpu", &kernel_options, &world->kernels), 0);
    fault_device_wrap(world->kernels);
    model_open(world);
    assert_int_equal(tv_cache_create(world->kernels, &params, &world->cache), 0);
    assert_int_equal(engine_make(world, &world->engine, detail, sizeof detail), 0);
    memcpy(world->tokens, tokens, sizeof tokens);
    memcpy(world->parents, parents, sizeof parents);
    memcpy(world->depths, depths, sizeof depths);
    world->tree = (struct tv_tree){.count = NODES,
                                   .depth = 3,
                                   .tokens = world->tokens,
                                   .parents = world->parents,
                                   .depths = world->depths};
    for (int32_t i = 0; i < PREFIX; i++) {
        world->prefix[i] = (i * 7 + 3) % VOCAB;
    }
    *state = world;
    return 0;
}

int world_teardown(void **state)
{
    struct world *world = *state;
    world->engine->ops->destroy(world->engine);
    assert_int_equal(pages_free(world), PAGES);
    tv_cache_destroy(world->cache);
    tv_model_destroy(world->model);
    world->kernels->destroy(world->kernels);
    tv_tiny_folder_remove(world->dir);
    free(world);
    return 0;
}

int engine_make(struct world *world, struct tv_engine **ret_engine, char *detail,
                size_t detail_bytes)
{
    struct tv_shadow_judge *oracle = NULL;
    int rc = tv_shadow_judge_create(world->model, world->cache, world->kernels, &oracle);
    if (rc == 0) {
        const struct tv_judge judge = tv_shadow_judge_calls(oracle);
        rc = tv_verify_engine_create(world->kernels, world->model, world->cache, &judge, ret_engine,
                                     detail, detail_bytes);
    }
    tv_shadow_judge_destroy(oracle);
    return rc;
}

int64_t pages_free(struct world *world)
{
    struct tv_cache_counts counts;
    tv_cache_counts(world->cache, &counts);
    assert_int_equal(counts.free + counts.held, counts.total);
    assert_int_equal(counts.shared, 0);
    return counts.free;
}

struct tv_round_rule rule_of(const struct world *world)
{
    return (struct tv_round_rule){.rule = TV_RULE_TARGET_WALK,
                                  .sampling = {.temperature = 1.0f, .top_p = 1.0f, .seed = 5},
                                  .max_len = world->engine->max_len};
}

struct tv_context *context_make(struct world *world, struct tv_drawn *ret_drawn)
{
    struct tv_context *context = NULL;
    struct tv_cache_shortage shortage;
    struct tv_round_rule rule = rule_of(world);
    assert_int_equal(world->engine->ops->context_open(world->engine, &context), 0);
    assert_int_equal(world->engine->ops->prefill(world->engine, context, world->prefix, PREFIX,
                                                 &rule, ret_drawn, &shortage),
                     0);
    return context;
}

void round_set(struct world *world, struct tv_round_in *in, struct tv_context *context)
{
    *in = (struct tv_round_in){.context = context,
                               .tree = &world->tree,
                               .rule = rule_of(world),
                               .commit = 1,
                               .want_logits = 1,
                               .top_k = 3};
}
