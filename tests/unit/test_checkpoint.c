/*
 * test_checkpoint.c - whole folders: indexes, missing and misshapen tensors, heads, extra layers.
 *
 * B35 (FP8), B36 (index against headers), B39 (tied heads), B40 (multi-token-prediction layers).
 * Every refusal names the file or the tensor; what is served gives the same logits as its twin.
 */
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

#include "model_fixture.h"
#include "tiny_model.h"

#define SHARD_1 "model-00001-of-00002.safetensors"
#define SHARD_2 "model-00002-of-00002.safetensors"
#define LOGITS  11

static char dir[512];
static char logged[8192];

/* Load the folder; what is logged meanwhile is kept in `logged`. */
static int load(struct tv_kernels **ret_kernels, struct tv_model **ret_model,
                struct tv_model_error *error)
{
    struct tv_kernels_options kernel_options = {.threads = 1, .cpu_flags_mask = ~0ull};
    struct tv_model_options options = {.rows_max = 8, .requests_max = 1, .page_size = 16};
    memset(error, 0, sizeof *error);
    assert_int_equal(tv_kernels_create("ref", &kernel_options, ret_kernels), 0);
    int saved = dup(STDERR_FILENO);
    FILE *file = tmpfile();
    assert_true(saved >= 0);
    assert_non_null(file);
    assert_true(dup2(fileno(file), STDERR_FILENO) >= 0);
    int err = tv_model_load(*ret_kernels, dir, &options, ret_model, error);
    assert_true(dup2(saved, STDERR_FILENO) >= 0);
    (void)close(saved);
    rewind(file);
    size_t bytes = fread(logged, 1, sizeof logged - 1, file);
    logged[bytes] = '\0';
    (void)fclose(file);
    return err;
}

/* The folder is refused, and the sentence holds each of up to three texts. */
static void refused(const char *a, const char *b, const char *c)
{
    struct tv_kernels *kernels;
    struct tv_model *model = NULL;
    struct tv_model_error error;
    int err = load(&kernels, &model, &error);
    if (err != -EBADMSG || strstr(error.text, a) == NULL ||
        (b != NULL && strstr(error.text, b) == NULL) ||
        (c != NULL && strstr(error.text, c) == NULL)) {
        fail_msg("%d '%s', wanted '%s' '%s' '%s'", err, error.text, a, b != NULL ? b : "",
                 c != NULL ? c : "");
    }
    assert_null(model);
    kernels->destroy(kernels);
}

/* The folder is served: logits of three tokens, and the model id. */
static void served(float *ret_logits, uint8_t *ret_id)
{
    static const int32_t tokens[] = {3, 1, 10};
    struct tv_fixture fixture = {0};
    struct tv_model_error error;
    struct tv_cache_seq seq = {0};
    int err = load(&fixture.kernels, &fixture.model, &error);
    if (err != 0) {
        fail_msg("%d %s", err, error.text);
    }
    struct tv_cache_params params = {.layers = 2,
                                     .page_size = 16,
                                     .row_dim = TV_MLA_ROW,
                                     .pages = 2,
                                     .poison = tv_fixture_poison()};
    assert_int_equal(tv_cache_create(fixture.kernels, &params, &fixture.cache), 0);
    const float *logits = tv_fixture_prefill(&fixture, &seq, tokens, 3, 3);
    for (int i = 0; i < LOGITS; i++) {
        assert_true(isfinite(logits[i]));
    }
    memcpy(ret_logits, logits, LOGITS * sizeof *logits);
    if (ret_id != NULL) {
        memcpy(ret_id, tv_model_id(fixture.model), 32);
    }
    tv_cache_seq_finish(fixture.cache, &seq);
    tv_fixture_close(&fixture);
}

static struct tv_tiny_model *tiny_new(void)
{
    struct tv_tiny_model *tiny = malloc(sizeof *tiny);
    assert_non_null(tiny);
    tv_tiny_init(tiny, 42);
    return tiny;
}

static void tiny_free(struct tv_tiny_model *tiny)
{
    tv_tiny_finish(tiny);
    free(tiny);
}

