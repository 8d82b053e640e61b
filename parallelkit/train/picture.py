"""The picture of a run: three losses, and the errors of the gradients below."""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .report import ranks
from .result import Result

# Okabe and Ito's palette: told apart under every common colour blindness.
BLUE, ORANGE, GREEN = "#0072B2", "#D55E00", "#009E73"
PLAIN_MEAN = "plain mean of the ranks' means"


def draw(result: Result, path: Path) -> None:
    """Write the picture of a run; the ending of path names the format."""
    figure = Figure(figsize=(8, 7), layout="constrained")  # no pyplot: no display, no state
    upper, lower = figure.subplots(2, height_ratios=(3, 2), sharex=True)
    draw_losses(upper, result)
    draw_errors(lower, result)
    figure.savefig(path, dpi=150)


def draw_losses(axes: Axes, result: Result) -> None:
    """Loss against step; the parallel run is drawn inside the line of the single process."""
    losses = result.losses
    steps = range(1, len(losses["parallel"]) + 1)
    (parallel,) = axes.plot(steps, losses["parallel"], color=BLUE, linewidth=1.5, zorder=3)
    (single,) = axes.plot(steps, losses["one process"], color=GREEN, linewidth=5, alpha=0.45)
    (plain,) = axes.plot(steps, losses["plain mean"], color=ORANGE, linestyle="--")
    axes.legend(
        [parallel, single, plain],
        [f"parallelkit, {ranks(result.size)}", "one process, same batches", PLAIN_MEAN],
        frameon=False,
    )
    axes.set_ylabel("loss (nats per byte)")
    axes.set_title(
        f"A byte-level GPT of {result.parameters / 1e6:.1f} M parameters, trained three ways"
    )
    axes.grid(alpha=0.3)


def draw_errors(axes: Axes, result: Result) -> None:
    """Errors of the gradients against float64, with the bound between right and wrong."""
    steps = [check.step + 1 for check in result.checks]
    axes.semilogy(
        steps,
        [check.plain_error for check in result.checks],
        color=ORANGE,
        linestyle="--",
        marker="s",
        label=PLAIN_MEAN,
    )
    axes.semilogy(
        steps,
        [check.bound for check in result.checks],
        color="black",
        linestyle=":",
        label="bound, from a rerun of one process",
    )
    axes.semilogy(
        steps,
        [check.error for check in result.checks],
        color=BLUE,
        marker="o",
        label=f"parallelkit, {ranks(result.size)}",
    )
    axes.set_xlabel("step")
    axes.set_ylabel("error of the gradient\n(share of its norm)")
    axes.legend(frameon=False)
    axes.grid(alpha=0.3)
