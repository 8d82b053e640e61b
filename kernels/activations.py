"""Activations and their slopes, in fp32, for the kernels' epilogues.

Source: GELU and its tanh form, Hendrycks and Gimpel 2016; SiLU, Elfwing et al. 2017. The numbers
are those of torch.nn.functional.relu, gelu, gelu(approximate="tanh") and silu.
"""

import triton
import triton.language as tl

NAMES = ("relu", "gelu", "gelu_tanh", "silu")

SQRT_HALF: tl.constexpr = tl.constexpr(0.7071067811865476)  # √½
INV_SQRT_2PI: tl.constexpr = tl.constexpr(0.3989422804014327)  # 1/√(2π)
SQRT_8_OVER_PI: tl.constexpr = tl.constexpr(1.5957691216057308)  # 2·√(2/π)
CUBIC: tl.constexpr = tl.constexpr(0.044715)


@triton.jit
def sigmoid(z):
    """1/(1 + e^-z); 0 and 1 where e^-z overflows or vanishes."""
    return 1.0 / (1.0 + tl.exp(-z))


@triton.jit
def gelu_tanh_gate(z):
    """½(1 + tanh u) = σ(2u) with u = √(2/π)·(z + 0.044715·z³); Triton has exp, but no tanh."""
    return sigmoid(z * SQRT_8_OVER_PI * (z * z * CUBIC + 1.0))


@triton.jit
def activate(z, ACTIVATION: tl.constexpr):
    """act(z); z itself where ACTIVATION is None."""
    if ACTIVATION == "relu":
        z = tl.where(z < 0.0, 0.0, z)  # unlike maximum, lets NaN through
    elif ACTIVATION == "gelu":
        z = 0.5 * z * (1.0 + tl.erf(z * SQRT_HALF))
    elif ACTIVATION == "gelu_tanh":
        z = z * gelu_tanh_gate(z)
    elif ACTIVATION == "silu":
        z = z * sigmoid(z)
    else:
        tl.static_assert(ACTIVATION is None, "unknown activation")
    return z


@triton.jit
def slope(z, ACTIVATION: tl.constexpr):
    """act'(z); relu's is 0 at 0, and so may be taken from relu(z) as well as from z."""
    if ACTIVATION == "relu":
        z = tl.where(z <= 0.0, 0.0, 1.0)
    elif ACTIVATION == "gelu":
        z = 0.5 * (1.0 + tl.erf(z * SQRT_HALF)) + z * INV_SQRT_2PI * tl.exp(-0.5 * z * z)
    elif ACTIVATION == "gelu_tanh":
        gate = gelu_tanh_gate(z)
        z = gate + z * gate * (1.0 - gate) * SQRT_8_OVER_PI * (z * z * (3.0 * CUBIC) + 1.0)
    elif ACTIVATION == "silu":
        gate = sigmoid(z)
        z = gate * (1.0 + z * (1.0 - gate))
    else:
        tl.static_assert(False, "unknown activation")
    return z
