/*
 * snapshot_fixture.c - snapshots in memory, of sessions and pages that a test makes up.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "snapshot_fixture.h"

const struct tv_snapshot_layout layout = {.model_id = {1, 2, 3},
                                          .layers = 2,
                                          .page_size = PAGE,
                                          .row_dim = 3,
                                          .element = 1,
                                          .vocab = VOCAB,
                                          .maker = "test"};

static int file_read(void *context, uint64_t offset, void *to, size_t bytes)
{
    const struct file *file = context;
    assert_true(offset <= file->bytes && bytes <= file->bytes - offset);
    memcpy(to, file->data + offset, bytes);
    return 0;
}

struct tv_snapshot_source source_of(struct file *file)
{
    return (struct tv_snapshot_source){
        .read = file_read, .context = file, .size = file->bytes, .is_cut = file->is_cut};
}

void table_start(struct tv_sessions *table)
{
    struct tv_sessions_params params = {
        .sessions_max = 4, .page_size = PAGE, .model_max_len = 1000};
    memcpy(params.model_id, layout.model_id, sizeof params.model_id);
    assert_int_equal(tv_sessions_init(table, &params), 0);
}

static void answer_keep(struct tv_session *session, int32_t seq, size_t bytes)
{
    struct tv_session_kept kept = {.seq = seq, .leaf = seq - 1, .body_bytes = bytes};
    kept.body = malloc(bytes);
    assert_non_null(kept.body);
    memset(kept.body, 'a' + seq, bytes);
    memset(kept.body_hash, seq, sizeof kept.body_hash);
    kept.outcome_at = 1;
    kept.outcome_bytes = bytes / 2;
    tv_session_keep(session, &kept);
}

struct tv_session *session_open(struct tv_sessions *table, int32_t len, int32_t rounds)
{
    struct tv_request request = {
        .kind = TV_CALL_CREATE, .lease_s = 77, .token_count = len, .max_len = 900};
    struct tv_session *session = NULL;
    struct tv_digest digest;
    request.stop_ids[0] = 9;
    request.stop_count = 1;
    memcpy(request.cache_salt, "salt", 4);
    request.cache_salt_bytes = 4;
    assert_int_equal(tv_sessions_build(table, &request, "alice", &session), 0);
    session->sampling.temperature = 0.75;
    digest = session->digest;
    for (int32_t i = 0; i < len; i++) {
        int32_t token = (i * 7 + 3) % VOCAB;
        tv_session_stage(session, i, &token, 1, &digest);
    }
    tv_session_commit(session, len, &digest, 5, TV_FINISH_NONE);
    for (int32_t seq = 1; seq <= rounds; seq++) {
        answer_keep(session, seq, (size_t)seq * 10);
    }
    if (rounds > 0) { /* the last of which is held */
        static int32_t tokens[] = {5, 7, 8}, parents[] = {-1, 0, 0}, proposed[] = {0, 2};
        const struct tv_tree tree = {.count = 3, .tokens = tokens, .parents = parents};
        assert_int_equal(
            tv_session_held_make(rounds, TV_RULE_GREEDY, &tree, proposed, 2, 9, &session->held), 0);
    }
    session->verify_rounds = 12;
    session->verify_tokens = 34;
    session->drafts.nodes = 50;
    session->drafts.levels = 20;
    session->drafts.tried[3] = 8;
    session->drafts.taken[3] = 5;
    tv_sessions_publish(table, session, SECOND);
    return session;
}

static void append(struct file *file, const void *data, size_t bytes)
{
    assert_true(bytes <= FILE_MAX - file->bytes);
    memcpy(file->data + file->bytes, data, bytes);
    file->bytes += bytes;
}

void page_make(uint64_t number, uint8_t *ret_page)
{
    for (size_t i = 0; i < tv_snapshot_page_bytes(&layout); i++) {
        ret_page[i] = (uint8_t)(number * 31 + i);
    }
}

