"""Divergences between two heads: kernels and collectives in their order."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ..kernels.divergence import add_mixture_divergences, add_statistics, divergence_gradient, rescaled
from ..kernels.logits import LogitMap
from ..kernels.panel import panel_logits
from ..kernels.product import hidden_gradient, weight_gradient
from ..kernels.rows import pack_order, packing, take_rows, unpacking
from ..kernels.runtime import round_up
from ..parallel.collectives import all_reduce
from ..parallel.shard import VocabShard
from .gradients import fp16_exponent, undifferentiable

# the label of a token that does not count; the others have 0
UNCOUNTED = -100
# columns of a panel's memory past its widest panel: they take what is no entry of the panel, and keep rows aligned
SPARE = 64


@dataclass(frozen=True)
class DivergenceOptions:
    """What travels below ``distillation``."""

    shard: VocabShard
    kind: str  # "forward" | "reverse" | "jensen_shannon" | "top_k"
    beta: float
    temperature: float
    # of student and teacher
    softcaps: tuple[float | None, float | None]
    # a panel's rows and columns
    rows: int
    columns: int

    @property
    def expect(self) -> int | None:
        """The head over whose softmax the first pass takes an expectation."""
        return {"forward": 1, "reverse": 0}.get(self.kind)


@dataclass
class _Heads:
    """Student, and teacher where there is one: packed hidden states, and this rank's classes."""

    e: list[torch.Tensor]
    c: list[torch.Tensor]
    logits: list[LogitMap]
    ids: torch.Tensor
    order: torch.Tensor
    count: torch.Tensor
    options: DivergenceOptions

    @classmethod
    def start(
        cls,
        student: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None],
        teacher: tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None],
        places: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        options: DivergenceOptions,
    ) -> _Heads:
        index, classes = packing(*places[:2]), options.shard.classes
        heads = [(e, c, b) for e, c, b in (student, teacher) if e is not None and c is not None]
        return cls(
            [take_rows(e, index) for e, _, _ in heads],
            [c[:classes] for _, c, _ in heads],
            [
                LogitMap(None if b is None else b[:classes], softcap=softcap)
                for (_, _, b), softcap in zip(heads, options.softcaps, strict=False)
            ],
            *places,
            options,
        )

    @property
    def wide(self) -> torch.dtype:
        return torch.promote_types(self.e[0].dtype, torch.float32)

    def live(self) -> torch.Tensor:
        return torch.arange(len(self.ids), device=self.ids.device) < self.count

    def packed(self, x: torch.Tensor) -> torch.Tensor:
        """The tokens' ``x`` [N, ...] in the order of the packed rows, anything where there is no token."""
        return x[packing(self.ids, self.order).clamp(min=0)]

    def memory(self, dtype: torch.dtype) -> torch.Tensor:
        options = self.options
        rows, columns = min(options.rows, len(self.ids)), min(options.columns, options.shard.classes)
        return self.e[0].new_empty(rows, round_up(columns, SPARE) + SPARE, dtype=dtype)

    def panels(self) -> Iterator[tuple[slice, slice, torch.Tensor, torch.Tensor | None]]:
        """(rows, columns, student's logits, teacher's) of each panel, the rows of some columns after each other. The
        logits' memory is that of the next panel, and one ``SPARE`` wider than the panel."""
        options, (n, v) = self.options, (len(self.ids), len(self.c[0]))
        memory = [self.memory(self.wide) for _ in self.e]
        for v0 in range(0, v, options.columns):
            columns = slice(v0, min(v0 + options.columns, v))
            for n0 in range(0, n, options.rows):
                rows = slice(n0, min(n0 + options.rows, n))
                panels = []
                for head, whole in enumerate(memory):
                    panel = whole[: rows.stop - n0, : columns.stop - v0]
                    panel_logits(
                        self.e[head], self.c[head], self.logits[head], self.count, panel, row0=n0, v0=v0,
                        scale=1 / options.temperature,
                    )  # fmt: skip
                    panels.append(panel)
                yield rows, columns, panels[0], panels[1] if len(panels) > 1 else None


