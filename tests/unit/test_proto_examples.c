/*
 * test_proto_examples.c - proto/examples: every request goes through the decoder; every answer is
 * taken apart into the structs of response.h and must be encoded again byte for byte.
 *
 * A file is a comment line, a request line, the body, "--- STATUS", the answer. In the answer, line
 * breaks and the space that starts a line are for the reader.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <dirent.h>
#include <math.h>
#include <nettle/base64.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "proto/json_read.h"
#include "proto/response.h"

#define ITEMS_MAX 64

static const struct tv_request_limits limits = {
    .tree = {.nodes_max = TV_NODES_DEFAULT, .depth_max = TV_DEPTH_DEFAULT, .vocab = 307},
    .max_len = 2048,
    .inline_bytes = TV_INLINE_BYTES_DEFAULT,
};

struct example {
    char text[16384];
    char *method, *path, *body, *answer;
    int status;
};

/* Everything an answer points to while it is encoded again. */
struct parts {
    int32_t nodes[ITEMS_MAX], tokens[ITEMS_MAX], fresh[ITEMS_MAX], rows[2][ITEMS_MAX];
    int32_t ids[ITEMS_MAX];
    float logits[ITEMS_MAX], lse[ITEMS_MAX], logprobs[ITEMS_MAX], data[ITEMS_MAX];
    struct tv_topk_block topk;
    struct tv_logits_block block;
    struct tv_shadow_block shadow;
};

static void load(const char *path, struct example *example)
{
    FILE *file = fopen(path, "rb");
    char *p, *out, *mark;
    size_t bytes;

    assert_non_null(file);
    bytes = fread(example->text, 1, sizeof(example->text) - 1, file);
    fclose(file);
    assert_true(bytes > 0 && bytes < sizeof(example->text) - 1);
    example->text[bytes] = '\0';
    assert_true(example->text[0] == '#' && example->text[bytes - 1] == '\n');
    example->method = strchr(example->text, '\n') + 1;
    example->path = strchr(example->method, ' ');
    assert_non_null(example->path);
    *example->path++ = '\0';
    example->body = strchr(example->path, '\n');
    assert_non_null(example->body);
    *example->body++ = '\0';
    mark = strncmp(example->body, "--- ", 4) == 0 ? example->body : strstr(example->body, "\n--- ");
    assert_non_null(mark);
    mark += *mark == '\n';
    example->status = atoi(mark + 4);
    example->answer = strchr(mark, '\n') + 1;
    *mark = '\0';
    if (mark > example->body) {
        mark[-1] = '\0';
    }
    for (p = out = example->answer; *p != '\0'; p++) {
        if (*p == '\n') {
            p += p[1] == ' ';
        } else {
            *out++ = *p;
        }
    }
    *out = '\0';
}

static enum tv_call_kind kind_of(const struct example *example)
{
    static const struct {
        const char *end;
        enum tv_call_kind kind;
    } kinds[] = {
        {"/extend", TV_CALL_EXTEND}, {"/decode", TV_CALL_DECODE},
        {"/renew", TV_CALL_RENEW},   {"/v1/verify", TV_CALL_ONESHOT},
        {"/verify", TV_CALL_VERIFY}, {"/v1/sessions", TV_CALL_CREATE},
    };
    size_t i, length = strlen(example->path);

    if (strcmp(example->method, "GET") == 0) {
        return TV_CALL_STATE;
    }
    for (i = 0; i < sizeof(kinds) / sizeof(kinds[0]); i++) {
        size_t bytes = strlen(kinds[i].end);
        if (length >= bytes && strcmp(example->path + length - bytes, kinds[i].end) == 0) {
            return kinds[i].kind;
        }
    }
    fail_msg("no call for %s", example->path);
    return TV_CALL_HEALTH;
}

static const struct tv_json *document;

static const struct tv_json_value *need(const struct tv_json_value *object, const char *name)
{
    const struct tv_json_value *value = tv_json_member(object, name);

    if (value == NULL) {
        fail_msg("no member %s", name);
    }
    return value;
}

static int64_t number(const struct tv_json_value *object, const char *name)
{
    int64_t value = 0;

    assert_int_equal(tv_json_int(document, need(object, name), &value), 0);
    return value;
}

static double real(const struct tv_json_value *object, const char *name)
{
    double value = 0;

    assert_int_equal(tv_json_double(document, need(object, name), &value), 0);
    return value;
}

static const char *text(const struct tv_json_value *object, const char *name)
{
    const char *value = tv_json_string(need(object, name), NULL);

    assert_non_null(value);
    return value;
}

