/*
 * sched_world.c - plain arrays that say what every session, its answers and its pages must be.
 */
#include "sched_world.h"

#include <sched.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <cmocka.h>

#include "base/clock.h"

static const uint8_t model_id[32];

/* Far ahead of the real one, so that whoever waits until a time of it waits to be told. */
static _Atomic int64_t clock_us = INT64_C(1000000000) * SECOND_US;

int64_t __wrap_tv_clock_us(void);
int64_t __wrap_tv_clock_us(void)
{
    return atomic_load(&clock_us);
}

int64_t world_now_us(void)
{
    return atomic_load(&clock_us);
}

int32_t below(struct world *world, int32_t limit)
{
    if (world->bytes != NULL) {
        uint32_t drawn = 0;
        for (int32_t room = 1; room < limit; room = room <= INT32_MAX >> 8 ? room << 8 : limit) {
            drawn = world->left > 0 ? drawn << 8 | *world->bytes : 0;
            world->bytes += world->left > 0;
            world->left -= world->left > 0;
        }
        return (int32_t)(drawn % (uint32_t)limit);
    }
    world->random = world->random * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    return (int32_t)((world->random >> 33) % (uint64_t)limit);
}

int64_t answer_int(const struct tv_call *call, const char *name)
{
    char text[64];
    const struct tv_buf *body = &call->reply.body;
    int bytes = snprintf(text, sizeof text, "\"%s\":", name);
    const char *at = memmem(body->data, body->bytes, text, (size_t)bytes);
    if (at == NULL) {
        print_error("no %s in %.*s\n", name, (int)body->bytes, body->data);
    }
    assert_non_null(at);
    return strtoll(at + bytes, NULL, 10); /* a number ends before the text does */
}

void assert_status(const struct tv_call *call, int http_status)
{
    if (call->reply.http_status != http_status) {
        print_error("%.*s\n", (int)call->reply.body.bytes, call->reply.body.data);
    }
    assert_int_equal(call->reply.http_status, http_status);
}

void assert_replay(const struct known *known, const struct tv_call *call)
{
    static const char first[] = "\"replayed\":false}", again[] = "\"replayed\":true}";
    const struct tv_buf *body = &call->reply.body;
    assert_status(call, 200);
    assert_true(body->bytes >= strlen(again));
    assert_memory_equal(body->data + body->bytes - strlen(again), again, strlen(again));
    if (known->answer == NULL) {
        assert_int_equal(answer_int(call, "seq"), known->seq);
        return;
    }
    size_t same = known->bytes - strlen(first);
    assert_memory_equal(known->answer + same, first, strlen(first));
    assert_int_equal(body->bytes, same + strlen(again));
    assert_memory_equal(body->data, known->answer, same);
}

void refused_full(struct world *world, struct tv_call *call)
{
    assert_refused(call, 503, "kv-full");
    assert_true(answer_int(call, "pages_needed") > answer_int(call, "pages_free"));
    call_free(call);
    world->counts[WORLD_FULL]++;
}

/* ---- what became of a slot ---- */

void slot_push(struct slot *slot, int32_t token)
{
    assert_true(slot->len < LEN_ROOM);
    slot->digests[slot->len + 1] = slot->digests[slot->len];
    tv_digest_push(&slot->digests[slot->len + 1], token);
    slot->tokens[slot->len++] = token;
}

void slot_accept(struct world *world, struct slot *slot, const struct draft *draft)
{
    for (int32_t i = 0; i < draft->right; i++) {
        slot_push(slot, draft->tokens[draft->path[i]]);
    }
    slot->pending = tv_fixed_engine_token(world->fixture.engine, slot->len);
}

void slot_cut(struct slot *slot, int32_t len)
{
    slot->pending = len < slot->len ? slot->tokens[len] : slot->pending;
    slot->len = len;
}

void slot_renew(struct slot *slot, int32_t lease_s)
{
    slot->lease_s = lease_s > 0 ? lease_s : slot->lease_s;
    slot->lease_us = world_now_us() + slot->lease_s * SECOND_US;
}

static void known_drop(struct slot *slot)
{
    free(slot->known[0].body);
    free(slot->known[0].answer);
    slot->known_count--;
    memmove(slot->known, slot->known + 1, (size_t)slot->known_count * sizeof slot->known[0]);
}

