/*
 * test_sched_fixture.c - a scheduler on the engine with fixed answers, and calls made from JSON.
 */
#include "test_sched_fixture.h"

#include <errno.h>
#include <semaphore.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <cmocka.h>

#include "base/clock.h"
#include "proto/json_read.h"

static void start(struct fixture *fixture, int32_t vocab, int64_t pages)
{
    struct tv_fixed_engine_params params = {.vocab = vocab,
                                            .max_len = 512,
                                            .nodes_max = 64,
                                            .requests_max = 4,
                                            .prefill_rows = 16,
                                            .rider_rows = 8,
                                            .pages = pages,
                                            .page_size = 16};
    struct tv_config *config = &fixture->config;
    memset(fixture, 0, sizeof *fixture);
    (void)snprintf(config->backend, sizeof config->backend, "cpu");
    config->page_size = 16;
    config->max_nodes = 64;
    config->max_depth = 32;
    config->max_sessions = 16;
    config->queue_max = 8;
    config->launch_max_s = 30;
    config->body_bytes = 1 << 20;
    config->body_bytes_large = 16 << 20;
    config->inline_bytes = 1 << 20;
    assert_int_equal(tv_fixed_engine_create(&params, &fixture->engine), 0);
    assert_int_equal(
        tv_sched_create(config, fixture->engine, NULL, &fixture->stats, &fixture->sched), 0);
}

void fixture_start(struct fixture *fixture)
{
    start(fixture, 307, 0);
}

void fixture_start_pages(struct fixture *fixture, int64_t pages)
{
    start(fixture, 307, pages);
}

void fixture_stop(struct fixture *fixture)
{
    tv_fixed_engine_hold(fixture->engine, 0); /* a test that fails ends, too */
    tv_fixed_engine_hold_moves(fixture->engine, 0);
    tv_sched_destroy(fixture->sched);
    assert_int_equal(tv_fixed_engine_contexts(fixture->engine), 0);
    fixture->engine->ops->destroy(fixture->engine);
}

static int setup(void **state, int32_t vocab)
{
    struct fixture *fixture = malloc(sizeof *fixture);
    assert_non_null(fixture);
    start(fixture, vocab, 0);
    *state = fixture;
    return 0;
}

int fixture_setup(void **state)
{
    return setup(state, 307);
}

int fixture_setup_wide(void **state)
{
    return setup(state, 6000);
}

int fixture_teardown(void **state)
{
    fixture_stop(*state);
    free(*state);
    return 0;
}

int32_t fixture_scaled(int32_t count)
{
    const char *text = getenv("TV_TEST_SCALE");
    double scaled = (double)count * (text != NULL ? strtod(text, NULL) : 1.0);
    return scaled < 1.0 ? 1 : (int32_t)scaled;
}

static void on_done(struct tv_call *call)
{
    assert_int_equal(sem_post(call->owner), 0);
}

static struct tv_call *make(struct fixture *fixture, enum tv_call_kind kind, const char *session,
                            const char *body)
{
    struct tv_call *call = tv_call_create();
    sem_t *done = malloc(sizeof *done);
    struct tv_problem problem = {0};
    assert_non_null(call);
    assert_non_null(done);
    assert_int_equal(sem_init(done, 0, 0), 0);
    if (body != NULL) {
        int rc = tv_request_decode(kind, body, strlen(body), tv_sched_limits(fixture->sched),
                                   &call->request, &problem);
        if (rc != 0) {
            print_error("%s: %s\n", body, problem.detail);
        }
        assert_int_equal(rc, 0);
    }
    call->request.kind = kind;
    if (session[0] != '\0') { /* else the body may name one */
        (void)snprintf(call->request.session, sizeof call->request.session, "%s", session);
    }
    (void)snprintf(call->request_id, sizeof call->request_id, "test");
    memcpy(call->principal, fixture->principal, sizeof call->principal);
    call->received_us = tv_clock_us();
    call->done = on_done;
    call->owner = done;
    return call;
}

