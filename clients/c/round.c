/*
 * round.c - one numbered round: its body, and its answer held against what was asked.
 *
 * The session moves on only when all of the answer is right: number, path, tokens, length and
 * digest. What is wrong is -EBADMSG and changes nothing. Recovery is recover.c's.
 */
#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "clients/c/internal.h"

static const char *const paths[] = {[TV_CLIENT_VERIFY] = "/verify",
                                    [TV_CLIENT_DECODE] = "/decode",
                                    [TV_CLIENT_EXTEND] = "/extend",
                                    [TV_CLIENT_ROLLBACK] = "/rollback"};

static void put_round(struct tv_buf *body, const struct tv_client_session *session,
                      const struct tv_client_ask *ask)
{
    const struct tv_client_state *state = &session->state;
    tv_buf_printf(body,
                  "{\"seq\":%" PRId32 ",\"epoch\":\"%s\",\"expected_len\":%" PRId32
                  ",\"expected_digest\":\"%s\",",
                  state->next_seq, state->epoch, state->committed_len, state->digest);
    switch (ask->kind) {
    case TV_CLIENT_VERIFY:
        tv_buf_printf(body, "\"tree\":{");
        tv_client_put_ints(body, "tokens", ask->tokens, ask->count);
        tv_buf_printf(body, ",");
        tv_client_put_ints(body, "parents", ask->parents, ask->count);
        tv_buf_printf(body, "}");
        break;
    case TV_CLIENT_DECODE:
        tv_buf_printf(body, "\"max_tokens\":%" PRId32, ask->tokens_max);
        break;
    case TV_CLIENT_EXTEND:
        tv_client_put_ints(body, "tokens", ask->tokens, ask->count);
        tv_buf_printf(body, ",\"keep_pending\":%s", ask->keep_pending ? "true" : "false");
        break;
    case TV_CLIENT_ROLLBACK:
        tv_buf_printf(body, "\"len\":%" PRId32, ask->len);
        if (ask->pending >= 0) {
            tv_buf_printf(body, ",\"pending\":%" PRId32, ask->pending);
        }
        break;
    }
    tv_buf_printf(body, "}");
}

static int64_t number_of(const struct tv_json *doc, const struct tv_json_value *object,
                         const char *name)
{
    const struct tv_json_value *value = tv_json_member(object, name);
    int64_t number = 0;
    return value != NULL && tv_json_int(doc, value, &number) == 0 ? number : 0;
}

/* Everything but the session's progress. 0; -EBADMSG; -ENOMEM; *ret_round is the caller's. */
static int read_round(const struct tv_json *doc, const struct tv_client_ask *ask,
                      struct tv_client_round *ret_round)
{
    const struct tv_json_value *root = tv_json_root(doc);
    const struct tv_json_value *accepted = tv_json_member(root, "accepted");
    const struct tv_json_value *replayed = tv_json_member(root, "replayed");
    const struct tv_json_value *times = tv_json_member(root, "timing_us");
    struct tv_client_round *round = ret_round;
    int error = 0;
    *round = (struct tv_client_round){0};
    if (ask->kind != TV_CLIENT_ROLLBACK) {
        error = tv_client_get_ints(doc, root, "new_tokens", &round->tokens, &round->token_count);
        if (error == 0 && round->token_count < 1) {
            error = -EBADMSG;
        }
    }
    if (error == 0 && ask->kind == TV_CLIENT_VERIFY) {
        error = tv_client_get_ints(doc, accepted, "nodes", &round->nodes, &round->node_count);
    }
    if (error != 0) {
        return error;
    }
    round->replayed = replayed != NULL && tv_json_type(replayed) == TV_JSON_TRUE;
    round->queue_us = number_of(doc, times, "queue");
    round->gpu_us = number_of(doc, times, "gpu");
    round->server_us = number_of(doc, times, "total");
    round->batch = (int32_t)number_of(doc, times, "batch");
    round->useful_nodes = (int32_t)number_of(doc, tv_json_member(root, "hint"), "max_useful_nodes");
    return 0;
}

/* Accepted nodes are a path from node 0, and the new text is their tokens and one more. */
static int is_path(const struct tv_client_round *round, const struct tv_client_ask *ask)
{
    if (round->node_count < 1 || round->nodes[0] != 0 || round->token_count != round->node_count) {
        return 0;
    }
    for (int32_t i = 1; i < round->node_count; i++) {
        int32_t node = round->nodes[i];
        if (node < 1 || node >= ask->count || ask->parents[node] != round->nodes[i - 1] ||
            ask->tokens[node] != round->tokens[i - 1]) {
            return 0;
        }
    }
    return 1;
}

