"""A rank's rows of a tensor that is sharded along its first dimension, as torch.distributed.checkpoint sees them."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType


class ShardedRows(torch.Tensor):
    """Rows from ``start`` of a ``[num_rows, ...]`` tensor: ``local`` holds them.

    Implements the protocol that torch.distributed.checkpoint asks of a sharded object
    (``torch.distributed._checkpointable``), which allows any bounds; DTensor and ShardedTensor allow fewer. A tensor
    by type alone, since shards are looked up in tensors only: it computes nothing.
    """

    local: torch.Tensor
    start: int

    @staticmethod
    def __new__(cls, local: torch.Tensor, start: int, num_rows: int) -> ShardedRows:
        shape = (num_rows, *local.shape[1:])
        rows = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=local.dtype, device=local.device)
        rows.local, rows.start = local, start
        return rows

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise TypeError(f"a checkpoint view can be saved and loaded only, got {func}; compute with its local rows")

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"ShardedRows({self.start}:{self.start + len(self.local)} of {tuple(self.shape)})"

    def _offsets(self) -> torch.Size:
        return torch.Size((self.start, *(0 for _ in self.shape[1:])))

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        # an empty shard has nothing to save or load
        return [ChunkStorageMetadata(self._offsets(), self.local.shape)] if self.local.numel() else []

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, TensorProperties.create_from_tensor(self.local), self.shape),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        if index.offset is not None and index.offset != self._offsets():
            raise ValueError(f"{index.fqn}: this rank holds the rows at {self._offsets()}, not at {index.offset}")
        return self.local
