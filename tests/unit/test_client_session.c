/*
 * test_client_session.c - a session of the client library against a scripted server: what is sent
 * again, what is believed, what is refused.
 */
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "client_fixture.h"

static void lost_round_is_sent_again_unchanged(void **state)
{
    (void)state;
    static const struct step steps[] = {
        OPENING,
        {.hang_up = 1},
        {.hang_up = 1},
        {.status = "200 OK", .type = "application/json", .body = round_1},
    };
    struct scene scene;
    struct tv_client_round round;
    struct tv_client_problem problem;
    struct tv_client_session *session = begin(&scene, steps, 5);
    assert_int_equal(tv_client_verify(session, tree_tokens, tree_parents, 4, &round, &problem), 0);
    stop(&scene.server);
    assert_int_equal(scene.server.served, 5);
    assert_string_equal(scene.server.requests[2], scene.server.requests[3]);
    assert_string_equal(scene.server.requests[2], scene.server.requests[4]);
    assert_non_null(strstr(scene.server.requests[2],
                           "{\"seq\":1,\"epoch\":\"0123456789abcdef\","
                           "\"expected_len\":3,\"expected_digest\":"
                           "\"" DIGEST_123 "\",\"tree\":{\"tokens\":[5,10,11,"
                           "12],\"parents\":[-1,0,0,2]}}"));
    assert_int_equal(round.node_count, 3);
    assert_int_equal(round.token_count, 3);
    assert_int_equal(round.tokens[2], 77);
    assert_int_equal(round.replayed, 1);
    assert_int_equal(round.server_us, 1234);
    assert_int_equal(round.queue_us, 4);
    assert_int_equal(round.gpu_us, 1000);
    assert_int_equal(round.batch, 3);
    assert_int_equal(round.useful_nodes, 9);
    assert_int_equal(round.cost_count, 2);
    assert_int_equal(round.cost_nodes[1], 16);
    assert_int_equal(round.cost_us[0], 700);
    assert_int_equal(round.cost_us[1], 1500);
    assert_int_equal(round.attempts, 3);
    assert_int_equal(round.recovered, TV_CLIENT_NOT_RECOVERED);
    const struct tv_client_state *now = tv_client_session_state(session);
    const int32_t text[6] = {1, 2, 3, 5, 11, 12};
    assert_int_equal(now->next_seq, 2);
    assert_int_equal(now->committed_len, 6);
    assert_int_equal(now->prompt_len, 3);
    assert_int_equal(now->pending, 77);
    assert_memory_equal(now->tokens, text, sizeof(text));
    tv_client_round_finish(&round);
    end(&scene);
}

static void problem_is_mapped(void **state)
{
    (void)state;
    static const struct step steps[] = {
        OPENING,

        {.status = "422 Unprocessable Content",
         .type = "application/problem+json",
         .body = "{\"type\":\"urn:treeverify:error:tree-invalid\",\"title\":\"t\",\"status\":422,"
                 "\"detail\":\"node 2: parent 9 is not before it\",\"code\":\"tree-invalid\","
                 "\"pointer\":\"/tree/parents/2\",\"node\":2,\"retryable\":false,"
                 "\"committed\":false,\"instance\":\"x\"}"}};
    struct scene scene;
    struct tv_client_round round;
    struct tv_client_problem problem;
    struct tv_client_session *session = begin(&scene, steps, 3);
    assert_int_equal(tv_client_verify(session, tree_tokens, tree_parents, 4, &round, &problem),
                     -EPROTO);
    stop(&scene.server);
    assert_int_equal(problem.http_status, 422);
    assert_string_equal(problem.code, "tree-invalid");
    assert_string_equal(problem.detail, "node 2: parent 9 is not before it");
    assert_string_equal(problem.pointer, "/tree/parents/2");
    assert_int_equal(problem.node, 2);
    assert_int_equal(problem.committed, 0);
    assert_int_equal(problem.retryable, 0);
    assert_fresh(session);
    end(&scene);
}

