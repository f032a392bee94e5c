/*
 * fixed_source.c - treeverifyd-fixed: the daemon's own main with an engine of fixed answers.
 *
 * Owns a line protocol on stdin, for tests that need a round to last or to fail: "hold", "hold
 * moves" (of rows that are settled, cut or forked, for good), "release", "stat", "slow
 * MICROSECONDS", "lose". stat answers on stdout; every other line ends the reading, as the end of
 * the input does. The last line on stdout is "end commits N".
 * No tokens of prompts ride in its launches (rider_rows 0): a prompt is one slice of no time here,
 * and tests that hold or count launches mean those of rounds alone. Launches that take some along
 * are the business of test_sched_share.c, test_verify_shared.c and tests/parity/shared.py.
 */
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "fixed_engine.h"
#include "main.h"

#define FIXED_VOCAB        512
#define FIXED_MAX_LEN      1000000
#define FIXED_REQUESTS     8
#define FIXED_PREFILL_ROWS 65536

/* The engine until it is closed; the reader of stdin outlives it. */
static pthread_mutex_t control_lock = PTHREAD_MUTEX_INITIALIZER;
static struct tv_engine *controlled;

/* 0; -EINVAL: no such command. */
static int control_run(struct tv_engine *engine, const char *line)
{
    if (strcmp(line, "hold\n") == 0) {
        tv_fixed_engine_hold(engine, 1);
    } else if (strcmp(line, "hold moves\n") == 0) {
        tv_fixed_engine_hold_moves(engine, 1);
    } else if (strcmp(line, "release\n") == 0) {
        tv_fixed_engine_hold(engine, 0);
    } else if (strncmp(line, "slow ", 5) == 0) {
        tv_fixed_engine_slow(engine, strtoll(line + 5, NULL, 10));
    } else if (strcmp(line, "lose\n") == 0) {
        tv_fixed_engine_lose(engine);
    } else if (strcmp(line, "stat\n") == 0) {
        (void)printf("launches %lld contexts %d\n", (long long)tv_fixed_engine_launches(engine),
                     tv_fixed_engine_contexts(engine));
        (void)fflush(stdout); /* a test that reads nothing fails by itself */
    } else {
        return -EINVAL;
    }
    return 0;
}

/* One line with its end. Not through stdin: a reader that waits holds its lock, and the exit of
 * glibc from 2.38 on waits for that. -EIO: no line came. */
static int control_read(char *line, size_t bytes)
{
    size_t used = 0;
    while (used + 1 < bytes && (used == 0 || line[used - 1] != '\n')) {
        ssize_t got = read(STDIN_FILENO, line + used, 1);
        if (got < 0 && errno == EINTR) {
            continue;
        }
        if (got <= 0) {
            return -EIO;
        }
        used++;
    }
    line[used] = '\0';
    return 0;
}

static void *control_main(void *context)
{
    char line[32];
    int rc = 0;
    (void)context; /* controlled, once the lock says that it lives */
    while (rc == 0 && control_read(line, sizeof line) == 0) {
        (void)pthread_mutex_lock(&control_lock);
        rc = controlled == NULL ? -EINVAL : control_run(controlled, line);
        (void)pthread_mutex_unlock(&control_lock);
    }
    return NULL;
}

int tv_main_engine_open(const struct tv_config *config, struct tv_model_progress *progress,
                        struct tv_engine **ret_engine, char *error, size_t error_bytes)
{
    const struct tv_fixed_engine_params params = {
        .vocab = FIXED_VOCAB,
        .max_len = config->max_len > 0 ? config->max_len : FIXED_MAX_LEN,
        .nodes_max = config->max_nodes,
        .requests_max = FIXED_REQUESTS,
        .prefill_rows = FIXED_PREFILL_ROWS,
    };
    pthread_t control;
    (void)progress; /* nothing is loaded */
    int rc = tv_fixed_engine_create(&params, ret_engine);
    if (rc == 0) {
        controlled = *ret_engine;
        rc = -pthread_create(&control, NULL, control_main, NULL);
        if (rc == 0) {
            (void)pthread_detach(control);
        }
    }
    if (rc != 0) {
        (void)snprintf(error, error_bytes, "fixed engine: %s", strerror(-rc));
        return TV_EXIT_NO_MEMORY;
    }
    return TV_EXIT_DRAINED;
}

int tv_main_gpu_check(const struct tv_config *config, char *ret_text, size_t bytes)
{
    (void)config;
    (void)snprintf(ret_text, bytes, "fixed answers need no GPU");
    return TV_EXIT_NO_DEVICE;
}

void tv_main_engine_close(struct tv_engine *engine)
{
    if (engine != NULL) {
        (void)pthread_mutex_lock(&control_lock);
        controlled = NULL;
        /* the last word of a stop that was in order: did every round reach its client? */
        (void)printf("end commits %lld\n", (long long)tv_fixed_engine_commits(engine));
        (void)fflush(stdout);
        (void)pthread_mutex_unlock(&control_lock);
        engine->ops->destroy(engine);
    }
}
