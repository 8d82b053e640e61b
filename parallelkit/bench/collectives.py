"""The weighted mean over the ranks of one host: ours, Gloo's, and the floor.

The floor is what no all-reduce can beat by much: a rank has to read and write as many bytes as its
tensor has (its shard of every rank's), so each rank scales a tensor of that size in place. Gloo
gets what a weighted mean costs its user: a pass that multiplies by the weight, an all-reduce, a
pass that divides by the total. "native" is one call that carries a prepared tensor list (what
DataParallel makes), "public" is `pk.weighted_all_reduce_` with all its checks. Every candidate's
result is compared with float64 before anything is timed; a wrong one ends the benchmark.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ..cli import positive
from ..collectives import weighted_all_reduce_
from ..errors import ParallelKitError
from ..group import Group
from ..prepared import PreparedAllReduce
from ..testing import run_ranks
from ..transport.shared_memory import SharedMemory
from .measure import Candidate, environment, interleaved, pin

__all__ = ["add_arguments", "gpt_cuts", "run"]

SIZES = {
    "4K": 1 << 12,
    "64K": 1 << 16,
    "1M": 1 << 20,
    "16M": 1 << 24,
    "64M": 1 << 26,
    "256M": 1 << 28,
}
_GLOO, _FLOOR = "Gloo and two passes", "floor"
# Parameters of a GPT block in units of hidden^2, to cut a buffer into 150 tensors of mixed sizes.
_BLOCK = (3.0, 0.003, 1.0, 0.001, 4.0, 0.004, 4.0, 0.001, 0.001, 0.001)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark."""
    parser.add_argument("--nproc", type=positive(int), default=2, help="ranks (default 2)")
    parser.add_argument("--rounds", type=positive(int), default=30, help="turns (default 30)")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument(
        "--sizes", type=_sizes, default=",".join(SIZES), help=f"(default {','.join(SIZES)})"
    )
    parser.add_argument("--list", action="store_true", help="also 150 tensors against one")
    parser.add_argument(
        "--plot", type=_picture, metavar="FILE", help="draw time and bandwidth (.png or .svg)"
    )


def _sizes(text: str) -> list[int]:
    """A type of argparse: names of SIZES with commas between them."""
    unknown = [name for name in text.split(",") if name not in SIZES]
    if unknown:
        known = ", ".join(SIZES)
        raise argparse.ArgumentTypeError(f"must be of {known}, got {', '.join(unknown)}")
    return [SIZES[name] for name in text.split(",")]


def _picture(text: str) -> str:
    """A type of argparse: a file that a picture can be written to, once all is measured."""
    path = Path(text)
    if path.suffix not in (".png", ".svg"):
        raise argparse.ArgumentTypeError(f"must end in .png or .svg, got {text!r}")
    if path.is_dir() or not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"must be a file in a folder to write in, got {text!r}")
    return text


def run(arguments: argparse.Namespace) -> int:
    """Measure, print a table and one JSON line; raises where a result was wrong."""
    options = (arguments.sizes, arguments.dtype, arguments.rounds, arguments.list)
    rows = run_ranks(_measure, arguments.nproc, *options, timeout=3600.0)[0]
    facts = environment() | {"ranks": arguments.nproc, "dtype": arguments.dtype}
    for name, value in facts.items():
        print(f"# {name}: {value}")
    for row in rows:
        heading = "microseconds   against Gloo   of the floor   bytes moved"
        print(f"\n{row['bytes']:>11,} bytes       {heading}")
        for name, seconds in row["seconds"].items():
            against, floor = row["seconds"][_GLOO] / seconds, row["seconds"][_FLOOR] / seconds
            moved = row["moved"].get(name)
            counted = "" if moved is None else f"{moved[0]:>14,} and {moved[1]:,} staged"
            print(f"{name:<24}{seconds * 1e6:>14,.1f}{against:>14.1f}x{floor:>14.2f}x{counted}")
    if arguments.plot:
        from .plot import draw

        draw(rows, facts, arguments.plot)
    print(json.dumps({"benchmark": "collectives", **facts, "rows": rows}))
    return 0


