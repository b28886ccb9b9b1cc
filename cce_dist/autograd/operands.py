"""One rank's operands of the loss, and what is known of each token."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ..kernels.config import tiles_for
from ..kernels.logits import LogitMap
from ..kernels.rows import pack_order, packing, take_rows
from ..kernels.runtime import target_of
from ..kernels.statistics import RowStatistics, Wanted
from ..objective import Objective
from ..parallel.collectives import gather_slices
from ..parallel.shard import VocabShard
from ..planner import Plan, token_chunk


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
class Operands:
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
    ) -> Operands:
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
    def of(cls, rows: RowStatistics, loss: torch.Tensor, these: Operands) -> TokenValues:
        stats = these.options.stats
        return cls(
            these.in_order(loss),
            these.in_order(rows.loss) if stats else None,
            these.in_order(rows.row_max + rows.log_sum) if stats else None,
            None if rows.entropy is None else these.in_order(rows.entropy),
            None if rows.argmax is None else these.in_order(rows.argmax, -1),
        )