/* What a round adds to the committed tokens: the pending one, or not, and some others. */
struct added {
    int32_t kept;          /* committed tokens that stay */
    int32_t with_pending;  /* 0 or 1 */
    const int32_t *tokens; /* [count] */
    int32_t count;
    int32_t pending; /* behind all that */
};

/* 1 and *ret_added when the answer is one that the question can have. */
static int is_answer(const struct tv_client_session *session, const struct tv_client_ask *ask,
                     const struct tv_client_round *round, struct added *ret_added)
{
    const struct tv_client_state *state = &session->state;
    struct added added = {.kept = state->committed_len, .with_pending = 1};
    if (round->token_count > 0) {
        added.tokens = round->tokens;
        added.count = round->token_count - 1;
        added.pending = round->tokens[added.count];
    }
    switch (ask->kind) {
    case TV_CLIENT_VERIFY:
        if (!is_path(round, ask)) {
            return 0;
        }
        break;
    case TV_CLIENT_DECODE:
        if (round->token_count > ask->tokens_max) {
            return 0;
        }
        break;
    case TV_CLIENT_EXTEND:
        if (round->token_count != 1) {
            return 0;
        }
        added.with_pending = ask->keep_pending;
        added.tokens = ask->tokens;
        added.count = ask->count;
        break;
    case TV_CLIENT_ROLLBACK:
        added.kept = ask->len;
        added.with_pending = 0;
        added.pending = ask->pending >= 0                 ? ask->pending
                        : ask->len < state->committed_len ? session->tokens[ask->len]
                                                          : state->pending;
        break;
    }
    *ret_added = added;
    return 1;
}

/* Hold the answer against the session, then move on. 0; -EBADMSG; -ENOMEM. */
static int take(struct tv_client_session *session, const struct tv_client_answer *answer,
                const struct tv_client_ask *ask, const struct tv_client_round *round)
{
    struct tv_client_state *state = &session->state;
    struct tv_client_digest chain = session->chain;
    struct tv_client_progress progress;
    struct added added;
    int32_t seq;
    char text[33];
    const struct tv_json *doc = tv_client_json(answer);
    const struct tv_json_value *root = tv_json_root(doc);
    if (tv_client_read_progress(doc, root, &progress) != 0 ||
        tv_client_get_int32(doc, root, "seq", &seq) != 0 || seq != state->next_seq ||
        progress.next_seq != seq + 1 || !is_answer(session, ask, round, &added) ||
        progress.pending != added.pending ||
        progress.committed_len != added.kept + added.with_pending + added.count) {
        return -EBADMSG;
    }
    if (added.kept < state->committed_len) {
        (void)tv_client_digest_start(session->model.model_id, session->salt,
                                     &chain); /* as before */
        tv_client_digest_push(&chain, session->tokens, added.kept);
    }
    tv_client_digest_push(&chain, &state->pending, added.with_pending);
    tv_client_digest_push(&chain, added.tokens, added.count);
    tv_client_digest_text(&chain, text);
    if (strcmp(text, progress.digest) != 0) {
        return -EBADMSG;
    }
    if (tv_client_session_reserve(session, progress.committed_len) != 0) {
        return -ENOMEM;
    }
    if (added.with_pending) {
        session->tokens[added.kept] = state->pending;
    }
    if (added.count > 0) {
        memcpy(session->tokens + added.kept + added.with_pending, added.tokens,
               (size_t)added.count * sizeof(*added.tokens));
    }
    session->chain = chain;
    tv_client_session_follow(session, &progress);
    return 0;
}

int tv_client_round_once(struct tv_client_session *session, const struct tv_client_ask *ask,
                         struct tv_client_round *ret_round, struct tv_client_answer *ret_refusal,
                         struct tv_client_problem *ret_problem)
{
    struct tv_buf body;
    struct tv_client_answer answer = {0};
    struct tv_client_round round = {0};
    char path[TV_CLIENT_PATH_BYTES];
    int error;
    tv_buf_init(&body, TV_BODY_BYTES_LARGE_DEFAULT);
    put_round(&body, session, ask);
    if (body.failed != 0) {
        error = tv_client_buf_error(&body, ret_problem);
        goto out;
    }
    tv_client_session_path(session, paths[ask->kind], path);
    const struct tv_client_call call = {
        .method = "POST", .path = path, .body = body.data, .body_bytes = body.bytes};
    error = tv_client_exchange(session->client, &call, &answer, ret_problem);
    if (error == -EPROTO) {
        *ret_refusal = answer;
        answer = (struct tv_client_answer){0};
    }
    if (error != 0) {
        goto out;
    }
    error =
        tv_client_is_object(&answer) ? read_round(tv_client_json(&answer), ask, &round) : -EBADMSG;
    if (error == 0) {
        error = take(session, &answer, ask, &round);
    }
    if (error == -EBADMSG) {
        (void)tv_client_not_the_contract("path, tokens, number, length and digest disagree",
                                         ret_problem);
    } else if (error != 0) {
        tv_client_problem_set(ret_problem, "out of memory");
    } else {
        *ret_round = round;
        round = (struct tv_client_round){0};
    }
out:
    tv_client_round_finish(&round);
    tv_client_answer_finish(&answer);
    tv_buf_finish(&body);
    return error;
}

