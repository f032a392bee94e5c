/*
 * snapshot_fixture.h - snapshots in memory: sessions, the bytes of a file of them, and what is read
 * of it.
 */
#ifndef TV_TESTS_SNAPSHOT_FIXTURE_H
#define TV_TESTS_SNAPSHOT_FIXTURE_H

#include <stddef.h>
#include <stdint.h>

#include "session/session.h"

#define VOCAB    307
#define PAGE     16
#define SECOND   INT64_C(1000000)
#define FILE_MAX (64u << 10)
/* Of the call that made a session that has had rounds. */
#define KEY    "k-17"
#define ANSWER "{\"a\":1,\"epoch\":\"%s\"}"

extern const struct tv_snapshot_layout layout;

struct file {
    uint8_t data[FILE_MAX];
    size_t bytes;
    int is_cut; /* as in struct tv_snapshot_source */
};
struct tv_snapshot_source source_of(struct file *file);

void table_start(struct tv_sessions *table);
/* A session of `len` tokens and `rounds` answers; with any, the last round is held. */
struct tv_session *session_open(struct tv_sessions *table, int32_t len, int32_t rounds);
void page_make(uint64_t number, uint8_t *ret_page);

/* A file under way. */
struct writing {
    struct file *file;
    struct tv_sha256 heads;
    uint32_t sessions;
    uint64_t pages;
};
void writing_start(struct writing *writing, struct file *file);
/* A session by its body, `fresh` pages of which are new. */
void write_body(struct writing *writing, const struct tv_snapshot_bytes *body, uint32_t fresh);
void writing_end(struct writing *writing);
/* Its pages begin with the file's number `first`. */
void body_make(const struct tv_session *session, uint32_t first,
               struct tv_snapshot_bytes *ret_body);
/* One session of `len` tokens. */
void file_make(struct tv_sessions *table, int32_t len, int32_t rounds, struct file *file);
/* How many sessions the file gives, with all of their pages; -1: it is refused as a whole. */
int32_t sessions_of(struct file *file, const struct tv_sessions *table, char *error,
                    size_t error_bytes);

#endif
