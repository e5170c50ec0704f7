"""Where cells run: in this process, on all cores of this machine (loky), or on a Dask or Ray cluster (joblib).

On this machine, Ctrl-C is looked for between results, at least every `_LOOK_S`; the workers never get it, and are
killed at the end. joblib would do the same with its own backend, but it hands out tasks from a callback, which cannot
be stopped together with the workers: it then prints tracebacks.

[Note: turns]
A worker needs a second to start, and a cell may take a millisecond. So a task is a *turn*: several cells, of which a
worker does as many as there is time for, and returns the others. Guided self-scheduling (Polychronopoulos and Kuck,
1987) makes turns shorter towards the end. This process takes turns as well, as one of the cores, and has done most
cells of a small sweep when the first worker is ready. It cannot store what workers have done, nor give them more, while
it has a turn. So after a long one it takes no other, and starts one more worker instead. Ctrl-C ends its turn at once.
"""

from __future__ import annotations

import itertools
import os
import signal
import socket
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

from legato.core.errors import InputError, LegatoError
from legato.core.interrupts import held_back, kept_from_children, raise_once

__all__ = ["check_backend", "in_parallel"]

T = TypeVar("T")
R = TypeVar("R")
_CONNECT_S = 10
#: Seconds between two looks for Ctrl-C while no cell is finished.
_LOOK_S = 0.1
#: Turns per core that workers on this machine have, running or next. loky's thread passes on one more at once.
_HANDED_OUT = 2
_MOMENT_S = 1e-3
#: Seconds after which a worker on this machine ends its turn, and returns the cells that it has not begun.
_TURN_S = 0.1
#: A turn has at most so many cells, and at most one of so many parts of each core's share of those that are left.
_MOST_IN_A_TURN, _PARTS = 200, 4
#: Seconds of a turn of this process after which it takes no further one.
_LONG_S = 1.0
#: Cells per core and round, on backends that return results only when a round is done.
_ROUND = 4


def check_backend(name: str | None) -> None:
    """Raise `InputError` unless this is None, `dask://host:port` or `ray`, and installed."""
    if name is None:
        return
    kind, _, address = name.partition("://")
    if kind not in ("dask", "ray") or (kind == "dask") != bool(address) or (kind == "dask" and ":" not in address):
        raise InputError(f"backend {name!r} (expected dask://host:port, or ray)")
    try:
        if kind == "dask":
            import distributed  # noqa: F401
        else:
            import ray.util.joblib  # type: ignore[import-not-found]  # noqa: F401
    except ImportError:
        package = "'dask[distributed]'" if kind == "dask" else "ray"
        raise InputError(f"backend {name!r} needs {kind}, which is not installed: pip install {package}") from None


def in_parallel(
    function: Callable[[T], R], items: Sequence[T], jobs: int | None = None, backend: str | None = None
) -> Generator[R, None, None]:
    """Yield `function(item)` for every item, in the order in which they finish.

    Runs on `jobs` cores (None: all) of this machine or of the cluster. Closing
    the generator stops the work. Raises `InputError` if no cluster answers, and
    `LegatoError` if a worker process was killed.
    """
    if not items:
        return
    import joblib  # only sweeps need it, and it takes long to import
    from joblib.parallel import BACKENDS, get_active_backend

    if backend is not None or not isinstance(get_active_backend()[0], BACKENDS["loky"]):
        yield from _with_joblib(function, items, jobs, backend)
    elif (cores := min(len(items), jobs or joblib.effective_n_jobs(-1))) > 1:
        yield from _on_this_machine(function, items, cores)
    else:
        yield from map(function, items)


