/*
 * client_fixture.c - the scripted server, and a client and a session that talk to it.
 */
#include <arpa/inet.h>
#include <netinet/in.h>
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

#include "client_fixture.h"

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

void start(struct server *server, const struct step *steps, int count)
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

void stop(struct server *server)
{
    (void)shutdown(server->fd, SHUT_RDWR); /* wakes an accept that nobody will meet */
    assert_int_equal(pthread_join(server->thread, NULL), 0);
    (void)close(server->fd);
}

struct tv_client *client_of(const struct server *server)
{
    struct tv_client_options options;
    struct tv_client *client = NULL;
    tv_client_options_init(&options);
    options.url = server->url;
    options.attempt_ms = 5000;
    options.total_ms = 20000;
    options.retries_max = 4;
    options.backoff_ms = 1;
    assert_int_equal(tv_client_create(&options, &client), 0);
    return client;
}

const int32_t tree_tokens[4] = {5, 10, 11, 12};
const int32_t tree_parents[4] = {-1, 0, 0, 2};

const char model[] = "{\"name\":\"m\",\"model_id\":\"" ZEROS "\",\"vocab\":307,"
                     "\"max_len\":4096,\"limits\":{\"max_nodes\":64,\"max_depth\":16}}";
const char created[] =
    "{\"session\":\"s_BBBBBBBBBBBBBBBBBBBBBB\",\"epoch\":\"0123456789abcdef\",\"next_seq\":1,"
    "\"committed_len\":3,\"digest\":\"" DIGEST_123 "\",\"pending\":5,\"cached_len\":0,"
    "\"finish\":null,\"limits\":{\"max_nodes\":64,\"max_depth\":16},"
    "\"sampling\":{\"rule\":\"greedy\",\"seed\":\"18446744073709551615\"}}";

const int32_t prompt[3] = {1, 2, 3};

struct tv_client_session *session_of(struct tv_client *client)
{
    struct tv_client_session_options options;
    struct tv_client_session *session = NULL;
    struct tv_client_problem problem;
    tv_client_session_options_init(&options);
    options.tokens = prompt;
    options.token_count = 3;
    int error = tv_client_session_create(client, &options, &session, &problem);
    if (error != 0) {
        fail_msg("create: %d %s", error, problem.detail);
    }
    return session;
}

struct tv_client_session *begin(struct scene *scene, const struct step *steps, int count)
{
    start(&scene->server, steps, count);
    scene->client = client_of(&scene->server);
    scene->session = session_of(scene->client);
    return scene->session;
}

void end(struct scene *scene)
{
    tv_client_session_destroy(scene->session);
    tv_client_destroy(scene->client);
}

/* Nothing has moved. */
void assert_fresh(const struct tv_client_session *session)
{
    const struct tv_client_state *state = tv_client_session_state(session);
    assert_string_equal(state->digest, DIGEST_123);
    assert_string_equal(state->finish, "");
    assert_int_equal(state->next_seq, 1);
    assert_int_equal(state->committed_len, 3);
    assert_int_equal(state->pending, 5);
    assert_memory_equal(state->tokens, prompt, sizeof(prompt));
}

const char round_1[] =
    "{\"seq\":1,\"status\":\"committed\",\"accepted\":{\"nodes\":[0,2,3],\"tokens\":[5,11,12]},"
    "\"pending\":77,\"new_tokens\":[11,12,77],\"committed_len\":6,"
    "\"digest\":\"" DIGEST_6 "\",\"next_seq\":2,\"rule\":\"greedy\","
    "\"finish\":null,\"timing_us\":{\"queue\":4,\"gpu\":1000,\"total\":1234,\"batch\":3},"
    "\"hint\":{\"max_useful_nodes\":9,\"verify_us\":[[1,700],[16,1500]]},\"replayed\":true}";

int64_t now_ms(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}
