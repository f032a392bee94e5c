/*
 * kernels.h - the operation table: everything the model's forward pass asks of a backend.
 *
 * One table, three implementations: ref/ (scalar oracle, always built), cpu/ (threads, SIMD, the
 * embedded default) and cuda/ (libtreeverify-cuda.so, loaded at run time). This header is the C ABI
 * of that library: plain C, device pointers, the caller's stream and workspace; no operation
 * allocates, synchronises, logs or keeps state. All buffers named "device" live where the backend
 * computes (host memory for ref and cpu).
 *
 * Rules for every operation:
 *   - returns 0 or a negative errno: -EINVAL for arguments outside the documented ranges, -ENOSPC
 *     for a workspace that is too small, -ENOTSUP for what this backend does not have, -EIO for a
 *     device fault, -ENOTRECOVERABLE for one after which no operation of this process can succeed:
 *     the device is lost. Outputs are undefined on failure.
 *   - a row of a result depends on that row's inputs alone, never on how many rows share the call:
 *     the order of every sum is fixed (numerics contract: kernels/README.md).
 *   - shapes are row-major, strides and counts are in elements, never bytes, unless named _bytes.
 *   - products of counts are formed in 64 bits.
 */
#ifndef TV_KERNELS_KERNELS_H
#define TV_KERNELS_KERNELS_H

#include "types.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Bumped when a struct below or the table changes; a loader refuses another number. */
#define TV_KERNELS_ABI 10

/*
 * Verify attention: absorbed MLA over a paged cache with a tree mask, one layer.
 *
 * Request b has prefix_len[b] cached tokens and node_count[b] tree nodes; node i is stored in
 * logical slot prefix_len[b] + i, and attends to slots [0, prefix_len[b]) and to the slots of
 * itself and its ancestors. score = softmax_scale * q.k over latent + rope dims; out =
 * softmax(score) . k over the latent dims; lse = natural log of the sum of exp(score). Logical slot
 * j is row j % page_size of page page_table[b * max_pages + j / page_size].
 *
 * Rows: padded layout when row_start is NULL (request b owns rows b*q_len .. b*q_len + q_len - 1;
 * rows i >= node_count[b] are written out = 0, lse = -inf). Packed layout otherwise: request b's
 * node i is row row_start[b] + i of q, parents, out and lse, and no other row is touched.
 * Cache rows at or past prefix_len + node_count may hold NaN and do not matter. The fast kernels of
 * a device want q, kv_pages, out and workspace at multiples of 16 bytes.
 */
struct tv_verify_attn {
    int32_t batch;             /* requests, >= 1 */
    int32_t q_len;             /* the largest node_count, 1 .. TV_TREE_NODES_MAX */
    int32_t heads;             /* 1 .. TV_HEADS_MAX */
    int32_t latent_dim;        /* 512 for fast kernels; any multiple of 8 for naive */
    int32_t rope_dim;          /* 64 for fast kernels */
    float softmax_scale;       /* applied to q.k; finite, > 0 */
    enum tv_dtype dtype;       /* of q and kv_pages: TV_F32 or TV_BF16 */
    enum tv_dtype out_dtype;   /* TV_F32 or TV_BF16 */
    const void *q;             /* device [rows, heads, latent + rope] */
    const void *kv_pages;      /* device [page_count, page_size, latent + rope] */
    int64_t page_count;        /* of the pool; page ids are below it */
    int32_t page_size;         /* 16, 32, 64 or 128 */
    int32_t max_pages;         /* row length of page_table */
    const int32_t *page_table; /* device [batch, max_pages]; unused entries -1 */
    const int32_t *prefix_len; /* device [batch], >= 0 */
    const int32_t *node_count; /* device [batch], 1 .. q_len */
    const int32_t *parents;    /* device [rows]; -1 for node 0, else 0 <= parent < i; padding -1 */
    const int32_t *row_start;  /* device [batch], or NULL for the padded layout */
    int32_t kv_len_max;        /* host: an upper bound of prefix_len + node_count over the batch */
    int32_t splits;            /* 0: the backend's own function of the request's length; else forced
                                  number of KV splits per request (tests), 1 .. 64 */
    int32_t round_p_bf16;      /* naive only: 0, or k: round probabilities to bf16 before the second
                                  product, as if they were 2^f times as large, f the k-th of 0,
                                  1/2, 1/4, 3/4, 1/8, 5/8, ...: the bits of k - 1 in reverse */
    int32_t sum_f32;           /* naive only: f32 sums instead of f64 (for timing) */
    int32_t blocks_max;        /* naive only: how much of a device it may take at a time, in thread
                                  blocks; 0: any */
    void *out;                 /* device [rows, heads, latent] of out_dtype */
    float *lse;                /* device [rows, heads] */
    void *workspace; /* device, at least the size the table's *_workspace function names */
    size_t workspace_bytes;
};

