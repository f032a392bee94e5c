/*
 * bench.h - the parts of `treeverify bench`: texts that are known, drafts of known quality, and the
 * table.
 */
#ifndef TV_CLI_BENCH_H
#define TV_CLI_BENCH_H

#include "clients/cli/cli.h"

#define TV_SYNTHETIC_TEXTS_MAX 4 /* different ones; drafters beyond share */

/* A prompt and how the model goes on behind it, greedily. */
struct tv_synthetic_text {
    int32_t *tokens; /* [count], owned */
    int32_t prompt_count, count;
    int32_t vocab; /* of drafts: ids below are the model's */
};

struct tv_synthetic_wish {
    uint64_t seed;  /* of the prompts */
    int64_t tokens; /* behind the prompt, at least */
};

/* Decode count texts at the server; a picture of the progress on a terminal. TV_CLI_OK, or the exit
 * code after saying why. Each ret_texts[i].tokens is the caller's to free, in either case. */
int tv_synthetic_texts(const struct tv_cli *cli, const struct tv_synthetic_wish *wish,
                       int32_t count, struct tv_synthetic_text *ret_texts);
/* The state of a generator of wrong drafts; never 0. */
uint64_t tv_synthetic_seed(uint64_t seed);
/* A tree under the session's pending token: a chain of the text's next `right` tokens, and wrong
 * ones beside them until there are `drafts`; as the session's limits and the text allow. tokens,
 * parents [TV_CLIENT_NODES_MAX]; returns the nodes, node 0 included. */
int32_t tv_synthetic_draft(const struct tv_synthetic_text *text,
                           const struct tv_client_state *state, int32_t drafts, int32_t right,
                           uint64_t *random, int32_t *ret_tokens, int32_t *ret_parents);

/* What one round took, in the order of the table: milliseconds, and rounds in its launch. */
enum { TV_SAMPLE_VALUES = 5 };
struct tv_sample {
    double values[TV_SAMPLE_VALUES];
};
struct tv_bench_totals {
    int64_t rounds, tokens, retries;
    double seconds;
};
/* The table, or with json one object of the same numbers, of samples [totals->rounds] (at least
 * one). TV_CLI_OK, or the exit code after saying why. */
int tv_bench_report(const struct tv_sample *samples, const struct tv_bench_totals *totals,
                    int json);

#endif
