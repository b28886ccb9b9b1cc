"""Head and loss as the last stage of DeepSpeed's PipelineModule, alone and times tensor parallelism."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from deepspeed_jobs import IGNORED, clean_state, libraries
from tolerance import FACTOR_FP32

from cce_dist import VocabParallelEmbedding, VocabParallelLMHead, VocabShard
from cce_dist.integrations.deepspeed import PipelineHead, PipelineLoss, mark_shards, with_weight

VOCAB, WIDTH, LENGTH, MICRO, STEPS = 101, 16, 7, 3, 2


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden):
        return hidden + self.linear(hidden).tanh()


def batches(step, replicas):
    generator = torch.Generator().manual_seed(step)
    found = []
    for _ in range(replicas):
        ids = torch.randint(VOCAB, (MICRO, 2, LENGTH), generator=generator)
        labels = ids.roll(-1, -1)
        labels[:, :, -1] = IGNORED
        found.append([(i, y) for i, y in zip(ids, labels, strict=True)])
    return found


def whole_weights(tied):
    generator = torch.Generator().manual_seed(1)
    weights = {"embed": torch.randn(VOCAB, WIDTH, generator=generator) * 0.5}
    weights |= {f"{i}.weight": torch.randn(WIDTH, WIDTH, generator=generator) * 0.3 for i in range(2)}
    weights |= {f"{i}.bias": torch.randn(WIDTH, generator=generator) * 0.1 for i in range(2)}
    if not tied:
        weights["head"] = torch.randn(VOCAB, WIDTH, generator=generator) * 0.5
    return weights


def single_process(tied, replicas, clip, dtype):
    weights = {name: w.to(dtype).requires_grad_() for name, w in whole_weights(tied).items()}
    losses = []
    for step in range(STEPS):
        total = 0.0
        for micros in batches(step, replicas):
            for ids, labels in micros:
                hidden = F.embedding(ids, weights["embed"])
                for i in range(2):
                    hidden = hidden + F.linear(hidden, weights[f"{i}.weight"], weights[f"{i}.bias"]).tanh()
                logits = F.linear(hidden, weights["embed" if tied else "head"])
                loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)
                (loss / (MICRO * replicas)).backward()
                total += loss.item() / (MICRO * replicas)
        norm = torch.stack([w.grad.norm() for w in weights.values()]).norm()
        with torch.no_grad():
            for w in weights.values():
                w -= 0.5 * w.grad * min(1.0, clip / (norm + 1e-6) if clip else 1.0)
                w.grad = None
        losses.append(total)
    return losses, weights


def check_pipeline(device, stage, tied, tensor, clip):
    deepspeed = libraries()
    from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
    from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology

    world, rank = dist.get_world_size(), dist.get_rank()
    replicas = world // 2 // tensor
    losses, truth = single_process(tied, replicas, clip, torch.float64)
    _, yardstick = single_process(tied, replicas, clip, torch.float32)
    whole = whole_weights(tied)
    with clean_state():
        deepspeed.init_distributed()
        topology = PipeModelDataParallelTopology(num_pp=2, num_mp=tensor, num_dp=replicas)
        group = None
        for members in topology.get_axis_comm_lists("model") if tensor > 1 else ():
            made = dist.new_group(members)
            group = made if rank in members else group
        shard = VocabShard.even(VOCAB, group)
        embedding = {"shard": shard}
        if tied:
            layers = [
                TiedLayerSpec("embed", VocabParallelEmbedding, WIDTH, VOCAB, tied_weight_attr="weight", **embedding),
                LayerSpec(Block),
                LayerSpec(Block),
                TiedLayerSpec(
                    "embed", VocabParallelEmbedding, WIDTH, VOCAB, forward_fn=with_weight, tied_weight_attr="weight",
                    **embedding,
                ),
            ]  # fmt: skip
        else:
            embed = LayerSpec(VocabParallelEmbedding, WIDTH, VOCAB, shard=shard)
            layers = [embed, LayerSpec(Block), LayerSpec(Block), LayerSpec(PipelineHead, WIDTH, VOCAB, shard=shard)]
        loss_fn = PipelineLoss(ignore_index=IGNORED, shard=shard)
        model = PipelineModule(layers, topology=topology, loss_fn=loss_fn, partition_method="uniform")
        mark_shards(model)
        first = model._local_start

        def own(name, value):
            rows = slice(shard.start, shard.stop)
            return value[rows] if name in ("embed", "head") else value

        def name_of(module, key):
            if isinstance(module, VocabParallelLMHead):
                return "head"
            if isinstance(module, VocabParallelEmbedding):
                return "embed"
            index = first + list(model.forward_funcs).index(module) - 1
            return f"{index}.{key}"

        names = {}
        for module in model.modules():
            if isinstance(module, (VocabParallelEmbedding, VocabParallelLMHead, Block)):
                inner = module.linear if isinstance(module, Block) else module
                for key, parameter in inner.named_parameters(recurse=False):
                    names[name_of(module, key)] = parameter
                    parameter.data.copy_(own(name_of(module, key), whole[name_of(module, key)]))
        config = {
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": MICRO,
            "gradient_clipping": clip,
            "zero_optimization": {"stage": stage, "reduce_bucket_size": 20000},
            "zero_allow_untested_optimizer": True,
            "steps_per_print": 1 << 30,
        }
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        data_rank = topology.get_coord(rank).data
        for step in range(STEPS):
            loss = engine.train_batch(iter(batches(step, replicas)[data_rank]))
            assert loss.item() == pytest.approx(losses[step], rel=1e-6)
        # all that this rank has: a bias of 16 elements may be off by chance
        error, allowed = (
            torch.stack([(own(n, w) - own(n, truth[n])).norm() for n, w in weights.items()]).norm()
            for weights in (
                {n: padded(p, shard if n in ("embed", "head") else None) for n, p in names.items()},
                {n: yardstick[n] for n in names},
            )
        )
        assert error <= FACTOR_FP32 * allowed, f"weights are {error:.2e} off, allowed {FACTOR_FP32 * allowed:.2e}"


def padded(parameter, shard):
    """A rank's rows of a whole weight where they belong."""
    found = parameter.detach().double().cpu()
    if shard is None:
        return found
    whole = found.new_zeros(VOCAB, *found.shape[1:])
    whole[shard.start : shard.stop] = found
    return whole


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
# stage 0 clips each pipeline stage by its own norm
@pytest.mark.parametrize(
    ("stage", "tensor", "clip"),
    [*(pytest.param(*x, marks=pytest.mark.slow) for x in ((0, 1, 0.0), (1, 1, 0.5), (0, 2, 0.0))), (1, 2, 0.5)],
)
def test_pipelines(world, stage, tied, tensor, clip) -> None:
    if world.size != 4:
        pytest.skip("two stages of two ranks")
    world.run(check_pipeline, stage, tied, tensor, clip)


@pytest.mark.parametrize("outputs", [torch.zeros(2, 3), (torch.zeros(2, 3),)])
def test_a_last_layer_without_the_weight(outputs) -> None:
    with pytest.raises(TypeError, match=r"outputs: expected \(hidden, weight\) .* forward_fn=with_weight, got"):
        PipelineLoss()(outputs, torch.zeros(2, dtype=torch.int64))
