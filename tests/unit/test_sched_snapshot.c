/*
 * test_sched_snapshot.c - sessions from one scheduler to the next: rows, shares of pages, rounds
 * that were held, and what becomes of those that do not fit, are damaged, or are late.
 *
 * A row of this engine is its token, so that every row can be looked at.
 */
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
#include "session/snapshot.h"
#include "test_sched_fixture.h"

#define PAGE   16
#define SECOND INT64_C(1000000)

struct world {
    struct fixture fixture;
    char dir[64], path[128];
};

static void begin_at(struct world *world, int64_t pages, int64_t started_unix_ms)
{
    fixture_start_pages(&world->fixture, pages);
    world->fixture.config.snapshot_bytes = 1 << 20;
    tv_sched_restore(world->fixture.sched, world->dir, started_unix_ms, NULL, NULL);
}

static void begin(struct world *world, int64_t pages)
{
    begin_at(world, pages, tv_clock_unix_ms());
}

static void end(struct world *world, int64_t seconds)
{
    tv_sched_end(world->fixture.sched);
    tv_sched_save(world->fixture.sched, tv_clock_us() + seconds * SECOND);
    fixture_stop(&world->fixture);
}

static int world_setup(void **state)
{
    struct world *world = calloc(1, sizeof *world);
    const char *base = getenv("TMPDIR");
    assert_non_null(world);
    (void)snprintf(world->dir, sizeof world->dir, "%.40s/snap-XXXXXX",
                   base != NULL && strlen(base) < 40 ? base : "/tmp");
    assert_non_null(mkdtemp(world->dir));
    (void)snprintf(world->path, sizeof world->path, "%s/sessions.snapshot", world->dir);
    *state = world;
    return 0;
}

static int world_teardown(void **state)
{
    static const char *const suffixes[] = {"", ".new", ".reading", ".refused"};
    struct world *world = *state;
    for (size_t i = 0; i < sizeof suffixes / sizeof suffixes[0]; i++) {
        char path[160];
        (void)snprintf(path, sizeof path, "%s%s", world->path, suffixes[i]);
        (void)unlink(path);
    }
    int rc = rmdir(world->dir);
    free(world);
    return rc;
}

static int is_there(const struct world *world, const char *suffix)
{
    char path[160];
    struct stat info;
    (void)snprintf(path, sizeof path, "%s%s", world->path, suffix);
    return stat(path, &info) == 0;
}

static struct tv_session *session_of(struct world *world, const struct client *client)
{
    struct tv_session *session = NULL;
    tv_sched_lock(world->fixture.sched);
    (void)tv_sessions_find(&world->fixture.sched->table, client->id, world->fixture.principal,
                           tv_clock_us(), &session);
    tv_sched_unlock(world->fixture.sched);
    return session;
}

/* Every row of the client's session is its token. */
static void rows_check(struct world *world, const struct client *client)
{
    const struct tv_session *session = session_of(world, client);
    struct tv_cache *cache = world->fixture.engine->cache;
    assert_non_null(session);
    const struct tv_cache_seq *seq = tv_fixed_engine_seq(session->context);
    const float *rows = tv_cache_layer(cache, 0);
    for (int32_t i = 0; i < client->len; i++) {
        assert_true(rows[tv_cache_slot(cache, seq, i)] == (float)client->tokens[i]);
    }
}

/* The client finds its session under the new epoch; 0: it is lost. */
static int move(struct world *world, struct client *client)
{
    struct fixture *fixture = &world->fixture;
    char body[4096];
    struct tv_call *call = ask(fixture, TV_CALL_VERIFY, client->id, "%s",
                               client_chain(fixture, client, 2, body, sizeof body));
    assert_refused(call, 409, "epoch-changed");
    int known = reply_has(call, "session_state/epoch");
    if (known) {
        char old[17];
        memcpy(old, client->epoch, sizeof old);
        reply_text(call, "session_state/epoch", client->epoch, sizeof client->epoch);
        assert_string_not_equal(old, client->epoch);
        assert_int_equal(reply_int(call, "session_state/next_seq"), client->seq);
        assert_int_equal(reply_int(call, "session_state/held_seq"), -1);
        assert_int_equal(reply_int(call, "session_state/pending"), client->pending);
    }
    call_free(call);
    return known;
}

static void rounds(struct world *world, struct client *client, int count)
{
    for (int i = 0; i < count; i++) {
        struct tv_call *call = call_chain(&world->fixture, client, 3);
        (void)call_wait(call);
        assert_reply(call, 200);
        client_advance(&world->fixture, client, 3);
        call_free(call);
    }
}

static void fork_open(struct world *world, const struct client *parent, struct client *ret_fork)
{
    struct tv_call *call =
        ask(&world->fixture, TV_CALL_FORK, parent->id, "{\"epoch\":\"%s\"}", parent->epoch);
    assert_reply(call, 201);
    *ret_fork = *parent;
    ret_fork->seq = 1;
    reply_text(call, "session", ret_fork->id, sizeof ret_fork->id);
    call_free(call);
}

