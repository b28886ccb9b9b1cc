"""What the README and the pages of docs/ show runs, and the files that they name are there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
# name, whether torchrun starts it, whether it takes long, code
BLOCKS = [
    (f"{page.name}-{index}", bool(torchrun), bool(slow), code)
    for page in PAGES
    for index, (torchrun, slow, code) in enumerate(
        re.findall(r"```python( torchrun)?( slow)?\n(.*?)```", page.read_text(), re.S)
    )
]
# what a block imports, a module that its library alone has, and the extra that brings it
EXTRAS = {
    # whose Trainer needs it
    "transformers": ("accelerate", "train"),
    "peft": ("peft", "train"),
    "deepspeed": ("deepspeed", "deepspeed"),
    # the link at the root has no such part
    "kernels": ("kernels.layer", "hub"),
}
# of an op that training never uses, which takes a compiler and a minute
_WITHOUT_BUILDING = """import deepspeed.ops
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
"""


def library_of(code: str) -> str:
    """The one that a block needs beside torch."""
    found = [library for library in EXTRAS if re.search(rf"^(?:import|from) {library}\b", code, re.M)]
    return found[-1] if found else "torch"


def require(library: str) -> None:
    if library in EXTRAS:
        module, extra = EXTRAS[library]
        pytest.importorskip(module, reason=f"needs the extra {extra}")


def run(folder: Path, code: str, *launcher: str) -> None:
    script = folder / "block.py"
    script.write_text(code)
    # the package as installed: nothing of the checkout's root is on the path
    subprocess.run([sys.executable, *launcher, script], check=True, cwd=folder, timeout=300)


def marked(slow: bool) -> tuple[pytest.MarkDecorator, ...]:
    return (pytest.mark.slow,) if slow else ()


@pytest.mark.parametrize(
    ("library", "slow"),
    [
        pytest.param(library, slow, id=f"{library}-slow" if slow else library, marks=marked(slow))
        for library, slow in sorted({(library_of(code), slow) for _, torchrun, slow, code in BLOCKS if not torchrun})
    ],
)
def test_code_blocks_run(tmp_path, library, slow) -> None:
    require(library)
    # in one process, each with names of its own: the imports take most of the time
    wanted = (False, slow, library)
    blocks = {name: code for name, torchrun, long, code in BLOCKS if (torchrun, long, library_of(code)) == wanted}
    run(
        tmp_path,
        f"for name, code in {blocks!r}.items():\n    exec(compile(code, name, 'exec'), {{'__name__': '__main__'}})\n",
    )


@pytest.mark.parametrize(
    "code", [pytest.param(code, id=name, marks=marked(slow)) for name, torchrun, slow, code in BLOCKS if torchrun]
)
def test_torchrun_blocks_run(tmp_path, code) -> None:
    require(library_of(code))
    if "deepspeed" in code:
        code = _WITHOUT_BUILDING + code
    run(tmp_path, code, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_named_files_exist(page) -> None:
    text = page.read_text()
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", text) if "://" not in link]
    named = re.findall(r"(?:launch|tests|docs|cce_dist)/[\w./-]*\w", text)
    assert all((page.parent / link).exists() for link in links), links
    assert all((ROOT / name).exists() for name in named), named
