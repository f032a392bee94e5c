/*
 * test_model_record.c - recorded verify passes: which shapes there are, that a replay filled up
 * with rows of no tree answers the bits of the pass itself, and what a failing recorder leaves
 * behind.
 *
 * The recorder here keeps the calls and their arguments and makes them again on the cpu backend,
 * which refuses rows without a token or a slot: it leaves those out, as a device's kernels do.
 */
#include <errno.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "engine_fixture.h"
#include "model/model_impl.h"
#include "model_passes.h"

#define CALLS_MAX 256
#define ROWS_MAX  40
#define BATCH_MAX 8

enum kind { EMBED, RMSNORM, LINEAR, ROPE, LATENT, SWIGLU, TO_BF16, ROUTER, EXPERTS, VERIFY };

/* One call and what it was given; the fields of the plain functions are kept in order. */
struct call {
    enum kind kind;
    int32_t rows, dim, vocab;
    int64_t x_stride, y_stride, count;
    const void *table, *weight;
    enum tv_dtype dtype;
    float eps;
    const int32_t *ids;
    const float *x;
    void *y;
    struct tv_linear linear;
    struct tv_rope rope;
    struct tv_latent_write latent;
    struct tv_router router;
    struct tv_experts experts;
    struct tv_verify_attn verify;
};

struct recording {
    int32_t count;
    struct call calls[CALLS_MAX];
};

static struct tv_kernels original;
static struct recording *open_recording;
static int32_t live, replays, fail_end_at; /* fail_end_at: the n-th end fails; 0: none */

/* Keep the call while recording; the caller makes it otherwise. */
static int keep(const struct call *call)
{
    if (open_recording == NULL) {
        return 0;
    }
    assert_true(open_recording->count < CALLS_MAX);
    open_recording->calls[open_recording->count++] = *call;
    return 1;
}

static int rec_embed(struct tv_kernels *k, int32_t rows, int32_t hidden, int32_t vocab,
                     const void *table, enum tv_dtype dtype, const int32_t *ids, float *x)
{
    struct call call = {.kind = EMBED, .rows = rows, .dim = hidden, .vocab = vocab};
    call.table = table;
    call.dtype = dtype;
    call.ids = ids;
    call.y = x;
    return keep(&call) ? 0 : original.embed(k, rows, hidden, vocab, table, dtype, ids, x);
}

static int rec_rmsnorm(struct tv_kernels *k, int32_t rows, int32_t dim, const float *x,
                       int64_t x_stride, const float *weight, float eps, float *y, int64_t y_stride)
{
    struct call call = {.kind = RMSNORM, .rows = rows, .dim = dim, .x = x, .weight = weight};
    call.x_stride = x_stride;
    call.eps = eps;
    call.y = y;
    call.y_stride = y_stride;
    return keep(&call) ? 0 : original.rmsnorm(k, rows, dim, x, x_stride, weight, eps, y, y_stride);
}

static int rec_linear(struct tv_kernels *k, const struct tv_linear *args)
{
    struct call call = {.kind = LINEAR, .linear = *args};
    return keep(&call) ? 0 : original.linear(k, args);
}

static int rec_rope(struct tv_kernels *k, const struct tv_rope *args)
{
    struct call call = {.kind = ROPE, .rope = *args};
    return keep(&call) ? 0 : original.rope(k, args);
}

static int rec_latent(struct tv_kernels *k, const struct tv_latent_write *args)
{
    struct call call = {.kind = LATENT, .latent = *args};
    return keep(&call) ? 0 : original.latent_write(k, args);
}

static int rec_swiglu(struct tv_kernels *k, int32_t rows, int32_t dim, float *gate, const float *up)
{
    struct call call = {.kind = SWIGLU, .rows = rows, .dim = dim, .y = gate, .x = up};
    return keep(&call) ? 0 : original.swiglu(k, rows, dim, gate, up);
}

static int rec_to_bf16(struct tv_kernels *k, int64_t count, const float *x, uint16_t *y)
{
    struct call call = {.kind = TO_BF16, .count = count, .x = x, .y = y};
    return keep(&call) ? 0 : original.to_bf16(k, count, x, y);
}

