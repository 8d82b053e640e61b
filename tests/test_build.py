"""What a build contains, and what is left of parallelkit where a part of it cannot be built.

Trees are built by the calls that pip makes, and installed by unpacking the wheel.
"""

from __future__ import annotations

import email
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LEFT_OUT = "is left out"  # setup.py's warning
FALLBACK = "runs without its native extension"  # the warning of parallelkit/ops.py

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nothing is compiled")


def environment(**changes: str) -> dict[str, str]:
    """This process's environment without what steers a build or a run, then the changes."""
    steering = ("CUDA_HOME", "CXX", "LDFLAGS", "PARALLELKIT_", "PK_", "PYTHON")
    return {n: value for n, value in os.environ.items() if not n.startswith(steering)} | changes


def execute(command: list[str | Path], cwd: Path, **changes: str) -> tuple[int, str]:
    """Exit status and output of a command."""
    done = subprocess.run(
        command,
        cwd=cwd,
        env=environment(**changes),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
    )
    return done.returncode, done.stdout


def build(tree: Path, kind: str = "wheel", **changes: str) -> tuple[Path | None, str]:
    """The wheel or sdist of a tree, None where the build failed, and what the build said."""
    folder = Path(tempfile.mkdtemp(dir=tree.parent))
    code = f"from setuptools import build_meta; build_meta.build_{kind}({str(folder)!r})"
    status, output = execute([sys.executable, "-c", code], tree, **changes)
    return (next(folder.iterdir()) if status == 0 else None), output


def install(wheel: Path | None, folder: Path) -> Path:
    """Unpack a wheel; returns where."""
    assert wheel is not None, "nothing was built"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    # An editable installation would lend what this one lacks.
    (folder / "sitecustomize.py").write_text(
        "import sys\n"
        "finders = [f for f in sys.meta_path if getattr(f, '__name__', '') != '_EditableFinder']\n"
        "sys.meta_path[:] = finders\n"
    )
    return folder


def run(installed: Path, code: str, **changes: str) -> tuple[int, str]:
    """Run code with an installed parallelkit, not this repository's."""
    return execute([sys.executable, "-c", code], installed, PYTHONPATH=str(installed), **changes)


def compiled(installed: Path) -> list[str]:
    """The native extensions of an installation."""
    return sorted(path.name.split(".")[0] for path in installed.glob("parallelkit/*.so"))


@pytest.fixture(scope="session")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of this repository with its compiled objects, so that little is compiled again."""
    tree = tmp_path_factory.mktemp("sources") / "parallelkit"
    unwanted = (".git", ".venv", ".*_cache", "__pycache__", "*.egg-info", "*.so", "dist", "lib.*")
    shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(*unwanted))
    return tree


@pytest.fixture(scope="session")
def wheel(sources: Path) -> Path:
    """This repository's wheel."""
    built, output = build(sources, PK_CPU="1", PK_CUDA="0")
    assert built is not None, output
    return built


@pytest.fixture
def installed(wheel: Path, tmp_path: Path) -> Path:
    """This repository's wheel, installed."""
    return install(wheel, tmp_path / "installed")


@pytest.fixture
def small(sources: Path, tmp_path: Path) -> Path:
    """A tree whose native code is next to nothing and says itself how it wants to be compiled."""
    tree = tmp_path / "small"
    unwanted = shutil.ignore_patterns("build", "csrc", "dist", "*.egg-info", "examples", "tests")
    shutil.copytree(sources, tree, ignore=unwanted)
    (tree / "csrc/cpu").mkdir(parents=True)
    (tree / "csrc/answer.h").write_text("inline int answer = 41;\n")
    (tree / "csrc/cpu/module.cpp").write_text(
        """
        #include <Python.h>
        #include "answer.h"
        #if defined(__AVX2__) || defined(__AVX512F__) || __cplusplus < 202002L
        #error "compiled for the wrong processor or language"
        #endif
        #ifdef PK_X86_DISPATCH
        int from_avx2();
        int from_avx512();
        int lanes = from_avx2() + from_avx512();
        #else
        int lanes = 0;
        #endif
        static PyModuleDef module = {PyModuleDef_HEAD_INIT, "_cpu"};
        PyMODINIT_FUNC PyInit__cpu() {
          PyObject* made = PyModule_Create(&module);
          PyModule_AddIntConstant(made, "answer", answer);
          PyModule_AddIntConstant(made, "lanes", lanes);
          return made;
        }
        """
    )
    (tree / "csrc/cpu/lanes_avx2.cpp").write_text("int from_avx2() { return 8 * __AVX2__; }\n")
    (tree / "csrc/cpu/lanes_avx512.cpp").write_text(
        "int from_avx512() { return 16 * __AVX512F__; }\n"
    )
    return tree


