/*
 * main.c - `treeverify`: finds the command and hands over.
 */
#include <stdio.h>
#include <string.h>

#include "clients/cli/cli.h"

static const char help[] =
    "usage: treeverify COMMAND [OPTIONS]\n"
    "\n"
    "  health    is the server alive, and ready to verify\n"
    "  verify    verify one draft tree given as JSON, without a session\n"
    "  generate  continue a text with an n-gram tree drafter\n"
    "  parity    compare the fast path with the naive oracle\n"
    "  bench     many synthetic drafters at a distance; percentiles of their rounds\n"
    "  top       what the server is doing, again and again\n"
    "\n"
    "Every command knows\n" TV_CLI_COMMON_HELP "\n"
    "treeverify --version says the version.\n"
    "\n"
    "exit codes:\n"
    "   0  done\n"
    "   1  answered, and the answer is no (not ready, parity mismatch)\n"
    "  64  wrong command line\n"
    "  66  a file cannot be read\n"
    "  69  the server was not reached, or did not answer in time\n"
    "  71  out of memory\n"
    "  74  the output cannot be written\n"
    "  75  busy, loading or draining: try again later\n"
    "  76  refused, an answer that breaks the contract, or a model whose tokens are not bytes\n";

int main(int argc, char **argv)
{
    static const struct {
        const char *name;
        int (*run)(int argc, char **argv);
    } commands[] = {
        {"health", tv_cli_health}, {"verify", tv_cli_verify}, {"generate", tv_cli_generate},
        {"parity", tv_cli_parity}, {"bench", tv_cli_bench},   {"top", tv_cli_top},
    };
    if (argc < 2) {
        (void)fputs(help, stderr);
        return TV_CLI_USAGE;
    }
    if (strcmp(argv[1], "--help") == 0 || strcmp(argv[1], "-h") == 0) {
        (void)fputs(help, stdout);
        return tv_cli_end(TV_CLI_OK);
    }
    if (strcmp(argv[1], "--version") == 0) {
        (void)printf("treeverify %s\n", tv_client_version());
        return tv_cli_end(TV_CLI_OK);
    }
    for (size_t i = 0; i < sizeof(commands) / sizeof(commands[0]); i++) {
        if (strcmp(argv[1], commands[i].name) == 0) {
            return tv_cli_end(commands[i].run(argc - 1, argv + 1));
        }
    }
    return tv_cli_usage("no command '%.32s'; see treeverify --help", argv[1]);
}
