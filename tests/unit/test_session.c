/*
 * test_session.c - the session table alone, on a clock that the test turns: leases, the memory of
 * expired ids, ownership, the tail's limit, and digests at page borders.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "session/session.h"

#define SECOND INT64_C(1000000)

static void table_start(struct tv_sessions *table, int32_t sessions_max)
{
    struct tv_sessions_params params = {
        .sessions_max = sessions_max, .page_size = 16, .model_max_len = 100000};
    assert_int_equal(tv_sessions_init(table, &params), 0);
}

static struct tv_session *open_session(struct tv_sessions *table, const char *principal,
                                       int32_t lease_s, int64_t now_us)
{
    struct tv_request request = {.kind = TV_CALL_CREATE, .lease_s = lease_s};
    struct tv_session *session = NULL;
    assert_int_equal(tv_sessions_build(table, &request, principal, &session), 0);
    tv_sessions_publish(table, session, now_us);
    return session;
}

static int32_t bury(struct tv_sessions *table)
{
    int32_t count = 0;
    struct tv_session *gone = tv_sessions_take_gone(table);
    while (gone != NULL) {
        struct tv_session *session = gone;
        gone = session->next;
        tv_session_destroy(session);
        count++;
    }
    return count;
}

static void ids_and_epochs_have_their_form(void **state)
{
    (void)state;
    struct tv_sessions table;
    table_start(&table, 4);
    assert_int_equal(strlen(table.epoch), 16);
    assert_int_equal(strspn(table.epoch, "0123456789abcdef"), 16);
    struct tv_session *first = open_session(&table, "", 5, 0);
    struct tv_session *second = open_session(&table, "", 5, 0);
    assert_int_equal(strlen(first->id), 24);
    assert_memory_equal(first->id, "s_", 2);
    assert_int_equal(strspn(first->id + 2, "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
                                           "0123456789-_"),
                     22);
    assert_string_not_equal(first->id, second->id);
    tv_sessions_finish(&table);
}

static void a_lease_ends_to_the_microsecond(void **state)
{
    (void)state;
    struct tv_sessions table;
    struct tv_session *found = NULL;
    char id[32];
    table_start(&table, 4);
    (void)snprintf(id, sizeof id, "%s", open_session(&table, "me", 5, SECOND)->id);
    assert_int_equal(tv_sessions_find(&table, id, "me", 6 * SECOND - 1, &found), TV_OK);
    assert_int_equal(tv_sessions_sweep(&table, 6 * SECOND - 1), 6 * SECOND);
    assert_int_equal(tv_sessions_find(&table, id, "me", 6 * SECOND, &found), TV_SESSION_EXPIRED);
    assert_int_equal(table.count, 0);
    assert_int_equal(tv_sessions_find(&table, id, "me", 0, &found), TV_SESSION_EXPIRED);
    assert_int_equal(tv_sessions_find(&table, id, "you", 0, &found), TV_SESSION_NOT_FOUND);
    assert_int_equal(bury(&table), 1);
    tv_sessions_finish(&table);
}

static void renewal_moves_the_end(void **state)
{
    (void)state;
    struct tv_sessions table;
    struct tv_session *found = NULL;
    table_start(&table, 4);
    struct tv_session *session = open_session(&table, "", 5, 0);
    tv_session_renew(session, 0, 4 * SECOND);
    assert_int_equal(tv_sessions_find(&table, session->id, "", 8 * SECOND, &found), TV_OK);
    tv_session_renew(session, 100, 8 * SECOND);
    assert_int_equal(tv_sessions_sweep(&table, 100 * SECOND), 108 * SECOND);
    assert_int_equal(tv_sessions_find(&table, session->id, "", 107 * SECOND, &found), TV_OK);
    tv_sessions_finish(&table);
}

static void a_busy_session_outlives_its_lease(void **state)
{
    (void)state;
    struct tv_sessions table;
    struct tv_session *found = NULL;
    uint8_t hash[32] = {0};
    char id[32];
    table_start(&table, 4);
    struct tv_session *session = open_session(&table, "", 1, 0);
    (void)snprintf(id, sizeof id, "%s", session->id);
    tv_session_occupy(session, 1, hash, &table);
    assert_int_equal(tv_sessions_sweep(&table, 10 * SECOND), INT64_MAX);
    assert_int_equal(tv_sessions_find(&table, id, "", 10 * SECOND, &found), TV_OK);
    tv_session_idle(&table, session);
    assert_int_equal(tv_sessions_find(&table, id, "", 10 * SECOND, &found), TV_SESSION_EXPIRED);
    assert_int_equal(bury(&table), 1);
    tv_sessions_finish(&table);
}

/* Comparisons hold a session that is idle: none expires under one, a deletion does not wait. */
static void a_held_session_outlives_its_lease(void **state)
{
    (void)state;
    struct tv_sessions table;
    struct tv_session *found = NULL;
    char id[32];
    table_start(&table, 4);
    struct tv_session *session = open_session(&table, "", 1, 0);
    (void)snprintf(id, sizeof id, "%s", session->id);
    tv_session_hold(session);
    tv_session_hold(session);
    assert_int_equal(tv_sessions_sweep(&table, 10 * SECOND), INT64_MAX);
    tv_session_let_go(session, 20 * SECOND);
    assert_int_equal(tv_sessions_find(&table, id, "", 30 * SECOND, &found), TV_OK);
    tv_session_let_go(session, 40 * SECOND); /* the lease counts from here */
    assert_int_equal(tv_sessions_sweep(&table, 41 * SECOND - 1), 41 * SECOND);
    assert_int_equal(tv_sessions_find(&table, id, "", 41 * SECOND, &found), TV_SESSION_EXPIRED);
    session = open_session(&table, "", 1, 0);
    (void)snprintf(id, sizeof id, "%s", session->id);
    tv_session_hold(session);
    tv_sessions_remove(&table, session, TV_SESSION_DELETED);
    assert_int_equal(tv_sessions_find(&table, id, "", 0, &found), TV_SESSION_NOT_FOUND);
    assert_int_equal(bury(&table), 2);
    tv_sessions_finish(&table);
}

