/*
 * session.h - what the server knows of a session: token history, digest chain, pending token,
 * sequence numbers, lease, and the newest rounds for retries. Host state only.
 *
 * Decides whether a round may run, is a replay, joins the running one, or is refused. It never
 * calls an engine; the KV context of a session is only carried. Everything here is guarded by the
 * table's lock, except what tv_session_stage writes behind the committed tokens.
 */
#ifndef TV_SESSION_SESSION_H
#define TV_SESSION_SESSION_H

#include <pthread.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

#include "base/digest.h"
#include "base/feed.h"
#include "proto/request.h"
#include "proto/response.h"

#define TV_SESSION_EXPIRED_MAX   4096        /* ids remembered for 410 */
#define TV_SESSION_KEYS_MAX      4096        /* calls remembered by their Idempotency-Key */
#define TV_SESSION_KEY_BYTES_MAX (16u << 20) /* of their answers */
#define TV_SESSION_KEY_US        (INT64_C(600) * 1000000) /* and as long as what they made lives */

struct tv_context; /* an engine's KV sequence; carried, never looked into */

/* Rows of logits or hidden rows that GET .../tensor serves. Immutable after creation. */
struct tv_session_fetch {
    atomic_int refs; /* relaxed up, acquire-release down: the last holder frees */
    int32_t seq;
    int32_t planes; /* of hidden rows, one for each tap; 0: the rows have no planes */
    int32_t row_count, dim, node_count;
    int32_t *rows; /* [row_count] node indices, owned */
    int32_t path_count;
    int32_t *path; /* [path_count] accepted nodes, owned; the last one is where the walk ended */
    enum tv_tensor_dtype dtype;
    float *data;  /* [planes,] [row_count, dim], owned */
    size_t bytes; /* of data */
};
struct tv_session_fetch *tv_session_fetch_ref(struct tv_session_fetch *fetch);
void tv_session_fetch_unref(struct tv_session_fetch *fetch); /* NULL is fine */

/* The answer of one of a session's newest rounds, as it was sent. */
struct tv_session_kept {
    int32_t seq;
    uint8_t body_hash[32];
    char *body; /* owned */
    size_t body_bytes;
    struct tv_session_fetch *fetch;   /* reference held, or NULL; of the last round alone */
    struct tv_session_fetch *hidden;  /* the same of hidden rows */
    uint64_t fetch_serial;            /* in the order that rows to fetch came */
    int32_t leaf;                     /* verify: where its path ended; else -1: no guess holds */
    size_t outcome_at, outcome_bytes; /* skipped: its outcome's text within body; else 0 bytes */
};
void tv_session_kept_finish(struct tv_session_kept *kept);

/* A round whose nodes are in the context behind the committed rows until the client settles it. */
struct tv_session_held {
    int32_t seq; /* 0 = none */
    enum tv_rule rule;
    int32_t count;
    int32_t *tokens, *parents; /* [count]: its tree; tokens owns all three arrays */
    int32_t *proposed; /* [proposed_count]: the path that the rule proposed; rule client: none */
    int32_t proposed_count, pending;
    /* Settled by the commit_prev of a round that then failed: its retry says so once more. */
    int settled;
    int32_t len_before;
};
/* Copies what an answer tells of a round. 0 or -ENOMEM. */
int tv_session_held_make(int32_t seq, enum tv_rule rule, const struct tv_tree *tree,
                         const int32_t *proposed, int32_t proposed_count, int32_t pending,
                         struct tv_session_held *ret_held);
void tv_session_held_finish(struct tv_session_held *held);
struct tv_session;
/* Rows that its context has: the committed ones, and those of a held round. */
int32_t tv_session_rows(const struct tv_session *session);

#define TV_SESSION_DEPTHS_MAX 16
#define TV_SESSION_APART_MAX  15

