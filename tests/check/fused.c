/*
 * fused.c - checks of the slots that stand for several operations: the same bits as those one by
 * one.
 *
 * A backend without such a slot has nothing to check here.
 */
#include <errno.h>
#include <math.h>
#include <stdio.h>

#include "tests/check/check.h"

enum { ROPE = 64, POSITIONS = 50, SLOTS = 100, REPLAYS = 3 };

static float *values_upload(struct check *c, int64_t count)
{
    return check_upload(c, check_normals(c, count, 1.0f), (size_t)count * sizeof(float));
}

static void *weights_upload(struct check *c, enum tv_dtype dtype, int64_t count)
{
    float *values = check_normals(c, count, 0.1f);
    return check_upload(c, check_weights(c, dtype, values, count),
                        (size_t)count * tv_dtype_size(dtype));
}

/* What two device buffers of `bytes` hold must be equal. */
static void same_on_device(struct check *c, const void *a, const void *b, size_t bytes,
                           const char *what)
{
    void *left = check_host(c, bytes), *right = check_host(c, bytes);
    check_download(c, left, a, bytes);
    check_download(c, right, b, bytes);
    check_same(c, left, right, bytes, what);
}

static enum tv_products products_draw(struct check *c)
{
    return (enum tv_products)check_range(c, 0, 1);
}

/* n_most: of either matrix's rows. */
static void one_pair(struct check *c, enum tv_dtype dtype, int32_t rows, int32_t k, int32_t n_most)
{
    enum tv_products products = products_draw(c);
    struct tv_linear a[2], single[2];
    float *x = values_upload(c, (int64_t)rows * k);
    size_t bytes[2];
    for (int i = 0; i < 2; i++) {
        int32_t n = check_range(c, 1, n_most);
        n += rows > 128 ? n % 2 : 0; /* even, as other kernels of a device want it */
        a[i] = (struct tv_linear){.rows = rows, .n = n, .k = k, .groups = 1, .w_dtype = dtype};
        a[i].x = x;
        a[i].products = products;
        a[i].x_row_stride = k;
        a[i].w = weights_upload(c, dtype, (int64_t)n * k);
        a[i].y_row_stride = n;
        a[i].accumulate = i;
        bytes[i] = (size_t)rows * (size_t)n * sizeof(float);
        single[i] = a[i];
        float *y = check_normals(c, (int64_t)rows * n, 1.0f);
        a[i].y = check_upload(c, y, bytes[i]);
        single[i].y = check_upload(c, y, bytes[i]);
    }
    if (check_ok(c, c->k->linear_pair(c->k, &a[0], &a[1]), "linear_pair")) {
        (void)check_ok(c, c->k->linear(c->k, &single[0]), "linear");
        (void)check_ok(c, c->k->linear(c->k, &single[1]), "linear");
        same_on_device(c, a[0].y, single[0].y, bytes[0], "linear_pair, first");
        same_on_device(c, a[1].y, single[1].y, bytes[1], "linear_pair, second");
    }
    check_release(c);
}

static void query_fill(struct check *c, struct tv_query *a, int32_t rows, int32_t latent)
{
    int32_t dim = latent + ROPE;
    int32_t *positions = check_host(c, (size_t)rows * sizeof *positions);
    int64_t *slots = check_host(c, (size_t)rows * sizeof *slots);
    float *table = check_normals(c, POSITIONS * ROPE, 1.0f);
    for (int32_t r = 0; r < rows; r++) {
        positions[r] = check_range(c, 0, POSITIONS - 1);
        slots[r] = r == 1 ? -1 : r; /* one that is stored nowhere */
    }
    a->q = values_upload(c, (int64_t)rows * a->heads * (a->nope_dim + ROPE));
    a->k_up_t = weights_upload(c, a->w_dtype, (int64_t)a->heads * latent * a->nope_dim);
    a->latent = (struct tv_latent_write){
        .rows = rows, .latent_dim = latent, .row_stride = dim, .eps = 1e-6f, .slot_count = SLOTS};
    a->latent.kv_dtype = a->out_dtype;
    a->latent.ckv = values_upload(c, (int64_t)rows * dim);
    a->latent.norm_weight = values_upload(c, latent);
    a->latent.positions = check_upload(c, positions, (size_t)rows * sizeof *positions);
    a->latent.slots = check_upload(c, slots, (size_t)rows * sizeof *slots);
    a->latent.table = (struct tv_rope_table){
        check_upload(c, table, POSITIONS * ROPE * sizeof(float)), POSITIONS, ROPE};
}

