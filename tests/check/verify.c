/*
 * verify.c - checks of both attention slots: bounds, layouts, masks (B05, B24), splits (B26).
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "tests/check/attn.h"

static const struct attn_layout plain = {.page_size = 64};
static const struct attn_layout naive = {.page_size = 64, .naive = 1};

/* The largest |score| bounds what f32 scores can resolve: s of the numerics contract. */
static double score_unit(const struct attn_problem *p)
{
    double worst = 0.0;
    int32_t dim = p->latent + p->rope;
    for (int32_t b = 0; b < p->batch; b++) {
        for (int32_t i = 0; i < p->nodes[b] * p->heads; i++) {
            const float *q = p->q + ((int64_t)b * p->q_len * p->heads + i) * dim;
            for (int32_t t = 0; t < p->prefix[b] + p->nodes[b]; t++) {
                const float *kv = p->kv[b] + (int64_t)t * dim;
                double sum = 0.0;
                for (int32_t d = 0; d < dim; d++) {
                    sum += (double)q[d] * (double)kv[d];
                }
                worst = fmax(worst, fabs(sum * (double)p->scale));
            }
        }
    }
    return fmax(1.0, worst / 16.0);
}

static void compare(struct check *c, const struct attn_problem *p, const struct attn_layout *layout,
                    const struct attn_result *expected, const char *what)
{
    struct attn_result result;
    if (attn_run(c, c->k, p, layout, &result) != 0) {
        return;
    }
    double s = score_unit(p);
    double bound = layout->naive ? 1e-6 : p->dtype == TV_F32 ? 2e-6 * s : 4e-3;
    if (p->out_dtype == TV_BF16) {
        bound = 4e-3; /* one rounding of the output is 2^-9 */
    }
    double lse_bound = layout->naive ? 1e-6 : p->dtype == TV_F32 ? 1e-5 * s : 1e-4 * s;
    check_rel_l2(c, result.out, expected->out, attn_out_count(p), bound, what);
    /* naive: 1e-6 * max(1, max|lse|), which this is at least as strict as */
    check_near(c, result.lse, expected->lse, attn_lse_count(p), lse_bound,
               layout->naive ? 1e-6 : 0.0, what);
}

static void random_problems(struct check *c)
{
    for (int32_t n = 0; n < 8 * c->scale; n++) {
        int32_t batch = check_range(c, 1, 3), prefix[3], nodes[3];
        for (int32_t b = 0; b < batch; b++) {
            prefix[b] = check_range(c, 0, 1) ? check_range(c, 0, 300) : 64 * check_range(c, 0, 3);
            nodes[b] = check_range(c, 1, 20);
        }
        struct attn_problem p =
            attn_make(c, batch, prefix, nodes, n % 8 ? check_range(c, 1, 9) : 72,
                      (enum attn_tree)(n % 3), n & 1 ? TV_BF16 : TV_F32);
        p.out_dtype = n % 4 == 3 ? TV_BF16 : TV_F32;
        struct attn_layout layout = {.page_size = 16 << check_range(c, 0, 3), .shuffled = 1};
        layout.packed = check_range(c, 0, 1);
        struct attn_result expected;
        enum tv_dtype out_dtype = p.out_dtype;
        p.out_dtype = TV_F32;
        (void)attn_run(c, c->ref, &p, &naive, &expected);
        p.out_dtype = out_dtype;
        compare(c, &p, &layout, &expected, "verify_attn");
        layout.naive = 1;
        compare(c, &p, &layout, &expected, "verify_attn_naive");
        check_release(c);
    }
}

/* B05: node counts around word borders, root included, up to the limit. */
static void tree_sizes(struct check *c)
{
    static const int32_t sizes[] = {1, 2, 3, 31, 32, 33, 63, 64, 65, 127, 128, 1024};
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        int32_t prefix = (int32_t)i * 13;
        struct attn_problem p = attn_make(c, 1, &prefix, &sizes[i], 1, ATTN_RANDOM, TV_F32);
        struct attn_result expected;
        (void)attn_run(c, c->ref, &p, &naive, &expected);
        compare(c, &p, &plain, &expected, "verify_attn tree size (B05)");
        if (sizes[i] <= 128) {
            compare(c, &p, &naive, &expected, "verify_attn_naive tree size (B05)");
        }
        check_release(c);
    }
}

static void same_bits(struct check *c, struct tv_kernels *k, const struct attn_problem *p,
                      const struct attn_layout *layout, const struct attn_result *expected,
                      const char *what)
{
    struct attn_result result;
    if (attn_run(c, k, p, layout, &result) == 0) {
        check_same(c, result.out, expected->out, (size_t)attn_out_count(p) * sizeof(float), what);
        check_same(c, result.lse, expected->lse, (size_t)attn_lse_count(p) * sizeof(float), what);
    }
}

