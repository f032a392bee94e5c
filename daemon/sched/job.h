/*
 * job.h - what sched/'s files share: the scheduler, and a call on its way through the worker.
 *
 * Private to sched/. One lock, the session table's, guards the queue, the lists and the sessions;
 * a job's own members belong to the worker from the moment it leaves the queue.
 */
#ifndef TV_SCHED_JOB_H
#define TV_SCHED_JOB_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>

#include "sched/account.h"
#include "sched/sched.h"
#include "session/session.h"
#include "shadow/shadow.h"
#include "stats/stats.h"
#include "verify/verify.h"

/* Sliced calls (create, extend, decode, one-shot, parity) that make progress side by side. */
#define TV_SCHED_SLICED_MAX 8
/* A deep readiness result is good for this long. */
#define TV_SCHED_DEEP_US 1000000
/* The worker looks at leases at least this often. */
#define TV_SCHED_SWEEP_US 1000000
/* Defaults of launch_max_s: seconds without progress where it is counted, and of a whole call. */
#define TV_SCHED_STALL_S 4
#define TV_SCHED_CALL_S  30
/* So many times longer, and nobody believes any more that the call will end. */
#define TV_SCHED_STUCK_TIMES 10
/* Answers beside inline blocks: a decode of 1,024 tokens, a list of every session, a tail. */
#define TV_SCHED_REPLY_BYTES  (8u << 20)
#define TV_SCHED_CURVE_POINTS 11 /* 1, 2, 4 .. 1024 nodes */
/* Of these, in a round's answer, which is to stay within 1.5 KB; none beside longer paths. */
#define TV_SCHED_HINT_POINTS   4
#define TV_SCHED_HINT_ACCEPTED 32

enum job_stage {
    JOB_QUEUED,
    JOB_PREFILL, /* sliced; queued until its first slice */
    JOB_ROUND,   /* its next step is a round in a launch; a sliced one is queued until its first */
    JOB_JUDGED,  /* the launch is done; an oracle's word is awaited */
};

/* What the answer's blocks point at; all owned by the job. */
struct job_blocks {
    int32_t *nodes, *accepted_tokens, *new_tokens; /* [nodes_max + 1] or [max_tokens] */
    float *logprobs;
    int32_t *topk_rows, *topk_ids;
    float *topk_logits, *topk_lse;
    struct tv_topk_block topk;
    int32_t *logits_rows;
    float *logits_data;
    struct tv_logits_block logits;
    char href[96];
    struct tv_session_fetch *fetch;
    int32_t *hidden_rows;
    int32_t hidden_taps[TV_TAPS_MAX];
    float *hidden_data;
    struct tv_hidden_block hidden;
    char hidden_href[96];
    struct tv_session_fetch *hidden_fetch;
    struct tv_shadow_block shadow;
    struct tv_hint hint;
    int64_t hint_curve[TV_SCHED_CURVE_POINTS][2];
};

/* A parity comparison's copy of the fast result. */
struct job_parity {
    struct job *next; /* the comparer's queue; guarded by the lock */
    int32_t *prefix;
    float *logits;
    struct tv_parity_case compared;
    struct tv_shadow_round *captured;
    struct tv_parity_report report;
    int path_rc;      /* of the comparison */
    char session[32]; /* whose lease it holds; "" = none */
};

struct job {
    struct job *next;         /* queue or running list; guarded by the lock */
    struct tv_call *call;     /* who gets the answer first */
    struct tv_call *twins;    /* the same round, sent again meanwhile; guarded by the lock */
    struct tv_call *watchers; /* GET rounds/{seq} that wait; guarded by the lock */
    struct tv_sched *sched;
    struct tv_account *account; /* its principal's; NULL until it is admitted */
    int64_t charged;            /* nodes, by principal_nodes_s */
    int64_t ready_us;           /* since when its next step may go; 0: not seen yet */
    uint64_t turn;              /* sliced: when it had its place or its last slice, in order */
    enum job_stage stage;       /* the worker's */
    int queued;                 /* has not begun, may still be dropped; guarded by the lock */
    int behind;                 /* queued, but in the list of those that wait for a round */
    struct tv_session *session; /* NULL: one-shot, parity on its own prefix, or let go */
    struct tv_session_key *key; /* what the table knows of it; NULL: it came without one */
    struct tv_session *parent;  /* fork: whose rows the session gets; occupied too */
    struct tv_context *context; /* the session's, or owned when own_context */
    int own_context;
    int32_t nodes;       /* rows of its next round */
    int32_t alternative; /* of the request's trees, the one that runs; -1: it has one only */
    int picked;          /* is in the launch being put together */
    int hold;            /* verify: nothing is committed before the client says what */
    int settled;         /* its commit_prev is done, whatever becomes of itself */
    int judged;          /* the oracle's word is there; guarded by the lock */
    int withdrawn;       /* parity at a stop: its oracles were told to give up; the worker's */

