"""How many random faults in legato the tests find.

    for tests in room quick all; do python benchmarks/faults.py --count 60 --seed 1 --folder faults --tests $tests; done

A fault is one change of one expression in one file: a sign, an off-by-one, a comparison, two exchanged operands, or a
call that is left out. First, the tests of the file, of its folder and of its room (`ROOMS`) run, up to the first
failure. For faults that they do not find, `make test` runs, and for faults that are still left, `make test-all`. Each
fault that survives is printed with its change. The results are stored in the folder, and an interrupted run continues
from there.
"""

import argparse
import ast
import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
#: Rooms, and where their tests are.
ROOMS = {
    "core": "tests/core",
    "ingest": "tests/ingest",
    "simulator": "tests/simulator",
    "schedule": "tests/schedule",
    "fsdp": "tests/fsdp",
    "whole_jobs": "tests/whole_jobs",
    "pytorch/runtime": "tests/pytorch/runtime",
}
OTHER = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.Lt: ast.LtE, ast.LtE: ast.Lt,
    ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip
#: What no test can be asked to notice: what is printed or logged, and what only types need.
SPARED = ("raise", "assert", "note(", "warn", "_log", "print", "cast(", "TypeVar", "@")
EVERY = [["tests"]]
STAGES = ("room", "quick", "all")
PYTEST = ["-m", "pytest", "-x", "-q", "-n", "2", "--dist", "loadscope", "-p", "no:cacheprovider"]


def changes(path):
    """(line, old text, new text, start, end) of every fault that can be made in a file; offsets are in bytes."""
    source = path.read_bytes()
    lines = source.splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))
    tree = ast.parse(source)
    annotations = {id(part) for node in ast.walk(tree) for part in _types_of(node)}
    for node in ast.walk(tree):
        if id(node) in annotations or not hasattr(node, "lineno"):
            continue
        if lines[node.lineno - 1].decode().strip().startswith(SPARED):
            continue
        start, end = starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset
        for changed in _changed(node):
            yield node.lineno, source[start:end].decode(), changed, start, end


def _types_of(node):
    for name in ("annotation", "returns"):
        if (found := getattr(node, name, None)) is not None:
            yield from ast.walk(found)
    if isinstance(node, ast.Subscript):  # Sequence[int]; also `x[i]`, of which there are enough elsewhere
        yield from ast.walk(node)


def _changed(node):
    if isinstance(node, ast.BinOp) and type(node.op) in OTHER:
        yield f"({ast.unparse(ast.BinOp(node.left, OTHER[type(node.op)](), node.right))})"
        if isinstance(node.op, ast.Sub | ast.Div):
            yield f"({ast.unparse(ast.BinOp(node.right, node.op, node.left))})"
    elif isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in OTHER:
        yield f"({ast.unparse(ast.Compare(node.left, [OTHER[type(node.ops[0])]()], node.comparators))})"
    elif isinstance(node, ast.BoolOp):
        yield f"({ast.unparse(ast.BoolOp(OTHER[type(node.op)](), node.values))})"
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.Not):
        yield f"({ast.unparse(node.operand)})"
    elif isinstance(node, ast.Constant) and type(node.value) is int:
        yield str(node.value + 1)
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield "pass"


def faults(count, seed):
    """`count` random faults, spread evenly over the rooms."""
    rng, found = random.Random(seed), []
    for k in range(count):
        room = list(ROOMS)[k % len(ROOMS)]
        files = sorted((ROOT / "legato" / room).rglob("*.py"))
        every = {f: sorted(set(changes(f))) for f in files}
        path = rng.choices(files, [len(every[f]) for f in files])[0]
        found.append({"room": room, "file": str(path.relative_to(ROOT)), "change": rng.choice(every[path])})
    return found


def nearest(fault):
    """Tests that may find a fault, the nearest first: those of the file, of its folder, and of the room."""
    path = Path(fault["file"]).relative_to("legato")
    folder = next(f for f in ("tests" / path).parents if (ROOT / f).is_dir())
    named = [str(f.relative_to(ROOT)) for f in sorted((ROOT / "tests").rglob(f"test_{path.stem}*.py"))]
    return [tests for tests in (named, [str(folder)], [ROOMS[fault["room"]]]) if tests]


def finds(folder, tests, everything=False):
    """Run tests of the copy of the project in `folder`, and return the first failure, or an empty text."""
    marks = ["--hypothesis-profile=usual"] if everything else ["-m", "not slow"]
    environment = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": ""}
    done = subprocess.run(
        [sys.executable, *PYTEST, *marks, *tests], cwd=folder, env=environment, capture_output=True, text=True
    )
    if done.returncode in (0, 5):
        return ""
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return failed[0] if failed else done.stdout[-200:] + done.stderr[-200:]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", type=Path, required=True, help="where a copy of the project and the results go")
    parser.add_argument("--tests", choices=STAGES, default=STAGES[0], help="which tests try them: each after the last")
    options = parser.parse_args()
    stage = STAGES.index(options.tests)
    copy, kept = options.folder.resolve() / "project", options.folder / f"{options.tests}.jsonl"
    for name in subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True).split():
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, copy / name)
    wanted = faults(options.count, options.seed)
    if stage:
        before = (options.folder / f"{STAGES[stage - 1]}.jsonl").read_text().splitlines()
        wanted = [{**fault, "found": ""} for fault in map(json.loads, before) if not fault["found"]]
    done = kept.read_text().splitlines() if kept.exists() else []
    if not done and (by := finds(copy, *(EVERY if stage else [[*ROOMS.values()]]), options.tests == "all")):
        raise SystemExit(f"the tests fail where there is no fault: {by}")
    for fault in wanted[len(done) :]:
        line, old, new, start, end = fault["change"]
        original = (ROOT / fault["file"]).read_bytes()
        (copy / fault["file"]).write_bytes(original[:start] + new.encode() + original[end:])
        tries = (finds(copy, tests, options.tests == "all") for tests in (EVERY if stage else nearest(fault)))
        fault["found"] = next(filter(None, tries), "")
        (copy / fault["file"]).write_bytes(original)
        done.append(json.dumps(fault))
        with kept.open("a") as file:
            file.write(done[-1] + "\n")
        print(f"{fault['file']}:{line}: {old!r} -> {new!r}: {fault['found'] or 'SURVIVES'}", flush=True)
    print(f"{sum(bool(json.loads(one)['found']) for one in done)} of {len(done)} faults are found")


if __name__ == "__main__":
    main()
