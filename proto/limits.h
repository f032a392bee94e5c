/*
 * limits.h - every cap a client can meet, and the defaults of those that are configuration.
 *
 * Each has a test at the cap and one above it.
 */
#ifndef TV_PROTO_LIMITS_H
#define TV_PROTO_LIMITS_H

/* Body bytes: verify and the other small calls; create, extend, one-shot, parity (defaults). */
#define TV_BODY_BYTES_DEFAULT       (1u << 20)
#define TV_BODY_BYTES_LARGE_DEFAULT (16u << 20)

/* Draft tree, node 0 included (defaults); the engine's own maximum is TV_ENGINE_NODES_MAX. */
#define TV_NODES_DEFAULT    256
#define TV_DEPTH_DEFAULT    64
#define TV_ENGINE_NODES_MAX 1024

#define TV_JSON_DEPTH_MAX       8
#define TV_WANT_TOP_K_MAX       64
#define TV_ALTERNATIVES_MAX     32
#define TV_TAPS_MAX             16 /* layers whose hidden rows a server hands out */
#define TV_PIPELINE_MAX         2  /* rounds of a session under way: one runs, one is staged */
#define TV_STOP_IDS_MAX         16
#define TV_SALT_BYTES_MAX       64
#define TV_LEASE_S_MAX          3600
#define TV_LEASE_S_DEFAULT      120
#define TV_DEADLINE_MS_MAX      600000
#define TV_DEADLINE_MS_DEFAULT  10000
#define TV_WAIT_MS_MAX          60000
#define TV_DECODE_TOKENS_MAX    1024
#define TV_TAIL_TOKENS_MAX      4096
#define TV_INLINE_BYTES_DEFAULT (16u << 20)
#define TV_REQUEST_ID_BYTES_MAX 64
#define TV_SEED_DIGITS_MAX      20
#define TV_KEY_BYTES_MAX        64 /* of an Idempotency-Key */
#define TV_BATCH_ITEMS_MAX      64
/* Calls that wait for an answer which another call is about to get: that of a round, a create or a
 * fork, or a batch; and as many GET .../rounds/{seq} for one round. */
#define TV_WAITERS_MAX 256

/* Answers that a session keeps for retries: whichever is less, always the last one. */
#define TV_REPLAY_ROUNDS_MAX 8
#define TV_REPLAY_BYTES_MAX  (64u << 10)

/* Rule typical. */
#define TV_TYPICAL_EPSILON_DEFAULT 0.09
#define TV_TYPICAL_DELTA_DEFAULT   0.3
/* A decoded query value: the indices 0 .. TV_ENGINE_NODES_MAX - 1, each once, and their commas. */
#define TV_QUERY_BYTES_MAX (10 + 2 * 90 + 3 * 900 + 4 * 24 + 1023)

#endif
