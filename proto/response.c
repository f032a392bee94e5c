/*
 * response.c - answers of the calls that change or show a session.
 *
 * Owns the order and presence of members; values are written by response_write.c.
 */
#include "proto/response.h"

#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "proto/response_write.h"

void tv_session_state_destroy(struct tv_session_state *state)
{
    if (state != NULL) {
        free(state->tail);
        free(state);
    }
}

void tv_write_sampling(struct tv_buf *buf, const struct tv_sampling_state *sampling)
{
    tv_write_raw(buf, "{\"rule\":");
    tv_write_text(buf, tv_rule_name(sampling->rule));
    tv_write_raw(buf, ",\"temperature\":");
    tv_write_real(buf, sampling->temperature);
    tv_write_raw(buf, ",\"top_k\":");
    tv_write_int(buf, sampling->top_k);
    tv_write_raw(buf, ",\"top_p\":");
    tv_write_real(buf, sampling->top_p);
    tv_write_raw(buf, ",\"min_p\":");
    tv_write_real(buf, sampling->min_p);
    tv_buf_printf(buf, ",\"seed\":\"%" PRIu64 "\"", sampling->seed);
    if (sampling->has_typical) {
        tv_write_raw(buf, ",\"typical\":{\"epsilon\":");
        tv_write_real(buf, sampling->typical_epsilon);
        tv_write_raw(buf, ",\"delta\":");
        tv_write_real(buf, sampling->typical_delta);
        tv_write_raw(buf, "}");
    }
    tv_write_raw(buf, "}");
}

void tv_write_finish(struct tv_buf *buf, enum tv_finish finish)
{
    static const char *const names[] = {NULL, "stop", "length"};

    tv_write_raw(buf, ",\"finish\":");
    tv_write_text(buf, names[finish]);
}

void tv_write_state(struct tv_buf *buf, const struct tv_session_state *state)
{
    tv_write_raw(buf, "{\"session\":");
    tv_write_text(buf, state->session);
    tv_write_raw(buf, ",\"epoch\":");
    tv_write_text(buf, state->epoch);
    tv_write_raw(buf, ",\"committed_len\":");
    tv_write_int(buf, state->committed_len);
    tv_write_raw(buf, ",\"digest\":");
    tv_write_hex(buf, state->digest, sizeof(state->digest));
    tv_write_raw(buf, ",\"pending\":");
    tv_write_int(buf, state->pending);
    tv_write_raw(buf, ",\"next_seq\":");
    tv_write_int(buf, state->next_seq);
    tv_write_finish(buf, state->finish);
    if (state->held_seq > 0) {
        tv_buf_printf(buf, ",\"held_seq\":%d,\"lease_expires_at\":", (int)state->held_seq);
    } else {
        tv_write_raw(buf, ",\"held_seq\":null,\"lease_expires_at\":");
    }
    tv_write_time(buf, state->lease_expires_unix_ms);
    tv_write_raw(buf, ",\"sampling\":");
    tv_write_sampling(buf, &state->sampling);
    if (state->has_tail) {
        tv_write_raw(buf, ",\"tail\":");
        tv_write_ints(buf, state->tail, state->tail_count);
        tv_write_raw(buf, ",\"tail_from\":");
        tv_write_int(buf, state->tail_from);
    }
    tv_write_raw(buf, "}");
}

static void write_topk(struct tv_buf *buf, const struct tv_topk_block *topk)
{
    int64_t cells = (int64_t)topk->row_count * topk->k;

    tv_write_raw(buf, ",\"topk\":{\"k\":");
    tv_write_int(buf, topk->k);
    tv_write_raw(buf, ",\"rows\":");
    tv_write_ints(buf, topk->rows, topk->row_count);
    tv_buf_printf(buf, ",\"shape\":[%d,%d],\"ids_b64\":", (int)topk->row_count, (int)topk->k);
    tv_write_base64_ints(buf, topk->ids, cells);
    tv_write_raw(buf, ",\"logits_b64\":");
    tv_write_base64_floats(buf, topk->logits, cells, TV_TENSOR_F32);
    tv_write_raw(buf, ",\"lse_b64\":");
    tv_write_base64_floats(buf, topk->lse, topk->row_count, TV_TENSOR_F32);
    tv_write_raw(buf, "}");
}

