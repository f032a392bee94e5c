/*
 * request_fields.c - objects by table, and the scalar fields.
 *
 * Refuses unknown, missing, mistyped and out-of-range members with the JSON Pointer of the member.
 */
#include "proto/request_fields.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#define FOREIGN_BYTES_MAX 48 /* of a client's name in a pointer */

int tv_request_refuse(struct tv_request_reader *reader, enum tv_code code, const char *format, ...)
{
    char detail[240];
    va_list args;

    va_start(args, format);
    (void)vsnprintf(detail, sizeof(detail), format, args); /* cut when long */
    va_end(args);
    tv_problem_set(reader->problem, code, reader->pointer, "%s%s%s",
                   reader->pointer_bytes > 0 ? reader->pointer : "body", ": ", detail);
    return -EINVAL;
}

/* Add "/name" to the pointer, escaped; returns the length to go back to. */
static size_t push_name(struct tv_request_reader *reader, const char *name)
{
    size_t before = reader->pointer_bytes, used = before, taken = 0;

    if (used + 1 < sizeof(reader->pointer)) {
        reader->pointer[used++] = '/';
    }
    for (; *name != '\0' && taken < FOREIGN_BYTES_MAX && used + 2 < sizeof(reader->pointer);
         name++, taken++) {
        if (*name == '~' || *name == '/') {
            reader->pointer[used++] = '~';
            reader->pointer[used++] = *name == '~' ? '0' : '1';
        } else {
            reader->pointer[used++] = *name;
        }
    }
    reader->pointer[used] = '\0';
    reader->pointer_bytes = used;
    return before;
}

static void pop_name(struct tv_request_reader *reader, size_t before)
{
    reader->pointer_bytes = before;
    reader->pointer[before] = '\0';
}

int tv_request_refuse_item(struct tv_request_reader *reader, enum tv_code code, size_t index,
                           const char *format, ...)
{
    char detail[240], name[24];
    va_list args;
    size_t before;

    va_start(args, format);
    (void)vsnprintf(detail, sizeof(detail), format, args); /* cut when long */
    va_end(args);
    (void)snprintf(name, sizeof(name), "%zu", index); /* fits */
    before = push_name(reader, name);
    (void)tv_request_refuse(reader, code, "%s", detail); /* always -EINVAL */
    pop_name(reader, before);
    return -EINVAL;
}

/* Find every member in the table; values[i] stays NULL for those that are absent. */
static int match_members(struct tv_request_reader *reader, const struct tv_json_value *object,
                         const struct tv_request_field *fields, size_t count,
                         const struct tv_json_value **values)
{
    const struct tv_json_value *child;
    size_t i, before;

    for (child = tv_json_first(object); child != NULL; child = tv_json_next(child)) {
        const char *name = tv_json_name(child);
        for (i = 0; i < count && strcmp(fields[i].name, name) != 0; i++) {
        }
        if (i == count) {
            before = push_name(reader, name);
            (void)tv_request_refuse(reader, TV_UNKNOWN_FIELD, "no such field"); /* always -EINVAL */
            pop_name(reader, before);
            return -EINVAL;
        }
        values[i] = child;
    }
    for (i = 0; i < count; i++) {
        if (fields[i].required && values[i] == NULL) {
            before = push_name(reader, fields[i].name);
            (void)tv_request_refuse(reader, TV_MISSING_FIELD, "required"); /* always -EINVAL */
            pop_name(reader, before);
            return -EINVAL;
        }
    }
    return 0;
}

int tv_request_read_object(struct tv_request_reader *reader, const struct tv_json_value *value,
                           const struct tv_request_field *fields, size_t count, void *base)
{
    const struct tv_json_value *values[TV_REQUEST_FIELDS_MAX] = {NULL};
    unsigned seen = 0;
    size_t i;
    int rc;

    if (tv_json_type(value) != TV_JSON_OBJECT) {
        return tv_request_refuse(reader, TV_WRONG_TYPE, "an object is expected");
    }
    rc = match_members(reader, value, fields, count, values);
    for (i = 0; i < count && rc == 0; i++) {
        if (values[i] != NULL) {
            size_t before = push_name(reader, fields[i].name);
            rc = fields[i].read(reader, values[i], &fields[i], base);
            pop_name(reader, before);
            seen |= 1u << i;
        }
    }
    reader->seen = seen;
    return rc;
}

TV_REQUEST_READER(tv_request_read_int32)
{
    int64_t number = 0;
    int rc = tv_json_int(reader->doc, value, &number);

    if (rc == -EINVAL) {
        return tv_request_refuse(reader, TV_WRONG_TYPE,
                                 "an integer is expected, without fraction or exponent");
    }
    if (rc < 0 || (double)number < field->low || (double)number > field->high) {
        return tv_request_refuse(reader, TV_WRONG_VALUE, "must be from %.0f to %.0f", field->low,
                                 field->high);
    }
    *(int32_t *)(void *)((char *)base + field->offset) = (int32_t)number;
    return 0;
}

