"""Time, memory and accuracy of the loss beside other implementations, against the floor that the same run measures.

    python launch/benchmark.py --tokens 8192 --model llama-3-8b gemma-2-2b --budgets min 512 2048 --picture out.png
    torchrun --nproc-per-node 2 launch/benchmark.py --shape 8192x4096x128256
    python launch/benchmark.py --shape 2048x512x32768 --dtype float32

The floor is what the library's matrix products take: the three products of the materialised path back to back (6NVD
operations), and the first of them (2NVD) for a forward alone. A chip's clock wanders, so every row takes turns with
the floor, and its ratios are to the median of its own floor turns. Peaks are the allocator's, beyond the inputs,
gradients included. Errors are relative norms against fp64 on a smaller problem of the same width, half of whose
tokens are confident. Under torchrun each rank holds its slice of the vocabulary, the floor is divided by the number
of ranks, and the slowest rank counts. A row that fails says why, and the others go on.
"""

from __future__ import annotations

import argparse
import gc
import importlib.metadata
import importlib.util
import itertools
import json
import math
import os
import platform
import statistics
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import peers
import torch
import torch.distributed as dist
from tqdm import tqdm

from cce_dist import VocabShard, linear_cross_entropy, reference

# (hidden width, vocabulary) of published heads
MODELS = {
    "llama-3-8b": (4096, 128256),
    "qwen3-8b": (4096, 151936),
    "gemma-2-2b": (2304, 256000),
    "deepseek-v3": (7168, 129280),
}
METHODS = ("recompute", "cached", "fused")
# steps before the first that counts: kernels are compiled and tuned
WARMUP = 3

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Shape = tuple[int, int, int]


@dataclass
class Row:
    """An implementation and what was measured of it."""

    name: str
    make: peers.Make
    kind: str
    # how many ranks share the vocabulary
    ranks: int = 1
    floor_seconds: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    forward_seconds: list[float] = field(default_factory=list)
    peak: int = 0
    errors: dict[str, float] = field(default_factory=dict)
    failure: str | None = None

    def ratio(self) -> float:
        return statistics.median(self.seconds) / (statistics.median(self.floor_seconds) / self.ranks)

    def forward_ratio(self) -> float:
        return statistics.median(self.forward_seconds) / (statistics.median(self.floor_seconds) / 3 / self.ranks)

    def figures(self) -> dict[str, Any]:
        kept = {k: v for k, v in vars(self).items() if k != "make"}
        if self.failure is not None:
            return kept
        return {**kept, "ratio": self.ratio(), "forward_ratio": self.forward_ratio()}


class Machine:
    """Clocks and memory of the device at hand, and the ranks that work together."""

    def __init__(self) -> None:
        self.cuda = torch.cuda.is_available()
        self.rank, self.ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        self.device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if self.cuda else torch.device("cpu")
        if self.cuda:
            torch.cuda.set_device(self.device)
            self.ballast = torch.randn(10240, 10240, device=self.device, dtype=torch.bfloat16)
        if self.ranks > 1:
            backend, device = ("nccl", self.device) if self.cuda else ("gloo", None)
            # not too long a wait for a rank that failed alone
            dist.init_process_group(backend, device_id=device, timeout=timedelta(minutes=3))
        self.together = torch.zeros(1, device=self.device)

    def name(self) -> str:
        if self.cuda:
            return torch.cuda.get_device_name(self.device)
        return f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"

    def meet(self) -> None:
        """Work queued behind this starts when every rank has come so far."""
        if self.ranks > 1:
            dist.all_reduce(self.together)

    def largest(self, value: float) -> float:
        if self.ranks == 1:
            return value
        values = torch.tensor(value, dtype=torch.float64, device=self.device)
        dist.all_reduce(values, dist.ReduceOp.MAX)
        return values.item()

    def seconds(self, function: Callable[[], Any]) -> float:
        """Of the slowest rank."""
        if not self.cuda:
            self.meet()
            start = time.perf_counter()
            function()
            return self.largest(time.perf_counter() - start)
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        # work ahead in the queue, as in training: the device is timed, not the host's launches, and every row finds
        # the chip as warm, whatever ran before it
        for _ in range(8):
            torch.mm(self.ballast, self.ballast)
        # one chip's ballast ends later than another's
        self.meet()
        begin.record()
        function()
        end.record()
        torch.cuda.synchronize()
        return self.largest(begin.elapsed_time(end) / 1e3)

    def peak(self, function: Callable[[], Any]) -> int:
        """Bytes that the allocator held at most beyond what it held before, on the rank that held most."""
        if not self.cuda:
            return int(self.largest(_peak_on_cpu(function)))
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        function()
        torch.cuda.synchronize()
        return int(self.largest(torch.cuda.max_memory_allocated() - before))

    def forget(self) -> None:
        gc.collect()
        if self.cuda:
            torch.cuda.empty_cache()


