/*
 * round.h - private to shadow/: one captured round, the judges, and the reproducers' files.
 */
#ifndef TV_SHADOW_ROUND_H
#define TV_SHADOW_ROUND_H

#include <pthread.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

#include "shadow/path.h"
#include "shadow/shadow.h"

#define TV_SHADOW_FILES_MAX       32
#define TV_SHADOW_FILES_BYTES_MAX (INT64_C(1) << 30)

/* Bounds of the numerics contract; s of a layer scales those of scores. */
#define TV_SHADOW_REL_L2_F32   2e-6
#define TV_SHADOW_REL_L2_BF16  4e-3
#define TV_SHADOW_LSE_ABS_F32  1e-5
#define TV_SHADOW_LSE_ABS_BF16 1e-4
#define TV_SHADOW_LOGIT_ABS    5e-4
#define TV_SHADOW_LOGIT_STD    1.6
/* Two draws from the same logits part below this margin only (kernels' contract). */
#define TV_SHADOW_DRAW_MARGIN 2e-5

/* Stores that no round has and that are kept all the same: those of a few rounds, so that rounds
 * that are judged as fast as they come find memory that is mapped already. */
#define TV_SHADOW_IDLE_MAX 8

/* A piece of host memory that rounds use one after another; the data follow. */
struct tv_shadow_store {
    struct tv_shadow_store *next; /* of the same round, or of the idle ones */
    size_t capacity, used;        /* bytes of data */
};

/* Of one shadow. bytes_held + bytes_idle <= bytes_max, always. */
struct tv_shadow_pool {
    size_t bytes_max;
    pthread_mutex_t lock; /* guards what follows; after every other lock, for a few stores */
    size_t bytes_held;    /* of the stores of all rounds that exist */
    size_t bytes_idle;
    int32_t idle_count;
    struct tv_shadow_store *idle; /* the last used first */
};

/* What one layer's kernel was given and gave: what is gone when the next layer runs (q, out, lse),
 * and the rows that the commit moves or a later round may write. All else is read where it is. */
struct tv_shadow_layer_copy {
    void *q;       /* [nodes, heads, latent + rope] of dtype */
    void *out;     /* [nodes, heads, latent] of out_dtype */
    float *lse;    /* [nodes, heads] */
    void *kv_tail; /* rows tail_start .. prefix_len + nodes of dtype */
};

/* Where a round's own copies of the case are; tree.count 0: nothing was attached. */
struct tv_shadow_attachment {
    struct tv_tree tree;
    struct tv_round_rule rule;
    int32_t *prefix; /* [prefix_len], or NULL */
    int32_t prefix_len;
    int all_rows;  /* the path is wanted, or the rule looked at more than the accepted nodes */
    float *logits; /* [accepted_count, vocab], or of all nodes */
    int32_t *accepted_nodes;
    int32_t accepted_count, pending;
    double noise;
};

/* In the order of both() of a round on demand. */
enum tv_shadow_verdict {
    TV_SHADOW_EXACT,
    TV_SHADOW_NEAR_TIE,
    TV_SHADOW_VIOLATION,
    TV_SHADOW_SKIPPED
};

struct tv_shadow_round {
    struct tv_shadow *shadow; /* whose it is */
    const struct tv_model_config *config;
    const struct tv_cache *cache;
    struct tv_cache *cache_pinned; /* NULL until pages are pinned */
    int want_kernel, want_path;    /* which oracles */
    int on_demand;
    int sampled;     /* nobody asked for it: its pins are bounded */
    atomic_int lost; /* its prefix pages were needed elsewhere; set with pins_lock, else relaxed */
    enum tv_shadow_verdict path_verdict; /* of a round on demand: the path oracle's, uncounted */
    int failed;                          /* 0, or why it cannot be judged */
    int captured;
    int moved_wrong; /* after the commit, a row was not the captured one; the worker's until submit
                      */

    /* From the first layer; the same for all. */
    int32_t nodes, heads, latent_dim, rope_dim, page_size, prefix_len;
    float softmax_scale;
    enum tv_dtype dtype, out_dtype;
    int32_t *parents;    /* [nodes] */
    int32_t *pages;      /* [full_pages]: prefix pages that no round writes; pinned */
    int32_t full_pages;  /* 0 on a device whose memory is copied instead */
    int32_t tail_start;  /* first row that was copied */
    int32_t layer_count; /* of the model */
    struct tv_shadow_layer_copy *layers;