/* The operations that the slot stands for; `out` receives their result. */
static int query_singly(struct check *c, const struct tv_query *a, void *pages, float *full,
                        void *out)
{
    struct tv_kernels *k = c->k;
    int32_t rows = a->latent.rows, head_dim = a->nope_dim + ROPE;
    int32_t row_dim = a->latent.latent_dim + ROPE;
    struct tv_latent_write latent = a->latent;
    latent.kv_pages = pages;
    /* the rope part through a product with the identity, which is exact */
    float *identity = check_host(c, (size_t)ROPE * ROPE * sizeof *identity);
    for (int32_t i = 0; i < ROPE; i++) {
        identity[i * ROPE + i] = 1.0f;
    }
    struct tv_linear copy = {.rows = rows, .n = ROPE, .k = ROPE, .groups = a->heads};
    copy.x = a->q + a->nope_dim;
    copy.x_row_stride = (int64_t)a->heads * head_dim;
    copy.x_group_stride = head_dim;
    copy.w = check_upload(c, identity, (size_t)ROPE * ROPE * sizeof *identity);
    copy.y = full + a->latent.latent_dim;
    copy.y_row_stride = (int64_t)a->heads * row_dim;
    copy.y_group_stride = row_dim;
    struct tv_rope rope = {.rows = rows, .heads = a->heads, .x = copy.y, .head_stride = row_dim};
    rope.row_stride = copy.y_row_stride;
    rope.positions = latent.positions;
    rope.table = latent.table;
    struct tv_linear absorb = {.rows = rows, .n = latent.latent_dim, .k = a->nope_dim};
    absorb.groups = a->heads;
    absorb.x = a->q;
    absorb.x_row_stride = copy.x_row_stride;
    absorb.x_group_stride = head_dim;
    absorb.w = a->k_up_t;
    absorb.w_dtype = a->w_dtype;
    absorb.products = a->products;
    absorb.w_group_stride = (int64_t)latent.latent_dim * a->nope_dim;
    absorb.y = full;
    absorb.y_row_stride = copy.y_row_stride;
    absorb.y_group_stride = row_dim;
    int rc = k->linear(k, &copy);
    rc = rc != 0 ? rc : k->rope(k, &rope);
    rc = rc != 0 ? rc : k->linear(k, &absorb);
    rc = rc != 0 ? rc : k->latent_write(k, &latent);
    int64_t count = (int64_t)rows * a->heads * row_dim;
    return rc != 0 || a->out_dtype == TV_F32 ? rc : k->to_bf16(k, count, full, out);
}

static void one_query(struct check *c, enum tv_dtype w_dtype, enum tv_dtype out_dtype, int32_t rows)
{
    struct tv_query a = {.heads = check_range(c, 1, 5), .nope_dim = 8 * check_range(c, 1, 30)};
    int32_t latent = check_range(c, 8, 150);
    a.w_dtype = w_dtype;
    a.out_dtype = out_dtype;
    a.products = products_draw(c);
    query_fill(c, &a, rows, latent);
    size_t count = (size_t)rows * (size_t)a.heads * (size_t)(latent + ROPE);
    size_t bytes = count * tv_dtype_size(out_dtype);
    size_t pool = (size_t)SLOTS * (size_t)(latent + ROPE) * tv_dtype_size(out_dtype);
    float *full = check_poisoned(c, count * sizeof(float));
    void *out = out_dtype == TV_F32 ? (void *)full : check_poisoned(c, bytes);
    void *pages = check_poisoned(c, pool);
    a.out = check_poisoned(c, bytes);
    a.latent.kv_pages = check_poisoned(c, pool);
    int rc = c->k->query(c->k, &a);
    if (rc == -ENOTSUP ? w_dtype == TV_BF16 : !check_ok(c, rc, "query")) {
        check_fail(c, "query refuses bf16 weights, or failed");
    } else if (rc == 0 && check_ok(c, query_singly(c, &a, pages, full, out), "single operations")) {
        same_on_device(c, a.out, out, bytes, "query");
        same_on_device(c, a.latent.kv_pages, pages, pool, "query, KV rows");
    }
    check_release(c);
}

