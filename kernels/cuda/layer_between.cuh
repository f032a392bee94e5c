/*
 * layer_between.cuh - what layer.cu does between its products: norms' factors, the choice of
 * experts, the sum over them, rotations and KV rows.
 *
 * Owns no kernel.
 */
#ifndef TV_KERNELS_CUDA_LAYER_BETWEEN_CUH
#define TV_KERNELS_CUDA_LAYER_BETWEEN_CUH

#include "latent.cuh"
#include "layer.cuh"
#include "router.cuh"

/* The block's first column of the router's product: the last blocks have fewer items. The very last
 * one makes the choice and has none. */
TV_DEVICE int32_t layer_column(void)
{
    return blockIdx.x == gridDim.x - 1 ? INT32_MAX : (int32_t)(gridDim.x - 2 - blockIdx.x);
}

/* f(i) for a thread's elements of rows of p.hidden, as the kernels that this stands for share them
 * out; about 16 of R rows at a time in flight. */
template <int R, typename F> TV_DEVICE void layer_each(const struct layer_args &p, F f)
{
#pragma unroll(R == 1 ? 8 : 16 / R)
    for (int32_t i = (int32_t)threadIdx.x; i < p.hidden; i += LAYER_THREADS) {
        f(i);
    }
}

/* Each row's sum over the block, for the first threads. */
template <int R>
TV_DEVICE float layer_sum(struct layer_shared *s, const float (&sum)[R], int32_t rows)
{
    int32_t thread = (int32_t)threadIdx.x, lane = thread & 31, warp = thread >> 5;
    float all = 0.0f;
#pragma unroll
    for (int r = 0; r < R; r++) {
        float of_warp = warp_sum(sum[r]);
        if (lane == r) {
            s->sums[r][warp] = of_warp;
        }
    }
    __syncthreads();
    for (int w = 0; w < LAYER_WARPS && thread < rows; w++) {
        all += s->sums[thread][w];
    }
    return all;
}

/* The factor of each row's norm, with the sums that rmsnorm.cu has. */
template <int R>
TV_DEVICE void layer_factors(const struct layer_args &p, struct layer_shared *s, float eps)
{
    float sum[R] = {};
    layer_each<R>(p, [&](int32_t i) {
#pragma unroll
        for (int r = 0; r < R; r++) {
            float x = p.x[min(r, p.rows - 1) * p.hidden + i];
            sum[r] = fmaf(x, x, sum[r]);
        }
    });
    float all = layer_sum<R>(s, sum, p.rows);
    if ((int32_t)threadIdx.x < p.rows) {
        s->factors[threadIdx.x] = 1.0f / sqrtf(all / (float)p.hidden + eps);
    }
    __syncthreads();
}

/* This block's columns of the router's product, as linear_any makes them. */
template <int R> TV_DEVICE void layer_logits(const struct layer_args &p, struct layer_shared *s)
{
    int32_t made = 0, column = layer_column();
    for (; column < p.router.experts; column += (int32_t)gridDim.x - 1, made++) {
        const float *w = p.router_w + (int64_t)column * p.hidden;
        float sum[R] = {};
        layer_each<R>(p, [&](int32_t i) {
            float weight = w[i], norm = p.norm[0][i];
#pragma unroll
            for (int r = 0; r < R; r++) {
                float x = p.x[min(r, p.rows - 1) * p.hidden + i];
                sum[r] = fmaf(x * s->factors[r] * norm, weight, sum[r]);
            }
        });
        float all = layer_sum<R>(s, sum, p.rows);
        if ((int32_t)threadIdx.x < p.rows) {
            p.logits[(int64_t)threadIdx.x * p.router.experts + column] = all;
        }
        __syncthreads();
    }
    if (made > 0 && threadIdx.x == 0) { /* the block's logits are older than a barrier of it */
        word_add(&p.words[LAYER_LOGITS], (uint32_t)made);
    }
}

__host__ __device__ static inline int32_t choice_bytes(const struct tv_router &a)
{
    return (int32_t)(2 * sizeof(double)) * a.experts +
           ((int32_t)(sizeof(double) + 1) * a.n_group + 15) / 16 * 16;
}

