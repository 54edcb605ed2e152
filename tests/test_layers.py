"""The packaging and the arrows between the folders hold."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = {"engine": "tidegate", "codec": "tidegate.codec", "storage": "tidegate.storage"}
MAY_IMPORT = {"engine": {"codec", "storage"}, "codec": set(), "storage": set()}
MODULES = sorted(path for folder in PACKAGES for path in (ROOT / folder).glob("*.py"))


def folder_of(module: str) -> str:
    """The folder that holds a tidegate module."""
    for folder, package in sorted(PACKAGES.items(), key=lambda item: -len(item[1])):
        if module == package or module.startswith(package + "."):
            return folder
    return ""


@pytest.mark.parametrize("path", MODULES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_module_imports_under_its_public_name(path: Path) -> None:
    name = PACKAGES[path.parent.name] + ("" if path.stem == "__init__" else f".{path.stem}")
    assert Path(importlib.import_module(name).__file__ or "").resolve().read_bytes() == path.read_bytes()


@pytest.mark.parametrize("path", MODULES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_imports_point_down(path: Path) -> None:
    here = path.parent.name
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            assert node.level == 1, f"{path}:{node.lineno}: `from ..` is not allowed"
        names = [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
        names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        for name in names:
            assert name.split(".")[0] not in PACKAGES, f"{path}:{node.lineno}: import {name} by its public name"
            assert name != "tidegate", f"{path}:{node.lineno}: import from a module of tidegate, not from its face"
            target = folder_of(name)
            assert not target or target in MAY_IMPORT[here], f"{path}:{node.lineno}: {here} must not import {target}"


def test_storage_knows_no_tensors() -> None:
    for path in (ROOT / "storage").glob("*.py"):
        assert "torch" not in {n.split(".")[0] for n in imported(path)}, path


def imported(path: Path) -> set[str]:
    """Top-level names of what a file imports from outside its folder."""
    tree = ast.parse(path.read_text())
    names = {a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
    return names | {n.module or "" for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and not n.level}


def test_no_gpu_package_is_imported_at_import() -> None:
    import subprocess
    import sys

    names = ("cupy", "nvidia", "kvikio", "boto3")
    code = f"import sys, tidegate, tidegate.cli; print([m for m in {names} if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_exports() -> None:
    tidegate = importlib.import_module("tidegate")
    assert len(tidegate.__all__) <= 15
    assert all(hasattr(tidegate, name) for name in tidegate.__all__)
    tree = ast.parse((ROOT / "engine" / "__init__.py").read_text())
    defined = [n for n in tree.body if isinstance(n, ast.FunctionDef | ast.ClassDef)]
    assert not defined, "engine/__init__.py defines nothing"


@pytest.mark.parametrize("path", MODULES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_files_and_functions_stay_small(path: Path) -> None:
    text = path.read_text()
    assert text.count("\n") <= 400, f"{path} has outgrown its room; redesign it"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            body_start = node.body[1 if ast.get_docstring(node) and len(node.body) > 1 else 0].lineno
            assert (node.end_lineno or 0) - body_start < 60, f"{path}:{node.lineno} {node.name} is too long"


@pytest.mark.parametrize("path", sorted(ROOT.glob("*/*.cu")), ids=lambda path: path.stem)
def test_files_of_kernels_stay_small(path: Path) -> None:
    assert path.read_text().count("\n") <= 400, f"{path} has outgrown its room; redesign it"
