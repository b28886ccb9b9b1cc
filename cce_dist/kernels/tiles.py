"""What the product kernels share: the order of tiles, loading them, and a tile of logits."""

from .runtime import tl, triton

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def tile_position(tile, num_n, num_v, GROUP_N: tl.constexpr):
    """Row and column block of the ``tile``-th tile: GROUP_N row blocks walk the columns together."""
    width = GROUP_N * num_v
    first = (tile // width) * GROUP_N
    size = tl.minimum(num_n - first, GROUP_N)
    return first + (tile % width) % size, (tile % width) // size


@triton.jit
def slab_place(v, width, rows, SLAB: tl.constexpr):
    """(first row, column, columns beside it) of column ``v`` of ``width`` of a panel.

    With SLAB these come in slabs of so many, each a matrix ``rows`` rows below the one before: the memory of some is
    then free once they have been read.
    """
    if SLAB:
        return (v // SLAB) * rows, v % SLAB, SLAB
    else:
        return v * 0, v, width


@triton.jit
def next_step(
    step, tile, n, v, num_steps, num_n, num_v, BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr, GROUP_N: tl.constexpr
):
    """(step, tile, n, v) after a step of a tile's product: the next one, or the first of this program's next tile.

    One loop over the steps of all tiles lets the next tile's operands arrive under the epilogue. Triton's own way to
    it, ``flatten=True``, takes no branch in the epilogue.
    """
    step = tl.where(step == num_steps - 1, 0, step + 1)
    if step == 0:
        tile += tl.num_programs(0)
        pid_n, pid_v = tile_position(tile, num_n, num_v, GROUP_N)
        n = pid_n * BLOCK_N
        v = pid_v * BLOCK_V
    return step, tile, n, v


@triton.jit
def num_tiles(count):
    """How many of ``count`` tiles this program takes."""
    return tl.cdiv(tl.maximum(count - tl.program_id(0), 0), tl.num_programs(0))


@triton.jit
def any_target(target_ptr, n, rows, first, last, BLOCK_N: tl.constexpr):
    """Whether one of the sorted ids ``n`` to ``n + BLOCK_N``, of ``rows``, can lie between ``first`` and ``last``."""
    low = tl.load(target_ptr + n)
    high = tl.load(target_ptr + tl.minimum(n + BLOCK_N, rows) - 1)
    return (low < last) & (high >= first)


@triton.jit
def load_tile(source, row, col, rows, cols, stride, ROWS: tl.constexpr, COLS: tl.constexpr, TMA: tl.constexpr):
    """The tile at (row, col) of a [rows, cols] matrix, zero outside it. ``source`` is a descriptor or a pointer."""
    if TMA:
        return source.load([row, col])
    else:
        offs_r = row + tl.arange(0, ROWS)
        offs_c = col + tl.arange(0, COLS)
        pointers = source + offs_r[:, None].to(tl.int64) * stride + offs_c[None, :]
        return tl.load(pointers, mask=(offs_r < rows)[:, None] & (offs_c < cols)[None, :], other=0.0)


@triton.jit
def add_product(x, y, acc, PRECISION: tl.constexpr):
    """``acc + x @ y``. In full precision each step is summed apart: a sum of sums loses less than a long one."""
    if x.dtype == tl.float32:
        # a plain addition would be folded into the product
        return tl.fma(tl.dot(x, y, input_precision=PRECISION), tl.zeros_like(acc) + 1.0, acc)
    else:
        return tl.dot(x, y, acc, input_precision=PRECISION)


@triton.jit
def store_tile(
    target, value, row, col, rows, cols, stride, ROWS: tl.constexpr, COLS: tl.constexpr, TMA: tl.constexpr
):
    """The counterpart of :func:`load_tile`; what lies outside the matrix is not written."""
    if TMA:
        target.store([row, col], value)
    else:
        offs_r = row + tl.arange(0, ROWS)
        offs_c = col + tl.arange(0, COLS)
        pointers = target + offs_r[:, None].to(tl.int64) * stride + offs_c[None, :]
        tl.store(pointers, value, mask=(offs_r < rows)[:, None] & (offs_c < cols)[None, :])


@triton.jit
def store_halves(
    target, value, row, col, rows, cols, stride, ROWS: tl.constexpr, COLS: tl.constexpr, TMA: tl.constexpr
):
    """:func:`store_tile` in the target's dtype, the second half made ready while the copy engine takes the first."""
    left, right = halves(value, ROWS, COLS)
    DTYPE: tl.constexpr = target.dtype if TMA else target.dtype.element_ty
    store_tile(target, left.to(DTYPE), row, col, rows, cols, stride, ROWS, COLS // 2, TMA)
    store_tile(target, right.to(DTYPE), row, col + COLS // 2, rows, cols, stride, ROWS, COLS // 2, TMA)


@triton.jit
def halves(tile, ROWS: tl.constexpr, COLS: tl.constexpr):
    """The left and the right half of a tile's columns."""
    return tl.split(tl.permute(tl.reshape(tile, (ROWS, 2, COLS // 2)), (0, 2, 1)))
