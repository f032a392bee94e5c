/*
 * path.c - the path oracle's forward pass: sequences from a tree, attention, layers, head.
 *
 * Owns its activations for the time of one call. Refuses pages, tree masks and absorbed products
 * (but for queries that the contract rounds in that form); a row sees the prefix and the rows of
 * its own path up to itself, as plain text would.
 */
#include "shadow/path.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

struct pass {
    const struct tv_path_source *source;
    const struct tv_path_rows *rows;
    float softmax_scale;
    float *rope;   /* cosines and sines */
    float *x;      /* [rows, hidden] residual stream */
    float *h;      /* [rows, hidden] normed */
    float *q;      /* [rows, heads, nope + rope] */
    float *low;    /* [rows, q_lora] */
    float *ckv;    /* [rows, kv_lora + rope] */
    float *latent; /* [rows, kv_lora], normed */
    float *k;      /* [rows, heads, nope] */
    float *v;      /* [rows, heads, v] */
    float *mixed;  /* [rows, heads, v] */
    float *kv;     /* [rows, kv_lora + rope]: what a cache would hold */
    double *p;     /* [rows]: scores of one row */
    float *query;  /* [heads, kv_lora + rope]: of one row, as the contract rounds it */
    const struct tv_path_watch *watch;
};

static int leaf_is(const struct tv_tree *tree, int32_t node)
{
    for (int32_t i = node + 1; i < tree->count; i++) {
        if (tree->parents[i] == node) {
            return 0;
        }
    }
    return 1;
}

static int64_t rows_count(const struct tv_tree *tree)
{
    int64_t count = 0;
    for (int32_t i = 0; i < tree->count; i++) {
        count += leaf_is(tree, i) ? tree->depths[i] + 1 : 0;
    }
    return count;
}

/* The nodes of the path that ends at `leaf`, root first, at rows from `start`. */
static void path_fill(struct tv_path_rows *rows, const struct tv_tree *tree, int32_t leaf,
                      int32_t start)
{
    int32_t row = start + tree->depths[leaf];
    for (int32_t node = leaf; node >= 0; node = tree->parents[node], row--) {
        rows->tokens[row] = tree->tokens[node];
        rows->positions[row] = rows->prefix_len + tree->depths[node];
        rows->starts[row] = start;
        rows->slots[row] = rows->prefix_len + node;
        rows->row_of[node] = rows->row_of[node] < 0 ? row : rows->row_of[node];
    }
}

int tv_path_rows_init(struct tv_path_rows *rows, const int32_t *prefix, int32_t prefix_len,
                      const struct tv_tree *tree, int twins)
{
    int64_t count = (int64_t)prefix_len * (twins ? 2 : 1) + rows_count(tree);
    memset(rows, 0, sizeof *rows);
    if (count > INT32_MAX) {
        return -ENOMEM;
    }
    rows->count = (int32_t)count;
    rows->prefix_len = prefix_len;
    rows->twins = twins;
    rows->tokens = malloc((size_t)count * sizeof *rows->tokens);
    rows->positions = malloc((size_t)count * sizeof *rows->positions);
    rows->starts = malloc((size_t)count * sizeof *rows->starts);
    rows->slots = malloc((size_t)count * sizeof *rows->slots);
    rows->margins = malloc((size_t)count * sizeof *rows->margins);
    rows->ties = malloc((size_t)count * sizeof *rows->ties);
    rows->moved = calloc((size_t)prefix_len + 1, sizeof *rows->moved);
    rows->row_of = malloc((size_t)tree->count * sizeof *rows->row_of);
    if (rows->tokens == NULL || rows->positions == NULL || rows->starts == NULL ||
        rows->slots == NULL || rows->row_of == NULL || rows->margins == NULL ||
        rows->ties == NULL || rows->moved == NULL) {
        tv_path_rows_finish(rows);
        return -ENOMEM;
    }
    for (int32_t i = 0; i < tree->count; i++) {
        rows->row_of[i] = -1;
    }
    int32_t start = twins ? 2 * prefix_len : prefix_len;
    for (int32_t i = 0; i < start; i++) {
        rows->slots[i] = i % prefix_len;
        rows->tokens[i] = prefix[rows->slots[i]];
        rows->positions[i] = rows->slots[i];
        rows->starts[i] = 0;
    }
    for (int32_t i = 0; i < tree->count; i++) {
        if (leaf_is(tree, i)) {
            path_fill(rows, tree, i, start);
            start += tree->depths[i] + 1;
        }
    }
    return 0;
}

