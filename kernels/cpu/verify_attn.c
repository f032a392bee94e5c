/*
 * verify_attn.c - tree attention over the paged cache with an online softmax.
 *
 * A node's row sees the prefix followed by its path from the root; its j-th visible token has
 * virtual position j. Tiles of 64 and splits are cut at virtual positions, so a row's bits are a
 * function of the tokens on its path alone: the same for every tree that contains the path, for
 * every order of its nodes, and for the chain that decodes it token by token. Masks do not exist
 * here; invisible slots are never read.
 *
 * Full prefix tiles are shared by a block of rows; from the tile that holds the end of the prefix
 * on, a node's heads share its own list of rows. Splits are merged in f64, in ascending order.
 * Where there is a matrix unit it serves every full tile, in the prefix or on the path, and no
 * other: that too is a function of the virtual position.
 */
#include "cpu.h"

#include <errno.h>
#include <math.h>

#include "../args.h"
#include "../convert.h"
#include "../ref/ref.h"

enum {
    SPLIT_TILES = 8, /* splits = 0: 512 tokens, which bounds the f32 part of the sums */
    BLOCK_MAX = 128, /* rows of a block that share packed tokens; TV_CPU_BLOCK without tiles */
};

struct job {
    const struct tv_verify_attn *args;
    const struct tv_cpu_micro *micro;
    struct tv_cpu_pool *pool;
    const struct tv_cpu_amx *amx; /* NULL: no matrix unit, or not for these dims */
    int32_t dim;
    int32_t block; /* rows of an item */
    size_t scratch_bytes;
};

/* A thread's part of the workspace. */
struct scratch {
    float *q;      /* [block, dim] */
    float *o;      /* [block, latent]: this split's sum */
    double *total; /* [block, latent]: earlier splits' sum */
    float *p;      /* [block, TV_CPU_TILE] and a tile of rows that are not used */
    float *kv;     /* [TV_CPU_TILE, dim]: widened rows */
    int32_t *path; /* [q_len] */
    char *queries; /* amx: packed rows of the block, later of a node */
    char *packed;  /* amx: packed probabilities */
    double total_max[BLOCK_MAX];
    double total_sum[BLOCK_MAX];
    float max[BLOCK_MAX];
    float sum[BLOCK_MAX];
};

/* Rows [row, row + count) of request b; row = node * heads + head. */
struct span {
    int32_t b, row, count;
    int32_t split_tiles;
};

/* Parts of the scratch, in their order in memory. */
enum { Q, O, TOTAL, P, KV, PATH, QUERIES, PACKED, PARTS };

static int32_t block_max(const struct tv_cpu_amx *amx)
{
    return amx ? BLOCK_MAX : TV_CPU_BLOCK;
}

/* A tile of sums holds 16 rows, and every number of nodes has to go the same way: with fewer heads
 * than this a single node fills too few tiles for two threads to beat the vector loops. */
enum { AMX_HEADS_MIN = 64 };

static const struct tv_cpu_amx *pick_amx(const struct tv_kernels *k,
                                         const struct tv_verify_attn *args)
{
    int fits = args->heads >= AMX_HEADS_MIN &&
               (args->latent_dim + args->rope_dim) % TV_CPU_TILE == 0 &&
               args->latent_dim % TV_CPU_TILE == 0;
    return fits ? tv_cpu_of(k)->amx : NULL;
}

/* Lay the scratch out from `memory`; returns its size. NULL measures only. */
static size_t carve(const struct tv_verify_attn *args, const struct tv_cpu_amx *amx, char *memory,
                    struct scratch *s)
{
    const int32_t dim = args->latent_dim + args->rope_dim;
    const size_t block = (size_t)block_max(amx), latent = (size_t)args->latent_dim;
    const size_t sizes[PARTS] = {
        [Q] = block * (size_t)dim * sizeof(float),
        [O] = block * latent * sizeof(float),
        [TOTAL] = block * latent * sizeof(double),
        [P] = (block + TV_CPU_AMX_ROWS) * TV_CPU_TILE * sizeof(float),
        [KV] = TV_CPU_TILE * (size_t)dim * sizeof(float),
        [PATH] = (size_t)args->q_len * sizeof(int32_t),
        [QUERIES] = amx ? tv_cpu_amx_bytes(BLOCK_MAX, dim) : 0,
        [PACKED] = amx ? tv_cpu_amx_bytes(BLOCK_MAX, TV_CPU_TILE) : 0,
    };
    size_t at[PARTS], end = 0;
    for (int i = 0; i < PARTS; i++) {
        at[i] = end;
        end += (sizes[i] + 63) / 64 * 64;
    }
    if (memory) {
        s->q = (float *)(memory + at[Q]);
        s->o = (float *)(memory + at[O]);
        s->total = (double *)(memory + at[TOTAL]);
        s->p = (float *)(memory + at[P]);
        s->kv = (float *)(memory + at[KV]);
        s->path = (int32_t *)(memory + at[PATH]);
        s->queries = memory + at[QUERIES];
        s->packed = memory + at[PACKED];
    }
    return end;
}

