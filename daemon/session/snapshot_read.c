/*
 * snapshot_read.c - what a snapshot says, once it is believed.
 *
 * Every number is judged before it is used: as a size against what is left, as a value against what
 * a session can be. Checksums come first, so damage is told from nonsense; but they are no
 * signature, and nothing here relies on them for safety.
 */
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "session/internal.h"
#include "session/snapshot_format.h"

static int sum_is(const void *data, size_t bytes, const uint8_t sum[32])
{
    struct tv_sha256 hash;
    uint8_t own[32];
    tv_sha256_init(&hash);
    tv_sha256_update(&hash, data, bytes);
    tv_sha256_finish(&hash, own);
    return memcmp(own, sum, sizeof own) == 0;
}

/* 0, or -EBADMSG: it is not all there. */
static int read_at(const struct tv_snapshot_source *source, uint64_t offset, void *to, size_t bytes)
{
    if (offset > source->size || bytes > source->size - offset) {
        return -EBADMSG;
    }
    return source->read(source->context, offset, to, bytes);
}

static int refuse(int rc, char *error, size_t error_bytes, const char *text)
{
    (void)snprintf(error, error_bytes, "%s", text);
    return rc;
}

static int number_is(uint32_t number, int32_t wanted, const char *name, char *error,
                     size_t error_bytes)
{
    if (number == (uint32_t)wanted) {
        return 1;
    }
    (void)snprintf(error, error_bytes, "its %s is %u, here it is %d", name, (unsigned)number,
                   wanted);
    return 0;
}

/* 0, -EBADMSG or -EXDEV. */
static int judge_header(const uint8_t *header, const struct tv_snapshot_layout *layout,
                        struct tv_snapshot_reader *reader, char *error, size_t error_bytes)
{
    const uint8_t *at = header + SNAPSHOT_MAGIC_BYTES;
    if (memcmp(header, SNAPSHOT_MAGIC, SNAPSHOT_MAGIC_BYTES) != 0) {
        return refuse(-EBADMSG, error, error_bytes, "it is no snapshot");
    }
    if (!number_is(tv_snapshot_get32(at), SNAPSHOT_VERSION, "format version", error, error_bytes)) {
        return -EXDEV;
    }
    if (!sum_is(header, TV_SNAPSHOT_HEADER_BYTES - 32, header + TV_SNAPSHOT_HEADER_BYTES - 32)) {
        return refuse(-EBADMSG, error, error_bytes, "its header is damaged");
    }
    if (memcmp(at + 24, layout->model_id, sizeof layout->model_id) != 0) {
        (void)snprintf(error, error_bytes, "it is of another model (model_id %02x%02x%02x%02x...)",
                       at[24], at[25], at[26], at[27]);
        return -EXDEV;
    }
    const struct {
        int32_t wanted;
        const char *name;
    } numbers[] = {{layout->layers, "number of layers"},
                   {layout->page_size, "page_size"},
                   {layout->row_dim, "row length"},
                   {layout->element, "kv_dtype (0: f32, 1: bf16)"},
                   {layout->vocab, "vocabulary"}};
    for (size_t i = 0; i < sizeof numbers / sizeof numbers[0]; i++) {
        if (!number_is(tv_snapshot_get32(at + 4 + 4 * i), numbers[i].wanted, numbers[i].name, error,
                       error_bytes)) {
            return -EXDEV;
        }
    }
    reader->same_maker = memcmp(at + 56, layout->maker, sizeof layout->maker) == 0;
    reader->saved_unix_ms = (int64_t)tv_snapshot_get64(at + 152);
    return 0;
}

static int pages_add(struct tv_snapshot_reader *reader, uint64_t *ret_capacity, uint64_t first_at,
                     uint32_t count)
{
    uint64_t needed = reader->page_count + count;
    if (needed > *ret_capacity) {
        uint64_t capacity = needed * 2;
        uint64_t *pages = NULL;
        if (capacity <= SIZE_MAX / sizeof *pages) {
            pages = realloc(reader->pages, (size_t)capacity * sizeof *pages);
        }
        if (pages == NULL) {
            return -ENOMEM;
        }
        reader->pages = pages;
        *ret_capacity = capacity;
    }
    for (uint32_t i = 0; i < count; i++) {
        reader->pages[reader->page_count++] = first_at + i * ((uint64_t)reader->page_bytes + 32);
    }
    return 0;
}

