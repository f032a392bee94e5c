/*
 * layer.cu - from one layer's verify attention to the next one's in one launch, for one row, which
 * is bound by reading the weights.
 *
 * Every block stays to the end and walks the same phases: v_up, o, shared and routed gate and up,
 * down of both, the next layer's first products and absorb. All blocks meet where a phase reads
 * what other blocks made. A warp always has its next chunks of weights in flight, over the borders
 * of items and phases, so that memory is busy while blocks meet; it stops but for the choice of
 * experts, which one block makes while the others multiply by the shared ones. Small things (the
 * norms' factors) each block computes for itself. The same products in the same order as the slots
 * that this stands for, so the same bits. Refuses (-ENOTSUP) more rows, other weights than the
 * matrix product takes, and devices that cannot hold all blocks at a time.
 */
#include "layer_between.cuh"
#include "ops.h"

/* For up to R rows. */
template <int R>
static __global__ void __launch_bounds__(LAYER_THREADS, LAYER_BLOCKS)
    layer(const __grid_constant__ struct layer_args p)
{
    extern __shared__ __align__(128) char layer_bytes[];
    struct layer_shared *s = (struct layer_shared *)layer_bytes;
    struct layer_pieces<R> *few = (struct layer_pieces<R> *)(s + 1);
    uint32_t choice = 0;
    struct layer_cursor next = {};
    struct layer_walk walk = {};
    uint64_t policy = ptx_policy_once();
    walk.end = PHASE_ROUTED;
    next.place = layer_first(p, PHASE_VALUES);
    layer_seek(p, s, walk.end, &next);
    layer_fill(p, s, walk, &next, policy);
    ptx_wait_dependence();
    if (threadIdx.x < LAYER_MEETINGS) {
        s->meetings[threadIdx.x] = word_read(&p.words[threadIdx.x * LAYER_LINE]);
    }
    choice = word_read(&p.words[LAYER_CHOICE]);
    for (int32_t i = (int32_t)threadIdx.x; i < 3 * p.router.experts; i += LAYER_THREADS) {
        s->experts[i % 3][i / 3] = p.experts[i % 3][i / 3];
    }
    for (int32_t i = (int32_t)threadIdx.x * 32; layer_column() < p.router.experts && i < p.hidden;
         i += LAYER_THREADS * 32) {
        const float *w = p.router_w + (int64_t)layer_column() * p.hidden + i;
        asm volatile("prefetch.global.L2 [%0];" ::"l"(w) : "memory");
    }
    bool idle = layer_first(p, PHASE_VALUES).group >= p.phases[PHASE_VALUES].groups &&
                layer_first(p, PHASE_OUTPUT).group >= p.phases[PHASE_OUTPUT].groups;
    for (int32_t phase = PHASE_VALUES; phase < p.count; phase++) {
        struct layer_place item = layer_first(p, phase);
        layer_before<R>(p, s, phase, idle, choice);
        if (phase == PHASE_ROUTED) {
            walk.end = p.count;
            next.phase = phase;
            next.place = item;
            layer_seek(p, s, walk.end, &next);
            layer_fill(p, s, walk, &next, policy);
        }
        layer_items<R>(p, s, few, phase, item, &walk, &next, policy);
    }
    if (p.count <= PHASE_QUERY) {
        layer_meet(p, s, 3, true);
        layer_join(p, s);
    }
}

static bool aligned(const void *data)
{
    return (uintptr_t)data % 16 == 0;
}

/* Whether the matrix product of few rows takes it. */
static bool served(const struct tv_linear *a, int32_t rows)
{
    return a->products == TV_PRODUCTS_EXACT && a->rows == rows && a->n > 0 && a->k > 0 &&
           a->groups > 0 && linear_uses_mma(a->w_dtype, a->k) && aligned(a->w) && aligned(a->x) &&
           a->x_row_stride % 4 == 0 && a->x_group_stride % 4 == 0 && a->w_group_stride % 8 == 0 &&
           a->y != NULL;
}