static int flag(const struct tv_json_value *object, const char *name)
{
    return tv_json_type(need(object, name)) == TV_JSON_TRUE;
}

static int32_t integers(const struct tv_json_value *object, const char *name, int32_t *items)
{
    int32_t *read = NULL, count = 0;
    size_t index;

    assert_int_equal(tv_json_int32_array(document, need(object, name), &read, &count, &index), 0);
    assert_true(count <= ITEMS_MAX);
    memcpy(items, read != NULL ? read : items, (size_t)count * sizeof(*items));
    free(read);
    return count;
}

static void base64(const struct tv_json_value *object, const char *name, void *items)
{
    struct base64_decode_ctx context;
    const char *value = text(object, name);
    size_t bytes = 0;

    assert_true(strlen(value) < ITEMS_MAX * 4);
    base64_decode_init(&context);
    assert_true(base64_decode_update(&context, &bytes, items, strlen(value), value));
    assert_true(base64_decode_final(&context));
}

static void hex(const struct tv_json_value *object, const char *name, uint8_t *bytes, size_t count)
{
    const char *value = text(object, name);
    size_t i;

    assert_int_equal(strlen(value), 2 * count);
    for (i = 0; i < count; i++) {
        unsigned byte;
        assert_int_equal(sscanf(value + 2 * i, "%2x", &byte), 1);
        bytes[i] = (uint8_t)byte;
    }
}

static int64_t time_ms(const struct tv_json_value *object, const char *name)
{
    struct tm parts = {0};

    assert_non_null(strptime(text(object, name), "%Y-%m-%dT%H:%M:%SZ", &parts));
    return (int64_t)timegm(&parts) * 1000;
}

static enum tv_finish finish(const struct tv_json_value *object)
{
    const struct tv_json_value *value = need(object, "finish");

    return tv_json_type(value) == TV_JSON_NULL                ? TV_FINISH_NONE
           : strcmp(tv_json_string(value, NULL), "stop") == 0 ? TV_FINISH_STOP
                                                              : TV_FINISH_LENGTH;
}

static enum tv_rule rule(const struct tv_json_value *object)
{
    return strcmp(text(object, "rule"), "greedy") == 0 ? TV_RULE_GREEDY : TV_RULE_TARGET_WALK;
}

static struct tv_sampling_state sampling(const struct tv_json_value *object)
{
    const struct tv_json_value *value = need(object, "sampling");

    return (struct tv_sampling_state){.rule = rule(value),
                                      .temperature = real(value, "temperature"),
                                      .top_k = (int32_t)number(value, "top_k"),
                                      .top_p = real(value, "top_p"),
                                      .min_p = real(value, "min_p"),
                                      .seed = strtoull(text(value, "seed"), NULL, 10)};
}

static void read_state(const struct tv_json_value *value, struct tv_session_state *state)
{
    *state = (struct tv_session_state){.committed_len = (int32_t)number(value, "committed_len"),
                                       .pending = (int32_t)number(value, "pending"),
                                       .next_seq = (int32_t)number(value, "next_seq"),
                                       .finish = finish(value),
                                       .lease_expires_unix_ms = time_ms(value, "lease_expires_at"),
                                       .sampling = sampling(value)};
    snprintf(state->session, sizeof(state->session), "%s", text(value, "session"));
    snprintf(state->epoch, sizeof(state->epoch), "%s", text(value, "epoch"));
    hex(value, "digest", state->digest, 16);
    if (tv_json_member(value, "tail") != NULL) {
        state->has_tail = 1;
        state->tail = malloc(ITEMS_MAX * sizeof(int32_t));
        assert_non_null(state->tail);
        state->tail_count = integers(value, "tail", state->tail);
        state->tail_from = (int32_t)number(value, "tail_from");
    }
}

static void read_blocks(const struct tv_json_value *root, struct tv_round *round,
                        struct parts *parts)
{
    const struct tv_json_value *topk = tv_json_member(root, "topk"), *item;
    const struct tv_json_value *logits = tv_json_member(root, "logits");
    const struct tv_json_value *shadow = tv_json_member(root, "shadow");
    int32_t count = 0;

