/*
 * request.c - the decoder: one table per call, then what concerns more than one field.
 *
 * Checks everything that needs no session state and refuses the first fault it meets; a refused
 * request owns nothing.
 */
#include "proto/request.h"

#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "proto/request_fields.h"

#define COUNT_OF(array) (sizeof(array) / sizeof((array)[0]))
#define AT(member)      offsetof(struct tv_request, member)
#define BODY_NODES_MAX  2048 /* values besides long arrays; our largest body needs about 60 */
#define BATCH_NODES_MAX (8 * BODY_NODES_MAX) /* 64 items of about 60 and their short arrays */
#define INT31_MAX       2147483647.0
#define TOKENS                                                                                     \
    {                                                                                              \
        "tokens", 0, tv_request_read_tokens, 0, 0, 0                                               \
    }
#define TOKENS_B64                                                                                 \
    {                                                                                              \
        "tokens_b64", 0, tv_request_read_tokens_b64, 0, 0, 0                                       \
    }
#define TREE(required)                                                                             \
    {                                                                                              \
        "tree", required, tv_request_read_tree, 0, 0, 0                                            \
    }
#define WANT                                                                                       \
    {                                                                                              \
        "want", 0, tv_request_read_want, 0, 0, 0                                                   \
    }
#define STOP                                                                                       \
    {                                                                                              \
        "stop", 0, tv_request_read_stop, 0, 0, 0                                                   \
    }
#define SAMPLING                                                                                   \
    {                                                                                              \
        "sampling", 0, tv_request_read_sampling, 0, 0, 0                                           \
    }
#define SESSION                                                                                    \
    {                                                                                              \
        "session", 1, tv_request_read_session, AT(session), 0, 0                                   \
    }
#define SEQ                                                                                        \
    {                                                                                              \
        "seq", 1, tv_request_read_int32, AT(seq), 1, INT31_MAX                                     \
    }
#define EPOCH                                                                                      \
    {                                                                                              \
        "epoch", 1, tv_request_read_epoch, AT(epoch), 0, 0                                         \
    }
#define EXPECTED_LEN                                                                               \
    {                                                                                              \
        "expected_len", 1, tv_request_read_int32, AT(expected_len), 0, INT31_MAX                   \
    }
#define EXPECTED_DIGEST                                                                            \
    {                                                                                              \
        "expected_digest", 0, tv_request_read_digest, 0, 0, 0                                      \
    }
#define DEADLINE                                                                                   \
    {                                                                                              \
        "deadline_ms", 0, tv_request_read_int32, AT(deadline_ms), 1, TV_DEADLINE_MS_MAX            \
    }
#define LEASE(required)                                                                            \
    {                                                                                              \
        "lease_s", required, tv_request_read_int32, AT(lease_s), 1, TV_LEASE_S_MAX                 \
    }
#define ACK                                                                                        \
    {                                                                                              \
        "ack", 0, tv_request_read_int32, AT(ack), 1, INT31_MAX                                     \
    }

/* The token fields come first, so that their bits in `seen` are the same everywhere. */
#define SEEN_TOKENS     1u
#define SEEN_TOKENS_B64 2u

static TV_REQUEST_READER(read_prefix)
{
    static const struct tv_request_field fields[] = {
        {"session", 1, tv_request_read_session, AT(prefix_session), 0, 0},
        {"len", 1, tv_request_read_int32, AT(prefix_len), 1, INT31_MAX},
    };

    (void)field; /* its own table */
    return tv_request_read_object(reader, value, fields, COUNT_OF(fields), base);
}
static const struct tv_request_field create_fields[] = {
    TOKENS,
    TOKENS_B64,
    SAMPLING,
    STOP,
    LEASE(0),
    {"cache_salt", 0, tv_request_read_salt, 0, 0, 0},
    EXPECTED_DIGEST,
    {"prefix", 0, read_prefix, 0, 0, 0},
    {"want", 0, tv_request_read_prompt_want, 0, 0, 0},
};
static TV_REQUEST_READER(read_round_rule)
{
    ((struct tv_request *)base)->has_rule = 1;
    return tv_request_read_rule(reader, value, field, base);
}
#define ROUND_RULE                                                                                 \
    {                                                                                              \
        "rule", 0, read_round_rule, AT(rule), 0, 0                                                 \
    }
