/*
 * ratio.c - ratio_wor at one node: a coin for each child in node order, then the residual.
 *
 * Exact for children drawn without replacement from the draft (proto/README.md, "Sampling"). Works
 * with unnormalised residuals, so that a rejection touches the draft's entries alone. Owns nothing;
 * leaves the source's arrays zero as it found them.
 */
#include <math.h>

#include "verify/rules.h"

/* The state after `rejected` children: p = left / mass, q = draft / draft_sum. */
struct residual {
    const struct tv_rules_source *source;
    const struct tv_rules_target *row;
    const int32_t *ids; /* of the draft's row, or NULL: dense */
    int32_t width;
    double mass;      /* sum of left */
    double outside;   /* its part at tokens that the draft does not have */
    double draft_sum; /* of what the draft still has */
    int32_t rejected;
    double slope; /* sum of k / draft_sum over the rejections so far: see slack */
};

/* The token of an entry of the draft's row, or -1. */
static int32_t entry(const struct residual *r, int32_t j)
{
    return r->ids != NULL ? r->ids[j] : j;
}

/* The same, of entries that the draft still has. Tokens that were rejected have no residual. */
static int32_t alive(const struct residual *r, int32_t j)
{
    int32_t token = entry(r, j);
    return token >= 0 && r->source->draft[token] > 0.0 ? token : -1;
}

static void load(struct residual *r, const struct tv_tree *tree, int32_t node)
{
    const struct tv_rules_source *source = r->source;
    size_t start = (size_t)node * (size_t)tree->draft.width;
    const float *probs = tree->draft.probs + start;
    r->ids = tree->draft.ids != NULL ? tree->draft.ids + start : NULL;
    r->width = tree->draft.width;
    double sum = 0.0;
    for (int32_t j = 0; j < r->width; j++) {
        sum += (double)probs[j];
    }
    for (int32_t j = 0; j < r->width; j++) {
        int32_t token = entry(r, j);
        if (token >= 0) {
            source->draft[token] = (double)probs[j] / sum;
            r->draft_sum += source->draft[token];
        }
    }
    for (int32_t i = 0; i < r->row->count; i++) {
        int32_t token = r->row->ids[i];
        source->target[token] = source->left[token] = r->row->probs[i];
        r->outside += source->draft[token] > 0.0 ? 0.0 : r->row->probs[i];
    }
    r->mass = 1.0;
}

static void unload(const struct residual *r)
{
    for (int32_t j = 0; j < r->width; j++) {
        if (entry(r, j) >= 0) {
            r->source->draft[entry(r, j)] = 0.0;
        }
    }
    for (int32_t i = 0; i < r->row->count; i++) {
        r->source->target[r->row->ids[i]] = r->source->left[r->row->ids[i]] = 0.0;
    }
}

/* How much left[token] moves when every probability of the target moves by its own size times a
 * small number, in units of that number: its own, and that of each mass that was subtracted. */
static double slack(const struct residual *r, int32_t token)
{
    return r->source->target[token] + r->source->draft[token] * r->slope;
}

/* 1: the child is accepted. *margin shrinks to this coin's. */
static int coin(const struct residual *r, int32_t token, double u, double *margin)
{
    double bar = u * r->source->draft[token] / r->draft_sum;
    double gap = r->source->left[token] - bar * r->mass;
    double scale = slack(r, token) + (double)r->rejected * bar;
    if (scale > 0.0) { /* else no target has this token and nothing can turn the coin */
        *margin = fmin(*margin, fabs(gap) / scale);
    }
    return gap > 0.0;
}

/* p <- norm(relu(p - q)), then q without the token. */
static void reject(struct residual *r, int32_t token)
{
    double *left = r->source->left, *draft = r->source->draft;
    double mass = r->outside;
    for (int32_t j = 0; j < r->width; j++) {
        int32_t t = alive(r, j);
        if (t >= 0) {
            mass += fmax(left[t] - r->mass * (draft[t] / r->draft_sum), 0.0);
        }
    }
    if (mass > 0.0) { /* else p and q are one to the last bit, and p stays */
        for (int32_t j = 0; j < r->width; j++) {
            int32_t t = alive(r, j);
            if (t >= 0) {
                left[t] = fmax(left[t] - r->mass * (draft[t] / r->draft_sum), 0.0);
            }
        }
        r->mass = mass;
    }
    r->slope += (double)r->rejected / r->draft_sum;
    r->rejected++;
    draft[token] = 0.0;
    r->draft_sum = 0.0;
    for (int32_t j = 0; j < r->width; j++) {
        r->draft_sum += entry(r, j) >= 0 ? draft[entry(r, j)] : 0.0;
    }
}

/* Gumbel-max over ln of the residual; ties go to the lower id. */
static int32_t draw(const struct residual *r, int32_t position, uint64_t seed, double *margin)
{
    int32_t best = -1;
    float best_score = 0.0f;
    for (int32_t i = 0; i < r->row->count; i++) {
        int32_t token = r->row->ids[i];
        double p = r->source->left[token];
        if (p > 0.0) {
            float score =
                (float)log(p / r->mass) + tv_kernels_residual_noise(seed, position, token);
            if (best < 0 || score > best_score || (score == best_score && token < best)) {
                best = token;
                best_score = score;
            }
        }
    }
    double noise = exp((double)tv_kernels_residual_noise(seed, position, best));
    double value = r->source->left[best] * noise, scale = slack(r, best) * noise;
    for (int32_t i = 0; i < r->row->count; i++) {
        int32_t token = r->row->ids[i];
        if (token != best && r->source->left[token] > 0.0) {
            double other = exp((double)tv_kernels_residual_noise(seed, position, token));
            double gap = value - r->source->left[token] * other;
            *margin = fmin(*margin, 2.0 * fmax(gap, 0.0) / (scale + slack(r, token) * other));
        }
    }
    return best;
}

void tv_rules_ratio(const struct tv_tree *tree, int32_t node, int32_t position, uint64_t seed,
                    const struct tv_rules_target *target, const struct tv_rules_source *source,
                    struct tv_rules_step *ret_step)
{
    struct residual r = {.source = source, .row = target};
    struct tv_rules_step step = {.child = -1, .margin = INFINITY};
    load(&r, tree, node);
    source->step(source->context);
    for (int32_t i = node + 1; i < tree->count && step.child < 0; i++) {
        if (tree->parents[i] != node) {
            continue;
        }
        step.token = tree->tokens[i];
        double u = tv_kernels_coin(seed, position, step.token);
        if (coin(&r, step.token, u, &step.margin)) {
            step.child = i;
        } else {
            reject(&r, step.token);
        }
        source->step(source->context);
    }
    if (step.child < 0) {
        step.token = draw(&r, position, seed, &step.margin);
    }
    step.logprob = (float)log(source->target[step.token]);
    unload(&r);
    *ret_step = step;
}
