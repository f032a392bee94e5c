/*
 * proto_example_rounds.c - answers of sessions and rounds, from JSON into the structs of
 * response.h.
 */
#include "proto_examples.h"

/* Everything an answer points to while it is encoded again. */
#define CURVE_MAX 11

struct parts {
    int32_t nodes[ITEMS_MAX], tokens[ITEMS_MAX], fresh[ITEMS_MAX], rows[2][ITEMS_MAX];
    int32_t ids[ITEMS_MAX], taps[ITEMS_MAX];
    float logits[ITEMS_MAX], lse[ITEMS_MAX], logprobs[ITEMS_MAX], data[ITEMS_MAX];
    struct tv_topk_block topk;
    struct tv_logits_block block;
    struct tv_hidden_block hidden;
    struct tv_shadow_block shadow;
    struct tv_hint hint;
    int64_t curve[CURVE_MAX][2];
};

void example_read_state(const struct tv_json_value *value, struct tv_session_state *state)
{
    *state = (struct tv_session_state){.committed_len = (int32_t)number(value, "committed_len"),
                                       .pending = (int32_t)number(value, "pending"),
                                       .next_seq = (int32_t)number(value, "next_seq"),
                                       .finish = finish(value),
                                       .lease_expires_unix_ms = time_ms(value, "lease_expires_at"),
                                       .sampling = sampling(value)};
    snprintf(state->session, sizeof(state->session), "%s", text(value, "session"));
    snprintf(state->epoch, sizeof(state->epoch), "%s", text(value, "epoch"));
    hex(value, "digest", state->digest, 16);
    if (tv_json_type(need(value, "held_seq")) != TV_JSON_NULL) {
        state->held_seq = (int32_t)number(value, "held_seq");
    }
    if (tv_json_member(value, "tail") != NULL) {
        state->has_tail = 1;
        state->tail = malloc(ITEMS_MAX * sizeof(int32_t));
        assert_non_null(state->tail);
        state->tail_count = integers(value, "tail", state->tail);
        state->tail_from = (int32_t)number(value, "tail_from");
    }
}

/* Values of two or one bytes, widened. */
static void read_values(const struct tv_json_value *hidden, struct parts *parts)
{
    uint8_t bytes[ITEMS_MAX * 4] = {0};
    base64(hidden, "data_b64", bytes);
    for (int32_t i = 0; i < ITEMS_MAX; i++) {
        if (parts->hidden.dtype == TV_TENSOR_BF16) {
            uint32_t bits = (uint32_t)bytes[2 * i] << 16 | (uint32_t)bytes[2 * i + 1] << 24;
            memcpy(&parts->data[i], &bits, sizeof(bits));
        } else { /* normal values of fp8_e4m3 */
            float size = ldexpf(8.0f + (float)(bytes[i] & 7), (bytes[i] >> 3 & 15) - 10);
            parts->data[i] = bytes[i] & 128 ? -size : size;
        }
    }
}

static void read_hidden(const struct tv_json_value *hidden, struct parts *parts)
{
    int32_t shape[ITEMS_MAX], dims = integers(hidden, "shape", shape);
    parts->hidden = (struct tv_hidden_block){
        .tap_count = integers(hidden, "taps", parts->taps),
        .taps = parts->taps,
        .projected = tv_json_member(hidden, "project") != NULL,
        .row_count = integers(hidden, "rows", parts->rows[1]),
        .dim = shape[dims - 1],
        .rows = parts->rows[1],
        .data = parts->data,
    };
    while (strcmp(tv_tensor_dtype_name(parts->hidden.dtype), text(hidden, "dtype")) != 0) {
        parts->hidden.dtype++;
    }
    read_values(hidden, parts);
}

static void read_blocks(const struct tv_json_value *root, struct tv_round *round,
                        struct parts *parts)
{
    const struct tv_json_value *topk = tv_json_member(root, "topk"), *item;
    const struct tv_json_value *logits = tv_json_member(root, "logits");
    const struct tv_json_value *shadow = tv_json_member(root, "shadow");
    int32_t count = 0;

