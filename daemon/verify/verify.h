/*
 * verify.h - one verification: lay out the trees, run the model, apply the acceptance rule, commit.
 *
 * Defines the engine that sched/ drives: an operation table, so that tests can put an engine with
 * fixed answers behind the same protocol. All functions belong to the worker thread, but for those
 * that say otherwise.
 */
#ifndef TV_VERIFY_VERIFY_H
#define TV_VERIFY_VERIFY_H

#include <stdint.h>

#include "model/model.h"
#include "proto/request.h"
#include "proto/response.h"

/* The KV sequence of one session, one-shot call or comparison. */
struct tv_context;

/* How tokens are drawn and where a round ends. */
struct tv_round_rule {
    enum tv_rule rule;
    struct tv_sampling sampling;
    int32_t stop_ids[TV_STOP_IDS_MAX];
    int32_t stop_count;
    int32_t max_len;                       /* committed + pending may not exceed it */
    double typical_epsilon, typical_delta; /* rule typical */
    /* Benchmarks, or NULL and 0: whether the first child of a node is accepted is a coin of the
     * position, at rates[depth of the child - 1] (the last one for all deeper), whatever the rule.
     */
    const double *rates; /* [rate_count] */
    int32_t rate_count;
};

/* The token drawn after a prefill, or at the end of a walk. */
struct tv_drawn {
    int32_t token;
    enum tv_finish finish;
    int has_margin;
    float margin; /* smallest over the rows used */
};

/* Called once a round's accepted rows are where they stay: the last `count` committed rows of the
 * sequence are the tree's nodes[0..count). */
typedef void tv_round_commit_hook(void *context, const struct tv_cache_seq *seq,
                                  const int32_t *nodes, int32_t count);

struct tv_round_in {
    struct tv_context *context;
    const struct tv_tree *tree; /* checked; node 0 = pending */
    struct tv_round_rule rule;
    int commit;      /* 0: KV and length stay as they were (one-shot, parity) */
    int hold;        /* not committed: the rows stay behind the committed ones until `settle` */
    int want_logits; /* all rows' logits on the host, for the client */
    int lend_logits; /* the same for an oracle, which must not change the answer: unchecked */
    int32_t top_k;   /* > 0: top-k and lse of all rows */
    int want_hidden; /* what the taps see of all rows; project: its projection instead */
    int project;
    int score; /* log-probabilities of the nodes instead of a walk; commit is 0 */
    /* The rows that the client gets, which must be finite; NULL: all of them. */
    const struct tv_rows *logits_rows, *topk_rows, *hidden_rows;
    tv_model_layer_hook *hook;
    /* With commit 0 the rows are moved for its sake and taken back. NULL: not called. */
    tv_round_commit_hook *committed;
    void *hook_context; /* of both */
};

/* Arrays are the engine's and valid until its next call. */
struct tv_round_out {
    enum tv_code code; /* TV_OK, or why this round has no result (nothing committed) */
    char detail[160];  /* for code */
    struct tv_cache_shortage shortage; /* for TV_KV_FULL */
    int32_t accepted_count;
    const int32_t *nodes;    /* [accepted_count], nodes[0] = 0 */
    const float *logprobs;   /* [accepted_count]: of accepted tokens 1.., then of pending */
    struct tv_drawn end;     /* pending token, finish, smallest margin of the path */
    const float *logits;     /* host [nodes, vocab] when wanted */
    const int32_t *topk_ids; /* host [nodes, top_k] */
    const float *topk_logits, *topk_lse; /* host [nodes, top_k], [nodes] */
    const float *hidden; /* host [nodes, taps, hidden], or projected [nodes, dim], when wanted */
    /* [nodes] for a score: of each node's token in its parent's row at temperature 1; node 0 has
     * -INFINITY. Then there is no path: accepted_count is 1, end has no token. */
    const float *scores;
    int64_t device_us;
};

struct tv_engine;

/* What the taps see of a slice of known tokens. */
struct tv_slice_hidden {
    int32_t rows;      /* of the last ones of the slice; 0: none is wanted */
    int project;       /* their projection instead */
    const float *data; /* set by the engine: host [rows, taps, hidden] or [rows, dim], its own until
                        * the next call */
};

/* Known tokens that ride along in a launch of rounds. */
struct tv_rider {
    struct tv_context *context; /* none of the rounds' */
    const int32_t *tokens;
    int32_t count;                    /* with the rounds' nodes within prefill_rows */
    const struct tv_round_rule *rule; /* not NULL: draw the next token too; the rounds' nodes are
                                       * fewer than rows_max then */
    struct tv_slice_hidden hidden;
    /* Set by the engine. What prefill would say; -EAGAIN: no round came to run, nor did it. */
    int rc;
    struct tv_drawn drawn;
    struct tv_cache_shortage shortage;
    int64_t device_us; /* of the launch */
};

