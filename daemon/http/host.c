/*
 * host.c - under which names an open listener may be called.
 *
 * Without keys whoever reaches the listener may do everything, and a page in a browser reaches it
 * by a name of its own that it lets lead to this machine (DNS rebinding). Such a request says that
 * name in Host, and is refused; localhost, the addresses of loopback, and the names of the
 * configuration are taken. With keys the key decides.
 */
#include <arpa/inet.h>
#include <errno.h>
#include <string.h>
#include <strings.h>

#include "http/conn.h"

#define NAME_BYTES_MAX 253

static int is_name(const char *text, size_t bytes, const char *name)
{
    return bytes == strlen(name) && strncasecmp(text, name, bytes) == 0;
}

static int is_loopback(const char *text, size_t bytes)
{
    char host[INET6_ADDRSTRLEN + 2];
    struct in_addr v4;
    struct in6_addr v6;
    if (is_name(text, bytes, "localhost")) {
        return 1;
    }
    if (bytes >= sizeof host || memchr(text, '\0', bytes) != NULL) {
        return 0;
    }
    memcpy(host, text, bytes);
    host[bytes] = '\0';
    if (inet_pton(AF_INET, host, &v4) == 1) {
        return ntohl(v4.s_addr) >> 24 == 127;
    }
    if (bytes < 4 || host[0] != '[' || host[bytes - 1] != ']') {
        return 0;
    }
    host[bytes - 1] = '\0';
    return inet_pton(AF_INET6, host + 1, &v6) == 1 && IN6_IS_ADDR_LOOPBACK(&v6);
}

static int is_configured(const char *hosts, const char *text, size_t bytes)
{
    while (hosts[0] != '\0') {
        size_t name = strcspn(hosts, ",");
        if (name == bytes && strncasecmp(hosts, text, bytes) == 0) {
            return 1;
        }
        hosts += name + (hosts[name] == ',');
    }
    return 0;
}

int tv_http_host_check(const struct tv_config *config, const struct http_headers *headers,
                       struct tv_problem *problem)
{
    const char *host = headers->host;
    size_t bytes = headers->host_bytes;
    if (host == NULL || config->api_key_file[0] != '\0' || strcmp(config->hosts, "any") == 0) {
        return 0; /* no Host is one of HTTP/1.0, which no browser speaks */
    }
    size_t digits = bytes;
    while (digits > 0 && host[digits - 1] >= '0' && host[digits - 1] <= '9') {
        digits--;
    }
    if (digits > 0 && host[digits - 1] == ':') {
        bytes = digits - 1;
    }
    if (is_loopback(host, bytes) || (bytes > 0 && is_configured(config->hosts, host, bytes))) {
        return 0;
    }
    tv_problem_set(problem, TV_FORBIDDEN, NULL,
                   "Host %.*s is no name of this server (its setting hosts)",
                   (int)(bytes < NAME_BYTES_MAX ? bytes : NAME_BYTES_MAX), host);
    return -EINVAL;
}
