"""The operation: kernels and collectives in their order. The only file that knows both."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from .kernels.config import TILE_V, tiles_for
from .kernels.gradient import RowState, column_sums, panel_gradient
from .kernels.logits import LogitMap
from .kernels.product import hidden_gradient, weight_gradient
from .kernels.rows import pack_order, packing, row_dots, scale_rows, take_rows, unpacking
from .kernels.runtime import SecondStream, cdiv, round_up, target_of
from .kernels.statistics import RowStatistics, TileStatistics, Wanted, panel_statistics, sum_bits
from .kernels.target import ClassSums, class_sums, drop_targets, target_logits, target_rows
from .objective import Coefficients, Objective
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
    softcap: float | None = None
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    # whether statistics are asked for beside the loss, and the entropy as a result that is differentiated
    stats: bool = False
    entropy: bool = False


class LossInputs(NamedTuple):
    """The tensors of a call, as the Functions take them.

    | tensor | shape | dtype | gradient |
    |---|---|---|---|
    | hidden | [N, D] | fp32, bf16, fp16, fp64 | yes |
    | weight | [V, D] | hidden's | yes |
    | bias | [V] or None | hidden's | yes |
    | logit_scale | [] or None | fp32 (fp64 for fp64) | yes |
    | targets | [N] | int64 | |
    | class_weight | [vocab_size] or None | fp32 (fp64 for fp64) | |
    """

    hidden: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    logit_scale: torch.Tensor | None
    targets: torch.Tensor
    class_weight: torch.Tensor | None = None


@dataclass
class _Operands:
    """One rank's matrices, the rows packed (see kernels/rows.py), and the tokens' places and targets."""

    hidden: Callable[[], torch.Tensor] | None
    c: torch.Tensor
    logits: LogitMap
    objective: Objective
    # of this rank's classes, where the loss takes all logits
    class_weight: torch.Tensor | None
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
        inputs: LossInputs,
        options: LossOptions,
        *,
        places: tuple[torch.Tensor, ...] = (),
        whole: torch.Tensor | None = None,
        keep: bool = False,
    ) -> _Operands:
        """From the targets, or from the ``places`` that they came to. The ranks' slices of the hidden states are on
        their way until ``e`` is asked for, unless they came before and were kept as ``whole``."""
        hidden, weight, bias, scale, targets, class_weight = inputs
        shard, gathered = options.shard, lambda: hidden if whole is None else whole
        if options.slices is not None and whole is None:
            gathered = gather_slices(hidden, options.slices, shard.group)  # collective
        ids, order, count = places or pack_order(targets, options.ignore_index)
        logits = LogitMap(None if bias is None else bias[: shard.classes], scale, options.softcap)
        objective = Objective(shard.vocab_size, options.label_smoothing, options.z_loss, class_weight)
        local = None
        if options.label_smoothing:
            rows = slice(shard.start, shard.start + shard.classes)
            wide = torch.promote_types(weight.dtype, torch.float32)
            local = weight.new_ones(shard.classes, dtype=wide) if class_weight is None else class_weight[rows]
        c = weight[: shard.classes]
        return cls(gathered, c, logits, objective, local, ids, order, count, options, keep)

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

    @property
    def wanted(self) -> Wanted:
        stats, entropy = self.options.stats, self.options.entropy
        return Wanted(self.class_weight, stats or entropy, stats, self.options.softcap is not None)

    def in_order(self, rows: torch.Tensor, ignored: int = 0) -> torch.Tensor:
        """Packed rows' values -> the tokens', ``ignored`` for ignored ones."""
        n = len(self.order)
        rows = torch.where(self.live(slice(0, n)), rows[:n], ignored)
        return torch.empty_like(rows).scatter_(0, self.order, rows)

    def packed(self, tokens: torch.Tensor) -> torch.Tensor:
        """Tokens' values -> packed rows', 0 where there is no token."""
        n = len(self.order)
        rows = torch.where(self.live(slice(0, n)), tokens[self.order].to(self.wide), 0)
        return torch.nn.functional.pad(rows, (0, self.num_rows - n))

    def no_rows(self) -> RowStatistics:
        """Statistics where there is no row."""
        none, wanted = torch.zeros(0, dtype=self.wide, device=self.c.device), self.wanted
        total = None if wanted.class_weight is None else none.double()
        return RowStatistics(
            none, none, none, none if wanted.entropy else None, total, none.long() if wanted.argmax else None,
            none if wanted.logit else None,
        )  # fmt: skip


class TokenValues(NamedTuple):
    """What is known of each token, [N]; 0 for ignored ones, of ``argmax`` -1. None where it was not asked for."""

    loss: torch.Tensor
    nll: torch.Tensor | None  # lse minus the target's logit
    lse: torch.Tensor | None
    entropy: torch.Tensor | None
    argmax: torch.Tensor | None

    def stats(self) -> tuple[torch.Tensor, ...]:
        """The normaliser, the target's log-probability, the entropy and the largest class."""
        assert self.nll is not None
        assert self.lse is not None
        assert self.entropy is not None
        assert self.argmax is not None
        return self.lse, -self.nll, self.entropy, self.argmax

    @classmethod
    def of(cls, rows: RowStatistics, loss: torch.Tensor, these: _Operands) -> TokenValues:
        stats = these.options.stats
        return cls(
            these.in_order(loss),
            these.in_order(rows.loss) if stats else None,
            these.in_order(rows.row_max + rows.log_sum) if stats else None,
            None if rows.entropy is None else these.in_order(rows.entropy),
            None if rows.argmax is None else these.in_order(rows.argmax, -1),
        )


