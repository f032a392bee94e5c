/*
 * recover.c - a round with what may be needed on its way: resync, and a session made anew.
 *
 * Owns the rules of the header's "Recovery", which are those of the Python client (session.py
 * there). Nothing handed out is ever taken back or given twice; where that cannot be kept, the call
 * fails and says so.
 */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "clients/c/internal.h"

#define RECOVERIES_MAX                                                                             \
    4 /* of one call; each is a change of the server's state by somebody else                      \
       */
#define WAIT_MS 10000

static int one_of(const char *code, const char *const *codes)
{
    for (; *codes != NULL; codes++) {
        if (strcmp(code, *codes) == 0) {
            return 1;
        }
    }
    return 0;
}

static int is_elsewhere(const char *code)
{
    static const char *const codes[] = {"length-mismatch", "digest-mismatch", "pending-mismatch",
                                        "seq-gap", NULL};
    return one_of(code, codes);
}

static int is_unknown_round(const char *code)
{
    static const char *const codes[] = {"seq-reused", "round-evicted", NULL};
    return one_of(code, codes);
}

int tv_client_is_forgotten(const char *code)
{
    static const char *const codes[] = {"epoch-changed", "session-expired", "session-not-found",
                                        NULL};
    return one_of(code, codes);
}

/* An exchange of the recovery; *ret_answer is the caller's with 0 only. */
static int get(struct tv_client_session *session, const char *rest, int32_t wait_ms,
               struct tv_client_answer *ret_answer, struct tv_client_problem *ret_problem)
{
    char path[TV_CLIENT_PATH_BYTES];
    const struct tv_client_call call = {.method = "GET", .path = path, .wait_ms = wait_ms};
    struct tv_client_answer answer = {0};
    tv_client_session_path(session, rest, path);
    int error = tv_client_exchange(session->client, &call, &answer, ret_problem);
    if (error != 0) {
        tv_client_answer_finish(&answer);
        return error;
    }
    *ret_answer = answer;
    return 0;
}

/* An earlier body of this round may still run (a call that was given up): let it end. */
static int await_round(struct tv_client_session *session, struct tv_client_problem *ret_problem)
{
    char rest[64];
    struct tv_client_answer answer = {0};
    (void)snprintf(rest, sizeof(rest), "/rounds/%" PRId32 "?wait_ms=%d", session->state.next_seq,
                   WAIT_MS); /* fits */
    int error = get(session, rest, WAIT_MS, &answer, ret_problem);
    tv_client_answer_finish(&answer);
    if (error == -EPROTO && (strcmp(ret_problem->code, "round-not-found") == 0 ||
                             strcmp(ret_problem->code, "round-evicted") == 0)) {
        return 0;
    }
    return error;
}

/* The server's own state, asked for. */
static int fetch_state(struct tv_client_session *session, struct tv_client_problem *ret_problem)
{
    char rest[32];
    struct tv_client_answer answer = {0};
    (void)snprintf(rest, sizeof(rest), "?tail=%d", TV_TAIL_TOKENS_MAX); /* fits */
    int error = get(session, rest, 0, &answer, ret_problem);
    if (error != 0) {
        return error;
    }
    int adopted = tv_client_is_object(&answer)
                      ? tv_client_session_adopt(session, tv_client_json(&answer),
                                                tv_json_root(tv_client_json(&answer)))
                      : -EBADMSG;
    tv_client_answer_finish(&answer);
    if (adopted == 1) {
        return 0;
    }
    if (adopted == 0) {
        tv_client_problem_set(ret_problem, "the server's tokens are not those of this session");
        return -ENOTRECOVERABLE;
    }
    if (adopted == -ENOMEM) {
        tv_client_problem_set(ret_problem, "out of memory");
        return adopted;
    }
    return tv_client_not_the_contract("a session's state lacks a member", ret_problem);
}

/* Make the session anew from its tokens. The new one draws the same pending token (same seed, same
 * position); where a near tie went the other way the one handed out is put in its place, unless the
 * round drops it anyway. What a commit or commit_prev chose is part of those tokens. On a failure
 * the session is as before: the next call meets the same refusal and starts over, and a half-made
 * session ends with its lease. */
