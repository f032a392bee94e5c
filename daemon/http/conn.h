/*
 * conn.h - one connection and its current request; private to http/.
 *
 * A connection carries one request at a time, so both live in one struct. What is marked "registry
 * lock" is read and written under it, except that the listener's thread, which alone writes
 * `phase`, may read it without; the rest belongs to the listener's thread.
 */
#ifndef TV_HTTP_CONN_H
#define TV_HTTP_CONN_H

#include <microhttpd.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

#include "http/http.h"
#include "http/routes.h"
#include "http/tls.h"

#define HTTP_HEADERS_US          (10 * 1000000LL) /* from accept, or from a later request line */
#define HTTP_IDLE_US             (25 * 1000000LL) /* from an answer to the next request line */
#define HTTP_IDLE_S              15               /* without any byte: libmicrohttpd's own clock */
#define HTTP_BODY_US             (30 * 1000000LL)
#define HTTP_BODY_START_US       (5 * 1000000LL)  /* from then on at least HTTP_BODY_RATE */
#define HTTP_BODY_RATE           1024             /* bytes per second */
#define HTTP_WRITE_US            (30 * 1000000LL) /* without progress */
#define HTTP_LINGER_US           (2 * 1000000LL)  /* reading on after a refusal */
#define HTTP_TICK_MS             50
#define HTTP_URI_BYTES_MAX       8192 /* every node of a tree in a list, its commas escaped, fits */
#define HTTP_URI_KEPT_BYTES      256
#define HTTP_BODY_KEPT_BYTES     (64u << 10) /* a connection keeps a buffer of this size */
#define HTTP_BODIES_BYTES_MIN    (256u << 20)
#define HTTP_STOP_WRITE_US       (2 * 1000000LL)
#define HTTP_RELIEF_SAID_US      (10 * 1000000LL) /* one line in the log for so long */
#define HTTP_STREAM_QUIET_US     (10 * 1000000LL) /* then a comment, or where the lease ends now */
#define HTTP_STREAM_BLOCK_BYTES  4096
#define HTTP_STREAM_UNREAD_BYTES (64 << 10) /* in the kernel, which doubles it */
#define HTTP_STREAM_RETRY_S      5

enum http_phase {
    HTTP_IDLE,      /* between requests */
    HTTP_HEADERS,   /* reading request line and headers */
    HTTP_BODY,      /* reading the body */
    HTTP_WAITING,   /* the call is at sched/ */
    HTTP_WRITING,   /* an answer is queued */
    HTTP_REFUSED,   /* answered early; the rest of the body is read and dropped */
    HTTP_STREAMING, /* the answer goes on */
};

/* Who resumes a connection: whichever of listener and completion comes second. */
enum http_call_state { HTTP_CALL_RUNNING, HTTP_CALL_PARKED, HTTP_CALL_DONE };

/* An answer that goes on. What is not marked belongs to the listener's thread; while it is parked,
 * the call's cursor too is only read. */
struct http_stream {
    struct http_conn *prev, *next; /* registry lock */
    int parked;                    /* registry lock: suspended, to be resumed by the watch thread */
    int gone;                      /* registry lock: the client left, or there is no memory */
    int64_t written_us;            /* registry lock: when something was written last */
    int64_t draining_unix_ms;      /* registry lock: as it was told; 0: it was not */
    int32_t violation;             /* registry lock: the newest that was told */
    int64_t lease_unix_ms;         /* as it was told */
    int ended;                     /* the last text is there */
    enum tv_stats_stream end;
    char *text; /* owned; what is being written, from `at` on */
    size_t bytes, at;
};

struct http_conn {
    struct tv_http *http;
    struct MHD_Connection *connection;
    struct http_conn *prev, *next; /* registry lock */
    int admin, fd;
    struct http_tls *tls;     /* one reference; NULL: no TLS */
    enum http_phase phase;    /* registry lock */
    int64_t deadline_us;      /* registry lock; INT64_MAX: none */
    int64_t body_start_us;    /* registry lock */
    int64_t active_us;        /* registry lock: the last change of phase */
    uint64_t acked;           /* registry lock: bytes the peer had acknowledged */
    size_t answer_bytes;      /* registry lock: its part of answers_bytes */
    int cancelled;            /* registry lock: the client left, sched/ was told */
    int cut;                  /* registry lock: the clock has shut it down */
    atomic_size_t body_bytes; /* relaxed: the clock only needs a recent value */
    atomic_int call_state;    /* enum http_call_state */

