/*
 * path.c - the path oracle's forward pass: sequences from a tree, attention, layers, head.
 *
 * Owns its activations for the time of one call. Refuses pages, tree masks and absorbed products;
 * a row sees the prefix and the rows of its own path up to itself, as plain text would.
 */
#include "shadow/path.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

struct pass {
    const struct tv_path_source *source;
    const struct tv_path_rows *rows;
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
        rows->nodes[row] = -1;
        if (rows->row_of[node] < 0) {
            rows->row_of[node] = row;
            rows->nodes[row] = node;
        }
    }
}

int tv_path_rows_init(struct tv_path_rows *rows, const int32_t *prefix, int32_t prefix_len,
                      const struct tv_tree *tree)
{
    int64_t count = prefix_len + rows_count(tree);
    memset(rows, 0, sizeof *rows);
    if (count > INT32_MAX) {
        return -ENOMEM;
    }
    rows->count = (int32_t)count;
    rows->prefix_len = prefix_len;
    rows->tokens = malloc((size_t)count * sizeof *rows->tokens);
    rows->positions = malloc((size_t)count * sizeof *rows->positions);
    rows->starts = malloc((size_t)count * sizeof *rows->starts);
    rows->nodes = malloc((size_t)count * sizeof *rows->nodes);
    rows->row_of = malloc((size_t)tree->count * sizeof *rows->row_of);
    if (rows->tokens == NULL || rows->positions == NULL || rows->starts == NULL ||
        rows->nodes == NULL || rows->row_of == NULL) {
        tv_path_rows_finish(rows);
        return -ENOMEM;
    }
    for (int32_t i = 0; i < tree->count; i++) {
        rows->row_of[i] = -1;
    }
    for (int32_t i = 0; i < prefix_len; i++) {
        rows->tokens[i] = prefix[i];
        rows->positions[i] = i;
        rows->starts[i] = 0;
        rows->nodes[i] = -1;
    }
    int32_t start = prefix_len;
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
    free(rows->nodes);
    free(rows->row_of);
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
    if (pass->x == NULL || pass->h == NULL || pass->q == NULL || pass->low == NULL ||
        pass->ckv == NULL || pass->latent == NULL || pass->k == NULL || pass->v == NULL ||
        pass->mixed == NULL || pass->kv == NULL || pass->p == NULL) {
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

/* Keys and values of every row, and the rows a cache would hold. */
static int keys_values(struct pass *pass, const struct tv_model_layer_weights *layer)
{
    const struct tv_model_config *config = pass->source->config;
    int32_t rows = pass->rows->count;
    int32_t width = config->kv_lora + config->rope_dim;
    int32_t half = config->rope_dim / 2;
    int rc = tv_path_linear(pass->source, &layer->kv_a, pass->h, rows, 0, pass->ckv);
    if (rc == 0) {
        rc = norm(pass, &layer->kv_a_norm, config->lora_rms_eps, pass->ckv, width, config->kv_lora,
                  pass->latent, config->kv_lora);
    }
    if (rc == 0) {
        rc = tv_path_linear(pass->source, &layer->k_up, pass->latent, rows, 0, pass->k);
    }
    if (rc == 0) {
        rc = tv_path_linear(pass->source, &layer->v_up, pass->latent, rows, 0, pass->v);
    }
    for (int32_t r = 0; rc == 0 && r < rows; r++) {
        float *key = pass->ckv + (size_t)r * (size_t)width + config->kv_lora;
        float *kv = pass->kv + (size_t)r * (size_t)width;
        tv_path_rotate(key, config->rope_dim, pass->rope, pass->rows->positions[r]);
        memcpy(kv, pass->latent + (size_t)r * (size_t)config->kv_lora,
               (size_t)config->kv_lora * sizeof *kv);
        for (int32_t i = 0; i < half; i++) {
            kv[config->kv_lora + i] = key[2 * i];
            kv[config->kv_lora + half + i] = key[2 * i + 1];
        }
    }
    return rc;
}

/* Row `j` of what row r sees: the prefix, then its own path. */
static int32_t seen(const struct tv_path_rows *rows, int32_t r, int32_t j)
{
    return j < rows->prefix_len || r < rows->prefix_len ? j
                                                        : rows->starts[r] + (j - rows->prefix_len);
}

static float score(const struct pass *pass, int32_t r, int32_t other, int32_t head)
{
    const struct tv_model_config *config = pass->source->config;
    size_t heads = (size_t)config->heads;
    int32_t nope = config->nope_dim, rope = config->rope_dim;
    const float *q = pass->q + ((size_t)r * heads + (size_t)head) * (size_t)(nope + rope);
    const float *k = pass->k + ((size_t)other * heads + (size_t)head) * (size_t)nope;
    const float *key =
        pass->ckv + (size_t)other * (size_t)(config->kv_lora + rope) + config->kv_lora;
    float sum = 0.0f;
    for (int32_t i = 0; i < nope; i++) {
        sum += q[i] * k[i];
    }
    for (int32_t i = 0; i < rope; i++) {
        sum += q[nope + i] * key[i];
    }
    return sum;
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
        pass->p[j] = (double)score(pass, r, seen(rows, r, j), head) * (double)config->softmax_scale;
        max = fmax(max, pass->p[j]);
    }
    for (int32_t j = 0; j < count; j++) {
        pass->p[j] = exp(pass->p[j] - max);
        sum += pass->p[j];
    }
    memset(out, 0, v_dim * sizeof *out);
    for (int32_t j = 0; j < count; j++) {
        const float *v = pass->v + ((size_t)seen(rows, r, j) * heads + (size_t)head) * v_dim;
        float weight = (float)(pass->p[j] / sum);
        for (size_t i = 0; i < v_dim; i++) {
            out[i] += weight * v[i];
        }
    }
}

static int layer_run(struct pass *pass, const struct tv_model_layer_weights *layer)
{
    const struct tv_model_config *config = pass->source->config;
    int32_t rows = pass->rows->count;
    int rc = norm(pass, &layer->input_norm, config->rms_eps, pass->x, config->hidden,
                  config->hidden, pass->h, config->hidden);
    if (rc == 0) {
        rc = queries(pass, layer);
    }
    if (rc == 0) {
        rc = keys_values(pass, layer);
    }
    for (int32_t r = 0; rc == 0 && r < rows; r++) {
        for (int32_t head = 0; head < config->heads; head++) {
            attend(pass, r, head);
        }
        rc = tv_path_stopped(pass->source);
    }
    if (rc == 0) {
        rc = tv_path_linear(pass->source, &layer->o, pass->mixed, rows, 1, pass->x);
    }
    if (rc == 0) {
        rc = norm(pass, &layer->post_norm, config->rms_eps, pass->x, config->hidden, config->hidden,
                  pass->h, config->hidden);
    }
    if (rc == 0) {
        rc = tv_path_feed_forward(pass->source, layer, pass->h, rows, pass->x);
    }
    return rc;
}

/* Logits of the row that stands for each node. */
static int head_run(struct pass *pass, int32_t node_count, float *logits)
{
    const struct tv_path_source *source = pass->source;
    size_t hidden = (size_t)source->config->hidden;
    int rc = norm(pass, &source->weights->final_norm, source->config->rms_eps, pass->x,
                  (int64_t)hidden, (int32_t)hidden, pass->h, (int64_t)hidden);
    for (int32_t i = 0; rc == 0 && i < node_count; i++) {
        memcpy(pass->x + (size_t)i * hidden, pass->h + (size_t)pass->rows->row_of[i] * hidden,
               hidden * sizeof *pass->x);
    }
    if (rc == 0) {
        rc = tv_path_linear(source, &source->weights->head, pass->x, node_count, 0, logits);
    }
    return rc;
}

int tv_path_forward(const struct tv_path_source *source, const struct tv_path_rows *rows,
                    int32_t node_count, tv_path_kv *kv, void *kv_context, float **ret_logits)
{
    struct pass pass = {.source = source, .rows = rows};
    float *logits = floats(node_count, source->config->vocab);
    int rc = logits == NULL ? -ENOMEM : pass_take(&pass);
    if (rc == 0) {
        rc = embed(&pass);
    }
    for (int32_t l = 0; rc == 0 && l < source->config->layers; l++) {
        rc = layer_run(&pass, &source->weights->layers[l]);
        if (rc == 0 && kv != NULL) {
            kv(kv_context, l, pass.kv);
        }
    }
    if (rc == 0) {
        rc = head_run(&pass, node_count, logits);
    }
    pass_finish(&pass);
    if (rc != 0) {
        free(logits);
        return rc;
    }
    *ret_logits = logits;
    return 0;
}
