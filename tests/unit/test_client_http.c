/*
 * test_client_http.c - the client library against a scripted server on loopback.
 *
 * The server is a thread that reads one request per step and answers, stays silent or hangs up as
 * the script says; it keeps every request, so tests compare what was really sent.
 */
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include <cmocka.h>

#include "clients/c/treeverify-client.h"

#define STEPS_MAX     8
#define REQUEST_BYTES 16384

/* One connection: what to send back. NULL answers nothing; silent_ms keeps it open meanwhile. */
struct step {
    const char *status, *type, *body, *headers;
    int hang_up, silent_ms;
};

struct server {
    int fd;
    char url[64];
    pthread_t thread;
    const struct step *steps;
    int step_count, served;
    char requests[STEPS_MAX][REQUEST_BYTES];
};

static void read_request(int fd, char *ret_text)
{
    size_t bytes = 0;
    size_t want = 0;
    ret_text[0] = '\0';
    while (bytes < REQUEST_BYTES - 1) {
        ssize_t got = read(fd, ret_text + bytes, REQUEST_BYTES - 1 - bytes);
        if (got <= 0) {
            return;
        }
        bytes += (size_t)got;
        ret_text[bytes] = '\0';
        char *end = strstr(ret_text, "\r\n\r\n");
        if (end != NULL) {
            const char *length = strcasestr(ret_text, "content-length:");
            want = (size_t)(end + 4 - ret_text) +
                   (length != NULL && length < end ? (size_t)strtol(length + 15, NULL, 10) : 0);
            if (bytes >= want) {
                return;
            }
        }
    }
}

static void write_all(int fd, const char *text)
{
    size_t left = strlen(text);
    while (left > 0) {
        ssize_t put = send(fd, text, left, MSG_NOSIGNAL);
        if (put <= 0) {
            return;
        }
        text += put;
        left -= (size_t)put;
    }
}

/* Wait until the peer hangs up, at most ms. */
static void wait_hang_up(int fd, int ms)
{
    struct timeval limit = {.tv_sec = ms / 1000, .tv_usec = (ms % 1000) * 1000};
    char byte;
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit));
    while (read(fd, &byte, 1) > 0) {
    }
}

static void *serve(void *user)
{
    struct server *server = user;
    char text[8192];
    for (int i = 0; i < server->step_count; i++) {
        const struct step *step = &server->steps[i];
        int fd = accept(server->fd, NULL, NULL);
        if (fd < 0) {
            break;
        }
        read_request(fd, server->requests[i]);
        if (step->silent_ms > 0) {
            wait_hang_up(fd, step->silent_ms);
        } else if (!step->hang_up) {
            (void)snprintf(text, sizeof(text),
                           "HTTP/1.1 %s\r\nContent-Type: %s\r\nContent-Length: %zu\r\n%s"
                           "Connection: close\r\n\r\n%s",
                           step->status, step->type, strlen(step->body),
                           step->headers != NULL ? step->headers : "", step->body);
            write_all(fd, text);
        }
        (void)close(fd);
        server->served++;
    }
    return NULL;
}

static void start(struct server *server, const struct step *steps, int count)
{
    struct sockaddr_in address = {.sin_family = AF_INET};
    socklen_t bytes = sizeof(address);
    memset(server, 0, sizeof(*server));
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    server->steps = steps;
    server->step_count = count;
    server->fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    assert_true(server->fd >= 0);
    assert_int_equal(bind(server->fd, (struct sockaddr *)&address, bytes), 0);
    assert_int_equal(listen(server->fd, 8), 0);
    assert_int_equal(getsockname(server->fd, (struct sockaddr *)&address, &bytes), 0);
    (void)snprintf(server->url, sizeof(server->url), "http://127.0.0.1:%d",
                   ntohs(address.sin_port));
    assert_int_equal(pthread_create(&server->thread, NULL, serve, server), 0);
}

static void stop(struct server *server)
{
    (void)shutdown(server->fd, SHUT_RDWR); /* wakes an accept that nobody will meet */
    assert_int_equal(pthread_join(server->thread, NULL), 0);
    (void)close(server->fd);
}

static struct tv_client *client_of(const struct server *server)
{
    struct tv_client_options options;
    struct tv_client *client = NULL;
    tv_client_options_init(&options);
    options.url = server->url;
    options.attempt_ms = 5000;
    options.total_ms = 20000;
    options.backoff_ms = 1;
    assert_int_equal(tv_client_create(&options, &client), 0);
    return client;
}

static const struct tv_client_session open_session = {
    .id = "s_AAAAAAAAAAAAAAAAAAAAAA",
    .epoch = "0123456789abcdef",
    .next_seq = 7,
    .committed_len = 100,
    .pending = 5,
    .max_nodes = 256,
    .max_depth = 64,
};
static const int32_t tree_tokens[4] = {5, 10, 11, 12};
static const int32_t tree_parents[4] = {-1, 0, 0, 2};

