/*
 * reproducer.c - what a violation leaves behind: a .kdtr bundle of one layer, or a JSON body.
 *
 * Owns the two formats. Refuses to put weights in them.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "shadow/round.h"

#define TENSORS 10

/* One tensor of a bundle: its entry in the header, and where its bytes are. */
struct bundle {
    struct tv_buf header;
    struct tv_shadow_part parts[TENSORS + 1]; /* the header first */
    int32_t count;
    size_t bytes;
};

static void tensor_add(struct bundle *bundle, const char *name, const char *dtype,
                       const int32_t *shape, int32_t dims, const void *data, size_t element_bytes)
{
    size_t bytes = element_bytes;
    tv_buf_printf(&bundle->header, "%s\"%s\":{\"dtype\":\"%s\",\"shape\":[", ",", name, dtype);
    for (int32_t i = 0; i < dims; i++) {
        tv_buf_printf(&bundle->header, "%s%d", i > 0 ? "," : "", shape[i]);
        bytes *= (size_t)shape[i];
    }
    tv_buf_printf(&bundle->header, "],\"data_offsets\":[%zu,%zu]}", bundle->bytes,
                  bundle->bytes + bytes);
    bundle->parts[++bundle->count] = (struct tv_shadow_part){.data = data, .bytes = bytes};
    bundle->bytes += bytes;
}

static void floats_add(struct bundle *bundle, const char *name, enum tv_dtype dtype,
                       const int32_t *shape, int32_t dims, const void *data)
{
    tensor_add(bundle, name, dtype == TV_F32 ? "F32" : "BF16", shape, dims, data,
               tv_dtype_size(dtype));
}

static void ints_add(struct bundle *bundle, const char *name, const int32_t *shape, int32_t dims,
                     const int32_t *data)
{
    tensor_add(bundle, name, "I32", shape, dims, data, sizeof *data);
}

void tv_shadow_reproduce_kernel(struct tv_shadow *shadow, const struct tv_shadow_round *round,
                                int32_t layer, const void *kv, const float *out, const float *lse)
{
    const struct tv_shadow_layer_copy *fast = &round->layers[layer];
    int32_t pages = tv_shadow_round_page_count(round);
    int32_t n = round->nodes, heads = round->heads, latent = round->latent_dim;
    int32_t row = latent + round->rope_dim;
    struct bundle bundle = {0};
    int32_t *table = malloc((size_t)pages * sizeof *table);
    if (table == NULL) {
        tv_shadow_files_add(shadow, "kernel", NULL, 0);
        return;
    }
    for (int32_t p = 0; p < pages; p++) {
        table[p] = p;
    }
    uint64_t header_bytes = 0;
    tv_buf_init(&bundle.header, 8192);
    tv_buf_append(&bundle.header, &header_bytes, sizeof header_bytes);
    tv_buf_printf(&bundle.header,
                  "{\"__metadata__\":{\"format\":\"kdtr\",\"version\":\"1\",\"kind\":"
                  "\"verify_attn\",\"softmax_scale\":\"%.9g\",\"page_size\":\"%d\",\"seed\":\"0\","
                  "\"layer\":\"%d\"}",
                  (double)round->softmax_scale, round->page_size, layer);
    floats_add(&bundle, "q", round->dtype, (const int32_t[]){1, n, heads, row}, 4, fast->q);
    floats_add(&bundle, "kv_pages", round->dtype, (const int32_t[]){pages, round->page_size, row},
               3, kv);
    floats_add(&bundle, "out", TV_F32, (const int32_t[]){1, n, heads, latent}, 4, out);
    floats_add(&bundle, "lse", TV_F32, (const int32_t[]){1, n, heads}, 3, lse);
    floats_add(&bundle, "lse_fast", TV_F32, (const int32_t[]){1, n, heads}, 3, fast->lse);
    ints_add(&bundle, "page_table", (const int32_t[]){1, pages}, 2, table);
    ints_add(&bundle, "prefix_len", (const int32_t[]){1}, 1, &round->prefix_len);
    ints_add(&bundle, "node_count", (const int32_t[]){1}, 1, &round->nodes);
    ints_add(&bundle, "parents", (const int32_t[]){1, n}, 2, round->parents);
    floats_add(&bundle, "out_fast", round->out_dtype, (const int32_t[]){1, n, heads, latent}, 4,
               fast->out);
    tv_buf_append(&bundle.header, "}", 1);
    while (bundle.header.failed == 0 && bundle.header.bytes % 8 != 0) {
        tv_buf_append(&bundle.header, " ", 1); /* tensors start at a multiple of 8 */
    }
    if (bundle.header.failed == 0) {
        header_bytes = bundle.header.bytes - sizeof header_bytes;
        for (size_t i = 0; i < sizeof header_bytes; i++) {
            bundle.header.data[i] = (char)(header_bytes >> (8 * i) & 0xff);
        }
        bundle.parts[0] =
            (struct tv_shadow_part){.data = bundle.header.data, .bytes = bundle.header.bytes};
        tv_shadow_files_add(shadow, "kernel", bundle.parts, bundle.count + 1);
    } else {
        tv_shadow_files_add(shadow, "kernel", NULL, 0);
    }
    tv_buf_finish(&bundle.header);
    free(table);
}

static void array_print(struct tv_buf *buf, const char *name, const int32_t *values, int32_t count)
{
    tv_buf_printf(buf, "\"%s\":[", name);
    for (int32_t i = 0; i < count; i++) {
        tv_buf_printf(buf, "%s%d", i > 0 ? "," : "", values[i]);
    }
    tv_buf_append(buf, "]", 1);
}

void tv_shadow_reproduce_path(struct tv_shadow *shadow, const struct tv_parity_case *parity_case)
{
    const struct tv_round_rule *rule = &parity_case->rule;
    const struct tv_sampling *sampling = &rule->sampling;
    struct tv_buf buf;
    tv_buf_init(&buf, (size_t)TV_SHADOW_FILES_BYTES_MAX);
    tv_buf_append(&buf, "{", 1);
    array_print(&buf, "tokens", parity_case->prefix, parity_case->prefix_len);
    tv_buf_printf(&buf, ",\"tree\":{");
    array_print(&buf, "tokens", parity_case->tree->tokens, parity_case->tree->count);
    tv_buf_append(&buf, ",", 1);
    array_print(&buf, "parents", parity_case->tree->parents, parity_case->tree->count);
    tv_encode_draft(&buf, parity_case->tree);
    tv_buf_printf(&buf,
                  "},\"sampling\":{\"rule\":\"%s\",\"temperature\":%.9g,\"top_k\":%d,"
                  "\"top_p\":%.9g,\"min_p\":%.9g,\"seed\":\"%llu\",\"typical\":{\"epsilon\":%.17g,"
                  "\"delta\":%.17g}},\"stop\":{",
                  tv_rule_name(rule->rule), (double)sampling->temperature, sampling->top_k,
                  (double)sampling->top_p, (double)sampling->min_p,
                  (unsigned long long)sampling->seed, rule->typical_epsilon, rule->typical_delta);
    array_print(&buf, "token_ids", rule->stop_ids, rule->stop_count);
    tv_buf_printf(&buf, ",\"max_len\":%d}}\n", rule->max_len);
    struct tv_shadow_part part = {.data = buf.data, .bytes = buf.bytes};
    tv_shadow_files_add(shadow, "path", &part, buf.failed == 0 ? 1 : 0);
    tv_buf_finish(&buf);
}
