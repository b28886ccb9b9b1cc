"""Whole weights out of a DeepSpeed engine, and what its universal checkpoints must know of a sharded head."""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn as nn

from cce_dist.module import VocabParallelEmbedding, VocabParallelLMHead
from cce_dist.parallel.collectives import all_gather_rows
from cce_dist.parallel.shard import VocabShard


def whole_state_dict(engine: Any) -> dict[str, torch.Tensor]:
    """The model's parameters and buffers as an unsharded model has them, whatever the stage and the tensor-parallel
    layout: on the first rank in CPU memory, in the model's dtype; on the others ``{}``. Called on every rank; one
    parameter at a time is whole on the devices.

    ``engine.module.save_pretrained(path, state_dict=...)`` writes it, and a model that was loaded from there starts
    any other layout.
    """
    state: dict[str, torch.Tensor] = {}
    names: dict[nn.Parameter, str] = {}
    first = dist.get_rank() == 0
    for prefix, module in engine.module.named_modules():
        own = dict(module.named_parameters(recurse=False))
        for key, parameter in own.items():
            name = f"{prefix}.{key}" if prefix else key
            if parameter in names:
                # tied: one tensor, as in the model
                whole = state.get(names[parameter])
            else:
                names[parameter] = name
                whole = _whole(module, key, parameter)  # collective
                whole = whole.cpu() if first else None
            if whole is not None:
                state[name] = whole
    if first:
        kept = engine.module.state_dict()
        state |= {name: b.detach().cpu().clone() for name, b in engine.module.named_buffers() if name in kept}
    return state


def _whole(module: Any, key: str, parameter: nn.Parameter) -> torch.Tensor:
    if hasattr(parameter, "ds_id"):
        import deepspeed

        with deepspeed.zero.GatheredParameters([parameter]):
            local = parameter.detach().clone()
    else:
        local = parameter.detach().clone()
    if isinstance(module, (VocabParallelEmbedding, VocabParallelLMHead)):
        return _whole_rows(local, module.shard)
    if getattr(module, "mp_group", None) is not None and hasattr(module, "gather_params"):
        # AutoTP's layers put the whole in place of the data, by the place in a list of weight and bias
        gathered = [None, nn.Parameter(local, False)] if key == "bias" else [nn.Parameter(local, False)]
        module.gather_params(gathered)
        return gathered[-1].data  # type: ignore[union-attr]
    return local


def _whole_rows(local: torch.Tensor, shard: VocabShard) -> torch.Tensor:
    classes = local[: shard.classes]
    if shard.group is None or shard.group.size() == 1:
        return classes
    bounds: list[Any] = [None] * shard.group.size()
    dist.all_gather_object(bounds, (shard.start, shard.classes), group=shard.group)  # collective
    sizes = [count for _, count in bounds]
    parts = all_gather_rows(classes.contiguous(), sizes, shard.group).split(sizes)  # collective
    return torch.cat([parts[rank] for rank in sorted(range(len(sizes)), key=bounds.__getitem__)])


def describe_shards(model: Any) -> None:
    """Tells DeepSpeed's universal checkpoints how the head and a tied embedding are cut, and that the rest is the
    same on all tensor-parallel ranks: a checkpoint then converts and loads on any other tensor-parallel size, also
    into AutoTP's layers. Collective; nothing where DeepSpeed has no such description."""
    try:
        from deepspeed.checkpoint.affine import contiguous_split_map
        from deepspeed.checkpoint.constants import DS_AUTOTP_UC_META
        from deepspeed.module_inject.layers import (
            _build_param_uc_restore_meta,
            collect_autotp_universal_checkpoint_info,
        )
    except ImportError:
        return
    for module in model.modules():
        if not isinstance(module, (VocabParallelEmbedding, VocabParallelLMHead)):
            continue
        shard, any_module = module.shard, cast(Any, module)
        if shard.group is None or shard.group.size() == 1:
            continue
        bounds: list[Any] = [None] * shard.group.size()
        dist.all_gather_object(bounds, (shard.start, shard.rows), group=shard.group)  # collective
        if bounds != sorted(bounds) or sum(rows for _, rows in bounds) != shard.vocab_size:
            # padded, or out of the ranks' order: there is no such description
            return
        # by which DeepSpeed describes what is not sharded
        any_module.tp_world_size = shard.group.size()
        sizes = tuple(rows for _, rows in bounds)
        for parameter in module.parameters(recurse=False):
            shape = (shard.vocab_size, *parameter.shape[1:])
            meta = _build_param_uc_restore_meta(
                partition_type="column",
                partition_dim=0,
                logical_shape=shape,
                output_shape=shape[:1],
                partition_sizes=sizes,
                target_partition_shape=tuple(parameter.shape),
                original_shape=shape,
                is_bias=parameter.dim() == 1,
                affine_map=contiguous_split_map(shape, list(sizes), 0),
            )
            setattr(parameter, DS_AUTOTP_UC_META, meta)
    model.universal_checkpoint_info = collect_autotp_universal_checkpoint_info(model)
