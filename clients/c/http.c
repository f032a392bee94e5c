/*
 * http.c - one HTTP call with its deadlines and retries; with events.c alone it talks to libcurl.
 *
 * Follows no redirects, speaks nothing but http and https, and reads at most ANSWER_BYTES_MAX.
 */
#include <assert.h>
#include <errno.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <time.h>

#include <curl/curl.h>

#include "clients/c/internal.h"

#define ANSWER_BYTES_MAX  ((size_t)64 << 20)
#define ANSWER_DEPTH_MAX  16
#define ANSWER_VALUES_MAX ((size_t)4 << 20)
#define URL_BYTES_MAX     1024
#define KEY_BYTES_MAX     256
#define PAUSE_PIECE_MS    20

struct tv_client {
    CURL *curl;
    struct tv_client_options options;
    char url[URL_BYTES_MAX];
    char *ca_file;                          /* owned; NULL: the system's */
    char authorization[KEY_BYTES_MAX + 32]; /* the header, or "" */
    struct tv_client_server server;
    int64_t attempts;
};

/* around libcurl's start and end, which older versions do not lock */
static pthread_mutex_t global_lock = PTHREAD_MUTEX_INITIALIZER;

int64_t tv_client_now_us(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000 + now.tv_nsec / 1000;
}

static int64_t now_ms(void)
{
    return tv_client_now_us() / 1000;
}

int64_t tv_client_attempts(const struct tv_client *client)
{
    return client->attempts;
}

void tv_client_attempts_add(struct tv_client *client, int64_t count)
{
    client->attempts += count;
}

const struct tv_client_options *tv_client_options_of(const struct tv_client *client)
{
    return &client->options;
}

struct tv_client_server *tv_client_server_of(struct tv_client *client)
{
    return &client->server;
}

void *tv_client_curl(struct tv_client *client)
{
    return client->curl;
}

static int is_given_up(const struct tv_client_watch *watch)
{
    int given_up = 0;
    if (watch != NULL) {
        (void)pthread_mutex_lock(watch->lock);
        given_up = watch->give_up;
        (void)pthread_mutex_unlock(watch->lock);
    }
    return given_up;
}

/* In pieces, so that who gives up does not wait for its end. */
static void pause_ms(int64_t ms, const struct tv_client_watch *watch)
{
    while (ms > 0 && !is_given_up(watch)) {
        int64_t piece = watch != NULL && ms > PAUSE_PIECE_MS ? PAUSE_PIECE_MS : ms;
        struct timespec rest = {.tv_sec = piece / 1000, .tv_nsec = (piece % 1000) * 1000000};
        while (nanosleep(&rest, &rest) != 0 && errno == EINTR) {
        }
        ms -= piece;
    }
}

void tv_client_options_init(struct tv_client_options *ret_options)
{
    *ret_options = (struct tv_client_options){
        .connect_ms = 5000,
        .attempt_ms = 30000,
        .total_ms = 120000,
        .retries_max = 7,
        .backoff_ms = 50,
        .restart_ms = 30000,
    };
}

/* Host and port are curl's to judge; a path, query or fragment of ours would be lost. */
static int check_url(const char *url)
{
    const char *host;
    if (strncasecmp(url, "http://", 7) == 0) {
        host = url + 7;
    } else if (strncasecmp(url, "https://", 8) == 0) {
        host = url + 8;
    } else {
        return -EINVAL;
    }
    size_t host_bytes = strcspn(host, "/?#@ ");
    const char *rest = host + host_bytes;
    if (host_bytes == 0 || (strcmp(rest, "") != 0 && strcmp(rest, "/") != 0)) {
        return -EINVAL;
    }
    CURLU *parts = curl_url();
    if (parts == NULL) {
        return -ENOMEM;
    }
    CURLUcode code = curl_url_set(parts, CURLUPART_URL, url, 0);
    curl_url_cleanup(parts);
    return code == CURLUE_OK ? 0 : code == CURLUE_OUT_OF_MEMORY ? -ENOMEM : -EINVAL;
}

/* A secret that would end the header, or that no server takes, is refused. */
static int check_key(const char *key)
{
    size_t bytes = strlen(key);
    for (size_t i = 0; i < bytes; i++) {
        if (key[i] <= 0x20 || key[i] >= 0x7f) {
            return -EINVAL;
        }
    }
    return bytes > 0 && bytes <= KEY_BYTES_MAX ? 0 : -EINVAL;
}

