/*
 * report.c - the page of `treeverify generate --report`: acceptance by depth, accepted drafts by
 * size of the tree, and where the time of each round went.
 */
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "clients/cli/cli.h"
#include "clients/cli/report.h"

#define WIDTH  720.0
#define HEIGHT 240.0
#define LEFT   48.0
#define BELOW  28.0
#define STAGES 4

static const char *const stage_names[STAGES] = {"queue", "gpu", "other server", "link"};
static const char *const stage_colors[STAGES] = {"#9e9e9e", "#2e7d32", "#f9a825", "#1565c0"};
static const char *const green = "#2e7d32", *const blue = "#1565c0";

struct kept {
    int32_t drafts, depth, accepted;
    int64_t
        stages_us[STAGES]; /* queue, gpu, the rest of the server's, the rest of the round trip */
};

struct tv_report {
    struct kept *rounds; /* [count] */
    int32_t count, capacity, deepest, most_drafts;
};

/* One bar: stacked parts, and what a pointer on it says. */
struct bar {
    double parts[STAGES];
    int part_count;
    const char *const *colors;
};

int tv_report_create(struct tv_report **ret_report)
{
    *ret_report = calloc(1, sizeof(**ret_report));
    return *ret_report != NULL ? 0 : -ENOMEM;
}

void tv_report_destroy(struct tv_report *report)
{
    if (report != NULL) {
        free(report->rounds);
        free(report);
    }
}

static int32_t depth_of(const int32_t *parents, int32_t count)
{
    int32_t depths[TV_CLIENT_NODES_MAX];
    int32_t deepest = 0;
    depths[0] = 0;
    for (int32_t i = 1; i < count; i++) {
        depths[i] = depths[parents[i]] + 1;
        deepest = depths[i] > deepest ? depths[i] : deepest;
    }
    return deepest;
}

static int64_t rest(int64_t all, int64_t parts)
{
    return all > parts ? all - parts : 0;
}

int tv_report_add(struct tv_report *report, const int32_t *parents, int32_t count,
                  const struct tv_client_round *round)
{
    if (round->node_count < 1) {
        return 0;
    }
    if (report->count == report->capacity) {
        int32_t capacity = report->capacity > 0 ? 2 * report->capacity : 64;
        struct kept *rounds = realloc(report->rounds, (size_t)capacity * sizeof(*rounds));
        if (rounds == NULL) {
            return -ENOMEM;
        }
        report->rounds = rounds;
        report->capacity = capacity;
    }
    const struct kept kept = {.drafts = count - 1,
                              .depth = depth_of(parents, count),
                              .accepted = round->node_count - 1,
                              .stages_us = {round->queue_us, round->gpu_us,
                                            rest(round->server_us, round->queue_us + round->gpu_us),
                                            rest(round->rtt_us, round->server_us)}};
    report->rounds[report->count++] = kept;
    report->deepest = kept.depth > report->deepest ? kept.depth : report->deepest;
    report->most_drafts = kept.drafts > report->most_drafts ? kept.drafts : report->most_drafts;
    return 0;
}

/* Of the rounds whose tree reached this depth, the share that accepted a node there. */
static double share_at(const struct tv_report *report, int32_t depth)
{
    int32_t reached = 0, accepted = 0;
    for (int32_t i = 0; i < report->count; i++) {
        reached += report->rounds[i].depth >= depth;
        accepted += report->rounds[i].depth >= depth && report->rounds[i].accepted >= depth;
    }
    return reached > 0 ? (double)accepted / reached : 0.0;
}

/* Rounds whose tree had this many drafts, and how many of those they accepted on average. */
static int32_t rounds_of(const struct tv_report *report, int32_t drafts, double *ret_mean)
{
    int32_t rounds = 0, accepted = 0;
    for (int32_t i = 0; i < report->count; i++) {
        if (report->rounds[i].drafts == drafts) {
            rounds++;
            accepted += report->rounds[i].accepted;
        }
    }
    *ret_mean = rounds > 0 ? (double)accepted / rounds : 0.0;
    return rounds;
}

static void put_html(FILE *out, const int32_t *text, int32_t count)
{
    for (int32_t i = 0; i < count; i++) {
        int32_t token = text[i];
        if (token == '<' || token == '>' || token == '&' || token >= 0x7f ||
            (token < 0x20 && token != '\n' && token != '\t')) {
            (void)fprintf(out, "&#%d;", token < 0x80 && token >= 0x20 ? (int)token : 0xfffd);
        } else {
            (void)fputc(token, out);
        }
    }
}

