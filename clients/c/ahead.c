/*
 * ahead.c - rounds sent ahead: one under way at the session's state, and one behind it with
 * guesses.
 *
 * Owns the two flights, each with a thread and a connection of its own, and what their answers mean
 * together. Touches the session in tv_client_receive alone. Whatever goes wrong with a flight, the
 * session's own rules of recovery take over with the same round, which the server answers once.
 */
#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "clients/c/internal.h"

#define EARLY_TRIES    50 /* of a conditional round that overtook the one it is about */
#define EARLY_PAUSE_NS 1000000

/* A tree and the end that it stands behind. */
struct tree_case {
    int32_t leaf, pending, count;
    int32_t *tokens, *parents; /* [count] each, in one piece with tokens; owned */
};

struct flight {
    struct tv_client_ahead *all;
    struct tv_client *client; /* a twin, kept for its connection; owned */
    int used;
    int32_t seq;
    int32_t case_count, right; /* right: the case that runs, when it is known; else -1 */
    struct tree_case cases[TV_CLIENT_GUESSES_MAX];
    char path[TV_CLIENT_PATH_BYTES];
    struct tv_buf body;
    pthread_t thread;
    struct tv_client_watch watch;
    int alone, failed; /* under the lock: nothing is under way before it; it has no answer */
    struct flight *before;
    /* what came; read when the thread has been joined */
    int joined, error;
    int64_t attempts, rtt_us;
    struct tv_client_answer answer;
    struct tv_client_problem problem;
};

struct tv_client_ahead {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    struct flight flights[2];
    struct flight *first, *second; /* of those; NULL: not under way */
};

static int set_up(struct tv_client_session *session)
{
    pthread_condattr_t attributes;
    struct tv_client_ahead *ahead;
    if (session->ahead != NULL) {
        return 0;
    }
    ahead = calloc(1, sizeof(*ahead));
    if (ahead == NULL || pthread_condattr_init(&attributes) != 0) {
        free(ahead);
        return -ENOMEM;
    }
    (void)pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC); /* it is there */
    int failed = pthread_mutex_init(&ahead->lock, NULL) != 0 ||
                 pthread_cond_init(&ahead->changed, &attributes) != 0;
    (void)pthread_condattr_destroy(&attributes);
    if (failed) {
        free(ahead);
        return -ENOMEM;
    }
    for (int i = 0; i < 2; i++) {
        ahead->flights[i].all = ahead;
    }
    session->ahead = ahead;
    return 0;
}

static void forget(struct flight *flight)
{
    for (int32_t i = 0; i < flight->case_count; i++) {
        free(flight->cases[i].tokens);
    }
    flight->case_count = 0;
    tv_buf_finish(&flight->body);
    tv_client_answer_finish(&flight->answer);
    flight->used = 0;
}

/* --- the thread of a flight ----------------------------------------------------------------------
 */

/* Did the round overtake the one before it, which is still under way? Then it is asked again. */
static int is_early(struct flight *flight)
{
    if (flight->error != -EPROTO || strcmp(flight->problem.code, "seq-gap") != 0) {
        return 0;
    }
    (void)pthread_mutex_lock(&flight->all->lock);
    int alone = flight->alone || (flight->before != NULL && flight->before->failed) ||
                flight->watch.give_up;
    (void)pthread_mutex_unlock(&flight->all->lock);
    return !alone;
}

static void *fly(void *user)
{
    struct flight *flight = user;
    const struct tv_client_call call = {.method = "POST",
                                        .path = flight->path,
                                        .body = flight->body.data,
                                        .body_bytes = flight->body.bytes,
                                        .watch = &flight->watch};
    int64_t started_us = tv_client_now_us();
    int64_t attempts = tv_client_attempts(flight->client);
    for (int tries = 0;; tries++) {
        const struct timespec rest = {.tv_nsec = EARLY_PAUSE_NS};
        flight->error =
            tv_client_exchange(flight->client, &call, &flight->answer, &flight->problem);
        if (tries == EARLY_TRIES || !is_early(flight)) {
            break;
        }
        tv_client_answer_finish(&flight->answer);
        (void)nanosleep(&rest, NULL); /* a shorter one does no harm */
    }
    flight->rtt_us = tv_client_now_us() - started_us;
    flight->attempts = tv_client_attempts(flight->client) - attempts;
    (void)pthread_mutex_lock(&flight->all->lock);
    flight->failed = flight->error != 0;
    flight->watch.sent = 1; /* who waits for it is not kept by a request that failed */
    (void)pthread_cond_broadcast(&flight->all->changed);
    (void)pthread_mutex_unlock(&flight->all->lock);
    return NULL;
}

