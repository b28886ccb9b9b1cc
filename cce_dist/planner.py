"""From shapes and a memory budget to the method and the sizes of its work. Nothing here looks at free memory."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from .kernels.config import MULTIPROCESSORS, TILE_V, Tiles, tiles_for
from .kernels.rows import ROW_GROUP
from .kernels.runtime import cdiv, multiprocessors, round_up, target_of

STATISTICS_BYTES = 32 << 20
# a panel of so many columns reads and writes the fp32 gradient of the hidden states rarely enough, the other still
# fills the device
PANEL_COLUMNS, NARROW_COLUMNS = 12288, 2048
# a panel of a part of the tokens: long enough for the product over its rows
BLOCK_ROWS, BLOCK_COLUMNS = 14336, 8448
# what a tile's epilogue costs, in columns of its reduction
EPILOGUE = 384
# of one token, beside its rows of D: ids, order, statistics, losses, upstream gradient and their temporaries
TOKEN_BYTES = 112
# the classifier's gradient in fp32 is read and written once a chunk: what that costs, in tokens of a product, by
# docs/performance.md
CHUNK_TOKENS = 720
# likewise of panels half of PANEL_COLUMNS wide, in products
NARROW_COST = 0.11
# the classifier's gradient lends its memory in slabs of so many columns
SLAB_COLUMNS = 2048
# features that the product of kept columns takes at once, at least
PART_FEATURES = 512
# what a piece of that product costs beside the product, in multiplications
PIECE_COST = 1e10
# tokens of the smallest chunk. on CPUs products of 256 tokens are as fast as longer ones and their panel is near the
# caches; a chunk costs little but for the widening of 16 bits
SMALLEST_CHUNK, CPU_CHUNK, CPU_CHUNK_TOKENS, CPU_CHUNK_TOKENS_16 = 1024, 256, 10, 60
METHODS = ("recompute", "cached", "fused")
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
REDUCTIONS = ("mean", "sum", "none")


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
    cpu: bool = False
    # whether exponentials can wait for their normaliser: fp16 has not the range
    wide_range: bool = True
    # and whether the options let them: see :func:`check_choice`
    keeps: bool = True
    # whether the classifier's gradient grows in memory that is there
    main_grad: bool = False
    # bytes of a tile's statistics, for each row
    tile_bytes: int = 8
    # tokens of a rank's slice of the hidden states, 0 where it has all of them
    slice: int = 0
    ranks: int = 1


@dataclass(frozen=True)
class Plan:
    """How a call is computed, and what that takes. See :func:`plan`.

    | field | unit | |
    |---|---|---|
    | method | | ``"recompute"``, ``"cached"`` or ``"fused"`` |
    | panel | columns | of a panel that backward computes again, a second backward all of them |
    | rows | tokens | that take turns on such a panel |
    | wide | columns | of such a panel in memory where the classifier's gradient is written last; 0 where none is |
    | kept | columns | whose exponentials are kept from forward to backward, ``lent`` included |
    | lent | columns | of these, kept in memory of the classifier's gradient, which is then made in forward |
    | slab | columns | that such memory holds one beside the other |
    | part | features | of the classifier's gradient that are made at once of kept columns |
    | chunk | tokens | that are computed together |
    | products | | matrix products of 2NVD operations, forward and backward |
    | cost | | about how many products the time amounts to |
    | held | bytes | that wait from forward to backward, numbers of tokens aside |
    | workspace | bytes | beyond the inputs and their gradients: what ``memory_budget`` bounds |
    | peak | bytes | beyond the inputs: workspace and gradients |
    """

    method: str
    panel: int
    rows: int
    wide: int
    kept: int
    lent: int
    slab: int
    part: int
    chunk: int
    products: float
    cost: float
    held: int
    workspace: int
    peak: int


def plan(
    tokens: int,
    hidden_size: int,
    vocab_size: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    tp: int = 1,
    reduction: str = "mean",
    memory_budget: int | str | None = None,
    method: str | None = None,
    hidden_requires_grad: bool = True,
    weight_requires_grad: bool = True,
    main_grad: bool = False,
    sequence_parallel: bool = False,
    device: torch.device | str | None = None,
) -> Plan:
    """The plan that :func:`cce_dist.linear_cross_entropy` makes for a call, without the call: nothing is allocated.

    Args:
        tokens: ``N``, all of them: ``hidden`` is ``[N, hidden_size]``, ignored tokens included.
        hidden_size: ``D``.
        vocab_size: classes of the whole vocabulary, whatever ``tp``: a rank's ``weight`` is about
            ``[vocab_size / tp, hidden_size]``.
        dtype: of ``hidden`` and ``weight``, under autocast what they are cast to.
        tp: ranks that share the vocabulary. Sizes in the plan are those of one rank.
        reduction, memory_budget, method: as in the call. With ``softcap`` and ``label_smoothing`` together a call has
            the method ``"recompute"`` alone.
        hidden_requires_grad, weight_requires_grad: what asks for a gradient. Where neither does, the plan is that of
            a forward alone; the ranks of a group plan as if every weight did.
        main_grad: whether ``weight`` carries an fp32 gradient, which is none of the call's memory.
        sequence_parallel: whether a rank's hidden states are its slice, here of ``tokens / tp``.
        device: a ``torch.device``, its name, or the name of a chip that need not be there: ``"sm_90"`` (then with
            the multiprocessors of its usual part, 132 for an H100 or H200). None: the current GPU, ``"sm_90"`` where
            there is none.

    Returns:
        What is computed how, and the bytes it takes on each rank: ``workspace`` beyond the inputs and their
        gradients, which ``memory_budget`` bounds, and ``peak`` beyond the inputs, gradients included: what the
        allocator gives out at most over forward and backward. A bias and its gradient are not counted.

    Raises:
        ValueError: sizes below 1 (``tokens`` may be 0), an unknown reduction, method or device, ``"fused"`` with
            ``"none"`` or ``main_grad``, float16 with a method that keeps exponentials, a budget that nothing fits.
        TypeError: arguments of the wrong type, a dtype that the loss does not take.
    """
    sizes = ("tokens", tokens, 0), ("hidden_size", hidden_size, 1), ("vocab_size", vocab_size, 1), ("tp", tp, 1)
    for name, value, least in sizes:
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name} must be an int, got {type(value).__name__}")
        if value < least:
            raise ValueError(f"{name} must be at least {least}, got {value}")
    if dtype not in DTYPES:
        raise TypeError(f"dtype must be one of {', '.join(map(str, DTYPES))}, got {dtype!r}")
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction must be one of {', '.join(map(repr, REDUCTIONS))}, got {reduction!r}")
    check_choice(dtype, reduction, memory_budget, method, main_grad)
    return make_plan(
        *plan_request(
            tokens, hidden_size, vocab_size, dtype, ranks=tp, device=device, reduction=reduction,
            memory_budget=memory_budget, method=method, hidden_grad=hidden_requires_grad,
            weight_grad=weight_requires_grad, main_grad=main_grad, sequence_parallel=sequence_parallel,
        )
    )  # fmt: skip


def check_choice(
    dtype: torch.dtype,
    reduction: str,
    memory_budget: int | str | None,
    method: str | None,
    main_grad: bool = False,
    keeps: bool = True,
    fixed_weights: bool = True,
) -> None:
    """Raises where ``memory_budget`` or ``method`` is none that there is for these inputs. ``keeps`` says that kept
    exponentials tell the gradient, ``fixed_weights`` that no gradient is asked of the tokens' weights."""
    if method is not None and method not in METHODS:
        raise ValueError(f"method must be None or one of {', '.join(METHODS)}; got {method!r}")
    if method == "fused" and reduction == "none":
        raise ValueError(
            'method "fused" makes the gradients in forward, before each token\'s upstream gradient is known: '
            'with reduction "none" use "cached" or "recompute"'
        )
    if method == "fused" and main_grad:
        raise ValueError(
            'method "fused" would add to main_grad in forward, before the upstream gradient is known: use "cached"'
        )
    if method in ("cached", "fused") and not keeps:
        raise ValueError(
            f'method "{method}" keeps exponentials, which do not tell the gradient of softcap and label_smoothing '
            'together: use "recompute"'
        )
    if method == "fused" and not fixed_weights:
        raise ValueError(
            'method "fused" makes the gradients in forward, for token weights that are known: of a token_weight that '
            'requires grad use "cached" or "recompute"'
        )
    if method in ("cached", "fused") and dtype == torch.float16:
        raise ValueError(f'method "{method}" keeps exponentials, for which float16 has no range: use "recompute"')
    check_budget(memory_budget)


