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

/* Rises with the value, and is never 0; a value that is no number has none. */
TV_DEVICE uint64_t router_key(double value)
{
    uint64_t bits = (uint64_t)__double_as_longlong(value + 0.0); /* 0 for -0 */
    return bits >> 63 != 0 ? ~bits : bits | 1ull << 63;
}

/* The largest choice of those that a lane looks at, and of equals the first; key 0: none left. A
 * choice is NaN when it is not, or no longer, to be had. */
struct candidate {
    uint64_t key;
    int32_t id;
};

TV_DEVICE struct candidate lane_best(const double *choice, int32_t experts)
{
    struct candidate best = {0, 0};
    for (int32_t e = (int32_t)threadIdx.x & 31; e < experts; e += 32) {
        uint64_t key = isnan(choice[e]) ? 0 : router_key(choice[e]);
        if (key > best.key) {
            best.key = key;
            best.id = e;
        }
    }
    return best;
}

/* Id of the best of a warp's candidates: largest key, then lowest id. */
TV_DEVICE int32_t warp_best(struct candidate c)
{
    uint32_t high = (uint32_t)(c.key >> 32), low = (uint32_t)c.key;
    uint32_t top = __reduce_max_sync(0xffffffffu, high);
    uint32_t next = __reduce_max_sync(0xffffffffu, high == top ? low : 0);
    bool best = high == top && low == next;
    return (int32_t)__reduce_min_sync(0xffffffffu, best ? (uint32_t)c.id : 0xffffffffu);
}

/* score[e] and choice[e] of the row, by one warp. */
TV_DEVICE void scores_fill(const struct tv_router &a, const float *logits, double *score,
                           double *choice)
{
    int32_t lane = (int32_t)threadIdx.x & 31;
    double top = -CUDART_INF, sum = 0.0;
    if (a.scoring == TV_ROUTER_SIGMOID) {
        for (int32_t e = lane; e < a.experts; e += 32) {
            double bias = a.bias != NULL ? (double)a.bias[e] : 0.0;
            score[e] = 1.0 / (1.0 + exp(-(double)logits[e]));
            choice[e] = isnan(score[e] + bias) ? -CUDART_INF : score[e] + bias;
        }
        return;
    }
    for (int32_t e = lane; e < a.experts; e += 32) {
        top = fmax(top, (double)logits[e]);
    }
    for (int i = 16; i > 0; i >>= 1) {
        top = fmax(top, __shfl_xor_sync(0xffffffffu, top, i));
    }
    for (int32_t e = lane; e < a.experts; e += 32) {
        score[e] = exp((double)logits[e] - top);
        sum += score[e];
    }
    sum = warp_sum(sum);
    for (int32_t e = lane; e < a.experts; e += 32) {
        score[e] /= sum;
        choice[e] = isnan(score[e]) ? -CUDART_INF : score[e];
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

/* Whether a group is among those that experts are chosen from. */
TV_DEVICE void groups_keep(const struct tv_router &a, const struct router_shared &s)
{
    int32_t lane = (int32_t)threadIdx.x & 31, size = a.experts / a.n_group;
    for (int32_t g = lane; g < a.n_group; g += 32) {
        s.groups[g] = group_value(a, s.choice, g);
    }
    __syncwarp();
    for (int32_t g = lane; g < a.n_group; g += 32) {
        int32_t before = 0;
        for (int32_t o = 0; o < a.n_group; o++) {
            before +=
                o != g && (s.groups[o] > s.groups[g] || (s.groups[o] == s.groups[g] && o < g));
        }
        s.kept[g] = before < a.topk_group;
    }
    __syncwarp();
    for (int32_t e = lane; e < a.experts; e += 32) {
        if (!s.kept[e / size]) {
            s.choice[e] = CUDART_NAN;
        }
    }
}

/* One warp; near: where the ids go as well, or NULL. */
TV_DEVICE void router_row(const struct tv_router &a, int64_t row, const struct router_shared &s,
                          int32_t *near)
{
    int32_t lane = (int32_t)threadIdx.x & 31, *ids = a.ids + row * a.top_k, first = 0;
    scores_fill(a, a.logits + row * a.experts, s.score, s.choice);
    __syncwarp();
    if (a.n_group > 1) {
        groups_keep(a, s);
    }
    double total = 0.0;
    struct candidate mine = lane_best(s.choice, a.experts);
    for (int32_t j = 0; j < a.top_k; j++) {
        int32_t id = warp_best(mine);
        total += s.score[id];
        if (lane == j % 32) {
            ids[j] = id;
            first = j < 32 ? id : first;
            if (near != NULL) {
                near[row * a.top_k + j] = id;
            }
        }
        if (mine.key != 0 && mine.id == id) {
            s.choice[id] = CUDART_NAN;
            mine = lane_best(s.choice, a.experts);
        }
    }
    double factor = (double)a.scale / (a.normalise ? total + 1e-20 : 1.0);
    for (int32_t j = lane; j < a.top_k; j += 32) {
        a.weights[row * a.top_k + j] = (float)(s.score[j < 32 ? first : ids[j]] * factor);
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
