/*
 * cli.c - options, files, errors and safe printing for the subcommands.
 */
#include "clients/cli/cli.h"

#include <assert.h>
#include <errno.h>
#include <math.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define READ_STEP          65536
#define KEY_BYTES_MAX      256 /* that a header has room for */
#define KEY_FILE_BYTES_MAX 4096
#define RESTART_S_MAX      3600
#define LEAVE_MS           5000 /* for the DELETE of a session */
#define GONE_MS            2000 /* the same, when the server had not answered before */

void tv_cli_init(struct tv_cli *ret_cli)
{
    const char *url = getenv("TREEVERIFY_URL");
    struct tv_client_options options;
    tv_client_options_init(&options);
    *ret_cli = (struct tv_cli){
        .url = url != NULL && url[0] != '\0' ? url : "http://127.0.0.1:8471",
        .restart_ms = options.restart_ms,
    };
}

int tv_cli_option(struct tv_cli *cli, int option, const char *help)
{
    double number;
    switch (option) {
    case TV_CLI_OPT_URL:
        cli->url = optarg;
        return -1;
    case TV_CLI_OPT_JSON:
        cli->json = 1;
        return -1;
    case TV_CLI_OPT_KEY_FILE:
        cli->key_file = optarg;
        return -1;
    case TV_CLI_OPT_CACERT:
        cli->ca_file = optarg;
        return -1;
    case TV_CLI_OPT_RESTART:
        if (tv_cli_parse_real(optarg, 0.0, RESTART_S_MAX, &number) != 0) {
            return tv_cli_usage("--restart-s takes 0 to %d", RESTART_S_MAX);
        }
        cli->restart_ms = (int32_t)(number * 1e3);
        return -1;
    case TV_CLI_OPT_HELP:
        (void)fputs(help, stdout);
        return TV_CLI_OK;
    default: /* getopt has said what is wrong */
        return TV_CLI_USAGE;
    }
}

int tv_cli_options(struct tv_cli *ret_cli, int argc, char **argv, const char *flag, int *ret_flag,
                   const char *help)
{
    const struct option options[] = {{flag, no_argument, NULL, TV_CLI_OPT_OWN},
                                     TV_CLI_COMMON_OPTIONS};
    int option;
    tv_cli_init(ret_cli);
    *ret_flag = 0;
    while ((option = getopt_long(argc, argv, "", options, NULL)) != -1) {
        if (option == TV_CLI_OPT_OWN) {
            *ret_flag = 1;
            continue;
        }
        int code = tv_cli_option(ret_cli, option, help);
        if (code >= 0) {
            return code;
        }
    }
    return -1;
}

int tv_cli_usage(const char *format, ...)
{
    va_list args;
    (void)fputs("treeverify: ", stderr);
    va_start(args, format);
    (void)vfprintf(stderr, format, args);
    va_end(args);
    (void)fputc('\n', stderr);
    return TV_CLI_USAGE;
}

int tv_cli_parse_int(const char *text, int64_t lo, int64_t hi, int64_t *ret)
{
    char *end;
    errno = 0;
    long long number = strtoll(text, &end, 10);
    if (errno != 0 || end == text || *end != '\0' || number < lo || number > hi) {
        return -EINVAL;
    }
    *ret = number;
    return 0;
}

int tv_cli_parse_real(const char *text, double lo, double hi, double *ret)
{
    char *end;
    double number = strtod(text, &end);
    if (end == text || *end != '\0' || !isfinite(number) || number < lo || number > hi) {
        return -EINVAL;
    }
    *ret = number;
    return 0;
}

/* Whether a header can carry it: the library takes nothing else. */
static int is_key(const char *text)
{
    size_t bytes = strlen(text);
    for (size_t i = 0; i < bytes; i++) {
        if (text[i] <= 0x20 || text[i] >= 0x7f) {
            return 0;
        }
    }
    return bytes > 0 && bytes <= KEY_BYTES_MAX;
}

