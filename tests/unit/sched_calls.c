/*
 * sched_calls.c - one operation on a slot: what a client may do, and what the array then says.
 *
 * Which operation, and everything in it, is drawn from the world.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "sched_world.h"

/* The next operations would fail for this one's sake. */
static void drop(struct world *world, int32_t i)
{
    struct slot *slot = &world->slots[i];
    expect(&world->fixture, 204, TV_CALL_DELETE, slot->id, NULL);
    expect(&world->fixture, 404, TV_CALL_STATE, slot->id, NULL);
    slot_forget(world, slot);
}

/* ---- create and fork, by key or without ---- */

static struct tv_call *ask_keyed(struct world *world, const struct keyed *keyed, const char *body)
{
    struct tv_call *call = call_make(&world->fixture, keyed->kind, keyed->session, "%s", body);
    (void)snprintf(call->key, sizeof call->key, "%s", keyed->key);
    call_start(&world->fixture, call);
    return call_wait(call);
}

static void slot_born(struct world *world, struct slot *slot, const struct keyed *keyed,
                      const char *body, const struct tv_call *call)
{
    reply_text(call, "session", slot->id, sizeof slot->id);
    slot->seq = 1;
    slot->leaf = -1;
    world->live++;
    assert_int_equal(answer_int(call, "next_seq"), 1);
    assert_int_equal(answer_int(call, "committed_len"), slot->len);
    assert_int_equal(answer_int(call, "pending"), slot->pending);
    slot->keyed = *keyed;
    if (keyed->key[0] != '\0') {
        slot->keyed.body = strdup(body);
        slot->keyed.bytes = call->reply.body.bytes;
        slot->keyed.answer = malloc(slot->keyed.bytes);
        slot->keyed.done_us = world_now_us();
        assert_true(slot->keyed.body != NULL && slot->keyed.answer != NULL);
        memcpy(slot->keyed.answer, call->reply.body.data, slot->keyed.bytes);
    }
    slot_renew(slot, 0);
}

static void key_draw(struct world *world, enum tv_call_kind kind, struct keyed *ret_keyed)
{
    memset(ret_keyed, 0, sizeof *ret_keyed);
    ret_keyed->kind = kind;
    if (below(world, 2) == 0) {
        (void)snprintf(ret_keyed->key, sizeof ret_keyed->key, "k%lld", (long long)world->serial++);
    }
}

/* Prompts are of four families, whose members are prefixes of each other. */
static int prompt_text(struct world *world, int32_t count, struct slot *slot, char *ret_text)
{
    int32_t family = below(world, 4) + 2;
    int at = snprintf(ret_text, BODY, "\"tokens\":[");
    for (int32_t t = 0; t < count; t++) {
        int32_t token = (t * family + 11 * family) % VOCAB;
        slot_push(slot, token);
        at += snprintf(ret_text + at, BODY - (size_t)at, t > 0 ? ",%d" : "%d", token);
    }
    at += snprintf(ret_text + at, BODY - (size_t)at, "]");
    return at;
}

static void create(struct world *world, int32_t i)
{
    static const uint8_t model_id[32];
    struct slot *slot = &world->slots[i];
    struct keyed keyed;
    char body[BODY], prompt[BODY - 64];
    int32_t count = below(world, 120) + 1;
    memset(slot, 0, sizeof *slot);
    tv_digest_start(&slot->digests[0], model_id, "", 0);
    (void)prompt_text(world, count, slot, prompt);
    slot->pending = tv_fixed_engine_token(world->fixture.engine, count);
    slot->lease_s = below(world, 30) + 1;
    (void)snprintf(body, sizeof body, "{%s,\"lease_s\":%d}", prompt, slot->lease_s);
    key_draw(world, TV_CALL_CREATE, &keyed);
    int64_t left = pages_left(world);
    struct tv_call *call = ask_keyed(world, &keyed, body);
    if (call->reply.http_status == 503) { /* also without what others hold of it */
        assert_true((count + PAGE - 1) / PAGE > left);
        refused_full(world, call);
        memset(slot, 0, sizeof *slot);
        return;
    }
    assert_status(call, 201);
    assert_int_equal(answer_int(call, "cached_len") % PAGE, 0);
    assert_true(answer_int(call, "cached_len") < count);
    slot_born(world, slot, &keyed, body, call);
    call_free(call);
}

