/*
 * test_config_reload.c - what a running daemon takes over of another reading, what waits, and which
 * files options name.
 */
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "config/config.h"
#include "config/options.h"

#define WORDS_MAX 8

static char error[600];

/* tv_config_load with these arguments behind the program's name; the list ends with NULL. */
static int load(struct tv_config *ret_config, const char *first, ...)
{
    static char words[WORDS_MAX][200];
    char *argv[WORDS_MAX + 1] = {words[0]};
    int argc = 1;
    va_list arguments;
    error[0] = '\0';
    (void)snprintf(words[0], sizeof words[0], "treeverifyd");
    va_start(arguments, first);
    for (const char *word = first; word != NULL; word = va_arg(arguments, const char *)) {
        assert_in_range(argc, 1, WORDS_MAX - 1);
        (void)snprintf(words[argc], sizeof words[0], "%s", word);
        argv[argc] = words[argc];
        argc++;
    }
    va_end(arguments);
    argv[argc] = NULL;
    return tv_config_load(ret_config, argc, argv, error, sizeof error);
}

/* The text of an option as it would be printed. */
static void print(const struct tv_config *config, const char *name, char *ret_text, size_t bytes)
{
    const struct tv_option *option = tv_options_find(name, strlen(name));
    assert_non_null(option);
    memset(ret_text, 0, bytes);
    FILE *out = fmemopen(ret_text, bytes, "w");
    assert_non_null(out);
    option->print(option, config, out);
    assert_int_equal(fclose(out), 0);
}

static void test_what_is_taken(void **state)
{
    static struct tv_config config, fresh;
    (void)state;
    assert_int_equal(load(&config, "--model=m", "--queue-max=5", "--max-nodes=9", NULL), 0);
    assert_int_equal(load(&fresh, "--model=m", "--queue-max=6", "--max-nodes=10",
                          "--log-level=debug", "--principal-rejected=0.5", NULL),
                     0);
    tv_config_take(&config, &fresh);
    assert_int_equal(config.queue_max, 6);
    assert_int_equal(config.max_nodes, 9);
    assert_string_equal(config.log_level, "debug");
    assert_true(config.principal_rejected == 0.5);
    assert_int_equal(load(&fresh, "--model=m", NULL), 0);
    tv_config_take(&config, &fresh);
    assert_int_equal(config.queue_max, 256);
    assert_string_equal(config.log_level, "info");
}

/* Every option does what the table says of it: the ones marked as values are taken over, with their
 * origin, and no other is. */
static void test_every_option_as_marked(void **state)
{
    static struct tv_config before, after, fresh;
    size_t count, taken = 0;
    const struct tv_option *table = tv_options_table(&count);
    char was[100], now[100], new[100];
    (void)state;
    assert_int_equal(load(&before, "--model=m", NULL), 0);
    for (size_t i = 0; i < count; i++) {
        const struct tv_option *option = &table[i];
        int is_number = option->value != NULL &&
                        (strcmp(option->value, "N") == 0 || strcmp(option->value, "BYTES") == 0);
        if (!is_number) {
            continue;
        }
        fresh = before;
        after = before;
        print(&before, option->name, was, sizeof was);
        char least[32], reason[200] = "";
        (void)snprintf(least, sizeof least, "%lld", (long long)option->minimum);
        if (strcmp(was, least) == 0) {
            (void)snprintf(least, sizeof least, "%lld", (long long)option->minimum + 1);
        }
        assert_int_equal(option->parse(option, &fresh, least, reason, sizeof reason), 0);
        fresh.origin[i] = TV_ORIGIN_FILE;
        print(&fresh, option->name, new, sizeof new);
        assert_string_not_equal(was, new);
        tv_config_take(&after, &fresh);
        print(&after, option->name, now, sizeof now);
        int is_value = tv_options_reload(option) == TV_RELOAD_VALUE;
        assert_string_equal(now, is_value ? new : was);
        assert_int_equal(after.origin[i], is_value ? TV_ORIGIN_FILE : TV_ORIGIN_DEFAULT);
        char waiting[200];
        tv_config_waiting(&before, &fresh, waiting, sizeof waiting);
        assert_string_equal(waiting, is_value ? "" : option->name);
        taken += is_value;
    }
    assert_in_range(taken, 9, count);
}

