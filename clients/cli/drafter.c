/*
 * drafter.c - suffix index, match collection and the choice of nodes.
 *
 * All tokens lie in one array: the store, a separator that matches nothing, the context. For each
 * suffix length a hash table holds chains of the positions where a suffix of that length ends,
 * newest first. A draft walks the chains, puts what followed each match into a trie with weights,
 * and takes nodes in order of their estimated probability. Refuses to allocate while drafting.
 */
#include "clients/cli/drafter.h"

#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#define TOKENS_MAX    ((size_t)1 << 30)
#define LEVELS        5
#define MATCHES_MAX   256  /* taken per suffix length */
#define STEPS_MAX     2048 /* links followed per suffix length, taken or not */
#define TRIE_MAX      (1 + LEVELS * MATCHES_MAX * TV_DRAFTER_DEPTH_MAX)
#define HEADS_MIN_LOG 12
#define NONE          (-1)

/* Suffix lengths, and what one match of each is worth: a long suffix is rarely wrong. Chosen by
 * measurement on held-out text (clients/README.md). */
static const int32_t suffix_lens[LEVELS] = {12, 8, 6, 4, 3};
static const double suffix_weights[LEVELS] = {64.0, 16.0, 5.0, 1.0, 0.25};
/* Mass that a node keeps for "none of these", so deep guesses on thin evidence come last. */
static const double escape_weight = 3.0;

struct node {
    int32_t token, parent, child, sibling; /* trie links, NONE at the end */
    int32_t depth;
    double weight;  /* of all matches through this node */
    double below;   /* of its children together */
    double chance;  /* estimated probability of the path to it */
    int32_t placed; /* index in the tree handed out, NONE before */
};

struct tv_drafter {
    int32_t *tokens;
    size_t count, capacity, context_from;
    int32_t *heads[LEVELS]; /* [1 << heads_log] newest position, NONE when empty */
    int32_t *links[LEVELS]; /* [capacity] the position before it in its chain */
    int heads_log;
    struct node *trie; /* [TRIE_MAX] */
    int32_t trie_count;
    int32_t *frontier;     /* [TRIE_MAX] nodes whose parent is placed */
    int32_t *tree_tokens;  /* [TRIE_MAX] */
    int32_t *tree_parents; /* [TRIE_MAX] */
    double *tree_chances;  /* [TRIE_MAX] */
};

static uint32_t hash_suffix(const struct tv_drafter *drafter, size_t end, int32_t len)
{
    uint64_t h = 0x9e3779b97f4a7c15u;
    for (int32_t i = 0; i < len; i++) {
        h = (h ^ (uint32_t)drafter->tokens[end - 1 - (size_t)i]) * 0xff51afd7ed558ccdu;
        h ^= h >> 29;
    }
    return (uint32_t)(h >> (64 - drafter->heads_log));
}

/* Enter the suffixes that end before position `end` of the segment starting at `from`. */
static void index_position(struct tv_drafter *drafter, size_t from, size_t end)
{
    for (int level = 0; level < LEVELS; level++) {
        if (end - from < (size_t)suffix_lens[level]) {
            continue;
        }
        uint32_t slot = hash_suffix(drafter, end, suffix_lens[level]);
        drafter->links[level][end] = drafter->heads[level][slot];
        drafter->heads[level][slot] = (int32_t)end;
    }
}

/* Room for `more` tokens; positions run to count, one past the last token. */
static int reserve(struct tv_drafter *drafter, size_t more)
{
    if (more > TOKENS_MAX - drafter->count) {
        return -E2BIG;
    }
    size_t need = drafter->count + more + 1;
    if (need <= drafter->capacity) {
        return 0;
    }
    size_t capacity = need + need / 2;
    int32_t *tokens = realloc(drafter->tokens, capacity * sizeof(*tokens));
    if (tokens == NULL) {
        return -ENOMEM;
    }
    drafter->tokens = tokens;
    for (int level = 0; level < LEVELS; level++) {
        int32_t *links = realloc(drafter->links[level], capacity * sizeof(*links));
        if (links == NULL) {
            return -ENOMEM; /* capacity is unchanged: larger arrays do no harm */
        }
        drafter->links[level] = links;
    }
    drafter->capacity = capacity;
    return 0;
}

static void append(struct tv_drafter *drafter, size_t from, const int32_t *tokens, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        drafter->tokens[drafter->count] = tokens[i];
        drafter->count++;
        index_position(drafter, from, drafter->count);
    }
}

static int any_negative(const int32_t *tokens, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        if (tokens[i] < 0) {
            return 1;
        }
    }
    return 0;
}

