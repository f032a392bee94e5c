/*
 * path_math.c - the path oracle's arithmetic: products, norms and rotation in plain loops.
 *
 * Owns no state. Refuses to use any operation of kernels/: what judges the fast path must not share
 * its code.
 */
#include <errno.h>
#include <math.h>
#include <stdlib.h>

#include "shadow/path.h"

#define LANES 16 /* partial sums of a product, added in a fixed order */

/* One access, which ASan checks once. A start under ASan or TSan spent two thirds of its time with
 * the checks of single values of products. */
typedef float lanes_of
    __attribute__((vector_size(LANES * sizeof(float)), aligned(sizeof(float)), may_alias));

/* Reads only what its own pass has written: nothing that TSan must be told of. */
#define ALONE __attribute__((no_sanitize_thread))

int tv_path_stopped(const struct tv_path_source *source)
{
    int stop = 0;
    for (int i = 0; i < TV_PATH_STOPS; i++) {
        stop |= source->stops[i] != NULL &&
                atomic_load_explicit(source->stops[i], memory_order_relaxed) != 0;
    }
    return stop ? -ECANCELED : 0;
}

static float widen_f16(uint16_t bits)
{
    double sign = (bits & 0x8000u) != 0 ? -1.0 : 1.0;
    int exponent = (bits >> 10) & 31;
    int fraction = bits & 1023;
    if (exponent == 31) {
        return fraction != 0 ? NAN : (float)(sign * INFINITY);
    }
    double value = exponent == 0 ? ldexp((double)fraction, -24)
                                 : ldexp((double)(fraction + 1024), exponent - 25);
    return (float)(sign * value);
}

static void widen(const void *data, enum tv_dtype dtype, size_t start, size_t count, float *ret)
{
    for (size_t i = 0; i < count; i++) {
        switch (dtype) {
        case TV_F32:
            ret[i] = ((const float *)data)[start + i];
            break;
        case TV_BF16:
            ret[i] = tv_bf16_to_f32(((const uint16_t *)data)[start + i]);
            break;
        case TV_F16:
            ret[i] = widen_f16(((const uint16_t *)data)[start + i]);
            break;
        }
    }
}

/* The tensor's bytes on the host: itself, or a copy in *ret_owned. */
static int host_bytes(const struct tv_path_source *source, const struct tv_model_tensor *tensor,
                      const void **ret_data, void **ret_owned)
{
    size_t bytes = (size_t)tensor->rows * (size_t)tensor->cols * tv_dtype_size(tensor->dtype);
    *ret_owned = NULL;
    if (source->device == NULL || source->device->host_memory) {
        *ret_data = tensor->data;
        return 0;
    }
    void *owned = malloc(bytes);
    if (owned == NULL) {
        return -ENOMEM;
    }
    int rc = source->device->download(source->device, owned, tensor->data, bytes);
    if (rc == 0) {
        rc = source->device->sync(source->device);
    }
    if (rc != 0) {
        free(owned);
        return rc;
    }
    *ret_data = owned;
    *ret_owned = owned;
    return 0;
}

int tv_path_tensor(const struct tv_path_source *source, const struct tv_model_tensor *tensor,
                   float **ret_values)
{
    const void *data = NULL;
    void *owned = NULL;
    size_t count = (size_t)tensor->rows * (size_t)tensor->cols;
    float *values = malloc(count * sizeof *values);
    int rc = values == NULL ? -ENOMEM : host_bytes(source, tensor, &data, &owned);
    if (rc != 0) {
        free(values);
        return rc;
    }
    widen(data, tensor->dtype, 0, count, values);
    free(owned);
    *ret_values = values;
    return 0;
}

ALONE float tv_path_dot(const float *x, const float *y, int32_t count, enum tv_path_order order)
{
    float sum = 0.0f;
    int32_t whole = count - count % LANES;
    if (order == TV_PATH_BACKWARDS) {
        for (int32_t i = count - 1; i >= whole; i--) {
            sum += x[i] * y[i];
        }
        for (int32_t i = whole - LANES; i >= 0; i -= LANES) {
            lanes_of terms = *(const lanes_of *)(x + i) * *(const lanes_of *)(y + i);
            for (int32_t j = LANES - 1; j >= 0; j--) {
                sum += terms[j];
            }
        }
        return sum;
    }
    for (int32_t i = 0; i < whole; i += LANES) {
        lanes_of terms = *(const lanes_of *)(x + i) * *(const lanes_of *)(y + i);
        for (int32_t j = 0; j < LANES; j++) {
            sum += terms[j];
        }
    }
    for (int32_t i = whole; i < count; i++) {
        sum += x[i] * y[i];
    }
    return sum;
}

ALONE static float product(const float *x, const float *w, int32_t count)
{
    lanes_of lanes = {0};
    int32_t i = 0;
    for (; i + LANES <= count; i += LANES) {
        lanes += *(const lanes_of *)(x + i) * *(const lanes_of *)(w + i);
    }
    float sum = 0.0f;
    for (; i < count; i++) {
        sum += x[i] * w[i];
    }
    for (int32_t j = 0; j < LANES; j++) {
        sum += lanes[j];
    }
    return sum;
}

