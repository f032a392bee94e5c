/*
 * sched_rounds.c - random operations of more than one call: rounds that are held and settled,
 * guesses about the round before, batches, and a server that starts anew.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "sched_world.h"

/* ---- held rounds ---- */

void hold(struct world *world, int32_t i)
{
    struct slot *slot = &world->slots[i];
    struct draft draft;
    char body[BODY];
    draft_make(world, slot->len, slot->pending, &draft);
    draft_body(world, slot->seq, slot->len, &draft, ",\"commit\":\"hold\"", body);
    int full = pages_needed(world, i, draft.count) > pages_left(world);
    struct tv_call *call = ask(&world->fixture, TV_CALL_VERIFY, slot->id, "%s", body);
    slot_renew(slot, 0);
    if (full) {
        refused_full(world, call);
        return;
    }
    assert_status(call, 200);
    assert_true(reply_mentions(call, "\"status\":\"held\""));
    assert_int_equal(answer_int(call, "committed_len"), slot->len);
    int32_t seq = slot->seq;
    slot_keep(slot, TV_CALL_VERIFY, body, call);
    slot->held = draft;
    slot->held_seq = seq;
    call_free(call);
}

/* A random path of the held tree, none (0) included. */
static int32_t path_draw(struct world *world, const struct draft *held, int32_t *ret_path)
{
    int32_t count = 0, node = below(world, 5) > 0 ? 0 : -1;
    while (node >= 0) {
        ret_path[count++] = node;
        int32_t next = -1;
        for (int32_t n = node + 1; n < held->count && below(world, 6) > 0; n++) {
            if (held->parents[n] == node && (next < 0 || below(world, 2) == 0)) {
                next = n;
            }
        }
        node = next;
    }
    return count;
}

/* "path":[..],"next":.. of a random decision; *ret_settled: the slot as it is then. */
static void decision_draw(struct world *world, const struct slot *slot, char *ret_text,
                          size_t bytes, struct slot *ret_settled)
{
    int32_t path[NODES];
    int32_t count = path_draw(world, &slot->held, path);
    int at = snprintf(ret_text, bytes, "\"path\":[");
    *ret_settled = *slot;
    for (int32_t k = 0; k < count; k++) {
        at += snprintf(ret_text + at, bytes - (size_t)at, k > 0 ? ",%d" : "%d", path[k]);
        slot_push(ret_settled, slot->held.tokens[path[k]]);
    }
    at += snprintf(ret_text + at, bytes - (size_t)at, "]");
    if (count > 0) {
        ret_settled->pending = below(world, VOCAB);
        (void)snprintf(ret_text + at, bytes - (size_t)at, ",\"next\":%d", ret_settled->pending);
    }
    ret_settled->held.count = 0;
    ret_settled->held_seq = 0;
}

void settle(struct world *world, int32_t i)
{
    struct slot *slot = &world->slots[i], settled;
    char body[BODY], decision[256];
    decision_draw(world, slot, decision, sizeof decision, &settled);
    (void)snprintf(body, sizeof body, "{\"seq\":%d,\"epoch\":\"%s\",%s}", slot->seq, world->epoch,
                   decision);
    struct tv_call *call = ask(&world->fixture, TV_CALL_COMMIT, slot->id, "%s", body);
    assert_status(call, 200);
    *slot = settled;
    assert_int_equal(answer_int(call, "committed_len"), slot->len);
    slot_renew(slot, 0);
    slot_keep(slot, TV_CALL_COMMIT, body, call);
    call_free(call);
}

/* In the next round: what is settled stays settled when that one fails. */
void settle_prev(struct world *world, int32_t i)
{
    struct slot *slot = &world->slots[i], settled;
    struct draft draft;
    char body[BODY], rest[320], decision[256];
    int fails = below(world, 4) == 0;
    decision_draw(world, slot, decision, sizeof decision, &settled);
    (void)snprintf(rest, sizeof rest, ",\"commit_prev\":{\"seq\":%d,%s}", slot->held_seq, decision);
    draft_make(world, settled.len, settled.pending, &draft);
    draft_body(world, slot->seq, settled.len, &draft, rest, body);
    if (fails) {
        tv_fixed_engine_fail(world->fixture.engine, TV_NUMERIC_FAULT, 1);
    }
    struct tv_call *call = ask(&world->fixture, TV_CALL_VERIFY, slot->id, "%s", body);
    tv_fixed_engine_fail(world->fixture.engine, TV_OK, 0);
    *slot = settled;
    slot_renew(slot, 0);
    slot->leaf = -1;
    if (call->reply.http_status == 200) {
        assert_false(fails);
        accepted(world, slot, &draft, body, call);
    } else {
        assert_status(call, fails ? 500 : 503);
        assert_true(reply_flag(call, "committed"));
        if (fails && below(world, 2) == 0) { /* the same once more, and now it runs */
            call_free(call);
            call = ask(&world->fixture, TV_CALL_VERIFY, slot->id, "%s", body);
            if (call->reply.http_status == 200) {
                accepted(world, slot, &draft, body, call);
            } else {
                assert_status(call, 503);
            }
        }
    }
    call_free(call);
}

