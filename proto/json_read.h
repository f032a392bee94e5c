/*
 * json_read.h - strict JSON reading; the only user of cJSON.
 *
 * Accepts RFC 8259 texts in UTF-8 with nothing around them, nesting up to a limit, no duplicate
 * members, no NUL; integers keep their text, so none is ever rounded or saturated. Values point
 * into the document and live as long as it.
 */
#ifndef TV_PROTO_JSON_READ_H
#define TV_PROTO_JSON_READ_H

#include <stddef.h>
#include <stdint.h>

enum tv_json_type {
    TV_JSON_NULL,
    TV_JSON_FALSE,
    TV_JSON_TRUE,
    TV_JSON_NUMBER,
    TV_JSON_STRING,
    TV_JSON_ARRAY,
    TV_JSON_OBJECT,
};

struct tv_json;       /* a document */
struct tv_json_value; /* a value inside one */

/* Arrays of more numbers than this, and of nothing else, have no children (see tv_json_first). */
#define TV_JSON_CHILDREN_MAX 16

struct tv_json_limits {
    int depth_max;     /* containers, at most 64; TV_JSON_DEPTH_MAX for requests */
    size_t values_max; /* values in the whole text, array elements included */
    size_t nodes_max;  /* the same without the elements of long arrays of numbers; 0 = values_max */
    int borrow_text;   /* 1: the document points into text, which must outlive it; 0: it copies */
};

struct tv_json_error {
    size_t offset;    /* byte where the text went wrong */
    const char *what; /* static text */
};

/* 0; -EINVAL with *ret_error; -ENOMEM. text need not be NUL-terminated and, unless borrowed, may be
 * freed after. Refused too: duplicate members, U+0000, lone surrogates, a byte-order mark, numbers
 * of more than 512 characters. */
int tv_json_parse(const char *text, size_t bytes, const struct tv_json_limits *limits,
                  struct tv_json **ret_doc, struct tv_json_error *ret_error);
void tv_json_destroy(struct tv_json *doc);
const struct tv_json_value *tv_json_root(const struct tv_json *doc);

enum tv_json_type tv_json_type(const struct tv_json_value *value);
/* Case-sensitive member; NULL when absent or when value is not an object. */
const struct tv_json_value *tv_json_member(const struct tv_json_value *object, const char *name);
/* First child of an object or array, next sibling, member name of a child of an object. An array of
 * more than TV_JSON_CHILDREN_MAX numbers (and nothing else) has no children: it is never built as
 * nodes and is read with tv_json_int32_array. */
const struct tv_json_value *tv_json_first(const struct tv_json_value *container);
const struct tv_json_value *tv_json_next(const struct tv_json_value *child);
const char *tv_json_name(const struct tv_json_value *child);
/* Elements of an array or members of an object. */
size_t tv_json_count(const struct tv_json_value *container);

/* NULL unless a string; *ret_bytes (may be NULL) is its length; never contains NUL. Terminated by
 * NUL, except strings of 256 bytes and more in a document that borrows its text. */
const char *tv_json_string(const struct tv_json_value *value, size_t *ret_bytes);
/* 0; -EINVAL: not a number in the form -?(0|[1-9][0-9]*), or "-0"; -ERANGE: outside int64. */
int tv_json_int(const struct tv_json *doc, const struct tv_json_value *value, int64_t *ret);
/* 0; -EINVAL: not a number; -ERANGE: not finite as binary64. */
int tv_json_double(const struct tv_json *doc, const struct tv_json_value *value, double *ret);
/* An array of int32 (exact form as tv_json_int): *ret_items is malloc'd, the caller's (NULL when
 * empty). -EINVAL/-ERANGE name the element in *ret_index. */
int tv_json_int32_array(const struct tv_json *doc, const struct tv_json_value *value,
                        int32_t **ret_items, int32_t *ret_count, size_t *ret_index);

#endif
