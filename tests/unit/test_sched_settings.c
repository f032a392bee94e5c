/*
 * test_sched_settings.c - odd sampling settings through the scheduler and the real engine (B22).
 *
 * Every combination is either served with a valid token, as documented, or refused by field; a
 * session that decodes between any two of them never notices.
 */
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "sched_real_fixture.h"

#define VOCAB  307
#define PROMPT "\"tokens\":[5,6,7,8,9,10,11,12]"

enum verdict { SERVED, WRONG_VALUE, WRONG_TYPE };

struct setting {
    const char *json;
    enum verdict verdict;
};

static const struct setting temperatures[] = {
    {"0", SERVED},         {"-0", SERVED},      {"1e-45", SERVED},      {"1e-6", SERVED},
    {"0.99e-4", SERVED},   {"1e-4", SERVED},    {"100", SERVED},        {"100.5", WRONG_VALUE},
    {"1e30", WRONG_VALUE}, {"-1", WRONG_VALUE}, {"1e400", WRONG_VALUE}, {"null", WRONG_TYPE},
    {"\"1\"", WRONG_TYPE},
};
#define GREEDY 5 /* the first so many are below 1e-4 */

static const struct setting top_ps[] = {{"0", WRONG_VALUE},
                                        {"1e-9", SERVED},
                                        {"1", SERVED},
                                        {"1.0000001", WRONG_VALUE},
                                        {"-1", WRONG_VALUE}};

static const struct setting top_ks[] = {{"0", SERVED},
                                        {"1", SERVED},
                                        {"307", SERVED},
                                        {"308", WRONG_VALUE},
                                        {"2147483648", WRONG_VALUE},
                                        {"-1", WRONG_VALUE}};

/* A session that decodes one token at a time. */
struct canary {
    char session[32], epoch[17];
    int32_t seq, len, count, tokens[256];
};

static void canary_open(struct fixture *fixture, struct canary *canary)
{
    memset(canary, 0, sizeof *canary);
    struct tv_call *call = ask(fixture, TV_CALL_CREATE, "",
                               "{" PROMPT ",\"sampling\":{\"temperature\":0.9,\"seed\":\"77\"}}");
    assert_reply(call, 201);
    reply_text(call, "session", canary->session, sizeof canary->session);
    reply_text(call, "epoch", canary->epoch, sizeof canary->epoch);
    canary->seq = 1;
    canary->len = 8;
    call_free(call);
}

static void canary_step(struct fixture *fixture, struct canary *canary)
{
    struct tv_call *call = ask(fixture, TV_CALL_DECODE, canary->session,
                               "{\"seq\":%d,\"epoch\":\"%s\",\"expected_len\":%d,\"max_tokens\":1}",
                               canary->seq++, canary->epoch, canary->len++);
    assert_reply(call, 200);
    assert_int_equal(reply_ints(call, "new_tokens", &canary->tokens[canary->count], 1), 1);
    canary->count++;
    call_free(call);
}

/* The first token of a greedy session with this prompt. */
static int32_t greedy_token(struct fixture *fixture)
{
    char session[32];
    struct tv_call *call =
        ask(fixture, TV_CALL_CREATE, "", "{" PROMPT ",\"sampling\":{\"rule\":\"greedy\"}}");
    int32_t token = (int32_t)reply_int(call, "pending");
    reply_text(call, "session", session, sizeof session);
    call_free(call);
    expect(fixture, 204, TV_CALL_DELETE, session, NULL);
    return token;
}

