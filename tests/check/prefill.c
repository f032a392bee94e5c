/*
 * prefill.c - checks of expanded causal attention: against the reference, and that chunking, page
 * size and what lies behind the last row do not change a bit.
 */
#include <math.h>
#include <stdio.h>

#include "tests/check/check.h"

struct problem {
    struct tv_prefill_attn args; /* host pointers */
    float *kv;                   /* [tokens, latent + rope] */
    int32_t tokens;
    int32_t keys; /* that a call takes, where a backend can stop in between; 0: all */
};

struct dims {
    int32_t nope, rope, v, latent;
};

static struct dims dims_draw(struct check *c)
{
    struct dims d;
    d.nope = check_range(c, 0, 1) ? 48 : 8 * check_range(c, 1, 9); /* not v (B33) */
    d.rope = check_range(c, 0, 1) ? 64 : 16;
    d.v = check_range(c, 0, 1) ? 64 : 8 * check_range(c, 1, 9);
    d.latent = check_range(c, 0, 1) ? 512 : 8 * check_range(c, 1, 20);
    return d;
}

static struct problem make(struct check *c, const struct dims *dims, enum tv_dtype w_dtype,
                           enum tv_dtype kv_dtype, int32_t tokens, int32_t heads)
{
    struct problem p = {.tokens = tokens};
    struct tv_prefill_attn *a = &p.args;
    a->heads = heads;
    a->nope_dim = dims->nope;
    a->rope_dim = dims->rope;
    a->v_dim = dims->v;
    a->latent_dim = dims->latent;
    a->softmax_scale = 0.09f;
    a->w_dtype = w_dtype;
    a->kv_dtype = kv_dtype;
    int64_t q_count = (int64_t)p.tokens * a->heads * (a->nope_dim + a->rope_dim);
    int64_t k_count = (int64_t)a->heads * a->nope_dim * a->latent_dim;
    int64_t v_count = (int64_t)a->heads * a->v_dim * a->latent_dim;
    float unit = 1.0f / sqrtf((float)a->latent_dim);
    a->q = check_normals(c, q_count, 1.0f);
    a->k_up = check_weights(c, w_dtype, check_normals(c, k_count, unit), k_count);
    a->v_up = check_weights(c, w_dtype, check_normals(c, v_count, unit), v_count);
    p.kv = check_normals(c, (int64_t)p.tokens * (a->latent_dim + a->rope_dim), 1.0f);
    return p;
}

/* Rows [start, start + rows) on backend k with pages of `page_size`, into out [tokens, heads, v].
 */
