/*
 * bench_sched.c - what sessions do to each other: small rounds beside long prompts, many sessions
 * at once, and one principal against many sessions of another.
 *
 * usage: bench_sched [checkpoint folder [seconds [threads [tokens of prompts]]]]. The scheduler and
 * the engine of the daemon in this process, no sockets; a client is a thread that waits for its
 * answer. Prints figures, judges nothing. With TV_BENCH_CPU_TIME=1 a wait is the processor time
 * that this process used meanwhile, which a busy machine disturbs less (1 thread), and only the
 * small rounds beside prompts are measured. TV_BENCH_WHOLE_SLICES=1: none goes between the parts
 * of a slice. Beside prompts once with launches of rounds that take none of their tokens along, and
 * once with those that do.
 */
#include <pthread.h>
#include <semaphore.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/clock.h"
#include "main.h"
#include "sched/sched.h"
#include "stats/stats.h"

#define SESSIONS_MAX 64
#define SAMPLES_MAX  65536
#define LEN_END      200 /* tokens before the model's end at which a session is opened anew */

static struct tv_sched *sched;
static struct tv_stats stats;
static struct tv_engine *engine;
static int cpu_time;

static int64_t now_us(void)
{
    struct timespec now;
    if (!cpu_time) {
        return tv_clock_us();
    }
    (void)clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now); /* cannot fail with this id */
    return (int64_t)now.tv_sec * 1000000 + now.tv_nsec / 1000;
}

struct client {
    const char *principal;
    int32_t prefix, nodes; /* of a new session, of a round */
    int64_t pause_us;      /* between two rounds at most; 0: none */
    char id[32], epoch[17];
    int32_t len, pending, seq;
    uint32_t random;
    int32_t rounds;
    int64_t *latency_us; /* [SAMPLES_MAX], owned */
    atomic_int *stop;
    int64_t end_us;
    pthread_t thread;
};

static void die(const char *what, const struct tv_call *call)
{
    (void)fprintf(stderr, "bench_sched: %s", what);
    if (call != NULL) {
        (void)fprintf(stderr, ": %.*s", (int)call->reply.body.bytes, call->reply.body.data);
    }
    (void)fprintf(stderr, "\n");
    exit(1);
}

/* Taken where the answer is made: how soon a busy machine wakes the client is not the scheduler's.
 */
struct answer {
    sem_t done;
    int64_t end_us;
};

static void on_done(struct tv_call *call)
{
    struct answer *answer = call->owner;
    answer->end_us = now_us();
    (void)sem_post(&answer->done); /* below its limit: one per call */
}

/* The answer of one call; *ret_us how long it took. */
static struct tv_call *ask(const char *principal, enum tv_call_kind kind, const char *session,
                           const char *body, int64_t *ret_us)
{
    struct tv_call *call = tv_call_create();
    struct tv_problem problem = {0};
    struct answer answer = {0};
    if (call == NULL || sem_init(&answer.done, 0, 0) != 0) {
        die("no memory", NULL);
    }
    if (body != NULL && tv_request_decode(kind, body, strlen(body), tv_sched_limits(sched),
                                          &call->request, &problem) != 0) {
        die(problem.detail, NULL);
    }
    call->request.kind = kind;
    (void)snprintf(call->request.session, sizeof call->request.session, "%s", session);
    (void)snprintf(call->principal, sizeof call->principal, "%s", principal);
    call->done = on_done;
    call->owner = &answer;
    call->received_us = tv_clock_us();
    int64_t start_us = now_us();
    if (tv_sched_submit(sched, call) != 0) {
        while (sem_wait(&answer.done) != 0) {
            /* a signal came: go on waiting */
        }
    } else {
        answer.end_us = now_us();
    }
    *ret_us = answer.end_us - start_us;
    (void)sem_destroy(&answer.done); /* nobody waits */
    return call;
}

static const char *member(const char *body, const char *name)
{
    const char *at = strstr(body, name);
    if (at == NULL) {
        die(name, NULL);
    }
    return at + strlen(name);
}