static int64_t row_offset(const struct job *job, int32_t b, int32_t slot)
{
    const struct tv_verify_attn *a = job->args;
    int64_t page = a->page_table[(int64_t)b * a->max_pages + slot / a->page_size];
    return (page * a->page_size + slot % a->page_size) * job->dim;
}

/* Rows of virtual positions [first, first + count) as f32; `path` may be NULL inside the prefix. */
static void tile_rows(const struct job *job, int32_t b, int32_t first, int32_t count,
                      const int32_t *path, float *widened, const float **ret_rows)
{
    const struct tv_verify_attn *a = job->args;
    int32_t prefix = a->prefix_len[b];
    for (int32_t j = 0; j < count; j++) {
        int32_t at = first + j;
        int32_t slot = at < prefix ? at : prefix + path[at - prefix];
        int64_t offset = row_offset(job, b, slot);
        if (a->dtype == TV_F32) {
            ret_rows[j] = (const float *)a->kv_pages + offset;
        } else {
            float *row = widened + (int64_t)j * job->dim;
            job->micro->widen(job->dim, (const uint16_t *)a->kv_pages + offset, row);
            ret_rows[j] = row;
        }
    }
}

/* Move what rows [from, from + count) of the block gathered in this split to their totals. */
static void merge_split(const struct job *job, struct scratch *s, int32_t from, int32_t count)
{
    int32_t latent = job->args->latent_dim;
    for (int32_t r = from; r < from + count; r++) {
        if (isinf(s->max[r]) && s->max[r] < 0.0f) {
            continue; /* an empty split */
        }
        const float *o = s->o + (int64_t)r * latent;
        double *total = s->total + (int64_t)r * latent;
        double max = fmax(s->total_max[r], (double)s->max[r]);
        double old_factor = exp(s->total_max[r] - max);
        double new_factor = exp((double)s->max[r] - max);
        job->micro->join(latent, o, new_factor, total, old_factor);
        s->total_sum[r] = s->total_sum[r] * old_factor + (double)s->sum[r] * new_factor;
        s->total_max[r] = max;
        s->max[r] = -INFINITY;
        s->sum[r] = 0.0f;
    }
}

/* One tile for rows [from, from + count) of the block, which all see the same `tokens` rows. With
 * `packed`, the queries of these rows are packed and the tile is full. */
static void attend_tile(const struct job *job, const struct span *span, struct scratch *s,
                        int32_t from, int32_t count, int32_t tile, int32_t tokens,
                        const float *const *rows, const float *const *ahead, int packed)
{
    int32_t latent = job->args->latent_dim;
    float *o = s->o + (int64_t)from * latent;
    float *p = s->p + (int64_t)from * TV_CPU_TILE;
    float rescale[BLOCK_MAX];
    if (tile % span->split_tiles == 0) {
        merge_split(job, s, from, count);
    }
    if (packed) {
        job->amx->scores(count, job->dim, s->queries, rows, ahead, p);
    } else {
        job->micro->dot(count, tokens, job->dim, s->q + (int64_t)from * job->dim, job->dim,
                        (const void *const *)rows, TV_F32, p, TV_CPU_TILE, 0);
    }
    for (int32_t r = 0; r < count; r++) {
        rescale[r] = job->micro->softmax(tokens, job->args->softmax_scale, p + r * TV_CPU_TILE,
                                         &s->max[from + r], &s->sum[from + r]);
    }
    if (packed) {
        job->amx->values(count, latent, p, rows, rescale, s->packed, o);
    } else {
        job->micro->mix(count, tokens, latent, p, TV_CPU_TILE, rows, rescale, o, latent);
    }
    tv_cpu_pool_step(job->pool);
}

