"""Linear layers split over the ranks of a group.

    x [..., K]     W [N, K]     b [N]     R ranks     M = product of the leading sizes

    ColumnParallelLinear   W by rows:     y_r = act(x·W_rᵀ + b_r)    dx = Σ_r dz_r·W_r
    RowParallelLinear      W by columns:  y = Σ_r x_r·W_rᵀ + b       dx_r = dy·W_r

A column layer and the row layer that reads its output need one sum forward and one backward. With
sequence parallelism, x of the first and y of the second are shards along dimension -2: a gather and
a reduce-scatter take the place of each sum.

Source: Shoeybi et al. 2019, "Megatron-LM"; Korthikanti et al. 2022, "Reducing activation
recomputation in large transformer models".
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from parallelkit.agreement import refuse_instead
from parallelkit.arguments import check_tensor
from parallelkit.errors import InvalidArgumentError, InvalidTypeError, ParallelKitError
from parallelkit.group import Group, default_group
from parallelkit.nn import exchange
from parallelkit.nn.column_op import column_linear
from parallelkit.nn.functional import (
    copy_to_group,
    gather_from_group,
    scatter_to_group,
)
from parallelkit.nn.linear_op import cast_for_autocast, check, linear
from parallelkit.nn.row_op import row_linear
from parallelkit.nn.shared_input import SharedInput
from parallelkit.nn.split import Split, check_layer, draw_shard, local_part, split_of
from parallelkit.nn.torch_products import ACTIVATIONS

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["ColumnParallelLinear", "RowParallelLinear"]

Tensor = torch.Tensor
T = TypeVar("T")


class SplitLinear(nn.Module):
    """What the two layers share: a weight cut along one of its dimensions."""

    split_dim: int  # of [out_features, in_features]
    in_features: int
    out_features: int
    group: Group
    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool,
        group: Group | DeviceMesh | None,
        sequence_parallel: bool,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        sizes = {"in_features": in_features, "out_features": out_features}
        check_layer(type(self).__name__, sizes, device, dtype)
        self.in_features, self.out_features = in_features, out_features
        self.group = default_group(group)
        self.sequence_parallel = sequence_parallel
        self.blocks = self.copies = 1  # of the split
        self.transposed = False  # whether the parameter is [in, out], as transformers' Conv1D
        self._splits_bias = self.split_dim == 0
        shape = [out_features, in_features]
        split = Split(self.group, self.split_dim, shape[self.split_dim])
        shape[self.split_dim] = sum(stop - start for start, stop in split.ranges())
        self.weight = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        if bias:
            length = shape[0] if self._splits_bias else out_features
            self.bias = nn.Parameter(torch.empty(length, device=device, dtype=dtype))
        else:
            self.register_parameter("bias", None)
        self._mark()
        self.reset_parameters()

    def _mark(self) -> None:
        length = self.out_features if self.split_dim == 0 else self.in_features
        dim = self.split_dim ^ self.transposed
        self._split = Split(self.group, dim, length, self.blocks, self.copies)
        self._split.mark(self.weight)
        if self.bias is not None and self._splits_bias:
            Split(self.group, 0, length, self.blocks, self.copies).mark(self.bias)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._mark()  # a copied parameter has lost its marks

    def reset_parameters(self) -> None:
        """Draw as nn.Linear does: with one seed the gathered weight is nn.Linear's, to the bit."""
        split = split_of(self.weight)
        assert split is not None
        draw_shard(self.weight, split, lambda w: nn.init.kaiming_uniform_(w, a=math.sqrt(5)))
        if self.bias is not None:
            bound = 1 / math.sqrt(self.in_features) if self.in_features > 0 else 0
            whole = torch.empty(self.out_features, device=self.bias.device, dtype=self.bias.dtype)
            nn.init.uniform_(whole, -bound, bound)
            with torch.no_grad():
                bias_split = split_of(self.bias)
                self.bias.copy_(whole if bias_split is None else bias_split.take(whole))

    def _take(self, linear: nn.Module, transposed: bool, blocks: int, copies: int = 1) -> None:
        """Become this rank's part of a whole layer; parameters keep their requires_grad."""
        self.blocks, self.copies, self.transposed = blocks, copies, transposed
        self._mark()
        split, whole = split_of(self.weight), linear.weight
        assert split is not None and isinstance(whole, Tensor)
        self.weight = nn.Parameter(split.take(whole.detach()), whole.requires_grad)
        bias = linear.bias
        if isinstance(bias, Tensor):
            cut = split_of(self.bias) if self.bias is not None else None
            taken = bias.detach().clone() if cut is None else cut.take(bias.detach())
            self.bias = nn.Parameter(taken, bias.requires_grad)
        self._mark()
        self.train(linear.training)

    def _whole(self, name: str) -> Tensor | None:
        parameter = getattr(self, name)
        if parameter is None:
            return None
        split = split_of(parameter)
        return parameter.detach().clone() if split is None else split.gather(parameter)

    @classmethod
    def from_linear(
        cls, linear: nn.Linear, group: Group | DeviceMesh | None = None, **options: Any
    ) -> Self:
        """This rank's part of a layer that every rank has whole; options as the constructor's."""
        if not isinstance(linear, nn.Linear):
            raise InvalidTypeError(
                f"{cls.__name__}.from_linear: linear must be an nn.Linear, got "
                f"{type(linear).__name__}"
            )
        sizes = (linear.in_features, linear.out_features, linear.bias is not None)
        made: Any = cls
        made = made(*sizes, group=group, device="meta", **options)
        made._take(linear, transposed=False, blocks=1)
        return made  # type: ignore[no-any-return]

    def to_linear(self) -> nn.Linear:
        """The whole layer as nn.Linear, on every rank; collective."""
        weight, bias = self._whole("weight"), self._whole("bias")
        assert weight is not None
        made = nn.Linear(self.in_features, self.out_features, bias is not None, device="meta")
        made.weight = nn.Parameter(
            weight.t().contiguous() if self.transposed else weight, self.weight.requires_grad
        )
        if bias is not None and self.bias is not None:
            made.bias = nn.Parameter(bias, self.bias.requires_grad)
        return made.train(self.training)

    def operands(self) -> tuple[Tensor, Tensor | None]:
        """This rank's weight as [out, in], and bias."""
        weight, bias = local_part(self.weight), self.bias
        weight = self._split.shared(weight.t() if self.transposed else weight)
        if bias is not None and self._splits_bias:
            bias = self._split.shared(local_part(bias))  # type: ignore[assignment]
        return weight, bias

    def _operands(
        self, x: Tensor, activation: str | None = None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """x, weight and bias as the product takes them; raises unless they fit."""
        x, weight, bias = cast_for_autocast(x, *self.operands())
        check(type(self).__name__, x, x.shape, weight, bias, activation, None, False)
        return x, weight, bias

    @property
    def _communicates(self) -> bool:
        """Whether `forward` does, in any case."""
        return True

    def _checked(self, check: Callable[[], T]) -> T:
        """What `check` returns; what it raises, on every rank if `forward` communicates anyway."""
        try:
            return check()
        except ParallelKitError as fault:
            if not self._communicates:
                raise
            raise refuse_instead(self.group, fault) from fault

    def _check_input(self, x: Tensor) -> None:
        """Raise unless x is a tensor, with a dimension that can be cut into tokens if need be."""
        check_tensor(type(self).__name__, "x", x)
        if self.sequence_parallel and x.ndim < 2:
            raise InvalidArgumentError(
                f"{type(self).__name__}: with sequence_parallel, x must be [tokens, hidden] or "
                f"[batch, sequence, hidden], got {list(x.shape)}"
            )

    def extra_repr(self) -> str:
        """As nn.Linear's, with what is split."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, rank {self.group.rank} of {self.group.size}"
            + (", sequence_parallel=True" if self.sequence_parallel else "")
        )


class ColumnParallelLinear(SplitLinear):
    """act(x·Wᵀ + b) with the outputs split: this rank computes `shard_bounds(out_features, ...)`.

        x [..., in_features], equal on every rank     y [..., this rank's outputs]

    Args:
        in_features, out_features, bias: as nn.Linear; out_features need not be divisible.
        group: a Group or one-dimensional DeviceMesh.
        gather_output: give the whole y on every rank. Default: False.
        sequence_parallel: x is this rank's shard along dimension -2; it is gathered first.
        activation: None, "relu", "gelu", "gelu_tanh" or "silu"; in one pass with the product where
            that pays. Default: None.
        device, dtype: as nn.Linear.
    Raises:
        InvalidArgumentError, InvalidTypeError: a bad size, activation, device or dtype, on this
            rank: to make a layer communicates nothing. In `forward` an x that does not fit or is of
            another dtype than the weight: on every rank if the layer gathers, before or after; else
            it communicates only in the backward pass, and the error stays with its rank.
    Cost: backward, one sum of x's gradient over the group (with sequence_parallel: forward a gather
        of x, backward a reduce-scatter).
    """

    split_dim = 0

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        group: Group | DeviceMesh | None = None,
        gather_output: bool = False,
        sequence_parallel: bool = False,
        activation: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if activation is not None and not (
            isinstance(activation, str) and activation in ACTIVATIONS
        ):
            raise InvalidArgumentError(
                f"ColumnParallelLinear: activation must be {', '.join(ACTIVATIONS)} or None, "
                f"got {activation!r}"
            )
        super().__init__(in_features, out_features, bias, group, sequence_parallel, device, dtype)
        self.gather_output, self.activation = gather_output, activation
        self.shared_input: SharedInput | None = None  # with its siblings

    def whole_tokens(self, x: Tensor) -> int | None:
        """With sequence_parallel, how long dimension -2 of x is over all ranks; collective."""
        if not self.sequence_parallel:
            return None
        return exchange.whole_length(type(self).__name__, x, x.ndim - 2, self.group)

    def enter(self, x: Tensor) -> Tensor:
        """x as the layer's products read it: whole, its gradient summed over the group."""
        if self.sequence_parallel:
            self._checked(lambda: self._check_input(x))
            return gather_from_group(x, self.group, -2, grad="partial")
        return copy_to_group(x, self.group)

    @property
    def _communicates(self) -> bool:
        return self.sequence_parallel or self.gather_output

    def forward(self, x: Tensor) -> Tensor:
        """This rank's outputs, or all of them with gather_output."""
        self._checked(lambda: self._check_input(x))
        shared, entry = self.shared_input, None
        if shared is not None and not torch.compiler.is_compiling():
            entry = shared.enter(x)
        entered = x if entry is None else entry.x
        x, weight, bias = self._checked(lambda: self._operands(entered, self.activation))
        if shared is not None and entry is not None:
            y = entry.linear(shared.layers.index(self), x, weight, bias, self.activation)
        elif shared is not None and shared.early:  # a compiled graph: x was let in before
            y = linear(x, weight, bias, self.activation)
        else:
            tokens = self.whole_tokens(x)
            y = column_linear(x, weight, bias, self.activation, self.group, tokens)
        if not self.gather_output:
            return y
        length = self.out_features if self.blocks == self.copies == 1 else None
        return gather_from_group(y, self.group, length=length)


class RowParallelLinear(SplitLinear):
    """x·Wᵀ + b with the inputs split: each rank has its part of x, and the products are summed.

        x [..., this rank's inputs]     y [..., out_features], equal on every rank

    Args:
        in_features, out_features, bias: as nn.Linear; in_features need not be divisible. The bias
            is whole on every rank, is added once, and its gradient is right on each.
        group: a Group or one-dimensional DeviceMesh.
        input_is_parallel: x is this rank's inputs, as a column layer gives them; else x is whole
            and is cut first. Default: True.
        sequence_parallel: y is this rank's shard along dimension -2.
        device, dtype: as nn.Linear.
    Raises:
        InvalidArgumentError, InvalidTypeError: a bad size, device or dtype, on this rank; in
            `forward` an x that does not fit, on every rank.
        CollectiveMismatchError: in `forward` ranks whose y have different shapes; on every rank.
    Cost: forward, one sum of y over the group (with sequence_parallel a reduce-scatter, and
        backward a gather).
    """

    split_dim = 1

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        group: Group | DeviceMesh | None = None,
        input_is_parallel: bool = True,
        sequence_parallel: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, group, sequence_parallel, device, dtype)
        self.input_is_parallel = input_is_parallel

    def forward(self, x: Tensor) -> Tensor:
        """The whole outputs, or this rank's tokens of them with sequence_parallel."""

        def operands() -> tuple[Tensor, Tensor, Tensor | None]:
            self._check_input(x)
            part = x if self.input_is_parallel else scatter_to_group(x, self.group)
            return self._operands(part)

        x, weight, bias = self._checked(operands)
        return row_linear(x, weight, bias, self.group, self.sequence_parallel)
