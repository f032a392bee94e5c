/*
 * test_sched_snapshot.c - sessions from one scheduler to the next: rows, shares of pages, and what
 * becomes of those that do not fit, are damaged, or are late.
 */
#include <errno.h>
#include <fcntl.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/clock.h"
#include "folder.h"
#include "snapshot_world.h"

static void sessions_go_on(void **state)
{
    struct world *world = *state;
    struct client one, fork, other;
    struct tv_cache_counts before, after;
    world_begin(world, 64);
    (void)snprintf(world->fixture.principal, sizeof world->fixture.principal, "alice");
    client_open(&world->fixture, &one, 40, "");
    world_rounds(world, &one, 4);
    world_fork_open(world, &one, &fork);
    world_rounds(world, &fork, 1);
    world_fork_open(world, &one, &other); /* its pages are the first one's */
    tv_cache_counts(world->fixture.engine->cache, &before);
    world_end(world, 10);
    assert_true(world_is_there(world, ""));

    world_begin(world, 64);
    (void)snprintf(world->fixture.principal, sizeof world->fixture.principal, "mallory");
    assert_false(world_move(world, &one));
    (void)snprintf(world->fixture.principal, sizeof world->fixture.principal, "alice");
    tv_cache_counts(world->fixture.engine->cache, &after);
    assert_int_equal(after.held, before.held);
    assert_int_equal(after.shared, before.shared);
    assert_int_equal(after.free + after.cached + after.held, after.total);
    assert_false(world_is_there(world, ""));
    struct client *clients[] = {&one, &fork, &other};
    for (size_t i = 0; i < 3; i++) {
        assert_true(world_move(world, clients[i]));
        client_check(&world->fixture, clients[i]);
        world_rows_check(world, clients[i]);
    }
    for (size_t i = 0; i < 3; i++) { /* a page that two have is copied before it is written */
        world_rounds(world, clients[i], 5);
    }
    for (size_t i = 0; i < 3; i++) {
        client_check(&world->fixture, clients[i]);
        world_rows_check(world, clients[i]);
    }
    assert_int_equal(world->fixture.sched->table.restored_count, 3);
    world_end(world, 10);
}

/* The newest answers are there for who did not get them; of rounds before, that they are gone. */
static void answers_are_kept(void **state)
{
    struct world *world = *state;
    struct client client;
    char first[4096], again[4096];
    world_begin(world, 64);
    client_open(&world->fixture, &client, 40, "");
    world_rounds(world, &client, TV_REPLAY_ROUNDS_MAX + 2);
    struct tv_call *call = call_make(&world->fixture, TV_CALL_ROUND, client.id, NULL);
    call->request.seq = client.seq - 1;
    call_start(&world->fixture, call);
    assert_reply(call, 200);
    (void)snprintf(first, sizeof first, "%.*s", (int)call->reply.body.bytes, call->reply.body.data);
    call_free(call);
    world_end(world, 10);
    world_begin(world, 64);
    for (int32_t seq = 1; seq < client.seq; seq++) {
        call = call_make(&world->fixture, TV_CALL_ROUND, client.id, NULL);
        call->request.seq = seq;
        call_start(&world->fixture, call);
        if (seq < client.seq - TV_REPLAY_ROUNDS_MAX) {
            assert_reply(call, 410);
        } else {
            assert_reply(call, 200);
        }
        (void)snprintf(again, sizeof again, "%.*s", (int)call->reply.body.bytes,
                       call->reply.body.data);
        call_free(call);
    }
    assert_string_equal(first, again);
    world_end(world, 10);
}

/* Into a smaller pool come those used last, and every page is accounted for. */
static void what_has_no_room_is_left_out(void **state)
{
    struct world *world = *state;
    struct client clients[3];
    struct tv_cache_counts counts;
    world_begin(world, 64);
    for (int i = 0; i < 3; i++) {
        char salt[40];
        (void)snprintf(salt, sizeof salt, ",\"cache_salt\":\"%d\"", i);
        client_open(&world->fixture, &clients[i], 5 * PAGE, salt);
    }
    /* salted sessions have another digest than the client has; the order of use is what counts */
    world_end(world, 10);
    world_begin(world, 12);
    tv_cache_counts(world->fixture.engine->cache, &counts);
    assert_int_equal(counts.held, 10);
    assert_int_equal(counts.free, 2);
    assert_null(world_session_of(world, &clients[0]));
    assert_non_null(world_session_of(world, &clients[1]));
    assert_non_null(world_session_of(world, &clients[2]));
    assert_int_equal(world->fixture.sched->restore_lost, 1);
    assert_false(world_is_there(world, ".refused"));
    world_end(world, 10);
}

