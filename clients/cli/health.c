/*
 * health.c - `treeverify health`: alive, ready, and which model.
 */
#include <string.h>

#include "clients/cli/cli.h"

static const char help[] =
    "usage: treeverify health [OPTIONS]\n"
    "\n"
    "Asks /healthz and /readyz, and prints the checks and, unless that needs a key that it has "
    "not,\nthe model. Exit code 0 only when ready.\n"
    "\n"
    "  --deep            the server repeats its self-test verify and compares the logits bit for "
    "bit\n" TV_CLI_COMMON_HELP;

static void print_checks(const struct tv_client_value *root)
{
    const struct tv_client_value *check =
        tv_client_value_first(tv_client_value_member(root, "checks"));
    for (; check != NULL; check = tv_client_value_next(check)) {
        const char *name = tv_client_value_text(tv_client_value_member(check, "name"));
        const char *detail = tv_client_value_text(tv_client_value_member(check, "detail"));
        const struct tv_client_value *ok = tv_client_value_member(check, "ok");
        if (name == NULL || ok == NULL) {
            continue;
        }
        (void)printf("  %-4s ", tv_client_value_type(ok) == TV_CLIENT_TRUE ? "ok" : "no");
        tv_cli_print_safe(stdout, name);
        if (detail != NULL && detail[0] != '\0') {
            (void)fputs(": ", stdout);
            tv_cli_print_safe(stdout, detail);
        }
        (void)fputc('\n', stdout);
    }
}

static int run(const struct tv_cli *cli, struct tv_client *client, int deep)
{
    struct tv_client_answer alive = {0};
    struct tv_client_answer ready = {0};
    struct tv_client_problem problem;
    struct tv_client_model model = {0};
    int code;
    int error = tv_client_health(client, &alive, &problem);
    if (error == 0) {
        error = tv_client_ready(client, deep, &ready, &problem);
    }
    if (error != 0) {
        code = tv_cli_fail(cli, error, &problem);
        goto out;
    }
    const struct tv_client_value *root = tv_client_answer_root(&ready);
    const struct tv_client_value *flag = tv_client_value_member(root, "ready");
    int is_ready = ready.http_status == 200 && tv_client_value_type(flag) == TV_CLIENT_TRUE;
    code = is_ready ? TV_CLI_OK : TV_CLI_NO;
    if (cli->json) {
        (void)printf("%s\n", ready.text != NULL ? ready.text : "null");
        goto out;
    }
    (void)printf("%s: alive, %s\n", cli->url, is_ready ? "ready" : "not ready");
    print_checks(root);
    if (is_ready) {
        error = tv_client_model(client, &model, &problem);
        if (error != 0 && problem.http_status == 401 && cli->key_file == NULL) {
            (void)puts("model: told to those who have a key"); /* a probe of a container has none */
            goto out;
        }
        if (error != 0) {
            code = tv_cli_fail(cli, error, &problem);
            goto out;
        }
        (void)printf("model %s (%s) on %s, vocabulary %d, context %d, trees of up to %d nodes\n",
                     model.name, model.architecture, model.backend, (int)model.vocab,
                     (int)model.max_len, (int)model.max_nodes);
    }
out:
    tv_client_answer_finish(&alive);
    tv_client_answer_finish(&ready);
    return code;
}

int tv_cli_health(int argc, char **argv)
{
    struct tv_cli cli;
    int deep;
    int code = tv_cli_options(&cli, argc, argv, "deep", &deep, help);
    if (code >= 0) {
        return code;
    }
    if (optind != argc) {
        return tv_cli_usage("health takes no argument");
    }
    struct tv_client *client = NULL;
    code = tv_cli_connect(&cli, &client);
    if (code == TV_CLI_OK) {
        code = run(&cli, client, deep);
    }
    tv_client_destroy(client);
    return code;
}