static char *copy(const char *text, size_t bytes)
{
    char *made = malloc(bytes + 1);
    assert_non_null(made);
    memcpy(made, text, bytes);
    made[bytes] = '\0';
    return made;
}

void slot_keep(struct slot *slot, enum tv_call_kind kind, const char *body,
               const struct tv_call *call)
{
    if (slot->known_count == TV_REPLAY_ROUNDS_MAX) {
        known_drop(slot);
    }
    struct known *known = &slot->known[slot->known_count++];
    *known = (struct known){.seq = slot->seq, .kind = kind, .body = copy(body, strlen(body))};
    if (call != NULL) {
        known->bytes = call->reply.body.bytes;
        known->answer = copy(call->reply.body.data, known->bytes);
    }
    slot->seq++;
    slot->held.count = 0;
    slot->held_seq = 0;
    slot->leaf = -1;
}

void slot_ack(struct slot *slot, int32_t seq)
{
    while (slot->known_count > 1 && slot->known[0].seq <= seq) {
        known_drop(slot);
    }
}

static void keyed_free(struct keyed *keyed)
{
    free(keyed->body);
    free(keyed->answer);
    memset(keyed, 0, sizeof *keyed);
}

void slot_forget(struct world *world, struct slot *slot)
{
    while (slot->known_count > 0) {
        known_drop(slot);
    }
    if (slot->keyed.body != NULL) {
        keyed_free(&world->past);
        world->past = slot->keyed;
    }
    for (int32_t p = 0; p < slot->seen_count; p++) {
        world->holders[slot->seen[p]]--;
    }
    memset(slot, 0, sizeof *slot);
    world->live--;
}

void accepted(struct world *world, struct slot *slot, const struct draft *draft, const char *body,
              const struct tv_call *call)
{
    assert_status(call, 200);
    assert_int_equal(answer_int(call, "seq"), slot->seq);
    slot_accept(world, slot, draft);
    assert_int_equal(answer_int(call, "committed_len"), slot->len);
    assert_int_equal(answer_int(call, "pending"), slot->pending);
    slot_keep(slot, TV_CALL_VERIFY, body, call);
    slot->leaf = draft->path[draft->right - 1];
}

/* ---- trees ---- */

void draft_make(struct world *world, int32_t len, int32_t pending, struct draft *ret_draft)
{
    struct draft *draft = ret_draft;
    int32_t right = below(world, 7) + 1, at = 0;
    memset(draft, 0, sizeof *draft);
    draft->count = draft->right = 1;
    draft->tokens[0] = pending;
    draft->parents[0] = -1;
    for (int32_t depth = 1; depth <= right; depth++) {
        int32_t drawn = tv_fixed_engine_token(world->fixture.engine, len + depth);
        int32_t wrong = below(world, 3);
        for (int32_t k = 0; k <= wrong; k++) { /* siblings; the right one comes last */
            int is_right = k == wrong && depth < right;
            draft->tokens[draft->count] = is_right ? drawn : (drawn + k + 1) % VOCAB;
            draft->parents[draft->count] = at;
            if (is_right) {
                draft->path[draft->right++] = draft->count;
            }
            draft->count++;
        }
        at = draft->count - 1;
    }
}

int draft_text(const struct draft *draft, char *ret_text, size_t bytes)
{
    int at = snprintf(ret_text, bytes, "\"tokens\":[%d", draft->tokens[0]);
    for (int32_t i = 1; i < draft->count; i++) {
        at += snprintf(ret_text + at, bytes - (size_t)at, ",%d", draft->tokens[i]);
    }
    at += snprintf(ret_text + at, bytes - (size_t)at, "],\"parents\":[-1");
    for (int32_t i = 1; i < draft->count; i++) {
        at += snprintf(ret_text + at, bytes - (size_t)at, ",%d", draft->parents[i]);
    }
    at += snprintf(ret_text + at, bytes - (size_t)at, "]");
    assert_true((size_t)at < bytes);
    return at;
}

