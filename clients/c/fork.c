/*
 * fork.c - a session of its own behind some of another's tokens; nothing is computed for it.
 *
 * Owns what a fork must be like: the same tokens, and the pending token that stands there. Refuses
 * any other as an answer that breaks the contract.
 */
#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "clients/c/internal.h"

/* The child as it is before the server has answered: the first len tokens and the settings. */
static int make_child(const struct tv_client_session *session, int32_t len, const char *seed,
                      int32_t lease_s, struct tv_client_session **ret_child)
{
    struct tv_client_session *child = malloc(sizeof(*child));
    if (child == NULL || tv_client_session_copy(session, child) != 0) {
        free(child);
        return -ENOMEM;
    }
    child->ahead = NULL;
    child->state.committed_len = len;
    child->state.resumed = 0;
    child->state.under_way = 0;
    if (child->state.prompt_len > len) {
        child->state.prompt_len = len;
    }
    if (lease_s > 0) {
        child->lease_s = lease_s;
    }
    if (seed != NULL && strcmp(child->rule, "greedy") != 0) {
        memcpy(child->state.seed, seed, strlen(seed) + 1); /* checked to fit */
    }
    /* the model_id was read before, so this cannot fail */
    (void)tv_client_digest_start(child->model.model_id, child->salt, &child->chain);
    tv_client_digest_push(&child->chain, child->tokens, len);
    tv_client_session_digest(child);
    *ret_child = child;
    return 0;
}

/* One exchange; *ret_refusal is set on -EPROTO and the caller's. */
static int once(struct tv_client_session *session, struct tv_client_session *child,
                const char *seed, int32_t lease_s, struct tv_client_answer *ret_refusal,
                struct tv_client_problem *ret_problem)
{
    struct tv_buf body;
    struct tv_client_answer answer = {0};
    char path[TV_CLIENT_PATH_BYTES], key[33];
    int error = tv_client_random_key(key);
    if (error != 0) {
        tv_client_problem_set(ret_problem, "no random bytes");
        return error;
    }
    tv_buf_init(&body, 1024);
    tv_buf_printf(&body, "{\"epoch\":\"%s\",\"len\":%" PRId32, session->state.epoch,
                  child->state.committed_len);
    if (seed != NULL) {
        tv_buf_printf(&body, ",\"seed\":\"%s\"", seed);
    }
    if (lease_s > 0) {
        tv_buf_printf(&body, ",\"lease_s\":%" PRId32, lease_s);
    }
    tv_buf_printf(&body, "}");
    if (body.failed != 0) {
        error = tv_client_buf_error(&body, ret_problem);
        tv_buf_finish(&body);
        return error;
    }
    tv_client_session_path(session, "/fork", path);
    const struct tv_client_call call = {
        .method = "POST", .path = path, .body = body.data, .body_bytes = body.bytes, .key = key};
    error = tv_client_exchange(session->client, &call, &answer, ret_problem);
    tv_buf_finish(&body);
    if (error == -EPROTO) {
        *ret_refusal = answer;
        return error;
    }
    int32_t pending = child->state.committed_len < session->state.committed_len
                          ? session->tokens[child->state.committed_len]
                          : session->state.pending;
    if (error == 0 &&
        (!tv_client_is_object(&answer) || tv_client_session_opened(child, &answer) != 0 ||
         child->state.pending != pending)) {
        error = tv_client_not_the_contract("the fork has other tokens than its parent has there",
                                           ret_problem);
    }
    tv_client_answer_finish(&answer);
    return error;
}

/* The session was kept over a restart: its epoch, and nothing else of what the server says of it.
 * The rest may have tokens of a lost round, which are the next round's to hand out. */
static int take_epoch(struct tv_client_session *session, const struct tv_json_value *state,
                      struct tv_client_problem *ret_problem)
{
    char epoch[sizeof(session->state.epoch)];
    if (tv_client_get_text(state, "epoch", epoch, sizeof(epoch)) != 0 ||
        strspn(epoch, "0123456789abcdef") != strlen(epoch)) {
        return tv_client_not_the_contract("a session's state without an epoch", ret_problem);
    }
    memcpy(session->state.epoch, epoch, sizeof(epoch));
    return 0;
}

/* What a refusal that names another epoch, or knows no such session, asks for. */
static int follow(struct tv_client_session *session, const struct tv_client_answer *refusal,
                  struct tv_client_problem *ret_problem)
{
    const struct tv_client_ask nothing = {.kind = TV_CLIENT_VERIFY};
    const struct tv_json *doc = tv_client_json(refusal);
    const struct tv_json_value *state =
        doc != NULL ? tv_json_member(tv_json_root(doc), "session_state") : NULL;
    int32_t recovered;
    return state != NULL ? take_epoch(session, state, ret_problem)
                         : tv_client_recover(session, &nothing, refusal, &recovered, ret_problem);
}

int tv_client_fork(struct tv_client_session *session, int32_t len, const char *seed,
                   int32_t lease_s, struct tv_client_session **ret_session,
                   struct tv_client_problem *ret_problem)
{
    struct tv_client_session *child = NULL;
    int error = tv_client_check_idle(session, ret_problem);
    if (error != 0) {
        return error;
    }
    len = len == 0 ? session->state.committed_len : len;
    if (len < 1 || len > session->state.committed_len || lease_s < 0 ||
        (seed != NULL && (seed[0] == '\0' || strlen(seed) > TV_CLIENT_SEED_DIGITS_MAX ||
                          strspn(seed, "0123456789") != strlen(seed)))) {
        tv_client_problem_set(ret_problem, "fork: length, seed or lease out of range");
        return -EINVAL;
    }
    if (make_child(session, len, seed, lease_s, &child) != 0) {
        tv_client_problem_set(ret_problem, "out of memory");
        return -ENOMEM;
    }
    for (int left = 1;; left--) { /* a session that was forgotten is followed once */
        struct tv_client_answer refusal = {0};
        error = once(session, child, seed, lease_s, &refusal, ret_problem);
        int again = 0;
        if (error == -EPROTO && left > 0 && tv_client_is_forgotten(ret_problem->code)) {
            error = follow(session, &refusal, ret_problem);
            again = error == 0;
        }
        tv_client_answer_finish(&refusal);
        if (!again) {
            break;
        }
    }
    if (error != 0) {
        tv_client_session_destroy(child);
        return error;
    }
    *ret_session = child;
    return tv_client_end(0, ret_problem);
}
