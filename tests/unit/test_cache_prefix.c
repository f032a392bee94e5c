/*
 * test_cache_prefix.c - pages that are found by their prefix, against a plain array model.
 *
 * Every row holds a number made of all tokens up to it, the salt, the owner and whether prefill
 * wrote it, so a page that is found where it should not be, or that was written while it could be
 * found, shows. TV_TEST_SCALE multiplies the random operations.
 */
#include <errno.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/digest.h"
#include "cache/cache.h"

#define SEQS     6
#define PINS     4
#define LAYERS   2
#define ROW_DIM  8
#define ROWS_MAX 160
#define PAGES    40
#define OPS      60000

/* What one sequence must hold. */
struct want {
    int32_t tokens[ROWS_MAX];
    float values[ROWS_MAX]; /* of each row */
    int32_t len, exact;
    int owner, salt;
};

struct pin {
    int32_t pages[ROWS_MAX / 16];
    float values[ROWS_MAX];
    int32_t count;
};

struct world {
    struct tv_kernels *kernels;
    struct tv_cache *cache;
    struct tv_cache_seq seqs[SEQS];
    struct want want[SEQS];
    struct pin pins[PINS];
    int32_t page_size;
    uint64_t random;
    enum tv_cache_prefix prefix;
};

static int32_t below(struct world *world, int32_t limit)
{
    world->random = world->random * 6364136223846793005u + 1442695040888963407u;
    return (int32_t)((world->random >> 33) % (uint64_t)limit);
}

static void world_open(struct world *world, int32_t page_size, enum tv_cache_prefix prefix)
{
    struct tv_kernels_options options = {.threads = 1, .cpu_flags_mask = ~0ull};
    memset(world, 0, sizeof *world);
    world->page_size = page_size;
    world->prefix = prefix;
    world->random = 20261130;
    assert_int_equal(tv_kernels_create("ref", &options, &world->kernels), 0);
    struct tv_cache_params params = {.layers = LAYERS,
                                     .page_size = page_size,
                                     .row_dim = ROW_DIM,
                                     .dtype = TV_F32,
                                     .pages = PAGES,
                                     .poison = 1,
                                     .prefix = prefix};
    assert_int_equal(tv_cache_create(world->kernels, &params, &world->cache), 0);
}

static void world_close(struct world *world)
{
    for (int32_t i = 0; i < SEQS; i++) {
        tv_cache_seq_finish(world->cache, &world->seqs[i]);
    }
    tv_cache_destroy(world->cache);
    world->kernels->destroy(world->kernels);
}

static float *row_at(const struct world *world, int32_t layer, int64_t slot)
{
    return (float *)tv_cache_layer(world->cache, layer) + slot * ROW_DIM;
}

/* Keys of the whole pages, and the row values that prefill or a round would write, of a sequence of
 * these tokens. */
static void chain(const struct world *world, const struct want *want, int32_t len,
                  struct tv_cache_key *ret_keys, float *ret_exact, float *ret_round)
{
    static const uint8_t model_id[32] = {7};
    char salt[8];
    struct tv_digest digest;
    (void)snprintf(salt, sizeof salt, "salt%d", want->salt);
    tv_digest_start(&digest, model_id, salt, want->salt > 0 ? strlen(salt) : 0);
    for (int32_t i = 0; i < len; i++) {
        uint32_t bits;
        tv_digest_push(&digest, want->tokens[i]);
        memcpy(&bits, digest.bytes, sizeof bits);
        ret_exact[i] = (float)((bits & 0x7ffff) * 2) + (float)want->owner * 0.25f;
        ret_round[i] = -ret_exact[i] - 1.0f;
        if ((i + 1) % world->page_size == 0) {
            struct tv_cache_key *key = &ret_keys[i / world->page_size];
            memcpy(key->digest, digest.bytes, sizeof key->digest);
            memset(key->owner, want->owner + 1, sizeof key->owner);
        }
    }
}

static void seq_check(const struct world *world, int32_t s)
{
    const struct tv_cache_seq *seq = &world->seqs[s];
    const struct want *want = &world->want[s];
    assert_int_equal(seq->len, want->len);
    assert_int_equal(seq->exact, want->exact);
    for (int32_t i = 0; i < want->len; i++) {
        int64_t slot = tv_cache_slot(world->cache, seq, i);
        for (int32_t layer = 0; layer < LAYERS; layer++) {
            assert_true(row_at(world, layer, slot)[0] == want->values[i] + (float)layer);
            assert_true(row_at(world, layer, slot)[ROW_DIM - 1] == want->values[i]);
        }
    }
}