    int64_t deadline_us; /* the latest of its calls'; INT64_MAX: none; guarded by the lock */
    int64_t queue_us, gpu_us, sample_us, encode_us;
    int64_t launch_start_us, launch_end_us; /* of its last launch */
    int32_t batch;                          /* largest launch it was part of */

    int32_t *tokens; /* prefill: the request's, or owned when keep_pending put one before */
    int owns_tokens;
    int32_t token_count, token_done;
    int admitted;              /* its first slice has begun: there was room for all of it */
    struct tv_digest *borders; /* [border_count], owned: of the prompt's whole pages; NULL: none */
    int32_t border_count;
    struct tv_round_rule rule;

    struct tv_tree step; /* decode: the one-node tree of the next step, on step_ arrays */
    int32_t step_token, step_parent, step_depth;

    int32_t staged; /* tokens written behind the session's */
    struct tv_digest digest;
    struct tv_drawn end;
    int has_margin;
    float margin_min;
    struct tv_round round; /* the answer, as far as it is known */
    struct tv_session_drafts
        drafts; /* verify: the session's with this round, once it is complete */
    struct job_blocks blocks;
    struct job_parity *parity;
    struct tv_cache_shortage shortage; /* for kv-full */
    char *event;                       /* owned: what its end tells; NULL: nothing */
    size_t event_bytes;
};

struct job_list {
    struct job *first, **last;
};

struct curve_point {
    int64_t us[15]; /* the newest samples, a ring */
    int32_t count, next;
};

/* Tokens of prompts in launches of rounds; share.c. */
struct tv_sched_share {
    int32_t rows;     /* that the next launch takes along, at most */
    int32_t keys;     /* of tokens before this position alone */
    int64_t token_ns; /* what a token adds to a launch */
    /* What slices take, by their rows; of those as short as they are while rounds are about. */
    struct curve_point slices[TV_SCHED_CURVE_POINTS];
};

/* Trees that were verified last, and how many sessions a status lists. */
#define TV_SCHED_TREES    8
#define TV_SCHED_SESSIONS 64

/* A ring of them; the lock guards it. Its arrays are taken at the start. */
struct recent_trees {
    struct tv_status_tree trees[TV_SCHED_TREES]; /* what they point at is in cells */
    int32_t *cells; /* [TV_SCHED_TREES, 3, nodes_max]: tokens, parents, accepted; owned */
    int32_t nodes_max, count, next;
};

struct tv_sched {
    const struct tv_config *config; /* with the lock: what tv_sched_reload changes */
    struct tv_engine *engine;
    struct tv_shadow *shadow;
    struct tv_request_limits limits;
    struct tv_limits_info limits_info; /* but for max_sessions */
    atomic_int max_sessions;           /* relaxed: what is said; the table has what holds */
    int64_t launch_us_max;             /* an engine call without progress for longer is not ready */
    unsigned synthetic;                /* TV_SYNTHETIC_ bits of every answer; not changed later */
    const char *http_library;          /* NULL until the listeners say; not changed later */

