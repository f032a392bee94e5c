/*
 * test_config.c - precedence, refusals, ranges and the printed form of the daemon's settings.
 *
 * Every integer option is taken at both ends of its range and refused one beyond it.
 */
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "config/config.h"
#include "config/options.h"

#define WORDS_MAX  8
#define WORD_BYTES 4400

static struct tv_config config;
static char error[600];

/* tv_config_load with these arguments behind the program's name; the list ends with NULL. */
static int load(const char *first, ...)
{
    static char words[WORDS_MAX][WORD_BYTES];
    char *argv[WORDS_MAX + 1] = {words[0]};
    int argc = 1;
    va_list arguments;
    memset(&config, 0xff, sizeof config);
    error[0] = '\0';
    (void)snprintf(words[0], WORD_BYTES, "treeverifyd");
    va_start(arguments, first);
    for (const char *word = first; word != NULL; word = va_arg(arguments, const char *)) {
        assert_in_range(argc, 1, WORDS_MAX - 1);
        (void)snprintf(words[argc], WORD_BYTES, "%s", word);
        argv[argc] = words[argc];
        argc++;
    }
    va_end(arguments);
    argv[argc] = NULL;
    return tv_config_load(&config, argc, argv, error, sizeof error);
}

/* Write text to a new file; its name is in a static buffer. */
static const char *write_file(const char *text)
{
    static char path[512];
    const char *folder = getenv("TMPDIR");
    (void)snprintf(path, sizeof path, "%s/tv_config_XXXXXX", folder == NULL ? "/tmp" : folder);
    int fd = mkstemp(path);
    assert_true(fd >= 0);
    assert_int_equal(write(fd, text, strlen(text)), (ssize_t)strlen(text));
    assert_int_equal(close(fd), 0);
    return path;
}

static int load_file(const char *text)
{
    const char *path = write_file(text);
    int rc = load("--model", "m", "--config", path, (const char *)NULL);
    assert_int_equal(unlink(path), 0);
    return rc;
}

static void test_defaults(void **state)
{
    (void)state;
    assert_int_equal(load("--model", "some/folder", (const char *)NULL), 0);
    assert_string_equal(config.model, "some/folder");
    assert_string_equal(config.backend, "cpu");
    assert_string_equal(config.listen_host, "127.0.0.1");
    assert_int_equal(config.listen_port, 8471);
    assert_int_equal(config.admin_on, 1);
    assert_string_equal(config.admin_host, "127.0.0.1");
    assert_int_equal(config.admin_port, 8472);
    assert_int_equal(config.page_size, 64);
    assert_int_equal(config.kv_dtype, TV_F32);
    assert_int_equal(config.max_nodes, 256);
    assert_int_equal(config.max_depth, 64);
    assert_int_equal(config.launch_max_s, 0);
    assert_int_equal(config.drain_grace_s, 10);
    assert_int_equal(config.drain_max_s, 30);
    assert_int_equal(config.body_bytes, 1 << 20);
    assert_int_equal(config.body_bytes_large, 16 << 20);
    assert_int_equal(config.answers_bytes, 256 << 20);
    assert_int_equal(config.fetch_bytes, 256 << 20);
}

static void test_cuda_defaults_to_bf16_rows(void **state)
{
    (void)state;
    assert_int_equal(load("--model", "m", "--backend=cuda", (const char *)NULL), 0);
    assert_int_equal(config.kv_dtype, TV_BF16);
    assert_int_equal(
        load("--model", "m", "--backend=cuda", "--kv-dtype", "f32", (const char *)NULL), 0);
    assert_int_equal(config.kv_dtype, TV_F32);
}

/* Products are exact unless they are asked for where they are, without what cannot judge them. */
static void test_products(void **state)
{
    (void)state;
    assert_int_equal(load("--model", "m", "--backend=cuda", (const char *)NULL), 0);
    assert_int_equal(config.products, TV_PRODUCTS_EXACT);
    assert_int_equal(
        load("--model", "m", "--backend=cuda", "--products", "bf16", (const char *)NULL), 0);
    assert_int_equal(config.products, TV_PRODUCTS_BF16);
    assert_int_equal(load("--model", "m", "--products", "exact", (const char *)NULL), 0);
    assert_int_equal(config.products, TV_PRODUCTS_EXACT);
    assert_int_equal(load("--model", "m", "--products", "bf16", (const char *)NULL), -EBADMSG);
    assert_non_null(strstr(error, "products"));
    assert_non_null(strstr(error, "backend cuda alone"));
    assert_int_equal(load("--model", "m", "--backend=cuda", "--products", "bf16", "--shadow-path-p",
                          "0.1", (const char *)NULL),
                     -EBADMSG);
    assert_non_null(strstr(error, "shadow_path_p must be off"));
    assert_int_equal(load("--model", "m", "--backend=cuda", "--products", "bf16", "--shadow", "all",
                          (const char *)NULL),
                     0);
}

