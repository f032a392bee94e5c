/*
 * test_accounting.c - sessions and pages together against plain arrays (B10, B11).
 *
 * A million random creates, rounds, extensions, rollbacks, forks, rounds that fail after their
 * commit, deletions and expiries. After each: the length, digest and pages of the session are those
 * of the array, every page has as many holders as there are sessions with it, and free plus held
 * pages are all there are.
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

#include "cache/cache.h"
#include "session/session.h"

#define SLOTS    7
#define LEN_MAX  700 /* lengths beyond it end the session */
#define ROWS_MAX 96
#define PAGES    160
#define SECOND   INT64_C(1000000)

static const uint8_t model_id[32] = {7};

/* One session, the array it must equal, and its pages. */
struct slot {
    struct tv_session *session; /* NULL: none */
    struct tv_cache_seq seq;
    int32_t tokens[LEN_MAX + 2 * ROWS_MAX];
    int32_t len;
    struct tv_digest digest;
    struct tv_digest digests[LEN_MAX + 2 * ROWS_MAX + 1]; /* of every length so far */
    int32_t seen[PAGES], seen_count;                      /* its pages at the last check */
    char id[32];
};

struct world {
    struct tv_kernels *kernels;
    struct tv_cache *cache;
    struct tv_sessions table;
    struct slot slots[SLOTS];
    int32_t holders[PAGES]; /* slots that hold the page */
    int32_t page_size;
    int64_t now_us;
    uint64_t random;
};

static int32_t below(struct world *world, int32_t limit)
{
    world->random = world->random * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    return (int32_t)((world->random >> 33) % (uint64_t)limit);
}

static int64_t operations(void)
{
    const char *text = getenv("TV_TEST_SCALE");
    double scale = text != NULL ? strtod(text, NULL) : 1.0;
    return scale > 0.0 && scale < 1.0 ? (int64_t)(1000000.0 * scale) + 1 : 1000000;
}

static void world_open(struct world *world, int32_t page_size)
{
    struct tv_kernels_options options = {.threads = 1, .cpu_flags_mask = ~UINT64_C(0)};
    struct tv_cache_params cache_params = {
        .layers = 1, .page_size = page_size, .row_dim = 1, .dtype = TV_F32, .pages = PAGES};
    struct tv_sessions_params params = {
        .sessions_max = SLOTS, .page_size = page_size, .model_max_len = 100000};
    memset(world, 0, sizeof *world);
    memcpy(params.model_id, model_id, sizeof model_id);
    world->page_size = page_size;
    world->random = 20261129 + (uint64_t)page_size;
    assert_int_equal(tv_kernels_create("ref", &options, &world->kernels), 0);
    assert_int_equal(tv_cache_create(world->kernels, &cache_params, &world->cache), 0);
    assert_int_equal(tv_sessions_init(&world->table, &params), 0);
}

static void bury(struct world *world)
{
    struct tv_session *gone = tv_sessions_take_gone(&world->table);
    while (gone != NULL) {
        struct tv_session *next = gone->next;
        tv_session_destroy(gone);
        gone = next;
    }
}

/* What the array says of slot i, and of every page. */
static void slot_check(struct world *world, int32_t i)
{
    struct slot *slot = &world->slots[i];
    int64_t held = 0, shared = 0;
    for (int32_t p = 0; p < slot->seen_count; p++) {
        world->holders[slot->seen[p]]--;
    }
    slot->seen_count = slot->seq.page_count;
    for (int32_t p = 0; p < slot->seq.page_count; p++) {
        slot->seen[p] = slot->seq.pages[p];
        world->holders[slot->seen[p]]++;
    }
    for (int32_t p = 0; p < slot->seq.page_count; p++) {
        assert_int_equal(tv_cache_holders(world->cache, slot->seen[p]),
                         world->holders[slot->seen[p]]);
    }
    for (int32_t p = 0; p < PAGES; p++) {
        held += world->holders[p] > 0;
        shared += world->holders[p] > 1;
    }
    struct tv_cache_counts counts;
    tv_cache_counts(world->cache, &counts);
    assert_int_equal(counts.held, held);
    assert_int_equal(counts.free, PAGES - held);
    assert_int_equal(counts.shared, shared);
    assert_int_equal(slot->seq.len, slot->len);
    assert_int_equal(slot->seq.scratch, 0);
    assert_int_equal(slot->seq.page_count, (slot->len + world->page_size - 1) / world->page_size);
    if (slot->session != NULL) {
        assert_int_equal(slot->session->len, slot->len);
        assert_memory_equal(&slot->session->digest, &slot->digest, sizeof slot->digest);
    }
}

/* Every token and every digest at a page border. */
static void slot_check_whole(struct world *world, const struct slot *slot)
{
    struct tv_digest digest;
    if (slot->session == NULL) {
        return;
    }
    tv_digest_start(&digest, model_id, "", 0);
    for (int32_t t = 0; t < slot->len; t++) {
        assert_int_equal(slot->session->tokens[t], slot->tokens[t]);
        tv_digest_push(&digest, slot->tokens[t]);
        if ((t + 1) % world->page_size == 0) {
            assert_memory_equal(&slot->session->borders[t / world->page_size], &digest,
                                sizeof digest);
        }
    }
    assert_memory_equal(&digest, &slot->digest, sizeof digest);
}

