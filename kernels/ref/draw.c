/*
 * draw.c - one token per row: temperature, top_k, top_p, min_p, then Gumbel-max.
 *
 * Owns the meaning of the filters (proto/README.md, "Sampling"). Works on keys of 64 bits, value
 * bits above inverted id, so that one unsigned comparison orders by value and then by lower id;
 * a heap yields only as many of them as a filter keeps.
 */
#include "ref.h"

#include <errno.h>
#include <float.h>
#include <math.h>

#include "../args.h"
#include "../philox.h"

/* The two best perturbed scores so far. */
struct best {
    float score, second;
    int32_t token;
};

static uint64_t key_make(float value, int32_t id)
{
    uint32_t bits;
    value += 0.0f; /* -0 becomes +0, so that the two tie */
    memcpy(&bits, &value, sizeof bits);
    bits = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
    return (uint64_t)bits << 32 | (uint32_t) ~(uint32_t)id;
}

static int32_t key_id(uint64_t key)
{
    return (int32_t) ~(uint32_t)key;
}

static void sift_down(uint64_t *keys, int32_t at, int32_t count)
{
    uint64_t key = keys[at];
    while (2 * (int64_t)at + 1 < count) {
        int32_t child = 2 * at + 1;
        if (child + 1 < count && keys[child + 1] > keys[child]) {
            child++;
        }
        if (keys[child] <= key) {
            break;
        }
        keys[at] = keys[child];
        at = child;
    }
    keys[at] = key;
}

static void heapify(uint64_t *keys, int32_t count)
{
    for (int32_t at = count / 2 - 1; at >= 0; at--) {
        sift_down(keys, at, count);
    }
}

/* Move the largest of keys[0..count) to keys[count - 1]. */
static uint64_t heap_pop(uint64_t *keys, int32_t count)
{
    uint64_t top = keys[0];
    keys[0] = keys[count - 1];
    keys[count - 1] = top;
    if (count > 1) {
        sift_down(keys, 0, count - 1);
    }
    return top;
}

/* logit / T in f32. The clamp only matters where the quotient leaves f32's range. */
static float tempered(float logit, float temperature)
{
    return fminf(fmaxf(logit / temperature, -FLT_MAX), FLT_MAX);
}

/* Weight of a token relative to the row's best, in f32. */
static float weight(const float *logits, int32_t id, float temperature, float max)
{
    return (float)exp((double)tempered(logits[id], temperature) - (double)max);
}

static void consider(struct best *best, float score, int32_t token)
{
    if (best->token < 0 || score > best->score || (score == best->score && token < best->token)) {
        best->second = best->token < 0 ? -INFINITY : best->score;
        best->score = score;
        best->token = token;
    } else if (score > best->second) {
        best->second = score;
    }
}

static double log_sum_exp(const float *logits, int32_t vocab)
{
    double max = -INFINITY;
    double sum = 0.0;
    for (int32_t t = 0; t < vocab; t++) {
        max = fmax(max, (double)logits[t]);
    }
    for (int32_t t = 0; t < vocab; t++) {
        sum += exp((double)logits[t] - max);
    }
    return max + log(sum);
}

static void draw_greedy(const float *logits, int32_t vocab, struct tv_draw *ret_draw)
{
    struct best best = {.token = -1};
    for (int32_t t = 0; t < vocab; t++) {
        consider(&best, logits[t], t);
    }
    ret_draw->token = best.token;
    ret_draw->margin = vocab == 1 ? INFINITY : best.score - best.second;
    ret_draw->logprob = (float)((double)best.score - log_sum_exp(logits, vocab));
    ret_draw->kept = vocab;
}