void draft_body(const struct world *world, int32_t seq, int32_t len, const struct draft *draft,
                const char *rest, char *ret_body)
{
    char tree[BODY / 2];
    (void)draft_text(draft, tree, sizeof tree);
    int used = snprintf(ret_body, BODY,
                        "{\"seq\":%d,\"epoch\":\"%s\",\"expected_len\":%d,\"tree\":{%s}%s}", seq,
                        world->epoch, len, tree, rest);
    assert_true(used > 0 && used < BODY);
}

/* ---- the world ---- */

void world_open(struct world *world)
{
    fixture_start_pages(&world->fixture, PAGES);
    memcpy(world->epoch, world->fixture.sched->table.epoch, sizeof world->epoch);
}

void world_close(struct world *world)
{
    struct tv_cache_counts counts;
    struct fixture *fixture = &world->fixture;
    for (int32_t i = 0; i < SLOTS; i++) {
        if (world->slots[i].id[0] != '\0') {
            slot_forget(world, &world->slots[i]);
        }
    }
    keyed_free(&world->past);
    tv_sched_destroy(fixture->sched);
    assert_int_equal(tv_fixed_engine_contexts(fixture->engine), 0);
    tv_cache_counts(fixture->engine->cache, &counts);
    assert_int_equal(counts.held, 0);
    assert_int_equal(counts.free + counts.cached, PAGES);
    world->counts[WORLD_EVICTED] += counts.evicted;
    world->counts[WORLD_REUSED] += counts.reused;
    fixture->engine->ops->destroy(fixture->engine);
}

static void worker_look(struct world *world)
{
    struct tv_sched *sched = world->fixture.sched;
    tv_sched_lock(sched);
    (void)pthread_cond_signal(&sched->wake);
    tv_sched_unlock(sched);
}

void world_settle(struct world *world)
{
    struct timespec now, until;
    (void)clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_sec += 60; /* only pages that nobody gives back get there */
    do {
        if (tv_fixed_engine_contexts(world->fixture.engine) == world->live) {
            return;
        }
        (void)sched_yield();
        (void)clock_gettime(CLOCK_MONOTONIC, &now);
    } while (now.tv_sec < until.tv_sec);
    fail_msg("%d contexts are open, but %d sessions live",
             tv_fixed_engine_contexts(world->fixture.engine), world->live);
}

void world_pass(struct world *world, int64_t us)
{
    int64_t now_us = atomic_fetch_add(&clock_us, us) + us;
    int expired = 0;
    for (int32_t i = 0; i < SLOTS; i++) {
        struct slot *slot = &world->slots[i];
        if (slot->id[0] == '\0' || slot->lease_us > now_us) {
            continue;
        }
        expired = 1;
        world->counts[WORLD_EXPIRED]++;
        world->counts[WORLD_EXPIRED_HELD] += slot->held_seq > 0;
        if (below(world, 2) == 0) { /* at use: its time is over, whoever has noticed */
            struct tv_call *call = ask(&world->fixture, TV_CALL_STATE, slot->id, NULL);
            assert_refused(call, 410, "session-expired");
            call_free(call);
        }
        slot_forget(world, slot);
    }
    if (expired) {
        worker_look(world);
        world_settle(world);
    }
}

int64_t pages_left(struct world *world)
{
    struct tv_cache_counts counts;
    tv_cache_counts(world->fixture.engine->cache, &counts);
    return counts.free + counts.cached;
}

int64_t pages_needed(struct world *world, int32_t i, int32_t rows)
{
    const struct slot *slot = &world->slots[i];
    int32_t have = slot->seen_count;
    int copies = slot->len % PAGE != 0 && world->holders[slot->seen[have - 1]] > 1;
    return (slot->len + rows + PAGE - 1) / PAGE - have + copies;
}

/* Nothing runs on it now, so under the lock its context may be looked at. */
static struct tv_session *session_of(struct world *world, const struct slot *slot)
{
    struct tv_session *session = NULL;
    assert_int_equal(
        tv_sessions_find(&world->fixture.sched->table, slot->id, "", world_now_us(), &session),
        TV_OK);
    return session;
}

static void seen_move(struct world *world, struct slot *slot, const struct tv_cache_seq *seq)
{
    for (int32_t p = 0; p < slot->seen_count; p++) {
        world->holders[slot->seen[p]]--;
    }
    slot->seen_count = seq->page_count;
    for (int32_t p = 0; p < seq->page_count; p++) {
        slot->seen[p] = seq->pages[p];
        world->holders[slot->seen[p]]++;
    }
}