static void test_precedence(void **state)
{
    (void)state;
    const char *path = write_file("max_nodes = 10\nmax_depth = 5\nthreads = 3\n");
    assert_int_equal(setenv("TREEVERIFY_MAX_NODES", "20", 1), 0);
    assert_int_equal(setenv("TREEVERIFY_MAX_DEPTH", "6", 1), 0);
    int rc = load("--model", "m", "--config", path, "--max-nodes", "30", (const char *)NULL);
    assert_int_equal(unsetenv("TREEVERIFY_MAX_NODES"), 0);
    assert_int_equal(unsetenv("TREEVERIFY_MAX_DEPTH"), 0);
    assert_int_equal(unlink(path), 0);
    assert_int_equal(rc, 0);
    assert_int_equal(config.max_nodes, 30);
    assert_int_equal(config.max_depth, 6);
    assert_int_equal(config.threads, 3);
}

/* A value that something of higher rank overrides must be a value all the same. */
static void test_overridden_values_are_checked(void **state)
{
    (void)state;
    const char *path = write_file("max_nodes = many\n");
    int rc = load("--model", "m", "--config", path, "--max-nodes", "30", (const char *)NULL);
    assert_int_equal(unlink(path), 0);
    assert_int_equal(rc, -EBADMSG);
}