def check_budget(memory_budget: int | str | None) -> None:
    """Raises where ``memory_budget`` is none."""
    if isinstance(memory_budget, bool) or not (memory_budget is None or isinstance(memory_budget, (int, str))):
        raise TypeError(f'memory_budget must be bytes, "min" or None, got {type(memory_budget).__name__}')
    if isinstance(memory_budget, str) and memory_budget != "min":
        raise ValueError(f'memory_budget must be bytes, "min" or None, got {memory_budget!r}')
    if isinstance(memory_budget, int) and memory_budget < 0:
        raise ValueError(f"memory_budget must not be negative, got {memory_budget}")


def plan_request(
    tokens: int,
    hidden_size: int,
    vocab_size: int,
    dtype: torch.dtype,
    *,
    ranks: int,
    device: torch.device | str | None,
    reduction: str,
    memory_budget: int | str | None,
    method: str | None,
    hidden_grad: bool,
    weight_grad: bool,
    bias_grad: bool = False,
    recorded: bool = True,
    main_grad: bool = False,
    sequence_parallel: bool = False,
    keeps: bool = True,
    fixed_weights: bool = True,
    tile_bytes: int = 8,
) -> tuple[Problem, int | None, bool, str | None]:
    """The arguments of :func:`make_plan` for a call: the same on all ranks, so from nothing that a rank has alone.

    ``recorded`` says whether gradients are recorded at all.
    """
    target, count = chip_of(device)
    problem = Problem(
        tokens=tokens,
        hidden=hidden_size,
        vocab=cdiv(vocab_size, ranks),
        itemsize=dtype.itemsize,
        tiles=tiles_for(target, dtype),
        device=count,
        hidden_grad=hidden_grad,
        weight_grad=ranks > 1 or weight_grad,
        scalar=reduction != "none" and fixed_weights,
        wide_range=dtype != torch.float16,
        cpu=target == "cpu",
        keeps=keeps,
        main_grad=main_grad,
        tile_bytes=tile_bytes,
        slice=cdiv(tokens, ranks) if sequence_parallel else 0,
        ranks=ranks,
    )
    if not recorded or not (ranks > 1 or hidden_grad or weight_grad or bias_grad):
        # one pass over the logits: there is nothing to choose
        return problem, None, True, "recompute"
    return problem, memory_budget if isinstance(memory_budget, int) else None, memory_budget == "min", method


