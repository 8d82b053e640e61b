"""The command line: exit status, messages, and the processes that `train` starts."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import parallelkit
from parallelkit.cli import SUBCOMMANDS, exit_status, main
from parallelkit.errors import InvalidArgumentError, PeerLostError

PARALLELKIT = [sys.executable, "-m", "parallelkit"]
TORCHRUN = [
    *(sys.executable, "-m", "torch.distributed.run", "--nnodes=1"),
    *("--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--nproc-per-node=2"),
]
LONG = 60  # seconds after which something hangs, on a busy machine too
QUICK = ["--steps=2", "--batch=4", "--device=cpu"]


def plain_environment() -> dict[str, str]:
    """This process's environment without what torchrun would set, and one thread a rank."""
    kept = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    return kept | {"OMP_NUM_THREADS": "1"}


def start(*command: str) -> subprocess.Popen[str]:
    """A command in a process group of its own, as a terminal starts one."""
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=plain_environment(),
        start_new_session=True,
    )


def run(*command: str) -> tuple[int, str]:
    """A command's exit status and all it printed; it leaves no process behind."""
    process = start(*command)
    try:
        output, _ = process.communicate(timeout=100)
    finally:
        assert_none_left(process.pid)
    return process.returncode, output


def processes_of(session: int) -> list[int]:
    """The processes of a session that still run."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, its_session = stat.read_text().rpartition(")")[2].split()[:4]
        except OSError:  # it has just ended
            continue
        if int(its_session) == session and state != "Z":
            found.append(int(stat.parent.name))
    return found


def assert_none_left(session: int) -> None:
    """All processes of a session are gone, or will be in a moment."""
    end = time.monotonic() + LONG
    while (left := processes_of(session)) and time.monotonic() < end:
        time.sleep(0.05)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left


# --- without ranks


def test_help_names_every_subcommand_and_needs_no_torch(capsys):
    program = (
        "import sys; from parallelkit.cli import main\n"
        "for words in (['--help'], ['train', '--help']):\n"
        "    try: main(words)\n"
        "    except SystemExit as end: assert end.code == 0\n"
        "assert not {'torch', 'numpy', 'matplotlib'} & set(sys.modules)\n"
    )
    shown = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    ).stdout
    for name in SUBCOMMANDS:
        assert re.search(rf"^\s+{name}\s", shown, re.MULTILINE)


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["trian"],
        ["train", "--nproc", "0"],
        ["train", "--nproc", "-1"],
        ["train", "--nproc", "two"],
        ["train", "--steps", "1.5"],
        ["train", "--save-every", "0"],
        ["train", "--lr", "nan"],
        ["train", "--device", "tpu"],
        ["bench", "collectives", "--nproc", "0"],
        ["bench", "collectives", "--rounds", "0"],
        ["bench", "collectives", "--sizes", "4K,5K"],
        ["bench", "optimizer", "--nproc", "0"],
        ["bench", "optimizer", "--numel", "-1"],
    ],
)
def test_wrong_words_end_with_status_2(words, capsys):
    with pytest.raises(SystemExit) as end:
        main(words)
    assert end.value.code == 2
    assert "error:" in capsys.readouterr().err


def test_version_is_that_of_the_package(capsys):
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out == f"parallelkit {parallelkit.__version__}\n"


@pytest.mark.parametrize(
    ("missing", "words"),
    [
        ("tqdm", ["bench", "optimizer"]),
        ("tqdm", ["train"]),
        ("matplotlib", ["bench", "collectives", "--plot", "picture.png"]),
    ],
)
def test_a_package_that_is_missing_is_named_before_anything_is_measured(
    missing, words, capsys, monkeypatch
):
    monkeypatch.setitem(sys.modules, missing, None)  # an import of it fails
    monkeypatch.setattr("parallelkit.testing.run_ranks", None)
    assert main(words) == 1
    told = capsys.readouterr().err
    assert told == (
        f"parallelkit {words[0]}: needs {missing}; pip install 'parallelkit[train]' brings them\n"
    )


@pytest.mark.parametrize("file", ["nowhere/picture.png", ".png", "picture.docx", ""])
def test_a_picture_that_cannot_be_written_is_refused_before_anything_is_measured(
    file, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr("parallelkit.testing.run_ranks", None)
    (tmp_path / ".png").mkdir()
    with pytest.raises(SystemExit) as end:
        main(["bench", "collectives", "--plot", str(tmp_path / file)])
    assert end.value.code == 2
    assert "argument --plot: must" in capsys.readouterr().err


def raising(error: BaseException):
    def call() -> int:
        raise error

    return call


@pytest.mark.parametrize(
    ("call", "status"),
    [
        (lambda: 0, 0),
        (lambda: 1, 1),
        (raising(PeerLostError("rank 1 died", 1)), 1),
        (raising(InvalidArgumentError("--data is missing")), 2),
        (raising(KeyboardInterrupt()), 130),
    ],
)
def test_exit_status_tells_failure_from_wrong_use(call, status, capsys):
    assert exit_status("train", call) == status
    assert capsys.readouterr().err.count("\n") <= 2


@pytest.mark.parametrize(
    ("content", "options", "complaint"),
    [
        (None, [], "does not exist"),
        (b"", [], "is empty"),
        (b"one line of text\n", [], "a paragraph for each of the 2 ranks, got 1"),
        (b"\x7fELF\0\0", [], "must be UTF-8 text"),
        (b"a\n\nb\n\nc\n", ["--nproc=4"], "each of the 4 ranks, got 3"),
        (b"a\n\nb\n\nc\n", ["--nproc=3", "--batch=2"], "--batch must give each of the 3 ranks"),
    ],
)
def test_bad_input_is_refused_before_a_rank_starts(
    tmp_path, capsys, monkeypatch, content, options, complaint
):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr("parallelkit.train.launch.start_ranks", None)
    file = tmp_path / "input"
    if content is not None:
        file.write_bytes(content)
    assert main(["train", f"--data={file}", f"--out={tmp_path}", *options]) == 2
    assert re.fullmatch(f"parallelkit train: .*{complaint}.*\n", capsys.readouterr().err)


def test_nproc_under_torchrun_is_refused(capsys, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    assert main(["train", "--nproc=2"]) == 2
    assert "--nproc-per-node" in capsys.readouterr().err


# --- with ranks


@pytest.mark.slow
@pytest.mark.parametrize("nproc", [1, 3])
def test_train_checks_itself_against_one_process(tmp_path, nproc):
    readme = Path(__file__).parents[1] / "README.md"
    status, output = run(
        *PARALLELKIT, "train", f"--data={readme}", f"--nproc={nproc}", f"--out={tmp_path}", *QUICK
    )
    assert status == 0, output
    assert len(re.findall(r"^ok ", output, re.MULTILINE)) == 2
    numbers = json.loads((tmp_path / "train.json").read_text())
    assert len(set(numbers["digests"])) == 1 and len(numbers["digests"]) == nproc
    assert all(0 < row["error"] <= row["bound"] for row in numbers["checks"])
    assert (tmp_path / "train.png").stat().st_size > 10_000


def test_torchrun_ranks_join(tmp_path):
    status, output = run(*TORCHRUN, "-m", "parallelkit", "train", f"--out={tmp_path}", *QUICK)
    assert status == 0, output
    assert json.loads((tmp_path / "train.json").read_text())["size"] == 2


def test_bad_input_is_told_on_every_torchrun_rank(tmp_path):
    status, output = run(*TORCHRUN, "-m", "parallelkit", "train", f"--data={tmp_path}/no", *QUICK)
    assert status != 0
    assert output.count(f"{tmp_path}/no does not exist") == 2, output


def start_long_run(tmp_path: Path) -> subprocess.Popen[str]:
    """A run that trains by the time this returns and would go on for hours."""
    process = start(
        *PARALLELKIT, "train", f"--out={tmp_path}", "--batch=4", "--steps=100000", "--device=cpu"
    )
    assert process.stdout is not None
    assert process.stdout.readline().startswith("Training ")
    return process


def test_ctrl_c_ends_all_ranks_at_once_without_a_traceback(tmp_path):
    process = start_long_run(tmp_path)
    os.killpg(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=LONG)
    assert process.returncode == 130
    assert output.strip() == "parallelkit train: stopped by Ctrl-C"
    assert_none_left(process.pid)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_ends_the_others_and_is_named(tmp_path, rank):
    process = start_long_run(tmp_path)
    spawned = [
        pid
        for pid in sorted(processes_of(process.pid))  # ranks start in order
        if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
    assert len(spawned) == 2
    os.kill(spawned[rank], signal.SIGKILL)
    output, _ = process.communicate(timeout=LONG)
    assert process.returncode == 1
    assert f"rank {rank} of 2 was killed by SIGKILL" in output
    assert "Traceback" not in output
    assert_none_left(process.pid)


def test_ranks_die_with_a_killed_parent(tmp_path):
    process = start_long_run(tmp_path)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate(timeout=LONG)  # returns when the last holder of the pipe is gone
    assert_none_left(process.pid)