static void a_stop_without_time_keeps_none(void **state)
{
    struct world *world = *state;
    struct client client;
    world_begin(world, 64);
    client_open(&world->fixture, &client, 40, "");
    world_end(world, -1);
    assert_false(world_is_there(world, ""));
    assert_false(world_is_there(world, ".new"));
    world_begin(world, 64);
    assert_false(world_move(world, &client));
    world_end(world, 10);
}

/* Of the two, the small one alone is there again. */
static void small_one_is_kept(struct world *world, const struct client *large, struct client *small)
{
    struct client lost = *large;
    assert_true(world_is_there(world, ""));
    assert_false(world_is_there(world, ".new"));
    world_begin(world, 64);
    assert_false(world_move(world, &lost));
    assert_true(world_move(world, small));
    world_rows_check(world, small);
    world_rounds(world, small, 2);
    world_end(world, 10);
}

/* The disk takes a part: what is whole stays, and the file is one that can be read. */
static void a_full_disk_keeps_what_fits(void **state)
{
    struct world *world = *state;
    struct rlimit before, limit;
    void (*old)(int) = signal(SIGXFSZ, SIG_IGN);
    for (int small_first = 0; small_first < 2;
         small_first++) { /* the last that is used is tried first */
        struct client clients[2];
        world_begin(world, 64);
        client_open(&world->fixture, &clients[small_first], small_first ? 300 : 20, "");
        client_open(&world->fixture, &clients[!small_first], small_first ? 20 : 300, "");
        assert_int_equal(getrlimit(RLIMIT_FSIZE, &before), 0);
        limit = before;
        limit.rlim_cur = 3000; /* the small one has about 1,000 */
        assert_int_equal(setrlimit(RLIMIT_FSIZE, &limit), 0);
        world_end(world, 10);
        assert_int_equal(setrlimit(RLIMIT_FSIZE, &before), 0);
        small_one_is_kept(world, &clients[1], &clients[0]);
        tv_tiny_folder_clear(world->dir);
    }
    (void)signal(SIGXFSZ, old);
}

static int64_t us_of_byte; /* that is still to be written */

int64_t __wrap_tv_snapshot_file_flush_us(const struct tv_snapshot_file *file, uint64_t more,
                                         int64_t elapsed_us);
int64_t __wrap_tv_snapshot_file_flush_us(const struct tv_snapshot_file *file, uint64_t more,
                                         int64_t elapsed_us)
{
    (void)file;
    (void)elapsed_us;
    return (int64_t)more * us_of_byte;
}

/* On a slow disk: the large one would take 15 s, the small one 5. */
static void a_short_stop_keeps_what_fits(void **state)
{
    struct world *world = *state;
    struct client large, small;
    world_begin(world, 64);
    client_open(&world->fixture, &small, 20, "");
    client_open(&world->fixture, &large, 300, "");
    us_of_byte = 4000;
    world_end(world, 10);
    us_of_byte = 0;
    small_one_is_kept(world, &large, &small);
}

static size_t body_bytes;      /* that a session is said to have, without its pages; 0: the truth */
static const char *body_owner; /* its id */

void __real_tv_snapshot_write_body(const struct tv_session *session,
                                   const struct tv_snapshot_pages *pages,
                                   const struct tv_session_key *key,
                                   struct tv_snapshot_bytes *ret_body);
void __wrap_tv_snapshot_write_body(const struct tv_session *session,
                                   const struct tv_snapshot_pages *pages,
                                   const struct tv_session_key *key,
                                   struct tv_snapshot_bytes *ret_body);
void __wrap_tv_snapshot_write_body(const struct tv_session *session,
                                   const struct tv_snapshot_pages *pages,
                                   const struct tv_session_key *key,
                                   struct tv_snapshot_bytes *ret_body)
{
    __real_tv_snapshot_write_body(session, pages, key, ret_body);
    if (body_bytes > 0 && strcmp(session->id, body_owner) == 0) {
        ret_body->bytes = body_bytes; /* who is refused for it reads none */
    }
}