void tv_path_rows_finish(struct tv_path_rows *rows)
{
    free(rows->tokens);
    free(rows->positions);
    free(rows->starts);
    free(rows->slots);
    free(rows->row_of);
    free(rows->margins);
    free(rows->ties);
    free(rows->moved);
    memset(rows, 0, sizeof *rows);
}

static float *floats(int64_t count, int32_t width)
{
    return malloc((size_t)count * (size_t)(width > 0 ? width : 1) * sizeof(float));
}

static int pass_take(struct pass *pass)
{
    const struct tv_model_config *config = pass->source->config;
    int64_t rows = pass->rows->count;
    int32_t positions = 0;
    for (int32_t r = 0; r < pass->rows->count; r++) {
        int32_t position = pass->rows->positions[r];
        positions = position >= positions ? position + 1 : positions;
    }
    pass->x = floats(rows, config->hidden);
    pass->h = floats(rows, config->hidden);
    pass->q = floats(rows, config->heads * (config->nope_dim + config->rope_dim));
    pass->low = floats(rows, config->q_lora);
    pass->ckv = floats(rows, config->kv_lora + config->rope_dim);
    pass->latent = floats(rows, config->kv_lora);
    pass->k = floats(rows, config->heads * config->nope_dim);
    pass->v = floats(rows, config->heads * config->v_dim);
    pass->mixed = floats(rows, config->heads * config->v_dim);
    pass->kv = floats(rows, config->kv_lora + config->rope_dim);
    pass->p = malloc((size_t)rows * sizeof *pass->p);
    pass->query = floats(config->heads, config->kv_lora + config->rope_dim);
    if (pass->x == NULL || pass->h == NULL || pass->q == NULL || pass->low == NULL ||
        pass->ckv == NULL || pass->latent == NULL || pass->k == NULL || pass->v == NULL ||
        pass->mixed == NULL || pass->kv == NULL || pass->p == NULL || pass->query == NULL) {
        return -ENOMEM;
    }
    return tv_path_rope_table(config, positions, &pass->rope);
}

static void pass_finish(struct pass *pass)
{
    free(pass->rope);
    free(pass->x);
    free(pass->h);
    free(pass->q);
    free(pass->low);
    free(pass->ckv);
    free(pass->latent);
    free(pass->k);
    free(pass->v);
    free(pass->mixed);
    free(pass->kv);
    free(pass->p);
    free(pass->query);
}

static int norm(const struct pass *pass, const struct tv_model_tensor *weight, double eps,
                const float *x, int64_t x_stride, int32_t dim, float *y, int64_t y_stride)
{
    float *values = NULL;
    int rc = tv_path_tensor(pass->source, weight, &values);
    if (rc == 0) {
        tv_path_rmsnorm(x, x_stride, pass->rows->count, dim, values, eps, y, y_stride);
        free(values);
    }
    return rc;
}

static int embed(struct pass *pass)
{
    const struct tv_path_source *source = pass->source;
    size_t hidden = (size_t)source->config->hidden;
    float *values = NULL;
    for (int32_t r = 0; r < pass->rows->count; r++) {
        struct tv_model_tensor row = source->weights->embed;
        size_t start = (size_t)pass->rows->tokens[r] * hidden;
        row.data = (const char *)row.data + start * tv_dtype_size(row.dtype);
        row.rows = 1;
        int rc = tv_path_tensor(source, &row, &values);
        if (rc != 0) {
            return rc;
        }
        memcpy(pass->x + (size_t)r * hidden, values, hidden * sizeof *values);
        free(values);
    }
    return 0;
}

