"""The command `parallelkit`. A subcommand's module is imported only when it is called.

Exit status: 0 good, 1 failed, 2 wrong use, 130 stopped by Ctrl-C.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import sys
from collections.abc import Callable, Sequence

from . import __version__
from .errors import InvalidArgumentError, ParallelKitError, UsageError

# Each module has add_arguments(parser) and run(arguments) -> exit status.
SUBCOMMANDS = {
    # name: (module, help)
    "bench": ("parallelkit.bench.command", "time what this package does against its rivals"),
    "doctor": ("parallelkit.doctor", "what was built, and what ranks on this machine can do"),
    "train": ("parallelkit.train.command", "train a small GPT on several ranks and check it"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line argv, by default this process's own, and return its exit status."""
    argv = sys.argv[1:] if argv is None else argv
    chosen = next((word for word in argv if word in SUBCOMMANDS), None)
    parser = argparse.ArgumentParser("parallelkit", description=__doc__.partition("\n\n")[2])
    parser.add_argument("--version", action="version", version=f"parallelkit {__version__}")
    choices = parser.add_subparsers(dest="subcommand", metavar="command", required=True)
    for name, (_, text) in SUBCOMMANDS.items():
        choices.add_parser(name, help=text, description=text)
    if chosen is not None:
        module = importlib.import_module(SUBCOMMANDS[chosen][0])
        module.add_arguments(choices.choices[chosen])
    arguments = parser.parse_args(argv)
    return exit_status(arguments.subcommand, lambda: module.run(arguments))


def require(extra: str, *packages: str) -> None:
    """Raise UsageError where one of these packages, which `extra` brings, is not installed."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(
            f"needs {' and '.join(missing)}; pip install 'parallelkit[{extra}]' brings them"
        )


def positive(kind: Callable[[str], float]) -> Callable[[str], float]:
    """A type of argparse: numbers above 0, read by kind."""

    def read(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = 0
        if not 0 < value < float("inf"):
            word = "whole number" if kind is int else "number"
            raise argparse.ArgumentTypeError(f"must be a {word} above 0, got {text!r}")
        return value

    return read


def exit_status(subcommand: str, call: Callable[[], int]) -> int:
    """What call returns, or the status its error stands for, the error in a sentence on stderr."""
    try:
        return call()
    except ParallelKitError as error:
        sys.stderr.write(f"parallelkit {subcommand}: {error}\n")
        return 2 if isinstance(error, InvalidArgumentError) else 1
    except KeyboardInterrupt:
        sys.stderr.write(f"\nparallelkit {subcommand}: stopped by Ctrl-C\n")
        return 130
