/*
 * draw.cu - one token per row: temperature, top_k, top_p, min_p, then Gumbel-max; one cluster of
 * blocks a row.
 *
 * The same contract as ref/draw.c with the same tokens: weights and Gumbel values are f64 rounded
 * once, sets are cut at the same keys. Only sums over the vocabulary run in another (fixed) order.
 */
#include <float.h>

#include "../philox.h"
#include "ops.h"
#include "select.cuh"

/* The two best perturbed scores; token -1 is none. */
struct best {
    float score, second;
    int32_t token;
};

/* What one row's block works on. */
struct draw_row {
    const float *logits;
    float *weights; /* of the workspace, [vocab] */
    int32_t vocab, position;
    struct tv_sampling sampling;
    float max;                     /* of the tempered logits */
    struct select_set top_k, mass; /* what the filters keep */
};

TV_DEVICE struct best best_none(void)
{
    struct best none = {-CUDART_INF_F, -CUDART_INF_F, -1};
    return none;
}

/* Of two disjoint sets of tokens, the two best. */
TV_DEVICE struct best best_join(struct best a, struct best b)
{
    if (a.token < 0 || b.token < 0) {
        return a.token < 0 ? b : a;
    }
    bool first = a.score > b.score || (a.score == b.score && a.token < b.token);
    struct best joined = first ? a : b;
    joined.second = fmaxf(joined.second, first ? b.score : a.score);
    return joined;
}

TV_DEVICE struct best best_add(struct best a, float score, int32_t token)
{
    struct best one = {score, -CUDART_INF_F, token};
    return best_join(a, one);
}

TV_DEVICE struct best cluster_best(struct best b, int &turn)
{
    return select_join(b, turn,
                       [](const struct best &x, const struct best &y) { return best_join(x, y); });
}

/* logit / T in f32; the clamp only matters where the quotient leaves f32's range. */
TV_DEVICE float tempered(const struct draw_row &row, int32_t i)
{
    return fminf(fmaxf(row.logits[i] / row.sampling.temperature, -FLT_MAX), FLT_MAX);
}

/* Every logit is finite; and, where that is so, the two best. */
TV_DEVICE bool all_finite(const float *logits, int32_t vocab, struct best *ret_best, int &turn)
{
    struct best best = best_none();
    int32_t bad = 0;
    select_each(vocab, [&](int32_t i) {
        bad += !isfinite(logits[i]);
        best = best_add(best, logits[i], i);
    });
    *ret_best = cluster_best(best, turn);
    return select_sum(bad, turn) == 0;
}

TV_DEVICE struct tv_draw draw_greedy(const float *logits, int32_t vocab, struct best best,
                                     int &turn)
{
    double sum = 0.0;
    select_each(vocab, [&](int32_t i) { sum += (double)expf(logits[i] - best.score); });
    sum = select_sum(sum, turn);
    struct tv_draw draw;
    draw.token = best.token;
    draw.margin = vocab == 1 ? CUDART_INF_F : best.score - best.second;
    draw.logprob = (float)-log(sum);
    draw.kept = vocab;
    return draw;
}

/* The element's weight counts for the mass: 0 where top_k has dropped it. */
TV_DEVICE float weight_kept(const struct draw_row &row, int32_t i)
{
    return select_has(row.top_k, select_key(tempered(row, i)), i) ? row.weights[i] : 0.0f;
}

/* Weights relative to the best token, and what top_k keeps. */
TV_DEVICE void weights_fill(struct draw_row &row, int &turn)
{
    select_each(row.vocab, [&](int32_t i) {
        row.weights[i] = (float)exp((double)tempered(row, i) - (double)row.max);
    });
    row.top_k.key = 0; /* below every key of a finite float: all are kept */
    row.top_k.id_end = INT32_MAX;
    if (row.sampling.top_k > 0 && row.sampling.top_k < row.vocab) {
        row.top_k = select_largest(
            row.vocab, row.sampling.top_k, [&](int32_t i) { return select_key(tempered(row, i)); },
            turn);
    }
}

/*
 * What top_p keeps: tokens in descending order of weight, ties to the lower id, until their mass
 * reaches top_p of all. Bits of a weight, which is not negative, are its key; a dropped token has
 * key 0 and no weight.
 */
TV_DEVICE void mass_cut(struct draw_row &row, int &turn)
{
    row.mass.key = 0;
    row.mass.id_end = INT32_MAX;
    if (!(row.sampling.top_p < 1.0f)) {
        return;
    }
    double sum = 0.0, above;
    select_each(row.vocab, [&](int32_t i) { sum += (double)weight_kept(row, i); });
    double wanted = (double)row.sampling.top_p * select_sum(sum, turn);
    uint32_t key = select_key_of<double>(
        row.vocab, wanted,
        [&](int32_t i, uint32_t *ret_key, double *ret_weight) {
            float w = weight_kept(row, i);
            *ret_key = __float_as_uint(w);
            *ret_weight = (double)w;
        },
        &above, turn);
    double ties = ceil((wanted - above) / (double)__uint_as_float(key));
    ties = fmin(fmax(ties, 1.0), (double)row.vocab);
    row.mass.key = key;
    row.mass.id_end = select_id_end(
        row.vocab, key, (int32_t)ties,
        [&](int32_t i) { return __float_as_uint(weight_kept(row, i)); }, turn);
}

