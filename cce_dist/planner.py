"""From shapes to the sizes of the work: how wide a panel is and how many tokens a chunk of statistics holds."""

from __future__ import annotations

from .kernels.config import TILE_V, Tiles
from .kernels.runtime import cdiv

PANEL_BYTES = 128 << 20
STATISTICS_BYTES = 32 << 20


def token_chunk(num_columns: int, tile_v: int) -> int:
    """Rows whose tiles' statistics (8 bytes a tile and row) fit ``STATISTICS_BYTES``, in multiples of 1024."""
    return max(1024, STATISTICS_BYTES // (8 * max(1, cdiv(num_columns, tile_v))) // 1024 * 1024)


def panel_width(num_rows: int, num_columns: int, itemsize: int, tiles: Tiles, multiprocessors: int) -> int:
    """Columns of a gradient panel of about ``PANEL_BYTES``, a multiple of ``TILE_V``.

    At least 2048 columns, since each panel reads and writes the fp32 gradient of the hidden states once; among the
    widths near the goal, the one whose tiles come nearest to filling whole rounds of the multiprocessors.
    """
    goal = max(2048, PANEL_BYTES // (max(1, num_rows) * itemsize)) // TILE_V
    goal = min(goal, cdiv(max(1, num_columns), TILE_V), 128)
    num_n = cdiv(max(1, num_rows), tiles.BLOCK_N)

    def waste(blocks: int) -> float:
        work = num_n * blocks * TILE_V / tiles.BLOCK_V
        panels = cdiv(max(1, num_columns), blocks * TILE_V)
        return panels * cdiv(int(work), multiprocessors)

    # the fewest rounds in all; of equals the narrowest
    return min(range(max(1, goal * 3 // 4), goal + 1), key=lambda blocks: (waste(blocks), blocks)) * TILE_V
