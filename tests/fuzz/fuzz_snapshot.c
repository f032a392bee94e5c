/*
 * fuzz_snapshot.c - a snapshot from anybody: the frame as it comes, or one session under checksums
 * that fit.
 *
 * First byte even: the rest is the file; with bit 1, of a process that was ended while it wrote.
 * Odd: it says how many pages there are, the rest is the body of a session, around which a sound
 * file is made; so what stands behind the checksums is reached. A session that is taken must be one
 * that a table could have, and be written again as it was read.
 */
#include <errno.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "fuzz.h"
#include "session/session.h"

#define VOCAB     300
#define MAX_LEN   4096
#define PAGE      16
#define EPOCH     "fedcba9876543210"
#define FINISH_AT 116 /* of a body: finish and max_len may be told by a lower limit */

static const struct tv_snapshot_layout layout = {
    .layers = 1, .page_size = PAGE, .row_dim = 1, .vocab = VOCAB, .maker = "fuzz"};

struct file {
    const uint8_t *data;
    size_t bytes;
    int is_cut;
};

static int file_read(void *context, uint64_t offset, void *to, size_t bytes)
{
    const struct file *file = context;
    REQUIRE(offset <= file->bytes && bytes <= file->bytes - offset);
    memcpy(to, file->data + offset, bytes);
    return 0;
}

/* A file of one session with this body and so many pages of zeros; malloc'd, or NULL. */
static uint8_t *seal(const uint8_t *body, size_t bytes, uint32_t pages, size_t *ret_bytes)
{
    size_t page_bytes = tv_snapshot_page_bytes(&layout);
    size_t total =
        TV_SNAPSHOT_HEADER_BYTES + 2 * TV_SNAPSHOT_HEAD_BYTES + bytes + pages * (page_bytes + 32);
    uint8_t *data = calloc(1, total), *at = data;
    struct tv_snapshot_bytes text = {.bytes = bytes};
    struct tv_sha256 heads;
    text.data = malloc(bytes + 1); /* what is summed is not written to, but is no const either */
    if (data == NULL || text.data == NULL) {
        free(text.data);
        free(data);
        return NULL;
    }
    if (bytes > 0) {
        memcpy(text.data, body, bytes);
    }
    tv_sha256_init(&heads);
    tv_snapshot_write_header(&layout, 1, at);
    at += TV_SNAPSHOT_HEADER_BYTES;
    tv_snapshot_write_head(&text, pages, &heads, at);
    at += TV_SNAPSHOT_HEAD_BYTES;
    memcpy(at, text.data, bytes);
    at += bytes;
    for (uint32_t i = 0; i < pages; i++) {
        tv_snapshot_page_sum(at, page_bytes, i, at + page_bytes);
        at += page_bytes + 32;
    }
    tv_snapshot_write_end(1, pages, &heads, at);
    tv_snapshot_bytes_finish(&text);
    *ret_bytes = total;
    return data;
}

static void check_held(const struct tv_session *session)
{
    const struct tv_session_held *held = &session->held;
    REQUIRE(held->seq == session->next_seq - 1);
    REQUIRE(held->count >= 1 && held->count <= TV_ENGINE_NODES_MAX);
    REQUIRE(held->settled || held->tokens[0] == session->pending);
    REQUIRE(!held->settled || (held->len_before >= 1 && held->len_before <= session->len));
    for (int32_t i = 0; i < held->count; i++) {
        REQUIRE(held->tokens[i] >= 0 && held->tokens[i] < VOCAB && held->parents[i] < i &&
                (i == 0) == (held->parents[i] == -1));
    }
    for (int32_t i = 0; i < held->proposed_count; i++) {
        int32_t node = held->proposed[i];
        REQUIRE(node >= 0 && node < held->count &&
                held->parents[node] == (i > 0 ? held->proposed[i - 1] : -1));
    }
}

static void check_key(const struct tv_session_key *key)
{
    REQUIRE(strlen(key->key) <= TV_KEY_BYTES_MAX && key->operation == NULL);
    REQUIRE(key->key[0] != '\0' || key->body == NULL);
    REQUIRE(key->body == NULL || key->body_bytes <= TV_SESSION_KEY_BYTES_MAX);
}

static void check_session(const struct tv_snapshot_item *item)
{
    const struct tv_session *session = item->session;
    const struct tv_snapshot_pages *pages = &item->pages;
    struct tv_digest digest = session->root;
    REQUIRE(session->len >= 1 && session->len < session->max_len && session->max_len <= MAX_LEN);
    REQUIRE(strlen(session->id) == 24 && strlen(session->principal) <= 32);
    REQUIRE(session->pending >= 0 && session->pending < VOCAB);
    REQUIRE(session->next_seq >= 1 && session->context == NULL);
    REQUIRE(pages->count == (tv_session_rows(session) + PAGE - 1) / PAGE &&
            pages->exact <= session->len);
    if (session->held.seq != 0) {
        check_held(session);
    }
    check_key(&item->key);
    REQUIRE(session->kept_count <= TV_REPLAY_ROUNDS_MAX && session->stop_count <= TV_STOP_IDS_MAX);
    for (int32_t i = 0; i < session->len; i++) {
        REQUIRE(session->tokens[i] >= 0 && session->tokens[i] < VOCAB);
        tv_digest_push(&digest, session->tokens[i]);
        REQUIRE((i + 1) % PAGE != 0 ||
                memcmp(&session->borders[i / PAGE], &digest, sizeof digest) == 0);
    }
    REQUIRE(memcmp(&digest, &session->digest, sizeof digest) == 0);
    for (int32_t i = 0; i < session->kept_count; i++) {
        const struct tv_session_kept *kept = &session->kept[i];
        REQUIRE(kept->outcome_at + kept->outcome_bytes <= kept->body_bytes);
        REQUIRE(kept->seq < session->next_seq && tv_session_kept_of(session, kept->seq) == kept);
    }
}

