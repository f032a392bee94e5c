/*
 * proto_example_info.c - answers about the server, from JSON into the structs of response.h.
 */
#include "proto_examples.h"

static struct tv_parity_kernel read_kernel(const struct tv_json_value *value)
{
    double figures[3] = {(double)INFINITY, (double)INFINITY, (double)INFINITY}; /* null stays so */

    (void)tv_json_double(document, need(value, "max_abs"), &figures[0]);
    (void)tv_json_double(document, need(value, "max_rel"), &figures[1]);
    (void)tv_json_double(document, need(value, "rel_l2"), &figures[2]);
    return (struct tv_parity_kernel){(int32_t)number(value, "layers"), figures[0], figures[1],
                                     figures[2]};
}

void example_read_report(const struct tv_json_value *root, struct tv_parity_report *report)
{
    const struct tv_json_value *path = need(root, "path"), *bounds = need(root, "bounds");

    *report = (struct tv_parity_report){.ok = flag(root, "ok"),
                                        .kernel = read_kernel(need(root, "kernel")),
                                        .path_rows = (int32_t)number(path, "rows"),
                                        .argmax_equal = (int32_t)number(path, "argmax_equal"),
                                        .near_ties = (int32_t)number(path, "near_ties"),
                                        .logit_max_abs = real(path, "logit_max_abs"),
                                        .accepted_equal = flag(root, "accepted_equal"),
                                        .pending_equal = flag(root, "pending_equal"),
                                        .kv_equal = flag(root, "kv_equal"),
                                        .bound_kernel_rel_l2 = real(bounds, "kernel_rel_l2"),
                                        .bound_logit_abs = real(bounds, "logit_abs"),
                                        .oracle = text(root, "oracle"),
                                        .took_ms = number(root, "took_ms")};
}

static void encode_totals(struct tv_buf *buf, const struct tv_json_value *root)
{
    const struct tv_json_value *rounds = need(root, "rounds"), *item;
    struct tv_parity_violation violations[ITEMS_MAX];
    struct tv_parity_totals totals = {.mode = text(root, "mode"),
                                      .p = real(root, "p"),
                                      .exact = number(rounds, "exact"),
                                      .near_tie = number(rounds, "near_tie"),
                                      .violation = number(rounds, "violation"),
                                      .skipped = number(rounds, "skipped"),
                                      .worst = read_kernel(need(root, "kernel")),
                                      .violations = violations};

    for (item = tv_json_first(need(root, "violations")); item; item = tv_json_next(item)) {
        assert_true(totals.violation_count < ITEMS_MAX);
        violations[totals.violation_count++] =
            (struct tv_parity_violation){(int32_t)number(item, "n"), time_ms(item, "at"),
                                         text(item, "kind"), flag(item, "reproducer")};
    }
    tv_encode_parity_totals(buf, &totals);
}

static void encode_ready(struct tv_buf *buf, const struct tv_json_value *root)
{
    struct tv_ready_check checks[8] = {0};
    const struct tv_json_value *item;
    int32_t count = 0;

    for (item = tv_json_first(need(root, "checks")); item; item = tv_json_next(item)) {
        assert_true(count < 8);
        checks[count].name = text(item, "name");
        checks[count].ok = flag(item, "ok");
        snprintf(checks[count].detail, sizeof(checks[count].detail), "%s", text(item, "detail"));
        count++;
    }
    tv_encode_ready(buf, flag(root, "ready"), checks, count);
}

static void encode_list(struct tv_buf *buf, const struct tv_json_value *root)
{
    struct tv_session_state states[4];
    const struct tv_json_value *item;
    int32_t count = 0, i;

    for (item = tv_json_first(need(root, "sessions")); item; item = tv_json_next(item)) {
        assert_true(count < 4);
        example_read_state(item, &states[count++]);
    }
    tv_encode_session_list(buf, states, count);
    for (i = 0; i < count; i++) {
        free(states[i].tail);
    }
}

static struct tv_limits_info read_limits(const struct tv_json_value *value)
{
    return (struct tv_limits_info){.max_nodes = (int32_t)number(value, "max_nodes"),
                                   .max_depth = (int32_t)number(value, "max_depth"),
                                   .max_pipeline = (int32_t)number(value, "max_pipeline"),
                                   .replay_window = (int32_t)number(value, "replay_window"),
                                   .max_sessions = (int32_t)number(value, "max_sessions"),
                                   .body_bytes = number(value, "body_bytes"),
                                   .inline_bytes = number(value, "inline_bytes"),
                                   .fetch_bytes = number(value, "fetch_bytes")};
}