/* Passes all filters. */
TV_DEVICE bool is_kept(const struct draw_row &row, int32_t i)
{
    float w = row.weights[i];
    return (w >= row.sampling.min_p || w >= 1.0f) &&
           select_has(row.top_k, select_key(tempered(row, i)), i) &&
           select_has(row.mass, __float_as_uint(w), i);
}

/* At least the Gumbel value of a word: f32 with room for its errors. */
TV_DEVICE float gumbel_bound(uint32_t word)
{
    const float unit = 1.0f / 4294967296.0f;
    float e = word >= 0x80000000u ? -log1pf(-((float)~word + 0.5f) * unit)
                                  : -logf(((float)word + 0.5f) * unit);
    return -logf(e) + 1e-3f;
}

/* The best of the kept tokens for which `chosen` says yes; those that cannot be among the two best
 * beside a second of at least `second` need no logarithm in f64. */
template <typename Chosen>
TV_DEVICE struct best perturb(const struct draw_row &row, float second, Chosen chosen, int &turn)
{
    struct best best = best_none();
    select_each(row.vocab, [&](int32_t i) {
        float z = tempered(row, i), least = fmaxf(second, best.second);
        if (!chosen(z) || z + TV_PHILOX_GUMBEL_MAX < least || !is_kept(row, i)) {
            return;
        }
        uint32_t word = tv_philox_word(row.sampling.seed, (uint32_t)row.position, (uint32_t)i,
                                       TV_PHILOX_TARGET);
        if (z + gumbel_bound(word) >= least) {
            best = best_add(best, z + tv_philox_gumbel(word), i);
        }
    });
    return cluster_best(best, turn);
}

TV_DEVICE struct tv_draw draw_sampled(struct draw_row &row, int &turn)
{
    weights_fill(row, turn);
    mass_cut(row, turn);
    double sum = 0.0;
    int32_t kept = 0;
    select_each(row.vocab, [&](int32_t i) {
        if (is_kept(row, i)) {
            sum += (double)row.weights[i];
            kept++;
        }
    });
    sum = select_sum(sum, turn);
    kept = select_sum(kept, turn);
    /* The likely tokens first: their second best spares most of the others their draw. */
    float likely = row.max - 4.0f;
    struct best best = perturb(
        row, -CUDART_INF_F, [=](float z) { return z >= likely; }, turn);
    best = best_join(best, perturb(
                               row, best.second, [=](float z) { return z < likely; }, turn));
    struct tv_draw draw;
    draw.token = best.token;
    draw.margin = kept == 1 ? CUDART_INF_F : best.score - best.second;
    draw.logprob = (float)((double)tempered(row, best.token) - (double)row.max - log(sum));
    draw.kept = kept;
    return draw;
}

static __global__ void __cluster_dims__(SELECT_BLOCKS) __launch_bounds__(SELECT_THREADS)
    draw(const __grid_constant__ struct tv_draw_args a)
{
    int64_t at = select_row();
    struct draw_row row;
    struct best best;
    int turn = 0;
    row.logits = a.logits + at * a.vocab;
    row.weights = (float *)a.workspace + at * a.vocab;
    row.vocab = a.vocab;
    row.position = a.positions[at];
    row.sampling = a.sampling[at];
    struct tv_draw result = {-1, 0.0f, 0.0f, 0};
    if (all_finite(row.logits, row.vocab, &best, turn)) {
        if (row.sampling.temperature >= 1e-4f) {
            row.max = tempered(row, best.token);
            result = draw_sampled(row, turn);
        } else {
            result = draw_greedy(row.logits, row.vocab, best, turn);
        }
    }
    if (select_thread() == 0) {
        a.draws[at] = result;
    }
    select_end();
}

size_t tv_cuda_draw_workspace(const struct tv_kernels *k, const struct tv_draw_args *args)
{
    (void)k;
    return args->rows < 0 || args->vocab < 1
               ? 0
               : (size_t)args->rows * (size_t)args->vocab * sizeof(float);
}

int tv_cuda_draw(struct tv_kernels *k, const struct tv_draw_args *args)
{
    if (args->rows < 0 || args->rows > INT32_MAX / SELECT_BLOCKS || args->vocab < 1) {
        return -EINVAL;
    }
    if (args->workspace_bytes < tv_cuda_draw_workspace(k, args)) {
        return -ENOSPC;
    }
    if (args->rows == 0) {
        return 0;
    }
    TV_CUDA_ENTER(k);
    draw<<<(uint32_t)args->rows * SELECT_BLOCKS, SELECT_THREADS, 0, tv_cuda_stream(k)>>>(*args);
    return tv_cuda_errno(cudaGetLastError());
}
