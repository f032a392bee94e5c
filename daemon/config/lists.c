/*
 * lists.c - options whose value is a list between commas: taps and hosts.
 *
 * Refuses empty members, members given twice (taps), and names that no Host could be.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "config/options.h"
#include "proto/limits.h"

/* Numbers between commas, none twice; or none. */
int tv_options_parse_taps(const struct tv_option *option, struct tv_config *config,
                          const char *text, char *reason, size_t reason_bytes)
{
    int32_t taps[TV_TAPS_MAX], count = 0;
    const char *at = text;
    (void)option; /* the only option of its type */
    int more = strcmp(text, "none") != 0;
    while (more) {
        size_t digits = strspn(at, "0123456789");
        int good = digits >= 1 && digits <= 4 && count < TV_TAPS_MAX &&
                   (at[digits] == '\0' || at[digits] == ',');
        int32_t tap = good ? (int32_t)strtol(at, NULL, 10) : 0;
        for (int32_t i = 0; i < count; i++) {
            good = good && taps[i] != tap;
        }
        if (!good) {
            (void)snprintf(reason, reason_bytes,
                           "none, or up to %d different layers between commas, are needed",
                           TV_TAPS_MAX);
            return -EINVAL;
        }
        taps[count++] = tap;
        more = at[digits] == ',';
        at += digits + 1;
    }
    for (int32_t i = 0; i < count; i++) {
        config->taps[i] = taps[i];
    }
    config->tap_count = count;
    return 0;
}

void tv_options_print_taps(const struct tv_option *option, const struct tv_config *config,
                           FILE *out)
{
    (void)option; /* the only option of its type */
    if (config->tap_count == 0) {
        (void)fprintf(out, "none");
    }
    for (int32_t i = 0; i < config->tap_count; i++) {
        (void)fprintf(out, i > 0 ? ",%d" : "%d", config->taps[i]);
    }
}

/* Names, or IPv4 addresses; case does not count, and a port is not part of a name. */
int tv_options_parse_hosts(const struct tv_option *option, struct tv_config *config,
                           const char *text, char *reason, size_t reason_bytes)
{
    static const char allowed[] =
        "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-.";
    const char *at = text;
    size_t bytes = strlen(text);
    int good = bytes < (size_t)option->last;
    while (good) {
        size_t name = strspn(at, allowed);
        good = name >= 1 && name <= 253 && (at[name] == '\0' || at[name] == ',');
        if (!good || at[name] == '\0') {
            break;
        }
        at += name + 1;
    }
    if (!good) {
        (void)snprintf(reason, reason_bytes,
                       "any, or names of letters, digits, - and . between commas, are needed");
        return -EINVAL;
    }
    memcpy(config->hosts, text, bytes + 1);
    return 0;
}
