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
                                    [TV_CLIENT_ROLLBACK] = "/rollback",
                                    [TV_CLIENT_COMMIT] = "/commit"};

/* Where a round begins: the session's end, or behind what its commit_prev adds. */
struct start {
    int32_t len, pending;
    struct tv_client_digest chain;
};

static struct start start_of(const struct tv_client_session *session,
                             const struct tv_client_ask *ask)
{
    const struct tv_client_settling *settling = &ask->settling;
    struct start start = {.len = session->state.committed_len,
                          .pending = session->state.pending,
                          .chain = session->chain};
    if (ask->kind == TV_CLIENT_VERIFY && settling->seq > 0 && settling->path_count > 0) {
        start.len += settling->path_count;
        start.pending = settling->next;
        tv_client_digest_push(&start.chain, settling->tokens, settling->path_count);
    }
    return start;
}

void tv_client_put_tree(struct tv_buf *body, const int32_t *tokens, const int32_t *parents,
                        int32_t count)
{
    tv_buf_printf(body, "{");
    tv_client_put_ints(body, "tokens", tokens, count);
    tv_buf_printf(body, ",");
    tv_client_put_ints(body, "parents", parents, count);
    tv_buf_printf(body, "}");
}

/* path and next, as a commit and a commit_prev have them. */
static void put_path(struct tv_buf *body, const struct tv_client_settling *settling)
{
    tv_client_put_ints(body, "path", settling->path, settling->path_count);
    if (settling->path_count > 0) {
        tv_buf_printf(body, ",\"next\":%" PRId32, settling->next);
    }
}

static void put_verify(struct tv_buf *body, const struct tv_client_ask *ask)
{
    static const char *const rows[] = {[TV_CLIENT_ROWS_STOP] = "stop",
                                       [TV_CLIENT_ROWS_PATH] = "path",
                                       [TV_CLIENT_ROWS_ALL] = "all"};
    tv_buf_printf(body, "\"tree\":");
    tv_client_put_tree(body, ask->tokens, ask->parents, ask->count);
    if (ask->rule != NULL) {
        tv_buf_printf(body, ",\"rule\":\"%s\"", ask->rule);
    }
    if (ask->holds) {
        tv_buf_printf(body, ",\"commit\":\"hold\"");
    }
    if (ask->settling.seq > 0) {
        tv_buf_printf(body, ",\"commit_prev\":{\"seq\":%" PRId32 ",", ask->settling.seq);
        put_path(body, &ask->settling);
        tv_buf_printf(body, "}");
    }
    if (ask->logits != TV_CLIENT_ROWS_NONE) {
        tv_buf_printf(body, ",\"want\":{\"logits\":{\"rows\":\"%s\",\"dtype\":\"f32\"}}",
                      rows[ask->logits]);
    }
    if (ask->deadline_ms > 0) {
        tv_buf_printf(body, ",\"deadline_ms\":%" PRId32, ask->deadline_ms);
    }
    if (ask->lease_s > 0) {
        tv_buf_printf(body, ",\"lease_s\":%" PRId32, ask->lease_s);
    }
}