static void write_logprobs(struct tv_buf *buf, const float *logprobs, int32_t count)
{
    int32_t i;

    tv_write_raw(buf, "\"logprobs\":[");
    for (i = 0; i < count; i++) {
        if (i > 0) {
            tv_write_raw(buf, ",");
        }
        tv_write_real32(buf, logprobs[i]);
    }
    tv_write_raw(buf, "]");
}

static void write_logits(struct tv_buf *buf, const struct tv_logits_block *logits)
{
    tv_write_raw(buf, ",\"logits\":{\"rows\":");
    tv_write_ints(buf, logits->rows, logits->row_count);
    tv_buf_printf(buf, ",\"shape\":[%d,%d],\"dtype\":", (int)logits->row_count, (int)logits->vocab);
    tv_write_text(buf, tv_tensor_dtype_name(logits->dtype));
    if (logits->data != NULL) {
        tv_write_raw(buf, ",\"data_b64\":");
        tv_write_base64_floats(buf, logits->data, (int64_t)logits->row_count * logits->vocab,
                               logits->dtype);
    } else {
        tv_write_raw(buf, ",\"href\":");
        tv_write_text(buf, logits->href);
    }
    tv_write_raw(buf, "}");
}

static void write_hidden(struct tv_buf *buf, const struct tv_hidden_block *hidden)
{
    int64_t planes = hidden->projected ? 1 : hidden->tap_count;

    tv_write_raw(buf, ",\"hidden\":{\"taps\":");
    tv_write_ints(buf, hidden->taps, hidden->tap_count);
    tv_write_raw(buf, ",\"rows\":");
    tv_write_ints(buf, hidden->rows, hidden->row_count);
    if (hidden->projected) {
        tv_buf_printf(buf, ",\"project\":true,\"shape\":[%d,%d],\"dtype\":", (int)hidden->row_count,
                      (int)hidden->dim);
    } else {
        tv_buf_printf(buf, ",\"shape\":[%d,%d,%d],\"dtype\":", (int)hidden->tap_count,
                      (int)hidden->row_count, (int)hidden->dim);
    }
    tv_write_text(buf, tv_tensor_dtype_name(hidden->dtype));
    if (hidden->data != NULL) {
        tv_write_raw(buf, ",\"data_b64\":");
        tv_write_base64_floats(buf, hidden->data, planes * hidden->row_count * hidden->dim,
                               hidden->dtype);
    } else {
        tv_write_raw(buf, ",\"href\":");
        tv_write_text(buf, hidden->href);
    }
    tv_write_raw(buf, "}");
}

static void write_shadow(struct tv_buf *buf, const struct tv_shadow_block *shadow)
{
    tv_write_raw(buf, ",\"shadow\":{\"ran\":");
    tv_write_flag(buf, shadow->ran);
    if (!shadow->ran && shadow->skipped != NULL) {
        tv_write_raw(buf, ",\"skipped\":");
        tv_write_text(buf, shadow->skipped);
    }
    tv_write_raw(buf, ",\"kernel\":");
    tv_write_kernel(buf, &shadow->kernel);
    tv_write_raw(buf, ",\"tokens_equal\":");
    tv_write_flag(buf, shadow->tokens_equal);
    tv_write_raw(buf, "}");
}

static void write_wanted(struct tv_buf *buf, const struct tv_round *round)
{
    if (round->topk != NULL) {
        write_topk(buf, round->topk);
    }
    if (round->logprobs != NULL) {
        tv_write_raw(buf, ",");
        write_logprobs(buf, round->logprobs, round->new_count);
    }
    if (round->logits != NULL) {
        write_logits(buf, round->logits);
    }
    if (round->hidden != NULL) {
        write_hidden(buf, round->hidden);
    }
    if (round->shadow != NULL) {
        write_shadow(buf, round->shadow);
    }
}

static void write_stats(struct tv_buf *buf, const struct tv_round *round)
{
    tv_write_raw(buf, ",\"stats\":{\"nodes\":");
    tv_write_int(buf, round->stat_nodes);
    tv_write_raw(buf, ",\"accepted\":");
    tv_write_int(buf, round->accepted_count > 0 ? round->accepted_count - 1 : 0);
    tv_write_raw(buf, ",\"depth\":");
    tv_write_int(buf, round->stat_depth);
    tv_write_raw(buf, ",\"accept_len_mean\":");
    tv_write_real(buf, (double)llround(round->accept_len_mean * 1e3) / 1e3);
    tv_write_raw(buf, "},\"timing_us\":{\"queue\":");
    tv_write_int(buf, round->queue_us);
    tv_write_raw(buf, ",\"gpu\":");
    tv_write_int(buf, round->gpu_us);
    tv_write_raw(buf, ",\"total\":");
    tv_write_int(buf, round->total_us);
    tv_write_raw(buf, ",\"batch\":");
    tv_write_int(buf, round->batch);
    tv_write_raw(buf, "}");
}

