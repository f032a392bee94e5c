/*
 * reload.c - which options a running daemon takes over at SIGHUP, and how.
 *
 * Owns the list. What is not on it was settled at the start (memory, sockets, the model) and waits
 * for a restart, which is said and not done by halves.
 */
#include <stdlib.h>
#include <string.h>

#include "config/options.h"

struct reloaded {
    const char *name;
    size_t offset, bytes;
};
#define RELOADED(member)                                                                           \
    {                                                                                              \
#member, offsetof(struct tv_config, member), sizeof((struct tv_config *)0)->member         \
    }
static const struct reloaded values[] = {
    RELOADED(max_sessions),       RELOADED(queue_max),         RELOADED(batch_window_us),
    RELOADED(principal_sessions), RELOADED(principal_pages),   RELOADED(principal_nodes_s),
    RELOADED(principal_rejected), RELOADED(answers_bytes),     RELOADED(drain_grace_s),
    RELOADED(drain_max_s),        RELOADED(event_readers_max), RELOADED(log_level),
};
static const char *const contents[] = {"api_key_file", "tls_cert", "tls_key"};

static const struct reloaded *reloaded_of(const struct tv_option *option)
{
    for (size_t i = 0; i < sizeof values / sizeof values[0]; i++) {
        if (strcmp(values[i].name, option->name) == 0) {
            return &values[i];
        }
    }
    return NULL;
}

enum tv_reload tv_options_reload(const struct tv_option *option)
{
    for (size_t i = 0; i < sizeof contents / sizeof contents[0]; i++) {
        if (strcmp(contents[i], option->name) == 0) {
            return TV_RELOAD_CONTENTS;
        }
    }
    return reloaded_of(option) != NULL ? TV_RELOAD_VALUE : TV_RELOAD_NO;
}

/* As --print-config has it, or NULL: no memory. The caller's to free. */
static char *text_of(const struct tv_option *option, const struct tv_config *config)
{
    char *text = NULL;
    size_t bytes = 0;
    FILE *out = open_memstream(&text, &bytes);
    if (out == NULL) {
        return NULL;
    }
    option->print(option, config, out);
    if (fclose(out) != 0) {
        free(text);
        return NULL;
    }
    return text;
}

/* 1: their values differ, as far as can be told. */
static int differs(const struct tv_option *option, const struct tv_config *a,
                   const struct tv_config *b)
{
    char *texts[2] = {text_of(option, a), text_of(option, b)};
    int differs = texts[0] != NULL && texts[1] != NULL && strcmp(texts[0], texts[1]) != 0;
    free(texts[0]);
    free(texts[1]);
    return differs;
}

void tv_config_take(struct tv_config *config, const struct tv_config *fresh)
{
    size_t count;
    const struct tv_option *table = tv_options_table(&count);
    for (size_t i = 0; i < count; i++) {
        const struct reloaded *reloaded = reloaded_of(&table[i]);
        if (reloaded != NULL) {
            memcpy((char *)config + reloaded->offset, (const char *)fresh + reloaded->offset,
                   reloaded->bytes);
            config->origin[i] = fresh->origin[i];
            config->origin_file[i] = fresh->origin_file[i];
        }
    }
}

void tv_config_waiting(const struct tv_config *config, const struct tv_config *fresh,
                       char *ret_names, size_t names_bytes)
{
    size_t count, at = 0;
    const struct tv_option *table = tv_options_table(&count);
    ret_names[0] = '\0';
    for (size_t i = 0; i < count; i++) {
        /* what nobody has set may have been settled by the start */
        int is_set = (config->origin[i] | fresh->origin[i]) != TV_ORIGIN_DEFAULT;
        if (is_set && table[i].print != NULL && reloaded_of(&table[i]) == NULL &&
            differs(&table[i], config, fresh)) {
            int wrote = snprintf(ret_names + at, names_bytes - at, "%s%s", at > 0 ? ", " : "",
                                 table[i].name);
            at += wrote > 0 && (size_t)wrote < names_bytes - at ? (size_t)wrote : 0;
        }
    }
}
