/*
 * test_client_faults.c - the client library's calls while its n-th allocation fails.
 *
 * The server is a thread that answers by method and path. A failed call is -ENOMEM with a text, its
 * outputs and the session untouched and no block left; the same call then succeeds. (libcurl has an
 * allocator of its own, which does not fail here.)
 */
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cmocka.h>

#include "clients/c/treeverify-client.h"
#include "faults.h"

#define REQUEST_BYTES 8192
#define ZEROS         "0000000000000000000000000000000000000000000000000000000000000000"
#define ID            "/v1/sessions/s_BBBBBBBBBBBBBBBBBBBBBB"
/* digests under a model_id of zeros, computed elsewhere (Python's hashlib) */
#define MOVED(digest) "\"seq\":1,\"pending\":77,\"digest\":\"" digest "\",\"next_seq\":2"

static const struct {
    const char *request, *has; /* how it begins, what is in it */
    const char *status, *body;
} answers[] = {
    {"GET /v1/model ", "", "200 OK",
     "{\"name\":\"m\",\"model_id\":\"" ZEROS "\",\"vocab\":307,\"max_len\":4096,"
     "\"limits\":{\"max_nodes\":64,\"max_depth\":16}}"},
    {"GET /healthz ", "", "200 OK", "{\"status\":\"ok\"}"},
    {"GET /metrics ", "", "200 OK", "treeverify_sessions 1\n"},
    {"POST /v1/sessions ", "", "201 Created",
     "{\"session\":\"s_BBBBBBBBBBBBBBBBBBBBBB\",\"epoch\":\"0123456789abcdef\",\"next_seq\":1,"
     "\"committed_len\":3,\"digest\":\"f713afc22b399b0f475f8aac35bf8c13\",\"pending\":5,"
     "\"cached_len\":0,\"finish\":null,\"sampling\":{\"rule\":\"target_walk\",\"seed\":\"5\"},"
     "\"limits\":{\"max_nodes\":64,\"max_depth\":16}}"},
    {"POST " ID "/fork ", "", "201 Created",
     "{\"session\":\"s_CCCCCCCCCCCCCCCCCCCCCC\",\"epoch\":\"0123456789abcdef\",\"next_seq\":1,"
     "\"committed_len\":3,\"digest\":\"f713afc22b399b0f475f8aac35bf8c13\",\"pending\":5,"
     "\"cached_len\":3,\"finish\":null,\"sampling\":{\"rule\":\"target_walk\",\"seed\":\"5\"},"
     "\"limits\":{\"max_nodes\":64,\"max_depth\":16}}"},
    {"POST " ID "/verify ", "\"commit\":\"hold\"", "200 OK",
     "{\"status\":\"held\",\"accepted\":{\"nodes\":[0,2],\"tokens\":[5,11]},\"new_tokens\":[11,77],"
     "\"committed_len\":3," MOVED(
         "f713afc22b399b0f475f8aac35bf8c13") ",\"finish\":null,"
                                             "\"logits\":{\"rows\":[0,2],\"shape\":[2,2],\"dtype\":"
                                             "\"f32\","
                                             "\"data_b64\":\"AACAPwAAAEAAAEBAAACAQA==\"}}"},
    {"POST " ID "/verify ", "", "200 OK",
     "{\"accepted\":{\"nodes\":[0,2,3],\"tokens\":[5,11,12]},\"new_tokens\":[11,12,77],"
     "\"committed_len\":6," MOVED("fee1cd74d37fc4c608c85f6959d4c460") ",\"finish\":null}"},
    {"POST " ID "/decode ", "\"max_tokens\":9", "409 Conflict",
     "{\"code\":\"seq-gap\",\"detail\":\"d\",\"retryable\":false,\"committed\":false,"
     "\"session_state\":{\"session\":\"s_BBBBBBBBBBBBBBBBBBBBBB\",\"epoch\":\"0123456789abcdef\","
     "\"next_seq\":2,\"committed_len\":5,\"pending\":21,\"finish\":null,"
     "\"digest\":\"a85a40e6dc3dc665f671315a6fcb424f\",\"tail\":[5,20],\"tail_from\":3}}"},
    {"POST " ID "/decode ", "", "200 OK",
     "{\"new_tokens\":[1,2,77],\"committed_len\":6," MOVED(
         "74bbbbadf21fe550afa330095468c176") ",\"finish\":null}"},
    {"POST " ID "/extend ", "", "200 OK",
     "{\"new_tokens\":[77],\"committed_len\":6," MOVED(
         "f54b8472cac1cf71c0582dcae9713012") ",\"finish\":null}"},
    /* somebody else has moved the session: two tokens more */
    {"POST " ID "/rollback ", "", "409 Conflict",
     "{\"code\":\"seq-gap\",\"detail\":\"d\",\"retryable\":false,\"committed\":false,"
     "\"session_state\":{\"session\":\"s_BBBBBBBBBBBBBBBBBBBBBB\",\"epoch\":\"0123456789abcdef\","
     "\"next_seq\":2,\"committed_len\":5,\"pending\":21,\"finish\":null,"
     "\"digest\":\"a85a40e6dc3dc665f671315a6fcb424f\",\"tail\":[5,20],\"tail_from\":3}}"},
    {"DELETE " ID " ", "", "204 No Content", ""},
};

