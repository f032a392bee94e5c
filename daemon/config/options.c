/*
 * options.c - every option of the daemon: its name, range, meaning, and how its text is read.
 *
 * Owns the reading of values. Refuses anything around a number, values out of range and texts that
 * do not fit; repairs nothing.
 */
#include "config/options.h"

#include <errno.h>
#include <limits.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "proto/limits.h"

static void *member(const struct tv_option *option, struct tv_config *config)
{
    return (char *)config + option->offset;
}

static const void *member_const(const struct tv_option *option, const struct tv_config *config)
{
    return (const char *)config + option->offset;
}

/* Decimal digits alone, with a sign in front at most. */
static int parse_integer(const struct tv_option *option, const char *text, int64_t *ret,
                         char *reason, size_t reason_bytes)
{
    char *end;
    errno = 0;
    long long value = strtoll(text, &end, 10);
    if (end == text || *end != '\0' || text[strspn(text, "-0123456789")] != '\0' || errno != 0 ||
        value < option->minimum || value > option->last) {
        (void)snprintf(reason, reason_bytes, "an integer from %lld to %lld is needed",
                       (long long)option->minimum, (long long)option->last);
        return -EINVAL;
    }
    *ret = value;
    return 0;
}

static int parse_i32(const struct tv_option *option, struct tv_config *config, const char *text,
                     char *reason, size_t reason_bytes)
{
    int64_t value;
    int rc = parse_integer(option, text, &value, reason, reason_bytes);
    if (rc == 0) {
        *(int32_t *)member(option, config) = (int32_t)value;
    }
    return rc;
}

static void print_i32(const struct tv_option *option, const struct tv_config *config, FILE *out)
{
    (void)fprintf(out, "%d", *(const int32_t *)member_const(option, config));
}

static int parse_i64(const struct tv_option *option, struct tv_config *config, const char *text,
                     char *reason, size_t reason_bytes)
{
    return parse_integer(option, text, (int64_t *)member(option, config), reason, reason_bytes);
}

static void print_i64(const struct tv_option *option, const struct tv_config *config, FILE *out)
{
    (void)fprintf(out, "%lld", (long long)*(const int64_t *)member_const(option, config));
}

static int parse_page_size(const struct tv_option *option, struct tv_config *config,
                           const char *text, char *reason, size_t reason_bytes)
{
    int64_t value;
    int rc = parse_integer(option, text, &value, reason, reason_bytes);
    if (rc != 0 || (value != 16 && value != 32 && value != 64 && value != 128)) {
        (void)snprintf(reason, reason_bytes, "16, 32, 64 or 128 is needed");
        return -EINVAL;
    }
    config->page_size = (int32_t)value;
    return 0;
}

static int parse_switch(const struct tv_option *option, struct tv_config *config, const char *text,
                        char *reason, size_t reason_bytes)
{
    int on = strcmp(text, "on") == 0;
    if (!on && strcmp(text, "off") != 0) {
        (void)snprintf(reason, reason_bytes, "on or off is needed");
        return -EINVAL;
    }
    *(int *)member(option, config) = on;
    return 0;
}

static void print_switch(const struct tv_option *option, const struct tv_config *config, FILE *out)
{
    (void)fprintf(out, "%s", *(const int *)member_const(option, config) ? "on" : "off");
}

static int parse_text(const struct tv_option *option, struct tv_config *config, const char *text,
                      char *reason, size_t reason_bytes)
{
    size_t bytes = strlen(text);
    if (bytes == 0 || bytes >= (size_t)option->last) {
        (void)snprintf(reason, reason_bytes, "a text of 1 to %lld bytes is needed",
                       (long long)option->last - 1);
        return -EINVAL;
    }
    memcpy(member(option, config), text, bytes + 1);
    return 0;
}

void tv_options_print_text(const struct tv_option *option, const struct tv_config *config,
                           FILE *out)
{
    (void)fprintf(out, "%s", (const char *)member_const(option, config));
}

static int parse_backend(const struct tv_option *option, struct tv_config *config, const char *text,
                         char *reason, size_t reason_bytes)
{
    if (strcmp(text, "cpu") != 0 && strcmp(text, "cuda") != 0) {
        (void)snprintf(reason, reason_bytes, "cpu or cuda is needed");
        return -EINVAL;
    }
    return parse_text(option, config, text, reason, reason_bytes);
}