void refused_held(struct world *world, int32_t i)
{
    const struct slot *slot = &world->slots[i];
    struct tv_call *call = ask(&world->fixture, TV_CALL_EXTEND, slot->id,
                               "{\"seq\":%d,\"epoch\":\"%s\",\"expected_len\":%d,\"tokens\":[7]}",
                               slot->seq, world->epoch, slot->len);
    assert_refused(call, 409, "round-held");
    call_free(call);
    call = ask(&world->fixture, TV_CALL_FORK, slot->id, "{\"epoch\":\"%s\"}", world->epoch);
    assert_refused(call, 409, "round-held");
    call_free(call);
}

/* ---- guesses ---- */

/* The slot behind a round that has not ended yet. */
struct guess {
    struct slot after;
    struct draft draft;
    int is_right;
    char body[BODY];
};

/* A conditional round, right or wrong, about a round of number `seq` that ends at `leaf` and leaves
 * the session as `after`, which is copied. */
static void guess_make(struct world *world, const struct slot *after, int32_t seq, int32_t leaf,
                       struct guess *ret_guess)
{
    char rest[96];
    int32_t wrong = below(world, 5);
    ret_guess->after = *after;
    ret_guess->is_right = wrong > 1;
    int32_t pending = wrong == 0 ? (after->pending + 1) % VOCAB : after->pending;
    (void)snprintf(rest, sizeof rest, ",\"if\":{\"seq\":%d,\"leaf\":%d,\"pending\":%d}", seq,
                   wrong == 1 ? leaf + 1 : leaf, pending);
    draft_make(world, after->len, pending, &ret_guess->draft);
    draft_body(world, seq + 1, after->len, &ret_guess->draft, rest, ret_guess->body);
}

/* The answer of a conditional round behind the state that the slot has by now. */
static void guess_judge(struct world *world, struct slot *slot, const struct guess *guess,
                        const struct tv_call *call)
{
    world->counts[guess->is_right ? WORLD_GUESSED : WORLD_SKIPPED]++;
    if (guess->is_right) {
        assert_false(reply_mentions(call, "\"status\":\"skipped\""));
        accepted(world, slot, &guess->draft, guess->body, call);
        return;
    }
    assert_status(call, 200);
    assert_true(reply_mentions(call, "\"status\":\"skipped\""));
    assert_int_equal(answer_int(call, "seq"), slot->seq);
    slot_keep(slot, TV_CALL_VERIFY, guess->body, call);
}

void ahead(struct world *world, int32_t i)
{
    struct slot *slot = &world->slots[i];
    struct guess guess;
    if (slot->leaf < 0) {
        return;
    }
    guess_make(world, slot, slot->seq - 1, slot->leaf, &guess);
    int full = guess.is_right && pages_needed(world, i, guess.draft.count) > pages_left(world);
    struct tv_call *call = ask(&world->fixture, TV_CALL_VERIFY, slot->id, "%s", guess.body);
    slot_renew(slot, 0);
    if (full) {
        refused_full(world, call);
        return;
    }
    guess_judge(world, slot, &guess, call);
    call_free(call);
}

static struct tv_call *start(struct world *world, const char *id, const char *body)
{
    struct tv_call *call = call_make(&world->fixture, TV_CALL_VERIFY, id, "%s", body);
    call_start(&world->fixture, call);
    return call;
}

/* One round inside the engine, a guess about it behind it, both sent twice; then the first ends
 * well or not, or its session is deleted, or the guess is called back. */