static void fork_of(struct world *world, int32_t i, int32_t from)
{
    struct slot *slot = &world->slots[i], *parent = &world->slots[from];
    struct keyed keyed;
    char body[BODY];
    int32_t len = below(world, 2) == 0 ? parent->len : below(world, parent->len) + 1;
    *slot = *parent;
    memset(slot->known, 0, sizeof slot->known);
    slot->known_count = slot->seen_count = 0;
    slot_cut(slot, len);
    (void)snprintf(body, sizeof body, "{\"epoch\":\"%s\",\"len\":%d}", world->epoch, len);
    key_draw(world, TV_CALL_FORK, &keyed);
    memcpy(keyed.session, parent->id, sizeof keyed.session);
    struct tv_call *call = ask_keyed(world, &keyed, body);
    assert_status(call, 201);
    slot_born(world, slot, &keyed, body, call);
    call_free(call);
    slot_renew(parent, 0);
}

/* The same key again: the first one's answer, and no session more. */
static void repeat(struct world *world, struct slot *slot)
{
    const struct keyed *keyed = slot != NULL ? &slot->keyed : &world->past;
    if (keyed->body == NULL ||
        (slot == NULL && world_now_us() - keyed->done_us >= TV_SESSION_KEY_US)) {
        return;
    }
    if (below(world, 4) == 0) {
        char fork[64];
        (void)snprintf(fork, sizeof fork, "{\"epoch\":\"%s\",\"len\":511}", world->epoch);
        struct tv_call *call =
            ask_keyed(world, keyed, keyed->kind == TV_CALL_CREATE ? "{\"tokens\":[1,2,3]}" : fork);
        assert_refused(call, 422, "seq-reused");
        call_free(call);
        return;
    }
    struct tv_call *call = ask_keyed(world, keyed, keyed->body);
    assert_status(call, 201);
    assert_int_equal(call->reply.body.bytes, keyed->bytes);
    assert_memory_equal(call->reply.body.data, keyed->answer, keyed->bytes);
    call_free(call);
    if (slot != NULL) {
        slot_renew(slot, 0);
    }
    world->counts[WORLD_REPEATED]++;
}

/* ---- rounds ---- */

/* Members that a verify may have; *ret_lease_s, and what the session drops for an ack. */
static void rest_draw(struct world *world, const struct slot *slot, char *ret_rest, size_t bytes,
                      int32_t *ret_lease_s, int32_t *ret_ack)
{
    *ret_lease_s = below(world, 8) == 0 ? below(world, 30) + 1 : 0;
    *ret_ack = below(world, 16) == 0 ? below(world, slot->seq) : 0;
    int at = snprintf(ret_rest, bytes, ",\"want\":{\"top_k\":%d}", below(world, 3));
    if (*ret_lease_s > 0) {
        at += snprintf(ret_rest + at, bytes - (size_t)at, ",\"lease_s\":%d", *ret_lease_s);
    }
    if (*ret_ack > 0) {
        (void)snprintf(ret_rest + at, bytes - (size_t)at, ",\"ack\":%d", *ret_ack);
    }
}

static void verify(struct world *world, int32_t i)
{
    struct slot *slot = &world->slots[i];
    struct draft draft;
    char body[BODY], rest[96];
    int32_t lease_s, ack;
    draft_make(world, slot->len, slot->pending, &draft);
    rest_draw(world, slot, rest, sizeof rest, &lease_s, &ack);
    draft_body(world, slot->seq, slot->len, &draft, rest, body);
    int full = pages_needed(world, i, draft.count) > pages_left(world);
    struct tv_call *call = ask(&world->fixture, TV_CALL_VERIFY, slot->id, "%s", body);
    slot_ack(slot, ack);
    slot_renew(slot, full ? 0 : lease_s);
    if (full) {
        refused_full(world, call);
        return;
    }
    accepted(world, slot, &draft, body, call);
    call_free(call);
}

