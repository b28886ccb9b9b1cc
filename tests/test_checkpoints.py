"""Head and embedding in checkpoints: between group sizes and layouts, and as plain tensors of safetensors files."""

from __future__ import annotations

import json
import resource
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from pool import subgroup
from shards import shard_of, whole_of
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from cce_dist import VocabParallelEmbedding, VocabParallelLMHead, VocabShard
from cce_dist.parallel import unsharded

VOCAB, HIDDEN = 101, 8
LAYOUTS = ["even", "chunked", "padded"]


def make_modules(shard, device, tied, seed=3):
    """(head, embedding, optimizer) after a step whose gradients are the values: the same for every layout."""
    torch.manual_seed(seed)
    head = VocabParallelLMHead(HIDDEN, VOCAB, bias=True, shard=shard, device=device)
    if tied:
        embedding = VocabParallelEmbedding.tied_to(head)
    else:
        embedding = VocabParallelEmbedding(HIDDEN, VOCAB, shard=shard, device=device)
    parameters = [*head.parameters(), *([] if tied else embedding.parameters())]
    optimizer = torch.optim.AdamW(parameters, lr=0.1)
    for parameter in parameters:
        parameter.grad = parameter.detach().clone()
    optimizer.step()
    return head, embedding, optimizer


def state_of(head, embedding, optimizer):
    state = head.sharded_state_dict("lm_head.") | embedding.sharded_state_dict("embed_tokens.")
    for index, parameter in enumerate(optimizer.param_groups[0]["params"]):
        for name in ("exp_avg", "exp_avg_sq"):
            state[f"{index}.{name}"] = head.shard.checkpoint_view(optimizer.state[parameter][name])
        state[f"{index}.step"] = optimizer.state[parameter]["step"]
    return state


def check_save(group, device, layout, tied, path):
    modules = make_modules(shard_of(layout, VOCAB, group), device, tied)
    dcp.save(state_of(*modules), checkpoint_id=path, process_group=group)


def check_load(group, device, layout, tied, path):
    expected = state_of(*make_modules(VocabShard.even(VOCAB), device, tied))
    shard = shard_of(layout, VOCAB, group)
    head, embedding, optimizer = make_modules(shard, device, tied, seed=4)
    padding = [(p, p[shard.classes :].clone()) for p in [*head.parameters(), *embedding.parameters()]]
    state = state_of(head, embedding, optimizer)
    assert state.keys() == expected.keys()
    for name in state:
        if name.endswith("step"):
            state[name].zero_()
    dcp.load(state, checkpoint_id=path, process_group=group)
    for name, view in state.items():
        if name.endswith("step"):
            assert view.item() == 1
            continue
        found = whole_of(view.local, VocabShard(view.start, view.start + len(view.local), VOCAB, group))
        assert torch.allclose(found, expected[name].local, rtol=1e-6, atol=1e-8), name
    for parameter, rows in padding:
        assert torch.equal(parameter[shard.classes :], rows)
    # into plain tensors, as of an unsharded model
    plain = {name: torch.zeros_like(view.local) for name, view in expected.items() if not name.endswith("step")}
    dcp.load(plain, checkpoint_id=path, process_group=group)
    for name, tensor in plain.items():
        assert torch.allclose(tensor, expected[name].local, rtol=1e-6, atol=1e-8), name


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize(("saved", "loaded"), [(1, 2), (2, 3), (4, 1)])
@pytest.mark.parametrize(("layout", "other"), [("even", "chunked"), ("chunked", "padded"), ("padded", "even")])
def test_loads_on_another_group_size(ranks, shared_path, saved, loaded, layout, other, tied) -> None:
    ranks.run(check_save, layout, tied, str(shared_path), ranks=saved)
    ranks.run(check_load, other, tied, str(shared_path), ranks=loaded)


def check_save_plain(group, device, path):
    views = state_of(*make_modules(VocabShard.even(VOCAB), device, tied=False))
    plain = {name: view if name.endswith("step") else view.local for name, view in views.items()}
    dcp.save(plain, checkpoint_id=path, process_group=group)


def test_a_plain_checkpoint_loads_sharded(ranks, shared_path) -> None:
    ranks.run(check_save_plain, str(shared_path), ranks=1)
    ranks.run(check_load, "padded", False, str(shared_path), ranks=3)


