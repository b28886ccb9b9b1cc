"""From shapes to the sizes of the work: how wide a panel is and how many tokens a chunk of statistics holds."""

from __future__ import annotations

import functools

from .kernels.config import TILE_V, Tiles
from .kernels.runtime import cdiv

STATISTICS_BYTES = 32 << 20
# a panel of so many columns reads and writes the fp32 gradient of the hidden states rarely enough
PANEL_COLUMNS = 8192
PANEL_BYTES = (192 << 20, 1 << 30)  # at least, at most
# what a tile's epilogue costs, in columns of its reduction
EPILOGUE = 384


def token_chunk(num_columns: int, tile_v: int) -> int:
    """Rows whose tiles' statistics (8 bytes a tile and row) fit ``STATISTICS_BYTES``, in multiples of 1024."""
    return max(1024, STATISTICS_BYTES // (8 * max(1, cdiv(num_columns, tile_v))) // 1024 * 1024)


# the search takes the host a while, and every backward of a training run asks the same
@functools.lru_cache(maxsize=256)
def panel_width(n: int, d: int, num_columns: int, itemsize: int, tiles: Tiles, multiprocessors: int) -> int:
    """Columns of a gradient panel of ``n`` rows, a multiple of ``TILE_V``.

    ``PANEL_COLUMNS`` within ``PANEL_BYTES``, and of the widths up to a quarter below that the one whose three
    products fill whole rounds of the multiprocessors best.
    """
    n, num_columns = max(1, n), max(1, num_columns)
    least, most = PANEL_BYTES
    goal = min(max(PANEL_COLUMNS, least // (n * itemsize)), most // (n * itemsize))
    goal = max(1, min(goal // TILE_V, cdiv(num_columns, TILE_V)))

    def cost(width: int) -> int:
        """Rounds of tiles over all panels, each with the length of its reduction."""
        total = 0
        for v in range(0, num_columns, width):
            w = min(width, num_columns - v)
            for rows, columns, reduction in ((n, w, d), (n, d, w), (w, d, n)):
                num_tiles = cdiv(rows, tiles.BLOCK_N) * cdiv(columns, tiles.BLOCK_V)
                total += cdiv(num_tiles, multiprocessors) * (reduction + EPILOGUE)
        return total

    return min((blocks * TILE_V for blocks in range(max(1, goal * 3 // 4), goal + 1)), key=cost)
