"""The same objective in one process and plain PyTorch: what the parallel run is held against.

In the formulas:
    R  ranks    M_r  micro-batches of rank r    n_i  tokens of micro-batch i, N their sum
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import nn

from .data import MicroBatch

Weighted = Iterable[tuple[MicroBatch, float]]


def mean_over_tokens(batches: Sequence[MicroBatch]) -> Weighted:
    """Each micro-batch with the factor n_i / N: the objective, however the batch is cut."""
    total = sum(batch.tokens for batch in batches)
    return [(batch, batch.tokens / total) for batch in batches]


def mean_of_means(shares: Sequence[Sequence[MicroBatch]]) -> Weighted:
    """Each micro-batch with the factor 1 / (R · M_r): what averaging without weights computes."""
    return [(batch, 1 / (len(shares) * len(share))) for share in shares for batch in share]


def backward(model: nn.Module, weighted: Weighted) -> float:
    """Set the gradients to the sum of factor · gradient of a micro-batch's mean loss.

    Returns: the loss as a mean over the tokens of all micro-batches, whatever the factors.
    """
    model.zero_grad()
    loss_sum, tokens = 0.0, 0
    for batch, factor in weighted:
        loss = model(batch.inputs, batch.targets)
        (loss * factor).backward()
        loss_sum += loss.item() * batch.tokens
        tokens += batch.tokens
    return loss_sum / tokens
