/*
 * kdtr.c - reads one .kdtr bundle.
 */
#include "tests/kdtr/kdtr.h"

#include <errno.h>
#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "proto/json_read.h"

enum { RANK_MAX = 4 };

/* A file while it is being read. */
struct reader {
    struct kdtr *bundle;
    const struct tv_json *doc;
    const struct tv_json_value *root;
    const char *data;
    size_t data_bytes;
    char *reason;
};

struct tensor {
    const void *data;
    int64_t shape[RANK_MAX];
    char dtype[8];
};

static int refuse(struct reader *r, const char *name, const char *what)
{
    (void)snprintf(r->reason, KDTR_REASON_MAX, "%s: %s", name, what);
    return -EINVAL;
}

static int read_shape(struct reader *r, const char *name, const struct tv_json_value *shape,
                      size_t rank, struct tensor *t, uint64_t *ret_count)
{
    uint64_t count = 1;
    if (tv_json_type(shape) != TV_JSON_ARRAY || tv_json_count(shape) != rank) {
        return refuse(r, name, "wrong number of dimensions");
    }
    const struct tv_json_value *item = tv_json_first(shape);
    for (size_t i = 0; i < rank; i++, item = tv_json_next(item)) {
        if (tv_json_int(r->doc, item, &t->shape[i]) != 0 || t->shape[i] < 1 ||
            t->shape[i] > INT_MAX || count > (uint64_t)1 << 40) {
            return refuse(r, name, "bad dimension");
        }
        count *= (uint64_t)t->shape[i];
    }
    *ret_count = count;
    return 0;
}

static int find_tensor(struct reader *r, const char *name, size_t rank, struct tensor *ret_tensor)
{
    struct tensor t = {.data = NULL};
    int64_t offsets[2];
    uint64_t count;
    const struct tv_json_value *entry = tv_json_member(r->root, name);
    if (!entry || tv_json_type(entry) != TV_JSON_OBJECT) {
        return refuse(r, name, "missing");
    }
    const struct tv_json_value *dtype = tv_json_member(entry, "dtype");
    const char *text = dtype ? tv_json_string(dtype, NULL) : NULL;
    const struct tv_json_value *shape = tv_json_member(entry, "shape");
    const struct tv_json_value *range = tv_json_member(entry, "data_offsets");
    if (!text || strlen(text) >= sizeof t.dtype || !shape || !range ||
        tv_json_type(range) != TV_JSON_ARRAY || tv_json_count(range) != 2) {
        return refuse(r, name, "no dtype, shape or data_offsets");
    }
    memcpy(t.dtype, text, strlen(text) + 1);
    int rc = read_shape(r, name, shape, rank, &t, &count);
    if (rc != 0) {
        return rc;
    }
    const struct tv_json_value *begin = tv_json_first(range);
    if (tv_json_int(r->doc, begin, &offsets[0]) != 0 ||
        tv_json_int(r->doc, tv_json_next(begin), &offsets[1]) != 0 || offsets[0] < 0 ||
        offsets[1] < offsets[0] || (uint64_t)offsets[1] > r->data_bytes || offsets[0] % 2 != 0) {
        return refuse(r, name, "offsets outside the file");
    }
    uint64_t bytes = count * (strcmp(t.dtype, "BF16") == 0 ? 2 : 4);
    if ((uint64_t)(offsets[1] - offsets[0]) != bytes) {
        return refuse(r, name, "bytes do not match the shape");
    }
    if (bytes == count * 4 && offsets[0] % 4 != 0) {
        return refuse(r, name, "not aligned");
    }
    t.data = r->data + offsets[0];
    *ret_tensor = t;
    return 0;
}

static int typed(struct reader *r, const char *name, const char *dtype, size_t rank,
                 const int64_t *shape, const void **ret_data)
{
    struct tensor t;
    int rc = find_tensor(r, name, rank, &t);
    if (rc != 0) {
        return rc;
    }
    if (strcmp(t.dtype, dtype) != 0) {
        return refuse(r, name, "wrong dtype");
    }
    for (size_t i = 0; i < rank; i++) {
        if (t.shape[i] != shape[i]) {
            return refuse(r, name, "shape does not agree with the others");
        }
    }
    *ret_data = t.data;
    return 0;
}

static const char *metadata(struct reader *r, const char *name)
{
    const struct tv_json_value *all = tv_json_member(r->root, "__metadata__");
    const struct tv_json_value *value = all ? tv_json_member(all, name) : NULL;
    return value ? tv_json_string(value, NULL) : NULL;
}

static int read_metadata(struct reader *r)
{
    static const char *const fixed[][2] = {
        {"format", "kdtr"}, {"version", "1"}, {"kind", "verify_attn"}};
    for (size_t i = 0; i < sizeof fixed / sizeof fixed[0]; i++) {
        const char *value = metadata(r, fixed[i][0]);
        if (!value || strcmp(value, fixed[i][1]) != 0) {
            return refuse(r, fixed[i][0], "missing or not what this program reads");
        }
    }
    const char *scale = metadata(r, "softmax_scale");
    const char *page_size = metadata(r, "page_size");
    char *end = NULL;
    if (!scale || !page_size) {
        return refuse(r, "metadata", "no softmax_scale or page_size");
    }
    r->bundle->softmax_scale = strtof(scale, &end);
    if (end == scale || *end != '\0' || !isfinite(r->bundle->softmax_scale)) {
        return refuse(r, "softmax_scale", "not a number");
    }
    r->bundle->page_size = (int32_t)strtol(page_size, &end, 10);
    return end == page_size || *end != '\0' ? refuse(r, "page_size", "not a number") : 0;
}