/* What the drafts of a session's committed verifies were good for; zeros at first. */
struct tv_session_drafts {
    /* [d]: walks that had a draft to try behind depth d, and those that accepted one. */
    int32_t tried[TV_SESSION_DEPTHS_MAX], taken[TV_SESSION_DEPTHS_MAX];
    int64_t nodes, levels; /* drafts, and levels of them, of the trees that had any */
    /* The newest times between the end of a launch and the start of the next, a ring. */
    int64_t apart_us[TV_SESSION_APART_MAX];
    int32_t apart_count, apart_next;
    int64_t ended_us; /* of its last launch; 0: none */
};
/* A walk went along path[0..path_count), which begins with node 0. */
void tv_session_drafts_take(struct tv_session_drafts *drafts, const struct tv_tree *tree,
                            const int32_t *path, int32_t path_count, enum tv_finish finish);
/* One of its verifies was launched from start_us to end_us. */
void tv_session_drafts_ran(struct tv_session_drafts *drafts, int64_t start_us, int64_t end_us);

struct tv_sessions;

struct tv_session {
    struct tv_session *next; /* bucket, or the list of the gone */
    const struct tv_sessions *table;
    char id[32];
    char principal[33];

    int32_t *tokens; /* [token_capacity], owned; the first len are committed */
    int32_t len, token_capacity;
    struct tv_digest root;     /* of no token: model and salt */
    struct tv_digest digest;   /* of the first len tokens */
    struct tv_digest *borders; /* [border_capacity], owned; of the first (i + 1) * page_size */
    int32_t border_capacity;
    int32_t pending;
    int32_t next_seq;
    enum tv_finish finish;

    struct tv_sampling_state sampling;
    int32_t stop_ids[TV_STOP_IDS_MAX];
    int32_t stop_count;
    int32_t max_len; /* committed + pending may not exceed it */

    int32_t lease_s;
    int64_t lease_expires_us; /* monotonic; decides */
    int64_t idle_us;          /* when its last operation ended */
    int64_t lease_expires_unix_ms;

    int64_t verify_rounds, verify_tokens; /* for the mean acceptance length */
    struct tv_session_drafts drafts;

    int busy;            /* an operation is queued or running */
    int32_t holds;       /* comparisons of it under way: it does not expire */
    int gone;            /* deleted or expired: out of the table */
    int restored;        /* it was another process's: its clients know an older epoch */
    int32_t running_seq; /* of that operation; 0: it takes no seq */
    uint8_t running_hash[32];
    void *operation; /* sched/'s; valid while busy */
    void *behind;    /* sched/'s: a conditional round that waits for the one under way, or NULL */
    int32_t behind_seq; /* of that; 0 without one */
    uint8_t behind_hash[32];
    struct tv_session_held held;

    struct tv_session_kept kept[TV_REPLAY_ROUNDS_MAX]; /* the first kept_count, oldest first */
    int32_t kept_count;
    size_t kept_bytes;          /* of their bodies */
    struct tv_context *context; /* the engine's; closed before tv_session_destroy */
    struct tv_feed *feed;       /* reference held: what its rounds do, for those who follow it */
};

/* Why a session's feed has ended. */
enum tv_session_end { TV_SESSION_DELETED = 1, TV_SESSION_LEASE_OVER, TV_SESSION_CLOSED };

struct tv_sessions_params {
    int32_t sessions_max;
    int32_t page_size;     /* distance of the kept digests */
    int32_t model_max_len; /* positions are below it */
    uint8_t model_id[32];
};

struct tv_session_tomb {
    uint64_t key;
    char id[32];
    char principal[33];
};

/* Somebody who has entries. */
struct tv_session_key_owner {
    char principal[33];
    int32_t count; /* of them; 0: this place is free */
};

/* One call that came with an Idempotency-Key. */
struct tv_session_key {
    struct tv_session_key_owner *owner;
    char key[TV_KEY_BYTES_MAX + 1];
    uint64_t serial;  /* in the order they began */
    char session[32]; /* in whose path it came, or "" */
    uint8_t body_hash[32];
    void *operation; /* sched/'s, while it is under way */
    int64_t done_us;
    char made[32]; /* the session that it created, or "" */
    char *body;    /* its answer, owned */
    size_t body_bytes;
};

