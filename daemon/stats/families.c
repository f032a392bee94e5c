/*
 * families.c - which number has which name, and what its labels can be.
 *
 * Owns the names: those behind treeverify_ that vLLM or llama.cpp have too end as theirs do, so
 * that dashboards port. No label has a value that a client can choose.
 */
#include <stdio.h>

#include "base/log.h"
#include "stats/stats.h"

static const char *const round_names[] = {
    [TV_STATS_COMMITTED] = "committed", [TV_STATS_FINISHED] = "finished", [TV_STATS_HELD] = "held",
    [TV_STATS_SKIPPED] = "skipped",     [TV_STATS_FAILED] = "failed",
};
static const char *const stage_names[] = {
    [TV_STATS_QUEUE] = "queue",   [TV_STATS_PARSE] = "parse",   [TV_STATS_GPU] = "gpu",
    [TV_STATS_SAMPLE] = "sample", [TV_STATS_ENCODE] = "encode",
};
static const char *const replay_names[] = {"stored", "attached"};
static const char *const guess_names[] = {"hit", "alt", "skip"};
static const char *const device_names[] = {"sticky", "recoverable"};
static const char *const stream_names[] = {"client", "slow", "session", "stop"};
static const char *const reload_names[] = {"done", "failed"};
static const char *const listener_names[] = {"work", "admin"};

static uint64_t read_cell(const _Atomic uint64_t *cell)
{
    return atomic_load_explicit(cell, memory_order_relaxed);
}

static void plain(struct tv_stats_text *text, const char *name, const char *help,
                  const _Atomic uint64_t *cell)
{
    tv_stats_family(text, name, "counter", help);
    tv_stats_count(text, NULL, 0, read_cell(cell));
}

/* One label over an array; indexes without a name are left out. */
static void labelled(struct tv_stats_text *text, const char *name, const char *help,
                     const char *label, const char *const *values, size_t count,
                     const _Atomic uint64_t *cells)
{
    tv_stats_family(text, name, "counter", help);
    for (size_t i = 0; i < count; i++) {
        if (values[i] != NULL) {
            const struct tv_stats_label pair = {label, values[i]};
            tv_stats_count(text, &pair, 1, read_cell(&cells[i]));
        }
    }
}

/* Pairs that nothing was counted for are left out: there are too many that cannot be. */
static void write_requests(const struct tv_stats *stats, const struct tv_stats_names *names,
                           struct tv_stats_text *text)
{
    char status[8];
    plain(text, "treeverify_http_received_total", "Requests whose headers have come.",
          &stats->http_received);
    plain(text, "treeverify_http_given_up_total",
          "Requests that ended without an answer: the client left, or was cut.",
          &stats->http_given_up);
    plain(text, "treeverify_http_unread_total",
          "Answers given up because their readers were too slow (answers_bytes).",
          &stats->http_unread);
    tv_stats_family(text, "treeverify_http_running", "gauge",
                    "Requests that have no answer yet, this one included.");
    tv_stats_sample(text, NULL, 0,
                    (double)atomic_load_explicit(&stats->http_running, memory_order_relaxed));
    tv_stats_family(text, "treeverify_http_connections", "gauge", "Open connections.");
    for (size_t i = 0; i < 2; i++) {
        const struct tv_stats_label pair = {"listener", listener_names[i]};
        tv_stats_sample(
            text, &pair, 1,
            (double)atomic_load_explicit(&stats->http_connections[i], memory_order_relaxed));
    }
    tv_stats_family(text, "treeverify_http_requests_total", "counter",
                    "Requests by path and HTTP status of their answer.");
    for (size_t route = 0; route < TV_STATS_ROUTES; route++) {
        for (size_t at = 0; at < TV_STATS_STATUSES; at++) {
            uint64_t count = read_cell(&stats->http_answered[route][at]);
            if (count == 0 || names->routes[route] == NULL) {
                continue;
            }
            (void)snprintf(status, sizeof status, "%d", tv_stats_status_at(at)); /* fits */
            const struct tv_stats_label pair[2] = {{"route", names->routes[route]},
                                                   {"code", status}};
            tv_stats_count(text, pair, 2, count);
        }
    }
    labelled(text, "treeverify_http_rejected_total",
             "Requests refused before anything of them was looked up, by code.", "reason",
             names->codes, TV_STATS_CODES, stats->http_rejected);
    labelled(text, "treeverify_config_reloads_total",
             "Reloads (SIGHUP); a failed one has changed nothing.", "result", reload_names, 2,
             stats->reloads);
    labelled(text, "treeverify_problems_total", "Requests answered with a problem, by code.",
             "code", names->codes, TV_STATS_CODES, stats->problems);
}