static void pages_check(const struct world *world)
{
    int32_t holders[PAGES] = {0};
    int64_t held = 0, shared = 0;
    struct tv_cache_counts counts;
    for (int32_t s = 0; s < SEQS; s++) {
        for (int32_t i = 0; i < world->seqs[s].page_count; i++) {
            holders[world->seqs[s].pages[i]]++;
        }
    }
    for (int32_t p = 0; p < PINS; p++) {
        for (int32_t i = 0; i < world->pins[p].count; i++) {
            holders[world->pins[p].pages[i]]++;
        }
    }
    for (int32_t i = 0; i < PAGES; i++) {
        held += holders[i] > 0;
        shared += holders[i] > 1;
        assert_int_equal(tv_cache_holders(world->cache, i), holders[i]);
    }
    tv_cache_counts(world->cache, &counts);
    assert_int_equal(counts.total, PAGES);
    assert_int_equal(counts.held, held);
    assert_int_equal(counts.shared, shared);
    assert_int_equal(counts.free + counts.cached + counts.held, PAGES);
}

static void pin_check(const struct world *world, const struct pin *pin)
{
    for (int32_t i = 0; i < pin->count * world->page_size; i++) {
        int64_t slot =
            (int64_t)pin->pages[i / world->page_size] * world->page_size + i % world->page_size;
        assert_true(row_at(world, 0, slot)[0] == pin->values[i]);
    }
}

static void all_check(const struct world *world)
{
    for (int32_t s = 0; s < SEQS; s++) {
        seq_check(world, s);
    }
    for (int32_t p = 0; p < PINS; p++) {
        pin_check(world, &world->pins[p]);
    }
    pages_check(world);
}

/* Append rows, as prefill does or as a round does; 0, or -ENOSPC with nothing changed, which must
 * be true. */
static int append(struct world *world, int32_t s, const int32_t *tokens, int32_t count, int prefill)
{
    struct tv_cache_seq *seq = &world->seqs[s];
    struct want *want = &world->want[s];
    struct tv_cache_key keys[ROWS_MAX / 16];
    float exact[ROWS_MAX], rounds[ROWS_MAX];
    struct tv_cache_shortage shortage = {-1, -1};
    struct tv_cache_counts before, after;
    tv_cache_counts(world->cache, &before);
    int32_t old_pages = seq->page_count;
    int rc = tv_cache_reserve(world->cache, seq, count, &shortage);
    tv_cache_counts(world->cache, &after);
    if (rc == -ENOSPC) {
        assert_int_equal(shortage.pages_free, before.free + before.cached);
        assert_true(shortage.pages_needed > shortage.pages_free);
        assert_memory_equal(&before, &after, sizeof before);
        return rc;
    }
    assert_int_equal(rc, 0);
    memcpy(want->tokens + want->len, tokens, (size_t)count * sizeof *tokens);
    chain(world, want, want->len + count, keys, exact, rounds);
    for (int32_t i = want->len; i < want->len + count; i++) {
        int64_t slot = tv_cache_slot(world->cache, seq, i);
        int is_exact = prefill && want->exact == want->len;
        if (i / world->page_size >= old_pages) { /* fresh: nothing of an evicted page is left */
            assert_true(isnan(row_at(world, LAYERS - 1, slot)[0]));
        }
        want->values[i] = is_exact ? exact[i] : rounds[i];
        for (int32_t layer = 0; layer < LAYERS; layer++) {
            row_at(world, layer, slot)[0] = want->values[i] + (float)layer;
            row_at(world, layer, slot)[ROW_DIM - 1] = want->values[i];
        }
    }
    assert_int_equal(tv_cache_commit(world->cache, seq, NULL, count), 0);
    if (prefill && want->exact == want->len) {
        seq->exact = seq->len;
        want->exact += count;
    }
    want->len += count;
    return 0;
}

/* Start anew with a prompt: what is known of it is taken over, and is what the prompt's rows are.
 */
static int32_t begin(struct world *world, int32_t s, const int32_t *tokens, int32_t count)
{
    struct tv_cache_seq *seq = &world->seqs[s];
    struct want *want = &world->want[s];
    struct tv_cache_key keys[ROWS_MAX / 16];
    float exact[ROWS_MAX], rounds[ROWS_MAX];
    memcpy(want->tokens, tokens, (size_t)count * sizeof *tokens);
    chain(world, want, count, keys, exact, rounds);
    assert_int_equal(tv_cache_adopt(world->cache, seq, keys, count / world->page_size), 0);
    want->len = seq->len;
    want->exact = 0;
    for (int32_t i = 0; i < seq->len; i++) {
        float value = row_at(world, 0, tv_cache_slot(world->cache, seq, i))[0];
        want->values[i] = exact[i];
        if (world->prefix == TV_CACHE_PREFIX_ROUNDS && value != exact[i]) {
            want->values[i] = rounds[i];
        } else if (want->exact == i) {
            want->exact++;
        }
    }
    want->exact -= want->exact < want->len ? want->exact % world->page_size : 0;
    return seq->len;
}