static int parse_log_level(const struct tv_option *option, struct tv_config *config,
                           const char *text, char *reason, size_t reason_bytes)
{
    if (strcmp(text, "error") != 0 && strcmp(text, "warning") != 0 && strcmp(text, "info") != 0 &&
        strcmp(text, "debug") != 0) {
        (void)snprintf(reason, reason_bytes, "error, warning, info or debug is needed");
        return -EINVAL;
    }
    return parse_text(option, config, text, reason, reason_bytes);
}

static int parse_kv_dtype(const struct tv_option *option, struct tv_config *config,
                          const char *text, char *reason, size_t reason_bytes)
{
    (void)option; /* the only option of its type */
    if (strcmp(text, "f32") != 0 && strcmp(text, "bf16") != 0) {
        (void)snprintf(reason, reason_bytes, "f32 or bf16 is needed");
        return -EINVAL;
    }
    config->has_kv_dtype = 1;
    config->kv_dtype = text[0] == 'f' ? TV_F32 : TV_BF16;
    return 0;
}

static void print_kv_dtype(const struct tv_option *option, const struct tv_config *config,
                           FILE *out)
{
    (void)option; /* the only option of its type */
    (void)fprintf(out, "%s", config->kv_dtype == TV_F32 ? "f32" : "bf16");
}

static int parse_products(const struct tv_option *option, struct tv_config *config,
                          const char *text, char *reason, size_t reason_bytes)
{
    (void)option; /* the only option of its type */
    if (strcmp(text, "exact") != 0 && strcmp(text, "bf16") != 0) {
        (void)snprintf(reason, reason_bytes, "exact or bf16 is needed");
        return -EINVAL;
    }
    config->products = text[0] == 'e' ? TV_PRODUCTS_EXACT : TV_PRODUCTS_BF16;
    return 0;
}

static void print_products(const struct tv_option *option, const struct tv_config *config,
                           FILE *out)
{
    (void)option; /* the only option of its type */
    (void)fprintf(out, "%s", config->products == TV_PRODUCTS_EXACT ? "exact" : "bf16");
}

static int parse_tls_min(const struct tv_option *option, struct tv_config *config, const char *text,
                         char *reason, size_t reason_bytes)
{
    (void)option; /* the only option of its type */
    if (strcmp(text, "1.2") != 0 && strcmp(text, "1.3") != 0) {
        (void)snprintf(reason, reason_bytes, "1.2 or 1.3 is needed");
        return -EINVAL;
    }
    config->tls_min = text[2] == '2' ? 12 : 13;
    return 0;
}

static void print_tls_min(const struct tv_option *option, const struct tv_config *config, FILE *out)
{
    (void)option; /* the only option of its type */
    (void)fprintf(out, "1.%d", config->tls_min - 10);
}

static const char *const prefix_cache_names[] = {"off", "on", "rounds"};

static int parse_prefix_cache(const struct tv_option *option, struct tv_config *config,
                              const char *text, char *reason, size_t reason_bytes)
{
    (void)option; /* the only option of its type */
    for (int i = 0; i <= TV_PREFIX_CACHE_ROUNDS; i++) {
        if (strcmp(text, prefix_cache_names[i]) == 0) {
            config->prefix_cache = i;
            return 0;
        }
    }
    (void)snprintf(reason, reason_bytes, "off, on or rounds is needed");
    return -EINVAL;
}

static void print_prefix_cache(const struct tv_option *option, const struct tv_config *config,
                               FILE *out)
{
    (void)option; /* the only option of its type */
    (void)fprintf(out, "%s", prefix_cache_names[config->prefix_cache]);
}

/* A probability in decimal notation. */
int tv_options_read_share(const char *text, double *ret)
{
    char *end;
    double value = strtod(text, &end);
    if (end == text || *end != '\0' || text[strspn(text, "0123456789.eE-")] != '\0' ||
        !isfinite(value) || value < 0.0 || value > 1.0) {
        return -EINVAL;
    }
    *ret = value;
    return 0;
}