static void sessions_go_on(void **state)
{
    struct world *world = *state;
    struct client one, fork, other;
    struct tv_cache_counts before, after;
    begin(world, 64);
    (void)snprintf(world->fixture.principal, sizeof world->fixture.principal, "alice");
    client_open(&world->fixture, &one, 40, "");
    rounds(world, &one, 4);
    fork_open(world, &one, &fork);
    rounds(world, &fork, 1);
    fork_open(world, &one, &other); /* its pages are the first one's */
    tv_cache_counts(world->fixture.engine->cache, &before);
    end(world, 10);
    assert_true(is_there(world, ""));

    begin(world, 64);
    (void)snprintf(world->fixture.principal, sizeof world->fixture.principal, "mallory");
    assert_false(move(world, &one));
    (void)snprintf(world->fixture.principal, sizeof world->fixture.principal, "alice");
    tv_cache_counts(world->fixture.engine->cache, &after);
    assert_int_equal(after.held, before.held);
    assert_int_equal(after.shared, before.shared);
    assert_int_equal(after.free + after.cached + after.held, after.total);
    assert_false(is_there(world, ""));
    struct client *clients[] = {&one, &fork, &other};
    for (size_t i = 0; i < 3; i++) {
        assert_true(move(world, clients[i]));
        client_check(&world->fixture, clients[i]);
        rows_check(world, clients[i]);
    }
    for (size_t i = 0; i < 3; i++) { /* a page that two have is copied before it is written */
        rounds(world, clients[i], 5);
    }
    for (size_t i = 0; i < 3; i++) {
        client_check(&world->fixture, clients[i]);
        rows_check(world, clients[i]);
    }
    assert_int_equal(world->fixture.sched->table.restored_count, 3);
    end(world, 10);
}

/* The newest answers are there for who did not get them; of rounds before, that they are gone. */
static void answers_are_kept(void **state)
{
    struct world *world = *state;
    struct client client;
    char first[4096], again[4096];
    begin(world, 64);
    client_open(&world->fixture, &client, 40, "");
    rounds(world, &client, TV_REPLAY_ROUNDS_MAX + 2);
    struct tv_call *call = call_make(&world->fixture, TV_CALL_ROUND, client.id, NULL);
    call->request.seq = client.seq - 1;
    call_start(&world->fixture, call);
    assert_reply(call, 200);
    (void)snprintf(first, sizeof first, "%.*s", (int)call->reply.body.bytes, call->reply.body.data);
    call_free(call);
    end(world, 10);
    begin(world, 64);
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
    end(world, 10);
}

static void a_held_round_ends_with_the_process(void **state)
{
    struct world *world = *state;
    struct client client;
    char body[4096];
    begin(world, 64);
    client_open(&world->fixture, &client, 30, "");
    rounds(world, &client, 1);
    const char *chain = client_chain(&world->fixture, &client, 3, body, sizeof body);
    struct tv_call *call = ask(&world->fixture, TV_CALL_VERIFY, client.id,
                               "%.*s,\"commit\":\"hold\"}", (int)strlen(chain) - 1, chain);
    assert_reply(call, 200);
    call_free(call);
    client.seq++;
    end(world, 10);
    begin(world, 64);
    assert_true(move(world, &client));
    client_check(&world->fixture, &client);
    rows_check(world, &client);
    rounds(world, &client, 2);
    end(world, 10);
}

/* Into a smaller pool come those used last, and every page is accounted for. */
static void what_has_no_room_is_left_out(void **state)
{
    struct world *world = *state;
    struct client clients[3];
    struct tv_cache_counts counts;
    begin(world, 64);
    for (int i = 0; i < 3; i++) {
        char salt[40];
        (void)snprintf(salt, sizeof salt, ",\"cache_salt\":\"%d\"", i);
        client_open(&world->fixture, &clients[i], 5 * PAGE, salt);
    }
    /* salted sessions have another digest than the client has; the order of use is what counts */
    end(world, 10);
    begin(world, 12);
    tv_cache_counts(world->fixture.engine->cache, &counts);
    assert_int_equal(counts.held, 10);
    assert_int_equal(counts.free, 2);
    assert_null(session_of(world, &clients[0]));
    assert_non_null(session_of(world, &clients[1]));
    assert_non_null(session_of(world, &clients[2]));
    assert_int_equal(world->fixture.sched->restore_lost, 1);
    assert_false(is_there(world, ".refused"));
    end(world, 10);
}

static void a_stop_without_time_keeps_none(void **state)
{
    struct world *world = *state;
    struct client client;
    begin(world, 64);
    client_open(&world->fixture, &client, 40, "");
    end(world, -1);
    assert_false(is_there(world, ""));
    assert_false(is_there(world, ".new"));
    begin(world, 64);
    assert_false(move(world, &client));
    end(world, 10);
}

