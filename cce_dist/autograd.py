"""The operation: kernels and collectives in their order. The only file that knows both."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from .kernels.config import TILE_V, tiles_for
from .kernels.gradient import RowState, column_sums, panel_gradient
from .kernels.product import hidden_gradient, weight_gradient
from .kernels.rows import pack_order, packing, scale_rows, take_rows, unpacking
from .kernels.runtime import SecondStream, cdiv, round_up, target_of
from .kernels.statistics import TileStatistics, panel_statistics, sum_bits
from .kernels.target import ClassSums, class_sums, drop_targets, target_logits, target_rows
from .parallel.collectives import all_reduce, gather_slices, rank_and_size, scatter_sums
from .parallel.merge import merge_statistics
from .parallel.shard import VocabShard
from .planner import Plan, token_chunk

# exp(64), summed over a vocabulary and multiplied by a classifier, is far from the end of fp32
SAFE = 64.0


@dataclass(frozen=True)
class MainGrad:
    """A gradient in fp32 that a parameter carries and that grows in place, as Megatron's ``main_grad`` does."""

    tensor: torch.Tensor
    parameter: torch.Tensor


@dataclass(frozen=True)
class LossOptions:
    """What travels below ``functional``."""

    shard: VocabShard
    ignore_index: int
    plan: Plan
    # tokens of each rank's slice of the hidden states; None where every rank has all of them
    slices: tuple[int, ...] | None = None
    main_grad: MainGrad | None = None


@dataclass
class _Operands:
    """One rank's matrices, the rows packed (see kernels/rows.py), and the tokens' places and targets."""

    hidden: Callable[[], torch.Tensor] | None
    c: torch.Tensor
    bias: torch.Tensor | None
    ids: torch.Tensor
    order: torch.Tensor
    count: torch.Tensor
    options: LossOptions
    # whether slices that were gathered stay, as ``whole``: those of frozen hidden states, since a rank whose
    # classifier is frozen too takes no part in backward, where the others could not gather without it
    keep: bool = False
    whole: torch.Tensor | None = None

    @classmethod
    def start(
        cls,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        options: LossOptions,
        *,
        targets: torch.Tensor | None = None,
        places: tuple[torch.Tensor, ...] = (),
        whole: torch.Tensor | None = None,
        keep: bool = False,
    ) -> _Operands:
        """From ``targets``, or from the ``places`` that they came to. The ranks' slices of the hidden states are on
        their way until ``e`` is asked for, unless they came before and were kept as ``whole``."""
        shard, gathered = options.shard, lambda: hidden if whole is None else whole
        if options.slices is not None and whole is None:
            gathered = gather_slices(hidden, options.slices, shard.group)  # collective
        ids, order, count = places if targets is None else pack_order(targets, options.ignore_index)
        bias = None if bias is None else bias[: shard.classes]
        return cls(gathered, weight[: shard.classes], bias, ids, order, count, options, keep)

    @functools.cached_property
    def e(self) -> torch.Tensor:
        index, slices = packing(self.ids, self.order), self.options.slices
        if slices is not None and min(slices) < max(slices):
            # shorter slices have gaps behind them
            starts = (torch.arange(size, device=index.device) + r * max(slices) for r, size in enumerate(slices))
            index = torch.where(index >= 0, torch.cat([*starts])[index], -1)
        assert self.hidden is not None
        whole, self.hidden = self.hidden(), None
        self.whole = whole if self.keep and slices is not None else None
        return take_rows(whole, index)

    @property
    def shard(self) -> VocabShard:
        return self.options.shard

    @property
    def wide(self) -> torch.dtype:
        return torch.promote_types(self.c.dtype, torch.float32)

    @property
    def num_rows(self) -> int:
        return len(self.ids)

    def chunks(self, step: int) -> Iterator[slice]:
        starts = range(0, self.num_rows, max(1, step))
        return (slice(start, min(start + step, self.num_rows)) for start in starts)

    def statistics_chunk(self) -> int:
        # from the whole vocabulary's size, so that every rank walks the same chunks
        return token_chunk(self.shard.vocab_size, tiles_for(target_of(self.c.device), self.c.dtype).BLOCK_V)

    def drop(self) -> None:
        """Frees the packed rows."""
        self.__dict__.pop("e", None)

    def live(self, rows: slice) -> torch.Tensor:
        return torch.arange(rows.start, rows.stop, device=self.c.device) < self.count

    def in_order(self, losses: torch.Tensor) -> torch.Tensor:
        """Packed rows' losses -> the tokens', 0 for ignored ones."""
        n = len(self.order)
        losses = torch.where(self.live(slice(0, n)), losses[:n], 0)
        return torch.empty_like(losses).scatter_(0, self.order, losses)