# ---- what is in the packages


def test_wheel_has_parallelkit_alone_at_its_top_level(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        tops = {name.split("/")[0] for name in archive.namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"parallelkit"}


def test_wheel_has_every_module_and_the_kernels_and_the_extension(
    sources: Path, installed: Path
) -> None:
    modules = [p for p in (sources / "parallelkit").rglob("*") if p.suffix in {".py", ".pyi"}]
    wanted = {path.relative_to(sources) for path in modules} | {Path("parallelkit/py.typed")}
    wanted |= {Path("parallelkit/kernels", path.name) for path in sources.glob("kernels/*.py")}
    assert Path("parallelkit/kernels/__init__.py") in wanted
    assert {path for path in wanted if not (installed / path).exists()} == set()
    assert compiled(installed) == ["_cpu"]


def test_metadata_asks_for_torch_and_nothing_heavy(installed: Path) -> None:
    metadata = email.message_from_string(
        next(installed.glob("*.dist-info/METADATA")).read_text(encoding="utf-8")
    )
    always = [need for need in metadata.get_all("Requires-Dist", []) if "extra ==" not in need]
    assert always == ["torch>=2.10"]
    assert metadata["Requires-Python"] == ">=3.10"


def test_version_is_that_of_pyproject(installed: Path) -> None:
    version = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.M)
    assert version is not None
    status, output = run(installed, "import parallelkit; print(parallelkit.__version__)")
    assert (status, output.strip()) == (0, version[1])


def test_sdist_has_all_that_a_build_needs(sources: Path) -> None:
    sdist, output = build(sources, "sdist")
    assert sdist is not None, output
    with tarfile.open(sdist) as archive:
        found = {Path(*Path(name).parts[1:]) for name in archive.getnames()}
    needed = [sources / name for name in ("setup.py", "pyproject.toml", "LICENSE")]
    for folder, pattern in [("csrc", "*.*"), ("kernels", "*.py"), ("parallelkit", "*.py")]:
        needed += (sources / folder).rglob(pattern)
    assert {path.relative_to(sources) for path in needed} - found == set()


@pytest.mark.slow
def test_sdist_installs_in_isolation_where_there_is_no_torch(sources: Path, tmp_path: Path) -> None:
    sdist, output = build(sources, "sdist")
    assert sdist is not None, output
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv/bin/python"
    status, output = execute(
        [python, "-m", "pip", "install", "--no-deps", sdist],
        tmp_path,
        CXXFLAGS="-O0",  # quicker to compile
        PIP_CACHE_DIR=str(tmp_path / "cache"),  # there may be no home to have it in
        PK_CPU="1",
        PK_CUDA="0",
    )
    assert status == 0, output
    code = """if True:
        import importlib.util
        import parallelkit, parallelkit._cpu
        assert importlib.util.find_spec("torch") is None
        """
    assert execute([python, "-c", code], tmp_path) == (0, "")
    status, output = execute([tmp_path / "venv/bin/parallelkit", "--help"], tmp_path)
    assert status == 0 and "doctor" in output, output


# ---- how native code is compiled


def test_only_what_changed_is_compiled_again(small: Path) -> None:
    _, output = build(small)
    assert output.count("] compile csrc/cpu/") == 3, output
    _, output = build(small)
    assert "compile csrc" not in output
    (small / "csrc/answer.h").write_text("inline int answer = 42;\n")
    wheel, output = build(small)
    assert re.findall(r"\] compile csrc/cpu/(\w+)", output) == ["module"]
    installed = install(wheel, small.parent / "installed")
    code = "import parallelkit._cpu as cpu; print(cpu.answer)"
    assert run(installed, code) == (0, "42\n")