/* Where the head behind this one is. 0 or -EBADMSG: it is not in the file. */
static int head_next(const struct tv_snapshot_reader *reader, const uint8_t *head, uint64_t at,
                     uint64_t *ret_pages_at, uint64_t *ret_next)
{
    uint64_t body = tv_snapshot_get64(head + 8), left = reader->source.size - at;
    uint64_t page = (uint64_t)reader->page_bytes + 32, pages;
    left -= TV_SNAPSHOT_HEAD_BYTES; /* which has been read */
    if (body > left || body > TV_SNAPSHOT_BODY_BYTES_MAX || body < SNAPSHOT_BODY_FIXED_BYTES ||
        __builtin_mul_overflow(page, (uint64_t)tv_snapshot_get32(head + 4), &pages) ||
        pages > left - body) {
        return -EBADMSG;
    }
    *ret_pages_at = at + TV_SNAPSHOT_HEAD_BYTES + body;
    *ret_next = *ret_pages_at + pages;
    return 0;
}

/* From head to head, up to the end. */
static int walk(struct tv_snapshot_reader *reader, char *error, size_t error_bytes)
{
    uint64_t at = TV_SNAPSHOT_HEADER_BYTES, capacity = 0, pages_at = 0, next = 0;
    uint8_t head[TV_SNAPSHOT_HEAD_BYTES], sum[32];
    struct tv_sha256 heads;
    tv_sha256_init(&heads);
    for (;;) {
        int rc = read_at(&reader->source, at, head, sizeof head);
        if (rc != 0) {
            return refuse(rc, error, error_bytes,
                          rc == -EBADMSG ? "it ends before its end" : "it cannot be read");
        }
        if (!sum_is(head, 48, head + 48)) {
            return refuse(-EBADMSG, error, error_bytes, "a session's head is damaged");
        }
        if (tv_snapshot_get32(head) != SNAPSHOT_SESSION) {
            break;
        }
        if (head_next(reader, head, at, &pages_at, &next) != 0) {
            return refuse(-EBADMSG, error, error_bytes, "a session is longer than the file");
        }
        rc = pages_add(reader, &capacity, pages_at, tv_snapshot_get32(head + 4));
        if (rc != 0) {
            return refuse(rc, error, error_bytes, "no memory for the list of its pages");
        }
        tv_sha256_update(&heads, head, sizeof head);
        reader->session_count++;
        at = next;
    }
    tv_sha256_finish(&heads, sum);
    if (tv_snapshot_get32(head) != SNAPSHOT_END || memcmp(head + 16, sum, sizeof sum) != 0 ||
        tv_snapshot_get32(head + 4) != reader->session_count ||
        tv_snapshot_get64(head + 8) != reader->page_count ||
        at + TV_SNAPSHOT_HEAD_BYTES != reader->source.size) {
        return refuse(-EBADMSG, error, error_bytes, "its end does not fit what stands before");
    }
    reader->at = TV_SNAPSHOT_HEADER_BYTES;
    return 0;
}

int tv_snapshot_open(const struct tv_snapshot_source *source,
                     const struct tv_snapshot_layout *layout, struct tv_snapshot_reader *ret_reader,
                     char *error, size_t error_bytes)
{
    uint8_t header[TV_SNAPSHOT_HEADER_BYTES];
    memset(ret_reader, 0, sizeof *ret_reader);
    ret_reader->source = *source;
    ret_reader->page_bytes = tv_snapshot_page_bytes(layout);
    if (ret_reader->page_bytes == 0) {
        return refuse(-EXDEV, error, error_bytes, "there are no pages here");
    }
    int rc = read_at(source, 0, header, sizeof header);
    if (rc != 0) {
        return refuse(rc, error, error_bytes,
                      rc == -EBADMSG ? "it is shorter than a header" : "it cannot be read");
    }
    rc = judge_header(header, layout, ret_reader, error, error_bytes);
    return rc != 0 ? rc : walk(ret_reader, error, error_bytes);
}