/* Two shards, tensors dealt in turn. */
static struct tv_tiny_model *tiny_sharded(void)
{
    struct tv_tiny_model *tiny = tiny_new();
    tiny->shards = 2;
    for (int32_t i = 0; i < tiny->tensor_count; i++) {
        tiny->tensors[i].shard = i % 2;
    }
    return tiny;
}

static void file_remove(const char *name)
{
    char path[600];
    (void)snprintf(path, sizeof path, "%s/%s", dir, name);
    assert_int_equal(unlink(path), 0);
}

static void file_rename(const char *from, const char *to)
{
    char a[600], b[600];
    (void)snprintf(a, sizeof a, "%s/%s", dir, from);
    (void)snprintf(b, sizeof b, "%s/%s", dir, to);
    assert_int_equal(rename(a, b), 0);
}

static void test_model_id_ignores_shards(void **state)
{
    (void)state;
    float one[LOGITS], two[LOGITS];
    uint8_t id_one[32], id_two[32];
    struct tv_tiny_model *tiny = tiny_new();
    tv_tiny_write(tiny, dir);
    served(one, id_one);
    tiny_free(tiny);
    tiny = tiny_sharded();
    tv_tiny_write(tiny, dir);
    served(two, id_two);
    assert_memory_equal(one, two, sizeof one);
    assert_memory_equal(id_one, id_two, 32);
    tv_tiny_find(tiny, "model.layers.1.mlp.experts.3.up_proj.weight")->values[5] += 1e-3f;
    tv_tiny_write(tiny, dir);
    served(two, id_two);
    assert_memory_not_equal(id_one, id_two, 32);
    tiny_free(tiny);
    tiny = tiny_new();
    tv_tiny_field(tiny, "routed_scaling_factor", "1.25");
    tv_tiny_write(tiny, dir);
    served(two, id_two);
    assert_memory_not_equal(id_one, id_two, 32);
    tiny_free(tiny);
}

static void test_b36_index_against_files(void **state)
{
    (void)state;
    struct tv_tiny_model *tiny = tiny_sharded();
    tv_tiny_write(tiny, dir);
    file_remove(SHARD_2);
    refused("tensors in " SHARD_2, "not in the folder", "first is '");
    tv_tiny_write(tiny, dir);
    file_rename(SHARD_1, "renamed.safetensors");
    refused("tensors in " SHARD_1, "not in the folder", "first is '");
    tv_tiny_write(tiny, dir);
    file_rename(SHARD_1, "a");
    file_rename(SHARD_2, SHARD_1);
    file_rename("a", SHARD_2);
    refused("lists tensor", SHARD_1, SHARD_2);
    (void)snprintf(tiny->index_extra, sizeof tiny->index_extra, ",\"ghost.weight\":\"%s\"",
                   SHARD_1);
    tv_tiny_write(tiny, dir);
    refused("ghost.weight", SHARD_1, "does not hold it");
    (void)snprintf(tiny->index_extra, sizeof tiny->index_extra, ",\"x\":\"../%s\"", SHARD_1);
    tv_tiny_write(tiny, dir);
    refused("'x'", "no plain file name", NULL);
    tiny->index_extra[0] = '\0';
    tv_tiny_write(tiny, dir);
    tv_tiny_file(dir, "model.safetensors", "", 0);
    refused("both model.safetensors and model.safetensors.index.json", NULL, NULL);
    tv_tiny_write(tiny, dir);
    tv_tiny_file(dir, "model.safetensors.index.json", "{}", 2);
    refused("no weight_map", NULL, NULL);
    tv_tiny_file(dir, "model.safetensors.index.json", "{\"weight_map\":", 14);
    refused("model.safetensors.index.json, byte", NULL, NULL);
    tiny_free(tiny);
}

