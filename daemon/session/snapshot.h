/*
 * snapshot.h - sessions in a file, from the end of one process to the start of the next.
 *
 * Owns the format and every judgement of what a file says. Refuses a file of another model, element
 * type or page layout, and one that ends before its end; a session whose own bytes are damaged, or
 * say what no session can, is refused alone. Knows rows as opaque pages that somebody else copies.
 *
 * Format, version 2; version 1, which ends a body behind its answers, is read too. Numbers are
 * little-endian; u is unsigned, i is two's complement, f64 the bits of a binary64; every checksum
 * is SHA-256 (32 bytes).
 *
 *   header     magic "treeverify-snap" and a NUL, u32 version, u32 layers, u32 page_size (rows),
 *              u32 row_dim, u32 element (0: f32, 1: bf16), u32 vocab, model_id[32], maker[96],
 *              i64 saved_unix_ms, checksum of all before
 *   session    u32 kind 1, u32 pages (new ones), u64 body bytes, checksum of the body,
 *              checksum of the four before; body; then each new page with its checksum
 *   end        u32 kind 2, u32 sessions, u64 pages, checksum over the heads of all sessions in
 *              order, checksum of the four before; nothing follows
 *
 *   page       [layers, page_size, row_dim] elements, as they are in the pool; its checksum is of
 *              these and of the page's number (u64). Pages are numbered from 0 in the file's order,
 *              and sessions that share one name the same number.
 *   body       id[32], principal[40] (text, then NUL), root[16], digest[16], i32 len, pending,
 *              next_seq, finish, max_len, lease_s, exact, rule, top_k, has_typical, stop_count,
 *              page_count, kept_count, f64 temperature, top_p, min_p, epsilon, delta, u64 seed,
 *              i64 lease_expires_unix_ms, verify_rounds, verify_tokens, drafts nodes, levels,
 *              i32 tried[16], taken[16], stop_ids[16]; u32 pages[page_count]; i32 tokens[len];
 *              then for each kept answer i32 seq, i32 leaf, u64 bytes, outcome_at, outcome_bytes,
 *              hash[32] and the answer; then the round that waits for its client's decision, i32
 *              held seq (0: none, and nothing more of it), rule, count, proposed_count, pending,
 *              settled, len_before, tokens[count], parents[count], proposed[proposed_count]; then
 *              the call that made the session with an Idempotency-Key, i32 key_bytes (0: none, and
 *              nothing more of it), the key, session[32] (whose path it came by, or NUL), hash[32],
 *              u64 serial, epoch_at, bytes, and the answer, in which the epoch stands at epoch_at
 *
 * Rows are those of the tokens, and behind them, of a held round that is not settled, one of each
 * node, in the order of nodes.
 *
 * What is not in it: rows that were to be fetched, keys of batches and of sessions that are not in
 * the file, ids of expired sessions.
 */
#ifndef TV_SESSION_SNAPSHOT_H
#define TV_SESSION_SNAPSHOT_H

#include <stddef.h>
#include <stdint.h>

#include "session/session.h"

#define TV_SNAPSHOT_HEADER_BYTES 208
#define TV_SNAPSHOT_HEAD_BYTES   80
/* A session without its pages: tokens, and answers for retries. */
#define TV_SNAPSHOT_BODY_BYTES_MAX (256u << 20)
/* A larger answer is not kept over a restart. */
#define TV_SNAPSHOT_ANSWER_BYTES_MAX (64u << 20)

/* Whose rows they are, and how they lie. */
struct tv_snapshot_layout {
    uint8_t model_id[32];
    int32_t layers, page_size, row_dim, element, vocab;
    /* Version, backend and its variant: the rows of another maker are right, but not those that
     * this one would compute, bit for bit. Padded with NUL. */
    char maker[96];
};
/* Bytes of a page, without its checksum; 0: the layout is none. */
size_t tv_snapshot_page_bytes(const struct tv_snapshot_layout *layout);

/* A session's pages as the file names them. */
struct tv_snapshot_pages {
    uint32_t *numbers; /* [count], owned */
    int32_t count;
    int32_t exact; /* as in struct tv_cache_seq */
};
void tv_snapshot_pages_finish(struct tv_snapshot_pages *pages);

/* A session of a file, with what its table has of it. */
struct tv_snapshot_item {
    struct tv_session *session; /* owned; without a context */
    struct tv_snapshot_pages pages;
    struct tv_session_key key; /* of the call that made it, with its answer; key.key "": none */
    char id[32];               /* its name where that could be read, else "" */
};
/* Frees what is still there. */
void tv_snapshot_item_finish(struct tv_snapshot_item *item);

/* Bytes that grow; failed: no memory, and nothing is added any more. */
struct tv_snapshot_bytes {
    uint8_t *data; /* owned */
    size_t bytes, capacity;
    int failed;
};
void tv_snapshot_bytes_finish(struct tv_snapshot_bytes *bytes);

/* snapshot_write.c. The bytes of each part. A session's: what its body says, in its context's order
 * of pages; key: of the call that made it, or NULL. Its head needs the number of its new pages;
 * heads is the sum that the end has. */
void tv_snapshot_write_header(const struct tv_snapshot_layout *layout, int64_t saved_unix_ms,
                              uint8_t ret_header[TV_SNAPSHOT_HEADER_BYTES]);
void tv_snapshot_write_body(const struct tv_session *session, const struct tv_snapshot_pages *pages,
                            const struct tv_session_key *key, struct tv_snapshot_bytes *ret_body);
