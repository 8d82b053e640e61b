"""Measured memory of a training step, in bytes per parameter and rank, beside the formulas.

Each rank's share of the memory that the kernel counts (proportional set size: a page that several
ranks map is divided among them) is taken before the model exists and after two steps, at the moment
when parameters, gradients and optimizer state are all there. Writes the table of docs/memory.md to
the terminal, its picture with --plot FILE, and one JSON line last.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import parallelkit as pk
from parallelkit.bench.measure import proportional_bytes
from parallelkit.testing import run_ranks

TENSOR = 1 << 20  # elements of each of the model's tensors


class Tensors(nn.Module):
    """A model that is all parameters: its loss makes a gradient for each and keeps nothing."""

    def __init__(self, count: int, dtype: torch.dtype) -> None:
        super().__init__()
        tensors = [nn.Parameter(torch.ones(TENSOR, dtype=dtype)) for _ in range(count)]
        self.tensors = nn.ParameterList(tensors)

    def forward(self) -> torch.Tensor:
        """The sum of all elements."""
        return torch.stack([t.sum() for t in self.tensors]).sum()


def ddp(group: pk.Group, model: Tensors) -> tuple[Callable[[], None], Any]:
    """torch DDP, gradients as views of its buckets, and torch.optim.AdamW."""
    wrapped: Any = model
    if group.size > 1:
        wrapped = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    return lambda: wrapped().backward(), torch.optim.AdamW(model.parameters())


def stage_1(group: pk.Group, model: Tensors) -> tuple[Callable[[], None], Any]:
    """Averaged gradients on every rank, state sharded."""
    wrapped = pk.DataParallel(model, group)
    return lambda: wrapped.backward(wrapped()), pk.ShardedAdamW(model.parameters(), group=group)


def stage_2(group: pk.Group, model: Tensors) -> tuple[Callable[[], None], Any]:
    """Local sums of gradients, averaged inside the step; state sharded."""
    wrapped = pk.DataParallel(model, group)
    optimizer = pk.ShardedAdamW(model.parameters(), data_parallel=wrapped)
    return lambda: wrapped.backward(wrapped()), optimizer


WAYS = {"DDP and AdamW": ddp, "stage 1": stage_1, "stage 2": stage_2}


def formula(way: str, dtype: torch.dtype, size: int) -> float:
    """Bytes of parameter, gradient and state; masters only in ours, of bfloat16."""
    each = dtype.itemsize
    if way == "DDP and AdamW":
        return 4.0 * each
    return 2.0 * each + (8 if dtype == torch.float32 else 12) / size


def train(group: pk.Group, way: str, dtype: torch.dtype, count: int) -> tuple[Tensors, Any]:
    """Two steps and a backward pass; what it returns holds all that there is."""
    model = Tensors(count, dtype)
    backward, optimizer = WAYS[way](group, model)
    for step in range(3):
        backward()
        if step < 2:
            optimizer.step()
            optimizer.zero_grad()
    return model, optimizer


def settled_pss(group: pk.Group) -> int:
    """Memory of every rank at the same moment, without what malloc only keeps for later."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    group.barrier()
    found = proportional_bytes()
    group.barrier()
    return found


def measure(group: pk.Group, way: str, dtype: torch.dtype, count: int) -> tuple[int, int]:
    """(bytes taken, bytes of state_bytes()) on this rank."""
    train(group, way, dtype, 2)  # what is loaded and allocated once, however large the model
    before = settled_pss(group)
    model, optimizer = train(group, way, dtype, count)
    taken = settled_pss(group) - before
    return taken, optimizer.state_bytes() if isinstance(optimizer, pk.ShardedAdamW) else 0


def plot(rows: list[dict[str, Any]], file: str) -> None:
    """Measured bars with a mark at each formula, one panel a dtype."""
    from matplotlib.figure import Figure  # no pyplot: no display, no state

    dtypes = list(dict.fromkeys(row["dtype"] for row in rows))
    figure = Figure(figsize=(9, 3.6), layout="tight")
    panels = figure.subplots(1, len(dtypes), sharey=True)
    for panel, dtype in zip(panels, dtypes, strict=True):
        for offset, way in enumerate(WAYS):
            chosen = [row for row in rows if row["dtype"] == dtype and row["way"] == way]
            places = [place + 0.26 * (offset - 1) for place in range(len(chosen))]
            panel.bar(places, [row["measured"] for row in chosen], 0.24, label=way)
            panel.plot(places, [row["formula"] for row in chosen], "k_", markersize=12)
        panel.set_xticks(range(len(chosen)), [f"{row['ranks']}" for row in chosen])
        panel.set_title(dtype)
        panel.set_xlabel("ranks")
    panels[0].set_ylabel("bytes per parameter and rank")
    panels[-1].legend(frameon=False, title="bars: measured, lines: formula")
    figure.savefig(file)


def main() -> None:
    """Measure all, print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--numel", type=int, default=32, help="2^20 parameters each (default 32)")
    parser.add_argument("--plot", metavar="FILE")
    arguments = parser.parse_args()
    rows = []
    print(
        "| parameters | ranks | | formula | measured | state_bytes() |\n|---|---|---|---|---|---|"
    )
    for dtype in (torch.float32, torch.bfloat16):
        for size in (1, 2, 4):
            for way in WAYS:
                found = run_ranks(measure, size, way, dtype, arguments.numel)
                elements = arguments.numel * TENSOR
                row = {
                    "dtype": str(dtype).removeprefix("torch."),
                    "ranks": size,
                    "way": way,
                    "formula": formula(way, dtype, size),
                    "measured": sum(taken for taken, _ in found) / size / elements,
                    "state": sum(state for _, state in found) / size / elements,
                }
                rows.append(row)
                print(
                    f"| {row['dtype']} | {size} | {way} | {row['formula']:.2f} "
                    f"| {row['measured']:.2f} | {row['state'] or ''} |"
                )
    if arguments.plot:
        plot(rows, arguments.plot)
    print(json.dumps({"benchmark": "memory", "parameters": arguments.numel * TENSOR, "rows": rows}))


if __name__ == "__main__":
    main()
