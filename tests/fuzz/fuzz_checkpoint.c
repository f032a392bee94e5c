/*
 * fuzz_checkpoint.c - bytes as config.json, or as the index of a checkpoint of two files.
 *
 * The first byte chooses. A config that is accepted has every number in the range that the forward
 * pass counts on, and rope tables that are finite; an index that is accepted names what is there
 * and nothing else. What is refused has a sentence.
 */
#include <errno.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "fuzz.h"
#include "memory_file.h"
#include "model/checkpoint.h"
#include "model/model_config.h"

#define POSITIONS     3
#define ROPE_DIM_MOST 4096

static const char shard_head[] =
    "{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]},"
    "\"b.weight\":{\"dtype\":\"BF16\",\"shape\":[2,1],\"data_offsets\":[4,8]}}";
static const char other_head[] = "{\"c\":{\"dtype\":\"F32\",\"shape\":[],\"data_offsets\":[0,4]}}";

static char dir[256];
static int folder = -1;

static void file_write(const char *name, const void *data, size_t bytes)
{
    int fd = openat(folder, name, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    REQUIRE(fd >= 0 && write(fd, data, bytes) == (ssize_t)bytes);
    (void)close(fd); /* what it holds is read at once, in this process */
}

static void shard_write(const char *name, const char *head, size_t data_bytes)
{
    char bytes[512] = {0};
    uint64_t length = strlen(head);
    REQUIRE(sizeof length + length + data_bytes <= sizeof bytes);
    memcpy(bytes, &length, sizeof length);
    memcpy(bytes + sizeof length, head, length);
    file_write(name, bytes, sizeof length + length + data_bytes);
}

static void folder_drop(void)
{
    static const char *const names[] = {"config.json", "model.safetensors.index.json",
                                        "1.safetensors", "2.safetensors"};
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        (void)unlinkat(folder, names[i], 0); /* what is left is in a folder for what passes */
    }
    (void)rmdir(dir);
}

static void folder_make(void)
{
    const char *base = getenv("TMPDIR");
    if (folder >= 0) {
        return;
    }
    if (base == NULL) { /* a file is written for every input: in memory where that can be had */
        base = access("/dev/shm", W_OK | X_OK) == 0 ? "/dev/shm" : "/tmp";
    }
    (void)snprintf(dir, sizeof dir, "%s/fuzz.XXXXXX", base);
    REQUIRE(mkdtemp(dir) != NULL);
    folder = open(dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    REQUIRE(folder >= 0 && atexit(folder_drop) == 0);
    file_write("config.json", "{}", 2);
    shard_write("1.safetensors", shard_head, 8);
    shard_write("2.safetensors", other_head, 4);
}

static void check_config(const struct tv_model_config *config)
{
    REQUIRE(config->vocab > 0 && config->hidden > 0 && config->layers > 0 && config->heads > 0);
    REQUIRE(config->q_lora >= 0 && config->kv_lora > 0 && config->rope_dim > 0);
    REQUIRE(config->rope_dim % 2 == 0 && config->nope_dim > 0 && config->v_dim > 0);
    REQUIRE(config->intermediate > 0 && config->max_position > 0);
    REQUIRE(config->experts >= 0 && config->shared_experts >= 0);
    if (config->experts > 0) {
        REQUIRE(config->experts_per_token > 0 && config->experts_per_token <= config->experts);
        REQUIRE(config->moe_intermediate > 0 && config->n_group > 0);
        REQUIRE(config->experts % config->n_group == 0);
        REQUIRE(config->topk_group > 0 && config->topk_group <= config->n_group);
        REQUIRE(isfinite(config->routed_scaling_factor));
    }
    REQUIRE(config->rms_eps > 0 && config->lora_rms_eps > 0 && isfinite(config->rope_theta));
    REQUIRE(isfinite(config->softmax_scale) && config->softmax_scale > 0);
    REQUIRE(isfinite(config->rope_attention_factor) && config->rope_attention_factor > 0);
    if (config->rope_dim <= ROPE_DIM_MOST) {
        size_t count = (size_t)POSITIONS * (size_t)config->rope_dim;
        float *table = malloc(count * sizeof *table);
        REQUIRE(table != NULL);
        tv_model_rope_table(config, POSITIONS, table);
        for (size_t i = 0; i < count; i++) {
            REQUIRE(isfinite(table[i]));
        }
        free(table);
    }
}

static void config_try(const char *text, size_t bytes)
{
    const struct tv_json_limits limits = {.depth_max = 16, .values_max = 100000};
    struct tv_model_config config;
    struct tv_model_error error = {{0}};
    struct tv_json_error json_error;
    struct tv_json *doc = NULL;
    if (tv_json_parse(text, bytes, &limits, &doc, &json_error) != 0) {
        return; /* fuzz_request has it */
    }
    if (tv_json_type(tv_json_root(doc)) == TV_JSON_OBJECT) {
        int rc = tv_model_config_read(doc, &config, &error);
        if (rc == 0) {
            check_config(&config);
        } else {
            REQUIRE(rc == -EBADMSG && error.text[0] != '\0');
        }
    }
    tv_json_destroy(doc);
}

static void index_try(const char *text, size_t bytes)
{
    struct tv_model_error error = {{0}};
    struct tv_checkpoint checkpoint;
    folder_make();
    file_write("model.safetensors.index.json", text, bytes);
    int rc = tv_checkpoint_open(dir, &checkpoint, &error);
    if (rc != 0) {
        REQUIRE(rc == -EBADMSG && error.text[0] != '\0');
        return;
    }
    /* every tensor of a file that is named must be named */
    REQUIRE(checkpoint.entry_count >= 1 && checkpoint.entry_count <= 3);
    for (size_t i = 0; i < checkpoint.entry_count; i++) {
        const struct tv_checkpoint_entry *entry = &checkpoint.entries[i];
        REQUIRE(tv_checkpoint_find(&checkpoint, entry->tensor->name) == entry);
        REQUIRE(memmem(text, bytes, entry->file->name, strlen(entry->file->name)) != NULL ||
                memchr(text, '\\', bytes) != NULL);
    }
    tv_checkpoint_finish(&checkpoint);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    if (bytes < 1) {
        return 0;
    }
    char *text = malloc(bytes); /* exact size, so that a sanitizer sees the edges */
    REQUIRE(text != NULL);
    memcpy(text, data + 1, bytes - 1);
    if (data[0] % 2 == 0) {
        config_try(text, bytes - 1);
    } else {
        index_try(text, bytes - 1);
    }
    free(text);
    return 0;
}
