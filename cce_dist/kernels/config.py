"""Tile shapes for each chip. Fixed, so that two runs and two ranks never differ."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

# columns of the tiles that the torch twins reduce. every BLOCK_V below divides it, so vocabulary shards whose bounds
# are multiples of it meet tile bounds on every device
TILE_V = 256
# elements that the twins' elementwise passes take at once: few calls, and still within a cache
PASS = 1 << 20


def pass_tiles(rows: int) -> int:
    """How many tiles of ``rows`` rows a twin's elementwise passes take at once."""
    return max(1, PASS // (TILE_V * max(1, rows)))


@dataclass(frozen=True)
class Tiles:
    """``BLOCK_N`` token rows by ``BLOCK_V`` columns a program, reduced ``BLOCK_D`` at a time."""

    BLOCK_N: int
    BLOCK_V: int
    BLOCK_D: int
    num_warps: int
    num_stages: int
    # row blocks that walk the vocabulary together, so that their tiles of C stay in the L2 cache
    GROUP_N: int = 8

    @property
    def shape(self) -> dict[str, int]:
        return {k: getattr(self, k) for k in ("BLOCK_N", "BLOCK_V", "BLOCK_D", "GROUP_N")}


# launch/tune.py compares candidates: what they take on any chip, how fast they are on the one at hand
_HALF = {
    # three stages of 48 KiB and half of the epilogue's tile, 64 where that is fp32: 209 of 227 KiB of shared memory.
    # the widest tile whose sums eight warps hold, so the fewest operands a product
    "sm_90": Tiles(128, 256, 64, num_warps=8, num_stages=3),
    # a tile twice as wide, as on sm_90, spills 200 bytes a thread in its epilogues. 161 of 227 KiB; not measured
    "sm_100": Tiles(128, 128, 64, num_warps=8, num_stages=4),
    # no copy engine frees registers: a tile twice as wide takes all 255 and spills in the weight's product. four
    # stages, since loads are far from the tensor cores: 128 of 163 KiB; not measured
    "sm_80": Tiles(128, 128, 64, num_warps=8, num_stages=4),
    # sm_80's tile within 99 KiB: three short steps on their way rather than two long ones, 64 KiB; not measured
    "sm_86": Tiles(128, 128, 32, num_warps=8, num_stages=3),
    # sm_80's tile within 64 KiB: two stages, 48 KiB. wavefronts of 64: eight have twice the lanes; not measured
    "gfx942": Tiles(128, 128, 64, num_warps=8, num_stages=2),
    # the interpreter: small, so that ragged edges and several tiles cost little
    "cpu": Tiles(32, 64, 32, num_warps=4, num_stages=1, GROUP_N=2),
}
_SAME = {
    # 99 KiB of shared memory and sm_80's kind of tensor cores as well, sm_120's copy engine notwithstanding
    "sm_89": "sm_86",
    "sm_120": "sm_86",
    # the same multiprocessor but for its narrower formats
    "sm_103": "sm_100",
    # the same wavefronts and at least as much shared memory
    "gfx950": "gfx942",
    "gfx90a": "gfx942",
}
# multiprocessors of the usual part of each chip, to plan without one
MULTIPROCESSORS = {
    "sm_80": 108,  # A100
    "sm_86": 84,  # A40, RTX A6000
    "sm_89": 142,  # L40S, RTX 6000 Ada
    "sm_90": 132,  # H100, H200
    "sm_100": 148,  # B200
    "sm_103": 148,  # B300
    "sm_120": 188,  # RTX PRO 6000 Blackwell
    "gfx90a": 104,  # MI210
    "gfx942": 304,  # MI300X
    "gfx950": 256,  # MI355X
}
# full-precision products run on the plain arithmetic units, on every chip: a tile that fits their registers
_SINGLE = Tiles(64, 64, 32, num_warps=4, num_stages=2)


def tiles_for(target: str, dtype: torch.dtype, aligned: bool = True) -> Tiles:
    """The tile shape for operands of ``dtype`` on the chip ``target`` (see :func:`runtime.target_of`).

    ``aligned`` says that the copy engine fetches them, where the chip has one.
    """
    if target == "cpu":
        return _HALF["cpu"]
    if dtype == torch.float32:
        return _SINGLE
    if not aligned and target in ("sm_90", "sm_100", "sm_103"):
        # addresses of single elements take the registers that a wide tile needs
        return _HALF["sm_80"]
    if not aligned and _SAME.get(target, target) == "gfx942":
        # two stages of single elements' addresses take 80 of 64 KiB
        return replace(_HALF["gfx942"], num_stages=1)
    # an unknown chip gets the shape that asks least
    return _HALF.get(_SAME.get(target, target), _HALF["sm_86"])
