/*
 * report.h - what `treeverify generate --report` writes: one HTML file with its own drawings (SVG)
 * and its numbers as JSON.
 *
 * Owns the page and what of each round it is made from; runs nothing and loads nothing. Its figures
 * are those of the Python client's page.
 */
#ifndef TV_CLI_REPORT_H
#define TV_CLI_REPORT_H

#include <stdint.h>

#include "clients/c/treeverify-client.h"

struct tv_report;

/* What the run came to, for the page's table; text is [count] byte tokens. */
struct tv_report_summary {
    const char *finish, *digest;
    double accept_len_mean, tokens_per_s, seconds;
    int64_t drafts, server_us;
    int32_t rounds, count;
    const int32_t *text;
};

/* 0; -ENOMEM. */
int tv_report_create(struct tv_report **ret_report);
void tv_report_destroy(struct tv_report *report);
/* A verify round of the tree parents [count]; rounds without a path (decoded, found again) are left
 * out. 0; -ENOMEM. */
int tv_report_add(struct tv_report *report, const int32_t *parents, int32_t count,
                  const struct tv_client_round *round);
/* 0, or a negative errno: the file cannot be written. */
int tv_report_write(const struct tv_report *report, const struct tv_report_summary *summary,
                    const char *path);

#endif