static void encode_model(struct tv_buf *buf, const struct tv_json_value *root)
{
    const struct tv_json_value *pages = need(root, "pages"), *versions = need(root, "versions");
    const struct tv_json_value *pair;
    int64_t costs[ITEMS_MAX][2];
    int32_t taps[ITEMS_MAX];
    struct tv_model_info info = {.name = text(root, "name"),
                                 .architecture = text(root, "architecture"),
                                 .backend = text(root, "backend"),
                                 .device = text(root, "device"),
                                 .weights_dtype = text(root, "weights_dtype"),
                                 .kv_dtype = text(root, "kv_dtype"),
                                 .products = text(root, "products"),
                                 .version = text(versions, "treeverify"),
                                 .kernels_variant = text(versions, "kernels"),
                                 .http_library = text(versions, "http"),
                                 .vocab = (int32_t)number(root, "vocab"),
                                 .layers = (int32_t)number(root, "layers"),
                                 .heads = (int32_t)number(root, "heads"),
                                 .max_len = (int32_t)number(root, "max_len"),
                                 .page_size = (int32_t)number(root, "page_size"),
                                 .pages_total = number(pages, "total"),
                                 .pages_free = number(pages, "free"),
                                 .pages_cached = number(pages, "cached"),
                                 .limits = read_limits(need(root, "limits")),
                                 .synthetic = synthetic(root),
                                 .device_allocations = -1,
                                 .noise = real(root, "noise"),
                                 .verify_us = (const int64_t(*)[2])costs};

    if (tv_json_type(need(root, "device_allocations")) != TV_JSON_NULL) {
        info.device_allocations = number(root, "device_allocations");
    }
    snprintf(info.epoch, sizeof(info.epoch), "%s", text(root, "epoch"));
    hex(root, "model_id", info.model_id, 32);
    if (tv_json_type(need(root, "tokenizer_sha256")) != TV_JSON_NULL) {
        info.has_tokenizer = 1;
        hex(root, "tokenizer_sha256", info.tokenizer_sha256, 32);
    }
    for (pair = tv_json_first(need(root, "verify_us")); pair; pair = tv_json_next(pair)) {
        int64_t *cost = costs[info.verify_us_count++];
        assert_int_equal(tv_json_int(document, tv_json_first(pair), &cost[0]), 0);
        assert_int_equal(tv_json_int(document, tv_json_next(tv_json_first(pair)), &cost[1]), 0);
    }
    info.taps = taps;
    info.tap_count = integers(root, "taps", taps);
    for (pair = tv_json_first(need(root, "features")); pair; pair = tv_json_next(pair)) {
        info.has_projection |= strcmp(tv_json_string(pair, NULL), "want.hidden.project") == 0;
    }
    tv_encode_model(buf, &info);
}

static void encode_scores(struct tv_buf *buf, const struct tv_json_value *root)
{
    float scores[8];
    int32_t count = 0;

    for (const struct tv_json_value *v = tv_json_first(need(root, "logprobs")); v != NULL;
         v = tv_json_next(v)) {
        double score = -INFINITY;
        assert_true(count < 8);
        (void)tv_json_double(document, v, &score); /* null stays minus infinity */
        scores[count++] = (float)score;
    }
    tv_encode_scores(buf, scores, count, synthetic(root));
}

int example_encode_info(struct tv_buf *buf, const char *method, const char *path,
                        const struct tv_json_value *root)
{
    struct tv_parity_report report;

    if (strcmp(path, "/healthz") == 0) {
        tv_encode_health(buf);
    } else if (strncmp(path, "/readyz", 7) == 0) {
        encode_ready(buf, root);
    } else if (strcmp(path, "/v1/model") == 0) {
        encode_model(buf, root);
    } else if (strcmp(path, "/v1/score") == 0) {
        encode_scores(buf, root);
    } else if (strcmp(path, "/v1/sessions") == 0 && strcmp(method, "GET") == 0) {
        encode_list(buf, root);
    } else if (strcmp(path, "/v1/parity") == 0 && strcmp(method, "GET") == 0) {
        encode_totals(buf, root);
    } else if (strcmp(path, "/v1/parity") == 0) {
        example_read_report(root, &report);
        tv_encode_parity_report(buf, &report);
    } else if (tv_json_member(root, "status") != NULL && strstr(path, "/rounds/") != NULL) {
        tv_encode_running(buf, (int32_t)number(root, "seq"));
    } else {
        return 0;
    }
    return 1;
}
