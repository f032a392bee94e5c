/*
 * test_cache.c - the paged cache against a plain array model.
 *
 * B10, B11: random reserve / commit / drop / truncate / pin / close operations over lengths that
 * cross every page border; after each the pages, lengths and rows are those of the model. B09:
 * rows that were never written are NaN in poison mode. TV_TEST_SCALE multiplies the operations.
 */
#include <errno.h>
#include <math.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "cache/cache.h"

#define SEQS     6
#define PINS     8
#define LAYERS   2
#define ROW_DIM  8
#define ROWS_MAX 400
#define PAGES    48
#define OPS      1000000

/* What one sequence must look like. */
struct model_seq {
    float values[2 * ROWS_MAX]; /* committed, then scratch */
    int32_t len, scratch;
};

struct model_pin {
    int32_t pages[ROWS_MAX / 16 + 1];
    int32_t page_count, len;
    float values[ROWS_MAX];
};

struct world {
    struct tv_kernels *kernels;
    struct tv_cache *cache;
    struct tv_cache_seq seqs[SEQS];
    struct model_seq want[SEQS];
    struct model_pin pins[PINS];
    int32_t page_size;
    uint64_t random;
    float next_value;
};

static uint32_t draw(struct world *world, uint32_t below)
{
    world->random ^= world->random << 13;
    world->random ^= world->random >> 7;
    world->random ^= world->random << 17;
    return (uint32_t)((world->random >> 32) % below);
}

/* B10's million, or the share of it that TV_TEST_SCALE asks for. */
static long operations(void)
{
    const char *text = getenv("TV_TEST_SCALE");
    double scale = text != NULL ? strtod(text, NULL) : 1.0;
    return (long)((scale > 0.0 ? scale : 1.0) * OPS) + 1;
}

static float *row_at(const struct world *world, int32_t layer, int64_t slot)
{
    return (float *)tv_cache_layer(world->cache, layer) + slot * ROW_DIM;
}

static void world_open(struct world *world, int32_t page_size, uint64_t seed)
{
    struct tv_kernels_options options = {.threads = 1, .cpu_flags_mask = ~0ull};
    memset(world, 0, sizeof *world);
    world->page_size = page_size;
    world->random = seed;
    world->next_value = 1.0f;
    assert_int_equal(tv_kernels_create("ref", &options, &world->kernels), 0);
    struct tv_cache_params params = {.layers = LAYERS,
                                     .page_size = page_size,
                                     .row_dim = ROW_DIM,
                                     .dtype = TV_F32,
                                     .pages = PAGES,
                                     .poison = 1};
    assert_int_equal(tv_cache_create(world->kernels, &params, &world->cache), 0);
}

static void world_close(struct world *world)
{
    tv_cache_destroy(world->cache);
    world->kernels->destroy(world->kernels);
}

/* Holders of each page according to the tables and the pins. */
static void holders_count(const struct world *world, int32_t *holders)
{
    memset(holders, 0, PAGES * sizeof *holders);
    for (int32_t s = 0; s < SEQS; s++) {
        for (int32_t i = 0; i < world->seqs[s].page_count; i++) {
            holders[world->seqs[s].pages[i]]++;
            assert_int_equal(holders[world->seqs[s].pages[i]], 1); /* one owner among sequences */
        }
    }
    for (int32_t p = 0; p < PINS; p++) {
        for (int32_t i = 0; i < world->pins[p].page_count; i++) {
            holders[world->pins[p].pages[i]]++;
        }
    }
}

static void pages_check(struct world *world)
{
    int32_t holders[PAGES];
    struct tv_cache_counts counts;
    int64_t held = 0, shared = 0;
    holders_count(world, holders);
    for (int32_t i = 0; i < PAGES; i++) {
        held += holders[i] > 0;
        shared += holders[i] > 1;
    }
    tv_cache_counts(world->cache, &counts);
    assert_int_equal(counts.total, PAGES);
    assert_int_equal(counts.held, held);
    assert_int_equal(counts.free, PAGES - held);
    assert_int_equal(counts.shared, shared);
}

