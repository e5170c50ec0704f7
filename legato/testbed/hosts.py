"""Hosts on one machine: Linux network namespaces, connected by links of a chosen bandwidth.

    host 0 (eth0) ---- (port0)              (port1) ---- (eth0) host 1
                              switch: bridge
    host 2 (eth0) ---- (port2)              (port3) ---- (eth0) host 3

Every host is a namespace, and so is the switch. Nothing is added to the
machine's own network: no interface, no address, no route. `tc` (`tbf`) shapes
both ends of each link: the host's eth0 shapes what the host sends, and the
switch's port what the host receives. A link is therefore full duplex, and
several senders to one host share that host's link.

[Note: burst] A token bucket lets a burst pass unshaped. If the bucket is too
large, small messages take no time; if it is too small, the timer refills it too
late for the rate. TCP passes down segments of up to 64 KiB, which tbf has to
split if they do not fit into the bucket, and a segment costs the CPU the same
at any size. Segments are therefore half a millisecond long, up to 64 KiB, and a
bucket holds two of them, or one millisecond: 125 KB at 1 Gbit. On two cores,
this carries 95.6% of 1, 2 and 5 Gbit as payload (headers leave 95.6%), and 95,
93 and 90% with both cores busy. Segments of an eighth of a millisecond then
carry 94, 91 and 84%, and need ten times the time in soft interrupts (3.7 s
instead of 0.3 s in a run of 9 s) when four hosts send at once.

[Note: TCP] Congestion control is cubic, Linux's default, whatever the machine's
setting is. Machines of some clouds use BBR, which paces its sends by its own
estimate of the link's rate, and from time to time sends almost nothing to
measure the delay. Congestion control is set on the route to the other hosts,
because a namespace can select only what the machine allows.

[Note: cleanup] A namespace's name has the process id and the start time of its
owner. Leaving the context removes everything, after success, an error, Ctrl-C
or SIGTERM. An owner that was killed with SIGKILL leaves its namespaces behind;
the next `Hosts` sees that the owner is gone, and removes them.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from legato.core.errors import InputError

__all__ = ["Hosts", "remove_stale", "why_unavailable"]

_NETNS = Path("/var/run/netns")
_NAME = re.compile(r"legato-(?P<pid>\d+)-(?P<start>\d+)-[0-9a-f]{8}-(?:\d+|switch)")
_SEGMENT_S = 500e-6
_SEGMENT_BYTES = (4096, 65536)
_BUCKET = 2  # segments
_QUEUE = "50ms"
_CONGESTION_CONTROLS = Path("/proc/sys/net/ipv4/tcp_available_congestion_control")
_PATIENCE_S = 3.0


class Hosts:
    """`count` hosts, each with a full-duplex link of `bandwidth_bps` (bits per second) to one switch.

    A context manager: it creates the hosts on entry, and on exit removes them
    with all processes that still run in them. Raises `InputError` if this
    machine cannot have them.

        with Hosts(4, 1e9) as hosts:
            server = hosts.popen(0, ["iperf3", "-s"])
            client = hosts.popen(1, ["iperf3", "-c", hosts.address(0)])
    """

    #: The name of every host's only interface besides loopback.
    interface = "eth0"

    def __init__(self, count: int, bandwidth_bps: float) -> None:
        if not 1 <= count <= 250:
            raise InputError(f"workers: {count} (expected 1 to 250, each in a host of its own)")
        if not (math.isfinite(bandwidth_bps) and bandwidth_bps >= 1e6):
            raise InputError(f"links of {bandwidth_bps:g} bit/s (expected at least 1Mbit)")
        self.count = count
        self.bandwidth_bps = bandwidth_bps
        self._names: list[str] = []
        self._processes: list[subprocess.Popen[Any]] = []

    def address(self, i: int) -> str:
        """Return the IPv4 address of host i, which only the other hosts can reach."""
        return f"10.77.0.{range(1, self.count + 1)[i]}"

    def popen(self, i: int, arguments: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Start a process inside host i, with the `options` of `subprocess.Popen`; its pid is that of the program."""
        process = subprocess.Popen(["ip", "netns", "exec", self._names[range(self.count)[i]], *arguments], **options)
        self._processes.append(process)
        return process

    def __enter__(self) -> Hosts:
        for program in ("ip", "tc"):
            if shutil.which(program) is None:
                raise InputError(f"shaped hosts need Linux and its `{program}` on PATH (install iproute2)")
        remove_stale()
        pid = os.getpid()
        prefix = f"legato-{pid}-{_start_time(pid)}-{secrets.token_hex(4)}"
        self._names = [*(f"{prefix}-{i}" for i in range(self.count)), f"{prefix}-switch"]
        main = threading.current_thread() is threading.main_thread()
        self._handles = main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        if self._handles:
            signal.signal(signal.SIGTERM, _end)
        try:
            self._make()
        except BaseException:
            self._leave()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._leave()

    def _leave(self) -> None:
        try:
            self._remove()
        finally:
            if self._handles and signal.getsignal(signal.SIGTERM) is _end:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def _make(self) -> None:
        *hosts, switch = self._names
        _tool("ip", "-batch", "-", lines=[f"netns add {name}" for name in self._names])
        links = ["link add name bridge0 type bridge", "link set bridge0 up"]
        for i, host in enumerate(hosts):
            links += [
                f"link add name port{i} type veth peer name {self.interface} netns {host}",
                f"link set port{i} master bridge0 up",
            ]
        _tool("ip", "-n", switch, "-batch", "-", lines=links)
        segment = int(min(max(_SEGMENT_S * self.bandwidth_bps / 8, _SEGMENT_BYTES[0]), _SEGMENT_BYTES[1]))
        burst = int(_BUCKET * max(_SEGMENT_S * self.bandwidth_bps / 8, segment))
        shape = f"root tbf rate {self.bandwidth_bps:.0f}bit burst {burst}b latency {_QUEUE}"
        control = "cubic" if "cubic" in _CONGESTION_CONTROLS.read_text().split() else "reno"  # every kernel has that
        for i, host in enumerate(hosts):
            setup = [
                "link set lo up",
                f"address add {self.address(i)}/24 dev {self.interface}",
                f"link set {self.interface} gso_max_size {segment} up",
                f"route replace 10.77.0.0/24 dev {self.interface} src {self.address(i)} congctl {control}",
            ]
            _tool("ip", "-n", host, "-batch", "-", lines=setup)
            _tool("tc", "-n", host, "-batch", "-", lines=[f"qdisc add dev {self.interface} {shape}"])
        _tool("tc", "-n", switch, "-batch", "-", lines=[f"qdisc add dev port{i} {shape}" for i in range(self.count)])

    def _remove(self) -> None:
        for process in self._processes:  # a process that was just started may not be inside its host yet
            process.terminate()
        _remove(self._names, self._processes)
        for process in self._processes:
            process.kill()
            process.wait()
        self._names, self._processes = [], []