    struct tv_sessions table;  /* its lock guards everything below but what says otherwise */
    pthread_cond_t wake;       /* the worker's; rung by tv_sched_ring alone */
    atomic_uint rings;         /* relaxed: a worker that lingers looks at it without the lock */
    int64_t linger_us;         /* after a launch, before the worker sleeps; constant */
    pthread_cond_t compare;    /* the comparer's */
    struct job_list queue;     /* not begun, oldest first */
    struct job_list behind;    /* JOB_QUEUED: each waits for its session's round under way */
    int32_t queue_count;       /* both lists */
    struct job_list running;   /* begun, not ended; changed by the worker alone */
    struct tv_batch *batches;  /* under way, with an Idempotency-Key */
    struct tv_call *deep;      /* GET readyz?deep=1 that wait for the self-test */
    struct job *compare_queue; /* parity cases for the comparer; linked by parity->next */
    int32_t in_flight;         /* calls that submit returned 1 for and that are not done */
    int draining, refusing;    /* drain: not ready; new work is refused too */
    int closed;                /* by an admin: not ready, and only open sessions go on */
    atomic_int parity_stop;    /* refusing or lost, for path oracles; relaxed, set under the lock */
    int stopping, compare_stopping;
    int worker_alive;
    int lost; /* written by the worker alone, who may read it without the lock; never taken back */
    void (*lost_tell)(void *context);
    void *lost_context;
    struct tv_sched_gpu gpu; /* guarded by the lock */
    int self_test_rc, self_test_running;
    char self_test_detail[160];
    int64_t self_test_us;    /* when it last ended */
    int launch_rc;           /* of the last launch; 0 or why the device is doubted */
    int64_t launch_start_us; /* of the engine call under way; 0: the worker is outside of it */
    uint64_t progress_steps; /* the engine's count when it was last looked at */
    int64_t progress_us;     /* when it was first seen there */
    int64_t engine_left_us;  /* when the last engine call ended; 0: none has */
    struct curve_point curve[TV_SCHED_CURVE_POINTS];
    struct tv_account *accounts; /* of every principal that has called */
    int64_t idle_closed;         /* sessions that gave their pages to others */

    struct recent_trees recent;

    struct tv_stats *stats;            /* not owned */
    struct tv_stats_names stats_names; /* not changed once calls come */

    /* The worker's own. */
    int64_t sweep_us;       /* when leases are looked at next */
    uint64_t turns;         /* of sliced calls, in all */
    int64_t served_floor;   /* least service of those who had work at the last launch */
    int32_t launch_rows;    /* of one launch, and of a slice while rounds are about */
    int64_t launched_us;    /* end of the last launch; 0: none */
    int64_t launch_took_us; /* the last launch */
    int32_t rounds_last[2]; /* rounds of the last launch and the one before */
    int64_t between_us;     /* of launches between the parts of slices, in all */
    struct job *sliced;     /* a slice of it is under way */
    struct tv_sched_share share;
    struct job *rider;  /* whose tokens go along with the launch that was picked; NULL: nobody's */
    int32_t rider_rows; /* how many */
    int rode;           /* the last engine call was a launch that took some along */
    struct job **batch; /* [engine->requests_max] */
    struct tv_round_in *batch_in;
    struct tv_round_out *batch_out;
    struct tv_shadow_round **batch_shadow;

    /* From the path oracle to the kernel oracle: a withdrawal comes before or after. Taken before
     * any other lock. */
    pthread_mutex_t handover;
    pthread_t worker, comparer;
    int worker_started, comparer_started, conds_made;

    int snapshot_dir;     /* descriptor of the folder that sessions are kept in; -1: none */
    int32_t restore_lost; /* sessions of the last process that are not restored */
};