class TokenLosses(torch.autograd.Function):
    """The loss of each token, by the methods ``recompute`` and ``cached``.

    | tensor | shape | dtype |
    |---|---|---|
    | hidden | [N, D] | fp32, bf16, fp16, fp64 |
    | weight | [V, D] | hidden's |
    | bias | [V] or None | hidden's |
    | targets | [N] | int64 |
    | losses | [N] | fp32 (fp64 for fp64) |

    Forward: ``loss = lse - z`` with ``x = E C^T + b``, ``lse`` the log of the sum of ``exp(x)`` over the whole
    vocabulary and ``z`` the target's logit; 0 for an ignored token. Backward, with ``g`` the upstream gradient:
    ``dx = (exp(x - lse) - onehot) g``, ``dE = dx C`` summed over ranks, ``dC = dx^T E``, ``db`` the sum of ``dx``
    over tokens, a panel of columns at a time. ``cached`` keeps ``P = exp(x - r)`` of the first columns, for a
    reference ``r`` of each row: there ``softmax = P exp(r - lse)``, and the targets' terms are taken apart.
    Collectives: two small ones a chunk of tokens in ``merge_statistics``, for ``cached`` one of the references, one
    of dE in backward.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        options: LossOptions,
    ) -> torch.Tensor:
        keep = not ctx.needs_input_grad[0]
        these = _Operands.start(hidden, weight, bias, options, targets=targets, keep=keep)  # collective
        panel = reference = None
        if options.plan.method == "cached":
            # the plan is that of an even share of the vocabulary: a larger one keeps whole tiles of it
            kept = options.plan.kept
            kept = len(these.c) if kept >= len(these.c) else kept // TILE_V * TILE_V
            panel, reference = _panel_memory(these.c, these.num_rows, kept), _references(these)
        logit = torch.zeros(these.num_rows, dtype=these.wide, device=hidden.device)
        bits, parts = sum_bits(options.shard.vocab_size), []
        for rows in these.chunks(these.statistics_chunk()):
            statistics = _statistics(these, rows, logit, None if panel is None else panel[rows], reference)
            parts.append(merge_statistics(statistics, bits, options.shard.group))  # collectives
        row_max, log_sum, loss = (torch.cat(part) for part in zip(*parts, strict=True)) if parts else 3 * [logit]
        ctx.save_for_backward(
            hidden, weight, bias, these.ids, these.order, these.count, row_max, log_sum, loss, panel, reference,
            these.whole,
        )  # fmt: skip
        ctx.options = options
        return these.in_order(loss)

    @staticmethod
    def backward(ctx: Any, grad_losses: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        with torch.no_grad():
            gradients = _gradients(ctx, grad_losses)
        return _undifferentiable(*gradients, None, None)


class TotalLoss(torch.autograd.Function):
    """The sum of the tokens' losses, by the method ``fused``: both gradients are made in forward, for an upstream
    gradient of 1, a chunk of tokens at a time in three products.

    | tensor | shape | dtype |
    |---|---|---|
    | hidden, weight, bias, targets | as for TokenLosses | fp32, bf16, fp64 |
    | total | [] | fp64 |

    Forward: ``P = exp(x - r)`` of a chunk, ``r`` a reference of each row, its targets' entries zero. With
    ``s = exp(r - lse)``: ``dE = s (P C) + (p_t - 1) C_t``, and ``dC`` the sum over chunks of ``P^T (s E)`` and over
    the tokens of a class of ``(p_t - 1) E``. Backward multiplies by the upstream gradient ``g``: in the last chunk's
    product for dC and in the last rounding of dE. A second backward computes as ``recompute``. Collectives: one of
    the references, two small ones a chunk in ``merge_statistics``, one a chunk of its dE.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        options: LossOptions,
    ) -> torch.Tensor:
        keep = not ctx.needs_input_grad[0]
        these = _Operands.start(hidden, weight, bias, options, targets=targets, keep=keep)  # collective
        pending = _Pending(these, weight, ctx.needs_input_grad[:3])
        reference = _references(these)
        logit = torch.zeros(these.num_rows, dtype=these.wide, device=hidden.device)
        bits, parts, second = sum_bits(options.shard.vocab_size), [], SecondStream(hidden.device)
        for rows in these.chunks(options.plan.chunk):
            panel = pending.panel(rows)
            statistics = _statistics(these, rows, logit, panel, reference)
            # the row's normaliser is not needed: it is found beside the product's last tiles
            with second.beside():
                pending.add_hidden(rows, panel)
            parts.append(merge_statistics(statistics, bits, options.shard.group))  # collectives
            second.join()
            pending.normalise(rows, panel, reference, *parts[-1])
        row_max, log_sum, loss = (torch.cat(part) for part in zip(*parts, strict=True)) if parts else 3 * [logit]
        ctx.save_for_backward(
            hidden, weight, bias, these.ids, these.order, these.count, row_max, log_sum, loss, None, None, these.whole
        )
        ctx.options, ctx.pending = options, pending
        return these.in_order(loss).sum(dtype=torch.float64)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        with torch.no_grad():
            # raises where an input has been written to since
            order = ctx.saved_tensors[4]
            pending, ctx.pending = ctx.pending, None
            gradients = pending.finish(grad) if pending else _gradients(ctx, grad.expand(len(order)))
        return _undifferentiable(*gradients, None, None)


