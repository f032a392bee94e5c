/*
 * bench.c - `treeverify bench`: many synthetic drafters at a distance, and what their rounds take.
 *
 * Owns the load and the table. A drafter is a thread with a client and a session of its own; its
 * text is the model's, decoded once for each prompt, so that drafts of a known quality cost no
 * drafter's time (synthetic.c). Sampling is greedy. Measures, and judges nothing.
 */
#include "clients/cli/bench.h"

#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define DRAFTERS_MAX 1024
#define ROUNDS_MAX   100000
#define ACCEPTED_MAX 63
#define STACK_BYTES  ((size_t)512 << 10) /* a tree of 1,024 nodes, and libcurl */
#define CALL_MS      600000              /* a round may wait for hundreds of others */
#define SHOWN_EVERY  100                 /* ms between two pictures of the progress */

static const char help[] =
    "usage: treeverify bench [OPTIONS]\n"
    "\n"
    "N drafters side by side, each with a session: they know how the model goes on, and draft so\n"
    "many tokens right and the others wrong. Prints percentiles of the time of a round and rates.\n"
    "\n"
    "  --drafters N      side by side (16)\n"
    "  --rounds N        of each (20)\n"
    "  --nodes N         drafts of a tree, node 0 not counted (16)\n"
    "  --accepted N      drafts of a tree that are right (3)\n"
    "  --rtt-ms T        round trip that is added to the link's own (0)\n"
    "  --think-ms T      a drafter's time between two rounds (0)\n"
    "  --seed N          of prompts and wrong drafts (1)\n" TV_CLI_RESTART_HELP TV_CLI_COMMON_HELP
    "\n"
    "Times of the table are milliseconds: round trip as a drafter sees it, server, queue and "
    "model\n"
    "as the server says.\n";

struct plan {
    struct tv_cli cli;
    int64_t drafters, rounds, nodes, accepted, seed;
    double rtt_ms, think_ms;
};

/* One drafter's thread. */
struct worker {
    const struct plan *plan;
    const struct tv_synthetic_text *text;
    struct load *load;
    struct tv_client *client;
    struct tv_sample *samples; /* [plan->rounds] a part of load's */
    struct tv_client_problem problem;
    uint64_t random;
    int64_t sample_count, token_count, retries;
    int error;
    pthread_t thread;
};

struct load {
    struct worker *workers; /* [plan->drafters] */
    struct tv_sample *samples;
    _Atomic int64_t rounds; /* relaxed: for the picture alone */
    _Atomic int64_t ended;  /* drafters; relaxed, the join orders what they wrote */
    _Atomic int failed;     /* relaxed: the others may end a round later */
};

static void rest_ms(double ms)
{
    if (ms > 0.0) {
        struct timespec rest = {.tv_sec = (time_t)(ms / 1e3)};
        rest.tv_nsec = (long)((ms - (double)rest.tv_sec * 1e3) * 1e6);
        while (nanosleep(&rest, &rest) != 0 && errno == EINTR) {
        }
    }
}

static double now_ms(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec * 1e3 + (double)now.tv_nsec * 1e-6;
}

static int one_round(struct worker *worker, struct tv_client_session *session)
{
    const struct plan *plan = worker->plan;
    int32_t tokens[TV_CLIENT_NODES_MAX], parents[TV_CLIENT_NODES_MAX];
    struct tv_client_round round;
    int32_t count =
        tv_synthetic_draft(worker->text, tv_client_session_state(session), (int32_t)plan->nodes,
                           (int32_t)plan->accepted, &worker->random, tokens, parents);
    double started = now_ms();
    rest_ms(plan->rtt_ms / 2.0);
    int error = tv_client_verify(session, tokens, parents, count, &round, &worker->problem);
    if (error != 0) {
        return error;
    }
    rest_ms(plan->rtt_ms / 2.0);
    worker->samples[worker->sample_count++] = (struct tv_sample){
        .values = {now_ms() - started, (double)round.server_us / 1e3, (double)round.queue_us / 1e3,
                   (double)round.gpu_us / 1e3, (double)round.batch}};
    worker->token_count += round.token_count;
    worker->retries += round.attempts - 1;
    tv_client_round_finish(&round);
    return 0;
}

