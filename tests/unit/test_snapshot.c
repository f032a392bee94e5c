/*
 * test_snapshot.c - the snapshot's format: what goes in comes out, and nothing else does.
 *
 * Pages here are bytes that the test makes up. Every byte of a small file is flipped, the file is
 * cut at every length, and what no session can be is said with the right checksums.
 */
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "session/snapshot.h"

#define VOCAB    307
#define PAGE     16
#define SECOND   INT64_C(1000000)
#define FILE_MAX (64u << 10)

static const struct tv_snapshot_layout layout = {.model_id = {1, 2, 3},
                                                 .layers = 2,
                                                 .page_size = PAGE,
                                                 .row_dim = 3,
                                                 .element = 1,
                                                 .vocab = VOCAB,
                                                 .maker = "test"};

struct file {
    uint8_t data[FILE_MAX];
    size_t bytes;
};

static int file_read(void *context, uint64_t offset, void *to, size_t bytes)
{
    const struct file *file = context;
    assert_true(offset <= file->bytes && bytes <= file->bytes - offset);
    memcpy(to, file->data + offset, bytes);
    return 0;
}

static struct tv_snapshot_source source_of(struct file *file)
{
    return (struct tv_snapshot_source){.read = file_read, .context = file, .size = file->bytes};
}

static void table_start(struct tv_sessions *table)
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

/* A session of `len` tokens and `rounds` answers. */
static struct tv_session *session_open(struct tv_sessions *table, int32_t len, int32_t rounds)
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

static void page_make(uint64_t number, uint8_t *ret_page)
{
    for (size_t i = 0; i < tv_snapshot_page_bytes(&layout); i++) {
        ret_page[i] = (uint8_t)(number * 31 + i);
    }
}

/* A file under way. */
struct writing {
    struct file *file;
    struct tv_sha256 heads;
    uint32_t sessions;
    uint64_t pages;
};

static void writing_start(struct writing *writing, struct file *file)
{
    uint8_t header[TV_SNAPSHOT_HEADER_BYTES];
    *writing = (struct writing){.file = file};
    file->bytes = 0;
    tv_sha256_init(&writing->heads);
    tv_snapshot_write_header(&layout, 1234567890, header);
    append(file, header, sizeof header);
}

/* A session by its body, `fresh` pages of which are new. */
static void write_body(struct writing *writing, const struct tv_snapshot_bytes *body,
                       uint32_t fresh)
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
static void body_make(const struct tv_session *session, uint32_t first,
                      struct tv_snapshot_bytes *ret_body)
{
    int32_t count = (session->len + PAGE - 1) / PAGE;
    struct tv_snapshot_pages pages = {.count = count, .exact = PAGE};
    pages.numbers = calloc((size_t)count, sizeof *pages.numbers);
    assert_non_null(pages.numbers);
    for (int32_t i = 0; i < count; i++) {
        pages.numbers[i] = first + (uint32_t)i;
    }
    tv_snapshot_write_body(session, &pages, ret_body);
    assert_int_equal(ret_body->failed, 0);
    tv_snapshot_pages_finish(&pages);
}

static void writing_end(struct writing *writing)
{
    uint8_t head[TV_SNAPSHOT_HEAD_BYTES];
    tv_snapshot_write_end(writing->sessions, writing->pages, &writing->heads, head);
    append(writing->file, head, sizeof head);
}

/* One session of `len` tokens. */
static void file_make(struct tv_sessions *table, int32_t len, int32_t rounds, struct file *file)
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
static int32_t sessions_of(struct file *file, const struct tv_sessions *table, char *error,
                           size_t error_bytes)
{
    struct tv_snapshot_source source = source_of(file);
    struct tv_snapshot_reader reader;
    struct tv_snapshot_pages pages;
    struct tv_session *session = NULL;
    uint8_t page[256];
    char id[32];
    int32_t count = 0;
    int rc = tv_snapshot_open(&source, &layout, &reader, error, error_bytes);
    if (rc != 0) {
        assert_true(error[0] != '\0');
        tv_snapshot_close(&reader);
        return -1;
    }
    while ((rc = tv_snapshot_next(&reader, table, VOCAB, &session, &pages, id, error,
                                  error_bytes)) != 0) {
        int whole = rc == 1;
        for (int32_t i = 0; rc == 1 && i < pages.count; i++) {
            whole = whole && tv_snapshot_page(&reader, pages.numbers[i], page) == 0;
        }
        if (rc == 1) {
            tv_snapshot_pages_finish(&pages);
            tv_session_destroy(session);
        }
        count += whole;
    }
    tv_snapshot_close(&reader);
    return count;
}

