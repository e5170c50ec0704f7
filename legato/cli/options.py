"""Options that several commands share, with the same name, default and help. `axes.py` has the network's options."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import inspect
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, TypeVar, get_args, get_type_hints

import typer

from legato.collectives import COLLECTIVES
from legato.core import code
from legato.core.errors import FileError, InputError, LegatoError, missing_extra
from legato.core.text import count

if TYPE_CHECKING:
    from legato.simulator.flow.fabrics.protocol import Fabric

__all__ = [
    "FABRIC_HELP",
    "PAGES",
    "SCHEDULER_HELP",
    "TRANSFER_HELP",
    "ClusterFile",
    "Collective",
    "Compute",
    "Fidelity",
    "Group",
    "Interrupted",
    "Iterations",
    "Json",
    "MachineName",
    "Options",
    "PlanOutput",
    "PlanTimeline",
    "Shard",
    "ShardAll",
    "TimelineOutput",
    "Wire",
    "check_file",
    "check_installed",
    "fabric_of",
    "in_flight_words",
    "keep_apart",
    "make_folder",
    "make_timelines",
    "quantity",
    "scheduler_of",
    "setting",
    "split",
    "taken_by",
    "timeline_paths",
    "with_options",
]

Value = TypeVar("Value")

SCHEDULER_HELP = "Schedulers, separated by commas: names, or FILE.py:FUNCTION for your own; or all."
TRANSFER_HELP = (
    "Count a kernel as this collective if the regular expression PATTERN matches the name of the kernel, or of the "
    "operator or annotation that launches it (example: my_sum=all-reduce); may be repeated"
)
FABRIC_HELP = "Fabrics, separated by commas: names, or FILE.py:CLASS for your own; or all."

Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON on standard output.")]
ClusterFile = Annotated[
    Path | None,
    typer.Option(
        "--cluster",
        metavar="C.json",
        help="A cluster file from legato calibrate, instead of --workers, --bandwidth, --latency and so on.",
        rich_help_panel="Network",
    ),
]
MachineName = Annotated[
    str | None,
    typer.Option(
        "--machine",
        "--device",
        metavar="NAME|FILE",
        help="Machine with GPUs, hosts and links: a name, such as h100 or b200, or a file from legato fit-machine. "
        "Other options override its values.",
        rich_help_panel="Network",
    ),
]
Collective = Annotated[
    str | None,
    typer.Option(
        help=f"Collective that sends the messages: {', '.join(COLLECTIVES)}, or one in the cluster file.",
        show_default="the cluster's first",
        rich_help_panel="Network",
    ),
]
Compute = Annotated[
    Literal["one", "unlimited"],
    typer.Option(help="Number of streams on which a worker computes; the PACE paper assumes unlimited streams."),
]
_SHARD_HELP = (
    "What to shard across the workers: nothing, the optimizer's states (ZeRO-1), or the gradients as well (ZeRO-2)"
)
Shard = Annotated[Literal["none", "optimizer", "gradients"], typer.Option(help=f"{_SHARD_HELP}.")]
ShardAll = Annotated[
    Literal["none", "optimizer", "gradients", "parameters"],
    typer.Option("--shard", help=f"{_SHARD_HELP}, or the parameters as well (FSDP2)."),
]
Wire = Annotated[
    Literal["none", "bf16", "fp16"],
    typer.Option(help="Round float32 gradients to two bytes for sending, as torch's compression hooks do."),
]
Fidelity = Annotated[
    Literal["formulas", "transfers", "flows"] | None,
    typer.Option(
        help="Detail of the simulation: transfers on every link (flows for whole jobs), or formulas for the time of "
        "each message or collective, as planners use them.",
        metavar="NAME",
        show_default="transfers; flows",
    ),
]
Iterations = Annotated[
    int | None,
    typer.Option(
        help="Number of iterations to simulate.",
        show_default="1; 3 if they differ; with --share 30, or 3 for whole jobs",
    ),
]
TimelineOutput = Annotated[
    Path | None,
    typer.Option(
        "--output",
        "-o",
        metavar="T.json",
        help="Write the timeline of the fastest fabric to this file; with --share, the timelines of the jobs to this "
        "folder.",
    ),
]

PlanOutput = Annotated[
    Path | None, typer.Option("--output", "-o", metavar="P.json", help="Write the best plan to this file.")
]
PlanTimeline = Annotated[
    Path | None,
    typer.Option(
        "--timeline", metavar="T.json", help="Write the predicted timelines of the best plan and of DDP to this file."
    ),
]


def setting(default: Any, help: str, *flags: str, **more: Any) -> Any:
    """Return a dataclass's field for one option; the help, the flags and `more` are passed on to `typer.Option`."""
    return dataclasses.field(default=default, metadata={"help": help, "flags": flags, **more})


