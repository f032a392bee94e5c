/*
 * response_write.c - the growing buffer, and JSON values written into it.
 *
 * Refuses to write NaN or infinity as a number; output is ASCII except for text that is already
 * valid UTF-8. Does not depend on the locale.
 */
#include "proto/response_write.h"

#include <errno.h>
#include <math.h>
#include <nettle/base64.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define CHUNK_ITEMS                                                                                \
    768 /* 3,072, 1,536 or 768 bytes: all divide by 3, so chunks join without padding              \
         */

void tv_buf_init(struct tv_buf *buf, size_t bytes_max)
{
    *buf = (struct tv_buf){.bytes_max = bytes_max};
}

void tv_buf_finish(struct tv_buf *buf)
{
    if (buf != NULL) {
        free(buf->data);
        *buf = (struct tv_buf){0};
    }
}

char *tv_buf_extend(struct tv_buf *buf, size_t bytes)
{
    size_t capacity = buf->capacity;
    char *at;

    if (buf->failed < 0) {
        return NULL;
    }
    if (bytes > buf->bytes_max - buf->bytes) {
        buf->failed = -EMSGSIZE;
        return NULL;
    }
    if (capacity - buf->bytes < bytes) {
        char *grown;

        capacity = capacity < 512 ? 512 : capacity;
        while (capacity - buf->bytes < bytes) {
            capacity = capacity > buf->bytes_max / 2 ? buf->bytes_max : capacity * 2;
        }
        grown = realloc(buf->data, capacity);
        if (grown == NULL) {
            buf->failed = -ENOMEM;
            return NULL;
        }
        buf->data = grown;
        buf->capacity = capacity;
    }
    at = buf->data != NULL ? buf->data + buf->bytes : NULL; /* nothing into nothing */
    buf->bytes += bytes;
    return at;
}

void tv_buf_append(struct tv_buf *buf, const void *data, size_t bytes)
{
    char *at = tv_buf_extend(buf, bytes);

    if (at != NULL && bytes > 0) {
        memcpy(at, data, bytes);
    }
}

void tv_buf_printf(struct tv_buf *buf, const char *format, ...)
{
    char text[512], *heap;
    va_list args;
    int bytes;

    va_start(args, format);
    bytes = vsnprintf(text, sizeof(text), format, args);
    va_end(args);
    if (bytes < 0) {
        buf->failed = buf->failed < 0 ? buf->failed : -EINVAL;
        return;
    }
    if ((size_t)bytes < sizeof(text)) {
        tv_buf_append(buf, text, (size_t)bytes);
        return;
    }
    heap = malloc((size_t)bytes + 1);
    if (heap == NULL) {
        buf->failed = buf->failed < 0 ? buf->failed : -ENOMEM;
        return;
    }
    va_start(args, format);
    (void)vsnprintf(heap, (size_t)bytes + 1, format, args); /* same length as before */
    va_end(args);
    tv_buf_append(buf, heap, (size_t)bytes);
    free(heap);
}

void tv_write_text(struct tv_buf *buf, const char *text)
{
    static const char hex[] = "0123456789abcdef";
    const char *run, *p;

    if (text == NULL) {
        tv_write_raw(buf, "null");
        return;
    }
    tv_write_raw(buf, "\"");
    for (run = p = text; *p != '\0'; p++) {
        unsigned char c = (unsigned char)*p;
        char escape[6] = {'\\', 'u', '0', '0', hex[c >> 4], hex[c & 15]};

        if (c >= 0x20 && c != 0x7f && c != '"' && c != '\\') {
            continue;
        }
        tv_buf_append(buf, run, (size_t)(p - run));
        run = p + 1;
        if (c == '"' || c == '\\') {
            escape[1] = (char)c;
            tv_buf_append(buf, escape, 2);
        } else {
            tv_buf_append(buf, escape, 6);
        }
    }
    tv_buf_append(buf, run, (size_t)(p - run));
    tv_write_raw(buf, "\"");
}

/* Digits of `number` into the end of a 20-byte field; returns where they start. */
static char *format_int(int64_t number, char field[20])
{
    uint64_t left = number < 0 ? 0 - (uint64_t)number : (uint64_t)number;
    char *p = field + 20;

    do {
        *--p = (char)('0' + left % 10);
        left /= 10;
    } while (left > 0);
    if (number < 0) {
        *--p = '-';
    }
    return p;
}

void tv_write_int(struct tv_buf *buf, int64_t number)
{
    char field[20], *start = format_int(number, field);

    tv_buf_append(buf, start, (size_t)(field + 20 - start));
}

void tv_write_flag(struct tv_buf *buf, int flag)
{
    if (flag) {
        tv_write_raw(buf, "true");
    } else {
        tv_write_raw(buf, "false");
    }
}

