/*
 * request_hidden.c - want.hidden: which rows of the residual stream a call shall show.
 *
 * Refuses taps that the server does not have, tap lists that are empty or name one twice, and a
 * projection that is not registered or of other taps than it was registered for.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "proto/request_fields.h"

#define COUNT_OF(array) (sizeof(array) / sizeof((array)[0]))
#define WINDOW_PREFIX   "window:"

/* Whether the server hands out any is said before what is wrong with the request. */
static int check_served(struct tv_request_reader *reader)
{
    if (reader->limits->tap_count > 0) {
        return 0;
    }
    return tv_request_refuse(reader, TV_WRONG_VALUE,
                             "this server hands out no hidden rows (its setting taps is empty)");
}

/* The place of a layer in the server's list of taps, or -1. */
static int32_t tap_place(const struct tv_request_limits *limits, int32_t layer)
{
    for (int32_t i = 0; i < limits->tap_count; i++) {
        if (limits->taps[i] == layer) {
            return i;
        }
    }
    return -1;
}

static int take_taps(struct tv_request_reader *reader, const int32_t *layers, int32_t count,
                     struct tv_want_hidden *hidden)
{
    uint8_t listed[TV_TAPS_MAX] = {0};

    if (count == 0) {
        return tv_request_refuse(reader, TV_WRONG_VALUE, "an empty list of taps");
    }
    for (int32_t i = 0; i < count; i++) {
        int32_t place = tap_place(reader->limits, layers[i]);
        if (place < 0) {
            return tv_request_refuse_item(reader, TV_WRONG_VALUE, (size_t)i,
                                          "%d is not tapped; taps of /v1/model lists what is",
                                          (int)layers[i]);
        }
        if (listed[place]) {
            return tv_request_refuse_item(reader, TV_WRONG_VALUE, (size_t)i, "%d is listed twice",
                                          (int)layers[i]);
        }
        listed[place] = 1;
        hidden->taps[i] = place;
    }
    hidden->tap_count = count;
    return 0;
}

static TV_REQUEST_READER(read_taps)
{
    struct tv_want *want = base;
    int32_t *layers = NULL, count = 0;
    size_t index = 0;
    int rc;

    (void)field; /* writes two members */
    if (tv_json_type(value) != TV_JSON_ARRAY) {
        return tv_request_refuse(reader, TV_WRONG_TYPE, "an array of integers is expected");
    }
    rc = tv_json_int32_array(reader->doc, value, &layers, &count, &index);
    if (rc == -EINVAL) {
        return tv_request_refuse_item(reader, TV_WRONG_TYPE, index, "an integer is expected");
    }
    if (rc == -ERANGE) {
        return tv_request_refuse_item(reader, TV_WRONG_VALUE, index, "integer out of range");
    }
    if (rc == 0) {
        rc = take_taps(reader, layers, count, &want->hidden);
    }
    free(layers);
    return rc;
}

static TV_REQUEST_READER(read_dtype)
{
    struct tv_want *want = base;
    char word[16];
    int rc = tv_request_word(reader, value, word);

    (void)field; /* the only member of its type */
    if (rc == 0 && tv_request_dtype_from(word, TV_TENSOR_FP8_E4M3, &want->hidden.dtype) < 0) {
        return tv_request_refuse(reader, TV_WRONG_VALUE, "f32, bf16, f16 or fp8_e4m3 is expected");
    }
    return rc;
}

/* Positions of a prompt: all, or window:N for the last N. */
static TV_REQUEST_READER(read_positions)
{
    struct tv_want *want = base;
    const size_t prefix = sizeof(WINDOW_PREFIX) - 1;
    int64_t number = 0;
    size_t bytes = 0;
    const char *text = tv_json_string(value, &bytes);

    (void)field; /* the only member of its type */
    if (text == NULL) {
        return tv_request_refuse(reader, TV_WRONG_TYPE, "a string is expected");
    }
    if (bytes == 3 && memcmp(text, "all", 3) == 0) {
        return 0;
    }
    int ok = bytes > prefix && bytes <= prefix + 10 && memcmp(text, WINDOW_PREFIX, prefix) == 0 &&
             text[prefix] != '0';
    for (size_t i = prefix; i < bytes && ok; i++) {
        ok = text[i] >= '0' && text[i] <= '9';
        number = number * 10 + (text[i] - '0');
    }
    if (!ok || number > INT32_MAX) {
        return tv_request_refuse(reader, TV_WRONG_VALUE, "all or window:N is expected");
    }
    want->hidden.window = (int32_t)number;
    return 0;
}