static int create_tables(struct tv_drafter *drafter, size_t store_count)
{
    drafter->heads_log = HEADS_MIN_LOG;
    while (drafter->heads_log < 22 && ((size_t)1 << drafter->heads_log) < store_count) {
        drafter->heads_log++;
    }
    size_t heads = (size_t)1 << drafter->heads_log;
    for (int level = 0; level < LEVELS; level++) {
        drafter->heads[level] = malloc(heads * sizeof(**drafter->heads));
        if (drafter->heads[level] == NULL) {
            return -ENOMEM;
        }
        for (size_t i = 0; i < heads; i++) {
            drafter->heads[level][i] = NONE;
        }
    }
    drafter->trie = malloc(TRIE_MAX * sizeof(*drafter->trie));
    drafter->frontier = malloc(TRIE_MAX * sizeof(*drafter->frontier));
    drafter->tree_tokens = malloc(TRIE_MAX * sizeof(*drafter->tree_tokens));
    drafter->tree_parents = malloc(TRIE_MAX * sizeof(*drafter->tree_parents));
    drafter->tree_chances = malloc(TRIE_MAX * sizeof(*drafter->tree_chances));
    if (drafter->trie == NULL || drafter->frontier == NULL || drafter->tree_tokens == NULL ||
        drafter->tree_parents == NULL || drafter->tree_chances == NULL) {
        return -ENOMEM;
    }
    return 0;
}

int tv_drafter_create(const int32_t *store, size_t store_count, struct tv_drafter **ret_drafter)
{
    assert(store != NULL || store_count == 0);
    if (store_count >= TOKENS_MAX) {
        return -E2BIG;
    }
    if (any_negative(store, store_count)) {
        return -EINVAL;
    }
    struct tv_drafter *drafter = calloc(1, sizeof(*drafter));
    if (drafter == NULL) {
        return -ENOMEM;
    }
    int error = create_tables(drafter, store_count);
    if (error != 0) {
        goto fail;
    }
    error = reserve(drafter, store_count + 1);
    if (error != 0) {
        goto fail;
    }
    append(drafter, 0, store, store_count);
    if (store_count > 0) {
        drafter->tokens[drafter->count] =
            NONE; /* nothing continues from the store into the context */
        drafter->count++;
    }
    drafter->context_from = drafter->count;
    *ret_drafter = drafter;
    return 0;
fail:
    tv_drafter_destroy(drafter);
    return error;
}

void tv_drafter_destroy(struct tv_drafter *drafter)
{
    if (drafter == NULL) {
        return;
    }
    for (int level = 0; level < LEVELS; level++) {
        free(drafter->heads[level]);
        free(drafter->links[level]);
    }
    free(drafter->tokens);
    free(drafter->trie);
    free(drafter->frontier);
    free(drafter->tree_tokens);
    free(drafter->tree_parents);
    free(drafter->tree_chances);
    free(drafter);
}

int tv_drafter_append(struct tv_drafter *drafter, const int32_t *tokens, size_t count)
{
    if (any_negative(tokens, count)) {
        return -EINVAL;
    }
    int error = reserve(drafter, count);
    if (error != 0) {
        return error;
    }
    append(drafter, drafter->context_from, tokens, count);
    return 0;
}

int tv_drafter_forget(struct tv_drafter *drafter, size_t count)
{
    if (count > drafter->count - drafter->context_from) {
        return -EINVAL;
    }
    for (; count > 0; count--, drafter->count--) {
        for (int level = 0; level < LEVELS; level++) { /* the newest of its chain: out it goes */
            if (drafter->count - drafter->context_from >= (size_t)suffix_lens[level]) {
                uint32_t slot = hash_suffix(drafter, drafter->count, suffix_lens[level]);
                drafter->heads[level][slot] = drafter->links[level][drafter->count];
            }
        }
    }
    return 0;
}

static int32_t add_node(struct tv_drafter *drafter, int32_t parent, int32_t token)
{
    assert(drafter->trie_count < TRIE_MAX);
    int32_t index = drafter->trie_count++;
    struct node *node = &drafter->trie[index];
    *node = (struct node){.token = token, .parent = parent, .child = NONE, .placed = NONE};
    if (parent != NONE) {
        node->sibling = drafter->trie[parent].child;
        node->depth = drafter->trie[parent].depth + 1;
        drafter->trie[parent].child = index;
    } else {
        node->sibling = NONE;
    }
    return index;
}

