"""A model's head, found by its structure, and the rows of the vocabulary that it holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn

from cce_dist.module import VocabParallelEmbedding, VocabParallelLMHead
from cce_dist.parallel.shard import VocabShard

from .adapters import active_module, check_lora, is_lora
from .checkpoint import describe_shards


@dataclass(frozen=True)
class Head:
    """A head of a model: its module and name, how its rows are laid out, the embedding that shares its weight."""

    module: nn.Module
    name: str
    layout: str
    # None: this rank has the whole vocabulary
    shard: VocabShard | None
    tied_to: str | None


def find_head(model: nn.Module, head: str | nn.Module | None = None, shard: VocabShard | None = None) -> Head:
    """The head of ``model``: the module ``head`` (or of that name), else its output embeddings. ``shard``: which rows
    it holds, where its module does not say so.

    Raises ``ValueError`` where there is none, where its layout is not known, and for tied embeddings that were
    sharded apart; ``TypeError`` for a module that computes more than ``hidden @ weight.T + bias``.
    """
    names = {module: name for name, module in model.named_modules()}
    if isinstance(head, str):
        if head not in names.values():
            raise ValueError(f"head: {type(model).__name__} has no module {head!r}")
        module: Any = model.get_submodule(head)
    elif head is not None:
        module = head
    else:
        getter = getattr(model, "get_output_embeddings", None)
        module = None if getter is None else getter()
        if module is None:
            raise ValueError(
                f"model: {type(model).__name__} has no head that get_output_embeddings() names; pass head='lm_head', "
                "the name of the linear layer that makes the logits"
            )
    if module not in names:
        raise ValueError(f"head: {type(module).__name__} is no module of {type(model).__name__}")
    name = names[module]
    module = active_module(module)
    layout, own = _layout(module)
    rows = whole_shape(module.weight)[0]
    if shard is not None:
        if own is not None or layout != "whole" or rows != shard.rows:
            raise ValueError(
                f"shard is of {shard.rows} rows of a plain head, got {rows} of one that is {layout}: pass no shard "
                "where the head's module knows it"
            )
        own, layout = shard, "a shard"
    shard = own
    size = _vocab_size(model) if head is None else None
    if shard is None and size is not None and rows != size:
        raise ValueError(
            f"{name}.weight has {rows} rows, the model's vocabulary {size}, and nothing says which of them "
            'this rank holds: shard the head by AutoTP ("vocab_parallel_lm_head": true) or by shard_head(model, '
            "group), or pass the module as head"
        )
    return Head(module, name, layout, shard, _tie(model, module, names))


def whole_shape(weight: torch.Tensor) -> tuple[int, ...]:
    """A parameter's shape on this rank, also where ZeRO-3 has spread it over data-parallel ranks."""
    return tuple(getattr(weight, "ds_shape", weight.shape))


def _layout(module: nn.Module) -> tuple[str, VocabShard | None]:
    kind = type(module).__name__
    if isinstance(module, VocabParallelLMHead):
        group = module.shard.group
        return f"cce_dist's {kind}", None if group is None or group.size() == 1 else module.shard
    if hasattr(module, "mp_group"):
        # DeepSpeed's layers, by what they carry: its classes need not be imported for a model without them
        if kind not in ("LinearLayer", "VocabParallelLinear"):
            raise ValueError(
                f"head: AutoTP made it a {kind}, whose rows are not a slice of the vocabulary; leave the head out of "
                'the tensor-parallel plan, or set "vocab_parallel_lm_head": true'
            )
        return f"AutoTP's {kind}", _autotp_shard(module)
    if is_lora(module):
        check_lora(module)
        base: Any = module.base_layer
        if (layout := _layout(base)[0]) != "whole":
            raise TypeError(
                f"head: LoRA of one that is {layout} is not computed; leave the head out of target_modules"
            )
        return "whole, with LoRA", None
    if not isinstance(module, nn.Linear) or type(module).forward is not nn.Linear.forward:
        raise TypeError(
            f"head: expected an nn.Linear, cce_dist's VocabParallelLMHead or a layer of AutoTP, got {kind}, whose "
            "forward may do more (as adapters and quantised layers do); its loss must be computed from its logits"
        )
    weight = module.weight
    sharded = type(weight.data).__name__ == "DTensor"
    if not (sharded or type(weight.data) is torch.Tensor) or not weight.is_floating_point():
        kind, dtype = type(weight.data).__name__, str(weight.dtype).removeprefix("torch.")
        raise TypeError(f"head: its weight is a {kind} of {dtype}, as quantised ones are; expected plain numbers")
    if weight.is_meta:
        raise ValueError("head: its weight is on the meta device, offloaded or never loaded")
    # transformers' tensor parallelism and accelerate's devices are known to leave a linear layer's logits alone
    replaced = module.__dict__.get("forward")
    known = sharded or hasattr(module, "_hf_hook") or getattr(replaced, "__module__", "").startswith("cce_dist.")
    if replaced is not None and not known:
        raise TypeError(f"head: the forward of its {kind} was replaced, and may do more; undo that first")
    return ("a DTensor" if sharded else "whole"), None