    /* Captured inside a device (device.c): full_pages then counts the pages of all rows, the last
     * ones the round's own copies. */
    int on_device;
    int32_t *table;               /* [max_pages]: the sequence's pages */
    size_t arena_at, arena_bytes; /* bytes 0: it has no part of the arena */
    int32_t *moved;               /* [moved_count]: the nodes that were committed */
    int32_t moved_count;

    struct tv_shadow_attachment attached;
    struct tv_shadow_store *stores; /* the memory of all these arrays */
    tv_shadow_done *done;
    void *done_context;
    int64_t submitted_us;
    struct tv_shadow_round *next;
};

/* One file of a violation, newest last. */
struct tv_shadow_file {
    int32_t n;
    int64_t at_unix_ms;
    int64_t bytes;    /* 0: it could not be written */
    const char *kind; /* "kernel" or "path"; static */
};
struct tv_shadow_files {
    const char *dir; /* NULL: nothing is written */
    int32_t next_n, count;
    int64_t write_failures;
    struct tv_shadow_file files[TV_SHADOW_FILES_MAX];
};

struct tv_shadow {
    struct tv_shadow_params params;
    char *state_dir;
    const struct tv_model *model;
    struct tv_cache *cache;
    struct tv_kernels *ref;          /* the thread's */
    struct tv_shadow_device *device; /* NULL: rounds are captured in host memory */
    uint64_t rounds_seen;            /* worker thread: the sampling counter */
    int running;                     /* the thread exists */
    pthread_t thread;
    struct tv_shadow_pool pool;

    atomic_int stopping; /* relaxed: oracles look at it between two steps; set under the lock */

    /* Held while an oracle reads one prefix page or row, and when a judged round loses them: a live
     * round that lacks pages waits for that one read, others for none. Before pins_lock. */
    pthread_mutex_t reads_lock;
    pthread_mutex_t pins_lock; /* guards pins and pinned; for a few stores */
    uint32_t *pins;            /* [pages of the cache]: rounds that hold the page; NULL: no cache */
    int64_t pinned;            /* pages that some round holds */

    pthread_mutex_t lock; /* before all others; guards what follows, and done of every round in the
                             queue or judged */
    pthread_cond_t changed;
    struct tv_shadow_round *first, *last; /* waited-for rounds first, each part oldest first */
    struct tv_shadow_round *judged;       /* the one that the thread has; NULL: none */
    int64_t exact, near_tie, violation, skipped;
    struct tv_parity_kernel worst;
    struct tv_histogram logit_errors; /* of the path oracle's rounds */
    struct tv_shadow_files files;
};

/* 1: an oracle gives up at its next step. Any thread. */
int tv_shadow_stopping(const struct tv_shadow *shadow);
/* Adds one judged (or skipped) round to the totals. Any thread. */
void tv_shadow_count(struct tv_shadow *shadow, enum tv_shadow_verdict verdict);

/* pool.c: the memory of rounds; any thread. */
void tv_shadow_pool_init(struct tv_shadow_pool *pool, size_t bytes_max);
void tv_shadow_pool_finish(struct tv_shadow_pool *pool);
/* A whole list of a round's stores; some are kept. NULL: no effect. */
void tv_shadow_pool_give_back(struct tv_shadow_pool *pool, struct tv_shadow_store *stores);
/* `bytes` for this round, with any content, until the round is freed; NULL and round->failed set
 * when over the bound. */
void *tv_shadow_round_take(struct tv_shadow_round *round, size_t bytes);

/* pins.c: hold the round's prefix pages. -ENOSPC: a sampled round beyond its share of the pool. */
int tv_shadow_pin(struct tv_shadow *shadow, struct tv_shadow_round *round);
/* Around the read of one page or row, not more. 0: they are gone, and nothing is to be left. */
int tv_shadow_pages_enter(const struct tv_shadow_round *round);
void tv_shadow_pages_leave(const struct tv_shadow_round *round);
/* Nothing is held: no effect. With reads_lock when another thread may read the round. */
void tv_shadow_unpin(struct tv_shadow *shadow, struct tv_shadow_round *round);
/* A tv_cache_reclaim (context: the shadow): drops judgements, oldest first, until pages are free;
 * those that are waited for, and the one under way, only when the others do not suffice, and none
 * when all of them would not. */