static const void *const *pointers(struct check *c, char *device, int32_t experts, size_t bytes)
{
    const void **list = check_host(c, (size_t)experts * sizeof *list);
    for (int32_t e = 0; e < experts; e++) {
        list[e] = device + (size_t)e * bytes;
    }
    return check_upload(c, list, (size_t)experts * sizeof *list);
}

static void moe_fill(struct check *c, struct tv_moe *a, int32_t rows, int32_t hidden, int32_t inter,
                     int32_t shared)
{
    struct tv_experts *e = &a->experts;
    enum tv_dtype dtype = e->w_dtype;
    int64_t size = (int64_t)inter * hidden;
    size_t bytes = (size_t)size * tv_dtype_size(dtype);
    e->rows = rows;
    e->hidden = hidden;
    e->inter = inter;
    e->x = values_upload(c, (int64_t)rows * hidden);
    e->gate = pointers(c, weights_upload(c, dtype, e->experts * size), e->experts, bytes);
    e->up = pointers(c, weights_upload(c, dtype, e->experts * size), e->experts, bytes);
    e->down = pointers(c, weights_upload(c, dtype, e->experts * size), e->experts, bytes);
    a->router = (struct tv_router){.rows = rows, .experts = e->experts, .top_k = e->top_k};
    a->router.ids = check_poisoned(c, (size_t)(rows * e->top_k) * sizeof(int32_t));
    a->router.weights = check_poisoned(c, (size_t)(rows * e->top_k) * sizeof(float));
    e->ids = a->router.ids;
    e->weights = a->router.weights;
    a->shared_inter = shared;
    if (shared > 0) {
        a->shared_gate = weights_upload(c, dtype, (int64_t)shared * hidden);
        a->shared_up = weights_upload(c, dtype, (int64_t)shared * hidden);
        a->shared_down = weights_upload(c, dtype, (int64_t)shared * hidden);
    }
    a->logits = (struct tv_linear){.rows = rows, .n = e->experts, .k = hidden, .groups = 1};
    a->logits.x = e->x;
    a->logits.x_row_stride = hidden;
    a->logits.w = weights_upload(c, dtype, (int64_t)e->experts * hidden);
    a->logits.w_dtype = dtype;
    a->logits.y = check_poisoned(c, (size_t)(rows * e->experts) * sizeof(float));
    a->logits.y_row_stride = e->experts;
    a->router.n_group = a->router.topk_group = 1;
    a->router.scoring = (enum tv_router_scoring)check_range(c, 0, 1);
    a->router.normalise = check_range(c, 0, 1);
    a->router.scale = 2.5f;
    a->router.logits = a->logits.y;
}