static void retry_after_is_honoured(void **state)
{
    (void)state;
    static const struct step steps[] = {
        OPENING,

        {.status = "503 Service Unavailable",
         .type = "application/problem+json",
         .headers = "Retry-After: 1\r\n",
         .body = "{\"code\":\"overloaded\",\"detail\":\"queue full\",\"retryable\":true,"
                 "\"committed\":false}"},
        {.status = "200 OK", .type = "application/json", .body = round_1},
    };
    struct scene scene;
    struct tv_client_round round;
    struct tv_client_problem problem;
    struct tv_client_session *session = begin(&scene, steps, 4);
    int64_t before = now_ms();
    assert_int_equal(tv_client_verify(session, tree_tokens, tree_parents, 4, &round, &problem), 0);
    assert_true(now_ms() - before >= 1000);
    stop(&scene.server);
    assert_string_equal(scene.server.requests[2], scene.server.requests[3]);
    tv_client_round_finish(&round);
    end(&scene);
}

/* Answers that a correct server never gives: nothing is taken from them. */
static void answers_that_break_the_contract(void **state)
{
    (void)state;
    static const char *const bodies[] = {
        "",
        "not json",
        "[]",
        "{}",
        "{\"seq\":1",
        /* node 3 is no child of node 1 */
        "{\"seq\":1,\"accepted\":{\"nodes\":[0,1,3],\"tokens\":[5,10,12]},\"pending\":77,"
        "\"new_tokens\":[10,12,77],\"committed_len\":6,"
        "\"digest\":\"" DIGEST_6 "\",\"next_seq\":2,\"finish\":null}",
        /* a node that was not sent */
        "{\"seq\":1,\"accepted\":{\"nodes\":[0,9],\"tokens\":[5,10]},\"pending\":77,"
        "\"new_tokens\":[10,77],\"committed_len\":5,"
        "\"digest\":\"" DIGEST_6 "\",\"next_seq\":2,\"finish\":null}",
        /* the length does not fit */
        "{\"seq\":1,\"accepted\":{\"nodes\":[0,2,3],\"tokens\":[5,11,12]},\"pending\":77,"
        "\"new_tokens\":[11,12,77],\"committed_len\":7,"
        "\"digest\":\"" DIGEST_6 "\",\"next_seq\":2,\"finish\":null}",
        /* the digest is that of other tokens */
        "{\"seq\":1,\"accepted\":{\"nodes\":[0,2,3],\"tokens\":[5,11,12]},\"pending\":77,"
        "\"new_tokens\":[11,12,77],\"committed_len\":6,"
        "\"digest\":\"" DIGEST_5 "\",\"next_seq\":2,\"finish\":null}",
        /* another round's answer */
        "{\"seq\":2,\"accepted\":{\"nodes\":[0,2,3],\"tokens\":[5,11,12]},\"pending\":77,"
        "\"new_tokens\":[11,12,77],\"committed_len\":6,"
        "\"digest\":\"" DIGEST_6 "\",\"next_seq\":3,\"finish\":null}",
        /* pending is not the last of the new tokens */
        "{\"seq\":1,\"accepted\":{\"nodes\":[0,2,3],\"tokens\":[5,11,12]},\"pending\":78,"
        "\"new_tokens\":[11,12,77],\"committed_len\":6,"
        "\"digest\":\"" DIGEST_6 "\",\"next_seq\":2,\"finish\":null}",
    };
    for (size_t i = 0; i < sizeof(bodies) / sizeof(bodies[0]); i++) {
        const struct step steps[] = {
            OPENING, {.status = "200 OK", .type = "application/json", .body = bodies[i]}};
        struct scene scene;
        struct tv_client_round round;
        struct tv_client_problem problem;
        struct tv_client_session *session = begin(&scene, steps, 3);
        assert_int_equal(tv_client_verify(session, tree_tokens, tree_parents, 4, &round, &problem),
                         -EBADMSG);
        stop(&scene.server);
        assert_fresh(session);
        end(&scene);
    }
}

