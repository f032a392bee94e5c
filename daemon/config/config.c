/*
 * config.c - settings from the command line, the environment and the files, checked once.
 *
 * Owns precedence and the checks between settings. Refuses unknown options, and listeners that
 * would be open to others.
 */
#include "config/config.h"

#include <arpa/inet.h>
#include <ctype.h>
#include <errno.h>
#include <netinet/in.h>
#include <stdlib.h>
#include <string.h>

#include "config/options.h"
#include "proto/limits.h"

static const char *const origin_names[] = {
    [TV_ORIGIN_DEFAULT] = "default",
    [TV_ORIGIN_FILE] = "file",
    [TV_ORIGIN_ENVIRONMENT] = "environment",
    [TV_ORIGIN_COMMAND_LINE] = "command line",
};

static void defaults(struct tv_config *config)
{
    *config = (struct tv_config){
        .backend = "cpu",
        .listen_host = "127.0.0.1",
        .listen_port = 8471,
        .admin_on = 1,
        .admin_host = "",
        .admin_port = -1,
        .page_size = 64,
        .device_reserve = (int64_t)512 << 20,
        .pages_share = 1.0,
        .kv_dtype = TV_F32,
        .prefix_cache = TV_PREFIX_CACHE_ON,
        .tls_min = 12,
        .max_nodes = TV_NODES_DEFAULT,
        .max_depth = TV_DEPTH_DEFAULT,
        .max_sessions = 256,
        .queue_max = 256,
        .batch_window_us = 500,
        .body_bytes = TV_BODY_BYTES_DEFAULT,
        .body_bytes_large = TV_BODY_BYTES_LARGE_DEFAULT,
        .inline_bytes = TV_INLINE_BYTES_DEFAULT,
        .answers_bytes = 256 << 20,
        .fetch_bytes = 256 << 20,
        .snapshot_bytes = (int64_t)32 << 30,
        .snapshot_max_s = 20,
        .connections_max = 2048,
        .event_readers_max = 256,
        .idle_pages_s = 10,
        .drain_grace_s = 10,
        .drain_max_s = 30,
        .http_threads = 2,
        .log_level = "info",
    };
}

int tv_config_option_set(struct tv_config *config, const struct tv_option *option,
                         enum tv_origin origin, const char *text, char *reason, size_t reason_bytes)
{
    size_t count;
    size_t index = (size_t)(option - tv_options_table(&count));
    if (config->origin[index] > (unsigned char)origin) {
        struct tv_config discarded = *config;
        return option->parse(option, &discarded, text, reason, reason_bytes);
    }
    config->origin[index] = (unsigned char)origin;
    return option->parse(option, config, text, reason, reason_bytes);
}

static int fail(char *error, size_t error_bytes, int code, const char *what, const char *name,
                const char *reason)
{
    (void)snprintf(error, error_bytes, "%s%.100s: %.300s", what, name, reason);
    return code;
}

/* Command-line options, left to right; the last of a name counts. */
static int read_arguments(struct tv_config *config, int argc, char **argv, const char **ret_file,
                          char *error, size_t error_bytes)
{
    char reason[300] = "";
    for (int i = 1; i < argc; i++) {
        const char *text = argv[i];
        if (strncmp(text, "--", 2) != 0) {
            return fail(error, error_bytes, -EINVAL, "", text, "options start with --");
        }
        const char *name = text + 2;
        const char *equals = strchr(name, '=');
        size_t name_bytes = equals == NULL ? strlen(name) : (size_t)(equals - name);
        int is_file = name_bytes == 6 && memcmp(name, "config", 6) == 0;
        const struct tv_option *option = tv_options_find(name, name_bytes);
        if (!is_file && option == NULL) {
            return fail(error, error_bytes, -EINVAL, "", text, "no such option");
        }
        const char *value = equals == NULL ? NULL : equals + 1;
        if (!is_file && option->value == NULL) {
            if (value != NULL) {
                return fail(error, error_bytes, -EINVAL, "", text, "takes no value");
            }
        } else if (value == NULL && !is_file && strcmp(option->value, "on|off") == 0) {
            /* a switch needs no value here, but may have one */
            const char *next = i + 1 < argc ? argv[i + 1] : "";
            int given = strcmp(next, "on") == 0 || strcmp(next, "off") == 0;
            value = given ? argv[++i] : "on";
        } else if (value == NULL) {
            if (i + 1 == argc) {
                return fail(error, error_bytes, -EINVAL, "", text, "needs a value");
            }
            value = argv[++i];
        }
        if (is_file) {
            *ret_file = value;
        } else if (tv_config_option_set(config, option, TV_ORIGIN_COMMAND_LINE, value, reason,
                                        sizeof reason) != 0) {
            return fail(error, error_bytes, -EINVAL, "--", option->name, reason);
        }
    }
    return 0;
}

