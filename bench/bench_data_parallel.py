"""A training step of two ranks: pk.DataParallel against torch DDP on Gloo.

25 linear layers of 1024 x 1024 in fp32 (26.2 M parameters), one thread a rank, every rank the same
number of micro-batches. The candidates take turns, a step each:

    local              forward and backward alone, nothing travels; "zeros" with gradients that
                       zero_grad leaves in place, which saves the kernel from mapping memory anew
    DDP + AdamW        DistributedDataParallel on Gloo, torch.optim.AdamW(fused=True)
    ours + AdamW       pk.DataParallel, the same optimizer
    ours + Sharded     pk.DataParallel with pk.ShardedAdamW(data_parallel=model), which looks for
                       gradients that are not finite; "unchecked" as torch's AdamW does not
    ours, backward     pk.DataParallel without an optimizer; "no overlap" with overlap=False
    buckets            the collectives of all buckets by themselves

"beyond" is the time beyond the faster local step, "DDP" how many times smaller it is than DDP's.
The share of communication that is hidden is (no overlap - overlap) / buckets. Two ranks that share
memory leave no core free to hide it on; waiting for a link between hosts does. Gradients are
compared with DDP's before anything is timed. Memory is measured in processes of their own: the
largest proportional set size of a rank beyond that before the model was built, in multiples of the
parameters' bytes. Times are medians, the slowest rank's counting. The last line is one JSON object.

    python bench/bench_data_parallel.py             a few minutes, on a quiet machine
    python bench/bench_data_parallel.py --check     the checks alone, tiny
    python bench/bench_data_parallel.py --rows 256 --link 4gbit
                                                    torch.distributed between the ranks, over a
                                                    loopback that carries so much (root only)
"""

import argparse
import ctypes
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import parallelkit as pk
from parallelkit.bench.measure import environment, interleaved, pin, proportional_bytes

BOUND = 1e-5  # of the largest gradient: fp32, in two orders of addition
Step = Callable[[], None]


def build(width: int, layers: int) -> nn.Module:
    """The same weights wherever it is called."""
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(width, width) for _ in range(layers)])


class Steps:
    """A step of each candidate on one rank; models are made when first asked for."""

    def __init__(self, group: pk.Group, arguments: argparse.Namespace) -> None:
        self.group, self.arguments = group, arguments
        torch.manual_seed(1 + group.rank)
        shape = (arguments.micro_batches, arguments.rows, arguments.width)
        self.inputs = torch.randn(shape)

    def module(self) -> nn.Module:
        """A model of its own for each candidate."""
        return build(self.arguments.width, self.arguments.layers)

    def plain(self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Step:
        """Losses divided by the number of micro-batches; DDP syncs at the last."""

        def step() -> None:
            for index, x in enumerate(self.inputs):
                model.require_backward_grad_sync = index == len(self.inputs) - 1
                (model(x).square().mean() / len(self.inputs)).backward()
            if optimizer:
                optimizer.step()

        return step

    def weighted(
        self, model: pk.DataParallel, optimizer: torch.optim.Optimizer | None = None
    ) -> Step:
        """Each loss with the number of rows it is a mean over."""

        def step() -> None:
            for index, x in enumerate(self.inputs, start=1):
                model.backward(model(x).square().mean(), len(x), sync=index == len(self.inputs))
            if optimizer:
                optimizer.step()

        return step

    def make(self, name: str) -> tuple[Step, nn.Module]:
        """A candidate's step, and the model whose gradients it leaves."""
        if name.startswith("local"):
            model = self.module()
            return self.plain(model), model
        if name == "DDP + AdamW":
            model = DistributedDataParallel(self.module(), gradient_as_bucket_view=True)
            return self.plain(model, fused(model)), model
        model = pk.DataParallel(self.module(), self.group, overlap="no overlap" not in name)
        if name == "ours + AdamW":
            return self.weighted(model, fused(model)), model
        if name.startswith("ours + Sharded"):
            sharded = pk.ShardedAdamW(
                model.parameters(),
                lr=1e-6,
                data_parallel=model,
                skip_nonfinite="unchecked" not in name,
            )
            return self.weighted(model, sharded), model
        return self.weighted(model), model

    def candidate(self, name: str) -> Step:
        """A step with its zero_grad."""
        step, model = self.make(name)

        def whole() -> None:
            step()
            model.zero_grad(set_to_none="zeros" not in name)

        return whole


def fused(model: nn.Module) -> torch.optim.Optimizer:
    """torch's fastest AdamW on a CPU."""
    return torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)


def check(steps: Steps) -> float:
    """The largest difference from DDP's gradients, relative to the largest gradient."""
    grads = []
    for name in ("DDP + AdamW", "ours + AdamW"):
        step, model = steps.make(name)
        step()
        grads.append([p.grad for p in model.parameters()])
    return max(
        float((ours - ddp).abs().max() / ddp.abs().max()) for ddp, ours in zip(*grads, strict=True)
    )