static void test_file_refusals(void **state)
{
    (void)state;
    static const struct {
        const char *text, *says;
    } cases[] = {
        {"max_nodes = 10\nmax_node = 3\n", ":2: max_node: no such key"},
        {"max-nodes = 10\n", "no such key"},
        {"Max_Nodes = 10\n", "no such key"},
        {"config = other\n", "no such key"},
        {"help = on\n", "no such key"},
        {"max_nodes = 10\nmax_nodes = 11\n", ":2: max_nodes: given twice"},
        {"[other]\nmax_nodes = 10\n", "no section [other]"},
        {"[treeverifyd\nmax_nodes = 10\n", ":1: not a line"},
        {"max_nodes\n", ":1: not a line"},
        {"max_nodes = ten\n", "an integer from 1 to 1024"},
        {"max_nodes =\n", "an integer from 1 to 1024"},
        {"threads = 1\n\nlisten = 8471\n", ":3: listen: HOST:PORT"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        assert_int_equal(load_file(cases[i].text), -EBADMSG);
        if (strstr(error, cases[i].says) == NULL) {
            fail_msg("case %zu: \"%s\" does not say \"%s\"", i, error, cases[i].says);
        }
    }
    assert_int_equal(load_file("# note\n; note\n[treeverifyd]\nmax_nodes = 10\n"), 0);
    assert_int_equal(config.max_nodes, 10);
}

static void test_file_lines_too_long_and_files_missing(void **state)
{
    (void)state;
    char text[1024] = "state_dir = /";
    memset(text + strlen(text), 'x', 900);
    text[913] = '\0';
    assert_int_equal(load_file(text), -EBADMSG);
    assert_non_null(strstr(error, "too long"));
    assert_int_equal(load("--model", "m", "--config", "/nonexistent/x", (const char *)NULL),
                     -EBADMSG);
    assert_non_null(strstr(error, "/nonexistent/x"));
    assert_int_equal(load("--model", "m", "--config", "/", (const char *)NULL), -EBADMSG);
}

/* A switch with no value, with its own word behind it, and with another option behind it. */
static void test_switches(void **state)
{
    (void)state;
    assert_int_equal(load("--poison", "off", "--model", "m", (const char *)NULL), 0);
    assert_int_equal(config.poison, 0);
    assert_int_equal(load("--poison", "on", "--model", "m", (const char *)NULL), 0);
    assert_int_equal(config.poison, 1);
    assert_int_equal(load("--poison", "--model", "m", (const char *)NULL), 0);
    assert_int_equal(config.poison, 1);
    assert_int_equal(load("--model", "m", "--poison", (const char *)NULL), 0);
    assert_int_equal(config.poison, 1);
    assert_int_equal(load("--model", "m", "--poison=off", (const char *)NULL), 0);
    assert_int_equal(config.poison, 0);
    assert_int_equal(load("--model", "m", "--poison", "maybe", (const char *)NULL), -EINVAL);
}

static void test_command_line_refusals(void **state)
{
    (void)state;
    assert_int_equal(load("--model", "m", "--no-such", "1", (const char *)NULL), -EINVAL);
    assert_int_equal(load("--model", (const char *)NULL), -EINVAL);
    assert_int_equal(load("model", (const char *)NULL), -EINVAL);
    assert_int_equal(load("--model", "m", "--help=1", (const char *)NULL), -EINVAL);
    assert_int_equal(load("--model", "", (const char *)NULL), -EINVAL);
    assert_int_equal(load("--listen", "127.0.0.1:0", (const char *)NULL), -EINVAL);
    assert_non_null(strstr(error, "--model"));
    assert_int_equal(load("--help", (const char *)NULL), 0);
    assert_int_equal(config.help, 1);
    char name[WORD_BYTES] = "";
    memset(name, 'x', 4096);
    name[4096] = '\0';
    assert_int_equal(load("--model", name, (const char *)NULL), -EINVAL);
    name[4095] = '\0';
    assert_int_equal(load("--model", name, (const char *)NULL), 0);
}

static int load_pair(const char *option, const char *value)
{
    return load("--model", "m", option, value, (const char *)NULL);
}

/* Both ends of every integer option's range, and one beyond each. Limits that depend on another
 * option are given their partner. */
static void test_integer_ranges(void **state)
{
    (void)state;
    size_t count;
    int tried = 0;
    const struct tv_option *table = tv_options_table(&count);
    for (size_t i = 0; i < count; i++) {
        if (table[i].value == NULL || strcmp(table[i].value, "N") != 0) {
            continue;
        }
        char option[64], value[32];
        const char *partner = "--drain-grace-s=0";
        if (strcmp(table[i].name, "drain_grace_s") == 0) {
            partner = "--drain-max-s=3600";
        }
        (void)snprintf(option, sizeof option, "--%s", table[i].name);
        for (int end = 0; end < 2; end++) {
            int64_t edge = end == 0 ? table[i].minimum : table[i].last;
            (void)snprintf(value, sizeof value, "%lld", (long long)edge);
            assert_int_equal(load("--model", "m", option, value, partner, (const char *)NULL), 0);
            (void)snprintf(value, sizeof value, "%lld", (long long)(edge + (end == 0 ? -1 : 1)));
            assert_int_equal(load("--model", "m", option, value, partner, (const char *)NULL),
                             -EINVAL);
        }
        tried++;
    }
    assert_true(tried >= 10);
    static const char *const malformed[] = {"", " 1", "1 ", "1.0", "1e2", "0x10", "+1", "1_0"};
    for (size_t i = 0; i < sizeof malformed / sizeof malformed[0]; i++) {
        assert_int_equal(load_pair("--threads", malformed[i]), -EINVAL);
    }
}

static void test_values(void **state)
{
    (void)state;
    static const char *const good[][2] = {
        {"--page-size", "16"},
        {"--page-size", "128"},
        {"--kv-dtype", "bf16"},
        {"--shadow", "all"},
        {"--shadow", "off"},
        {"--shadow", "sample:0.25"},
        {"--listen", "[::1]:9"},
        {"--listen-admin", "off"},
        {"--listen", "localhost:0"},
        {"--shadow-path-p", "1e-3"},
        {"--log-level", "debug"},
        {"--synthetic-acceptance", "off"},
        {"--synthetic-acceptance", "0"},
        {"--synthetic-acceptance", "1,0.5,0"},
    };
    static const char *const bad[][2] = {
        {"--page-size", "48"},
        {"--kv-dtype", "f16"},
        {"--products", "f16"},
        {"--products", "Exact"},
        {"--shadow", "sample:1.5"},
        {"--shadow", "sample:"},
        {"--shadow", "sample:nan"},
        {"--shadow", "on"},
        {"--listen", "::1:9"},
        {"--listen", "127.0.0.1"},
        {"--listen", ":9"},
        {"--listen", "127.0.0.1:"},
        {"--listen", "127.0.0.1:65536"},
        {"--listen", "127.0.0.1:-1"},
        {"--listen", "127.0.0.1:1x"},
        {"--backend", "rocm"},
        {"--log-level", "loud"},
        {"--shadow-path-p", "-0.1"},
        {"--poison=maybe", "x"},
        {"--synthetic-acceptance", ""},
        {"--synthetic-acceptance", "1.01"},
        {"--synthetic-acceptance", "0.5,"},
        {"--synthetic-acceptance", ",0.5"},
        {"--synthetic-acceptance", "0.5;0.5"},
        {"--synthetic-acceptance", "-0.1"},
        {"--synthetic-acceptance", "nan"},
        {"--synthetic-acceptance", "0.5 "},
        {"--synthetic-acceptance", "on"},
    };
    for (size_t i = 0; i < sizeof good / sizeof good[0]; i++) {
        assert_int_equal(load_pair(good[i][0], good[i][1]), 0);
    }
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        assert_int_equal(load_pair(bad[i][0], bad[i][1]), -EINVAL);
    }
    assert_int_equal(load_pair("--shadow", "sample:0.25"), 0);
    assert_true(config.shadow > 0.2499 && config.shadow < 0.2501);
    assert_int_equal(load_pair("--listen", "[::1]:9"), 0);
    assert_string_equal(config.listen_host, "::1");
    assert_string_equal(config.admin_host, "::1");
    assert_int_equal(config.admin_port, 10);
    assert_int_equal(load("--model", "m", "--poison", (const char *)NULL), 0);
    assert_int_equal(config.poison, 1);
}

