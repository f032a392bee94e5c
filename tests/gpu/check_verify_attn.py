"""Checks libtreeverify-cuda against float64 on random shapes, and the properties that do not show
in one result: bit-identity over batch, replay and page order, poisoned memory, huge pools, and what
the C ABI promises its caller.

Exit status: 0 when all passed, 1 otherwise, 77 without a device.
"""

import argparse
import ctypes
import errno
import sys

import torch

if not torch.cuda.is_available():
    sys.exit(77)

from cases import Case, errors
from tvcuda import Kernels

# the bounds of the numerics contract, standard normal inputs
NAIVE = dict(rel_l2=1e-6, lse=1e-6)
FLASH = {torch.float32: dict(rel_l2=2e-6, lse=1e-5), torch.bfloat16: dict(rel_l2=4e-3, lse=1e-4)}
failures = []


def report(name, ok, text=""):
    print(f"{'PASS' if ok else 'FAIL'} {name} {text}", flush=True)
    if not ok:
        failures.append(name)


def compare(kernels, name, case, splits=(0,)):
    """naive against f64, then flash against f64 and, for bf16, against naive's own rounding."""
    want = case.reference()
    out, lse = kernels.verify_attn(*case.tensors(), naive=True, **case.options())
    rel, top, lse_abs = errors(out, lse, *want)
    finite = want[1][torch.isfinite(want[1])]
    scale = max(1.0, want[0].abs().max().item())
    lse_scale = max(1.0, finite.abs().max().item())
    ok = rel <= 1e-6 and top <= 1e-6 * scale and lse_abs <= 1e-6 * lse_scale
    report(f"naive {name}", ok, f"rel_l2={rel:.2e} max_abs={top:.2e} lse_abs={lse_abs:.2e}")
    bound = FLASH[case.q.dtype]["rel_l2"]
    if case.q.dtype == torch.bfloat16:
        out, lse = kernels.verify_attn(*case.tensors(), naive=True, round_p=True, **case.options())
        rounded = errors(out, lse, *want)[0]
        bound = min(bound, 2 * rounded)
    for s in splits:
        out, lse = kernels.verify_attn(*case.tensors(), splits=s, **case.options())
        rel, top, lse_abs = errors(out, lse, *want)
        ok = rel <= bound and lse_abs <= FLASH[case.q.dtype]["lse"]
        report(f"flash {name} splits={s}", ok,
               f"rel_l2={rel:.2e} (bound {bound:.2e}) lse_abs={lse_abs:.2e}")


def matrix(kernels, scale):
    shapes = [
        ("h16 p2048", 16, [2048, 1111], [17, 9]),
        ("h64 p128", 64, [128], [33]),
        ("h64 p512", 64, [512, 300], [9, 5]),
        ("h8 p0", 8, [0, 0], [9, 3]),
        ("h8 p1", 8, [1, 0], [5, 5]),
        ("h128 p63", 128, [63], [65]),
        ("h16 p64 wide", 16, [64], [256]),
        ("h8 p65", 8, [65, 17, 1], [2, 1, 2]),
        ("h1 p1000", 1, [1000, 33, 5], [1, 40, 7]),
        ("h3 p777", 3, [777, 15], [21, 30]),
        ("h16 one node", 16, [4000, 1, 0], [1, 1, 1]),
        ("h1 n1024", 1, [100], [1024]),
        ("h2 n1024", 2, [31], [1024]),
        ("h20 n1024", 20, [16], [1024]),
        ("h16 p30000", 16, [30000], [17]),
    ]
    seed = 1
    for dtype in (torch.float32, torch.bfloat16):
        for name, heads, prefixes, nodes in shapes:
            for kind in ("chain", "star", "random"):
                if max(nodes) * heads * max(prefixes) > 3e6 * scale and kind != "random":
                    continue
                seed += 1
                page = (64, 16, 32, 128)[seed % 4]
                case = Case(heads, prefixes, nodes, kind=kind, page_size=page, dtype=dtype,
                            seed=seed, packed=seed % 3 == 0)
                splits = (0, 1, 2, 3, 7, 16, 64) if kind == "random" else (0,)
                compare(kernels, f"{name} {kind} page={page} {str(dtype)[6:]} seed={seed}"
                        f"{' packed' if case.packed else ''}", case, splits)


def same(kernels, name, a, b):
    equal = all(torch.equal(x, y) for x, y in zip(a, b))
    report(name, equal)


