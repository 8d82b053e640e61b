"""A GradScaler whose scale falls on all ranks alike."""

from __future__ import annotations

from typing import Any

import torch
from torch.amp.grad_scaler import OptState
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from .errors import UsageError
from .group import Group, default_group
from .optimizer import ShardedAdamW

__all__ = ["GradScaler"]


class GradScaler(torch.amp.GradScaler):
    """torch.amp.GradScaler that agrees over a group: what one rank finds, all act on.

    Use it where gradients of the ranks are not averaged before the step, and for `ShardedAdamW`
    with `data_parallel`, which takes the scale out of the gradients itself.

    Args:
        device: of the scale. Default: "cpu".
        group: the ranks, a Group or one dimension of a DeviceMesh. Default: all (`pk.init()`).
        init_scale, growth_factor, backoff_factor, growth_interval, enabled: as for torch's.
    """

    def __init__(
        self,
        device: str = "cpu",
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        group: Group | DeviceMesh | None = None,
    ) -> None:
        super().__init__(
            device, init_scale, growth_factor, backoff_factor, growth_interval, enabled
        )
        self._ranks = default_group(group)

    def unscale_(self, optimizer: Optimizer) -> None:
        """As torch's; collective.

        Raises:
            UsageError: a `ShardedAdamW` with `data_parallel`, whose gradients are in no `.grad`.
        """
        if self._enabled and _private(optimizer):
            raise UsageError(
                "GradScaler.unscale_: with data_parallel a ShardedAdamW keeps the gradients to "
                "itself; to clip them give it max_grad_norm"
            )
        super().unscale_(optimizer)
        if not self._enabled:
            return
        found = self._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
        here = any(bool(flag) for flag in found.values())
        if any(self._ranks._gather_objects(here)):
            for flag in found.values():
                flag.fill_(1.0)

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        """As torch's: skips where a gradient is not finite, on any rank. Collective.

        Raises:
            UsageError: no loss was scaled yet, a second call since `update`, or a `ShardedAdamW`
                with `data_parallel` that has skip_nonfinite=False.
        """
        if not self._enabled or not _private(optimizer):
            return super().step(optimizer, *args, **kwargs)
        assert isinstance(optimizer, ShardedAdamW)
        state = self._per_optimizer_states[id(optimizer)]
        if state["stage"] is OptState.STEPPED:
            raise UsageError("GradScaler.step: called twice since the last update()")
        if self._scale is None and not optimizer.has_gradients:  # a rank without work
            self._lazy_init_scale_growth_tracker(torch.device(self._device))
        scale = self._get_scale_async()
        if scale is None:
            raise UsageError(
                "GradScaler.step: no loss was scaled yet; call model.backward(scaler.scale(loss)) "
                "before it"
            )
        before = optimizer.skipped_steps
        result = optimizer._step_scaled(float(scale), *args, **kwargs)
        skipped = float(optimizer.skipped_steps > before)
        state["found_inf_per_device"] = {scale.device: torch.full_like(scale, skipped)}
        state["stage"] = OptState.STEPPED
        return result


def _private(optimizer: Optimizer) -> bool:
    return isinstance(optimizer, ShardedAdamW) and optimizer.averages