def check_save_spread(group, device, layout, path):
    # as fully_shard leaves parameters: each rank has some of the rows of its tensor-parallel rank
    shard = shard_of(layout, VOCAB, subgroup((0, 2), (1, 3)))
    data = DeviceMesh.from_group(subgroup((0, 1), (2, 3)), device.type)
    head, embedding, optimizer = make_modules(shard, device, tied=False)
    for module in (head, embedding):
        for name, parameter in list(module.named_parameters()):
            spread = torch.nn.Parameter(distribute_tensor(parameter.detach(), data, [Shard(0)]))
            setattr(module, name, spread)
            states = optimizer.state.pop(parameter)
            optimizer.state[spread] = {
                key: value if key == "step" else distribute_tensor(value, data, [Shard(0)])
                for key, value in states.items()
            }
    optimizer.param_groups[0]["params"] = [*head.parameters(), *embedding.parameters()]
    dcp.save(state_of(head, embedding, optimizer), checkpoint_id=path, process_group=group)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_that_fsdp_has_spread(ranks, shared_path, layout) -> None:
    ranks.run(check_save_spread, layout, str(shared_path), ranks=4)
    ranks.run(check_load, "even", False, str(shared_path), ranks=2)


def whole_tensors(dtype=torch.float32):
    generator = torch.Generator().manual_seed(7)
    shapes = {"lm_head.weight": (VOCAB, HIDDEN), "lm_head.bias": (VOCAB,), "embed.weight": (VOCAB, HIDDEN)}
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}


def rows_of(whole, shard):
    rows = whole.new_full((shard.rows, *whole.shape[1:]), torch.nan)
    rows[: shard.classes] = whole[shard.start : shard.start + shard.classes]
    return rows


def check_write(group, device, layout, path):
    from safetensors.torch import load_file

    shard = shard_of(layout, VOCAB, group)
    # of two dtypes, the narrower one first and with an odd number of bytes to the next
    tensors = whole_tensors()
    tensors = {"lm_head.bias": tensors.pop("lm_head.bias").bfloat16()} | tensors
    patch = pytest.MonkeyPatch()
    try:
        # seven rows at a time
        patch.setattr(unsharded, "_BLOCK_BYTES", 7 * HIDDEN * 4)
        rows = {name: rows_of(tensor, shard).to(device) for name, tensor in tensors.items()}
        shard.write_safetensors(path, rows)
    finally:
        patch.undo()
    found = load_file(path)
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size", [1, 3, 4])
def test_writes_whole_tensors(ranks, shared_path, size, layout) -> None:
    pytest.importorskip("safetensors")
    ranks.run(check_write, layout, str(shared_path / "model.safetensors"), ranks=size)
    assert [path.name for path in shared_path.iterdir()] == ["model.safetensors"]


def check_save_whole(group, device, path):
    from safetensors.torch import save_file

    save_file(whole_tensors(), path)


def check_read(group, device, layout, path):
    tensors = whole_tensors()
    shard = shard_of(layout, VOCAB, group)
    head = VocabParallelLMHead.from_safetensors(path, "lm_head.", shard=shard, device=device)
    embedding = VocabParallelEmbedding.from_safetensors(
        path, "embed.", shard=shard, padding_idx=3, device=device, dtype=torch.half
    )
    assert embedding.padding_idx == 3
    assert embedding.weight.dtype == torch.half
    assert head.weight.device.type == device.type
    for name, parameter in (("weight", head.weight), ("bias", head.bias)):
        assert torch.equal(whole_of(parameter, shard), tensors[f"lm_head.{name}"].to(device))
        assert (parameter[shard.classes :] == 0).all()
    assert torch.equal(whole_of(embedding.weight, shard), tensors["embed.weight"].half().to(device))
    # and back, under another name, as a tied model's
    again = path.replace(".safetensors", "-again.safetensors")
    head.save_safetensors(again, "embed.")
    assert VocabParallelEmbedding.from_safetensors(again, "embed.", group).weight.shape[1] == HIDDEN
    one = VocabParallelLMHead.from_safetensors(again, "embed.")
    assert torch.equal(one.weight, tensors["lm_head.weight"])
    assert torch.equal(one.bias, tensors["lm_head.bias"])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_reads_rows_of_whole_tensors(ranks, shared_path, size, layout) -> None:
    pytest.importorskip("safetensors")
    path = str(shared_path / "whole.safetensors")
    ranks.run(check_save_whole, path, ranks=1)
    ranks.run(check_read, layout, path, ranks=size)


