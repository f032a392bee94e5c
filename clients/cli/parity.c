/*
 * parity.c - `treeverify parity`: shadow totals, and one comparison on demand.
 */
#include <stdlib.h>
#include <string.h>

#include "clients/cli/cli.h"

static const char help[] =
    "usage: treeverify parity [OPTIONS] [FILE]\n"
    "\n"
    "Without --run: the totals of shadow mode, and its violations.\n"
    "\n"
    "  --run             run one body through the fast path and the oracle now and compare them;\n"
    "                    FILE (\"-\" is stdin) is a JSON body, for instance the reproducer of a\n"
    "                    violation; without FILE the server's own self-test "
    "case\n" TV_CLI_COMMON_HELP "\n"
    "Exit code 1 when the paths disagree, or when the totals contain a violation.\n";

static int64_t member_int(const struct tv_client_answer *answer,
                          const struct tv_client_value *object, const char *name)
{
    const struct tv_client_value *value = tv_client_value_member(object, name);
    int64_t number = 0;
    return tv_client_value_int(answer, value, &number) == 0 ? number : 0;
}

static double member_real(const struct tv_client_answer *answer,
                          const struct tv_client_value *object, const char *name)
{
    const struct tv_client_value *value = tv_client_value_member(object, name);
    double number = 0.0;
    return tv_client_value_real(answer, value, &number) == 0 ? number : 0.0;
}

static const char *member_yes(const struct tv_client_value *object, const char *name)
{
    const struct tv_client_value *value = tv_client_value_member(object, name);
    return tv_client_value_type(value) == TV_CLIENT_TRUE ? "yes" : "no";
}

static void print_kernel(const struct tv_client_answer *answer,
                         const struct tv_client_value *kernel)
{
    (void)printf("kernel oracle: largest difference %.3g, relative l2 %.3g\n",
                 member_real(answer, kernel, "max_abs"), member_real(answer, kernel, "rel_l2"));
}

static int print_totals(const struct tv_client_answer *answer)
{
    const struct tv_client_value *root = tv_client_answer_root(answer);
    const struct tv_client_value *rounds = tv_client_value_member(root, "rounds");
    const char *mode = tv_client_value_text(tv_client_value_member(root, "mode"));
    long long violations = (long long)member_int(answer, rounds, "violation");
    (void)printf("shadow mode %s (share %.3g)\n", mode != NULL ? mode : "unknown",
                 member_real(answer, root, "p"));
    (void)printf("rounds: %lld exact, %lld near ties, %lld violations, %lld skipped\n",
                 (long long)member_int(answer, rounds, "exact"),
                 (long long)member_int(answer, rounds, "near_tie"), violations,
                 (long long)member_int(answer, rounds, "skipped"));
    print_kernel(answer, tv_client_value_member(root, "kernel"));
    const struct tv_client_value *item =
        tv_client_value_first(tv_client_value_member(root, "violations"));
    for (; item != NULL; item = tv_client_value_next(item)) {
        const char *kind = tv_client_value_text(tv_client_value_member(item, "kind"));
        long long n = (long long)member_int(answer, item, "n");
        (void)printf("violation %lld: %s (", n, kind != NULL ? kind : "unknown");
        if (strcmp(member_yes(item, "reproducer"), "yes") == 0) {
            (void)printf("GET /v1/parity/violations/%lld)\n", n);
        } else {
            (void)printf("no reproducer was kept: see --state-dir of treeverifyd)\n");
        }
    }
    return violations == 0 ? TV_CLI_OK : TV_CLI_NO;
}

static int print_report(const struct tv_client_answer *answer)
{
    const struct tv_client_value *root = tv_client_answer_root(answer);
    const struct tv_client_value *path = tv_client_value_member(root, "path");
    const char *oracle = tv_client_value_text(tv_client_value_member(root, "oracle"));
    int ok = strcmp(member_yes(root, "ok"), "yes") == 0;
    (void)printf("%s (oracle %s, %lld ms)\n", ok ? "the paths agree" : "THE PATHS DISAGREE",
                 oracle != NULL ? oracle : "unknown",
                 (long long)member_int(answer, root, "took_ms"));
    print_kernel(answer, tv_client_value_member(root, "kernel"));
    (void)printf("path oracle: %lld rows, largest logit difference %.3g, equal argmax %lld, "
                 "near ties %lld\n",
                 (long long)member_int(answer, path, "rows"),
                 member_real(answer, path, "logit_max_abs"),
                 (long long)member_int(answer, path, "argmax_equal"),
                 (long long)member_int(answer, path, "near_ties"));
    (void)printf("accepted nodes equal: %s, pending token equal: %s\n",
                 member_yes(root, "accepted_equal"), member_yes(root, "pending_equal"));
    return ok ? TV_CLI_OK : TV_CLI_NO;
}

/* The exit code an answer means, without printing it. */
static int judge(const struct tv_client_answer *answer, int run)
{
    const struct tv_client_value *root = tv_client_answer_root(answer);
    if (run) {
        return strcmp(member_yes(root, "ok"), "yes") == 0 ? TV_CLI_OK : TV_CLI_NO;
    }
    const struct tv_client_value *rounds = tv_client_value_member(root, "rounds");
    return member_int(answer, rounds, "violation") == 0 ? TV_CLI_OK : TV_CLI_NO;
}

static int ask(const struct tv_cli *cli, int run, const char *body, size_t body_bytes)
{
    struct tv_client *client = NULL;
    struct tv_client_answer answer = {0};
    struct tv_client_problem problem;
    int code = tv_cli_connect(cli, &client);
    if (code != TV_CLI_OK) {
        return code;
    }
    int error = run ? tv_client_parity_run(client, body, body_bytes, &answer, &problem)
                    : tv_client_parity_totals(client, &answer, &problem);
    if (error != 0) {
        code = tv_cli_fail(cli, error, &problem);
    } else if (answer.doc == NULL) {
        (void)fprintf(stderr, "treeverify: answer %d without a body\n", (int)answer.http_status);
        code = TV_CLI_REFUSED;
    } else if (cli->json) {
        (void)printf("%s\n", answer.text);
        code = judge(&answer, run);
    } else {
        code = run ? print_report(&answer) : print_totals(&answer);
    }
    tv_client_answer_finish(&answer);
    tv_client_destroy(client);
    return code;
}

int tv_cli_parity(int argc, char **argv)
{
    struct tv_cli cli;
    int run;
    int code = tv_cli_options(&cli, argc, argv, "run", &run, help);
    if (code >= 0) {
        return code;
    }
    if (argc - optind > 1 || (argc - optind == 1 && !run)) {
        return tv_cli_usage("parity takes one FILE, after --run");
    }
    char *body = NULL;
    size_t body_bytes = 0;
    if (optind < argc) {
        code = tv_cli_read_file(argv[optind], TV_CLIENT_BODY_BYTES_MAX, &body, &body_bytes);
        if (code != TV_CLI_OK) {
            return code;
        }
    }
    code = ask(&cli, run, body, body_bytes);
    free(body);
    return code;
}