/*
 * y[g][r][n] (+)= sum over k of x[g][r][k] * w[g][n][k], f32 accumulation.
 * groups > 1 serves per-head products (absorbed query and value up-projection).
 */
struct tv_linear {
    int32_t rows, n, k, groups;
    const float *x; /* device; element (g, r, i) at x + g*x_group_stride + r*x_row_stride + i */
    int64_t x_row_stride, x_group_stride;
    /* device [groups, n, k] with w_group_stride between groups; rows dense in k. bf16 with k a
     * multiple of 8: every group starts at a multiple of 16 bytes. */
    const void *w;
    enum tv_dtype w_dtype;
    int64_t w_group_stride;
    float *y; /* device; element (g, r, i) at y + g*y_group_stride + r*y_row_stride + i */
    int64_t y_row_stride, y_group_stride;
    int32_t accumulate; /* 0: y = product; 1: y += product (residual) */
    enum tv_products products;
};

/* Rotary tables: cos and sin [positions, rope_dim / 2], already multiplied by YaRN's factor. */
struct tv_rope_table {
    const float *cos_sin; /* device [positions, 2, rope_dim / 2]: cosines, then sines */
    int32_t positions;
    int32_t rope_dim;
};

/*
 * Rotate in place `heads` vectors per row, interleaved pairs in (2i, 2i+1), result de-interleaved
 * to halves: out[i] = x[2i] cos_i - x[2i+1] sin_i, out[half + i] = x[2i+1] cos_i + x[2i] sin_i.
 * Queries and keys use the same layout, so scores agree with either convention; the halves layout
 * is what the cache stores.
 */
struct tv_rope {
    int32_t rows, heads;
    float *x; /* device; vector (r, h) at x + r*row_stride + h*head_stride */
    int64_t row_stride, head_stride;
    const int32_t *positions; /* device [rows], 0 <= position < table.positions */
    struct tv_rope_table table;
};

/*
 * Latent write: ckv[r] = [latent | raw rope key] -> RMSNorm of the latent, rotation of the key, one
 * KV row rounded once to the pool's dtype, stored at physical row slots[r] of the layer's pages.
 */
struct tv_latent_write {
    int32_t rows, latent_dim;
    const float *ckv; /* device; row r at ckv + r*row_stride */
    int64_t row_stride;
    const float *norm_weight; /* device [latent_dim] */
    float eps;
    const int32_t *positions; /* device [rows] */
    struct tv_rope_table table;
    const int64_t *slots; /* device [rows]: page * page_size + row in page */
    void *kv_pages;       /* device [page_count * page_size, latent + rope] */
    int64_t slot_count;   /* page_count * page_size, for the bounds check */
    enum tv_dtype kv_dtype;
};

/*
 * Expanded causal attention for prefill and extend: `rows` consecutive tokens of one sequence at
 * positions start .. start + rows - 1, whose KV rows are already in the pages. Per head,
 * key = [k_up[h] . latent | rope key], value = v_up[h] . latent. The result of a row depends on its
 * position and the cache alone, not on how the prompt was cut into chunks.
 */
#define TV_PREFILL_KEYS 64 /* tokens are taken by so many */

