/*
 * test_kernels_table.c - the table as a whole: creation, refusals, workspaces that are too small,
 * pools beyond 32 bits (B27), and the threads of the cpu backend.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <errno.h>
#include <math.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "kernels/cpu/pool.h"
#include "kernels/cpu_features.h"
#include "kernels/kernels.h"

static void test_create_by_name(void **state)
{
    (void)state;
    struct tv_kernels *k = NULL;
    assert_int_equal(tv_kernels_create("gpu", NULL, &k), -ENOTSUP);
    assert_null(k);
    static const char *const names[] = {"ref", "cpu"};
    for (size_t i = 0; i < 2; i++) {
        assert_int_equal(tv_kernels_create(names[i], NULL, &k), 0);
        assert_string_equal(k->name, names[i]);
        assert_int_equal(k->abi, TV_KERNELS_ABI);
        assert_int_equal(k->host_memory, 1);
        void *memory = k->alloc(k, 1);
        assert_non_null(memory);
        assert_int_equal((uintptr_t)memory % 64, 0);
        k->free(k, memory);
        assert_null(k->alloc(k, SIZE_MAX));
        k->destroy(k);
    }
}

/* Steps of one operation of `rows` rows. */
static uint64_t linear_steps(struct tv_kernels *k, int32_t rows, int32_t n)
{
    enum { COLS = 256, ROWS_MAX = 64, N_MAX = 1024 };
    static float x[ROWS_MAX * COLS], w[N_MAX * COLS], y[ROWS_MAX * N_MAX];
    const struct tv_linear args = {.rows = rows,
                                   .n = n,
                                   .k = COLS,
                                   .groups = 1,
                                   .x = x,
                                   .x_row_stride = COLS,
                                   .w = w,
                                   .w_dtype = TV_F32,
                                   .y = y,
                                   .y_row_stride = N_MAX};
    uint64_t before = k->progress(k);
    assert_int_equal(k->linear(k, &args), 0);
    return k->progress(k) - before;
}

/* Steps of prefill attention of one row behind `start` others, two heads. */
static uint64_t prefill_steps(struct tv_kernels *k, int32_t start)
{
    enum { HEADS = 2, TOKENS = 1024, NOPE = 16, VALUE = 16 };
    static float kv[TOKENS * TV_MLA_ROW], up[HEADS * NOPE * TV_MLA_LATENT];
    static float q[HEADS * (NOPE + TV_MLA_ROPE)], out[HEADS * VALUE];
    int32_t pages[TOKENS / 64];
    for (int32_t i = 0; i < TOKENS / 64; i++) {
        pages[i] = i;
    }
    struct tv_prefill_attn args = {.rows = 1,
                                   .start = start,
                                   .heads = HEADS,
                                   .nope_dim = NOPE,
                                   .rope_dim = TV_MLA_ROPE,
                                   .v_dim = VALUE,
                                   .latent_dim = TV_MLA_LATENT,
                                   .softmax_scale = 0.1f,
                                   .q = q,
                                   .k_up = up,
                                   .v_up = up,
                                   .w_dtype = TV_F32,
                                   .kv_pages = kv,
                                   .kv_dtype = TV_F32,
                                   .page_count = TOKENS / 64,
                                   .page_size = 64,
                                   .page_table = pages,
                                   .out = out};
    args.workspace_bytes = k->prefill_attn_workspace(k, &args);
    args.workspace = k->alloc(k, args.workspace_bytes);
    assert_non_null(args.workspace);
    uint64_t before = k->progress(k);
    assert_int_equal(k->prefill_attn(k, &args), 0);
    k->free(k, args.workspace);
    return k->progress(k) - before;
}

/* Work is counted in steps of bounded size: more of it is more steps, on one thread and on some. */
static void test_progress_is_counted(void **state)
{
    (void)state;
    for (int32_t threads = 1; threads <= 3; threads++) {
        const struct tv_kernels_options options = {.threads = threads,
                                                   .cpu_flags_mask = ~UINT64_C(0)};
        struct tv_kernels *k = NULL;
        assert_int_equal(tv_kernels_create("cpu", &options, &k), 0);
        assert_non_null(k->progress);
        assert_true(linear_steps(k, 1, 1) >= 1);
        assert_true(linear_steps(k, 64, 1024) >= 1024 / 64);
        assert_true(prefill_steps(k, 1023) >= prefill_steps(k, 63) + 2 * 15); /* tiles, heads */
        k->destroy(k);
    }
}