/* Items of a phase begin at block `start`; the result: where those behind them would. */
static uint32_t phase_place(struct layer_phase *f, int32_t width, int32_t groups, uint32_t start,
                            uint32_t blocks)
{
    f->columns = f->n > 0 ? (int32_t)linear_blocks(f->n, width) : 1;
    f->groups = groups;
    f->step_group = (int32_t)blocks / f->columns;
    f->step_at = (int32_t)blocks % f->columns;
    f->shift = (blocks - start % blocks) % blocks;
    return (start + (uint32_t)f->columns * (uint32_t)groups) % blocks;
}

static uint32_t phase_linear(struct layer_phase *f, const struct tv_linear *a, uint32_t start,
                             uint32_t blocks)
{
    f->w[0] = (const char *)a->w;
    f->x = a->x;
    f->y = a->y;
    f->w_group_bytes = a->w_group_stride * (int64_t)sizeof(__nv_bfloat16);
    f->x_row = a->x_row_stride;
    f->x_group = a->x_group_stride;
    f->y_row = a->y_row_stride;
    f->y_group = a->y_group_stride;
    f->n = a->n;
    f->k = a->k;
    return phase_place(f, STREAM_W, a->groups, start, blocks);
}

static int moe_check(const struct tv_moe *a, int32_t rows)
{
    const struct tv_experts *e = &a->experts;
    const struct tv_router *r = &a->router;
    const struct tv_linear *l = &a->logits;
    if (experts_check(e) < 0 || router_check(r) < 0 || a->shared_inter < 0 || e->rows != rows ||
        r->rows != rows || r->experts != e->experts || r->top_k != e->top_k || r->ids != e->ids ||
        r->weights != e->weights || l->rows != rows || l->n != r->experts || l->k != e->hidden ||
        l->y != r->logits || tv_cuda_linear_check(l) < 0) {
        return -EINVAL;
    }
    bool mma = linear_uses_mma(e->w_dtype, e->hidden) && linear_uses_mma(e->w_dtype, e->inter) &&
               a->shared_inter % 8 == 0;
    return mma && e->products == TV_PRODUCTS_EXACT && l->w_dtype == TV_F32 && l->groups == 1 &&
                   l->y_row_stride == r->experts && l->accumulate == 0 && aligned(l->w) &&
                   rows * e->top_k <= LAYER_PAIRS_MAX && aligned(a->shared_gate) &&
                   aligned(a->shared_up) && aligned(a->shared_down) &&
                   LAYER_ROWS_MAX * choice_bytes(*r) <= (int32_t)sizeof layer_shared().parts &&
                   r->experts <= LAYER_EXPERTS && r->top_k <= 32
               ? 0
               : -ENOTSUP;
}

static int next_check(const struct tv_layer *a, int32_t rows)
{
    const struct tv_query *q = &a->query;
    if (latent_check(&q->latent) < 0 || q->heads < 1 || q->nope_dim < 1 ||
        !tv_args_dtype_kv(q->out_dtype) || !tv_args_dtype_known(q->w_dtype) ||
        !tv_args_products_known(q->products) || tv_cuda_linear_check(&a->next_query) < 0 ||
        tv_cuda_linear_check(&a->next_kv) < 0 || q->latent.rows != rows) {
        return -EINVAL;
    }
    return served(&a->next_query, rows) && served(&a->next_kv, rows) && a->next_query.groups == 1 &&
                   a->next_kv.groups == 1 && a->next_query.accumulate == 0 &&
                   a->next_kv.accumulate == 0 && a->next_query.k == a->moe.experts.hidden &&
                   a->next_kv.k == a->moe.experts.hidden && aligned(a->next_norm_weight) &&
                   q->products == TV_PRODUCTS_EXACT && linear_uses_mma(q->w_dtype, q->nope_dim) &&
                   aligned(q->k_up_t) && aligned(q->q) &&
                   (q->nope_dim + q->latent.table.rope_dim) % 4 == 0
               ? 0
               : -ENOTSUP;
}