    char *uri; /* owned, [uri_capacity]; a text while a request is there */
    size_t uri_capacity;
    int uri_bad; /* too long, or with bytes no request line may have */
    struct http_route route;
    struct tv_call *call; /* owned; NULL between requests */
    int is_get, close;
    int is_received; /* counted, and not yet as answered or given up */
    int is_refused;  /* the call has its answer, which waits for the request's end */
    char *body;      /* owned */
    size_t body_capacity, body_max;
    struct http_stream *stream; /* owned; NULL: the answer is no stream */
};

struct http_listener {
    struct tv_http *http;
    struct MHD_Daemon *daemon; /* NULL: off, or not started */
    int fd;                    /* listens; -1: off */
    int silent_fd, silent_end; /* a pair: what libmicrohttpd listens to, and our end of it */
    int32_t connections_max;   /* open at once */
    uint64_t handed;           /* the accepting thread's: connections given to libmicrohttpd */
    int64_t handed_us;         /* the accepting thread's: the last of them */
    atomic_uint_least64_t begun, ended; /* of those, by the threads that serve them */
    char url[96];
};

struct tv_http {
    struct tv_sched *sched;
    struct tv_stats *stats; /* not owned */
    struct tv_request_limits limits;
    size_t body_bytes, body_bytes_large;
    struct http_listener work, admin;

    pthread_mutex_t lock; /* the registry: list, count and what http_conn marks */
    struct http_conn *conns;
    int32_t conn_count;
    size_t answers_bytes; /* registry lock: held for answers being written, but for cut ones */
    size_t answers_bytes_max;
    int64_t relief_said_us;    /* registry lock: when the log last had it */
    struct http_conn *streams; /* registry lock: those with a stream */
    int32_t stream_count;      /* registry lock */
    int32_t event_readers_max;
    int64_t draining_unix_ms; /* registry lock: the latest end of the process; 0: not draining */
    struct tv_parity_violation violation; /* registry lock: the newest; n 0: none */
    int bell;                             /* an eventfd that wakes the watch thread; -1: none */
    int watching;                         /* registry lock: the watch thread goes on */
    int closing; /* registry lock: sched/ must not be called by the watch thread */
    pthread_t watch;
    int watch_started;

    pthread_t accept;
    int accept_started;
    int accept_bell;        /* an eventfd that wakes the accepting thread; -1: none */
    atomic_int accept_ends; /* it is to return */

    const struct tv_config *config; /* not owned; the names of files, which never change */
    pthread_mutex_t secrets_lock;   /* guards keys and tls */
    struct tv_keys keys;
    struct http_tls *tls;  /* one reference; NULL: no TLS */
    int64_t tls_looked_us; /* the watch thread's */

    /* seq_cst: a submitter counts itself before it reads `closed`, the closer sets `closed` before
     * it reads the count; one of them must see the other. */
    atomic_int closed, submitting;
    atomic_size_t bodies_bytes; /* relaxed: a sum of buffers held, compared with a cap */
    size_t bodies_bytes_max;
    uint64_t id_prefix;
    atomic_uint_least64_t id_next; /* relaxed: only uniqueness matters */
};

/* access.c: libmicrohttpd's callbacks. */
enum MHD_Result tv_http_access(void *context, struct MHD_Connection *connection, const char *url,
                               const char *method, const char *version, const char *upload,
                               size_t *upload_bytes, void **request);
void *tv_http_uri(void *context, const char *uri, struct MHD_Connection *connection);
void tv_http_completed(void *context, struct MHD_Connection *connection, void **request,
                       enum MHD_RequestTerminationCode code);
void tv_http_connection(void *context, struct MHD_Connection *connection, void **socket_context,
                        enum MHD_ConnectionNotificationCode code);

/* accept.c: new connections. A socket for a listener's libmicrohttpd that nobody can reach: 0 or
 * -errno, as the start; and the stop, after which nobody is let in. */
int tv_http_accept_prepare(struct http_listener *listener);
int tv_http_accept_start(struct tv_http *http);
void tv_http_accept_stop(struct tv_http *http);

/* conn.c: the registry. */
struct http_conn *tv_http_conn_create(struct tv_http *http, struct MHD_Connection *connection,
                                      int admin);
void tv_http_conn_destroy(struct http_conn *conn);
/* 0; -EPIPE: the clock has cut the connection meanwhile. */
int tv_http_conn_enter(struct http_conn *conn, enum http_phase phase);
/* 0; -EMSGSIZE: over the limit of this body; -ENOBUFS: over the limit of all bodies; -ENOMEM. */
int tv_http_conn_append(struct http_conn *conn, const char *data, size_t bytes);
void tv_http_conn_body_free(struct http_conn *conn);
/* Keep a copy of the request target; one that is too long is kept as "" and bad. 0 or -ENOMEM. */
int tv_http_conn_uri(struct http_conn *conn, const char *uri);
void tv_http_conn_uri_free(struct http_conn *conn);