struct tv_prefill_attn {
    int32_t rows, start;
    int32_t heads, nope_dim, rope_dim, v_dim, latent_dim;
    float softmax_scale;
    const float *q;   /* device [rows, heads, nope + rope], rope part rotated */
    const void *k_up; /* device [heads, nope, latent] */
    const void *v_up; /* device [heads, v, latent] */
    enum tv_dtype w_dtype;
    const void *kv_pages; /* device [page_count, page_size, latent + rope] */
    enum tv_dtype kv_dtype;
    int64_t page_count;
    int32_t page_size;
    const int32_t *page_table; /* device [pages of the sequence] */
    float *out;                /* device [rows, heads, v_dim] */
    void *workspace;
    size_t workspace_bytes;
    /* Tokens to take in this call, after those before key_first were taken by calls with the same
     * arguments; key_count 0: all. Both multiples of TV_PREFILL_KEYS, but for a count that reaches
     * the last one. out is whole after the call that takes the last token, and has the bits that
     * one call gives; until then it and running [heads, 2, rows] are the calls' own, and none may
     * read out. Only where host_memory is set. */
    int32_t key_first, key_count;
    float *running;
    /* bf16: latents are rounded where they meet k_up and v_up; queries, keys, probabilities and
     * values may be rounded to 11 bits where they meet each other. */
    enum tv_products products;
};

enum tv_router_scoring {
    TV_ROUTER_SOFTMAX = 0, /* DeepSeek-V2 */
    TV_ROUTER_SIGMOID = 1, /* DeepSeek-V3: bias selects, unbiased scores weigh */
};

/*
 * Expert choice from gate logits. softmax: scores = softmax(logits), groups ranked by their maximum
 * (group_limited_greedy) when n_group > 1. sigmoid: scores = sigmoid(logits), choice by score +
 * bias, groups ranked by the sum of their two best, experts outside the kept groups are excluded
 * (-inf). weights = chosen scores, divided by (their sum + 1e-20) when normalise, times scale. Ties
 * go to the lower id. ids are in descending order of choice value.
 */
struct tv_router {
    int32_t rows, experts, top_k, n_group, topk_group;
    enum tv_router_scoring scoring;
    int32_t normalise;
    float scale;
    const float *logits; /* device [rows, experts] */
    const float *bias;   /* device [experts], or NULL */
    int32_t *ids;        /* device [rows, top_k] */
    float *weights;      /* device [rows, top_k] */
};

/*
 * Routed experts: y[r] += sum over j of weights[r][j] * down(silu(gate(x)) * up(x)) of expert
 * ids[r][j]; the sum over j runs in ascending j, then joins y once.
 */
struct tv_experts {
    int32_t rows, hidden, inter, experts, top_k;
    const float *x; /* device [rows, hidden] */
    const int32_t *ids;
    const float *weights;
    const void *const *gate, *const *up; /* device arrays [experts] of device [inter, hidden] */
    const void *const *down;             /* device array [experts] of device [hidden, inter] */
    /* every matrix starts at a multiple of 16 bytes where its rows are multiples of 16 bytes */
    enum tv_dtype w_dtype;
    float *y; /* device [rows, hidden] */
    void *workspace;
    size_t workspace_bytes;
    enum tv_products products; /* of x, and of the activation with down */
};

/*
 * Slot query: what stands between the first products of a layer and its verify attention; the same
 * bits as rope over the rope part of q, latent_write, linear with k_up_t over the rest of q, and
 * one rounding of both to out_dtype. Rows and positions are those of `latent`.
 */
struct tv_query {
    int32_t heads, nope_dim;
    const float *q; /* device [rows, heads, nope + rope], not rotated */
    /* device [heads, latent, nope]; starts at a multiple of 16 bytes */
    const void *k_up_t;
    enum tv_dtype w_dtype;
    struct tv_latent_write latent;
    void *out; /* device [rows, heads, latent + rope] */
    enum tv_dtype out_dtype;
    enum tv_products products; /* of linear */
};

/*
 * Slot moe: a layer's feed-forward part, y[r] += routed experts, then y[r] += shared experts; the
 * same bits as linear(logits), router, experts, and for the shared ones gate, up, swiglu and down
 * one by one. Rows, ids, weights and the experts' numbers are the same in all three parts.
 */
struct tv_moe {
    struct tv_linear logits;
    struct tv_router router;
    struct tv_experts experts; /* its workspace, and its products, serve the whole but logits */
    const void *shared_gate, *shared_up; /* device [shared_inter, hidden] */
    const void *shared_down;             /* device [hidden, shared_inter] */
    int32_t shared_inter;                /* 0: there are none */
};