/* What the end of a world logs, as a text. */
static void world_end_said(struct world *world, char *ret_text, size_t bytes)
{
    char path[300];
    int old = dup(STDERR_FILENO);
    (void)snprintf(path, sizeof path, "%s/log", world->dir);
    assert_true(old >= 0);
    assert_non_null(freopen(path, "w", stderr));
    world_end(world, 10);
    assert_true(dup2(old, STDERR_FILENO) >= 0);
    assert_int_equal(close(old), 0);
    FILE *file = fopen(path, "r");
    assert_non_null(file);
    ret_text[fread(ret_text, 1, bytes - 1, file)] = '\0';
    assert_int_equal(fclose(file), 0);
    assert_int_equal(unlink(path), 0);
}

/* Why a large session is left out is said as it is: the file has room for it, or has not. The small
 * one is kept whatever it is. */
static void a_reason_is_the_one_that_holds(void **state)
{
    static const char *const reasons[] = {"its tokens and answers are more than 256 MiB",
                                          "it does not fit into snapshot_bytes"};
    struct world *world = *state;
    static char said[8192];
    for (int i = 0; i < 2; i++) {
        struct client large, small;
        char line[200];
        world_begin(world, 64);
        client_open(&world->fixture, &small, 20, "");
        client_open(&world->fixture, &large, 300, "");
        world->fixture.config.snapshot_bytes = INT64_C(1) << 40;
        body_bytes = (size_t)TV_SNAPSHOT_BODY_BYTES_MAX + 1;
        if (i == 1) {
            world->fixture.config.snapshot_bytes = 3000; /* the small one has about 1,000 */
            body_bytes = 0;
        }
        body_owner = large.id;
        world_end_said(world, said, sizeof said);
        body_bytes = 0;
        (void)snprintf(line, sizeof line, "session %s of 300 tokens is not kept: %s", large.id,
                       reasons[i]);
        assert_non_null(strstr(said, line));
        assert_null(strstr(said, reasons[!i]));
        small_one_is_kept(world, &large, &small);
        tv_tiny_folder_clear(world->dir);
    }
}

static int steps_left; /* of a restore, until its start is told to end */

static int told_to_end(void *context)
{
    (void)context;
    return steps_left-- <= 0;
}

/* A start that is told to end while it reads them, at whatever step, has taken none away: of a
 * whole file, and of one whose end was never written. */
static void a_start_that_ends_early_loses_none(void **state)
{
    static const char *const suffixes[] = {"", ".new"};
    struct world *world = *state;
    struct client clients[2];
    char path[300];
    world_begin(world, 64);
    client_open(&world->fixture, &clients[0], 40, "");
    client_open(&world->fixture, &clients[1], 20, "");
    world_end(world, 10);
    for (int cut = 0; cut < 2; cut++) {
        (void)snprintf(path, sizeof path, "%s%s", world->path, suffixes[cut]);
        assert_int_equal(rename(world->path, path), 0);
        int rc = -ECANCELED;
        for (int n = 0; rc != 0; n++) {
            fixture_start_pages(&world->fixture, 64);
            world->fixture.config.snapshot_bytes = 1 << 20;
            steps_left = n;
            rc = tv_sched_restore(world->fixture.sched, world->dir, tv_clock_unix_ms(), told_to_end,
                                  NULL);
            assert_true(rc == -ECANCELED || (rc == 0 && n > 5));
            assert_int_equal(world_is_there(world, suffixes[cut]), rc != 0);
            assert_false(world_is_there(world, ".reading"));
            if (rc != 0) {
                fixture_stop(&world->fixture);
            }
        }
        for (int i = 0; i < 2; i++) {
            assert_true(world_move(world, &clients[i]));
            world_rows_check(world, &clients[i]);
        }
        world_end(world, 10);
    }
}

static void byte_flip(const struct world *world, off_t at, int whence)
{
    uint8_t byte;
    int fd = open(world->path, O_RDWR | O_CLOEXEC);
    assert_true(fd >= 0);
    off_t place = lseek(fd, at, whence);
    assert_true(place > 0);
    assert_int_equal(pread(fd, &byte, 1, place), 1);
    byte ^= 4;
    assert_int_equal(pwrite(fd, &byte, 1, place), 1);
    assert_int_equal(close(fd), 0);
}

