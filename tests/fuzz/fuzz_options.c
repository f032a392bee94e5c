/*
 * fuzz_options.c - bytes as the configuration file, or as the file of keys.
 *
 * The first byte chooses. A configuration that is accepted, printed and read again means the same;
 * keys that are accepted have names and scopes, and a secret of the file is found. What is refused
 * has a sentence.
 */
#include <errno.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "base/log.h"
#include "config/config.h"
#include "fuzz.h"
#include "memory_file.h"

static int load(const void *data, size_t bytes, struct tv_config *config, char *error,
                size_t error_bytes)
{
    char name[] = "treeverifyd", option[] = "--config", only[] = "--print-config";
    struct memory_file file = memory_file_make(data, bytes);
    char *argv[] = {name, option, file.path, only, NULL};
    int rc = tv_config_load(config, 4, argv, error, error_bytes);
    memory_file_drop(&file);
    return rc;
}

/* The lines that are settings, without the comments between, which name files; owned. */
static char *settings(const struct tv_config *config, size_t *ret_bytes)
{
    char *printed = NULL;
    size_t bytes = 0, kept = 0;
    FILE *out = open_memstream(&printed, &bytes);
    REQUIRE(out != NULL);
    tv_config_print(config, out);
    REQUIRE(fclose(out) == 0 && printed != NULL);
    for (size_t at = 0; at < bytes;) {
        size_t line = strcspn(printed + at, "\n") + 1;
        if (printed[at] != '#') {
            memmove(printed + kept, printed + at, line);
            kept += line;
        }
        at += line;
    }
    *ret_bytes = kept;
    return printed;
}

static void config_try(const uint8_t *data, size_t bytes)
{
    static struct tv_config config, again; /* large */
    char error[600] = "";
    int rc = load(data, bytes, &config, error, sizeof error);
    if (rc != 0) {
        REQUIRE(rc == -EBADMSG && error[0] != '\0');
        return;
    }
    size_t first_bytes, second_bytes;
    char *first = settings(&config, &first_bytes), *second;
    rc = load(first, first_bytes, &again, error, sizeof error);
    if (rc != 0) {
        fprintf(stderr, "%s\n%.*s", error, (int)first_bytes, first);
    }
    REQUIRE(rc == 0);
    second = settings(&again, &second_bytes);
    REQUIRE(first_bytes == second_bytes && memcmp(first, second, first_bytes) == 0);
    free(first);
    free(second);
}

static void keys_try(const uint8_t *data, size_t bytes)
{
    struct memory_file file = memory_file_make(data, bytes);
    struct tv_keys keys = {.count = 0};
    char error[600] = "";
    int rc = tv_keys_load(file.path, &keys, error, sizeof error);
    if (rc != 0) {
        REQUIRE(rc == -EBADMSG && error[0] != '\0' && keys.count == 0);
    } else {
        REQUIRE(keys.count >= 1 && keys.count <= TV_KEYS_MAX);
        for (int32_t i = 0; i < keys.count; i++) {
            REQUIRE(keys.keys[i].name[0] != '\0' && keys.keys[i].scopes != 0);
        }
        /* the last line that has a colon ends with a secret */
        const uint8_t *end = data + bytes;
        const uint8_t *colon = memrchr(data, ':', bytes);
        const uint8_t *line = colon == NULL ? NULL : memrchr(data, '\n', (size_t)(colon - data));
        line = line == NULL ? data : line + 1;
        if (colon != NULL && *line != '#') {
            const uint8_t *stop = memchr(colon, '\n', (size_t)(end - colon));
            size_t secret = (size_t)((stop == NULL ? end : stop) - colon - 1);
            secret -= secret > 0 && colon[secret] == '\r';
            REQUIRE(tv_keys_find(&keys, (const char *)colon + 1, secret) != NULL);
        }
        REQUIRE(tv_keys_find(&keys, "", 0) == NULL);
        tv_keys_finish(&keys);
    }
    memory_file_drop(&file);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    static int is_set = 0;
    if (!is_set) { /* neither what surrounds the test counts, nor warnings of the modes of files */
        REQUIRE(clearenv() == 0);
        tv_log_level_set(TV_LOG_ERROR);
        is_set = 1;
    }
    if (bytes < 1) {
        return 0;
    }
    if (data[0] % 2 == 0) {
        config_try(data + 1, bytes - 1);
    } else {
        keys_try(data + 1, bytes - 1);
    }
    return 0;
}