/* Page size, page order, row layout and repetition do not change a bit. */
static void layouts(struct check *c, enum tv_dtype dtype)
{
    int32_t prefix[3] = {130, 0, 577}, nodes[3] = {9, 33, 5};
    struct attn_problem p = attn_make(c, 3, prefix, nodes, 4, ATTN_RANDOM, dtype);
    struct attn_result expected;
    if (attn_run(c, c->k, &p, &plain, &expected) != 0) {
        check_release(c);
        return;
    }
    for (int32_t page_size = 16; page_size <= 128; page_size *= 2) {
        for (int32_t way = 0; way < 4; way++) {
            struct attn_layout layout = {
                .page_size = page_size, .shuffled = way & 1, .packed = way >> 1};
            same_bits(c, c->k, &p, &layout, &expected, "page size, page order, packing");
        }
    }
    if (c->other) {
        same_bits(c, c->other, &p, &plain, &expected, "another thread count");
    }
    check_release(c);
}

/* One request of a batch as a problem of its own; arrays are shared with the whole. */
static struct attn_problem alone(struct check *c, const struct attn_problem *all, int32_t b)
{
    struct attn_problem p = *all;
    int64_t row = (int64_t)b * all->q_len;
    p.batch = 1;
    p.q_len = all->nodes[b];
    p.prefix = all->prefix + b;
    p.nodes = all->nodes + b;
    p.parents = all->parents + row;
    p.kv = all->kv + b;
    p.q = all->q + row * all->heads * (all->latent + all->rope);
    (void)c;
    return p;
}

static void batch_independent(struct check *c, int32_t heads, enum tv_dtype dtype)
{
    enum { BATCH = 34 };
    int32_t prefix[BATCH], nodes[BATCH];
    for (int32_t b = 0; b < BATCH; b++) {
        prefix[b] = check_range(c, 0, 90);
        nodes[b] = check_range(c, 1, 5);
    }
    prefix[7] = 700;
    struct attn_problem p = attn_make(c, BATCH, prefix, nodes, heads, ATTN_RANDOM, dtype);
    struct attn_result all, one;
    if (attn_run(c, c->k, &p, &plain, &all) == 0) {
        for (int32_t b = 0; b < BATCH; b += 7) {
            struct attn_problem single = alone(c, &p, b);
            int64_t first = (int64_t)b * p.q_len * p.heads;
            size_t rows = (size_t)nodes[b] * (size_t)p.heads;
            if (attn_run(c, c->k, &single, &plain, &one) != 0) {
                break;
            }
            check_same(c, one.out, all.out + first * p.latent,
                       rows * (size_t)p.latent * sizeof(float), "request among 33 others");
            check_same(c, one.lse, all.lse + first, rows * sizeof(float),
                       "request among 33 others");
        }
    }
    check_release(c);
}

/* B07, and more than the contract asks: on the cpu backend a node's bits are those of its path as
 * a chain, so the same tree in another order of nodes agrees bit by bit. */
static void path_as_chain(struct check *c, int32_t heads)
{
    int32_t prefix = 100, nodes = 40;
    struct attn_problem tree = attn_make(c, 1, &prefix, &nodes, heads, ATTN_RANDOM, TV_F32);
    int32_t dim = tree.latent + tree.rope, path[64], depth = 0;
    for (int32_t at = nodes - 1; at >= 0; at = tree.parents[at]) {
        path[depth++] = at;
    }
    struct attn_problem chain = attn_make(c, 1, &prefix, &depth, heads, ATTN_CHAIN, TV_F32);
    memcpy(chain.kv[0], tree.kv[0], (size_t)prefix * (size_t)dim * sizeof(float));
    for (int32_t i = 0; i < depth; i++) {
        int32_t node = path[depth - 1 - i];
        memcpy(chain.kv[0] + (int64_t)(prefix + i) * dim,
               tree.kv[0] + (int64_t)(prefix + node) * dim, (size_t)dim * sizeof(float));
        memcpy(chain.q + (int64_t)i * heads * dim, tree.q + (int64_t)node * heads * dim,
               (size_t)heads * (size_t)dim * sizeof(float));
    }
    struct attn_result a, b;
    if (attn_run(c, c->k, &tree, &plain, &a) == 0 && attn_run(c, c->k, &chain, &plain, &b) == 0) {
        size_t row = (size_t)heads * (size_t)tree.latent;
        const float *node = a.out + (size_t)(nodes - 1) * row;
        const float *leaf = b.out + (size_t)(depth - 1) * row;
        check_rel_l2(c, node, leaf, (int64_t)row, 2e-6, "node as the end of a chain (B07)");
        if (c->k->host_memory) {
            check_same(c, node, leaf, row * sizeof(float), "node as the end of a chain (B07)");
        }
    }
    check_release(c);
}

