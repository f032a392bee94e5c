/*
 * test_sched_prefix.c - prompts whose pages are known, through the scheduler on the real engine.
 *
 * What a call answers has the same bits whether its prompt was known or not, for page sizes and KV
 * types; cached_len is the truth; principals and salts are apart; no call lacks pages that nobody
 * holds. Every pool is poisoned unless the environment says otherwise.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "engine_fixture.h"
#include "test_sched_fixture.h"

#define PROMPT_MAX 150
#define TEXT       16384

struct world {
    struct fixture fixture; /* first, so that helpers of a fixture take it */
    struct tv_engine_fixture engine;
};

static void world_open(struct world *world, int32_t page_size, int64_t pages, enum tv_dtype dtype,
                       enum tv_cache_prefix prefix)
{
    struct tv_engine_fixture_options options = {.model = "v2lite",
                                                .page_size = page_size,
                                                .pages = pages,
                                                .rows_max = 48, /* prompts take several slices */
                                                .max_len = 512,
                                                .kv_dtype = dtype,
                                                .prefix = prefix};
    memset(world, 0, sizeof *world);
    tv_engine_fixture_open(&world->engine, &options);
    struct tv_config *config = &world->fixture.config;
    (void)snprintf(config->backend, sizeof config->backend, "cpu");
    config->page_size = page_size;
    config->max_nodes = 32;
    config->max_depth = 16;
    config->max_sessions = 16;
    config->queue_max = 8;
    config->launch_max_s = 30;
    config->inline_bytes = 1 << 20;
    world->fixture.engine = world->engine.engine;
    assert_int_equal(tv_sched_create(config, world->engine.engine, NULL, &world->fixture.stats,
                                     &world->fixture.sched),
                     0);
}

static void counts_take(const struct world *world, struct tv_cache_counts *ret_counts)
{
    tv_cache_counts(world->engine.base.cache, ret_counts);
    assert_int_equal(ret_counts->free + ret_counts->cached + ret_counts->held, ret_counts->total);
}

static void world_close(struct world *world)
{
    tv_sched_destroy(world->fixture.sched);
    tv_engine_fixture_close(&world->engine);
}

/* "a,b,c" of `count` tokens; those from `differs` on are others. */
static const char *prompt(char *ret_text, int32_t count, int32_t differs)
{
    size_t at = 0;
    for (int32_t i = 0; i < count; i++) {
        int32_t token = (i * 53 + 11) % 297 + (i >= differs ? 7 : 0);
        at += (size_t)snprintf(ret_text + at, TEXT - at, i > 0 ? ",%d" : "%d", token);
    }
    return ret_text;
}

/* What one prompt gives, all of it as text. */
struct given {
    int32_t cached_len, pending, len;
    char digest[40], logits[TEXT], oneshot[TEXT], scores[TEXT];
};

static void part(const struct tv_call *call, const char *from, const char *to, char *ret_text)
{
    const char *body = call->reply.body.data;
    const char *start = strstr(body, from);
    assert_non_null(start);
    const char *end = strstr(start, to);
    assert_non_null(end);
    size_t bytes = (size_t)(end - start);
    assert_true(bytes < TEXT);
    memcpy(ret_text, start, bytes);
    ret_text[bytes] = '\0';
}

#define TREE "\"parents\":[-1,0,0,1,3]},\"want\":{\"logits\":{\"rows\":\"all\"}}"

struct opened {
    char id[32], epoch[24];
};

static void open_session(struct world *world, const char *tokens, struct opened *ret_opened,
                         struct given *ret_given)
{
    struct tv_call *call = ask(&world->fixture, TV_CALL_CREATE, "",
                               "{\"tokens\":[%s],\"sampling\":{\"seed\":\"42\"}}", tokens);
    assert_reply(call, 201);
    memset(ret_given, 0, sizeof *ret_given);
    ret_given->cached_len = (int32_t)reply_int(call, "cached_len");
    ret_given->pending = (int32_t)reply_int(call, "pending");
    ret_given->len = (int32_t)reply_int(call, "committed_len");
    reply_text(call, "digest", ret_given->digest, sizeof ret_given->digest);
    reply_text(call, "session", ret_opened->id, sizeof ret_opened->id);
    reply_text(call, "epoch", ret_opened->epoch, sizeof ret_opened->epoch);
    call_free(call);
}