static void seq_check(struct world *world, int32_t s)
{
    const struct tv_cache_seq *seq = &world->seqs[s];
    const struct model_seq *want = &world->want[s];
    int32_t rows = want->len + want->scratch;
    assert_int_equal(seq->len, want->len);
    assert_int_equal(seq->scratch, want->scratch);
    assert_int_equal(seq->page_count, (rows + world->page_size - 1) / world->page_size);
    for (int32_t layer = 0; layer < LAYERS; layer++) {
        for (int32_t i = 0; i < rows; i++) {
            const float *row = row_at(world, layer, tv_cache_slot(world->cache, seq, i));
            if (row[0] != want->values[i] || row[ROW_DIM - 1] != want->values[i] + (float)layer) {
                fail_msg("sequence %d row %d layer %d", s, i, layer);
            }
        }
    }
}

static void op_reserve(struct world *world, int32_t s)
{
    struct tv_cache_seq *seq = &world->seqs[s];
    struct model_seq *want = &world->want[s];
    struct tv_cache_shortage shortage = {-1, -1};
    struct tv_cache_counts counts;
    int32_t holders[PAGES];
    int32_t rows = 1 + (int32_t)draw(world, draw(world, 4) == 0 ? 130 : 20);
    if (want->len + rows > ROWS_MAX) {
        return;
    }
    if (want->scratch > 0) {
        assert_int_equal(tv_cache_reserve(world->cache, seq, rows, &shortage), -EINVAL);
        return;
    }
    holders_count(world, holders);
    int32_t copy =
        want->len % world->page_size != 0 && holders[seq->pages[seq->page_count - 1]] > 1;
    int32_t held = seq->page_count;
    int32_t needed = (want->len + rows + world->page_size - 1) / world->page_size - held + copy;
    tv_cache_counts(world->cache, &counts);
    int err = tv_cache_reserve(world->cache, seq, rows, &shortage);
    if (needed > counts.free) {
        assert_int_equal(err, -ENOSPC);
        assert_int_equal(shortage.pages_needed, needed);
        assert_int_equal(shortage.pages_free, counts.free);
        return;
    }
    assert_int_equal(err, 0);
    for (int32_t i = want->len; i < want->len + rows; i++) {
        for (int32_t layer = 0; layer < LAYERS; layer++) {
            float *row = row_at(world, layer, tv_cache_slot(world->cache, seq, i));
            if (i / world->page_size >= held) {
                assert_true(isnan(row[0])); /* a page nobody wrote since it was freed */
            }
            for (int32_t d = 0; d < ROW_DIM; d++) {
                row[d] = world->next_value + (float)(d == ROW_DIM - 1 ? layer : 0);
            }
        }
        want->values[i] = world->next_value;
        world->next_value = world->next_value < 1e6f ? world->next_value + 4.0f : 1.0f;
    }
    want->scratch = rows;
}

/* B09: rows that were reserved and not accepted are NaN, also where their page is still held. */
static void rejected_check(struct world *world, int32_t s)
{
    const struct tv_cache_seq *seq = &world->seqs[s];
    int32_t first = seq->len % world->page_size;
    for (int32_t row = first; first > 0 && row < world->page_size; row++) {
        int64_t slot = (int64_t)seq->pages[seq->page_count - 1] * world->page_size + row;
        for (int32_t layer = 0; layer < LAYERS; layer++) {
            assert_true(isnan(row_at(world, layer, slot)[0]));
            assert_true(isnan(row_at(world, layer, slot)[ROW_DIM - 1]));
        }
    }
}

