"""A split MLP, forward and backward, against torch.distributed.tensor.parallel on Gloo.

hidden 1024 → ffn 4096 → hidden, fp32, 2 ranks with one thread each. Candidates take turns:

    ours       ColumnParallelLinear, GELU, RowParallelLinear
    torch      the same nn.Linear layers under parallelize_module
    products   the local products alone, no communication: what neither can be faster than

and the communication of one step by itself, a sum of [tokens, hidden] forward and one backward:
`our sums` and `Gloo`. Both layers are checked against one unsplit MLP in float64 before anything is
timed. Times are medians, the slowest rank's counting. The last line is one JSON object.

    python bench/bench_tensor_parallel.py            about two minutes, on a quiet machine
    python bench/bench_tensor_parallel.py --check    the checks alone, tiny
"""

import argparse
import copy
import json
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import parallelkit as pk
from parallelkit.bench.measure import environment, interleaved, pin
from parallelkit.nn.term import Term

TOKENS = (1, 4, 32, 256, 2048)
BOUND = 1e-4  # of the largest value: two fp32 products of some thousand terms


def mlp(hidden: int, ffn: int) -> nn.Sequential:
    """The same weights wherever it is called."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(hidden, ffn), nn.GELU(), nn.Linear(ffn, hidden))


def step(model: nn.Module, x: torch.Tensor, dy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Forward and backward; y and the gradient of x."""
    for parameter in model.parameters():
        parameter.grad = None
    x.grad = None
    y = model(x)
    y.backward(dy)
    assert x.grad is not None
    return y.detach(), x.grad


def sums(group: pk.Group, x: torch.Tensor) -> None:
    """The communication of one step, ours: a product has written the term where it is summed."""
    for _ in range(2):
        Term(group, x.shape, x.dtype).finish(x.dtype)


def gloo(x: torch.Tensor) -> None:
    """The same over Gloo."""
    for _ in range(2):
        dist.all_reduce(x)


def run(group: pk.Group, tokens: list[int], hidden: int, ffn: int, rounds: int) -> list[dict]:
    """One rank: check, then time, every number of tokens."""
    if rounds:
        pin(group.rank)
    whole = mlp(hidden, ffn)
    ours = nn.Sequential(
        pk.nn.ColumnParallelLinear.from_linear(whole[0], group, activation="gelu"),
        pk.nn.RowParallelLinear.from_linear(whole[2], group),
    )
    mesh = init_device_mesh("cpu", (group.size,))
    theirs = parallelize_module(
        copy.deepcopy(whole), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()}
    )
    share = ffn // group.size
    products = mlp(hidden, share)
    exact = copy.deepcopy(whole).double()
    rows = []
    for count in tokens:
        generator = torch.Generator().manual_seed(count)
        x = torch.randn(count, hidden, generator=generator).requires_grad_()
        dy = torch.randn(count, hidden, generator=generator)
        wanted = step(exact, x.detach().double().requires_grad_(), dy.double())
        wrong = {}
        for name, model in (("ours", ours), ("torch", theirs)):
            found = step(model, x, dy)
            wrong[name] = max(
                float((f - w).abs().max() / w.abs().max())
                for f, w in zip(found, wanted, strict=True)
            )
            if wrong[name] > BOUND:
                raise SystemExit(f"{name} at {count} tokens is wrong by {wrong[name]:.1e}")
        row: dict = {"tokens": count, "wrong": wrong}
        if rounds:
            buffer = torch.zeros(count, hidden)
            candidates: dict[str, Callable[[], object]] = {
                "ours": lambda: step(ours, x, dy),  # noqa: B023
                "torch": lambda: step(theirs, x, dy),  # noqa: B023
                "products": lambda: step(products, x, dy),  # noqa: B023
                "our sums": lambda: sums(group, buffer),  # noqa: B023
                "Gloo": lambda: gloo(buffer),  # noqa: B023
            }
            row["seconds"] = interleaved(group, candidates, rounds, f"{count} tokens")
        rows.append(row)
    return rows


def main() -> None:
    """Run the ranks and print what the header describes."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--check", action="store_true", help="no timing, small sizes")
    options = parser.parse_args()
    sizes = ([1, 5], 64, 128, 0) if options.check else (list(TOKENS), 1024, 4096, options.rounds)
    rows = pk.testing.run_ranks(run, options.nproc, *sizes, timeout=600)[0]
    facts = environment() | {"ranks": options.nproc, "hidden": sizes[1], "ffn": sizes[2]}
    for key, value in facts.items():
        print(f"# {key}: {value}")
    if sizes[3]:
        names = list(rows[0]["seconds"])
        print(
            "  ".join(["tokens", *(f"{n + ' ms':>11}" for n in names), "torch/ours", "Gloo/sums"])
        )
        for row in rows:
            s = row["seconds"]
            print(
                f"{row['tokens']:>6}  "
                + "  ".join(f"{1e3 * s[n]:>11.3f}" for n in names)
                + f"  {s['torch'] / s['ours']:>10.2f}  {s['Gloo'] / s['our sums']:>9.1f}"
            )
    print(json.dumps({"facts": facts, "rows": rows}))


if __name__ == "__main__":
    main()
