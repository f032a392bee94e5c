/*
 * keys.c - the file of bearer keys: who may call what.
 *
 * Keeps SHA-256 of each secret and never the secret: looking one up takes as long for every guess,
 * and a core dump tells nothing. Refuses a file with anything wrong in it, or with no key, as a
 * whole; no message of it quotes a line.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "base/digest.h"
#include "base/log.h"
#include "config/config.h"

#define LINE_BYTES       512
#define SECRET_BYTES_MIN 16

struct scope_name {
    const char *name;
    int scope;
};
static const struct scope_name scope_names[] = {
    {"verify", TV_SCOPE_VERIFY}, {"metrics", TV_SCOPE_METRICS}, {"admin", TV_SCOPE_ADMIN}};

static void sum_of(const char *secret, size_t bytes, uint8_t ret_sum[32])
{
    struct tv_sha256 hash;
    tv_sha256_init(&hash);
    tv_sha256_update(&hash, secret, bytes);
    tv_sha256_finish(&hash, ret_sum);
}

static int name_take(const char *text, size_t bytes, struct tv_key *key)
{
    if (bytes < 1 || bytes >= sizeof key->name) {
        return -EINVAL;
    }
    for (size_t i = 0; i < bytes; i++) {
        char c = text[i];
        int is_alnum = (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
        if (!is_alnum && c != '_' && c != '-') {
            return -EINVAL;
        }
    }
    memcpy(key->name, text, bytes);
    key->name[bytes] = '\0';
    return 0;
}

/* verify[,metrics[,admin]] in any order, none twice. */
static int scopes_take(const char *text, size_t bytes, struct tv_key *key)
{
    size_t at = 0;
    do {
        size_t end = at;
        int scope = 0;
        while (end < bytes && text[end] != ',') {
            end++;
        }
        for (size_t i = 0; i < sizeof scope_names / sizeof scope_names[0]; i++) {
            if (strlen(scope_names[i].name) == end - at &&
                memcmp(scope_names[i].name, text + at, end - at) == 0) {
                scope = scope_names[i].scope;
            }
        }
        if (scope == 0 || (key->scopes & scope) != 0) {
            return -EINVAL;
        }
        key->scopes |= scope;
        at = end + 1;
    } while (at <= bytes);
    return 0;
}

/* NULL, or what is wrong with the line. */
static const char *line_take(const char *line, struct tv_key *ret_key)
{
    struct tv_key key = {.scopes = 0};
    const char *scopes = strchr(line, ':');
    const char *secret = scopes == NULL ? NULL : strchr(scopes + 1, ':');
    if (secret == NULL) {
        return "not of the form name:scope[,scope]:secret";
    }
    if (name_take(line, (size_t)(scopes - line), &key) != 0) {
        return "a name is 1 to 32 letters, digits, _ or -";
    }
    if (scopes_take(scopes + 1, (size_t)(secret - scopes - 1), &key) != 0) {
        return "scopes are verify, metrics and admin, with commas between";
    }
    secret++;
    size_t bytes = strlen(secret);
    int is_bad = bytes < SECRET_BYTES_MIN || bytes > TV_KEY_SECRET_BYTES_MAX;
    for (size_t i = 0; i < bytes; i++) {
        is_bad |= secret[i] <= 0x20 || secret[i] >= 0x7f || secret[i] == ':';
    }
    if (is_bad) {
        return "a secret is 16 to 256 printable characters without space and colon";
    }
    sum_of(secret, bytes, key.sum);
    *ret_key = key;
    return NULL;
}

/* NULL, or what is wrong. */
static const char *key_add(struct tv_keys *keys, const struct tv_key *key)
{
    for (int32_t i = 0; i < keys->count; i++) {
        if (memcmp(keys->keys[i].sum, key->sum, sizeof key->sum) == 0) {
            return "the secret is another line's too";
        }
    }
    if (keys->count == TV_KEYS_MAX) {
        return "there are more than 1024 keys";
    }
    keys->keys[keys->count++] = *key;
    return NULL;
}