static int layer_check(const struct tv_layer *a)
{
    const struct tv_linear *o = &a->output;
    int32_t rows = o->rows;
    int moe = moe_check(&a->moe, rows);
    int next = a->next_norm_weight == NULL ? 0 : next_check(a, rows);
    if (o->y != a->moe.experts.y || o->n != a->moe.experts.hidden || moe == -EINVAL ||
        next == -EINVAL || tv_cuda_linear_check(&a->values) < 0 || tv_cuda_linear_check(o) < 0) {
        return -EINVAL;
    }
    if (rows < 1 || rows > LAYER_ROWS_MAX || !served(&a->values, rows) || !served(o, rows) ||
        o->groups != 1 || o->accumulate == 0 || a->values.accumulate != 0 ||
        o->y_row_stride != o->n || !aligned(a->norm_weight) || !aligned(o->y)) {
        return -ENOTSUP;
    }
    return moe < 0 ? moe : next;
}

static void phases_moe(const struct tv_moe *a, const struct expert_plan &plan, uint32_t blocks,
                       struct layer_phase *phases)
{
    const struct tv_experts *e = &a->experts;
    struct layer_phase *f = &phases[PHASE_SHARED];
    int32_t groups = a->shared_inter > 0 ? 1 : 0;
    uint32_t start;
    f->w[0] = (const char *)a->shared_gate;
    f->w[1] = (const char *)a->shared_up;
    f->x = e->y;
    f->x_row = f->k = e->hidden;
    f->y = plan.shared_act;
    f->y_row = f->n = a->shared_inter;
    start = phase_place(f, STREAM_W / 2, groups, 0, blocks);
    f = &phases[PHASE_ROUTED];
    f->x = e->y;
    f->x_row = f->k = e->hidden;
    f->y = plan.act;
    f->y_row = f->n = e->inter;
    (void)phase_place(f, STREAM_W / 2, 0, start, blocks);
    f = &phases[PHASE_SHARED_DOWN];
    f->w[0] = (const char *)a->shared_down;
    f->x = plan.shared_act;
    f->x_row = f->k = a->shared_inter;
    f->y = plan.shared_out;
    f->y_row = f->n = e->hidden;
    start = phase_place(f, STREAM_W, groups, 0, blocks);
    f = &phases[PHASE_DOWN];
    f->x = plan.act;
    f->x_row = f->k = e->inter;
    f->y = plan.out;
    f->y_row = f->n = e->hidden;
    (void)phase_place(f, STREAM_W, 0, start, blocks);
}

/* The products of the next layer, whose rows are the norm of x. */
static void phases_next(const struct tv_layer *a, uint32_t blocks, struct layer_phase *phases)
{
    const struct tv_query *q = &a->query;
    int32_t head_dim = q->nope_dim + q->latent.table.rope_dim;
    int32_t row_dim = q->latent.latent_dim + q->latent.table.rope_dim;
    uint32_t start = phase_linear(&phases[PHASE_QUERY], &a->next_query, 0, blocks);
    (void)phase_linear(&phases[PHASE_KV], &a->next_kv, start, blocks);
    phases[PHASE_QUERY].x = phases[PHASE_KV].x = a->moe.experts.y;
    phases[PHASE_QUERY].x_row = phases[PHASE_KV].x_row = a->moe.experts.hidden;
    struct layer_phase *f = &phases[PHASE_ABSORB];
    f->w[0] = (const char *)q->k_up_t;
    f->w_group_bytes = (int64_t)q->latent.latent_dim * q->nope_dim * (int64_t)sizeof(__nv_bfloat16);
    f->x = q->q;
    f->x_row = (int64_t)q->heads * head_dim;
    f->x_group = head_dim;
    f->y = q->out;
    f->y_row = (int64_t)q->heads * row_dim;
    f->y_group = row_dim;
    f->n = q->latent.latent_dim;
    f->k = q->nope_dim;
    (void)phase_place(f, STREAM_W, q->heads, 0, blocks);
}

#define KERNEL layer<LAYER_ROWS_MAX>
#define SHARED_BYTES                                                                               \
    (sizeof(struct layer_shared) + LAYER_WARPS * sizeof(struct layer_pieces<LAYER_ROWS_MAX>))