/* Any call that works on the device may say -ENOTRECOVERABLE: the device is lost, this call has
 * committed nothing, and no later one will succeed. */
struct tv_engine_ops {
    int (*context_open)(struct tv_engine *engine, struct tv_context **ret_context);
    void (*context_close)(struct tv_engine *engine, struct tv_context *context);
    int32_t (*context_len)(const struct tv_context *context);
    int (*truncate)(struct tv_engine *engine, struct tv_context *context, int32_t len);
    /* A context of its own with the first len rows of this one, which share what cannot change. */
    int (*fork)(struct tv_engine *engine, const struct tv_context *context, int32_t len,
                struct tv_context **ret_context);
    /* Prefix reuse, in engines with a cache; as tv_cache_adopt and tv_cache_publish. */
    int (*adopt)(struct tv_engine *engine, struct tv_context *context,
                 const struct tv_cache_key *keys, int32_t count);
    void (*publish)(struct tv_engine *engine, struct tv_context *context, int32_t first,
                    const struct tv_cache_key *keys, int32_t count);
    /* Rows as bytes, for a snapshot; NULL, all four, in engines whose contexts have none. seq:
     * where a context's rows are. restore: a context of len rows in pages, as tv_cache_restore.
     * page_read and page_write as tv_cache_page_read and tv_cache_page_write. */
    const struct tv_cache_seq *(*context_seq)(const struct tv_context *context);
    int (*restore)(struct tv_engine *engine, const struct tv_cache_seq *like,
                   struct tv_context **ret_context, struct tv_cache_shortage *ret_shortage);
    int (*page_read)(struct tv_engine *engine, int32_t page, void *host);
    int (*page_write)(struct tv_engine *engine, int32_t page, const void *host);
    /* Append `count` (<= prefill_rows) known tokens as KV. When `rule` is not NULL, also draw the
     * next token from the last row into *ret_drawn. 0; -ENOSPC with *ret_shortage; -EDOM for a
     * non-finite logit; -EIO. On failure the context is as before. */
    int (*prefill)(struct tv_engine *engine, struct tv_context *context, const int32_t *tokens,
                   int32_t count, const struct tv_round_rule *rule, struct tv_drawn *ret_drawn,
                   struct tv_cache_shortage *ret_shortage);
    /* The same prefill, which also hands out hidden rows; NULL in engines without taps. */
    int (*prefill_hidden)(struct tv_engine *engine, struct tv_context *context,
                          const int32_t *tokens, int32_t count, const struct tv_round_rule *rule,
                          struct tv_drawn *ret_drawn, struct tv_cache_shortage *ret_shortage,
                          struct tv_slice_hidden *hidden);
    /* Run the rounds of `count` different contexts in one launch; each has its own outcome. */
    int (*verify)(struct tv_engine *engine, const struct tv_round_in *in, int32_t count,
                  struct tv_round_out *out);
    /* The same, and in the same launch what prefill does of the rider's tokens, which come to have
     * pages when all rounds have theirs. Neither the rounds nor the rider have other results for
     * it. NULL: the engine has no such launches. */
    int (*verify_shared)(struct tv_engine *engine, const struct tv_round_in *in, int32_t count,
                         struct tv_round_out *out, struct tv_rider *rider);
    /* End a held round: its rows nodes[0..count), ascending, are committed and the others given
     * back; count 0: all of them, also when none is held. -EIO: all are given back. */
    int (*settle)(struct tv_engine *engine, struct tv_context *context, const int32_t *nodes,
                  int32_t count);
    /* Repeat the start's self-test and compare its logits' hash. 0, or negative errno. */
    int (*self_test)(struct tv_engine *engine, char *detail, size_t detail_bytes);
    /* 1 and *ret_steps: how much work the calls above have done so far, modulo 2^64; it moves while
     * one runs, however long that takes. 0: not counted. NULL: the same. Any thread. */
    int (*progress)(const struct tv_engine *engine, uint64_t *ret_steps);
    void (*destroy)(struct tv_engine *engine);
};

/* What products that are not exact cost: they beside exact ones on the start's text and tree. */
struct tv_rounding {
    int32_t rows;       /* compared; 0: products are exact */
    int32_t top1_equal; /* rows with the same best token */
    double kl_mean;     /* of the exact distribution from the other one, nats */
    double logit_max;   /* largest difference of a logit */
};

