"""Reading classes and methods out of a release's source, without importing it."""

from __future__ import annotations

import ast
from pathlib import Path


def class_of(path: Path, class_name: str) -> ast.ClassDef | None:
    """Give a class as a syntax tree; None where the file or the class is not there."""
    if not path.exists():
        return None
    return next(
        (
            node
            for node in ast.parse(path.read_text()).body
            if isinstance(node, ast.ClassDef) and node.name == class_name
        ),
        None,
    )


def functions_of(path: Path, class_name: str) -> dict[str, ast.FunctionDef]:
    """Give a class's methods as syntax trees; empty where the file or the class is not there."""
    found = class_of(path, class_name)
    return {node.name: node for node in found.body if isinstance(node, ast.FunctionDef)} if found else {}
