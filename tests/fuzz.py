"""Calls of any kind against the reference in fp64: python tests/fuzz.py --minutes 10

Each example is a call of the loss or of the log-probabilities: sizes, strides, dtypes, ignored tokens, options, what
is frozen, method, budget, seams of panels and chunks, upstream gradient, and with --ranks R a layout of the
vocabulary over R ranks. A failing one is made as small as it can be and printed as the command that runs it alone.
--device cuda runs the kernels, TRITON_INTERPRET=1 interprets them on the CPU.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
import time
from dataclasses import dataclass, fields, replace
from typing import Any

import hypothesis
import torch
import torch.distributed as dist
from hypothesis import strategies as st
from inputs import IGNORED, OPTIONS, TRAINABLE, Inputs, make_inputs, make_options
from plans import SEAMS, forced_plan
from shards import assert_same_bits, shard_of, whole_of
from tolerance import assert_gradients, assert_log_probs, assert_loss

from cce_dist import linear_cross_entropy, linear_log_probs, reference
from cce_dist.kernels.runtime import INTERPRETED

METHODS = ("recompute", "cached", "fused")
HALVES = ("float16", "bfloat16")
LAYOUTS = ("even", "chunked", "padded")
# the edges of tiles, those of the interpreter's among them
EDGES = (1, 2, 3, 7, 31, 33, 63, 64, 65, 127, 129, 255, 256, 257, 511, 513)


@dataclass(frozen=True)
class Case:
    """A call. ``kind``: of its upstream gradient; ``seams``: whether panels and chunks are small; ``stretch``: what
    the classifier is divided by and the logits' scale multiplied with."""

    n: int
    d: int
    v: int
    dtype: str = "float32"
    function: str = "loss"
    names: tuple[str, ...] = ()
    reduction: str = "mean"
    denominator: float | None = None
    method: str | None = None
    budget: int | str | None = None
    seams: bool = False
    bias: bool | float = False
    ignored: float = 0.0
    spread: float = 1.0
    stretch: int = 1
    kind: str = "random"
    strides: str = "none"
    frozen: tuple[str, ...] = ()
    layout: str | None = None
    seed: int = 0

    def __str__(self) -> str:
        """The arguments that are not the defaults."""
        default = Case(1, 1, 1)
        changed = [f"{f.name}={getattr(self, f.name)!r}" for f in fields(self)
                   if f.name in "ndv" or getattr(self, f.name) != getattr(default, f.name)]  # fmt: skip
        return f"Case({', '.join(changed)})"


def keeps(case: Case) -> bool:
    """Whether methods that keep exponentials take it."""
    return case.dtype != "float16" and not {"softcap", "label_smoothing"} <= set(case.names)