static void test_synthetic_acceptance(void **state)
{
    char list[300] = "0.5";
    (void)state;
    assert_int_equal(load("--model", "m", (const char *)NULL), 0);
    assert_int_equal(config.synthetic_acceptance_count, 0); /* off unless given */
    assert_int_equal(load_pair("--synthetic-acceptance", "0.8,0.7,0.625"), 0);
    assert_int_equal(config.synthetic_acceptance_count, 3);
    assert_true(config.synthetic_acceptance[0] == 0.8 && config.synthetic_acceptance[2] == 0.625);
    for (int i = 1; i < TV_CONFIG_SYNTHETIC_MAX; i++) {
        (void)strcat(list, ",0.5");
    }
    assert_int_equal(load_pair("--synthetic-acceptance", list), 0);
    assert_int_equal(config.synthetic_acceptance_count, TV_CONFIG_SYNTHETIC_MAX);
    (void)strcat(list, ",0.5");
    assert_int_equal(load_pair("--synthetic-acceptance", list), -EINVAL);
    /* no oracle can judge a coin */
    assert_int_equal(load("--model", "m", "--synthetic-acceptance=0.5", "--shadow=sample:0.1",
                          (const char *)NULL),
                     -EBADMSG);
    assert_int_equal(load("--model", "m", "--synthetic-acceptance=0.5", "--shadow-path-p=0.1",
                          (const char *)NULL),
                     -EBADMSG);
    assert_int_equal(
        load("--model", "m", "--synthetic-acceptance=off", "--shadow=all", (const char *)NULL), 0);
}

static void test_synthetic_kv_is_for_synthetic_weights(void **state)
{
    (void)state;
    assert_int_equal(load_pair("--synthetic-weights", "1"), 0);
    assert_int_equal(config.synthetic_kv, 0);
    assert_int_equal(
        load("--model", "m", "--synthetic-weights=1", "--synthetic-kv=on", (const char *)NULL), 0);
    assert_int_equal(config.synthetic_kv, 1);
    assert_int_equal(load_pair("--synthetic-kv", "on"), -EBADMSG);
    assert_int_equal(load_pair("--synthetic-kv", "off"), 0);
}

static void test_listeners_stay_on_loopback(void **state)
{
    (void)state;
    static const char *const open_hosts[] = {"0.0.0.0:1", "[::]:1", "192.0.2.1:1",
                                             "[2001:db8::1]:1", "example:1"};
    for (size_t i = 0; i < sizeof open_hosts / sizeof open_hosts[0]; i++) {
        assert_int_equal(load_pair("--listen", open_hosts[i]), -EBADMSG);
        assert_int_equal(load_pair("--listen-admin", open_hosts[i]), -EBADMSG);
    }
    assert_int_equal(load_pair("--listen", "0.0.0.0:1"), -EBADMSG);
    assert_non_null(strstr(error, "api_key_file"));
    assert_int_equal(load_pair("--api-key-file", "keys"), -EBADMSG);
    assert_non_null(strstr(error, "No such file"));
    assert_int_equal(load_pair("--listen", "127.8.9.1:1"), 0);
    const char *path = write_file("someone:verify:a-secret-of-16-bytes\n");
    for (size_t i = 0; i + 1 < sizeof open_hosts / sizeof open_hosts[0]; i++) {
        assert_int_equal(load("--model", "m", "--listen", open_hosts[i], "--api-key-file", path,
                              (const char *)NULL),
                         0);
    }
    assert_int_equal(unlink(path), 0);
}

