/*
 * session.c - what the client knows of a session: made, copied, opened at the server, adopted.
 *
 * Owns the tokens and their digest. A state of the server is taken only when its tokens are known
 * here and its digest is theirs; what does not fit changes nothing.
 */
#include <assert.h>
#include <errno.h>
#include <inttypes.h>
#include <locale.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

#include "clients/c/internal.h"

#define CAPACITY_MIN 256

static_assert(TV_CLIENT_NODES_MAX == TV_ENGINE_NODES_MAX, "the header says the contract's limits");
static_assert(TV_CLIENT_STOP_IDS_MAX == TV_STOP_IDS_MAX, "as above");
static_assert(TV_CLIENT_DECODE_TOKENS_MAX == TV_DECODE_TOKENS_MAX, "as above");
static_assert(TV_CLIENT_SEED_DIGITS_MAX == TV_SEED_DIGITS_MAX, "as above");
static_assert(TV_CLIENT_SALT_BYTES_MAX == TV_SALT_BYTES_MAX, "as above");
static_assert(TV_CLIENT_BODY_BYTES_MAX == TV_BODY_BYTES_LARGE_DEFAULT, "as above");
static_assert(TV_CLIENT_GUESSES_MAX == TV_ALTERNATIVES_MAX, "as above");

void tv_client_session_options_init(struct tv_client_session_options *ret_options)
{
    *ret_options = (struct tv_client_session_options){
        .sampling = {.rule = "greedy", .temperature = 1.0, .top_p = 1.0}};
}

void tv_client_put_ints(struct tv_buf *buf, const char *name, const int32_t *items, int32_t count)
{
    tv_buf_printf(buf, "\"%s\":[", name);
    for (int32_t i = 0; i < count; i++) {
        tv_buf_printf(buf, i == 0 ? "%" PRId32 : ",%" PRId32, items[i]);
    }
    tv_buf_printf(buf, "]");
}

int tv_client_buf_error(const struct tv_buf *buf, struct tv_client_problem *ret_problem)
{
    tv_client_problem_set(ret_problem, "%s",
                          buf->failed == -EMSGSIZE ? "the request is larger than any server takes"
                                                   : "out of memory");
    return buf->failed == -EMSGSIZE ? -EINVAL : -ENOMEM;
}

void tv_client_session_path(const struct tv_client_session *session, const char *rest,
                            char ret_path[TV_CLIENT_PATH_BYTES])
{
    int bytes =
        snprintf(ret_path, TV_CLIENT_PATH_BYTES, "/v1/sessions/%s%s", session->state.id, rest);
    assert(bytes > 0 && bytes < TV_CLIENT_PATH_BYTES);
    (void)bytes; /* used by the assertion alone */
}

int tv_client_session_reserve(struct tv_client_session *session, int32_t count)
{
    int64_t capacity = session->capacity > CAPACITY_MIN ? session->capacity : CAPACITY_MIN;
    if (count <= session->capacity) {
        return 0;
    }
    while (capacity < count) {
        capacity *= 2;
    }
    int32_t *tokens =
        capacity <= INT32_MAX ? realloc(session->tokens, (size_t)capacity * sizeof(*tokens)) : NULL;
    if (tokens == NULL) {
        return -ENOMEM;
    }
    session->tokens = tokens;
    session->state.tokens = tokens;
    session->capacity = (int32_t)capacity;
    return 0;
}

int tv_client_session_copy(const struct tv_client_session *session,
                           struct tv_client_session *ret_copy)
{
    struct tv_client_session copy = *session;
    copy.tokens = NULL;
    copy.capacity = 0;
    int error = tv_client_session_reserve(&copy, session->state.committed_len);
    if (error == 0) {
        memcpy(copy.tokens, session->tokens,
               (size_t)session->state.committed_len * sizeof(*copy.tokens));
        *ret_copy = copy;
    }
    return error;
}

/* finish is null or a short text. */
static int read_finish(const struct tv_json_value *object, char *ret, size_t ret_bytes)
{
    const struct tv_json_value *value = tv_json_member(object, "finish");
    if (value == NULL || tv_json_type(value) == TV_JSON_NULL) {
        ret[0] = '\0';
        return value == NULL ? -EBADMSG : 0;
    }
    return tv_client_get_text(object, "finish", ret, ret_bytes);
}