/* Wait for its answer. */
static void join(struct tv_client_session *session, struct flight *flight)
{
    if (!flight->joined) {
        (void)pthread_join(flight->thread, NULL); /* of a thread that was made */
        flight->joined = 1;
        tv_client_attempts_add(session->client, flight->attempts);
    }
}

/* The flight is over for whoever is behind it. */
static void leave(struct tv_client_ahead *ahead, struct flight *behind)
{
    if (behind != NULL) {
        (void)pthread_mutex_lock(&ahead->lock);
        behind->alone = 1;
        behind->before = NULL;
        (void)pthread_mutex_unlock(&ahead->lock);
    }
}

static void give_up(struct tv_client_session *session, struct flight **flight)
{
    if (*flight == NULL) {
        return;
    }
    (void)pthread_mutex_lock(&session->ahead->lock);
    (*flight)->watch.give_up = 1;
    (void)pthread_mutex_unlock(&session->ahead->lock);
    join(session, *flight);
    forget(*flight);
    *flight = NULL;
}

/* Both, without waiting for the server. */
static void give_up_all(struct tv_client_session *session)
{
    give_up(session, &session->ahead->second);
    give_up(session, &session->ahead->first);
    session->state.under_way = 0;
}

void tv_client_ahead_end(struct tv_client_session *session)
{
    struct tv_client_ahead *ahead = session->ahead;
    if (ahead == NULL) {
        return;
    }
    give_up_all(session);
    for (int i = 0; i < 2; i++) {
        tv_client_destroy(ahead->flights[i].client);
    }
    (void)pthread_cond_destroy(&ahead->changed);
    (void)pthread_mutex_destroy(&ahead->lock);
    free(ahead);
    session->ahead = NULL;
}

int tv_client_check_idle(const struct tv_client_session *session,
                         struct tv_client_problem *ret_problem)
{
    if (session->state.under_way > 0) {
        tv_client_problem_set(ret_problem, "rounds are under way: receive them first");
        return -EBUSY;
    }
    return 0;
}

/* --- sending -------------------------------------------------------------------------------------
 */

static int add_case(struct flight *flight, const struct tv_client_guess *guess)
{
    struct tree_case *here = &flight->cases[flight->case_count];
    size_t count = (size_t)guess->count;
    *here =
        (struct tree_case){.leaf = guess->leaf, .pending = guess->pending, .count = guess->count};
    here->tokens = malloc(2 * count * sizeof(*here->tokens));
    if (here->tokens == NULL) {
        return -ENOMEM;
    }
    here->parents = here->tokens + count;
    memcpy(here->tokens, guess->tokens, count * sizeof(*here->tokens));
    memcpy(here->parents, guess->parents, count * sizeof(*here->parents));
    flight->case_count++;
    return 0;
}

/* A free flight with its client. 0; -ENOMEM. */
static int take_free(struct tv_client_session *session, struct flight **ret_flight)
{
    int error = set_up(session);
    if (error != 0) {
        return error;
    }
    struct flight *flight = &session->ahead->flights[session->ahead->flights[0].used];
    if (flight->client == NULL) {
        error = tv_client_twin(session->client, &flight->client);
        if (error != 0) {
            return error;
        }
    }
    flight->used = 1;
    flight->joined = flight->alone = flight->failed = 0;
    flight->before = NULL;
    flight->right = -1;
    flight->watch = (struct tv_client_watch){.lock = &session->ahead->lock,
                                             .changed = &session->ahead->changed};
    tv_buf_init(&flight->body, TV_BODY_BYTES_LARGE_DEFAULT);
    tv_client_session_path(session, "/verify", flight->path);
    *ret_flight = flight;
    return 0;
}

/* "seq", "epoch", and the length and digest behind the pending token and a path, if there is one.
 */
