/*
 * test_session_faults.c - the session table under failing allocations and a failing random source.
 *
 * Every refusal is an exact negative errno, or an answer with less in it where the contract says
 * so; the table, the session and the number of blocks are those of before, and the same call works
 * afterwards.
 */
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "faults.h"
#include "session/session.h"

#define BOTH (FAULT_MEMORY | FAULT_RANDOM)

static const struct tv_sessions_params params = {
    .sessions_max = 8, .page_size = 16, .model_max_len = 100000};

static int32_t prompt[40];

static struct tv_request create_request(void)
{
    return (struct tv_request){
        .kind = TV_CALL_CREATE, .tokens = prompt, .token_count = 40, .lease_s = 60};
}

static struct tv_session *session_open(struct tv_sessions *table)
{
    struct tv_request request = create_request();
    struct tv_session *session = NULL;
    struct tv_digest digest;
    assert_int_equal(tv_sessions_build(table, &request, "me", &session), 0);
    digest = session->digest;
    tv_session_stage(session, 0, prompt, 40, &digest);
    tv_session_commit(session, 40, &digest, 7, TV_FINISH_NONE);
    tv_sessions_publish(table, session, 0);
    return session;
}

static void the_table_starts_or_leaves_nothing(void **state)
{
    (void)state;
    for (int n = 1;; n++) {
        struct tv_sessions table;
        int64_t blocks = fault_blocks();
        fault_arm(BOTH, n);
        int rc = tv_sessions_init(&table, &params);
        int failed = fault_disarm();
        assert_true(failed ? rc == -ENOMEM || rc == -EIO : rc == 0);
        tv_sessions_finish(&table);
        assert_int_equal(fault_blocks(), blocks);
        if (!failed) {
            assert_true(n > 3); /* buckets, memory of the expired, epoch */
            return;
        }
    }
}

static void a_create_that_fails_is_no_session(void **state)
{
    (void)state;
    struct tv_sessions table;
    struct tv_session *first;
    assert_int_equal(tv_sessions_init(&table, &params), 0);
    first = session_open(&table);
    for (int n = 1;; n++) {
        struct tv_request request = create_request();
        struct tv_session *session = NULL;
        int64_t blocks = fault_blocks();
        fault_arm(BOTH, n);
        int rc = tv_sessions_build(&table, &request, "me", &session);
        if (!fault_disarm()) {
            assert_int_equal(rc, 0);
            assert_true(n > 5); /* session, id, seed, tokens, digests */
            tv_sessions_discard(&table, session);
            tv_session_destroy(tv_sessions_take_gone(&table));
            break;
        }
        assert_true(rc == -ENOMEM || rc == -EIO);
        assert_null(session);
        assert_null(table.gone);
        assert_int_equal(table.count, 1);
        assert_int_equal(fault_blocks(), blocks);
    }
    struct tv_session *found = NULL;
    assert_int_equal(tv_sessions_find(&table, first->id, "me", 0, &found), TV_OK);
    assert_ptr_equal(found, first);
    tv_sessions_finish(&table);
}

/* Bookkeeping of a verify or an extend: room first, so that the commit cannot fail. */
static void room_that_fails_changes_no_session(void **state)
{
    (void)state;
    struct tv_sessions table;
    int32_t more[3000];
    assert_int_equal(tv_sessions_init(&table, &params), 0);
    struct tv_session *session = session_open(&table);
    for (int32_t i = 0; i < 3000; i++) {
        more[i] = i % 251;
    }
    for (int n = 1;; n++) {
        struct tv_digest before = session->digest, digest = session->digest;
        fault_arm(FAULT_MEMORY, n);
        int rc = tv_session_reserve(session, 3000);
        int failed = fault_disarm();
        assert_int_equal(rc, failed ? -ENOMEM : 0);
        assert_int_equal(session->len, 40);
        assert_int_equal(session->pending, 7);
        assert_memory_equal(&session->digest, &before, sizeof before);
        assert_memory_equal(session->tokens, prompt, sizeof prompt);
        if (!failed) {
            assert_int_equal(n, 3); /* tokens, then digests */
            tv_session_stage(session, 0, more, 3000, &digest);
            tv_session_commit(session, 3000, &digest, 9, TV_FINISH_NONE);
            assert_int_equal(session->len, 3040);
            break;
        }
        /* what fits without more room still works */
        assert_int_equal(tv_session_reserve(session, 1), 0);
        tv_session_stage(session, 0, more, 1, &digest);
    }
    tv_sessions_finish(&table);
}

