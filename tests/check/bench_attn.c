/*
 * bench_attn.c - checkkern --bench: verify attention at the points of the measurement plan, and the
 * peers of a folder on the same queries, pages and lengths.
 *
 * bf16, causal chains, page size 64, pages scattered over the pool. A peer is timed only when its
 * result is that of the kernel; refuses to know any peer by name.
 */
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fnmatch.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "tests/check/bench.h"
#include "tests/check/peer.h"

enum { PEERS_MAX = 8, PAGE = 64, FLOP_OF_PAIR = 2 * (TV_MLA_ROW + TV_MLA_LATENT) };

/* What bf16 kernels may differ by before their times say nothing. */
#define AGREEMENT 1e-2

struct point {
    int32_t batch, heads, nodes, prefix;
};

static const struct point points[] = {
    {2, 16, 17, 2048},   {1, 64, 33, 128},    {2, 64, 9, 512},    {2, 8, 9, 0},
    {2, 8, 5, 1},        {1, 16, 17, 25000},  {1, 8, 17, 185000}, {1, 16, 17, 185000},
    {1, 64, 17, 185000}, {1, 64, 64, 32768},  {8, 16, 33, 8192},  {32, 16, 17, 4096},
    {32, 64, 17, 4096},  {1, 128, 64, 32768}, {1, 16, 1, 185000}, {64, 16, 1, 8192},
};

struct peers {
    const struct tv_peer *all[PEERS_MAX];
    void *libraries[PEERS_MAX];
    int32_t count, library_count;
};

/* A point on the device. */
struct problem {
    struct tv_peer_input input; /* out is the kernel's here */
    void *peer_out;
    int64_t out_count;
    double flop, bytes;
};

static int is_peer(const struct dirent *entry)
{
    return fnmatch("peer_*.so", entry->d_name, 0) == 0;
}

static void open_peers(struct check *c, const char *folder, struct peers *peers)
{
    struct dirent **entries = NULL;
    int found = scandir(folder, &entries, is_peer, alphasort);
    for (int i = 0; i < found; i++) {
        char path[4096];
        const struct tv_peer *peer = NULL;
        (void)snprintf(path, sizeof path, "%s/%s", folder, entries[i]->d_name);
        void *library =
            peers->library_count < PEERS_MAX ? dlopen(path, RTLD_NOW | RTLD_LOCAL) : NULL;
        tv_peer_get_fn *get = NULL;
        if (library) {
            peers->libraries[peers->library_count++] = library;
            *(void **)&get = dlsym(library, TV_PEER_GET);
        }
        if (!get) {
            check_fail(c, "%s: %s", path, dlerror());
        }
        for (int32_t n = 0; get && (peer = get(n)) && peers->count < PEERS_MAX; n++) {
            if (peer->abi != TV_KERNELS_ABI) {
                check_fail(c, "%s: built for ABI %u", path, peer->abi);
                break;
            }
            peers->all[peers->count++] = peer;
        }
        free(entries[i]);
    }
    free(entries);
    if (found <= 0) {
        check_fail(c, "%s: no peer_*.so", folder);
    }
}

/* The pool's page order: a random permutation, so that neighbours in a request are none in memory.
 */
static int32_t *scattered(struct check *c, int32_t count)
{
    int32_t *order = check_host(c, (size_t)count * sizeof *order);
    for (int32_t i = 0; i < count; i++) {
        int32_t other = check_range(c, 0, i);
        order[i] = order[other];
        order[other] = i;
    }
    return order;
}

/* bf16 values of unit variance, made on the device. */
static void *values(struct check *c, int64_t rows, uint32_t tensor)
{
    struct tv_synthesize a = {.groups = 1, .cols = TV_MLA_ROW, .dtype = TV_BF16, .seed = 11};
    a.rows = (int32_t)rows;
    a.scale = 1.7320508f;
    a.tensor = tensor;
    a.to = check_poisoned(c, (size_t)rows * TV_MLA_ROW * sizeof(uint16_t));
    (void)check_ok(c, c->k->synthesize(c->k, &a), "synthesize");
    return a.to;
}

