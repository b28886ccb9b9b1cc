"""Hooks of mkdocs: for the reference, which comes from docstrings, and for blocks of code."""

from __future__ import annotations

import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

from mkdocs.plugins import event_priority

PACKAGE = Path(__file__).parent.parent / "cce_dist"
_copies = tempfile.TemporaryDirectory()


# before mkdocstrings reads its paths
@event_priority(100)
def on_config(config: Any) -> None:
    """Reads a copy in which every folder has an ``__init__.py``: mkdocstrings takes no others for packages."""
    copy = Path(_copies.name, PACKAGE.name)
    shutil.copytree(PACKAGE, copy, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    for part in ("kernels", "parallel"):
        (copy / part / "__init__.py").touch()
    config.plugins["mkdocstrings"].config.handlers["python"]["paths"] = [_copies.name]


def on_page_markdown(markdown: str, **_: Any) -> str:
    """What tests are told of a block behind its language is no option that mkdocs knows."""
    return re.sub(r"^```python .*$", "```python", markdown, flags=re.M)


def on_page_content(html: str, **_: Any) -> str:
    """Of the roles of docstrings, as in :func:`cce_dist.plan`, the name is left."""
    return re.sub(r":(?:func|class|meth|mod):(?:<code>|`)~?([\w.]+)(?:</code>|`)", r"<code>\1</code>", html)
