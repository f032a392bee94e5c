/*
 * batch.c - POST /v1/verify:batch: one call whose items are calls of their own.
 *
 * Every item is admitted under one lock, so that those of different sessions can enter one launch;
 * the answer is put together by whoever completes the last, and goes to all who sent the same batch
 * with the same key meanwhile. Refuses to let one item's fault touch another, to multiply large
 * answers, and to keep by a key what had better be tried again.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "sched/job.h"

struct tv_batch {
    struct tv_sched *sched;
    struct tv_call *call; /* who asked, and owns this */
    /* What the table knows of its key; NULL: it came without one. Guarded by the lock, as is: */
    struct tv_session_key *key;
    struct tv_call *twins;  /* the same batch, sent again meanwhile */
    struct tv_batch *next;  /* of those with a key that are under way */
    int is_left;            /* who asked has gone */
    size_t together;        /* bytes of answers that needed nothing computed */
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

int tv_sched_batch_room(const struct tv_sched *sched, const struct tv_call *call)
{
    return call->together == NULL || tv_sched_copy_room(sched, *call->together);
}

int tv_sched_batch_join(struct tv_batch *batch, struct tv_call *call, struct tv_problem *problem)
{
    if (tv_sched_waiters_room(batch->twins, problem) != 0) {
        return -EINVAL;
    }
    tv_sched_batch_renew(batch->sched, call, 1); /* of its rounds that are over already */
    call->next = batch->twins;
    batch->twins = call;
    return 0;
}

void tv_sched_batch_renew(struct tv_sched *sched, const struct tv_call *call, int joined)
{
    const struct tv_request *request = &call->request;
    int64_t now_us = tv_clock_us();
    for (int32_t i = 0; i < request->item_count; i++) {
        const struct tv_request *item = &request->items[i].request;
        struct tv_session *session = NULL;
        if (request->items[i].refused ||
            tv_sessions_find(&sched->table, item->session, call->principal, now_us, &session) !=
                TV_OK ||
            item->seq >= session->next_seq) { /* a refused one renews nothing */
            continue;
        }
        int32_t lease_s = joined && item->lease_s < session->lease_s ? 0 : item->lease_s;
        tv_session_renew(session, lease_s, now_us);
    }
}

/* The items' answers become the batch's. 1: sent again, it would get another one. */
static int answer(struct tv_batch *batch)
{
    struct tv_batch_answer answers[TV_BATCH_ITEMS_MAX];
    size_t bytes = 64;
    int lost = 0, again = 0;
    struct tv_buf body;
    for (int32_t i = 0; i < batch->count; i++) {
        const struct tv_reply *reply = &batch->items[i]->reply;
        answers[i] = (struct tv_batch_answer){
            .status = reply->http_status, .body = reply->body.data, .bytes = reply->body.bytes};
        lost |= reply->body.failed != 0;
        again |= reply->http_status >= 400 && tv_code_info(reply->code)->retryable;
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
        return 1;
    }
    tv_sched_reply_set(batch->call, 200, &body);
    return again;
}

/* With the lock: no call finds this batch under way any more. Takes over what is kept of its
 * answer; NULL: the key is free. */
static void key_end(struct tv_batch *batch, char *kept, size_t bytes)
{
    struct tv_sched *sched = batch->sched;
    tv_session_key_end(&sched->table, batch->key, "", kept, kept != NULL ? bytes : 0,
                       tv_clock_us());
    batch->key = NULL;
    struct tv_batch **link = &sched->batches;
    while (*link != batch) {
        link = &(*link)->next;
    }
    *link = batch->next;
}

/* One that has joined gets its copy, as far as there is room; *together: bytes of those before. */
static void reply_joined(const struct tv_batch *batch, struct tv_call *twin, size_t *together)
{
    const struct tv_buf *body = &batch->call->reply.body;
    if (body->failed != 0) {
        twin->reply.http_status = 500;
        twin->reply.body.failed = body->failed;
    } else if (tv_sched_copy_room(batch->sched, *together)) {
        *together += body->bytes;
        tv_sched_reply_stored(twin, 200, body->data, body->bytes);
    } else { /* sent again, it gets what is kept of the whole, or of each item */
        struct tv_problem problem;
        tv_problem_set(&problem, TV_OVERLOADED, NULL,
                       "done, but too many wait for an answer so large: ask again");
        for (int32_t i = 0; i < batch->count; i++) {
            problem.committed |= batch->items[i]->reply.http_status < 400;
        }
        tv_sched_refuse(twin, &problem);
    }
}

/* Everybody has left: the answer, for all who wait for it. Those but the first. It stays known by
 * its key, unless an item had better be tried again, or it is larger than all that may be kept. */
static struct tv_call *conclude(struct tv_batch *batch)
{
    char *kept = NULL;
    int again = answer(batch);
    if (batch->key == NULL) { /* written by holders alone, and they have left */
        return NULL;
    }
    const struct tv_buf *body = &batch->call->reply.body;
    if (!again && body->bytes <= TV_SESSION_KEY_BYTES_MAX) {
        kept = malloc(body->bytes);
    }
    if (kept != NULL) {
        memcpy(kept, body->data, body->bytes);
    }
    tv_sched_lock(batch->sched);
    key_end(batch, kept, body->bytes);
    struct tv_call *twins = batch->twins;
    batch->twins = NULL;
    for (const struct tv_call *call = twins; call != NULL; call = call->next) {
        tv_sched_batch_renew(batch->sched, call, 1); /* its rounds have ended for the first call */
    }
    tv_sched_unlock(batch->sched);
    size_t together = 0;
    for (struct tv_call *call = twins; call != NULL; call = call->next) {
        reply_joined(batch, call, &together);
    }
    return twins;
}

