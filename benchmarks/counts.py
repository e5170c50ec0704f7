"""Size and complexity of the code: counts, and goals for most counts.

    python benchmarks/counts.py

prints one line for each count, with `*` if the count misses its goal. A count without a goal is only observed. Lines of
code are lines without docstrings, comments and blank lines. The "import floors" of a folder are the length of the
longest chain of imports among its modules and subfolders. Functions are counted by ruff; a long list of parameters is
allowed if a table or a public interface needs it. "Wider" complexity also counts each `and` and `or`, each conditional
expression, and each `for` and `if` of a comprehension.
"""

import ast
import json
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import get_args

import grimp
import typer.main

from legato.commands import app
from legato.schedule.bound import lower_bound

HOUSE = Path(__file__).parents[1]
#: The lines of code of folders, and their goals.
LINES = {
    "legato/schedule": None,
    "legato/pytorch/runtime": None,
    "legato/simulator": None,
    "legato/cli": None,
    "tests": None,
}
#: Tokens that are no code.
LAYOUT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
MOST_FLOORS, MOST_WIDER = 5, 15
BRANCHES = (ast.If, ast.For, ast.While, ast.ExceptHandler, ast.match_case, ast.IfExp)
#: The folders at the root are the floors of docs/design.md.
ROOT = "legato"


def lines(folder: str) -> int:
    """The lines of code in a folder."""
    return sum(map(lines_of, (HOUSE / folder).rglob("*.py")))


def lines_of(path: Path) -> int:
    """The lines of code in a file."""
    documentation = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            documentation |= {*range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1)}
    with tokenize.open(path) as file:
        tokens = [token for token in tokenize.generate_tokens(file.readline) if token.type not in LAYOUT]
    return len({line for token in tokens for line in range(token.start[0], token.end[0] + 1)} - documentation)


def findings(rule: str, setting: str, *options: str) -> int:
    """How often ruff finds that functions of the product break a rule."""
    ruff = [
        sys.executable,
        "-m",
        "ruff",
        "check",
        "legato",
        "--isolated",
        "--select",
        rule,
        "--config",
        f"lint.{setting}",
    ]
    found = subprocess.run([*ruff, "--output-format=json", *options], cwd=HOUSE, capture_output=True, text=True)
    if found.returncode not in (0, 1):
        sys.exit(found.stderr)
    return len(json.loads(found.stdout))


def floors(graph: grimp.ImportGraph) -> Iterator[tuple[str, int]]:
    """The folders and their import floors."""
    for folder in sorted(graph.modules - {ROOT}):
        inside = graph.find_children(folder)

        @cache
        def floor(one: str, inside: frozenset[str] = frozenset(inside)) -> int:
            below = (
                other
                for other in inside - {one}
                if graph.direct_import_exists(importer=one, imported=other, as_packages=True)
            )
            return 1 + max(map(floor, below), default=0)

        if inside:
            yield folder, max(map(floor, inside))


def functions() -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for path in (HOUSE / "legato").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield node


def wider_complexity(function: ast.AST) -> int:
    count = 1
    for node in ast.walk(function):
        if isinstance(node, BRANCHES):
            count += 1
        elif isinstance(node, ast.BoolOp):
            count += len(node.values) - 1
        elif isinstance(node, ast.comprehension):
            count += 1 + len(node.ifs)
    return count


def takes_context(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any(one.annotation and "typer.Context" in ast.unparse(one.annotation) for one in function.args.args)


def decides_by_name(node: ast.AST) -> bool:
    """Whether it compares a plan's scheduler with a name."""
    if not isinstance(node, ast.Compare):
        return False
    sides = [node.left, *node.comparators]
    return any(isinstance(one, ast.Attribute) and one.attr == "scheduler" for one in sides) and any(
        isinstance(part, ast.Constant) for one in sides for part in [one, *getattr(one, "elts", [])]
    )


def options() -> int:
    """The options of all commands, without --help."""
    commands = typer.main.get_command(app).commands.values()  # pyrefly: ignore[missing-attribute]
    return sum(one.param_type_name == "option" for command in commands for one in command.params)


def counts() -> Iterator[tuple[str, int, int | None]]:
    """(what is counted, how many there are, and how many there may be)."""
    lab = lines("legato/lab")
    yield "lines of code of legato outside lab", lines("legato") - lab, 34_900
    yield "lines of code of legato/lab", lab, None
    for folder, goal in LINES.items():
        yield f"lines of code of {folder}", lines(folder), goal
    for complexity, goal in ((10, 10), (15, 0)):
        found = findings("C901", f"mccabe.max-complexity = {complexity}", "--ignore-noqa")
        yield f"functions above a complexity of {complexity}", found, goal
    every = list(functions())
    wide = sum(wider_complexity(one) > MOST_WIDER for one in every)
    yield f"functions above a wider complexity of {MOST_WIDER}", wide, 20
    yield "functions that get typer.Context, without the callback", sum(map(takes_context, every)) - 1, 0
    yield "comparisons of a scheduler with a name", sum(decides_by_name(n) for one in every for n in ast.walk(one)), 0
    yield "options of all commands", options(), 255
    yield "functions with more than 8 parameters", findings("PLR0913", "pylint.max-args = 8"), 0
    high = [(folder, count) for folder, count in floors(grimp.build_graph("legato")) if count > MOST_FLOORS]
    yield f"folders with more than {MOST_FLOORS} import floors", len(high), 0
    for folder, count in high:
        yield f"  import floors of {folder}", count, MOST_FLOORS
    arguments = getattr(lower_bound, "ARGUMENTS", None) or get_args(lower_bound.Case)
    yield "arguments for bounds", len(arguments), 6
    yield "second implementations that check bounds", len(list((HOUSE / "legato").rglob("check_*.py"))), 0


if __name__ == "__main__":
    for what, found, goal in counts():
        missed = "*" if goal is not None and found > goal else ""
        print(f"{what:<60}{found:>8,}{'' if goal is None else f'  of {goal:,}':<12}{missed}".rstrip())