static void write_hint(struct tv_buf *buf, const struct tv_hint *hint)
{
    tv_write_raw(buf, ",\"hint\":{\"max_useful_nodes\":");
    tv_write_int(buf, hint->max_useful_nodes);
    tv_write_raw(buf, ",\"verify_us\":");
    tv_write_curve(buf, hint->verify_us, hint->verify_us_count);
    tv_write_raw(buf, ",\"queue_depth\":");
    tv_write_int(buf, hint->queue_depth);
    tv_write_raw(buf, "}");
}

/* Only where something is: no answer of a real model has the member. */
static void write_made_up(struct tv_buf *buf, unsigned synthetic)
{
    if (synthetic != 0) {
        tv_write_raw(buf, ",\"synthetic\":");
        tv_write_synthetic(buf, synthetic);
    }
}

/* Members of verify, extend, decode and the one-shot call from "accepted" to "digest". */
static void write_outcome(struct tv_buf *buf, const struct tv_round *round)
{
    if (round->rule == TV_RULE_CLIENT && round->held) { /* nothing is proposed */
        tv_write_raw(buf, "\"accepted\":null,\"pending\":null,\"new_tokens\":null"
                          ",\"committed_len\":");
        tv_write_int(buf, round->committed_len);
        tv_write_raw(buf, ",\"digest\":");
        tv_write_hex(buf, round->digest, sizeof(round->digest));
        return;
    }
    if (round->kind == TV_CALL_COMMIT || round->kind == TV_CALL_VERIFY ||
        round->kind == TV_CALL_ONESHOT) {
        tv_write_raw(buf, "\"accepted\":{\"nodes\":");
        tv_write_ints(buf, round->accepted_nodes, round->accepted_count);
        tv_write_raw(buf, ",\"tokens\":");
        tv_write_ints(buf, round->accepted_tokens, round->accepted_count);
        tv_write_raw(buf, "},");
    }
    tv_write_raw(buf, "\"pending\":");
    tv_write_int(buf, round->pending);
    tv_write_raw(buf, ",\"new_tokens\":");
    tv_write_ints(buf, round->new_tokens, round->new_count);
    tv_write_raw(buf, ",\"committed_len\":");
    tv_write_int(buf, round->committed_len);
    tv_write_raw(buf, ",\"digest\":");
    tv_write_hex(buf, round->digest, sizeof(round->digest));
}

/* What the client decides is its own duty. */
static void write_rule(struct tv_buf *buf, const struct tv_round *round)
{
    tv_write_raw(buf, ",\"rule\":");
    tv_write_text(buf, tv_rule_name(round->rule));
    tv_write_raw(buf, ",\"lossless\":");
    tv_write_flag(buf, tv_rule_lossless(round->rule) && !round->deviates &&
                           (round->synthetic & TV_SYNTHETIC_ACCEPTANCE) == 0);
}

static void write_margin(struct tv_buf *buf, const struct tv_round *round)
{
    tv_write_raw(buf, ",\"margin\":{\"min\":");
    if (round->has_margin) {
        tv_write_real32(buf, round->margin_min);
    } else {
        tv_write_raw(buf, "null");
    }
    tv_write_raw(buf, ",\"near_tie\":");
    tv_write_flag(buf, round->near_tie);
    tv_write_raw(buf, "}");
}

