/*
 * request_draft.c - the distributions that a tree's children were drawn from: q_topk and q_dense.
 *
 * Reads them into the tree's draft and judges them, and `commit`, against the round's rule. Refuses
 * shapes that are not the tree's and arrays of another size; what a row says is tree_draft.c's.
 */
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "proto/request_fields.h"

#define COUNT_OF(array) (sizeof(array) / sizeof((array)[0]))

/* [n, k]: a row for each node; base is the tree, whose tokens are read. */
static TV_REQUEST_READER(read_shape)
{
    struct tv_tree *tree = base;
    const struct tv_json_value *rows, *width;
    int64_t numbers[2] = {0, 0};

    (void)field; /* writes the draft's width */
    if (tv_json_type(value) != TV_JSON_ARRAY || tv_json_count(value) != 2) {
        return tv_request_refuse(reader, TV_WRONG_TYPE, "two integers are expected");
    }
    rows = tv_json_first(value);
    width = tv_json_next(rows);
    for (int i = 0; i < 2; i++) {
        int rc = tv_json_int(reader->doc, i == 0 ? rows : width, &numbers[i]);
        if (rc == -EINVAL) {
            return tv_request_refuse_item(reader, TV_WRONG_TYPE, (size_t)i,
                                          "an integer is expected");
        }
        if (rc < 0) {
            return tv_request_refuse_item(reader, TV_WRONG_VALUE, (size_t)i,
                                          "integer out of range");
        }
    }
    if (numbers[0] != tree->count) {
        return tv_request_refuse_item(reader, TV_WRONG_VALUE, 0, "%lld rows for a tree of %d nodes",
                                      (long long)numbers[0], (int)tree->count);
    }
    if (numbers[1] < 1 || numbers[1] > reader->limits->tree.vocab) {
        return tv_request_refuse_item(reader, TV_WRONG_VALUE, 1, "must be from 1 to %d",
                                      (int)reader->limits->tree.vocab);
    }
    tree->draft.width = (int32_t)numbers[1];
    return 0;
}

/* The 4-byte values of a base64 text, one for each cell of the draft. */
static int read_cells(struct tv_request_reader *reader, const struct tv_json_value *value,
                      const struct tv_tree *tree, uint32_t **ret_cells)
{
    uint32_t *cells = NULL;
    size_t count = 0, wanted = (size_t)tree->count * (size_t)tree->draft.width;
    int rc = tv_request_read_words(reader, value, &cells, &count);

    if (rc < 0) {
        return rc;
    }
    *ret_cells = cells;
    if (count != wanted) {
        return tv_request_refuse(reader, TV_WRONG_VALUE, "%zu values, the shape has %zu", count,
                                 wanted);
    }
    return 0;
}

static TV_REQUEST_READER(read_ids)
{
    struct tv_tree *tree = base;

    (void)field; /* writes the draft */
    return read_cells(reader, value, tree, (uint32_t **)(void *)&tree->draft.ids);
}

static TV_REQUEST_READER(read_probs)
{
    struct tv_tree *tree = base;

    (void)field; /* writes the draft */
    return read_cells(reader, value, tree, (uint32_t **)(void *)&tree->draft.probs);
}

static TV_REQUEST_READER(read_f32)
{
    size_t bytes = 0;
    const char *text = tv_json_string(value, &bytes);

    (void)field; /* nothing is kept: there is one dtype */
    (void)base;
    if (text == NULL) {
        return tv_request_refuse(reader, TV_WRONG_TYPE, "a string is expected");
    }
    if (bytes != 3 || memcmp(text, "f32", 3) != 0) {
        return tv_request_refuse(reader, TV_WRONG_VALUE, "f32 is expected");
    }
    return 0;
}

TV_REQUEST_READER(tv_request_read_q_topk)
{
    static const struct tv_request_field fields[] = {
        {"shape", 1, read_shape, 0, 0, 0},
        {"ids_b64", 1, read_ids, 0, 0, 0},
        {"probs_b64", 1, read_probs, 0, 0, 0},
    };

    (void)field; /* its own table */
    return tv_request_read_object(reader, value, fields, COUNT_OF(fields), base);
}

TV_REQUEST_READER(tv_request_read_q_dense)
{
    static const struct tv_request_field fields[] = {
        {"shape", 1, read_shape, 0, 0, 0},
        {"dtype", 1, read_f32, 0, 0, 0},
        {"data_b64", 1, read_probs, 0, 0, 0},
    };
    struct tv_tree *tree = base;
    int rc;

    (void)field; /* its own table */
    if (tree->draft.width > 0) {
        return tv_request_refuse(reader, TV_WRONG_VALUE, "q_topk or q_dense, not both");
    }
    rc = tv_request_read_object(reader, value, fields, COUNT_OF(fields), base);
    if (rc == 0 && tree->draft.width != reader->limits->tree.vocab) {
        return tv_request_refuse(reader, TV_WRONG_VALUE,
                                 "rows of %d entries, the vocabulary has %d",
                                 (int)tree->draft.width, (int)reader->limits->tree.vocab);
    }
    return rc;
}

/* One tree, which stands at `prefix`. */
static int check_tree(const struct tv_tree *tree, const char *prefix, enum tv_rule rule,
                      struct tv_problem *problem)
{
    char pointer[64];

    (void)snprintf(pointer, sizeof(pointer), "%s/tree%s", prefix,
                   tree->draft.width == 0    ? ""
                   : tree->draft.ids != NULL ? "/q_topk"
                                             : "/q_dense"); /* fits */
    if (rule != TV_RULE_RATIO_WOR && tree->draft.width > 0) {
        tv_problem_set(problem, TV_WRONG_VALUE, pointer, "%s: only for rule ratio_wor", pointer);
        return -EINVAL;
    }
    if (rule == TV_RULE_RATIO_WOR && tree->draft.width == 0 && tree->count > 1) {
        tv_problem_set(problem, TV_WRONG_VALUE, pointer,
                       "%s: rule ratio_wor needs q_topk or q_dense", pointer);
        return -EINVAL;
    }
    return 0;
}

int tv_request_check_rule(const struct tv_request *request, enum tv_rule rule,
                          struct tv_problem *problem)
{
    char prefix[32];
    int rc = check_tree(&request->tree, "", rule, problem);

    for (int32_t i = 0; i < request->alternative_count && rc == 0; i++) {
        (void)snprintf(prefix, sizeof(prefix), "/alternatives/%d", (int)i); /* fits */
        rc = check_tree(&request->alternatives[i].tree, prefix, rule, problem);
    }
    if (rc == 0 && rule == TV_RULE_CLIENT && request->commits) {
        tv_problem_set(problem, TV_WRONG_VALUE, "/commit",
                       "/commit: rule client always holds; the client settles the round");
        rc = -EINVAL;
    }
    return rc;
}