/* sched.c */
void tv_sched_lock(struct tv_sched *sched);
void tv_sched_unlock(struct tv_sched *sched);
/* With the lock: there may be something to do for the worker. */
void tv_sched_ring(struct tv_sched *sched);
void tv_sched_job_list_init(struct job_list *list);
void tv_sched_job_list_push(struct job_list *list, struct job *job);
void tv_sched_job_list_remove(struct job_list *list, struct job *job);
/* Before those that came later. */
void tv_sched_job_list_insert(struct job_list *list, struct job *job);
/* An answer of known form: body moved into the reply; a failed buffer becomes 500 internal. */
void tv_sched_reply_set(struct tv_call *call, int http_status, struct tv_buf *body);
/* The kept or just encoded answer of a round, as a replay. */
void tv_sched_reply_replay(struct tv_call *call, const char *body, size_t bytes);
/* The stored or just encoded answer of a create or fork, as it is. */
void tv_sched_reply_stored(struct tv_call *call, int http_status, const char *body, size_t bytes);
/* The answer is that of a create or fork, when it is 201: this is what it made. */
void tv_sched_reply_made(struct tv_call *call, const char *session);
/* Take the call out of a list: 1, or 0: it is not there. */
int tv_sched_call_unlink(struct tv_call **list, const struct tv_call *call);
/* Shorthand: one refusal with this code and text. */
void tv_sched_reply_refuse(struct tv_call *call, enum tv_code code, const char *pointer,
                           const char *text);
/* Without the lock: hand over a list of calls whose replies are set. */
void tv_sched_calls_done(struct tv_sched *sched, struct tv_call *calls);

/* answer.c, info.c: calls that need no device. Without the lock. */
int tv_sched_answer_session(struct tv_sched *sched, struct tv_call *call);
int tv_sched_answer_info(struct tv_sched *sched, struct tv_call *call);
/* restore.c, with the lock: is the call's epoch, if it has one, this server's? 0, or -EINVAL with
 * *problem, which has the state of a restored session of it. */
int tv_sched_epoch_judge(struct tv_sched *sched, const struct tv_call *call,
                         struct tv_problem *problem);
/* With the lock: epoch and session of a call. 0, or -EINVAL with *problem. */
int tv_sched_session_of(struct tv_sched *sched, const struct tv_call *call,
                        struct tv_session **ret_session, struct tv_problem *problem);

/* admit.c: calls for the worker. Without the lock. */
int tv_sched_admit(struct tv_sched *sched, struct tv_call *call);
/* The same for several rounds of sessions, with the lock: the worker sees them together. queued[i]
 * is 1: done will be called, or 0: the reply is filled. */
void tv_sched_admit_all(struct tv_sched *sched, struct tv_call **calls, int32_t count, int *queued);
/* cancel.c, with the lock. cancel: as tv_sched_cancel of a call that is no batch; who is answered
 * by it goes to *ret_calls. gone: was it cancelled before it was admitted? */
void tv_sched_call_cancel(struct tv_sched *sched, struct tv_call *call, struct tv_call **ret_calls);
int tv_sched_is_gone(const struct tv_call *call);
void tv_sched_refuse_gone(struct tv_call *call);
/* batch.c: verify:batch. As tv_sched_submit. Without the lock. */
int tv_sched_batch_submit(struct tv_sched *sched, struct tv_call *call);
void tv_sched_batch_destroy(struct tv_batch *batch);
/* With the lock: its client has gone. NULL: its answer is there; else the batch, to be let go of
 * without the lock when *ret_calls are done. */
struct tv_batch *tv_sched_batch_cancel(struct tv_batch *batch, struct tv_call **ret_calls);
void tv_sched_batch_let_go(struct tv_batch *batch);
/* With the lock: the same batch is under way; wait for its answer (0, or -EINVAL with *problem: as
 * many as may do already), and leave it again: 1 when it waited for one. The last one who leaves a
 * batch drops what is queued of it. */
int tv_sched_batch_join(struct tv_batch *batch, struct tv_call *call, struct tv_problem *problem);
/* With the lock: a batch was sent again, and the sessions of its rounds that are over have their
 * whole lease anew. joined: the longest lease counts, as of all who wait for one round. */
void tv_sched_batch_renew(struct tv_sched *sched, const struct tv_call *call, int joined);
int tv_sched_batch_leave(struct tv_sched *sched, const struct tv_call *call,
                         struct tv_call **ret_calls);
/* With the lock: may this call have one more answer that needs nothing computed? An item may, as
 * long as those of its batch are together no larger than one round's may be. */
int tv_sched_batch_room(const struct tv_sched *sched, const struct tv_call *call);
/* With the lock: the session has said that this round may run; make it the session's operation. 0,
 * or -EINVAL with *problem and nothing changed. */