def check_reads_little(group, device, path):
    size = 1 << 20
    bounds = [(0, size - 512), (size - 512, size)][dist.get_rank(group)]
    if not bounds[0]:
        # 8 GiB of a sparse file
        header = unsharded._header({"w": torch.empty(0, 2048)}, ["w"], size)
        with open(path, "wb") as out:
            out.write(header)
            out.truncate(len(header) + (1 << 33))
    dist.barrier(group)
    if bounds[0]:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        rows = VocabShard(*bounds, size, group).read_safetensors(path, "w")
        assert rows.shape == (512, 2048)
        # KiB
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10


@pytest.mark.skipif(sys.platform != "linux", reason="counts memory as Linux does")
def test_reads_nothing_else_of_the_file(ranks, shared_path) -> None:
    pytest.importorskip("safetensors")
    ranks.run(check_reads_little, str(shared_path / "large.safetensors"), ranks=2)


def check_make_obstacles(group, device, folder):
    (Path(folder) / "full.safetensors.partial").symlink_to("/dev/full")
    (Path(folder) / "old.index.json").write_text('{"weight_map": {"w": "w.safetensors"}}')
    (Path(folder) / "bad.index.json").write_text("[]")


def check_write_fails(group, device, path, rank_1, errors, message):
    rank = dist.get_rank(group)
    shard = VocabShard.even(VOCAB, group)
    wide = torch.zeros(shard.rows, 1 << 14, device=device)
    tensors = {"w": wide, "b": wide[:, 0]} | (rank_1 if rank == 1 else {})
    patch = pytest.MonkeyPatch()
    try:
        patch.setattr(unsharded, "_BLOCK_BYTES", 1 << 18)
        with pytest.raises(errors[rank], match=message):
            shard.write_safetensors(path, tensors)
    finally:
        patch.undo()


@pytest.mark.parametrize(
    ("file", "rank_1", "errors", "message"),
    [
        ("nowhere/a.safetensors", {}, (OSError, RuntimeError), "No such file or directory"),
        ("full.safetensors", {}, (OSError, RuntimeError), "No space left on device"),
        (".", {}, (ValueError, ValueError), "is a folder, expected a .safetensors or .index.json file"),
        ("old.index.json", {}, (ValueError, ValueError), r"old.index.json has tensors \['w'\] already"),
        ("bad.index.json", {}, (ValueError, ValueError), "bad.index.json: expected a JSON object"),
        (
            "a",
            {"w": torch.zeros(3, 1 << 14)},
            (ValueError,) * 2,
            r"'w' has the shape \[3, 16384\], expected .* 50 rows",
        ),
        (
            "a",
            {"w": torch.zeros(50, 1 << 14, dtype=torch.int64)},
            (TypeError,) * 2,
            "'w' is torch.int64, expected one",
        ),
        ("a", {"w": torch.zeros(50, 2)}, (ValueError,) * 2, "tensors must be the same on every rank"),
        ("a", {"c": torch.zeros(50, 2)}, (ValueError,) * 2, "tensors must be the same on every rank"),
    ],
    ids=["folder", "full", "is a folder", "old", "bad", "rows", "dtype", "width", "names"],
)
def test_every_rank_learns_that_writing_failed(ranks, shared_path, file, rank_1, errors, message) -> None:
    ranks.run(check_make_obstacles, str(shared_path), ranks=1)
    before = {path.name for path in shared_path.iterdir()}
    ranks.run(check_write_fails, str(shared_path / file), rank_1, errors, message, ranks=2)
    assert {path.name for path in shared_path.iterdir()} <= before


