/*
 * json_read.c - documents over the strict scanner; the only file that knows cJSON.
 *
 * cJSON builds the tree of the control text alone, where every number is the index of a span of the
 * original text. After parsing, each such item is tied to its span, so no value ever passes through
 * cJSON's doubles. Values handed out are cJSON items behind an opaque type. Documents of different
 * threads are independent: all that cJSON shares is the place of its last failure, which nothing
 * here reads.
 */
#include "proto/json_read.h"

#include <cjson/cJSON.h>
#include <errno.h>
#include <locale.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "proto/json_scan.h"

struct tv_json {
    cJSON *root;
    char *copy; /* owned text, NULL when borrowed */
    struct tv_json_span *spans;
    struct tv_json_span spans_inline[TV_JSON_SPANS_INLINE];
};

static const cJSON *item_of(const struct tv_json_value *value)
{
    return (const cJSON *)(const void *)value;
}

static const struct tv_json_value *value_of(const cJSON *item)
{
    return (const struct tv_json_value *)(const void *)item;
}

/* The span behind a value, NULL for values that have none. */
static const struct tv_json_span *span_of(const struct tv_json_value *value)
{
    const cJSON *item = item_of(value);

    if (!cJSON_IsNumber(item)) {
        return NULL;
    }
    return (const struct tv_json_span *)(const void *)item->valuestring;
}

/* Tie every number of the tree to the span it names. The reference flag keeps cJSON_Delete from
 * freeing the pointer. */
static void tie_spans(struct tv_json *doc)
{
    cJSON *parents[TV_JSON_DEPTH_CAP], *item = doc->root;
    int depth = 0;

    while (item != NULL) {
        if (cJSON_IsNumber(item)) {
            item->valuestring = (char *)(void *)&doc->spans[item->valueint];
            item->type |= cJSON_IsReference;
        }
        if (item->child != NULL && (item->type & cJSON_IsReference) == 0) {
            parents[depth++] = item;
            item = item->child;
            continue;
        }
        while (item->next == NULL && depth > 0) {
            item = parents[--depth];
        }
        item = item->next;
    }
}

/* Take the spans of `text` over from the scan; those of an own copy point into it, where long
 * strings get their terminator. */
static void take_spans(struct tv_json *doc, struct tv_json_scan *scan, const char *text)
{
    size_t i;

    if (scan->spans == scan->spans_inline) {
        memcpy(doc->spans_inline, scan->spans, scan->span_count * sizeof(*scan->spans));
        doc->spans = doc->spans_inline;
    } else {
        doc->spans = scan->spans;
        scan->spans = scan->spans_inline;
    }
    if (doc->copy == NULL) {
        return;
    }
    for (i = 0; i < scan->span_count; i++) {
        struct tv_json_span *span = &doc->spans[i];
        char *own = doc->copy + (span->text - text);
        span->text = own;
        if (span->kind == TV_JSON_SPAN_STRING) {
            own[span->bytes] = '\0'; /* was the quote */
        }
    }
}

int tv_json_parse(const char *text, size_t bytes, const struct tv_json_limits *limits,
                  struct tv_json **ret_doc, struct tv_json_error *ret_error)
{
    struct tv_json_scan scan;
    struct tv_json *doc = malloc(sizeof(*doc));
    int rc;

    if (doc == NULL) {
        return -ENOMEM;
    }
    doc->root = NULL;
    doc->copy = NULL;
    doc->spans = doc->spans_inline;
    rc = tv_json_scan_run(&scan, text, bytes, limits);
    if (rc < 0) {
        *ret_error = scan.error;
        goto finish;
    }
    if (!limits->borrow_text) { /* what is refused is not copied */
        doc->copy = malloc(bytes + 1);
        if (doc->copy == NULL) {
            rc = -ENOMEM;
            goto finish;
        }
        memcpy(doc->copy, text, bytes);
    }
    take_spans(doc, &scan, text);
    doc->root = cJSON_ParseWithLengthOpts(scan.control, scan.control_bytes, NULL, 0);
    if (doc->root == NULL) {
        rc = -ENOMEM; /* the control text is valid by construction */
        goto finish;
    }
    tie_spans(doc);
    *ret_doc = doc;
    doc = NULL;

finish:
    tv_json_scan_finish(&scan);
    tv_json_destroy(doc);
    return rc;
}

