"""The picture of `parallelkit bench collectives --plot`: time and bandwidth over size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = ["draw"]

# Colours that stay apart for colour-blind eyes (Okabe and Ito, 2008).
_LINES = {
    "in place, native": ("tensors of Group.empty", "#0072B2", "-", "o"),
    "ordinary, native": ("ordinary tensors", "#009E73", "-", "s"),
    "Gloo and two passes": ("Gloo and two passes", "#D55E00", "-", "^"),
    "floor": ("floor: each rank scales its tensor", "#555555", "--", ""),
}


def draw(rows: Sequence[dict[str, Any]], facts: dict[str, Any], path: str) -> None:
    """Write the picture to `path` (.png or .svg).

    Args:
        rows: one a size, with "bytes" and "seconds" by candidate.
        facts: what it was measured on; goes below the picture.
        path: of the file.
    """
    from matplotlib.figure import Figure  # an extra, without which the table still comes
    from matplotlib.ticker import FuncFormatter

    sizes = [row["bytes"] for row in rows]
    figure = Figure(figsize=(8, 8), layout="constrained")  # no pyplot: no display, no state
    above, below = figure.subplots(2, 1, sharex=True)
    for name, (label, colour, line, marker) in _LINES.items():
        seconds = [row["seconds"][name] for row in rows]
        style: dict[str, Any] = {"color": colour, "linestyle": line, "marker": marker}
        above.plot(sizes, [s * 1e6 for s in seconds], label=label, **style)
        rate = [size / s / 1e9 for size, s in zip(sizes, seconds, strict=True)]
        below.plot(sizes, rate, label=label, **style)
    above.set(yscale="log", ylabel="microseconds a call", xscale="log")
    below.set(yscale="log", ylabel="GB/s (tensor bytes over time)", xlabel="size of the tensor")
    below.set_xticks(sizes, minor=False)
    below.minorticks_off()
    below.xaxis.set_major_formatter(FuncFormatter(lambda size, _: _size(size)))
    above.legend(frameon=False)
    for axes in (above, below):
        axes.grid(True, which="major", color="#dddddd")
        axes.spines[["top", "right"]].set_visible(False)
    above.set_title(f"Weighted mean over {facts['ranks']} ranks of one host, {facts['dtype']}")
    figure.supxlabel(
        f"{facts['processor']}, {facts['cores']} cores, torch {facts['torch']}, {facts['commit']}",
        fontsize=8,
        color="#555555",
    )
    figure.savefig(path, dpi=120)


def _size(size: float) -> str:
    for unit, factor in (("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size >= factor:
            return f"{size / factor:g} {unit}"
    return f"{size:g} B"
