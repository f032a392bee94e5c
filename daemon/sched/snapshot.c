/*
 * snapshot.c - sessions go into a file when the process ends.
 *
 * Saves after the worker has ended, those used last first, within a time and a number of bytes;
 * what does not fit is named in the log, and smaller ones behind it are tried. Refuses to end for a
 * session that cannot be kept: the others are worth the same as before. What is in the file when
 * the process is ended in the middle of it is kept.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/log.h"
#include "sched/snapshot_common.h"

/* A save under way. */
struct saving {
    struct tv_sched *sched;
    struct tv_snapshot_file file;
    struct tv_sha256 heads;
    size_t page_bytes;
    int64_t bytes_max, start_us, deadline_us;
    int64_t pages_total; /* of the pool */
    int64_t *numbers;    /* [pages_total]: of a page in the file; -1: it is not there; owned */
    void *page;          /* [page_bytes], owned */
    int64_t page_count;
    uint32_t session_count;
    int over; /* nothing more can be written */
    int torn; /* half a session stands at its end */
    struct tv_sched_naming naming;
};

static int later_first(const void *a, const void *b)
{
    const struct tv_session *const *one = a, *const *other = b;
    int64_t x = (*one)->idle_us, y = (*other)->idle_us;
    return x < y ? 1 : x > y ? -1 : 0;
}

/* Those whose lease is not over, malloc'd. 0 or -ENOMEM. */
static int candidates(const struct tv_sessions *table, struct tv_session ***ret_list,
                      int32_t *ret_count)
{
    int64_t now_us = tv_clock_us();
    int32_t count = 0;
    struct tv_session **list = calloc((size_t)table->count + 1, sizeof(struct tv_session *));
    if (list == NULL) {
        return -ENOMEM;
    }
    for (size_t i = 0; i < table->bucket_count; i++) {
        for (struct tv_session *one = table->buckets[i]; one != NULL; one = one->next) {
            if (now_us < one->lease_expires_us && count < table->count) {
                list[count++] = one;
            }
        }
    }
    qsort(list, (size_t)count, sizeof(struct tv_session *), later_first);
    *ret_list = list;
    *ret_count = count;
    return 0;
}

/* Number the session's pages; those that no session before had get the next numbers. How many;
 * -ENOMEM. */
static int32_t pages_number(struct saving *saving, const struct tv_cache_seq *seq, int32_t count,
                            struct tv_snapshot_pages *ret_pages)
{
    int32_t fresh = 0;
    ret_pages->numbers = calloc((size_t)count, sizeof *ret_pages->numbers);
    if (ret_pages->numbers == NULL) {
        return -ENOMEM;
    }
    ret_pages->count = count;
    ret_pages->exact = seq->exact;
    for (int32_t i = 0; i < count; i++) {
        int64_t *number = &saving->numbers[seq->pages[i]];
        if (*number < 0) {
            *number = saving->page_count + fresh++;
        }
        ret_pages->numbers[i] = (uint32_t)*number;
    }
    return fresh;
}

/* The session is not in the file: its pages are not either. */
static void pages_forget(struct saving *saving, const struct tv_cache_seq *seq, int32_t count)
{
    for (int32_t i = 0; i < count; i++) {
        int64_t *number = &saving->numbers[seq->pages[i]];
        if (*number >= saving->page_count) {
            *number = -1;
        }
    }
}

/* The disk is to have all of it and so many bytes more by then, not only this process to be done.
 */
static int is_late(const struct saving *saving, uint64_t more)
{
    int64_t now_us = tv_clock_us();
    return now_us + tv_snapshot_file_flush_us(&saving->file, more, now_us - saving->start_us) >=
           saving->deadline_us;
}

/* The new pages, in the order of their numbers. 0, -ETIME or what failed. */
static int pages_write(struct saving *saving, const struct tv_cache_seq *seq, int32_t count)
{
    struct tv_engine *engine = saving->sched->engine;
    int64_t next = saving->page_count;
    uint8_t sum[32];
    int rc = 0;
    for (int32_t i = 0; rc == 0 && i < count; i++) {
        if (saving->numbers[seq->pages[i]] != next) {
            continue;
        }
        if (is_late(saving, 0)) {
            return -ETIME;
        }
        rc = engine->ops->page_read(engine, seq->pages[i], saving->page);
        if (rc == 0) {
            tv_snapshot_page_sum(saving->page, saving->page_bytes, (uint64_t)next, sum);
            rc = tv_snapshot_file_append(&saving->file, saving->page, saving->page_bytes);
        }
        if (rc == 0) {
            rc = tv_snapshot_file_append(&saving->file, sum, sizeof sum);
        }
        next++;
    }
    return rc;
}

