/*
 * copy.c - checks of what moves and measures nothing but bytes and time: copies inside the device,
 * as they are and recorded, its timer, and the table of a second thread.
 */
#include <errno.h>
#include <pthread.h>
#include <string.h>

#include "tests/check/check.h"

#define ROWS  37
#define WIDTH 200

/* Rows from one stride to another; the bytes between them stay. */
static void one_copy(struct check *c, int recorded)
{
    size_t bytes = ROWS * WIDTH, row = (size_t)check_range(c, 1, WIDTH / 2);
    size_t to_stride = row + (size_t)check_range(c, 0, 7), from_stride = (size_t)WIDTH - 7;
    char *from = check_host(c, bytes), *got = check_host(c, bytes), *want = check_host(c, bytes);
    for (size_t i = 0; i < bytes; i++) {
        from[i] = (char)check_random(c);
    }
    const char *device = check_upload(c, from, bytes);
    char *to = check_poisoned(c, bytes);
    check_download(c, want, to, bytes);
    for (size_t r = 0; r < ROWS; r++) {
        memcpy(want + r * to_stride, from + r * from_stride, row);
    }
    void *recording = NULL;
    int rc = recorded ? c->k->record_begin(c->k) : 0;
    if (rc == 0) {
        rc = c->k->copy(c->k, to, to_stride, device, from_stride, row, ROWS);
    }
    if (rc == 0 && recorded) {
        rc = c->k->record_end(c->k, &recording);
        rc = rc == 0 ? c->k->replay(c->k, recording) : rc;
    }
    if (check_ok(c, rc, "copy")) {
        check_download(c, got, to, bytes);
        check_same(c, got, want, bytes, recorded ? "a recorded copy" : "copy");
    }
    if (recording != NULL) {
        c->k->recording_free(c->k, recording);
    }
    check_release(c);
}

/* Rows further apart than a runtime promises to copy in one call: two layers of a large pool. */
static void check_far_copy(struct check *c)
{
    size_t row = 1152, stride = ((size_t)1 << 31) + 4096;
    char *memory = c->k->alloc(c->k, stride + 2 * row);
    char *from = check_host(c, 2 * row), *got = check_host(c, 2 * row);
    int rc = memory == NULL ? -ENOMEM : 0; /* 2 GiB: what is too small for it has no such pool */
    for (size_t i = 0; i < 2 * row; i++) {
        from[i] = (char)check_random(c);
    }
    for (size_t i = 0; rc == 0 && i < 2; i++) {
        rc = c->k->upload(c->k, memory + i * stride, from + i * row, row);
    }
    rc = rc == 0 ? c->k->copy(c->k, memory + row, stride, memory, stride, row, 2) : rc;
    for (size_t i = 0; rc == 0 && i < 2; i++) {
        rc = c->k->download(c->k, got + i * row, memory + i * stride + row, row);
    }
    rc = rc == 0 ? c->k->sync(c->k) : rc;
    if (memory != NULL && check_ok(c, rc, "copy of rows 2 GiB apart")) {
        check_same(c, got, from, 2 * row, "copy of rows 2 GiB apart");
    }
    if (memory != NULL) {
        c->k->free(c->k, memory);
    }
    check_release(c);
}

/* A copy of 64 MiB takes time on the device, and none is taken twice. */
static void check_timer(struct check *c)
{
    size_t bytes = (size_t)64 << 20;
    char *memory = c->k->alloc(c->k, 2 * bytes);
    double us = 0.0;
    int rc = memory == NULL ? -ENOMEM : c->k->fill(c->k, memory, 0, 2 * bytes);
    rc = rc == 0 ? c->k->timer(c->k, 0) : rc;
    rc = rc == 0 ? c->k->copy(c->k, memory, bytes, memory + bytes, bytes, bytes, 1) : rc;
    rc = rc == 0 ? c->k->timer(c->k, 1) : rc;
    rc = rc == 0 ? c->k->timer_read(c->k, &us) : rc;
    if (check_ok(c, rc, "timer") && !(us > 5.0 && us < 1e6)) {
        check_fail(c, "timer: 64 MiB took %g us", us);
    }
    if (memory != NULL) {
        c->k->free(c->k, memory);
    }
}

struct beside {
    struct tv_kernels *side;
    char *memory;  /* device [2, ROWS * WIDTH] */
    int32_t *zero; /* device */
    char got[ROWS * WIDTH], made[ROWS * WIDTH];
    int rc;
};

static void *beside_run(void *context)
{
    struct beside *beside = context;
    struct tv_kernels *k = beside->side;
    size_t bytes = ROWS * WIDTH;
    beside->rc = k->copy(k, beside->memory + bytes, bytes, beside->memory, bytes, bytes, 1);
    if (beside->rc == 0) {
        beside->rc = k->download(k, beside->got, beside->memory + bytes, bytes);
    }
    /* a kernel, which only the thread's own device launches: here one that copies */
    if (beside->rc == 0) {
        beside->rc = k->fill(k, beside->memory + bytes, 0, bytes);
    }
    if (beside->rc == 0) {
        beside->rc = k->embed(k, 1, (int32_t)(bytes / sizeof(float)), 1, beside->memory, TV_F32,
                              beside->zero, (float *)(void *)(beside->memory + bytes));
    }
    if (beside->rc == 0) {
        beside->rc = k->download(k, beside->made, beside->memory + bytes, bytes);
    }
    if (beside->rc == 0) {
        beside->rc = k->sync(k);
    }
    return NULL;
}

/* Another thread reads through a table of its own what this one has written and waited for. */
static void check_side(struct check *c)
{
    static struct beside beside; /* large */
    size_t bytes = ROWS * WIDTH;
    char *from = check_host(c, bytes);
    pthread_t thread;
    int rc = c->k->side(c->k, &beside.side);
    if (!check_ok(c, rc, "side")) {
        return;
    }
    for (size_t i = 0; i < bytes; i++) {
        from[i] = (char)check_random(c);
    }
    static const int32_t zero = 0;
    beside.memory = check_poisoned(c, 2 * bytes);
    beside.zero = check_upload(c, &zero, sizeof zero);
    rc = c->k->upload(c->k, beside.memory, from, bytes);
    rc = rc == 0 ? c->k->sync(c->k) : rc;
    rc = rc == 0 ? -pthread_create(&thread, NULL, beside_run, &beside) : rc;
    if (check_ok(c, rc, "side's thread")) {
        (void)pthread_join(thread, NULL); /* it is ours and joinable */
        if (check_ok(c, beside.rc, "copy on the side")) {
            check_same(c, beside.got, from, bytes, "copy on the side");
            check_same(c, beside.made, from, bytes, "a kernel on the side");
        }
    }
    beside.side->destroy(beside.side);
    check_release(c);
}

void check_copy(struct check *c)
{
    for (int32_t n = 0; n < 8 * c->scale; n++) {
        one_copy(c, 0);
        if (c->k->record_begin != NULL) {
            one_copy(c, 1);
        }
    }
    if (c->k->copy(c->k, NULL, 3, NULL, 4, 4, 1) != -EINVAL) {
        check_fail(c, "copy: rows that overlap are taken");
    }
    if (!c->k->host_memory) {
        check_far_copy(c);
        check_timer(c);
        check_side(c);
    }
}
