/*
 * calls.c - the calls of the contract, one function each, and the session they keep in step.
 *
 * A round's answer is compared with what was asked before the session moves on; one that does not
 * fit is -EBADMSG and changes nothing here.
 */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

#include "clients/c/internal.h"
#include "proto/limits.h"
#include "proto/response.h"

#define PATH_BYTES 96

int tv_client_health(struct tv_client *client, struct tv_client_answer *ret_answer,
                     struct tv_client_problem *ret_problem)
{
    return tv_client_request(client, "GET", "/healthz", NULL, 0, ret_answer, ret_problem);
}

int tv_client_ready(struct tv_client *client, int deep, struct tv_client_answer *ret_answer,
                    struct tv_client_problem *ret_problem)
{
    return tv_client_request(client, "GET", deep ? "/readyz?deep=1" : "/readyz", NULL, 0,
                             ret_answer, ret_problem);
}

int tv_client_parity_totals(struct tv_client *client, struct tv_client_answer *ret_answer,
                            struct tv_client_problem *ret_problem)
{
    return tv_client_request(client, "GET", "/v1/parity", NULL, 0, ret_answer, ret_problem);
}

int tv_client_parity_run(struct tv_client *client, const char *body, size_t body_bytes,
                         struct tv_client_answer *ret_answer, struct tv_client_problem *ret_problem)
{
    if (body == NULL) {
        body = "{}";
        body_bytes = 2;
    }
    return tv_client_request(client, "POST", "/v1/parity", body, body_bytes, ret_answer,
                             ret_problem);
}

int tv_client_oneshot(struct tv_client *client, const char *body, size_t body_bytes,
                      struct tv_client_answer *ret_answer, struct tv_client_problem *ret_problem)
{
    return tv_client_request(client, "POST", "/v1/verify", body, body_bytes, ret_answer,
                             ret_problem);
}

static int not_the_contract(const char *what, struct tv_client_problem *ret_problem)
{
    tv_client_problem_set(ret_problem, "the server's answer does not follow the contract: %s",
                          what);
    return -EBADMSG;
}

/* A 2xx answer with an object in it. */
static int is_object(const struct tv_client_answer *answer)
{
    return answer->http_status >= 200 && answer->http_status < 300 && answer->doc != NULL &&
           tv_json_type(tv_json_root(answer->doc)) == TV_JSON_OBJECT;
}

int tv_client_model(struct tv_client *client, struct tv_client_model *ret_model,
                    struct tv_client_problem *ret_problem)
{
    struct tv_client_answer answer = {0};
    struct tv_client_model model = {0};
    int error = tv_client_request(client, "GET", "/v1/model", NULL, 0, &answer, ret_problem);
    if (error != 0) {
        return error;
    }
    if (!is_object(&answer)) {
        error = not_the_contract("/v1/model is not an object", ret_problem);
        goto out;
    }
    const struct tv_json_value *root = tv_json_root(answer.doc);
    const struct tv_json_value *limits = tv_json_member(root, "limits");
    tv_client_get_text_cut(root, "name", model.name, sizeof(model.name));
    tv_client_get_text_cut(root, "architecture", model.architecture, sizeof(model.architecture));
    tv_client_get_text_cut(root, "backend", model.backend, sizeof(model.backend));
    tv_client_get_text_cut(root, "device", model.device, sizeof(model.device));
    if (tv_client_get_int32(answer.doc, root, "vocab", &model.vocab) != 0 ||
        tv_client_get_int32(answer.doc, root, "max_len", &model.max_len) != 0 || limits == NULL ||
        tv_client_get_int32(answer.doc, limits, "max_nodes", &model.max_nodes) != 0 ||
        tv_client_get_int32(answer.doc, limits, "max_depth", &model.max_depth) != 0) {
        error = not_the_contract("/v1/model without vocab, max_len or limits", ret_problem);
        goto out;
    }
    *ret_model = model;
out:
    tv_client_answer_finish(&answer);
    return error;
}

static void put_ints(struct tv_buf *buf, const char *name, const int32_t *items, int32_t count)
{
    tv_buf_printf(buf, "\"%s\":[", name);
    for (int32_t i = 0; i < count; i++) {
        tv_buf_printf(buf, i == 0 ? "%" PRId32 : ",%" PRId32, items[i]);
    }
    tv_buf_printf(buf, "]");
}

static int buffer_error(const struct tv_buf *buf, struct tv_client_problem *ret_problem)
{
    tv_client_problem_set(ret_problem, "%s",
                          buf->failed == -EMSGSIZE ? "the request is larger than any server takes"
                                                   : "out of memory");
    return buf->failed == -EMSGSIZE ? -EINVAL : -ENOMEM;
}

