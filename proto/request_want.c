/*
 * request_want.c - what a round shall show besides its outcome.
 *
 * Refuses row lists that are empty, name a node twice or one that does not exist, and inline blocks
 * that could exceed the server's limit for this tree.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "proto/request_fields.h"

#define COUNT_OF(array) (sizeof(array) / sizeof((array)[0]))

int tv_request_dtype_from(const char *text, enum tv_tensor_dtype last,
                          enum tv_tensor_dtype *ret_dtype)
{
    int dtype;

    for (dtype = TV_TENSOR_F32; dtype <= (int)last; dtype++) {
        if (strcmp(text, tv_tensor_dtype_name((enum tv_tensor_dtype)dtype)) == 0) {
            *ret_dtype = (enum tv_tensor_dtype)dtype;
            return 0;
        }
    }
    return -EINVAL;
}

int tv_request_rows_kind_from(const char *text, enum tv_rows_kind *ret_kind)
{
    static const char *const names[] = {"path", "stop", "all"};
    size_t i;

    for (i = 0; i < COUNT_OF(names); i++) {
        if (strcmp(text, names[i]) == 0) {
            *ret_kind = (enum tv_rows_kind)i;
            return 0;
        }
    }
    return -EINVAL;
}

int tv_request_word(struct tv_request_reader *reader, const struct tv_json_value *value,
                    char ret_word[16])
{
    size_t bytes = 0;
    const char *text = tv_json_string(value, &bytes);

    if (text == NULL) {
        return tv_request_refuse(reader, TV_WRONG_TYPE, "a string is expected");
    }
    ret_word[0] = '\0';
    if (bytes < 16) {
        memcpy(ret_word, text, bytes);
        ret_word[bytes] = '\0';
    }
    return 0;
}

/* The trees that the round may run: its own, or those of its alternatives. */
static int32_t tree_count(const struct tv_request *request)
{
    return request->alternative_count > 0 ? request->alternative_count : 1;
}

static const struct tv_tree *tree_at(const struct tv_request *request, int32_t i)
{
    return tv_request_tree(request, request->alternative_count > 0 ? i : -1);
}

/* Every listed node exists, in whichever tree runs, and is listed once. */
static int check_nodes(struct tv_request_reader *reader, const struct tv_rows *rows)
{
    int32_t nodes = tree_at(reader->request, 0)->count, i;
    uint8_t listed[TV_ENGINE_NODES_MAX] = {0};

    if (rows->count == 0) {
        return tv_request_refuse(reader, TV_WRONG_VALUE, "an empty list of nodes");
    }
    for (i = 1; i < tree_count(reader->request); i++) {
        int32_t count = tree_at(reader->request, i)->count;
        nodes = count < nodes ? count : nodes;
    }
    for (i = 0; i < rows->count; i++) {
        int32_t node = rows->nodes[i];
        if (node < 0 || node >= nodes || node >= TV_ENGINE_NODES_MAX) {
            return tv_request_refuse_item(reader, TV_WRONG_VALUE, (size_t)i,
                                          "node %d is not in the tree of %d", (int)node,
                                          (int)nodes);
        }
        if (listed[node]) {
            return tv_request_refuse_item(reader, TV_WRONG_VALUE, (size_t)i,
                                          "node %d is listed twice", (int)node);
        }
        listed[node] = 1;
    }
    return 0;
}

