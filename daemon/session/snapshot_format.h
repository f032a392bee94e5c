/*
 * snapshot_format.h - what the two halves of a snapshot's format share; private to session/.
 */
#ifndef TV_SESSION_SNAPSHOT_FORMAT_H
#define TV_SESSION_SNAPSHOT_FORMAT_H

#include "session/snapshot.h"

#define SNAPSHOT_MAGIC            "treeverify-snap" /* with its NUL */
#define SNAPSHOT_MAGIC_BYTES      16
#define SNAPSHOT_VERSION          2
#define SNAPSHOT_VERSION_OLDEST   1 /* that is read */
#define SNAPSHOT_PRINCIPAL_BYTES  40
#define SNAPSHOT_BODY_FIXED_BYTES 436
#define SNAPSHOT_KEPT_BYTES       64 /* of an answer, in front of it */

enum { SNAPSHOT_SESSION = 1, SNAPSHOT_END = 2 };

/* snapshot_body.c. What a body says, into the item's session, which is blank, and the rest of it;
 * known: how many pages it may name. NULL, or what is wrong; the item is to be finished then. */
const char *tv_snapshot_body_decode(const uint8_t *body, size_t bytes, uint32_t version,
                                    uint64_t known, int32_t vocab, struct tv_snapshot_item *item);

static inline void tv_snapshot_set32(uint8_t *to, uint32_t number)
{
    for (int i = 0; i < 4; i++) {
        to[i] = (uint8_t)(number >> (8 * i));
    }
}

static inline void tv_snapshot_set64(uint8_t *to, uint64_t number)
{
    for (int i = 0; i < 8; i++) {
        to[i] = (uint8_t)(number >> (8 * i));
    }
}

static inline uint32_t tv_snapshot_get32(const uint8_t *from)
{
    uint32_t number = 0;
    for (int i = 3; i >= 0; i--) {
        number = number << 8 | from[i];
    }
    return number;
}

static inline uint64_t tv_snapshot_get64(const uint8_t *from)
{
    return (uint64_t)tv_snapshot_get32(from + 4) << 32 | tv_snapshot_get32(from);
}

#endif
