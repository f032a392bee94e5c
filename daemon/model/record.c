/*
 * record.c - the verify passes that a backend has recorded.
 *
 * Owns which shapes are recorded: for one tree every small number of rows and then four to each
 * doubling, for several trees two to each doubling, for more than COUNT_MAX none, since launches
 * of so many rows keep the device busier than the host. A pass takes the smallest that holds it
 * and fills it up with rows that belong to no tree.
 */
#include <errno.h>
#include <stdlib.h>

#include "model/model_impl.h"

#define ROWS_EACH    16 /* up to here one tree has a recording for every number of rows */
#define ROWS_SEVERAL 8  /* the fewest rows recorded for several trees */
#define COUNT_MAX    8  /* trees */

static int32_t rows_next(int32_t rows, int32_t count)
{
    int32_t step = 1, part = count > 1 ? 4 : 8;
    while (part * step <= rows) {
        step *= 2;
    }
    return count == 1 && rows < ROWS_EACH ? rows + 1 : rows + step;
}

static int32_t rows_first(int32_t count)
{
    int32_t rows = count == 1 ? 1 : ROWS_SEVERAL;
    while (rows < count) {
        rows = rows_next(rows, count);
    }
    return rows;
}

static int32_t count_max(const struct tv_model *model)
{
    const struct tv_model_options *options = &model->options;
    int32_t most =
        options->requests_max < options->rows_max ? options->requests_max : options->rows_max;
    return most < COUNT_MAX ? most : COUNT_MAX;
}

int64_t tv_model_record_count(const struct tv_model *model)
{
    int64_t recordings = 0;
    for (int32_t count = 1; model->kernels->record_begin != NULL && count <= count_max(model);
         count++) {
        recordings++; /* the last one, of rows_max */
        for (int32_t rows = rows_first(count); rows < model->options.rows_max;
             rows = rows_next(rows, count)) {
            recordings++;
        }
    }
    return recordings;
}

static int recording_add(struct tv_model *model, struct tv_cache *cache, int32_t rows,
                         int32_t count)
{
    if (model->recording_count == model->recording_capacity) {
        size_t capacity = model->recording_capacity > 0 ? 2 * model->recording_capacity : 64;
        struct tv_model_recording *grown =
            realloc(model->recordings, capacity * sizeof *model->recordings);
        if (grown == NULL) {
            return -ENOMEM;
        }
        model->recordings = grown;
        model->recording_capacity = capacity;
    }
    struct tv_model_recording recording = {.rows = rows, .count = count};
    int err = tv_model_verify_record(model, cache, rows, count, &recording.handle);
    if (err == 0) {
        model->recordings[model->recording_count++] = recording;
    }
    return err;
}

int tv_model_record(struct tv_model *model, struct tv_cache *cache)
{
    const struct tv_model_options *options = &model->options;
    if (model->kernels->record_begin == NULL) {
        return 0;
    }
    tv_model_recordings_free(model);
    model->recorded = cache;
    for (int32_t count = 1; count <= count_max(model); count++) {
        int32_t rows = rows_first(count);
        for (int last = 0; !last; rows = rows_next(rows, count)) {
            last = rows >= options->rows_max;
            int err = recording_add(model, cache, last ? options->rows_max : rows, count);
            if (err != 0) {
                tv_model_recordings_free(model);
                return err;
            }
        }
    }
    return 0;
}

const struct tv_model_recording *tv_model_recording_find(const struct tv_model *model,
                                                         const struct tv_cache *cache, int32_t rows,
                                                         int32_t count)
{
    for (size_t i = 0; model->recorded == cache && i < model->recording_count; i++) {
        const struct tv_model_recording *recording = &model->recordings[i];
        if (recording->count == count && recording->rows >= rows) {
            return recording; /* those of a count ascend */
        }
    }
    return NULL;
}

void tv_model_recordings_free(struct tv_model *model)
{
    for (size_t i = 0; i < model->recording_count; i++) {
        model->kernels->recording_free(model->kernels, model->recordings[i].handle);
    }
    free(model->recordings);
    model->recordings = NULL;
    model->recording_count = 0;
    model->recording_capacity = 0;
    model->recorded = NULL;
}