static const char round_7[] =
    "{\"seq\":7,\"status\":\"committed\",\"accepted\":{\"nodes\":[0,2,3],\"tokens\":[5,11,12]},"
    "\"pending\":77,\"new_tokens\":[11,12,77],\"committed_len\":103,"
    "\"digest\":\"000102030405060708090a0b0c0d0e0f\",\"next_seq\":8,\"rule\":\"greedy\","
    "\"finish\":null,\"timing_us\":{\"total\":1234},\"replayed\":true}";

static void lost_round_is_sent_again_unchanged(void **state)
{
    (void)state;
    static const struct step steps[] = {
        {.hang_up = 1},
        {.hang_up = 1},
        {.status = "200 OK", .type = "application/json", .body = round_7},
    };
    struct server server;
    struct tv_client_session session = open_session;
    struct tv_client_round round;
    struct tv_client_problem problem;
    start(&server, steps, 3);
    struct tv_client *client = client_of(&server);
    assert_int_equal(
        tv_client_verify(client, &session, tree_tokens, tree_parents, 4, &round, &problem), 0);
    stop(&server);
    assert_int_equal(server.served, 3);
    assert_string_equal(server.requests[0], server.requests[1]);
    assert_string_equal(server.requests[0], server.requests[2]);
    assert_non_null(strstr(server.requests[0], "{\"seq\":7,\"epoch\":\"0123456789abcdef\","
                                               "\"expected_len\":100,\"tree\":{\"tokens\":[5,10,11,"
                                               "12],\"parents\":[-1,0,0,2]}}"));
    assert_int_equal(round.node_count, 3);
    assert_int_equal(round.token_count, 3);
    assert_int_equal(round.tokens[2], 77);
    assert_int_equal(round.replayed, 1);
    assert_int_equal(round.server_us, 1234);
    assert_int_equal(session.next_seq, 8);
    assert_int_equal(session.committed_len, 103);
    assert_int_equal(session.pending, 77);
    tv_client_round_finish(&round);
    tv_client_destroy(client);
}

static void problem_is_mapped(void **state)
{
    (void)state;
    static const struct step steps[] = {
        {.status = "422 Unprocessable Content",
         .type = "application/problem+json",
         .body = "{\"type\":\"urn:treeverify:error:tree-invalid\",\"title\":\"t\",\"status\":422,"
                 "\"detail\":\"node 2: parent 9 is not before it\",\"code\":\"tree-invalid\","
                 "\"pointer\":\"/tree/parents/2\",\"node\":2,\"retryable\":false,"
                 "\"committed\":false,\"instance\":\"x\"}"}};
    struct server server;
    struct tv_client_session session = open_session;
    struct tv_client_round round;
    struct tv_client_problem problem;
    start(&server, steps, 1);
    struct tv_client *client = client_of(&server);
    assert_int_equal(
        tv_client_verify(client, &session, tree_tokens, tree_parents, 4, &round, &problem),
        -EPROTO);
    stop(&server);
    assert_int_equal(problem.http_status, 422);
    assert_string_equal(problem.code, "tree-invalid");
    assert_string_equal(problem.detail, "node 2: parent 9 is not before it");
    assert_string_equal(problem.pointer, "/tree/parents/2");
    assert_int_equal(problem.node, 2);
    assert_int_equal(problem.committed, 0);
    assert_int_equal(problem.retryable, 0);
    assert_memory_equal(&session, &open_session, sizeof(session));
    tv_client_destroy(client);
}

