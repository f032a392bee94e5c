/*
 * model_config.c - the served fields of config.json.
 *
 * Owns what "served exactly" means: a field that would change the arithmetic is either implemented
 * or refused by name. Conventions are those of the transformers library, which wrote the references
 * the parity suite compares with; fields it does not read (moe_layer_freq, norm_topk_prob of V2)
 * mean what they do in the code that DeepSeek publishes. tests/golden/model_variants has logits of
 * both, and lists where they differ and what is done then.
 */
#include "model/model_config.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "model/refuse.h"

#define DIM_MAX     (1 << 20)
#define VOCAB_MAX   (1 << 24)
#define EXPERTS_MAX 1024

/* transformers builds the two low-rank norms with its default, whatever rms_norm_eps says. */
#define LORA_RMS_EPS 1e-6

static int text_is(const char *text, const char *wanted)
{
    return text != NULL && strcmp(text, wanted) == 0;
}

static void architecture_read(struct tv_config_read *read, struct tv_model_config *config)
{
    const char *type = tv_config_text(read, "model_type", NULL);
    const char *served = NULL;
    if (text_is(type, "deepseek_v2")) {
        served = "deepseek_v2";
    } else if (text_is(type, "deepseek_v3") || text_is(type, "kimi_k2")) {
        served = "deepseek_v3"; /* Kimi K2 is the same architecture under its own name */
    }
    if (served == NULL) {
        tv_config_refuse(read, "model_type", "is not deepseek_v2, deepseek_v3 or kimi_k2");
        return;
    }
    const struct tv_json_value *list = tv_config_member(read, "architectures");
    const char *class_name = list == NULL ? NULL : tv_json_string(tv_json_first(list), NULL);
    const char *wanted =
        text_is(served, "deepseek_v2") ? "DeepseekV2ForCausalLM" : "DeepseekV3ForCausalLM";
    if (list != NULL && !text_is(class_name, wanted)) {
        tv_config_refuse(read, "architectures", "is not the causal model of model_type");
    }
    (void)snprintf(config->architecture, sizeof config->architecture, "%s", served);
}

/* Fields whose other values would change the arithmetic: only the served value passes. */
static void unserved_check(struct tv_config_read *read)
{
    if (!text_is(tv_config_text(read, "hidden_act", "silu"), "silu")) {
        tv_config_refuse(read, "hidden_act", "is not silu");
    }
    if (tv_config_flag(read, "attention_bias", 0)) {
        tv_config_refuse(read, "attention_bias", "is true");
    }
    if (tv_config_flag(read, "mlp_bias", 0)) {
        tv_config_refuse(read, "mlp_bias", "is true");
    }
    if (tv_config_member(read, "quantization_config") != NULL) {
        tv_config_refuse(read, "quantization_config", "is set (FP8 and other quantised weights)");
    }
    if (tv_config_member(read, "sliding_window") != NULL) {
        tv_config_refuse(read, "sliding_window", "is set");
    }
    if (tv_config_number(read, "partial_rotary_factor", 0, 1.0) != 1.0) {
        tv_config_refuse(read, "partial_rotary_factor", "is not 1");
    }
    if (!tv_config_flag(read, "use_mla", 1)) {
        tv_config_refuse(read, "use_mla", "is false (attention without latents)");
    }
}

static void shape_read(struct tv_config_read *read, struct tv_model_config *config)
{
    int64_t required = TV_CONFIG_REQUIRED;
    config->vocab = tv_config_int(read, "vocab_size", 1, VOCAB_MAX, required);
    config->hidden = tv_config_int(read, "hidden_size", 1, DIM_MAX, required);
    config->layers = tv_config_int(read, "num_hidden_layers", 1, 1024, required);
    config->heads = tv_config_int(read, "num_attention_heads", 1, TV_HEADS_MAX, required);
    config->q_lora = tv_config_int(read, "q_lora_rank", 1, DIM_MAX, 0);
    config->kv_lora = tv_config_int(read, "kv_lora_rank", TV_MLA_LATENT, TV_MLA_LATENT, required);
    config->rope_dim = tv_config_int(read, "qk_rope_head_dim", TV_MLA_ROPE, TV_MLA_ROPE, required);
    config->nope_dim = tv_config_int(read, "qk_nope_head_dim", 1, 4096, required);
    config->v_dim = tv_config_int(read, "v_head_dim", 1, 4096, required);
    config->intermediate = tv_config_int(read, "intermediate_size", 1, DIM_MAX, required);
    config->max_position =
        tv_config_int(read, "max_position_embeddings", 1, INT32_MAX / 2, required);
    config->rms_eps = tv_config_number(read, "rms_norm_eps", 0, 1e-6);
    config->lora_rms_eps = LORA_RMS_EPS;
    config->tied_head = tv_config_flag(read, "tie_word_embeddings", 0);
    if (tv_config_int(read, "num_key_value_heads", 1, DIM_MAX, config->heads) != config->heads) {
        tv_config_refuse(read, "num_key_value_heads", "is not num_attention_heads");
    }
}

