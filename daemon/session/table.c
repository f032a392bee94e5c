/*
 * table.c - the session table: ids, lookup by owner, expiry, and the list of the gone.
 *
 * Refuses to tell a foreign session from one that never was.
 */
#include "session/session.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/random.h"
#include "session/internal.h"

/* 16 random bytes as 22 characters of base64url, without padding. */
static void id_write(char *id, const uint8_t bytes[16])
{
    static const char alphabet[] =
        "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";
    uint32_t bits = 0;
    int held = 0;
    *id++ = 's';
    *id++ = '_';
    for (int i = 0; i < 16; i++) {
        bits = bits << 8 | bytes[i];
        for (held += 8; held >= 6; held -= 6) {
            *id++ = alphabet[bits >> (held - 6) & 63];
        }
    }
    *id++ = alphabet[bits << (6 - held) & 63];
    *id = '\0';
}

/* Ids are random, so any of their characters make a hash. */
static uint64_t id_key(const char *id)
{
    char padded[32] = "";
    uint64_t key;
    memcpy(padded, id, strnlen(id, sizeof padded - 1));
    memcpy(&key, padded + 2, sizeof key);
    return key * 0x9e3779b97f4a7c15u;
}

static struct tv_session **bucket_of(const struct tv_sessions *table, const char *id)
{
    return &table->buckets[(id_key(id) >> 32) & (table->bucket_count - 1)];
}

int tv_sessions_init(struct tv_sessions *table, const struct tv_sessions_params *params)
{
    uint8_t random[8];
    memset(table, 0, sizeof *table);
    int rc = pthread_mutex_init(&table->lock, NULL);
    if (rc != 0) {
        return -rc;
    }
    table->params = *params;
    table->bucket_count = 64;
    while (table->bucket_count < (size_t)params->sessions_max) {
        table->bucket_count *= 2;
    }
    table->buckets = calloc(table->bucket_count, sizeof(struct tv_session *));
    table->tombs = calloc(TV_SESSION_EXPIRED_MAX, sizeof *table->tombs);
    if (tv_session_keys_init(&table->keys) != 0 || table->buckets == NULL || table->tombs == NULL) {
        return -ENOMEM;
    }
    rc = tv_random_bytes(random, sizeof random);
    for (int i = 0; i < 8; i++) {
        table->epoch[2 * i] = "0123456789abcdef"[random[i] >> 4];
        table->epoch[2 * i + 1] = "0123456789abcdef"[random[i] & 15];
    }
    return rc;
}

void tv_sessions_finish(struct tv_sessions *table)
{
    for (size_t i = 0; table->buckets != NULL && i < table->bucket_count; i++) {
        while (table->buckets[i] != NULL) {
            struct tv_session *session = table->buckets[i];
            table->buckets[i] = session->next;
            tv_session_destroy(session);
        }
    }
    while (table->gone != NULL) {
        struct tv_session *session = table->gone;
        table->gone = session->next;
        tv_session_destroy(session);
    }
    free(table->buckets);
    free(table->tombs);
    tv_session_keys_finish(&table->keys);
    (void)pthread_mutex_destroy(&table->lock); /* nobody holds it any more */
}

static int sampling_settle(struct tv_sampling_state *state, const struct tv_request *request)
{
    state->rule = request->sampling.rule;
    state->temperature = request->has_sampling ? request->sampling.temperature : 1.0;
    state->top_p = request->has_sampling ? request->sampling.top_p : 1.0;
    state->min_p = request->sampling.min_p;
    state->top_k = request->sampling.top_k;
    state->seed = request->sampling.seed;
    state->has_typical = request->sampling.has_typical || state->rule == TV_RULE_TYPICAL;
    state->typical_epsilon = request->sampling.typical_epsilon;
    state->typical_delta = request->sampling.typical_delta;
    if (request->has_sampling && request->sampling.has_seed) {
        return 0;
    }
    return tv_random_bytes(&state->seed, sizeof state->seed);
}

int tv_session_blank(const struct tv_sessions *table, struct tv_session **ret_session)
{
    struct tv_session *session = calloc(1, sizeof *session);
    if (session == NULL) {
        return -ENOMEM;
    }
    session->table = table;
    session->next_seq = 1;
    session->feed = tv_feed_create();
    if (session->feed == NULL) {
        free(session);
        return -ENOMEM;
    }
    *ret_session = session;
    return 0;
}

/* One with nothing but an id, an owner and a first round; not counted yet. */
static int session_make(struct tv_sessions *table, const char *principal,
                        struct tv_session **ret_session)
{
    uint8_t random[16];
    struct tv_session *session = NULL;
    if (table->count >= table->params.sessions_max) {
        return -EBUSY;
    }
    int rc = tv_random_bytes(random, sizeof random);
    if (rc == 0) {
        rc = tv_session_blank(table, &session);
    }
    if (rc != 0) {
        return rc;
    }
    id_write(session->id, random);
    (void)strncpy(session->principal, principal, sizeof session->principal - 1);
    *ret_session = session;
    return 0;
}

