/*
 * fixed_pages.c - where the engine with fixed answers keeps rows: a real pool of pages, whose rows
 * are one number each, the token.
 *
 * Refuses rows that the pool has no pages for.
 */
#include "fixed_pages.h"

#include "fixed_engine.h"

int tv_fixed_rows_write(const struct tv_engine *engine, struct tv_context *context,
                        const int32_t *tokens, int32_t count,
                        struct tv_cache_shortage *ret_shortage)
{
    if (engine->cache == NULL) {
        return 0;
    }
    int rc = tv_cache_reserve(engine->cache, &context->seq, count, ret_shortage);
    float *rows = tv_cache_layer(engine->cache, 0);
    for (int32_t i = 0; rc == 0 && i < count; i++) {
        rows[tv_cache_slot(engine->cache, &context->seq, context->len + i)] = (float)tokens[i];
    }
    return rc;
}

int tv_fixed_rows_settle(const struct tv_engine *engine, struct tv_context *context,
                         const int32_t *nodes, int32_t count)
{
    context->scratch = 0;
    if (engine->cache == NULL) {
        context->len += count;
        return 0;
    }
    int rc = tv_cache_commit(engine->cache, &context->seq, nodes, count);
    context->len = context->seq.len;
    return rc;
}

int tv_fixed_rows_prefilled(const struct tv_engine *engine, struct tv_context *context,
                            int32_t count)
{
    int exact = context->seq.exact == context->len;
    int rc = tv_fixed_rows_settle(engine, context, NULL, count);
    if (rc == 0 && exact) {
        context->seq.exact = context->len;
    }
    return rc;
}

int tv_fixed_pages_take(struct tv_engine *engine, const struct tv_fixed_engine_params *params)
{
    struct tv_kernels_options options = {.threads = 1, .cpu_flags_mask = ~UINT64_C(0)};
    struct tv_cache_params cache = {.layers = 1,
                                    .page_size = params->page_size,
                                    .row_dim = 1,
                                    .dtype = TV_F32,
                                    .pages = params->pages,
                                    .prefix = TV_CACHE_PREFIX_ROUNDS};
    if (params->pages == 0) {
        return 0;
    }
    int rc = tv_kernels_create("ref", &options, &engine->kernels);
    return rc == 0 ? tv_cache_create(engine->kernels, &cache, &engine->cache) : rc;
}

const struct tv_cache_seq *tv_fixed_engine_seq(const struct tv_context *context)
{
    return &context->seq;
}

int tv_fixed_adopt(struct tv_engine *engine, struct tv_context *context,
                   const struct tv_cache_key *keys, int32_t count)
{
    int rc = tv_cache_adopt(engine->cache, &context->seq, keys, count);
    context->len = context->seq.len;
    return rc;
}

int tv_fixed_restore(struct tv_engine *engine, const struct tv_cache_seq *like,
                     struct tv_context **ret_context, struct tv_cache_shortage *ret_shortage)
{
    struct tv_context *context = NULL;
    int rc = engine->ops->context_open(engine, &context);
    if (rc == 0) {
        rc = tv_cache_restore(engine->cache, &context->seq, like, ret_shortage);
    }
    if (rc != 0) {
        engine->ops->context_close(engine, context);
        return rc;
    }
    context->len = like->len;
    context->scratch = like->scratch;
    *ret_context = context;
    return 0;
}

int tv_fixed_page_read(struct tv_engine *engine, int32_t page, void *host)
{
    return tv_cache_page_read(engine->cache, page, host);
}

int tv_fixed_page_write(struct tv_engine *engine, int32_t page, const void *host)
{
    return tv_cache_page_write(engine->cache, page, host);
}