void pipeline(struct world *world, int32_t i)
{
    struct slot *slot = &world->slots[i], after = *slot;
    struct draft draft;
    struct guess guess;
    char body[BODY];
    int what = below(world, 8);
    if (pages_needed(world, i, 4 * NODES) > pages_left(world)) {
        return;
    }
    draft_make(world, slot->len, slot->pending, &draft);
    draft_body(world, slot->seq, slot->len, &draft, "", body);
    slot_accept(world, &after, &draft);
    guess_make(world, &after, slot->seq, draft.path[draft.right - 1], &guess);
    tv_fixed_engine_hold(world->fixture.engine, 1);
    struct tv_call *first = start(world, slot->id, body);
    tv_fixed_engine_await_held(world->fixture.engine);
    struct tv_call *second = start(world, slot->id, guess.body);
    struct tv_call *twins[2] = {start(world, slot->id, body), start(world, slot->id, guess.body)};
    assert_int_equal(call_is_done(first) + call_is_done(second) + call_is_done(twins[0]) +
                         call_is_done(twins[1]),
                     0);
    if (what == 0) {
        tv_fixed_engine_fail(world->fixture.engine, TV_NUMERIC_FAULT, 1);
    } else if (what == 1) {
        expect(&world->fixture, 204, TV_CALL_DELETE, slot->id, NULL);
    } else if (what == 2) {
        tv_sched_cancel(world->fixture.sched, second);
        tv_sched_cancel(world->fixture.sched, twins[1]);
        tv_sched_cancel(world->fixture.sched, first); /* runs to its end */
    }
    tv_fixed_engine_hold(world->fixture.engine, 0);
    slot_renew(slot, 0);
    if (what == 0) {
        assert_refused(call_wait(first), 500, "numeric-fault");
        assert_refused(call_wait(twins[0]), 500, "numeric-fault");
        assert_refused(call_wait(second), 409, "seq-gap");
        assert_refused(call_wait(twins[1]), 409, "seq-gap");
    } else {
        (void)call_wait(first);
        accepted(world, slot, &draft, body, first);
        assert_replay(&slot->known[slot->known_count - 1], call_wait(twins[0]));
        (void)call_wait(second);
        (void)call_wait(twins[1]);
    }
    if (what == 1) {
        assert_refused(second, 404, "session-not-found");
        assert_refused(twins[1], 404, "session-not-found");
        slot_forget(world, slot);
    } else if (what == 2) {
        assert_refused(second, 504, "deadline");
        assert_refused(twins[1], 504, "deadline");
    } else if (what > 2) {
        guess_judge(world, slot, &guess, second);
        assert_replay(&slot->known[slot->known_count - 1], twins[1]);
    }
    call_free(first);
    call_free(second);
    call_free(twins[0]);
    call_free(twins[1]);
}

/* ---- the rest ---- */

void detached(struct world *world, int32_t i)
{
    const struct slot *slot = &world->slots[i];
    struct draft draft;
    char tree[BODY / 2], tokens[256];
    int at = 0, scores = below(world, 2);
    int32_t family = below(world, 4) + 2;
    if (scores && below(world, 2) == 0) { /* of the session */
        draft_make(world, slot->len, slot->pending, &draft);
        (void)draft_text(&draft, tree, sizeof tree);
        int full = pages_needed(world, i, draft.count) > pages_left(world);
        struct tv_call *call = ask(&world->fixture, TV_CALL_SCORE, "",
                                   "{\"session\":\"%s\",\"tree\":{%s}}", slot->id, tree);
        assert_status(call, full ? 503 : 200);
        call_free(call);
        slot_renew(&world->slots[i], 0);
        return;
    }
    draft_make(world, 40, 5, &draft);
    (void)draft_text(&draft, tree, sizeof tree);
    for (int32_t t = 0; t < 40; t++) {
        at += snprintf(tokens + at, sizeof tokens - (size_t)at, t > 0 ? ",%d" : "%d",
                       (t * family + 11 * family) % VOCAB);
    }
    int64_t left = pages_left(world);
    struct tv_call *call = ask(&world->fixture, scores ? TV_CALL_SCORE : TV_CALL_ONESHOT, "",
                               "{\"tokens\":[%s],\"tree\":{%s}}", tokens, tree);
    if (call->reply.http_status == 503) {
        assert_true((40 + draft.count + PAGE - 1) / PAGE > left);
        refused_full(world, call);
        return;
    }
    assert_status(call, 200);
    call_free(call);
}

static struct tv_call *batch_ask(struct world *world, const char *key, const char *text)
{
    struct tv_call *call = call_make(&world->fixture, TV_CALL_BATCH, "", "%s", text);
    (void)snprintf(call->key, sizeof call->key, "%s", key);
    call_start(&world->fixture, call);
    return call_wait(call);
}

