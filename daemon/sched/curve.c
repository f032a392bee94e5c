/*
 * curve.c - what a verify of n nodes costs here: running medians per power of two, measured.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "sched/job.h"

#define SAMPLES ((int32_t)(sizeof((struct curve_point *)0)->us / sizeof(int64_t)))

static int32_t point_of(int32_t nodes)
{
    int32_t i = 0;
    while (i < TV_SCHED_CURVE_POINTS - 1 && (1 << i) < nodes) {
        i++;
    }
    return i;
}

void tv_sched_curve_add(struct curve_point *points, int32_t nodes, int64_t us)
{
    struct curve_point *point = &points[point_of(nodes)];
    point->us[point->next] = us;
    point->next = (point->next + 1) % SAMPLES;
    point->count += point->count < SAMPLES ? 1 : 0;
}

static int compare(const void *left, const void *right)
{
    int64_t a = *(const int64_t *)left, b = *(const int64_t *)right;
    return (a > b) - (a < b);
}

static int64_t median(const struct curve_point *point)
{
    struct curve_point sorted = *point;
    qsort(sorted.us, (size_t)sorted.count, sizeof sorted.us[0], compare);
    return sorted.us[sorted.count / 2];
}

int64_t tv_sched_curve_median(const struct curve_point *points, int32_t nodes)
{
    const struct curve_point *point = &points[point_of(nodes)];
    return point->count > 0 ? median(point) : -1;
}

int32_t tv_sched_curve_read(const struct curve_point *points, int64_t (*ret_pairs)[2])
{
    int32_t pairs = 0;
    for (int32_t i = 0; i < TV_SCHED_CURVE_POINTS; i++) {
        if (points[i].count > 0) {
            ret_pairs[pairs][0] = 1 << i;
            ret_pairs[pairs][1] = median(&points[i]);
            pairs++;
        }
    }
    return pairs;
}

/* How far the line between its neighbours is from point i, as a share of it. */
static double off_line(const int64_t (*pairs)[2], int32_t i)
{
    double before_n = (double)pairs[i - 1][0], before_us = (double)pairs[i - 1][1];
    double share = ((double)pairs[i][0] - before_n) / ((double)pairs[i + 1][0] - before_n);
    double line_us = before_us + share * ((double)pairs[i + 1][1] - before_us);
    double us = fmax((double)pairs[i][1], 1.0);
    return fabs(line_us - us) / us;
}

int32_t tv_sched_curve_thin(int64_t (*pairs)[2], int32_t count, int32_t nodes, int32_t nodes_max)
{
    while (count > 1 && pairs[count - 2][0] >= nodes_max) {
        count--; /* launches of several trees: no tree is that large */
    }
    while (count > TV_SCHED_HINT_POINTS) {
        int32_t least = 0;
        double least_off = INFINITY;
        for (int32_t i = 1; i < count - 1; i++) {
            int is_own = pairs[i - 1][0] < nodes && pairs[i][0] >= nodes;
            double off = is_own ? INFINITY : off_line((const int64_t(*)[2])pairs, i);
            if (least == 0 || off < least_off) {
                least = i;
                least_off = off;
            }
        }
        memmove(pairs[least], pairs[least + 1], (size_t)(count - 1 - least) * sizeof pairs[0]);
        count--;
    }
    return count;
}
