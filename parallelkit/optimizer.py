"""AdamW whose state is sharded over the ranks of a group."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import AdamW, Optimizer

from .data_parallel import DataParallel
from .device_step import DeviceStep
from .errors import ParallelKitError, UsageError
from .group import Group, default_group
from .host_step import HostStep
from .optimizer_checks import (
    STATE_DTYPES,
    check_options,
    check_parameter,
    hyper_parameters,
    names_in_errors,
    placed_in_words,
    settings_in_words,
)
from .optimizer_gradients import AveragedGradients, Gradients, LocalGradients
from .optimizer_layout import Buffer, Member
from .optimizer_state import StateFormat, checked_entries, owned_entry, pack, refresh_master, whole
from .optimizer_step import (
    Notice,
    agree,
    check_state,
    settings_hash,
)
from .together import check_alike, together
from .transport.cuda_peer import CudaPeer

__all__ = ["ShardedAdamW"]


class ShardedAdamW(Optimizer):
    """torch.optim.AdamW with 1/R of the state on each of R ranks.

    Each rank updates the elements it owns and writes them to every rank, so replicas are equal to
    the bit. Collective are the constructor, `step`, `state_dict`, `load_state_dict` and
    `add_param_group`.

    Without `data_parallel`, gradients are taken as they stand in `.grad`: averaged over the ranks
    by `pk.DataParallel` or torch DDP. With it, `backward` leaves gradients local (`.grad` is None)
    and `step` does reduce-scatter, AdamW and all-gather in one pass; averaged gradients are never
    stored.

    Args:
        params: as for torch.optim.AdamW: tensors, (name, tensor) pairs, or groups as dicts. Equal
            on every rank. They move into memory that all ranks of the host reach.
        lr, betas, eps, weight_decay, amsgrad, maximize: as there.
        group: the ranks, a Group or one dimension of a DeviceMesh. Default: `data_parallel`'s, or
            all (`pk.init()`).
        data_parallel: a `pk.DataParallel` that holds the parameters.
        max_grad_norm: clip the global gradient to this L2 norm, inside the step.
        state_dtype: torch.float32; torch.bfloat16, stochastically rounded; or "int8", 256 elements
            to a scale, where a parameter has at least 4096. Float64 parameters have float64 state.
        master_weights: keep float32 masters of bfloat16 and float16 parameters. Default "auto":
            yes. Without, bfloat16 parameters are rounded stochastically.
        skip_nonfinite: a gradient that is not finite, on any rank, makes every rank skip the step.
        foreach, fused: of no effect here; a warning says so.

    Attributes:
        members: of each parameter that has state, where it lies and what this rank owns.
        averages: whether `step` averages the gradients, that is with `data_parallel`.
        last_grad_norm: of the last step before clipping, 0-dim float64; None where the step had no
            need of it, which `max_grad_norm=math.inf` gives it.

    Raises:
        InvalidArgumentError, InvalidTypeError: a bad option or parameter, or a group without all
            shards of a DTensor.
        CollectiveMismatchError: ranks differ in parameters, options, or in who has a gradient.

    Source: Loshchilov and Hutter 2019 (AdamW); Rajbhandari et al. 2020 (ZeRO).
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        group: Group | DeviceMesh | None = None,
        data_parallel: DataParallel | None = None,
        amsgrad: bool = False,
        maximize: bool = False,
        max_grad_norm: float | None = None,
        state_dtype: torch.dtype | str = torch.float32,
        master_weights: bool | str = "auto",
        skip_nonfinite: bool = True,
        foreach: bool | None = None,
        fused: bool | None = None,
    ) -> None:
        if foreach is not None or fused is not None:
            warnings.warn(
                "ShardedAdamW has one implementation; foreach and fused do nothing", stacklevel=2
            )
        if group is None and isinstance(data_parallel, DataParallel):
            group = data_parallel.group
        self.group = default_group(group)
        self.max_grad_norm, self.skip_nonfinite = max_grad_norm, skip_nonfinite
        self.last_grad_norm: torch.Tensor | None = None
        self._skipped = 0
        self.averages = data_parallel is not None
        # torch's GradScaler leaves the scale to such an optimizer; `step` then refuses it.
        self._step_supports_amp_scaling = self.averages
        self._loss_scale = 1.0  # of pk.GradScaler, during its step
        self._gradients: Gradients = AveragedGradients()
        self._buffers: list[Buffer] = []
        self._outside: list[torch.Tensor] = []  # frozen so far, without state
        self.members: dict[torch.Tensor, Member] = {}
        self._step: HostStep | DeviceStep | None = None
        self._constructed = False

        def prepare() -> list[str]:
            check_options(self.group, data_parallel, max_grad_norm, state_dtype, master_weights)
            mine = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
            hyper_parameters("ShardedAdamW", mine | {"amsgrad": amsgrad, "maximize": maximize})
            # torch checks its own options, and says which a state_dict has.
            nothing = torch.zeros(0)
            checked = AdamW([nothing], lr, betas, eps, weight_decay, amsgrad, maximize=maximize)
            super(ShardedAdamW, self).__init__(params, checked.defaults)
            if data_parallel is not None:
                self._gradients = LocalGradients(data_parallel)
            return [
                f"max_grad_norm={max_grad_norm}",
                f"state_dtype={state_dtype}",
                f"master_weights={master_weights}",
                f"skip_nonfinite={skip_nonfinite}",
                f"data_parallel={'given' if self.averages else None}",
                *self._described(),
            ]

        try:
            check_alike("ShardedAdamW", together(self.group, prepare, "ShardedAdamW"))
            self._kept = StateFormat(STATE_DTYPES[state_dtype], master_weights is not False)
            self._constructed = True
            self._place_parameters()
        except ParallelKitError:
            self._gradients.give_back()
            raise

    # -- where parameters lie ------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch.optim.Optimizer's. Collective."""
        if not self._constructed:
            super().add_param_group(param_group)
            return
        before = len(self.param_groups)

        def add() -> list[str]:
            super(ShardedAdamW, self).add_param_group(param_group)
            return self._described()

        try:
            call = "ShardedAdamW.add_param_group"
            check_alike(call, together(self.group, add, call))
            self._place_parameters()
        except ParallelKitError:
            del self.param_groups[before:]
            raise

    def _options(self) -> dict[Member, dict[str, Any]]:
        """The parameter group of each member, as it is now."""
        member_of = self.members.get  # looked up once: it takes a while
        return {
            member: group
            for group in self.param_groups
            for p in group["params"]
            if (member := member_of(p)) is not None
        }

    def _new(self) -> dict[torch.Tensor, str]:
        """The trainable parameters that have no state yet, with their names."""
        names = names_in_errors(self.param_groups)
        return {p: n for p, n in names.items() if p.requires_grad and p not in self.members}

    def _described(self) -> list[str]:
        """Groups and new parameters in words, the same on all ranks; raises for bad ones."""
        new = self._new()
        for p, name in new.items():
            check_parameter(name, p, self.group)
            self._gradients.check(name, p)
        for group in self.param_groups:  # whose numbers have to agree at the step only
            hyper_parameters("ShardedAdamW", group)
        counts = [len(group["params"]) for group in self.param_groups]
        return [
            f"groups of {counts} parameters",
            *(f"amsgrad={group['amsgrad']}" for group in self.param_groups),
            *(f"{name} {p.dtype}{list(p.shape)}{placed_in_words(p)}" for p, name in new.items()),
        ]

    def place_new(self) -> None:
        """Give state to parameters that became trainable. Collective where there are any."""
        if any(p.requires_grad for p in self._outside):
            call = "ShardedAdamW: what became trainable"
            check_alike(call, together(self.group, self._described, call))
            self._place_parameters()

    def _place_parameters(self) -> None:
        """Give state to the new parameters, and move them; all ranks have the same. Collective."""
        names = self._new()
        first = len(self.members)
        share = self.group.transport in ("shared-memory", "cuda-peer")
        added = self._gradients.place(names, first, self.group, share)
        self._buffers += added
        self.members |= {m.parameter: m for buffer in added for m in buffer.members}
        self._outside = [p for p in self.parameters() if p not in self.members]
        self.fill((member, 0.0, {}) for member in list(self.members.values())[first:])

    def parameters(self) -> Iterator[torch.Tensor]:
        """All parameters, group by group: the order of `state_dict`."""
        for group in self.param_groups:
            yield from group["params"]

    def fill(self, contents: Iterable[tuple[Member, float, Mapping[str, torch.Tensor]]]) -> None:
        """Replace the state of what this rank owns of parameters.

        Args:
            contents: for each of them what `StateFormat.fill` wants: (member, step, entries).
        """
        self._skipped, self._step = self.skipped_steps, None  # which knows where state lies
        options = self._options()
        for member, step, entries in contents:
            self._kept.fill(member, step, entries, options[member]["amsgrad"])
            self.state[member.parameter] = member.shown  # and the old one's memory is free

    @property
    def skipped_steps(self) -> int:
        """Steps that a gradient that was not finite cost; on a GPU it waits for the last step."""
        return self._skipped + (self._step.skipped() if self._step else 0)

    @skipped_steps.setter
    def skipped_steps(self, count: int) -> None:
        self._skipped += count - self.skipped_steps

    def _prepare(self) -> HostStep | DeviceStep:
        averaged = self._gradients.averaged
        if isinstance(self.group._transport, CudaPeer):
            return DeviceStep(self._buffers, self.group, averaged)
        return HostStep(self._buffers, self.group, averaged, self._skipped)

    # -- the step -------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step on the global mean gradient; with `data_parallel` averages it first. Collective.

        Args:
            closure: evaluates the model again and returns the loss, as for any optimizer.

        Returns:
            What the closure returned, else None.

        Raises:
            CollectiveMismatchError: ranks differ in hyper-parameters or in who has a gradient.
            UsageError: torch's GradScaler where pk.GradScaler is needed.
            PeerLostError, CollectiveTimeoutError: as for the collectives.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.place_new()
        if self._step is None:
            self._step = self._prepare()
        call, options = "ShardedAdamW.step", self._options()
        found: dict[Member, torch.Tensor] = {}

        def look() -> Notice:
            if getattr(self, "grad_scale", None) is not None:  # torch's scaler sets it
                raise UsageError(
                    f"{call}: with data_parallel a rank's gradients are not averaged yet, and "
                    "torch.amp.GradScaler would judge each rank by its own; use "
                    "parallelkit.GradScaler"
                )
            settings = settings_hash(self.param_groups, self.max_grad_norm)
            for member, group in options.items():
                member.bring_home()
                check_state(call, member, group, self.state)
            gradients, used = self._gradients.find(options)
            found.update(gradients)
            return Notice(
                used,
                self._gradients.weight,
                settings,
                self._gradients.largest() * self._scale(),
                self._loss_scale != 1.0,
            )

        heard = together(self.group, look, call)
        if any(notice.settings != heard[0].settings for notice in heard):

            def words() -> list[str]:
                return settings_in_words(call, self.param_groups, self.max_grad_norm)

            check_alike(call, together(self.group, words, call))
        agreed = agree(heard, list(options), self._gradients.averaged)
        self._gradients.heard(agreed.weight)
        self.last_grad_norm = None
        if agreed.moving:
            for member in agreed.moving:
                refresh_master(member)
            self.last_grad_norm = self._step.move(
                {member: (found[member], options[member]) for member in agreed.moving},
                self._gradients.weight,
                self._scale(),
                self.max_grad_norm,
                self.skip_nonfinite and not agreed.finite,
                agreed.quiet,
            )
        self._gradients.clear()
        return loss

    def _step_scaled(self, scale: float, *args: Any, **kwargs: Any) -> Any:
        """`step` on gradients of `scale` times the loss; for pk.GradScaler."""
        if not self.skip_nonfinite:
            raise UsageError("GradScaler.step: the ShardedAdamW must have skip_nonfinite=True")
        self._loss_scale = scale
        try:
            return self.step(*args, **kwargs)
        finally:
            self._loss_scale = 1.0

    def _scale(self) -> float:
        """The factor that this rank's gradients still need."""
        return self._gradients.scale / self._loss_scale

    @property
    def has_gradients(self) -> bool:
        """Whether this rank has anything to add to the next step."""
        return self._gradients.weight > 0

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch.optim.Optimizer's; with `data_parallel` forgets what was accumulated."""
        super().zero_grad(set_to_none)
        self._gradients.clear()

    # -- state ------------------------------------------------------------------------------------

    def state_bytes(self) -> int:
        """Bytes of moments, their scales, and masters held by this rank."""
        return sum(
            entry.nbytes
            for member in self.members.values()
            for name, entry in member.state.items()
            if name != "step"
        )

    def state_dict(self, *, rank0_only: bool = False) -> dict[str, Any]:
        """The whole state in torch.optim.AdamW's format, all in float32. Collective.

        Args:
            rank0_only: ranks above 0 get an empty dict, and need little memory for it.

        Returns:
            {"state": {index: {"step", "exp_avg", "exp_avg_sq", ...}}, "param_groups": [...]}. Of a
            bfloat16 or float16 parameter also "master_param". A parameter that was never stepped
            has no entry, as in torch; before the first step of all, each has zeros.
        """
        for pre_hook in self._optimizer_state_dict_pre_hooks.values():
            pre_hook(self)
        for member in self.members.values():
            refresh_master(member)
        if any(buffer.size > 1 for buffer in self._buffers):
            # All ranks are here, or hear of this call: what follows has names nobody called.
            together(self.group, lambda: None, "ShardedAdamW.state_dict")
        keep = self.group.rank == 0 or not rank0_only
        entries = whole(self._buffers, self.group, keep)
        if not keep:
            return {}
        packed = pack(self.param_groups, self.members, entries)
        for post_hook in self._optimizer_state_dict_post_hooks.values():
            packed = post_hook(self, packed) or packed
        return packed

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the whole state back, given to every rank, whatever the world size that wrote it.

        Args:
            state_dict: of this class or of torch.optim.AdamW. Moments stay float32 beside
                parameters of fewer bits. A "master_param" counts, element by element, where the
                parameter is that rounded; elsewhere, and where it is absent, the parameter does.
                So parameters may be loaded before or after.

        Raises:
            InvalidArgumentError, InvalidTypeError: (a ValueError, a TypeError) it does not fit the
                parameters, or a hyper-parameter is none. Nothing was loaded then, nor with this:
            CollectiveMismatchError: ranks were given others' settings or counts of steps.
        """
        self.place_new()
        given: dict[str, Any] = {}
        found: dict[torch.Tensor, Mapping[str, Any]] = {}

        settings: list[dict[str, Any]] = []
        call = "ShardedAdamW.load_state_dict"

        def check() -> list[str]:
            changed = dict(state_dict)
            for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
                changed = pre_hook(self, changed) or changed
            given.update(changed)
            found.update(checked_entries(given, self.param_groups, self.members))
            for group, new in zip(self.param_groups, given["param_groups"], strict=True):
                own = ("params", "param_names")
                settings.append(group | {k: v for k, v in new.items() if k not in own})
            steps = [float(found[p]["step"]) if p in found else None for p in self.members]
            return [*settings_in_words(call, settings, None), f"step counts {steps}"]

        check_alike(call, together(self.group, check, call))
        for group, loaded in zip(self.param_groups, settings, strict=True):
            group.update(loaded)
        self.fill((m, *owned_entry(m, found.get(p, {}))) for p, m in self.members.items())
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UsageError(
            "ShardedAdamW cannot be copied or pickled: its parameters lie in memory of the group's "
            "running ranks; copy or save state_dict()"
        )
