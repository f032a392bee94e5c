/*
 * gpu_watch.c - NVML's counters of a GPU, and what they say against it.
 *
 * Owns the open library. Refuses to guess which of several GPUs is the one in use, and to hold
 * against a GPU what was there before the watch began: it has passed the start's self-test since.
 * A reading that the driver does not offer is none; only its word that the GPU is lost, or useless
 * until it is reset, is one.
 */
#include "gpu_watch.h"

#include <dlfcn.h>
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/log.h"

#define NVML_LIBRARY     "libnvidia-ml.so.1"
#define NVML_LOST        15
#define NVML_NEEDS_RESET 16
#define NVML_XID_EVENTS  8ULL
#define EVENTS_MOST      16 /* of one look; the rest waits for the next */
#define VISIBLE          "CUDA_VISIBLE_DEVICES"

/* The stable part of NVML's interface, by its documentation. */
struct nvml_event {
    void *device;
    unsigned long long type, data;
    unsigned int gpu_instance, compute_instance;
};

struct nvml {
    int (*init)(void);
    int (*shutdown)(void);
    int (*count)(unsigned int *ret_count);
    int (*by_index)(unsigned int index, void **ret_device);
    int (*by_uuid)(const char *uuid, void **ret_device);
    int (*ecc)(void *device, int kind, int since, unsigned long long *ret_count);
    int (*rows)(void *device, unsigned int *ret_corrected, unsigned int *ret_uncorrected,
                unsigned int *ret_pending, unsigned int *ret_failed);
    int (*events_make)(void **ret_events);
    int (*events_register)(void *device, unsigned long long types, void *events);
    int (*events_wait)(void *events, struct nvml_event *ret_event, unsigned int timeout_ms);
    int (*events_free)(void *events);
};

struct readings {
    int has_ecc[TV_GPU_ECC_KINDS], has_rows; /* the driver has said so once */
    unsigned long long ecc[TV_GPU_ECC_KINDS];
    unsigned int pending, failed;
};

struct tv_gpu_watch {
    struct nvml nvml;
    void *device, *events;
    unsigned long long ecc_first; /* uncorrected */
    struct readings last;
    struct tv_sched_gpu said;
};

/* A NULL function pointer is a reading that this driver does not offer. POSIX allows a function
 * behind dlsym's pointer; ISO C has no cast for it. */
static void symbol(void *library, const char *name, void *ret_function, size_t bytes)
{
    void *found = dlsym(library, name);
    memcpy(ret_function, &found, bytes);
}

static int library_open(struct nvml *nvml)
{
    const char *named = secure_getenv("TREEVERIFY_NVML_LIB");
    void *library = dlopen(named != NULL ? named : NVML_LIBRARY, RTLD_NOW | RTLD_LOCAL);
    if (library == NULL) {
        return -ENOENT; /* never closed, once open: the driver's library may have handlers at exit
                         */
    }
    symbol(library, "nvmlInit_v2", &nvml->init, sizeof nvml->init);
    symbol(library, "nvmlShutdown", &nvml->shutdown, sizeof nvml->shutdown);
    symbol(library, "nvmlDeviceGetCount_v2", &nvml->count, sizeof nvml->count);
    symbol(library, "nvmlDeviceGetHandleByIndex_v2", &nvml->by_index, sizeof nvml->by_index);
    symbol(library, "nvmlDeviceGetHandleByUUID", &nvml->by_uuid, sizeof nvml->by_uuid);
    symbol(library, "nvmlDeviceGetTotalEccErrors", &nvml->ecc, sizeof nvml->ecc);
    symbol(library, "nvmlDeviceGetRemappedRows", &nvml->rows, sizeof nvml->rows);
    symbol(library, "nvmlEventSetCreate", &nvml->events_make, sizeof nvml->events_make);
    symbol(library, "nvmlDeviceRegisterEvents", &nvml->events_register,
           sizeof nvml->events_register);
    symbol(library, "nvmlEventSetWait_v2", &nvml->events_wait, sizeof nvml->events_wait);
    symbol(library, "nvmlEventSetFree", &nvml->events_free, sizeof nvml->events_free);
    return nvml->init != NULL && nvml->shutdown != NULL && nvml->count != NULL &&
                   nvml->by_index != NULL && nvml->by_uuid != NULL && nvml->ecc != NULL
               ? 0
               : -ENOSYS;
}