class TokenLosses(torch.autograd.Function):
    """The loss of each token and what else is asked for, by the methods ``recompute`` and ``cached``.

    :class:`LossInputs` and :class:`LossOptions` -> :class:`TokenValues`, of which ``loss`` and ``entropy`` are
    differentiable.

    Forward: ``loss`` of :class:`Objective`, in the plain case ``lse - z``, with ``x`` the logits of
    :class:`~cce_dist.kernels.logits.LogitMap`, ``lse`` the log of the sum of ``exp(x)`` over the whole vocabulary and
    ``z`` the target's logit. Backward, with ``g`` the upstream gradient and in the plain case: ``dx = (exp(x - lse) -
    onehot) g``, ``dE = s dx C`` summed over ranks, ``dC = s dx^T E``, ``db`` the sum of ``s dx`` over tokens, for a
    scale ``s`` of the logits, ``ds`` the sum of ``dx (E C^T + b)`` over everything; a panel of columns at a time.
    ``cached`` keeps ``P = exp(x - r)`` of the first columns, for a reference ``r`` of each row: there ``softmax =
    P exp(r - lse)``, and what else ``dx`` has is taken apart. Collectives: two or three small ones a chunk of tokens
    in ``merge_statistics``, for ``cached`` one of the references, one of dE in backward, one of ds.
    """

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> TokenValues:
        inputs, options = LossInputs(*arguments[:-1]), arguments[-1]
        these = _Operands.start(inputs, options, keep=not ctx.needs_input_grad[0])  # collective
        panel = reference = None
        if options.plan.method == "cached":
            # the plan is that of an even share of the vocabulary: a larger one keeps whole tiles of it
            kept = options.plan.kept
            kept = len(these.c) if kept >= len(these.c) else kept // TILE_V * TILE_V
            panel, reference = _panel_memory(these.c, these.num_rows, kept), _references(these)
        logit = torch.zeros(these.num_rows, dtype=these.wide, device=these.c.device)
        bits, parts = sum_bits(options.shard.vocab_size), []
        for chunk in these.chunks(these.statistics_chunk()):
            statistics = _statistics(these, chunk, logit, None if panel is None else panel[chunk], reference)
            parts.append(merge_statistics(statistics, bits, options.shard.group))  # collectives
        rows = RowStatistics.cat(parts) if parts else these.no_rows()
        loss = these.objective.loss(rows, these.ids)
        _save(ctx, inputs, these, rows, panel, reference)
        values = TokenValues.of(rows, loss, these)
        fixed = [values.nll, values.lse, values.argmax, None if options.entropy else values.entropy]
        ctx.mark_non_differentiable(*(x for x in fixed if x is not None))
        ctx.set_materialize_grads(False)
        return values

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        with torch.no_grad():
            gradients = _gradients(ctx, ctx.saved_tensors, grads[0], grads[3])
        return undifferentiable("linear_cross_entropy", *gradients, None, None, None)