/* Queries of every row, rope part rotated. */
static int queries(struct pass *pass, const struct tv_model_layer_weights *layer)
{
    const struct tv_model_config *config = pass->source->config;
    int32_t rows = pass->rows->count;
    int32_t width = config->nope_dim + config->rope_dim;
    int rc;
    if (layer->q.data != NULL) {
        rc = tv_path_linear(pass->source, &layer->q, pass->h, rows, 0, pass->q);
    } else {
        rc = tv_path_linear(pass->source, &layer->q_a, pass->h, rows, 0, pass->low);
        if (rc == 0) {
            rc = norm(pass, &layer->q_a_norm, config->lora_rms_eps, pass->low, config->q_lora,
                      config->q_lora, pass->low, config->q_lora);
        }
        if (rc == 0) {
            rc = tv_path_linear(pass->source, &layer->q_b, pass->low, rows, 0, pass->q);
        }
    }
    for (int32_t r = 0; rc == 0 && r < rows; r++) {
        for (int32_t h = 0; h < config->heads; h++) {
            float *q = pass->q + ((size_t)r * (size_t)config->heads + (size_t)h) * (size_t)width;
            tv_path_rotate(q + config->nope_dim, config->rope_dim, pass->rope,
                           pass->rows->positions[r]);
        }
    }
    return rc;
}

/* The rows a cache would hold: normed latent and rotated key. */
static int kv_rows(struct pass *pass, const struct tv_model_layer_weights *layer)
{
    const struct tv_model_config *config = pass->source->config;
    int32_t rows = pass->rows->count;
    int32_t width = config->kv_lora + config->rope_dim;
    int32_t half = config->rope_dim / 2;
    int rc = tv_path_linear(pass->source, &layer->kv_a, pass->h, rows, 0, pass->ckv);
    if (rc == 0) {
        rc = norm(pass, &layer->kv_a_norm, config->lora_rms_eps, pass->ckv, width, config->kv_lora,
                  pass->kv, width);
    }
    for (int32_t r = 0; rc == 0 && r < rows; r++) {
        float *key = pass->ckv + (size_t)r * (size_t)width + config->kv_lora;
        float *kv = pass->kv + (size_t)r * (size_t)width;
        tv_path_rotate(key, config->rope_dim, pass->rope, pass->rows->positions[r]);
        for (int32_t i = 0; i < half; i++) {
            kv[config->kv_lora + i] = key[2 * i];
            kv[config->kv_lora + half + i] = key[2 * i + 1];
        }
    }
    if (rc == 0 && pass->source->rows_bf16) {
        tv_path_round_bf16(pass->kv, (int64_t)rows * width);
    }
    return rc;
}

/* Keys and values of every row, from its KV row. */
static int keys_values(struct pass *pass, const struct tv_model_layer_weights *layer)
{
    const struct tv_model_config *config = pass->source->config;
    int32_t rows = pass->rows->count;
    size_t width = (size_t)(config->kv_lora + config->rope_dim);
    for (int32_t r = 0; r < rows; r++) {
        memcpy(pass->latent + (size_t)r * (size_t)config->kv_lora, pass->kv + (size_t)r * width,
               (size_t)config->kv_lora * sizeof *pass->latent);
    }
    int rc = tv_path_linear(pass->source, &layer->k_up, pass->latent, rows, 0, pass->k);
    if (rc == 0) {
        rc = tv_path_linear(pass->source, &layer->v_up, pass->latent, rows, 0, pass->v);
    }
    return rc;
}

/* Row `j` of what row r sees: the prefix, then its own path. */
static int32_t seen(const struct tv_path_rows *rows, int32_t r, int32_t j)
{
    int in_prefix = j < rows->prefix_len || r < rows->prefix_len * (1 + rows->twins);
    return in_prefix ? j : rows->starts[r] + (j - rows->prefix_len);
}

static float score(const struct pass *pass, int32_t r, int32_t other, int32_t head)
{
    const struct tv_model_config *config = pass->source->config;
    size_t heads = (size_t)config->heads;
    int32_t nope = config->nope_dim, rope = config->rope_dim;
    const float *q = pass->q + ((size_t)r * heads + (size_t)head) * (size_t)(nope + rope);
    const float *k = pass->k + ((size_t)other * heads + (size_t)head) * (size_t)nope;
    const float *key =
        pass->kv + (size_t)other * (size_t)(config->kv_lora + rope) + config->kv_lora;
    float sum = tv_path_dot(q, k, nope, pass->source->order);
    for (int32_t i = 0; i < rope / 2; i++) { /* pairs against two halves */
        sum += q[nope + 2 * i] * key[i];
        sum += q[nope + 2 * i + 1] * key[rope / 2 + i];
    }
    return sum;
}