@pytest.mark.skipif(platform.machine() != "x86_64", reason="compiles for x86-64")
@pytest.mark.parametrize(("target", "lanes"), [("linux-x86_64", 24), ("linux-aarch64", 0)])
def test_x86_sources_are_compiled_for_x86_alone(small: Path, target: str, lanes: int) -> None:
    wheel, output = build(small, _PYTHON_HOST_PLATFORM=target)
    assert LEFT_OUT not in output, output
    assert output.count("] compile ") == (3 if lanes else 1)
    installed = install(wheel, small.parent / "installed")
    assert run(installed, "import parallelkit._cpu as cpu; print(cpu.lanes)") == (0, f"{lanes}\n")


SLOW_COMPILER = """#!/bin/sh
mkdir "$ONE" 2>/dev/null || echo "two at once" >> "$LOG"
sleep 0.2
g++ "$@"
status=$?
rmdir "$ONE"
exit $status
"""


def test_two_builds_at_once_take_turns(small: Path, tmp_path: Path) -> None:
    """Ninja's log of what was made of what does not survive two writers."""
    compiler, log = tmp_path / "compiler", tmp_path / "log"
    compiler.write_text(SLOW_COMPILER)
    compiler.chmod(0o755)
    changes = {"CXX": str(compiler), "ONE": str(tmp_path / "one"), "LOG": str(log)}
    builds = [
        subprocess.Popen(
            [sys.executable, "setup.py", "build_ext", "--build-lib", str(tmp_path / str(number))],
            cwd=small,
            env=environment(MAX_JOBS="1", PK_CPU="1", **changes),
            stdout=subprocess.DEVNULL,
        )
        for number in range(2)
    ]
    assert [process.wait(60) for process in builds] == [0, 0]
    assert not log.exists()
    for number in range(2):
        assert len(list((tmp_path / str(number)).glob("parallelkit/_cpu*.so"))) == 1


# ---- what is left where native code cannot be built or loaded

FAILING_COMPILERS = {
    "not on the path": {"PATH": str(Path(sys.executable).parent)},
    "CXX names nothing": {"CXX": "/nonexistent/g++"},
    "fails": {"CXX": "false"},
}


@pytest.mark.parametrize("fault", FAILING_COMPILERS)
def test_without_a_compiler_the_package_installs_with_one_warning(small: Path, fault: str) -> None:
    build(small)  # what this compiles must not get into the next wheel
    wheel, output = build(small, **FAILING_COMPILERS[fault])
    assert output.count(LEFT_OUT) == 1, output
    assert "Traceback" not in output
    assert compiled(install(wheel, small.parent / "installed")) == []


@pytest.mark.parametrize("fault", FAILING_COMPILERS)
def test_a_required_extension_that_cannot_be_built_is_an_error(small: Path, fault: str) -> None:
    wheel, output = build(small, PK_CPU="1", **FAILING_COMPILERS[fault])
    assert wheel is None
    assert "parallelkit._cpu cannot be built" in output


def test_on_other_systems_one_sentence_says_that_nothing_is_compiled(small: Path) -> None:
    wheel, output = build(small, PK_CPU="1", _PYTHON_HOST_PLATFORM="macosx-14.0-arm64")
    assert output.count("no native code for macosx-14.0-arm64") == 1, output
    assert wheel is not None and wheel.name.endswith("-py3-none-any.whl")


def break_extension(installed: Path, fault: str) -> None:
    """Put in place of the CPU extension what a failed or an old installation may leave."""
    library = next(installed.glob("parallelkit/_cpu.*.so"))
    library.unlink()
    if fault == "empty":
        library.touch()
    elif fault == "garbage":
        library.write_bytes(b"\x7fELF" + b"\xff" * 4096)
    elif fault == "undefined symbol":
        source = installed / "undefined.cpp"
        source.write_text('int absent(); extern "C" int PyInit__cpu() { return absent(); }')
        subprocess.run(["g++", "-shared", "-fPIC", source, "-o", library], check=True)
    elif fault == "older sources":
        (installed / "parallelkit/_cpu.py").write_text("interface = -1\n")


@pytest.mark.parametrize(
    "fault", ["missing", "empty", "garbage", "undefined symbol", "older sources"]
)
def test_an_extension_that_does_not_load_costs_one_warning(installed: Path, fault: str) -> None:
    break_extension(installed, fault)
    code = """if True:
        import parallelkit as pk, torch
        assert pk.__file__.startswith(%r), pk.__file__
        x = torch.tensor([1.5, 2.5])
        print(pk.weighted_all_reduce_(x, weight=3).item(), x.tolist())
        """
    status, output = run(installed, code % str(installed))
    assert status == 0, output
    assert output.count(FALLBACK) == 1 and "Traceback" not in output, output
    assert output.endswith("3.0 [1.5, 2.5]\n")