/* The first round of a session, and its end. */
static void first_round(struct world *world, const struct opened *opened, struct given *given)
{
    struct tv_call *call = ask(
        &world->fixture, TV_CALL_VERIFY, opened->id,
        "{\"seq\":1,\"epoch\":\"%s\",\"expected_len\":%d,\"tree\":{\"tokens\":[%d,4,5,6,7]," TREE
        "}",
        opened->epoch, given->len, given->pending);
    assert_reply(call, 200);
    part(call, "\"logits\":", "}", given->logits);
    call_free(call);
    expect(&world->fixture, 204, TV_CALL_DELETE, opened->id, NULL);
}

/* A session, a round in it, a one-shot and a score, all behind the same prompt. */
static void give(struct world *world, const char *tokens, struct given *ret_given)
{
    struct opened opened;
    open_session(world, tokens, &opened, ret_given);
    first_round(world, &opened, ret_given);
    struct tv_call *call = ask(&world->fixture, TV_CALL_ONESHOT, "",
                               "{\"tokens\":[%s],\"tree\":{\"tokens\":[1,4,5,6,7]," TREE
                               ",\"sampling\":{\"seed\":\"9\"}}",
                               tokens);
    assert_reply(call, 200);
    part(call, "\"logits\":", "}", ret_given->oneshot);
    call_free(call);
    call = ask(&world->fixture, TV_CALL_SCORE, "",
               "{\"tokens\":[%s],\"tree\":{\"tokens\":[1,4,5],\"parents\":[-1,0,1]}}", tokens);
    assert_reply(call, 200);
    part(call, "\"logprobs\":", "]", ret_given->scores);
    call_free(call);
}

static void assert_same(const struct given *got, const struct given *want)
{
    assert_int_equal(got->pending, want->pending);
    assert_string_equal(got->digest, want->digest);
    assert_string_equal(got->logits, want->logits);
    assert_string_equal(got->oneshot, want->oneshot);
    assert_string_equal(got->scores, want->scores);
}

static void one_kind(int32_t page_size, enum tv_dtype dtype)
{
    static const int32_t lengths[] = {PROMPT_MAX, 129, 64, 16};
    struct world cold, warm;
    struct given want, got;
    char text[TEXT];
    world_open(&cold, page_size, 0, dtype, TV_CACHE_PREFIX_OFF);
    world_open(&warm, page_size, 0, dtype, TV_CACHE_PREFIX_EXACT);
    int32_t known = 0; /* of the longest prompt before */
    for (size_t i = 0; i < sizeof lengths / sizeof lengths[0]; i++) {
        int32_t len = lengths[i], whole = (len - 1) / page_size * page_size;
        (void)prompt(text, len, len);
        give(&cold, text, &want);
        assert_int_equal(want.cached_len, 0);
        give(&warm, text, &got); /* the first computes, the others are beginnings of it */
        assert_int_equal(got.cached_len, whole < known ? whole : known);
        assert_same(&got, &want);
        give(&warm, text, &got);
        assert_int_equal(got.cached_len, whole);
        assert_same(&got, &want);
        known = known > len / page_size * page_size ? known : len / page_size * page_size;
    }
    for (int32_t differs = 1; differs <= PROMPT_MAX; differs += 83) { /* another end */
        (void)prompt(text, PROMPT_MAX, differs);
        give(&cold, text, &want);
        give(&warm, text, &got);
        assert_int_equal(got.cached_len, differs / page_size * page_size);
        assert_same(&got, &want);
    }
    struct tv_cache_counts counts;
    counts_take(&warm, &counts);
    assert_true(page_size > 64 || counts.reused > 10);
    world_close(&warm);
    world_close(&cold);
}

static void a_known_prompt_changes_no_bit(void **state)
{
    static const int32_t page_sizes[] = {16, 64, 128};
    (void)state;
    for (size_t i = 0; i < sizeof page_sizes / sizeof page_sizes[0]; i++) {
        one_kind(page_sizes[i], TV_F32);
        one_kind(page_sizes[i], TV_BF16);
    }
}

/* As principal `name`; the answer's cached_len. */
static int64_t create(struct world *world, const char *name, const char *salt, const char *tokens)
{
    struct tv_call *call = call_make(
        &world->fixture, TV_CALL_CREATE, "",
        "{\"tokens\":[%s],\"sampling\":{\"seed\":\"42\"},\"cache_salt\":\"%s\"}", tokens, salt);
    (void)snprintf(call->principal, sizeof call->principal, "%s", name);
    call_start(&world->fixture, call);
    assert_reply(call_wait(call), 201);
    int64_t cached_len = reply_int(call, "cached_len");
    call_free(call);
    return cached_len;
}