/* The first line of the file. TV_CLI_OK, or the exit code after saying why. */
static int read_key(const char *path, char **ret_key)
{
    size_t bytes = 0;
    int code = tv_cli_read_file(path, KEY_FILE_BYTES_MAX, ret_key, &bytes);
    if (code == TV_CLI_OK) {
        size_t end = 0;
        while (end < bytes && (*ret_key)[end] != '\n' && (*ret_key)[end] != '\r') {
            end++;
        }
        char *key = realloc(*ret_key, bytes + 1);
        if (key == NULL) {
            free(*ret_key);
            (void)fputs("treeverify: out of memory\n", stderr);
            return TV_CLI_MEMORY;
        }
        key[end] = '\0';
        if (!is_key(key)) {
            explicit_bzero(key, bytes);
            free(key);
            (void)fprintf(stderr, "treeverify: %s: its first line is no key\n", path);
            return TV_CLI_NO_INPUT;
        }
        *ret_key = key;
    }
    return code;
}

/* options are complete but for url and key. */
static int connect_with(const struct tv_cli *cli, struct tv_client_options options,
                        struct tv_client **ret_client)
{
    options.url = cli->url;
    options.ca_file = cli->ca_file;
    options.restart_ms = cli->restart_ms;
    if (options.total_ms - options.attempt_ms < cli->restart_ms) {
        options.total_ms = cli->restart_ms + options.attempt_ms; /* and an attempt behind it */
    }
    char *key = NULL;
    if (cli->ca_file != NULL && access(cli->ca_file, R_OK) != 0) {
        (void)fprintf(stderr, "treeverify: %s: %s\n", cli->ca_file, strerror(errno));
        return TV_CLI_NO_INPUT;
    }
    if (cli->key_file != NULL) {
        int code = read_key(cli->key_file, &key);
        if (code != TV_CLI_OK) {
            return code;
        }
        options.key = key;
    }
    int error = tv_client_create(&options, ret_client);
    if (key != NULL) {
        explicit_bzero(key, strlen(key));
        free(key);
    }
    if (error == -EINVAL) {
        return tv_cli_usage("'%.200s' is not http(s)://HOST:PORT", cli->url);
    }
    if (error != 0) {
        (void)fputs("treeverify: out of memory\n", stderr);
        return TV_CLI_MEMORY;
    }
    return TV_CLI_OK;
}

int tv_cli_connect(const struct tv_cli *cli, struct tv_client **ret_client)
{
    struct tv_client_options options;
    tv_client_options_init(&options);
    return connect_with(cli, options, ret_client);
}

int tv_cli_connect_for(const struct tv_cli *cli, int32_t call_ms, struct tv_client **ret_client)
{
    struct tv_client_options options;
    tv_client_options_init(&options);
    options.attempt_ms = call_ms;
    options.total_ms = call_ms;
    return connect_with(cli, options, ret_client);
}

int tv_cli_connect_once(const struct tv_cli *cli, struct tv_client **ret_client)
{
    struct tv_client_options options;
    tv_client_options_init(&options);
    options.retries_max = 0;
    return connect_with(cli, options, ret_client);
}

int tv_cli_leave(struct tv_client_session *session, int failed,
                 struct tv_client_problem *ret_problem)
{
    int error = tv_client_session_delete_within(session, failed ? GONE_MS : LEAVE_MS, ret_problem);
    tv_client_session_destroy(session);
    int unknown = ret_problem->http_status == 404 || ret_problem->http_status == 410;
    return error == -EPROTO && unknown ? 0 : error;
}

static int exit_code(int error, const struct tv_client_problem *problem)
{
    switch (error) {
    case -EPROTO:
        return problem->retryable ? TV_CLI_BUSY : TV_CLI_REFUSED;
    case -EBADMSG:
    case -ENOTSUP:
    case -ESTALE:
    case -ENOTRECOVERABLE:
        return TV_CLI_REFUSED;
    case -ECONNREFUSED:
    case -EIO:
    case -ETIMEDOUT:
        return TV_CLI_UNAVAILABLE;
    case -ENOMEM:
        return TV_CLI_MEMORY;
    default:
        return TV_CLI_USAGE;
    }
}

