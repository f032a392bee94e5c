/*
 * planted_device.c - treeverifyd-planted: TV_PLANT=device: the host's memory told as a device's, of
 * TV_PLANT_MIB. TV_PLANT_APART: memory that nobody may look into, with a second table for another
 * thread, as a device has.
 *
 * For what a start makes of a device's memory and for the count of allocations, where there is no
 * device. Owns the count; memory is never told to be given back. Refuses what is over the size.
 */
#include <stdatomic.h>
#include <stdlib.h>

#include "plant.h"

static struct tv_kernels real; /* the table as it was */
static atomic_size_t used_bytes;
static atomic_uint_least64_t allocations;

static size_t total_bytes(void)
{
    const char *text = getenv("TV_PLANT_MIB");
    return text == NULL ? 0 : (size_t)strtoull(text, NULL, 10) << 20;
}

static void *device_alloc(struct tv_kernels *k, size_t bytes)
{
    size_t used = atomic_fetch_add(&used_bytes, bytes);
    if (used + bytes > total_bytes()) {
        atomic_fetch_sub(&used_bytes, bytes);
        return NULL;
    }
    void *memory = real.alloc(k, bytes);
    atomic_fetch_add(&allocations, memory != NULL);
    return memory;
}

static int device_memory(const struct tv_kernels *k, size_t *ret_free, size_t *ret_total)
{
    (void)k;
    *ret_total = total_bytes();
    *ret_free = total_bytes() - atomic_load(&used_bytes);
    return 0;
}

static int device_facts(const struct tv_kernels *k, struct tv_device *ret_device)
{
    (void)k;
    *ret_device = (struct tv_device){.major = 9,
                                     .minor = 0,
                                     .driver = 13000,
                                     .toolkit = 13000,
                                     .image = 90,
                                     .images = "sm_90 compute_120"};
    return 0;
}

static uint64_t device_allocations(const struct tv_kernels *k)
{
    (void)k;
    return atomic_load(&allocations);
}

void tv_plant_device(struct tv_kernels *kernels)
{
    real = *kernels;
    kernels->alloc = device_alloc;
    kernels->device = device_facts;
    kernels->device_memory = device_memory;
    kernels->allocations = device_allocations;
}

/* The reference's table computes beside the first one, in the same memory. */
static int apart_side(struct tv_kernels *k, struct tv_kernels **ret_side)
{
    int rc = tv_kernels_create("ref", NULL, ret_side);
    if (rc == 0) {
        (*ret_side)->host_memory = k->host_memory;
    }
    return rc;
}

void tv_plant_apart(struct tv_kernels *kernels)
{
    kernels->host_memory = 0;
    kernels->side = apart_side;
}
