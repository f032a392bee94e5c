/*
 * test_verify_shared.c - a prompt that is prefilled in launches of rounds: neither the prompt's
 * rows and its draw, nor the rounds, can be told from those that ran alone, bit for bit.
 *
 * usage: test_verify_shared [BACKEND]; with one (cuda), its cases run on that alone.
 */
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "engine_fixture.h"

#define PROMPT 150
#define GUESTS 3
#define VOCAB  307 /* at most, of the checkpoints */
#define NODES  24  /* of the largest tree */
#define ROUNDS 11

static const int32_t guest_nodes[GUESTS] = {1, 7, NODES};
static const int32_t guest_prefix[GUESTS] = {3, 40, 64};
/* Tokens of the prompt that ride along with one launch after the other. */
static const int32_t riders[] = {1, 16, 3, 32, 5, 64, 2};

static const char *backend_asked;

/* What a launch's rounds answered, and what the prompt came to. */
struct outcome {
    int32_t launches;
    float *logits; /* [ROUNDS, GUESTS, NODES, VOCAB], owned */
    int32_t accepted[ROUNDS][GUESTS], pending[ROUNDS][GUESTS];
    struct tv_drawn drawn;
    char *rows; /* [pages, page bytes], owned: the prompt's */
    size_t rows_bytes;
};

struct setting {
    struct tv_engine_fixture fixture;
    struct tv_engine *engine;
    struct tv_context *guests[GUESTS], *host;
    struct tv_tree trees[ROUNDS][GUESTS];
    int32_t prompt[PROMPT];
};

static void setting_open(struct setting *setting, const struct tv_engine_fixture_options *options)
{
    struct tv_test_random random = {.state = 77};
    memset(setting, 0, sizeof *setting);
    tv_engine_fixture_open(&setting->fixture, options);
    setting->engine = setting->fixture.engine;
    int32_t vocab = setting->engine->vocab;
    assert_true(vocab <= VOCAB);
    tv_test_prefix_fill(setting->prompt, PROMPT, vocab, 6);
    for (int32_t round = 0; round < ROUNDS; round++) {
        for (int32_t g = 0; g < GUESTS; g++) {
            tv_test_tree_random(&setting->trees[round][g], guest_nodes[g], vocab, 9 + round,
                                &random);
        }
    }
}

static void setting_close(struct setting *setting)
{
    for (int32_t round = 0; round < ROUNDS; round++) {
        for (int32_t g = 0; g < GUESTS; g++) {
            tv_tree_finish(&setting->trees[round][g]);
        }
    }
    tv_engine_fixture_close(&setting->fixture);
}

static void contexts_open(struct setting *setting)
{
    struct tv_round_rule rule = tv_test_greedy(setting->engine);
    int32_t prefix[64];
    for (int32_t g = 0; g < GUESTS; g++) {
        setting->guests[g] = tv_test_context(setting->engine);
        tv_test_prefix_fill(prefix, guest_prefix[g], setting->engine->vocab, 50 + (uint64_t)g);
        (void)tv_test_prefill(setting->engine, setting->guests[g], prefix, guest_prefix[g], &rule);
    }
    setting->host = tv_test_context(setting->engine);
}

static void contexts_close(struct setting *setting)
{
    for (int32_t g = 0; g < GUESTS; g++) {
        setting->engine->ops->context_close(setting->engine, setting->guests[g]);
    }
    setting->engine->ops->context_close(setting->engine, setting->host);
}

static void outcome_init(struct outcome *outcome)
{
    memset(outcome, 0, sizeof *outcome);
    outcome->logits = calloc((size_t)ROUNDS * GUESTS * NODES * VOCAB, sizeof(float));
    assert_non_null(outcome->logits);
}

static void outcome_finish(struct outcome *outcome)
{
    free(outcome->logits);
    free(outcome->rows);
}

/* One round of `count` guests from `first` on, committed: the next ones depend on it. */
static void launch(struct setting *setting, struct outcome *outcome, int32_t round, int32_t first,
                   int32_t count, struct tv_rider *rider)
{
    struct tv_engine *engine = setting->engine;
    struct tv_round_in in[GUESTS];
    struct tv_round_out out[GUESTS];
    for (int32_t i = 0; i < count; i++) {
        in[i] = (struct tv_round_in){.context = setting->guests[first + i],
                                     .tree = &setting->trees[round][first + i],
                                     .rule = tv_test_sampled(engine, 0.7f, 5),
                                     .commit = 1,
                                     .want_logits = 1};
    }
    int rc = rider != NULL ? engine->ops->verify_shared(engine, in, count, out, rider)
                           : engine->ops->verify(engine, in, count, out);
    assert_int_equal(rc, 0);
    for (int32_t i = 0; i < count; i++) {
        int32_t g = first + i;
        size_t at = ((size_t)round * GUESTS + (size_t)g) * NODES * VOCAB;
        assert_int_equal(out[i].code, TV_OK);
        memcpy(outcome->logits + at, out[i].logits,
               (size_t)guest_nodes[g] * (size_t)engine->vocab * sizeof(float));
        outcome->accepted[round][g] = out[i].accepted_count;
        outcome->pending[round][g] = out[i].end.token;
    }
}