/* The operations that the slot stands for, onto y. */
static int moe_singly(struct check *c, const struct tv_moe *moe, float *y)
{
    struct tv_kernels *k = c->k;
    struct tv_experts e = moe->experts;
    int32_t rows = e.rows, shared = moe->shared_inter;
    e.y = y;
    e.workspace_bytes = k->experts_workspace(k, &e);
    e.workspace = check_poisoned(c, e.workspace_bytes);
    int rc = k->linear(k, &moe->logits);
    rc = rc != 0 ? rc : k->router(k, &moe->router);
    rc = rc != 0 ? rc : k->experts(k, &e);
    if (rc != 0 || shared == 0) {
        return rc;
    }
    struct tv_linear a = {.rows = rows, .n = shared, .k = e.hidden, .groups = 1};
    a.w_dtype = e.w_dtype;
    a.products = e.products;
    a.x = e.x;
    a.x_row_stride = e.hidden;
    a.y_row_stride = shared;
    a.w = moe->shared_gate;
    float *gate = check_poisoned(c, (size_t)(rows * shared) * sizeof(float));
    a.y = gate;
    rc = k->linear(k, &a);
    float *up = check_poisoned(c, (size_t)(rows * shared) * sizeof(float));
    a.w = moe->shared_up;
    a.y = up;
    rc = rc != 0 ? rc : k->linear(k, &a);
    rc = rc != 0 ? rc : k->swiglu(k, rows, shared, gate, up);
    struct tv_linear down = {.rows = rows, .n = e.hidden, .k = shared, .groups = 1};
    down.w_dtype = e.w_dtype;
    down.products = e.products;
    down.x = gate;
    down.x_row_stride = shared;
    down.w = moe->shared_down;
    down.y = y;
    down.y_row_stride = e.hidden;
    down.accumulate = 1;
    return rc != 0 ? rc : k->linear(k, &down);
}

static void one_moe(struct check *c, enum tv_dtype dtype, int32_t rows, int32_t hidden,
                    int32_t inter, int32_t shared)
{
    struct tv_moe a = {.experts = {.w_dtype = dtype, .experts = check_range(c, 1, 9)}};
    int32_t most = a.experts.experts < 4 ? a.experts.experts : 4;
    a.experts.top_k = check_range(c, 1, most);
    a.experts.products = products_draw(c);
    moe_fill(c, &a, rows, hidden, inter, shared);
    size_t bytes = (size_t)(rows * hidden) * sizeof(float);
    float *y = check_normals(c, (int64_t)rows * hidden, 1.0f);
    float *expected = check_upload(c, y, bytes);
    a.experts.y = check_upload(c, y, bytes);
    a.experts.workspace_bytes = c->k->moe_workspace(c->k, &a);
    a.experts.workspace = check_poisoned(c, a.experts.workspace_bytes);
    int rc = c->k->moe(c->k, &a);
    if (rc == -ENOTSUP ? dtype == TV_BF16 && rows <= 128 : !check_ok(c, rc, "moe")) {
        check_fail(c, "moe refuses %d rows of bf16 weights, or failed", (int)rows);
    } else if (rc == 0 && check_ok(c, moe_singly(c, &a, expected), "single operations")) {
        same_on_device(c, a.experts.y, expected, bytes, "moe");
    }
    check_release(c);
}

/* What one way of computing a layer writes. */
struct layer_results {
    float *values, *x, *h, *q, *ckv;
    void *out, *pages;
    size_t x_bytes, out_bytes, pool_bytes;
};

static void layer_point(struct tv_layer *a, const struct layer_results *r)
{
    a->values.y = r->values;
    a->output.x = r->values;
    a->output.y = r->x;
    a->moe.experts.y = r->x;
    a->moe.experts.x = a->moe.logits.x = r->h;
    a->next_query.x = a->next_kv.x = r->h;
    a->next_query.y = r->q;
    a->next_kv.y = r->ckv;
    a->query.q = r->q;
    a->query.latent.ckv = r->ckv;
    a->query.latent.kv_pages = r->pages;
    a->query.out = r->out;
}

static void layer_take(struct check *c, const struct tv_layer *a, const float *x,
                       struct layer_results *ret)
{
    size_t rows = (size_t)a->output.rows, row_dim = (size_t)a->query.latent.latent_dim + ROPE;
    size_t element = tv_dtype_size(a->query.out_dtype);
    ret->x_bytes = rows * (size_t)a->output.n * sizeof(float);
    ret->out_bytes = rows * (size_t)a->query.heads * row_dim * element;
    ret->pool_bytes = SLOTS * row_dim * element;
    ret->x = check_upload(c, x, ret->x_bytes);
    ret->h = check_poisoned(c, ret->x_bytes);
    ret->values = check_poisoned(c, rows * (size_t)a->output.k * sizeof(float));
    ret->q = check_poisoned(c, rows * (size_t)a->next_query.n * sizeof(float));
    ret->ckv = check_poisoned(c, rows * row_dim * sizeof(float));
    ret->out = check_poisoned(c, ret->out_bytes);
    ret->pages = check_poisoned(c, ret->pool_bytes);
}

