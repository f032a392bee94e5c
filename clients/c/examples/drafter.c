/*
 * drafter.c - a drafter of one's own: what followed the last three tokens when they stood here
 * before, as one chain. For models whose tokens are bytes; refuses nothing and knows no store.
 *
 *     cc drafter.c $(pkg-config --cflags --libs treeverify-client) && ./a.out URL 'Holy, holy,
 * holy'
 */
#include <stdio.h>
#include <string.h>

#include <treeverify-client.h>

#define DEPTH 8

static int32_t draft(const struct tv_client_state *now, int32_t *tokens, int32_t *parents)
{
    int32_t count = 1, length = now->committed_len;
    tokens[0] = now->pending; /* node 0; the text is now->tokens and it */
    parents[0] = -1;
    for (int32_t at = length - 1; at >= 2 && count == 1; at--) {
        const int32_t *seen = now->tokens + at;
        if (seen[0] == now->pending && seen[-1] == now->tokens[length - 1] &&
            seen[-2] == now->tokens[length - 2]) {
            for (; count <= DEPTH && at + count < length; count++) {
                tokens[count] = seen[count];
                parents[count] = count - 1;
            }
        }
    }
    return count;
}

int main(int argc, char **argv)
{
    struct tv_client_options options;
    struct tv_client_session_options wanted;
    struct tv_client_problem problem = {.detail = "the URL or the memory"};
    struct tv_client *client = NULL;
    struct tv_client_session *session = NULL;
    int32_t prompt[256], tokens[1 + DEPTH], parents[1 + DEPTH];
    tv_client_options_init(&options);
    tv_client_session_options_init(&wanted); /* greedy */
    options.url = argc > 1 ? argv[1] : "http://127.0.0.1:8471";
    for (const char *text = argc > 2 ? argv[2] : "Holy, holy, holy, holy";
         *text != '\0' && wanted.token_count < 256; text++) {
        prompt[wanted.token_count++] = (unsigned char)*text;
    }
    wanted.tokens = prompt;
    int error = tv_client_create(&options, &client);
    if (error == 0) {
        error = tv_client_session_create(client, &wanted, &session, &problem);
    }
    for (int32_t count = 0; error == 0 && count < 60;) {
        struct tv_client_round round;
        int32_t nodes = draft(tv_client_session_state(session), tokens, parents);
        error = tv_client_verify(session, tokens, parents, nodes, &round, &problem);
        for (int32_t i = 0; error == 0 && i < round.token_count; i++, count++) {
            (void)putchar(round.tokens[i]);
        }
        if (error == 0) {
            tv_client_round_finish(&round);
        }
    }
    (void)fprintf(stderr, "%s\n", error == 0 ? "" : problem.detail);
    if (session != NULL) {
        (void)tv_client_session_delete(session, &problem); /* else its lease ends it */
    }
    tv_client_session_destroy(session);
    tv_client_destroy(client);
    return error == 0 ? 0 : 1;
}
