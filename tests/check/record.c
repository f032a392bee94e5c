/*
 * record.c - checks of recordings and of what a device says of itself.
 *
 * A recording replays the same arguments over data that has changed since; it must give what the
 * reference gives on the new data, every time, and take no device memory.
 */
#include <stdlib.h>

#include "tests/check/check.h"

enum { RECORD_ROWS = 5, RECORD_N = 48, RECORD_K = 64, RECORD_REPLAYS = 3 };

/* x -> norm -> y = W x, twice the kind of operation a pass is made of. */
struct chain {
    float *x, *norm, *weight, *w, *y;
};

static int run_chain(struct tv_kernels *k, const struct chain *m)
{
    struct tv_linear a = {.rows = RECORD_ROWS, .n = RECORD_N, .k = RECORD_K, .groups = 1};
    int rc =
        k->rmsnorm(k, RECORD_ROWS, RECORD_K, m->x, RECORD_K, m->weight, 1e-5f, m->norm, RECORD_K);
    a.x = m->norm;
    a.x_row_stride = RECORD_K;
    a.w = m->w;
    a.w_dtype = TV_F32;
    a.y = m->y;
    a.y_row_stride = RECORD_N;
    return rc != 0 ? rc : k->linear(k, &a);
}

static void replays(struct check *c)
{
    struct tv_kernels *k = c->k;
    size_t x_bytes = RECORD_ROWS * RECORD_K * sizeof(float);
    size_t w_bytes = RECORD_N * RECORD_K * sizeof(float);
    size_t y_bytes = RECORD_ROWS * RECORD_N * sizeof(float);
    float *got = check_host(c, y_bytes);
    struct chain host = {.norm = check_host(c, x_bytes), .y = check_host(c, y_bytes)};
    struct chain device = {.norm = check_poisoned(c, x_bytes), .y = check_poisoned(c, y_bytes)};
    void *recording = NULL;
    host.weight = check_normals(c, RECORD_K, 1.0f);
    host.w = check_normals(c, RECORD_N * RECORD_K, 1.0f);
    device.weight = check_upload(c, host.weight, RECORD_K * sizeof(float));
    device.w = check_upload(c, host.w, w_bytes);
    device.x = check_poisoned(c, x_bytes);
    if (!check_ok(c, k->record_begin(k), "record_begin")) {
        check_release(c);
        return;
    }
    int rc = run_chain(k, &device);
    if (!check_ok(c, k->record_end(k, &recording), "record_end") ||
        !check_ok(c, rc, "an operation while recording")) {
        check_release(c);
        return;
    }
    uint64_t taken = k->allocations ? k->allocations(k) : 0;
    for (int32_t i = 0; i < RECORD_REPLAYS; i++) {
        host.x = check_normals(c, RECORD_ROWS * RECORD_K, 1.0f);
        rc = k->upload(k, device.x, host.x, x_bytes);
        rc = rc != 0 ? rc : k->fill(k, device.y, 0xff, y_bytes);
        rc = rc != 0 ? rc : k->replay(k, recording);
        if (!check_ok(c, rc, "replay")) {
            break;
        }
        check_download(c, got, device.y, y_bytes);
        (void)run_chain(c->ref, &host);
        check_near(c, got, host.y, RECORD_ROWS * RECORD_N, 6e-8 * RECORD_K + 1e-5, 2e-6, "replay");
    }
    if (k->allocations && k->allocations(k) != taken) {
        check_fail(c, "a replay took device memory");
    }
    k->recording_free(k, recording);
    check_release(c);
}

static void description(struct check *c)
{
    struct tv_device device = {.major = 0};
    size_t unused = 0, all = 0;
    uint64_t before = c->k->allocations(c->k);
    if (!check_ok(c, c->k->device(c->k, &device), "device") ||
        !check_ok(c, c->k->device_memory(c->k, &unused, &all), "device_memory")) {
        return;
    }
    if (device.major < 9 || device.image < 90 || !device.images || unused > all || all == 0) {
        check_fail(c, "a device %d.%d, image %d, %zu of %zu bytes free", device.major, device.minor,
                   device.image, unused, all);
    }
    /* where blocks meet; on Hopper, where rows are cut for its kernels, as well */
    const char *portable = getenv("TREEVERIFY_CUDA_PORTABLE");
    int hopper = device.major == 9 && !(portable != NULL && *portable == '1');
    if (c->taken < (hopper ? 2 : 1)) {
        check_fail(c, "%llu allocations of a new table were counted", (unsigned long long)c->taken);
    }
    (void)check_poisoned(c, 1 << 20);
    if (c->k->allocations(c->k) <= before) {
        check_fail(c, "an allocation was not counted");
    }
    check_release(c);
}

void check_record(struct check *c)
{
    if (c->k->record_begin && c->k->linear && c->k->rmsnorm) {
        replays(c);
    }
    if (c->k->device) {
        description(c);
    }
}