static void principals_and_salts_are_apart(void **state)
{
    struct world world;
    char text[TEXT];
    (void)state;
    world_open(&world, 16, 0, TV_F32, TV_CACHE_PREFIX_EXACT);
    (void)prompt(text, 100, 100);
    for (int turn = 0; turn < 2; turn++) { /* while the first ones live */
        int64_t cached = turn == 0 ? 0 : 96;
        assert_int_equal(create(&world, "anna", "", text), cached);
        assert_int_equal(create(&world, "anna", "s", text), cached);
        assert_int_equal(create(&world, "bert", "", text), cached);
        assert_int_equal(create(&world, "bert", "s", text), cached);
        assert_int_equal(create(&world, "", "", text), cached);
    }
    struct tv_cache_counts counts;
    counts_take(&world, &counts);
    assert_int_equal(counts.shared, 5 * 6);
    world_close(&world);
}

/* The pool has room for two prompts and a bit: who is gone gives way, who lives does not. */
static void no_call_lacks_pages_that_nobody_holds(void **state)
{
    struct world world;
    struct opened live, other;
    struct given given, again;
    char text[TEXT], live_text[TEXT];
    (void)state;
    world_open(&world, 16, 24, TV_F32, TV_CACHE_PREFIX_EXACT);
    open_session(&world, prompt(live_text, 70, 0), &live, &given);
    for (int32_t i = 0; i < 30; i++) {
        open_session(&world, prompt(text, 100 + i, i % 3 * 30), &other, &again);
        expect(&world.fixture, 204, TV_CALL_DELETE, other.id, NULL);
    }
    struct tv_cache_counts counts;
    counts_take(&world, &counts);
    assert_true(counts.evicted > 0);
    assert_true(counts.cached > 0);
    struct tv_call *call = ask(&world.fixture, TV_CALL_MODEL, "", NULL);
    assert_int_equal(reply_int(call, "pages/free"), counts.free + counts.cached);
    assert_int_equal(reply_int(call, "pages/cached"), counts.cached);
    call_free(call);
    (void)prompt(text, 300, 300);
    call = ask(&world.fixture, TV_CALL_CREATE, "", "{\"tokens\":[%s]}", text);
    assert_refused(call, 503, "kv-full"); /* 24 pages less the self-test's and the live one's */
    assert_true(reply_int(call, "pages_needed") > reply_int(call, "pages_free"));
    call_free(call);
    /* Its own pages are its own as long as it lives, and what it computed is what others find. */
    open_session(&world, live_text, &other, &again);
    assert_int_equal(again.cached_len, 64);
    first_round(&world, &other, &again);
    first_round(&world, &live, &given);
    assert_int_equal(again.pending, given.pending);
    assert_string_equal(again.logits, given.logits);
    world_close(&world);
}

/* Calls that fail leave nothing to be found. */
static void a_create_that_fails_is_not_known(void **state)
{
    struct world world;
    struct given given;
    char text[TEXT];
    (void)state;
    world_open(&world, 16, 15, TV_F32, TV_CACHE_PREFIX_EXACT);
    (void)prompt(text, 300, 300);
    struct tv_call *call = ask(&world.fixture, TV_CALL_CREATE, "", "{\"tokens\":[%s]}", text);
    assert_refused(call, 503, "kv-full"); /* after some slices */
    call_free(call);
    (void)prompt(text, 90, 90);
    give(&world, text, &given);
    assert_int_equal(given.cached_len, 0);
    give(&world, text, &given);
    assert_int_equal(given.cached_len, 80);
    world_close(&world);
}

