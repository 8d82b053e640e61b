"""Tile sizes of the product, by target and shape class.

One table, and one rule for whatever it does not name. The entries come from what the compiler
reports (no spills, shared memory and registers within limits; tests/kernels_golden.json) and from
the sizes that published Triton products use on these chips. They have not been timed on a GPU.
"""

import dataclasses
import functools

import torch


@dataclasses.dataclass(frozen=True)
class Config:
    """How one launch of the product is cut up."""

    block_i: int
    block_j: int
    block_l: int
    warps: int
    stages: int  # loads in flight
    parts: int = 1  # of the epilogue
    group: int = 8  # rows of tiles that are walked together
    descriptors: bool = False  # TMA, where the tensors allow it
    flatten: bool = False  # one pipeline over the tiles of a program, not one per tile
    specialize: bool = False  # warps that only load beside warps that only multiply


@dataclasses.dataclass(frozen=True)
class Operands:
    """What a configuration depends on beside the size of the result."""

    dtype: torch.dtype
    tf32: bool  # fp32 operands may be rounded to tf32
    dual: bool  # two results at once, as in gated layers
    aligned: bool  # rows start at multiples of 16 bytes


# For two-byte operands; `choose` derives the rest.
TABLE: dict[str, tuple[Config, Config, Config]] = {
    "sm_80": (
        Config(128, 128, 32, warps=8, stages=4, parts=2),
        Config(128, 64, 32, warps=4, stages=4),
        Config(64, 64, 64, warps=4, stages=4),
    ),
    "sm_90": (
        Config(128, 256, 64, warps=8, stages=3, parts=2, descriptors=True, flatten=True),
        Config(128, 128, 64, warps=8, stages=4, descriptors=True, flatten=True),
        Config(64, 128, 64, warps=4, stages=4, descriptors=True, flatten=True),
    ),
    "sm_100": (
        Config(128, 256, 64, warps=8, stages=3, parts=2, descriptors=True),
        Config(128, 128, 64, warps=8, stages=4, descriptors=True, flatten=True),
        Config(64, 128, 64, warps=4, stages=4, descriptors=True, flatten=True),
    ),
    # The interpreter's time goes by tiles, not by elements.
    "interpreter": (
        Config(128, 128, 128, warps=4, stages=1),
        Config(128, 128, 128, warps=4, stages=1),
        Config(64, 64, 128, warps=4, stages=1),
    ),
}


@functools.cache
def _gpu(index: int | None) -> tuple[str, int]:
    properties = torch.cuda.get_device_properties(index)
    # Descriptors are TMA on sm_90 and sm_100 only, and only these have the shared memory for
    # their rows of the table; every other chip takes the plain pointers of sm_80.
    target = {9: "sm_90", 10: "sm_100"}.get(properties.major, "sm_80")
    return target, properties.multi_processor_count


def target(device: torch.device) -> str:
    """Which row of the table a device reads."""
    return "interpreter" if device.type == "cpu" else _gpu(device.index)[0]


def processors(device: torch.device) -> int:
    """How many programs run at once: streaming multiprocessors, or 1 for the interpreter."""
    return 1 if device.type == "cpu" else _gpu(device.index)[1]


def programs(config: Config, I: int, J: int, device: torch.device) -> int:
    """How many programs one product starts: one for each processor, or one for each tile."""
    tiles = count_tiles(config, I, J)
    persistent = config.flatten or config.specialize
    return min(tiles, processors(device)) if persistent else tiles


def count_tiles(config: Config, I: int, J: int) -> int:
    """Tiles of an [I, J] result."""
    return -(-I // config.block_i) * -(-J // config.block_j)


def choose(I: int, J: int, device: torch.device, operands: Operands) -> Config:
    """The table's entry for an [I, J] result, adapted to the operands.

    The largest tiles that still give every processor one; the smallest where none do.
    """
    row = [adapt(config, operands) for config in TABLE[target(device)]]
    filling = (config for config in row if count_tiles(config, I, J) >= processors(device))
    return next(filling, row[-1])


def adapt(config: Config, operands: Operands) -> Config:
    """An entry of the table, which is for aligned two-byte operands, made to fit others."""
    j, l = config.block_j, config.block_l
    if operands.dtype == torch.float32:
        # The same bytes in flight; the epilogue's tiles double, so the result's tile halves.
        j, l = j // 2, l // 2
    if operands.dual:
        j //= 2  # two sums of half the width take the registers of one
    config = dataclasses.replace(config, block_j=j, block_l=l)
    scalar = operands.dtype == torch.float32 and not operands.tf32
    if not operands.aligned or scalar:
        # Element by element, pointers fill the registers; without tensor cores, operands do.
        return dataclasses.replace(
            config, block_i=64, block_j=32 if operands.dual else 64, block_l=16 if scalar else 32,
            warps=8, stages=3, parts=2, descriptors=False,
        )  # fmt: skip
    return config


def alternatives(device: torch.device, operands: Operands) -> list[Config]:
    """What is worth measuring: the table's entries and their neighbours."""
    row = [adapt(config, operands) for config in TABLE[target(device)]]
    deeper = [dataclasses.replace(config, stages=config.stages + 1) for config in row]
    apart = [dataclasses.replace(config, flatten=not config.flatten) for config in row]
    # Warps that load take the place of a flat pipeline; of those that multiply Triton wants 4.
    specialized = [
        dataclasses.replace(config, flatten=False, specialize=True, warps=4)
        for config in row
        if config.descriptors
    ]
    return list(dict.fromkeys([*row, *deeper, *apart, *specialized]))