/* The session is named in items of a batch alone, and comes first, so that the others skip it. */
static const struct tv_request_field verify_fields[] = {
    SESSION,
    SEQ,
    EPOCH,
    EXPECTED_LEN,
    EXPECTED_DIGEST,
    TREE(1),
    {"if", 0, tv_request_read_if, 0, 0, 0},
    ROUND_RULE,
    {"commit", 0, tv_request_read_commit, 0, 0, 0},
    {"commit_prev", 0, tv_request_read_commit_prev, 0, 0, 0},
    WANT,
    DEADLINE,
    LEASE(0),
    ACK,
};
static TV_REQUEST_READER(read_optional_len)
{
    ((struct tv_request *)base)->len_implied = 0;
    return tv_request_read_int32(reader, value, field, base);
}
/* Alternatives stand instead of a tree, of its guess and of what that implies. */
static const struct tv_request_field alternatives_fields[] = {
    SESSION,
    SEQ,
    EPOCH,
    {"expected_len", 0, read_optional_len, AT(expected_len), 0, INT31_MAX},
    {"expected_digest", 0, tv_request_refuse_beside, 0, 0, 0},
    {"tree", 0, tv_request_refuse_beside, 0, 0, 0},
    {"if", 1, tv_request_read_if_seq, 0, 0, 0},
    {"alternatives", 1, tv_request_read_alternatives, 0, 0, 0},
    ROUND_RULE,
    {"commit", 0, tv_request_read_commit, 0, 0, 0},
    WANT,
    DEADLINE,
    LEASE(0),
    ACK,
};
static const struct tv_request_field extend_fields[] = {
    TOKENS,
    TOKENS_B64,
    SEQ,
    EPOCH,
    EXPECTED_LEN,
    EXPECTED_DIGEST,
    {"keep_pending", 0, tv_request_read_flag, AT(keep_pending), 0, 0},
    DEADLINE,
    LEASE(0),
    ACK,
};
static const struct tv_request_field decode_fields[] = {
    SEQ,
    EPOCH,
    EXPECTED_LEN,
    EXPECTED_DIGEST,
    {"max_tokens", 1, tv_request_read_int32, AT(max_tokens), 1, TV_DECODE_TOKENS_MAX},
    DEADLINE,
    LEASE(0),
    ACK,
};
static TV_REQUEST_READER(read_pending)
{
    ((struct tv_request *)base)->has_pending = 1;
    return tv_request_read_token(reader, value, field, base);
}
static const struct tv_request_field rollback_fields[] = {
    SEQ,
    EPOCH,
    EXPECTED_LEN,
    EXPECTED_DIGEST,
    {"len", 1, tv_request_read_int32, AT(len), 1, INT31_MAX},
    {"pending", 0, read_pending, AT(pending), 0, 0},
    DEADLINE,
    LEASE(0),
    ACK,
};
static const struct tv_request_field fork_fields[] = {
    EPOCH,
    {"len", 0, tv_request_read_int32, AT(len), 1, INT31_MAX},
    {"seed", 0, tv_request_read_seed, AT(sampling), 0, 0},
    LEASE(0),
};
static const struct tv_request_field commit_fields[] = {
    SEQ,
    EPOCH,
    {"path", 1, tv_request_read_path, 0, 0, 0},
    {"next", 0, tv_request_read_next, 0, 0, 0},
    DEADLINE,
    LEASE(0),
    ACK,
};
static const struct tv_request_field batch_fields[] = {
    {"items", 1, tv_request_read_items, 0, 0, 0},
};
static const struct tv_request_field renew_fields[] = {LEASE(1)};
static const struct tv_request_field oneshot_fields[] = {
    TOKENS, TOKENS_B64, TREE(1), SAMPLING, WANT, DEADLINE,
};
/* Parity has a fixed answer and waits as long as the oracle takes. */
static const struct tv_request_field parity_fields[] = {
    TOKENS, TOKENS_B64, TREE(1), SAMPLING, STOP,
};
static const struct tv_request_field score_fields[] = {
    TOKENS,
    TOKENS_B64,
    TREE(1),
    DEADLINE,
};
static const struct tv_request_field score_session_fields[] = {
    {"session", 1, tv_request_read_session, AT(session), 0, 0},
    TREE(1),
    DEADLINE,
};
static const struct tv_request_field parity_session_fields[] = {
    {"session", 1, tv_request_read_session, AT(session), 0, 0},
    TREE(1),
};

