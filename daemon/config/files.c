/*
 * files.c - the INI file and the drop-in files beside it.
 *
 * Owns their order: a later file's key replaces an earlier one's. Refuses unknown keys and
 * sections, a key twice in one file, lines that are too long, and a file of the folder that cannot
 * be read: half a configuration is none.
 */
#include <dirent.h>
#include <errno.h>
#include <ini.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "config/options.h"

/* The file being read. inih tells a handler neither the line nor the file. */
struct file_reading {
    struct tv_config *config;
    FILE *stream;
    unsigned char number; /* as tv_config's origin_file */
    unsigned char seen[TV_CONFIG_OPTIONS_MAX];
    int line_too_long;
    char error[400]; /* the first refusal, or "" */
};

/* inih's handler: 1 = fine, 0 = refused. */
static int file_key(void *context, const char *section, const char *name, const char *value)
{
    struct file_reading *reading = context;
    const struct tv_option *option = tv_options_find(name, strlen(name));
    char reason[300] = "";
    size_t count;
    const struct tv_option *table = tv_options_table(&count);
    if (reading->error[0] != '\0') {
        return 0;
    }
    if (section[0] != '\0' && strcmp(section, "treeverifyd") != 0) {
        (void)snprintf(reason, sizeof reason, "no section [%.100s] is known", section);
    } else if (option == NULL || option->value == NULL || strchr(name, '-') != NULL) {
        (void)snprintf(reason, sizeof reason, "no such key");
    } else if (reading->seen[option - table]) {
        (void)snprintf(reason, sizeof reason, "given twice");
    } else if (value[0] == ';') { /* what --print-config says can be read again */
        (void)snprintf(reason, sizeof reason,
                       "a value cannot begin with ;, which begins a comment");
    } else if (tv_config_option_set(reading->config, option, TV_ORIGIN_FILE, value, reason,
                                    sizeof reason) == 0) {
        reading->seen[option - table] = 1;
        reading->config->origin_file[option - table] = reading->number;
        return 1;
    }
    (void)snprintf(reading->error, sizeof reading->error, "%.80s: %s", name, reason);
    return 0;
}

/* fgets that notices a line inih would cut in two. */
static char *file_line(char *line, int bytes, void *context)
{
    struct file_reading *reading = context;
    char *got = fgets(line, bytes, reading->stream);
    if (got != NULL && strchr(line, '\n') == NULL && !feof(reading->stream)) {
        reading->line_too_long = 1;
    }
    return got;
}

static int fail(char *error, size_t error_bytes, const char *path, const char *reason)
{
    (void)snprintf(error, error_bytes, "%.300s: %.200s", path, reason);
    return -EBADMSG;
}

static int read_file(struct tv_config *config, const char *path, unsigned char number, char *error,
                     size_t error_bytes)
{
    struct file_reading reading = {.config = config, .number = number, .stream = fopen(path, "re")};
    if (reading.stream == NULL) {
        return fail(error, error_bytes, path, strerror(errno));
    }
    int line = ini_parse_stream(file_line, &reading, file_key, &reading);
    int read_failed = ferror(reading.stream);
    (void)fclose(reading.stream); /* nothing was written to it */
    if (line == 0 && !reading.line_too_long && !read_failed) {
        return 0;
    }
    const char *reason = reading.error;
    if (read_failed) {
        reason = "cannot be read";
    } else if (reading.line_too_long) {
        reason = "a line is too long";
    } else if (reason[0] == '\0') {
        reason = "not a line of the form key = value";
    }
    (void)snprintf(error, error_bytes, "%.200s:%d: %s", path, line, reason);
    return -EBADMSG;
}

static int is_dropin(const struct dirent *entry)
{
    size_t bytes = strlen(entry->d_name);
    return entry->d_name[0] != '.' && bytes > 5 && strcmp(entry->d_name + bytes - 5, ".conf") == 0;
}

/* By byte: the same order in every locale. */
static int by_name(const struct dirent **a, const struct dirent **b)
{
    return strcmp((*a)->d_name, (*b)->d_name);
}

static int read_dropin(struct tv_config *config, const char *folder, const char *name, int number,
                       char *error, size_t error_bytes)
{
    char path[sizeof config->file + TV_CONFIG_NAME_BYTES + 4];
    if (strlen(name) >= TV_CONFIG_NAME_BYTES) {
        return fail(error, error_bytes, folder, "a file's name is too long");
    }
    (void)snprintf(config->dropins[number], sizeof config->dropins[number], "%s", name);
    (void)snprintf(path, sizeof path, "%s/%s", folder, name); /* fits */
    return read_file(config, path, (unsigned char)(number + 1), error, error_bytes);
}

int tv_config_read_files(struct tv_config *config, const char *path, char *error,
                         size_t error_bytes)
{
    char folder[sizeof config->file + 2];
    struct dirent **entries = NULL;
    if (strlen(path) >= sizeof config->file) {
        return fail(error, error_bytes, path, "the path is too long");
    }
    (void)snprintf(config->file, sizeof config->file, "%s", path);
    (void)snprintf(folder, sizeof folder, "%s.d", path); /* fits */
    int rc = read_file(config, path, 0, error, error_bytes);
    if (rc != 0) {
        return rc;
    }
    int count = scandir(folder, &entries, is_dropin, by_name);
    if (count < 0) {
        return errno == ENOENT ? 0 : fail(error, error_bytes, folder, strerror(errno));
    }
    if (count > TV_CONFIG_DROPINS_MAX) {
        rc = fail(error, error_bytes, folder, "there are more than 16 files");
    }
    for (int i = 0; i < count; i++) {
        if (rc == 0) {
            rc = read_dropin(config, folder, entries[i]->d_name, i, error, error_bytes);
        }
        free(entries[i]);
    }
    free(entries);
    return rc;
}
