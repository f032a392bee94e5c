/*
 * lost.c - a device that is lost: nothing starts any more, and who can end the process is told.
 *
 * Owns the state from the first engine call that says so until the end. Refuses to try again: a
 * process that has lost its device answers everything wrong or not at all.
 */
#include <errno.h>

#include "base/log.h"
#include "sched/job.h"

void tv_sched_lost_note(struct tv_sched *sched, int rc)
{
    void (*tell)(void *context) = NULL;
    if (rc != -ENOTRECOVERABLE) {
        return;
    }
    tv_sched_lock(sched);
    int first = !sched->lost;
    sched->lost = 1;
    /* relaxed: as where drain sets it */
    atomic_store_explicit(&sched->parity_stop, 1, memory_order_relaxed);
    tell = first ? sched->lost_tell : NULL;
    void *context = sched->lost_context;
    tv_sched_unlock(sched);
    if (first) {
        tv_log(TV_LOG_ERROR, "the device is lost: what waits and what runs is refused; only a new "
                             "process can use it");
    }
    if (tell != NULL) {
        tell(context);
    }
}

void tv_sched_lost_watch(struct tv_sched *sched, void (*tell)(void *context), void *context)
{
    tv_sched_lock(sched);
    sched->lost_tell = tell;
    sched->lost_context = context;
    tv_sched_unlock(sched);
}

int tv_sched_is_lost(struct tv_sched *sched)
{
    tv_sched_lock(sched);
    int lost = sched->lost;
    tv_sched_unlock(sched);
    return lost;
}

void tv_sched_gpu_tell(struct tv_sched *sched, const struct tv_sched_gpu *gpu)
{
    tv_sched_lock(sched);
    sched->gpu = *gpu;
    tv_sched_unlock(sched);
}

enum tv_code tv_sched_end_code(const struct tv_sched *sched)
{
    return sched->lost ? TV_KERNEL_FAULT : TV_DRAINING;
}

const char *tv_sched_end_text(const struct tv_sched *sched)
{
    return sched->lost ? "the device is lost; the server ends" : "the server is going away";
}