/* A text that goes on behind a NUL is none that could be compared with what a client sends. */
static void test_keys_with_nul(void **state)
{
    static const char *const ends[] = {"\n", "", "\nother:verify:a-secret-of-17-bytes\n"};
    static const char line[] = "someone:verify:a-secret-of-16-bytes\0more";
    (void)state;
    for (size_t i = 0; i < sizeof ends / sizeof ends[0]; i++) {
        struct tv_keys keys = {.count = 0};
        const char *path = write_file("");
        FILE *file = fopen(path, "w");
        assert_non_null(file);
        assert_int_equal(fwrite(line, 1, sizeof line - 1, file), sizeof line - 1);
        assert_true(fputs(ends[i], file) >= 0);
        assert_int_equal(fclose(file), 0);
        assert_int_equal(tv_keys_load(path, &keys, error, sizeof error), -EBADMSG);
        assert_non_null(strstr(error, "NUL (line 1)"));
        assert_int_equal(unlink(path), 0);
    }
}

static void test_hosts(void **state)
{
    static const char *const good[] = {"any", "a", "a.example,b-2,192.0.2.1"};
    static const char *const bad[] = {"",    ",",   "a,",    ",a", "a,,b",
                                      "a:1", "a b", "[::1]", "*",  "a_b"};
    (void)state;
    for (size_t i = 0; i < sizeof good / sizeof good[0]; i++) {
        assert_int_equal(load_pair("--hosts", good[i]), 0);
        assert_string_equal(config.hosts, good[i]);
    }
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        assert_int_equal(load_pair("--hosts", bad[i]), -EINVAL);
    }
}

/* Rotation, scopes, and that nothing but the whole secret is one. */
static void test_keys(void **state)
{
    (void)state;
    struct tv_keys keys;
    const char *path =
        write_file("# two of one name\n\na:verify:secret-number-one-1\n"
                   "a:admin,metrics:secret-number-two-22\r\nb:metrics:secret-3-secret-3");
    assert_int_equal(tv_keys_load(path, &keys, error, sizeof error), 0);
    assert_int_equal(unlink(path), 0);
    assert_int_equal(keys.count, 3);
    const struct tv_key *first = tv_keys_find(&keys, "secret-number-one-1", 19);
    const struct tv_key *second = tv_keys_find(&keys, "secret-number-two-22", 20);
    const struct tv_key *third = tv_keys_find(&keys, "secret-3-secret-3", 17);
    assert_non_null(first);
    assert_non_null(second);
    assert_non_null(third);
    assert_string_equal(first->name, "a");
    assert_string_equal(second->name, "a");
    assert_string_equal(third->name, "b");
    assert_int_equal(first->scopes, TV_SCOPE_VERIFY);
    assert_int_equal(second->scopes, TV_SCOPE_ADMIN | TV_SCOPE_METRICS);
    assert_int_equal(third->scopes, TV_SCOPE_METRICS);
    assert_null(tv_keys_find(&keys, "secret-number-one-1", 18));
    assert_null(tv_keys_find(&keys, "secret-number-two-2", 19));
    assert_null(tv_keys_find(&keys, "", 0));
    tv_keys_finish(&keys);
    assert_null(tv_keys_find(&keys, "secret-number-one-1", 19));
    tv_keys_finish(&keys);
}

static void test_between_options(void **state)
{
    (void)state;
    assert_int_equal(load("--model", "m", "--drain-grace-s=31", (const char *)NULL), -EBADMSG);
    assert_int_equal(load("--model", "m", "--body-bytes=33554432", (const char *)NULL), -EBADMSG);
    assert_int_equal(load("--model", "m", "--listen=127.0.0.1:65535", (const char *)NULL),
                     -EBADMSG);
    assert_int_equal(load("--model", "m", "--listen=127.0.0.1:0", (const char *)NULL), 0);
    assert_int_equal(config.admin_port, 0);
}