static void decode(struct world *world, int32_t i)
{
    struct slot *slot = &world->slots[i];
    char body[BODY];
    int32_t count = below(world, 12) + 1;
    (void)snprintf(body, sizeof body,
                   "{\"seq\":%d,\"epoch\":\"%s\",\"expected_len\":%d,\"max_tokens\":%d}", slot->seq,
                   world->epoch, slot->len, count);
    int full = pages_needed(world, i, count) > pages_left(world);
    struct tv_call *call = ask(&world->fixture, TV_CALL_DECODE, slot->id, "%s", body);
    slot_renew(slot, 0);
    if (full) {
        refused_full(world, call);
        return;
    }
    assert_status(call, 200);
    for (int32_t n = 0; n < count; n++) {
        slot_push(slot, slot->pending);
        slot->pending = tv_fixed_engine_token(world->fixture.engine, slot->len);
    }
    slot_keep(slot, TV_CALL_DECODE, body, call);
    call_free(call);
}

/* Tokens that an extend brings, and whether the pending one comes before them. */
struct brought {
    int32_t count, keep, tokens[40];
    char body[BODY];
};

static void brought_draw(struct world *world, const struct slot *slot, struct brought *ret_brought)
{
    char tokens[512] = "";
    int32_t at = 0;
    ret_brought->count = below(world, 40) + 1;
    ret_brought->keep = below(world, 2);
    for (int32_t k = 0; k < ret_brought->count; k++) {
        ret_brought->tokens[k] = below(world, VOCAB);
        at += snprintf(tokens + at, sizeof tokens - (size_t)at, k > 0 ? ",%d" : "%d",
                       ret_brought->tokens[k]);
    }
    (void)snprintf(ret_brought->body, sizeof ret_brought->body,
                   "{\"seq\":%d,\"epoch\":\"%s\",\"expected_len\":%d,\"tokens\":[%s],"
                   "\"keep_pending\":%s}",
                   slot->seq, world->epoch, slot->len, tokens,
                   ret_brought->keep ? "true" : "false");
}

static void extended(struct world *world, struct slot *slot, const struct brought *brought,
                     const struct tv_call *call)
{
    assert_status(call, 200);
    if (brought->keep) {
        slot_push(slot, slot->pending);
    }
    for (int32_t k = 0; k < brought->count; k++) {
        slot_push(slot, brought->tokens[k]);
    }
    slot->pending = tv_fixed_engine_token(world->fixture.engine, slot->len);
    slot_keep(slot, TV_CALL_EXTEND, brought->body, call);
}

static void extend(struct world *world, int32_t i)
{
    struct slot *slot = &world->slots[i];
    struct brought brought;
    brought_draw(world, slot, &brought);
    int full = pages_needed(world, i, brought.count + brought.keep) > pages_left(world);
    struct tv_call *call = ask(&world->fixture, TV_CALL_EXTEND, slot->id, "%s", brought.body);
    slot_renew(slot, 0);
    if (full) {
        refused_full(world, call);
        return;
    }
    extended(world, slot, &brought, call);
    call_free(call);
}

static int is_free(const struct slot *slot)
{
    return slot->id[0] != '\0' && slot->held_seq == 0 && slot->len <= LEN_MAX;
}

/* While a round is in the engine, another session's round and a third one's extend come: the next
 * launch may take some of its tokens along. All end well, or all three fail, or the extend is
 * called back before it begins. */