/* A backend that was asked for and is missing is an error with its reason. */
static void test_missing_cuda_library(void **state)
{
    (void)state;
    struct tv_kernels *k = NULL;
    char reason[200] = "";
    struct tv_kernels_options options = {.reason = reason, .reason_bytes = sizeof reason};
    assert_int_equal(setenv("TREEVERIFY_CUDA_LIB", "/nonexistent/backend.so", 1), 0);
    assert_int_equal(tv_kernels_create("cuda", &options, &k), -ENOENT);
    assert_non_null(strstr(reason, "/nonexistent/backend.so"));
    assert_int_equal(tv_kernels_create("cuda", NULL, &k), -ENOENT);
    /* a library that is no backend: the program's own C library */
    assert_int_equal(setenv("TREEVERIFY_CUDA_LIB", "libc.so.6", 1), 0);
    assert_int_equal(tv_kernels_create("cuda", &options, &k), -EPROTO);
    assert_non_null(strstr(reason, "ABI"));
    assert_int_equal(unsetenv("TREEVERIFY_CUDA_LIB"), 0);
    assert_null(k);
}

static void test_mask_forbids_features(void **state)
{
    (void)state;
    struct tv_kernels *k = NULL;
    struct tv_kernels_options options = {.threads = 1, .cpu_flags_mask = 0};
    assert_int_equal(tv_kernels_create("cpu", &options, &k), 0);
    assert_string_equal(k->variant, "portable");
    k->destroy(k);
    options.cpu_flags_mask = TV_CPU_AVX2;
    assert_int_equal(tv_kernels_create("cpu", &options, &k), 0);
    const char *expected = tv_cpu_features_detect() & TV_CPU_AVX2 ? "avx2" : "portable";
    assert_string_equal(k->variant, expected);
    k->destroy(k);
    /* the tiles need the loops of AVX-512 beside them */
    options.cpu_flags_mask = TV_CPU_AVX2 | TV_CPU_AMX_BF16;
    assert_int_equal(tv_kernels_create("cpu", &options, &k), 0);
    assert_string_equal(k->variant, expected);
    k->destroy(k);
    options.cpu_flags_mask = TV_CPU_AVX2 | TV_CPU_AVX512F;
    assert_int_equal(tv_kernels_create("cpu", &options, &k), 0);
    expected = tv_cpu_features_detect() & TV_CPU_AVX512F ? "avx512f" : expected;
    assert_string_equal(k->variant, expected);
    k->destroy(k);
}

struct attn_fixture {
    struct tv_verify_attn args;
    float q[2 * 576], out[2 * 512], lse[2];
    int32_t page_table[2], prefix_len, node_count, parents[2];
};

/* Two nodes behind a prefix of 70 tokens, pages of 64, one head. */
static void attn_init(struct attn_fixture *f, const void *kv, int64_t page_count, int32_t page)
{
    memset(f, 0, sizeof *f);
    for (int i = 0; i < 2 * 576; i++) {
        f->q[i] = (float)((i * 7) % 11) - 5.0f;
    }
    f->page_table[0] = page;
    f->page_table[1] = page + 1;
    f->prefix_len = 70;
    f->node_count = 2;
    f->parents[0] = -1;
    f->args = (struct tv_verify_attn){
        .batch = 1,
        .q_len = 2,
        .heads = 1,
        .latent_dim = 512,
        .rope_dim = 64,
        .softmax_scale = 0.05f,
        .dtype = TV_F32,
        .out_dtype = TV_F32,
        .q = f->q,
        .kv_pages = kv,
        .page_count = page_count,
        .page_size = 64,
        .max_pages = 2,
        .page_table = f->page_table,
        .prefix_len = &f->prefix_len,
        .node_count = &f->node_count,
        .parents = f->parents,
        .kv_len_max = 72,
        .out = f->out,
        .lse = f->lse,
    };
}

