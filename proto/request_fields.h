/*
 * request_fields.h - table-driven reading of JSON objects into request structs; private to proto/.
 *
 * One object is read in two steps: first every member must be in the table and every required one
 * present, then the values are read in the table's order. So which fault is reported does not
 * depend on how a client orders its members, except among unknown fields.
 */
#ifndef TV_PROTO_REQUEST_FIELDS_H
#define TV_PROTO_REQUEST_FIELDS_H

#include <stddef.h>
#include <stdint.h>

#include "proto/json_read.h"
#include "proto/request.h"

#define TV_REQUEST_FIELDS_MAX 16

struct tv_request_reader {
    const struct tv_json *doc;
    const struct tv_request_limits *limits;
    struct tv_request *request;
    struct tv_problem *problem;
    char pointer[96];
    size_t pointer_bytes;
    unsigned seen; /* bit i: member i of the object read last was present */
};

/* A member: how it is read, into base + offset, and the range of numbers. All readers return 0,
 * -EINVAL with the problem set, or -ENOMEM. */
struct tv_request_field {
    const char *name;
    int required;
    int (*read)(struct tv_request_reader *reader, const struct tv_json_value *value,
                const struct tv_request_field *field, void *base);
    size_t offset;
    double low, high;
};

/* Read an object by its table; reader->seen tells which members were there. */
int tv_request_read_object(struct tv_request_reader *reader, const struct tv_json_value *value,
                           const struct tv_request_field *fields, size_t count, void *base);

/* Refuse the value at the reader's pointer, or its element `index`. */
int tv_request_refuse(struct tv_request_reader *reader, enum tv_code code, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
int tv_request_refuse_item(struct tv_request_reader *reader, enum tv_code code, size_t index,
                           const char *format, ...) __attribute__((format(printf, 4, 5)));

#define TV_REQUEST_READER(name)                                                                    \
    int name(struct tv_request_reader *reader, const struct tv_json_value *value,                  \
             const struct tv_request_field *field, void *base)

/* Scalars; low..high inclusive. */
TV_REQUEST_READER(tv_request_read_int32);
TV_REQUEST_READER(tv_request_read_flag);
TV_REQUEST_READER(tv_request_read_number);  /* double */
TV_REQUEST_READER(tv_request_read_epoch);   /* char[17] */
TV_REQUEST_READER(tv_request_read_session); /* char[32] */
TV_REQUEST_READER(tv_request_read_salt);
TV_REQUEST_READER(tv_request_read_rule);
TV_REQUEST_READER(tv_request_read_digest); /* expected_digest of the request */
TV_REQUEST_READER(tv_request_read_token);  /* int32, below the vocabulary */
TV_REQUEST_READER(tv_request_read_seed);   /* struct tv_sampling_request at offset */
/* Parts with a table of their own; they write to the request. */
TV_REQUEST_READER(tv_request_read_tokens);
TV_REQUEST_READER(tv_request_read_tokens_b64);
TV_REQUEST_READER(tv_request_read_sampling);
TV_REQUEST_READER(tv_request_read_stop);
TV_REQUEST_READER(tv_request_read_tree);
TV_REQUEST_READER(tv_request_read_want);
TV_REQUEST_READER(tv_request_read_prompt_want); /* of a create */
TV_REQUEST_READER(tv_request_read_items);       /* request_batch.c */
/* Everything at its default. */
void tv_request_init(struct tv_request *request, enum tv_call_kind kind);
/* The body of a verify, which names its session when it is an item of a batch. */
int tv_request_read_verify(struct tv_request_reader *reader, const struct tv_json_value *root,
                           int is_item);
void tv_request_items_finish(struct tv_request *request);
TV_REQUEST_READER(tv_request_read_if);           /* seq, leaf, pending */
TV_REQUEST_READER(tv_request_read_if_seq);       /* beside alternatives: seq alone */
TV_REQUEST_READER(tv_request_read_alternatives); /* each with its guess and its tree */
TV_REQUEST_READER(tv_request_refuse_beside);     /* what alternatives stand instead of */
/* What seq, the guesses and the trees of a conditional verify say of each other. */
int tv_request_check_if(struct tv_request_reader *reader);
/* request_draft.c: into the draft of base, a tree whose tokens are read. */
TV_REQUEST_READER(tv_request_read_q_topk);
TV_REQUEST_READER(tv_request_read_q_dense);
/* Base64 of little-endian words of 4 bytes: *ret_words malloc'd, the caller's. */
int tv_request_read_words(struct tv_request_reader *reader, const struct tv_json_value *value,
                          uint32_t **ret_words, size_t *ret_count);
TV_REQUEST_READER(tv_request_read_commit);      /* "auto" or "hold" */
TV_REQUEST_READER(tv_request_read_commit_prev); /* seq, path, next */
TV_REQUEST_READER(tv_request_read_path);
TV_REQUEST_READER(tv_request_read_next);
/* A path with its next token, or neither; pointer: of the object they stand in. */
int tv_request_check_path(struct tv_request_reader *reader, const char *pointer);

/* request_want.c: a set of rows of the tree, at the offset; via, an int: 1 for fetch. */
TV_REQUEST_READER(tv_request_read_rows);
TV_REQUEST_READER(tv_request_read_via);
/* A short string as a terminated copy; longer ones, which cannot be one of our words, as "". */
int tv_request_word(struct tv_request_reader *reader, const struct tv_json_value *value,
                    char ret_word[16]);
/* Rows that were not named are those of want.rows: a copy. 0 or -ENOMEM. */
int tv_request_rows_copy(const struct tv_rows *rows, struct tv_rows *ret_rows);
/* request_hidden.c: want.hidden of a round, into struct tv_want. */
TV_REQUEST_READER(tv_request_read_hidden);
/* Values of the block of so many rows; 0 when none is wanted. */
uint64_t tv_request_hidden_values(const struct tv_want_hidden *hidden,
                                  const struct tv_request_limits *limits, uint64_t rows);
/* Does the block that a create asks for fit? With the prompt's length known. */
int tv_request_check_prompt_hidden(struct tv_request_reader *reader, int32_t prompt_len);

/* 0 when text is one of the names, -EINVAL otherwise; dtypes up to `last`. */
int tv_request_dtype_from(const char *text, enum tv_tensor_dtype last,
                          enum tv_tensor_dtype *ret_dtype);
int tv_request_rows_kind_from(const char *text, enum tv_rows_kind *ret_kind);

#endif
