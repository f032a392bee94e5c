/*
 * ref.c - the reference's operation table.
 *
 * Owns nothing but the table: the backend has no state. Both attention slots are the naive one,
 * because the reference has no faster form to offer.
 */
#include "ref.h"

#include <stdlib.h>

static void destroy(struct tv_kernels *k)
{
    free(k);
}

void tv_ref_fill(struct tv_kernels *k)
{
    k->abi = TV_KERNELS_ABI;
    k->name = "ref";
    k->variant = "scalar f64";
    k->host_memory = 1;
    k->alloc = tv_ref_alloc;
    k->free = tv_ref_free;
    k->upload = tv_ref_upload;
    k->download = tv_ref_download;
    k->fill = tv_ref_fill_bytes;
    k->sync = tv_ref_sync;
    k->embed = tv_ref_embed;
    k->rmsnorm = tv_ref_rmsnorm;
    k->linear = tv_ref_linear;
    k->rope = tv_ref_rope;
    k->latent_write = tv_ref_latent_write;
    k->swiglu = tv_ref_swiglu;
    k->to_bf16 = tv_ref_to_bf16;
    k->router = tv_ref_router;
    k->experts = tv_ref_experts;
    k->experts_workspace = tv_ref_experts_workspace;
    k->verify_attn = tv_ref_verify_attn_naive;
    k->verify_attn_workspace = tv_ref_verify_attn_naive_workspace;
    k->verify_attn_naive = tv_ref_verify_attn_naive;
    k->verify_attn_naive_workspace = tv_ref_verify_attn_naive_workspace;
    k->prefill_attn = tv_ref_prefill_attn;
    k->prefill_attn_workspace = tv_ref_prefill_attn_workspace;
    k->kv_move = tv_ref_kv_move;
    k->draw = tv_ref_draw;
    k->draw_workspace = tv_ref_draw_workspace;
    k->topk = tv_ref_topk;
    k->synthesize = tv_ref_synthesize;
    k->copy = tv_ref_copy;
    k->destroy = destroy;
}
