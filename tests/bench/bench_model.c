/*
 * bench_model.c - what a pass of a checkpoint costs, and which operation it goes to.
 *
 * usage: bench_model [checkpoint folder [threads [prefix [cpu|cuda [mask]]]]]. Prints one-token
 * decoding, verify of 1 to 64 nodes and prefill; then the share of each slot of the operation
 * table. A device is waited for after every operation, so its shares are of kernels; what a pass
 * costs there is printed beside it from replays of its recording, with bf16 rows. With
 * TV_BENCH_STRICT=1 it fails below 300 tokens/s or above 4 x for 32 nodes (the kjv-mla-8m bounds);
 * with TV_BENCH_CPU_TIME=1 it counts processor time, which a busy machine disturbs less (1 thread).
 * With TV_BENCH_SYNTHETIC=SEED the folder needs a config.json alone, and weights are random.
 * With TV_BENCH_PRODUCTS=bf16 activations are rounded where they meet bf16 weights.
 * With TV_BENCH_CHUNK=N the prefix is prefilled in passes of N rows.
 * With TV_BENCH_NODES=N trees of N nodes alone are verified, for TV_BENCH_ROUNDS rounds.
 * The mask (hexadecimal, kernels/cpu_features.h) names the instruction sets that may be used.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "cache/cache.h"
#include "model/model.h"

#define PAGE_SIZE  64
#define NODES_MAX  128  /* of the trees of doubling size */
#define NODES_MOST 1024 /* of the one that TV_BENCH_NODES asks for */
#define ROUNDS     40
#define DECODES    200

static int64_t now_us(void)
{
    static int clock_id = -1;
    struct timespec now;
    if (clock_id < 0) {
        clock_id = getenv("TV_BENCH_CPU_TIME") != NULL ? CLOCK_PROCESS_CPUTIME_ID : CLOCK_MONOTONIC;
    }
    (void)clock_gettime(clock_id, &now); /* cannot fail with these ids */
    return (int64_t)now.tv_sec * 1000000 + now.tv_nsec / 1000;
}

/* One slot of the table: time spent and calls. */
enum slot {
    SLOT_EMBED,
    SLOT_RMSNORM,
    SLOT_LINEAR,
    SLOT_ROPE,
    SLOT_LATENT,
    SLOT_SWIGLU,
    SLOT_ROUTER,
    SLOT_EXPERTS,
    SLOT_VERIFY,
    SLOT_PREFILL,
    SLOT_PAIR,
    SLOT_QUERY,
    SLOT_MOE,
    SLOT_LAYER,
    SLOTS
};

static const char *const slot_names[SLOTS] = {
    "embed",   "rmsnorm",     "linear",       "rope",        "latent_write", "swiglu", "router",
    "experts", "verify_attn", "prefill_attn", "linear_pair", "query",        "moe",    "layer"};
static int64_t slot_us[SLOTS], slot_calls[SLOTS];
static struct tv_kernels original;

/* Call the backend's slot and book the time. */
#define BOOK(slot, call)                                                                           \
    do {                                                                                           \
        int64_t from = now_us();                                                                   \
        int err = call;                                                                            \
        err = err != 0 || k->host_memory ? err : k->sync(k);                                       \
        slot_us[slot] += now_us() - from;                                                          \
        slot_calls[slot]++;                                                                        \
        return err;                                                                                \
    } while (0)

static int timed_embed(struct tv_kernels *k, int32_t rows, int32_t hidden, int32_t vocab,
                       const void *table, enum tv_dtype dtype, const int32_t *ids, float *x)
{
    BOOK(SLOT_EMBED, original.embed(k, rows, hidden, vocab, table, dtype, ids, x));
}

static int timed_rmsnorm(struct tv_kernels *k, int32_t rows, int32_t dim, const float *x,
                         int64_t x_stride, const float *weight, float eps, float *y,
                         int64_t y_stride)
{
    BOOK(SLOT_RMSNORM, original.rmsnorm(k, rows, dim, x, x_stride, weight, eps, y, y_stride));
}

static int timed_linear(struct tv_kernels *k, const struct tv_linear *args)
{
    BOOK(SLOT_LINEAR, original.linear(k, args));
}

static int timed_rope(struct tv_kernels *k, const struct tv_rope *args)
{
    BOOK(SLOT_ROPE, original.rope(k, args));
}

