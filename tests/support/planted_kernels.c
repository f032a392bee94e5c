/*
 * planted_kernels.c - treeverifyd-planted: the daemon as it is on a backend with a planted fault.
 *
 * The linker gives every tv_kernels_create to this file; the fault is TV_PLANT's, where that names
 * one of a backend (planted_model.c has the others). The oracle's own reference backend stays as it
 * is.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "plant.h"

int __real_tv_kernels_create(const char *name, const struct tv_kernels_options *options,
                             struct tv_kernels **ret_kernels);
int __wrap_tv_kernels_create(const char *name, const struct tv_kernels_options *options,
                             struct tv_kernels **ret_kernels);

int __wrap_tv_kernels_create(const char *name, const struct tv_kernels_options *options,
                             struct tv_kernels **ret_kernels)
{
    const char *fault = getenv("TV_PLANT");
    struct tv_kernels *kernels = NULL;
    int is_device = fault != NULL && strcmp(fault, "device") == 0;
    name = is_device && strcmp(name, "cuda") == 0 ? "cpu" : name; /* the host told as a device */
    int rc = __real_tv_kernels_create(name, options, &kernels);
    if (rc != 0 || fault == NULL || strcmp(name, "ref") == 0) {
        *ret_kernels = rc == 0 ? kernels : *ret_kernels;
        return rc;
    }
    if (strcmp(name, "cpu") == 0 && getenv("TV_PLANT_APART") != NULL) {
        tv_plant_apart(kernels);
    }
    if (is_device && strcmp(name, "cpu") == 0) {
        tv_plant_device(kernels);
    } else if (!tv_planted_in_model(fault)) {
        rc = tv_plant_round(kernels, fault);
        if (rc == -EINVAL && strcmp(name, "cpu") == 0) { /* these work in host memory alone */
            rc = tv_plant(kernels, fault);
        }
    }
    if (rc != 0) {
        kernels->destroy(kernels);
        return rc;
    }
    *ret_kernels = kernels;
    return 0;
}
