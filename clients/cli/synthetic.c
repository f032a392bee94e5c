/*
 * synthetic.c - drafts of a known quality for `treeverify bench`, and the table of what they took.
 *
 * A text is decoded by the server itself once; drafting from it takes no time and is right exactly
 * as often as asked for. Owns no session beyond a text's making.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "clients/cli/bench.h"

#define PROMPT_TOKENS 64
#define BYTES         256 /* ids of prompts and wrong drafts: every model has these */
#define DECODE_TOKENS 64
#define TRIES         8 /* to find a wrong draft that is not there yet */

static const char *const names[TV_SAMPLE_VALUES] = {"round trip", "server", "queue", "model",
                                                    "rounds in a launch"};
static const double shares[] = {0.50, 0.90, 0.99, 1.0};
#define SHARES (sizeof(shares) / sizeof(shares[0]))

uint64_t tv_synthetic_seed(uint64_t seed)
{
    return (seed + 1) * 0x9E3779B97F4A7C15u | 1;
}

/* 0 to below (xorshift64). */
static int32_t draw(uint64_t *random, int32_t below)
{
    *random ^= *random << 13;
    *random ^= *random >> 7;
    *random ^= *random << 17;
    return (int32_t)((*random >> 33) % (uint64_t)below);
}

static int one_text(struct tv_client *client, const struct tv_synthetic_wish *wish, int shown,
                    int32_t number, struct tv_synthetic_text *text,
                    struct tv_client_problem *problem)
{
    struct tv_client_session_options options;
    struct tv_client_session *session = NULL;
    struct tv_client_problem ignored;
    int32_t prompt[PROMPT_TOKENS];
    uint64_t random = tv_synthetic_seed(wish->seed * TV_SYNTHETIC_TEXTS_MAX + (uint64_t)number);
    char label[32];
    (void)snprintf(label, sizeof(label), "text %d", (int)number + 1);
    for (int32_t i = 0; i < text->prompt_count; i++) {
        prompt[i] = draw(&random, text->vocab);
    }
    tv_client_session_options_init(&options);
    options.tokens = prompt;
    options.token_count = text->prompt_count;
    int error = tv_client_session_create(client, &options, &session, problem);
    while (error == 0) {
        const struct tv_client_state *state = tv_client_session_state(session);
        int64_t have = state->committed_len + 1 - state->prompt_len;
        struct tv_client_round round;
        if (shown) {
            tv_cli_progress(label, have, wish->tokens + 1);
        }
        if (have > wish->tokens || state->finish[0] != '\0') {
            text->count = state->committed_len + 1;
            text->tokens = malloc((size_t)text->count * sizeof(*text->tokens));
            if (text->tokens == NULL) {
                error = -ENOMEM;
                (void)snprintf(problem->detail, sizeof(problem->detail), "out of memory");
                break;
            }
            memcpy(text->tokens, state->tokens,
                   (size_t)state->committed_len * sizeof(*text->tokens));
            text->tokens[state->committed_len] = state->pending;
            break;
        }
        int64_t left = wish->tokens + 1 - have;
        error = tv_client_decode(session, left > DECODE_TOKENS ? DECODE_TOKENS : (int32_t)left,
                                 &round, problem);
        if (error == 0) {
            tv_client_round_finish(&round);
        }
    }
    if (session != NULL) {
        (void)tv_cli_leave(session, error != 0, &ignored); /* its lease ends it otherwise */
    }
    return error;
}

int tv_synthetic_texts(const struct tv_cli *cli, const struct tv_synthetic_wish *wish,
                       int32_t count, struct tv_synthetic_text *ret_texts)
{
    struct tv_client *client = NULL;
    struct tv_client_model model;
    struct tv_client_problem problem = {.node = -1, .committed = -1};
    int shown = !cli->json && isatty(STDERR_FILENO);
    int code = tv_cli_connect(cli, &client);
    if (code != TV_CLI_OK) {
        return code;
    }
    int error = tv_client_model(client, &model, &problem);
    int32_t prompt_count = PROMPT_TOKENS < model.max_len / 2 ? PROMPT_TOKENS : model.max_len / 2;
    if (error == 0 && prompt_count + wish->tokens + 2 > model.max_len) {
        code = tv_cli_usage("such rounds take %lld tokens, and the model has %d positions",
                            (long long)(prompt_count + wish->tokens + 2), (int)model.max_len);
        goto out;
    }
    for (int32_t i = 0; error == 0 && i < count; i++) {
        ret_texts[i].prompt_count = prompt_count;
        ret_texts[i].vocab = model.vocab < BYTES ? model.vocab : BYTES;
        error = one_text(client, wish, shown, i, &ret_texts[i], &problem);
    }
    if (shown) {
        tv_cli_progress_end();
    }
    if (error != 0) {
        code = tv_cli_fail(cli, error, &problem);
    }
out:
    tv_client_destroy(client);
    return code;
}

