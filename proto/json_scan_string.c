/*
 * json_scan_string.c - strings of the strict scanner: UTF-8, escapes, and their canonical form.
 *
 * Refuses control characters, invalid UTF-8 (overlong forms and surrogates included), lone
 * surrogates in escapes, and U+0000 in any spelling.
 */
#include "proto/json_scan.h"

#include <string.h>

/* Length of the valid UTF-8 sequence at p (first byte >= 0x80), 0 when there is none. */
static size_t utf8_length(const unsigned char *p, const unsigned char *end)
{
    size_t left = (size_t)(end - p), bytes, i;
    unsigned char low = 0x80, high = 0xbf;

    if (p[0] < 0xc2 || p[0] > 0xf4) {
        return 0;
    }
    bytes = p[0] < 0xe0 ? 2 : p[0] < 0xf0 ? 3 : 4;
    if (p[0] == 0xe0) {
        low = 0xa0; /* overlong */
    } else if (p[0] == 0xed) {
        high = 0x9f; /* surrogates */
    } else if (p[0] == 0xf0) {
        low = 0x90; /* overlong */
    } else if (p[0] == 0xf4) {
        high = 0x8f; /* above U+10FFFF */
    }
    if (left < bytes || p[1] < low || p[1] > high) {
        return 0;
    }
    for (i = 2; i < bytes; i++) {
        if (p[i] < 0x80 || p[i] > 0xbf) {
            return 0;
        }
    }
    return bytes;
}

/* Move over the characters that stand for themselves; stops at a quote, a backslash, the end, or
 * after refusing. */
static void skip_plain(struct tv_json_scan *scan)
{
    while (scan->at < scan->end) {
        unsigned char c = (unsigned char)*scan->at;

        if (c == '"' || c == '\\') {
            return;
        }
        if (c < 0x20) {
            tv_json_scan_refuse(scan, "control character in a string");
            return;
        }
        if (c < 0x80) {
            scan->at++;
        } else {
            size_t bytes =
                utf8_length((const unsigned char *)scan->at, (const unsigned char *)scan->end);
            if (bytes == 0) {
                tv_json_scan_refuse(scan, "not UTF-8");
                return;
            }
            scan->at += bytes;
        }
    }
    tv_json_scan_refuse(scan, "unterminated string");
}

/* The four hex digits after "\u", or -1. */
static int32_t hex4(const char *p, const char *end)
{
    int32_t value = 0;
    int i;

    if (end - p < 4) {
        return -1;
    }
    for (i = 0; i < 4; i++) {
        char c = p[i];
        int digit = c >= '0' && c <= '9'     ? c - '0'
                    : (c >= 'a' && c <= 'f') ? c - 'a' + 10
                    : (c >= 'A' && c <= 'F') ? c - 'A' + 10
                                             : -1;
        if (digit < 0) {
            return -1;
        }
        value = value * 16 + digit;
    }
    return value;
}

/* Write one decoded character in the form all equal strings share. */
static void emit_decoded(struct tv_json_scan *scan, uint32_t code)
{
    static const char hex[] = "0123456789abcdef";
    char out[6];

    if (code == '"' || code == '\\') {
        out[0] = '\\';
        out[1] = (char)code;
        tv_json_scan_emit(scan, out, 2);
    } else if (code < 0x20) {
        memcpy(out, "\\u00", 4);
        out[4] = hex[code >> 4];
        out[5] = hex[code & 15];
        tv_json_scan_emit(scan, out, 6);
    } else if (code < 0x80) {
        tv_json_scan_emit_char(scan, (char)code);
    } else if (code < 0x800) {
        out[0] = (char)(0xc0 | code >> 6);
        out[1] = (char)(0x80 | (code & 0x3f));
        tv_json_scan_emit(scan, out, 2);
    } else if (code < 0x10000) {
        out[0] = (char)(0xe0 | code >> 12);
        out[1] = (char)(0x80 | (code >> 6 & 0x3f));
        out[2] = (char)(0x80 | (code & 0x3f));
        tv_json_scan_emit(scan, out, 3);
    } else {
        out[0] = (char)(0xf0 | code >> 18);
        out[1] = (char)(0x80 | (code >> 12 & 0x3f));
        out[2] = (char)(0x80 | (code >> 6 & 0x3f));
        out[3] = (char)(0x80 | (code & 0x3f));
        tv_json_scan_emit(scan, out, 4);
    }
}

/* After "\u": one character, taking both halves of a surrogate pair. */
static void scan_unicode(struct tv_json_scan *scan)
{
    int32_t code = hex4(scan->at, scan->end), low;

    if (code < 0) {
        tv_json_scan_refuse(scan, "bad \\u escape");
        return;
    }
    scan->at += 4;
    if (code == 0) {
        tv_json_scan_refuse(scan, "NUL character in a string");
        return;
    }
    if (code >= 0xd800 && code <= 0xdfff) {
        if (code >= 0xdc00 || scan->end - scan->at < 6 || scan->at[0] != '\\' ||
            scan->at[1] != 'u') {
            tv_json_scan_refuse(scan, "lone surrogate");
            return;
        }
        low = hex4(scan->at + 2, scan->end);
        if (low < 0xdc00 || low > 0xdfff) {
            tv_json_scan_refuse(scan, "lone surrogate");
            return;
        }
        scan->at += 6;
        code = 0x10000 + ((code - 0xd800) << 10) + (low - 0xdc00);
    }
    emit_decoded(scan, (uint32_t)code);
}

/* At a backslash. */
static void scan_escape(struct tv_json_scan *scan)
{
    static const char from[] = "\"\\/bfnrt", to[] = "\"\\/\b\f\n\r\t";
    const char *found;

    if (scan->end - scan->at < 2) {
        tv_json_scan_refuse(scan, "unterminated string");
        return;
    }
    if (scan->at[1] == 'u') {
        scan->at += 2;
        scan_unicode(scan);
        return;
    }
    found = scan->at[1] == '\0' ? NULL : strchr(from, scan->at[1]);
    if (found == NULL) {
        tv_json_scan_refuse(scan, "bad escape");
        return;
    }
    scan->at += 2;
    emit_decoded(scan, (unsigned char)to[found - from]);
}

/* At the opening quote. The control text receives the string with its quotes. */
void tv_json_scan_string(struct tv_json_scan *scan, int is_name)
{
    const char *run = ++scan->at;

    skip_plain(scan);
    if (scan->failed == 0 && !is_name && *scan->at == '"' &&
        scan->at - run >= TV_JSON_LONG_STRING) {
        tv_json_scan_emit_span(scan, TV_JSON_SPAN_STRING, run, (size_t)(scan->at - run), 0);
        scan->at++;
        return;
    }
    tv_json_scan_emit_char(scan, '"');
    while (scan->failed == 0) {
        tv_json_scan_emit(scan, run, (size_t)(scan->at - run));
        if (*scan->at == '"') {
            scan->at++;
            tv_json_scan_emit_char(scan, '"');
            return;
        }
        scan_escape(scan);
        run = scan->at;
        if (scan->failed == 0) {
            skip_plain(scan);
        }
    }
}
