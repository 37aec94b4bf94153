"""Who may import what."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("actors", "cluster", "configs", "credit", "learner")
MAY_IMPORT = {
    "credit": {"credit"},
    "configs": {"configs"},
    "actors": {"actors", "credit", "configs"},
    "learner": {"learner", "credit", "configs"},
    "cluster": set(PACKAGES),
}
ONLY_IN = {"ray": ("cluster/",), "vllm": ("actors/engine.py", "actors/kernels.py"), "deepspeed": ("learner/",)}


def imports(path: Path) -> set[str]:
    """Top-level names that a file imports, also inside functions."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module.split(".")[0])
    return names


@pytest.mark.parametrize("package", PACKAGES)
def test_a_folder_imports_only_the_folders_below_it(package: str):
    for path in (ROOT / package).rglob("*.py"):
        ours = imports(path) & set(PACKAGES)
        assert ours <= MAY_IMPORT[package], f"{path.relative_to(ROOT)} imports {ours - MAY_IMPORT[package]}"


@pytest.mark.parametrize("library", ONLY_IN)
def test_each_distributed_library_has_one_home(library: str):
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            name = str(path.relative_to(ROOT))
            assert library not in imports(path) or name.startswith(ONLY_IN[library]), f"{name} imports {library}"


def test_credit_stands_alone():
    foreign = set().union(*(imports(path) for path in (ROOT / "credit").glob("*.py"))) & {
        "transformers",
        "peft",
        "pydantic",
        "datasets",
        "scipy",
        "pandas",
    }
    assert not foreign
