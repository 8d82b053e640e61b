"""Who computes a layer, and what is no layer."""

import subprocess
import sys

import pytest
import torch

from parallelkit.errors import InvalidArgumentError, InvalidTypeError, UsageError
from parallelkit.nn import kernel_choice, product_ops
from parallelkit.nn.kernel_choice import current_kernels, use_kernels
from parallelkit.nn.linear_op import gated_linear, linear, linear_into
from parallelkit.nn.mlp_op import mlp

FP32, FP64, BF16 = torch.float32, torch.float64, torch.bfloat16


def leaf(*shape, dtype):
    return torch.randn(shape).to(dtype).requires_grad_()


def test_blocks_nest_and_end():
    assert current_kernels() == "auto"
    with use_kernels("torch"):
        with use_kernels("triton"):
            assert current_kernels() == "triton"
        assert current_kernels() == "torch"
    assert current_kernels() == "auto"


def test_the_environment_sets_the_default_only(monkeypatch):
    monkeypatch.setenv("PARALLELKIT_KERNELS", "torch")
    assert current_kernels() == "torch"
    with use_kernels("auto"):
        assert current_kernels() == "auto"
    monkeypatch.setenv("PARALLELKIT_KERNELS", "cublas")
    with pytest.raises(InvalidArgumentError, match="PARALLELKIT_KERNELS must be .* 'cublas'"):
        current_kernels()


def test_an_unknown_name_is_refused():
    with pytest.raises(InvalidArgumentError, match="auto, triton, torch, got 'cuda'"):
        use_kernels("cuda").__enter__()


def test_backward_computes_as_forward_did(monkeypatch):
    triton_interpreter = pytest.importorskip("triton_interpreter")
    used = []
    run = product_ops.run_product
    monkeypatch.setattr(
        product_ops,
        "run_product",
        lambda kernels, *rest: used.append(kernels) or run(kernels, *rest),
    )
    x, w = leaf(4, 8, dtype=FP32), leaf(8, 8, dtype=FP32)
    with triton_interpreter.repaired():
        with use_kernels("triton"):
            y = linear(x, w, None, "gelu")
        with use_kernels("torch"):
            y.sum().backward()
    assert set(used) == {"triton"} and len(used) == 4


def test_triton_refuses_what_it_cannot_compute(monkeypatch):
    launch = pytest.importorskip("parallelkit.kernels.launch")
    with use_kernels("triton"):
        with pytest.raises(
            InvalidTypeError, match="float16, bfloat16 and float32, got torch.float64"
        ):
            linear(leaf(2, 3, dtype=FP64), leaf(4, 3, dtype=FP64))
        monkeypatch.setattr(launch, "interpreter_knows_bf16", lambda: False)
        with pytest.raises(InvalidTypeError, match="computes bfloat16 wrongly"):
            linear(leaf(2, 3, dtype=BF16), leaf(4, 3, dtype=BF16))


def test_triton_refuses_where_it_is_not_installed(monkeypatch):
    monkeypatch.setattr(kernel_choice, "_has_triton", lambda: False)
    with use_kernels("triton"), pytest.raises(UsageError, match="Triton is not installed"):
        linear(leaf(2, 3, dtype=FP32), leaf(4, 3, dtype=FP32))


def test_everything_but_triton_works_without_it():
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch, parallelkit.kernels\n"
        "from parallelkit.nn.linear_op import linear\n"
        "x = torch.ones(2, 3, dtype=torch.bfloat16, requires_grad=True)\n"
        "linear(x, torch.ones(4, 3, dtype=torch.bfloat16), None, 'relu').sum().backward()\n"
        "assert x.grad[0, 0] == 4\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x, w: linear(x, w, activation="tanh"), "linear: activation must be relu, .*'tanh'"),
        (lambda x, w: linear(x, w.T), r"linear: input must be \[..., K\] and weight \[N, K\]"),
        (lambda x, w: linear(x, w, w[0]), r"linear: bias must be \[6\], got \(3,\)"),
        (lambda x, w: linear(x, w, residual=x), r"residual or out must be \(2, 6\), got \(2, 3\)"),
        (lambda x, w: gated_linear(x, w[:5]), "two halves of rows, got 5"),
        (lambda x, w: gated_linear(x, w, activation=None), "gated_linear: activation must be relu"),
        (lambda x, w: linear_into(x, x, w), r"residual or out must be \(2, 6\)"),
        (
            lambda x, w: linear_into(torch.empty(2, 3, 6).transpose(0, 1), w.view(3, 2, 3), w),
            r"linear_into: out must be .* one in memory, got \(3, 2, 6\) with strides",
        ),
        (lambda x, w: mlp(x, w, w), r"mlp: down: input must be .* \(2, 6\) and \(6, 3\)"),
        (lambda x, w: mlp(x, w, w.T, activation=None), "mlp: activation must not be None"),
        (lambda x, w: linear(x, w.to("meta")), "must be on cpu as x is, got one on meta"),
    ],
)
def test_arguments_that_make_no_layer(call, message):
    with pytest.raises(InvalidArgumentError, match=message):
        call(torch.randn(2, 3), torch.randn(6, 3))


@pytest.mark.parametrize("x", [torch.ones(2, 3, dtype=torch.int32), torch.ones(2, 3, dtype=BF16)])
def test_dtypes_that_make_no_layer(x):
    with pytest.raises(InvalidTypeError, match="must have one float dtype, got torch"):
        linear(x, torch.ones(4, 3))
