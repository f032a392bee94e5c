/*
 * test_model_faults.c - loading a checkpoint while the n-th allocation, thread, file or device call
 * fails; one file, two shards with an index, and one with taps and their projection.
 *
 * A load either refuses with the exact code and nothing left (no block, no descriptor), or gives
 * the model that a load without failures gives, to the last bit of its id.
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

#include "faults.h"
#include "model/model.h"
#include "tiny_model.h"

static char dir[512];
static struct tv_kernels *kernels;
static char projection[600]; /* "": without taps */

static int load(struct tv_model **ret_model, struct tv_model_error *error)
{
    struct tv_model_options options = {.rows_max = 8, .requests_max = 2, .page_size = 16};
    if (projection[0] != '\0') {
        options.tap_count = 2;
        options.taps[0] = 2;
        options.projection = projection;
    }
    memset(error, 0, sizeof *error);
    *ret_model = NULL;
    return tv_model_load(kernels, dir, &options, ret_model, error);
}

static void folder_write(int32_t shards)
{
    struct tv_tiny_model *tiny = malloc(sizeof *tiny);
    static char tokenizer[20000];
    assert_non_null(tiny);
    tv_tiny_init(tiny, 42);
    tiny->shards = shards;
    for (int32_t i = 0; shards > 0 && i < tiny->tensor_count; i++) {
        tiny->tensors[i].shard = i % shards;
    }
    tv_tiny_write(tiny, dir);
    memset(tokenizer, 'x', sizeof tokenizer);
    tv_tiny_file(dir, "tokenizer.json", tokenizer, sizeof tokenizer);
    tv_tiny_finish(tiny);
    free(tiny);
}

struct expected {
    uint8_t id[32], tokenizer[32];
    int64_t bytes;
};

static void expected_take(struct expected *expected)
{
    struct tv_model_error error;
    struct tv_model *model;
    int rc = load(&model, &error);
    if (rc != 0) {
        fail_msg("%d %s", rc, error.text);
    }
    memcpy(expected->id, tv_model_id(model), 32);
    memcpy(expected->tokenizer, tv_model_tokenizer_sha256(model), 32);
    expected->bytes = tv_model_bytes(model);
    tv_model_destroy(model);
}

static void model_check(const struct tv_model *model, const struct expected *expected)
{
    assert_memory_equal(tv_model_id(model), expected->id, 32);
    assert_non_null(tv_model_tokenizer_sha256(model));
    assert_memory_equal(tv_model_tokenizer_sha256(model), expected->tokenizer, 32);
    assert_int_equal(tv_model_bytes(model), expected->bytes);
}

struct sweep {
    const char *name;
    unsigned kinds;
    int codes[3]; /* that a failed load may give; 0: it may also succeed */
    int least;    /* calls there must be */
};

static void sweep_run(const struct sweep *sweep, const struct expected *expected)
{
    int told = 0; /* failures of the projection's file */
    for (int n = 1;; n++) {
        struct tv_model_error error;
        struct tv_model *model;
        int64_t blocks = fault_blocks(), descriptors = fault_descriptors();
        fault_arm(sweep->kinds, n);
        int rc = load(&model, &error);
        int failed = fault_disarm();
        int of_projection = rc == -ERANGE && projection[0] != '\0' && sweep->codes[0] == -EBADMSG &&
                            strstr(error.text, "drafter") != NULL;
        if (rc != (failed ? sweep->codes[0] : 0) &&
            (!failed || (rc != sweep->codes[1] && rc != sweep->codes[2] && !of_projection))) {
            fail_msg("%s %d: %d '%s'", sweep->name, n, rc, error.text);
        }
        assert_int_equal(rc == 0, model != NULL);
        if (rc == -EBADMSG) { /* exit 65 says which file it was */
            assert_true(error.text[0] != '\0');
        }
        told += of_projection;
        if (model != NULL) {
            model_check(model, expected);
            assert_int_equal(tv_model_taps_project_dim(model), projection[0] != '\0' ? 3 : 0);
        }
        tv_model_destroy(model);
        assert_int_equal(fault_blocks(), blocks);
        if (fault_descriptors() != descriptors) {
            fail_msg("%s %d: %d %s", sweep->name, n, rc, error.text);
        }
        if (!failed) {
            print_message("%s: %d\n", sweep->name, n - 1);
            assert_true(n > sweep->least);
            assert_int_equal(told > 0, projection[0] != '\0' && sweep->codes[0] == -EBADMSG);
            return;
        }
    }
}

