/*
 * calls.c - the calls that need no session: probes, model, metrics, parity, one-shot.
 */
#include <errno.h>
#include <string.h>

#include "clients/c/internal.h"

#define METHOD_BYTES_MAX 16

/* An exchange whose refusal's document nobody wants; *ret_answer only with 0. */
static int ask(struct tv_client *client, const struct tv_client_call *call,
               struct tv_client_answer *ret_answer, struct tv_client_problem *ret_problem)
{
    struct tv_client_answer answer = {0};
    int error = tv_client_exchange(client, call, &answer, ret_problem);
    if (error != 0) {
        tv_client_answer_finish(&answer);
        return error;
    }
    *ret_answer = answer;
    return tv_client_end(0, ret_problem);
}

/* Of either nothing is sent that would be more than itself: no line break, no other argument. */
static int check_target(const char *method, const char *path)
{
    size_t letters = strspn(method, "ABCDEFGHIJKLMNOPQRSTUVWXYZ");
    if (letters == 0 || letters > METHOD_BYTES_MAX || method[letters] != '\0' || path[0] != '/') {
        return -EINVAL;
    }
    for (const unsigned char *at = (const unsigned char *)path; *at != '\0'; at++) {
        if (*at <= 0x20 || *at >= 0x7f || *at == '#') {
            return -EINVAL;
        }
    }
    return 0;
}

int tv_client_request(struct tv_client *client, const char *method, const char *path,
                      const char *body, size_t body_bytes, struct tv_client_answer *ret_answer,
                      struct tv_client_problem *ret_problem)
{
    const struct tv_client_call call = {.method = method,
                                        .path = path,
                                        .body = body,
                                        .body_bytes = body_bytes,
                                        .reading = TV_CLIENT_PLAIN};
    if (check_target(method, path) != 0) {
        tv_client_problem_set(ret_problem, "a method is of capital letters; a path begins with / "
                                           "and has neither blanks nor # nor bytes above 0x7e");
        return -EINVAL;
    }
    return ask(client, &call, ret_answer, ret_problem);
}

/* A question whether the server is there: one that restarts is not. */
static int probe(struct tv_client *client, const char *path, enum tv_client_reading reading,
                 struct tv_client_answer *ret_answer, struct tv_client_problem *ret_problem)
{
    const struct tv_client_call call = {
        .method = "GET", .path = path, .reading = reading, .hasty = 1};
    return ask(client, &call, ret_answer, ret_problem);
}

int tv_client_health(struct tv_client *client, struct tv_client_answer *ret_answer,
                     struct tv_client_problem *ret_problem)
{
    return probe(client, "/healthz", TV_CLIENT_PLAIN, ret_answer, ret_problem);
}

int tv_client_ready(struct tv_client *client, int deep, struct tv_client_answer *ret_answer,
                    struct tv_client_problem *ret_problem)
{
    return probe(client, deep ? "/readyz?deep=1" : "/readyz", TV_CLIENT_PLAIN, ret_answer,
                 ret_problem);
}

int tv_client_metrics(struct tv_client *client, struct tv_client_answer *ret_answer,
                      struct tv_client_problem *ret_problem)
{
    return probe(client, "/metrics", TV_CLIENT_TEXT, ret_answer, ret_problem);
}

int tv_client_parity_totals(struct tv_client *client, struct tv_client_answer *ret_answer,
                            struct tv_client_problem *ret_problem)
{
    return tv_client_request(client, "GET", "/v1/parity", NULL, 0, ret_answer, ret_problem);
}

int tv_client_parity_run(struct tv_client *client, const char *body, size_t body_bytes,
                         struct tv_client_answer *ret_answer, struct tv_client_problem *ret_problem)
{
    if (body == NULL) {
        body = "{}";
        body_bytes = 2;
    }
    return tv_client_request(client, "POST", "/v1/parity", body, body_bytes, ret_answer,
                             ret_problem);
}

int tv_client_oneshot(struct tv_client *client, const char *body, size_t body_bytes,
                      struct tv_client_answer *ret_answer, struct tv_client_problem *ret_problem)
{
    return tv_client_request(client, "POST", "/v1/verify", body, body_bytes, ret_answer,
                             ret_problem);
}

int tv_client_model(struct tv_client *client, struct tv_client_model *ret_model,
                    struct tv_client_problem *ret_problem)
{
    const struct tv_client_call call = {.method = "GET", .path = "/v1/model"};
    struct tv_client_answer answer = {0};
    struct tv_client_model model = {0};
    int error = ask(client, &call, &answer, ret_problem);
    if (error != 0) {
        return error;
    }
    if (!tv_client_is_object(&answer)) {
        error = tv_client_not_the_contract("/v1/model is not an object", ret_problem);
        goto out;
    }
    const struct tv_json *doc = tv_client_json(&answer);
    const struct tv_json_value *root = tv_json_root(doc);
    const struct tv_json_value *limits = tv_json_member(root, "limits");
    tv_client_get_text_cut(root, "name", model.name, sizeof(model.name));
    tv_client_get_text_cut(root, "architecture", model.architecture, sizeof(model.architecture));
    tv_client_get_text_cut(root, "backend", model.backend, sizeof(model.backend));
    tv_client_get_text_cut(root, "device", model.device, sizeof(model.device));
    if (tv_client_get_text(root, "model_id", model.model_id, sizeof(model.model_id)) != 0 ||
        tv_client_get_int32(doc, root, "vocab", &model.vocab) != 0 ||
        tv_client_get_int32(doc, root, "max_len", &model.max_len) != 0 || limits == NULL ||
        tv_client_get_int32(doc, limits, "max_nodes", &model.max_nodes) != 0 ||
        tv_client_get_int32(doc, limits, "max_depth", &model.max_depth) != 0) {
        error = tv_client_not_the_contract("/v1/model without model_id, vocab, max_len or limits",
                                           ret_problem);
        goto out;
    }
    *ret_model = model;
out:
    tv_client_answer_finish(&answer);
    return error;
}
