/*
 * layer.cuh - the products of layer.cu: its phases, the walk over their items, and a warp's chunks.
 *
 * An item is 16 columns (8 of gate and 8 of up) of all rows; the warps of a block take its chunks
 * of k in turns, from one item to the next, and the chunks' sums meet in shared memory, where they
 * are added in order. What a warp reads next of the weights is found ahead of what it multiplies,
 * over the borders of items and phases. The same products in the same order as linear_stream, so
 * the same bits. Owns no kernel.
 */
#ifndef TV_KERNELS_CUDA_LAYER_CUH
#define TV_KERNELS_CUDA_LAYER_CUH

#include "experts.cuh"
#include "linear_stream.cuh"

#define LAYER_ROWS_MAX  1 /* two gain nothing, four and eight lose: kernels/lab/README.md */
#define LAYER_WARPS     8
#define LAYER_THREADS   (32 * LAYER_WARPS)
#define LAYER_PLACES    2  /* chunks of a warp in flight */
#define LAYER_ROUND     16 /* chunks whose sums are added together; a multiple of LAYER_WARPS */
#define LAYER_PAIRS_MAX 64 /* rows times experts of a row */
#define LAYER_BLOCKS    2  /* of a multiprocessor */
#define LAYER_JOINED    8  /* experts of a row that are asked for together */
#define LAYER_EXPERTS   64 /* more of them are not served */
#define LAYER_MEETINGS  6
#define LAYER_LINE      32 /* words of 4 bytes */
#define LAYER_LOGITS                                                                               \
    (LAYER_MEETINGS *                                                                              \
     LAYER_LINE) /* columns of the router's product that are made; 0 between launches */
#define LAYER_CHOICE (LAYER_LOGITS + LAYER_LINE) /* turns when the choice is made */
#define LAYER_WORDS  (LAYER_CHOICE + LAYER_LINE)

enum {
    PHASE_VALUES,
    PHASE_OUTPUT,
    PHASE_SHARED,
    PHASE_ROUTED,
    PHASE_SHARED_DOWN,
    PHASE_DOWN,
    PHASE_QUERY,
    PHASE_KV,
    PHASE_ABSORB,
    LAYER_PHASES
};

/* Products of one shape. Group: a head, or for routed experts a tile. */
struct layer_phase {
    const char *w[2]; /* the second one's columns are beside the first one's, in PHASE_SHARED */
    const float *x;
    void *y;
    int64_t w_group_bytes, x_row, x_group, y_row, y_group;
    int32_t n, k, columns, groups; /* columns: items of a group; groups: 0 for routed ones */
    int32_t step_group, step_at;   /* from a block's item to its next */
    uint32_t shift;                /* so that phases which follow on each other begin apart */
};

struct layer_args {
    struct layer_phase phases[LAYER_PHASES];
    int32_t count; /* of phases */
    int32_t rows, hidden, top_k;
    float *x;
    const float *norm[2]; /* of this layer's feed-forward part, and the next layer's */
    float eps[2];
    const float *router_w;
    float *logits;
    struct tv_router router;
    struct expert_plan plan;
    const void *const *experts[3]; /* gate, up, down */
    bool shared;
    struct tv_query query;
    uint32_t *words;
};

struct layer_tile {
    const void *w[3]; /* gate, up, down */
    int32_t first, rows;
};

struct alignas(16) layer_shared {
    __nv_bfloat16 w[LAYER_WARPS][LAYER_PLACES][STREAM_W][LINEAR_CHUNK];
    float parts[2][LAYER_ROUND][128];
    struct layer_tile tiles[LAYER_PAIRS_MAX];
    const void *experts[3][LAYER_EXPERTS];
    uint32_t meetings[LAYER_MEETINGS];
    int32_t ids[LAYER_PAIRS_MAX], first[LAYER_PAIRS_MAX], order[LAYER_PAIRS_MAX],
        place[LAYER_PAIRS_MAX];
    float weights[LAYER_PAIRS_MAX];
    float sums[LAYER_ROWS_MAX][LAYER_WARPS], factors[LAYER_ROWS_MAX];
    int32_t tile_count;
};