/* What the service stands in: who reads its log, how long its certificate is good. */
static void write_surroundings(const struct tv_stats *stats, struct tv_stats_text *text)
{
    tv_stats_family(text, "treeverify_log_lines_lost_total", "counter",
                    "Lines of the log that stderr did not take.");
    tv_stats_count(text, NULL, 0, tv_log_lost());
    int64_t not_after_s = atomic_load_explicit(&stats->tls_not_after_s, memory_order_relaxed);
    if (not_after_s != 0) {
        tv_stats_family(text, "treeverify_tls_not_after_seconds", "gauge",
                        "When the certificate in force ends, in seconds since 1970.");
        tv_stats_sample(text, NULL, 0, (double)not_after_s);
    }
}

static void write_streams(const struct tv_stats *stats, struct tv_stats_text *text)
{
    plain(text, "treeverify_event_streams_total", "Streams of events that were opened.",
          &stats->streams_opened);
    tv_stats_family(text, "treeverify_event_streams", "gauge", "Streams of events that are open.");
    tv_stats_sample(text, NULL, 0,
                    (double)atomic_load_explicit(&stats->streams_open, memory_order_relaxed));
    labelled(text, "treeverify_event_streams_ended_total",
             "Streams of events that have ended: the client left, took nothing, its session is no "
             "more, or the server stops.",
             "reason", stream_names, TV_STATS_STREAM_ENDS, stats->streams_ended);
    plain(text, "treeverify_events_total", "Events of rounds that were written to a stream.",
          &stats->events_told);
    plain(text, "treeverify_events_missed_total",
          "Rounds whose events had gone before a stream's reader came to them.",
          &stats->events_missed);
}

static void write_conflicts(const struct tv_stats *stats, const struct tv_stats_names *names,
                            struct tv_stats_text *text)
{
    tv_stats_family(text, "treeverify_conflicts_total", "counter",
                    "Requests that saw the session otherwise than it is, by code.");
    for (size_t i = 0; i < TV_STATS_CODES; i++) {
        if (names->codes[i] != NULL && names->is_conflict[i]) {
            const struct tv_stats_label pair = {"code", names->codes[i]};
            tv_stats_count(text, &pair, 1, read_cell(&stats->problems[i]));
        }
    }
}

static void write_rounds(const struct tv_stats *stats, const struct tv_stats_names *names,
                         struct tv_stats_text *text)
{
    tv_stats_family(text, "treeverify_rounds_total", "counter",
                    "Numbered rounds of sessions by how they ended and by their rule.");
    for (size_t i = 0; i < TV_STATS_ROUND_STATUSES; i++) {
        for (size_t rule = 0; rule < TV_STATS_RULES; rule++) {
            if (names->rules[rule] != NULL) {
                const struct tv_stats_label pair[2] = {{"status", round_names[i]},
                                                       {"rule", names->rules[rule]}};
                tv_stats_count(text, pair, 2, read_cell(&stats->rounds[i][rule]));
            }
        }
    }
    labelled(text, "treeverify_replays_total",
             "Rounds asked for again: answered from the store, or joined while they ran.", "kind",
             replay_names, TV_STATS_REPLAYS, stats->replays);
    labelled(text, "treeverify_conditional_total",
             "Conditional rounds: the guess held, one of several did, or none.", "outcome",
             guess_names, TV_STATS_GUESSES, stats->guesses);
    plain(text, "treeverify_prompt_tokens_total", "Tokens prefilled.", &stats->prefill_tokens);
    plain(text, "treeverify_generation_tokens_total",
          "New tokens that rounds of sessions have given, drafted or not.",
          &stats->generated_tokens);
}

