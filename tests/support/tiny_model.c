/*
 * tiny_model.c - checkpoint folders for the loader's tests.
 *
 * The smallest sizes the architecture allows: the latent and rope dims are fixed, all else is 1-16.
 */
#include "tiny_model.h"

#include <fcntl.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "kernels/types.h"

#define VOCAB   11
#define HIDDEN  16
#define HEADS   2
#define NOPE    8
#define V_DIM   12
#define Q_LORA  8
#define INTER   24
#define MOE     8
#define EXPERTS 4
#define LAYERS  2

static uint64_t tiny_random;

static float draw(void)
{
    tiny_random = tiny_random * 6364136223846793005ull + 1442695040888963407ull;
    return (float)(tiny_random >> 40) / (float)(1 << 23) - 1.0f;
}

struct tv_tiny_tensor *tv_tiny_add(struct tv_tiny_model *tiny, const char *name, int64_t rows,
                                   int64_t cols)
{
    assert_true(tiny->tensor_count < TV_TINY_TENSORS_MAX);
    struct tv_tiny_tensor *tensor = &tiny->tensors[tiny->tensor_count++];
    memset(tensor, 0, sizeof *tensor);
    (void)snprintf(tensor->name, sizeof tensor->name, "%s", name);
    (void)snprintf(tensor->dtype, sizeof tensor->dtype, "F32");
    tensor->rank = cols > 0 ? 2 : 1;
    tensor->shape[0] = rows;
    tensor->shape[1] = cols;
    tensor->count = (size_t)(rows * (cols > 0 ? cols : 1));
    tensor->values = malloc(tensor->count * sizeof(float) + 1);
    assert_non_null(tensor->values);
    float size = cols > 0 ? 1.0f / sqrtf((float)cols) : 0.1f;
    for (size_t i = 0; i < tensor->count; i++) {
        tensor->values[i] = (cols > 0 ? 0.0f : 1.0f) + size * draw();
    }
    return tensor;
}

static void add(struct tv_tiny_model *tiny, int layer, const char *part, int64_t rows, int64_t cols)
{
    char name[128];
    (void)snprintf(name, sizeof name, "model.layers.%d.%s", layer, part);
    (void)tv_tiny_add(tiny, name, rows, cols);
}

static void add_mlp(struct tv_tiny_model *tiny, int layer, const char *part, int64_t inter)
{
    char name[96];
    (void)snprintf(name, sizeof name, "mlp.%sgate_proj.weight", part);
    add(tiny, layer, name, inter, HIDDEN);
    (void)snprintf(name, sizeof name, "mlp.%sup_proj.weight", part);
    add(tiny, layer, name, inter, HIDDEN);
    (void)snprintf(name, sizeof name, "mlp.%sdown_proj.weight", part);
    add(tiny, layer, name, HIDDEN, inter);
}

static void add_layer(struct tv_tiny_model *tiny, int layer)
{
    add(tiny, layer, "input_layernorm.weight", HIDDEN, 0);
    add(tiny, layer, "post_attention_layernorm.weight", HIDDEN, 0);
    add(tiny, layer, "self_attn.q_a_proj.weight", Q_LORA, HIDDEN);
    add(tiny, layer, "self_attn.q_a_layernorm.weight", Q_LORA, 0);
    add(tiny, layer, "self_attn.q_b_proj.weight", HEADS * (NOPE + TV_MLA_ROPE), Q_LORA);
    add(tiny, layer, "self_attn.kv_a_proj_with_mqa.weight", TV_MLA_ROW, HIDDEN);
    add(tiny, layer, "self_attn.kv_a_layernorm.weight", TV_MLA_LATENT, 0);
    add(tiny, layer, "self_attn.kv_b_proj.weight", HEADS * (NOPE + V_DIM), TV_MLA_LATENT);
    add(tiny, layer, "self_attn.o_proj.weight", HIDDEN, HEADS * V_DIM);
    if (layer == 0) {
        add_mlp(tiny, layer, "", INTER);
        return;
    }
    add(tiny, layer, "mlp.gate.weight", EXPERTS, HIDDEN);
    add(tiny, layer, "mlp.gate.e_score_correction_bias", EXPERTS, 0);
    for (int e = 0; e < EXPERTS; e++) {
        char part[32];
        (void)snprintf(part, sizeof part, "experts.%d.", e);
        add_mlp(tiny, layer, part, MOE);
    }
    add_mlp(tiny, layer, "shared_experts.", MOE);
}

