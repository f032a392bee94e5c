/*
 * model_id.c - the name of what is served: SHA-256 over served fields and served tensors.
 *
 * The hash of a tensor covers its stored bytes, so the id depends neither on shards nor on backend,
 * page size or version. Tensors are hashed by a few threads; their order in the id is by name. A
 * tensor without bytes has its seed in their place.
 */
#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/digest.h"
#include "model/model_impl.h"

#define CHUNK_BYTES (1u << 20)
#define THREADS_MAX 16

struct sum {
    uint8_t bytes[32];
};

/* Work shared by the hashing threads. */
struct hashing {
    const struct tv_checkpoint *checkpoint;
    struct sum *sums;     /* [entry_count]; each written by the thread that took the index */
    atomic_size_t next;   /* relaxed: it only deals out indexes; join orders the results */
    pthread_mutex_t lock; /* guards err and error */
    int err;
    struct tv_model_error *error;
};

static void seed_hash(uint64_t seed, struct sum *ret_sum)
{
    struct tv_sha256 hash;
    uint8_t bytes[8]; /* low byte first */
    for (int i = 0; i < 8; i++) {
        bytes[i] = (uint8_t)(seed >> 8 * i);
    }
    tv_sha256_init(&hash);
    tv_sha256_update(&hash, bytes, sizeof bytes);
    tv_sha256_finish(&hash, ret_sum->bytes);
}

static int entry_hash(const struct tv_checkpoint_entry *entry, char *buffer, struct sum *ret_sum,
                      struct tv_model_error *ret_error)
{
    struct tv_sha256 hash;
    tv_sha256_init(&hash);
    for (int64_t at = 0; at < entry->tensor->bytes; at += CHUNK_BYTES) {
        int64_t left = entry->tensor->bytes - at;
        size_t part = left < (int64_t)CHUNK_BYTES ? (size_t)left : CHUNK_BYTES;
        int err = tv_safetensors_read(entry->file, entry->tensor, at, buffer, part, ret_error);
        if (err != 0) {
            return err;
        }
        tv_sha256_update(&hash, buffer, part);
    }
    tv_sha256_finish(&hash, ret_sum->bytes);
    return 0;
}

static void failure_note(struct hashing *hashing, int err, const struct tv_model_error *error)
{
    pthread_mutex_lock(&hashing->lock);
    if (hashing->err == 0) {
        hashing->err = err;
        *hashing->error = *error;
    }
    pthread_mutex_unlock(&hashing->lock);
}

static void *hashing_run(void *context)
{
    struct hashing *hashing = context;
    struct tv_model_error error = {{0}};
    char *buffer = malloc(CHUNK_BYTES);
    if (buffer == NULL) {
        failure_note(hashing, -ENOMEM, &error);
        return NULL;
    }
    for (;;) {
        size_t i = atomic_fetch_add_explicit(&hashing->next, 1, memory_order_relaxed);
        if (i >= hashing->checkpoint->entry_count) {
            break;
        }
        const struct tv_checkpoint_entry *entry = &hashing->checkpoint->entries[i];
        int err = entry->served ? entry_hash(entry, buffer, &hashing->sums[i], &error) : 0;
        if (err != 0) {
            failure_note(hashing, err, &error);
            break;
        }
    }
    free(buffer);
    return NULL;
}

static void tensors_hash(struct hashing *hashing)
{
    pthread_t threads[THREADS_MAX];
    long online = sysconf(_SC_NPROCESSORS_ONLN);
    int wanted = online < 2 ? 0 : (int)(online > THREADS_MAX ? THREADS_MAX : online) - 1;
    int started = 0;
    while (started < wanted && pthread_create(&threads[started], NULL, hashing_run, hashing) == 0) {
        started++;
    }
    (void)hashing_run(hashing); /* fewer threads only take longer */
    for (int i = 0; i < started; i++) {
        (void)pthread_join(threads[i], NULL); /* a joinable thread of ours: cannot fail */
    }
}

/* Text and its terminator, so that no two lists of names run together the same way. */
static void text_add(struct tv_sha256 *hash, const char *text)
{
    tv_sha256_update(hash, text, strlen(text) + 1);
}

