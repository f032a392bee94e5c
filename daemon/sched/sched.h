/*
 * sched.h - accepts decoded calls, asks session/ whether they may run, queues them for the one
 * worker that owns the device, and completes them.
 *
 * Knows nothing of HTTP: a call carries a completion callback. Everything below this interface is
 * hidden from http/.
 */
#ifndef TV_SCHED_SCHED_H
#define TV_SCHED_SCHED_H

#include <stdatomic.h>
#include <stdint.h>

#include "base/feed.h"
#include "config/config.h"
#include "proto/request.h"
#include "proto/response.h"

struct tv_engine;
struct tv_sched;
struct tv_stats;
struct tv_shadow;

/* The finished answer of a call. */
struct tv_reply {
    int http_status;
    enum tv_code code;  /* of a problem; TV_OK: it is none */
    struct tv_buf body; /* owned by the call; failed: there is no answer, cut the connection */
    char session[32];   /* that a create or fork has made, or "" */
    const char *content_type;                /* static text */
    const char *allow;                       /* Allow header or NULL; static text */
    int32_t retry_after_s;                   /* > 0: Retry-After */
    const char *rate_name;                   /* RateLimit fields, or NULL; static text */
    int64_t rate_quota, rate_left;           /* what they say */
    char tensor_shape[32], tensor_dtype[12]; /* X-Tensor- headers, or "" */
    char etag[68];                           /* quoted, or "" */
    /* Events: body is what the stream begins with, and this goes on; followed and referenced. NULL:
     * no stream. */
    struct tv_feed *feed;
    struct tv_feed_cursor cursor;
};

/* One call. http/ creates it, fills the first part, and destroys it after completion. */
struct tv_call {
    struct tv_request request; /* owned; decoded */
    char principal[33];        /* key name; "" on an open loopback listener */
    char request_id[TV_REQUEST_ID_BYTES_MAX + 1];
    char key[TV_KEY_BYTES_MAX + 1];     /* Idempotency-Key of a create, fork or batch, or "" */
    int64_t received_us;                /* monotonic time of the last request byte */
    void (*done)(struct tv_call *call); /* called once, from any thread, unless submit returned 0 */
    void *owner;                        /* for done */
    atomic_int cancelled;               /* set by tv_sched_cancel */

    struct tv_reply reply;  /* valid after completion */
    struct tv_batch *batch; /* verify:batch: owned; sched's, under its lock, until completion */
    /* An item of one: bytes of its batch's answers so far that needed nothing computed, sched's;
     * NULL: a call by itself. */
    size_t *together;
    struct tv_call *next; /* sched's queue link */
};
struct tv_call *tv_call_create(void);
void tv_call_destroy(struct tv_call *call);

/* Start the worker. config, engine, shadow and stats outlive it; stats, in which it counts, is that
 * of the whole daemon. */
int tv_sched_create(const struct tv_config *config, struct tv_engine *engine,
                    struct tv_shadow *shadow, struct tv_stats *stats, struct tv_sched **ret_sched);
/* 0: completed at once, reply is filled, done is not called. 1: queued, done will be called. */
int tv_sched_submit(struct tv_sched *sched, struct tv_call *call);
/* The client has gone: a queued call is dropped (done is called; its seq stays free), a running one
 * finishes and is stored. Any thread. */
void tv_sched_cancel(struct tv_sched *sched, struct tv_call *call);
/* Fill the call's reply with a problem; for refusals that http/ itself makes (headers, routes,
 * decode). Takes over problem->state. */
void tv_sched_refuse(struct tv_call *call, struct tv_problem *problem);

/* Draining: readiness fails at once, and no round waits for an oracle any more. When refuse is set,
 * new work and comparisons under way are refused with 503 too. */
void tv_sched_drain(struct tv_sched *sched, int draining, int refuse);
/* Call `tell` once, on the worker, when the engine says that its device is lost
 * (-ENOTRECOVERABLE): by then readiness fails, and all work is being refused as kernel-fault.
 * Before any call. */
