/*
 * generate.c - `treeverify generate`: a text continued by rounds of draft trees.
 *
 * Owns the loop draft, verify, append, and what is shown of it. Token ids are bytes here: a model
 * with a larger vocabulary needs a tokenizer, which this program does not have, and is refused.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "clients/cli/cli.h"
#include "clients/cli/drafter.h"
#include "clients/cli/report.h"
#include "clients/cli/speculate.h"

#define PROMPT_BYTES_MAX ((size_t)1 << 20)
#define STORE_BYTES_MAX  ((size_t)256 << 20)
#define BYTE_VOCAB_MIN   256
#define BYTE_VOCAB_MAX   512 /* bytes and some control tokens */
#define NODES_DEFAULT    33
#define PREFILL_TOKENS   256

static const char help[] =
    "usage: treeverify generate [OPTIONS] PROMPT      (\"-\": the prompt is read from stdin)\n"
    "\n"
    "Continues PROMPT with a model whose token ids are bytes. An n-gram drafter guesses from the\n"
    "text so far, and from a store, what comes next; the server verifies the guesses as a tree.\n"
    "Accepted tokens are green and the model's own are bold on a terminal; elsewhere the model's\n"
    "own stand in [brackets].\n"
    "\n"
    "  --store FILE      text that the drafter knows\n"
    "  --nodes N|auto    nodes of a tree, node 0 included (33; at most what the server takes);\n"
    "                    auto: what is worth it, by what rounds cost and drafts bring\n"
    "  --max-tokens N    new tokens (200)\n"
    "  --temperature T   0 is greedy, the default\n"
    "  --seed N          for temperatures above 0; the same seed gives the same text\n"
    "  --stop ID         end at this token (may be repeated)\n"
    "  --no-drafts       the server decodes alone: same text, one token at a time\n"
    "  --ahead           send the next tree, behind a guess of where this one ends, while a round\n"
    "                    is under way: for links with a round trip; same text\n"
    "  --guesses N       with --ahead: ends that are guessed, each with a tree (1; at most 32)\n"
    "  --report FILE     write a page (HTML) with acceptance by depth and the times of every "
    "round\n"
    "  --color auto|always|never\n"
    "                    colours (auto: on a terminal)\n"
    "  --live auto|never\n"
    "                    a line with rates and times below the text (auto: on a "
    "terminal)\n" TV_CLI_RESTART_HELP TV_CLI_COMMON_HELP "\n"
    "Acceptance length is new tokens per round, the model's own included.\n";

struct plan {
    struct tv_cli cli;
    const char *store_path, *report_path;
    int64_t nodes_max, tokens_max;
    double temperature;
    const char *seed;
    int32_t stop_ids[TV_CLIENT_STOP_IDS_MAX];
    int32_t stop_count;
    int no_drafts, color, live, nodes_auto, ahead;
    int64_t guesses;
};

/* Everything of one run; tokens and own hold the new text. */
struct run {
    const struct plan *plan;
    struct tv_client *client;
    struct tv_client_problem problem;
    struct tv_client_model model;
    struct tv_client_session *session; /* NULL before it is made */
    struct tv_drafter *drafter;        /* NULL without drafts */
    struct tv_report *report;          /* NULL: none is wanted */
    struct tv_speculation speculation; /* with drafts */
    struct tv_budget budget;           /* with --nodes auto */
    int32_t *tokens;                   /* [tokens_max] */
    char *own; /* [tokens_max] 1: drawn by the model, 0: an accepted draft */
    int32_t count;
    int32_t calls;
    int32_t useful_nodes;         /* of the last round's hint; 0 before the first */
    int32_t rounds, round_tokens; /* verify rounds or decode calls, and what they gave */
    int64_t drafts, server_us, gpu_us, rtt_us;
    double start_s, seconds;
    int live; /* a line is shown */
};

static const struct tv_client_state *state_of(const struct run *run)
{
    return tv_client_session_state(run->session);
}