const char *tv_rule_name(enum tv_rule rule)
{
    static const char *const names[TV_RULE_COUNT] = {"target_walk", "greedy", "ratio_wor",
                                                     "typical", "client"};

    return names[rule];
}

int tv_rule_lossless(enum tv_rule rule)
{
    return rule != TV_RULE_TYPICAL && rule != TV_RULE_CLIENT;
}

const char *tv_tensor_dtype_name(enum tv_tensor_dtype dtype)
{
    static const char *const names[] = {"f32", "bf16", "f16", "fp8_e4m3"};

    return names[dtype];
}

size_t tv_tensor_dtype_bytes(enum tv_tensor_dtype dtype)
{
    static const size_t bytes[] = {4, 2, 2, 1};

    return bytes[dtype];
}

/* Exactly one of tokens and tokens_b64; a prompt and an extension are not empty. */
static int check_tokens(struct tv_request_reader *reader, unsigned seen, int may_be_empty)
{
    const struct tv_request *request = reader->request;
    const char *pointer = seen & SEEN_TOKENS_B64 ? "/tokens_b64" : "/tokens";

    if ((seen & (SEEN_TOKENS | SEEN_TOKENS_B64)) == 0) {
        tv_problem_set(reader->problem, TV_MISSING_FIELD, pointer,
                       "/tokens: tokens or tokens_b64 is required");
        return -EINVAL;
    }
    if (!may_be_empty && request->token_count == 0) {
        tv_problem_set(reader->problem, TV_WRONG_VALUE, pointer, "%s: no tokens", pointer);
        return -EINVAL;
    }
    return 0;
}

/* Tokens and tree of a call without a session must fit the context. */
static int check_context(struct tv_request_reader *reader)
{
    const struct tv_request *request = reader->request;
    int64_t length = request->token_count;

    if (request->has_tree) {
        length += request->tree.depth + 1;
    }
    if (length > reader->limits->max_len) {
        tv_problem_set(reader->problem, TV_CONTEXT_FULL, "", "%lld positions, the limit is %d",
                       (long long)length, (int)reader->limits->max_len);
        return -EINVAL;
    }
    return 0;
}

/* 1: every member of root is in the table. */
static int all_known(const struct tv_json_value *root, const struct tv_request_field *fields,
                     size_t count)
{
    for (const struct tv_json_value *v = tv_json_first(root); v != NULL; v = tv_json_next(v)) {
        size_t i = 0;
        while (i < count && strcmp(fields[i].name, tv_json_name(v)) != 0) {
            i++;
        }
        if (i == count) {
            return 0;
        }
    }
    return 1;
}

static int read_prompt(struct tv_request_reader *reader, const struct tv_json_value *root,
                       const struct tv_request_field *fields, size_t count, int may_be_empty)
{
    int rc = 0;

    /* before either is read, but not before an unknown member is refused */
    if (tv_json_member(root, "tokens") != NULL && tv_json_member(root, "tokens_b64") != NULL &&
        all_known(root, fields, count)) {
        tv_problem_set(reader->problem, TV_WRONG_VALUE, "/tokens_b64",
                       "/tokens_b64: tokens or tokens_b64, not both");
        return -EINVAL;
    }
    rc = tv_request_read_object(reader, root, fields, count, reader->request);
    return rc < 0 ? rc : check_tokens(reader, reader->seen, may_be_empty);
}