/* The fewest digits that it reads back as the same value: what is printed is a
 * configuration, and must mean this one. 17 digits tell any two doubles apart. */
void tv_options_print_share(double value, FILE *out)
{
    char text[32];
    double read = 0.0;
    int digits = 0;
    do {
        (void)snprintf(text, sizeof text, "%.*g", ++digits, value); /* fits */
    } while (digits < 17 && (tv_options_read_share(text, &read) != 0 || read != value));
    (void)fprintf(out, "%s", text);
}

static int parse_shadow(const struct tv_option *option, struct tv_config *config, const char *text,
                        char *reason, size_t reason_bytes)
{
    (void)option; /* the only option of its type */
    if (strcmp(text, "off") == 0) {
        config->shadow = 0.0;
        return 0;
    }
    if (strcmp(text, "all") == 0) {
        config->shadow = 1.0;
        return 0;
    }
    if (strncmp(text, "sample:", 7) != 0 || tv_options_read_share(text + 7, &config->shadow) != 0) {
        (void)snprintf(reason, reason_bytes, "off, all or sample:P with P from 0 to 1 is needed");
        return -EINVAL;
    }
    return 0;
}

static void print_shadow(const struct tv_option *option, const struct tv_config *config, FILE *out)
{
    (void)option; /* the only option of its type */
    if (config->shadow <= 0.0) {
        (void)fprintf(out, "off");
    } else if (config->shadow >= 1.0) {
        (void)fprintf(out, "all");
    } else {
        (void)fprintf(out, "sample:");
        tv_options_print_share(config->shadow, out);
    }
}

static int parse_probability(const struct tv_option *option, struct tv_config *config,
                             const char *text, char *reason, size_t reason_bytes)
{
    if (tv_options_read_share(text, (double *)member(option, config)) != 0) {
        (void)snprintf(reason, reason_bytes, "a number from 0 to 1 is needed");
        return -EINVAL;
    }
    return 0;
}

static void print_probability(const struct tv_option *option, const struct tv_config *config,
                              FILE *out)
{
    tv_options_print_share(*(const double *)member_const(option, config), out);
}

/* HOST:PORT, [V6]:PORT; the host's form is decided when it is bound. */
static int parse_address(const char *text, char *ret_host, size_t host_bytes, int32_t *ret_port,
                         char *reason, size_t reason_bytes)
{
    const char *colon = strrchr(text, ':');
    const char *host = text;
    size_t bytes = colon == NULL ? 0 : (size_t)(colon - text);
    if (bytes >= 2 && host[0] == '[' && host[bytes - 1] == ']') {
        host++;
        bytes -= 2;
    } else if (colon != NULL && memchr(text, ':', bytes) != NULL) {
        bytes = 0; /* a bare IPv6 address: which colon ends it cannot be known */
    }
    char *end = NULL;
    long port = colon == NULL ? -1 : strtol(colon + 1, &end, 10);
    if (bytes == 0 || bytes >= host_bytes || colon[1] < '0' || colon[1] > '9' || *end != '\0' ||
        port < 0 || port > 65535) {
        (void)snprintf(reason, reason_bytes, "HOST:PORT or [IPV6]:PORT is needed");
        return -EINVAL;
    }
    memcpy(ret_host, host, bytes);
    ret_host[bytes] = '\0';
    *ret_port = (int32_t)port;
    return 0;
}

static int parse_listen(const struct tv_option *option, struct tv_config *config, const char *text,
                        char *reason, size_t reason_bytes)
{
    (void)option; /* the only option of its type */
    return parse_address(text, config->listen_host, sizeof config->listen_host,
                         &config->listen_port, reason, reason_bytes);
}

static void print_address(const char *host, int32_t port, FILE *out)
{
    (void)fprintf(out, strchr(host, ':') != NULL ? "[%s]:%d" : "%s:%d", host, port);
}

static void print_listen(const struct tv_option *option, const struct tv_config *config, FILE *out)
{
    (void)option; /* the only option of its type */
    print_address(config->listen_host, config->listen_port, out);
}

