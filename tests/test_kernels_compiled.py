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
PROCESSORS = {"sm_80": 108, "sm_90": 132, "sm_100": 148}
# What one program may have, by the CUDA programming guide; 99 KB is sm_86's and sm_89's, which
# read sm_80's row of the table too.
SHARED_LIMIT = {"sm_80": 99 * 1024, "sm_90": 227 * 1024, "sm_100": 227 * 1024}
POINTERS = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"}

pytestmark = pytest.mark.skipif(
    not isinstance(launch._add_kernel, JITFunction),
    reason="TRITON_INTERPRET=1 leaves nothing to compile",
)


def empty(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype)  # never written, so it costs no memory


def forward(m, n, k, activation=None, gated=False, dtype=torch.bfloat16, out=None, extras=True):
    width = 2 * n if gated else n
    return lambda: linear.forward(
        empty(m, k, dtype=dtype),
        empty(width, k, dtype=dtype),
        empty(width, dtype=dtype) if extras else None,
        empty(m, n, dtype=dtype) if extras else None,
        empty(m, n, dtype=out or dtype),
        empty(m, width, dtype=dtype) if extras else None,
        activation,
        gated,
    )


def input_gradient(m, n, k, activation=None, gated=False, dtype=torch.bfloat16):
    width = 2 * k if gated else k
    pre = empty(m, width, dtype=dtype) if activation else None
    return lambda: linear.input_gradient(
        empty(m, n, dtype=dtype),
        empty(n, k, dtype=dtype),
        pre,
        empty(m, width, dtype=dtype),
        activation,
        gated,
    )


def weight_gradient(m, n, k, bias=True, dtype=torch.bfloat16, out=torch.float32):
    return lambda: linear.weight_gradient(
        empty(m, n, dtype=dtype),
        empty(m, k, dtype=dtype),
        empty(n, k, dtype=out),
        empty(n, dtype=out) if bias else None,
        True,
    )


def activation_gradient(m, n, gated):
    width = 2 * n if gated else n
    return lambda: linear.activation_gradient(
        empty(m, n), empty(m, width), empty(m, width), "gelu", gated
    )


BIG, MIDDLE, LITTLE = (8192, 4096, 4096), (2048, 1024, 4096), (64, 512, 4096)
CASES = {
    "forward": forward(*BIG, extras=False),
    "forward middle": forward(*MIDDLE, extras=False),
    "forward little": forward(*LITTLE, extras=False),
    "forward gelu": forward(*BIG, "gelu"),
    "forward gelu middle": forward(*MIDDLE, "gelu"),
    "forward gelu little": forward(*LITTLE, "gelu"),
    "forward swiglu": forward(*BIG, "silu", gated=True),
    "forward partial sum": forward(*BIG, extras=False, out=torch.float32),
    "forward ragged": forward(8191, 4095, 4097, "gelu"),
    "forward ragged swiglu": forward(8191, 4095, 4097, "silu", gated=True),
    "input gradient ragged gelu": input_gradient(8191, 4095, 4097, "gelu"),
    "weight gradient ragged": weight_gradient(8191, 4095, 4097),
    "weight gradient ragged fp32": weight_gradient(8191, 4095, 4097, dtype=torch.float32),
    "forward tf32 swiglu": forward(*BIG, "silu", gated=True, dtype=torch.float32),
    "forward tf32": forward(*BIG, "gelu", dtype=torch.float32),
    "input gradient": input_gradient(*BIG),
    "input gradient gelu": input_gradient(*BIG, "gelu"),
    "input gradient swiglu": input_gradient(*BIG, "silu", gated=True),
    "weight gradient": weight_gradient(*BIG),
    "weight gradient middle": weight_gradient(4096, 2048, 1024),
    "weight gradient bf16 buffer": weight_gradient(*BIG, bias=False, out=torch.bfloat16),
    "weight gradient tf32": weight_gradient(*BIG, dtype=torch.float32),
    "activation gradient": activation_gradient(8192, 4096, gated=False),
    "activation gradient swiglu": activation_gradient(8192, 4096, gated=True),
    "forward fp32": forward(*BIG, "gelu", dtype=torch.float32),
    "weight gradient fp32": weight_gradient(*BIG, dtype=torch.float32),
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
    ptx = binary.asm["ptx"]
    return {
        "registers": int(re.search(r"REG:(\d+)", usage)[1]),
        "spilled bytes": int(re.search(r"STACK:(\d+)", usage)[1]),
        "shared bytes": binary.metadata.shared,
        "wgmma": "wgmma.mma_async" in ptx,
        "tcgen05": "tcgen05.mma" in ptx,
        "mma": "mma.sync" in ptx,
        "TMA loads": "cp.async.bulk.tensor.2d.shared" in ptx,
        "TMA stores": "cp.async.bulk.tensor.2d.global" in ptx,
        "cp.async": bool(re.search(r"cp\.async\.c[ag]\.", ptx)),
    }


def look(case, target):
    with aimed_at(target, tf32="tf32" in case) as caught:
        CASES[case]()
    ((kernel, arguments),) = caught
    return facts(compiled(kernel, target, **arguments))


if __name__ == "__main__":
    os.environ.setdefault("TRITON_CACHE_DIR", tempfile.mkdtemp())
    table = {f"{target} {case}": look(case, target) for target in PROCESSORS for case in CASES}
    GOLDEN.write_text(json.dumps({"triton": triton.__version__, "kernels": table}, indent=1) + "\n")
