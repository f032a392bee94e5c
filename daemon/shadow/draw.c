/*
 * draw.c - the oracle's own draw, written from proto/README.md, "Sampling", alone.
 *
 * Shares nothing with ref/draw.c, which is what the cpu backend serves with: one sorted list of
 * tokens, each filter a prefix of it or a test on it, generator and Gumbel noise spelled out again.
 * Owns its list for the time of one call. Refuses rows with a logit that is not finite.
 */
#include <errno.h>
#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "shadow/round.h"

#define GREEDY_BELOW 1e-4f

struct entry {
    float score; /* logit over temperature */
    float weight;
    int32_t token;
};

static int by_score(const void *a, const void *b)
{
    const struct entry *left = a, *right = b;
    if (left->score != right->score) {
        return left->score > right->score ? -1 : 1;
    }
    return left->token < right->token ? -1 : left->token > right->token;
}

static int by_weight(const void *a, const void *b)
{
    const struct entry *left = a, *right = b;
    if (left->weight != right->weight) {
        return left->weight > right->weight ? -1 : 1;
    }
    return left->token < right->token ? -1 : left->token > right->token;
}

/* Word 0 of Philox4x32-10: the counter's two halves are multiplied, crossed and keyed ten times. */
static uint32_t philox(uint64_t seed, uint32_t position, uint32_t token, uint32_t purpose)
{
    uint64_t low = position | (uint64_t)token << 32; /* words 0 and 1; word 3 is 0 */
    uint64_t high = purpose;
    uint32_t key_low = (uint32_t)seed, key_high = (uint32_t)(seed >> 32);
    for (int round = 0; round < 10; round++) {
        uint64_t product_0 = (low & 0xffffffffu) * UINT64_C(0xd2511f53);
        uint64_t product_2 = (high & 0xffffffffu) * UINT64_C(0xcd9e8d57);
        uint64_t word_0 = (product_2 >> 32) ^ (low >> 32) ^ key_low;
        uint64_t word_2 = (product_0 >> 32) ^ (high >> 32) ^ key_high;
        low = word_0 | product_2 << 32;
        high = word_2 | product_0 << 32;
        key_low += 0x9e3779b9u;
        key_high += 0xbb67ae85u;
    }
    return (uint32_t)low;
}

double tv_shadow_uniform(uint64_t seed, int32_t position, int32_t token,
                         enum tv_shadow_purpose purpose)
{
    uint32_t word = philox(seed, (uint32_t)position, (uint32_t)token, (uint32_t)purpose);
    return ((double)word + 0.5) / 4294967296.0;
}

double tv_shadow_noise(uint64_t seed, int32_t position, int32_t token,
                       enum tv_shadow_purpose purpose)
{
    return (double)(float)-log(-log(tv_shadow_uniform(seed, position, token, purpose)));
}

double tv_shadow_gumbel(uint64_t seed, int32_t position, int32_t token)
{
    return tv_shadow_noise(seed, position, token, TV_SHADOW_FOR_TARGET);
}

/* How many of the list's first tokens stay: their mass reaches p, the one that crosses included. */
static int32_t nucleus(const struct entry *list, int32_t count, double p)
{
    double total = 0.0, before = 0.0;
    int32_t kept = 0;
    for (int32_t i = 0; i < count; i++) {
        total += (double)list[i].weight;
    }
    while (kept < count && (kept == 0 || before < p * total)) {
        before += (double)list[kept++].weight;
    }
    return kept;
}

