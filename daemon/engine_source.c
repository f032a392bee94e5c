/*
 * engine_source.c - the engine of the shipped daemon: backend, checkpoint, cache, self-test.
 *
 * Owns which sizes are taken at start, and says where a device's memory went. Refuses a backend
 * that is not there; nothing falls back.
 */
#include <errno.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

#include "base/log.h"
#include "cache/cache.h"
#include "device_memory.h"
#include "kernels/kernels.h"
#include "main.h"
#include "model/model.h"
#include "shadow/shadow.h"

#define REQUESTS_MAX       8   /* rounds of one launch */
#define REQUESTS_LONG      32  /* and of one on a device of LONG_FROM */
#define DEFAULT_SEQUENCES  8   /* of max_len, when no pool size is given */
#define SEQUENCE_ROWS      64  /* that must fit beside the self-test's, or no session could live */
#define PREFILL_ROWS_HOST  64  /* rows of a prefill pass: what keeps a processor busy */
#define PREFILL_ROWS_APART 512 /* and a device with memory of its own */
/* One with this much memory has room for the partial sums of more rounds in a launch, and keeps
 * activations of longer prefill passes: every pass expands keys and values of all tokens before it,
 * so that fewer passes expand less. */
#define PREFILL_ROWS_LONG 2048
#define LONG_FROM         ((size_t)32 << 30)
/* Invented weights up to this size are judged by the oracle, as a checkpoint's are; more would take
 * minutes, and nobody relies on them. */
#define INVENTED_JUDGED_BYTES ((int64_t)64 << 20)

/* Of a device with memory of its own; *ret_free stays where that is the host's. */
static void memory_look(const struct tv_kernels *kernels, struct tv_device_memory *memory,
                        size_t *ret_free)
{
    if (kernels->device_memory != NULL) {
        /* a device that does not answer fails at the next call that matters */
        (void)kernels->device_memory(kernels, ret_free, &memory->total);
    }
}

static int open_kernels(const struct tv_config *config, const char *backend,
                        struct tv_kernels **ret_kernels, char *error, size_t error_bytes)
{
    char reason[400] = "";
    const struct tv_kernels_options options = {
        .threads = config->threads,
        .cpu_flags_mask = ~(uint64_t)0,
        .reason = reason,
        .reason_bytes = sizeof reason,
    };
    int rc = tv_kernels_create(backend, &options, ret_kernels);
    if (rc == 0) {
        return TV_EXIT_DRAINED;
    }
    if (reason[0] != '\0') {
        (void)snprintf(error, error_bytes, "backend %s: %s", backend, reason);
    } else if (rc == -ENOTSUP) {
        (void)snprintf(error, error_bytes, "backend %s: this build or machine does not have it",
                       backend);
    } else {
        (void)snprintf(error, error_bytes, "backend %s: %s", backend, strerror(-rc));
    }
    return rc == -ENOMEM || rc == -EAGAIN ? TV_EXIT_NO_MEMORY : TV_EXIT_NO_DEVICE;
}

