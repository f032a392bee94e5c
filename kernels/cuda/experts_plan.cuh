/*
 * experts_plan.cuh - the plan of a launch over routed experts: its workspace.
 */
#ifndef TV_KERNELS_CUDA_EXPERTS_PLAN_CUH
#define TV_KERNELS_CUDA_EXPERTS_PLAN_CUH

#include <stdint.h>

#define EXPERTS_MAP 128 /* bytes of a map */

struct expert_tile {
    int32_t expert, first, rows; /* sorted positions first .. first + rows - 1 */
};

/* The workspace. */
struct expert_plan {
    int32_t *tile_count;
    struct expert_tile *tiles;
    int32_t *order;    /* [pairs]: pair at a sorted position */
    int32_t *place;    /* [pairs]: sorted position of a pair, -1 for a bad id */
    float *act;        /* [pairs, inter], sorted */
    float *out;        /* [pairs, hidden], sorted */
    void *maps;        /* of matrices, for experts_sm90.cu; or NULL */
    float *shared_act; /* [rows, shared inter] */
    float *shared_out; /* [rows, hidden] */
};

#endif