int tv_client_create(const struct tv_client_options *options, struct tv_client **ret_client)
{
    if (options->url == NULL || strlen(options->url) >= URL_BYTES_MAX || options->connect_ms < 1 ||
        options->attempt_ms < 1 || options->total_ms < 1 || options->retries_max < 0 ||
        options->backoff_ms < 1 || options->restart_ms < 0 ||
        (options->key != NULL && check_key(options->key) != 0)) {
        return -EINVAL;
    }
    int error = check_url(options->url);
    if (error != 0) {
        return error;
    }
    struct tv_client *client = calloc(1, sizeof(*client));
    if (client == NULL) {
        return -ENOMEM;
    }
    (void)pthread_mutex_lock(&global_lock);
    CURLcode code = curl_global_init(CURL_GLOBAL_DEFAULT);
    (void)pthread_mutex_unlock(&global_lock);
    if (code != CURLE_OK) {
        free(client);
        return -ENOMEM;
    }
    client->curl = curl_easy_init();
    if (client->curl == NULL) {
        tv_client_destroy(client);
        return -ENOMEM;
    }
    /* pauses need to differ between clients, no more */
    client->server.jitter = ((uint64_t)tv_client_now_us() ^ (uint64_t)(uintptr_t)client) | 1;
    client->options = *options;
    client->options.url = client->url;
    client->options.key = NULL;
    client->options.ca_file = NULL;
    if (options->ca_file != NULL) {
        client->ca_file = strdup(options->ca_file);
        if (client->ca_file == NULL) {
            tv_client_destroy(client);
            return -ENOMEM;
        }
    }
    if (options->key != NULL) {
        (void)snprintf(client->authorization, sizeof(client->authorization),
                       "Authorization: Bearer %s", options->key); /* fits */
    }
    size_t bytes = strlen(options->url);
    if (options->url[bytes - 1] == '/') {
        bytes--;
    }
    memcpy(client->url, options->url, bytes);
    client->url[bytes] = '\0';
    *ret_client = client;
    return 0;
}

void tv_client_destroy(struct tv_client *client)
{
    if (client == NULL) {
        return;
    }
    curl_easy_cleanup(client->curl);
    explicit_bzero(client->authorization, sizeof(client->authorization));
    free(client->ca_file);
    (void)pthread_mutex_lock(&global_lock);
    curl_global_cleanup(); /* counted by libcurl: one for each successful init */
    (void)pthread_mutex_unlock(&global_lock);
    free(client);
}

int tv_client_twin(const struct tv_client *client, struct tv_client **ret_twin)
{
    struct tv_client_options options = client->options;
    struct tv_client *twin;
    options.ca_file = client->ca_file;
    int error = tv_client_create(&options, &twin);
    if (error != 0) {
        return error;
    }
    memcpy(twin->authorization, client->authorization, sizeof(twin->authorization));
    twin->server.answered = client->server.answered;
    *ret_twin = twin;
    return 0;
}

static size_t on_data(char *data, size_t size, size_t count, void *user)
{
    struct tv_buf *body = user;
    tv_buf_append(body, data, size * count);
    return body->failed == 0 ? size * count : 0;
}

static int is_loopback(const char *url)
{
    const char *host = strstr(url, "//") + 2;
    return strncmp(host, "127.", 4) == 0 || strncmp(host, "[::1]", 5) == 0 ||
           strncasecmp(host, "localhost", 9) == 0;
}

/* Everything of one attempt but its deadline. */
static int prepare(struct tv_client *client, const char *method, const char *url, const char *body,
                   size_t body_bytes, struct curl_slist *headers, struct tv_buf *answer)
{
    CURL *curl = client->curl;
    curl_easy_reset(curl); /* keeps the connection */
    CURLcode code = curl_easy_setopt(curl, CURLOPT_URL, url);
    if (code == CURLE_OK) {
        code = curl_easy_setopt(curl, CURLOPT_PROTOCOLS_STR, "http,https");
    }
    if (code == CURLE_OK) {
        code = curl_easy_setopt(curl, CURLOPT_CUSTOMREQUEST, method);
    }
    if (code == CURLE_OK && body != NULL) {
        code = curl_easy_setopt(curl, CURLOPT_POSTFIELDSIZE_LARGE, (curl_off_t)body_bytes);
        if (code == CURLE_OK) {
            code = curl_easy_setopt(curl, CURLOPT_POSTFIELDS, body);
        }
    }
    if (code == CURLE_OK && client->ca_file != NULL) {
        code = curl_easy_setopt(curl, CURLOPT_CAINFO, client->ca_file);
    }
    if (code == CURLE_OK && is_loopback(client->url)) {
        code = curl_easy_setopt(curl, CURLOPT_PROXY, "");
    }
    if (code != CURLE_OK) {
        return -ENOMEM;
    }
    /* these take no memory and cannot fail with the values given */
    curl_easy_setopt(curl, CURLOPT_HTTPHEADER, headers);
    curl_easy_setopt(curl, CURLOPT_NOSIGNAL, 1L);
    curl_easy_setopt(curl, CURLOPT_WRITEFUNCTION, on_data);
    curl_easy_setopt(curl, CURLOPT_WRITEDATA, answer);
    curl_easy_setopt(curl, CURLOPT_CONNECTTIMEOUT_MS, (long)client->options.connect_ms);
    return 0;
}

