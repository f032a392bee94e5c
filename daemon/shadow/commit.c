/*
 * commit.c - the KV rows after a commit: are they, bit for bit, those that the layers wrote?
 *
 * Owns a copy of the accepted rows for the time of one call. Refuses to look at rounds that were
 * not captured whole, and at rows that were not accepted.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "shadow/device.h"

/* Rows [start, start + count) of the sequence, of every layer: [layers, count, row]. */
static int rows_fetch(const struct tv_shadow_round *round, const struct tv_cache_seq *seq,
                      int32_t start, int32_t count, char *ret_rows)
{
    size_t row_bytes = tv_shadow_round_row_bytes(round);
    int rc = 0;
    for (int32_t layer = 0; layer < round->layer_count; layer++) {
        const char *pool = tv_cache_layer(round->cache, layer);
        for (int32_t i = 0; rc == 0 && i < count; i++) {
            int64_t slot = tv_cache_slot(round->cache, seq, start + i);
            size_t at = (size_t)layer * (size_t)count + (size_t)i;
            rc = tv_shadow_fetch(round->shadow, ret_rows + at * row_bytes,
                                 pool + (size_t)slot * row_bytes, row_bytes);
        }
    }
    int sync_rc = tv_shadow_fetch_sync(round->shadow); /* also before the memory is freed */
    return rc != 0 ? rc : sync_rc;
}

/* The row of a node as the layer's kernel read it. */
static const char *captured_row(const struct tv_shadow_round *round, int32_t layer, int32_t node)
{
    size_t row = (size_t)(round->prefix_len - round->tail_start + node);
    const char *tail = round->layers[layer].kv_tail;
    return tail + row * tv_shadow_round_row_bytes(round);
}

void tv_shadow_committed(void *context, const struct tv_cache_seq *seq, const int32_t *nodes,
                         int32_t count)
{
    struct tv_shadow_round *round = context;
    size_t row_bytes = tv_shadow_round_row_bytes(round);
    if (round->failed != 0 || round->captured != round->layer_count) {
        return;
    }
    if (round->on_device) {
        round->failed = tv_shadow_device_committed(round->shadow, round, seq, nodes, count);
        return;
    }
    char *rows = malloc((size_t)round->layer_count * (size_t)count * row_bytes + 1);
    int rc = rows == NULL ? -ENOMEM : rows_fetch(round, seq, seq->len - count, count, rows);
    for (int32_t layer = 0; rc == 0 && layer < round->layer_count; layer++) {
        for (int32_t i = 0; i < count; i++) {
            size_t at = (size_t)layer * (size_t)count + (size_t)i;
            round->moved_wrong |=
                memcmp(rows + at * row_bytes, captured_row(round, layer, nodes[i]), row_bytes) != 0;
        }
    }
    free(rows);
    if (rc != 0) {
        round->failed = rc;
    }
}

enum tv_shadow_verdict tv_shadow_commit_judge(struct tv_shadow *shadow,
                                              const struct tv_shadow_round *round,
                                              const struct tv_parity_case *parity_case)
{
    if (!round->moved_wrong) {
        return TV_SHADOW_EXACT;
    }
    if (!round->on_demand && parity_case->prefix != NULL) {
        tv_shadow_reproduce_path(shadow, parity_case);
    } else if (!round->on_demand) { /* nothing was attached: no memory for it */
        tv_shadow_files_add(shadow, "path", NULL, 0);
    }
    return TV_SHADOW_VIOLATION;
}
