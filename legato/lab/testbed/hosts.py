"""Create hosts on one machine: Linux network namespaces, connected by links of a chosen bandwidth.

    host 0 (eth0) ---- (port0)              (port1) ---- (eth0) host 1
                              switch: bridge
    host 2 (eth0) ---- (port2)              (port3) ---- (eth0) host 3

Every host is a namespace, and the switch is another namespace. Nothing is added to
the machine's own network: no interface, no address, no route. `tc` (`tbf`) shapes
both ends of each link: the host's eth0 shapes what the host sends, and the
switch's port shapes what the host receives. A link is therefore full duplex, and
several senders to one host share that host's link.

[Note: users] A user who may not create network namespaces can nearly always create a user namespace first, and is root
inside it. Only the processes that `Hosts` starts enter the user namespace; the caller does not. A process inside has
user id 0, but outside it has only the caller's rights: its files belong to the caller. Nothing is mounted, because
containers forbid mounting, so processes see the same files as outside: /proc and /sys show the machine's processes and
interfaces.

[Note: burst] A token bucket lets a burst pass unshaped. If the bucket is too large, small messages take no time. If the
bucket is too small, the timer refills it too late, and the link is slower than it should be. TCP passes down segments
of up to 64 KiB, which tbf has to split if they do not fit into the bucket. A segment costs the same CPU time at any
size, so large segments are better. Sending a segment therefore takes half a millisecond (at most 64 KiB), and a bucket
holds two segments: 125 KB at 1 Gbit. On two cores, links of 1, 2 and 5 Gbit then carry 95.6% as payload; the rest is
headers. With both cores busy, the links carry 95, 93 and 90%. With segments of an eighth of a millisecond, they would
carry 94, 91 and 84%, and need ten times as long in soft interrupts (3.7 s instead of 0.3 s in a run of 9 s) when four
hosts send at once.

[Note: TCP] Congestion control is cubic, Linux's default, whatever the machine's setting is. Machines of some clouds use
BBR, which paces its sends by its own estimate of the link's rate, and from time to time sends almost nothing to measure
the delay. Congestion control is set on the route to the other hosts, because a namespace's own setting can select only
the algorithms that the machine allows.

[Note: cleanup] The namespaces have no names, so each ends with its last process. In each namespace, a process waits
until its standard input, a pipe from the owner, ends. All programs run in a process namespace, of which the switch's
waiting process is process 1, so the kernel ends all programs when this process ends. Leaving the context closes the
pipes; if the owner is killed, the kernel closes them.
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from legato.core.errors import InputError

__all__ = ["Hosts", "why_unavailable"]

_SEGMENT_S = 500e-6
_SEGMENT_BYTES = (4096, 65536)
_BUCKET = 2  # segments
_QUEUE = "50ms"
_SETTINGS = Path("/proc/sys")
_PATIENCE_S = 10.0
_PROGRAMS = {
    "ip": "iproute2",
    "tc": "iproute2",
    "nsenter": "util-linux",
    "setpriv": "util-linux",
    "unshare": "util-linux",
}
#: Folders with programs for administrators, which are not on the PATH of all users.
_SBIN = ("/usr/local/sbin", "/usr/sbin", "/sbin")
_USER_NAMESPACE = ("--user", "--map-root-user")
#: CAP_NET_ADMIN and CAP_SYS_ADMIN.
_CAPABILITIES = 1 << 12 | 1 << 21
#: The errors of Linux when namespaces are forbidden, or when there are already as many as allowed.
_DENIALS = ("Operation not permitted", "Permission denied", "No space left on device")
#: Settings that can forbid namespaces: (name, value that forbids namespaces, value that allows namespaces).
_OBSTACLES = (
    ("kernel.unprivileged_userns_clone", "0", "1"),
    ("kernel.apparmor_restrict_unprivileged_userns", "1", "0"),
    ("user.max_user_namespaces", "0", "1000"),
    ("user.max_net_namespaces", "0", "1000"),
    ("user.max_pid_namespaces", "0", "1000"),
)


class Hosts:
    """`count` hosts, each with a full-duplex link of `bandwidth_bps` (bits per second) to one switch.

    This is a context manager. The context creates the hosts on entry; on exit, it removes them and ends all processes
    that still run in them. Raises `InputError` if hosts cannot be created on this machine.

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
        self._holders: list[subprocess.Popen[str]] = []  # of the namespaces of the switch and of every host
        self._processes: list[subprocess.Popen[Any]] = []

    def address(self, i: int) -> str:
        """Return the IPv4 address of host i. Only the other hosts can reach this address."""
        return f"10.77.0.{range(1, self.count + 1)[i]}"

    def popen(self, i: int, arguments: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Start a program inside host i, with the `options` of `subprocess.Popen`.

        The returned process waits for the program and has the same exit status. Killing the returned process also kills
        the program. Ctrl-C does not reach it.
        """
        spaces = f"--pid=/proc/{self._holders[0].pid}/ns/pid_for_children"
        command = [*self._inside(range(self.count)[i] + 1), spaces, "setpriv", "--pdeathsig", "KILL", *arguments]
        options = {"process_group": 0} | options
        process: subprocess.Popen[Any] = subprocess.Popen(command, **options)  # pyrefly: ignore[no-matching-overload]
        self._processes.append(process)
        return process

    def __enter__(self) -> Hosts:
        for program, package in _PROGRAMS.items():
            if shutil.which(program, path=_environment()["PATH"]) is None:
                raise InputError(f"shaped hosts need Linux and its `{program}` on PATH (install {package})")
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
        self._user = () if _is_capable() else _USER_NAMESPACE
        self._hold("unshare", *self._user, "--net", "--pid", "--fork", "--kill-child")
        hosts = range(1, self.count + 1)
        for _ in hosts:
            self._hold(*self._inside(0), "unshare", "--net")
        links = ["link add name bridge0 type bridge", "link set bridge0 up"]
        for i in hosts:
            links += [
                f"link add name port{i} type veth peer name {self.interface} netns {self._holders[i].pid}",
                f"link set port{i} master bridge0 up",
            ]
        self._tool(0, "ip", links)
        segment = int(min(max(_SEGMENT_S * self.bandwidth_bps / 8, _SEGMENT_BYTES[0]), _SEGMENT_BYTES[1]))
        burst = int(_BUCKET * max(_SEGMENT_S * self.bandwidth_bps / 8, segment))
        shape = f"root tbf rate {self.bandwidth_bps:.0f}bit burst {burst}b latency {_QUEUE}"
        known = Path("/proc/sys/net/ipv4/tcp_available_congestion_control").read_text().split()
        control = "cubic" if "cubic" in known else "reno"  # every kernel has reno
        for i in hosts:
            address = self.address(i - 1)
            setup = [
                "link set lo up",
                f"address add {address}/24 dev {self.interface}",
                f"link set {self.interface} gso_max_size {segment} up",
                f"route replace 10.77.0.0/24 dev {self.interface} src {address} congctl {control}",
            ]
            self._tool(i, "ip", setup)
            self._tool(i, "tc", [f"qdisc add dev {self.interface} {shape}"])
        self._tool(0, "tc", [f"qdisc add dev port{i} {shape}" for i in hosts])

    def _inside(self, k: int) -> list[str]:
        """Return the first words of a command that runs in the network of the switch (if k is 0) or of host k - 1."""
        user = [f"--user=/proc/{self._holders[0].pid}/ns/user"] if self._user else []
        return ["nsenter", "--preserve-credentials", *user, f"--net=/proc/{self._holders[k].pid}/ns/net"]

    def _hold(self, *command: str) -> None:
        """Start a process that waits in the namespaces that this command creates, until its standard input ends."""
        process = subprocess.Popen(
            [*command, "sh", "-c", "echo && exec cat"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=_environment(),
            process_group=0,  # Ctrl-C does not reach it
        )
        self._holders.append(process)
        assert process.stdout is not None
        if not process.stdout.readline():
            raise self._refusal("unshare", process.communicate()[1])

    def _tool(self, k: int, program: str, lines: Sequence[str]) -> None:
        """Run a list of commands of `ip` or `tc` in the network of the switch (if k is 0) or of host k - 1."""
        done = subprocess.run(
            [*self._inside(k), program, "-batch", "-"],
            input="\n".join(lines) + "\n",
            capture_output=True,
            text=True,
            env=_environment(),
            process_group=0,
            check=False,
        )
        if done.returncode != 0:
            raise self._refusal(program, done.stderr)

    def _refusal(self, program: str, said: str) -> InputError:
        """Return an error that says why hosts cannot be created on this machine, and what to do."""
        problem = (said.strip().splitlines() or ["no reason given"])[0].removeprefix(f"{program}: ")
        need = "shaped hosts need Linux with network namespaces, veth, bridge and tbf"
        if any(denial in problem for denial in _DENIALS):
            need = f"shaped hosts need root, or user namespaces{_obstacle()}"
        return InputError(f"{need} ({program}: {problem})")

    def _remove(self) -> None:
        for holder in self._holders:  # the first is the switch's, whose end ends all processes
            with contextlib.suppress(subprocess.TimeoutExpired):  # ending takes longer if nobody reaps a dead process
                holder.communicate(timeout=_PATIENCE_S)
        for process in self._processes:
            process.wait()
        self._holders, self._processes = [], []


def _end(number: int, _: FrameType | None) -> None:
    """Exit through all cleanup code on SIGTERM, which `timeout` and job schedulers send.

    A second SIGTERM is ignored, because `timeout` sends the signal to its child and again to the process group.
    """
    signal.signal(number, signal.SIG_IGN)
    sys.exit(128 + number)


def why_unavailable() -> str:
    """Create two shaped hosts, and return a sentence that says why that failed, or "" if it worked."""
    try:
        with Hosts(2, 1e9) as hosts:
            hosts.popen(0, ["true"]).wait()
    except InputError as error:
        return str(error)
    return ""


def _environment() -> dict[str, str]:
    """Return environment variables with which the tools `ip` and `tc` are found, and print English."""
    path = os.pathsep.join([os.environ.get("PATH", os.defpath), *_SBIN])
    return {**os.environ, "PATH": path, "LC_ALL": "C"}


def _is_capable() -> bool:
    """Return whether this process may create network namespaces itself, as root usually may outside containers."""
    effective = Path("/proc/self/status").read_text().partition("CapEff:")[2].split()[0]
    return int(effective, 16) & _CAPABILITIES == _CAPABILITIES


def _obstacle() -> str:
    """Return in words what forbids namespaces on this machine and how to allow them, or "" if this is unknown."""
    for name, forbids, allows in _OBSTACLES:
        setting = _SETTINGS.joinpath(*name.split("."))
        if setting.is_file() and setting.read_text().strip() == forbids:
            return f", which {name}={forbids} forbids: `sudo sysctl {name}={allows}` allows them"
    if Path("/proc/self/status").read_text().partition("Seccomp:")[2].split()[:1] == ["2"]:
        return (
            ", which a seccomp filter forbids, probably the container's: "
            "`docker run --security-opt seccomp=unconfined` allows them"
        )
    return ""