/* Called by libcurl again and again: what the watch's owner wants to know, and wants. */
static int on_progress(void *user, curl_off_t down_all, curl_off_t down, curl_off_t up_all,
                       curl_off_t up)
{
    const struct tv_client_call *call = user;
    struct tv_client_watch *watch = call->watch;
    (void)down_all;
    (void)up_all;
    (void)pthread_mutex_lock(watch->lock);
    if (!watch->sent && (down > 0 || up >= (curl_off_t)call->body_bytes)) {
        watch->sent = 1;
        (void)pthread_cond_broadcast(watch->changed);
    }
    int give_up = watch->give_up;
    (void)pthread_mutex_unlock(watch->lock);
    return give_up;
}

static int error_of(CURLcode code, const struct tv_buf *answer)
{
    if (answer->failed != 0) {
        return answer->failed == -ENOMEM ? -ENOMEM : -EBADMSG;
    }
    switch (code) {
    case CURLE_OK:
        return 0;
    case CURLE_OPERATION_TIMEDOUT:
        return -ETIMEDOUT;
    case CURLE_COULDNT_CONNECT:
    case CURLE_COULDNT_RESOLVE_HOST:
    case CURLE_COULDNT_RESOLVE_PROXY:
    case CURLE_SSL_CONNECT_ERROR:
    case CURLE_PEER_FAILED_VERIFICATION:
    case CURLE_SSL_CACERT_BADFILE:
        return -ECONNREFUSED;
    case CURLE_OUT_OF_MEMORY:
        return -ENOMEM;
    case CURLE_ABORTED_BY_CALLBACK:
        return -ECANCELED;
    case CURLE_SEND_ERROR:
    case CURLE_RECV_ERROR:
    case CURLE_GOT_NOTHING:
    case CURLE_WEIRD_SERVER_REPLY: /* cut within its head */
    case CURLE_PARTIAL_FILE:
        return -EIO;
    default:
        return -EBADMSG;
    }
}

/* A refusal as a problem: from its document, or what an intermediary's status says. */
static int refusal(struct tv_client *client, const struct tv_json *doc, int32_t status,
                   struct tv_client_problem *ret_problem)
{
    curl_off_t wait_s = 0;
    if (doc != NULL) {
        tv_client_problem_read(doc, status, ret_problem);
    } else {
        tv_client_problem_set(ret_problem, "%s: status %d without a problem document", client->url,
                              (int)status);
        ret_problem->http_status = status;
    }
    if (ret_problem->code[0] == '\0') {
        ret_problem->retryable =
            status == 408 || status == 429 || status == 502 || status == 503 || status == 504;
    }
    curl_easy_getinfo(client->curl, CURLINFO_RETRY_AFTER, &wait_s);
    ret_problem->retry_after_s = wait_s < 0 ? 0 : wait_s < INT32_MAX ? (int32_t)wait_s : INT32_MAX;
    return -EPROTO;
}

/* The body as a document; a problem becomes -EPROTO. Takes the buffer's memory with 0 and -EPROTO.
 */