int tv_sessions_build(struct tv_sessions *table, const struct tv_request *request,
                      const char *principal, struct tv_session **ret_session)
{
    struct tv_session *session = NULL;
    int rc = session_make(table, principal, &session);
    if (rc != 0) {
        return rc;
    }
    rc = sampling_settle(&session->sampling, request);
    memcpy(session->stop_ids, request->stop_ids, sizeof session->stop_ids);
    session->stop_count = request->stop_count;
    session->max_len = table->params.model_max_len;
    if (request->max_len > 0 && request->max_len < session->max_len) {
        session->max_len = request->max_len;
    }
    session->lease_s = request->lease_s > 0 ? request->lease_s : TV_LEASE_S_DEFAULT;
    tv_digest_start(&session->root, table->params.model_id, request->cache_salt,
                    (size_t)request->cache_salt_bytes);
    session->digest = session->root;
    if (rc == 0) {
        rc = tv_session_reserve(session, request->token_count);
    }
    if (rc != 0) {
        tv_session_destroy(session);
        return rc;
    }
    table->count++;
    *ret_session = session;
    return 0;
}

int tv_sessions_fork(struct tv_sessions *table, const struct tv_session *parent, int32_t len,
                     const struct tv_request *request, struct tv_session **ret_session)
{
    struct tv_session *session = NULL;
    int rc = session_make(table, parent->principal, &session);
    if (rc != 0) {
        return rc;
    }
    rc = tv_session_reserve(session, len);
    if (rc != 0) {
        tv_session_destroy(session);
        return rc;
    }
    memcpy(session->tokens, parent->tokens, (size_t)len * sizeof *session->tokens);
    int32_t borders = len / table->params.page_size;
    if (borders > 0) {
        memcpy(session->borders, parent->borders, (size_t)borders * sizeof *session->borders);
    }
    session->root = parent->root;
    session->max_len = parent->max_len;
    memcpy(session->stop_ids, parent->stop_ids, sizeof session->stop_ids);
    session->stop_count = parent->stop_count;
    session->sampling = parent->sampling;
    if (request->sampling.has_seed) {
        session->sampling.seed = request->sampling.seed;
    }
    session->lease_s = request->lease_s > 0 ? request->lease_s : parent->lease_s;
    session->len = len;
    tv_session_at(parent, len, &session->digest, &session->pending, &session->finish);
    if (len == parent->len) {
        session->finish = parent->finish;
    }
    table->count++;
    *ret_session = session;
    return 0;
}

static void enter(struct tv_sessions *table, struct tv_session *session)
{
    struct tv_session **bucket = bucket_of(table, session->id);
    session->next = *bucket;
    *bucket = session;
    table->created_count++;
}

void tv_sessions_publish(struct tv_sessions *table, struct tv_session *session, int64_t now_us)
{
    enter(table, session);
    tv_session_renew(session, 0, now_us);
}

int tv_sessions_restore(struct tv_sessions *table, struct tv_session *session, int64_t left_ms,
                        int64_t now_us)
{
    for (const struct tv_session *one = *bucket_of(table, session->id); one != NULL;
         one = one->next) {
        if (strcmp(one->id, session->id) == 0) {
            return -EEXIST;
        }
    }
    if (table->count >= table->params.sessions_max) {
        return -EBUSY;
    }
    int64_t lease_ms = (int64_t)session->lease_s * 1000;
    left_ms = left_ms < lease_ms ? left_ms : lease_ms; /* the wall clock may have been set */
    table->count++;
    table->restored_count++;
    enter(table, session);
    session->restored = 1;
    session->idle_us = now_us;
    session->lease_expires_us = now_us + left_ms * 1000;
    session->lease_expires_unix_ms = tv_clock_unix_ms() + left_ms;
    tv_feed_note_set(session->feed, session->lease_expires_unix_ms);
    int32_t told = tv_session_told(session);
    if (told > 0) { /* who followed it is told that he has missed these */
        tv_feed_push(session->feed, told, NULL, 0);
    }
    return 0;
}

static void gone_push(struct tv_sessions *table, struct tv_session *session)
{
    session->next = table->gone;
    table->gone = session;
}

void tv_sessions_discard(struct tv_sessions *table, struct tv_session *session)
{
    table->count--;
    session->gone = 1;
    session->busy = 0;
    session->operation = NULL;
    gone_push(table, session);
}

static void ring(const struct tv_session *session)
{
    const struct tv_sessions *table = session->table;
    if (table->bell != NULL && tv_feed_readers(session->feed) > 0) {
        table->bell(table->bell_context);
    }
}

void tv_session_tell(struct tv_session *session, int32_t number, char *text, size_t bytes)
{
    tv_feed_push(session->feed, number, text, bytes);
    ring(session);
}

int32_t tv_session_told(const struct tv_session *session)
{
    /* a held round has told nothing: its commit may still do so under its number */
    int held = session->held.seq > 0 && !session->held.settled;
    return held ? session->held.seq - 1 : session->next_seq - 1;
}