/*
 * Slot layer (exact products): what stands between the verify attention of a layer with experts and
 * that of the next; the same bits as linear(values), linear(output), rmsnorm, moe and, with a next
 * layer, rmsnorm, linear_pair(next_query, next_kv) and query. x, the residual rows, are output.y
 * and moe.experts.y; what the norms make of them (moe.experts.x, next_query.x) need not be written.
 */
struct tv_layer {
    struct tv_linear values;  /* grouped by head; its result is output's x */
    struct tv_linear output;  /* onto x */
    const float *norm_weight; /* device [hidden] */
    float norm_eps, next_norm_eps;
    struct tv_moe moe;
    const float *next_norm_weight; /* device [hidden]; NULL: nothing behind moe */
    struct tv_linear next_query, next_kv;
    struct tv_query query;
};

/* How one row's next token is chosen; temperature < 1e-4 means greedy (filters off). */
struct tv_sampling {
    float temperature, top_p, min_p;
    int32_t top_k; /* 0 = off */
    uint64_t seed;
};

/* What a row's draw gave. */
struct tv_draw {
    int32_t token; /* -1: a logit of the row is not finite (only +-inf/NaN raw logits) */
    float margin;  /* gap between the two best (perturbed) scores; +inf: one token survived */
    float logprob; /* of token: after temperature and filters; greedy: temperature 1, unfiltered */
    int32_t kept;  /* tokens that survived the filters */
};

/* One row's draw at absolute position `position`; see proto/README.md, "Sampling". */
struct tv_draw_args {
    int32_t rows, vocab;
    const float *logits;                /* device [rows, vocab] */
    const int32_t *positions;           /* device [rows]: position of the drawn token */
    const struct tv_sampling *sampling; /* device [rows] */
    struct tv_draw *draws;              /* device [rows] */
    void *workspace;
    size_t workspace_bytes;
};

/* The k largest raw logits of each row (descending, ties lower id) and log-sum-exp over the row. */
struct tv_topk {
    int32_t rows, vocab, k; /* 0 <= k <= 64 and k <= vocab */
    const float *logits;    /* device [rows, vocab] */
    int32_t *ids;           /* device [rows, k] */
    float *values;          /* device [rows, k] */
    float *lse;             /* device [rows] */
};

/*
 * Random weights: element (g, r, c) of `to` is offset + scale * u in one rounding to f32, then one
 * to dtype; u in [-1, 1) is a multiple of 2^-23 and a function of seed, tensor and i = (g * rows +
 * r) * cols + c alone (philox.h, purpose TV_PHILOX_WEIGHTS), the same on every backend.
 */
struct tv_synthesize {
    int32_t groups, rows, cols;
    int32_t transposed;  /* 1: `to` is [groups, cols, rows], the values are the same */
    enum tv_dtype dtype; /* TV_F32 or TV_BF16 */
    float scale, offset;
    uint64_t seed;
    uint32_t tensor; /* tensors of one seed that differ here share no value */
    void *to;        /* device [groups, rows, cols] */
};

/* What the driver says of a device with memory of its own, when the backend was created. */
struct tv_device {
    int32_t major, minor;    /* compute capability */
    int32_t driver, toolkit; /* CUDA versions as 1000 * major + 10 * minor */
    int32_t image;           /* the machine code in use, from PTX or not: 10 * major + minor */
    const char *images;      /* what the library was built with, "sm_90 compute_120" */
};

/*
 * A backend. Created by tv_kernels_create, or by the cuda library's tv_cuda_create directly;
 * destroyed by its own destroy. `impl` is private. Operations may be called by one thread at a
 * time.
 */
struct tv_kernels {
    uint32_t abi;        /* TV_KERNELS_ABI */
    const char *name;    /* "ref", "cpu", "cuda" */
    const char *variant; /* instruction set or device, for logs: "avx2", "NVIDIA H200 sm_90" */
    int32_t host_memory; /* 1: device memory is host memory and may be read directly */
    void *stream;        /* cudaStream_t of the caller, or NULL; the backend never changes it */
    void *impl;