static int rec_router(struct tv_kernels *k, const struct tv_router *args)
{
    struct call call = {.kind = ROUTER, .router = *args};
    return keep(&call) ? 0 : original.router(k, args);
}

static int rec_experts(struct tv_kernels *k, const struct tv_experts *args)
{
    struct call call = {.kind = EXPERTS, .experts = *args};
    return keep(&call) ? 0 : original.experts(k, args);
}

static int rec_verify(struct tv_kernels *k, const struct tv_verify_attn *args)
{
    struct call call = {.kind = VERIFY, .verify = *args};
    return keep(&call) ? 0 : original.verify_attn(k, args);
}

/* Row by row: a row without a token becomes NaN. */
static int embed_again(struct tv_kernels *k, const struct call *c)
{
    int rc = 0;
    for (int32_t r = 0; rc == 0 && r < c->rows; r++) {
        float *x = (float *)c->y + (int64_t)r * c->dim;
        if (c->ids[r] >= 0) {
            rc = original.embed(k, 1, c->dim, c->vocab, c->table, c->dtype, c->ids + r, x);
            continue;
        }
        for (int32_t i = 0; i < c->dim; i++) {
            x[i] = NAN;
        }
    }
    return rc;
}

/* Row by row: a row without a slot is stored nowhere. */
static int latent_again(struct tv_kernels *k, const struct tv_latent_write *args)
{
    int rc = 0;
    for (int32_t r = 0; rc == 0 && r < args->rows; r++) {
        struct tv_latent_write row = *args;
        row.rows = 1;
        row.ckv = args->ckv + r * args->row_stride;
        row.positions = args->positions + r;
        row.slots = args->slots + r;
        rc = args->slots[r] < 0 ? 0 : original.latent_write(k, &row);
    }
    return rc;
}

static int again(struct tv_kernels *k, const struct call *c)
{
    switch (c->kind) {
    case EMBED:
        return embed_again(k, c);
    case RMSNORM:
        return original.rmsnorm(k, c->rows, c->dim, c->x, c->x_stride, c->weight, c->eps, c->y,
                                c->y_stride);
    case LINEAR:
        return original.linear(k, &c->linear);
    case ROPE:
        return original.rope(k, &c->rope);
    case LATENT:
        return latent_again(k, &c->latent);
    case SWIGLU:
        return original.swiglu(k, c->rows, c->dim, c->y, c->x);
    case TO_BF16:
        return original.to_bf16(k, c->count, c->x, c->y);
    case ROUTER:
        return original.router(k, &c->router);
    case EXPERTS:
        return original.experts(k, &c->experts);
    case VERIFY:
        return original.verify_attn(k, &c->verify);
    }
    return -EINVAL;
}

static int record_begin(struct tv_kernels *k)
{
    (void)k;
    assert_null(open_recording);
    open_recording = calloc(1, sizeof *open_recording);
    return open_recording == NULL ? -ENOMEM : 0;
}

static int record_end(struct tv_kernels *k, void **ret_recording)
{
    (void)k;
    struct recording *recording = open_recording;
    open_recording = NULL;
    if (fail_end_at > 0 && --fail_end_at == 0) {
        free(recording);
        return -EIO;
    }
    live++;
    *ret_recording = recording;
    return 0;
}

static int replay(struct tv_kernels *k, void *handle)
{
    const struct recording *recording = handle;
    int rc = 0;
    replays++;
    for (int32_t i = 0; rc == 0 && i < recording->count; i++) {
        rc = again(k, &recording->calls[i]);
    }
    return rc;
}

static void recording_free(struct tv_kernels *k, void *handle)
{
    (void)k;
    live--;
    free(handle);
}

