/*
 * curve.c - what a verify of n nodes costs here: running medians per power of two, measured.
 */
#include <stdlib.h>

#include "sched/job.h"

#define SAMPLES ((int32_t)(sizeof((struct curve_point *)0)->us / sizeof(int64_t)))

void tv_sched_curve_add(struct curve_point *points, int32_t nodes, int64_t us)
{
    int32_t i = 0;
    while (i < TV_SCHED_CURVE_POINTS - 1 && (1 << i) < nodes) {
        i++;
    }
    struct curve_point *point = &points[i];
    point->us[point->next] = us;
    point->next = (point->next + 1) % SAMPLES;
    point->count += point->count < SAMPLES ? 1 : 0;
}

static int compare(const void *left, const void *right)
{
    int64_t a = *(const int64_t *)left, b = *(const int64_t *)right;
    return (a > b) - (a < b);
}

int32_t tv_sched_curve_read(const struct curve_point *points, int64_t (*ret_pairs)[2])
{
    int32_t pairs = 0;
    for (int32_t i = 0; i < TV_SCHED_CURVE_POINTS; i++) {
        int32_t count = points[i].count;
        if (count > 0) {
            struct curve_point sorted = points[i];
            qsort(sorted.us, (size_t)count, sizeof sorted.us[0], compare);
            ret_pairs[pairs][0] = 1 << i;
            ret_pairs[pairs][1] = sorted.us[count / 2];
            pairs++;
        }
    }
    return pairs;
}