static void together(struct world *world, int32_t i)
{
    int32_t at[3] = {i, (i + 1 + below(world, 2)) % SLOTS, (i + 3 + below(world, 3)) % SLOTS};
    struct slot *slots[3] = {&world->slots[at[0]], &world->slots[at[1]], &world->slots[at[2]]};
    struct tv_call *calls[3];
    struct draft drafts[2];
    struct brought brought;
    char bodies[2][BODY];
    int what = below(world, 6);
    if (!is_free(slots[1]) || !is_free(slots[2]) ||
        pages_needed(world, at[0], NODES) + pages_needed(world, at[1], NODES) +
                pages_needed(world, at[2], 41) >
            pages_left(world)) {
        return;
    }
    for (int k = 0; k < 2; k++) {
        draft_make(world, slots[k]->len, slots[k]->pending, &drafts[k]);
        draft_body(world, slots[k]->seq, slots[k]->len, &drafts[k], "", bodies[k]);
    }
    brought_draw(world, slots[2], &brought);
    tv_fixed_engine_hold(world->fixture.engine, 1);
    for (int k = 0; k < 3; k++) {
        calls[k] = call_make(&world->fixture, k < 2 ? TV_CALL_VERIFY : TV_CALL_EXTEND, slots[k]->id,
                             "%s", k < 2 ? bodies[k] : brought.body);
        call_start(&world->fixture, calls[k]);
        if (k == 0) {
            tv_fixed_engine_await_held(world->fixture.engine);
        }
    }
    if (what == 0) {
        tv_fixed_engine_fail(world->fixture.engine, TV_NUMERIC_FAULT, 3);
    } else if (what == 1) {
        tv_sched_cancel(world->fixture.sched, calls[2]);
    }
    int64_t shared = tv_fixed_engine_shared(world->fixture.engine);
    tv_fixed_engine_hold(world->fixture.engine, 0);
    for (int k = 0; k < 3; k++) {
        (void)call_wait(calls[k]);
        slot_renew(slots[k], 0);
        if (what == 0) {
            assert_refused(calls[k], 500, "numeric-fault");
        } else if (k < 2) {
            accepted(world, slots[k], &drafts[k], bodies[k], calls[k]);
        } else if (what != 1) {
            extended(world, slots[k], &brought, calls[k]);
        }
        call_free(calls[k]);
    }
    world->counts[WORLD_SHARED] += tv_fixed_engine_shared(world->fixture.engine) - shared;
    world_settle(world);
    world_check_whole(world);
}

static void rollback(struct world *world, int32_t i)
{
    struct slot *slot = &world->slots[i];
    char body[BODY], pending[32] = "";
    int32_t len = below(world, 3) == 0 ? below(world, slot->len) + 1
                                       : slot->len - below(world, slot->len < 20 ? slot->len : 20);
    int32_t chosen = below(world, 4) == 0 ? below(world, VOCAB) : -1;
    if (chosen >= 0) {
        (void)snprintf(pending, sizeof pending, ",\"pending\":%d", chosen);
    }
    (void)snprintf(body, sizeof body,
                   "{\"seq\":%d,\"epoch\":\"%s\",\"expected_len\":%d,\"len\":%d%s}", slot->seq,
                   world->epoch, slot->len, len, pending);
    struct tv_call *call = ask(&world->fixture, TV_CALL_ROLLBACK, slot->id, "%s", body);
    assert_status(call, 200);
    slot_cut(slot, len);
    slot->pending = chosen >= 0 ? chosen : slot->pending;
    slot_renew(slot, 0);
    slot_keep(slot, TV_CALL_ROLLBACK, body, call);
    call_free(call);
}

static void retry(struct world *world, int32_t i)
{
    struct slot *slot = &world->slots[i];
    if (slot->known_count == 0) {
        return;
    }
    const struct known *known = &slot->known[below(world, slot->known_count)];
    int64_t launches = tv_fixed_engine_launches(world->fixture.engine);
    struct tv_call *call = ask(&world->fixture, known->kind, slot->id, "%s", known->body);
    assert_replay(known, call);
    call_free(call);
    assert_int_equal(tv_fixed_engine_launches(world->fixture.engine), launches);
    int32_t lease_s = 0; /* the body's own counts again */
    const char *lease = strstr(known->body, "\"lease_s\":");
    if (lease != NULL) {
        lease_s = (int32_t)strtol(lease + strlen("\"lease_s\":"), NULL, 10);
    }
    slot_renew(slot, lease_s);
}

/* A round that the engine fails at: everything is as before, but for the lease. */
static void failure(struct world *world, int32_t i)
{
    static const enum tv_code codes[] = {TV_KV_FULL, TV_NUMERIC_FAULT, TV_KERNEL_FAULT};
    struct slot *slot = &world->slots[i];
    tv_fixed_engine_fail(world->fixture.engine, codes[below(world, 3)], 1);
    if (below(world, 2) == 0) {
        struct draft draft;
        char body[BODY];
        draft_make(world, slot->len, slot->pending, &draft);
        draft_body(world, slot->seq, slot->len, &draft, "", body);
        struct tv_call *call = ask(&world->fixture, TV_CALL_VERIFY, slot->id, "%s", body);
        assert_true(call->reply.http_status >= 500);
        call_free(call);
    } else {
        struct tv_call *call =
            ask(&world->fixture, TV_CALL_EXTEND, slot->id,
                "{\"seq\":%d,\"epoch\":\"%s\",\"expected_len\":%d,\"tokens\":[1,2,3]}", slot->seq,
                world->epoch, slot->len);
        assert_true(call->reply.http_status >= 500);
        call_free(call);
    }
    tv_fixed_engine_fail(world->fixture.engine, TV_OK, 0);
    slot_renew(slot, 0);
}

