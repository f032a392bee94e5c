/*
 * test_snapshot.c - the snapshot's format: what goes in comes out, and nothing else does.
 *
 * Every byte of a small file is flipped, the file is cut at every length, and what no session can
 * be is said with the right checksums.
 */
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "snapshot_fixture.h"

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
    assert_int_equal(one->held.seq, other->held.seq);
    assert_int_equal(tv_session_rows(one), tv_session_rows(other));
    if (one->held.seq > 0) {
        assert_int_equal(one->held.pending, other->held.pending);
        assert_memory_equal(one->held.tokens, other->held.tokens, 8 * sizeof(int32_t));
    }
}

static void what_goes_in_comes_out(void **state)
{
    (void)state;
    static struct file file;
    struct tv_sessions table;
    struct writing writing;
    struct tv_snapshot_bytes bodies[2], again;
    struct tv_snapshot_item item;
    struct tv_snapshot_reader reader;
    char error[200];
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
        assert_int_equal(tv_snapshot_next(&reader, &table, VOCAB, &item, error, sizeof error), 1);
        assert_string_equal(item.id, old->id);
        assert_same_session(item.session, old);
        assert_int_equal(item.pages.exact, PAGE);
        assert_string_equal(item.key.key, i == 0 ? KEY : "");
        tv_snapshot_write_body(item.session, &item.pages, i == 0 ? &item.key : NULL, &again);
        assert_int_equal(again.bytes, bodies[i].bytes);
        assert_memory_equal(again.data, bodies[i].data, again.bytes);
        for (int32_t p = 0; p < item.pages.count; p++) {
            assert_int_equal(tv_snapshot_page(&reader, item.pages.numbers[p], page), 0);
            page_make(item.pages.numbers[p], wanted);
            assert_memory_equal(page, wanted, page_bytes);
        }
        tv_snapshot_item_finish(&item);
        tv_snapshot_bytes_finish(&again);
        tv_snapshot_bytes_finish(&bodies[i]);
    }
    assert_int_equal(tv_snapshot_next(&reader, &table, VOCAB, &item, error, sizeof error), 0);
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

/* Of a process that was ended while it wrote: what is there to its last byte. */
static void a_cut_file_has_what_is_whole(void **state)
{
    (void)state;
    static struct file file = {.is_cut = 1};
    struct tv_sessions table;
    struct writing writing;
    char error[200];
    size_t whole[2];
    table_start(&table);
    writing_start(&writing, &file);
    for (int i = 0; i < 2; i++) {
        struct tv_snapshot_bytes body;
        body_make(session_open(&table, 20, 1), (uint32_t)writing.pages, &body);
        write_body(&writing, &body, 2);
        tv_snapshot_bytes_finish(&body);
        whole[i] = file.bytes;
    }
    writing_end(&writing);
    for (size_t bytes = file.bytes + 1; bytes > 0; bytes--) {
        file.bytes = bytes - 1;
        assert_int_equal(sessions_of(&file, &table, error, sizeof error),
                         (file.bytes >= whole[0]) + (file.bytes >= whole[1]));
    }
    file.bytes = whole[1];
    file.data[whole[0] + 20] ^= 1; /* a head with damage is not one */
    assert_int_equal(sessions_of(&file, &table, error, sizeof error), 1);
    file.data[TV_SNAPSHOT_HEADER_BYTES - 1] ^= 1;
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

/* A session of 20 tokens and a round, which is held, made by a call with a key. */
enum { FIELDS = 104, DOUBLES = 156, FIXED = 436, HELD = FIXED + 8 + 80 + 74, CALL = HELD + 60 };
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
    {FIELDS + 44, 1, "counts"},
    {FIELDS + 44, 3, "page"},
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
    {FIELDS + 12, 1, "holds"}, /* finished */
    {FIELDS + 4, 6, "holds"},  /* another token is pending */
    {HELD, 0, "call"},
    {HELD, 2, "holds"},
    {HELD + 4, 5, "holds"},
    {HELD + 8, 0, "holds"},
    {HELD + 8, 2, "holds"},
    {HELD + 8, 1025, "holds"},
    {HELD + 12, 4, "holds"},
    {HELD + 12, -1, "holds"},
    {HELD + 16, VOCAB, "holds"},
    {HELD + 20, 1, "holds"},
    {HELD + 20, 2, "holds"},
    {HELD + 24, 1, "holds"},
    {HELD + 28, VOCAB, "holds"},
    {HELD + 40, 0, "holds"},
    {HELD + 44, 1, "holds"},
    {HELD + 48, -1, "holds"},
    {HELD + 52, 1, "holds"},
    {HELD + 56, 3, "holds"},
    {CALL, 0, "many"},
    {CALL, 65, "call"},
    {CALL + 4, ' ', "call"},
    {CALL + 8, 's', "call"},
    {CALL + 76, INT32_MAX, "call"},
    {CALL + 80, 15, "call"},
    {CALL + 80, 0, "call"},
    {CALL + 84, 1, "call"},
    {CALL + 88, 40, "call"},
    {CALL + 88, 24, "call"},
    {CALL + 96 + 10, 'x', "call"},
};