/* What the next round needs to know of this answer. */
static void learn(struct client *client, struct tv_call *call)
{
    char *body = strndup(call->reply.body.data, call->reply.body.bytes);
    if (body == NULL) {
        die("no memory", NULL);
    }
    client->len = (int32_t)strtol(member(body, "\"committed_len\":"), NULL, 10);
    client->pending = (int32_t)strtol(member(body, "\"pending\":"), NULL, 10);
    client->seq = (int32_t)strtol(member(body, "\"next_seq\":"), NULL, 10);
    if (call->request.kind == TV_CALL_CREATE) {
        (void)snprintf(client->id, sizeof client->id, "%.*s",
                       (int)strcspn(member(body, "\"session\":\""), "\""),
                       member(body, "\"session\":\""));
        (void)snprintf(client->epoch, sizeof client->epoch, "%.*s",
                       (int)strcspn(member(body, "\"epoch\":\""), "\""),
                       member(body, "\"epoch\":\""));
    }
    free(body);
}

static uint32_t draw(struct client *client, uint32_t limit)
{
    client->random = client->random * 1664525u + 1013904223u;
    return (client->random >> 8) % limit;
}

static void session_close(struct client *client)
{
    int64_t us;
    if (client->id[0] != '\0') {
        tv_call_destroy(ask(client->principal, TV_CALL_DELETE, client->id, NULL, &us));
        client->id[0] = '\0';
    }
}

/* Microseconds of the create. */
static int64_t session_open(struct client *client)
{
    char *body = NULL;
    size_t bytes = 0;
    int64_t us;
    session_close(client);
    FILE *text = open_memstream(&body, &bytes);
    if (text == NULL) {
        die("no memory", NULL);
    }
    (void)fprintf(text, "{\"sampling\":{\"rule\":\"greedy\"},\"lease_s\":3600,\"tokens\":[%d",
                  (int)draw(client, 250));
    for (int32_t i = 1; i < client->prefix; i++) {
        (void)fprintf(text, ",%d", (int)draw(client, 250));
    }
    (void)fprintf(text, "]}");
    (void)fclose(text); /* a memory stream; body is checked by the decoder */
    struct tv_call *call = ask(client->principal, TV_CALL_CREATE, "", body, &us);
    if (call->reply.http_status != 201) {
        die("create", call);
    }
    learn(client, call);
    tv_call_destroy(call);
    free(body);
    return us;
}

static int64_t round_run(struct client *client)
{
    char body[2048];
    int64_t us;
    if (client->len > engine->max_len - LEN_END) {
        (void)session_open(client);
    }
    int at = snprintf(body, sizeof body,
                      "{\"seq\":%d,\"epoch\":\"%s\",\"expected_len\":%d,\"deadline_ms\":600000,"
                      "\"tree\":{\"tokens\":[%d",
                      client->seq, client->epoch, client->len, client->pending);
    for (int32_t i = 1; i < client->nodes; i++) {
        at += snprintf(body + at, sizeof body - (size_t)at, ",%d", (int)draw(client, 250));
    }
    at += snprintf(body + at, sizeof body - (size_t)at, "],\"parents\":[-1");
    for (int32_t i = 1; i < client->nodes; i++) {
        at += snprintf(body + at, sizeof body - (size_t)at, ",%d", i - 1);
    }
    (void)snprintf(body + at, sizeof body - (size_t)at, "]}}");
    struct tv_call *call = ask(client->principal, TV_CALL_VERIFY, client->id, body, &us);
    if (call->reply.http_status != 200) {
        die("verify", call);
    }
    learn(client, call);
    tv_call_destroy(call);
    return us;
}

static void pause_us(int64_t us)
{
    struct timespec left = {.tv_sec = us / 1000000, .tv_nsec = us % 1000000 * 1000};
    (void)nanosleep(&left, NULL); /* a shorter pause does no harm */
}

static void *client_main(void *context)
{
    struct client *client = context;
    while (client->stop != NULL ? !atomic_load(client->stop) : tv_clock_us() < client->end_us) {
        int64_t us = round_run(client);
        if (client->rounds < SAMPLES_MAX) {
            client->latency_us[client->rounds++] = us;
        }
        if (client->pause_us > 0) {
            pause_us((int64_t)draw(client, (uint32_t)client->pause_us));
        }
    }
    return NULL;
}

static void client_make(struct client *client, const char *principal, int32_t prefix, int32_t nodes,
                        uint32_t seed)
{
    *client = (struct client){
        .principal = principal, .prefix = prefix, .nodes = nodes, .random = seed + 1};
    client->latency_us = malloc(SAMPLES_MAX * sizeof *client->latency_us);
    if (client->latency_us == NULL) {
        die("no memory", NULL);
    }
    (void)session_open(client);
}