TV_REQUEST_READER(tv_request_read_rows)
{
    struct tv_rows *rows = (struct tv_rows *)(void *)((char *)base + field->offset);
    size_t index = 0;
    char word[16];
    int rc;

    if (tv_json_type(value) == TV_JSON_ARRAY) {
        rc = tv_json_int32_array(reader->doc, value, &rows->nodes, &rows->count, &index);
        if (rc == -EINVAL) {
            return tv_request_refuse_item(reader, TV_WRONG_TYPE, index, "an integer is expected");
        }
        if (rc == -ERANGE) {
            return tv_request_refuse_item(reader, TV_WRONG_VALUE, index, "integer out of range");
        }
        rows->kind = TV_ROWS_LIST;
        return rc < 0 ? rc : check_nodes(reader, rows);
    }
    if (tv_json_type(value) != TV_JSON_STRING) {
        return tv_request_refuse(reader, TV_WRONG_TYPE, "a word or a list of nodes is expected");
    }
    rc = tv_request_word(reader, value, word);
    if (rc < 0) {
        return rc;
    }
    if (tv_request_rows_kind_from(word, &rows->kind) < 0) {
        return tv_request_refuse(reader, TV_WRONG_VALUE, "stop, path or all is expected");
    }
    return 0;
}

static TV_REQUEST_READER(read_dtype)
{
    enum tv_tensor_dtype *dtype = (enum tv_tensor_dtype *)(void *)((char *)base + field->offset);
    char word[16];
    int rc = tv_request_word(reader, value, word);

    if (rc == 0 && tv_request_dtype_from(word, TV_TENSOR_F16, dtype) < 0) {
        return tv_request_refuse(reader, TV_WRONG_VALUE, "f32, bf16 or f16 is expected");
    }
    return rc;
}

TV_REQUEST_READER(tv_request_read_via)
{
    char word[16];
    int rc = tv_request_word(reader, value, word), fetch;

    if (rc < 0) {
        return rc;
    }
    fetch = strcmp(word, "fetch") == 0;
    if (!fetch && strcmp(word, "inline") != 0) {
        return tv_request_refuse(reader, TV_WRONG_VALUE, "inline or fetch is expected");
    }
    if (fetch && reader->request->kind != TV_CALL_VERIFY) {
        return tv_request_refuse(reader, TV_WRONG_VALUE, "only inline without a session");
    }
    *(int *)(void *)((char *)base + field->offset) = fetch;
    return 0;
}

int tv_request_rows_copy(const struct tv_rows *rows, struct tv_rows *ret_rows)
{
    struct tv_rows copy = *rows;

    if (rows->nodes != NULL) {
        size_t bytes = (size_t)rows->count * sizeof(*rows->nodes);
        copy.nodes = malloc(bytes);
        if (copy.nodes == NULL) {
            return -ENOMEM;
        }
        memcpy(copy.nodes, rows->nodes, bytes);
    }
    *ret_rows = copy;
    return 0;
}

static TV_REQUEST_READER(read_logits)
{
    static const struct tv_request_field fields[] = {
        {"rows", 0, tv_request_read_rows, offsetof(struct tv_want, logits_rows), 0, 0},
        {"dtype", 0, read_dtype, offsetof(struct tv_want, logits_dtype), 0, 0},
        {"via", 0, tv_request_read_via, offsetof(struct tv_want, logits_fetch), 0, 0},
    };
    struct tv_want *want = base;
    int rc = tv_request_read_object(reader, value, fields, COUNT_OF(fields), want);

    (void)field; /* its own table */
    want->logits = 1;
    if (rc < 0 || (reader->seen & 1u)) {
        return rc;
    }
    return tv_request_rows_copy(&want->rows, &want->logits_rows); /* want.rows is read before */
}

/* The most rows a set can have in this tree. */
static uint64_t rows_most(const struct tv_rows *rows, const struct tv_tree *tree)
{
    switch (rows->kind) {
    case TV_ROWS_STOP:
        return 1;
    case TV_ROWS_ALL:
        return (uint64_t)tree->count;
    case TV_ROWS_LIST:
        return (uint64_t)rows->count;
    default:
        return (uint64_t)tree->depth + 1;
    }
}

/* A server whose acceptance is synthetic cannot say what its tokens' chances were. */
static TV_REQUEST_READER(read_logprobs)
{
    int rc = tv_request_read_flag(reader, value, field, base);

    if (rc == 0 && reader->limits->no_logprobs && ((const struct tv_want *)base)->logprobs) {
        return tv_request_refuse(reader, TV_WRONG_VALUE,
                                 "the tokens of synthetic acceptance have no log-probability");
    }
    return rc;
}