void tv_tiny_init(struct tv_tiny_model *tiny, uint64_t seed)
{
    static const struct {
        const char *name, *json;
    } fields[] = {
        {"model_type", "\"deepseek_v3\""},
        {"architectures", "[\"DeepseekV3ForCausalLM\"]"},
        {"vocab_size", "11"},
        {"hidden_size", "16"},
        {"intermediate_size", "24"},
        {"moe_intermediate_size", "8"},
        {"num_hidden_layers", "2"},
        {"num_attention_heads", "2"},
        {"q_lora_rank", "8"},
        {"kv_lora_rank", "512"},
        {"qk_rope_head_dim", "64"},
        {"qk_nope_head_dim", "8"},
        {"v_head_dim", "12"},
        {"max_position_embeddings", "256"},
        {"n_routed_experts", "4"},
        {"n_shared_experts", "1"},
        {"num_experts_per_tok", "2"},
        {"first_k_dense_replace", "1"},
        {"n_group", "2"},
        {"topk_group", "1"},
        {"topk_method", "\"noaux_tc\""},
        {"scoring_func", "\"sigmoid\""},
        {"norm_topk_prob", "true"},
        {"routed_scaling_factor", "1.5"},
        {"rms_norm_eps", "1e-6"},
        {"rope_theta", "10000.0"},
        {"rope_scaling", "null"},
        {"hidden_act", "\"silu\""},
        {"attention_bias", "false"},
        {"tie_word_embeddings", "false"},
    };
    memset(tiny, 0, sizeof *tiny);
    tiny_random = seed;
    for (size_t i = 0; i < sizeof fields / sizeof fields[0]; i++) {
        tv_tiny_field(tiny, fields[i].name, fields[i].json);
    }
    (void)tv_tiny_add(tiny, "model.embed_tokens.weight", VOCAB, HIDDEN);
    for (int layer = 0; layer < LAYERS; layer++) {
        add_layer(tiny, layer);
    }
    (void)tv_tiny_add(tiny, "model.norm.weight", HIDDEN, 0);
    (void)tv_tiny_add(tiny, "lm_head.weight", VOCAB, HIDDEN);
}

void tv_tiny_finish(struct tv_tiny_model *tiny)
{
    for (int32_t i = 0; i < tiny->tensor_count; i++) {
        free(tiny->tensors[i].values);
    }
    memset(tiny, 0, sizeof *tiny);
}

void tv_tiny_field(struct tv_tiny_model *tiny, const char *name, const char *json)
{
    int32_t at = 0;
    while (at < tiny->field_count && strcmp(tiny->fields[at].name, name) != 0) {
        at++;
    }
    if (json == NULL) {
        assert_true(at < tiny->field_count);
        tiny->fields[at] = tiny->fields[--tiny->field_count];
        return;
    }
    assert_true(at < TV_TINY_FIELDS_MAX);
    tiny->field_count += at == tiny->field_count;
    (void)snprintf(tiny->fields[at].name, sizeof tiny->fields[at].name, "%s", name);
    (void)snprintf(tiny->fields[at].json, sizeof tiny->fields[at].json, "%s", json);
}

struct tv_tiny_tensor *tv_tiny_find(struct tv_tiny_model *tiny, const char *name)
{
    for (int32_t i = 0; i < tiny->tensor_count; i++) {
        if (strcmp(tiny->tensors[i].name, name) == 0) {
            return &tiny->tensors[i];
        }
    }
    fail_msg("the tiny model has no tensor %s", name);
    return NULL;
}

void tv_tiny_remove(struct tv_tiny_model *tiny, const char *name)
{
    struct tv_tiny_tensor *tensor = tv_tiny_find(tiny, name);
    free(tensor->values);
    *tensor = tiny->tensors[--tiny->tensor_count];
}

static size_t element_bytes(const struct tv_tiny_tensor *tensor)
{
    if (strcmp(tensor->dtype, "F32") == 0 || strcmp(tensor->dtype, "I32") == 0) {
        return 4;
    }
    return strcmp(tensor->dtype, "BF16") == 0 || strcmp(tensor->dtype, "F16") == 0 ? 2 : 1;
}

static void data_write(FILE *file, const struct tv_tiny_tensor *tensor)
{
    for (size_t i = 0; i < tensor->count; i++) {
        uint16_t half = tv_f32_to_bf16(tensor->values[i]);
        size_t bytes = element_bytes(tensor);
        const void *value = bytes == 4 ? (const void *)&tensor->values[i] : (const void *)&half;
        assert_int_equal(fwrite(value, bytes, 1, file), 1);
    }
}

