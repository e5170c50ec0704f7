"""The house: which floor may import which (docs/design.md)."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "legato"

FLOORS = {
    "core": 0,
    "ingest": 1,
    "simulate": 1,
    "report": 1,
    "pytorch": 1,
    "zoo": 1,
    "schedule": 2,
    "testbed": 3,
    "papers": 3,
    "sweep": 3,
    "demo": 4,
    "auto": 4,
    "cli": 5,
}
THIRD_PARTY_OF_CORE = {"msgspec"}


def room(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(path: Path):
    """(line, module, at module level?) of every import in a file."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    top = set(map(id, tree.body))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name, id(node) in top
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            if node.module == "legato":
                for alias in node.names:
                    yield node.lineno, f"legato.{alias.name}", id(node) in top
            else:
                yield node.lineno, node.module or "", id(node) in top


FILES = sorted(p for p in PACKAGE.rglob("*.py") if p != PACKAGE / "__init__.py")


def test_every_room_has_a_floor():
    assert {room(p) for p in FILES} <= set(FLOORS)


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_go_down(path):
    here = room(path)
    for line, module, _ in imports(path):
        parts = module.split(".")
        if parts[0] == "legato" and len(parts) > 1 and parts[1] in FLOORS and parts[1] != here:
            there = parts[1]
            assert FLOORS[there] < FLOORS[here], f"{path.name}:{line}: {here} imports {there}"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_torch_stays_in_its_rooms(path):
    for line, module, top in imports(path):
        if module.split(".")[0] in {"torch", "transformers"} or module.startswith("legato.pytorch"):
            here = room(path)
            if here == "cli":
                assert not top, f"{path.name}:{line}: cli imports {module} outside a command"
            else:
                assert here in {"pytorch", "demo", "testbed", "auto"}, f"{path.name}:{line}: {here} imports {module}"


def test_core_needs_only_the_codec():
    for path in (PACKAGE / "core").glob("*.py"):
        for line, module, _ in imports(path):
            top = module.split(".")[0]
            assert top in sys.stdlib_module_names or top == "legato" or top in THIRD_PARTY_OF_CORE, (
                f"{path.name}:{line}: core imports {module}"
            )


def test_nothing_is_unpickled():
    for path in FILES:
        for line, module, _ in imports(path):
            assert module.split(".")[0] not in {"pickle", "dill", "cloudpickle", "marshal", "shelve"}, (
                f"{path}:{line}: {module}"
            )


def test_files_stay_short():
    long = {str(p.relative_to(ROOT)): n for p in FILES if (n := len(p.read_text().splitlines())) > 350}
    assert not long


def test_public_api_is_what_all_says_and_needs_no_torch():
    code = """
import sys
import legato
assert "torch" not in sys.modules and "numba" not in sys.modules
needs_torch = set(legato._NEEDS_TORCH)
for name in legato.__all__:
    if name not in needs_torch:
        getattr(legato, name)
modules = {n for n in vars(legato) if n in sys.modules or f"legato.{n}" in sys.modules}
public = {n for n in vars(legato) if not n.startswith("_")} - modules
print(sorted(public - {"annotations", "Any"} - set(legato.__all__)))
"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