    if (topk != NULL) {
        parts->topk = (struct tv_topk_block){.k = (int32_t)number(topk, "k"),
                                             .row_count = integers(topk, "rows", parts->rows[0]),
                                             .rows = parts->rows[0],
                                             .ids = parts->ids,
                                             .logits = parts->logits,
                                             .lse = parts->lse};
        base64(topk, "ids_b64", parts->ids);
        base64(topk, "logits_b64", parts->logits);
        base64(topk, "lse_b64", parts->lse);
        round->topk = &parts->topk;
    }
    if (tv_json_member(root, "logprobs") != NULL) {
        for (item = tv_json_first(need(root, "logprobs")); item; item = tv_json_next(item)) {
            double value = -(double)INFINITY;
            (void)tv_json_double(document, item, &value); /* null stays -inf */
            parts->logprobs[count++] = (float)value;
        }
        assert_int_equal(count, round->new_count);
        round->logprobs = parts->logprobs;
    }
    if (logits != NULL) {
        int32_t shape[ITEMS_MAX];
        parts->block = (struct tv_logits_block){
            .row_count = integers(logits, "rows", parts->rows[1]), .rows = parts->rows[1]};
        assert_int_equal(integers(logits, "shape", shape), 2);
        parts->block.vocab = shape[1];
        while (strcmp(tv_tensor_dtype_name(parts->block.dtype), text(logits, "dtype")) != 0) {
            parts->block.dtype++;
        }
        if (tv_json_member(logits, "href") != NULL) {
            parts->block.href = text(logits, "href");
        } else {
            base64(logits, "data_b64", parts->data);
            parts->block.data = parts->data;
        }
        round->logits = &parts->block;
    }
    if (shadow != NULL) {
        const struct tv_json_value *kernel = need(shadow, "kernel");
        parts->shadow =
            (struct tv_shadow_block){flag(shadow, "ran"),
                                     {(int32_t)number(kernel, "layers"), real(kernel, "max_abs"),
                                      real(kernel, "max_rel"), real(kernel, "rel_l2")},
                                     flag(shadow, "tokens_equal")};
        round->shadow = &parts->shadow;
    }
}

static void read_round(const struct tv_json_value *root, struct tv_round *round,
                       struct parts *parts)
{
    const struct tv_json_value *stats = need(root, "stats"), *timing = need(root, "timing_us");
    const struct tv_json_value *margin = need(root, "margin");

    if (tv_json_member(root, "accepted") != NULL) {
        const struct tv_json_value *accepted = need(root, "accepted");
        round->accepted_count = integers(accepted, "nodes", parts->nodes);
        assert_int_equal(integers(accepted, "tokens", parts->tokens), round->accepted_count);
        round->accepted_nodes = parts->nodes;
        round->accepted_tokens = parts->tokens;
    }
    round->new_count = integers(root, "new_tokens", parts->fresh);
    round->new_tokens = parts->fresh;
    round->rule = rule(root);
    round->has_margin = tv_json_type(need(margin, "min")) != TV_JSON_NULL;
    round->margin_min = round->has_margin ? (float)real(margin, "min") : 0;
    round->near_tie = flag(margin, "near_tie");
    read_blocks(root, round, parts);
    round->stat_nodes = (int32_t)number(stats, "nodes");
    round->stat_depth = (int32_t)number(stats, "depth");
    round->accept_len_mean = real(stats, "accept_len_mean");
    round->queue_us = number(timing, "queue");
    round->gpu_us = number(timing, "gpu");
    round->total_us = number(timing, "total");
    round->batch = (int32_t)number(timing, "batch");
}

static void encode_round(struct tv_buf *buf, enum tv_call_kind kind,
                         const struct tv_json_value *root)
{
    struct parts parts = {0};
    struct tv_round round = {.kind = kind};
    int replayed = 0;

    round.pending = (int32_t)number(root, "pending");
    round.committed_len = (int32_t)number(root, "committed_len");
    hex(root, "digest", round.digest, 16);
    if (kind != TV_CALL_ONESHOT) {
        round.finish = finish(root);
        round.next_seq = (int32_t)number(root, "next_seq");
        round.lease_expires_unix_ms = time_ms(root, "lease_expires_at");
    }
    if (kind == TV_CALL_CREATE || kind == TV_CALL_ONESHOT) {
        round.sampling = sampling(root);
    }
    if (kind == TV_CALL_CREATE) {
        const struct tv_json_value *caps = need(root, "limits");
        snprintf(round.session, sizeof(round.session), "%s", text(root, "session"));
        snprintf(round.epoch, sizeof(round.epoch), "%s", text(root, "epoch"));
        round.cached_len = (int32_t)number(root, "cached_len");
        round.limits =
            (struct tv_limits_info){.max_nodes = (int32_t)number(caps, "max_nodes"),
                                    .max_depth = (int32_t)number(caps, "max_depth"),
                                    .max_pipeline = (int32_t)number(caps, "max_pipeline"),
                                    .replay_window = (int32_t)number(caps, "replay_window")};
    } else {
        read_round(root, &round, &parts);
    }
    if (kind != TV_CALL_CREATE && kind != TV_CALL_ONESHOT) {
        round.seq = (int32_t)number(root, "seq");
        replayed = flag(root, "replayed");
    }
    tv_encode_round(buf, &round, 0);
    if (replayed) {
        assert_int_equal(tv_encode_mark_replayed(buf), 0);
    }
}

