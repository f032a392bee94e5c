/*
 * refused.c - kinds that no operation knows: every slot that takes a type, a kind of products or of
 * scoring refuses each value outside the known ones, and has written nothing then.
 *
 * Inputs are zeros, and results lie beside each other in one poisoned buffer; what a call computes
 * is not looked at here. That each call is taken once its kinds are known shows that it was refused
 * for them alone.
 */
#include <errno.h>

#include "tests/check/check.h"

enum { HIDDEN = 32, INTER = 16, EXPERTS = 4, TOP_K = 2, HEADS = 2, NOPE = 16, VALUE = 8 };
enum { ROPE = 64, LATENT = 64, PAGE = 16 };

#define ZEROS_BYTES   ((size_t)1 << 18)
#define RESULTS_BYTES ((size_t)32 << 20)

#define KNOWN_STORED   (1u << TV_F32 | 1u << TV_BF16)
#define KNOWN_WEIGHTS  (KNOWN_STORED | 1u << TV_F16)
#define KNOWN_PRODUCTS (1u << TV_PRODUCTS_EXACT | 1u << TV_PRODUCTS_BF16)
#define KNOWN_SCORING  (1u << TV_ROUTER_SOFTMAX | 1u << TV_ROUTER_SIGMOID)

struct bed {
    struct check *c;
    char *zeros, *results; /* device */
    size_t used;           /* of results, by the running slot */
};

typedef int call_fn(struct tv_kernels *k, const void *args);

/* One enum of a slot's arguments: its name, where it is, and a bit for each value that is known. */
struct kind {
    const char *name;
    void *at;
    uint32_t known;
};

/* Room for a result, or for a workspace. */
static void *result(struct bed *b, size_t bytes)
{
    char *mine = b->results + b->used;
    b->used += (bytes + 255) / 256 * 256;
    return mine;
}

/* The call with each value of each kind that is not known, and then as it was. */
static void refuse(struct bed *b, const char *slot, call_fn *call, const void *args,
                   const struct kind *kinds, size_t count)
{
    static const uint32_t values[] = {0, 1, 2, 3, 4, 7, 255, 0x7fffffffu, 0xffffffffu};
    struct check *c = b->c;
    unsigned char *got = check_host(c, b->used);
    size_t touched = 0;
    for (size_t i = 0; i < count; i++) {
        uint32_t before;
        memcpy(&before, kinds[i].at, sizeof before);
        for (size_t v = 0; v < sizeof values / sizeof values[0]; v++) {
            if (values[v] < 32 && (kinds[i].known >> values[v] & 1) != 0) {
                continue;
            }
            memcpy(kinds[i].at, &values[v], sizeof values[v]);
            int rc = call(c->k, args);
            if (rc != -EINVAL) {
                check_fail(c, "%s with %s %u returned %d", slot, kinds[i].name, (unsigned)values[v],
                           rc);
            }
        }
        memcpy(kinds[i].at, &before, sizeof before);
    }
    check_download(c, got, b->results, b->used);
    for (size_t i = 0; i < b->used; i++) {
        touched += got[i] != 0xff;
    }
    if (touched > 0) {
        check_fail(c, "%s was refused and has written %zu bytes", slot, touched);
    }
    int rc = call(c->k, args);
    if (rc != -ENOTSUP) {
        (void)check_ok(c, rc, slot);
    }
    (void)c->k->fill(c->k, b->results, 0xff, b->used);
    b->used = 0;
}

#define REFUSE(b, slot, call, args, kinds)                                                         \
    refuse(b, slot, call, args, kinds, sizeof(kinds) / sizeof(kinds)[0])

struct embed_args {
    const void *table;
    enum tv_dtype dtype;
    const int32_t *ids;
    float *x;
};

static int call_embed(struct tv_kernels *k, const void *args)
{
    const struct embed_args *a = args;
    return k->embed(k, 1, HIDDEN, 4, a->table, a->dtype, a->ids, a->x);
}

static int call_linear(struct tv_kernels *k, const void *args)
{
    return k->linear(k, args);
}

static int call_pair(struct tv_kernels *k, const void *args)
{
    const struct tv_linear *both = args;
    return k->linear_pair(k, &both[0], &both[1]);
}

static int call_latent(struct tv_kernels *k, const void *args)
{
    return k->latent_write(k, args);
}

static int call_router(struct tv_kernels *k, const void *args)
{
    return k->router(k, args);
}

static int call_experts(struct tv_kernels *k, const void *args)
{
    return k->experts(k, args);
}