def properties(kernels, dtype):
    name = str(dtype)[6:]
    run = lambda case, **o: kernels.verify_attn(*case.tensors(), **case.options(), **o)
    case = Case(16, [5000, 123, 2048, 0], [17, 33, 5, 9], seed=7, dtype=dtype)
    want = run(case)
    finite = True
    for _ in range(100):
        again = run(case)
        finite = finite and torch.equal(again[0], want[0]) and torch.equal(again[1], want[1])
    report(f"{name} 100 repeats bit-identical", finite)
    for b in range(4):
        n = case.nodes[b]
        alone = kernels.verify_attn(
            case.q[b:b + 1, :n].contiguous(), case.kv, case.table[b:b + 1].contiguous(),
            case.prefix[b:b + 1], case.count[b:b + 1],
            case.parents[b * case.q_len:b * case.q_len + n].contiguous(), case.tensors()[-1])
        same(kernels, f"{name} request {b} alone and in a batch",
             (alone[0][0], alone[1][0]), (want[0][b, :n], want[1][b, :n]))
    # another physical order of the same pages, and another page size
    order = torch.randperm(case.kv.shape[0], device="cuda")
    moved = torch.empty_like(case.kv)
    moved[order] = case.kv
    table = torch.where(case.table >= 0, order[case.table.clamp(min=0).long()].int(), -1)
    other = kernels.verify_attn(case.q, moved, table.contiguous(), *case.tensors()[3:],
                                **case.options())
    same(kernels, f"{name} page order shuffled", other, want)
    chain = run(Case(16, case.prefixes, case.nodes, kind="chain", seed=7, dtype=dtype))
    for page in (16, 32, 128):
        # the same values: a chain takes nothing from the generator that scatters the pages
        other = run(Case(16, case.prefixes, case.nodes, kind="chain", seed=7, dtype=dtype, page_size=page))
        same(kernels, f"{name} page size 64 and {page}", other, chain)
    # bf16 results are the f32 results rounded once
    rounded = run(case, out_dtype=torch.bfloat16)
    same(kernels, f"{name} bf16 output", (rounded[0],), (want[0].bfloat16(),))
    short = run(case)
    want_ref = case.reference()
    pad = torch.isinf(want_ref[1])
    report(f"{name} padding rows", bool((short[0][pad] == 0).all() and
                                        (short[1][pad] == -float('inf')).all()))


def head_counts(kernels, dtype):
    """Every number of heads, with f64's result; the worst of them in one line."""
    worst, worst_lse, bound = (0.0, 0), (0.0, 0), FLASH[dtype]
    for heads in range(1, 129):
        case = Case(heads, [70, 3], [3, 2], seed=heads, dtype=dtype, page_size=16)
        rel, _, lse_abs = errors(*kernels.verify_attn(*case.tensors(), **case.options()), *case.reference())
        worst, worst_lse = max(worst, (rel, heads)), max(worst_lse, (lse_abs, heads))
    report(f"flash 1 to 128 heads {str(dtype)[6:]}", worst[0] <= bound["rel_l2"] and worst_lse[0] <= bound["lse"],
           f"rel_l2={worst[0]:.2e} at {worst[1]} lse_abs={worst_lse[0]:.2e} at {worst_lse[1]}")


def c_abi(library, dtype):
    """No allocation, no waiting, and a launch may be captured: on a stream of the caller's."""
    name = str(dtype)[6:]
    stream = torch.cuda.Stream()
    case = Case(16, [3000, 5], [17, 4], seed=5, dtype=dtype)
    want = Kernels(library).verify_attn(*case.tensors(), **case.options())
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        kernels = Kernels(library, stream)
        a = kernels.arguments(*case.tensors(), **case.options())
        size = kernels.workspace_bytes(a)
        out, lse = torch.empty_like(want[0]), torch.empty_like(want[1])
        workspace = torch.empty(size, device="cuda", dtype=torch.uint8)
        kernels.launch(a, out, lse, workspace)
        stream.synchronize()
        free = torch.cuda.mem_get_info()[0]
        torch.cuda._sleep(1 << 28)  # clocks: a tenth of a second
        for _ in range(20):
            kernels.launch(a, out, lse, workspace)
        report(f"{name} launches return while the stream is busy", not stream.query())
        stream.synchronize()
        report(f"{name} launches take no device memory", torch.cuda.mem_get_info()[0] == free)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            kernels.launch(a, out, lse, workspace)
        for tensor in (out, lse):
            tensor.fill_(float("nan"))
        workspace.fill_(0xff)
        graph.replay()
        stream.synchronize()
        same(kernels, f"{name} captured, and replayed over poison", (out, lse), want)
        try:
            kernels.launch(a, out, lse, workspace[:-1])
            report(f"{name} a small workspace is refused", False)
        except RuntimeError as reason:
            report(f"{name} a small workspace is refused", True, str(reason))