/* The row's queries in the form that the contract rounds: k_up [heads, nope, kv_lora] taken in. */
static void query_take(struct pass *pass, int32_t layer, const float *k_up, int32_t r)
{
    const struct tv_model_config *config = pass->source->config;
    int32_t nope = config->nope_dim, rope = config->rope_dim, lora = config->kv_lora;
    for (int32_t h = 0; h < config->heads; h++) {
        const float *q =
            pass->q + ((size_t)r * (size_t)config->heads + (size_t)h) * (size_t)(nope + rope);
        float *to = pass->query + (size_t)h * (size_t)(lora + rope);
        memset(to, 0, (size_t)lora * sizeof *to);
        for (int32_t i = 0; i < nope; i++) {
            const float *row = k_up + ((size_t)h * (size_t)nope + (size_t)i) * (size_t)lora;
            for (int32_t c = 0; c < lora; c++) {
                to[c] += q[i] * row[c];
            }
        }
        for (int32_t i = 0; i < rope / 2; i++) {
            to[lora + i] = q[nope + 2 * i];
            to[lora + rope / 2 + i] = q[nope + 2 * i + 1];
        }
    }
    tv_path_round_bf16(pass->query, (int64_t)config->heads * (lora + rope));
    if (pass->watch != NULL && pass->watch->query != NULL) {
        pass->watch->query(pass->watch->context, layer, r, pass->query);
    }
}

static float score_rounded(const struct pass *pass, int32_t other, int32_t head)
{
    int32_t width = pass->source->config->kv_lora + pass->source->config->rope_dim;
    const float *q = pass->query + (size_t)head * (size_t)width;
    const float *kv = pass->kv + (size_t)other * (size_t)width;
    return tv_path_dot(q, kv, width, pass->source->order);
}

static int has_rounded_queries(const struct tv_path_rows *rows, int32_t r)
{
    return rows->twins && r >= rows->prefix_len;
}

static void attend(struct pass *pass, int32_t r, int32_t head)
{
    const struct tv_model_config *config = pass->source->config;
    const struct tv_path_rows *rows = pass->rows;
    size_t heads = (size_t)config->heads, v_dim = (size_t)config->v_dim;
    float *out = pass->mixed + ((size_t)r * heads + (size_t)head) * v_dim;
    int32_t count = rows->positions[r] + 1;
    double max = -INFINITY, sum = 0.0;
    for (int32_t j = 0; j < count; j++) {
        int32_t other = seen(rows, r, j);
        float value = has_rounded_queries(rows, r) ? score_rounded(pass, other, head)
                                                   : score(pass, r, other, head);
        pass->p[j] = (double)value * (double)pass->softmax_scale;
        max = fmax(max, pass->p[j]);
    }
    for (int32_t j = 0; j < count; j++) {
        pass->p[j] = exp(pass->p[j] - max);
        sum += pass->p[j];
    }
    memset(out, 0, v_dim * sizeof *out);
    for (int32_t at = 0; at < count; at++) {
        int32_t j = pass->source->order == TV_PATH_BACKWARDS ? count - 1 - at : at;
        const float *v = pass->v + ((size_t)seen(rows, r, j) * heads + (size_t)head) * v_dim;
        float weight = (float)(pass->p[j] / sum);
        for (size_t i = 0; i < v_dim; i++) {
            out[i] += weight * v[i];
        }
    }
}