/* The list after all filters, and its length. */
static int32_t filter(struct entry *list, int32_t vocab, const struct tv_sampling *sampling)
{
    int32_t count = vocab;
    size_t bytes = sizeof *list;
    qsort(list, (size_t)count, bytes, by_score);
    if (sampling->top_k > 0 && sampling->top_k < count) {
        count = sampling->top_k;
    }
    for (int32_t i = 0; i < count; i++) {
        list[i].weight = (float)exp((double)list[i].score - (double)list[0].score);
    }
    if (sampling->top_p < 1.0f) {
        qsort(list, (size_t)count, bytes, by_weight); /* scores may differ where weights do not */
        count = nucleus(list, count, (double)sampling->top_p);
    }
    int32_t kept = 0;
    for (int32_t i = 0; i < count; i++) { /* relative to the largest, whose weight is 1 */
        if (list[i].weight >= sampling->min_p * list[0].weight) {
            list[kept++] = list[i];
        }
    }
    return kept;
}

/* Best and second of the scores; ties go to the lower token. */
static void decide(const struct entry *list, int32_t count, struct tv_shadow_draw *ret_draw)
{
    int32_t best = 0;
    float second = -INFINITY;
    for (int32_t i = 1; i < count; i++) {
        if (list[i].score > list[best].score ||
            (list[i].score == list[best].score && list[i].token < list[best].token)) {
            second = list[best].score;
            best = i;
        } else {
            second = fmaxf(second, list[i].score);
        }
    }
    ret_draw->token = list[best].token;
    ret_draw->margin = count == 1 ? INFINITY : (double)list[best].score - (double)second;
}

/* The row's scores as a list, malloc'd. -EDOM: a logit is not finite. */
static int list_make(const float *logits, int32_t vocab, const struct tv_sampling *sampling,
                     struct entry **ret_list)
{
    int greedy = sampling->temperature < GREEDY_BELOW;
    double temperature = greedy ? 1.0 : (double)sampling->temperature;
    struct entry *list = malloc((size_t)vocab * sizeof *list);
    if (list == NULL) {
        return -ENOMEM;
    }
    for (int32_t t = 0; t < vocab; t++) {
        if (!isfinite(logits[t])) {
            free(list);
            return -EDOM;
        }
        double score = (double)logits[t] / temperature;
        score = fmax(fmin(score, (double)FLT_MAX), -(double)FLT_MAX);
        list[t] = (struct entry){.score = (float)score, .token = t};
    }
    *ret_list = list;
    return 0;
}

int tv_shadow_target(const float *logits, int32_t vocab, const struct tv_sampling *sampling,
                     double *ret_probs)
{
    struct entry *list = NULL;
    struct tv_shadow_draw best = {0};
    double total = 0.0;
    int rc = list_make(logits, vocab, sampling, &list);
    if (rc != 0) {
        return rc;
    }
    memset(ret_probs, 0, (size_t)vocab * sizeof *ret_probs);
    if (sampling->temperature < GREEDY_BELOW) {
        decide(list, vocab, &best);
        ret_probs[best.token] = 1.0;
        free(list);
        return 0;
    }
    int32_t count = filter(list, vocab, sampling);
    for (int32_t i = 0; i < count; i++) {
        total += (double)list[i].weight;
    }
    for (int32_t i = 0; i < count; i++) {
        ret_probs[list[i].token] = (double)list[i].weight / total;
    }
    free(list);
    return 0;
}

int tv_shadow_draw(const float *logits, int32_t vocab, const struct tv_sampling *sampling,
                   int32_t position, struct tv_shadow_draw *ret_draw)
{
    int greedy = sampling->temperature < GREEDY_BELOW;
    struct entry *list = NULL;
    int rc = list_make(logits, vocab, sampling, &list);
    if (rc == -EDOM) {
        *ret_draw = (struct tv_shadow_draw){.token = -1};
        return 0;
    }
    if (rc != 0) {
        return rc;
    }
    int32_t count = greedy ? vocab : filter(list, vocab, sampling);
    for (int32_t i = 0; !greedy && i < count; i++) {
        list[i].score = (float)((double)list[i].score +
                                tv_shadow_gumbel(sampling->seed, position, list[i].token));
    }
    decide(list, count, ret_draw);
    free(list);
    return 0;
}