static void *work(void *user)
{
    struct worker *worker = user;
    struct tv_client_session_options options;
    struct tv_client_session *session = NULL;
    struct tv_client_problem ignored;
    tv_client_session_options_init(&options);
    options.tokens = worker->text->tokens;
    options.token_count = worker->text->prompt_count;
    worker->error = tv_client_session_create(worker->client, &options, &session, &worker->problem);
    while (worker->error == 0 && worker->sample_count < worker->plan->rounds &&
           atomic_load_explicit(&worker->load->failed, memory_order_relaxed) == 0) {
        worker->error = one_round(worker, session);
        atomic_fetch_add_explicit(&worker->load->rounds, 1, memory_order_relaxed);
        rest_ms(worker->plan->think_ms);
    }
    if (worker->error != 0) {
        atomic_store_explicit(&worker->load->failed, 1, memory_order_relaxed);
    }
    if (session != NULL) {
        (void)tv_cli_leave(session, worker->error != 0, &ignored); /* its lease ends it otherwise */
    }
    atomic_fetch_add_explicit(&worker->load->ended, 1, memory_order_relaxed);
    return NULL;
}

/* Threads of all drafters, started and joined; what they did is in load. */
static int run_all(const struct plan *plan, struct load *load, double *ret_seconds)
{
    pthread_attr_t attributes;
    int64_t started = 0;
    int shown = !plan->cli.json && isatty(STDERR_FILENO);
    double since = now_ms();
    if (pthread_attr_init(&attributes) != 0) {
        return TV_CLI_MEMORY;
    }
    (void)pthread_attr_setstacksize(&attributes, STACK_BYTES); /* else the default's */
    while (started < plan->drafters && pthread_create(&load->workers[started].thread, &attributes,
                                                      work, &load->workers[started]) == 0) {
        started++;
    }
    (void)pthread_attr_destroy(&attributes);
    if (started < plan->drafters) {
        atomic_store_explicit(&load->failed, 1, memory_order_relaxed);
    }
    while (shown && atomic_load_explicit(&load->ended, memory_order_relaxed) < started) {
        tv_cli_progress("rounds", atomic_load_explicit(&load->rounds, memory_order_relaxed),
                        plan->drafters * plan->rounds);
        rest_ms(SHOWN_EVERY);
    }
    for (int64_t i = 0; i < started; i++) {
        (void)pthread_join(load->workers[i].thread, NULL); /* a thread of ours, joined once */
    }
    if (shown) {
        tv_cli_progress_end();
    }
    *ret_seconds = (now_ms() - since) / 1e3;
    if (started < plan->drafters) {
        (void)fprintf(stderr, "treeverify: only %d threads can be made\n", (int)started);
        return TV_CLI_MEMORY;
    }
    return TV_CLI_OK;
}

/* The samples of all drafters one behind the other. */
static int64_t gather(const struct plan *plan, struct load *load)
{
    int64_t count = 0;
    for (int64_t i = 0; i < plan->drafters; i++) {
        const struct worker *worker = &load->workers[i];
        for (int64_t s = 0; s < worker->sample_count; s++) {
            load->samples[count++] = worker->samples[s];
        }
    }
    return count;
}

static int report(const struct plan *plan, struct load *load, double seconds)
{
    struct tv_bench_totals totals = {.seconds = seconds};
    for (int64_t i = 0; i < plan->drafters; i++) {
        struct worker *worker = &load->workers[i];
        if (worker->error != 0) {
            return tv_cli_fail(&plan->cli, worker->error, &worker->problem);
        }
        totals.tokens += worker->token_count;
        totals.retries += worker->retries;
    }
    totals.rounds = gather(plan, load);
    return tv_bench_report(load->samples, &totals, plan->cli.json);
}

