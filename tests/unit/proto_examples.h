/*
 * proto_examples.h - members of an example's answer, each required to be there and of its type.
 */
#ifndef TV_TESTS_PROTO_EXAMPLES_H
#define TV_TESTS_PROTO_EXAMPLES_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <math.h>
#include <nettle/base64.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "proto/json_read.h"
#include "proto/response.h"

#define ITEMS_MAX 64

/* The answer that is being read. */
extern const struct tv_json *document;

static inline const struct tv_json_value *need(const struct tv_json_value *object, const char *name)
{
    const struct tv_json_value *value = tv_json_member(object, name);

    if (value == NULL) {
        fail_msg("no member %s", name);
    }
    return value;
}

static inline int64_t number(const struct tv_json_value *object, const char *name)
{
    int64_t value = 0;

    assert_int_equal(tv_json_int(document, need(object, name), &value), 0);
    return value;
}

static inline double real(const struct tv_json_value *object, const char *name)
{
    double value = 0;

    assert_int_equal(tv_json_double(document, need(object, name), &value), 0);
    return value;
}

static inline const char *text(const struct tv_json_value *object, const char *name)
{
    const char *value = tv_json_string(need(object, name), NULL);

    assert_non_null(value);
    return value;
}

static inline int flag(const struct tv_json_value *object, const char *name)
{
    return tv_json_type(need(object, name)) == TV_JSON_TRUE;
}

static inline int32_t integers(const struct tv_json_value *object, const char *name, int32_t *items)
{
    int32_t *read = NULL, count = 0;
    size_t index;

    assert_int_equal(tv_json_int32_array(document, need(object, name), &read, &count, &index), 0);
    assert_true(count <= ITEMS_MAX);
    memcpy(items, read != NULL ? read : items, (size_t)count * sizeof(*items));
    free(read);
    return count;
}

static inline void base64(const struct tv_json_value *object, const char *name, void *items)
{
    struct base64_decode_ctx context;
    const char *value = text(object, name);
    size_t bytes = 0;

    assert_true(strlen(value) < ITEMS_MAX * 4);
    base64_decode_init(&context);
    assert_true(base64_decode_update(&context, &bytes, items, strlen(value), value));
    assert_true(base64_decode_final(&context));
}

static inline void hex(const struct tv_json_value *object, const char *name, uint8_t *bytes,
                       size_t count)
{
    const char *value = text(object, name);
    size_t i;

    assert_int_equal(strlen(value), 2 * count);
    for (i = 0; i < count; i++) {
        unsigned byte;
        assert_int_equal(sscanf(value + 2 * i, "%2x", &byte), 1);
        bytes[i] = (uint8_t)byte;
    }
}

static inline int64_t time_ms(const struct tv_json_value *object, const char *name)
{
    struct tm parts = {0};

    assert_non_null(strptime(text(object, name), "%Y-%m-%dT%H:%M:%SZ", &parts));
    return (int64_t)timegm(&parts) * 1000;
}

static inline enum tv_finish finish(const struct tv_json_value *object)
{
    const struct tv_json_value *value = need(object, "finish");

    return tv_json_type(value) == TV_JSON_NULL                ? TV_FINISH_NONE
           : strcmp(tv_json_string(value, NULL), "stop") == 0 ? TV_FINISH_STOP
                                                              : TV_FINISH_LENGTH;
}

static inline enum tv_rule rule(const struct tv_json_value *object)
{
    int found = TV_RULE_TARGET_WALK;

    while (strcmp(tv_rule_name((enum tv_rule)found), text(object, "rule")) != 0) {
        assert_true(++found < TV_RULE_COUNT);
    }
    return (enum tv_rule)found;
}

static inline struct tv_sampling_state sampling(const struct tv_json_value *object)
{
    const struct tv_json_value *value = need(object, "sampling");
    const struct tv_json_value *typical = tv_json_member(value, "typical");

    return (struct tv_sampling_state){
        .rule = rule(value),
        .temperature = real(value, "temperature"),
        .top_k = (int32_t)number(value, "top_k"),
        .top_p = real(value, "top_p"),
        .min_p = real(value, "min_p"),
        .seed = strtoull(text(value, "seed"), NULL, 10),
        .has_typical = typical != NULL,
        .typical_epsilon = typical != NULL ? real(typical, "epsilon") : 0,
        .typical_delta = typical != NULL ? real(typical, "delta") : 0};
}

/* TV_SYNTHETIC_ bits of a member that may be missing or null. */
static inline unsigned synthetic(const struct tv_json_value *object)
{
    const struct tv_json_value *list = tv_json_member(object, "synthetic");
    unsigned bits = 0;

    if (list == NULL || tv_json_type(list) == TV_JSON_NULL) {
        return 0;
    }
    for (const struct tv_json_value *v = tv_json_first(list); v != NULL; v = tv_json_next(v)) {
        const char *name = tv_json_string(v, NULL);
        assert_non_null(name);
        bits |= strcmp(name, "weights") == 0 ? TV_SYNTHETIC_WEIGHTS : TV_SYNTHETIC_ACCEPTANCE;
    }
    return bits;
}

/* proto_example_rounds.c: a session's state; encode the answer of a round again from its members.
 */
void example_read_state(const struct tv_json_value *value, struct tv_session_state *state);
void example_encode_round(struct tv_buf *buf, enum tv_call_kind kind,
                          const struct tv_json_value *root);
/* proto_example_info.c: the same for answers about the server, chosen by the path; 0 when the path
 * is none of them. */
int example_encode_info(struct tv_buf *buf, const char *method, const char *path,
                        const struct tv_json_value *root);
void example_read_report(const struct tv_json_value *root, struct tv_parity_report *report);

#endif
