/*
 * snapshot_read.c - a snapshot's frame: header, heads, pages, and where each session's body is.
 *
 * Every number is judged before it is used, as a size against what is left. Checksums come first,
 * so damage is told from nonsense; but they are no signature, and nothing here, or in
 * snapshot_body.c, relies on them for safety.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "session/internal.h"
#include "session/snapshot_format.h"

static int sum_is(const void *data, size_t bytes, const uint8_t sum[32])
{
    struct tv_sha256 hash;
    uint8_t own[32];
    tv_sha256_init(&hash);
    tv_sha256_update(&hash, data, bytes);
    tv_sha256_finish(&hash, own);
    return memcmp(own, sum, sizeof own) == 0;
}

/* 0, or -EBADMSG: it is not all there. */
static int read_at(const struct tv_snapshot_source *source, uint64_t offset, void *to, size_t bytes)
{
    if (offset > source->size || bytes > source->size - offset) {
        return -EBADMSG;
    }
    return source->read(source->context, offset, to, bytes);
}

static int refuse(int rc, char *error, size_t error_bytes, const char *text)
{
    (void)snprintf(error, error_bytes, "%s", text);
    return rc;
}

static int number_is(uint32_t number, int32_t wanted, const char *name, char *error,
                     size_t error_bytes)
{
    if (number == (uint32_t)wanted) {
        return 1;
    }
    (void)snprintf(error, error_bytes, "its %s is %u, here it is %d", name, (unsigned)number,
                   wanted);
    return 0;
}

/* 0, -EBADMSG or -EXDEV. */
static int judge_header(const uint8_t *header, const struct tv_snapshot_layout *layout,
                        struct tv_snapshot_reader *reader, char *error, size_t error_bytes)
{
    const uint8_t *at = header + SNAPSHOT_MAGIC_BYTES;
    if (memcmp(header, SNAPSHOT_MAGIC, SNAPSHOT_MAGIC_BYTES) != 0) {
        return refuse(-EBADMSG, error, error_bytes, "it is no snapshot");
    }
    reader->version = tv_snapshot_get32(at);
    if ((reader->version < SNAPSHOT_VERSION_OLDEST || reader->version > SNAPSHOT_VERSION) &&
        !number_is(reader->version, SNAPSHOT_VERSION, "format version", error, error_bytes)) {
        return -EXDEV;
    }
    if (!sum_is(header, TV_SNAPSHOT_HEADER_BYTES - 32, header + TV_SNAPSHOT_HEADER_BYTES - 32)) {
        return refuse(-EBADMSG, error, error_bytes, "its header is damaged");
    }
    if (memcmp(at + 24, layout->model_id, sizeof layout->model_id) != 0) {
        (void)snprintf(error, error_bytes, "it is of another model (model_id %02x%02x%02x%02x...)",
                       at[24], at[25], at[26], at[27]);
        return -EXDEV;
    }
    const struct {
        int32_t wanted;
        const char *name;
    } numbers[] = {{layout->layers, "number of layers"},
                   {layout->page_size, "page_size"},
                   {layout->row_dim, "row length"},
                   {layout->element, "kv_dtype (0: f32, 1: bf16)"},
                   {layout->vocab, "vocabulary"}};
    for (size_t i = 0; i < sizeof numbers / sizeof numbers[0]; i++) {
        if (!number_is(tv_snapshot_get32(at + 4 + 4 * i), numbers[i].wanted, numbers[i].name, error,
                       error_bytes)) {
            return -EXDEV;
        }
    }
    reader->same_maker = memcmp(at + 56, layout->maker, sizeof layout->maker) == 0;
    reader->saved_unix_ms = (int64_t)tv_snapshot_get64(at + 152);
    return 0;
}

static int pages_add(struct tv_snapshot_reader *reader, uint64_t *ret_capacity, uint64_t first_at,
                     uint32_t count)
{
    uint64_t needed = reader->page_count + count;
    if (needed > *ret_capacity) {
        uint64_t capacity = needed * 2;
        uint64_t *pages = NULL;
        if (capacity <= SIZE_MAX / sizeof *pages) {
            pages = realloc(reader->pages, (size_t)capacity * sizeof *pages);
        }
        if (pages == NULL) {
            return -ENOMEM;
        }
        reader->pages = pages;
        *ret_capacity = capacity;
    }
    for (uint32_t i = 0; i < count; i++) {
        reader->pages[reader->page_count++] = first_at + i * ((uint64_t)reader->page_bytes + 32);
    }
    return 0;
}

