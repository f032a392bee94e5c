/*
 * config_read.h - fields of config.json with a type, a range and a name in the refusal.
 *
 * The first refusal sticks: later calls do nothing, so that a list of fields reads like one.
 */
#ifndef TV_MODEL_CONFIG_READ_H
#define TV_MODEL_CONFIG_READ_H

#include "model/model.h"
#include "proto/json_read.h"

struct tv_config_read {
    const struct tv_json *doc;
    const struct tv_json_value *object;
    const char *prefix; /* "" or "rope_scaling.", for messages */
    struct tv_model_error *error;
    int err; /* 0, or what the first refusal returned */
};

/* A default that no field can have: the field is required. */
#define TV_CONFIG_REQUIRED INT64_MIN

/* Published checkpoints have 16 at most. */
#define TV_CONFIG_FACTOR_MAX 1e4

/* NULL when absent or null. */
const struct tv_json_value *tv_config_member(const struct tv_config_read *read, const char *name);
/* The field in [min, max], or `absent` when it is absent or null. */
int32_t tv_config_int(struct tv_config_read *read, const char *name, int32_t min, int32_t max,
                      int64_t absent);
int tv_config_flag(struct tv_config_read *read, const char *name, int absent);
/* A number > 0 (>= 0 when zero_ok) within the range of normal f32 values. */
double tv_config_number(struct tv_config_read *read, const char *name, int zero_ok, double absent);
/* Such a number that multiplies activations: at most TV_CONFIG_FACTOR_MAX, so that products of a
 * few stay far inside of f32. */
double tv_config_factor(struct tv_config_read *read, const char *name, int zero_ok, double absent);
/* The document's string, or `absent`. */
const char *tv_config_text(struct tv_config_read *read, const char *name, const char *absent);
void tv_config_refuse(struct tv_config_read *read, const char *name, const char *why);

#endif
