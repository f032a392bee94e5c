/*
 * refuse.c - the sentence that says why a checkpoint is refused.
 */
#include "model/refuse.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>

int tv_model_refuse(struct tv_model_error *error, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    (void)vsnprintf(error->text, sizeof error->text, format, arguments); /* cut at the bound */
    va_end(arguments);
    return -EBADMSG;
}
