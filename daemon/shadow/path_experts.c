/*
 * path_experts.c - the path oracle's feed-forward part: dense layers, shared and routed experts.
 *
 * Owns no state; one row's choice of experts is made on its own.
 */
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "shadow/path.h"

/* y += down(silu(gate x) * (up x)), every row scaled by scale[r] (NULL: 1). */
static int mlp(const struct tv_path_source *source, const struct tv_model_mlp_weights *weights,
               const float *x, int32_t rows, const float *scale, float *y)
{
    size_t width = (size_t)weights->gate.rows;
    size_t hidden = (size_t)weights->down.rows;
    float *gate = malloc((size_t)rows * width * sizeof *gate);
    float *up = malloc((size_t)rows * width * sizeof *up);
    float *out = malloc((size_t)rows * hidden * sizeof *out);
    int rc = gate == NULL || up == NULL || out == NULL ? -ENOMEM : 0;
    if (rc == 0) {
        rc = tv_path_linear(source, &weights->gate, x, rows, 0, gate);
    }
    if (rc == 0) {
        rc = tv_path_linear(source, &weights->up, x, rows, 0, up);
    }
    for (size_t i = 0; rc == 0 && i < (size_t)rows * width; i++) {
        gate[i] = gate[i] / (1.0f + expf(-gate[i])) * up[i];
    }
    if (rc == 0) {
        rc = tv_path_linear(source, &weights->down, gate, rows, 0, out);
    }
    for (size_t i = 0; rc == 0 && i < (size_t)rows * hidden; i++) {
        y[i] += out[i] * (scale != NULL ? scale[i / hidden] : 1.0f);
    }
    free(gate);
    free(up);
    free(out);
    return rc;
}

/* The index of the largest value that is not taken; ties: the lower. */
static int32_t largest(const float *values, const uint8_t *taken, int32_t count)
{
    int32_t best = -1;
    for (int32_t i = 0; i < count; i++) {
        if (!taken[i] && (best < 0 || values[i] > values[best])) {
            best = i;
        }
    }
    return best;
}

/* Exclude the experts outside the best topk_group groups. taken: [experts + n_group]. Returns how
 * far a score must move before another group is kept. */
static float groups_exclude(const struct tv_model_config *config, const float *choice,
                            uint8_t *taken)
{
    int32_t per_group = config->experts / config->n_group;
    uint8_t *kept = taken + config->experts;
    float last_kept = INFINITY, first_left = -INFINITY;
    int sums = config->topk_method == TV_TOPK_NOAUX_TC;
    for (int32_t round = 0; round <= config->topk_group; round++) {
        int32_t best = -1;
        float best_rank = -INFINITY;
        for (int32_t g = 0; g < config->n_group; g++) {
            float first = -INFINITY, second = -INFINITY;
            for (int32_t i = g * per_group; i < (g + 1) * per_group; i++) {
                if (choice[i] > first) {
                    second = first;
                    first = choice[i];
                } else if (choice[i] > second) {
                    second = choice[i];
                }
            }
            float rank = sums ? first + second : first;
            if (!kept[g] && (best < 0 || rank > best_rank)) {
                best = g;
                best_rank = rank;
            }
        }
        if (round < config->topk_group && best >= 0) {
            kept[best] = 1;
            last_kept = best_rank;
        } else if (best >= 0) {
            first_left = best_rank;
        }
    }
    for (int32_t i = 0; i < config->experts; i++) {
        taken[i] = kept[i / per_group] ? 0 : 1;
    }
    return (last_kept - first_left) / (sums ? 4.0f : 2.0f); /* both ranks move */
}

static void scores_fill(const struct tv_model_config *config, float *scores)
{
    double sum = 0.0;
    float max = -INFINITY;
    for (int32_t i = 0; i < config->experts; i++) {
        max = fmaxf(max, scores[i]);
    }
    for (int32_t i = 0; i < config->experts; i++) {
        scores[i] = config->scoring == TV_ROUTER_SOFTMAX ? expf(scores[i] - max)
                                                         : 1.0f / (1.0f + expf(-scores[i]));
        sum += (double)scores[i];
    }
    for (int32_t i = 0; config->scoring == TV_ROUTER_SOFTMAX && i < config->experts; i++) {
        scores[i] = (float)((double)scores[i] / sum);
    }
}