static void test_what_waits(void **state)
{
    static struct tv_config config, fresh;
    char waiting[200], small[12];
    (void)state;
    assert_int_equal(load(&config, "--model=m", NULL), 0);
    fresh = config;
    /* what the start has settled, and nobody has asked for */
    (void)snprintf(config.state_dir, sizeof config.state_dir, "/var/lib/somewhere");
    tv_config_waiting(&config, &fresh, waiting, sizeof waiting);
    assert_string_equal(waiting, "");
    assert_int_equal(load(&fresh, "--model=other", "--shadow=all", "--queue-max=9",
                          "--state-dir=/tmp", "--taps=1,2", NULL),
                     0);
    tv_config_waiting(&config, &fresh, waiting, sizeof waiting);
    assert_string_equal(waiting, "model, taps, shadow, state_dir");
    tv_config_waiting(&config, &fresh, small, sizeof small); /* cut, and still a text */
    assert_true(strlen(small) < sizeof small);
}

static void test_files_of_options(void **state)
{
    static const char *const bad[] = {"credential:", "credential:.", "credential:..",
                                      "credential:../x", "credential:a/b"};
    char path[64];
    (void)state;
    assert_int_equal(setenv("CREDENTIALS_DIRECTORY", "/run/credentials/x", 1), 0);
    assert_int_equal(tv_config_path("a/b", path, sizeof path, error, sizeof error), 0);
    assert_string_equal(path, "a/b");
    assert_int_equal(tv_config_path("credential:keys", path, sizeof path, error, sizeof error), 0);
    assert_string_equal(path, "/run/credentials/x/keys");
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        assert_int_equal(tv_config_path(bad[i], path, sizeof path, error, sizeof error), -EBADMSG);
        assert_non_null(strstr(error, "not the name of a credential"));
    }
    assert_int_equal(tv_config_path("credential:keys", path, 23, error, sizeof error), -EBADMSG);
    assert_int_equal(tv_config_path("credential:keys", path, 24, error, sizeof error), 0);
    assert_int_equal(tv_config_path("abc", path, 3, error, sizeof error), -EBADMSG);
    assert_int_equal(setenv("CREDENTIALS_DIRECTORY", "relative", 1), 0);
    assert_int_equal(tv_config_path("credential:keys", path, sizeof path, error, sizeof error),
                     -EBADMSG);
    assert_int_equal(unsetenv("CREDENTIALS_DIRECTORY"), 0);
    assert_int_equal(tv_config_path("credential:keys", path, sizeof path, error, sizeof error),
                     -EBADMSG);
    assert_non_null(strstr(error, "no credentials"));
}

static void test_tls_options(void **state)
{
    static struct tv_config config;
    (void)state;
    assert_int_equal(load(&config, "--model=m", NULL), 0);
    assert_int_equal(config.tls_min, 12);
    assert_int_equal(load(&config, "--model=m", "--tls-cert=a", NULL), -EBADMSG);
    assert_int_equal(load(&config, "--model=m", "--tls-key=a", NULL), -EBADMSG);
    assert_non_null(strstr(error, "go together"));
    assert_int_equal(
        load(&config, "--model=m", "--tls-cert=a", "--tls-key=b", "--tls-min=1.3", NULL), 0);
    assert_int_equal(config.tls_min, 13);
    assert_int_equal(load(&config, "--model=m", "--tls-min=1.1", NULL), -EINVAL);
    /* no model is needed to look at a device */
    assert_int_equal(load(&config, "--check-gpu", NULL), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_what_is_taken), cmocka_unit_test(test_every_option_as_marked),
        cmocka_unit_test(test_what_waits),    cmocka_unit_test(test_files_of_options),
        cmocka_unit_test(test_tls_options),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
