/*
 * snapshot_body.c - what a snapshot says of one session, once it is believed.
 *
 * Refuses every value that no session can have, whatever the checksums say: as a size against what
 * is left, as a number against the others and this server's limits.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "session/internal.h"
#include "session/snapshot_format.h"

/* Bytes not yet taken; short: more were asked for. */
struct cursor {
    const uint8_t *at;
    size_t left;
    int is_short;
};

/* `bytes` of them, or NULL. */
static const uint8_t *take(struct cursor *cursor, uint64_t bytes)
{
    const uint8_t *at = cursor->at;
    if (cursor->is_short || bytes > cursor->left) {
        cursor->is_short = 1;
        return NULL;
    }
    cursor->at += bytes;
    cursor->left -= (size_t)bytes;
    return at;
}

static int32_t take32(struct cursor *cursor)
{
    const uint8_t *at = take(cursor, 4);
    return at != NULL ? (int32_t)tv_snapshot_get32(at) : 0;
}

static int64_t take64(struct cursor *cursor)
{
    const uint8_t *at = take(cursor, 8);
    return at != NULL ? (int64_t)tv_snapshot_get64(at) : 0;
}

static double take_double(struct cursor *cursor)
{
    int64_t bits = take64(cursor);
    double number;
    memcpy(&number, &bits, sizeof number);
    return number;
}

static void take_bytes(struct cursor *cursor, void *to, size_t bytes)
{
    const uint8_t *at = take(cursor, bytes);
    if (at != NULL) {
        memcpy(to, at, bytes);
    }
}

static void take_all32(struct cursor *cursor, int32_t *ret_numbers, int32_t count)
{
    for (int32_t i = 0; i < count; i++) {
        ret_numbers[i] = take32(cursor);
    }
}

/* What of a body is not in the session itself. */
struct facts {
    int32_t page_count, kept_count;
};

static int is_nul(const char *text, size_t from, size_t to)
{
    while (from < to && text[from] == '\0') {
        from++;
    }
    return from == to;
}

/* 1: an id of ours, with NUL behind it. */
static int is_id(const char id[32])
{
    static const char letters[] =
        "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";
    size_t length = strnlen(id, 32);
    return length == 24 && id[0] == 's' && id[1] == '_' && strspn(id + 2, letters) == 22 &&
           is_nul(id, length, 32);
}

static int is_principal(const char principal[SNAPSHOT_PRINCIPAL_BYTES])
{
    size_t length = strnlen(principal, SNAPSHOT_PRINCIPAL_BYTES);
    for (size_t i = 0; i < length; i++) {
        if (principal[i] <= ' ' || principal[i] > '~') {
            return 0;
        }
    }
    return length <= 32 && is_nul(principal, length, SNAPSHOT_PRINCIPAL_BYTES);
}

static int within(double number, double low, double high)
{
    return isfinite(number) && number >= low && number <= high;
}

static void take_fixed(struct cursor *cursor, struct tv_session *session,
                       char principal[SNAPSHOT_PRINCIPAL_BYTES], struct tv_snapshot_pages *pages,
                       struct facts *facts)
{
    struct tv_sampling_state *sampling = &session->sampling;
    take_bytes(cursor, session->id, sizeof session->id);
    take_bytes(cursor, principal, SNAPSHOT_PRINCIPAL_BYTES);
    take_bytes(cursor, session->root.bytes, sizeof session->root.bytes);
    take_bytes(cursor, session->digest.bytes, sizeof session->digest.bytes);
    session->len = take32(cursor);
    session->pending = take32(cursor);
    session->next_seq = take32(cursor);
    session->finish = (enum tv_finish)take32(cursor);
    session->max_len = take32(cursor);
    session->lease_s = take32(cursor);
    pages->exact = take32(cursor);
    sampling->rule = (enum tv_rule)take32(cursor);
    sampling->top_k = take32(cursor);
    sampling->has_typical = take32(cursor);
    session->stop_count = take32(cursor);
    facts->page_count = take32(cursor);
    facts->kept_count = take32(cursor);
    sampling->temperature = take_double(cursor);
    sampling->top_p = take_double(cursor);
    sampling->min_p = take_double(cursor);
    sampling->typical_epsilon = take_double(cursor);
    sampling->typical_delta = take_double(cursor);
    sampling->seed = (uint64_t)take64(cursor);
    session->lease_expires_unix_ms = take64(cursor);
    session->verify_rounds = take64(cursor);
    session->verify_tokens = take64(cursor);
    session->drafts.nodes = take64(cursor);
    session->drafts.levels = take64(cursor);
    take_all32(cursor, session->drafts.tried, TV_SESSION_DEPTHS_MAX);
    take_all32(cursor, session->drafts.taken, TV_SESSION_DEPTHS_MAX);
    take_all32(cursor, session->stop_ids, TV_STOP_IDS_MAX);
}

