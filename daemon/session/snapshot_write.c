/*
 * snapshot_write.c - the bytes of a snapshot: header, heads, and what is said of one session.
 *
 * Writes to memory alone; where the bytes go is its caller's. Refuses to keep answers that are too
 * large to be worth a stop's time.
 */
#include <assert.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "session/snapshot_format.h"

size_t tv_snapshot_page_bytes(const struct tv_snapshot_layout *layout)
{
    size_t bytes = 0;
    if (layout->layers < 1 || layout->page_size < 1 || layout->row_dim < 1 || layout->vocab < 1 ||
        layout->element < 0 || layout->element > 1 ||
        tv_size_mul((size_t)layout->row_dim, layout->element == 0 ? 4 : 2, &bytes) != 0 ||
        tv_size_mul(bytes, (size_t)layout->page_size, &bytes) != 0 ||
        tv_size_mul(bytes, (size_t)layout->layers, &bytes) != 0) {
        return 0;
    }
    return bytes;
}

void tv_snapshot_pages_finish(struct tv_snapshot_pages *pages)
{
    free(pages->numbers);
    memset(pages, 0, sizeof *pages);
}

void tv_snapshot_bytes_finish(struct tv_snapshot_bytes *bytes)
{
    free(bytes->data);
    memset(bytes, 0, sizeof *bytes);
}

static void put(struct tv_snapshot_bytes *bytes, const void *data, size_t count)
{
    if (bytes->failed || count == 0) {
        return;
    }
    if (count > SIZE_MAX / 2 - bytes->bytes) {
        bytes->failed = 1;
        return;
    }
    if (bytes->bytes + count > bytes->capacity) {
        size_t capacity = (bytes->bytes + count) * 2;
        uint8_t *grown = realloc(bytes->data, capacity);
        if (grown == NULL) {
            bytes->failed = 1;
            return;
        }
        bytes->data = grown;
        bytes->capacity = capacity;
    }
    memcpy(bytes->data + bytes->bytes, data, count);
    bytes->bytes += count;
}

static void put32(struct tv_snapshot_bytes *bytes, int32_t number)
{
    uint8_t little[4];
    tv_snapshot_set32(little, (uint32_t)number);
    put(bytes, little, sizeof little);
}

static void put64(struct tv_snapshot_bytes *bytes, int64_t number)
{
    uint8_t little[8];
    tv_snapshot_set64(little, (uint64_t)number);
    put(bytes, little, sizeof little);
}

static void put_double(struct tv_snapshot_bytes *bytes, double number)
{
    int64_t bits;
    memcpy(&bits, &number, sizeof bits);
    put64(bytes, bits);
}

static void put_all32(struct tv_snapshot_bytes *bytes, const int32_t *numbers, int32_t count)
{
    for (int32_t i = 0; i < count; i++) {
        put32(bytes, numbers[i]);
    }
}

static void sum_of(const void *data, size_t bytes, uint8_t ret_sum[32])
{
    struct tv_sha256 hash;
    tv_sha256_init(&hash);
    tv_sha256_update(&hash, data, bytes);
    tv_sha256_finish(&hash, ret_sum);
}

void tv_snapshot_write_header(const struct tv_snapshot_layout *layout, int64_t saved_unix_ms,
                              uint8_t ret_header[TV_SNAPSHOT_HEADER_BYTES])
{
    const int32_t numbers[] = {SNAPSHOT_VERSION, layout->layers,  layout->page_size,
                               layout->row_dim,  layout->element, layout->vocab};
    uint8_t *at = ret_header + SNAPSHOT_MAGIC_BYTES;
    memcpy(ret_header, SNAPSHOT_MAGIC, SNAPSHOT_MAGIC_BYTES);
    for (size_t i = 0; i < sizeof numbers / sizeof numbers[0]; i++) {
        tv_snapshot_set32(at, (uint32_t)numbers[i]);
        at += 4;
    }
    memcpy(at, layout->model_id, sizeof layout->model_id);
    at += sizeof layout->model_id;
    memcpy(at, layout->maker, sizeof layout->maker);
    at += sizeof layout->maker;
    tv_snapshot_set64(at, (uint64_t)saved_unix_ms);
    at += 8;
    assert(at + 32 == ret_header + TV_SNAPSHOT_HEADER_BYTES);
    sum_of(ret_header, TV_SNAPSHOT_HEADER_BYTES - 32, at);
}

static int is_kept(const struct tv_session_kept *kept)
{
    return kept->body_bytes <= TV_SNAPSHOT_ANSWER_BYTES_MAX;
}

static void put_kept(struct tv_snapshot_bytes *body, const struct tv_session_kept *kept)
{
    put32(body, kept->seq);
    put32(body, kept->leaf);
    put64(body, (int64_t)kept->body_bytes);
    put64(body, (int64_t)kept->outcome_at);
    put64(body, (int64_t)kept->outcome_bytes);
    put(body, kept->body_hash, sizeof kept->body_hash);
    put(body, kept->body, kept->body_bytes);
}

static void put_held(struct tv_snapshot_bytes *body, const struct tv_session_held *held)
{
    const int32_t numbers[] = {held->seq,
                               (int32_t)held->rule,
                               held->count,
                               held->proposed_count,
                               held->pending,
                               held->settled,
                               held->settled ? held->len_before : 0};
    if (held->seq == 0) {
        put32(body, 0);
        return;
    }
    put_all32(body, numbers, (int32_t)(sizeof numbers / sizeof numbers[0]));
    put_all32(body, held->tokens, held->count);
    put_all32(body, held->parents, held->count);
    put_all32(body, held->proposed, held->proposed_count);
}

