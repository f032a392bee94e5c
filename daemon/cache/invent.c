/*
 * invent.c - random KV rows in place of computed ones, for measurements at long contexts.
 *
 * Owns their size: that of normed latents. A row is a function of the seed, the layer and where the
 * reserved rows begin, whatever pages they are in; none is a row that a model gave.
 */
#include "cache/cache_impl.h"

#define SCALE        1.7320508f /* uniform values then have size one */
#define FIRST_TENSOR (1u << 30) /* behind all tensors of a model */

int tv_cache_invent(struct tv_cache *cache, const struct tv_cache_seq *seq, uint64_t seed)
{
    const struct tv_cache_params *params = &cache->params;
    int32_t end = seq->len + seq->scratch;
    int err = 0;
    for (int32_t layer = 0; err == 0 && layer < params->layers; layer++) {
        for (int32_t row = seq->len; err == 0 && row < end;) {
            int32_t rest = params->page_size - row % params->page_size;
            int64_t slot = tv_cache_slot(cache, seq, row);
            struct tv_synthesize args = {
                .groups = 1,
                .rows = rest < end - row ? rest : end - row,
                .cols = params->row_dim,
                .dtype = params->dtype,
                .scale = SCALE,
                .seed = seed + (uint64_t)row,
                .tensor = FIRST_TENSOR + (uint32_t)layer,
                .to = (char *)tv_cache_layer(cache, layer) + (size_t)slot * cache->row_bytes,
            };
            err = cache->kernels->synthesize(cache->kernels, &args);
            row += args.rows;
        }
    }
    return err;
}
