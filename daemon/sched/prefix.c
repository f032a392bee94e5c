/*
 * prefix.c - prompts that are a session's tokens, prompts whose whole pages are known already:
 * which they are, how a call takes them over, and what a finished call leaves for others.
 *
 * A page is found by the digest of all tokens up to its end (model and salt are in it) by calls of
 * the same key name alone. Refuses to let anybody find rows of a call that did not succeed.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "sched/job.h"

static enum tv_cache_prefix kept(const struct tv_sched *sched)
{
    struct tv_engine_facts facts;
    tv_engine_facts(sched->engine, &facts);
    return facts.prefix;
}

int tv_sched_prefix_source(struct tv_sched *sched, struct tv_request *request,
                           const char *principal, struct tv_problem *problem)
{
    struct tv_session *session = NULL;
    enum tv_code code = tv_sessions_find(&sched->table, request->prefix_session, principal,
                                         tv_clock_us(), &session);
    if (code != TV_OK) {
        tv_problem_set(problem, code, "/prefix/session", "%s",
                       code == TV_SESSION_EXPIRED ? "the session's lease is over"
                                                  : "no such session");
        return -EINVAL;
    }
    if (request->prefix_len > session->len) {
        tv_problem_set(problem, TV_WRONG_VALUE, "/prefix/len",
                       "/prefix/len: %d tokens, but %d are committed", request->prefix_len,
                       session->len);
        return -EINVAL;
    }
    size_t bytes = (size_t)request->prefix_len * sizeof *request->tokens;
    request->tokens = malloc(bytes);
    if (request->tokens == NULL) {
        tv_problem_set(problem, TV_INTERNAL, NULL, "no memory for the prompt");
        return -EINVAL;
    }
    memcpy(request->tokens, session->tokens, bytes);
    request->token_count = request->prefix_len;
    return 0;
}

int tv_sched_prefix_hash(const struct tv_sched *sched, struct job *job)
{
    const struct tv_request *request = &job->call->request;
    int32_t page = sched->table.params.page_size;
    int32_t count = kept(sched) != TV_CACHE_PREFIX_OFF ? request->token_count / page : 0;
    if (count == 0 && !request->has_expected_digest) {
        return 0; /* nobody asks for it */
    }
    if (count > 0) {
        job->borders = malloc((size_t)count * sizeof *job->borders);
        if (job->borders == NULL) {
            return -ENOMEM;
        }
    }
    job->border_count = count;
    tv_digest_start(&job->digest, sched->table.params.model_id, request->cache_salt,
                    (size_t)request->cache_salt_bytes);
    for (int32_t i = 0; i < request->token_count; i++) {
        tv_digest_push(&job->digest, request->tokens[i]);
        if ((i + 1) % page == 0 && i / page < count) {
            job->borders[i / page] = job->digest;
        }
    }
    return 0;
}

/* Keys of `count` borders for calls of this principal; NULL: no memory. */
static struct tv_cache_key *keys_make(const char *principal, const struct tv_digest *borders,
                                      int32_t count)
{
    static const char domain[] = "treeverify-key-name";
    struct tv_cache_key *keys = malloc((size_t)count * sizeof *keys);
    struct tv_sha256 hash;
    uint8_t sum[32];
    if (keys == NULL) {
        return NULL;
    }
    tv_sha256_init(&hash);
    tv_sha256_update(&hash, domain, sizeof domain);
    tv_sha256_update(&hash, principal, strlen(principal));
    tv_sha256_finish(&hash, sum);
    for (int32_t i = 0; i < count; i++) {
        _Static_assert(sizeof keys->digest == sizeof borders->bytes, "a key holds a digest");
        memcpy(keys[i].digest, borders[i].bytes, sizeof keys[i].digest);
        memcpy(keys[i].owner, sum, sizeof keys[i].owner);
    }
    return keys;
}

int tv_sched_prefix_adopt(struct tv_sched *sched, struct job *job)
{
    const struct tv_engine_ops *ops = sched->engine->ops;
    int32_t page = sched->table.params.page_size;
    /* A create draws from the last position of its prompt, which is computed therefore. */
    int32_t rows = job->token_count - (job->round.kind == TV_CALL_CREATE);
    int32_t hidden_first = tv_sched_hidden_first(job); /* known pages have no hidden rows */
    rows = rows < hidden_first ? rows : hidden_first;
    int32_t count = rows / page < job->border_count ? rows / page : job->border_count;
    if (count <= 0) {
        return 0;
    }
    struct tv_cache_key *keys = keys_make(job->call->principal, job->borders, count);
    if (keys == NULL) {
        return -ENOMEM;
    }
    int rc = ops->adopt(sched->engine, job->context, keys, count);
    free(keys);
    if (rc != 0) {
        return rc;
    }
    int32_t cached = ops->context_len(job->context);
    if (cached == 0) {
        return 0;
    }
    if (job->session != NULL) {
        tv_session_stage_known(job->session, job->tokens, cached, job->borders);
        job->staged = cached;
    }
    job->digest = job->borders[cached / page - 1];
    job->token_done = cached;
    job->round.cached_len = cached;
    return 0;
}

void tv_sched_prefix_publish(struct tv_sched *sched, struct job *job)
{
    enum tv_cache_prefix prefix = kept(sched);
    int is_round = job->round.kind == TV_CALL_VERIFY || job->round.kind == TV_CALL_DECODE ||
                   job->round.kind == TV_CALL_COMMIT;
    if (prefix == TV_CACHE_PREFIX_OFF || job->context == NULL ||
        (is_round && prefix != TV_CACHE_PREFIX_ROUNDS)) {
        return;
    }
    const struct tv_session *session = job->session;
    int32_t page = sched->table.params.page_size;
    int32_t first = job->round.cached_len / page; /* those that were found are known */
    int32_t end = sched->engine->ops->context_len(job->context) / page;
    const struct tv_digest *borders = job->borders;
    if (session != NULL) {
        int32_t staged_end = (session->len + job->staged) / page;
        first = session->len / page > first ? session->len / page : first;
        end = end < staged_end ? end : staged_end;
        borders = session->borders;
    } else {
        end = end < job->border_count ? end : job->border_count;
    }
    if (end <= first) {
        return;
    }
    struct tv_cache_key *keys = keys_make(job->call->principal, borders + first, end - first);
    if (keys != NULL) { /* without memory nobody finds them, which costs time alone */
        sched->engine->ops->publish(sched->engine, job->context, first, keys, end - first);
        free(keys);
    }
}

void tv_sched_prefix_offer(struct tv_sched *sched, struct tv_session *session)
{
    int32_t count = session->len / sched->table.params.page_size;
    if (kept(sched) == TV_CACHE_PREFIX_OFF || count == 0) {
        return;
    }
    struct tv_cache_key *keys = keys_make(session->principal, session->borders, count);
    if (keys != NULL) { /* as above */
        sched->engine->ops->publish(sched->engine, session->context, 0, keys, count);
        free(keys);
    }
}
