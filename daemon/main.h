/*
 * main.h - what main.c needs to be told: where the engine comes from.
 *
 * engine_source.c opens a checkpoint; the tests link main.c with a source of fixed answers instead.
 */
#ifndef TV_MAIN_H
#define TV_MAIN_H

#include <stddef.h>

#include "config/config.h"
#include "model/model.h"
#include "verify/verify.h"

/* Exit codes (proto/README.md, "Exit codes"). */
enum tv_exit {
    TV_EXIT_DRAINED = 0,
    TV_EXIT_USAGE = 64,
    TV_EXIT_CHECKPOINT = 65,
    TV_EXIT_NO_DEVICE = 69,
    TV_EXIT_FAULT = 70,
    TV_EXIT_NO_MEMORY = 71,
    TV_EXIT_CONFIG = 78,
};

/* TV_EXIT_DRAINED (0) with *ret_engine, or the exit code with text. progress may be NULL. */
int tv_main_engine_open(const struct tv_config *config, struct tv_model_progress *progress,
                        struct tv_engine **ret_engine, char *error, size_t error_bytes);
/* The GPU that the cuda backend would use, in words: 0; or the exit code with why there is none. */
int tv_main_gpu_check(const struct tv_config *config, char *ret_text, size_t bytes);
/* After everything that used it has ended. */
void tv_main_engine_close(struct tv_engine *engine);

#endif