static int read_answer(struct tv_client *client, enum tv_client_reading reading,
                       struct tv_buf *body, struct tv_client_answer *ret_answer,
                       struct tv_client_problem *ret_problem)
{
    static const struct tv_json_limits limits = {.depth_max = ANSWER_DEPTH_MAX,
                                                 .values_max = ANSWER_VALUES_MAX};
    long status = 0;
    const char *type = NULL;
    struct tv_json *doc = NULL;
    struct tv_json_error where;
    curl_easy_getinfo(client->curl, CURLINFO_RESPONSE_CODE, &status);
    curl_easy_getinfo(client->curl, CURLINFO_CONTENT_TYPE, &type);
    int is_problem = type != NULL && strncasecmp(type, "application/problem+json", 24) == 0;
    tv_buf_append(body, "", 1); /* terminate; counted below */
    if (body->failed != 0) {
        return -ENOMEM;
    }
    size_t bytes = body->bytes - 1;
    if (bytes > 0 && (reading != TV_CLIENT_TEXT || status >= 400)) {
        int error = tv_json_parse(body->data, bytes, &limits, &doc, &where);
        if (error == -ENOMEM) {
            return error;
        }
        if (error != 0 && status < 400) {
            tv_client_problem_set(ret_problem, "answer with status %ld is not JSON: %s at byte %zu",
                                  status, where.what, where.offset);
            ret_problem->http_status = (int32_t)status;
            return -EBADMSG;
        }
    }
    *ret_answer = (struct tv_client_answer){.http_status = (int32_t)status,
                                            .text = body->data,
                                            .bytes = bytes,
                                            .doc = (struct tv_client_document *)doc};
    tv_buf_init(body, ANSWER_BYTES_MAX);
    if (status >= 400 && (reading != TV_CLIENT_PLAIN || is_problem || doc == NULL)) {
        return refusal(client, doc, (int32_t)status, ret_problem);
    }
    return 0;
}

static void failure(const struct tv_client *client, CURLcode code, const struct tv_buf *answer,
                    struct tv_client_problem *ret_problem)
{
    tv_client_problem_set(ret_problem, "%s: %s", client->url,
                          answer->failed == -EMSGSIZE ? "the answer is too large"
                                                      : curl_easy_strerror(code));
}

/* The end of a transfer: is the server there? A proxy that has none says so without a problem
 * document. */
static void note(struct tv_client *client, CURLcode code)
{
    long status = 0;
    const char *type = NULL;
    curl_easy_getinfo(client->curl, CURLINFO_RESPONSE_CODE, &status);
    curl_easy_getinfo(client->curl, CURLINFO_CONTENT_TYPE, &type);
    int away = status >= 502 && status <= 504 && (type == NULL || strstr(type, "json") == NULL);
    client->server.answered |= status > 0 && !away;
    client->server.refused = code == CURLE_COULDNT_CONNECT || away;
}

static int attempt(struct tv_client *client, const struct tv_client_call *call, int64_t deadline,
                   struct tv_buf *answer, struct tv_client_answer *ret_answer,
                   struct tv_client_problem *ret_problem)
{
    int64_t left = deadline - now_ms();
    int64_t limit = (int64_t)client->options.attempt_ms + call->wait_ms;
    if (left <= 0) {
        return -ETIMEDOUT;
    }
    curl_easy_setopt(client->curl, CURLOPT_TIMEOUT_MS, (long)(left < limit ? left : limit));
    if (call->watch != NULL) {
        curl_easy_setopt(client->curl, CURLOPT_NOPROGRESS, 0L);
        curl_easy_setopt(client->curl, CURLOPT_XFERINFOFUNCTION, on_progress);
        curl_easy_setopt(client->curl, CURLOPT_XFERINFODATA, call);
    }
    client->attempts++;
    CURLcode code = curl_easy_perform(client->curl);
    note(client, code);
    int error = error_of(code, answer);
    if (error == 0) {
        return read_answer(client, call->reading, answer, ret_answer, ret_problem);
    }
    failure(client, code, answer, ret_problem);
    return error;
}

int tv_client_transfer_end(struct tv_client *client, int curl_code, struct tv_buf *body,
                           struct tv_client_problem *ret_problem)
{
    struct tv_client_answer answer = {0};
    long status = 0;
    note(client, (CURLcode)curl_code);
    int error = error_of((CURLcode)curl_code, body);
    if (error != 0) {
        failure(client, (CURLcode)curl_code, body, ret_problem);
        return error;
    }
    curl_easy_getinfo(client->curl, CURLINFO_RESPONSE_CODE, &status);
    if (status == 200) {
        return 0;
    }
    error = read_answer(client, TV_CLIENT_STRICT, body, &answer, ret_problem);
    tv_client_answer_finish(&answer);
    return error != 0 ? error
                      : tv_client_not_the_contract("a status that is no stream", ret_problem);
}