static struct tv_call *make_va(struct fixture *fixture, enum tv_call_kind kind, const char *session,
                               const char *format, va_list args)
{
    char *body = NULL;
    if (format != NULL) {
        va_list again;
        va_copy(again, args);
        int length = vsnprintf(NULL, 0, format, again);
        va_end(again);
        assert_true(length > 0);
        body = malloc((size_t)length + 1);
        assert_non_null(body);
        (void)vsnprintf(body, (size_t)length + 1, format, args);
    }
    struct tv_call *call = make(fixture, kind, session, body);
    free(body);
    return call;
}

struct tv_call *call_make(struct fixture *fixture, enum tv_call_kind kind, const char *session,
                          const char *format, ...)
{
    va_list args;
    va_start(args, format);
    struct tv_call *call = make_va(fixture, kind, session, format, args);
    va_end(args);
    return call;
}

void call_start(struct fixture *fixture, struct tv_call *call)
{
    if (tv_sched_submit(fixture->sched, call) == 0) {
        on_done(call);
    }
}

int call_is_done(struct tv_call *call)
{
    int value = 0;
    assert_int_equal(sem_getvalue(call->owner, &value), 0);
    return value > 0;
}

struct tv_call *call_wait(struct tv_call *call)
{
    struct timespec until;
    assert_int_equal(clock_gettime(CLOCK_REALTIME, &until), 0);
    until.tv_sec += 60; /* only a hang gets there */
    int rc;
    do {
        rc = sem_timedwait(call->owner, &until);
    } while (rc != 0 && errno == EINTR);
    assert_int_equal(rc, 0);
    return call;
}

void call_free(struct tv_call *call)
{
    (void)sem_destroy(call->owner); /* nobody waits */
    free(call->owner);
    tv_call_destroy(call);
}

struct tv_call *ask(struct fixture *fixture, enum tv_call_kind kind, const char *session,
                    const char *format, ...)
{
    va_list args;
    va_start(args, format);
    struct tv_call *call = make_va(fixture, kind, session, format, args);
    va_end(args);
    call_start(fixture, call);
    return call_wait(call);
}

void expect(struct fixture *fixture, int http_status, enum tv_call_kind kind, const char *session,
            const char *format, ...)
{
    va_list args;
    va_start(args, format);
    struct tv_call *call = make_va(fixture, kind, session, format, args);
    va_end(args);
    call_start(fixture, call);
    (void)call_wait(call);
    if (call->reply.http_status != http_status) {
        print_error("%.*s\n", (int)call->reply.body.bytes, call->reply.body.data);
    }
    assert_reply(call, http_status);
    call_free(call);
}

static struct tv_json *parse(const struct tv_call *call)
{
    struct tv_json_limits limits = {.depth_max = 16, .values_max = 1 << 20};
    struct tv_json_error error = {0};
    struct tv_json *doc = NULL;
    assert_int_equal(
        tv_json_parse(call->reply.body.data, call->reply.body.bytes, &limits, &doc, &error), 0);
    return doc;
}

static const struct tv_json_value *member(const struct tv_json *doc, const char *path)
{
    const struct tv_json_value *value = tv_json_root(doc);
    char name[128];
    while (value != NULL && *path != '\0') {
        size_t bytes = strcspn(path, "/");
        (void)snprintf(name, sizeof name, "%.*s", (int)bytes, path);
        value = tv_json_member(value, name);
        path += bytes + (path[bytes] == '/');
    }
    return value;
}

int64_t reply_int(const struct tv_call *call, const char *path)
{
    struct tv_json *doc = parse(call);
    const struct tv_json_value *value = member(doc, path);
    int64_t number = -1;
    assert_non_null(value);
    if (tv_json_type(value) != TV_JSON_NULL) {
        assert_int_equal(tv_json_int(doc, value, &number), 0);
    }
    tv_json_destroy(doc);
    return number;
}

void reply_text(const struct tv_call *call, const char *path, char *ret_text, size_t bytes)
{
    struct tv_json *doc = parse(call);
    const struct tv_json_value *value = member(doc, path);
    assert_non_null(value);
    const char *text = tv_json_string(value, NULL);
    (void)snprintf(ret_text, bytes, "%s", text != NULL ? text : "null");
    tv_json_destroy(doc);
}