static void put_head(struct flight *flight, const struct tv_client_session *session, int32_t len,
                     const struct tv_client_digest *chain)
{
    char digest[33];
    tv_buf_printf(&flight->body, "{\"seq\":%" PRId32 ",\"epoch\":\"%s\",", flight->seq,
                  session->state.epoch);
    if (chain != NULL) {
        tv_client_digest_text(chain, digest);
        tv_buf_printf(&flight->body, "\"expected_len\":%" PRId32 ",\"expected_digest\":\"%s\",",
                      len, digest);
    }
}

/* The body is written: begin. On a failure the flight is free again. */
static int launch(struct flight *flight, struct tv_client_problem *ret_problem)
{
    int error = flight->body.failed != 0 ? tv_client_buf_error(&flight->body, ret_problem) : 0;
    if (error == 0 && pthread_create(&flight->thread, NULL, fly, flight) != 0) {
        tv_client_problem_set(ret_problem, "no thread could be made");
        error = -EAGAIN;
    }
    if (error != 0) {
        forget(flight);
    }
    return error;
}

static int out_of_memory(struct flight *flight, struct tv_client_problem *ret_problem)
{
    if (flight != NULL) {
        forget(flight);
    }
    tv_client_problem_set(ret_problem, "out of memory");
    return -ENOMEM;
}

int tv_client_send(struct tv_client_session *session, const int32_t *tokens, const int32_t *parents,
                   int32_t count, struct tv_client_problem *ret_problem)
{
    const struct tv_client_state *state = &session->state;
    const struct tv_client_guess guess = {
        .leaf = -1, .pending = -1, .tokens = tokens, .parents = parents, .count = count};
    struct flight *flight = NULL;
    int error = tv_client_check_idle(session, ret_problem);
    if (error == 0) {
        error = tv_client_check_tree(tokens, parents, count, state->pending, ret_problem);
    }
    if (error == 0 && (state->held_seq > 0 || strcmp(session->rule, "client") == 0)) {
        tv_client_problem_set(ret_problem, "held rounds are not sent ahead");
        error = -EINVAL;
    }
    if (error != 0) {
        return error;
    }
    if (take_free(session, &flight) != 0 || add_case(flight, &guess) != 0) {
        return out_of_memory(flight, ret_problem);
    }
    flight->right = 0;
    flight->alone = 1;
    flight->seq = state->next_seq;
    put_head(flight, session, state->committed_len, &session->chain);
    tv_buf_printf(&flight->body, "\"tree\":");
    tv_client_put_tree(&flight->body, tokens, parents, count);
    tv_buf_printf(&flight->body, "}");
    error = launch(flight, ret_problem);
    if (error == 0) {
        session->ahead->first = flight;
        session->state.under_way = 1;
    }
    return tv_client_end(error, ret_problem);
}

/* Tokens from below node 0 down to leaf are pushed behind the pending one: the text that the
 * guessed end stands for. Returns how many there are with it. */
static int32_t push_path(const struct tree_case *tree, int32_t leaf, struct tv_client_digest *chain)
{
    int32_t path[TV_CLIENT_NODES_MAX];
    int32_t count = 0;
    for (int32_t node = leaf; node >= 0; node = tree->parents[node]) {
        path[count++] = tree->tokens[node];
    }
    for (int32_t i = count; i > 0; i--) {
        tv_client_digest_push(chain, path + i - 1, 1);
    }
    return count;
}

static void put_guesses(struct flight *flight, const struct tv_client_session *session,
                        const struct tree_case *tree)
{
    struct tv_buf *body = &flight->body;
    const struct tree_case *only = &flight->cases[0];
    if (flight->case_count == 1) {
        struct tv_client_digest chain = session->chain;
        int32_t more = push_path(tree, only->leaf, &chain);
        put_head(flight, session, session->state.committed_len + more, &chain);
        tv_buf_printf(body,
                      "\"if\":{\"seq\":%" PRId32 ",\"leaf\":%" PRId32 ",\"pending\":%" PRId32
                      "},\"tree\":",
                      flight->seq - 1, only->leaf, only->pending);
        tv_client_put_tree(body, only->tokens, only->parents, only->count);
    } else {
        put_head(flight, session, 0, NULL);
        tv_buf_printf(body, "\"if\":{\"seq\":%" PRId32 "},\"alternatives\":[", flight->seq - 1);
        for (int32_t i = 0; i < flight->case_count; i++) {
            const struct tree_case *here = &flight->cases[i];
            tv_buf_printf(body, "%s{\"leaf\":%" PRId32 ",\"pending\":%" PRId32 ",\"tree\":",
                          i > 0 ? "," : "", here->leaf, here->pending);
            tv_client_put_tree(body, here->tokens, here->parents, here->count);
            tv_buf_printf(body, "}");
        }
        tv_buf_printf(body, "]");
    }
    tv_buf_printf(body, "}");
}

