"""What a layer must compute, in float64, with a bound of what rounding may do to it.

A running error analysis (Higham, Accuracy and Stability of Numerical Algorithms, section 3.3):
every number carries a bound of the error its fp32 or 16-bit counterpart may have, and every
operation passes the bounds of its operands on and adds its own rounding. Tests need no tolerances.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F

UNIT = {
    torch.float64: 2.0**-53,
    torch.float32: 2.0**-24,
    torch.float16: 2.0**-11,
    torch.bfloat16: 2.0**-8,
}
TINIEST = {torch.float16: 2.0**-25}  # half of the smallest subnormal; elsewhere out of sight
LIPSCHITZ, CURVATURE = 1.13, 1.1  # the largest |act'| and |act''| of the activations here
EVALUATION = 16  # rounding units that evaluating act or act' may cost, exp and erf included

ACTIVATIONS = {
    None: lambda z: z,
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda z: F.gelu(z, approximate="tanh"),
    "silu": F.silu,
}


@dataclass
class Tracked:
    """A float64 value, a bound of its counterpart's error, and that one's working precision."""

    value: torch.Tensor
    error: torch.Tensor
    unit: float

    @staticmethod
    def of(t):
        if isinstance(t, Tracked):
            return t
        unit = UNIT[torch.float64 if t.dtype == torch.float64 else torch.float32]
        if t.is_cuda:  # tensor cores truncate where they add
            unit *= 4
        value = t.detach().cpu().double()
        return Tracked(value, torch.zeros_like(value), unit)

    def _result(self, value, error, roundings=1):
        return Tracked(value, error + roundings * self.unit * (value.abs() + error), self.unit)

    @property
    def size(self):
        return self.value.abs() + self.error

    @property
    def T(self):
        return Tracked(self.value.T, self.error.T, self.unit)

    def __getitem__(self, index):
        return Tracked(self.value[index], self.error[index], self.unit)

    def __add__(self, other):
        return self._result(self.value + other.value, self.error + other.error)

    def __mul__(self, other):
        error = self.size * other.error + self.error * other.value.abs()
        return self._result(self.value * other.value, error)

    def __matmul__(self, other):
        # Any order of L terms: at most L roundings of at most the sum of sizes.
        carried = self.size @ other.error + self.error @ other.value.abs()
        rounding = (self.value.shape[1] + 1) * self.unit * (self.size @ other.size)
        return self._result(self.value @ other.value, carried + rounding)

    def sum(self):
        """Over rows."""
        rounding = (len(self.value) + 1) * self.unit * self.size.sum(0)
        return self._result(self.value.sum(0), self.error.sum(0) + rounding)

    def activate(self, activation):
        if activation is None:
            return self
        value = ACTIVATIONS[activation](self.value)
        own = EVALUATION * self.unit * self.value.abs()
        return self._result(value, LIPSCHITZ * self.error + own)

    def slope(self, activation):
        z = self.value.clone().requires_grad_()
        (value,) = torch.autograd.grad(ACTIVATIONS[activation](z).sum(), z)
        if activation == "relu":  # a step: either side where the sign is not certain
            return Tracked(value, (self.value.abs() <= self.error).double(), self.unit)
        own = EVALUATION * self.unit * (1 + self.value.abs())
        return self._result(value, CURVATURE * self.error + own)

    def round(self, dtype):
        rounding = UNIT[dtype] * self.size + TINIEST.get(dtype, 0)
        return Tracked(self.value, self.error + rounding, self.unit)

    def check(self, actual, name):
        """Fail unless `actual` lies within the bound, NaN included."""
        assert actual.shape == self.value.shape, f"{name}: {actual.shape}, not {self.value.shape}"
        off = (actual.detach().cpu().double() - self.value).abs() / (self.error + 1e-300)
        worst = off.nan_to_num(nan=math.inf).max().item() if off.numel() else 0.0
        assert worst <= 1, f"{name} is off by {worst:.3g} times the bound"


def preactivation(x, weight, bias=None):
    """z = x·Wᵀ + b."""
    z = Tracked.of(x) @ Tracked.of(weight).T
    return z if bias is None else z + Tracked.of(bias)


def output(z, activation, gated=False, residual=None):
    """y = act(z) + residual, or act(gate)·up + residual."""
    n = z.value.shape[1] // 2
    y = z[:, :n].activate(activation) * z[:, n:] if gated else z.activate(activation)
    return y if residual is None else y + Tracked.of(residual)


def through_slope(d, z, activation, gated):
    """The gradient of z from d, that of act(z) or act(gate)·up."""
    if not gated:
        return d * z.slope(activation)
    n = z.value.shape[1] // 2
    gate, up = z[:, :n], z[:, n:]
    left, right = d * up * gate.slope(activation), d * gate.activate(activation)
    return Tracked(
        torch.cat([left.value, right.value], 1), torch.cat([left.error, right.error], 1), d.unit
    )
