/*
 * keys.c - calls known by the Idempotency-Key that their client gave them: what they are, whether
 * they are under way, and what was answered.
 *
 * Refuses to forget a call that is under way, and to let who has many entries displace those of who
 * has few; else the oldest go first, by number and by bytes.
 */
#include "session/session.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

int tv_session_keys_init(struct tv_session_keys *keys)
{
    keys->hashes = calloc(TV_SESSION_KEYS_MAX, sizeof *keys->hashes);
    keys->entries = calloc(TV_SESSION_KEYS_MAX, sizeof *keys->entries);
    keys->owners = calloc(TV_SESSION_KEYS_MAX + 1, sizeof *keys->owners);
    return keys->hashes == NULL || keys->entries == NULL || keys->owners == NULL ? -1 : 0;
}

static void forget(struct tv_session_keys *keys, struct tv_session_key *entry)
{
    keys->hashes[entry - keys->entries] = 0;
    keys->bytes -= entry->body_bytes;
    entry->owner->count--;
    free(entry->body);
    memset(entry, 0, sizeof *entry);
}

void tv_session_keys_finish(struct tv_session_keys *keys)
{
    for (int32_t i = 0; keys->entries != NULL && i < TV_SESSION_KEYS_MAX; i++) {
        free(keys->entries[i].body);
    }
    free(keys->owners);
    free(keys->entries);
    free(keys->hashes);
}

/* FNV-1a; never 0, which marks a free place. Equal hashes only cost a comparison. */
static uint64_t hash_of(const char *principal, const char *key)
{
    uint64_t hash = UINT64_C(14695981039346656037);
    for (const char *c = principal; *c != '\0'; c++) {
        hash = (hash ^ (uint8_t)*c) * UINT64_C(1099511628211);
    }
    hash = (hash ^ 0xff) * UINT64_C(1099511628211);
    for (const char *c = key; *c != '\0'; c++) {
        hash = (hash ^ (uint8_t)*c) * UINT64_C(1099511628211);
    }
    return hash | 1;
}

/* Its time is over, and no live session keeps it. */
static int outlived(struct tv_sessions *table, const struct tv_session_key *entry, int64_t now_us)
{
    struct tv_session *session = NULL;
    return entry->operation == NULL && now_us - entry->done_us >= TV_SESSION_KEY_US &&
           tv_sessions_find(table, entry->made, entry->owner->principal, now_us, &session) != TV_OK;
}

struct tv_session_key *tv_session_key_find(struct tv_sessions *table, const char *principal,
                                           const char *key, int64_t now_us)
{
    struct tv_session_keys *keys = &table->keys;
    uint64_t hash = hash_of(principal, key);
    for (int32_t i = 0; i < TV_SESSION_KEYS_MAX; i++) {
        struct tv_session_key *entry = &keys->entries[i];
        if (keys->hashes[i] != hash || strcmp(entry->key, key) != 0 ||
            strcmp(entry->owner->principal, principal) != 0) {
            continue;
        }
        if (!outlived(table, entry, now_us)) {
            return entry;
        }
        forget(keys, entry);
        return NULL;
    }
    return NULL;
}

int tv_session_key_same(const struct tv_session_key *entry, const struct tv_request *request)
{
    return memcmp(entry->body_hash, request->body_hash, sizeof entry->body_hash) == 0 &&
           strcmp(entry->session, request->session) == 0;
}

/* Its place, or one that is free. */
static struct tv_session_key_owner *owner_of(struct tv_session_keys *keys, const char *principal)
{
    struct tv_session_key_owner *unused = NULL;
    for (int32_t i = 0; i <= TV_SESSION_KEYS_MAX; i++) {
        struct tv_session_key_owner *owner = &keys->owners[i];
        if (owner->count > 0 && strcmp(owner->principal, principal) == 0) {
            return owner;
        }
        unused = unused == NULL && owner->count == 0 ? owner : unused;
    }
    assert(unused != NULL); /* fewer have entries than there are places */
    memset(unused, 0, sizeof *unused);
    (void)strncpy(unused->principal, principal, sizeof unused->principal - 1);
    return unused;
}

static struct tv_session_key *free_place(struct tv_session_keys *keys)
{
    for (int32_t i = 0; i < TV_SESSION_KEYS_MAX; i++) {
        if (keys->hashes[i] == 0) {
            return &keys->entries[i];
        }
    }
    return NULL;
}

/* What goes for an entry of this owner, itself excepted: of what has ended the oldest of whoever
 * has the most, the owner before others who have as many. NULL: none. */