def chip_of(device: torch.device | str | None) -> tuple[str, int]:
    """The chip that a device is or names, and its multiprocessors."""
    if device is None:
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else "sm_90"
    if isinstance(device, str):
        if device in MULTIPROCESSORS:
            return device, MULTIPROCESSORS[device]
        try:
            device = torch.device(device)
        except RuntimeError:
            names = ", ".join(MULTIPROCESSORS)
            raise ValueError(f"device must be a torch.device or one of {names}; got {device!r}") from None
    if not isinstance(device, torch.device):
        raise TypeError(f"device must be a torch.device, a name or None, got {type(device).__name__}")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f'device is {device}, and there is none here: name a chip, such as "sm_90"')
    return target_of(device), multiprocessors(device)


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

    def one(w: int) -> int:
        """The time of a panel of ``w`` columns, in steps of a tile's reduction."""
        # (tiles, their length) of the logits and the two products
        (x, at), (e, of), (c, by) = (
            (cdiv(rows, tiles.BLOCK_N) * cdiv(columns, tiles.BLOCK_V), reduction + EPILOGUE)
            for rows, columns, reduction in ((n, w, d), (n, d, w), (w, d, n))
        )
        # the second product begins on the multiprocessors that the first one's last round leaves idle
        rounds, late = divmod(e, multiprocessors)
        early = multiprocessors - late
        first = rounds * of + cdiv(c, multiprocessors) * by
        last = (rounds + 1) * of + (c // multiprocessors + (c % multiprocessors > early)) * by
        return cdiv(x, multiprocessors) * at + (max(first, last) if late else first)

    def cost(width: int) -> int:
        whole, rest = divmod(num_columns, width)
        return whole * one(width) + (one(rest) if rest else 0)

    return min((blocks * TILE_V for blocks in range(max(1, goal * 3 // 4), goal + 1)), key=cost)


def default_budget(problem: Problem) -> int:
    """Half a GiB and, for each token, six times its hidden state in 16 bits: with 2048 wide hidden states and 128,256
    classes at most 1.2 GB for 4,096 tokens, gradients included, and 3.1 GB for 65,536. On CPUs, whose peer holds the
    logits three times, a quarter of their bytes and the packed rows."""
    if problem.cpu:
        logits = problem.tokens * problem.vocab * problem.itemsize
        return max(64 << 20, logits // 4 + 8 * problem.tokens * problem.hidden)
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
    least = min(candidates, key=lambda plan: (plan.workspace, plan.held, plan.cost))
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
    # a hundredth of the time is not worth gigabytes, nor a twentieth a CPU's caches
    slack = 1.05 if p.cpu else 1.01
    return min((plan for plan in fitting if plan.cost <= slack * fastest), key=lambda plan: plan.workspace)


def _candidates(p: Problem, limit: int) -> list[Plan]:
    found = [_recompute(p, most) for most in (NARROW_COLUMNS, PANEL_COLUMNS)]
    if p.wide_range and p.keeps:
        # the memory of a kept column is known: as many as fit, and one step of a tile at least
        a_column = max(1, round_up(p.tokens, ROW_GROUP) * p.itemsize)
        for lent, part in itertools.product(_lents(p), _parts(p)):
            whole = round_up(max(1, p.vocab - lent), TILE_V)
            least = 0 if lent else TILE_V
            found.append(_cached(p, lent, least, part))
            room = max(0, limit - found[-1].workspace)
            fits = min(least + room // a_column // TILE_V * TILE_V, whole)
            found += [_cached(p, lent, own, part) for own in sorted({fits, whole} - {least})]
    if p.wide_range and p.keeps and p.scalar and not p.main_grad:
        step = CPU_CHUNK if p.cpu else SMALLEST_CHUNK
        found += [_fused(p, chunk) for chunk in (*range(step, min(p.tokens, 1 << 16), step), p.tokens)]
    return found


def _recompute(p: Problem, most: int) -> Plan:
    panels = _panels(p, 0, most)
    taken = _packed(p) + panels.own + _scattered(p) + 4 * p.vocab * p.weight_grad
    return _plan(p, "recompute", panels, 0, p.tokens, 4, 4 + panels.slow, 0, taken)


def _lents(p: Problem) -> list[int]:
    """Columns whose exponentials may wait in the classifier's gradient: fewer make way in fewer batches."""
    if p.cpu or not p.weight_grad or p.main_grad or not p.tokens:
        return [0]
    most = most_slabs(round_up(p.tokens, p.tiles.BLOCK_N), p.hidden, p.vocab, SLAB_COLUMNS)
    return sorted({most * eighths // 8 * SLAB_COLUMNS for eighths in (0, 2, 4, 6, 7, 8)})


def _parts(p: Problem) -> list[int]:
    """Features that the product of kept columns may take at once, in equal parts."""
    if p.cpu or not p.weight_grad:
        return [p.hidden]
    counts = [count for count in (1, 2, 4, 8, 16) if count == 1 or p.hidden >= count * PART_FEATURES]
    return [min(p.hidden, round_up(cdiv(p.hidden, count), TILE_V)) for count in counts]


def most_slabs(rows: int, d: int, num_columns: int, slab: int) -> int:
    """How many slabs [rows, slab] of exponentials a gradient [num_columns, d] can hold at its end, such that it can
    be written from its start while they are read, a slab's columns or more at a time."""
    size = num_columns * d - 64
    # the first columns' rows lie before all slabs, the last ones' before the last slab
    return max(0, min((size - slab * d) // (rows * slab), (size - rows * slab) // (slab * d), num_columns // slab))


def slab_start(rows: int, d: int, num_columns: int, slab: int, slabs: int) -> int:
    """The element of such a gradient that the slabs begin at, an address that copy engines take."""
    return (num_columns * d - slabs * rows * slab) // 64 * 64


def slab_batches(rows: int, d: int, num_columns: int, slab: int, slabs: int) -> Iterator[slice]:
    """The slabs in batches whose rows of the gradient hold nothing but slabs that came before."""
    start, first = slab_start(rows, d, num_columns, slab, slabs), 0
    while first < slabs:
        free = (start + first * rows * slab) // d - first * slab
        assert free >= slab
        yield slice(first, min(slabs, first + free // slab))
        first += free // slab


def _cached(p: Problem, lent: int, own: int, part: int) -> Plan:
    rows, kept = round_up(p.tokens, ROW_GROUP), min(lent + own, p.vocab)
    panels = _panels(p, kept, NARROW_COLUMNS)
    # what a part of the product takes makes way for a panel, and for the slices of dE where these are scattered
    buffer = rows * part * (p.itemsize + _wide(p) * (not p.main_grad)) * p.weight_grad
    if kept < p.vocab:
        buffer = max(buffer, panels.own + _scattered(p))
    elif p.slice:
        # here these come first, and leave a slice
        buffer = max(_scattered(p), buffer - (_scattered(p) - p.slice * p.hidden * _wide(p) * p.hidden_grad))
    again, kept_bytes = 1 - kept / max(1, p.vocab), rows * round_up(kept - lent, 64) * p.itemsize
    widths = [kept - lent]
    if lent:
        # a second backward computes again
        buffer = max(buffer, _panels(p, 0, NARROW_COLUMNS).own + _scattered(p))
        slabs = round_up(p.tokens, p.tiles.BLOCK_N), p.hidden, p.vocab, SLAB_COLUMNS, lent // SLAB_COLUMNS
        widths += [SLAB_COLUMNS * (batch.stop - batch.start) for batch in slab_batches(*slabs)]
    cost = 3 + (1 + panels.slow) * again + _pieces_cost(p, widths, part)
    taken = _packed(p) + kept_bytes + buffer + 4 * p.vocab * p.weight_grad
    if lent:
        tiles = min(rows, token_chunk(p.vocab, p.tiles.BLOCK_V)) * cdiv(p.vocab, p.tiles.BLOCK_V)
        taken = max(taken, rows * p.hidden * p.itemsize + kept_bytes + p.tile_bytes * tiles)
    held = kept_bytes + (_classifier(p) if lent else 0)
    return _plan(p, "cached", panels, kept, p.tokens, 3 + again, cost, held, taken, lent, part)


def _pieces_cost(p: Problem, widths: list[int], part: int) -> float:
    """What it costs, in products, that the kept columns' product for the classifier comes in pieces: the last round
    of the multiprocessors that each takes is not full."""
    if p.cpu or not p.weight_grad:
        return 0.0

    def cost(widths: list[int], part: int) -> float:
        total = 0.0
        for width, d in itertools.product(filter(None, widths), range(0, p.hidden, part)):
            count = cdiv(width, p.tiles.BLOCK_N) * cdiv(min(part, p.hidden - d), p.tiles.BLOCK_V)
            total += PIECE_COST + cdiv(count, p.device) * p.device * p.tiles.BLOCK_N * p.tiles.BLOCK_V * p.tokens
        return total

    # in one piece it is as full as the other methods' products
    more = cost(widths, part) - cost([sum(widths)], p.hidden)
    return max(0.0, more / max(1, p.tokens * p.hidden * p.vocab))


@dataclass(frozen=True)
class _Panels:
    """Sizes as in a plan, the bytes of a panel's own memory, and what its size costs in products."""

    width: int
    rows: int
    wide: int
    own: int
    slow: float


def _panels(p: Problem, kept: int, most: int) -> _Panels:
    """Panels for the columns from ``kept``, and for all in a second backward; see ``_parts`` in
    autograd/second_pass.py."""
    rows, columns = round_up(p.tokens, ROW_GROUP), p.vocab - kept
    block = rows
    if p.tokens >= 2 * BLOCK_ROWS and p.wide_range:
        # so many tokens are taken in turns, so that panels are wide and small
        block, most = BLOCK_ROWS, BLOCK_COLUMNS
    # of all columns, so that a plan's alternatives search once
    width = panel_width(block, p.hidden, p.vocab, most, p.tiles, p.device)
    left = min(width, round_up(columns, TILE_V))
    own = block * left * p.itemsize
    if block < rows:
        own += 2 * left * p.hidden * (p.itemsize == 2 and p.weight_grad and not p.main_grad)
    narrow, wide = 1.0, 0
    if p.weight_grad and not p.main_grad and most < PANEL_COLUMNS and block == rows:
        wide = panel_width(rows, p.hidden, p.vocab, PANEL_COLUMNS, p.tiles, p.device)
        needed = cdiv(rows * wide, p.hidden)
        if needed < columns and wide > width:
            # the columns that the wide ones leave, and more launches
            narrow = min(1.0, 1.5 * needed / columns)
        else:
            wide = 0
    # narrow panels touch the fp32 gradient of the hidden states often
    return _Panels(width, block, wide, own, narrow * NARROW_COST * max(0.0, PANEL_COLUMNS / width - 1))


def _fused(p: Problem, chunk: int) -> Plan:
    # whole groups of packed rows: one chunk then takes all of them, and no chunk's products have other bits
    chunk = round_up(max(1, min(chunk, p.tokens)), ROW_GROUP)
    several = chunk < p.tokens
    panel = chunk * round_up(p.vocab, 64) * p.itemsize
    # live beside it
    statistics = p.tile_bytes * chunk * cdiv(p.vocab, p.tiles.BLOCK_V)
    sums = 4 * p.vocab + chunk * p.hidden * _wide(p) if p.weight_grad else 0
    low = 2 * p.vocab * p.hidden if several and p.itemsize == 2 and p.weight_grad else 0
    once = (CPU_CHUNK_TOKENS_16 if p.itemsize == 2 else CPU_CHUNK_TOKENS) if p.cpu else CHUNK_TOKENS
    cost = 3 + (once / chunk if several else 0)
    # a last chunk of few tokens reads the classifier for little
    cost += 0.5 * (-p.tokens % chunk) / max(1, p.tokens) if several else 0
    # for a second backward, which computes again
    panels = _panels(p, 0, NARROW_COLUMNS)
    taken = _packed(p) + panel + sums + low
    # the last chunk's product for the classifier waits for the upstream gradient
    held = taken + _classifier(p) if p.weight_grad else _packed(p)
    return _plan(p, "fused", panels, 0, chunk, 3, cost, held, taken + statistics + _scattered(p))


def _classifier(p: Problem) -> int:
    """The classifier's gradient."""
    return p.itemsize * p.hidden * p.vocab * (p.weight_grad and not p.main_grad)


def _wide(p: Problem) -> int:
    return max(4, p.itemsize)


def _packed(p: Problem) -> int:
    """The packed hidden states and their gradient before its last rounding."""
    return round_up(p.tokens, ROW_GROUP) * p.hidden * (p.itemsize + _wide(p) * p.hidden_grad)


def _scattered(p: Problem) -> int:
    """That gradient once more, in the order of the ranks' slices, where these are scattered."""
    return round_up(p.tokens, ROW_GROUP) * p.hidden * _wide(p) * (p.hidden_grad and p.slice > 0)


def _gathered(p: Problem) -> int:
    """The slices of hidden states that ask for no gradient: they wait for the classifier's."""
    return p.slice * p.ranks * p.hidden * p.itemsize * (not p.hidden_grad)


def _plan(
    p: Problem, method: str, panels: _Panels, kept: int, chunk: int, products: float, cost: float, held: int,
    taken: int, lent: int = 0, part: int = 0,
) -> Plan:  # fmt: skip
    """``taken``: bytes at most at once, beside the classifier's gradient."""
    rows, tokens = round_up(p.tokens, ROW_GROUP), p.slice or p.tokens
    gradients = _classifier(p) + p.itemsize * p.hidden * tokens * p.hidden_grad
    # the packed hidden states make way for the gradient of the hidden states
    unpacking = (rows * _wide(p) + tokens * p.itemsize) * p.hidden if p.hidden_grad else 0
    held, taken = held + _gathered(p), taken + _gathered(p)
    peak = _classifier(p) + max(taken, unpacking) + TOKEN_BYTES * rows
    return Plan(
        method, panels.width, panels.rows, panels.wide, kept, lent, SLAB_COLUMNS * bool(lent), part, chunk, products,
        cost, held, max(0, peak - gradients), peak,
    )  # fmt: skip
