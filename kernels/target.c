/*
 * target.c - a row's filtered distribution on the host, and the noise of rules that draw from it.
 *
 * For acceptance rules that need more of a row than one draw. Shares filters and generator with the
 * reference draw, so that both see the same survivors. Owns nothing; refuses rows that are not
 * finite.
 */
#include <errno.h>
#include <math.h>

#include "kernels.h"
#include "philox.h"
#include "ref/ref.h"

int tv_kernels_target(const float *logits, int32_t vocab, const struct tv_sampling *sampling,
                      uint64_t *keys, int32_t *ids, double *probs, int32_t *ret_count)
{
    double sum = 0.0;
    int32_t count = tv_ref_draw_survivors(logits, vocab, sampling, keys, ids, probs);
    if (count == 0) {
        return -EDOM;
    }
    for (int32_t i = 0; i < count; i++) {
        sum += probs[i];
    }
    for (int32_t i = 0; i < count; i++) {
        probs[i] /= sum;
    }
    *ret_count = count;
    return 0;
}

double tv_kernels_coin(uint64_t seed, int32_t position, int32_t token)
{
    return tv_philox_uniform(
        tv_philox_word(seed, (uint32_t)position, (uint32_t)token, TV_PHILOX_COIN));
}

float tv_kernels_residual_noise(uint64_t seed, int32_t position, int32_t token)
{
    return tv_philox_gumbel(
        tv_philox_word(seed, (uint32_t)position, (uint32_t)token, TV_PHILOX_RESIDUAL));
}
