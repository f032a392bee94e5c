/*
 * linear_sm90_launch.cuh - maps and launches of linear_sm90.cuh.
 */
#ifndef TV_KERNELS_CUDA_LINEAR_SM90_LAUNCH_CUH
#define TV_KERNELS_CUDA_LINEAR_SM90_LAUNCH_CUH

#include "launch.cuh"
#include "linear_sm90.cuh"

typedef CUresult (*tv_cuda_encode_fn)(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *,
                                      const cuuint64_t *, const cuuint64_t *, const cuuint32_t *,
                                      const cuuint32_t *, CUtensorMapInterleave, CUtensorMapSwizzle,
                                      CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

/* [groups][rows][k] of bf16, strides in elements; a box is one unit of k of box_rows rows.
 * -ENOTSUP: the driver makes no such map. */
static int sm90_encode(const struct tv_cuda *cuda, const void *at, int32_t k, int32_t rows,
                       int32_t groups, int64_t row_stride, int64_t group_stride, int32_t box_rows,
                       CUtensorMap *ret_map)
{
    cuuint64_t dims[3] = {(cuuint64_t)k, (cuuint64_t)rows, (cuuint64_t)groups};
    cuuint64_t strides[2] = {(cuuint64_t)row_stride * 2, (cuuint64_t)group_stride * 2};
    cuuint32_t box[3] = {SM90_UNIT, (cuuint32_t)box_rows, 1}, steps[3] = {1, 1, 1};
    tv_cuda_encode_fn encode = (tv_cuda_encode_fn)cuda->tensor_map_encode;
    CUresult result =
        encode(ret_map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 3, (void *)at, dims, strides, box, steps,
               CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
               CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    return result == CUDA_SUCCESS ? 0 : -ENOTSUP;
}

template <typename S, int PIECES>
static int sm90_rows_launch(const struct tv_kernels *k, const S &s, int32_t rows, int32_t depth,
                            int64_t apart, void *to)
{
    const struct tv_cuda *cuda = (const struct tv_cuda *)k->impl;
    int64_t blocks = ((int64_t)rows * ((depth + 31) / 32 * 4) + 255) / 256;
    int64_t most = (int64_t)cuda->sm_count * 16;
    return launch(sm90_rows<S, PIECES>, dim3((uint32_t)(blocks < most ? blocks : most)), 256, 0,
                  tv_cuda_stream(k), s, rows, depth, apart, (__nv_bfloat16 *)to);
}

/* Rows of a tile: what takes the fewest rounds of all multiprocessors, counting what a tile costs
 * beside its rows. */
static inline int32_t sm90_tile_rows(int32_t sms, int32_t most, int32_t rows, int64_t columns)
{
    int32_t best = most;
    int64_t least = INT64_MAX;
    for (int32_t t = most; t >= most / 4; t -= most / 4) {
        int64_t cost = ((rows + t - 1) / t * columns + sms - 1) / sms * (t + most / 4);
        if (cost < least) {
            least = cost;
            best = t;
        }
    }
    return best;
}

template <typename P> static int sm90_launch(const struct tv_kernels *k, const P &p, int64_t items)
{
    const struct tv_cuda *cuda = (const struct tv_cuda *)k->impl;
    int64_t blocks = items < cuda->sm_count ? items : cuda->sm_count;
    return launch(linear_sm90<P>, dim3((uint32_t)blocks), SM90_THREADS, sm90_ring<P::pieces>::bytes,
                  tv_cuda_stream(k), p);
}

#endif