#define ANSWERS (sizeof answers / sizeof answers[0])

static int listener;
static char url[64];
static pthread_t thread;

/* One request with its body. 0: the peer has gone. */
static int request_read(int fd, char *ret_text)
{
    size_t bytes = 0;
    ret_text[0] = '\0';
    while (bytes < REQUEST_BYTES - 1) {
        ssize_t got = recv(fd, ret_text + bytes, REQUEST_BYTES - 1 - bytes, 0);
        if (got <= 0) {
            return 0;
        }
        bytes += (size_t)got;
        ret_text[bytes] = '\0';
        const char *end = strstr(ret_text, "\r\n\r\n");
        if (end != NULL) {
            const char *length = strcasestr(ret_text, "content-length:");
            size_t body =
                length != NULL && length < end ? (size_t)strtol(length + 15, NULL, 10) : 0;
            if (bytes >= (size_t)(end + 4 - ret_text) + body) {
                return 1;
            }
        }
    }
    return 0;
}

static void *serve(void *user)
{
    static char request[REQUEST_BYTES], answer[2048];
    (void)user;
    for (;;) {
        int fd = accept(listener, NULL, NULL);
        if (fd < 0) {
            return NULL; /* the test is over */
        }
        size_t at = request_read(fd, request) ? 0 : ANSWERS;
        while (at < ANSWERS &&
               (strncmp(request, answers[at].request, strlen(answers[at].request)) != 0 ||
                strstr(request, answers[at].has) == NULL)) {
            at++;
        }
        if (at < ANSWERS) {
            int length =
                snprintf(answer, sizeof answer,
                         "HTTP/1.1 %s\r\nContent-Type: application/%s\r\n"
                         "Content-Length: %zu\r\nConnection: close\r\n\r\n%s",
                         answers[at].status, answers[at].status[0] == '4' ? "problem+json" : "json",
                         strlen(answers[at].body), answers[at].body);
            (void)send(fd, answer, (size_t)length, MSG_NOSIGNAL); /* a peer may be gone */
        }
        (void)close(fd);
    }
}

static int setup(void **state)
{
    struct sockaddr_in address = {.sin_family = AF_INET};
    socklen_t bytes = sizeof address;
    (void)state;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    assert_true(listener >= 0);
    assert_int_equal(bind(listener, (struct sockaddr *)&address, bytes), 0);
    assert_int_equal(listen(listener, 8), 0);
    assert_int_equal(getsockname(listener, (struct sockaddr *)&address, &bytes), 0);
    (void)snprintf(url, sizeof url, "http://127.0.0.1:%d", ntohs(address.sin_port));
    assert_int_equal(pthread_create(&thread, NULL, serve, NULL), 0);
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    (void)shutdown(listener, SHUT_RDWR); /* wakes the accept */
    assert_int_equal(pthread_join(thread, NULL), 0);
    (void)close(listener);
    return 0;
}