struct tv_session_keys {
    uint64_t *hashes;               /* [TV_SESSION_KEYS_MAX], owned; 0: the entry is free */
    struct tv_session_key *entries; /* [TV_SESSION_KEYS_MAX], owned */
    /* [TV_SESSION_KEYS_MAX + 1], owned: one more than can have any */
    struct tv_session_key_owner *owners;
    uint64_t serial;
    int32_t running; /* entries of calls that are under way */
    size_t bytes;    /* of the answers */
};

struct tv_sessions {
    pthread_mutex_t lock;
    struct tv_sessions_params params;
    char epoch[17];
    struct tv_session **buckets; /* [bucket_count], owned */
    size_t bucket_count;
    int32_t count; /* live ones and those being created */
    /* Since the start: published; removed by somebody; removed because their lease was over. */
    int64_t created_count, closed_count, expired_count;
    int64_t restored_count;  /* of the published, those that a snapshot had */
    struct tv_session *gone; /* idle and out of the table; the worker closes and destroys them */
    struct tv_session_tomb *tombs; /* [TV_SESSION_EXPIRED_MAX], owned; a ring */
    int32_t tomb_count, tomb_next;
    struct tv_session_keys keys;
    uint64_t fetch_serial; /* of the newest rows that are kept to be fetched */
    /* Called with the lock when a feed that somebody follows has something new; NULL: nobody can.
     */
    void (*bell)(void *context);
    void *bell_context;
};

/* Draws the epoch. 0 or negative errno; finish copes with a failed init. */
int tv_sessions_init(struct tv_sessions *table, const struct tv_sessions_params *params);
/* Every context must be closed. */
void tv_sessions_finish(struct tv_sessions *table);

/* A session for a create call: has its id, sampling (seed drawn when absent), stop rule and room
 * for the prompt; counted, not yet found by anybody. -EBUSY: sessions_max; -ENOMEM; -EIO. */
int tv_sessions_build(struct tv_sessions *table, const struct tv_request *request,
                      const char *principal, struct tv_session **ret_session);
/* The same for a fork: its first len tokens, sampling (request's seed, when it has one), stop rule
 * and lease are the parent's. -EBUSY, -ENOMEM, -EIO. */
int tv_sessions_fork(struct tv_sessions *table, const struct tv_session *parent, int32_t len,
                     const struct tv_request *request, struct tv_session **ret_session);
/* The prompt is in its context: everybody may find it from now on. */
void tv_sessions_publish(struct tv_sessions *table, struct tv_session *session, int64_t now_us);
/* One that a snapshot had, with its context: everybody may find it, for left_ms or its lease. 0;
 * -EEXIST: its id is known; -EBUSY: sessions_max. The caller's on failure. */
int tv_sessions_restore(struct tv_sessions *table, struct tv_session *session, int64_t left_ms,
                        int64_t now_us);
/* The create failed: back to nothing. The context goes the way of the gone. */
void tv_sessions_discard(struct tv_sessions *table, struct tv_session *session);

/* TV_OK; TV_SESSION_NOT_FOUND (another principal's included); TV_SESSION_EXPIRED. An idle session
 * whose lease is over expires here. */
enum tv_code tv_sessions_find(struct tv_sessions *table, const char *id, const char *principal,
                              int64_t now_us, struct tv_session **ret_session);
/* Out of the table; goes to the gone at once when idle, else when tv_session_idle is called. Its
 * feed ends. */
void tv_sessions_remove(struct tv_sessions *table, struct tv_session *session,
                        enum tv_session_end why);
/* Round `number` did this: takes over the text (malloc'd; NULL: no memory for one). */
void tv_session_tell(struct tv_session *session, int32_t number, char *text, size_t bytes);
/* The number behind which every later text of its feed stands. */
int32_t tv_session_told(const struct tv_session *session);
/* As when its lease is over; it is idle. */
void tv_sessions_expire(struct tv_sessions *table, struct tv_session *session);
/* Expire what is idle and over its lease; the earliest end of the others' leases, or INT64_MAX. */
int64_t tv_sessions_sweep(struct tv_sessions *table, int64_t now_us);
/* States of the principal's sessions: *ret_states malloc'd, each to be destroyed. 0 or -ENOMEM. */
int tv_sessions_list(struct tv_sessions *table, const char *principal, int64_t now_us,
                     struct tv_session_state **ret_states, int32_t *ret_count);