void tv_shadow_reclaim(void *context, int64_t pages);
/* shadow.c: one verdict of two. */
enum tv_shadow_verdict tv_shadow_both(enum tv_shadow_verdict a, enum tv_shadow_verdict b);

/* capture.c. Device memory to host memory, on the worker's thread and in its order; then wait. */
int tv_shadow_fetch(const struct tv_shadow *shadow, void *host, const void *device, size_t bytes);
int tv_shadow_fetch_sync(const struct tv_shadow *shadow);
void tv_shadow_capture(struct tv_shadow *shadow, struct tv_shadow_round *round, int32_t layer,
                       const struct tv_verify_attn *attn);
void tv_shadow_round_free(struct tv_shadow *shadow, struct tv_shadow_round *round);
size_t tv_shadow_round_row_bytes(const struct tv_shadow_round *round);
/* The round's KV rows of one layer as pages [page_count, page_size, row], unused rows NaN. kv must
 * hold tv_shadow_round_kv_bytes. */
size_t tv_shadow_round_kv_bytes(const struct tv_shadow_round *round);
int32_t tv_shadow_round_page_count(const struct tv_shadow_round *round);
/* -ECANCELED: the pages were needed elsewhere. */
int tv_shadow_round_kv(const struct tv_shadow_round *round, int32_t layer, void *kv);
/* Element i of KV row `row` (below prefix_len + nodes) of a layer; between enter and leave. */
float tv_shadow_round_kv_at(const struct tv_shadow_round *round, int32_t layer, int32_t row,
                            int32_t i);

/* What is the same for all layers. */
void tv_shadow_round_shape(struct tv_shadow_round *round, const struct tv_verify_attn *attn);

/* Element i of what the kernel gave for a layer, [nodes, heads, latent]. */
float tv_shadow_round_out_at(const struct tv_shadow_round *round, int32_t layer, size_t i);

/* 1: rows and queries may be bf16, but the kernels' sums are f32 and their probabilities unrounded,
 * so that f32's bounds hold (every backend in host memory). 0: the bf16 row of the contract. */
int tv_shadow_sums_f32(const struct tv_shadow *shadow, enum tv_dtype dtype);
/* commit.c: what the commit left. A violation leaves a reproducer, but for a round on demand, whose
 * comparison does. */
enum tv_shadow_verdict tv_shadow_commit_judge(struct tv_shadow *shadow,
                                              const struct tv_shadow_round *round,
                                              const struct tv_parity_case *parity_case);
/* kernel.c: a layer's result, [nodes, heads, latent] and [nodes, heads], against the oracle's. */
struct tv_shadow_difference {
    struct tv_parity_kernel kernel;
    double lse_abs;
};
struct tv_shadow_difference tv_shadow_difference_of(const struct tv_shadow_round *round,
                                                    const float *out, const float *lse,
                                                    const void *fast, enum tv_dtype fast_dtype,
                                                    const float *fast_lse);
/* How near probabilities lie to a border of bf16 is chance, and a kernel may scale them before it
 * rounds: where one token of one row decides, a draw says little, so this many scalings are looked
 * at, and the worst is nearly the worst there is. With four, two of 6,463 right rounds were called
 * wrong. */
#define TV_SHADOW_ROUNDINGS 32
void tv_shadow_worst_join(struct tv_parity_kernel *worst, const struct tv_parity_kernel *layer);
/* kernel.c: the kernel oracle over all layers of a round, on the shadow thread. 0 and *ret_worst,
 * *ret_within; a negative errno when it could not run. Violating layers leave a reproducer. */
int tv_shadow_kernel_judge(struct tv_shadow *shadow, const struct tv_shadow_round *round,
                           struct tv_parity_kernel *ret_worst, int *ret_within);

/* rows.c: the bound of logits and rows whose values spread like this, and the comparison of KV rows
 * and queries during a pass. Both members outlive the pass; equal starts as 1. */
