/*
 * stats.h - counters and histograms that any thread may move, and the Prometheus text of them.
 *
 * Owns how numbers are kept and written; those who count own what they mean. Counters only grow;
 * what can be looked up when somebody asks (pages, sessions) is looked up then and not kept here.
 * Every atomic is relaxed: a number guards nothing, and a scrape may see two of them a moment
 * apart.
 */
#ifndef TV_STATS_STATS_H
#define TV_STATS_STATS_H

#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

#define TV_STATS_CODES     64  /* error codes, at most */
#define TV_STATS_RULES     8   /* sampling rules, at most */
#define TV_STATS_ROUTES    48  /* paths, at most; the last one is for requests that have none */
#define TV_STATS_STATUSES  24  /* HTTP statuses, at most */
#define TV_STATS_POSITIONS 128 /* of accepted drafts; the last one has the deeper ones too */
#define TV_STATS_BUCKETS   24  /* of a histogram, without the one for all */

/* Buckets of a histogram: values up to bounds[i], ascending. */
struct tv_histogram_bounds {
    int32_t count;
    double bounds[TV_STATS_BUCKETS];
};
struct tv_histogram {
    _Atomic uint64_t buckets[TV_STATS_BUCKETS + 1]; /* each value in one of them; the last: above */
    _Atomic double sum;
};

enum tv_stats_round {
    TV_STATS_COMMITTED,
    TV_STATS_FINISHED,
    TV_STATS_HELD,
    TV_STATS_SKIPPED,
    TV_STATS_FAILED,
    TV_STATS_ROUND_STATUSES
};
enum tv_stats_stage {
    TV_STATS_QUEUE,
    TV_STATS_PARSE,
    TV_STATS_GPU,
    TV_STATS_SAMPLE,
    TV_STATS_ENCODE,
    TV_STATS_STAGES
};
enum tv_stats_replay { TV_STATS_STORED, TV_STATS_ATTACHED, TV_STATS_REPLAYS };
enum tv_stats_guess { TV_STATS_HIT, TV_STATS_ALT, TV_STATS_SKIP, TV_STATS_GUESSES };
/* Why a stream of events has ended: its client left; it took nothing; the session is no more; the
 * server stops. */
enum tv_stats_stream {
    TV_STATS_STREAM_CLIENT,
    TV_STATS_STREAM_SLOW,
    TV_STATS_STREAM_SESSION,
    TV_STATS_STREAM_STOP,
    TV_STATS_STREAM_ENDS
};
enum tv_stats_device { TV_STATS_STICKY, TV_STATS_RECOVERABLE, TV_STATS_DEVICE_ERRORS };

/* Zero-initialised = nothing has happened. */
struct tv_stats {
    /* Requests: received = answered + given up + running, once nothing moves. */
    _Atomic uint64_t http_received, http_given_up;
    _Atomic uint64_t http_answered[TV_STATS_ROUTES][TV_STATS_STATUSES];
    _Atomic uint64_t http_rejected[TV_STATS_CODES], problems[TV_STATS_CODES];
    _Atomic uint64_t http_unread; /* answers that were given up because nobody read them */
    /* Set by http/ right before it asks for the text. */
    _Atomic int64_t http_running, http_connections[2]; /* work, admin */

    /* Streams of events: opened = open + ended. Of the events of rounds, those written to a stream,
     * and those that had gone before. */
    _Atomic uint64_t streams_opened, streams_ended[TV_STATS_STREAM_ENDS];
    _Atomic uint64_t events_told, events_missed;
    _Atomic int64_t streams_open; /* set with http_running */

    _Atomic uint64_t rounds[TV_STATS_ROUND_STATUSES][TV_STATS_RULES];
    _Atomic uint64_t replays[TV_STATS_REPLAYS], guesses[TV_STATS_GUESSES];
    _Atomic uint64_t drafts, draft_tokens, accepted_tokens, accepted_at[TV_STATS_POSITIONS];
    struct tv_histogram tree_nodes, tree_depth, stages[TV_STATS_STAGES];

    _Atomic uint64_t launches, launch_rows, idle_us, nonfinite;
    _Atomic uint64_t shared_launches, shared_tokens; /* of launches, with a prompt's */
    _Atomic uint64_t device_errors[TV_STATS_DEVICE_ERRORS];
    _Atomic uint64_t prefill_tokens, generated_tokens;
    _Atomic uint64_t reloads[2];     /* done, failed */
    _Atomic int64_t tls_not_after_s; /* of the wall clock; 0: no TLS */
};

extern const struct tv_histogram_bounds tv_stats_seconds; /* of the stages */
extern const struct tv_histogram_bounds tv_stats_nodes, tv_stats_depths, tv_stats_errors;

void tv_stats_add(_Atomic uint64_t *cell, uint64_t count);
void tv_stats_observe(struct tv_histogram *histogram, const struct tv_histogram_bounds *bounds,
                      double value);
/* One tree was judged: `drafts` nodes beside node 0, the first `accepted` of a path taken. */
void tv_stats_judged(struct tv_stats *stats, int32_t drafts, int32_t accepted);
/* Where a status is counted; statuses that nobody answers share the last place. */
size_t tv_stats_status_index(int http_status);
/* The status of a place; 0: the last one. */
int tv_stats_status_at(size_t index);

/* The text, growing; failed: there was no memory, and it is incomplete. */
struct tv_stats_text {
    char *data; /* owned */
    size_t bytes, capacity;
    int failed;
    const char *family; /* whose samples are being written; static text or the caller's */
};
void tv_stats_text_finish(struct tv_stats_text *text);

struct tv_stats_label {
    const char *name, *value; /* the value is escaped */
};
/* HELP and TYPE ("counter", "gauge"), then its samples. */
void tv_stats_family(struct tv_stats_text *text, const char *name, const char *type,
                     const char *help);
void tv_stats_sample(struct tv_stats_text *text, const struct tv_stats_label *labels, size_t count,
                     double value);
void tv_stats_count(struct tv_stats_text *text, const struct tv_stats_label *labels, size_t count,
                    uint64_t value);
/* Of a family of type histogram. */
void tv_stats_histogram(struct tv_stats_text *text, const struct tv_stats_label *label,
                        const struct tv_histogram *histogram,
                        const struct tv_histogram_bounds *bounds);

/* What the numbers' indexes are called. NULL: there is none of that index. */
struct tv_stats_names {
    const char *codes[TV_STATS_CODES], *rules[TV_STATS_RULES], *routes[TV_STATS_ROUTES];
    int is_conflict[TV_STATS_CODES]; /* codes that tell of views that differ */
    int32_t positions;               /* of accepted drafts that can occur */
};
/* families.c: everything in *stats. process.c: process_ families of this process. */
void tv_stats_write(const struct tv_stats *stats, const struct tv_stats_names *names,
                    struct tv_stats_text *text);
void tv_stats_process_write(struct tv_stats_text *text);

#endif