def refusals(library):
    """What would fault, and take the context along, or means nothing: refused, and nothing written."""
    kernels = Kernels(library)
    case = Case(16, [3000, 5], [17, 4], seed=6)
    a = kernels.arguments(*case.tensors(), **case.options())
    out = torch.full((*case.q.shape[:-1], 512), 7.0, device="cuda")
    lse = torch.full(case.q.shape[:-1], 7.0, device="cuda")
    workspace = torch.full((kernels.workspace_bytes(a) + 16,), 7, device="cuda", dtype=torch.uint8)
    a.out, a.lse = out.data_ptr(), lse.data_ptr()
    a.workspace, a.workspace_bytes = workspace.data_ptr(), workspace.numel() - 16
    wrong = [(name, getattr(a, name) + 4) for name in ("q", "kv_pages", "out", "workspace")]
    wrong += [(name, None) for name in ("q", "kv_pages", "page_table", "out", "lse", "workspace")]
    wrong += [("softmax_scale", scale) for scale in (0.0, -0.07, float("inf"), float("nan"))]
    wrong += [("heads", 129), ("q_len", 1025), ("page_size", 48), ("splits", 65), ("kv_len_max", 1 << 30),
              ("page_count", 1 << 60)]
    for name, value in wrong:
        right = getattr(a, name)
        setattr(a, name, value)
        result = kernels.run[False](kernels.table, ctypes.byref(a))
        setattr(a, name, right)
        torch.cuda.synchronize()
        untouched = all(bool((x == 7).all()) for x in (out, lse, workspace))
        text = "at 4 bytes behind a multiple of 16" if value == right + 4 else value
        report(f"refused: {name} {text}", result == -errno.EINVAL and untouched, f"{result}")


def absurd(kernels, dtype):
    """Lengths, counts, parents and page ids that mean nothing: whatever comes out, nothing faults, and the next launch
    is right."""
    for page_size, splits in ((64, 0), (16, 3)):
        case = Case(16, [700, 40], [5, 3], seed=8, dtype=dtype, page_size=page_size)
        want = kernels.verify_attn(*case.tensors(), **case.options(), splits=splits)
        for name, tensor in (("prefix", case.prefix), ("nodes", case.count), ("parents", case.parents),
                             ("pages", case.table)):
            kept = tensor.clone()
            for value in (2 ** 31 - 1, 1 << 24, 1 << 20, 6, -1, -2 ** 31):
                tensor.fill_(value)
                kernels.verify_attn(*case.tensors(), **case.options(), splits=splits)
                torch.cuda.synchronize()
            tensor.copy_(kept)
        same(kernels, f"{str(dtype)[6:]} page={page_size} splits={splits} after what means nothing",
             kernels.verify_attn(*case.tensors(), **case.options(), splits=splits), want)


def big(kernels):
    for dtype in (torch.bfloat16, torch.float32):
        # 2^31 elements are 58,255 pages of 64 rows: the session sits above them
        case = Case(8, [2000], [17], dtype=dtype, seed=3, spare_pages=60000)
        report("pool beyond 2^31 elements", case.kv.numel() > 2 ** 31, str(case.kv.numel()))
        compare(kernels, f"huge pool {str(dtype)[6:]}", case)
        del case
        torch.cuda.empty_cache()
        case = Case(8, [185000], [17], dtype=dtype, seed=4)
        compare(kernels, f"prefix 185000 {str(dtype)[6:]}", case, (0, 1, 64))
        del case
        torch.cuda.empty_cache()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("library")
    parser.add_argument("--small", action="store_true", help="a few small shapes (sanitizers)")
    args = parser.parse_args()
    kernels = Kernels(args.library)
    print(f"# {kernels.variant}")
    if args.small:
        for dtype in (torch.bfloat16, torch.float32):
            for heads, prefixes, nodes in ((16, [200, 5], [5, 3]), (8, [0, 40], [9, 2]),
                                           (3, [70], [33])):
                case = Case(heads, prefixes, nodes, dtype=dtype, page_size=16)
                compare(kernels, f"small {heads} {prefixes} {str(dtype)[6:]}", case, (0, 3))
    else:
        matrix(kernels, 10)
        properties(kernels, torch.bfloat16)
        properties(kernels, torch.float32)
        for dtype in FLASH:
            head_counts(kernels, dtype)
            c_abi(args.library, dtype)
            absurd(kernels, dtype)
        refusals(args.library)
        big(kernels)
    torch.cuda.synchronize()
    print(f"# {len(failures)} failed")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
