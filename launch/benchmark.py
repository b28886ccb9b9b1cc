"""Time, memory and accuracy of the loss beside other implementations, against the floor that the same run measures.

    python launch/benchmark.py --tokens 8192 --model llama-3-8b gemma-2-2b --budgets min 512 2048 --picture out.png
    torchrun --nproc-per-node 2 launch/benchmark.py --shape 8192x4096x128256
    python launch/benchmark.py --shape 2048x512x32768 --dtype float32

The floor is what the library's matrix products take, back to back: the three of the materialised path (6NVD
operations), with the logits twice for a method that computes them twice (8NVD), and the logits alone (2NVD) for a
forward alone. A chip's clock wanders, so every row takes turns with its floors, and its ratios are to their medians
in its own turns. Peaks are the allocator's, beyond the inputs, gradients included. Errors are relative norms against
fp64 on a smaller problem of the same width, half of whose tokens are confident. Under torchrun each rank holds its
slice of the vocabulary, the floors are divided by the number of ranks, and the slowest rank counts; on GPUs a trace
of one step says in which share of its time a rank communicates, or waits for another to do so, and computes nothing
(exposed). With --sequence-parallel our rows get a rank's slice of the hidden states; peers keep all of them. A row
that fails says why, and the others go on.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib.util
import itertools
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import peers
import torch
import torch.distributed as dist
from comparison import Results, Row, picture, save, table
from machine import Machine
from tqdm import tqdm

from cce_dist import VocabShard, linear_cross_entropy, reference

# (hidden width, vocabulary) of published heads
MODELS = {
    "llama-3-8b": (4096, 128256),
    "qwen3-8b": (4096, 151936),
    "gemma-2-2b": (2304, 256000),
    "deepseek-v3": (7168, 129280),
}
# and their matrix products
METHODS = {"recompute": 4, "cached": 3, "fused": 3}
# steps before the first that counts: kernels are compiled and tuned
WARMUP = 3

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Shape = tuple[int, int, int]


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


def floors_of(hidden: torch.Tensor, weight: torch.Tensor) -> dict[int, Callable[[], torch.Tensor]]:
    """So many products, a chunk of tokens at a time, into memory that is there already: the logits alone (1), the
    three of the materialised path, and these with the logits twice (4)."""
    vocab = len(weight)
    n = max(1, min(len(hidden), (1 << 31) // vocab))
    logits = torch.empty(n, vocab, dtype=hidden.dtype, device=hidden.device)
    d_hidden, d_weight = torch.empty_like(hidden[:n]), torch.empty_like(weight)
    # random data: a chip runs faster on zeros
    logits.normal_()

    def run(products: int) -> torch.Tensor:
        for e in hidden.split(n):
            x = logits[: len(e)]
            torch.mm(e, weight.T, out=x)
            if products == 4:
                torch.mm(e, weight.T, out=x)
            if products > 1:
                torch.mm(x, weight, out=d_hidden[: len(e)])
                torch.mm(x.T, e, out=d_weight)
        return d_weight

    return {products: functools.partial(run, products) for products in (1, 3, 4)}


class Problem:
    """A shape's inputs, its floor, and the smaller problem whose truth is known."""

    def __init__(self, shape: Shape, args: argparse.Namespace, machine: Machine) -> None:
        tokens, width, vocab = shape
        self.vocab, self.repeat, self.machine = vocab, args.repeat, machine
        self.sequence_parallel = args.sequence_parallel
        self.trace = args.trace and args.trace / f"{tokens}x{width}x{vocab}"
        self.tensors = inputs(shape, args, machine.device)
        self.floors = floors_of(*self.tensors[:2])
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

        floor, forward_floor = self.floors[row.products], self.floors[1]
        for function in (step, forward, floor):
            for _ in range(WARMUP if machine.cuda else 1):
                function()
        e.grad = c.grad = None
        row.peak = machine.peak(step)
        if machine.cuda and row.ranks > 1:
            row.exposed = machine.exposed(step, self.trace and self.trace / re.sub(r"\W+", "-", row.name))
        tick()
        for _ in range(self.repeat):
            row.floor_seconds.append(machine.seconds(floor))
            row.seconds.append(machine.seconds(step))
            row.forward_floor_seconds.append(machine.seconds(forward_floor))
            row.forward_seconds.append(machine.seconds(forward))
            tick()

    def local(self, row: Row, tensors: Tensors) -> tuple[peers.Loss, Tensors]:
        """The row's loss, and the parts of hidden states and weight that it gets on this rank, with all targets."""
        hidden, weight, targets = tensors
        shard = self.shard(row, len(weight))
        if shard is None:
            return row.make(None), tensors
        rows = weight[shard.start : shard.stop].clone()
        return row.make(shard), (self.tokens(shard, hidden), rows, targets)

    def tokens(self, shard: VocabShard, hidden: torch.Tensor) -> torch.Tensor:
        """This rank's, of [N, D]."""
        if not shard.sequence_parallel:
            return hidden
        return hidden.tensor_split(self.machine.ranks)[self.machine.rank]

    def shard(self, row: Row, vocab: int) -> VocabShard | None:
        if row.ranks == 1:
            return None
        if row.kind == "peer":
            return VocabShard.even(vocab, dist.group.WORLD)
        # the loss has the same bits for every group size where shards are whole tiles; peers want equal shards
        shard = VocabShard.even(vocab, dist.group.WORLD, multiple_of=256)
        return dataclasses.replace(shard, sequence_parallel=self.sequence_parallel)

    def errors(self, row: Row) -> dict[str, float]:
        loss, (e, c, t) = self.local(row, self.small)
        e, c = e.detach().requires_grad_(), c.detach().requires_grad_()
        value = loss(e, c, t)
        value.backward()
        true_loss, true_e, true_c = self.truth
        shard = self.shard(row, len(true_c))
        if shard is not None:
            true_e, true_c = self.tokens(shard, true_e), true_c[shard.start : shard.stop]

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
    rows += [Row(name, ours(method=name), "method", ranks, products) for name, products in METHODS.items()]
    for budget in args.budgets:
        name = "min" if budget == "min" else f"{budget / 2**20:g} MiB"
        rows.append(Row(f"budget {name}", ours(memory_budget=budget), "budget", ranks, 4 if budget == "min" else 3))
    known = peers.PEERS if ranks == 1 else peers.SHARDED
    return rows + [Row(name, known[name], "peer", ranks) for name in known if name in args.peers]