static void what_no_session_can_be_is_refused(void **state)
{
    (void)state;
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
    struct tv_snapshot_item item;
    struct tv_session *found = NULL;
    char error[200];
    table_start(&table);
    table_start(&next);
    file_make(&table, 20, 1, &file);
    struct tv_snapshot_source source = source_of(&file);
    assert_int_equal(tv_snapshot_open(&source, &layout, &reader, error, sizeof error), 0);
    assert_int_equal(tv_snapshot_next(&reader, &next, VOCAB, &item, error, sizeof error), 1);
    struct tv_session *session = item.session;
    assert_int_equal(tv_sessions_restore(&next, session, 1000000, 5 * SECOND), 0);
    assert_int_equal(session->lease_expires_us, (5 + 77) * SECOND);
    assert_int_equal(tv_sessions_restore(&next, session, 1000, 5 * SECOND), -EEXIST);
    assert_int_equal(next.count, 1);
    assert_int_equal(next.created_count, 1);
    assert_int_equal(tv_sessions_find(&next, item.id, "bob", 6 * SECOND, &found),
                     TV_SESSION_NOT_FOUND);
    assert_int_equal(tv_sessions_find(&next, item.id, "alice", 6 * SECOND, &found), TV_OK);
    assert_ptr_equal(found, session);
    item.session = NULL; /* the table's now */
    tv_snapshot_item_finish(&item);
    tv_snapshot_close(&reader);
    tv_sessions_finish(&table);
    tv_sessions_finish(&next);
}

/* A file of this version whose only session has this body. */
static void version_make(const struct tv_snapshot_bytes *body, uint8_t version, struct file *file)
{
    struct writing writing;
    struct tv_sha256 hash;
    writing_start(&writing, file);
    file->data[16] = version;
    tv_sha256_init(&hash);
    tv_sha256_update(&hash, file->data, TV_SNAPSHOT_HEADER_BYTES - 32);
    tv_sha256_finish(&hash, file->data + TV_SNAPSHOT_HEADER_BYTES - 32);
    write_body(&writing, body, 2);
    writing_end(&writing);
}

/* Version 1 has nothing behind the answers; what is older than that or newer is refused. */
static void an_older_version_is_read(void **state)
{
    (void)state;
    static struct file file;
    struct tv_sessions table;
    struct tv_snapshot_bytes body;
    char error[200] = "";
    table_start(&table);
    body_make(session_open(&table, 20, 0), 0, &body);
    version_make(&body, 1, &file);
    assert_int_equal(sessions_of(&file, &table, error, sizeof error), 0);
    assert_non_null(strstr(error, "too many"));
    for (uint8_t version = 0; version < 4; version++) {
        version_make(&body, version, &file);
        int32_t count = sessions_of(&file, &table, error, sizeof error);
        assert_int_equal(count, version == 0 || version == 3 ? -1 : version - 1);
    }
    assert_non_null(strstr(error, "its format version is 3, here it is 2"));
    body.bytes -= 8; /* no held round, no key */
    version_make(&body, 1, &file);
    assert_int_equal(sessions_of(&file, &table, error, sizeof error), 1);
    version_make(&body, 2, &file);
    assert_int_equal(sessions_of(&file, &table, error, sizeof error), 0);
    tv_snapshot_bytes_finish(&body);
    tv_sessions_finish(&table);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(what_goes_in_comes_out),
        cmocka_unit_test(every_flipped_byte_is_found),
        cmocka_unit_test(every_cut_is_found),
        cmocka_unit_test(a_cut_file_has_what_is_whole),
        cmocka_unit_test(another_model_or_layout_is_refused),
        cmocka_unit_test(another_maker_is_told),
        cmocka_unit_test(what_no_session_can_be_is_refused),
        cmocka_unit_test(one_is_refused_alone),
        cmocka_unit_test(a_lease_is_not_longer_than_it_was),
        cmocka_unit_test(an_older_version_is_read),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
