"""What the README and the pages of docs/ show runs, and the files that they name are there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCKS = [
    pytest.param(kind, code, id=f"{page.name}-{index}", marks=pytest.mark.slow if slow else ())
    for page in PAGES
    for index, (kind, slow, code) in enumerate(
        re.findall(r"```python( torchrun)?( slow)?\n(.*?)```", page.read_text(), re.S)
    )
]


# of an op that training never uses, which takes a compiler and a minute
_WITHOUT_BUILDING = """import deepspeed.ops
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
"""


@pytest.mark.parametrize(("kind", "code"), BLOCKS)
def test_code_blocks_run(tmp_path, kind, code) -> None:
    for library, used in (("transformers", "transformers"), ("accelerate", "Trainer"), ("peft", "import peft")):
        if used in code:
            pytest.importorskip(library, reason="needs the extra train")
    if "deepspeed" in code:
        pytest.importorskip("deepspeed", reason="needs the extra deepspeed")
        code = _WITHOUT_BUILDING + code
    script = tmp_path / "block.py"
    script.write_text(code)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"] if kind else []
    # the package as installed: nothing of the checkout's root is on the path
    subprocess.run([sys.executable, *launcher, script], check=True, cwd=tmp_path, timeout=300)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_named_files_exist(page) -> None:
    text = page.read_text()
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", text) if "://" not in link]
    named = re.findall(r"(?:launch|tests|docs|cce_dist)/[\w./-]*\w", text)
    assert all((page.parent / link).exists() for link in links), links
    assert all((ROOT / name).exists() for name in named), named
