/*
 * model_rope.c - rope fields of config.json, YaRN's factors and the cos / sin tables.
 *
 * cos and sin are multiplied by the ratio of the two mscales, the softmax scale by the square of
 * the mscale of all dims: each factor appears once. Everything is computed in double.
 */
#include "model/model_config.h"

#include <math.h>
#include <string.h>

#define PI 3.14159265358979323846

static double yarn_mscale(double factor, double mscale)
{
    return factor <= 1.0 ? 1.0 : 0.1 * mscale * log(factor) + 1.0;
}

static void yarn_read(struct tv_config_read *rope, struct tv_model_config *config)
{
    config->yarn = 1;
    config->yarn_factor = tv_config_number(rope, "factor", 0, -1.0);
    if (config->yarn_factor < 1.0) {
        tv_config_refuse(rope, "factor", "is missing or below 1");
    }
    config->yarn_beta_fast = tv_config_number(rope, "beta_fast", 0, 32.0);
    config->yarn_beta_slow = tv_config_number(rope, "beta_slow", 0, 1.0);
    config->yarn_mscale = tv_config_factor(rope, "mscale", 1, 0.0);
    config->yarn_mscale_all_dim = tv_config_factor(rope, "mscale_all_dim", 1, 0.0);
    config->yarn_truncate = tv_config_flag(rope, "truncate", 1);
    config->yarn_original_max = tv_config_int(rope, "original_max_position_embeddings", 1,
                                              INT32_MAX / 2, config->max_position);
    double factor = config->yarn_factor;
    double implied = config->yarn_mscale > 0.0 && config->yarn_mscale_all_dim > 0.0
                         ? yarn_mscale(factor, config->yarn_mscale) /
                               yarn_mscale(factor, config->yarn_mscale_all_dim)
                         : yarn_mscale(factor, 1.0);
    config->yarn_attention_factor = tv_config_factor(rope, "attention_factor", 0, 0.0);
    config->rope_attention_factor =
        config->yarn_attention_factor > 0.0 ? config->yarn_attention_factor : implied;
}

/* theta is beside rope_scaling in older files and inside rope_parameters in newer ones. */
static double theta_read(struct tv_config_read *read, struct tv_config_read *rope)
{
    double beside = tv_config_number(read, "rope_theta", 0, -1.0);
    double inside = rope->object == NULL ? -1.0 : tv_config_number(rope, "rope_theta", 0, -1.0);
    if (beside > 0.0 && inside > 0.0 && beside != inside) {
        tv_config_refuse(read, "rope_theta", "is not that of rope_parameters");
    }
    if (inside > 0.0) {
        return inside;
    }
    return beside > 0.0 ? beside : 10000.0;
}

static void rope_type_read(struct tv_config_read *rope, struct tv_model_config *config)
{
    const char *type = tv_config_text(rope, "rope_type", NULL);
    const char *old_type = tv_config_text(rope, "type", type);
    if (type == NULL && old_type == NULL && tv_config_member(rope, "factor") != NULL) {
        tv_config_refuse(rope, "rope_type", "is missing beside a factor");
        return;
    }
    if (type == NULL) {
        type = old_type != NULL ? old_type : "default";
    } else if (strcmp(type, old_type) != 0) {
        tv_config_refuse(rope, "type", "is not rope_type");
    }
    if (strcmp(type, "yarn") == 0) {
        yarn_read(rope, config);
    } else if (strcmp(type, "default") != 0) {
        tv_config_refuse(rope, "rope_type", "is not default or yarn");
    }
    if (tv_config_number(rope, "partial_rotary_factor", 0, 1.0) != 1.0) {
        tv_config_refuse(rope, "partial_rotary_factor", "is not 1");
    }
}

void tv_model_rope_read(struct tv_config_read *read, struct tv_model_config *config)
{
    const struct tv_json_value *scaling = tv_config_member(read, "rope_scaling");
    const struct tv_json_value *parameters = tv_config_member(read, "rope_parameters");
    if (scaling != NULL && parameters != NULL) {
        tv_config_refuse(read, "rope_scaling", "stands beside rope_parameters");
    }
    struct tv_config_read rope = *read;
    rope.object = parameters != NULL ? parameters : scaling;
    rope.prefix = parameters != NULL ? "rope_parameters." : "rope_scaling.";
    if (rope.object != NULL && tv_json_type(rope.object) != TV_JSON_OBJECT) {
        tv_config_refuse(read, parameters != NULL ? "rope_parameters" : "rope_scaling",
                         "is not an object");
        return;
    }
    config->rope_attention_factor = 1.0;
    config->rope_interleave = tv_config_flag(read, "rope_interleave", 1);
    if (!config->rope_interleave && strcmp(config->architecture, "deepseek_v2") == 0) {
        tv_config_refuse(read, "rope_interleave", "is false, which no deepseek_v2 code reads");
    }
    config->rope_theta = theta_read(read, &rope);
    if (rope.object != NULL) {
        rope_type_read(&rope, config);
    }
    if (config->yarn && !(fabs(log(config->rope_theta)) > 0.0)) {
        tv_config_refuse(&rope, "rope_theta", "is 1, for which YaRN has no ramp");
    }
    if (read->err == 0) {
        read->err = rope.err;
    }
    double scale = 1.0 / sqrt((double)(config->nope_dim + config->rope_dim));
    if (config->yarn && config->yarn_mscale_all_dim > 0.0) {
        double mscale = yarn_mscale(config->yarn_factor, config->yarn_mscale_all_dim);
        scale *= mscale * mscale;
    }
    config->softmax_scale = (float)scale;
}

/* The (fractional) pair whose wave makes `rotations` turns over the original length. */
static double yarn_pair(const struct tv_model_config *config, double rotations)
{
    return config->rope_dim * log(config->yarn_original_max / (rotations * 2.0 * PI)) /
           (2.0 * log(config->rope_theta));
}

/* Angle per position of pair i: kept for fast waves, divided by the factor for slow ones. */
static double pair_frequency(const struct tv_model_config *config, int32_t pair)
{
    double base = pow(config->rope_theta, -2.0 * pair / config->rope_dim);
    if (!config->yarn) {
        return base;
    }
    double low = yarn_pair(config, config->yarn_beta_fast);
    double high = yarn_pair(config, config->yarn_beta_slow);
    if (config->yarn_truncate) {
        low = floor(low);
        high = ceil(high);
    }
    low = low < 0.0 ? 0.0 : low;
    high = high > config->rope_dim - 1 ? config->rope_dim - 1 : high;
    if (low == high) {
        high += 0.001;
    }
    double ramp = (pair - low) / (high - low);
    ramp = ramp < 0.0 ? 0.0 : (ramp > 1.0 ? 1.0 : ramp);
    return base / config->yarn_factor * ramp + base * (1.0 - ramp);
}

void tv_model_rope_table(const struct tv_model_config *config, int32_t positions, float *cos_sin)
{
    int32_t half = config->rope_dim / 2;
    for (int32_t pair = 0; pair < half; pair++) {
        double frequency = pair_frequency(config, pair);
        for (int32_t position = 0; position < positions; position++) {
            float *row = cos_sin + (int64_t)position * 2 * half;
            double angle = position * frequency;
            row[pair] = (float)(cos(angle) * config->rope_attention_factor);
            row[half + pair] = (float)(sin(angle) * config->rope_attention_factor);
        }
    }
}