def _on_this_machine(function: Callable[[T], R], items: Sequence[T], cores: int) -> Generator[R, None, None]:
    from joblib.externals.loky import FIRST_COMPLETED, ProcessPoolExecutor, wait
    from joblib.externals.loky.process_executor import TerminatedWorkerError

    left = deque(items)
    turns: dict[Any, tuple[Any, list[T]]] = {}  # the pool and the items of each future
    room: dict[Any, int] = {}  # how many more turns a pool may have

    def next_turn() -> list[T]:
        return [left.popleft() for _ in range(min(_MOST_IN_A_TURN, -(-len(left) // (_PARTS * cores))))]

    def ended(some: list[T], results: list[R]) -> list[R]:
        left.extendleft(reversed(some[len(results) :]))
        return results

    with held_back() as interrupts, ExitStack() as stack:

        def submit(pool: Any, some: list[T]) -> None:
            turns[pool.submit(_turn, function, some)] = pool, some

        def start(workers: int) -> None:
            """Start workers, which have empty turns at first: what they begin with is not yet theirs."""
            pool = ProcessPoolExecutor(workers)
            stack.callback(pool.shutdown, kill_workers=True)
            room[pool] = 0
            for _ in range(_HANDED_OUT * workers):
                submit(pool, [])

        def hand_out() -> None:
            for pool in room:
                while left and room[pool]:
                    submit(pool, next_turn())
                    room[pool] -= 1

        takes_part, more = True, cores - 1
        try:
            while (left or any(some for _, some in turns.values())) and not interrupts:
                with kept_from_children():
                    if more:
                        start(more)
                    hand_out()
                while not all(future.running() or future.done() for future in turns):
                    time.sleep(_MOMENT_S)  # a pool that is shut down before its thread has seen them prints a traceback
                mine, begin_s = next_turn() if takes_part else [], time.monotonic()
                results = interrupts.cut_short(_turn, function, mine) or []
                more = int(takes_part and time.monotonic() - begin_s > _LONG_S)
                takes_part = takes_part and not more
                yield from ended(mine, results)
                done, _ = wait(turns, 0 if mine else _LOOK_S, FIRST_COMPLETED)
                for future in done:
                    pool, some = turns.pop(future)
                    room[pool] += 1
                    yield from ended(some, future.result())
        except TerminatedWorkerError:
            raise LegatoError("a worker process was killed, perhaps because memory ran out: try fewer --jobs") from None


def _turn(function: Callable[[T], R], items: Sequence[T]) -> list[R]:
    """The results of the first of the items: at least one, and as many as there is time for."""
    results, end_s = [], time.monotonic() + _TURN_S
    for item in items:
        results.append(function(item))
        if time.monotonic() >= end_s:
            break
    return results


def _with_joblib(
    function: Callable[[T], R], items: Sequence[T], jobs: int | None, backend: str | None
) -> Generator[R, None, None]:
    """On the backend, or on the one that the caller has chosen in joblib."""
    import joblib

    with _one_interrupt(), _joblib_backend(backend) as active:
        cores = min(len(items), jobs or active.effective_n_jobs(-1))
        calls = (joblib.delayed(function)(item) for item in items)
        if active.supports_return_generator:
            pool = joblib.Parallel(n_jobs=cores, return_as="generator_unordered", batch_size=1, pre_dispatch="2*n_jobs")
            with ExitStack() as stack:
                with held_back():
                    results = stack.enter_context(_closing_quietly(pool(calls)))
                for result in results:  # noqa: UP028 - `yield from` would close them with the warning
                    yield result
        else:
            with joblib.Parallel(n_jobs=cores, batch_size=1) as pool:
                while some := list(itertools.islice(calls, cores * _ROUND)):
                    yield from pool(some)


@contextmanager
def _closing_quietly(results: Generator[R, None, None]) -> Iterator[Generator[R, None, None]]:
    """Close `results` at the end, without joblib's warning about unfinished work."""
    try:
        yield results
    finally:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            results.close()


@contextmanager
def _one_interrupt() -> Iterator[None]:
    """Let the first Ctrl-C inside the block raise `KeyboardInterrupt`, and ignore further ones until the block ends.

    A second one would interrupt joblib while it ends the worker processes, and the program would then hang at exit.
    A handler other than Python's default one stays in place.
    """
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, raise_once)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def _joblib_backend(name: str | None) -> Iterator[Any]:
    """Let joblib use the backend, and yield joblib's object for it."""
    import joblib
    from joblib.parallel import get_active_backend

    check_backend(name)
    if name is None:
        yield get_active_backend()[0]
    elif name == "ray":
        with _ray(), joblib.parallel_config(backend="ray"):
            yield get_active_backend()[0]
    else:
        with _dask_client(name) as client, joblib.parallel_config(backend="dask", client=client):
            yield get_active_backend()[0]


@contextmanager
def _dask_client(name: str) -> Iterator[object]:
    import distributed

    connect: Any = distributed.Client

    try:
        client = connect(name.replace("dask://", "tcp://"), timeout=_CONNECT_S, set_as_default=False)
    except (OSError, ValueError) as error:
        raise InputError(f"backend {name!r}: no Dask scheduler answers ({type(error).__name__})") from None
    with client:
        if not client.ncores():
            raise InputError(f"backend {name!r}: the Dask cluster has no workers")
        yield client


@contextmanager
def _ray() -> Iterator[None]:
    """Connect to the Ray cluster at RAY_ADDRESS, or start one on this machine."""
    import ray
    from ray.util.joblib import register_ray

    register_ray()
    if ray.is_initialized():
        yield
        return
    address = os.environ.get("RAY_ADDRESS")
    host, _, port = (address or "").removeprefix("ray://").rpartition(":")
    try:
        if host:  # Ray itself would try for minutes
            if int(port) > 65535:  # the resolver would take it modulo 65536, where something else may listen
                raise ValueError(port)
            socket.create_connection((host, int(port)), _CONNECT_S).close()
        ray.init(log_to_driver=False, logging_level="ERROR", include_dashboard=False)
    except (OSError, OverflowError, RuntimeError, ValueError) as error:
        where = f"answers at RAY_ADDRESS={address}" if address else "starts"
        raise InputError(f"backend 'ray': no cluster {where} ({type(error).__name__})") from None
    try:
        yield
    finally:
        ray.shutdown()