/* A tensor that a shard holds but the index does not list, or that two shards hold. */
static void test_b36_headers_beyond_the_index(void **state)
{
    (void)state;
    struct tv_tiny_model *tiny = tiny_sharded();
    char index[600];
    static char text[64 * 1024];
    tv_tiny_write(tiny, dir);
    (void)snprintf(index, sizeof index, "%s/model.safetensors.index.json", dir);
    FILE *file = fopen(index, "rb");
    assert_non_null(file);
    size_t bytes = fread(text, 1, sizeof text, file);
    (void)fclose(file);
    (void)tv_tiny_add(tiny, "stray.weight", 2, 2);
    tv_tiny_write(tiny, dir);
    tv_tiny_file(dir, "model.safetensors.index.json", text, bytes);
    refused("stray.weight", "model-00001-of-00002.safetensors", "is not in");
    tv_tiny_remove(tiny, "stray.weight");
    struct tv_tiny_tensor *twin = tv_tiny_add(tiny, "model.norm.weight", 16, 0);
    twin->shard = 1 - tv_tiny_find(tiny, "model.norm.weight")->shard;
    tv_tiny_write(tiny, dir);
    tv_tiny_file(dir, "model.safetensors.index.json", text, bytes);
    refused("tensor 'model.norm.weight' is in ", SHARD_1 " (64 bytes)", SHARD_2 " (64 bytes)");
    tiny_free(tiny);
}

static void test_missing_pieces(void **state)
{
    (void)state;
    struct tv_tiny_model *tiny = tiny_new();
    tv_tiny_write(tiny, dir);
    file_remove("config.json");
    refused("config.json is not in the folder", NULL, NULL);
    tv_tiny_write(tiny, dir);
    file_remove("model.safetensors");
    refused("neither model.safetensors nor", NULL, NULL);
    tiny_free(tiny);
    for (int32_t i = 0;; i++) {
        tiny = tiny_new();
        if (i == tiny->tensor_count) {
            tiny_free(tiny);
            break;
        }
        char name[128];
        (void)snprintf(name, sizeof name, "%s", tiny->tensors[i].name);
        tv_tiny_remove(tiny, name);
        tv_tiny_write(tiny, dir);
        refused(name, "is missing: model.safetensors has", "bytes");
        tiny_free(tiny);
    }
}

static void test_truncated_file(void **state)
{
    (void)state;
    struct tv_tiny_model *tiny = tiny_new();
    char path[600];
    tv_tiny_write(tiny, dir);
    (void)snprintf(path, sizeof path, "%s/model.safetensors", dir);
    int fd = open(path, O_RDWR);
    assert_true(fd >= 0);
    off_t size = lseek(fd, 0, SEEK_END);
    assert_int_equal(ftruncate(fd, size - 5), 0);
    (void)close(fd);
    refused("model.safetensors", "the file has", NULL);
    tiny_free(tiny);
}

static void test_misshapen(void **state)
{
    (void)state;
    for (int32_t i = 0;; i++) {
        struct tv_tiny_model *tiny = tiny_new();
        if (i == tiny->tensor_count) {
            tiny_free(tiny);
            break;
        }
        struct tv_tiny_tensor *tensor = &tiny->tensors[i];
        if (tensor->rank == 2 && tensor->shape[0] != tensor->shape[1]) {
            int64_t rows = tensor->shape[0]; /* transposed: the same bytes, another shape */
            tensor->shape[0] = tensor->shape[1];
            tensor->shape[1] = rows;
        } else {
            tensor->rank++;
            tensor->shape[tensor->rank - 1] = 1;
        }
        tv_tiny_write(tiny, dir);
        refused(tensor->name, "config.json needs", "bytes");
        tiny_free(tiny);
    }
}

/* In every tensor, not only in those whose type is converted, and in both stored types. */
static void test_not_finite(void **state)
{
    (void)state;
    struct tv_tiny_model *tiny = tiny_new();
    int32_t count = tiny->tensor_count;
    tiny_free(tiny);
    for (int32_t i = 0; i < 2 * count; i++) {
        tiny = tiny_new();
        struct tv_tiny_tensor *tensor = &tiny->tensors[i / 2];
        if (i % 2 == 1) {
            (void)snprintf(tensor->dtype, sizeof tensor->dtype, "BF16");
        }
        tensor->values[1] = NAN;
        tensor->values[tensor->count - 1] = -INFINITY;
        tv_tiny_write(tiny, dir);
        refused(tensor->name, "2 of", "not finite (first: element 1");
        tiny_free(tiny);
    }
}

