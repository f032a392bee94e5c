/*
 * test_kernels_synthesize.c - synthetic weights: known values of another implementation of the
 * generator, both orders of a matrix, rounding, and what is refused.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <errno.h>
#include <math.h>

#include "kernels/kernels.h"
#include "kernels/philox.h"

#define SEED   0x0123456789abcdefu
#define TENSOR 77u
#define COUNT  12

/* u * 2^23 of the first values, by an implementation in Python that gives Random123's own answers.
 */
static const int32_t known[COUNT] = {-6362607, -7808102, 5213975,  -5728437, -8107530, -1433206,
                                     1299490,  -8189512, -1055173, 8020541,  5156221,  -863470};

static struct tv_kernels *open_ref(void)
{
    struct tv_kernels *k = NULL;
    assert_int_equal(tv_kernels_create("ref", NULL, &k), 0);
    return k;
}

static struct tv_synthesize args_of(void *to, enum tv_dtype dtype)
{
    return (struct tv_synthesize){.groups = 2,
                                  .rows = 3,
                                  .cols = 2,
                                  .dtype = dtype,
                                  .scale = 0.5f,
                                  .offset = 1.0f,
                                  .seed = SEED,
                                  .tensor = TENSOR,
                                  .to = to};
}

static float value_of(int32_t index)
{
    return fmaf(0.5f, (float)known[index] * 0x1p-23f, 1.0f);
}

static void test_known_values(void **state)
{
    (void)state;
    struct tv_kernels *k = open_ref();
    float f32[COUNT];
    uint16_t bf16[COUNT];
    struct tv_synthesize args = args_of(f32, TV_F32);
    assert_int_equal(k->synthesize(k, &args), 0);
    args = args_of(bf16, TV_BF16);
    assert_int_equal(k->synthesize(k, &args), 0);
    for (int32_t i = 0; i < COUNT; i++) {
        assert_true(f32[i] == value_of(i));
        assert_int_equal(bf16[i], tv_f32_to_bf16(value_of(i)));
    }
    k->destroy(k);
}

/* Behind 2^34 values the high word of the block counts. */
static void test_blocks_beyond_32_bits(void **state)
{
    static const int32_t far[4] = {6508885, 1127092, 1448152, -4823352};
    struct tv_philox_block block = tv_philox_weights(SEED, TENSOR, ((uint64_t)1 << 32) + 5);
    (void)state;
    for (int i = 0; i < 4; i++) {
        assert_true(tv_philox_signed(block.word[i]) == (float)far[i] * 0x1p-23f);
    }
    assert_true(tv_philox_signed(0) == -1.0f);
    assert_true(tv_philox_signed(UINT32_MAX) == 1.0f - 0x1p-23f);
}

/* The same matrices with rows and columns exchanged; group after group. */
static void test_transposed(void **state)
{
    (void)state;
    struct tv_kernels *k = open_ref();
    float turned[COUNT];
    struct tv_synthesize args = args_of(turned, TV_F32);
    args.transposed = 1;
    assert_int_equal(k->synthesize(k, &args), 0);
    for (int32_t g = 0; g < 2; g++) {
        for (int32_t r = 0; r < 3; r++) {
            for (int32_t c = 0; c < 2; c++) {
                assert_true(turned[(g * 2 + c) * 3 + r] == value_of((g * 3 + r) * 2 + c));
            }
        }
    }
    k->destroy(k);
}

static void test_seeds_and_tensors_differ(void **state)
{
    (void)state;
    struct tv_kernels *k = open_ref();
    float first[COUNT], other[COUNT];
    struct tv_synthesize args = args_of(first, TV_F32);
    assert_int_equal(k->synthesize(k, &args), 0);
    for (int which = 0; which < 2; which++) {
        args = args_of(other, TV_F32);
        args.seed += which == 0;
        args.tensor += which == 1;
        assert_int_equal(k->synthesize(k, &args), 0);
        for (int32_t i = 0; i < COUNT; i++) {
            assert_true(first[i] != other[i]);
        }
    }
    k->destroy(k);
}

static void test_refusals(void **state)
{
    (void)state;
    struct tv_kernels *k = open_ref();
    float to[COUNT];
    const struct tv_synthesize good = args_of(to, TV_F32);
    struct tv_synthesize bad[6] = {good, good, good, good, good, good};
    bad[0].groups = 0;
    bad[1].rows = 0;
    bad[2].cols = -1;
    bad[3].dtype = TV_F16;
    bad[4].to = NULL;
    bad[5].groups = bad[5].rows = bad[5].cols = INT32_MAX;
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        assert_int_equal(k->synthesize(k, &bad[i]), -EINVAL);
    }
    k->destroy(k);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_known_values), cmocka_unit_test(test_blocks_beyond_32_bits),
        cmocka_unit_test(test_transposed),   cmocka_unit_test(test_seeds_and_tensors_differ),
        cmocka_unit_test(test_refusals),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
