/*
 * parity.c - `treeverify parity`: shadow totals, and one comparison on demand.
 */
#include <stdlib.h>
#include <string.h>

#include "clients/cli/cli.h"
#include "proto/json_read.h"
#include "proto/limits.h"

static const char help[] =
    "usage: treeverify parity [--run [FILE]] [--url URL] [--json]\n"
    "\n"
    "Without --run: the totals of shadow mode, and its violations.\n"
    "  --run          run one body through the fast path and the oracle now and compare them;\n"
    "                 FILE (\"-\" is stdin) is a JSON body, for instance the reproducer of a\n"
    "                 violation; without FILE the server's own self-test case\n"
    "Exit code 1 when the paths disagree, or when the totals contain a violation.\n";

static int64_t member_int(const struct tv_json *doc, const struct tv_json_value *object,
                          const char *name)
{
    const struct tv_json_value *value = tv_json_member(object, name);
    int64_t number = 0;
    return value != NULL && tv_json_int(doc, value, &number) == 0 ? number : 0;
}

static double member_real(const struct tv_json *doc, const struct tv_json_value *object,
                          const char *name)
{
    const struct tv_json_value *value = tv_json_member(object, name);
    double number = 0.0;
    return value != NULL && tv_json_double(doc, value, &number) == 0 ? number : 0.0;
}

static const char *member_yes(const struct tv_json_value *object, const char *name)
{
    const struct tv_json_value *value = tv_json_member(object, name);
    return value != NULL && tv_json_type(value) == TV_JSON_TRUE ? "yes" : "no";
}

static void print_kernel(const struct tv_json *doc, const struct tv_json_value *kernel)
{
    (void)printf("kernel oracle: largest difference %.3g, relative l2 %.3g\n",
                 member_real(doc, kernel, "max_abs"), member_real(doc, kernel, "rel_l2"));
}

static int print_totals(const struct tv_client_answer *answer)
{
    const struct tv_json *doc = answer->doc;
    const struct tv_json_value *root = tv_json_root(doc);
    const struct tv_json_value *rounds = tv_json_member(root, "rounds");
    const char *mode = tv_json_string(tv_json_member(root, "mode"), NULL);
    long long violations = (long long)member_int(doc, rounds, "violation");
    (void)printf("shadow mode %s (share %.3g)\n", mode != NULL ? mode : "unknown",
                 member_real(doc, root, "p"));
    (void)printf("rounds: %lld exact, %lld near ties, %lld violations, %lld skipped\n",
                 (long long)member_int(doc, rounds, "exact"),
                 (long long)member_int(doc, rounds, "near_tie"), violations,
                 (long long)member_int(doc, rounds, "skipped"));
    print_kernel(doc, tv_json_member(root, "kernel"));
    const struct tv_json_value *item = tv_json_first(tv_json_member(root, "violations"));
    for (; item != NULL; item = tv_json_next(item)) {
        const char *kind = tv_json_string(tv_json_member(item, "kind"), NULL);
        long long n = (long long)member_int(doc, item, "n");
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
    const struct tv_json *doc = answer->doc;
    const struct tv_json_value *root = tv_json_root(doc);
    const struct tv_json_value *path = tv_json_member(root, "path");
    const char *oracle = tv_json_string(tv_json_member(root, "oracle"), NULL);
    int ok = strcmp(member_yes(root, "ok"), "yes") == 0;
    (void)printf("%s (oracle %s, %lld ms)\n", ok ? "the paths agree" : "THE PATHS DISAGREE",
                 oracle != NULL ? oracle : "unknown", (long long)member_int(doc, root, "took_ms"));
    print_kernel(doc, tv_json_member(root, "kernel"));
    (void)printf("path oracle: %lld rows, largest logit difference %.3g, equal argmax %lld, "
                 "near ties %lld\n",
                 (long long)member_int(doc, path, "rows"), member_real(doc, path, "logit_max_abs"),
                 (long long)member_int(doc, path, "argmax_equal"),
                 (long long)member_int(doc, path, "near_ties"));
    (void)printf("accepted nodes equal: %s, pending token equal: %s\n",
                 member_yes(root, "accepted_equal"), member_yes(root, "pending_equal"));
    return ok ? TV_CLI_OK : TV_CLI_NO;
}

/* The exit code an answer means, without printing it. */
static int judge(const struct tv_client_answer *answer, int run)
{
    const struct tv_json_value *root = tv_json_root(answer->doc);
    if (run) {
        return strcmp(member_yes(root, "ok"), "yes") == 0 ? TV_CLI_OK : TV_CLI_NO;
    }
    const struct tv_json_value *rounds = tv_json_member(root, "rounds");
    return member_int(answer->doc, rounds, "violation") == 0 ? TV_CLI_OK : TV_CLI_NO;
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
        code = tv_cli_read_file(argv[optind], TV_BODY_BYTES_LARGE_DEFAULT, &body, &body_bytes);
        if (code != TV_CLI_OK) {
            return code;
        }
    }
    code = ask(&cli, run, body, body_bytes);
    free(body);
    return code;
}