static void fixture_open(struct tv_fixture *fixture, int32_t requests_max)
{
    struct tv_fixture_options options = {.backend = "cpu",
                                         .dir = tv_fixture_dir("v3"),
                                         .page_size = 16,
                                         .rows_max = ROWS_MAX,
                                         .requests_max = requests_max,
                                         .max_len = 200,
                                         .pages = 80,
                                         .threads = 1,
                                         .kv_dtype = TV_BF16};
    tv_fixture_open(fixture, &options);
    original = *fixture->kernels;
    struct tv_kernels *k = fixture->kernels;
    k->embed = rec_embed;
    k->rmsnorm = rec_rmsnorm;
    k->linear = rec_linear;
    k->rope = rec_rope;
    k->latent_write = rec_latent;
    k->swiglu = rec_swiglu;
    k->to_bf16 = rec_to_bf16;
    k->router = rec_router;
    k->experts = rec_experts;
    k->verify_attn = rec_verify;
    k->record_begin = record_begin;
    k->record_end = record_end;
    k->replay = replay;
    k->recording_free = recording_free;
    live = replays = fail_end_at = 0;
}

static void fixture_close(struct tv_fixture *fixture)
{
    tv_fixture_close(fixture);
    assert_int_equal(live, 0);
}

static int32_t recorded_rows(const struct tv_fixture *fixture, int32_t rows, int32_t count)
{
    const struct tv_model_recording *found =
        tv_model_recording_find(fixture->model, fixture->cache, rows, count);
    return found != NULL ? found->rows : 0;
}

static void test_shapes(void **state)
{
    (void)state;
    struct tv_fixture fixture;
    fixture_open(&fixture, 3);
    assert_int_equal(recorded_rows(&fixture, 1, 1), 0);
    assert_int_equal(tv_model_record(fixture.model, fixture.cache), 0);
    assert_int_equal(tv_model_record_count(fixture.model), live); /* as a device's memory plans */
    for (int32_t rows = 1; rows <= 16; rows++) {
        assert_int_equal(recorded_rows(&fixture, rows, 1), rows);
    }
    assert_int_equal(recorded_rows(&fixture, 17, 1), 20);
    assert_int_equal(recorded_rows(&fixture, 21, 1), 24);
    assert_int_equal(recorded_rows(&fixture, ROWS_MAX, 1), ROWS_MAX);
    assert_int_equal(recorded_rows(&fixture, 2, 2), 8);
    assert_int_equal(recorded_rows(&fixture, 9, 3), 12);
    assert_int_equal(recorded_rows(&fixture, 13, 3), 16);
    assert_int_equal(recorded_rows(&fixture, 17, 3), 24);
    assert_int_equal(recorded_rows(&fixture, 33, 3), ROWS_MAX);
    assert_int_equal(recorded_rows(&fixture, ROWS_MAX + 1, 1), 0);
    assert_int_equal(recorded_rows(&fixture, 8, 4), 0);
    assert_null(tv_model_recording_find(fixture.model, NULL, 1, 1)); /* another cache */
    int32_t before = live;
    assert_int_equal(tv_model_record(fixture.model, fixture.cache), 0);
    assert_int_equal(live, before); /* the first ones were given back */
    fixture_close(&fixture);
}

/* Passes of more trees than are recorded are launched operation by operation. */
static void test_many_trees(void **state)
{
    (void)state;
    struct tv_fixture fixture;
    fixture_open(&fixture, 12);
    assert_int_equal(tv_model_record(fixture.model, fixture.cache), 0);
    assert_int_equal(tv_model_record_count(fixture.model), live);
    assert_int_equal(recorded_rows(&fixture, 16, 8), 16);
    assert_int_equal(recorded_rows(&fixture, 16, 9), 0);
    assert_int_equal(recorded_rows(&fixture, 16, 12), 0);
    fixture_close(&fixture);
}

static void hook_nothing(void *context, int32_t layer, const struct tv_verify_attn *attn)
{
    (void)context;
    (void)layer;
    (void)attn;
}

