"""What a run tells: its metrics, the plot of its loss, the table that compares two runs."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

Metrics = list[dict[str, Any]]


def replace_text(path: Path, text: str) -> None:
    """So that a kill leaves the old file or the new one."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text)
    partial.replace(path)


def read_metrics(run: Path) -> Metrics:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def plot_loss(path: Path, runs: dict[str, Metrics]) -> None:
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for (name, metrics), style in zip(runs.items(), ("-", "--"), strict=False):
        axes.plot([m["step"] for m in metrics], [m["loss"] for m in metrics], style, label=name)
    axes.set(xlabel="step", ylabel="loss (nats a token)", title="Training loss")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)


def comparison(runs: dict[str, Metrics]) -> str:
    """The table of two runs of the same steps."""
    ours, theirs = runs.values()
    difference = max(abs(a["loss"] - b["loss"]) for a, b in zip(ours, theirs, strict=True))
    columns = [
        (
            name,
            f"{metrics[-1]['loss']:.6f}",
            f"{max(m['peak_memory'] for m in metrics) / 2**20:,.0f} MiB",
            # of a usual step: the first ones compile kernels
            f"{statistics.median(m['tokens'] / m['seconds'] for m in metrics):,.0f}",
        )
        for name, metrics in runs.items()
    ]
    lines = [
        f"{title:<22}" + "".join(f"{cell:>28}" for cell in cells)
        for title, *cells in zip(
            ("", "final loss", "peak memory of a rank", "tokens a second"), *columns, strict=True
        )
    ]
    return "\n".join([*lines, "", f"largest difference in loss over {len(ours)} steps: {difference:.1e}"])
