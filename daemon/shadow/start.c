/*
 * start.c - the path oracle as judge of a start: are both fast forms the model, and how noisy is
 * it?
 *
 * Owns one captured round. The oracle's logits of the self-test's text and tree are the truth for
 * both fast forms, at the bound of the numerics contract and without a term for noise; noise itself
 * is the oracle against the oracle in the other order of summation, never a fast form. Refuses
 * noise that no sound f32 arithmetic has, and tells a checkpoint without finite logits (the oracle
 * alone has none either) from a form that is wrong.
 */
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "shadow/round.h"

/* One round of any size: the start has nothing to protect from it. */
#define ROUND_BYTES_MAX (SIZE_MAX / 2)

/* With bf16 rows two sums may round apart, and a router may then choose another expert: noise of up
 * to the spread of the logits is an unlucky text. With f32 rows the bound itself is the cap. */
#define NOISE_SPREAD_BF16 1.0

struct tv_shadow_judge {
    struct tv_shadow *shadow;
    struct tv_shadow_round *round;
};

int tv_shadow_judge_create(const struct tv_model *model, struct tv_cache *cache,
                           struct tv_kernels *device, struct tv_shadow_judge **ret_judge)
{
    const struct tv_shadow_params params = {.queue_bytes_max = ROUND_BYTES_MAX, .device = device};
    struct tv_shadow_judge *self = calloc(1, sizeof *self);
    if (self == NULL) {
        return -ENOMEM;
    }
    int rc = tv_shadow_create(&params, model, cache, &self->shadow);
    if (rc == 0) {
        self->round = tv_shadow_begin(self->shadow, TV_SHADOW_WANTED);
        rc = self->round == NULL ? -ENOMEM : 0;
    }
    if (rc != 0) {
        tv_shadow_judge_destroy(self);
        return rc;
    }
    *ret_judge = self;
    return 0;
}

void tv_shadow_judge_destroy(struct tv_shadow_judge *self)
{
    if (self == NULL) {
        return;
    }
    if (self->round != NULL) {
        tv_shadow_abandon(self->shadow, self->round);
    }
    tv_shadow_destroy(self->shadow);
    free(self);
}

static void see_layer(void *context, int32_t layer, const struct tv_verify_attn *attn)
{
    struct tv_shadow_judge *self = context;
    tv_shadow_layer(self->round, layer, attn);
}

static double bound_of(const float *logits, size_t count)
{
    return tv_shadow_logit_bound(tv_shadow_spread(logits, count));
}

static double difference(const float *x, const float *y, int32_t count)
{
    double worst = 0.0;
    for (int32_t i = 0; i < count; i++) {
        double delta = fabs((double)x[i] - (double)y[i]);
        worst = isfinite(delta) ? fmax(worst, delta) : INFINITY;
    }
    return worst;
}

static int are_finite(const float *x, size_t count)
{
    int finite = 1;
    for (size_t i = 0; i < count; i++) {
        finite = finite && isfinite(x[i]);
    }
    return finite;
}

static int is_rounded(const struct tv_shadow_judge *self)
{
    return tv_cache_params(self->shadow->cache)->dtype != TV_F32;
}

/* Logits of every row of the self-test by the oracle. */
static int oracle_run(const struct tv_shadow_judge *self, const struct tv_path_rows *rows,
                      enum tv_path_order order, const struct tv_path_watch *watch,
                      float **ret_logits)
{
    const struct tv_shadow *shadow = self->shadow;
    const struct tv_path_source source = {.config = tv_model_config(shadow->model),
                                          .weights = tv_model_weights(shadow->model),
                                          .device = shadow->params.device,
                                          .order = order,
                                          .rows_bf16 = is_rounded(self)};
    int32_t *wanted = malloc((size_t)rows->count * sizeof *wanted);
    if (wanted == NULL) {
        return -ENOMEM;
    }
    for (int32_t r = 0; r < rows->count; r++) {
        wanted[r] = r;
    }
    int rc = tv_path_forward(&source, rows, wanted, rows->count, watch, ret_logits);
    free(wanted);
    return rc;
}

/* Rows of a fast form [count, vocab] against those of the oracle. A row whose experts are undecided
 * may be that of the other choice, but never less than numbers. */
static double rows_differ(const struct tv_rows_check *check, int32_t vocab, const float *fast,
                          const float *oracle, const int32_t *row_of, int32_t count, double bound)
{
    double worst = 0.0;
    for (int32_t i = 0; i < count; i++) {
        double delta = difference(fast + (size_t)i * (size_t)vocab,
                                  oracle + (size_t)row_of[i] * (size_t)vocab, vocab);
        if (delta <= bound || !isfinite(delta) || !tv_shadow_row_undecided(check, row_of[i])) {
            worst = fmax(worst, delta);
        }
    }
    return worst;
}