/* Counts that later sums start from. */
#define COUNT_MAX (INT64_C(1) << 48)

static int counts_fit(const struct tv_session *session)
{
    const struct tv_session_drafts *drafts = &session->drafts;
    int fit = session->verify_rounds >= 0 && session->verify_rounds <= COUNT_MAX &&
              session->verify_tokens >= 0 && session->verify_tokens <= COUNT_MAX &&
              drafts->nodes >= 0 && drafts->nodes <= COUNT_MAX && drafts->levels >= 0 &&
              drafts->levels <= drafts->nodes;
    for (int i = 0; i < TV_SESSION_DEPTHS_MAX; i++) {
        fit = fit && drafts->tried[i] >= 0 && drafts->taken[i] >= 0 &&
              drafts->taken[i] <= drafts->tried[i];
    }
    return fit;
}

static int32_t pages_for(int32_t rows, int32_t page)
{
    return rows / page + (rows % page != 0);
}

/* What is wrong with the values that stand alone; NULL: nothing. */
static const char *fixed_wrong(const struct tv_session *session, const char *principal,
                               const struct tv_snapshot_pages *pages, const struct facts *facts,
                               int32_t vocab)
{
    const struct tv_sampling_state *sampling = &session->sampling;
    int32_t page = session->table->params.page_size, limit = session->table->params.model_max_len;
    if (!is_id(session->id) || !is_principal(principal)) {
        return "its id or its owner is none";
    }
    if (session->len < 1 || session->max_len < 2 || session->len >= session->max_len) {
        return "its length is none";
    }
    if (session->len >= limit) {
        return "it is longer than max_len is now";
    }
    if (session->pending < 0 || session->pending >= vocab || session->next_seq < 1 ||
        session->next_seq == INT32_MAX || (int32_t)session->finish < TV_FINISH_NONE ||
        (int32_t)session->finish > TV_FINISH_LENGTH || session->lease_s < 1 ||
        session->lease_s > TV_LEASE_S_MAX || session->lease_expires_unix_ms < 0 ||
        pages->exact < 0 || pages->exact > session->len || !counts_fit(session)) {
        return "it says what no session can";
    }
    if ((int32_t)sampling->rule < 0 || (int32_t)sampling->rule >= TV_RULE_COUNT ||
        sampling->top_k < 0 || sampling->top_k > vocab || sampling->has_typical < 0 ||
        sampling->has_typical > 1 || !within(sampling->temperature, 0, 100) ||
        !within(sampling->top_p, 0, 1) || sampling->top_p <= 0 || !within(sampling->min_p, 0, 1) ||
        !within(sampling->typical_epsilon, 0, 1) || !within(sampling->typical_delta, 0, 1)) {
        return "its sampling is none";
    }
    if (session->stop_count < 0 || session->stop_count > TV_STOP_IDS_MAX || facts->kept_count < 0 ||
        facts->kept_count > TV_REPLAY_ROUNDS_MAX ||
        facts->page_count < pages_for(session->len, page) ||
        facts->page_count > pages_for(session->len, page) + TV_ENGINE_NODES_MAX) {
        return "its counts do not fit";
    }
    return NULL;
}

static const char *take_pages(struct cursor *cursor, int32_t count, uint64_t known,
                              struct tv_snapshot_pages *pages)
{
    if ((uint64_t)count * 4 > cursor->left) {
        return "it is cut short";
    }
    pages->numbers = calloc((size_t)count, sizeof *pages->numbers);
    if (pages->numbers == NULL) {
        return "no memory for its pages";
    }
    pages->count = count;
    for (int32_t i = 0; i < count; i++) {
        pages->numbers[i] = (uint32_t)take32(cursor);
        if (pages->numbers[i] >= known) {
            return "it names a page that is not there";
        }
    }
    return NULL;
}

