"""The lab imports the rest of legato; the rest only names the lab, in three lists."""

import ast
from pathlib import Path

import legato

PACKAGE = Path(legato.__file__).parent
LAB = PACKAGE / "lab"


def names_in(path):
    """Modules and names that a file imports, and what its strings say."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def test_only_the_lists_name_the_lab():
    """Verbs, public names and trace formats; `lint-imports` sees the imports, but no names of modules in strings."""
    others = (path for path in PACKAGE.rglob("*.py") if LAB not in path.parents)
    naming = {path for path in others if any(name.startswith("legato.lab") for name in names_in(path))}
    assert {path.relative_to(PACKAGE).as_posix() for path in naming} == {
        "__init__.py", "commands.py", "ingest/__init__.py",
    }  # fmt: skip


def test_the_lab_uses_what_is_public():
    found = {
        name
        for path in LAB.rglob("*.py")
        for name in names_in(path)
        if name.startswith("legato.") and " " not in name and any(part.startswith("_") for part in name.split("."))
    }
    assert found == set()