static void publish(struct world *world, int32_t s)
{
    struct want *want = &world->want[s];
    struct tv_cache_key keys[ROWS_MAX / 16];
    float exact[ROWS_MAX], rounds[ROWS_MAX];
    chain(world, want, want->len, keys, exact, rounds);
    tv_cache_publish(world->cache, &world->seqs[s], 0, keys, want->len / world->page_size);
}

static void finish(struct world *world, int32_t s)
{
    tv_cache_seq_finish(world->cache, &world->seqs[s]);
    world->want[s].len = world->want[s].exact = 0;
}

/* Prompts of few words, so that they share beginnings. */
static void prompt_draw(struct world *world, int32_t *tokens, int32_t count)
{
    for (int32_t i = 0; i < count; i++) {
        tokens[i] = i < count - 8 || below(world, 4) > 0 ? i / 16 % 3 : below(world, 2);
    }
}

static void op_begin(struct world *world, int32_t s)
{
    int32_t tokens[ROWS_MAX], count = 1 + below(world, ROWS_MAX - 20);
    finish(world, s);
    world->want[s].owner = below(world, 2);
    world->want[s].salt = below(world, 2);
    prompt_draw(world, tokens, count);
    int32_t cached = begin(world, s, tokens, count);
    if (count > cached) {
        (void)append(world, s, tokens + cached, count - cached, 1);
    }
    if (below(world, 4) > 0) {
        publish(world, s);
    }
}

static void op_append(struct world *world, int32_t s)
{
    int32_t tokens[40], count = 1 + below(world, 39);
    if (world->want[s].len + count > ROWS_MAX) {
        count = ROWS_MAX - world->want[s].len;
    }
    if (count == 0) {
        return;
    }
    for (int32_t i = 0; i < count; i++) {
        tokens[i] = below(world, 2);
    }
    (void)append(world, s, tokens, count, below(world, 2));
    if (below(world, 2)) {
        publish(world, s);
    }
}

static void back_to(struct world *world, int32_t s, int32_t len)
{
    struct want *want = &world->want[s];
    assert_int_equal(tv_cache_truncate(world->cache, &world->seqs[s], len), 0);
    want->len = len;
    want->exact = want->exact < len ? want->exact : len;
}

static void op_truncate(struct world *world, int32_t s)
{
    back_to(world, s, below(world, world->want[s].len + 1));
}

static void op_fork(struct world *world, int32_t s)
{
    int32_t to = below(world, SEQS), len = below(world, world->want[s].len + 1);
    if (to == s) {
        return;
    }
    finish(world, to);
    assert_int_equal(tv_cache_fork(world->cache, &world->seqs[s], len, &world->seqs[to]), 0);
    world->want[to] = world->want[s];
    world->want[to].len = len;
    world->want[to].exact = world->want[s].exact < len ? world->want[s].exact : len;
}

/* A judgement takes the whole pages of a sequence, or gives them back. */
static void op_pin(struct world *world, int32_t s)
{
    struct pin *pin = &world->pins[below(world, PINS)];
    if (pin->count > 0) {
        tv_cache_unpin(world->cache, pin->pages, pin->count);
        pin->count = 0;
        return;
    }
    if (world->want[s].len < world->page_size) {
        return;
    }
    pin->count = world->want[s].len / world->page_size;
    memcpy(pin->pages, world->seqs[s].pages, (size_t)pin->count * sizeof *pin->pages);
    memcpy(pin->values, world->want[s].values, sizeof pin->values);
    tv_cache_pin(world->cache, pin->pages, pin->count);
}

static void random_operations(struct world *world)
{
    const char *text = getenv("TV_TEST_SCALE");
    double scale = text != NULL ? strtod(text, NULL) : 1.0;
    long operations = (long)((scale > 0.0 ? scale : 1.0) * OPS) / 4 + 1;
    for (long n = 0; n < operations; n++) {
        int32_t s = below(world, SEQS), what = below(world, 100);
        if (what < 25) {
            op_begin(world, s);
        } else if (what < 55) {
            op_append(world, s);
        } else if (what < 70) {
            op_truncate(world, s);
        } else if (what < 82) {
            op_fork(world, s);
        } else if (what < 90) {
            op_pin(world, s);
        } else {
            finish(world, s);
        }
        all_check(world);
    }
    struct tv_cache_counts counts;
    tv_cache_counts(world->cache, &counts);
    if (world->prefix == TV_CACHE_PREFIX_OFF) {
        assert_int_equal(counts.reused + counts.evicted + counts.cached, 0);
    } else {
        assert_true(counts.reused > operations / 50);
        assert_true(counts.evicted > operations / 50);
    }
    for (int32_t p = 0; p < PINS; p++) {
        tv_cache_unpin(world->cache, world->pins[p].pages, world->pins[p].count);
        world->pins[p].count = 0;
    }
}

