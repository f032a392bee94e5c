/*
 * The feed against an array that forgets nothing: what a reader finds, at whatever pace it reads,
 * is all there was, in order, or it is told exactly what it has missed.
 */
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/feed.h"

static size_t scaled(size_t count)
{
    const char *scale = getenv("TV_TEST_SCALE");
    double factor = scale != NULL ? atof(scale) : 1.0;
    return (size_t)((double)count * factor) + 1;
}

/* Text of a number: the number and then so many dots, so that a torn or swapped one is seen. */
static char *text_of(int32_t number, size_t bytes)
{
    char *text = malloc(bytes + 16);
    assert_non_null(text);
    int head = snprintf(text, 16, "%d:", number);
    memset(text + head, '.', bytes);
    text[(size_t)head + bytes] = '\0';
    return text;
}

static void push(struct tv_feed *feed, int32_t number, size_t bytes)
{
    char *text = text_of(number, bytes);
    tv_feed_push(feed, number, text, strlen(text));
}

/* The next find, checked; returns its number, -1: nothing, or the lost range negated in *ret_lost.
 */
static int32_t take(struct tv_feed *feed, struct tv_feed_cursor *cursor, int32_t *ret_from,
                    int32_t *ret_to)
{
    char *text = NULL;
    size_t bytes = 0;
    *ret_from = *ret_to = -1;
    switch (tv_feed_read(feed, cursor, &text, &bytes, ret_from, ret_to)) {
    case TV_FEED_TEXT: {
        int32_t number = (int32_t)strtol(text, NULL, 10);
        assert_int_equal(number, cursor->last);
        assert_int_equal(strlen(text), bytes);
        const char *dots = strchr(text, ':') + 1;
        assert_int_equal(strspn(dots, "."), strlen(dots));
        free(text);
        return number;
    }
    case TV_FEED_LOST:
        assert_true(*ret_from <= *ret_to);
        assert_int_equal(cursor->last, *ret_to);
        return -2;
    case TV_FEED_NOTHING:
        break;
    case TV_FEED_NO_MEMORY:
        fail_msg("no memory");
    }
    return -1;
}

static void test_follow_and_resume(void **state)
{
    struct tv_feed *feed = tv_feed_create();
    struct tv_feed_cursor fresh, begin, middle, newest;
    int32_t from, to;
    (void)state;
    assert_non_null(feed);
    push(feed, 1, 5);
    push(feed, 3, 0); /* numbers may leave some out */
    push(feed, 4, 7);
    tv_feed_follow(feed, 4, 0, &fresh);
    tv_feed_follow(feed, 0, 1, &begin);
    tv_feed_follow(feed, 2, 1, &middle);
    tv_feed_follow(feed, 4, 1, &newest);
    assert_int_equal(tv_feed_readers(feed), 4);
    assert_false(tv_feed_waits(feed, &fresh));
    assert_false(tv_feed_waits(feed, &newest));
    assert_true(tv_feed_waits(feed, &begin));
    assert_int_equal(take(feed, &begin, &from, &to), 1);
    assert_int_equal(take(feed, &begin, &from, &to), 3);
    assert_int_equal(take(feed, &begin, &from, &to), 4);
    assert_int_equal(take(feed, &begin, &from, &to), -1);
    assert_int_equal(take(feed, &middle, &from, &to), 3);
    push(feed, 9, 1);
    assert_int_equal(take(feed, &fresh, &from, &to), 9);
    assert_int_equal(take(feed, &newest, &from, &to), 9);
    assert_int_equal(take(feed, &middle, &from, &to), 4);
    for (int i = 0; i < 4; i++) {
        tv_feed_leave(feed);
    }
    assert_int_equal(tv_feed_readers(feed), 0);
    tv_feed_unref(feed);
    tv_feed_unref(NULL);
}

