"""The sharded step over torch.distributed against that over shared memory."""

from __future__ import annotations

from typing import Any

import pytest
import ranks
import torch
from torch import nn

import parallelkit as pk
from parallelkit import distributed_step
from parallelkit.ops import cpu
from parallelkit.testing import run_ranks

pytestmark = pytest.mark.skipif(cpu is None, reason="needs the native extension")


def stepped(group: pk.Group, algorithm: str, options: dict[str, Any]) -> list[str]:
    """Digests of the parameters and of the whole state after some steps on equal gradients."""
    distributed_step._COLUMN_BYTES = 4096  # small, so that everything takes many columns
    generator = torch.Generator().manual_seed(7)
    sizes = [(4097,), (70, 91), (5,), (0,), (8192,)]
    dtypes = [torch.bfloat16, torch.float32, torch.bfloat16, torch.float32, torch.float16]
    parameters = [
        nn.Parameter(torch.randn(size, generator=generator).to(dtype))
        for size, dtype in zip(sizes, dtypes, strict=True)
    ]
    with pk.Group(algorithm=algorithm) as group:
        optimizer = pk.ShardedAdamW(parameters, lr=0.01, group=group, **options)
        for step in range(4):
            for number, p in enumerate(parameters):
                grad = torch.randn(p.shape, generator=generator).to(p.dtype)
                p.grad = None if (step + number) % 4 == 0 else grad
            optimizer.step()
        state = optimizer.state_dict()["state"].values()
        kept = [value for entry in state for value in entry.values()]
        assert all(p.isfinite().all() for p in parameters)
        return [ranks.digest([p.detach() for p in parameters]), ranks.digest(kept)]


@pytest.mark.parametrize(
    "options",
    [
        {"max_grad_norm": 1.0},
        {"state_dtype": torch.bfloat16, "amsgrad": True},
        {"state_dtype": "int8", "skip_nonfinite": False, "maximize": True},
    ],
    ids=["clipped", "bf16", "int8"],
)
@pytest.mark.parametrize("size", [1, 3])
def test_the_update_of_mean_gradients_is_the_same_to_the_bit(
    size: int, options: dict[str, Any]
) -> None:
    shared, carried = (run_ranks(stepped, size, way, options) for way in ("auto", "reference"))
    assert len({tuple(digests) for digests in shared + carried}) == 1
