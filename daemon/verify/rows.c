/*
 * rows.c - from logits to an answer: draws, the walk, top-k, copies for the host.
 *
 * Owns nothing; works in the engine's arrays. Refuses rows that are not finite where they decide or
 * would be written out.
 */
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "verify/engine.h"
#include "verify/rules.h"
#include "verify/walk.h"

static int draw_launch(struct tv_verify_engine *self, const float *logits, int32_t rows)
{
    struct tv_kernels *kernels = self->engine.kernels;
    struct tv_draw_args args = {.rows = rows,
                                .vocab = self->engine.vocab,
                                .logits = logits,
                                .positions = self->device_positions,
                                .sampling = self->device_sampling,
                                .draws = self->device_draws,
                                .workspace = self->draw_workspace,
                                .workspace_bytes = self->draw_workspace_bytes};
    size_t count = (size_t)rows;
    int rc = kernels->upload(kernels, self->device_positions, self->host_positions,
                             count * sizeof *self->host_positions);
    if (rc == 0) {
        rc = kernels->upload(kernels, self->device_sampling, self->host_sampling,
                             count * sizeof *self->host_sampling);
    }
    if (rc == 0) {
        rc = kernels->draw(kernels, &args);
    }
    if (rc == 0 && kernels->timer != NULL) {
        rc = kernels->timer(kernels, 1);
    }
    if (rc == 0) {
        rc = kernels->download(kernels, self->host_draws, self->device_draws,
                               count * sizeof *self->host_draws);
    }
    if (rc == 0) {
        rc = kernels->sync(kernels);
    }
    return rc;
}

int tv_engine_draw_slots(struct tv_verify_engine *self, const struct tv_round_in *in,
                         int32_t slot_count, const float *logits)
{
    if (self->engine.kernels->host_memory) {
        return 0; /* most rows are never walked: each is drawn when the walk comes to it */
    }
    int32_t rows = 0;
    for (int32_t s = 0; s < slot_count; s++) {
        const struct tv_engine_slot *slot = &self->slots[s];
        const struct tv_round_in *round = &in[slot->round];
        for (int32_t i = 0; i < slot->rows; i++) {
            self->host_positions[rows] = round->context->seq.len + round->tree->depths[i] + 1;
            self->host_sampling[rows] = tv_walk_sampling(&round->rule);
            rows++;
        }
    }
    return draw_launch(self, logits, rows);
}

int tv_engine_draw_row(struct tv_verify_engine *self, const float *logits, int32_t row,
                       int32_t position, const struct tv_sampling *sampling,
                       struct tv_draw *ret_draw)
{
    self->host_positions[0] = position;
    self->host_sampling[0] = *sampling;
    int rc = draw_launch(self, logits + (int64_t)row * self->engine.vocab, 1);
    if (rc == 0) {
        *ret_draw = self->host_draws[0];
    }
    return rc;
}

struct walk_context {
    struct tv_verify_engine *self;
    const float *logits;
    int32_t row_start;
    struct tv_sampling sampling;
};

static int walk_draw(void *context, int32_t node, int32_t position, struct tv_draw *ret_draw)
{
    struct walk_context *walk = context;
    int32_t row = walk->row_start + node;
    if (!walk->self->engine.kernels->host_memory) {
        *ret_draw = walk->self->host_draws[row];
        return 0;
    }
    return tv_engine_draw_row(walk->self, walk->logits, row, position, &walk->sampling, ret_draw);
}

/* A tv_rules_row: the row comes to the host, where these rules are walked. */
static int walk_row(void *context, int32_t node, struct tv_rules_target *ret_target)
{
    struct walk_context *walk = context;
    struct tv_verify_engine *self = walk->self;
    struct tv_kernels *kernels = self->engine.kernels;
    int64_t start = (int64_t)(walk->row_start + node) * self->engine.vocab;
    const float *row = walk->logits + start;
    int rc = 0;
    if (!kernels->host_memory) {
        rc = kernels->download(kernels, self->host_logits + start, row,
                               (size_t)self->engine.vocab * sizeof *row);
        rc = rc == 0 ? kernels->sync(kernels) : rc;
        row = self->host_logits + start;
    }
    if (rc == 0) {
        rc = tv_kernels_target(row, self->engine.vocab, &walk->sampling, self->rule_keys,
                               self->rule_ids, self->rule_probs, &ret_target->count);
    }
    ret_target->ids = self->rule_ids;
    ret_target->probs = self->rule_probs;
    return rc;
}

/* What the host does in a row is work too: it counts as the backend's does. */
static void walk_step(void *context)
{
    struct walk_context *walk = context;
    (void)atomic_fetch_add_explicit(&walk->self->rule_steps, 1, memory_order_relaxed);
}