def test_two_ranks_average_without_an_extension(installed: Path) -> None:
    break_extension(installed, "missing")
    (installed / "average.py").write_text(
        "import parallelkit as pk, torch\n"
        "def average(group):\n"
        "    gradient = torch.full((7,), (1.0, 5.0)[group.rank])\n"
        "    total = pk.weighted_all_reduce_(gradient, (1, 3)[group.rank], group)\n"
        "    return gradient.tolist(), total.item()\n"
    )
    code = "import average, parallelkit as pk; print(pk.testing.run_ranks(average.average, 2))"
    status, output = run(installed, code)
    assert status == 0 and FALLBACK in output, output
    assert output.splitlines()[-1] == str([([4.0] * 7, 4.0)] * 2)


@pytest.fixture
def nvcc(small: Path) -> Path:
    """A CUDA source in the tree, and the CUDA_HOME of an nvcc too old for it, which keeps a log."""
    (small / "csrc/cuda").mkdir()
    (small / "csrc/cuda/module.cu").touch()
    program = small.parent / "cuda/bin/nvcc"
    program.parent.mkdir(parents=True)
    program.write_text(
        "#!/bin/sh\n"
        'echo "$@" >> "$(dirname "$0")/log"\n'
        "echo \"nvcc fatal   : Value 'c++20' is not defined for option 'std'\"; exit 1\n"
    )
    program.chmod(0o755)
    return program


def test_an_nvcc_that_fails_costs_one_warning_and_leaves_the_cpu_part(
    small: Path, nvcc: Path
) -> None:
    wheel, output = build(small, CUDA_HOME=str(nvcc.parents[1]), PK_CUDA_ARCHS="75;89")
    assert output.count(LEFT_OUT) == 1 and "parallelkit._cuda" in output, output
    assert compiled(install(wheel, small.parent / "installed")) == ["_cpu"]
    arguments = (nvcc.parent / "log").read_text().split()
    assert [a.partition("=")[2] for a in arguments if a.startswith("-gencode")] == [
        "arch=compute_75,code=sm_75",
        "arch=compute_89,code=sm_89",
        "arch=compute_89,code=compute_89",
    ]


def test_cuda_can_be_required_or_switched_off(small: Path, nvcc: Path) -> None:
    wheel, output = build(small, CUDA_HOME=str(nvcc.parents[1]), PK_CUDA="0")
    assert wheel is not None and LEFT_OUT not in output
    wheel, output = build(small, CUDA_HOME=str(nvcc.parents[1]), PK_CUDA="1")
    assert wheel is None and "parallelkit._cuda cannot be built" in output
    wheel, output = build(small, CUDA_HOME="/nonexistent", PK_CUDA="1")
    assert wheel is None and "set CUDA_HOME" in output


# ---- what is left where Triton or a GPU is missing


def test_without_triton_every_public_name_loads(installed: Path) -> None:
    code = """if True:
        import sys
        sys.modules["triton"] = None  # any import of it raises ImportError
        import parallelkit as pk
        for name in pk.__all__:
            getattr(pk, name)
        """
    assert run(installed, code) == (0, "")


def test_without_a_gpu_every_kernel_loads(installed: Path) -> None:
    code = """if True:
        import importlib, pkgutil
        import parallelkit.kernels as kernels
        for module in pkgutil.iter_modules(kernels.__path__, "parallelkit.kernels."):
            importlib.import_module(module.name)
        print(sum(1 for _ in pkgutil.iter_modules(kernels.__path__)) > 0)
        """
    assert run(installed, code, CUDA_VISIBLE_DEVICES="") == (0, "True\n")


# ---- the page about environment variables


def test_each_environment_variable_is_documented_and_each_documented_one_is_read() -> None:
    code = [ROOT / "setup.py"]
    for folder in ("csrc", "kernels", "parallelkit"):
        code += [p for p in (ROOT / folder).rglob("*") if p.suffix in {".py", ".cpp", ".h", ".cu"}]
    pattern = r"(PARALLELKIT_[A-Z_]+|PK_[A-Z_]+)"
    read = set(re.findall(f'"{pattern}"', "".join(path.read_text() for path in code)))
    page = (ROOT / "docs/environment.md").read_text()
    assert read == set(re.findall(f"^\\| `{pattern}`", page, re.M))
