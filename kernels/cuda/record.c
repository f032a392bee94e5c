/*
 * record.c - recordings: operations captured into a CUDA graph and replayed as one launch.
 *
 * Captures on a stream of its own, since the caller's may be the default stream, which cannot be
 * captured; its kernels have the highest priority. A recording holds device memory from its end to
 * its release; a replay takes none.
 */
#include "ops.h"

int tv_cuda_record_begin(struct tv_kernels *k)
{
    struct tv_cuda *cuda = k->impl;
    if (cuda->recording) {
        return -EINVAL;
    }
    TV_CUDA_ENTER(k);
    if (cuda->record_stream == NULL) {
        int lowest = 0, highest = 0;
        TV_CUDA_CHECK(cudaDeviceGetStreamPriorityRange(&lowest, &highest));
        TV_CUDA_CHECK(
            cudaStreamCreateWithPriority(&cuda->record_stream, cudaStreamNonBlocking, highest));
    }
    TV_CUDA_CHECK(cudaStreamBeginCapture(cuda->record_stream, cudaStreamCaptureModeThreadLocal));
    cuda->recording = 1;
    return 0;
}

int tv_cuda_record_end(struct tv_kernels *k, void **ret_recording)
{
    struct tv_cuda *cuda = k->impl;
    cudaGraph_t graph = NULL;
    cudaGraphExec_t recording = NULL;
    if (!cuda->recording) {
        return -EINVAL;
    }
    cuda->recording = 0;
    int entered = tv_cuda_enter(k); /* whatever comes of it, the capture ends */
    int result = tv_cuda_errno(cudaStreamEndCapture(cuda->record_stream, &graph));
    result = result < 0 ? result : entered;
    if (result == 0) {
        result = tv_cuda_errno(cudaGraphInstantiate(&recording, graph, 0));
    }
    if (result == 0) {
        result = tv_cuda_errno(cudaGraphUpload(recording, (cudaStream_t)k->stream));
    }
    if (graph != NULL) {
        (void)tv_cuda_errno(cudaGraphDestroy(graph)); /* only host memory could leak */
    }
    if (result < 0) {
        tv_cuda_recording_free(k, recording);
        return result;
    }
    tv_cuda_allocation_count(cuda);
    *ret_recording = recording;
    return 0;
}

int tv_cuda_replay(struct tv_kernels *k, void *recording)
{
    TV_CUDA_ENTER(k);
    TV_CUDA_CHECK(cudaGraphLaunch(recording, (cudaStream_t)k->stream));
    return 0;
}

void tv_cuda_recording_free(struct tv_kernels *k, void *recording)
{
    if (recording != NULL) {
        /* A failure shows again at the next checked call. */
        (void)tv_cuda_enter(k);
        (void)tv_cuda_errno(cudaGraphExecDestroy(recording));
    }
}