@st.composite
def cases(draw: Any, layouts: bool = False, small: bool = True) -> Case:
    dtypes = ["float32", "float32", "float64", "float16", "bfloat16"] if small else ["float32", *HALVES, "bfloat16"]
    # Triton 3.9's interpreter gets products of transposed bf16 tiles wrong
    dtype = draw(st.sampled_from([x for x in dtypes if not (INTERPRETED and x == "bfloat16")]))
    half = dtype in HALVES
    # a rounding is near or far by chance: of few elements, as of few tokens that count, so may be all
    if half:
        n, d = draw(st.integers(128, 200)), draw(st.sampled_from([48, 56, 63, 64, 65, 72, 80, 96]))
        v = draw(st.one_of(st.sampled_from([x for x in EDGES if x >= 255]), st.integers(200, 600)))
    else:
        least_n, least_d = (1, 1) if dtype == "float64" else (63, 16)
        n = draw(st.one_of(st.sampled_from([x for x in EDGES[:11] if x >= least_n]), st.integers(least_n, 100)))
        d = draw(st.one_of(st.sampled_from([x for x in EDGES[:11] if x >= least_d]), st.integers(least_d, 40)))
        least_v = 1 if dtype == "float64" else 100
        v = draw(st.one_of(st.sampled_from([x for x in EDGES if x >= least_v]), st.integers(least_v, 600)))
    function = draw(st.sampled_from(["loss", "loss", "loss", "log_probs", "log_probs_entropy"]))
    names = (
        draw(st.lists(st.sampled_from(OPTIONS), unique=True))
        if function == "loss"
        else draw(st.lists(st.sampled_from(["logit_scale", "softcap"]), unique=True))
    )
    kind = draw(st.sampled_from(["random", "negative", "strided", "expanded", "scale"]))
    # a classifier's gradient times both would leave fp16
    stretched = "logit_scale" in names and (dtype, kind) != ("float16", "scale")
    stretch = draw(st.sampled_from([1, 64])) if stretched else 1
    # of one class the gradient is 0, and what smoothing adds and takes away again leaves its roundings
    v = max(v, 2) if "label_smoothing" in names else v
    case = Case(
        n, d, v, dtype, function, tuple(sorted(names)),
        bias=draw(st.sampled_from([False, True] if "softcap" in names else [False, True, -30.0])),
        ignored=draw(st.sampled_from([0.0, 0.0, 0.3, 0.5, 1.1])),
        # of the slope of logits far past the cap, 1 less a square, few digits are left, also in the yardstick, and of
        # confident tokens few entries, and of the gradient of one alone few digits of its 1 - p
        spread=draw(st.sampled_from([0.01, 1.0] if half or "softcap" in names or n < 31 else [0.01, 1.0, 8.0])),
        stretch=stretch,
        kind=kind,
        strides=draw(st.sampled_from(["none", "none", "wide rows", "transposed", "batch", "targets"])),
        frozen=tuple(sorted(draw(st.sampled_from([(), (), (), ("hidden",), ("weight",), ("bias",), ("hidden", "bias"),
                                                  ("weight", "bias"), ("hidden", "weight")])))),
        layout=draw(st.sampled_from(LAYOUTS)) if layouts else None,
        seams=draw(st.booleans()),
        budget=draw(st.sampled_from([None, "min", 1 << 24])),
        seed=draw(st.integers(0, 99)),
    )  # fmt: skip
    # exponentials that are kept in 16 bits have another promise
    if function != "loss":
        return replace(case, reduction="none", budget="min" if half else case.budget)
    reduction = draw(st.sampled_from(["mean", "sum", "none"]))
    case = replace(
        case, reduction=reduction, denominator=draw(st.sampled_from([None, 57.5])) if reduction == "mean" else None
    )
    methods = [None, *METHODS] if keeps(case) and not half else ["recompute"]
    method = draw(st.sampled_from([m for m in methods if (m, reduction) != ("fused", "none")]))
    if method == "cached" and case.seams and draw(st.booleans()):
        # a classifier whose gradient has memory to lend
        case = replace(case, d=draw(st.integers(48, 80)), v=draw(st.integers(600, 1300)))
    return replace(case, method=method)


def operands(case: Case, device: torch.device) -> tuple[Inputs, dict[str, Any]]:
    """Tensors of a case, and its options; ignored tokens' hidden states are NaN."""
    dtype = getattr(torch, case.dtype)
    inputs = make_inputs(
        case.n, case.d, case.v, dtype, device=device, bias=case.bias, spread=case.spread, ignored=case.ignored,
        seed=case.seed,
    )  # fmt: skip
    hidden, weight, targets, bias = (None if x is None else x.detach() for x in inputs)
    for tensor in (weight, bias):
        if tensor is not None:
            tensor /= case.stretch
    hidden[targets == IGNORED] = math.nan
    if case.strides == "wide rows":
        hidden, weight = (torch.nn.functional.pad(x, (3, 5))[:, 3:-5] for x in (hidden, weight))
    elif case.strides == "transposed":
        hidden, weight = (x.T.contiguous().T for x in (hidden, weight))
    elif case.strides == "targets":
        targets = torch.stack([targets, targets], 1)[:, 0].int()
    if case.strides == "batch" and case.n % 2 == 0:
        hidden, targets = hidden.view(2, -1, case.d).transpose(0, 1), targets.view(2, -1).T
    leaf = {"hidden": hidden, "weight": weight, "bias": bias}
    for name, tensor in leaf.items():
        if tensor is not None:
            leaf[name] = tensor.detach().requires_grad_(name not in case.frozen)
    inputs = Inputs(leaf["hidden"], leaf["weight"], targets, leaf["bias"])
    frozen = ("token_weight",) if case.method == "fused" else ()
    options = make_options(case.names, inputs, frozen=frozen)
    if "logit_scale" in options:
        options["logit_scale"].data *= case.stretch
    if case.function == "loss":
        options["reduction"] = case.reduction
        if case.denominator is not None:
            options["denominator"] = case.denominator
    return inputs, options


