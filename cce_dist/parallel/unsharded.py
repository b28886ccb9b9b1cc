"""Whole tensors in safetensors files, read and written as the ranks' rows of them.

Files are read by the package safetensors; written here, since it writes only tensors that one process holds whole.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from .agreement import agree
from .collectives import rank_and_size

if TYPE_CHECKING:
    from .shard import VocabShard

StrPath = str | os.PathLike[str]

_DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
# what travels at a time
_BLOCK_BYTES = 1 << 26


def tensor_files(path: StrPath) -> dict[str, Path]:
    """Names of tensors to the files that hold them. ``path`` is a safetensors file, the index of several, or a folder
    with ``model.safetensors.index.json`` or ``model.safetensors``."""
    path = Path(path)
    if path.is_dir():
        index = path / "model.safetensors.index.json"
        path = index if index.exists() else path / "model.safetensors"
    if _is_index(path):
        return {name: path.with_name(file) for name, file in _read_index(path)["weight_map"].items()}
    with _opened(path) as file:
        return dict.fromkeys(file.keys(), path)


def tensor_shape(path: StrPath, name: str) -> tuple[int, ...]:
    with _part(path, name) as (_, part):
        return tuple(part.get_shape())


def read_rows(
    path: StrPath, name: str, shard: VocabShard, dtype: torch.dtype | None, device: torch.device | str | None
) -> torch.Tensor:
    with _part(path, name) as (file, part):
        shape = part.get_shape()
        if shape[:1] != [shard.vocab_size]:
            raise ValueError(
                f"{file}: {name!r} has the shape {shape}, expected {shard.vocab_size} rows, the classes of the shard"
            )
        start = min(shard.start, shard.vocab_size)
        found = part[start : start + shard.classes]
        # a tensor of its own: what was found is a view of the file
        rows = torch.zeros(shard.rows, *shape[1:], dtype=dtype or found.dtype, device=device)
        rows[: shard.classes] = found
    return rows


def write_rows(path: StrPath, tensors: Mapping[str, torch.Tensor], shard: VocabShard) -> None:
    group, cpu = shard.group, torch.device("cpu")
    rank, size = rank_and_size(group)
    # larger elements first, so that each tensor is aligned
    names = sorted(tensors, key=lambda name: -tensors[name].element_size())
    error: Exception | None = None
    try:
        _check(tensors, shard)
    except (TypeError, ValueError) as raised:
        error = raised
    same = {"tensors": tuple((name, tuple(tensors[name].shape[1:]), tensors[name].dtype) for name in names)}
    agree(shard, same, cpu, error)  # collective

    bounds: list[Any] = [(shard.start, shard.classes)]
    if group is not None and size > 1:
        bounds = [None] * size
        dist.all_gather_object(bounds, (shard.start, shard.classes), group=group)  # collective
    owners = [(owner, classes) for (_, classes), owner in sorted(zip(bounds, range(size), strict=True))]
    blocks = (block for name in names for block in _blocks(tensors[name], owners, group))
    if rank == 0:
        try:
            _write_file(Path(path), _header(tensors, names, shard.vocab_size), names, blocks)
        except (OSError, ValueError) as raised:
            error = raised
    # every rank takes part in every collective, whatever has gone wrong on the first
    for _ in blocks:
        pass
    agree(shard, {}, cpu, error)  # collective


def _blocks(
    rows: torch.Tensor, owners: list[tuple[int, int]], group: dist.ProcessGroup | None
) -> Iterator[torch.Tensor]:
    """The whole tensor from its first row to its last, block by block, on every rank. ``owners`` are (rank, count of
    rows) in the order of their rows."""
    rank, size = rank_and_size(group)
    step = max(1, _BLOCK_BYTES // max(1, rows.element_size() * rows.shape[1:].numel()))
    for owner, count in owners:
        for start in range(0, count, step):
            stop = min(start + step, count)
            if owner == rank:
                block = rows.detach()[start:stop].contiguous()
            else:
                block = rows.new_empty(stop - start, *rows.shape[1:])
            if size > 1:
                # to all, not to the first alone: gloo sends from GPUs by this way only
                dist.broadcast(block, group=group, group_src=owner)  # collective
            yield block


def _check(tensors: Mapping[str, torch.Tensor], shard: VocabShard) -> None:
    if not tensors:
        raise ValueError("tensors: expected at least one, got none")
    for name, tensor in tensors.items():
        if isinstance(tensor, DTensor):
            raise TypeError(f"tensors: {name!r} is a DTensor, expected this rank's rows; see DTensor.full_tensor")
        if tensor.dim() == 0 or len(tensor) != shard.rows:
            shape = list(tensor.shape)
            raise ValueError(f"tensors: {name!r} has the shape {shape}, expected the shard's {shard.rows} rows")
        if tensor.dtype not in _DTYPES:
            raise TypeError(f"tensors: {name!r} is {tensor.dtype}, expected one of {sorted(map(str, _DTYPES))}")


def _header(tensors: Mapping[str, torch.Tensor], names: list[str], vocab_size: int) -> bytes:
    # transformers asks for the format
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name in names:
        shape, dtype = (vocab_size, *tensors[name].shape[1:]), tensors[name].dtype
        stop = start + torch.Size(shape).numel() * dtype.itemsize
        header[name] = {"dtype": _DTYPES[dtype], "shape": shape, "data_offsets": (start, stop)}
        start = stop
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _write_file(path: Path, header: bytes, names: list[str], blocks: Iterable[torch.Tensor]) -> None:
    if path.is_dir():
        raise ValueError(f"path: {path} is a folder, expected a .safetensors or .index.json file")
    index: dict[str, Any] | None = None
    file = path
    if _is_index(path):
        index = _read_index(path) if path.exists() else {"metadata": {"total_size": 0}, "weight_map": {}}
        if there := sorted(index["weight_map"].keys() & set(names)):
            raise ValueError(f"{path} has tensors {there} already")
        file = path.with_name(f"{names[0]}.safetensors")
    size = 0
    with _replaced(file) as out:
        out.write(header)
        for block in blocks:
            block = block.cpu()
            # a tensor's memory as bytes, without numpy
            size += out.write((ctypes.c_char * block.nbytes).from_address(block.data_ptr()))
    if index is not None:
        index["weight_map"] |= dict.fromkeys(names, file.name)
        index.setdefault("metadata", {})["total_size"] = index.get("metadata", {}).get("total_size", 0) + size
        with _replaced(path) as out:
            out.write(json.dumps(index, indent=2).encode())


@contextlib.contextmanager
def _replaced(path: Path) -> Iterator[IO[bytes]]:
    """A new file that takes the place of ``path`` when it is whole."""
    partial = path.with_name(path.name + ".partial")
    try:
        with partial.open("wb") as out:
            yield out
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


@contextlib.contextmanager
def _opened(file: Path) -> Iterator[Any]:
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise ImportError(f"{file}: reading it needs the package safetensors, the extra of that name") from error
    try:
        opened = safe_open(file, framework="pt")
    except SafetensorError as error:
        raise ValueError(f"{file}: expected a safetensors file, got {error}") from error
    with opened as handle:
        yield handle


@contextlib.contextmanager
def _part(path: StrPath, name: str) -> Iterator[tuple[Path, Any]]:
    """(file, slice) of a tensor, which is not read yet."""
    files = tensor_files(path)
    if name not in files:
        some = ", ".join(sorted(files)[:8]) + (", ..." if len(files) > 8 else "")
        raise ValueError(f"{path} has no tensor {name!r}, it has {some or 'none'}")
    file = files[name]
    with _opened(file) as handle:
        if name not in handle.keys():  # noqa: SIM118
            raise ValueError(f"{path} says that {name!r} is in {file}, which has no such tensor")
        yield file, handle.get_slice(name)


def _is_index(path: Path) -> bool:
    return path.name.endswith(".index.json")


def _read_index(path: Path) -> dict[str, Any]:
    try:
        index = json.loads(path.read_text())
        index["weight_map"].items()
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: expected a JSON object with an object weight_map, got {error!r}") from error
    return index