/* The disk takes a part: what is whole stays, and the file is one that can be read. */
static void a_full_disk_keeps_what_fits(void **state)
{
    struct world *world = *state;
    struct client clients[2];
    struct rlimit before, limit;
    begin(world, 64);
    client_open(&world->fixture, &clients[0], 300, "");
    client_open(&world->fixture, &clients[1], 20, "");
    assert_int_equal(getrlimit(RLIMIT_FSIZE, &before), 0);
    limit = before;
    limit.rlim_cur = 3000; /* the small one, which was used last, has about 1,000 */
    void (*old)(int) = signal(SIGXFSZ, SIG_IGN);
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &limit), 0);
    end(world, 10);
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &before), 0);
    (void)signal(SIGXFSZ, old);
    assert_true(is_there(world, ""));
    assert_false(is_there(world, ".new"));
    begin(world, 64);
    assert_false(move(world, &clients[0]));
    assert_true(move(world, &clients[1]));
    rows_check(world, &clients[1]);
    rounds(world, &clients[1], 2);
    end(world, 10);
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
    begin(world, 64);
    client_open(&world->fixture, &clients[0], 100, "");
    client_open(&world->fixture, &clients[1], 20, "");
    end(world, 10);
    /* the last page is of the session that was used first */
    byte_flip(world, -TV_SNAPSHOT_HEAD_BYTES - 40, SEEK_END);
    begin(world, 64);
    assert_false(move(world, &clients[0]));
    assert_true(move(world, &clients[1]));
    tv_cache_counts(world->fixture.engine->cache, &counts);
    assert_int_equal(counts.held, 2);
    assert_int_equal(counts.free + counts.cached, 62);
    assert_true(is_there(world, ".refused"));
    end(world, 10);
    byte_flip(world, 20, SEEK_SET); /* in the header: nobody comes back */
    begin(world, 64);
    assert_false(move(world, &clients[1]));
    tv_cache_counts(world->fixture.engine->cache, &counts);
    assert_int_equal(counts.free, 64);
    end(world, 10);
    assert_false(is_there(world, ""));
}

static void a_file_that_others_may_write_is_refused(void **state)
{
    struct world *world = *state;
    struct client client;
    char other[160];
    begin(world, 64);
    client_open(&world->fixture, &client, 20, "");
    end(world, 10);
    assert_int_equal(chmod(world->path, 0620), 0);
    begin(world, 64);
    assert_false(move(world, &client));
    end(world, 10);
    (void)snprintf(other, sizeof other, "%s.refused", world->path);
    assert_int_equal(chmod(other, 0600), 0);
    assert_int_equal(symlink(other, world->path), 0); /* sound behind a link, which could be any */
    begin(world, 64);
    assert_false(move(world, &client));
    end(world, 10);
}

static void what_is_late_stays_away(void **state)
{
    struct world *world = *state;
    struct client clients[2];
    begin(world, 64);
    client_open(&world->fixture, &clients[0], 20, ",\"lease_s\":5");
    client_open(&world->fixture, &clients[1], 20, ",\"lease_s\":500");
    end(world, 10);
    begin_at(world, 64, tv_clock_unix_ms() + 10000);
    assert_false(move(world, &clients[0]));
    assert_true(move(world, &clients[1]));
    const struct tv_session *session = session_of(world, &clients[1]);
    assert_true(session->lease_expires_us <= tv_clock_us() + 500 * SECOND);
    assert_true(session->lease_expires_us > tv_clock_us() + 400 * SECOND);
    end(world, 10);
}

/* Prompts of the same owner find the pages that a session brought along. */
static void known_prompts_stay_known(void **state)
{
    struct world *world = *state;
    struct client one, again;
    struct tv_cache_counts counts;
    begin(world, 64);
    client_open(&world->fixture, &one, 5 * PAGE, "");
    end(world, 10);
    begin(world, 64);
    client_open(&world->fixture, &again, 5 * PAGE, "");
    tv_cache_counts(world->fixture.engine->cache, &counts);
    assert_int_equal(counts.reused, 4);
    rows_check(world, &again);
    end(world, 10);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(sessions_go_on, world_setup, world_teardown),
        cmocka_unit_test_setup_teardown(answers_are_kept, world_setup, world_teardown),
        cmocka_unit_test_setup_teardown(a_held_round_ends_with_the_process, world_setup,
                                        world_teardown),
        cmocka_unit_test_setup_teardown(what_has_no_room_is_left_out, world_setup, world_teardown),
        cmocka_unit_test_setup_teardown(a_stop_without_time_keeps_none, world_setup,
                                        world_teardown),
        cmocka_unit_test_setup_teardown(a_full_disk_keeps_what_fits, world_setup, world_teardown),
        cmocka_unit_test_setup_teardown(damage_costs_one_session, world_setup, world_teardown),
        cmocka_unit_test_setup_teardown(a_file_that_others_may_write_is_refused, world_setup,
                                        world_teardown),
        cmocka_unit_test_setup_teardown(what_is_late_stays_away, world_setup, world_teardown),
        cmocka_unit_test_setup_teardown(known_prompts_stay_known, world_setup, world_teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