static void op_commit(struct world *world, int32_t s)
{
    struct model_seq *want = &world->want[s];
    int32_t nodes[ROWS_MAX];
    int32_t count = 0;
    if (want->scratch == 0) {
        assert_int_equal(tv_cache_commit(world->cache, &world->seqs[s], NULL, 1), -EINVAL);
        return;
    }
    if (draw(world, 4) == 0) {
        count = (int32_t)draw(world, (uint32_t)want->scratch + 1);
        assert_int_equal(tv_cache_commit(world->cache, &world->seqs[s], NULL, count), 0);
    } else {
        uint32_t keep = 1 + draw(world, 4);
        for (int32_t i = 0; i < want->scratch; i++) {
            if (draw(world, keep) == 0) {
                want->values[want->len + count] = want->values[want->len + i];
                nodes[count++] = i;
            }
        }
        assert_int_equal(tv_cache_commit(world->cache, &world->seqs[s], nodes, count), 0);
    }
    want->len += count;
    want->scratch = 0;
    rejected_check(world, s);
}

static void op_truncate(struct world *world, int32_t s)
{
    struct model_seq *want = &world->want[s];
    int32_t len = (int32_t)draw(world, (uint32_t)want->len + 1);
    if (want->scratch > 0) {
        assert_int_equal(tv_cache_truncate(world->cache, &world->seqs[s], len), -EINVAL);
        return;
    }
    if (draw(world, 2) == 0) {
        len = len / world->page_size * world->page_size; /* exactly at a border */
    }
    assert_int_equal(tv_cache_truncate(world->cache, &world->seqs[s], want->len + 1), -EINVAL);
    assert_int_equal(tv_cache_truncate(world->cache, &world->seqs[s], len), 0);
    want->len = len;
}

static void pin_drop(struct world *world, struct model_pin *pin)
{
    for (int32_t i = 0; i < pin->len; i++) {
        int64_t slot =
            (int64_t)pin->pages[i / world->page_size] * world->page_size + i % world->page_size;
        if (row_at(world, 0, slot)[0] != pin->values[i]) {
            fail_msg("pinned row %d changed", i);
        }
    }
    tv_cache_unpin(world->cache, pin->pages, pin->page_count);
    memset(pin, 0, sizeof *pin);
}

static void op_pin(struct world *world, int32_t s)
{
    struct model_pin *pin = &world->pins[draw(world, PINS)];
    const struct model_seq *want = &world->want[s];
    if (pin->page_count > 0) {
        pin_drop(world, pin);
        return;
    }
    pin->len = want->len;
    pin->page_count = (want->len + world->page_size - 1) / world->page_size;
    for (int32_t i = 0; i < pin->page_count; i++) {
        pin->pages[i] = world->seqs[s].pages[i]; /* an empty sequence has no array at all */
    }
    memcpy(pin->values, want->values, (size_t)want->len * sizeof *pin->values);
    tv_cache_pin(world->cache, pin->pages, pin->page_count);
}

static void op_any(struct world *world, int32_t s)
{
    struct model_seq *want = &world->want[s];
    switch (draw(world, 16)) {
    case 0:
    case 1:
        op_truncate(world, s);
        break;
    case 2:
    case 3:
        op_pin(world, s);
        break;
    case 4:
        tv_cache_drop(world->cache, &world->seqs[s]);
        if (want->scratch > 0) {
            rejected_check(world, s);
        }
        want->scratch = 0;
        break;
    case 5:
        if (draw(world, 4) == 0) {
            tv_cache_seq_finish(world->cache, &world->seqs[s]);
            want->len = want->scratch = 0;
        }
        break;
    default:
        if (want->scratch > 0) {
            op_commit(world, s);
        } else {
            op_reserve(world, s);
        }
    }
}

static void random_run(int32_t page_size)
{
    struct world *world = malloc(sizeof *world);
    assert_non_null(world);
    world_open(world, page_size, 88172645463325252ull + (uint64_t)page_size);
    long ops = operations();
    for (long i = 0; i < ops; i++) {
        int32_t s = (int32_t)draw(world, SEQS);
        op_any(world, s);
        seq_check(world, s);
        pages_check(world);
    }
    for (int32_t s = 0; s < SEQS; s++) {
        seq_check(world, s);
        tv_cache_seq_finish(world->cache, &world->seqs[s]);
    }
    for (int32_t p = 0; p < PINS; p++) {
        pin_drop(world, &world->pins[p]);
    }
    struct tv_cache_counts counts;
    tv_cache_counts(world->cache, &counts);
    assert_int_equal(counts.free, PAGES);
    assert_int_equal(counts.shared, 0);
    world_close(world);
    free(world);
}

