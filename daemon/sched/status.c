/*
 * status.c - GET /v1/admin/status: the sessions of every principal, and the trees verified last.
 *
 * Keeps a ring of trees as they were judged. Refuses to show texts: of a session it tells lengths
 * and times; tokens stand in the newest trees alone, which an admin may see as he may reproducers.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "sched/job.h"
#include "sched/version.h"

enum { TOKENS, PARENTS, ACCEPTED, PARTS };

int tv_sched_trees_init(struct recent_trees *recent, int32_t nodes_max)
{
    recent->nodes_max = nodes_max;
    recent->cells =
        calloc((size_t)TV_SCHED_TREES * PARTS * (size_t)nodes_max, sizeof *recent->cells);
    return recent->cells == NULL ? -ENOMEM : 0;
}

void tv_sched_trees_finish(struct recent_trees *recent)
{
    free(recent->cells);
    recent->cells = NULL;
}

/* [nodes_max] of a place of the ring. */
static int32_t *cells_of(int32_t *cells, int32_t nodes_max, int32_t place, int part)
{
    return cells + ((size_t)place * PARTS + (size_t)part) * (size_t)nodes_max;
}

void tv_sched_trees_note(struct recent_trees *recent, const struct job *job)
{
    const struct tv_round *round = &job->round;
    if (round->kind != TV_CALL_VERIFY) {
        return;
    }
    const struct tv_tree *tree = tv_request_tree(&job->call->request, job->alternative);
    int32_t place = recent->next, accepted = round->accepted_count;
    int32_t *parts[PARTS];
    for (int i = 0; i < PARTS; i++) {
        parts[i] = cells_of(recent->cells, recent->nodes_max, place, i);
    }
    if (job->rule.rule == TV_RULE_CLIENT) {
        accepted = 0;
    }
    memcpy(parts[TOKENS], tree->tokens, (size_t)tree->count * sizeof *parts[TOKENS]);
    memcpy(parts[PARENTS], tree->parents, (size_t)tree->count * sizeof *parts[PARENTS]);
    if (accepted > 0) {
        memcpy(parts[ACCEPTED], round->accepted_nodes, (size_t)accepted * sizeof *parts[ACCEPTED]);
    }
    struct tv_status_tree *ret = &recent->trees[place];
    *ret = (struct tv_status_tree){
        .seq = round->seq,
        .at_unix_ms = tv_clock_unix_ms(),
        .rule = job->rule.rule,
        .held = job->hold,
        .count = tree->count,
        .accepted_count = accepted,
        .tokens = parts[TOKENS],
        .parents = parts[PARENTS],
        .accepted = parts[ACCEPTED],
        .pending = round->pending,
        .queue_us = job->queue_us,
        .gpu_us = job->gpu_us,
    };
    memcpy(ret->session, round->session, sizeof ret->session);
    recent->next = (place + 1) % TV_SCHED_TREES;
    recent->count += recent->count < TV_SCHED_TREES;
}

/* A copy to write from without the lock. */
struct status_copy {
    struct tv_status_session sessions[TV_SCHED_SESSIONS];
    int64_t used_us[TV_SCHED_SESSIONS]; /* of each; INT64_MAX: a call is under way */
    struct tv_status_tree trees[TV_SCHED_TREES];
    int32_t session_total, session_count, tree_count;
    int32_t cells[];
};

/* With the lock. */
static void session_copy(const struct tv_session *session, int64_t now_us,
                         struct tv_status_session *ret)
{
    int is_held = session->held.seq > 0 && !session->held.settled;
    *ret = (struct tv_status_session){
        .state = session->busy ? "busy"
                 : is_held     ? "held"
                               : "idle",
        .committed_len = session->len,
        .next_seq = session->next_seq,
        .rounds = session->verify_rounds,
        .new_tokens = session->verify_tokens,
        .idle_ms =
            session->busy || session->idle_us > now_us ? 0 : (now_us - session->idle_us) / 1000,
        .lease_expires_unix_ms = session->lease_expires_unix_ms,
        .finish = session->finish,
    };
    memcpy(ret->session, session->id, sizeof ret->session);
    memcpy(ret->principal, session->principal, sizeof ret->principal);
}

