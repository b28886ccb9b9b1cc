"""The loss, the vocabulary-parallel head and embedding as modules."""

from __future__ import annotations

import inspect
import math
import os
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

from .functional import linear_cross_entropy, linear_log_probs
from .parallel.collectives import copy_to_group, gather_columns, reduce_from_group
from .parallel.shard import VocabShard
from .parallel.unsharded import tensor_files, tensor_shape

_OPTIONS = frozenset(inspect.signature(linear_cross_entropy).parameters) - {"hidden", "weight", "targets"}


class LinearCrossEntropyLoss(nn.Module):
    """:func:`linear_cross_entropy` with its options bound; those of a call come on top.

    Raises ``TypeError`` for an option that the function does not have.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__()
        if unknown := options.keys() - _OPTIONS:
            raise TypeError(f"unknown options {sorted(unknown)}; linear_cross_entropy has {sorted(_OPTIONS)}")
        self.options = options

    def forward(self, hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, **options: Any) -> Any:
        """hidden ``[..., D]``, weight ``[V, D]``, targets ``[...]`` -> the loss, fp32; with ``return_stats`` a
        tuple of it and the statistics."""
        return linear_cross_entropy(hidden, weight, targets, **{**self.options, **options})

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self.options.items())


class _VocabParallel(nn.Module):
    """Parameters whose first dimension is this rank's rows of the vocabulary."""

    def __init__(self, shard: VocabShard) -> None:
        super().__init__()
        self.shard = shard

    def sharded_state_dict(self, prefix: str = "") -> dict[str, Any]:
        """The parameters as ``torch.distributed.checkpoint`` saves and loads them, whatever the group size; see
        :meth:`VocabShard.checkpoint_view`."""
        return {prefix + name: self.shard.checkpoint_view(p) for name, p in self.named_parameters(recurse=False)}

    def save_safetensors(self, path: str | os.PathLike[str], prefix: str) -> None:
        """Writes the whole parameters, under their names after ``prefix`` (as ``"lm_head."``), where the unsharded
        module would have them. Called on every rank; see :meth:`VocabShard.write_safetensors`."""
        self.shard.write_safetensors(path, {prefix + name: p for name, p in self.named_parameters(recurse=False)})

    def _draw(self, parameter: nn.Parameter, bound: float | None) -> None:
        """Fills the rank's rows: uniform in +-bound, or standard normal. Every rank draws the whole vocabulary in the
        same steps, so that the rows depend on the seed alone and the ranks' generators stay together."""
        if parameter.is_meta:
            return
        step, shard = 4096, self.shard
        with torch.no_grad():
            parameter.zero_()
            for start in range(0, shard.vocab_size, step):
                rows = parameter.new_empty(min(step, shard.vocab_size - start), *parameter.shape[1:])
                if bound is None:
                    rows.normal_()
                else:
                    rows.uniform_(-bound, bound)
                first, last = max(start, shard.start), min(start + len(rows), shard.start + shard.classes)
                if first < last:
                    parameter[first - shard.start : last - shard.start] = rows[first - start : last - start]

    def extra_repr(self) -> str:
        return f"rows {self.shard.start}:{self.shard.stop} of {self.shard.vocab_size}"


