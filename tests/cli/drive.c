/*
 * drive.c - the client library on a leash: one call a line of stdin, one JSON line of what came.
 *
 *     drive URL RETRIES_MAX BACKOFF_MS
 *     create RULE TEMPERATURE SEED|- MAX_LEN TOKENS      verify TOKENS PARENTS      decode N
 *     extend KEEP TOKENS      rollback LEN PENDING      delete      (lists are A,B,C)
 *     with RULE|- HOLD ROWS DEADLINE_MS TOKENS PARENTS [PATH|- NEXT]      commit PATH|- NEXT
 *     fork LEN SEED|- LEASE_S      prefix LEN      swap      (with the one kept beside it)
 *     send TOKENS PARENTS      if [LEAF PENDING TOKENS PARENTS]...      receive
 *     follow ID AFTER      event WAIT_MS
 *     along STEP COUNT TOKENS      (rounds of trees along the tokens until COUNT of them are there)
 *
 * Owns one client, two sessions and one stream of events at a time. For tests; it judges nothing.
 */
#include <locale.h>
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

static struct list first, second, third;
static struct list guessed[2 * TV_CLIENT_GUESSES_MAX];

/* What the lines are about. other: made by fork or prefix, or swapped away. */
struct leash {
    struct tv_client *client;
    struct tv_client_session *session, *other;
    struct tv_client_events *events;
    struct tv_client_event event;
};

static const char *word(void)
{
    const char *found = strtok(NULL, " \n");
    return found != NULL ? found : "";
}

static int32_t number(void)
{
    return (int32_t)strtol(word(), NULL, 10);
}

static void parse_list(const char *at, struct list *ret_list)
{
    char *end;
    ret_list->count = 0;
    while (*at != '\0' && ret_list->count < LIST_MAX) {
        ret_list->items[ret_list->count++] = (int32_t)strtol(at, &end, 10);
        at = *end == ',' ? end + 1 : end;
    }
}

