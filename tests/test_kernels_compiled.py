"""The kernels compiled for GPUs that need not be here.

Every direction of the layer is launched through its own launcher up to the last step, where the
arguments are caught and compiled instead. What the compiler says of registers and shared memory is
kept in kernels_golden.json; run this file as a script to write it anew.
"""

import json
import os
import re
import subprocess
import tempfile
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch

triton = pytest.importorskip("triton")

from parallelkit.kernels import configs, launch, linear  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402
from triton.runtime.jit import JITFunction  # noqa: E402

GOLDEN = Path(__file__).with_name("kernels_golden.json")
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
VERSION = tuple(map(int, triton.__version__.split(".")[:2]))
PROCESSORS = {"sm_80": 108, "sm_90": 132, "sm_100": 148}
CODE = {
    "mma": r"mma\.sync",
    "wgmma": r"wgmma\.mma_async",
    "tcgen05": r"tcgen05\.mma",
    "cp.async": r"cp\.async\.c[ag]\.",
    "TMA loads": r"cp\.async\.bulk\.tensor\.2d\.shared",
    "TMA stores": r"cp\.async\.bulk\.tensor\.2d\.global",
}
# What one program may have, by the CUDA programming guide; 99 KB is sm_86's and sm_89's, which
# read sm_80's row of the table too.
SHARED_LIMIT = {"sm_80": 99 * 1024, "sm_90": 227 * 1024, "sm_100": 227 * 1024}
BF16, FP32 = torch.bfloat16, torch.float32
CPU = torch.device("cpu")
POINTERS = {BF16: "*bf16", FP32: "*fp32"}

pytestmark = pytest.mark.skipif(
    not isinstance(launch._add_kernel, JITFunction),
    reason="TRITON_INTERPRET=1 leaves nothing to compile",
)


def empty(*shape, dtype):
    return torch.empty(shape, dtype=dtype)  # never written, so it takes no memory


def forward(m, n, k, activation=None, gated=False, dtype=BF16, extras=True):
    width = 2 * n if gated else n
    bias = empty(width, dtype=dtype) if extras else None
    residual = empty(m, n, dtype=dtype) if extras else None
    x, weight = empty(m, k, dtype=dtype), empty(width, k, dtype=dtype)
    linear.forward(x, weight, bias, residual, activation, gated, extras)


def partial_sum(m, n, k):
    out = empty(m, n, dtype=FP32)
    linear.partial_sum(empty(m, k, dtype=BF16), empty(n, k, dtype=BF16), empty(n, dtype=BF16), out)


def input_gradient(m, n, k, activation=None, gated=False):
    pre = empty(m, 2 * k if gated else k, dtype=BF16) if activation else None
    dz, weight = empty(m, n, dtype=BF16), empty(n, k, dtype=BF16)
    linear.input_gradient(dz, weight, pre, activation, gated)


def weight_gradient(m, n, k, bias=True, dtype=BF16, buffer=FP32):
    dbias = empty(n, dtype=buffer) if bias else None
    dz, x = empty(m, n, dtype=dtype), empty(m, k, dtype=dtype)
    linear.add_weight_gradient(dz, x, empty(n, k, dtype=buffer), dbias)


def activation_gradient(m, n, gated):
    pre = empty(m, 2 * n if gated else n, dtype=BF16)
    linear.activation_gradient(empty(m, n, dtype=BF16), pre, "gelu", gated)


# M, N, K of each shape class, and one whose rows nothing can load 16 bytes of at once.
LARGE, MEDIUM, SMALL = (8192, 4096, 4096), (2048, 1024, 4096), (64, 512, 4096)
RAGGED = (8191, 4095, 4097)
CASES = {
    "forward, bare": partial(forward, *LARGE, extras=False),
    "forward, gelu": partial(forward, *LARGE, "gelu"),
    "forward, gelu, medium": partial(forward, *MEDIUM, "gelu"),
    "forward, gelu, small": partial(forward, *SMALL, "gelu"),
    "forward, gelu, ragged": partial(forward, *RAGGED, "gelu"),
    "forward, gelu, tf32": partial(forward, *LARGE, "gelu", dtype=FP32),
    "forward, gelu, fp32": partial(forward, *LARGE, "gelu", dtype=FP32),
    "forward, swiglu": partial(forward, *LARGE, "silu", gated=True),
    "forward, swiglu, ragged": partial(forward, *RAGGED, "silu", gated=True),
    "partial sum": partial(partial_sum, *LARGE),
    "input gradient": partial(input_gradient, *LARGE),
    "input gradient, gelu": partial(input_gradient, *LARGE, "gelu"),
    "input gradient, swiglu": partial(input_gradient, *LARGE, "silu", gated=True),
    "weight gradient": partial(weight_gradient, *LARGE),
    "weight gradient, medium": partial(weight_gradient, 4096, 2048, 1024),
    "weight gradient, 16-bit buffer": partial(weight_gradient, *LARGE, buffer=BF16),
    "weight gradient, tf32": partial(weight_gradient, *LARGE, dtype=FP32),
    "weight gradient, ragged": partial(weight_gradient, *RAGGED),
    "activation gradient": partial(activation_gradient, 8192, 4096, gated=False),
    "activation gradient, swiglu": partial(activation_gradient, 8192, 4096, gated=True),
}


