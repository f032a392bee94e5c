/*
 * rates.c - the values of synthetic_acceptance (shares by depth, with commas between) and of
 * synthetic_weights.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "config/options.h"

/* "off", or one share for each depth from 1 on. */
int tv_options_parse_rates(const struct tv_option *option, struct tv_config *config,
                           const char *text, char *reason, size_t reason_bytes)
{
    double rates[TV_CONFIG_SYNTHETIC_MAX];
    int32_t count = 0;
    const char *at = text;
    (void)option; /* the only option of its type */
    if (strcmp(text, "off") == 0) {
        config->synthetic_acceptance_count = 0;
        return 0;
    }
    for (;;) {
        char one[32];
        size_t bytes = strcspn(at, ",");
        if (count == TV_CONFIG_SYNTHETIC_MAX || bytes >= sizeof one) {
            break;
        }
        memcpy(one, at, bytes);
        one[bytes] = '\0';
        if (tv_options_read_share(one, &rates[count]) != 0) {
            break;
        }
        count++;
        if (at[bytes] == '\0') {
            memcpy(config->synthetic_acceptance, rates, (size_t)count * sizeof rates[0]);
            config->synthetic_acceptance_count = count;
            return 0;
        }
        at += bytes + 1;
    }
    (void)snprintf(reason, reason_bytes, "off, or 1 to %d numbers from 0 to 1 with commas between",
                   TV_CONFIG_SYNTHETIC_MAX);
    return -EINVAL;
}

void tv_options_print_rates(const struct tv_option *option, const struct tv_config *config,
                            FILE *out)
{
    (void)option; /* the only option of its type */
    if (config->synthetic_acceptance_count == 0) {
        (void)fprintf(out, "off");
    }
    for (int32_t i = 0; i < config->synthetic_acceptance_count; i++) {
        (void)fprintf(out, "%s", i > 0 ? "," : "");
        tv_options_print_share(config->synthetic_acceptance[i], out);
    }
}

int tv_options_parse_synthetic(const struct tv_option *option, struct tv_config *config,
                               const char *text, char *reason, size_t reason_bytes)
{
    char *end = NULL;
    (void)option; /* the only option of its type */
    if (strcmp(text, "off") == 0) {
        config->synthetic_weights = 0;
        config->synthetic_seed = 0;
        return 0;
    }
    errno = 0;
    unsigned long long seed = strtoull(text, &end, 10);
    if (text[0] < '0' || text[0] > '9' || *end != '\0' || errno == ERANGE) {
        (void)snprintf(reason, reason_bytes, "a seed from 0 to 2^64 - 1 or off is needed");
        return -EINVAL;
    }
    config->synthetic_weights = 1;
    config->synthetic_seed = seed;
    return 0;
}

void tv_options_print_synthetic(const struct tv_option *option, const struct tv_config *config,
                                FILE *out)
{
    (void)option; /* the only option of its type */
    if (config->synthetic_weights) {
        (void)fprintf(out, "%llu", (unsigned long long)config->synthetic_seed);
    } else {
        (void)fprintf(out, "off");
    }
}
