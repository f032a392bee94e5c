/*
 * context.c - engine calls that are no pass: rows of a context are moved, shared, or given back.
 *
 * A device that hangs does so in these too, so that the time they take without progress counts as
 * that of a pass does (tv_sched_stalled_us). What works on the host alone (open, adopt, publish) is
 * called without this. Refuses to measure them: they say nothing of the device's state or speed.
 */
#include "base/clock.h"
#include "sched/job.h"

/* The worker is in the engine from here on; also inside a slice, which has its own beginning. */
static int64_t watch(struct tv_sched *sched)
{
    int64_t now_us = tv_clock_us();
    tv_sched_lock(sched);
    int64_t outer_us = sched->launch_start_us;
    sched->launch_start_us = outer_us != 0 ? outer_us : now_us;
    sched->progress_us = now_us;
    tv_sched_unlock(sched);
    return outer_us;
}

static void unwatch(struct tv_sched *sched, int64_t outer_us)
{
    int64_t now_us = tv_clock_us();
    tv_sched_lock(sched);
    sched->launch_start_us = outer_us;
    sched->progress_us = now_us;
    tv_sched_unlock(sched);
}

int tv_sched_context_settle(struct tv_sched *sched, struct tv_context *context,
                            const int32_t *nodes, int32_t count)
{
    int64_t outer_us = watch(sched);
    int rc = sched->engine->ops->settle(sched->engine, context, nodes, count);
    unwatch(sched, outer_us);
    return rc;
}

int tv_sched_context_truncate(struct tv_sched *sched, struct tv_context *context, int32_t len)
{
    int64_t outer_us = watch(sched);
    int rc = sched->engine->ops->truncate(sched->engine, context, len);
    unwatch(sched, outer_us);
    return rc;
}

int tv_sched_context_fork(struct tv_sched *sched, const struct tv_context *context, int32_t len,
                          struct tv_context **ret_context)
{
    int64_t outer_us = watch(sched);
    int rc = sched->engine->ops->fork(sched->engine, context, len, ret_context);
    unwatch(sched, outer_us);
    return rc;
}

void tv_sched_context_close(struct tv_sched *sched, struct tv_context *context)
{
    int64_t outer_us = watch(sched);
    sched->engine->ops->context_close(sched->engine, context);
    unwatch(sched, outer_us);
}
