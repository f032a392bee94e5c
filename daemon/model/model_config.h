/*
 * model_config.h - config.json to struct tv_model_config, and the rope tables that follow from it.
 */
#ifndef TV_MODEL_MODEL_CONFIG_H
#define TV_MODEL_MODEL_CONFIG_H

#include "model/config_read.h"
#include "model/model.h"

/* -EBADMSG with *ret_error naming the field that cannot be served exactly. */
int tv_model_config_read(const struct tv_json *doc, struct tv_model_config *ret_config,
                         struct tv_model_error *ret_error);
/* The rope part of it: rope_theta with rope_scaling, or rope_parameters. */
void tv_model_rope_read(struct tv_config_read *read, struct tv_model_config *config);
/* cos and sin [positions, 2, rope_dim / 2] of the positions from 0. */
void tv_model_rope_table(const struct tv_model_config *config, int32_t positions, float *cos_sin);

#endif
