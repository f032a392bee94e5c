/*
 * options.h - the table of options; private to config/.
 *
 * One entry is a command-line option, a key of the file and an environment variable at once. An
 * entry knows how to read its value into the struct and how to print it back.
 */
#ifndef TV_CONFIG_OPTIONS_H
#define TV_CONFIG_OPTIONS_H

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include "config/config.h"

struct tv_option;
/* 0, or -EINVAL: the text is no value of this option (options.c says why in `reason`). */
typedef int tv_option_parse(const struct tv_option *option, struct tv_config *config,
                            const char *text, char *reason, size_t reason_bytes);
typedef void tv_option_print(const struct tv_option *option, const struct tv_config *config,
                             FILE *out);

struct tv_option {
    const char *name; /* file key; the option is --name with '-' for '_', the variable upper case */
    const char *value; /* for the usage text; NULL: a flag of the command line alone */
    const char *help;
    tv_option_parse *parse;
    tv_option_print *print;
    size_t offset;         /* of the member */
    int64_t minimum, last; /* integers: the range; texts: `last` is the member's size */
};

/* A probability in decimal notation. 0 or -EINVAL. */
int tv_options_read_share(const char *text, double *ret);
/* In the fewest digits that read back as the same value. */
void tv_options_print_share(double value, FILE *out);
/* reload.c. What SIGHUP does to an option: nothing, its value changes, its file is read again. */
enum tv_reload { TV_RELOAD_NO, TV_RELOAD_VALUE, TV_RELOAD_CONTENTS };
enum tv_reload tv_options_reload(const struct tv_option *option);
/* rates.c: synthetic_acceptance. */
tv_option_parse tv_options_parse_rates;
tv_option_print tv_options_print_rates;
/* rates.c: synthetic_weights. */
tv_option_parse tv_options_parse_synthetic;
tv_option_print tv_options_print_synthetic;
/* lists.c */
tv_option_parse tv_options_parse_taps, tv_options_parse_hosts;
tv_option_print tv_options_print_taps;
/* The `print` of every option whose member is a text. */
tv_option_print tv_options_print_text;
const struct tv_option *tv_options_table(size_t *ret_count);
/* NULL when there is none of that name ('-' counts as '_'). */
const struct tv_option *tv_options_find(const char *name, size_t bytes);

/* config.c: set one option unless something of higher rank has set it; a value that does not count
 * is checked all the same. 0 or -EINVAL with the reason. */
int tv_config_option_set(struct tv_config *config, const struct tv_option *option,
                         enum tv_origin origin, const char *text, char *reason,
                         size_t reason_bytes);
/* files.c: the keys of the file, then of every <path>.d file named *.conf, in order of their names.
 * 0 or -EBADMSG with text. */
int tv_config_read_files(struct tv_config *config, const char *path, char *error,
                         size_t error_bytes);

#endif
