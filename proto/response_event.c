/*
 * response_event.c - what GET /v1/sessions/{id}/events sends: blocks of server-sent events.
 *
 * Each block is whole, its data one line of JSON. Only what a round of the session has done has an
 * id: its number, from which a reader may go on.
 */
#include "proto/response_write.h"

/* Wait so long before coming again, in milliseconds: for readers that do so by themselves. */
#define RETRY "retry: 2000\n"

static const char *operation_name(enum tv_call_kind kind)
{
    switch (kind) {
    case TV_CALL_EXTEND:
        return "extend";
    case TV_CALL_DECODE:
        return "decode";
    case TV_CALL_COMMIT:
        return "commit";
    case TV_CALL_ROLLBACK:
        return "rollback";
    default:
        return "verify";
    }
}

void tv_encode_event_round(struct tv_buf *buf, const struct tv_event_round *event)
{
    tv_buf_printf(buf, "id: %d\nevent: %s\ndata: {\"seq\":%d,\"op\":\"%s\"", event->seq,
                  event->kind == TV_CALL_ROLLBACK ? "rollback" : "commit", event->seq,
                  operation_name(event->kind));
    tv_write_raw(buf, ",\"new_tokens\":");
    tv_write_ints(buf, event->new_tokens, event->new_count);
    tv_buf_printf(buf, ",\"pending\":%d,\"committed_len\":%d,\"digest\":", event->pending,
                  event->committed_len);
    tv_write_hex(buf, event->digest, sizeof(event->digest));
    tv_write_finish(buf, event->finish);
    tv_write_raw(buf, "}\n\n");
}

void tv_encode_event_state(struct tv_buf *buf, int32_t id, const struct tv_session_state *state)
{
    tv_buf_printf(buf, RETRY "id: %d\nevent: state\ndata: ", id);
    tv_encode_session_state(buf, state);
    tv_write_raw(buf, "\n\n");
}

void tv_encode_event_resumed(struct tv_buf *buf, int64_t lease_expires_unix_ms)
{
    tv_write_raw(buf, RETRY);
    tv_encode_event_lease(buf, lease_expires_unix_ms);
}

void tv_encode_event_lease(struct tv_buf *buf, int64_t lease_expires_unix_ms)
{
    tv_write_raw(buf, "event: lease\ndata: {\"lease_expires_at\":");
    tv_write_time(buf, lease_expires_unix_ms);
    tv_write_raw(buf, "}\n\n");
}

void tv_encode_event_missed(struct tv_buf *buf, int32_t from, int32_t to)
{
    tv_buf_printf(buf, "id: %d\nevent: missed\ndata: {\"from\":%d,\"to\":%d}\n\n", to, from, to);
}

void tv_encode_event_parity(struct tv_buf *buf, const struct tv_parity_violation *violation)
{
    tv_buf_printf(buf, "event: parity\ndata: {\"n\":%d,\"at\":", violation->n);
    tv_write_time(buf, violation->at_unix_ms);
    tv_buf_printf(buf, ",\"kind\":\"%s\"}\n\n", violation->kind);
}

void tv_encode_event_draining(struct tv_buf *buf, int64_t deadline_unix_ms)
{
    tv_write_raw(buf, "event: draining\ndata: {\"deadline\":");
    tv_write_time(buf, deadline_unix_ms);
    tv_write_raw(buf, "}\n\n");
}

void tv_encode_event_end(struct tv_buf *buf, const char *reason)
{
    tv_buf_printf(buf, "event: end\ndata: {\"reason\":\"%s\"}\n\n", reason);
}

void tv_encode_event_quiet(struct tv_buf *buf)
{
    tv_write_raw(buf, ":\n\n");
}
