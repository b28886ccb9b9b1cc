"""The package as a kernel of Hugging Face's Kernel Hub: built, loaded and used as their library does, offline."""

from __future__ import annotations

import ast
import importlib
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn as nn
from inputs import make_inputs
from tolerance import assert_gradients, assert_loss

import cce_dist
from cce_dist.integrations import hub

# the link at the root has no such part
pytest.importorskip("kernels.layer", reason="needs the extra hub")
theirs = importlib.import_module("kernels")


@pytest.fixture(scope="module")
def repository(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("hub")
    hub.main([str(folder)])
    return folder


@pytest.fixture
def kernel(repository) -> ModuleType:
    return theirs.get_local_kernel(repository)


def sources(repository: Path) -> dict[str, ast.Module]:
    variant = repository / "build" / "torch-cuda"
    found = {path.relative_to(variant).as_posix(): ast.parse(path.read_text()) for path in variant.rglob("*.py")}
    assert {"__init__.py", "integrations/layers.py", "kernels/statistics.py", "parallel/shard.py"} <= found.keys()
    return found


def test_layout(repository) -> None:
    built = sorted(repository.glob("build/*"))
    assert [path.name for path in built] == ["torch-cpu", "torch-cuda", "torch-rocm"]
    assert list(repository.iterdir()) == [repository / "build"]
    rust = importlib.import_module("kernels._rust" if hasattr(theirs, "_rust") else "kernels_data")
    for variant in built:
        read = rust.Metadata.read_from_file(variant / "metadata.json")
        assert (read.name.python_name, read.version, read.python_depends) == ("cut_cross_entropy", 1, [])
        assert read.id.isidentifier()
        assert read.id.startswith(f"_cut_cross_entropy_{variant.name[6:]}_")
        metadata = json.loads((variant / "metadata.json").read_text())
        assert metadata["backend"]["type"] == variant.name[6:]
        digest = rust.Digest.hash_variant(rust.DigestAlgorithm.SHA256, variant)
        assert metadata["digest"] == {"algorithm": "sha256", "files": digest.files}
        assert digest.files == rust.Digest.hash_variant(rust.DigestAlgorithm.SHA256, built[0]).files


def test_the_same_files_give_the_same_build(repository, tmp_path) -> None:
    again = hub.build(tmp_path)
    (again[0] / "left.py").write_text("")
    assert hub.build(tmp_path) == again
    for variant in again:
        paths = sorted(path.relative_to(tmp_path) for path in variant.rglob("*") if path.is_file())
        assert all((tmp_path / path).read_bytes() == (repository / path).read_bytes() for path in paths)
        assert not (variant / "left.py").exists()


def test_imports_are_relative_or_torchs(repository) -> None:
    # safetensors is imported by the call that reads or writes a file
    allowed = sys.stdlib_module_names | {"torch", "triton", "safetensors"}
    for path, tree in sources(repository).items():
        for node in ast.walk(tree):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                names = [str(node.module)]
            assert all(name.split(".")[0] in allowed for name in names), (path, names)


def test_modules_hold_definitions_alone(repository) -> None:
    definitions = (
        ast.Import,
        ast.ImportFrom,
        ast.FunctionDef,
        ast.ClassDef,
        ast.Assign,
        ast.AnnAssign,
        ast.AugAssign,
    )
    for path, tree in sources(repository).items():
        for node in tree.body:
            document = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            typing = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
            # whether there is Triton
            tried = isinstance(node, ast.Try) and path == "kernels/runtime.py"
            assert isinstance(node, definitions) or document or typing or tried, (path, ast.unparse(node))


_LOADING = """
import sys
import torch, kernels, torch.distributed.tensor, torch.distributed.checkpoint
try:
    import triton.language, triton.tools.tensor_descriptor
except ImportError:
    pass
sys.dont_write_bytecode = True
from pathlib import Path

def watch(event, arguments):
    writes = event == "open" and any(letter in str(arguments[1]) for letter in "wax+")
    if watching and (writes or event.startswith(("subprocess", "socket", "os.system", "os.exec", "os.fork"))):
        raise AssertionError(f"{event} {arguments}")

watching = True
sys.addaudithook(watch)
ops, dispatched = set(dir(torch.ops)), torch.nn.Linear.forward
kernel = kernels.get_local_kernel(Path(sys.argv[1]))
watching = False
# operators of its own alone
assert all(name.startswith("_cut_cross_entropy_") for name in set(dir(torch.ops)) - ops)
assert torch.nn.Linear.forward is dispatched
assert not torch.cuda.is_initialized() and not torch.distributed.is_initialized()
assert not [name for name in sys.modules if name.split(".")[0] in ("cce_dist", "transformers", "deepspeed")]
assert kernel.linear_cross_entropy.__module__.startswith("_cut_cross_entropy_")
"""


def test_loading_does_nothing_else(repository, tmp_path) -> None:
    subprocess.run([sys.executable, "-c", _LOADING, repository], check=True, cwd=tmp_path, timeout=120)


@pytest.mark.parametrize("method", ["recompute", "cached", "fused"])
def test_the_loss_of_the_hubs_kernel(kernel, method) -> None:
    assert set(kernel.__all__) == {*cce_dist.__all__, "layers"}
    assert kernel.linear_cross_entropy is not cce_dist.linear_cross_entropy
    inputs = make_inputs(70, 24, 601, bias=True, ignored=0.2)
    loss = kernel.linear_cross_entropy(inputs.hidden, inputs.weight, inputs.targets, bias=inputs.bias, method=method)
    assert_loss(loss, inputs)
    loss.backward()
    assert_gradients([x.grad for x in (inputs.hidden, inputs.weight, inputs.bias)], inputs)
    assert loss.equal(cce_dist.linear_cross_entropy(*inputs[:3], bias=inputs.bias))


@theirs.use_kernel_forward_from_hub("LinearCrossEntropy")
class Whole(nn.Module):
    """What a model has today."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options

    def forward(self, hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(hidden @ weight.T, targets, **self.options)


@pytest.mark.parametrize("options", [{}, {"reduction": "none", "label_smoothing": 0.1}], ids=str)
def test_the_layer_under_kernelize(repository, kernel, options) -> None:
    model = nn.Sequential(Whole(**options))
    layer = theirs.LocalLayerRepository(repository, layer_name="LinearCrossEntropy")
    with theirs.use_kernel_mapping({"LinearCrossEntropy": {"cpu": layer}}):
        theirs.kernelize(model, mode=theirs.Mode.TRAINING, device="cpu", use_fallback=False)
    assert model[0].forward.__func__ is kernel.layers.LinearCrossEntropy.forward
    inputs = make_inputs(70, 24, 601, ignored=0.2)
    loss = model[0](*inputs[:3])
    assert_loss(loss, inputs, **options)
    upstream = torch.rand_like(loss)
    loss.backward(upstream)
    assert_gradients([inputs.hidden.grad, inputs.weight.grad], inputs, upstream, **options)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--name", "Cut_Cross"], "name must be lower-case"),
        (["--version", "-1"], "version must be at least 0, got -1"),
    ],
    ids=str,
)
def test_what_the_hub_does_not_take(tmp_path, capsys, arguments, message) -> None:
    with pytest.raises(SystemExit) as stopped:
        hub.main([str(tmp_path), *arguments])
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