void writing_start(struct writing *writing, struct file *file)
{
    uint8_t header[TV_SNAPSHOT_HEADER_BYTES];
    *writing = (struct writing){.file = file};
    file->bytes = 0;
    tv_sha256_init(&writing->heads);
    tv_snapshot_write_header(&layout, 1234567890, header);
    append(file, header, sizeof header);
}

/* A session by its body, `fresh` pages of which are new. */
void write_body(struct writing *writing, const struct tv_snapshot_bytes *body, uint32_t fresh)
{
    uint8_t head[TV_SNAPSHOT_HEAD_BYTES], page[256], sum[32];
    size_t page_bytes = tv_snapshot_page_bytes(&layout);
    assert_true(page_bytes <= sizeof page);
    tv_snapshot_write_head(body, fresh, &writing->heads, head);
    append(writing->file, head, sizeof head);
    append(writing->file, body->data, body->bytes);
    for (uint32_t i = 0; i < fresh; i++, writing->pages++) {
        page_make(writing->pages, page);
        tv_snapshot_page_sum(page, page_bytes, writing->pages, sum);
        append(writing->file, page, page_bytes);
        append(writing->file, sum, sizeof sum);
    }
    writing->sessions++;
}

/* Its pages begin with the file's number `first`, and the last `fresh` of them are new. */
void body_make(const struct tv_session *session, uint32_t first, struct tv_snapshot_bytes *ret_body)
{
    int32_t count = (tv_session_rows(session) + PAGE - 1) / PAGE;
    struct tv_snapshot_pages pages = {.count = count, .exact = PAGE};
    char answer[64];
    int bytes = snprintf(answer, sizeof answer, ANSWER, session->table->epoch);
    const struct tv_session_key key = {.key = KEY,
                                       .body_hash = {3, 2, 1},
                                       .serial = 7,
                                       .body = answer,
                                       .body_bytes = (size_t)bytes};
    pages.numbers = calloc((size_t)count, sizeof *pages.numbers);
    assert_non_null(pages.numbers);
    for (int32_t i = 0; i < count; i++) {
        pages.numbers[i] = first + (uint32_t)i;
    }
    tv_snapshot_write_body(session, &pages, session->kept_count > 0 ? &key : NULL, ret_body);
    assert_int_equal(ret_body->failed, 0);
    tv_snapshot_pages_finish(&pages);
}

void writing_end(struct writing *writing)
{
    uint8_t head[TV_SNAPSHOT_HEAD_BYTES];
    tv_snapshot_write_end(writing->sessions, writing->pages, &writing->heads, head);
    append(writing->file, head, sizeof head);
}

/* One session of `len` tokens. */
void file_make(struct tv_sessions *table, int32_t len, int32_t rounds, struct file *file)
{
    struct writing writing;
    struct tv_snapshot_bytes body;
    const struct tv_session *session = session_open(table, len, rounds);
    writing_start(&writing, file);
    body_make(session, 0, &body);
    write_body(&writing, &body, (uint32_t)((len + PAGE - 1) / PAGE));
    tv_snapshot_bytes_finish(&body);
    writing_end(&writing);
}

/* How many sessions the file gives, with all of their pages; -1: it is refused as a whole. */
int32_t sessions_of(struct file *file, const struct tv_sessions *table, char *error,
                    size_t error_bytes)
{
    struct tv_snapshot_source source = source_of(file);
    struct tv_snapshot_reader reader;
    struct tv_snapshot_item item;
    uint8_t page[256];
    int32_t count = 0;
    int rc = tv_snapshot_open(&source, &layout, &reader, error, error_bytes);
    if (rc != 0) {
        assert_true(error[0] != '\0');
        tv_snapshot_close(&reader);
        return -1;
    }
    while ((rc = tv_snapshot_next(&reader, table, VOCAB, &item, error, error_bytes)) != 0) {
        int whole = rc == 1;
        for (int32_t i = 0; rc == 1 && i < item.pages.count; i++) {
            whole = whole && tv_snapshot_page(&reader, item.pages.numbers[i], page) == 0;
        }
        assert_true(rc == 1 || item.session == NULL);
        tv_snapshot_item_finish(&item);
        count += whole;
    }
    tv_snapshot_close(&reader);
    return count;
}
