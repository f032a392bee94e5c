/*
 * top.c - `treeverify top`: what a server is doing, picture by picture.
 *
 * Owns the pictures. Asks /healthz, /readyz, /v1/model, /metrics and /v1/parity; a part that the
 * key does not open says so in its place. Rates are those between two pictures, and in the first
 * since the server's start.
 */
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "clients/cli/cli.h"
#include "clients/cli/metrics.h"

#define STAGES 5

static const char help[] =
    "usage: treeverify top [OPTIONS]\n"
    "\n"
    "Shows whether a server is ready, its sessions, queue and cache pages, rounds, tokens and\n"
    "launches a second, acceptance, where rounds spend their time, problems, and shadow mode.\n"
    "Elsewhere than on a terminal: plain text, one block after the other. Ends with Ctrl-C.\n"
    "\n"
    "  --interval S      seconds between two pictures (2)\n"
    "  --count N         pictures; 0: without end (0 on a terminal, 1 "
    "elsewhere)\n" TV_CLI_COMMON_HELP "\n"
    "Exit code 1 when the last picture was of a server that is not ready.\n";

/* One picture's answers. */
struct view {
    struct tv_client_answer ready, parity;
    struct tv_client_problem ready_problem, parity_problem, metrics_problem;
    struct tv_metrics metrics;
    int ready_error; /* of /healthz or /readyz: then nothing else was asked */
    int parity_error, metrics_error;
    double at_s; /* wall clock */
};

struct top {
    struct tv_cli cli;
    struct tv_client *client;
    struct tv_client_model model; /* name "" before it is known */
    struct tv_metrics before;     /* of the last picture, empty at first */
    double before_s;
    double interval_s;
    int64_t count;
    int live;
};

