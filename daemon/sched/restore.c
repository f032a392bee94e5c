/*
 * restore.c - sessions that the last process left come back before the first call, and their
 * clients are told where they are.
 *
 * Refuses a session alone, and names it: one that is damaged, late, or has no room here. Refuses to
 * lose any to a start that is told to end.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/log.h"
#include "sched/snapshot_common.h"

/* A restore under way. */
struct restoring {
    struct tv_sched *sched;
    struct tv_snapshot_reader reader;
    int64_t started_unix_ms;
    int32_t *places; /* [reader.page_count]: pages of the pool; -1: not there; owned */
    void *page;      /* [page_bytes], owned */
    int (*moved)(void *context);
    void *moved_context;
    int given_up; /* the start is to end */
    int32_t restored, damaged;
    struct tv_sched_naming naming;
};

static int give_up(struct restoring *restoring)
{
    restoring->given_up = restoring->given_up || restoring->moved(restoring->moved_context);
    return restoring->given_up;
}

/* The pages of a new context that are not in the pool yet. 0 or what failed. */
static int pages_fill(struct restoring *restoring, const struct tv_cache_seq *seq,
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
        if (give_up(restoring)) {
            return -ECANCELED;
        }
    }
    return rc;
}

/* Of the session's pages, those that others may share: rows of a held round are its alone, and so
 * is the page that they begin in. */
static int32_t shareable(const struct tv_session *session)
{
    int32_t page = session->table->params.page_size;
    int waits = tv_session_rows(session) > session->len;
    return session->len / page + (!waits && session->len % page != 0);
}

