/*
 * request_parts.c - token arrays, sampling, stop, tree and want.
 *
 * Refuses token ids outside the vocabulary, base64 that is not exactly standard, trees that are not
 * trees, row lists that name a node twice or one that does not exist.
 */
#include <errno.h>
#include <nettle/base64.h>
#include <stdlib.h>
#include <string.h>

#include "proto/request_fields.h"

#define COUNT_OF(array) (sizeof(array) / sizeof((array)[0]))

static int check_vocabulary(struct tv_request_reader *reader, const int32_t *tokens, int32_t count,
                            int by_item)
{
    int32_t vocab = reader->limits->tree.vocab, i;

    for (i = 0; i < count; i++) {
        if (tokens[i] < 0 || tokens[i] >= vocab) {
            if (by_item) {
                return tv_request_refuse_item(reader, TV_WRONG_VALUE, (size_t)i,
                                              "token %d is outside the vocabulary of %d",
                                              (int)tokens[i], (int)vocab);
            }
            return tv_request_refuse(reader, TV_WRONG_VALUE,
                                     "token %d (number %d) is outside the vocabulary of %d",
                                     (int)tokens[i], (int)i, (int)vocab);
        }
    }
    return 0;
}

/* An array of integers; those beyond int32 are refused as range_code at their element. */
static int read_ints(struct tv_request_reader *reader, const struct tv_json_value *value,
                     enum tv_code range_code, int32_t **ret_items, int32_t *ret_count)
{
    size_t index = 0;
    int rc;

    if (tv_json_type(value) != TV_JSON_ARRAY) {
        return tv_request_refuse(reader, TV_WRONG_TYPE, "an array of integers is expected");
    }
    rc = tv_json_int32_array(reader->doc, value, ret_items, ret_count, &index);
    if (rc == -EINVAL) {
        return tv_request_refuse_item(reader, TV_WRONG_TYPE, index,
                                      "an integer is expected, without fraction or exponent");
    }
    if (rc == -ERANGE) {
        (void)tv_request_refuse_item(reader, range_code, index,
                                     "integer out of range"); /* always -EINVAL */
        reader->problem->node = range_code == TV_TREE_INVALID ? (int32_t)index : -1;
        return -EINVAL;
    }
    return rc;
}

TV_REQUEST_READER(tv_request_read_tokens)
{
    struct tv_request *request = base;
    int rc = read_ints(reader, value, TV_WRONG_VALUE, &request->tokens, &request->token_count);

    (void)field; /* writes two members */
    return rc < 0 ? rc : check_vocabulary(reader, request->tokens, request->token_count, 1);
}

/* Standard alphabet, no space, padding exactly where it belongs. nettle skips space and is asked
 * only after this. */