/* router_row for up to 64 experts in one group, two of a lane in registers. */
TV_DEVICE void layer_choose_row(const struct tv_router &a, int32_t row)
{
    int32_t lane = (int32_t)threadIdx.x & 31, mine = 0;
    float logit[2], bias[2];
    double score[2], total = 0.0, chosen = 0.0;
    struct candidate c[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        bool inside = lane + 32 * i < a.experts;
        logit[i] = inside ? a.logits[row * a.experts + lane + 32 * i] : 0.0f;
        bias[i] = inside && a.bias != NULL ? a.bias[lane + 32 * i] : 0.0f;
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
        score[i] = 1.0 / (1.0 + exp(-(double)logit[i]));
        double choice = score[i] + (double)bias[i];
        c[i].id = lane + 32 * i;
        c[i].key = router_key(isnan(choice) ? -CUDART_INF : choice);
        c[i].key = c[i].id < a.experts ? c[i].key : 0;
    }
    for (int32_t j = 0; j < a.top_k; j++) {
        int32_t id = warp_best(c[1].key > c[0].key ? c[1] : c[0]);
        double of = __shfl_sync(0xffffffffu, id < 32 ? score[0] : score[1], id & 31);
        total += of;
        mine = lane == j ? id : mine;
        chosen = lane == j ? of : chosen;
        c[0].key = c[0].id == id ? 0 : c[0].key;
        c[1].key = c[1].id == id ? 0 : c[1].key;
    }
    double factor = (double)a.scale / (a.normalise ? total + 1e-20 : 1.0);
    if (lane < a.top_k) {
        a.ids[row * a.top_k + lane] = mine;
        a.weights[row * a.top_k + lane] = (float)(chosen * factor);
    }
}

/* One block, while no sums of parts are: the choice of all rows. real false: of what the logits
 * happen to be, for nobody, so that this code is near when it is waited for. */
TV_DEVICE void layer_choose(const struct layer_args &p, struct layer_shared *s, bool real)
{
    int32_t warp = (int32_t)threadIdx.x >> 5, bytes = choice_bytes(p.router);
    if (threadIdx.x == 0 && real) {
        while (word_read(&p.words[LAYER_LOGITS]) != (uint32_t)p.router.experts) {
        }
        ptx_fence_device();
        p.words[LAYER_LOGITS] = 0;
    }
    __syncthreads();
    bool plain = p.router.scoring == TV_ROUTER_SIGMOID && p.router.n_group == 1;
    if (warp < p.rows && plain) {
        layer_choose_row(p.router, warp);
    } else if (warp < p.rows) {
        struct router_shared room;
        room.score = (double *)((char *)s->parts + warp * bytes);
        room.choice = room.score + p.router.experts;
        room.groups = room.choice + p.router.experts;
        room.kept = (uint8_t *)(room.groups + p.router.n_group);
        router_row(p.router, warp, room, NULL);
    }
    __syncthreads();
    if (threadIdx.x == 0 && real) {
        word_add(&p.words[LAYER_CHOICE], 1);
    }
}

/* Wait for the choice, and sort its pairs by expert: a tile has all rows of one. */
template <int R>
TV_DEVICE void layer_chosen(const struct layer_args &p, struct layer_shared *s, uint32_t before)
{
    int32_t thread = (int32_t)threadIdx.x, pairs = p.rows * p.top_k;
    int32_t id = 0, place = thread, rows = 1, tile = thread;
    bool first = thread < pairs;
    if (thread == 0) {
        while (word_read(&p.words[LAYER_CHOICE]) == before) {
        }
        ptx_fence_device();
    }
    __syncthreads();
    if (thread < pairs) {
        id = s->ids[thread] = p.router.ids[thread];
        s->weights[thread] = p.router.weights[thread];
    }
    if (R > 1) { /* rows may share an expert */
        __syncthreads();
        place = rows = tile = 0;
        for (int32_t i = 0; i < pairs; i++) {
            int32_t other = s->ids[i];
            place += other < id || (other == id && i < thread);
            rows += other == id;
            first = first && (other != id || i >= thread);
        }
        if (thread < pairs) {
            s->first[thread] = first;
        }
        __syncthreads();
        for (int32_t i = 0; i < pairs; i++) {
            tile += s->first[i] && s->ids[i] < id;
        }
    }
    if (thread < pairs) {
        s->place[thread] = place;
        s->order[place] = thread;
    }
    if (first) {
        for (int i = 0; i < 3; i++) {
            s->tiles[tile].w[i] = s->experts[i][id];
        }
        s->tiles[tile].first = place;
        s->tiles[tile].rows = rows;
    }
    int32_t count = __syncthreads_count(first);
    if (thread == 0) {
        s->tile_count = count;
    }
    __syncthreads();
}