static struct tv_linear layer_product(struct check *c, int32_t rows, int32_t n, int32_t k)
{
    struct tv_linear a = {.rows = rows, .n = n, .k = k, .groups = 1, .w_dtype = TV_BF16};
    a.w = weights_upload(c, TV_BF16, (int64_t)n * k);
    a.x_row_stride = k;
    a.y_row_stride = n;
    return a;
}

static void layer_fill(struct check *c, struct tv_layer *a, int32_t rows, int32_t hidden,
                       int32_t inter, int32_t shared)
{
    int32_t heads = a->query.heads, latent = 8 * check_range(c, 1, 40),
            v = 8 * check_range(c, 1, 9);
    moe_fill(c, &a->moe, rows, hidden, inter, shared);
    a->moe.logits.w_dtype = TV_F32;
    a->moe.logits.w = weights_upload(c, TV_F32, (int64_t)a->moe.logits.n * hidden);
    a->values = layer_product(c, rows, v, latent);
    a->values.groups = heads;
    a->values.w = weights_upload(c, TV_BF16, (int64_t)heads * v * latent);
    a->values.w_group_stride = (int64_t)v * latent;
    a->values.x = values_upload(c, (int64_t)rows * heads * latent);
    a->values.x_row_stride = (int64_t)heads * latent;
    a->values.x_group_stride = latent;
    a->values.y_row_stride = (int64_t)heads * v;
    a->values.y_group_stride = v;
    a->output = layer_product(c, rows, hidden, heads * v);
    a->output.accumulate = 1;
    a->norm_weight = values_upload(c, hidden);
    a->norm_eps = 1e-5f;
    query_fill(c, &a->query, rows, latent);
    a->next_query = layer_product(c, rows, heads * (a->query.nope_dim + ROPE), hidden);
    a->next_kv = layer_product(c, rows, latent + ROPE, hidden);
    a->next_norm_weight = values_upload(c, hidden);
    a->next_norm_eps = 1e-6f;
    a->moe.experts.workspace_bytes = c->k->moe_workspace(c->k, &a->moe);
    a->moe.experts.workspace = check_poisoned(c, a->moe.experts.workspace_bytes);
}

/* The operations that the slot stands for. */
static int layer_singly(struct check *c, const struct tv_layer *a, float *h)
{
    struct tv_kernels *k = c->k;
    int32_t rows = a->output.rows, hidden = a->output.n;
    float *x = a->output.y;
    int rc = k->linear(k, &a->values);
    rc = rc != 0 ? rc : k->linear(k, &a->output);
    rc = rc != 0 ? rc
                 : k->rmsnorm(k, rows, hidden, x, hidden, a->norm_weight, a->norm_eps, h, hidden);
    rc = rc != 0 ? rc : moe_singly(c, &a->moe, x);
    if (rc != 0 || a->next_norm_weight == NULL) {
        return rc;
    }
    rc = k->rmsnorm(k, rows, hidden, x, hidden, a->next_norm_weight, a->next_norm_eps, h, hidden);
    rc = rc != 0 ? rc : k->linear(k, &a->next_query);
    rc = rc != 0 ? rc : k->linear(k, &a->next_kv);
    return rc != 0 ? rc : k->query(k, &a->query);
}

static void layer_make(struct check *c, struct tv_layer *a, int32_t rows, int32_t experts,
                       int32_t hidden, int32_t inter, int32_t shared)
{
    *a = (struct tv_layer){.moe = {.experts = {.w_dtype = TV_BF16, .experts = experts}}};
    a->moe.experts.top_k = check_range(c, 1, experts < 6 ? experts : 6);
    a->query.heads = check_range(c, 1, 5);
    a->query.nope_dim = 8 * check_range(c, 1, 30);
    a->query.w_dtype = TV_BF16;
    a->query.out_dtype = check_range(c, 0, 1) ? TV_BF16 : TV_F32;
    layer_fill(c, a, rows, hidden, inter, shared);
}