/* finish is null or a short text. */
static int read_finish(const struct tv_json_value *root, char *ret, size_t ret_bytes)
{
    const struct tv_json_value *value = tv_json_member(root, "finish");
    if (value == NULL || tv_json_type(value) == TV_JSON_NULL) {
        ret[0] = '\0';
        return 0;
    }
    return tv_client_get_text(root, "finish", ret, ret_bytes);
}

/* What every answer that commits says about the session. */
static int read_progress(const struct tv_client_answer *answer, struct tv_client_session *session)
{
    const struct tv_json_value *root = tv_json_root(answer->doc);
    if (tv_client_get_int32(answer->doc, root, "next_seq", &session->next_seq) != 0 ||
        tv_client_get_int32(answer->doc, root, "committed_len", &session->committed_len) != 0 ||
        tv_client_get_int32(answer->doc, root, "pending", &session->pending) != 0 ||
        tv_client_get_text(root, "digest", session->digest, sizeof(session->digest)) != 0 ||
        session->next_seq < 1 || session->committed_len < 0 || session->pending < 0) {
        return -EBADMSG;
    }
    return read_finish(root, session->finish, sizeof(session->finish));
}

static int is_digits(const char *text)
{
    size_t bytes = strlen(text);
    return bytes > 0 && bytes <= TV_SEED_DIGITS_MAX && strspn(text, "0123456789") == bytes;
}

static void put_sampling(struct tv_buf *buf, const struct tv_client_sampling *sampling)
{
    tv_buf_printf(buf, ",\"sampling\":{\"rule\":\"%s\"", sampling->rule);
    if (strcmp(sampling->rule, "greedy") != 0) {
        tv_buf_printf(buf, ",\"temperature\":%.9g,\"top_p\":%.9g,\"min_p\":%.9g,\"top_k\":%" PRId32,
                      sampling->temperature, sampling->top_p, sampling->min_p, sampling->top_k);
        if (sampling->seed != NULL) {
            tv_buf_printf(buf, ",\"seed\":\"%s\"", sampling->seed);
        }
    }
    tv_buf_printf(buf, "}");
}

static int random_key(char ret_key[33])
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

