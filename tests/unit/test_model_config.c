/*
 * test_model_config.c - config.json: every field that cannot be served exactly is refused by name.
 *
 * B28: the numbers YaRN makes of its fields, against values worked out by hand.
 */
#include <errno.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "model/model_config.h"
#include "shadow/path.h"
#include "tiny_model.h"

static struct tv_tiny_model tiny;
static char text[16384];

/* Parse the tiny model's fields as config.json. */
static int config_read(struct tv_model_config *config, struct tv_model_error *error)
{
    struct tv_json_limits limits = {.depth_max = 8, .values_max = 1000};
    struct tv_json_error json_error;
    struct tv_json *doc;
    size_t used = 0;
    for (int32_t i = 0; i < tiny.field_count; i++) {
        used += (size_t)snprintf(text + used, sizeof text - used, "%s\"%s\":%s", i == 0 ? "{" : ",",
                                 tiny.fields[i].name, tiny.fields[i].json);
    }
    used += (size_t)snprintf(text + used, sizeof text - used, "}");
    assert_int_equal(tv_json_parse(text, used, &limits, &doc, &json_error), 0);
    memset(error, 0, sizeof *error);
    int err = tv_model_config_read(doc, config, error);
    tv_json_destroy(doc);
    return err;
}

static void served(struct tv_model_config *config)
{
    struct tv_model_error error;
    int err = config_read(config, &error);
    if (err != 0) {
        fail_msg("%s", error.text);
    }
}

static void refused(const char *field)
{
    struct tv_model_config config;
    struct tv_model_error error;
    int err = config_read(&config, &error);
    if (err != -EBADMSG || strstr(error.text, field) == NULL) {
        fail_msg("%d '%s', wanted '%s'", err, error.text, field);
    }
}

static void restart(void)
{
    tv_tiny_finish(&tiny);
    tv_tiny_init(&tiny, 1);
}

/* One field of the tiny model, and a value of it that is not served. */
static const struct {
    const char *field, *json;
} unserved[] = {
    {"model_type", "\"llama\""},
    {"model_type", "\"deepseek_v32\""},
    {"model_type", "3"},
    {"architectures", "[\"DeepseekV2ForCausalLM\"]"},
    {"architectures", "[]"},
    {"hidden_act", "\"gelu\""},
    {"attention_bias", "true"},
    {"attention_bias", "1"},
    {"mlp_bias", "true"},
    {"sliding_window", "4096"},
    {"quantization_config", "{}"},
    {"num_key_value_heads", "1"},
    {"kv_lora_rank", "256"},
    {"kv_lora_rank", "513"},
    {"qk_rope_head_dim", "32"},
    {"num_attention_heads", "0"},
    {"num_attention_heads", "129"},
    {"num_attention_heads", "2.0"},
    {"num_attention_heads", "\"2\""},
    {"vocab_size", "-1"},
    {"vocab_size", "99999999999999999999"},
    {"hidden_size", "0"},
    {"q_lora_rank", "0"},
    {"rms_norm_eps", "-1e-6"},
    {"rms_norm_eps", "0e-06"}, /* a row of zeros would be divided by zero */
    {"rms_norm_eps", "\"1e-6\""},
    {"topk_method", "\"greedy\""},
    {"topk_method", "\"random\""},
    {"scoring_func", "\"softmax\""},
    {"scoring_func", "\"relu\""},
    {"n_group", "3"},
    {"n_group", "4"},
    {"n_group", "0"},
    {"topk_group", "3"},
    {"num_experts_per_tok", "3"},
    {"num_experts_per_tok", "5"},
    {"moe_layer_freq", "0"},
    {"routed_scaling_factor", "0"},
    {"routed_scaling_factor", "-2.5"},
    {"routed_scaling_factor", "4e40"},
    {"routed_scaling_factor", "10001"},
    {"routed_scaling_factor", "1e-40"},
    {"rms_norm_eps", "1e-300"},
    {"rms_norm_eps", "1e39"},
    {"rope_theta", "1e300"},
    {"norm_topk_prob", "\"yes\""},
    {"tie_word_embeddings", "0"},
    {"rope_theta", "0"},
    {"rope_scaling", "3"},
    {"rope_scaling", "{\"type\":\"linear\",\"factor\":2}"},
    {"rope_scaling", "{\"type\":\"dynamic\",\"factor\":2}"},
    {"rope_scaling", "{\"rope_type\":\"llama3\",\"factor\":2}"},
    {"rope_scaling", "{\"rope_type\":\"yarn\",\"type\":\"linear\",\"factor\":2}"},
    {"rope_scaling", "{\"factor\":40,\"mscale\":1}"},
    {"rope_scaling", "{\"type\":null,\"factor\":40}"},
    {"rope_parameters", "{\"rope_theta\":10000.0,\"factor\":40}"},
    {"rope_scaling", "{\"type\":\"yarn\"}"},
    {"rope_scaling", "{\"type\":\"yarn\",\"factor\":0.5}"},
    {"rope_scaling", "{\"type\":\"yarn\",\"factor\":2,\"beta_fast\":0}"},
    {"rope_parameters", "{\"rope_type\":\"longrope\",\"rope_theta\":10000.0}"},
    {"rope_theta", "null,\"rope_parameters\":{\"rope_theta\":-1}"},
    {"partial_rotary_factor", "0.5"},
    {"use_mla", "false"},
    {"moe_layer_freq", "[0,1]"},
};