static int open_model(const struct tv_config *config, struct tv_kernels *kernels,
                      struct tv_model_progress *progress, struct tv_device_memory *memory,
                      struct tv_model **ret_model, char *error, size_t error_bytes)
{
    struct tv_model_error refusal = {.text = ""};
    int32_t rows = kernels->host_memory ? PREFILL_ROWS_HOST : PREFILL_ROWS_APART;
    bool large = memory->total >= LONG_FROM;
    struct tv_model_options options = {
        .max_len = config->max_len,
        .rows_max = config->max_nodes > rows ? config->max_nodes : rows,
        .prefill_rows = large ? PREFILL_ROWS_LONG : 0,
        .requests_max = large ? REQUESTS_LONG : REQUESTS_MAX,
        .page_size = config->page_size,
        .products = config->products,
        .synthetic = config->synthetic_weights,
        .synthetic_seed = config->synthetic_seed,
        .tap_count = config->tap_count,
        .projection = config->taps_projection[0] != '\0' ? config->taps_projection : NULL,
        .progress = progress,
    };
    _Static_assert(TV_TAPS_MAX <= TV_MODEL_TAPS_MAX, "as many taps as the settings may name");
    memcpy(options.taps, config->taps, sizeof config->taps);
    int rc = tv_model_load(kernels, config->model, &options, ret_model, &refusal);
    if (rc == 0 && options.synthetic) {
        tv_log(TV_LOG_WARNING,
               "synthetic weights of seed %llu: for measurements, its text means "
               "nothing%s",
               (unsigned long long)options.synthetic_seed,
               config->synthetic_kv ? ", nor do its prompts, whose KV rows are random" : "");
    }
    if (rc == 0) {
        return TV_EXIT_DRAINED;
    }
    if (rc == -ENOMEM) {
        char needs[200] = "";
        if (memory->total > 0) {
            (void)snprintf(needs, sizeof needs, "; %zu of the device's %zu MiB were free",
                           memory->begun >> 20, memory->total >> 20);
        }
        (void)snprintf(error, error_bytes, "model %.200s: no memory for it%s", config->model,
                       needs);
        return TV_EXIT_NO_MEMORY;
    }
    (void)snprintf(error, error_bytes, "model %.200s: %.380s", config->model,
                   refusal.text[0] == '\0' ? strerror(-rc) : refusal.text);
    return rc == -ERANGE            ? TV_EXIT_CONFIG
           : rc == -ENOTRECOVERABLE ? TV_EXIT_FAULT
                                    : TV_EXIT_CHECKPOINT;
}

/* What the engine and the kernel oracle take on a device behind the pages. */
static size_t engine_bytes(const struct tv_config *config, const struct tv_kernels *kernels,
                           const struct tv_model *model)
{
    const struct tv_model_config *shape = tv_model_config(model);
    const struct tv_draw_args draws = {.rows = tv_model_options(model)->rows_max,
                                       .vocab = shape->vocab};
    size_t picks = (size_t)draws.rows * (TV_WANT_TOP_K_MAX * 8 + 128);
    return kernels->draw_workspace(kernels, &draws) + picks +
           tv_shadow_device_bytes(kernels, model, config->kv_dtype, config->page_size) +
           tv_device_memory_graphs(tv_model_record_count(model), shape->layers);
}

/* The pool's size where no option says it. */
static int64_t pages_default(const struct tv_config *config, const struct tv_kernels *kernels,
                             const struct tv_model *model, const struct tv_device_memory *memory,
                             int64_t per_sequence)
{
    const struct tv_model_config *shape = tv_model_config(model);
    if (kernels->device_memory == NULL) {
        return DEFAULT_SEQUENCES * per_sequence;
    }
    size_t row = (size_t)(shape->kv_lora + shape->rope_dim) * tv_dtype_size(config->kv_dtype);
    const struct tv_device_room room = {
        .free_bytes = memory->loaded,
        .reserve_bytes = (size_t)config->device_reserve,
        .graphs_bytes = engine_bytes(config, kernels, model),
        .page_bytes = row * (size_t)config->page_size * (size_t)shape->layers,
        .page_size = config->page_size,
        .share = config->pages_share,
    };
    return tv_device_memory_pages(&room);
}

