"""Random numbers that differ between the ranks of a group, and then agree again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.distributed.device_mesh import DeviceMesh

from parallelkit.group import Group, default_group

__all__ = ["SplitRandom", "split_random"]

_STEP = 0x9E3779B1  # odd: the ranks' seeds are different ones


class SplitRandom:
    """Switches the default generator to one of this rank's own, and back.

    All ranks draw one number from the generator they have in common; with it, each seeds its own.
    So what follows `end` is again the same on every rank, nothing needs to be saved beside torch's
    own generator, and a recomputation that restores that one (activation checkpointing) draws the
    same masks again.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self._common: torch.Tensor | None = None

    def _generator(self) -> torch.Generator:
        if self._group.device.type == "cuda":
            return torch.cuda.default_generators[self._group.device.index or 0]
        return torch.default_generator

    def begin(self) -> None:
        """From here on the ranks draw different numbers."""
        generator = self._generator()
        device = self._group.device
        seed = int(torch.randint(1 << 31, (), generator=generator, device=device))
        self._common = generator.get_state()
        # a CPU's generator looks at the low 32 bits of a seed only
        generator.manual_seed((seed + _STEP * self._group.rank) % (1 << 32))

    def end(self) -> None:
        """From here on they draw the same again; does nothing without a `begin`."""
        if self._common is not None:
            self._generator().set_state(self._common)
            self._common = None


@contextmanager
def split_random(group: Group | DeviceMesh | None = None) -> Iterator[None]:
    """Draw different random numbers on each rank inside: around dropout on split activations.

    Dropout on replicated activations must drop the same elements on every rank, on split ones
    different ones. The first needs nothing but equal seeds; the second this context.

    Args:
        group: a Group or one-dimensional DeviceMesh. Default: all ranks.
    """
    switch = SplitRandom(default_group(group))
    switch.begin()
    try:
        yield
    finally:
        switch.end()