/* Both fast forms against the oracle's logits [rows, vocab]. */
static int forms_judge(const struct tv_shadow_judge *self, const struct tv_self_test_run *run,
                       const struct tv_rows_check *check, const float *oracle, char *detail,
                       size_t detail_bytes)
{
    const struct tv_path_rows *rows = check->rows;
    int32_t vocab = tv_model_config(self->shadow->model)->vocab;
    int kv_equal = tv_shadow_rows_equal(check);
    double bound = bound_of(oracle, (size_t)rows->count * (size_t)vocab);
    double verify =
        rows_differ(check, vocab, run->tree_logits, oracle, rows->row_of, run->tree->count, bound);
    double prefill =
        rows_differ(check, vocab, run->text_logits, oracle, run->text_rows, run->text_count, bound);
    if (verify <= bound && prefill <= bound && kv_equal) {
        return 0;
    }
    (void)snprintf(detail, detail_bytes,
                   "logits against the path oracle: verify %.3g, prefill %.3g, the bound is %.3g; "
                   "KV rows, queries, attention: %s",
                   verify, prefill, bound, kv_equal ? "right" : "not within their bounds");
    return -EIO;
}

/* Text and nodes in two orders of summation. first has no twins, second may have. */
static double noise_of(const struct tv_self_test_run *run, int32_t vocab,
                       const struct tv_path_rows *first, const float *first_logits,
                       const struct tv_path_rows *second, const float *second_logits)
{
    double noise = 0.0;
    for (int32_t i = 0; i < run->text_len + run->tree->count; i++) {
        int32_t node = i - run->text_len;
        size_t a = (size_t)(node < 0 ? i : first->row_of[node]) * (size_t)vocab;
        size_t b = (size_t)(node < 0 ? i : second->row_of[node]) * (size_t)vocab;
        noise = fmax(noise, difference(first_logits + a, second_logits + b, vocab));
    }
    return noise;
}

/* Two orders of summation. With f32 rows the second one has the experts of the first: a router that
 * is undecided between two would show another model, not noise. With bf16 rows the second one also
 * rounds the tree's queries, as verify does and prefill does not. */
static int noise_passes(const struct tv_shadow_judge *self, const struct tv_path_rows *plain,
                        const struct tv_path_rows *rows, float **ret_forwards,
                        float **ret_backwards)
{
    const struct tv_model_config *config = tv_model_config(self->shadow->model);
    struct tv_path_rows first = *plain, second = *rows; /* views, with the choices */
    struct tv_path_choices choices = {.follow = 0};
    size_t count = 0;
    int rc = 0;
    if (!is_rounded(self)) {
        rc = tv_size_mul((size_t)config->layers, (size_t)plain->count, &count);
        if (rc == 0) {
            rc = tv_size_mul(count, (size_t)config->experts_per_token, &count);
        }
        choices.experts = rc == 0 ? calloc(count + 1, sizeof *choices.experts) : NULL;
        if (choices.experts == NULL) {
            return -ENOMEM;
        }
        first.choices = second.choices = &choices;
    }
    rc = oracle_run(self, &first, TV_PATH_FORWARDS, NULL, ret_forwards);
    if (rc == 0) {
        choices.follow = 1;
        rc = oracle_run(self, &second, TV_PATH_BACKWARDS, NULL, ret_backwards);
    }
    free(choices.experts);
    return rc;
}

/* Largest difference between the two. */
static int noise_measure(const struct tv_shadow_judge *self, const struct tv_self_test_run *run,
                         const struct tv_path_rows *rows, double *ret_noise, char *detail,
                         size_t detail_bytes)
{
    int32_t vocab = tv_model_config(self->shadow->model)->vocab;
    struct tv_path_rows plain = {0};
    float *forwards = NULL, *backwards = NULL;
    int rc = tv_path_rows_init(&plain, run->text, run->text_len, run->tree, 0);
    if (rc == 0) {
        rc = noise_passes(self, &plain, rows, &forwards, &backwards);
    }
    if (rc != 0) {
        (void)snprintf(detail, detail_bytes, "measuring the noise: %s", strerror(-rc));
        goto done;
    }
    size_t count = (size_t)plain.count * (size_t)vocab;
    double noise = noise_of(run, vocab, &plain, forwards, rows, backwards);
    double cap = is_rounded(self) ? NOISE_SPREAD_BF16 * tv_shadow_spread(forwards, count)
                                  : bound_of(forwards, count);
    if (noise <= cap) {
        *ret_noise = noise;
    } else {
        (void)snprintf(detail, detail_bytes,
                       "the oracle in two orders of summation differs by %.3g, the cap is %.3g: no "
                       "answer of this model%s could be judged",
                       noise, cap, is_rounded(self) ? " with kv_dtype = bf16" : "");
        rc = -EIO;
    }
done:
    tv_path_rows_finish(&plain);
    free(forwards);
    free(backwards);
    return rc;
}

