/*
 * planted_model.c - treeverifyd-planted: numbers that model/ derives from the checkpoint, wrong.
 *
 * The linker gives every tv_model_rope_read and tv_model_verify_shared to this file. "mscale": the
 * softmax scale lacks YaRN's mscale^2, from the start, or once the file of TV_PLANT_FILE exists;
 * "rope-length": rotated vectors have the length of a file without mscale. Every kernel does what
 * it is asked, and both of the fast forms are asked the same.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "model/model_config.h"
#include "plant.h"

void __real_tv_model_rope_read(struct tv_config_read *read, struct tv_model_config *config);
void __wrap_tv_model_rope_read(struct tv_config_read *read, struct tv_model_config *config);
int __real_tv_model_verify_shared(struct tv_model *model, struct tv_cache *cache,
                                  const struct tv_model_item *items, int32_t count,
                                  const struct tv_model_rider *rider, tv_model_layer_hook *hook,
                                  void *hook_context, const float **ret_logits);
int __wrap_tv_model_verify_shared(struct tv_model *model, struct tv_cache *cache,
                                  const struct tv_model_item *items, int32_t count,
                                  const struct tv_model_rider *rider, tv_model_layer_hook *hook,
                                  void *hook_context, const float **ret_logits);

int tv_planted_in_model(const char *name)
{
    return strcmp(name, "mscale") == 0 || strcmp(name, "rope-length") == 0;
}

static int is_planted(const char *name)
{
    const char *fault = getenv("TV_PLANT");
    return fault != NULL && strcmp(fault, name) == 0;
}

static void mscale_forget(struct tv_model_config *config)
{
    config->softmax_scale = 1.0f / sqrtf((float)(config->nope_dim + config->rope_dim));
}

void __wrap_tv_model_rope_read(struct tv_config_read *read, struct tv_model_config *config)
{
    __real_tv_model_rope_read(read, config);
    if (is_planted("mscale") && getenv("TV_PLANT_FILE") == NULL) {
        mscale_forget(config);
    } else if (is_planted("rope-length")) {
        config->rope_attention_factor = 1.0 + 0.1 * log(config->yarn_factor);
    }
}

int __wrap_tv_model_verify_shared(struct tv_model *model, struct tv_cache *cache,
                                  const struct tv_model_item *items, int32_t count,
                                  const struct tv_model_rider *rider, tv_model_layer_hook *hook,
                                  void *hook_context, const float **ret_logits)
{
    const char *file = getenv("TV_PLANT_FILE");
    if (is_planted("mscale") && file != NULL && access(file, F_OK) == 0) {
        /* the model's own memory, which it shows to nobody else as its to change */
        mscale_forget((struct tv_model_config *)(uintptr_t)tv_model_config(model));
    }
    return __real_tv_model_verify_shared(model, cache, items, count, rider, hook, hook_context,
                                         ret_logits);
}
