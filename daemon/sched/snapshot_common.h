/*
 * snapshot_common.h - private to snapshot.c and restore.c.
 */
#ifndef TV_SCHED_SNAPSHOT_COMMON_H
#define TV_SCHED_SNAPSHOT_COMMON_H

#include <stdint.h>

#include "sched/job.h"

#define TV_SCHED_NAMED_MAX 64 /* sessions that the log names one by one */

/* 0: this engine's rows can be saved. */
int tv_sched_snapshot_layout(const struct tv_sched *sched, struct tv_snapshot_layout *ret_layout);

/* Sessions that are not `what`: "kept" or "restored". */
struct tv_sched_naming {
    const char *what;
    int32_t count;
    int32_t more_count, more_bytes; /* of the line under way */
    char more[800];
};
/* len 0: it is not known. */
void tv_sched_name_lost(struct tv_sched_naming *naming, const char *id, int32_t len,
                        const char *why);
/* What is not said yet. */
void tv_sched_name_end(struct tv_sched_naming *naming);

#endif
