"""`parallelkit train`: its options, and the way from them to ranks, checks and picture."""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from ..cli import exit_status, positive, require
from ..errors import InvalidArgumentError

if TYPE_CHECKING:
    from .run import Options


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `parallelkit train`."""
    add = parser.add_argument
    add(
        "--data",
        type=Path,
        metavar="PATH",
        help="a text file or a folder of them (default: the Python standard library's sources)",
    )
    add(
        "--nproc",
        type=positive(int),
        metavar="N",
        help="ranks to start on this machine (default: 2); not under torchrun, which starts them",
    )
    add(
        "--tp",
        type=positive(int),
        default=1,
        metavar="N",
        help="ranks that split each layer among them (default: %(default)s)",
    )
    add(
        "--dp",
        type=positive(int),
        metavar="N",
        help="groups of --tp ranks, each with its part of a batch (default: as --nproc says)",
    )
    add("--steps", type=positive(int), default=50, metavar="N", help="(default: %(default)s)")
    add(
        "--batch",
        type=positive(int),
        default=16,
        metavar="N",
        help="pieces of text in a step, over all ranks (default: %(default)s)",
    )
    add(
        "--micro-batch",
        type=positive(int),
        default=2048,
        metavar="TOKENS",
        help="tokens that a rank takes at a time, padding included (default: %(default)s)",
    )
    add("--lr", type=positive(float), default=1e-3, help="of AdamW (default: %(default)s)")
    add("--seed", type=seed_number, default=0, metavar="N", help="(default: %(default)s)")
    add("--device", choices=("cpu", "cuda"), help="(default: cuda where every rank has a GPU)")
    add(
        "--save",
        type=Path,
        metavar="FOLDER",
        help="keep a checkpoint there: every --save-every steps and at the end; it replaces the "
        "one before, which stays whole until then",
    )
    add(
        "--save-every",
        type=positive(int),
        default=10,
        metavar="N",
        help="steps from one checkpoint to the next (default: %(default)s)",
    )
    add(
        "--resume",
        type=Path,
        metavar="FOLDER",
        help="go on from the checkpoint there, exactly, at any --nproc and --tp; if it is also the "
        "folder of --save and empty, start afresh: with both, torchrun --max-restarts goes on "
        "where a rank was lost",
    )
    add(
        "--out",
        type=Path,
        default=Path("build/train"),
        metavar="FOLDER",
        help="where train.png and train.json are written (default: %(default)s)",
    )


def seed_number(text: str) -> int:
    """A type of argparse: what torch.manual_seed takes on every platform."""
    if not text.isdecimal() or int(text) >= 1 << 63:
        raise argparse.ArgumentTypeError(f"must be a whole number from 0 to 2^63 - 1, got {text!r}")
    return int(text)


def run(arguments: argparse.Namespace) -> int:
    """Start the ranks, or be one of those that torchrun started."""
    require("train", "matplotlib", "tqdm")
    # Imported here, so that --help and wrong options need not wait for torch.
    from .launch import start_ranks
    from .run import Options, prepare

    fields = [field.name for field in dataclasses.fields(Options)]
    options = Options(**{name: getattr(arguments, name) for name in fields})
    nproc: int | None = arguments.nproc
    size = ranks_wanted(nproc, arguments.dp, arguments.tp)
    if "RANK" not in os.environ:
        prepare(options, size)  # what is wrong with them shows before any rank starts
        return start_ranks(size, rank_main, options)
    if nproc is not None:
        raise InvalidArgumentError(
            f"--nproc must be left out under torchrun, got {nproc}; "
            "torchrun --nproc-per-node sets the number of ranks"
        )
    return rank_main(options)


def ranks_wanted(nproc: int | None, dp: int | None, tp: int) -> int:
    """How many ranks the options ask for; 2 where none says so."""
    if dp is None:
        return nproc or max(2, tp)
    if nproc not in (None, dp * tp):
        raise InvalidArgumentError(
            f"--nproc must be --dp times --tp, {dp * tp}, got {nproc}; leave it out"
        )
    return dp * tp


def rank_main(options: Options) -> int:
    """One rank's whole run; rank 0 reports, and its status is 1 if a check failed."""
    return exit_status("train", lambda: _rank_main(options))


def _rank_main(options: Options) -> int:
    import torch.distributed as dist

    import parallelkit as pk

    from .picture import draw
    from .report import heading, table, write_json
    from .run import train

    with pk.init(options.device) as group:
        if group.rank == 0:
            sys.stdout.write(f"{heading(options, group)}\n")
            sys.stdout.flush()
        result = train(options, group)
    if dist.is_initialized():
        dist.destroy_process_group()  # without it Gloo may abort the process at its end
    if group.rank > 0:
        return 0
    picture, numbers = options.out / "train.png", options.out / "train.json"
    draw(result, picture)
    write_json(options, result, numbers)
    sys.stdout.write(f"\n{table(result)}\n\nwrote {picture} and {numbers}\n")
    return 0 if result.ok else 1
