/*
 * fixed_pages.h - private to the engine with fixed answers: contexts, and their rows in pages.
 */
#ifndef TV_TESTS_FIXED_PAGES_H
#define TV_TESTS_FIXED_PAGES_H

#include <stdint.h>

#include "fixed_engine.h"
#include "verify/verify.h"

struct tv_context {
    int32_t len;
    int32_t scratch;         /* rows of a held round behind them */
    struct tv_cache_seq seq; /* with pages: the same, and where they are */
};

/* The pool, when params ask for one; the engine's from now on. 0 or negative errno. */
int tv_fixed_pages_take(struct tv_engine *engine, const struct tv_fixed_engine_params *params);
/* Rows for these tokens behind the committed ones; nothing without pages. */
int tv_fixed_rows_write(const struct tv_engine *engine, struct tv_context *context,
                        const int32_t *tokens, int32_t count,
                        struct tv_cache_shortage *ret_shortage);
/* Accept those rows (nodes NULL: the first count), or none of them. */
int tv_fixed_rows_settle(const struct tv_engine *engine, struct tv_context *context,
                         const int32_t *nodes, int32_t count);
/* The same for all rows of a prefill. */
int tv_fixed_rows_prefilled(const struct tv_engine *engine, struct tv_context *context,
                            int32_t count);
/* Of struct tv_engine_ops; with pages alone. */
int tv_fixed_adopt(struct tv_engine *engine, struct tv_context *context,
                   const struct tv_cache_key *keys, int32_t count);
int tv_fixed_restore(struct tv_engine *engine, const struct tv_cache_seq *like,
                     struct tv_context **ret_context, struct tv_cache_shortage *ret_shortage);
int tv_fixed_page_read(struct tv_engine *engine, int32_t page, void *host);
int tv_fixed_page_write(struct tv_engine *engine, int32_t page, const void *host);

#endif