/* With the lock: those used last, in that order. */
static void sessions_copy(const struct tv_sessions *table, int64_t now_us, struct status_copy *copy)
{
    for (size_t i = 0; i < table->bucket_count; i++) {
        for (const struct tv_session *session = table->buckets[i]; session != NULL;
             session = session->next) {
            int64_t used_us = session->busy ? INT64_MAX : session->idle_us;
            int32_t at = copy->session_count;
            copy->session_total++;
            while (at > 0 && copy->used_us[at - 1] < used_us) {
                at--;
            }
            if (at == TV_SCHED_SESSIONS) {
                continue;
            }
            int32_t behind = copy->session_count - at;
            if (copy->session_count == TV_SCHED_SESSIONS) {
                behind--;
            } else {
                copy->session_count++;
            }
            memmove(copy->sessions + at + 1, copy->sessions + at,
                    (size_t)behind * sizeof copy->sessions[0]);
            memmove(copy->used_us + at + 1, copy->used_us + at,
                    (size_t)behind * sizeof copy->used_us[0]);
            copy->used_us[at] = used_us;
            session_copy(session, now_us, &copy->sessions[at]);
        }
    }
}

/* With the lock: the newest first. */
static void trees_copy(const struct recent_trees *recent, struct status_copy *copy)
{
    for (int32_t i = 0; i < recent->count; i++) {
        int32_t place = (recent->next - 1 - i + TV_SCHED_TREES) % TV_SCHED_TREES;
        const struct tv_status_tree *tree = &recent->trees[place];
        const int32_t *from[PARTS] = {tree->tokens, tree->parents, tree->accepted};
        const int32_t counts[PARTS] = {tree->count, tree->count, tree->accepted_count};
        int32_t *to[PARTS];
        for (int part = 0; part < PARTS; part++) {
            to[part] = cells_of(copy->cells, recent->nodes_max, i, part);
            memcpy(to[part], from[part], (size_t)counts[part] * sizeof *to[part]);
        }
        copy->trees[i] = *tree;
        copy->trees[i].tokens = to[TOKENS];
        copy->trees[i].parents = to[PARENTS];
        copy->trees[i].accepted = to[ACCEPTED];
    }
    copy->tree_count = recent->count;
}

void tv_sched_answer_status(struct tv_sched *sched, struct tv_call *call)
{
    struct tv_engine_facts facts;
    struct tv_buf body;
    size_t cells = (size_t)TV_SCHED_TREES * PARTS * (size_t)sched->recent.nodes_max;
    struct status_copy *copy = malloc(sizeof *copy + cells * sizeof copy->cells[0]);
    if (copy == NULL) {
        tv_sched_reply_refuse(call, TV_INTERNAL, NULL, "no memory for the status");
        return;
    }
    copy->session_total = copy->session_count = copy->tree_count = 0;
    tv_engine_facts(sched->engine, &facts);
    struct tv_status_info info = {
        .version = TV_VERSION, .model = facts.name, .at_unix_ms = tv_clock_unix_ms()};
    tv_sched_lock(sched);
    memcpy(info.epoch, sched->table.epoch, sizeof info.epoch);
    sessions_copy(&sched->table, tv_clock_us(), copy);
    trees_copy(&sched->recent, copy);
    tv_sched_unlock(sched);
    info.session_total = copy->session_total;
    info.sessions = copy->sessions;
    info.session_count = copy->session_count;
    info.trees = copy->trees;
    info.tree_count = copy->tree_count;
    tv_buf_init(&body, TV_SCHED_REPLY_BYTES);
    tv_encode_status(&body, &info);
    free(copy);
    tv_sched_reply_set(call, 200, &body);
}
