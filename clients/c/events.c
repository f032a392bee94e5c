/*
 * events.c - following a session: server-sent events, read as they come and gone on with where a
 * connection was lost.
 *
 * Owns the stream's connection, its unread text and the memory of how far it was read. Refuses
 * events that are not JSON objects; what they mean is the contract's (proto/README.md, "Events").
 */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <curl/curl.h>

#include "clients/c/internal.h"

#define EVENT_BYTES_MAX ((size_t)4 << 20)
#define EVENT_DEPTH_MAX 16
#define QUIET_MS        30000 /* a server that is there says something every 10 s */

struct tv_client_events {
    struct tv_client *client; /* a twin; owned */
    CURLM *multi;
    struct curl_slist *headers; /* of the connection that is open */
    int open, over;
    int done; /* the transfer has ended, with this code of curl's; its text may be unread */
    CURLcode code;
    char path[TV_CLIENT_PATH_BYTES];
    int32_t last;                       /* number to go on behind; -1: none yet */
    struct tv_buf text;                 /* what came and was not read */
    size_t read;                        /* of it */
    struct tv_client_failures failures; /* in a row, without an event between them */
    int64_t started_ms;                 /* of the first of those, or of the last event */
    int64_t heard_ms;                   /* when something came last */
    int64_t not_before_ms;              /* the next connection */
    struct tv_client_answer data;       /* of the event given last */
};

static int64_t now_ms(void)
{
    return tv_client_now_us() / 1000;
}

static size_t on_text(char *data, size_t size, size_t count, void *user)
{
    struct tv_client_events *events = user;
    events->heard_ms = now_ms();
    tv_buf_append(&events->text, data, size * count);
    return events->text.failed == 0 ? size * count : 0;
}

