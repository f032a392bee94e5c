/*
 * digest.c - SHA-256 by nettle, and the chain digest over committed tokens.
 */
#include "base/digest.h"

#include <assert.h>
#include <nettle/sha2.h>
#include <string.h>

static_assert(sizeof(struct sha256_ctx) <= sizeof(struct tv_sha256), "nettle's context must fit");
static_assert(_Alignof(struct sha256_ctx) <= _Alignof(struct tv_sha256), "and be aligned");

/* The context is copied in and out so that no object is reached through a foreign type. */
void tv_sha256_init(struct tv_sha256 *hash)
{
    struct sha256_ctx context;
    sha256_init(&context);
    memset(hash, 0, sizeof *hash);
    memcpy(hash, &context, sizeof context);
}

void tv_sha256_update(struct tv_sha256 *hash, const void *data, size_t bytes)
{
    struct sha256_ctx context;
    memcpy(&context, hash, sizeof context);
    sha256_update(&context, bytes, data);
    memcpy(hash, &context, sizeof context);
}

void tv_sha256_finish(struct tv_sha256 *hash, uint8_t ret_sum[32])
{
    struct sha256_ctx context;
    memcpy(&context, hash, sizeof context);
    sha256_digest(&context, SHA256_DIGEST_SIZE, ret_sum);
    memcpy(hash, &context, sizeof context); /* nettle has started it anew */
}

static void digest_finish(struct sha256_ctx *context, struct tv_digest *ret_digest)
{
    sha256_digest(context, sizeof ret_digest->bytes, ret_digest->bytes);
}

void tv_digest_start(struct tv_digest *digest, const uint8_t model_id[32], const char *cache_salt,
                     size_t salt_bytes)
{
    static const char domain[] = "treeverify-kv-v1";
    struct sha256_ctx context;
    sha256_init(&context);
    sha256_update(&context, sizeof domain - 1, (const uint8_t *)domain);
    sha256_update(&context, 32, model_id);
    if (salt_bytes > 0) {
        sha256_update(&context, salt_bytes, (const uint8_t *)cache_salt);
    }
    digest_finish(&context, digest);
}

void tv_digest_push(struct tv_digest *digest, int32_t token)
{
    uint32_t bits = (uint32_t)token;
    uint8_t little[4] = {(uint8_t)bits, (uint8_t)(bits >> 8), (uint8_t)(bits >> 16),
                         (uint8_t)(bits >> 24)};
    struct sha256_ctx context;
    sha256_init(&context);
    sha256_update(&context, sizeof digest->bytes, digest->bytes);
    sha256_update(&context, sizeof little, little);
    digest_finish(&context, digest);
}
