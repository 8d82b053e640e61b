"""The directions of a linear layer y = act(x·Wᵀ + b) + residual, on 2-D tensors.

    x [M, K]  tokens × inputs     W [N, K]  outputs × inputs     y, z, dz [M, N]

Gated layers hold two halves in one weight [2N, K], the gate's rows first:
y = act(x·W₁ᵀ + b₁) ⊙ (x·W₂ᵀ + b₂); then z and dz are [M, 2N], the gate's columns first.

Tensors may have any strides; sums are in fp32, each result is rounded once. One rank's shard is the
same call: of a column-split layer, on its rows of W; of a row-split one, on its columns of x and W,
where `partial_sum` leaves the result in fp32 in memory that peers can reach.
"""

from functools import partial
from typing import Any

import torch
from parallelkit.kernels import configs, tune
from parallelkit.kernels.configs import Config, Operands
from parallelkit.kernels.gradient import activation_gradient as launch_activation_gradient
from parallelkit.kernels.product import product
from parallelkit.kernels.tiles import describable

Tensor = torch.Tensor


def halves(t: Tensor, dim: int, gated: bool) -> tuple[Tensor, Tensor | None]:
    """The gate's half and the other one along dim; all of it and None if not gated."""
    if not gated:
        return t, None
    size = t.shape[dim] // 2
    return t.narrow(dim, 0, size), t.narrow(dim, size, size)


def tf32_for(dtype: torch.dtype) -> bool:
    """Whether operands may be rounded to tf32: for fp32, as torch's own switch for matmul says."""
    return dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32"


def forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    activation: str | None,
    gated: bool,
    keep: bool,
) -> tuple[Tensor, Tensor | None]:
    """y = act(x·Wᵀ + b) + residual, and z = x·Wᵀ + b if it is to be kept for the backward pass."""
    dtype = x.dtype if residual is None else torch.promote_types(x.dtype, residual.dtype)
    w, w_up = halves(weight, 0, gated)
    y = x.new_empty(x.shape[0], w.shape[0], dtype=dtype)
    pre = x.new_empty(x.shape[0], weight.shape[0]) if keep else None
    p, p_up = (None, None) if pre is None else halves(pre, 1, gated)
    b, b_up = (None, None) if bias is None else halves(bias.contiguous(), 0, gated)
    _product(
        x, w, y, b_up=w_up, pre=p, pre_up=p_up, bias=b, bias_up=b_up,
        residual=residual, activation=activation,
    )  # fmt: skip
    return y, pre


def partial_sum(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """out = x·Wᵀ, plus the bias on the one rank that gives it, rounded to out's dtype only."""
    _product(x, weight, out, bias=None if bias is None else bias.contiguous())


def input_gradient(
    dz: Tensor, weight: Tensor, pre: Tensor | None, activation: str | None, gated: bool
) -> Tensor:
    """dx = dz·W; with a pre, dx = (dz·W)·act'(pre): the dz of the layer before, gated or not."""
    if pre is None:
        dx = dz.new_empty(dz.shape[0], weight.shape[1])
        _product(dz, weight.T, dx)
        return dx
    dx = torch.empty_like(pre, memory_format=torch.contiguous_format)
    d, d_up = halves(dx, 1, gated)
    p, p_up = halves(pre, 1, gated)
    _product(dz, weight.T, d, out_up=d_up, pre=p, pre_up=p_up, activation=activation, slope=True)
    return dx


def weight_gradient(
    dz: Tensor, x: Tensor, bias: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    """dW = dzᵀ·x and, if there is a bias, db = Σ dz in the same pass."""
    dweight = x.new_empty(dz.shape[1], x.shape[1], dtype=dtype)
    dbias = x.new_empty(dz.shape[1], dtype=dtype) if bias else None
    _product(dz.T, x.T, dweight, sums=dbias)
    return dweight, dbias


def add_weight_gradient(dz: Tensor, x: Tensor, dweight: Tensor, dbias: Tensor | None) -> None:
    """The same, added straight to what the gradients' buffers hold, fp32 or 16 bits."""
    _product(dz.T, x.T, dweight, sums=dbias, accumulate=True)


def activation_gradient(dy: Tensor, pre: Tensor, activation: str, gated: bool) -> Tensor:
    """dz = dy·act'(z), for a gradient that no product of ours has just made."""
    dz = torch.empty_like(pre, memory_format=torch.contiguous_format)
    p, p_up = halves(pre, 1, gated)
    d, d_up = halves(dz, 1, gated)
    launch_activation_gradient(dy, p, d, activation, pre_up=p_up, dz_up=d_up)
    return dz


def _product(
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor,
    *,
    sums: torch.Tensor | None = None,
    accumulate: bool = False,
    **epilogue: Any,
) -> None:
    """The product, with the configuration of the table or, if asked for, of measurement."""
    (I, L), J, device = a.shape, b.shape[0], a.device
    matrices = [
        t for t in (a, b, out, *epilogue.values()) if isinstance(t, torch.Tensor) and t.ndim == 2
    ]
    operands = Operands(
        a.dtype,
        tf32_for(a.dtype),
        dual=any(epilogue.get(name) is not None for name in ("b_up", "out_up")),
        aligned=all(describable(t) or describable(t.T) for t in matrices),
    )

    def launch(out: Tensor, sums: Tensor | None, config: Config) -> None:
        product(a, b, out, config, sums=sums, accumulate=accumulate, tf32=operands.tf32, **epilogue)

    config = configs.choose(I, J, device, operands)
    if tune.enabled(device):
        # Trials must not accumulate into the caller's gradients.
        trial_out = torch.empty_like(out) if accumulate else out
        trial_sums = torch.empty_like(sums) if accumulate and sums is not None else sums
        choices = {str(choice): choice for choice in configs.alternatives(device, operands)}
        trials = {
            name: partial(launch, trial_out, trial_sums, choice) for name, choice in choices.items()
        }
        given = ",".join(sorted(name for name, value in epilogue.items() if value is not None))
        layout = f"{a.stride(1) == 1:d}{b.stride(1) == 1:d}{accumulate:d}{sums is not None:d}"
        key = f"{tune.bucket(I, J, L)} {operands} {out.dtype} {layout} {given}"
        config = choices[tune.fastest(key, trials, device)]
    launch(out, sums, config)