static double wall_s(void)
{
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

static void look(struct top *top, struct view *ret_view)
{
    struct tv_client_answer text = {0};
    struct tv_client_answer alive = {0};
    struct tv_client_problem ignored;
    *ret_view = (struct view){0};
    ret_view->ready_error = tv_client_health(top->client, &alive, &ret_view->ready_problem);
    if (ret_view->ready_error == 0) {
        ret_view->ready_error =
            tv_client_ready(top->client, 0, &ret_view->ready, &ret_view->ready_problem);
    }
    if (ret_view->ready_error == 0 && top->model.name[0] == '\0') {
        (void)tv_client_model(top->client, &top->model,
                              &ignored); /* the next picture tries again */
    }
    ret_view->at_s = wall_s();
    ret_view->metrics_error =
        ret_view->ready_error != 0
            ? ret_view->ready_error
            : tv_client_metrics(top->client, &text, &ret_view->metrics_problem);
    if (ret_view->metrics_error == 0) {
        ret_view->metrics_error =
            tv_metrics_read(text.text != NULL ? text.text : "", &ret_view->metrics);
        (void)snprintf(ret_view->metrics_problem.detail, sizeof(ret_view->metrics_problem.detail),
                       "out of memory"); /* said only if it was so */
    }
    ret_view->parity_error =
        ret_view->ready_error != 0
            ? ret_view->ready_error
            : tv_client_parity_totals(top->client, &ret_view->parity, &ret_view->parity_problem);
    tv_client_answer_finish(&text);
    tv_client_answer_finish(&alive);
}

static void view_finish(struct view *view)
{
    tv_client_answer_finish(&view->ready);
    tv_client_answer_finish(&view->parity);
    tv_metrics_finish(&view->metrics);
}

static int is_ready(const struct view *view)
{
    const struct tv_client_value *root = tv_client_answer_root(&view->ready);
    return view->ready_error == 0 && view->ready.http_status == 200 &&
           tv_client_value_type(tv_client_value_member(root, "ready")) == TV_CLIENT_TRUE;
}

static int64_t number_of(const struct tv_client_answer *answer,
                         const struct tv_client_value *object, const char *name)
{
    int64_t number = 0;
    (void)tv_client_value_int(answer, tv_client_value_member(object, name), &number); /* stays 0 */
    return number;
}

/* The figures of a picture, computed once for both ways to show them. */
struct figures {
    double span_s; /* of the rates */
    double idle_sessions, busy_sessions, held_sessions, waiting, running, connections;
    double pages, pages_free, pages_cached;
    double rounds_s, tokens_s, prompt_tokens_s, launches_s, requests_s, problems_s, replays_s;
    double accept_len, drafts_round, rows_launch;
    double stage_ms[STAGES][3]; /* p50, p90, p99; -1: nothing seen */
};

static const char *const stages[STAGES] = {"parse", "queue", "gpu", "sample", "encode"};

static double share(double part, double whole)
{
    return whole > 0.0 ? part / whole : 0.0;
}

static void compute(const struct top *top, const struct view *view, struct figures *ret_figures)
{
    static const double points[] = {0.5, 0.9, 0.99};
    const struct tv_metrics *now = &view->metrics;
    const struct tv_metrics *before = &top->before;
    struct figures f = {0};
    double started = tv_metrics_sum(now, "process_start_time_seconds", NULL);
    f.span_s = view->at_s - (top->before_s > 0.0 ? top->before_s : started);
    f.idle_sessions = tv_metrics_sum(now, "treeverify_sessions", "state=\"idle\"");
    f.busy_sessions = tv_metrics_sum(now, "treeverify_sessions", "state=\"busy\"");
    f.held_sessions = tv_metrics_sum(now, "treeverify_sessions", "state=\"held\"");
    f.waiting = tv_metrics_sum(now, "treeverify_num_requests_waiting", NULL);
    f.running = tv_metrics_sum(now, "treeverify_num_requests_running", NULL);
    f.connections = tv_metrics_sum(now, "treeverify_http_connections", NULL);
    f.pages = tv_metrics_sum(now, "treeverify_kv_pool_pages", NULL);
    f.pages_free = tv_metrics_sum(now, "treeverify_kv_pages", "state=\"free\"");
    f.pages_cached = tv_metrics_sum(now, "treeverify_kv_pages", "state=\"cached\"");
    double rounds = tv_metrics_grown(now, before, "treeverify_tree_nodes_count", NULL);
    double nodes = tv_metrics_grown(now, before, "treeverify_tree_nodes_sum", NULL);
    double accepted =
        tv_metrics_grown(now, before, "treeverify_spec_decode_num_accepted_tokens_total", NULL);
    double launches = tv_metrics_grown(now, before, "treeverify_launches_total", NULL);
    double rows = tv_metrics_grown(now, before, "treeverify_launch_rows_total", NULL);
    f.rounds_s = share(rounds, f.span_s);
    f.tokens_s =
        share(tv_metrics_grown(now, before, "treeverify_generation_tokens_total", NULL), f.span_s);
    f.prompt_tokens_s =
        share(tv_metrics_grown(now, before, "treeverify_prompt_tokens_total", NULL), f.span_s);
    f.launches_s = share(launches, f.span_s);
    f.requests_s =
        share(tv_metrics_grown(now, before, "treeverify_http_requests_total", NULL), f.span_s);
    f.problems_s =
        share(tv_metrics_grown(now, before, "treeverify_problems_total", NULL), f.span_s);
    f.replays_s = share(tv_metrics_grown(now, before, "treeverify_replays_total", NULL), f.span_s);
    f.accept_len = rounds > 0.0 ? 1.0 + accepted / rounds : 0.0;
    f.drafts_round = share(nodes - rounds, rounds);
    f.rows_launch = share(rows, launches);
    for (int s = 0; s < STAGES; s++) {
        char label[32];
        (void)snprintf(label, sizeof(label), "stage=\"%s\"", stages[s]); /* fits */
        for (int p = 0; p < 3; p++) {
            double seconds =
                tv_metrics_quantile(now, before, "treeverify_round_seconds", label, points[p]);
            f.stage_ms[s][p] = seconds < 0.0 ? seconds : seconds * 1e3;
        }
    }
    *ret_figures = f;
}

static void print_head(const struct top *top, const struct view *view)
{
    const struct tv_client_value *root = tv_client_answer_root(&view->ready);
    const struct tv_client_value *check =
        tv_client_value_first(tv_client_value_member(root, "checks"));
    (void)printf("%s: alive, %s", top->cli.url, is_ready(view) ? "ready" : "NOT READY");
    if (top->model.name[0] != '\0') {
        (void)printf(", %s (%s) on %s", top->model.name, top->model.architecture,
                     top->model.backend);
    }
    (void)fputc('\n', stdout);
    for (; check != NULL; check = tv_client_value_next(check)) {
        const char *name = tv_client_value_text(tv_client_value_member(check, "name"));
        const char *detail = tv_client_value_text(tv_client_value_member(check, "detail"));
        if (name == NULL ||
            tv_client_value_type(tv_client_value_member(check, "ok")) == TV_CLIENT_TRUE) {
            continue;
        }
        (void)fputs("  no ", stdout);
        tv_cli_print_safe(stdout, name);
        (void)fputs(": ", stdout);
        tv_cli_print_safe(stdout, detail != NULL ? detail : "");
        (void)fputc('\n', stdout);
    }
}

/* Problems by code, those that there were. */
static void print_problems(const struct top *top, const struct view *view)
{
    for (size_t i = 0; i < view->metrics.count; i++) {
        const struct tv_metric *item = &view->metrics.items[i];
        if (strcmp(item->name, "treeverify_problems_total") == 0) {
            double grown = tv_metrics_grown(&view->metrics, &top->before, item->name, item->labels);
            if (grown > 0.0) {
                (void)fputs("  ", stdout);
                tv_cli_print_safe(stdout, item->labels);
                (void)printf(" %.0f\n", grown);
            }
        }
    }
}

static void print_figures(const struct top *top, const struct view *view)
{
    struct figures f;
    compute(top, view, &f);
    (void)printf("sessions  %.0f idle, %.0f busy, %.0f held; calls %.0f waiting, %.0f running; "
                 "%.0f connections\n",
                 f.idle_sessions, f.busy_sessions, f.held_sessions, f.waiting, f.running,
                 f.connections);
    (void)printf("kv pages  %.0f of %.0f in use, %.0f of them kept for prompts\n",
                 f.pages - f.pages_free, f.pages, f.pages_cached);
    (void)printf("%s %.1f s:\n", top->before_s > 0.0 ? "in the last" : "since the start,",
                 f.span_s);
    (void)printf("rounds    %.1f/s, acceptance length %.2f, %.1f drafts a round; %.1f tokens/s, "
                 "%.1f prompt tokens/s\n",
                 f.rounds_s, f.accept_len, f.drafts_round, f.tokens_s, f.prompt_tokens_s);
    (void)printf("launches  %.1f/s, %.1f rows each\n", f.launches_s, f.rows_launch);
    (void)printf("requests  %.1f/s, %.2f problems/s, %.2f repeated rounds/s\n", f.requests_s,
                 f.problems_s, f.replays_s);
    print_problems(top, view);
    (void)printf("%-9s %9s %9s %9s\n", "ms", "p50", "p90", "p99");
    for (int s = 0; s < STAGES; s++) {
        (void)printf("%-9s", stages[s]);
        for (int p = 0; p < 3; p++) {
            if (f.stage_ms[s][p] < 0.0) {
                (void)printf(" %9s", "-");
            } else {
                (void)printf(" %9.3g", f.stage_ms[s][p]);
            }
        }
        (void)fputc('\n', stdout);
    }
}

static void print_parity(const struct view *view)
{
    const struct tv_client_value *root = tv_client_answer_root(&view->parity);
    const struct tv_client_value *rounds = tv_client_value_member(root, "rounds");
    const char *mode = tv_client_value_text(tv_client_value_member(root, "mode"));
    double p = 0.0;
    (void)tv_client_value_real(&view->parity, tv_client_value_member(root, "p"), &p); /* stays 0 */
    (void)fputs("shadow    ", stdout);
    tv_cli_print_safe(stdout, mode != NULL ? mode : "unknown");
    (void)printf(" (share %.3g): %lld exact, %lld near ties, %lld violations, %lld skipped\n", p,
                 (long long)number_of(&view->parity, rounds, "exact"),
                 (long long)number_of(&view->parity, rounds, "near_tie"),
                 (long long)number_of(&view->parity, rounds, "violation"),
                 (long long)number_of(&view->parity, rounds, "skipped"));
}

static void print_refusal(const char *part, int error, const struct tv_client_problem *problem)
{
    (void)printf("%-9s ", part);
    if (error == -EPROTO) {
        (void)printf("refused with %d %s: ", (int)problem->http_status, problem->code);
    }
    (void)printf("%s\n", problem->detail);
}

static void print_plain(const struct top *top, const struct view *view)
{
    if (view->ready_error != 0) {
        print_refusal("no answer", view->ready_error, &view->ready_problem);
        return;
    }
    print_head(top, view);
    if (view->metrics_error != 0) {
        print_refusal("metrics", view->metrics_error, &view->metrics_problem);
    } else {
        print_figures(top, view);
    }
    if (view->parity_error != 0) {
        print_refusal("shadow", view->parity_error, &view->parity_problem);
    } else {
        print_parity(view);
    }
}

static void print_json(const struct top *top, const struct view *view)
{
    struct figures f;
    compute(top, view, &f);
    (void)printf("{\"ready\":%s,\"seconds\":%.3f,\"sessions\":{\"idle\":%.0f,\"busy\":%.0f,"
                 "\"held\":%.0f},\"waiting\":%.0f,\"running\":%.0f,\"connections\":%.0f,"
                 "\"pages\":%.0f,\"pages_free\":%.0f,\"pages_cached\":%.0f,",
                 is_ready(view) ? "true" : "false", f.span_s, f.idle_sessions, f.busy_sessions,
                 f.held_sessions, f.waiting, f.running, f.connections, f.pages, f.pages_free,
                 f.pages_cached);
    (void)printf("\"rounds_per_s\":%.4g,\"tokens_per_s\":%.4g,\"prompt_tokens_per_s\":%.4g,"
                 "\"launches_per_s\":%.4g,\"requests_per_s\":%.4g,\"problems_per_s\":%.4g,"
                 "\"replays_per_s\":%.4g,\"accept_len_mean\":%.4g,\"drafts_per_round\":%.4g,"
                 "\"rows_per_launch\":%.4g,\"stages_ms\":{",
                 f.rounds_s, f.tokens_s, f.prompt_tokens_s, f.launches_s, f.requests_s,
                 f.problems_s, f.replays_s, f.accept_len, f.drafts_round, f.rows_launch);
    for (int s = 0; s < STAGES; s++) {
        (void)printf("%s\"%s\":", s > 0 ? "," : "", stages[s]);
        if (f.stage_ms[s][0] < 0.0) {
            (void)fputs("null", stdout);
        } else {
            (void)printf("[%.4g,%.4g,%.4g]", f.stage_ms[s][0], f.stage_ms[s][1], f.stage_ms[s][2]);
        }
    }
    (void)printf("},\"parity\":%s}\n", view->parity_error == 0 ? view->parity.text : "null");
}

/* One picture. -1: go on; else the exit code to end with. */
static int picture(struct top *top)
{
    struct view view;
    look(top, &view);
    int code = is_ready(&view) ? TV_CLI_OK : TV_CLI_NO;
    if (tv_metrics_grown(&view.metrics, &top->before, "process_start_time_seconds", NULL) > 0.0) {
        tv_metrics_finish(&top->before); /* another process: it counts from nothing */
        top->before_s = 0.0;
    }
    if (!top->live && view.ready_error != 0) {
        code = tv_cli_fail(&top->cli, view.ready_error, &view.ready_problem);
    } else if (top->cli.json && view.metrics_error != 0) {
        code = tv_cli_fail(&top->cli, view.metrics_error, &view.metrics_problem);
    } else if (top->cli.json) {
        print_json(top, &view);
    } else {
        if (top->live) {
            tv_cli_live_picture();
        }
        print_plain(top, &view);
    }
    if (view.metrics_error == 0) {
        tv_metrics_finish(&top->before);
        top->before = view.metrics;
        top->before_s = view.at_s;
        view.metrics = (struct tv_metrics){0};
    }
    view_finish(&view);
    return code;
}

static int run(struct top *top)
{
    int code = tv_cli_connect_once(&top->cli, &top->client);
    if (code != TV_CLI_OK) {
        return code;
    }
    if (top->live) {
        tv_cli_live_begin();
    }
    for (int64_t done = 1;; done++) {
        code = picture(top);
        if (code > TV_CLI_NO || (top->count > 0 && done == top->count) ||
            tv_cli_live_pause(top->interval_s)) {
            break;
        }
        if (!top->live && !top->cli.json) {
            (void)fputc('\n', stdout);
        }
    }
    if (top->live) {
        tv_cli_live_end();
    }
    tv_metrics_finish(&top->before);
    tv_client_destroy(top->client);
    return code;
}

enum { INTERVAL = TV_CLI_OPT_OWN, COUNT };

int tv_cli_top(int argc, char **argv)
{
    static const struct option options[] = {{"interval", required_argument, NULL, INTERVAL},
                                            {"count", required_argument, NULL, COUNT},
                                            TV_CLI_COMMON_OPTIONS};
    struct top top = {.interval_s = 2.0, .live = isatty(STDOUT_FILENO)};
    int option;
    tv_cli_init(&top.cli);
    top.count = top.live ? 0 : 1;
    while ((option = getopt_long(argc, argv, "", options, NULL)) != -1) {
        int code = -1;
        if (option == INTERVAL) {
            code = tv_cli_parse_real(optarg, 0.1, 3600.0, &top.interval_s) == 0
                       ? -1
                       : tv_cli_usage("--interval takes 0.1 to 3600");
        } else if (option == COUNT) {
            code = tv_cli_parse_int(optarg, 0, INT64_MAX, &top.count) == 0
                       ? -1
                       : tv_cli_usage("--count takes 0 or more");
        } else {
            code = tv_cli_option(&top.cli, option, help);
        }
        if (code >= 0) {
            return code;
        }
    }
    if (optind != argc) {
        return tv_cli_usage("top takes no argument");
    }
    top.live = top.live && !top.cli.json;
    return run(&top);
}