int tv_path_linear(const struct tv_path_source *source, const struct tv_model_tensor *w,
                   const float *x, int32_t rows, int accumulate, float *y)
{
    const void *data = NULL;
    void *owned = NULL;
    float *row = malloc((size_t)w->cols * sizeof *row);
    int rc = row == NULL ? -ENOMEM : host_bytes(source, w, &data, &owned);
    for (int32_t n = 0; rc == 0 && n < w->rows; n++) {
        widen(data, w->dtype, (size_t)n * (size_t)w->cols, (size_t)w->cols, row);
        for (int32_t r = 0; r < rows; r++) {
            float *at = &y[(size_t)r * (size_t)w->rows + (size_t)n];
            const float *in = x + (size_t)r * (size_t)w->cols;
            float value = source->order == TV_PATH_LANES
                              ? product(in, row, w->cols)
                              : tv_path_dot(in, row, w->cols, source->order);
            *at = accumulate ? *at + value : value;
        }
        rc = tv_path_stopped(source);
    }
    free(owned);
    free(row);
    return rc;
}

void tv_path_rmsnorm(const float *x, int64_t x_stride, int32_t rows, int32_t dim,
                     const float *weight, double eps, float *y, int64_t y_stride)
{
    for (int32_t r = 0; r < rows; r++) {
        const float *from = x + (int64_t)r * x_stride;
        float *to = y + (int64_t)r * y_stride;
        double squares = 0.0;
        for (int32_t i = 0; i < dim; i++) {
            squares += (double)from[i] * (double)from[i];
        }
        float factor = (float)(1.0 / sqrt(squares / (double)dim + eps));
        for (int32_t i = 0; i < dim; i++) {
            to[i] = weight[i] * (from[i] * factor);
        }
    }
}

void tv_path_round_bf16(float *x, int64_t count)
{
    for (int64_t i = 0; i < count; i++) {
        int exponent = 0;
        (void)frexp((double)x[i], &exponent);                 /* |x| in [1/2, 1) * 2^exponent */
        exponent = exponent - 8 > -133 ? exponent - 8 : -133; /* 8 bits, fewer below 2^-126 */
        x[i] = (float)ldexp(rint(ldexp((double)x[i], -exponent)), exponent);
    }
}

/* YaRN of a context stretched `factor` times: how much longer the vectors of a dot product are
 * made, for a coefficient m. */
static double yarn_length(const struct tv_model_config *config, double m)
{
    double stretch = config->yarn_factor > 1.0 ? log(config->yarn_factor) : 0.0;
    return 1.0 + 0.1 * m * stretch;
}

float tv_path_softmax_scale(const struct tv_model_config *config)
{
    double length = 1.0; /* of query and key each */
    if (config->yarn && config->yarn_mscale_all_dim > 0.0) {
        length = yarn_length(config, config->yarn_mscale_all_dim);
    }
    double width = (double)config->nope_dim + (double)config->rope_dim;
    return (float)(length * length * pow(width, -0.5));
}

/* What rotated vectors are multiplied by: the file's word, or what mscale adds to the factor that
 * all dimensions have through the softmax scale. */
static double rope_length(const struct tv_model_config *config)
{
    double m = config->yarn_mscale, all = config->yarn_mscale_all_dim;
    if (!config->yarn) {
        return 1.0;
    }
    if (config->yarn_attention_factor > 0.0) {
        return config->yarn_attention_factor;
    }
    return m > 0.0 && all > 0.0 ? yarn_length(config, m) / yarn_length(config, all)
                                : yarn_length(config, 1.0);
}

/* The dimension whose wave turns `turns` times within the original context (YaRN). */
static double yarn_dimension(const struct tv_model_config *config, double turns)
{
    double pi = acos(-1.0);
    return (double)config->rope_dim * log((double)config->yarn_original_max / (turns * 2.0 * pi)) /
           (2.0 * log(config->rope_theta));
}

/* Angle per position of pair i. */
static double rope_frequency(const struct tv_model_config *config, int32_t i)
{
    double plain = pow(config->rope_theta, -2.0 * (double)i / (double)config->rope_dim);
    if (!config->yarn) {
        return plain;
    }
    double low = yarn_dimension(config, config->yarn_beta_fast);
    double high = yarn_dimension(config, config->yarn_beta_slow);
    if (config->yarn_truncate) {
        low = floor(low);
        high = ceil(high);
    }
    low = fmax(low, 0.0);
    high = fmin(high, (double)config->rope_dim - 1.0);
    /* Only an empty ramp is widened; one whose ends are the wrong way round runs backwards. */
    double width = high < low || high > low ? high - low : 0.001;
    double slow = fmin(fmax(((double)i - low) / width, 0.0), 1.0);
    return plain / config->yarn_factor * slow + plain * (1.0 - slow);
}

int tv_path_rope_table(const struct tv_model_config *config, int32_t positions, float **ret_table)
{
    int32_t half = config->rope_dim / 2;
    double length = rope_length(config);
    float *table = malloc((size_t)positions * (size_t)config->rope_dim * sizeof *table);
    if (table == NULL) {
        return -ENOMEM;
    }
    for (int32_t i = 0; i < half; i++) {
        double frequency = rope_frequency(config, i);
        for (int32_t p = 0; p < positions; p++) {
            float *row = table + (size_t)p * (size_t)config->rope_dim;
            row[i] = (float)(cos((double)p * frequency) * length);
            row[half + i] = (float)(sin((double)p * frequency) * length);
        }
    }
    *ret_table = table;
    return 0;
}

void tv_path_rotate(float *x, int32_t rope_dim, const float *table, int32_t position)
{
    const float *row = table + (size_t)position * (size_t)rope_dim;
    int32_t half = rope_dim / 2;
    for (int32_t i = 0; i < half; i++) {
        float even = x[2 * i];
        float odd = x[2 * i + 1];
        x[2 * i] = even * row[i] - odd * row[half + i];
        x[2 * i + 1] = odd * row[i] + even * row[half + i];
    }
}
