/*
 * hidden.c - copies the hidden rows that an answer shows out of the engine's arrays.
 *
 * The engine gives a row's taps side by side, the answer one plane for each tap. Rows of a prompt
 * come slice by slice; nothing is kept of positions that nobody wants.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "sched/job.h"

/* What a row has in the engine's array and in the answer. */
struct layout {
    int32_t planes, dim; /* of the answer */
    size_t row;          /* values of a row in the engine's array */
    int32_t at[TV_TAPS_MAX];
};

static struct layout layout_of(const struct job *job)
{
    const struct tv_want_hidden *want = &job->call->request.want.hidden;
    const struct tv_request_limits *limits = &job->sched->limits;
    struct layout layout = {.planes = 1, .dim = limits->project_dim};
    layout.row = (size_t)limits->project_dim;
    if (!want->project) {
        layout.planes = want->tap_count;
        layout.dim = limits->hidden_dim;
        layout.row = (size_t)limits->tap_count * (size_t)limits->hidden_dim;
        memcpy(layout.at, want->taps, sizeof layout.at);
    }
    return layout;
}

/* Row `row` of the engine's becomes row `to` of `count` in each plane of the answer's. */
static void row_copy(const struct layout *layout, const float *source, size_t row, float *data,
                     size_t to, size_t count)
{
    size_t dim = (size_t)layout->dim;
    for (size_t plane = 0; plane < (size_t)layout->planes; plane++) {
        memcpy(data + (plane * count + to) * dim,
               source + row * layout->row + (size_t)layout->at[plane] * dim, dim * sizeof *data);
    }
}

/* Room for the planes of `count` rows, and the block that says what they are. */
static int block_make(struct job *job, const struct layout *layout, int32_t count)
{
    struct job_blocks *blocks = &job->blocks;
    const struct tv_want_hidden *want = &job->call->request.want.hidden;
    size_t values = (size_t)layout->planes * (size_t)count * (size_t)layout->dim;
    blocks->hidden_data = malloc(values * sizeof *blocks->hidden_data);
    if (blocks->hidden_data == NULL) {
        return -ENOMEM;
    }
    for (int32_t i = 0; i < want->tap_count; i++) {
        blocks->hidden_taps[i] = job->sched->limits.taps[want->taps[i]];
    }
    blocks->hidden = (struct tv_hidden_block){.tap_count = want->tap_count,
                                              .taps = blocks->hidden_taps,
                                              .projected = want->project,
                                              .row_count = count,
                                              .dim = layout->dim,
                                              .rows = blocks->hidden_rows,
                                              .dtype = want->dtype,
                                              .data = blocks->hidden_data,
                                              .href = blocks->hidden_href};
    job->round.hidden = &blocks->hidden;
    return 0;
}

int tv_sched_hidden_take(struct job *job, const struct tv_tree *tree,
                         const struct tv_round_out *out)
{
    struct job_blocks *blocks = &job->blocks;
    const struct tv_want_hidden *want = &job->call->request.want.hidden;
    const struct layout layout = layout_of(job);
    int32_t count = 0;
    if (tv_sched_rows_resolve(&want->rows, tree, out, &blocks->hidden_rows, &count) != 0 ||
        block_make(job, &layout, count) != 0) {
        return -ENOMEM;
    }
    for (int32_t i = 0; i < count; i++) {
        row_copy(&layout, out->hidden, (size_t)blocks->hidden_rows[i], blocks->hidden_data,
                 (size_t)i, (size_t)count);
    }
    if (!want->fetch) {
        return 0;
    }
    if (tv_sched_fetch_make(job, tree, out, blocks->hidden_rows, count, &blocks->hidden_data,
                            &blocks->hidden_fetch) != 0) {
        return -ENOMEM;
    }
    blocks->hidden.data = NULL;
    blocks->hidden_fetch->planes = want->project ? 0 : layout.planes;
    blocks->hidden_fetch->dim = layout.dim;
    blocks->hidden_fetch->bytes =
        (size_t)layout.planes * (size_t)count * (size_t)layout.dim * sizeof(float);
    blocks->hidden_fetch->dtype = want->dtype;
    (void)snprintf(blocks->hidden_href, sizeof blocks->hidden_href,
                   "/v1/sessions/%s/rounds/%d/tensor?what=hidden", job->session->id,
                   job->round.seq);
    return 0;
}

int32_t tv_sched_hidden_first(const struct job *job)
{
    const struct tv_want_hidden *want = &job->call->request.want.hidden;
    if (job->round.kind != TV_CALL_CREATE || !want->wanted) {
        return job->token_count;
    }
    int whole = want->window == 0 || want->window > job->token_count;
    return whole ? 0 : job->token_count - want->window;
}

int32_t tv_sched_hidden_wanted(const struct job *job, int32_t start, int32_t count)
{
    int32_t first = tv_sched_hidden_first(job);
    if (first >= start + count) {
        return 0;
    }
    return first > start ? start + count - first : count;
}

int tv_sched_hidden_slice(struct job *job, int32_t start, int32_t count,
                          const struct tv_slice_hidden *slice)
{
    struct job_blocks *blocks = &job->blocks;
    const struct layout layout = layout_of(job);
    int32_t first = tv_sched_hidden_first(job), rows = job->token_count - first;
    if (blocks->hidden_data == NULL) {
        blocks->hidden_rows = malloc((size_t)rows * sizeof *blocks->hidden_rows);
        if (blocks->hidden_rows == NULL || block_make(job, &layout, rows) != 0) {
            return -ENOMEM;
        }
        for (int32_t i = 0; i < rows; i++) {
            blocks->hidden_rows[i] = first + i;
        }
    }
    int32_t to = start + count - slice->rows - first;
    for (int32_t i = 0; i < slice->rows; i++) {
        row_copy(&layout, slice->data, (size_t)i, blocks->hidden_data, (size_t)(to + i),
                 (size_t)rows);
    }
    return 0;
}