static void test_b10_b11_random_operations_page_16(void **state)
{
    (void)state;
    random_run(16);
}

static void test_b10_b11_random_operations_page_64(void **state)
{
    (void)state;
    random_run(64);
}

static void test_commit_refuses_bad_lists(void **state)
{
    (void)state;
    static const int32_t descending[] = {0, 2, 1}, twice[] = {0, 1, 1}, past[] = {0, 9};
    static const int32_t negative[] = {-1, 0};
    struct world *world = malloc(sizeof *world);
    struct tv_cache_shortage shortage;
    assert_non_null(world);
    world_open(world, 16, 1);
    struct tv_cache_seq *seq = &world->seqs[0];
    assert_int_equal(tv_cache_reserve(world->cache, seq, 0, &shortage), -EINVAL);
    assert_int_equal(tv_cache_reserve(world->cache, seq, 9, &shortage), 0);
    assert_int_equal(tv_cache_commit(world->cache, seq, descending, 3), -EINVAL);
    assert_int_equal(tv_cache_commit(world->cache, seq, twice, 3), -EINVAL);
    assert_int_equal(tv_cache_commit(world->cache, seq, past, 2), -EINVAL);
    assert_int_equal(tv_cache_commit(world->cache, seq, negative, 2), -EINVAL);
    assert_int_equal(tv_cache_commit(world->cache, seq, NULL, 10), -EINVAL);
    assert_int_equal(seq->scratch, 9); /* refused lists change nothing */
    tv_cache_seq_finish(world->cache, seq);
    world_close(world);
    free(world);
}

static void test_create_refuses_bad_shapes(void **state)
{
    (void)state;
    struct tv_kernels_options options = {.threads = 1, .cpu_flags_mask = ~0ull};
    struct tv_kernels *kernels;
    struct tv_cache *cache = NULL;
    assert_int_equal(tv_kernels_create("ref", &options, &kernels), 0);
    static const int32_t sizes[] = {0, 1, 8, 24, 65, 256, -16};
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        struct tv_cache_params params = {
            .layers = 1, .page_size = sizes[i], .row_dim = 8, .pages = 4};
        assert_int_equal(tv_cache_create(kernels, &params, &cache), -EINVAL);
    }
    struct tv_cache_params huge = {
        .layers = 1024, .page_size = 128, .row_dim = INT32_MAX, .pages = INT32_MAX};
    assert_int_equal(tv_cache_create(kernels, &huge, &cache), -ENOMEM);
    assert_null(cache);
    kernels->destroy(kernels);
}

/* Pins handed from the worker to a second thread, which gives them back at its own pace. */
struct handover {
    struct tv_cache *cache;
    pthread_mutex_t lock;
    int32_t pages[64][4];
    int32_t count, done; /* guarded by lock */
};

static void *unpin_run(void *context)
{
    struct handover *handover = context;
    for (;;) {
        int32_t pages[4];
        pthread_mutex_lock(&handover->lock);
        int have = handover->count > 0;
        int done = handover->done;
        if (have) {
            memcpy(pages, handover->pages[--handover->count], sizeof pages);
        }
        pthread_mutex_unlock(&handover->lock);
        if (have) {
            tv_cache_unpin(handover->cache, pages, 4);
        } else if (done) {
            return NULL;
        }
    }
}

