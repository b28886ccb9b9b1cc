"""What tensor parallelism of the head costs from 2 to 1024 ranks, on paper: the tables of docs/scaling.md, which says
what is in them.

    python launch/scaling.py

The model is the code: measured times of two GPUs, the products and collectives of a step in their order.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from cce_dist import plan

# tokens, hidden width, classes
SHAPES = ((8192, 4096, 128256), (16384, 8192, 128256), (32768, 7168, 129280))
SHOWN = (2, 4, 8, 16, 32, 64, 256, 1024)
METHODS = ("recompute", "fused")

# measured: operations a second of bf16 products on an H200, and on two of them an all-reduce that is too small for
# its bytes to count, and one of so many bytes, which pass once in each direction
RATE = 690e12
SMALL = 8e-6
LARGE_BYTES, LARGE = 4 * 8192 * 4096, 0.53e-3
STEP, NVLINK = SMALL / 2, LARGE_BYTES / (LARGE - SMALL)
# assumed: GPUs of a host, a GPU's share of the network and a hop through it, a collective's launch where a product
# waits for it, memory bytes a second
HOST, NETWORK, HOP, LAUNCH, MEMORY = 8, 50e9, 15e-6, 5e-6, 4e12
# workspace allowed, so that fused has few chunks
BUDGET = 4 << 30
# classes that shards are multiples of, and tokens whose statistics travel together in recompute
TILE, CHUNK = 256, 8192
# of a row's element: read and written as it is packed, twice, and as its fp32 gradient is rounded
ROW_BYTES = 2 * (2 + 2) + 4 + 2


def hosts_of(ranks: int) -> tuple[int, int]:
    """(GPUs of one host, hosts)."""
    return min(ranks, HOST), max(1, ranks // HOST)


def moved(size: float, ranks: int) -> float:
    """Seconds for the bytes of a reduce-scatter, or of an all-gather, of ``size`` bytes: inside of the hosts, then
    between them, each GPU its part."""
    inside, hosts = hosts_of(ranks)
    return size * (inside - 1) / inside / NVLINK + size / inside * (hosts - 1) / hosts / NETWORK


def all_reduce(size: float, ranks: int) -> float:
    """Up and down a tree."""
    inside, hosts = hosts_of(ranks)
    return LAUNCH + 2 * (STEP * math.log2(inside) + HOP * math.log2(hosts) + moved(size, ranks))


def scatter_or_gather(size: float, ranks: int) -> float:
    """Around a ring."""
    inside, hosts = hosts_of(ranks)
    return LAUNCH + STEP * (inside - 1) + HOP * (hosts - 1) + moved(size, ranks)


@dataclass
class Step:
    """Seconds of a step's parts on the slowest rank."""

    # the products of an even share of the classes, and what whole tiles of them add
    floor: float
    tiles: float
    rows: float
    # what no product hides of the collectives
    small: float
    gathers: float
    d_hidden: float

    @property
    def total(self) -> float:
        return self.floor + self.tiles + self.rows + self.small + self.gathers + self.d_hidden

    @property
    def exposed(self) -> float:
        return (self.small + self.gathers + self.d_hidden) / self.total

    @property
    def ratio(self) -> float:
        """As in launch/benchmark.py."""
        return self.total / self.floor

    @property
    def most(self) -> str:
        """What adds most to the floor."""
        parts = {"tiles": self.tiles, "rows": self.rows, "small": self.small, "dE": self.d_hidden}
        return max(parts, key=lambda name: parts[name])


def step(shape: tuple[int, int, int], ranks: int, method: str, slices: bool = False) -> Step:
    """``slices``: sequence parallelism."""
    n, d, v = shape
    planned = plan(n, d, v, tp=ranks, method=method, memory_budget=BUDGET, device="sm_90")
    columns = math.ceil(v / TILE / ranks) * TILE

    def product(rows: int, columns: float) -> float:
        return 2 * rows * columns * d / RATE

    chunk = planned.chunk if method == "fused" else CHUNK
    chunks = _pieces(n, chunk)
    small = sum(all_reduce(4 * rows, ranks) + all_reduce(24 * rows, ranks) for rows in chunks)
    if method == "fused":
        small += all_reduce(4 * n, ranks)
        # tokens of a reduction, and what runs meanwhile: the chunk's last product and the next one's first two
        reductions = [(rows, product(3 * rows, columns)) for rows in chunks[:-1]]
        reductions.append((chunks[-1], product(chunks[-1], columns)))
        if slices:
            # once, when all chunks are there
            reductions = [(n, product(chunks[-1], columns))]
    else:
        # a block of tokens in the last panel: its last product and the next block's three
        blocks, width = _pieces(n, planned.rows), min(columns, planned.panel)
        reductions = [
            (rows, product(rows + 3 * after, width)) for rows, after in zip(blocks, [*blocks[1:], 0], strict=True)
        ]
        if slices:
            reductions = [(n, product(blocks[-1], width))]
    reduce = scatter_or_gather if slices else all_reduce
    return Step(
        floor=planned.products * product(n, v / ranks),
        tiles=planned.products * product(n, columns - v / ranks),
        rows=ROW_BYTES * n * d / MEMORY,
        small=small,
        gathers=(1 if method == "fused" else 2) * scatter_or_gather(2 * n * d, ranks) if slices else 0,
        d_hidden=sum(max(0, reduce(4 * rows * d, ranks) - hidden) for rows, hidden in reductions),
    )


def _pieces(n: int, size: int) -> list[int]:
    return [min(size, n - start) for start in range(0, n, size)]


def table(shape: tuple[int, int, int]) -> str:
    columns = ["R", "dE", *(name for method in METHODS for name in (method, "exposed %", "floor", "slices", "most"))]
    lines = [f"**{shape[0]} x {shape[1]} x {shape[2]}**\n", f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for ranks in SHOWN:
        cells = [f"{ranks}", f"{1e3 * all_reduce(4 * shape[0] * shape[1], ranks):.2f}"]
        for method in METHODS:
            whole, slices = step(shape, ranks, method), step(shape, ranks, method, slices=True)
            cells += [f"{1e3 * whole.total:.2f}", f"{100 * whole.exposed:.1f}", f"{whole.ratio:.3f}"]
            cells += [f"{slices.ratio:.3f}", whole.most]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def ends() -> str:
    """The most ranks that keep the step below so many floors, and with how many it is shortest."""
    lines = ["| | | 1.1 | 1.25 | 2 | shortest step |", "|---|---|---|---|---|---|"]
    all_ranks = [2**power for power in range(1, 11)]
    for shape in SHAPES:
        for method in METHODS:
            steps = {ranks: step(shape, ranks, method) for ranks in all_ranks}
            most = [max((r for r in all_ranks if steps[r].ratio <= bound), default=1) for bound in (1.1, 1.25, 2)]
            best = min(all_ranks, key=lambda ranks: steps[ranks].total)
            cells = [" x ".join(map(str, shape)), method, *(f"R = {ranks}" for ranks in most)]
            lines.append(f"| {' | '.join(cells)} | {1e3 * steps[best].total:.2f} ms at R = {best} |")
    return "\n".join(lines)


def main() -> None:
    print("\n\n".join([*map(table, SHAPES), ends()]))


if __name__ == "__main__":
    main()
