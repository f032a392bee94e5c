/*
 * experts.c - checks of the router (B30), of its f32 product (B32), and the routed experts.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "tests/check/check.h"

/* What the router should choose, written independently of the reference: sort all experts. */
struct candidate {
    double value, score;
    int32_t id;
};

static int by_value(const void *a, const void *b)
{
    const struct candidate *x = a, *y = b;
    if (x->value != y->value) {
        return x->value < y->value ? 1 : -1;
    }
    return x->id < y->id ? -1 : 1;
}

static void expected_row(const struct tv_router *a, const double *logits, struct candidate *all,
                         int32_t *ids, float *weights)
{
    double max = -INFINITY, sum = 0.0, group_value[256];
    int32_t size = a->experts / a->n_group;
    for (int32_t e = 0; e < a->experts; e++) {
        max = fmax(max, logits[e]);
    }
    for (int32_t e = 0; e < a->experts; e++) {
        sum += exp(logits[e] - max);
    }
    for (int32_t e = 0; e < a->experts; e++) {
        double x = logits[e];
        all[e].id = e;
        all[e].score = a->scoring == TV_ROUTER_SIGMOID ? 1.0 / (1.0 + exp(-x)) : exp(x - max) / sum;
        all[e].value = all[e].score;
        if (a->scoring == TV_ROUTER_SIGMOID && a->bias) {
            all[e].value += (double)a->bias[e];
        }
    }
    for (int32_t g = 0; g < a->n_group; g++) {
        struct candidate group[512];
        memcpy(group, all + g * size, (size_t)size * sizeof *group);
        qsort(group, (size_t)size, sizeof *group, by_value);
        group_value[g] = group[0].value;
        if (a->scoring == TV_ROUTER_SIGMOID && size > 1) {
            group_value[g] += group[1].value;
        }
    }
    for (int32_t g = 0; g < a->n_group && a->n_group > 1; g++) {
        int32_t better = 0;
        for (int32_t o = 0; o < a->n_group; o++) {
            better +=
                group_value[o] > group_value[g] || (group_value[o] == group_value[g] && o < g);
        }
        for (int32_t e = g * size; e < (g + 1) * size && better >= a->topk_group; e++) {
            all[e].value = -INFINITY;
        }
    }
    qsort(all, (size_t)a->experts, sizeof *all, by_value);
    double total = 0.0;
    for (int32_t i = 0; i < a->top_k; i++) {
        ids[i] = all[i].id;
        total += all[i].score;
    }
    for (int32_t i = 0; i < a->top_k; i++) {
        double weight = a->normalise ? all[i].score / (total + 1e-20) : all[i].score;
        weights[i] = (float)(weight * (double)a->scale);
    }
}

static void one_router(struct check *c, int32_t experts, int32_t rows)
{
    struct tv_router a = {.rows = rows, .experts = experts};
    a.n_group = experts % 8 == 0 && check_range(c, 0, 1) ? (experts >= 64 ? 8 : 4) : 1;
    a.topk_group = check_range(c, 1, a.n_group);
    int32_t most = a.topk_group * (experts / a.n_group);
    a.top_k = check_range(c, 1, most < 8 ? most : 8);
    a.scoring = check_range(c, 0, 1) ? TV_ROUTER_SIGMOID : TV_ROUTER_SOFTMAX;
    a.normalise = check_range(c, 0, 1);
    a.scale = check_range(c, 0, 1) ? 2.5f : 1.0f;
    float *logits = check_normals(c, (int64_t)rows * experts, 1.5f);
    float *bias = check_normals(c, experts, 0.3f);
    for (int32_t e = 0; e < experts / a.n_group; e++) {
        bias[e] -= 2.0f; /* every score of the first group is negative */
    }
    size_t count = (size_t)rows * (size_t)a.top_k;
    int32_t *ids = check_host(c, count * sizeof *ids),
            *want_ids = check_host(c, count * sizeof *ids);
    float *weights = check_host(c, count * sizeof *weights);
    float *want = check_host(c, count * sizeof *weights);
    struct candidate *all = check_host(c, (size_t)experts * sizeof *all);
    double *exact = check_host(c, (size_t)experts * sizeof *exact);
    a.bias = bias;
    for (int32_t r = 0; r < rows; r++) {
        for (int32_t e = 0; e < experts; e++) {
            exact[e] = (double)logits[(int64_t)r * experts + e];
        }
        expected_row(&a, exact, all, want_ids + (int64_t)r * a.top_k, want + (int64_t)r * a.top_k);
    }
    a.logits = check_upload(c, logits, (size_t)rows * (size_t)experts * sizeof(float));
    a.bias = check_upload(c, bias, (size_t)experts * sizeof(float));
    a.ids = check_poisoned(c, count * sizeof *ids);
    a.weights = check_poisoned(c, count * sizeof *weights);
    if (check_ok(c, c->k->router(c->k, &a), "router")) {
        check_download(c, ids, a.ids, count * sizeof *ids);
        check_download(c, weights, a.weights, count * sizeof *weights);
        check_same(c, ids, want_ids, count * sizeof *ids, "router ids (B30)");
        check_near(c, weights, want, (int64_t)count, 1e-9, 1e-6, "router weights (B30)");
    }
    check_release(c);
}

