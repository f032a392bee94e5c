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
    {"0", SERVED},         {"-0", SERVED},        {"1e-45", SERVED},
    {"1e-6", SERVED},      {"0.99e-4", SERVED},   {"0.99999999e-4", SERVED},
    {"1e-4", SERVED},      {"100", SERVED},       {"100.5", WRONG_VALUE},
    {"1e30", WRONG_VALUE}, {"-1", WRONG_VALUE},   {"1e400", WRONG_VALUE},
    {"null", WRONG_TYPE},  {"\"1\"", WRONG_TYPE},
};
#define GREEDY 6 /* the first so many are below 1e-4, one of them by less than a float can tell */

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

/* What a session with this sampling drew first, and the round after it: the next token, with its
 * log-probability. */
struct drawn {
    int32_t first, next;
    double logprob;
};

static void session_draw(struct fixture *fixture, const char *body, struct drawn *ret_drawn)
{
    char session[32], epoch[17], text[4096];
    struct tv_call *call = ask(fixture, TV_CALL_CREATE, "", "%s", body);
    assert_reply(call, 201);
    ret_drawn->first = (int32_t)reply_int(call, "pending");
    assert_in_range(ret_drawn->first, 0, VOCAB - 1);
    reply_text(call, "session", session, sizeof session);
    reply_text(call, "epoch", epoch, sizeof epoch);
    call_free(call);
    call = ask(fixture, TV_CALL_VERIFY, session,
               "{\"seq\":1,\"epoch\":\"%s\",\"expected_len\":8,\"tree\":{\"tokens\":[%d],"
               "\"parents\":[-1]},\"want\":{\"logprobs\":true}}",
               epoch, ret_drawn->first);
    assert_reply(call, 200);
    ret_drawn->next = (int32_t)reply_int(call, "pending");
    assert_in_range(ret_drawn->next, 0, VOCAB - 1);
    (void)snprintf(text, sizeof text, "%.*s", (int)call->reply.body.bytes, call->reply.body.data);
    const char *logprob = strstr(text, "\"logprobs\":[");
    assert_non_null(logprob);
    ret_drawn->logprob = strtod(logprob + strlen("\"logprobs\":["), NULL);
    call_free(call);
    expect(fixture, 204, TV_CALL_DELETE, session, NULL);
}

/* Below 1e-4 everything is what rule greedy does; with one survivor its probability is 1. */
static void served(struct fixture *fixture, const char *body, int greedy, int only_best,
                   const struct drawn *best)
{
    struct drawn drawn;
    session_draw(fixture, body, &drawn);
    if ((greedy || only_best) && (drawn.first != best->first || drawn.next != best->next)) {
        fail_msg("%s: tokens %d %d, the best are %d %d", body, drawn.first, drawn.next, best->first,
                 best->next);
    }
    if ((greedy && drawn.logprob != best->logprob) ||
        (!greedy && only_best && drawn.logprob != 0.0) || drawn.logprob > 0.0) {
        fail_msg("%s: log-probability %g, greedy's is %g", body, drawn.logprob, best->logprob);
    }
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
    int32_t combinations = 0;
    struct drawn best;
    session_draw(fixture, "{" PROMPT ",\"sampling\":{\"rule\":\"greedy\"}}", &best);
    assert_true(best.logprob < -0.01); /* so that temperatures can be told apart by it */
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
                    served(fixture, body, t < GREEDY, p == 1 || k == 1, &best);
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
