/*
 * idle.c - sessions that nobody uses give their pages to a call that lacks some.
 *
 * After a round a session's pages are its own for idle_pages_s; then a lease is only good as long
 * as there is room, so that leases which nobody uses cannot shut the server. Refuses to close
 * anything for a call that would not have enough even then.
 */
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/log.h"
#include "sched/job.h"

static int64_t pages_of(const struct tv_sched *sched, const struct tv_session *session)
{
    int32_t page = sched->table.params.page_size;
    return (session->len + page - 1) / page;
}

/* May it be closed for others? */
static int is_idle(const struct tv_sched *sched, const struct tv_session *session, int64_t now_us)
{
    int64_t guarantee_us = (int64_t)sched->config->idle_pages_s * 1000000;
    return !session->busy && session->holds == 0 && now_us - session->idle_us >= guarantee_us;
}

/* Pages of all that the principal has, each session's for itself. */
static int64_t pages_sum(const struct tv_sched *sched, const char *principal)
{
    const struct tv_sessions *table = &sched->table;
    int64_t pages = 0;
    for (size_t i = 0; i < table->bucket_count; i++) {
        for (const struct tv_session *one = table->buckets[i]; one != NULL; one = one->next) {
            pages += strcmp(one->principal, principal) == 0 ? pages_of(sched, one) : 0;
        }
    }
    return pages;
}

/* Pages that come free when all that may be closed is: nobody else holds them. What forks share
 * comes once, and with the last of them. */
static int64_t pages_to_come(const struct tv_sched *sched, int64_t now_us)
{
    const struct tv_sessions *table = &sched->table;
    struct tv_cache_counts counts;
    int64_t pages = 0;
    tv_engine_pages(sched->engine, &counts);
    int32_t *held = calloc((size_t)counts.total, sizeof *held);
    for (size_t i = 0; held != NULL && i < table->bucket_count; i++) {
        for (const struct tv_session *one = table->buckets[i]; one != NULL; one = one->next) {
            if (!is_idle(sched, one, now_us)) {
                continue;
            }
            const struct tv_cache_seq *seq = sched->engine->ops->context_seq(one->context);
            for (int32_t k = 0; k < seq->page_count; k++) {
                held[seq->pages[k]]++;
            }
        }
    }
    for (int64_t page = 0; held != NULL && page < counts.total; page++) {
        pages +=
            held[page] > 0 && held[page] == tv_engine_page_holders(sched->engine, (int32_t)page);
    }
    free(held); /* without memory nobody gives anything */
    return pages;
}

/* Of those that may be closed, the one idle for longest of the principal that has most pages. */
static struct tv_session *victim(const struct tv_sched *sched, int64_t now_us)
{
    const struct tv_sessions *table = &sched->table;
    struct tv_session *found = NULL;
    int64_t found_pages = 0;
    for (size_t i = 0; i < table->bucket_count; i++) {
        for (struct tv_session *one = table->buckets[i]; one != NULL; one = one->next) {
            if (!is_idle(sched, one, now_us)) {
                continue;
            }
            int64_t pages = pages_sum(sched, one->principal);
            if (found == NULL || pages > found_pages ||
                (pages == found_pages && one->idle_us < found->idle_us)) {
                found = one;
                found_pages = pages;
            }
        }
    }
    return found;
}

static int64_t pages_free(const struct tv_sched *sched)
{
    struct tv_cache_counts pages;
    tv_engine_pages(sched->engine, &pages);
    return pages.free + pages.cached;
}

int tv_sched_idle_give(struct tv_sched *sched, const struct tv_cache_shortage *shortage)
{
    struct tv_cache_counts pages;
    int64_t now_us = tv_clock_us(), missing = shortage->pages_needed - pages_free(sched);
    int closed = 0;
    tv_engine_pages(sched->engine, &pages);
    if (sched->config->idle_pages_s == 0 || pages.total == 0) { /* or an engine has none */
        return 0;
    }
    tv_sched_lock(sched);
    int enough = pages_to_come(sched, now_us) >= missing;
    while (enough && missing > 0) {
        struct tv_session *session = victim(sched, now_us);
        if (session == NULL) {
            break;
        }
        tv_log_of(TV_LOG_INFO, session->id, NULL,
                  "session %s: closed, idle for %lld s: its pages are needed", session->id,
                  (long long)(now_us - session->idle_us) / 1000000);
        tv_sessions_expire(&sched->table, session);
        sched->idle_closed++;
        closed++;
        struct tv_session *gone = tv_sessions_take_gone(&sched->table);
        tv_sched_unlock(sched);
        tv_sched_bury(sched, gone);
        missing = shortage->pages_needed - pages_free(sched);
        tv_sched_lock(sched);
    }
    tv_sched_unlock(sched);
    return closed > 0;
}
