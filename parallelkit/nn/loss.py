"""Cross entropy over logits whose classes are split over the ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh

from parallelkit.agreement import refuse_instead
from parallelkit.arguments import check_tensor
from parallelkit.collectives import shard_bounds
from parallelkit.errors import InvalidArgumentError, InvalidTypeError, ParallelKitError
from parallelkit.group import Group, default_group
from parallelkit.nn import exchange
from parallelkit.ops import wide_dtype

__all__ = ["vocab_parallel_cross_entropy"]

Tensor = torch.Tensor
_CALL = "vocab_parallel_cross_entropy"


def vocab_parallel_cross_entropy(
    logits_shard: Tensor,
    target: Tensor,
    *,
    group: Group | DeviceMesh | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
) -> Tensor:
    """F.cross_entropy of logits split over the group by class, which no rank ever holds whole.

        logits_shard [..., V/R]     target [...]     ε label_smoothing, lse = log Σ exp z
        loss = lse − (1−ε)·z_target − ε/V·Σ z

    Each rank sends four numbers a token: its maximum, its sum of exponentials, its share of
    z_target and of Σ z.

    Args:
        logits_shard: this rank's classes, cut as `shard_bounds` does, last dimension; float. What
            ColumnParallelLinear gives.
        target: int64 class numbers of the whole vocabulary, equal on every rank.
        group: a Group or one-dimensional DeviceMesh. Default: all ranks.
        ignore_index: targets of this value count for nothing. Default: -100.
        label_smoothing: in [0, 1]. Default: 0.
        reduction: "mean" (over what is not ignored; NaN where that is nothing), "sum" or "none".
    Returns:
        The loss, equal on every rank; of the logits' dtype, float32 under autocast. Its gradient is
        this rank's part of the whole one.
    Raises:
        InvalidArgumentError: shapes, options, or a target outside the vocabulary (looked for on
            CPUs). These and the next are raised on every rank.
        InvalidTypeError: logits that are not float, or a target that is not int64.
        CollectiveMismatchError: ranks disagree on options, on the number of tokens or the dtype.
    Source: Shoeybi et al. 2019, "Megatron-LM"; maxima joined as in Milakov and Gimelshein 2018,
        "Online normalizer calculation for softmax".
    """
    group = default_group(group)
    try:
        _check(logits_shard, target, ignore_index, label_smoothing, reduction)
    except ParallelKitError as fault:
        raise refuse_instead(group, fault) from fault
    classes = exchange.whole_length(
        _CALL,
        logits_shard,
        logits_shard.ndim - 1,
        group,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        reduction=reduction,
    )
    if torch.compiler.is_compiling():
        target = exchange.agreed(target, classes, group)
    valid = target != ignore_index
    if target.device.type == "cpu" and not torch.compiler.is_compiling():
        outside = (valid & ((target < 0) | (target >= classes))).nonzero()
        if len(outside):
            beyond = InvalidArgumentError(
                f"{_CALL}: target must be in [0, {classes}) or ignore_index={ignore_index}, got "
                f"{int(target[tuple(outside[0])])} at {outside[0].tolist()}"
            )
            raise refuse_instead(group, beyond)
    losses: Tensor = _CrossEntropy.apply(  # type: ignore[no-untyped-call]
        logits_shard, target, valid, group, classes, label_smoothing
    )
    if reduction != "none":
        losses = losses.sum()
    if reduction == "mean":
        losses = losses / valid.sum()
    autocast = torch.is_autocast_enabled(logits_shard.device.type)
    return losses if autocast else losses.to(logits_shard.dtype)


def _check(
    logits_shard: Tensor, target: Tensor, ignore_index: int, label_smoothing: float, reduction: str
) -> None:
    """Raise for what is wrong on this rank, whatever the others have."""
    check_tensor(_CALL, "logits_shard", logits_shard)
    check_tensor(_CALL, "target", target)
    if not logits_shard.is_floating_point() or target.dtype != torch.int64:
        raise InvalidTypeError(
            f"{_CALL}: wanted float logits and int64 targets, got {logits_shard.dtype} and "
            f"{target.dtype}; class probabilities are not supported"
        )
    if logits_shard.ndim == 0 or target.shape != logits_shard.shape[:-1]:
        raise InvalidArgumentError(
            f"{_CALL}: logits_shard must be [..., classes] and target [...], got "
            f"{list(logits_shard.shape)} and {list(target.shape)}"
        )
    if target.device != logits_shard.device:
        raise InvalidArgumentError(
            f"{_CALL}: target must be on {logits_shard.device} as logits_shard is, got "
            f"{target.device}"
        )
    if not isinstance(ignore_index, int):
        raise InvalidTypeError(
            f"{_CALL}: ignore_index must be an int, got {type(ignore_index).__name__}"
        )
    if reduction not in ("mean", "sum", "none"):
        raise InvalidArgumentError(
            f'{_CALL}: reduction must be "mean", "sum" or "none", got {reduction!r}'
        )
    if not isinstance(label_smoothing, (int, float)) or not 0.0 <= label_smoothing <= 1.0:
        raise InvalidArgumentError(
            f"{_CALL}: label_smoothing must be a number in [0, 1], got {label_smoothing!r}"
        )


class _CrossEntropy(Function):
    """One loss a token, in float32 or wider."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        target: Tensor,
        valid: Tensor,
        group: Group,
        classes: int,
        smoothing: float,
    ) -> Tensor:
        wide = wide_dtype(logits.dtype)
        start, stop = shard_bounds(classes, group.size, group.rank)
        own = valid & (target >= start) & (target < stop)
        local = (target - start).masked_fill(~own, 0).unsqueeze(-1)
        if stop > start:
            peak = logits.amax(-1).to(wide)
            chosen = logits.gather(-1, local).squeeze(-1).to(wide)
        else:
            peak = logits.new_full(target.shape, -torch.inf, dtype=wide)
            chosen = torch.zeros_like(peak)
        # a rank all of whose logits are -inf adds nothing; -inf - -inf would be NaN
        reference = peak.masked_fill(peak == -torch.inf, 0.0)
        probabilities = (logits.to(wide) - reference.unsqueeze(-1)).exp_()
        facts = torch.stack(
            [
                peak,
                probabilities.sum(-1),
                chosen.masked_fill(~own, 0.0),
                logits.sum(-1, dtype=wide) if smoothing else torch.zeros_like(peak),
            ]
        )
        # [ranks, 4, ...]: equal numbers on every rank, so the losses are equal to the bit
        heard = exchange.all_gather(facts.unsqueeze(0), 0, group.size, group)
        peaks, sums, chosens, totals = heard.unbind(1)
        top = peaks.amax(0)
        log_sum = top + (sums * (peaks - top).exp()).sum(0).log()
        ctx.save_for_backward(
            probabilities.mul_((reference - log_sum).exp_().unsqueeze(-1)), local, own, valid
        )
        ctx.smoothing, ctx.classes, ctx.dtype = smoothing, classes, logits.dtype
        losses = log_sum - (1.0 - smoothing) * chosens.sum(0)
        if smoothing:
            losses = losses - smoothing / classes * totals.sum(0)
        return losses.masked_fill(~valid, 0.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        probabilities, local, own, valid = ctx.saved_tensors
        each = dy.masked_fill(~valid, 0.0)
        grad = probabilities * each.unsqueeze(-1)
        if ctx.smoothing:
            grad -= (ctx.smoothing / ctx.classes * each).unsqueeze(-1)
        if grad.shape[-1]:
            chosen = (each * (ctx.smoothing - 1.0)).masked_fill(~own, 0.0)
            grad.scatter_add_(-1, local, chosen.unsqueeze(-1))
        # what is ignored gets no gradient, whatever its logits are
        grad.masked_fill_(~valid.unsqueeze(-1), 0.0)
        return grad.to(ctx.dtype), None, None, None, None, None
