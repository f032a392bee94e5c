/*
 * stats.c - moving the numbers, and the lines of the text format.
 *
 * Owns bucket bounds and escaping. Refuses to write half a line: without memory the whole text
 * fails.
 */
#include "stats/stats.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define TEXT_BYTES_START (16u << 10)

const struct tv_histogram_bounds tv_stats_seconds = {19,
                                                     {1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3,
                                                      2.5e-3, 5e-3, 0.01, 0.025, 0.05, 0.1, 0.25,
                                                      0.5, 1, 2.5, 5, 10}};
const struct tv_histogram_bounds tv_stats_nodes = {
    13, {1, 2, 4, 8, 16, 24, 32, 48, 64, 128, 256, 512, 1024}};
const struct tv_histogram_bounds tv_stats_depths = {12,
                                                    {0, 1, 2, 3, 4, 6, 8, 12, 16, 32, 64, 1023}};
const struct tv_histogram_bounds tv_stats_errors = {
    11, {1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 3e-3, 0.01, 0.03, 0.1, 1}};

static const int statuses[TV_STATS_STATUSES - 1] = {200, 201, 202, 204, 206, 400, 401,
                                                    403, 404, 405, 408, 409, 410, 413,
                                                    415, 422, 429, 500, 503, 504};

void tv_stats_add(_Atomic uint64_t *cell, uint64_t count)
{
    (void)atomic_fetch_add_explicit(cell, count, memory_order_relaxed);
}

void tv_stats_observe(struct tv_histogram *histogram, const struct tv_histogram_bounds *bounds,
                      double value)
{
    int32_t at = 0;
    while (at < bounds->count && value > bounds->bounds[at]) {
        at++;
    }
    tv_stats_add(&histogram->buckets[at < bounds->count ? at : TV_STATS_BUCKETS], 1);
    double sum = atomic_load_explicit(&histogram->sum, memory_order_relaxed);
    while (!atomic_compare_exchange_weak_explicit(&histogram->sum, &sum, sum + value,
                                                  memory_order_release, memory_order_relaxed)) {
        /* sum is what another thread has made it; release: whoever reads it finds its values in the
         * buckets */
    }
}

void tv_stats_judged(struct tv_stats *stats, int32_t drafts, int32_t accepted)
{
    if (drafts <= 0) {
        return; /* a plain decode step: nothing was proposed */
    }
    tv_stats_add(&stats->drafts, 1);
    tv_stats_add(&stats->draft_tokens, (uint64_t)drafts);
    tv_stats_add(&stats->accepted_tokens, (uint64_t)accepted);
    for (int32_t i = 0; i < accepted; i++) {
        tv_stats_add(&stats->accepted_at[i < TV_STATS_POSITIONS ? i : TV_STATS_POSITIONS - 1], 1);
    }
}

size_t tv_stats_status_index(int http_status)
{
    size_t at = 0;
    while (at < TV_STATS_STATUSES - 1 && statuses[at] != http_status) {
        at++;
    }
    return at;
}

int tv_stats_status_at(size_t index)
{
    return index < TV_STATS_STATUSES - 1 ? statuses[index] : 0;
}

void tv_stats_text_finish(struct tv_stats_text *text)
{
    free(text->data);
    memset(text, 0, sizeof *text);
}

static char *room(struct tv_stats_text *text, size_t bytes)
{
    if (text->failed) {
        return NULL;
    }
    if (text->capacity - text->bytes < bytes) {
        size_t capacity = text->capacity == 0 ? TEXT_BYTES_START : text->capacity;
        while (capacity - text->bytes < bytes) {
            capacity *= 2;
        }
        char *data = realloc(text->data, capacity);
        if (data == NULL) {
            text->failed = 1;
            return NULL;
        }
        text->data = data;
        text->capacity = capacity;
    }
    return text->data + text->bytes;
}

