/*
 * metrics.c - GET /metrics: the names of what was counted, and what is looked up when asked.
 *
 * Counts rounds where they end. Refuses to keep gauges: pages, sessions and calls are read from
 * those who own them.
 */
#include <errno.h>

#include "base/clock.h"
#include "sched/job.h"
#include "sched/version.h"

_Static_assert(TV_CODE_COUNT <= TV_STATS_CODES, "a place for every code");
_Static_assert(TV_RULE_COUNT <= TV_STATS_RULES, "a place for every rule");

#define IDLE_US_MAX 5000000 /* a longer pause is not one between rounds */

void tv_sched_routes_set(struct tv_sched *sched, const char *const *names, size_t count)
{
    for (size_t i = 0; i < count && i < TV_STATS_ROUTES - 1; i++) {
        sched->stats_names.routes[i] = names[i];
    }
}

void tv_sched_metrics_init(struct tv_sched *sched)
{
    struct tv_stats_names *names = &sched->stats_names;
    for (int code = TV_OK + 1; code < TV_CODE_COUNT; code++) {
        const struct tv_code_info *info = tv_code_info((enum tv_code)code);
        names->codes[code] = info->name;
        names->is_conflict[code] = info->http_status == 409;
    }
    for (int rule = 0; rule < TV_RULE_COUNT; rule++) {
        names->rules[rule] = tv_rule_name((enum tv_rule)rule);
    }
    names->routes[TV_STATS_ROUTES - 1] = "none";
    names->positions = sched->limits.tree.depth_max;
}

void tv_sched_count_end(struct tv_sched *sched, enum tv_call_kind kind, enum tv_rule rule,
                        enum tv_stats_round status)
{
    switch (kind) {
    case TV_CALL_VERIFY:
    case TV_CALL_EXTEND:
    case TV_CALL_DECODE:
    case TV_CALL_COMMIT:
    case TV_CALL_ROLLBACK:
        tv_stats_add(&sched->stats->rounds[status][rule], 1);
        break;
    default:
        break; /* takes no number */
    }
}

void tv_sched_count_round(struct job *job)
{
    struct tv_stats *stats = job->sched->stats;
    const struct tv_round *round = &job->round;
    enum tv_stats_round status = TV_STATS_COMMITTED;
    if (job->hold) {
        status = TV_STATS_HELD;
    } else if (round->finish != TV_FINISH_NONE) {
        status = TV_STATS_FINISHED;
    }
    tv_sched_count_end(job->sched, round->kind, job->rule.rule, status);
    if (!job->hold && round->kind != TV_CALL_CREATE && round->kind != TV_CALL_FORK) {
        tv_stats_add(&stats->generated_tokens, (uint64_t)round->new_count);
    }
    if (round->kind != TV_CALL_VERIFY) {
        return;
    }
    tv_stats_observe(&stats->tree_nodes, &tv_stats_nodes, round->stat_nodes);
    tv_stats_observe(&stats->tree_depth, &tv_stats_depths, round->stat_depth);
    if (!job->hold) {
        tv_stats_judged(stats, round->stat_nodes - 1, round->accepted_count - 1);
    }
    const int64_t spent_us[TV_STATS_STAGES] = {
        [TV_STATS_QUEUE] = job->queue_us,   [TV_STATS_PARSE] = -1, /* http/ knows it */
        [TV_STATS_GPU] = job->gpu_us,       [TV_STATS_SAMPLE] = job->sample_us,
        [TV_STATS_ENCODE] = job->encode_us,
    };
    for (size_t i = 0; i < TV_STATS_STAGES; i++) {
        if (spent_us[i] >= 0) {
            tv_stats_observe(&stats->stages[i], &tv_stats_seconds, (double)spent_us[i] * 1e-6);
        }
    }
}

void tv_sched_count_guess(struct tv_sched *sched, const struct tv_request *request,
                          int32_t alternative)
{
    if (request->kind == TV_CALL_VERIFY && request->has_if) {
        tv_stats_add(&sched->stats->guesses[alternative >= 0 ? TV_STATS_ALT : TV_STATS_HIT], 1);
    }
}

void tv_sched_count_skip(struct tv_sched *sched, enum tv_rule rule)
{
    tv_sched_count_end(sched, TV_CALL_VERIFY, rule, TV_STATS_SKIPPED);
    tv_stats_add(&sched->stats->guesses[TV_STATS_SKIP], 1);
}

void tv_sched_count_engine(struct tv_sched *sched, int rc)
{
    if (rc != 0) {
        tv_stats_add(&sched->stats->device_errors[rc == -ENOTRECOVERABLE ? TV_STATS_STICKY
                                                                         : TV_STATS_RECOVERABLE],
                     1);
    }
}

