"""Other implementations of the loss, each behind a small adapter that imports it when it is made.

An adapter is made for a shard of the vocabulary, or for the whole of it (``None``), and is then called as
``loss(hidden, weight, targets)``: the mean over the tokens that are not ignored. One that cannot work says so by
raising, and is a row of the benchmark's table all the same.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from cce_dist import VocabShard

Loss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
Make = Callable[[VocabShard | None], Loss]


def pytorch(_: VocabShard | None) -> Loss:
    return lambda e, c, t: F.cross_entropy((e @ c.T).float(), t)


def pytorch_compiled(_: VocabShard | None) -> Loss:
    # graphs of earlier shapes count against torch's limit of recompilations
    torch._dynamo.reset()
    return torch.compile(pytorch(None), dynamic=False)


def pytorch_chunked(_: VocabShard | None) -> Loss:
    options: Any = torch.nn.LinearCrossEntropyOptions()  # type: ignore[attr-defined, unused-ignore]
    return lambda e, c, t: F.linear_cross_entropy(e, c, t, options=options)  # type: ignore[attr-defined, unused-ignore]


def apple(impl: str) -> Make:
    def make(shard: VocabShard | None) -> Loss:
        import cut_cross_entropy

        if shard is None:
            return lambda e, c, t: cut_cross_entropy.linear_cross_entropy(e, c, t, impl=impl)
        options = cut_cross_entropy.VocabParallelOptions(shard.start, shard.stop, group=shard.group)
        return lambda e, c, t: cut_cross_entropy.linear_cross_entropy(
            e, c, t, impl=impl, vocab_parallel_options=options
        )

    return make


def liger(_: VocabShard | None) -> Loss:
    # the module holds the Triton path, whatever backend the package's own names stand for
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

    return lambda e, c, t: LigerFusedLinearCrossEntropyFunction.apply(e, c, t)[0]


def liger_cute(_: VocabShard | None) -> Loss:
    if torch.cuda.get_device_capability()[0] == 9:
        from liger_kernel.ops.cutedsl.ops.fused_linear_cross_entropy_sm90 import liger_fused_linear_cross_entropy_sm90

        return liger_fused_linear_cross_entropy_sm90
    from liger_kernel.ops.cutedsl.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

    return lambda e, c, t: LigerFusedLinearCrossEntropyFunction.apply(e, c, t)[0]


def quack(**options: Any) -> Make:
    def make(_: VocabShard | None) -> Loss:
        from quack.linear_cross_entropy import chunked_linear_cross_entropy

        return lambda e, c, t: chunked_linear_cross_entropy(e, c, t, **options)

    return make


def verl(shard: VocabShard | None) -> Loss:
    from verl.utils.kernel.linear_cross_entropy import linear_cross_entropy

    group = _equal_shards(shard)

    def loss(e: torch.Tensor, c: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        # its backward leaves a rank's part of the hidden states' gradient to the caller
        log_probs, _ = linear_cross_entropy(_SumOfGradients.apply(e, group), c, t, 1.0, "none", group)
        return _mean(-log_probs, t)

    return loss


def flash_linear_attention(shard: VocabShard | None) -> Loss:
    from fla.modules import FusedLinearCrossEntropyLoss

    module = FusedLinearCrossEntropyLoss(**({} if shard is None else {"process_group": _equal_shards(shard)}))
    return lambda e, c, t: module(e, t, c)


def deepspeed(shard: VocabShard | None) -> Loss:
    from deepspeed.sequence.linear_cross_entropy import vocab_parallel_linear_cross_entropy

    return functools.partial(vocab_parallel_linear_cross_entropy, **_deepspeed_rows(shard))


def deepspeed_logits(shard: VocabShard | None) -> Loss:
    """What AutoTP's "vocab_parallel_lm_head" does: each rank holds the logits of its classes."""
    from deepspeed.sequence.cross_entropy import vocab_parallel_cross_entropy

    group = None if shard is None else shard.group
    rows = _deepspeed_rows(shard)
    return lambda e, c, t: vocab_parallel_cross_entropy(_SumOfGradients.apply(e, group) @ c.T, t, **rows)