static int read_environment(struct tv_config *config, char *error, size_t error_bytes)
{
    size_t count;
    const struct tv_option *table = tv_options_table(&count);
    for (size_t i = 0; i < count; i++) {
        char variable[64] = "TREEVERIFY_";
        size_t at = strlen(variable);
        for (const char *c = table[i].name; *c != '\0' && at < sizeof variable - 1; c++) {
            variable[at++] = (char)toupper((unsigned char)*c);
        }
        variable[at] = '\0';
        const char *text = table[i].value == NULL ? NULL : getenv(variable);
        char reason[300] = "";
        if (text != NULL && tv_config_option_set(config, &table[i], TV_ORIGIN_ENVIRONMENT, text,
                                                 reason, sizeof reason) != 0) {
            return fail(error, error_bytes, -EBADMSG, "", variable, reason);
        }
    }
    return 0;
}

static int is_loopback(const char *host)
{
    struct in_addr v4;
    struct in6_addr v6;
    if (strcmp(host, "localhost") == 0) {
        return 1;
    }
    if (inet_pton(AF_INET, host, &v4) == 1) {
        return (ntohl(v4.s_addr) >> 24) == 127;
    }
    return inet_pton(AF_INET6, host, &v6) == 1 && IN6_IS_ADDR_LOOPBACK(&v6);
}

static int is_address(const char *host)
{
    unsigned char room[sizeof(struct in6_addr)];
    return strcmp(host, "localhost") == 0 || inet_pton(AF_INET, host, room) == 1 ||
           inet_pton(AF_INET6, host, room) == 1;
}

static int check_listener(const char *host, const char *key, int has_keys, char *error,
                          size_t error_bytes)
{
    if (!is_address(host)) {
        return fail(error, error_bytes, -EBADMSG, "", key,
                    "the host must be a numeric address or localhost");
    }
    if (!is_loopback(host) && !has_keys) {
        return fail(error, error_bytes, -EBADMSG, "", key,
                    "an address other than loopback needs an api_key_file");
    }
    return 0;
}

/* A file that is missing or broken is no start without keys. */
static int check_keys(const struct tv_config *config, char *error, size_t error_bytes)
{
    struct tv_keys keys;
    int rc = tv_keys_load(config->api_key_file, &keys, error, error_bytes);
    if (rc == 0) {
        tv_keys_finish(&keys);
    }
    return rc;
}

/* What no option can decide alone. */
static int check_whole(struct tv_config *config, char *error, size_t error_bytes)
{
    if (config->admin_host[0] == '\0') {
        (void)snprintf(config->admin_host, sizeof config->admin_host, "%s",
                       is_loopback(config->listen_host) ? config->listen_host : "127.0.0.1");
        config->admin_port = config->listen_port == 0 ? 0 : config->listen_port + 1;
    }
    if (!config->has_kv_dtype && strcmp(config->backend, "cuda") == 0) {
        config->kv_dtype = TV_BF16;
    }
    int has_keys = config->api_key_file[0] != '\0';
    int rc = has_keys ? check_keys(config, error, error_bytes) : 0;
    if (rc == 0) {
        rc = check_listener(config->listen_host, "listen", has_keys, error, error_bytes);
    }
    if (rc == 0 && config->admin_on) {
        rc = check_listener(config->admin_host, "listen_admin", has_keys, error, error_bytes);
    }
    if (rc != 0) {
        return rc;
    }
    if ((config->tls_cert[0] == '\0') != (config->tls_key[0] == '\0')) {
        return fail(error, error_bytes, -EBADMSG, "",
                    config->tls_cert[0] == '\0' ? "tls_key" : "tls_cert",
                    "a certificate and its key (tls_cert, tls_key) go together");
    }
    if (config->admin_on && config->admin_port > 65535) {
        return fail(error, error_bytes, -EBADMSG, "", "listen_admin",
                    "port 65536 does not exist; give the admin listener a port");
    }
    if (config->synthetic_acceptance_count > 0 &&
        (config->shadow > 0.0 || config->shadow_path > 0.0)) {
        return fail(
            error, error_bytes, -EBADMSG, "", "synthetic_acceptance",
            "what a coin accepts no oracle can judge: shadow and shadow_path_p must be off");
    }
    if (config->products != TV_PRODUCTS_EXACT && strcmp(config->backend, "cuda") != 0) {
        return fail(error, error_bytes, -EBADMSG, "", "products",
                    "bf16 is for backend cuda alone: the other one has exact products");
    }
    if (config->products != TV_PRODUCTS_EXACT && config->shadow_path > 0.0) {
        return fail(error, error_bytes, -EBADMSG, "", "products",
                    "the path oracle cannot judge bf16 products: shadow_path_p must be off");
    }
    if (config->synthetic_kv && !config->synthetic_weights) {
        return fail(error, error_bytes, -EBADMSG, "", "synthetic_kv",
                    "is for synthetic_weights alone: a model's rows are computed");
    }
    if (config->drain_max_s < config->drain_grace_s) {
        return fail(error, error_bytes, -EBADMSG, "", "drain_max_s", "is below drain_grace_s");
    }
    if (config->pages_share <= 0.0) {
        return fail(error, error_bytes, -EBADMSG, "", "pages_share", "is 0: no page could be had");
    }
    if (config->body_bytes_large < config->body_bytes) {
        return fail(error, error_bytes, -EBADMSG, "", "body_bytes_large", "is below body_bytes");
    }
    return 0;
}