static void put_frame(FILE *out, const char *title, const char *top)
{
    (void)fprintf(out,
                  "<h2>%s</h2><svg viewBox='0 0 %g %g' role='img'>"
                  "<path d='M%g 10V%gH%g' fill='none' stroke='#888'/>"
                  "<text x='4' y='18'>%s</text><text x='4' y='%g'>0</text>",
                  title, WIDTH, HEIGHT, LEFT, HEIGHT - BELOW, WIDTH - 6, top, HEIGHT - BELOW);
}

/* Bar `at` of `count`; each part of it begins a rectangle whose tooltip is `label`. */
static void put_bar(FILE *out, const struct bar *bar, int32_t at, int32_t count, double largest,
                    const char *label)
{
    double width = (WIDTH - LEFT - 10) / count;
    double floor = HEIGHT - BELOW;
    double y = floor;
    for (int i = 0; i < bar->part_count; i++) {
        double height = largest > 0.0 ? (floor - 14) * bar->parts[i] / largest : 0.0;
        y -= height;
        (void)fprintf(out,
                      "<rect x='%.1f' y='%.1f' width='%.1f' height='%.1f' fill='%s'>"
                      "<title>%s</title></rect>",
                      LEFT + at * width, y, fmax(0.5, width * 0.85), height, bar->colors[i], label);
    }
}

static void put_across(FILE *out, const char *words)
{
    (void)fprintf(out, "<text x='%g' y='%g'>%s</text></svg>", LEFT, HEIGHT - 8, words);
}

static void draw_depths(FILE *out, const struct tv_report *report)
{
    char label[96];
    put_frame(out, "Acceptance by depth", "100 %");
    for (int32_t depth = 1; depth <= report->deepest; depth++) {
        const struct bar bar = {{share_at(report, depth)}, 1, &green};
        (void)snprintf(label, sizeof(label), "depth %d: %.0f%%", (int)depth, 100 * bar.parts[0]);
        put_bar(out, &bar, depth - 1, report->deepest, 1.0, label);
    }
    (void)snprintf(label, sizeof(label), "depth 1 to %d; share of rounds that had drafts there",
                   (int)report->deepest);
    put_across(out, label);
}

static void draw_sizes(FILE *out, const struct tv_report *report)
{
    char label[96];
    double most = 0.0, mean;
    int32_t sizes = 0, at = 0;
    for (int32_t drafts = 0; drafts <= report->most_drafts; drafts++) {
        sizes += rounds_of(report, drafts, &mean) > 0;
        most = fmax(most, mean);
    }
    (void)snprintf(label, sizeof(label), "%.1f", most);
    put_frame(out, "Accepted drafts by size of the tree", label);
    for (int32_t drafts = 0; drafts <= report->most_drafts; drafts++) {
        int32_t rounds = rounds_of(report, drafts, &mean);
        const struct bar bar = {{mean}, 1, &blue};
        if (rounds > 0) {
            (void)snprintf(label, sizeof(label), "%d drafts: %.2f accepted in %d rounds",
                           (int)drafts, mean, (int)rounds);
            put_bar(out, &bar, at++, sizes, most, label);
        }
    }
    put_across(out, "drafts in the tree, from few to many");
}

static void draw_times(FILE *out, const struct tv_report *report)
{
    char label[160];
    double longest = 0.0;
    for (int32_t i = 0; i < report->count; i++) {
        double all = 0.0;
        for (int stage = 0; stage < STAGES; stage++) {
            all += (double)report->rounds[i].stages_us[stage];
        }
        longest = fmax(longest, all);
    }
    (void)snprintf(label, sizeof(label), "%.1f ms", longest / 1e3);
    put_frame(out, "Time of each round", label);
    for (int32_t i = 0; i < report->count; i++) {
        struct bar bar = {.part_count = STAGES, .colors = stage_colors};
        int used = snprintf(label, sizeof(label), "round %d:", (int)i + 1);
        for (int stage = 0; stage < STAGES; stage++) {
            int64_t us = report->rounds[i].stages_us[stage];
            bar.parts[stage] = (double)us;
            used += snprintf(label + used, sizeof(label) - (size_t)used, "%s %s %lld us",
                             stage > 0 ? "," : "", stage_names[stage], (long long)us); /* fits */
        }
        put_bar(out, &bar, i, report->count, longest, label);
    }
    (void)snprintf(label, sizeof(label), "rounds 1 to %d", (int)report->count);
    put_across(out, label);
    (void)fputs("<p>", out);
    for (int stage = 0; stage < STAGES; stage++) {
        (void)fprintf(out, "%s<b style='color:%s'>%s</b>", stage > 0 ? ", " : "",
                      stage_colors[stage], stage_names[stage]);
    }
    (void)fputs("</p>", out);
}

