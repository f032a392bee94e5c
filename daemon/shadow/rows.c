/*
 * rows.c - KV rows and queries of the fast path against those of the path oracle, layer by layer.
 *
 * f32 rows are compared only, but for those whose experts a router chose by less than the noise:
 * the fast path may have chosen otherwise, and what follows from its row is judged. A bf16 cache
 * rounds: each row and query is checked to be one step from the oracle's own at most, and is then
 * taken over, so that the rest of the pass differs by the order of summation alone. Where kernels
 * also round probabilities, what attention gave is held to the contract's bound of it and taken
 * over too. Refuses to take over without that check.
 */
#include <math.h>

#include "shadow/round.h"

double tv_shadow_spread(const float *values, size_t count)
{
    double sum = 0.0, squares = 0.0;
    for (size_t i = 0; i < count; i++) {
        sum += (double)values[i];
        squares += (double)values[i] * (double)values[i];
    }
    double mean = count > 0 ? sum / (double)count : 0.0;
    return count > 0 ? sqrt(fmax(0.0, squares / (double)count - mean * mean)) : 0.0;
}

double tv_shadow_logit_bound(double std)
{
    return TV_SHADOW_LOGIT_ABS * fmax(1.0, std / TV_SHADOW_LOGIT_STD);
}

static size_t width_of(const struct tv_shadow_round *round)
{
    return (size_t)(round->latent_dim + round->rope_dim);
}

/* The captured row of a slot is this one, within `bound` and, when both are rounded, a step. */
static int row_fits(const struct tv_shadow_round *round, int32_t layer, int32_t slot,
                    const float *row, double bound)
{
    double step = round->dtype == TV_F32 ? 0.0 : 1.0 / 128.0; /* two bf16 neighbours, relative */
    int fits = 1;
    for (size_t i = 0; i < width_of(round); i++) {
        double value = (double)tv_shadow_round_kv_at(round, layer, slot, (int32_t)i);
        double delta = fabs(value - (double)row[i]);
        fits &= delta <= bound + step * fmax(fabs(value), fabs((double)row[i]));
    }
    return fits;
}

static double distance(const float *a, const float *b, size_t count)
{
    double largest = 0.0;
    for (size_t i = 0; i < count; i++) {
        largest = fmax(largest, fabs((double)a[i] - (double)b[i]));
    }
    return largest;
}

/* A prefix row may come from a prefill, whose queries are not rounded, or from an earlier round,
 * whose were. It must be the row of one of the two forms; of the second one, whose own queries
 * may have been rounded the other way here and there, within what the rounding of queries moves
 * the row at all. Where that also decides the row's experts, no form tells what it should be. */
static int prefix_fits(const struct tv_rows_check *check, int32_t layer, int32_t r, const float *kv,
                       double bound)
{
    const struct tv_path_rows *rows = check->rows;
    size_t width = width_of(check->round);
    const float *plain = kv + (size_t)r * width;
    const float *rounded = kv + (size_t)(rows->prefix_len + r) * width;
    float margin = fminf(rows->margins[r], rows->margins[rows->prefix_len + r]);
    return row_fits(check->round, layer, r, plain, bound) || margin <= rows->moved[r] ||
           row_fits(check->round, layer, r, rounded, fmax(bound, distance(plain, rounded, width)));
}

int tv_shadow_row_undecided(const struct tv_rows_check *check, int32_t row)
{
    return (double)check->rows->ties[row] < check->tie;
}

/* The layer before is complete: rel_l2 over all its rows, as the contract has it. */
static void attention_close(struct tv_rows_check *check)
{
    check->equal = tv_shadow_rows_equal(check);
    check->difference = check->norm = 0.0;
}

int tv_shadow_rows_equal(const struct tv_rows_check *check)
{
    return check->equal && sqrt(check->difference) <= TV_SHADOW_REL_L2_BF16 * sqrt(check->norm);
}

/* The kernel's result of a tree row, brought to values by v_up. */
static void mixed_watch(void *context, int32_t layer, int32_t row, const float *v_up, float *mixed)
{
    struct tv_rows_check *check = context;
    const struct tv_shadow_round *round = check->round;
    int32_t latent = round->latent_dim;
    size_t node = (size_t)(check->rows->slots[row] - check->rows->prefix_len);
    for (int32_t i = 0; i < round->heads * check->v_dim; i++) {
        size_t head = node * (size_t)round->heads + (size_t)(i / check->v_dim);
        float value = 0.0f;
        for (int32_t l = 0; l < latent; l++) {
            value += v_up[(size_t)i * (size_t)latent + (size_t)l] *
                     tv_shadow_round_out_at(round, layer, head * (size_t)latent + (size_t)l);
        }
        double delta = (double)value - (double)mixed[i];
        check->difference += delta * delta;
        check->norm += (double)mixed[i] * (double)mixed[i];
        mixed[i] = value;
    }
}

static void kv_watch(void *context, int32_t layer, float *kv)
{
    struct tv_rows_check *check = context;
    const struct tv_shadow_round *round = check->round;
    const struct tv_path_rows *rows = check->rows;
    size_t width = width_of(round);
    double bound = tv_shadow_logit_bound(tv_shadow_spread(kv, (size_t)rows->count * width));
    attention_close(check);
    for (int32_t slot = 0; slot < rows->prefix_len + round->nodes; slot++) {
        int32_t row = slot < rows->prefix_len ? slot : rows->row_of[slot - rows->prefix_len];
        if (!tv_shadow_pages_enter(round)) {
            return; /* the pass stops at its next step */
        }
        check->equal &= rows->twins && slot < rows->prefix_len
                            ? prefix_fits(check, layer, slot, kv, bound)
                            : tv_shadow_row_undecided(check, row) ||
                                  row_fits(round, layer, slot, kv + (size_t)row * width, bound);
        tv_shadow_pages_leave(round);
    }
    for (int32_t r = 0; r < rows->count; r++) {
        if (!rows->twins && !tv_shadow_row_undecided(check, r)) {
            continue;
        }
        if (!tv_shadow_pages_enter(round)) {
            return;
        }
        for (size_t i = 0; i < width; i++) {
            kv[(size_t)r * width + i] =
                tv_shadow_round_kv_at(round, layer, rows->slots[r], (int32_t)i);
        }
        tv_shadow_pages_leave(round);
    }
}

/* Queries of the tree's rows; those of the prefix were not kept. */
static void query_watch(void *context, int32_t layer, int32_t row, float *q)
{
    struct tv_rows_check *check = context;
    const struct tv_shadow_round *round = check->round;
    int32_t node = check->rows->slots[row] - check->rows->prefix_len;
    size_t count = (size_t)round->heads * width_of(round);
    if (node < 0) {
        return;
    }
    const uint16_t *fast = (const uint16_t *)round->layers[layer].q + (size_t)node * count;
    double bound = tv_shadow_logit_bound(tv_shadow_spread(q, count));
    for (size_t i = 0; i < count; i++) {
        double value = (double)tv_bf16_to_f32(fast[i]);
        double delta = fabs(value - (double)q[i]);
        check->equal &= delta <= bound + fmax(fabs(value), fabs((double)q[i])) / 128.0;
        q[i] = (float)value;
    }
}

struct tv_path_watch tv_shadow_rows_watch(struct tv_rows_check *check)
{
    return (struct tv_path_watch){.context = check,
                                  .kv = kv_watch,
                                  .query = check->rows->twins ? query_watch : NULL,
                                  .mixed = check->attention ? mixed_watch : NULL};
}