static int walk_run(struct walk_context *walk, const struct tv_round_in *in, int32_t *nodes,
                    float *logprobs, struct tv_walk_result *ret_result)
{
    struct tv_verify_engine *self = walk->self;
    int32_t len = in->context->seq.len;
    if (!tv_rules_apply(&in->rule)) {
        return tv_walk_run(in->tree, len, &in->rule, walk_draw, walk, nodes, logprobs, ret_result);
    }
    const struct tv_rules_source source = {.context = walk,
                                           .draw = walk_draw,
                                           .row = walk_row,
                                           .step = walk_step,
                                           .target = self->rule_target,
                                           .left = self->rule_left,
                                           .draft = self->rule_draft};
    return tv_rules_run(in->tree, len, &in->rule, &source, nodes, logprobs, ret_result);
}

int tv_engine_all_finite(const float *values, int64_t count)
{
    for (int64_t i = 0; i < count; i++) {
        if (!isfinite(values[i])) {
            return 0;
        }
    }
    return 1;
}

/* Are the rows that a client gets (NULL: all `count`) of these values finite? `path` is the
 * accepted one. */
static int rows_finite(const struct tv_rows *rows, const int32_t *path, int32_t path_count,
                       const float *values, int32_t count, int64_t width)
{
    if (rows == NULL || rows->kind == TV_ROWS_ALL) {
        return tv_engine_all_finite(values, count * width);
    }
    const int32_t *nodes = path;
    int32_t node_count = path_count;
    if (rows->kind == TV_ROWS_STOP) {
        nodes = path + path_count - 1;
        node_count = 1;
    } else if (rows->kind == TV_ROWS_LIST) {
        nodes = rows->nodes;
        node_count = rows->count;
    }
    for (int32_t i = 0; i < node_count; i++) {
        if (!tv_engine_all_finite(values + nodes[i] * width, width)) {
            return 0;
        }
    }
    return 1;
}

static int topk_answer(struct tv_verify_engine *self, const struct tv_engine_slot *slot,
                       int32_t top_k, const float *logits, struct tv_round_out *out)
{
    struct tv_kernels *kernels = self->engine.kernels;
    size_t start = (size_t)slot->row_start * TV_WANT_TOP_K_MAX;
    size_t count = (size_t)slot->rows * (size_t)top_k;
    struct tv_topk args = {.rows = slot->rows,
                           .vocab = self->engine.vocab,
                           .k = top_k,
                           .logits = logits + (int64_t)slot->row_start * self->engine.vocab,
                           .ids = self->device_topk_ids + start,
                           .values = self->device_topk_values + start,
                           .lse = self->device_topk_lse + slot->row_start};
    int rc = kernels->topk(kernels, &args);
    if (rc == 0 && !kernels->host_memory) {
        rc = kernels->download(kernels, self->host_topk_ids + start, args.ids,
                               count * sizeof *args.ids);
        if (rc == 0) {
            rc = kernels->download(kernels, self->host_topk_values + start, args.values,
                                   count * sizeof *args.values);
        }
        if (rc == 0) {
            rc = kernels->download(kernels, self->host_topk_lse + slot->row_start, args.lse,
                                   (size_t)slot->rows * sizeof *args.lse);
        }
    }
    if (rc == 0) {
        rc = kernels->sync(kernels);
    }
    if (rc != 0) {
        return rc;
    }
    out->topk_ids = self->host_topk_ids + start;
    out->topk_logits = self->host_topk_values + start;
    out->topk_lse = self->host_topk_lse + slot->row_start;
    return 0;
}

static int logits_answer(struct tv_verify_engine *self, const struct tv_engine_slot *slot,
                         const float *logits, struct tv_round_out *out)
{
    struct tv_kernels *kernels = self->engine.kernels;
    int64_t start = (int64_t)slot->row_start * self->engine.vocab;
    int64_t count = (int64_t)slot->rows * self->engine.vocab;
    out->logits = logits + start;
    if (!kernels->host_memory) {
        int rc = kernels->download(kernels, self->host_logits + start, logits + start,
                                   (size_t)count * sizeof *logits);
        if (rc == 0) {
            rc = kernels->sync(kernels);
        }
        if (rc != 0) {
            return rc;
        }
        out->logits = self->host_logits + start;
    }
    return 0;
}

int64_t tv_engine_hidden_width(const struct tv_verify_engine *self, int project)
{
    const struct tv_model *model = self->engine.model;
    return project ? tv_model_taps_project_dim(model)
                   : (int64_t)tv_model_options(model)->tap_count * tv_model_config(model)->hidden;
}

/* `rows` hidden rows of the last pass from `first` on. */
static int hidden_take(struct tv_verify_engine *self, int32_t first, int32_t rows, int project,
                       const float **ret_rows)
{
    struct tv_model *model = self->engine.model;
    return project ? tv_model_taps_project(model, first, rows, ret_rows)
                   : tv_model_taps_rows(model, first, rows, ret_rows);
}

int tv_engine_slice_hidden(struct tv_verify_engine *self, int32_t end,
                           struct tv_slice_hidden *hidden)
{
    int64_t width = tv_engine_hidden_width(self, hidden->project);
    int rc = hidden_take(self, end - hidden->rows, hidden->rows, hidden->project, &hidden->data);
    if (rc == 0 && !tv_engine_all_finite(hidden->data, hidden->rows * width)) {
        rc = -EDOM;
    }
    return rc;
}

