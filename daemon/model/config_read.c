/*
 * config_read.c - typed fields of config.json.
 */
#include "model/config_read.h"

#include <float.h>
#include <string.h>

#include "model/refuse.h"

void tv_config_refuse(struct tv_config_read *read, const char *name, const char *why)
{
    if (read->err == 0) {
        read->err =
            tv_model_refuse(read->error, "config.json: %s%.100s %.200s", read->prefix, name, why);
    }
}

const struct tv_json_value *tv_config_member(const struct tv_config_read *read, const char *name)
{
    const struct tv_json_value *value = tv_json_member(read->object, name);
    return value != NULL && tv_json_type(value) != TV_JSON_NULL ? value : NULL;
}

int32_t tv_config_int(struct tv_config_read *read, const char *name, int32_t min, int32_t max,
                      int64_t absent)
{
    const struct tv_json_value *value = tv_config_member(read, name);
    if (value == NULL) {
        if (absent == TV_CONFIG_REQUIRED) {
            tv_config_refuse(read, name, "is missing");
            return min;
        }
        return (int32_t)absent;
    }
    int64_t number;
    if (tv_json_int(read->doc, value, &number) != 0) {
        tv_config_refuse(read, name, "is not a whole number");
        return min;
    }
    if (number < min || number > max) {
        if (read->err == 0) {
            read->err = tv_model_refuse(read->error,
                                        "config.json: %s%.100s is %lld, served are "
                                        "%d to %d",
                                        read->prefix, name, (long long)number, min, max);
        }
        return min;
    }
    return (int32_t)number;
}

int tv_config_flag(struct tv_config_read *read, const char *name, int absent)
{
    const struct tv_json_value *value = tv_config_member(read, name);
    if (value == NULL) {
        return absent;
    }
    enum tv_json_type type = tv_json_type(value);
    if (type != TV_JSON_TRUE && type != TV_JSON_FALSE) {
        tv_config_refuse(read, name, "is neither true nor false");
    }
    return type == TV_JSON_TRUE;
}

double tv_config_number(struct tv_config_read *read, const char *name, int zero_ok, double absent)
{
    const struct tv_json_value *value = tv_config_member(read, name);
    if (value == NULL) {
        return absent;
    }
    double number;
    if (tv_json_double(read->doc, value, &number) != 0) {
        tv_config_refuse(read, name, "is not a finite number");
        return absent;
    }
    if (!(number > 0.0 || (zero_ok && number == 0.0))) {
        tv_config_refuse(read, name, zero_ok ? "is below 0" : "is not above 0");
        return absent;
    }
    if (number > (double)FLT_MAX || (number > 0.0 && number < (double)FLT_MIN)) {
        tv_config_refuse(read, name, "is outside of what f32 holds");
        return absent;
    }
    return number;
}

double tv_config_factor(struct tv_config_read *read, const char *name, int zero_ok, double absent)
{
    double number = tv_config_number(read, name, zero_ok, absent);
    if (number > TV_CONFIG_FACTOR_MAX) {
        tv_config_refuse(read, name, "is above 10000, the largest factor served");
        return absent;
    }
    return number;
}

const char *tv_config_text(struct tv_config_read *read, const char *name, const char *absent)
{
    const struct tv_json_value *value = tv_config_member(read, name);
    if (value == NULL) {
        return absent;
    }
    const char *text = tv_json_string(value, NULL);
    if (text == NULL) {
        tv_config_refuse(read, name, "is not a string");
        return absent;
    }
    return text;
}
