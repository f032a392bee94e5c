/*
 * test_shadow_reproducers.c - planted faults are found, and each leaves a reproducer that replays.
 *
 * The oracles on right rounds are test_shadow.c's. Runs on bundled checkpoints with a poisoned
 * pool.
 */
#include <errno.h>
#include <math.h>
#include <setjmp.h>
#include <signal.h>
#include <spawn.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "shadow_fixture.h"

static uint64_t le64(const char *data)
{
    uint64_t value = 0;
    for (int i = 7; i >= 0; i--) {
        value = value << 8 | (uint8_t)data[i];
    }
    return value;
}

static void planted_faults_are_found(void **state)
{
    (void)state;
    static const enum fault faults[] = {FAULT_OUTPUT, FAULT_NAN, FAULT_LSE, FAULT_MASK, FAULT_PAGE};
    struct bench bench;
    struct tv_parity_violation violations[32];
    bench_open(&bench, "v3", 16, 1.0, QUEUE_BYTES, 1);
    for (int32_t f = 0; f < 5; f++) {
        struct tv_shadow_block block = judged(&bench, faults[f], 0);
        assert_int_equal(block.ran, 1);
        print_message("fault %d: rel_l2 %.2e, max_abs %.2e\n", (int)faults[f], block.kernel.rel_l2,
                      block.kernel.max_abs);
        assert_true(block.kernel.rel_l2 > 2e-6 || faults[f] == FAULT_LSE);
        struct tv_parity_totals totals = totals_of(&bench, violations);
        assert_int_equal(totals.violation, f + 1);
        assert_int_equal(totals.exact, 0);
        assert_int_equal(totals.violation_count, f + 1);
        assert_string_equal(violations[f].kind, "kernel");
        const char *kind = NULL;
        char *data = NULL;
        size_t bytes = 0;
        assert_int_equal(tv_shadow_reproducer(bench.shadow, violations[f].n, &kind, &data, &bytes),
                         0);
        assert_string_equal(kind, "kernel");
        assert_true(bytes > 8 && le64(data) < bytes && le64(data) % 8 == 0);
        data[8 + le64(data) - 1] = '\0';
        assert_non_null(strstr(data + 8, "\"kind\":\"verify_attn\""));
        assert_non_null(strstr(data + 8, "\"out_fast\""));
        assert_non_null(
            strstr(data + 8, layer_of(faults[f]) == 0 ? "\"layer\":\"0\"" : "\"layer\":\"1\""));
        free(data);
    }
    bench_close(&bench);
}