int32_t reply_ints(const struct tv_call *call, const char *path, int32_t *ret_items, int32_t max)
{
    struct tv_json *doc = parse(call);
    const struct tv_json_value *value = member(doc, path);
    int32_t *items = NULL, count = 0;
    size_t index = 0;
    assert_non_null(value);
    assert_int_equal(tv_json_int32_array(doc, value, &items, &count, &index), 0);
    assert_true(count <= max);
    if (count > 0) {
        memcpy(ret_items, items, (size_t)count * sizeof *items);
    }
    free(items);
    tv_json_destroy(doc);
    return count;
}

int reply_has(const struct tv_call *call, const char *path)
{
    struct tv_json *doc = parse(call);
    int has = member(doc, path) != NULL;
    tv_json_destroy(doc);
    return has;
}

int reply_mentions(const struct tv_call *call, const char *text)
{
    const struct tv_buf *body = &call->reply.body;
    return memmem(body->data, body->bytes, text, strlen(text)) != NULL;
}

int reply_flag(const struct tv_call *call, const char *path)
{
    struct tv_json *doc = parse(call);
    const struct tv_json_value *value = member(doc, path);
    assert_non_null(value);
    enum tv_json_type type = tv_json_type(value);
    assert_true(type == TV_JSON_TRUE || type == TV_JSON_FALSE);
    tv_json_destroy(doc);
    return type == TV_JSON_TRUE;
}

void assert_refused(const struct tv_call *call, int http_status, const char *code)
{
    char text[64];
    reply_text(call, "code", text, sizeof text);
    assert_string_equal(text, code);
    assert_reply(call, http_status);
    assert_int_equal(reply_flag(call, "committed"), 0);
    assert_string_equal(call->reply.content_type, "application/problem+json");
}

static int32_t next_token(struct fixture *fixture, const struct client *client)
{
    return tv_fixed_engine_token(fixture->engine, client->len);
}

static void client_push(struct client *client, int32_t token)
{
    client->tokens[client->len++] = token;
    tv_digest_push(&client->digest, token);
}

void client_open(struct fixture *fixture, struct client *client, int32_t count, const char *options)
{
    static const uint8_t model_id[32];
    char *body = NULL;
    size_t bytes = 0;
    FILE *text = open_memstream(&body, &bytes);
    assert_non_null(text);
    memset(client, 0, sizeof *client);
    tv_digest_start(&client->digest, model_id, "", 0);
    (void)fprintf(text, "{\"tokens\":[");
    for (int32_t i = 0; i < count; i++) {
        (void)fprintf(text, "%s%d", i > 0 ? "," : "", i % 300 + 1);
        client_push(client, i % 300 + 1);
    }
    (void)fprintf(text, "]%s}", options);
    assert_int_equal(fclose(text), 0);
    struct tv_call *call = ask(fixture, TV_CALL_CREATE, "", "%s", body);
    assert_reply(call, 201);
    reply_text(call, "session", client->id, sizeof client->id);
    reply_text(call, "epoch", client->epoch, sizeof client->epoch);
    client->pending = next_token(fixture, client);
    client->seq = (int32_t)reply_int(call, "next_seq");
    assert_int_equal(client->seq, 1);
    assert_int_equal(reply_int(call, "pending"), client->pending);
    assert_int_equal(reply_int(call, "committed_len"), client->len);
    call_free(call);
    free(body);
}

const char *client_chain(struct fixture *fixture, const struct client *client, int32_t count,
                         char *ret_body, size_t bytes)
{
    int at = snprintf(ret_body, bytes,
                      "{\"seq\":%d,\"epoch\":\"%s\",\"expected_len\":%d,\"tree\":{\"tokens\":[%d",
                      client->seq, client->epoch, client->len, client->pending);
    for (int32_t i = 1; i < count; i++) {
        at += snprintf(ret_body + at, bytes - (size_t)at, ",%d",
                       tv_fixed_engine_token(fixture->engine, client->len + i));
    }
    at += snprintf(ret_body + at, bytes - (size_t)at, "],\"parents\":[-1");
    for (int32_t i = 1; i < count; i++) {
        at += snprintf(ret_body + at, bytes - (size_t)at, ",%d", i - 1);
    }
    at += snprintf(ret_body + at, bytes - (size_t)at, "]}}");
    assert_true((size_t)at < bytes);
    return ret_body;
}