/* The request before may be on another connection: it is to arrive first. */
static void await_sent(const struct tv_client_session *session, struct flight *before)
{
    struct timespec until;
    clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_sec += 1 + tv_client_options_of(session->client)->attempt_ms / 1000;
    (void)pthread_mutex_lock(&before->all->lock);
    while (!before->watch.sent &&
           pthread_cond_timedwait(&before->all->changed, &before->all->lock, &until) == 0) {
    }
    (void)pthread_mutex_unlock(&before->all->lock);
}

static int check_guesses(const struct tv_client_session *session,
                         const struct tv_client_guess *guesses, int32_t count,
                         struct tv_client_problem *ret_problem)
{
    if (session->state.under_way != 1) {
        tv_client_problem_set(ret_problem, session->state.under_way == 0
                                               ? "no round is under way to guess about"
                                               : "two rounds are under way");
        return session->state.under_way == 0 ? -EINVAL : -EBUSY;
    }
    const struct flight *first = session->ahead->first;
    if (guesses == NULL || count < 1 || count > TV_CLIENT_GUESSES_MAX) {
        tv_client_problem_set(ret_problem, "1 to %d guesses", TV_CLIENT_GUESSES_MAX);
        return -EINVAL;
    }
    for (int32_t i = 0; i < count; i++) {
        const struct tv_client_guess *here = &guesses[i];
        if (here->leaf < 0 || here->leaf >= first->cases[first->right].count) {
            tv_client_problem_set(ret_problem, "guess %" PRId32 ": no node %" PRId32, i,
                                  here->leaf);
            return -EINVAL;
        }
        int error = tv_client_check_tree(here->tokens, here->parents, here->count, here->pending,
                                         ret_problem);
        if (error != 0) {
            return error;
        }
    }
    return 0;
}

int tv_client_send_if(struct tv_client_session *session, const struct tv_client_guess *guesses,
                      int32_t count, struct tv_client_problem *ret_problem)
{
    struct flight *flight = NULL;
    int error = check_guesses(session, guesses, count, ret_problem);
    if (error != 0) {
        return error;
    }
    struct flight *first = session->ahead->first;
    if (take_free(session, &flight) != 0) {
        return out_of_memory(flight, ret_problem);
    }
    for (int32_t i = 0; i < count; i++) {
        if (add_case(flight, &guesses[i]) != 0) {
            return out_of_memory(flight, ret_problem);
        }
    }
    flight->seq = first->seq + 1;
    flight->before = first;
    put_guesses(flight, session, &first->cases[first->right]);
    await_sent(session, first);
    error = launch(flight, ret_problem);
    if (error == 0) {
        session->ahead->second = flight;
        session->state.under_way = 2;
    }
    return tv_client_end(error, ret_problem);
}

/* --- receiving -----------------------------------------------------------------------------------
 */

/* An answer that was lost, as the skipped round behind it has it. NULL: it has none. */
static const struct tv_json_value *outcome_of(const struct flight *second, int32_t seq)
{
    int32_t found;
    if (second == NULL || second->error != 0 || !tv_client_is_object(&second->answer)) {
        return NULL;
    }
    const struct tv_json *doc = tv_client_json(&second->answer);
    const struct tv_json_value *outcome = tv_json_member(tv_json_root(doc), "outcome");
    return outcome != NULL && tv_client_get_int32(doc, outcome, "seq", &found) == 0 && found == seq
               ? outcome
               : NULL;
}