/* What it says is known only behind ptx_fence_device. */
TV_DEVICE uint32_t word_read(const uint32_t *word)
{
    uint32_t x;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(x) : "l"(word) : "memory");
    return x;
}

/* What this block has written is seen by who sees this. */
TV_DEVICE void word_add(uint32_t *word, uint32_t x)
{
    asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(word), "r"(x) : "memory");
}

/* A meeting of all blocks: what they wrote before it is seen behind it, by a block that waits. A
 * meeting's word is as before but for its topmost bit, so that no launch has to set it. */
TV_DEVICE void layer_meet(const struct layer_args &p, struct layer_shared *s, int32_t meeting,
                          bool waits)
{
    __syncthreads();
    if (threadIdx.x == 0) {
        uint32_t *word = &p.words[meeting * LAYER_LINE];
        word_add(word, blockIdx.x == 0 ? 0x80000000u - (gridDim.x - 1) : 1);
        while (waits && (word_read(word) ^ s->meetings[meeting]) >> 31 == 0) {
        }
        ptx_fence_device();
    }
    __syncthreads();
}

TV_DEVICE bool layer_paired(int32_t phase)
{
    return phase == PHASE_SHARED || phase == PHASE_ROUTED;
}

TV_DEVICE bool layer_routed(int32_t phase)
{
    return phase == PHASE_ROUTED || phase == PHASE_DOWN;
}

/* The norm that a phase's rows go through, or NULL. */
TV_DEVICE const float *layer_norm(const struct layer_args &p, int32_t phase)
{
    return layer_paired(phase)                         ? p.norm[0]
           : phase == PHASE_QUERY || phase == PHASE_KV ? p.norm[1]
                                                       : NULL;
}

TV_DEVICE int32_t layer_groups(const struct layer_args &p, const struct layer_shared *s,
                               int32_t phase)
{
    return layer_routed(phase) ? s->tile_count : p.phases[phase].groups;
}

/* One of a block's items: some columns of a group. */
struct layer_place {
    int32_t group, at;
};

TV_DEVICE struct layer_place layer_first(const struct layer_args &p, int32_t phase)
{
    const struct layer_phase &f = p.phases[phase];
    int32_t first = (int32_t)((blockIdx.x + f.shift) % gridDim.x);
    return {first / f.columns, first % f.columns};
}

TV_DEVICE void layer_step(const struct layer_phase &f, struct layer_place *place)
{
    place->group += f.step_group;
    place->at += f.step_at;
    if (place->at >= f.columns) {
        place->at -= f.columns;
        place->group++;
    }
}

/* What a warp reads next of the weights: chunk `chunk` of an item; k 0: nothing. */
struct layer_cursor {
    const __nv_bfloat16 *at[2]; /* this lane's part of the first row, and of the ninth */
    int32_t last[2];            /* rows from those to the matrix's last */
    int32_t phase, base, chunk, k;
    struct layer_place place;
};

/* To the warp's next chunk, from the first chunk of the cursor's item on, in phases before `end`.
 * base: chunks of the block's items before it, which the warps take in turns. */