class VocabParallelLMHead(_VocabParallel):
    """A language model's head whose rows are spread over a group.

    Args:
        hidden_size, vocab_size: of the whole head.
        bias: whether the head has one.
        group: the tensor-parallel group; None is one rank.
        shard: this rank's rows; ``VocabShard.even(vocab_size, group)`` where None.
        device, dtype: of the parameters ``weight`` [V, D] and ``bias`` [V]. They are initialised as
            ``torch.nn.Linear`` does, to the same values for every group size.
    """

    def __init__(
        self,
        hidden_size: int,
        vocab_size: int,
        bias: bool = False,
        group: dist.ProcessGroup | None = None,
        *,
        shard: VocabShard | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(_shard_for(vocab_size, group, shard))
        self.weight = nn.Parameter(torch.empty(self.shard.rows, hidden_size, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(self.shard.rows, device=device, dtype=dtype)) if bias else None
        self._sizes: list[int] | None = None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        bound = 1 / math.sqrt(self.weight.shape[1])
        self._draw(self.weight, bound)
        if self.bias is not None:
            self._draw(self.bias, bound)

    @classmethod
    def from_linear(
        cls, linear: nn.Linear, group: dist.ProcessGroup | None = None, *, shard: VocabShard | None = None
    ) -> VocabParallelLMHead:
        """This rank's rows of an unsharded ``torch.nn.Linear`` of shape [vocab_size, D], copied."""
        vocab_size, hidden_size = linear.weight.shape
        shard = _shard_for(vocab_size, group, shard)
        head = cls(hidden_size, vocab_size, linear.bias is not None, shard=shard, device="meta")
        head.weight = _rows_of(linear.weight, shard)
        if linear.bias is not None:
            head.bias = _rows_of(linear.bias, shard)
        return head

    @classmethod
    def from_safetensors(
        cls,
        path: str | os.PathLike[str],
        prefix: str,
        group: dist.ProcessGroup | None = None,
        *,
        shard: VocabShard | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> VocabParallelLMHead:
        """This rank's rows of a whole ``weight`` [vocab_size, D], and of a ``bias`` where there is one, named after
        ``prefix`` (as ``"lm_head."``) in a safetensors file; see :meth:`VocabShard.read_safetensors`."""
        weight, shard = _read_weight(path, prefix, group, shard, device, dtype)
        bias = prefix + "bias" if prefix + "bias" in tensor_files(path) else None
        head = cls(weight.shape[1], shard.vocab_size, bias is not None, shard=shard, device="meta")
        head.weight = weight
        if bias is not None:
            _check_dims(path, bias, "[vocab_size]")
            head.bias = nn.Parameter(shard.read_safetensors(path, bias, dtype=dtype, device=device))
        return head

    def loss(self, hidden: torch.Tensor, targets: torch.Tensor, **options: Any) -> Any:
        """:func:`linear_cross_entropy` of ``hidden`` [..., D], equal on all ranks, and ``targets`` [...]."""
        return linear_cross_entropy(hidden, self.weight, targets, bias=self.bias, shard=self.shard, **options)

    def log_probs(self, hidden: torch.Tensor, targets: torch.Tensor, **options: Any) -> Any:
        """:func:`linear_log_probs`, likewise."""
        return linear_log_probs(hidden, self.weight, targets, bias=self.bias, shard=self.shard, **options)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[..., D] -> [..., vocab_size]: the logits, gathered on every rank. For generation and evaluation; training
        needs :meth:`loss` alone."""
        classes = self.shard.classes
        local = F.linear(
            copy_to_group(hidden, self.shard.group),
            self.weight[:classes],
            None if self.bias is None else self.bias[:classes],
        )
        return gather_columns(local, self._gather_sizes(), self.shard.group)

    def _gather_sizes(self) -> list[int]:
        if self._sizes is None:
            group = self.shard.group
            bounds: list[Any] = [(self.shard.start, self.shard.classes)]
            if group is not None and group.size() > 1:
                bounds = [None] * group.size()
                dist.all_gather_object(bounds, (self.shard.start, self.shard.classes), group=group)
            filled = [bound for bound in bounds if bound[1]]
            if filled != sorted(filled):
                raise ValueError(f"shard: gathered logits need shards in the order of the ranks, got {bounds}")
            self._sizes = [classes for _, classes in bounds]
        return self._sizes


class VocabParallelEmbedding(_VocabParallel):
    """An embedding whose rows are spread over a group: [...] int64 ids, equal on all ranks -> [..., D].

    Args:
        hidden_size, vocab_size: of the whole embedding.
        group, shard, device, dtype: as in :class:`VocabParallelLMHead`. Initialised as ``torch.nn.Embedding``.
        padding_idx: the row that gets no gradient, as in ``torch.nn.Embedding``.
        weight: a parameter to share: ``VocabParallelEmbedding.tied_to(head)`` is the short form.

    Raises ``IndexError`` for an id outside the vocabulary on CPUs; on GPUs such a token embeds to NaN.
    """

    def __init__(
        self,
        hidden_size: int,
        vocab_size: int,
        group: dist.ProcessGroup | None = None,
        *,
        shard: VocabShard | None = None,
        padding_idx: int | None = None,
        weight: nn.Parameter | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(_shard_for(vocab_size, group, shard))
        self.padding_idx = padding_idx
        if weight is not None:
            if weight.shape != (self.shard.rows, hidden_size):
                expected = (self.shard.rows, hidden_size)
                raise ValueError(f"weight must have the shape {expected} of the shard, got {tuple(weight.shape)}")
            self.weight = weight
        else:
            self.weight = nn.Parameter(torch.empty(self.shard.rows, hidden_size, device=device, dtype=dtype))
            self.reset_parameters()

    def reset_parameters(self) -> None:
        self._draw(self.weight, None)
        index = self._local_padding_idx()
        if index is not None and not self.weight.is_meta:
            with torch.no_grad():
                self.weight[index] = 0

    @classmethod
    def tied_to(cls, head: VocabParallelLMHead, padding_idx: int | None = None) -> VocabParallelEmbedding:
        """The embedding that shares a head's weight and shard."""
        return cls(
            head.weight.shape[1],
            head.shard.vocab_size,
            shard=head.shard,
            weight=head.weight,
            padding_idx=padding_idx,
        )

    @classmethod
    def from_embedding(
        cls, embedding: nn.Embedding, group: dist.ProcessGroup | None = None, *, shard: VocabShard | None = None
    ) -> VocabParallelEmbedding:
        """This rank's rows of an unsharded ``torch.nn.Embedding``, copied."""
        if embedding.max_norm is not None or embedding.scale_grad_by_freq or embedding.sparse:
            raise ValueError("embedding: max_norm, scale_grad_by_freq and sparse have no vocabulary-parallel form")
        vocab_size, hidden_size = embedding.weight.shape
        shard = _shard_for(vocab_size, group, shard)
        weight = _rows_of(embedding.weight, shard)
        return cls(hidden_size, vocab_size, shard=shard, weight=weight, padding_idx=embedding.padding_idx)

    @classmethod
    def from_safetensors(
        cls,
        path: str | os.PathLike[str],
        prefix: str,
        group: dist.ProcessGroup | None = None,
        *,
        shard: VocabShard | None = None,
        padding_idx: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> VocabParallelEmbedding:
        """This rank's rows of a whole ``weight`` [vocab_size, D], named after ``prefix`` (as
        ``"model.embed_tokens."``) in a safetensors file; see :meth:`VocabShard.read_safetensors`."""
        weight, shard = _read_weight(path, prefix, group, shard, device, dtype)
        return cls(weight.shape[1], shard.vocab_size, shard=shard, weight=weight, padding_idx=padding_idx)

    def _local_padding_idx(self) -> int | None:
        if self.padding_idx is None:
            return None
        index = self.padding_idx % self.shard.vocab_size - self.shard.start
        return index if 0 <= index < self.shard.classes else None

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        shard = self.shard
        outside = (ids < 0) | (ids >= shard.vocab_size)
        if ids.device.type == "cpu" and bool(outside.any()):
            raise IndexError(f"ids must lie in [0, {shard.vocab_size}), got {int(ids[outside][0])}")
        local = ids - shard.start
        elsewhere = (local < 0) | (local >= shard.classes)
        if shard.classes:
            rows = F.embedding(local.masked_fill(elsewhere, 0), self.weight, self._local_padding_idx())
            # where, not a product: another token's row may hold inf
            rows = torch.where(elsewhere[..., None], 0, rows)
        else:
            # an empty shard still takes part in the sum, and its parameter in the graph
            rows = self.weight.new_zeros(*ids.shape, self.weight.shape[1]) + self.weight[:0].sum()
        rows = torch.where(outside[..., None], math.nan, rows)
        return reduce_from_group(rows, shard.group)


def _shard_for(vocab_size: int, group: dist.ProcessGroup | None, shard: VocabShard | None) -> VocabShard:
    if shard is None:
        return VocabShard.even(vocab_size, group)
    if shard.vocab_size != vocab_size:
        raise ValueError(f"shard is of a vocabulary of {shard.vocab_size}, expected vocab_size {vocab_size}")
    if group is not None and group is not shard.group:
        raise ValueError("group differs from shard.group: pass one of them")
    return shard


def _rows_of(whole: torch.Tensor, shard: VocabShard) -> nn.Parameter:
    rows = whole.new_zeros(shard.rows, *whole.shape[1:])
    rows[: shard.classes] = whole.detach()[shard.start : shard.start + shard.classes]
    return nn.Parameter(rows, requires_grad=whole.requires_grad)


def _read_weight(
    path: str | os.PathLike[str],
    prefix: str,
    group: dist.ProcessGroup | None,
    shard: VocabShard | None,
    device: torch.device | str | None,
    dtype: torch.dtype | None,
) -> tuple[nn.Parameter, VocabShard]:
    name = prefix + "weight"
    vocab_size, _ = _check_dims(path, name, "[vocab_size, hidden_size]")
    # where a shard was passed and the file is of another vocabulary, reading says so
    shard = _shard_for(vocab_size if shard is None else shard.vocab_size, group, shard)
    return nn.Parameter(shard.read_safetensors(path, name, dtype=dtype, device=device)), shard


def _check_dims(path: str | os.PathLike[str], name: str, expected: str) -> tuple[int, ...]:
    shape = tensor_shape(path, name)
    if len(shape) != expected.count(",") + 1:
        raise ValueError(f"{path}: {name!r} has the shape {list(shape)}, expected {expected}")
    return shape
