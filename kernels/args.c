/*
 * args.c - the documented ranges of kernels.h as code.
 *
 * Refuses to repair: a wrong argument is -EINVAL and nothing has been written.
 */
#include "args.h"

#include <errno.h>
#include <float.h>
#include <limits.h>

static int page_size_known(int32_t page_size)
{
    return page_size == 16 || page_size == 32 || page_size == 64 || page_size == 128;
}

int tv_args_linear(const struct tv_linear *args)
{
    if (args->rows < 0 || args->n < 1 || args->k < 1 || args->groups < 1 ||
        !tv_args_dtype_known(args->w_dtype) || !args->w ||
        !tv_args_products_known(args->products)) {
        return -EINVAL;
    }
    if (args->rows > 0 && (!args->x || !args->y)) {
        return -EINVAL;
    }
    return 0;
}

static int check_positions(int32_t rows, const int32_t *positions,
                           const struct tv_rope_table *table)
{
    if (table->rope_dim < 2 || table->rope_dim % 2 != 0 || table->rope_dim > TV_ARGS_ROPE_MAX ||
        !table->cos_sin) {
        return -EINVAL;
    }
    for (int32_t r = 0; r < rows; r++) {
        if (positions[r] < 0 || positions[r] >= table->positions) {
            return -EINVAL;
        }
    }
    return 0;
}

int tv_args_rope(const struct tv_rope *args)
{
    if (args->rows < 0 || args->heads < 1 || !args->x) {
        return -EINVAL;
    }
    return check_positions(args->rows, args->positions, &args->table);
}

int tv_args_latent_write(const struct tv_latent_write *args)
{
    if (args->rows < 0 || args->latent_dim < 1 || !tv_args_dtype_kv(args->kv_dtype)) {
        return -EINVAL;
    }
    for (int32_t r = 0; r < args->rows; r++) {
        if (args->slots[r] < 0 || args->slots[r] >= args->slot_count) {
            return -EINVAL;
        }
    }
    return check_positions(args->rows, args->positions, &args->table);
}

int tv_args_router(const struct tv_router *args)
{
    if (args->rows < 0 || args->experts < 1 || args->top_k < 1 || args->n_group < 1 ||
        args->experts % args->n_group != 0 || args->topk_group < 1 ||
        args->topk_group > args->n_group) {
        return -EINVAL;
    }
    if (args->scoring != TV_ROUTER_SOFTMAX && args->scoring != TV_ROUTER_SIGMOID) {
        return -EINVAL;
    }
    if (args->top_k > args->topk_group * (args->experts / args->n_group)) {
        return -EINVAL;
    }
    return 0;
}

int tv_args_experts(const struct tv_experts *args)
{
    if (args->rows < 0 || args->hidden < 1 || args->inter < 1 || args->experts < 1 ||
        args->top_k < 1 || args->top_k > args->experts || !tv_args_dtype_known(args->w_dtype) ||
        !tv_args_products_known(args->products)) {
        return -EINVAL;
    }
    int64_t count = (int64_t)args->rows * args->top_k;
    if (count > INT_MAX) {
        return -EINVAL;
    }
    for (int64_t i = 0; i < count; i++) {
        if (args->ids[i] < 0 || args->ids[i] >= args->experts) {
            return -EINVAL;
        }
    }
    return 0;
}

static int check_pages(const int32_t *table, int64_t tokens, int32_t page_size, int64_t page_count)
{
    int64_t pages = (tokens + page_size - 1) / page_size;
    for (int64_t i = 0; i < pages; i++) {
        if (table[i] < 0 || table[i] >= page_count) {
            return -EINVAL;
        }
    }
    return 0;
}

static int check_request(const struct tv_verify_attn *args, int32_t b)
{
    int32_t prefix = args->prefix_len[b];
    int32_t nodes = args->node_count[b];
    if (prefix < 0 || nodes < 1 || nodes > args->q_len) {
        return -EINVAL;
    }
    int64_t tokens = (int64_t)prefix + nodes;
    if (tokens > args->kv_len_max || tokens > (int64_t)args->max_pages * args->page_size) {
        return -EINVAL;
    }
    if (args->row_start && args->row_start[b] < 0) {
        return -EINVAL;
    }
    const int32_t *parents = args->parents + tv_args_row_base(args, b);
    if (parents[0] != -1) {
        return -EINVAL;
    }
    for (int32_t i = 1; i < nodes; i++) {
        if (parents[i] < 0 || parents[i] >= i) {
            return -EINVAL;
        }
    }
    return check_pages(args->page_table + (int64_t)b * args->max_pages, tokens, args->page_size,
                       args->page_count);
}