int tv_sched_round_begin(struct job *job, struct tv_session *session, struct tv_problem *problem);
/* job.c. NULL: no memory. destroy: its calls are let go of; NULL is fine. */
struct job *tv_sched_job_create(struct tv_sched *sched, struct tv_call *call);
void tv_sched_job_destroy(struct job *job);
/* When a call may not start any more; INT64_MAX: always. */
int64_t tv_sched_deadline(const struct tv_call *call);
/* With the lock: calls have joined the job or left it; a queued one may start as long as any of
 * them wants it. */
void tv_sched_job_waiters(struct job *job);
/* With the lock: the first call of a queued job leaves it to the next one, which exists. */
void tv_sched_job_pass_on(struct job *job);
/* With the lock: may one more call wait in this list? 0, or -EINVAL with *problem. */
int tv_sched_waiters_room(const struct tv_call *waiters, struct tv_problem *problem);
/* With the lock: the same call is queued or running; wait for its answer. 0, or -EINVAL with
 * *problem: as many as may do already. */
int tv_sched_job_join(struct tv_sched *sched, struct job *running, struct tv_call *call,
                      struct tv_problem *problem);

/* prefix.c. source, with the lock: the prompt of a create that names a session's tokens, copied. 0
 * or -EINVAL with *problem. hash: a prompt's digests, without the lock: long ones take a while. 0
 * or -ENOMEM; leaves the whole prompt's digest in job->digest when it has an expected one. */
int tv_sched_prefix_source(struct tv_sched *sched, struct tv_request *request,
                           const char *principal, struct tv_problem *problem);
int tv_sched_prefix_hash(const struct tv_sched *sched, struct job *job);
/* The worker thread. adopt: an empty context gets the known pages of the job's prompt. 0, -ENOMEM.
 * publish: before its commit, a job that succeeds lets others find the pages it has filled. */
int tv_sched_prefix_adopt(struct tv_sched *sched, struct job *job);
void tv_sched_prefix_publish(struct tv_sched *sched, struct job *job);
/* What a restored session brought along, before any call. */
void tv_sched_prefix_offer(struct tv_sched *sched, struct tv_session *session);
/* restore.c: let go of the folder. */
void tv_sched_snapshot_finish(struct tv_sched *sched);

/* pick.c: whose step is next. The worker thread, with the lock. */
/* Give queued sliced calls a place while there is room for their progress. */
void tv_sched_pick_start(struct tv_sched *sched);
/* A round that computes nothing, or NULL: its session has nothing else under way, so it waits for
 * no launch, and but for a fork for no slice. */
struct job *tv_sched_pick_pages(struct tv_sched *sched);
/* Fill sched->batch with rounds that are ready, and sched->rider. Their number; 0 with *wake_us
 * lowered when more are worth waiting for. */
int32_t tv_sched_pick_launch(struct tv_sched *sched, int64_t now_us, int64_t *wake_us);
/* The job whose next slice is due, and how many rows it may have; or NULL, also when rounds that
 * are ready, or on their way until *wake_us, take tokens along instead. */
struct job *tv_sched_pick_slice(struct tv_sched *sched, int64_t now_us, int32_t *ret_rows,
                                int64_t *wake_us);
/* share.c, with the lock. may: could a launch of rounds take tokens of this prompt along? rows: how
 * many tokens one of so many nodes takes along; 0: none. note: one has, and took so long. */
void tv_sched_share_init(struct tv_sched_share *share);
int tv_sched_share_may(const struct tv_sched *sched, const struct job *job);
int32_t tv_sched_share_rows(struct tv_sched *sched, const struct job *job, int32_t nodes);
void tv_sched_share_note(struct tv_sched *sched, const struct job *job, int32_t rows, int32_t nodes,
                         int64_t took_us);

/* late.c, with the lock: queued jobs of one list that may not start any more are dropped, and calls
 * of others leave them; waits for the rounds of a list that are over are answered. Whose replies
 * are set goes to *ret_calls; *wake_us is lowered to the next such moment. */
void tv_sched_late_drop(struct tv_sched *sched, struct job *jobs, int64_t now_us,
                        struct tv_call **ret_calls, int64_t *wake_us);