/* A refusal that needs a session: read from the answer, as the session's owner would fill it. */
static void read_problem(const struct tv_json_value *root, struct tv_problem *problem)
{
    int code = TV_OK + 1;

    while (strcmp(tv_code_info((enum tv_code)code)->name, text(root, "code")) != 0) {
        assert_true(++code < TV_CODE_COUNT);
    }
    tv_problem_set(problem, (enum tv_code)code, NULL, "%s", text(root, "detail"));
    if (tv_json_member(root, "session_state") != NULL) {
        problem->state = malloc(sizeof(*problem->state));
        assert_non_null(problem->state);
        read_state(need(root, "session_state"), problem->state);
    }
    if (tv_json_member(root, "pages_needed") != NULL) {
        problem->pages_needed = number(root, "pages_needed");
        problem->pages_free = number(root, "pages_free");
    }
}

static void encode_answer(struct tv_buf *buf, const struct example *example, int decoded,
                          struct tv_problem *problem)
{
    const struct tv_json_value *root = tv_json_root(document);
    struct tv_session_state *state;

    if (example->status >= 400) {
        if (decoded) {
            read_problem(root, problem);
        }
        assert_int_equal(tv_code_info(problem->code)->http_status, example->status);
        tv_encode_problem(buf, problem, "example", NULL);
        return;
    }
    if (kind_of(example) != TV_CALL_RENEW && kind_of(example) != TV_CALL_STATE) {
        encode_round(buf, kind_of(example), root);
        return;
    }
    state = malloc(sizeof(*state));
    assert_non_null(state);
    read_state(root, state);
    tv_encode_session_state(buf, state);
    tv_session_state_destroy(state);
}

static void run_example(const char *path)
{
    const struct tv_json_limits usual = {.depth_max = 8, .values_max = 10000};
    struct example *example = calloc(1, sizeof(*example));
    struct tv_problem problem = {0};
    struct tv_json_error error;
    struct tv_request request = {0};
    struct tv_json *doc = NULL;
    struct tv_buf buf;
    int decoded = 1;

    assert_non_null(example);
    load(path, example);
    if (strcmp(example->method, "POST") == 0) {
        decoded = tv_request_decode(kind_of(example), example->body, strlen(example->body), &limits,
                                    &request, &problem) == 0;
        tv_request_finish(&request);
        assert_true(decoded == (strstr(path, "/bad-") == NULL));
        if (!decoded && example->status < 400) {
            fail_msg("%s: %s", path, problem.detail);
        }
    }
    assert_int_equal(tv_json_parse(example->answer, strlen(example->answer), &usual, &doc, &error),
                     0);
    document = doc;
    tv_buf_init(&buf, 1u << 20);
    encode_answer(&buf, example, decoded, &problem);
    assert_int_equal(buf.failed, 0);
    tv_buf_append(&buf, "", 1);
    if (strcmp(buf.data, example->answer) != 0) {
        fail_msg("%s:\n%s\nis not\n%s", path, buf.data, example->answer);
    }
    tv_buf_finish(&buf);
    tv_problem_finish(&problem);
    tv_json_destroy(doc);
    free(example);
}

static void test_examples(void **state)
{
    const char *folder = getenv("TV_EXAMPLES_DIR");
    int good = 0, bad = 0;
    struct dirent *entry;
    char path[1024];
    DIR *dir;

    (void)state;
    assert_non_null(folder);
    dir = opendir(folder);
    assert_non_null(dir);
    while ((entry = readdir(dir)) != NULL) {
        if (strstr(entry->d_name, ".txt") == NULL) {
            continue;
        }
        snprintf(path, sizeof(path), "%s/%s", folder, entry->d_name);
        run_example(path);
        if (strncmp(entry->d_name, "bad-", 4) == 0) {
            bad++;
        } else {
            good++;
        }
    }
    closedir(dir);
    assert_true(good >= 14 && bad >= 11);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_examples)};

    return cmocka_run_group_tests(tests, NULL, NULL);
}