/* What every engine tells about itself; constant after creation, but for the last two. */
struct tv_engine {
    const struct tv_engine_ops *ops;
    int32_t vocab, max_len, nodes_max, requests_max;
    int32_t rows_max;     /* nodes of all rounds of one verify call together */
    int32_t prefill_rows; /* largest slice */
    int32_t rider_rows;   /* tokens that ride along in a launch, at most; 0: none do */
    /* Of one path of this checkpoint, measured by the start's judge; with products that are not
     * exact no less than what they move a logit by. */
    double noise;
    struct tv_rounding rounding;
    /* The engine's own: others ask tv_engine_facts. */
    struct tv_model *model; /* NULL in an engine without one */
    struct tv_cache *cache; /* NULL in an engine without one */
    struct tv_kernels *kernels;
    uint64_t allocations_start; /* of the device's memory, before the first call */
    /* Set by who drives the engine, or NULL: called in the middle of a prefill, where other
     * contexts may have their rounds, from settle of a held one to the end: verify, settle,
     * truncate, publish and context_close (beside context_len, context_seq and progress), and
     * nothing else. */
    void (*between)(void *context);
    void *between_context;
    /* Measurements: slices that nobody draws from, or looks at, get random rows and no pass. */
    int invents_rows;
    uint64_t invents_seed;
};

/* What an engine is made of; constant, texts live as long as the engine. */
struct tv_engine_facts {
    const char *name, *architecture, *weights_dtype; /* of the model; "fixed" and "none" without */
    int32_t layers, heads;
    uint8_t model_id[32];
    const uint8_t *tokenizer_sha256;     /* [32], or NULL */
    const char *kv_dtype;                /* of the cache; "none" without */
    const char *products;                /* of the model: "exact" (also without) or "bf16" */
    const struct tv_cache_params *pages; /* how rows lie; NULL without a cache */
    enum tv_cache_prefix prefix;
    const char *backend, *variant;   /* of the kernels; "none" without */
    int64_t kv_bytes, weights_bytes; /* of the pool; of the model */
    int weights_apart;  /* in a device's own memory: only the worker may copy from it */
    unsigned synthetic; /* TV_SYNTHETIC_ bits */
    /* Since the engine was created; -1: memory is the host's. */
    int64_t device_allocations;
    int32_t hidden_dim;  /* values of a hidden row */
    int32_t tap_count;   /* 0: no hidden rows are handed out */
    const int32_t *taps; /* [tap_count] */
    int32_t project_dim; /* 0: there is no projection */
};
/* Any thread. */
void tv_engine_facts(const struct tv_engine *engine, struct tv_engine_facts *ret_facts);
/* The pool's accounting, zeros without a cache. Any thread. */
/* tv_cache_room of its pool; worker thread. */
int tv_engine_room(const struct tv_engine *engine, int64_t pages,
                   struct tv_cache_shortage *ret_shortage);
void tv_engine_pages(const struct tv_engine *engine, struct tv_cache_counts *ret_counts);

/* How many hold a page of the pool. */
int32_t tv_engine_page_holders(const struct tv_engine *engine, int32_t page);

/* Rows of the pool that the self-test keeps for good, at most. */
#define TV_SELF_TEST_ROWS 40

/* The start's self-test as it ran: a canned text through prefill, a canned tree behind it through
 * verify. All host memory. */
struct tv_self_test_run {
    const int32_t *text; /* [text_len] */
    int32_t text_len;
    const int32_t *text_rows; /* [text_count]: rows of the text whose logits prefill gave */
    int32_t text_count;
    const float *text_logits; /* [text_count, vocab] */
    const struct tv_tree *tree;
    const float *tree_logits; /* [tree->count, vocab] */
};
/* Who judges it: an oracle that shares no code with the forward pass. Given by who creates the
 * engine; verify/ does not know whose it is. */
struct tv_judge {
    void *context;
    tv_model_layer_hook *layer; /* sees every layer of the tree's launch */
    /* 0 and *ret_noise, the checkpoint's noise; -EIO: one of the forms is not the model, or the
     * noise is implausible; -EDOM: the model itself has logits that are not finite; detail says
     * which; -ENOMEM. */
    int (*judge)(void *context, const struct tv_self_test_run *run, double *ret_noise, char *detail,
                 size_t detail_bytes);
};

/* The real engine on a loaded model and its cache (both outlive it). Runs the self-test: attention
 * against the naive kernel, both forms against the judge (NULL: nobody, and noise stays 0). -EIO:
 * it failed; -EDOM: the checkpoint is what failed, in the judge's own arithmetic; detail says how.
 */
int tv_verify_engine_create(struct tv_kernels *kernels, struct tv_model *model,
                            struct tv_cache *cache, const struct tv_judge *judge,
                            struct tv_engine **ret_engine, char *detail, size_t detail_bytes);

/* The gap of the two best logits below which two paths may decide apart: the noise of both. */
double tv_engine_near_tie(const struct tv_engine *engine);

#endif