def _peak_on_cpu(function: Callable[[], Any]) -> int:
    """What torch's CPU allocator gave out at most: the profiler notes each allocation and each release, inside of
    operators too. Pages that the process got from the system would depend on what ran before."""
    # it announces itself
    os.environ.setdefault("KINETO_LOG_LEVEL", "9")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as record:
        function()
    events = record.profiler.kineto_results.events()
    changes = [event.nbytes() for event in events if event.name() == "[memory]"]
    return max(itertools.accumulate(changes, initial=0))


def inputs(shape: Shape, args: argparse.Namespace, device: torch.device, confident: bool = False) -> Tensors:
    """The same on every rank: hidden [N, D], weight [V, D], targets [N]."""
    tokens, width, vocab = shape
    generator = torch.Generator(device).manual_seed(0)
    dtype = getattr(torch, args.dtype)
    # logits of a trained model's size: standard deviation about 2
    scale = 2.0**0.5 * width**-0.25
    hidden = torch.randn(tokens, width, device=device, generator=generator) * scale
    weight = torch.empty(vocab, width, device=device, dtype=dtype)
    for rows in weight.split(16384):
        rows.copy_(torch.randn(rows.shape, device=device, generator=generator) * scale)
    targets = torch.randint(vocab, (tokens,), device=device, generator=generator)
    if confident:
        # raises the logit of every second token's target by up to 20
        rise = torch.linspace(0, 20, len(hidden[::2]), device=device) / (2 * width**0.5)
        hidden[::2] += weight[targets[::2]].float() * rise[:, None]
    targets[torch.rand(tokens, device=device, generator=generator) < args.ignored] = -100
    return hidden.to(dtype), weight, targets