/* `next`: 0: the last layer of a model. */
static void one_layer(struct check *c, int32_t rows, int32_t experts, int32_t hidden, int32_t inter,
                      int32_t shared, int next)
{
    struct tv_layer a;
    struct layer_results joined, single;
    layer_make(c, &a, rows, experts, hidden, inter, shared);
    a.next_norm_weight = next ? a.next_norm_weight : NULL;
    float *x = check_normals(c, (int64_t)rows * hidden, 1.0f);
    layer_take(c, &a, x, &joined);
    layer_take(c, &a, x, &single);
    layer_point(&a, &joined);
    int rc = c->k->layer(c->k, &a);
    if (rc == -ENOTSUP ? rows <= 1 : !check_ok(c, rc, "layer")) {
        check_fail(c, "layer refuses %d rows, or failed", (int)rows);
    } else if (rc == 0) {
        layer_point(&a, &single);
        (void)check_ok(c, layer_singly(c, &a, single.h), "single operations");
        same_on_device(c, joined.x, single.x, single.x_bytes, "layer");
        if (next) {
            same_on_device(c, joined.out, single.out, single.out_bytes, "layer, queries");
            same_on_device(c, joined.pages, single.pages, single.pool_bytes, "layer, KV rows");
        }
    }
    check_release(c);
}

/* The same `count` values in both buffers, other ones at each call. */
static int values_renew(struct check *c, int32_t count, float *a, float *b)
{
    size_t bytes = (size_t)count * sizeof(float);
    const float *values = check_normals(c, count, 1.0f);
    int rc = c->k->upload(c->k, a, values, bytes);
    return rc != 0 || b == NULL ? rc : c->k->upload(c->k, b, values, bytes);
}

/* A recording of two layers behind each other, as a pass has them, on other rows at each replay:
 * other experts are chosen, and blocks meet where the launch before has left their words. */
static void layer_replays(struct check *c)
{
    enum { HIDDEN = 512 };
    struct tv_kernels *k = c->k;
    struct tv_layer a;
    struct layer_results joined, single;
    void *recording = NULL;
    layer_make(c, &a, 1, 48, HIDDEN, 64, 128);
    int32_t count = (int32_t)a.values.x_row_stride;
    float *rows = values_upload(c, count);
    a.values.x = rows;
    float *x = check_normals(c, HIDDEN, 1.0f);
    layer_take(c, &a, x, &joined);
    layer_take(c, &a, x, &single);
    layer_point(&a, &joined);
    int rc = k->record_begin(k);
    if (check_ok(c, rc, "record_begin")) {
        rc = k->layer(k, &a);
        rc = rc != 0 ? rc : k->layer(k, &a);
        int ended = k->record_end(k, &recording);
        rc = rc != 0 ? rc : ended;
    }
    layer_point(&a, &single);
    for (int i = 0; i < REPLAYS && check_ok(c, rc, "a recorded layer"); i++) {
        rc = values_renew(c, HIDDEN, joined.x, single.x);
        rc = rc != 0 ? rc : values_renew(c, count, rows, NULL);
        rc = rc != 0 ? rc : k->replay(k, recording);
        rc = rc != 0 ? rc : layer_singly(c, &a, single.h);
        rc = rc != 0 ? rc : layer_singly(c, &a, single.h);
        same_on_device(c, joined.x, single.x, single.x_bytes, "a replayed layer");
        same_on_device(c, joined.out, single.out, single.out_bytes, "a replayed layer, queries");
        same_on_device(c, joined.pages, single.pages, single.pool_bytes, "a replayed layer, rows");
    }
    if (recording != NULL) {
        k->recording_free(k, recording);
    }
    check_release(c);
}