@pytest.fixture
def wrong(tmp_path):
    """A folder of files that do not fit."""
    torch_files = pytest.importorskip("safetensors.torch")
    tensors = {
        "h.weight": torch.zeros(VOCAB, HIDDEN),
        "h.bias": torch.zeros(VOCAB),
        "flat.weight": torch.zeros(VOCAB),
    }
    torch_files.save_file(
        {**tensors, "long.weight": torch.zeros(9, HIDDEN), "long.bias": torch.zeros(8)}, tmp_path / "m"
    )
    (tmp_path / "cut").write_bytes((tmp_path / "m").read_bytes()[:-1])
    (tmp_path / "text").write_text("no tensors")
    (tmp_path / "i.index.json").write_text(json.dumps({"weight_map": {"h.weight": "m", "x.weight": "m"}}))
    (tmp_path / "empty.index.json").write_text("{}")
    return tmp_path


@pytest.mark.parametrize(
    ("file", "prefix", "error", "message"),
    [
        (
            "m",
            "lm_head.",
            ValueError,
            "m has no tensor 'lm_head.weight', it has flat.weight, h.bias, h.weight, long.bias",
        ),
        ("m", "flat.", ValueError, r"m: 'flat.weight' has the shape \[101\], expected \[vocab_size, hidden_size\]"),
        ("m", "long.", ValueError, r"m: 'long.bias' has the shape \[8\], expected 9 rows"),
        ("cut", "h.", ValueError, "cut: expected a safetensors file, got "),
        ("text", "h.", ValueError, "text: expected a safetensors file, got "),
        ("i.index.json", "x.", ValueError, "i.index.json says that 'x.weight' is in .*m, which has no such tensor"),
        ("i.index.json", "y.", ValueError, "i.index.json has no tensor 'y.weight', it has h.weight, x.weight"),
        ("empty.index.json", "h.", ValueError, "empty.index.json: expected a JSON object with an object weight_map"),
        ("none", "h.", FileNotFoundError, "none"),
        (".", "h.", FileNotFoundError, "model.safetensors"),
    ],
)
def test_names_what_can_not_be_read(wrong, file, prefix, error, message) -> None:
    with pytest.raises(error, match=message):
        VocabParallelLMHead.from_safetensors(wrong / file, prefix)


def test_names_a_vocabulary_of_another_size(wrong) -> None:
    with pytest.raises(ValueError, match=r"m: 'h.weight' has the shape \[101, 8\], expected 102 rows"):
        VocabParallelEmbedding.from_safetensors(wrong / "m", "h.", shard=VocabShard.even(102))


def test_says_what_to_install(wrong, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(ImportError, match="needs the package safetensors"):
        VocabShard.even(VOCAB).read_safetensors(wrong / "m", "h.weight")


def check_exchange(group, device, folder, tied):
    import transformers

    folder = Path(folder)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        tie_word_embeddings=tied,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    # several files and their index
    model.save_pretrained(folder / "theirs", max_shard_size="4KB")
    assert len(list((folder / "theirs").glob("model-*"))) > 1
    prefix = "model.embed_tokens." if tied else "lm_head."
    head = VocabParallelLMHead.from_safetensors(folder / "theirs", prefix)
    assert torch.equal(head.weight, model.lm_head.weight)
    if tied:
        with pytest.raises(ValueError, match=r"has no tensor 'lm_head.weight', it has model.embed_tokens.weight, "):
            VocabParallelLMHead.from_safetensors(folder / "theirs", "lm_head.")
    # the body as transformers writes it, then our head beside it
    body = {name: tensor for name, tensor in model.state_dict().items() if not name.startswith(("lm_head.", prefix))}
    model.save_pretrained(folder / "ours", state_dict=body, max_shard_size="2KB")
    with torch.no_grad():
        head.weight.mul_(2)
    head.save_safetensors(folder / "ours" / "model.safetensors.index.json", prefix)
    again = transformers.LlamaForCausalLM.from_pretrained(folder / "ours")
    for name, tensor in model.state_dict().items():
        factor = 2 if name.startswith("lm_head.") or (tied and "embed_tokens" in name) else 1
        assert torch.equal(again.state_dict()[name], factor * tensor), name


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_exchanges_models_with_transformers(ranks, shared_path, tied) -> None:
    pytest.importorskip("transformers")
    # in a job transformers writes on the first rank alone
    ranks.run(check_exchange, str(shared_path), tied, ranks=1)
