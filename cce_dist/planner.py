"""From shapes and a memory budget to the method and the sizes of its work. Nothing here looks at free memory."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from .kernels.config import TILE_V, Tiles
from .kernels.rows import ROW_GROUP
from .kernels.runtime import cdiv, round_up

STATISTICS_BYTES = 32 << 20
# a panel of so many columns reads and writes the fp32 gradient of the hidden states rarely enough, the other still
# fills the device
PANEL_COLUMNS, NARROW_COLUMNS = 8192, 2048
# what a tile's epilogue costs, in columns of its reduction
EPILOGUE = 384
# of one token, beside its rows of D: ids, order, statistics, losses, upstream gradient and their temporaries
TOKEN_BYTES = 112
# the classifier's gradient in fp32 is read and written once a chunk: what that costs, in tokens of a product
CHUNK_TOKENS = 160
METHODS = ("recompute", "cached", "fused")


@dataclass(frozen=True)
class Problem:
    """What a plan depends on. ``vocab``: rows of the classifier on one rank; ``device``: its multiprocessors."""

    tokens: int
    hidden: int
    vocab: int
    itemsize: int
    tiles: Tiles
    device: int
    hidden_grad: bool = True
    weight_grad: bool = True
    # whether one number comes back for all tokens: gradients can then be made before it comes
    scalar: bool = True
    # whether exponentials can wait for their normaliser: fp16 has not the range
    wide_range: bool = True


@dataclass(frozen=True)
class Plan:
    """How a call is computed. Bytes; ``workspace`` excludes the inputs' gradients, ``peak`` includes them."""

    method: str
    # columns of a panel that is computed again, of such a panel in memory where the classifier's gradient comes last
    # (0: none), columns whose exponentials are kept, tokens of a chunk
    panel: int
    wide: int
    kept: int
    chunk: int
    # matrix products of 2NVD operations, and about how many the time amounts to
    products: float
    cost: float
    workspace: int
    peak: int


