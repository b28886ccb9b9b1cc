"""How the package is laid out: what imports what, what a wheel holds, and what works without Triton."""

from __future__ import annotations

import ast
import importlib.util
import os
import subprocess
import sys
import types
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from cce_dist.kernels import runtime

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "cce_dist"


def imports_of(path: Path) -> Iterator[str]:
    """Absolute names of the modules that a file imports."""
    package = path.relative_to(ROOT).parent.parts
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)


def within(name: str, *packages: str) -> bool:
    return any(name == package or name.startswith(package + ".") for package in packages)


def files(folder: str) -> list[Path]:
    found = sorted((PACKAGE / folder).glob("*.py"))
    assert found, folder
    return found


def test_kernels_know_no_ranks() -> None:
    for path in files("kernels"):
        for name in imports_of(path):
            assert not within(name, "torch.distributed", "cce_dist.parallel", "cce_dist.autograd"), f"{path}: {name}"


def test_parallel_knows_no_kernels() -> None:
    for path in files("parallel"):
        for name in imports_of(path):
            assert not within(name, "triton", "cce_dist.kernels", "cce_dist.autograd"), f"{path}: {name}"


def test_integrations_import_their_library_when_used() -> None:
    code = (
        "import sys, cce_dist.integrations.deepspeed, cce_dist.integrations.transformers; "
        "assert not {'accelerate', 'deepspeed', 'peft', 'transformers'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=120)
    for path in [path for folder in ("", "autograd", "kernels", "parallel") for path in files(folder)]:
        for name in imports_of(path):
            assert not within(name, "cce_dist.integrations"), f"{path}: {name}"


def test_scripts_use_public_names() -> None:
    public = {"cce_dist", "cce_dist.reference"} | {f"cce_dist.{name}" for name in _public_names()}
    public |= {"cce_dist.reference.linear_cross_entropy"}
    names = ("deepspeed", "deepspeed.prepare", "transformers", "transformers.patch")
    integrations = {f"cce_dist.integrations.{name}" for name in names}
    public |= {"cce_dist.integrations", *integrations}
    # what tunes the kernels knows them
    tools = {"compiled.py", "tune.py"}
    for path in (ROOT / "launch").glob("*.py"):
        for name in imports_of(path):
            allowed = name in public or (path.name in tools and within(name, "cce_dist.kernels"))
            assert not within(name, "cce_dist") or allowed, f"{path}: {name}"


def _public_names() -> list[str]:
    import cce_dist

    assert all(hasattr(cce_dist, name) for name in cce_dist.__all__)
    return cce_dist.__all__


def test_parts_are_namespace_packages_with_links_at_the_root() -> None:
    for part in ("kernels", "parallel"):
        assert not (PACKAGE / part / "__init__.py").exists()
        assert (ROOT / part).is_symlink()
        assert (ROOT / part).resolve() == PACKAGE / part


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a checkout")
def test_links_are_tracked() -> None:
    listed = subprocess.run(
        ["git", "ls-files", "-s", "kernels", "parallel"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert [line.split()[0] for line in listed] == ["120000", "120000"]


def test_another_package_named_kernels_wins_over_the_link(tmp_path) -> None:
    # Hugging Face's: a regular package later on the path comes before a folder without __init__.py
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").write_text("theirs = True\n")
    code = f"import sys; sys.path[:0] = [{str(ROOT)!r}, {str(tmp_path)!r}]; import kernels; assert kernels.theirs"
    subprocess.run([sys.executable, "-S", "-c", code], check=True, timeout=60)


@pytest.mark.skipif(
    not any(
        "site-packages" in str(path)
        for path in getattr(importlib.util.find_spec("kernels"), "submodule_search_locations", None) or []
    ),
    reason="Hugging Face's kernels is not installed",
)
def test_hugging_face_kernels_import_from_the_root() -> None:
    code = "import kernels; assert kernels.get_kernel"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=120)


_WITHOUT_TRITON = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name == "triton" or name.startswith("triton."):
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Blocker())
"""
_COMPUTES = """
import torch, cce_dist
from cce_dist import reference
assert not torch.cuda.is_initialized()
x, w = torch.randn(5, 8, requires_grad=True), torch.randn(11, 8, requires_grad=True)
t = torch.arange(5)
loss = cce_dist.linear_cross_entropy(x, w, t)
loss.backward()
assert abs(loss.item() - reference.linear_cross_entropy(x, w, t).item()) < 1e-5
assert x.grad.norm() > 0 and w.grad.norm() > 0
"""
_LOADED_NONE = """
assert not any(name == "triton" or name.startswith("triton.") for name in sys.modules)
"""


def test_imports_and_computes_without_triton() -> None:
    code = _WITHOUT_TRITON + _COMPUTES + _LOADED_NONE
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=120)


@pytest.mark.parametrize(
    ("capability", "served"), [((7, 0), False), ((7, 5), False), ((8, 0), True), ((12, 0), True)]
)
def test_cards_older_than_the_kernels_get_the_twins(monkeypatch, capability, served) -> None:
    monkeypatch.setattr(runtime, "HAS_TRITON", True)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    tensor = types.SimpleNamespace(dtype=torch.bfloat16, device=torch.device("cuda", 0))
    runtime._triton_runs_on.cache_clear()
    try:
        assert runtime.triton_serves(tensor) is served
    finally:
        runtime._triton_runs_on.cache_clear()


def test_import_starts_no_device_and_no_process_group_and_needs_no_compiler(tmp_path) -> None:
    code = (
        "import torch, cce_dist; assert not torch.cuda.is_initialized(); "
        "assert not torch.distributed.is_initialized()"
    )
    # no program is found, no GPU, and nothing that an earlier run has compiled
    environment = {name: x for name, x in os.environ.items() if name not in ("CC", "CXX", "TRITON_INTERPRET")}
    environment |= dict.fromkeys(("PATH", "HOME", "TRITON_CACHE_DIR"), str(tmp_path))
    environment |= {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-c", code + _COMPUTES]
    subprocess.run(command, cwd=ROOT, env=environment, check=True, timeout=120)


def test_wheel_holds_the_package_alone(tmp_path) -> None:
    wheel = pytest.importorskip("hatchling.builders.wheel", reason="needs hatchling")
    if not (ROOT / "README.md").exists():
        pytest.skip("no README.md to build with")
    (built,) = wheel.WheelBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["standard"])
    names = zipfile.ZipFile(built).namelist()
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"cce_dist"}
    assert "cce_dist/py.typed" in names
    for part in ("kernels/statistics.py", "parallel/shard.py"):
        assert f"cce_dist/{part}" in names
    assert not any(name.endswith(("kernels/__init__.py", "parallel/__init__.py")) for name in names)