/* A list, or "-" for none. */
static void read_list(struct list *ret_list)
{
    const char *at = word();
    parse_list(at[0] == '-' && at[1] == '\0' ? "" : at, ret_list);
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

static int with(struct tv_client_session *session, struct tv_client_round *round,
                struct tv_client_problem *problem)
{
    struct tv_client_verify_options options = {0};
    struct tv_client_settle settle = {0};
    const char *rule = word();
    options.rule = rule[0] != '-' ? rule : NULL;
    options.hold = number();
    options.logits = (enum tv_client_rows)number();
    options.deadline_ms = number();
    read_list(&first);
    read_list(&second);
    const char *path = word();
    if (path[0] != '\0') {
        parse_list(path[0] == '-' ? "" : path, &third);
        settle = (struct tv_client_settle){
            .path = third.items, .path_count = third.count, .next = number()};
        options.commit_prev = &settle;
    }
    return tv_client_verify_with(session, first.items, second.items, first.count, &options, round,
                                 problem);
}

static int commit(struct tv_client_session *session, struct tv_client_round *round,
                  struct tv_client_problem *problem)
{
    read_list(&first);
    const struct tv_client_settle settle = {
        .path = first.items, .path_count = first.count, .next = number()};
    return tv_client_commit(session, &settle, round, problem);
}

static int branch(const char *name, struct leash *leash, struct tv_client_problem *problem)
{
    int32_t len = number();
    tv_client_session_destroy(leash->other);
    leash->other = NULL;
    if (strcmp(name, "prefix") == 0) {
        struct tv_client_session_options options;
        tv_client_session_options_init(&options);
        options.prefix = leash->session;
        options.prefix_len = len;
        return tv_client_session_create(leash->client, &options, &leash->other, problem);
    }
    const char *seed = word();
    return tv_client_fork(leash->session, len, seed[0] != '-' ? seed : NULL, number(),
                          &leash->other, problem);
}

static int send_if(struct tv_client_session *session, struct tv_client_problem *problem)
{
    struct tv_client_guess guesses[TV_CLIENT_GUESSES_MAX];
    int32_t count = 0;
    for (const char *leaf = word(); leaf[0] != '\0' && count < TV_CLIENT_GUESSES_MAX;
         leaf = word()) {
        struct list *here = &guessed[2 * (size_t)count];
        guesses[count].leaf = (int32_t)strtol(leaf, NULL, 10);
        guesses[count].pending = number();
        read_list(&here[0]);
        read_list(&here[1]);
        guesses[count].tokens = here[0].items;
        guesses[count].parents = here[1].items;
        guesses[count++].count = here[0].count;
    }
    return tv_client_send_if(session, guesses, count, problem);
}

static int call_ahead(const char *name, struct leash *leash, struct tv_client_round *round,
                      struct tv_client_problem *problem)
{
    if (strcmp(name, "send") == 0) {
        read_list(&first);
        read_list(&second);
        return tv_client_send(leash->session, first.items, second.items, first.count, problem);
    }
    if (strcmp(name, "if") == 0) {
        return send_if(leash->session, problem);
    }
    if (strcmp(name, "receive") == 0) {
        return tv_client_receive(leash->session, round, problem);
    }
    if (strcmp(name, "follow") == 0) {
        const char *id = word();
        tv_client_events_close(leash->events);
        leash->events = NULL;
        return tv_client_events_open(leash->client, id, number(), &leash->events, problem);
    }
    return tv_client_events_next(leash->events, number(), &leash->event, problem);
}

/* The next step tokens of the text as a chain, each with a wrong sibling, the last `wrong` wrong.
 */
static int32_t tree_along(const int32_t *text, int32_t step, int32_t wrong, int32_t *ret_tokens,
                          int32_t *ret_parents)
{
    int32_t count = 1, at = 0;
    ret_tokens[0] = text[0];
    ret_parents[0] = -1;
    for (int32_t depth = 1; depth < step; depth++, at = count - 1) {
        ret_tokens[count] = (text[depth] + 2) % 256;
        ret_parents[count++] = at;
        ret_tokens[count] = depth < step - wrong ? text[depth] : (text[depth] + 1) % 256;
        ret_parents[count++] = at;
    }
    return count;
}

/* All new tokens as those of one round; its attempts and recovered are sums, guess the rounds. */
static int along(struct tv_client_session *session, struct tv_client_round *ret_round,
                 struct tv_client_problem *problem)
{
    static int32_t tokens[TV_CLIENT_NODES_MAX], parents[TV_CLIENT_NODES_MAX];
    int32_t step = number(), count = number(), rounds = 0;
    struct tv_client_round all = {0}, round;
    int error = 0;
    read_list(&first);
    all.tokens = malloc((size_t)first.count * sizeof(*all.tokens));
    while (error == 0 && all.tokens != NULL && all.token_count < count &&
           all.token_count + step <= first.count) {
        int32_t nodes =
            tree_along(first.items + all.token_count, step, rounds++ % 3, tokens, parents);
        error = tv_client_verify(session, tokens, parents, nodes, &round, problem);
        for (int32_t i = 0; error == 0 && i < round.token_count && all.token_count < first.count;
             i++) {
            all.tokens[all.token_count++] = round.tokens[i];
        }
        if (error == 0) {
            all.attempts += round.attempts;
            all.recovered += round.recovered;
            tv_client_round_finish(&round);
        }
    }
    all.guess = rounds;
    *ret_round = all;
    return error;
}

static int call(const char *name, struct leash *leash, struct tv_client_round *round,
                struct tv_client_problem *problem)
{
    struct tv_client_session *session = leash->session;
    if (strcmp(name, "create") == 0) {
        return create(leash->client, &leash->session, problem);
    }
    if (strcmp(name, "verify") == 0) {
        read_list(&first);
        read_list(&second);
        return tv_client_verify(session, first.items, second.items, first.count, round, problem);
    }
    if (strcmp(name, "decode") == 0) {
        return tv_client_decode(session, number(), round, problem);
    }
    if (strcmp(name, "extend") == 0) {
        int keep = number();
        read_list(&first);
        return tv_client_extend(session, first.items, first.count, keep, round, problem);
    }
    if (strcmp(name, "rollback") == 0) {
        int32_t len = number();
        return tv_client_rollback(session, len, number(), round, problem);
    }
    if (strcmp(name, "with") == 0) {
        return with(session, round, problem);
    }
    if (strcmp(name, "commit") == 0) {
        return commit(session, round, problem);
    }
    if (strcmp(name, "along") == 0) {
        return along(session, round, problem);
    }
    if (strcmp(name, "fork") == 0 || strcmp(name, "prefix") == 0) {
        return branch(name, leash, problem);
    }
    if (strcmp(name, "swap") == 0) {
        leash->session = leash->other;
        leash->other = session;
        *problem =
            (struct tv_client_problem){.node = -1, .committed = -1}; /* no call of the library */
        return 0;
    }
    return strcmp(name, "delete") == 0 ? tv_client_session_delete(session, problem)
                                       : call_ahead(name, leash, round, problem);
}

static void print_logits(const struct tv_client_round *round)
{
    print_ints("rows", round->row_nodes, round->row_count);
    (void)printf(",\"vocab\":%d,\"logits\":[", (int)round->vocab);
    for (int64_t i = 0; i < (int64_t)round->row_count * round->vocab; i++) {
        (void)printf(i == 0 ? "%.9g" : ",%.9g", (double)round->logits[i]);
    }
    (void)printf("]");
}

static void print_event(const struct tv_client_event *event)
{
    const struct tv_client_value *root = tv_client_answer_root(event->data);
    const struct tv_client_value *tokens = tv_client_value_member(root, "new_tokens");
    int32_t *items = NULL;
    int32_t count = 0;
    (void)tv_client_value_ints(event->data, tokens, &items, &count); /* not every event has them */
    (void)printf(",\"event\":\"%s\",\"number\":%d", event->name, (int)event->id);
    print_ints("told", items, count);
    free(items);
}

static void print_state(const struct tv_client_session *session)
{
    const struct tv_client_state *now = tv_client_session_state(session);
    (void)printf(
        ",\"id\":\"%s\",\"epoch\":\"%s\",\"digest\":\"%s\",\"finish\":\"%s\",\"seed\":"
        "\"%s\",\"pending\":%d,\"next_seq\":%d,\"resumed\":%d,\"prompt_len\":%d,\"held_seq\":%d,"
        "\"under_way\":%d,\"cached\":%d",
        now->id, now->epoch, now->digest, now->finish, now->seed, (int)now->pending,
        (int)now->next_seq, (int)now->resumed, (int)now->prompt_len, (int)now->held_seq,
        (int)now->under_way, (int)now->cached_len);
    print_ints("text", now->tokens, now->committed_len);
}

int main(int argc, char **argv)
{
    static char line[LINE_MAX];
    struct tv_client_options options;
    struct leash leash = {0};
    if (argc != 4) {
        return 64;
    }
    (void)setlocale(LC_ALL, ""); /* as programs for people do */
    tv_client_options_init(&options);
    options.url = argv[1];
    options.retries_max = (int32_t)strtol(argv[2], NULL, 10);
    options.backoff_ms = (int32_t)strtol(argv[3], NULL, 10);
    options.restart_ms = 100000; /* a daemon of a sanitizer takes its time to start */
    if (tv_client_create(&options, &leash.client) != 0) {
        return 71;
    }
    while (fgets(line, sizeof(line), stdin) != NULL) {
        struct tv_client_round round = {0};
        struct tv_client_problem problem = {.detail = "of an earlier call"};
        const char *name = strtok(line, " \n");
        int error = call(name != NULL ? name : "", &leash, &round, &problem);
        int said = problem.detail[0] != '\0' || problem.code[0] != '\0' ||
                   problem.pointer[0] != '\0' || problem.http_status != 0 || problem.node >= 0 ||
                   problem.committed >= 0;
        (void)printf("{\"error\":%d,\"code\":\"%s\",\"said\":%d,\"recovered\":%d,\"replayed\":%d,"
                     "\"attempts\":%d,\"held\":%d,\"guess\":%d",
                     error, problem.code, said, (int)round.recovered, (int)round.replayed,
                     (int)round.attempts, (int)round.held, (int)round.guess);
        print_ints("nodes", round.nodes, round.node_count);
        print_ints("new", round.tokens, round.token_count);
        if (round.row_count > 0) {
            print_logits(&round);
        }
        if (leash.event.data != NULL) {
            print_event(&leash.event);
            leash.event.data = NULL;
        }
        if (leash.session != NULL) {
            print_state(leash.session);
        }
        (void)printf("}\n");
        (void)fflush(stdout);
        tv_client_round_finish(&round);
    }
    tv_client_events_close(leash.events);
    tv_client_session_destroy(leash.other);
    tv_client_session_destroy(leash.session);
    tv_client_destroy(leash.client);
    return 0;
}