    if (topk != NULL) {
        parts->topk = (struct tv_topk_block){.k = (int32_t)number(topk, "k"),
                                             .row_count = integers(topk, "rows", parts->rows[0]),
                                             .rows = parts->rows[0],
                                             .ids = parts->ids,
                                             .logits = parts->logits,
                                             .lse = parts->lse};
        base64(topk, "ids_b64", parts->ids);
        base64(topk, "logits_b64", parts->logits);
        base64(topk, "lse_b64", parts->lse);
        round->topk = &parts->topk;
    }
    if (tv_json_member(root, "logprobs") != NULL) {
        for (item = tv_json_first(need(root, "logprobs")); item; item = tv_json_next(item)) {
            double value = -(double)INFINITY;
            (void)tv_json_double(document, item, &value); /* null stays -inf */
            parts->logprobs[count++] = (float)value;
        }
        assert_int_equal(count, round->new_count);
        round->logprobs = parts->logprobs;
    }
    if (logits != NULL) {
        int32_t shape[ITEMS_MAX];
        parts->block = (struct tv_logits_block){
            .row_count = integers(logits, "rows", parts->rows[1]), .rows = parts->rows[1]};
        assert_int_equal(integers(logits, "shape", shape), 2);
        parts->block.vocab = shape[1];
        while (strcmp(tv_tensor_dtype_name(parts->block.dtype), text(logits, "dtype")) != 0) {
            parts->block.dtype++;
        }
        if (tv_json_member(logits, "href") != NULL) {
            parts->block.href = text(logits, "href");
        } else {
            base64(logits, "data_b64", parts->data);
            parts->block.data = parts->data;
        }
        round->logits = &parts->block;
    }
    if (tv_json_member(root, "hidden") != NULL) {
        read_hidden(need(root, "hidden"), parts);
        round->hidden = &parts->hidden;
    }
    if (shadow != NULL) {
        const struct tv_json_value *kernel = need(shadow, "kernel");
        parts->shadow =
            (struct tv_shadow_block){.ran = flag(shadow, "ran"),
                                     .kernel = {.layers = (int32_t)number(kernel, "layers"),
                                                .max_abs = real(kernel, "max_abs"),
                                                .max_rel = real(kernel, "max_rel"),
                                                .rel_l2 = real(kernel, "rel_l2")},
                                     .tokens_equal = flag(shadow, "tokens_equal")};
        if (tv_json_member(shadow, "skipped") != NULL) {
            parts->shadow.skipped = text(shadow, "skipped");
        }
        round->shadow = &parts->shadow;
    }
}

static void read_hint(const struct tv_json_value *hint, struct tv_round *round, struct parts *parts)
{
    const struct tv_json_value *pair = tv_json_first(need(hint, "verify_us"));
    int32_t count = 0;
    for (; pair != NULL; pair = tv_json_next(pair)) {
        int64_t *point = parts->curve[count++];
        assert_true(count <= CURVE_MAX);
        assert_int_equal(tv_json_int(document, tv_json_first(pair), &point[0]), 0);
        assert_int_equal(tv_json_int(document, tv_json_next(tv_json_first(pair)), &point[1]), 0);
    }
    parts->hint = (struct tv_hint){.max_useful_nodes = (int32_t)number(hint, "max_useful_nodes"),
                                   .queue_depth = (int32_t)number(hint, "queue_depth"),
                                   .verify_us_count = count,
                                   .verify_us = (const int64_t(*)[2])parts->curve};
    round->hint = &parts->hint;
}

static void read_round(const struct tv_json_value *root, struct tv_round *round,
                       struct parts *parts)
{
    const struct tv_json_value *accepted = tv_json_member(root, "accepted");
    const struct tv_json_value *stats, *timing, *margin;

    round->rule = rule(root);
    if (round->kind != TV_CALL_ONESHOT) {
        round->held = strcmp(text(root, "status"), "held") == 0;
    }
    if (accepted != NULL && tv_json_type(accepted) != TV_JSON_NULL) {
        round->accepted_count = integers(accepted, "nodes", parts->nodes);
        assert_int_equal(integers(accepted, "tokens", parts->tokens), round->accepted_count);
        round->accepted_nodes = parts->nodes;
        round->accepted_tokens = parts->tokens;
    }
    if (tv_json_type(need(root, "new_tokens")) != TV_JSON_NULL) {
        round->new_count = integers(root, "new_tokens", parts->fresh);
        round->new_tokens = parts->fresh;
    }
    if (round->kind == TV_CALL_COMMIT) {
        return;
    }
    stats = need(root, "stats");
    timing = need(root, "timing_us");
    margin = need(root, "margin");
    round->has_margin = tv_json_type(need(margin, "min")) != TV_JSON_NULL;
    round->margin_min = round->has_margin ? (float)real(margin, "min") : 0;
    round->near_tie = flag(margin, "near_tie");
    read_blocks(root, round, parts);
    round->stat_nodes = (int32_t)number(stats, "nodes");
    round->stat_depth = (int32_t)number(stats, "depth");
    round->accept_len_mean = real(stats, "accept_len_mean");
    round->queue_us = number(timing, "queue");
    round->gpu_us = number(timing, "gpu");
    round->total_us = number(timing, "total");
    round->batch = (int32_t)number(timing, "batch");
    if (tv_json_member(root, "hint") != NULL) {
        read_hint(need(root, "hint"), round, parts);
    }
}

