"""Import PyTorch execution traces (`ExecutionTraceObserver`) with profiler traces of the same step.

The profiler trace has the times of operators. The execution trace says which tensors each operator reads and writes,
and so gives the ops their real dependencies. The profiler's `Record function id` equals the `rf_id` of the execution
trace, so operators of the two traces are matched by this id. Older profilers do not write this id (their `External id`
counts something else). For traces of older profilers, operators are matched by their order.

[Note: dependencies from storages] An operator depends on the last writers of the storages that it reads. An operator
writes the storages of its outputs, and of the inputs that its schema marks with `!`. Views need no special treatment
because they share a storage. If a new storage gets the memory of an old one, an op may get an additional dependency on
an earlier op, which costs no time if both ops are in one stream.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from legato.core.errors import FileError, InputError
from legato.core.text import count
from legato.ingest.kineto.importer import Graph, import_kineto
from legato.ingest.kineto.step import TracedStep
from legato.ingest.kineto.trace.columns import Arguments, EventColumns
from legato.ingest.kineto.trace.events import ACCUMULATE, COLLECTIVE_NAME, Trace
from legato.ingest.names import COMMUNICATION, Transfers
from legato.ingest.source import Progress, one_line, read_all, read_blocks, refusals_name_files
from legato.ingest.traced import Imported, Notes, TracedOp

__all__ = ["import_execution_traces", "is_graph", "pairs"]

#: A pattern for types such as `Tensor(float)` and `GenericList[Tensor(float)]`.
_TENSOR = re.compile(r"^(?:GenericList\[)*Tensor\(([^)]*)\).*$")
#: The prefix of the operators that start all-reduces of lists of tensors.
_ALL_REDUCE = "c10d::allreduce"


class _Values(msgspec.Struct):
    values: list[Any] = []
    shapes: list[Any] = []
    types: list[Any] = []


class _Attribute(msgspec.Struct):
    name: str
    value: Any = None


class _Node(msgspec.Struct):
    """A node. In schemas up to 1.0.1, each property is a field; since 1.0.2, `_Values` and `attrs` have the rest."""

    id: int
    name: str
    rf_id: int | None = None
    op_schema: str = ""
    inputs: list[Any] | _Values = []
    outputs: list[Any] | _Values = []
    input_shapes: list[Any] = []
    input_types: list[Any] = []
    attrs: list[_Attribute] = []

    def attribute(self, name: str, flat: Any) -> Any:
        return next((a.value for a in self.attrs if a.name == name), flat)

    def described(self) -> tuple[list[Any], list[Any]]:
        """Return the shapes and types of the inputs, as the profiler writes them: `float`, not `Tensor(float)`."""
        flat = (self.input_shapes, self.input_types)
        shapes, types = (self.inputs.shapes, self.inputs.types) if isinstance(self.inputs, _Values) else flat
        return shapes, [_TENSOR.sub(r"\1", kind) if isinstance(kind, str) else kind for kind in types]


class _File(msgspec.Struct):
    schema: str
    nodes: list[_Node]
    pid: int | None = None


@refusals_name_files
def import_execution_traces(
    paths: Sequence[Path],
    *,
    name: str | None = None,
    step: str | None = None,
    rank: int | None = None,
    keep_idle: bool = True,
    known: Transfers | None = None,
    progress: Progress | None = None,
) -> Imported:
    """Import pairs of an execution trace and a profiler trace, one pair per rank.

    In whatever order `paths` mixes the two kinds, the n-th execution trace belongs to the n-th profiler trace. Raises
    `InputError` if there are more traces of one kind than of the other, and `FileError` if the traces of a pair have no
    operator in common.
    """
    read: dict[Path, Graph] = {trace: _Graph(graph, progress) for graph, trace in pairs(paths)}
    return import_kineto(
        list(read), name=name, step=step, rank=rank, keep_idle=keep_idle, graphs=read, known=known, progress=progress
    )


@refusals_name_files
def pairs(paths: Sequence[Path]) -> list[tuple[Path, Path]]:
    """Return each execution trace with its profiler trace. Raises `InputError` if there are more of one kind."""
    graphs: list[Path] = []
    traces: list[Path] = []
    for path in paths:
        (graphs if is_graph(path) else traces).append(path)
    if not traces:
        raise FileError(
            f"{paths[0]}: an execution trace has no times (expected the profiler's trace of the same step as well)"
        )
    if len(graphs) != len(traces):
        numbers = f"{count(len(graphs), 'execution trace')} and {count(len(traces), 'profiler trace')}"
        raise InputError(f"{numbers} (expected one of each per rank)")
    return list(zip(graphs, traces, strict=True))


def is_graph(path: Path) -> bool:
    """Return whether a file is an execution trace: near its beginning, it has nodes, and no events before the nodes."""
    head = next(read_blocks(path), b"")
    nodes, events = head.find(b'"nodes"'), head.find(b'"traceEvents"')
    return nodes >= 0 and (events < 0 or nodes < events)


class _Graph:
    """The execution trace of one rank, with its nodes by `rf_id`."""

    def __init__(self, path: Path, progress: Progress | None) -> None:
        self._path = path
        data = read_all(path, progress)
        try:
            file = msgspec.json.decode(data, type=_File)
        except RecursionError:
            raise FileError(f"{path}: nested too deeply") from None
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            reason = one_line(str(error)).removeprefix("JSON is malformed: ")
            raise FileError(f"{path}: not an execution trace: {reason}") from None
        self._pid = file.pid
        seen = set()
        self._nodes: dict[int, _Node] = {}
        for node in file.nodes:
            if node.id in seen:
                raise FileError(f"{path}: node id {node.id} occurs twice ({one_line(node.name, 60)!r})")
            seen.add(node.id)
            record = node.attribute("rf_id", node.rf_id)
            if isinstance(record, int) and record > 0:
                self._nodes[record] = node

    def describe(self, trace: Trace) -> None:
        """Add the shapes that tell the bytes of gradients and collectives, if the profiler did not record these shapes.

        Raises `FileError` if the two traces are of different processes.
        """
        processes = trace.marks.processes
        if self._pid is not None and self._pid not in processes:
            raise FileError(
                f"{self._path}: a trace of process {self._pid}, but {trace.marks.path} is one of "
                f"{one_line(', '.join(map(str, sorted(processes))))} (expected the two traces of one rank)"
            )
        for columns in (trace.operator, trace.annotation):
            for row, node in self._by_row(trace, columns, -np.inf, np.inf).items():
                tells = node.name in (ACCUMULATE, COMMUNICATION) or COLLECTIVE_NAME.match(node.name)
                if tells and columns.detail(row) is None:
                    shapes, types = node.described()
                    columns.describe(row, Arguments(dims=_raw(shapes), types=_raw(types)))
        self._describe_lost(trace, trace.annotation)

    def _describe_lost(self, trace: Trace, columns: EventColumns) -> None:
        """Add the shapes of all-reduces that the execution trace lacks, as their operators give them.

        An all-reduce over gloo may be missing if it ends when the trace ends. The id of an all-reduce follows the id of
        its operator.
        """
        for row in range(len(columns.start)):
            node = self._nodes.get(int(columns.record[row]) - 1)
            if node is None or not node.name.startswith(_ALL_REDUCE) or columns.detail(row) is not None:
                continue
            shapes, types = node.described()
            if COLLECTIVE_NAME.match(trace.named(columns, row)) and shapes and types and isinstance(shapes[0], list):
                columns.describe(row, Arguments(dims=_raw(shapes[0]), types=_raw(types[:1] * len(shapes[0]))))

    def dependencies(self, step: TracedStep, notes: Notes) -> list[TracedOp]:
        """Return the step's ops with their dependencies. An op without a known operator depends on the op before."""
        interval = step.interval.start_s, step.interval.end_s
        nodes = _innermost(step, self._by_row(step.trace, step.trace.operator, *interval))
        writer: dict[int, int] = {}
        found, unknown, before = [], 0, -1
        for index in np.argsort(step.host_s, kind="stable"):
            i = int(index)
            op = step.ops[i]
            node = nodes.get(i)
            if node is None:
                unknown += 1
                found.append((i, replace(op, deps=(before,) if 0 <= before < i else ())))
            else:
                reads, writes = _storages(node)
                deps = {writer[s] for s in reads if s in writer and writer[s] < i}
                found.append((i, replace(op, deps=tuple(sorted(deps)))))
                writer.update(dict.fromkeys(writes, i))
            before = i
        if unknown == len(found):
            raise FileError(
                f"{self._path}: none of its operators ran in {step.trace.marks.path} (expected one step of one rank)"
            )
        if unknown:
            notes.lacks(
                f"the operators of {count(unknown, 'op')} in the execution trace", "such an op needs the op before it"
            )
        return [op for _, op in sorted(found, key=lambda entry: entry[0])]

    def _by_row(self, trace: Trace, columns: EventColumns, start_s: float, end_s: float) -> dict[int, _Node]:
        """Return the node of each operator or mark that begins between the two times, by its row in `columns`.

        Operators and nodes are matched by id if the profiler wrote ids. Without ids, the n-th operator of a name
        matches the n-th node of the same name, for names that occur equally often in both traces.
        """
        known = {node.name for node in self._nodes.values()}
        during = np.flatnonzero((columns.start >= start_s) & (columns.start < end_s)).tolist()
        rows = [row for row in during if trace.named(columns, row) in known]
        by_id = {
            row: node
            for row in rows
            if (node := self._nodes.get(int(columns.record[row]))) is not None
            and node.name == trace.named(columns, row)
        }
        if 2 * len(by_id) > len(rows):
            return by_id
        nodes: dict[str, list[_Node]] = {}
        for _, node in sorted(self._nodes.items()):
            nodes.setdefault(node.name, []).append(node)
        named: dict[str, list[int]] = {}
        for row in rows:
            named.setdefault(trace.named(columns, row), []).append(row)
        found: dict[int, _Node] = {}
        for name, same in named.items():
            if len(same) == len(nodes.get(name, ())):
                found.update(zip(same, nodes[name], strict=True))
        return found