void tv_snapshot_close(struct tv_snapshot_reader *reader)
{
    free(reader->pages);
    memset(reader, 0, sizeof *reader);
}

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
        facts->page_count != session->len / page + (session->len % page != 0)) {
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

/* NULL, or why there is none; *session is to be destroyed then. */
static const char *decode(struct cursor *cursor, uint64_t known, int32_t vocab,
                          struct tv_session *session, struct tv_snapshot_pages *pages)
{
    char principal[SNAPSHOT_PRINCIPAL_BYTES] = "";
    struct facts facts = {0};
    take_fixed(cursor, session, principal, pages, &facts);
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
    wrong = take_pages(cursor, facts.page_count, known, pages);
    wrong = wrong != NULL ? wrong : take_tokens(cursor, vocab, session);
    wrong = wrong != NULL ? wrong : take_kept(cursor, session, facts.kept_count);
    if (wrong == NULL && (cursor->is_short || cursor->left > 0)) {
        wrong = "its bytes are too many or too few";
    }
    int32_t limit = session->table->params.model_max_len;
    session->max_len = session->max_len < limit ? session->max_len : limit;
    if (session->finish == TV_FINISH_NONE && session->len + 1 >= session->max_len) {
        session->finish = TV_FINISH_LENGTH; /* of a limit that is lower now */
    }
    return wrong;
}

int tv_snapshot_next(struct tv_snapshot_reader *reader, const struct tv_sessions *table,
                     int32_t vocab, struct tv_session **ret_session,
                     struct tv_snapshot_pages *ret_pages, char ret_id[32], char *error,
                     size_t error_bytes)
{
    uint8_t head[TV_SNAPSHOT_HEAD_BYTES];
    uint64_t pages_at = 0, next = 0;
    struct tv_session *session = NULL;
    ret_id[0] = '\0';
    memset(ret_pages, 0, sizeof *ret_pages);
    int rc = read_at(&reader->source, reader->at, head, sizeof head);
    if (rc != 0 || tv_snapshot_get32(head) != SNAPSHOT_SESSION || !sum_is(head, 48, head + 48) ||
        head_next(reader, head, reader->at, &pages_at, &next) != 0) {
        return 0; /* the end; or somebody writes into the file, whose rest is lost */
    }
    size_t bytes = (size_t)tv_snapshot_get64(head + 8);
    uint8_t *body = malloc(bytes);
    rc = tv_session_blank(table, &session);
    if (body == NULL || rc != 0) {
        rc = refuse(-ENOMEM, error, error_bytes, "no memory for it");
    } else if (read_at(&reader->source, reader->at + sizeof head, body, bytes) != 0 ||
               !sum_is(body, bytes, head + 16)) {
        rc = refuse(-EBADMSG, error, error_bytes, "what is said of it is damaged");
    } else {
        struct cursor cursor = {.at = body, .left = bytes};
        uint64_t known = reader->passed + tv_snapshot_get32(head + 4);
        known = known < reader->page_count ? known : reader->page_count;
        const char *wrong = decode(&cursor, known, vocab, session, ret_pages);
        if (is_id(session->id)) {
            memcpy(ret_id, session->id, sizeof session->id);
        }
        rc = wrong != NULL ? refuse(-EBADMSG, error, error_bytes, wrong) : 1;
    }
    reader->passed += tv_snapshot_get32(head + 4);
    reader->at = next;
    free(body);
    if (rc != 1) {
        tv_snapshot_pages_finish(ret_pages);
        tv_session_destroy(session);
        return rc;
    }
    *ret_session = session;
    return 1;
}

int tv_snapshot_page(const struct tv_snapshot_reader *reader, uint32_t number, void *to)
{
    uint8_t sum[32], own[32];
    if (number >= reader->page_count) {
        return -EBADMSG;
    }
    int rc = read_at(&reader->source, reader->pages[number], to, reader->page_bytes);
    if (rc == 0) {
        rc = read_at(&reader->source, reader->pages[number] + reader->page_bytes, sum, sizeof sum);
    }
    if (rc != 0) {
        return rc;
    }
    tv_snapshot_page_sum(to, reader->page_bytes, number, own);
    return memcmp(own, sum, sizeof own) == 0 ? 0 : -EBADMSG;
}
