"""One entry into the group for sibling layers that read the same activation."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch

__all__ = ["SharedInput"]

Tensor = torch.Tensor


class SharedInput:
    """What q, k and v, or gate and up, read: entered once, by whichever of them comes first.

    Their gradients then meet before the one reduction, which is what makes a transformer block cost
    two all-reduces each way however many column layers it has. Only the identity of tensors counts:
    a sibling that reads something else enters that for itself.

    Args:
        readers: how many read one activation; after the last, nothing is kept.
    """

    def __init__(self, readers: int) -> None:
        self.readers = readers
        self._left = 0
        self._entered: Tensor | None = None
        self._source: Callable[[], Tensor | None] = lambda: None
        self._state: object = None

    def enter(self, x: Tensor, entrance: Callable[[Tensor], Tensor]) -> Tensor:
        """`entrance(x)`, or what it gave for this x before; x itself where it came from here."""
        if torch.compiler.is_compiling():
            return entrance(x)
        state = x._version, torch.is_grad_enabled()
        entered = self._entered
        same = x is entered or (x is self._source() and state == self._state)
        if entered is None or not same:
            entered = self._entered = entrance(x)
            self._source, self._state, self._left = weakref.ref(x), state, self.readers
        self._left -= 1
        if self._left == 0:
            self._entered = None
        return entered
