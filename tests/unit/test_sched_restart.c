/*
 * test_sched_restart.c - what a client finds of calls that a restart came between: rounds that were
 * held, and creates and forks with an Idempotency-Key; and a folder that cannot be written.
 */
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/clock.h"
#include "sched/snapshot_common.h"
#include "snapshot_world.h"

#define PROMPT "{\"tokens\":[1,2,3,4,5]}"

/* Hold a chain of `count` nodes. */
static void hold(struct world *world, struct client *client, int32_t count)
{
    char body[4096];
    const char *chain = client_chain(&world->fixture, client, count, body, sizeof body);
    struct tv_call *call = ask(&world->fixture, TV_CALL_VERIFY, client->id,
                               "%.*s,\"commit\":\"hold\"}", (int)strlen(chain) - 1, chain);
    assert_reply(call, 200);
    call_free(call);
    client->seq++;
}

/* What the client is once the first `count` nodes of a chain are its tokens. */
static int32_t next_of(struct world *world, const struct client *client, int32_t count)
{
    struct client after = *client;
    client_advance(&world->fixture, &after, count);
    return after.pending;
}

static struct tv_call *commit(struct world *world, const struct client *client, const char *path,
                              int32_t next)
{
    char rest[40] = "";
    if (next >= 0) {
        (void)snprintf(rest, sizeof rest, ",\"next\":%d", next);
    }
    return ask(&world->fixture, TV_CALL_COMMIT, client->id,
               "{\"seq\":%d,\"epoch\":\"%s\",\"path\":%s%s}", client->seq, client->epoch, path,
               rest);
}

/* A verify of one node that settles round `seq` as its first two nodes, and `next` behind them. */
static struct tv_call *prev(struct world *world, const struct client *client, int32_t len,
                            int32_t seq, int32_t next)
{
    return ask(&world->fixture, TV_CALL_VERIFY, client->id,
               "{\"seq\":%d,\"epoch\":\"%s\",\"expected_len\":%d,\"tree\":{\"tokens\":[%d],"
               "\"parents\":[-1]},\"commit_prev\":{\"seq\":%d,\"path\":[0,1],\"next\":%d}}",
               client->seq, client->epoch, len, next, seq, next);
}

/* As settled so far, a session and a fork of it, whose last page is shared until one has nodes. */
static void a_held_round_is_there_to_be_settled(void **state)
{
    struct world *world = *state;
    struct client one, fork, other;
    struct tv_cache_counts before, after;
    world_begin(world, 64);
    client_open(&world->fixture, &one, 30, "");
    world_rounds(world, &one, 1);
    world_fork_open(world, &one, &fork);
    world_fork_open(world, &one, &other);
    hold(world, &one, 20); /* over two page borders */
    hold(world, &fork, 3);
    int32_t held = one.seq - 1;
    tv_cache_counts(world->fixture.engine->cache, &before);
    world_end(world, 10);
    world_begin(world, 64);
    tv_cache_counts(world->fixture.engine->cache, &after);
    assert_int_equal(after.held, before.held);
    assert_int_equal(after.shared, before.shared);
    assert_int_equal(after.scratch, before.scratch);
    assert_true(world_move_held(world, &one, held));
    assert_true(world_move_held(world, &fork, 1));
    assert_true(world_move(world, &other));
    client_check(&world->fixture, &one);
    struct tv_call *call = call_chain(&world->fixture, &one, 2);
    assert_refused(call_wait(call), 409, "round-held");
    call_free(call);
    call = commit(world, &one, "[0,2]", 7);
    assert_refused(call, 422, "wrong-value");
    call_free(call);
    call = commit(world, &one, "[0,1,2,3,4,5,6]", next_of(world, &one, 7));
    assert_reply(call, 200);
    assert_int_equal(reply_int(call, "committed_len"), one.len + 7);
    call_free(call);
    client_advance(&world->fixture, &one, 7); /* the commit took a number too */
    call = commit(world, &fork, "[]", -1);
    assert_reply(call, 200);
    call_free(call);
    fork.seq++;
    struct client *clients[] = {&one, &fork, &other};
    for (size_t i = 0; i < 3; i++) {
        client_check(&world->fixture, clients[i]);
        world_rows_check(world, clients[i]);
        world_rounds(world, clients[i], 5);
        world_rows_check(world, clients[i]);
    }
    world_end(world, 10);
}

