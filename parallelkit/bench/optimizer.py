"""A whole optimizer step over the ranks of one host: average the gradients, AdamW, equal replicas.

Compared are ours in one pass (`ShardedAdamW` with `data_parallel`), what most people run (weighted
all-reduce over Gloo in 25 MB buckets, torch's fused AdamW), ZeroRedundancyOptimizer after the same
all-reduce, and our own reduce-scatter, AdamW and all-gather one after the other. torch's AdamW does
not look for gradients that are not finite, so the plain "one pass" does not either; "+ finite
check" is the default of `ShardedAdamW`, and costs one more read of the gradients, as clipping does.
The floor scales as many bytes in place as the pass has to move. Every candidate's first step is
compared with float64 before anything is timed; a wrong one ends the benchmark.

Then whole training steps beside FSDP2 and, where it is installed, DeepSpeed (see `zero`); then the
step alone, on one rank with two threads, against torch's fused AdamW.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer

from ..cli import positive
from ..collectives import all_gather_flat, shard_bounds, weighted_reduce_scatter
from ..data_parallel import DataParallel
from ..errors import InvalidArgumentError
from ..group import Group
from ..host_step import HostStep
from ..optimizer import ShardedAdamW
from ..sharded_step import NativeStep
from ..testing import run_ranks
from .collectives import gpt_cuts
from .measure import Candidate, environment, interleaved, pin
from .problem import OPTIONS, Problem
from .zero import LOSS, OURS, whole_steps

__all__ = ["add_arguments", "run"]

_OURS, _GLOO, _FLOOR = "one pass", "Gloo, torch fused AdamW", "floor"
_FEWEST = 200_000  # of which each tensor has some: FSDP2 cannot take one without elements
_BUCKET = 25 << 18  # float32 elements of 25 MB


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark."""
    parser.add_argument("--nproc", type=positive(int), default=2, help="ranks (default 2)")
    parser.add_argument("--rounds", type=positive(int), default=15, help="turns (default 15)")
    parser.add_argument(
        "--numel", type=positive(int), default=25_500_000, help="parameters (default %(default)s)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Measure, print tables and one JSON line; raises where a result was wrong."""
    size, rounds, numel = arguments.nproc, arguments.rounds, arguments.numel
    if numel < _FEWEST:
        raise InvalidArgumentError(f"--numel must be at least {_FEWEST:,}, got {numel}")
    steps = run_ranks(_measure_steps, size, numel, rounds, timeout=3600.0)[0]
    whole = run_ranks(_measure_whole, size, numel, rounds, timeout=3600.0)[0]
    alone = run_ranks(_measure_alone, 1, numel, rounds, timeout=3600.0)[0]
    facts = environment() | {"ranks": size, "parameters": numel, "tensors": 150}
    for name, value in facts.items():
        print(f"# {name}: {value}")
    title = f"a step of {size} ranks"
    print(f"\n{title:<36}milliseconds  against Gloo  bytes a parameter")
    for name, seconds in steps["seconds"].items():
        counted = steps["bytes"].get(name)
        moved = "" if counted is None else f"{counted:>19.1f}"
        against = steps["seconds"][_GLOO] / seconds
        print(f"{name:<36}{seconds * 1e3:>12.2f}{against:>13.2f}x{moved}")
    print(f"\n{'loss, backward and step':<36}milliseconds  beyond  of ours")
    for name, seconds in whole.items():
        beyond, ours = seconds - whole[LOSS], whole[OURS] - whole[LOSS]
        print(f"{name:<36}{seconds * 1e3:>12.2f}{beyond * 1e3:>8.2f}{beyond / ours:>8.1f}x")
    print(f"\n{'one rank, two threads':<36}milliseconds  GB/s")
    for name, seconds in alone["seconds"].items():
        rate = alone["bytes"][name] * numel / seconds / 1e9
        print(f"{name:<36}{seconds * 1e3:>12.2f}{rate:>6.1f}")
    results = {"steps": steps, "whole_steps": whole, "alone": alone}
    print(json.dumps({"benchmark": "optimizer", **facts, **results}))
    return 0


# -- several ranks ---------------------------------------------------------------------------------


def _measure_steps(group: Group, numel: int, rounds: int) -> dict[str, Any]:
    pin(group.rank)
    with Group() as pinned, Group(_alone()) as alone:
        problem = Problem(pinned, numel)
        candidates: dict[str, Candidate] = {}
        optimizers: dict[str, ShardedAdamW] = {}
        for name, cuts, more in (
            (_OURS, problem.cuts, {"skip_nonfinite": False}),
            ("one pass, one tensor", [(0, numel)], {"skip_nonfinite": False}),
            ("one pass + finite check", problem.cuts, {}),
            ("one pass, clipped", problem.cuts, {"max_grad_norm": 1e9}),
        ):
            step, parameters, optimizers[name] = _one_pass(problem, cuts, more)
            step()
            problem.check(name, parameters, cuts)
            candidates[name] = step
        for name, make in (
            (_GLOO, _gloo),
            ("Gloo, ZeroRedundancy", _zero_redundancy),
        ):
            step, parameters = make(problem)
            step()
            problem.check(name, parameters, problem.cuts)
            candidates[name] = step
        step, parameters = _apart(problem, alone)
        step()
        problem.check("ours, apart", parameters, [(0, numel)])
        candidates["ours, apart"] = step
        moved = {name: _counted(optimizers[name], candidates[name]) for name in optimizers}
        share = int(moved[_OURS] * numel / pinned.size / 8)
        scaled = torch.randn(share)
        candidates[_FLOOR] = lambda: scaled.mul_(-1.0)
        seconds = interleaved(pinned, candidates, rounds, f"{numel:,} parameters")
        return {"seconds": seconds, "bytes": moved}


def _measure_whole(group: Group, numel: int, rounds: int) -> dict[str, float]:
    pin(group.rank)
    with Group() as pinned:
        candidates = whole_steps(Problem(pinned, numel))
        return interleaved(pinned, candidates, rounds, "whole steps")


def _alone() -> Any:
    """A process group of this rank."""
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    return groups[dist.get_rank()]


def _one_pass(
    problem: Problem, cuts: list[tuple[int, int]], more: dict[str, Any]
) -> tuple[Candidate, list[nn.Parameter], ShardedAdamW]:
    parameters = problem.parameters(cuts)
    model = DataParallel(nn.ParameterList(parameters), problem.group)
    optimizer = ShardedAdamW(parameters, data_parallel=model, **OPTIONS, **more)
    buckets = model._buckets
    for parameter, cut in zip(parameters, cuts, strict=True):
        buckets.slot_of[parameter].view.copy_(problem.gradient[slice(*cut)])

    def step() -> None:
        """What backward leaves behind, then the step; gradients stay for the next."""
        for slot in buckets.slot_of.values():
            slot.used = True
        buckets.weight = buckets.reference = problem.weight
        optimizer.step()

    return step, parameters, optimizer


def _counted(optimizer: ShardedAdamW, step: Candidate) -> float:
    """Bytes that all ranks read and write in a step, for each parameter."""
    taken = optimizer._step
    assert isinstance(taken, HostStep) and isinstance(taken.passes, NativeStep)
    native = taken.passes.native
    before = sum(native.traffic)
    step()
    moved = optimizer.group._gather_objects(sum(native.traffic) - before)
    return float(sum(moved)) / sum(p.numel() for p in optimizer.parameters())


def _averaged(problem: Problem) -> tuple[Callable[[], None], list[nn.Parameter]]:
    """Gradients in buckets and their weighted mean over Gloo."""
    parameters = problem.parameters(problem.cuts)
    buckets: list[torch.Tensor] = []
    filling: list[tuple[nn.Parameter, tuple[int, int]]] = []

    def close() -> None:
        begin = filling[0][1][0]
        bucket = problem.gradient[begin : filling[-1][1][1]].clone()
        buckets.append(bucket)
        for parameter, (a, b) in filling:
            parameter.grad = bucket[a - begin : b - begin]
        filling.clear()

    for parameter, cut in zip(parameters, problem.cuts, strict=True):
        if filling and cut[1] - filling[0][1][0] > _BUCKET:
            close()
        filling.append((parameter, cut))
    close()

    def average() -> None:
        for bucket in buckets:
            bucket.mul_(problem.weight)
            dist.all_reduce(bucket)
            bucket.div_(problem.total)

    return average, parameters


def _gloo(problem: Problem) -> tuple[Candidate, list[nn.Parameter]]:
    average, parameters = _averaged(problem)
    optimizer = torch.optim.AdamW(parameters, fused=True, **OPTIONS)

    def step() -> None:
        average()
        optimizer.step()

    return step, parameters


def _zero_redundancy(problem: Problem) -> tuple[Candidate, list[nn.Parameter]]:
    average, parameters = _averaged(problem)
    optimizer = ZeroRedundancyOptimizer(
        parameters, optimizer_class=torch.optim.AdamW, fused=True, **OPTIONS
    )

    def step() -> None:
        average()
        optimizer.step()

    return step, parameters


def _apart(problem: Problem, alone: Group) -> tuple[Candidate, list[nn.Parameter]]:
    """Our collectives and our kernel, as three passes."""
    group, numel = problem.group, problem.numel
    gradient, whole = group.empty(numel).copy_(problem.gradient), group.empty(numel)
    whole.copy_(problem.start)
    start, stop = shard_bounds(numel, group.size, group.rank)
    shard = nn.Parameter(whole[start:stop].clone())
    shard.grad = torch.empty_like(shard)
    optimizer = ShardedAdamW([shard], group=alone, skip_nonfinite=False, **OPTIONS)

    def step() -> None:
        weighted_reduce_scatter(gradient, problem.weight, group, out=shard.grad)
        optimizer.step()
        all_gather_flat(shard.detach(), numel, group, out=whole)

    return step, [nn.Parameter(whole, requires_grad=False)]


# -- one rank --------------------------------------------------------------------------------------


def _measure_alone(group: Group, numel: int, rounds: int) -> dict[str, Any]:
    torch.set_num_threads(2)
    candidates: dict[str, Candidate] = {}
    moved = {}
    for dtype, bytes_each in ((torch.float32, 28.0), (torch.bfloat16, 14.0)):
        kind = str(dtype).removeprefix("torch.")
        for name, make in (
            (
                f"ours, {kind}",
                lambda p, d=dtype: ShardedAdamW(
                    p, group=group, state_dtype=d, master_weights=False, skip_nonfinite=False
                ),
            ),
            (f"torch fused, {kind}", lambda p: torch.optim.AdamW(p, fused=True)),
        ):
            parameters = [nn.Parameter(torch.randn(b - a).to(dtype)) for a, b in gpt_cuts(numel)]
            for parameter in parameters:
                parameter.grad = torch.randn(parameter.shape).to(dtype)
            candidates[name] = make(parameters).step
            moved[name] = bytes_each
    scaled = torch.randn(int(28 * numel / 8))
    candidates[_FLOOR] = lambda: scaled.mul_(-1.0)
    moved[_FLOOR] = 28.0
    return {"seconds": interleaved(group, candidates, rounds, "one rank"), "bytes": moved}