/* What the choice of one row needs, and what it leaves. */
struct route {
    const struct tv_model_config *config;
    const float *bias; /* NULL: none */
    float *choice;     /* [experts] */
    uint8_t *taken;    /* [experts + n_group] */
    int32_t *experts;  /* [experts_per_token]: kept, or to be followed; NULL: neither */
    int follow;
    float last; /* score of the last one chosen */
};

static int32_t expert_choose(const struct route *route, int32_t k)
{
    if (route->experts != NULL && route->follow) {
        return route->experts[k];
    }
    int32_t expert = largest(route->choice, route->taken, route->config->experts);
    if (route->experts != NULL) {
        route->experts[k] = expert;
    }
    return expert;
}

/* One row: scores (gate logits on entry) -> weights [experts], 0 for those not chosen. Returns how
 * far every score must move at least before another expert is chosen. */
static float route_row(struct route *route, float *scores, float *weights)
{
    const struct tv_model_config *config = route->config;
    size_t experts = (size_t)config->experts;
    int grouped = config->n_group > 1 && config->topk_method != TV_TOPK_GREEDY;
    double sum = 0.0;
    scores_fill(config, scores);
    for (size_t i = 0; i < experts; i++) {
        route->choice[i] = scores[i] + (route->bias != NULL ? route->bias[i] : 0.0f);
        weights[i] = 0.0f;
    }
    memset(route->taken, 0, experts + (size_t)(grouped ? config->n_group : 0));
    float margin = grouped ? groups_exclude(config, route->choice, route->taken) : INFINITY;
    float last_chosen = INFINITY;
    route->last = 0.0f;
    for (int32_t k = 0; k < config->experts_per_token; k++) {
        int32_t expert = expert_choose(route, k);
        if (expert < 0) {
            break; /* fewer experts in the kept groups than are wanted */
        }
        route->taken[expert] = 1;
        last_chosen = route->choice[expert];
        route->last = scores[expert];
        weights[expert] = scores[expert];
        sum += (double)scores[expert];
    }
    int32_t left = largest(route->choice, route->taken, config->experts);
    if (left >= 0) {
        margin = fminf(margin, (last_chosen - route->choice[left]) / 2.0f);
    }
    double scale = config->routed_scaling_factor;
    if (config->norm_topk_prob) {
        scale /= sum + 1e-20;
    }
    for (size_t i = 0; i < experts; i++) {
        weights[i] = (float)((double)weights[i] * scale);
    }
    return margin;
}

/* How far apart the scores of prefix rows and of their twins are. */
static void scores_move(const struct tv_path_rows *path, const float *scores, size_t experts)
{
    size_t prefix = (size_t)path->prefix_len;
    for (size_t r = 0; r < prefix; r++) {
        for (size_t e = 0; e < experts; e++) {
            float delta = fabsf(scores[r * experts + e] - scores[(prefix + r) * experts + e]);
            path->moved[r] = fmaxf(path->moved[r], delta);
        }
    }
}

/* Where the experts of a row in a layer are kept; NULL: nowhere. */
static int32_t *choices_of(const struct tv_path_source *source,
                           const struct tv_model_layer_weights *layer,
                           const struct tv_path_rows *path, int32_t row)
{
    size_t at = (size_t)(layer - source->weights->layers);
    if (path->choices == NULL) {
        return NULL;
    }
    return path->choices->experts +
           (at * (size_t)path->count + (size_t)row) * (size_t)source->config->experts_per_token;
}