void tv_sched_count_launch(struct tv_sched *sched, int32_t rows, int32_t ridden)
{
    tv_stats_add(&sched->stats->launches, 1);
    tv_stats_add(&sched->stats->launch_rows, (uint64_t)rows);
    if (ridden > 0) {
        tv_stats_add(&sched->stats->shared_launches, 1);
        tv_stats_add(&sched->stats->shared_tokens, (uint64_t)ridden);
    }
}

void tv_sched_count_idle(struct tv_sched *sched, int64_t now_us)
{
    int64_t idle_us = now_us - sched->engine_left_us;
    if (sched->launch_start_us == 0 && sched->engine_left_us > 0 && idle_us > 0 &&
        idle_us <= IDLE_US_MAX) {
        tv_stats_add(&sched->stats->idle_us, (uint64_t)idle_us);
    }
}

static void gauge(struct tv_stats_text *text, const char *name, const char *help, double value)
{
    tv_stats_family(text, name, "gauge", help);
    tv_stats_sample(text, NULL, 0, value);
}

static void counter(struct tv_stats_text *text, const char *name, const char *help, int64_t value)
{
    tv_stats_family(text, name, "counter", help);
    tv_stats_count(text, NULL, 0, (uint64_t)value);
}

/* One sample of a family for each value of its only label. */
static void by_label(struct tv_stats_text *text, const char *label, const char *const *values,
                     const int64_t *numbers, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        const struct tv_stats_label pair = {label, values[i]};
        tv_stats_sample(text, &pair, 1, (double)numbers[i]);
    }
}

static void write_pages(struct tv_sched *sched, struct tv_stats_text *text)
{
    static const char *const states[] = {"free", "private", "shared", "scratch", "cached"};
    struct tv_cache_counts pages;
    tv_engine_pages(sched->engine, &pages);
    const int64_t numbers[] = {pages.free, pages.held - pages.shared - pages.scratch, pages.shared,
                               pages.scratch, pages.cached};
    tv_stats_family(text, "treeverify_kv_pages", "gauge",
                    "KV pages: unused; held by one sequence; by several; reserved for the nodes of "
                    "a round; kept for a prompt that comes again.");
    by_label(text, "state", states, numbers, sizeof numbers / sizeof numbers[0]);
    gauge(text, "treeverify_kv_pool_pages", "KV pages of the pool: the sum over their states.",
          (double)pages.total);
    gauge(text, "treeverify_kv_cache_usage_perc",
          "Share of the pool's pages that are held, from 0 to 1.",
          pages.total > 0 ? (double)pages.held / (double)pages.total : 0.0);
    counter(text, "treeverify_kv_pages_reused_total",
            "KV pages found for a prompt instead of being computed.", pages.reused);
    counter(text, "treeverify_kv_pages_evicted_total",
            "KV pages kept for a prompt and given up for others.", pages.evicted);
}

/* With the lock. */
static void write_sessions(struct tv_sched *sched, struct tv_stats_text *text)
{
    static const char *const states[] = {"idle", "busy", "held"};
    const struct tv_sessions *table = &sched->table;
    int64_t numbers[3] = {0};
    for (size_t i = 0; i < table->bucket_count; i++) {
        for (const struct tv_session *session = table->buckets[i]; session != NULL;
             session = session->next) {
            int held = session->held.seq > 0 && !session->held.settled;
            numbers[session->busy ? 1 : held ? 2 : 0]++;
        }
    }
    tv_stats_family(text, "treeverify_sessions", "gauge",
                    "Open sessions: idle; with a call under way; with a held round.");
    by_label(text, "state", states, numbers, 3);
    gauge(text, "treeverify_fetch_bytes", "Bytes of rows that sessions keep to be fetched.",
          (double)tv_sessions_fetch_bytes(table));
    counter(text, "treeverify_sessions_created_total",
            "Sessions created, forks and restored ones included.", table->created_count);
    counter(text, "treeverify_sessions_restored_total",
            "Of these, sessions that the last process left to this one.", table->restored_count);
    counter(text, "treeverify_sessions_not_restored_total",
            "Sessions that the last process left, and that could not be restored.",
            sched->restore_lost);
    counter(text, "treeverify_sessions_closed_total",
            "Sessions closed before their lease was over.", table->closed_count);
    counter(text, "treeverify_lease_expired_total",
            "Sessions whose lease was over, or that were idle when others needed their pages.",
            table->expired_count);
    counter(text, "treeverify_idle_closed_total",
            "Of these, sessions that were idle when others needed their pages.",
            sched->idle_closed);
}