/* Rows of rounds: kept for the session itself, and for others only when the operator says so. */
static void rounds_are_known_when_the_operator_says_so(void **state)
{
    struct world world;
    char text[TEXT], body[256], id[32], epoch[24];
    int32_t items[64];
    (void)state;
    for (int rounds = 0; rounds < 2; rounds++) {
        world_open(&world, 16, 0, TV_F32, rounds ? TV_CACHE_PREFIX_ROUNDS : TV_CACHE_PREFIX_EXACT);
        struct tv_call *call =
            ask(&world.fixture, TV_CALL_CREATE, "", "{\"tokens\":[%s]}", prompt(text, 40, 40));
        assert_reply(call, 201);
        int32_t pending = (int32_t)reply_int(call, "pending");
        reply_text(call, "session", id, sizeof id);
        reply_text(call, "epoch", epoch, sizeof epoch);
        call_free(call);
        (void)snprintf(body, sizeof body,
                       "{\"seq\":1,\"epoch\":\"%s\",\"expected_len\":40,\"max_tokens\":40}", epoch);
        call = ask(&world.fixture, TV_CALL_DECODE, id, "%s", body);
        assert_reply(call, 200);
        int32_t count = reply_ints(call, "new_tokens", items, 64);
        assert_int_equal(count, 40);
        call_free(call);
        expect(&world.fixture, 204, TV_CALL_DELETE, id, NULL);
        size_t at = strlen(text);
        at += (size_t)snprintf(text + at, TEXT - at, ",%d", pending);
        for (int32_t i = 0; i < 39; i++) {
            at += (size_t)snprintf(text + at, TEXT - at, ",%d", items[i]);
        }
        assert_int_equal(create(&world, "", "", text), rounds ? 64 : 32); /* of 80 tokens */
        world_close(&world);
    }
}

/* A prompt that names another session's tokens is what those tokens are; own live sessions alone.
 */
static void a_prefix_of_a_session_is_its_tokens(void **state)
{
    struct world world;
    struct opened source, other;
    struct given given, want;
    char text[TEXT], body[256], digest[40];
    (void)state;
    world_open(&world, 16, 0, TV_F32, TV_CACHE_PREFIX_EXACT);
    open_session(&world, prompt(text, 100, 100), &source, &given);
    open_session(&world, prompt(text, 70, 70), &other, &want);
    first_round(&world, &other, &want);
    (void)snprintf(
        body, sizeof body,
        "{\"prefix\":{\"session\":\"%s\",\"len\":%%d},\"sampling\":{\"seed\":\"42\"}%%s}",
        source.id);
    struct tv_call *call = ask(&world.fixture, TV_CALL_CREATE, "", body, 70, "");
    assert_reply(call, 201);
    assert_int_equal(reply_int(call, "committed_len"), 70);
    assert_int_equal(reply_int(call, "cached_len"), 64);
    assert_int_equal(reply_int(call, "pending"), want.pending);
    reply_text(call, "digest", digest, sizeof digest);
    assert_string_equal(digest, want.digest);
    reply_text(call, "session", other.id, sizeof other.id);
    call_free(call);
    want.cached_len = 64;
    given = want;
    first_round(&world, &other, &given);
    assert_string_equal(given.logits, want.logits);
    call = ask(&world.fixture, TV_CALL_CREATE, "", body, 100, ",\"cache_salt\":\"other\"");
    assert_reply(call, 201);
    assert_int_equal(reply_int(call, "cached_len"), 0);
    call_free(call);
    call = ask(&world.fixture, TV_CALL_CREATE, "", body, 70,
               ",\"expected_digest\":\"00000000000000000000000000000000\"");
    assert_refused(call, 409, "digest-mismatch");
    call_free(call);
    call = ask(&world.fixture, TV_CALL_CREATE, "", body, 101, "");
    assert_refused(call, 422, "wrong-value");
    call_free(call);
    call = call_make(&world.fixture, TV_CALL_CREATE, "", body, 70, "");
    (void)snprintf(call->principal, sizeof call->principal, "somebody");
    call_start(&world.fixture, call);
    assert_refused(call_wait(call), 404, "session-not-found");
    call_free(call);
    expect(&world.fixture, 204, TV_CALL_DELETE, source.id, NULL);
    call = ask(&world.fixture, TV_CALL_CREATE, "", body, 70, "");
    assert_refused(call, 404, "session-not-found");
    call_free(call);
    world_close(&world);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_known_prompt_changes_no_bit),
        cmocka_unit_test(principals_and_salts_are_apart),
        cmocka_unit_test(no_call_lacks_pages_that_nobody_holds),
        cmocka_unit_test(a_create_that_fails_is_not_known),
        cmocka_unit_test(rounds_are_known_when_the_operator_says_so),
        cmocka_unit_test(a_prefix_of_a_session_is_its_tokens),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
