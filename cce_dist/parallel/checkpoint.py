"""A rank's rows of a tensor that is sharded along its first dimension, as torch.distributed.checkpoint sees them."""

from __future__ import annotations

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType


class ShardedRows(torch.Tensor):
    """Rows from ``start`` of a ``[num_rows, ...]`` tensor: ``local`` holds them.

    Implements the protocol that torch.distributed.checkpoint asks of a sharded object
    (``torch.distributed._checkpointable``), which allows any bounds; DTensor and ShardedTensor allow fewer. A tensor,
    since only among tensors are such objects looked up for saving; its memory is that of ``local``, its ``size()``
    that of the whole.
    """

    # what is computed from it is a plain tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __new__(cls, local: torch.Tensor, start: int, num_rows: int) -> ShardedRows:
        return local.detach().as_subclass(cls)

    def __init__(self, local: torch.Tensor, start: int, num_rows: int) -> None:
        self.local, self.start = local, start
        self._size = torch.Size((num_rows, *local.shape[1:]))

    def size(self) -> torch.Size:  # type: ignore[override]
        return self._size

    def _offsets(self) -> torch.Size:
        return torch.Size((self.start, *(0 for _ in self._size[1:])))

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        # an empty shard has nothing to save or load
        return [ChunkStorageMetadata(self._offsets(), self.local.shape)] if self.local.numel() else []

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, TensorProperties.create_from_tensor(self.local), self._size),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        if index.offset is not None and index.offset != self._offsets():
            raise ValueError(f"{index.fqn}: this rank holds the rows at {self._offsets()}, not at {index.offset}")
        return self.local