/* Room and time for so many more bytes, and within the limit for the end behind them: 0, -E2BIG,
 * -EOVERFLOW, -ETIME, or what the disk says. */
static int make_room(struct saving *saving, size_t body, int32_t pages)
{
    uint64_t more, end;
    if (body > TV_SNAPSHOT_BODY_BYTES_MAX) {
        return -E2BIG;
    }
    if (__builtin_mul_overflow((uint64_t)saving->page_bytes + 32, (uint64_t)pages, &more) ||
        __builtin_add_overflow(more, TV_SNAPSHOT_HEAD_BYTES + (uint64_t)body, &more) ||
        __builtin_add_overflow(more, saving->file.at + TV_SNAPSHOT_HEAD_BYTES, &end) ||
        end > (uint64_t)saving->bytes_max) {
        return -EOVERFLOW;
    }
    return is_late(saving, more) ? -ETIME : tv_snapshot_file_reserve(&saving->file, more);
}

/* Head, body and pages. 0, or what failed. */
static int session_write(struct saving *saving, const struct tv_session *session,
                         const struct tv_cache_seq *seq, const struct tv_snapshot_pages *pages,
                         int32_t fresh)
{
    struct tv_snapshot_bytes body;
    struct tv_sha256 heads = saving->heads;
    uint8_t head[TV_SNAPSHOT_HEAD_BYTES];
    tv_snapshot_write_body(session, pages, tv_session_key_made(&saving->sched->table, session),
                           &body);
    int rc = body.failed ? -ENOMEM : make_room(saving, body.bytes, fresh);
    if (rc == 0) {
        tv_snapshot_write_head(&body, (uint32_t)fresh, &heads, head);
        rc = tv_snapshot_file_append(&saving->file, head, sizeof head);
    }
    if (rc == 0) {
        rc = tv_snapshot_file_append(&saving->file, body.data, body.bytes);
    }
    if (rc == 0) {
        rc = pages_write(saving, seq, pages->count);
    }
    tv_snapshot_bytes_finish(&body);
    if (rc == 0) {
        saving->heads = heads;
        saving->page_count += fresh;
        saving->session_count++;
    }
    return rc;
}

static const char *why_not(int rc)
{
    _Static_assert(TV_SNAPSHOT_BODY_BYTES_MAX == 256u << 20, "as the text says");
    switch (rc) {
    case -E2BIG:
        return "its tokens and answers are more than 256 MiB";
    case -EOVERFLOW:
        return "it does not fit into snapshot_bytes";
    case -ETIME:
        return "what is left of the stop is too short for it";
    case -ENODATA:
        return "its rows are not those of its tokens";
    default:
        return strerror(-rc);
    }
}

/* Does it end only this session: may a smaller one still find room, time and memory? */
static int is_of_one(int rc)
{
    return rc == -E2BIG || rc == -EOVERFLOW || rc == -ETIME || rc == -ENOSPC || rc == -EDQUOT ||
           rc == -EFBIG || rc == -ENOMEM;
}

static void session_save(struct saving *saving, const struct tv_session *session)
{
    const struct tv_engine_ops *ops = saving->sched->engine->ops;
    const struct tv_cache_seq *seq =
        session->context != NULL ? ops->context_seq(session->context) : NULL;
    struct tv_snapshot_pages pages = {0};
    int32_t page = saving->sched->table.params.page_size, rows = tv_session_rows(session);
    int32_t count = rows / page + (rows % page != 0);
    uint64_t at = saving->file.at;
    if (saving->over == 0 && tv_clock_us() >= saving->deadline_us) {
        saving->over = -ETIME;
    }
    int rc = saving->over;
    if (rc == 0 && (seq == NULL || seq->len != session->len || seq->page_count < count ||
                    (rows > session->len && seq->scratch != rows - session->len) ||
                    saving->page_count > (int64_t)UINT32_MAX - count)) {
        rc = -ENODATA;
    }
    if (rc == 0) {
        int32_t fresh = pages_number(saving, seq, count, &pages);
        rc = fresh < 0 ? fresh : session_write(saving, session, seq, &pages, fresh);
        if (rc != 0 && fresh >= 0) {
            pages_forget(saving, seq, count);
        }
        int cut = rc != 0 ? tv_snapshot_file_cut(&saving->file, at) : 0;
        saving->torn = cut != 0;
        if (rc != 0 && (cut != 0 || !is_of_one(rc))) {
            saving->over = rc;
        }
    }
    tv_snapshot_pages_finish(&pages);
    if (rc != 0) {
        tv_sched_name_lost(&saving->naming, session->id, session->len, why_not(rc));
    }
}