void tv_json_destroy(struct tv_json *doc)
{
    if (doc == NULL) {
        return;
    }
    cJSON_Delete(doc->root);
    if (doc->spans != doc->spans_inline) {
        free(doc->spans);
    }
    free(doc->copy);
    free(doc);
}

const struct tv_json_value *tv_json_root(const struct tv_json *doc)
{
    return value_of(doc->root);
}

enum tv_json_type tv_json_type(const struct tv_json_value *value)
{
    const cJSON *item = item_of(value);
    const struct tv_json_span *span = span_of(value);

    if (span != NULL) {
        return span->kind == TV_JSON_SPAN_NUMBER    ? TV_JSON_NUMBER
               : span->kind == TV_JSON_SPAN_NUMBERS ? TV_JSON_ARRAY
                                                    : TV_JSON_STRING;
    }
    switch (item->type & 0xff) {
    case cJSON_False:
        return TV_JSON_FALSE;
    case cJSON_True:
        return TV_JSON_TRUE;
    case cJSON_String:
        return TV_JSON_STRING;
    case cJSON_Array:
        return TV_JSON_ARRAY;
    case cJSON_Object:
        return TV_JSON_OBJECT;
    default:
        return TV_JSON_NULL;
    }
}

const struct tv_json_value *tv_json_first(const struct tv_json_value *container)
{
    const cJSON *item = item_of(container);

    return cJSON_IsArray(item) || cJSON_IsObject(item) ? value_of(item->child) : NULL;
}

const struct tv_json_value *tv_json_next(const struct tv_json_value *child)
{
    return value_of(item_of(child)->next);
}

const char *tv_json_name(const struct tv_json_value *child)
{
    return item_of(child)->string;
}

const struct tv_json_value *tv_json_member(const struct tv_json_value *object, const char *name)
{
    const cJSON *child;

    if (!cJSON_IsObject(item_of(object))) {
        return NULL;
    }
    for (child = item_of(object)->child; child != NULL; child = child->next) {
        if (strcmp(child->string, name) == 0) {
            return value_of(child);
        }
    }
    return NULL;
}

size_t tv_json_count(const struct tv_json_value *container)
{
    const struct tv_json_span *span = span_of(container);
    const struct tv_json_value *child;
    size_t count = 0;

    if (span != NULL) {
        return span->kind == TV_JSON_SPAN_NUMBERS ? span->count : 0;
    }
    for (child = tv_json_first(container); child != NULL; child = tv_json_next(child)) {
        count++;
    }
    return count;
}

const char *tv_json_string(const struct tv_json_value *value, size_t *ret_bytes)
{
    const cJSON *item = item_of(value);
    const struct tv_json_span *span = span_of(value);

    if (span != NULL) {
        if (span->kind != TV_JSON_SPAN_STRING) {
            return NULL;
        }
        if (ret_bytes != NULL) {
            *ret_bytes = span->bytes;
        }
        return span->text;
    }
    if (!cJSON_IsString(item)) {
        return NULL;
    }
    if (ret_bytes != NULL) {
        *ret_bytes = strlen(item->valuestring);
    }
    return item->valuestring;
}

/* An integer in the exact form, from text that the scanner found to be a number. Stops at the first
 * other character and returns its place through *ret_end. */