static int rows_attend(struct pass *pass, int32_t layer)
{
    const struct tv_path_rows *rows = pass->rows;
    const struct tv_model_layer_weights *weights = &pass->source->weights->layers[layer];
    const struct tv_path_watch *watch = pass->watch;
    size_t width = (size_t)pass->source->config->heads * (size_t)pass->source->config->v_dim;
    int watched = watch != NULL && watch->mixed != NULL;
    float *k_up = NULL, *v_up = NULL;
    int rc = rows->twins ? tv_path_tensor(pass->source, &weights->k_up, &k_up) : 0;
    if (rc == 0 && watched) {
        rc = tv_path_tensor(pass->source, &weights->v_up, &v_up);
    }
    for (int32_t r = 0; rc == 0 && r < rows->count; r++) {
        if (has_rounded_queries(rows, r)) {
            query_take(pass, layer, k_up, r);
        }
        for (int32_t head = 0; head < pass->source->config->heads; head++) {
            attend(pass, r, head);
        }
        if (watched && rows->slots[r] >= rows->prefix_len) {
            watch->mixed(watch->context, layer, r, v_up, pass->mixed + (size_t)r * width);
        }
        rc = tv_path_stopped(pass->source);
    }
    free(k_up);
    free(v_up);
    return rc;
}

static int layer_run(struct pass *pass, int32_t l)
{
    const struct tv_model_layer_weights *layer = &pass->source->weights->layers[l];
    const struct tv_model_config *config = pass->source->config;
    int32_t rows = pass->rows->count;
    int rc = norm(pass, &layer->input_norm, config->rms_eps, pass->x, config->hidden,
                  config->hidden, pass->h, config->hidden);
    if (rc == 0) {
        rc = queries(pass, layer);
    }
    if (rc == 0) {
        rc = kv_rows(pass, layer);
    }
    if (rc == 0 && pass->watch != NULL && pass->watch->kv != NULL) {
        pass->watch->kv(pass->watch->context, l, pass->kv);
    }
    if (rc == 0) {
        rc = keys_values(pass, layer);
    }
    if (rc == 0) {
        rc = rows_attend(pass, l);
    }
    if (rc == 0) {
        rc = tv_path_linear(pass->source, &layer->o, pass->mixed, rows, 1, pass->x);
    }
    if (rc == 0) {
        rc = norm(pass, &layer->post_norm, config->rms_eps, pass->x, config->hidden, config->hidden,
                  pass->h, config->hidden);
    }
    if (rc == 0) {
        rc = tv_path_feed_forward(pass->source, layer, pass->h, pass->rows, pass->x);
    }
    return rc;
}

/* Logits of the wanted rows. */
static int head_run(struct pass *pass, const int32_t *wanted, int32_t wanted_count, float *logits)
{
    const struct tv_path_source *source = pass->source;
    size_t hidden = (size_t)source->config->hidden;
    int rc = norm(pass, &source->weights->final_norm, source->config->rms_eps, pass->x,
                  (int64_t)hidden, (int32_t)hidden, pass->h, (int64_t)hidden);
    for (int32_t i = 0; rc == 0 && i < wanted_count; i++) {
        memcpy(pass->x + (size_t)i * hidden, pass->h + (size_t)wanted[i] * hidden,
               hidden * sizeof *pass->x);
    }
    if (rc == 0) {
        rc = tv_path_linear(source, &source->weights->head, pass->x, wanted_count, 0, logits);
    }
    return rc;
}

int tv_path_forward(const struct tv_path_source *source, const struct tv_path_rows *rows,
                    const int32_t *wanted, int32_t wanted_count, const struct tv_path_watch *watch,
                    float **ret_logits)
{
    struct pass pass = {.source = source,
                        .rows = rows,
                        .watch = watch,
                        .softmax_scale = tv_path_softmax_scale(source->config)};
    float *logits = floats(wanted_count, source->config->vocab);
    int rc = logits == NULL ? -ENOMEM : pass_take(&pass);
    for (int32_t r = 0; r < rows->count; r++) {
        rows->margins[r] = rows->ties[r] = INFINITY;
    }
    if (rc == 0) {
        rc = embed(&pass);
    }
    for (int32_t l = 0; rc == 0 && l < source->config->layers; l++) {
        rc = layer_run(&pass, l);
    }
    if (rc == 0) {
        rc = head_run(&pass, wanted, wanted_count, logits);
    }
    pass_finish(&pass);
    if (rc != 0) {
        free(logits);
        return rc;
    }
    *ret_logits = logits;
    return 0;
}
