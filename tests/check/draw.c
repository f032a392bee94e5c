/*
 * draw.c - checks of sampling and top-k against the reference; the reference itself is pinned by
 * tests/unit/test_kernels_draw.c.
 */
#include <math.h>
#include <stdio.h>

#include "tests/check/check.h"

static void one_draw(struct check *c, int32_t vocab)
{
    int32_t rows = check_range(c, 1, 12);
    size_t count = (size_t)rows * (size_t)vocab;
    float *logits = check_normals(c, (int64_t)count, 4.0f);
    int32_t *positions = check_host(c, (size_t)rows * sizeof *positions);
    struct tv_sampling *sampling = check_host(c, (size_t)rows * sizeof *sampling);
    struct tv_draw *draws = check_host(c, (size_t)rows * sizeof *draws);
    struct tv_draw *expected = check_host(c, (size_t)rows * sizeof *expected);
    static const float temperatures[] = {0.0f, 1e-6f, 1e-4f, 0.3f, 1.0f, 2.0f, 100.0f};
    static const float masses[] = {1e-9f, 0.1f, 0.9f, 0.999f, 1.0f, 1.0f};
    for (int32_t r = 0; r < rows; r++) {
        positions[r] = check_range(c, 0, 100000);
        sampling[r].temperature = temperatures[check_range(c, 0, 6)];
        sampling[r].top_p = masses[check_range(c, 0, 5)];
        sampling[r].min_p = check_range(c, 0, 2) ? 0.0f : 0.05f;
        sampling[r].top_k = check_range(c, 0, 1) ? 0 : check_range(c, 0, vocab);
        sampling[r].seed = check_random(c);
    }
    logits[vocab - 1] = logits[0]; /* a tie in the first row */
    if (rows > 2) {
        logits[2 * (size_t)vocab - 1] = NAN; /* the second row has no token */
    }
    struct tv_draw_args a = {.rows = rows, .vocab = vocab};
    a.logits = check_upload(c, logits, count * sizeof(float));
    a.positions = check_upload(c, positions, (size_t)rows * sizeof *positions);
    a.sampling = check_upload(c, sampling, (size_t)rows * sizeof *sampling);
    a.draws = check_poisoned(c, (size_t)rows * sizeof *draws);
    a.workspace_bytes = c->k->draw_workspace(c->k, &a);
    a.workspace = check_poisoned(c, a.workspace_bytes);
    struct tv_draw_args b = {.rows = rows, .vocab = vocab, .logits = logits};
    b.positions = positions;
    b.sampling = sampling;
    b.draws = expected;
    b.workspace_bytes = c->ref->draw_workspace(c->ref, &b);
    b.workspace = check_host(c, b.workspace_bytes);
    if (check_ok(c, c->k->draw(c->k, &a), "draw") &&
        check_ok(c, c->ref->draw(c->ref, &b), "draw")) {
        check_download(c, draws, a.draws, (size_t)rows * sizeof *draws);
        for (int32_t r = 0; r < rows; r++) {
            /* a gap below f32's resolution of the scores may fall either way */
            if (draws[r].token != expected[r].token && !(expected[r].margin < 2e-5f)) {
                check_fail(c, "draw row %d: token %d, expected %d, margin %g", r, draws[r].token,
                           expected[r].token, (double)expected[r].margin);
            } else if (draws[r].token == expected[r].token && draws[r].token >= 0) {
                check_near(c, &draws[r].margin, &expected[r].margin, 1, 1e-5, 1e-5, "margin");
                check_near(c, &draws[r].logprob, &expected[r].logprob, 1, 1e-5, 1e-5, "logprob");
                if (draws[r].kept != expected[r].kept) {
                    check_fail(c, "draw row %d: kept %d, expected %d", r, draws[r].kept,
                               expected[r].kept);
                }
            }
        }
    }
    check_release(c);
}

static void one_topk(struct check *c, int32_t vocab)
{
    struct tv_topk a = {.rows = check_range(c, 1, 12), .vocab = vocab};
    a.k = check_range(c, 0, vocab < 64 ? vocab : 64);
    size_t count = (size_t)a.rows * (size_t)vocab, picked = (size_t)a.rows * (size_t)a.k;
    float *logits = check_normals(c, (int64_t)count, 4.0f);
    for (size_t i = 0; i < count; i += 3) {
        logits[i] = (float)(int32_t)logits[i]; /* many ties */
    }
    int32_t *ids = check_host(c, picked * sizeof *ids), *want_ids = check_host(c, picked * 4);
    float *values = check_host(c, picked * sizeof *values), *want = check_host(c, picked * 4);
    float *lse = check_host(c, (size_t)a.rows * 4), *want_lse = check_host(c, (size_t)a.rows * 4);
    struct tv_topk b = a;
    b.logits = logits, b.ids = want_ids, b.values = want, b.lse = want_lse;
    a.logits = check_upload(c, logits, count * sizeof(float));
    a.ids = check_poisoned(c, picked * sizeof *ids);
    a.values = check_poisoned(c, picked * sizeof *values);
    a.lse = check_poisoned(c, (size_t)a.rows * sizeof *lse);
    if (check_ok(c, c->k->topk(c->k, &a), "topk")) {
        (void)c->ref->topk(c->ref, &b);
        check_download(c, ids, a.ids, picked * sizeof *ids);
        check_download(c, values, a.values, picked * sizeof *values);
        check_download(c, lse, a.lse, (size_t)a.rows * sizeof *lse);
        check_same(c, ids, want_ids, picked * sizeof *ids, "topk ids");
        check_same(c, values, want, picked * sizeof *values, "topk values");
        check_near(c, lse, want_lse, a.rows, 1e-5, 1e-6, "topk lse");
    }
    check_release(c);
}

void check_draw(struct check *c)
{
    for (int32_t n = 0; n < 30 * c->scale; n++) {
        int32_t vocab = n == 0 ? 1 : n % 5 == 0 ? check_range(c, 1, 30000) : check_range(c, 1, 300);
        if (c->k->draw) {
            one_draw(c, vocab);
        }
        if (c->k->topk) {
            one_topk(c, vocab);
        }
    }
}
