/*
 * rows.c - copies what an answer shows of a round out of the engine's arrays.
 *
 * The engine's arrays live until its next call; an answer that waits for an oracle lives longer.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "sched/job.h"

void tv_sched_blocks_finish(struct job_blocks *blocks)
{
    free(blocks->nodes);
    free(blocks->accepted_tokens);
    free(blocks->new_tokens);
    free(blocks->logprobs);
    free(blocks->topk_rows);
    free(blocks->topk_ids);
    free(blocks->topk_logits);
    free(blocks->topk_lse);
    free(blocks->logits_rows);
    free(blocks->logits_data);
    tv_session_fetch_unref(blocks->fetch);
    free(blocks->hidden_rows);
    free(blocks->hidden_data);
    tv_session_fetch_unref(blocks->hidden_fetch);
    memset(blocks, 0, sizeof *blocks);
}

static void *room(size_t count, size_t bytes)
{
    return malloc(count > 0 ? count * bytes : 1);
}

int tv_sched_rows_resolve(const struct tv_rows *rows, const struct tv_tree *tree,
                          const struct tv_round_out *out, int32_t **ret_rows, int32_t *ret_count)
{
    const int32_t *source = NULL;
    int32_t count = 0;
    switch (rows->kind) {
    case TV_ROWS_PATH:
        source = out->nodes;
        count = out->accepted_count;
        break;
    case TV_ROWS_STOP:
        source = out->nodes + out->accepted_count - 1;
        count = 1;
        break;
    case TV_ROWS_LIST:
        source = rows->nodes;
        count = rows->count;
        break;
    case TV_ROWS_ALL:
        count = tree->count;
        break;
    }
    int32_t *list = room((size_t)count, sizeof *list);
    if (list == NULL) {
        return -ENOMEM;
    }
    for (int32_t i = 0; i < count; i++) {
        list[i] = source != NULL ? source[i] : i;
    }
    *ret_rows = list;
    *ret_count = count;
    return 0;
}

/* Rows of `width` elements of 4 bytes, gathered. */
static void *gather(const void *data, const int32_t *rows, int32_t count, int32_t width)
{
    size_t bytes = (size_t)width * 4;
    char *copy = room((size_t)count, bytes);
    for (int32_t i = 0; copy != NULL && i < count; i++) {
        memcpy(copy + (size_t)i * bytes, (const char *)data + (size_t)rows[i] * bytes, bytes);
    }
    return copy;
}

static int topk_take(struct job *job, const struct tv_tree *tree, const struct tv_round_out *out)
{
    struct job_blocks *blocks = &job->blocks;
    const struct tv_want *want = &job->call->request.want;
    int32_t count = 0;
    if (tv_sched_rows_resolve(&want->rows, tree, out, &blocks->topk_rows, &count) != 0) {
        return -ENOMEM;
    }
    blocks->topk_ids = gather(out->topk_ids, blocks->topk_rows, count, want->top_k);
    blocks->topk_logits = gather(out->topk_logits, blocks->topk_rows, count, want->top_k);
    blocks->topk_lse = gather(out->topk_lse, blocks->topk_rows, count, 1);
    if (blocks->topk_ids == NULL || blocks->topk_logits == NULL || blocks->topk_lse == NULL) {
        return -ENOMEM;
    }
    blocks->topk = (struct tv_topk_block){.k = want->top_k,
                                          .row_count = count,
                                          .rows = blocks->topk_rows,
                                          .ids = blocks->topk_ids,
                                          .logits = blocks->topk_logits,
                                          .lse = blocks->topk_lse};
    job->round.topk = &blocks->topk;
    return 0;
}

int tv_sched_fetch_make(const struct job *job, const struct tv_tree *tree,
                        const struct tv_round_out *out, const int32_t *rows, int32_t count,
                        float **data, struct tv_session_fetch **ret_fetch)
{
    struct tv_session_fetch *fetch = calloc(1, sizeof *fetch);
    if (fetch == NULL) {
        return -ENOMEM;
    }
    atomic_init(&fetch->refs, 1);
    fetch->seq = job->round.seq;
    fetch->row_count = count;
    fetch->node_count = tree->count;
    fetch->path_count = out->accepted_count;
    fetch->path = room((size_t)out->accepted_count, sizeof *fetch->path);
    fetch->rows = room((size_t)count, sizeof *fetch->rows);
    if (fetch->path == NULL || fetch->rows == NULL) {
        tv_session_fetch_unref(fetch);
        return -ENOMEM;
    }
    memcpy(fetch->path, out->nodes, (size_t)out->accepted_count * sizeof *fetch->path);
    memcpy(fetch->rows, rows, (size_t)count * sizeof *fetch->rows);
    fetch->data = *data;
    *data = NULL;
    *ret_fetch = fetch;
    return 0;
}

