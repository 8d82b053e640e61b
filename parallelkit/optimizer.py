"""AdamW whose state is sharded over the ranks of a group."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor
from torch.optim import AdamW, Optimizer

from .adamw import Setting
from .buckets import Slot
from .data_parallel import DataParallel
from .errors import (
    CollectiveMismatchError,
    InvalidArgumentError,
    InvalidTypeError,
    ParallelKitError,
    UsageError,
)
from .group import Group, default_group
from .ops import DTYPE_CODES
from .optimizer_layout import Buffer, Member, local_of, place, place_like_gradients
from .optimizer_state import StateFormat, checked_entries, load_entry, refresh_master, whole
from .sharded_step import Squares, Step, Work, make_step

__all__ = ["ShardedAdamW"]

_STATE_DTYPES = {
    torch.float32: torch.float32,
    torch.bfloat16: torch.bfloat16,
    "int8": torch.int8,
    torch.int8: torch.int8,
}


class _Facts(NamedTuple):
    """What a rank tells the others before a step."""

    used: bytes  # for each parameter, whether it has a gradient here
    weight: float  # items that this rank's gradients stand for
    settings: int  # hash of all hyper-parameters
    fault: ParallelKitError | None


class _Row(NamedTuple):
    """A member with what each step asks of it; kept from one step to the next."""

    member: Member
    options: dict[str, Any]  # its parameter group
    slot: Slot | None  # where `data_parallel` has its gradient


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
        group: the ranks. Default: `data_parallel`'s, or all (`pk.init()`).
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
        last_grad_norm: of the last step before clipping, 0-dim float64; None where not measured.
        skipped_steps: steps that a gradient that was not finite cost.

    Raises:
        InvalidArgumentError, InvalidTypeError: a bad option or parameter.
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
        group: Group | None = None,
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
        if data_parallel is not None and not isinstance(data_parallel, DataParallel):
            raise InvalidTypeError(
                "ShardedAdamW: data_parallel must be a parallelkit.DataParallel, got "
                f"{type(data_parallel).__name__}; for torch DDP leave it out"
            )
        if state_dtype not in _STATE_DTYPES:
            raise InvalidArgumentError(
                'ShardedAdamW: state_dtype must be torch.float32, torch.bfloat16 or "int8", '
                f"got {state_dtype!r}"
            )
        if master_weights not in ("auto", True, False):
            raise InvalidArgumentError(
                'ShardedAdamW: master_weights must be "auto", True or False, '
                f"got {master_weights!r}"
            )
        if max_grad_norm is not None and not max_grad_norm > 0:
            raise InvalidArgumentError(
                f"ShardedAdamW: max_grad_norm must be above 0 or None, got {max_grad_norm}"
            )
        self.group = group or (data_parallel.group if data_parallel else default_group(None))
        self.max_grad_norm, self.skip_nonfinite = max_grad_norm, skip_nonfinite
        self.last_grad_norm: torch.Tensor | None = None
        self.skipped_steps = 0
        self._loss_scale = 1.0  # of pk.GradScaler, during its step
        self._kept = StateFormat(_STATE_DTYPES[state_dtype], master_weights is not False)
        self._buckets = data_parallel.take_gradients() if data_parallel is not None else None
        self.averages = data_parallel is not None
        # torch's GradScaler leaves the scale to such an optimizer; `step` then refuses it.
        self._step_supports_amp_scaling = self.averages
        self._buffers: list[Buffer] = []
        self._outside: list[torch.Tensor] = []  # parameters that were frozen so far, without state
        self.members: dict[torch.Tensor, Member] = {}
        self._step: Step | None = None
        # torch checks the options, and says which a state_dict has.
        nothing = torch.zeros(0)
        checked = AdamW([nothing], lr, betas, eps, weight_decay, amsgrad, maximize=maximize)
        self._constructed = False
        super().__init__(params, checked.defaults)
        self._constructed = True
        self._place_parameters()

    # -- where parameters lie ------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch.optim.Optimizer's. Collective."""
        super().add_param_group(param_group)
        self._outside += self.param_groups[-1]["params"]
        if self._constructed:
            self._place_parameters()

    def _group_of(self) -> dict[torch.Tensor, dict[str, Any]]:
        return {p: group for group in self.param_groups for p in group["params"]}

    def _names(self) -> dict[torch.Tensor, str]:
        names = {}
        for g, group in enumerate(self.param_groups):
            for i, p in enumerate(group["params"]):
                known = group.get("param_names")
                names[p] = known[i] if known else f"parameter {i} of group {g} {list(p.shape)}"
        return names

    def _place_parameters(self) -> None:
        """Give state to trainable parameters that have none yet, and move them. Collective."""
        new = [p for p in self._outside if p.requires_grad]
        if not new:
            return
        every = self._names()
        names = {p: every[p] for p in new}
        fault = next((f for p in new if (f := self._unfit(names[p], p))), None)
        told = [f"{name} {p.dtype}{list(p.shape)}" for p, name in names.items()]
        heard = self.group._gather_objects((fault, told))
        for rank, (theirs, _) in enumerate(heard):
            if theirs is not None:
                raise type(theirs)(f"{theirs} [rank {rank} of {self.group.size}]")
        for rank, (_, theirs) in enumerate(heard):
            if theirs != heard[0][1]:
                raise CollectiveMismatchError(
                    f"ShardedAdamW: the ranks have different parameters: rank 0 {heard[0][1]}, "
                    f"rank {rank} {theirs}"
                )
        first, share = len(self.members), self.group.transport == "shared-memory"
        if self._buckets is None:
            added = place(names, first, self.group, share)
        else:
            added = place_like_gradients(names, first, self.group, share, self._buckets)
        self._buffers += added
        self.members |= {m.parameter: m for buffer in added for m in buffer.members}
        self._outside = [p for p in self._outside if p not in self.members]
        for member in list(self.members.values())[first:]:
            self.fill(member, 0.0, {})

    def parameters(self) -> Iterator[torch.Tensor]:
        """All parameters, group by group: the order of `state_dict`."""
        for group in self.param_groups:
            yield from group["params"]

    def fill(self, member: Member, step: float, entries: Mapping[str, torch.Tensor]) -> None:
        """Replace the state of what this rank owns of a parameter; see `StateFormat.fill`."""
        amsgrad = self._group_of()[member.parameter]["amsgrad"]
        self._kept.fill(member, step, entries, amsgrad)
        self._restate()

    def _restate(self) -> None:
        """Show the members' state as `.state`, and forget where it lay."""
        self.state.update({p: member.state for p, member in self.members.items()})
        self._step = None

    def _prepare(self) -> Step:
        """See where everything lies, for the steps to come."""
        groups = self._group_of()
        slots = {slot.parameter: slot for slot in self._buckets.slots} if self._buckets else {}
        self._rows = [_Row(m, groups[p], slots.get(p)) for p, m in self.members.items()]
        # One tensor holds all counts: adding to 150 tensors costs as much as a small step.
        if self._rows:
            self._counts = torch.stack([row.member.state["step"] for row in self._rows])
            for row, count in zip(self._rows, self._counts.unbind(), strict=True):
                row.member.state["step"] = count
        return make_step(self._buffers, self.group, averaged=self._buckets is None)

    def _unfit(self, name: str, p: torch.Tensor) -> ParallelKitError | None:
        """What is wrong with a parameter, and makes it dense."""
        local = local_of(p)
        if p.dtype not in DTYPE_CODES:
            return InvalidTypeError(
                f"ShardedAdamW: {name} must be float32, float64, bfloat16 or float16, got {p.dtype}"
            )
        if local.device.type != self.group.device.type:
            return InvalidArgumentError(
                f"ShardedAdamW: {name} must be on {self.group.device}, got {local.device}"
            )
        if self._buckets is not None and p not in {s.parameter for s in self._buckets.slots}:
            return InvalidArgumentError(
                f"ShardedAdamW: {name} is not a parameter of data_parallel; "
                "give it an optimizer of its own"
            )
        if not isinstance(p, DTensor) and not torch.ops.aten.is_non_overlapping_and_dense(p):
            p.data = p.detach().contiguous()
        return None

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
        self._place_parameters()
        if self._step is None:
            self._step = self._prepare()
        fault = None
        try:
            if getattr(self, "grad_scale", None) is not None:  # torch's scaler sets it
                raise UsageError(
                    "ShardedAdamW.step: with data_parallel a rank's gradients are not averaged "
                    "yet, and torch.amp.GradScaler would judge each rank by its own; use "
                    "parallelkit.GradScaler"
                )
            self._check_places()
            gradients = self._gradients()
        except ParallelKitError as error:
            fault, gradients = error, {}
        moving = self._agree(gradients, fault)
        if moving:
            for row in moving:
                refresh_master(row.member)
            self._move(moving, gradients, 1.0 / self._loss_scale)
        if self._buckets is not None:
            self._buckets.reset()
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

    def _check_places(self) -> None:
        for member in self.members.values():
            if member.moved:
                raise UsageError(
                    f"ShardedAdamW.step: {member.name} was moved or converted after the optimizer "
                    "was made; call .to(...) first, and make a new optimizer now"
                )

    def _gradients(self) -> dict[Member, torch.Tensor]:
        """This rank's gradient of each parameter that has one, in the order of its memory."""
        if self._buckets is not None:
            self._buckets.settle()
            return {row.member: row.slot.view for row in self._rows if row.slot is not None}
        found = {}
        for p, member in self.members.items():
            if p.grad is not None:
                found[member] = self._usable(member, local_of(p.grad))
        return found

    def _usable(self, member: Member, grad: torch.Tensor) -> torch.Tensor:
        param = member.local
        if grad.layout != torch.strided:
            raise InvalidTypeError(
                f"ShardedAdamW.step: the gradient of {member.name} must be dense, "
                f"got {grad.layout}; use sparse=False"
            )
        dtype = param.dtype
        fits = grad.dtype == dtype or (grad.dtype == torch.float32 and dtype != torch.float64)
        rows = grad.is_contiguous() and param.is_contiguous()
        if fits and (rows or grad.stride() == param.stride()):
            return grad
        return torch.empty_like(param).copy_(grad)

    def _agree(
        self, gradients: Mapping[Member, torch.Tensor], fault: ParallelKitError | None
    ) -> list[_Row]:
        """Tell the ranks what is used here; the rows that move, the same on every rank."""
        rows = self._rows
        if self._buckets is None:
            used, weight = bytes(row.member in gradients for row in rows), 1.0
        else:
            used = bytes(row.slot is not None and row.slot.used for row in rows)
            weight = self._buckets.weight
        mine = _Facts(used, weight, hash(tuple(map(_numbers, self.param_groups))), fault)
        heard = [_Facts(*facts) for facts in self.group._gather_objects(tuple(mine))]
        for rank, facts in enumerate(heard):
            if facts.fault is not None:
                raise type(facts.fault)(f"{facts.fault} [rank {rank} of {self.group.size}]")
        for rank, facts in enumerate(heard):
            if facts.settings != heard[0].settings:
                raise CollectiveMismatchError(
                    "ShardedAdamW.step: learning rates or other hyper-parameters differ between "
                    f"rank 0 and rank {rank}; nothing was changed"
                )
            if self._buckets is None and facts.used != heard[0].used:
                differs = (a != b for a, b in zip(facts.used, heard[0].used, strict=True))
                odd = next(row.member for row, differ in zip(rows, differs, strict=True) if differ)
                raise CollectiveMismatchError(
                    f"ShardedAdamW.step: {odd.name} has a gradient on one of rank 0 and rank "
                    f"{rank} only; gradients must be averaged before the step. Nothing was changed"
                )
        if self._buckets is not None:
            total = math.fsum(facts.weight for facts in heard)
            self._buckets.total_weight = torch.tensor(total, dtype=torch.float64)
        some = [any(rank) for rank in zip(*(f.used for f in heard if f.weight > 0), strict=True)]
        return [row for row, moves in zip(rows, some, strict=False) if moves]

    def _move(
        self, moving: list[_Row], gradients: Mapping[Member, torch.Tensor], scale: float
    ) -> None:
        """Measure, decide, step."""
        assert self._step is not None
        steps = [row.member.state["step"] for row in moving]
        counts = self._counts if len(moving) == len(self._rows) else torch.stack(steps)
        settings: dict[tuple[int, float], Setting] = {}
        work: dict[Member, tuple[torch.Tensor, Setting]] = {}
        for (member, options, _), count in zip(moving, counts.tolist(), strict=True):
            key = (id(options), count)
            if key not in settings:
                settings[key] = Setting.of(options, int(count) + 1)
            work[member] = (gradients[member], settings[key])
        weight = 1.0
        if self._buckets is not None:
            weight, scale = self._buckets.weight, scale * self._buckets.reference
        self._step.load(work, weight, scale)
        clip = 1.0
        if self.max_grad_norm is not None or self.skip_nonfinite:
            norm = self._norm(self._step.measure())
            self.last_grad_norm = torch.tensor(norm, dtype=torch.float64)
            if self.skip_nonfinite and not math.isfinite(norm):
                self._skip(work)
                return
            if self.max_grad_norm is not None:
                clip = min(1.0, self.max_grad_norm / (norm + 1e-6))
        self._step.run(clip)
        if counts is self._counts:
            counts.add_(1.0)
        else:
            torch._foreach_add_(steps, 1.0)
        torch.autograd.graph.increment_version([row.member.parameter for row in moving])
        for row in moving:
            row.member.version = row.member.parameter._version

    def _norm(self, mine: Squares) -> float:
        """Of the whole gradient: over the shards of this group and of the tensor-parallel one."""
        heard = self.group._gather_objects(tuple(mine))
        squares = Squares(*(math.fsum(part) for part in zip(*heard, strict=True)))
        split: Any = next((m.parameter for m in self.members.values() if m.split), None)
        if split is None:
            return math.sqrt(squares.whole)
        # Whole parameters are equal on all tensor-parallel ranks, and count once.
        everywhere = [Squares(*s) for s in split.tp_group._gather_objects(tuple(squares))]
        return math.sqrt(everywhere[0].whole + math.fsum(s.split for s in everywhere))

    def _skip(self, work: Work) -> None:
        self.skipped_steps += 1
        if self.skipped_steps > 1 or self._loss_scale != 1.0:
            return  # said once; and with a loss scale it is nothing unusual
        bad = (m.name for m, (grad, _) in work.items() if not bool(grad.isfinite().all()))
        culprits = self.group._gather_objects(next(bad, None))
        found = [f"{name} on rank {rank}" for rank, name in enumerate(culprits) if name]
        warnings.warn(
            "ShardedAdamW: a gradient is not finite, and every rank skips the step: "
            f"{', '.join(found) or 'the sum over the ranks is too large'}. Further skipped steps "
            "are counted in .skipped_steps",
            RuntimeWarning,
            stacklevel=4,
        )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch.optim.Optimizer's; with `data_parallel` forgets what was accumulated."""
        super().zero_grad(set_to_none)
        if self._buckets is not None:
            self._buckets.reset()

    # -- state ------------------------------------------------------------------------------------

    def state_bytes(self) -> int:
        """Bytes of moments, their scales, and masters held by this rank."""
        return sum(
            entry.nbytes
            for state in self.state.values()
            for name, entry in state.items()
            if name != "step"
        )

    def state_dict(self, *, rank0_only: bool = False) -> dict[str, Any]:
        """The whole state in torch.optim.AdamW's format, all in float32. Collective.

        Args:
            rank0_only: ranks above 0 get an empty dict, and need little memory for it.

        Returns:
            {"state": {index: {"step", "exp_avg", "exp_avg_sq", ...}}, "param_groups": [...]}. Of a
            bfloat16 or float16 parameter also "master_param". A parameter that was never stepped
            has no entry, as in torch.
        """
        for pre_hook in self._optimizer_state_dict_pre_hooks.values():
            pre_hook(self)
        keep = self.group.rank == 0 or not rank0_only
        entries = whole(self._buffers, self.group, keep)
        if not keep:
            return {}
        numbers = {p: index for index, p in enumerate(self._group_of())}
        packed: dict[str, Any] = {
            "state": {
                index: {"step": self.state[p]["step"].clone(), **entries[p]}
                for p, index in numbers.items()
                if p in entries and self.state[p]["step"] > 0
            },
            "param_groups": [
                {**group, "params": [numbers[p] for p in group["params"]]}
                for group in self.param_groups
            ],
        }
        for post_hook in self._optimizer_state_dict_post_hooks.values():
            packed = post_hook(self, packed) or packed
        return packed

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the whole state back, given to every rank, whatever the world size that wrote it.

        Args:
            state_dict: of this class or of torch.optim.AdamW. Moments stay float32 beside
                parameters of fewer bits. "master_param" sets the parameters too; where it is
                absent, masters are made from the parameters.

        Raises:
            InvalidArgumentError: (a ValueError) it does not fit the parameters. Nothing was loaded.
        """
        state_dict = dict(state_dict)
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = pre_hook(self, state_dict) or state_dict
        self._place_parameters()
        fault: ParallelKitError | None = None
        found: Mapping[torch.Tensor, Mapping[str, Any]] = {}
        try:
            found = checked_entries(state_dict, self.param_groups, self.members)
        except ParallelKitError as error:
            fault = error
        for rank, theirs in enumerate(self.group._gather_objects(fault)):
            if theirs is not None:
                raise type(theirs)(f"{theirs} [rank {rank} of {self.group.size}]")
        for group, new in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update({k: v for k, v in new.items() if k not in ("params", "param_names")})
        groups = self._group_of()
        for p, member in self.members.items():
            load_entry(member, found.get(p, {}), self._kept, groups[p]["amsgrad"])
        self._restate()
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)


def _numbers(group: Mapping[str, Any]) -> tuple[float, ...]:
    """A group's hyper-parameters."""
    beta1, beta2 = group["betas"]
    options = (group["lr"], beta1, beta2, group["eps"], group["weight_decay"])
    return (*map(float, options), group["amsgrad"], group["maximize"])
