/*
 * facts.c - what an engine is made of, told to those who may not ask its model, cache or backend.
 *
 * Owns nothing: texts are the parts' own. Touches no device.
 */
#include <string.h>

#include "verify/verify.h"

void tv_engine_facts(const struct tv_engine *engine, struct tv_engine_facts *ret_facts)
{
    struct tv_engine_facts facts = {.name = "fixed",
                                    .architecture = "none",
                                    .weights_dtype = "none",
                                    .kv_dtype = "none",
                                    .products = "exact",
                                    .backend = "none",
                                    .variant = "none",
                                    .device_allocations = -1,
                                    .prefix = TV_CACHE_PREFIX_OFF};
    if (engine->model != NULL) {
        const struct tv_model_config *config = tv_model_config(engine->model);
        facts.name = tv_model_name(engine->model);
        facts.architecture = config->architecture;
        facts.weights_dtype = tv_model_weights_dtype(engine->model);
        facts.weights_bytes = tv_model_bytes(engine->model);
        facts.layers = config->layers;
        facts.heads = config->heads;
        memcpy(facts.model_id, tv_model_id(engine->model), sizeof facts.model_id);
        facts.synthetic = tv_model_options(engine->model)->synthetic ? TV_SYNTHETIC_WEIGHTS : 0u;
        facts.tokenizer_sha256 = tv_model_tokenizer_sha256(engine->model);
        facts.products =
            tv_model_options(engine->model)->products == TV_PRODUCTS_EXACT ? "exact" : "bf16";
        facts.hidden_dim = config->hidden;
        facts.tap_count = tv_model_options(engine->model)->tap_count;
        facts.taps = tv_model_options(engine->model)->taps;
        facts.project_dim = tv_model_taps_project_dim(engine->model);
    }
    if (engine->cache != NULL) {
        const struct tv_cache_params *params = tv_cache_params(engine->cache);
        facts.kv_dtype = params->dtype == TV_F32 ? "f32" : "bf16";
        facts.prefix = params->prefix;
        facts.pages = params;
        facts.kv_bytes = params->pages * params->page_size * params->row_dim * params->layers *
                         (params->dtype == TV_F32 ? 4 : 2);
    }
    if (engine->kernels != NULL) {
        facts.backend = engine->kernels->name;
        facts.variant = engine->kernels->variant;
        if (engine->kernels->allocations != NULL) {
            facts.device_allocations = (int64_t)(engine->kernels->allocations(engine->kernels) -
                                                 engine->allocations_start);
        }
        facts.weights_apart = !engine->kernels->host_memory;
    }
    *ret_facts = facts;
}

int tv_engine_room(const struct tv_engine *engine, int64_t pages,
                   struct tv_cache_shortage *ret_shortage)
{
    return engine->cache != NULL ? tv_cache_room(engine->cache, pages, ret_shortage) : 0;
}

void tv_engine_pages(const struct tv_engine *engine, struct tv_cache_counts *ret_counts)
{
    memset(ret_counts, 0, sizeof *ret_counts);
    if (engine->cache != NULL) {
        tv_cache_counts(engine->cache, ret_counts);
    }
}

int32_t tv_engine_page_holders(const struct tv_engine *engine, int32_t page)
{
    return engine->cache == NULL ? 0 : tv_cache_holders(engine->cache, page);
}
