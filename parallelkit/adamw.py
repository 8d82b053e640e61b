"""One AdamW step of flat tensors in plain PyTorch, and how moments are stored in fewer bits.

What csrc/adam.h does element by element, for transports and devices without native code. The
random bits and codes are the same; the update differs by roundings only (PyTorch has no fused
multiply-add).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

__all__ = [
    "BLOCK",
    "MOMENTS",
    "Setting",
    "decode",
    "encode",
    "round_stochastically",
    "update_",
]

BLOCK = 256  # kMomentBlock of csrc/adam.h
MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")

_MASK = 0xFFFFFFFF


class Setting(NamedTuple):
    """What the elements of one parameter group at one step count share, worked out in float64."""

    beta1: float
    beta2: float
    decay: float  # 1 - lr * weight_decay
    step_size: float  # lr / (1 - beta1^t)
    inverse_root_bias2: float  # 1 / sqrt(1 - beta2^t)
    eps: float
    steps: int  # t
    maximize: bool

    @classmethod
    def of(cls, group: Mapping[str, Any], steps: int) -> Setting:
        """Of a parameter group's options at step number `steps`, from 1."""
        beta1, beta2 = (float(beta) for beta in group["betas"])
        lr = float(group["lr"])
        return cls(
            beta1,
            beta2,
            1.0 - lr * float(group["weight_decay"]),
            lr / (1.0 - beta1**steps),
            1.0 / math.sqrt(1.0 - beta2**steps),
            float(group["eps"]),
            steps,
            bool(group["maximize"]),
        )


def update_(
    param: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    max_exp_avg_sq: torch.Tensor | None,
    s: Setting,
) -> None:
    """One step in place; all [n], of one dtype, float32 or float64."""
    if s.maximize:
        grad = -grad
    exp_avg.mul_(s.beta1).add_(grad, alpha=1.0 - s.beta1)
    exp_avg_sq.mul_(s.beta2).addcmul_(grad, grad, value=1.0 - s.beta2)
    if max_exp_avg_sq is not None:
        torch.maximum(max_exp_avg_sq, exp_avg_sq, out=max_exp_avg_sq)
    root = (exp_avg_sq if max_exp_avg_sq is None else max_exp_avg_sq).sqrt()
    denominator = root.mul_(s.inverse_root_bias2).add_(s.eps)
    param.mul_(s.decay).addcdiv_(exp_avg, denominator, value=-s.step_size)


# -- random bits: a hash of step, parameter and element, so that any owner draws the same ----------


def _mix(x: torch.Tensor) -> torch.Tensor:
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & _MASK
    x = ((x ^ (x >> 15)) * 0x846CA68B) & _MASK
    return x ^ (x >> 16)


def _random_bits(
    name: str, step: int, parameter: int, first: int, count: int, device: torch.device
) -> torch.Tensor:
    """16 bits for each of `count` elements from `first` (on a block), int64 [count].

    Args:
        name: of what is rounded, one of MOMENTS or "param".
        step, parameter, first, count: of which elements.
        device: of the result.
    """
    index = torch.arange(count, device=device)
    block = index // BLOCK + first // BLOCK
    key = _mix(torch.full_like(index, (step & _MASK) ^ 0x9E3779B9))
    key = _mix(key ^ parameter)
    key = _mix(key ^ (block & _MASK))
    key = _mix(key ^ (block >> 32))
    bits = _mix((key + (index % BLOCK) * 0x9E3779B9) & _MASK)
    lower, upper = bits & 0xFFFF, bits >> 16
    if name == "param":
        return (lower + upper) & 0xFFFF
    return lower if name == "exp_avg" else upper


def round_stochastically(
    name: str, x: torch.Tensor, step: int, parameter: int, first: int
) -> torch.Tensor:
    """float32 [n] as bfloat16, rounded up with the probability of what is cut off."""
    random = _random_bits(name, step, parameter, first, len(x), x.device)
    bits = x.contiguous().view(torch.int32).to(torch.int64) & _MASK
    finite = (bits & 0x7F800000) != 0x7F800000
    rounded = (bits + torch.where(finite, random, 0)) & 0xFFFF0000
    rounded |= torch.where(x.isnan(), 0x400000, 0)
    signed = torch.where(rounded > 0x7FFFFFFF, rounded - (1 << 32), rounded)
    return signed.to(torch.int32).view(torch.float32).to(torch.bfloat16)


# -- moments in storage ----------------------------------------------------------------------------


def decode(name: str, state: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The moment `name` of a state as float32 (float64 where it is kept so), [n]."""
    stored = state[name]
    scale = state.get(f"{name}_scale")
    if scale is None:
        return stored if stored.dtype == torch.float64 else stored.float()
    scales = scale.repeat_interleave(BLOCK)[: len(stored)]
    if name == "exp_avg":
        c = stored.float() * _unit(127)
        return scales * (c * c.abs())
    square = (stored.float() * _unit(255)).square()
    return scales * square.square()


def encode(
    name: str,
    value: torch.Tensor,
    state: Mapping[str, torch.Tensor],
    draw: tuple[int, int, int] | None = None,
) -> None:
    """Store a moment, [n], in a state.

    Args:
        name: one of MOMENTS.
        value: float32 or float64.
        state: holds the storage, and for int8 the scales.
        draw: step, parameter and first element, for stochastic rounding; None rounds to nearest,
            which gives back what was decoded.
    """
    stored, scale = state[name], state.get(f"{name}_scale")
    if scale is None:
        if stored.dtype == torch.bfloat16 and draw is not None:
            value = round_stochastically(name, value, *draw)
        stored.copy_(value)
        return
    count = len(value)
    if draw is None:
        random = torch.full_like(value, 0.5)
    else:
        random = _random_bits(name, *draw, count, value.device).float() * 2.0**-16
    padded = value.new_zeros(len(scale) * BLOCK)
    padded[:count] = value.abs()
    scale.copy_(padded.view(-1, BLOCK).amax(1) if count else scale)
    scales = scale.repeat_interleave(BLOCK)[:count]
    size = torch.where(scales > 0, value.abs() / scales, 0.0)
    if name == "exp_avg":
        low = (size.sqrt() * 127.0).floor().clamp(max=126.0)
        below, above = low * low, (low + 1.0) * (low + 1.0)
        up = random * (above - below) < size * (127.0 * 127.0) - below
        stored.copy_((low + up) * value.sign())
        return
    low = (size.sqrt().sqrt() * 255.0).floor().clamp(max=254.0)
    below, above = (low * low) * (low * low), ((low + 1.0) * (low + 1.0)).square()
    up = random * (above - below) < size * (65025.0 * 65025.0) - below
    stored.copy_(torch.where(size > 0, (low + up).clamp(min=1.0), 0.0))


def _unit(codes: int) -> torch.Tensor:
    """1 / codes as csrc/adam.h has it: in float32."""
    return torch.tensor(1.0 / codes, dtype=torch.float32)