static int call_verify(struct tv_kernels *k, const void *args)
{
    return k->verify_attn(k, args);
}

static int call_naive(struct tv_kernels *k, const void *args)
{
    return k->verify_attn_naive(k, args);
}

static int call_prefill(struct tv_kernels *k, const void *args)
{
    return k->prefill_attn(k, args);
}

static int call_query(struct tv_kernels *k, const void *args)
{
    return k->query(k, args);
}

static int call_moe(struct tv_kernels *k, const void *args)
{
    return k->moe(k, args);
}

static int call_layer(struct tv_kernels *k, const void *args)
{
    return k->layer(k, args);
}

static int call_synthesize(struct tv_kernels *k, const void *args)
{
    return k->synthesize(k, args);
}

static void *zeros(struct bed *b)
{
    return b->zeros;
}

static struct tv_linear product(struct bed *b, int32_t n, int32_t k)
{
    struct tv_linear a = {.rows = 1, .n = n, .k = k, .groups = 1, .w_dtype = TV_BF16};
    a.x = zeros(b);
    a.x_row_stride = k;
    a.w = zeros(b);
    a.y = result(b, (size_t)n * sizeof(float));
    a.y_row_stride = n;
    return a;
}

static struct tv_rope_table table(struct bed *b)
{
    return (struct tv_rope_table){.cos_sin = zeros(b), .positions = 1, .rope_dim = ROPE};
}

static struct tv_latent_write latent(struct bed *b)
{
    struct tv_latent_write a = {.rows = 1, .latent_dim = LATENT, .row_stride = LATENT + ROPE};
    a.ckv = zeros(b);
    a.norm_weight = zeros(b);
    a.eps = 1e-6f;
    a.positions = zeros(b);
    a.table = table(b);
    a.slots = zeros(b);
    a.slot_count = PAGE;
    a.kv_pages = result(b, (size_t)PAGE * (LATENT + ROPE) * sizeof(float));
    return a;
}

static struct tv_router router(struct bed *b)
{
    struct tv_router a = {.rows = 1, .experts = EXPERTS, .top_k = TOP_K, .scale = 1.0f};
    a.n_group = a.topk_group = 1;
    a.logits = zeros(b);
    a.ids = result(b, TOP_K * sizeof *a.ids);
    a.weights = result(b, TOP_K * sizeof *a.weights);
    return a;
}

static struct tv_experts experts(struct bed *b)
{
    struct tv_experts a = {.rows = 1, .hidden = HIDDEN, .inter = INTER, .experts = EXPERTS};
    const void *list[EXPERTS];
    for (int i = 0; i < EXPERTS; i++) {
        list[i] = zeros(b);
    }
    a.top_k = TOP_K;
    a.x = zeros(b);
    a.ids = zeros(b);
    a.weights = zeros(b);
    a.gate = a.up = a.down = check_upload(b->c, list, sizeof list);
    (void)b->c->k->sync(b->c->k); /* the list is here */
    a.w_dtype = TV_BF16;
    a.y = result(b, HIDDEN * sizeof(float));
    return a;
}

static struct tv_query query(struct bed *b)
{
    struct tv_query a = {.heads = HEADS, .nope_dim = NOPE, .w_dtype = TV_BF16};
    a.q = zeros(b);
    a.k_up_t = zeros(b);
    a.latent = latent(b);
    a.out = result(b, (size_t)HEADS * (LATENT + ROPE) * sizeof(float));
    return a;
}

static struct tv_moe moe(struct bed *b)
{
    struct tv_moe a = {.logits = product(b, EXPERTS, HIDDEN), .router = router(b)};
    a.logits.w_dtype = TV_F32;
    a.router.logits = a.logits.y;
    a.experts = experts(b);
    a.experts.ids = a.router.ids;
    a.experts.weights = a.router.weights;
    a.shared_gate = a.shared_up = a.shared_down = zeros(b);
    a.shared_inter = INTER;
    a.experts.workspace_bytes = b->c->k->moe_workspace(b->c->k, &a);
    a.experts.workspace = result(b, a.experts.workspace_bytes);
    return a;
}