def run(rows: list[Row], shape: Shape, args: argparse.Namespace, machine: Machine, bar: tqdm[Any]) -> None:
    problem = None
    for row in rows:
        bar.set_postfix_str(row.name)
        before = bar.n
        try:
            problem = problem or Problem(shape, args, machine)
            problem.measure(row, bar.update)
        # whatever another library may raise is that row's result
        except Exception as error:
            lines = str(error).strip().splitlines()
            row.failure = f"{type(error).__name__}: {lines[0] if lines else ''}"
        bar.update(before + turns(args) - bar.n)
        # a device that failed may fail again
        with suppress(RuntimeError):
            machine.forget()


def turns(args: argparse.Namespace) -> int:
    """Of the progress bar, for a row: its errors, its peak, and each round."""
    return 2 + args.repeat


def parse(arguments: list[str] | None) -> argparse.Namespace:
    def shape(text: str) -> Shape:
        tokens, width, vocab = map(int, text.split("x"))
        return tokens, width, vocab

    def budget(text: str) -> int | str:
        return text if text == "min" else int(float(text) * 2**20)

    known = list(dict.fromkeys([*peers.PEERS, *peers.SHARDED]))

    def chosen(text: str) -> list[str]:
        names = {"all": known, "none": []}.get(text, text.split(","))
        if unknown := set(names).difference(known):
            raise argparse.ArgumentTypeError(f"no {', '.join(sorted(unknown))} among {', '.join(known)}")
        return names

    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    several: Any = {"nargs": "+", "action": "extend"}
    add = parser.add_argument
    add("--shape", type=shape, default=[], help="tokens x hidden width x classes: 8192x4096x128256", **several)
    add("--tokens", type=int, default=[], help="with each head of --model, or of --hidden and --vocab", **several)
    add("--hidden", type=int, default=[], **several)
    add("--vocab", type=int, default=[], **several)
    add("--model", choices=MODELS, default=[], help="hidden width and classes of a published head", **several)
    add("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16" if cuda else "float32")
    add("--ignored", type=float, default=0.0, help="share of the targets that are ignored")
    add("--sequence-parallel", action="store_true", help="our rows get a rank's slice of the hidden states")
    add("--budgets", type=budget, default=[], metavar="MIB", help="memory budgets in MiB, or min", **several)
    add("--peers", type=chosen, default=known, metavar="NAME,NAME", help=f"all, none, or of {', '.join(known)}")
    add("--repeat", type=int, default=15 if cuda else 5)
    add("--json", type=Path, help="file for all figures")
    add("--trace", type=Path, metavar="FOLDER", help="for Chrome traces of a step of each row of several GPUs")
    add("--picture", type=Path, help="file for a picture of time against memory")
    args = parser.parse_args(arguments)
    if args.picture and importlib.util.find_spec("matplotlib") is None:
        parser.error("--picture needs matplotlib: pip install matplotlib")
    if args.tokens or args.hidden or args.vocab or args.model or not args.shape:
        n, d, v = (8192, 4096, 128256) if cuda else (2048, 512, 32768)
        heads = [MODELS[model] for model in args.model]
        if args.hidden or args.vocab or not heads:
            heads += itertools.product(args.hidden or [d], args.vocab or [v])
        args.shape += [(tokens, *head) for tokens in args.tokens or [n] for head in heads]
    return args


def main(arguments: list[str] | None = None) -> None:
    args = parse(arguments)
    machine = Machine()
    rows_a_shape = len(rows_of(args, machine.ranks))
    results: Results = {}
    with tqdm(total=len(args.shape) * rows_a_shape * turns(args), disable=machine.rank > 0) as bar:
        for shape in args.shape:
            rows = rows_of(args, machine.ranks)
            run(rows, shape, args, machine, bar)
            results[shape] = rows
            if machine.rank == 0:
                bar.write(table(shape, rows, args, machine))
                if args.json:
                    save(args.json, results, args, machine)
    if machine.rank == 0 and args.picture:
        picture(args.picture, results, machine)
    machine.leave()


if __name__ == "__main__":
    main()
