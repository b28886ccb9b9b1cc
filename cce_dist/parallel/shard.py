"""The value object that says which rows of the vocabulary a rank holds."""

from __future__ import annotations

import itertools
import os
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from .checkpoint import ShardedRows
from .collectives import rank_and_size

# by their keys, for compiled graphs
SHARDS: weakref.WeakValueDictionary[str, VocabShard] = weakref.WeakValueDictionary()
_keys = map("shard {}".format, itertools.count())


@dataclass(frozen=True)
class VocabShard:
    """Rows ``start`` to ``stop`` of a classifier over ``vocab_size`` classes, held by this rank of ``group``.

    Rows at or past ``vocab_size`` are padding: they take no part in the softmax and their gradient is 0. A shard may
    be empty. ``group`` None means one rank, also where a process group is initialised. The shards of a group's ranks
    must tile the vocabulary; the first call of the loss with a shard compares them over the group, so make a shard
    once and keep it.

    With ``sequence_parallel`` each rank passes its own slice of the hidden states: ``[..., D]`` whose leading shape
    is that of the targets but for one dimension, of which the ranks' slices, of any lengths, make up the whole in
    the order of the ranks. They are gathered for the products and not kept, and the gradient is that of the slice.

    Raises ``ValueError`` for bounds that are not ``0 <= start <= stop``, for a ``vocab_size`` below 1 or from
    2**31 - 1 on, and for a shard without a group that is not the whole vocabulary.
    """

    start: int
    stop: int
    vocab_size: int
    group: dist.ProcessGroup | None = None
    sequence_parallel: bool = False
    # what the group's ranks have agreed on, see agreement.py
    agreed: dict[tuple[Any, ...], list[Any]] = field(default_factory=dict, init=False, repr=False, compare=False)
    # what stands for it in a compiled graph, which is another one for another shard; a number would pass for a size
    key: str = field(default_factory=_keys.__next__, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.vocab_size < 1:
            raise ValueError(f"VocabShard: vocab_size must be at least 1, got {self.vocab_size}")
        if self.vocab_size >= 2**31 - 1:
            # class ids are sorted as 32 bits
            raise ValueError(f"VocabShard: vocab_size must be below 2**31 - 1, got {self.vocab_size}")
        if not 0 <= self.start <= self.stop:
            raise ValueError(f"VocabShard: bounds must be 0 <= start <= stop, got {self.start} and {self.stop}")
        if isinstance(self.group, int):
            # what torch.distributed hands to processes outside a new group
            raise ValueError("VocabShard: this process is not a member of the process group that was passed")
        if self.group is None and (self.start > 0 or self.stop < self.vocab_size):
            raise ValueError(
                f"VocabShard: rows {self.start} to {self.stop} are not the whole vocabulary of {self.vocab_size}; "
                "pass the process group whose ranks hold the other rows"
            )

        SHARDS[self.key] = self

    def __reduce__(self) -> tuple[Any, ...]:
        # with a key of its own
        return VocabShard, (self.start, self.stop, self.vocab_size, self.group, self.sequence_parallel)

    def __deepcopy__(self, memo: dict[int, Any]) -> VocabShard:
        # a value; a process group has no copy
        return self

    @property
    def rows(self) -> int:
        """Rows of the weight that this rank holds, padding included."""
        return self.stop - self.start

    @property
    def classes(self) -> int:
        """Rows of the weight that this rank holds and that are classes."""
        return max(0, min(self.stop, self.vocab_size) - self.start)

    @classmethod
    def even(
        cls,
        vocab_size: int,
        group: dist.ProcessGroup | None = None,
        *,
        multiple_of: int = 1,
        sequence_parallel: bool = False,
    ) -> VocabShard:
        """Balanced: the first ``vocab_size % R`` ranks hold one row more than the others.

        With ``multiple_of`` whole blocks of so many rows are dealt out and the last rank's tail is short: with 256
        the loss has the same bits for every group size.
        """
        if multiple_of < 1:
            raise ValueError(f"VocabShard.even: multiple_of must be at least 1, got {multiple_of}")
        rank, size = rank_and_size(group)
        base, extra = divmod(-(-vocab_size // multiple_of), size)
        start = (rank * base + min(rank, extra)) * multiple_of
        stop = start + (base + (rank < extra)) * multiple_of
        return cls(min(start, vocab_size), min(stop, vocab_size), vocab_size, group, sequence_parallel)

    @classmethod
    def chunked(
        cls, vocab_size: int, group: dist.ProcessGroup | None = None, *, sequence_parallel: bool = False
    ) -> VocabShard:
        """``torch.chunk``'s layout, which DTensor's ``Shard(0)`` has: the last ranks may be short or empty."""
        rank, size = rank_and_size(group)
        chunk = -(-vocab_size // size)
        start, stop = min(rank * chunk, vocab_size), min((rank + 1) * chunk, vocab_size)
        return cls(start, stop, vocab_size, group, sequence_parallel)

    @classmethod
    def padded(
        cls,
        vocab_size: int,
        multiple_of: int = 128,
        group: dist.ProcessGroup | None = None,
        *,
        sequence_parallel: bool = False,
    ) -> VocabShard:
        """Megatron's layout: equal shards of a vocabulary padded to a multiple of ``multiple_of`` times the group's
        size."""
        if multiple_of < 1:
            raise ValueError(f"VocabShard.padded: multiple_of must be at least 1, got {multiple_of}")
        rank, size = rank_and_size(group)
        rows = -(-vocab_size // (multiple_of * size)) * multiple_of
        return cls(rank * rows, (rank + 1) * rows, vocab_size, group, sequence_parallel)

    @classmethod
    def from_dtensor(cls, weight: torch.Tensor) -> VocabShard:
        """What the placements of a ``[vocab_size, D]`` DTensor say: ``Shard(0)`` on one axis of its mesh, whose
        process group is the shard's, and ``Replicate`` on the others. The same object for all weights of this size
        on this axis.

        Raises ``TypeError`` for a plain tensor and ``ValueError`` for other placements.
        """
        from .dtensor import implied_shard

        return implied_shard(weight)

    def checkpoint_view(self, tensor: torch.Tensor) -> ShardedRows:
        """A ``[rows, ...]`` tensor of this rank as ``torch.distributed.checkpoint`` saves and loads it: as rows of
        one ``[vocab_size, ...]`` tensor, so that it loads on any group size and from an unsharded checkpoint.

        Shares the tensor's memory; padding is not saved. Use it for weights and for optimizer states alike. A tensor
        that FSDP2 (``fully_shard``) has spread over a data-parallel mesh gives the rows that are left to this rank.
        """
        if tensor.dim() == 0 or len(tensor) != self.rows:
            raise ValueError(f"tensor must hold the shard's {self.rows} rows, got the shape {tuple(tensor.shape)}")
        local, first = tensor.detach(), 0
        if isinstance(local, DTensor):
            chunks = local.__create_chunk_list__()
            first = chunks[0].offsets[0] if chunks else 0
            local = local.to_local()
        classes = min(max(self.classes - first, 0), len(local))
        return ShardedRows(local[:classes], self.start + first, self.vocab_size)

    def read_safetensors(
        self,
        path: str | os.PathLike[str],
        name: str,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> torch.Tensor:
        """This rank's ``[rows, ...]`` of the whole tensor ``name``, of shape ``[vocab_size, ...]``, in a safetensors
        file. The rest of it is not read; rows of padding are 0.

        Args:
            path: the file, the ``.index.json`` of several, or a folder with ``model.safetensors.index.json`` or
                ``model.safetensors``, as Hugging Face's models are stored.
            dtype, device: of the result; the file's dtype and the CPU where None.

        Raises ``ValueError`` that names the file, the tensor, and the shape where it does not fit;
        ``FileNotFoundError``; ``ImportError`` without the package safetensors.
        """
        from .unsharded import read_rows

        return read_rows(path, name, self, dtype, device)

    def write_safetensors(self, path: str | os.PathLike[str], tensors: Mapping[str, torch.Tensor]) -> None:
        """Writes one safetensors file of whole, unpadded ``[vocab_size, ...]`` tensors, of each of which every rank
        of the group passes its ``[rows, ...]``. The group's first rank writes, and holds 64 MiB at a time.

        Args:
            path: the file, which takes the place of an older one when it is whole; or an ``.index.json``, of Hugging
                Face's form: the tensors go into a file of their own beside it, and are added to it.
            tensors: names to tensors, fp64, fp32, fp16 or bf16.

        Raises on every rank: ``ValueError`` and ``TypeError`` for tensors that are not the shard's rows or differ
        from another rank's, and for names that the index has already; ``OSError`` on the rank that writes and
        ``RuntimeError`` on the others where the file can not be written.
        """
        # these compare shards
        from .unsharded import write_rows

        write_rows(path, tensors, self)
