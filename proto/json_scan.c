/*
 * json_scan.c - the strict scanner: RFC 8259 grammar, UTF-8, depth, counts, duplicate members.
 *
 * Refuses what RFC 8259 leaves open too: byte-order marks, U+0000, lone surrogates, duplicate
 * members, very long numbers. Never recurses, so its stack use does not depend on the text.
 */
#include "proto/json_scan.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

enum state { STATE_VALUE, STATE_MEMBER, STATE_AFTER, STATE_DONE };

void tv_json_scan_refuse(struct tv_json_scan *scan, const char *what)
{
    if (scan->failed == 0) {
        scan->failed = -EINVAL;
        scan->error.offset = (size_t)(scan->at - scan->text);
        scan->error.what = what;
    }
}

static void skip_space(struct tv_json_scan *scan)
{
    while (scan->at < scan->end &&
           (*scan->at == ' ' || *scan->at == '\n' || *scan->at == '\t' || *scan->at == '\r')) {
        scan->at++;
    }
}

static int grow_control(struct tv_json_scan *scan, size_t more)
{
    size_t capacity = scan->control_capacity;
    char *grown;

    while (capacity - scan->control_bytes < more) {
        capacity *= 2;
    }
    grown = realloc(scan->control == scan->control_inline ? NULL : scan->control, capacity);
    if (grown == NULL) {
        scan->failed = -ENOMEM;
        return -ENOMEM;
    }
    if (scan->control == scan->control_inline) {
        memcpy(grown, scan->control_inline, scan->control_bytes);
    }
    scan->control = grown;
    scan->control_capacity = capacity;
    return 0;
}

void tv_json_scan_emit(struct tv_json_scan *scan, const char *data, size_t bytes)
{
    if (scan->control_capacity - scan->control_bytes < bytes && grow_control(scan, bytes) < 0) {
        return;
    }
    memcpy(scan->control + scan->control_bytes, data, bytes);
    scan->control_bytes += bytes;
}

void tv_json_scan_emit_char(struct tv_json_scan *scan, char c)
{
    if (scan->control_capacity - scan->control_bytes < 1 && grow_control(scan, 1) < 0) {
        return;
    }
    scan->control[scan->control_bytes++] = c;
}

/* Record a span and write its index in place of the value. */
void tv_json_scan_emit_span(struct tv_json_scan *scan, enum tv_json_span_kind kind,
                            const char *text, size_t bytes, size_t count)
{
    char digits[20];
    size_t at = sizeof(digits), index = scan->span_count;

    if (scan->span_count == scan->span_capacity) {
        size_t capacity = scan->span_capacity * 2;
        int is_inline = scan->spans == scan->spans_inline;
        struct tv_json_span *grown =
            realloc(is_inline ? NULL : scan->spans, capacity * sizeof(*grown));
        if (grown == NULL) {
            scan->failed = -ENOMEM;
            return;
        }
        if (is_inline) {
            memcpy(grown, scan->spans_inline, scan->span_count * sizeof(*grown));
        }
        scan->spans = grown;
        scan->span_capacity = capacity;
    }
    scan->spans[scan->span_count++] =
        (struct tv_json_span){.text = text, .bytes = bytes, .count = count, .kind = kind};
    do {
        digits[--at] = (char)('0' + index % 10);
        index /= 10;
    } while (index > 0);
    tv_json_scan_emit(scan, digits + at, sizeof(digits) - at);
}

/* Count `values` more values, `nodes` of which become nodes of the tree. */
static void count_values(struct tv_json_scan *scan, size_t values, size_t nodes)
{
    scan->value_count += values;
    scan->node_count += nodes;
    if (scan->value_count > scan->limits.values_max ||
        (scan->limits.nodes_max > 0 && scan->node_count > scan->limits.nodes_max)) {
        tv_json_scan_refuse(scan, "too many values");
    }
}

static int is_digit(char c)
{
    return c >= '0' && c <= '9';
}

size_t tv_json_scan_number(const char *at, const char *end)
{
    const char *p = at;

    if (p < end && *p == '-') {
        p++;
    }
    if (p == end || !is_digit(*p)) {
        return 0;
    }
    if (*p++ != '0') {
        while (p < end && is_digit(*p)) {
            p++;
        }
    }
    if (p < end && *p == '.') {
        p++;
        if (p == end || !is_digit(*p)) {
            return 0;
        }
        while (p < end && is_digit(*p)) {
            p++;
        }
    }
    if (p < end && (*p == 'e' || *p == 'E')) {
        p++;
        if (p < end && (*p == '+' || *p == '-')) {
            p++;
        }
        if (p == end || !is_digit(*p)) {
            return 0;
        }
        while (p < end && is_digit(*p)) {
            p++;
        }
    }
    return (size_t)(p - at);
}