/* The session id becomes part of paths: only its own alphabet may pass. */
static int read_created(const struct tv_client_answer *answer, struct tv_client_session *session)
{
    static const char alphabet[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
                                   "_-";
    const struct tv_json_value *root = tv_json_root(answer->doc);
    const struct tv_json_value *limits = tv_json_member(root, "limits");
    if (tv_client_get_text(root, "session", session->id, sizeof(session->id)) != 0 ||
        strspn(session->id, alphabet) != strlen(session->id) || session->id[0] == '\0' ||
        tv_client_get_text(root, "epoch", session->epoch, sizeof(session->epoch)) != 0 ||
        strspn(session->epoch, "0123456789abcdef") != strlen(session->epoch) || limits == NULL ||
        tv_client_get_int32(answer->doc, limits, "max_nodes", &session->max_nodes) != 0 ||
        tv_client_get_int32(answer->doc, limits, "max_depth", &session->max_depth) != 0) {
        return -EBADMSG;
    }
    return read_progress(answer, session);
}

int tv_client_session_create(struct tv_client *client, const int32_t *tokens, int32_t token_count,
                             const struct tv_client_sampling *sampling, const int32_t *stop_ids,
                             int32_t stop_count, struct tv_client_session *ret_session,
                             struct tv_client_problem *ret_problem)
{
    int greedy = strcmp(sampling->rule, "greedy") == 0;
    if (token_count < 1 || stop_count < 0 || stop_count > TV_STOP_IDS_MAX ||
        (!greedy && strcmp(sampling->rule, "target_walk") != 0) ||
        (sampling->seed != NULL && !is_digits(sampling->seed))) {
        tv_client_problem_set(ret_problem, "prompt, stop tokens, rule or seed out of range");
        return -EINVAL;
    }
    struct tv_buf body;
    struct tv_client_answer answer = {0};
    struct tv_client_session session = {0};
    char key[33];
    tv_buf_init(&body, TV_BODY_BYTES_LARGE_DEFAULT);
    tv_buf_printf(&body, "{");
    put_ints(&body, "tokens", tokens, token_count);
    put_sampling(&body, sampling);
    if (stop_count > 0) {
        tv_buf_printf(&body, ",\"stop\":{");
        put_ints(&body, "token_ids", stop_ids, stop_count);
        tv_buf_printf(&body, "}");
    }
    tv_buf_printf(&body, "}");
    int error;
    if (body.failed != 0) {
        error = buffer_error(&body, ret_problem);
        goto out;
    }
    error = random_key(key);
    if (error != 0) {
        tv_client_problem_set(ret_problem, "no random bytes");
        goto out;
    }
    error = tv_client_request_keyed(client, "POST", "/v1/sessions", body.data, body.bytes, key,
                                    &answer, ret_problem);
    if (error != 0) {
        goto out;
    }
    if (!is_object(&answer) || read_created(&answer, &session) != 0) {
        error = not_the_contract("the new session lacks a member", ret_problem);
        goto out;
    }
    *ret_session = session;
out:
    tv_client_answer_finish(&answer);
    tv_buf_finish(&body);
    return error;
}

static int session_path(const struct tv_client_session *session, const char *call, char *ret_path)
{
    int bytes = snprintf(ret_path, PATH_BYTES, "/v1/sessions/%s%s", session->id, call);
    return bytes < 0 || bytes >= PATH_BYTES ? -EINVAL : 0;
}

int tv_client_session_delete(struct tv_client *client, const struct tv_client_session *session,
                             struct tv_client_problem *ret_problem)
{
    char path[PATH_BYTES];
    struct tv_client_answer answer = {0};
    int error = session_path(session, "", path);
    if (error != 0) {
        tv_client_problem_set(ret_problem, "not a session id");
        return error;
    }
    error = tv_client_request(client, "DELETE", path, NULL, 0, &answer, ret_problem);
    if (error == 0 && answer.http_status != 204) {
        error = not_the_contract("DELETE answers 204", ret_problem);
    }
    tv_client_answer_finish(&answer);
    return error;
}

static void begin_round(struct tv_buf *body, const struct tv_client_session *session)
{
    tv_buf_init(body, TV_BODY_BYTES_LARGE_DEFAULT);
    tv_buf_printf(body, "{\"seq\":%" PRId32 ",\"epoch\":\"%s\",\"expected_len\":%" PRId32 ",",
                  session->next_seq, session->epoch, session->committed_len);
}

/* Close the body, post it, read what it says about the session into *ret_next. */
static int post_round(struct tv_client *client, const struct tv_client_session *session,
                      const char *call, struct tv_buf *body, struct tv_client_answer *ret_answer,
                      struct tv_client_session *ret_next, struct tv_client_problem *ret_problem)
{
    char path[PATH_BYTES];
    tv_buf_printf(body, "}");
    if (body->failed != 0) {
        return buffer_error(body, ret_problem);
    }
    int error = session_path(session, call, path);
    if (error != 0) {
        tv_client_problem_set(ret_problem, "not a session id");
        return error;
    }
    error =
        tv_client_request(client, "POST", path, body->data, body->bytes, ret_answer, ret_problem);
    if (error != 0) {
        return error;
    }
    *ret_next = *session;
    if (!is_object(ret_answer) || read_progress(ret_answer, ret_next) != 0) {
        return not_the_contract("a round lacks a member", ret_problem);
    }
    if (ret_next->next_seq != session->next_seq + 1) {
        return not_the_contract("next_seq did not move by one", ret_problem);
    }
    return 0;
}

/* 0; -EBADMSG: a member is missing or of another form; -ENOMEM. */
static int read_round(const struct tv_client_answer *answer, struct tv_client_round *round)
{
    const struct tv_json_value *root = tv_json_root(answer->doc);
    const struct tv_json_value *tokens = tv_json_member(root, "new_tokens");
    const struct tv_json_value *nodes = tv_json_member(tv_json_member(root, "accepted"), "nodes");
    const struct tv_json_value *replayed = tv_json_member(root, "replayed");
    const struct tv_json_value *times = tv_json_member(root, "timing_us");
    const struct tv_json_value *total = tv_json_member(times, "total");
    size_t where;
    int error = -EBADMSG;
    if (tokens != NULL) {
        error =
            tv_json_int32_array(answer->doc, tokens, &round->tokens, &round->token_count, &where);
    }
    if (error == 0 && nodes != NULL) {
        error = tv_json_int32_array(answer->doc, nodes, &round->nodes, &round->node_count, &where);
    }
    if (error != 0 || round->token_count < 1) {
        return error == -ENOMEM ? error : -EBADMSG;
    }
    round->replayed = replayed != NULL && tv_json_type(replayed) == TV_JSON_TRUE;
    if (total != NULL) {
        (void)tv_json_int(answer->doc, total, &round->server_us); /* stays 0 when unreadable */
    }
    return 0;
}

/* Accepted nodes are a path from node 0, and the new text is their tokens and one more. */
static int is_path(const struct tv_client_round *round, const int32_t *tokens,
                   const int32_t *parents, int32_t count)
{
    if (round->node_count < 1 || round->nodes[0] != 0 || round->token_count != round->node_count) {
        return 0;
    }
    for (int32_t i = 1; i < round->node_count; i++) {
        int32_t node = round->nodes[i];
        if (node < 1 || node >= count || parents[node] != round->nodes[i - 1] ||
            tokens[node] != round->tokens[i - 1]) {
            return 0;
        }
    }
    return 1;
}

/* What the tokens of a round must agree with: a tree, or (count 0) a number of tokens. */
struct asked {
    const int32_t *tokens, *parents;
    int32_t count, tokens_max;
};

/* 1 when the answer is one that the question can have: accepted nodes are a path, and the length
 * and the pending token are those behind it. */
static int is_answer(const struct asked *asked, const struct tv_client_session *before,
                     const struct tv_client_session *after, const struct tv_client_round *round)
{
    if (asked->count > 0 ? !is_path(round, asked->tokens, asked->parents, asked->count)
                         : round->token_count > asked->tokens_max) {
        return 0;
    }
    return after->committed_len == before->committed_len + round->token_count &&
           after->pending == round->tokens[round->token_count - 1];
}

/* Post a round that brings new tokens; session and *ret_round change only when all of it is right.
 */
static int run_round(struct tv_client *client, struct tv_client_session *session, const char *call,
                     struct tv_buf *body, const struct asked *asked,
                     struct tv_client_round *ret_round, struct tv_client_problem *ret_problem)
{
    struct tv_client_answer answer = {0};
    struct tv_client_session next;
    struct tv_client_round round = {0};
    int error = post_round(client, session, call, body, &answer, &next, ret_problem);
    if (error == 0) {
        error = read_round(&answer, &round);
        if (error == -ENOMEM) {
            tv_client_problem_set(ret_problem, "out of memory");
        } else if (error != 0 || !is_answer(asked, session, &next, &round)) {
            error = not_the_contract("accepted nodes, new tokens and length disagree", ret_problem);
        }
    }
    if (error == 0) {
        *session = next;
        *ret_round = round;
        round = (struct tv_client_round){0};
    }
    tv_client_round_finish(&round);
    tv_client_answer_finish(&answer);
    tv_buf_finish(body);
    return error;
}

int tv_client_verify(struct tv_client *client, struct tv_client_session *session,
                     const int32_t *tokens, const int32_t *parents, int32_t count,
                     struct tv_client_round *ret_round, struct tv_client_problem *ret_problem)
{
    const struct asked asked = {.tokens = tokens, .parents = parents, .count = count};
    struct tv_buf body;
    if (count < 1 || count > TV_ENGINE_NODES_MAX) {
        tv_client_problem_set(ret_problem, "a tree has 1 to %d nodes", TV_ENGINE_NODES_MAX);
        return -EINVAL;
    }
    begin_round(&body, session);
    tv_buf_printf(&body, "\"tree\":{");
    put_ints(&body, "tokens", tokens, count);
    tv_buf_printf(&body, ",");
    put_ints(&body, "parents", parents, count);
    tv_buf_printf(&body, "}");
    return run_round(client, session, "/verify", &body, &asked, ret_round, ret_problem);
}

int tv_client_decode(struct tv_client *client, struct tv_client_session *session,
                     int32_t tokens_max, struct tv_client_round *ret_round,
                     struct tv_client_problem *ret_problem)
{
    const struct asked asked = {.tokens_max = tokens_max};
    struct tv_buf body;
    if (tokens_max < 1 || tokens_max > TV_DECODE_TOKENS_MAX) {
        tv_client_problem_set(ret_problem, "decode takes 1 to %d tokens", TV_DECODE_TOKENS_MAX);
        return -EINVAL;
    }
    begin_round(&body, session);
    tv_buf_printf(&body, "\"max_tokens\":%" PRId32, tokens_max);
    return run_round(client, session, "/decode", &body, &asked, ret_round, ret_problem);
}

int tv_client_extend(struct tv_client *client, struct tv_client_session *session,
                     const int32_t *tokens, int32_t count, int keep_pending,
                     struct tv_client_problem *ret_problem)
{
    struct tv_buf body;
    struct tv_client_answer answer = {0};
    struct tv_client_session next;
    begin_round(&body, session);
    put_ints(&body, "tokens", tokens, count);
    tv_buf_printf(&body, ",\"keep_pending\":%s", keep_pending ? "true" : "false");
    int error = post_round(client, session, "/extend", &body, &answer, &next, ret_problem);
    if (error == 0 && next.committed_len != session->committed_len + count + (keep_pending != 0)) {
        error = not_the_contract("committed_len after extend", ret_problem);
    }
    if (error == 0) {
        *session = next;
    }
    tv_client_answer_finish(&answer);
    tv_buf_finish(&body);
    return error;
}

void tv_client_round_finish(struct tv_client_round *round)
{
    free(round->nodes);
    free(round->tokens);
    *round = (struct tv_client_round){0};
}
