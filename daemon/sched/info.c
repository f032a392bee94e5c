/*
 * info.c - what the server says of itself: model, probes, parity totals and reproducers.
 *
 * Touches no device; only the deep readiness check waits for the worker.
 */
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/log.h"
#include "sched/job.h"
#include "sched/version.h"

#define VIOLATIONS_MAX 32

static void answer_model(struct tv_sched *sched, struct tv_call *call)
{
    const struct tv_engine *engine = sched->engine;
    int64_t curve[TV_SCHED_CURVE_POINTS][2];
    struct tv_engine_facts facts;
    struct tv_cache_counts pages;
    struct tv_buf body;
    tv_engine_facts(engine, &facts);
    tv_engine_pages(engine, &pages);
    struct tv_model_info info = {
        .name = facts.name,
        .architecture = facts.architecture,
        .backend = sched->config->backend,
        .device = facts.variant,
        .weights_dtype = facts.weights_dtype,
        .kv_dtype = facts.kv_dtype,
        .products = facts.products,
        .layers = facts.layers,
        .heads = facts.heads,
        .pages_total = pages.total,
        .pages_free = pages.free + pages.cached, /* as in kv-full: a round can have them */
        .pages_cached = pages.cached,
        .has_tokenizer = facts.tokenizer_sha256 != NULL,
        .version = TV_VERSION,
        .kernels_variant = facts.variant,
        .http_library = sched->http_library,
        .vocab = engine->vocab,
        .max_len = engine->max_len,
        .page_size = sched->config->page_size,
        .limits = sched->limits_info,
        .synthetic = sched->synthetic,
        .device_allocations = facts.device_allocations,
        .noise = engine->noise,
        .tap_count = facts.tap_count,
        .taps = facts.taps,
        .has_projection = facts.project_dim > 0,
    };
    info.limits.max_sessions = atomic_load_explicit(&sched->max_sessions, memory_order_relaxed);
    memcpy(info.model_id, facts.model_id, sizeof info.model_id);
    if (facts.tokenizer_sha256 != NULL) {
        memcpy(info.tokenizer_sha256, facts.tokenizer_sha256, sizeof info.tokenizer_sha256);
    }
    tv_sched_lock(sched);
    memcpy(info.epoch, sched->table.epoch, sizeof info.epoch);
    info.verify_us_count = tv_sched_curve_read(sched->curve, curve);
    tv_sched_unlock(sched);
    info.verify_us = (const int64_t(*)[2])curve;
    tv_buf_init(&body, TV_SCHED_REPLY_BYTES);
    tv_encode_model(&body, &info);
    tv_sched_reply_set(call, 200, &body);
}

static void check_set(struct tv_ready_check *check, const char *name, int ok, const char *format,
                      ...) __attribute__((format(printf, 4, 5)));

static void check_set(struct tv_ready_check *check, const char *name, int ok, const char *format,
                      ...)
{
    va_list args;
    check->name = name;
    check->ok = ok;
    va_start(args, format);
    (void)vsnprintf(check->detail, sizeof check->detail, format, args); /* cut text is text */
    va_end(args);
}

int64_t tv_sched_stalled_us(struct tv_sched *sched, int64_t now_us)
{
    const struct tv_engine *engine = sched->engine;
    uint64_t steps = sched->progress_steps;
    if (sched->launch_start_us == 0) {
        return 0;
    }
    if (engine->ops->progress != NULL && engine->ops->progress(engine, &steps) &&
        steps != sched->progress_steps) {
        sched->progress_steps = steps;
        sched->progress_us = now_us;
    }
    return now_us - sched->progress_us;
}

int tv_sched_moving(struct tv_sched *sched)
{
    tv_sched_lock(sched);
    int moving =
        sched->worker_alive && tv_sched_stalled_us(sched, tv_clock_us()) <= sched->launch_us_max;
    tv_sched_unlock(sched);
    return moving;
}

