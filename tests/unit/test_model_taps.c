/*
 * test_model_taps.c - taps of a model: which are refused at the load, what passes keep, what they
 * leave alone.
 */
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "kernels/kernels.h"
#include "model/model.h"
#include "tiny_model.h"

#define HIDDEN 16 /* of the tiny model, which has two layers */
#define ROWS   4
#define PROMPT 20 /* rows of a prefill pass, more than verify passes may have */

static char dir[512];
static struct tv_kernels *kernels;

static struct tv_model_options options_of(int32_t tap_count, int32_t first, int32_t second)
{
    return (struct tv_model_options){.rows_max = 8,
                                     .prefill_rows = PROMPT,
                                     .requests_max = 2,
                                     .page_size = 16,
                                     .tap_count = tap_count,
                                     .taps = {first, second}};
}

static void refused(const struct tv_model_options *options, const char *text)
{
    struct tv_model_error error = {.text = ""};
    struct tv_model *model = NULL;
    int rc = tv_model_load(kernels, dir, options, &model, &error);
    if (rc != -ERANGE || strstr(error.text, text) == NULL) {
        fail_msg("%d '%s', wanted '%s'", rc, error.text, text);
    }
    assert_null(model);
}

static void what_is_refused(void **state)
{
    struct tv_model_options outside = options_of(2, 0, 3), twice = options_of(2, 1, 1);
    struct tv_model_options fine = options_of(2, 0, 2), none = options_of(0, 0, 0);
    (void)state;
    refused(&outside, "taps: 3 is outside of 0 to 2");
    refused(&twice, "taps: 1 is listed twice");
    none.projection = "drafter";
    refused(&none, "no taps to project");
    fine.projection = "no/such/drafter";
    refused(&fine, "No such file");
    struct tv_model_options rounded = options_of(0, 0, 0);
    rounded.products = TV_PRODUCTS_BF16;
    refused(&rounded, "bf16 products need bf16 weights, these are f32");
}

struct world {
    struct tv_model *model;
    struct tv_cache *cache;
    struct tv_cache_seq seq;
};

static void world_open(struct world *world)
{
    char projection[600];
    struct tv_model_options options = options_of(2, 2, 0);
    struct tv_model_error error = {.text = ""};
    struct tv_cache_shortage shortage;
    memset(world, 0, sizeof *world);
    (void)snprintf(projection, sizeof projection, "%s/drafter.safetensors", dir);
    tv_tiny_projection(dir, "drafter.safetensors", 3, 2 * HIDDEN);
    options.projection = projection;
    assert_int_equal(tv_model_load(kernels, dir, &options, &world->model, &error), 0);
    const struct tv_model_config *config = tv_model_config(world->model);
    struct tv_cache_params params = {.layers = config->layers,
                                     .page_size = 16,
                                     .row_dim = config->kv_lora + config->rope_dim,
                                     .pages = 4};
    assert_int_equal(config->hidden, HIDDEN);
    assert_int_equal(tv_cache_create(kernels, &params, &world->cache), 0);
    assert_int_equal(tv_cache_reserve(world->cache, &world->seq, PROMPT, &shortage), 0);
}

static void world_close(struct world *world)
{
    tv_cache_seq_finish(world->cache, &world->seq);
    tv_cache_destroy(world->cache);
    tv_model_destroy(world->model);
}

static void verify(struct world *world, const int32_t *tokens)
{
    static const int32_t parents[ROWS] = {-1, 0, 1, 2}, depths[ROWS] = {0, 1, 2, 3};
    struct tv_model_item item = {
        .seq = &world->seq, .rows = ROWS, .tokens = tokens, .parents = parents, .depths = depths};
    const float *logits = NULL;
    assert_int_equal(tv_model_verify(world->model, world->cache, &item, 1, NULL, NULL, &logits), 0);
}

