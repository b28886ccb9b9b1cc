"""Where gradients grow, and what backward returns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from ..kernels.rows import row_dots, take_rows, unpacking
from ..objective import Coefficients
from ..parallel.collectives import all_reduce, rank_and_size, scatter_sums
from .operands import Operands


class HiddenGradient:
    """dE: each rank's share, in fp32 and in the order of the packed rows, then its sum over the ranks."""

    def __init__(self, these: Operands, needed: bool) -> None:
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


class Gradients:
    """Where the gradients of hidden states, weight, bias and the logits' scale grow: in fp32, the weight's dtype,
    fp32 and fp64, all by the scaled product. None where it is not asked for. The weight's takes ``memory`` where that
    is given."""

    def __init__(
        self, these: Operands, weight: torch.Tensor, needs: Sequence[bool], memory: torch.Tensor | None = None
    ) -> None:
        needs_hidden, needs_weight, self.needs_bias, needs_scale = needs
        self.these, self.dtype = these, weight.dtype
        main_grad, self.weight = these.options.main_grad, None
        if needs_weight and main_grad is not None:
            self.weight = main_grad.tensor
        elif needs_weight:
            if memory is None:
                memory = torch.empty_like(weight, memory_format=torch.contiguous_format)
            # a tensor of its own: what is done to the gradient later is not done to what forward saved
            self.weight = memory.data
            # padding, and everything where there is no token
            self.weight[len(these.c) if these.num_rows else 0 :] = 0
        biased = self.needs_bias or (needs_scale and these.logits.bias is not None)
        self.bias = torch.zeros(len(weight), dtype=these.wide, device=weight.device) if biased else None
        # the scale's comes of the others
        self.hidden = HiddenGradient(these, needs_hidden) if needs_hidden or needs_scale else None
        self.scale = torch.zeros((), dtype=torch.float64, device=weight.device) if needs_scale else None
        # of all entries of all rows
        self.total: torch.Tensor | None = None

    def add_scale(self, rows: slice) -> None:
        """Adds to the scale's gradient what rows of the hidden states' share say, before these are reduced."""
        if self.scale is not None:
            assert self.hidden is not None
            share, e = self.hidden.packed[rows], self.these.e[rows]
            self.scale += row_dots(share, e, self.these.count, row0=rows.start).sum(dtype=torch.float64)

    def add_total(self, rows: Coefficients) -> None:
        """Adds what is known of the sum of all entries."""
        if self.scale is not None and rows.total is not None:
            total = rows.total.sum(dtype=torch.float64)
            self.total = total if self.total is None else self.total + total

    def finish(self, factor: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Those of hidden, weight, bias and scale, times ``factor`` and the logits' scale, which the weight's has."""
        these, logits = self.these, self.these.logits
        # before the results take their place
        these.drop()
        scaled = factor if logits.scale is None else factor * logits.scale
        hidden = None if self.hidden is None else self.hidden.finish(scaled)
        scale = None
        if self.scale is not None:
            sums = self.scale[None]
            if logits.bias is not None:
                assert self.bias is not None
                d_bias = self.bias[: len(these.c)].double()
                # of a class that is impossible nothing depends, though its bias is infinite
                own = torch.where(d_bias == 0, 0, d_bias * logits.bias)
                finite = torch.where(logits.bias.isfinite(), logits.bias.double(), 0)
                sums = torch.stack([self.scale + own.sum(), d_bias.sum(), finite.sum()])
            all_reduce(sums, these.shard.group)  # collective
            total = sums[0]
            if logits.bias is not None and logits.softcap is None:
                # the entries' roundings times the bias that all classes have would drown the rest. what the entries
                # sum to is known, so only differences from the mean bias meet them
                known = 0 if self.total is None else self.total
                total = total - sums[2] / these.shard.vocab_size * (sums[1] - known)
            scale = (total * factor).to(these.wide)
        bias = (self.bias * scaled).to(self.dtype) if self.bias is not None and self.needs_bias else None
        return hidden, self._returned(), bias, scale

    def _returned(self) -> torch.Tensor | None:
        """What backward returns as the classifier's gradient: nothing where it has grown in the parameter's."""
        main_grad = self.these.options.main_grad
        if main_grad is None or self.weight is None:
            return self.weight
        main_grad.parameter.grad_added_to_main_grad = True  # type: ignore[attr-defined]
        return None


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