/* keys.c. What is known of this principal's key, or NULL; an entry whose time is over goes. */
struct tv_session_key *tv_session_key_find(struct tv_sessions *table, const char *principal,
                                           const char *key, int64_t now_us);
/* Is this the call that the entry knows: same path and body? */
int tv_session_key_same(const struct tv_session_key *entry, const struct tv_request *request);
/* 0: as many as there may be are under way. */
int tv_session_key_room(const struct tv_sessions *table);
/* Remember a call that nothing is known of; operation is not NULL. Without a free place the oldest
 * goes of whoever has the most, this principal first. NULL: there is no room. */
struct tv_session_key *tv_session_key_begin(struct tv_sessions *table, const char *principal,
                                            const char *key, const struct tv_request *request,
                                            void *operation);
/* It ended with this answer, which the table takes over, having made a session (or ""); body NULL:
 * it was refused, and the key is free. */
void tv_session_key_end(struct tv_sessions *table, struct tv_session_key *entry, const char *made,
                        char *body, size_t body_bytes, int64_t now_us);
/* The call that made this session, when it came with a key and has ended; NULL: nothing is known.
 */
const struct tv_session_key *tv_session_key_made(const struct tv_sessions *table,
                                                 const struct tv_session *session);
/* The same of another process's table, into this one, with the answer, which *key gives up; not
 * where the principal has used that key since. */
void tv_session_key_restore(struct tv_sessions *table, const struct tv_session *session,
                            struct tv_session_key *key, int64_t now_us);
/* Private to session/. init: 0, or -1 without memory; finish copes with that. */
int tv_session_keys_init(struct tv_session_keys *keys);
void tv_session_keys_finish(struct tv_session_keys *keys);
/* Take the list of the gone. */
struct tv_session *tv_sessions_take_gone(struct tv_sessions *table);
void tv_session_destroy(struct tv_session *session);

/* Begin and end an operation. seq 0: it takes none. */
void tv_session_occupy(struct tv_session *session, int32_t seq, const uint8_t *body_hash,
                       void *operation);
void tv_session_idle(struct tv_sessions *table, struct tv_session *session);
/* Begin and end (operation NULL) the wait of a conditional round behind the one under way. */
void tv_session_wait(struct tv_session *session, int32_t seq, const uint8_t *body_hash,
                     void *operation);
/* Keep it from expiring while something is read of it that needs no operation; its lease counts
 * from the last one's end. It may be deleted meanwhile: find it again before letting go. */
void tv_session_hold(struct tv_session *session);
void tv_session_let_go(struct tv_session *session, int64_t now_us);

enum tv_session_verdict {
    TV_SESSION_RUN,
    TV_SESSION_REPLAY,  /* the kept answer is this call's */
    TV_SESSION_ATTACH,  /* the same round is under way */
    TV_SESSION_BEHIND,  /* conditional: the end of the round under way will tell */
    TV_SESSION_JOIN,    /* the same conditional round waits already */
    TV_SESSION_SKIP,    /* conditional: the round before has ended otherwise */
    TV_SESSION_REFUSED, /* *problem says why */
};
/* For verify, extend, decode and rollback: everything from seq to the context length, in the order
 * of the contract. */
enum tv_session_verdict tv_session_judge(const struct tv_session *session,
                                         const struct tv_request *request,
                                         struct tv_problem *problem);
/* 1: a round is held, and *problem says so; what may not run meanwhile is refused with it. */
int tv_session_refuse_held(const struct tv_session *session, struct tv_problem *problem);
/* What the session is once the path of a commit or commit_prev, which follows the held tree, is
 * settled: the digest, the pending token, whether that is the end. */
void tv_session_settled(const struct tv_session *session, const struct tv_request *request,
                        struct tv_digest *ret_digest, int32_t *ret_pending,
                        enum tv_finish *ret_finish);
