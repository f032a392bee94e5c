/*
 * snapshot_world.c - schedulers that come after one another, with a folder between them.
 */
#include "snapshot_world.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include <cmocka.h>

#include "base/clock.h"
#include "folder.h"

void world_begin_at(struct world *world, int64_t pages, int64_t started_unix_ms)
{
    fixture_start_pages(&world->fixture, pages);
    world->fixture.config.snapshot_bytes = 1 << 20;
    tv_sched_restore(world->fixture.sched, world->dir, started_unix_ms, NULL, NULL);
}

void world_begin(struct world *world, int64_t pages)
{
    world_begin_at(world, pages, tv_clock_unix_ms());
}

void world_end(struct world *world, int64_t seconds)
{
    tv_sched_end(world->fixture.sched);
    tv_sched_save(world->fixture.sched, tv_clock_us() + seconds * SECOND);
    fixture_stop(&world->fixture);
}

int world_setup(void **state)
{
    struct world *world = calloc(1, sizeof *world);
    assert_non_null(world);
    tv_tiny_folder(world->dir, sizeof world->dir);
    (void)snprintf(world->path, sizeof world->path, "%s/sessions.snapshot", world->dir);
    *state = world;
    return 0;
}

int world_teardown(void **state)
{
    struct world *world = *state;
    tv_tiny_folder_remove(world->dir);
    free(world);
    return 0;
}

int world_is_there(const struct world *world, const char *suffix)
{
    char path[300];
    struct stat info;
    (void)snprintf(path, sizeof path, "%s%s", world->path, suffix);
    return stat(path, &info) == 0;
}

struct tv_session *world_session_of(struct world *world, const struct client *client)
{
    struct tv_session *session = NULL;
    tv_sched_lock(world->fixture.sched);
    (void)tv_sessions_find(&world->fixture.sched->table, client->id, world->fixture.principal,
                           tv_clock_us(), &session);
    tv_sched_unlock(world->fixture.sched);
    return session;
}

void world_rows_check(struct world *world, const struct client *client)
{
    const struct tv_session *session = world_session_of(world, client);
    struct tv_cache *cache = world->fixture.engine->cache;
    assert_non_null(session);
    const struct tv_cache_seq *seq = tv_fixed_engine_seq(session->context);
    const float *rows = tv_cache_layer(cache, 0);
    for (int32_t i = 0; i < client->len; i++) {
        assert_true(rows[tv_cache_slot(cache, seq, i)] == (float)client->tokens[i]);
    }
}

int world_move_held(struct world *world, struct client *client, int32_t held_seq)
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
        assert_int_equal(reply_int(call, "session_state/held_seq"), held_seq);
        assert_int_equal(reply_int(call, "session_state/pending"), client->pending);
    }
    call_free(call);
    return known;
}

int world_move(struct world *world, struct client *client)
{
    return world_move_held(world, client, -1);
}

void world_rounds(struct world *world, struct client *client, int count)
{
    for (int i = 0; i < count; i++) {
        struct tv_call *call = call_chain(&world->fixture, client, 3);
        (void)call_wait(call);
        assert_reply(call, 200);
        client_advance(&world->fixture, client, 3);
        call_free(call);
    }
}

void world_fork_open(struct world *world, const struct client *parent, struct client *ret_fork)
{
    struct tv_call *call =
        ask(&world->fixture, TV_CALL_FORK, parent->id, "{\"epoch\":\"%s\"}", parent->epoch);
    assert_reply(call, 201);
    *ret_fork = *parent;
    ret_fork->seq = 1;
    reply_text(call, "session", ret_fork->id, sizeof ret_fork->id);
    call_free(call);
}
