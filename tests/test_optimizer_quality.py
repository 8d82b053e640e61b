"""Moments in fewer bits train as well as float32 ones, and rounding to nearest would not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import parallelkit as pk

KINDS = [torch.float32, torch.bfloat16, "int8"]


def test_second_moments_follow_gradients_that_shrink() -> None:
    """Gradients of size 10, then 1: 0.1 % a step is less than half a bfloat16 step."""
    found: dict[Any, float] = {}
    generator = torch.Generator().manual_seed(0)
    scales = [10.0] * 50 + [1.0] * 1500
    gradients = [s * torch.randn(8192, generator=generator) for s in scales]
    for kind in KINDS:
        parameter = nn.Parameter(torch.zeros(8192))
        optimizer = pk.ShardedAdamW([parameter], state_dtype=kind)
        for gradient in gradients:
            parameter.grad = gradient
            optimizer.step()
        found[kind] = optimizer.state_dict()["state"][0]["exp_avg_sq"].mean().item()
    nearest = torch.zeros(8192)
    for gradient in gradients:
        nearest = (0.999 * nearest + 0.001 * gradient.square()).bfloat16().float()
    for kind in KINDS[1:]:
        assert found[kind] == pytest.approx(found[torch.float32], rel=0.02)
    assert nearest.mean().item() > 1.5 * found[torch.float32], "nearest never comes down"


class TinyGPT(nn.Module):
    """One block over 64 tokens of 32 kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.place = nn.Embedding(32, 64), nn.Embedding(16, 64)
        self.block = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
        self.head = nn.Linear(64, 32)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        length = tokens.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        x = self.embedding(tokens) + self.place(torch.arange(length))
        return self.head(self.block(x, src_mask=mask, is_causal=True))


def text(count: int, seed: int) -> torch.Tensor:
    """Rows in which a token is a function of the one before, or noise one time in five."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(0, 32, (count, 17), generator=generator)
    for at in range(1, 17):
        follow = (3 * rows[:, at - 1] + 7) % 32
        noise = torch.rand(count, generator=generator) < 0.2
        rows[:, at] = torch.where(noise, rows[:, at], follow)
    return rows


def loss_of(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    logits = model(rows[:, :-1]).float()
    return F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())


def validation_loss(kind: type[torch.optim.Optimizer], dtype: torch.dtype, **options: Any) -> float:
    torch.manual_seed(0)
    model = TinyGPT().to(dtype)
    optimizer: Any = kind(model.parameters(), lr=3e-4, **options)
    rows = text(4096, 1)
    for step in range(500):
        optimizer.zero_grad()
        loss_of(model, rows[torch.arange(32) + 32 * (step % 128)]).backward()
        optimizer.step()
    with torch.no_grad():
        return loss_of(model, text(1024, 2)).item()


@pytest.mark.slow
def test_a_small_gpt_reaches_the_loss_of_float32() -> None:
    """With moments of fewer bits, and with bfloat16 parameters without masters; not to nearest."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # tensors this small gain nothing from more
    ours, bf16 = pk.ShardedAdamW, torch.bfloat16
    wanted, *losses = (validation_loss(ours, torch.float32, state_dtype=kind) for kind in KINDS)
    losses += [
        validation_loss(ours, bf16),
        validation_loss(ours, bf16, state_dtype=bf16, master_weights=False),
    ]
    nearest = validation_loss(torch.optim.AdamW, bf16)
    torch.set_num_threads(threads)
    assert wanted < 1.25, "it has learned; it began at 3.5"
    assert max(losses) < 1.005 * wanted
    assert nearest > 1.02 * wanted, "torch's bfloat16 steps are lost in rounding"