/* The tokens, and the digests that follow from them. */
static const char *take_tokens(struct cursor *cursor, int32_t vocab, struct tv_session *session)
{
    int32_t page = session->table->params.page_size, len = session->len;
    struct tv_digest digest = session->root;
    if ((uint64_t)len * 4 > cursor->left) {
        return "it is cut short";
    }
    session->len = 0; /* room is made from there on */
    if (tv_session_reserve(session, len) != 0) {
        return "no memory for its tokens";
    }
    session->len = len;
    for (int32_t i = 0; i < len; i++) {
        session->tokens[i] = take32(cursor);
        if (session->tokens[i] < 0 || session->tokens[i] >= vocab) {
            return "a token is outside the vocabulary";
        }
        tv_digest_push(&digest, session->tokens[i]);
        if ((i + 1) % page == 0) {
            session->borders[i / page] = digest;
        }
    }
    return memcmp(&digest, &session->digest, sizeof digest) == 0 ? NULL
                                                                 : "its tokens have another digest";
}

static const char *take_kept(struct cursor *cursor, struct tv_session *session, int32_t count)
{
    for (int32_t i = 0; i < count; i++) {
        struct tv_session_kept kept = {.seq = take32(cursor), .leaf = take32(cursor)};
        uint64_t bytes = (uint64_t)take64(cursor), at = (uint64_t)take64(cursor);
        uint64_t outcome = (uint64_t)take64(cursor);
        take_bytes(cursor, kept.body_hash, sizeof kept.body_hash);
        const uint8_t *body = take(cursor, bytes);
        int32_t before = i > 0 ? session->kept[i - 1].seq : 0;
        if (body == NULL || bytes == 0 || bytes > TV_SNAPSHOT_ANSWER_BYTES_MAX ||
            kept.seq <= before || kept.seq >= session->next_seq || kept.leaf < -1 ||
            kept.leaf >= TV_ENGINE_NODES_MAX || outcome > bytes || at > bytes - outcome) {
            return "an answer that it keeps is none";
        }
        kept.body = malloc((size_t)bytes);
        if (kept.body == NULL) {
            return "no memory for its answers";
        }
        memcpy(kept.body, body, (size_t)bytes);
        kept.body_bytes = (size_t)bytes;
        kept.outcome_at = (size_t)at;
        kept.outcome_bytes = (size_t)outcome;
        session->kept[session->kept_count++] = kept;
        session->kept_bytes += kept.body_bytes;
    }
    return NULL;
}

/* Is the held round one that this session could have? */
static int held_fits(const struct tv_session *session, int32_t vocab)
{
    const struct tv_session_held *held = &session->held;
    for (int32_t i = 0; i < held->count; i++) {
        int32_t parent = held->parents[i];
        if (held->tokens[i] < 0 || held->tokens[i] >= vocab || parent >= i ||
            parent < (i == 0 ? -1 : 0)) {
            return 0;
        }
    }
    for (int32_t i = 0; i < held->proposed_count; i++) {
        int32_t node = held->proposed[i];
        if (node < 0 || node >= held->count || (i == 0 && node != 0) ||
            (i > 0 && held->parents[node] != held->proposed[i - 1])) {
            return 0;
        }
    }
    if (held->settled) { /* its path is the session's newest tokens */
        return held->len_before >= 1 && held->len_before <= session->len &&
               session->len - held->len_before <= held->count;
    }
    return held->len_before == 0 && session->finish == TV_FINISH_NONE &&
           held->tokens[0] == session->pending;
}

static const char *take_held(struct cursor *cursor, int32_t vocab, struct tv_session *session)
{
    static const char none[] = "the round that it holds is none";
    struct tv_session_held held = {.seq = take32(cursor)};
    if (held.seq == 0) {
        return NULL;
    }
    held.rule = (enum tv_rule)take32(cursor);
    held.count = take32(cursor);
    held.proposed_count = take32(cursor);
    held.pending = take32(cursor);
    held.settled = take32(cursor);
    held.len_before = take32(cursor);
    if (held.seq != session->next_seq - 1 || (int32_t)held.rule < 0 ||
        (int32_t)held.rule >= TV_RULE_COUNT || held.count < 1 || held.count > TV_ENGINE_NODES_MAX ||
        held.proposed_count < 0 || held.proposed_count > held.count || held.pending < -1 ||
        held.pending >= vocab || held.settled < 0 || held.settled > 1) {
        return none;
    }
    int32_t cells = 2 * held.count + held.proposed_count;
    held.tokens = malloc((size_t)cells * sizeof *held.tokens);
    if (held.tokens == NULL) {
        return "no memory for the round that it holds";
    }
    held.parents = held.tokens + held.count;
    held.proposed = held.parents + held.count;
    take_all32(cursor, held.tokens, cells);
    session->held = held; /* which owns the arrays */
    return held_fits(session, vocab) ? NULL : none;
}