class TotalLoss(torch.autograd.Function):
    """The sum of the tokens' losses, by the method ``fused``: both gradients are made in forward, for an upstream
    gradient of 1, a chunk of tokens at a time in three products.

    :class:`LossInputs`, the tokens' weights [N] or None, and :class:`LossOptions` -> the total [] fp64, and
    :class:`TokenValues`, which are not differentiable.

    Forward: ``P = exp(x - r)`` of a chunk, ``r`` a reference of each row, its targets' entries zero. In the plain
    case, with ``q = exp(r - lse)``: ``dE = q (P C) + (p_t - 1) C_t``, and ``dC`` the sum over chunks of ``P^T (q E)``
    and over the tokens of a class of ``(p_t - 1) E``. Backward multiplies by the upstream gradient ``g``: in the last
    chunk's product for dC and in the last rounding of dE. A second backward computes as ``recompute``. Collectives:
    one of the references, two or three small ones a chunk in ``merge_statistics``, one a chunk of its dE, one of ds.
    """

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[torch.Tensor | None, ...]:
        inputs, token_weight, options = LossInputs(*arguments[:-2]), arguments[-2], arguments[-1]
        these = _Operands.start(inputs, options, keep=not ctx.needs_input_grad[0])  # collective
        pending = _Pending(these, inputs.weight, ctx.needs_input_grad[:4], token_weight)
        reference = _references(these)
        logit = torch.zeros(these.num_rows, dtype=these.wide, device=these.c.device)
        bits, parts, second = sum_bits(options.shard.vocab_size), [], SecondStream(these.c.device)
        for chunk in these.chunks(options.plan.chunk):
            panel = pending.panel(chunk)
            statistics = _statistics(these, chunk, logit, panel, reference)
            # the row's normaliser is not needed: it is found beside the product's last tiles
            with second.beside():
                pending.add_hidden(chunk, panel)
            parts.append(merge_statistics(statistics, bits, options.shard.group))  # collectives
            second.join()
            pending.normalise(chunk, panel, reference, parts[-1])
        rows = RowStatistics.cat(parts) if parts else these.no_rows()
        loss = these.objective.loss(rows, these.ids)
        _save(ctx, inputs, these, rows, None, None, token_weight)
        ctx.pending = pending
        values = TokenValues.of(rows, loss, these)
        ctx.mark_non_differentiable(*(x for x in values if x is not None))
        losses = values.loss if token_weight is None else values.loss * token_weight
        return losses.sum(dtype=torch.float64), *values

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, *_: Any) -> tuple[torch.Tensor | None, ...]:
        with torch.no_grad():
            # raises where an input has been written to since. asked for once, as activation checkpointing allows
            saved = ctx.saved_tensors
            order, token_weight = saved[7], saved[-1]
            pending, ctx.pending = ctx.pending, None
            if pending:
                gradients = pending.finish(grad)
            else:
                grads = grad.expand(len(order))
                grads = grads if token_weight is None else grads * token_weight
                gradients = _gradients(ctx, saved, grads, None)
        return undifferentiable("linear_cross_entropy", *gradients, None, None, None, None)


def _save(
    ctx: Any,
    inputs: LossInputs,
    these: _Operands,
    rows: RowStatistics,
    panel: torch.Tensor | None,
    reference: torch.Tensor | None,
    token_weight: torch.Tensor | None = None,
) -> None:
    """For :func:`_gradients`. The targets are saved as their places."""
    entropy = rows.entropy if these.options.entropy else None
    ctx.save_for_backward(
        *inputs[:4], inputs.class_weight, these.whole, these.ids, these.order, these.count, rows.row_max,
        rows.log_sum, rows.loss, entropy, rows.logit, panel, reference, token_weight,
    )  # fmt: skip
    ctx.options = these.options