def _deepspeed_rows(shard: VocabShard | None) -> dict[str, Any]:
    if shard is None:
        return {}
    import deepspeed

    deepspeed.init_distributed(dist_backend=dist.get_backend(), verbose=False)
    return {"tp_group": shard.group, "vocab_start_index": shard.start, "vocab_end_index": shard.stop}


def megatron(shard: VocabShard | None) -> Loss:
    """The scheme of Megatron-LM: each rank holds the logits of its classes, the ranks reduce maximum and sum."""
    assert shard is not None

    def loss(e: torch.Tensor, c: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        logits = _SumOfGradients.apply(e, shard.group) @ c.T
        return _mean(_VocabParallelCrossEntropy.apply(logits, t, shard), t)

    return loss


class _VocabParallelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, targets: torch.Tensor, shard: VocabShard) -> torch.Tensor:
        top = logits.amax(-1).float()
        dist.all_reduce(top, dist.ReduceOp.MAX, shard.group)
        x = logits - top[:, None]
        mine = (targets >= shard.start) & (targets < shard.stop)
        index = torch.where(mine, targets - shard.start, 0)[:, None]
        chosen = torch.where(mine, x.gather(-1, index)[:, 0], 0.0)
        both = torch.stack((chosen, x.exp_().sum(-1)))
        dist.all_reduce(both, group=shard.group)
        ctx.save_for_backward(x.div_(both[1, :, None]), index, mine)
        ctx.dtype = logits.dtype
        return both[1].log() - both[0]

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        softmax, index, mine = ctx.saved_tensors
        d_logits = softmax.scatter_add_(-1, index, -mine[:, None].to(softmax.dtype))
        return d_logits.mul_(upstream[0][:, None]).to(ctx.dtype), None, None


class _SumOfGradients(torch.autograd.Function):
    """The same on every rank; in backward the sum of the ranks' gradients."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
        ctx.group = group
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> tuple[torch.Tensor, None]:
        total = upstream[0].contiguous()
        if ctx.group is not None:
            dist.all_reduce(total, group=ctx.group)
        return total, None


def _mean(losses: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    valid = targets != -100
    return torch.where(valid, losses, 0.0).sum() / valid.sum()


def _equal_shards(shard: VocabShard | None) -> dist.ProcessGroup | None:
    if shard is not None and shard.rows * dist.get_world_size(shard.group) != shard.vocab_size:
        raise ValueError(f"needs equal shards, {shard.vocab_size} classes do not divide by the number of ranks")
    return None if shard is None else shard.group


# on one device
PEERS: dict[str, Make] = {
    "pytorch": pytorch,
    "pytorch-compiled": pytorch_compiled,
    "pytorch-chunked": pytorch_chunked,
    "apple": apple("cce"),
    "apple-exact": apple("cce_exact"),
    "liger": liger,
    "liger-cute": liger_cute,
    # it refuses a chunk of as many tokens as there are features
    "quack": quack(chunk_size=8192),
    "quack-chunked": quack(use_scaled_exp=False),
    "verl": verl,
    "fla": flash_linear_attention,
    "deepspeed": deepspeed,
    "deepspeed-logits": deepspeed_logits,
}
# over a tensor-parallel group
SHARDED: dict[str, Make] = {
    "megatron": megatron,
    "apple": apple("cce"),
    "apple-exact": apple("cce_exact"),
    "verl": verl,
    "fla": flash_linear_attention,
    "deepspeed": deepspeed,
    "deepspeed-logits": deepspeed_logits,
}
# what the adapters import, as packages are named
PACKAGES = (
    "cut-cross-entropy",
    "liger-kernel",
    "quack-kernels",
    "nvidia-cutlass-dsl",
    "verl",
    "fla-core",
    "deepspeed",
)