static int64_t now_ms(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

static void retry_after_is_honoured(void **state)
{
    (void)state;
    static const struct step steps[] = {
        {.status = "503 Service Unavailable",
         .type = "application/problem+json",
         .headers = "Retry-After: 1\r\n",
         .body = "{\"code\":\"overloaded\",\"detail\":\"queue full\",\"retryable\":true,"
                 "\"committed\":false}"},
        {.status = "200 OK", .type = "application/json", .body = round_7},
    };
    struct server server;
    struct tv_client_session session = open_session;
    struct tv_client_round round;
    struct tv_client_problem problem;
    start(&server, steps, 2);
    struct tv_client *client = client_of(&server);
    int64_t before = now_ms();
    assert_int_equal(
        tv_client_verify(client, &session, tree_tokens, tree_parents, 4, &round, &problem), 0);
    assert_true(now_ms() - before >= 1000);
    stop(&server);
    assert_string_equal(server.requests[0], server.requests[1]);
    tv_client_round_finish(&round);
    tv_client_destroy(client);
}

static void retries_are_bounded(void **state)
{
    (void)state;
    static const struct step steps[] = {{.hang_up = 1}, {.hang_up = 1}, {.hang_up = 1},
                                        {.hang_up = 1}, {.hang_up = 1}, {.hang_up = 1}};
    struct server server;
    struct tv_client_answer answer;
    struct tv_client_problem problem;
    start(&server, steps, 6);
    struct tv_client *client = client_of(&server);
    assert_int_equal(tv_client_parity_run(client, NULL, 0, &answer, &problem), -EIO);
    stop(&server);
    assert_int_equal(server.served, 5); /* the first and four retries */
    assert_int_equal(problem.committed, -1);
    tv_client_destroy(client);
}

static void silent_server_meets_the_deadline(void **state)
{
    (void)state;
    static const struct step steps[] = {{.silent_ms = 10000}, {.silent_ms = 10000}};
    struct server server;
    struct tv_client_answer answer;
    struct tv_client_problem problem;
    struct tv_client_options options;
    struct tv_client *client = NULL;
    start(&server, steps, 2);
    tv_client_options_init(&options);
    options.url = server.url;
    options.attempt_ms = 150;
    options.total_ms = 250;
    options.backoff_ms = 1;
    assert_int_equal(tv_client_create(&options, &client), 0);
    int64_t before = now_ms();
    assert_int_equal(tv_client_health(client, &answer, &problem), -ETIMEDOUT);
    assert_in_range(now_ms() - before, 150, 5000);
    tv_client_destroy(client);
    stop(&server);
    assert_int_equal(server.served, 2);
}

static void nobody_listens(void **state)
{
    (void)state;
    struct server server;
    struct tv_client_answer answer;
    struct tv_client_problem problem;
    start(&server, NULL, 0);
    struct tv_client *client = client_of(&server);
    stop(&server);
    assert_int_equal(tv_client_health(client, &answer, &problem), -ECONNREFUSED);
    assert_true(problem.detail[0] != '\0');
    tv_client_destroy(client);
}

/* Answers that a correct server never gives: nothing is taken from them. */
static void answers_that_break_the_contract(void **state)
{
    (void)state;
    static const char *const bodies[] = {
        "",
        "not json",
        "[]",
        "{}",
        "{\"seq\":7",
        /* node 3 is no child of node 1 */
        "{\"accepted\":{\"nodes\":[0,1,3],\"tokens\":[5,10,12]},\"pending\":77,"
        "\"new_tokens\":[10,12,77],\"committed_len\":103,"
        "\"digest\":\"000102030405060708090a0b0c0d0e0f\",\"next_seq\":8,\"finish\":null}",
        /* a node that was not sent */
        "{\"accepted\":{\"nodes\":[0,9],\"tokens\":[5,10]},\"pending\":77,"
        "\"new_tokens\":[10,77],\"committed_len\":102,"
        "\"digest\":\"000102030405060708090a0b0c0d0e0f\",\"next_seq\":8,\"finish\":null}",
        /* the length does not fit */
        "{\"accepted\":{\"nodes\":[0,1],\"tokens\":[5,10]},\"pending\":77,"
        "\"new_tokens\":[10,77],\"committed_len\":103,"
        "\"digest\":\"000102030405060708090a0b0c0d0e0f\",\"next_seq\":8,\"finish\":null}",
    };
    for (size_t i = 0; i < sizeof(bodies) / sizeof(bodies[0]); i++) {
        struct step step = {.status = "200 OK", .type = "application/json", .body = bodies[i]};
        struct server server;
        struct tv_client_session session = open_session;
        struct tv_client_round round;
        struct tv_client_problem problem;
        start(&server, &step, 1);
        struct tv_client *client = client_of(&server);
        assert_int_equal(
            tv_client_verify(client, &session, tree_tokens, tree_parents, 4, &round, &problem),
            -EBADMSG);
        stop(&server);
        assert_memory_equal(&session, &open_session, sizeof(session));
        tv_client_destroy(client);
    }
}

static const char created[] =
    "{\"session\":\"s_BBBBBBBBBBBBBBBBBBBBBB\",\"epoch\":\"0123456789abcdef\",\"next_seq\":1,"
    "\"committed_len\":3,\"digest\":\"000102030405060708090a0b0c0d0e0f\",\"pending\":9,"
    "\"cached_len\":0,\"finish\":null,\"limits\":{\"max_nodes\":64,\"max_depth\":16}}";

static void life_of_a_session(void **state)
{
    (void)state;
    static const struct step steps[] = {
        {.hang_up = 1},
        {.status = "201 Created", .type = "application/json", .body = created},
        {.status = "200 OK",
         .type = "application/json",
         .body = "{\"seq\":1,\"new_tokens\":[20,21],\"pending\":21,\"committed_len\":5,"
                 "\"digest\":\"000102030405060708090a0b0c0d0e0f\",\"next_seq\":2,"
                 "\"finish\":\"stop\"}"},
        {.status = "204 No Content", .type = "application/json", .body = ""},
    };
    const int32_t prompt[3] = {1, 2, 3};
    const int32_t stops[1] = {257};
    const struct tv_client_sampling sampling = {
        .rule = "target_walk", .temperature = 0.8, .top_p = 1.0, .seed = "18446744073709551615"};
    struct server server;
    struct tv_client_session session;
    struct tv_client_round round;
    struct tv_client_problem problem;
    start(&server, steps, 4);
    struct tv_client *client = client_of(&server);
    assert_int_equal(
        tv_client_session_create(client, prompt, 3, &sampling, stops, 1, &session, &problem), 0);
    assert_int_equal(session.pending, 9);
    assert_int_equal(session.max_nodes, 64);
    assert_int_equal(tv_client_decode(client, &session, 8, &round, &problem), 0);
    assert_string_equal(session.finish, "stop");
    assert_int_equal(round.node_count, 0);
    assert_int_equal(round.token_count, 2);
    tv_client_round_finish(&round);
    assert_int_equal(tv_client_session_delete(client, &session, &problem), 0);
    stop(&server);
    /* a create that is sent again carries the same key */
    assert_string_equal(server.requests[0], server.requests[1]);
    assert_non_null(strstr(server.requests[0], "Idempotency-Key: "));
    assert_non_null(strstr(server.requests[0], "\"seed\":\"18446744073709551615\""));
    assert_non_null(strstr(server.requests[0], "\"stop\":{\"token_ids\":[257]}"));
    assert_non_null(strstr(server.requests[3], "DELETE /v1/sessions/s_BBBBBBBBBBBBBBBBBBBBBB "));
    tv_client_destroy(client);
}

static void session_id_cannot_leave_its_path(void **state)
{
    (void)state;
    struct step step = {.status = "201 Created", .type = "application/json"};
    step.body = "{\"session\":\"../admin?x\",\"epoch\":\"0123456789abcdef\",\"next_seq\":1,"
                "\"committed_len\":3,\"digest\":\"00\",\"pending\":9,\"finish\":null,"
                "\"limits\":{\"max_nodes\":64,\"max_depth\":16}}";
    const int32_t prompt[1] = {1};
    const struct tv_client_sampling sampling = {.rule = "greedy"};
    struct server server;
    struct tv_client_session session;
    struct tv_client_problem problem;
    start(&server, &step, 1);
    struct tv_client *client = client_of(&server);
    assert_int_equal(
        tv_client_session_create(client, prompt, 1, &sampling, NULL, 0, &session, &problem),
        -EBADMSG);
    stop(&server);
    tv_client_destroy(client);
}

static void urls(void **state)
{
    (void)state;
    static const char *const bad[] = {
        "",           "127.0.0.1:8471", "ftp://127.0.0.1",   "http://", "http://h/v1",
        "http://h?x", "http://user@h",  "file:///etc/passwd"};
    struct tv_client_options options;
    struct tv_client *client = NULL;
    tv_client_options_init(&options);
    assert_int_equal(tv_client_create(&options, &client), -EINVAL);
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        options.url = bad[i];
        assert_int_equal(tv_client_create(&options, &client), -EINVAL);
    }
    options.url = "http://localhost:8471/";
    assert_int_equal(tv_client_create(&options, &client), 0);
    tv_client_destroy(client);
    char key[258];
    memset(key, 'k', sizeof(key));
    key[257] = '\0';
    static const char *const bad_keys[] = {"", "a b", "a\r\nX: y", "a\tb", "\x7f", "\xc3\xa9"};
    options.key = key;
    assert_int_equal(tv_client_create(&options, &client), -EINVAL);
    for (size_t i = 0; i < sizeof(bad_keys) / sizeof(bad_keys[0]); i++) {
        options.key = bad_keys[i];
        assert_int_equal(tv_client_create(&options, &client), -EINVAL);
    }
    key[256] = '\0';
    options.key = key;
    assert_int_equal(tv_client_create(&options, &client), 0);
    tv_client_destroy(client);
    tv_client_destroy(NULL);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(lost_round_is_sent_again_unchanged),
        cmocka_unit_test(problem_is_mapped),
        cmocka_unit_test(retry_after_is_honoured),
        cmocka_unit_test(retries_are_bounded),
        cmocka_unit_test(silent_server_meets_the_deadline),
        cmocka_unit_test(nobody_listens),
        cmocka_unit_test(answers_that_break_the_contract),
        cmocka_unit_test(life_of_a_session),
        cmocka_unit_test(session_id_cannot_leave_its_path),
        cmocka_unit_test(urls),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