/* A context with the session's rows. 0, or what failed, which *ret_why may say better. */
static int context_make(struct restoring *restoring, struct tv_session *session,
                        const struct tv_snapshot_pages *pages, char *ret_why, size_t why_bytes)
{
    struct tv_engine *engine = restoring->sched->engine;
    struct tv_cache_shortage shortage = {0};
    struct tv_context *context = NULL;
    int32_t page = session->table->params.page_size, shared = shareable(session);
    int32_t *places = malloc((size_t)pages->count * sizeof *places);
    if (places == NULL) {
        return -ENOMEM;
    }
    for (int32_t i = 0; i < pages->count; i++) {
        places[i] = i < shared ? restoring->places[pages->numbers[i]] : -1;
    }
    const struct tv_cache_seq like = {.pages = places,
                                      .page_count =
                                          session->len / page + (session->len % page != 0),
                                      .len = session->len,
                                      .scratch = tv_session_rows(session) - session->len,
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
        for (int32_t i = 0; rc == 0 && i < shared; i++) {
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
static const char *session_restore(struct restoring *restoring, struct tv_snapshot_item *item,
                                   char *why, size_t why_bytes)
{
    struct tv_sessions *table = &restoring->sched->table;
    struct tv_session *session = item->session;
    why[0] = '\0';
    if (session->lease_expires_unix_ms <= restoring->started_unix_ms) {
        return "its lease was over before this start";
    }
    if (table->count >= table->params.sessions_max) {
        return "max_sessions are open";
    }
    int rc = context_make(restoring, session, &item->pages, why, why_bytes);
    restoring->damaged += rc == -EBADMSG;
    if (rc == 0) {
        item->session = NULL; /* the table has it */
        if (item->key.key[0] != '\0') {
            tv_session_key_restore(table, session, &item->key, tv_clock_us());
        }
    }
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
    struct tv_snapshot_item item;
    char why[120];
    int32_t seen = 0;
    int rc;
    while (!give_up(restoring) &&
           (rc = tv_snapshot_next(&restoring->reader, &sched->table, sched->engine->vocab, &item,
                                  why, sizeof why)) != 0) {
        seen++;
        const char *wrong = why;
        int32_t len = 0;
        if (rc == 1) {
            len = item.session->len;
            wrong = session_restore(restoring, &item, why, sizeof why);
        } else {
            restoring->damaged++;
        }
        if (wrong == NULL) {
            restoring->restored++;
        } else if (!restoring->given_up) {
            tv_sched_name_lost(&restoring->naming, item.id, len, wrong);
        }
        tv_snapshot_item_finish(&item);
    }
    tv_sched_name_end(&restoring->naming);
    int32_t left = (int32_t)restoring->reader.session_count - seen;
    if (left > 0 && !restoring->given_up) { /* a head that could be read at first cannot any more */
        tv_log(TV_LOG_WARNING, "%d sessions are not restored: the rest of the file cannot be read",
               left);
        restoring->naming.count += left;
        restoring->damaged += left;
    }
}

/* 0; or why nothing of it was read, in *error. */
static int file_read(struct restoring *restoring, const struct tv_snapshot_source *source,
                     char *error, size_t error_bytes)
{
    struct tv_snapshot_layout layout;
    (void)tv_sched_snapshot_layout(restoring->sched, &layout); /* which was asked before */
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
        rc = restoring->given_up ? -ECANCELED : 0;
    }
    if (rc == 0) {
        pages_publish(restoring->sched);
    }
    tv_snapshot_close(&restoring->reader);
    free(restoring->places);
    free(restoring->page);
    return rc;
}

static int not_at_all(void *context)
{
    (void)context; /* nobody waits for it */
    return 0;
}

/* The folder, when snapshots can be had here. */
static int dir_take(struct tv_sched *sched, const char *dir)
{
    struct tv_snapshot_layout layout;
    if (dir == NULL || dir[0] == '\0' || sched->config->snapshot_bytes == 0 ||
        tv_sched_snapshot_layout(sched, &layout) != 0 || tv_snapshot_page_bytes(&layout) == 0) {
        return -ENOTSUP;
    }
    int rc = tv_snapshot_dir_open(dir, &sched->snapshot_dir);
    if (rc != 0) {
        tv_log(TV_LOG_WARNING, "state_dir %s: %s; sessions end with this process", dir,
               rc == -EWOULDBLOCK ? "another process keeps its sessions there" : strerror(-rc));
    }
    return rc;
}

int tv_sched_restore(struct tv_sched *sched, const char *dir, int64_t started_unix_ms,
                     int (*moved)(void *context), void *moved_context)
{
    struct restoring restoring = {.sched = sched,
                                  .started_unix_ms = started_unix_ms,
                                  .moved = moved != NULL ? moved : not_at_all,
                                  .moved_context = moved_context,
                                  .naming = {.what = "restored"}};
    struct tv_snapshot_file file;
    struct tv_snapshot_source source;
    char error[200] = "";
    int64_t start_us = tv_clock_us();
    int aside = 0;
    if (dir_take(sched, dir) != 0) {
        return 0;
    }
    int rc = tv_snapshot_file_open(sched->snapshot_dir, &file, &source, error, sizeof error);
    if (rc == 0) {
        tv_sched_lock(sched); /* the worker has nothing to do, and waits meanwhile */
        rc = file_read(&restoring, &source, error, sizeof error);
        sched->restore_lost = restoring.naming.count;
        tv_sched_unlock(sched);
        if (rc == -ECANCELED) {
            tv_snapshot_file_put_back(&file, source.is_cut);
            tv_log(TV_LOG_INFO, "the start is to end: the sessions of the last process stay where "
                                "they are");
            return rc;
        }
        tv_snapshot_file_close(&file, rc != 0 || restoring.damaged > 0);
        aside = 1;
    } else {
        aside = rc == -EPERM;
    }
    if (rc == 0 && source.is_cut) {
        tv_log(TV_LOG_WARNING, "the last process was ended while it wrote its sessions; those that "
                               "it had not come to are lost");
    }
    if (rc == 0) {
        tv_log(TV_LOG_INFO, "%d sessions of the last process are restored, %d are not; %lld ms",
               restoring.restored, restoring.naming.count,
               (long long)(tv_clock_us() - start_us) / 1000);
    } else if (rc != -ENOENT) {
        tv_log(TV_LOG_ERROR, "the sessions of the last process are lost: %s%s", error,
               aside ? "; their file is kept as sessions.snapshot.refused" : "");
    }
    return 0;
}

/* The client's own session was restored under this epoch: tell it where that is. */
static void explain_restored(struct tv_sched *sched, const struct tv_call *call,
                             struct tv_problem *problem)
{
    const struct tv_request *request = &call->request;
    struct tv_session *session = NULL;
    if (tv_sessions_find(&sched->table, request->session, call->principal, tv_clock_us(),
                         &session) != TV_OK ||
        !session->restored) {
        return;
    }
    int believes = request->kind == TV_CALL_VERIFY || request->kind == TV_CALL_EXTEND ||
                   request->kind == TV_CALL_DECODE || request->kind == TV_CALL_ROLLBACK;
    int32_t from = believes && !request->len_implied ? request->expected_len : session->len;
    tv_session_explain(session, from, problem);
}

int tv_sched_epoch_judge(struct tv_sched *sched, const struct tv_call *call,
                         struct tv_problem *problem)
{
    const struct tv_request *request = &call->request;
    if (request->epoch[0] == '\0' || strcmp(request->epoch, sched->table.epoch) == 0) {
        return 0;
    }
    tv_problem_set(problem, TV_EPOCH_CHANGED, "/epoch",
                   "the server has started anew: its epoch is %s", sched->table.epoch);
    explain_restored(sched, call, problem);
    return -EINVAL;
}

void tv_sched_snapshot_finish(struct tv_sched *sched)
{
    if (sched->snapshot_dir >= 0) {
        (void)close(sched->snapshot_dir); /* and unlocked; it was only read */
        sched->snapshot_dir = -1;
    }
}