TV_DEVICE void layer_seek(const struct layer_args &p, const struct layer_shared *s, int32_t end,
                          struct layer_cursor *c)
{
    int32_t warp = (int32_t)threadIdx.x >> 5, lane = (int32_t)threadIdx.x & 31;
    c->k = 0;
    while (c->phase < end) {
        const struct layer_phase &f = p.phases[c->phase];
        if (c->place.group >= layer_groups(p, s, c->phase)) {
            c->phase++;
            if (c->phase < end) {
                c->place = layer_first(p, c->phase);
            }
            continue;
        }
        int32_t k = f.k, chunks = (k + LINEAR_CHUNK - 1) / LINEAR_CHUNK;
        c->chunk = (warp - c->base) & (LAYER_WARPS - 1);
        if (c->chunk < chunks) {
            bool paired = layer_paired(c->phase);
            const void *w[2];
            if (layer_routed(c->phase)) {
                const struct layer_tile *tile = &s->tiles[c->place.group];
                w[0] = paired ? tile->w[0] : tile->w[2];
                w[1] = paired ? tile->w[1] : tile->w[2];
            } else {
                w[0] = f.w[0] + c->place.group * f.w_group_bytes;
                w[1] = paired ? f.w[1] : w[0];
            }
            int32_t first = c->place.at * (paired ? STREAM_W / 2 : STREAM_W);
            int32_t ninth = first + (paired ? 0 : STREAM_W / 2);
            int32_t at = c->chunk * LINEAR_CHUNK + lane % 16 * 8;
            c->at[0] = (const __nv_bfloat16 *)w[0] + (int64_t)first * k + at;
            c->at[1] = (const __nv_bfloat16 *)w[1] + (int64_t)ninth * k + at;
            c->last[0] = f.n - 1 - first;
            c->last[1] = f.n - 1 - ninth;
            c->k = k;
            return;
        }
        c->base += chunks;
        layer_step(f, &c->place);
    }
}

/* Ask for the cursor's chunk, and move on. */
TV_DEVICE void layer_fetch(const struct layer_args &p, const struct layer_shared *s, int32_t end,
                           struct layer_cursor *c, __nv_bfloat16 (*to)[LINEAR_CHUNK],
                           uint64_t policy)
{
    if (c->k > 0) {
        int32_t lane = (int32_t)threadIdx.x & 31, row = lane / 16, piece = lane % 16;
        uint32_t shared = ptx_shared(&to[row][stream_place(row, piece)]);
        /* beyond the last of k: nothing is read */
        int32_t inside = c->chunk * LINEAR_CHUNK + piece * 8 < c->k ? 16 : 0;
#pragma unroll
        for (int i = 0; i < STREAM_W / 2; i++) {
            /* beyond the last column: computed, not stored */
            int32_t column = min(i % 4 * 2 + row, c->last[i / 4]);
            ptx_copy_once(shared + (uint32_t)(2 * i * LINEAR_CHUNK * sizeof(__nv_bfloat16)),
                          c->at[i / 4] + (int64_t)column * c->k, (uint32_t)inside, policy);
        }
        c->chunk += LAYER_WARPS;
        if (c->chunk * LINEAR_CHUNK < c->k) {
            c->at[0] += LAYER_WARPS * LINEAR_CHUNK;
            c->at[1] += LAYER_WARPS * LINEAR_CHUNK;
        } else {
            c->base += (c->k + LINEAR_CHUNK - 1) / LINEAR_CHUNK;
            layer_step(p.phases[c->phase], &c->place);
            layer_seek(p, s, end, c);
        }
    }
    ptx_copy_commit();
}

/* Rows of an item, in a launch with up to R. */
template <int R> struct layer_rows {
    const float *x[R], *norm;
    float factor[R];
};

/* A warp's part of them, a chunk in three pieces. */
template <int R> struct layer_pieces {
    __nv_bfloat16 piece[R][3][LINEAR_CHUNK];
};

/* A lane's four elements of each. */
template <int R> struct layer_raw {
    float4 x[R], norm;
};

template <int R>
TV_DEVICE void layer_ask(const struct layer_rows<R> &rows, int32_t chunk, int32_t k,
                         struct layer_raw<R> *ret)
{
    int32_t at = chunk * LINEAR_CHUNK + ((int32_t)threadIdx.x & 31) * 4;
#pragma unroll
    for (int r = 0; r < R; r++) {
        ret->x[r] = at < k ? *(const float4 *)(rows.x[r] + at) : make_float4(0, 0, 0, 0);
    }
    if (rows.norm != NULL) {
        ret->norm = at < k ? *(const float4 *)(rows.norm + at) : make_float4(0, 0, 0, 0);
    }
}

