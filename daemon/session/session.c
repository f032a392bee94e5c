/*
 * session.c - one session: may this round run, what it commits, what is kept of it.
 *
 * Refuses in the order of the contract, first failure first, and changes nothing when it refuses.
 */
#include "session/session.h"

#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "session/internal.h"

void tv_session_destroy(struct tv_session *session)
{
    if (session == NULL) {
        return;
    }
    assert(session->context == NULL);
    tv_session_kept_drop(session);
    tv_session_held_finish(&session->held);
    free(session->tokens);
    free(session->borders);
    tv_feed_unref(session->feed);
    free(session);
}

int tv_session_reserve(struct tv_session *session, int32_t count)
{
    int32_t page = session->table->params.page_size;
    int32_t needed = session->len + count;
    if (needed > session->token_capacity) {
        int32_t capacity = needed + needed / 4 + 64;
        int32_t *tokens = realloc(session->tokens, (size_t)capacity * sizeof *tokens);
        if (tokens == NULL) {
            return -ENOMEM;
        }
        session->tokens = tokens;
        session->token_capacity = capacity;
    }
    if (needed / page > session->border_capacity) {
        int32_t capacity = session->token_capacity / page + 1;
        struct tv_digest *borders = realloc(session->borders, (size_t)capacity * sizeof *borders);
        if (borders == NULL) {
            return -ENOMEM;
        }
        session->borders = borders;
        session->border_capacity = capacity;
    }
    return 0;
}

void tv_session_stage(struct tv_session *session, int32_t offset, const int32_t *tokens,
                      int32_t count, struct tv_digest *digest)
{
    int32_t page = session->table->params.page_size;
    int32_t len = session->len + offset;
    assert(len + count <= session->token_capacity);
    for (int32_t i = 0; i < count; i++) {
        session->tokens[len] = tokens[i];
        tv_digest_push(digest, tokens[i]);
        len++;
        if (len % page == 0) {
            session->borders[len / page - 1] = *digest;
        }
    }
}

void tv_session_stage_known(struct tv_session *session, const int32_t *tokens, int32_t count,
                            const struct tv_digest *borders)
{
    size_t pages = (size_t)(count / session->table->params.page_size);
    assert(session->len == 0 && count <= session->token_capacity && pages > 0);
    memcpy(session->tokens, tokens, (size_t)count * sizeof *tokens);
    memcpy(session->borders, borders, pages * sizeof *borders);
}

void tv_session_commit(struct tv_session *session, int32_t count, const struct tv_digest *digest,
                       int32_t pending, enum tv_finish finish)
{
    session->len += count;
    session->digest = *digest;
    session->pending = pending;
    session->finish = finish;
}

void tv_session_at(const struct tv_session *session, int32_t len, struct tv_digest *ret_digest,
                   int32_t *ret_pending, enum tv_finish *ret_finish)
{
    int32_t page = session->table->params.page_size;
    int32_t from = len / page * page;
    assert(len >= 1 && len <= session->len);
    *ret_digest = from > 0 ? session->borders[from / page - 1] : session->root;
    for (int32_t i = from; i < len; i++) {
        tv_digest_push(ret_digest, session->tokens[i]);
    }
    *ret_pending = len < session->len ? session->tokens[len] : session->pending;
    /* reopened, but where the next token is the last that fits, it would end at once */
    *ret_finish = (int64_t)len + 1 >= session->max_len ? TV_FINISH_LENGTH : TV_FINISH_NONE;
}

void tv_session_rollback(struct tv_session *session, int32_t len, const struct tv_digest *digest,
                         int32_t pending, enum tv_finish finish)
{
    session->len = len;
    session->digest = *digest;
    session->pending = pending;
    session->finish = finish;
}