static void assert_same_session(const struct tv_session *one, const struct tv_session *other)
{
    assert_string_equal(one->id, other->id);
    assert_string_equal(one->principal, other->principal);
    assert_int_equal(one->len, other->len);
    assert_memory_equal(one->tokens, other->tokens, (size_t)one->len * sizeof *one->tokens);
    assert_memory_equal(&one->root, &other->root, sizeof one->root);
    assert_memory_equal(&one->digest, &other->digest, sizeof one->digest);
    assert_memory_equal(one->borders, other->borders,
                        (size_t)(one->len / PAGE) * sizeof *one->borders);
    assert_int_equal(one->max_len, other->max_len);
    assert_int_equal(one->stop_ids[0], other->stop_ids[0]);
    assert_int_equal(one->kept_bytes, other->kept_bytes);
    assert_int_equal(one->kept_count, other->kept_count);
    for (int32_t i = 0; i < one->kept_count; i++) {
        const struct tv_session_kept *a = &one->kept[i], *b = &other->kept[i];
        assert_int_equal(a->seq, b->seq);
        assert_int_equal(a->leaf, b->leaf);
        assert_int_equal(a->outcome_bytes, b->outcome_bytes);
        assert_memory_equal(a->body_hash, b->body_hash, sizeof a->body_hash);
        assert_memory_equal(a->body, b->body, a->body_bytes);
    }
    assert_memory_equal(&one->drafts, &other->drafts, sizeof one->drafts);
}

static void what_goes_in_comes_out(void **state)
{
    (void)state;
    static struct file file;
    struct tv_sessions table;
    struct writing writing;
    struct tv_snapshot_bytes bodies[2], again;
    struct tv_session *session = NULL;
    struct tv_snapshot_pages pages;
    struct tv_snapshot_reader reader;
    char id[32], error[200];
    uint8_t page[256], wanted[256];
    size_t page_bytes = tv_snapshot_page_bytes(&layout);
    table_start(&table);
    const struct tv_session *first = session_open(&table, 40, 3);
    const struct tv_session *second = session_open(&table, PAGE, 0);
    writing_start(&writing, &file);
    body_make(first, 0, &bodies[0]);
    write_body(&writing, &bodies[0], 3);
    body_make(second, 1, &bodies[1]); /* which the first one has too */
    write_body(&writing, &bodies[1], 0);
    writing_end(&writing);

    struct tv_snapshot_source source = source_of(&file);
    assert_int_equal(tv_snapshot_open(&source, &layout, &reader, error, sizeof error), 0);
    assert_int_equal(reader.session_count, 2);
    assert_int_equal(reader.page_count, 3);
    assert_int_equal(reader.saved_unix_ms, 1234567890);
    assert_true(reader.same_maker);
    for (int i = 0; i < 2; i++) {
        const struct tv_session *old = i == 0 ? first : second;
        assert_int_equal(
            tv_snapshot_next(&reader, &table, VOCAB, &session, &pages, id, error, sizeof error), 1);
        assert_string_equal(id, old->id);
        assert_same_session(session, old);
        assert_int_equal(pages.exact, PAGE);
        tv_snapshot_write_body(session, &pages, &again);
        assert_int_equal(again.bytes, bodies[i].bytes);
        assert_memory_equal(again.data, bodies[i].data, again.bytes);
        for (int32_t p = 0; p < pages.count; p++) {
            assert_int_equal(tv_snapshot_page(&reader, pages.numbers[p], page), 0);
            page_make(pages.numbers[p], wanted);
            assert_memory_equal(page, wanted, page_bytes);
        }
        tv_snapshot_pages_finish(&pages);
        tv_snapshot_bytes_finish(&again);
        tv_snapshot_bytes_finish(&bodies[i]);
        tv_session_destroy(session);
    }
    assert_int_equal(
        tv_snapshot_next(&reader, &table, VOCAB, &session, &pages, id, error, sizeof error), 0);
    assert_int_equal(tv_snapshot_page(&reader, 3, page), -EBADMSG);
    tv_snapshot_close(&reader);
    tv_sessions_finish(&table);
}

static void every_flipped_byte_is_found(void **state)
{
    (void)state;
    static struct file file;
    struct tv_sessions table;
    char error[200];
    table_start(&table);
    file_make(&table, 20, 1, &file);
    assert_int_equal(sessions_of(&file, &table, error, sizeof error), 1);
    for (size_t i = 0; i < file.bytes; i++) {
        uint8_t flip = (uint8_t)(1u << (i % 8));
        file.data[i] ^= flip;
        assert_true(sessions_of(&file, &table, error, sizeof error) <= 0);
        file.data[i] ^= flip;
    }
    assert_int_equal(sessions_of(&file, &table, error, sizeof error), 1);
    tv_sessions_finish(&table);
}