/* Path from the root to `node`; returns its length. */
static int32_t fill_path(const int32_t *parents, int32_t node, int32_t *path)
{
    int32_t length = 0;
    for (int32_t at = node; at >= 0; at = parents[at]) {
        length++;
    }
    int32_t end = length;
    for (int32_t at = node; at >= 0; at = parents[at]) {
        path[--end] = at;
    }
    return length;
}

/* The tiles from the end of the prefix on, for the rows of one node. */
static void attend_path(const struct job *job, const struct span *span, struct scratch *s,
                        int32_t from, int32_t count)
{
    const struct tv_verify_attn *a = job->args;
    const float *rows[TV_CPU_TILE];
    int queries_packed = 0;
    int32_t node = (span->row + from) / a->heads;
    const int32_t *parents = a->parents + tv_args_row_base(a, span->b);
    int32_t prefix = a->prefix_len[span->b];
    int32_t length = prefix + fill_path(parents, node, s->path);
    for (int32_t tile = prefix / TV_CPU_TILE; tile * TV_CPU_TILE < length; tile++) {
        int32_t first = tile * TV_CPU_TILE;
        int32_t tokens = length - first < TV_CPU_TILE ? length - first : TV_CPU_TILE;
        int packed = job->amx && tokens == TV_CPU_TILE;
        tile_rows(job, span->b, first, tokens, s->path, s->kv, rows);
        if (packed && !queries_packed) {
            job->amx->pack_queries(count, job->dim, s->q + (int64_t)from * job->dim, s->queries);
            queries_packed = 1;
        }
        attend_tile(job, span, s, from, count, tile, tokens, rows, NULL, packed);
    }
}

static void start_rows(const struct job *job, const struct span *span, struct scratch *s)
{
    const struct tv_verify_attn *a = job->args;
    int64_t row = tv_args_row_base(a, span->b) * a->heads + span->row;
    int64_t count = (int64_t)span->count * job->dim;
    if (a->dtype == TV_F32) {
        memcpy(s->q, (const float *)a->q + row * job->dim, (size_t)count * sizeof(float));
    } else {
        job->micro->widen((int32_t)count, (const uint16_t *)a->q + row * job->dim, s->q);
    }
    /* The workspace may hold NaN, which a factor of zero would not remove. */
    size_t sums = (size_t)span->count * (size_t)a->latent_dim;
    memset(s->o, 0, sums * sizeof *s->o);
    memset(s->total, 0, sums * sizeof *s->total);
    for (int32_t r = 0; r < span->count; r++) {
        s->max[r] = -INFINITY;
        s->sum[r] = 0.0f;
        s->total_max[r] = -INFINITY;
        s->total_sum[r] = 0.0;
    }
}

static void finish_rows(const struct job *job, const struct span *span, struct scratch *s)
{
    const struct tv_verify_attn *a = job->args;
    int64_t row = tv_args_row_base(a, span->b) * a->heads + span->row;
    merge_split(job, s, 0, span->count);
    for (int32_t r = 0; r < span->count; r++) {
        const double *total = s->total + (int64_t)r * a->latent_dim;
        double factor = 1.0 / s->total_sum[r];
        int64_t base = (row + r) * a->latent_dim;
        if (a->out_dtype == TV_F32) {
            job->micro->narrow(a->latent_dim, total, factor, (float *)a->out + base);
        }
        for (int32_t d = 0; a->out_dtype != TV_F32 && d < a->latent_dim; d++) {
            tv_store_f32(a->out, a->out_dtype, base + d, (float)(total[d] * factor));
        }
        a->lse[row + r] = (float)(s->total_max[r] + log(s->total_sum[r]));
    }
}

static int32_t item_count(const struct job *job, int32_t b)
{
    return (job->args->node_count[b] * job->args->heads + job->block - 1) / job->block;
}