static void refuse_small(struct bed *b)
{
    struct embed_args e = {.table = zeros(b), .ids = zeros(b), .x = result(b, HIDDEN * 4)};
    const struct kind embed_kinds[] = {{"a table of type", &e.dtype, KNOWN_WEIGHTS}};
    REFUSE(b, "embed", call_embed, &e, embed_kinds);
    struct tv_linear l = product(b, HIDDEN, HIDDEN);
    const struct kind linear_kinds[] = {{"weights of type", &l.w_dtype, KNOWN_WEIGHTS},
                                        {"products", &l.products, KNOWN_PRODUCTS}};
    REFUSE(b, "linear", call_linear, &l, linear_kinds);
    struct tv_latent_write w = latent(b);
    const struct kind latent_kinds[] = {{"rows of type", &w.kv_dtype, KNOWN_STORED}};
    REFUSE(b, "latent_write", call_latent, &w, latent_kinds);
    struct tv_router r = router(b);
    const struct kind router_kinds[] = {{"scoring", &r.scoring, KNOWN_SCORING}};
    REFUSE(b, "router", call_router, &r, router_kinds);
    struct tv_experts x = experts(b);
    x.workspace_bytes = b->c->k->experts_workspace(b->c->k, &x);
    x.workspace = result(b, x.workspace_bytes);
    const struct kind experts_kinds[] = {{"weights of type", &x.w_dtype, KNOWN_WEIGHTS},
                                         {"products", &x.products, KNOWN_PRODUCTS}};
    REFUSE(b, "experts", call_experts, &x, experts_kinds);
    struct tv_synthesize s = {.groups = 1, .rows = 2, .cols = 8, .scale = 1.0f};
    s.to = result(b, 2 * 8 * sizeof(float));
    const struct kind synthesize_kinds[] = {{"weights of type", &s.dtype, KNOWN_STORED}};
    REFUSE(b, "synthesize", call_synthesize, &s, synthesize_kinds);
}

static void refuse_attention(struct bed *b)
{
    static const int32_t one = 1, root = -1;
    struct tv_kernels *k = b->c->k;
    struct tv_verify_attn v = {.batch = 1, .q_len = 1, .heads = HEADS, .softmax_scale = 0.1f};
    v.latent_dim = TV_MLA_LATENT;
    v.rope_dim = TV_MLA_ROPE;
    v.q = v.kv_pages = zeros(b);
    v.page_count = v.max_pages = 1;
    v.page_size = PAGE;
    v.page_table = v.prefix_len = zeros(b);
    v.node_count = check_upload(b->c, &one, sizeof one);
    v.parents = check_upload(b->c, &root, sizeof root);
    v.kv_len_max = 1;
    const struct kind kinds[] = {{"rows of type", &v.dtype, KNOWN_STORED},
                                 {"results of type", &v.out_dtype, KNOWN_STORED}};
    for (int naive = 0; naive < 2; naive++) {
        v.out = result(b, (size_t)HEADS * TV_MLA_LATENT * sizeof(float));
        v.lse = result(b, HEADS * sizeof(float));
        v.workspace_bytes =
            naive ? k->verify_attn_naive_workspace(k, &v) : k->verify_attn_workspace(k, &v);
        v.workspace = result(b, v.workspace_bytes);
        REFUSE(b, naive ? "verify_attn_naive" : "verify_attn", naive ? call_naive : call_verify, &v,
               kinds);
    }
    struct tv_prefill_attn p = {.rows = 1, .heads = HEADS, .nope_dim = NOPE, .rope_dim = ROPE};
    p.v_dim = VALUE;
    p.latent_dim = LATENT;
    p.softmax_scale = 0.1f;
    p.q = zeros(b);
    p.k_up = p.v_up = p.kv_pages = zeros(b);
    p.page_count = 1;
    p.page_size = PAGE;
    p.page_table = zeros(b);
    p.out = result(b, (size_t)HEADS * VALUE * sizeof(float));
    p.workspace_bytes = k->prefill_attn_workspace(k, &p);
    p.workspace = result(b, p.workspace_bytes);
    const struct kind prefill_kinds[] = {{"weights of type", &p.w_dtype, KNOWN_WEIGHTS},
                                         {"rows of type", &p.kv_dtype, KNOWN_STORED},
                                         {"products", &p.products, KNOWN_PRODUCTS}};
    REFUSE(b, "prefill_attn", call_prefill, &p, prefill_kinds);
}