int tv_client_events_open(const struct tv_client *client, const char *id, int32_t after,
                          struct tv_client_events **ret_events,
                          struct tv_client_problem *ret_problem)
{
    static const char alphabet[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
                                   "_-";
    size_t bytes = id != NULL ? strlen(id) : 0;
    if (bytes == 0 || bytes > 64 || strspn(id, alphabet) != bytes || after < -1) {
        tv_client_problem_set(ret_problem, "no session has this id, or no round this number");
        return -EINVAL;
    }
    struct tv_client_events *events = calloc(1, sizeof(*events));
    if (events == NULL || tv_client_twin(client, &events->client) != 0) {
        goto fail;
    }
    events->multi = curl_multi_init();
    if (events->multi == NULL) {
        goto fail;
    }
    (void)snprintf(events->path, sizeof(events->path), "/v1/sessions/%s/events", id); /* fits */
    events->last = after;
    events->started_ms = now_ms();
    tv_buf_init(&events->text, EVENT_BYTES_MAX);
    *ret_events = events;
    return tv_client_end(0, ret_problem);
fail:
    tv_client_events_close(events);
    tv_client_problem_set(ret_problem, "out of memory");
    return -ENOMEM;
}

/* The connection ends, and what it left unread. */
static void disconnect(struct tv_client_events *events)
{
    if (events->open) {
        (void)curl_multi_remove_handle(events->multi, tv_client_curl(events->client));
        events->open = 0;
    }
    events->done = 0;
    curl_slist_free_all(events->headers);
    events->headers = NULL;
    tv_buf_finish(&events->text);
    tv_buf_init(&events->text, EVENT_BYTES_MAX);
    events->read = 0;
}

void tv_client_events_close(struct tv_client_events *events)
{
    if (events == NULL) {
        return;
    }
    if (events->client != NULL && events->multi != NULL) {
        disconnect(events);
    }
    tv_client_answer_finish(&events->data);
    if (events->multi != NULL) {
        (void)curl_multi_cleanup(events->multi);
    }
    tv_client_destroy(events->client);
    free(events);
}

static int connect_again(struct tv_client_events *events, struct tv_client_problem *ret_problem)
{
    char header[48] = "";
    if (events->last >= 0) {
        (void)snprintf(header, sizeof(header), "Last-Event-ID: %" PRId32, events->last); /* fits */
    }
    disconnect(events);
    int error = tv_client_stream_begin(events->client, events->path, header, on_text, events,
                                       &events->headers);
    if (error == 0 &&
        curl_multi_add_handle(events->multi, tv_client_curl(events->client)) != CURLM_OK) {
        error = -ENOMEM;
    }
    if (error != 0) {
        tv_client_problem_set(ret_problem, "out of memory");
        return error;
    }
    events->open = 1;
    events->heard_ms = now_ms();
    return 0;
}

/* The connection is lost, or there was none: when the next one is to be made. Else its error. */
static int lost(struct tv_client_events *events, int error, struct tv_client_problem *ret_problem)
{
    const struct tv_client_options *options = tv_client_options_of(events->client);
    disconnect(events);
    int64_t pause = tv_client_next_pause(events->client, error, &events->failures,
                                         events->started_ms + options->total_ms, ret_problem);
    if (pause < 0) {
        return error;
    }
    events->not_before_ms = now_ms() + pause;
    return 0;
}

/* Look at the connection for at most wait_ms. 0; or why there is none and will be none. */
static int look(struct tv_client_events *events, int64_t wait_ms,
                struct tv_client_problem *ret_problem)
{
    int running = 0, left = 0;
    CURLMsg *message;
    if (curl_multi_perform(events->multi, &running) != CURLM_OK ||
        (running > 0 && curl_multi_poll(events->multi, NULL, 0, (int)wait_ms, NULL) != CURLM_OK) ||
        curl_multi_perform(events->multi, &running) != CURLM_OK) {
        tv_client_problem_set(ret_problem, "out of memory");
        return -ENOMEM;
    }
    while ((message = curl_multi_info_read(events->multi, &left)) != NULL) {
        if (message->msg == CURLMSG_DONE) {
            events->done = 1;
            events->code = message->data.result;
        }
    }
    if (!events->done && now_ms() - events->heard_ms > QUIET_MS) {
        tv_client_problem_set(ret_problem, "the stream of events went quiet");
        return lost(events, -ETIMEDOUT, ret_problem);
    }
    return 0;
}

/* The transfer has ended and all of it was read: as lost. */
static int ended(struct tv_client_events *events, struct tv_client_problem *ret_problem)
{
    int error =
        tv_client_transfer_end(events->client, (int)events->code, &events->text, ret_problem);
    if (error == 0) {
        tv_client_problem_set(ret_problem, "the stream of events was cut");
        error = -EIO;
    }
    return lost(events, error, ret_problem);
}

/* One line "name: value" of a block. */
static void take_field(const char *line, size_t bytes, struct tv_client_event *event,
                       const char **ret_data, size_t *ret_bytes)
{
    const char *colon = memchr(line, ':', bytes);
    if (colon == NULL || colon == line) {
        return; /* a comment, or nothing of ours */
    }
    const char *value = colon + 1;
    size_t name = (size_t)(colon - line), rest = bytes - name - 1;
    if (rest > 0 && *value == ' ') {
        value++;
        rest--;
    }
    if (name == 5 && memcmp(line, "event", 5) == 0 && rest < sizeof(event->name)) {
        memcpy(event->name, value, rest);
        event->name[rest] = '\0';
    } else if (name == 2 && memcmp(line, "id", 2) == 0) {
        int64_t id = 0;
        for (size_t i = 0; i < rest && value[i] >= '0' && value[i] <= '9' && id < INT32_MAX; i++) {
            id = 10 * id + (value[i] - '0');
        }
        event->id = id < INT32_MAX ? (int32_t)id : -1;
    } else if (name == 4 && memcmp(line, "data", 4) == 0) {
        *ret_data = value;
        *ret_bytes = rest;
    }
}

/* Take one event of the text: 1; 0: there is no whole one; -EBADMSG; -ENOMEM. */
static int next_event(struct tv_client_events *events, struct tv_client_event *ret_event)
{
    static const struct tv_json_limits limits = {.depth_max = EVENT_DEPTH_MAX,
                                                 .values_max = EVENT_BYTES_MAX};
    for (;;) {
        const char *text = events->text.data + events->read;
        size_t bytes = events->text.bytes - events->read, data_bytes = 0;
        const char *end = bytes > 0 ? memmem(text, bytes, "\n\n", 2) : NULL;
        const char *data = NULL;
        struct tv_client_event event = {.id = -1};
        struct tv_json *doc = NULL;
        struct tv_json_error where;
        if (end == NULL) {
            return 0;
        }
        for (const char *line = text; line < end;) {
            const char *stop = memchr(line, '\n', (size_t)(end - line));
            stop = stop != NULL ? stop : end;
            take_field(line, (size_t)(stop - line), &event, &data, &data_bytes);
            line = stop + 1;
        }
        events->read += (size_t)(end + 2 - text);
        if (data == NULL) {
            continue; /* a comment alone */
        }
        int error = tv_json_parse(data, data_bytes, &limits, &doc, &where);
        if (error != 0 || tv_json_type(tv_json_root(doc)) != TV_JSON_OBJECT) {
            tv_json_destroy(doc);
            return error == -ENOMEM ? error : -EBADMSG;
        }
        tv_client_answer_finish(&events->data);
        events->data =
            (struct tv_client_answer){.http_status = 200, .doc = (struct tv_client_document *)doc};
        event.data = &events->data;
        *ret_event = event;
        return 1;
    }
}

/* What has been read makes room for what comes. */
static void drop_read(struct tv_client_events *events)
{
    if (events->read > 0) {
        events->text.bytes -= events->read;
        memmove(events->text.data, events->text.data + events->read, events->text.bytes);
        events->read = 0;
    }
}

/* An event if the text has one: 1, and how far the stream was read. */
static int give(struct tv_client_events *events, struct tv_client_event *ret_event,
                struct tv_client_problem *ret_problem)
{
    long status = 0;
    (void)curl_easy_getinfo(tv_client_curl(events->client), CURLINFO_RESPONSE_CODE, &status);
    if (events->open && status != 200) {
        return 0; /* a problem's text is no event */
    }
    int found = next_event(events, ret_event);
    if (found == 1) {
        events->failures = (struct tv_client_failures){0};
        events->started_ms = now_ms();
        events->last = ret_event->id >= 0 ? ret_event->id : events->last;
        events->over = strcmp(ret_event->name, "end") == 0;
        return 1;
    }
    drop_read(events);
    if (found == -EBADMSG) {
        return tv_client_not_the_contract("an event that is not an object", ret_problem);
    }
    if (found != 0) {
        tv_client_problem_set(ret_problem, "out of memory");
    }
    return found;
}

int tv_client_events_next(struct tv_client_events *events, int32_t wait_ms,
                          struct tv_client_event *ret_event, struct tv_client_problem *ret_problem)
{
    int64_t until = now_ms() + (wait_ms > 0 ? wait_ms : 0);
    tv_client_problem_set(ret_problem, "no event came");
    for (int first = 1;; first = 0) {
        int found = give(events, ret_event, ret_problem);
        if (found != 0) {
            return found == 1 ? tv_client_end(0, ret_problem) : found;
        }
        if (events->over) {
            tv_client_problem_set(ret_problem, "the stream has ended");
            return -ENODATA;
        }
        int error = events->done ? ended(events, ret_problem) : 0;
        if (error != 0) {
            return error;
        }
        int64_t left = until - now_ms();
        if (left <= 0 && !first) {
            tv_client_problem_set(ret_problem, "no event came");
            return -EAGAIN;
        }
        int64_t rest = events->not_before_ms - now_ms();
        if (!events->open && rest > 0) {
            rest = rest < left ? rest : left;
            (void)curl_multi_poll(events->multi, NULL, 0, rest > 0 ? (int)rest : 0, NULL);
        } else if (!events->open) {
            error = connect_again(events, ret_problem);
        } else {
            error = look(events, left > 0 ? left : 0, ret_problem);
        }
        if (error != 0) {
            return error;
        }
    }
}