static void write_create(struct tv_buf *buf, const struct tv_round *round)
{
    tv_write_raw(buf, "{\"session\":");
    tv_write_text(buf, round->session);
    tv_write_raw(buf, ",\"epoch\":");
    tv_write_text(buf, round->epoch);
    tv_write_raw(buf, ",\"next_seq\":");
    tv_write_int(buf, round->next_seq);
    tv_write_raw(buf, ",\"committed_len\":");
    tv_write_int(buf, round->committed_len);
    tv_write_raw(buf, ",\"digest\":");
    tv_write_hex(buf, round->digest, sizeof(round->digest));
    tv_write_raw(buf, ",\"pending\":");
    tv_write_int(buf, round->pending);
    tv_write_raw(buf, ",\"cached_len\":");
    tv_write_int(buf, round->cached_len);
    tv_write_finish(buf, round->finish);
    tv_write_raw(buf, ",\"sampling\":");
    tv_write_sampling(buf, &round->sampling);
    write_made_up(buf, round->synthetic);
    tv_write_raw(buf, ",\"lease_expires_at\":");
    tv_write_time(buf, round->lease_expires_unix_ms);
    if (round->hidden != NULL) {
        write_hidden(buf, round->hidden);
    }
    tv_buf_printf(
        buf,
        ",\"limits\":{\"max_nodes\":%d,\"max_depth\":%d,\"max_pipeline\":%d,\"replay_window\":%d}}",
        (int)round->limits.max_nodes, (int)round->limits.max_depth, (int)round->limits.max_pipeline,
        (int)round->limits.replay_window);
}

/* Nothing was drawn, so there is no rule and no margin. */
static void write_rollback(struct tv_buf *buf, const struct tv_round *round, int replayed)
{
    tv_write_raw(buf, "{\"seq\":");
    tv_write_int(buf, round->seq);
    tv_write_raw(buf, ",\"status\":");
    tv_write_text(buf, round->finish == TV_FINISH_NONE ? "committed" : "finished");
    tv_write_raw(buf, ",\"pending\":");
    tv_write_int(buf, round->pending);
    tv_write_raw(buf, ",\"committed_len\":");
    tv_write_int(buf, round->committed_len);
    tv_write_raw(buf, ",\"digest\":");
    tv_write_hex(buf, round->digest, sizeof(round->digest));
    tv_write_raw(buf, ",\"next_seq\":");
    tv_write_int(buf, round->next_seq);
    tv_write_finish(buf, round->finish);
    write_made_up(buf, round->synthetic);
    tv_write_raw(buf, ",\"lease_expires_at\":");
    tv_write_time(buf, round->lease_expires_unix_ms);
    tv_write_raw(buf, ",\"replayed\":");
    tv_write_flag(buf, replayed);
    tv_write_raw(buf, "}");
}

static void write_oneshot(struct tv_buf *buf, const struct tv_round *round)
{
    tv_write_raw(buf, "{");
    write_outcome(buf, round);
    write_rule(buf, round);
    write_margin(buf, round);
    tv_write_raw(buf, ",\"sampling\":");
    tv_write_sampling(buf, &round->sampling);
    write_wanted(buf, round);
    write_stats(buf, round);
    write_made_up(buf, round->synthetic);
    tv_write_raw(buf, "}");
}

void tv_encode_round(struct tv_buf *buf, const struct tv_round *round, int replayed)
{
    if (round->kind == TV_CALL_CREATE || round->kind == TV_CALL_FORK) {
        write_create(buf, round);
        return;
    }
    if (round->kind == TV_CALL_ROLLBACK) {
        write_rollback(buf, round, replayed);
        return;
    }
    if (round->kind == TV_CALL_ONESHOT) {
        write_oneshot(buf, round);
        return;
    }
    tv_write_raw(buf, "{\"seq\":");
    tv_write_int(buf, round->seq);
    tv_write_raw(buf, ",\"status\":");
    tv_write_text(buf, round->held                       ? "held"
                       : round->finish == TV_FINISH_NONE ? "committed"
                                                         : "finished");
    tv_write_raw(buf, ",");
    if (round->has_alternative) {
        tv_buf_printf(buf, "\"alternative\":%d,", (int)round->alternative);
    }
    write_outcome(buf, round);
    tv_write_raw(buf, ",\"next_seq\":");
    tv_write_int(buf, round->next_seq);
    write_rule(buf, round);
    tv_write_finish(buf, round->held ? TV_FINISH_NONE : round->finish);
    if (round->kind != TV_CALL_COMMIT) { /* which ran nothing */
        write_margin(buf, round);
        write_wanted(buf, round);
        write_stats(buf, round);
    }
    if (round->hint != NULL) {
        write_hint(buf, round->hint);
    }
    write_made_up(buf, round->synthetic);
    tv_write_raw(buf, ",\"lease_expires_at\":");
    tv_write_time(buf, round->lease_expires_unix_ms);
    tv_write_raw(buf, ",\"replayed\":");
    tv_write_flag(buf, replayed);
    tv_write_raw(buf, "}");
}

