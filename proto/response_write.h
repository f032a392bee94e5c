/*
 * response_write.h - JSON values into a buffer; private to proto/.
 *
 * Every function appends one complete value (or nothing, once the buffer has failed).
 */
#ifndef TV_PROTO_RESPONSE_WRITE_H
#define TV_PROTO_RESPONSE_WRITE_H

#include "proto/response.h"

/* Room for `bytes` more, counted as used; NULL after a failure. */
char *tv_buf_extend(struct tv_buf *buf, size_t bytes);

/* A string constant of ours, verbatim. */
#define tv_write_raw(buf, text) tv_buf_append((buf), (text), sizeof(text) - 1)

void tv_write_text(struct tv_buf *buf, const char *text); /* escaped and quoted; NULL is null */
void tv_write_int(struct tv_buf *buf, int64_t number);
void tv_write_flag(struct tv_buf *buf, int flag);
/* Shortest of 15 or 17 digits that reads back equal; not finite fails the buffer with -EDOM. */
void tv_write_real(struct tv_buf *buf, double number);
/* The same with at most 9 digits; -inf is null. */
void tv_write_real32(struct tv_buf *buf, float number);
void tv_write_ints(struct tv_buf *buf, const int32_t *items, int32_t count);
void tv_write_hex(struct tv_buf *buf, const uint8_t *data, size_t bytes);
void tv_write_time(struct tv_buf *buf, int64_t unix_ms);
/* Base64 of the little-endian bytes, quoted; NaN fails the buffer with -EDOM. */
void tv_write_base64_floats(struct tv_buf *buf, const float *data, int64_t count,
                            enum tv_tensor_dtype dtype);
void tv_write_base64_ints(struct tv_buf *buf, const int32_t *data, int64_t count);

/* Parts that several answers share. */
void tv_write_sampling(struct tv_buf *buf, const struct tv_sampling_state *sampling);
void tv_write_finish(struct tv_buf *buf, enum tv_finish finish);
void tv_write_kernel(struct tv_buf *buf, const struct tv_parity_kernel *kernel);
/* The cost curve: [[nodes, microseconds], ..]. */
void tv_write_curve(struct tv_buf *buf, const int64_t (*points)[2], int32_t count);
/* ["weights","acceptance"], those of the TV_SYNTHETIC_ bits that are set. */
void tv_write_synthetic(struct tv_buf *buf, unsigned synthetic);
void tv_write_state(struct tv_buf *buf, const struct tv_session_state *state);

#endif