static void fields_add(struct tv_sha256 *hash, const struct tv_model_config *c)
{
    char text[1024];
    (void)snprintf(text, sizeof text,
                   "%s vocab=%d hidden=%d layers=%d heads=%d q_lora=%d kv_lora=%d rope=%d nope=%d "
                   "v=%d inter=%d moe_inter=%d experts=%d shared=%d top_k=%d n_group=%d "
                   "topk_group=%d first_k_dense=%d moe_layer_freq=%d topk_method=%d scoring=%d "
                   "norm_topk=%d tied=%d max_position=%d interleave=%d",
                   c->architecture, c->vocab, c->hidden, c->layers, c->heads, c->q_lora, c->kv_lora,
                   c->rope_dim, c->nope_dim, c->v_dim, c->intermediate, c->moe_intermediate,
                   c->experts, c->shared_experts, c->experts_per_token, c->n_group, c->topk_group,
                   c->first_k_dense, c->moe_layer_freq, (int)c->topk_method, (int)c->scoring,
                   c->norm_topk_prob, c->tied_head, c->max_position, c->rope_interleave);
    text_add(hash, text);
    (void)snprintf(text, sizeof text,
                   "scale=%.17g eps=%.17g lora_eps=%.17g theta=%.17g yarn=%d factor=%.17g "
                   "beta_fast=%.17g beta_slow=%.17g mscale=%.17g mscale_all_dim=%.17g "
                   "original=%d truncate=%d attention_factor=%.17g",
                   c->routed_scaling_factor, c->rms_eps, c->lora_rms_eps, c->rope_theta, c->yarn,
                   c->yarn_factor, c->yarn_beta_fast, c->yarn_beta_slow, c->yarn_mscale,
                   c->yarn_mscale_all_dim, c->yarn_original_max, c->yarn_truncate,
                   c->rope_attention_factor);
    text_add(hash, text);
}

static void entry_add(struct tv_sha256 *hash, const struct tv_checkpoint_entry *entry,
                      const struct sum *sum)
{
    const struct tv_safetensors_tensor *tensor = entry->tensor;
    char extent[24];
    text_add(hash, tensor->name);
    text_add(hash, tensor->dtype);
    for (int32_t i = 0; i < tensor->rank; i++) {
        (void)snprintf(extent, sizeof extent, "%lld,", (long long)tensor->shape[i]);
        tv_sha256_update(hash, extent, strlen(extent));
    }
    text_add(hash, "");
    tv_sha256_update(hash, sum->bytes, sizeof sum->bytes);
}

int tv_model_id_compute(const struct tv_model_config *config,
                        const struct tv_checkpoint *checkpoint, uint8_t ret_id[32],
                        struct tv_model_error *ret_error)
{
    struct tv_sha256 hash;
    struct hashing hashing = {.checkpoint = checkpoint, .error = ret_error};
    hashing.sums = calloc(checkpoint->entry_count + 1, sizeof *hashing.sums);
    if (hashing.sums == NULL) {
        return -ENOMEM;
    }
    if (pthread_mutex_init(&hashing.lock, NULL) != 0) {
        free(hashing.sums);
        return -ENOMEM;
    }
    for (size_t i = 0; checkpoint->synthetic && i < checkpoint->entry_count; i++) {
        seed_hash(checkpoint->seed, &hashing.sums[i]);
    }
    if (!checkpoint->synthetic) {
        tensors_hash(&hashing);
    }
    if (hashing.err == 0) {
        tv_sha256_init(&hash);
        text_add(&hash, "treeverify-model-v1");
        fields_add(&hash, config);
        for (size_t i = 0; i < checkpoint->entry_count; i++) {
            if (checkpoint->entries[i].served) {
                entry_add(&hash, &checkpoint->entries[i], &hashing.sums[i]);
            }
        }
        tv_sha256_finish(&hash, ret_id);
    }
    (void)pthread_mutex_destroy(&hashing.lock); /* the threads are joined */
    free(hashing.sums);
    return hashing.err;
}
