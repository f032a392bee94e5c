/*
 * response_info.c - answers about the server: model, probes, parity, and problems.
 *
 * Owns the order and presence of members; values are written by response_write.c. Parity figures
 * that are not finite are written as null: they only occur in a violation.
 */
#include "proto/response.h"

#include <math.h>
#include <string.h>

#include "proto/response_write.h"

static void write_figure(struct tv_buf *buf, double figure)
{
    if (isfinite(figure)) {
        tv_write_real(buf, figure);
    } else {
        tv_write_raw(buf, "null");
    }
}

void tv_write_kernel(struct tv_buf *buf, const struct tv_parity_kernel *kernel)
{
    tv_write_raw(buf, "{\"layers\":");
    tv_write_int(buf, kernel->layers);
    tv_write_raw(buf, ",\"max_abs\":");
    write_figure(buf, kernel->max_abs);
    tv_write_raw(buf, ",\"max_rel\":");
    write_figure(buf, kernel->max_rel);
    tv_write_raw(buf, ",\"rel_l2\":");
    write_figure(buf, kernel->rel_l2);
    tv_write_raw(buf, "}");
}

static void write_number(struct tv_buf *buf, const char *name, int64_t number)
{
    tv_write_raw(buf, ",");
    tv_write_text(buf, name);
    tv_write_raw(buf, ":");
    tv_write_int(buf, number);
}

static void write_string(struct tv_buf *buf, const char *name, const char *text)
{
    tv_write_raw(buf, ",");
    tv_write_text(buf, name);
    tv_write_raw(buf, ":");
    tv_write_text(buf, text);
}

static void write_limits(struct tv_buf *buf, const struct tv_limits_info *limits)
{
    tv_write_raw(buf, ",\"limits\":{\"max_nodes\":");
    tv_write_int(buf, limits->max_nodes);
    write_number(buf, "max_depth", limits->max_depth);
    write_number(buf, "max_pipeline", limits->max_pipeline);
    write_number(buf, "replay_window", limits->replay_window);
    write_number(buf, "body_bytes", limits->body_bytes);
    write_number(buf, "inline_bytes", limits->inline_bytes);
    write_number(buf, "fetch_bytes", limits->fetch_bytes);
    write_number(buf, "max_sessions", limits->max_sessions);
    tv_write_raw(buf, "}");
}

void tv_write_curve(struct tv_buf *buf, const int64_t (*points)[2], int32_t count)
{
    int32_t i;

    tv_write_raw(buf, "[");
    for (i = 0; i < count; i++) {
        tv_buf_printf(buf, "%s[%lld,%lld]", i > 0 ? "," : "", (long long)points[i][0],
                      (long long)points[i][1]);
    }
    tv_write_raw(buf, "]");
}

/* What a client may rely on; strings are only ever added. No path oracle has rounded products. */
static void write_features(struct tv_buf *buf, const struct tv_model_info *info)
{
    tv_write_raw(buf,
                 ",\"rules\":[\"target_walk\",\"greedy\",\"ratio_wor\",\"typical\",\"client\"],"
                 "\"features\":["
                 "\"sessions\",\"verify\",\"extend\",\"decode\",\"rollback\",\"fork\","
                 "\"renew\",\"oneshot\",\"score\",\"batch\","
                 "\"tokens_b64\",\"want.top_k\",\"want.logprobs\",\"want.logits\","
                 "\"want.logits.fetch\",\"want.shadow\",");
    if (strcmp(info->products, "exact") == 0) {
        tv_write_raw(buf, "\"parity\",");
    }
    tv_write_raw(buf, "\"prefix\",\"if\",\"alternatives\",\"commit\",\"hint\",\"events\"");
    if (info->tap_count > 0) {
        tv_write_raw(buf, ",\"want.hidden\",\"want.hidden.fetch\"");
    }
    if (info->tap_count > 0 && info->has_projection) {
        tv_write_raw(buf, ",\"want.hidden.project\"");
    }
    tv_write_raw(buf, "],\"logits\":\"raw\",\"logprobs\":\"filtered\",\"noise\":");
}

