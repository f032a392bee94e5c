/*
 * keys.c - calls known by the Idempotency-Key that their client gave them: what they are, whether
 * they are under way, and what was answered.
 *
 * Refuses to forget a call that is under way; of those that ended the oldest go first, by number
 * and by bytes.
 */
#include "session/session.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

int tv_session_keys_init(struct tv_session_keys *keys)
{
    keys->hashes = calloc(TV_SESSION_KEYS_MAX, sizeof *keys->hashes);
    keys->entries = calloc(TV_SESSION_KEYS_MAX, sizeof *keys->entries);
    return keys->hashes == NULL || keys->entries == NULL ? -1 : 0;
}

static void forget(struct tv_session_keys *keys, struct tv_session_key *entry)
{
    keys->hashes[entry - keys->entries] = 0;
    keys->bytes -= entry->body_bytes;
    free(entry->body);
    memset(entry, 0, sizeof *entry);
}

void tv_session_keys_finish(struct tv_session_keys *keys)
{
    for (int32_t i = 0; keys->entries != NULL && i < TV_SESSION_KEYS_MAX; i++) {
        free(keys->entries[i].body);
    }
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
           tv_sessions_find(table, entry->made, entry->principal, now_us, &session) != TV_OK;
}

struct tv_session_key *tv_session_key_find(struct tv_sessions *table, const char *principal,
                                           const char *key, int64_t now_us)
{
    struct tv_session_keys *keys = &table->keys;
    uint64_t hash = hash_of(principal, key);
    for (int32_t i = 0; i < TV_SESSION_KEYS_MAX; i++) {
        struct tv_session_key *entry = &keys->entries[i];
        if (keys->hashes[i] != hash || strcmp(entry->key, key) != 0 ||
            strcmp(entry->principal, principal) != 0) {
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

struct tv_session_key *tv_session_key_begin(struct tv_sessions *table, const char *principal,
                                            const char *key, const struct tv_request *request,
                                            void *operation)
{
    struct tv_session_keys *keys = &table->keys;
    for (int32_t tried = 0; tried < TV_SESSION_KEYS_MAX; tried++) {
        struct tv_session_key *entry = &keys->entries[keys->next];
        keys->next = (keys->next + 1) % TV_SESSION_KEYS_MAX;
        if (entry->operation != NULL) {
            continue;
        }
        forget(keys, entry);
        keys->hashes[entry - keys->entries] = hash_of(principal, key);
        (void)strncpy(entry->principal, principal, sizeof entry->principal - 1);
        (void)strncpy(entry->key, key, sizeof entry->key - 1);
        memcpy(entry->session, request->session, sizeof entry->session);
        memcpy(entry->body_hash, request->body_hash, sizeof entry->body_hash);
        entry->operation = operation;
        return entry;
    }
    return NULL;
}

void tv_session_key_end(struct tv_sessions *table, struct tv_session_key *entry, const char *made,
                        char *body, size_t body_bytes, int64_t now_us)
{
    struct tv_session_keys *keys = &table->keys;
    assert(entry->operation != NULL);
    entry->operation = NULL;
    entry->body = body;
    entry->body_bytes = body_bytes;
    entry->done_us = now_us;
    keys->bytes += body_bytes;
    if (body == NULL || body_bytes > TV_SESSION_KEY_BYTES_MAX) {
        forget(keys, entry);
        return;
    }
    (void)strncpy(entry->made, made, sizeof entry->made - 1);
    for (int32_t i = 0; keys->bytes > TV_SESSION_KEY_BYTES_MAX && i < TV_SESSION_KEYS_MAX; i++) {
        struct tv_session_key *oldest = &keys->entries[(keys->next + i) % TV_SESSION_KEYS_MAX];
        if (oldest->body != NULL && oldest != entry) {
            forget(keys, oldest);
        }
    }
}