void tv_encode_skipped(struct tv_buf *buf, const struct tv_skipped *skipped, size_t *ret_outcome_at)
{
    tv_write_raw(buf, "{\"seq\":");
    tv_write_int(buf, skipped->seq);
    tv_write_raw(buf, ",\"status\":\"skipped\",\"outcome\":");
    *ret_outcome_at = buf->bytes;
    tv_buf_append(buf, skipped->outcome, skipped->outcome_bytes);
    tv_write_raw(buf, ",\"pending\":");
    tv_write_int(buf, skipped->pending);
    tv_write_raw(buf, ",\"new_tokens\":[],\"committed_len\":");
    tv_write_int(buf, skipped->committed_len);
    tv_write_raw(buf, ",\"digest\":");
    tv_write_hex(buf, skipped->digest, sizeof(skipped->digest));
    tv_write_raw(buf, ",\"next_seq\":");
    tv_write_int(buf, skipped->next_seq);
    tv_write_finish(buf, skipped->finish);
    tv_write_raw(buf, ",\"lease_expires_at\":");
    tv_write_time(buf, skipped->lease_expires_unix_ms);
    tv_write_raw(buf, ",\"replayed\":false}");
}

int tv_encode_mark_replayed(struct tv_buf *buf)
{
    static const char from[] = "\"replayed\":false}", to[] = "\"replayed\":true}";
    size_t from_bytes = sizeof(from) - 1, to_bytes = sizeof(to) - 1;
    char *at;

    if (buf->failed < 0 || buf->bytes < from_bytes) {
        return -EINVAL;
    }
    at = buf->data + buf->bytes - from_bytes;
    if (memcmp(at, from, from_bytes) != 0) {
        return -EINVAL;
    }
    memcpy(at, to, to_bytes);
    buf->bytes -= from_bytes - to_bytes;
    return 0;
}

void tv_encode_session_state(struct tv_buf *buf, const struct tv_session_state *state)
{
    tv_write_state(buf, state);
}

void tv_encode_session_list(struct tv_buf *buf, const struct tv_session_state *states,
                            int32_t count)
{
    int32_t i;

    tv_write_raw(buf, "{\"sessions\":[");
    for (i = 0; i < count; i++) {
        if (i > 0) {
            tv_write_raw(buf, ",");
        }
        tv_write_state(buf, &states[i]);
    }
    tv_write_raw(buf, "]}");
}

void tv_encode_running(struct tv_buf *buf, int32_t seq)
{
    tv_buf_printf(buf, "{\"seq\":%d,\"status\":\"running\"}", (int)seq);
}

void tv_encode_batch(struct tv_buf *buf, const struct tv_batch_answer *answers, int32_t count)
{
    int32_t i;

    tv_write_raw(buf, "{\"items\":[");
    for (i = 0; i < count; i++) {
        tv_buf_printf(buf, "%s{\"status\":%d,\"%s\":", i > 0 ? "," : "", (int)answers[i].status,
                      answers[i].status < 400 ? "body" : "problem");
        tv_buf_append(buf, answers[i].body, answers[i].bytes);
        tv_write_raw(buf, "}");
    }
    tv_write_raw(buf, "]}");
}

void tv_encode_draft(struct tv_buf *buf, const struct tv_tree *tree)
{
    int64_t cells = (int64_t)tree->count * tree->draft.width;

    if (tree->draft.width == 0) {
        return;
    }
    tv_buf_printf(buf, ",\"%s\":{\"shape\":[%d,%d],",
                  tree->draft.ids != NULL ? "q_topk" : "q_dense", (int)tree->count,
                  (int)tree->draft.width);
    if (tree->draft.ids != NULL) {
        tv_write_raw(buf, "\"ids_b64\":");
        tv_write_base64_ints(buf, tree->draft.ids, cells);
        tv_write_raw(buf, ",\"probs_b64\":");
    } else {
        tv_write_raw(buf, "\"dtype\":\"f32\",\"data_b64\":");
    }
    tv_write_base64_floats(buf, tree->draft.probs, cells, TV_TENSOR_F32);
    tv_write_raw(buf, "}");
}

void tv_encode_scores(struct tv_buf *buf, const float *logprobs, int32_t count, unsigned synthetic)
{
    tv_write_raw(buf, "{");
    write_logprobs(buf, logprobs, count);
    write_made_up(buf, synthetic);
    tv_write_raw(buf, "}");
}
