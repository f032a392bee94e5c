/*
 * fuzz_http.c - raw bytes to the listeners, on real sockets, in front of an engine of fixed
 * answers.
 *
 * The first byte chooses the listener, and in which pieces the rest is sent; 0x02 stands for the id
 * of a session that is there. Whatever comes back is HTTP from its first byte on and never says
 * "internal"; the daemon answers its probes between the inputs, and stops with nothing left over.
 */
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/log.h"
#include "fixed_engine.h"
#include "fuzz.h"
#include "http/http.h"
#include "stats/stats.h"

#define INPUTS_OF_A_DAEMON 512
#define ANSWER_BYTES       (1u << 20)
#define WAIT_MS            20000
#define SESSION_MARK       0x02
#define SESSION_BYTES      24
#define NO_ORACLE          "there is no oracle for this engine" /* POST /v1/parity */

struct service {
    struct tv_config config;
    struct tv_stats stats;
    struct tv_engine *engine;
    struct tv_sched *sched;
    struct tv_http *http;
    uint16_t ports[2];
    char session[SESSION_BYTES + 1];
    char answer[ANSWER_BYTES + 1];
    size_t answer_bytes;
};

static struct service service;

static int connect_to(uint16_t port)
{
    struct sockaddr_in to = {.sin_family = AF_INET, .sin_port = htons(port)};
    const int on = 1;
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    REQUIRE(fd >= 0 && connect(fd, (struct sockaddr *)&to, sizeof to) == 0);
    REQUIRE(setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on) == 0);
    return fd;
}

/* Everything that comes until the other side closes; a reset is a close. */
static void answer_read(int fd)
{
    struct pollfd ready = {.fd = fd, .events = POLLIN};
    ssize_t got;
    int found;
    service.answer_bytes = 0;
    do {
        do { /* libFuzzer has an alarm of its own */
            found = poll(&ready, 1, WAIT_MS);
        } while (found < 0 && errno == EINTR);
        REQUIRE(found > 0); /* the daemon ends what it has begun */
        got =
            recv(fd, service.answer + service.answer_bytes, ANSWER_BYTES - service.answer_bytes, 0);
        service.answer_bytes += got > 0 ? (size_t)got : 0;
    } while (got > 0);
    service.answer[service.answer_bytes] = '\0';
}

/* In pieces of so many bytes, as far as the other side takes them; then nothing more comes. */
static void exchange(int admin, const char *data, size_t bytes, size_t piece)
{
    int fd = connect_to(service.ports[admin]);
    for (size_t at = 0; at < bytes; at += piece) {
        size_t some = bytes - at < piece ? bytes - at : piece;
        if (send(fd, data + at, some, MSG_NOSIGNAL) < 0) {
            break;
        }
    }
    (void)shutdown(fd, SHUT_WR); /* it may be gone already */
    answer_read(fd);
    (void)close(fd); /* all was read */
}

static void session_make(void)
{
    static const char body[] = "{\"tokens\":[1,2,3],\"lease_s\":3600}";
    char text[256];
    int bytes = snprintf(text, sizeof text,
                         "POST /v1/sessions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
                         "Content-Type: application/json\r\nContent-Length: %zu\r\n\r\n%s",
                         strlen(body), body);
    int fd = connect_to(service.ports[0]);
    REQUIRE(send(fd, text, (size_t)bytes, MSG_NOSIGNAL) == bytes);
    answer_read(fd); /* half-closed it would be dropped from the queue */
    (void)close(fd); /* all was read */
    const char *at = strstr(service.answer, "\"session\":\"");
    REQUIRE(at != NULL);
    at += strlen("\"session\":\"");
    REQUIRE(strcspn(at, "\"") == SESSION_BYTES);
    memcpy(service.session, at, SESSION_BYTES);
}

static void service_start(void)
{
    const struct tv_fixed_engine_params params = {.vocab = 307,
                                                  .max_len = 512,
                                                  .nodes_max = 64,
                                                  .requests_max = 4,
                                                  .prefill_rows = 64,
                                                  .pages = 64,
                                                  .page_size = 16};
    const struct tv_http_sockets sockets = {-1, -1};
    static char words[][24] = {"treeverifyd", "--model",        "none",           "--listen",
                               "127.0.0.1:0", "--max-nodes=64", "--http-threads", "1"};
    char *argv[sizeof words / sizeof words[0] + 1] = {NULL};
    char error[600] = "";
    for (size_t i = 0; i < sizeof words / sizeof words[0]; i++) {
        argv[i] = words[i];
    }
    memset(&service.stats, 0, sizeof service.stats);
    REQUIRE(tv_config_load(&service.config, (int)(sizeof words / sizeof words[0]), argv, error,
                           sizeof error) == 0);
    REQUIRE(tv_fixed_engine_create(&params, &service.engine) == 0);
    REQUIRE(tv_sched_create(&service.config, service.engine, NULL, &service.stats,
                            &service.sched) == 0);
    REQUIRE(tv_http_create(&service.config, &sockets, service.sched, &service.stats, &service.http,
                           error, sizeof error) == 0);
    for (int admin = 0; admin < 2; admin++) {
        const char *colon = strrchr(tv_http_url(service.http, admin), ':');
        REQUIRE(colon != NULL);
        service.ports[admin] = (uint16_t)strtoul(colon + 1, NULL, 10);
    }
    session_make();
}

static void service_stop(void)
{
    tv_http_close(service.http);
    tv_sched_destroy(service.sched);
    tv_http_destroy(service.http);
    REQUIRE(tv_fixed_engine_contexts(service.engine) == 0);
    service.engine->ops->destroy(service.engine);
    service.http = NULL;
}

static void service_end(void)
{
    if (service.http != NULL) {
        service_stop();
    }
}

/* The bytes with the session's id in the place of its mark; owned. */
static char *expand(const uint8_t *data, size_t bytes, size_t *ret_bytes)
{
    char *text = malloc(bytes * SESSION_BYTES + 1);
    size_t count = 0;
    REQUIRE(text != NULL);
    for (size_t i = 0; i < bytes; i++) {
        if (data[i] == SESSION_MARK) {
            memcpy(text + count, service.session, SESSION_BYTES);
            count += SESSION_BYTES;
        } else {
            text[count++] = (char)data[i];
        }
    }
    *ret_bytes = count;
    return text;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    static const char probe[] = "GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n";
    static const size_t pieces[] = {1u << 20, 1, 7, 64};
    static int64_t inputs = 0;
    size_t count;
    if (bytes < 1) {
        return 0;
    }
    if (inputs == 0) {
        REQUIRE(clearenv() == 0 && atexit(service_end) == 0);
        tv_log_level_set(TV_LOG_ERROR);
    }
    if (inputs++ % INPUTS_OF_A_DAEMON == 0) {
        service_end();
        service_start();
    }
    char *text = expand(data + 1, bytes - 1, &count);
    exchange(data[0] & 1, text, count, pieces[(data[0] >> 1) % 4]);
    free(text);
    if (service.answer_bytes > 0) {
        REQUIRE(strncmp(service.answer, "HTTP/1.", 7) == 0);
        REQUIRE(strstr(service.answer, "\"code\":\"internal\"") == NULL ||
                strstr(service.answer, NO_ORACLE) != NULL);
    }
    if (inputs % 16 == 0) {
        exchange(1, probe, sizeof probe - 1, sizeof probe);
        REQUIRE(strncmp(service.answer, "HTTP/1.1 200", 12) == 0);
    }
    return 0;
}
