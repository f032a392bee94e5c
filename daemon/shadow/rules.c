/*
 * rules.c - the oracle's own ratio_wor and typical, written from proto/README.md, "Sampling",
 * alone.
 *
 * Shares nothing with verify/: distributions are dense and normalised after every step. Owns its
 * arrays for the time of one call. Refuses to decide without the rows that it needs.
 */
#include <errno.h>
#include <math.h>
#include <stdlib.h>

#include "shadow/round.h"

/* Distributions over the vocabulary at one node, after some of its children were rejected. */
struct turn {
    double *p, *q;   /* the residual and what is left of the draft; each sums to 1 */
    double *first;   /* the filtered target */
    double *shifted; /* draft that was taken off, times how uncertain its share was */
    double mass;     /* of the target in the residual, before it was normalised */
    int32_t rejected;
};

static void turn_close(struct turn *turn)
{
    free(turn->p);
    free(turn->q);
    free(turn->first);
    free(turn->shifted);
}

static int turn_open(struct turn *turn, int32_t vocab)
{
    size_t count = (size_t)vocab;
    turn->p = calloc(count, sizeof *turn->p);
    turn->q = calloc(count, sizeof *turn->q);
    turn->first = calloc(count, sizeof *turn->first);
    turn->shifted = calloc(count, sizeof *turn->shifted);
    turn->mass = 1.0;
    return turn->p == NULL || turn->q == NULL || turn->first == NULL || turn->shifted == NULL
               ? -ENOMEM
               : 0;
}

static double normalise(double *values, int32_t count)
{
    double sum = 0.0;
    for (int32_t t = 0; t < count; t++) {
        sum += values[t];
    }
    for (int32_t t = 0; sum > 0.0 && t < count; t++) {
        values[t] /= sum;
    }
    return sum;
}

static void draft_read(const struct tv_tree *tree, int32_t node, int32_t vocab, double *q)
{
    for (int32_t t = 0; tree->draft.ids == NULL && t < vocab; t++) {
        q[t] = (double)tree->draft.probs[(size_t)node * (size_t)vocab + (size_t)t];
    }
    for (int32_t j = 0; tree->draft.ids != NULL && j < tree->draft.width; j++) {
        size_t at = (size_t)node * (size_t)tree->draft.width + (size_t)j;
        if (tree->draft.ids[at] >= 0) {
            q[tree->draft.ids[at]] = (double)tree->draft.probs[at];
        }
    }
    (void)normalise(q, vocab); /* the decoder saw that there is something */
}

static void reject(struct turn *turn, int32_t vocab, int32_t token)
{
    double rest = 0.0;
    for (int32_t t = 0; t < vocab; t++) {
        rest += turn->p[t] > turn->q[t] ? turn->p[t] - turn->q[t] : 0.0;
    }
    for (int32_t t = 0; t < vocab; t++) {
        turn->shifted[t] += (double)turn->rejected * turn->q[t];
        if (rest > 0.0) {
            turn->p[t] = turn->p[t] > turn->q[t] ? (turn->p[t] - turn->q[t]) / rest : 0.0;
        }
    }
    turn->mass *= rest > 0.0 ? rest : 1.0;
    turn->rejected++;
    turn->q[token] = 0.0;
    (void)normalise(turn->q, vocab); /* nothing left: no child is left either */
}

/* The residual's token, and by how little another one missed it. */
static void residual_draw(const struct turn *turn, int32_t vocab, uint64_t seed, int32_t position,
                          struct tv_shadow_choice *choice)
{
    float best = 0.0f;
    choice->token = -1;
    for (int32_t t = 0; t < vocab; t++) {
        if (turn->p[t] > 0.0) {
            float score = (float)log(turn->p[t]) +
                          (float)tv_shadow_noise(seed, position, t, TV_SHADOW_FOR_RESIDUAL);
            if (choice->token < 0 || score > best) {
                choice->token = t;
                best = score;
            }
        }
    }
    int32_t top = choice->token;
    double lift = exp(tv_shadow_noise(seed, position, top, TV_SHADOW_FOR_RESIDUAL));
    for (int32_t t = 0; t < vocab; t++) {
        if (t != top && turn->p[t] > 0.0) {
            double other = exp(tv_shadow_noise(seed, position, t, TV_SHADOW_FOR_RESIDUAL));
            double apart = turn->mass * (turn->p[top] * lift - turn->p[t] * other);
            double unsure = (turn->first[top] + turn->shifted[top]) * lift +
                            (turn->first[t] + turn->shifted[t]) * other;
            choice->margin = fmin(choice->margin, 2.0 * apart / unsure);
        }
    }
}

