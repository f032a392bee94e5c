/*
 * planted_nvml.c - an NVML for tests: one GPU whose counters are the numbers of the file that
 * TV_NVML_FILE names, read again at every call: corrected and uncorrected errors, rows pending and
 * failed, the answer of every reading, and an Xid, which is told of once.
 */
#include <stdio.h>
#include <stdlib.h>

#define NVML_TIMEOUT   10
#define NVML_NOT_FOUND 6

struct event {
    void *device;
    unsigned long long type, data;
    unsigned int gpu_instance, compute_instance;
};

struct state {
    unsigned long long ecc[2], xid;
    unsigned int pending, failed;
    int answer;
};

/* seen from outside, as they are in the driver's library */
#pragma GCC visibility push(default)
int nvmlInit_v2(void);
int nvmlShutdown(void);
int nvmlDeviceGetCount_v2(unsigned int *ret_count);
int nvmlDeviceGetHandleByIndex_v2(unsigned int index, void **ret_device);
int nvmlDeviceGetHandleByUUID(const char *uuid, void **ret_device);
int nvmlDeviceGetTotalEccErrors(void *device, int kind, int since, unsigned long long *ret_count);
int nvmlDeviceGetRemappedRows(void *device, unsigned int *ret_corrected,
                              unsigned int *ret_uncorrected, unsigned int *ret_pending,
                              unsigned int *ret_failed);
int nvmlEventSetCreate(void **ret_events);
int nvmlDeviceRegisterEvents(void *device, unsigned long long types, void *events);
int nvmlEventSetWait_v2(void *events, struct event *ret_event, unsigned int timeout_ms);
int nvmlEventSetFree(void *events);
#pragma GCC visibility pop

static int gpu, events_of_it; /* whose addresses are the handles */
static unsigned long long told;

static struct state read_state(void)
{
    struct state state = {.answer = 0};
    const char *path = getenv("TV_NVML_FILE");
    FILE *file = path == NULL ? NULL : fopen(path, "re");
    if (file == NULL || fscanf(file, "%llu %llu %u %u %d %llu", &state.ecc[0], &state.ecc[1],
                               &state.pending, &state.failed, &state.answer, &state.xid) != 6) {
        abort();
    }
    (void)fclose(file); /* only read from */
    return state;
}

int nvmlInit_v2(void)
{
    return 0;
}

int nvmlShutdown(void)
{
    return 0;
}

int nvmlDeviceGetCount_v2(unsigned int *ret_count)
{
    *ret_count = 1;
    return 0;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned int index, void **ret_device)
{
    *ret_device = &gpu;
    return index == 0 ? 0 : NVML_NOT_FOUND;
}

int nvmlDeviceGetHandleByUUID(const char *uuid, void **ret_device)
{
    (void)uuid; /* it has none */
    *ret_device = NULL;
    return NVML_NOT_FOUND;
}

int nvmlDeviceGetTotalEccErrors(void *device, int kind, int since, unsigned long long *ret_count)
{
    struct state state = read_state();
    if (device != &gpu || kind < 0 || kind > 1 || since != 0) {
        abort();
    }
    *ret_count = state.ecc[kind];
    return state.answer;
}

int nvmlDeviceGetRemappedRows(void *device, unsigned int *ret_corrected,
                              unsigned int *ret_uncorrected, unsigned int *ret_pending,
                              unsigned int *ret_failed)
{
    struct state state = read_state();
    (void)device; /* as the one above */
    *ret_corrected = *ret_uncorrected = 0;
    *ret_pending = state.pending;
    *ret_failed = state.failed;
    return state.answer;
}

int nvmlEventSetCreate(void **ret_events)
{
    *ret_events = &events_of_it;
    return 0;
}

int nvmlDeviceRegisterEvents(void *device, unsigned long long types, void *events)
{
    return device == &gpu && types == 8 && events == &events_of_it ? 0 : NVML_NOT_FOUND;
}

int nvmlEventSetWait_v2(void *events, struct event *ret_event, unsigned int timeout_ms)
{
    struct state state = read_state();
    (void)timeout_ms; /* nothing is waited for */
    if (events != &events_of_it || state.xid == told) {
        return NVML_TIMEOUT;
    }
    told = state.xid;
    *ret_event = (struct event){.device = &gpu, .type = 8, .data = state.xid};
    return 0;
}

int nvmlEventSetFree(void *events)
{
    return events == &events_of_it ? 0 : NVML_NOT_FOUND;
}