static const float *rows_of(struct world *world)
{
    const float *rows = NULL;
    assert_int_equal(tv_model_taps_rows(world->model, 0, ROWS, &rows), 0);
    return rows;
}

/* Tap 0 is the embedding, which the pass of a prompt has too; passes that nobody asks keep none. */
static void what_passes_keep(void **state)
{
    static const int32_t tokens[ROWS] = {3, 1, 4, 1}, others[ROWS] = {5, 9, 2, 6};
    float kept[ROWS * 2 * HIDDEN];
    struct world world;
    (void)state;
    world_open(&world);
    tv_model_taps_set(world.model, 1);
    verify(&world, tokens);
    memcpy(kept, rows_of(&world), sizeof kept);
    assert_memory_equal(kept + 1 * 2 * HIDDEN + HIDDEN, kept + 3 * 2 * HIDDEN + HIDDEN,
                        HIDDEN * sizeof(float)); /* the same token twice */
    assert_memory_not_equal(kept, kept + HIDDEN, HIDDEN * sizeof(float));
    tv_model_taps_set(world.model, 0);
    verify(&world, others);
    assert_memory_equal(kept, rows_of(&world), sizeof kept);
    tv_model_taps_set(world.model, 1);
    assert_int_equal(tv_model_prefill(world.model, world.cache, &world.seq, tokens, ROWS, NULL), 0);
    const float *rows = rows_of(&world);
    for (int r = 0; r < ROWS; r++) {
        assert_memory_equal(rows + r * 2 * HIDDEN + HIDDEN, kept + r * 2 * HIDDEN + HIDDEN,
                            HIDDEN * sizeof(float));
    }
    world_close(&world);
}

/* All rows at once and one by one give the same bits, near the sums in double. */
static void the_projection(void **state)
{
    static const int32_t tokens[ROWS] = {3, 1, 4, 1};
    float all[ROWS * 3];
    const float *projected = NULL;
    struct world world;
    (void)state;
    world_open(&world);
    assert_int_equal(tv_model_taps_project_dim(world.model), 3);
    tv_model_taps_set(world.model, 1);
    verify(&world, tokens);
    assert_int_equal(tv_model_taps_project(world.model, 0, ROWS, &projected), 0);
    memcpy(all, projected, sizeof all);
    for (int32_t r = 0; r < ROWS; r++) {
        const float *row = rows_of(&world) + r * 2 * HIDDEN;
        assert_int_equal(tv_model_taps_project(world.model, r, 1, &projected), 0);
        assert_memory_equal(projected, all + r * 3, 3 * sizeof(float));
        for (int n = 0; n < 3; n++) {
            double sum = 0.0;
            for (int i = 0; i < 2 * HIDDEN; i++) {
                sum += (double)row[i] * (double)((n * 2 * HIDDEN + i) % 16 + 1) / 8.0;
            }
            assert_true(sum - (double)all[r * 3 + n] < 1e-4 && (double)all[r * 3 + n] - sum < 1e-4);
        }
    }
    const float *first = NULL; /* two trees of one pass */
    assert_int_equal(tv_model_taps_project(world.model, 0, 2, &first), 0);
    assert_int_equal(tv_model_taps_project(world.model, 2, 2, &projected), 0);
    assert_memory_equal(first, all, 2 * 3 * sizeof(float));
    assert_memory_equal(projected, all + 2 * 3, 2 * 3 * sizeof(float));
    assert_int_equal(tv_model_taps_project(world.model, PROMPT - 3, ROWS, &projected), -EINVAL);
    assert_int_equal(tv_model_taps_rows(world.model, PROMPT - 3, ROWS, &projected), -EINVAL);
    world_close(&world);
}

/* A device whose memory is not the host's: the same rows, kept by every pass and copied on demand.
 */