static void scan_number(struct tv_json_scan *scan)
{
    const char *start = scan->at;
    size_t bytes = tv_json_scan_number(start, scan->end);

    if (bytes == 0) {
        tv_json_scan_refuse(scan, "not a number");
        return;
    }
    if (bytes > TV_JSON_NUMBER_BYTES_MAX) {
        tv_json_scan_refuse(scan, "number too long");
        return;
    }
    scan->at += bytes;
    tv_json_scan_emit_span(scan, TV_JSON_SPAN_NUMBER, start, bytes, 1);
}

/* At '[': take a long array of nothing but numbers as one span. 1 when taken (or refused); 0 when
 * the array is something else, and nothing has moved. */
static int scan_numbers(struct tv_json_scan *scan)
{
    const char *start = scan->at;
    size_t count = 0;

    scan->at++;
    for (;;) {
        size_t bytes;

        skip_space(scan);
        bytes = tv_json_scan_number(scan->at, scan->end);
        if (bytes == 0 || bytes > TV_JSON_NUMBER_BYTES_MAX) {
            scan->at = start; /* the general path names the fault */
            return 0;
        }
        scan->at += bytes;
        count++;
        skip_space(scan);
        if (scan->at == scan->end || (*scan->at != ',' && *scan->at != ']')) {
            scan->at = start;
            return 0;
        }
        if (*scan->at++ == ']') {
            break;
        }
    }
    if (count <= TV_JSON_CHILDREN_MAX) {
        scan->at = start;
        return 0;
    }
    count_values(scan, count + 1, 1);
    tv_json_scan_emit_span(scan, TV_JSON_SPAN_NUMBERS, start + 1, (size_t)(scan->at - start) - 2,
                           count);
    return 1;
}

static int grow_names(struct tv_json_scan *scan)
{
    uint32_t capacity = scan->name_capacity * 2, i;
    struct tv_json_name *grown = calloc(capacity, sizeof(*grown));

    if (grown == NULL) {
        scan->failed = -ENOMEM;
        return -ENOMEM;
    }
    for (i = 0; i < scan->name_capacity; i++) {
        if (scan->names[i].object != 0) {
            uint32_t slot = scan->names[i].hash & (capacity - 1);
            while (grown[slot].object != 0) {
                slot = (slot + 1) & (capacity - 1);
            }
            grown[slot] = scan->names[i];
        }
    }
    if (scan->names != scan->names_inline) {
        free(scan->names);
    }
    scan->names = grown;
    scan->name_capacity = capacity;
    return 0;
}

/* The name that stands at control[offset, offset + bytes) belongs to `object`: refuse it when that
 * object has it already. Canonical text is equal exactly when the decoded names are. */
static void check_duplicate(struct tv_json_scan *scan, uint32_t object, size_t offset, size_t bytes)
{
    const char *name = scan->control + offset;
    uint32_t hash = 2166136261u ^ object * 0x9e3779b1u, slot;
    size_t i;

    if (scan->name_count >= scan->name_capacity / 2 && grow_names(scan) < 0) {
        return;
    }
    for (i = 0; i < bytes; i++) {
        hash = (hash ^ (unsigned char)name[i]) * 16777619u;
    }
    hash = (hash ^ hash >> 15) * 0x85ebca6bu;
    hash ^= hash >> 13;
    slot = hash & (scan->name_capacity - 1);
    while (scan->names[slot].object != 0) {
        const struct tv_json_name *other = &scan->names[slot];
        if (other->hash == hash && other->object == object && other->bytes == bytes &&
            memcmp(scan->control + other->offset, name, bytes) == 0) {
            tv_json_scan_refuse(scan, "duplicate member");
            return;
        }
        slot = (slot + 1) & (scan->name_capacity - 1);
    }
    scan->names[slot] = (struct tv_json_name){
        .hash = hash, .object = object, .offset = (uint32_t)offset, .bytes = (uint32_t)bytes};
    scan->name_count++;
}

static enum state scan_member(struct tv_json_scan *scan)
{
    size_t offset = scan->control_bytes;

    if (scan->at == scan->end || *scan->at != '"') {
        tv_json_scan_refuse(scan, "a member name must be a string");
        return STATE_DONE;
    }
    tv_json_scan_string(scan, 1);
    if (scan->failed == 0) {
        check_duplicate(scan, scan->object[scan->depth], offset, scan->control_bytes - offset);
    }
    skip_space(scan);
    if (scan->at == scan->end || *scan->at != ':') {
        tv_json_scan_refuse(scan, "':' expected");
        return STATE_DONE;
    }
    scan->at++;
    tv_json_scan_emit_char(scan, ':');
    skip_space(scan);
    return STATE_VALUE;
}

