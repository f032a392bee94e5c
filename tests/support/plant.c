/*
 * plant.c - wrong scales, positions, projections, routes, masks and moves, as wrappers of table
 * slots.
 *
 * The naive slot is wrapped like the fast one: the fault is in what attention is asked, so the
 * comparison of the two kernels cannot see it. Which form a call belongs to is read from its
 * shapes; the tree of the start's self-test has more rows than any slice of its text.
 */
#include "plant.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define TREE_ROWS     16
#define WRONG_SCALE   1.59f /* as a forgotten mscale^2, in what attention is asked */
#define POSITIONS_MAX 4096

enum plant {
    PLANT_SCALE_BOTH,
    PLANT_SCALE_VERIFY,
    PLANT_SCALE_PREFILL,
    PLANT_SCALE_SLIGHT,
    PLANT_ROPE_QUERY,
    PLANT_ROPE_KEY,
    PLANT_ROPE_VERIFY,
    PLANT_ROPE_BOTH,
    PLANT_ABSORB_HEADS,
    PLANT_VALUE_HEADS,
    PLANT_VALUE_SIZE,
    PLANT_ROUTER,
    PLANT_ROUTER_SCALE,
    PLANT_MASK,
    PLANT_LATE,
    PLANT_STUCK,
    PLANT_COMMIT,
    PLANT_LOST,
    PLANT_COUNT
};

const char *const tv_plant_names[PLANT_COUNT + 1] = {
    [PLANT_SCALE_BOTH] = "scale-both",
    [PLANT_SCALE_VERIFY] = "scale-verify",
    [PLANT_SCALE_PREFILL] = "scale-prefill",
    [PLANT_SCALE_SLIGHT] = "scale-slight",
    [PLANT_ROPE_QUERY] = "rope-query",
    [PLANT_ROPE_KEY] = "rope-key",
    [PLANT_ROPE_VERIFY] = "rope-verify",
    [PLANT_ROPE_BOTH] = "rope-both",
    [PLANT_ABSORB_HEADS] = "absorb-heads",
    [PLANT_VALUE_HEADS] = "value-heads",
    [PLANT_VALUE_SIZE] = "value-size",
    [PLANT_ROUTER] = "router",
    [PLANT_ROUTER_SCALE] = "router-scale",
    [PLANT_MASK] = "mask",
    [PLANT_LATE] = "late",
    [PLANT_STUCK] = "stuck",
    [PLANT_COMMIT] = "commit",
    [PLANT_LOST] = "lost",
};

static struct tv_kernels real; /* the table as it was */
static enum plant planted;

static int switched_on(void)
{
    const char *file = getenv("TV_PLANT_FILE");
    return file != NULL && access(file, F_OK) == 0;
}

static struct tv_verify_attn attn_wrong(const struct tv_verify_attn *args, int32_t *parents)
{
    struct tv_verify_attn wrong = *args;
    if (planted == PLANT_SCALE_BOTH || planted == PLANT_SCALE_VERIFY) {
        wrong.softmax_scale *= WRONG_SCALE;
    } else if (planted == PLANT_SCALE_SLIGHT) {
        wrong.softmax_scale *= 1.01f;
    } else if (planted == PLANT_MASK && args->batch == 1) {
        for (int32_t i = 0; i < args->q_len; i++) { /* every node sees all before it */
            parents[i] = i - 1;
        }
        wrong.parents = parents;
    }
    return wrong;
}

static int plant_verify_attn(struct tv_kernels *k, const struct tv_verify_attn *args)
{
    int32_t parents[TV_TREE_NODES_MAX];
    struct tv_verify_attn wrong = attn_wrong(args, parents);
    return real.verify_attn(k, &wrong);
}

static int plant_verify_attn_naive(struct tv_kernels *k, const struct tv_verify_attn *args)
{
    int32_t parents[TV_TREE_NODES_MAX];
    struct tv_verify_attn wrong = attn_wrong(args, parents);
    return real.verify_attn_naive(k, &wrong);
}

static int plant_prefill_attn(struct tv_kernels *k, const struct tv_prefill_attn *args)
{
    struct tv_prefill_attn wrong = *args;
    if (planted == PLANT_SCALE_BOTH || planted == PLANT_SCALE_PREFILL) {
        wrong.softmax_scale *= WRONG_SCALE;
    }
    return real.prefill_attn(k, &wrong);
}

/* Each position one further, in memory of the caller's. */
static const int32_t *moved(const int32_t *positions, int32_t rows, int32_t *ret_moved)
{
    for (int32_t i = 0; i < rows; i++) {
        ret_moved[i] = positions[i] + 1;
    }
    return ret_moved;
}

static int plant_rope(struct tv_kernels *k, const struct tv_rope *args)
{
    int32_t positions[POSITIONS_MAX];
    struct tv_rope wrong = *args;
    int verify = args->rows == TREE_ROWS;
    int hit = (verify && (planted == PLANT_ROPE_QUERY || planted == PLANT_ROPE_VERIFY)) ||
              planted == PLANT_ROPE_BOTH;
    if (hit && args->rows <= POSITIONS_MAX) {
        wrong.positions = moved(args->positions, args->rows, positions);
    }
    return real.rope(k, &wrong);
}

