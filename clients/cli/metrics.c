/*
 * metrics.c - reading of Prometheus text.
 */
#include "clients/cli/metrics.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define NAME_BYTES 96

/* One line into *ret_metric; the line is cut up. 1; 0: not a sample. */
static int read_line(char *line, struct tv_metric *ret_metric)
{
    size_t name = strcspn(line, "{ ");
    char *rest = line + name;
    const char *labels = "";
    if (name == 0 || line[0] == '#' || *rest == '\0') {
        return 0;
    }
    if (*rest == '{') {
        char *end = strrchr(rest, '}');
        if (end == NULL) {
            return 0;
        }
        labels = rest + 1;
        *end = '\0';
        *rest = '\0';
        rest = end + 1;
    } else {
        *rest++ = '\0';
    }
    char *end;
    double value = strtod(rest, &end);
    if (end == rest) {
        return 0;
    }
    *ret_metric = (struct tv_metric){.name = line, .labels = labels, .value = value};
    return 1;
}

int tv_metrics_read(const char *text, struct tv_metrics *ret_metrics)
{
    struct tv_metrics metrics = {.text = strdup(text)};
    size_t lines = 1;
    for (const char *at = text; *at != '\0'; at++) {
        lines += *at == '\n';
    }
    metrics.items = calloc(lines, sizeof(*metrics.items));
    if (metrics.text == NULL || metrics.items == NULL) {
        tv_metrics_finish(&metrics);
        return -ENOMEM;
    }
    for (char *line = metrics.text; line != NULL;) {
        char *next = strchr(line, '\n');
        if (next != NULL) {
            *next++ = '\0';
        }
        metrics.count += (size_t)read_line(line, &metrics.items[metrics.count]);
        line = next;
    }
    *ret_metrics = metrics;
    return 0;
}

void tv_metrics_finish(struct tv_metrics *metrics)
{
    free(metrics->text);
    free(metrics->items);
    *metrics = (struct tv_metrics){0};
}

static int matches(const struct tv_metric *item, const char *name, const char *label)
{
    return strcmp(item->name, name) == 0 && (label == NULL || strstr(item->labels, label) != NULL);
}

double tv_metrics_sum(const struct tv_metrics *metrics, const char *name, const char *label)
{
    double sum = 0.0;
    for (size_t i = 0; i < metrics->count; i++) {
        sum += matches(&metrics->items[i], name, label) ? metrics->items[i].value : 0.0;
    }
    return sum;
}

double tv_metrics_grown(const struct tv_metrics *metrics, const struct tv_metrics *before,
                        const char *name, const char *label)
{
    return tv_metrics_sum(metrics, name, label) - tv_metrics_sum(before, name, label);
}

/* The border of a bucket; infinite where it says so, or nothing. */
static double border_of(const struct tv_metric *item)
{
    const char *le = strstr(item->labels, "le=\"");
    return le != NULL ? strtod(le + 4, NULL) : (double)INFINITY;
}

/* What the same bucket had counted before. */
static double count_before(const struct tv_metrics *before, const struct tv_metric *item)
{
    for (size_t i = 0; i < before->count; i++) {
        if (matches(&before->items[i], item->name, NULL) &&
            strcmp(before->items[i].labels, item->labels) == 0) {
            return before->items[i].value;
        }
    }
    return 0.0;
}

double tv_metrics_quantile(const struct tv_metrics *metrics, const struct tv_metrics *before,
                           const char *name, const char *label, double share)
{
    char bucket[NAME_BYTES], count[NAME_BYTES];
    (void)snprintf(bucket, sizeof(bucket), "%s_bucket", name); /* our own names fit */
    (void)snprintf(count, sizeof(count), "%s_count", name);
    double all = tv_metrics_grown(metrics, before, count, label);
    double low = 0.0;
    double below = 0.0;
    if (all <= 0.0) {
        return -1.0;
    }
    for (size_t i = 0; i < metrics->count; i++) {
        const struct tv_metric *item = &metrics->items[i];
        if (!matches(item, bucket, label)) {
            continue;
        }
        double high = border_of(item);
        double seen = item->value - count_before(before, item);
        if (seen >= share * all && isfinite(high)) {
            double within = seen > below ? (share * all - below) / (seen - below) : 1.0;
            return low + within * (high - low);
        }
        if (isfinite(high)) {
            low = high;
            below = seen;
        }
    }
    return low;
}
