/*
 * snapshot.c - sessions go into a file when the process ends, and come back when the next starts.
 *
 * Saves after the worker has ended, those used last first, within a time and a number of bytes;
 * what does not fit is named in the log. Restores before the first call. Refuses to end either for
 * a session that cannot be kept: the others are worth the same as before.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/log.h"
#include "sched/job.h"
#include "sched/version.h"

#define NAMED_MAX 64 /* sessions that the log names one by one */

/* 0: this engine's rows can be saved. */
static int layout_of(const struct tv_sched *sched, struct tv_snapshot_layout *ret_layout)
{
    struct tv_engine_facts facts;
    tv_engine_facts(sched->engine, &facts);
    memset(ret_layout, 0, sizeof *ret_layout);
    if (facts.pages == NULL || sched->engine->ops->context_seq == NULL) {
        return -ENOTSUP;
    }
    memcpy(ret_layout->model_id, facts.model_id, sizeof ret_layout->model_id);
    ret_layout->layers = facts.pages->layers;
    ret_layout->page_size = facts.pages->page_size;
    ret_layout->row_dim = facts.pages->row_dim;
    ret_layout->element = facts.pages->dtype == TV_BF16;
    ret_layout->vocab = sched->engine->vocab;
    (void)snprintf(ret_layout->maker, sizeof ret_layout->maker, "%s %s %s", TV_VERSION,
                   facts.backend, facts.variant); /* a long one is told by what fits */
    return 0;
}

/* The log names sessions up to a number, and then how many more there are. */
struct naming {
    int32_t count;
};

static void name_lost(struct naming *naming, const char *what, const char *id, int32_t len,
                      const char *why)
{
    if (naming->count++ < NAMED_MAX) {
        tv_log(TV_LOG_WARNING, "session %s of %d tokens is not %s: %s", id[0] != '\0' ? id : "?",
               len, what, why);
    }
}

static void naming_end(const struct naming *naming, const char *what)
{
    if (naming->count > NAMED_MAX) {
        tv_log(TV_LOG_WARNING, "%d more sessions are not %s", naming->count - NAMED_MAX, what);
    }
}

/* A save under way. */
struct saving {
    struct tv_sched *sched;
    struct tv_snapshot_file file;
    struct tv_sha256 heads;
    size_t page_bytes;
    int64_t bytes_max, deadline_us;
    int64_t pages_total; /* of the pool */
    int64_t *numbers;    /* [pages_total]: of a page in the file; -1: it is not there; owned */
    void *page;          /* [page_bytes], owned */
    int64_t page_count;
    uint32_t session_count;
    int over; /* nothing more can be written */
    struct naming naming;
};

static int later_first(const void *a, const void *b)
{
    const struct tv_session *const *one = a, *const *other = b;
    int64_t x = (*one)->idle_us, y = (*other)->idle_us;
    return x < y ? 1 : x > y ? -1 : 0;
}