/* Where the epoch stands in an answer, as a body that ends with it says, in front of it. */
static uint64_t epoch_at(const uint8_t *body, size_t bytes, size_t answer_bytes)
{
    uint64_t at = 0;
    for (int i = 7; i >= 0; i--) {
        at = at << 8 | body[bytes - answer_bytes - 16 + (size_t)i];
    }
    return at;
}

/* The end of `again` as the end of `body` has it, which an answer takes: the epoch is this server's
 * now, and where the answer says that one twice, the first place is as right. */
static void epoch_back(const struct tv_session_key *key, const char *epoch, const uint8_t *body,
                       struct tv_snapshot_bytes *again)
{
    size_t from = again->bytes - key->body_bytes, digits = strlen(epoch);
    uint64_t was = epoch_at(body, again->bytes, key->body_bytes);
    uint64_t is = epoch_at(again->data, again->bytes, key->body_bytes);
    REQUIRE(is <= was && was + digits < key->body_bytes);
    REQUIRE(memcmp(again->data + from + is, epoch, digits) == 0);
    REQUIRE(memcmp(again->data + from + was, epoch, digits) == 0);
    memcpy(again->data + from - 16, body + from - 16, 8);
    memcpy(again->data + from + was, body + from + was, digits);
}

/* It says the same again, but for what this server's limit changes, and its epoch. */
static void check_again(const struct tv_snapshot_item *item, const uint8_t *body, size_t bytes)
{
    struct tv_snapshot_bytes again;
    int has_key = item->key.key[0] != '\0';
    tv_snapshot_write_body(item->session, &item->pages, has_key ? &item->key : NULL, &again);
    REQUIRE(again.failed || again.bytes == bytes);
    if (!again.failed && has_key) {
        epoch_back(&item->key, item->session->table->epoch, body, &again);
    }
    REQUIRE(again.failed ||
            (memcmp(again.data, body, FINISH_AT) == 0 &&
             memcmp(again.data + FINISH_AT + 8, body + FINISH_AT + 8, bytes - FINISH_AT - 8) == 0));
    tv_snapshot_bytes_finish(&again);
}

/* body: what the only session's must be; NULL: whatever the file says. */
static void read_all(const struct file *file, const struct tv_sessions *table, const uint8_t *body,
                     size_t body_bytes)
{
    const struct tv_snapshot_source source = {.read = file_read,
                                              .context = (void *)(uintptr_t)file,
                                              .size = file->bytes,
                                              .is_cut = file->is_cut};
    struct tv_snapshot_reader reader;
    struct tv_snapshot_item item;
    uint8_t page[PAGE * 4];
    char error[200] = "";
    int rc = tv_snapshot_open(&source, &layout, &reader, error, sizeof error);
    REQUIRE(rc == 0 || error[0] != '\0');
    REQUIRE(rc == 0 || body == NULL || body_bytes < 400 || rc == -ENOMEM || rc == -EBADMSG);
    while (rc == 0 &&
           (rc = tv_snapshot_next(&reader, table, VOCAB, &item, error, sizeof error)) != 0) {
        if (rc == 1) {
            check_session(&item);
            for (int32_t i = 0; i < item.pages.count; i++) {
                (void)tv_snapshot_page(&reader, item.pages.numbers[i], page); /* damaged, or not */
            }
            if (body != NULL) {
                check_again(&item, body, body_bytes);
            }
        }
        REQUIRE(rc == 1 || item.session == NULL);
        tv_snapshot_item_finish(&item);
        rc = 0;
    }
    tv_snapshot_close(&reader);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    const struct tv_sessions_params params = {
        .sessions_max = 4, .page_size = PAGE, .model_max_len = MAX_LEN};
    static struct tv_sessions table; /* nothing is ever put into it */
    static int made;
    if (!made) {
        REQUIRE(tv_sessions_init(&table, &params) == 0);
        memcpy(table.epoch, EPOCH, sizeof EPOCH); /* one that inputs may say */
        made = 1;
    }
    if (bytes == 0) {
        return 0;
    }
    if (data[0] % 2 == 0) {
        const struct file file = {data + 1, bytes - 1, (data[0] & 2) != 0};
        read_all(&file, &table, NULL, 0);
    } else {
        size_t sealed_bytes = 0;
        uint8_t *sealed = seal(data + 1, bytes - 1, data[0] / 2, &sealed_bytes);
        const struct file file = {sealed, sealed_bytes, 0};
        if (sealed != NULL) {
            read_all(&file, &table, data + 1, bytes - 1);
        }
        free(sealed);
    }
    return 0;
}