int tv_config_load(struct tv_config *ret_config, int argc, char **argv, char *error,
                   size_t error_bytes)
{
    struct tv_config config;
    const char *file = getenv("TREEVERIFY_CONFIG");
    defaults(&config);
    int rc = read_arguments(&config, argc, argv, &file, error, error_bytes);
    if (rc == 0 && !config.help && !config.version) {
        rc = read_environment(&config, error, error_bytes);
        if (rc == 0 && file != NULL) {
            rc = tv_config_read_files(&config, file, error, error_bytes);
        }
        if (rc == 0) {
            rc = check_whole(&config, error, error_bytes);
        }
        if (rc == 0 && config.model[0] == '\0' && !config.print_only && !config.check_gpu) {
            rc = fail(error, error_bytes, -EINVAL, "", "--model", "a checkpoint folder is needed");
        }
    }
    if (rc == 0) {
        *ret_config = config;
    }
    return rc;
}

static const char *text_of(const struct tv_option *option, const struct tv_config *config)
{
    return (const char *)config + option->offset;
}

/* Paths may have anything in them but must not end the comment. */
static void print_file(const struct tv_config *config, unsigned char number, FILE *out)
{
    char path[sizeof config->file + TV_CONFIG_NAME_BYTES + 4];
    (void)snprintf(path, sizeof path, number == 0 ? "%s" : "%s.d/%s", config->file,
                   number == 0 ? "" : config->dropins[number - 1]); /* fits */
    (void)fputc(' ', out);
    for (const char *c = path; *c != '\0'; c++) {
        (void)fputc((unsigned char)*c < 0x20 || *c == 0x7f ? '?' : *c, out);
    }
}

void tv_config_print(const struct tv_config *config, FILE *out)
{
    size_t count;
    const struct tv_option *table = tv_options_table(&count);
    for (size_t i = 0; i < count; i++) {
        if (table[i].print == NULL) {
            continue;
        }
        /* A text that nobody set has no value that a file could give: the line is a note. */
        int unset = table[i].print == tv_options_print_text && *text_of(&table[i], config) == '\0';
        (void)fprintf(out, "# %s", origin_names[config->origin[i]]);
        if (config->origin[i] == TV_ORIGIN_FILE) {
            print_file(config, config->origin_file[i], out);
        }
        (void)fprintf(out, "\n%s%s = ", unset ? "# " : "", table[i].name);
        table[i].print(&table[i], config, out);
        (void)fprintf(out, "\n");
    }
}

void tv_config_usage(FILE *out)
{
    size_t count;
    const struct tv_option *table = tv_options_table(&count);
    (void)fprintf(out,
                  "usage: treeverifyd --model DIR [--config FILE] [options]\n"
                  "Each option is also a key of the file (with _ for -) and a variable\n"
                  "TREEVERIFY_KEY; the command line wins, then the environment, then the file.\n"
                  "SIGHUP reads them again: [reload] values change at once, of [reload: contents]\n"
                  "the file that is named is read again, and the rest waits for a restart.\n\n"
                  "  --config FILE\n        settings as key = value, one a line; then those of "
                  "FILE.d/*.conf\n");
    for (size_t i = 0; i < count; i++) {
        (void)fprintf(out, "  --");
        for (const char *c = table[i].name; *c != '\0'; c++) {
            (void)fputc(*c == '_' ? '-' : *c, out);
        }
        static const char *const marks[] = {"", " [reload]", " [reload: contents]"};
        (void)fprintf(out, "%s%s%s\n        %s\n", table[i].value == NULL ? "" : " ",
                      table[i].value == NULL ? "" : table[i].value,
                      marks[tv_options_reload(&table[i])], table[i].help);
    }
}