void tv_snapshot_write_head(const struct tv_snapshot_bytes *body, uint32_t new_pages,
                            struct tv_sha256 *heads, uint8_t ret_head[TV_SNAPSHOT_HEAD_BYTES]);
void tv_snapshot_write_end(uint32_t sessions, uint64_t pages, const struct tv_sha256 *heads,
                           uint8_t ret_head[TV_SNAPSHOT_HEAD_BYTES]);
void tv_snapshot_page_sum(const void *page, size_t bytes, uint64_t number, uint8_t ret_sum[32]);

/* Where a snapshot is read from. read: 0 with all `bytes` from `offset` on, which lie within size,
 * or a negative errno. */
struct tv_snapshot_source {
    int (*read)(void *context, uint64_t offset, void *to, size_t bytes);
    void *context;
    uint64_t size;
    int is_cut; /* who wrote it did not come to its end: it ends behind the last whole session */
};

/* A file whose frame has been judged. */
struct tv_snapshot_reader {
    struct tv_snapshot_source source;
    size_t page_bytes;
    int64_t saved_unix_ms;
    int same_maker;
    uint32_t version, session_count;
    uint64_t page_count;
    uint64_t at;     /* of the next head */
    uint64_t passed; /* pages in front of it */
    uint64_t *pages; /* [page_count]: where each page is; owned */
};

/* snapshot_read.c. Judge the header and walk over all heads to the end, without a look at bodies
 * and pages. 0; -EBADMSG: it is none, another version's, or damaged; -EXDEV: of another model or
 * layout; -ENOMEM; or what read said. error says what differs. finish copes with a failure. One
 * that is cut has as many sessions as are in it to their last byte, and be it none. */
int tv_snapshot_open(const struct tv_snapshot_source *source,
                     const struct tv_snapshot_layout *layout, struct tv_snapshot_reader *ret_reader,
                     char *error, size_t error_bytes);
void tv_snapshot_close(struct tv_snapshot_reader *reader);
/* The next session, not in the table; its call's answer has the table's epoch. 1, and the item is
 * to be finished; 0: there is none; -EBADMSG with error: this one is refused, the item has nothing
 * but its name, and the next call reads the one behind it; -ENOMEM, the same. */
int tv_snapshot_next(struct tv_snapshot_reader *reader, const struct tv_sessions *table,
                     int32_t vocab, struct tv_snapshot_item *ret_item, char *error,
                     size_t error_bytes);
/* Read a page of page_bytes. 0; -EBADMSG: damaged; or what read said. */
int tv_snapshot_page(const struct tv_snapshot_reader *reader, uint32_t number, void *to);

/* snapshot_file.c - the file "sessions.snapshot" of a folder, mode 0600.
 *
 * It is written as "sessions.snapshot.new" and renamed once it is whole and on the disk; where only
 * the former is there, the process was ended before that, and it is read as far as it is whole. Who
 * reads it renames it to "sessions.snapshot.reading" first, so that no process reads it twice; one
 * that is refused is kept as "sessions.snapshot.refused", in place of an older one.
 */
/* The folder, locked for this process as long as the descriptor is open. 0; -EWOULDBLOCK: another
 * process has it; -EROFS, -EACCES: it cannot be written; or a negative errno. */
int tv_snapshot_dir_open(const char *path, int *ret_dir);

struct tv_snapshot_file {
    int dir, fd;        /* -1: none; dir is the caller's */
    uint64_t at, begun; /* bytes of it; of these, on their way to the disk: whole pieces */
    uint64_t taken;     /* what the disk has taken, of pieces that were cut too */
};
/* For writing, in place of what was left before. */
int tv_snapshot_file_create(int dir, struct tv_snapshot_file *ret_file);
/* Room for so many more bytes, where the disk can tell: 0, -ENOSPC or what else it says. */
int tv_snapshot_file_reserve(struct tv_snapshot_file *file, uint64_t bytes);
int tv_snapshot_file_append(struct tv_snapshot_file *file, const void *data, size_t bytes);
/* How long the disk will need for what waits for it and so many bytes more, by what it has taken in
 * elapsed_us; 0 at first. */
int64_t tv_snapshot_file_flush_us(const struct tv_snapshot_file *file, uint64_t more,
                                  int64_t elapsed_us);
/* Forget what stands from there on. */
int tv_snapshot_file_cut(struct tv_snapshot_file *file, uint64_t at);
/* Put it in its place, or leave it as one that is cut, which a failure to do the former does too.
 */
int tv_snapshot_file_finish(struct tv_snapshot_file *file);
int tv_snapshot_file_leave(struct tv_snapshot_file *file);
/* It goes. */
void tv_snapshot_file_abandon(struct tv_snapshot_file *file);

/* For reading: 0; -ENOENT: there is none; -EPERM with error: it is not this user's alone, or no
 * file, or one that another start did not come to the end of, and has been set aside; or a negative
 * errno with error: it is where it was. */
int tv_snapshot_file_open(int dir, struct tv_snapshot_file *ret_file,
                          struct tv_snapshot_source *ret_source, char *error, size_t error_bytes);
/* It has been read: it goes, or (keep) is set aside. */
void tv_snapshot_file_close(struct tv_snapshot_file *file, int keep);
/* It was not read to its end, and nothing came of it: it is where it was. */
void tv_snapshot_file_put_back(struct tv_snapshot_file *file, int is_cut);

#endif
