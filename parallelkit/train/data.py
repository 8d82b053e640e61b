"""Text for the demonstration: files -> pieces -> global batches -> a rank's micro-batches.

A piece is a paragraph, cut where it is longer than the context. Pieces keep their true length, so
the ranks of a step hold different numbers of tokens: what a plain mean of means gets wrong.
"""

from __future__ import annotations

import codecs
import random
import re
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ..errors import InvalidArgumentError
from .model import IGNORED, START

CONTEXT = 256  # bytes of the longest piece
TEXT_BYTES = 16 << 20  # that are read, however many steps there are: a run can be prolonged


@dataclass(frozen=True)
class MicroBatch:
    """Pieces that pass through the model together, padded to the longest of them."""

    inputs: Tensor  # [pieces, longest] int64
    targets: Tensor  # [pieces, longest] int64, IGNORED beyond a piece's end
    tokens: int  # targets that count


def read_pieces(path: Path | None, *, enough: int, seed: int) -> list[bytes]:
    """The pieces of a text file, or of the text files below a folder.

    Args:
        path: a file or a folder; None is the Python standard library's own sources.
        enough: bytes after which reading stops.
        seed: draws the order in which the files of a folder are read.
    Raises:
        InvalidArgumentError: there is nothing at path, or nothing in it that reads as text.
    """
    files = find_files(path)
    random.Random(seed).shuffle(files)
    pieces: list[bytes] = []
    for file in files:
        try:
            text = read_text(file, enough)
        except InvalidArgumentError:
            if len(files) == 1:
                raise
            continue  # a folder may hold pictures beside its text
        pieces += split(text)
        enough -= len(text)
        if enough <= 0:
            break
    if not pieces:
        raise InvalidArgumentError(
            f"--data {path} must hold text, got {len(files)} files without any; "
            "name a UTF-8 text file or a folder with some"
        )
    return pieces


def find_files(path: Path | None) -> list[Path]:
    """The file at path, or all below it but hidden ones, sorted: every machine sees one order."""
    if path is None:
        path = Path(sysconfig.get_path("stdlib"))
        found = [f for f in path.rglob("*.py") if "site-packages" not in f.parts]
    elif path.is_dir():
        found = [
            f
            for f in path.rglob("*")
            if f.is_file() and not any(part.startswith(".") for part in f.relative_to(path).parts)
        ]
    elif path.exists():
        found = [path]
    else:
        raise InvalidArgumentError(
            f"--data {path} does not exist; name a text file or a folder of text files, "
            "or leave --data out to read the Python standard library's sources"
        )
    return sorted(found)


def read_text(file: Path, limit: int) -> bytes:
    """The first bytes of a file, at most limit, if they are UTF-8 text."""
    try:
        with file.open("rb") as opened:
            text = opened.read(limit)
    except OSError as error:
        raise InvalidArgumentError(f"--data {file}: {error.strerror}") from None
    if not text.strip():
        raise InvalidArgumentError(f"--data {file} is empty; name a file with some text")
    try:
        codecs.getincrementaldecoder("utf-8")().decode(text)  # the limit may cut a character
        bad = text.find(b"\0")
    except UnicodeDecodeError as error:
        bad = error.start
    if bad >= 0:
        raise InvalidArgumentError(
            f"--data {file} must be UTF-8 text, got byte {text[bad]:#04x} at offset {bad}; "
            "convert it (iconv -t UTF-8) or name another file"
        )
    return text


def split(text: bytes) -> list[bytes]:
    """Paragraphs, without the blank lines between them, in pieces of at most CONTEXT bytes."""
    paragraphs = [p for p in re.split(rb"\n\s*\n", text) if p.strip()]
    return [p[i : i + CONTEXT] for p in paragraphs for i in range(0, len(p), CONTEXT)]


def global_batches(
    pieces: Sequence[bytes], size: int, steps: int, seed: int
) -> Iterator[list[bytes]]:
    """For each step size pieces, drawn at random; none comes again before all have come."""
    rng = random.Random(seed)
    left: list[bytes] = []
    for _ in range(steps):
        while len(left) < size:
            left += rng.sample(pieces, len(pieces))
        yield left[:size]
        left = left[size:]


def micro_batches(pieces: Sequence[bytes], limit: int, device: torch.device) -> list[MicroBatch]:
    """Pack pieces, similar lengths together, into micro-batches of at most limit tokens, padded.

    A piece longer than limit travels alone. Ranks whose pieces are longer get more micro-batches.
    """
    packed: list[list[bytes]] = []
    for piece in sorted(pieces, key=len, reverse=True):
        if packed and (len(packed[-1]) + 1) * len(packed[-1][0]) <= limit:
            packed[-1].append(piece)
        else:
            packed.append([piece])
    return [pad(pack, device) for pack in packed]


def pad(pieces: Sequence[bytes], device: torch.device) -> MicroBatch:
    """One micro-batch of the pieces: START and the bytes to predict the bytes."""
    shape = (len(pieces), max(map(len, pieces)))
    inputs = torch.full(shape, START)
    targets = torch.full(shape, IGNORED)
    for row, piece in enumerate(pieces):
        tokens = torch.tensor(list(piece))
        targets[row, : len(piece)] = tokens
        inputs[row, 1 : len(piece)] = tokens[:-1]
    return MicroBatch(inputs.to(device), targets.to(device), sum(map(len, pieces)))
