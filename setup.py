"""Build parallelkit: its Python packages and, on Linux, its native extensions.

    parallelkit._cpu    csrc/cpu/*.cpp           always
    parallelkit._cuda   csrc/cuda/*.cu, *.cpp    where nvcc is found

Neither includes or links anything of torch. An extension that cannot be built costs one warning,
not the installation: without it parallelkit computes through plain PyTorch. Ninja compiles only
what changed, headers included; objects stay under build/. docs/environment.md lists the variables.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext

PLATFORM = sysconfig.get_platform()  # linux-x86_64, linux-aarch64, macosx-14.0-arm64, ...
X86_64 = PLATFORM == "linux-x86_64"
SANITIZE = os.environ.get("PK_SANITIZE", "")  # for -fsanitize=: address, undefined, thread

# Results are rounded where the source says so and nowhere else, hence no contraction into fma.
OPTIMIZE = f"-O1 -g -fno-omit-frame-pointer -fsanitize={SANITIZE}" if SANITIZE else "-O3"
CXX_FLAGS = f"-std=c++20 {OPTIMIZE} -ffp-contract=off -fPIC -fvisibility=hidden -pthread"
LINK_FLAGS = f"-shared -pthread {f'-fsanitize={SANITIZE}' if SANITIZE else '-s'}"
HOST_FLAGS = "-Xcompiler=-fPIC,-fvisibility=hidden -Xfatbin=-compress-all"
NVCC_FLAGS = f"-std=c++20 -O3 -fmad=false {HOST_FLAGS}"

# Sources by the ending of their names that need these instructions; the others choose at start.
X86_FLAGS = {
    "_avx2": "-mavx2 -mfma -mf16c",
    "_avx512": "-mavx512f -mavx512bw -mavx512dq -mavx512vl -mfma -mf16c",
}


def source_flags(source: str) -> str | None:
    """The flags of one source beside those of all; None where it is for another processor."""
    for ending, flags in X86_FLAGS.items():
        if Path(source).stem.endswith(ending):
            return flags if X86_64 else None
    return "-DPK_X86_DISPATCH=1" if X86_64 else ""


def sources(*patterns: str) -> list[str]:
    """The sources for this processor, in an order that does not depend on the file system."""
    found = sorted(str(path) for pattern in patterns for path in Path("csrc").glob(pattern))
    return [source for source in found if source_flags(source) is not None]


def find_compiler(name: str) -> str | None:
    """The command that compiles the extension of this name, None where there is no such program."""
    if name == "_cuda":
        home = os.environ.get("CUDA_HOME")
        return shutil.which("nvcc", path=f"{home}/bin" if home else None)
    commands = [os.environ["CXX"]] if "CXX" in os.environ else ["g++", "clang++"]
    return next((command for command in commands if shutil.which(shlex.split(command)[0])), None)


def extensions() -> list[Extension]:
    """What is worth trying here; the compilers have the last word."""
    if not PLATFORM.startswith("linux"):
        sys.stderr.write(f"parallelkit: no native code for {PLATFORM}; plain PyTorch is used\n")
        return []
    found = [Extension("parallelkit._cpu", sources("cpu/*.cpp"))]
    cuda = os.environ.get("PK_CUDA")
    if sources("cuda/*.cu") and cuda != "0" and (cuda == "1" or find_compiler("_cuda")):
        found.append(Extension("parallelkit._cuda", sources("cuda/*.cu", "cuda/*.cpp")))
    return found


def write_ninja_file(folder: Path, name: str, files: list[str], compiler: str) -> None:
    """Tell ninja how to make an object of each source, and of them folder/<name>.so.

    The project's own paths are relative, so a copy of the tree need not be compiled anew.
    """
    import pybind11
    from ninja.ninja_syntax import Writer, escape

    include_paths = ["csrc", sysconfig.get_path("include"), pybind11.get_include()]
    includes = escape(shlex.join(f"-I{path}" for path in include_paths))
    if name == "_cuda":
        archs = os.environ.get("PK_CUDA_ARCHS", "80;90;100").split(";")
        targets = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in archs]
        targets.append(f"-gencode=arch=compute_{archs[-1]},code=compute_{archs[-1]}")  # newer GPUs
        compile_flags = f"{NVCC_FLAGS} -DPK_CUDA_ARCHS={'_'.join(archs)} {' '.join(targets)}"
        link_flags = "-shared -cudart=static -Xlinker=-s"
    else:
        compile_flags = f"{CXX_FLAGS} -Wall -Wextra {escape(os.environ.get('CXXFLAGS', ''))}"
        link_flags = f"{LINK_FLAGS} {escape(os.environ.get('LDFLAGS', ''))}"

    with (folder / "build.ninja").open("w") as file:
        ninja = Writer(file)
        ninja.variable("builddir", str(folder))  # of ninja's own log
        command = f"{compiler} -MMD -MF $out.d {compile_flags} {includes} $flags -c $in -o $out"
        ninja.rule("compile", command, "compile $in", "$out.d", deps="gcc")
        ninja.rule("link", f"{compiler} {link_flags} $in -o $out", "link $out")
        objects = [str(folder / f"{Path(source).name}.o") for source in files]
        for source, target in zip(files, objects, strict=True):
            ninja.build(target, "compile", source, variables={"flags": source_flags(source)})
        ninja.build(str(folder / f"{name}.so"), "link", objects)


@contextmanager
def one_at_a_time(path: Path) -> Iterator[None]:
    """Hold the lock of this name, which another build in the same tree may have."""
    import fcntl  # nothing is compiled where there is none

    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


class NinjaBuild(build_ext):
    """Builds each extension with ninja, and does without one that cannot be built."""

    def build_extensions(self) -> None:
        """Compile below build/, then copy to where setuptools wants the library."""
        flavour = "-".join(filter(None, [sys.implementation.cache_tag, PLATFORM, SANITIZE]))
        built = []
        for extension in self.extensions:
            name = extension.name.removeprefix("parallelkit.")
            folder = Path("build", "ninja", flavour, name)
            target = Path(self.get_ext_fullpath(extension.name))
            problem = self.compile(folder, name, extension.sources, target)
            if problem is None:
                built.append(extension)
            elif os.environ.get("PK_CUDA" if name == "_cuda" else "PK_CPU") == "1":
                raise SystemExit(f"parallelkit: {extension.name} cannot be built: {problem}")
            else:
                self.warn(f"{extension.name} is left out, plain PyTorch does its work: {problem}")
        self.extensions = built

    def compile(self, folder: Path, name: str, files: list[str], target: Path) -> str | None:
        """Make folder/<name>.so and copy it to target; say what stood in the way, or None."""
        compiler = find_compiler(name)
        if compiler is None:
            return "no nvcc, set CUDA_HOME" if name == "_cuda" else "no C++ compiler, install g++"
        folder.mkdir(parents=True, exist_ok=True)
        with one_at_a_time(folder / "lock"):
            write_ninja_file(folder, name, files, compiler)
            jobs = ["-j", os.environ["MAX_JOBS"]] if "MAX_JOBS" in os.environ else []
            ninja = [sys.executable, "-m", "ninja", "-f", str(folder / "build.ninja"), *jobs]
            if subprocess.run(ninja, check=False).returncode != 0:
                return f"{compiler} failed, its messages stand above"
            target.parent.mkdir(parents=True, exist_ok=True)
            self.copy_file(str(folder / f"{name}.so"), str(target))
        return None

    def run(self) -> None:
        """Build, then remove what earlier builds left of extensions that this one did without."""
        super().run()
        built = {Path(self.get_ext_filename(extension.name)) for extension in self.extensions}
        for root in [Path(self.build_lib), *([Path()] if self.inplace else [])]:
            for path in root.glob(f"parallelkit/_*{sysconfig.get_config_var('EXT_SUFFIX')}"):
                if path.relative_to(root) not in built:
                    path.unlink()


setup(
    ext_modules=extensions(),
    cmdclass={"build_ext": NinjaBuild},
    packages=[*find_packages(include=["parallelkit", "parallelkit.*"]), "parallelkit.kernels"],
    package_dir={"parallelkit.kernels": "kernels"},
)
