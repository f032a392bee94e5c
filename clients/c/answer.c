/*
 * answer.c - members of answers and problems, read into plain values.
 *
 * Trusts nothing a server sends: types, ranges and lengths are checked, text is cut to its field.
 */
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "clients/c/internal.h"

void tv_client_problem_set(struct tv_client_problem *problem, const char *format, ...)
{
    *problem = (struct tv_client_problem){.node = -1, .committed = -1};
    va_list args;
    va_start(args, format);
    (void)vsnprintf(problem->detail, sizeof(problem->detail), format, args); /* cut when long */
    va_end(args);
}

int tv_client_end(int error, struct tv_client_problem *ret_problem)
{
    if (error == 0) {
        *ret_problem = (struct tv_client_problem){.node = -1, .committed = -1};
    }
    return error;
}

int tv_client_not_the_contract(const char *what, struct tv_client_problem *ret_problem)
{
    tv_client_problem_set(ret_problem, "the server's answer does not follow the contract: %s",
                          what);
    return -EBADMSG;
}

int tv_client_is_object(const struct tv_client_answer *answer)
{
    return answer->http_status >= 200 && answer->http_status < 300 && answer->doc != NULL &&
           tv_json_type(tv_json_root(tv_client_json(answer))) == TV_JSON_OBJECT;
}

void tv_client_get_text_cut(const struct tv_json_value *object, const char *name, char *ret,
                            size_t ret_bytes)
{
    size_t bytes = 0;
    const char *text = tv_json_string(tv_json_member(object, name), &bytes);
    if (text == NULL) {
        return;
    }
    if (bytes >= ret_bytes) {
        bytes = ret_bytes - 1;
    }
    for (size_t i = 0; i < bytes; i++) { /* such text is printed: no control characters */
        ret[i] = (unsigned char)text[i] < 0x20 || text[i] == 0x7f ? '?' : text[i];
    }
    ret[bytes] = '\0';
}

int tv_client_get_text(const struct tv_json_value *object, const char *name, char *ret,
                       size_t ret_bytes)
{
    size_t bytes = 0;
    const char *text = tv_json_string(tv_json_member(object, name), &bytes);
    if (text == NULL || bytes >= ret_bytes) {
        return -EBADMSG;
    }
    memcpy(ret, text, bytes);
    ret[bytes] = '\0';
    return 0;
}

int tv_client_get_int32(const struct tv_json *doc, const struct tv_json_value *object,
                        const char *name, int32_t *ret)
{
    const struct tv_json_value *value = tv_json_member(object, name);
    int64_t number;
    if (value == NULL || tv_json_int(doc, value, &number) != 0 || number < INT32_MIN ||
        number > INT32_MAX) {
        return -EBADMSG;
    }
    *ret = (int32_t)number;
    return 0;
}

int tv_client_get_ints(const struct tv_json *doc, const struct tv_json_value *object,
                       const char *name, int32_t **ret_items, int32_t *ret_count)
{
    const struct tv_json_value *value = tv_json_member(object, name);
    size_t where;
    int error =
        value != NULL ? tv_json_int32_array(doc, value, ret_items, ret_count, &where) : -EBADMSG;
    return error == 0 || error == -ENOMEM ? error : -EBADMSG;
}

static int32_t flag_of(const struct tv_json_value *object, const char *name, int32_t otherwise)
{
    const struct tv_json_value *value = tv_json_member(object, name);
    if (value == NULL) {
        return otherwise;
    }
    enum tv_json_type type = tv_json_type(value);
    return type == TV_JSON_TRUE ? 1 : type == TV_JSON_FALSE ? 0 : otherwise;
}

void tv_client_problem_read(const struct tv_json *doc, int32_t http_status,
                            struct tv_client_problem *ret_problem)
{
    const struct tv_json_value *root = tv_json_root(doc);
    tv_client_problem_set(ret_problem, "refused with status %d", (int)http_status);
    ret_problem->http_status = http_status;
    tv_client_get_text_cut(root, "code", ret_problem->code, sizeof(ret_problem->code));
    tv_client_get_text_cut(root, "detail", ret_problem->detail, sizeof(ret_problem->detail));
    tv_client_get_text_cut(root, "pointer", ret_problem->pointer, sizeof(ret_problem->pointer));
    (void)tv_client_get_int32(doc, root, "node", &ret_problem->node); /* optional */
    ret_problem->committed = flag_of(root, "committed", -1);
    ret_problem->retryable = flag_of(root, "retryable", 0);
}
