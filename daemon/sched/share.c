/*
 * share.c - which launches of rounds take tokens of a waiting prompt along, and how many.
 *
 * A token goes along while it costs no more there than in a slice of what is left of its prompt: a
 * slice reads all weights for itself, which a short one cannot make up for and a long one can. Both
 * are measured. A round that comes when a launch has just begun waits for that one and then goes
 * itself. Half as much again for each is three times a launch alone, which is what a small round
 * may take beside a long prompt. So what a launch took is held against what launches of as many
 * nodes take alone (curve.c), and the next one takes fewer tokens along, or more. Expanded
 * attention grows with the prefix whatever the number of rows, so the depth is learnt too, from the
 * first tile on and never by more than twofold: beyond it a prompt goes in slices of its own
 * (prefill.c), which small rounds interrupt. Refuses to guess: rounds and slices of a size that was
 * never measured go alone, once.
 */
#include <limits.h>

#include "sched/job.h"

/* Tokens along, of the first launch and at the least. */
#define ROWS_FIRST 8
#define ROWS_MIN   4
/* Positions before which tokens always go along: one tile of attention. */
#define KEYS_MIN 64
/* A launch may take half as much again as alone, and in any case so much. */
#define SLACK_US 1000
/* A new cost of a token counts for so much; and while tokens are thought too dear there, each
 * launch without some forgets so much of it: one in a hundred or so tries again. */
#define COST_SHARE  4
#define COST_FORGET 256

void tv_sched_share_init(struct tv_sched_share *share)
{
    *share = (struct tv_sched_share){.rows = ROWS_FIRST, .keys = KEYS_MIN};
}

/* Where the next token of the job's prompt goes. */
static int32_t position(const struct job *job)
{
    return job->token_done + (job->own_context ? 0 : job->session->len);
}

int tv_sched_share_may(const struct tv_sched *sched, const struct job *job)
{
    const struct tv_engine *engine = sched->engine;
    return engine->ops->verify_shared != NULL && engine->rider_rows > 0 && !engine->invents_rows &&
           sched->sliced == NULL && position(job) < sched->share.keys;
}

static int32_t smaller(int32_t a, int32_t b)
{
    return a < b ? a : b;
}

/* Is a token of the `left` that a prompt still has as cheap in a launch as in its slice? */
static int is_cheap(struct tv_sched *sched, int32_t left)
{
    struct tv_sched_share *share = &sched->share;
    int32_t slice = smaller(left, smaller(sched->launch_rows, sched->engine->prefill_rows));
    int64_t slice_us = left > 0 ? tv_sched_curve_median(share->slices, slice) : -1;
    if (slice_us < 0) {
        return 0;
    }
    if (share->token_ns <= slice_us * 1000 / slice) {
        return 1;
    }
    share->token_ns -= share->token_ns / COST_FORGET + 1;
    return 0;
}

int32_t tv_sched_share_rows(struct tv_sched *sched, const struct job *job, int32_t nodes)
{
    const struct tv_engine *engine = sched->engine;
    int32_t left = job->token_count - job->token_done;
    if (!tv_sched_share_may(sched, job) || tv_sched_curve_median(sched->curve, nodes) < 0 ||
        !is_cheap(sched, left)) {
        return 0;
    }
    int32_t rows = smaller(sched->share.rows, engine->rider_rows);
    rows = smaller(rows, smaller(sched->launch_rows, engine->prefill_rows) - nodes);
    rows = smaller(rows, left);
    return rows > 0 ? rows : 0;
}

void tv_sched_share_note(struct tv_sched *sched, const struct job *job, int32_t rows, int32_t nodes,
                         int64_t took_us)
{
    struct tv_sched_share *share = &sched->share;
    int64_t alone_us = tv_sched_curve_median(sched->curve, nodes);
    if (alone_us < 0) { /* it lost a round on its way to the device: nothing to hold it against */
        return;
    }
    int64_t slack_us = alone_us / 2 > SLACK_US ? alone_us / 2 : SLACK_US;
    int64_t token_ns = took_us > alone_us ? (took_us - alone_us) * 1000 / rows : 0;
    int32_t end = position(job) + rows;
    share->token_ns += (token_ns - share->token_ns) / COST_SHARE;
    if (took_us > alone_us + slack_us) {
        if (rows <= ROWS_MIN) {
            share->keys = end - rows > KEYS_MIN ? end - rows : KEYS_MIN;
        }
        share->rows = rows / 2 > ROWS_MIN ? rows / 2 : ROWS_MIN;
        return;
    }
    if (rows == share->rows) { /* neither the prompt's end nor the rounds were the bound */
        share->rows = smaller(share->rows + share->rows / 4, sched->engine->rider_rows);
    }
    if (end > share->keys / 2) {
        share->keys = end < INT32_MAX / 2 ? 2 * end : INT32_MAX;
    }
}