class Group(NamedTuple):
    """Options that a command receives as one parameter; `make` builds its value from the options that were typed."""

    options: Sequence[inspect.Parameter]
    make: Callable[..., Any]

    @classmethod
    def of(cls, annotation: Any) -> Group | None:
        """Return the group of a parameter if its type is a dataclass or is annotated with a group, and otherwise None.

        A dataclass may have a `PANEL`: the title above its options in the help.
        """
        if dataclasses.is_dataclass(annotation) and isinstance(annotation, type):
            types = get_type_hints(annotation, include_extras=True)
            panel = {"rich_help_panel": annotation.PANEL} if hasattr(annotation, "PANEL") else {}
            options = []
            for one in dataclasses.fields(annotation):
                kind = types[one.name]
                if one.metadata:
                    more = panel | dict(one.metadata)
                    kind = Annotated[kind, typer.Option(*more.pop("flags"), **more)]
                options.append(
                    inspect.Parameter(one.name, inspect.Parameter.KEYWORD_ONLY, default=one.default, annotation=kind)
                )
            return cls(options, annotation)
        return next((one for one in get_args(annotation) if isinstance(one, cls)), None)


@dataclasses.dataclass(frozen=True)
class Options:
    """The values, by name, of the options that the user typed for a command that takes several kinds of input."""

    typed: dict[str, Any]

    def has(self, group: type) -> bool:
        """Return whether an option of this group was typed."""
        return any(one.name in self.typed for one in dataclasses.fields(group))

    def run(self, face: Callable[..., None], *nouns: Any, wrong: str) -> None:
        """Call `face`, the command's function for one kind of input, with the options that the user typed.

        Raises `InputError`, with `wrong` at the end of its message, if the user typed an option that `face` does not
        have.
        """
        _, groups = _read(face)
        takes = {one.name for group in groups.values() for one in group.options}
        if unused := [name for name in self.typed if name not in takes]:
            raise InputError(f"--{unused[0].replace('_', '-')}: {wrong}")
        face(*nouns, **_made(groups, self.typed))


def taken_by(*faces: Callable[..., None]) -> Group:
    """Return a group of all options of `faces`, one function for each kind of input; its value is an `Options`."""
    every = (one for face in faces for group in _read(face)[1].values() for one in group.options)
    return Group(list({one.name: one for one in every}.values()), lambda **typed: Options(typed))


def _read(function: Callable[..., None]) -> tuple[inspect.Signature, dict[str, Group]]:
    """Return a function's signature, and a group of options for each parameter except the positional-only inputs."""
    signature = inspect.signature(function, eval_str=True)
    groups = {}
    for name, one in signature.parameters.items():
        if one.kind is not one.POSITIONAL_ONLY:
            alone = Group([one.replace(kind=one.KEYWORD_ONLY)], functools.partial(_itself, name, one.default))
            groups[name] = Group.of(one.annotation) or alone
    return signature, groups


def _itself(name: str, default: Any, /, **typed: Any) -> Any:
    return typed.get(name, default)