static void put_table(FILE *out, const struct tv_report_summary *summary)
{
    (void)fprintf(out,
                  "<table><tr><th>rounds</th><td>%d</td></tr><tr><th>drafts</th><td>%lld</td></tr>"
                  "<tr><th>accept_len_mean</th><td>%.4f</td></tr>"
                  "<tr><th>tokens_per_s</th><td>%.1f</td></tr>"
                  "<tr><th>seconds</th><td>%.4f</td></tr><tr><th>server_us</th><td>%lld</td></tr>"
                  "<tr><th>finish</th><td>%s</td></tr><tr><th>digest</th><td>%s</td></tr></table>",
                  (int)summary->rounds, (long long)summary->drafts, summary->accept_len_mean,
                  summary->tokens_per_s, summary->seconds, (long long)summary->server_us,
                  summary->finish, summary->digest);
}

/* The figures, for programs: as the Python client's page has them. */
static void put_numbers(FILE *out, const struct tv_report *report,
                        const struct tv_report_summary *summary)
{
    const char *comma = "";
    double mean;
    (void)fprintf(
        out,
        "<script type='application/json' id='numbers'>{\"summary\":{\"rounds\":%d,"
        "\"drafts\":%lld,\"accept_len_mean\":%.4f,\"tokens_per_s\":%.1f,\"seconds\":%.4f,"
        "\"server_us\":%lld,\"finish\":\"%s\",\"digest\":\"%s\"},\"acceptance_by_depth\":[",
        (int)summary->rounds, (long long)summary->drafts, summary->accept_len_mean,
        summary->tokens_per_s, summary->seconds, (long long)summary->server_us, summary->finish,
        summary->digest);
    for (int32_t depth = 1; depth <= report->deepest; depth++) {
        (void)fprintf(out, "%s%.6g", depth > 1 ? "," : "", share_at(report, depth));
    }
    (void)fputs("],\"accepted_by_nodes\":[", out);
    for (int32_t drafts = 0; drafts <= report->most_drafts; drafts++) {
        int32_t rounds = rounds_of(report, drafts, &mean);
        if (rounds > 0) {
            (void)fprintf(out, "%s[%d,%d,%.6g]", comma, (int)drafts, (int)rounds, mean);
            comma = ",";
        }
    }
    (void)fputs("],\"stages_us\":[", out);
    for (int32_t i = 0; i < report->count; i++) {
        const int64_t *us = report->rounds[i].stages_us;
        (void)fprintf(out, "%s[%lld,%lld,%lld,%lld]", i > 0 ? "," : "", (long long)us[0],
                      (long long)us[1], (long long)us[2], (long long)us[3]);
    }
    (void)fputs("]}</script>", out);
}

int tv_report_write(const struct tv_report *report, const struct tv_report_summary *summary,
                    const char *path)
{
    FILE *out = fopen(path, "w");
    if (out == NULL) {
        return -errno;
    }
    (void)fputs("<!doctype html><html lang='en'><meta charset='utf-8'><title>treeverify generate"
                "</title><style>body{font:15px/1.5 sans-serif;max-width:760px;margin:2em auto;"
                "padding:0 1em;color:#222}table{border-collapse:collapse}td,th{padding:.15em .8em "
                ".15em 0;text-align:left}svg{width:100%;height:auto;background:#fafafa}"
                "text{font:11px sans-serif;fill:#444}</style><h1>treeverify generate</h1>",
                out);
    put_table(out, summary);
    draw_depths(out, report);
    draw_sizes(out, report);
    draw_times(out, report);
    (void)fputs("<h2>Text</h2><p style='white-space:pre-wrap'>", out);
    put_html(out, summary->text, summary->count);
    (void)fputs("</p>", out);
    put_numbers(out, report, summary);
    (void)fputs("</html>\n", out);
    int failed = ferror(out); /* one look: what went wrong before stays */
    errno = 0;
    if (fclose(out) != 0 || failed) {
        return errno != 0 ? -errno : -EIO;
    }
    return 0;
}
