"""Measured choices: who wins, where it is kept, and what trials must not touch. Times are given."""

import json

import pytest
import torch

pytest.importorskip("triton")

import triton_interpreter  # noqa: E402
from parallelkit.kernels import configs, linear, tune  # noqa: E402

from parallelkit.nn import kernel_choice, product_ops  # noqa: E402

CPU = torch.device("cpu")


@pytest.fixture
def tuning(monkeypatch, tmp_path):
    """Tuning is on, on the CPU, and takes its times from a list; the file is in tmp_path."""
    times, tried = [], []

    def take(run, device):
        run()
        tried.append(run)
        return times.pop(0)

    path = tmp_path / "sub" / "tuned.json"
    monkeypatch.setattr(tune, "enabled", lambda device: True)
    monkeypatch.setattr(tune, "_milliseconds", take)
    monkeypatch.setattr(tune, "_file", lambda device: path)
    tune._read.cache_clear()
    yield times, tried, path
    tune._read.cache_clear()


def test_the_fastest_is_kept_on_disk_and_read_by_the_next_process(tuning):
    times, tried, path = tuning
    candidates = {name: (lambda: None) for name in ("slow", "fast", "middling")}
    times += [3.0, 1.0, 2.0]
    assert tune.fastest("a", candidates, CPU) == "fast"
    assert json.loads(path.read_text()) == {"a": "fast"}
    tune._read.cache_clear()  # as in another process
    assert tune.fastest("a", candidates, CPU) == "fast" and len(tried) == 3
    times += [1.0, 2.0, 3.0]
    assert tune.fastest("b", candidates, CPU) == "slow"
    assert json.loads(path.read_text()) == {"a": "fast", "b": "slow"}


def test_a_candidate_that_is_gone_and_a_broken_file_are_measured_anew(tuning):
    times, tried, path = tuning
    path.parent.mkdir()
    for text in ('{"a": "gone"}', "not json"):
        path.write_text(text)
        tune._read.cache_clear()
        times += [1.0]
        assert tune.fastest("a", {"here": lambda: None}, CPU) == "here"
    assert len(tried) == 2


def test_the_fastest_configuration_is_launched(tuning, monkeypatch):
    times, tried, _ = tuning
    launched = []
    monkeypatch.setattr(linear, "product", lambda a, b, out, config, **_: launched.append(config))
    operands = configs.Operands(torch.float32, tf32=False, dual=False, aligned=True)
    count = len(configs.alternatives(CPU, operands))
    times += [5.0] * (count - 1) + [1.0]
    x, w = torch.randn(64, 32), torch.randn(32, 32)
    for _ in range(2):
        linear.forward(x, w, None, None, None, False, False)
    best = launched[count - 1]
    assert len(tried) == count and launched[-2:] == [best, best]


def test_trials_leave_gradients_alone(tuning):
    times, _, _ = tuning
    times += [1.0] * 100
    dz, x, grad = torch.randn(9, 8), torch.randn(9, 16), torch.ones(8, 16)
    with triton_interpreter.repaired():
        linear.add_weight_gradient(dz, x, grad, None)
    torch.testing.assert_close(grad, 1 + dz.T @ x)


def test_auto_takes_plain_pytorch_for_a_shape_that_triton_loses(tuning):
    times, _, _ = tuning
    grad = torch.ones(8, 16)
    arguments = (torch.randn(9, 8), torch.randn(9, 16), grad, None)
    candidates = {"torch": lambda *rest: rest[2].add_(1), "triton": lambda *rest: rest[2].add_(2)}
    times += [1.0, 2.0]
    name = "add_weight_gradient"
    assert kernel_choice._faster(name, candidates, True, arguments) == "torch"
    assert torch.equal(grad, torch.ones(8, 16))
    times += [2.0, 1.0]
    assert kernel_choice._faster("forward", candidates, False, arguments) == "triton"


def test_unmeasured_auto_takes_triton_for_large_aligned_products_with_an_epilogue(monkeypatch):
    expected = []

    def run(kernels, name, pays, a, b, *rest):
        expected.append(kernel_choice._faster(name, {}, pays, (a, b)))
        return a, b

    monkeypatch.setattr(tune, "enabled", lambda device: False)
    monkeypatch.setattr(product_ops, "run_product", run)

    def forward(m, n, k, activation):
        x, w = torch.empty(m, k, dtype=torch.bfloat16), torch.empty(n, k, dtype=torch.bfloat16)
        product_ops._forward(x, w, None, None, activation, False, False, "auto")
        return expected.pop()

    assert forward(8192, 4096, 4096, "gelu") == "triton"
    assert forward(8192, 4096, 4096, None) == "torch"  # bare
    assert forward(64, 4096, 4096, "gelu") == "torch"  # small
    assert forward(8192, 4096, 4097, "gelu") == "torch"  # unaligned

    dz, x = torch.empty(8192, 4096), torch.empty(8192, 4096)
    product_ops._weight_gradient(dz, x, True, torch.float32, "auto")
    product_ops._weight_gradient(dz, x, False, torch.float32, "auto")
    assert expected == ["triton", "torch"]


def test_nothing_is_measured_unless_asked_for(monkeypatch):
    monkeypatch.delenv("PARALLELKIT_TUNE", raising=False)
    assert not tune.enabled(torch.device("cuda"))
    monkeypatch.setenv("PARALLELKIT_TUNE", "1")
    assert not tune.enabled(CPU)


def test_shape_classes_are_powers_of_two():
    assert tune.bucket(1, 33, 4096, 4097) == "1x64x4096x8192"


def test_the_largest_tiles_that_give_every_processor_one(monkeypatch):
    operands = configs.Operands(torch.bfloat16, tf32=False, dual=False, aligned=True)
    monkeypatch.setattr(configs, "target", lambda device: "sm_90")
    monkeypatch.setattr(configs, "processors", lambda device: 132)
    large, medium, small = configs.TABLE["sm_90"]
    assert configs.choose(8192, 4096, CPU, operands) == large
    assert configs.choose(2048, 2048, CPU, operands) == medium
    assert configs.choose(16, 4096, CPU, operands) == small
    assert configs.programs(large, 8192, 4096, CPU) == 132
    assert configs.programs(large, 128, 512, CPU) == 2
