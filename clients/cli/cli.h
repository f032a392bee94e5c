/*
 * cli.h - what the subcommands of `treeverify` share: options, exit codes, reading and printing.
 *
 * Results go to stdout, what went wrong to stderr. Text from a server or a model is made safe for a
 * terminal before it is printed.
 */
#ifndef TV_CLI_CLI_H
#define TV_CLI_CLI_H

#include <getopt.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include "clients/c/treeverify-client.h"

/* The sysexits numbers, as far as they fit; listed by `treeverify --help`. */
enum tv_cli_exit {
    TV_CLI_OK = 0,
    TV_CLI_NO = 1,           /* answered, and the answer is no: not ready, parity mismatch */
    TV_CLI_USAGE = 64,       /* command line */
    TV_CLI_NO_INPUT = 66,    /* a file cannot be read */
    TV_CLI_UNAVAILABLE = 69, /* server not reached, connection lost, deadline */
    TV_CLI_MEMORY = 71,
    TV_CLI_OUTPUT = 74, /* stdout or a report cannot be written */
    TV_CLI_BUSY = 75,   /* refused, may succeed later; retries used up */
    TV_CLI_REFUSED =
        76, /* refused, an answer that breaks the contract, or a model we cannot serve */
};

struct tv_cli {
    const char *url;
    const char *key_file; /* whose first line is the key, or NULL */
    const char *ca_file;  /* of who is trusted under https, or NULL: the system's */
    int json;
    int32_t restart_ms; /* of the library's options */
};

/* Commands: argv[0] is the command's name. Each returns an exit code. */
int tv_cli_health(int argc, char **argv);
int tv_cli_verify(int argc, char **argv);
int tv_cli_generate(int argc, char **argv);
int tv_cli_parity(int argc, char **argv);
int tv_cli_bench(int argc, char **argv);
int tv_cli_top(int argc, char **argv);

/* Options every command knows; their letters are above what a byte can be. */
enum {
    TV_CLI_OPT_URL = 256,
    TV_CLI_OPT_JSON,
    TV_CLI_OPT_KEY_FILE,
    TV_CLI_OPT_CACERT,
    TV_CLI_OPT_HELP,
    TV_CLI_OPT_RESTART, /* of commands whose work goes on when the server has been started anew */
    TV_CLI_OPT_OWN
};
#define TV_CLI_COMMON_OPTIONS                                                                      \
    {"url", required_argument, NULL, TV_CLI_OPT_URL},                                              \
        {"json", no_argument, NULL, TV_CLI_OPT_JSON},                                              \
        {"key-file", required_argument, NULL, TV_CLI_OPT_KEY_FILE},                                \
        {"cacert", required_argument, NULL, TV_CLI_OPT_CACERT},                                    \
        {"help", no_argument, NULL, TV_CLI_OPT_HELP},                                              \
    {                                                                                              \
        NULL, 0, NULL, 0                                                                           \
    }

/* The end of every command's list of options; tests read these lists (tests/cli/pages.py). */
#define TV_CLI_COMMON_HELP                                                                         \
    "  --url URL         the server ($TREEVERIFY_URL, else http://127.0.0.1:8471)\n"               \
    "  --key-file FILE   its first line is the server's key\n"                                     \
    "  --cacert FILE     under https: PEM of who is trusted, else the system's\n"                  \
    "  --json            JSON instead of text\n"                                                   \
    "  --help            this text\n"

#define TV_CLI_RESTART_OPTION                                                                      \
    {                                                                                              \
        "restart-s", required_argument, NULL, TV_CLI_OPT_RESTART                                   \
    }
#define TV_CLI_RESTART_HELP                                                                        \
    "  --restart-s T     a server that was there and refuses connections is waited for so long\n"  \
    "                    (30); 0: as for other lost calls\n"

/* TREEVERIFY_URL or the default address. */
void tv_cli_init(struct tv_cli *ret_cli);
/* Take one option common to all commands. -1: go on; else the exit code to end with (help too). */
int tv_cli_option(struct tv_cli *cli, int option, const char *help);
/* All options of a command that has one flag of its own. -1: go on behind optind; else the exit
 * code to end with. */
int tv_cli_options(struct tv_cli *ret_cli, int argc, char **argv, const char *flag, int *ret_flag,
                   const char *help);
/* "treeverify COMMAND: text" on stderr; returns TV_CLI_USAGE. */
int tv_cli_usage(const char *format, ...) __attribute__((format(printf, 1, 2)));
/* A whole decimal number of lo to hi, or a real one. 0 or -EINVAL. */
int tv_cli_parse_int(const char *text, int64_t lo, int64_t hi, int64_t *ret);
int tv_cli_parse_real(const char *text, double lo, double hi, double *ret);

/* TV_CLI_OK, or the exit code after saying why; *ret_client is the caller's. */
int tv_cli_connect(const struct tv_cli *cli, struct tv_client **ret_client);
/* The same with another deadline for each attempt and for the call. */
int tv_cli_connect_for(const struct tv_cli *cli, int32_t call_ms, struct tv_client **ret_client);
/* The same without retries: what a server does not say now is not waited for. */
int tv_cli_connect_once(const struct tv_cli *cli, struct tv_client **ret_client);
/* A command's session ends with it: deleted within some seconds, few where the server did not
 * answer before (failed), or left to its lease; and destroyed. 0, also where the server no longer
 * knows it; else what tv_client_session_delete_within says. */
int tv_cli_leave(struct tv_client_session *session, int failed,
                 struct tv_client_problem *ret_problem);
/* Say what a client call's error means (cli->json: the problem as JSON on stdout); exit code. */
int tv_cli_fail(const struct tv_cli *cli, int error, const struct tv_client_problem *problem);

/* A whole file ("-" is stdin) of at most bytes_max. TV_CLI_OK, or the exit code after saying why.
 * *ret_data is malloc'd and the caller's. */
int tv_cli_read_file(const char *path, size_t bytes_max, char **ret_data, size_t *ret_bytes);

/* One token of a byte-level model as text: its byte, <0xNN> or <id>. */
void tv_cli_print_byte_token(FILE *out, int32_t token);
/* JSON: a quoted string of byte tokens (U+FFFD for what is not ASCII), an array of integers. */
void tv_cli_print_json_text(FILE *out, const int32_t *tokens, size_t count);
void tv_cli_print_json_ints(FILE *out, const int32_t *items, size_t count);
/* A JSON string of text. */
void tv_cli_print_json_string(FILE *out, const char *text);
/* Text without its control characters. */
void tv_cli_print_safe(FILE *out, const char *text);
/* A bar of characters and its numbers. */
void tv_cli_bar(char *ret_text, size_t bytes, const char *label, int64_t done, int64_t all);
/* A line in the last row of stderr's terminal, outside the rows that scroll: begin (0: no terminal,
 * or too small a one, and nothing is to be shown), show, end. SIGINT and SIGTERM end it too. */
int tv_cli_line_begin(void);
void tv_cli_line_show(const char *text);
void tv_cli_line_end(void);
/* A bar on stderr, drawn anew each time, and its end. */
void tv_cli_progress(const char *label, int64_t done, int64_t all);
void tv_cli_progress_end(void);
/* Pictures on stdout's terminal, until SIGINT or SIGTERM: begin, then picture and pause in turns
 * (1: a signal has come), then end. The pause is also for those who draw nothing. */
void tv_cli_live_begin(void);
void tv_cli_live_picture(void);
int tv_cli_live_pause(double seconds);
void tv_cli_live_end(void);
/* Flush stdout; TV_CLI_OUTPUT when something was not written, else code. */
int tv_cli_end(int code);

#endif
