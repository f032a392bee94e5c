/*
 * verify.c - `treeverify verify`: one tree, one answer, no session.
 */
#include <stdlib.h>

#include "clients/cli/cli.h"

static const char help[] =
    "usage: treeverify verify [OPTIONS] FILE\n"
    "\n"
    "Posts FILE (\"-\" is stdin) to /v1/verify. FILE is the JSON body: \"tokens\" (the prefix),\n"
    "\"tree\" {\"tokens\", \"parents\"}, and optionally \"sampling\" and \"want\".\n"
    "\n"
    "  --bytes           also print the new tokens as text (models whose token ids are "
    "bytes)\n" TV_CLI_COMMON_HELP "\n"
    "--json prints the server's answer as it came.\n";

static int print_answer(const struct tv_client_answer *answer, int bytes)
{
    const struct tv_client_value *root = tv_client_answer_root(answer);
    const struct tv_client_value *accepted = tv_client_value_member(root, "accepted");
    const char *rule = tv_client_value_text(tv_client_value_member(root, "rule"));
    int32_t *nodes = NULL;
    int32_t *tokens = NULL;
    int32_t node_count = 0;
    int32_t token_count = 0;
    int code = TV_CLI_REFUSED;
    if (tv_client_value_ints(answer, tv_client_value_member(accepted, "nodes"), &nodes,
                             &node_count) != 0 ||
        tv_client_value_ints(answer, tv_client_value_member(root, "new_tokens"), &tokens,
                             &token_count) != 0 ||
        token_count < 1) {
        (void)fputs("treeverify: the server's answer does not follow the contract\n", stderr);
        goto out;
    }
    (void)fputs("accepted nodes  ", stdout);
    tv_cli_print_json_ints(stdout, nodes, (size_t)node_count);
    (void)fputs("\nnew tokens      ", stdout);
    tv_cli_print_json_ints(stdout, tokens, (size_t)token_count);
    (void)fputs(" (the last one is the model's own)\n", stdout);
    if (bytes) {
        (void)fputs("as text         ", stdout);
        for (int32_t i = 0; i < token_count; i++) {
            tv_cli_print_byte_token(stdout, tokens[i]);
        }
        (void)fputc('\n', stdout);
    }
    (void)printf("rule            %s\n", rule != NULL ? rule : "unknown");
    code = TV_CLI_OK;
out:
    free(nodes);
    free(tokens);
    return code;
}

int tv_cli_verify(int argc, char **argv)
{
    struct tv_cli cli;
    int bytes;
    int code = tv_cli_options(&cli, argc, argv, "bytes", &bytes, help);
    if (code >= 0) {
        return code;
    }
    if (argc - optind != 1) {
        return tv_cli_usage("verify takes one FILE");
    }
    char *body = NULL;
    size_t body_bytes = 0;
    struct tv_client *client = NULL;
    struct tv_client_answer answer = {0};
    struct tv_client_problem problem;
    code = tv_cli_read_file(argv[optind], TV_CLIENT_BODY_BYTES_MAX, &body, &body_bytes);
    if (code == TV_CLI_OK) {
        code = tv_cli_connect(&cli, &client);
    }
    if (code != TV_CLI_OK) {
        goto out;
    }
    int error = tv_client_oneshot(client, body, body_bytes, &answer, &problem);
    if (error != 0) {
        code = tv_cli_fail(&cli, error, &problem);
    } else if (cli.json) {
        (void)printf("%s\n", answer.text);
    } else {
        code = print_answer(&answer, bytes);
    }
out:
    free(body);
    tv_client_answer_finish(&answer);
    tv_client_destroy(client);
    return code;
}
