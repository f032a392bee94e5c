/*
 * refuse.h - how a checkpoint is refused: one sentence, -EBADMSG.
 */
#ifndef TV_MODEL_REFUSE_H
#define TV_MODEL_REFUSE_H

#include "model/model.h"

/* Write the sentence and return -EBADMSG. Names from files are bounded by the caller's format. */
int tv_model_refuse(struct tv_model_error *error, const char *format, ...)
    __attribute__((format(printf, 2, 3)));

#endif