static void header_write(const struct tv_tiny_model *tiny, int shard, FILE *file)
{
    static char header[64 * 1024];
    size_t used = (size_t)snprintf(header, sizeof header, "{\"__metadata__\":{\"format\":\"pt\"}");
    size_t at = 0;
    for (int32_t i = 0; i < tiny->tensor_count; i++) {
        const struct tv_tiny_tensor *t = &tiny->tensors[i];
        if (t->shard != shard) {
            continue;
        }
        size_t end = at + t->count * element_bytes(t);
        used += (size_t)snprintf(header + used, sizeof header - used,
                                 ",\"%s\":{\"dtype\":\"%s\",\"shape\":[", t->name, t->dtype);
        for (int32_t d = 0; d < t->rank; d++) {
            used += (size_t)snprintf(header + used, sizeof header - used, "%s%lld",
                                     d > 0 ? "," : "", (long long)t->shape[d]);
        }
        used += (size_t)snprintf(header + used, sizeof header - used,
                                 "],\"data_offsets\":[%zu,%zu]}", at, end);
        at = end;
    }
    used += (size_t)snprintf(header + used, sizeof header - used, "}");
    assert_true(used < sizeof header);
    uint64_t length = used;
    assert_int_equal(fwrite(&length, sizeof length, 1, file), 1);
    assert_int_equal(fwrite(header, used, 1, file), 1);
}

static FILE *file_create(const char *dir, const char *name)
{
    char path[600];
    (void)snprintf(path, sizeof path, "%s/%s", dir, name);
    FILE *file = fopen(path, "wb");
    assert_non_null(file);
    return file;
}

void tv_tiny_file(const char *dir, const char *name, const void *data, size_t bytes)
{
    FILE *file = file_create(dir, name);
    if (bytes > 0) {
        assert_int_equal(fwrite(data, bytes, 1, file), 1);
    }
    assert_int_equal(fclose(file), 0);
}

static void shard_name(const struct tv_tiny_model *tiny, int shard, char *name, size_t bytes)
{
    if (tiny->shards == 0) {
        (void)snprintf(name, bytes, "model.safetensors");
    } else {
        (void)snprintf(name, bytes, "model-%05d-of-%05d.safetensors", shard + 1, tiny->shards);
    }
}

static void index_write(const struct tv_tiny_model *tiny, const char *dir)
{
    FILE *file = file_create(dir, "model.safetensors.index.json");
    (void)fprintf(file, "{\"metadata\":{},\"weight_map\":{");
    for (int32_t i = 0; i < tiny->tensor_count; i++) {
        char name[64];
        shard_name(tiny, tiny->tensors[i].shard, name, sizeof name);
        (void)fprintf(file, "%s\"%s\":\"%s\"", i > 0 ? "," : "", tiny->tensors[i].name, name);
    }
    (void)fprintf(file, "%s}}", tiny->index_extra);
    assert_int_equal(fclose(file), 0);
}

void tv_tiny_write(const struct tv_tiny_model *tiny, const char *dir)
{
    tv_tiny_folder_clear(dir);
    FILE *config = file_create(dir, "config.json");
    for (int32_t i = 0; i < tiny->field_count; i++) {
        (void)fprintf(config, "%s\"%s\":%s", i == 0 ? "{" : ",\n", tiny->fields[i].name,
                      tiny->fields[i].json);
    }
    (void)fprintf(config, "}\n");
    assert_int_equal(fclose(config), 0);
    for (int shard = 0; shard < (tiny->shards > 0 ? tiny->shards : 1); shard++) {
        char name[64];
        shard_name(tiny, shard, name, sizeof name);
        FILE *file = file_create(dir, name);
        header_write(tiny, shard, file);
        for (int32_t i = 0; i < tiny->tensor_count; i++) {
            if (tiny->tensors[i].shard == shard) {
                data_write(file, &tiny->tensors[i]);
            }
        }
        assert_int_equal(fclose(file), 0);
    }
    if (tiny->shards > 0) {
        index_write(tiny, dir);
    }
}

void tv_tiny_projection(const char *dir, const char *name, int32_t rows, int32_t cols)
{
    size_t count = (size_t)rows * (size_t)cols, bytes = 128 + count * sizeof(float);
    char *data = calloc(1, bytes), text[121];
    const uint64_t header = 120;
    assert_non_null(data);
    int used = snprintf(text, sizeof text,
                        "{\"fc.weight\":{\"dtype\":\"F32\",\"shape\":[%d,%d],"
                        "\"data_offsets\":[0,%zu]}}",
                        rows, cols, count * sizeof(float));
    assert_in_range(used, 1, 120);
    memset(data, ' ', 128);
    memcpy(data, &header, sizeof header);
    memcpy(data + 8, text, (size_t)used);
    for (size_t i = 0; i < count; i++) {
        float value = (float)(i % 16 + 1) / 8.0f;
        memcpy(data + 128 + i * sizeof value, &value, sizeof value);
    }
    tv_tiny_file(dir, name, data, bytes);
    free(data);
}