@contextmanager
def aimed_at(target, tf32):
    """The launchers choose as on this target, and their launches are caught in the list given."""
    caught = []

    def catch(kernel, programs, device, **arguments):
        caught.append((kernel, arguments))

    with (
        mock.patch.object(configs, "target", lambda device: target),
        mock.patch.object(configs, "processors", lambda device: PROCESSORS[target]),
        mock.patch.object(launch, "run", catch),
        mock.patch.object(linear, "tf32_for", lambda dtype: tf32),
    ):
        yield caught


def compiled(kernel, target, num_warps, num_stages=3, **arguments):
    """Compile a caught launch, its arguments specialised as Triton does at a launch."""
    constants, signature, hints = {}, {}, {}
    for index, parameter in enumerate(kernel.params):
        name, value = parameter.name, arguments[parameter.name]
        if isinstance(value, torch.Tensor):
            signature[name], value = POINTERS[value.dtype], value.data_ptr()
        elif parameter.is_constexpr or value is None or value == 1:
            signature[name], constants[name] = "constexpr", value
            continue
        else:
            signature[name] = "i32" if value < 2**31 else "i64"
        if value % 16 == 0:
            hints[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=hints)
    capability = int(target.removeprefix("sm_"))
    options = {"num_warps": num_warps, "num_stages": num_stages}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def facts(binary):
    """What the compiler made: registers, spills, shared memory, and which instructions."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary.asm["cubin"])
        file.flush()
        command = [TOOLS / "cuobjdump", "-res-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {
        "registers": int(re.search(r"REG:(\d+)", usage)[1]),
        "spilled bytes": int(re.search(r"STACK:(\d+)", usage)[1]),
        "shared bytes": binary.metadata.shared,
        "uses": [name for name, code in CODE.items() if re.search(code, binary.asm["ptx"])],
    }


def caught_launch(case, target):
    with aimed_at(target, tf32="tf32" in case) as caught:
        CASES[case]()
    ((kernel, arguments),) = caught
    return kernel, arguments


def look(case, target):
    kernel, arguments = caught_launch(case, target)
    return facts(compiled(kernel, target, **arguments))


@pytest.fixture(autouse=True, scope="module")
def cache():
    """Compile anew: what an earlier run left in Triton's cache proves nothing."""
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.dict(os.environ, TRITON_CACHE_DIR=folder),
    ):
        yield


@pytest.mark.parametrize("target", PROCESSORS)
@pytest.mark.parametrize("case", CASES)
def test_compiles_without_spills_and_within_limits(target, case):
    found = look(case, target)
    assert found["spilled bytes"] == 0
    assert found["shared bytes"] <= SHARED_LIMIT[target]
    # Where its resources do not suffice the compiler may leave nothing but a trap.
    assert found["registers"] >= 24
    uses = set(found["uses"])
    if "activation" in case:
        assert not uses
    elif "fp32" in case:  # no tensor cores
        assert uses == {"cp.async"}
    else:
        tensor_cores = {"sm_80": "mma", "sm_90": "wgmma", "sm_100": "tcgen05"}[target]
        assert tensor_cores in uses
        if "ragged" not in case:
            assert ("cp.async" if target == "sm_80" else "TMA loads") in uses
        # A gradient buffer is read and written by pointers.
        plain = target == "sm_80" or "ragged" in case or "weight" in case
        assert ("TMA stores" in uses) != plain
    golden = json.loads(GOLDEN.read_text())
    if golden["triton"] == triton.__version__:
        assert found == golden["kernels"][f"{target}: {case}"]


@pytest.mark.slow
@pytest.mark.skipif(VERSION < (3, 7), reason="Triton 3.6 fails to; tuning passes over it")
def test_specialized_warps_compile_for_sm_90():
    # Which `tune` may find faster: one group of warps loads, two multiply.
    with aimed_at("sm_90", tf32=False) as caught:
        operands = configs.Operands(BF16, tf32=False, dual=False, aligned=True)
        (config, *_) = [c for c in configs.alternatives(CPU, operands) if c.specialize]
        with mock.patch.object(configs, "choose", lambda *arguments: config):
            CASES["forward, gelu"]()
    ((kernel, arguments),) = caught
    binary = compiled(kernel, "sm_90", **arguments)
    assert binary.metadata.num_warps == 12
    assert "setmaxnreg" in binary.asm["ptx"]
    found = facts(binary)
    assert {"wgmma", "TMA loads"} <= set(found["uses"]) and found["spilled bytes"] == 0


@pytest.mark.parametrize("target", PROCESSORS)
def test_every_alternative_of_tuning_is_distinct_and_starts_with_the_table(target):
    with aimed_at(target, tf32=False):
        operands = configs.Operands(BF16, tf32=False, dual=True, aligned=True)
        alternatives = configs.alternatives(CPU, operands)
        assert len(set(alternatives)) == len(alternatives) > 3
        assert configs.choose(8192, 8192, CPU, operands) in alternatives


if __name__ == "__main__":
    os.environ.setdefault("TRITON_CACHE_DIR", tempfile.mkdtemp())
    lines = ",\n".join(
        f'  "{target}: {case}": {json.dumps(look(case, target))}'
        for target in PROCESSORS
        for case in CASES
    )
    GOLDEN.write_text(f'{{\n "triton": "{triton.__version__}",\n "kernels": {{\n{lines}\n }}\n}}\n')
