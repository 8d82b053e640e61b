"""Times on one GPU: the optimizer's pass and the weighted all-reduce over virtual ranks.

Virtual ranks share one GPU, so that all bytes of all ranks pass through its memory; what a row is
held against is the bandwidth of the device's own copy, counting bytes read and written. Before a
candidate is timed its first result is compared with float64 at both ends of the data, and a wrong
one has no time. Values are random. Times are medians between events on the stream of rank 0.

    python bench/gpu_times.py --seconds 60 --out times.json
    python bench/gpu_times.py --rehearse            the same on the CPU, tiny
"""

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import parallelkit as pk
from parallelkit.bench.measure import environment
from parallelkit.prepared import PreparedAllReduce
from parallelkit.testing import virtual_ranks

PARAMETERS, TENSORS = 1_000_000_000, 10
ALL_REDUCE_BYTES = [2**16, 2**20, 2**24, 2**26, 2**28, 2**30]
RANKS = (2, 4, 8)
GOAL = 0.92  # of the copy's bandwidth, for AdamW and the fused pass
EDGE = 512  # elements compared at either end
LR, DECAY = 1e-3, 0.01

# Dtypes of parameters, gradients and moments, and whether there are fp32 masters.
FORMATS = {
    "fp32": (torch.float32, torch.float32, torch.float32, False),
    "bf16, fp32 master": (torch.bfloat16, torch.bfloat16, torch.float32, True),
    "bf16, fp32 gradient and master": (torch.bfloat16, torch.float32, torch.float32, True),
    "all bf16, stochastic": (torch.bfloat16, torch.bfloat16, torch.bfloat16, False),
}


class Bench:
    """Where, how large, and how long; the rows so far are in the file after each."""

    def __init__(self, rehearse: bool, seconds: float, out: str | None) -> None:
        self.device = "cpu" if rehearse else "cuda"
        self.shrink = 100_000 if rehearse else 1
        self.deadline = time.monotonic() + seconds
        self.out = out
        self.copy = math.nan  # bytes a second
        self.report: dict[str, Any] = {"rows": [], "left out": [], "environment": environment()}

    def parameters(self, bytes_each: int) -> int:
        """As many as wanted, or as fit."""
        if self.device == "cpu":
            return PARAMETERS // self.shrink
        free, _ = torch.cuda.mem_get_info()
        return min(PARAMETERS, int(0.8 * free / bytes_each))

    def late(self, what: str) -> bool:
        """Whether there is no time left for it."""
        if time.monotonic() > self.deadline:
            self.report["left out"].append(what)
            return True
        return False

    def row(self, what: str, seconds: float, nbytes: float, **more: Any) -> None:
        """Print and keep one."""
        rate = nbytes / seconds if seconds else math.nan
        row = {"what": what, "ms": round(seconds * 1e3, 4), "GB/s": round(rate / 1e9, 1), **more}
        row["of copy"] = round(rate / self.copy, 4)
        self.report["rows"].append(row)
        print(f"  {what:58}{seconds * 1e3:11.4f} ms{rate / 1e9:9.1f} GB/s{row['of copy']:8.1%}")
        self.save()

    def wrong(self, what: str, error: float, **more: Any) -> None:
        """Keep a row that has no time."""
        self.report["rows"].append({"what": what, "wrong": error, **more})
        print(f"  {what:58} WRONG by {error:g}")
        self.save()

    def save(self) -> None:
        """Write what there is: whoever ends this part early has the rows before."""
        if self.out is not None:
            Path(self.out).write_text(json.dumps(self.report, indent=1))


class Clock:
    """Moments on the current stream; on the CPU, of the wall."""

    def __init__(self, device: str) -> None:
        self._gpu, self._moments = device == "cuda", list[Any]()

    def mark(self) -> None:
        """Now."""
        if self._gpu:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._moments.append(event)
        else:
            self._moments.append(time.perf_counter())

    def median(self) -> float:
        """Seconds from one mark to the next."""
        pairs = list(zip(self._moments, self._moments[1:], strict=False))
        if not self._gpu:
            return statistics.median(after - before for before, after in pairs)
        torch.cuda.synchronize()
        return statistics.median(before.elapsed_time(after) / 1e3 for before, after in pairs)


def timed(call: Callable[[], object], device: str, turns: int) -> float:
    """Median seconds of one call, enqueued one after the other; the first two do not count."""
    for _ in range(2):
        call()
    clock = Clock(device)
    clock.mark()
    for _ in range(turns):
        call()
        clock.mark()
    return clock.median()


def random(numel: int, seed: int, device: str, dtype: torch.dtype) -> torch.Tensor:
    """Normal numbers, the same for the same seed."""
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(numel, generator=generator, device=device, dtype=dtype)


