/*
 * test_snapshot_faults.c - the n-th allocation, write or read of a stop's snapshot fails, and of
 * the start that reads it, for every n; or the process ends in its n-th write.
 *
 * A session is then there as it was, or it is not there at all; nothing is leaked, no page is held
 * for nothing, and the daemon serves.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/clock.h"
#include "faults.h"
#include "folder.h"
#include "test_sched_fixture.h"

#define PAGES       64
#define SECOND      INT64_C(1000000)
#define KILL_MISSED 7

struct world {
    struct fixture fixture;
    struct client client;
    char dir[200];
};

/* How many files there are; they go. */
static int files_remove(const struct world *world)
{
    static const char *const suffixes[] = {"", ".new", ".reading", ".refused"};
    int count = 0;
    for (size_t i = 0; i < sizeof suffixes / sizeof suffixes[0]; i++) {
        char path[256];
        (void)snprintf(path, sizeof path, "%s/sessions.snapshot%s", world->dir, suffixes[i]);
        count += access(path, F_OK) == 0;
    }
    tv_tiny_folder_clear(world->dir);
    return count;
}

static int world_setup(void **state)
{
    struct world *world = calloc(1, sizeof *world);
    assert_non_null(world);
    tv_tiny_folder(world->dir, sizeof world->dir);
    *state = world;
    return 0;
}

static int world_teardown(void **state)
{
    struct world *world = *state;
    tv_tiny_folder_remove(world->dir);
    free(world);
    return 0;
}

static void begin(struct world *world)
{
    fixture_start_pages(&world->fixture, PAGES);
    world->fixture.config.snapshot_bytes = 1 << 20;
}

static void restore(struct world *world)
{
    tv_sched_restore(world->fixture.sched, world->dir, tv_clock_unix_ms(), NULL, NULL);
}

/* The client's session is a fork of one that is gone, made with a key. */
static void client_make(struct world *world)
{
    struct client *client = &world->client;
    char parent[32];
    client_open(&world->fixture, client, 70, "");
    memcpy(parent, client->id, sizeof parent);
    struct tv_call *call =
        call_make(&world->fixture, TV_CALL_FORK, parent, "{\"epoch\":\"%s\"}", client->epoch);
    (void)snprintf(call->key, sizeof call->key, "key");
    call_start(&world->fixture, call);
    assert_reply(call_wait(call), 201);
    reply_text(call, "session", client->id, sizeof client->id);
    call_free(call);
    expect(&world->fixture, 204, TV_CALL_DELETE, parent, NULL);
}

/* A process that leaves a session of two rounds behind, and a third that is held; n > 0: what fails
 * of its snapshot. 1: it did. */
static int leave(struct world *world, unsigned kinds, int n)
{
    struct client *client = &world->client;
    char body[4096];
    begin(world);
    restore(world);
    client_make(world);
    for (int i = 0; i < 2; i++) {
        struct tv_call *call = call_chain(&world->fixture, client, 3);
        (void)call_wait(call);
        assert_reply(call, 200);
        client_advance(&world->fixture, client, 3);
        call_free(call);
    }
    const char *chain = client_chain(&world->fixture, client, 3, body, sizeof body);
    expect(&world->fixture, 200, TV_CALL_VERIFY, client->id, "%.*s,\"commit\":\"hold\"}",
           (int)strlen(chain) - 1, chain);
    client->seq++;
    tv_sched_end(world->fixture.sched);
    if (n > 0) {
        fault_arm(kinds, n);
    }
    tv_sched_save(world->fixture.sched, tv_clock_us() + 60 * SECOND);
    int failed = n > 0 && fault_disarm();
    fixture_stop(&world->fixture);
    return failed;
}

/* The session is as it was (1), or there is none, and no page is held (0). A new one can be had. */
static int is_back(struct world *world)
{
    struct tv_sessions *table = &world->fixture.sched->table;
    struct tv_session *session = NULL;
    struct tv_cache_counts counts;
    struct client other;
    int count = table->count;
    if (count > 0) {
        client_check(&world->fixture, &world->client);
        tv_sched_lock(world->fixture.sched);
        assert_int_equal(tv_sessions_find(table, world->client.id, "", tv_clock_us(), &session),
                         TV_OK);
        assert_int_equal(session->held.seq, 3);
        assert_non_null(tv_session_key_made(table, session));
        tv_sched_unlock(world->fixture.sched);
    }
    tv_cache_counts(world->fixture.engine->cache, &counts);
    assert_int_equal(counts.held, count * ((world->client.len + 3 + 15) / 16));
    assert_int_equal(counts.free + counts.cached + counts.held, PAGES);
    client_open(&world->fixture, &other, 20, "");
    return count > 0;
}