static struct tv_session_key *displaced(const struct tv_session_keys *keys,
                                        const struct tv_session_key_owner *owner,
                                        const struct tv_session_key *itself)
{
    struct tv_session_key *best = NULL;
    int32_t best_rank = 0;
    for (int32_t i = 0; i < TV_SESSION_KEYS_MAX; i++) {
        struct tv_session_key *entry = &keys->entries[i];
        if (keys->hashes[i] == 0 || entry->operation != NULL || entry == itself) {
            continue;
        }
        int32_t rank = 2 * entry->owner->count + (entry->owner == owner);
        if (rank > best_rank || (rank == best_rank && entry->serial < best->serial)) {
            best = entry;
            best_rank = rank;
        }
    }
    return best;
}

int tv_session_key_room(const struct tv_sessions *table)
{
    return table->keys.running < TV_SESSION_KEYS_MAX;
}

/* A place for an entry that nothing is known of. */
static struct tv_session_key *place_take(struct tv_session_keys *keys, const char *principal,
                                         const char *key)
{
    struct tv_session_key_owner *owner = owner_of(keys, principal);
    struct tv_session_key *entry = free_place(keys);
    if (entry == NULL) {
        entry = displaced(keys, owner, NULL);
        assert(entry != NULL); /* one of them has ended */
        forget(keys, entry);
    }
    keys->hashes[entry - keys->entries] = hash_of(principal, key);
    entry->owner = owner;
    entry->owner->count++;
    (void)strncpy(entry->key, key, sizeof entry->key - 1);
    return entry;
}

/* Of the answers, the oldest of whoever has the most go, this entry's excepted. */
static void bytes_bound(struct tv_session_keys *keys, const struct tv_session_key *entry)
{
    while (keys->bytes > TV_SESSION_KEY_BYTES_MAX) { /* its own answer is less */
        forget(keys, displaced(keys, entry->owner, entry));
    }
}

struct tv_session_key *tv_session_key_begin(struct tv_sessions *table, const char *principal,
                                            const char *key, const struct tv_request *request,
                                            void *operation)
{
    struct tv_session_keys *keys = &table->keys;
    if (!tv_session_key_room(table)) {
        return NULL;
    }
    struct tv_session_key *entry = place_take(keys, principal, key);
    entry->serial = keys->serial++;
    memcpy(entry->session, request->session, sizeof entry->session);
    memcpy(entry->body_hash, request->body_hash, sizeof entry->body_hash);
    entry->operation = operation;
    keys->running++;
    return entry;
}

void tv_session_key_end(struct tv_sessions *table, struct tv_session_key *entry, const char *made,
                        char *body, size_t body_bytes, int64_t now_us)
{
    struct tv_session_keys *keys = &table->keys;
    assert(entry->operation != NULL);
    entry->operation = NULL;
    keys->running--;
    entry->body = body;
    entry->body_bytes = body_bytes;
    entry->done_us = now_us;
    keys->bytes += body_bytes;
    if (body == NULL || body_bytes > TV_SESSION_KEY_BYTES_MAX) {
        forget(keys, entry);
        return;
    }
    (void)strncpy(entry->made, made, sizeof entry->made - 1);
    bytes_bound(keys, entry);
}

const struct tv_session_key *tv_session_key_made(const struct tv_sessions *table,
                                                 const struct tv_session *session)
{
    const struct tv_session_keys *keys = &table->keys;
    for (int32_t i = 0; i < TV_SESSION_KEYS_MAX; i++) {
        if (keys->hashes[i] != 0 && strcmp(keys->entries[i].made, session->id) == 0) {
            return &keys->entries[i]; /* it has ended: the session is there */
        }
    }
    return NULL;
}

void tv_session_key_restore(struct tv_sessions *table, const struct tv_session *session,
                            struct tv_session_key *key, int64_t now_us)
{
    struct tv_session_keys *keys = &table->keys;
    if (tv_session_key_find(table, session->principal, key->key, now_us) != NULL) {
        return;
    }
    struct tv_session_key *entry = place_take(keys, session->principal, key->key);
    entry->serial = key->serial;
    keys->serial = keys->serial > key->serial ? keys->serial : key->serial + 1;
    memcpy(entry->session, key->session, sizeof entry->session);
    memcpy(entry->body_hash, key->body_hash, sizeof entry->body_hash);
    memcpy(entry->made, session->id, sizeof entry->made);
    entry->body = key->body;
    entry->body_bytes = key->body_bytes;
    entry->done_us = now_us;
    keys->bytes += key->body_bytes;
    key->body = NULL;
    key->body_bytes = 0;
    bytes_bound(keys, entry);
}