    /* Device memory. alloc returns NULL when there is none; sizes in bytes; 64-byte aligned.
     * copies are ordered on the stream; sync waits for everything issued so far. */
    void *(*alloc)(struct tv_kernels *k, size_t bytes);
    void (*free)(struct tv_kernels *k, void *device);
    int (*upload)(struct tv_kernels *k, void *device, const void *host, size_t bytes);
    int (*download)(struct tv_kernels *k, void *host, const void *device, size_t bytes);
    int (*fill)(struct tv_kernels *k, void *device, int byte, size_t bytes);
    int (*sync)(struct tv_kernels *k);

    int (*embed)(struct tv_kernels *k, int32_t rows, int32_t hidden, int32_t vocab,
                 const void *table, enum tv_dtype dtype, const int32_t *ids, float *x);
    /* y[r] = x[r] * rsqrt(mean(x[r]^2) + eps) * weight; x and y may be the same buffer */
    int (*rmsnorm)(struct tv_kernels *k, int32_t rows, int32_t dim, const float *x,
                   int64_t x_stride, const float *weight, float eps, float *y, int64_t y_stride);
    int (*linear)(struct tv_kernels *k, const struct tv_linear *args);
    int (*rope)(struct tv_kernels *k, const struct tv_rope *args);
    int (*latent_write)(struct tv_kernels *k, const struct tv_latent_write *args);
    /* gate[r] = silu(gate[r]) * up[r], in place on gate [rows, dim] */
    int (*swiglu)(struct tv_kernels *k, int32_t rows, int32_t dim, float *gate, const float *up);
    /* y[i] = x[i] rounded to bf16 (to nearest even): queries for bf16 pages */
    int (*to_bf16)(struct tv_kernels *k, int64_t count, const float *x, uint16_t *y);
    int (*router)(struct tv_kernels *k, const struct tv_router *args);
    int (*experts)(struct tv_kernels *k, const struct tv_experts *args);
    size_t (*experts_workspace)(const struct tv_kernels *k, const struct tv_experts *args);

    int (*verify_attn)(struct tv_kernels *k, const struct tv_verify_attn *args);
    size_t (*verify_attn_workspace)(const struct tv_kernels *k, const struct tv_verify_attn *args);
    int (*verify_attn_naive)(struct tv_kernels *k, const struct tv_verify_attn *args);
    size_t (*verify_attn_naive_workspace)(const struct tv_kernels *k,
                                          const struct tv_verify_attn *args);
    int (*prefill_attn)(struct tv_kernels *k, const struct tv_prefill_attn *args);
    size_t (*prefill_attn_workspace)(const struct tv_kernels *k,
                                     const struct tv_prefill_attn *args);

    /* Copy `count` KV rows inside one pool: row dst[i] = row src[i], in order of i; dst[i] <=
     * src[i] when both lists ascend, so moving forward in place is safe. row_bytes per row. src and
     * dst are device [count]. */
    int (*kv_move)(struct tv_kernels *k, void *kv_pages, size_t row_bytes, int64_t slot_count,
                   const int64_t *src, const int64_t *dst, int32_t count);

    int (*draw)(struct tv_kernels *k, const struct tv_draw_args *args);
    size_t (*draw_workspace)(const struct tv_kernels *k, const struct tv_draw_args *args);
    int (*topk)(struct tv_kernels *k, const struct tv_topk *args);

    /* Several operations in fewer launches; NULL, all four: the backend gains nothing by it.
     * linear_pair: both products, of the same rows of one x without groups. query, moe: -ENOTSUP
     * where the single operations serve a shape better; nothing has been done then. */
    int (*linear_pair)(struct tv_kernels *k, const struct tv_linear *first,
                       const struct tv_linear *second);
    int (*query)(struct tv_kernels *k, const struct tv_query *args);
    int (*moe)(struct tv_kernels *k, const struct tv_moe *args);
    size_t (*moe_workspace)(const struct tv_kernels *k, const struct tv_moe *args);
    /* The same, and NULL where the four above are all there is; its workspace is moe's. */
    int (*layer)(struct tv_kernels *k, const struct tv_layer *args);