class _HiddenGradient:
    """dE: each rank's share, in fp32 and in the order of the packed rows, then its sum over the ranks."""

    def __init__(self, these: _Operands) -> None:
        self.options, self.dtype = these.options, these.c.dtype
        self.index = unpacking(these.ids, these.order)
        self.packed = torch.empty(these.num_rows, these.c.shape[1], dtype=these.wide, device=these.c.device)
        self.reductions: list[dist.Work | None] = []

    def reduce(self, rows: slice) -> None:
        """Starts the sum of the share's rows, of all of them where the ranks have slices."""
        group, slices = self.options.shard.group, self.options.slices
        if slices is None:
            self.reductions.append(all_reduce(self.packed[rows], group, async_op=True))  # collective
            return
        # a rank's tokens one behind the other, as long as the longest slice
        parts = self.index.split(slices)
        index = torch.cat([torch.nn.functional.pad(part, (0, max(slices) - len(part)), value=-1) for part in parts])
        share, self.packed = take_rows(self.packed, index), self.packed.new_empty(0)
        self.packed, work = scatter_sums(share, group)  # collective
        self.reductions.append(work)
        rank, _ = rank_and_size(group)
        self.index = torch.arange(slices[rank], device=index.device)

    def finish(self, scale: torch.Tensor) -> torch.Tensor:
        """The sum times ``scale``, rounded once, in the order of the tokens."""
        for work in self.reductions:
            if work is not None:
                work.wait()
        return take_rows(self.packed, self.index, scale=scale, dtype=self.dtype)


