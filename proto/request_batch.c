/*
 * request_batch.c - the items of a batch: each is decoded by itself, and its faults are its own.
 *
 * Refuses the whole only for what is no list of items; an item that is refused does not run and
 * leaves the others alone.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "proto/request_fields.h"

/* Pointers of an item's faults are those of the body. */
static void deepen(struct tv_problem *problem, size_t index)
{
    char pointer[sizeof problem->pointer];

    if (strncmp(problem->pointer, "/items/", 7) != 0) {
        memcpy(pointer, problem->pointer, sizeof pointer);
        (void)snprintf(problem->pointer, sizeof problem->pointer, "/items/%zu%.72s", index,
                       pointer); /* those of a tree are short */
    }
}

/* One item, NULL for a number of many; `limits` has the bytes that the items before it have left. 0
 * or -ENOMEM. */
static int read_item(struct tv_request_reader *reader, const struct tv_json_value *value,
                     size_t index, struct tv_request_limits *limits, struct tv_request_item *item)
{
    struct tv_request_reader own = {
        .doc = reader->doc, .limits = limits, .request = &item->request, .problem = &item->problem};
    int used = snprintf(own.pointer, sizeof own.pointer, "/items/%zu", index); /* fits */
    int rc;

    own.pointer_bytes = (size_t)used;
    tv_request_init(&item->request, TV_CALL_VERIFY);
    if (value == NULL || tv_json_type(value) != TV_JSON_OBJECT) {
        rc = tv_request_refuse(&own, TV_WRONG_TYPE, "an object is expected");
    } else {
        rc = tv_request_read_verify(&own, value, 1);
    }
    if (rc == 0) {
        limits->inline_bytes -= item->request.want.inline_bytes_most;
        if (limits->fetch_bytes > 0) { /* within it; what is left of a limit is never no limit */
            limits->fetch_bytes -= item->request.want.fetch_bytes_most;
            limits->fetch_bytes += limits->fetch_bytes == 0;
        }
        tv_request_hash(&item->request);
        return 0;
    }
    tv_request_finish(&item->request);
    if (rc == -EINVAL) {
        item->refused = 1;
        deepen(&item->problem, index);
        rc = 0;
    }
    return rc;
}

TV_REQUEST_READER(tv_request_read_items)
{
    struct tv_request *request = base;
    struct tv_request_limits limits = *reader->limits;
    const struct tv_json_value *item;
    size_t count = tv_json_count(value);
    int rc = 0;

    (void)field; /* writes two members */
    if (tv_json_type(value) != TV_JSON_ARRAY) {
        return tv_request_refuse(reader, TV_WRONG_TYPE, "an array of objects is expected");
    }
    if (count < 1 || count > TV_BATCH_ITEMS_MAX) {
        return tv_request_refuse(reader, TV_WRONG_VALUE, "from 1 to %d items", TV_BATCH_ITEMS_MAX);
    }
    request->items = calloc(count, sizeof *request->items);
    if (request->items == NULL) {
        return -ENOMEM;
    }
    item = tv_json_first(value); /* none of many numbers and nothing else */
    for (size_t i = 0; i < count && rc == 0; i++) {
        rc = read_item(reader, item, i, &limits, &request->items[i]);
        request->item_count++;
        item = item != NULL ? tv_json_next(item) : NULL;
    }
    return rc;
}

void tv_request_items_finish(struct tv_request *request)
{
    int32_t i;

    for (i = 0; i < request->item_count; i++) {
        tv_request_finish(&request->items[i].request);
        tv_problem_finish(&request->items[i].problem);
    }
    free(request->items);
    request->items = NULL;
    request->item_count = 0;
}