static void a_deleted_busy_session_waits_for_its_round(void **state)
{
    (void)state;
    struct tv_sessions table;
    struct tv_session *found = NULL;
    uint8_t hash[32] = {0};
    table_start(&table, 1);
    struct tv_session *session = open_session(&table, "", 9, 0);
    tv_session_occupy(session, 1, hash, &table);
    tv_sessions_remove(&table, session, TV_SESSION_DELETED);
    assert_int_equal(tv_sessions_find(&table, session->id, "", 0, &found), TV_SESSION_NOT_FOUND);
    assert_int_equal(bury(&table), 0);
    tv_session_idle(&table, session);
    assert_int_equal(bury(&table), 1);
    tv_sessions_finish(&table);
}

/* The memory of expired ids holds 4,096; the next one pushes the oldest out. */
static void expired_ids_are_remembered_up_to_the_cap(void **state)
{
    (void)state;
    struct tv_sessions table;
    struct tv_session *found = NULL;
    char first[32] = "", second[32] = "";
    table_start(&table, 2);
    for (int i = 0; i < TV_SESSION_EXPIRED_MAX + 1; i++) {
        struct tv_session *session = open_session(&table, "", 1, 0);
        if (i < 2) {
            (void)snprintf(i == 0 ? first : second, sizeof first, "%s", session->id);
        }
        if (i == TV_SESSION_EXPIRED_MAX) {
            assert_int_equal(tv_sessions_find(&table, first, "", 0, &found), TV_SESSION_EXPIRED);
        }
        (void)tv_sessions_sweep(&table, SECOND);
        assert_int_equal(bury(&table), 1);
    }
    assert_int_equal(tv_sessions_find(&table, first, "", 0, &found), TV_SESSION_NOT_FOUND);
    assert_int_equal(tv_sessions_find(&table, second, "", 0, &found), TV_SESSION_EXPIRED);
    tv_sessions_finish(&table);
}

