/*
 * background.c - threads whose work may wait.
 *
 * A nice value and not SCHED_IDLE: these threads take locks that live rounds take too, and an idle
 * thread that loses a busy processor inside one gives it back only when nobody else runs.
 */
#include "base/background.h"

#include <sys/resource.h>
#include <unistd.h>

#define BACKGROUND_NICE 10 /* a tenth of what an ordinary thread gets beside it */

void tv_thread_background(void)
{
    /* on Linux the value is a thread's own; slower without, and right all the same */
    (void)setpriority(PRIO_PROCESS, (id_t)gettid(), BACKGROUND_NICE);
}