static void pool_check(struct world *world)
{
    struct tv_cache_counts counts;
    int64_t held = 0, shared = 0;
    for (int32_t p = 0; p < PAGES; p++) {
        held += world->holders[p] > 0;
        shared += world->holders[p] > 1;
    }
    tv_cache_counts(world->fixture.engine->cache, &counts);
    assert_int_equal(counts.held, held);
    assert_int_equal(counts.shared, shared);
    assert_int_equal(counts.free + counts.cached, PAGES - held);
    assert_int_equal(world->fixture.sched->table.count, world->live);
}

void world_check(struct world *world, int32_t i)
{
    struct slot *slot = &world->slots[i];
    struct tv_sched *sched = world->fixture.sched;
    world_settle(world);
    tv_sched_lock(sched);
    if (slot->id[0] != '\0') {
        const struct tv_session *session = session_of(world, slot);
        const struct tv_cache_seq *seq = tv_fixed_engine_seq(session->context);
        seen_move(world, slot, seq);
        for (int32_t p = 0; p < slot->seen_count; p++) {
            assert_int_equal(tv_cache_holders(world->fixture.engine->cache, slot->seen[p]),
                             world->holders[slot->seen[p]]);
        }
        assert_int_equal(session->len, slot->len);
        assert_int_equal(session->pending, slot->pending);
        assert_int_equal(session->next_seq, slot->seq);
        assert_int_equal(session->kept_count, slot->known_count);
        assert_int_equal(session->held.settled ? 0 : session->held.seq, slot->held_seq);
        assert_int_equal(session->lease_expires_us, slot->lease_us);
        assert_int_equal(session->busy, 0);
        assert_null(session->behind);
        assert_memory_equal(&session->digest, &slot->digests[slot->len], sizeof session->digest);
        assert_int_equal(seq->len, slot->len);
        assert_int_equal(seq->scratch, slot->held.count);
        assert_int_equal(seq->page_count, (slot->len + slot->held.count + PAGE - 1) / PAGE);
    }
    pool_check(world);
    tv_sched_unlock(sched);
}

static void slot_check_whole(struct world *world, struct slot *slot)
{
    const struct tv_session *session = session_of(world, slot);
    const struct tv_cache *cache = world->fixture.engine->cache;
    const struct tv_cache_seq *seq = tv_fixed_engine_seq(session->context);
    const float *rows = tv_cache_layer(cache, 0);
    struct tv_digest digest;
    seen_move(world, slot, seq);
    assert_memory_equal(session->tokens, slot->tokens, (size_t)slot->len * sizeof slot->tokens[0]);
    tv_digest_start(&digest, model_id, "", 0);
    for (int32_t t = 0; t < slot->len; t++) {
        assert_int_equal((int32_t)rows[tv_cache_slot(cache, seq, t)], slot->tokens[t]);
        tv_digest_push(&digest, slot->tokens[t]);
        if ((t + 1) % PAGE == 0) {
            assert_memory_equal(&digest, &session->borders[t / PAGE], sizeof digest);
        }
    }
    assert_memory_equal(&digest, &session->digest, sizeof digest);
    for (int32_t i = 0; i < slot->held.count; i++) {
        assert_int_equal((int32_t)rows[tv_cache_slot(cache, seq, slot->len + i)],
                         slot->held.tokens[i]);
    }
}

void world_check_whole(struct world *world)
{
    int32_t holders[PAGES] = {0};
    tv_sched_lock(world->fixture.sched);
    for (int32_t i = 0; i < SLOTS; i++) {
        if (world->slots[i].id[0] != '\0') {
            slot_check_whole(world, &world->slots[i]);
            for (int32_t p = 0; p < world->slots[i].seen_count; p++) {
                holders[world->slots[i].seen[p]]++;
            }
        }
    }
    for (int32_t p = 0; p < PAGES; p++) {
        assert_int_equal(world->holders[p], holders[p]);
        assert_int_equal(tv_cache_holders(world->fixture.engine->cache, p), holders[p]);
    }
    pool_check(world);
    tv_sched_unlock(world->fixture.sched);
}