def token_chunk(num_columns: int, tile_v: int) -> int:
    """Rows whose tiles' statistics (8 bytes a tile and row) fit ``STATISTICS_BYTES``, in multiples of 1024."""
    return max(1024, STATISTICS_BYTES // (8 * max(1, cdiv(num_columns, tile_v))) // 1024 * 1024)


# the search takes the host a while, and every step of a training run asks the same
@functools.lru_cache(maxsize=256)
def panel_width(n: int, d: int, num_columns: int, most: int, tiles: Tiles, multiprocessors: int) -> int:
    """Columns of a gradient panel of ``n`` rows: ``most`` at most, a multiple of ``TILE_V``, and of the widths up to
    a quarter below that the one whose three products fill whole rounds of the multiprocessors best."""
    n, num_columns = max(1, n), max(1, num_columns)
    goal = max(1, min(most // TILE_V, cdiv(num_columns, TILE_V)))

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


def default_budget(problem: Problem) -> int:
    """Half a GiB and, for each token, six times its hidden state in 16 bits: with 2048 wide hidden states and 128,256
    classes at most 1.2 GB for 4,096 tokens, gradients included, and 3.1 GB for 65,536."""
    return (512 << 20) + 12 * problem.tokens * problem.hidden


@functools.lru_cache(maxsize=256)
def make_plan(problem: Problem, budget: int | None, smallest: bool, method: str | None) -> Plan:
    """The fastest plan within ``budget`` bytes of workspace, or the ``smallest``; of ``method`` where it is given.

    Raises ``ValueError`` where nothing fits ``budget``, and says the least that would. ``budget`` None stands for
    the default, which always fits.
    """
    p = problem
    limit = default_budget(p) if budget is None else budget
    candidates = [plan for plan in _candidates(p, limit) if method in (None, plan.method)]
    least = min(candidates, key=lambda plan: plan.workspace)
    if smallest:
        return least
    fitting = [plan for plan in candidates if plan.workspace <= limit]
    if not fitting:
        if budget is None:
            return least
        raise ValueError(
            f"memory_budget: nothing fits {budget} bytes of workspace; "
            f"{least.method} needs {least.workspace}, the least{'' if method is None else ' of this method'}"
        )
    fastest = min(plan.cost for plan in fitting)
    # a hundredth of the time is not worth gigabytes
    return min((plan for plan in fitting if plan.cost <= 1.01 * fastest), key=lambda plan: plan.workspace)


def _candidates(p: Problem, limit: int) -> list[Plan]:
    found = [_recompute(p, most) for most in (NARROW_COLUMNS, PANEL_COLUMNS)]
    if p.wide_range:
        whole = round_up(max(1, p.vocab), TILE_V)
        # the memory of a kept column is known: as many as fit, and one step of a tile at least
        for most in (NARROW_COLUMNS, PANEL_COLUMNS):
            none = _cached(p, TILE_V, most)
            a_column = max(1, round_up(p.tokens, ROW_GROUP) * p.itemsize)
            fits = TILE_V + max(0, limit - none.workspace) // a_column // TILE_V * TILE_V
            found += [_cached(p, kept, most) for kept in {TILE_V, min(fits, whole)}]
        found.append(_cached(p, whole, NARROW_COLUMNS))
    if p.wide_range and p.scalar:
        found += [_fused(p, chunk) for chunk in (*range(1024, min(p.tokens, 1 << 16), 1024), p.tokens)]
    return found


def _recompute(p: Problem, most: int) -> Plan:
    rows = round_up(p.tokens, ROW_GROUP)
    width = panel_width(p.tokens, p.hidden, p.vocab, most, p.tiles, p.device)
    panel = rows * min(width, round_up(max(1, p.vocab), TILE_V)) * p.itemsize
    # narrow panels touch the fp32 gradient of the hidden states often
    slow = 0.02 * (PANEL_COLUMNS / width - 1)
    wide, tail = 0, 1.0
    if most < PANEL_COLUMNS and p.weight_grad:
        wide = panel_width(p.tokens, p.hidden, p.vocab, PANEL_COLUMNS, p.tiles, p.device)
        tail = rows * wide / (p.hidden * max(1, p.vocab))
        wide, tail = (wide, tail) if tail < 1 else (0, 1.0)
    return _plan(p, "recompute", width, 0, p.tokens, 4, 4 + slow * tail, _packed(p) + panel + 4 * p.vocab, wide=wide)


def _cached(p: Problem, kept: int, most: int) -> Plan:
    rows = round_up(p.tokens, ROW_GROUP)
    kept = min(kept, p.vocab)
    width = panel_width(p.tokens, p.hidden, max(1, p.vocab - kept), most, p.tiles, p.device)
    panel = rows * min(width, round_up(p.vocab - kept, TILE_V)) * p.itemsize
    sums = 4 * p.vocab + rows * p.hidden * _wide(p) if p.weight_grad else 0
    again = 1 - kept / max(1, p.vocab)
    held = _packed(p) + rows * kept * p.itemsize + panel + sums
    return _plan(p, "cached", width, kept, p.tokens, 3 + again, 3 + again, held)


def _fused(p: Problem, chunk: int) -> Plan:
    # whole groups of packed rows: one chunk then takes all of them, and no chunk's products have other bits
    chunk = round_up(max(1, min(chunk, p.tokens)), ROW_GROUP)
    several = chunk < p.tokens
    panel = chunk * p.vocab * p.itemsize
    sums = 4 * p.vocab + chunk * p.hidden * _wide(p) if p.weight_grad else 0
    low = 2 * p.vocab * p.hidden if several and p.itemsize == 2 and p.weight_grad else 0
    cost = 3 + (CHUNK_TOKENS / chunk if several else 0)
    # a last chunk of few tokens reads the classifier for little
    cost += 0.5 * (-p.tokens % chunk) / max(1, p.tokens) if several else 0
    # for a second backward, which computes as recompute does
    width = panel_width(p.tokens, p.hidden, p.vocab, NARROW_COLUMNS, p.tiles, p.device)
    return _plan(p, "fused", width, 0, chunk, 3, cost, _packed(p) + panel + sums + low)


def _wide(p: Problem) -> int:
    return max(4, p.itemsize)


def _packed(p: Problem) -> int:
    """The packed hidden states and their gradient before its last rounding."""
    wide = _wide(p) if p.hidden_grad else 0
    return round_up(p.tokens, ROW_GROUP) * p.hidden * (p.itemsize + wide)


def _plan(
    p: Problem, method: str, panel: int, kept: int, chunk: int, products: float, cost: float, held: int, wide: int = 0
) -> Plan:
    gradients = p.itemsize * p.hidden * (p.tokens * p.hidden_grad + p.vocab * p.weight_grad)
    rows = round_up(p.tokens, ROW_GROUP)
    classifier = p.itemsize * p.hidden * p.vocab * p.weight_grad
    # the packed hidden states make way for the gradient of the hidden states
    unpacking = (rows * _wide(p) + p.tokens * p.itemsize) * p.hidden if p.hidden_grad else 0
    peak = classifier + max(held, unpacking) + TOKEN_BYTES * rows
    return Plan(method, panel, wide, kept, chunk, products, cost, max(0, peak - gradients), peak)
