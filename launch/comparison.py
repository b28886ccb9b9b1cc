"""What the benchmark tells: the rows of its tables, their figures as JSON, the picture."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import math
import statistics
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import peers
import torch
from machine import Machine


@dataclass
class Row:
    """An implementation and what was measured of it."""

    name: str
    make: peers.Make
    kind: str
    # how many ranks share the vocabulary
    ranks: int = 1
    # of its floor: 4 where the logits are computed twice
    products: int = 3
    floor_seconds: list[float] = field(default_factory=list)
    forward_floor_seconds: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    forward_seconds: list[float] = field(default_factory=list)
    peak: int = 0
    # the share of the time in which a rank communicates and computes nothing, where that was measured
    exposed: float | None = None
    errors: dict[str, float] = field(default_factory=dict)
    failure: str | None = None

    def ratio(self) -> float:
        return statistics.median(self.seconds) / (statistics.median(self.floor_seconds) / self.ranks)

    def forward_ratio(self) -> float:
        return statistics.median(self.forward_seconds) / (statistics.median(self.forward_floor_seconds) / self.ranks)

    def cost(self) -> float:
        """To three products, whatever the method: what rows compare in."""
        return self.ratio() * self.products / 3

    def figures(self) -> dict[str, Any]:
        ratios = (
            {}
            if self.failure
            else {"ratio": self.ratio(), "forward_ratio": self.forward_ratio(), "cost": self.cost()}
        )
        return {k: v for k, v in vars(self).items() if k != "make"} | ratios


# of each shape: tokens, hidden width, classes
Results = dict[tuple[int, int, int], list[Row]]


def table(shape: tuple[int, int, int], rows: list[Row], args: argparse.Namespace, machine: Machine) -> str:
    tokens, width, vocab = shape
    done = [row for row in rows if row.failure is None]
    exposed = any(row.exposed is not None for row in done)
    lines = [
        "",
        f"{machine.name()} x {machine.ranks}, torch {torch.__version__}, {tokens} x {width} x {vocab} {args.dtype}, "
        f"{args.ignored:.0%} ignored; median of {args.repeat}",
    ]
    if args.sequence_parallel and machine.ranks > 1:
        lines.append("sequence parallel: a rank has a slice of the hidden states in our rows, all of them in peers'")
    if done:
        floor = statistics.median(seconds * 3 / row.products for row in done for seconds in row.floor_seconds)
        speed = 6 * tokens * width * vocab / floor / 1e12
        lines.append(f"floor: 6NVD in {floor * 1e3:.2f} ms, {speed:.3g} TFLOP/s; x8 marks a floor of 8NVD")
    lines += [
        f"{'':18} {'forward and backward':^19} {'forward alone':^17} {'peak':>9} {'to whole logits':^15}"
        f" {'error against fp64':^26}{' exposed' if exposed else ''}",
        f"{'':18} {'ms':>9} {'floor':>7}   {'ms':>9} {'floor':>7} {'MiB':>9} {'time':>7} {'peak':>7}"
        f" {'loss':>8} {'dE':>8} {'dC':>8}{'       %' if exposed else ''}",
    ]
    whole = next((row for row in done if row.name in ("pytorch", "megatron")), None)
    for row in rows:
        if row.failure is not None:
            lines.append(f"{row.name:18} {row.failure[:99]}")
            continue
        # by way of their floors: the two ran at different times
        times, peak = (row.cost() / whole.cost(), row.peak / whole.peak) if whole else (math.nan, math.nan)
        both, forward = statistics.median(row.seconds), statistics.median(row.forward_seconds)
        lines.append(
            f"{row.name:18} {both * 1e3:9.2f} {row.ratio():7.3f}{'x8' if row.products == 4 else '  '}"
            f" {forward * 1e3:9.2f} {row.forward_ratio():7.3f}"
            f" {row.peak / 2**20:9.1f} {times:7.3f} {peak:7.3f} "
            + " ".join(f"{error:8.1e}" for error in row.errors.values())
            + ("" if row.exposed is None else f" {100 * row.exposed:7.2f}")
        )
    return "\n".join(lines)


def picture(path: Path, results: Results, machine: Machine) -> None:
    """Time against peak memory, a panel for each shape: a point for each row, a line through our budgets."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullFormatter

    figure = Figure(figsize=(8 * len(results), 6), layout="constrained")
    for axes, (shape, rows) in zip(figure.subplots(1, len(results), squeeze=False)[0], results.items(), strict=True):
        done = [row for row in rows if row.failure is None]
        styles = {"method": ("o", "tab:blue"), "budget": (".", "tab:blue"), "peer": ("s", "tab:orange")}
        for row in done:
            x, y = row.peak / 2**20, row.cost()
            marker, colour = styles[row.kind]
            axes.plot(x, y, marker, color=colour)
            # above the points of methods and peers, under those of budgets
            name, offset, ha = row.name.removeprefix("budget "), (5, 4), "left"
            if row.kind == "budget":
                offset, ha = (-4, -10), "right"
            axes.annotate(name, (x, y), xytext=offset, textcoords="offset points", fontsize=8, color=colour, ha=ha)
        curve = sorted((row.peak / 2**20, row.cost()) for row in done if row.kind == "budget")
        if curve:
            axes.plot(*zip(*curve, strict=True), "-", color="tab:blue", alpha=0.6, label="our budgets")
        axes.margins(0.15)
        axes.axhline(1, color="grey", linestyle="--", label="floor: the three products")
        axes.set(xscale="log", yscale="log", xlabel="peak beyond the inputs, gradients included (MiB)")
        axes.set(ylabel="forward and backward, to the three products", title=" x ".join(map(str, shape)))
        axes.grid(alpha=0.3, which="both")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5, 7)))
            axis.set_major_formatter("{x:g}")
            axis.set_minor_formatter(NullFormatter())
        axes.legend()
    figure.suptitle(f"{machine.name()} x {machine.ranks}, torch {torch.__version__}")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def save(path: Path, results: Results, args: argparse.Namespace, machine: Machine) -> None:
    versions = {}
    for package in ("torch", "triton", *peers.PACKAGES):
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    figures = {
        "machine": machine.name(),
        "ranks": machine.ranks,
        "versions": versions,
        "arguments": {name: str(v) if isinstance(v, Path) else v for name, v in vars(args).items()},
        "shapes": [
            {"tokens": n, "hidden": d, "vocab": v, "rows": [row.figures() for row in rows]}
            for (n, d, v), rows in results.items()
        ],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(figures, indent=1))