/* How far the choice is from another one: the smallest gap between neighbours of the chosen and the
 * first that is not. `all` is sorted by value; no groups. */
static double choice_gap(const struct tv_router *a, const struct candidate *all)
{
    double gap = INFINITY;
    for (int32_t i = 0; i < a->top_k && i + 1 < a->experts; i++) {
        gap = fmin(gap, all[i].value - all[i + 1].value);
    }
    return gap;
}

/* Hidden rows through the gate in f32 choose the experts that products in doubles choose. */
static int32_t one_product(struct check *c, int32_t experts, enum tv_dtype dtype, int32_t rows)
{
    enum { HIDDEN = 512 };
    struct tv_router a = {.rows = rows, .experts = experts, .top_k = 6, .n_group = 1};
    a.topk_group = 1, a.scale = 1.0f, a.normalise = 1;
    a.scoring = experts == 64 ? TV_ROUTER_SOFTMAX : TV_ROUTER_SIGMOID;
    int32_t near_ties = 0, ids[6];
    float weights[6];
    float *x = check_normals(c, (int64_t)rows * HIDDEN, 1.0f);
    float *w = check_normals(c, (int64_t)experts * HIDDEN, 0.05f);
    float *bias = check_normals(c, experts, 0.1f);
    for (int32_t i = 0; i < experts * HIDDEN && dtype == TV_BF16; i++) {
        w[i] = tv_bf16_to_f32(tv_f32_to_bf16(w[i]));
    }
    void *gate = check_weights(c, dtype, w, (int64_t)experts * HIDDEN);
    int32_t *got = check_host(c, (size_t)rows * 6 * sizeof *got);
    double *exact = check_host(c, (size_t)experts * sizeof *exact);
    struct candidate *all = check_host(c, (size_t)experts * sizeof *all);
    struct tv_linear linear = {.rows = rows, .n = experts, .k = HIDDEN, .groups = 1};
    linear.x_row_stride = HIDDEN, linear.y_row_stride = experts, linear.w_dtype = dtype;
    linear.x = check_upload(c, x, (size_t)rows * HIDDEN * sizeof(float));
    linear.w = check_upload(c, gate, (size_t)experts * HIDDEN * tv_dtype_size(dtype));
    linear.y = check_poisoned(c, (size_t)rows * (size_t)experts * sizeof(float));
    a.logits = linear.y, a.bias = check_upload(c, bias, (size_t)experts * sizeof(float));
    a.ids = check_poisoned(c, (size_t)rows * 6 * sizeof *got);
    a.weights = check_poisoned(c, (size_t)rows * 6 * sizeof(float));
    if (check_ok(c, c->k->linear(c->k, &linear), "linear") &&
        check_ok(c, c->k->router(c->k, &a), "router")) {
        check_download(c, got, a.ids, (size_t)rows * 6 * sizeof *got);
        a.bias = bias;
        for (int32_t r = 0; r < rows; r++) {
            for (int32_t e = 0; e < experts; e++) {
                exact[e] = 0.0;
                for (int32_t i = 0; i < HIDDEN; i++) {
                    exact[e] += (double)x[r * HIDDEN + i] * (double)w[e * HIDDEN + i];
                }
            }
            expected_row(&a, exact, all, ids, weights);
            if (memcmp(ids, got + (int64_t)r * 6, sizeof ids) != 0) {
                near_ties++;
                if (choice_gap(&a, all) > 2e-6) {
                    check_fail(c, "router product (B32): row %d of %d experts", r, experts);
                }
            }
        }
    }
    check_release(c);
    return near_ties;
}

/* B32: at scale 1 10^4 tokens; fewer than 1 in 100 may be near ties. */
static void check_product(struct check *c)
{
    int32_t rows = 0, near_ties = 0;
    for (int32_t n = 0; n < 5 * c->scale; n++) {
        near_ties += one_product(c, 64, TV_F32, 1000) + one_product(c, 256, TV_BF16, 1000);
        rows += 2000;
    }
    printf("router product (B32): %d tokens, %d near ties\n", rows, near_ties);
    if (near_ties * 100 > rows) {
        check_fail(c, "router product (B32): %d near ties of %d", near_ties, rows);
    }
}