class Divergences(torch.autograd.Function):
    """The divergence of each token.

    | tensor | shape | dtype |
    |---|---|---|
    | hidden, teacher_hidden | [N, D], [N, D'] | fp32, bf16, fp16, fp64 |
    | weight, teacher_weight | [V, D], [V, D'] | their hidden's |
    | bias, teacher_bias | [V] or None | their hidden's |
    | top_ids, top_probs | [N, K] in place of a teacher's head | int64, floating |
    | labels | [N] | int64: UNCOUNTED, or 0 for a token that counts |
    | losses | [N] | fp32 (fp64 for fp64) |

    With ``s`` and ``t`` the heads' logits over the temperature T, ``q`` and ``p`` their softmaxes and ``lse`` the
    logs of their sums: forward ``L = E_p[t - s] - lse_t + lse_s``; reverse the same with the heads exchanged;
    Jensen-Shannon ``L = beta KL(p || m) + (1 - beta) KL(q || m)``, for ``m = beta p + (1 - beta) q``; top_k
    ``L = sum_k p_k (log p_k - s_k + lse_s)``. Backward, with ``g`` the upstream gradient over T:
    ``dx = (q - p) g``, ``q (log(q / p) - L) g``, ``(1 - beta) q (log(q / m) - KL(q || m)) g``, and
    ``(q sum_k p_k - p) g``; ``dE = dx C`` summed over ranks, ``dC = dx^T E``, ``db`` the sum of ``dx`` over tokens.
    Collectives: two of O(N) in ``_merged``, for Jensen-Shannon one more, one of dE in backward.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        teacher_hidden: torch.Tensor | None,
        teacher_weight: torch.Tensor | None,
        teacher_bias: torch.Tensor | None,
        top_ids: torch.Tensor | None,
        top_probs: torch.Tensor | None,
        labels: torch.Tensor,
        options: DivergenceOptions,
    ) -> torch.Tensor:
        teacher = teacher_hidden, teacher_weight, teacher_bias
        these = _Heads.start((hidden, weight, bias), teacher, pack_order(labels, UNCOUNTED), options)
        n, wide, group = len(these.ids), these.wide, options.shard.group
        maximum = torch.full((len(these.e), n), -math.inf, dtype=wide, device=hidden.device)
        total, expectation = torch.zeros_like(maximum), torch.zeros_like(maximum[0])
        top = None
        if top_ids is not None and top_probs is not None:
            top = _TopK.start(these, top_ids, top_probs)
        for rows, columns, s, t in these.panels():
            if top is not None:
                top.capture(s, rows, columns)
            add_statistics(s, t, these.count, maximum, total, expectation, row0=rows.start, expect=options.expect)
        maximum, sums = _merged(maximum, total, expectation, top, options)  # collectives
        log_sums = sums[:-1].log()
        if options.kind == "jensen_shannon":
            log_sum, parts = log_sums.to(wide), torch.zeros_like(maximum)
            for rows, _, s, t in these.panels():
                assert t is not None
                add_mixture_divergences(
                    s, t, these.count, maximum, log_sum, parts, row0=rows.start, beta=options.beta
                )
            parts = parts.double()
            all_reduce(parts, group)  # collective
            loss, center = options.beta * parts[1] + (1 - options.beta) * parts[0], parts[0]
        else:
            if top is not None:
                loss = sums[-1] + top.mass * log_sums[0]
            else:
                assert options.expect is not None
                w, o = options.expect, 1 - options.expect
                loss = sums[-1] / sums[w] - log_sums[w] + log_sums[o]
            center = loss
        loss = torch.where(these.live(), loss, 0).to(wide)
        ctx.save_for_backward(
            hidden, weight, bias, *teacher, these.ids, these.order, these.count, maximum, log_sums.to(wide),
            loss, center.to(wide), *((None,) * 3 if top is None else (top.ids, top.probs, top.logits)),
        )  # fmt: skip
        ctx.options = options
        return loss.new_empty(len(these.order)).scatter_(0, these.order, loss[: len(these.order)])

    @staticmethod
    def backward(ctx: Any, grad_losses: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        with torch.no_grad():
            gradients = _gradients(ctx, grad_losses)
        return (*undifferentiable("linear_kl_div", *gradients), *(None,) * 7)


@dataclass
class _TopK:
    """A teacher's K probabilities a token, packed, and the student's logits there: [n, K]."""

    ids: torch.Tensor  # counted from this rank's first class
    probs: torch.Tensor
    logits: torch.Tensor

    @classmethod
    def start(cls, these: _Heads, ids: torch.Tensor, probs: torch.Tensor) -> _TopK:
        packed, shard = these.packed(ids), these.options.shard
        # an id that is none of the vocabulary costs its token the loss
        known = (packed >= 0) & (packed < shard.vocab_size)
        values = torch.where(known, these.packed(probs).to(these.wide), math.nan)
        return cls(packed - shard.start, values, torch.zeros_like(values))

    @property
    def mass(self) -> torch.Tensor:
        return self.probs.double().sum(1)

    def _places(self, rows: slice, columns: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """(index, inside): the panel's columns that the ids are, one past them where they are none."""
        inside = (self.ids[rows] >= columns.start) & (self.ids[rows] < columns.stop)
        return torch.where(inside, self.ids[rows] - columns.start, columns.stop - columns.start), inside

    def capture(self, s: torch.Tensor, rows: slice, columns: slice) -> None:
        index, inside = self._places(rows, columns)
        found = s.gather(1, index.clamp(max=s.shape[1] - 1))
        self.logits[rows] = torch.where(inside, found, self.logits[rows])

    def term(self, maximum: torch.Tensor, classes: int) -> torch.Tensor:
        """[n]: the sum of ``p_k (log p_k - (s_k - maximum))`` over this rank's classes."""
        own = (self.ids >= 0) & (self.ids < classes) & (self.probs != 0)
        probs = self.probs.double()
        return torch.where(own, probs * (probs.log() - (self.logits.double() - maximum[:, None])), 0).sum(1)

    def entries(
        self, log_sum: torch.Tensor, maximum: torch.Tensor, grad: torch.Tensor, ceiling: float | None
    ) -> torch.Tensor:
        """[n, K]: the gradient of the logits there. Equal ids have equal entries."""
        whole = torch.zeros_like(self.probs)
        for k in range(self.ids.shape[1]):
            whole[:, k] = torch.where(self.ids == self.ids[:, k, None], self.probs, 0).sum(1)
        q = torch.exp(self.logits - maximum[:, None] - log_sum[:, None])
        dx = (q * self.mass.to(q.dtype)[:, None] - whole) * grad[:, None]
        if ceiling is not None:
            dx *= 1 - (self.logits / ceiling).square()
        # a row without a token holds anything here, and zeros in a panel
        return torch.where(grad[:, None] == 0, 0, dx)

    def write(self, memory: torch.Tensor, entries: torch.Tensor, rows: slice, columns: slice) -> None:
        """Puts the entries into a panel, whose memory is wider than it is."""
        index, _ = self._places(rows, columns)
        memory[: rows.stop - rows.start].scatter_(1, index, entries[rows].to(memory.dtype))