static int open_cache(const struct tv_config *config, struct tv_kernels *kernels,
                      const struct tv_model *model, const struct tv_device_memory *memory,
                      struct tv_cache **ret_cache, char *error, size_t error_bytes)
{
    const struct tv_model_config *shape = tv_model_config(model);
    int64_t page = config->page_size;
    int64_t max_len = tv_model_options(model)->max_len;
    int64_t per_sequence = (max_len + page - 1) / page;
    int64_t rows = max_len < SEQUENCE_ROWS ? max_len : SEQUENCE_ROWS;
    int64_t least = (TV_SELF_TEST_ROWS + page - 1) / page + (rows + page - 1) / page;
    if (config->pages > 0 && config->pages < least) {
        (void)snprintf(error, error_bytes,
                       "pages: %lld are too few; the self-test and one sequence of %lld rows need "
                       "%lld pages of page_size %lld",
                       (long long)config->pages, (long long)rows, (long long)least,
                       (long long)page);
        return TV_EXIT_CONFIG;
    }
    int64_t pages = config->pages > 0 ? config->pages
                                      : pages_default(config, kernels, model, memory, per_sequence);
    if (pages < least) {
        struct tv_device_memory now = *memory;
        char parts[300];
        now.pooled = now.ready = now.loaded; /* nothing is taken behind the model */
        tv_device_memory_text(&now, parts, sizeof parts);
        (void)snprintf(error, error_bytes,
                       "the device has room for %lld KV pages, %lld are needed (device_reserve is "
                       "%lld MiB, recorded passes may take %zu); %s",
                       (long long)pages, (long long)least, (long long)config->device_reserve >> 20,
                       engine_bytes(config, kernels, model) >> 20, parts);
        return TV_EXIT_NO_MEMORY;
    }
    static const enum tv_cache_prefix prefixes[] = {
        [TV_PREFIX_CACHE_OFF] = TV_CACHE_PREFIX_OFF,
        [TV_PREFIX_CACHE_ON] = TV_CACHE_PREFIX_EXACT,
        [TV_PREFIX_CACHE_ROUNDS] = TV_CACHE_PREFIX_ROUNDS,
    };
    const struct tv_cache_params params = {
        .layers = shape->layers,
        .page_size = config->page_size,
        .row_dim = shape->kv_lora + shape->rope_dim,
        .dtype = config->kv_dtype,
        .pages = pages,
        .poison = config->poison,
        .prefix = prefixes[config->prefix_cache],
    };
    int rc = tv_cache_create(kernels, &params, ret_cache);
    if (rc == 0) {
        return TV_EXIT_DRAINED;
    }
    (void)snprintf(error, error_bytes,
                   "no KV pool of %lld pages of %d rows in %d layers: %s (pages sets its size)",
                   (long long)params.pages, params.page_size, params.layers, strerror(-rc));
    return rc == -ENOMEM                          ? TV_EXIT_NO_MEMORY
           : rc == -EIO || rc == -ENOTRECOVERABLE ? TV_EXIT_FAULT
                                                  : TV_EXIT_CONFIG;
}

/* The engine, judged by the path oracle: the model's own reference, whatever the fast forms say. */
static int open_engine(struct tv_kernels *kernels, struct tv_model *model, struct tv_cache *cache,
                       struct tv_engine **ret_engine, char *detail, size_t detail_bytes)
{
    struct tv_shadow_judge *oracle = NULL;
    if (tv_model_options(model)->synthetic && tv_model_bytes(model) > INVENTED_JUDGED_BYTES) {
        tv_log(TV_LOG_WARNING, "too many synthetic weights for the path oracle: the self-test "
                               "judges attention alone, and noise is unknown");
        return tv_verify_engine_create(kernels, model, cache, NULL, ret_engine, detail,
                                       detail_bytes);
    }
    int rc = tv_shadow_judge_create(model, cache, kernels, &oracle);
    if (rc == 0) {
        const struct tv_judge judge = tv_shadow_judge_calls(oracle);
        rc = tv_verify_engine_create(kernels, model, cache, &judge, ret_engine, detail,
                                     detail_bytes);
    }
    tv_shadow_judge_destroy(oracle);
    return rc;
}

static void device_log(const struct tv_kernels *kernels)
{
    char text[600];
    tv_device_memory_describe(kernels, text, sizeof text);
    if (text[0] != '\0') {
        tv_log(TV_LOG_INFO, "device %s", text);
    }
}

/* What products that are not exact cost, by the start's text and tree. */
static void rounding_log(const struct tv_engine *engine)
{
    const struct tv_rounding *cost = &engine->rounding;
    if (cost->rows > 0) {
        tv_log(TV_LOG_INFO,
               "products are of bf16: beside exact ones %d of %d rows have the same best token, "
               "mean KL %.2g, logits differ by %.2g at most",
               cost->top1_equal, cost->rows, cost->kl_mean, cost->logit_max);
    }
}

/* The table of parts, once everything is taken. */
static void memory_log(const struct tv_engine *engine, struct tv_device_memory *memory)
{
    const struct tv_cache_params *params = tv_cache_params(engine->cache);
    char text[300];
    memory_look(engine->kernels, memory, &memory->ready);
    if (memory->total == 0) {
        return;
    }
    memory->pages = (size_t)params->pages * (size_t)params->page_size * (size_t)params->row_dim *
                    tv_dtype_size(params->dtype) * (size_t)params->layers;
    tv_device_memory_text(memory, text, sizeof text);
    tv_log(TV_LOG_INFO, "device memory %s", text);
}