int tv_sched_stuck(struct tv_sched *sched)
{
    tv_sched_lock(sched);
    int stuck =
        tv_sched_stalled_us(sched, tv_clock_us()) > TV_SCHED_STUCK_TIMES * sched->launch_us_max;
    tv_sched_unlock(sched);
    return stuck;
}

int tv_sched_ready_checks(struct tv_sched *sched, struct tv_ready_check *checks)
{
    struct tv_engine_facts facts;
    tv_engine_facts(sched->engine, &facts);
    int64_t now_us = tv_clock_us();
    int64_t age_us = sched->launch_start_us > 0 ? now_us - sched->launch_start_us : 0;
    int64_t stalled_us = tv_sched_stalled_us(sched, now_us);
    int ready = 1;
    check_set(&checks[0], "model", 1, "%s", facts.name);
    check_set(&checks[1], "self_test", sched->self_test_rc == 0, "%s",
              sched->self_test_us == 0 ? "passed at start" : sched->self_test_detail);
    check_set(&checks[2], "device", sched->launch_rc == 0 && !sched->lost && !sched->gpu.broken,
              "%s%s",
              sched->lost             ? "lost; the process ends"
              : sched->gpu.broken     ? "hardware: "
              : sched->launch_rc == 0 ? "the last launch was fine"
                                      : "the last launch failed",
              sched->gpu.broken && !sched->lost ? sched->gpu.reason : "");
    if (!sched->worker_alive) {
        check_set(&checks[3], "worker", 0, "ended");
    } else {
        check_set(&checks[3], "worker", stalled_us <= sched->launch_us_max,
                  "in the engine for %lld ms, %lld ms without progress; %d calls wait",
                  (long long)(age_us / 1000), (long long)(stalled_us / 1000), sched->queue_count);
    }
    check_set(&checks[4], "draining", !sched->draining && !sched->closed, "%s",
              sched->draining ? "yes"
              : sched->closed ? "by an admin; open sessions go on"
                              : "no");
    for (int i = 0; i < TV_SCHED_CHECKS; i++) {
        ready = ready && checks[i].ok;
    }
    return ready;
}

static void reply_ready(struct tv_sched *sched, struct tv_call *call)
{
    struct tv_ready_check checks[TV_SCHED_CHECKS];
    struct tv_buf body;
    int ready = tv_sched_ready_checks(sched, checks);
    tv_buf_init(&body, TV_SCHED_REPLY_BYTES);
    tv_encode_ready(&body, ready, checks, TV_SCHED_CHECKS);
    tv_sched_reply_set(call, ready ? 200 : 503, &body);
}

/* 1: waits for the self-test. A worker that does not answer is not asked. */
static int answer_ready(struct tv_sched *sched, struct tv_call *call)
{
    int64_t now_us = tv_clock_us();
    tv_sched_lock(sched);
    int fresh = sched->self_test_us > 0 && now_us - sched->self_test_us < TV_SCHED_DEEP_US;
    int stuck = !sched->worker_alive || tv_sched_stalled_us(sched, now_us) > sched->launch_us_max;
    int waits = call->request.deep && !fresh && !stuck && !sched->stopping && !sched->lost &&
                !tv_sched_is_gone(call);
    if (waits) {
        call->next = sched->deep;
        sched->deep = call;
        sched->in_flight++;
        tv_sched_ring(sched);
    } else {
        reply_ready(sched, call);
    }
    tv_sched_unlock(sched);
    return waits;
}

void tv_sched_self_test_run(struct tv_sched *sched)
{
    char detail[sizeof sched->self_test_detail] = "";
    tv_sched_engine_enter(sched);
    int rc = sched->engine->ops->self_test(sched->engine, detail, sizeof detail);
    tv_sched_engine_leave(sched, sched->launch_rc); /* only this thread writes it */
    tv_sched_lost_note(sched, rc);
    tv_sched_lock(sched);
    struct tv_call *calls = sched->deep;
    sched->deep = NULL;
    sched->self_test_rc = rc;
    sched->self_test_us = tv_clock_us();
    memcpy(sched->self_test_detail, detail, sizeof sched->self_test_detail);
    for (struct tv_call *call = calls; call != NULL; call = call->next) {
        reply_ready(sched, call);
    }
    tv_sched_unlock(sched);
    tv_sched_calls_done(sched, calls);
}