static void stops_whose_snapshot_fails(void **state)
{
    struct world *world = *state;
    static const unsigned kinds[] = {FAULT_MEMORY, FAULT_FILE};
    for (size_t k = 0; k < 2; k++) {
        int failed = 1, back = 0;
        for (int n = 1; failed; n++) {
            int64_t blocks = fault_blocks(), descriptors = fault_descriptors();
            failed = leave(world, kinds[k], n);
            begin(world);
            restore(world);
            back = is_back(world);
            fixture_stop(&world->fixture);
            assert_int_equal(files_remove(world), 0); /* what was left was read, or never there */
            assert_int_equal(fault_blocks(), blocks);
            assert_int_equal(fault_descriptors(), descriptors);
            if (!failed) {
                print_message("kind %u: %d calls\n", kinds[k], n - 1);
                assert_true(n > 4);
            }
        }
        assert_true(back);
    }
}

static void starts_that_cannot_read_it(void **state)
{
    struct world *world = *state;
    static const unsigned kinds[] = {FAULT_MEMORY, FAULT_FILE, FAULT_END};
    for (size_t k = 0; k < 3; k++) {
        int failed = 1, back = 0;
        for (int n = 1; failed; n++) {
            (void)leave(world, 0, 0);
            int64_t blocks = fault_blocks(), descriptors = fault_descriptors();
            begin(world);
            fault_arm(kinds[k], n);
            restore(world);
            failed = fault_disarm();
            back = is_back(world);
            fixture_stop(&world->fixture);
            (void)files_remove(world);
            assert_int_equal(fault_blocks(), blocks);
            assert_int_equal(fault_descriptors(), descriptors);
            if (!failed) {
                print_message("kind %u: %d calls\n", kinds[k], n - 1);
                assert_true(n > 3);
            }
        }
        assert_true(back);
    }
}

/* A process that ends in the n-th write of its snapshot, or (0) behind all of them. */
static int leave_killed(struct world *world, struct client clients[2], int n)
{
    int status = 0;
    char path[256];
    begin(world);
    restore(world);
    client_open(&world->fixture, &clients[1], 20, "");
    client_open(&world->fixture, &clients[0], 70, ""); /* used last: first in the file */
    tv_sched_end(world->fixture.sched);
    (void)snprintf(path, sizeof path, "%s/sessions.snapshot", world->dir);
    FILE *older = fopen(path, "w"); /* that a start could not take away: it is not read any more */
    assert_non_null(older);
    assert_int_equal(fclose(older), 0);
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        fault_arm(FAULT_KILL, n);
        tv_sched_save(world->fixture.sched, tv_clock_us() + 60 * SECOND);
        _exit(KILL_MISSED);
    }
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFEXITED(status));
    assert_true(WEXITSTATUS(status) == EXIT_SUCCESS || WEXITSTATUS(status) == KILL_MISSED);
    fixture_stop(&world->fixture);
    return WEXITSTATUS(status) == EXIT_SUCCESS;
}

static int is_there(struct world *world, const struct client *client)
{
    struct tv_session *session = NULL;
    tv_sched_lock(world->fixture.sched);
    enum tv_code code =
        tv_sessions_find(&world->fixture.sched->table, client->id, "", tv_clock_us(), &session);
    tv_sched_unlock(world->fixture.sched);
    if (code == TV_OK) {
        client_check(&world->fixture, client);
    }
    return code == TV_OK;
}

/* Each session is whole or not there, in the order of the file; the first is not lost for what
 * comes behind it. */
static void stops_that_are_killed(void **state)
{
    struct world *world = *state;
    struct client clients[2];
    int killed = 1, before = 0;
    for (int n = 1; killed; n++) {
        killed = leave_killed(world, clients, n);
        begin(world);
        restore(world);
        int first = is_there(world, &clients[0]), second = is_there(world, &clients[1]);
        assert_true(first >= second);
        assert_true(first + second >= before); /* the more was written */
        before = first + second;
        fixture_stop(&world->fixture);
        assert_int_equal(files_remove(world), 0);
        assert_true(killed || n > 10);
    }
    assert_int_equal(before, 2);
}

/* A read that gives less than was asked for, or is interrupted, is gone on with. */
static void reads_in_pieces(void **state)
{
    struct world *world = *state;
    static const unsigned kinds[] = {FAULT_SHORT, FAULT_AGAIN};
    for (size_t k = 0; k < 2; k++) {
        int failed = 1;
        for (int n = 1; failed; n++) {
            (void)leave(world, 0, 0);
            begin(world);
            fault_arm(kinds[k], n);
            restore(world);
            failed = fault_disarm();
            assert_true(is_back(world));
            fixture_stop(&world->fixture);
            assert_int_equal(files_remove(world), 0);
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(stops_whose_snapshot_fails, world_setup, world_teardown),
        cmocka_unit_test_setup_teardown(starts_that_cannot_read_it, world_setup, world_teardown),
        cmocka_unit_test_setup_teardown(stops_that_are_killed, world_setup, world_teardown),
        cmocka_unit_test_setup_teardown(reads_in_pieces, world_setup, world_teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