/* As experts_join. */
TV_DEVICE void layer_join(const struct layer_args &p, const struct layer_shared *s)
{
    int32_t i = (int32_t)(blockIdx.x * LAYER_THREADS + threadIdx.x);
    for (; i < p.rows * p.hidden; i += (int32_t)gridDim.x * LAYER_THREADS) {
        int32_t row = i / p.hidden, column = i % p.hidden;
        float sum = 0.0f, before = p.x[i], shared = p.shared ? p.plan.shared_out[i] : 0.0f;
        for (int32_t first = 0; first < p.top_k; first += LAYER_JOINED) {
            float value[LAYER_JOINED], weight[LAYER_JOINED];
#pragma unroll
            for (int j = 0; j < LAYER_JOINED; j++) {
                bool inside = first + j < p.top_k;
                int32_t pair = row * p.top_k + first + j, at = inside ? s->place[pair] : -1;
                weight[j] = inside ? s->weights[pair] : 0.0f;
                value[j] = at < 0 ? CUDART_NAN_F : p.plan.out[(int64_t)at * p.hidden + column];
            }
#pragma unroll
            for (int j = 0; j < LAYER_JOINED; j++) {
                sum = first + j < p.top_k ? fmaf(weight[j], value[j], sum) : sum;
            }
        }
        sum += before;
        p.x[i] = p.shared ? sum + shared : sum;
    }
}

/* PHASE_KV rows, and the rotated part of the queries, by blocks that have little else. */
TV_DEVICE void layer_turn(const struct layer_args &p)
{
    const struct tv_query &a = p.query;
    int32_t vectors = p.rows * a.heads, rope = a.latent.table.rope_dim;
    int32_t turns = p.rows + (vectors + LAYER_WARPS - 1) / LAYER_WARPS;
    int32_t at = (int32_t)(gridDim.x - 1 - blockIdx.x);
    for (; at < turns; at += (int32_t)gridDim.x) {
        if (at < p.rows) {
            latent_row(a.latent, at);
            continue;
        }
        int32_t vector = (at - p.rows) * LAYER_WARPS + ((int32_t)threadIdx.x >> 5);
        if (vector < vectors) {
            const float *from = a.q + (int64_t)vector * (a.nope_dim + rope) + a.nope_dim;
            int64_t base = (int64_t)vector * (a.latent.latent_dim + rope) + a.latent.latent_dim;
            void *out = a.out;
            enum tv_dtype dtype = a.out_dtype;
            rotate(from, a.latent.table, a.latent.positions[vector / a.heads],
                   [=](int32_t i, float value) { store_rounded(out, dtype, base + i, value); });
        }
    }
}

/* What comes before the first item of a phase; idle: the block has none in the first two. */
template <int R>
TV_DEVICE void layer_before(const struct layer_args &p, struct layer_shared *s, int32_t phase,
                            bool idle, uint32_t choice)
{
    bool chooses = blockIdx.x == gridDim.x - 1;
    if (phase == PHASE_OUTPUT) {
        layer_meet(p, s, 0, !idle);
    } else if (phase == PHASE_SHARED) {
        layer_meet(p, s, 1, !chooses);
    } else if (phase == PHASE_SHARED_DOWN) {
        layer_meet(p, s, 2, true);
    } else if (phase == PHASE_QUERY) {
        layer_meet(p, s, 3, true);
        layer_join(p, s);
        layer_meet(p, s, 4, true);
    } else if (phase == PHASE_ABSORB) {
        layer_meet(p, s, 5, true);
        layer_turn(p);
    }
    if (chooses && (phase == PHASE_SHARED || (phase == PHASE_VALUES && idle))) {
        layer_choose(p, s, phase == PHASE_SHARED);
    }
    if (phase == PHASE_SHARED || phase == PHASE_QUERY) {
        layer_factors<R>(p, s, p.eps[phase == PHASE_QUERY]);
    }
    if (phase == PHASE_SHARED) {
        layer_logits<R>(p, s);
    }
    if (phase == PHASE_ROUTED) {
        layer_chosen<R>(p, s, choice);
    }
}

#endif