def _end(number: int, _: FrameType | None) -> None:
    """On SIGTERM, which `timeout` and job schedulers send, exit through all cleanup code.

    A second SIGTERM is ignored: if a process group gets the signal, `timeout` sends it again.
    """
    signal.signal(number, signal.SIG_IGN)
    sys.exit(128 + number)


def why_unavailable() -> str:
    """Return one sentence on why this machine cannot have shaped hosts, or "" if it can; creates two to find out."""
    try:
        with Hosts(2, 1e9) as hosts:
            hosts.popen(0, ["true"]).wait()
    except InputError as error:
        return str(error)
    return ""


def remove_stale() -> list[str]:
    """Remove the namespaces whose owners are gone, with all processes in them; returns their names.

    Namespaces that this module did not create, or whose owner is alive, are not touched.
    """
    stale = []
    for name in os.listdir(_NETNS) if _NETNS.is_dir() else []:
        made = _NAME.fullmatch(name)
        if made and _start_time(int(made["pid"])) != int(made["start"]):
            stale.append(name)
    _remove(stale)
    return stale


def _start_time(pid: int) -> int | None:
    """Return when a process started, in clock ticks since boot; None if it does not exist or is a zombie."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if state in "ZX" else int(fields[18])


def _tool(*command: str, lines: Sequence[str]) -> None:
    """Run `ip` or `tc` on a list of commands, in its own process group so that Ctrl-C does not interrupt it."""
    done = subprocess.run(
        command, input="\n".join(lines) + "\n", capture_output=True, text=True, process_group=0, check=False
    )
    if done.returncode != 0:
        problem = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[0]
        raise InputError(
            f"shaped hosts need root, and Linux with network namespaces, veth, bridge and tbf ({command[0]}: {problem})"
        )


def _remove(names: Sequence[str], own: Sequence[subprocess.Popen[Any]] = ()) -> None:
    """End all processes in these namespaces, and delete the namespaces."""
    for how in (signal.SIGTERM, signal.SIGKILL):
        _signal_all(names, how)
        deadline = time.monotonic() + _PATIENCE_S
        while _running(names, own) and time.monotonic() < deadline:
            time.sleep(0.02)
    for name in names:
        if (_NETNS / name).exists():  # ip may not have created it, or another process may have removed it
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, process_group=0, check=False)


def _running(names: Sequence[str], own: Sequence[subprocess.Popen[Any]]) -> bool:
    return any(process.poll() is None for process in own) or any(_inside(names))


def _inside(names: Sequence[str]) -> Iterator[int]:
    """Yield the ids of the processes in these namespaces."""
    spaces = {key for name in names if (key := _key(_NETNS / name))} - {_key(Path("/proc/self/ns/net"))}
    if spaces:
        yield from (int(pid) for pid in os.listdir("/proc") if pid.isdigit() and _is_in(int(pid), spaces))


def _signal_all(names: Sequence[str], how: signal.Signals) -> None:
    spaces = {key for name in names if (key := _key(_NETNS / name))}
    for pid in _inside(names):
        with contextlib.suppress(ProcessLookupError):
            handle = os.pidfd_open(pid)  # unlike an id, it cannot pass to another process
            try:
                if _is_in(pid, spaces):
                    signal.pidfd_send_signal(handle, how)
            finally:
                os.close(handle)


def _is_in(pid: int, spaces: Collection[tuple[int, int] | None]) -> bool:
    return _key(Path(f"/proc/{pid}/ns/net")) in spaces


def _key(path: Path) -> tuple[int, int] | None:
    """Return what identifies a network namespace."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino
