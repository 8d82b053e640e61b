"""Every kernel of parallelkit._cuda once or twice on small sizes: what compute-sanitizer runs.

Results are compared with float64 as well, since a sanitizer sees no wrong number.
"""

import argparse
import math
import os

import torch
from torch import nn

import parallelkit as pk
from parallelkit.testing import virtual_ranks

RANKS = 2
KINDS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def collectives(group: pk.Group, device: str) -> None:
    """One-shot and large, staged and in place, every dtype, odd lengths."""
    for dtype in KINDS:
        for numel in (1, 1027, 300_001):
            for tensor in (torch.empty(numel, dtype=dtype, device=device), group.empty(numel)):
                tensor.fill_([1.0, 5.0][group.rank])
                pk.weighted_all_reduce_(tensor, [1, 3][group.rank], group)
                assert bool((tensor == 4).all()), (dtype, numel)
        flat = torch.full((1027,), [1.0, 5.0][group.rank], dtype=dtype, device=device)
        shard = pk.weighted_reduce_scatter(flat, [1, 3][group.rank], group)
        assert bool((pk.all_gather_flat(shard, 1027, group) == 4).all())


def steps(group: pk.Group, device: str) -> None:
    """Every format of state, clipped."""
    for dtype in (torch.float32, torch.bfloat16):
        for state in (torch.float32, torch.bfloat16, "int8"):
            for master in (True, False):
                module = nn.ParameterList(
                    nn.Parameter(torch.ones(n, device=device, dtype=dtype)) for n in (5000, 3)
                )
                model = pk.DataParallel(module, group, overlap=False)
                optimizer = pk.ShardedAdamW(
                    model.parameters(), 1e-2, weight_decay=0.0, group=group, data_parallel=model,
                    state_dtype=state, master_weights=master, max_grad_norm=1.0,
                )  # fmt: skip
                for _ in range(2):
                    model.backward(sum((p * (1 + group.rank)).sum() for p in module))
                    optimizer.step()
                norm = optimizer.last_grad_norm
                mean = (1 + group.size) / 2
                assert norm is not None
                assert math.isclose(float(norm), mean * 5003**0.5, rel_tol=1e-5), norm
                for p in module:  # each step moves by lr, whatever the gradient
                    assert bool(((p.float() - 0.98).abs() < 0.01).all()), (dtype, state, master)


def main() -> int:
    """Run them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rehearse", action="store_true", help="on the CPU")
    device = "cpu" if parser.parse_args().rehearse else "cuda"

    def rank(group: pk.Group) -> None:
        collectives(group, device)
        steps(group, device)

    for algorithm in ("auto",) if device == "cpu" else ("auto", "direct", "ring"):
        os.environ["PARALLELKIT_ALGORITHM"] = algorithm
        virtual_ranks(rank, RANKS, device)
        rank_alone = pk.Group(device=device)
        steps(rank_alone, device)
        rank_alone.close()
    print("right")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