static void test_the_end(void **state)
{
    struct tv_feed *feed = tv_feed_create();
    struct tv_feed_cursor cursor;
    int32_t from, to;
    (void)state;
    tv_feed_follow(feed, 0, 1, &cursor);
    push(feed, 1, 3);
    assert_int_equal(tv_feed_ended(feed), 0);
    tv_feed_end(feed, 2);
    tv_feed_end(feed, 1); /* the first one stays */
    push(feed, 2, 3);     /* and nothing comes behind it */
    assert_int_equal(tv_feed_ended(feed), 2);
    assert_int_equal(take(feed, &cursor, &from, &to), 1);
    assert_int_equal(take(feed, &cursor, &from, &to), -1);
    assert_true(tv_feed_waits(feed, &cursor)); /* for the end, which is news */
    struct tv_feed *held = tv_feed_ref(feed);
    tv_feed_unref(feed); /* the source is gone, its reader is not */
    assert_int_equal(tv_feed_ended(held), 2);
    tv_feed_leave(held);
    tv_feed_unref(held);
}

static void test_caps(void **state)
{
    struct tv_feed *feed = tv_feed_create();
    struct tv_feed_cursor cursor, late;
    int32_t from, to;
    (void)state;
    tv_feed_follow(feed, 0, 1, &cursor);
    for (int32_t i = 1; i <= TV_FEED_TEXTS_MAX; i++) {
        push(feed, i, 1);
    }
    assert_int_equal(take(feed, &cursor, &from, &to), 1); /* at the number nothing is lost */
    push(feed, TV_FEED_TEXTS_MAX + 1, 1);
    push(feed, TV_FEED_TEXTS_MAX + 2, 1);
    assert_int_equal(take(feed, &cursor, &from, &to), -2); /* 1 was read, 2 was not */
    assert_int_equal(from, 2);
    assert_int_equal(to, 2);
    assert_int_equal(take(feed, &cursor, &from, &to), 3);
    push(feed, 100, TV_FEED_BYTES_MAX + 1); /* larger than all may be: alone */
    assert_int_equal(take(feed, &cursor, &from, &to), -2);
    assert_int_equal(from, 4);
    assert_int_equal(to, TV_FEED_TEXTS_MAX + 2);
    assert_int_equal(take(feed, &cursor, &from, &to), 100);
    push(feed, 101, TV_FEED_BYTES_MAX - 4); /* with its four in front just what there may be */
    push(feed, 102, 0);
    tv_feed_follow(feed, 100, 1, &late);
    assert_int_equal(take(feed, &late, &from, &to), -2);
    assert_int_equal(from, 101);
    assert_int_equal(to, 101);
    assert_int_equal(take(feed, &late, &from, &to), 102);
    tv_feed_push(feed, 103, NULL, 0); /* one that could not be written, and what stood before it */
    assert_int_equal(take(feed, &late, &from, &to), -2);
    assert_int_equal(from, 103);
    assert_int_equal(to, 103);
    assert_int_equal(take(feed, &late, &from, &to), -1);
    push(feed, 104, 2);
    assert_int_equal(take(feed, &late, &from, &to), 104);
    tv_feed_unref(feed);
}

static uint64_t random_next(uint64_t *state)
{
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return *state >> 33;
}

/* What a reader that has `last` behind it must find in what was written. */
struct history {
    int32_t *numbers;
    size_t *bytes;
    size_t count, kept; /* numbers[kept..count) are there */
};

static void forget(struct history *history)
{
    size_t bytes = 0;
    for (size_t i = history->count; i-- > history->kept;) {
        bytes += history->bytes[i];
        if (history->count - i > TV_FEED_TEXTS_MAX ||
            (bytes > TV_FEED_BYTES_MAX && i + 1 < history->count)) {
            history->kept = i + 1;
            return;
        }
    }
}