/* The bits of the prompt's committed rows; what lies behind them in the last page is left out. */
static void rows_keep(struct setting *setting, struct outcome *outcome)
{
    struct tv_engine *engine = setting->engine;
    const struct tv_cache_params *params = tv_cache_params(setting->fixture.base.cache);
    const struct tv_cache_seq *seq = engine->ops->context_seq(setting->host);
    size_t row = (size_t)params->row_dim * tv_dtype_size(params->dtype);
    size_t page = row * (size_t)params->page_size * (size_t)params->layers;
    assert_int_equal(seq->len, PROMPT);
    outcome->rows_bytes = page * (size_t)seq->page_count;
    outcome->rows = malloc(outcome->rows_bytes);
    assert_non_null(outcome->rows);
    for (int32_t i = 0; i < seq->page_count; i++) {
        assert_int_equal(engine->ops->page_read(engine, seq->pages[i], outcome->rows + i * page),
                         0);
    }
    int32_t last = seq->len - (seq->page_count - 1) * params->page_size;
    for (int32_t layer = 0; layer < params->layers; layer++) {
        char *at = outcome->rows + (size_t)(seq->page_count - 1) * page +
                   (size_t)layer * row * (size_t)params->page_size;
        memset(at + (size_t)last * row, 0, (size_t)(params->page_size - last) * row);
    }
}

/* Everything by itself: each round in a launch of its own, the prompt in whole slices. */
static void run_alone(struct setting *setting, struct outcome *outcome)
{
    struct tv_round_rule rule = tv_test_sampled(setting->engine, 0.7f, 11);
    struct tv_cache_shortage shortage;
    outcome_init(outcome);
    contexts_open(setting);
    for (int32_t round = 0; round < ROUNDS; round++) {
        for (int32_t g = 0; g < GUESTS; g++) {
            launch(setting, outcome, round, g, 1, NULL);
        }
    }
    assert_int_equal(setting->engine->ops->prefill(setting->engine, setting->host, setting->prompt,
                                                   PROMPT, &rule, &outcome->drawn, &shortage),
                     0);
    rows_keep(setting, outcome);
    contexts_close(setting);
}

/* All rounds of a turn in one launch, each of which takes some tokens of the prompt along. */
static void run_shared(struct setting *setting, struct outcome *outcome, int32_t start)
{
    struct tv_round_rule rule = tv_test_sampled(setting->engine, 0.7f, 11);
    int32_t done = 0;
    outcome_init(outcome);
    contexts_open(setting);
    for (int32_t round = 0; round < ROUNDS; round++) {
        int32_t count = riders[(round + start) % (int32_t)(sizeof riders / sizeof riders[0])];
        count = count < PROMPT - done ? count : PROMPT - done;
        struct tv_rider rider = {.context = setting->host,
                                 .tokens = setting->prompt + done,
                                 .count = count,
                                 .rule = done + count == PROMPT ? &rule : NULL};
        launch(setting, outcome, round, 0, GUESTS, count > 0 ? &rider : NULL);
        if (count > 0) {
            assert_int_equal(rider.rc, 0);
            done += count;
            assert_int_equal(setting->engine->ops->context_len(setting->host), done);
            outcome->drawn = rider.drawn;
            outcome->launches++;
        }
    }
    assert_int_equal(done, PROMPT);
    rows_keep(setting, outcome);
    contexts_close(setting);
}

static void outcomes_equal(const struct outcome *left, const struct outcome *right)
{
    assert_memory_equal(left->logits, right->logits,
                        (size_t)ROUNDS * GUESTS * NODES * VOCAB * sizeof(float));
    assert_memory_equal(left->accepted, right->accepted, sizeof left->accepted);
    assert_memory_equal(left->pending, right->pending, sizeof left->pending);
    assert_int_equal(left->drawn.token, right->drawn.token);
    assert_memory_equal(&left->drawn.margin, &right->drawn.margin, sizeof left->drawn.margin);
    assert_int_equal(left->rows_bytes, right->rows_bytes);
    assert_memory_equal(left->rows, right->rows, left->rows_bytes);
}