void tv_sched_lost_watch(struct tv_sched *sched, void (*tell)(void *context), void *context);
int tv_sched_is_lost(struct tv_sched *sched);

enum tv_gpu_ecc { TV_GPU_ECC_CORRECTED, TV_GPU_ECC_UNCORRECTED, TV_GPU_ECC_KINDS };
/* What the driver says of the GPU under the engine. */
struct tv_sched_gpu {
    int watched, broken;
    char reason[120]; /* when it is broken */
    int64_t ecc[TV_GPU_ECC_KINDS];
    int64_t xids; /* how many have come, and the last one */
    int32_t xid;
};
/* Readiness fails with the reason of a broken one; rounds go on as long as the engine gives right
 * answers. Any thread. */
void tv_sched_gpu_tell(struct tv_sched *sched, const struct tv_sched_gpu *gpu);
/* What must not wait for the worker, who may be in a long launch: queued calls whose deadline is
 * over and waits for a round that are over are answered, and whether an engine call under way makes
 * progress is noted; what readiness says is at most as old as the last look. Any thread, a few
 * times a second. */
void tv_sched_look(struct tv_sched *sched);
/* Does the worker live, and the engine call under way make progress? Any thread. */
int tv_sched_moving(struct tv_sched *sched);
/* Has an engine call gone without progress for so long that only a new process can help? The same.
 */
int tv_sched_stuck(struct tv_sched *sched);
/* Let the configuration it was created with take over what another reading of it says
 * (tv_config_take). Who is above a new limit keeps what he has. */
void tv_sched_reload(struct tv_sched *sched, struct tv_config *config,
                     const struct tv_config *fresh);
/* Calls queued or running. */
int32_t tv_sched_in_flight(struct tv_sched *sched);
/* What the decoder needs; immutable. */
const struct tv_request_limits *tv_sched_limits(const struct tv_sched *sched);
/* The library under the listeners and its version, for /v1/model; static text, before any call. */
void tv_sched_http_library_set(struct tv_sched *sched, const char *text);
/* `bell` is called, with locks held, when a session that somebody follows has something to tell: it
 * must not block, nor call back. Before any call; NULL: nobody is told any more. */
void tv_sched_events_watch(struct tv_sched *sched, void (*bell)(void *context), void *context);
/* What the end of a session's feed is called: static text. */
const char *tv_sched_events_end(int why);
/* Stop to follow; a reply without a feed is fine. Needs no sched. */
void tv_sched_events_leave(struct tv_reply *reply);
/* The newest violation that shadow mode or a comparison has found: 1, or 0: there is none. */
int tv_sched_violation(struct tv_sched *sched, struct tv_parity_violation *ret_newest);
/* Names of the paths by which requests are counted; static texts, before any call. */
void tv_sched_routes_set(struct tv_sched *sched, const char *const *names, size_t count);
/* restore.c. Before any call: keep sessions in this folder from now on (NULL or "": nowhere), and
 * restore those that the last process left there, whose leases were not over at started_unix_ms.
 * `moved` is called now and then while that lasts; NULL: nobody is told. What cannot be is logged.
 * 0; -ECANCELED: `moved` said (1) that the start is to end. The file is where it was then, and
 * nothing may be called any more but destroy. */
int tv_sched_restore(struct tv_sched *sched, const char *dir, int64_t started_unix_ms,
                     int (*moved)(void *context), void *moved_context);
/* snapshot.c. After tv_sched_end: write the sessions there, until deadline_us (of tv_clock_us). */
void tv_sched_save(struct tv_sched *sched, int64_t deadline_us);
/* Refuse what is queued, and end the threads. All calls are complete on return. */
void tv_sched_end(struct tv_sched *sched);
/* The same, and free everything; NULL is fine. */
void tv_sched_destroy(struct tv_sched *sched);

#endif
