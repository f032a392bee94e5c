/*
 * prefill.c - known tokens as KV of a context, a slice a call or in a launch of rounds, and the
 * token drawn behind them.
 *
 * A slice that fails leaves the context as it was. Refuses slices beyond what the engine takes.
 */
#include <errno.h>

#include "verify/engine.h"
#include "verify/walk.h"

static int prefill_draw(struct tv_verify_engine *self, const float *logits, int32_t len,
                        const struct tv_round_rule *rule, struct tv_drawn *ret_drawn)
{
    struct tv_sampling sampling = tv_walk_sampling(rule);
    struct tv_draw draw = {0};
    int rc = tv_engine_draw_row(self, logits, 0, len, &sampling, &draw);
    if (rc != 0) {
        return rc;
    }
    if (draw.token < 0) {
        return -EDOM;
    }
    int finite = draw.margin <= 3.0e38f;
    *ret_drawn = (struct tv_drawn){.token = draw.token,
                                   .finish = tv_walk_finish(rule, len, draw.token),
                                   .has_margin = finite,
                                   .margin = finite ? draw.margin : 0.0f};
    return 0;
}

/* The model, between two parts of a prefill pass. */
static void engine_between(void *context)
{
    const struct tv_engine *engine = context;
    engine->between(engine->between_context);
}

/* The pass over a slice whose rows are reserved, and what it hands out. */
static int slice_run(struct tv_verify_engine *self, struct tv_context *context,
                     const int32_t *tokens, int32_t count, const struct tv_round_rule *rule,
                     struct tv_drawn *ret_drawn, struct tv_slice_hidden *hidden)
{
    struct tv_engine *engine = &self->engine;
    struct tv_cache_seq *seq = &context->seq;
    const float *logits = NULL;
    if (engine->between != NULL) { /* the self-test is left alone */
        tv_model_between_set(engine->model, engine_between, engine);
    }
    tv_model_taps_set(engine->model, hidden->rows > 0);
    int rc = tv_model_prefill(engine->model, engine->cache, seq, tokens, count,
                              rule != NULL ? &logits : NULL);
    tv_model_between_set(engine->model, NULL, NULL);
    if (rc == 0 && hidden->rows > 0) {
        rc = tv_engine_slice_hidden(self, count, hidden);
    }
    if (rc == 0 && rule != NULL) {
        rc = prefill_draw(self, logits, seq->len + count, rule, ret_drawn);
    }
    return rc;
}

/* The reserved rows of a slice are its context's; exact: they were computed, from rows that were.
 */
static int slice_commit(struct tv_cache *cache, struct tv_cache_seq *seq, int32_t count, int exact)
{
    exact = exact && seq->exact == seq->len; /* a row depends on all before it */
    int rc = tv_cache_commit(cache, seq, NULL, count);
    if (rc == 0 && exact) {
        seq->exact = seq->len;
    }
    return rc;
}

static int slice_check(const struct tv_engine *engine, const struct tv_context *context,
                       const int32_t *tokens, int32_t count)
{
    return count < 1 || count > engine->prefill_rows ||
                   context->seq.len > engine->max_len - count ||
                   tv_engine_tokens_check(engine, tokens, count) != 0
               ? -EINVAL
               : 0;
}

int tv_engine_prefill_hidden(struct tv_engine *engine, struct tv_context *context,
                             const int32_t *tokens, int32_t count, const struct tv_round_rule *rule,
                             struct tv_drawn *ret_drawn, struct tv_cache_shortage *ret_shortage,
                             struct tv_slice_hidden *hidden)
{
    struct tv_verify_engine *self = (struct tv_verify_engine *)engine;
    struct tv_cache_seq *seq = &context->seq;
    int rc = slice_check(engine, context, tokens, count);
    if (rc == 0) {
        rc = tv_cache_reserve(engine->cache, seq, count, ret_shortage);
    }
    if (rc != 0) {
        return rc;
    }
    struct tv_drawn drawn = {0};
    int invents = engine->invents_rows && rule == NULL && hidden->rows == 0;
    rc = invents ? tv_cache_invent(engine->cache, seq, engine->invents_seed)
                 : slice_run(self, context, tokens, count, rule, &drawn, hidden);
    if (rc != 0) {
        tv_cache_drop(engine->cache, seq);
        return rc;
    }
    rc = slice_commit(engine->cache, seq, count, !invents);
    if (rc == 0 && rule != NULL) {
        *ret_drawn = drawn;
    }
    return rc;
}

int tv_engine_prefill(struct tv_engine *engine, struct tv_context *context, const int32_t *tokens,
                      int32_t count, const struct tv_round_rule *rule, struct tv_drawn *ret_drawn,
                      struct tv_cache_shortage *ret_shortage)
{
    struct tv_slice_hidden none = {.rows = 0};
    return tv_engine_prefill_hidden(engine, context, tokens, count, rule, ret_drawn, ret_shortage,
                                    &none);
}

int tv_engine_rider_admit(struct tv_verify_engine *self, struct tv_rider *rider, int32_t rows)
{
    const struct tv_engine *engine = &self->engine;
    rider->rc = slice_check(engine, rider->context, rider->tokens, rider->count);
    if (rider->rc == 0 && (rider->count > engine->prefill_rows - rows ||
                           (rider->rule != NULL && rows == engine->rows_max))) {
        rider->rc = -EINVAL;
    }
    if (rider->rc == 0) {
        rider->rc =
            tv_cache_reserve(engine->cache, &rider->context->seq, rider->count, &rider->shortage);
    }
    return rider->rc == 0;
}

void tv_engine_rider_settle(struct tv_verify_engine *self, struct tv_rider *rider, int rc,
                            int32_t first, const float *logits)
{
    struct tv_cache *cache = self->engine.cache;
    struct tv_cache_seq *seq = &rider->context->seq;
    if (rc == 0 && rider->hidden.rows > 0) {
        rc = tv_engine_slice_hidden(self, first + rider->count, &rider->hidden);
    }
    if (rc == 0 && rider->rule != NULL) {
        rc = prefill_draw(self, logits, seq->len + rider->count, rider->rule, &rider->drawn);
    }
    if (rc == 0) {
        rc = slice_commit(cache, seq, rider->count, 1);
    } else {
        tv_cache_drop(cache, seq);
    }
    rider->rc = rc;
}