static struct curl_slist *add_header(struct curl_slist *list, const char *line, int *failed)
{
    struct curl_slist *longer = curl_slist_append(list, line);
    if (longer == NULL) {
        *failed = 1;
        return list;
    }
    return longer;
}

/* Headers of a call. 0, -ENOMEM; the list is the caller's either way. */
static int make_headers(const struct tv_client *client, const struct tv_client_call *call,
                        struct curl_slist **ret_headers)
{
    struct curl_slist *headers = NULL;
    char line[32 + TV_KEY_BYTES_MAX];
    int failed = 0;
    headers = add_header(headers, "Expect:", &failed); /* bodies are small: do not ask first */
    headers = add_header(headers,
                         call->reading == TV_CLIENT_TEXT
                             ? "Accept: text/plain, application/problem+json"
                             : "Accept: application/json, application/problem+json",
                         &failed);
    if (client->authorization[0] != '\0') {
        headers = add_header(headers, client->authorization, &failed);
    }
    if (call->body != NULL) {
        headers = add_header(headers, "Content-Type: application/json", &failed);
    }
    if (call->key != NULL) {
        (void)snprintf(line, sizeof(line), "Idempotency-Key: %s", call->key); /* fits */
        headers = add_header(headers, line, &failed);
    }
    *ret_headers = headers;
    return failed ? -ENOMEM : 0;
}

int tv_client_exchange(struct tv_client *client, const struct tv_client_call *call,
                       struct tv_client_answer *ret_answer, struct tv_client_problem *ret_problem)
{
    assert(call->path[0] == '/');
    int64_t deadline = now_ms() + (call->limit_ms > 0 ? call->limit_ms : client->options.total_ms);
    struct tv_client_failures failures = {.hasty = call->hasty};
    struct tv_buf url, answer;
    struct curl_slist *headers = NULL;
    tv_client_problem_set(ret_problem, "out of memory");
    tv_buf_init(&url, 2 * URL_BYTES_MAX);
    tv_buf_init(&answer, ANSWER_BYTES_MAX);
    tv_buf_printf(&url, "%s%s", client->url, call->path);
    tv_buf_append(&url, "", 1);
    int error = url.failed != 0 ? -ENOMEM : make_headers(client, call, &headers);
    while (error == 0) {
        error =
            prepare(client, call->method, url.data, call->body, call->body_bytes, headers, &answer);
        if (error != 0) {
            break;
        }
        error = attempt(client, call, deadline, &answer, ret_answer, ret_problem);
        if (error == 0) {
            break;
        }
        int64_t pause = tv_client_next_pause(client, error, &failures, deadline, ret_problem);
        if (pause < 0) {
            break;
        }
        if (error == -EPROTO) {
            tv_client_answer_finish(ret_answer);
        }
        tv_buf_finish(&answer);
        tv_buf_init(&answer, ANSWER_BYTES_MAX);
        pause_ms(pause, call->watch);
        error = is_given_up(call->watch) ? -ECANCELED : 0;
    }
    curl_slist_free_all(headers);
    tv_buf_finish(&url);
    tv_buf_finish(&answer);
    return error;
}

int tv_client_stream_begin(struct tv_client *client, const char *path, const char *header,
                           size_t (*on_body)(char *, size_t, size_t, void *), void *user,
                           struct curl_slist **ret_headers)
{
    struct tv_buf url;
    struct curl_slist *headers = NULL;
    int failed = 0;
    tv_buf_init(&url, 2 * URL_BYTES_MAX);
    tv_buf_printf(&url, "%s%s", client->url, path);
    tv_buf_append(&url, "", 1);
    headers = add_header(headers, "Accept: text/event-stream, application/problem+json", &failed);
    if (client->authorization[0] != '\0') {
        headers = add_header(headers, client->authorization, &failed);
    }
    if (header[0] != '\0') {
        headers = add_header(headers, header, &failed);
    }
    int error = failed || url.failed != 0
                    ? -ENOMEM
                    : prepare(client, "GET", url.data, NULL, 0, headers, NULL);
    tv_buf_finish(&url);
    if (error != 0) {
        curl_slist_free_all(headers);
        return error;
    }
    client->attempts++;
    curl_easy_setopt(client->curl, CURLOPT_WRITEFUNCTION, on_body);
    curl_easy_setopt(client->curl, CURLOPT_WRITEDATA, user);
    *ret_headers = headers;
    return 0;
}