/* Whatever the locale's decimal point is (a run of foreign bytes) becomes '.'. */
static void append_real(struct tv_buf *buf, const char *text)
{
    char out[48];
    size_t used = 0;
    int foreign = 0;

    for (; *text != '\0' && used < sizeof(out); text++) {
        if (strchr("0123456789+-e.", *text) != NULL) {
            out[used++] = *text;
            foreign = 0;
        } else if (!foreign) {
            out[used++] = '.';
            foreign = 1;
        }
    }
    tv_buf_append(buf, out, used);
}

void tv_write_real(struct tv_buf *buf, double number)
{
    char text[40];

    if (!isfinite(number)) {
        buf->failed = buf->failed < 0 ? buf->failed : -EDOM;
        return;
    }
    (void)snprintf(text, sizeof(text), "%.15g", number); /* fits: at most 23 characters */
    if (strtod(text, NULL) != number) {
        (void)snprintf(text, sizeof(text), "%.17g", number); /* fits: at most 25 characters */
    }
    append_real(buf, text);
}

void tv_write_real32(struct tv_buf *buf, float number)
{
    char text[40];

    if (isinf(number) && number < 0) {
        tv_write_raw(buf, "null");
        return;
    }
    if (!isfinite(number)) {
        buf->failed = buf->failed < 0 ? buf->failed : -EDOM;
        return;
    }
    (void)snprintf(text, sizeof(text), "%.9g", (double)number); /* fits: at most 16 characters */
    append_real(buf, text);
}

void tv_write_ints(struct tv_buf *buf, const int32_t *items, int32_t count)
{
    int32_t i;

    tv_write_raw(buf, "[");
    for (i = 0; i < count; i++) {
        char field[21], *start = format_int(items[i], field + 1);

        *--start = ',';
        start += i == 0;
        tv_buf_append(buf, start, (size_t)(field + 21 - start));
    }
    tv_write_raw(buf, "]");
}

void tv_write_hex(struct tv_buf *buf, const uint8_t *data, size_t bytes)
{
    static const char hex[] = "0123456789abcdef";
    char *at = tv_buf_extend(buf, 2 * bytes + 2);
    size_t i;

    if (at == NULL) {
        return;
    }
    *at++ = '"';
    for (i = 0; i < bytes; i++) {
        *at++ = hex[data[i] >> 4];
        *at++ = hex[data[i] & 15];
    }
    *at = '"';
}

void tv_write_time(struct tv_buf *buf, int64_t unix_ms)
{
    time_t seconds = (time_t)(unix_ms / 1000);
    struct tm parts;
    char text[40];

    if (unix_ms < 0 || gmtime_r(&seconds, &parts) == NULL ||
        strftime(text, sizeof(text), "\"%Y-%m-%dT%H:%M:%SZ\"", &parts) == 0) {
        buf->failed = buf->failed < 0 ? buf->failed : -EINVAL;
        return;
    }
    tv_buf_append(buf, text, strlen(text));
}

static uint32_t bits_of(float number)
{
    uint32_t bits;

    memcpy(&bits, &number, sizeof(bits));
    return bits;
}

