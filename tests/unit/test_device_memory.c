/*
 * test_device_memory.c - F25: how many pages a device has room for, the start's table of its
 * memory, and the words about a device.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "device_memory.h"

#define MIB ((size_t)1 << 20)

static struct tv_device_room room_of(size_t free_bytes, double share)
{
    return (struct tv_device_room){.free_bytes = free_bytes,
                                   .reserve_bytes = 512 * MIB,
                                   .graphs_bytes = 256 * MIB,
                                   .page_bytes = 2 * MIB,
                                   .page_size = 64,
                                   .share = share};
}

static int64_t pages(size_t free_bytes, double share)
{
    const struct tv_device_room room = room_of(free_bytes, share);
    return tv_device_memory_pages(&room);
}

static void test_pages_are_what_is_left(void **state)
{
    (void)state;
    assert_int_equal(pages(768 * MIB, 1.0), 0);
    assert_int_equal(pages(770 * MIB - 1, 1.0), 0); /* a page's last byte is missing */
    assert_int_equal(pages(770 * MIB, 1.0), 1);
    assert_int_equal(pages(140000 * MIB, 1.0), (140000 - 768) / 2);
    assert_int_equal(pages(0, 1.0), 0);
}

static void test_a_share_is_of_the_rest(void **state)
{
    (void)state;
    assert_int_equal(pages(1168 * MIB, 0.5), 100);
    assert_int_equal(pages(1168 * MIB, 0.25), 50);
    assert_int_equal(pages(1168 * MIB, 1e-9), 0);
}

static void test_nothing_overflows(void **state)
{
    (void)state;
    struct tv_device_room room = room_of(SIZE_MAX, 1.0);
    assert_int_equal(tv_device_memory_pages(&room), INT32_MAX / 64);
    room.share = 0.99999999999999989; /* rounds to no more than there is */
    assert_int_equal(tv_device_memory_pages(&room), INT32_MAX / 64);
    room.reserve_bytes = SIZE_MAX;
    assert_int_equal(tv_device_memory_pages(&room), 0);
}

static void test_graphs_grow_with_both(void **state)
{
    (void)state;
    size_t one = tv_device_memory_graphs(1, 1);
    assert_true(one >= MIB); /* two dozen kernels of 64 KiB */
    assert_int_equal(tv_device_memory_graphs(100, 27), 2700 * one);
    assert_int_equal(tv_device_memory_graphs(0, 27), 0);
}

static void test_parts_add_up(void **state)
{
    (void)state;
    const struct tv_device_memory memory = {.total = 1000 * MIB,
                                            .begun = 900 * MIB,
                                            .loaded = 500 * MIB,
                                            .pooled = 200 * MIB,
                                            .ready = 150 * MIB,
                                            .weights = 300 * MIB,
                                            .pages = 300 * MIB};
    size_t parts[TV_DEVICE_PARTS], sum = 0;
    char text[200];
    tv_device_memory_parts(&memory, parts);
    for (int i = 0; i < TV_DEVICE_PARTS; i++) {
        sum += parts[i];
    }
    assert_int_equal(sum, memory.total);
    assert_int_equal(parts[TV_DEVICE_SCRATCH], 100 * MIB);
    assert_int_equal(parts[TV_DEVICE_GRAPHS], 50 * MIB);
    tv_device_memory_text(&memory, text, sizeof text);
    assert_string_equal(text, "of 1000 MiB: contexts and others 100, weights 300, scratch 100, "
                              "pages 300, graphs 50, reserve 150");
    tv_device_memory_text(&memory, text, 12); /* cut, with its end */
    assert_string_equal(text, "of 1000 MiB");
}

/* Another process may give memory back while this one starts. */
static void test_differences_are_never_negative(void **state)
{
    (void)state;
    const struct tv_device_memory memory = {
        .total = 100, .begun = 120, .loaded = 130, .pooled = 140, .ready = 150, .weights = 10};
    size_t parts[TV_DEVICE_PARTS];
    tv_device_memory_parts(&memory, parts);
    assert_int_equal(parts[TV_DEVICE_OTHERS], 0);
    assert_int_equal(parts[TV_DEVICE_SCRATCH], 0);
    assert_int_equal(parts[TV_DEVICE_GRAPHS], 0);
}

static int facts(const struct tv_kernels *k, struct tv_device *ret_device)
{
    (void)k;
    *ret_device = (struct tv_device){.major = 9,
                                     .minor = 0,
                                     .driver = 12090,
                                     .toolkit = 13000,
                                     .image = 90,
                                     .images = "sm_90 sm_120 compute_120"};
    return 0;
}

static void test_words_about_a_device(void **state)
{
    (void)state;
    struct tv_kernels kernels = {.variant = "NVIDIA H200 sm_90", .device = facts};
    char text[300];
    tv_device_memory_describe(&kernels, text, sizeof text);
    assert_string_equal(text, "NVIDIA H200 sm_90, compute capability 9.0, driver for CUDA 12.9, "
                              "toolkit 13.0, images sm_90 sm_120 compute_120, running sm_90");
    kernels.device = NULL; /* the host */
    tv_device_memory_describe(&kernels, text, sizeof text);
    assert_string_equal(text, "");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_pages_are_what_is_left),
        cmocka_unit_test(test_a_share_is_of_the_rest),
        cmocka_unit_test(test_nothing_overflows),
        cmocka_unit_test(test_graphs_grow_with_both),
        cmocka_unit_test(test_parts_add_up),
        cmocka_unit_test(test_differences_are_never_negative),
        cmocka_unit_test(test_words_about_a_device),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