/* The session keeps the rows; the answer has their address. */
static int logits_fetch(struct job *job, const struct tv_tree *tree, const struct tv_round_out *out,
                        int32_t count, int32_t vocab)
{
    struct job_blocks *blocks = &job->blocks;
    if (tv_sched_fetch_make(job, tree, out, blocks->logits_rows, count, &blocks->logits_data,
                            &blocks->fetch) != 0) {
        return -ENOMEM;
    }
    blocks->fetch->dim = vocab;
    blocks->fetch->bytes = (size_t)count * (size_t)vocab * sizeof(float);
    blocks->fetch->dtype = job->call->request.want.logits_dtype;
    (void)snprintf(blocks->href, sizeof blocks->href,
                   "/v1/sessions/%s/rounds/%d/tensor?what=logits", job->session->id,
                   job->round.seq);
    return 0;
}

static int logits_take(struct job *job, const struct tv_tree *tree, const struct tv_round_out *out,
                       int32_t vocab)
{
    struct job_blocks *blocks = &job->blocks;
    const struct tv_want *want = &job->call->request.want;
    int32_t count = 0;
    if (tv_sched_rows_resolve(&want->logits_rows, tree, out, &blocks->logits_rows, &count) != 0) {
        return -ENOMEM;
    }
    blocks->logits_data = gather(out->logits, blocks->logits_rows, count, vocab);
    if (blocks->logits_data == NULL ||
        (want->logits_fetch && logits_fetch(job, tree, out, count, vocab) != 0)) {
        return -ENOMEM;
    }
    blocks->logits = (struct tv_logits_block){.row_count = count,
                                              .vocab = vocab,
                                              .rows = blocks->logits_rows,
                                              .dtype = want->logits_dtype,
                                              .data = blocks->logits_data,
                                              .href = blocks->href};
    job->round.logits = &blocks->logits;
    return 0;
}

int tv_sched_blocks_take(struct job *job, const struct tv_tree *tree,
                         const struct tv_round_out *out, int32_t vocab)
{
    struct job_blocks *blocks = &job->blocks;
    const struct tv_want *want = &job->call->request.want;
    size_t count = (size_t)out->accepted_count;
    blocks->nodes = room(count, sizeof *blocks->nodes);
    blocks->accepted_tokens = room(count, sizeof *blocks->accepted_tokens);
    blocks->new_tokens = room(count, sizeof *blocks->new_tokens);
    blocks->logprobs = room(count, sizeof *blocks->logprobs);
    if (blocks->nodes == NULL || blocks->accepted_tokens == NULL || blocks->new_tokens == NULL ||
        blocks->logprobs == NULL) {
        return -ENOMEM;
    }
    for (size_t i = 0; i < count; i++) {
        blocks->nodes[i] = out->nodes[i];
        blocks->accepted_tokens[i] = tree->tokens[out->nodes[i]];
        blocks->new_tokens[i] = i + 1 < count ? tree->tokens[out->nodes[i + 1]] : out->end.token;
        blocks->logprobs[i] = out->logprobs[i];
    }
    job->round.accepted_count = out->accepted_count;
    job->round.accepted_nodes = blocks->nodes;
    job->round.accepted_tokens = blocks->accepted_tokens;
    job->round.new_count = out->accepted_count;
    job->round.new_tokens = blocks->new_tokens;
    job->round.logprobs = want->logprobs ? blocks->logprobs : NULL;
    if (want->top_k > 0 && topk_take(job, tree, out) != 0) {
        return -ENOMEM;
    }
    if (want->logits && logits_take(job, tree, out, vocab) != 0) {
        return -ENOMEM;
    }
    return want->hidden.wanted ? tv_sched_hidden_take(job, tree, out) : 0;
}
