/*
 * request_hash.c - the body hash that tells a retry from another request with the same number.
 *
 * SHA-256 over a canonical little-endian form of the decoded request: spelling, order of members
 * and explicit defaults do not count; deadline_ms, lease_s and ack are left out, and so is the
 * session, which is named outside the body and whose rounds alone are compared; a batch names its
 * items' sessions, which count.
 */
#include <nettle/sha2.h>
#include <string.h>

#include "proto/request_fields.h"

/* Fixed fields gather here; each call writes fewer bytes than it holds. */
struct gather {
    uint8_t bytes[1024];
    size_t used;
};

static void put32(struct gather *gather, int32_t number)
{
    uint32_t bits = (uint32_t)number;
    uint8_t *p = gather->bytes + gather->used;

    p[0] = (uint8_t)bits;
    p[1] = (uint8_t)(bits >> 8);
    p[2] = (uint8_t)(bits >> 16);
    p[3] = (uint8_t)(bits >> 24);
    gather->used += 4;
}

static void put64(struct gather *gather, uint64_t bits)
{
    put32(gather, (int32_t)(uint32_t)bits);
    put32(gather, (int32_t)(uint32_t)(bits >> 32));
}

static void put_double(struct gather *gather, double number)
{
    uint64_t bits;

    memcpy(&bits, &number, sizeof(bits));
    put64(gather, bits);
}

static void put_bytes(struct gather *gather, const void *data, size_t bytes)
{
    memcpy(gather->bytes + gather->used, data, bytes);
    gather->used += bytes;
}

/* Count and items of an array, in pieces, so that the form does not depend on the machine. */
static void hash_words(struct sha256_ctx *hash, const void *items, size_t count)
{
    struct gather gather = {.used = 0};
    size_t i;

    put32(&gather, (int32_t)count); /* a body has fewer than 2^31 */
    for (i = 0; i < count; i++) {
        if (gather.used == sizeof(gather.bytes)) {
            sha256_update(hash, gather.used, gather.bytes);
            gather.used = 0;
        }
        int32_t word;
        memcpy(&word, (const char *)items + i * sizeof(word), sizeof(word));
        put32(&gather, word);
    }
    sha256_update(hash, gather.used, gather.bytes);
}

static void hash_ints(struct sha256_ctx *hash, const int32_t *items, int32_t count)
{
    hash_words(hash, items, (size_t)count);
}

/* Bits of the probabilities, not their values: none is NaN where they count. */
static void hash_draft(struct sha256_ctx *hash, const struct tv_tree *tree)
{
    size_t cells = (size_t)tree->count * (size_t)tree->draft.width;

    hash_words(hash, tree->draft.ids, tree->draft.ids != NULL ? cells : 0);
    hash_words(hash, tree->draft.probs, cells);
}

static void hash_rows(struct sha256_ctx *hash, const struct tv_rows *rows)
{
    struct gather gather = {.used = 0};

    put32(&gather, (int32_t)rows->kind);
    sha256_update(hash, gather.used, gather.bytes);
    hash_ints(hash, rows->nodes, rows->kind == TV_ROWS_LIST ? rows->count : 0);
}

