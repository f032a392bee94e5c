/*
 * router.cuh - expert choice of one row from its gate logits, in f64, by one warp.
 *
 * A lane looks at every 32nd expert. The same rules as ref/router.c: NaN ranks last, ties go to the
 * lower id, ids are always valid. Owns no kernel.
 */
#ifndef TV_KERNELS_CUDA_ROUTER_CUH
#define TV_KERNELS_CUDA_ROUTER_CUH

#include "device.cuh"

#define ROUTER_EXPERTS_MAX 2048 /* two doubles of each in shared memory */
#define ROUTER_GROUPS_MAX  256

/* The better of two candidates: larger value, then lower id; id < 0 is none. */
struct candidate {
    double value;
    int32_t id;
};

TV_DEVICE struct candidate better(struct candidate a, struct candidate b)
{
    bool first =
        b.id < 0 || (a.id >= 0 && (a.value > b.value || (a.value == b.value && a.id < b.id)));
    return first ? a : b;
}

TV_DEVICE struct candidate warp_best(struct candidate c)
{
    for (int i = 16; i > 0; i >>= 1) {
        struct candidate other;
        other.value = __shfl_xor_sync(0xffffffffu, c.value, i);
        other.id = __shfl_xor_sync(0xffffffffu, c.id, i);
        c = better(c, other);
    }
    return c;
}

/* score[e] and choice[e] of the row, by one warp. */
TV_DEVICE void scores_fill(const struct tv_router &a, const float *logits, double *score,
                           double *choice)
{
    int32_t lane = (int32_t)threadIdx.x & 31;
    double top = -CUDART_INF, sum = 0.0;
    for (int32_t e = lane; e < a.experts; e += 32) {
        top = fmax(top, (double)logits[e]);
    }
    for (int i = 16; i > 0; i >>= 1) {
        top = fmax(top, __shfl_xor_sync(0xffffffffu, top, i));
    }
    for (int32_t e = lane; e < a.experts; e += 32) {
        double x = (double)logits[e];
        score[e] = a.scoring == TV_ROUTER_SOFTMAX ? exp(x - top) : 1.0 / (1.0 + exp(-x));
        sum += score[e];
    }
    sum = warp_sum(sum);
    for (int32_t e = lane; e < a.experts; e += 32) {
        if (a.scoring == TV_ROUTER_SOFTMAX) {
            score[e] /= sum;
        }
        double value = score[e];
        if (a.scoring == TV_ROUTER_SIGMOID && a.bias != NULL) {
            value += (double)a.bias[e];
        }
        choice[e] = isnan(value) ? -CUDART_INF : value;
    }
}

/* What groups are ranked by: the best, or the sum of the two best. */
TV_DEVICE double group_value(const struct tv_router &a, const double *choice, int32_t group)
{
    int32_t size = a.experts / a.n_group;
    double best = -CUDART_INF, second = -CUDART_INF;
    for (int32_t e = group * size; e < (group + 1) * size; e++) {
        double value = choice[e];
        if (value > best) {
            second = best;
            best = value;
        } else if (value > second) {
            second = value;
        }
    }
    return a.scoring == TV_ROUTER_SOFTMAX || size == 1 ? best : best + second;
}

/* What a row's choice needs of shared memory. */
struct router_shared {
    double *score, *choice; /* [experts] */
    double *groups;         /* [n_group] */
    uint8_t *kept;          /* [n_group] */
};

TV_DEVICE void router_row(const struct tv_router &a, int64_t row, const struct router_shared &s)
{
    double *score = s.score, *choice = s.choice, *groups = s.groups;
    uint8_t *kept = s.kept;
    int32_t lane = (int32_t)threadIdx.x & 31, size = a.experts / a.n_group;
    scores_fill(a, a.logits + row * a.experts, score, choice);
    __syncwarp();
    for (int32_t g = lane; g < a.n_group && a.n_group > 1; g += 32) {
        groups[g] = group_value(a, choice, g);
    }
    __syncwarp();
    for (int32_t g = lane; g < a.n_group; g += 32) {
        int32_t before = 0;
        for (int32_t o = 0; o < a.n_group && a.n_group > 1; o++) {
            before += o != g && (groups[o] > groups[g] || (groups[o] == groups[g] && o < g));
        }
        kept[g] = before < a.topk_group;
    }
    __syncwarp();
    double total = 0.0;
    for (int32_t j = 0; j < a.top_k; j++) {
        struct candidate mine = {0.0, -1};
        for (int32_t e = lane; e < a.experts; e += 32) {
            /* a chosen expert's choice is NaN from then on */
            if (kept[e / size] && !isnan(choice[e])) {
                struct candidate other = {choice[e], e};
                mine = better(mine, other);
            }
        }
        mine = warp_best(mine);
        total += score[mine.id];
        __syncwarp();
        if (lane == 0) {
            a.ids[row * a.top_k + j] = mine.id;
            choice[mine.id] = CUDART_NAN;
        }
        __syncwarp();
    }
    double factor = (double)a.scale / (a.normalise ? total + 1e-20 : 1.0);
    for (int32_t j = lane; j < a.top_k; j += 32) {
        a.weights[row * a.top_k + j] = (float)(score[a.ids[row * a.top_k + j]] * factor);
    }
}

/* 0, or -EINVAL. */
static int router_check(const struct tv_router *args)
{
    return args->rows < 0 || args->experts < 1 || args->experts > ROUTER_EXPERTS_MAX ||
                   args->top_k < 1 || args->n_group < 1 || args->n_group > ROUTER_GROUPS_MAX ||
                   args->experts % args->n_group != 0 || args->topk_group < 1 ||
                   args->topk_group > args->n_group ||
                   args->top_k > args->topk_group * (args->experts / args->n_group) ||
                   (args->scoring != TV_ROUTER_SOFTMAX && args->scoring != TV_ROUTER_SIGMOID)
               ? -EINVAL
               : 0;
}

#endif
