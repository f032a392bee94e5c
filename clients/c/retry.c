/*
 * retry.c - when a call that failed is tried again.
 *
 * Owns the rule of the header's "Retries", which is that of the Python client (calls.py there).
 * Sends nothing and waits for nothing.
 */
#include <errno.h>
#include <string.h>

#include "clients/c/internal.h"

#define BACKOFF_MS_MAX 5000
#define ATTEMPT_MS_MIN 5 /* timers end a little early: in less nothing is tried */

/* A number of 0 to 1 (xorshift64). */
static double jitter(struct tv_client_server *server)
{
    server->jitter ^= server->jitter << 13;
    server->jitter ^= server->jitter >> 7;
    server->jitter ^= server->jitter << 17;
    return (double)(server->jitter >> 11) * 0x1p-53;
}

static int64_t grown(struct tv_client *client, int failures)
{
    int64_t longest = tv_client_options_of(client)->backoff_ms;
    for (int i = 1; i < failures && longest < BACKOFF_MS_MAX; i++) {
        longest *= 2;
    }
    if (longest > BACKOFF_MS_MAX) {
        longest = BACKOFF_MS_MAX;
    }
    return (int64_t)((double)longest * (0.5 + 0.5 * jitter(tv_client_server_of(client))));
}

/* Is what was lost worth another attempt at all? */
static int may_help(int error, const struct tv_client_problem *problem)
{
    /* the cause of a kernel-fault is cured by a moment, though the server cannot promise it */
    return error == -EIO || error == -ECONNREFUSED || error == -ETIMEDOUT ||
           (error == -EPROTO && (problem->retryable || strcmp(problem->code, "kernel-fault") == 0));
}

/* Nobody listens where somebody was: until the time for a restart is over. least_ms: of a pause. */
static int64_t pause_of_restart(struct tv_client *client, struct tv_client_failures *failures,
                                int64_t now_ms, int64_t least_ms)
{
    if (failures->refused++ == 0) {
        failures->refused_from_ms = now_ms;
    }
    int64_t left = failures->refused_from_ms + tv_client_options_of(client)->restart_ms - now_ms;
    int64_t pause = grown(client, failures->refused);
    if (left <= 0) {
        return -1;
    }
    pause = pause < least_ms ? least_ms : pause;
    return pause < left ? pause : left; /* the last attempt is made when the time is over */
}

int64_t tv_client_next_pause(struct tv_client *client, int error,
                             struct tv_client_failures *failures, int64_t deadline_ms,
                             const struct tv_client_problem *problem)
{
    const struct tv_client_options *options = tv_client_options_of(client);
    const struct tv_client_server *server = tv_client_server_of(client);
    int64_t now_ms = tv_client_now_us() / 1000;
    int64_t pause;
    if (!may_help(error, problem)) {
        return -1;
    }
    int64_t least_ms = error == -EPROTO ? (int64_t)problem->retry_after_s * 1000 : 0;
    if ((error == -ECONNREFUSED || error == -EPROTO) && server->refused && server->answered &&
        !failures->hasty && options->restart_ms > 0 && options->retries_max > 0) {
        pause = pause_of_restart(client, failures, now_ms, least_ms);
    } else if (failures->counted++ >= options->retries_max) {
        return -1;
    } else {
        pause = grown(client, failures->counted);
        pause = pause < least_ms ? least_ms : pause;
    }
    return now_ms + pause + ATTEMPT_MS_MIN <= deadline_ms ? pause : -1;
}