/* The GPU in use: the only one, or the one that the environment names by its UUID. */
static int device_find(struct tv_gpu_watch *watch, char *reason, size_t bytes)
{
    const char *visible = getenv(VISIBLE);
    unsigned int count = 0;
    int rc = watch->nvml.count(&count);
    if (visible != NULL && strncmp(visible, "GPU-", 4) == 0) {
        char uuid[96];
        size_t length = strcspn(visible, ",");
        (void)snprintf(uuid, sizeof uuid, "%.*s", (int)(length < 90 ? length : 90), visible);
        rc = watch->nvml.by_uuid(uuid, &watch->device);
    } else if (rc == 0 && count == 1) {
        rc = watch->nvml.by_index(0, &watch->device);
    } else if (rc == 0) {
        (void)snprintf(reason, bytes, "%u GPUs are there: name the one in use by its UUID (%s)",
                       count, VISIBLE);
        return -ENODEV;
    }
    if (rc != 0) {
        (void)snprintf(reason, bytes, "NVML knows no such GPU (error %d)", rc);
        return -ENODEV;
    }
    return 0;
}

static void events_open(struct tv_gpu_watch *watch)
{
    const struct nvml *nvml = &watch->nvml;
    if (nvml->events_make == NULL || nvml->events_register == NULL || nvml->events_wait == NULL ||
        nvml->events_free == NULL || nvml->events_make(&watch->events) != 0) {
        watch->events = NULL;
    } else if (nvml->events_register(watch->device, NVML_XID_EVENTS, watch->events) != 0) {
        (void)nvml->events_free(watch->events); /* it was never used */
        watch->events = NULL;
    }
}

/* What the driver says now; 0, or that it says the GPU is gone. */
static int readings_take(const struct tv_gpu_watch *watch, struct readings *readings)
{
    unsigned int corrected, uncorrected, pending, failed;
    for (int kind = 0; kind < TV_GPU_ECC_KINDS; kind++) {
        unsigned long long count = 0;
        int rc = watch->nvml.ecc(watch->device, kind, 0, &count);
        if (rc == NVML_LOST || rc == NVML_NEEDS_RESET) {
            return rc;
        }
        if (rc == 0) {
            readings->ecc[kind] = count;
            readings->has_ecc[kind] = 1;
        }
    }
    if (watch->nvml.rows != NULL &&
        watch->nvml.rows(watch->device, &corrected, &uncorrected, &pending, &failed) == 0) {
        readings->pending = pending;
        readings->failed = failed;
        readings->has_rows = 1;
    }
    return 0;
}

/* What comes for the first time was there before: it is reported, and later ones are beside it. */
static void first_take(struct tv_gpu_watch *watch, const struct readings *now)
{
    const int kind = TV_GPU_ECC_UNCORRECTED;
    unsigned long long errors = 0;
    int pending = 0, failed = 0;
    if (now->has_ecc[kind] && !watch->last.has_ecc[kind]) {
        watch->ecc_first = watch->last.ecc[kind] = errors = now->ecc[kind];
    }
    if (now->has_rows && !watch->last.has_rows) {
        watch->last.pending = now->pending;
        watch->last.failed = now->failed;
        pending = now->pending != 0;
        failed = now->failed != 0;
    }
    if (errors > 0 || pending || failed) {
        tv_log(TV_LOG_WARNING,
               "gpu: it comes with %llu uncorrected memory errors%s%s; the self-test passed",
               errors, pending ? ", rows to be remapped at its next reset" : "",
               failed ? ", a row that could not be remapped" : "");
    }
}