static void run(struct check *c, struct tv_kernels *k, const struct problem *p, int32_t start,
                int32_t rows, int32_t page_size, float *out)
{
    struct tv_prefill_attn a = p->args;
    int32_t dim = a.latent_dim + a.rope_dim;
    int32_t pages = (p->tokens + page_size - 1) / page_size;
    int64_t elements = (int64_t)(pages + 1) * page_size * dim;
    size_t pool_bytes = (size_t)elements * tv_dtype_size(a.kv_dtype);
    float *values = check_host(c, (size_t)elements * sizeof(float));
    int32_t *table = check_host(c, (size_t)pages * sizeof *table);
    for (int64_t i = 0; i < elements; i++) {
        values[i] = NAN; /* rows after the chunk are not there yet */
    }
    for (int32_t t = 0; t < start + rows; t++) {
        table[t / page_size] = pages - t / page_size; /* backwards, page 0 unused */
        int64_t row = (int64_t)table[t / page_size] * page_size + t % page_size;
        memcpy(values + row * dim, p->kv + (int64_t)t * dim, (size_t)dim * sizeof(float));
    }
    void *pool = check_weights(c, a.kv_dtype, values, elements);
    size_t up_k = (size_t)a.heads * (size_t)a.nope_dim * (size_t)a.latent_dim;
    size_t up_v = (size_t)a.heads * (size_t)a.v_dim * (size_t)a.latent_dim;
    size_t q_row = (size_t)a.heads * (size_t)(a.nope_dim + a.rope_dim);
    size_t out_row = (size_t)a.heads * (size_t)a.v_dim;
    int on_device = k != c->ref;
    a.rows = rows;
    a.start = start;
    a.page_size = page_size;
    a.page_count = pages + 1;
    a.q = p->args.q + (size_t)start * q_row;
    a.page_table = table;
    a.kv_pages = pool;
    a.out = out + (size_t)start * out_row;
    if (on_device) {
        a.q = check_upload(c, a.q, (size_t)rows * q_row * sizeof(float));
        a.page_table = check_upload(c, table, (size_t)pages * sizeof *table);
        a.kv_pages = check_upload(c, pool, pool_bytes);
        a.k_up = check_upload(c, a.k_up, up_k * tv_dtype_size(a.w_dtype));
        a.v_up = check_upload(c, a.v_up, up_v * tv_dtype_size(a.w_dtype));
        a.out = check_poisoned(c, (size_t)rows * out_row * sizeof(float));
    }
    a.workspace_bytes = k->prefill_attn_workspace(k, &a);
    a.workspace =
        on_device ? check_poisoned(c, a.workspace_bytes) : check_host(c, a.workspace_bytes);
    int rc = 0;
    if (p->keys > 0 && k->host_memory) {
        size_t bytes = (size_t)a.heads * 2 * (size_t)rows * sizeof(float);
        a.running = check_poisoned(c, bytes);
        for (; rc == 0 && a.key_first + p->keys < start + rows; a.key_first += p->keys) {
            a.key_count = p->keys;
            rc = k->prefill_attn(k, &a);
            memset(a.workspace, 0xff, a.workspace_bytes); /* another's meanwhile */
        }
        a.key_count = start + rows - a.key_first;
    }
    rc = rc == 0 ? k->prefill_attn(k, &a) : rc;
    if (check_ok(c, rc, "prefill_attn") && on_device) {
        check_download(c, out + (size_t)start * out_row, a.out,
                       (size_t)rows * out_row * sizeof(float));
    }
}

/* Against the reference; bf16 products may keep 11 bits of what meets in attention. */
static void near(struct check *c, const struct problem *p, const float *value,
                 const float *expected, int64_t count, const char *what)
{
    if (p->args.products == TV_PRODUCTS_EXACT) {
        check_near(c, value, expected, count, 4e-6, 4e-6, what);
    } else {
        (void)check_rel_l2(c, value, expected, count, 1e-3, what);
    }
}

static void one(struct check *c, const struct problem *problem)
{
    struct problem p = *problem;
    int64_t count = (int64_t)p.tokens * p.args.heads * p.args.v_dim;
    size_t bytes = (size_t)count * sizeof(float);
    float *expected = check_host(c, bytes), *whole = check_host(c, bytes);
    float *parts = check_host(c, bytes);
    run(c, c->ref, &p, 0, p.tokens, 16, expected);
    run(c, c->k, &p, 0, p.tokens, 64, whole);
    near(c, &p, whole, expected, count, "prefill_attn");
    int32_t cut = check_range(c, 0, p.tokens - 1);
    if (cut > 0) {
        run(c, c->k, &p, 0, cut, 16, parts);
    }
    run(c, c->k, &p, cut, p.tokens - cut, 128, parts);
    check_same(c, parts, whole, bytes, "prefill_attn in two chunks");
    if (c->other) {
        memset(parts, 0, bytes);
        run(c, c->other, &p, 0, p.tokens, 32, parts);
        check_same(c, parts, whole, bytes, "prefill_attn with another thread count");
    }
    p.keys = TV_PREFILL_KEYS * check_range(c, 1, 2);
    memset(parts, 0, bytes);
    run(c, c->k, &p, cut, p.tokens - cut, 64, parts);
    check_same(c, parts + (int64_t)cut * p.args.heads * p.args.v_dim,
               whole + (int64_t)cut * p.args.heads * p.args.v_dim,
               (size_t)(count - (int64_t)cut * p.args.heads * p.args.v_dim) * sizeof(float),
               "prefill_attn with some keys a call");
    check_release(c);
}