static int is_base64(const char *text, size_t bytes)
{
    size_t i, padding = 0;

    if (bytes % 4 != 0) {
        return 0;
    }
    while (padding < 2 && padding < bytes && text[bytes - 1 - padding] == '=') {
        padding++;
    }
    for (i = 0; i < bytes - padding; i++) {
        char c = text[i];
        if (!((c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') ||
              c == '+' || c == '/')) {
            return 0;
        }
    }
    return 1;
}

int tv_request_read_words(struct tv_request_reader *reader, const struct tv_json_value *value,
                          uint32_t **ret_words, size_t *ret_count)
{
    struct base64_decode_ctx context;
    size_t bytes = 0, got = 0, i;
    const char *text = tv_json_string(value, &bytes);
    uint8_t *data;
    uint32_t *words;

    if (text == NULL) {
        return tv_request_refuse(reader, TV_WRONG_TYPE, "a string is expected");
    }
    if (!is_base64(text, bytes)) {
        return tv_request_refuse(reader, TV_WRONG_VALUE, "not standard base64 with padding");
    }
    data = malloc(BASE64_DECODE_LENGTH(bytes) + 1);
    if (data == NULL) {
        return -ENOMEM;
    }
    base64_decode_init(&context);
    if (!base64_decode_update(&context, &got, data, bytes, text) ||
        !base64_decode_final(&context)) {
        free(data);
        return tv_request_refuse(reader, TV_WRONG_VALUE, "not standard base64 with padding");
    }
    if (got % 4 != 0) {
        free(data);
        return tv_request_refuse(reader, TV_WRONG_VALUE, "%zu bytes are not values of 4", got);
    }
    words = (uint32_t *)(void *)data; /* malloc aligns; converted in place */
    for (i = 0; i < got / 4; i++) {
        const uint8_t *p = data + 4 * i;
        words[i] = p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
    }
    *ret_words = words;
    *ret_count = got / 4;
    return 0;
}

TV_REQUEST_READER(tv_request_read_tokens_b64)
{
    struct tv_request *request = base;
    uint32_t *words = NULL;
    size_t count = 0;
    int rc = tv_request_read_words(reader, value, &words, &count);

    (void)field; /* writes two members */
    if (rc < 0) {
        return rc;
    }
    if (count > INT32_MAX) {
        free(words);
        return tv_request_refuse(reader, TV_WRONG_VALUE, "%zu tokens", count);
    }
    request->tokens = (int32_t *)(void *)words; /* the signed type of the same width */
    request->token_count = (int32_t)count;
    return check_vocabulary(reader, request->tokens, request->token_count, 0);
}

static TV_REQUEST_READER(read_top_p)
{
    int rc = tv_request_read_number(reader, value, field, base);

    if (rc == 0 && *(double *)(void *)((char *)base + field->offset) <= 0.0) {
        return tv_request_refuse(reader, TV_WRONG_VALUE, "must be above 0 and at most 1");
    }
    return rc;
}

static TV_REQUEST_READER(read_filter_top_k)
{
    struct tv_request_field ranged = *field;

    ranged.high = reader->limits->tree.vocab;
    return tv_request_read_int32(reader, value, &ranged, base);
}

TV_REQUEST_READER(tv_request_read_token)
{
    struct tv_request_field ranged = *field;

    ranged.high = reader->limits->tree.vocab - 1;
    return tv_request_read_int32(reader, value, &ranged, base);
}

/* A decimal string of an unsigned 64-bit value, in one spelling only. */
TV_REQUEST_READER(tv_request_read_seed)
{
    struct tv_sampling_request *sampling =
        (struct tv_sampling_request *)(void *)((char *)base + field->offset);
    size_t bytes = 0, i;
    const char *text = tv_json_string(value, &bytes);
    uint64_t seed = 0;
    int ok;

    if (text == NULL) {
        return tv_request_refuse(reader, TV_WRONG_TYPE,
                                 "a decimal string is expected (64 bits do not fit a number)");
    }
    ok = bytes >= 1 && bytes <= TV_SEED_DIGITS_MAX && (text[0] != '0' || bytes == 1);
    for (i = 0; i < bytes && ok; i++) {
        uint64_t digit = (uint64_t)(unsigned char)text[i] - '0';
        ok = digit <= 9 && seed <= (UINT64_MAX - digit) / 10;
        seed = seed * 10 + digit;
    }
    if (!ok) {
        return tv_request_refuse(reader, TV_WRONG_VALUE,
                                 "a decimal unsigned 64-bit value is expected");
    }
    sampling->seed = seed;
    sampling->has_seed = 1;
    return 0;
}

static TV_REQUEST_READER(read_typical)
{
    static const struct tv_request_field fields[] = {
        {"epsilon", 0, tv_request_read_number,
         offsetof(struct tv_sampling_request, typical_epsilon), 0, 1},
        {"delta", 0, tv_request_read_number, offsetof(struct tv_sampling_request, typical_delta), 0,
         1},
    };

    (void)field; /* its own table */
    ((struct tv_sampling_request *)base)->has_typical = 1;
    return tv_request_read_object(reader, value, fields, COUNT_OF(fields), base);
}

TV_REQUEST_READER(tv_request_read_sampling)
{
    static const struct tv_request_field fields[] = {
        {"rule", 0, tv_request_read_rule, offsetof(struct tv_sampling_request, rule), 0, 0},
        {"temperature", 0, tv_request_read_number,
         offsetof(struct tv_sampling_request, temperature), 0, 100},
        {"top_k", 0, read_filter_top_k, offsetof(struct tv_sampling_request, top_k), 0, 0},
        {"top_p", 0, read_top_p, offsetof(struct tv_sampling_request, top_p), 0, 1},
        {"min_p", 0, tv_request_read_number, offsetof(struct tv_sampling_request, min_p), 0, 1},
        {"seed", 0, tv_request_read_seed, 0, 0, 0},
        {"typical", 0, read_typical, 0, 0, 0},
    };
    struct tv_request *request = base;

    (void)field; /* its own table */
    request->has_sampling = 1;
    return tv_request_read_object(reader, value, fields, COUNT_OF(fields), &request->sampling);
}

static TV_REQUEST_READER(read_stop_ids)
{
    struct tv_request *request = base;
    int32_t *items = NULL, count = 0;
    int rc = read_ints(reader, value, TV_WRONG_VALUE, &items, &count);

    (void)field; /* writes two members */
    if (rc < 0) {
        return rc;
    }
    if (count > TV_STOP_IDS_MAX) {
        rc = tv_request_refuse(reader, TV_WRONG_VALUE, "at most %d stop tokens", TV_STOP_IDS_MAX);
    } else {
        rc = check_vocabulary(reader, items, count, 1);
    }
    if (rc == 0 && count > 0) {
        memcpy(request->stop_ids, items, (size_t)count * sizeof(*items));
        request->stop_count = count;
    }
    free(items);
    return rc;
}

static TV_REQUEST_READER(read_max_len)
{
    struct tv_request_field ranged = *field;

    ranged.high = reader->limits->max_len;
    return tv_request_read_int32(reader, value, &ranged, base);
}

TV_REQUEST_READER(tv_request_read_stop)
{
    static const struct tv_request_field fields[] = {
        {"token_ids", 0, read_stop_ids, 0, 0, 0},
        {"max_len", 0, read_max_len, offsetof(struct tv_request, max_len), 1, 0},
    };

    (void)field; /* its own table */
    return tv_request_read_object(reader, value, fields, COUNT_OF(fields), base);
}

static TV_REQUEST_READER(read_tree_tokens)
{
    struct tv_tree *tree = base;

    (void)field; /* writes two members */
    return read_ints(reader, value, TV_TREE_INVALID, &tree->tokens, &tree->count);
}

static TV_REQUEST_READER(read_tree_parents)
{
    struct tv_tree *tree = base;
    int32_t count = 0;
    int rc = read_ints(reader, value, TV_TREE_INVALID, &tree->parents, &count);

    (void)field; /* checks against the tokens, which are read before */
    if (rc == 0 && count != tree->count) {
        return tv_request_refuse(reader, TV_TREE_INVALID, "%d parents for %d tokens", (int)count,
                                 (int)tree->count);
    }
    return rc;
}

TV_REQUEST_READER(tv_request_read_tree)
{
    static const struct tv_request_field fields[] = {
        {"tokens", 1, read_tree_tokens, 0, 0, 0},
        {"parents", 1, read_tree_parents, 0, 0, 0},
        {"q_topk", 0, tv_request_read_q_topk, 0, 0, 0},
        {"q_dense", 0, tv_request_read_q_dense, 0, 0, 0},
    };
    struct tv_request *request = base;
    int rc = tv_request_read_object(reader, value, fields, COUNT_OF(fields), &request->tree);

    (void)field; /* its own table */
    if (rc < 0) {
        return rc;
    }
    request->has_tree = 1;
    rc = tv_tree_check(&request->tree, &reader->limits->tree, reader->problem);
    if (rc == 0 && request->tree.draft.width > 0) {
        rc = tv_tree_check_draft(&request->tree, reader->limits->tree.vocab, reader->problem);
    }
    return rc;
}
