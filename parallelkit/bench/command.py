"""`parallelkit bench NAME`: one of the benchmarks of this package."""

from __future__ import annotations

import argparse
import importlib

from ..cli import require

__all__ = ["add_arguments", "run"]

# Each module has add_arguments(parser) and run(arguments) -> exit status.
BENCHMARKS = {
    "collectives": (
        "parallelkit.bench.collectives",
        "the weighted mean against Gloo and the floor",
    ),
    "optimizer": (
        "parallelkit.bench.optimizer",
        "a whole optimizer step against Gloo and the floor",
    ),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The benchmarks as subcommands."""
    choices = parser.add_subparsers(dest="benchmark", metavar="name", required=True)
    for name, (module, text) in BENCHMARKS.items():
        importlib.import_module(module).add_arguments(
            choices.add_parser(name, help=text, description=text)
        )


def run(arguments: argparse.Namespace) -> int:
    """Run the chosen one; its exit status."""
    require("train", "tqdm", *(["matplotlib"] if getattr(arguments, "plot", None) else []))
    status: int = importlib.import_module(BENCHMARKS[arguments.benchmark][0]).run(arguments)
    return status
