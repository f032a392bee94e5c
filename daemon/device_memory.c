/*
 * device_memory.c - the arithmetic of a device's memory, and its words.
 *
 * Owns nothing. Refuses to guess below what a reserve asks for: what does not fit is no page.
 */
#include "device_memory.h"

#include <stdarg.h>
#include <stdio.h>

/* Drivers have kept 64 KiB for each kernel of an instantiated graph; newer ones keep less. */
#define GRAPH_KERNEL_BYTES ((size_t)64 << 10)
#define LAYER_KERNELS      24 /* of one layer in a recorded pass, experts included */

static size_t less(size_t from, size_t what)
{
    return from > what ? from - what : 0;
}

void tv_device_memory_parts(const struct tv_device_memory *memory,
                            size_t ret_parts[TV_DEVICE_PARTS])
{
    ret_parts[TV_DEVICE_OTHERS] = less(memory->total, memory->begun);
    ret_parts[TV_DEVICE_WEIGHTS] = memory->weights;
    ret_parts[TV_DEVICE_SCRATCH] = less(less(memory->begun, memory->loaded), memory->weights);
    ret_parts[TV_DEVICE_PAGES] = memory->pages;
    ret_parts[TV_DEVICE_GRAPHS] = less(memory->pooled, memory->ready);
    ret_parts[TV_DEVICE_RESERVE] = memory->ready;
}

int64_t tv_device_memory_pages(const struct tv_device_room *room)
{
    size_t kept = room->reserve_bytes > SIZE_MAX - room->graphs_bytes
                      ? SIZE_MAX
                      : room->reserve_bytes + room->graphs_bytes;
    size_t rest = less(room->free_bytes, kept);
    size_t mine = room->share >= 1.0 ? rest : (size_t)((double)rest * room->share);
    size_t pages = (mine < rest ? mine : rest) / room->page_bytes;
    size_t most = (size_t)(INT32_MAX / room->page_size);
    return (int64_t)(pages < most ? pages : most);
}

size_t tv_device_memory_graphs(int64_t recordings, int32_t layers)
{
    return (size_t)recordings * (size_t)layers * LAYER_KERNELS * GRAPH_KERNEL_BYTES;
}

static void text_add(char *text, size_t bytes, size_t *at, const char *format, ...)
    __attribute__((format(printf, 4, 5)));

static void text_add(char *text, size_t bytes, size_t *at, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    int wrote = vsnprintf(text + *at, bytes - *at, format, args);
    va_end(args);
    size_t end = wrote < 0 ? *at : *at + (size_t)wrote;
    *at = end < bytes ? end : bytes - 1; /* cut text is still text */
}

void tv_device_memory_describe(const struct tv_kernels *kernels, char *ret_text, size_t bytes)
{
    struct tv_device device;
    size_t at = 0;
    ret_text[0] = '\0';
    if (kernels->device == NULL || kernels->device(kernels, &device) != 0) {
        return;
    }
    text_add(ret_text, bytes, &at,
             "%s, compute capability %d.%d, driver for CUDA %d.%d, toolkit %d.%d, images %s, "
             "running sm_%d",
             kernels->variant, device.major, device.minor, device.driver / 1000,
             device.driver % 1000 / 10, device.toolkit / 1000, device.toolkit % 1000 / 10,
             device.images, device.image);
}

void tv_device_memory_text(const struct tv_device_memory *memory, char *ret_text, size_t bytes)
{
    static const char *const names[TV_DEVICE_PARTS] = {
        [TV_DEVICE_OTHERS] = "contexts and others",
        [TV_DEVICE_WEIGHTS] = "weights",
        [TV_DEVICE_SCRATCH] = "scratch",
        [TV_DEVICE_PAGES] = "pages",
        [TV_DEVICE_GRAPHS] = "graphs",
        [TV_DEVICE_RESERVE] = "reserve",
    };
    size_t parts[TV_DEVICE_PARTS], at = 0;
    tv_device_memory_parts(memory, parts);
    text_add(ret_text, bytes, &at, "of %zu MiB:", memory->total >> 20);
    for (int i = 0; i < TV_DEVICE_PARTS; i++) {
        text_add(ret_text, bytes, &at, "%s %s %zu", i > 0 ? "," : "", names[i], parts[i] >> 20);
    }
}
