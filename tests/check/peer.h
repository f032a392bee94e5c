/*
 * peer.h - what a shared library offers so that checkkern --bench --peers FOLDER can time it beside
 * the kernel: other projects' attention on the same queries, pages and lengths.
 *
 * A peer lies outside this repository, as FOLDER/peer_*.so, and exports tv_peer_get. It computes
 * the chain (causal) mask, bf16 in and out, in the layout of struct tv_verify_attn.
 */
#ifndef TV_TESTS_CHECK_PEER_H
#define TV_TESTS_CHECK_PEER_H

#include "kernels/kernels.h"

/* One launch: device pointers in args, the small arrays once more in host memory. */
struct tv_peer_input {
    struct tv_verify_attn args; /* out and lse: the peer's to write */
    const int32_t *prefix_len, *node_count, *page_table;
    void *stream; /* cudaStream_t, not the default one: a launch is captured into a graph */
};

struct tv_peer {
    uint32_t abi;     /* TV_KERNELS_ABI of the header it was built with; another is refused */
    const char *name; /* at most 12 characters */
    /* Allocates and plans. 0, or a negative errno when it cannot run this input. */
    int (*prepare)(const struct tv_peer_input *input, void **ret_state);
    int (*run)(void *state); /* launches on the stream, without waiting */
    void (*finish)(void *state);
};

/* The library's peers, index 0 first; NULL behind the last. */
typedef const struct tv_peer *tv_peer_get_fn(int32_t index);
#define TV_PEER_GET "tv_peer_get"

#endif