/* Pages for its tokens, and none for its nodes. */
static void a_held_round_without_room(void **state)
{
    struct world *world = *state;
    struct client client;
    struct tv_cache_counts counts;
    world_begin(world, 64);
    client_open(&world->fixture, &client, 30, "");
    hold(world, &client, 20);
    world_end(world, 10);
    world_begin(world, 3);
    tv_cache_counts(world->fixture.engine->cache, &counts);
    assert_int_equal(counts.free, 3);
    assert_int_equal(world->fixture.sched->restore_lost, 1);
    assert_false(world_move(world, &client));
    world_end(world, 10);
}

static void a_held_round_is_settled_by_the_next(void **state)
{
    struct world *world = *state;
    struct client client, rolled;
    world_begin(world, 64);
    client_open(&world->fixture, &client, 30, ",\"sampling\":{\"rule\":\"client\"}");
    client_open(&world->fixture, &rolled, 40, "");
    hold(world, &client, 4);
    hold(world, &rolled, 4);
    world_end(world, 10);
    world_begin(world, 64);
    assert_true(world_move_held(world, &client, 1));
    assert_true(world_move_held(world, &rolled, 1));
    client_advance(&world->fixture, &client, 2);
    client.seq--; /* the verify has the number */
    struct tv_call *call = prev(world, &client, client.len, 1, client.pending);
    assert_reply(call, 200);
    call_free(call);
    client.seq++;
    call = commit(world, &client, "[0]", next_of(world, &client, 1)); /* it is held as well */
    assert_reply(call, 200);
    call_free(call);
    client_advance(&world->fixture, &client, 1);
    client_check(&world->fixture, &client);
    world_rows_check(world, &client);
    expect(&world->fixture, 200, TV_CALL_ROLLBACK, rolled.id,
           "{\"seq\":2,\"epoch\":\"%s\",\"expected_len\":40,\"len\":40}", rolled.epoch);
    rolled.seq++;
    client_check(&world->fixture, &rolled);
    world_rounds(world, &rolled, 3);
    world_rows_check(world, &rolled);
    world_end(world, 10);
}

/* A verify settled the round before and then failed: its retry is known under the next epoch. */
static void a_settlement_is_not_done_twice(void **state)
{
    struct world *world = *state;
    struct client client;
    world_begin(world, 64);
    client_open(&world->fixture, &client, 30, "");
    hold(world, &client, 4);
    struct client settled = client;
    client_advance(&world->fixture, &settled, 2);
    settled.seq--;
    tv_fixed_engine_fail(world->fixture.engine, TV_KV_FULL, 1);
    struct tv_call *call = prev(world, &client, settled.len, 1, settled.pending);
    assert_reply(call, 503);
    assert_true(reply_flag(call, "committed"));
    call_free(call);
    world_end(world, 10);
    world_begin(world, 64);
    assert_true(world_move(world, &settled)); /* nothing is held any more */
    client_check(&world->fixture, &settled);
    call = prev(world, &settled, settled.len, 1, settled.pending + 1);
    assert_refused(call, 404, "round-not-found");
    call_free(call);
    call = prev(world, &settled, settled.len, 1, settled.pending);
    assert_reply(call, 200);
    call_free(call);
    client_advance(&world->fixture, &settled, 1);
    client_check(&world->fixture, &settled);
    world_rows_check(world, &settled);
    world_end(world, 10);
}

static struct tv_call *keyed(struct world *world, enum tv_call_kind kind, const char *session,
                             const char *key, const char *format, const char *epoch)
{
    struct tv_call *call = call_make(&world->fixture, kind, session, format, epoch);
    (void)snprintf(call->key, sizeof call->key, "%s", key);
    call_start(&world->fixture, call);
    return call_wait(call);
}

