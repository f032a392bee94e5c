/*
 * events.c - what is told to those who follow a session: GET .../events and the rounds' own words.
 *
 * A round's event is written before its commit, without the lock, and told under it, so that none
 * is committed that nobody can be told of. Refuses to let a reader hold anything: who is slow loses
 * texts, and a session does not live longer for it.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "sched/job.h"

#define EVENT_BYTES_MAX (64u << 10) /* a decode of 1,024 tokens has a fifth of it */

void tv_sched_events_watch(struct tv_sched *sched, void (*bell)(void *context), void *context)
{
    tv_sched_lock(sched);
    sched->table.bell = bell;
    sched->table.bell_context = context;
    tv_sched_unlock(sched);
}

const char *tv_sched_events_end(int why)
{
    switch ((enum tv_session_end)why) {
    case TV_SESSION_DELETED:
        return "deleted";
    case TV_SESSION_LEASE_OVER:
        return "expired";
    case TV_SESSION_CLOSED:
        break;
    }
    return "closed";
}

void tv_sched_events_leave(struct tv_reply *reply)
{
    if (reply->feed != NULL) {
        tv_feed_leave(reply->feed);
        tv_feed_unref(reply->feed);
        reply->feed = NULL;
    }
}

int tv_sched_violation(struct tv_sched *sched, struct tv_parity_violation *ret_newest)
{
    struct tv_parity_totals totals = {0};
    if (sched->shadow != NULL) {
        tv_shadow_totals(sched->shadow, &totals, ret_newest, 1);
    }
    return totals.violation_count > 0;
}

int tv_sched_events_open(struct tv_session *session, struct tv_call *call)
{
    const struct tv_request *request = &call->request;
    int32_t told = tv_session_told(session);
    struct tv_session_state state;
    struct tv_problem problem;
    struct tv_buf body;
    if (request->has_last_event && request->last_event >= session->next_seq) {
        tv_problem_set(&problem, TV_BAD_REQUEST, NULL,
                       "Last-Event-ID %d: the newest round of this session is %d",
                       request->last_event, session->next_seq - 1);
        tv_sched_refuse(call, &problem);
        return -EINVAL;
    }
    tv_session_renew(session, 0, tv_clock_us()); /* first: the stream begins with its end */
    tv_buf_init(&body, EVENT_BYTES_MAX);
    if (request->has_last_event) {
        tv_encode_event_resumed(&body, session->lease_expires_unix_ms);
    } else {
        (void)tv_session_view(session, -1, &state); /* no tail: cannot fail */
        tv_encode_event_state(&body, told, &state);
    }
    tv_sched_reply_set(call, 200, &body);
    if (call->reply.http_status != 200) {
        return -EINVAL;
    }
    call->reply.content_type = "text/event-stream";
    call->reply.feed = tv_feed_ref(session->feed);
    tv_feed_follow(session->feed, request->has_last_event ? request->last_event : told,
                   request->has_last_event, &call->reply.cursor);
    return 0;
}

/* The event as a text of its own, or NULL without memory. */
static void event_write(const struct tv_event_round *event, char **ret_text, size_t *ret_bytes)
{
    struct tv_buf text;
    tv_buf_init(&text, EVENT_BYTES_MAX);
    tv_encode_event_round(&text, event);
    if (text.failed != 0) {
        tv_buf_finish(&text);
    }
    *ret_text = text.data;
    *ret_bytes = text.bytes;
}

int tv_sched_events_round(struct job *job)
{
    const struct tv_round *round = &job->round;
    struct tv_event_round event = {.kind = round->kind,
                                   .seq = round->seq,
                                   .new_count = round->new_count,
                                   .new_tokens = round->new_tokens,
                                   .pending = round->pending,
                                   .committed_len = round->committed_len,
                                   .finish = round->finish};
    if (round->seq == 0 || job->hold) {
        return 0;
    }
    memcpy(event.digest, round->digest, sizeof event.digest);
    event_write(&event, &job->event, &job->event_bytes);
    return job->event != NULL ? 0 : -ENOMEM;
}

void tv_sched_events_settled(struct tv_session *session, const struct tv_request *request)
{
    const struct tv_session_held *held = &session->held;
    size_t count = (size_t)request->path_count, bytes = 0;
    int32_t *tokens = malloc((count + 1) * sizeof *tokens);
    struct tv_event_round event = {.kind = TV_CALL_COMMIT,
                                   .seq = held->seq,
                                   .new_count = request->path_count,
                                   .new_tokens = tokens,
                                   .pending = session->pending,
                                   .committed_len = session->len,
                                   .finish = session->finish};
    char *text = NULL;
    if (tokens != NULL) {
        for (size_t i = 0; i < count; i++) {
            tokens[i] = i + 1 < count ? held->tokens[request->path[i + 1]] : request->next;
        }
        memcpy(event.digest, session->digest.bytes, sizeof event.digest);
        event_write(&event, &text, &bytes);
        free(tokens);
    }
    tv_session_tell(session, held->seq, text, bytes);
}
