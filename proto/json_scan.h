/*
 * json_scan.h - the strict scanner under json_read.c; private to proto/.
 *
 * One pass, no recursion: decides whether a text is JSON as this project allows it, and writes the
 * control text: the same value with canonical strings, in which every number, long array of numbers
 * and long plain string is replaced by the index of its span in the original text.
 */
#ifndef TV_PROTO_JSON_SCAN_H
#define TV_PROTO_JSON_SCAN_H

#include <stddef.h>
#include <stdint.h>

#include "proto/json_read.h"

#define TV_JSON_DEPTH_CAP        64  /* depth_max may not exceed it */
#define TV_JSON_NUMBER_BYTES_MAX 512 /* one number's text */
#define TV_JSON_LONG_STRING      256 /* plain strings from here on stay in the text */
#define TV_JSON_TEXT_BYTES_MAX   (256u << 20)
#define TV_JSON_SPANS_INLINE     32
#define TV_JSON_CONTROL_INLINE   1024
#define TV_JSON_NAMES_INLINE     64 /* a power of two */

enum tv_json_span_kind { TV_JSON_SPAN_NUMBER, TV_JSON_SPAN_NUMBERS, TV_JSON_SPAN_STRING };

/* A piece of the original text: a number, the inside of [..] with count numbers, or the inside of
 * "..". */
struct tv_json_span {
    const char *text;
    size_t bytes, count;
    enum tv_json_span_kind kind;
};

struct tv_json_name {
    uint32_t hash, object, offset, bytes; /* object 0: a free slot; offset into the control text */
};

struct tv_json_scan {
    const char *text, *at, *end;
    struct tv_json_limits limits;
    size_t value_count, node_count;
    int depth;
    uint32_t object_count, name_count, name_capacity;
    uint8_t is_object[TV_JSON_DEPTH_CAP + 1];
    uint32_t object[TV_JSON_DEPTH_CAP + 1];

    char *control; /* owned unless control_inline */
    size_t control_bytes, control_capacity;
    struct tv_json_span *spans; /* owned unless spans_inline */
    size_t span_count, span_capacity;
    struct tv_json_name *names; /* owned unless names_inline */

    struct tv_json_error error;
    int failed; /* 0, -EINVAL (error set) or -ENOMEM */

    char control_inline[TV_JSON_CONTROL_INLINE];
    struct tv_json_span spans_inline[TV_JSON_SPANS_INLINE];
    struct tv_json_name names_inline[TV_JSON_NAMES_INLINE];
};

/* Scan the text; returns scan->failed. The caller finishes the scan in any case. */
int tv_json_scan_run(struct tv_json_scan *scan, const char *text, size_t bytes,
                     const struct tv_json_limits *limits);
void tv_json_scan_finish(struct tv_json_scan *scan);

/* Parts of the scanner, used by its two files. The first fault stays. */
void tv_json_scan_refuse(struct tv_json_scan *scan, const char *what);
void tv_json_scan_emit(struct tv_json_scan *scan, const char *data, size_t bytes);
void tv_json_scan_emit_char(struct tv_json_scan *scan, char c);
/* Record a span and write its index in place of the value. */
void tv_json_scan_emit_span(struct tv_json_scan *scan, enum tv_json_span_kind kind,
                            const char *text, size_t bytes, size_t count);
/* At an opening quote; the control text receives the string with its quotes, canonical. */
void tv_json_scan_string(struct tv_json_scan *scan, int is_name);

/* Length of the number that starts at `at`, 0 when none does. */
size_t tv_json_scan_number(const char *at, const char *end);

#endif