class _HiddenGradient:
    """dE: each rank's share, in fp32 and in the order of the packed rows, then its sum over the ranks."""

    def __init__(self, these: _Operands, needed: bool) -> None:
        # where only the scale of the logits asks for it, its sum is nobody's
        self.options, self.dtype, self.needed = these.options, these.c.dtype, needed
        self.index = unpacking(these.ids, these.order)
        self.packed = torch.empty(these.num_rows, these.c.shape[1], dtype=these.wide, device=these.c.device)
        self.reductions: list[dist.Work | None] = []

    def reduce(self, rows: slice) -> None:
        """Starts the sum of the share's rows, of all of them where the ranks have slices."""
        if not self.needed:
            return
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

    def finish(self, scale: torch.Tensor) -> torch.Tensor | None:
        """The sum times ``scale``, rounded once, in the order of the tokens."""
        if not self.needed:
            return None
        for work in self.reductions:
            if work is not None:
                work.wait()
        return take_rows(self.packed, self.index, scale=scale, dtype=self.dtype)


class _Gradients:
    """Where the gradients of hidden states, weight, bias and the logits' scale grow: in fp32, the weight's dtype,
    fp32 and fp64, all by the scaled product. None where it is not asked for."""

    def __init__(self, these: _Operands, weight: torch.Tensor, needs: Sequence[bool]) -> None:
        needs_hidden, needs_weight, self.needs_bias, needs_scale = needs
        self.these, self.dtype = these, weight.dtype
        main_grad, self.weight = these.options.main_grad, None
        if needs_weight and main_grad is not None:
            self.weight = main_grad.tensor
        elif needs_weight:
            self.weight = torch.empty_like(weight, memory_format=torch.contiguous_format)
            # padding, and everything where there is no token
            self.weight[len(these.c) if these.num_rows else 0 :] = 0
        biased = self.needs_bias or (needs_scale and these.logits.bias is not None)
        self.bias = torch.zeros(len(weight), dtype=these.wide, device=weight.device) if biased else None
        # the scale's comes of the others
        self.hidden = _HiddenGradient(these, needs_hidden) if needs_hidden or needs_scale else None
        self.scale = torch.zeros((), dtype=torch.float64, device=weight.device) if needs_scale else None

    def add_scale(self, rows: slice) -> None:
        """Adds to the scale's gradient what rows of the hidden states' share say, before these are reduced."""
        if self.scale is not None:
            assert self.hidden is not None
            share, e = self.hidden.packed[rows], self.these.e[rows]
            self.scale += row_dots(share, e, self.these.count, row0=rows.start).sum(dtype=torch.float64)

    def finish(self, factor: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Those of hidden, weight, bias and scale, times ``factor`` and the logits' scale, which the weight's has."""
        these, logits = self.these, self.these.logits
        # before the results take their place
        these.drop()
        scaled = factor if logits.scale is None else factor * logits.scale
        hidden = None if self.hidden is None else self.hidden.finish(scaled)
        scale = None
        if self.scale is not None:
            if logits.bias is not None:
                assert self.bias is not None
                d_bias = self.bias[: len(these.c)].double()
                # of a class that is impossible nothing depends, though its bias is infinite
                self.scale += torch.where(d_bias == 0, 0, d_bias * logits.bias).sum()
            all_reduce(self.scale, these.shard.group)  # collective
            scale = (self.scale * factor).to(these.wide)
        bias = (self.bias * scaled).to(self.dtype) if self.bias is not None and self.needs_bias else None
        return hidden, self._returned(), bias, scale

    def _returned(self) -> torch.Tensor | None:
        """What backward returns as the classifier's gradient: nothing where it has grown in the parameter's."""
        main_grad = self.these.options.main_grad
        if main_grad is None or self.weight is None:
            return self.weight
        main_grad.parameter.grad_added_to_main_grad = True  # type: ignore[attr-defined]
        return None


class _Pending:
    """Gradients on their way from forward to backward, for an upstream gradient of 1."""

    def __init__(
        self, these: _Operands, weight: torch.Tensor, needs: Sequence[bool], token_weight: torch.Tensor | None
    ) -> None:
        wide, chunk = these.wide, these.options.plan.chunk
        self.these = these
        self.one = torch.ones((), dtype=wide, device=weight.device)
        if token_weight is None:
            token_weight = self.one.expand(len(these.order))
        self.token_weight = these.packed(token_weight)
        self.gradients = _Gradients(these, weight, needs)
        d_weight, self.low = self.gradients.weight, None
        if d_weight is not None and these.num_rows > chunk and d_weight.dtype != wide:
            self.low = torch.empty(these.c.shape, dtype=torch.int16, device=weight.device)
        self.buffer: torch.Tensor | None = _panel_memory(these.c, min(chunk, these.num_rows), len(these.c))
        # the sums over classes and over tokens that smoothing adds, each with its factor of the other side
        self.over_classes = self.over_tokens = self.uniform = None
        if these.class_weight is not None:
            self.over_classes = _weighted_sum(these.c, these.class_weight)
            self.uniform = these.objective.uniform(self.token_weight)
            self.over_tokens = these.class_weight, _weighted_sum(these.e, self.uniform)
        # the targets' entries of the chunks so far, for the bias
        self.entries: list[torch.Tensor] = []
        # what the last chunk's product for the classifier needs
        self.last: tuple[slice, torch.Tensor, ClassSums | None] | None = None

    def panel(self, rows: slice) -> torch.Tensor:
        assert self.buffer is not None
        return self.buffer[: rows.stop - rows.start]

    def add_hidden(self, chunk: slice, panel: torch.Tensor) -> None:
        if self.gradients.hidden is not None:
            packed = self.gradients.hidden.packed[chunk]
            hidden_gradient(panel, self.these.c, self.these.count, packed, v0=0, row0=chunk.start, add=False)

    def normalise(self, chunk: slice, panel: torch.Tensor, reference: torch.Tensor, rows: RowStatistics) -> None:
        these, gradients = self.these, self.gradients
        e, ids, count, col0 = these.e[chunk], these.ids[chunk], these.count, these.shard.start
        state = these.objective.coefficients(rows, ids, self.token_weight[chunk], these.logits)
        factor = torch.where(state.factor == 0, 0, state.factor * _softmax_scale(reference[chunk], rows))
        if gradients.hidden is not None:
            uniform = None
            if self.over_classes is not None and state.uniform is not None:
                uniform = state.uniform, self.over_classes
            packed = gradients.hidden.packed[chunk]
            target_rows(these.c, ids, state.entry, packed, col0=col0, scale=factor, uniform=uniform)
            gradients.add_scale(chunk)
            if these.options.slices is None:
                # under the products that follow
                gradients.hidden.reduce(chunk)  # collective
        if gradients.bias is not None:
            d_bias = gradients.bias[: len(these.c)]
            column_sums(panel, factor, count, d_bias, row0=chunk.start)
            self.entries.append(state.entry)
            if chunk.stop == these.num_rows:
                _add_bias_gradient(d_bias, these, torch.cat(self.entries), self.uniform)
        if gradients.weight is not None:
            sums = class_sums(e, ids, state.entry, count, len(these.c), col0=col0, row0=chunk.start)
            scale_rows(e, factor)
            if chunk.stop == these.num_rows:
                self.last = chunk, panel, sums
            else:
                self.add_weight(chunk, panel, sums, self.one, last=False)
        elif chunk.stop == these.num_rows:
            self.buffer = None

    def add_weight(
        self, chunk: slice, panel: torch.Tensor, sums: ClassSums | None, scale: torch.Tensor, *, last: bool
    ) -> None:
        these, d_weight = self.these, self.gradients.weight
        assert d_weight is not None
        weight_gradient(
            panel, these.e[chunk], these.count, scale, d_weight[: len(these.c)], row0=chunk.start, sums=sums,
            uniform=self.over_tokens if last else None, low=self.low, add=chunk.start > 0, last=last,
            beside_collective=these.shard.group is not None,
        )  # fmt: skip

    def finish(self, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """The gradients of hidden, weight, bias and scale for the upstream gradient ``grad`` []."""
        these, hidden = self.these, self.gradients.hidden
        factor = grad.to(these.wide)
        if hidden is not None and these.options.slices is not None:
            # under the product that is left
            hidden.reduce(slice(0, these.num_rows))  # collective
        if self.last is not None:
            scaled = factor if these.logits.scale is None else factor * these.logits.scale
            self.add_weight(*self.last, scaled, last=True)
        # before the results take their place
        self.last = self.buffer = self.low = None
        return self.gradients.finish(factor)


def _panel_memory(e: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """[rows, columns] whose rows start at addresses that the copy engine takes."""
    return e.new_empty(rows, round_up(columns, 64))[:, :columns]


def _references(these: _Operands) -> torch.Tensor:
    """A reference for the exponentials of each row: near its target's logit."""
    reference = target_logits(these.e, these.c, these.logits, these.ids, col0=these.shard.start)
    all_reduce(reference, these.shard.group)  # collective
    return reference


def _softmax_scale(reference: torch.Tensor, rows: RowStatistics) -> torch.Tensor:
    """``exp(reference - lse)``: what is left to multiply the exponentials of a row with. In fp64, since the rounding
    of the difference would be that of the whole row."""
    return torch.exp(reference.double() - rows.row_max.double() - rows.log_sum.double()).to(reference.dtype)


def _weighted_sum(matrix: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """``weight @ matrix``, in fp32: [n], [n, D] -> [D]."""
    out = torch.zeros(matrix.shape[1], dtype=weight.dtype, device=matrix.device)
    count = torch.full((), len(matrix), device=matrix.device)
    column_sums(matrix, weight, count, out)
    return out


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
            these.e, these.c, these.logits, these.ids, count, logit, rows=(rows.start, rows.stop),
            col0=these.shard.start, wanted=these.wanted, panel=panel, reference=reference, out=out,
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
    out: torch.Tensor, these: _Operands, entry: torch.Tensor, uniform: torch.Tensor | None
) -> None:
    """Adds what the panels of the first ``len(out)`` classes lack, summed over tokens in fp32: the targets' entries,
    unscaled, and what is uniform."""
    ones = torch.ones(len(entry), 1, dtype=these.c.dtype, device=out.device)
    sums = class_sums(ones, these.ids, entry, these.count, len(out), col0=these.shard.start)
    if sums is not None and sums.rows is not None and len(entry):
        out += torch.where(sums.first >= 0, sums.rows[sums.first.clamp(min=0).long(), 0], 0)
    if uniform is not None and these.class_weight is not None:
        out += these.class_weight[: len(out)] * uniform.sum()


def _gradients(
    ctx: Any,
    saved: tuple[Any, ...],
    grad_losses: torch.Tensor | None,
    grad_entropy: torch.Tensor | None,
) -> tuple[torch.Tensor | None, ...]:
    """The second pass: the gradients of hidden, weight, bias and scale from what forward saved."""
    (
        hidden, weight, bias, logit_scale, class_weight, whole, ids, order, count, row_max, log_sum, loss, entropy,
        logit, kept, reference, _,
    ) = saved  # fmt: skip
    inputs = LossInputs(hidden, weight, bias, logit_scale, order, class_weight)
    these = _Operands.start(inputs, ctx.options, places=(ids, order, count), whole=whole)  # collective
    rows = RowStatistics(row_max, log_sum, loss, entropy, logit=logit)
    if grad_losses is None:
        grad_losses = torch.zeros(len(order), dtype=these.wide, device=weight.device)
    grad_entropy = None if entropy is None or grad_entropy is None else these.packed(grad_entropy)
    coefficients = these.objective.coefficients(rows, ids, these.packed(grad_losses), these.logits, grad_entropy)
    coefficients, factor = _normalise(coefficients, weight.dtype)
    scale = factor if logit_scale is None else factor * logit_scale
    dtype, wide, kept_columns = weight.dtype, these.wide, 0 if kept is None else kept.shape[1]
    # the target's entry in a panel has all of it
    entry = coefficients.entry
    if coefficients.uniform is not None:
        own = coefficients.uniform * these.objective.weights(ids)
        entry = (entry + (own if coefficients.target_slope is None else own * coefficients.target_slope)).to(wide)
    residual = entry - entry.to(dtype)
    if kept is not None:
        # the kept columns have none of it
        local = ids - these.shard.start
        apart = (local >= 0) & (local < kept_columns)
        entry, residual = torch.where(apart, 0, entry), torch.where(apart, coefficients.entry, residual)
    state = RowState(
        ids, row_max, log_sum, coefficients.factor, entry, None if dtype == wide and kept is None else residual,
        coefficients.log_factor, coefficients.uniform, these.class_weight,
    )  # fmt: skip
    gradients = _Gradients(these, weight, ctx.needs_input_grad[:4])
    kept_factor = None
    if kept is not None:
        kept_factor = torch.where(state.factor == 0, 0, state.factor * _softmax_scale(reference, rows))
    _walk_panels(these, state, scale, gradients, kept, kept_factor)
    return gradients.finish(factor)


def _walk_panels(
    these: _Operands,
    state: RowState,
    scale: torch.Tensor,
    gradients: _Gradients,
    kept: torch.Tensor | None,
    factor: torch.Tensor | None,
) -> None:
    """Fills the gradients a panel of columns at a time, and starts the reduction of that of the hidden states."""
    d_hidden, d_weight, d_bias = gradients.hidden, gradients.weight, gradients.bias
    c, count, col0, plan, group = these.c, these.count, these.shard.start, these.options.plan, these.shard.group
    num_v, start = len(c), 0 if kept is None else kept.shape[1]
    reducing, grow = False, these.options.main_grad is not None
    if d_hidden is not None:
        if kept is not None:
            # slices of the hidden states may still be on their way
            hidden_gradient(kept, c, count, d_hidden.packed, v0=0, add=False)
        uniform = None
        if start and state.uniform is not None and state.class_weight is not None:
            uniform = state.uniform, _weighted_sum(c[:start], state.class_weight[:start])
        target_rows(c, state.targets, state.residual, d_hidden.packed, col0=col0, scale=factor, uniform=uniform)
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
                    e, c, these.logits, state, count, panel,
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
                        gradients.add_scale(pieces[0])
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
            gradients.add_scale(piece)
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
            column_sums(kept, factor, count, d_bias[:start])
            _add_bias_gradient(d_bias[:start], these, state.residual, state.uniform)
        if d_weight is not None:
            uniform = None
            if state.uniform is not None and state.class_weight is not None:
                uniform = state.class_weight[:start], _weighted_sum(e, state.uniform)
            scale_rows(e, factor)
            sums = None if whole is None else whole[slice(0, start)]
            add_weight(kept, everything, slice(0, start), sums, uniform=uniform)
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
    def forward(ctx: Any, name: str, gradient: torch.Tensor) -> torch.Tensor:
        ctx.name = name
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        raise RuntimeError(f"{ctx.name} has no second derivative: its gradients cannot be differentiated")


def undifferentiable(name: str, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    """What a backward of the operation ``name`` returns: its gradients, which raise where they are differentiated."""
    if not torch.is_grad_enabled():
        return gradients
    # create_graph: without a node the gradients would pass for constants, also in a penalty on their norm
    return tuple(g if g is None else _Undifferentiable.apply(name, g.requires_grad_()) for g in gradients)


def fp16_exponent(sizes: torch.Tensor) -> torch.Tensor:
    """That of the power of two by which the largest of ``sizes`` [N], finite, comes between 2**13 and 2**14."""
    # the bounds are the powers, and their inverses, that fp32 has
    return torch.frexp(sizes.amax()).exponent.clamp(-100, 128) - 14


def _normalise(coefficients: Coefficients, dtype: torch.dtype) -> tuple[Coefficients, torch.Tensor]:
    """(coefficients / factor, factor), for fp16 with factor a power of two that puts the largest entry that they can
    give between 2**12 and 2**14, for other dtypes 1.

    An fp16 panel then neither overflows nor loses small entries, whatever the loss scale. The products carry
    ``factor`` in their epilogues.
    """
    parts = [coefficients.factor, coefficients.entry, coefficients.log_factor, coefficients.uniform]
    one = coefficients.factor.new_ones(())
    if dtype != torch.float16 or not len(coefficients.factor):
        return coefficients, one
    # a NaN or inf is its own token's
    sizes = torch.stack([torch.where(part.isfinite(), part.abs(), 0) for part in parts if part is not None]).sum(0)
    exponent = fp16_exponent(sizes)
    names = ("factor", "entry", "log_factor", "uniform")
    scaled: dict[str, Any] = {
        name: None if part is None else torch.ldexp(part, -exponent) for name, part in zip(names, parts, strict=True)
    }
    return replace(coefficients, **scaled), torch.ldexp(one, exponent)
