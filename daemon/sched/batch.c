/*
 * batch.c - POST /v1/verify:batch: one call whose items are calls of their own.
 *
 * Every item is admitted under one lock, so that those of different sessions can enter one launch;
 * the answer is put together by whoever completes the last. Refuses to let one item's fault touch
 * another.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "sched/job.h"

struct tv_batch {
    struct tv_call *call;   /* who asked, and owns this */
    int32_t count;          /* of items */
    struct tv_call **items; /* [count], owned; each with its answer once it is complete */
    /* Items without an answer, and functions that still look at the batch. acq_rel: answers are
     * written before, and read after, the last one leaves. */
    atomic_int holders;
};

void tv_sched_batch_destroy(struct tv_batch *batch)
{
    if (batch == NULL) {
        return;
    }
    for (int32_t i = 0; i < batch->count; i++) {
        tv_call_destroy(batch->items[i]);
    }
    free(batch->items);
    free(batch);
}

/* Everybody has left: the items' answers become the batch's. */
static void conclude(struct tv_batch *batch)
{
    struct tv_batch_answer answers[TV_BATCH_ITEMS_MAX];
    size_t bytes = 64;
    int lost = 0;
    struct tv_buf body;
    for (int32_t i = 0; i < batch->count; i++) {
        const struct tv_reply *reply = &batch->items[i]->reply;
        answers[i] = (struct tv_batch_answer){
            .status = reply->http_status, .body = reply->body.data, .bytes = reply->body.bytes};
        lost |= reply->body.failed != 0;
        bytes += reply->body.bytes + 64;
    }
    tv_buf_init(&body, bytes);
    if (!lost) {
        tv_encode_batch(&body, answers, batch->count);
    }
    if (lost || body.failed != 0) { /* some may be committed: no answer, and the retry gets one */
        tv_buf_finish(&body);
        tv_buf_finish(&batch->call->reply.body);
        batch->call->reply.http_status = 500;
        batch->call->reply.body.failed = -ENOMEM;
        return;
    }
    tv_sched_reply_set(batch->call, 200, &body);
}

/* 1: it was the last holder, and the answer is there. */
static int leave(struct tv_batch *batch)
{
    if (atomic_fetch_sub_explicit(&batch->holders, 1, memory_order_acq_rel) > 1) {
        return 0;
    }
    conclude(batch);
    return 1;
}

static void item_done(struct tv_call *item)
{
    struct tv_batch *batch = item->owner;
    struct tv_call *call = batch->call;
    if (leave(batch)) {
        call->done(call); /* may free the batch */
    }
}

/* The items as calls; the decoded requests move into them. */
static struct tv_batch *batch_make(struct tv_call *call)
{
    struct tv_request *request = &call->request;
    size_t count = (size_t)request->item_count;
    struct tv_batch *batch = calloc(1, sizeof *batch);
    if (batch == NULL) {
        return NULL;
    }
    batch->call = call;
    batch->items = calloc(count, sizeof(struct tv_call *));
    for (size_t i = 0; batch->items != NULL && i < count; i++) {
        struct tv_call *item = tv_call_create();
        if (item == NULL) {
            break;
        }
        batch->items[batch->count++] = item;
        item->request = request->items[i].request;
        request->items[i].request = (struct tv_request){0};
        memcpy(item->principal, call->principal, sizeof item->principal);
        memcpy(item->request_id, call->request_id, sizeof item->request_id);
        item->received_us = call->received_us;
        item->done = item_done;
        item->owner = batch;
    }
    if ((size_t)batch->count < count) {
        tv_sched_batch_destroy(batch);
        return NULL;
    }
    atomic_init(&batch->holders, (int)count + 1);
    return batch;
}

int tv_sched_batch_submit(struct tv_sched *sched, struct tv_call *call)
{
    struct tv_call *waiting[TV_BATCH_ITEMS_MAX];
    int queued[TV_BATCH_ITEMS_MAX] = {0};
    int32_t count = 0;
    struct tv_batch *batch = batch_make(call);
    if (batch == NULL) {
        tv_sched_reply_refuse(call, TV_INTERNAL, NULL, "no memory for the batch");
        return 0;
    }
    atomic_store_explicit(&call->batch, batch, memory_order_release);
    for (int32_t i = 0; i < batch->count; i++) {
        struct tv_request_item *item = &call->request.items[i];
        if (item->refused) {
            tv_sched_refuse(batch->items[i], &item->problem);
        } else {
            waiting[count++] = batch->items[i];
        }
    }
    tv_sched_admit_all(sched, waiting, count, queued);
    int answered = batch->count - count;
    for (int32_t i = 0; i < count; i++) {
        answered += !queued[i];
    }
    /* all but the last hold, which may be the one that concludes */
    (void)atomic_fetch_sub_explicit(&batch->holders, answered, memory_order_acq_rel);
    return !leave(batch);
}

void tv_sched_batch_cancel(struct tv_sched *sched, struct tv_batch *batch)
{
    int holders = atomic_load_explicit(&batch->holders, memory_order_acquire);
    do {
        if (holders == 0) {
            return; /* its answer is there */
        }
    } while (!atomic_compare_exchange_weak_explicit(&batch->holders, &holders, holders + 1,
                                                    memory_order_acq_rel, memory_order_acquire));
    for (int32_t i = 0; i < batch->count; i++) {
        tv_sched_cancel(sched, batch->items[i]); /* of one that is complete nothing is found */
    }
    struct tv_call *call = batch->call;
    if (leave(batch)) {
        call->done(call);
    }
}
