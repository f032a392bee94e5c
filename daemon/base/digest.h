/*
 * digest.h - SHA-256 and the chain digest over committed tokens.
 *
 * d(0) = H("treeverify-kv-v1" | model_id | cache_salt), d(L) = H(d(L-1) | uint32le(token)), H = the
 * first 16 bytes of SHA-256. The only user of nettle in the daemon.
 */
#ifndef TV_BASE_DIGEST_H
#define TV_BASE_DIGEST_H

#include <stddef.h>
#include <stdint.h>

struct tv_digest {
    uint8_t bytes[16];
};

/* A running SHA-256; opaque, caller's memory. */
struct tv_sha256 {
    uint64_t state[16]; /* room for nettle's context (asserted in digest.c) */
};
void tv_sha256_init(struct tv_sha256 *hash);
void tv_sha256_update(struct tv_sha256 *hash, const void *data, size_t bytes);
void tv_sha256_finish(struct tv_sha256 *hash, uint8_t ret_sum[32]);

void tv_digest_start(struct tv_digest *digest, const uint8_t model_id[32], const char *cache_salt,
                     size_t salt_bytes);
void tv_digest_push(struct tv_digest *digest, int32_t token);

#endif