/* A round that lies about one thing: refused with that thing's code, and nothing else happens. */
static void lie(struct world *world, int32_t i)
{
    static const struct {
        const char *code;
        int status, has_state;
    } lies[] = {{"seq-reused", 422, 0},       {"round-evicted", 410, 1},
                {"seq-gap", 409, 1},          {"seq-gap", 409, 1},
                {"epoch-changed", 409, 0},    {"digest-mismatch", 409, 1},
                {"pending-mismatch", 409, 1}, {"session-not-found", 404, 0}};
    const struct slot *slot = &world->slots[i];
    int what = below(world, 8);
    int32_t kept = slot->known_count, gone = kept > 0 ? slot->known[0].seq - 1 : slot->seq - 1;
    int32_t seq = what == 0   ? (kept > 0 ? slot->known[below(world, kept)].seq : 0)
                  : what == 1 ? (gone > 0 ? 1 + below(world, gone) : 0)
                  : what == 2 ? slot->seq + 1 + below(world, 3)
                  : what == 3 ? INT32_MAX
                              : slot->seq;
    if (seq < 1) {
        return; /* nothing was used up yet */
    }
    struct tv_call *call =
        call_make(&world->fixture, TV_CALL_VERIFY, slot->id,
                  "{\"seq\":%d,\"epoch\":\"%s\",\"expected_len\":%d%s,\"tree\":{\"tokens\":[%d],"
                  "\"parents\":[-1]},\"want\":{\"top_k\":7}}",
                  seq, what == 4 ? "fedcba9876543210" : world->epoch, slot->len,
                  what == 5 ? ",\"expected_digest\":\"00000000000000000000000000000000\"" : "",
                  what == 6 ? (slot->pending + 1) % VOCAB : slot->pending);
    if (what == 7) {
        (void)snprintf(call->principal, sizeof call->principal, "somebody");
    }
    int64_t launches = tv_fixed_engine_launches(world->fixture.engine);
    call_start(&world->fixture, call);
    assert_refused(call_wait(call), lies[what].status, lies[what].code);
    assert_int_equal(reply_has(call, "session_state"), lies[what].has_state);
    if (lies[what].has_state) {
        assert_int_equal(reply_int(call, "session_state/committed_len"), slot->len);
        assert_int_equal(reply_int(call, "session_state/next_seq"), slot->seq);
        assert_int_equal(reply_int(call, "session_state/pending"), slot->pending);
    }
    call_free(call);
    assert_int_equal(tv_fixed_engine_launches(world->fixture.engine), launches);
}

void world_operation(struct world *world, int32_t i)
{
    static void (*const held[])(struct world *, int32_t) = {
        settle, settle, settle_prev, settle_prev, rollback, refused_held, retry, world_deadline};
    static const struct {
        int32_t share; /* of 1,000 */
        void (*run)(struct world *world, int32_t i);
    } free_[] = {
        {270, verify},  {80, decode},   {90, extend},         {90, rollback}, {100, hold},
        {60, ahead},    {25, pipeline}, {70, retry},          {70, lie},      {50, failure},
        {30, detached}, {15, batch},    {20, world_deadline}, {20, together}};
    struct slot *slot = &world->slots[i];
    if (slot->id[0] == '\0') {
        int32_t from = below(world, SLOTS);
        int forks = world->slots[from].id[0] != '\0' && world->slots[from].held_seq == 0;
        if (forks && below(world, 3) == 0) {
            fork_of(world, i, from);
        } else {
            create(world, i);
        }
        return;
    }
    if (slot->len > LEN_MAX || below(world, 100) < 1) {
        drop(world, i);
    } else if (below(world, 100) < 3) {
        repeat(world, below(world, 3) > 0 ? slot : NULL);
    } else if (slot->held_seq > 0) {
        held[below(world, 8)](world, i);
    } else {
        int32_t what = below(world, 990), n = 0;
        while (what >= free_[n].share) {
            what -= free_[n++].share;
        }
        free_[n].run(world, i);
    }
}