static int run_plan(const struct plan *plan)
{
    struct tv_synthetic_text texts[TV_SYNTHETIC_TEXTS_MAX] = {{0}};
    struct load load = {0};
    double seconds = 0.0;
    int32_t text_count =
        plan->drafters < TV_SYNTHETIC_TEXTS_MAX ? (int32_t)plan->drafters : TV_SYNTHETIC_TEXTS_MAX;
    const struct tv_synthetic_wish wish = {.seed = (uint64_t)plan->seed,
                                           .tokens = (plan->accepted + 1) * (plan->rounds + 1)};
    int code = tv_synthetic_texts(&plan->cli, &wish, text_count, texts);
    if (code != TV_CLI_OK) {
        goto out;
    }
    load.workers = calloc((size_t)plan->drafters, sizeof(*load.workers));
    load.samples = calloc((size_t)(plan->drafters * plan->rounds), sizeof(*load.samples));
    if (load.workers == NULL || load.samples == NULL) {
        (void)fputs("treeverify: out of memory\n", stderr);
        code = TV_CLI_MEMORY;
        goto out;
    }
    for (int64_t i = 0; i < plan->drafters && code == TV_CLI_OK; i++) {
        struct worker *worker = &load.workers[i];
        worker->plan = plan;
        worker->load = &load;
        worker->text = &texts[i % text_count];
        worker->samples = load.samples + i * plan->rounds;
        worker->random = tv_synthetic_seed((uint64_t)plan->seed + (uint64_t)i);
        code = tv_cli_connect_for(&plan->cli, CALL_MS, &worker->client);
    }
    if (code == TV_CLI_OK) {
        code = run_all(plan, &load, &seconds);
    }
    if (code == TV_CLI_OK) {
        code = report(plan, &load, seconds);
    }
out:
    for (int64_t i = 0; load.workers != NULL && i < plan->drafters; i++) {
        tv_client_destroy(load.workers[i].client);
    }
    for (int32_t i = 0; i < text_count; i++) {
        free(texts[i].tokens);
    }
    free(load.workers);
    free(load.samples);
    return code;
}

enum { DRAFTERS = TV_CLI_OPT_OWN, ROUNDS, NODES, ACCEPTED, RTT_MS, THINK_MS, SEED };

/* -1: taken; -2: not one of ours; else the exit code. */
static int own_option(struct plan *plan, int option)
{
    static const struct {
        const char *name;
        int64_t lo, hi;
    } ranges[] = {{"--drafters", 1, DRAFTERS_MAX},
                  {"--rounds", 1, ROUNDS_MAX},
                  {"--nodes", 1, TV_CLIENT_NODES_MAX - 1},
                  {"--accepted", 0, ACCEPTED_MAX},
                  {"--rtt-ms", 0, 60000},
                  {"--think-ms", 0, 60000},
                  {"--seed", 0, INT64_MAX}};
    int64_t *const wholes[] = {
        &plan->drafters, &plan->rounds, &plan->nodes, &plan->accepted, NULL, NULL, &plan->seed};
    int at = option - DRAFTERS;
    if (at < 0 || at >= (int)(sizeof(ranges) / sizeof(ranges[0]))) {
        return -2;
    }
    double *real = option == RTT_MS ? &plan->rtt_ms : &plan->think_ms;
    int error = wholes[at] != NULL
                    ? tv_cli_parse_int(optarg, ranges[at].lo, ranges[at].hi, wholes[at])
                    : tv_cli_parse_real(optarg, (double)ranges[at].lo, (double)ranges[at].hi, real);
    return error == 0 ? -1
                      : tv_cli_usage("%s takes %lld to %lld", ranges[at].name,
                                     (long long)ranges[at].lo, (long long)ranges[at].hi);
}

int tv_cli_bench(int argc, char **argv)
{
    static const struct option options[] = {{"drafters", required_argument, NULL, DRAFTERS},
                                            {"rounds", required_argument, NULL, ROUNDS},
                                            {"nodes", required_argument, NULL, NODES},
                                            {"accepted", required_argument, NULL, ACCEPTED},
                                            {"rtt-ms", required_argument, NULL, RTT_MS},
                                            {"think-ms", required_argument, NULL, THINK_MS},
                                            {"seed", required_argument, NULL, SEED},
                                            TV_CLI_RESTART_OPTION,
                                            TV_CLI_COMMON_OPTIONS};
    struct plan plan = {.drafters = 16, .rounds = 20, .nodes = 16, .accepted = 3, .seed = 1};
    int option;
    tv_cli_init(&plan.cli);
    while ((option = getopt_long(argc, argv, "", options, NULL)) != -1) {
        int code = own_option(&plan, option);
        if (code == -2) {
            code = tv_cli_option(&plan.cli, option, help);
        }
        if (code >= 0) {
            return code;
        }
    }
    if (optind != argc) {
        return tv_cli_usage("bench takes no argument");
    }
    return run_plan(&plan);
}
