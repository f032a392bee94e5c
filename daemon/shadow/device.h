/*
 * device.h - private to shadow/: the kernel oracle where memory is a device's.
 */
#ifndef TV_SHADOW_DEVICE_H
#define TV_SHADOW_DEVICE_H

#include "shadow/round.h"

#define TV_SHADOW_EXTENTS_MAX 32
/* Of the oracle at a time. A live kernel that needs whole processors waits for the oracle's blocks
 * there, whatever its priority, and how long does not depend on how many there are: the sooner a
 * layer is judged the better. Each block ends after two heads of one node. */
#define TV_SHADOW_BLOCKS 264

/* Where a round's copies are in its part of the arena: a stride for every layer with q at its
 * beginning, and behind them the committed rows [layers, count]. All in bytes. */
struct tv_shadow_layout {
    size_t q, out, lse;
    size_t out_at, lse_at, stride;
    size_t moved_at, bytes;
};
struct tv_shadow_layout tv_shadow_layout_of(const struct tv_shadow_round *round);

/* Memory of a round's copies, between two offsets of the arena. */
struct tv_shadow_extent {
    size_t at, bytes;
};

/* Of one shadow. All memory is taken at its creation. */
struct tv_shadow_device {
    struct tv_kernels *worker; /* the engine's table: copies in the order of its work */
    struct tv_kernels *side;   /* the shadow thread's */
    char *arena;               /* device */
    size_t arena_bytes;
    pthread_mutex_t lock; /* guards what follows; after every other lock */
    struct tv_shadow_extent used[TV_SHADOW_EXTENTS_MAX]; /* ascending */
    int32_t used_count;
    /* The thread's, of one layer; N = the most nodes of a round. */
    int32_t nodes_max, pages_max;
    int32_t *integers; /* device: prefix_len, node_count, parents [N], page table [pages_max] */
    float *out, *lse;  /* device [N, heads, latent], [N, heads]: the oracle's */
    void *workspace;
    size_t workspace_bytes;
};

/* NULL in *ret_device, and 0, where memory is the host's or there is no second table. -ENOMEM. */
int tv_shadow_device_create(struct tv_kernels *worker, const struct tv_model *model,
                            const struct tv_cache *cache, struct tv_shadow_device **ret_device);
void tv_shadow_device_destroy(struct tv_shadow_device *device);
/* Worker thread: a layer's hook, and the commit's. */
int tv_shadow_device_layer(struct tv_shadow *shadow, struct tv_shadow_round *round, int32_t layer,
                           const struct tv_verify_attn *attn);
int tv_shadow_device_committed(struct tv_shadow *shadow, struct tv_shadow_round *round,
                               const struct tv_cache_seq *seq, const int32_t *nodes, int32_t count);
/* Gives a round's part of the arena back. Any thread. */
void tv_shadow_device_give_back(struct tv_shadow *shadow, struct tv_shadow_round *round);
/* device_judge.c, shadow thread: as tv_shadow_kernel_judge; also looks at the committed rows. */
int tv_shadow_device_judge(struct tv_shadow *shadow, struct tv_shadow_round *round,
                           struct tv_parity_kernel *ret_worst, int *ret_within);

#endif