static void random_operations_equal_an_array_model(void **state)
{
    static const struct {
        int32_t page_size;
        enum tv_cache_prefix prefix;
    } cases[] = {{16, TV_CACHE_PREFIX_EXACT},
                 {32, TV_CACHE_PREFIX_EXACT},
                 {16, TV_CACHE_PREFIX_ROUNDS},
                 {16, TV_CACHE_PREFIX_OFF}};
    struct world world;
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        world_open(&world, cases[i].page_size, cases[i].prefix);
        random_operations(&world);
        world_close(&world);
    }
}

/* One prompt of `pages` whole pages of one word each, known and held by nobody. */
static void leave(struct world *world, int32_t word, int32_t pages)
{
    int32_t tokens[ROWS_MAX];
    for (int32_t i = 0; i < pages * 16; i++) {
        tokens[i] = word;
    }
    assert_int_equal(begin(world, 0, tokens, pages * 16), 0);
    assert_int_equal(append(world, 0, tokens, pages * 16, 1), 0);
    publish(world, 0);
    finish(world, 0);
}

/* How many of its pages are known; nothing else changes but that they were used last. */
static int32_t known(struct world *world, int32_t word, int32_t pages)
{
    int32_t tokens[ROWS_MAX];
    for (int32_t i = 0; i < pages * 16; i++) {
        tokens[i] = word;
    }
    int32_t rows = begin(world, 0, tokens, pages * 16);
    finish(world, 0);
    return rows / 16;
}

static void the_least_recently_used_goes_first(void **state)
{
    struct world world;
    int32_t tokens[ROWS_MAX] = {0};
    struct tv_cache_counts counts;
    (void)state;
    world_open(&world, 16, TV_CACHE_PREFIX_EXACT);
    for (int32_t word = 1; word <= 5; word++) {
        leave(&world, word, 8);
    }
    tv_cache_counts(world.cache, &counts);
    assert_int_equal(counts.cached, PAGES);
    assert_int_equal(known(&world, 1, 8), 8); /* used again: the second is the oldest now */
    assert_int_equal(append(&world, 1, tokens, 3 * 16, 1), 0);
    assert_int_equal(known(&world, 2, 8), 5); /* its end went, its beginning is still of use */
    assert_int_equal(known(&world, 3, 8), 8);
    assert_int_equal(append(&world, 2, tokens, 10 * 16, 1),
                     0); /* 4: 8, 5: 2, used before 1, 2, 3 */
    assert_int_equal(known(&world, 4, 8), 0);
    assert_int_equal(known(&world, 5, 8), 6);
    assert_int_equal(known(&world, 1, 8), 8);
    assert_int_equal(known(&world, 2, 8), 5);
    tv_cache_counts(world.cache, &counts);
    assert_int_equal(counts.evicted, 13);
    assert_int_equal(counts.free, 0);
    all_check(&world);
    world_close(&world);
}

/* What nobody holds is no obstacle; what somebody holds is, and then nothing is lost for it. */
static void a_reserve_has_every_page_that_nobody_holds(void **state)
{
    struct world world;
    int32_t tokens[ROWS_MAX] = {0};
    struct tv_cache_shortage shortage;
    (void)state;
    world_open(&world, 16, TV_CACHE_PREFIX_EXACT);
    for (int32_t word = 1; word <= 5; word++) {
        leave(&world, word, 8);
    }
    for (int32_t s = 1; s <= 3; s++) {
        assert_int_equal(append(&world, s, tokens, 10 * 16, 1), 0);
    }
    assert_int_equal(known(&world, 5, 8), 8); /* 10 left: all of the last, two of the fourth */
    assert_int_equal(tv_cache_reserve(world.cache, &world.seqs[4], 11 * 16, &shortage), -ENOSPC);
    assert_int_equal(shortage.pages_needed, 11);
    assert_int_equal(shortage.pages_free, 10);
    assert_int_equal(known(&world, 5, 8), 8);
    assert_int_equal(append(&world, 4, tokens, 10 * 16, 1), 0);
    assert_int_equal(known(&world, 5, 8), 0);
    all_check(&world);
    world_close(&world);
}