/* Without a list it is every tap; a projection is of all of them, in their order. */
static int settle_taps(struct tv_request_reader *reader, struct tv_want_hidden *hidden)
{
    const struct tv_request_limits *limits = reader->limits;
    int in_order = hidden->tap_count == limits->tap_count;

    if (hidden->tap_count == 0) {
        for (int32_t i = 0; i < limits->tap_count; i++) {
            hidden->taps[i] = i;
        }
        hidden->tap_count = limits->tap_count;
        in_order = 1;
    }
    if (!hidden->project) {
        return 0;
    }
    if (limits->project_dim == 0) {
        return tv_request_refuse(reader, TV_WRONG_VALUE,
                                 "project: no projection is registered at this server");
    }
    for (int32_t i = 0; in_order && i < hidden->tap_count; i++) {
        in_order = hidden->taps[i] == i;
    }
    return in_order ? 0
                    : tv_request_refuse(reader, TV_WRONG_VALUE,
                                        "project: the projection takes every tap, in the order of "
                                        "/v1/model");
}

TV_REQUEST_READER(tv_request_read_hidden)
{
    static const struct tv_request_field fields[] = {
        {"taps", 0, read_taps, 0, 0, 0},
        {"rows", 0, tv_request_read_rows, offsetof(struct tv_want, hidden.rows), 0, 0},
        {"dtype", 0, read_dtype, 0, 0, 0},
        {"via", 0, tv_request_read_via, offsetof(struct tv_want, hidden.fetch), 0, 0},
        {"project", 0, tv_request_read_flag, offsetof(struct tv_want, hidden.project), 0, 0},
    };
    struct tv_want *want = base;
    int rc = check_served(reader);

    (void)field; /* its own table */
    want->hidden.wanted = 1;
    if (rc == 0) {
        rc = tv_request_read_object(reader, value, fields, COUNT_OF(fields), want);
    }
    if (rc == 0 && !(reader->seen & 2u)) {
        rc = tv_request_rows_copy(&want->rows, &want->hidden.rows); /* want.rows is read before */
    }
    return rc < 0 ? rc : settle_taps(reader, &want->hidden);
}

static TV_REQUEST_READER(read_prompt_hidden)
{
    static const struct tv_request_field fields[] = {
        {"taps", 0, read_taps, 0, 0, 0},
        {"rows", 0, read_positions, 0, 0, 0},
        {"dtype", 0, read_dtype, 0, 0, 0},
        {"via", 0, tv_request_read_via, offsetof(struct tv_want, hidden.fetch), 0, 0},
        {"project", 0, tv_request_read_flag, offsetof(struct tv_want, hidden.project), 0, 0},
    };
    struct tv_want *want = base;
    int rc = check_served(reader);

    (void)field; /* its own table */
    want->hidden.wanted = 1;
    if (rc == 0) {
        rc = tv_request_read_object(reader, value, fields, COUNT_OF(fields), want);
    }
    return rc < 0 ? rc : settle_taps(reader, &want->hidden);
}

TV_REQUEST_READER(tv_request_read_prompt_want)
{
    static const struct tv_request_field fields[] = {
        {"hidden", 0, read_prompt_hidden, 0, 0, 0},
    };
    struct tv_request *request = base;

    (void)field; /* its own table */
    return tv_request_read_object(reader, value, fields, COUNT_OF(fields), &request->want);
}

uint64_t tv_request_hidden_values(const struct tv_want_hidden *hidden,
                                  const struct tv_request_limits *limits, uint64_t rows)
{
    uint64_t values = hidden->project ? (uint64_t)limits->project_dim
                                      : (uint64_t)hidden->tap_count * (uint64_t)limits->hidden_dim;

    return hidden->wanted ? rows * values : 0;
}

int tv_request_check_prompt_hidden(struct tv_request_reader *reader, int32_t prompt_len)
{
    struct tv_want *want = &reader->request->want;
    int32_t rows = prompt_len;
    uint64_t bytes;

    if (want->hidden.window > 0 && want->hidden.window < rows) {
        rows = want->hidden.window;
    }
    bytes = tv_request_hidden_values(&want->hidden, reader->limits, (uint64_t)rows) *
            tv_tensor_dtype_bytes(want->hidden.dtype);
    if (bytes > reader->limits->inline_bytes) {
        tv_problem_set(reader->problem, TV_WRONG_VALUE, "/want/hidden",
                       "/want/hidden: %llu bytes for %d positions are over the limit of %llu",
                       (unsigned long long)bytes, (int)rows,
                       (unsigned long long)reader->limits->inline_bytes);
        return -EINVAL;
    }
    want->inline_bytes_most = bytes;
    return 0;
}