static void put_round(struct tv_buf *body, const struct tv_client_session *session,
                      const struct tv_client_ask *ask)
{
    const struct tv_client_state *state = &session->state;
    tv_buf_printf(body, "{\"seq\":%" PRId32 ",\"epoch\":\"%s\",", state->next_seq, state->epoch);
    if (ask->kind != TV_CLIENT_COMMIT) {
        const struct start start = start_of(session, ask);
        char digest[33];
        tv_client_digest_text(&start.chain, digest);
        tv_buf_printf(body, "\"expected_len\":%" PRId32 ",\"expected_digest\":\"%s\",", start.len,
                      digest);
    }
    switch (ask->kind) {
    case TV_CLIENT_VERIFY:
        put_verify(body, ask);
        break;
    case TV_CLIENT_COMMIT:
        put_path(body, &ask->settling);
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

/* Is the round held, as was asked, or not? Under rule client nothing is proposed: *ret_empty. */
static int is_status(const struct tv_json_value *root, const struct tv_client_ask *ask,
                     int *ret_empty)
{
    const struct tv_json_value *accepted = tv_json_member(root, "accepted");
    char status[16] = "";
    tv_client_get_text_cut(root, "status", status, sizeof(status));
    *ret_empty = ask->holds && accepted != NULL && tv_json_type(accepted) == TV_JSON_NULL;
    return (strcmp(status, "held") == 0) == (ask->holds != 0);
}

/* The server's costs, a hint: what is no ascending list of pairs is none. */
static void read_costs(const struct tv_json *doc, const struct tv_json_value *curve,
                       struct tv_client_round *round)
{
    int32_t count = 0, before = 0;
    const struct tv_json_value *pair = tv_json_first(curve);
    for (; pair != NULL && count < TV_CLIENT_COSTS_MAX; pair = tv_json_next(pair), count++) {
        int64_t nodes, us;
        const struct tv_json_value *first = tv_json_first(pair);
        const struct tv_json_value *second = first != NULL ? tv_json_next(first) : NULL;
        if (second == NULL || tv_json_int(doc, first, &nodes) != 0 ||
            tv_json_int(doc, second, &us) != 0 || nodes <= before || nodes > TV_CLIENT_NODES_MAX ||
            us < 0) {
            return;
        }
        round->cost_nodes[count] = before = (int32_t)nodes;
        round->cost_us[count] = us;
    }
    round->cost_count = count;
}

/* Everything but the session's progress. 0; -EBADMSG; -ENOMEM; *ret_round is the caller's. */
static int read_round(const struct tv_json *doc, const struct tv_json_value *root,
                      const struct tv_client_ask *ask, struct tv_client_round *ret_round)
{
    const struct tv_json_value *accepted = tv_json_member(root, "accepted");
    const struct tv_json_value *replayed = tv_json_member(root, "replayed");
    const struct tv_json_value *times = tv_json_member(root, "timing_us");
    struct tv_client_round *round = ret_round;
    int empty;
    int error = 0;
    *round = (struct tv_client_round){.held = ask->holds, .guess = -1};
    if (!is_status(root, ask, &empty)) {
        return -EBADMSG;
    }
    if (ask->kind != TV_CLIENT_ROLLBACK && !empty) {
        error = tv_client_get_ints(doc, root, "new_tokens", &round->tokens, &round->token_count);
        if (error == 0 && round->token_count < 1 && ask->kind != TV_CLIENT_COMMIT) {
            error = -EBADMSG;
        }
    }
    if (error == 0 && (ask->kind == TV_CLIENT_VERIFY || ask->kind == TV_CLIENT_COMMIT) && !empty) {
        error = tv_client_get_ints(doc, accepted, "nodes", &round->nodes, &round->node_count);
    }
    if (error == 0) {
        error = tv_client_read_logits(doc, root, ask, round);
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
    read_costs(doc, tv_json_member(tv_json_member(root, "hint"), "verify_us"), round);
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

/* A commit's answer is what was asked for. */
static int is_settled(const struct tv_client_round *round,
                      const struct tv_client_settling *settling)
{
    int32_t count = settling->path_count;
    if (round->node_count != count || round->token_count != count) {
        return 0;
    }
    for (int32_t i = 0; i < count; i++) {
        int32_t token = i + 1 < count ? settling->tokens[i + 1] : settling->next;
        if (round->nodes[i] != settling->path[i] || round->tokens[i] != token) {
            return 0;
        }
    }
    return 1;
}

/* What a round adds to the committed tokens. */
struct added {
    int32_t kept;                    /* committed tokens that stay */
    const int32_t *settled, *tokens; /* [settled_count] first, [count] last */
    int32_t settled_count, count;
    int32_t with_pending, first_pending; /* 0 or 1: this token between the two */
    int32_t pending;                     /* behind all that */
};

/* The same of a verify: the settled path, then what the round itself accepted. */
static int is_verified(const struct tv_client_ask *ask, const struct tv_client_round *round,
                       struct added *added)
{
    if ((!ask->holds || round->token_count > 0) && !is_path(round, ask)) {
        return 0;
    }
    if (ask->settling.seq > 0) {
        added->settled = ask->settling.tokens;
        added->settled_count = ask->settling.path_count;
    }
    if (ask->holds) {
        added->with_pending = 0;
        added->count = 0;
        added->pending = added->first_pending;
    }
    return 1;
}

/* 1 and *ret_added when the answer is one that the question can have. */
static int is_answer(const struct tv_client_session *session, const struct tv_client_ask *ask,
                     const struct tv_client_round *round, struct added *ret_added)
{
    const struct tv_client_state *state = &session->state;
    struct added added = {.kept = state->committed_len,
                          .with_pending = 1,
                          .first_pending = start_of(session, ask).pending};
    if (round->token_count > 0) {
        added.tokens = round->tokens;
        added.count = round->token_count - 1;
        added.pending = round->tokens[added.count];
    }
    switch (ask->kind) {
    case TV_CLIENT_VERIFY:
        if (!is_verified(ask, round, &added)) {
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
    case TV_CLIENT_COMMIT:
        if (!is_settled(round, &ask->settling)) {
            return 0;
        }
        added.with_pending = 0;
        added.count = 0;
        added.settled = ask->settling.tokens;
        added.settled_count = ask->settling.path_count;
        added.pending = added.settled_count > 0 ? ask->settling.next : state->pending;
        break;
    }
    *ret_added = added;
    return 1;
}

/* The session with what was added: its chain is right already. 0; -ENOMEM. */
static int append(struct tv_client_session *session, const struct added *added, int32_t length)
{
    int32_t at = added->kept;
    if (tv_client_session_reserve(session, length) != 0) {
        return -ENOMEM;
    }
    if (added->settled_count > 0) {
        memcpy(session->tokens + at, added->settled,
               (size_t)added->settled_count * sizeof(*added->settled));
        at += added->settled_count;
    }
    if (added->with_pending) {
        session->tokens[at++] = added->first_pending;
    }
    if (added->count > 0) {
        memcpy(session->tokens + at, added->tokens, (size_t)added->count * sizeof(*added->tokens));
    }
    return 0;
}

/* A held round waits for its end, or there is none any more. */
static void hold(struct tv_client_session *session, const struct tv_client_ask *ask, int32_t seq)
{
    session->unsure = 0;
    session->state.held_seq = ask->holds ? seq : 0;
    if (ask->holds) {
        session->held_count = ask->count;
        memcpy(session->held_tokens, ask->tokens, (size_t)ask->count * sizeof(*ask->tokens));
        memcpy(session->held_parents, ask->parents, (size_t)ask->count * sizeof(*ask->parents));
    }
}

/* Hold the answer against the session, then move on. 0; -EBADMSG; -ENOMEM. */
static int take(struct tv_client_session *session, const struct tv_json *doc,
                const struct tv_json_value *root, const struct tv_client_ask *ask,
                const struct tv_client_round *round)
{
    struct tv_client_state *state = &session->state;
    struct tv_client_digest chain = session->chain;
    struct tv_client_progress progress;
    struct added added;
    int32_t seq;
    char text[33];
    if (tv_client_read_progress(doc, root, &progress) != 0 ||
        tv_client_get_int32(doc, root, "seq", &seq) != 0 || seq != state->next_seq ||
        progress.next_seq != seq + 1 || !is_answer(session, ask, round, &added) ||
        (!ask->holds && progress.pending != added.pending) ||
        progress.committed_len !=
            added.kept + added.settled_count + added.with_pending + added.count) {
        return -EBADMSG;
    }
    if (added.kept < state->committed_len) {
        (void)tv_client_digest_start(session->model.model_id, session->salt,
                                     &chain); /* as before */
        tv_client_digest_push(&chain, session->tokens, added.kept);
    }
    tv_client_digest_push(&chain, added.settled, added.settled_count);
    tv_client_digest_push(&chain, &added.first_pending, added.with_pending);
    tv_client_digest_push(&chain, added.tokens, added.count);
    tv_client_digest_text(&chain, text);
    if (strcmp(text, progress.digest) != 0) {
        return -EBADMSG;
    }
    if (append(session, &added, progress.committed_len) != 0) {
        return -ENOMEM;
    }
    if (ask->holds) { /* the answer's are the proposal's */
        progress.pending = added.pending;
        memcpy(progress.finish, state->finish, sizeof(progress.finish));
    }
    session->chain = chain;
    tv_client_session_follow(session, &progress);
    hold(session, ask, seq);
    return 0;
}

int tv_client_round_take(struct tv_client_session *session, const struct tv_json *doc,
                         const struct tv_json_value *object, const struct tv_client_ask *ask,
                         struct tv_client_round *ret_round, struct tv_client_problem *ret_problem)
{
    struct tv_client_round round = {0};
    int error = read_round(doc, object, ask, &round);
    if (error == 0) {
        error = take(session, doc, object, ask, &round);
    }
    if (error == 0) {
        *ret_round = round;
        return 0;
    }
    if (error == -EBADMSG) {
        (void)tv_client_not_the_contract("path, tokens, number, length and digest disagree",
                                         ret_problem);
    } else {
        tv_client_problem_set(ret_problem, "out of memory");
    }
    tv_client_round_finish(&round);
    return error;
}

int tv_client_round_once(struct tv_client_session *session, const struct tv_client_ask *ask,
                         struct tv_client_round *ret_round, struct tv_client_answer *ret_refusal,
                         struct tv_client_problem *ret_problem)
{
    struct tv_buf body;
    struct tv_client_answer answer = {0};
    char path[TV_CLIENT_PATH_BYTES];
    int error;
    tv_buf_init(&body, TV_BODY_BYTES_LARGE_DEFAULT);
    put_round(&body, session, ask);
    if (body.failed != 0) {
        error = tv_client_buf_error(&body, ret_problem);
        goto out;
    }
    if (ask->holds) {
        session->unsure = session->state.next_seq;
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
    const struct tv_json *doc = tv_client_json(&answer);
    error = tv_client_is_object(&answer)
                ? tv_client_round_take(session, doc, tv_json_root(doc), ask, ret_round, ret_problem)
                : tv_client_not_the_contract("a round without an object", ret_problem);
out:
    tv_client_answer_finish(&answer);
    tv_buf_finish(&body);
    return error;
}

void tv_client_round_finish(struct tv_client_round *round)
{
    free(round->nodes);
    free(round->tokens);
    free(round->row_nodes);
    free(round->logits);
    *round = (struct tv_client_round){0};
}