static int saving_start(struct saving *saving, const struct tv_snapshot_layout *layout)
{
    struct tv_cache_counts counts;
    uint8_t header[TV_SNAPSHOT_HEADER_BYTES];
    tv_engine_pages(saving->sched->engine, &counts);
    saving->pages_total = counts.total;
    saving->numbers = malloc((size_t)counts.total * sizeof *saving->numbers);
    saving->page = malloc(saving->page_bytes);
    if (saving->numbers == NULL || saving->page == NULL) {
        return -ENOMEM;
    }
    for (int64_t i = 0; i < counts.total; i++) {
        saving->numbers[i] = -1;
    }
    tv_sha256_init(&saving->heads);
    tv_snapshot_write_header(layout, tv_clock_unix_ms(), header);
    int rc = tv_snapshot_file_create(saving->sched->snapshot_dir, &saving->file);
    return rc == 0 ? tv_snapshot_file_append(&saving->file, header, sizeof header) : rc;
}

/* 0, or why it has no end: then there is what was in it by then. */
static int saving_end(struct saving *saving)
{
    uint8_t head[TV_SNAPSHOT_HEAD_BYTES];
    int rc = saving->torn ? saving->over : 0;
    if (saving->session_count == 0) {
        tv_snapshot_file_abandon(&saving->file);
        return saving->over;
    }
    if (rc == 0) {
        tv_snapshot_write_end(saving->session_count, (uint64_t)saving->page_count, &saving->heads,
                              head);
        rc = tv_snapshot_file_append(&saving->file, head, sizeof head);
    }
    if (rc == 0) {
        return tv_snapshot_file_finish(&saving->file);
    }
    (void)tv_snapshot_file_leave(&saving->file); /* no better for another reason */
    return rc;
}

/* What came of it. */
static void say_end(const struct saving *saving, int rc)
{
    if (rc == 0) {
        tv_log(TV_LOG_INFO,
               "%u sessions are kept for the next start: %lld pages, %lld KiB, %lld ms",
               saving->session_count, (long long)saving->page_count,
               (long long)(saving->file.at >> 10),
               (long long)(tv_clock_us() - saving->start_us) / 1000);
    } else if (saving->session_count > 0) {
        tv_log(TV_LOG_WARNING,
               "%u sessions are kept for the next start, in a file without its end: %s",
               saving->session_count, why_not(rc));
    } else {
        tv_log(TV_LOG_ERROR, "no session is kept for the next start: %s", why_not(rc));
    }
}

/* What one of `count` sessions is lost for without a look at any. */
static void say_none(int32_t count, int rc)
{
    tv_log(TV_LOG_ERROR, "%d sessions end with this process: %s", count, why_not(rc));
}

void tv_sched_save(struct tv_sched *sched, int64_t deadline_us)
{
    struct tv_snapshot_layout layout;
    struct saving saving = {.sched = sched,
                            .file = {.dir = -1, .fd = -1},
                            .bytes_max = sched->config->snapshot_bytes,
                            .start_us = tv_clock_us(),
                            .deadline_us = deadline_us,
                            .naming = {.what = "kept"}};
    struct tv_session **list = NULL;
    int32_t count = 0;
    if (sched->snapshot_dir < 0 || sched->table.count == 0 ||
        tv_sched_snapshot_layout(sched, &layout) != 0) {
        return;
    }
    int rc = sched->lost ? -ENOTRECOVERABLE : candidates(&sched->table, &list, &count);
    if (rc != 0) {
        say_none(sched->table.count, rc);
    }
    if (rc != 0 || count == 0) {
        free(list);
        return;
    }
    saving.page_bytes = tv_snapshot_page_bytes(&layout);
    rc = saving_start(&saving, &layout);
    saving.over = rc;
    for (int32_t i = 0; i < count; i++) {
        session_save(&saving, list[i]);
    }
    tv_sched_name_end(&saving.naming);
    if (rc == 0) {
        rc = saving_end(&saving);
    } else {
        tv_snapshot_file_abandon(&saving.file);
    }
    say_end(&saving, rc);
    free(list);
    free(saving.numbers);
    free(saving.page);
}
