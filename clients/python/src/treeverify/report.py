"""What `generate --report` writes: one HTML file with its own drawings (SVG) and its numbers as JSON, or a PNG.

Needs nothing from the network; the PNG needs matplotlib ([png]). Owns the page; counts nothing that is not in the rounds.
"""

from __future__ import annotations

import html
import importlib.util
import json
from collections.abc import Mapping, Sequence
from typing import Any

from .values import Round

_WIDTH, _HEIGHT, _LEFT, _BELOW = 720, 240, 48, 28
_STAGES = (("queue", "#9e9e9e"), ("gpu", "#2e7d32"), ("other server", "#f9a825"), ("link", "#1565c0"))

_STYLE = (
    "body{font:15px/1.5 sans-serif;max-width:760px;margin:2em auto;padding:0 1em;color:#222}"
    "table{border-collapse:collapse}td,th{padding:.15em .8em .15em 0;text-align:left}"
    "svg{width:100%;height:auto;background:#fafafa}text{font:11px sans-serif;fill:#444}"
)


def figures(rounds: Sequence[Round]) -> dict[str, Any]:
    """What the page shows, from verify rounds (others are left out).

    acceptance_by_depth[d - 1]: of the rounds whose tree reached depth d, the share that accepted a node there.
    accepted_by_nodes: [drafts, rounds, mean accepted drafts] by size of the tree. stages_us: per round queue, gpu, the
    rest of the server's time, and the rest of the round trip.
    """
    verified = [round for round in rounds if round.accepted_nodes and round.timing is not None]
    deepest = max((round.depth for round in verified), default=0)
    by_depth = []
    for depth in range(1, deepest + 1):
        reached = [round for round in verified if round.depth >= depth]
        by_depth.append(sum(len(round.accepted_nodes) > depth for round in reached) / len(reached))
    by_nodes: dict[int, list[int]] = {}
    stages = []
    for round in verified:
        by_nodes.setdefault(round.nodes - 1, []).append(len(round.accepted_nodes) - 1)
        timing = round.timing
        assert timing is not None
        rest = max(0, timing.total_us - timing.queue_us - timing.gpu_us)
        stages.append([timing.queue_us, timing.gpu_us, rest, max(0, int(round.rtt_s * 1e6) - timing.total_us)])
    return {
        "acceptance_by_depth": by_depth,
        "accepted_by_nodes": [[nodes, len(got), sum(got) / len(got)] for nodes, got in sorted(by_nodes.items())],
        "stages_us": stages,
    }


def _frame(title: str, top: str, marks: Sequence[str], across: str) -> str:
    floor = _HEIGHT - _BELOW
    return (
        f"<h2>{html.escape(title)}</h2><svg viewBox='0 0 {_WIDTH} {_HEIGHT}' role='img'>"
        f"<path d='M{_LEFT} 10V{floor}H{_WIDTH - 6}' fill='none' stroke='#888'/>"
        f"<text x='4' y='18'>{html.escape(top)}</text><text x='4' y='{floor}'>0</text>"
        f"<text x='{_LEFT}' y='{_HEIGHT - 8}'>{html.escape(across)}</text>{''.join(marks)}</svg>"
    )


def _bars(columns: Sequence[Sequence[float]], largest: float, colors: Sequence[str], labels: Sequence[str]) -> list[str]:
    """Stacked bars; labels become tooltips."""
    room, floor = _WIDTH - _LEFT - 10, _HEIGHT - _BELOW
    width = room / max(1, len(columns))
    marks = []
    for at, (column, label) in enumerate(zip(columns, labels)):
        y = float(floor)
        for value, color in zip(column, colors):
            height = (floor - 14) * value / largest if largest > 0 else 0.0
            y -= height
            marks.append(
                f"<rect x='{_LEFT + at * width:.1f}' y='{y:.1f}' width='{max(0.5, width * 0.85):.1f}' "
                f"height='{height:.1f}' fill='{color}'><title>{html.escape(label)}</title></rect>"
            )
    return marks