/* The session of an answer, which has this server's epoch. */
static void made(struct world *world, struct tv_call *call, char ret_id[32])
{
    char epoch[17];
    assert_reply(call, 201);
    reply_text(call, "session", ret_id, 32);
    reply_text(call, "epoch", epoch, sizeof epoch);
    assert_string_equal(epoch, world->fixture.sched->table.epoch);
    call_free(call);
}

#define assert_count(world, sessions)                                                              \
    assert_int_equal((world)->fixture.sched->table.count, sessions)

static void a_repeated_create_finds_its_session(void **state)
{
    struct world *world = *state;
    char first[32], again[32], gone[32];
    world_begin(world, 64);
    made(world, keyed(world, TV_CALL_CREATE, "", "k-1", "%s", PROMPT), first);
    made(world, keyed(world, TV_CALL_CREATE, "", "k-2", "%s", PROMPT), gone);
    expect(&world->fixture, 204, TV_CALL_DELETE, gone, NULL);
    for (int i = 0; i < 3; i++) { /* however often */
        world_end(world, 10);
        world_begin(world, 64);
        made(world, keyed(world, TV_CALL_CREATE, "", "k-1", "%s", PROMPT), again);
        assert_string_equal(again, first);
        assert_count(world, 1);
    }
    expect(&world->fixture, 200, TV_CALL_STATE, first, NULL);
    struct tv_call *call =
        keyed(world, TV_CALL_CREATE, "", "k-1", "%s", "{\"tokens\":[1,2,3,4,6]}");
    assert_refused(call, 422, "seq-reused");
    call_free(call);
    (void)snprintf(world->fixture.principal, sizeof world->fixture.principal, "other");
    made(world, keyed(world, TV_CALL_CREATE, "", "k-1", "%s", PROMPT), again);
    assert_string_not_equal(again, first); /* another's key of that name */
    (void)snprintf(world->fixture.principal, sizeof world->fixture.principal, "%s", "");
    made(world, keyed(world, TV_CALL_CREATE, "", "k-2", "%s", PROMPT), again);
    assert_string_not_equal(again, gone); /* which did not survive */
    assert_count(world, 3);
    world_end(world, -1); /* nobody is kept */
    world_begin(world, 64);
    made(world, keyed(world, TV_CALL_CREATE, "", "k-1", "%s", PROMPT), again);
    assert_string_not_equal(again, first);
    assert_count(world, 1);
    world_end(world, 10);
}

/* A fork names an epoch: that it is over is said first, and the repeat under the next one is known.
 */
static void a_repeated_fork_finds_its_session(void **state)
{
    static const char body[] = "{\"epoch\":\"%s\",\"len\":5}";
    struct world *world = *state;
    struct client parent;
    char first[32], again[32];
    world_begin(world, 64);
    client_open(&world->fixture, &parent, 20, "");
    made(world, keyed(world, TV_CALL_FORK, parent.id, "f-1", body, parent.epoch), first);
    world_end(world, 10);
    world_begin(world, 64);
    struct tv_call *call = keyed(world, TV_CALL_FORK, parent.id, "f-1", body, parent.epoch);
    assert_refused(call, 409, "epoch-changed");
    assert_int_equal(reply_int(call, "session_state/committed_len"), 20);
    call_free(call);
    assert_true(world_move(world, &parent));
    made(world, keyed(world, TV_CALL_FORK, parent.id, "f-1", body, parent.epoch), again);
    assert_string_equal(again, first);
    expect(&world->fixture, 204, TV_CALL_DELETE, parent.id, NULL); /* which is not needed for it */
    made(world, keyed(world, TV_CALL_FORK, parent.id, "f-1", body, parent.epoch), again);
    assert_string_equal(again, first);
    assert_count(world, 1);
    world_end(world, 10);
}