static int timed_latent_write(struct tv_kernels *k, const struct tv_latent_write *args)
{
    BOOK(SLOT_LATENT, original.latent_write(k, args));
}

static int timed_swiglu(struct tv_kernels *k, int32_t rows, int32_t dim, float *gate,
                        const float *up)
{
    BOOK(SLOT_SWIGLU, original.swiglu(k, rows, dim, gate, up));
}

static int timed_router(struct tv_kernels *k, const struct tv_router *args)
{
    BOOK(SLOT_ROUTER, original.router(k, args));
}

static int timed_experts(struct tv_kernels *k, const struct tv_experts *args)
{
    BOOK(SLOT_EXPERTS, original.experts(k, args));
}

static int timed_verify_attn(struct tv_kernels *k, const struct tv_verify_attn *args)
{
    BOOK(SLOT_VERIFY, original.verify_attn(k, args));
}

static int timed_prefill_attn(struct tv_kernels *k, const struct tv_prefill_attn *args)
{
    BOOK(SLOT_PREFILL, original.prefill_attn(k, args));
}

static int timed_pair(struct tv_kernels *k, const struct tv_linear *first,
                      const struct tv_linear *second)
{
    BOOK(SLOT_PAIR, original.linear_pair(k, first, second));
}

static int timed_query(struct tv_kernels *k, const struct tv_query *args)
{
    BOOK(SLOT_QUERY, original.query(k, args));
}

static int timed_moe(struct tv_kernels *k, const struct tv_moe *args)
{
    BOOK(SLOT_MOE, original.moe(k, args));
}

static int timed_layer(struct tv_kernels *k, const struct tv_layer *args)
{
    BOOK(SLOT_LAYER, original.layer(k, args));
}

static void table_wrap(struct tv_kernels *kernels)
{
    original = *kernels;
    kernels->embed = timed_embed;
    kernels->rmsnorm = timed_rmsnorm;
    kernels->linear = timed_linear;
    kernels->rope = timed_rope;
    kernels->latent_write = timed_latent_write;
    kernels->swiglu = timed_swiglu;
    kernels->router = timed_router;
    kernels->experts = timed_experts;
    kernels->verify_attn = timed_verify_attn;
    kernels->prefill_attn = timed_prefill_attn;
    if (original.moe != NULL) { /* all three, or none */
        kernels->linear_pair = timed_pair;
        kernels->query = timed_query;
        kernels->moe = timed_moe;
    }
    if (original.layer != NULL) {
        kernels->layer = timed_layer;
    }
}

static void slots_print(const char *what)
{
    int64_t total = 0;
    for (int i = 0; i < SLOTS; i++) {
        total += slot_us[i];
    }
    printf("  %s:", what);
    for (int i = 0; i < SLOTS; i++) {
        if (slot_us[i] * 50 > total) {
            printf(" %s %.0f%% (%.1f us x %lld)", slot_names[i],
                   100.0 * (double)slot_us[i] / (double)total,
                   (double)slot_us[i] / (double)slot_calls[i], (long long)slot_calls[i]);
        }
    }
    printf("\n");
    memset(slot_us, 0, sizeof slot_us);
    memset(slot_calls, 0, sizeof slot_calls);
}

struct bench {
    struct tv_kernels *kernels;
    struct tv_model *model;
    struct tv_cache *cache;
    struct tv_cache_seq seq;
};

static int compare_us(const void *left, const void *right)
{
    const int64_t *a = left, *b = right;
    return *a < *b ? -1 : *a > *b;
}

/* One verify of a comb: a chain with a leaf beside every node. 0 or the error. */
static int verify_once(struct bench *bench, int32_t nodes, int32_t accept)
{
    static int32_t tokens[NODES_MOST], parents[NODES_MOST], depths[NODES_MOST];
    struct tv_cache_shortage shortage;
    const float *logits;
    for (int32_t i = 0; i < nodes; i++) {
        tokens[i] = (i * 7 + bench->seq.len) % tv_model_config(bench->model)->vocab;
        parents[i] = i == 0 ? -1 : (i - 1) / 2 * 2;
        depths[i] = i == 0 ? 0 : depths[parents[i]] + 1;
    }
    struct tv_model_item item = {
        .seq = &bench->seq, .rows = nodes, .tokens = tokens, .parents = parents, .depths = depths};
    int err = tv_cache_reserve(bench->cache, &bench->seq, nodes, &shortage);
    if (err == 0) {
        err = tv_model_verify(bench->model, bench->cache, &item, 1, NULL, NULL, &logits);
    }
    if (err == 0) {
        err = bench->kernels->sync(bench->kernels);
    }
    if (err == 0) {
        err = tv_cache_commit(bench->cache, &bench->seq, NULL, accept);
    }
    return err;
}