/* The first flight's end, into the session. */
static int take_first(struct tv_client_session *session, struct flight *first,
                      struct flight *second, struct tv_client_round *ret_round,
                      struct tv_client_problem *ret_problem)
{
    const struct tree_case *tree = &first->cases[first->right];
    struct tv_client_ask ask = {.kind = TV_CLIENT_VERIFY,
                                .tokens = tree->tokens,
                                .parents = tree->parents,
                                .count = tree->count};
    const struct tv_json *doc = NULL;
    const struct tv_json_value *object = NULL;
    join(session, first);
    if (first->error == 0 && tv_client_is_object(&first->answer)) {
        doc = tv_client_json(&first->answer);
        object = tv_json_root(doc);
    } else if (second != NULL) { /* it ends too, so that nothing is under way */
        join(session, second);
        object = outcome_of(second, first->seq);
        doc = object != NULL ? tv_client_json(&second->answer) : NULL;
    }
    int error = object != NULL
                    ? tv_client_round_take(session, doc, object, &ask, ret_round, ret_problem)
                    : tv_client_round_run(session, &ask, ret_round, ret_problem);
    if (error == -EBADMSG && object != NULL && first->error != 0) {
        /* of another tree: a call that was given up had used the number */
        object = NULL;
        error = tv_client_round_run(session, &ask, ret_round, ret_problem);
    }
    if (error == 0 && object != NULL) {
        ret_round->attempts = (int32_t)first->attempts;
        ret_round->rtt_us = first->rtt_us;
    }
    return error;
}

/* Which case of the second flight the round makes true; -1: none, or the text is over. */
static int32_t right_case(const struct tv_client_session *session, const struct flight *second,
                          const struct tv_client_round *round)
{
    if (round->node_count < 1 || session->state.finish[0] != '\0') {
        return -1;
    }
    for (int32_t i = 0; i < second->case_count; i++) {
        if (second->cases[i].leaf == round->nodes[round->node_count - 1] &&
            second->cases[i].pending == session->state.pending) {
            return i;
        }
    }
    return -1;
}

/* A round whose guesses were wrong used its number up, unless it never got there. 0; -EBADMSG. */
static int skip(struct tv_client_session *session, struct flight *second,
                struct tv_client_problem *ret_problem)
{
    char status[16] = "";
    int32_t length = 0;
    join(session, second);
    if (second->error != 0) {
        return 0;
    }
    const struct tv_json *doc = tv_client_json(&second->answer);
    if (tv_client_is_object(&second->answer)) {
        tv_client_get_text_cut(tv_json_root(doc), "status", status, sizeof(status));
        (void)tv_client_get_int32(doc, tv_json_root(doc), "committed_len", &length);
    }
    if (strcmp(status, "skipped") != 0 || length != session->state.committed_len) {
        return tv_client_not_the_contract("a round ran though no guess of it had held",
                                          ret_problem);
    }
    session->state.next_seq = second->seq + 1;
    return 0;
}

int tv_client_receive(struct tv_client_session *session, struct tv_client_round *ret_round,
                      struct tv_client_problem *ret_problem)
{
    struct tv_client_ahead *ahead = session->ahead;
    struct tv_client_round round;
    if (session->state.under_way == 0) {
        tv_client_problem_set(ret_problem, "nothing was sent");
        return -EINVAL;
    }
    int error = take_first(session, ahead->first, ahead->second, &round, ret_problem);
    if (error != 0) {
        give_up_all(session); /* the next call finds out what became of it */
        return error;
    }
    struct flight *second = ahead->second;
    leave(ahead, second);
    forget(ahead->first);
    ahead->first = ahead->second = NULL;
    session->state.under_way = 0;
    if (second != NULL && round.recovered == TV_CLIENT_NOT_RECOVERED) {
        round.guess = right_case(session, second, &round);
    }
    if (round.guess >= 0) {
        second->right = round.guess;
        ahead->first = second;
        session->state.under_way = 1;
    } else if (second != NULL) {
        error = round.recovered == TV_CLIENT_NOT_RECOVERED ? skip(session, second, ret_problem) : 0;
        join(session, second);
        forget(second);
    }
    if (error != 0) {
        tv_client_round_finish(&round);
        return error;
    }
    *ret_round = round;
    return tv_client_end(0, ret_problem);
}