static void every_cut_is_found(void **state)
{
    (void)state;
    static struct file file;
    struct tv_sessions table;
    char error[200];
    table_start(&table);
    file_make(&table, 20, 1, &file);
    size_t bytes = file.bytes;
    for (file.bytes = 0; file.bytes < bytes; file.bytes++) {
        assert_int_equal(sessions_of(&file, &table, error, sizeof error), -1);
    }
    file.bytes = bytes + 1; /* and what stands behind the end */
    assert_int_equal(sessions_of(&file, &table, error, sizeof error), -1);
    tv_sessions_finish(&table);
}

static void of_another_kind(const struct tv_snapshot_layout *other, const char *why)
{
    static struct file file;
    struct tv_sessions table;
    struct tv_snapshot_reader reader;
    char error[200] = "";
    table_start(&table);
    file_make(&table, 20, 1, &file);
    struct tv_snapshot_source source = source_of(&file);
    assert_int_equal(tv_snapshot_open(&source, other, &reader, error, sizeof error), -EXDEV);
    assert_non_null(strstr(error, why));
    tv_snapshot_close(&reader);
    tv_sessions_finish(&table);
}

static void another_model_or_layout_is_refused(void **state)
{
    (void)state;
    struct tv_snapshot_layout other = layout;
    other.model_id[31] ^= 1;
    of_another_kind(&other, "another model");
    other = layout;
    other.page_size = 32;
    of_another_kind(&other, "page_size is 16, here it is 32");
    other = layout;
    other.element = 0;
    of_another_kind(&other, "kv_dtype");
    other = layout;
    other.layers = 3;
    of_another_kind(&other, "layers");
    other = layout;
    other.row_dim = 576;
    of_another_kind(&other, "row length");
    other = layout;
    other.vocab = 308;
    of_another_kind(&other, "vocabulary");
    other = layout;
    other.layers = INT32_MAX;
    other.row_dim = INT32_MAX;
    assert_int_equal(tv_snapshot_page_bytes(&other), 0);
}

/* Rows of another maker are taken, but are not what this one computes. */
static void another_maker_is_told(void **state)
{
    (void)state;
    static struct file file;
    struct tv_sessions table;
    struct tv_snapshot_layout other = layout;
    struct tv_snapshot_reader reader;
    char error[200];
    other.maker[0] = 'x';
    table_start(&table);
    file_make(&table, 20, 1, &file);
    struct tv_snapshot_source source = source_of(&file);
    assert_int_equal(tv_snapshot_open(&source, &other, &reader, error, sizeof error), 0);
    assert_false(reader.same_maker);
    tv_snapshot_close(&reader);
    tv_sessions_finish(&table);
}

/* One field of a body said otherwise, under checksums that fit. */
struct lie {
    size_t at;
    int32_t value;
    const char *why;
};