/* Those whose lease is not over: malloc'd, or NULL: none, or no memory for the list. */
static struct tv_session **candidates(const struct tv_sessions *table, int32_t *ret_count)
{
    int64_t now_us = tv_clock_us();
    struct tv_session **list = NULL;
    int32_t count = 0;
    *ret_count = 0;
    if (table->count > 0) {
        list = calloc((size_t)table->count, sizeof(struct tv_session *));
    }
    if (list == NULL) {
        return NULL;
    }
    for (size_t i = 0; i < table->bucket_count; i++) {
        for (struct tv_session *one = table->buckets[i]; one != NULL; one = one->next) {
            if (now_us < one->lease_expires_us && count < table->count) {
                list[count++] = one;
            }
        }
    }
    qsort(list, (size_t)count, sizeof(struct tv_session *), later_first);
    *ret_count = count;
    return list;
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
        if (tv_clock_us() >= saving->deadline_us) {
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

/* 1: so many more bytes, and the end behind them, are within the limit. */
static int fits(const struct saving *saving, size_t body, int32_t pages)
{
    uint64_t at = saving->file.at + 2 * TV_SNAPSHOT_HEAD_BYTES + body, more;
    return !__builtin_mul_overflow((uint64_t)saving->page_bytes + 32, (uint64_t)pages, &more) &&
           more <= (uint64_t)saving->bytes_max && at <= (uint64_t)saving->bytes_max - more;
}

/* Head, body and pages. 0, -EOVERFLOW, -ETIME, or what failed. */
static int session_write(struct saving *saving, const struct tv_session *session,
                         const struct tv_cache_seq *seq, const struct tv_snapshot_pages *pages,
                         int32_t fresh)
{
    struct tv_snapshot_bytes body;
    struct tv_sha256 heads = saving->heads;
    uint8_t head[TV_SNAPSHOT_HEAD_BYTES];
    tv_snapshot_write_body(session, pages, &body);
    int rc = body.failed ? -ENOMEM
             : body.bytes > TV_SNAPSHOT_BODY_BYTES_MAX || !fits(saving, body.bytes, fresh)
                 ? -EOVERFLOW
                 : 0;
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
    switch (rc) {
    case -EOVERFLOW:
        return "it does not fit into snapshot_bytes";
    case -ETIME:
        return "the time of the stop is used up";
    case -ENODATA:
        return "its rows are not those of its tokens";
    default:
        return strerror(-rc);
    }
}

static void session_save(struct saving *saving, const struct tv_session *session)
{
    const struct tv_engine_ops *ops = saving->sched->engine->ops;
    const struct tv_cache_seq *seq =
        session->context != NULL ? ops->context_seq(session->context) : NULL;
    struct tv_snapshot_pages pages = {0};
    int32_t page = saving->sched->table.params.page_size;
    int32_t count = session->len / page + (session->len % page != 0);
    uint64_t at = saving->file.at;
    int rc = saving->over ? saving->over : 0;
    if (rc == 0 && (seq == NULL || seq->len != session->len || seq->page_count < count ||
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
        /* another, smaller one may still fit; what the time or the disk ends is over for all */
        if (rc != 0 && (rc != -EOVERFLOW || cut != 0)) {
            saving->over = rc;
        }
        if (cut != 0) {
            tv_snapshot_file_abandon(&saving->file);
        }
    }
    tv_snapshot_pages_finish(&pages);
    if (rc != 0) {
        name_lost(&saving->naming, "kept", session->id, session->len, why_not(rc));
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

static int saving_end(struct saving *saving)
{
    uint8_t head[TV_SNAPSHOT_HEAD_BYTES];
    if (saving->session_count == 0 || saving->file.fd < 0) {
        tv_snapshot_file_abandon(&saving->file);
        return saving->over;
    }
    tv_snapshot_write_end(saving->session_count, (uint64_t)saving->page_count, &saving->heads,
                          head);
    int rc = tv_snapshot_file_append(&saving->file, head, sizeof head);
    if (rc != 0) {
        tv_snapshot_file_abandon(&saving->file);
        return rc;
    }
    return tv_snapshot_file_finish(&saving->file);
}

void tv_sched_save(struct tv_sched *sched, int64_t deadline_us)
{
    struct tv_snapshot_layout layout;
    struct saving saving = {.sched = sched,
                            .file = {.dir = -1, .fd = -1},
                            .bytes_max = sched->config->snapshot_bytes,
                            .deadline_us = deadline_us};
    int64_t start_us = tv_clock_us();
    int32_t count = 0;
    if (sched->snapshot_dir < 0 || sched->lost || layout_of(sched, &layout) != 0) {
        return;
    }
    struct tv_session **list = candidates(&sched->table, &count);
    if (count == 0) {
        free(list);
        return;
    }
    saving.page_bytes = tv_snapshot_page_bytes(&layout);
    int rc = saving_start(&saving, &layout);
    saving.over = rc;
    for (int32_t i = 0; i < count; i++) {
        session_save(&saving, list[i]);
    }
    naming_end(&saving.naming, "kept");
    if (rc == 0) {
        rc = saving_end(&saving);
    }
    if (rc == 0) {
        tv_log(TV_LOG_INFO,
               "%u sessions are kept for the next start: %lld pages, %lld KiB, %lld ms",
               saving.session_count, (long long)saving.page_count,
               (long long)(saving.file.at >> 10), (long long)(tv_clock_us() - start_us) / 1000);
    } else {
        tv_snapshot_file_abandon(&saving.file);
        tv_log(TV_LOG_ERROR, "no session is kept for the next start: %s", why_not(rc));
    }
    free(list);
    free(saving.numbers);
    free(saving.page);
}

/* A restore under way. */
struct restoring {
    struct tv_sched *sched;
    struct tv_snapshot_reader reader;
    int64_t started_unix_ms;
    int32_t *places; /* [reader.page_count]: pages of the pool; -1: not there; owned */
    void *page;      /* [page_bytes], owned */
    void (*moved)(void *context);
    void *moved_context;
    int32_t restored, damaged;
    struct naming naming;
};

/* The pages of a new context that are not in the pool yet. 0 or what failed. */
static int pages_fill(const struct restoring *restoring, const struct tv_cache_seq *seq,
                      const struct tv_snapshot_pages *pages, const int32_t *places)
{
    struct tv_engine *engine = restoring->sched->engine;
    int rc = 0;
    for (int32_t i = 0; rc == 0 && i < pages->count; i++) {
        if (places[i] >= 0) {
            continue; /* another session's too, and there */
        }
        rc = tv_snapshot_page(&restoring->reader, pages->numbers[i], restoring->page);
        if (rc == 0) {
            rc = engine->ops->page_write(engine, seq->pages[i], restoring->page);
        }
        restoring->moved(restoring->moved_context);
    }
    return rc;
}

/* A context with the session's rows. 0, or what failed, which *ret_why may say better. */
static int context_make(struct restoring *restoring, struct tv_session *session,
                        const struct tv_snapshot_pages *pages, char *ret_why, size_t why_bytes)
{
    struct tv_engine *engine = restoring->sched->engine;
    struct tv_cache_shortage shortage = {0};
    struct tv_context *context = NULL;
    int32_t *places = malloc((size_t)pages->count * sizeof *places);
    if (places == NULL) {
        return -ENOMEM;
    }
    for (int32_t i = 0; i < pages->count; i++) {
        places[i] = restoring->places[pages->numbers[i]];
    }
    const struct tv_cache_seq like = {.pages = places,
                                      .page_count = pages->count,
                                      .len = session->len,
                                      .exact = restoring->reader.same_maker ? pages->exact : 0};
    int rc = engine->ops->restore(engine, &like, &context, &shortage);
    if (rc == -ENOSPC) {
        (void)snprintf(ret_why, why_bytes, "%lld pages are needed, %lld are free",
                       (long long)shortage.pages_needed, (long long)shortage.pages_free);
    }
    if (rc == 0) {
        const struct tv_cache_seq *seq = engine->ops->context_seq(context);
        rc = pages_fill(restoring, seq, pages, places);
        if (rc == 0) {
            session->context = context;
            rc = tv_sessions_restore(&restoring->sched->table, session,
                                     session->lease_expires_unix_ms - restoring->started_unix_ms,
                                     tv_clock_us());
        }
        for (int32_t i = 0; rc == 0 && i < pages->count; i++) {
            restoring->places[pages->numbers[i]] = seq->pages[i];
        }
    }
    if (rc != 0 && context != NULL) {
        engine->ops->context_close(engine, context);
        session->context = NULL;
    }
    free(places);
    return rc;
}

/* NULL, or why it is not restored. */
static const char *session_restore(struct restoring *restoring, struct tv_session *session,
                                   const struct tv_snapshot_pages *pages, char *why,
                                   size_t why_bytes)
{
    const struct tv_sessions *table = &restoring->sched->table;
    why[0] = '\0';
    if (session->lease_expires_unix_ms <= restoring->started_unix_ms) {
        return "its lease was over before this start";
    }
    if (table->count >= table->params.sessions_max) {
        return "max_sessions are open";
    }
    int rc = context_make(restoring, session, pages, why, why_bytes);
    restoring->damaged += rc == -EBADMSG;
    if (rc == 0 || why[0] != '\0') {
        return rc == 0 ? NULL : why;
    }
    return rc == -EBADMSG  ? "a page of it is damaged"
           : rc == -EEXIST ? "another one has its id"
                           : strerror(-rc);
}

/* Prompts of later calls find the pages that sessions brought along. */
static void pages_publish(struct tv_sched *sched)
{
    struct tv_sessions *table = &sched->table;
    for (size_t i = 0; i < table->bucket_count; i++) {
        for (struct tv_session *one = table->buckets[i]; one != NULL; one = one->next) {
            if (one->restored) {
                tv_sched_prefix_offer(sched, one);
            }
        }
    }
}

static void sessions_read(struct restoring *restoring)
{
    struct tv_sched *sched = restoring->sched;
    struct tv_snapshot_pages pages;
    struct tv_session *session = NULL;
    char id[32], why[120];
    int rc;
    while ((rc = tv_snapshot_next(&restoring->reader, &sched->table, sched->engine->vocab, &session,
                                  &pages, id, why, sizeof why)) != 0) {
        const char *wrong = why;
        int32_t len = 0;
        if (rc == 1) {
            len = session->len;
            wrong = session_restore(restoring, session, &pages, why, sizeof why);
            tv_snapshot_pages_finish(&pages);
        } else {
            restoring->damaged++;
        }
        if (wrong == NULL) {
            restoring->restored++;
            continue;
        }
        name_lost(&restoring->naming, "restored", id, len, wrong);
        if (rc == 1) {
            tv_session_destroy(session);
        }
    }
    naming_end(&restoring->naming, "restored");
}

/* 0; or why nothing of it was read, in *error. */
static int file_read(struct restoring *restoring, const struct tv_snapshot_source *source,
                     char *error, size_t error_bytes)
{
    struct tv_snapshot_layout layout;
    (void)layout_of(restoring->sched, &layout); /* which was asked before */
    int rc = tv_snapshot_open(source, &layout, &restoring->reader, error, error_bytes);
    if (rc == 0) {
        size_t count = (size_t)restoring->reader.page_count;
        restoring->places = malloc((count + 1) * sizeof *restoring->places);
        restoring->page = malloc(restoring->reader.page_bytes);
        if (restoring->places == NULL || restoring->page == NULL) {
            (void)snprintf(error, error_bytes, "no memory to read it");
            rc = -ENOMEM;
        }
        for (size_t i = 0; rc == 0 && i < count; i++) {
            restoring->places[i] = -1;
        }
    }
    if (rc == 0) {
        sessions_read(restoring);
        pages_publish(restoring->sched);
    }
    tv_snapshot_close(&restoring->reader);
    free(restoring->places);
    free(restoring->page);
    return rc;
}

static void not_at_all(void *context)
{
    (void)context; /* nobody waits for it */
}

/* The folder, when snapshots can be had here. */
static int dir_take(struct tv_sched *sched, const char *dir)
{
    struct tv_snapshot_layout layout;
    if (dir == NULL || dir[0] == '\0' || sched->config->snapshot_bytes == 0 ||
        layout_of(sched, &layout) != 0 || tv_snapshot_page_bytes(&layout) == 0) {
        return -ENOTSUP;
    }
    int rc = tv_snapshot_dir_open(dir, &sched->snapshot_dir);
    if (rc != 0) {
        tv_log(TV_LOG_WARNING, "state_dir %s: %s; sessions end with this process", dir,
               rc == -EWOULDBLOCK ? "another process keeps its sessions there" : strerror(-rc));
    }
    return rc;
}

void tv_sched_restore(struct tv_sched *sched, const char *dir, int64_t started_unix_ms,
                      void (*moved)(void *context), void *moved_context)
{
    struct restoring restoring = {.sched = sched,
                                  .started_unix_ms = started_unix_ms,
                                  .moved = moved != NULL ? moved : not_at_all,
                                  .moved_context = moved_context};
    struct tv_snapshot_file file;
    struct tv_snapshot_source source;
    char error[200] = "";
    int64_t start_us = tv_clock_us();
    if (dir_take(sched, dir) != 0) {
        return;
    }
    int rc = tv_snapshot_file_open(sched->snapshot_dir, &file, &source, error, sizeof error);
    if (rc == 0) {
        tv_sched_lock(sched); /* the worker has nothing to do, and waits meanwhile */
        rc = file_read(&restoring, &source, error, sizeof error);
        sched->restore_lost = restoring.naming.count;
        tv_sched_unlock(sched);
        tv_snapshot_file_close(&file, rc != 0 || restoring.damaged > 0);
    } else if (error[0] == '\0') {
        (void)snprintf(error, sizeof error, "%s", strerror(-rc));
    }
    if (rc == 0) {
        tv_log(TV_LOG_INFO, "%d sessions of the last process are restored, %d are not; %lld ms",
               restoring.restored, restoring.naming.count,
               (long long)(tv_clock_us() - start_us) / 1000);
    } else if (rc != -ENOENT) {
        tv_log(TV_LOG_ERROR,
               "the sessions of the last process are lost: %s; their file is kept as "
               "sessions.snapshot.refused",
               error);
    }
}

void tv_sched_snapshot_finish(struct tv_sched *sched)
{
    if (sched->snapshot_dir >= 0) {
        (void)close(sched->snapshot_dir); /* and unlocked; it was only read */
        sched->snapshot_dir = -1;
    }
}
