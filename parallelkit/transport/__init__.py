"""How the ranks of a group reach each other: what every transport offers to the collectives.

A transport moves data and finds out whether the ranks agree; it knows nothing of strides, lists of
mixed layouts, or how an error reads. `parallelkit.collectives` builds on that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch

__all__ = ["CLOSED", "REDUCTIONS", "Call", "Pending", "Reply", "Transport", "explained"]

CLOSED = "this group is closed; pk.init() or pk.Group(...) makes another"
REDUCTIONS = {"mean": 0, "sum": 1, "total": 2}  # the numbers of csrc/protocol.h


class Call(NamedTuple):
    """What a rank says when it enters a collective; all ranks judge the same calls."""

    signature: int  # hash of count, shapes and dtypes
    layout: int  # hash of the order of elements in memory
    weight: float | torch.Tensor  # items that this rank's values stand for; 0-dim on a GPU
    scale: float  # a factor its values still need
    reduction: int  # one of REDUCTIONS
    fault: bool  # this rank's caller gave something that must be refused


class Reply(NamedTuple):
    """What came of a collective.

    `outcome` is "done"; or, with nothing changed and the group usable: "mismatch" (the ranks called
    different things), "bad_weight", "fault" (some rank's caller must be refused) or "layouts" (the
    same shapes in another order of memory).
    """

    outcome: str
    total: float | torch.Tensor  # the sum of the weights; on a GPU where only that knows it
    heard: Sequence[bytes] = ()  # of a refusal in the background: what each rank told, by rank


class Pending(Protocol):
    """A collective that runs in the background."""

    @property
    def devices(self) -> Sequence[torch.device]:
        """GPUs on which `wait` orders the current stream after it, and so returns at once."""
        ...

    def done(self) -> bool:
        """Whether it has ended."""
        ...

    def wait(self) -> Reply:
        """Wait for its end; raises as the synchronous call would."""
        ...


class Transport(Protocol):
    """One rank's end. A lost or late peer raises and breaks the group for good."""

    name: str

    @property
    def broken(self) -> bool:
        """Whether a rank was lost; no call works any more."""
        ...

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A tensor in memory that peers reach; collective."""
        ...

    def prepare(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Contiguous real tensors as `all_reduce` and its kin want them, for one call or many."""
        ...

    def all_reduce(self, prepared: Any, call: Call) -> Reply:
        """In place over all prepared tensors."""
        ...

    def start_all_reduce(self, prepared: Any, call: Call, told: bytes) -> Pending:
        """The same in the background, after everything started before, in row-major order.

        Right after a refusal, and before anything started later, the ranks hear what each `told`.
        """
        ...

    def start_reduce_scatter(
        self, prepared: Any, shard: torch.Tensor, call: Call, told: bytes
    ) -> Pending:
        """`reduce_scatter` in the background, as `start_all_reduce`."""
        ...

    def reduce_scatter(self, prepared: Any, shard: torch.Tensor, call: Call) -> Reply:
        """This rank's part of the one prepared 1-D tensor, into `shard`."""
        ...

    def all_gather(self, prepared: Any, shard: torch.Tensor, call: Call) -> Reply:
        """Every rank's `shard` into the one prepared 1-D tensor."""
        ...

    def exchange(self, message: bytes, subject: int = 0) -> tuple[Reply, list[bytes]]:
        """Every rank's message, by rank. Messages about different subjects are a mismatch."""
        ...

    def barrier(self) -> Reply:
        """Wait for every rank."""
        ...

    def close(self) -> None:
        """Leave the group."""
        ...


def explained(
    collective: Callable[[], Reply], told: bytes, exchange: Callable[[bytes], list[bytes]]
) -> Reply:
    """A collective as it runs in the background: after a refusal the ranks hear what each `told`.

    When they wait is no matter of agreement, so it has to be said right then.
    """
    reply = collective()
    if reply.outcome == "layouts":  # not here: a peer comes again in row-major order
        reply = collective()
    return reply if reply.outcome == "done" else reply._replace(heard=exchange(told))