template <int R>
TV_DEVICE void layer_cut(const struct layer_rows<R> &rows, const struct layer_raw<R> &raw,
                         struct layer_pieces<R> *to)
{
    int32_t lane = (int32_t)threadIdx.x & 31;
#pragma unroll
    for (int r = 0; r < R; r++) {
        float v[4] = {raw.x[r].x, raw.x[r].y, raw.x[r].z, raw.x[r].w};
        if (rows.norm != NULL) {
            const float norm[4] = {raw.norm.x, raw.norm.y, raw.norm.z, raw.norm.w};
#pragma unroll
            for (int i = 0; i < 4; i++) {
                v[i] = v[i] * rows.factor[r] * norm[i];
            }
        }
        uint2 piece[3];
#pragma unroll
        for (int m = 0; m < 3; m++) {
            piece[m].x = linear_upper(v[0], v[1]);
            piece[m].y = linear_upper(v[2], v[3]);
            for (int i = 0; i < 4; i++) {
                v[i] = linear_remainder(v[i]);
            }
            *(uint2 *)&to->piece[r][m][lane * 4] = piece[m];
        }
    }
}

/* One warp, one chunk: its weights are in `w`, its rows in `few`. */
template <int R>
TV_DEVICE void layer_chunk(const __nv_bfloat16 (*w)[LINEAR_CHUNK],
                           const struct layer_pieces<R> *few, float (&sum)[1][4])
{
    float rest[1][4] = {};
    int32_t lane = (int32_t)threadIdx.x & 31;
    const __nv_bfloat16(*from)[LINEAR_CHUNK] = few->piece[lane / 4 % R];
    ptx_copy_wait<LAYER_PLACES - 1>();
    __syncwarp();
#pragma unroll
    for (int step = 0; step < STREAM_STEPS; step++) {
        struct linear_pieces pieces[1];
        int32_t at = step * 32 + lane % 4 * 8;
        int32_t place = stream_place(lane / 4, step * 4 + lane % 4);
        *(uint4 *)pieces[0].hi = *(const uint4 *)&from[0][at];
        *(uint4 *)pieces[0].mid = *(const uint4 *)&from[1][at];
        *(uint4 *)pieces[0].lo = *(const uint4 *)&from[2][at];
        stream_step<float, 1>(*(const uint4 *)&w[lane / 4][place],
                              *(const uint4 *)&w[lane / 4 + 8][place], pieces, sum, rest);
    }
    __syncwarp(); /* both places may be filled again */
#pragma unroll
    for (int i = 0; i < 4; i++) {
        sum[0][i] += rest[0][i];
    }
}

/* Element e of an item's sums, and of a paired one the sum beside it. */
TV_DEVICE void layer_store(const struct layer_args &p, const struct layer_shared *s, int32_t phase,
                           int32_t group, int32_t column, int32_t e, float total, float beside)
{
    const struct layer_phase &f = p.phases[phase];
    int32_t row = linear_row(e), rows = p.rows, first = 0;
    column += linear_column(e);
    if (layer_routed(phase)) {
        first = s->tiles[group].first;
        rows = s->tiles[group].rows;
        group = 0;
    }
    if (row >= rows || column >= f.n) {
        return;
    }
    int64_t at = (first + row) * f.y_row + group * f.y_group + column;
    if (phase == PHASE_ABSORB) {
        store_rounded(f.y, p.query.out_dtype, at, total);
        return;
    }
    float *y = (float *)f.y + at;
    *y = phase == PHASE_OUTPUT ? *y + total : layer_paired(phase) ? gated(total, beside) : total;
}

/* Where the warps of a block are. */
struct layer_walk {
    int32_t base, place, half, end;
    uint32_t parity; /* of items: which half of the threads adds */
};

/* The rows of an item. */
template <int R>
TV_DEVICE void layer_open(const struct layer_args &p, const struct layer_shared *s, int32_t phase,
                          const struct layer_place &item, struct layer_rows<R> *ret)
{
    const struct layer_phase &f = p.phases[phase];
    bool routed = layer_routed(phase);
    int32_t count = routed ? s->tiles[item.group].rows : p.rows;
    ret->norm = layer_norm(p, phase);
#pragma unroll
    for (int r = 0; r < R; r++) {
        int32_t source = min(r, count - 1); /* more than there are: computed, not stored */
        if (routed) {
            source += s->tiles[item.group].first;
            source = phase == PHASE_ROUTED ? s->order[source] / p.top_k : source;
        }
        ret->x[r] = f.x + source * f.x_row + (routed ? 0 : item.group * f.x_group);
        ret->factor[r] = ret->norm != NULL ? s->factors[source] : 1.0f;
    }
}