static void check_read(const struct history *history, struct tv_feed *feed,
                       struct tv_feed_cursor *cursor)
{
    int32_t from, to, last = cursor->last;
    size_t at = 0;
    while (at < history->count && history->numbers[at] <= last) {
        at++;
    }
    int32_t found = take(feed, cursor, &from, &to);
    if (at < history->kept) {
        assert_int_equal(found, -2);
        assert_int_equal(from, last + 1);
        assert_int_equal(to, history->numbers[history->kept - 1]);
    } else {
        assert_int_equal(found, at < history->count ? history->numbers[at] : -1);
    }
}

static void test_random(void **state)
{
    size_t steps = scaled(100000);
    struct history history = {.numbers = calloc(steps, sizeof(int32_t)),
                              .bytes = calloc(steps, sizeof(size_t))};
    struct tv_feed_cursor cursors[5];
    struct tv_feed *feed = tv_feed_create();
    uint64_t random = 7;
    int32_t number = 0;
    (void)state;
    assert_true(history.numbers != NULL && history.bytes != NULL && feed != NULL);
    for (size_t i = 0; i < 5; i++) {
        tv_feed_follow(feed, 0, 1, &cursors[i]);
    }
    for (size_t step = 0; step < steps; step++) {
        size_t which = random_next(&random) % 12;
        if (which < 4) {
            size_t large = random_next(&random) % 64 == 0 ? 12000 : 700;
            size_t dots = random_next(&random) % large;
            number += 1 + (int32_t)(random_next(&random) % 3);
            char *text = text_of(number, dots);
            history.numbers[history.count] = number;
            history.bytes[history.count++] = strlen(text);
            tv_feed_push(feed, number, text, strlen(text));
            forget(&history);
        } else if (which == 4 && random_next(&random) % 4 == 0) {
            size_t i = random_next(&random) % 5;
            tv_feed_leave(feed);
            int32_t back = number - (int32_t)(random_next(&random) % 200);
            tv_feed_follow(feed, back > 0 ? back : 0, 1, &cursors[i]);
        } else {
            size_t i = random_next(&random) % (1 + random_next(&random) % 5); /* some rarely */
            check_read(&history, feed, &cursors[i]);
        }
    }
    free(history.numbers);
    free(history.bytes);
    tv_feed_unref(feed);
}

#define THREADS 3

struct race {
    struct tv_feed *feed;
    int32_t last;
};

static void *race_read(void *context)
{
    const struct race *race = context;
    struct tv_feed_cursor cursor;
    int32_t from, to, last = 0;
    tv_feed_follow(race->feed, 0, 1, &cursor);
    for (;;) {
        int over = tv_feed_ended(race->feed);
        int32_t found = take(race->feed, &cursor, &from, &to);
        if (found == -2) {
            assert_int_equal(from, last + 1);
            last = to;
        } else if (found > 0) {
            assert_int_equal(found, last + 1);
            last = found;
        } else if (over) {
            break;
        }
    }
    tv_feed_leave(race->feed);
    assert_int_equal(last, race->last); /* every number was read, or told as lost */
    tv_feed_unref(race->feed);
    return NULL;
}

static void test_threads(void **state)
{
    struct race race = {.feed = tv_feed_create(), .last = (int32_t)scaled(20000)};
    pthread_t threads[THREADS];
    (void)state;
    for (size_t i = 0; i < THREADS; i++) {
        (void)tv_feed_ref(race.feed);
        assert_int_equal(pthread_create(&threads[i], NULL, race_read, &race), 0);
    }
    for (int32_t number = 1; number <= race.last; number++) {
        push(race.feed, number, (size_t)number % 300);
        tv_feed_note_set(race.feed, number);
    }
    tv_feed_end(race.feed, 1);
    for (size_t i = 0; i < THREADS; i++) {
        assert_int_equal(pthread_join(threads[i], NULL), 0);
    }
    assert_int_equal(tv_feed_note(race.feed), race.last);
    assert_int_equal(tv_feed_readers(race.feed), 0);
    tv_feed_unref(race.feed);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_follow_and_resume),
        cmocka_unit_test(test_the_end),
        cmocka_unit_test(test_caps),
        cmocka_unit_test(test_random),
        cmocka_unit_test(test_threads),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