int tv_cuda_layer_prepare(struct tv_cuda *cuda)
{
    int cooperative = 0, each = 0;
    static_assert(SHARED_BYTES <= TV_CUDA_SHARED_MAX, "fits every promised device");
    TV_CUDA_CHECK(cudaDeviceGetAttribute(&cooperative, cudaDevAttrCooperativeLaunch, cuda->device));
    TV_CUDA_CHECK(cudaFuncSetAttribute(KERNEL, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                       (int)SHARED_BYTES));
    TV_CUDA_CHECK(
        cudaOccupancyMaxActiveBlocksPerMultiprocessor(&each, KERNEL, LAYER_THREADS, SHARED_BYTES));
    if (!cooperative || each < 1 || cuda->sm_count < 2) {
        return 0;
    }
    TV_CUDA_CHECK(cudaMalloc(&cuda->layer_words, LAYER_WORDS * sizeof(uint32_t)));
    tv_cuda_allocation_count(cuda);
    int rc = tv_cuda_errno(cudaMemset(cuda->layer_words, 0, LAYER_WORDS * sizeof(uint32_t)));
    rc = rc < 0 ? rc : tv_cuda_errno(cudaStreamSynchronize(NULL)); /* for any other stream */
    if (rc < 0) {
        tv_cuda_layer_finish(cuda);
    }
    cuda->layer_blocks = cuda->sm_count * (each < LAYER_BLOCKS ? each : LAYER_BLOCKS);
    return rc;
}

void tv_cuda_layer_finish(struct tv_cuda *cuda)
{
    if (cuda->layer_words != NULL) {
        (void)tv_cuda_errno(cudaFree(cuda->layer_words)); /* nobody is told of what fails here */
        cuda->layer_words = NULL;
    }
}

/* All blocks at a time, or none: they wait for each other. */
static int layer_launch(const struct tv_kernels *k, const struct layer_args &p, uint32_t blocks)
{
    cudaLaunchAttribute attribute = {};
    cudaLaunchConfig_t config = {};
    attribute.id = cudaLaunchAttributeCooperative;
    attribute.val.cooperative = 1;
    config.gridDim = dim3(blocks);
    config.blockDim = dim3(LAYER_THREADS);
    config.dynamicSmemBytes = SHARED_BYTES;
    config.stream = tv_cuda_stream(k);
    config.attrs = &attribute;
    config.numAttrs = 1;
    return tv_cuda_errno(cudaLaunchKernelEx(&config, KERNEL, p));
}

int tv_cuda_layer(struct tv_kernels *k, const struct tv_layer *args)
{
    const struct tv_cuda *cuda = (const struct tv_cuda *)k->impl;
    const struct tv_experts *experts = &args->moe.experts;
    struct layer_args p = {};
    int rc = layer_check(args);
    if (rc < 0 || cuda->layer_words == NULL) {
        return rc < 0 ? rc : -ENOTSUP;
    }
    if (experts->workspace_bytes < tv_cuda_moe_workspace(k, &args->moe)) {
        return -ENOSPC;
    }
    TV_CUDA_ENTER(k);
    uint32_t blocks = (uint32_t)cuda->layer_blocks;
    (void)plan_carve(experts, args->moe.shared_inter, false,
                     (char *)(((uintptr_t)experts->workspace + 255) / 256 * 256), &p.plan);
    (void)phase_linear(&p.phases[PHASE_VALUES], &args->values, 0, blocks);
    (void)phase_linear(&p.phases[PHASE_OUTPUT], &args->output, 0, blocks);
    phases_moe(&args->moe, p.plan, blocks, p.phases);
    p.count = PHASE_QUERY;
    if (args->next_norm_weight != NULL) {
        phases_next(args, blocks, p.phases);
        p.count = LAYER_PHASES;
    }
    p.rows = args->output.rows;
    p.hidden = experts->hidden;
    p.top_k = experts->top_k;
    p.x = experts->y;
    p.norm[0] = args->norm_weight;
    p.norm[1] = args->next_norm_weight;
    p.eps[0] = args->norm_eps;
    p.eps[1] = args->next_norm_eps;
    p.router_w = (const float *)args->moe.logits.w;
    p.logits = args->moe.logits.y;
    p.router = args->moe.router;
    p.experts[0] = experts->gate;
    p.experts[1] = experts->up;
    p.experts[2] = experts->down;
    p.shared = args->moe.shared_inter > 0;
    p.query = args->query;
    p.words = cuda->layer_words;
    return layer_launch(k, p, blocks);
}