/* One line without its end; 0: there is none. NULL in *ret_wrong, or what is wrong with it. */
static int line_read(FILE *file, char *line, size_t bytes, const char **ret_wrong)
{
    size_t count = 0;
    int c = fgetc(file);
    if (c == EOF) {
        return 0;
    }
    for (; c != EOF && c != '\n'; c = fgetc(file)) {
        if (c == '\0' || count + 1 == bytes) {
            *ret_wrong = "the line is too long, or has a NUL";
            return 1;
        }
        line[count++] = (char)c;
    }
    count -= count > 0 && line[count - 1] == '\r';
    line[count] = '\0';
    return 1;
}

static const char *read_lines(FILE *file, struct tv_keys *keys, int *ret_line)
{
    char line[LINE_BYTES];
    const char *wrong = NULL;
    while (wrong == NULL && line_read(file, line, sizeof line, &wrong)) {
        struct tv_key key;
        ++*ret_line;
        if (wrong == NULL && line[0] != '\0' && line[0] != '#') {
            wrong = line_take(line, &key);
            wrong = wrong != NULL ? wrong : key_add(keys, &key);
        }
    }
    explicit_bzero(line, sizeof line);
    if (wrong == NULL && ferror(file)) {
        wrong = "it cannot be read";
    }
    return wrong;
}

int tv_keys_load(const char *text, struct tv_keys *ret_keys, char *error, size_t error_bytes)
{
    struct tv_keys keys = {.keys = calloc(TV_KEYS_MAX, sizeof *keys.keys)};
    struct stat status;
    const char *wrong = NULL;
    int line = 0;
    char path[4096];
    int rc = tv_config_path(text, path, sizeof path, error, error_bytes);
    if (rc != 0) {
        tv_keys_finish(&keys);
        return rc;
    }
    FILE *file = keys.keys == NULL ? NULL : fopen(path, "re");
    if (file == NULL) {
        wrong = keys.keys == NULL ? "no memory" : strerror(errno);
    } else {
        (void)setvbuf(file, NULL, _IONBF, 0); /* no copy of the secrets stays in a buffer */
        if (fstat(fileno(file), &status) == 0 && (status.st_mode & (S_IRWXO | S_IWGRP)) != 0) {
            tv_log(TV_LOG_WARNING, "api_key_file: others may read or write it (mode %03o)",
                   (unsigned int)status.st_mode & 0777u);
        }
        wrong = read_lines(file, &keys, &line);
        (void)fclose(file); /* only read */
        if (wrong == NULL && keys.count == 0) {
            wrong = "it has no key";
            line = 0;
        }
    }
    if (wrong != NULL) {
        (void)snprintf(error, error_bytes,
                       line > 0 ? "api_key_file %.300s: %s (line %d)" : "api_key_file %.300s: %s",
                       path, wrong, line);
        tv_keys_finish(&keys);
        return -EBADMSG;
    }
    *ret_keys = keys;
    return 0;
}

void tv_keys_finish(struct tv_keys *keys)
{
    free(keys->keys);
    *keys = (struct tv_keys){.count = 0};
}

const struct tv_key *tv_keys_find(const struct tv_keys *keys, const char *secret, size_t bytes)
{
    const struct tv_key *found = NULL;
    uint8_t sum[32];
    sum_of(secret, bytes, sum);
    for (int32_t i = 0; i < keys->count; i++) { /* all of them, and every byte, whatever differs */
        const volatile uint8_t *kept = keys->keys[i].sum;
        uint8_t differs = 0;
        for (size_t at = 0; at < sizeof sum; at++) {
            differs |= (uint8_t)(kept[at] ^ sum[at]);
        }
        found = differs == 0 ? &keys->keys[i] : found;
    }
    return found;
}
