"""What a run showed, and its part of a checkpoint."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .checks import GradientCheck

WAYS = ("parallel", "one process", "plain mean")

_STEP_BY_STEP = ("losses", "tokens", "seconds", "checks")  # what grows while a run goes on


@dataclass
class Result:
    """What a run showed; the lists have an entry for each step, or say what else."""

    size: int
    transport: str
    parameters: int
    gradient_bytes: int  # of a rank
    tp: int = 1  # ranks that hold one model together
    losses: dict[str, list[float]] = field(default_factory=lambda: {way: [] for way in WAYS})
    tokens: list[list[int]] = field(default_factory=list)  # of each data-parallel rank
    seconds: list[float] = field(default_factory=list)  # of the parallel run
    checks: list[GradientCheck] = field(default_factory=list)  # for each step compared
    digests: list[str] = field(default_factory=list)  # for each rank, of its parameters at the end

    @property
    def gradients_ok(self) -> bool:
        """Whether every gradient lay within its bound at every step compared."""
        return all(check.ok for check in self.checks)

    @property
    def replicas_ok(self) -> bool:
        """Whether all ranks ended with the same bits."""
        return len(set(self.digests)) == 1

    @property
    def ok(self) -> bool:
        """Whether all checks passed."""
        return self.gradients_ok and self.replicas_ok

    @property
    def tokens_per_second(self) -> float:
        """Speed of the parallel run; the first step, which warms up, counts only if alone."""
        start = min(1, len(self.seconds) - 1)
        return sum(map(sum, self.tokens[start:])) / sum(self.seconds[start:])

    @property
    def bytes_per_step(self) -> float:
        """What a rank sends in a step: gradients by reduce-scatter, then all-gather, and parameters
        by all-gather; as large as gradients.
        """
        data_ranks = self.size // self.tp
        return 3 * (data_ranks - 1) / data_ranks * self.gradient_bytes

    def so_far(self) -> dict[str, Any]:
        """What grows step by step, as JSON can hold it."""
        content = dataclasses.asdict(self)
        return {name: content[name] for name in _STEP_BY_STEP}

    def go_on_from(self, content: Mapping[str, Any]) -> None:
        """Take what `so_far` gave."""
        for name in _STEP_BY_STEP:
            setattr(self, name, content[name])
        self.checks = [GradientCheck(**check) for check in content["checks"]]