/* Rounds of several sessions in one call; each is a round like any other. */
void batch(struct world *world, int32_t i)
{
    struct draft drafts[SLOTS];
    char text[SLOTS * (BODY + 48) + 32], bodies[SLOTS][BODY];
    int64_t needed = 0;
    int32_t slots[SLOTS], count = 0;
    int at = snprintf(text, sizeof text, "{\"items\":[");
    for (int32_t k = 0; k < SLOTS; k++) {
        int32_t n = (i + k) % SLOTS;
        struct slot *slot = &world->slots[n];
        if (slot->id[0] == '\0' || slot->held_seq > 0 || slot->len > LEN_MAX) {
            continue;
        }
        draft_make(world, slot->len, slot->pending, &drafts[count]);
        draft_body(world, slot->seq, slot->len, &drafts[count], "", bodies[count]);
        needed += pages_needed(world, n, drafts[count].count);
        at += snprintf(text + at, sizeof text - (size_t)at, "%s{\"session\":\"%s\",%s",
                       count > 0 ? "," : "", slot->id, bodies[count] + 1);
        slots[count++] = n;
    }
    (void)snprintf(text + at, sizeof text - (size_t)at, "]}");
    if (needed > pages_left(world)) {
        return;
    }
    char key[24] = "";
    if (below(world, 2) == 0) {
        (void)snprintf(key, sizeof key, "b%lld", (long long)world->serial++);
    }
    struct tv_call *call = batch_ask(world, key, text);
    assert_status(call, 200);
    assert_false(reply_mentions(call, "\"problem\":"));
    if (key[0] != '\0') { /* the same again is the same answer, and nothing runs */
        int64_t launches = tv_fixed_engine_launches(world->fixture.engine);
        struct tv_call *again = batch_ask(world, key, text);
        assert_status(again, 200);
        assert_int_equal(again->reply.body.bytes, call->reply.body.bytes);
        assert_memory_equal(again->reply.body.data, call->reply.body.data, call->reply.body.bytes);
        call_free(again);
        assert_int_equal(tv_fixed_engine_launches(world->fixture.engine), launches);
    }
    call_free(call);
    for (int32_t k = 0; k < count; k++) {
        struct slot *slot = &world->slots[slots[k]];
        slot_accept(world, slot, &drafts[k]);
        slot_renew(slot, 0);
        slot_keep(slot, TV_CALL_VERIFY, bodies[k], NULL);
        slot->leaf = drafts[k].path[drafts[k].right - 1];
    }
    world_check_whole(world);
}

void world_deadline(struct world *world, int32_t i)
{
    struct slot *slot = &world->slots[i];
    world_pass(world, slot->lease_us - 1 - world_now_us());
    if (below(world, 2) == 0) { /* in time */
        int32_t lease_s = below(world, 30) + 1;
        struct tv_call *call =
            ask(&world->fixture, TV_CALL_RENEW, slot->id, "{\"lease_s\":%d}", lease_s);
        assert_status(call, 200);
        call_free(call);
        slot_renew(slot, lease_s);
    } else {
        world_pass(world, 1);
        assert_int_equal(slot->id[0], '\0');
    }
}

void restart(struct world *world)
{
    struct tv_call *calls[SLOTS] = {NULL};
    char epoch[17], id[32] = "", body[BODY];
    struct draft draft;
    memcpy(epoch, world->epoch, sizeof epoch);
    for (int32_t i = 0; i < SLOTS; i++) {
        const struct slot *slot = &world->slots[i];
        if (slot->id[0] != '\0') {
            memcpy(id, slot->id, sizeof id);
            draft_make(world, slot->len, slot->pending, &draft);
            draft_body(world, slot->seq, slot->len, &draft, "", body);
            calls[i] = start(world, slot->id, body);
        }
    }
    world_close(world); /* every call has its answer */
    for (int32_t i = 0; i < SLOTS; i++) {
        if (calls[i] != NULL) {
            assert_true(call_is_done(calls[i]));
            call_free(calls[i]);
        }
    }
    world_open(world);
    assert_string_not_equal(world->epoch, epoch);
    if (id[0] != '\0') {
        expect(&world->fixture, 404, TV_CALL_STATE, id, NULL);
        struct tv_call *call = ask(&world->fixture, TV_CALL_DECODE, id,
                                   "{\"seq\":1,\"epoch\":\"%s\",\"expected_len\":1,"
                                   "\"max_tokens\":1}",
                                   epoch);
        assert_refused(call, 409, "epoch-changed");
        call_free(call);
    }
    world->counts[WORLD_RESTARTED]++;
}