static void moe_replays(struct check *c, int32_t rows)
{
    enum { HIDDEN = 256 };
    struct tv_kernels *k = c->k;
    struct tv_moe a = {.experts = {.w_dtype = TV_BF16, .experts = 16, .top_k = 3}};
    int32_t count = rows * HIDDEN;
    size_t bytes = (size_t)count * sizeof(float);
    void *recording = NULL;
    moe_fill(c, &a, rows, HIDDEN, 64, 128);
    float *x = values_upload(c, count), *y = check_poisoned(c, bytes);
    float *expected = check_poisoned(c, bytes);
    a.experts.x = a.logits.x = x;
    a.experts.y = y;
    a.experts.workspace_bytes = k->moe_workspace(k, &a);
    a.experts.workspace = check_poisoned(c, a.experts.workspace_bytes);
    int rc = k->record_begin(k);
    if (check_ok(c, rc, "record_begin")) {
        rc = k->moe(k, &a);
        int ended = k->record_end(k, &recording);
        rc = rc != 0 ? rc : ended;
    }
    for (int i = 0; i < REPLAYS && check_ok(c, rc, "a recorded moe"); i++) {
        rc = values_renew(c, count, x, NULL);
        rc = rc != 0 ? rc : values_renew(c, count, y, expected);
        rc = rc != 0 ? rc : k->replay(k, recording);
        rc = rc != 0 ? rc : moe_singly(c, &a, expected);
        same_on_device(c, y, expected, bytes, "a replayed moe");
    }
    if (recording != NULL) {
        k->recording_free(k, recording);
    }
    check_release(c);
}

static void check_layer(struct check *c)
{
    for (int32_t n = 0; n < 8 * c->scale; n++) {
        int32_t hidden = 8 * check_range(c, 1, 90), inter = 8 * check_range(c, 1, 40);
        int32_t shared = n % 3 == 0 ? 0 : 2 * inter;
        one_layer(c, 1, check_range(c, 1, 64), hidden, inter, shared, n % 4 != 1);
    }
    one_layer(c, 2, 4, 256, 128, 256, 1);    /* may be refused */
    one_layer(c, 1, 16, 2304, 520, 2600, 1); /* more than one round of chunks */
    for (int32_t n = 0; n < 2 * c->scale && c->k->record_begin != NULL; n++) {
        layer_replays(c);
    }
}

void check_fused(struct check *c)
{
    static const int32_t rows[] = {1, 2, 7, 9, 16, 17, 33, 40, 64, 128, 129};
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        for (int32_t n = 0; n < c->scale; n++) {
            int32_t k = 8 * check_range(c, 1, 160);
            if (c->k->linear_pair != NULL) {
                one_pair(c, i % 4 == 3 ? TV_F32 : TV_BF16, rows[i], k, 90);
            }
            if (c->k->query != NULL) {
                one_query(c, i % 4 == 2 ? TV_F32 : TV_BF16, TV_BF16, rows[i]);
                one_query(c, TV_BF16, TV_F32, rows[i]);
            }
            if (c->k->moe != NULL) {
                int32_t hidden = 8 * check_range(c, 1, 48), inter = 8 * check_range(c, 1, 40);
                one_moe(c, i % 4 == 1 ? TV_F32 : TV_BF16, rows[i], hidden, inter, 0);
                one_moe(c, TV_BF16, rows[i], hidden, inter, 2 * inter);
            }
        }
    }
    for (int32_t n = 0; n < 3 * c->scale && c->k->linear_pair != NULL; n++) {
        one_pair(c, TV_BF16, check_range(c, 300, 700), 8 * check_range(c, 1, 80), 1600);
    }
    if (c->k->layer != NULL) {
        check_layer(c);
    }
    if (c->k->moe != NULL) { /* warps without a share of routed products have one of shared ones */
        one_moe(c, TV_BF16, 12, 1160, 520, 1040);
        if (c->k->record_begin != NULL) {
            moe_replays(c, 5);
            moe_replays(c, 40);
        }
    }
}