def edges(flat: torch.Tensor) -> torch.Tensor:
    """Both ends in float64, on the CPU."""
    return torch.cat([flat[:EDGE], flat[-EDGE:]]).double().cpu()


def copy_bandwidth(bench: Bench) -> None:
    """Bytes a second that the device's copy reads and writes: what the rest is held against."""
    numel = 2**30 // bench.shrink
    source = random(numel, 0, bench.device, torch.float32)
    target = torch.empty_like(source)
    seconds = timed(lambda: target.copy_(source), bench.device, 20)
    bench.copy = 2 * source.nbytes / seconds
    bench.report["copy GB/s"] = round(bench.copy / 1e9, 1)
    bench.row("device copy, 4 GiB", seconds, 2 * source.nbytes)


# -- the optimizer --------------------------------------------------------------------------------


def first_step(p: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    """What AdamW makes of float64 p and its gradient g in the first step."""
    return p - LR * (DECAY * p + g / (g.abs() + 1e-8))


def leaves(numel: int, device: str, dtype: torch.dtype) -> nn.ParameterList:
    """The parameters, the same on every rank."""
    values = [random(numel // TENSORS, 77 + i, device, dtype) for i in range(TENSORS)]
    return nn.ParameterList([nn.Parameter(value) for value in values])


def error_of(found: torch.Tensor, before: torch.Tensor, gradient: torch.Tensor, bits: int) -> float:
    """How many times the allowed error a parameter is off, at its worst element."""
    exact = first_step(before, gradient)
    allowed = 2.0**-bits * (exact.abs() + 8 * LR) + LR * 1e-3
    return float(((edges(found.detach().view(-1)) - exact).abs() / allowed).max())


def adamw_alone(bench: Bench) -> None:
    """One rank: AdamW over many tensors, ours and torch's fused step."""
    device = bench.device
    for name, (dtype, grad_dtype, state_dtype, master) in FORMATS.items():
        sizes = dtype.itemsize, grad_dtype.itemsize, state_dtype.itemsize
        own = [0, 4] if master else [1, sizes[0]]  # of masters, or of the parameter itself
        moved = sizes[0] * (1 + own[0]) + sizes[1] + 4 * sizes[2] + (8 if master else 0)
        held = sizes[0] + sizes[1] + 2 * sizes[2] + (4 if master else 0)
        makers: dict[str, Callable[[Any, Any], Any]] = {
            "parallelkit": lambda parameters, group, state=state_dtype, master=master: (
                pk.ShardedAdamW(
                    parameters, LR, weight_decay=DECAY, group=group, state_dtype=state,
                    master_weights=master, skip_nonfinite=False,
                )
            ),
        }  # fmt: skip
        if dtype == grad_dtype == state_dtype:
            makers["torch, fused"] = lambda parameters, group: torch.optim.AdamW(
                parameters, LR, weight_decay=DECAY, fused=True
            )
        for who, make in makers.items():
            what = f"AdamW, {name}, {who}"
            if bench.late(what):
                continue
            numel = bench.parameters(held + sizes[0])
            with pk.Group(device=device) as group:
                parameters = leaves(numel, device, dtype)
                for index, p in enumerate(parameters):
                    p.grad_dtype = grad_dtype
                    p.grad = random(p.numel(), index, device, grad_dtype)
                before, gradient = edges(parameters[0].detach()), edges(parameters[0].grad)
                optimizer = make(parameters, group)
                optimizer.step()
                error = error_of(parameters[0], before, gradient, 7 if dtype.itemsize == 2 else 20)
                if not error <= 1:
                    bench.wrong(what, error)
                else:
                    seconds = timed(optimizer.step, device, 10)
                    facts = {"parameters": numel, "bytes each": moved}
                    goal = {"goal": GOAL} if who == "parallelkit" else {}
                    bench.row(what, seconds, moved * numel, **facts, **goal)
                del optimizer, parameters
            forget(device)


def forget(device: str) -> None:
    """Give memory back, for allocations of another kind."""
    if device == "cuda":
        torch.cuda.empty_cache()


def fused_pass(bench: Bench, size: int, name: str, clipped: bool) -> None:
    """Reduce-scatter, AdamW and all-gather of `size` virtual ranks."""
    dtype, grad_dtype, state_dtype, master = FORMATS[name]
    p, g, m = dtype.itemsize, grad_dtype.itemsize, state_dtype.itemsize
    moved = size * (g * (1 + clipped) + p) + 4 * m + (8 if master else p)
    held = size * (2 * p + g) + 2 * m + (4 if master else 0)  # parameters before they move, too
    numel = bench.parameters(held)
    what = f"one pass, {name}, {size} ranks{', clipped' if clipped else ''}"
    if bench.late(what):
        return

    def rank(group: pk.Group) -> tuple[float, float]:
        module = leaves(numel, bench.device, dtype)
        before = edges(module[0].detach())
        model = pk.DataParallel(module, group, grad_dtype=grad_dtype, overlap=False)
        optimizer = pk.ShardedAdamW(
            model.parameters(), LR, weight_decay=DECAY, group=group, data_parallel=model,
            state_dtype=state_dtype, master_weights=master, skip_nonfinite=False,
            max_grad_norm=1e9 if clipped else None,
        )  # fmt: skip
        buckets = model._buckets
        for index, bucket in enumerate(buckets):
            bucket.flat.copy_(random(len(bucket.flat), 16 * index + group.rank, bench.device, g_of))

        def step() -> None:
            for slot in buckets.slot_of.values():
                slot.used = True
            buckets.weight = 1.0 + group.rank
            optimizer.step()

        slot = buckets.slot_of[module[0]]
        parts = group._gather_objects(edges(slot.view.view(-1)))  # sums, not means
        gradient = sum(parts) / (size * (size + 1) / 2)
        step()
        error = error_of(module[0], before, gradient, 7 if p == 2 else 20)
        return error, timed(step, bench.device, 10)

    g_of = grad_dtype
    error, seconds = virtual_ranks(rank, size, bench.device)[0]
    facts = {"ranks": size, "parameters": numel, "bytes each": moved, "goal": GOAL}
    if error <= 1:
        bench.row(what, seconds, moved * numel, **facts)
    else:
        bench.wrong(what, error, **facts)
    forget(bench.device)


# -- the weighted all-reduce ----------------------------------------------------------------------


def all_reduces(bench: Bench, size: int) -> None:
    """From small to large, in memory that ranks reach and in any other."""

    def rank(group: pk.Group) -> list[tuple[str, int, float, float, float]]:
        rows = []
        for nbytes in ALL_REDUCE_BYTES:
            numel = max(2 * EDGE, nbytes // 4 // bench.shrink)
            for place in ("Group.empty", "ordinary tensor"):
                if any(group._gather_objects(time.monotonic() > bench.deadline)):
                    return rows
                values = random(numel, group.rank, bench.device, torch.float32)
                tensor = group.empty(numel).copy_(values) if place == "Group.empty" else values
                parts = group._gather_objects((1 + group.rank) * edges(tensor))
                exact = sum(parts) / (size * (size + 1) / 2)
                prepared = PreparedAllReduce(tensor, group)
                prepared.run(1.0 + group.rank)
                error = float((edges(tensor) - exact).abs().max())
                turns = 5 if nbytes >= 2**28 else 30
                begin = time.perf_counter()
                seconds = timed(partial(prepared.run, 1.0), bench.device, turns)
                host = (time.perf_counter() - begin) / (turns + 2)
                rows.append((place, 4 * numel, error, seconds, host))
        return rows

    if bench.late(f"all-reduce, {size} ranks"):
        return
    for place, nbytes, error, seconds, host in virtual_ranks(rank, size, bench.device)[0]:
        label = f"{nbytes // 2**10} KiB" if nbytes < 2**20 else f"{nbytes // 2**20} MiB"
        what = f"weighted all-reduce, {label}, {size} ranks, {place}"
        if error <= 1e-5:
            moved = 2 * size * nbytes  # each rank's tensor is read once and written once
            bench.row(what, seconds, moved, ranks=size, bytes=nbytes, **{"host s": host})
        else:
            bench.wrong(what, error, ranks=size, bytes=nbytes)
    forget(bench.device)


def main() -> int:
    """Time everything that fits; fail if any result was wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60.0, help="start nothing after this")
    parser.add_argument("--out", help="file of the JSON")
    parser.add_argument("--rehearse", action="store_true", help="tiny, on the CPU")
    arguments = parser.parse_args()
    bench = Bench(arguments.rehearse, arguments.seconds, arguments.out)
    if not arguments.rehearse:
        bench.report["device"] = torch.cuda.get_device_name()
    copy_bandwidth(bench)
    for size in RANKS:
        fused_pass(bench, size, "bf16, fp32 master", clipped=False)
    adamw_alone(bench)
    for size in RANKS:
        all_reduces(bench, size)
    for size in RANKS:
        fused_pass(bench, size, "fp32", clipped=False)
        fused_pass(bench, size, "all bf16, stochastic", clipped=False)
        fused_pass(bench, size, "bf16, fp32 master", clipped=True)
    bench.save()
    return 1 if any("wrong" in row for row in bench.report["rows"]) else 0


if __name__ == "__main__":
    raise SystemExit(main())