class _Pending:
    """Gradients on their way from forward to backward, for an upstream gradient of 1."""

    def __init__(self, these: _Operands, weight: torch.Tensor, needs: tuple[bool, bool, bool]) -> None:
        wide, chunk = these.wide, these.options.plan.chunk
        self.these, self.dtype = these, weight.dtype
        self.one = torch.ones((), dtype=wide, device=weight.device)
        self.d_hidden, self.d_weight, self.d_bias = _gradient_memory(these, weight, needs)
        self.low = None
        if self.d_weight is not None and these.num_rows > chunk and self.d_weight.dtype != wide:
            self.low = torch.empty(these.c.shape, dtype=torch.int16, device=weight.device)
        self.buffer: torch.Tensor | None = _panel_memory(these.c, min(chunk, these.num_rows), len(these.c))
        # what the last chunk's product for the classifier needs
        self.last: tuple[slice, torch.Tensor, ClassSums | None] | None = None

    def panel(self, rows: slice) -> torch.Tensor:
        assert self.buffer is not None
        return self.buffer[: rows.stop - rows.start]

    def add_hidden(self, rows: slice, panel: torch.Tensor) -> None:
        if self.d_hidden is not None:
            c, count, packed = self.these.c, self.these.count, self.d_hidden.packed
            hidden_gradient(panel, c, count, packed[rows], v0=0, row0=rows.start, add=False)

    def normalise(
        self,
        rows: slice,
        panel: torch.Tensor,
        reference: torch.Tensor,
        row_max: torch.Tensor,
        log_sum: torch.Tensor,
        loss: torch.Tensor,
    ) -> None:
        these = self.these
        e, ids, count, col0 = these.e[rows], these.ids[rows], these.count, these.shard.start
        live = these.live(rows)
        factor = torch.where(live, _softmax_scale(reference[rows], row_max, log_sum), 0)
        entry = torch.where(live, torch.expm1(-loss), 0)
        if self.d_hidden is not None:
            target_rows(these.c, ids, entry, self.d_hidden.packed[rows], col0=col0, scale=factor)
            if these.options.slices is None:
                # under the products that follow
                self.d_hidden.reduce(rows)  # collective
        if self.d_bias is not None:
            _add_bias_gradient(self.d_bias[: len(these.c)], panel, factor, ids, entry, count, col0, rows.start)
        if self.d_weight is not None:
            sums = class_sums(e, ids, entry, count, len(these.c), col0=col0, row0=rows.start)
            scale_rows(e, factor)
            if rows.stop == these.num_rows:
                self.last = rows, panel, sums
            else:
                self.add_weight(rows, panel, sums, self.one, last=False)
        elif rows.stop == these.num_rows:
            self.buffer = None

    def add_weight(
        self, rows: slice, panel: torch.Tensor, sums: ClassSums | None, scale: torch.Tensor, *, last: bool
    ) -> None:
        these = self.these
        assert self.d_weight is not None
        weight_gradient(
            panel, these.e[rows], these.count, scale, self.d_weight[: len(these.c)], row0=rows.start, sums=sums,
            low=self.low, add=rows.start > 0, last=last, beside_collective=these.shard.group is not None,
        )  # fmt: skip

    def finish(self, grad: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        """The gradients of hidden, weight and bias for the upstream gradient ``grad`` []."""
        these = self.these
        scale = grad.to(these.wide)
        if self.d_hidden is not None and these.options.slices is not None:
            # under the product that is left
            self.d_hidden.reduce(slice(0, these.num_rows))  # collective
        if self.last is not None:
            self.add_weight(*self.last, scale, last=True)
        # before the results take their place
        self.last = self.buffer = self.low = None
        these.drop()
        d_hidden = None if self.d_hidden is None else self.d_hidden.finish(scale)
        return d_hidden, self.d_weight, None if self.d_bias is None else (self.d_bias * scale).to(self.dtype)


def _gradient_memory(
    these: _Operands, weight: torch.Tensor, needs: tuple[bool, bool, bool]
) -> tuple[_HiddenGradient | None, torch.Tensor | None, torch.Tensor | None]:
    """Where the gradients of hidden states, weight and bias grow: in fp32, the weight's dtype, fp32."""
    needs_hidden, needs_weight, needs_bias = needs
    main_grad, d_weight = these.options.main_grad, None
    if needs_weight and main_grad is not None:
        d_weight = main_grad.tensor
    elif needs_weight:
        d_weight = torch.empty_like(weight, memory_format=torch.contiguous_format)
        # padding, and everything where there is no token
        d_weight[len(these.c) if these.num_rows else 0 :] = 0
    d_bias = torch.zeros(len(weight), dtype=these.wide, device=weight.device) if needs_bias else None
    return _HiddenGradient(these) if needs_hidden else None, d_weight, d_bias


def _returned(these: _Operands, d_weight: torch.Tensor | None) -> torch.Tensor | None:
    """What backward returns as the classifier's gradient: nothing where it has grown in the parameter's."""
    main_grad = these.options.main_grad
    if main_grad is None or d_weight is None:
        return d_weight
    main_grad.parameter.grad_added_to_main_grad = True  # type: ignore[attr-defined]
    return None


def _panel_memory(e: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """[rows, columns] whose rows start at addresses that the copy engine takes."""
    return e.new_empty(rows, round_up(columns, 64))[:, :columns]


def _references(these: _Operands) -> torch.Tensor:
    """A reference for the exponentials of each row: near its target's logit."""
    reference = target_logits(these.e, these.c, these.bias, these.ids, col0=these.shard.start)
    all_reduce(reference, these.shard.group)  # collective
    return reference


def _softmax_scale(reference: torch.Tensor, row_max: torch.Tensor, log_sum: torch.Tensor) -> torch.Tensor:
    """``exp(reference - lse)``: what is left to multiply the exponentials of a row with. In fp64, since the rounding
    of the difference would be that of the whole row."""
    return torch.exp(reference.double() - row_max.double() - log_sum.double()).to(reference.dtype)


def _statistics(
    these: _Operands,
    rows: slice,
    logit: torch.Tensor,
    panel: torch.Tensor | None,
    reference: torch.Tensor | None,
) -> TileStatistics:
    """A chunk's statistics, and its exponentials where ``panel`` is given: finite, the targets' entries zero."""

    def run(count: torch.Tensor, out: TileStatistics | None) -> TileStatistics:
        return panel_statistics(
            these.e, these.c, these.bias, these.ids, count, logit, rows=(rows.start, rows.stop),
            col0=these.shard.start, panel=panel, reference=reference, out=out,
        )  # fmt: skip

    statistics = run(these.count, None)
    if panel is not None and reference is not None:
        # a row far above its reference takes its largest logit instead. where there is none the second run, which
        # the host launches blindly, has no rows
        lost = these.live(rows) & (statistics.row_max - reference[rows] > SAFE)
        reference[rows] = torch.where(lost, statistics.row_max, reference[rows])
        run(torch.where(lost.any(), these.count, 0), statistics)
        drop_targets(panel, these.ids, these.count, row0=rows.start, col0=these.shard.start)
    return statistics


def _add_bias_gradient(
    out: torch.Tensor,
    panel: torch.Tensor,
    factor: torch.Tensor,
    ids: torch.Tensor,
    entry: torch.Tensor,
    count: torch.Tensor,
    col0: int,
    row0: int = 0,
) -> None:
    """Adds the sums over tokens of ``factor panel`` and of the targets' ``entry``, unscaled, in fp32."""
    column_sums(panel, factor, count, out, row0=row0)
    ones = torch.ones(len(ids), 1, dtype=panel.dtype, device=panel.device)
    sums = class_sums(ones, ids, entry, count, panel.shape[1], col0=col0, row0=row0)
    if sums is not None and sums.rows is not None and len(ids):
        out += torch.where(sums.first >= 0, sums.rows[sums.first.clamp(min=0).long(), 0], 0)


def _gradients(
    ctx: Any, grad_losses: torch.Tensor
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """The second pass: the gradients of hidden, weight and bias from what forward saved."""
    hidden, weight, bias, ids, order, count, row_max, log_sum, loss, kept, reference, whole = ctx.saved_tensors
    these = _Operands.start(hidden, weight, bias, ctx.options, places=(ids, order, count), whole=whole)  # collective
    dtype, wide = weight.dtype, these.wide
    grad = torch.where(these.live(slice(0, len(order))), grad_losses.to(wide)[order], 0)
    grad, scale = _normalise(torch.nn.functional.pad(grad, (0, these.num_rows - len(grad))), dtype)
    entry = torch.where(grad == 0, 0, torch.expm1(-loss) * grad)
    residual = entry - entry.to(dtype)
    if kept is not None:
        # the kept columns have none of it
        local = ids - these.shard.start
        apart = (local >= 0) & (local < kept.shape[1])
        entry, residual = torch.where(apart, 0, entry), torch.where(apart, entry, residual)
    state = RowState(ids, row_max, log_sum, grad, entry, None if dtype == wide and kept is None else residual)

    d_hidden, d_weight, d_bias = _gradient_memory(these, weight, ctx.needs_input_grad[:3])
    factor = None
    if kept is not None:
        factor = torch.where(grad == 0, 0, grad * _softmax_scale(reference, row_max, log_sum))
    _walk_panels(these, state, scale, d_hidden, d_weight, d_bias, kept, factor)
    # before the result takes its place
    these.drop()
    d_states = None if d_hidden is None else d_hidden.finish(scale)
    return d_states, _returned(these, d_weight), None if d_bias is None else (d_bias * scale).to(weight.dtype)


def _walk_panels(
    these: _Operands,
    state: RowState,
    scale: torch.Tensor,
    d_hidden: _HiddenGradient | None,
    d_weight: torch.Tensor | None,
    d_bias: torch.Tensor | None,
    kept: torch.Tensor | None,
    factor: torch.Tensor | None,
) -> None:
    """Fills the gradients a panel of columns at a time, and starts the reduction of ``d_hidden``."""
    c, count, col0, plan, group = these.c, these.count, these.shard.start, these.options.plan, these.shard.group
    num_v, start = len(c), 0 if kept is None else kept.shape[1]
    reducing, grow = False, these.options.main_grad is not None
    if d_hidden is not None:
        if kept is not None:
            # slices of the hidden states may still be on their way
            hidden_gradient(kept, c, count, d_hidden.packed, v0=0, add=False)
        target_rows(c, state.targets, state.residual, d_hidden.packed, col0=col0, scale=factor)
    e, second = these.e, SecondStream(c.device)

    def sum_classes(columns: slice, out: torch.Tensor | None) -> ClassSums | None:
        if d_weight is None:
            return None
        return class_sums(
            e, state.targets, state.residual, count, columns.stop - columns.start, col0=col0 + columns.start,
            out=out, scale=None if out is None else scale, add=grow,
        )  # fmt: skip

    def add_weight(panel: torch.Tensor, rows: slice, columns: slice, sums: ClassSums | None, **carry: Any) -> None:
        if d_weight is not None:
            weight_gradient(
                panel, e[rows], count, scale, d_weight[columns], sums=sums, row0=rows.start,
                grow=grow, beside_collective=reducing, **carry,
            )  # fmt: skip

    everything, later = slice(0, len(e)), None
    # what is reduced at once; the same on every rank, also on one without a class or a token
    pieces = [everything] if these.options.slices is not None else list(these.chunks(plan.rows))
    # where nothing is kept, the sums start the gradient in its own memory, a part at a time
    whole = None
    if grow and d_weight is not None:
        sum_classes(slice(0, num_v), d_weight)
    elif kept is not None:
        whole = sum_classes(slice(0, num_v), None)
    buffer = low = panel = sums = None
    for part, width, memory in _parts(e, None if grow else d_weight, slice(start, num_v), plan):
        blocks = list(these.chunks(plan.rows)) if memory is None else [everything]
        buffer = memory
        if buffer is None:
            buffer = e.new_empty(blocks[0].stop, min(width, round_up(part.stop - part.start, TILE_V)))
        if len(blocks) > 1 and d_weight is not None and d_weight.dtype == torch.bfloat16:
            low = torch.empty(buffer.shape[1], e.shape[1], dtype=torch.int16, device=e.device)
        if kept is not None or grow:
            sums = None if whole is None else whole[part]
        elif d_weight is not None:
            sums = sum_classes(part, d_weight[part])
        # what is left over comes first: the last product, under which dE is reduced, is a long one
        first = min(width, round_up((part.stop - part.start - 1) % width + 1, TILE_V))
        for v0, v1 in itertools.pairwise([part.start, *range(part.start + first, part.stop, width), part.stop]):
            columns = slice(v0, v1)
            for rows in blocks:
                panel = buffer[: rows.stop - rows.start, : columns.stop - v0]
                panel_gradient(
                    e, c, these.bias, state, count, panel,
                    row0=rows.start, v0=v0, col0=col0, bias_grad=None if d_bias is None else d_bias[columns],
                )  # fmt: skip
                last = rows.stop == len(e)
                if d_hidden is not None:
                    with second.beside():
                        hidden_gradient(panel, c, count, d_hidden.packed[rows], v0=v0, row0=rows.start, add=True)
                later = functools.partial(
                    add_weight, panel, rows, columns,
                    None if sums is None or rows.start else sums[v0 - part.start : columns.stop - part.start],
                    low=None if low is None else low[: columns.stop - v0],
                    add=rows.start > 0 and not grow, last=last or grow,
                )  # fmt: skip
                if not last or columns.stop < num_v:
                    if d_hidden is not None and columns.stop == num_v and rows == pieces[0]:
                        # no panel adds to these tokens again
                        second.join()
                        d_hidden.reduce(pieces.pop(0))  # collective
                        reducing = group is not None
                    later()
                    later = None
                    # before the next panel takes this one's memory
                    second.join()
    if d_hidden is not None:
        # under the products that are left
        second.join()
        for piece in pieces:
            d_hidden.reduce(piece)  # collective
        reducing = group is not None
    if later is not None:
        later()
    if kept is not None and factor is not None and len(e):
        # their memory is needed
        second.join()
        buffer = low = panel = later = None
        if d_bias is not None:
            assert state.residual is not None
            _add_bias_gradient(d_bias[:start], kept, factor, state.targets, state.residual, count, col0)
        if d_weight is not None:
            scale_rows(e, factor)
            add_weight(kept, everything, slice(0, start), None if whole is None else whole[slice(0, start)])
    second.join()


def _parts(
    e: torch.Tensor, d_weight: torch.Tensor | None, columns: slice, plan: Plan
) -> Iterator[tuple[slice, int, torch.Tensor | None]]:
    """(columns, width of their panels, memory for a panel or None) of the parts that panels walk over.

    ``plan.wide`` panels take memory of the classifier's gradient that is not written yet: that of the columns that
    are kept, whose product comes last, or else that of the last columns. These then have panels half as wide, and so
    on down to ``plan.panel``, which have memory of their own.
    """
    n, d = e.shape
    start, stop = (columns.start, columns.stop) if n else (0, 0)
    width = plan.wide if d_weight is not None and d_weight.dtype == e.dtype else 0
    while width > plan.panel and start < stop:
        rows = cdiv(n * width, max(1, d))
        split = stop if columns.start >= rows else (stop - rows) // TILE_V * TILE_V
        if split > start:
            assert d_weight is not None
            first = 0 if split == stop else split
            yield slice(start, split), width, d_weight.view(-1)[first * d : first * d + n * width].view(n, width)
            start = split
        width = width // (2 * TILE_V) * TILE_V
    if start < stop:
        yield slice(start, stop), plan.panel, None


class _Undifferentiable(torch.autograd.Function):
    """Identity whose gradient is an error."""

    @staticmethod
    def forward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("linear_cross_entropy has no second derivative: its gradients cannot be differentiated")


def _undifferentiable(*gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    if not torch.is_grad_enabled():
        return gradients
    # create_graph: without a node the gradients would pass for constants, also in a penalty on their norm
    return tuple(g if g is None else _Undifferentiable.apply(g.requires_grad_()) for g in gradients)


def _normalise(grad: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """(grad / scale, scale), for fp16 with scale a power of two that puts the largest of ``grad`` between 2**13 and
    2**14, for other dtypes 1.

    An fp16 panel then neither overflows nor loses small entries, whatever the loss scale. The products carry
    ``scale`` in their epilogues.
    """
    if dtype != torch.float16 or not len(grad):
        return grad, grad.new_ones(())
    # a NaN or inf is its own token's. the bounds are the powers, and their inverses, that fp32 has
    largest = torch.where(grad.isfinite(), grad.abs(), 0).amax()
    exponent = torch.frexp(largest).exponent.clamp(-100, 128) - 14
    return torch.ldexp(grad, -exponent), torch.ldexp(grad.new_ones(()), exponent)
