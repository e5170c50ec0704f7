"""Where cells run: in this process, on all cores of this machine (loky), or on a Dask or Ray cluster (joblib).

On this machine, Ctrl-C is looked for between results, at least every `_LOOK_S`; the workers never get it, and are
killed at the end. joblib would do the same with its own backend, but it hands out tasks from a callback, which cannot
be stopped together with the workers: it then prints tracebacks.

[Note: turns]
A cell may take a millisecond, as little as it takes to hand it over, or many minutes. So a task is a *turn*: several
cells, of which a worker does as many as there is time for, and returns the others. Guided self-scheduling
(Polychronopoulos and Kuck, 1987) makes turns shorter towards the end.
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
    turns: dict[Any, list[T]] = {}
    with held_back() as interrupts, ExitStack() as stack:
        pool = ProcessPoolExecutor(cores)
        stack.callback(pool.shutdown, kill_workers=True)

        def hand_out() -> None:
            with kept_from_children():
                while left and len(turns) < _HANDED_OUT * cores:
                    count = min(_MOST_IN_A_TURN, -(-len(left) // (_PARTS * cores)))
                    some = [left.popleft() for _ in range(count)]
                    turns[pool.submit(_turn, function, some)] = some
            while not all(future.running() or future.done() for future in turns):
                time.sleep(_MOMENT_S)  # a pool that is shut down before its thread has seen them prints a traceback

        try:
            hand_out()
            while turns and not interrupts:
                done, _ = wait(turns, _LOOK_S, FIRST_COMPLETED)
                for future in done:
                    some, results = turns.pop(future), future.result()
                    left.extendleft(reversed(some[len(results) :]))
                    yield from results
                hand_out()
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