static struct span find_span(const struct job *job, int32_t item)
{
    const struct tv_verify_attn *a = job->args;
    struct span span = {0};
    while (item >= item_count(job, span.b)) {
        item -= item_count(job, span.b);
        span.b++;
    }
    int32_t rows = a->node_count[span.b] * a->heads;
    span.row = item * job->block;
    span.count = rows - span.row < job->block ? rows - span.row : job->block;
    span.split_tiles = SPLIT_TILES;
    if (a->splits > 0) {
        int32_t tokens = a->prefix_len[span.b] + a->node_count[span.b];
        int32_t tiles = (tokens + TV_CPU_TILE - 1) / TV_CPU_TILE;
        span.split_tiles = (tiles + a->splits - 1) / a->splits;
    }
    return span;
}

static void run_block(void *arg, int32_t item, int32_t thread)
{
    const struct job *job = arg;
    const struct tv_verify_attn *a = job->args;
    struct span span = find_span(job, item);
    struct scratch s = {.q = NULL};
    const float *rows[2][TV_CPU_TILE];
    (void)carve(a, job->amx, (char *)a->workspace + (size_t)thread * job->scratch_bytes, &s);
    start_rows(job, &span, &s);
    int32_t full = a->prefix_len[span.b] / TV_CPU_TILE;
    if (job->amx && full > 0) {
        job->amx->pack_queries(span.count, job->dim, s.q, s.queries);
    }
    for (int32_t tile = 0; tile < full; tile++) {
        /* Widened rows share one buffer, so those of the next tile cannot be known ahead. */
        const int ahead = a->dtype == TV_F32 && tile + 1 < full;
        const float **now = rows[tile % 2], **next = rows[(tile + 1) % 2];
        if (tile == 0 || a->dtype != TV_F32) {
            tile_rows(job, span.b, tile * TV_CPU_TILE, TV_CPU_TILE, NULL, s.kv, now);
        }
        if (ahead) {
            tile_rows(job, span.b, (tile + 1) * TV_CPU_TILE, TV_CPU_TILE, NULL, s.kv, next);
        }
        attend_tile(job, &span, &s, 0, span.count, tile, TV_CPU_TILE, now, ahead ? next : NULL,
                    job->amx != NULL);
    }
    for (int32_t from = 0; from < span.count;) {
        int32_t left = a->heads - (span.row + from) % a->heads; /* of this node */
        int32_t count = span.count - from < left ? span.count - from : left;
        attend_path(job, &span, &s, from, count);
        from += count;
    }
    finish_rows(job, &span, &s);
}

size_t tv_cpu_verify_attn_workspace(const struct tv_kernels *k, const struct tv_verify_attn *args)
{
    return carve(args, pick_amx(k, args), NULL, NULL) *
           (size_t)tv_cpu_pool_threads(tv_cpu_of(k)->pool);
}

/* Small calls get small blocks, so that every thread has one. */
static int32_t block_rows(const struct tv_verify_attn *args, const struct tv_cpu_amx *amx,
                          int32_t threads)
{
    const int32_t unit = amx ? TV_CPU_AMX_ROWS : 4, most = block_max(amx);
    int64_t rows = 0;
    for (int32_t b = 0; b < args->batch; b++) {
        rows += (int64_t)args->node_count[b] * args->heads;
    }
    int64_t share = (rows + threads - 1) / threads;
    share = (share + unit - 1) / unit * unit;
    return share < most ? (int32_t)share : most;
}

int tv_cpu_verify_attn(struct tv_kernels *k, const struct tv_verify_attn *args)
{
    int rc = tv_args_verify_attn(args);
    if (rc != 0) {
        return rc;
    }
    if (args->workspace_bytes < tv_cpu_verify_attn_workspace(k, args)) {
        return -ENOSPC;
    }
    const struct tv_cpu_amx *amx = pick_amx(k, args);
    struct job job = {
        .args = args,
        .micro = tv_cpu_of(k)->micro,
        .pool = tv_cpu_of(k)->pool,
        .amx = amx,
        .dim = args->latent_dim + args->rope_dim,
        .block = block_rows(args, amx, tv_cpu_pool_threads(tv_cpu_of(k)->pool)),
        .scratch_bytes = carve(args, amx, NULL, NULL),
    };
    int32_t items = 0;
    int64_t work = 0;
    for (int32_t b = 0; b < args->batch; b++) {
        items += item_count(&job, b);
        work += (int64_t)args->node_count[b] * args->heads * job.dim *
                ((int64_t)args->prefix_len[b] + args->node_count[b]);
        tv_ref_verify_attn_padding(args, b);
    }
    tv_cpu_run(k, items, work, run_block, &job);
    return 0;
}