void tv_write_synthetic(struct tv_buf *buf, unsigned synthetic)
{
    int weights = (synthetic & TV_SYNTHETIC_WEIGHTS) != 0;
    int acceptance = (synthetic & TV_SYNTHETIC_ACCEPTANCE) != 0;

    tv_buf_printf(buf, "[%s%s%s]", weights ? "\"weights\"" : "", weights && acceptance ? "," : "",
                  acceptance ? "\"acceptance\"" : "");
}

void tv_encode_model(struct tv_buf *buf, const struct tv_model_info *info)
{
    tv_write_raw(buf, "{\"name\":");
    tv_write_text(buf, info->name);
    write_string(buf, "architecture", info->architecture);
    tv_write_raw(buf, ",\"model_id\":");
    tv_write_hex(buf, info->model_id, sizeof(info->model_id));
    write_string(buf, "epoch", info->epoch);
    tv_write_raw(buf, ",\"tokenizer_sha256\":");
    if (info->has_tokenizer) {
        tv_write_hex(buf, info->tokenizer_sha256, sizeof(info->tokenizer_sha256));
    } else {
        tv_write_raw(buf, "null");
    }
    write_number(buf, "vocab", info->vocab);
    write_number(buf, "layers", info->layers);
    write_number(buf, "heads", info->heads);
    write_number(buf, "max_len", info->max_len);
    write_string(buf, "backend", info->backend);
    write_string(buf, "device", info->device);
    write_string(buf, "weights_dtype", info->weights_dtype);
    write_string(buf, "kv_dtype", info->kv_dtype);
    write_string(buf, "products", info->products);
    write_number(buf, "page_size", info->page_size);
    tv_write_raw(buf, ",\"pages\":{\"total\":");
    tv_write_int(buf, info->pages_total);
    write_number(buf, "free", info->pages_free);
    write_number(buf, "cached", info->pages_cached);
    tv_write_raw(buf, "}");
    write_limits(buf, &info->limits);
    write_features(buf, info);
    tv_write_real(buf, info->noise);
    tv_write_raw(buf, ",\"verify_us\":");
    tv_write_curve(buf, info->verify_us, info->verify_us_count);
    tv_write_raw(buf, ",\"taps\":");
    tv_write_ints(buf, info->taps, info->tap_count);
    tv_write_raw(buf, ",\"synthetic\":");
    if (info->synthetic != 0) {
        tv_write_synthetic(buf, info->synthetic);
    } else {
        tv_write_raw(buf, "null");
    }
    tv_write_raw(buf, ",\"device_allocations\":");
    if (info->device_allocations >= 0) {
        tv_write_int(buf, info->device_allocations);
    } else {
        tv_write_raw(buf, "null");
    }
    tv_write_raw(buf, ",\"versions\":{\"treeverify\":");
    tv_write_text(buf, info->version);
    write_string(buf, "kernels", info->kernels_variant);
    write_string(buf, "http", info->http_library);
    tv_write_raw(buf, "}}");
}

void tv_encode_health(struct tv_buf *buf)
{
    tv_write_raw(buf, "{\"status\":\"ok\"}");
}

void tv_encode_ready(struct tv_buf *buf, int ready, const struct tv_ready_check *checks,
                     int32_t count)
{
    int32_t i;

    tv_write_raw(buf, "{\"ready\":");
    tv_write_flag(buf, ready);
    tv_write_raw(buf, ",\"checks\":[");
    for (i = 0; i < count; i++) {
        if (i > 0) {
            tv_write_raw(buf, ",");
        }
        tv_write_raw(buf, "{\"name\":");
        tv_write_text(buf, checks[i].name);
        tv_write_raw(buf, ",\"ok\":");
        tv_write_flag(buf, checks[i].ok);
        write_string(buf, "detail", checks[i].detail);
        tv_write_raw(buf, "}");
    }
    tv_write_raw(buf, "]}");
}