def _autotp_shard(module: Any) -> VocabShard | None:
    sizes, index, group = list(module._partition_sizes), module.tp_index, module.mp_group
    if group is None or dist.get_world_size(group) == 1:
        return None
    shard = getattr(module, "cce_shard", None)
    if shard is None:
        start = sum(sizes[:index])
        # kept: a shard remembers what the group's ranks have agreed on
        shard = module.cce_shard = VocabShard(start, start + sizes[index], sum(sizes), group)
    return shard


def _vocab_size(model: nn.Module) -> int | None:
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    return getattr(text, "vocab_size", None)


def _tie(model: nn.Module, head: Any, names: dict[nn.Module, str]) -> str | None:
    getter = getattr(model, "get_input_embeddings", None)
    embedding: Any = None if getter is None else getter()
    weight = getattr(embedding, "weight", None)
    if weight is None:
        return None
    if weight is head.weight:
        return names.get(embedding, type(embedding).__name__)
    if getattr(getattr(model, "config", None), "tie_word_embeddings", False):
        raise ValueError(
            f"model: its config ties the embeddings, but the head's weight, {whole_shape(head.weight)}, and the "
            f"embedding's, {whole_shape(weight)}, are two parameters: one was sharded or replaced alone. Shard both "
            '("vocab_parallel_lm_head": true under AutoTP, or shard_head), call model.tie_weights(), or set '
            "config.tie_word_embeddings = False"
        )
    return None


def shard_head(model: nn.Module, group: dist.ProcessGroup | None, shard: VocabShard | None = None) -> Head:
    """Replaces the head of ``model`` by a :class:`VocabParallelLMHead` that holds this rank's rows, and an embedding
    that shares its weight by a :class:`VocabParallelEmbedding`. In place: the parameters stay the same objects, so an
    optimizer, or a tie elsewhere, stays valid. They are marked as shards, and described to universal checkpoints.
    Called on every rank of ``group``, before ``deepspeed.initialize``.

    Args:
        model: with ``get_output_embeddings`` and its like, as Hugging Face's models have. Whole on every rank.
        group: the tensor-parallel group.
        shard: this rank's rows; ``VocabShard.even(vocab_size, group)`` where None.

    Raises ``ValueError`` and ``TypeError`` as :func:`find_head`, and ``ValueError`` for a head that is sharded.
    """
    found = find_head(model)
    linear: Any = found.module
    if found.layout != "whole" or hasattr(linear.weight, "ds_id"):
        kind = "partitioned by ZeRO-3" if found.layout == "whole" else found.layout
        raise ValueError(f"model: its head is {kind} already; shard a whole one, before deepspeed.initialize")
    vocab_size, hidden_size = linear.weight.shape
    shard = VocabShard.even(vocab_size, group) if shard is None else shard
    head = VocabParallelLMHead(hidden_size, vocab_size, linear.bias is not None, shard=shard, device="meta")
    head.weight = _keep_rows(linear.weight, shard)
    if linear.bias is not None:
        head.bias = _keep_rows(linear.bias, shard)
    any_model: Any = model
    if found.tied_to is not None:
        padding_idx = any_model.get_input_embeddings().padding_idx
        any_model.set_input_embeddings(VocabParallelEmbedding.tied_to(head, padding_idx))
    any_model.set_output_embeddings(head)
    mark_shards(model)
    describe_shards(model)  # collective
    return Head(head, found.name, _layout(head)[0], shard, found.tied_to)


def _keep_rows(parameter: nn.Parameter, shard: VocabShard) -> nn.Parameter:
    rows = parameter.data.new_zeros(shard.rows, *parameter.shape[1:])
    rows[: shard.classes] = parameter.data[shard.start : shard.start + shard.classes]
    parameter.data = rows
    return parameter


def mark_shards(model: nn.Module) -> None:
    """Tells DeepSpeed, as Megatron's convention does, that a parameter is a shard: else the gradient's norm counts
    the first tensor-parallel rank's rows alone, and clipping goes wrong."""
    for module in model.modules():
        if isinstance(module, (VocabParallelEmbedding, VocabParallelLMHead)):
            group = module.shard.group
            for parameter in module.parameters(recurse=False):
                if group is not None and group.size() > 1:
                    parameter.tensor_model_parallel = True  # type: ignore[attr-defined]
                    parameter.partition_dim, parameter.partition_stride = 0, 1  # type: ignore[attr-defined]
