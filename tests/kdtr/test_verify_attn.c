/*
 * test_verify_attn.c - runs .kdtr bundles through a backend's attention and judges the result.
 *
 *   test_verify_attn FILE... [--flash] [--backend cpu|cuda|ref] [--splits N] [--threads N]
 * [--unfilled] [--alone]
 *
 * Without --flash the naive slot runs (phase 0), with it the fast one (phase 1). One line per
 * bundle; exit 1 when any bundle fails, 77 when there is no such device. The bounds are those of
 * the numerics contract, kernels/README.md. Outputs and workspace are poisoned before every run;
 * --unfilled leaves them as they were allocated, for a tool that knows what was never written;
 * --alone, for one under which the naive slot takes too long, runs no other slot than the one it
 * judges, whose bf16 results then have the fixed bounds only.
 */
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/kernels.h"
#include "tests/kdtr/kdtr.h"
#include "tests/support/backend.h"

enum { BUFFERS_MAX = 16 };

struct options {
    int flash;
    int32_t splits;
    const char *backend;
    int32_t threads;
    int unfilled;
    int alone;
};

struct figures {
    double max_abs, max_rel, rel_l2, lse_abs;
    double out_max, lse_max; /* largest finite magnitudes of the reference */
    int64_t unwritten;
};

/* A bundle on the device. */
struct problem {
    struct tv_kernels *k;
    struct tv_verify_attn args;
    void *buffers[BUFFERS_MAX];
    int32_t buffer_count;
    int failed;   /* an allocation or upload */
    int unfilled; /* buffers without contents stay as they were allocated */
};

static void *put(struct problem *p, const void *host, size_t bytes)
{
    void *device = p->k->alloc(p->k, bytes ? bytes : 1);
    if (!device || p->buffer_count == BUFFERS_MAX) {
        p->failed = 1;
        return NULL;
    }
    p->buffers[p->buffer_count++] = device;
    int rc = host          ? p->k->upload(p->k, device, host, bytes)
             : p->unfilled ? 0
                           : p->k->fill(p->k, device, 0xff, bytes);
    p->failed |= rc != 0;
    return device;
}

static void release(struct problem *p)
{
    (void)p->k->sync(p->k); /* a failure shows in the download before it */
    while (p->buffer_count > 0) {
        p->k->free(p->k, p->buffers[--p->buffer_count]);
    }
}

static int64_t lse_count(const struct kdtr *b)
{
    return (int64_t)b->batch * b->q_len * b->heads;
}

static void upload(struct problem *p, const struct kdtr *b)
{
    struct tv_verify_attn *a = &p->args;
    size_t element = tv_dtype_size(b->dtype);
    int64_t rows = (int64_t)b->batch * b->q_len;
    a->batch = b->batch;
    a->q_len = b->q_len;
    a->heads = b->heads;
    a->latent_dim = TV_MLA_LATENT;
    a->rope_dim = TV_MLA_ROPE;
    a->softmax_scale = b->softmax_scale;
    a->dtype = b->dtype;
    a->out_dtype = TV_F32;
    a->page_count = b->page_count;
    a->page_size = b->page_size;
    a->max_pages = b->max_pages;
    for (int32_t i = 0; i < b->batch; i++) {
        int32_t tokens = b->prefix_len[i] + b->node_count[i];
        a->kv_len_max = tokens > a->kv_len_max ? tokens : a->kv_len_max;
    }
    a->q = put(p, b->q, (size_t)(lse_count(b) * TV_MLA_ROW) * element);
    a->kv_pages =
        put(p, b->kv_pages, (size_t)(b->page_count * b->page_size * TV_MLA_ROW) * element);
    a->page_table =
        put(p, b->page_table, (size_t)b->batch * (size_t)b->max_pages * sizeof(int32_t));
    a->prefix_len = put(p, b->prefix_len, (size_t)b->batch * sizeof(int32_t));
    a->node_count = put(p, b->node_count, (size_t)b->batch * sizeof(int32_t));
    a->parents = put(p, b->parents, (size_t)rows * sizeof(int32_t));
    a->out = put(p, NULL, (size_t)(lse_count(b) * TV_MLA_LATENT) * sizeof(float));
    a->lse = put(p, NULL, (size_t)lse_count(b) * sizeof(float));
}