/* A prompt, or a part of a session's tokens in its place. */
static int read_create(struct tv_request_reader *reader, const struct tv_json_value *root)
{
    int has_prefix = tv_json_member(root, "prefix") != NULL;
    int rc;

    reader->request->lease_s = TV_LEASE_S_DEFAULT;
    if (!has_prefix) {
        rc = read_prompt(reader, root, create_fields, COUNT_OF(create_fields), 0);
        rc = rc < 0 ? rc : check_context(reader);
        return rc < 0 ? rc : tv_request_check_prompt_hidden(reader, reader->request->token_count);
    }
    if ((tv_json_member(root, "tokens") != NULL || tv_json_member(root, "tokens_b64") != NULL) &&
        all_known(root, create_fields, COUNT_OF(create_fields))) {
        tv_problem_set(reader->problem, TV_WRONG_VALUE, "/prefix",
                       "/prefix: a prompt or a prefix, not both");
        return -EINVAL;
    }
    rc = tv_request_read_object(reader, root, create_fields, COUNT_OF(create_fields),
                                reader->request);
    return rc < 0 ? rc : tv_request_check_prompt_hidden(reader, reader->request->prefix_len);
}

static int read_oneshot(struct tv_request_reader *reader, const struct tv_json_value *root,
                        const struct tv_request_field *fields, size_t count)
{
    const struct tv_request *request = reader->request;
    int rc = read_prompt(reader, root, fields, count, 1);

    if (rc == 0 && request->sampling.rule == TV_RULE_CLIENT) {
        tv_problem_set(reader->problem, TV_WRONG_VALUE, "/sampling/rule",
                       "/sampling/rule: client needs a session, which can hold a round");
        return -EINVAL;
    }
    if (rc == 0) {
        rc = check_context(reader);
    }
    /* without a sampling it is the default rule, and a score has none */
    return rc < 0 ? rc : tv_request_check_rule(request, request->sampling.rule, reader->problem);
}

/* {} is the built-in case; {"session", "tree"} a live session; else a prompt, a tree and
 * a sampling. */
static int read_parity(struct tv_request_reader *reader, const struct tv_json_value *root)
{
    if (tv_json_type(root) == TV_JSON_OBJECT && tv_json_first(root) == NULL) {
        return 0;
    }
    if (tv_json_member(root, "session") != NULL) {
        return tv_request_read_object(reader, root, parity_session_fields,
                                      COUNT_OF(parity_session_fields), reader->request);
    }
    return read_oneshot(reader, root, parity_fields, COUNT_OF(parity_fields));
}

/* {"session", "tree"} behind a live session; else a prompt and a tree. */
static int read_score(struct tv_request_reader *reader, const struct tv_json_value *root)
{
    if (tv_json_member(root, "session") != NULL) {
        int rc = tv_request_read_object(reader, root, score_session_fields,
                                        COUNT_OF(score_session_fields), reader->request);
        return rc < 0
                   ? rc
                   : tv_request_check_rule(reader->request, TV_RULE_TARGET_WALK, reader->problem);
    }
    return read_oneshot(reader, root, score_fields, COUNT_OF(score_fields));
}

int tv_request_read_verify(struct tv_request_reader *reader, const struct tv_json_value *root,
                           int is_item)
{
    struct tv_request *request = reader->request;
    size_t skipped = is_item ? 0 : 1;
    int rc;

    if (tv_json_member(root, "alternatives") != NULL) {
        request->len_implied = 1;
        rc = tv_request_read_object(reader, root, alternatives_fields + skipped,
                                    COUNT_OF(alternatives_fields) - skipped, request);
    } else {
        rc = tv_request_read_object(reader, root, verify_fields + skipped,
                                    COUNT_OF(verify_fields) - skipped, request);
    }
    if (rc == 0) {
        rc = tv_request_check_if(reader);
    }
    if (rc == 0) {
        rc = tv_request_check_path(reader, "/commit_prev");
    }
    return rc < 0 || !request->has_rule
               ? rc
               : tv_request_check_rule(request, request->rule, reader->problem);
}

static int read_commit(struct tv_request_reader *reader, const struct tv_json_value *root)
{
    struct tv_request *request = reader->request;
    int rc;

    request->len_implied = 1; /* the held round says it */
    rc = tv_request_read_object(reader, root, commit_fields, COUNT_OF(commit_fields), request);
    return rc < 0 ? rc : tv_request_check_path(reader, "");
}