/* A block's items of a phase, from `item` on. */
template <int R>
TV_DEVICE void layer_items(const struct layer_args &p, struct layer_shared *s,
                           struct layer_pieces<R> *few, int32_t phase, struct layer_place item,
                           struct layer_walk *walk, struct layer_cursor *next, uint64_t policy)
{
    const struct layer_phase &f = p.phases[phase];
    int32_t thread = (int32_t)threadIdx.x, lane = thread & 31, warp = thread >> 5;
    int32_t k = f.k, chunks = (k + LINEAR_CHUNK - 1) / LINEAR_CHUNK;
    int32_t groups = layer_groups(p, s, phase);
    bool paired = layer_paired(phase);
    struct layer_rows<R> rows;
    struct layer_raw<R> raw;
    int32_t chunk = (warp - walk->base) & (LAYER_WARPS - 1);
    if (item.group >= groups) {
        return;
    }
    layer_open<R>(p, s, phase, item, &rows);
    layer_ask<R>(rows, chunk, k, &raw);
    while (item.group < groups) {
        struct layer_place later = item;
        int32_t e = (thread + (int32_t)(walk->parity & 1) * 128) % LAYER_THREADS;
        bool adds = e < (paired ? 64 : 128);
        float total = 0.0f, beside = 0.0f;
        layer_step(f, &later);
        walk->base += chunks;
        for (int32_t first = 0; first < chunks; first += LAYER_ROUND) {
            int32_t count = min(LAYER_ROUND, chunks - first);
            float(*parts)[128] = s->parts[walk->half];
#pragma unroll 1
            for (; chunk < first + count; chunk += LAYER_WARPS) {
                float sum[1][4] = {};
                layer_cut<R>(rows, raw, few + warp);
                if (R == 1) { /* of more rows it would cost registers that are not there */
                    layer_ask<R>(rows, chunk + LAYER_WARPS, k, &raw);
                }
                layer_chunk<R>(s->w[warp][walk->place], few + warp, sum);
                layer_fetch(p, s, walk->end, next, s->w[warp][walk->place], policy);
                if (R > 1) {
                    layer_ask<R>(rows, chunk + LAYER_WARPS, k, &raw);
                }
                walk->place = walk->place == LAYER_PLACES - 1 ? 0 : walk->place + 1;
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    parts[chunk - first][i * 32 + lane] = sum[0][i];
                }
            }
            if (first + LAYER_ROUND >= chunks &&
                later.group < groups) { /* ahead of the others' sums */
                chunk = (warp - walk->base) & (LAYER_WARPS - 1);
                layer_open<R>(p, s, phase, later, &rows);
                layer_ask<R>(rows, chunk, k, &raw);
            }
            __syncthreads();
            if (adds) {
#pragma unroll 4
                for (int32_t c = 0; c < count; c++) {
                    total += parts[c][e];
                    beside += paired ? parts[c][e + 64] : 0.0f;
                }
            }
            walk->half ^= 1;
        }
        if (adds) {
            layer_store(p, s, phase, item.group, item.at * (paired ? STREAM_W / 2 : STREAM_W), e,
                        total, beside);
        }
        walk->parity++;
        item = later;
    }
}

/* Where nothing is in flight: what the cursor's next chunks are. */
TV_DEVICE void layer_fill(const struct layer_args &p, struct layer_shared *s,
                          const struct layer_walk &walk, struct layer_cursor *next, uint64_t policy)
{
    int32_t warp = (int32_t)threadIdx.x >> 5;
#pragma unroll 1
    for (int i = 0, place = walk.place; i < LAYER_PLACES; i++) {
        layer_fetch(p, s, walk.end, next, s->w[warp][place], policy);
        place = place == LAYER_PLACES - 1 ? 0 : place + 1;
    }
}

#endif