/* The same of held rounds and rows of logits. */
static void proposals_that_break_the_contract(void **state)
{
    (void)state;
#define PROPOSED(status, rows)                                                                     \
    "{\"seq\":1,\"status\":\"" status "\",\"accepted\":{\"nodes\":[0,2],\"tokens\":[5,11]},"       \
    "\"pending\":77,\"new_tokens\":[11,77],\"committed_len\":3,\"digest\":\"" DIGEST_123           \
    "\",\"next_seq\":2,\"finish\":null" rows "}"
#define ROWS(rows, shape, dtype, data)                                                             \
    ",\"logits\":{\"rows\":" rows ",\"shape\":" shape ",\"dtype\":\"" dtype                        \
    "\",\"data_b64\":\"" data "\"}"
    static const char *const bodies[] = {
        PROPOSED("committed", ROWS("[0]", "[1,1]", "f32", "AACAPw==")), /* nothing is held */
        PROPOSED("held", ""),
        PROPOSED("held", ROWS("[0]", "[1,1]", "bf16", "AACAPw==")),
        PROPOSED("held", ROWS("[0]", "[1,2]", "f32", "AACAPw==")),   /* too little */
        PROPOSED("held", ROWS("[0]", "[1,1]", "f32", "AACAP")),      /* no base64 */
        PROPOSED("held", ROWS("[0]", "[1,1]", "f32", "AACA!w==")),   /* nor this */
        PROPOSED("held", ROWS("[4]", "[1,1]", "f32", "AACAPw==")),   /* no such node */
        PROPOSED("held", ROWS("[0]", "[2,1]", "f32", "AACAPw==")),   /* one row */
        PROPOSED("held", ROWS("[0]", "[1]", "f32", "AACAPw==")),     /* no width */
        PROPOSED("held", ROWS("[0]", "[1,-1]", "f32", "AACAPw==")),  /* a negative one */
        PROPOSED("held", ROWS("[]", "[0,1]", "f32", "")),            /* no row at all */
        PROPOSED("held", ROWS("[0]", "[1,2000000000]", "f32", "A")), /* more than there is */
    };
    const struct tv_client_verify_options options = {.hold = 1, .logits = TV_CLIENT_ROWS_STOP};
    for (size_t i = 0; i < sizeof(bodies) / sizeof(bodies[0]); i++) {
        const struct step steps[] = {
            OPENING, {.status = "200 OK", .type = "application/json", .body = bodies[i]}};
        struct scene scene;
        struct tv_client_round round;
        struct tv_client_problem problem;
        struct tv_client_session *session = begin(&scene, steps, 3);
        assert_int_equal(tv_client_verify_with(session, tree_tokens, tree_parents, 4, &options,
                                               &round, &problem),
                         -EBADMSG);
        stop(&scene.server);
        assert_fresh(session);
        assert_int_equal(tv_client_session_state(session)->held_seq, 0);
        end(&scene);
    }
}

/* What an intermediary says without a problem document: a gateway's status is worth another try. */
static void refusals_without_a_document(void **state)
{
    (void)state;
    static const struct step steps[] = {
        OPENING,
        {.status = "502 Bad Gateway", .type = "text/html", .body = "<html>bad</html>"},
        {.status = "504 Gateway Timeout", .type = "application/json", .body = "{\"message\":1}"},
        {.status = "429 Too Many Requests",
         .type = "text/plain",
         .body = "",
         .headers = "Retry-After: 1\r\n"},
        {.status = "200 OK", .type = "application/json", .body = round_1},
        {.status = "405 Method Not Allowed", .type = "text/html", .body = "<html>no</html>"},
    };
    struct scene scene;
    struct tv_client_round round;
    struct tv_client_problem problem;
    struct tv_client_session *session = begin(&scene, steps, 7);
    int64_t before = now_ms();
    assert_int_equal(tv_client_verify(session, tree_tokens, tree_parents, 4, &round, &problem), 0);
    assert_true(now_ms() - before >= 1000);
    assert_int_equal(round.attempts, 4);
    tv_client_round_finish(&round);
    assert_int_equal(tv_client_decode(session, 1, &round, &problem), -EPROTO);
    assert_int_equal(problem.http_status, 405);
    assert_string_equal(problem.code, "");
    assert_int_equal(problem.retryable, 0);
    stop(&scene.server);
    assert_int_equal(scene.server.served, 7);
    end(&scene);
}