def times(group: pk.Group, arguments: argparse.Namespace) -> tuple[float, dict[str, float]]:
    """The check, and seconds of each candidate."""
    pin(group.rank)
    with pk.Group() as pinned:
        steps = Steps(pinned, arguments)
        error = check(steps)
        if arguments.check or error > BOUND:
            return error, {}
        names = ("local", "local, zeros", "DDP + AdamW", "ours + AdamW", "ours + Sharded")
        names += ("ours + Sharded, unchecked", "ours, backward", "ours, no overlap")
        candidates = {name: steps.candidate(name) for name in names}
        buckets = list(pk.DataParallel(steps.module(), pinned)._buckets)

        def travel() -> None:
            for bucket in buckets:
                bucket.reduction.run()

        candidates["buckets"] = travel
        return error, interleaved(pinned, candidates, arguments.rounds, "data parallel")


def memory(group: pk.Group, arguments: argparse.Namespace, name: str) -> float:
    """The largest memory over three steps, beyond the start, in multiples of the parameters."""
    steps = Steps(group, arguments)
    small = build(arguments.width, 1)  # makes torch load what it loads at first use
    small(steps.inputs[0]).sum().backward()
    fused(small).step()
    start, peak, done = proportional_bytes(), 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.is_set():
            peak = max(peak, proportional_bytes())
            time.sleep(0.005)

    watcher = threading.Thread(target=watch)
    watcher.start()
    step, model = steps.make(name)
    for _ in range(3):
        step()
        model.zero_grad()
    done.set()
    watcher.join()
    return (peak - start) / sum(p.nbytes for p in model.parameters())


def join_by_link(rate: str) -> None:
    """Leave this process and its children a network of their own, and its loopback such a rate."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(0x40000000):  # CLONE_NEWNET; os.unshare is of Python 3.12
        raise OSError(ctypes.get_errno(), "--link needs a network namespace, that is, root")
    limit = f"tc qdisc add dev lo root tbf rate {rate} burst 4mb latency 100ms"
    for command in ("ip link set lo up", limit):
        subprocess.run(command.split(), check=True)
    os.environ["PARALLELKIT_ALGORITHM"] = "reference"


def main() -> int:
    """Check, measure, print; 1 where gradients are wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=25)
    parser.add_argument("--rows", type=int, default=32, help="of a micro-batch")
    parser.add_argument("--micro-batches", type=int, default=1)
    parser.add_argument("--link", metavar="RATE", help="between the ranks, such as 4gbit")
    parser.add_argument("--check", action="store_true", help="the checks alone, tiny")
    arguments = parser.parse_args()
    if arguments.link:
        join_by_link(arguments.link)
    if arguments.check:
        arguments.width, arguments.layers = 33, 3
    error, seconds = pk.testing.run_ranks(times, arguments.nproc, arguments, timeout=3600.0)[0]
    if error > BOUND:
        print(f"gradients differ from DDP's by {error:.1e} of the largest, more than {BOUND:.0e}")
        return 1
    print(f"# gradients differ from DDP's by at most {error:.1e} of the largest")
    if arguments.check:
        return 0
    parameters = arguments.layers * (arguments.width + 1) * arguments.width
    facts = environment() | {"ranks": arguments.nproc, "parameters": parameters}
    facts |= {"rows": arguments.rows, "micro_batches": arguments.micro_batches}
    facts["link"] = arguments.link or "shared memory"
    for name, value in facts.items():
        print(f"# {name}: {value}")
    local = min(seconds["local"], seconds["local, zeros"])
    beyond = {name: value - local for name, value in seconds.items()}
    print(f"\n{'':<28}{'ms a step':>12}{'beyond':>10}{'DDP':>8}")
    for name, value in seconds.items():
        against = ""
        if name.startswith("ours +") and min(beyond[name], beyond["DDP + AdamW"]) > 0:
            against = f"{beyond['DDP + AdamW'] / beyond[name]:.1f}x"
        extra = "" if name == "buckets" else f"{beyond[name] * 1e3:.1f}"
        print(f"{name:<28}{value * 1e3:>12.1f}{extra:>10}{against:>8}")
    hidden = (seconds["ours, no overlap"] - seconds["ours, backward"]) / seconds["buckets"]
    print(f"\nshare of communication that is hidden: {hidden:.0%}")
    peaks = {
        name: max(pk.testing.run_ranks(memory, arguments.nproc, arguments, name, timeout=600.0))
        for name in ("local", "DDP + AdamW", "ours + AdamW", "ours + Sharded")
    }
    print(f"\n{'':<20}{'peak memory, in multiples of the parameters':>12}")
    for name, value in peaks.items():
        print(f"{name:<20}{value:>12.2f}")
    print(
        json.dumps(
            {
                "benchmark": "data_parallel",
                **facts,
                "seconds": seconds,
                "hidden": hidden,
                "peak_memory_over_parameters": peaks,
            }
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