static void topk_method_read(struct tv_config_read *read, struct tv_model_config *config)
{
    int v3 = text_is(config->architecture, "deepseek_v3");
    const char *method = tv_config_text(read, "topk_method", v3 ? "noaux_tc" : "greedy");
    const char *scoring = tv_config_text(read, "scoring_func", v3 ? "sigmoid" : "softmax");
    if (v3) {
        config->topk_method = TV_TOPK_NOAUX_TC;
        config->scoring = TV_ROUTER_SIGMOID;
        if (!text_is(method, "noaux_tc")) {
            tv_config_refuse(read, "topk_method", "is not noaux_tc");
        }
        if (!text_is(scoring, "sigmoid")) {
            tv_config_refuse(read, "scoring_func", "is not sigmoid");
        }
        return;
    }
    config->scoring = TV_ROUTER_SOFTMAX;
    if (!text_is(scoring, "softmax")) {
        tv_config_refuse(read, "scoring_func", "is not softmax");
    }
    if (text_is(method, "greedy")) {
        config->topk_method = TV_TOPK_GREEDY;
    } else if (text_is(method, "group_limited_greedy")) {
        config->topk_method = TV_TOPK_GROUP_LIMITED;
    } else {
        tv_config_refuse(read, "topk_method", "is not greedy or group_limited_greedy");
    }
}

static void groups_read(struct tv_config_read *read, struct tv_model_config *config)
{
    config->n_group = 1;
    config->topk_group = 1;
    if (config->topk_method == TV_TOPK_GREEDY) {
        return; /* the groups are not used, whatever their fields say */
    }
    config->n_group = tv_config_int(read, "n_group", 1, EXPERTS_MAX, TV_CONFIG_REQUIRED);
    config->topk_group = tv_config_int(read, "topk_group", 1, EXPERTS_MAX, TV_CONFIG_REQUIRED);
    if (config->experts % config->n_group != 0) {
        tv_config_refuse(read, "n_group", "does not divide n_routed_experts");
        return;
    }
    int32_t group_experts = config->experts / config->n_group;
    if (config->topk_group > config->n_group) {
        tv_config_refuse(read, "topk_group", "is above n_group");
    }
    if (config->topk_method == TV_TOPK_NOAUX_TC && group_experts < 2 && config->n_group > 1) {
        tv_config_refuse(read, "n_group", "leaves less than 2 experts in a group");
    }
    if (config->experts_per_token > config->topk_group * group_experts) {
        tv_config_refuse(read, "num_experts_per_tok", "is above the experts of topk_group groups");
    }
}

/* Where the implementations of one file's meaning part, neither is the exact one. */
static void scale_check(struct tv_config_read *read, const struct tv_model_config *config)
{
    if (!config->norm_topk_prob) {
        return;
    }
    /* DeepSeek's first V2 code skips the scale when it normalises, its later one applies both. */
    if (config->scoring == TV_ROUTER_SOFTMAX && config->routed_scaling_factor != 1.0) {
        tv_config_refuse(read, "norm_topk_prob",
                         "is true with routed_scaling_factor other than 1 and softmax scores");
    }
    /* DeepSeek's code leaves a single expert's score as it is, transformers divides it by itself.
     */
    if (config->experts_per_token == 1) {
        tv_config_refuse(read, "norm_topk_prob", "is true with num_experts_per_tok 1");
    }
}

static void experts_read(struct tv_config_read *read, struct tv_model_config *config)
{
    if (tv_json_member(read->object, "n_routed_experts") == NULL) {
        tv_config_refuse(read, "n_routed_experts", "is missing");
    }
    config->experts = tv_config_int(read, "n_routed_experts", 0, EXPERTS_MAX, 0);
    config->first_k_dense = config->layers;
    config->moe_layer_freq = 1;
    config->n_group = config->topk_group = 1;
    if (config->experts == 0) {
        return; /* a dense model */
    }
    int64_t required = TV_CONFIG_REQUIRED;
    config->moe_intermediate = tv_config_int(read, "moe_intermediate_size", 1, DIM_MAX, required);
    config->shared_experts = tv_config_int(read, "n_shared_experts", 0, 64, 0);
    config->experts_per_token =
        tv_config_int(read, "num_experts_per_tok", 1, config->experts, required);
    config->first_k_dense = tv_config_int(read, "first_k_dense_replace", 0, 1024, required);
    config->moe_layer_freq = tv_config_int(read, "moe_layer_freq", 1, 1024, 1);
    config->norm_topk_prob =
        tv_config_flag(read, "norm_topk_prob", text_is(config->architecture, "deepseek_v3"));
    config->routed_scaling_factor = tv_config_factor(read, "routed_scaling_factor", 0, -1.0);
    if (config->routed_scaling_factor < 0.0) {
        tv_config_refuse(read, "routed_scaling_factor", "is missing");
    }
    topk_method_read(read, config);
    groups_read(read, config);
    scale_check(read, config);
}

int tv_model_config_read(const struct tv_json *doc, struct tv_model_config *ret_config,
                         struct tv_model_error *ret_error)
{
    struct tv_model_config config = {0};
    struct tv_config_read read = {
        .doc = doc, .object = tv_json_root(doc), .prefix = "", .error = ret_error};
    architecture_read(&read, &config);
    unserved_check(&read);
    shape_read(&read, &config);
    if (read.err == 0) {
        experts_read(&read, &config);
        tv_model_rope_read(&read, &config);
    }
    if (read.err == 0) {
        *ret_config = config;
    }
    return read.err;
}