static void write_drafts(const struct tv_stats *stats, const struct tv_stats_names *names,
                         struct tv_stats_text *text)
{
    plain(text, "treeverify_spec_decode_num_drafts_total",
          "Draft trees of sessions that were judged; trees of node 0 alone are none.",
          &stats->drafts);
    plain(text, "treeverify_spec_decode_num_draft_tokens_total",
          "Nodes of those trees, node 0 left out.", &stats->draft_tokens);
    plain(text, "treeverify_spec_decode_num_accepted_tokens_total",
          "Of those nodes, the accepted ones.", &stats->accepted_tokens);
    tv_stats_family(text, "treeverify_spec_decode_num_accepted_tokens_per_pos_total", "counter",
                    "Accepted nodes by place on their path; the last place has the deeper ones.");
    for (int32_t i = 0; i < names->positions && i < TV_STATS_POSITIONS; i++) {
        char place[8];
        (void)snprintf(place, sizeof place, "%d", i); /* fits */
        const struct tv_stats_label pair = {"position", place};
        tv_stats_count(text, &pair, 1, read_cell(&stats->accepted_at[i]));
    }
    tv_stats_family(text, "treeverify_tree_nodes", "histogram",
                    "Nodes of verified trees of sessions, node 0 included.");
    tv_stats_histogram(text, NULL, &stats->tree_nodes, &tv_stats_nodes);
    tv_stats_family(text, "treeverify_tree_depth", "histogram",
                    "Depth of verified trees of sessions; node 0 alone has 0.");
    tv_stats_histogram(text, NULL, &stats->tree_depth, &tv_stats_depths);
}

static void write_engine(const struct tv_stats *stats, struct tv_stats_text *text)
{
    tv_stats_family(text, "treeverify_round_seconds", "histogram",
                    "Where a verify round of a session spends its time; gpu is the device, "
                    "processors included, sample the walk and the commit behind it.");
    for (size_t i = 0; i < TV_STATS_STAGES; i++) {
        const struct tv_stats_label pair = {"stage", stage_names[i]};
        tv_stats_histogram(text, &pair, &stats->stages[i], &tv_stats_seconds);
    }
    plain(text, "treeverify_launches_total", "Launches of the engine for rounds.",
          &stats->launches);
    plain(text, "treeverify_launch_rows_total", "Tree nodes of those launches.",
          &stats->launch_rows);
    plain(text, "treeverify_shared_launches_total",
          "Of those launches, the ones that took tokens of a prompt along.",
          &stats->shared_launches);
    plain(text, "treeverify_shared_tokens_total", "Prompt tokens prefilled in those.",
          &stats->shared_tokens);
    tv_stats_family(text, "treeverify_gpu_idle_seconds_total", "counter",
                    "Time between engine calls that came within 5 s of each other: a device that "
                    "waits for drafters.");
    tv_stats_sample(text, NULL, 0, (double)read_cell(&stats->idle_us) * 1e-6);
    plain(text, "treeverify_nonfinite_logits_total",
          "Rounds ended because a logit that decides was not finite.", &stats->nonfinite);
    labelled(text, "treeverify_cuda_errors_total",
             "Failed engine calls: the device is lost, or only this call was.", "class",
             device_names, TV_STATS_DEVICE_ERRORS, stats->device_errors);
}

void tv_stats_write(const struct tv_stats *stats, const struct tv_stats_names *names,
                    struct tv_stats_text *text)
{
    write_requests(stats, names, text);
    write_surroundings(stats, text);
    write_streams(stats, text);
    write_conflicts(stats, names, text);
    write_rounds(stats, names, text);
    write_drafts(stats, names, text);
    write_engine(stats, text);
}