static void salts_and_owners_are_apart(void **state)
{
    struct world world;
    int32_t tokens[64];
    (void)state;
    world_open(&world, 16, TV_CACHE_PREFIX_EXACT);
    for (int32_t i = 0; i < 64; i++) {
        tokens[i] = i;
    }
    assert_int_equal(append(&world, 0, tokens, 64, 1), 0);
    publish(&world, 0);
    for (int32_t s = 1; s <= 3; s++) {
        world.want[s].owner = s & 1;
        world.want[s].salt = s >> 1;
        assert_int_equal(begin(&world, s, tokens, 64), 0);
    }
    assert_int_equal(begin(&world, 4, tokens, 64), 64);
    tokens[40] = 99; /* the page with it, and those behind it, are others */
    assert_int_equal(begin(&world, 5, tokens, 64), 32);
    all_check(&world);
    world_close(&world);
}

/* Rolled back into a known page and written anew: who found the page keeps what it was. */
static void a_page_that_is_written_again_is_not_found(void **state)
{
    struct world world;
    int32_t tokens[48] = {0}, other[8] = {5, 5, 5, 5, 5, 5, 5, 5};
    (void)state;
    world_open(&world, 16, TV_CACHE_PREFIX_EXACT);
    assert_int_equal(append(&world, 0, tokens, 48, 1), 0);
    publish(&world, 0);
    back_to(&world, 0, 20);
    assert_int_equal(begin(&world, 1, tokens, 48), 48); /* found while nothing was written */
    assert_int_equal(append(&world, 0, other, 8, 1), 0);
    assert_int_equal(begin(&world, 2, tokens, 48), 48); /* the writer took a copy */
    all_check(&world);
    finish(&world, 1);
    finish(&world, 2);
    finish(&world, 0);
    assert_int_equal(begin(&world, 0, tokens, 48), 48);
    back_to(&world, 0, 20);
    assert_int_equal(append(&world, 0, other, 8, 1), 0); /* alone: writes in place */
    assert_int_equal(begin(&world, 1, tokens, 48), 16);
    all_check(&world);
    world_close(&world);
}

static void rows_of_rounds_are_found_only_when_asked_for(void **state)
{
    struct world world;
    int32_t tokens[64] = {0};
    (void)state;
    for (int rounds = 0; rounds < 2; rounds++) {
        world_open(&world, 16, rounds ? TV_CACHE_PREFIX_ROUNDS : TV_CACHE_PREFIX_EXACT);
        assert_int_equal(append(&world, 0, tokens, 20, 1), 0);
        assert_int_equal(append(&world, 0, tokens, 20, 0), 0);
        assert_int_equal(append(&world, 0, tokens, 24, 1), 0); /* depends on the round's rows */
        publish(&world, 0);
        finish(&world, 0);
        assert_int_equal(begin(&world, 1, tokens, 64), rounds ? 64 : 16);
        all_check(&world);
        /* A prompt's own rows take the place of a round's. */
        assert_int_equal(append(&world, 2, tokens, 64, 1), 0);
        publish(&world, 2);
        finish(&world, 2);
        assert_int_equal(begin(&world, 3, tokens, 64), 64);
        assert_int_equal(world.seqs[3].exact, 64);
        all_check(&world);
        world_close(&world);
    }
}

/* Two that computed the same rows at the same time: one copy stays. */
static void equal_pages_become_one(void **state)
{
    struct world world;
    int32_t tokens[40] = {0};
    struct tv_cache_counts counts;
    (void)state;
    world_open(&world, 16, TV_CACHE_PREFIX_EXACT);
    for (int32_t s = 0; s < 3; s++) {
        assert_int_equal(append(&world, s, tokens, 40, 1), 0);
    }
    for (int32_t s = 0; s < 3; s++) {
        publish(&world, s);
        publish(&world, s); /* said twice: nothing happens */
    }
    all_check(&world);
    tv_cache_counts(world.cache, &counts);
    assert_int_equal(counts.held, 2 + 3); /* two known ones, three ends */
    assert_int_equal(counts.shared, 2);
    world_close(&world);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(random_operations_equal_an_array_model),
        cmocka_unit_test(the_least_recently_used_goes_first),
        cmocka_unit_test(a_reserve_has_every_page_that_nobody_holds),
        cmocka_unit_test(salts_and_owners_are_apart),
        cmocka_unit_test(a_page_that_is_written_again_is_not_found),
        cmocka_unit_test(rows_of_rounds_are_found_only_when_asked_for),
        cmocka_unit_test(equal_pages_become_one),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