def _merged(
    maximum: torch.Tensor,
    total: torch.Tensor,
    expectation: torch.Tensor,
    top: _TopK | None,
    options: DivergenceOptions,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(maximum [H, n], sums [H + 1, n] in fp64) over all ranks; the last sum is the expectation's, or that of the top
    k. Not every library's maximum carries a NaN: the sums do."""
    largest = maximum.clone()
    all_reduce(largest, options.shard.group, dist.ReduceOp.MAX)  # collective
    new, last = largest.double(), expectation.double()
    sums, last = rescaled(maximum.double(), total.double(), last, new, options.expect)
    if top is not None:
        last = top.term(torch.where(new[0] == -math.inf, 0, new[0]), options.shard.classes)
    sums = torch.cat([sums, last[None]])
    all_reduce(sums, options.shard.group)  # collective
    return largest, sums


def _gradients(ctx: Any, grad_losses: torch.Tensor) -> list[torch.Tensor | None]:
    """The gradients of hidden, weight and bias, from what forward saved."""
    # asked for once, as activation checkpointing allows
    saved = ctx.saved_tensors
    hidden, weight, bias, *teacher, ids, order, count, maximum, log_sum, loss, center = saved[:-3]
    top_ids, top_probs, top_logits = saved[-3:]
    options: DivergenceOptions = ctx.options
    these = _Heads.start((hidden, weight, bias), tuple(teacher), (ids, order, count), options)
    n, wide, dtype, live = len(ids), these.wide, weight.dtype, these.live()
    needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
    grad = torch.where(live, these.packed(grad_losses.to(wide)), 0) / options.temperature
    bound = torch.ones_like(grad)
    if options.kind == "jensen_shannon":
        grad *= 1 - options.beta
    if options.kind in ("reverse", "jensen_shannon"):
        # q log(q / p) lies between -1 / e and 1 / e more than its sum
        bound += loss
    entries = None
    if top_ids is not None:
        top = _TopK(top_ids, top_probs, top_logits)
        bound = top.mass.to(wide)
    grad, unit = _normalise(grad, bound, dtype)
    ceiling = None if options.softcaps[0] is None else options.softcaps[0] / options.temperature
    if top_ids is not None:
        entries = top.entries(log_sum[0], maximum[0], grad, ceiling)
        grad *= bound

    d_hidden = torch.zeros(n, hidden.shape[1], dtype=wide, device=hidden.device) if needs_hidden else None
    d_weight = torch.empty_like(weight, memory_format=torch.contiguous_format) if needs_weight else None
    d_bias = torch.zeros(len(weight), dtype=wide, device=hidden.device) if needs_bias else None
    if d_weight is not None:
        # padding, and everything where there is no token
        d_weight[options.shard.classes if n else 0 :] = 0
    memory = None if dtype == wide else these.memory(dtype)
    sums = None
    if d_weight is not None and n > options.rows and dtype != wide:
        sums = torch.empty(options.columns, hidden.shape[1], dtype=wide, device=hidden.device)
    for rows, columns, s, t in these.panels():
        panel = s if memory is None else memory[: len(s), : s.shape[1]]
        divergence_gradient(
            s, t, panel, count, maximum, log_sum, center, grad, row0=rows.start, kind=options.kind,
            beta=options.beta, ceiling=ceiling,
        )  # fmt: skip
        if entries is not None:
            for x in (s,) if memory is None else (s, memory):
                # with the spare columns
                wider = x.as_strided((len(s), s.shape[1] + 1), x.stride())
                top.write(wider, entries, rows, columns)
        if d_bias is not None:
            d_bias[columns] += torch.where(live[rows, None], s, 0).sum(0)
        if d_hidden is not None:
            hidden_gradient(panel, these.c[0], count, d_hidden[rows], v0=columns.start, row0=rows.start, add=True)
        if d_weight is not None:
            part, last = d_weight[columns], rows.stop == n
            weight_gradient(
                panel, these.e[0][rows], count, unit, part if sums is None else sums[: len(part)],
                row0=rows.start, add=rows.start > 0, last=last,
            )  # fmt: skip
            if sums is not None and last:
                part.copy_(sums[: len(part)])
    d_states = None
    if d_hidden is not None:
        all_reduce(d_hidden, options.shard.group)  # collective
        d_states = take_rows(d_hidden, unpacking(ids, order), scale=unit, dtype=dtype)
    return [d_states, d_weight, None if d_bias is None else (d_bias * unit).to(dtype)]


def _normalise(grad: torch.Tensor, bound: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """(grad / unit, unit), for fp16 with unit a power of two that puts the largest of ``grad bound``, above which no
    entry of its row lies, between 2**13 and 2**14, for other dtypes 1: an fp16 panel then neither overflows nor loses
    small entries, whatever the loss scale."""
    if dtype != torch.float16 or not len(grad):
        return grad, grad.new_ones(())
    entry = (grad * bound).abs()
    # a NaN or inf is its own token's
    exponent = fp16_exponent(torch.where(entry.isfinite(), entry, 0))
    return torch.ldexp(grad, -exponent), torch.ldexp(grad.new_ones(()), exponent)