static enum state scan_open(struct tv_json_scan *scan)
{
    int is_object = *scan->at == '{';

    if (scan->depth >= scan->limits.depth_max) {
        tv_json_scan_refuse(scan, "nested too deep");
        return STATE_DONE;
    }
    if (!is_object && scan_numbers(scan)) {
        return STATE_AFTER;
    }
    count_values(scan, 1, 1);
    scan->depth++;
    scan->is_object[scan->depth] = (uint8_t)is_object;
    scan->object[scan->depth] = is_object ? ++scan->object_count : 0;
    tv_json_scan_emit_char(scan, *scan->at++);
    skip_space(scan);
    if (scan->at < scan->end && *scan->at == (is_object ? '}' : ']')) {
        tv_json_scan_emit_char(scan, *scan->at++);
        scan->depth--;
        return STATE_AFTER;
    }
    return is_object ? STATE_MEMBER : STATE_VALUE;
}

static enum state scan_value(struct tv_json_scan *scan)
{
    static const char *const words[] = {"true", "false", "null"};
    char c;
    size_t i;

    if (scan->at == scan->end) {
        tv_json_scan_refuse(scan, "unexpected end");
        return STATE_DONE;
    }
    c = *scan->at;
    if (c == '{' || c == '[') {
        return scan_open(scan);
    }
    count_values(scan, 1, 1);
    if (c == '"') {
        tv_json_scan_string(scan, 0);
        return STATE_AFTER;
    }
    if (c == '-' || is_digit(c)) {
        scan_number(scan);
        return STATE_AFTER;
    }
    for (i = 0; i < sizeof(words) / sizeof(words[0]); i++) {
        size_t bytes = strlen(words[i]);
        if ((size_t)(scan->end - scan->at) >= bytes && memcmp(scan->at, words[i], bytes) == 0) {
            tv_json_scan_emit(scan, words[i], bytes);
            scan->at += bytes;
            return STATE_AFTER;
        }
    }
    tv_json_scan_refuse(scan, "a value was expected");
    return STATE_DONE;
}

static enum state scan_after(struct tv_json_scan *scan)
{
    int is_object = scan->is_object[scan->depth];

    skip_space(scan);
    if (scan->depth == 0) {
        if (scan->at != scan->end) {
            tv_json_scan_refuse(scan, "text after the value");
        }
        return STATE_DONE;
    }
    if (scan->at == scan->end) {
        tv_json_scan_refuse(scan, "unexpected end");
        return STATE_DONE;
    }
    if (*scan->at == ',') {
        scan->at++;
        tv_json_scan_emit_char(scan, ',');
        skip_space(scan);
        return is_object ? STATE_MEMBER : STATE_VALUE;
    }
    if (*scan->at != (is_object ? '}' : ']')) {
        tv_json_scan_refuse(scan, is_object ? "',' or '}' expected" : "',' or ']' expected");
        return STATE_DONE;
    }
    tv_json_scan_emit_char(scan, *scan->at++);
    scan->depth--;
    return STATE_AFTER;
}

int tv_json_scan_run(struct tv_json_scan *scan, const char *text, size_t bytes,
                     const struct tv_json_limits *limits)
{
    enum state state = STATE_VALUE;

    scan->text = scan->at = text;
    scan->end = text + bytes;
    scan->limits = *limits;
    scan->value_count = scan->node_count = 0;
    scan->depth = 0;
    scan->is_object[0] = 0;
    scan->object[0] = 0;
    scan->object_count = scan->name_count = 0;
    scan->control = scan->control_inline;
    scan->control_bytes = 0;
    scan->control_capacity = sizeof(scan->control_inline);
    scan->spans = scan->spans_inline;
    scan->span_count = 0;
    scan->span_capacity = TV_JSON_SPANS_INLINE;
    scan->names = scan->names_inline;
    scan->name_capacity = TV_JSON_NAMES_INLINE;
    memset(scan->names_inline, 0, sizeof(scan->names_inline));
    scan->error = (struct tv_json_error){0};
    scan->failed = 0;

    if (bytes > TV_JSON_TEXT_BYTES_MAX) {
        tv_json_scan_refuse(scan, "text too long");
    }
    skip_space(scan);
    while (scan->failed == 0 && state != STATE_DONE) {
        state = state == STATE_VALUE    ? scan_value(scan)
                : state == STATE_MEMBER ? scan_member(scan)
                                        : scan_after(scan);
    }
    return scan->failed;
}

void tv_json_scan_finish(struct tv_json_scan *scan)
{
    if (scan->control != scan->control_inline) {
        free(scan->control);
    }
    if (scan->spans != scan->spans_inline) {
        free(scan->spans);
    }
    if (scan->names != scan->names_inline) {
        free(scan->names);
    }
}
