/*
 * snapshot_world.h - schedulers that come after one another, with a folder between them in which
 * the sessions of one wait for the next.
 *
 * A row of this engine is its token, so that every row can be looked at.
 */
#ifndef TV_TESTS_SNAPSHOT_WORLD_H
#define TV_TESTS_SNAPSHOT_WORLD_H

#include <stdint.h>

#include "session/snapshot.h"
#include "test_sched_fixture.h"

#define PAGE   16
#define SECOND INT64_C(1000000)

struct world {
    struct fixture fixture;
    char dir[200], path[256];
};

/* cmocka setup and teardown; *state is a struct world with an empty folder. */
int world_setup(void **state);
int world_teardown(void **state);

/* A scheduler with so many pages, which restores what is there. */
void world_begin(struct world *world, int64_t pages);
void world_begin_at(struct world *world, int64_t pages, int64_t started_unix_ms);
/* It ends, and has so many seconds to save. */
void world_end(struct world *world, int64_t seconds);

/* Is there a snapshot with this suffix? */
int world_is_there(const struct world *world, const char *suffix);
/* Of the fixture's principal; NULL: there is none. */
struct tv_session *world_session_of(struct world *world, const struct client *client);
/* Every row of the client's session is its token. */
void world_rows_check(struct world *world, const struct client *client);
/* The client finds its session under the new epoch, with this round held (-1: none); 0: it is lost.
 */
int world_move_held(struct world *world, struct client *client, int32_t held_seq);
int world_move(struct world *world, struct client *client);
/* `count` rounds of three tokens. */
void world_rounds(struct world *world, struct client *client, int count);
void world_fork_open(struct world *world, const struct client *parent, struct client *ret_fork);

#endif
