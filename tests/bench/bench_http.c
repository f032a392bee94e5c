/*
 * bench_http.c - rounds per second and their times, from outside, on one session per connection.
 *
 * usage: bench_http PORT CONNECTIONS SECONDS [NODES]. Talks to a daemon on loopback that is already
 * running; prints one line and refuses to count anything but a committed round.
 */
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define CONNECTIONS_MAX 512
#define TEXT_BYTES      16384
#define SAMPLES_MAX     (1u << 22)

struct client {
    int fd;
    char session[32], epoch[24];
    long seq, len, pending;
    char text[TEXT_BYTES]; /* the request, then the answer */
    size_t got;
    int64_t sent_ns;
};

static uint32_t *samples; /* [SAMPLES_MAX] nanoseconds */
static uint32_t sample_count;

static int64_t now_ns(void)
{
    struct timespec now;
    (void)clock_gettime(CLOCK_MONOTONIC, &now); /* cannot fail on Linux */
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

static _Noreturn void fail(const char *what, const char *text)
{
    (void)fprintf(stderr, "bench_http: %s: %.400s\n", what, text);
    exit(1);
}

/* The number or string behind "name": in the answer. */
static const char *member(const char *text, const char *name)
{
    char quoted[48];
    (void)snprintf(quoted, sizeof quoted, "\"%s\":", name);
    const char *at = strstr(text, quoted);
    if (at == NULL) {
        fail(name, text);
    }
    return at + strlen(quoted);
}

static void copy_string(const char *text, const char *name, char *out, size_t bytes)
{
    const char *at = member(text, name);
    size_t length = strcspn(at + 1, "\"");
    if (*at != '"' || length >= bytes) {
        fail(name, text);
    }
    memcpy(out, at + 1, length);
    out[length] = '\0';
}

static void send_post(struct client *client, const char *path, const char *body)
{
    int head = snprintf(client->text, sizeof client->text,
                        "POST %s HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                        "Content-Length: %zu\r\n\r\n%s",
                        path, strlen(body), body);
    if (head < 0 || (size_t)head >= sizeof client->text) {
        fail("request", path);
    }
    client->got = 0;
    client->sent_ns = now_ns();
    if (send(client->fd, client->text, (size_t)head, MSG_NOSIGNAL) != head) {
        fail("send", strerror(errno));
    }
}

/* Read what is there; 1 when the answer is complete. */
static int receive(struct client *client)
{
    ssize_t got =
        recv(client->fd, client->text + client->got, sizeof client->text - 1 - client->got, 0);
    if (got <= 0) {
        fail("recv", got == 0 ? "closed" : strerror(errno));
    }
    client->got += (size_t)got;
    client->text[client->got] = '\0';
    const char *body = strstr(client->text, "\r\n\r\n");
    const char *length = strstr(client->text, "Content-Length: ");
    if (body == NULL || length == NULL) {
        return 0;
    }
    return client->got >= (size_t)(body + 4 - client->text) + strtoul(length + 16, NULL, 10);
}

static void send_verify(struct client *client, int nodes)
{
    char body[TEXT_BYTES - 512], path[80];
    int at =
        snprintf(body, sizeof body,
                 "{\"seq\":%ld,\"epoch\":\"%s\",\"expected_len\":%ld,\"tree\":{\"tokens\":[%ld",
                 client->seq, client->epoch, client->len, client->pending);
    for (int i = 1; i < nodes; i++) {
        at += snprintf(body + at, sizeof body - (size_t)at, ",%d", 3 * i % 509);
    }
    at += snprintf(body + at, sizeof body - (size_t)at, "],\"parents\":[-1");
    for (int i = 1; i < nodes; i++) {
        at += snprintf(body + at, sizeof body - (size_t)at, ",%d", (i - 1) / 2);
    }
    (void)snprintf(body + at, sizeof body - (size_t)at, "]}}");
    (void)snprintf(path, sizeof path, "/v1/sessions/%s/verify", client->session);
    send_post(client, path, body);
}

static void take_answer(struct client *client)
{
    if (strncmp(client->text, "HTTP/1.1 200", 12) != 0 ||
        strstr(client->text, "\"status\":\"committed\"") == NULL) {
        fail("answer", client->text);
    }
    if (sample_count < SAMPLES_MAX) {
        samples[sample_count++] = (uint32_t)(now_ns() - client->sent_ns);
    }
    client->seq = strtol(member(client->text, "next_seq"), NULL, 10);
    client->len = strtol(member(client->text, "committed_len"), NULL, 10);
    client->pending = strtol(member(client->text, "pending"), NULL, 10);
}

static void open_client(struct client *client, int port)
{
    const int on = 1;
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    client->fd = socket(AF_INET, SOCK_STREAM, 0);
    if (client->fd < 0 || connect(client->fd, (struct sockaddr *)&address, sizeof address) != 0 ||
        setsockopt(client->fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on) != 0) {
        fail("connect", strerror(errno));
    }
    send_post(client, "/v1/sessions", "{\"tokens\":[1,2,3],\"sampling\":{\"rule\":\"greedy\"}}");
    while (!receive(client)) {
        /* the answer comes in pieces */
    }
    copy_string(client->text, "session", client->session, sizeof client->session);
    copy_string(client->text, "epoch", client->epoch, sizeof client->epoch);
    client->seq = strtol(member(client->text, "next_seq"), NULL, 10);
    client->len = strtol(member(client->text, "committed_len"), NULL, 10);
    client->pending = strtol(member(client->text, "pending"), NULL, 10);
}

static int compare_samples(const void *a, const void *b)
{
    uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
    return (x > y) - (x < y);
}

static void report(int connections, int nodes, double seconds)
{
    qsort(samples, sample_count, sizeof *samples, compare_samples);
    (void)printf("%d connections, %d nodes: %.0f rounds/s, p50 %.1f us, p99 %.1f us, max %.1f us\n",
                 connections, nodes, sample_count / seconds, samples[sample_count / 2] / 1e3,
                 samples[(uint64_t)sample_count * 99 / 100] / 1e3, samples[sample_count - 1] / 1e3);
}

int main(int argc, char **argv)
{
    static struct client clients[CONNECTIONS_MAX];
    int port = argc > 1 ? atoi(argv[1]) : 0;
    int connections = argc > 2 ? atoi(argv[2]) : 0;
    double seconds = argc > 3 ? atof(argv[3]) : 0.0;
    int nodes = argc > 4 ? atoi(argv[4]) : 64;
    if (port < 1 || connections < 1 || connections > CONNECTIONS_MAX || seconds <= 0.0 ||
        nodes < 1 || nodes > 256) {
        (void)fprintf(stderr, "usage: bench_http PORT CONNECTIONS SECONDS [NODES]\n");
        return 2;
    }
    samples = malloc(SAMPLES_MAX * sizeof *samples);
    int events = epoll_create1(0);
    if (samples == NULL || events < 0) {
        fail("start", strerror(errno));
    }
    for (int i = 0; i < connections; i++) {
        struct epoll_event event = {.events = EPOLLIN, .data.ptr = &clients[i]};
        open_client(&clients[i], port);
        if (epoll_ctl(events, EPOLL_CTL_ADD, clients[i].fd, &event) != 0) {
            fail("epoll", strerror(errno));
        }
    }
    int64_t start_ns = now_ns(), end_ns = start_ns + (int64_t)(seconds * 1e9);
    for (int i = 0; i < connections; i++) {
        send_verify(&clients[i], nodes);
    }
    for (int open = connections; open > 0;) {
        struct epoll_event ready[64];
        int count = epoll_wait(events, ready, 64, 10000);
        if (count <= 0) {
            fail("epoll", count == 0 ? "no answer for 10 s" : strerror(errno));
        }
        for (int i = 0; i < count; i++) {
            struct client *client = ready[i].data.ptr;
            if (!receive(client)) {
                continue;
            }
            take_answer(client);
            if (now_ns() >= end_ns) {
                open--;
            } else {
                send_verify(client, nodes);
            }
        }
    }
    report(connections, nodes, (double)(now_ns() - start_ns) / 1e9);
    for (int i = 0; i < connections; i++) {
        (void)close(clients[i].fd); /* the daemon's sessions end with their leases */
    }
    free(samples);
    return close(events) == 0 ? 0 : 1;
}