/* Merge the tokens from position `at` on into the trie. */
static void add_continuation(struct tv_drafter *drafter, size_t at, int32_t depth_max,
                             double weight)
{
    int32_t here = 0;
    for (int32_t depth = 0; depth < depth_max && at < drafter->count; depth++, at++) {
        int32_t token = drafter->tokens[at];
        if (token == NONE) {
            break;
        }
        int32_t child = drafter->trie[here].child;
        while (child != NONE && drafter->trie[child].token != token) {
            child = drafter->trie[child].sibling;
        }
        if (child == NONE) {
            child = add_node(drafter, here, token);
        }
        drafter->trie[child].weight += weight;
        drafter->trie[here].below += weight;
        here = child;
    }
}

static void collect_level(struct tv_drafter *drafter, int level, int32_t depth_max)
{
    size_t end = drafter->count;
    size_t len = (size_t)suffix_lens[level];
    if (end - drafter->context_from < len) {
        return;
    }
    const int32_t *suffix = drafter->tokens + end - len;
    int32_t at = drafter->links[level][end]; /* the chain's newest entry is the suffix itself */
    int taken = 0;
    for (int steps = 0; at != NONE && steps < STEPS_MAX && taken < MATCHES_MAX; steps++) {
        int32_t next = drafter->links[level][at];
        if (next != NONE) { /* positions lie anywhere in a store that no cache holds */
            __builtin_prefetch(drafter->links[level] + next);
            __builtin_prefetch(drafter->tokens + (size_t)next - len);
            __builtin_prefetch(drafter->tokens + next + TV_DRAFTER_DEPTH_MAX - 1);
        }
        if (memcmp(drafter->tokens + (size_t)at - len, suffix, len * sizeof(*suffix)) == 0) {
            add_continuation(drafter, (size_t)at, depth_max, suffix_weights[level]);
            taken++;
        }
        at = next;
    }
}

static int32_t push_children(struct tv_drafter *drafter, int32_t parent, int32_t frontier_count)
{
    const struct node *from = &drafter->trie[parent];
    for (int32_t child = from->child; child != NONE; child = drafter->trie[child].sibling) {
        struct node *node = &drafter->trie[child];
        node->chance = from->chance * node->weight / (from->below + escape_weight);
        drafter->frontier[frontier_count++] = child;
    }
    return frontier_count;
}

/* Take nodes best first; a parent is always at least as likely as its child, so it comes before. */
static int32_t choose(struct tv_drafter *drafter, int32_t nodes_max)
{
    int32_t count = 1;
    drafter->trie[0].placed = 0;
    drafter->tree_tokens[0] = drafter->trie[0].token;
    drafter->tree_parents[0] = -1;
    drafter->tree_chances[0] = 1.0;
    int32_t frontier_count = push_children(drafter, 0, 0);
    while (count < nodes_max && frontier_count > 0) {
        int32_t best = 0;
        for (int32_t i = 1; i < frontier_count; i++) {
            if (drafter->trie[drafter->frontier[i]].chance >
                drafter->trie[drafter->frontier[best]].chance) {
                best = i;
            }
        }
        int32_t index = drafter->frontier[best];
        drafter->frontier[best] = drafter->frontier[--frontier_count];
        struct node *node = &drafter->trie[index];
        node->placed = count;
        drafter->tree_tokens[count] = node->token;
        drafter->tree_chances[count] = node->chance;
        drafter->tree_parents[count] = drafter->trie[node->parent].placed;
        count++;
        frontier_count = push_children(drafter, index, frontier_count);
    }
    return count;
}

int tv_drafter_draft(struct tv_drafter *drafter, int32_t nodes_max, int32_t depth_max,
                     struct tv_draft *ret_draft)
{
    if (nodes_max < 1 || depth_max < 0 || depth_max > TV_DRAFTER_DEPTH_MAX ||
        drafter->count == drafter->context_from) {
        return -EINVAL;
    }
    /* a node of the tree has all nodes above it beside it: deeper ones could not be chosen */
    depth_max = depth_max < nodes_max - 1 ? depth_max : nodes_max - 1;
    drafter->trie_count = 0;
    int32_t root = add_node(drafter, NONE, drafter->tokens[drafter->count - 1]);
    drafter->trie[root].chance = 1.0;
    for (int level = 0; level < LEVELS; level++) {
        collect_level(drafter, level, depth_max);
    }
    ret_draft->count = choose(drafter, nodes_max);
    ret_draft->tokens = drafter->tree_tokens;
    ret_draft->parents = drafter->tree_parents;
    ret_draft->chances = drafter->tree_chances;
    return 0;
}