/* Device arrays of `experts` matrices, and the same on the host. */
struct matrices {
    const void **host;
    const void *const *device;
};

static struct matrices make_matrices(struct check *c, int32_t experts, int64_t count,
                                     enum tv_dtype dtype)
{
    struct matrices m;
    const void **pointers = check_host(c, (size_t)experts * sizeof *pointers);
    size_t bytes = (size_t)count * tv_dtype_size(dtype);
    float *values = check_normals(c, experts * count, 0.1f);
    char *host = check_weights(c, dtype, values, experts * count);
    char *device = check_upload(c, host, (size_t)experts * bytes);
    m.host = check_host(c, (size_t)experts * sizeof *m.host);
    for (int32_t e = 0; e < experts; e++) {
        m.host[e] = host + (size_t)e * bytes;
        pointers[e] = device + (size_t)e * bytes;
    }
    m.device = check_upload(c, pointers, (size_t)experts * sizeof *pointers);
    return m;
}

/* Ids of distinct experts in each row: every expert with about as many rows as the others. */
static void choose_evenly(const struct tv_experts *a, int32_t *ids)
{
    for (int64_t i = 0; i < (int64_t)a->rows * a->top_k; i++) {
        ids[i] = (int32_t)((i / a->top_k * 7 + i % a->top_k) % a->experts);
    }
}

/* Rows of experts / top_k experts that have 0, 1, 2, ... of them, one of each count. */
static int32_t ramp_rows(int32_t experts)
{
    return experts * (experts - 1) / 2;
}

/* Choice j is one of the experts e with e % top_k == j, which have 0, 1, 2, ... rows, whichever:
 * tiles that are full, that have a row, and all between. Rows: ramp_rows. */
static void choose_ramp(struct check *c, const struct tv_experts *a, int32_t *ids)
{
    for (int32_t j = 0; j < a->top_k; j++) {
        for (int32_t r = 0, e = 1; r < a->rows; r++) {
            e += r == ramp_rows(e + 1);
            int32_t other = check_range(c, 0, r); /* a place among those so far, at random */
            ids[r * a->top_k + j] = ids[other * a->top_k + j];
            ids[other * a->top_k + j] = e * a->top_k + j;
        }
    }
}

/* Some rows alone, the last one among them, have the bits they had among the others. */
static void rows_alone(struct check *c, const struct tv_experts *all, const float *y,
                       const float *before)
{
    int64_t step = (all->rows + 15) / 16;
    size_t bytes = (size_t)all->hidden * sizeof(float);
    struct tv_experts a = *all;
    float *one = check_host(c, bytes);
    a.rows = 1;
    for (int64_t row = all->rows - 1; row >= 0; row -= step) {
        (void)c->k->upload(c->k, a.y, before + row * a.hidden, bytes);
        a.x = all->x + row * a.hidden;
        a.ids = all->ids + row * a.top_k;
        a.weights = all->weights + row * a.top_k;
        (void)check_ok(c, c->k->experts(c->k, &a), "experts");
        check_download(c, one, a.y, bytes);
        check_same(c, one, y + row * a.hidden, bytes, "experts row among others");
    }
}