/* -EDOM: a row that the client gets is not finite. */
static int check_given(const struct tv_verify_engine *self, const struct tv_round_in *in,
                       const struct tv_engine_slot *slot, const int32_t *path, int32_t path_count,
                       const struct tv_round_out *out)
{
    int64_t vocab = self->engine.vocab;
    int finite = 1;
    if (in->top_k > 0) {
        finite =
            rows_finite(in->topk_rows, path, path_count, out->topk_lse, slot->rows, 1) &&
            rows_finite(in->topk_rows, path, path_count, out->topk_logits, slot->rows, in->top_k);
    }
    if (finite && in->want_logits) {
        finite = rows_finite(in->logits_rows, path, path_count, out->logits, slot->rows, vocab);
    }
    if (finite && in->want_hidden) {
        finite = rows_finite(in->hidden_rows, path, path_count, out->hidden, slot->rows,
                             tv_engine_hidden_width(self, in->project));
    }
    return finite ? 0 : -EDOM;
}

/* No walk: each node's token under its parent's row. Rows of leaves decide nothing. */
static int score_answer(struct tv_verify_engine *self, const struct tv_engine_slot *slot,
                        const struct tv_round_in *in, const float *logits, struct tv_round_out *out)
{
    const struct tv_tree *tree = in->tree;
    float *scores = self->scores + slot->row_start;
    int rc = topk_answer(self, slot, 1, logits, out);
    if (rc == 0) {
        rc = logits_answer(self, slot, logits, out);
    }
    scores[0] = -INFINITY;
    for (int32_t i = 1; rc == 0 && i < tree->count; i++) {
        int32_t parent = tree->parents[i];
        const float *row = out->logits + (int64_t)parent * self->engine.vocab;
        double score = (double)row[tree->tokens[i]] - (double)out->topk_lse[parent];
        if (!tv_engine_all_finite(row, self->engine.vocab)) {
            return -EDOM;
        }
        scores[i] = score < 0.0 ? (float)score : 0.0f; /* both terms are rounded */
    }
    if (rc != 0) {
        return rc;
    }
    self->nodes[slot->row_start] = 0;
    out->nodes = self->nodes + slot->row_start;
    out->accepted_count = 1;
    out->end = (struct tv_drawn){.token = -1};
    out->scores = scores;
    return 0;
}

int tv_engine_answer(struct tv_verify_engine *self, const struct tv_engine_slot *slot,
                     const struct tv_round_in *in, const float *logits, struct tv_round_out *out)
{
    if (in->score) {
        return score_answer(self, slot, in, logits, out);
    }
    struct walk_context walk = {.self = self,
                                .logits = logits,
                                .row_start = slot->row_start,
                                .sampling = tv_walk_sampling(&in->rule)};
    struct tv_walk_result result = {0};
    int32_t *nodes = self->nodes + slot->row_start;
    float *logprobs = self->logprobs + slot->row_start;
    int rc = walk_run(&walk, in, nodes, logprobs, &result);
    if (rc == 0 && in->top_k > 0) {
        rc = topk_answer(self, slot, in->top_k, logits, out);
    }
    if (rc == 0 && (in->want_logits || in->lend_logits)) {
        rc = logits_answer(self, slot, logits, out);
    }
    if (rc == 0 && in->want_hidden) {
        rc = hidden_take(self, slot->row_start, slot->rows, in->project, &out->hidden);
    }
    if (rc == 0) {
        rc = check_given(self, in, slot, nodes, result.accepted_count, out);
    }
    if (rc != 0) {
        return rc;
    }
    out->accepted_count = result.accepted_count;
    out->nodes = nodes;
    out->logprobs = logprobs;
    out->end = result.end;
    return 0;
}

struct tv_verify_attn tv_engine_attn_slice(const struct tv_verify_attn *attn, int32_t request,
                                           int32_t row_start, int32_t rows)
{
    struct tv_verify_attn slice = *attn;
    size_t q_row = (size_t)attn->heads * (size_t)(attn->latent_dim + attn->rope_dim);
    size_t out_row = (size_t)attn->heads * (size_t)attn->latent_dim;
    size_t start = (size_t)row_start;
    slice.batch = 1;
    slice.q_len = rows;
    slice.q = (const char *)attn->q + start * q_row * tv_dtype_size(attn->dtype);
    slice.page_table = attn->page_table + (size_t)request * (size_t)attn->max_pages;
    slice.prefix_len = attn->prefix_len + request;
    slice.node_count = attn->node_count + request;
    slice.parents = attn->parents + start;
    slice.row_start = NULL;
    slice.out = (char *)attn->out + start * out_row * tv_dtype_size(attn->out_dtype);
    slice.lse = attn->lse + start * (size_t)attn->heads;
    return slice;
}