int tv_client_read_progress(const struct tv_json *doc, const struct tv_json_value *object,
                            struct tv_client_progress *ret_progress)
{
    struct tv_client_progress progress = {.pending = -1};
    const struct tv_json_value *pending = tv_json_member(object, "pending");
    int none = pending != NULL && tv_json_type(pending) == TV_JSON_NULL; /* held, rule client */
    if (tv_client_get_int32(doc, object, "next_seq", &progress.next_seq) != 0 ||
        tv_client_get_int32(doc, object, "committed_len", &progress.committed_len) != 0 ||
        (!none && (tv_client_get_int32(doc, object, "pending", &progress.pending) != 0 ||
                   progress.pending < 0)) ||
        tv_client_get_text(object, "digest", progress.digest, sizeof(progress.digest)) != 0 ||
        read_finish(object, progress.finish, sizeof(progress.finish)) != 0 ||
        progress.next_seq < 1 || progress.committed_len < 1) {
        return -EBADMSG;
    }
    *ret_progress = progress;
    return 0;
}

void tv_client_session_follow(struct tv_client_session *session,
                              const struct tv_client_progress *progress)
{
    struct tv_client_state *state = &session->state;
    state->next_seq = progress->next_seq;
    state->committed_len = progress->committed_len;
    state->pending = progress->pending;
    memcpy(state->digest, progress->digest, sizeof(state->digest));
    memcpy(state->finish, progress->finish, sizeof(state->finish));
    if (state->prompt_len > state->committed_len) {
        state->prompt_len = state->committed_len;
    }
}

void tv_client_session_digest(struct tv_client_session *session)
{
    tv_client_digest_text(&session->chain, session->state.digest);
}

int tv_client_session_settle(struct tv_client_session *session,
                             const struct tv_client_settling *settling)
{
    struct tv_client_state *state = &session->state;
    int32_t count = settling->path_count;
    if (count > 0) {
        if (tv_client_session_reserve(session, state->committed_len + count) != 0) {
            return -ENOMEM;
        }
        memcpy(session->tokens + state->committed_len, settling->tokens,
               (size_t)count * sizeof(*settling->tokens));
        state->committed_len += count;
        state->pending = settling->next;
        tv_client_digest_push(&session->chain, settling->tokens, count);
        tv_client_session_digest(session);
    }
    state->held_seq = 0;
    return 0;
}