TV_REQUEST_READER(tv_request_read_flag)
{
    enum tv_json_type type = tv_json_type(value);

    if (type != TV_JSON_TRUE && type != TV_JSON_FALSE) {
        return tv_request_refuse(reader, TV_WRONG_TYPE, "true or false is expected");
    }
    *(int *)(void *)((char *)base + field->offset) = type == TV_JSON_TRUE;
    return 0;
}

TV_REQUEST_READER(tv_request_read_number)
{
    double number = 0;
    int rc = tv_json_double(reader->doc, value, &number);

    if (rc == -ENOMEM) {
        return rc;
    }
    if (rc == -EINVAL) {
        return tv_request_refuse(reader, TV_WRONG_TYPE, "a number is expected");
    }
    if (rc < 0 || number < field->low || number > field->high) {
        return tv_request_refuse(reader, TV_WRONG_VALUE, "must be from %g to %g", field->low,
                                 field->high);
    }
    *(double *)(void *)((char *)base + field->offset) = number + 0.0; /* -0 becomes 0 */
    return 0;
}

/* A string, or NULL with the problem set. */
static const char *string_of(struct tv_request_reader *reader, const struct tv_json_value *value,
                             size_t *ret_bytes)
{
    const char *text = tv_json_string(value, ret_bytes);

    if (text == NULL) {
        (void)tv_request_refuse(reader, TV_WRONG_TYPE, "a string is expected"); /* always -EINVAL */
    }
    return text;
}

static int hex_digit(char c)
{
    return c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

/* Exactly `digits` lower-case hex digits? */
static int is_hex(const char *text, size_t bytes, size_t digits)
{
    size_t i;

    if (bytes != digits) {
        return 0;
    }
    for (i = 0; i < digits; i++) {
        if (hex_digit(text[i]) < 0) {
            return 0;
        }
    }
    return 1;
}

TV_REQUEST_READER(tv_request_read_epoch)
{
    size_t bytes = 0;
    const char *text = string_of(reader, value, &bytes);
    char *epoch = (char *)base + field->offset;

    if (text == NULL) {
        return -EINVAL;
    }
    if (!is_hex(text, bytes, 16)) {
        return tv_request_refuse(reader, TV_WRONG_VALUE, "16 lower-case hex digits are expected");
    }
    memcpy(epoch, text, 16);
    epoch[16] = '\0';
    return 0;
}

TV_REQUEST_READER(tv_request_read_digest)
{
    size_t bytes = 0, i;
    const char *text = string_of(reader, value, &bytes);
    struct tv_request *request = base;

    (void)field; /* writes two members */
    if (text == NULL) {
        return -EINVAL;
    }
    if (!is_hex(text, bytes, 32)) {
        return tv_request_refuse(reader, TV_WRONG_VALUE, "32 lower-case hex digits are expected");
    }
    for (i = 0; i < 16; i++) {
        request->expected_digest[i] =
            (uint8_t)(hex_digit(text[2 * i]) << 4 | hex_digit(text[2 * i + 1]));
    }
    request->has_expected_digest = 1;
    return 0;
}

TV_REQUEST_READER(tv_request_read_session)
{
    static const char alphabet[] =
        "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";
    size_t bytes = 0;
    const char *text = string_of(reader, value, &bytes);
    char *session = (char *)base + field->offset;

    if (text == NULL) {
        return -EINVAL;
    }
    if (bytes != 24 || memcmp(text, "s_", 2) != 0 || strspn(text + 2, alphabet) != 22) {
        return tv_request_refuse(reader, TV_WRONG_VALUE,
                                 "a session id is s_ and 22 base64url characters");
    }
    memcpy(session, text, 25);
    return 0;
}

TV_REQUEST_READER(tv_request_read_salt)
{
    size_t bytes = 0;
    const char *text = string_of(reader, value, &bytes);
    struct tv_request *request = base;

    (void)field; /* writes two members */
    if (text == NULL) {
        return -EINVAL;
    }
    if (bytes > TV_SALT_BYTES_MAX) {
        return tv_request_refuse(reader, TV_WRONG_VALUE, "at most %d bytes", TV_SALT_BYTES_MAX);
    }
    memcpy(request->cache_salt, text, bytes);
    request->cache_salt[bytes] = '\0';
    request->cache_salt_bytes = (int32_t)bytes;
    return 0;
}

TV_REQUEST_READER(tv_request_read_rule)
{
    size_t bytes = 0;
    const char *text = string_of(reader, value, &bytes);
    int rule;

    if (text == NULL) {
        return -EINVAL;
    }
    for (rule = 0; rule < TV_RULE_COUNT; rule++) {
        const char *name = tv_rule_name((enum tv_rule)rule);
        if (strlen(name) == bytes && memcmp(name, text, bytes) == 0) {
            *(enum tv_rule *)(void *)((char *)base + field->offset) = (enum tv_rule)rule;
            return 0;
        }
    }
    return tv_request_refuse(reader, TV_WRONG_VALUE,
                             "target_walk, greedy, ratio_wor, typical or client is expected");
}
