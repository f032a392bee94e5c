/*
 * cache.h - the paged MLA cache: page pool, page tables, prefix index, reserve, commit, roll back.
 *
 * Owns every KV page on the device and who holds it. One page table per sequence serves all layers.
 * Rows of a sequence: [0, len) committed, [len, len + scratch) reserved for the nodes of one round.
 * Only the worker thread calls it, except the functions marked "any thread".
 */
#ifndef TV_CACHE_CACHE_H
#define TV_CACHE_CACHE_H

#include <stdint.h>

#include "kernels/kernels.h"

struct tv_cache;

/* What is kept of whole pages that nobody holds any more, and found again by their prefix. */
enum tv_cache_prefix {
    TV_CACHE_PREFIX_OFF,    /* nothing */
    TV_CACHE_PREFIX_EXACT,  /* rows of prefill: what is found is bit for bit what would be computed
                             */
    TV_CACHE_PREFIX_ROUNDS, /* also rows of rounds, which differ from those of prefill by noise */
};

struct tv_cache_params {
    int32_t layers;
    int32_t page_size; /* rows per page: 16, 32, 64 or 128 */
    int32_t row_dim;   /* latent + rope */
    enum tv_dtype dtype;
    int64_t pages; /* in the pool; the device buffer is layers * pages * page_size * row_dim */
    int poison;    /* fill with NaN at start, every page on free, rejected rows (tests; B09, B24) */
    enum tv_cache_prefix prefix;
};

/* Names the rows of one whole page: the digest of all tokens up to its end, and who may find it. */
struct tv_cache_key {
    uint8_t digest[16];
    uint8_t owner[16];
};

/* One sequence's page table and lengths; zero-initialised = empty. */
struct tv_cache_seq {
    int32_t *pages; /* [page_capacity], owned; the first page_count are held */
    int32_t page_count, page_capacity;
    int32_t len;           /* committed rows */
    int32_t scratch;       /* reserved rows behind them; 0 between rounds */
    int32_t scratch_pages; /* taken for those rows */
    int32_t exact; /* of the committed rows, the leading ones that prefill alone wrote; whoever
                      commits such rows behind `exact` = len moves it */
};

/* What a failed reserve lacked; pages that would have been evicted for it count as free. */
struct tv_cache_shortage {
    int64_t pages_needed, pages_free;
};

/* -EINVAL: params; -ENOMEM: the pool does not fit. */
int tv_cache_create(struct tv_kernels *kernels, const struct tv_cache_params *params,
                    struct tv_cache **ret_cache);
void tv_cache_destroy(struct tv_cache *cache);
/* Constant, as where a layer's pages are; any thread. */
const struct tv_cache_params *tv_cache_params(const struct tv_cache *cache);
/* Device pages of one layer: [pages, page_size, row_dim]. */
void *tv_cache_layer(const struct tv_cache *cache, int32_t layer);
/* Physical row (page * page_size + row) of logical row `row`, which is below len + scratch. */
int64_t tv_cache_slot(const struct tv_cache *cache, const struct tv_cache_seq *seq, int32_t row);

/* Could `pages` pages be taken now? Takes none; asks holders for theirs as a reserve does. 0, or
 * -ENOSPC with *ret_shortage. */
int tv_cache_room(struct tv_cache *cache, int64_t pages, struct tv_cache_shortage *ret_shortage);

/* Make rows [len, len + rows) writable: takes pages (evicts those that nobody holds when none is
 * free), and copies the tail page first when somebody else holds it too. -ENOSPC with *ret_shortage
 * and nothing changed; -ENOMEM; -EIO. */
int tv_cache_reserve(struct tv_cache *cache, struct tv_cache_seq *seq, int32_t rows,
                     struct tv_cache_shortage *ret_shortage);
/* Accept scratch rows nodes[0..count) (strictly ascending; NULL = the first count): move them to
 * the front of the scratch, free the pages behind, len += count, scratch = 0. -EINVAL with nothing
 * changed; -EIO with the scratch given back and the committed rows as they were. */