static void encode_skipped(struct tv_buf *buf, const struct tv_json_value *root)
{
    const struct tv_json_value *outcome = need(root, "outcome");
    struct tv_skipped skipped = {.seq = (int32_t)number(root, "seq"),
                                 .pending = (int32_t)number(root, "pending"),
                                 .committed_len = (int32_t)number(root, "committed_len"),
                                 .next_seq = (int32_t)number(root, "next_seq"),
                                 .finish = finish(root),
                                 .lease_expires_unix_ms = time_ms(root, "lease_expires_at")};
    struct tv_buf text;
    size_t outcome_at = 0;

    hex(root, "digest", skipped.digest, 16);
    tv_buf_init(&text, 65536);
    example_encode_round(&text, TV_CALL_VERIFY, outcome);
    skipped.outcome = text.data;
    skipped.outcome_bytes = text.bytes;
    tv_encode_skipped(buf, &skipped, &outcome_at);
    assert_memory_equal(buf->data + outcome_at, text.data, text.bytes);
    assert_int_equal(buf->data[outcome_at + text.bytes], ',');
    tv_buf_finish(&text);
}

void example_encode_round(struct tv_buf *buf, enum tv_call_kind kind,
                          const struct tv_json_value *root)
{
    struct parts parts = {0};
    struct tv_round round = {.kind = kind, .synthetic = synthetic(root)};
    int replayed = 0;

    if (tv_json_member(root, "outcome") != NULL) {
        encode_skipped(buf, root);
        return;
    }
    if (tv_json_member(root, "alternative") != NULL) {
        round.has_alternative = 1;
        round.alternative = (int32_t)number(root, "alternative");
    }
    if (tv_json_type(need(root, "pending")) != TV_JSON_NULL) {
        round.pending = (int32_t)number(root, "pending");
    }
    round.committed_len = (int32_t)number(root, "committed_len");
    hex(root, "digest", round.digest, 16);
    if (kind != TV_CALL_ONESHOT) {
        round.finish = finish(root);
        round.next_seq = (int32_t)number(root, "next_seq");
        round.lease_expires_unix_ms = time_ms(root, "lease_expires_at");
    }
    int creates = kind == TV_CALL_CREATE || kind == TV_CALL_FORK;
    if (creates || kind == TV_CALL_ONESHOT) {
        round.sampling = sampling(root);
    }
    if (creates) {
        const struct tv_json_value *caps = need(root, "limits");
        snprintf(round.session, sizeof(round.session), "%s", text(root, "session"));
        snprintf(round.epoch, sizeof(round.epoch), "%s", text(root, "epoch"));
        round.cached_len = (int32_t)number(root, "cached_len");
        round.limits =
            (struct tv_limits_info){.max_nodes = (int32_t)number(caps, "max_nodes"),
                                    .max_depth = (int32_t)number(caps, "max_depth"),
                                    .max_pipeline = (int32_t)number(caps, "max_pipeline"),
                                    .replay_window = (int32_t)number(caps, "replay_window")};
        if (tv_json_member(root, "hidden") != NULL) {
            read_hidden(need(root, "hidden"), &parts);
            round.hidden = &parts.hidden;
        }
    } else if (kind != TV_CALL_ROLLBACK) {
        read_round(root, &round, &parts);
    }
    if (!creates && kind != TV_CALL_ONESHOT) {
        round.seq = (int32_t)number(root, "seq");
        replayed = flag(root, "replayed");
    }
    tv_encode_round(buf, &round, 0);
    if (replayed) {
        assert_int_equal(tv_encode_mark_replayed(buf), 0);
    }
}