static void client_finish(struct client *client)
{
    session_close(client);
    free(client->latency_us);
}

static int by_value(const void *left, const void *right)
{
    int64_t a = *(const int64_t *)left, b = *(const int64_t *)right;
    return (a > b) - (a < b);
}

/* Median, 99th percentile and largest of the clients' rounds, in ms; they are sorted. */
struct spread {
    int32_t rounds;
    double p50, p99, max;
};

static struct spread spread_of(const struct client *clients, int32_t count)
{
    struct spread spread = {0};
    int64_t *all = NULL;
    size_t rounds = 0;
    for (int32_t i = 0; i < count; i++) {
        rounds += (size_t)clients[i].rounds;
    }
    all = malloc((rounds + 1) * sizeof *all);
    if (all == NULL || rounds == 0) {
        die("no rounds", NULL);
    }
    rounds = 0;
    for (int32_t i = 0; i < count; i++) {
        memcpy(all + rounds, clients[i].latency_us, (size_t)clients[i].rounds * sizeof *all);
        rounds += (size_t)clients[i].rounds;
    }
    qsort(all, rounds, sizeof *all, by_value);
    spread.rounds = (int32_t)rounds;
    spread.p50 = (double)all[rounds / 2] * 1e-3;
    spread.p99 = (double)all[rounds * 99 / 100] * 1e-3;
    spread.max = (double)all[rounds - 1] * 1e-3;
    free(all);
    return spread;
}

/* Prompts of `length` tokens, one after the other, of another principal. */
struct prompts {
    int32_t length, count;
    uint32_t seed; /* its own: a known prompt would cost nothing */
    atomic_int stop;
    int64_t tokens, us;
};

static void *prompts_main(void *context)
{
    struct prompts *prompts = context;
    struct client client = {
        .principal = "prompts", .prefix = prompts->length, .nodes = 1, .random = prompts->seed};
    for (int32_t i = 0; i < prompts->count; i++) {
        prompts->us += session_open(&client);
        prompts->tokens += prompts->length;
    }
    session_close(&client);
    atomic_store(&prompts->stop, 1);
    return NULL;
}

static void run_all(struct client *clients, int32_t count, double seconds)
{
    int64_t end_us = tv_clock_us() + (int64_t)(seconds * 1e6);
    for (int32_t i = 0; i < count; i++) {
        clients[i].end_us = end_us;
        if (pthread_create(&clients[i].thread, NULL, client_main, &clients[i]) != 0) {
            die("no thread", NULL);
        }
    }
    for (int32_t i = 0; i < count; i++) {
        (void)pthread_join(clients[i].thread, NULL); /* ours and joinable */
    }
}

/* Small rounds of `count` clients alone, then while prompts of `tokens` in all are prefilled. */
struct company {
    int32_t count, prefix, nodes;
    int64_t pause_us;
};

static void beside_prompts(const struct company *company, int32_t length, int32_t tokens,
                           double seconds)
{
    static struct client clients[SESSIONS_MAX];
    static uint32_t runs;
    struct prompts prompts = {.length = length,
                              .count = (tokens + length - 1) / length,
                              .seed = (uint32_t)(company->prefix * 4099 + length) + 7919u * runs++};
    pthread_t thread;
    int32_t count = company->count;
    for (int32_t i = 0; i < count; i++) {
        client_make(&clients[i], "rounds", company->prefix, company->nodes, 7 + (uint32_t)i);
        clients[i].pause_us = company->pause_us;
    }
    run_all(clients, count, seconds);
    struct spread idle = spread_of(clients, count);
    for (int32_t i = 0; i < count; i++) {
        clients[i].rounds = 0;
        clients[i].stop = &prompts.stop;
    }
    uint64_t shared = atomic_load(&stats.shared_tokens);
    if (pthread_create(&thread, NULL, prompts_main, &prompts) != 0) {
        die("no thread", NULL);
    }
    run_all(clients, count, seconds);
    (void)pthread_join(thread, NULL); /* ours and joinable */
    struct spread busy = spread_of(clients, count);
    (void)printf(
        "%d x %d nodes at prefix %d: p50 %.2f p99 %.2f ms; beside %d prompts of %d tokens: "
        "p50 %.2f p99 %.2f max %.2f ms (%d rounds), p99 x %.2f; prefill %.0f tokens/s, "
        "%.0f %% of them in launches of rounds\n",
        count, company->nodes, company->prefix, idle.p50, idle.p99, prompts.count, length, busy.p50,
        busy.p99, busy.max, busy.rounds, busy.p99 / idle.p99,
        (double)prompts.tokens * 1e6 / (double)prompts.us,
        100.0 * (double)(atomic_load(&stats.shared_tokens) - shared) / (double)prompts.tokens);
    for (int32_t i = 0; i < count; i++) {
        client_finish(&clients[i]);
    }
}