/* Pages for `count` rows, or the exact shortage with nothing changed. */
static int rows_reserve(struct world *world, struct slot *slot, int32_t count)
{
    struct tv_cache_shortage shortage = {-1, -1};
    struct tv_cache_counts counts;
    tv_cache_counts(world->cache, &counts);
    int32_t tail = slot->seq.page_count - 1;
    int copies = slot->len % world->page_size != 0 && world->holders[slot->seq.pages[tail]] > 1;
    int64_t needed = (slot->len + count + world->page_size - 1) / world->page_size -
                     slot->seq.page_count + copies;
    int rc = tv_cache_reserve(world->cache, &slot->seq, count, &shortage);
    assert_int_equal(rc, needed > counts.free ? -ENOSPC : 0);
    if (rc != 0) {
        assert_int_equal(shortage.pages_needed, needed);
        assert_int_equal(shortage.pages_free, counts.free);
    }
    return rc;
}

/* Stage tokens behind the session's, as an answered round does; *digest moves on. */
static void tokens_stage(struct world *world, struct slot *slot, int32_t *tokens, int32_t count,
                         struct tv_digest *digest)
{
    for (int32_t i = 0; i < count; i++) {
        tokens[i] = below(world, 100000);
    }
    int32_t first = below(world, count + 1); /* in two steps, as slices come */
    tv_session_stage(slot->session, 0, tokens, first, digest);
    tv_session_stage(slot->session, first, tokens + first, count - first, digest);
}

static void tokens_commit(struct slot *slot, const int32_t *tokens, int32_t count,
                          const struct tv_digest *digest)
{
    tv_session_commit(slot->session, count, digest, 1, TV_FINISH_NONE);
    for (int32_t i = 0; i < count; i++) {
        slot->tokens[slot->len++] = tokens[i];
        tv_digest_push(&slot->digest, tokens[i]);
        slot->digests[slot->len] = slot->digest;
    }
}

static void op_create(struct world *world, int32_t i)
{
    struct slot *slot = &world->slots[i];
    struct tv_request request = {.kind = TV_CALL_CREATE, .lease_s = 10};
    int32_t count = 1 + below(world, ROWS_MAX), tokens[ROWS_MAX];
    request.token_count = count;
    request.tokens = tokens;
    slot->len = 0;
    tv_digest_start(&slot->digest, model_id, "", 0);
    assert_int_equal(tv_sessions_build(&world->table, &request, "me", &slot->session), 0);
    struct tv_digest digest = slot->session->digest;
    if (rows_reserve(world, slot, count) != 0) { /* kv-full: back to nothing */
        tv_sessions_discard(&world->table, slot->session);
        slot->session = NULL;
        tv_cache_seq_finish(world->cache, &slot->seq);
        bury(world);
        return;
    }
    tokens_stage(world, slot, tokens, count, &digest);
    assert_int_equal(tv_cache_commit(world->cache, &slot->seq, NULL, count), 0);
    tokens_commit(slot, tokens, count, &digest);
    tv_sessions_publish(&world->table, slot->session, world->now_us);
    memcpy(slot->id, slot->session->id, sizeof slot->id);
}

/* A round over a tree: some nodes are accepted. Or it fails after the KV was committed, and both
 * go back to where they were. */
static void op_round(struct world *world, int32_t i, int fails)
{
    struct slot *slot = &world->slots[i];
    int32_t nodes = 1 + below(world, below(world, 4) == 0 ? ROWS_MAX : 9), count = 0;
    int32_t accepted[ROWS_MAX], tokens[ROWS_MAX];
    int32_t sparse = 1 + below(world, 4);
    struct tv_digest digest = slot->session->digest;
    assert_int_equal(tv_session_reserve(slot->session, nodes), 0);
    if (rows_reserve(world, slot, nodes) != 0) {
        return;
    }
    for (int32_t node = 0; node < nodes; node++) {
        if (node == 0 || below(world, sparse) == 0) {
            accepted[count++] = node;
        }
    }
    tokens_stage(world, slot, tokens, count, &digest);
    assert_int_equal(tv_cache_commit(world->cache, &slot->seq, accepted, count), 0);
    if (fails) {
        assert_int_equal(tv_cache_truncate(world->cache, &slot->seq, slot->session->len), 0);
        return;
    }
    tokens_commit(slot, tokens, count, &digest);
    tv_session_renew(slot->session, 0, world->now_us);
}