def floor_of(hidden: torch.Tensor, weight: torch.Tensor) -> Callable[[], torch.Tensor]:
    """The three products of the materialised path, a chunk of tokens at a time, into memory that is there already."""
    vocab = len(weight)
    n = max(1, min(len(hidden), (1 << 31) // vocab))
    logits = torch.empty(n, vocab, dtype=hidden.dtype, device=hidden.device)
    d_hidden, d_weight = torch.empty_like(hidden[:n]), torch.empty_like(weight)
    # random data: a chip runs faster on zeros
    logits.normal_()

    def run() -> torch.Tensor:
        for e in hidden.split(n):
            x = logits[: len(e)]
            torch.mm(e, weight.T, out=x)
            torch.mm(x, weight, out=d_hidden[: len(e)])
            torch.mm(x.T, e, out=d_weight)
        return d_weight

    return run


class Problem:
    """A shape's inputs, its floor, and the smaller problem whose truth is known."""

    def __init__(self, shape: Shape, args: argparse.Namespace, machine: Machine) -> None:
        tokens, width, vocab = shape
        self.vocab, self.repeat, self.machine = vocab, args.repeat, machine
        self.tensors = inputs(shape, args, machine.device)
        self.floor = floor_of(*self.tensors[:2])
        self.small = inputs((min(tokens, 2048), width, min(vocab, 32768)), args, machine.device, confident=True)
        e, c = (x.double().requires_grad_() for x in self.small[:2])
        loss = reference.linear_cross_entropy(e, c, self.small[2])
        self.truth: Tensors = (loss.detach(), *torch.autograd.grad(loss, (e, c)))  # type: ignore[assignment]

    def measure(self, row: Row, tick: Callable[[], object]) -> None:
        machine = self.machine
        row.errors = self.errors(row)
        tick()
        loss, (e, c, t) = self.local(row, self.tensors)
        e, c = e.detach().requires_grad_(), c.detach().requires_grad_()

        def step() -> None:
            # gradients are made anew each time, as with set_to_none
            e.grad = c.grad = None
            loss(e, c, t).backward()

        def forward() -> None:
            # without requires_grad: some compute gradients in forward, even where none are wanted
            with torch.no_grad():
                loss(e.detach(), c.detach(), t)

        for function in (step, forward, self.floor):
            for _ in range(WARMUP if machine.cuda else 1):
                function()
        e.grad = c.grad = None
        row.peak = machine.peak(step)
        tick()
        for _ in range(self.repeat):
            row.floor_seconds.append(machine.seconds(self.floor))
            row.seconds.append(machine.seconds(step))
            row.forward_seconds.append(machine.seconds(forward))
            tick()

    def local(self, row: Row, tensors: Tensors) -> tuple[peers.Loss, Tensors]:
        """The row's loss, and the tensors with the part of the weight that it gets on this rank."""
        hidden, weight, targets = tensors
        shard = self.shard(row, len(weight))
        rows = weight if shard is None else weight[shard.start : shard.stop].clone()
        return row.make(shard), (hidden, rows, targets)

    def shard(self, row: Row, vocab: int) -> VocabShard | None:
        if row.ranks == 1:
            return None
        # the loss has the same bits for every group size where shards are whole tiles; peers want equal shards
        return VocabShard.even(vocab, dist.group.WORLD, multiple_of=1 if row.kind == "peer" else 256)

    def errors(self, row: Row) -> dict[str, float]:
        loss, (e, c, t) = self.local(row, self.small)
        e, c = e.detach().requires_grad_(), c.detach().requires_grad_()
        value = loss(e, c, t)
        value.backward()
        true_loss, true_e, true_c = self.truth
        shard = self.shard(row, len(true_c))
        if shard is not None:
            true_c = true_c[shard.start : shard.stop]

        def error(got: torch.Tensor | None, true: torch.Tensor) -> float:
            assert got is not None
            return self.machine.largest(((got.double() - true).norm() / true.norm()).item())

        return {
            "loss": error(value.detach(), true_loss),
            "d_hidden": error(e.grad, true_e),
            "d_weight": error(c.grad, true_c),
        }


def ours(**options: Any) -> peers.Make:
    given = {name: value for name, value in options.items() if value is not None}

    def make(shard: VocabShard | None) -> peers.Loss:
        return lambda e, c, t: linear_cross_entropy(e, c, t, shard=shard, **given)

    return make


def rows_of(args: argparse.Namespace, ranks: int) -> list[Row]:
    rows = [Row("cce_dist", ours(), "method", ranks)]
    if ranks > 1:
        rows.insert(0, Row("cce_dist, 1 rank", ours(), "method"))
    rows += [Row(method, ours(method=method), "method", ranks) for method in METHODS]
    for budget in args.budgets:
        name = budget if budget == "min" else f"{budget >> 20} MiB"
        rows.append(Row(f"budget {name}", ours(memory_budget=budget), "budget", ranks))
    known = peers.PEERS if ranks == 1 else peers.SHARDED
    names = {"all": list(known), "none": []}.get(args.peers, args.peers.split(","))

    def unknown(_: VocabShard | None) -> peers.Loss:
        raise ValueError(f"known on {ranks} ranks: {', '.join(known)}")

    return rows + [Row(name, known.get(name, unknown), "peer", ranks) for name in names]


def run(rows: list[Row], shape: Shape, args: argparse.Namespace, machine: Machine, bar: tqdm[Any]) -> None:
    problem = Problem(shape, args, machine)
    for row in rows:
        bar.set_postfix_str(row.name)
        before = bar.n
        try:
            problem.measure(row, bar.update)
        # whatever another library may raise is that row's result
        except Exception as error:
            lines = str(error).strip().splitlines()
            row.failure = f"{type(error).__name__}: {lines[0] if lines else ''}"
        bar.update(before + turns(args) - bar.n)
        with suppress(RuntimeError):
            machine.forget()


def turns(args: argparse.Namespace) -> int:
    return 2 + args.repeat


def table(shape: Shape, rows: list[Row], args: argparse.Namespace, machine: Machine) -> str:
    tokens, width, vocab = shape
    done = [row for row in rows if row.failure is None]
    lines = [
        "",
        f"{machine.name()} x {machine.ranks}, torch {torch.__version__}, {tokens} x {width} x {vocab} {args.dtype}, "
        f"{args.ignored:.0%} ignored; median of {args.repeat}",
    ]
    if done:
        floor = statistics.median(itertools.chain.from_iterable(row.floor_seconds for row in done))
        speed = 6 * tokens * width * vocab / floor / 1e12
        lines.append(f"floor: 6NVD in {floor * 1e3:.2f} ms, {speed:.3g} TFLOP/s")
    lines += [
        f"{'':18} {'forward and backward':^17} {'forward alone':^17} {'peak':>9} {'to pytorch':^13}"
        f" {'error against fp64':^26}",
        f"{'':18} {'ms':>9} {'floor':>7} {'ms':>9} {'floor':>7} {'MiB':>9} {'time':>6} {'peak':>6}"
        f" {'loss':>8} {'dE':>8} {'dC':>8}",
    ]
    whole = next((row for row in done if row.name == "pytorch"), None)
    for row in rows:
        if row.failure is not None:
            lines.append(f"{row.name:18} {row.failure}")
            continue
        # by way of their floors: the two ran at different times
        times, peak = (row.ratio() / whole.ratio(), row.peak / whole.peak) if whole else (math.nan, math.nan)
        both, forward = statistics.median(row.seconds), statistics.median(row.forward_seconds)
        lines.append(
            f"{row.name:18} {both * 1e3:9.2f} {row.ratio():7.3f} {forward * 1e3:9.2f} {row.forward_ratio():7.3f}"
            f" {row.peak / 2**20:9.1f} {times:6.3f} {peak:6.3f} "
            + " ".join(f"{error:8.1e}" for error in row.errors.values())
        )
    return "\n".join(lines)


def picture(path: Path, results: dict[Shape, list[Row]], machine: Machine) -> None:
    """Time against peak memory, a panel for each shape: a point for each row, a line through our budgets."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8 * len(results), 6), layout="constrained")
    for axes, (shape, rows) in zip(figure.subplots(1, len(results), squeeze=False)[0], results.items(), strict=True):
        done = [row for row in rows if row.failure is None]
        styles = {"method": ("o", "tab:blue"), "budget": (".", "tab:blue"), "peer": ("s", "tab:orange")}
        for row in done:
            x, y = row.peak / 2**20, row.ratio()
            marker, colour = styles[row.kind]
            axes.plot(x, y, marker, color=colour)
            axes.annotate(row.name, (x, y), xytext=(5, 4), textcoords="offset points", fontsize=8, color=colour)
        curve = sorted((row.peak / 2**20, row.ratio()) for row in done if row.kind == "budget")
        axes.plot([x for x, _ in curve], [y for _, y in curve], "-", color="tab:blue", alpha=0.6, label="our budgets")
        axes.margins(0.15)
        axes.axhline(1, color="grey", linestyle="--", label="floor: the three products")
        axes.set(xscale="log", yscale="log", xlabel="peak beyond the inputs, gradients included (MiB)")
        axes.set(ylabel="forward and backward, to the floor", title=" x ".join(map(str, shape)))
        axes.grid(alpha=0.3, which="both")
        axes.legend()
    figure.suptitle(f"{machine.name()} x {machine.ranks}, torch {torch.__version__}")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def save(path: Path, results: dict[Shape, list[Row]], args: argparse.Namespace, machine: Machine) -> None:
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


def parse(arguments: list[str] | None) -> argparse.Namespace:
    def shape(text: str) -> Shape:
        tokens, width, vocab = map(int, text.split("x"))
        return tokens, width, vocab

    def budget(text: str) -> int | str:
        return text if text == "min" else int(float(text) * 2**20)

    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    several: Any = {"nargs": "+", "action": "extend"}
    parser.add_argument(
        "--shape", type=shape, default=[], help="tokens x hidden width x classes: 8192x4096x128256", **several
    )
    parser.add_argument("--tokens", type=int, help="with each head of --model, or of --hidden and --vocab", **several)
    parser.add_argument("--hidden", type=int, **several)
    parser.add_argument("--vocab", type=int, **several)
    parser.add_argument("--model", choices=MODELS, help="hidden width and vocabulary of a published head", **several)
    parser.add_argument(
        "--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16" if cuda else "float32"
    )
    parser.add_argument("--ignored", type=float, default=0.0, help="share of the targets that are ignored")
    parser.add_argument("--budgets", type=budget, default=[], metavar="MIB", help="memory budgets, or min", **several)
    parser.add_argument(
        "--peers", default="all", help=f"all, none, or some of {','.join(peers.PEERS | peers.SHARDED)}"
    )
    parser.add_argument("--repeat", type=int, default=15 if cuda else 5)
    parser.add_argument("--json", type=Path, help="file for all figures")
    parser.add_argument("--picture", type=Path, help="file for a picture of time against memory")
    args = parser.parse_args(arguments)
    if args.picture and importlib.util.find_spec("matplotlib") is None:
        parser.error("--picture needs matplotlib: pip install matplotlib")
    if not args.shape or args.tokens or args.hidden or args.vocab or args.model:
        tokens, width, vocab = (8192, 4096, 128256) if cuda else (2048, 512, 32768)
        heads = [MODELS[model] for model in args.model or []]
        if args.hidden or args.vocab or not heads:
            heads += itertools.product(args.hidden or [width], args.vocab or [vocab])
        args.shape = args.shape + [(n, *head) for n in args.tokens or [tokens] for head in heads]
    return args


def main(arguments: list[str] | None = None) -> None:
    args = parse(arguments)
    machine = Machine()
    results = {shape: rows_of(args, machine.ranks) for shape in args.shape}
    steps = turns(args) * sum(map(len, results.values()))
    with tqdm(total=steps, disable=machine.rank > 0) as bar:
        for shape, rows in results.items():
            run(rows, shape, args, machine, bar)
            if machine.rank == 0:
                bar.write(table(shape, rows, args, machine))
                if args.json:
                    save(args.json, results, args, machine)
    if machine.rank == 0 and args.picture:
        picture(args.picture, results, machine)
    if machine.ranks > 1:
        # gloo's ranks must not leave while another still works
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
