/*
 * page.h - the embedded status page; private to http/. page_embed.py writes what it declares.
 */
#ifndef TV_HTTP_PAGE_H
#define TV_HTTP_PAGE_H

#include <stddef.h>

extern const unsigned char tv_http_page_text[];
extern const size_t tv_http_page_bytes;
extern const char tv_http_page_policy[]; /* Content-Security-Policy, with the page's hashes */

#endif
