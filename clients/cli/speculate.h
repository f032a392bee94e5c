/*
 * speculate.h - one round of a drafted tree after the other, waited for or sent ahead.
 *
 * Owns the tree under way and the guess behind it. Draws trees from the drafter and appends nothing
 * to it for good: the caller does that with what a round gave.
 */
#ifndef TV_CLI_SPECULATE_H
#define TV_CLI_SPECULATE_H

#include "clients/c/treeverify-client.h"
#include "clients/cli/budget.h"
#include "clients/cli/drafter.h"

/* A tree; the drafter's own arrays are gone with its next one. */
struct tv_sent {
    int32_t tokens[TV_CLIENT_NODES_MAX], parents[TV_CLIENT_NODES_MAX];
    int32_t count;
    double promised; /* chances of its drafts together */
};

struct tv_speculation {
    struct tv_client_session *session; /* not owned */
    struct tv_drafter *drafter;        /* not owned; its context is the session's text */
    const int32_t *stop_ids;           /* [stop_count] */
    int32_t stop_count;
    struct tv_budget *budget; /* cuts trees to what is worth sending, and learns; NULL: none is cut;
                                 not owned */
    int32_t ahead;      /* ends that are guessed behind each tree, at most; 0: none is sent ahead */
    int32_t sent_ahead; /* rounds behind which guesses were sent */
    int32_t right;      /* of which one was right */
    struct tv_sent ran; /* the tree of the round received last */
    struct tv_sent sent;                        /* the tree under way */
    struct tv_sent next[TV_CLIENT_GUESSES_MAX]; /* those of the guesses behind it */
};

/* One round of a tree of at most nodes nodes, of which left tokens are wanted (1 and more). 0; what
 * the drafter and the client's calls return. */
int tv_speculate(struct tv_speculation *spec, int32_t nodes, int64_t left,
                 struct tv_client_round *ret_round, struct tv_client_problem *ret_problem);

#endif
