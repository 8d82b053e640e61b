"""What a run says at its end: a table for people, JSON for programs."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from ..group import Group
from .checks import closest
from .result import Result
from .run import Options


def heading(options: Options, group: Group) -> str:
    """What is about to run, in a sentence."""
    source = options.data or "the Python standard library's sources"
    return (
        f"Training on {ranks(group.size)} ({group.transport}, {group.device}"
        + (f", layers split over {options.tp}" if options.tp > 1 else "")
        + f"): {options.steps} "
        f"steps of {options.batch} pieces of text from {source}"
    )


def table(result: Result) -> str:
    """The checks with their figures, then what the run was like."""
    worst = closest(result.checks)
    same = f"SHA-256 {result.digests[0][:12]} on {ranks(result.size)}"
    differ = "SHA-256 " + ", ".join(f"{d[:12]} on rank {r}" for r, d in enumerate(result.digests))
    totals = [sum(tokens) for tokens in result.tokens]
    shares = [tokens[0] / total for tokens, total in zip(result.tokens, totals, strict=True)]
    last = {name: losses[-1] for name, losses in result.losses.items()}
    rows = [
        (
            verdict(result.gradients_ok),
            f"gradients equal those of one process, {len(result.checks)} steps compared",
            f"closest to its bound: error {worst.error:.1e}, bound {worst.bound:.1e} "
            f"({worst.parameter}, step {worst.step + 1})",
        ),
        (
            verdict(result.replicas_ok),
            "replicas are equal to the bit",
            same if result.replicas_ok else differ,
        ),
        (
            "",
            "for contrast, a plain mean of the ranks' means",
            f"error {max(check.plain_error for check in result.checks):.1e}",
        ),
        ("", "model", f"{result.parameters:,} parameters"),
        ("", "loss at the end", ", ".join(f"{name} {loss:.4f}" for name, loss in last.items())),
        (
            "",
            "tokens a step",
            f"{min(totals):,} to {max(totals):,}, "
            f"of which rank 0 had {min(shares):.0%} to {max(shares):.0%}",
        ),
        (
            "",
            "speed",
            f"{result.tokens_per_second:,.0f} tokens/s on {ranks(result.size)}, {result.transport}",
        ),
        (
            "",
            "sent by a rank in a step",
            f"{result.bytes_per_step / 1e6:.2f} MB of gradients and parameters",
        ),
    ]
    width = max(len(name) for _, name, _ in rows)
    return "\n".join(f"{ok:6}  {name:{width}}  {value}" for ok, name, value in rows)


def ranks(size: int) -> str:
    """A number of ranks in words."""
    return "1 rank" if size == 1 else f"{size} ranks"


def verdict(ok: bool) -> str:
    """The word in the first column."""
    return "ok" if ok else "FAILED"


def write_json(options: Options, result: Result, path: Path) -> None:
    """Everything the table and the picture are made of."""
    content = {
        "options": dataclasses.asdict(options),
        "gradients_ok": result.gradients_ok,
        "replicas_ok": result.replicas_ok,
        "tokens_per_second": result.tokens_per_second,
        "bytes_per_step": result.bytes_per_step,
        **dataclasses.asdict(result),
    }
    path.write_text(json.dumps(content, indent=1, default=str) + "\n")