void tv_sched_late_watchers(struct job *jobs, int64_t now_us, struct tv_call **ret_calls,
                            int64_t *wake_us);
/* worker.c, launch.c, prefill.c, parity.c: the worker thread, without the lock. */
void *tv_sched_worker_main(void *context);
void tv_sched_engine_enter(struct tv_sched *sched);
void tv_sched_engine_leave(struct tv_sched *sched, int rc);
/* context.c: the worker thread, without the lock: as the engine's own, and watched as a pass is. */
int tv_sched_context_settle(struct tv_sched *sched, struct tv_context *context,
                            const int32_t *nodes, int32_t count);
int tv_sched_context_truncate(struct tv_sched *sched, struct tv_context *context, int32_t len);
int tv_sched_context_fork(struct tv_sched *sched, const struct tv_context *context, int32_t len,
                          struct tv_context **ret_context);
void tv_sched_context_close(struct tv_sched *sched, struct tv_context *context);
/* A tv_shadow_done: the oracle thread wakes the worker for this job (context). */
void tv_sched_job_judged(void *context, const struct tv_shadow_block *block);
/* A round whose oracle has spoken, or is waited for no longer; its commit was never in doubt. */
void tv_sched_judged_settle(struct tv_sched *sched, struct job *job, int draining);
void tv_sched_launch_run(struct tv_sched *sched, int32_t count);
/* The engine, in the middle of a slice: rounds that are ready may go first. */
void tv_sched_between(void *context);
void tv_sched_prefill_slice(struct tv_sched *sched, struct job *job, int32_t rows_max);
/* The same in a launch of rounds. ride: 1 and what of the prompt goes along, or 0: nothing does,
 * and the job may have failed. rode: the launch is over. ran: was it in the launch's pass, whatever
 * became of it there? */
int tv_sched_prefill_ride(struct tv_sched *sched, struct job *job, int32_t rows_max,
                          struct tv_rider *ret_rider);
void tv_sched_prefill_rode(struct tv_sched *sched, struct job *job, const struct tv_rider *rider);
int tv_sched_prefill_ran(const struct tv_rider *rider);
void tv_sched_parity_take(struct tv_sched *sched, struct job *job, const struct tv_round_out *out,
                          struct tv_shadow_round *captured);
/* Its oracles have spoken, or the server stops. */
void tv_sched_parity_conclude(struct tv_sched *sched, struct job *job);
/* Fills in the built-in case. -ENOMEM, or -EINVAL with *problem. */
int tv_sched_parity_self_case(struct tv_sched *sched, struct tv_request *request,
                              struct tv_problem *problem);
void *tv_sched_comparer_main(void *context);
/* keys.c, with the lock. Does the call's Idempotency-Key know it? 0: no, or it has none; 1: the
 * call is answered or attached, *ret_attached says which; -EINVAL with *problem, also when a new
 * key has no place. */
int tv_sched_key_judge(struct tv_sched *sched, struct tv_call *call, int *ret_attached,
                       struct tv_problem *problem);
/* Judged with 0 under this lock, and every check has passed: from now on its key is known. NULL:
 * it has none. The operation is a job, or the batch. */
struct tv_session_key *tv_sched_key_claim(struct tv_sched *sched, const struct tv_call *call,
                                          void *operation);
/* The job has failed or was dropped: its key is free. */
void tv_sched_key_release(struct tv_sched *sched, struct job *job);
/* The call has succeeded: takes over kept->body when it came with a key. */
void tv_sched_key_settle(struct tv_sched *sched, struct job *job, struct tv_session_kept *kept);
/* pages.c. Rollback, fork and commit: nothing to launch, done between two launches. */
int tv_sched_pages_only(const struct job *job);
void tv_sched_pages_run(struct tv_sched *sched, struct job *job);
/* pages.c: a verify's commit_prev, before its launch. 0 or the engine's word. */
int tv_sched_prev_settle(struct tv_sched *sched, struct job *job);
/* With the lock, before a held round is settled or given up: what its drafts were good for. */
void tv_sched_held_judge(struct job *job, int64_t now_us);
/* idle.c: the worker thread, without the lock. A call lacks pages: close sessions that nobody uses,
 * when that is enough. 1: some were closed, and the call may try again. */
