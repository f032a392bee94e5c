/*
 * page.c - the status page at / of the admin listener, as the build has embedded it.
 *
 * Owns the headers that tell a browser how little this page may do. What the page shows it fetches
 * itself, with the key that whoever looks at it has typed; nothing of that is in here.
 */
#include <errno.h>

#include "http/conn.h"
#include "http/status_page.h" /* page_text, page_policy: written by the build */

void tv_http_page(struct tv_call *call)
{
    struct tv_reply *reply = &call->reply;
    tv_buf_init(&reply->body, sizeof page_text);
    tv_buf_append(&reply->body, page_text, sizeof page_text);
    if (reply->body.failed != 0) {
        struct tv_problem problem;
        tv_problem_set(&problem, TV_INTERNAL, NULL, "no memory for the page");
        tv_sched_refuse(call, &problem);
        return;
    }
    reply->http_status = 200;
    reply->content_type = "text/html; charset=utf-8";
}

int tv_http_page_headers(struct MHD_Response *response)
{
    static const char *const headers[][2] = {
        {"Content-Security-Policy", page_policy},
        {"X-Content-Type-Options", "nosniff"},
        {"X-Frame-Options", "DENY"},
        {"Referrer-Policy", "no-referrer"},
        {"Cross-Origin-Opener-Policy", "same-origin"},
        {"Cross-Origin-Resource-Policy", "same-origin"},
        {"Cache-Control", "no-store"},
    };
    for (size_t i = 0; i < sizeof headers / sizeof headers[0]; i++) {
        if (MHD_add_response_header(response, headers[i][0], headers[i][1]) != MHD_YES) {
            return -ENOMEM;
        }
    }
    return 0;
}