/* The largest values of a type are finite, whatever they make of the logits. */
static void test_largest_values_are_read(void **state)
{
    (void)state;
    float logits[LOGITS];
    struct tv_tiny_model *tiny = tiny_new();
    struct tv_tiny_tensor *tensor = tv_tiny_find(tiny, "model.embed_tokens.weight");
    (void)snprintf(tensor->dtype, sizeof tensor->dtype, "BF16");
    tensor->values[0] = tv_bf16_to_f32(0x7f7f); /* token 0: no row that is run */
    tv_tiny_write(tiny, dir);
    served(logits, NULL);
    tiny_free(tiny);
}

/* Opening waits for nothing: a FIFO without a writer is refused like every other odd thing. */
static void test_files_that_are_none(void **state)
{
    (void)state;
    static const char *const names[] = {"config.json", "model.safetensors",
                                        "model.safetensors.index.json", "tokenizer.json"};
    for (size_t i = 0; i < 2 * (sizeof names / sizeof names[0]); i++) {
        const char *name = names[i / 2];
        char path[700];
        struct tv_tiny_model *tiny = tiny_new();
        tv_tiny_write(tiny, dir);
        (void)snprintf(path, sizeof path, "%s/%s", dir, name);
        (void)unlink(path); /* the last two are not there */
        assert_int_equal(i % 2 == 0 ? mkfifo(path, 0600) : mkdir(path, 0700), 0);
        if (i / 2 == 2) { /* an index stands alone */
            file_remove("model.safetensors");
        }
        (void)alarm(20);
        refused(name, NULL, NULL);
        (void)alarm(0);
        assert_int_equal(i % 2 == 0 ? unlink(path) : rmdir(path), 0);
        tiny_free(tiny);
    }
}

static void test_b35_fp8_is_refused(void **state)
{
    (void)state;
    static const char *const dtypes[] = {"F8_E4M3", "F8_E5M2", "U8", "I8"};
    for (size_t i = 0; i < 4; i++) {
        struct tv_tiny_model *tiny = tiny_new();
        struct tv_tiny_tensor *tensor = tv_tiny_find(tiny, "model.layers.0.mlp.up_proj.weight");
        (void)snprintf(tensor->dtype, sizeof tensor->dtype, "%s", dtypes[i]);
        tv_tiny_write(tiny, dir);
        refused("model.layers.0.mlp.up_proj.weight", dtypes[i], "model.safetensors");
        tiny_free(tiny);
    }
    struct tv_tiny_model *tiny = tiny_new();
    tv_tiny_field(tiny, "quantization_config", "{\"quant_method\":\"fp8\"}");
    tv_tiny_write(tiny, dir);
    refused("quantization_config", "FP8", NULL);
    tiny_free(tiny);
}

/* {tied true, false, absent} x {head absent, present, equal, different} */
static void test_b39_heads(void **state)
{
    (void)state;
    float own[LOGITS], shared[LOGITS], got[LOGITS];
    struct tv_tiny_model *tiny = tiny_new();
    tv_tiny_write(tiny, dir);
    served(own, NULL); /* untied and present: its own head */
    tv_tiny_field(tiny, "tie_word_embeddings", NULL);
    tv_tiny_write(tiny, dir);
    served(got, NULL); /* absent is untied */
    assert_memory_equal(got, own, sizeof own);
    tv_tiny_field(tiny, "tie_word_embeddings", "true");
    tv_tiny_write(tiny, dir);
    served(shared, NULL); /* tied with another head stored: the embedding, logged */
    assert_memory_not_equal(shared, own, sizeof own);
    assert_non_null(strstr(logged, "lm_head.weight differs"));
    struct tv_tiny_tensor *head = tv_tiny_find(tiny, "lm_head.weight");
    memcpy(head->values, tv_tiny_find(tiny, "model.embed_tokens.weight")->values,
           head->count * sizeof(float));
    tv_tiny_write(tiny, dir);
    served(got, NULL); /* tied and equal: nothing to say */
    assert_memory_equal(got, shared, sizeof shared);
    assert_null(strstr(logged, "lm_head"));
    tv_tiny_remove(tiny, "lm_head.weight");
    tv_tiny_write(tiny, dir);
    served(got, NULL); /* tied and absent */
    assert_memory_equal(got, shared, sizeof shared);
    tv_tiny_field(tiny, "tie_word_embeddings", "false");
    tv_tiny_write(tiny, dir);
    refused("lm_head.weight", "is missing", NULL);
    tiny_free(tiny);
}

