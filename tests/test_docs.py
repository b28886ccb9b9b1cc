"""The pages build: every link and every name of the reference is there."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from pathlib import Path

import pytest

import cce_dist

ROOT = Path(__file__).resolve().parent.parent


def test_the_pages_build(tmp_path) -> None:
    for module in ("mkdocs", "material", "mkdocstrings_handlers.python"):
        pytest.importorskip(module, reason="needs the extra docs")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    for page in (ROOT / "docs").glob("*.md"):
        assert f"{page.name}\n" in (ROOT / "mkdocs.yml").read_text(), f"{page.name} is not in mkdocs.yml's nav"
    html = (tmp_path / "api" / "index.html").read_text()
    # the list of options, and no role of a docstring that reads as code
    assert "label_smoothing" in html
    assert not re.search(r":(func|class|meth|mod):", html)


def test_the_reference_has_all_public_names() -> None:
    named = re.findall(r"^::: cce_dist\.(\w+)$", (ROOT / "docs" / "api.md").read_text(), re.M)
    assert sorted(named) == sorted(cce_dist.__all__)


def test_the_tests_that_the_page_of_faults_names_exist() -> None:
    page, _ = (ROOT / "docs" / "reliability.md").read_text().split("\n## Runs\n")
    rows = [row for row in re.findall(r"^\| (.*) \|$", page, re.M) if not row.startswith("kind of fault")]
    assert rows
    for row in rows:
        named = re.findall(r"`(tests/\w+\.py)::(\w+)`", row)
        assert named, f"names no test: {row}"
        # a name that the pattern does not read
        assert row.count("tests/") == len(named), row
        for file, test in named:
            assert test.startswith("test_"), test
            assert test in _functions_of(ROOT / file), f"{file} has no {test}"


@functools.cache
def _functions_of(path: Path) -> frozenset[str]:
    return frozenset(node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef))