/* 1: it was the last holder, and the answer is there; the first call's is the caller's to hand
 * over, and the others' have been. */
static int leave(struct tv_batch *batch)
{
    struct tv_sched *sched = batch->sched;
    if (atomic_fetch_sub_explicit(&batch->holders, 1, memory_order_acq_rel) > 1) {
        return 0;
    }
    tv_sched_calls_done(sched, conclude(batch));
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
static struct tv_batch *batch_make(struct tv_sched *sched, struct tv_call *call)
{
    struct tv_request *request = &call->request;
    size_t count = (size_t)request->item_count;
    struct tv_batch *batch = calloc(1, sizeof *batch);
    if (batch == NULL) {
        return NULL;
    }
    batch->sched = sched;
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
        item->together = &batch->together;
    }
    if ((size_t)batch->count < count) {
        tv_sched_batch_destroy(batch);
        return NULL;
    }
    atomic_init(&batch->holders, (int)count + 1);
    return batch;
}

/* With the lock: is it known by its key? As tv_sched_key_judge, but refused ones have their answer,
 * and 1 says so too, as of one whose client has gone. */
static int known(struct tv_sched *sched, struct tv_call *call, int *ret_attached)
{
    struct tv_problem problem = {0};
    if (tv_sched_is_gone(call)) {
        tv_sched_refuse_gone(call);
        return 1;
    }
    int rc = tv_sched_key_judge(sched, call, ret_attached, &problem);
    if (rc < 0) {
        tv_sched_refuse(call, &problem);
    }
    sched->in_flight += *ret_attached;
    return rc != 0;
}

/* With the lock: every item is admitted or answered. How many are answered. */
static int admit(struct tv_batch *batch)
{
    struct tv_sched *sched = batch->sched;
    struct tv_call *call = batch->call, *waiting[TV_BATCH_ITEMS_MAX];
    int queued[TV_BATCH_ITEMS_MAX] = {0};
    int32_t count = 0;
    for (int32_t i = 0; i < batch->count; i++) {
        struct tv_request_item *item = &call->request.items[i];
        if (item->refused) {
            tv_sched_refuse(batch->items[i], &item->problem);
        } else {
            waiting[count++] = batch->items[i];
        }
    }
    tv_sched_admit_all(sched, waiting, count, queued);
    int answered = batch->count - count, served = 0;
    for (int32_t i = 0; i < count; i++) {
        answered += !queued[i];
        served |= queued[i] || waiting[i]->reply.http_status < 400;
    }
    if (served) { /* what is refused whole takes nobody's place */
        batch->key = tv_sched_key_claim(sched, call, batch);
    }
    if (batch->key != NULL) {
        batch->next = sched->batches;
        sched->batches = batch;
    }
    return answered;
}

int tv_sched_batch_submit(struct tv_sched *sched, struct tv_call *call)
{
    int attached = 0;
    tv_sched_lock(sched);
    int is_known = known(sched, call, &attached);
    tv_sched_unlock(sched);
    if (is_known) {
        return attached;
    }
    struct tv_batch *batch = batch_make(sched, call);
    if (batch == NULL) {
        tv_sched_reply_refuse(call, TV_INTERNAL, NULL, "no memory for the batch");
        return 0;
    }
    tv_sched_lock(sched);
    if (known(sched, call, &attached)) { /* since then */
        tv_sched_unlock(sched);
        tv_sched_batch_destroy(batch);
        return attached;
    }
    call->batch = batch;
    int answered = admit(batch);
    tv_sched_unlock(sched);
    /* all but the last hold, which may be the one that concludes */
    (void)atomic_fetch_sub_explicit(&batch->holders, answered, memory_order_acq_rel);
    return !leave(batch);
}

/* With the lock: nobody waits for this batch any more. Items that are queued are dropped; then a
 * repeat finds no batch with a part missing, but runs as one of its own. */
static void drop(struct tv_batch *batch, struct tv_call **ret_calls)
{
    struct tv_call *dropped = NULL;
    for (int32_t i = 0; i < batch->count; i++) { /* of one that is complete nothing is found */
        tv_sched_call_cancel(batch->sched, batch->items[i], &dropped);
    }
    if (dropped == NULL) {
        return;
    }
    if (batch->key != NULL) { /* what was dropped still holds the batch */
        key_end(batch, NULL, 0);
    }
    while (*ret_calls != NULL) {
        ret_calls = &(*ret_calls)->next;
    }
    *ret_calls = dropped;
}

int tv_sched_batch_leave(struct tv_sched *sched, const struct tv_call *call,
                         struct tv_call **ret_calls)
{
    for (struct tv_batch *batch = sched->batches; batch != NULL; batch = batch->next) {
        if (tv_sched_call_unlink(&batch->twins, call)) {
            if (batch->is_left && batch->twins == NULL) {
                drop(batch, ret_calls);
            }
            return 1;
        }
    }
    return 0;
}

struct tv_batch *tv_sched_batch_cancel(struct tv_batch *batch, struct tv_call **ret_calls)
{
    int holders = atomic_load_explicit(&batch->holders, memory_order_acquire);
    do {
        if (holders == 0) {
            return NULL; /* its answer is there */
        }
    } while (!atomic_compare_exchange_weak_explicit(&batch->holders, &holders, holders + 1,
                                                    memory_order_acq_rel, memory_order_acquire));
    batch->is_left = 1;
    if (batch->twins == NULL) { /* else somebody waits for it: it runs to its end */
        drop(batch, ret_calls);
    }
    return batch;
}

void tv_sched_batch_let_go(struct tv_batch *batch)
{
    struct tv_call *call = batch != NULL ? batch->call : NULL;
    if (batch != NULL && leave(batch)) {
        call->done(call); /* may free the batch */
    }
}