/* What is wrong before anything is sent. */
static void arguments_are_judged_here(void **state)
{
    (void)state;
    static const struct step steps[] = {OPENING};
    const int32_t other[2] = {6, 7}, late[2] = {-1, 1}, rootless[2] = {0, 0};
    const int32_t good[2] = {5, 7}, parents[2] = {-1, 0};
    struct scene scene;
    struct tv_client_round round;
    struct tv_client_problem problem;
    struct tv_client_session_options options;
    struct tv_client_session *none = NULL;
    struct tv_client_session *session = begin(&scene, steps, 2);
    assert_int_equal(tv_client_verify(session, other, parents, 2, &round, &problem), -EINVAL);
    assert_non_null(strstr(problem.detail, "token 6, but 5 is pending"));
    assert_int_equal(tv_client_verify(session, good, late, 2, &round, &problem), -EINVAL);
    assert_int_equal(problem.node, 1);
    assert_int_equal(tv_client_verify(session, good, rootless, 2, &round, &problem), -EINVAL);
    assert_int_equal(problem.node, 0);
    assert_int_equal(tv_client_verify(session, good, parents, 0, &round, &problem), -EINVAL);
    assert_int_equal(tv_client_decode(session, 0, &round, &problem), -EINVAL);
    assert_int_equal(tv_client_decode(session, 1025, &round, &problem), -EINVAL);
    assert_int_equal(tv_client_extend(session, good, 0, 0, NULL, &problem), -EINVAL);
    assert_int_equal(tv_client_rollback(session, 0, -1, NULL, &problem), -EINVAL);
    assert_int_equal(tv_client_rollback(session, 4, -1, NULL, &problem), -EINVAL);
    tv_client_session_options_init(&options);
    assert_int_equal(tv_client_session_create(scene.client, &options, &none, &problem), -EINVAL);
    options.tokens = prompt;
    options.token_count = 3;
    static const char *const seeds[] = {"", "-1", "1e3", "184467440737095516150"};
    for (size_t i = 0; i < sizeof(seeds) / sizeof(seeds[0]); i++) {
        options.sampling.seed = seeds[i];
        assert_int_equal(tv_client_session_create(scene.client, &options, &none, &problem),
                         -EINVAL);
    }
    options.sampling.seed = NULL;
    options.cache_salt = "a\"b";
    assert_int_equal(tv_client_session_create(scene.client, &options, &none, &problem), -EINVAL);
    options.cache_salt = NULL;
    options.sampling.rule = "ratio_wor"; /* needs distributions, which no tree here has */
    assert_int_equal(tv_client_session_create(scene.client, &options, &none, &problem), -EINVAL);
    assert_null(none);
    stop(&scene.server);
    assert_int_equal(scene.server.served, 2);
    assert_fresh(session);
    end(&scene);
}