static int parse_listen_admin(const struct tv_option *option, struct tv_config *config,
                              const char *text, char *reason, size_t reason_bytes)
{
    (void)option; /* the only option of its type */
    if (strcmp(text, "off") == 0) {
        config->admin_on = 0;
        return 0;
    }
    int rc = parse_address(text, config->admin_host, sizeof config->admin_host, &config->admin_port,
                           reason, reason_bytes);
    if (rc == 0) {
        config->admin_on = 1;
    }
    return rc;
}

static void print_listen_admin(const struct tv_option *option, const struct tv_config *config,
                               FILE *out)
{
    (void)option; /* the only option of its type */
    if (!config->admin_on) {
        (void)fprintf(out, "off");
        return;
    }
    print_address(config->admin_host, config->admin_port, out);
}

/* Flags are given without a value and only on the command line. */
static int parse_flag(const struct tv_option *option, struct tv_config *config, const char *text,
                      char *reason, size_t reason_bytes)
{
    (void)text; /* a flag has none */
    (void)reason;
    (void)reason_bytes;
    *(int *)member(option, config) = 1;
    return 0;
}

#define AT(member)   offsetof(struct tv_config, member)
#define TEXT(member) 0, (int64_t)sizeof((struct tv_config *)0)->member
#define INT(name, member, low, high, help)                                                         \
    {                                                                                              \
        name, "N", help, parse_i32, print_i32, AT(member), low, high                               \
    }
#define BYTES(name, member, low, high, help)                                                       \
    {                                                                                              \
        name, "BYTES", help, parse_i64, print_i64, AT(member), low, high                           \
    }
#define FLAG(name, member, help)                                                                   \
    {                                                                                              \
        name, NULL, help, parse_flag, NULL, AT(member), 0, 0                                       \
    }