static void what_no_session_can_be_is_refused(void **state)
{
    (void)state;
    enum { FIELDS = 104, DOUBLES = 156, FIXED = 436 };
    static const struct lie lies[] = {
        {0, 'x', "id"},
        {32, 0x7f7f7f7f, "owner"},
        {FIELDS, 0, "length"},
        {FIELDS, -1, "length"},
        {FIELDS, INT32_MAX, "length"},
        {FIELDS, 21, "digest"},
        {FIELDS + 4, VOCAB, "no session"},
        {FIELDS + 4, -1, "no session"},
        {FIELDS + 8, 0, "no session"},
        {FIELDS + 8, 1, "answer"},
        {FIELDS + 12, 3, "no session"},
        {FIELDS + 16, 1, "length"},
        {FIELDS + 20, 3601, "no session"},
        {FIELDS + 24, 21, "no session"},
        {FIELDS + 28, 5, "sampling"},
        {FIELDS + 32, VOCAB + 1, "sampling"},
        {FIELDS + 40, 17, "counts"},
        {FIELDS + 44, 3, "counts"},
        {FIELDS + 44, INT32_MAX, "counts"},
        {FIELDS + 48, 9, "counts"},
        {FIELDS + 48, 2, "answer"},
        {DOUBLES + 4, 0x7ff80000, "sampling"},
        {DOUBLES + 4, (int32_t)0xbff00000, "sampling"},
        {DOUBLES + 12, 0, "sampling"},
        {FIXED - 64, VOCAB, "stop token"},
        {FIXED, 2, "page"},
        {FIXED, -1, "page"},
        {FIXED + 8, VOCAB, "vocabulary"},
        {FIXED + 8, 4, "digest"},
        {FIXED + 8 + 80, 5, "answer"},
        {FIXED + 8 + 80 + 8, 0, "answer"},
        {FIXED + 8 + 80 + 12, INT32_MAX, "answer"},
        {FIXED + 8 + 80 + 16, 100, "answer"},
        {FIXED + 8 + 80 + 24, -1, "answer"},
    };
    static struct file file;
    struct tv_sessions table;
    struct tv_snapshot_bytes body;
    char error[200];
    table_start(&table);
    const struct tv_session *session = session_open(&table, 20, 1);
    body_make(session, 0, &body);
    for (size_t i = 0; i < sizeof lies / sizeof lies[0]; i++) {
        struct writing writing;
        uint8_t kept[4];
        uint32_t bits = (uint32_t)lies[i].value;
        memcpy(kept, body.data + lies[i].at, sizeof kept);
        for (size_t byte = 0; byte < 4; byte++) {
            body.data[lies[i].at + byte] = (uint8_t)(bits >> (8 * byte));
        }
        writing_start(&writing, &file);
        write_body(&writing, &body, 2);
        writing_end(&writing);
        error[0] = '\0';
        assert_int_equal(sessions_of(&file, &table, error, sizeof error), 0);
        if (strstr(error, lies[i].why) == NULL) {
            print_error("%zu: %s\n", i, error);
        }
        assert_non_null(strstr(error, lies[i].why));
        memcpy(body.data + lies[i].at, kept, sizeof kept);
    }
    tv_snapshot_bytes_finish(&body);
    tv_sessions_finish(&table);
}

/* A damaged session does not take those beside it along. */
static void one_is_refused_alone(void **state)
{
    (void)state;
    static struct file file;
    struct tv_sessions table;
    struct writing writing;
    struct tv_snapshot_bytes body;
    char error[200];
    size_t second = 0;
    table_start(&table);
    writing_start(&writing, &file);
    for (uint32_t i = 0; i < 3; i++) {
        body_make(session_open(&table, 20, 1), 2 * i, &body);
        second = i == 1 ? file.bytes : second;
        write_body(&writing, &body, 2);
        tv_snapshot_bytes_finish(&body);
    }
    writing_end(&writing);
    assert_int_equal(sessions_of(&file, &table, error, sizeof error), 3);
    file.data[second + TV_SNAPSHOT_HEAD_BYTES + 110] ^= 1;
    assert_int_equal(sessions_of(&file, &table, error, sizeof error), 2);
    tv_sessions_finish(&table);
}

static void a_lease_is_not_longer_than_it_was(void **state)
{
    (void)state;
    struct tv_sessions table, next;
    static struct file file;
    struct tv_snapshot_reader reader;
    struct tv_snapshot_pages pages;
    struct tv_session *session = NULL, *found = NULL;
    char id[32], error[200];
    table_start(&table);
    table_start(&next);
    file_make(&table, 20, 1, &file);
    struct tv_snapshot_source source = source_of(&file);
    assert_int_equal(tv_snapshot_open(&source, &layout, &reader, error, sizeof error), 0);
    assert_int_equal(
        tv_snapshot_next(&reader, &next, VOCAB, &session, &pages, id, error, sizeof error), 1);
    assert_int_equal(tv_sessions_restore(&next, session, 1000000, 5 * SECOND), 0);
    assert_int_equal(session->lease_expires_us, (5 + 77) * SECOND);
    assert_int_equal(tv_sessions_restore(&next, session, 1000, 5 * SECOND), -EEXIST);
    assert_int_equal(next.count, 1);
    assert_int_equal(next.created_count, 1);
    assert_int_equal(tv_sessions_find(&next, id, "bob", 6 * SECOND, &found), TV_SESSION_NOT_FOUND);
    assert_int_equal(tv_sessions_find(&next, id, "alice", 6 * SECOND, &found), TV_OK);
    assert_ptr_equal(found, session);
    tv_snapshot_pages_finish(&pages);
    tv_snapshot_close(&reader);
    tv_sessions_finish(&table);
    tv_sessions_finish(&next);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(what_goes_in_comes_out),
        cmocka_unit_test(every_flipped_byte_is_found),
        cmocka_unit_test(every_cut_is_found),
        cmocka_unit_test(another_model_or_layout_is_refused),
        cmocka_unit_test(another_maker_is_told),
        cmocka_unit_test(what_no_session_can_be_is_refused),
        cmocka_unit_test(one_is_refused_alone),
        cmocka_unit_test(a_lease_is_not_longer_than_it_was),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
