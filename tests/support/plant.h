/*
 * plant.h - faults of the model's form, planted in a backend's table: each is a mistake that a
 * forward pass could contain while every kernel does what it was asked.
 */
#ifndef TV_TESTS_SUPPORT_PLANT_H
#define TV_TESTS_SUPPORT_PLANT_H

#include <stddef.h>

#include "kernels/kernels.h"

/* One after the other; NULL behind the last. "late" is nothing until the file of TV_PLANT_FILE
 * exists; "stuck" and "lost", which are no faults of the form, do not return while it exists, and
 * are a device that is gone; "commit" is nothing before the first commit that moves a row. */
extern const char *const tv_plant_names[];

/* Wrap the slots of one table; the tables of a process take turns, each planted anew. -EINVAL: no
 * fault of that name. */
int tv_plant(struct tv_kernels *kernels, const char *name);

/* planted_round.c: faults of single launches, in any backend. -EINVAL: none of that name. */
int tv_plant_round(struct tv_kernels *kernels, const char *name);

/* planted_device.c: the host's memory as a device's; and as one that nobody may look into. */
void tv_plant_device(struct tv_kernels *kernels);
void tv_plant_apart(struct tv_kernels *kernels);

/* planted_model.c: 1: TV_PLANT's fault of that name is in what model/ derives from the file. */
int tv_planted_in_model(const char *name);

#endif