void tv_session_renew(struct tv_session *session, int32_t lease_s, int64_t now_us)
{
    if (lease_s > 0) {
        session->lease_s = lease_s;
    }
    session->lease_expires_us = now_us + (int64_t)session->lease_s * 1000000;
    session->lease_expires_unix_ms = tv_session_lease_end(session, 0);
    tv_feed_note_set(session->feed, session->lease_expires_unix_ms);
}

int64_t tv_session_lease_end(const struct tv_session *session, int32_t lease_s)
{
    return tv_clock_unix_ms() + (int64_t)(lease_s > 0 ? lease_s : session->lease_s) * 1000;
}

int tv_session_view(const struct tv_session *session, int32_t tail_from,
                    struct tv_session_state *ret_state)
{
    *ret_state = (struct tv_session_state){
        .committed_len = session->len,
        .pending = session->pending,
        .next_seq = session->next_seq,
        .finish = session->finish,
        .held_seq = session->held.settled ? 0 : session->held.seq,
        .lease_expires_unix_ms = session->lease_expires_unix_ms,
        .sampling = session->sampling,
    };
    memcpy(ret_state->session, session->id, sizeof ret_state->session);
    memcpy(ret_state->epoch, session->table->epoch, sizeof ret_state->epoch);
    memcpy(ret_state->digest, session->digest.bytes, sizeof ret_state->digest);
    if (tail_from < 0) {
        return 0;
    }
    if (session->len - tail_from > TV_TAIL_TOKENS_MAX) {
        tail_from = session->len - TV_TAIL_TOKENS_MAX;
    }
    if (tail_from > session->len) {
        tail_from = session->len;
    }
    size_t bytes = (size_t)(session->len - tail_from) * sizeof *ret_state->tail;
    ret_state->tail = malloc(bytes > 0 ? bytes : 1);
    if (ret_state->tail == NULL) {
        return -ENOMEM;
    }
    if (bytes > 0) {
        memcpy(ret_state->tail, session->tokens + tail_from, bytes);
    }
    ret_state->has_tail = 1;
    ret_state->tail_count = session->len - tail_from;
    ret_state->tail_from = tail_from;
    return 0;
}

void tv_session_explain(const struct tv_session *session, int32_t tail_from,
                        struct tv_problem *problem)
{
    struct tv_session_state *state = malloc(sizeof *state);
    if (state == NULL) {
        return; /* the code alone still says what to do */
    }
    (void)tv_session_view(session, tail_from, state); /* without memory: without tail */
    problem->state = state;
}

/* From where on the client lacks tokens. */
static int32_t tail_from(const struct tv_session *session, const struct tv_request *request)
{
    return request->len_implied ? session->len : request->expected_len;
}

static int same_end(const struct tv_guess *one, const struct tv_guess *other)
{
    return one->leaf == other->leaf && one->pending == other->pending;
}

int32_t tv_session_guess(const struct tv_session *session, const struct tv_request *request)
{
    if (!request->has_if) {
        return TV_SESSION_SOLE;
    }
    const struct tv_session_kept *before = tv_session_kept_of(session, request->if_seq);
    struct tv_guess end = {.leaf = before != NULL ? before->leaf : -1, .pending = session->pending};
    for (int32_t i = 0; i < request->alternative_count; i++) {
        if (same_end(&end, &request->alternatives[i].guess)) {
            return i;
        }
    }
    return request->alternative_count == 0 && same_end(&end, &request->guess) ? TV_SESSION_SOLE
                                                                              : TV_SESSION_NO_GUESS;
}

/* A round of this number is known: is this call the same one? */
static enum tv_session_verdict judge_known(const uint8_t *known, enum tv_session_verdict same,
                                           const struct tv_request *request,
                                           struct tv_problem *problem)
{
    if (memcmp(known, request->body_hash, sizeof request->body_hash) == 0) {
        return same;
    }
    if (same == TV_SESSION_JOIN && request->kind != TV_CALL_VERIFY) {
        tv_problem_set(problem, TV_SESSION_BUSY, "/seq",
                       "a conditional round waits with seq %d; it may end without effect",
                       request->seq);
    } else {
        tv_problem_set(problem, TV_SEQ_REUSED, "/seq", "seq %d was used with another body",
                       request->seq);
    }
    return TV_SESSION_REFUSED;
}

