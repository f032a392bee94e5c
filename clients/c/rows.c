/*
 * rows.c - rows of logits in an answer: base64 of f32, little-endian.
 *
 * Refuses what is not rows of the tree that was sent, each as long as the vocabulary.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include <nettle/base64.h>

#include "clients/c/internal.h"

/* count floats of text. 0; -EBADMSG; -ENOMEM. */
static int decode(const char *text, size_t bytes, size_t count, float **ret_values)
{
    struct base64_decode_ctx context;
    size_t got = BASE64_DECODE_LENGTH(bytes);
    if (got < count * sizeof(float) || got > (count + 1) * sizeof(float)) {
        return -EBADMSG;
    }
    uint8_t *raw = malloc(got + sizeof(float));
    if (raw == NULL) {
        return -ENOMEM;
    }
    base64_decode_init(&context);
    if (!base64_decode_update(&context, &got, raw, bytes, text) || !base64_decode_final(&context) ||
        got != count * sizeof(float)) {
        free(raw);
        return -EBADMSG;
    }
    for (size_t i = 0; i < count; i++) {
        const uint8_t *p = raw + 4 * i;
        uint32_t bits = p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
        memcpy(raw + 4 * i, &bits, sizeof(bits)); /* in place: this machine's order */
    }
    *ret_values = (float *)(void *)raw; /* malloc aligns */
    return 0;
}

int tv_client_read_logits(const struct tv_json *doc, const struct tv_json_value *object,
                          const struct tv_client_ask *ask, struct tv_client_round *round)
{
    const struct tv_json_value *logits = tv_json_member(object, "logits");
    const struct tv_json_value *data = tv_json_member(logits, "data_b64");
    int32_t *shape = NULL;
    int32_t shape_count = 0;
    size_t bytes = 0;
    char dtype[8] = "";
    if (ask->logits == TV_CLIENT_ROWS_NONE) {
        return 0;
    }
    const char *text = data != NULL ? tv_json_string(data, &bytes) : NULL;
    if (text == NULL || tv_client_get_text(logits, "dtype", dtype, sizeof(dtype)) != 0 ||
        strcmp(dtype, "f32") != 0) {
        return -EBADMSG;
    }
    int error = tv_client_get_ints(doc, logits, "rows", &round->row_nodes, &round->row_count);
    if (error == 0) {
        error = tv_client_get_ints(doc, logits, "shape", &shape, &shape_count);
    }
    if (error == 0 && (shape_count != 2 || shape[0] != round->row_count || shape[0] < 1 ||
                       shape[0] > ask->count || shape[1] < 1)) {
        error = -EBADMSG;
    }
    for (int32_t i = 0; error == 0 && i < round->row_count; i++) {
        error = round->row_nodes[i] < 0 || round->row_nodes[i] >= ask->count ? -EBADMSG : 0;
    }
    if (error == 0) {
        round->vocab = shape[1];
        error = decode(text, bytes, (size_t)shape[0] * (size_t)shape[1], &round->logits);
    }
    free(shape);
    return error;
}
