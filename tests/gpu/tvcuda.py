"""libtreeverify-cuda through ctypes, on torch tensors.

Owns the mirror of the two structures of kernels.h that a caller needs; refuses to copy, convert or
keep any tensor: what is passed must be contiguous and on the device, and live until the stream is
through with it.

    kernels = Kernels("libtreeverify-cuda.so")
    out, lse = kernels.verify_attn(q, kv_pages, page_table, prefix_len, node_count, parents, scale)
"""

import ctypes
import os

import torch

ABI = 10
F32, BF16 = 0, 1
LATENT, ROPE = 512, 64


class VerifyAttn(ctypes.Structure):
    """struct tv_verify_attn."""

    _fields_ = [
        ("batch", ctypes.c_int32), ("q_len", ctypes.c_int32), ("heads", ctypes.c_int32),
        ("latent_dim", ctypes.c_int32), ("rope_dim", ctypes.c_int32),
        ("softmax_scale", ctypes.c_float), ("dtype", ctypes.c_int), ("out_dtype", ctypes.c_int),
        ("q", ctypes.c_void_p), ("kv_pages", ctypes.c_void_p), ("page_count", ctypes.c_int64),
        ("page_size", ctypes.c_int32), ("max_pages", ctypes.c_int32),
        ("page_table", ctypes.c_void_p), ("prefix_len", ctypes.c_void_p),
        ("node_count", ctypes.c_void_p), ("parents", ctypes.c_void_p),
        ("row_start", ctypes.c_void_p), ("kv_len_max", ctypes.c_int32),
        ("splits", ctypes.c_int32), ("round_p_bf16", ctypes.c_int32), ("sum_f32", ctypes.c_int32),
        ("blocks_max", ctypes.c_int32),
        ("out", ctypes.c_void_p), ("lse", ctypes.c_void_p), ("workspace", ctypes.c_void_p),
        ("workspace_bytes", ctypes.c_size_t),
    ]


SLOTS = ["alloc", "free", "upload", "download", "fill", "sync", "embed", "rmsnorm",
         "linear", "rope", "latent_write", "swiglu", "to_bf16", "router", "experts",
         "experts_workspace", "verify_attn", "verify_attn_workspace",
         "verify_attn_naive", "verify_attn_naive_workspace", "prefill_attn",
         "prefill_attn_workspace", "kv_move", "draw", "draw_workspace", "topk",
         "linear_pair", "query", "moe", "moe_workspace", "layer", "record_begin",
         "record_end", "replay", "recording_free", "progress", "synthesize", "device", "device_memory",
         "allocations", "copy", "timer",
         "timer_read", "side", "destroy"]


class Table(ctypes.Structure):
    """struct tv_kernels."""

    _fields_ = [("abi", ctypes.c_uint32), ("name", ctypes.c_char_p), ("variant", ctypes.c_char_p),
                ("host_memory", ctypes.c_int32), ("stream", ctypes.c_void_p),
                ("impl", ctypes.c_void_p)] + [(slot, ctypes.c_void_p) for slot in SLOTS]


RUN = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.POINTER(VerifyAttn))
SIZE = ctypes.CFUNCTYPE(ctypes.c_size_t, ctypes.c_void_p, ctypes.POINTER(VerifyAttn))


def check(result, what):
    if result != 0:
        raise RuntimeError(f"{what}: {os.strerror(-result)}")


class Kernels:
    """One table on the current device and the given (default: torch's current) stream."""

    def __init__(self, library, stream=None):
        self.library = ctypes.CDLL(library)
        stream = stream or torch.cuda.current_stream()
        self.table = ctypes.POINTER(Table)()
        check(self.library.tv_cuda_create(ctypes.c_int(torch.cuda.current_device()),
                                          ctypes.c_void_p(stream.cuda_stream),
                                          ctypes.byref(self.table)), "tv_cuda_create")
        t = self.table.contents
        if t.abi != ABI:
            raise RuntimeError(f"ABI {t.abi}, expected {ABI}")
        self.variant = t.variant.decode()
        self.run = {False: RUN(t.verify_attn), True: RUN(t.verify_attn_naive)}
        self.size = {False: SIZE(t.verify_attn_workspace), True: SIZE(t.verify_attn_naive_workspace)}

    def arguments(self, q, kv_pages, page_table, prefix_len, node_count, parents, scale, *,
                  row_start=None, q_len=None, kv_len_max=None, splits=0, out_dtype=torch.float32,
                  round_p=False, sum_f32=False):
        """The filled structure; out and lse are left to the caller."""
        a = VerifyAttn()
        a.batch, a.max_pages = page_table.shape
        a.q_len = q.shape[1] if row_start is None else q_len
        a.heads = q.shape[-2]
        a.latent_dim, a.rope_dim = LATENT, ROPE
        a.softmax_scale = scale
        a.dtype = BF16 if q.dtype == torch.bfloat16 else F32
        a.out_dtype = BF16 if out_dtype == torch.bfloat16 else F32
        a.page_count, a.page_size = kv_pages.shape[:2]
        for name, tensor in (("q", q), ("kv_pages", kv_pages), ("page_table", page_table),
                             ("prefix_len", prefix_len), ("node_count", node_count),
                             ("parents", parents), ("row_start", row_start)):
            if tensor is not None:
                if not tensor.is_contiguous() or not tensor.is_cuda:
                    raise ValueError(f"{name} must be contiguous, on the device")
                setattr(a, name, tensor.data_ptr())
        a.kv_len_max = kv_len_max or int((prefix_len + node_count).max())
        a.splits, a.round_p_bf16, a.sum_f32 = splits, int(round_p), int(sum_f32)
        return a

    def workspace_bytes(self, a, naive=False):
        return self.size[naive](self.table, ctypes.byref(a))

    def launch(self, a, out, lse, workspace, naive=False):
        a.out, a.lse = out.data_ptr(), lse.data_ptr()
        a.workspace, a.workspace_bytes = workspace.data_ptr(), workspace.numel()
        check(self.run[naive](self.table, ctypes.byref(a)), "verify_attn")

    def verify_attn(self, q, *tensors, naive=False, poison=True, **options):
        """Allocates out, lse and workspace, fills them with NaN, and runs."""
        a = self.arguments(q, *tensors, **options)
        shape = q.shape[:-1]
        fill = float("nan") if poison else 0.0
        out = torch.full((*shape, LATENT), fill, device=q.device,
                         dtype=options.get("out_dtype", torch.float32))
        lse = torch.full(shape, fill, device=q.device, dtype=torch.float32)
        workspace = torch.full((max(self.workspace_bytes(a, naive), 1),), 0xff, device=q.device,
                               dtype=torch.uint8)
        self.launch(a, out, lse, workspace, naive)
        return out, lse