int tv_cli_fail(const struct tv_cli *cli, int error, const struct tv_client_problem *problem)
{
    static const char *const committed[] = {"unknown", "no", "yes"};
    assert(error < 0);
    if (cli->json) {
        (void)fputs("{\"error\":", stdout);
        tv_cli_print_json_string(stdout, problem->code[0] != '\0' ? problem->code : "no-answer");
        (void)fputs(",\"detail\":", stdout);
        tv_cli_print_json_string(stdout, problem->detail);
        (void)printf(",\"status\":%d,\"retryable\":%s,\"committed\":%s}\n",
                     (int)problem->http_status, problem->retryable ? "true" : "false",
                     problem->committed < 0   ? "null"
                     : problem->committed > 0 ? "true"
                                              : "false");
        return exit_code(error, problem);
    }
    (void)fputs("treeverify: ", stderr);
    if (error == -EPROTO) {
        (void)fprintf(stderr, "refused with %d %s: ", (int)problem->http_status, problem->code);
    }
    (void)fprintf(stderr, "%s", problem->detail);
    if (problem->pointer[0] != '\0') {
        (void)fprintf(stderr, " (at %s)", problem->pointer);
    }
    if (error == -EPROTO) {
        (void)fprintf(stderr, "; committed: %s", committed[problem->committed + 1]);
    }
    (void)fputc('\n', stderr);
    return exit_code(error, problem);
}

int tv_cli_read_file(const char *path, size_t bytes_max, char **ret_data, size_t *ret_bytes)
{
    FILE *file = strcmp(path, "-") == 0 ? stdin : fopen(path, "rb");
    char *data = NULL;
    size_t bytes = 0;
    size_t capacity = 0;
    int code = TV_CLI_NO_INPUT;
    if (file == NULL) {
        (void)fprintf(stderr, "treeverify: %s: %s\n", path, strerror(errno));
        return code;
    }
    for (;;) {
        if (bytes == capacity) {
            char *more = realloc(data, capacity + READ_STEP);
            if (more == NULL) {
                (void)fputs("treeverify: out of memory\n", stderr);
                code = TV_CLI_MEMORY;
                goto out;
            }
            data = more;
            capacity += READ_STEP;
        }
        size_t got = fread(data + bytes, 1, capacity - bytes, file);
        if (got == 0) {
            break;
        }
        bytes += got;
        if (bytes > bytes_max) {
            (void)fprintf(stderr, "treeverify: %s: more than %zu bytes\n", path, bytes_max);
            goto out;
        }
    }
    if (ferror(file)) {
        (void)fprintf(stderr, "treeverify: %s: read error\n", path);
        goto out;
    }
    *ret_data = data;
    *ret_bytes = bytes;
    data = NULL;
    code = TV_CLI_OK;
out:
    free(data);
    if (file != stdin) {
        (void)fclose(file); /* only read from */
    }
    return code;
}

void tv_cli_print_byte_token(FILE *out, int32_t token)
{
    if (token == '\n' || token == '\t' || (token >= 0x20 && token < 0x7f)) {
        (void)fputc(token, out);
    } else if (token < 256) {
        (void)fprintf(out, "<0x%02X>", (unsigned)token);
    } else {
        (void)fprintf(out, "<%d>", (int)token);
    }
}

static void print_json_char(FILE *out, int c)
{
    if (c == '"' || c == '\\') {
        (void)fprintf(out, "\\%c", c);
    } else if (c < 0x20 || c == 0x7f) {
        (void)fprintf(out, "\\u%04x", (unsigned)c);
    } else {
        (void)fputc(c, out);
    }
}

void tv_cli_print_json_text(FILE *out, const int32_t *tokens, size_t count)
{
    (void)fputc('"', out);
    for (size_t i = 0; i < count; i++) {
        if (tokens[i] < 0x80) {
            print_json_char(out, tokens[i]);
        } else {
            (void)fputs("\\ufffd", out);
        }
    }
    (void)fputc('"', out);
}

void tv_cli_print_json_ints(FILE *out, const int32_t *items, size_t count)
{
    (void)fputc('[', out);
    for (size_t i = 0; i < count; i++) {
        (void)fprintf(out, i == 0 ? "%d" : ",%d", (int)items[i]);
    }
    (void)fputc(']', out);
}

void tv_cli_print_json_string(FILE *out, const char *text)
{
    (void)fputc('"', out);
    for (; *text != '\0'; text++) {
        if ((unsigned char)*text < 0x80) {
            print_json_char(out, *text);
        } else {
            (void)fputs("\\ufffd", out); /* bytes of a string that may have been cut */
        }
    }
    (void)fputc('"', out);
}

int tv_cli_end(int code)
{
    if (fflush(stdout) != 0 || ferror(stdout)) {
        (void)fputs("treeverify: the output cannot be written\n", stderr);
        return code == TV_CLI_OK ? TV_CLI_OUTPUT : code;
    }
    return code;
}
