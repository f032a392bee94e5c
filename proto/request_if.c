/*
 * request_if.c - a verify that runs only when the round before ends as guessed.
 *
 * Refuses a guess of any other round than the one before, a tree that does not begin with the
 * guessed token, a guess that is made twice, and members that the alternatives stand instead of.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "proto/request_fields.h"

#define COUNT_OF(array) (sizeof(array) / sizeof((array)[0]))
#define INT31_MAX       2147483647.0

TV_REQUEST_READER(tv_request_read_if)
{
    static const struct tv_request_field fields[] = {
        {"seq", 1, tv_request_read_int32, offsetof(struct tv_request, if_seq), 1, INT31_MAX},
        {"leaf", 1, tv_request_read_int32, offsetof(struct tv_request, guess.leaf), 0, INT31_MAX},
        {"pending", 1, tv_request_read_int32, offsetof(struct tv_request, guess.pending), 0,
         INT31_MAX},
    };
    struct tv_request *request = base;

    (void)field; /* its own table */
    request->has_if = 1;
    return tv_request_read_object(reader, value, fields, COUNT_OF(fields), request);
}

TV_REQUEST_READER(tv_request_refuse_beside)
{
    (void)value;
    (void)field;
    (void)base;
    return tv_request_refuse(reader, TV_WRONG_VALUE, "each alternative has its own");
}

TV_REQUEST_READER(tv_request_read_if_seq)
{
    static const struct tv_request_field fields[] = {
        {"seq", 1, tv_request_read_int32, offsetof(struct tv_request, if_seq), 1, INT31_MAX},
        {"leaf", 0, tv_request_refuse_beside, 0, 0, 0},
        {"pending", 0, tv_request_refuse_beside, 0, 0, 0},
    };
    struct tv_request *request = base;

    (void)field; /* its own table */
    request->has_if = 1;
    return tv_request_read_object(reader, value, fields, COUNT_OF(fields), request);
}

/* The tree's own checks name /tree; here it stands deeper. */
static void deepen(struct tv_problem *problem, size_t index)
{
    char pointer[sizeof problem->pointer];

    if (strncmp(problem->pointer, "/tree", 5) == 0) {
        memcpy(pointer, problem->pointer, sizeof pointer);
        (void)snprintf(problem->pointer, sizeof problem->pointer, "/alternatives/%zu%.64s", index,
                       pointer); /* the tree's pointers are short */
    }
}

static int read_alternative(struct tv_request_reader *reader, const struct tv_json_value *value,
                            struct tv_alternative *alternative)
{
    static const struct tv_request_field fields[] = {
        {"leaf", 1, tv_request_read_int32, offsetof(struct tv_request, guess.leaf), 0, INT31_MAX},
        {"pending", 1, tv_request_read_int32, offsetof(struct tv_request, guess.pending), 0,
         INT31_MAX},
        {"tree", 1, tv_request_read_tree, 0, 0, 0},
    };
    struct tv_request *request = reader->request;
    int rc = tv_request_read_object(reader, value, fields, COUNT_OF(fields), request);

    if (rc < 0) {
        return rc;
    }
    alternative->guess = request->guess;
    alternative->tree = request->tree;
    request->guess = (struct tv_guess){0};
    request->tree = (struct tv_tree){0};
    request->has_tree = 0;
    return 0;
}

TV_REQUEST_READER(tv_request_read_alternatives)
{
    const struct tv_json_value *item;
    struct tv_request *request = base;
    size_t before = reader->pointer_bytes, count = tv_json_count(value);
    int rc = 0;

    (void)field; /* writes two members */
    if (tv_json_type(value) != TV_JSON_ARRAY ||
        (count > 0 && tv_json_first(value) == NULL)) { /* many numbers and nothing else */
        return tv_request_refuse(reader, TV_WRONG_TYPE, "an array of objects is expected");
    }
    if (count < 1 || count > TV_ALTERNATIVES_MAX) {
        return tv_request_refuse(reader, TV_WRONG_VALUE, "from 1 to %d alternatives",
                                 TV_ALTERNATIVES_MAX);
    }
    request->alternatives = calloc(count, sizeof *request->alternatives);
    if (request->alternatives == NULL) {
        return -ENOMEM;
    }
    for (item = tv_json_first(value); item != NULL && rc == 0; item = tv_json_next(item)) {
        size_t index = (size_t)request->alternative_count;
        int used = snprintf(reader->pointer + before, sizeof reader->pointer - before, "/%zu",
                            index); /* fits: "/alternatives/31" */
        reader->pointer_bytes = before + (size_t)used;
        rc = read_alternative(reader, item, &request->alternatives[index]);
        if (rc == -EINVAL) {
            deepen(reader->problem, index);
        }
        request->alternative_count += rc == 0;
    }
    reader->pointer[before] = '\0';
    reader->pointer_bytes = before;
    return rc;
}

/* A tree begins with the token that its guess calls pending, and no guess is made twice. */
static int check_alternatives(struct tv_request_reader *reader)
{
    const struct tv_request *request = reader->request;
    char pointer[48];
    int32_t i, k;

    for (i = 0; i < request->alternative_count; i++) {
        const struct tv_alternative *one = &request->alternatives[i];
        (void)snprintf(pointer, sizeof pointer, "/alternatives/%d/pending", (int)i); /* fits */
        if (one->tree.tokens[0] != one->guess.pending) {
            tv_problem_set(reader->problem, TV_WRONG_VALUE, pointer,
                           "%s: token %d is guessed, but node 0 is token %d", pointer,
                           (int)one->guess.pending, (int)one->tree.tokens[0]);
            return -EINVAL;
        }
        for (k = 0; k < i; k++) {
            const struct tv_guess *other = &request->alternatives[k].guess;
            if (other->leaf == one->guess.leaf && other->pending == one->guess.pending) {
                tv_problem_set(reader->problem, TV_WRONG_VALUE, pointer,
                               "%s: the same guess as alternative %d", pointer, (int)k);
                return -EINVAL;
            }
        }
    }
    return 0;
}

int tv_request_check_if(struct tv_request_reader *reader)
{
    const struct tv_request *request = reader->request;

    if (!request->has_if) {
        return 0;
    }
    if (request->if_seq != request->seq - 1) {
        tv_problem_set(reader->problem, TV_WRONG_VALUE, "/if/seq",
                       "/if/seq: the round before seq %d is %d", (int)request->seq,
                       (int)request->seq - 1);
        return -EINVAL;
    }
    if (request->alternative_count > 0) {
        return check_alternatives(reader);
    }
    if (request->tree.tokens[0] != request->guess.pending) {
        tv_problem_set(reader->problem, TV_WRONG_VALUE, "/if/pending",
                       "/if/pending: token %d is guessed, but node 0 is token %d",
                       (int)request->guess.pending, (int)request->tree.tokens[0]);
        return -EINVAL;
    }
    return 0;
}