/* The answer of the call that made the session is this server's from now on: its epoch too. */
static int epoch_put(struct tv_session_key *key, uint64_t at, const char *epoch)
{
    static const char name[] = "\"epoch\":\"";
    const size_t name_bytes = sizeof name - 1, digits = 16;
    if (at < name_bytes || at > key->body_bytes || key->body_bytes - at <= digits) {
        return -1;
    }
    char *text = key->body + at;
    for (size_t i = 0; i < digits; i++) {
        if ((text[i] < '0' || text[i] > '9') && (text[i] < 'a' || text[i] > 'f')) {
            return -1;
        }
    }
    if (memcmp(text - name_bytes, name, name_bytes) != 0 || text[digits] != '"') {
        return -1;
    }
    memcpy(text, epoch, digits);
    return 0;
}

static const char *take_key(struct cursor *cursor, const struct tv_session *session,
                            struct tv_session_key *key)
{
    static const char none[] = "the call that made it is none";
    int32_t key_bytes = take32(cursor);
    if (key_bytes == 0) {
        return NULL;
    }
    if (key_bytes < 1 || key_bytes > TV_KEY_BYTES_MAX) {
        return none;
    }
    take_bytes(cursor, key->key, (size_t)key_bytes);
    for (int32_t i = 0; i < key_bytes; i++) {
        if (key->key[i] <= ' ' || key->key[i] > '~') {
            return none;
        }
    }
    take_bytes(cursor, key->session, sizeof key->session);
    take_bytes(cursor, key->body_hash, sizeof key->body_hash);
    key->serial = (uint64_t)take64(cursor);
    uint64_t epoch_at = (uint64_t)take64(cursor), bytes = (uint64_t)take64(cursor);
    const uint8_t *body = take(cursor, bytes);
    if (body == NULL || bytes == 0 || bytes > TV_SESSION_KEY_BYTES_MAX || key->serial > COUNT_MAX ||
        (!is_id(key->session) && !is_nul(key->session, 0, sizeof key->session))) {
        return none;
    }
    key->body = malloc((size_t)bytes);
    if (key->body == NULL) {
        return "no memory for the answer of the call that made it";
    }
    memcpy(key->body, body, (size_t)bytes);
    key->body_bytes = (size_t)bytes;
    return epoch_put(key, epoch_at, session->table->epoch) == 0 ? NULL : none;
}

/* What stands behind the answers since version 2. */
static const char *take_calls(struct cursor *cursor, int32_t vocab, struct tv_snapshot_item *item)
{
    const char *wrong = take_held(cursor, vocab, item->session);
    return wrong != NULL ? wrong : take_key(cursor, item->session, &item->key);
}

const char *tv_snapshot_body_decode(const uint8_t *body, size_t bytes, uint32_t version,
                                    uint64_t known, int32_t vocab, struct tv_snapshot_item *item)
{
    struct cursor cursor = {.at = body, .left = bytes};
    struct tv_session *session = item->session;
    struct tv_snapshot_pages *pages = &item->pages;
    char principal[SNAPSHOT_PRINCIPAL_BYTES] = "";
    struct facts facts = {0};
    take_fixed(&cursor, session, principal, pages, &facts);
    if (is_id(session->id)) {
        memcpy(item->id, session->id, sizeof item->id);
    }
    const char *wrong = fixed_wrong(session, principal, pages, &facts, vocab);
    if (wrong != NULL) {
        session->len = 0;
        return wrong;
    }
    memcpy(session->principal, principal, sizeof session->principal);
    for (int32_t i = 0; i < session->stop_count; i++) {
        if (session->stop_ids[i] < 0 || session->stop_ids[i] >= vocab) {
            return "a stop token is outside the vocabulary";
        }
    }
    wrong = take_pages(&cursor, facts.page_count, known, pages);
    wrong = wrong != NULL ? wrong : take_tokens(&cursor, vocab, session);
    wrong = wrong != NULL ? wrong : take_kept(&cursor, session, facts.kept_count);
    if (wrong == NULL && version > 1) {
        wrong = take_calls(&cursor, vocab, item);
    }
    if (wrong == NULL && (cursor.is_short || cursor.left > 0)) {
        wrong = "its bytes are too many or too few";
    }
    if (wrong == NULL &&
        pages->count != pages_for(tv_session_rows(session), session->table->params.page_size)) {
        wrong = "its counts do not fit";
    }
    int32_t limit = session->table->params.model_max_len;
    session->max_len = session->max_len < limit ? session->max_len : limit;
    if (session->finish == TV_FINISH_NONE && session->len + 1 >= session->max_len) {
        session->finish = TV_FINISH_LENGTH; /* of a limit that is lower now */
    }
    return wrong;
}
