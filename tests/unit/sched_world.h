/*
 * sched_world.h - plain arrays that say what every session, its answers and its pages must be, and
 * the check of a scheduler on real pages against them.
 *
 * Time is the test's: it stands still until the test moves it on.
 */
#ifndef TV_TESTS_SCHED_WORLD_H
#define TV_TESTS_SCHED_WORLD_H

#include <stdint.h>

#include "test_sched_fixture.h"

#define SLOTS     6
#define LEN_MAX   400 /* who is longer is closed; the model ends at 512 */
#define LEN_ROOM  512
#define PAGES     40 /* fewer than all sessions may want */
#define PAGE      16 /* rows of one */
#define NODES     24 /* of the trees here */
#define VOCAB     307
#define BODY      1536
#define SECOND_US INT64_C(1000000)

/* What has to have happened in a long run. */
enum {
    WORLD_FULL,
    WORLD_REPEATED,
    WORLD_EXPIRED,
    WORLD_EXPIRED_HELD,
    WORLD_EVICTED,
    WORLD_REUSED,
    WORLD_SKIPPED,
    WORLD_GUESSED,
    WORLD_RESTARTED,
    WORLD_SHARED,
    WORLD_COUNTS
};

/* A round that was answered. */
struct known {
    int32_t seq;
    enum tv_call_kind kind;
    char *body;   /* owned */
    char *answer; /* its bytes, owned; NULL: only that it is known */
    size_t bytes;
};

/* A tree and what a walk of it accepts. */
struct draft {
    int32_t count, tokens[NODES], parents[NODES];
    int32_t right; /* accepted nodes, node 0 included */
    int32_t path[NODES];
};

/* A create or fork that came with a key. */
struct keyed {
    enum tv_call_kind kind;
    char key[24], session[32]; /* session: in whose path */
    char *body, *answer;       /* owned; NULL: none */
    size_t bytes;
    int64_t done_us;
};

struct slot {
    char id[32]; /* "": no session */
    int32_t tokens[LEN_ROOM], len, pending, seq;
    struct tv_digest digests[LEN_ROOM + 1]; /* of every length so far */
    struct draft held;                      /* of the round that waits, if count > 0 */
    int32_t held_seq;
    int32_t leaf; /* where the last round's walk ended; -1: no guess about it holds */
    int32_t lease_s;
    int64_t lease_us;
    struct known known[TV_REPLAY_ROUNDS_MAX];
    int32_t known_count;
    struct keyed keyed;
    int32_t seen[LEN_ROOM / PAGE + 4], seen_count; /* its pages at the last check */
};

struct world {
    struct fixture fixture;
    char epoch[17];
    struct slot slots[SLOTS];
    int32_t live;           /* slots with a session */
    int32_t holders[PAGES]; /* of each page */
    struct keyed past;      /* of a session that is gone */
    uint64_t random;
    const uint8_t *bytes; /* what is drawn while there are some, then 0; NULL: random numbers */
    size_t left;
    int64_t serial;
    int64_t counts[WORLD_COUNTS];
};

/* From 0 to limit - 1. */
int32_t below(struct world *world, int32_t limit);
int64_t world_now_us(void);
/* Sessions expire when their time is over: at the next use, or by the worker's own look. */
void world_pass(struct world *world, int64_t us);

void world_open(struct world *world);
/* Everything gives its pages back. */
void world_close(struct world *world);
/* Contexts of the gone are closed by the worker, a moment after the answer. */
void world_settle(struct world *world);

/* Slot i is what its array says, and so are the counts of the pool and who holds its pages. */
void world_check(struct world *world, int32_t i);
/* The same for every slot, every token, row, digest and page. */
void world_check_whole(struct world *world);

/* Pages that `rows` more rows of slot i take, and pages that there are. */
int64_t pages_needed(struct world *world, int32_t i, int32_t rows);
int64_t pages_left(struct world *world);

/* What became of it. */
void slot_push(struct slot *slot, int32_t token);
/* A round that accepted this draft, and then drew. */
void slot_accept(struct world *world, struct slot *slot, const struct draft *draft);
void slot_cut(struct slot *slot, int32_t len);
void slot_renew(struct slot *slot, int32_t lease_s);
/* Its number is used: what a retry must get. call NULL: only that it is known. */
void slot_keep(struct slot *slot, enum tv_call_kind kind, const char *body,
               const struct tv_call *call);
void slot_ack(struct slot *slot, int32_t seq);
/* The session is gone; its key becomes the world's past. */
void slot_forget(struct world *world, struct slot *slot);

/* A random tree: the right chain with wrong siblings. `len` rows are before it, `pending` is node
 * 0. */
void draft_make(struct world *world, int32_t len, int32_t pending, struct draft *ret_draft);
/* {"seq":..,"epoch":..,"expected_len":..,"tree":{..}<rest>} */
void draft_body(const struct world *world, int32_t seq, int32_t len, const struct draft *draft,
                const char *rest, char *ret_body);
/* "tokens":[..],"parents":[..] */
int draft_text(const struct draft *draft, char *ret_text, size_t bytes);

/* The first member of this name in the answer's text; fails the test without one. */
int64_t answer_int(const struct tv_call *call, const char *name);
/* The answer is that of the stored one, marked as a replay. */
void assert_replay(const struct known *known, const struct tv_call *call);
void assert_status(const struct tv_call *call, int http_status);

/* kv-full, with more pages needed than there are; frees the call. */
void refused_full(struct world *world, struct tv_call *call);
/* The answer of a round of this draft, and what it leaves. */
void accepted(struct world *world, struct slot *slot, const struct draft *draft, const char *body,
              const struct tv_call *call);

/* sched_calls.c: anything that may be done with slot i. */
void world_operation(struct world *world, int32_t i);

/* sched_rounds.c: rounds that more than one call makes. hold: for the client to settle; then
 * settle, settle_prev or refused_held. */
void hold(struct world *world, int32_t i);
void settle(struct world *world, int32_t i);
void settle_prev(struct world *world, int32_t i);
void refused_held(struct world *world, int32_t i);
/* A conditional round once the one before has ended; pipeline: before that. */
void ahead(struct world *world, int32_t i);
void pipeline(struct world *world, int32_t i);
/* A one-shot or score: nothing stays of it. */
void detached(struct world *world, int32_t i);
void batch(struct world *world, int32_t i);
/* To the last microsecond of the lease, and one further. */
void world_deadline(struct world *world, int32_t i);
/* Another server, under load: nothing of the old one is known. */
void restart(struct world *world);

#endif