int tv_main_engine_open(const struct tv_config *config, struct tv_model_progress *progress,
                        struct tv_engine **ret_engine, char *error, size_t error_bytes)
{
    struct tv_kernels *kernels = NULL;
    struct tv_model *model = NULL;
    struct tv_cache *cache = NULL;
    struct tv_device_memory memory = {0};
    char detail[300] = "";
    int code = open_kernels(config, config->backend, &kernels, error, error_bytes);
    if (code == TV_EXIT_DRAINED) {
        device_log(kernels);
        memory_look(kernels, &memory, &memory.begun);
        code = open_model(config, kernels, progress, &memory, &model, error, error_bytes);
    }
    if (code == TV_EXIT_DRAINED) {
        memory_look(kernels, &memory, &memory.loaded);
        memory.weights = (size_t)tv_model_bytes(model);
        code = open_cache(config, kernels, model, &memory, &cache, error, error_bytes);
    }
    if (code == TV_EXIT_DRAINED) {
        memory_look(kernels, &memory, &memory.pooled);
        int rc = open_engine(kernels, model, cache, ret_engine, detail, sizeof detail);
        if (rc == 0) {
            (*ret_engine)->invents_rows = config->synthetic_kv;
            (*ret_engine)->invents_seed = config->synthetic_seed;
            tv_log(TV_LOG_INFO,
                   "model %s (%s, %d layers) on %s %s, %lld pages of %d rows, %s products",
                   tv_model_name(model), tv_model_config(model)->architecture,
                   tv_model_config(model)->layers, kernels->name, kernels->variant,
                   (long long)tv_cache_params(cache)->pages, config->page_size,
                   config->products == TV_PRODUCTS_EXACT ? "exact" : "bf16");
            rounding_log(*ret_engine);
            memory_log(*ret_engine, &memory);
            return TV_EXIT_DRAINED;
        }
        if (rc == -EDOM) {
            (void)snprintf(error, error_bytes, "model %.200s: %s", config->model, detail);
            code = TV_EXIT_CHECKPOINT;
        } else {
            (void)snprintf(error, error_bytes, "the start's self-test: %s",
                           detail[0] == '\0' ? strerror(-rc) : detail);
            code = rc == -ENOMEM || rc == -EAGAIN ? TV_EXIT_NO_MEMORY : TV_EXIT_FAULT;
        }
    }
    tv_cache_destroy(cache);
    tv_model_destroy(model);
    if (kernels != NULL) {
        kernels->destroy(kernels);
    }
    return code;
}

int tv_main_gpu_check(const struct tv_config *config, char *ret_text, size_t bytes)
{
    struct tv_kernels *kernels = NULL;
    struct tv_device_memory memory = {0};
    char device[400];
    int code = open_kernels(config, "cuda", &kernels, ret_text, bytes);
    if (code != TV_EXIT_DRAINED) {
        return code;
    }
    tv_device_memory_describe(kernels, device, sizeof device);
    memory_look(kernels, &memory, &memory.begun);
    (void)snprintf(ret_text, bytes, "%s; %zu of %zu MiB free", device, memory.begun >> 20,
                   memory.total >> 20);
    if (memory.total == 0) {
        (void)snprintf(ret_text, bytes, "%s; the device does not say its memory", device);
        code = TV_EXIT_NO_DEVICE;
    } else if (memory.begun <= (size_t)config->device_reserve) {
        (void)snprintf(ret_text, bytes, "%s; %zu of %zu MiB free, of which %lld stay free", device,
                       memory.begun >> 20, memory.total >> 20,
                       (long long)config->device_reserve >> 20);
        code = TV_EXIT_NO_MEMORY;
    }
    kernels->destroy(kernels);
    return code;
}

void tv_main_engine_close(struct tv_engine *engine)
{
    if (engine == NULL) {
        return;
    }
    struct tv_kernels *kernels = engine->kernels;
    struct tv_model *model = engine->model;
    struct tv_cache *cache = engine->cache;
    engine->ops->destroy(engine);
    tv_cache_destroy(cache);
    tv_model_destroy(model);
    kernels->destroy(kernels);
}