/* Routing weights [rows, experts] of every row, malloc'd. */
static int weights_make(const struct tv_path_source *source,
                        const struct tv_model_layer_weights *layer, const float *h,
                        const struct tv_path_rows *path, float **ret_weights)
{
    int32_t rows = path->count;
    const struct tv_model_config *config = source->config;
    size_t experts = (size_t)config->experts;
    size_t groups = config->n_group > 0 ? (size_t)config->n_group : 0;
    float *scores = malloc((size_t)rows * experts * sizeof *scores);
    float *weights = malloc((size_t)rows * experts * sizeof *weights);
    float *bias = NULL;
    struct route route = {.config = config,
                          .choice = malloc(experts * sizeof *route.choice),
                          .taken = malloc(experts + groups),
                          .follow = path->choices != NULL && path->choices->follow};
    int rc = scores == NULL || weights == NULL || route.choice == NULL || route.taken == NULL
                 ? -ENOMEM
                 : 0;
    if (rc == 0) {
        rc = tv_path_linear(source, &layer->router, h, rows, 0, scores);
    }
    if (rc == 0 && layer->router_bias.data != NULL) {
        rc = tv_path_tensor(source, &layer->router_bias, &bias);
    }
    route.bias = bias;
    for (int32_t r = 0; rc == 0 && r < rows; r++) {
        route.experts = choices_of(source, layer, path, r);
        float margin =
            route_row(&route, scores + (size_t)r * experts, weights + (size_t)r * experts);
        path->margins[r] = fminf(path->margins[r], margin);
        path->ties[r] = fminf(path->ties[r], route.last > 0.0f ? margin / route.last : INFINITY);
    }
    if (rc == 0 && path->twins) {
        scores_move(path, scores, experts);
    }
    free(scores);
    free(route.choice);
    free(route.taken);
    free(bias);
    if (rc != 0) {
        free(weights);
        return rc;
    }
    *ret_weights = weights;
    return 0;
}

/* One expert over the rows that chose it. */
static int expert_run(const struct tv_path_source *source,
                      const struct tv_model_layer_weights *layer, int32_t expert,
                      const float *weights, const float *h, int32_t rows, float *x)
{
    size_t hidden = (size_t)source->config->hidden;
    size_t experts = (size_t)source->config->experts;
    float *in = malloc((size_t)rows * hidden * sizeof *in);
    float *out = calloc((size_t)rows * hidden, sizeof *out);
    float *scale = malloc((size_t)rows * sizeof *scale);
    int32_t *chosen = malloc((size_t)rows * sizeof *chosen);
    int32_t count = 0;
    int rc = in == NULL || out == NULL || scale == NULL || chosen == NULL ? -ENOMEM : 0;
    for (int32_t r = 0; rc == 0 && r < rows; r++) {
        float weight = weights[(size_t)r * experts + (size_t)expert];
        if (weight != 0.0f) {
            memcpy(in + (size_t)count * hidden, h + (size_t)r * hidden, hidden * sizeof *in);
            scale[count] = weight;
            chosen[count++] = r;
        }
    }
    if (rc == 0 && count > 0) {
        rc = mlp(source, &layer->experts[expert], in, count, scale, out);
    }
    for (int32_t c = 0; rc == 0 && c < count; c++) {
        for (size_t i = 0; i < hidden; i++) {
            x[(size_t)chosen[c] * hidden + i] += out[(size_t)c * hidden + i];
        }
    }
    free(in);
    free(out);
    free(scale);
    free(chosen);
    return rc;
}

int tv_path_feed_forward(const struct tv_path_source *source,
                         const struct tv_model_layer_weights *layer, const float *h,
                         const struct tv_path_rows *rows, float *x)
{
    int rc = 0;
    if (layer->mlp.gate.data != NULL) {
        rc = mlp(source, &layer->mlp, h, rows->count, NULL, x);
    }
    if (rc != 0 || layer->router.data == NULL) {
        return rc;
    }
    float *weights = NULL;
    rc = weights_make(source, layer, h, rows, &weights);
    for (int32_t e = 0; rc == 0 && e < source->config->experts; e++) {
        rc = expert_run(source, layer, e, weights, h, rows->count, x);
    }
    free(weights);
    return rc;
}