/* Run a program to its end; its exit status. */
static int program_run(const char *program, const char *bundle, const char *option)
{
    pid_t child = 0;
    int status = 0;
    char *argv[] = {strdup(program), strdup(bundle), option != NULL ? strdup(option) : NULL, NULL};
    assert_int_equal(posix_spawn(&child, program, NULL, NULL, argv, environ), 0);
    assert_true(waitpid(child, &status, 0) == child);
    for (int i = 0; argv[i] != NULL; i++) {
        free(argv[i]);
    }
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

/* A kernel reproducer is a bundle that test_verify_attn replays: both kernels are right on it. */
static void reproducer_replays(void **state)
{
    (void)state;
    static const char *const modes[] = {NULL, "--flash"};
    const char *program = getenv("TV_VERIFY_ATTN");
    struct bench bench;
    assert_true(program != NULL && access(program, X_OK) == 0);
    bench_open(&bench, "v3", 16, 0.0, QUEUE_BYTES, 1);
    (void)judged(&bench, FAULT_OUTPUT, 0);
    char bundle[200];
    (void)snprintf(bundle, sizeof bundle, "%s/violation-00000001.kdtr", bench.dir);
    for (int m = 0; m < 2; m++) {
        assert_int_equal(program_run(program, bundle, modes[m]), 0);
    }
    bench_close(&bench);
}

/* A wrong token behind right kernels: the redraw finds it; the path oracle finds it on demand. */
static void wrong_tokens_are_found(void **state)
{
    (void)state;
    struct bench bench;
    struct tv_parity_violation violations[32];
    struct planted planted = {.fault = FAULT_NONE};
    struct tv_round_out out;
    struct tv_parity_report report = {0};
    const char *kind = NULL;
    char *data = NULL;
    size_t bytes = 0;
    bench_open(&bench, "v3", 64, 0.0, QUEUE_BYTES, 1);
    struct tv_shadow_block block = judged(&bench, FAULT_NONE, 1);
    assert_int_equal(block.ran, 1);
    assert_int_equal(block.tokens_equal, 0);
    assert_int_equal(totals_of(&bench, violations).violation, 1);
    assert_string_equal(violations[0].kind, "path");
    assert_int_equal(tv_shadow_reproducer(bench.shadow, violations[0].n, &kind, &data, &bytes), 0);
    struct tv_request request;
    struct tv_problem problem;
    struct tv_request_limits limits = {
        .tree = {.nodes_max = 256, .depth_max = 64, .vocab = bench.fixture.engine->vocab},
        .max_len = bench.fixture.engine->max_len,
        .inline_bytes = 1 << 20};
    /* the reproducer is a body that the contract takes, and says the same round */
    if (tv_request_decode(TV_CALL_PARITY, data, bytes, &limits, &request, &problem) != 0) {
        fail_msg("%s at %s in %.*s", problem.detail, problem.pointer, (int)bytes, data);
    }
    assert_int_equal(request.token_count, PREFIX_LEN);
    assert_memory_equal(request.tokens, bench.prefix, sizeof bench.prefix);
    assert_int_equal(request.tree.count, bench.tree.count);
    assert_memory_equal(request.tree.tokens, bench.tree.tokens, 33 * sizeof(int32_t));
    assert_memory_equal(request.tree.parents, bench.tree.parents, 33 * sizeof(int32_t));
    assert_true((float)request.sampling.temperature == bench.rule.sampling.temperature);
    assert_true(request.sampling.seed == bench.rule.sampling.seed);
    tv_request_finish(&request);
    free(data);

    round_run(&bench, &planted, &out);
    size_t floats = 33 * (size_t)bench.fixture.engine->vocab;
    float *logits = malloc(floats * sizeof *logits);
    assert_non_null(logits);
    memcpy(logits, out.logits, floats * sizeof *logits);
    struct tv_parity_case parity_case = case_of(&bench, &out, NULL);
    parity_case.logits = logits;
    parity_case.pending = (out.end.token + 1) % bench.fixture.engine->vocab;
    assert_int_equal(tv_shadow_path_compare(bench.shadow, &parity_case, &report), 0);
    assert_int_equal(report.ok, 0);
    assert_int_equal(report.pending_equal, 0);
    assert_int_equal(report.accepted_equal, 1);
    parity_case.pending = out.end.token;
    logits[floats - 5] += 0.01f; /* one logit of the last node */
    assert_int_equal(tv_shadow_path_compare(bench.shadow, &parity_case, &report), 0);
    assert_int_equal(report.ok, 0);
    assert_true(report.logit_max_abs > 0.009);
    assert_int_equal(report.pending_equal, 1);
    logits[floats - 5] = NAN;
    assert_int_equal(tv_shadow_path_compare(bench.shadow, &parity_case, &report), 0);
    assert_int_equal(report.ok, 0);
    assert_int_equal(totals_of(&bench, violations).violation, 4);
    free(logits);
    bench_close(&bench);
}

static void newest_reproducers_are_kept(void **state)
{
    (void)state;
    struct bench bench;
    struct tv_parity_violation violations[32];
    const char *kind = NULL;
    char *data = NULL;
    size_t bytes = 0;
    bench_open(&bench, "v3", 64, 0.0, QUEUE_BYTES, 1);
    for (int32_t i = 0; i < 35; i++) {
        (void)judged(&bench, i == 30 ? FAULT_OUTPUT : FAULT_NONE, 1);
    }
    struct tv_parity_totals totals = totals_of(&bench, violations);
    assert_int_equal(totals.violation, 35);
    assert_int_equal(totals.violation_count, 32);
    assert_int_equal(violations[0].n, 4);
    assert_int_equal(violations[31].n, 35);
    assert_string_equal(violations[27].kind, "kernel");
    assert_int_equal(tv_shadow_reproducer(bench.shadow, 3, &kind, &data, &bytes), -ENOENT);
    assert_int_equal(tv_shadow_reproducer(bench.shadow, 4, &kind, &data, &bytes), 0);
    free(data);
    /* a new process goes on numbering, and still serves the old files */
    struct tv_shadow_params params = {.queue_bytes_max = QUEUE_BYTES, .state_dir = bench.dir};
    tv_shadow_destroy(bench.shadow);
    assert_int_equal(tv_shadow_create(&params, bench.fixture.base.model, bench.fixture.base.cache,
                                      &bench.shadow),
                     0);
    assert_int_equal(totals_of(&bench, violations).violation_count, 32);
    (void)judged(&bench, FAULT_NONE, 1);
    totals = totals_of(&bench, violations);
    assert_int_equal(totals.violation_count, 32);
    assert_int_equal(violations[31].n, 36);
    assert_int_equal(violations[0].n, 5);
    assert_int_equal(tv_shadow_reproducer(bench.shadow, 31, &kind, &data, &bytes), 0);
    assert_string_equal(kind, "kernel");
    free(data);
    bench_close(&bench);
}

/* A disk that takes nothing: the violation is counted and listed, and nothing else happens. */
static void full_disk_is_harmless(void **state)
{
    (void)state;
    struct bench bench;
    struct tv_parity_violation violations[32];
    const char *kind = NULL;
    char *data = NULL;
    size_t bytes = 0;
    struct rlimit before, none;
    bench_open(&bench, "v3", 64, 0.0, QUEUE_BYTES, 1);
    assert_int_equal(getrlimit(RLIMIT_FSIZE, &before), 0);
    none = (struct rlimit){.rlim_cur = 64, .rlim_max = before.rlim_max};
    (void)signal(SIGXFSZ, SIG_IGN); /* write then fails, as on a full disk */
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &none), 0);
    struct tv_shadow_block block = judged(&bench, FAULT_OUTPUT, 0);
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &before), 0);
    assert_int_equal(block.ran, 1);
    struct tv_parity_totals totals = totals_of(&bench, violations);
    assert_int_equal(totals.violation, 1);
    assert_int_equal(totals.violation_count, 1);
    assert_int_equal(tv_shadow_reproducer(bench.shadow, violations[0].n, &kind, &data, &bytes),
                     -ENOENT);
    assert_int_equal(rmdir(bench.dir), 0); /* not even a temporary file is left */
    (void)judged(&bench, FAULT_OUTPUT, 0); /* and without the directory */
    assert_int_equal(totals_of(&bench, violations).violation, 2);
    assert_int_equal(mkdir(bench.dir, S_IRWXU), 0);
    bench_close(&bench);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(planted_faults_are_found), cmocka_unit_test(reproducer_replays),
        cmocka_unit_test(wrong_tokens_are_found),   cmocka_unit_test(newest_reproducers_are_kept),
        cmocka_unit_test(full_disk_is_harmless),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