/* Does it settle the held round otherwise than that proposed? */
int tv_session_deviates(const struct tv_session *session, const struct tv_request *request);
/* With the engine's rows settled: those of the held round's path are committed. */
void tv_session_settle_held(struct tv_session *session, const struct tv_request *request);
/* Which guess of a verify the last kept round has made true: its number, TV_SESSION_NO_GUESS when
 * none, TV_SESSION_SOLE for the only one or a verify that guesses nothing. */
#define TV_SESSION_SOLE     (-1)
#define TV_SESSION_NO_GUESS (-2)
int32_t tv_session_guess(const struct tv_session *session, const struct tv_request *request);
/* A tree on this session that commits nothing: node 0 and the context length. 0 or -EINVAL. */
int tv_session_judge_tree(const struct tv_session *session, const struct tv_tree *tree,
                          struct tv_problem *problem);
/* Room for `count` more tokens, so that the commit cannot fail. 0 or -ENOMEM. */
int tv_session_reserve(struct tv_session *session, int32_t count);
/* The operation's thread, without the lock: write `count` tokens behind the `offset` staged ones
 * and advance *digest (the session's own at offset 0). Nobody sees them before the commit. */
void tv_session_stage(struct tv_session *session, int32_t offset, const int32_t *tokens,
                      int32_t count, struct tv_digest *digest);
/* The same at offset 0 of an empty session, for whole pages whose digests are known. */
void tv_session_stage_known(struct tv_session *session, const int32_t *tokens, int32_t count,
                            const struct tv_digest *borders);
/* Make `count` staged tokens committed. */
void tv_session_commit(struct tv_session *session, int32_t count, const struct tv_digest *digest,
                       int32_t pending, enum tv_finish finish);
/* What the session is at a shorter length (1 <= len <= its own): digest, the token that stood there
 * as pending (the pending one at its own length), and whether it has room for another. Hashes less
 * than a page. */
void tv_session_at(const struct tv_session *session, int32_t len, struct tv_digest *ret_digest,
                   int32_t *ret_pending, enum tv_finish *ret_finish);
/* Forget what stands from len on; the rest as tv_session_at or the client said. */
void tv_session_rollback(struct tv_session *session, int32_t len, const struct tv_digest *digest,
                         int32_t pending, enum tv_finish finish);
/* Use up the seq and keep its answer, for which older ones may go; takes over *kept. */
void tv_session_keep(struct tv_session *session, struct tv_session_kept *kept);
/* Bytes of the rows that all sessions keep to be fetched. */
size_t tv_sessions_fetch_bytes(const struct tv_sessions *table);
/* This session has kept a round: when it has such rows, the oldest of other sessions go until all
 * are within bytes_max (0: any). */
void tv_sessions_fetch_bound(struct tv_sessions *table, struct tv_session *session,
                             size_t bytes_max);
/* The kept answer of this round, or NULL. */
const struct tv_session_kept *tv_session_kept_of(const struct tv_session *session, int32_t seq);
/* The client has the answers up to this round: they go, but for the last one. */
void tv_session_ack(struct tv_session *session, int32_t seq);
/* Private to session/: all of them. */
void tv_session_kept_drop(struct tv_session *session);
void tv_session_renew(struct tv_session *session, int32_t lease_s, int64_t now_us);
/* When a lease of lease_s seconds (0: the session's own) that starts now ends, in wall time. */
int64_t tv_session_lease_end(const struct tv_session *session, int32_t lease_s);

/* tail_from >= 0: with the committed tokens from there on, at most the last TV_TAIL_TOKENS_MAX.
 * 0 or -ENOMEM (then without tail). */
int tv_session_view(const struct tv_session *session, int32_t tail_from,
                    struct tv_session_state *ret_state);
/* Give the problem the session's state with the tail after tail_from. */
void tv_session_explain(const struct tv_session *session, int32_t tail_from,
                        struct tv_problem *problem);

#include "session/snapshot.h" /* the same module's, and seen through this header by others */

#endif