static const struct tv_option table[] = {
    {"model", "DIR", "checkpoint folder in Hugging Face layout", parse_text, tv_options_print_text,
     AT(model), TEXT(model)},
    {"backend", "cpu|cuda", "where the model runs", parse_backend, tv_options_print_text,
     AT(backend), TEXT(backend)},
    {"listen", "HOST:PORT", "work listener; port 0 lets the system choose", parse_listen,
     print_listen, AT(listen_host), 0, 0},
    {"listen_admin", "HOST:PORT|off", "admin listener; default loopback, work port + 1",
     parse_listen_admin, print_listen_admin, AT(admin_host), 0, 0},
    {"page_size", "16|32|64|128", "KV rows in a page", parse_page_size, print_i32, AT(page_size), 0,
     128},
    {"pages", "N",
     "KV pages in the pool: at least the self-test's 40 rows and a sequence of 64; 0: on cuda what "
     "the device has room for (device_reserve, pages_share), on cpu eight sequences of max_len",
     parse_i64, print_i64, AT(pages), 0, INT32_MAX},
    BYTES("device_reserve", device_reserve, 0, (int64_t)1 << 40,
          "bytes of a device's memory that stay free when pages is 0; below 512 MiB a driver may "
          "run short"),
    {"pages_share", "P", "share of a device's memory, as it is left then, that pages take",
     parse_probability, print_probability, AT(pages_share), 0, 0},
    {"kv_dtype", "f32|bf16", "element type of KV rows; default f32 on cpu, bf16 on cuda",
     parse_kv_dtype, print_kv_dtype, AT(kv_dtype), 0, 0},
    {"products", "exact|bf16",
     "how activations meet bf16 weights on cuda: as they are, or rounded to bf16, which is faster "
     "for many rows and not what the path oracle can judge",
     parse_products, print_products, AT(products), 0, 0},
    {"prefix_cache", "on|off|rounds",
     "whole KV pages of prompts are kept and reused while there is room; rounds: those of "
     "committed "
     "rounds too, whose rows differ from a prompt's by noise",
     parse_prefix_cache, print_prefix_cache, AT(prefix_cache), 0, 0},
    INT("max_len", max_len, 0, INT32_MAX, "context limit; 0: the checkpoint's"),
    INT("max_nodes", max_nodes, 1, TV_ENGINE_NODES_MAX, "nodes of one tree, node 0 included"),
    INT("max_depth", max_depth, 1, TV_ENGINE_NODES_MAX, "depth of one tree"),
    {"taps", "L1,L2,...|none",
     "layers at whose entry the residual stream can be asked for (want.hidden); the number of "
     "layers is the end of the last one",
     tv_options_parse_taps, tv_options_print_taps, AT(taps), 0, 0},
    {"taps_projection", "FILE",
     "safetensors file whose fc.weight [n, taps x hidden] projects the rows of all taps (a "
     "drafter's "
     "own file will do)",
     parse_text, tv_options_print_text, AT(taps_projection), TEXT(taps_projection)},
    INT("threads", threads, 0, 1024, "compute threads; 0: one for each processor"),
    {"shadow", "off|all|sample:P", "share of live rounds judged by the kernel oracle", parse_shadow,
     print_shadow, AT(shadow), 0, 0},
    {"shadow_path_p", "P", "share of live rounds judged by the path oracle", parse_probability,
     print_probability, AT(shadow_path), 0, 0},
    {"state_dir", "DIR",
     "folder for reproducers and for the sessions of a stop, which exists, of this daemon alone; "
     "unset: systemd's, $XDG_STATE_HOME/treeverify, /var/lib/treeverify",
     parse_text, tv_options_print_text, AT(state_dir), TEXT(state_dir)},
    BYTES("snapshot_bytes", snapshot_bytes, 0, (int64_t)1 << 50,
          "size of the file in state_dir in which a stop keeps sessions for the next start; what "
          "does not fit is named in the log; 0: sessions end with the daemon"),
    INT("snapshot_max_s", snapshot_max_s, 0, 3600,
        "seconds of a stop, within drain_max_s, for writing that file"),
    {"api_key_file", "FILE",
     "bearer keys, one name:scope[,scope]:secret a line (scopes verify, metrics, admin); "
     "credential:NAME is systemd's (LoadCredential=); unset: no keys, and listeners on loopback "
     "alone",
     parse_text, tv_options_print_text, AT(api_key_file), TEXT(api_key_file)},
    {"tls_cert", "FILE",
     "certificate of both listeners in PEM, its chain behind it, or credential:NAME; unset: no TLS",
     parse_text, tv_options_print_text, AT(tls_cert), TEXT(tls_cert)},
    {"tls_key", "FILE", "its key in PEM without a password, or credential:NAME", parse_text,
     tv_options_print_text, AT(tls_key), TEXT(tls_key)},
    {"tls_min", "1.2|1.3", "oldest TLS that is spoken", parse_tls_min, print_tls_min, AT(tls_min),
     0, 0},
    {"hosts", "NAME1,NAME2,...|any",
     "without keys: names besides localhost and its addresses by which requests may call this "
     "server (Host); every other name is refused, as a page in a browser would use it",
     tv_options_parse_hosts, tv_options_print_text, AT(hosts), TEXT(hosts)},
    INT("max_sessions", max_sessions, 1, 1 << 20, "open sessions"),
    INT("queue_max", queue_max, 1, 1 << 20, "calls that may wait for the worker"),
    INT("idle_pages_s", idle_pages_s, 0, 3600,
        "seconds after its last round for which a session's pages are its own; then the one idle "
        "for longest goes (410 session-expired) when a call lacks pages; 0: while its lease lasts"),
    INT("launch_max_s", launch_max_s, 0, 3600,
        "seconds without progress in an engine call after which readiness fails; 0: 4 where the "
        "backend counts its progress (cpu), 30 for a whole call elsewhere"),
    INT("launch_rows", launch_rows, 0, 1 << 20,
        "rows of one launch at most, and of a prefill slice while rounds are about; larger trees "
        "go alone; 0: what the engine takes"),
    INT("batch_window_us", batch_window_us, 0, 500,
        "microseconds that a launch, or a slice behind one that took a prompt's tokens along, "
        "waits for rounds that answer the last two; at most a quarter of the last launch's time, "
        "never when idle; 0: not at all"),
    INT("principal_sessions", principal_sessions, 0, 1 << 20, "open sessions of one key; 0: any"),
    INT("principal_pages", principal_pages, 0, INT32_MAX, "KV pages of one key; 0: any"),
    INT("principal_nodes_s", principal_nodes_s, 0, 1 << 30,
        "nodes and prompt tokens a second of one key; 0: any"),
    {"principal_rejected", "P", "share of one key's draft nodes that may be rejected; 0: any",
     parse_probability, print_probability, AT(principal_rejected), 0, 0},
    BYTES("body_bytes", body_bytes, 1024, 1 << 30,
          "largest body of verify and the other small calls"),
    BYTES("body_bytes_large", body_bytes_large, 1024, 1 << 30,
          "largest body of create, extend, one-shot verify, parity"),
    BYTES("inline_bytes", inline_bytes, 0, 1 << 30, "largest inline tensors of one answer"),
    BYTES("answers_bytes", answers_bytes, 1 << 20, (int64_t)1 << 40,
          "memory of all answers that clients have not read yet; above it the slowest reader is "
          "cut, and its retry gets the stored answer"),
    BYTES(
        "fetch_bytes", fetch_bytes, 1 << 20, (int64_t)1 << 40,
        "memory of all rows that sessions keep to be fetched (want via fetch); above it the oldest "
        "go, and a round that alone could need more is refused"),
    INT("connections_max", connections_max, 8, 65536,
        "connections of the work listener that may be open; more of them wait"),
    INT("connections_per_address", connections_per_address, 0, 65536,
        "connections from one address; 0: 64, no limit on loopback"),
    INT("event_readers_max", event_readers_max, 0, 65536,
        "streams of events that are open at once, half of them of one key at most; 0: none"),
    INT("drain_grace_s", drain_grace_s, 0, 600,
        "seconds a stopping daemon still serves while readiness fails"),
    INT("drain_max_s", drain_max_s, 1, 3600,
        "seconds after which a stopping daemon ends in any case"),
    INT("http_threads", http_threads, 1, 64, "threads of the work listener"),
    {"synthetic_acceptance", "off|P1,P2,..",
     "benchmarks alone: drafts are accepted by a coin, the first child of a node at depth d with "
     "chance Pd (the last for all deeper ones); every answer is labelled",
     tv_options_parse_rates, tv_options_print_rates, AT(synthetic_acceptance), 0, 0},
    {"poison", "on|off", "fill unused pages with NaN (tests)", parse_switch, print_switch,
     AT(poison), 0, 0},
    {"synthetic_weights", "SEED|off",
     "random weights for measurements, in the shapes of the model folder's config.json, of which "
     "nothing else is read; every answer says so",
     tv_options_parse_synthetic, tv_options_print_synthetic, AT(synthetic_weights), 0, 0},
    {"synthetic_kv", "on|off",
     "with synthetic_weights: prompts are not computed, but for their last slice; their KV rows "
     "are random, so that long contexts can be measured at once",
     parse_switch, print_switch, AT(synthetic_kv), 0, 0},
    {"log_level", "error|warning|info|debug", "least important lines that are logged",
     parse_log_level, tv_options_print_text, AT(log_level), TEXT(log_level)},
    FLAG("check_config", check_only, "check the configuration and end"),
    FLAG("check_gpu", check_gpu,
         "say which GPU the cuda backend would use, or why it cannot (exit 69; 71: less memory "
         "free than device_reserve), and end; needs no model"),
    FLAG("print_config", print_only, "print the effective configuration with its origins and end"),
    FLAG("help", help, "this text"),
    FLAG("version", version, "the version"),
};

_Static_assert(sizeof table / sizeof table[0] <= TV_CONFIG_OPTIONS_MAX, "room for origins");

const struct tv_option *tv_options_table(size_t *ret_count)
{
    *ret_count = sizeof table / sizeof table[0];
    return table;
}

const struct tv_option *tv_options_find(const char *name, size_t bytes)
{
    for (size_t i = 0; i < sizeof table / sizeof table[0]; i++) {
        size_t at = 0;
        while (at < bytes && table[i].name[at] != '\0' &&
               (table[i].name[at] == name[at] || (table[i].name[at] == '_' && name[at] == '-'))) {
            at++;
        }
        if (at == bytes && table[i].name[at] == '\0') {
            return &table[i];
        }
    }
    return NULL;
}