def _measure(
    group: Group, sizes: list[int], dtype_name: str, rounds: int, as_list: bool
) -> list[dict[str, Any]]:
    """Every size on one rank."""
    pin(group.rank)
    with Group() as pinned:
        dtype = getattr(torch, dtype_name)
        return [
            _measure_size(pinned, size // dtype.itemsize, dtype, rounds, as_list) for size in sizes
        ]


def _measure_size(
    group: Group, numel: int, dtype: torch.dtype, rounds: int, as_list: bool
) -> dict[str, Any]:
    transport = group._transport
    if not isinstance(transport, SharedMemory):
        raise ParallelKitError(
            f"bench collectives: the ranks use {group.transport}, no shared memory"
        )
    rank, size = group.rank, group.size
    weights = [float(r + 1) for r in range(size)]
    weight, total = weights[rank], sum(weights)
    values = [
        torch.randn(numel, generator=torch.Generator().manual_seed(r), dtype=torch.float32).to(
            dtype
        )
        for r in range(size)
    ]
    expected = sum(w / total * v.double() for w, v in zip(weights, values, strict=True))

    arena, ordinary, gloo = (
        group.empty(numel, dtype=dtype),
        values[rank].clone(),
        values[rank].clone(),
    )
    native_arena, native_ordinary = (PreparedAllReduce(t, group) for t in (arena, ordinary))
    unweighted = PreparedAllReduce(arena, group, "total")
    private = values[rank].clone()

    def with_gloo() -> None:
        gloo.mul_(weight)
        dist.all_reduce(gloo)
        gloo.div_(total)

    candidates: dict[str, Candidate] = {
        "in place, native": lambda: native_arena.native(weight),
        "in place, public": lambda: weighted_all_reduce_(arena, weight, group),
        "in place, unweighted": lambda: unweighted.native(1.0, 1.0 / size),
        "ordinary, native": lambda: native_ordinary.native(weight),
        "ordinary, public": lambda: weighted_all_reduce_(ordinary, weight, group),
        _GLOO: with_gloo,
        _FLOOR: lambda: private.mul_(-1.0),
    }
    targets = {"in place": arena, "ordinary": ordinary, "Gloo": gloo}
    if as_list:
        cuts = gpt_cuts(numel)
        native_list = PreparedAllReduce([arena[a:b] for a, b in cuts], group)
        candidates["in place, 150 tensors"] = lambda: native_list.native(weight)
        ordinary_list = PreparedAllReduce([ordinary[a:b].clone() for a, b in cuts], group)
        candidates["ordinary, 150 tensors"] = lambda: ordinary_list.native(weight)
    moved = {}
    for name, call in candidates.items():
        target = next((t for prefix, t in targets.items() if name.startswith(prefix)), None)
        if target is not None:
            target.copy_(values[rank])
        group.barrier()
        before = transport.traffic()
        call()
        moved[name] = [b - a for a, b in zip(before, transport.traffic(), strict=True)]
        if target is not None and not name.endswith(("unweighted", "tensors")):
            _check(name, target, expected, dtype)
    del values, expected
    seconds = interleaved(group, candidates, rounds, f"{numel * dtype.itemsize:,} bytes")
    ours = {name: m for name, m in moved.items() if any(m)}
    return {"bytes": numel * dtype.itemsize, "seconds": seconds, "moved": ours}


def _check(name: str, result: torch.Tensor, expected: Any, dtype: torch.dtype) -> None:
    """A speed of a wrong result is none."""
    bound = 8 * torch.finfo(dtype).eps * float(expected.abs().max())
    worst = float((result.double() - expected).abs().max())
    if not worst <= bound:
        raise ParallelKitError(f"bench collectives: {name} is wrong by {worst:g}, bound {bound:g}")


def gpt_cuts(numel: int) -> list[tuple[int, int]]:
    """150 stretches of a buffer, in the proportions of a GPT's parameters."""
    shares = torch.tensor(_BLOCK * 15, dtype=torch.float64)
    ends = (shares.cumsum(0) / shares.sum() * numel).round().long().tolist()
    return list(zip([0, *ends[:-1]], ends, strict=True))