/* Nothing is taken from a folder that cannot be written: the next start would take it again. */
static void a_folder_that_cannot_be_written(void **state)
{
    struct world *world = *state;
    struct client client;
    int dir = -1, is_root = geteuid() == 0;
    world_begin(world, 64);
    client_open(&world->fixture, &client, 20, "");
    world_end(world, 10);
    assert_int_equal(chmod(world->dir, 0555), 0);
    if (is_root && seteuid(65534) != 0) {
        assert_int_equal(chmod(world->dir, 0700), 0);
        skip(); /* who may write everywhere cannot become somebody else */
    }
    int rc = tv_snapshot_dir_open(world->dir, &dir);
    world_begin(world, 64);
    int lost = world->fixture.sched->table.count == 0 && world->fixture.sched->snapshot_dir < 0;
    world_end(world, 10);
    if (is_root) {
        assert_int_equal(seteuid(0), 0);
    }
    assert_int_equal(chmod(world->dir, 0700), 0);
    assert_int_equal(rc, -EACCES);
    assert_true(lost);
    assert_true(world_is_there(world, ""));
    world_begin(world, 64);
    assert_true(world_move(world, &client));
    world_end(world, 10);
}

/* Each of many lost sessions is named, in fewer lines than a log takes of a kind. */
static void every_lost_session_is_named(void **state)
{
    struct world *world = *state;
    enum { LOST = 1000 };
    static char text[256 * 1024];
    struct tv_sched_naming naming = {.what = "kept"};
    char path[300], id[32];
    int lines = 0, old = dup(STDERR_FILENO);
    (void)snprintf(path, sizeof path, "%s/log", world->dir);
    assert_true(old >= 0);
    assert_non_null(freopen(path, "w", stderr));
    for (int i = 0; i < LOST; i++) {
        (void)snprintf(id, sizeof id, "s_%022d", i);
        tv_sched_name_lost(&naming, id, i, "it is a test");
    }
    tv_sched_name_end(&naming);
    assert_true(dup2(old, STDERR_FILENO) >= 0);
    assert_int_equal(close(old), 0);
    FILE *file = fopen(path, "r");
    assert_non_null(file);
    size_t bytes = fread(text, 1, sizeof text - 1, file);
    assert_int_equal(fclose(file), 0);
    text[bytes] = '\0';
    for (int i = 0; i < LOST; i++) {
        (void)snprintf(id, sizeof id, "s_%022d", i);
        assert_non_null(strstr(text, id));
    }
    for (const char *c = text; *c != '\0'; c++) {
        lines += *c == '\n';
    }
    assert_true(lines < 100);
    assert_int_equal(naming.count, LOST);
}

/* A disk that has taken 64 MiB in two seconds needs one for 32 more, of which some may be to come,
 * and as long when what it has taken is not in the file any more. */
static void what_waits_for_the_disk_has_its_time(void **state)
{
    (void)state;
    struct tv_snapshot_file file = {.at = 0, .begun = 0};
    assert_int_equal(tv_snapshot_file_flush_us(&file, 1u << 30, 2 * SECOND), 0);
    file.at = file.begun = 80u << 20; /* the last piece is on its way */
    file.taken = 64u << 20;
    file.at += 16u << 20;
    assert_int_equal(tv_snapshot_file_flush_us(&file, 0, 2 * SECOND), SECOND);
    file.at -= 8u << 20;
    assert_int_equal(tv_snapshot_file_flush_us(&file, 8u << 20, 2 * SECOND), SECOND);
    file.at = file.begun = 0;
    assert_int_equal(tv_snapshot_file_flush_us(&file, 32u << 20, 2 * SECOND), SECOND);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, world_setup, world_teardown)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(a_held_round_is_there_to_be_settled),
        TEST(a_held_round_without_room),
        TEST(a_held_round_is_settled_by_the_next),
        TEST(a_settlement_is_not_done_twice),
        TEST(a_repeated_create_finds_its_session),
        TEST(a_repeated_fork_finds_its_session),
        TEST(a_folder_that_cannot_be_written),
        TEST(every_lost_session_is_named),
        cmocka_unit_test(what_waits_for_the_disk_has_its_time),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