/* Run one slot over the poisoned outputs and fetch them; out and lse are malloc'd. */
static int run(struct problem *p, const struct kdtr *b, int flash, float **ret_out, float **ret_lse)
{
    struct tv_verify_attn *a = &p->args;
    size_t out_bytes = (size_t)(lse_count(b) * TV_MLA_LATENT) * sizeof(float);
    size_t lse_bytes = (size_t)lse_count(b) * sizeof(float);
    if (!(flash ? p->k->verify_attn : p->k->verify_attn_naive)) {
        return -ENOTSUP;
    }
    a->workspace_bytes =
        flash ? p->k->verify_attn_workspace(p->k, a) : p->k->verify_attn_naive_workspace(p->k, a);
    a->workspace = put(p, NULL, a->workspace_bytes);
    if (p->failed) {
        return -ENOMEM;
    }
    int rc = p->unfilled ? 0 : p->k->fill(p->k, a->out, 0xff, out_bytes);
    if (rc == 0 && !p->unfilled) {
        rc = p->k->fill(p->k, a->lse, 0xff, lse_bytes);
    }
    if (rc == 0) {
        rc = flash ? p->k->verify_attn(p->k, a) : p->k->verify_attn_naive(p->k, a);
    }
    float *out = malloc(out_bytes);
    float *lse = malloc(lse_bytes);
    if (rc == 0 && (!out || !lse)) {
        rc = -ENOMEM;
    }
    if (rc == 0) {
        rc = p->k->download(p->k, out, a->out, out_bytes);
    }
    if (rc == 0) {
        rc = p->k->download(p->k, lse, a->lse, lse_bytes);
    }
    if (rc == 0) {
        rc = p->k->sync(p->k);
    }
    if (rc != 0) {
        free(out);
        free(lse);
        return rc;
    }
    *ret_out = out;
    *ret_lse = lse;
    return 0;
}

static int is_poison(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits == 0xffffffffu;
}

/* NaN in a result makes the figure it enters infinite. */
static double worse(double so_far, double value)
{
    return isnan(value) ? INFINITY : fmax(so_far, value);
}

static struct figures judge(const struct kdtr *b, const float *out, const float *lse)
{
    struct figures f = {0};
    double error = 0.0, norm = 0.0;
    for (int64_t i = 0; i < lse_count(b) * TV_MLA_LATENT; i++) {
        double expected = (double)b->out[i];
        double difference = fabs((double)out[i] - expected);
        f.unwritten += is_poison(out[i]);
        f.max_abs = worse(f.max_abs, difference);
        f.max_rel = worse(f.max_rel, difference / fmax(fabs(expected), 1e-6));
        f.out_max = fmax(f.out_max, fabs(expected));
        error += difference * difference;
        norm += expected * expected;
    }
    f.rel_l2 = isnan(error) ? INFINITY : sqrt(error / norm);
    for (int64_t i = 0; i < lse_count(b); i++) {
        f.unwritten += is_poison(lse[i]);
        if (isinf(b->lse[i])) { /* padding */
            f.lse_abs = lse[i] == b->lse[i] ? f.lse_abs : INFINITY;
            continue;
        }
        f.lse_abs = worse(f.lse_abs, fabs((double)lse[i] - (double)b->lse[i]));
        f.lse_max = fmax(f.lse_max, fabs((double)b->lse[i]));
    }
    return f;
}

static int within_naive(const struct figures *f)
{
    return f->max_abs <= 1e-6 * fmax(1.0, f->out_max) && f->rel_l2 <= 1e-6 &&
           f->lse_abs <= 1e-6 * fmax(1.0, f->lse_max);
}

/* rel_l2 of the naive slot with probabilities rounded to bf16, the yardstick of bf16 kernels. */
static int rounded_rel_l2(struct problem *p, const struct kdtr *b, double *ret_rel_l2)
{
    float *out, *lse;
    p->args.round_p_bf16 = 1;
    int rc = run(p, b, 0, &out, &lse);
    p->args.round_p_bf16 = 0;
    if (rc == 0) {
        *ret_rel_l2 = judge(b, out, lse).rel_l2;
        free(out);
        free(lse);
    }
    return rc;
}