void client_advance(struct fixture *fixture, struct client *client, int32_t count)
{
    for (int32_t i = 0; i < count; i++) {
        client_push(client, client->pending);
        client->pending = next_token(fixture, client);
    }
    client->seq++;
}

void client_roll(struct client *client, int32_t len, int32_t pending)
{
    static const uint8_t model_id[32];
    client->pending = len < client->len ? client->tokens[len] : client->pending;
    client->pending = pending >= 0 ? pending : client->pending;
    client->len = len;
    client->seq++;
    tv_digest_start(&client->digest, model_id, "", 0);
    for (int32_t i = 0; i < len; i++) {
        tv_digest_push(&client->digest, client->tokens[i]);
    }
}

void client_check(struct fixture *fixture, const struct client *client)
{
    char text[64], digest[33];
    int32_t tail[4096];
    struct tv_call *call = call_make(fixture, TV_CALL_STATE, client->id, NULL);
    call->request.tail = 4096;
    call_start(fixture, call);
    (void)call_wait(call);
    assert_reply(call, 200);
    assert_int_equal(reply_int(call, "committed_len"), client->len);
    assert_int_equal(reply_int(call, "pending"), client->pending);
    assert_int_equal(reply_int(call, "next_seq"), client->seq);
    for (int i = 0; i < 16; i++) {
        (void)snprintf(digest + 2 * i, 3, "%02x", client->digest.bytes[i]);
    }
    reply_text(call, "digest", text, sizeof text);
    assert_string_equal(text, digest);
    assert_int_equal(reply_ints(call, "tail", tail, 4096), client->len);
    assert_memory_equal(tail, client->tokens, (size_t)client->len * sizeof tail[0]);
    call_free(call);
    tv_sched_lock(fixture->sched); /* nothing runs on it now, so the context may be looked at */
    struct tv_session *session = NULL;
    assert_int_equal(tv_sessions_find(&fixture->sched->table, client->id, fixture->principal,
                                      tv_clock_us(), &session),
                     TV_OK);
    assert_int_equal(fixture->engine->ops->context_len(session->context), client->len);
    struct tv_digest border; /* digests at page borders */
    static const uint8_t model_id[32];
    tv_digest_start(&border, model_id, "", 0);
    for (int32_t t = 0; t < session->len; t++) {
        tv_digest_push(&border, client->tokens[t]);
        if ((t + 1) % 16 == 0) {
            assert_memory_equal(&border, &session->borders[t / 16], sizeof border);
        }
    }
    tv_sched_unlock(fixture->sched);
}

struct tv_call *call_chain(struct fixture *fixture, const struct client *client, int32_t count)
{
    char body[2048];
    struct tv_call *call = call_make(fixture, TV_CALL_VERIFY, client->id, "%s",
                                     client_chain(fixture, client, count, body, sizeof body));
    call_start(fixture, call);
    return call;
}

struct tv_call *call_running(struct fixture *fixture, struct client *client, int32_t count)
{
    tv_fixed_engine_hold(fixture->engine, 1);
    struct tv_call *call = call_chain(fixture, client, count);
    tv_fixed_engine_await_held(fixture->engine);
    return call;
}

struct tv_call *pair_running(struct fixture *fixture, struct client *running, struct client *other,
                             int32_t count)
{
    client_open(fixture, running, 5, "");
    client_open(fixture, other, 6, "");
    return call_running(fixture, running, count);
}

struct tv_call *first_running(struct fixture *fixture, struct client *clients, int32_t client_count,
                              int32_t count)
{
    for (int32_t i = 0; i < client_count; i++) {
        client_open(fixture, &clients[i], 5 + i, "");
    }
    return call_running(fixture, &clients[0], count);
}

void call_release(struct fixture *fixture, struct tv_call *call, int http_status)
{
    tv_fixed_engine_hold(fixture->engine, 0);
    assert_reply(call_wait(call), http_status);
    call_free(call);
}