int tv_args_verify_attn(const struct tv_verify_attn *args)
{
    if (args->batch < 1 || args->q_len < 1 || args->q_len > TV_TREE_NODES_MAX || args->heads < 1 ||
        args->heads > TV_HEADS_MAX || args->latent_dim < 8 || args->latent_dim % 8 != 0 ||
        args->rope_dim < 0 || args->rope_dim > TV_ARGS_ROPE_MAX) {
        return -EINVAL;
    }
    if (!tv_args_dtype_kv(args->dtype) || !tv_args_dtype_kv(args->out_dtype) ||
        !page_size_known(args->page_size) || args->max_pages < 1 || args->kv_len_max < 1 ||
        args->splits < 0 || args->splits > 64 ||
        !(args->softmax_scale > 0.0f && args->softmax_scale <= FLT_MAX)) {
        return -EINVAL;
    }
    for (int32_t b = 0; b < args->batch; b++) {
        int rc = check_request(args, b);
        if (rc != 0) {
            return rc;
        }
    }
    return 0;
}

int tv_args_prefill_attn(const struct tv_prefill_attn *args)
{
    if (args->rows < 0 || args->start < 0 || args->heads < 1 || args->heads > TV_HEADS_MAX ||
        args->nope_dim < 0 || args->rope_dim < 0 || args->nope_dim + args->rope_dim < 1 ||
        args->v_dim < 1 || args->latent_dim < 1) {
        return -EINVAL;
    }
    if (!tv_args_dtype_known(args->w_dtype) || !tv_args_dtype_kv(args->kv_dtype) ||
        !tv_args_products_known(args->products) || !page_size_known(args->page_size) ||
        args->rows > INT_MAX - args->start) {
        return -EINVAL;
    }
    int32_t tokens = args->start + args->rows;
    if (args->key_first < 0 || args->key_count < 0 || args->key_count > tokens ||
        args->key_first > tokens - args->key_count ||
        (args->key_count == 0 && args->key_first != 0) ||
        (args->key_count > 0 && args->running == NULL) || args->key_first % TV_PREFILL_KEYS != 0 ||
        (args->key_first + args->key_count < tokens && args->key_count % TV_PREFILL_KEYS != 0)) {
        return -EINVAL;
    }
    return check_pages(args->page_table, (int64_t)args->start + args->rows, args->page_size,
                       args->page_count);
}

int tv_args_draw(const struct tv_draw_args *args)
{
    if (args->rows < 0 || args->vocab < 1) {
        return -EINVAL;
    }
    for (int32_t r = 0; r < args->rows; r++) {
        const struct tv_sampling *s = &args->sampling[r];
        if (args->positions[r] < 0 || s->top_k < 0 || !(s->top_p > 0.0f) || !(s->min_p >= 0.0f)) {
            return -EINVAL;
        }
    }
    return 0;
}

int tv_args_topk(const struct tv_topk *args)
{
    if (args->rows < 0 || args->vocab < 1 || args->k < 0 || args->k > 64 || args->k > args->vocab) {
        return -EINVAL;
    }
    return 0;
}

int tv_args_synthesize(const struct tv_synthesize *args)
{
    if (args->groups < 1 || args->rows < 1 || args->cols < 1 || !tv_args_dtype_kv(args->dtype) ||
        !args->to || (int64_t)args->groups * args->rows > INT64_MAX / 4 / args->cols) {
        return -EINVAL;
    }
    return 0;
}

int tv_args_kv_move(int64_t slot_count, const int64_t *src, const int64_t *dst, int32_t count)
{
    if (count < 0) {
        return -EINVAL;
    }
    for (int32_t i = 0; i < count; i++) {
        if (src[i] < 0 || src[i] >= slot_count || dst[i] < 0 || dst[i] >= slot_count) {
            return -EINVAL;
        }
    }
    return 0;
}
