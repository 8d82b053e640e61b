"""The layer's directions as PyTorch operators: opaque to torch.compile, which keeps its graph.

One operator for each function of `torch_products` and `parallelkit.kernels.linear`, with the choice
of kernels as a last argument: what was in force in the forward pass holds in the backward pass, on
whatever thread that runs. A tensor that is None there has 0 elements here, where it is a result.

The operators have no derivatives themselves (`linear_op` builds those of whole layers out of them);
asking for one, as a second derivative does, is an error.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from parallelkit.errors import UsageError
from parallelkit.nn.kernel_choice import LARGE_PRODUCT, run_product
from parallelkit.nn.operators import Operators

__all__ = [
    "activation_gradient",
    "add_weight_gradient",
    "define",
    "forward",
    "input_gradient",
    "partial_sum",
    "set_gradient",
    "weight_gradient",
]

Tensor = torch.Tensor

_operators = Operators("parallelkit_linear")
define, set_gradient = _operators.define, _operators.set_gradient


def _is_large(*sizes: int) -> bool:
    """Whether a product of these sizes, that of the sum among them, is a large one."""
    return math.prod(sizes) >= LARGE_PRODUCT


def _empty_for_none(reference: Tensor, t: Tensor | None) -> Tensor:
    return reference.new_empty(0) if t is None else t


def _forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    activation: str | None,
    gated: bool,
    keep: bool,
    kernels: str,
) -> tuple[Tensor, Tensor]:
    pays = _is_large(x.shape[0], *weight.shape) and (activation is not None or residual is not None)
    y, pre = run_product(
        kernels, "forward", pays, x, weight, bias, residual, activation, gated, keep
    )
    return y, _empty_for_none(x, pre)


def _forward_shapes(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    activation: str | None,
    gated: bool,
    keep: bool,
    kernels: str,
) -> tuple[Tensor, Tensor]:
    width = weight.shape[0]
    dtype = x.dtype if residual is None else torch.promote_types(x.dtype, residual.dtype)
    y = x.new_empty((x.shape[0], width // 2 if gated else width), dtype=dtype)
    return y, x.new_empty((x.shape[0], width) if keep else (0,))


def _partial_sum(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, kernels: str) -> None:
    run_product(kernels, "partial_sum", False, x, weight, bias, out)


def _input_gradient(
    dz: Tensor,
    weight: Tensor,
    pre: Tensor | None,
    activation: str | None,
    gated: bool,
    kernels: str,
) -> Tensor:
    pays = _is_large(dz.shape[0], *weight.shape) and pre is not None
    dx: Tensor = run_product(kernels, "input_gradient", pays, dz, weight, pre, activation, gated)
    return dx


def _input_gradient_shape(
    dz: Tensor,
    weight: Tensor,
    pre: Tensor | None,
    activation: str | None,
    gated: bool,
    kernels: str,
) -> Tensor:
    return dz.new_empty(dz.shape[0], weight.shape[1] * (2 if gated else 1))


def _weight_gradient(
    dz: Tensor, x: Tensor, bias: bool, dtype: torch.dtype, kernels: str
) -> tuple[Tensor, Tensor]:
    pays = _is_large(*dz.shape, x.shape[1]) and (bias or dtype != x.dtype)
    dweight, dbias = run_product(kernels, "weight_gradient", pays, dz, x, bias, dtype)
    return dweight, _empty_for_none(dweight, dbias)


def _weight_gradient_shapes(
    dz: Tensor, x: Tensor, bias: bool, dtype: torch.dtype, kernels: str
) -> tuple[Tensor, Tensor]:
    dweight = x.new_empty((dz.shape[1], x.shape[1]), dtype=dtype)
    return dweight, dweight.new_empty(dz.shape[1] if bias else 0)


def _add_weight_gradient(
    dz: Tensor, x: Tensor, dweight: Tensor, dbias: Tensor | None, kernels: str
) -> None:
    pays = _is_large(*dz.shape, x.shape[1]) and (dbias is not None or dweight.dtype != x.dtype)
    run_product(kernels, "add_weight_gradient", pays, dz, x, dweight, dbias)


def _activation_gradient(
    dy: Tensor, pre: Tensor, activation: str, gated: bool, kernels: str
) -> Tensor:
    dz: Tensor = run_product(kernels, "activation_gradient", gated, dy, pre, activation, gated)
    return dz


def _activation_gradient_shape(
    dy: Tensor, pre: Tensor, activation: str, gated: bool, kernels: str
) -> Tensor:
    return torch.empty_like(pre, memory_format=torch.contiguous_format)


def _nothing(*arguments: Any) -> None:
    """The shapes of an operator that only writes into its arguments."""


def _refuse(context: Any, *gradients: Any) -> Any:
    raise UsageError(
        "linear: second derivatives are not computed by the fused layer; call it under "
        'parallelkit.use_kernels("torch"), whose operators have them'
    )


forward = define(
    "forward(Tensor x, Tensor weight, Tensor? bias, Tensor? residual, str? activation, bool gated,"
    " bool keep, str kernels) -> (Tensor, Tensor)",
    _forward,
    _forward_shapes,
)
partial_sum = define(
    "partial_sum(Tensor x, Tensor weight, Tensor? bias, Tensor(a!) out, str kernels) -> ()",
    _partial_sum,
    _nothing,
)
input_gradient = define(
    "input_gradient(Tensor dz, Tensor weight, Tensor? pre, str? activation, bool gated,"
    " str kernels) -> Tensor",
    _input_gradient,
    _input_gradient_shape,
)
weight_gradient = define(
    "weight_gradient(Tensor dz, Tensor x, bool bias, ScalarType dtype, str kernels)"
    " -> (Tensor, Tensor)",
    _weight_gradient,
    _weight_gradient_shapes,
)
add_weight_gradient = define(
    "add_weight_gradient(Tensor dz, Tensor x, Tensor(a!) dweight, Tensor(b!)? dbias, str kernels)"
    " -> ()",
    _add_weight_gradient,
    _nothing,
)
activation_gradient = define(
    "activation_gradient(Tensor dy, Tensor pre, str activation, bool gated, str kernels) -> Tensor",
    _activation_gradient,
    _activation_gradient_shape,
)
for _operator in (input_gradient, weight_gradient, activation_gradient):
    set_gradient(_operator, None, _refuse)
