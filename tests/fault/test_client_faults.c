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
#define DIGEST        "\"digest\":\"000102030405060708090a0b0c0d0e0f\""
#define MOVED         "\"pending\":77,\"committed_len\":103," DIGEST ",\"next_seq\":8"

static const struct {
    const char *request, *status, *body;
} answers[] = {
    {"GET /v1/model ", "200 OK",
     "{\"name\":\"m\",\"vocab\":307,\"max_len\":4096,"
     "\"limits\":{\"max_nodes\":64,\"max_depth\":16}"
     "}"},
    {"GET /healthz ", "200 OK", "{\"status\":\"ok\"}"},
    {"POST /v1/sessions ", "201 Created",
     "{\"session\":\"s_BBBBBBBBBBBBBBBBBBBBBB\",\"epoch\":\"0123456789abcdef\",\"next_seq\":1,"
     "\"committed_len\":3," DIGEST ",\"pending\":9,\"cached_len\":0,\"finish\":null,"
     "\"limits\":{\"max_nodes\":64,\"max_depth\":16}}"},
    {"POST /v1/sessions/s_AAAAAAAAAAAAAAAAAAAAAA/verify ", "200 OK",
     "{\"accepted\":{\"nodes\":[0,2,3],\"tokens\":[5,11,12]},\"new_tokens\":[11,12,77]," MOVED "}"},
    {"POST /v1/sessions/s_AAAAAAAAAAAAAAAAAAAAAA/decode ", "200 OK",
     "{\"new_tokens\":[1,2,77]," MOVED "}"},
    {"POST /v1/sessions/s_AAAAAAAAAAAAAAAAAAAAAA/extend ", "200 OK",
     "{\"new_tokens\":[77]," MOVED "}"},
    {"DELETE /v1/sessions/s_AAAAAAAAAAAAAAAAAAAAAA ", "204 No Content", ""},
};

#define ANSWERS (sizeof answers / sizeof answers[0])

static const struct tv_client_session open_session = {
    .id = "s_AAAAAAAAAAAAAAAAAAAAAA",
    .epoch = "0123456789abcdef",
    .next_seq = 7,
    .committed_len = 100,
    .pending = 5,
    .max_nodes = 256,
    .max_depth = 64,
};

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
               strncmp(request, answers[at].request, strlen(answers[at].request)) != 0) {
            at++;
        }
        if (at < ANSWERS) {
            int length = snprintf(answer, sizeof answer,
                                  "HTTP/1.1 %s\r\nContent-Type: application/json\r\n"
                                  "Content-Length: %zu\r\nConnection: close\r\n\r\n%s",
                                  answers[at].status, strlen(answers[at].body), answers[at].body);
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
    struct tv_client_session session;
    struct tv_client_round round;
    struct tv_client_model model;
    struct tv_client_answer answer;
};

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

static int call_create(struct tv_client *client, struct outputs *out,
                       struct tv_client_problem *problem)
{
    static const struct tv_client_sampling sampling = {
        .rule = "target_walk", .temperature = 0.8, .top_p = 1.0, .seed = "5"};
    const int32_t prompt[3] = {1, 2, 3}, stops[1] = {257};
    return tv_client_session_create(client, prompt, 3, &sampling, stops, 1, &out->session, problem);
}

static int call_verify(struct tv_client *client, struct outputs *out,
                       struct tv_client_problem *problem)
{
    static const int32_t tokens[4] = {5, 10, 11, 12}, parents[4] = {-1, 0, 0, 2};
    return tv_client_verify(client, &out->session, tokens, parents, 4, &out->round, problem);
}

static int call_decode(struct tv_client *client, struct outputs *out,
                       struct tv_client_problem *problem)
{
    return tv_client_decode(client, &out->session, 3, &out->round, problem);
}

static int call_extend(struct tv_client *client, struct outputs *out,
                       struct tv_client_problem *problem)
{
    const int32_t tokens[2] = {8, 9};
    return tv_client_extend(client, &out->session, tokens, 2, 1, problem);
}

static int call_delete(struct tv_client *client, struct outputs *out,
                       struct tv_client_problem *problem)
{
    return tv_client_session_delete(client, &out->session, problem);
}

static const struct {
    const char *name;
    call_fn *call;
} calls[] = {{"model", call_model},   {"health", call_health}, {"create", call_create},
             {"verify", call_verify}, {"decode", call_decode}, {"extend", call_extend},
             {"delete", call_delete}};

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
            out.session = open_session;
            before = out;
            fault_arm(FAULT_MEMORY, n);
            int rc = calls[c].call(client, &out, &problem);
            int failed = fault_disarm();
            if (rc != (failed ? -ENOMEM : 0)) {
                fail_msg("%s, allocation %d: %d '%s'", calls[c].name, n, rc, problem.detail);
            }
            if (failed) {
                assert_memory_equal(&out, &before, sizeof out);
                assert_true(problem.detail[0] != '\0');
                assert_int_equal(fault_blocks(), blocks);
                continue;
            }
            print_message("%s: %d allocations\n", calls[c].name, n - 1);
            assert_true(n > 1);
            tv_client_round_finish(&out.round);
            tv_client_answer_finish(&out.answer);
            assert_int_equal(fault_blocks(), blocks);
            break;
        }
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
    struct outputs out = {.session = open_session};
    options_set(&options);
    assert_int_equal(tv_client_create(&options, &client), 0);
    fault_arm(FAULT_RANDOM, 1);
    assert_int_equal(call_create(client, &out, &problem), -EIO);
    assert_int_equal(fault_disarm(), 1);
    assert_memory_equal(&out.session, &open_session, sizeof open_session);
    assert_true(problem.detail[0] != '\0');
    assert_int_equal(call_create(client, &out, &problem), 0);
    tv_client_destroy(client);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_client_or_nothing),
        cmocka_unit_test(calls_give_all_or_nothing),
        cmocka_unit_test(no_key_no_create),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