def has_no_truth(inputs: Inputs, options: dict[str, Any]) -> bool:
    """A mean over tokens of which none weighs anything: 0 by our rule, and 0/0 by the reference's."""
    valid = inputs.targets != IGNORED
    if options.get("reduction") != "mean" or not valid.any():
        return False
    weights = [options["token_weight"].detach()[valid]] if "token_weight" in options else []
    weights += [options["class_weight"][inputs.targets[valid].long()]] if "class_weight" in options else []
    return bool(math.prod(weights, start=torch.ones((), device=valid.device)).sum() <= 0)


def upstream_of(case: Case, shape: torch.Size, device: torch.device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(case.seed + 1)
    drawn = torch.rand(shape, generator=generator) * 3 - 1
    # of the loss as a whole none so near 0 that fp16's gradients are no normal numbers, which it rounds twice
    drawn = drawn if shape else drawn.sign() * drawn.abs().clamp(min=0.25)
    if case.dtype == "float16" and case.stretch == 1:
        drawn = drawn * 16
    drawn = drawn.to(device)
    if case.kind == "strided":
        return torch.stack([drawn] * 3, -1)[..., 1]
    return {
        "random": drawn, "negative": -drawn.abs(), "expanded": torch.tensor(0.37, device=device).expand(shape),
        "scale": torch.full(shape, 1024.0, device=device),
    }[case.kind]  # fmt: skip


def check(device: torch.device, case: Case, group: dist.ProcessGroup | None = None) -> bool:
    """Whether the case has a truth; raises AssertionError where it is missed."""
    inputs, options = operands(case, device)
    if has_no_truth(inputs, options):
        return False
    shard, held = None, inputs
    if case.layout is not None:
        assert group is not None
        shard = shard_of(case.layout, case.v, group)
        held = inputs._replace(weight=_rows_of(inputs.weight, shard), bias=_rows_of(inputs.bias, shard))
    leaves = {**held._asdict(), **options}
    leaves = {k: x for k, x in leaves.items() if isinstance(x, torch.Tensor) and x.requires_grad}
    common: dict[str, Any] = {"bias": held.bias, "shard": shard, "memory_budget": case.budget}
    seams = dict(SEAMS[case.method]) if case.seams and case.method else {}
    if case.dtype == "float16":
        # sums of fp16 do not wait for blocks of tokens
        seams.pop("rows", None)
    with forced_plan(**seams):
        if case.function == "loss":
            results: Any = linear_cross_entropy(*held[:3], method=case.method, **common, **options)
        else:
            entropy = case.function == "log_probs_entropy"
            results = linear_log_probs(*held[:3], return_entropy=entropy, **common, **options)
    parts = results if isinstance(results, tuple) else (results,)
    upstream = [upstream_of(case, part.shape, device) for part in parts]
    if case.function == "loss":
        assert_loss(results.detach(), inputs, **options)
    else:
        assert_log_probs(parts[0].detach(), parts[1].detach() if len(parts) == 2 else None, inputs, **options)
    if shard is not None:
        for part in parts:
            assert_same_bits(part, shard.group)
    if not leaves:
        assert not any(part.requires_grad for part in parts)
        return True
    found = dict(zip(leaves, torch.autograd.grad(parts, [*leaves.values()], upstream), strict=True))
    if shard is not None:
        for name in ("weight", "bias"):
            if name in found:
                assert not found[name][shard.classes :].any(), f"padding has a gradient of {name}"
                found[name] = whole_of(found[name], shard)
    how: dict[str, Any] = {}
    if case.function != "loss":
        how["function"] = _log_probs if len(parts) == 2 else _log_probs_alone
    gradients = [found.get(name) for name in TRAINABLE]
    assert_gradients(gradients, inputs, upstream[0] if case.function == "loss" else upstream, **how, **options)
    if "hidden" in found:
        assert not found["hidden"][inputs.targets == IGNORED].any(), "an ignored token has a gradient"
    return True


def _rows_of(tensor: torch.Tensor | None, shard: Any) -> torch.Tensor | None:
    if tensor is None:
        return None
    rows = torch.full((shard.rows, *tensor.shape[1:]), math.nan, dtype=tensor.dtype, device=tensor.device)
    rows[: shard.classes] = tensor.detach()[shard.start : shard.start + shard.classes]
    return rows.requires_grad_(tensor.requires_grad)


def _log_probs(product: torch.Tensor, targets: torch.Tensor, **options: Any) -> Any:
    return reference.log_probs(product, targets, **options)


def _log_probs_alone(product: torch.Tensor, targets: torch.Tensor, **options: Any) -> Any:
    return reference.log_probs(product, targets, **options)[0]


def check_on_ranks(group: dist.ProcessGroup, device: torch.device, case: Case) -> None:
    check(device, case, group)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--minutes", type=float, default=10.0)
    add("--seed", type=int, default=0, help="of the first thousand examples; each further thousand has the next")
    add("--device", default="cpu")
    add("--ranks", type=int, default=1, help="over which the vocabulary is spread, gloo's")
    add("--case", help="one case, as a failure prints it")
    args = parser.parse_args()
    device = torch.device(args.device)
    torch.set_num_threads(1)
    ranks = None
    if args.ranks > 1:
        from pool import SpawnedRanks

        ranks = SpawnedRanks()

    def run(case: Case) -> bool:
        if ranks is None:
            return check(device, case)
        inputs, options = operands(case, torch.device("cpu"))
        if has_no_truth(inputs, options):
            return False
        ranks.run(check_on_ranks, case, ranks=args.ranks)
        return True

    if args.case:
        run(eval(args.case, {"Case": Case}))
        print("right")
        return
    end, tried, without = time.monotonic() + 60 * args.minutes, 0, 0
    small = device.type == "cpu"
    try:
        for seed in itertools.count(args.seed):

            @hypothesis.seed(seed)
            @hypothesis.settings(
                max_examples=1000, deadline=None, database=None, print_blob=False,
                suppress_health_check=list(hypothesis.HealthCheck),
            )  # fmt: skip
            @hypothesis.given(cases(layouts=args.ranks > 1, small=small))
            def example(case: Case) -> None:
                nonlocal tried, without
                # what is left of a thousand passes at once
                if time.monotonic() >= end:
                    return
                try:
                    tried, without = tried + 1, without + (not run(case))
                except AssertionError as error:
                    alone = f'python tests/fuzz.py --device {device} --ranks {args.ranks} --case "{case}"'
                    raise AssertionError(f"{error}\n{alone}") from error

            example()
            print(f"seed {seed}: {tried} cases, {without} of them without a truth", flush=True)
            if time.monotonic() >= end:
                return
    except BaseException:
        print(f"after {tried} cases, seed {seed}:", file=sys.stderr)
        raise
    finally:
        if ranks is not None:
            ranks.close()


if __name__ == "__main__":
    main()