void tv_sessions_remove(struct tv_sessions *table, struct tv_session *session,
                        enum tv_session_end why)
{
    tv_feed_end(session->feed, (int)why);
    ring(session);
    struct tv_session **link = bucket_of(table, session->id);
    while (*link != session) {
        link = &(*link)->next;
    }
    *link = session->next;
    session->next = NULL;
    session->gone = 1;
    table->count--;
    table->closed_count++;
    if (!session->busy) {
        gone_push(table, session);
    }
}

void tv_session_occupy(struct tv_session *session, int32_t seq, const uint8_t *body_hash,
                       void *operation)
{
    session->busy = 1;
    session->running_seq = seq;
    session->operation = operation;
    if (seq > 0) {
        memcpy(session->running_hash, body_hash, sizeof session->running_hash);
    }
}

void tv_session_idle(struct tv_sessions *table, struct tv_session *session)
{
    session->busy = 0;
    session->running_seq = 0;
    session->operation = NULL;
    session->idle_us = tv_clock_us();
    if (session->gone) {
        gone_push(table, session);
    }
}

void tv_session_wait(struct tv_session *session, int32_t seq, const uint8_t *body_hash,
                     void *operation)
{
    session->behind = operation;
    session->behind_seq = operation != NULL ? seq : 0;
    if (operation != NULL) {
        memcpy(session->behind_hash, body_hash, sizeof session->behind_hash);
    }
}

void tv_session_hold(struct tv_session *session)
{
    session->holds++;
}

void tv_session_let_go(struct tv_session *session, int64_t now_us)
{
    session->holds--;
    tv_session_renew(session, 0, now_us);
}

/* A session in use does not expire: what uses it ends and renews the lease. */
static int in_use(const struct tv_session *session)
{
    return session->busy || session->holds > 0;
}

static int lease_over(const struct tv_session *session, int64_t now_us)
{
    return !in_use(session) && now_us >= session->lease_expires_us;
}

void tv_sessions_expire(struct tv_sessions *table, struct tv_session *session)
{
    struct tv_session_tomb *tomb = &table->tombs[table->tomb_next];
    tomb->key = id_key(session->id);
    memcpy(tomb->id, session->id, sizeof tomb->id);
    memcpy(tomb->principal, session->principal, sizeof tomb->principal);
    table->tomb_next = (table->tomb_next + 1) % TV_SESSION_EXPIRED_MAX;
    if (table->tomb_count < TV_SESSION_EXPIRED_MAX) {
        table->tomb_count++;
    }
    tv_sessions_remove(table, session, TV_SESSION_LEASE_OVER);
    table->closed_count--;
    table->expired_count++;
}

enum tv_code tv_sessions_find(struct tv_sessions *table, const char *id, const char *principal,
                              int64_t now_us, struct tv_session **ret_session)
{
    for (struct tv_session *session = *bucket_of(table, id); session != NULL;
         session = session->next) {
        if (strcmp(session->id, id) != 0) {
            continue;
        }
        if (strcmp(session->principal, principal) != 0) {
            return TV_SESSION_NOT_FOUND;
        }
        if (lease_over(session, now_us)) {
            tv_sessions_expire(table, session);
            return TV_SESSION_EXPIRED;
        }
        *ret_session = session;
        return TV_OK;
    }
    uint64_t key = id_key(id);
    for (int32_t i = 0; i < table->tomb_count; i++) {
        const struct tv_session_tomb *tomb = &table->tombs[i];
        if (tomb->key == key && strcmp(tomb->id, id) == 0) {
            return strcmp(tomb->principal, principal) == 0 ? TV_SESSION_EXPIRED
                                                           : TV_SESSION_NOT_FOUND;
        }
    }
    return TV_SESSION_NOT_FOUND;
}

int64_t tv_sessions_sweep(struct tv_sessions *table, int64_t now_us)
{
    int64_t earliest_us = INT64_MAX;
    for (size_t i = 0; i < table->bucket_count; i++) {
        struct tv_session *session = table->buckets[i];
        while (session != NULL) {
            struct tv_session *next = session->next;
            if (lease_over(session, now_us)) {
                tv_sessions_expire(table, session);
            } else if (!in_use(session) && session->lease_expires_us < earliest_us) {
                earliest_us = session->lease_expires_us;
            }
            session = next;
        }
    }
    return earliest_us;
}

int tv_sessions_list(struct tv_sessions *table, const char *principal, int64_t now_us,
                     struct tv_session_state **ret_states, int32_t *ret_count)
{
    (void)tv_sessions_sweep(table, now_us); /* only its effect is wanted: none over its lease */
    struct tv_session_state *states = calloc((size_t)table->count + 1, sizeof *states);
    int32_t count = 0;
    if (states == NULL) {
        return -ENOMEM;
    }
    for (size_t i = 0; i < table->bucket_count; i++) {
        for (struct tv_session *session = table->buckets[i]; session != NULL;
             session = session->next) {
            if (strcmp(session->principal, principal) == 0) {
                (void)tv_session_view(session, -1, &states[count++]); /* no tail: cannot fail */
            }
        }
    }
    *ret_states = states;
    *ret_count = count;
    return 0;
}

struct tv_session *tv_sessions_take_gone(struct tv_sessions *table)
{
    struct tv_session *gone = table->gone;
    table->gone = NULL;
    return gone;
}