def page(summary: Mapping[str, Any], rounds: Sequence[Round]) -> str:
    """summary: what `generate --json` prints; shown as a table, text included."""
    data = figures(rounds)
    depth = data["acceptance_by_depth"]
    sizes = data["accepted_by_nodes"]
    stages = data["stages_us"]
    most = max((mean for _, _, mean in sizes), default=0.0)
    longest = max((sum(stage) for stage in stages), default=0)
    shown = [name for name in summary if name not in ("text", "tokens", "own")]
    rows = "".join(f"<tr><th>{html.escape(name)}</th><td>{html.escape(str(summary[name]))}</td></tr>" for name in shown)
    legend = ", ".join(f"<b style='color:{color}'>{name}</b>" for name, color in _STAGES)
    drawings = (
        _frame(
            "Acceptance by depth", "100 %",
            _bars([[share] for share in depth], 1.0, ["#2e7d32"],
                  [f"depth {at}: {share:.0%}" for at, share in enumerate(depth, 1)]),
            f"depth 1 to {len(depth)}; share of rounds that had drafts there",
        )
        + _frame(
            "Accepted drafts by size of the tree", f"{most:.1f}",
            _bars([[mean] for _, _, mean in sizes], most, ["#1565c0"],
                  [f"{nodes} drafts: {mean:.2f} accepted in {count} rounds" for nodes, count, mean in sizes]),
            "drafts in the tree, from few to many",
        )
        + _frame(
            "Time of each round", f"{longest / 1e3:.1f} ms",
            _bars(stages, longest, [color for _, color in _STAGES],
                  [f"round {at}: " + ", ".join(f"{name} {us} us" for (name, _), us in zip(_STAGES, stage))
                   for at, stage in enumerate(stages, 1)]),
            f"rounds 1 to {len(stages)}",
        )
        + f"<p>{legend}</p>"
    )
    numbers = json.dumps({"summary": dict(summary), **data}).replace("<", "\\u003c")
    return (
        f"<!doctype html><html lang='en'><meta charset='utf-8'><title>treeverify generate</title><style>{_STYLE}</style>"
        f"<h1>treeverify generate</h1><table>{rows}</table>{drawings}"
        f"<h2>Text</h2><p style='white-space:pre-wrap'>{html.escape(str(summary.get('text', '')))}</p>"
        f"<script type='application/json' id='numbers'>{numbers}</script></html>\n"
    )


def is_png(path: str) -> bool:
    return path.lower().endswith(".png")


def can_png() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


def png(path: str, summary: Mapping[str, Any], rounds: Sequence[Round]) -> None:
    """The page's drawings as one picture, its figures in the file's metadata ("treeverify", JSON without the text).

    ImportError without matplotlib; OSError when the file cannot be written. Nobody's display or settings are touched.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    data = figures(rounds)
    shown = {name: value for name, value in summary.items() if name not in ("text", "tokens", "own")}
    figure = Figure(figsize=(8, 9), layout="constrained")
    canvas = FigureCanvasAgg(figure)
    depth, sizes, times = figure.subplots(3)
    shares = data["acceptance_by_depth"]
    depth.bar(range(1, len(shares) + 1), shares, color="#2e7d32")
    depth.set(title="Acceptance by depth", xlabel="depth", ylabel="share of rounds", ylim=(0, 1))
    by_nodes = data["accepted_by_nodes"]
    areas = [12 + 4 * count for _, count, _ in by_nodes]
    sizes.scatter([nodes for nodes, _, _ in by_nodes], [mean for _, _, mean in by_nodes], s=areas, color="#1565c0")
    sizes.set(title="Accepted drafts by size of the tree", xlabel="drafts in the tree", ylabel="accepted drafts")
    sizes.set_ylim(bottom=0)
    floor = [0.0] * len(data["stages_us"])
    for at, (name, color) in enumerate(_STAGES):
        heights = [stage[at] / 1e3 for stage in data["stages_us"]]
        times.bar(range(1, len(heights) + 1), heights, bottom=floor, width=0.9, color=color, label=name)
        floor = [below + height for below, height in zip(floor, heights)]
    times.set(title="Time of each round", xlabel="round", ylabel="ms")
    times.legend(loc="upper right")
    words = f"{shown['rounds']} rounds, acceptance length {shown['accept_len_mean']}, {shown['tokens_per_s']} tokens/s"
    figure.suptitle(f"treeverify generate: {words}")
    canvas.print_png(path, metadata={"treeverify": json.dumps({"summary": shown, **data})})