    /* A recording: operations called between begin and end are checked but not run; replay runs
     * them, with the same arguments, as often as wanted, for less than calling them again. What
     * they read through device pointers may change between replays. Nothing but operations on
     * device data may be called in between: no alloc, free, upload, download or sync. NULL, all
     * four: the backend gains nothing by it. end gives no recording when it fails. */
    int (*record_begin)(struct tv_kernels *k);
    int (*record_end)(struct tv_kernels *k, void **ret_recording);
    int (*replay)(struct tv_kernels *k, void *recording);
    void (*recording_free)(struct tv_kernels *k, void *recording);

    /* Steps of work that operations have done so far, modulo 2^64: moves every few milliseconds on
     * an ordinary processor while one runs, whatever its shape. Any thread may ask, also while an
     * operation runs. NULL: the backend does not count. */
    uint64_t (*progress)(const struct tv_kernels *k);

    int (*synthesize)(struct tv_kernels *k, const struct tv_synthesize *args);

    /* A device with memory of its own; NULL, all three, where that is the host's. device: constant.
     * device_memory: bytes free and in all, whoever uses them, now. allocations: how often
     * creation, alloc and record_end have taken device memory so far; any thread. */
    int (*device)(const struct tv_kernels *k, struct tv_device *ret_device);
    int (*device_memory)(const struct tv_kernels *k, size_t *ret_free, size_t *ret_total);
    uint64_t (*allocations)(const struct tv_kernels *k);

    /* Copy `rows` rows of row_bytes inside device memory, which do not overlap; strides in bytes,
     * all of it in order on the stream, like any operation. */
    int (*copy)(struct tv_kernels *k, void *to, size_t to_stride, const void *from,
                size_t from_stride, size_t row_bytes, int32_t rows);

    /* NULL, all three, where memory is the host's. timer: the device's time when it gets there,
     * end 0: the first of two moments, 1: the second, which never wait. timer_read: microseconds
     * between them, once all that was issued before the second has been waited for.
     * side: a second table of the same device, for another thread, on a stream of its own that
     * recordings of this one take precedence over. The caller destroys it, before this one. */
    int (*timer)(struct tv_kernels *k, int end);
    int (*timer_read)(struct tv_kernels *k, double *ret_us);
    int (*side)(struct tv_kernels *k, struct tv_kernels **ret_side);

    void (*destroy)(struct tv_kernels *k);
};

/* Options of a backend. */
struct tv_kernels_options {
    int32_t threads;         /* cpu: worker threads including the caller; 0 = processors online */
    uint64_t cpu_flags_mask; /* cpu: features that may be used (cpu_features.h); ~0 = all */
    int32_t device;          /* cuda: the device's ordinal */
    char *reason;            /* cuda: where a sentence goes that says what is missing, or NULL */
    size_t reason_bytes;
};

/* Create the "ref", "cpu" or "cuda" backend. The caller owns *ret_kernels and calls its destroy.
 * -ENOTSUP: no backend of that name, or a device that it cannot use. -ENOENT, -EPROTO, -ENODEV:
 * cuda's library is missing, is of another ABI, or has no device. -ENOMEM, -EAGAIN: memory,
 * threads. */
int tv_kernels_create(const char *name, const struct tv_kernels_options *options,
                      struct tv_kernels **ret_kernels);

/* Host code, the same for every backend: the distribution that `draw` draws from, of one row in
 * host memory. ids and probs [vocab] receive *ret_count survivors of the filters, in no order, and
 * their probabilities (f64, sum 1); greedy: the best alone. keys [vocab] is scratch. -EDOM: a logit
 * is not finite. */
int tv_kernels_target(const float *logits, int32_t vocab, const struct tv_sampling *sampling,
                      uint64_t *keys, int32_t *ids, double *probs, int32_t *ret_count);
/* Rule ratio_wor: the coin of a child's token, in (0, 1), and the Gumbel noise of a token of the
 * residual, by seed and the absolute position of the drawn token. */
double tv_kernels_coin(uint64_t seed, int32_t position, int32_t token);
float tv_kernels_residual_noise(uint64_t seed, int32_t position, int32_t token);

#ifdef __cplusplus
}
#endif

#endif