/* Where the epoch stands in the answer of a create or fork; 0: nowhere. */
static size_t epoch_in(const struct tv_session_key *key, const char *epoch)
{
    char text[40];
    int bytes = snprintf(text, sizeof text, "\"epoch\":\"%s\"", epoch); /* fits */
    const char *found = memmem(key->body, key->body_bytes, text, (size_t)bytes);
    return found != NULL ? (size_t)(found - key->body) + strlen("\"epoch\":\"") : 0;
}

static void put_key(struct tv_snapshot_bytes *body, const struct tv_session_key *key,
                    const char *epoch)
{
    size_t epoch_at = key != NULL ? epoch_in(key, epoch) : 0;
    if (epoch_at == 0) {
        put32(body, 0);
        return;
    }
    size_t key_bytes = strlen(key->key);
    put32(body, (int32_t)key_bytes);
    put(body, key->key, key_bytes);
    put(body, key->session, sizeof key->session);
    put(body, key->body_hash, sizeof key->body_hash);
    put64(body, (int64_t)key->serial);
    put64(body, (int64_t)epoch_at);
    put64(body, (int64_t)key->body_bytes);
    put(body, key->body, key->body_bytes);
}

void tv_snapshot_write_body(const struct tv_session *session, const struct tv_snapshot_pages *pages,
                            const struct tv_session_key *key, struct tv_snapshot_bytes *ret_body)
{
    const struct tv_sampling_state *sampling = &session->sampling;
    char id[32] = "", principal[SNAPSHOT_PRINCIPAL_BYTES] = "";
    int32_t kept_count = 0;
    for (int32_t i = 0; i < session->kept_count; i++) {
        kept_count += is_kept(&session->kept[i]);
    }
    memcpy(id, session->id, strnlen(session->id, sizeof id - 1));
    memcpy(principal, session->principal, strlen(session->principal));
    memset(ret_body, 0, sizeof *ret_body);
    put(ret_body, id, sizeof id);
    put(ret_body, principal, sizeof principal);
    put(ret_body, session->root.bytes, sizeof session->root.bytes);
    put(ret_body, session->digest.bytes, sizeof session->digest.bytes);
    const int32_t numbers[] = {
        session->len,     session->pending,      session->next_seq,   (int32_t)session->finish,
        session->max_len, session->lease_s,      pages->exact,        (int32_t)sampling->rule,
        sampling->top_k,  sampling->has_typical, session->stop_count, pages->count,
        kept_count};
    put_all32(ret_body, numbers, (int32_t)(sizeof numbers / sizeof numbers[0]));
    put_double(ret_body, sampling->temperature);
    put_double(ret_body, sampling->top_p);
    put_double(ret_body, sampling->min_p);
    put_double(ret_body, sampling->typical_epsilon);
    put_double(ret_body, sampling->typical_delta);
    put64(ret_body, (int64_t)sampling->seed);
    put64(ret_body, session->lease_expires_unix_ms);
    put64(ret_body, session->verify_rounds);
    put64(ret_body, session->verify_tokens);
    put64(ret_body, session->drafts.nodes);
    put64(ret_body, session->drafts.levels);
    put_all32(ret_body, session->drafts.tried, TV_SESSION_DEPTHS_MAX);
    put_all32(ret_body, session->drafts.taken, TV_SESSION_DEPTHS_MAX);
    put_all32(ret_body, session->stop_ids, TV_STOP_IDS_MAX);
    assert(ret_body->failed || ret_body->bytes == SNAPSHOT_BODY_FIXED_BYTES);
    for (int32_t i = 0; i < pages->count; i++) {
        put32(ret_body, (int32_t)pages->numbers[i]);
    }
    put_all32(ret_body, session->tokens, session->len);
    for (int32_t i = 0; i < session->kept_count; i++) {
        if (is_kept(&session->kept[i])) {
            put_kept(ret_body, &session->kept[i]);
        }
    }
    put_held(ret_body, &session->held);
    put_key(ret_body, key, session->table->epoch);
}

static void head_fill(uint32_t kind, uint32_t count, uint64_t number, const uint8_t sum[32],
                      uint8_t ret_head[TV_SNAPSHOT_HEAD_BYTES])
{
    tv_snapshot_set32(ret_head, kind);
    tv_snapshot_set32(ret_head + 4, count);
    tv_snapshot_set64(ret_head + 8, number);
    memcpy(ret_head + 16, sum, 32);
    sum_of(ret_head, 48, ret_head + 48);
}

void tv_snapshot_write_head(const struct tv_snapshot_bytes *body, uint32_t new_pages,
                            struct tv_sha256 *heads, uint8_t ret_head[TV_SNAPSHOT_HEAD_BYTES])
{
    uint8_t sum[32];
    sum_of(body->data, body->bytes, sum);
    head_fill(SNAPSHOT_SESSION, new_pages, body->bytes, sum, ret_head);
    tv_sha256_update(heads, ret_head, TV_SNAPSHOT_HEAD_BYTES);
}

void tv_snapshot_write_end(uint32_t sessions, uint64_t pages, const struct tv_sha256 *heads,
                           uint8_t ret_head[TV_SNAPSHOT_HEAD_BYTES])
{
    struct tv_sha256 copy = *heads;
    uint8_t sum[32];
    tv_sha256_finish(&copy, sum);
    head_fill(SNAPSHOT_END, sessions, pages, sum, ret_head);
}

void tv_snapshot_page_sum(const void *page, size_t bytes, uint64_t number, uint8_t ret_sum[32])
{
    struct tv_sha256 hash;
    uint8_t little[8];
    tv_snapshot_set64(little, number);
    tv_sha256_init(&hash);
    tv_sha256_update(&hash, page, bytes);
    tv_sha256_update(&hash, little, sizeof little);
    tv_sha256_finish(&hash, ret_sum);
}