static size_t count_of(const char *text, const char *part)
{
    size_t count = 0;
    for (const char *at = strstr(text, part); at != NULL; at = strstr(at + 1, part)) {
        count++;
    }
    return count;
}

static void test_b40_prediction_layers(void **state)
{
    (void)state;
    float plain[LOGITS], got[LOGITS];
    uint8_t id_plain[32], id_got[32];
    struct tv_tiny_model *tiny = tiny_new();
    tv_tiny_write(tiny, dir);
    served(plain, id_plain);
    assert_string_equal(logged, "");
    (void)tv_tiny_add(tiny, "model.layers.2.eh_proj.weight", 16, 32);
    (void)tv_tiny_add(tiny, "model.layers.2.enorm.weight", 16, 0);
    (void)tv_tiny_add(tiny, "model.layers.3.self_attn.o_proj.weight", 16, 24);
    tv_tiny_write(tiny, dir);
    served(got, id_got);
    assert_memory_equal(got, plain, sizeof plain);
    assert_memory_equal(id_got, id_plain, 32);
    assert_non_null(strstr(logged, "3 tensors (3648 bytes) of multi-token-prediction layers"));
    assert_int_equal(count_of(logged, "\n"), 1);
    (void)tv_tiny_add(tiny, "model.layers.1.unknown.weight", 4, 4);
    tv_tiny_write(tiny, dir);
    served(got, NULL);
    assert_memory_equal(got, plain, sizeof plain);
    assert_non_null(strstr(logged, "warning: 1 unknown tensors (64 bytes) are ignored, first "
                                   "'model.layers.1.unknown.weight'"));
    tiny_free(tiny);
}

/* Experts of different types are widened, which is exact. */
static void test_mixed_dtypes(void **state)
{
    (void)state;
    float plain[LOGITS], got[LOGITS];
    struct tv_tiny_model *tiny = tiny_new();
    for (int32_t i = 0; i < tiny->tensor_count; i++) {
        struct tv_tiny_tensor *tensor = &tiny->tensors[i];
        for (size_t v = 0; v < tensor->count; v++) {
            tensor->values[v] = tv_bf16_to_f32(tv_f32_to_bf16(tensor->values[v]));
        }
    }
    tv_tiny_write(tiny, dir);
    served(plain, NULL);
    for (int32_t i = 0; i < tiny->tensor_count; i += 2) {
        (void)snprintf(tiny->tensors[i].dtype, sizeof tiny->tensors[i].dtype, "BF16");
    }
    tv_tiny_write(tiny, dir);
    served(got, NULL);
    assert_memory_equal(got, plain, sizeof plain);
    tiny_free(tiny);
}

/* moe_layer_freq 2 leaves every odd layer dense, so layer 1's experts are not looked for. */
static void test_moe_layer_freq(void **state)
{
    (void)state;
    struct tv_tiny_model *tiny = tiny_new();
    tv_tiny_field(tiny, "moe_layer_freq", "2");
    tv_tiny_write(tiny, dir);
    refused("model.layers.1.mlp.gate_proj.weight", "is missing", NULL);
    tiny_free(tiny);
}

static int folder_make(void **state)
{
    (void)state;
    tv_tiny_folder(dir, sizeof dir);
    return 0;
}

static int folder_remove(void **state)
{
    (void)state;
    tv_tiny_folder_remove(dir);
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_model_id_ignores_shards),
        cmocka_unit_test(test_b36_index_against_files),
        cmocka_unit_test(test_b36_headers_beyond_the_index),
        cmocka_unit_test(test_missing_pieces),
        cmocka_unit_test(test_truncated_file),
        cmocka_unit_test(test_misshapen),
        cmocka_unit_test(test_not_finite),
        cmocka_unit_test(test_largest_values_are_read),
        cmocka_unit_test(test_files_that_are_none),
        cmocka_unit_test(test_b35_fp8_is_refused),
        cmocka_unit_test(test_b39_heads),
        cmocka_unit_test(test_b40_prediction_layers),
        cmocka_unit_test(test_mixed_dtypes),
        cmocka_unit_test(test_moe_layer_freq),
    };
    return cmocka_run_group_tests(tests, folder_make, folder_remove);
}