/* How many requests run and connections are open, told to the stats. */
void tv_http_gauges_set(struct tv_http *http);

/* page.c: the status page is the call's answer; and what a browser must be told with it. */
void tv_http_page(struct tv_call *call);
int tv_http_page_headers(struct MHD_Response *response); /* 0 or -ENOMEM */

/* answer.c: from a completed call to bytes. */
enum MHD_Result tv_http_answer(struct http_conn *conn);
/* Write the call's answer straight to the socket and half-close it; the peer may still be sending.
 */
void tv_http_answer_raw(struct http_conn *conn);
/* The same for a request that came too slowly. Registry lock held. */
void tv_http_answer_timeout(struct http_conn *conn);
/* stream.c. The call's answer is a stream: 1; or 0: it was refused, or is for HEAD, and is a plain
 * answer now. */
int tv_http_stream_begin(struct http_conn *conn);
struct MHD_Response *tv_http_stream_response(struct http_conn *conn);
/* The request is over; nothing without a stream. */
void tv_http_stream_end(struct http_conn *conn, int timed_out);
/* Resume those that have something to write; all: every one. Without the lock. */
void tv_http_streams_wake(struct tv_http *http, int all);
/* After a reload: cut those whose key name is no longer in the file. */
void tv_http_streams_review(struct tv_http *http);
/* range.c. 1, with the part of the answer that is asked for; 0: the whole answer. */
int tv_http_range(const struct http_conn *conn, size_t *ret_first, size_t *ret_count);
int tv_http_range_parse(const char *text, size_t bytes, size_t *ret_first, size_t *ret_count);
/* A request id of our own. */
void tv_http_request_id(struct tv_http *http, char *ret_id, size_t bytes);

/* headers.c: one walk over the headers. 0, or -EINVAL with the problem set. */
struct http_headers {
    int has_length, is_chunked, wants_continue;
    int has_body; /* chunked, or a length above 0 */
    uint64_t length;
    int is_json;                                  /* the media type of the body */
    char request_id[TV_REQUEST_ID_BYTES_MAX + 1]; /* "" when none is usable */
    const char *host; /* NULL: none; the connection's, valid during the callback */
    size_t host_bytes;
    int credentials;     /* how many Authorization there are */
    const char *secret;  /* of a bearer key, the connection's; valid during the callback */
    size_t secret_bytes; /* 0: none of use */
    int keys;            /* how many Idempotency-Key there are */
    char key[TV_KEY_BYTES_MAX + 1]; /* the last one, "" when it is of no use */
    int last_events;                /* how many Last-Event-ID there are */
    int32_t last_event;             /* the last one; -1: it is of no use */
};
int tv_http_headers_walk(struct MHD_Connection *connection, const char *version,
                         struct http_headers *ret_headers, struct tv_problem *problem);

/* host.c. May a server without keys be called by this name? 0, or -EINVAL with the problem set. */
int tv_http_host_check(const struct tv_config *config, const struct http_headers *headers,
                       struct tv_problem *problem);

/* secrets.c. Read the files of keys and certificate that there are, and put them in force. -EBADMSG
 * with text, and with everything as it was. */
int tv_http_secrets_load(struct tv_http *http, char *error, size_t error_bytes);
void tv_http_secrets_finish(struct tv_http *http);
/* A reference to the pair in force, or NULL. */
struct http_tls *tv_http_tls_current(struct tv_http *http);
/* The watch thread, often: once a day the log has how long the certificate is good. */
void tv_http_tls_look(struct tv_http *http);

/* auth.c. May this request be: 0 and the call has its principal, or -EINVAL with the problem set.
 */
int tv_http_authorize(struct http_conn *conn, const struct http_headers *headers, int is_routed,
                      struct tv_problem *problem);

/* Is there a key of this name that may still verify? */
int tv_http_key_named(struct tv_http *http, const char *name);

/* watch.c: the clock and the notice of clients that left. */
/* This connection begins to write its call's answer. Where all of them are too much, the ones cut
 * are those whose peers have taken nothing for longest. Registry lock held. */
void tv_http_answer_weigh(struct http_conn *conn, int64_t now_us);
/* It has ended or is given up. Registry lock held. */
void tv_http_answer_unweigh(struct http_conn *conn);
/* Something has happened that a stream tells of. Any thread, whatever it holds. */
void tv_http_bell_ring(void *http);
int tv_http_watch_start(struct tv_http *http);
void tv_http_watch_stop(struct tv_http *http);

#endif