int tv_shadow_ratio(const float *logits, int32_t vocab, const struct tv_sampling *sampling,
                    const struct tv_tree *tree, int32_t node, int32_t position,
                    struct tv_shadow_choice *ret_choice)
{
    struct tv_shadow_choice choice = {.child = -1, .token = -1, .margin = INFINITY};
    struct turn turn = {0};
    int rc = turn_open(&turn, vocab);
    if (rc == 0) {
        rc = tv_shadow_target(logits, vocab, sampling, turn.first);
    }
    for (int32_t t = 0; rc == 0 && t < vocab; t++) {
        turn.p[t] = turn.first[t];
    }
    if (rc == 0) {
        draft_read(tree, node, vocab, turn.q);
    }
    for (int32_t i = node + 1; rc == 0 && i < tree->count && choice.child < 0; i++) {
        int32_t token = tree->tokens[i];
        if (tree->parents[i] != node) {
            continue;
        }
        double bar =
            tv_shadow_uniform(sampling->seed, position, token, TV_SHADOW_FOR_COIN) * turn.q[token];
        double unsure = turn.first[token] + turn.shifted[token] + (double)turn.rejected * bar;
        if (unsure > 0.0) {
            choice.margin = fmin(choice.margin, turn.mass * fabs(turn.p[token] - bar) / unsure);
        }
        if (bar < turn.p[token]) {
            choice.child = i;
            choice.token = token;
        } else {
            reject(&turn, vocab, token);
        }
    }
    if (rc == 0 && choice.child < 0) {
        residual_draw(&turn, vocab, sampling->seed, position, &choice);
    }
    turn_close(&turn);
    if (rc == 0 || rc == -EDOM) { /* a row that is not finite decides nothing */
        *ret_choice = choice;
    }
    return rc == -EDOM ? 0 : rc;
}

/* The bar of a row, min(epsilon, delta exp(-H)). */
static double bar_of(const double *p, int32_t vocab, const struct tv_round_rule *rule)
{
    double plogp = 0.0;
    for (int32_t t = 0; t < vocab; t++) {
        plogp += p[t] > 0.0 ? p[t] * log(p[t]) : 0.0;
    }
    double relative = rule->typical_delta * exp(plogp);
    return relative < rule->typical_epsilon ? relative : rule->typical_epsilon;
}

int tv_shadow_typical(int32_t vocab, const struct tv_parity_case *parity_case, tv_shadow_row *row,
                      void *row_context, uint8_t *passes, double *ret_margin)
{
    const struct tv_tree *tree = parity_case->tree;
    double *p = malloc((size_t)vocab * sizeof *p);
    double bar = 0.0, margin = INFINITY;
    int32_t of = -1; /* whose row p and bar are */
    int rc = p != NULL ? 0 : -ENOMEM;
    passes[0] = 1;
    for (int32_t i = 1; rc == 0 && i < tree->count; i++) {
        int32_t parent = tree->parents[i];
        passes[i] = 0;
        if (!passes[parent]) {
            continue;
        }
        if (of != parent) {
            const float *logits = row(row_context, parent);
            rc = logits != NULL ? tv_shadow_target(logits, vocab, &parity_case->rule.sampling, p)
                                : -ENODATA;
            bar = rc == 0 ? bar_of(p, vocab, &parity_case->rule) : 0.0;
            of = parent;
        }
        if (rc == 0) {
            double chance = p[tree->tokens[i]];
            passes[i] = chance >= bar;
            margin = chance > 0.0 && bar > 0.0 ? fmin(margin, fabs(log(chance / bar))) : margin;
        }
    }
    free(p);
    if (rc == 0) {
        *ret_margin = margin;
    }
    return rc;
}