/* A refusal that cannot bring the state or the tail is still that refusal. */
static void a_refusal_needs_no_memory(void **state)
{
    (void)state;
    struct tv_sessions table;
    int32_t node = 7, parent = -1, depth = 0;
    assert_int_equal(tv_sessions_init(&table, &params), 0);
    struct tv_session *session = session_open(&table);
    struct tv_request request = {.kind = TV_CALL_VERIFY, .seq = 1, .expected_len = 39};
    request.tree =
        (struct tv_tree){.count = 1, .tokens = &node, .parents = &parent, .depths = &depth};
    for (int n = 1;; n++) {
        struct tv_problem problem = {0};
        int64_t blocks = fault_blocks();
        fault_arm(FAULT_MEMORY, n);
        assert_int_equal(tv_session_judge(session, &request, &problem), TV_SESSION_REFUSED);
        int failed = fault_disarm();
        assert_int_equal(problem.code, TV_LENGTH_MISMATCH);
        assert_int_equal(problem.committed, 0);
        if (failed && n == 1) {
            assert_null(problem.state);
        } else {
            assert_non_null(problem.state);
            assert_int_equal(problem.state->committed_len, 40);
            assert_int_equal(problem.state->has_tail, !failed);
        }
        tv_problem_finish(&problem);
        assert_int_equal(fault_blocks(), blocks);
        if (!failed) {
            assert_int_equal(n, 3);
            break;
        }
    }
    request.expected_len = 40; /* and the session goes on */
    struct tv_problem problem = {0};
    assert_int_equal(tv_session_judge(session, &request, &problem), TV_SESSION_RUN);
    tv_sessions_finish(&table);
}

static void views_and_lists_give_all_or_nothing(void **state)
{
    (void)state;
    struct tv_sessions table;
    struct tv_session_state view, *states = NULL;
    int32_t count = -1;
    assert_int_equal(tv_sessions_init(&table, &params), 0);
    struct tv_session *session = session_open(&table);
    int64_t blocks = fault_blocks();
    fault_arm(FAULT_MEMORY, 1);
    assert_int_equal(tv_session_view(session, 0, &view), -ENOMEM);
    assert_int_equal(fault_disarm(), 1);
    assert_null(view.tail);
    fault_arm(FAULT_MEMORY, 1);
    assert_int_equal(tv_sessions_list(&table, "me", 0, &states, &count), -ENOMEM);
    assert_int_equal(fault_disarm(), 1);
    assert_null(states);
    assert_int_equal(count, -1);
    assert_int_equal(fault_blocks(), blocks);
    assert_int_equal(tv_session_view(session, 0, &view), 0);
    assert_int_equal(view.tail_count, 40);
    free(view.tail);
    assert_int_equal(tv_sessions_list(&table, "me", 0, &states, &count), 0);
    assert_int_equal(count, 1);
    free(states);
    tv_sessions_finish(&table);
}

/* Renewing, keeping an answer, expiring and deleting take no memory at all. */
static void the_end_of_a_session_needs_no_memory(void **state)
{
    (void)state;
    struct tv_sessions table;
    struct tv_session *found = NULL;
    int64_t blocks = fault_blocks();
    assert_int_equal(tv_sessions_init(&table, &params), 0);
    struct tv_session *deleted = session_open(&table), *expired = session_open(&table);
    struct tv_session_kept kept = {.seq = 1, .body = malloc(8), .body_bytes = 8};
    assert_non_null(kept.body);
    fault_arm(FAULT_MEMORY, 1);
    tv_session_keep(deleted, &kept);
    tv_session_renew(expired, 1, 0);
    tv_sessions_remove(&table, deleted, TV_SESSION_DELETED);
    (void)tv_sessions_sweep(&table, 2000000);
    assert_int_equal(tv_sessions_find(&table, "s_none", "me", 0, &found), TV_SESSION_NOT_FOUND);
    assert_int_equal(fault_disarm(), 0);
    assert_int_equal(table.count, 0);
    for (struct tv_session *gone = tv_sessions_take_gone(&table); gone != NULL;) {
        struct tv_session *next = gone->next;
        tv_session_destroy(gone);
        gone = next;
    }
    tv_sessions_finish(&table);
    assert_int_equal(fault_blocks(), blocks);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_table_starts_or_leaves_nothing),
        cmocka_unit_test(a_create_that_fails_is_no_session),
        cmocka_unit_test(room_that_fails_changes_no_session),
        cmocka_unit_test(a_refusal_needs_no_memory),
        cmocka_unit_test(views_and_lists_give_all_or_nothing),
        cmocka_unit_test(the_end_of_a_session_needs_no_memory),
    };
    for (int32_t i = 0; i < 40; i++) {
        prompt[i] = i + 1;
    }
    return cmocka_run_group_tests(tests, NULL, NULL);
}