static void run(struct tv_engine_fixture_options options)
{
    struct setting *setting = calloc(1, sizeof *setting);
    struct outcome alone, shared;
    assert_non_null(setting);
    options.backend = options.backend != NULL ? options.backend : backend_asked;
    setting_open(setting, &options);
    run_alone(setting, &alone);
    for (int32_t start = 0; start < 4; start += 3) {
        run_shared(setting, &shared, start);
        assert_true(shared.launches > 2);
        outcomes_equal(&alone, &shared);
        outcome_finish(&shared);
    }
    outcome_finish(&alone);
    setting_close(setting);
    free(setting);
}

static void a_prompt_beside_rounds_is_the_prompt_alone(void **state)
{
    static const char *const models[] = {"v2lite", "v3", "moonlight", "kjv-mla-8m"};
    static const int32_t page_sizes[] = {16, 32, 64, 128};
    (void)state;
    for (size_t m = 0; m < sizeof models / sizeof models[0]; m++) {
        size_t sizes = m + 1 < sizeof models / sizeof models[0] ? 4 : 1; /* the last one is large */
        for (size_t p = 0; p < sizes; p++) {
            for (int bf16 = 0; bf16 < 2; bf16++) {
                run((struct tv_engine_fixture_options){.model = models[m],
                                                       .page_size = page_sizes[p],
                                                       .kv_dtype = bf16 ? TV_BF16 : TV_F32});
            }
        }
    }
}

static void the_reference_backend_does_the_same(void **state)
{
    (void)state;
    if (backend_asked != NULL) {
        skip();
    }
    run((struct tv_engine_fixture_options){.model = "v3", .backend = "ref"});
}

/* Nothing of the answers is read in place there, and every row is drawn. */
static void a_device_with_memory_of_its_own_does_the_same(void **state)
{
    (void)state;
    if (backend_asked != NULL) {
        skip();
    }
    run((struct tv_engine_fixture_options){.model = "v2lite", .apart = 1});
}

/* What the prompt is refused is no matter of the rounds, and the other way round. */
static void either_is_refused_alone(void **state)
{
    struct setting *setting = calloc(1, sizeof *setting);
    struct outcome outcome;
    const struct tv_engine_fixture_options options = {.model = "v2lite",
                                                      .backend = backend_asked,
                                                      .page_size = 16,
                                                      .rows_max = 64,
                                                      .max_len = 256,
                                                      .pages = 20};
    (void)state;
    assert_non_null(setting);
    setting_open(setting, &options);
    outcome_init(&outcome);
    contexts_open(setting); /* 8 of the 17 pages that the self-test leaves */
    struct tv_rider rider = {.context = setting->host,
                             .tokens = setting->prompt,
                             .count = setting->engine->prefill_rows};
    launch(setting, &outcome, 0, 0, 1, &rider); /* with the tree more rows than a pass takes */
    assert_int_equal(rider.rc, -EINVAL);
    rider.count = 60;
    launch(setting, &outcome, 1, 0, 1, &rider);
    assert_int_equal(rider.rc, 0);
    for (int32_t i = 0; i < 2 && rider.rc == 0; i++) {
        launch(setting, &outcome, 2 + i, 0, 1, &rider);
    }
    assert_int_equal(rider.rc, -ENOSPC);
    assert_true(rider.shortage.pages_needed > rider.shortage.pages_free);
    assert_int_equal(setting->engine->ops->context_len(setting->host) % 60, 0);

    struct tv_tree outside = setting->trees[0][0];
    int32_t token = setting->engine->vocab, len = setting->engine->ops->context_len(setting->host);
    struct tv_round_in in = {
        .context = setting->guests[0], .tree = &outside, .rule = tv_test_greedy(setting->engine)};
    struct tv_round_out out;
    outside.tokens = &token;
    rider.count = 1;
    assert_int_equal(setting->engine->ops->verify_shared(setting->engine, &in, 1, &out, &rider), 0);
    assert_int_equal(out.code, TV_TREE_INVALID);
    assert_int_equal(rider.rc, -EAGAIN); /* there was no launch to ride in */
    assert_int_equal(setting->engine->ops->context_len(setting->host), len);
    contexts_close(setting);
    outcome_finish(&outcome);
    setting_close(setting);
    free(setting);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_prompt_beside_rounds_is_the_prompt_alone),
        cmocka_unit_test(the_reference_backend_does_the_same),
        cmocka_unit_test(a_device_with_memory_of_its_own_does_the_same),
        cmocka_unit_test(either_is_refused_alone),
    };
    backend_asked = argc > 1 ? argv[1] : NULL;
    return cmocka_run_group_tests(tests, NULL, NULL);
}