static int check_inline_tree(struct tv_request_reader *reader, struct tv_want *want,
                             const struct tv_tree *tree)
{
    uint64_t bytes = 0, fetched = 0;

    if (want->logits && want->logits_fetch) {
        fetched = rows_most(&want->logits_rows, tree) * (uint64_t)reader->limits->tree.vocab * 4;
    } else if (want->logits) {
        bytes += rows_most(&want->logits_rows, tree) * (uint64_t)reader->limits->tree.vocab *
                 (want->logits_dtype == TV_TENSOR_F32 ? 4 : 2);
    }
    if (want->hidden.fetch) { /* kept as f32, whatever is asked for */
        fetched += tv_request_hidden_values(&want->hidden, reader->limits,
                                            rows_most(&want->hidden.rows, tree)) *
                   4;
    } else {
        bytes += tv_request_hidden_values(&want->hidden, reader->limits,
                                          rows_most(&want->hidden.rows, tree)) *
                 tv_tensor_dtype_bytes(want->hidden.dtype);
    }
    if (want->top_k > 0) {
        bytes += rows_most(&want->rows, tree) * ((uint64_t)want->top_k * 8 + 4);
    }
    if (bytes > reader->limits->inline_bytes) {
        return tv_request_refuse(
            reader, TV_WRONG_VALUE, "inline blocks of up to %llu bytes are over the limit of %llu",
            (unsigned long long)bytes, (unsigned long long)reader->limits->inline_bytes);
    }
    if (reader->limits->fetch_bytes > 0 && fetched > reader->limits->fetch_bytes) {
        return tv_request_refuse(
            reader, TV_WRONG_VALUE, "rows to fetch of up to %llu bytes are over the limit of %llu",
            (unsigned long long)fetched, (unsigned long long)reader->limits->fetch_bytes);
    }
    want->fetch_bytes_most = fetched > want->fetch_bytes_most ? fetched : want->fetch_bytes_most;
    want->inline_bytes_most = bytes > want->inline_bytes_most ? bytes : want->inline_bytes_most;
    return 0;
}

/* Whether the blocks fit must not depend on the outcome, so the longest path counts. */
static int check_inline(struct tv_request_reader *reader, struct tv_want *want)
{
    int rc = 0;

    for (int32_t i = 0; i < tree_count(reader->request) && rc == 0; i++) {
        rc = check_inline_tree(reader, want, tree_at(reader->request, i));
    }
    return rc;
}

static TV_REQUEST_READER(read_top_k)
{
    struct tv_request_field ranged = *field;

    if (reader->limits->tree.vocab < TV_WANT_TOP_K_MAX) {
        ranged.high = reader->limits->tree.vocab;
    }
    return tv_request_read_int32(reader, value, &ranged, base);
}

TV_REQUEST_READER(tv_request_read_want)
{
    static const struct tv_request_field fields[] = {
        {"top_k", 0, read_top_k, offsetof(struct tv_want, top_k), 0, TV_WANT_TOP_K_MAX},
        {"rows", 0, tv_request_read_rows, offsetof(struct tv_want, rows), 0, 0},
        {"logprobs", 0, read_logprobs, offsetof(struct tv_want, logprobs), 0, 0},
        {"logits", 0, read_logits, 0, 0, 0},
        {"hidden", 0, tv_request_read_hidden, 0, 0, 0},
        {"shadow", 0, tv_request_read_flag, offsetof(struct tv_want, shadow), 0, 0},
    };
    struct tv_request *request = base;
    int rc = tv_request_read_object(reader, value, fields, COUNT_OF(fields), &request->want);

    (void)field; /* its own table */
    return rc < 0 ? rc : check_inline(reader, &request->want);
}