/* Is token among parent's children, or the one that the model draws there? */
static int is_taken(const struct tv_synthetic_text *text, int32_t at, int32_t chain,
                    const int32_t *tokens, const int32_t *parents, int32_t count, int32_t parent,
                    int32_t token)
{
    if (parent <= chain && at + 1 + parent < text->count &&
        text->tokens[at + 1 + parent] == token) {
        return 1;
    }
    for (int32_t i = 1; i < count; i++) {
        if (parents[i] == parent && tokens[i] == token) {
            return 1;
        }
    }
    return 0;
}

int32_t tv_synthetic_draft(const struct tv_synthetic_text *text,
                           const struct tv_client_state *state, int32_t drafts, int32_t right,
                           uint64_t *random, int32_t *ret_tokens, int32_t *ret_parents)
{
    int32_t at = state->committed_len; /* of the pending token */
    int32_t nodes = drafts + 1 < state->max_nodes ? drafts + 1 : state->max_nodes;
    int32_t room = state->max_len - 1 - state->committed_len;
    int32_t depth = state->max_depth < room ? state->max_depth : room;
    int32_t count = 1;
    ret_tokens[0] = state->pending;
    ret_parents[0] = -1;
    while (count < nodes && count <= right && count <= depth && at + count < text->count) {
        ret_tokens[count] = text->tokens[at + count];
        ret_parents[count] = count - 1;
        count++;
    }
    int32_t chain = count - 1; /* the last right node */
    int32_t tries = 0;
    while (count < nodes && depth > 0 && tries < TRIES * nodes) {
        int32_t parent = draw(random, chain < depth ? chain + 1 : depth);
        int32_t token = draw(random, text->vocab);
        tries++;
        if (!is_taken(text, at, chain, ret_tokens, ret_parents, count, parent, token)) {
            ret_tokens[count] = token;
            ret_parents[count] = parent;
            count++;
        }
    }
    return count;
}

static int by_value(const void *a, const void *b)
{
    double one = *(const double *)a;
    double other = *(const double *)b;
    return (one > other) - (one < other);
}

/* The value below which a share of the sorted ones lies, between neighbours in proportion. */
static double percentile(const double *sorted, int64_t count, double share)
{
    double place = share * (double)(count - 1);
    int64_t below = (int64_t)place;
    int64_t above = below + 1 < count ? below + 1 : below;
    return sorted[below] + (place - (double)below) * (sorted[above] - sorted[below]);
}

/* Column `value` of the samples at each share. 0, or -ENOMEM. */
static int column(const struct tv_sample *samples, int64_t count, int value,
                  double ret_values[SHARES])
{
    double *sorted = malloc((size_t)count * sizeof(*sorted));
    if (sorted == NULL) {
        return -ENOMEM;
    }
    for (int64_t i = 0; i < count; i++) {
        sorted[i] = samples[i].values[value];
    }
    qsort(sorted, (size_t)count, sizeof(*sorted), by_value);
    for (size_t i = 0; i < SHARES; i++) {
        ret_values[i] = percentile(sorted, count, shares[i]);
    }
    free(sorted);
    return 0;
}

int tv_bench_report(const struct tv_sample *samples, const struct tv_bench_totals *totals, int json)
{
    double table[TV_SAMPLE_VALUES][SHARES];
    double rate = totals->seconds > 0.0 ? 1.0 / totals->seconds : 0.0;
    double mean = totals->rounds > 0 ? (double)totals->tokens / (double)totals->rounds : 0.0;
    for (int v = 0; v < TV_SAMPLE_VALUES; v++) {
        if (column(samples, totals->rounds, v, table[v]) != 0) {
            (void)fputs("treeverify: out of memory\n", stderr);
            return TV_CLI_MEMORY;
        }
    }
    if (json) {
        (void)printf("{\"rounds\":%lld,\"tokens\":%lld,\"seconds\":%.4g,\"tokens_per_s\":%.4g,"
                     "\"rounds_per_s\":%.4g,\"accept_len_mean\":%.4g,\"retries\":%lld,"
                     "\"percentiles\":{",
                     (long long)totals->rounds, (long long)totals->tokens, totals->seconds,
                     (double)totals->tokens * rate, (double)totals->rounds * rate, mean,
                     (long long)totals->retries);
    } else {
        (void)printf("%20s %9s %9s %9s %9s\n", "ms", "p50", "p90", "p99", "largest");
    }
    for (int v = 0; v < TV_SAMPLE_VALUES; v++) {
        (void)printf(json ? "%s\"%s\":[%.4g,%.4g,%.4g,%.4g]" : "%s%20s %9.4g %9.4g %9.4g %9.4g\n",
                     json && v > 0 ? "," : "", names[v], table[v][0], table[v][1], table[v][2],
                     table[v][3]);
    }
    if (json) {
        (void)fputs("}}\n", stdout);
    } else {
        (void)printf("%lld rounds and %lld tokens in %.4g s: %.4g tokens/s, %.4g rounds/s, "
                     "acceptance length %.4g, %lld retries\n",
                     (long long)totals->rounds, (long long)totals->tokens, totals->seconds,
                     (double)totals->tokens * rate, (double)totals->rounds * rate, mean,
                     (long long)totals->retries);
    }
    return TV_CLI_OK;
}
