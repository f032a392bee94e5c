/*
 * test_proto_examples.c - proto/examples: every request goes through the decoder; every answer is
 * taken apart into the structs of response.h and must be encoded again byte for byte.
 *
 * A file is a comment line, a request line, the body, "--- STATUS", the answer. In the answer, line
 * breaks and the space that starts a line are for the reader.
 */
#include "proto_examples.h"

#include <dirent.h>

static const struct tv_request_limits limits = {
    .tree = {.nodes_max = TV_NODES_DEFAULT, .depth_max = TV_DEPTH_DEFAULT, .vocab = 307},
    .max_len = 2048,
    .inline_bytes = TV_INLINE_BYTES_DEFAULT,
    .hidden_dim = 4,
    .tap_count = 3,
    .taps = {1, 9, 17},
    .project_dim = 2,
};

struct example {
    char text[16384];
    char *method, *path, *body, *answer;
    int status;
};

const struct tv_json *document;

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
        {"/score", TV_CALL_SCORE},   {"/rollback", TV_CALL_ROLLBACK},
        {"/fork", TV_CALL_FORK},     {"/commit", TV_CALL_COMMIT},
    };
    size_t i, length = strlen(example->path);

    if (strncmp(example->path, "/v1/parity", 10) == 0) {
        return TV_CALL_PARITY;
    }
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
        example_read_state(need(root, "session_state"), problem->state);
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
    struct tv_parity_report report;
    struct tv_session_state *state;

    if (example->status >= 400 && example_encode_info(buf, example->method, example->path, root)) {
        return; /* /readyz: 503 is no problem */
    }
    if (example->status >= 400) {
        if (decoded) {
            read_problem(root, problem);
        }
        if (problem->code == TV_PARITY_MISMATCH) {
            example_read_report(root, &report);
        }
        assert_int_equal(tv_code_info(problem->code)->http_status, example->status);
        tv_encode_problem(buf, problem, "example",
                          problem->code == TV_PARITY_MISMATCH ? &report : NULL);
        return;
    }
    if (example_encode_info(buf, example->method, example->path, root)) {
        return;
    }
    if (kind_of(example) != TV_CALL_RENEW && kind_of(example) != TV_CALL_STATE) {
        example_encode_round(buf, kind_of(example), root);
        return;
    }
    state = malloc(sizeof(*state));
    assert_non_null(state);
    example_read_state(root, state);
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
    assert_true(good >= 22 && bad >= 11);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_examples)};

    return cmocka_run_group_tests(tests, NULL, NULL);
}
