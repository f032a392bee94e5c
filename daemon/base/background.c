/*
 * background.c - threads whose work may wait.
 */
#include "base/background.h"

#include <sched.h>

void tv_thread_background(void)
{
    const struct sched_param param = {.sched_priority = 0};
    (void)sched_setscheduler(0, SCHED_IDLE, &param); /* slower without, and right all the same */
}