static void options_set(struct tv_client_options *options)
{
    tv_client_options_init(options);
    options->url = url;
    options->attempt_ms = options->total_ms = 20000;
    options->retries_max = 0;
}

static void a_client_or_nothing(void **state)
{
    (void)state;
    struct tv_client_options options;
    struct tv_client *client = NULL;
    int64_t blocks = fault_blocks();
    options_set(&options);
    fault_arm(FAULT_MEMORY, 1);
    assert_int_equal(tv_client_create(&options, &client), -ENOMEM);
    assert_int_equal(fault_disarm(), 1);
    assert_null(client);
    assert_int_equal(fault_blocks(), blocks);
    assert_int_equal(tv_client_create(&options, &client), 0);
    tv_client_destroy(client);
    assert_int_equal(fault_blocks(), blocks);
}

/* What a call may write, and whether anything of it changed. */
struct outputs {
    struct tv_client_session *session, *made;
    struct tv_client_round round;
    struct tv_client_model model;
    struct tv_client_answer answer;
};

static int create(struct tv_client *client, struct tv_client_session **ret_session,
                  struct tv_client_problem *problem)
{
    static const int32_t prompt[3] = {1, 2, 3}, stops[1] = {257};
    static const struct tv_client_session_options options = {
        .tokens = prompt,
        .token_count = 3,
        .sampling = {.rule = "target_walk", .temperature = 0.8, .top_p = 1.0, .seed = "5"},
        .stop_ids = stops,
        .stop_count = 1};
    return tv_client_session_create(client, &options, ret_session, problem);
}

typedef int call_fn(struct tv_client *client, struct outputs *out,
                    struct tv_client_problem *problem);

static int call_model(struct tv_client *client, struct outputs *out,
                      struct tv_client_problem *problem)
{
    return tv_client_model(client, &out->model, problem);
}

static int call_health(struct tv_client *client, struct outputs *out,
                       struct tv_client_problem *problem)
{
    return tv_client_health(client, &out->answer, problem);
}

static int call_metrics(struct tv_client *client, struct outputs *out,
                        struct tv_client_problem *problem)
{
    return tv_client_metrics(client, &out->answer, problem);
}

static int call_create(struct tv_client *client, struct outputs *out,
                       struct tv_client_problem *problem)
{
    return create(client, &out->made, problem);
}

static int call_verify(struct tv_client *client, struct outputs *out,
                       struct tv_client_problem *problem)
{
    static const int32_t tokens[4] = {5, 10, 11, 12}, parents[4] = {-1, 0, 0, 2};
    (void)client;
    return tv_client_verify(out->session, tokens, parents, 4, &out->round, problem);
}

static int call_decode(struct tv_client *client, struct outputs *out,
                       struct tv_client_problem *problem)
{
    (void)client;
    return tv_client_decode(out->session, 3, &out->round, problem);
}

static int call_extend(struct tv_client *client, struct outputs *out,
                       struct tv_client_problem *problem)
{
    const int32_t tokens[2] = {8, 9};
    (void)client;
    return tv_client_extend(out->session, tokens, 2, 1, &out->round, problem);
}

/* Two tokens that nobody was given: the round's result, whatever fails on the way. */
static int call_resync(struct tv_client *client, struct outputs *out,
                       struct tv_client_problem *problem)
{
    (void)client;
    int rc = tv_client_decode(out->session, 9, &out->round, problem);
    if (rc == 0) {
        assert_int_equal(out->round.recovered, TV_CLIENT_RESYNC);
        assert_int_equal(out->round.token_count, 2);
        assert_int_equal(out->round.tokens[1], 21);
    }
    return rc;
}