int tv_cache_commit(struct tv_cache *cache, struct tv_cache_seq *seq, const int32_t *nodes,
                    int32_t count);
/* For measurements: random values, of the size of real rows, into all scratch rows. -EIO. */
int tv_cache_invent(struct tv_cache *cache, const struct tv_cache_seq *seq, uint64_t seed);
/* Give the scratch back; committed rows stay. */
void tv_cache_drop(struct tv_cache *cache, struct tv_cache_seq *seq);
/* Forget rows from len on (len <= seq->len); frees whole pages. */
int tv_cache_truncate(struct tv_cache *cache, struct tv_cache_seq *seq, int32_t len);
/* Give an empty sequence the first len rows (len <= seq->len) of one without scratch. They share
 * the pages; whoever writes into the last one first takes a copy. -EINVAL or -ENOMEM, nothing
 * changed.
 */
int tv_cache_fork(struct tv_cache *cache, const struct tv_cache_seq *seq, int32_t len,
                  struct tv_cache_seq *fork);
/* Give a sequence that ends at a page border, without scratch, the pages of keys[0..count) up to
 * the first that is not there; len tells how many. -EINVAL or -ENOMEM, nothing changed. */
int tv_cache_adopt(struct tv_cache *cache, struct tv_cache_seq *seq,
                   const struct tv_cache_key *keys, int32_t count);
/* Let others find the committed pages [first, first + count) of a sequence by these keys. A page is
 * found as long as its rows are what they are now, and no longer than it is held or not needed. */
void tv_cache_publish(struct tv_cache *cache, struct tv_cache_seq *seq, int32_t first,
                      const struct tv_cache_key *keys, int32_t count);
/* Give back everything the sequence holds: pages that can be found stay, evictable, the last first.
 */
void tv_cache_seq_finish(struct tv_cache *cache, struct tv_cache_seq *seq);

/* restore.c. All layers of a page as bytes of host memory, [layers, page_size, row_dim]; a page
 * that is written has one holder. 0 or what the backend said. */
int tv_cache_page_read(struct tv_cache *cache, int32_t page, void *host);
int tv_cache_page_write(struct tv_cache *cache, int32_t page, const void *host);
/* Give an empty sequence the rows of one that was: len of them in page_count pages, of which those
 * below 0 become new ones, to be written, and the others, which somebody holds, are shared; behind
 * them scratch rows, in pages that are this sequence's alone. -EINVAL; else as reserve. */
int tv_cache_restore(struct tv_cache *cache, struct tv_cache_seq *seq,
                     const struct tv_cache_seq *like, struct tv_cache_shortage *ret_shortage);

/* Hold pages[0..count), which a sequence or another pin holds now, so that they are not reused and
 * their committed rows are not written until unpinned; scratch rows in them may change. Any thread
 * may unpin; pinning needs a holder that stays during the call. */
void tv_cache_pin(struct tv_cache *cache, const int32_t *pages, int32_t count);
void tv_cache_unpin(struct tv_cache *cache, const int32_t *pages, int32_t count);

/* How many hold the page: sequences and pins; 0: it is free or evictable. Any thread. */
int32_t tv_cache_holders(struct tv_cache *cache, int32_t page);
/* Called on the worker thread by a reserve that lacks pages, before it is refused: `pages` must be
 * free or evictable, and it may unpin. One at most; NULL takes back that of this context. No
 * reserve meanwhile.
 */
typedef void tv_cache_reclaim(void *context, int64_t pages);
void tv_cache_reclaim_set(struct tv_cache *cache, tv_cache_reclaim *reclaim, void *context);

/* Pool accounting; any thread. free + cached + held = total always (tests check each step). */
struct tv_cache_counts {
    int64_t total, free, held, shared; /* shared: held by more than one */
    int64_t scratch;         /* of the held, those taken for the nodes of rounds under way */
    int64_t cached;          /* evictable: nobody holds them, but they can be found */
    int64_t reused, evicted; /* pages, since the start */
};
void tv_cache_counts(struct tv_cache *cache, struct tv_cache_counts *ret_counts);

#endif