/* 100, or the share of it that TV_TEST_SCALE below 1 asks for. */
static int32_t repeats(void)
{
    const char *text = getenv("TV_TEST_SCALE");
    double scale = text != NULL ? strtod(text, NULL) : 1.0;
    return scale > 0.0 && scale < 1.0 ? (int32_t)(100.0 * scale) + 1 : 100;
}

/* B26: forced splits, most of them empty for short requests; workspace and outputs are NaN before
 * each of 100 runs, which agree bit by bit, and with one split within the noise. */
static void splits(struct check *c)
{
    static const int32_t counts[] = {1, 2, 3, 7, 16, 64};
    static const int32_t prefixes[] = {0, 1, 63, 64, 65, 4095};
    for (size_t i = 0; i < sizeof prefixes / sizeof prefixes[0]; i++) {
        int32_t nodes = 3;
        struct attn_problem p = attn_make(c, 1, &prefixes[i], &nodes, 2, ATTN_STAR, TV_F32);
        struct attn_result expected, one;
        (void)attn_run(c, c->ref, &p, &naive, &expected);
        for (size_t j = 0; j < sizeof counts / sizeof counts[0]; j++) {
            struct attn_layout layout = {
                .page_size = 64, .shuffled = 1, .splits = counts[j], .repeats = repeats()};
            compare(c, &p, &layout, &expected, "forced splits (B26)");
            layout.repeats = 0;
            if (j == 0 && attn_run(c, c->k, &p, &layout, &one) != 0) {
                break;
            }
            compare(c, &p, &layout, &one, "forced splits against one (B26)");
        }
        check_release(c);
    }
}

/* B24: valid scores near -2e4 while invisible siblings carry huge values; whole tiles of siblings
 * are invisible to every node. */
static void low_scores(struct check *c)
{
    int32_t prefix = 5, nodes = 200;
    struct attn_problem p = attn_make(c, 1, &prefix, &nodes, 2, ATTN_STAR, TV_F32);
    int32_t dim = p.latent + p.rope;
    for (int32_t i = 0; i < nodes * p.heads; i++) {
        for (int32_t d = 0; d < dim; d++) {
            p.q[(int64_t)i * dim + d] = d == 0 ? 1000.0f : 0.001f;
        }
    }
    for (int32_t t = 0; t < prefix + nodes; t++) {
        /* score = 0.0722 * 1000 * first = -2e4, a little different for each token */
        p.kv[0][(int64_t)t * dim] = -277.0f + 0.001f * (float)(t % 7);
        p.kv[0][(int64_t)t * dim + 1] = t < prefix ? 1.0f : 100.0f;
    }
    struct attn_result expected, result;
    struct attn_layout layout = {.page_size = 16, .shuffled = 1};
    (void)attn_run(c, c->ref, &p, &naive, &expected);
    compare(c, &p, &layout, &expected, "scores near -2e4 (B24)");
    layout.splits = 7;
    compare(c, &p, &layout, &expected, "scores near -2e4, split (B24)");
    /* A NaN in a sibling reaches no other node. */
    int32_t sick = 3;
    struct attn_result clean;
    if (c->k->host_memory && attn_run(c, c->k, &p, &plain, &clean) == 0) {
        size_t row = (size_t)p.heads * (size_t)p.latent;
        for (int32_t d = 0; d < dim; d++) {
            p.kv[0][(int64_t)(prefix + sick) * dim + d] = NAN;
        }
        (void)attn_run(c, c->k, &p, &plain, &result);
        memcpy(result.out + (size_t)sick * row, clean.out + (size_t)sick * row,
               row * sizeof(float));
        check_same(c, result.out, clean.out, (size_t)nodes * row * sizeof(float),
                   "NaN in a sibling");
    }
    check_release(c);
}

/* Rounded probabilities: as the reference has them, for every scaling, and each in its own way. */
static void rounded_probabilities(struct check *c)
{
    int32_t prefix = 40, nodes = 9;
    struct attn_problem p = attn_make(c, 1, &prefix, &nodes, 4, ATTN_RANDOM, TV_BF16);
    int64_t count = attn_out_count(&p);
    struct attn_result exact, expected, result, before = {0};
    const struct attn_layout few = {.page_size = 64, .naive = 1, .blocks = 3};
    (void)attn_run(c, c->ref, &p, &naive, &exact);
    if (attn_run(c, c->k, &p, &naive, &expected) == 0 &&
        attn_run(c, c->k, &p, &few, &result) == 0) {
        check_same(c, expected.out, result.out, (size_t)count * sizeof *result.out, "few blocks");
    }
    for (int32_t k = 1; k <= 4; k++) {
        struct attn_layout layout = {.page_size = 64, .naive = 1, .round_p = k};
        (void)attn_run(c, c->ref, &p, &layout, &expected);
        if (attn_run(c, c->k, &p, &layout, &result) != 0) {
            break;
        }
        (void)check_rel_l2(c, result.out, exact.out, count, 4e-3, "rounded probabilities");
        /* the two exponentials may differ by a bit, and one probability fall over a border */
        (void)check_rel_l2(c, result.out, expected.out, count, 3e-4, "rounded as the reference");
        if (before.out != NULL &&
            memcmp(before.out, result.out, (size_t)count * sizeof *result.out) == 0) {
            check_fail(c, "rounding %d is the one before", k);
        }
        before = result;
    }
    check_release(c);
}