static int resume(struct tv_client_session *session, const struct tv_client_ask *ask,
                  struct tv_client_problem *ret_problem)
{
    struct tv_client_session next;
    struct tv_client_model model;
    struct tv_client_answer refusal = {0};
    struct tv_client_round round;
    int error = tv_client_model(session->client, &model, ret_problem);
    if (error != 0) {
        return error;
    }
    if (strcmp(model.model_id, session->model.model_id) != 0) {
        tv_client_problem_set(ret_problem, "the server has another model now: %.64s %s", model.name,
                              model.model_id);
        return -ENOTRECOVERABLE;
    }
    error = tv_client_session_copy(session, &next);
    if (error != 0) {
        tv_client_problem_set(ret_problem, "out of memory");
        return error;
    }
    next.model = model;
    error = tv_client_session_settle(&next, &ask->settling);
    if (error != 0) {
        tv_client_problem_set(ret_problem, "out of memory");
        free(next.tokens);
        return error;
    }
    const int32_t pending = next.state.pending;
    error = tv_client_session_open(&next, NULL, ret_problem);
    if (error == 0 && (ask->kind != TV_CLIENT_EXTEND || ask->keep_pending) &&
        next.state.pending != pending) {
        const struct tv_client_ask back = {
            .kind = TV_CLIENT_ROLLBACK, .len = next.state.committed_len, .pending = pending};
        error = tv_client_round_once(&next, &back, &round, &refusal, ret_problem);
        tv_client_answer_finish(&refusal);
        if (error == 0) {
            tv_client_round_finish(&round);
        }
    }
    if (error != 0) {
        free(next.tokens);
        return error;
    }
    next.state.prompt_len = session->state.prompt_len;
    next.state.resumed++;
    free(session->tokens);
    *session = next;
    return 0;
}

/* A verify whose answer never came is held: nobody can choose from it. */
static int release(struct tv_client_session *session, struct tv_client_problem *ret_problem)
{
    const struct tv_client_ask ask = {.kind = TV_CLIENT_COMMIT,
                                      .settling = {.seq = session->server_held, .next = -1}};
    struct tv_client_answer refusal = {0};
    struct tv_client_round round;
    int error = tv_client_round_once(session, &ask, &round, &refusal, ret_problem);
    tv_client_answer_finish(&refusal);
    if (error == 0) {
        tv_client_round_finish(&round);
    }
    return error;
}

/* Is this refusal one that a look at the server's state helps with? */
static int may_help(const struct tv_client_session *session, const struct tv_json *doc,
                    const struct tv_json_value *state, const char *code)
{
    int32_t held = 0;
    if (strcmp(code, "round-held") != 0) {
        return is_elsewhere(code) || strcmp(code, "epoch-changed") == 0;
    }
    return session->state.held_seq == 0 && session->unsure != 0 && state != NULL &&
           tv_client_get_int32(doc, state, "held_seq", &held) == 0 && held == session->unsure;
}

int tv_client_recover(struct tv_client_session *session, const struct tv_client_ask *ask,
                      const struct tv_client_answer *refusal, int32_t *ret_recovered,
                      struct tv_client_problem *problem)
{
    const struct tv_json *doc = tv_client_json(refusal);
    const struct tv_json_value *state =
        doc != NULL ? tv_json_member(tv_json_root(doc), "session_state") : NULL;
    int error = 0;
    if (tv_client_is_forgotten(problem->code) && state == NULL) {
        error = resume(session, ask, problem);
        if (error == 0) {
            *ret_recovered = TV_CLIENT_RESUMED;
        }
        return error;
    }
    if (is_unknown_round(problem->code)) {
        error = await_round(session, problem);
        state = NULL; /* that of the refusal is older */
    } else if (!may_help(session, doc, state, problem->code)) {
        return -EPROTO;
    }
    if (error != 0) {
        return error;
    }
    int adopted = state != NULL ? tv_client_session_adopt(session, doc, state) : 0;
    if (adopted == -ENOMEM) {
        tv_client_problem_set(problem, "out of memory");
        return adopted;
    }
    if (adopted != 1) {
        error = fetch_state(session, problem);
    }
    if (error == 0 && session->server_held != 0 && session->state.held_seq == 0 &&
        session->server_held == session->unsure) {
        error = release(session, problem);
    }
    if (error == 0) {
        *ret_recovered = TV_CLIENT_RESYNC;
    }
    return error;
}

/* The session's text, token by token. */
static int32_t token_at(const struct tv_client_session *session, int32_t at)
{
    return at < session->state.committed_len ? session->tokens[at] : session->state.pending;
}

/* The text that was handed out when the round was asked: with what its commit_prev chose. */
static int32_t text_at(const struct tv_client_session *before, const struct tv_client_ask *ask,
                       int32_t chosen, int32_t at)
{
    int32_t behind = at - before->state.committed_len;
    if (chosen == 0 || behind < 0) {
        return token_at(before, at);
    }
    return behind < chosen ? ask->settling.tokens[behind] : ask->settling.next;
}