static void rows_of_a_device(void **state)
{
    static const int32_t tokens[ROWS] = {3, 1, 4, 1};
    float kept[ROWS * 2 * HIDDEN], all[ROWS * 3];
    const float *projected = NULL;
    struct world world;
    (void)state;
    for (int apart = 0; apart < 2; apart++) {
        kernels->host_memory = !apart;
        world_open(&world);
        tv_model_taps_set(world.model, !apart);
        verify(&world, tokens);
        const float *last = NULL;
        assert_int_equal(tv_model_taps_project(world.model, 0, ROWS, &projected), 0);
        assert_int_equal(tv_model_taps_rows(world.model, 3, 1, &last), 0);
        if (!apart) {
            memcpy(kept, rows_of(&world), sizeof kept);
            memcpy(all, projected, sizeof all);
        }
        assert_memory_equal(last, kept + 3 * 2 * HIDDEN, 2 * HIDDEN * sizeof(float));
        assert_memory_equal(projected, all,
                            3 * 3 * sizeof(float)); /* beside the row asked for then */
        assert_memory_equal(rows_of(&world), kept, sizeof kept);
        assert_int_equal(tv_model_prefill(world.model, world.cache, &world.seq, tokens, ROWS, NULL),
                         0);
        const float *rows = rows_of(&world);
        assert_memory_equal(rows + 2 * HIDDEN + HIDDEN, kept + 2 * HIDDEN + HIDDEN,
                            HIDDEN * sizeof(float));
        world_close(&world);
    }
    kernels->host_memory = 1;
}

/* All rows of a slice that is longer than a verify pass may be, as they are and projected. */
static void rows_of_a_long_slice(void **state)
{
    int32_t tokens[PROMPT];
    float kept[2][PROMPT * 2 * HIDDEN], all[2][PROMPT * 3];
    (void)state;
    for (int i = 0; i < PROMPT; i++) {
        tokens[i] = 1 + i % 7;
    }
    for (int apart = 0; apart < 2; apart++) {
        struct world world;
        const float *rows = NULL;
        kernels->host_memory = !apart;
        world_open(&world);
        tv_model_taps_set(world.model, !apart);
        assert_int_equal(
            tv_model_prefill(world.model, world.cache, &world.seq, tokens, PROMPT, NULL), 0);
        assert_int_equal(tv_model_taps_rows(world.model, 0, PROMPT, &rows), 0);
        memcpy(kept[apart], rows, sizeof kept[apart]);
        assert_int_equal(tv_model_taps_project(world.model, 0, PROMPT, &rows), 0);
        memcpy(all[apart], rows, sizeof all[apart]);
        world_close(&world);
    }
    kernels->host_memory = 1;
    assert_memory_equal(kept[1], kept[0], sizeof kept[0]);
    assert_memory_equal(all[1], all[0], sizeof all[0]);
    for (int i = 7; i < PROMPT; i++) { /* tap 0 is the embedding */
        assert_memory_equal(kept[0] + i * 2 * HIDDEN + HIDDEN,
                            kept[0] + (i - 7) * 2 * HIDDEN + HIDDEN, HIDDEN * sizeof(float));
    }
}

static int setup(void **state)
{
    struct tv_kernels_options options = {.threads = 1, .cpu_flags_mask = ~UINT64_C(0)};
    struct tv_tiny_model *tiny = malloc(sizeof *tiny);
    (void)state;
    assert_non_null(tiny);
    tv_tiny_folder(dir, sizeof dir);
    tv_tiny_init(tiny, 42);
    tv_tiny_write(tiny, dir);
    tv_tiny_finish(tiny);
    free(tiny);
    return tv_kernels_create("cpu", &options, &kernels);
}

static int teardown(void **state)
{
    (void)state;
    kernels->destroy(kernels);
    tv_tiny_folder_remove(dir);
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(what_is_refused),      cmocka_unit_test(what_passes_keep),
        cmocka_unit_test(the_projection),       cmocka_unit_test(rows_of_a_device),
        cmocka_unit_test(rows_of_a_long_slice),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