static int read_body(struct tv_request_reader *reader, const struct tv_json_value *root)
{
    struct tv_request *request = reader->request;

    switch (request->kind) {
    case TV_CALL_CREATE:
        return read_create(reader, root);
    case TV_CALL_VERIFY:
        return tv_request_read_verify(reader, root, 0);
    case TV_CALL_BATCH:
        return tv_request_read_object(reader, root, batch_fields, COUNT_OF(batch_fields), request);
    case TV_CALL_EXTEND:
        return read_prompt(reader, root, extend_fields, COUNT_OF(extend_fields), 0);
    case TV_CALL_DECODE:
        return tv_request_read_object(reader, root, decode_fields, COUNT_OF(decode_fields),
                                      request);
    case TV_CALL_COMMIT:
        return read_commit(reader, root);
    case TV_CALL_ROLLBACK:
        return tv_request_read_object(reader, root, rollback_fields, COUNT_OF(rollback_fields),
                                      request);
    case TV_CALL_FORK:
        return tv_request_read_object(reader, root, fork_fields, COUNT_OF(fork_fields), request);
    case TV_CALL_RENEW:
        return tv_request_read_object(reader, root, renew_fields, COUNT_OF(renew_fields), request);
    case TV_CALL_ONESHOT:
        return read_oneshot(reader, root, oneshot_fields, COUNT_OF(oneshot_fields));
    case TV_CALL_SCORE:
        return read_score(reader, root);
    default:
        assert(request->kind == TV_CALL_PARITY); /* the other calls have no body */
        return read_parity(reader, root);
    }
}

void tv_request_init(struct tv_request *request, enum tv_call_kind kind)
{
    *request = (struct tv_request){.kind = kind,
                                   .deadline_ms = TV_DEADLINE_MS_DEFAULT,
                                   .sampling = {.rule = TV_RULE_TARGET_WALK,
                                                .temperature = 1.0,
                                                .top_p = 1.0,
                                                .typical_epsilon = TV_TYPICAL_EPSILON_DEFAULT,
                                                .typical_delta = TV_TYPICAL_DELTA_DEFAULT}};
}

int tv_request_decode(enum tv_call_kind kind, const char *body, size_t body_bytes,
                      const struct tv_request_limits *limits, struct tv_request *ret_request,
                      struct tv_problem *problem)
{
    /* An array of n numbers takes 2n bytes, so the body's own limit bounds the values. */
    const struct tv_json_limits json_limits = {.depth_max = TV_JSON_DEPTH_MAX,
                                               .values_max = body_bytes + 1,
                                               .nodes_max = kind == TV_CALL_BATCH ? BATCH_NODES_MAX
                                                                                  : BODY_NODES_MAX,
                                               .borrow_text = 1};
    struct tv_request_reader reader = {
        .limits = limits, .request = ret_request, .problem = problem};
    struct tv_json_error error = {0};
    struct tv_json *doc = NULL;
    int rc;

    tv_request_init(ret_request, kind);
    rc = tv_json_parse(body, body_bytes, &json_limits, &doc, &error);
    if (rc == -EINVAL) {
        tv_problem_set(problem, TV_BAD_JSON, NULL, "byte %zu: %s", error.offset, error.what);
    }
    if (rc < 0) {
        return rc;
    }
    reader.doc = doc;
    rc = read_body(&reader, tv_json_root(doc));
    tv_json_destroy(doc);
    if (rc < 0) {
        tv_request_finish(ret_request);
        return rc;
    }
    tv_request_hash(ret_request);
    return 0;
}

const struct tv_tree *tv_request_tree(const struct tv_request *request, int32_t alternative)
{
    return alternative < 0 ? &request->tree : &request->alternatives[alternative].tree;
}

void tv_request_finish(struct tv_request *request)
{
    if (request == NULL) {
        return;
    }
    for (int32_t i = 0; i < request->alternative_count; i++) {
        tv_tree_finish(&request->alternatives[i].tree);
    }
    free(request->alternatives);
    tv_request_items_finish(request);
    free(request->tokens);
    free(request->path);
    free(request->want.rows.nodes);
    free(request->want.logits_rows.nodes);
    free(request->want.hidden.rows.nodes);
    free(request->tensor_rows.nodes);
    tv_tree_finish(&request->tree);
    *request = (struct tv_request){0};
}
