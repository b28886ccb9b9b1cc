"""Finds the tiles of kernels/config.py anew: what each candidate takes on a chip, and how fast it is on the one here.

    python launch/tune.py
    python launch/tune.py --shape 8192x4096x8192 --block-n 128 --block-v 256 --stages 3 4
    python launch/tune.py --compile-only sm_80 sm_90 gfx942

Nothing is chosen when the library runs: two runs and two ranks would differ. This prints a table and the line that
may go into kernels/config.py. Each candidate takes turns with the entry that is there and with torch.mm of the same
shape, since a chip's clock wanders: the table is sorted by the sum of the medians in relation to that of the present
entry's turns, and beside it are the rates of the products, to torch.mm's. A candidate that does not compile, does not
fit or gives another result says so. With --compile-only no GPU is needed: for each product, registers of a thread,
and behind a plus the bytes of them that it keeps in memory.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import statistics as averages
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from machine import Machine
from tqdm import tqdm

from cce_dist.kernels import config, runtime
from cce_dist.kernels.config import TILE_V, Tiles
from cce_dist.kernels.gradient import RowState, panel_gradient
from cce_dist.kernels.logits import LogitMap
from cce_dist.kernels.product import hidden_gradient, weight_gradient
from cce_dist.kernels.statistics import panel_statistics

if importlib.util.find_spec("triton"):
    from compiled import SHARED, compiled, recorded, resources

PRODUCTS = ("statistics", "kept", "panel", "hidden", "weight", "added")
Call = Callable[[], torch.Tensor]
Shape = tuple[int, int, int]


class Problem:
    """The products over one panel of ``v`` columns, as training makes them, and torch.mm of the same shapes."""

    def __init__(self, shape: Shape, dtype: torch.dtype, device: torch.device) -> None:
        n, d, v = shape
        generator = torch.Generator(device).manual_seed(0)

        def normal(*size: int) -> torch.Tensor:
            # random data: a chip runs faster on zeros
            return torch.randn(*size, device=device, generator=generator).to(dtype)

        e, c, panel = normal(n, d), normal(v, d) * d**-0.5, normal(n, v)
        ids, count = (torch.arange(n, device=device) * v) // n, torch.tensor(n, device=device)
        row, scale = torch.zeros(n, device=device), torch.ones((), device=device)
        state = RowState(ids, row + 4, row, row + 1, row - 1, None)
        logit, wide = torch.zeros(n, device=device), torch.zeros(n, d, device=device)
        written, out, low = torch.empty_like(panel), torch.zeros_like(c), torch.zeros_like(c, dtype=torch.int16)
        self.sums = wide, out, low

        def statistics(panel: torch.Tensor | None) -> torch.Tensor:
            found = panel_statistics(
                e, c, LogitMap(), ids, count, logit, rows=(0, n), col0=0,
                panels=() if panel is None else [panel], reference=None if panel is None else row,
            )  # fmt: skip
            return found.tile_max if panel is None else panel

        def rebuilt() -> torch.Tensor:
            panel_gradient(e, c, LogitMap(), state, count, written, v0=0, col0=0, bias_grad=None)
            return written

        def hidden() -> torch.Tensor:
            hidden_gradient(panel, c, count, wide, v0=0, add=True)
            return wide

        def weight(**options: Any) -> torch.Tensor:
            weight_gradient(panel, e, count, scale, out, **options)
            return out

        self.calls: dict[str, Call] = {
            "statistics": lambda: statistics(None),
            "kept": lambda: statistics(written),
            "panel": rebuilt,
            "hidden": hidden,
            "weight": weight,
            # a sum over chunks of tokens waits in two halves, which only bf16 has
            "added": lambda: weight(low=low if dtype == torch.bfloat16 else None, add=True, last=False),
        }
        logits, d_hidden, d_weight = torch.empty_like(panel), torch.empty_like(e), torch.empty_like(c)
        self.library: dict[str, Call] = {
            **dict.fromkeys(("statistics", "kept", "panel"), lambda: torch.mm(e, c.T, out=logits)),
            "hidden": lambda: torch.mm(panel, c, out=d_hidden),
            **dict.fromkeys(("weight", "added"), lambda: torch.mm(panel.T, e, out=d_weight)),
        }

    def result(self, name: str) -> torch.Tensor:
        """What a product gives, its sums begun anew."""
        for total in self.sums:
            total.zero_()
        value = self.calls[name]().float()
        # tiles have maxima of their own
        return value.amax(0) if name == "statistics" else value.clone()


def in_use(chip: str, tiles: Tiles) -> Any:
    """Inside, the library computes with ``tiles`` on ``chip``."""
    return mock.patch.dict(config._HALF, {config._SAME.get(chip, chip): tiles})


def candidates(args: argparse.Namespace, chip: str) -> list[Tiles]:
    """The present entry first, then all that may fit the chip."""
    present = config.tiles_for(chip, args.dtype)
    found = [present]
    grid = itertools.product(args.block_n, args.block_v, args.block_d, args.warps, args.stages, args.group_n)
    for n, v, d, warps, stages, group in grid:
        tiles = Tiles(n, v, d, num_warps=warps, num_stages=stages, GROUP_N=group)
        operands = stages * (n + v) * d * args.dtype.itemsize
        # fewer sums a thread than 32 leave the tensor cores waiting, more than 128 find no registers
        fits = operands <= SHARED.get(chip, 1 << 20) * 1024 and 32 <= n * v // (32 * warps) <= 128
        if (fits or args.all) and tiles not in found:
            found.append(tiles)
    return found


def line_of(chip: str, tiles: Tiles) -> str:
    group = f", GROUP_N={tiles.GROUP_N}" if tiles.GROUP_N != Tiles.GROUP_N else ""
    sizes = f"{tiles.BLOCK_N}, {tiles.BLOCK_V}, {tiles.BLOCK_D}"
    return f'"{chip}": Tiles({sizes}, num_warps={tiles.num_warps}, num_stages={tiles.num_stages}{group}),'


HEAD = f"{'N':>4} {'V':>4} {'D':>4} {'warps':>5} {'stages':>6} {'group':>5}"


def cells(tiles: Tiles) -> str:
    return (
        f"{tiles.BLOCK_N:4} {tiles.BLOCK_V:4} {tiles.BLOCK_D:4} {tiles.num_warps:5} {tiles.num_stages:6}"
        f" {tiles.GROUP_N:5}"
    )


def first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:80]


def compile_all(args: argparse.Namespace) -> None:
    for chip in args.compile_only:
        # the launches alone: nothing is computed
        problem = Problem((256, 512, 1024), args.dtype, torch.device("cpu"))
        found = candidates(args, chip)
        with tqdm(total=len(found) * len(args.products), desc=chip) as bar:
            bar.write(f"{chip}, {SHARED.get(chip, '?')} KiB of shared memory; the present entry first")
            bar.write(f"{HEAD} {'KiB':>5} " + " ".join(f"{name:>10}" for name in args.products))
            for tiles in found:
                bar.write(f"{cells(tiles)} {compile_one(problem, chip, tiles, args.products, bar)}")


def compile_one(problem: Problem, chip: str, tiles: Tiles, products: list[str], bar: tqdm[Any]) -> str:
    taken, before = [], bar.n
    try:
        for name in products:
            with in_use(chip, tiles), recorded(chip) as launches:
                problem.calls[name]()
            (launch,) = launches
            taken.append(resources(compiled(launch, chip)))
            bar.update()
    # whatever the compiler may raise is this candidate's result
    except Exception as error:
        bar.update(before + len(products) - bar.n)
        return first_line(error)
    shared = max(kernel.shared for kernel in taken) / 1024
    unfit = "  does not fit" if shared > SHARED.get(chip, 1 << 20) else ""
    columns = (f"{kernel.registers}{f'+{kernel.spilled}' if kernel.spilled else ''}" for kernel in taken)
    return f"{shared:5.0f} " + " ".join(f"{column:>10}" for column in columns) + unfit


class Result:
    """The medians of a candidate, of the present entry and of torch.mm, summed over shapes, in seconds."""

    def __init__(self, tiles: Tiles) -> None:
        self.tiles = tiles
        self.failure: str | None = None
        self.ours: dict[str, float] = dict.fromkeys(PRODUCTS, 0.0)
        self.present: dict[str, float] = dict.fromkeys(PRODUCTS, 0.0)
        self.library: dict[str, float] = dict.fromkeys(PRODUCTS, 0.0)

    def ratio(self) -> float:
        return sum(self.ours.values()) / sum(self.present.values())

    def row(self, products: list[str]) -> str:
        if self.failure:
            return f"{cells(self.tiles)} {self.failure}"
        shares = " ".join(f"{self.library[name] / self.ours[name]:10.3f}" for name in products)
        return f"{cells(self.tiles)} {sum(self.ours.values()) * 1e3:9.3f} {self.ratio():7.3f} {shares}"


def time_one(
    problem: Problem,
    result: Result,
    truth: dict[str, torch.Tensor],
    chip: str,
    args: argparse.Namespace,
    clock: Machine,
) -> None:
    present = config.tiles_for(chip, args.dtype)

    def seconds(call: Call, tiles: Tiles) -> float:
        with in_use(chip, tiles):
            return clock.seconds(call)

    # before the clock runs: it compiles, and is right
    for name in args.products:
        with in_use(chip, result.tiles):
            got = problem.result(name)
        if not (got - truth[name]).norm() <= 2e-3 * truth[name].norm():
            raise ArithmeticError(f"{name} gives another result")
    for name in args.products:
        turns = [
            (
                seconds(problem.calls[name], result.tiles),
                seconds(problem.calls[name], present),
                clock.seconds(problem.library[name]),
            )
            for _ in range(args.repeat)
        ]
        for total, times in zip((result.ours, result.present, result.library), zip(*turns, strict=True), strict=True):
            total[name] += averages.median(times)


def time_all(args: argparse.Namespace, clock: Machine) -> None:
    chip = runtime.target_of(clock.device)
    results = [Result(tiles) for tiles in candidates(args, chip)]
    with tqdm(total=len(args.shape) * len(results)) as bar:
        for shape in args.shape:
            problem = Problem(shape, args.dtype, clock.device)
            truth = {name: problem.result(name) for name in args.products}
            for result in results:
                if result.failure is None:
                    bar.set_postfix_str(cells(result.tiles))
                    # whatever the compiler or the driver may raise is this candidate's result
                    try:
                        time_one(problem, result, truth, chip, args, clock)
                    except Exception as error:
                        result.failure = first_line(error)
                bar.update()
    done = sorted((result for result in results if result.failure is None), key=Result.ratio)
    shapes = ", ".join("x".join(map(str, shape)) for shape in args.shape)
    dtype = str(args.dtype)[6:]
    print(f"\n{clock.name()}, {chip}, torch {torch.__version__}, {shapes} {dtype}, median of {args.repeat}")
    print(f"{HEAD} {'sum, ms':>9} {'to now':>7} " + " ".join(f"{name:>10}" for name in args.products))
    for result in (*done, *(result for result in results if result.failure)):
        print(result.row(args.products) + ("  <- the present entry" if result is results[0] else ""))
    if done and done[0] is results[0]:
        print("\nthe present entry is the fastest")
    elif done:
        present = " x ".join(cells(results[0].tiles).split()[:3])
        print(f"\n    # {1 - done[0].ratio():.1%} faster than {present} on {clock.name()}")
        print(f"    {line_of(config._SAME.get(chip, chip), done[0].tiles)}")


def parse(arguments: list[str] | None) -> argparse.Namespace:
    def shape(text: str) -> Shape:
        tokens, width, columns = map(int, text.split("x"))
        return tokens, width, columns

    def divisor(text: str) -> int:
        if TILE_V % int(text):
            raise argparse.ArgumentTypeError(f"{text} does not divide {TILE_V}, the bounds of vocabulary shards")
        return int(text)

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--compile-only", nargs="+", metavar="CHIP", help="chips to compile for: sm_80 sm_90 gfx942")
    default = [(8192, 4096, 8192), (2048, 2048, 32768)]
    add("--shape", type=shape, nargs="+", default=default, help="tokens x hidden width x columns of a panel")
    add("--dtype", choices=("bfloat16", "float16"), default="bfloat16")
    add("--products", nargs="+", choices=PRODUCTS, default=list(PRODUCTS))
    add("--block-n", type=int, nargs="+", default=[64, 128, 256])
    add("--block-v", type=divisor, nargs="+", default=[128, 256])
    add("--block-d", type=int, nargs="+", default=[32, 64, 128])
    add("--warps", type=int, nargs="+", default=[4, 8])
    add("--stages", type=int, nargs="+", default=[2, 3, 4])
    add("--group-n", type=int, nargs="+", default=[8])
    add("--all", action="store_true", help="also candidates that are not expected to fit")
    add("--repeat", type=int, default=11)
    args = parser.parse_args(arguments)
    args.dtype = getattr(torch, args.dtype)
    if not runtime.HAS_TRITON:
        parser.error("there is no Triton here: pip install triton")
    if args.compile_only and runtime.INTERPRETED:
        parser.error("TRITON_INTERPRET=1 has replaced the compiler")
    if unknown := set(args.compile_only or ()).difference(SHARED):
        parser.error(f"no {', '.join(sorted(unknown))} among {', '.join(SHARED)}")
    return args


def main(arguments: list[str] | None = None) -> None:
    args = parse(arguments)
    if args.compile_only:
        compile_all(args)
        return
    clock = Machine()
    if not runtime.triton_serves(torch.empty(0, device=clock.device)):
        raise SystemExit("there is no GPU here that the kernels run on; --compile-only needs none")
    time_all(args, clock)


if __name__ == "__main__":
    main()
