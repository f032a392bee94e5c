/*
 * http.h - the listeners: bytes on sockets in, decoded calls down to sched/, answers back.
 *
 * Two libmicrohttpd daemons: the work listener and a small admin listener whose probes survive
 * floods of the first. Owns sockets, header checks, caps, deadlines, and the notice of clients that
 * leave; knows nothing of sessions.
 */
#ifndef TV_HTTP_HTTP_H
#define TV_HTTP_HTTP_H

#include <stddef.h>
#include <stdint.h>

#include "config/config.h"
#include "sched/sched.h"

struct tv_http;

/* Listening sockets that somebody else has bound; -1: the configuration's address is bound here.
 * Taken over by tv_http_create, whatever it says. */
struct tv_http_sockets {
    int work, admin;
};

/* Could the addresses be bound now? They are free again on return. As tv_http_create, which
 * decides: this is for saying so before a long load. */
int tv_http_probe(const struct tv_config *config, const struct tv_http_sockets *sockets,
                  char *error, size_t error_bytes);
/* Can the files of keys and certificate be used that the configuration names? 0 or -EBADMSG. */
int tv_http_check(const struct tv_config *config, char *error, size_t error_bytes);
/* Bind and serve. sched outlives it until tv_http_close; config and stats, the daemon's, until
 * tv_http_destroy. -EADDRINUSE, -EADDRNOTAVAIL,
 * -EACCES and the like with text: an address cannot be bound; -EBADMSG: as tv_http_check (exit
 * 78); -ENOMEM, -EAGAIN. */
int tv_http_create(const struct tv_config *config, const struct tv_http_sockets *sockets,
                   struct tv_sched *sched, struct tv_stats *stats, struct tv_http **ret_http,
                   char *error, size_t error_bytes);
/* Read the files of keys and certificate again, and take over the limits of a configuration that is
 * the first one but for what can change. 0, or -EBADMSG with text and everything as it was. */
int tv_http_reload(struct tv_http *http, const struct tv_config *config, char *error,
                   size_t error_bytes);
/* "http://127.0.0.1:8471", with TLS "https:"; admin: "" when that listener is off. */
const char *tv_http_url(const struct tv_http *http, int admin);
/* Connections of the work listener that are in a request, or were within the last quiet_ms. */
int32_t tv_http_open_count(struct tv_http *http, int64_t quiet_ms);
/* Tell those who follow a session that the process ends, by then at the latest. */
void tv_http_drain(struct tv_http *http, int64_t deadline_unix_ms);
/* No new connections, and no call reaches sched/ any more (503 draining); on return sched may be
 * destroyed, which completes every call that is still waiting. */
void tv_http_close(struct tv_http *http);
/* After tv_http_close and the end of sched: writes what is still to be written, for a bounded time,
 * then stops everything. */
void tv_http_destroy(struct tv_http *http);

#endif
