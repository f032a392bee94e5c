/*
 * value.c - the values of a JSON answer, for users of the library.
 *
 * A struct tv_client_value is proto's value and a struct tv_client_document its document; the names
 * of proto/ stay inside, so that it may change.
 */
#include <errno.h>
#include <stdlib.h>

#include "clients/c/internal.h"

#define TEXT_OF(number)  #number
#define VERSION(a, b, c) TEXT_OF(a) "." TEXT_OF(b) "." TEXT_OF(c)

static const struct tv_json_value *inner(const struct tv_client_value *value)
{
    return (const struct tv_json_value *)value;
}

static const struct tv_client_value *outer(const struct tv_json_value *value)
{
    return (const struct tv_client_value *)value;
}

const struct tv_json *tv_client_json(const struct tv_client_answer *answer)
{
    return (const struct tv_json *)answer->doc;
}

const struct tv_client_value *tv_client_answer_root(const struct tv_client_answer *answer)
{
    return answer->doc != NULL ? outer(tv_json_root(tv_client_json(answer))) : NULL;
}

const struct tv_client_value *tv_client_value_member(const struct tv_client_value *object,
                                                     const char *name)
{
    return object != NULL ? outer(tv_json_member(inner(object), name)) : NULL;
}

const struct tv_client_value *tv_client_value_first(const struct tv_client_value *container)
{
    return container != NULL ? outer(tv_json_first(inner(container))) : NULL;
}

const struct tv_client_value *tv_client_value_next(const struct tv_client_value *child)
{
    return child != NULL ? outer(tv_json_next(inner(child))) : NULL;
}

const char *tv_client_value_name(const struct tv_client_value *child)
{
    return child != NULL ? tv_json_name(inner(child)) : NULL;
}

enum tv_client_type tv_client_value_type(const struct tv_client_value *value)
{
    static const enum tv_client_type types[] = {
        [TV_JSON_NULL] = TV_CLIENT_NULL,     [TV_JSON_FALSE] = TV_CLIENT_FALSE,
        [TV_JSON_TRUE] = TV_CLIENT_TRUE,     [TV_JSON_NUMBER] = TV_CLIENT_NUMBER,
        [TV_JSON_STRING] = TV_CLIENT_STRING, [TV_JSON_ARRAY] = TV_CLIENT_ARRAY,
        [TV_JSON_OBJECT] = TV_CLIENT_OBJECT};
    return value != NULL ? types[tv_json_type(inner(value))] : TV_CLIENT_NULL;
}

const char *tv_client_value_text(const struct tv_client_value *value)
{
    return value != NULL ? tv_json_string(inner(value), NULL) : NULL;
}

int tv_client_value_int(const struct tv_client_answer *answer, const struct tv_client_value *value,
                        int64_t *ret)
{
    return value != NULL ? tv_json_int(tv_client_json(answer), inner(value), ret) : -EINVAL;
}

int tv_client_value_real(const struct tv_client_answer *answer, const struct tv_client_value *value,
                         double *ret)
{
    return value != NULL ? tv_json_double(tv_client_json(answer), inner(value), ret) : -EINVAL;
}

int tv_client_value_ints(const struct tv_client_answer *answer, const struct tv_client_value *value,
                         int32_t **ret_items, int32_t *ret_count)
{
    size_t where;
    if (value == NULL) {
        return -EINVAL;
    }
    return tv_json_int32_array(tv_client_json(answer), inner(value), ret_items, ret_count, &where);
}

void tv_client_answer_finish(struct tv_client_answer *answer)
{
    free(answer->text);
    tv_json_destroy((struct tv_json *)answer->doc);
    *answer = (struct tv_client_answer){0};
}

const char *tv_client_version(void)
{
    return VERSION(TV_CLIENT_VERSION_MAJOR, TV_CLIENT_VERSION_MINOR, TV_CLIENT_VERSION_PATCH);
}