static int read_tensors(struct reader *r)
{
    struct kdtr *b = r->bundle;
    struct tensor q, pool, table;
    const void *data[5];
    if (find_tensor(r, "q", 4, &q) != 0 || find_tensor(r, "kv_pages", 3, &pool) != 0 ||
        find_tensor(r, "page_table", 2, &table) != 0) {
        return -EINVAL;
    }
    if (strcmp(q.dtype, "F32") != 0 && strcmp(q.dtype, "BF16") != 0) {
        return refuse(r, "q", "wrong dtype");
    }
    if (strcmp(q.dtype, pool.dtype) != 0 || strcmp(table.dtype, "I32") != 0) {
        return refuse(r, "kv_pages or page_table", "wrong dtype");
    }
    if (q.shape[3] != TV_MLA_ROW || pool.shape[2] != TV_MLA_ROW || pool.shape[1] != b->page_size ||
        table.shape[0] != q.shape[0]) {
        return refuse(r, "kv_pages or page_table", "shape does not agree with q");
    }
    b->dtype = strcmp(q.dtype, "F32") == 0 ? TV_F32 : TV_BF16;
    b->batch = (int32_t)q.shape[0];
    b->q_len = (int32_t)q.shape[1];
    b->heads = (int32_t)q.shape[2];
    b->page_count = pool.shape[0];
    b->max_pages = (int32_t)table.shape[1];
    int64_t out_shape[4] = {q.shape[0], q.shape[1], q.shape[2], TV_MLA_LATENT};
    if (typed(r, "prefix_len", "I32", 1, q.shape, &data[0]) != 0 ||
        typed(r, "node_count", "I32", 1, q.shape, &data[1]) != 0 ||
        typed(r, "parents", "I32", 2, q.shape, &data[2]) != 0 ||
        typed(r, "out", "F32", 4, out_shape, &data[3]) != 0 ||
        typed(r, "lse", "F32", 3, q.shape, &data[4]) != 0) {
        return -EINVAL;
    }
    b->q = q.data;
    b->kv_pages = pool.data;
    b->page_table = table.data;
    b->prefix_len = data[0];
    b->node_count = data[1];
    b->parents = data[2];
    b->out = data[3];
    b->lse = data[4];
    return 0;
}

static int read_file(const char *path, struct kdtr *bundle)
{
    int rc = 0;
    FILE *file = fopen(path, "rb");
    if (!file) {
        return -errno;
    }
    long size = -1;
    if (fseek(file, 0, SEEK_END) == 0) {
        size = ftell(file);
    }
    if (size < 0 || fseek(file, 0, SEEK_SET) != 0) {
        rc = -EIO;
        goto out;
    }
    bundle->size = (size_t)size;
    bundle->bytes = malloc(bundle->size + 1);
    if (!bundle->bytes) {
        rc = -ENOMEM;
        goto out;
    }
    if (fread(bundle->bytes, 1, bundle->size, file) != bundle->size) {
        rc = -EIO;
    }
out:
    (void)fclose(file); /* it was only read */
    return rc;
}

int kdtr_read(const char *path, struct kdtr *ret_bundle, char *reason)
{
    struct kdtr bundle = {.bytes = NULL};
    struct tv_json *doc = NULL;
    struct tv_json_error error;
    const struct tv_json_limits limits = {.depth_max = 8, .values_max = 10000};
    uint64_t header;
    int rc = read_file(path, &bundle);
    if (rc != 0) {
        (void)snprintf(reason, KDTR_REASON_MAX, "%s", strerror(-rc));
        goto out;
    }
    struct reader r = {.bundle = &bundle, .reason = reason};
    if (bundle.size < 8) {
        rc = refuse(&r, "file", "too short");
        goto out;
    }
    memcpy(&header, bundle.bytes, sizeof header);
    if (header > bundle.size - 8 || header % 8 != 0) {
        rc = refuse(&r, "file", "header length is wrong");
        goto out;
    }
    const char *text = (const char *)bundle.bytes + 8;
    rc = tv_json_parse(text, header, &limits, &doc, &error);
    if (rc != 0) {
        rc = refuse(&r, "header", rc == -EINVAL ? error.what : strerror(-rc));
        goto out;
    }
    r.doc = doc;
    r.root = tv_json_root(doc);
    r.data = text + header;
    r.data_bytes = bundle.size - 8 - header;
    rc = read_metadata(&r);
    if (rc == 0) {
        rc = read_tensors(&r);
    }
out:
    tv_json_destroy(doc);
    if (rc != 0) {
        kdtr_finish(&bundle);
        return rc;
    }
    *ret_bundle = bundle;
    return 0;
}

void kdtr_finish(struct kdtr *bundle)
{
    free(bundle->bytes);
    bundle->bytes = NULL;
}