/* The session is adopted as the server has it, and the round is not done. */
static int call_rollback(struct tv_client *client, struct outputs *out,
                         struct tv_client_problem *problem)
{
    (void)client;
    int rc = tv_client_rollback(out->session, 2, -1, &out->round, problem);
    if (rc == -ESTALE) {
        assert_int_equal(tv_client_session_state(out->session)->committed_len, 5);
        return 0;
    }
    return rc == 0 ? -EBADMSG : rc;
}

static int call_fork(struct tv_client *client, struct outputs *out,
                     struct tv_client_problem *problem)
{
    (void)client;
    return tv_client_fork(out->session, 0, NULL, 0, &out->made, problem);
}

/* Proposed, with rows of logits; the state moves by nothing but the round's number. */
static int call_hold(struct tv_client *client, struct outputs *out,
                     struct tv_client_problem *problem)
{
    static const int32_t tokens[4] = {5, 10, 11, 12}, parents[4] = {-1, 0, 0, 2};
    const struct tv_client_verify_options options = {.hold = 1, .logits = TV_CLIENT_ROWS_PATH};
    (void)client;
    int rc =
        tv_client_verify_with(out->session, tokens, parents, 4, &options, &out->round, problem);
    if (rc == 0) {
        assert_int_equal(tv_client_session_state(out->session)->held_seq, 1);
        assert_int_equal(out->round.vocab, 2);
        assert_true(out->round.logits[0] == 1.0f && out->round.logits[3] == 4.0f);
    }
    return rc;
}

static int call_delete(struct tv_client *client, struct outputs *out,
                       struct tv_client_problem *problem)
{
    (void)client;
    return tv_client_session_delete(out->session, problem);
}

static const struct {
    const char *name;
    call_fn *call;
} calls[] = {{"model", call_model},   {"health", call_health}, {"metrics", call_metrics},
             {"create", call_create}, {"verify", call_verify}, {"decode", call_decode},
             {"extend", call_extend}, {"delete", call_delete}, {"rollback", call_rollback},
             {"resync", call_resync}, {"fork", call_fork},     {"hold", call_hold}};

static void calls_give_all_or_nothing(void **state)
{
    (void)state;
    struct tv_client_options options;
    struct tv_client *client = NULL;
    options_set(&options);
    assert_int_equal(tv_client_create(&options, &client), 0);
    for (size_t c = 0; c < sizeof calls / sizeof calls[0]; c++) {
        for (int n = 1;; n++) {
            struct outputs out, before;
            struct tv_client_problem problem;
            int64_t blocks = fault_blocks();
            memset(&out, 0, sizeof out);
            assert_int_equal(create(client, &out.session, &problem), 0);
            int64_t opened = fault_blocks();
            before = out;
            fault_arm(FAULT_MEMORY, n);
            int rc = calls[c].call(client, &out, &problem);
            int failed = fault_disarm();
            if (rc != (failed ? -ENOMEM : 0)) {
                fail_msg("%s, allocation %d: %d '%s'", calls[c].name, n, rc, problem.detail);
            }
            if (failed) {
                const struct tv_client_state *kept = tv_client_session_state(out.session);
                assert_memory_equal(&out, &before, sizeof out);
                assert_true(problem.detail[0] != '\0');
                assert_int_equal(kept->committed_len, 3);
                assert_int_equal(kept->next_seq, 1);
                assert_int_equal(kept->pending, 5);
                assert_int_equal(fault_blocks(), opened);
            }
            tv_client_round_finish(&out.round);
            tv_client_answer_finish(&out.answer);
            tv_client_session_destroy(out.made);
            tv_client_session_destroy(out.session);
            assert_int_equal(fault_blocks(), blocks);
            if (!failed) {
                print_message("%s: %d allocations\n", calls[c].name, n - 1);
                assert_true(n > 1);
                break;
            }
        }
    }
    tv_client_destroy(client);
}

