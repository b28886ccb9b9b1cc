"""The loss of each token: methods ``recompute`` and ``cached``."""

from __future__ import annotations

from typing import Any

import torch

from ..kernels.statistics import RowStatistics, sum_bits
from ..parallel.merge import merge_statistics
from .gradients import undifferentiable
from .operands import LossInputs, Operands, TokenValues
from .second_pass import save_for_second_pass, second_pass
from .steps import NOTHING_KEPT, Kept, chunk_statistics, references


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
    P exp(r - lse)``, and what else ``dx`` has is taken apart. The plan has some of it wait in the memory of ``dC``.
    Collectives: two or three small ones a chunk of tokens in ``merge_statistics``, for ``cached`` one of the
    references, one of dE in backward, one of ds.
    """

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> TokenValues:
        inputs, options = LossInputs(*arguments[:-1]), arguments[-1]
        these = Operands.start(inputs, options, keep=not ctx.needs_input_grad[0])  # collective
        kept, reference = NOTHING_KEPT, None
        if options.plan.method == "cached":
            kept, reference = Kept.start(these, inputs.weight, ctx.needs_input_grad[1]), references(these)
        logit = torch.zeros(these.num_rows, dtype=these.wide, device=these.c.device)
        bits, parts = sum_bits(options.shard.vocab_size), []
        for chunk in these.chunks(these.statistics_chunk()):
            panels = [panel[..., chunk, :] for _, panel in kept.panels()]
            statistics = chunk_statistics(these, chunk, logit, panels, reference)
            parts.append(merge_statistics(statistics, bits, options.shard.group))  # collectives
        rows = RowStatistics.cat(parts) if parts else these.no_rows()
        loss = these.objective.loss(rows, these.ids)
        save_for_second_pass(ctx, inputs, these, rows, kept, reference)
        values = TokenValues.of(rows, loss, these)
        fixed = [values.nll, values.lse, values.argmax, None if options.entropy else values.entropy]
        ctx.mark_non_differentiable(*(x for x in fixed if x is not None))
        ctx.set_materialize_grads(False)
        return values

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        with torch.no_grad():
            gradients = second_pass(ctx, ctx.saved_tensors, grads[0], grads[3])
        return undifferentiable("linear_cross_entropy", *gradients, None, None, None)