static int32_t setting(const char *name, int32_t otherwise)
{
    const char *text = getenv(name);
    return text != NULL ? atoi(text) : otherwise;
}

static int64_t verify_median_us(struct bench *bench, int32_t nodes)
{
    int64_t us[ROUNDS];
    int rounds = setting("TV_BENCH_ROUNDS", ROUNDS);
    for (int i = 0; i < rounds; i++) {
        int64_t from = now_us();
        if (verify_once(bench, nodes, 0) != 0) {
            exit(1);
        }
        us[i] = now_us() - from;
    }
    qsort(us, (size_t)rounds, sizeof us[0], compare_us);
    return us[rounds / 2];
}

static int prefill(struct bench *bench, int32_t count)
{
    struct tv_cache_shortage shortage;
    int32_t *tokens = malloc((size_t)count * sizeof *tokens);
    for (int32_t i = 0; tokens != NULL && i < count; i++) {
        tokens[i] = (i * 31 + 5) % tv_model_config(bench->model)->vocab;
    }
    int err = tokens == NULL ? -1 : tv_cache_reserve(bench->cache, &bench->seq, count, &shortage);
    if (err == 0) {
        err = tv_model_prefill(bench->model, bench->cache, &bench->seq, tokens, count, NULL);
    }
    if (err == 0) {
        err = tv_cache_commit(bench->cache, &bench->seq, NULL, count);
    }
    free(tokens);
    return err != 0 ? err : bench->kernels->sync(bench->kernels);
}

/* The whole prefix, in passes of TV_BENCH_CHUNK rows. */
static int prefill_all(struct bench *bench, int32_t prefix)
{
    int32_t chunk = setting("TV_BENCH_CHUNK", prefix);
    int err = chunk > 0 ? 0 : -1;
    for (int32_t done = 0; err == 0 && done < prefix; done += chunk) {
        err = prefill(bench, prefix - done < chunk ? prefix - done : chunk);
    }
    return err;
}

/* Again, without waiting for each operation: the median of three. */
static int prefill_again(struct bench *bench, int32_t prefix)
{
    int64_t us[3];
    for (int i = 0; i < 3; i++) {
        int err = tv_cache_truncate(bench->cache, &bench->seq, 0);
        int64_t from = now_us();
        err = err != 0 ? err : prefill_all(bench, prefix);
        if (err != 0) {
            return err;
        }
        us[i] = now_us() - from;
    }
    qsort(us, 3, sizeof us[0], compare_us);
    printf("prefill again, not waited for: %.0f tokens/s\n", prefix * 1e6 / (double)us[1]);
    return 0;
}

static int bench_open(struct bench *bench, const char *dir, int32_t threads, int32_t prefix,
                      const char *backend, uint64_t mask)
{
    struct tv_kernels_options kernel_options = {.threads = threads, .cpu_flags_mask = mask};
    struct tv_model_options options = {
        .rows_max = prefix, .requests_max = 1, .page_size = PAGE_SIZE};
    struct tv_model_error error = {{0}};
    const char *seed = getenv("TV_BENCH_SYNTHETIC"), *products = getenv("TV_BENCH_PRODUCTS");
    if (seed != NULL) {
        options.synthetic = 1;
        options.synthetic_seed = strtoull(seed, NULL, 10);
    }
    if (products != NULL && strcmp(products, "bf16") == 0) {
        options.products = TV_PRODUCTS_BF16;
    }
    if (tv_kernels_create(backend, &kernel_options, &bench->kernels) != 0) {
        fprintf(stderr, "no backend %s\n", backend);
        return 1;
    }
    int64_t from = now_us();
    if (tv_model_load(bench->kernels, dir, &options, &bench->model, &error) != 0) {
        fprintf(stderr, "%s\n", error.text);
        return 1;
    }
    printf("%s on %s, %d threads, prefix %d: loaded %.1f MB in %.0f ms\n",
           tv_model_name(bench->model), bench->kernels->variant, threads, prefix,
           (double)tv_model_bytes(bench->model) / 1e6, (double)(now_us() - from) / 1e3);
    struct tv_cache_params params = {.layers = tv_model_config(bench->model)->layers,
                                     .page_size = PAGE_SIZE,
                                     .row_dim = TV_MLA_ROW,
                                     .dtype = bench->kernels->host_memory ? TV_F32 : TV_BF16,
                                     .pages = (prefix + DECODES + NODES_MOST) / PAGE_SIZE + 2};
    return tv_cache_create(bench->kernels, &params, &bench->cache) != 0;
}