static double now_s(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

static void show(const struct run *run, int32_t token, int own)
{
    if (run->plan->cli.json) {
        return;
    }
    if (run->plan->color) {
        (void)fputs(own ? "\033[1m" : "\033[32m", stdout);
    } else if (own) {
        (void)fputc('[', stdout);
    }
    tv_cli_print_byte_token(stdout, token);
    if (run->plan->color) {
        (void)fputs("\033[0m", stdout);
    } else if (own) {
        (void)fputc(']', stdout);
    }
}

/* Take the new tokens of a round; the last is the model's own (after a decode all are). */
static int take(struct run *run, const int32_t *tokens, int32_t count, int all_own)
{
    for (int32_t i = 0; i < count && run->count < run->plan->tokens_max; i++) {
        int own = all_own || i == count - 1;
        run->tokens[run->count] = tokens[i];
        run->own[run->count] = (char)own;
        run->count++;
        show(run, tokens[i], own);
    }
    if (!run->plan->cli.json) {
        (void)fflush(stdout); /* text appears as it comes; checked at the end */
    }
    return run->drafter != NULL ? tv_drafter_append(run->drafter, tokens, (size_t)count) : 0;
}

static void show_line(const struct run *run)
{
    char text[160];
    double seconds = now_s() - run->start_s;
    (void)snprintf(
        text, sizeof(text),
        "%d tokens, %.0f tokens/s, acceptance length %.2f, %d rounds, round trip %.1f ms "
        "(server %.1f, model %.1f)",
        (int)run->count, seconds > 0.0 ? run->round_tokens / seconds : 0.0,
        (double)run->round_tokens / run->rounds, (int)run->rounds,
        (double)run->rtt_us / run->calls / 1e3, (double)run->server_us / run->calls / 1e3,
        (double)run->gpu_us / run->calls / 1e3);
    tv_cli_line_show(text);
}

/* One round of a tree, counted. */
static int tree_round(struct run *run, struct tv_client_round *ret_round)
{
    struct tv_speculation *spec = &run->speculation;
    int64_t wanted =
        run->plan->nodes_auto && run->useful_nodes > 0 ? run->useful_nodes : run->plan->nodes_max;
    int error = tv_speculate(spec, (int32_t)wanted, run->plan->tokens_max - run->count, ret_round,
                             &run->problem);
    if (error == 0) {
        run->drafts += spec->ran.count - 1;
    }
    if (error == 0 && run->report != NULL) {
        error = tv_report_add(run->report, spec->ran.parents, spec->ran.count, ret_round);
    }
    return error;
}

static int one_round(struct run *run)
{
    struct tv_client_round round = {0};
    int64_t left = run->plan->tokens_max - run->count;
    int error =
        run->drafter == NULL
            ? tv_client_decode(run->session, left > 32 ? 32 : (int32_t)left, &round, &run->problem)
            : tree_round(run, &round);
    if (error != 0) {
        tv_client_round_finish(&round);
        return error;
    }
    /* decoding alone takes one round of the model for each token */
    run->rounds += run->drafter == NULL ? round.token_count : 1;
    run->round_tokens += round.token_count;
    run->server_us += round.server_us;
    run->gpu_us += round.gpu_us;
    run->rtt_us += round.rtt_us;
    run->calls++;
    if (round.useful_nodes > 0) {
        run->useful_nodes = round.useful_nodes > 2 ? round.useful_nodes : 2; /* a draft at least */
    }
    error = take(run, round.tokens, round.token_count, run->drafter == NULL);
    tv_client_round_finish(&round);
    if (run->live) {
        show_line(run);
    }
    return error;
}

/* The rest of a long prompt in pieces, so that its progress can be shown: rows of an extension have
 * the bits of a prompt's own. */
static int prefill(struct run *run, const int32_t *prompt, int32_t done, int32_t count)
{
    char text[128];
    int error = 0;
    while (error == 0 && done < count) {
        int32_t piece = count - done < PREFILL_TOKENS ? count - done : PREFILL_TOKENS;
        tv_cli_bar(text, sizeof(text), "prompt", done, count);
        tv_cli_line_show(text);
        error = tv_client_extend(run->session, prompt + done, piece, 0, NULL, &run->problem);
        done += piece;
    }
    return error;
}

static int open_session(struct run *run, const int32_t *prompt, int32_t prompt_count)
{
    const struct plan *plan = run->plan;
    struct tv_client_session_options options;
    tv_client_session_options_init(&options);
    options.tokens = prompt;
    options.token_count = prompt_count;
    options.stop_ids = plan->stop_ids;
    options.stop_count = plan->stop_count;
    if (plan->temperature > 0.0) {
        options.sampling.rule = "target_walk";
        options.sampling.temperature = plan->temperature;
        options.sampling.seed = plan->seed;
    }
    int error = tv_client_model(run->client, &run->model, &run->problem);
    if (error != 0) {
        return error;
    }
    if (run->model.vocab < BYTE_VOCAB_MIN || run->model.vocab > BYTE_VOCAB_MAX) {
        (void)snprintf(run->problem.code, sizeof(run->problem.code), "not-bytes");
        (void)snprintf(run->problem.detail, sizeof(run->problem.detail),
                       "%s has a vocabulary of %d: its tokens are not bytes, and this program has "
                       "no tokenizer",
                       run->model.name, (int)run->model.vocab);
        return -ENOTSUP;
    }
    if (run->live && prompt_count > PREFILL_TOKENS) {
        options.token_count = PREFILL_TOKENS;
    }
    error = tv_client_session_create(run->client, &options, &run->session, &run->problem);
    return error == 0 ? prefill(run, prompt, options.token_count, prompt_count) : error;
}

static int generate(struct run *run, const int32_t *prompt, int32_t prompt_count)
{
    run->live = run->plan->live && !run->plan->cli.json && tv_cli_line_begin();
    int error = open_session(run, prompt, prompt_count);
    if (error == 0 && run->drafter != NULL) {
        error = tv_drafter_append(run->drafter, prompt, (size_t)prompt_count);
    }
    if (error != 0) {
        return error;
    }
    for (int32_t i = 0; i < prompt_count && !run->plan->cli.json; i++) {
        tv_cli_print_byte_token(stdout, prompt[i]);
    }
    run->speculation =
        (struct tv_speculation){.session = run->session,
                                .drafter = run->drafter,
                                .stop_ids = run->plan->stop_ids,
                                .stop_count = run->plan->stop_count,
                                .budget = run->plan->nodes_auto ? &run->budget : NULL,
                                .ahead = run->plan->ahead ? (int32_t)run->plan->guesses : 0};
    run->start_s = now_s();
    error = take(run, &state_of(run)->pending, 1, 1); /* the prompt's pass gave the first token */
    while (error == 0 && run->count < run->plan->tokens_max && state_of(run)->finish[0] == '\0') {
        error = one_round(run);
    }
    run->seconds = now_s() - run->start_s;
    return error;
}

/* The page of --report. TV_CLI_OK, or the exit code after saying why. */
static int write_report(const struct run *run, const char *finish, double mean, double rate)
{
    const struct tv_report_summary summary = {.finish = finish,
                                              .digest = state_of(run)->digest,
                                              .accept_len_mean = mean,
                                              .tokens_per_s = rate,
                                              .seconds = run->seconds,
                                              .drafts = run->drafts,
                                              .server_us = run->server_us,
                                              .rounds = run->rounds,
                                              .text = run->tokens,
                                              .count = run->count};
    int error = tv_report_write(run->report, &summary, run->plan->report_path);
    if (error != 0) {
        (void)fprintf(stderr, "treeverify: %s: %s\n", run->plan->report_path, strerror(-error));
        return TV_CLI_OUTPUT;
    }
    return TV_CLI_OK;
}

static int report(const struct run *run)
{
    double mean = run->rounds > 0 ? (double)run->round_tokens / run->rounds : 0.0;
    double rate = run->seconds > 0.0 ? run->round_tokens / run->seconds : 0.0;
    const char *finish = state_of(run)->finish[0] != '\0' ? state_of(run)->finish : "max-tokens";
    int code = run->report != NULL ? write_report(run, finish, mean, rate) : TV_CLI_OK;
    if (!run->plan->cli.json) {
        (void)printf("\n\n%d new tokens in %d rounds: acceptance length %.2f, %.1f drafts a round, "
                     "%.0f tokens/s (%s)\n",
                     (int)run->count, (int)run->rounds, mean,
                     run->rounds > 0 ? (double)run->drafts / run->rounds : 0.0, rate, finish);
        if (run->plan->ahead) {
            (void)printf("%d of %d rounds sent ahead with a right guess\n",
                         (int)run->speculation.right, (int)run->speculation.sent_ahead);
        }
        return code;
    }
    (void)fputs("{\"text\":", stdout);
    tv_cli_print_json_text(stdout, run->tokens, (size_t)run->count);
    (void)fputs(",\"tokens\":", stdout);
    tv_cli_print_json_ints(stdout, run->tokens, (size_t)run->count);
    (void)fputs(",\"own\":[", stdout);
    for (int32_t i = 0; i < run->count; i++) {
        (void)printf(i == 0 ? "%d" : ",%d", run->own[i]);
    }
    (void)printf("],\"rounds\":%d,\"drafts\":%lld,\"accept_len_mean\":%.4f,\"tokens_per_s\":%.1f,"
                 "\"seconds\":%.4f,\"server_us\":%lld,\"sent_ahead\":%d,\"right\":%d,"
                 "\"finish\":\"%s\",\"digest\":\"%s\"}\n",
                 (int)run->rounds, (long long)run->drafts, mean, rate, run->seconds,
                 (long long)run->server_us, (int)run->speculation.sent_ahead,
                 (int)run->speculation.right, finish, state_of(run)->digest);
    return code;
}

static int to_tokens(const char *text, size_t bytes, int32_t **ret_tokens)
{
    int32_t *tokens = malloc((bytes + 1) * sizeof(*tokens));
    if (tokens == NULL) {
        return -ENOMEM;
    }
    for (size_t i = 0; i < bytes; i++) {
        tokens[i] = (unsigned char)text[i];
    }
    *ret_tokens = tokens;
    return 0;
}

static int make_drafter(const struct plan *plan, struct tv_drafter **ret_drafter)
{
    char *text = NULL;
    int32_t *store = NULL;
    size_t bytes = 0;
    int code = TV_CLI_OK;
    if (plan->store_path != NULL) {
        code = tv_cli_read_file(plan->store_path, STORE_BYTES_MAX, &text, &bytes);
    }
    if (code == TV_CLI_OK && (to_tokens(text, bytes, &store) != 0 ||
                              tv_drafter_create(store, bytes, ret_drafter) != 0)) {
        (void)fputs("treeverify: out of memory\n", stderr);
        code = TV_CLI_MEMORY;
    }
    free(store);
    free(text);
    return code;
}

/* The text has been told, or why there is none: nobody waits longer for the session's end. */
static void leave(struct run *run, int failed)
{
    if (run->session != NULL && tv_cli_leave(run->session, failed, &run->problem) != 0) {
        (void)fputs("treeverify: the session was not deleted, its lease will end it: ", stderr);
        tv_cli_print_safe(stderr, run->problem.detail);
        (void)fputc('\n', stderr);
    }
}

static int run_plan(const struct plan *plan, const char *text, size_t bytes)
{
    static struct run run; /* too large for a stack; a process has one */
    int32_t *prompt = NULL;
    run = (struct run){.plan = plan};
    int code = tv_cli_connect(&plan->cli, &run.client);
    if (code == TV_CLI_OK && !plan->no_drafts) {
        code = make_drafter(plan, &run.drafter);
    }
    if (code != TV_CLI_OK) {
        goto out;
    }
    run.problem =
        (struct tv_client_problem){.node = -1, .committed = -1, .detail = "out of memory"};
    run.tokens = malloc((size_t)plan->tokens_max * sizeof(*run.tokens));
    run.own = malloc((size_t)plan->tokens_max);
    int error = run.tokens == NULL || run.own == NULL ||
                        (plan->report_path != NULL && tv_report_create(&run.report) != 0)
                    ? -ENOMEM
                    : to_tokens(text, bytes, &prompt);
    if (error == 0) {
        error = generate(&run, prompt, (int32_t)bytes);
    }
    if (run.live) {
        (void)fflush(stdout); /* the text stands before the line goes */
        tv_cli_line_end();
    }
    if (error != 0) {
        if (run.count > 0 && !plan->cli.json) {
            (void)fputc('\n', stdout);
        }
        code = tv_cli_fail(&plan->cli, error, &run.problem);
    } else {
        code = report(&run);
    }
    leave(&run, code != TV_CLI_OK);
out:
    free(prompt);
    free(run.tokens);
    free(run.own);
    tv_report_destroy(run.report);
    tv_drafter_destroy(run.drafter);
    tv_client_destroy(run.client);
    return code;
}

enum {
    STORE = TV_CLI_OPT_OWN,
    NODES,
    MAX_TOKENS,
    TEMPERATURE,
    SEED,
    STOP,
    NO_DRAFTS,
    AHEAD,
    GUESSES,
    REPORT,
    COLOR,
    LIVE
};

/* -1: taken; -2: not one of ours; else the exit code. */
static int own_option(struct plan *plan, int option)
{
    int64_t number;
    switch (option) {
    case STORE:
        plan->store_path = optarg;
        return -1;
    case NODES:
        plan->nodes_auto = strcmp(optarg, "auto") == 0;
        if (plan->nodes_auto) {
            plan->nodes_max = NODES_DEFAULT;
            return -1;
        }
        return tv_cli_parse_int(optarg, 1, TV_CLIENT_NODES_MAX, &plan->nodes_max) == 0
                   ? -1
                   : tv_cli_usage("--nodes takes 1 to %d, or auto", TV_CLIENT_NODES_MAX);
    case MAX_TOKENS:
        return tv_cli_parse_int(optarg, 1, 1 << 20, &plan->tokens_max) == 0
                   ? -1
                   : tv_cli_usage("--max-tokens takes 1 to %d", 1 << 20);
    case TEMPERATURE:
        return tv_cli_parse_real(optarg, 0.0, 100.0, &plan->temperature) == 0
                   ? -1
                   : tv_cli_usage("--temperature takes 0 to 100");
    case SEED:
        plan->seed = optarg;
        return optarg[0] != '\0' && strlen(optarg) <= TV_CLIENT_SEED_DIGITS_MAX &&
                       strspn(optarg, "0123456789") == strlen(optarg)
                   ? -1
                   : tv_cli_usage("--seed takes a decimal number of up to 64 bits");
    case STOP:
        if (plan->stop_count == TV_CLIENT_STOP_IDS_MAX ||
            tv_cli_parse_int(optarg, 0, INT32_MAX, &number) != 0) {
            return tv_cli_usage("--stop takes a token id, at most %d times",
                                TV_CLIENT_STOP_IDS_MAX);
        }
        plan->stop_ids[plan->stop_count++] = (int32_t)number;
        return -1;
    case NO_DRAFTS:
        plan->no_drafts = 1;
        return -1;
    case AHEAD:
        plan->ahead = 1;
        return -1;
    case GUESSES:
        return tv_cli_parse_int(optarg, 1, TV_CLIENT_GUESSES_MAX, &plan->guesses) == 0
                   ? -1
                   : tv_cli_usage("--guesses takes 1 to %d", TV_CLIENT_GUESSES_MAX);
    case REPORT:
        plan->report_path = optarg;
        return -1;
    case COLOR:
        plan->color =
            strcmp(optarg, "always") == 0 || (strcmp(optarg, "auto") == 0 && isatty(STDOUT_FILENO));
        return plan->color || strcmp(optarg, "auto") == 0 || strcmp(optarg, "never") == 0
                   ? -1
                   : tv_cli_usage("--color takes auto, always or never");
    case LIVE:
        plan->live = strcmp(optarg, "auto") == 0;
        return plan->live || strcmp(optarg, "never") == 0
                   ? -1
                   : tv_cli_usage("--live takes auto or never");
    default:
        return -2;
    }
}

int tv_cli_generate(int argc, char **argv)
{
    static const struct option options[] = {{"store", required_argument, NULL, STORE},
                                            {"nodes", required_argument, NULL, NODES},
                                            {"max-tokens", required_argument, NULL, MAX_TOKENS},
                                            {"temperature", required_argument, NULL, TEMPERATURE},
                                            {"seed", required_argument, NULL, SEED},
                                            {"stop", required_argument, NULL, STOP},
                                            {"no-drafts", no_argument, NULL, NO_DRAFTS},
                                            {"ahead", no_argument, NULL, AHEAD},
                                            {"guesses", required_argument, NULL, GUESSES},
                                            {"report", required_argument, NULL, REPORT},
                                            {"color", required_argument, NULL, COLOR},
                                            {"live", required_argument, NULL, LIVE},
                                            TV_CLI_RESTART_OPTION,
                                            TV_CLI_COMMON_OPTIONS};
    struct plan plan = {.nodes_max = NODES_DEFAULT, .tokens_max = 200, .live = 1, .guesses = 1};
    int option;
    tv_cli_init(&plan.cli);
    plan.color = isatty(STDOUT_FILENO);
    while ((option = getopt_long(argc, argv, "", options, NULL)) != -1) {
        int code = own_option(&plan, option);
        if (code == -2) {
            code = tv_cli_option(&plan.cli, option, help);
        }
        if (code >= 0) {
            return code;
        }
    }
    if (argc - optind != 1) {
        return tv_cli_usage("generate takes one PROMPT (quote it), or - for stdin");
    }
    if (strcmp(argv[optind], "-") != 0) {
        size_t bytes = strlen(argv[optind]);
        if (bytes == 0 || bytes > PROMPT_BYTES_MAX) {
            return tv_cli_usage("a prompt has 1 to %zu bytes", PROMPT_BYTES_MAX);
        }
        return run_plan(&plan, argv[optind], bytes);
    }
    char *text = NULL;
    size_t bytes = 0;
    int code = tv_cli_read_file("-", PROMPT_BYTES_MAX, &text, &bytes);
    if (code == TV_CLI_OK) {
        code = bytes > 0 ? run_plan(&plan, text, bytes) : tv_cli_usage("the prompt is empty");
    }
    free(text);
    return code;
}