int tv_gpu_watch_open(struct tv_gpu_watch **ret_watch, char *reason, size_t bytes)
{
    struct tv_gpu_watch *watch = calloc(1, sizeof *watch);
    struct readings now = {0};
    int rc = watch == NULL ? -ENOMEM : library_open(&watch->nvml);
    if (rc != 0) {
        (void)snprintf(reason, bytes, "no NVML: %s", strerror(-rc));
        free(watch);
        return rc;
    }
    int said = watch->nvml.init();
    if (said != 0) {
        (void)snprintf(reason, bytes, "NVML does not start (error %d)", said);
        free(watch);
        return -EIO;
    }
    rc = device_find(watch, reason, bytes);
    if (rc != 0) {
        (void)watch->nvml.shutdown(); /* nothing of it is in use */
        free(watch);
        return rc;
    }
    events_open(watch);
    (void)readings_take(watch, &now); /* a lost one is seen by the first look */
    first_take(watch, &now);
    watch->last = now;
    watch->said.watched = 1;
    *ret_watch = watch;
    return 0;
}

/* The first complaint stays: what follows from it says less. */
static void complain(struct tv_gpu_watch *watch, const char *format, ...)
    __attribute__((format(printf, 2, 3)));

static void complain(struct tv_gpu_watch *watch, const char *format, ...)
{
    struct tv_sched_gpu *said = &watch->said;
    char text[sizeof said->reason];
    va_list args;
    va_start(args, format);
    (void)vsnprintf(text, sizeof text, format, args); /* cut text is text */
    va_end(args);
    tv_log(TV_LOG_ERROR, "gpu: hardware: %s", text);
    if (!said->broken) {
        said->broken = 1;
        memcpy(said->reason, text, sizeof text);
    }
}

/* Xids behind which stands the board, its memory or its firmware, and no program. */
static int is_hardware(unsigned long long xid)
{
    static const unsigned short codes[] = {48, 64, 79, 95, 119, 120, 140};
    for (size_t i = 0; i < sizeof codes / sizeof codes[0]; i++) {
        if (codes[i] == xid) {
            return 1;
        }
    }
    return 0;
}

static void events_take(struct tv_gpu_watch *watch)
{
    struct nvml_event event = {0};
    for (int i = 0; watch->events != NULL && i < EVENTS_MOST; i++) {
        int rc = watch->nvml.events_wait(watch->events, &event, 0);
        if (rc == NVML_LOST && !watch->said.broken) {
            complain(watch, "the GPU is lost");
        }
        if (rc != 0) {
            break; /* none waits, or none can be had */
        }
        watch->said.xids++;
        watch->said.xid = (int32_t)(event.data < INT32_MAX ? event.data : INT32_MAX);
        if (is_hardware(event.data)) {
            complain(watch, "Xid %llu", event.data);
        } else {
            tv_log(TV_LOG_WARNING, "gpu: Xid %llu", event.data);
        }
    }
}

void tv_gpu_watch_look(struct tv_gpu_watch *watch, struct tv_sched_gpu *ret_gpu)
{
    struct readings now = watch->last;
    events_take(watch);
    int gone = readings_take(watch, &now);
    first_take(watch, &now);
    if (gone != 0 && !watch->said.broken) {
        complain(watch, gone == NVML_LOST ? "the GPU is lost" : "the GPU needs a reset");
    }
    if (now.ecc[TV_GPU_ECC_UNCORRECTED] > watch->last.ecc[TV_GPU_ECC_UNCORRECTED]) {
        complain(watch, "%llu uncorrected memory errors",
                 now.ecc[TV_GPU_ECC_UNCORRECTED] - watch->ecc_first);
    }
    if (now.failed && !watch->last.failed) {
        complain(watch, "a row of its memory could not be remapped");
    }
    if (now.pending && !watch->last.pending) {
        tv_log(TV_LOG_WARNING, "gpu: rows of its memory are remapped at its next reset");
    }
    watch->last = now;
    for (int kind = 0; kind < TV_GPU_ECC_KINDS; kind++) {
        watch->said.ecc[kind] = (int64_t)now.ecc[kind];
    }
    *ret_gpu = watch->said;
}

void tv_gpu_watch_close(struct tv_gpu_watch *watch)
{
    if (watch == NULL) {
        return;
    }
    if (watch->events != NULL) {
        (void)watch->nvml.events_free(watch->events); /* at the end nothing is left to be said */
    }
    (void)watch->nvml.shutdown();
    free(watch);
}