static void test_unpin_from_another_thread(void **state)
{
    (void)state;
    struct world *world = malloc(sizeof *world);
    struct handover *handover = calloc(1, sizeof *handover);
    struct tv_cache_shortage shortage;
    pthread_t thread;
    assert_non_null(world);
    assert_non_null(handover);
    world_open(world, 16, 7);
    handover->cache = world->cache;
    assert_int_equal(pthread_mutex_init(&handover->lock, NULL), 0);
    assert_int_equal(pthread_create(&thread, NULL, unpin_run, handover), 0);
    for (int32_t i = 0; i < 2000; i++) {
        struct tv_cache_seq seq = {0};
        if (tv_cache_reserve(world->cache, &seq, 64, &shortage) == 0) {
            pthread_mutex_lock(&handover->lock);
            if (handover->count < 64) {
                tv_cache_pin(world->cache, seq.pages, 4);
                memcpy(handover->pages[handover->count++], seq.pages, 4 * sizeof(int32_t));
            }
            pthread_mutex_unlock(&handover->lock);
            assert_true(isnan(row_at(world, 1, tv_cache_slot(world->cache, &seq, 63))[0]));
            memset(row_at(world, 1, tv_cache_slot(world->cache, &seq, 63)), 0, 4);
        }
        tv_cache_seq_finish(world->cache, &seq);
    }
    pthread_mutex_lock(&handover->lock);
    handover->done = 1;
    pthread_mutex_unlock(&handover->lock);
    assert_int_equal(pthread_join(thread, NULL), 0);
    struct tv_cache_counts counts;
    tv_cache_counts(world->cache, &counts);
    assert_int_equal(counts.free, PAGES);
    (void)pthread_mutex_destroy(&handover->lock);
    world_close(world);
    free(world);
    free(handover);
}

/* Invented rows are a function of seed, layer and position, in the reserved rows and nowhere else.
 */
static void test_invented_rows(void **state)
{
    struct tv_cache_shortage shortage;
    struct world *world = malloc(sizeof *world);
    float kept[LAYERS][40][ROW_DIM];
    (void)state;
    assert_non_null(world);
    world_open(world, 16, 1);
    for (int turn = 0; turn < 2; turn++) { /* the second one in other pages */
        struct tv_cache_seq *seq = &world->seqs[turn];
        assert_int_equal(tv_cache_reserve(world->cache, seq, 3, &shortage), 0);
        assert_int_equal(tv_cache_commit(world->cache, seq, NULL, 3), 0);
        assert_int_equal(tv_cache_reserve(world->cache, seq, 40, &shortage), 0);
        assert_int_equal(tv_cache_invent(world->cache, seq, 9), 0);
        for (int32_t layer = 0; layer < LAYERS; layer++) {
            assert_true(isnan(row_at(world, layer, tv_cache_slot(world->cache, seq, 2))[0]));
            for (int32_t row = 0; row < 40; row++) {
                float *values = row_at(world, layer, tv_cache_slot(world->cache, seq, 3 + row));
                for (int32_t i = 0; i < ROW_DIM; i++) {
                    assert_true(values[i] >= -1.7321f && values[i] < 1.7321f);
                }
                if (turn == 0) {
                    memcpy(kept[layer][row], values, sizeof kept[layer][row]);
                }
                assert_memory_equal(kept[layer][row], values, sizeof kept[layer][row]);
            }
            assert_true(isnan(row_at(world, layer, tv_cache_slot(world->cache, seq, 42))[ROW_DIM]));
        }
    }
    assert_memory_not_equal(kept[0][0], kept[1][0], sizeof kept[0][0]);
    assert_memory_not_equal(kept[0][0], kept[0][1], sizeof kept[0][0]);
    assert_memory_not_equal(kept[0][12], kept[0][13], sizeof kept[0][0]); /* over a border */
    tv_cache_seq_finish(world->cache, &world->seqs[0]);
    tv_cache_seq_finish(world->cache, &world->seqs[1]);
    world_close(world);
    free(world);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_b10_b11_random_operations_page_16),
        cmocka_unit_test(test_b10_b11_random_operations_page_64),
        cmocka_unit_test(test_commit_refuses_bad_lists),
        cmocka_unit_test(test_create_refuses_bad_shapes),
        cmocka_unit_test(test_unpin_from_another_thread),
        cmocka_unit_test(test_invented_rows),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