/* The first layer that reads something infinite or undefined, seen by the oracle alone. */
struct finite_watch {
    size_t count;  /* of a layer's KV values */
    int32_t layer; /* -1: none */
};

static void finite_kv(void *context, int32_t layer, float *kv)
{
    struct finite_watch *watch = context;
    if (watch->layer < 0 && !are_finite(kv, watch->count)) {
        watch->layer = layer;
    }
}

/* 0: the model has finite logits for the canned text and tree; -EDOM: it has not, whoever computes
 * them: nothing of the fast forms is looked at, not even through a captured row. -ENOMEM, or a
 * failed copy. */
static int model_is_finite(const struct tv_shadow_judge *self, const struct tv_self_test_run *run,
                           char *detail, size_t detail_bytes)
{
    const struct tv_model_config *config = tv_model_config(self->shadow->model);
    struct tv_path_rows plain = {0};
    struct finite_watch finite = {.layer = -1};
    const struct tv_path_watch watch = {.context = &finite, .kv = finite_kv};
    float *logits = NULL;
    int rc = tv_path_rows_init(&plain, run->text, run->text_len, run->tree, 0);
    if (rc == 0) {
        finite.count = (size_t)plain.count * (size_t)(config->kv_lora + config->rope_dim);
        rc = oracle_run(self, &plain, TV_PATH_LANES, &watch, &logits);
    }
    for (int32_t r = 0; rc == 0 && r < plain.count; r++) {
        const float *row = logits + (size_t)r * (size_t)config->vocab;
        if (!are_finite(row, (size_t)config->vocab)) {
            (void)snprintf(detail, detail_bytes,
                           "finite weights, but no finite logits: the reference arithmetic (f32) "
                           "overflows for token %d at position %d, %s %d; the weights' scale is no "
                           "model's",
                           plain.tokens[r], plain.positions[r],
                           finite.layer < 0 ? "behind the keys of layer" : "before or in layer",
                           finite.layer < 0 ? config->layers - 1 : finite.layer);
            rc = -EDOM;
        }
    }
    tv_path_rows_finish(&plain);
    free(logits);
    return rc;
}

/* The fast forms, once the noise is known. *ret_has_numbers: the oracle's logits are finite; then
 * the fast form is wrong, not the model. */
static int oracle_judge(const struct tv_shadow_judge *self, const struct tv_self_test_run *run,
                        const struct tv_path_rows *rows, double noise, int *ret_has_numbers,
                        char *detail, size_t detail_bytes)
{
    const struct tv_model_config *config = tv_model_config(self->shadow->model);
    struct tv_rows_check check = {
        .round = self->round,
        .rows = rows,
        .attention = is_rounded(self) && !self->shadow->params.device->host_memory,
        .v_dim = config->v_dim,
        .tie = is_rounded(self) ? 0.0 : 2.0 * noise / TV_SHADOW_LOGIT_STD, /* of two paths */
        .equal = 1};
    const struct tv_path_watch watch = tv_shadow_rows_watch(&check);
    float *oracle = NULL;
    int rc = oracle_run(self, rows, TV_PATH_LANES, &watch, &oracle);
    if (rc != 0) {
        (void)snprintf(detail, detail_bytes, "the path oracle cannot run: %s", strerror(-rc));
        return rc;
    }
    *ret_has_numbers = are_finite(oracle, (size_t)rows->count * (size_t)config->vocab);
    rc = forms_judge(self, run, &check, oracle, detail, detail_bytes);
    free(oracle);
    return rc;
}

static int judge(void *context, const struct tv_self_test_run *run, double *ret_noise, char *detail,
                 size_t detail_bytes)
{
    const struct tv_shadow_judge *self = context;
    const struct tv_shadow_round *round = self->round;
    struct tv_path_rows rows = {0};
    int has_numbers = 0;
    int rc = round->failed;
    if (rc == 0 && (round->captured != round->layer_count || round->nodes != run->tree->count ||
                    round->prefix_len != run->text_len)) {
        rc = -EPROTO;
    }
    if (rc == 0) {
        rc = tv_path_rows_init(&rows, run->text, run->text_len, run->tree, is_rounded(self));
    }
    if (rc != 0) {
        (void)snprintf(detail, detail_bytes, "the path oracle cannot run: %s", strerror(-rc));
        goto done;
    }
    rc = noise_measure(self, run, &rows, ret_noise, detail, detail_bytes);
    if (rc == 0) {
        rc = oracle_judge(self, run, &rows, *ret_noise, &has_numbers, detail, detail_bytes);
    }
    if (rc == -EIO && !has_numbers && model_is_finite(self, run, detail, detail_bytes) == -EDOM) {
        rc = -EDOM;
    }
done:
    tv_path_rows_finish(&rows);
    return rc;
}

struct tv_judge tv_shadow_judge_calls(struct tv_shadow_judge *self)
{
    return (struct tv_judge){.context = self, .layer = see_layer, .judge = judge};
}
