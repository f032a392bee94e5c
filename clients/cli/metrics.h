/*
 * metrics.h - the Prometheus text of a server, as far as `treeverify top` looks at it.
 *
 * Owns the samples of one scrape. Lines it does not understand are left out; it judges none.
 */
#ifndef TV_CLI_METRICS_H
#define TV_CLI_METRICS_H

#include <stddef.h>

struct tv_metric {
    const char *name, *labels; /* labels without braces, "" for none */
    double value;
};
struct tv_metrics {
    char *text; /* owned; names and labels point into it */
    struct tv_metric *items;
    size_t count;
};

/* A copy of text is kept. 0, -ENOMEM. */
int tv_metrics_read(const char *text, struct tv_metrics *ret_metrics);
void tv_metrics_finish(struct tv_metrics *metrics);
/* Sum of the samples of this name that have this label (state="idle"; NULL: all); 0 without any. */
double tv_metrics_sum(const struct tv_metrics *metrics, const char *name, const char *label);
/* The same, less what it was before (an empty struct: at the start of the process). */
double tv_metrics_grown(const struct tv_metrics *metrics, const struct tv_metrics *before,
                        const char *name, const char *label);
/* Value below which a share of what a histogram has seen since before lies, between its buckets'
 * borders in proportion; its last border where it lies beyond. -1: it has seen nothing. */
double tv_metrics_quantile(const struct tv_metrics *metrics, const struct tv_metrics *before,
                           const char *name, const char *label, double share);

#endif