/* Rows whose elements are much smaller than the others'. */
static void shrink(struct problem *p)
{
    int32_t dim = p->args.latent_dim + p->args.rope_dim;
    for (int64_t i = 0; i < (int64_t)p->tokens * dim; i++) {
        p->kv[i] *= i / dim % 3 == 1 ? 0x1p-12f : 1.0f;
    }
}

/* A chunk behind a long prefix, which a device takes in segments: alone, and cut in two. */
static void behind(struct check *c, enum tv_dtype kv_dtype, enum tv_products products)
{
    const struct dims dims = {.nope = 16, .rope = 16, .v = 24, .latent = 32};
    int32_t tokens = 4096 + check_range(c, 2, 90), start = 4096 - check_range(c, 2, 60);
    struct problem p = make(c, &dims, TV_BF16, kv_dtype, tokens, 2);
    p.args.products = products;
    int64_t row = (int64_t)p.args.heads * dims.v, count = (tokens - start) * row;
    size_t bytes = (size_t)(tokens * row) * sizeof(float);
    float *expected = check_host(c, bytes), *whole = check_host(c, bytes);
    float *parts = check_host(c, bytes);
    int32_t cut = check_range(c, start + 1, tokens - 1);
    run(c, c->ref, &p, start, tokens - start, 64, expected);
    run(c, c->k, &p, start, tokens - start, 64, whole);
    near(c, &p, whole + start * row, expected + start * row, count,
         "prefill_attn behind a long prefix");
    run(c, c->k, &p, start, cut - start, 64, parts);
    run(c, c->k, &p, cut, tokens - cut, 32, parts);
    check_same(c, parts, whole, bytes, "prefill_attn behind a long prefix in two chunks");
    check_release(c);
}

void check_prefill(struct check *c)
{
    /* what models have; and more than the fast form of a device takes */
    static const struct dims published = {.nope = 128, .rope = 64, .v = 128, .latent = 512};
    static const struct dims wide = {.nope = 192, .rope = 64, .v = 160, .latent = 64};
    static const struct dims many = {.nope = 32, .rope = 16, .v = 40, .latent = 64};
    if (!c->k->prefill_attn) {
        return;
    }
    int products = c->k->linear && check_has_products(c);
    for (int32_t n = 0; n < (products ? 18 : 9) * c->scale; n++) {
        int32_t tokens = check_range(c, 1, 200), heads = check_range(c, 1, 4);
        struct dims dims = dims_draw(c);
        struct problem p =
            make(c, &dims, (enum tv_dtype)(n % 3), n & 1 ? TV_BF16 : TV_F32, tokens, heads);
        p.args.products = n < 9 * c->scale ? TV_PRODUCTS_EXACT : TV_PRODUCTS_BF16;
        one(c, &p);
    }
    for (int32_t n = 0; n < (products ? 8 : 4); n++) {
        struct problem p = make(c, n % 4 < 3 ? &published : &wide, TV_BF16,
                                n & 1 ? TV_F32 : TV_BF16, check_range(c, 100, 170), 2);
        p.args.products = (enum tv_products)(n / 4);
        if (n % 4 > 1) {
            shrink(&p);
        }
        one(c, &p);
    }
    for (int32_t n = 0; n < (products ? 2 : 1); n++) {
        behind(c, TV_BF16, (enum tv_products)n);
        behind(c, TV_F32, (enum tv_products)n);
    }
    /* so many that a device expands them by other products; a cut may leave fewer */
    for (int32_t n = 0; n < (products ? 2 : 1); n++) {
        struct problem p = make(c, &published, TV_BF16, TV_BF16, check_range(c, 257, 420), 3);
        p.args.products = (enum tv_products)n;
        one(c, &p);
    }
    /* many tokens and heads: other tiles on a device */
    for (int32_t n = 0; n < (products ? 4 : 2); n++) {
        struct problem p = make(c, &many, TV_BF16, n & 1 ? TV_BF16 : TV_F32, 780, 16);
        p.args.products = (enum tv_products)(n / 2);
        one(c, &p);
    }
}