static void served(struct fixture *fixture, const char *body, int only_best, int32_t best)
{
    char session[32], epoch[17];
    struct tv_call *call = ask(fixture, TV_CALL_CREATE, "", "%s", body);
    assert_reply(call, 201);
    int32_t token = (int32_t)reply_int(call, "pending");
    assert_in_range(token, 0, VOCAB - 1);
    if (only_best && token != best) {
        fail_msg("%s: token %d, the best is %d", body, token, best);
    }
    reply_text(call, "session", session, sizeof session);
    reply_text(call, "epoch", epoch, sizeof epoch);
    call_free(call);
    call = ask(fixture, TV_CALL_VERIFY, session,
               "{\"seq\":1,\"epoch\":\"%s\",\"expected_len\":8,\"tree\":{\"tokens\":[%d,1,2],"
               "\"parents\":[-1,0,0]},\"want\":{\"logprobs\":true}}",
               epoch, token);
    assert_reply(call, 200);
    assert_in_range(reply_int(call, "pending"), 0, VOCAB - 1);
    call_free(call);
    expect(fixture, 204, TV_CALL_DELETE, session, NULL);
}

static void refused(struct fixture *fixture, const char *body, const char *pointer,
                    enum verdict verdict)
{
    struct tv_request request;
    struct tv_problem problem = {0};
    assert_int_equal(tv_request_decode(TV_CALL_CREATE, body, strlen(body),
                                       tv_sched_limits(fixture->sched), &request, &problem),
                     -EINVAL);
    if (problem.code != (verdict == WRONG_TYPE ? TV_WRONG_TYPE : TV_WRONG_VALUE) ||
        (pointer != NULL && strcmp(problem.pointer, pointer) != 0)) {
        fail_msg("%s: %s %s", body, tv_code_info(problem.code)->name, problem.pointer);
    }
    tv_problem_finish(&problem);
}

/* The verdict over three fields; *ret_pointer is the one field that is wrong, or NULL. */
static enum verdict verdict_of(const struct setting *const *settings, const char **ret_pointer)
{
    static const char *const pointers[] = {"/sampling/temperature", "/sampling/top_p",
                                           "/sampling/top_k"};
    enum verdict verdict = SERVED;
    int wrong = 0;
    *ret_pointer = NULL;
    for (int i = 0; i < 3; i++) {
        if (settings[i]->verdict == SERVED) {
            continue;
        }
        *ret_pointer = wrong++ == 0 ? pointers[i] : NULL;
        verdict = settings[i]->verdict > verdict ? settings[i]->verdict : verdict;
    }
    return verdict;
}

static void b22_odd_settings_are_served_or_refused(void **state)
{
    struct fixture *fixture = *state;
    struct canary alone, beside;
    int32_t best = greedy_token(fixture), combinations = 0;
    canary_open(fixture, &beside);
    for (size_t t = 0; t < sizeof temperatures / sizeof temperatures[0]; t++) {
        for (size_t p = 0; p < sizeof top_ps / sizeof top_ps[0]; p++) {
            for (size_t k = 0; k < sizeof top_ks / sizeof top_ks[0]; k++) {
                const struct setting *const settings[] = {&temperatures[t], &top_ps[p], &top_ks[k]};
                const char *pointer = NULL;
                enum verdict verdict = verdict_of(settings, &pointer);
                char body[256];
                (void)snprintf(body, sizeof body,
                               "{" PROMPT ",\"sampling\":{\"temperature\":%s,\"top_p\":%s,"
                               "\"top_k\":%s,\"seed\":\"3\"}}",
                               settings[0]->json, settings[1]->json, settings[2]->json);
                if (verdict == SERVED) {
                    int only_best = t < GREEDY || p == 1 || k == 1;
                    served(fixture, body, only_best, best);
                } else {
                    refused(fixture, body, pointer, verdict);
                }
                if (combinations++ % 2 == 0) {
                    canary_step(fixture, &beside);
                }
            }
        }
    }
    assert_int_equal(fixture->sched->table.count, 1);
    canary_open(fixture, &alone);
    while (alone.count < beside.count) {
        canary_step(fixture, &alone);
    }
    assert_memory_equal(alone.tokens, beside.tokens, sizeof alone.tokens);
    print_message("%d combinations, %d tokens beside them\n", combinations, beside.count);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(b22_odd_settings_are_served_or_refused, real_setup,
                                        real_teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