int tv_sched_idle_give(struct tv_sched *sched, const struct tv_cache_shortage *shortage);
/* worker.c: close the contexts of the gone, and free them. */
void tv_sched_bury(struct tv_sched *sched, struct tv_session *gone);
/* lost.c. note: the worker thread, without the lock: an engine call said rc. The others, which look
 * at `lost`: why what did not start is refused when everything ends, with the lock or on the worker
 * thread. */
void tv_sched_lost_note(struct tv_sched *sched, int rc);
enum tv_code tv_sched_end_code(const struct tv_sched *sched);
const char *tv_sched_end_text(const struct tv_sched *sched);
/* info.c: the worker thread, without the lock. */
void tv_sched_self_test_run(struct tv_sched *sched);
/* With the lock: microseconds that an engine call has gone without progress; 0 outside of one. */
int64_t tv_sched_stalled_us(struct tv_sched *sched, int64_t now_us);
/* With the lock: fill the checks; 1 when all hold. */
#define TV_SCHED_CHECKS 5
int tv_sched_ready_checks(struct tv_sched *sched, struct tv_ready_check *checks);

/* finish.c: the worker thread, without the lock. Ends the job and completes its calls. */
void tv_sched_job_succeed(struct tv_sched *sched, struct job *job);
/* Parity: no round to keep. Takes over *body. */
void tv_sched_job_answer(struct tv_sched *sched, struct job *job, int http_status,
                         const char *content_type, struct tv_buf *body);
/* Close the job's own context, if it has one. */
void tv_sched_job_close(struct tv_sched *sched, struct job *job);
/* An engine call of this job said rc. */
void tv_sched_job_fail_rc(struct tv_sched *sched, struct job *job, int rc);
void tv_sched_job_fail(struct tv_sched *sched, struct job *job, enum tv_code code,
                       const char *format, ...) __attribute__((format(printf, 4, 5)));
/* A job that never left the queue, taken off it; with the lock. Its calls go to *ret_calls. */
void tv_sched_job_drop(struct tv_sched *sched, struct job *job, enum tv_code code, const char *text,
                       struct tv_call **ret_calls);

/* Hand the answer to whoever asked first, and its replay to the others, as far as there is room. */
void tv_sched_job_reply(struct job *job, int http_status, struct tv_buf *body);
/* May there be one more copy of an answer at once, beside copies of so many bytes? */
int tv_sched_copy_room(const struct tv_sched *sched, size_t together);
/* With the lock: the job lets go of all its calls, whose replies are set. */
void tv_sched_job_let_go(struct job *job, struct tv_call **ret_calls);
/* With the lock: the longest lease that its calls ask for; 0: none does. */
int32_t tv_sched_job_lease(const struct job *job);

/* behind.c: rounds that run only when the one before ends as guessed. With the lock. */
/* The session's word was TV_SESSION_BEHIND; the caller puts the job into the list. */
void tv_sched_behind_add(struct tv_session *session, struct job *job);
/* Take it off its list and its session. */
void tv_sched_behind_remove(struct tv_sched *sched, struct job *job);
/* The round before is kept and the session idle: the one behind it runs, is skipped or refused. */
void tv_sched_behind_settle(struct tv_sched *sched, struct tv_session *session,
                            struct tv_call **ret_calls);
/* The round before has failed: there is nothing to guess about. */
void tv_sched_behind_refuse(struct tv_sched *sched, struct tv_session *session,
                            struct tv_call **ret_calls);
/* Use up the seq of a request whose guess did not hold: *ret_body is its answer. 0, or -ENOMEM or
 * -EMSGSIZE with nothing changed. */
int tv_sched_skip(struct tv_session *session, const struct tv_request *request, int32_t lease_s,
                  struct tv_buf *ret_body);

/* events.c, with the lock. Follow a session: 0, or -EINVAL with the call refused. */
int tv_sched_events_open(struct tv_session *session, struct tv_call *call);
/* Before the commit: what its end will tell becomes the job's, when it does something. 0 or
 * -ENOMEM.
 */