def _made(groups: dict[str, Group], typed: dict[str, Any]) -> dict[str, Any]:
    """Return the value of each group of options, with defaults for options that were not typed."""
    return {
        name: group.make(**{one.name: typed[one.name] for one in group.options if one.name in typed})
        for name, group in groups.items()
    }


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """Return the command as typer needs it: each option of a group becomes a parameter of the command."""
    signature, groups = _read(command)
    parameters = [one for group in groups.values() for one in group.options]

    @functools.wraps(command)
    def run(_context: typer.Context, **given: Any) -> None:
        sources = {name: _context.get_parameter_source(name) for name in given}
        typed = {name: given[name] for name, source in sources.items() if source and source.name != "DEFAULT"}
        command(**_made(groups, typed))

    context = inspect.Parameter("_context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)
    run.__annotations__ = {one.name: one.annotation for one in (context, *parameters)}
    run.__signature__ = signature.replace(  # pyrefly: ignore[missing-attribute]
        parameters=[context, *parameters]
    )
    return run


def in_flight_words(fabrics: Iterable[Fabric]) -> list[str]:
    """Return a phrase that says how many messages can be in flight, or no phrase if every fabric has servers."""
    for fabric in fabrics:
        if not fabric.servers:
            number = fabric.in_flight
            return ["any number of messages in flight" if number is None else f"{count(number, 'message')} in flight"]
    return []


class Interrupted(LegatoError):
    """Raised when Ctrl-C has ended a command; the message says which results are kept."""


def quantity(option: str, text: str, parse: Callable[[str], Value]) -> Value:
    """Parse the text of an option and return its value. Raises `InputError`, which names the option."""
    try:
        return parse(text)
    except InputError as error:
        raise InputError(f"--{option}: {error}") from None


def split(text: str) -> list[str]:
    """Split a list such as `a, b` at its commas."""
    return [name.strip() for name in text.split(",")]


def scheduler_of(text: str) -> Any:
    """Return the name of a scheduler unchanged, or the function FUNCTION for FILE.py:FUNCTION."""
    return code.guarded(code.own(text), text) if ":" in text else text


def fabric_of(text: str) -> Any:
    """Return the name of a fabric unchanged, or an instance of CLASS for FILE.py:CLASS."""
    from legato.simulator.flow.fabrics import made

    return made(code.own(text), text) if ":" in text else text


def one_each(option: str, text: str | None, jobs: int, parse: Callable[[str], Value], default: Value) -> list[Value]:
    """Return one value per job from `text`, which has one value for all jobs, or one for each.

    Raises `InputError` on any other number of values.
    """
    if text is None:
        return [default] * jobs
    parts = split(text)
    if len(parts) not in (1, jobs):
        expected = "one for all, or one each" if jobs > 1 else "one"
        raise InputError(f"--{option}: {count(len(parts), 'value')} for {count(jobs, 'job')} (expected {expected})")
    values = [quantity(option, value, parse) for value in parts]
    return values * jobs if len(values) == 1 else values


def whole(text: str) -> int:
    """Parse a whole number. Raises `InputError`."""
    try:
        return int(text)
    except ValueError:
        raise InputError(f"{text!r} is not a whole number") from None


def keep_apart(reads: Iterable[Path], **writes: Path | None) -> None:
    """Raise `InputError` if a file in `writes` would overwrite an input file or the file of another option."""
    taken = {path.resolve(): "an input file" for path in reads}
    for option, path in writes.items():
        if path is not None:
            if other := taken.get(path.resolve()):
                raise InputError(f"--{option} {path}: would overwrite {other}")
            taken[path.resolve()] = f"the file of --{option}"


#: The libraries that files with these suffixes need, and the extras that install the libraries.
_LIBRARIES = {
    ".html": (("plotly", "report"), ("jinja2", "report")),
    ".parquet": (("pyarrow", "parquet"),),
    ".svg": (("plotly", "figures"), ("kaleido", "figures")),
    ".pdf": (("plotly", "figures"), ("kaleido", "figures")),
}
#: The suffixes that are allowed where `.html` is: a page, or only its figures.
PAGES = (".html", ".svg", ".pdf")


def check_file(option: str, path: Path | None, *suffixes: str) -> None:
    """Raise `InputError` before a long computation if its result could not be written to this option's file."""
    if path is None:
        return
    suffixes = tuple(dict.fromkeys((*suffixes, *(PAGES if ".html" in suffixes else ()))))
    if path.suffix not in suffixes:
        raise InputError(f"--{option} {path}: {path.suffix or 'no suffix'} (expected {', '.join(suffixes)})")
    if path.is_dir():
        raise InputError(f"--{option} {path}: a directory (expected a file)")
    if not path.absolute().parent.is_dir():
        raise InputError(f"--{option} {path}: no such directory (expected an existing one)")
    for library, extra in _LIBRARIES.get(path.suffix, ()):
        check_installed(library, extra, f"{path}")


def make_timelines(folder: Path | None, jobs: int, reads: Iterable[Path]) -> None:
    """Make the folder for jobs' timelines before a long computation. Raises what `keep_apart`, `make_folder` raise."""
    if folder is not None:
        for path in timeline_paths(folder, jobs):
            keep_apart(reads, output=path)
        make_folder(folder)


def make_folder(path: Path) -> None:
    """Make an option's folder before a long computation. Raises `FileError`."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FileError(f"{path}: {error.strerror} (expected a folder, or a path where one can be made)") from None


def timeline_paths(folder: Path, jobs: int) -> list[Path]:
    """Return the paths in the folder for the timelines of this number of jobs."""
    return [folder / f"job-{number}.json" for number in range(1, jobs + 1)]


def check_installed(library: str, extra: str, purpose: str) -> None:
    """Raise `InputError` before a long computation if its result needs a library that is not installed."""
    try:
        found = importlib.util.find_spec(library)
    except ValueError:  # a module without a spec
        found = None
    if found is None:
        raise missing_extra(library, extra, purpose)