/* `shape` has rows, hidden, inter, experts, top_k and the weights' dtype. ramp: choose_ramp. */
static void one_experts(struct check *c, const struct tv_experts *shape, int ramp)
{
    struct tv_experts a = *shape;
    enum tv_dtype dtype = a.w_dtype;
    int64_t slots = (int64_t)a.rows * a.top_k, size = (int64_t)a.rows * a.hidden;
    struct matrices gate = make_matrices(c, a.experts, (int64_t)a.inter * a.hidden, dtype);
    struct matrices up = make_matrices(c, a.experts, (int64_t)a.inter * a.hidden, dtype);
    struct matrices down = make_matrices(c, a.experts, (int64_t)a.inter * a.hidden, dtype);
    float *x = check_normals(c, size, 1.0f), *y = check_normals(c, size, 1.0f);
    float *weights = check_normals(c, slots, 1.0f);
    float *expected = check_host(c, (size_t)size * sizeof(float));
    float *one = check_host(c, (size_t)size * sizeof(float));
    int32_t *ids = check_host(c, (size_t)slots * sizeof *ids);
    if (ramp) {
        choose_ramp(c, &a, ids);
    } else {
        choose_evenly(&a, ids);
    }
    memcpy(expected, y, (size_t)size * sizeof(float));
    memcpy(one, y, (size_t)size * sizeof(float));
    struct tv_experts r = a;
    r.x = x, r.ids = ids, r.weights = weights, r.y = expected;
    r.gate = gate.host, r.up = up.host, r.down = down.host;
    r.workspace_bytes = c->ref->experts_workspace(c->ref, &r);
    r.workspace = check_host(c, r.workspace_bytes);
    a.workspace_bytes = c->k->experts_workspace(c->k, &a);
    a.workspace = check_poisoned(c, a.workspace_bytes);
    a.gate = gate.device, a.up = up.device, a.down = down.device;
    float *d_x = check_upload(c, x, (size_t)size * sizeof(float));
    float *d_y = check_upload(c, y, (size_t)size * sizeof(float));
    int32_t *d_ids = check_upload(c, ids, (size_t)slots * sizeof *ids);
    float *d_weights = check_upload(c, weights, (size_t)slots * sizeof(float));
    a.x = d_x, a.y = d_y, a.ids = d_ids, a.weights = d_weights;
    if (check_ok(c, c->k->experts(c->k, &a), "experts")) {
        (void)c->ref->experts(c->ref, &r);
        check_download(c, y, d_y, (size_t)size * sizeof(float));
        if (a.products == TV_PRODUCTS_EXACT) {
            check_near(c, y, expected, size, 2e-6, 2e-6, "experts");
        } else { /* an activation may fall to the other side of a border: 2^-8 of itself */
            (void)check_rel_l2(c, y, expected, size, 2e-4, "experts with bf16 products");
        }
        if (c->other) {
            float *again = check_host(c, (size_t)size * sizeof(float));
            (void)c->k->upload(c->k, d_y, one, (size_t)size * sizeof(float));
            (void)check_ok(c, c->other->experts(c->other, &a), "experts");
            check_download(c, again, d_y, (size_t)size * sizeof(float));
            check_same(c, again, y, (size_t)size * sizeof(float),
                       "experts with another thread count");
        }
        rows_alone(c, &a, y, one);
    }
    check_release(c);
}

/* One expert of weight 1 onto zeros has the bits of its three products and the activation between
 * them, each with bf16 products. */
static void products_singly(struct check *c, int32_t rows)
{
    enum { HIDDEN = 136, INTER = 264 };
    struct matrices gate = make_matrices(c, 1, INTER * HIDDEN, TV_BF16);
    struct matrices up = make_matrices(c, 1, INTER * HIDDEN, TV_BF16);
    struct matrices down = make_matrices(c, 1, INTER * HIDDEN, TV_BF16);
    size_t x_bytes = (size_t)rows * HIDDEN * sizeof(float);
    size_t act_bytes = (size_t)rows * INTER * sizeof(float);
    float *weights = check_host(c, (size_t)rows * sizeof(float));
    int32_t *ids = check_host(c, (size_t)rows * sizeof *ids);
    float *y = check_host(c, x_bytes), *expected = check_host(c, x_bytes);
    for (int32_t r = 0; r < rows; r++) {
        weights[r] = 1.0f;
    }
    struct tv_experts a = {.rows = rows, .hidden = HIDDEN, .inter = INTER, .experts = 1};
    a.top_k = 1;
    a.w_dtype = TV_BF16;
    a.products = TV_PRODUCTS_BF16;
    a.x = check_upload(c, check_normals(c, (int64_t)rows * HIDDEN, 1.0f), x_bytes);
    a.ids = check_upload(c, ids, (size_t)rows * sizeof *ids);
    a.weights = check_upload(c, weights, (size_t)rows * sizeof(float));
    a.gate = gate.device, a.up = up.device, a.down = down.device;
    a.y = check_upload(c, y, x_bytes);
    a.workspace_bytes = c->k->experts_workspace(c->k, &a);
    a.workspace = check_poisoned(c, a.workspace_bytes);
    struct tv_linear one = {.rows = rows, .n = INTER, .k = HIDDEN, .groups = 1};
    one.w_dtype = TV_BF16;
    one.products = TV_PRODUCTS_BF16;
    one.x = a.x;
    one.x_row_stride = HIDDEN;
    one.y_row_stride = INTER;
    one.w = check_upload(c, gate.host[0], INTER * HIDDEN * 2);
    float *act = one.y = check_poisoned(c, act_bytes);
    (void)check_ok(c, c->k->experts(c->k, &a), "experts");
    (void)check_ok(c, c->k->linear(c->k, &one), "linear");
    one.w = check_upload(c, up.host[0], INTER * HIDDEN * 2);
    one.y = check_poisoned(c, act_bytes);
    (void)check_ok(c, c->k->linear(c->k, &one), "linear");
    (void)check_ok(c, c->k->swiglu(c->k, rows, INTER, act, one.y), "swiglu");
    check_download(c, y, a.y, x_bytes);
    one.n = HIDDEN;
    one.y_row_stride = HIDDEN;
    one.k = INTER;
    one.x_row_stride = INTER;
    one.x = act;
    one.w = check_upload(c, down.host[0], INTER * HIDDEN * 2);
    one.y = a.y;
    (void)check_ok(c, c->k->linear(c->k, &one), "linear");
    check_download(c, expected, a.y, x_bytes);
    if (c->k->host_memory) { /* the reference sums what this rounds in between */
        (void)check_rel_l2(c, y, expected, (int64_t)rows * HIDDEN, 2e-4,
                           "experts with bf16 products, singly");
    } else {
        check_same(c, y, expected, x_bytes, "experts with bf16 products, singly");
    }
    check_release(c);
}