int tv_sched_events_round(struct job *job);
/* With the lock: the held round that this call has just settled. */
void tv_sched_events_settled(struct tv_session *session, const struct tv_request *request);

/* hidden.c: copy the hidden rows that the answer shows of a round, and of a prompt's slice that
 * begins at position `start`: how many of its last rows are wanted, and then those. 0 or -ENOMEM.
 */
int tv_sched_hidden_take(struct job *job, const struct tv_tree *tree,
                         const struct tv_round_out *out);
int32_t tv_sched_hidden_wanted(const struct job *job, int32_t start, int32_t count);
int tv_sched_hidden_slice(struct job *job, int32_t start, int32_t count,
                          const struct tv_slice_hidden *slice);
/* The first position of a create's prompt whose hidden row is wanted; token_count: none is. */
int32_t tv_sched_hidden_first(const struct job *job);
/* rows.c. rows: the nodes of a row set, malloc'd. fetch: rows to be kept for GET .../tensor; takes
 * over *data when it succeeds. 0 or -ENOMEM. */
int tv_sched_rows_resolve(const struct tv_rows *rows, const struct tv_tree *tree,
                          const struct tv_round_out *out, int32_t **ret_rows, int32_t *ret_count);
int tv_sched_fetch_make(const struct job *job, const struct tv_tree *tree,
                        const struct tv_round_out *out, const int32_t *rows, int32_t count,
                        float **data, struct tv_session_fetch **ret_fetch);
/* Copy what the answer shows of a round. 0 or -ENOMEM. */
int tv_sched_blocks_take(struct job *job, const struct tv_tree *tree,
                         const struct tv_round_out *out, int32_t vocab);
void tv_sched_blocks_finish(struct job_blocks *blocks);

/* metrics.c. Any thread; a rule is the one that the round has or would have had. */
void tv_sched_metrics_init(struct tv_sched *sched);
void tv_sched_answer_metrics(struct tv_sched *sched, struct tv_call *call);
void tv_sched_count_end(struct tv_sched *sched, enum tv_call_kind kind, enum tv_rule rule,
                        enum tv_stats_round status);
/* Of a session, and about to be answered: its end, its tree, its stages. */
void tv_sched_count_round(struct job *job);
/* A conditional round runs. */
void tv_sched_count_guess(struct tv_sched *sched, const struct tv_request *request,
                          int32_t alternative);
/* And one that will not. */
void tv_sched_count_skip(struct tv_sched *sched, enum tv_rule rule);
/* What an engine call said. */
void tv_sched_count_engine(struct tv_sched *sched, int rc);
/* A launch of so many tree nodes, and tokens of a prompt that went along. */
void tv_sched_count_launch(struct tv_sched *sched, int32_t rows, int32_t ridden);
/* With the lock: an engine call begins. */
void tv_sched_count_idle(struct tv_sched *sched, int64_t now_us);

/* status.c. init: 0 or -ENOMEM; finish copes with that. note, with the lock: a verify has ended. */
int tv_sched_trees_init(struct recent_trees *recent, int32_t nodes_max);
void tv_sched_trees_finish(struct recent_trees *recent);
void tv_sched_trees_note(struct recent_trees *recent, const struct job *job);
/* Without the lock. */
void tv_sched_answer_status(struct tv_sched *sched, struct tv_call *call);

/* curve.c: measured cost by tree size; with the lock. */
void tv_sched_curve_add(struct curve_point *points, int32_t nodes, int64_t us);
/* The median of trees of about so many nodes; -1: there was none. */
int64_t tv_sched_curve_median(const struct curve_point *points, int32_t nodes);
int32_t tv_sched_curve_read(const struct curve_point *points, int64_t (*ret_pairs)[2]);
/* Of the pairs read, those that say most of trees up to nodes_max: the ends, that of a tree of so
 * many nodes, and the one farthest from the lines between them. How many are left. */
int32_t tv_sched_curve_thin(int64_t (*pairs)[2], int32_t count, int32_t nodes, int32_t nodes_max);

#endif
