/*
 * bench.c - checkkern --bench: time, arithmetic rate and memory rate of the operations that
 * matter, at the shapes of the bundled model and at two larger ones.
 */
#include <math.h>
#include <stdio.h>
#include <time.h>

#include "tests/check/attn.h"
#include "tests/check/bench.h"
#ifdef TV_CHECK_DEVICE
#include "tests/check/device.h"
#endif

#define DEVICE_SLOW 5e-3 /* seconds of a launch from which fewer of them do */

static double now(void)
{
    struct timespec t;
    (void)clock_gettime(CLOCK_MONOTONIC, &t); /* this clock exists on every supported system */
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static double host_seconds(struct check *c, const char *name, bench_fn *fn, const void *arg)
{
    double best = INFINITY;
    for (int repeat = 0; repeat < 5; repeat++) {
        int runs = 0;
        double start = now(), elapsed;
        do {
            if (!check_ok(c, fn(c, arg), name)) {
                return -1.0;
            }
            runs++;
            (void)c->k->sync(c->k);
            elapsed = now() - start;
        } while (elapsed < 0.02);
        best = fmin(best, elapsed / runs);
    }
    return best;
}

#ifdef TV_CHECK_DEVICE
/* One launch, as the timer of graphs wants it. */
struct call {
    struct check *c;
    bench_fn *fn;
    const void *arg;
};

static int launch(void *what)
{
    const struct call *call = what;
    return call->fn(call->c, call->arg);
}

static double device_seconds(const struct bench *b, const char *name, bench_fn *fn, const void *arg)
{
    struct call call = {.c = b->c, .fn = fn, .arg = arg};
    double seconds = -1.0;
    (void)check_ok(b->c, b->c->k->sync(b->c->k), "sync");
    int rc = device_time(b->stream, launch, &call, 1, 1, &seconds);
    if (rc == 0 && seconds < DEVICE_SLOW) {
        rc = device_time(b->stream, launch, &call, 10, 30, &seconds);
    } else if (rc == 0) {
        rc = device_time(b->stream, launch, &call, 2, 10, &seconds);
    }
    return check_ok(b->c, rc, name) ? seconds : -1.0;
}

/* Everything from here on runs on a stream of ours, since the default one cannot be captured. */
static int device_begin(struct bench *b)
{
    struct device_ceilings ceilings;
    if (device_stream_create(&b->stream) != 0 ||
        device_measure_ceilings(b->stream, &ceilings) != 0) {
        check_fail(b->c, "no stream, or no measure of the device");
        return 0;
    }
    b->ceiling_flops = ceilings.flops;
    b->ceiling_bytes = ceilings.bytes;
    b->c->k->stream = b->stream;
    printf("ceilings: %.0f TFLOP/s of mma.sync, %.2f TB/s copied\n", ceilings.flops * 1e-12,
           ceilings.bytes * 1e-12);
    return 1;
}

static void device_end(struct bench *b)
{
    (void)b->c->k->sync(b->c->k);
    b->c->k->stream = NULL;
    device_stream_destroy(b->stream);
}
#endif

double bench_seconds(const struct bench *b, const char *name, bench_fn *fn, const void *arg)
{
#ifdef TV_CHECK_DEVICE
    if (b->stream) {
        return device_seconds(b, name, fn, arg);
    }
#endif
    return host_seconds(b->c, name, fn, arg);
}

void bench_row(const struct bench *b, const char *name, double seconds, double flop, double bytes)
{
    printf("%-44s %10.1f us %8.3f TFLOP/s %8.1f GB/s", name, seconds * 1e6, flop / seconds * 1e-12,
           bytes / seconds * 1e-9);
    if (b->ceiling_flops > 0.0) {
        printf("  %4.1f %% of mma %5.1f %% of copy", 100.0 * flop / seconds / b->ceiling_flops,
               100.0 * bytes / seconds / b->ceiling_bytes);
    }
}

static void measure(const struct bench *b, const char *name, double flop, double bytes,
                    bench_fn *fn, const void *arg)
{
    double seconds = bench_seconds(b, name, fn, arg);
    if (seconds > 0.0) {
        bench_row(b, name, seconds, flop, bytes);
        printf("\n");
        (void)fflush(stdout);
    }
}

static int run_linear(struct check *c, const void *arg)
{
    return c->k->linear(c->k, arg);
}

static void bench_linear(const struct bench *b, enum tv_dtype dtype, int32_t rows, int32_t n,
                         int32_t k)
{
    struct check *c = b->c;
    struct tv_linear a = {.rows = rows, .n = n, .k = k, .groups = 1, .w_dtype = dtype};
    char name[64];
    float *w = check_normals(c, (int64_t)n * k, 1.0f);
    float *x = check_normals(c, (int64_t)rows * k, 1.0f);
    size_t w_bytes = (size_t)n * (size_t)k * tv_dtype_size(dtype);
    a.x_row_stride = k;
    a.y_row_stride = n;
    a.w = check_upload(c, check_weights(c, dtype, w, (int64_t)n * k), w_bytes);
    a.x = check_upload(c, x, (size_t)rows * (size_t)k * sizeof(float));
    a.y = check_poisoned(c, (size_t)rows * (size_t)n * sizeof(float));
    (void)snprintf(name, sizeof name, "linear %s rows %d n %d k %d",
                   dtype == TV_F32    ? "f32"
                   : dtype == TV_BF16 ? "bf16"
                                      : "f16",
                   rows, n, k);
    measure(b, name, 2.0 * rows * n * k, (double)w_bytes, run_linear, &a);
    check_release(c);
}

static int run_attn(struct check *c, const void *arg)
{
    return c->k->verify_attn(c->k, arg);
}

static void bench_attn(const struct bench *b, enum tv_dtype dtype, int32_t heads, int32_t nodes,
                       int32_t prefix)
{
    struct check *c = b->c;
    struct attn_problem p = attn_make(c, 1, &prefix, &nodes, heads, ATTN_RANDOM, dtype);
    int32_t pages = (prefix + nodes + 63) / 64, tokens = prefix + nodes;
    int32_t *table = check_host(c, (size_t)pages * sizeof *table);
    int64_t kv_count = (int64_t)pages * 64 * TV_MLA_ROW, rows = (int64_t)nodes * heads;
    size_t kv_bytes = (size_t)kv_count * tv_dtype_size(dtype);
    float *kv = check_host(c, (size_t)kv_count * sizeof(float));
    char name[64];
    for (int32_t i = 0; i < pages; i++) {
        table[i] = i;
    }
    memcpy(kv, p.kv[0], (size_t)tokens * TV_MLA_ROW * sizeof(float));
    struct tv_verify_attn a = {.batch = 1, .q_len = nodes, .heads = heads, .dtype = dtype};
    a.latent_dim = TV_MLA_LATENT;
    a.rope_dim = TV_MLA_ROPE;
    a.softmax_scale = p.scale;
    a.page_size = 64;
    a.page_count = a.max_pages = pages;
    a.kv_len_max = tokens;
    a.page_table = check_upload(c, table, (size_t)pages * sizeof *table);
    a.kv_pages = check_upload(c, check_weights(c, dtype, kv, kv_count), kv_bytes);
    a.q = check_upload(c, check_weights(c, dtype, p.q, rows * TV_MLA_ROW),
                       (size_t)rows * TV_MLA_ROW * tv_dtype_size(dtype));
    a.prefix_len = check_upload(c, &prefix, sizeof prefix);
    a.node_count = check_upload(c, &nodes, sizeof nodes);
    a.parents = check_upload(c, p.parents, (size_t)nodes * sizeof(int32_t));
    a.out = check_poisoned(c, (size_t)rows * TV_MLA_LATENT * sizeof(float));
    a.lse = check_poisoned(c, (size_t)rows * sizeof(float));
    a.workspace_bytes = c->k->verify_attn_workspace(c->k, &a);
    a.workspace = check_poisoned(c, a.workspace_bytes);
    (void)snprintf(name, sizeof name, "verify_attn %s heads %d nodes %d prefix %d",
                   dtype == TV_F32 ? "f32" : "bf16", heads, nodes, prefix);
    measure(b, name, 2176.0 * (double)rows * tokens, (double)kv_bytes, run_attn, &a);
    check_release(c);
}

static int run_prefill(struct check *c, const void *arg)
{
    return c->k->prefill_attn(c->k, arg);
}

/* `rows` tokens behind `start` others; as many dimensions of a key's first part as of a value. */
static void bench_prefill(const struct bench *b, enum tv_dtype dtype, int32_t rows, int32_t start,
                          int32_t heads, int32_t v_dim)
{
    struct check *c = b->c;
    struct tv_prefill_attn a = {.rows = rows,
                                .start = start,
                                .heads = heads,
                                .nope_dim = v_dim,
                                .rope_dim = TV_MLA_ROPE,
                                .v_dim = v_dim,
                                .latent_dim = TV_MLA_LATENT,
                                .softmax_scale = 0.09f,
                                .w_dtype = TV_BF16,
                                .kv_dtype = dtype,
                                .page_size = 64};
    int32_t pages = (start + rows + 63) / 64, head_dim = v_dim + TV_MLA_ROPE;
    int32_t *table = check_host(c, (size_t)pages * sizeof *table);
    int64_t kv_count = (int64_t)pages * 64 * TV_MLA_ROW;
    int64_t up = (int64_t)heads * v_dim * TV_MLA_LATENT, q_count = (int64_t)rows * heads * head_dim;
    char name[64];
    for (int32_t i = 0; i < pages; i++) {
        table[i] = i;
    }
    a.page_count = pages;
    a.page_table = check_upload(c, table, (size_t)pages * sizeof *table);
    float *kv = check_normals(c, kv_count, 1.0f), *w = check_normals(c, up, 0.05f);
    a.kv_pages = check_upload(c, check_weights(c, dtype, kv, kv_count),
                              (size_t)kv_count * tv_dtype_size(dtype));
    a.k_up = check_upload(c, check_weights(c, TV_BF16, w, up), (size_t)up * 2);
    a.v_up = a.k_up;
    a.q = check_upload(c, check_normals(c, q_count, 1.0f), (size_t)q_count * sizeof(float));
    a.out = check_poisoned(c, (size_t)rows * (size_t)heads * (size_t)v_dim * sizeof(float));
    a.workspace_bytes = c->k->prefill_attn_workspace(c->k, &a);
    a.workspace = check_poisoned(c, a.workspace_bytes);
    (void)snprintf(name, sizeof name, "prefill_attn %s heads %d dim %d, %d at %d",
                   dtype == TV_F32 ? "f32" : "bf16", heads, v_dim, rows, start);
    double seen = rows * (start + 0.5 * (rows + 1)), tokens = start + rows;
    double expand = 4.0 * tokens * heads * v_dim * TV_MLA_LATENT;
    double attend = 2.0 * seen * heads * (head_dim + v_dim);
    measure(b, name, expand + attend, (double)kv_count * (double)tv_dtype_size(dtype), run_prefill,
            &a);
    check_release(c);
}

static int run_draw(struct check *c, const void *arg)
{
    return c->k->draw(c->k, arg);
}

static void bench_draw(const struct bench *b, int32_t vocab, float top_p)
{
    struct check *c = b->c;
    struct tv_sampling sampling = {.temperature = 1.0f, .top_p = top_p, .seed = 5};
    int32_t position = 812;
    struct tv_draw_args a = {.rows = 1, .vocab = vocab};
    char name[64];
    float *logits = check_normals(c, vocab, 4.0f);
    a.logits = check_upload(c, logits, (size_t)vocab * sizeof(float));
    a.positions = check_upload(c, &position, sizeof position);
    a.sampling = check_upload(c, &sampling, sizeof sampling);
    a.draws = check_poisoned(c, sizeof *a.draws);
    a.workspace_bytes = c->k->draw_workspace(c->k, &a);
    a.workspace = check_poisoned(c, a.workspace_bytes);
    (void)snprintf(name, sizeof name, "draw vocab %d top_p %g", vocab, (double)top_p);
    measure(b, name, 0.0, (double)vocab * 4, run_draw, &a);
    check_release(c);
}

static int run_synthesize(struct check *c, const void *arg)
{
    return c->k->synthesize(c->k, arg);
}

static void bench_synthesize(const struct bench *b, int32_t rows, int32_t cols)
{
    struct check *c = b->c;
    size_t bytes = (size_t)rows * (size_t)cols * sizeof(uint16_t);
    struct tv_synthesize a = {.groups = 1,
                              .rows = rows,
                              .cols = cols,
                              .dtype = TV_BF16,
                              .scale = 1.0f,
                              .seed = 5,
                              .to = check_poisoned(c, bytes)};
    char name[64];
    (void)snprintf(name, sizeof name, "synthesize bf16 %d x %d", rows, cols);
    measure(b, name, 0.0, (double)bytes, run_synthesize, &a);
    check_release(c);
}

static void bench_all(const struct bench *b)
{
    const struct tv_kernels *k = b->c->k;
    static const int32_t rows[] = {1, 4, 8, 32, 64, 256};
    for (size_t i = 0; i < sizeof rows / sizeof rows[0] && k->linear; i++) {
        bench_linear(b, TV_BF16, rows[i], 1024, 256);
        bench_linear(b, TV_F32, rows[i], 1024, 256);
        bench_linear(b, TV_BF16, rows[i], 2048, 2048);
    }
    for (size_t i = 0; i < 4 && k->verify_attn; i++) {
        bench_attn(b, TV_F32, 8, rows[i], 300);
        bench_attn(b, TV_BF16, 8, rows[i], 300);
        bench_attn(b, TV_F32, 16, rows[i], 4096);
    }
    if (k->prefill_attn) {
        bench_prefill(b, TV_F32, 64, 0, 8, 64);
        bench_prefill(b, TV_F32, 512, 0, 8, 64);
        if (!k->host_memory) { /* slices of Moonlight's dimensions */
            bench_prefill(b, TV_F32, 2048, 6144, 16, 128);
            bench_prefill(b, TV_BF16, 64, 32704, 16, 128);
            bench_prefill(b, TV_BF16, 512, 7680, 16, 128);
            bench_prefill(b, TV_BF16, 2048, 6144, 16, 128);
            bench_prefill(b, TV_BF16, 2048, 30720, 16, 128);
        }
    }
    if (k->draw) {
        bench_draw(b, 260, 1.0f);
        bench_draw(b, 129280, 1.0f);
        bench_draw(b, 129280, 0.9f);
    }
    bench_synthesize(b, 512, 2048);
}

void check_bench(struct check *c, const char *peers)
{
    struct bench b = {.c = c, .peers = peers};
#ifdef TV_CHECK_DEVICE
    if (!c->k->host_memory && !device_begin(&b)) {
        return;
    }
#endif
    bench_all(&b);
    if (b.stream) {
        bench_attn_points(&b);
    }
#ifdef TV_CHECK_DEVICE
    if (b.stream) {
        device_end(&b);
    }
#endif
}