/* The members of a report without the braces: it stands alone or inside a problem. */
static void write_report(struct tv_buf *buf, const struct tv_parity_report *report)
{
    tv_write_raw(buf, "\"ok\":");
    tv_write_flag(buf, report->ok);
    tv_write_raw(buf, ",\"kernel\":");
    tv_write_kernel(buf, &report->kernel);
    tv_write_raw(buf, ",\"path\":{\"rows\":");
    tv_write_int(buf, report->path_rows);
    tv_write_raw(buf, ",\"logit_max_abs\":");
    write_figure(buf, report->logit_max_abs);
    write_number(buf, "argmax_equal", report->argmax_equal);
    write_number(buf, "near_ties", report->near_ties);
    tv_write_raw(buf, "},\"accepted_equal\":");
    tv_write_flag(buf, report->accepted_equal);
    tv_write_raw(buf, ",\"pending_equal\":");
    tv_write_flag(buf, report->pending_equal);
    tv_write_raw(buf, ",\"kv_equal\":");
    tv_write_flag(buf, report->kv_equal);
    tv_write_raw(buf, ",\"bounds\":{\"kernel_rel_l2\":");
    tv_write_real(buf, report->bound_kernel_rel_l2);
    tv_write_raw(buf, ",\"logit_abs\":");
    tv_write_real(buf, report->bound_logit_abs);
    tv_write_raw(buf, "}");
    write_string(buf, "oracle", report->oracle);
    write_number(buf, "took_ms", report->took_ms);
}

void tv_encode_parity_report(struct tv_buf *buf, const struct tv_parity_report *report)
{
    tv_write_raw(buf, "{");
    write_report(buf, report);
    tv_write_raw(buf, "}");
}

void tv_encode_parity_totals(struct tv_buf *buf, const struct tv_parity_totals *totals)
{
    int32_t i;

    tv_write_raw(buf, "{\"mode\":");
    tv_write_text(buf, totals->mode);
    tv_write_raw(buf, ",\"p\":");
    tv_write_real(buf, totals->p);
    tv_write_raw(buf, ",\"rounds\":{\"exact\":");
    tv_write_int(buf, totals->exact);
    write_number(buf, "near_tie", totals->near_tie);
    write_number(buf, "violation", totals->violation);
    write_number(buf, "skipped", totals->skipped);
    tv_write_raw(buf, "},\"kernel\":");
    tv_write_kernel(buf, &totals->worst);
    tv_write_raw(buf, ",\"violations\":[");
    for (i = 0; i < totals->violation_count; i++) {
        const struct tv_parity_violation *violation = &totals->violations[i];
        if (i > 0) {
            tv_write_raw(buf, ",");
        }
        tv_write_raw(buf, "{\"n\":");
        tv_write_int(buf, violation->n);
        tv_write_raw(buf, ",\"at\":");
        tv_write_time(buf, violation->at_unix_ms);
        write_string(buf, "kind", violation->kind);
        tv_write_raw(buf, ",\"reproducer\":");
        tv_write_flag(buf, violation->reproducer);
        tv_write_raw(buf, "}");
    }
    tv_write_raw(buf, "]}");
}

void tv_encode_problem(struct tv_buf *buf, const struct tv_problem *problem, const char *instance,
                       const struct tv_parity_report *report)
{
    const struct tv_code_info *info = tv_code_info(problem->code);

    tv_buf_printf(buf, "{\"type\":\"urn:treeverify:error:%s\"", info->name);
    write_string(buf, "title", info->title);
    write_number(buf, "status", info->http_status);
    write_string(buf, "detail", problem->detail);
    write_string(buf, "code", info->name);
    if (problem->pointer[0] != '\0') {
        write_string(buf, "pointer", problem->pointer);
    }
    if (problem->node >= 0) {
        write_number(buf, "node", problem->node);
    }
    tv_write_raw(buf, ",\"retryable\":");
    tv_write_flag(buf, info->retryable);
    tv_write_raw(buf, ",\"committed\":");
    tv_write_flag(buf, problem->committed);
    if (problem->state != NULL) {
        tv_write_raw(buf, ",\"session_state\":");
        tv_write_state(buf, problem->state);
    }
    if (problem->code == TV_KV_FULL) {
        write_number(buf, "pages_needed", problem->pages_needed);
        write_number(buf, "pages_free", problem->pages_free);
    }
    if (report != NULL) {
        tv_write_raw(buf, ",");
        write_report(buf, report);
    }
    write_string(buf, "instance", instance);
    tv_write_raw(buf, "}");
}