static void append(struct tv_stats_text *text, const char *data, size_t bytes)
{
    char *at = room(text, bytes + 1); /* with a NUL behind: the text is one for C as well */
    if (at != NULL && bytes > 0) {
        memcpy(at, data, bytes);
        at[bytes] = '\0';
        text->bytes += bytes;
    }
}

static void append_text(struct tv_stats_text *text, const char *data)
{
    append(text, data, strlen(data));
}

/* Exposition format 0.0.4: backslash and line feed, in label values the quotation mark too. */
static void append_escaped(struct tv_stats_text *text, const char *data, int quoted)
{
    for (const char *c = data; *c != '\0'; c++) {
        if (*c == '\n') {
            append_text(text, "\\n");
        } else if (*c == '\\') {
            append_text(text, "\\\\");
        } else if (*c == '"' && quoted) {
            append_text(text, "\\\"");
        } else {
            append(text, c, 1);
        }
    }
}

void tv_stats_family(struct tv_stats_text *text, const char *name, const char *type,
                     const char *help)
{
    text->family = name;
    append_text(text, "# HELP ");
    append_text(text, name);
    append_text(text, " ");
    append_escaped(text, help, 0);
    append_text(text, "\n# TYPE ");
    append_text(text, name);
    append_text(text, " ");
    append_text(text, type);
    append_text(text, "\n");
}

static void append_name(struct tv_stats_text *text, const char *suffix,
                        const struct tv_stats_label *labels, size_t count)
{
    append_text(text, text->family);
    append_text(text, suffix);
    for (size_t i = 0; i < count; i++) {
        append_text(text, i == 0 ? "{" : ",");
        append_text(text, labels[i].name);
        append_text(text, "=\"");
        append_escaped(text, labels[i].value, 1);
        append_text(text, "\"");
    }
    append_text(text, count > 0 ? "} " : " ");
}

static void append_value(struct tv_stats_text *text, double value)
{
    char number[40];
    if (isnan(value)) {
        append_text(text, "NaN\n");
        return;
    }
    if (isinf(value)) {
        append_text(text, value > 0.0 ? "+Inf\n" : "-Inf\n");
        return;
    }
    (void)snprintf(number, sizeof number, "%.17g\n", value); /* fits */
    append_text(text, number);
}

void tv_stats_sample(struct tv_stats_text *text, const struct tv_stats_label *labels, size_t count,
                     double value)
{
    append_name(text, "", labels, count);
    append_value(text, value);
}

static void append_count(struct tv_stats_text *text, uint64_t value)
{
    char number[24];
    (void)snprintf(number, sizeof number, "%" PRIu64 "\n", value); /* fits */
    append_text(text, number);
}

void tv_stats_count(struct tv_stats_text *text, const struct tv_stats_label *labels, size_t count,
                    uint64_t value)
{
    append_name(text, "", labels, count);
    append_count(text, value);
}

void tv_stats_histogram(struct tv_stats_text *text, const struct tv_stats_label *label,
                        const struct tv_histogram *histogram,
                        const struct tv_histogram_bounds *bounds)
{
    struct tv_stats_label labels[2] = {{0}};
    size_t count = label != NULL;
    uint64_t below = 0;
    char bound[32];
    /* before the buckets, which come first below: never a sum of values that are not counted */
    double sum = atomic_load_explicit(&histogram->sum, memory_order_acquire);
    if (label != NULL) {
        labels[0] = *label;
    }
    for (int32_t i = 0; i <= bounds->count; i++) {
        int last = i == bounds->count;
        below += atomic_load_explicit(&histogram->buckets[last ? TV_STATS_BUCKETS : i],
                                      memory_order_relaxed);
        (void)snprintf(bound, sizeof bound, "%g", last ? 0.0 : bounds->bounds[i]);
        labels[count] = (struct tv_stats_label){"le", last ? "+Inf" : bound};
        append_name(text, "_bucket", labels, count + 1);
        append_count(text, below);
    }
    append_name(text, "_sum", labels, count);
    append_value(text, sum);
    append_name(text, "_count", labels, count);
    append_count(text, below); /* read once, so that it is the last bucket's */
}
