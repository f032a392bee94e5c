/*
 * bench_proto.c - cost of decoding a verify body and of writing one row of logits (R24, R25).
 *
 * usage: bench_proto [repetitions]. Prints medians; with TV_BENCH_STRICT=1 it fails above the
 * bounds of the scoreboard. Heap peaks are counted by wrapping the C library's allocator.
 */
#include <malloc.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "proto/request.h"
#include "proto/response.h"

#define ROW_ENTRIES 129280

extern void *__libc_malloc(size_t bytes);
extern void *__libc_calloc(size_t count, size_t bytes);
extern void *__libc_realloc(void *at, size_t bytes);
extern void __libc_free(void *at);

static size_t heap_bytes, heap_peak;

static void *counted(void *at)
{
    heap_bytes += at != NULL ? malloc_usable_size(at) : 0;
    heap_peak = heap_bytes > heap_peak ? heap_bytes : heap_peak;
    return at;
}

void *malloc(size_t bytes)
{
    return counted(__libc_malloc(bytes));
}

void *calloc(size_t count, size_t bytes)
{
    return counted(__libc_calloc(count, bytes));
}

void *realloc(void *at, size_t bytes)
{
    size_t before = at != NULL ? malloc_usable_size(at) : 0;
    void *grown = __libc_realloc(at, bytes);

    heap_bytes -= grown != NULL ? before : 0;
    return counted(grown);
}

void free(void *at)
{
    heap_bytes -= at != NULL ? malloc_usable_size(at) : 0;
    __libc_free(at);
}

static double now_us(void)
{
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e6 + (double)t.tv_nsec / 1e3;
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;

    return (x > y) - (x < y);
}

static double median(double *times, int count)
{
    qsort(times, (size_t)count, sizeof(*times), by_value);
    return times[count / 2];
}

/* A verify body as a drafter sends it: a tree of `nodes` with ids of a large vocabulary. */
static char *verify_body(int nodes)
{
    size_t size = 512 + (size_t)nodes * 16, used;
    char *body = malloc(size);
    int i;

    if (body == NULL) {
        abort();
    }
    used = (size_t)snprintf(body, size,
                            "{\"seq\":42,\"epoch\":\"17a40123456789ab\",\"expected_len\":1012,"
                            "\"expected_digest\":\"00112233445566778899aabbccddeeff\","
                            "\"want\":{\"top_k\":20,\"rows\":\"path\",\"logprobs\":true},"
                            "\"deadline_ms\":2000,\"tree\":{\"tokens\":[");
    for (i = 0; i < nodes; i++) {
        used += (size_t)snprintf(body + used, size - used, "%s%d", i > 0 ? "," : "",
                                 (i * 7919 + 13) % ROW_ENTRIES);
    }
    used += (size_t)snprintf(body + used, size - used, "],\"parents\":[");
    for (i = 0; i < nodes; i++) {
        used += (size_t)snprintf(body + used, size - used, "%s%d", i > 0 ? "," : "",
                                 i == 0 ? -1 : (i - 1) / 2);
    }
    (void)snprintf(body + used, size - used, "]}}"); /* sized above */
    return body;
}

static double bench_decode(const char *body, int repetitions, size_t *ret_peak)
{
    const struct tv_request_limits limits = {
        .tree = {.nodes_max = TV_ENGINE_NODES_MAX, .depth_max = 64, .vocab = ROW_ENTRIES},
        .max_len = 32768,
        .inline_bytes = TV_INLINE_BYTES_DEFAULT};
    double *times = malloc((size_t)repetitions * sizeof(*times)), result;
    size_t bytes = strlen(body), before = heap_bytes;
    int i;

    if (times == NULL) {
        abort();
    }
    heap_peak = before = heap_bytes;
    for (i = 0; i < repetitions; i++) {
        struct tv_request request;
        struct tv_problem problem;
        double start = now_us();

        if (tv_request_decode(TV_CALL_VERIFY, body, bytes, &limits, &request, &problem) != 0) {
            fprintf(stderr, "refused: %s\n", problem.detail);
            exit(1);
        }
        tv_request_finish(&request);
        times[i] = now_us() - start;
    }
    *ret_peak = heap_peak - before;
    result = median(times, repetitions);
    free(times);
    return result;
}