static int within_flash(const struct kdtr *b, const struct figures *f, double rounded)
{
    /* s needs max |score|; the largest score is at least lse - ln(tokens), so this s is never
     * larger than the contract's and the bounds are at least as strict. */
    int64_t tokens = b->prefix_len[0] + b->node_count[0];
    double s = fmax(1.0, (f->lse_max - log((double)tokens)) / 16.0);
    if (b->dtype == TV_F32) {
        return f->rel_l2 <= 2e-6 * s && f->lse_abs <= 1e-5 * s;
    }
    return f->rel_l2 <= 4e-3 && f->rel_l2 <= 2.0 * rounded && f->lse_abs <= 1e-4 * s;
}

static const char *base_name(const char *path)
{
    const char *slash = strrchr(path, '/');
    return slash ? slash + 1 : path;
}

/* 0 when the bundle passed. */
static int run_bundle(struct tv_kernels *k, const struct options *o, const char *path)
{
    const char *phase = o->flash ? "flash" : "naive";
    struct kdtr b;
    struct problem p = {.k = k, .unfilled = o->unfilled};
    char reason[KDTR_REASON_MAX];
    float *out = NULL, *lse = NULL;
    double rounded = INFINITY;
    int rc = kdtr_read(path, &b, reason);
    if (rc != 0) {
        printf("FAIL [%s] %s: %s\n", phase, base_name(path), reason);
        return 1;
    }
    upload(&p, &b);
    p.args.splits = o->splits;
    rc = run(&p, &b, o->flash, &out, &lse);
    if (rc == 0 && o->flash && b.dtype == TV_BF16 && !o->alone) {
        rc = rounded_rel_l2(&p, &b, &rounded);
    }
    if (rc != 0) {
        printf("FAIL [%s] %s: %s\n", phase, base_name(path), strerror(-rc));
        goto out;
    }
    struct figures f = judge(&b, out, lse);
    int pass = f.unwritten == 0 && (o->flash ? within_flash(&b, &f, rounded) : within_naive(&f));
    printf("%s [%s] %s B=%d H=%d q_len=%d kv_len=%d max_abs=%.3g max_rel=%.3g rel_l2=%.3g "
           "lse_abs=%.3g\n",
           pass ? "PASS" : "FAIL", phase, base_name(path), b.batch, b.heads, b.q_len,
           b.prefix_len[0] + b.node_count[0], f.max_abs, f.max_rel, f.rel_l2, f.lse_abs);
    if (f.unwritten > 0) {
        fprintf(stderr, "%s: %lld elements were not written\n", base_name(path),
                (long long)f.unwritten);
    }
    rc = pass ? 0 : 1;
out:
    free(out);
    free(lse);
    release(&p);
    kdtr_finish(&b);
    return rc != 0;
}

static int usage(void)
{
    fprintf(stderr, "usage: test_verify_attn FILE... [--flash] [--backend cpu|cuda|ref] "
                    "[--splits N] [--threads N] [--unfilled] [--alone]\n");
    return 64;
}

int main(int argc, char **argv)
{
    struct options o = {.backend = "cpu"};
    struct tv_kernels *k = NULL;
    int files = 0, failed = 0;
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--flash") == 0) {
            o.flash = 1;
        } else if (strcmp(argv[i], "--unfilled") == 0) {
            o.unfilled = 1;
        } else if (strcmp(argv[i], "--alone") == 0) {
            o.alone = 1;
        } else if (strncmp(argv[i], "--", 2) != 0) {
            argv[files++] = argv[i]; /* files move to the front, over what was read */
        } else if (i + 1 == argc) {
            return usage();
        } else if (strcmp(argv[i], "--backend") == 0) {
            o.backend = argv[++i];
        } else if (strcmp(argv[i], "--splits") == 0) {
            o.splits = atoi(argv[++i]);
        } else if (strcmp(argv[i], "--threads") == 0) {
            o.threads = atoi(argv[++i]);
        } else {
            return usage();
        }
    }
    if (files == 0) {
        return usage();
    }
    struct tv_kernels_options options = {.threads = o.threads, .cpu_flags_mask = ~(uint64_t)0};
    if (tv_test_backend_open(o.backend, &options, &k) != 0) {
        return strcmp(o.backend, "cuda") == 0 ? 77 : 2;
    }
    for (int i = 0; i < files; i++) {
        failed |= run_bundle(k, &o, argv[i]);
        (void)fflush(stdout);
    }
    k->destroy(k);
    return failed;
}
