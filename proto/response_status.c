/*
 * response_status.c - the answers under /v1/admin: sessions of every principal and the trees that
 * were verified last (status), and whether the server takes new sessions (drain, undrain).
 *
 * Owns the order and presence of members; what stands in them was copied before by the caller.
 */
#include "proto/response.h"

#include "proto/response_write.h"

static void write_session(struct tv_buf *buf, const struct tv_status_session *session)
{
    tv_write_raw(buf, "{\"session\":");
    tv_write_text(buf, session->session);
    tv_write_raw(buf, ",\"principal\":");
    tv_write_text(buf, session->principal);
    tv_buf_printf(buf, ",\"state\":\"%s\"", session->state);
    tv_buf_printf(buf, ",\"committed_len\":%d,\"next_seq\":%d", (int)session->committed_len,
                  (int)session->next_seq);
    tv_buf_printf(buf, ",\"rounds\":%lld,\"new_tokens\":%lld,\"idle_ms\":%lld",
                  (long long)session->rounds, (long long)session->new_tokens,
                  (long long)session->idle_ms);
    tv_write_raw(buf, ",\"lease_expires_at\":");
    tv_write_time(buf, session->lease_expires_unix_ms);
    tv_write_finish(buf, session->finish);
    tv_write_raw(buf, "}");
}

static void write_tree(struct tv_buf *buf, const struct tv_status_tree *tree)
{
    tv_write_raw(buf, "{\"session\":");
    tv_write_text(buf, tree->session);
    tv_buf_printf(buf, ",\"seq\":%d,\"at\":", (int)tree->seq);
    tv_write_time(buf, tree->at_unix_ms);
    tv_write_raw(buf, ",\"rule\":");
    tv_write_text(buf, tv_rule_name(tree->rule));
    tv_write_raw(buf, ",\"held\":");
    tv_write_flag(buf, tree->held);
    tv_write_raw(buf, ",\"tokens\":");
    tv_write_ints(buf, tree->tokens, tree->count);
    tv_write_raw(buf, ",\"parents\":");
    tv_write_ints(buf, tree->parents, tree->count);
    tv_write_raw(buf, ",\"accepted\":");
    tv_write_ints(buf, tree->accepted, tree->accepted_count);
    tv_write_raw(buf, ",\"pending\":");
    if (tree->rule == TV_RULE_CLIENT) {
        tv_write_raw(buf, "null"); /* nothing was drawn */
    } else {
        tv_write_int(buf, tree->pending);
    }
    tv_buf_printf(buf, ",\"queue_us\":%lld,\"gpu_us\":%lld}", (long long)tree->queue_us,
                  (long long)tree->gpu_us);
}

void tv_encode_status(struct tv_buf *buf, const struct tv_status_info *info)
{
    tv_write_raw(buf, "{\"version\":");
    tv_write_text(buf, info->version);
    tv_write_raw(buf, ",\"model\":");
    tv_write_text(buf, info->model);
    tv_write_raw(buf, ",\"epoch\":");
    tv_write_text(buf, info->epoch);
    tv_write_raw(buf, ",\"at\":");
    tv_write_time(buf, info->at_unix_ms);
    tv_buf_printf(buf, ",\"open_sessions\":%d,\"sessions\":[", (int)info->session_total);
    for (int32_t i = 0; i < info->session_count; i++) {
        if (i > 0) {
            tv_write_raw(buf, ",");
        }
        write_session(buf, &info->sessions[i]);
    }
    tv_write_raw(buf, "],\"trees\":[");
    for (int32_t i = 0; i < info->tree_count; i++) {
        if (i > 0) {
            tv_write_raw(buf, ",");
        }
        write_tree(buf, &info->trees[i]);
    }
    tv_write_raw(buf, "]}");
}

void tv_encode_drain(struct tv_buf *buf, int draining, int32_t sessions, int32_t in_flight)
{
    tv_write_raw(buf, "{\"draining\":");
    tv_write_flag(buf, draining);
    tv_buf_printf(buf, ",\"sessions\":%d,\"in_flight\":%d}", (int)sessions, (int)in_flight);
}