static void answer_totals(struct tv_sched *sched, struct tv_call *call)
{
    struct tv_parity_violation violations[VIOLATIONS_MAX];
    struct tv_parity_totals totals = {.mode = "off"};
    struct tv_buf body;
    if (sched->shadow != NULL) {
        tv_shadow_totals(sched->shadow, &totals, violations, VIOLATIONS_MAX);
    }
    tv_buf_init(&body, TV_SCHED_REPLY_BYTES);
    tv_encode_parity_totals(&body, &totals);
    tv_sched_reply_set(call, 200, &body);
}

static void answer_violation(struct tv_sched *sched, struct tv_call *call)
{
    const char *kind = NULL;
    char *data = NULL;
    size_t bytes = 0;
    struct tv_buf body;
    int rc = -ENOENT;
    if (sched->shadow != NULL) {
        rc = tv_shadow_reproducer(sched->shadow, call->request.violation, &kind, &data, &bytes);
    }
    if (rc != 0) {
        tv_sched_reply_refuse(call, rc == -ENOENT ? TV_NOT_FOUND : TV_INTERNAL, NULL,
                              rc == -ENOENT ? "no such reproducer"
                                            : "the reproducer could not be read");
        return;
    }
    tv_buf_init(&body, bytes + 1);
    tv_buf_append(&body, data, bytes);
    free(data);
    tv_sched_reply_set(call, 200, &body);
    if (call->reply.http_status == 200 && strcmp(kind, "kernel") == 0) {
        call->reply.content_type = "application/octet-stream";
    }
}

/* An admin empties the server, or takes it back; what ends by a signal stays ended. */
static void answer_drain(struct tv_sched *sched, struct tv_call *call)
{
    int closed = call->request.kind == TV_CALL_DRAIN;
    struct tv_buf body;
    tv_sched_lock(sched);
    int stops = sched->draining || sched->lost;
    int changed = !stops && sched->closed != closed;
    if (changed) {
        sched->closed = closed;
    }
    int32_t sessions = sched->table.count, in_flight = sched->in_flight;
    tv_sched_unlock(sched);
    if (stops) {
        tv_sched_reply_refuse(call, TV_DRAINING, NULL, "the server ends");
        return;
    }
    if (changed) {
        tv_log(TV_LOG_INFO, "%s%s%s: %s; %d sessions are open", closed ? "drain" : "undrain",
               call->principal[0] != '\0' ? " by " : "", call->principal,
               closed ? "not ready, and no new session is taken" : "ready for new sessions again",
               sessions);
    }
    tv_buf_init(&body, TV_SCHED_REPLY_BYTES);
    tv_encode_drain(&body, closed, sessions, in_flight);
    tv_sched_reply_set(call, 200, &body);
}

int tv_sched_answer_info(struct tv_sched *sched, struct tv_call *call)
{
    struct tv_buf body;
    switch (call->request.kind) {
    case TV_CALL_DRAIN:
    case TV_CALL_UNDRAIN:
        answer_drain(sched, call);
        break;
    case TV_CALL_READY:
        return answer_ready(sched, call);
    case TV_CALL_MODEL:
        answer_model(sched, call);
        break;
    case TV_CALL_PARITY_TOTALS:
        answer_totals(sched, call);
        break;
    case TV_CALL_PARITY_VIOLATION:
        answer_violation(sched, call);
        break;
    case TV_CALL_STATUS:
        tv_sched_answer_status(sched, call);
        break;
    case TV_CALL_METRICS:
        tv_sched_answer_metrics(sched, call);
        break;
    default:
        tv_buf_init(&body, TV_SCHED_REPLY_BYTES);
        tv_encode_health(&body);
        tv_sched_reply_set(call, 200, &body);
        break;
    }
    return 0;
}