static void damage_costs_one_session(void **state)
{
    struct world *world = *state;
    struct client clients[2];
    struct tv_cache_counts counts;
    world_begin(world, 64);
    client_open(&world->fixture, &clients[0], 100, "");
    client_open(&world->fixture, &clients[1], 20, "");
    world_end(world, 10);
    /* the last page is of the session that was used first */
    byte_flip(world, -TV_SNAPSHOT_HEAD_BYTES - 40, SEEK_END);
    world_begin(world, 64);
    assert_false(world_move(world, &clients[0]));
    assert_true(world_move(world, &clients[1]));
    tv_cache_counts(world->fixture.engine->cache, &counts);
    assert_int_equal(counts.held, 2);
    assert_int_equal(counts.free + counts.cached, 62);
    assert_true(world_is_there(world, ".refused"));
    world_end(world, 10);
    byte_flip(world, 20, SEEK_SET); /* in the header: nobody comes back */
    world_begin(world, 64);
    assert_false(world_move(world, &clients[1]));
    tv_cache_counts(world->fixture.engine->cache, &counts);
    assert_int_equal(counts.free, 64);
    world_end(world, 10);
    assert_false(world_is_there(world, ""));
}

static void a_file_that_others_may_write_is_refused(void **state)
{
    struct world *world = *state;
    struct client client;
    char other[300];
    world_begin(world, 64);
    client_open(&world->fixture, &client, 20, "");
    world_end(world, 10);
    assert_int_equal(chmod(world->path, 0620), 0);
    world_begin(world, 64);
    assert_false(world_move(world, &client));
    world_end(world, 10);
    (void)snprintf(other, sizeof other, "%s.refused", world->path);
    assert_int_equal(chmod(other, 0600), 0);
    assert_int_equal(symlink(other, world->path), 0); /* sound behind a link, which could be any */
    world_begin(world, 64);
    assert_false(world_move(world, &client));
    world_end(world, 10);
}

static void what_is_late_stays_away(void **state)
{
    struct world *world = *state;
    struct client clients[2];
    world_begin(world, 64);
    client_open(&world->fixture, &clients[0], 20, ",\"lease_s\":5");
    client_open(&world->fixture, &clients[1], 20, ",\"lease_s\":500");
    world_end(world, 10);
    world_begin_at(world, 64, tv_clock_unix_ms() + 10000);
    assert_false(world_move(world, &clients[0]));
    assert_true(world_move(world, &clients[1]));
    const struct tv_session *session = world_session_of(world, &clients[1]);
    assert_true(session->lease_expires_us <= tv_clock_us() + 500 * SECOND);
    assert_true(session->lease_expires_us > tv_clock_us() + 400 * SECOND);
    world_end(world, 10);
}

/* Prompts of the same owner find the pages that a session brought along. */
static void known_prompts_stay_known(void **state)
{
    struct world *world = *state;
    struct client one, again;
    struct tv_cache_counts counts;
    world_begin(world, 64);
    client_open(&world->fixture, &one, 5 * PAGE, "");
    world_end(world, 10);
    world_begin(world, 64);
    client_open(&world->fixture, &again, 5 * PAGE, "");
    tv_cache_counts(world->fixture.engine->cache, &counts);
    assert_int_equal(counts.reused, 4);
    world_rows_check(world, &again);
    world_end(world, 10);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(sessions_go_on, world_setup, world_teardown),
        cmocka_unit_test_setup_teardown(answers_are_kept, world_setup, world_teardown),
        cmocka_unit_test_setup_teardown(what_has_no_room_is_left_out, world_setup, world_teardown),
        cmocka_unit_test_setup_teardown(a_stop_without_time_keeps_none, world_setup,
                                        world_teardown),
        cmocka_unit_test_setup_teardown(a_full_disk_keeps_what_fits, world_setup, world_teardown),
        cmocka_unit_test_setup_teardown(a_short_stop_keeps_what_fits, world_setup, world_teardown),
        cmocka_unit_test_setup_teardown(a_reason_is_the_one_that_holds, world_setup,
                                        world_teardown),
        cmocka_unit_test_setup_teardown(a_start_that_ends_early_loses_none, world_setup,
                                        world_teardown),
        cmocka_unit_test_setup_teardown(damage_costs_one_session, world_setup, world_teardown),
        cmocka_unit_test_setup_teardown(a_file_that_others_may_write_is_refused, world_setup,
                                        world_teardown),
        cmocka_unit_test_setup_teardown(what_is_late_stays_away, world_setup, world_teardown),
        cmocka_unit_test_setup_teardown(known_prompts_stay_known, world_setup, world_teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
