"""Times the flash kernel at the points of the measurement plan: median of graph replays.

A graph holds `--calls` launches one behind the other, as a model's layers would; the time of a call
is the replay's over their number. FLOPs are 2 * (576 + 512) per node, head and token of the
request; bytes are the request's KV rows, read once. Peers' columns are the published medians for
the same points on the same kind of GPU, given here as constants for the ratios.
"""

import argparse
import json

import torch

from cases import Case
from tvcuda import Kernels

# batch, heads, nodes, prefix: published us of FlashMLA, FlashInfer FA2, FA2 at 100 KB, Triton
POINTS = {
    (2, 16, 17, 2048): (21.3, 28.8, 47.8, 260),
    (1, 64, 33, 128): (14.5, 19.9, 31.0, 78),
    (2, 64, 9, 512): (17.0, 31.4, 50.2, 116),
    (2, 8, 9, 0): (7.1, 10.2, 8.5, 75),
    (2, 8, 5, 1): (7.5, 9.9, 8.2, 79),
    (1, 16, 17, 25000): (43.7, 97.1, 209, 2499),
    (1, 8, 17, 185000): (123, 397, 915, 19560),
    (1, 16, 17, 185000): (186, 572, 1352, 18908),
    (1, 64, 17, 185000): (701, 2175, 5264, 18815),
    (1, 64, 64, 32768): (444, 1158, 2569, 3433),
    (8, 16, 33, 8192): (132, 571, 1305, 1756),
    (32, 16, 17, 4096): (148, 558, 1306, 1770),
    (32, 64, 17, 4096): (522, 1385, 3210, 6793),
    (1, 128, 64, 32768): (864, 2351, 5198, 6764),
    (1, 16, 1, 185000): (85, 139, 282, 19068),
    (64, 16, 1, 8192): (151, 300, 680, 6941),
}


def time_call(kernels, stream, case, calls, replays=30, **options):
    """Median us of one call."""
    a = kernels.arguments(*case.tensors(), **case.options(), **options)
    out = torch.empty((*case.q.shape[:-1], 512), device="cuda", dtype=torch.bfloat16)
    a.out_dtype = 1
    lse = torch.empty(case.q.shape[:-1], device="cuda")
    workspace = torch.empty(max(kernels.workspace_bytes(a), 1), device="cuda", dtype=torch.uint8)
    with torch.cuda.stream(stream):
        for _ in range(3):
            kernels.launch(a, out, lse, workspace)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(calls):
                kernels.launch(a, out, lse, workspace)
        times = []
        for i in range(replays + 3):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record(stream)
            graph.replay()
            end.record(stream)
            end.synchronize()
            if i >= 3:
                times.append(begin.elapsed_time(end) * 1e3 / calls)
    return sorted(times)[len(times) // 2]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("library")
    parser.add_argument("--only", help="batch,heads,nodes,prefix")
    parser.add_argument("--calls", type=int, default=10)
    parser.add_argument("--extra", action="store_true", help="tree shapes, page sizes, page order")
    parser.add_argument("--json")
    args = parser.parse_args()
    stream = torch.cuda.Stream()
    kernels = Kernels(args.library, stream)
    print(f"# {kernels.variant}, calls per graph {args.calls}")
    print("batch,heads,nodes,prefix |      us |  TF/s |  GB/s | x FlashMLA | x FA2 | x FA2@100K | x Triton")
    results = {}
    for point, peers in POINTS.items():
        if args.only and args.only != ",".join(map(str, point)):
            continue
        batch, heads, nodes, prefix = point
        case = Case(heads, [prefix] * batch, [nodes] * batch, kind="chain")
        us = time_call(kernels, stream, case, args.calls)
        ratios = " | ".join(f"{p / us:9.2f}" for p in peers)
        results[str(point)] = us
        print(f"{point!s:24} | {us:8.2f} | {case.flops() / us / 1e6:5.1f} | "
              f"{case.bytes() / us / 1e3:6.0f} | {ratios}", flush=True)
    if args.extra:
        for point in ((1, 16, 17, 25000), (1, 64, 64, 32768), (1, 8, 17, 185000)):
            batch, heads, nodes, prefix = point
            for name, options in (("chain", dict(kind="chain")), ("random", dict(kind="random")),
                                  ("star", dict(kind="star")),
                                  ("contiguous", dict(kind="chain", contiguous=True)),
                                  ("page 16", dict(kind="chain", page_size=16)),
                                  ("page 32", dict(kind="chain", page_size=32)),
                                  ("page 128", dict(kind="chain", page_size=128))):
                case = Case(heads, [prefix] * batch, [nodes] * batch, **options)
                us = time_call(kernels, stream, case, args.calls)
                results[f"{point} {name}"] = us
                print(f"{point!s:24} {name:12} {us:8.2f} us", flush=True)
    if args.json:
        with open(args.json, "w") as file:
            json.dump(results, file, indent=1)


if __name__ == "__main__":
    main()