static enum tv_session_verdict judge_seq(const struct tv_session *session,
                                         const struct tv_request *request,
                                         struct tv_problem *problem)
{
    const struct tv_session_kept *kept = tv_session_kept_of(session, request->seq);
    if (kept != NULL) {
        return judge_known(kept->body_hash, TV_SESSION_REPLAY, request, problem);
    }
    if (session->running_seq > 0 && request->seq == session->running_seq) {
        return judge_known(session->running_hash, TV_SESSION_ATTACH, request, problem);
    }
    if (session->behind != NULL && request->seq == session->behind_seq) {
        return judge_known(session->behind_hash, TV_SESSION_JOIN, request, problem);
    }
    if (request->has_if && session->running_seq > 0 && request->seq == session->running_seq + 1) {
        return TV_SESSION_BEHIND;
    }
    if (request->seq < session->next_seq) {
        tv_problem_set(problem, TV_ROUND_EVICTED, "/seq",
                       "the answer of seq %d is no longer kept; next is %d", request->seq,
                       session->next_seq);
    } else if (session->busy && request->seq <= session->next_seq + (session->running_seq > 0)) {
        tv_problem_set(problem, TV_SESSION_BUSY, "/seq",
                       "another operation of this session is under way");
    } else if (request->seq > session->next_seq) {
        tv_problem_set(problem, TV_SEQ_GAP, "/seq", "seq %d, but %d is next", request->seq,
                       session->next_seq);
    } else if (request->has_if && tv_session_kept_of(session, request->if_seq) == NULL) {
        tv_problem_set(problem, TV_ROUND_EVICTED, "/if/seq",
                       "how round %d ended is no longer known", request->if_seq);
    } else {
        return tv_session_guess(session, request) == TV_SESSION_NO_GUESS ? TV_SESSION_SKIP
                                                                         : TV_SESSION_RUN;
    }
    tv_session_explain(session, tail_from(session, request), problem);
    return TV_SESSION_REFUSED;
}

/* What the call finds when it runs: the session, with the held round that it settles first. */
struct found {
    int32_t len, pending;
    struct tv_digest digest;
    enum tv_finish finish;
};

static struct found found_by(const struct tv_session *session, const struct tv_request *request)
{
    struct found found = {session->len, session->pending, session->digest, session->finish};
    if (request->kind == TV_CALL_VERIFY && tv_session_settles(session, request)) {
        tv_session_settled(session, request, &found.digest, &found.pending, &found.finish);
        found.len += request->path_count;
    }
    return found;
}

/* Does what the client believes hold? 0 or -EINVAL. */
static int judge_belief(const struct tv_session *session, const struct found *found,
                        const struct tv_request *request, const struct tv_tree *tree,
                        struct tv_problem *problem)
{
    /* what reopens it; and what a lower max_len ended over a restart has its held round settled */
    int goes_on = request->kind == TV_CALL_EXTEND || request->kind == TV_CALL_ROLLBACK ||
                  request->kind == TV_CALL_COMMIT;
    if (!goes_on && found->finish != TV_FINISH_NONE) {
        tv_problem_set(problem, TV_SESSION_FINISHED, NULL, "the session has finished: %s",
                       found->finish == TV_FINISH_STOP ? "stop" : "length");
    } else if (!request->len_implied && request->expected_len != found->len) {
        tv_problem_set(problem, TV_LENGTH_MISMATCH, "/expected_len",
                       "expected_len %d, but the committed length is %d", request->expected_len,
                       found->len);
    } else if (request->has_expected_digest && memcmp(request->expected_digest, found->digest.bytes,
                                                      sizeof found->digest.bytes) != 0) {
        tv_problem_set(problem, TV_DIGEST_MISMATCH, "/expected_digest",
                       "the committed tokens have another digest");
    } else if (request->kind == TV_CALL_VERIFY && tree->tokens[0] != found->pending) {
        tv_problem_set_node(problem, TV_PENDING_MISMATCH, "tokens", 0,
                            "node 0 is token %d, but %d is pending", tree->tokens[0],
                            found->pending);
    } else {
        return 0;
    }
    tv_session_explain(session, tail_from(session, request), problem);
    return -EINVAL;
}