static int attn_run(struct tv_kernels *k, struct attn_fixture *f)
{
    f->args.workspace_bytes = k->verify_attn_workspace(k, &f->args);
    f->args.workspace = k->alloc(k, f->args.workspace_bytes);
    assert_non_null(f->args.workspace);
    int rc = k->verify_attn(k, &f->args);
    k->free(k, f->args.workspace);
    return rc;
}

static void fill_rows(float *kv)
{
    for (int i = 0; i < 128 * 576; i++) {
        kv[i] = (float)((i * 13) % 17) * 0.125f - 1.0f;
    }
}

/* B27: the same rows at the bottom and at the top of a pool of more than 2^32 elements. The pool is
 * address space alone; only the pages that are used get memory. */
static void test_b27_top_of_a_large_pool(void **state)
{
    (void)state;
    const int64_t page_elements = 64 * 576;
    const int64_t pages = ((int64_t)1 << 32) / page_elements + 16;
    size_t bytes = (size_t)(pages * page_elements) * sizeof(float);
    static const char *const names[] = {"ref", "cpu"};
    float *pool = mmap(NULL, bytes, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    assert_true(pool != MAP_FAILED); /* 17 GB of address space, hardly any memory */
    fill_rows(pool);
    fill_rows(pool + (pages - 2) * page_elements);
    for (size_t i = 0; i < 2; i++) {
        struct tv_kernels *k = NULL;
        struct attn_fixture low, high;
        assert_int_equal(tv_kernels_create(names[i], NULL, &k), 0);
        attn_init(&low, pool, pages, 0);
        attn_init(&high, pool, pages, (int32_t)pages - 2);
        assert_int_equal(attn_run(k, &low), 0);
        assert_int_equal(attn_run(k, &high), 0);
        assert_memory_equal(low.out, high.out, sizeof low.out);
        assert_memory_equal(low.lse, high.lse, sizeof low.lse);
        int64_t src = pages * 64 - 1, dst = 0;
        pool[src * 576] = 42.0f;
        assert_int_equal(k->kv_move(k, pool, 576 * sizeof(float), pages * 64, &src, &dst, 1), 0);
        assert_true(pool[0] == 42.0f);
        fill_rows(pool);
        k->destroy(k);
    }
    assert_int_equal(munmap(pool, bytes), 0);
}

static void test_attention_refuses(void **state)
{
    (void)state;
    struct tv_kernels *k = NULL;
    struct attn_fixture f;
    float *kv = malloc(128 * 576 * sizeof *kv);
    assert_non_null(kv);
    fill_rows(kv);
    assert_int_equal(tv_kernels_create("cpu", NULL, &k), 0);
    attn_init(&f, kv, 2, 0);
    f.page_table[1] = 2;
    assert_int_equal(attn_run(k, &f), -EINVAL);
    f.page_table[1] = -1;
    assert_int_equal(attn_run(k, &f), -EINVAL);
    attn_init(&f, kv, 2, 0);
    f.parents[1] = 1;
    assert_int_equal(attn_run(k, &f), -EINVAL);
    f.parents[1] = -1;
    assert_int_equal(attn_run(k, &f), -EINVAL);
    attn_init(&f, kv, 2, 0);
    f.args.kv_len_max = 71;
    assert_int_equal(attn_run(k, &f), -EINVAL);
    attn_init(&f, kv, 2, 0);
    f.args.page_size = 1;
    assert_int_equal(attn_run(k, &f), -EINVAL);
    static const float scales[] = {0.0f, -0.07f, INFINITY, NAN};
    for (size_t i = 0; i < sizeof scales / sizeof scales[0]; i++) {
        attn_init(&f, kv, 2, 0);
        f.args.softmax_scale = scales[i];
        assert_int_equal(attn_run(k, &f), -EINVAL);
    }
    attn_init(&f, kv, 2, 0);
    f.args.workspace = kv;
    f.args.workspace_bytes = 8;
    assert_int_equal(k->verify_attn(k, &f.args), -ENOSPC);
    assert_int_equal(k->verify_attn_naive(k, &f.args), -ENOSPC);
    attn_init(&f, kv, 2, 0);
    assert_int_equal(attn_run(k, &f), 0);
    k->destroy(k);
    free(kv);
}

static void test_experts_refuse_unknown_ids(void **state)
{
    (void)state;
    static const char *const names[] = {"ref", "cpu"};
    for (size_t i = 0; i < 2; i++) {
        struct tv_kernels *k = NULL;
        int32_t ids[1] = {4};
        float x[8] = {0}, weights[1] = {1.0f};
        struct tv_experts a = {.rows = 1, .hidden = 8, .inter = 8, .experts = 4, .top_k = 1};
        a.x = a.y = x;
        a.ids = ids;
        a.weights = weights;
        assert_int_equal(tv_kernels_create(names[i], NULL, &k), 0);
        assert_int_equal(k->experts(k, &a), -EINVAL);
        ids[0] = -1;
        assert_int_equal(k->experts(k, &a), -EINVAL);
        k->destroy(k);
    }
}

struct count_job {
    int32_t seen[1000];
    int32_t threads;
    atomic_int strangers; /* items run under a thread number that does not exist */
};

static void count_item(void *arg, int32_t item, int32_t thread)
{
    struct count_job *job = arg;
    job->seen[item]++;
    if (thread < 0 || thread >= job->threads) {
        atomic_fetch_add(&job->strangers, 1);
    }
}

/* Every item exactly once, job after job, with more threads than processors. */
static void test_pool_runs_each_item_once(void **state)
{
    (void)state;
    for (int32_t threads = 1; threads <= 5; threads++) {
        struct tv_cpu_pool *pool = NULL;
        assert_int_equal(tv_cpu_pool_create(threads, &pool), 0);
        assert_int_equal(tv_cpu_pool_threads(pool), threads);
        for (int32_t round = 0; round < 300; round++) {
            struct count_job job = {.threads = threads};
            int32_t items = (round * 37) % 1000;
            tv_cpu_pool_run(pool, items, round % 5 != 0, count_item, &job);
            assert_int_equal(atomic_load(&job.strangers), 0);
            for (int32_t i = 0; i < 1000; i++) {
                assert_int_equal(job.seen[i], i < items);
            }
        }
        tv_cpu_pool_destroy(pool);
    }
    tv_cpu_pool_destroy(NULL);
}

/* The reference rounds to nearest even where a weight is bf16, and nowhere else; the cpu backend
 * says that it cannot. */
static void test_products(void **state)
{
    static const char *const names[] = {"ref", "cpu"};
    /* 257 is half-way between 256 and 258, 259 between 258 and 260: to even */
    const float x[8] = {257.0f, 259.0f}, wide[8] = {1.0f, 100.0f};
    uint16_t narrow[8] = {0};
    float y = 0.0f;
    (void)state;
    narrow[0] = tv_f32_to_bf16(wide[0]);
    narrow[1] = tv_f32_to_bf16(wide[1]);
    for (int i = 0; i < 2; i++) {
        struct tv_kernels *k = NULL;
        struct tv_linear args = {.rows = 1, .n = 1, .k = 8, .groups = 1, .x_row_stride = 8};
        args.x = x;
        args.y = &y;
        args.y_row_stride = 1;
        assert_int_equal(tv_kernels_create(names[i], NULL, &k), 0);
        args.w = narrow;
        args.w_dtype = TV_BF16;
        assert_int_equal(k->linear(k, &args), 0);
        assert_true(y == 257.0f + 25900.0f);
        args.products = TV_PRODUCTS_BF16;
        assert_int_equal(k->linear(k, &args), i == 0 ? 0 : -ENOTSUP);
        assert_true(i == 1 || y == 256.0f + 26000.0f);
        args.w = wide;
        args.w_dtype = TV_F32;
        assert_int_equal(k->linear(k, &args), i == 0 ? 0 : -ENOTSUP);
        assert_true(i == 1 || y == 257.0f + 25900.0f);
        args.products = (enum tv_products)2;
        assert_int_equal(k->linear(k, &args), -EINVAL);
        k->destroy(k);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_create_by_name),
        cmocka_unit_test(test_products),
        cmocka_unit_test(test_progress_is_counted),
        cmocka_unit_test(test_missing_cuda_library),
        cmocka_unit_test(test_mask_forbids_features),
        cmocka_unit_test(test_b27_top_of_a_large_pool),
        cmocka_unit_test(test_attention_refuses),
        cmocka_unit_test(test_experts_refuse_unknown_ids),
        cmocka_unit_test(test_pool_runs_each_item_once),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