static void life_of_a_session(void **state)
{
    (void)state;
    static const struct step steps[] = {
        {.status = "200 OK", .type = "application/json", .body = model},
        {.hang_up = 1},
        {.status = "201 Created", .type = "application/json", .body = created},
        {.status = "200 OK",
         .type = "application/json",
         .body = "{\"seq\":1,\"new_tokens\":[20,21],\"pending\":21,\"committed_len\":5,"
                 "\"digest\":\"" DIGEST_5 "\",\"next_seq\":2,\"finish\":\"stop\"}"},
        {.status = "200 OK",
         .type = "application/json",
         .body = "{\"seq\":2,\"pending\":5,\"committed_len\":3,\"digest\":\"" DIGEST_123 "\","
                 "\"next_seq\":3,\"finish\":null}"},
        {.status = "204 No Content", .type = "application/json", .body = ""},
    };
    const int32_t stops[1] = {257};
    const struct tv_client_session_options options = {.tokens = prompt,
                                                      .token_count = 3,
                                                      .sampling = {.rule = "target_walk",
                                                                   .temperature = 0.8,
                                                                   .top_p = 1.0,
                                                                   .seed = "18446744073709551615"},
                                                      .stop_ids = stops,
                                                      .stop_count = 1,
                                                      .lease_s = 60,
                                                      .cache_salt = "mine"};
    struct server server;
    struct tv_client_session *session = NULL;
    struct tv_client_round round;
    struct tv_client_problem problem;
    start(&server, steps, 6);
    struct tv_client *client = client_of(&server);
    /* the digest that the server says is that of another salt */
    assert_int_equal(tv_client_session_create(client, &options, &session, &problem), -EBADMSG);
    assert_null(session);
    stop(&server);
    struct tv_client_session_options plain = options;
    plain.cache_salt = NULL;
    tv_client_destroy(client);
    start(&server, steps, 6);
    client = client_of(&server);
    assert_int_equal(tv_client_session_create(client, &plain, &session, &problem), 0);
    const struct tv_client_state *now = tv_client_session_state(session);
    assert_int_equal(now->pending, 5);
    assert_int_equal(now->max_nodes, 64);
    assert_string_equal(now->seed, "18446744073709551615");
    assert_int_equal(tv_client_decode(session, 8, &round, &problem), 0);
    assert_string_equal(now->finish, "stop");
    assert_int_equal(round.node_count, 0);
    assert_int_equal(round.token_count, 2);
    tv_client_round_finish(&round);
    assert_int_equal(tv_client_rollback(session, 3, 5, &round, &problem), 0);
    assert_int_equal(round.token_count, 0);
    tv_client_round_finish(&round);
    assert_int_equal(now->committed_len, 3);
    assert_string_equal(now->digest, DIGEST_123);
    assert_int_equal(tv_client_session_delete(session, &problem), 0);
    stop(&server);
    /* a create that is sent again carries the same key */
    assert_string_equal(server.requests[1], server.requests[2]);
    assert_non_null(strstr(server.requests[1], "Idempotency-Key: "));
    assert_non_null(strstr(server.requests[1], "\"seed\":\"18446744073709551615\""));
    assert_non_null(strstr(server.requests[1], "\"stop\":{\"token_ids\":[257]}"));
    assert_non_null(strstr(server.requests[1], "\"lease_s\":60"));
    assert_non_null(strstr(server.requests[1], "\"expected_digest\":\"" DIGEST_123 "\""));
    assert_non_null(strstr(server.requests[5], "DELETE /v1/sessions/s_BBBBBBBBBBBBBBBBBBBBBB "));
    tv_client_session_destroy(session);
    tv_client_destroy(client);
}

static void session_id_cannot_leave_its_path(void **state)
{
    (void)state;
    static const struct step steps[] = {
        {.status = "200 OK", .type = "application/json", .body = model},
        {.status = "201 Created",
         .type = "application/json",
         .body = "{\"session\":\"../admin?x\",\"epoch\":\"0123456789abcdef\",\"next_seq\":1,"
                 "\"committed_len\":3,\"digest\":\"" DIGEST_123 "\",\"pending\":9,\"finish\":null,"
                 "\"cached_len\":0,\"sampling\":{\"rule\":\"greedy\"},"
                 "\"limits\":{\"max_nodes\":64,\"max_depth\":16}}"}};
    struct tv_client_session_options options;
    struct tv_client_session *session = NULL;
    struct tv_client_problem problem;
    struct server server;
    start(&server, steps, 2);
    struct tv_client *client = client_of(&server);
    tv_client_session_options_init(&options);
    options.tokens = prompt;
    options.token_count = 3;
    assert_int_equal(tv_client_session_create(client, &options, &session, &problem), -EBADMSG);
    assert_null(session);
    stop(&server);
    tv_client_destroy(client);
}

/* A server that does not answer, and one that hangs up again and again: the limit is of all
 * attempts. */
