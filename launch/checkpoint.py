"""Checkpoints by torch.distributed.checkpoint that load on any tensor-parallel and data-parallel size."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from cce_dist import VocabParallelEmbedding, VocabParallelLMHead


def complete_checkpoints(folder: Path) -> list[tuple[int, Path]]:
    """(step, path) of the checkpoints in ``folder`` that were written to their end, oldest first."""
    if not folder.is_dir():
        return []
    named = ((re.fullmatch(r"step-(\d{6,})", path.name), path) for path in folder.iterdir())
    return sorted((int(match[1]), path) for match, path in named if match)


def remove_checkpoint(path: Path) -> None:
    # renamed first: a kill in between must not leave a part of it under a complete one's name
    partial = path.rename(path.with_name(path.name + ".partial"))
    shutil.rmtree(partial)


def save_checkpoint(folder: Path, step: int, write: Callable[[Path], None], keep: int) -> None:
    """Makes ``step-000040`` of what ``write`` puts into a folder, and removes all but the last ``keep``. Called on
    every rank."""
    path = folder / f"step-{step:06d}"
    partial = path.with_name(path.name + ".partial")
    if dist.get_rank() == 0:
        for leftover in folder.glob("step-*.partial"):
            shutil.rmtree(leftover)
    dist.barrier()
    write(partial)
    dist.barrier()
    # a name without .partial says that every rank has written its part
    if dist.get_rank() == 0:
        if path.exists():
            raise FileExistsError(f"{path} is there already: another run writes under the same name")
        partial.rename(path)
        for _, old in complete_checkpoints(folder)[:-keep]:
            remove_checkpoint(old)


def write_state(folder: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Called on every rank."""
    dcp.save(_state(model, optimizer), checkpoint_id=folder)


def read_state(folder: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Fills the parameters and the optimizer's states in place. Called on every rank."""
    if not optimizer.state:
        # loading is in place, so the states must exist: a step of nothing makes them
        rates = [group["lr"] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["lr"] = 0.0
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        optimizer.zero_grad()
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
    dcp.load(_state(model, optimizer), checkpoint_id=folder)


def _state(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Names to tensors that share the memory of the parameters and of their optimizer states. What is sharded over
    the vocabulary is seen as rows of the whole, the rest is the same on every rank and saved once."""
    shards = {
        parameter: module.shard
        for module in model.modules()
        if isinstance(module, (VocabParallelEmbedding, VocabParallelLMHead))
        for parameter in module.parameters(recurse=False)
    }
    state: dict[str, Any] = {}
    for name, parameter in model.named_parameters():
        tensors = {f"model.{name}": parameter.detach()}
        tensors |= {f"optimizer.{name}.{key}": value for key, value in optimizer.state[parameter].items()}
        for key, tensor in tensors.items():
            whole = parameter not in shards or tensor.dim() == 0
            state[key] = tensor if whole else shards[parameter].checkpoint_view(tensor)
    return state