static void test_unserved_values(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof unserved / sizeof unserved[0]; i++) {
        restart();
        tv_tiny_field(&tiny, unserved[i].field, unserved[i].json);
        refused(unserved[i].field);
    }
}

/* Numbers that are finite in double, but whose products would not be in f32. */
static void test_rope_numbers_out_of_range(void **state)
{
    (void)state;
    static const struct {
        const char *name, *json;
    } cases[] = {
        {"factor", "1e300"},          {"beta_fast", "1e-300"},     {"beta_slow", "1e39"},
        {"mscale", "1e30"},           {"mscale_all_dim", "10001"}, {"rope_theta", "1e300"},
        {"attention_factor", "1e39"}, {"rope_theta", "1.0"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        char json[200], field[64];
        int factor = strcmp(cases[i].name, "factor") == 0;
        (void)snprintf(json, sizeof json, "{\"type\":\"yarn\",\"%s\":%s%s}", cases[i].name,
                       cases[i].json, factor ? "" : ",\"factor\":4");
        (void)snprintf(field, sizeof field, "rope_scaling.%s ", cases[i].name);
        restart();
        tv_tiny_field(&tiny, "rope_theta", NULL);
        tv_tiny_field(&tiny, "rope_scaling", json);
        refused(field);
    }
}

static void test_required_fields(void **state)
{
    (void)state;
    static const char *const fields[] = {
        "model_type",
        "vocab_size",
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "kv_lora_rank",
        "qk_rope_head_dim",
        "qk_nope_head_dim",
        "v_head_dim",
        "intermediate_size",
        "n_routed_experts",
        "max_position_embeddings",
        "num_experts_per_tok",
        "moe_intermediate_size",
        "n_group",
        "first_k_dense_replace",
        "topk_group",
        "routed_scaling_factor",
    };
    for (size_t i = 0; i < sizeof fields / sizeof fields[0]; i++) {
        restart();
        tv_tiny_field(&tiny, fields[i], NULL);
        refused(fields[i]);
    }
}

static void test_theta_of_both_forms(void **state)
{
    (void)state;
    struct tv_model_config config;
    restart();
    tv_tiny_field(&tiny, "rope_theta", "50000.0");
    served(&config);
    assert_true(config.rope_theta == 50000.0);
    tv_tiny_field(&tiny, "rope_parameters", "{\"rope_type\":\"default\",\"rope_theta\":10000.0}");
    refused("rope_theta");
    tv_tiny_field(&tiny, "rope_theta", NULL);
    served(&config);
    assert_true(config.rope_theta == 10000.0);
    tv_tiny_field(&tiny, "rope_scaling", "{\"type\":\"yarn\",\"factor\":4}");
    refused("rope_scaling");
}

static void test_architectures(void **state)
{
    (void)state;
    struct tv_model_config config;
    restart();
    tv_tiny_field(&tiny, "model_type", "\"kimi_k2\"");
    served(&config);
    assert_string_equal(config.architecture, "deepseek_v3");
    tv_tiny_field(&tiny, "model_type", "\"deepseek_v2\"");
    tv_tiny_field(&tiny, "architectures", NULL);
    refused("scoring_func");
    tv_tiny_field(&tiny, "scoring_func", "\"softmax\"");
    refused("topk_method");
    tv_tiny_field(&tiny, "topk_method", "\"group_limited_greedy\"");
    refused("norm_topk_prob"); /* implementations disagree about the scale */
    tv_tiny_field(&tiny, "routed_scaling_factor", "1.0");
    served(&config);
    assert_int_equal(config.norm_topk_prob, 1);
    tv_tiny_field(&tiny, "num_experts_per_tok", "1");
    refused("norm_topk_prob"); /* and about a single expert */
    tv_tiny_field(&tiny, "num_experts_per_tok", "2");
    tv_tiny_field(&tiny, "rope_interleave", "false");
    refused("rope_interleave");
    tv_tiny_field(&tiny, "rope_interleave", "true");
    tv_tiny_field(&tiny, "norm_topk_prob", NULL);
    served(&config);
    assert_string_equal(config.architecture, "deepseek_v2");
    assert_int_equal(config.norm_topk_prob, 0);
    assert_int_equal(config.n_group, 2);
    tv_tiny_field(&tiny, "topk_method", "\"greedy\"");
    served(&config);
    assert_int_equal(config.n_group, 1); /* greedy ignores the groups */
    tv_tiny_field(&tiny, "n_routed_experts", "null");
    served(&config);
    assert_int_equal(config.experts, 0);
}

static double yarn_mscale(double factor, double mscale)
{
    return 0.1 * mscale * log(factor) + 1.0;
}

/* The path oracle's own derivations from the same fields. */
static void oracle_agrees(const struct tv_model_config *config)
{
    enum { POSITIONS = 16 };
    float fast[POSITIONS * TV_MLA_ROPE];
    float *slow = NULL;
    assert_int_equal(config->rope_dim, TV_MLA_ROPE);
    assert_true(fabsf(tv_path_softmax_scale(config) - config->softmax_scale) <= 1e-7f);
    tv_model_rope_table(config, POSITIONS, fast);
    assert_int_equal(tv_path_rope_table(config, POSITIONS, &slow), 0);
    for (int32_t i = 0; i < POSITIONS * TV_MLA_ROPE; i++) {
        assert_true(fabsf(fast[i] - slow[i]) <= 1e-6f);
    }
    free(slow);
}

static void test_b28_yarn_factors(void **state)
{
    (void)state;
    struct tv_model_config config;
    double plain = 1.0 / sqrt(72.0);
    restart();
    served(&config);
    oracle_agrees(&config);
    assert_true(fabs((double)config.softmax_scale - plain) < 1e-7);
    tv_tiny_field(&tiny, "rope_scaling",
                  "{\"type\":\"yarn\",\"factor\":40,\"mscale\":0.707,\"mscale_all_dim\":0.707,"
                  "\"original_max_position_embeddings\":64}");
    served(&config);
    oracle_agrees(&config);
    double m = yarn_mscale(40.0, 0.707);
    assert_true(config.rope_attention_factor == 1.0); /* the ratio of equal mscales */
    assert_true(fabs((double)config.softmax_scale - plain * m * m) < 1e-7);
    assert_true(fabs(m * m - 1.59) < 0.005);
    tv_tiny_field(&tiny, "rope_scaling",
                  "{\"type\":\"yarn\",\"factor\":40,\"mscale\":1.0,\"mscale_all_dim\":0.707}");
    served(&config);
    oracle_agrees(&config);
    assert_true(fabs(config.rope_attention_factor - yarn_mscale(40.0, 1.0) / m) < 1e-12);
    tv_tiny_field(&tiny, "rope_scaling", "{\"type\":\"yarn\",\"factor\":40,\"mscale\":0.707}");
    served(&config);
    oracle_agrees(&config);
    assert_true(fabs(config.rope_attention_factor - yarn_mscale(40.0, 1.0)) < 1e-12);
    assert_true(fabs((double)config.softmax_scale - plain) < 1e-7);
    assert_int_equal(config.yarn_original_max, 256); /* absent: the context limit */
    tv_tiny_field(&tiny, "rope_scaling",
                  "{\"type\":\"yarn\",\"factor\":40,\"attention_factor\":1.25}");
    served(&config);
    oracle_agrees(&config);
    assert_true(config.rope_attention_factor == 1.25 && config.yarn_attention_factor == 1.25);
}

/* B29: one hot pair at position 1 turns by exactly its frequency. */
static void test_b29_rope_table(void **state)
{
    (void)state;
    struct tv_model_config config;
    float table[2 * TV_MLA_ROPE];
    restart();
    served(&config);
    tv_model_rope_table(&config, 2, table);
    for (int pair = 0; pair < TV_MLA_ROPE / 2; pair++) {
        double angle = pow(10000.0, -pair / 32.0);
        assert_true(table[pair] == 1.0f && table[TV_MLA_ROPE / 2 + pair] == 0.0f);
        assert_true(fabs((double)table[TV_MLA_ROPE + pair] - cos(angle)) < 1e-7);
        assert_true(fabs((double)table[TV_MLA_ROPE + TV_MLA_ROPE / 2 + pair] - sin(angle)) < 1e-7);
    }
}

/* Ramps that are empty or run backwards: model and oracle, which share no code, agree with each
 * other and with values worked out by hand of the published formula. */
static void test_odd_yarn_ramps(void **state)
{
    (void)state;
    static const struct {
        const char *theta, *json;
        int pair;
        double share; /* of the pair's own frequency; the rest is divided by the factor */
    } cases[] = {
        /* from pair 12 back to pair 1 */
        {"10000.0", "\"beta_fast\":1,\"beta_slow\":32,\"truncate\":true", 10, 9.0 / 11.0},
        {"10000.0", "\"original_max_position_embeddings\":4", 5, 1.0},
        {"0.5", "\"original_max_position_embeddings\":4096", 20, 1.0},
        {"10000.0", "\"beta_fast\":8,\"beta_slow\":8,\"truncate\":false", 0, 1.0},
        {"10000.0", "\"beta_fast\":8,\"beta_slow\":8,\"truncate\":false", 31, 0.0},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        struct tv_model_config config;
        float ours[2 * TV_MLA_ROPE], *theirs = NULL;
        char json[300];
        (void)snprintf(json, sizeof json, "{\"type\":\"yarn\",\"factor\":4,%s}", cases[i].json);
        restart();
        tv_tiny_field(&tiny, "rope_theta", cases[i].theta);
        tv_tiny_field(&tiny, "rope_scaling", json);
        served(&config);
        tv_model_rope_table(&config, 2, ours);
        assert_int_equal(tv_path_rope_table(&config, 2, &theirs), 0);
        for (int at = 0; at < 2 * TV_MLA_ROPE; at++) {
            if (!(fabs((double)ours[at] - (double)theirs[at]) < 1e-6)) {
                fail_msg("case %zu, %d: %g and %g", i, at, (double)ours[at], (double)theirs[at]);
            }
        }
        free(theirs);
        double plain = pow(config.rope_theta, -cases[i].pair / 32.0);
        double angle = plain * (cases[i].share + (1.0 - cases[i].share) / 4.0);
        double sine = (double)ours[TV_MLA_ROPE + TV_MLA_ROPE / 2 + cases[i].pair];
        assert_true(fabs(sine - sin(angle) * config.rope_attention_factor) < 1e-6);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_unserved_values), cmocka_unit_test(test_rope_numbers_out_of_range),
        cmocka_unit_test(test_required_fields), cmocka_unit_test(test_theta_of_both_forms),
        cmocka_unit_test(test_architectures),   cmocka_unit_test(test_b28_yarn_factors),
        cmocka_unit_test(test_b29_rope_table),  cmocka_unit_test(test_odd_yarn_ramps),
    };
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    tv_tiny_finish(&tiny);
    return failed;
}
