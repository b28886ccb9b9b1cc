"""A Llama laid out over the ranks: its vocabulary and its body over the tensor-parallel ones, replicas and shards of
those over the rest."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from data import BORDER_ID, IGNORED
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel

from cce_dist import VocabParallelEmbedding, VocabParallelLMHead, VocabShard


@dataclass(frozen=True)
class Preset:
    hidden: int
    intermediate: int
    layers: int
    heads: int
    length: int
    batch: int
    rate: float


PRESETS = {
    "micro": Preset(hidden=64, intermediate=176, layers=2, heads=4, length=32, batch=8, rate=3e-3),
    "tiny": Preset(hidden=256, intermediate=704, layers=4, heads=4, length=128, batch=8, rate=1e-3),
    "small": Preset(hidden=768, intermediate=2048, layers=12, heads=12, length=1024, batch=16, rate=6e-4),
    "base": Preset(hidden=2048, intermediate=5632, layers=16, heads=16, length=2048, batch=8, rate=3e-4),
}


def whole_model(args: argparse.Namespace) -> LlamaForCausalLM:
    """The model from its seed, the same on every rank."""
    preset = PRESETS[args.preset]
    config = LlamaConfig(
        vocab_size=args.vocab_size,
        hidden_size=preset.hidden,
        intermediate_size=preset.intermediate,
        num_hidden_layers=preset.layers,
        num_attention_heads=preset.heads,
        num_key_value_heads=preset.heads,
        max_position_embeddings=preset.length,
        bos_token_id=BORDER_ID,
        eos_token_id=BORDER_ID,
        tie_word_embeddings=args.tied,
        use_cache=False,
    )
    torch.manual_seed(args.seed)
    return LlamaForCausalLM(config)


class LanguageModel(torch.nn.Module):
    """A Llama on a mesh of the axes ``dp``, ``fsdp`` and ``tp``."""

    def __init__(self, args: argparse.Namespace, mesh: DeviceMesh) -> None:
        super().__init__()
        whole = whole_model(args)
        tp_group = mesh.get_group("tp")
        self.body, self.materialised = whole.model, args.head == "materialised"
        self.body_is_sharded = mesh["tp"].size() > 1
        # the body then ends with slices of the sequence
        shard = VocabShard.even(args.vocab_size, tp_group, sequence_parallel=self.body_is_sharded)
        self.head = VocabParallelLMHead.from_linear(whole.lm_head, shard=shard)
        self.body.embed_tokens = (
            VocabParallelEmbedding.tied_to(self.head)
            if args.tied
            else VocabParallelEmbedding.from_embedding(self.body.embed_tokens, tp_group)
        )
        self.to(mesh.device_type)
        if self.body_is_sharded:
            shard_body(self.body, mesh["tp"])
        if mesh["dp"].size() > 1 or mesh["fsdp"].size() > 1:
            shard_data_parallel(self, mesh)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor, denominator: torch.Tensor) -> torch.Tensor:
        """ids, labels [batch, length] -> the sum of the tokens' losses over ``denominator``."""
        hidden = self.body(input_ids=ids).last_hidden_state
        if self.body_is_sharded:
            hidden = hidden.to_local()
        if self.materialised:
            logits = F.linear(hidden, self.head.weight).float()
            total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum")
            return total / denominator.float()
        return self.head.loss(hidden, labels, ignore_index=IGNORED, reduction="mean", denominator=denominator)


def shard_body(body: LlamaModel, mesh: DeviceMesh) -> None:
    """Tensor parallelism of everything between embedding and head: attention by heads, the MLP by features, norms and
    the residual stream between them by the sequence. Takes and gives hidden states as the layout says:

        embedding -> whole -> [batch, length / tp, hidden] -> layers -> norm -> DTensor, Shard(1)
    """
    sequence, whole = Shard(1), Replicate()
    plan = {
        "layers.0": PrepareModuleInput(input_layouts=whole, desired_input_layouts=sequence, use_local_output=True),
        "norm": SequenceParallel(),
    }
    layer = {
        "input_layernorm": SequenceParallel(),
        # gathered once for the three projections, whose gradients come back by one reduce-scatter
        "self_attn": PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": sequence}, desired_input_kwarg_layouts={"hidden_states": whole}
        ),
        "self_attn.q_proj": ColwiseParallel(),
        "self_attn.k_proj": ColwiseParallel(),
        "self_attn.v_proj": ColwiseParallel(),
        "self_attn.o_proj": RowwiseParallel(output_layouts=sequence),
        "post_attention_layernorm": SequenceParallel(),
        "mlp": PrepareModuleInput(input_layouts=sequence, desired_input_layouts=whole),
        "mlp.gate_proj": ColwiseParallel(),
        "mlp.up_proj": ColwiseParallel(),
        "mlp.down_proj": RowwiseParallel(output_layouts=sequence),
    }
    plan |= {f"layers.{index}.{name}": style for index in range(len(body.layers)) for name, style in layer.items()}
    # the ranks hold the same weights: none needs another's
    parallelize_module(body, mesh, plan, src_data_rank=None)


def shard_data_parallel(model: LanguageModel, mesh: DeviceMesh) -> None:
    """FSDP2: parameters, gradients and optimizer states over ``fsdp``, replicas of that over ``dp``. A layer's
    parameters are gathered when it runs; embedding, norm and head together, once a micro-batch."""
    data = mesh["dp", "fsdp"] if mesh["dp"].size() > 1 else mesh["fsdp"]
    for layer in model.body.layers:
        fully_shard(layer, mesh=data)
    fully_shard(model, mesh=data)
