/*
 * routes.h - which call a method and a path name; private to http/.
 */
#ifndef TV_HTTP_ROUTES_H
#define TV_HTTP_ROUTES_H

#include "proto/request.h"
#include "stats/stats.h"

enum http_body { HTTP_BODY_NONE, HTTP_BODY_SMALL, HTTP_BODY_LARGE };

struct http_route {
    enum tv_call_kind kind;
    enum http_body body;
    size_t path; /* of tv_http_paths; TV_STATS_ROUTES - 1: none */
};

/* Split the request target at '?', find the route, and fill kind and path parts of *request. 0, or
 * -EINVAL with the problem set (not-found, method-not-allowed, round-not-found, bad-request). */
int tv_http_route(const char *uri, const char *method, int admin, struct http_route *ret_route,
                  struct tv_request *request, struct tv_problem *problem);
/* The paths as their requests are counted, a star for what varies. At most TV_STATS_ROUTES - 1. */
size_t tv_http_paths(const char **ret_names, size_t names_max);
/* Apply the query of the request target to *request. 0, or -EINVAL with the problem set. */
int tv_http_query(const char *uri, const struct tv_request_limits *limits,
                  struct tv_request *request, struct tv_problem *problem);

#endif