/* Three combs on prefixes of different lengths, `count` of them in one pass. */
static void pass_run(struct tv_fixture *fixture, struct tv_cache_seq *seqs, int32_t count,
                     int32_t rows, tv_model_layer_hook *hook, float *ret_logits)
{
    static int32_t tokens[3][ROWS_MAX], parents[3][ROWS_MAX], depths[3][ROWS_MAX];
    struct tv_model_item items[3];
    struct tv_cache_shortage shortage;
    const float *logits = NULL;
    int32_t vocab = tv_model_config(fixture->model)->vocab, all = 0;
    for (int32_t b = 0; b < count; b++) {
        int32_t mine = rows + b;
        for (int32_t i = 0; i < mine; i++) {
            tokens[b][i] = (7 * i + 31 * b + 3) % vocab;
            parents[b][i] = i == 0 ? -1 : (i - 1) / 2 * 2;
            depths[b][i] = i == 0 ? 0 : depths[b][parents[b][i]] + 1;
        }
        items[b] = (struct tv_model_item){&seqs[b], mine, tokens[b], parents[b], depths[b]};
        assert_int_equal(tv_cache_reserve(fixture->cache, &seqs[b], mine, &shortage), 0);
        all += mine;
    }
    assert_int_equal(
        tv_model_verify(fixture->model, fixture->cache, items, count, hook, NULL, &logits), 0);
    memcpy(ret_logits, logits, (size_t)all * (size_t)vocab * sizeof *logits);
    for (int32_t b = 0; b < count; b++) {
        tv_cache_drop(fixture->cache, &seqs[b]);
    }
}

static void test_replay_equals_the_pass(void **state)
{
    (void)state;
    struct tv_fixture fixture;
    struct tv_cache_seq seqs[3] = {{0}};
    int32_t prompt[50];
    fixture_open(&fixture, 3);
    int32_t vocab = tv_model_config(fixture.model)->vocab;
    size_t bytes = (size_t)ROWS_MAX * (size_t)vocab * sizeof(float);
    float *eager = malloc(bytes), *replayed = malloc(bytes);
    assert_true(eager != NULL && replayed != NULL);
    model_seed(5);
    model_tokens_draw(prompt, 50, vocab);
    for (int32_t b = 1; b < 3; b++) { /* the first one has no prefix */
        (void)tv_fixture_prefill(&fixture, &seqs[b], prompt, 20 * b + 7, 30);
    }
    assert_int_equal(tv_model_record(fixture.model, fixture.cache), 0);
    static const int32_t shapes[][2] = {{1, 1}, {1, 5}, {1, 17}, {1, 33}, {2, 2}, {3, 4}, {3, 12}};
    for (size_t i = 0; i < sizeof shapes / sizeof shapes[0]; i++) {
        int32_t count = shapes[i][0], rows = shapes[i][1];
        size_t used = (size_t)(count * rows + count * (count - 1) / 2) * (size_t)vocab;
        int32_t before = replays;
        pass_run(&fixture, seqs, count, rows, hook_nothing, eager);
        assert_int_equal(replays, before); /* a hook sees every layer: nothing is replayed */
        pass_run(&fixture, seqs, count, rows, NULL, replayed);
        assert_int_equal(replays, before + 1);
        assert_memory_equal(replayed, eager, used * sizeof(float));
    }
    for (int32_t b = 0; b < 3; b++) {
        tv_cache_seq_finish(fixture.cache, &seqs[b]);
    }
    free(eager);
    free(replayed);
    fixture_close(&fixture);
}

/* Every committed row of a sequence, one behind the other; malloc'd. */
static char *rows_copy(const struct tv_fixture *fixture, const struct tv_cache_seq *seq,
                       size_t *ret_bytes)
{
    int32_t layers = tv_model_config(fixture->model)->layers;
    size_t bytes = 0, at = 0;
    (void)tv_test_kv_row(fixture, seq, 0, 0, &bytes);
    char *copy = malloc((size_t)layers * (size_t)seq->len * bytes);
    assert_non_null(copy);
    for (int32_t layer = 0; layer < layers; layer++) {
        for (int32_t row = 0; row < seq->len; row++, at += bytes) {
            memcpy(copy + at, tv_test_kv_row(fixture, seq, layer, row, &bytes), bytes);
        }
    }
    *ret_bytes = at;
    return copy;
}