double tv_shadow_spread(const float *values, size_t count);
double tv_shadow_logit_bound(double std);
struct tv_rows_check {
    const struct tv_shadow_round *round; /* captured whole */
    const struct tv_path_rows *rows;
    int attention; /* the kernel may round probabilities: what it gave is judged and taken over */
    int32_t v_dim; /* of the model, for that */
    double tie;    /* a router's choice within it, relative, is no choice; f32 rows */
    double difference, norm; /* squares, of the layer's attention so far */
    int equal;
};
/* After the pass: 1 when everything was within its bound. */
int tv_shadow_rows_equal(const struct tv_rows_check *check);
struct tv_path_watch tv_shadow_rows_watch(struct tv_rows_check *check);
/* 1: which experts the row has is decided by less than the noise, so its deeper part may be that of
 * either choice. */
int tv_shadow_row_undecided(const struct tv_rows_check *check, int32_t row);

/* draw.c: one row's token. */
struct tv_shadow_draw {
    int32_t token; /* -1: a logit is not finite */
    double margin; /* between the two best scores; INFINITY: one token passed the filters */
};
int tv_shadow_draw(const float *logits, int32_t vocab, const struct tv_sampling *sampling,
                   int32_t position, struct tv_shadow_draw *ret_draw);
double tv_shadow_gumbel(uint64_t seed, int32_t position, int32_t token);
enum tv_shadow_purpose {
    TV_SHADOW_FOR_TARGET = 0,
    TV_SHADOW_FOR_COIN = 1,
    TV_SHADOW_FOR_RESIDUAL = 2
};
/* In (0, 1), and the Gumbel value of it. */
double tv_shadow_uniform(uint64_t seed, int32_t position, int32_t token,
                         enum tv_shadow_purpose purpose);
double tv_shadow_noise(uint64_t seed, int32_t position, int32_t token,
                       enum tv_shadow_purpose purpose);
/* The distribution that the draw is from, dense. -EDOM: a logit is not finite; -ENOMEM. */
int tv_shadow_target(const float *logits, int32_t vocab, const struct tv_sampling *sampling,
                     double *ret_probs);

/* rules.c: what follows a node with children under ratio_wor; child -1: the token is of the
 * residual; token -1: the row is not finite. */
struct tv_shadow_choice {
    int32_t child, token;
    double margin; /* the smallest relative change of the target that turns a decision */
};
int tv_shadow_ratio(const float *logits, int32_t vocab, const struct tv_sampling *sampling,
                    const struct tv_tree *tree, int32_t node, int32_t position,
                    struct tv_shadow_choice *ret_choice);

/* redraw.c: draw the walk again from logits, by code that serves nothing. */
struct tv_shadow_redraw {
    int accepted_equal, pending_equal;
    int near_tie; /* the row where they part was undecided within the noise */
};
/* row(context, node) gives a node's logits, or NULL where there are none. */
typedef const float *tv_shadow_row(void *context, int32_t node);
/* rules.c: which nodes pass with all their ancestors under typical; passes [nodes]. -ENODATA: a row
 * that decides is not there; -EDOM: it is not finite; -ENOMEM. */
int tv_shadow_typical(int32_t vocab, const struct tv_parity_case *parity_case, tv_shadow_row *row,
                      void *row_context, uint8_t *passes, double *ret_margin);
int tv_shadow_redraw(int32_t vocab, const struct tv_parity_case *parity_case, tv_shadow_row *row,
                     void *row_context, struct tv_shadow_redraw *ret_redraw);

/* files.c: reproducers under the state directory. add: any thread; kind is static text. */
void tv_shadow_files_open(struct tv_shadow_files *files, const char *dir);
struct tv_shadow_part {
    const void *data;
    size_t bytes;
};
void tv_shadow_files_add(struct tv_shadow *shadow, const char *kind,
                         const struct tv_shadow_part *parts, int32_t part_count);
int tv_shadow_files_read(struct tv_shadow *shadow, int32_t n, const char **ret_kind,
                         char **ret_data, size_t *ret_bytes);

/* reproducer.c: the two kinds. */
void tv_shadow_reproduce_kernel(struct tv_shadow *shadow, const struct tv_shadow_round *round,
                                int32_t layer, const void *kv, const float *out, const float *lse);
void tv_shadow_reproduce_path(struct tv_shadow *shadow, const struct tv_parity_case *parity_case);

#endif
