"""Triton's CPU interpreter with bf16 arithmetic, for tests only.

The interpreter of Triton 3.6 to 3.9 holds a bf16 number as the uint16 of its bits. Loads, stores
and selections are right; sums, products and comparisons work on the bits, and fp32 is truncated to
bf16 instead of rounded. `repaired()` computes in fp32 and rounds to nearest even, as GPUs do. It
also turns off the check of integer overflow, which takes half of the interpreter's time.

test_kernels_products.py shows that the repair is still needed.
"""

import dataclasses
from contextlib import contextmanager
from functools import partial
from unittest import mock

import numpy as np
import triton.language as tl
from parallelkit.kernels import launch
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

ON_BITS = (np.bitwise_and, np.bitwise_or, np.bitwise_xor)


def is_bf16(handle):
    return handle.dtype.scalar == tl.bfloat16


def widen(handle):
    """A handle's numbers as numpy can compute with them."""
    if not is_bf16(handle):
        return handle.data
    return (handle.data.astype(np.uint32) << 16).view(np.float32)


def narrow(numbers):
    """fp32 as a bf16 handle, to nearest even; NaN stays NaN."""
    numbers = np.ascontiguousarray(numbers, dtype=np.float32)
    bits = numbers.view(np.uint32)
    half_and_odd = 0x7FFF + ((bits >> 16) & 1)
    rounded = ((bits.astype(np.uint64) + half_and_odd) >> 16).astype(np.uint16)
    return TensorHandle(np.where(np.isnan(numbers), np.uint16(0x7FC0), rounded), tl.bfloat16)


class RepairedBuilder(InterpreterBuilder):
    def get_bf16(self, value):
        return narrow(np.array([value]))

    def unary_op(self, arg, op):
        return narrow(op(widen(arg))) if is_bf16(arg) else super().unary_op(arg, op)

    def binary_op(self, lhs, rhs, op):
        if not is_bf16(lhs) or op in ON_BITS:
            return super().binary_op(lhs, rhs, op)
        result = op(widen(lhs), widen(rhs))
        return TensorHandle(result, tl.int1) if result.dtype == bool else narrow(result)

    def ternary_op(self, lhs, rhs, other, op):
        if op is np.where or not is_bf16(other):
            return super().ternary_op(lhs, rhs, other, op)
        return narrow(op(widen(lhs), widen(rhs), widen(other)))

    def create_fma(self, x, y, z):
        return narrow(widen(x) * widen(y) + widen(z)) if is_bf16(z) else super().create_fma(x, y, z)

    def create_dot(self, a, b, d, *precision):
        if a.dtype.scalar not in (tl.bfloat16, tl.float16):
            return super().create_dot(a, b, d, *precision)
        product = np.matmul(widen(a).astype(np.float32), widen(b).astype(np.float32))
        return TensorHandle(product.astype(d.data.dtype) + d.data, d.dtype.scalar)

    def cast_impl(self, src, dst_type):
        if is_bf16(src) == (dst_type.scalar == tl.bfloat16):
            return super().cast_impl(src, dst_type)
        if is_bf16(src):
            numbers = TensorHandle(widen(src), tl.float32)
            return (
                numbers if dst_type.scalar == tl.float32 else super().cast_impl(numbers, dst_type)
            )
        return narrow(src.data)

    def create_fp_to_fp(self, src, dst_type, rounding_mode):
        eight_bits = 8 in (src.dtype.scalar.primitive_bitwidth, dst_type.scalar.primitive_bitwidth)
        toward_zero = rounding_mode == interpreter._ir.ROUNDING_MODE.RTZ
        if eight_bits or toward_zero or is_bf16(src) == (dst_type.scalar == tl.bfloat16):
            return super().create_fp_to_fp(src, dst_type, rounding_mode)
        return self.cast_impl(src, dst_type)


def patch_tensor(patch, tensor, *scope):
    """Triton 3.6 makes an int of a one-element array, which numpy 2.4 refuses."""
    patch(tensor, *scope)
    tensor.__index__ = lambda self: self.handle.data.item()


@contextmanager
def repaired():
    """The interpreter computes in bf16 inside."""
    builder = interpreter.interpreter_builder
    options = builder.options
    builder.__class__ = RepairedBuilder
    builder.options = dataclasses.replace(options, sanitize_overflow=False)
    launch.interpreter_knows_bf16.cache_clear()
    try:
        with (
            np.errstate(over="ignore"),  # exp overflows to inf here as it does on a GPU
            mock.patch.object(
                interpreter,
                "_patch_lang_tensor",
                partial(patch_tensor, interpreter._patch_lang_tensor),
            ),
        ):
            yield
    finally:
        builder.__class__, builder.options = InterpreterBuilder, options
        launch.interpreter_knows_bf16.cache_clear()