/* A prompt of nothing but "0,": the worst ratio of values to bytes. */
static double prompt_ratio(void)
{
    const struct tv_request_limits limits = {
        .tree = {.nodes_max = 256, .depth_max = 64, .vocab = 10}, .max_len = 1 << 30};
    size_t bytes = 8u << 20, before, i;
    char *body = malloc(bytes + 32);
    struct tv_request request;
    struct tv_problem problem;

    if (body == NULL) {
        abort();
    }
    memcpy(body, "{\"tokens\":[0", 12);
    for (i = 12; i + 2 <= bytes; i += 2) {
        memcpy(body + i, ",0", 2);
    }
    memcpy(body + i, "]}", 2);
    before = heap_peak = heap_bytes;
    if (tv_request_decode(TV_CALL_CREATE, body, i + 2, &limits, &request, &problem) != 0) {
        fprintf(stderr, "refused: %s\n", problem.detail);
        exit(1);
    }
    tv_request_finish(&request);
    free(body);
    return (double)(heap_peak - before) / (double)(i + 2);
}

static double bench_row(int raw, enum tv_tensor_dtype dtype, int repetitions)
{
    float *row = malloc(ROW_ENTRIES * sizeof(*row));
    double *times = malloc((size_t)repetitions * sizeof(*times)), result;
    int32_t rows[] = {0};
    int i;

    if (row == NULL || times == NULL) {
        abort();
    }
    for (i = 0; i < ROW_ENTRIES; i++) {
        row[i] = sinf((float)i) * 20.0f;
    }
    for (i = 0; i < repetitions; i++) {
        const struct tv_logits_block block = {
            .row_count = 1, .vocab = ROW_ENTRIES, .rows = rows, .dtype = dtype, .data = row};
        const struct tv_round round = {
            .kind = TV_CALL_ONESHOT, .logits = &block, .sampling = {.temperature = 1, .top_p = 1}};
        struct tv_buf buf;
        double start = now_us();

        tv_buf_init(&buf, 16u << 20);
        if (raw) {
            tv_encode_tensor(&buf, row, ROW_ENTRIES, dtype);
        } else {
            tv_encode_round(&buf, &round, 0);
        }
        times[i] = now_us() - start;
        if (buf.failed < 0) {
            fprintf(stderr, "encoder failed: %d\n", buf.failed);
            exit(1);
        }
        tv_buf_finish(&buf);
    }
    result = median(times, repetitions);
    free(row);
    free(times);
    return result;
}

static int report(const char *what, double value, double bound, const char *unit)
{
    printf("%-46s %9.2f %-3s (bound %g)\n", what, value, unit, bound);
    return getenv("TV_BENCH_STRICT") != NULL && value > bound;
}

int main(int argc, char **argv)
{
    int repetitions = argc > 1 ? atoi(argv[1]) : 200, over = 0;
    char *small = verify_body(64), *large = verify_body(1024);
    size_t peak;
    double time;

    if (repetitions < 1) {
        return 64;
    }
    printf("bodies: %zu and %zu bytes\n", strlen(small), strlen(large));
    time = bench_decode(small, repetitions * 20, &peak);
    over += report("decode verify, 64 nodes", time, 5, "us");
    printf("  heap peak %zu bytes\n", peak);
    time = bench_decode(large, repetitions * 5, &peak);
    over += report("decode verify, 1024 nodes", time, 40, "us");
    over += report("  heap peak / body", (double)peak / (double)strlen(large), 2, "");
    over += report("create with 8 MiB of \"0,\", heap peak / body", prompt_ratio(), 2.001, "");
    over += report("one row of 129,280 logits, base64 f32",
                   bench_row(0, TV_TENSOR_F32, repetitions) / 1e3, 1, "ms");
    over += report("one row of 129,280 logits, base64 bf16",
                   bench_row(0, TV_TENSOR_BF16, repetitions) / 1e3, 1, "ms");
    over += report("one row of 129,280 logits, raw f32",
                   bench_row(1, TV_TENSOR_F32, repetitions) / 1e3, 0.2, "ms");
    free(small);
    free(large);
    return over > 0;
}