static void put_fixed(struct gather *gather, const struct tv_request *request)
{
    const struct tv_sampling_request *sampling = &request->sampling;
    const struct tv_want *want = &request->want;
    static const char none[sizeof(request->epoch)];

    put_bytes(gather, "tv-body-1", 9);
    put32(gather, (int32_t)request->kind);
    /* the repeat of a fork may name the epoch of a later start, which knows its key */
    put_bytes(gather, request->kind == TV_CALL_FORK ? none : request->epoch, sizeof none);
    put32(gather, request->seq);
    put32(gather, request->expected_len);
    put32(gather, request->has_expected_digest);
    put_bytes(gather, request->expected_digest, sizeof(request->expected_digest));
    put32(gather, request->keep_pending);
    put32(gather, request->max_tokens);
    put32(gather, request->len);
    put32(gather, request->has_pending);
    put32(gather, request->pending);
    put32(gather, (int32_t)sampling->rule);
    put_double(gather, sampling->temperature);
    put32(gather, sampling->top_k);
    put_double(gather, sampling->top_p);
    put_double(gather, sampling->min_p);
    put32(gather, sampling->has_seed);
    put64(gather, sampling->seed);
    put_double(gather, sampling->typical_epsilon);
    put_double(gather, sampling->typical_delta);
    put32(gather, request->max_len);
    put32(gather, request->cache_salt_bytes);
    put_bytes(gather, request->cache_salt, (size_t)request->cache_salt_bytes);
    put32(gather, request->prefix_len);
    put_bytes(gather, request->prefix_session, sizeof(request->prefix_session));
    put32(gather, want->top_k);
    put32(gather, want->logprobs);
    put32(gather, want->logits);
    put32(gather, (int32_t)want->logits_dtype);
    put32(gather, want->logits_fetch);
    put32(gather, want->hidden.wanted);
    put32(gather, want->hidden.project);
    put32(gather, want->hidden.window);
    put32(gather, (int32_t)want->hidden.dtype);
    put32(gather, want->hidden.fetch);
    put32(gather, want->shadow);
    put32(gather, request->has_tree);
    put32(gather, request->len_implied);
    put32(gather, request->has_if);
    put32(gather, request->if_seq);
    put32(gather, request->guess.leaf);
    put32(gather, request->guess.pending);
    put32(gather, request->alternative_count);
    put32(gather, request->hold);
    put32(gather, request->has_prev);
    put32(gather, request->prev_seq);
    put32(gather, request->has_next);
    put32(gather, request->next);
}

static void hash_alternative(struct sha256_ctx *hash, const struct tv_alternative *alternative)
{
    struct gather gather = {.used = 0};

    put32(&gather, alternative->guess.leaf);
    put32(&gather, alternative->guess.pending);
    sha256_update(hash, gather.used, gather.bytes);
    hash_ints(hash, alternative->tree.tokens, alternative->tree.count);
    hash_ints(hash, alternative->tree.parents, alternative->tree.count);
    hash_draft(hash, &alternative->tree);
}

/* A batch is its items: what they ask and whom, or why they were refused. */
static void hash_items(struct sha256_ctx *hash, const struct tv_request *request)
{
    for (int32_t i = 0; i < request->item_count; i++) {
        const struct tv_request_item *item = &request->items[i];
        struct gather gather = {.used = 0};

        put32(&gather, item->refused);
        put_bytes(&gather, item->request.session, sizeof(item->request.session));
        put_bytes(&gather, item->request.body_hash, sizeof(item->request.body_hash));
        sha256_update(hash, gather.used, gather.bytes);
        if (item->refused) {
            sha256_update(hash, strlen(item->problem.pointer),
                          (const uint8_t *)item->problem.pointer);
            sha256_update(hash, strlen(item->problem.detail),
                          (const uint8_t *)item->problem.detail);
        }
    }
}

/* What is large: read once, whatever the rule. */
static void hash_arrays(struct sha256_ctx *hash, const struct tv_request *request)
{
    hash_ints(hash, request->tokens, request->token_count);
    hash_ints(hash, request->stop_ids, request->stop_count);
    hash_rows(hash, &request->want.rows);
    hash_rows(hash, &request->want.logits_rows);
    hash_rows(hash, &request->want.hidden.rows);
    hash_ints(hash, request->want.hidden.taps, request->want.hidden.tap_count);
    hash_ints(hash, request->tree.tokens, request->tree.count);
    hash_ints(hash, request->tree.parents, request->tree.count);
    hash_draft(hash, &request->tree);
    hash_ints(hash, request->path, request->path_count);
    for (int32_t i = 0; i < request->alternative_count; i++) {
        hash_alternative(hash, &request->alternatives[i]);
    }
    hash_items(hash, request);
}

static void hash_rest(const struct sha256_ctx *arrays, int has_rule, enum tv_rule rule,
                      const struct tv_request *request, uint8_t *ret_sum)
{
    struct gather gather = {.used = 0};
    struct sha256_ctx hash = *arrays;

    put_fixed(&gather, request);
    put32(&gather, has_rule);
    put32(&gather, (int32_t)rule);
    sha256_update(&hash, gather.used, gather.bytes);
    sha256_digest(&hash, sizeof(request->body_hash), ret_sum);
}

void tv_request_hash(struct tv_request *request)
{
    struct sha256_ctx arrays;

    sha256_init(&arrays);
    hash_arrays(&arrays, request);
    hash_rest(&arrays, request->has_rule, request->rule, request, request->body_hash);
    hash_rest(&arrays, 0, TV_RULE_TARGET_WALK, request, request->ruleless_hash);
}