static struct problem make(struct check *c, const struct point *at)
{
    struct problem p = {.input = {.stream = c->k->stream}};
    struct tv_verify_attn *a = &p.input.args;
    int32_t tokens = at->prefix + at->nodes, pages = (tokens + PAGE - 1) / PAGE;
    int32_t *lengths = check_host(c, 2 * (size_t)at->batch * sizeof *lengths);
    int32_t *parents = check_host(c, (size_t)at->batch * (size_t)at->nodes * sizeof *parents);
    int64_t rows = (int64_t)at->batch * at->nodes * at->heads;
    p.out_count = rows * TV_MLA_LATENT;
    p.flop = (double)FLOP_OF_PAIR * (double)rows * tokens;
    p.bytes = (double)at->batch * tokens * TV_MLA_ROW * sizeof(uint16_t);
    for (int32_t b = 0; b < at->batch; b++) {
        lengths[b] = at->prefix;
        lengths[at->batch + b] = at->nodes;
        for (int32_t i = 0; i < at->nodes; i++) {
            parents[b * at->nodes + i] = i - 1;
        }
    }
    *a = (struct tv_verify_attn){.batch = at->batch, .q_len = at->nodes, .heads = at->heads};
    a->latent_dim = TV_MLA_LATENT;
    a->rope_dim = TV_MLA_ROPE;
    a->softmax_scale = 0.07216878f; /* (128 + 64)^-0.5 */
    a->dtype = a->out_dtype = TV_BF16;
    a->page_size = PAGE;
    a->max_pages = pages;
    a->page_count = (int64_t)at->batch * pages;
    a->kv_len_max = tokens;
    p.input.prefix_len = lengths;
    p.input.node_count = lengths + at->batch;
    p.input.page_table = scattered(c, (int32_t)a->page_count);
    int32_t *device = check_upload(c, lengths, 2 * (size_t)at->batch * sizeof *lengths);
    a->prefix_len = device;
    a->node_count = device + at->batch;
    a->page_table = check_upload(c, p.input.page_table, (size_t)a->page_count * sizeof(int32_t));
    a->parents = check_upload(c, parents, (size_t)at->batch * (size_t)at->nodes * sizeof *parents);
    a->q = values(c, rows, 1);
    a->kv_pages = values(c, a->page_count * PAGE, 2);
    a->out = check_poisoned(c, (size_t)p.out_count * sizeof(uint16_t));
    p.peer_out = check_poisoned(c, (size_t)p.out_count * sizeof(uint16_t));
    a->lse = check_poisoned(c, (size_t)rows * sizeof(float));
    a->workspace_bytes = c->k->verify_attn_workspace(c->k, a);
    a->workspace = check_poisoned(c, a->workspace_bytes);
    return p;
}

static int run_kernel(struct check *c, const void *arg)
{
    return c->k->verify_attn(c->k, &((const struct problem *)arg)->input.args);
}

/* A prepared peer as a bench_fn's argument. */
struct ready {
    const struct tv_peer *peer;
    void *state;
};

static int run_peer(struct check *c, const void *arg)
{
    const struct ready *ready = arg;
    (void)c;
    return ready->peer->run(ready->state);
}

/* rel_l2 of the peer's result against the kernel's. */
static double difference(struct check *c, const struct problem *p)
{
    size_t bytes = (size_t)p->out_count * sizeof(uint16_t);
    uint16_t *ours = check_host(c, bytes), *theirs = check_host(c, bytes);
    double error = 0.0, norm = 0.0;
    check_download(c, ours, p->input.args.out, bytes);
    check_download(c, theirs, p->peer_out, bytes);
    for (int64_t i = 0; i < p->out_count; i++) {
        double x = (double)tv_bf16_to_f32(ours[i]), y = (double)tv_bf16_to_f32(theirs[i]);
        error += (x - y) * (x - y);
        norm += x * x;
    }
    return sqrt(error / norm);
}

/* Prints how many times the kernel's time the peer takes, or why it does not say. */
static void column(const struct bench *b, const struct problem *p, const struct tv_peer *peer,
                   double kernel)
{
    struct check *c = b->c;
    struct tv_peer_input input = p->input;
    struct ready ready = {.peer = peer};
    input.args.out = p->peer_out;
    (void)c->k->fill(c->k, p->peer_out, 0xff, (size_t)p->out_count * sizeof(uint16_t));
    (void)c->k->sync(c->k);
    int rc = peer->prepare(&input, &ready.state);
    if (rc != 0) {
        printf(" | %s: no (%s)", peer->name, strerror(-rc));
        return;
    }
    rc = peer->run(ready.state);
    double wrong = rc == 0 ? difference(c, p) : NAN;
    double seconds = wrong <= AGREEMENT ? bench_seconds(b, peer->name, run_peer, &ready) : -1.0;
    if (seconds > 0.0) {
        printf(" | %s %.1f us x %.2f", peer->name, seconds * 1e6, seconds / kernel);
    } else {
        printf(" | %s: no (rel_l2 %.1e)", peer->name, wrong);
    }
    (void)c->k->sync(c->k);
    peer->finish(ready.state);
}

void bench_attn_points(const struct bench *b)
{
    struct peers peers = {.count = 0};
    if (b->peers) {
        open_peers(b->c, b->peers, &peers);
    }
    for (size_t i = 0; i < sizeof points / sizeof points[0]; i++) {
        const struct point *at = &points[i];
        char name[64];
        struct problem p = make(b->c, at);
        (void)snprintf(name, sizeof name, "verify_attn %d x %d heads x %d nodes x %d", at->batch,
                       at->heads, at->nodes, at->prefix);
        double seconds = bench_seconds(b, name, run_kernel, &p);
        if (seconds > 0.0) {
            bench_row(b, name, seconds, p.flop, p.bytes);
            for (int32_t n = 0; n < peers.count; n++) {
                column(b, &p, peers.all[n], seconds);
            }
            printf("\n");
            (void)fflush(stdout);
        }
        check_release(b->c);
    }
    while (peers.library_count > 0) {
        (void)dlclose(peers.libraries[--peers.library_count]);
    }
}