/* How far the server is ahead of the text handed out before: tokens into *ret_round (1), or 0: the
 * round is sent again; -ESTALE, -ENOMEM. */
static int missed(const struct tv_client_session *session, const struct tv_client_ask *ask,
                  const struct tv_client_session *before, int32_t recovered,
                  struct tv_client_round *ret_round, struct tv_client_problem *ret_problem)
{
    int32_t chosen = ask->kind == TV_CLIENT_VERIFY ? ask->settling.path_count : 0;
    int32_t count = session->state.committed_len + 1;
    int32_t text_count = before->state.committed_len + chosen + 1;
    int32_t same = 0;
    if (ask->settling.seq != 0 && session->state.held_seq == ask->settling.seq) {
        return 0;
    }
    while (same < text_count && same < count &&
           token_at(session, same) == text_at(before, ask, chosen, same)) {
        same++;
    }
    int plain = ask->kind == TV_CLIENT_EXTEND || ask->kind == TV_CLIENT_ROLLBACK;
    int over = ask->kind == TV_CLIENT_COMMIT; /* it was done, or went with its session */
    if ((same == text_count && count == text_count && !over) ||
        (plain && recovered == TV_CLIENT_RESUMED)) {
        return 0;
    }
    if (same < text_count || plain) {
        tv_client_problem_set(ret_problem, "somebody else moved the session: %s",
                              plain ? "this round was not done"
                                    : "its text does not continue the one handed out");
        return -ESTALE;
    }
    int32_t *tokens = count > same ? malloc((size_t)(count - same) * sizeof(*tokens)) : NULL;
    if (count > same && tokens == NULL) {
        return -ENOMEM;
    }
    for (int32_t i = same; i < count; i++) {
        tokens[i - same] = token_at(session, i);
    }
    *ret_round =
        (struct tv_client_round){.tokens = tokens, .token_count = count - same, .guess = -1};
    return 1;
}

/* Recover from a refusal. 1: *ret_round has what was missed; 0: send the round again. */
static int step(struct tv_client_session *session, struct tv_client_ask *ask,
                const struct tv_client_answer *refusal, int32_t *recovered,
                struct tv_client_round *ret_round, struct tv_client_problem *problem)
{
    struct tv_client_session before;
    int result = tv_client_session_copy(session, &before);
    if (result == 0) {
        result = tv_client_recover(session, ask, refusal, recovered, problem);
        if (result == 0) {
            result = missed(session, ask, &before, *recovered, ret_round, problem);
            if (result != -ENOMEM && ask->kind == TV_CLIENT_VERIFY &&
                session->state.held_seq != ask->settling.seq) {
                ask->settling.seq = ask->settling.path_count = 0; /* done, or gone */
            }
        }
        if (result == -ENOMEM) { /* what was not handed out must not be passed over */
            struct tv_client_session after = *session;
            *session = before;
            before = after;
        }
        free(before.tokens);
    }
    if (result == -ENOMEM) {
        tv_client_problem_set(problem, "out of memory");
    }
    return result;
}

int tv_client_round_run(struct tv_client_session *session, struct tv_client_ask *ask,
                        struct tv_client_round *ret_round, struct tv_client_problem *ret_problem)
{
    int64_t started_us = tv_client_now_us();
    int64_t attempts = tv_client_attempts(session->client);
    int32_t recovered = TV_CLIENT_NOT_RECOVERED;
    struct tv_client_round round;
    for (int left = RECOVERIES_MAX;; left--) {
        struct tv_client_answer refusal = {0};
        int error = tv_client_round_once(session, ask, &round, &refusal, ret_problem);
        int found = error;
        if (error == -EPROTO && ret_problem->committed == 1 && ask->kind == TV_CLIENT_VERIFY &&
            ask->settling.seq > 0) { /* a commit_prev counts by itself */
            if (tv_client_session_settle(session, &ask->settling) == 0) {
                ask->settling.seq = ask->settling.path_count = 0;
            }
        }
        if (error == -EPROTO && left > 0) {
            found = step(session, ask, &refusal, &recovered, &round, ret_problem);
        }
        tv_client_answer_finish(&refusal);
        if (error == 0 || found == 1) {
            break;
        }
        if (found < 0) {
            return found;
        }
    }
    round.recovered = recovered;
    round.attempts = (int32_t)(tv_client_attempts(session->client) - attempts);
    round.rtt_us = tv_client_now_us() - started_us;
    *ret_round = round;
    return 0;
}
