/*
 * background.h - threads whose work may wait.
 */
#ifndef TV_BASE_BACKGROUND_H
#define TV_BASE_BACKGROUND_H

/* The calling thread from now on yields most of a busy processor to the others. Quietly nothing
 * where the system refuses. */
void tv_thread_background(void);

#endif