/* `count` sessions in closed loops; the first of them of a principal of its own when `apart`. */
static void together(int32_t count, int32_t nodes, int apart, double seconds)
{
    static struct client clients[SESSIONS_MAX];
    int32_t least = INT32_MAX, most = 0;
    for (int32_t i = 0; i < count; i++) {
        client_make(&clients[i], apart && i == 0 ? "one" : "many", 64, nodes, (uint32_t)i);
    }
    run_all(clients, count, seconds);
    for (int32_t i = 0; i < count; i++) {
        least = clients[i].rounds < least ? clients[i].rounds : least;
        most = clients[i].rounds > most ? clients[i].rounds : most;
    }
    struct spread all = spread_of(clients, count);
    (void)printf(
        "%d sessions of %d nodes%s: %.1f rounds/s; wait p50 %.2f p99 %.2f max %.2f ms (max "
        "%.1f x p50); rounds of a session %d to %d\n",
        count, nodes, apart ? ", one of another principal" : "", (double)all.rounds / seconds,
        all.p50, all.p99, all.max, all.max / all.p50, least, most);
    if (apart) {
        struct spread one = spread_of(clients, 1);
        (void)printf("  the one: %.1f rounds/s, p50 %.2f p99 %.2f ms\n",
                     (double)one.rounds / seconds, one.p50, one.p99);
    }
    for (int32_t i = 0; i < count; i++) {
        client_finish(&clients[i]);
    }
}

int main(int argc, char **argv)
{
    static struct tv_config config;
    char error[600] = "";
    static char words[9][4096];
    char *args[9];
    const char *texts[9] = {
        "bench_sched", "--model", argc > 1 ? argv[1] : "", "--threads", argc > 3 ? argv[3] : "0",
        "--pages",     "4096",    "--log-level",           "error"};
    for (int i = 0; i < 9; i++) {
        (void)snprintf(words[i], sizeof words[i], "%s", texts[i]);
        args[i] = words[i];
    }
    double seconds = argc > 2 ? strtod(argv[2], NULL) : 3.0;
    if (tv_config_load(&config, 9, args, error, sizeof error) != 0 ||
        tv_main_engine_open(&config, NULL, &engine, error, sizeof error) != 0) {
        die(error, NULL);
    }
    if (tv_sched_create(&config, engine, NULL, &stats, &sched) != 0) {
        die("no scheduler", NULL);
    }
    int32_t tokens = argc > 4 ? (int32_t)strtol(argv[4], NULL, 10) : 32768;
    (void)setvbuf(stdout, NULL, _IOLBF, 0); /* else lines come late, which is all */
    cpu_time = getenv("TV_BENCH_CPU_TIME") != NULL;
    if (getenv("TV_BENCH_WHOLE_SLICES") != NULL) {
        engine->between = NULL; /* before the first call: nobody reads it yet */
    }
    int32_t rider_rows = engine->rider_rows;
    static const struct company companies[] = {{1, 64, 8, 4000}, {8, 64, 8, 0}, {1, 3000, 8, 4000}};
    for (size_t i = 0; i < sizeof companies / sizeof companies[0]; i++) {
        for (int32_t length = 512; length <= 3584 && length <= tokens; length += 3072) {
            for (int shared = 0; shared < 2; shared++) {
                engine->rider_rows = shared ? rider_rows : 0; /* nobody reads it between calls */
                beside_prompts(&companies[i], length, tokens, seconds);
            }
        }
    }
    if (!cpu_time) {
        together(1, 16, 0, seconds);
        together(4, 16, 0, seconds);
        together(64, 16, 0, seconds);
        together(64, 16, 1, seconds);
    }
    tv_sched_destroy(sched);
    tv_main_engine_close(engine);
    return 0;
}