/* With the lock. */
static void write_health(struct tv_sched *sched, struct tv_stats_text *text)
{
    static const char *const results[] = {"passed", "failed"};
    struct tv_ready_check checks[TV_SCHED_CHECKS];
    const int64_t test[] = {sched->self_test_rc == 0, sched->self_test_rc != 0};
    int64_t running = 0;
    for (const struct job *job = sched->running.first; job != NULL; job = job->next) {
        running++;
    }
    gauge(text, "treeverify_ready", "What /readyz says: 1 or 0.",
          tv_sched_ready_checks(sched, checks));
    tv_stats_family(text, "treeverify_up_self_test", "gauge", "Outcome of the newest self-test.");
    by_label(text, "result", results, test, 2);
    gauge(text, "treeverify_last_progress_seconds",
          "How long an engine call has gone without progress; 0 outside of one.",
          (double)tv_sched_stalled_us(sched, tv_clock_us()) * 1e-6);
    gauge(text, "treeverify_num_requests_waiting", "Calls in the queue.", sched->queue_count);
    gauge(text, "treeverify_num_requests_running", "Calls that the worker has begun.",
          (double)running);
    if (sched->gpu.watched) {
        static const char *const kinds[TV_GPU_ECC_KINDS] = {"corrected", "uncorrected"};
        tv_stats_family(text, "treeverify_gpu_ecc_total", "counter",
                        "Memory errors that the GPU's driver has counted since it was loaded.");
        by_label(text, "kind", kinds, sched->gpu.ecc, TV_GPU_ECC_KINDS);
        counter(text, "treeverify_gpu_xids_total", "Xid events of the GPU since the start.",
                sched->gpu.xids);
        gauge(text, "treeverify_gpu_last_xid", "The last of them; 0: none.",
              (double)sched->gpu.xid);
    }
}

static void write_parity(struct tv_sched *sched, struct tv_stats_text *text)
{
    static const char *const results[] = {"exact", "near_tie", "violation", "skipped"};
    struct tv_parity_violation none[1];
    struct tv_parity_totals totals = {0};
    struct tv_histogram errors = {0};
    int64_t lag_us = 0;
    if (sched->shadow != NULL) {
        tv_shadow_totals(sched->shadow, &totals, none, 0);
        lag_us = tv_shadow_lag(sched->shadow, &errors);
    }
    const int64_t numbers[] = {totals.exact, totals.near_tie, totals.violation, totals.skipped};
    tv_stats_family(text, "treeverify_parity_rounds_total", "counter",
                    "Rounds that shadow mode and POST /v1/parity have judged, by verdict.");
    for (size_t i = 0; i < 4; i++) {
        const struct tv_stats_label pair = {"result", results[i]};
        tv_stats_count(text, &pair, 1, (uint64_t)numbers[i]);
    }
    tv_stats_family(text, "treeverify_parity_logit_abs_err", "histogram",
                    "Largest difference of a logit between fast path and path oracle, by round.");
    tv_stats_histogram(text, NULL, &errors, &tv_stats_errors);
    gauge(text, "treeverify_parity_lag_seconds",
          "Age of the oldest round that waits for the kernel oracle or is judged by it.",
          (double)lag_us * 1e-6);
}

static void write_build(struct tv_sched *sched, struct tv_stats_text *text)
{
    struct tv_engine_facts facts;
    tv_engine_facts(sched->engine, &facts);
    const struct tv_stats_label labels[] = {{"version", TV_VERSION},
                                            {"model", facts.name},
                                            {"epoch", sched->table.epoch},
                                            {"products", facts.products}};
    tv_stats_family(text, "treeverify_build_info", "gauge", "What is running; always 1.");
    tv_stats_sample(text, labels, 4, 1.0);
    if (facts.kv_bytes > 0) {
        static const char *const parts[] = {"kv", "weights"};
        const int64_t bytes[] = {facts.kv_bytes, facts.weights_bytes};
        tv_stats_family(text, "treeverify_device_bytes", "gauge",
                        "Memory taken at the start, by what it is for.");
        by_label(text, "part", parts, bytes, 2);
    }
    gauge(text, "treeverify_synthetic_weights", "1: the weights are made up, for measurements.",
          (facts.synthetic & TV_SYNTHETIC_WEIGHTS) != 0);
    if (facts.device_allocations >= 0) {
        counter(text, "treeverify_device_allocations_total",
                "Memory taken on a device since the start was done.", facts.device_allocations);
    }
}

void tv_sched_answer_metrics(struct tv_sched *sched, struct tv_call *call)
{
    struct tv_stats_text text = {0};
    struct tv_buf body;
    write_build(sched, &text);
    tv_sched_lock(sched);
    write_health(sched, &text);
    write_sessions(sched, &text);
    tv_sched_unlock(sched);
    write_pages(sched, &text);
    tv_stats_write(sched->stats, &sched->stats_names, &text);
    write_parity(sched, &text);
    tv_stats_process_write(&text);
    tv_buf_init(&body, text.bytes + 1);
    tv_buf_append(&body, text.data, text.bytes);
    if (text.failed) {
        body.failed = -ENOMEM;
    }
    tv_sched_reply_set(call, 200, &body);
    if (call->reply.http_status == 200) {
        call->reply.content_type = "text/plain; version=0.0.4; charset=utf-8";
    }
    tv_stats_text_finish(&text);
}