static void the_table_has_a_cap(void **state)
{
    (void)state;
    struct tv_sessions table;
    struct tv_session *session = NULL;
    struct tv_request request = {.kind = TV_CALL_CREATE};
    table_start(&table, 2);
    (void)open_session(&table, "", 5, 0);
    assert_int_equal(tv_sessions_build(&table, &request, "", &session), 0);
    struct tv_session *third = NULL;
    assert_true(tv_sessions_build(&table, &request, "", &third) < 0); /* one is being created */
    tv_sessions_discard(&table, session);
    assert_int_equal(bury(&table), 1);
    (void)open_session(&table, "", 5, 0);
    tv_sessions_finish(&table);
}

static void commit_tokens(struct tv_session *session, int32_t count)
{
    struct tv_digest digest = session->digest;
    assert_int_equal(tv_session_reserve(session, count), 0);
    for (int32_t i = 0; i < count; i++) {
        int32_t token = (session->len + i) % 251;
        tv_session_stage(session, i, &token, 1, &digest);
    }
    tv_session_commit(session, count, &digest, 7, TV_FINISH_NONE);
}

static void the_tail_has_a_cap(void **state)
{
    (void)state;
    static const struct {
        int32_t len, from, expected_from, expected_count;
    } cases[] = {{TV_TAIL_TOKENS_MAX, 0, 0, TV_TAIL_TOKENS_MAX},
                 {TV_TAIL_TOKENS_MAX + 1, 0, 1, TV_TAIL_TOKENS_MAX},
                 {TV_TAIL_TOKENS_MAX + 1, 4097, 4097, 0},
                 {TV_TAIL_TOKENS_MAX + 1, 2147483647, 4097, 0},
                 {TV_TAIL_TOKENS_MAX + 1, 4000, 4000, 97}};
    struct tv_sessions table;
    table_start(&table, 2);
    struct tv_session *session = open_session(&table, "", 5, 0);
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        struct tv_session_state view;
        commit_tokens(session, cases[i].len - session->len);
        assert_int_equal(tv_session_view(session, cases[i].from, &view), 0);
        assert_int_equal(view.tail_from, cases[i].expected_from);
        assert_int_equal(view.tail_count, cases[i].expected_count);
        for (int32_t t = 0; t < view.tail_count; t++) {
            assert_int_equal(view.tail[t], (view.tail_from + t) % 251);
        }
        free(view.tail);
    }
    tv_sessions_finish(&table);
}

static void digests_stand_at_every_page_border(void **state)
{
    (void)state;
    static const uint8_t model_id[32];
    struct tv_sessions table;
    struct tv_digest digest;
    table_start(&table, 2);
    struct tv_session *session = open_session(&table, "", 5, 0);
    tv_digest_start(&digest, model_id, "", 0);
    for (int32_t step = 0; session->len < 200; step++) {
        commit_tokens(session, step % 18 + 1);
    }
    for (int32_t len = 1; len <= session->len; len++) {
        tv_digest_push(&digest, (len - 1) % 251);
        if (len % 16 == 0) {
            assert_memory_equal(&session->borders[len / 16 - 1], &digest, sizeof digest);
        }
    }
    assert_memory_equal(&session->digest, &digest, sizeof digest);
    tv_sessions_finish(&table);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(ids_and_epochs_have_their_form),
        cmocka_unit_test(a_lease_ends_to_the_microsecond),
        cmocka_unit_test(renewal_moves_the_end),
        cmocka_unit_test(a_busy_session_outlives_its_lease),
        cmocka_unit_test(a_held_session_outlives_its_lease),
        cmocka_unit_test(a_deleted_busy_session_waits_for_its_round),
        cmocka_unit_test(expired_ids_are_remembered_up_to_the_cap),
        cmocka_unit_test(the_table_has_a_cap),
        cmocka_unit_test(the_tail_has_a_cap),
        cmocka_unit_test(digests_stand_at_every_page_border),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