static int read_int(const char *text, const char *end, int64_t *ret, const char **ret_end)
{
    const char *p = text;
    uint64_t value = 0;
    int negative = p < end && *p == '-', overflow = 0;

    p += negative;
    while (p < end && *p >= '0' && *p <= '9') {
        uint64_t digit = (uint64_t)(*p - '0');
        if (value > (UINT64_MAX - digit) / 10) {
            overflow = 1;
        } else {
            value = value * 10 + digit;
        }
        p++;
    }
    *ret_end = p;
    if ((p < end && (*p == '.' || *p == 'e' || *p == 'E')) || (negative && value == 0)) {
        return -EINVAL;
    }
    if (overflow || value > (uint64_t)INT64_MAX + (uint64_t)negative) {
        return -ERANGE;
    }
    *ret = negative ? -(int64_t)(value - 1) - 1 : (int64_t)value;
    return 0;
}

int tv_json_int(const struct tv_json *doc, const struct tv_json_value *value, int64_t *ret)
{
    const struct tv_json_span *span = span_of(value);
    const char *end;

    (void)doc; /* the span is reached through the value */
    if (span == NULL || span->kind != TV_JSON_SPAN_NUMBER) {
        return -EINVAL;
    }
    return read_int(span->text, span->text + span->bytes, ret, &end);
}

int tv_json_double(const struct tv_json *doc, const struct tv_json_value *value, double *ret)
{
    const struct tv_json_span *span = span_of(value);
    char text[TV_JSON_NUMBER_BYTES_MAX + 1];
    locale_t locale;
    double number;

    (void)doc; /* the span is reached through the value */
    if (span == NULL || span->kind != TV_JSON_SPAN_NUMBER) {
        return -EINVAL;
    }
    locale = newlocale(LC_ALL_MASK, "C", (locale_t)0);
    if (locale == (locale_t)0) {
        return -ENOMEM;
    }
    memcpy(text, span->text, span->bytes);
    text[span->bytes] = '\0';
    number = strtod_l(text, NULL, locale);
    freelocale(locale);
    if (!isfinite(number)) {
        return -ERANGE;
    }
    *ret = number;
    return 0;
}

/* The elements of a long array, straight from its text. */
static int read_span_array(const struct tv_json_span *span, int32_t *items, size_t *ret_index)
{
    const char *p = span->text, *end = span->text + span->bytes;
    size_t i;

    for (i = 0; i < span->count; i++) {
        int64_t number = 0;
        int rc;

        while (*p != '-' && (*p < '0' || *p > '9')) {
            p++; /* commas and space */
        }
        rc = read_int(p, end, &number, &p);
        if (rc == 0 && (number < INT32_MIN || number > INT32_MAX)) {
            rc = -ERANGE;
        }
        if (rc < 0) {
            *ret_index = i;
            return rc;
        }
        items[i] = (int32_t)number;
    }
    return 0;
}

static int read_child_array(const struct tv_json *doc, const struct tv_json_value *value,
                            int32_t *items, size_t *ret_index)
{
    const struct tv_json_value *child;
    size_t i = 0;

    for (child = tv_json_first(value); child != NULL; child = tv_json_next(child), i++) {
        int64_t number = 0;
        int rc = tv_json_int(doc, child, &number);
        if (rc == 0 && (number < INT32_MIN || number > INT32_MAX)) {
            rc = -ERANGE;
        }
        if (rc < 0) {
            *ret_index = i;
            return rc;
        }
        items[i] = (int32_t)number;
    }
    return 0;
}

int tv_json_int32_array(const struct tv_json *doc, const struct tv_json_value *value,
                        int32_t **ret_items, int32_t *ret_count, size_t *ret_index)
{
    const struct tv_json_span *span = span_of(value);
    size_t count = tv_json_count(value);
    int32_t *items = NULL;
    int rc;

    if (tv_json_type(value) != TV_JSON_ARRAY || count > INT32_MAX) {
        *ret_index = 0;
        return -EINVAL;
    }
    if (count > 0) {
        items = malloc(count * sizeof(*items));
        if (items == NULL) {
            return -ENOMEM;
        }
    }
    rc = span != NULL ? read_span_array(span, items, ret_index)
                      : read_child_array(doc, value, items, ret_index);
    if (rc < 0) {
        free(items);
        return rc;
    }
    *ret_items = items;
    *ret_count = (int32_t)count;
    return 0;
}