/* Where the head behind this one is. 0 or -EBADMSG: it is not in the file. */
static int head_next(const struct tv_snapshot_reader *reader, const uint8_t *head, uint64_t at,
                     uint64_t *ret_pages_at, uint64_t *ret_next)
{
    uint64_t body = tv_snapshot_get64(head + 8), left = reader->source.size - at;
    uint64_t page = (uint64_t)reader->page_bytes + 32, pages;
    left -= TV_SNAPSHOT_HEAD_BYTES; /* which has been read */
    if (body > left || body > TV_SNAPSHOT_BODY_BYTES_MAX || body < SNAPSHOT_BODY_FIXED_BYTES ||
        __builtin_mul_overflow(page, (uint64_t)tv_snapshot_get32(head + 4), &pages) ||
        pages > left - body) {
        return -EBADMSG;
    }
    *ret_pages_at = at + TV_SNAPSHOT_HEAD_BYTES + body;
    *ret_next = *ret_pages_at + pages;
    return 0;
}

/* From head to head, up to the end. */
static int walk(struct tv_snapshot_reader *reader, char *error, size_t error_bytes)
{
    uint64_t at = TV_SNAPSHOT_HEADER_BYTES, capacity = 0, pages_at = 0, next = 0;
    uint8_t head[TV_SNAPSHOT_HEAD_BYTES], sum[32];
    struct tv_sha256 heads;
    tv_sha256_init(&heads);
    for (;;) {
        int rc = read_at(&reader->source, at, head, sizeof head);
        if (rc != 0) {
            return refuse(rc, error, error_bytes,
                          rc == -EBADMSG ? "it ends before its end" : "it cannot be read");
        }
        if (!sum_is(head, 48, head + 48)) {
            return refuse(-EBADMSG, error, error_bytes, "a session's head is damaged");
        }
        if (tv_snapshot_get32(head) != SNAPSHOT_SESSION) {
            break;
        }
        if (head_next(reader, head, at, &pages_at, &next) != 0) {
            return refuse(-EBADMSG, error, error_bytes, "a session is longer than the file");
        }
        rc = pages_add(reader, &capacity, pages_at, tv_snapshot_get32(head + 4));
        if (rc != 0) {
            return refuse(rc, error, error_bytes, "no memory for the list of its pages");
        }
        tv_sha256_update(&heads, head, sizeof head);
        reader->session_count++;
        at = next;
    }
    tv_sha256_finish(&heads, sum);
    if (tv_snapshot_get32(head) != SNAPSHOT_END || memcmp(head + 16, sum, sizeof sum) != 0 ||
        tv_snapshot_get32(head + 4) != reader->session_count ||
        tv_snapshot_get64(head + 8) != reader->page_count ||
        at + TV_SNAPSHOT_HEAD_BYTES != reader->source.size) {
        return refuse(-EBADMSG, error, error_bytes, "its end does not fit what stands before");
    }
    return 0;
}

int tv_snapshot_open(const struct tv_snapshot_source *source,
                     const struct tv_snapshot_layout *layout, struct tv_snapshot_reader *ret_reader,
                     char *error, size_t error_bytes)
{
    uint8_t header[TV_SNAPSHOT_HEADER_BYTES];
    memset(ret_reader, 0, sizeof *ret_reader);
    ret_reader->source = *source;
    ret_reader->page_bytes = tv_snapshot_page_bytes(layout);
    if (ret_reader->page_bytes == 0) {
        return refuse(-EXDEV, error, error_bytes, "there are no pages here");
    }
    ret_reader->at = TV_SNAPSHOT_HEADER_BYTES;
    int rc = read_at(source, 0, header, sizeof header);
    if (rc == -EBADMSG && source->is_cut) {
        return 0; /* nothing was written yet */
    }
    if (rc != 0) {
        return refuse(rc, error, error_bytes,
                      rc == -EBADMSG ? "it is shorter than a header" : "it cannot be read");
    }
    rc = judge_header(header, layout, ret_reader, error, error_bytes);
    if (rc == 0) {
        rc = walk(ret_reader, error, error_bytes);
        rc = rc == -EBADMSG && source->is_cut ? 0 : rc; /* up to there it is whole */
    }
    return rc;
}