/* Round to nearest even; infinities stay, NaN does not come here. */
static uint16_t bf16_of(float number)
{
    uint32_t bits = bits_of(number);

    return (uint16_t)((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

/* Round to nearest even; above the range to infinity, below it through the subnormals to zero. */
static uint16_t f16_of(float number)
{
    uint32_t bits = bits_of(number), sign = bits >> 16 & 0x8000u, rest = bits & 0x7fffffffu;
    uint32_t shift, mantissa, half;

    if (rest >= 0x47800000u) { /* 65536 and above */
        return (uint16_t)(sign | 0x7c00u);
    }
    if (rest >= 0x38800000u) { /* normal; a carry runs into the exponent and on to infinity */
        rest -= 0x38000000u;
        return (uint16_t)(sign | (rest + 0xfffu + (rest >> 13 & 1u)) >> 13);
    }
    if (rest < 0x33000000u) { /* below half of the smallest subnormal */
        return (uint16_t)sign;
    }
    shift = 126u - (rest >> 23);
    mantissa = (rest & 0x7fffffu) | 0x800000u;
    half = 1u << (shift - 1);
    return (uint16_t)(sign | (mantissa + half - 1u + (mantissa >> shift & 1u)) >> shift);
}

/* Four bits of exponent (bias 7), three of mantissa, no infinity: round to nearest even, above the
 * largest value (448) to it, below the range through the subnormals to zero. */
static uint8_t fp8_e4m3_of(float number)
{
    uint32_t bits = bits_of(number), sign = bits >> 24 & 0x80u, rest = bits & 0x7fffffffu;
    uint32_t shift, mantissa, value;

    if (rest >= 0x43e00000u) { /* 448 and above */
        return (uint8_t)(sign | 0x7eu);
    }
    if (rest >= 0x3c800000u) { /* normal, from 2^-6; a carry runs into the exponent */
        rest -= 0x3c000000u;
        return (uint8_t)(sign | (rest + 0x7ffffu + (rest >> 20 & 1u)) >> 20);
    }
    if (rest < 0x3a800000u) { /* below half of the smallest subnormal, 2^-9 */
        return (uint8_t)sign;
    }
    shift = 141u - (rest >> 23);
    mantissa = (rest & 0x7fffffu) | 0x800000u;
    value = (mantissa + (1u << (shift - 1)) - 1u + (mantissa >> shift & 1u)) >> shift;
    return (uint8_t)(sign | value);
}

/* Little-endian bytes of up to CHUNK_ITEMS floats; 0, or -EDOM when one is NaN. */
static int pack_floats(const float *data, int64_t count, enum tv_tensor_dtype dtype, uint8_t *out)
{
    uint32_t nan = 0;
    int64_t i;

    for (i = 0; i < count; i++) {
        uint32_t bits = bits_of(data[i]);
        nan |= (bits & 0x7fffffffu) > 0x7f800000u;
        if (dtype == TV_TENSOR_F32) {
            out[4 * i] = (uint8_t)bits;
            out[4 * i + 1] = (uint8_t)(bits >> 8);
            out[4 * i + 2] = (uint8_t)(bits >> 16);
            out[4 * i + 3] = (uint8_t)(bits >> 24);
        } else if (dtype == TV_TENSOR_FP8_E4M3) {
            out[i] = fp8_e4m3_of(data[i]);
        } else {
            uint16_t half = dtype == TV_TENSOR_BF16 ? bf16_of(data[i]) : f16_of(data[i]);
            out[2 * i] = (uint8_t)half;
            out[2 * i + 1] = (uint8_t)(half >> 8);
        }
    }
    return nan ? -EDOM : 0;
}

void tv_write_base64_floats(struct tv_buf *buf, const float *data, int64_t count,
                            enum tv_tensor_dtype dtype)
{
    size_t size = tv_tensor_dtype_bytes(dtype), total = (size_t)count * size;
    char *at = tv_buf_extend(buf, BASE64_ENCODE_RAW_LENGTH(total) + 2);
    uint8_t chunk[CHUNK_ITEMS * 4];
    int64_t done;

    if (at == NULL) {
        return;
    }
    *at++ = '"';
    for (done = 0; done < count; done += CHUNK_ITEMS) {
        int64_t items = count - done < CHUNK_ITEMS ? count - done : CHUNK_ITEMS;
        size_t bytes = (size_t)items * size;

        if (pack_floats(data + done, items, dtype, chunk) < 0) {
            buf->failed = -EDOM;
            return;
        }
        base64_encode_raw(at, bytes, chunk);
        at += BASE64_ENCODE_RAW_LENGTH(bytes);
    }
    *at = '"';
}

void tv_write_base64_ints(struct tv_buf *buf, const int32_t *data, int64_t count)
{
    char *at = tv_buf_extend(buf, BASE64_ENCODE_RAW_LENGTH((size_t)count * 4) + 2);
    uint8_t chunk[CHUNK_ITEMS * 4];
    int64_t done, i;

    if (at == NULL) {
        return;
    }
    *at++ = '"';
    for (done = 0; done < count; done += CHUNK_ITEMS) {
        int64_t items = count - done < CHUNK_ITEMS ? count - done : CHUNK_ITEMS;

        for (i = 0; i < items; i++) {
            uint32_t bits = (uint32_t)data[done + i];
            chunk[4 * i] = (uint8_t)bits;
            chunk[4 * i + 1] = (uint8_t)(bits >> 8);
            chunk[4 * i + 2] = (uint8_t)(bits >> 16);
            chunk[4 * i + 3] = (uint8_t)(bits >> 24);
        }
        base64_encode_raw(at, (size_t)items * 4, chunk);
        at += BASE64_ENCODE_RAW_LENGTH((size_t)items * 4);
    }
    *at = '"';
}

void tv_encode_tensor(struct tv_buf *buf, const float *data, int64_t count,
                      enum tv_tensor_dtype dtype)
{
    uint8_t *at = (uint8_t *)tv_buf_extend(buf, (size_t)count * tv_tensor_dtype_bytes(dtype));

    if (at != NULL && pack_floats(data, count, dtype, at) < 0) {
        buf->failed = -EDOM;
    }
}
