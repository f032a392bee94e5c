/*
 * rates.c - the value of synthetic_acceptance: shares by depth, with commas between.
 */
#include <errno.h>
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