static void op_extend(struct world *world, int32_t i)
{
    struct slot *slot = &world->slots[i];
    int32_t count = 1 + below(world, ROWS_MAX), tokens[ROWS_MAX];
    struct tv_digest digest = slot->session->digest;
    assert_int_equal(tv_session_reserve(slot->session, count), 0);
    if (rows_reserve(world, slot, count) != 0) {
        return;
    }
    if (below(world, 8) == 0) { /* nothing of it is kept */
        tv_cache_drop(world->cache, &slot->seq);
        return;
    }
    tokens_stage(world, slot, tokens, count, &digest);
    assert_int_equal(tv_cache_commit(world->cache, &slot->seq, NULL, count), 0);
    tokens_commit(slot, tokens, count, &digest);
}

static void op_rollback(struct world *world, int32_t i)
{
    struct slot *slot = &world->slots[i];
    int32_t len = 1 + below(world, slot->len), pending = -1;
    enum tv_finish finish = TV_FINISH_STOP;
    struct tv_digest digest;
    tv_session_at(slot->session, len, &digest, &pending, &finish);
    assert_memory_equal(&digest, &slot->digests[len], sizeof digest);
    assert_int_equal(pending, len < slot->len ? slot->tokens[len] : slot->session->pending);
    assert_int_equal(finish, TV_FINISH_NONE);
    assert_int_equal(tv_cache_truncate(world->cache, &slot->seq, len), 0);
    tv_session_rollback(slot->session, len, &digest, pending, finish);
    slot->len = len;
    slot->digest = digest;
}

/* Slot i, which is empty, becomes a fork of another one. */
static void op_fork(struct world *world, int32_t i)
{
    struct slot *slot = &world->slots[i], *parent = &world->slots[below(world, SLOTS)];
    struct tv_request request = {.kind = TV_CALL_FORK, .lease_s = 10};
    if (parent->session == NULL) {
        return;
    }
    int32_t len = below(world, 2) == 0 ? parent->len : 1 + below(world, parent->len);
    assert_int_equal(
        tv_sessions_fork(&world->table, parent->session, len, &request, &slot->session), 0);
    assert_int_equal(tv_cache_fork(world->cache, &parent->seq, len, &slot->seq), 0);
    tv_sessions_publish(&world->table, slot->session, world->now_us);
    memcpy(slot->id, slot->session->id, sizeof slot->id);
    memcpy(slot->tokens, parent->tokens, (size_t)len * sizeof slot->tokens[0]);
    memcpy(slot->digests, parent->digests, (size_t)(len + 1) * sizeof slot->digests[0]);
    slot->len = len;
    slot->digest = slot->digests[len];
}

static void op_end(struct world *world, int32_t i, int expires)
{
    struct slot *slot = &world->slots[i];
    struct tv_session *found = NULL;
    if (expires) {
        tv_session_renew(slot->session, 0, world->now_us - 11 * SECOND);
    } else {
        tv_sessions_remove(&world->table, slot->session, TV_SESSION_DELETED);
    }
    assert_int_equal(tv_sessions_find(&world->table, slot->id, "me", world->now_us, &found),
                     expires ? TV_SESSION_EXPIRED : TV_SESSION_NOT_FOUND);
    tv_cache_seq_finish(world->cache, &slot->seq);
    slot->session = NULL;
    slot->len = 0;
    bury(world);
}

static void op_any(struct world *world, int32_t i)
{
    struct slot *slot = &world->slots[i];
    int32_t what = below(world, 100);
    if (slot->session == NULL && what < 50) {
        op_fork(world, i);
    } else if (slot->session == NULL) {
        op_create(world, i);
    } else if (slot->len > LEN_MAX || what < 2) {
        op_end(world, i, what % 2);
    } else if (what < 55) {
        op_round(world, i, 0);
    } else if (what < 65) {
        op_rollback(world, i);
    } else if (what < 85) {
        op_round(world, i, 1);
    } else {
        op_extend(world, i);
    }
}

static void run(int32_t page_size)
{
    struct world *world = malloc(sizeof *world);
    assert_non_null(world);
    world_open(world, page_size);
    for (int64_t n = 0; n < operations(); n++) {
        int32_t i = below(world, SLOTS);
        world->now_us += SECOND / 1000;
        op_any(world, i);
        slot_check(world, i);
        if (n % 101 == 0) {
            slot_check_whole(world, &world->slots[i]);
        }
    }
    for (int32_t i = 0; i < SLOTS; i++) {
        slot_check_whole(world, &world->slots[i]);
        if (world->slots[i].session != NULL) {
            op_end(world, i, i % 2);
        }
        slot_check(world, i);
    }
    struct tv_cache_counts counts;
    tv_cache_counts(world->cache, &counts);
    assert_int_equal(counts.free, PAGES); /* the start value */
    assert_int_equal(world->table.count, 0);
    tv_sessions_finish(&world->table);
    tv_cache_destroy(world->cache);
    world->kernels->destroy(world->kernels);
    free(world);
}

static void b10_b11_a_million_at_page_16(void **state)
{
    (void)state;
    run(16);
}

static void b10_b11_a_million_at_page_64(void **state)
{
    (void)state;
    run(64);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(b10_b11_a_million_at_page_16),
        cmocka_unit_test(b10_b11_a_million_at_page_64),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