def _raw(value: list[Any]) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(value))


def _innermost(step: TracedStep, nodes: dict[int, _Node]) -> dict[int, _Node]:
    """Return, for each op, the innermost known operator that was running on the launching thread, if any."""
    columns, rows, at = step.trace.operator, sorted(nodes), 0
    open_rows: dict[int, list[int]] = {}
    found = {}
    for i in np.argsort(step.host_s, kind="stable").tolist():
        while at < len(rows) and columns.start[rows[at]] <= step.host_s[i]:
            open_rows.setdefault(int(columns.thread[rows[at]]), []).append(rows[at])
            at += 1
        stack = open_rows.get(int(step.thread[i]), [])
        while stack and columns.end[stack[-1]] < step.host_s[i]:
            stack.pop()
        if stack:
            found[i] = nodes[stack[-1]]
    return found


def _storages(node: _Node) -> tuple[set[int], set[int]]:
    """Return the storages that an operator reads, and the storages that it writes."""
    inputs, outputs = _values(node.inputs), _values(node.outputs)
    reads = {s for value in inputs for s in _tensors(value)}
    writes = {s for value in outputs for s in _tensors(value)}
    schema = node.attribute("op_schema", node.op_schema)
    arguments = _arguments(schema if isinstance(schema, str) else "")
    for value, argument in zip(inputs, arguments, strict=False):
        if "!" in argument.partition(" ")[0]:
            writes |= set(_tensors(value))
    return reads, writes


def _values(side: list[Any] | _Values) -> list[Any]:
    return side.values if isinstance(side, _Values) else side


def _tensors(value: Any, depth: int = 0) -> Iterator[int]:
    """Yield the storage ids in a value: a tensor is [id, storage, offset, elements, bytes per element, device]."""
    if not isinstance(value, list) or depth > 8:
        return
    if len(value) == 6 and isinstance(value[5], str) and all(isinstance(v, int) for v in value[:5]):
        if value[1] > 0:
            yield value[1]
        return
    for child in value:
        yield from _tensors(child, depth + 1)


def _arguments(schema: str) -> list[str]:
    """Return the arguments, with types, of a schema such as `name(Tensor(a!) self, int[2] size) -> ...`."""
    depth, current, found = 0, "", list[str]()
    for c in re.sub(r"^[^(]*\(", "", schema, count=1):
        if c == ")" and depth == 0:
            break
        depth += (c in "([") - (c in ")]")
        if c == "," and depth == 0:
            found.append(current.strip())
            current = ""
        else:
            current += c
    return [*found, current.strip()] if current.strip() else found