/* A round sent and received, while an allocation or the thread fails: what fails on the thread is
 * done again by the caller's own, and nothing is left. */
static void rounds_ahead_give_all_or_nothing(void **state)
{
    (void)state;
    static const int32_t tokens[4] = {5, 10, 11, 12}, parents[4] = {-1, 0, 0, 2};
    struct tv_client_options options;
    struct tv_client *client = NULL;
    int failed = 1;
    options_set(&options);
    assert_int_equal(tv_client_create(&options, &client), 0);
    for (int n = 1; failed; n++) {
        struct tv_client_session *session = NULL;
        struct tv_client_round round = {0};
        struct tv_client_problem problem;
        int64_t blocks = fault_blocks();
        assert_int_equal(create(client, &session, &problem), 0);
        const struct tv_client_state *now = tv_client_session_state(session);
        fault_arm(FAULT_MEMORY | FAULT_THREAD, n);
        int rc = tv_client_send(session, tokens, parents, 4, &problem);
        if (rc == 0) {
            assert_int_equal(now->under_way, 1);
            rc = tv_client_receive(session, &round, &problem);
        }
        failed = fault_disarm();
        assert_true(rc == 0 || (failed && (rc == -ENOMEM || rc == -EAGAIN)));
        assert_int_equal(now->committed_len, rc == 0 ? 6 : 3);
        assert_int_equal(now->under_way, 0);
        assert_int_equal(tv_client_send(session, &now->pending, parents, 1, &problem), 0);
        tv_client_round_finish(&round);
        tv_client_session_destroy(session); /* with the round under way */
        assert_int_equal(fault_blocks(), blocks);
    }
    tv_client_destroy(client);
}

/* A stream that cannot be had (this server has none) leaves nothing. */
static void a_stream_leaves_nothing(void **state)
{
    (void)state;
    struct tv_client_options options;
    struct tv_client *client = NULL;
    int failed = 1;
    options_set(&options);
    assert_int_equal(tv_client_create(&options, &client), 0);
    for (int n = 1; failed; n++) {
        struct tv_client_events *events = NULL;
        struct tv_client_event event;
        struct tv_client_problem problem;
        int64_t blocks = fault_blocks();
        fault_arm(FAULT_MEMORY, n);
        int rc = tv_client_events_open(client, "s_BBBBBBBBBBBBBBBBBBBBBB", -1, &events, &problem);
        if (rc == 0) {
            rc = tv_client_events_next(events, 20000, &event, &problem);
        }
        failed = fault_disarm();
        assert_int_equal(rc, failed ? -ENOMEM : -EIO);
        assert_true(problem.detail[0] != '\0');
        tv_client_events_close(events);
        assert_int_equal(fault_blocks(), blocks);
    }
    tv_client_destroy(client);
}

/* A create has a random key of its own: without one it is not sent. */
static void no_key_no_create(void **state)
{
    (void)state;
    struct tv_client_options options;
    struct tv_client_problem problem;
    struct tv_client *client = NULL;
    struct tv_client_session *session = NULL;
    options_set(&options);
    assert_int_equal(tv_client_create(&options, &client), 0);
    fault_arm(FAULT_RANDOM, 1);
    assert_int_equal(create(client, &session, &problem), -EIO);
    assert_int_equal(fault_disarm(), 1);
    assert_null(session);
    assert_true(problem.detail[0] != '\0');
    assert_int_equal(create(client, &session, &problem), 0);
    tv_client_session_destroy(session);
    tv_client_destroy(client);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_client_or_nothing),
        cmocka_unit_test(calls_give_all_or_nothing),
        cmocka_unit_test(rounds_ahead_give_all_or_nothing),
        cmocka_unit_test(a_stream_leaves_nothing),
        cmocka_unit_test(no_key_no_create),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
