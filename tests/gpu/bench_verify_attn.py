"""Times the flash kernel at the points of the measurement plan: median of graph replays.

A graph holds `--calls` launches one behind the other, as a model's layers would; the time of a call
is the replay's over their number. FLOPs are 2 * (576 + 512) per node, head and token of the
request; bytes are the request's KV rows, read once. Peers' columns are the published medians for
the same points on the same kind of GPU, given here as constants for the ratios; with --peers the
peers found in that folder run on the same inputs, beside the kernel, and their medians count.
"""

import argparse
import importlib
import json
import sys

import torch

from cases import SCALE, Case
from tvcuda import Kernels

PEERS = ("FlashMLA", "FA2", "FA2@100K", "Triton")

# batch, heads, nodes, prefix: published us of the peers
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


def time_graph(stream, launch, calls, replays=30):
    """Median us of one of `calls` launches in a graph, over its replays."""
    with torch.cuda.stream(stream):
        for _ in range(3):
            launch()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(calls):
                launch()
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


def flash_launch(kernels, case, **options):
    """A launch of the flash kernel on the case, and its output."""
    a = kernels.arguments(*case.tensors(), **case.options(), out_dtype=torch.bfloat16, **options)
    out = torch.empty((*case.q.shape[:-1], 512), device="cuda", dtype=torch.bfloat16)
    lse = torch.empty(case.q.shape[:-1], device="cuda")
    workspace = torch.empty(max(kernels.workspace_bytes(a), 1), device="cuda", dtype=torch.uint8)
    return lambda: kernels.launch(a, out, lse, workspace), out


def time_call(kernels, stream, case, calls, **options):
    """Median us of one call of the flash kernel."""
    return time_graph(stream, flash_launch(kernels, case, **options)[0], calls)


def time_peers(case, stream, factory, want):
    """us of each peer on the same inputs, in the order of PEERS; None for one that cannot run them
    or does not agree with `want`, with a line that says why."""
    times = []
    case.kv.nan_to_num_(nan=0.0)  # peers multiply rows past the end by zero
    for name in PEERS:
        try:
            with torch.cuda.stream(stream):
                launch, out = factory(case, SCALE, stream)[name]()
                launch()
                stream.synchronize()
            error = ((out.double() - want.double()).norm() / want.double().norm()).item()
            if not error <= 1e-2:
                raise RuntimeError(f"differs by rel_l2 {error:.2e}")
            probe = time_graph(stream, launch, 2, 3)
            calls = 10 if probe < 5000 else 2
            times.append(time_graph(stream, launch, calls, 30 if probe < 5000 else 10))
        except (RuntimeError, AssertionError) as reason:
            print(f"# {name}: {str(reason).splitlines()[0]}", flush=True)
            times.append(None)
    return times


def load_peers(folder):
    """peers() of FOLDER/peers.py: peers(case, scale, stream) -> {name: () -> (launch, out)}."""
    if not folder:
        return None
    sys.path.insert(0, folder)
    return importlib.import_module("peers").peers


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("library")
    parser.add_argument("--only", help="batch,heads,nodes,prefix")
    parser.add_argument("--calls", type=int, default=10)
    parser.add_argument("--extra", action="store_true", help="tree shapes, page sizes, page order")
    parser.add_argument("--peers", help="folder with a peers.py that runs the peers")
    parser.add_argument("--json")
    args = parser.parse_args()
    stream = torch.cuda.Stream()
    factory = load_peers(args.peers)
    kernels = Kernels(args.library, stream)
    print(f"# {kernels.variant}, calls per graph {args.calls}")
    print("batch,heads,nodes,prefix |      us |  TF/s |  GB/s | x FlashMLA | x FA2 | x FA2@100K | x Triton")
    results = {}
    for point, peers in POINTS.items():
        if args.only and args.only != ",".join(map(str, point)):
            continue
        batch, heads, nodes, prefix = point
        case = Case(heads, [prefix] * batch, [nodes] * batch, kind="chain")
        launch, out = flash_launch(kernels, case)
        us = time_graph(stream, launch, args.calls)
        if factory:
            peers = time_peers(case, stream, factory, out)
        ratios = " | ".join(f"{p / us:9.2f}" if p else "        –" for p in peers)
        results[str(point)] = {"us": us, "peers": peers}
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
