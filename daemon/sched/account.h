/*
 * account.h - what the scheduler knows of a principal: how much of the device it had, and its
 * limits.
 *
 * Private to sched/. Everything is guarded by the scheduler's lock. Accounts live as long as the
 * scheduler: there are as many as keys, and one for open loopback.
 */
#ifndef TV_SCHED_ACCOUNT_H
#define TV_SCHED_ACCOUNT_H

#include <stdint.h>

#include "proto/status.h"

struct job;
struct tv_sched;
struct tv_session;

/* A principal that has called within this time counts when the queue is shared out. */
#define TV_SCHED_ACTIVE_US 10000000
/* Rejected nodes are forgotten with this half-life ... */
#define TV_SCHED_REJECT_HALF_US 10000000
/* ... and the share of rejected ones is judged from so many remembered nodes on. */
#define TV_SCHED_REJECT_NODES 4096

struct tv_account {
    struct tv_account *next;
    char principal[33];
    int64_t seen_us;
    int64_t served; /* rows it had, as a virtual time: who has least comes first */

    double nodes_left; /* token bucket of principal_nodes_s; below 0: a debt */
    int64_t nodes_us;
    double drafted, rejected; /* nodes, each halved every TV_SCHED_REJECT_HALF_US */
    int64_t drafted_us;
};

/* The principal's account, made at its first call; NULL: no memory. */
struct tv_account *tv_sched_account_of(struct tv_sched *sched, const char *principal,
                                       int64_t now_us);
/* May this job's principal have it queued? Charges its nodes. 0, or -EINVAL with *problem. */
int tv_sched_account_admit(struct tv_sched *sched, struct job *job, int64_t now_us,
                           struct tv_problem *problem);
/* The job was never started: its nodes go back. */
void tv_sched_account_refund(struct job *job);
/* A verified tree had so many draft nodes, and so many of them were accepted. */
void tv_sched_account_judge(struct tv_account *account, int32_t drafted, int32_t accepted,
                            int64_t now_us);
/* The session has ended. Drafts that it still held are its principal's, and nobody wanted them. */
void tv_sched_account_unsettled(struct tv_sched *sched, const struct tv_session *session,
                                int64_t now_us);
void tv_sched_accounts_free(struct tv_sched *sched);

#endif