/* Run, for callers that may not want the round. */
static int run(struct tv_client_session *session, const struct tv_client_ask *ask,
               struct tv_client_round *ret_round, struct tv_client_problem *ret_problem)
{
    struct tv_client_round round;
    int error = tv_client_round_run(session, ask, &round, ret_problem);
    if (error == 0 && ret_round != NULL) {
        *ret_round = round;
    } else if (error == 0) {
        tv_client_round_finish(&round);
    }
    return error;
}

int tv_client_verify(struct tv_client_session *session, const int32_t *tokens,
                     const int32_t *parents, int32_t count, struct tv_client_round *ret_round,
                     struct tv_client_problem *ret_problem)
{
    const struct tv_client_ask ask = {
        .kind = TV_CLIENT_VERIFY, .tokens = tokens, .parents = parents, .count = count};
    if (count < 1 || count > TV_CLIENT_NODES_MAX) {
        tv_client_problem_set(ret_problem, "a tree has 1 to %d nodes", TV_CLIENT_NODES_MAX);
        return -EINVAL;
    }
    if (tokens[0] != session->state.pending) {
        tv_client_problem_set(ret_problem,
                              "node 0 is token %" PRId32 ", but %" PRId32 " is pending", tokens[0],
                              session->state.pending);
        ret_problem->node = 0;
        return -EINVAL;
    }
    for (int32_t i = 0; i < count; i++) {
        if (i == 0 ? parents[i] != -1 : parents[i] < 0 || parents[i] >= i) {
            tv_client_problem_set(ret_problem, "node %" PRId32 ": parent %" PRId32 "%s", i,
                                  parents[i], i == 0 ? ", not -1" : " is not before it");
            ret_problem->node = i;
            return -EINVAL;
        }
    }
    return run(session, &ask, ret_round, ret_problem);
}

int tv_client_decode(struct tv_client_session *session, int32_t tokens_max,
                     struct tv_client_round *ret_round, struct tv_client_problem *ret_problem)
{
    const struct tv_client_ask ask = {.kind = TV_CLIENT_DECODE, .tokens_max = tokens_max};
    if (tokens_max < 1 || tokens_max > TV_CLIENT_DECODE_TOKENS_MAX) {
        tv_client_problem_set(ret_problem, "decode takes 1 to %d tokens",
                              TV_CLIENT_DECODE_TOKENS_MAX);
        return -EINVAL;
    }
    return run(session, &ask, ret_round, ret_problem);
}

int tv_client_extend(struct tv_client_session *session, const int32_t *tokens, int32_t count,
                     int keep_pending, struct tv_client_round *ret_round,
                     struct tv_client_problem *ret_problem)
{
    const struct tv_client_ask ask = {.kind = TV_CLIENT_EXTEND,
                                      .tokens = tokens,
                                      .count = count,
                                      .keep_pending = keep_pending != 0};
    if (tokens == NULL || count < 1) {
        tv_client_problem_set(ret_problem, "extend takes 1 token or more");
        return -EINVAL;
    }
    return run(session, &ask, ret_round, ret_problem);
}

int tv_client_rollback(struct tv_client_session *session, int32_t len, int32_t pending,
                       struct tv_client_round *ret_round, struct tv_client_problem *ret_problem)
{
    const struct tv_client_ask ask = {
        .kind = TV_CLIENT_ROLLBACK, .len = len, .pending = pending < 0 ? -1 : pending};
    if (len < 1 || len > session->state.committed_len) {
        tv_client_problem_set(ret_problem, "rollback: a length from 1 to %" PRId32,
                              session->state.committed_len);
        return -EINVAL;
    }
    return run(session, &ask, ret_round, ret_problem);
}

void tv_client_round_finish(struct tv_client_round *round)
{
    free(round->nodes);
    free(round->tokens);
    *round = (struct tv_client_round){0};
}