static void delete_ends_within_its_limit(void **state)
{
    (void)state;
    static const struct step silent[] = {OPENING, {.silent_ms = 20000}};
    static const struct step lost[] = {
        OPENING, {.hang_up = 1}, {.status = "204 No Content", .type = "x", .body = ""}};
    struct scene scene;
    struct tv_client_problem problem;
    struct tv_client_session *session = begin(&scene, silent, 3);
    int64_t before = now_ms();
    assert_int_equal(tv_client_session_delete_within(session, 0, &problem), -EINVAL);
    assert_int_equal(tv_client_session_delete_within(session, 150, &problem), -ETIMEDOUT);
    assert_in_range(now_ms() - before, 140, 10000); /* of 150: timers end a little early */
    stop(&scene.server);
    end(&scene);
    session = begin(&scene, lost, 4);
    assert_int_equal(tv_client_session_delete_within(session, 4000, &problem), 0);
    stop(&scene.server);
    assert_int_equal(scene.server.served, 4);
    end(&scene);
}

/* A fork behind a restart that kept the session: tokens of a round whose answer was lost are not
 * the fork's to take, since it hands none out; the next round does. */
static void fork_takes_no_tokens(void **state)
{
    (void)state;
#define KEPT                                                                                       \
    "\"session_state\":{\"session\":\"s_BBBBBBBBBBBBBBBBBBBBBB\",\"epoch\":\"fedcba9876543210\","  \
    "\"next_seq\":2,\"committed_len\":5,\"digest\":\"" DIGEST_5 "\",\"pending\":21,"               \
    "\"finish\":null,\"tail_from\":3,\"tail\":[5,20]}}"
    static const struct step steps[] = {
        OPENING,
        {.status = "409 Conflict",
         .type = "application/problem+json",
         .body = "{\"code\":\"epoch-changed\",\"committed\":false," KEPT},
        {.status = "201 Created", .type = "application/json", .body = created},
        {.status = "409 Conflict",
         .type = "application/problem+json",
         .body = "{\"code\":\"length-mismatch\",\"committed\":false," KEPT},
    };
    struct scene scene;
    struct tv_client_round round;
    struct tv_client_session *child = NULL;
    struct tv_client_problem problem;
    struct tv_client_session *session = begin(&scene, steps, 5);
    const struct tv_client_state *now = tv_client_session_state(session);
    assert_int_equal(tv_client_fork(session, 0, NULL, 0, &child, &problem), 0);
    assert_int_equal(tv_client_session_state(child)->pending, 5);
    assert_fresh(session);
    assert_string_equal(now->epoch, "fedcba9876543210");
    assert_int_equal(tv_client_verify(session, tree_tokens, tree_parents, 4, &round, &problem), 0);
    stop(&scene.server);
    assert_non_null(strstr(scene.server.requests[3], "{\"epoch\":\"fedcba9876543210\",\"len\":3"));
    assert_non_null(strstr(scene.server.requests[4], "{\"seq\":1,\"epoch\":\"fedcba9876543210\","));
    assert_int_equal(round.recovered, TV_CLIENT_RESYNC);
    assert_int_equal(round.token_count, 2);
    assert_int_equal(round.tokens[0], 20);
    assert_int_equal(round.tokens[1], 21);
    assert_int_equal(now->committed_len, 5);
    tv_client_round_finish(&round);
    tv_client_session_destroy(child);
    end(&scene);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(lost_round_is_sent_again_unchanged),
        cmocka_unit_test(problem_is_mapped),
        cmocka_unit_test(retry_after_is_honoured),
        cmocka_unit_test(answers_that_break_the_contract),
        cmocka_unit_test(proposals_that_break_the_contract),
        cmocka_unit_test(refusals_without_a_document),
        cmocka_unit_test(arguments_are_judged_here),
        cmocka_unit_test(life_of_a_session),
        cmocka_unit_test(session_id_cannot_leave_its_path),
        cmocka_unit_test(delete_ends_within_its_limit),
        cmocka_unit_test(fork_takes_no_tokens),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