/* Every key is printed with its origin, and the values are read back as they were. */
static void test_print(void **state)
{
    (void)state;
    char *text = NULL;
    size_t bytes = 0;
    assert_int_equal(
        load("--model", "m", "--shadow=sample:0.5", "--listen=[::1]:7", (const char *)NULL), 0);
    FILE *out = open_memstream(&text, &bytes);
    assert_non_null(out);
    tv_config_print(&config, out);
    assert_int_equal(fclose(out), 0);
    assert_non_null(strstr(text, "# command line\nmodel = m\n"));
    assert_non_null(strstr(text, "# command line\nshadow = sample:0.5\n"));
    assert_non_null(strstr(text, "# command line\nlisten = [::1]:7\n"));
    assert_non_null(strstr(text, "# default\nlisten_admin = [::1]:8\n"));
    assert_non_null(strstr(text, "# default\nmax_nodes = 256\n"));
    assert_non_null(strstr(text, "# default\n# state_dir = \n"));
    struct tv_config printed = config;
    assert_int_equal(load_file(text), 0); /* what was printed is a file, and of the same values */
    memset(config.origin, 0, sizeof config.origin);
    memset(printed.origin, 0, sizeof printed.origin);
    char *again = NULL, *before = NULL;
    size_t again_bytes = 0, before_bytes = 0;
    FILE *second = open_memstream(&again, &again_bytes);
    tv_config_print(&config, second);
    assert_int_equal(fclose(second), 0);
    FILE *first = open_memstream(&before, &before_bytes);
    tv_config_print(&printed, first);
    assert_int_equal(fclose(first), 0);
    assert_string_equal(again, before);
    free(again);
    free(before);
    free(text);
    size_t count;
    const struct tv_option *table = tv_options_table(&count);
    for (size_t i = 0; i < count; i++) {
        assert_ptr_equal(tv_options_find(table[i].name, strlen(table[i].name)), &table[i]);
    }
}

/* A share is printed with the fewest digits that read back as the same number. */
static void test_shares_are_printed_shortest(void **state)
{
    static const char *const pairs[][2] = {{"0.1", "0.1"},
                                           {"0.12345678901234567", "0.12345678901234566"},
                                           {"0.3000000000000000166", "0.3"},
                                           {"0.99999999999", "0.99999999999"},
                                           {"0.0000015", "1.5e-06"},
                                           {"1e-300", "1e-300"},
                                           {"0", "0"},
                                           {"1", "1"}};
    (void)state;
    for (size_t i = 0; i < sizeof pairs / sizeof pairs[0]; i++) {
        char *text = NULL, option[64], line[64], mode[64];
        size_t bytes = 0;
        (void)snprintf(option, sizeof option, "--shadow-path-p=%s", pairs[i][0]);
        (void)snprintf(mode, sizeof mode, "--shadow=sample:%s", pairs[i][0]);
        assert_int_equal(load("--model", "m", option, mode, (const char *)NULL), 0);
        FILE *out = open_memstream(&text, &bytes);
        assert_non_null(out);
        tv_config_print(&config, out);
        assert_int_equal(fclose(out), 0);
        (void)snprintf(line, sizeof line, "\nshadow_path_p = %s\n", pairs[i][1]);
        assert_non_null(strstr(text, line));
        double share = config.shadow, path = config.shadow_path;
        if (share > 0.0 && share < 1.0) {
            (void)snprintf(line, sizeof line, "\nshadow = sample:%s\n", pairs[i][1]);
            assert_non_null(strstr(text, line));
        }
        assert_int_equal(load_file(text), 0);
        assert_true(config.shadow == share && config.shadow_path == path);
        free(text);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_defaults),
        cmocka_unit_test(test_cuda_defaults_to_bf16_rows),
        cmocka_unit_test(test_products),
        cmocka_unit_test(test_precedence),
        cmocka_unit_test(test_overridden_values_are_checked),
        cmocka_unit_test(test_file_refusals),
        cmocka_unit_test(test_file_lines_too_long_and_files_missing),
        cmocka_unit_test(test_switches),
        cmocka_unit_test(test_command_line_refusals),
        cmocka_unit_test(test_integer_ranges),
        cmocka_unit_test(test_values),
        cmocka_unit_test(test_synthetic_kv_is_for_synthetic_weights),
        cmocka_unit_test(test_listeners_stay_on_loopback),
        cmocka_unit_test(test_keys),
        cmocka_unit_test(test_keys_with_nul),
        cmocka_unit_test(test_hosts),
        cmocka_unit_test(test_between_options),
        cmocka_unit_test(test_print),
        cmocka_unit_test(test_shares_are_printed_shortest),
        cmocka_unit_test(test_synthetic_acceptance),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