static int judge_tree_room(const struct tv_session *session, int32_t len,
                           const struct tv_tree *tree, struct tv_problem *problem)
{
    int32_t limit = session->table->params.model_max_len;
    if (tree->depth < limit - len) {
        return 0;
    }
    for (int32_t i = 0; i < tree->count; i++) {
        if (tree->depths[i] >= limit - len) {
            tv_problem_set_node(problem, TV_CONTEXT_FULL, "tokens", i,
                                "node %d: position %lld, but the model ends at %d", i,
                                (long long)len + tree->depths[i], limit);
            break;
        }
    }
    return -EINVAL;
}

static int judge_room(const struct tv_session *session, int32_t len,
                      const struct tv_request *request, const struct tv_tree *tree,
                      struct tv_problem *problem)
{
    enum tv_rule rule = request->has_rule ? request->rule : session->sampling.rule;
    if (request->kind == TV_CALL_VERIFY && rule == TV_RULE_CLIENT && request->want.logprobs) {
        tv_problem_set(problem, TV_WRONG_VALUE, "/want/logprobs",
                       "nothing is drawn under rule client, so there are no new tokens");
        return -EINVAL;
    }
    if (request->kind == TV_CALL_VERIFY) {
        return judge_tree_room(session, len, tree, problem);
    }
    if (request->kind == TV_CALL_ROLLBACK && request->len > session->len) {
        tv_problem_set(problem, TV_WRONG_VALUE, "/len", "len %d, but the committed length is %d",
                       request->len, session->len);
        return -EINVAL;
    }
    if (request->kind == TV_CALL_EXTEND) {
        int64_t longer = (int64_t)len + request->token_count + (request->keep_pending != 0);
        if (longer + 1 > session->max_len) {
            tv_problem_set(problem, TV_CONTEXT_FULL, "/tokens",
                           "%lld committed tokens and the next, but the limit is %d",
                           (long long)longer, session->max_len);
            return -EINVAL;
        }
    }
    return 0;
}

enum tv_session_verdict tv_session_judge(const struct tv_session *session,
                                         const struct tv_request *request,
                                         struct tv_problem *problem)
{
    enum tv_session_verdict verdict = judge_seq(session, request, problem);
    int runs = verdict == TV_SESSION_RUN;
    if ((runs || verdict == TV_SESSION_SKIP) &&
        tv_session_judge_held(session, request, problem) != 0) {
        return TV_SESSION_REFUSED;
    }
    if (runs) {
        const struct tv_tree *tree = tv_request_tree(request, tv_session_guess(session, request));
        struct found found = found_by(session, request);
        if (judge_belief(session, &found, request, tree, problem) != 0 ||
            judge_room(session, found.len, request, tree, problem) != 0) {
            verdict = TV_SESSION_REFUSED;
        }
    }
    return verdict;
}

int tv_session_judge_tree(const struct tv_session *session, const struct tv_tree *tree,
                          struct tv_problem *problem)
{
    if (tv_session_refuse_held(session, problem)) {
        return -EINVAL;
    }
    if (tree->tokens[0] != session->pending) {
        tv_problem_set_node(problem, TV_PENDING_MISMATCH, "tokens", 0,
                            "node 0 is token %d, but %d is pending", tree->tokens[0],
                            session->pending);
        tv_session_explain(session, session->len, problem);
        return -EINVAL;
    }
    return judge_tree_room(session, session->len, tree, problem);
}