void tv_snapshot_close(struct tv_snapshot_reader *reader)
{
    free(reader->pages);
    memset(reader, 0, sizeof *reader);
}

void tv_snapshot_item_finish(struct tv_snapshot_item *item)
{
    tv_snapshot_pages_finish(&item->pages);
    tv_session_destroy(item->session);
    free(item->key.body);
    memset(item, 0, sizeof *item);
}

/* The body behind a head that has been judged. 1, or -EBADMSG, -ENOMEM with error. */
static int item_read(const struct tv_snapshot_reader *reader, const uint8_t *head, int32_t vocab,
                     struct tv_snapshot_item *item, char *error, size_t error_bytes)
{
    size_t bytes = (size_t)tv_snapshot_get64(head + 8);
    uint8_t *body = malloc(bytes);
    int rc = 1;
    if (body == NULL) {
        rc = refuse(-ENOMEM, error, error_bytes, "no memory for it");
    } else if (read_at(&reader->source, reader->at + TV_SNAPSHOT_HEAD_BYTES, body, bytes) != 0 ||
               !sum_is(body, bytes, head + 16)) {
        rc = refuse(-EBADMSG, error, error_bytes, "what is said of it is damaged");
    } else {
        uint64_t known = reader->passed + tv_snapshot_get32(head + 4);
        known = known < reader->page_count ? known : reader->page_count;
        const char *wrong =
            tv_snapshot_body_decode(body, bytes, reader->version, known, vocab, item);
        rc = wrong != NULL ? refuse(-EBADMSG, error, error_bytes, wrong) : 1;
    }
    free(body);
    return rc;
}

int tv_snapshot_next(struct tv_snapshot_reader *reader, const struct tv_sessions *table,
                     int32_t vocab, struct tv_snapshot_item *ret_item, char *error,
                     size_t error_bytes)
{
    uint8_t head[TV_SNAPSHOT_HEAD_BYTES];
    uint64_t pages_at = 0, next = 0;
    char id[sizeof ret_item->id];
    memset(ret_item, 0, sizeof *ret_item);
    int rc = read_at(&reader->source, reader->at, head, sizeof head);
    if (rc != 0 || tv_snapshot_get32(head) != SNAPSHOT_SESSION || !sum_is(head, 48, head + 48) ||
        head_next(reader, head, reader->at, &pages_at, &next) != 0) {
        return 0; /* the end; or somebody writes into the file, whose rest is lost */
    }
    if (tv_session_blank(table, &ret_item->session) != 0) {
        rc = refuse(-ENOMEM, error, error_bytes, "no memory for it");
    } else {
        rc = item_read(reader, head, vocab, ret_item, error, error_bytes);
    }
    reader->passed += tv_snapshot_get32(head + 4);
    reader->at = next;
    if (rc != 1) { /* its name is all that is left */
        memcpy(id, ret_item->id, sizeof id);
        tv_snapshot_item_finish(ret_item);
        memcpy(ret_item->id, id, sizeof id);
    }
    return rc;
}

int tv_snapshot_page(const struct tv_snapshot_reader *reader, uint32_t number, void *to)
{
    uint8_t sum[32], own[32];
    if (number >= reader->page_count) {
        return -EBADMSG;
    }
    int rc = read_at(&reader->source, reader->pages[number], to, reader->page_bytes);
    if (rc == 0) {
        rc = read_at(&reader->source, reader->pages[number] + reader->page_bytes, sum, sizeof sum);
    }
    if (rc != 0) {
        return rc;
    }
    tv_snapshot_page_sum(to, reader->page_bytes, number, own);
    return memcmp(own, sum, sizeof own) == 0 ? 0 : -EBADMSG;
}