/* One pass of chains of one to three rows, of which the first is committed. */
static void small_pass(struct tv_fixture *fixture, struct tv_cache_seq *seqs, int32_t count)
{
    static const int32_t parents[] = {-1, 0, 1}, depths[] = {0, 1, 2};
    struct tv_model_item items[BATCH_MAX];
    struct tv_cache_shortage shortage;
    const float *logits = NULL;
    int32_t tokens[BATCH_MAX][3];
    for (int32_t b = 0; b < count; b++) {
        int32_t rows = 1 + (b + seqs[b].len) % 3;
        if (seqs[b].len > 60) {
            assert_int_equal(tv_cache_truncate(fixture->cache, &seqs[b], 5), 0);
        }
        model_tokens_draw(tokens[b], 3, tv_model_config(fixture->model)->vocab);
        items[b] = (struct tv_model_item){&seqs[b], rows, tokens[b], parents, depths};
        assert_int_equal(tv_cache_reserve(fixture->cache, &seqs[b], rows, &shortage), 0);
    }
    assert_int_equal(
        tv_model_verify(fixture->model, fixture->cache, items, count, NULL, NULL, &logits), 0);
    for (int32_t b = 0; b < count; b++) {
        tv_fixture_commit(fixture, &seqs[b], NULL, 1);
    }
}

/* Batches of changing size, filled up to recorded shapes, beside a session that rests: whatever an
 * earlier batch left in the arrays of a recording, no filler row may write through it. */
static void test_b08_filler_rows_leave_other_sessions_alone(void **state)
{
    (void)state;
    static const int32_t sizes[] = {BATCH_MAX, 1, BATCH_MAX, 3};
    struct tv_fixture fixture;
    struct tv_cache_seq seqs[BATCH_MAX] = {{0}}, idle = {0};
    int32_t prompt[40];
    size_t bytes = 0, again_bytes = 0;
    fixture_open(&fixture, BATCH_MAX);
    model_seed(8);
    model_tokens_draw(prompt, 40, tv_model_config(fixture.model)->vocab);
    (void)tv_fixture_prefill(&fixture, &idle, prompt, 40, 40);
    for (int32_t b = 0; b < BATCH_MAX; b++) {
        (void)tv_fixture_prefill(&fixture, &seqs[b], prompt, 5 + b, 40);
    }
    char *before = rows_copy(&fixture, &idle, &bytes);
    assert_int_equal(tv_model_record(fixture.model, fixture.cache), 0);
    int32_t launches = tv_test_scaled(1000);
    for (int32_t i = 0; i < launches; i++) {
        small_pass(&fixture, seqs, sizes[i % 4]);
        char *after = rows_copy(&fixture, &idle, &again_bytes);
        assert_int_equal(again_bytes, bytes);
        assert_memory_equal(after, before, bytes);
        free(after);
    }
    assert_int_equal(replays, launches);
    for (int32_t b = 0; b < BATCH_MAX; b++) {
        tv_cache_seq_finish(fixture.cache, &seqs[b]);
    }
    tv_cache_seq_finish(fixture.cache, &idle);
    free(before);
    fixture_close(&fixture);
}

/* Whichever recording fails, the error comes out and none is left. */
static void test_failing_recorder(void **state)
{
    (void)state;
    struct tv_fixture fixture;
    fixture_open(&fixture, 3);
    for (int32_t n = 1; n <= 26; n += 5) {
        fail_end_at = n;
        assert_int_equal(tv_model_record(fixture.model, fixture.cache), -EIO);
        assert_int_equal(live, 0);
        assert_int_equal(recorded_rows(&fixture, 1, 1), 0);
    }
    fixture_close(&fixture);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_shapes),
        cmocka_unit_test(test_many_trees),
        cmocka_unit_test(test_replay_equals_the_pass),
        cmocka_unit_test(test_b08_filler_rows_leave_other_sessions_alone),
        cmocka_unit_test(test_failing_recorder),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