static void refuse_fused(struct bed *b)
{
    struct tv_linear both[2] = {product(b, HIDDEN, HIDDEN), product(b, INTER, HIDDEN)};
    const struct kind pair_kinds[] = {{"first weights of type", &both[0].w_dtype, KNOWN_WEIGHTS},
                                      {"second weights of type", &both[1].w_dtype, KNOWN_WEIGHTS},
                                      {"first products", &both[0].products, KNOWN_PRODUCTS},
                                      {"second products", &both[1].products, KNOWN_PRODUCTS}};
    REFUSE(b, "linear_pair", call_pair, both, pair_kinds);
    struct tv_query q = query(b);
    const struct kind query_kinds[] = {{"weights of type", &q.w_dtype, KNOWN_WEIGHTS},
                                       {"rows of type", &q.latent.kv_dtype, KNOWN_STORED},
                                       {"results of type", &q.out_dtype, KNOWN_STORED},
                                       {"products", &q.products, KNOWN_PRODUCTS}};
    REFUSE(b, "query", call_query, &q, query_kinds);
    struct tv_moe m = moe(b);
    const struct kind moe_kinds[] = {{"router's weights of type", &m.logits.w_dtype, KNOWN_WEIGHTS},
                                     {"router's products", &m.logits.products, KNOWN_PRODUCTS},
                                     {"scoring", &m.router.scoring, KNOWN_SCORING},
                                     {"weights of type", &m.experts.w_dtype, KNOWN_WEIGHTS},
                                     {"products", &m.experts.products, KNOWN_PRODUCTS}};
    REFUSE(b, "moe", call_moe, &m, moe_kinds);
}

static void layer_fill(struct bed *b, struct tv_layer *a)
{
    int32_t q_dim = HEADS * (NOPE + ROPE);
    *a = (struct tv_layer){.moe = moe(b), .query = query(b)};
    a->values = product(b, VALUE, LATENT);
    a->values.groups = HEADS;
    a->values.w_group_stride = VALUE * LATENT;
    a->values.x_row_stride = HEADS * LATENT;
    a->values.x_group_stride = LATENT;
    a->values.y = result(b, HEADS * VALUE * sizeof(float));
    a->values.y_row_stride = HEADS * VALUE;
    a->values.y_group_stride = VALUE;
    a->output = product(b, HIDDEN, HEADS * VALUE);
    a->output.x = a->values.y;
    a->output.y = a->moe.experts.y;
    a->output.accumulate = 1;
    a->norm_weight = a->next_norm_weight = zeros(b);
    a->norm_eps = a->next_norm_eps = 1e-6f;
    a->next_query = product(b, q_dim, HIDDEN);
    a->next_kv = product(b, LATENT + ROPE, HIDDEN);
    float *h = result(b, HIDDEN * sizeof *h);
    a->moe.experts.x = a->moe.logits.x = a->next_query.x = a->next_kv.x = h;
    a->query.q = a->next_query.y;
    a->query.latent.ckv = a->next_kv.y;
}

static void refuse_layer(struct bed *b)
{
    struct tv_layer a;
    layer_fill(b, &a);
    struct tv_linear *const products[] = {&a.values, &a.output, &a.moe.logits, &a.next_query,
                                          &a.next_kv};
    static const char *const names[] = {"values", "output", "logits", "next_query", "next_kv"};
    enum { PRODUCTS = sizeof products / sizeof products[0] };
    struct kind kinds[2 * PRODUCTS + 7] = {
        {"scoring", &a.moe.router.scoring, KNOWN_SCORING},
        {"experts' weights of type", &a.moe.experts.w_dtype, KNOWN_WEIGHTS},
        {"experts' products", &a.moe.experts.products, KNOWN_PRODUCTS},
        {"query's weights of type", &a.query.w_dtype, KNOWN_WEIGHTS},
        {"query's rows of type", &a.query.latent.kv_dtype, KNOWN_STORED},
        {"queries of type", &a.query.out_dtype, KNOWN_STORED},
        {"query's products", &a.query.products, KNOWN_PRODUCTS}};
    for (size_t i = 0; i < PRODUCTS; i++) {
        kinds[7 + 2 * i] = (struct kind){names[i], &products[i]->w_dtype, KNOWN_WEIGHTS};
        kinds[8 + 2 * i] = (struct kind){names[i], &products[i]->products, KNOWN_PRODUCTS};
    }
    REFUSE(b, "layer", call_layer, &a, kinds);
}

void check_refused(struct check *c)
{
    struct bed b = {.c = c};
    b.zeros = check_upload(c, check_host(c, ZEROS_BYTES), ZEROS_BYTES);
    b.results = check_poisoned(c, RESULTS_BYTES);
    refuse_small(&b);
    refuse_attention(&b);
    if (c->k->linear_pair != NULL) {
        refuse_fused(&b);
    }
    if (c->k->layer != NULL) {
        refuse_layer(&b);
    }
    check_release(c);
}