/* The id becomes part of paths: only its own alphabet may pass. */
static int read_names(const struct tv_json_value *object, struct tv_client_state *state)
{
    static const char alphabet[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
                                   "_-";
    int error = tv_client_get_text(object, "session", state->id, sizeof(state->id));
    if (error == 0) {
        error = tv_client_get_text(object, "epoch", state->epoch, sizeof(state->epoch));
    }
    if (error != 0 || state->id[0] == '\0' || strspn(state->id, alphabet) != strlen(state->id) ||
        strspn(state->epoch, "0123456789abcdef") != strlen(state->epoch)) {
        return -EBADMSG;
    }
    return 0;
}

/* Numbers of JSON have a point, whatever the program's locale has. */
static void put_sampling(struct tv_buf *body, const struct tv_client_session *session)
{
    locale_t plain = newlocale(LC_ALL_MASK, "C", (locale_t)0);
    if (plain == (locale_t)0) {
        body->failed = -ENOMEM;
        return;
    }
    locale_t before = uselocale(plain);
    tv_buf_printf(body, ",\"temperature\":%.17g,\"top_p\":%.17g,\"min_p\":%.17g,\"top_k\":%" PRId32,
                  session->temperature, session->top_p, session->min_p, session->top_k);
    (void)uselocale(before);
    freelocale(plain);
}

static void put_settings(struct tv_buf *body, const struct tv_client_session *session)
{
    tv_buf_printf(body, ",\"sampling\":{\"rule\":\"%s\"", session->rule);
    if (strcmp(session->rule, "greedy") != 0) {
        put_sampling(body, session);
        if (session->state.seed[0] != '\0') {
            tv_buf_printf(body, ",\"seed\":\"%s\"", session->state.seed);
        }
    }
    tv_buf_printf(body, "}");
    if (session->stop_count > 0 || session->max_len > 0) {
        tv_buf_printf(body, ",\"stop\":{");
        tv_client_put_ints(body, "token_ids", session->stop_ids, session->stop_count);
        if (session->max_len > 0) {
            tv_buf_printf(body, ",\"max_len\":%" PRId32, session->max_len);
        }
        tv_buf_printf(body, "}");
    }
    if (session->lease_s > 0) {
        tv_buf_printf(body, ",\"lease_s\":%" PRId32, session->lease_s);
    }
    if (session->salt[0] != '\0') {
        tv_buf_printf(body, ",\"cache_salt\":\"%s\"", session->salt); /* checked at the create */
    }
}

int tv_client_random_key(char ret_key[33])
{
    uint8_t raw[16];
    if (getrandom(raw, sizeof(raw), 0) != (ssize_t)sizeof(raw)) {
        return -EIO;
    }
    for (size_t i = 0; i < sizeof(raw); i++) {
        (void)snprintf(ret_key + 2 * i, 3, "%02x", raw[i]); /* always two digits */
    }
    return 0;
}

int tv_client_session_opened(struct tv_client_session *session,
                             const struct tv_client_answer *answer)
{
    struct tv_client_progress progress;
    struct tv_client_state state = session->state;
    const struct tv_json *doc = tv_client_json(answer);
    const struct tv_json_value *root = tv_json_root(doc);
    const struct tv_json_value *limits = tv_json_member(root, "limits");
    const struct tv_json_value *sampling = tv_json_member(root, "sampling");
    if (read_names(root, &state) != 0 || limits == NULL || sampling == NULL ||
        tv_client_read_progress(doc, root, &progress) != 0 ||
        tv_client_get_int32(doc, limits, "max_nodes", &state.max_nodes) != 0 ||
        tv_client_get_int32(doc, limits, "max_depth", &state.max_depth) != 0 ||
        tv_client_get_int32(doc, root, "cached_len", &state.cached_len) != 0 ||
        progress.committed_len != state.committed_len || progress.pending < 0 ||
        strcmp(progress.digest, state.digest) != 0) {
        return -EBADMSG;
    }
    if (strcmp(session->rule, "greedy") != 0 &&
        (tv_client_get_text(sampling, "seed", state.seed, sizeof(state.seed)) != 0 ||
         strspn(state.seed, "0123456789") != strlen(state.seed))) {
        return -EBADMSG;
    }
    state.held_seq = 0;
    session->state = state;
    session->unsure = 0;
    tv_client_session_follow(session, &progress);
    return 0;
}

int tv_client_session_open(struct tv_client_session *session, const char *prefix,
                           struct tv_client_problem *ret_problem)
{
    struct tv_buf body;
    struct tv_client_answer answer = {0};
    char key[33];
    tv_buf_init(&body, TV_BODY_BYTES_LARGE_DEFAULT);
    tv_buf_printf(&body, "{");
    if (prefix != NULL) {
        tv_buf_printf(&body, "\"prefix\":{\"session\":\"%s\",\"len\":%" PRId32 "}", prefix,
                      session->state.committed_len);
    } else {
        tv_client_put_ints(&body, "tokens", session->tokens, session->state.committed_len);
    }
    put_settings(&body, session);
    tv_buf_printf(&body, ",\"expected_digest\":\"%s\"}", session->state.digest);
    int error;
    if (body.failed != 0) {
        error = tv_client_buf_error(&body, ret_problem);
        goto out;
    }
    error = tv_client_random_key(key);
    if (error != 0) {
        tv_client_problem_set(ret_problem, "no random bytes");
        goto out;
    }
    const struct tv_client_call call = {.method = "POST",
                                        .path = "/v1/sessions",
                                        .body = body.data,
                                        .body_bytes = body.bytes,
                                        .key = key};
    error = tv_client_exchange(session->client, &call, &answer, ret_problem);
    if (error == 0 &&
        (!tv_client_is_object(&answer) || tv_client_session_opened(session, &answer) != 0)) {
        error = tv_client_not_the_contract(
            "the new session lacks a member, or has other tokens than were sent", ret_problem);
    }
out:
    tv_client_answer_finish(&answer);
    tv_buf_finish(&body);
    return error;
}

/* Settings that the contract has; the server judges the numbers of the sampling. */
static int take_options(struct tv_client_session *session,
                        const struct tv_client_session_options *options)
{
    const struct tv_client_sampling *sampling = &options->sampling;
    const char *seed = sampling->seed != NULL ? sampling->seed : "";
    const char *salt = options->cache_salt != NULL ? options->cache_salt : "";
    if ((options->prefix == NULL) != (options->tokens != NULL) ||
        (options->tokens != NULL && options->token_count < 1) ||
        (options->prefix != NULL &&
         (options->prefix_len < 0 || options->prefix_len > options->prefix->state.committed_len)) ||
        options->stop_count < 0 || options->stop_count > TV_CLIENT_STOP_IDS_MAX ||
        (options->stop_count > 0 && options->stop_ids == NULL) ||
        !isfinite(sampling->temperature) || !isfinite(sampling->top_p) ||
        !isfinite(sampling->min_p) || options->max_len < 0 || options->lease_s < 0 ||
        sampling->rule == NULL ||
        (strcmp(sampling->rule, "greedy") != 0 && strcmp(sampling->rule, "target_walk") != 0 &&
         strcmp(sampling->rule, "typical") != 0 && strcmp(sampling->rule, "client") != 0) ||
        strlen(seed) > TV_CLIENT_SEED_DIGITS_MAX || strspn(seed, "0123456789") != strlen(seed) ||
        (sampling->seed != NULL && seed[0] == '\0') || strlen(salt) > TV_CLIENT_SALT_BYTES_MAX) {
        return -EINVAL;
    }
    for (const char *at = salt; *at != '\0'; at++) {
        if (*at < 0x20 || *at > 0x7e || *at == '"' || *at == '\\') {
            return -EINVAL; /* what a string of JSON holds as it is */
        }
    }
    (void)snprintf(session->rule, sizeof(session->rule), "%s", sampling->rule);   /* fits */
    (void)snprintf(session->state.seed, sizeof(session->state.seed), "%s", seed); /* fits */
    (void)snprintf(session->salt, sizeof(session->salt), "%s", salt);             /* fits */
    session->temperature = sampling->temperature;
    session->top_p = sampling->top_p;
    session->min_p = sampling->min_p;
    session->top_k = sampling->top_k;
    session->max_len = options->max_len;
    session->lease_s = options->lease_s;
    for (int32_t i = 0; i < options->stop_count; i++) {
        session->stop_ids[i] = options->stop_ids[i];
    }
    session->stop_count = options->stop_count;
    return 0;
}

/* The prompt becomes the session's tokens. */
static int take_prompt(struct tv_client_session *session, const int32_t *tokens, int32_t count)
{
    int error = tv_client_session_reserve(session, count);
    if (error == 0) {
        error = tv_client_digest_start(session->model.model_id, session->salt, &session->chain);
    }
    if (error == 0) {
        memcpy(session->tokens, tokens, (size_t)count * sizeof(*tokens));
        tv_client_digest_push(&session->chain, tokens, count);
        tv_client_digest_text(&session->chain, session->state.digest);
        session->state.committed_len = count;
        session->state.prompt_len = count;
        session->state.max_len = session->model.max_len;
    }
    return error;
}

int tv_client_session_create(struct tv_client *client,
                             const struct tv_client_session_options *options,
                             struct tv_client_session **ret_session,
                             struct tv_client_problem *ret_problem)
{
    const struct tv_client_session *prefix = options->prefix;
    struct tv_client_session *session = calloc(1, sizeof(*session));
    int error = -ENOMEM;
    tv_client_problem_set(ret_problem, "out of memory");
    if (session == NULL) {
        return error;
    }
    session->client = client;
    error = take_options(session, options);
    if (error != 0) {
        tv_client_problem_set(ret_problem,
                              "prompt, stop tokens, rule, seed, salt or a limit out of range");
        goto out;
    }
    error = tv_client_model(client, &session->model, ret_problem);
    if (error != 0) {
        goto out;
    }
    error = prefix == NULL ? take_prompt(session, options->tokens, options->token_count)
                           : take_prompt(session, prefix->tokens,
                                         options->prefix_len > 0 ? options->prefix_len
                                                                 : prefix->state.committed_len);
    if (error != 0) {
        tv_client_problem_set(ret_problem, error == -ENOMEM
                                               ? "out of memory"
                                               : "the server's model_id is not 64 hex digits");
        goto out;
    }
    error = tv_client_session_open(session, prefix != NULL ? prefix->state.id : NULL, ret_problem);
    if (error == -EPROTO && prefix != NULL && tv_client_is_forgotten(ret_problem->code)) {
        error = tv_client_session_open(session, NULL, ret_problem); /* its tokens are known */
    }
out:
    if (error != 0) {
        tv_client_session_destroy(session);
        return error;
    }
    *ret_session = session;
    return tv_client_end(0, ret_problem);
}

void tv_client_session_destroy(struct tv_client_session *session)
{
    if (session != NULL) {
        tv_client_ahead_end(session);
        free(session->tokens);
        free(session);
    }
}

const struct tv_client_state *tv_client_session_state(const struct tv_client_session *session)
{
    return &session->state;
}

/* limit_ms 0: the client's own deadline. */
static int delete_session(struct tv_client_session *session, int32_t limit_ms,
                          struct tv_client_problem *ret_problem)
{
    char path[TV_CLIENT_PATH_BYTES];
    const struct tv_client_call call = {
        .method = "DELETE", .path = path, .hasty = 1, .limit_ms = limit_ms};
    struct tv_client_answer answer = {0};
    tv_client_ahead_end(session);
    tv_client_session_path(session, "", path);
    int error = tv_client_exchange(session->client, &call, &answer, ret_problem);
    if (error == 0 && answer.http_status != 204) {
        error = tv_client_not_the_contract("DELETE answers 204", ret_problem);
    }
    tv_client_answer_finish(&answer);
    return tv_client_end(error, ret_problem);
}

int tv_client_session_delete(struct tv_client_session *session,
                             struct tv_client_problem *ret_problem)
{
    return delete_session(session, 0, ret_problem);
}

int tv_client_session_delete_within(struct tv_client_session *session, int32_t limit_ms,
                                    struct tv_client_problem *ret_problem)
{
    if (limit_ms < 1) {
        tv_client_problem_set(ret_problem, "delete: a limit of 1 ms or more");
        return -EINVAL;
    }
    return delete_session(session, limit_ms, ret_problem);
}

/* The tokens that a state stands for, of those here and its tail: into *ret_tokens [length],
 * malloc'd. 1; 0: some are not known; -EBADMSG; -ENOMEM. */
static int tokens_of(const struct tv_client_session *session, const struct tv_json *doc,
                     const struct tv_json_value *object, int32_t length, int32_t **ret_tokens)
{
    int32_t *tail = NULL;
    int32_t tail_count = 0;
    int32_t start = length;
    int result = 0;
    if (tv_json_member(object, "tail") != NULL) {
        result = tv_client_get_ints(doc, object, "tail", &tail, &tail_count);
        if (result == 0) {
            result = tv_client_get_int32(doc, object, "tail_from", &start);
        }
        if (result == 0 && (start < 0 || start > length || tail_count != length - start)) {
            result = -EBADMSG;
        }
    }
    if (result != 0 || start > session->state.committed_len) {
        goto out; /* 0: a gap */
    }
    int32_t *tokens = malloc((size_t)length * sizeof(*tokens));
    if (tokens == NULL) {
        result = -ENOMEM;
        goto out;
    }
    memcpy(tokens, session->tokens, (size_t)start * sizeof(*tokens));
    if (tail_count > 0) {
        memcpy(tokens + start, tail, (size_t)tail_count * sizeof(*tokens));
    }
    *ret_tokens = tokens;
    result = 1;
out:
    free(tail);
    return result;
}

int tv_client_session_adopt(struct tv_client_session *session, const struct tv_json *doc,
                            const struct tv_json_value *object)
{
    struct tv_client_state state = session->state;
    struct tv_client_progress progress;
    struct tv_client_digest chain;
    const struct tv_json_value *held = tv_json_member(object, "held_seq");
    int32_t *tokens = NULL;
    int32_t held_seq = 0;
    char text[33];
    if (object == NULL || read_names(object, &state) != 0 ||
        tv_client_read_progress(doc, object, &progress) != 0 || progress.pending < 0 ||
        (held != NULL && tv_json_type(held) != TV_JSON_NULL &&
         tv_client_get_int32(doc, object, "held_seq", &held_seq) != 0)) {
        return -EBADMSG;
    }
    int result = tokens_of(session, doc, object, progress.committed_len, &tokens);
    if (result != 1) {
        return result;
    }
    /* the model_id was read before, so this cannot fail */
    (void)tv_client_digest_start(session->model.model_id, session->salt, &chain);
    tv_client_digest_push(&chain, tokens, progress.committed_len);
    tv_client_digest_text(&chain, text);
    if (strcmp(text, progress.digest) != 0) {
        free(tokens);
        return 0;
    }
    free(session->tokens);
    session->tokens = tokens;
    session->capacity = progress.committed_len;
    session->chain = chain;
    state.tokens = tokens;
    state.held_seq = state.held_seq == held_seq ? held_seq : 0;
    session->server_held = held_seq;
    session->state = state;
    tv_client_session_follow(session, &progress);
    return 1;
}