/* The same passes as replays; nothing for a backend that does not record. */
static int replays_print(struct bench *bench)
{
    int64_t from = now_us();
    if (bench->kernels->record_begin == NULL) {
        return 0;
    }
    *bench->kernels = original; /* a recording must not wait, and a replay calls no slot */
    int err = tv_model_record(bench->model, bench->cache);
    if (err != 0) {
        return err;
    }
    printf("recorded in %.0f ms\n", (double)(now_us() - from) / 1e3);
    int32_t only = setting("TV_BENCH_NODES", 0);
    for (int32_t nodes = only > 0 ? only : 1; nodes <= (only > 0 ? only : NODES_MAX); nodes *= 2) {
        printf("verify %d nodes, replayed: %lld us\n", nodes,
               (long long)verify_median_us(bench, nodes));
    }
    return 0;
}

int main(int argc, char **argv)
{
    const char *dir = argc > 1 ? argv[1] : getenv("TV_BENCH_MODEL");
    int32_t threads = argc > 2 ? atoi(argv[2]) : 2;
    int32_t prefix = argc > 3 ? atoi(argv[3]) : 512;
    const char *backend = argc > 4 ? argv[4] : "cpu";
    uint64_t mask = argc > 5 ? strtoull(argv[5], NULL, 16) : ~0ull;
    struct bench bench = {0};
    if (dir == NULL || prefix < NODES_MAX ||
        bench_open(&bench, dir, threads, prefix, backend, mask) != 0) {
        fprintf(stderr,
                "usage: bench_model [checkpoint folder [threads [prefix [backend [mask]]]]]\n");
        return 2;
    }
    table_wrap(bench.kernels);
    int64_t from = now_us();
    if (prefill_all(&bench, prefix) != 0) {
        return 1;
    }
    printf("prefill %.0f tokens/s\n", prefix * 1e6 / (double)(now_us() - from));
    slots_print("prefill");
    if (!bench.kernels->host_memory) {
        struct tv_kernels timed = *bench.kernels;
        *bench.kernels = original;
        if (prefill_again(&bench, prefix) != 0) {
            return 1;
        }
        *bench.kernels = timed;
    }
    int64_t one_us = 0, thirty_two_us = 0;
    int32_t only = setting("TV_BENCH_NODES", 0);
    for (int32_t nodes = only > 0 ? only : 1; nodes <= (only > 0 ? only : NODES_MAX); nodes *= 2) {
        int64_t us = verify_median_us(&bench, nodes);
        one_us = nodes == 1 ? us : one_us;
        thirty_two_us = nodes == 32 ? us : thirty_two_us;
        printf("verify %d nodes: %lld us (%.2f x one)\n", nodes, (long long)us,
               one_us > 0 ? (double)us / (double)one_us : 0.0);
        slots_print("verify");
    }
    if (replays_print(&bench) != 0) {
        return 1;
    }
    from = now_us();
    for (int i = 0; only == 0 && i < DECODES; i++) {
        if (verify_once(&bench, 1, 1) != 0) {
            return 1;
        }
    }
    double rate = DECODES * 1e6 / (double)(now_us() - from);
    printf("decode %.0f tokens/s\n", rate);
    slots_print("decode");
    tv_cache_seq_finish(bench.cache, &bench.seq);
    tv_cache_destroy(bench.cache);
    tv_model_destroy(bench.model);
    bench.kernels->destroy(bench.kernels);
    return getenv("TV_BENCH_STRICT") != NULL && (rate < 300.0 || thirty_two_us > 4 * one_us);
}
