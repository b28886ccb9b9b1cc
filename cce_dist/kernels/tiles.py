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
def halves(tile, ROWS: tl.constexpr, COLS: tl.constexpr):
    """The left and the right half of a tile's columns."""
    return tl.split(tl.permute(tl.reshape(tile, (ROWS, 2, COLS // 2)), (0, 2, 1)))


@triton.jit
def logits_tile(
    e, c, bias_ptr, n, v, N, V, D, stride_e, stride_c,
    HAS_BIAS: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Logits of the rows from ``n`` and the columns from ``v``, fp32. Columns at or past V hold the bare product."""
    acc = tl.zeros((BLOCK_N, BLOCK_V), tl.float32)
    for d in range(0, D, BLOCK_D):
        a = load_tile(e, n, d, N, D, stride_e, BLOCK_N, BLOCK_D, TMA)
        b = load_tile(c, v, d, V, D, stride_c, BLOCK_V, BLOCK_D, TMA)
        acc = tl.dot(a, b.T, acc, input_precision=PRECISION)
    if HAS_BIAS:
        offs_v = v + tl.arange(0, BLOCK_V)
        acc += tl.load(bias_ptr + offs_v, mask=offs_v < V, other=0.0).to(tl.float32)[None, :]
    return acc