static int plant_latent_write(struct tv_kernels *k, const struct tv_latent_write *args)
{
    int32_t positions[POSITIONS_MAX];
    struct tv_latent_write wrong = *args;
    int verify = args->rows == TREE_ROWS;
    int hit = (verify && (planted == PLANT_ROPE_KEY || planted == PLANT_ROPE_VERIFY)) ||
              planted == PLANT_ROPE_BOTH;
    if (hit && args->rows <= POSITIONS_MAX) {
        wrong.positions = moved(args->positions, args->rows, positions);
    }
    return real.latent_write(k, &wrong);
}

/* The results of the first two groups change places in every row. */
static void heads_swap(const struct tv_linear *args)
{
    for (int32_t r = 0; r < args->rows; r++) {
        for (int32_t i = 0; i < args->n; i++) {
            float *first = args->y + r * args->y_row_stride + i;
            float kept = *first;
            *first = first[args->y_group_stride];
            first[args->y_group_stride] = kept;
        }
    }
}

/* Absorption widens into the latent's space and the value projection comes back from it. */
static int plant_linear(struct tv_kernels *k, const struct tv_linear *args)
{
    int rc = real.linear(k, args);
    int absorbs = args->groups > 1 && args->n == TV_MLA_LATENT;
    int values = args->groups > 1 && args->k == TV_MLA_LATENT;
    if (rc != 0) {
        return rc;
    }
    if ((absorbs && planted == PLANT_ABSORB_HEADS) || (values && planted == PLANT_VALUE_HEADS)) {
        heads_swap(args);
    }
    if (values && planted == PLANT_VALUE_SIZE) {
        for (int32_t r = 0; r < args->rows; r++) {
            args->y[r * args->y_row_stride] *= 1.05f; /* one element of one head */
        }
    }
    return 0;
}

static int plant_router(struct tv_kernels *k, const struct tv_router *args)
{
    int rc = real.router(k, args);
    for (int32_t r = 0; rc == 0 && r < args->rows; r++) {
        float *weights = args->weights + (int64_t)r * args->top_k;
        if (planted == PLANT_ROUTER) {
            weights[args->top_k - 1] = weights[0]; /* the last expert weighs like the first */
        }
        for (int32_t i = 0; planted == PLANT_ROUTER_SCALE && i < args->top_k; i++) {
            weights[i] *= 1.02f;
        }
    }
    return rc;
}

static int plant_swiglu(struct tv_kernels *k, int32_t rows, int32_t dim, float *gate,
                        const float *up)
{
    const struct timespec pause = {.tv_nsec = 1000000};
    int rc = real.swiglu(k, rows, dim, gate, up);
    if (rc == 0 && planted == PLANT_LATE && switched_on()) {
        gate[0] *= 1.5f;
    }
    while (planted == PLANT_STUCK && switched_on()) {
        (void)nanosleep(&pause, NULL); /* an interrupted pause is only a shorter one */
    }
    return rc;
}

/* A device reports what became of a launch when it is waited for. */
static int plant_sync(struct tv_kernels *k)
{
    return planted == PLANT_LOST && switched_on() ? -ENOTRECOVERABLE : real.sync(k);
}

/* Accepted rows stay where they were written. */
static int plant_kv_move(struct tv_kernels *k, void *kv_pages, size_t row_bytes, int64_t slot_count,
                         const int64_t *src, const int64_t *dst, int32_t count)
{
    if (planted == PLANT_LOST && switched_on()) {
        return -ENOTRECOVERABLE;
    }
    return planted == PLANT_COMMIT
               ? 0
               : real.kv_move(k, kv_pages, row_bytes, slot_count, src, dst, count);
}

static int plant_copy(struct tv_kernels *k, void *to, size_t to_stride, const void *from,
                      size_t from_stride, size_t row_bytes, int32_t rows)
{
    if (planted == PLANT_LOST && switched_on()) {
        return -ENOTRECOVERABLE;
    }
    return planted == PLANT_COMMIT
               ? 0
               : real.copy(k, to, to_stride, from, from_stride, row_bytes, rows);
}

int tv_plant(struct tv_kernels *kernels, const char *name)
{
    for (int i = 0; i < PLANT_COUNT; i++) {
        if (strcmp(tv_plant_names[i], name) == 0) {
            planted = (enum plant)i;
            real = *kernels;
            kernels->verify_attn = plant_verify_attn;
            kernels->verify_attn_naive = plant_verify_attn_naive;
            kernels->prefill_attn = plant_prefill_attn;
            kernels->rope = plant_rope;
            kernels->latent_write = plant_latent_write;
            kernels->linear = plant_linear;
            kernels->router = plant_router;
            kernels->swiglu = plant_swiglu;
            kernels->kv_move = plant_kv_move;
            kernels->copy = plant_copy;
            kernels->sync = plant_sync;
            return 0;
        }
    }
    return -EINVAL;
}
