/*
 * digest.c - the chain over committed tokens, as the server computes it.
 *
 * d(0) = H("treeverify-kv-v1" | model_id | salt), d(L) = H(d(L-1) | uint32le(token)); H is SHA-256
 * cut to 16 bytes. Written from the contract (proto/README.md), not from the daemon's source.
 */
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include <nettle/sha2.h>

#include "clients/c/internal.h"

static int hex_digit(char c)
{
    return c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

int tv_client_digest_start(const char *model_id, const char *salt,
                           struct tv_client_digest *ret_digest)
{
    static const char domain[] = "treeverify-kv-v1";
    uint8_t raw[32];
    struct sha256_ctx hash;
    if (strlen(model_id) != 2 * sizeof(raw)) {
        return -EBADMSG;
    }
    for (size_t i = 0; i < sizeof(raw); i++) {
        int high = hex_digit(model_id[2 * i]);
        int low = hex_digit(model_id[2 * i + 1]);
        if (high < 0 || low < 0) {
            return -EBADMSG;
        }
        raw[i] = (uint8_t)(high << 4 | low);
    }
    sha256_init(&hash);
    sha256_update(&hash, sizeof(domain) - 1, (const uint8_t *)domain);
    sha256_update(&hash, sizeof(raw), raw);
    sha256_update(&hash, strlen(salt), (const uint8_t *)salt);
    sha256_digest(&hash, sizeof(ret_digest->bytes), ret_digest->bytes);
    return 0;
}

void tv_client_digest_push(struct tv_client_digest *digest, const int32_t *tokens, int32_t count)
{
    struct sha256_ctx hash;
    sha256_init(&hash); /* sha256_digest starts it anew */
    for (int32_t i = 0; i < count; i++) {
        uint32_t bits = (uint32_t)tokens[i];
        const uint8_t little[4] = {(uint8_t)bits, (uint8_t)(bits >> 8), (uint8_t)(bits >> 16),
                                   (uint8_t)(bits >> 24)};
        sha256_update(&hash, sizeof(digest->bytes), digest->bytes);
        sha256_update(&hash, sizeof(little), little);
        sha256_digest(&hash, sizeof(digest->bytes), digest->bytes);
    }
}

void tv_client_digest_text(const struct tv_client_digest *digest, char ret_text[33])
{
    for (size_t i = 0; i < sizeof(digest->bytes); i++) {
        (void)snprintf(ret_text + 2 * i, 3, "%02x", digest->bytes[i]); /* always two digits */
    }
}
