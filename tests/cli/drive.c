/*
 * drive.c - the client library on a leash: one call a line of stdin, one JSON line of what came.
 *
 *     drive URL RETRIES_MAX BACKOFF_MS
 *     create RULE TEMPERATURE SEED|- MAX_LEN TOKENS      verify TOKENS PARENTS      decode N
 *     extend KEEP TOKENS      rollback LEN PENDING      delete      (lists are A,B,C)
 *
 * Owns one client and one session at a time. For tests; it judges nothing.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "clients/c/treeverify-client.h"

#define LIST_MAX 8192
#define LINE_MAX (1 << 17)

struct list {
    int32_t items[LIST_MAX];
    int32_t count;
};

static struct list first, second;

static const char *word(void)
{
    const char *found = strtok(NULL, " \n");
    return found != NULL ? found : "";
}

static int32_t number(void)
{
    return (int32_t)strtol(word(), NULL, 10);
}

static void read_list(struct list *ret_list)
{
    const char *at = word();
    char *end;
    ret_list->count = 0;
    while (*at != '\0' && ret_list->count < LIST_MAX) {
        ret_list->items[ret_list->count++] = (int32_t)strtol(at, &end, 10);
        at = *end == ',' ? end + 1 : end;
    }
}

static void print_ints(const char *name, const int32_t *items, int32_t count)
{
    (void)printf(",\"%s\":[", name);
    for (int32_t i = 0; i < count; i++) {
        (void)printf(i == 0 ? "%d" : ",%d", (int)items[i]);
    }
    (void)printf("]");
}

static int create(struct tv_client *client, struct tv_client_session **session,
                  struct tv_client_problem *problem)
{
    struct tv_client_session_options options;
    tv_client_session_destroy(*session);
    *session = NULL;
    tv_client_session_options_init(&options);
    options.sampling.rule = word();
    options.sampling.temperature = strtod(word(), NULL);
    const char *seed = word();
    options.sampling.seed = seed[0] != '-' ? seed : NULL;
    options.max_len = number();
    read_list(&first);
    options.tokens = first.items;
    options.token_count = first.count;
    return tv_client_session_create(client, &options, session, problem);
}

static int call(const char *name, struct tv_client *client, struct tv_client_session **session,
                struct tv_client_round *round, struct tv_client_problem *problem)
{
    if (strcmp(name, "create") == 0) {
        return create(client, session, problem);
    }
    if (strcmp(name, "verify") == 0) {
        read_list(&first);
        read_list(&second);
        return tv_client_verify(*session, first.items, second.items, first.count, round, problem);
    }
    if (strcmp(name, "decode") == 0) {
        return tv_client_decode(*session, number(), round, problem);
    }
    if (strcmp(name, "extend") == 0) {
        int keep = number();
        read_list(&first);
        return tv_client_extend(*session, first.items, first.count, keep, round, problem);
    }
    if (strcmp(name, "rollback") == 0) {
        int32_t len = number();
        return tv_client_rollback(*session, len, number(), round, problem);
    }
    return tv_client_session_delete(*session, problem);
}

static void print_state(const struct tv_client_session *session)
{
    const struct tv_client_state *now = tv_client_session_state(session);
    (void)printf(",\"id\":\"%s\",\"epoch\":\"%s\",\"digest\":\"%s\",\"finish\":\"%s\",\"seed\":"
                 "\"%s\",\"pending\":%d,\"next_seq\":%d,\"resumed\":%d,\"prompt_len\":%d",
                 now->id, now->epoch, now->digest, now->finish, now->seed, (int)now->pending,
                 (int)now->next_seq, (int)now->resumed, (int)now->prompt_len);
    print_ints("text", now->tokens, now->committed_len);
}

int main(int argc, char **argv)
{
    static char line[LINE_MAX];
    struct tv_client_options options;
    struct tv_client *client = NULL;
    struct tv_client_session *session = NULL;
    if (argc != 4) {
        return 64;
    }
    tv_client_options_init(&options);
    options.url = argv[1];
    options.retries_max = (int32_t)strtol(argv[2], NULL, 10);
    options.backoff_ms = (int32_t)strtol(argv[3], NULL, 10);
    if (tv_client_create(&options, &client) != 0) {
        return 71;
    }
    while (fgets(line, sizeof(line), stdin) != NULL) {
        struct tv_client_round round = {0};
        struct tv_client_problem problem = {.detail = ""};
        const char *name = strtok(line, " \n");
        int error = call(name != NULL ? name : "", client, &session, &round, &problem);
        (void)printf(
            "{\"error\":%d,\"code\":\"%s\",\"recovered\":%d,\"replayed\":%d,\"attempts\":%d", error,
            error != 0 ? problem.code : "", (int)round.recovered, (int)round.replayed,
            (int)round.attempts);
        print_ints("nodes", round.nodes, round.node_count);
        print_ints("new", round.tokens, round.token_count);
        if (session != NULL) {
            print_state(session);
        }
        (void)printf("}\n");
        (void)fflush(stdout);
        tv_client_round_finish(&round);
    }
    tv_client_session_destroy(session);
    tv_client_destroy(client);
    return 0;
}