/* Leave in keys[0..kept) the tokens that pass all filters, keyed by weight, and their sum. */
static int32_t filter(const float *logits, int32_t vocab, const struct tv_sampling *s, float max,
                      uint64_t *keys, double *ret_sum)
{
    int32_t count = vocab;
    uint64_t *first = keys;
    for (int32_t t = 0; t < vocab; t++) {
        keys[t] = key_make(tempered(logits[t], s->temperature), t);
    }
    if (s->top_k > 0 && s->top_k < vocab) {
        heapify(keys, vocab);
        for (int32_t i = 0; i < s->top_k; i++) {
            (void)heap_pop(keys, vocab - i);
        }
        count = s->top_k;
        first = keys + (vocab - count);
    }
    double sum = 0.0;
    for (int32_t i = 0; i < count; i++) {
        int32_t id = key_id(first[i]);
        float w = weight(logits, id, s->temperature, max);
        keys[i] = key_make(w, id);
        sum += (double)w;
    }
    first = keys;
    if (s->top_p < 1.0f) {
        double mass = 0.0;
        int32_t kept = 0;
        heapify(keys, count);
        while (kept < count && (kept == 0 || mass < (double)s->top_p * sum)) {
            int32_t id = key_id(heap_pop(keys, count - kept));
            mass += (double)weight(logits, id, s->temperature, max);
            kept++;
        }
        first = keys + (count - kept);
        count = kept;
        sum = mass;
    }
    int32_t kept = 0;
    double kept_sum = 0.0;
    for (int32_t i = 0; i < count; i++) {
        float w = weight(logits, key_id(first[i]), s->temperature, max);
        if (w >= s->min_p || w >= 1.0f) {
            keys[kept++] = first[i];
            kept_sum += (double)w;
        }
    }
    *ret_sum = kept_sum;
    return kept;
}

static int all_finite(const float *logits, int32_t vocab)
{
    for (int32_t t = 0; t < vocab; t++) {
        if (!isfinite(logits[t])) {
            return 0;
        }
    }
    return 1;
}

void tv_ref_draw_row(const struct tv_draw_args *args, int32_t r, uint64_t *keys)
{
    const float *logits = args->logits + (int64_t)r * args->vocab;
    const struct tv_sampling *s = &args->sampling[r];
    struct tv_draw draw = {.token = -1};
    if (!all_finite(logits, args->vocab)) {
        args->draws[r] = draw;
        return;
    }
    if (!(s->temperature >= 1e-4f)) {
        draw_greedy(logits, args->vocab, &args->draws[r]);
        return;
    }
    float max = -FLT_MAX;
    for (int32_t t = 0; t < args->vocab; t++) {
        max = fmaxf(max, tempered(logits[t], s->temperature));
    }
    double sum;
    draw.kept = filter(logits, args->vocab, s, max, keys, &sum);
    struct best best = {.token = -1};
    for (int32_t i = 0; i < draw.kept; i++) {
        int32_t id = key_id(keys[i]);
        float z = tempered(logits[id], s->temperature);
        /* A token that cannot reach second place needs no logarithms. */
        if (i >= 2 && z + TV_PHILOX_GUMBEL_MAX < best.second) {
            continue;
        }
        uint32_t word =
            tv_philox_word(s->seed, (uint32_t)args->positions[r], (uint32_t)id, TV_PHILOX_TARGET);
        consider(&best, z + tv_philox_gumbel(word), id);
    }
    float z = tempered(logits[best.token], s->temperature);
    draw.token = best.token;
    draw.margin = draw.kept == 1 ? INFINITY : best.score - best.second;
    draw.logprob = (float)((double)z - (double)max - log(sum));
    args->draws[r] = draw;
}

int32_t tv_ref_draw_survivors(const float *logits, int32_t vocab, const struct tv_sampling *s,
                              uint64_t *keys, int32_t *ids, double *weights)
{
    if (!all_finite(logits, vocab)) {
        return 0;
    }
    if (!(s->temperature >= 1e-4f)) {
        struct tv_draw draw;
        draw_greedy(logits, vocab, &draw);
        ids[0] = draw.token;
        weights[0] = 1.0;
        return 1;
    }
    float max = -FLT_MAX;
    for (int32_t t = 0; t < vocab; t++) {
        max = fmaxf(max, tempered(logits[t], s->temperature));
    }
    double sum;
    int32_t count = filter(logits, vocab, s, max, keys, &sum);
    for (int32_t i = 0; i < count; i++) {
        ids[i] = key_id(keys[i]);
        weights[i] = (double)weight(logits, ids[i], s->temperature, max);
    }
    return count;
}

size_t tv_ref_draw_workspace(const struct tv_kernels *k, const struct tv_draw_args *args)
{
    (void)k;
    return (size_t)args->vocab * sizeof(uint64_t);
}

int tv_ref_draw(struct tv_kernels *k, const struct tv_draw_args *args)
{
    int rc = tv_args_draw(args);
    if (rc != 0) {
        return rc;
    }
    if (args->workspace_bytes < tv_ref_draw_workspace(k, args)) {
        return -ENOSPC;
    }
    for (int32_t r = 0; r < args->rows; r++) {
        tv_ref_draw_row(args, r, args->workspace);
    }
    return 0;
}