/* Experts with every number of rows from none on, and in the mean what gives a device tiles of 16,
 * of 32, and of more rows; and experts that all have all rows. */
static void check_ramps(struct check *c, enum tv_products products)
{
    static const struct {
        int32_t experts, top_k, hidden, inter;
    } ramps[] = {{18, 4, 72, 136}, {34, 1, 136, 40}, {68, 1, 72, 136}};
    struct tv_experts all = {.rows = 40, .hidden = 72, .inter = 136, .experts = 4, .top_k = 4};
    for (size_t i = 0; i < sizeof ramps / sizeof ramps[0]; i++) {
        struct tv_experts a = {.rows = ramp_rows(ramps[i].experts), .top_k = ramps[i].top_k};
        a.experts = ramps[i].experts * a.top_k;
        a.hidden = ramps[i].hidden;
        a.inter = ramps[i].inter;
        a.w_dtype = TV_BF16;
        a.products = products;
        one_experts(c, &a, 1);
    }
    all.w_dtype = TV_BF16;
    all.products = products;
    one_experts(c, &all, 0);
}

void check_experts(struct check *c)
{
    static const int32_t counts[] = {1, 8, 16, 24, 160, 256, 384};
    /* At scale 1 about 10^4 rows over all counts and settings. */
    for (int32_t n = 0; n < 12 * c->scale && c->k->router; n++) {
        for (size_t i = 0; i < sizeof counts / sizeof counts[0]; i++) {
            one_router(c, counts[i], 120);
        }
    }
    if (c->k->router && c->k->linear) {
        check_product(c);
    }
    for (int32_t n = 0; n < 6 * c->scale && c->k->experts; n++) {
        struct tv_experts shape = {.rows = check_range(c, 1, 40), .hidden = check_range(c, 1, 80)};
        shape.inter = check_range(c, 1, 70);
        shape.experts = check_range(c, 1, 9);
        shape.top_k = check_range(c, 1, shape.experts < 4 ? shape.experts : 4);
        shape.w_dtype = (enum tv_dtype)(n % 3);
        one_experts(c, &shape, 0);
    }
    /* many rows for each expert: other tiles on a device */
    struct tv_experts many = {.rows = 300, .hidden = 64, .inter = 384, .experts = 16, .top_k = 2};
    many.w_dtype = TV_BF16;
    if (c->k->experts) {
        one_experts(c, &many, 0);
        check_ramps(c, TV_PRODUCTS_EXACT);
    }
    if (!c->k->experts || !c->k->linear || !check_has_products(c)) {
        return;
    }
    for (int32_t n = 0; n < 6 * c->scale; n++) {
        many.w_dtype = (enum tv_dtype)(n % 3);
        many.products = TV_PRODUCTS_BF16;
        many.rows = n == 1 ? 300 : check_range(c, 1, 40);
        one_experts(c, &many, 0);
    }
    check_ramps(c, TV_PRODUCTS_BF16);
    /* many tiles of an expert */
    for (int32_t n = 0; n < 2 && !c->k->host_memory; n++) {
        struct tv_experts tiles = {.rows = 700, .hidden = 72, .inter = 392, .experts = 3};
        tiles.top_k = 2;
        tiles.w_dtype = TV_BF16;
        tiles.products = n == 0 ? TV_PRODUCTS_EXACT : TV_PRODUCTS_BF16;
        one_experts(c, &tiles, 0);
    }
    products_singly(c, 1);
    products_singly(c, 40);
    products_singly(c, 700);
}