/* Of bf16 rows, with f32 sums: what a judgement beside live rounds runs. */
static void sums_f32(struct check *c)
{
    const int32_t prefix[2] = {700, 0}, nodes[2] = {9, 70};
    static const int32_t heads[3] = {1, 3, 16};
    for (int i = 0; i < 3; i++) {
        struct attn_problem p = attn_make(c, 2, prefix, nodes, heads[i], ATTN_RANDOM, TV_BF16);
        int64_t count = attn_out_count(&p);
        struct attn_result exact, rounded, result, other;
        struct attn_layout layout = {.page_size = 16, .naive = 1, .round_p = 2};
        (void)attn_run(c, c->ref, &p, &naive, &exact);
        (void)attn_run(c, c->ref, &p, &layout, &rounded);
        layout = (struct attn_layout){.page_size = 64, .naive = 1, .sum_f32 = 1, .shuffled = 1};
        if (attn_run(c, c->k, &p, &layout, &result) != 0) {
            break;
        }
        (void)check_rel_l2(c, result.out, exact.out, count, 2e-6, "f32 sums");
        int64_t full = (int64_t)p.q_len * p.heads; /* the second request has no row to spare */
        (void)check_rel_l2(c, result.lse + full, exact.lse + full, full, 1e-6, "f32 sums, lse");
        layout.blocks = 5;
        layout.packed = 1;
        layout.page_size = 128;
        if (attn_run(c, c->k, &p, &layout, &other) == 0) {
            check_same(c, result.out, other.out, (size_t)count * sizeof *other.out,
                       "f32 sums, few blocks");
        }
        layout.round_p = 2;
        if (attn_run(c, c->k, &p, &layout, &other) == 0) {
            (void)check_rel_l2(c, other.out, rounded.out, count, 3e-4, "f32 sums, rounded");
        }
    }
    check_release(c);
}

/* What a longer request of more rows asks for holds a shorter one: it is taken once, at a start. */
static void workspaces(struct check *c)
{
    struct tv_verify_attn args = {.latent_dim = 512,
                                  .rope_dim = 64,
                                  .dtype = TV_BF16,
                                  .out_dtype = TV_F32,
                                  .page_count = 1,
                                  .page_size = 64};
    for (int32_t n = 0; n < 200; n++) {
        size_t judge[2], live[2];
        args.heads = 1 << check_range(c, 0, 7);
        args.blocks_max = n % 2 == 0 ? 264 : 0;
        args.batch = check_range(c, 1, 4);
        args.q_len = check_range(c, 1, 512);
        args.kv_len_max = args.q_len + check_range(c, 0, 100000);
        for (int32_t i = 0; i < 2; i++) {
            args.max_pages = args.kv_len_max / args.page_size + 1;
            judge[i] = c->k->verify_attn_naive_workspace(c->k, &args);
            live[i] = c->k->verify_attn_workspace(c->k, &args);
            args.q_len += check_range(c, 0, 512);
            args.kv_len_max += check_range(c, 512, 100000);
        }
        if (judge[1] < judge[0] || live[1] < live[0]) {
            check_fail(c, "workspaces: %zu and %zu for a request, %zu and %zu for a longer one",
                       judge[0], live[0], judge[1], live[1]);
            return;
        }
    }
}

void check_verify(struct check *c)
{
    if (c->k->verify_attn && c->k->verify_attn_naive) {
        workspaces(c);
    }
    if (!c->k->verify_attn && !c->k->verify_attn_naive) {
        return;
    }
    random_problems(c);
    tree_sizes(c);
    layouts(c, TV_F32);
    layouts(c, TV_BF16);
    /* with many heads a backend may go another way */
    batch_independent(c, 2, TV_F32);
    batch_independent(c, 2, TV_BF16);
    batch_independent(c, 72, TV_F32);
    path_as_chain(c, 4);
    path_as_chain(c, 72);
    splits(c);
    low_scores(c);
    rounded_probabilities(c);
    sums_f32(c);
}