static const struct sweep sweeps[] = {
    {"allocations", FAULT_MEMORY, {-ENOMEM, -ENOMEM, -ENOMEM}, 40},
    {"device calls", FAULT_DEVICE, {-ENOMEM, -EIO, -EIO}, 60},
    {"file calls", FAULT_FILE, {-EBADMSG, -EIO, -EIO}, 40},
    {"reads that end early", FAULT_END, {-EBADMSG, -EBADMSG, -EBADMSG}, 20},
    {"reads that are interrupted", FAULT_AGAIN, {0, 0, 0}, 20},
    {"reads that give less", FAULT_SHORT, {0, 0, 0}, 20},
    {"threads", FAULT_THREAD, {0, 0, 0}, 0},
};

static void run_all(int32_t shards)
{
    struct expected expected;
    folder_write(shards);
    if (projection[0] != '\0') {
        tv_tiny_projection(dir, "drafter.safetensors", 3, 2 * 16);
    }
    expected_take(&expected);
    for (size_t i = 0; i < sizeof sweeps / sizeof sweeps[0]; i++) {
        sweep_run(&sweeps[i], &expected);
    }
}

static void one_file(void **state)
{
    (void)state;
    run_all(0);
}

static void two_shards_and_an_index(void **state)
{
    (void)state;
    run_all(2);
}

static void taps_and_a_projection(void **state)
{
    (void)state;
    (void)snprintf(projection, sizeof projection, "%s/drafter.safetensors", dir);
    run_all(0);
    projection[0] = '\0';
}

/* The backends' own start: blocks and, for cpu, its threads. */
static void a_backend_or_nothing(void **state)
{
    static const char *const names[] = {"ref", "cpu"};
    static const unsigned kinds[] = {FAULT_MEMORY, FAULT_THREAD};
    struct tv_kernels_options options = {.threads = 4, .cpu_flags_mask = ~UINT64_C(0)};
    (void)state;
    for (int i = 0; i < 4; i++) {
        int has_tiles = 0; /* one more block */
        for (int n = 1;; n++) {
            struct tv_kernels *backend = NULL;
            int64_t blocks = fault_blocks();
            fault_arm(kinds[i / 2], n);
            int rc = tv_kernels_create(names[i % 2], &options, &backend);
            int failed = fault_disarm();
            assert_int_equal(rc, !failed ? 0 : i < 2 ? -ENOMEM : -EAGAIN);
            assert_int_equal(backend != NULL, !failed);
            if (backend != NULL) {
                has_tiles = strcmp(backend->variant, "amx_bf16") == 0;
                backend->destroy(backend);
            }
            assert_int_equal(fault_blocks(), blocks);
            if (!failed) {
                assert_int_equal(n, i == 0 ? 2 : i == 1 ? 5 + has_tiles : i == 2 ? 1 : 4);
                break;
            }
        }
    }
}

static int setup(void **state)
{
    struct tv_kernels_options options = {.threads = 1, .cpu_flags_mask = ~UINT64_C(0)};
    (void)state;
    tv_tiny_folder(dir, sizeof dir);
    assert_int_equal(tv_kernels_create("cpu", &options, &kernels), 0);
    fault_device_wrap(kernels);
    return 0;
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
        cmocka_unit_test(a_backend_or_nothing),
        cmocka_unit_test(one_file),
        cmocka_unit_test(two_shards_and_an_index),
        cmocka_unit_test(taps_and_a_projection),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
