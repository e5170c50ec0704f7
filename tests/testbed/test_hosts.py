"""Are the links really shaped, and is really nothing left behind?"""

import os
import re
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
from support import unmeasured

from legato.core.errors import InputError
from legato.testbed import hosts as testbed
from legato.testbed.hosts import Hosts, remove_stale, why_unavailable

WHY_NOT = why_unavailable() if sys.platform == "linux" else "not Linux"
needs_hosts = pytest.mark.skipif(WHY_NOT != "", reason=WHY_NOT)
MBIT = 1e6
LINK_BPS = 50 * MBIT
#: Of a link's rate: headers and start-up cost less than this, bursts are smaller than this.
LEAST, MOST = 0.7, 1.05
#: A busy machine may be too slow for a link; it is not so each time.
ATTEMPTS = 20

#: Both print when the first byte went out, and the clock is one for all processes, so that no pause can hide time.
SINK = """
import socket, sys, time
server = socket.create_server(("0.0.0.0", int(sys.argv[1])))
print("ready", flush=True)
connection, _ = server.accept()
nbytes = 0
while got := connection.recv(1 << 16):
    nbytes += len(got)
print(nbytes, time.monotonic(), flush=True)
"""
SOURCE = """
import socket, sys, time
connection = socket.create_connection((sys.argv[1], int(sys.argv[2])))
began = time.monotonic()
while time.monotonic() < began + 1.5:
    connection.sendall(bytes(1 << 15))
print(began, flush=True)
"""


def left_behind():
    """Namespaces that are there now, but for those of another process that uses the testbed at the same time."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    names = {line.split()[0] for line in listed.splitlines()}
    owners = {name: made["pid"] for name in names if (made := testbed._NAME.fullmatch(name))}
    return {n for n in names if owners.get(n) == str(os.getpid()) or not os.path.exists(f"/proc/{owners.get(n)}")}


def interfaces():
    return set(os.listdir("/sys/class/net"))


@pytest.fixture(scope="module")
def four():
    before = left_behind(), interfaces()
    with Hosts(count=4, bandwidth_bps=LINK_BPS) as hosts:
        assert interfaces() == before[1], "the machine's own network got something"
        yield hosts
    assert (left_behind(), interfaces()) == before


def rates(hosts, flows):
    """Bits per second that arrive at every receiver of flows (from, to) that run at the same time."""
    with ExitStack() as stack:

        def start(host, code, *arguments):
            command = [sys.executable, "-c", code, *arguments]
            return stack.enter_context(hosts.popen(host, command, stdout=subprocess.PIPE, text=True))

        sinks = [start(receiver, SINK, str(5000 + k)) for k, (_, receiver) in enumerate(flows)]
        for sink in sinks:
            assert sink.stdout.readline() == "ready\n"
        sources = [start(s, SOURCE, hosts.address(r), str(5000 + k)) for k, (s, r) in enumerate(flows)]
        began = [float(source.stdout.readline()) for source in sources]
        ended = [[float(word) for word in sink.stdout.readline().split()] for sink in sinks]
    found = []
    for receiver in {receiver for _, receiver in flows}:
        mine = [k for k, (_, to) in enumerate(flows) if to == receiver]
        seconds = max(ended[k][1] for k in mine) - min(began[k] for k in mine)
        found.append(8 * sum(ended[k][0] for k in mine) / seconds)
    return found


@needs_hosts
@pytest.mark.parametrize(
    "flows",
    [[(0, 1)], [(0, 2), (1, 2)], [(0, 1), (1, 0), (2, 3)]],
    ids=["a link", "two senders share their receiver's link", "directions and pairs do not disturb each other"],
)
def test_links_have_the_rate_that_was_asked_for(four, flows):
    for _ in range(ATTEMPTS):
        found = rates(four, flows)
        assert max(found) < MOST * LINK_BPS
        if min(found) > LEAST * LINK_BPS:
            return
    pytest.fail(f"{found} bit/s over links of {LINK_BPS}")


@needs_hosts
def test_congestion_control_is_not_the_machines_choice(four):
    look = (
        "import socket; s = socket.socket(); s.settimeout(0.01); "
        f"s.connect_ex(({four.address(1)!r}, 9)); print(s.getsockopt(6, socket.TCP_CONGESTION, 16).decode())"
    )
    said, _ = four.popen(0, [sys.executable, "-c", look], stdout=subprocess.PIPE, text=True).communicate()
    known = Path("/proc/sys/net/ipv4/tcp_available_congestion_control").read_text().split()
    assert said.strip("\0\n") == ("cubic" if "cubic" in known else "reno")


@needs_hosts
def test_a_process_inside_sees_its_host_and_nothing_else(four):
    look = "import os; print(sorted(n for _, n in __import__('socket').if_nameindex()), os.environ['A'], os.getpid())"
    process = four.popen(
        3, [sys.executable, "-c", look], env={**os.environ, "A": "b"}, stdout=subprocess.PIPE, text=True
    )
    said, _ = process.communicate()
    assert said == f"['eth0', 'lo'] b {process.pid}\n"
    assert [four.address(i) for i in range(4)] == [f"10.77.0.{i}" for i in (1, 2, 3, 4)]
    with pytest.raises(IndexError):
        four.address(4)


#: Says when it is there, starts a child, and does not mind being asked to end.
STUBBORN = (
    "import signal, subprocess, sys; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
    "child = subprocess.Popen(['sleep', '600']); print(child.pid, flush=True); child.wait(); signal.pause()"
)


def start_stubborn(hosts):
    process = hosts.popen(1, [sys.executable, "-c", STUBBORN], stdout=subprocess.PIPE, text=True)
    return process, int(process.stdout.readline())


def runs(pid):
    return testbed._start_time(pid) is not None


@needs_hosts
@pytest.mark.parametrize("error", [None, ZeroDivisionError, KeyboardInterrupt])
def test_nothing_is_left_behind(monkeypatch, error):
    monkeypatch.setattr(testbed, "_PATIENCE_S", 0.3)
    before = left_behind(), interfaces()
    with pytest.raises(error) if error else ExitStack(), Hosts(2, 100 * MBIT) as hosts:
        process, child = start_stubborn(hosts)
        assert left_behind() > before[0] and runs(child)
        if error:
            raise error
    assert process.returncode == -signal.SIGKILL and not runs(child)
    assert (left_behind(), interfaces()) == before


@needs_hosts
def test_nothing_is_left_behind_when_it_cannot_be_made(monkeypatch):
    """tc is what fails here, when all the namespaces are there already."""
    before = left_behind()
    monkeypatch.setattr(testbed, "_QUEUE", "nonsense")
    with pytest.raises(InputError, match=r"^shaped hosts need root.* \(tc: .*nonsense"), Hosts(2, 100 * MBIT):
        pytest.fail("it was made")
    assert left_behind() == before


@needs_hosts
def test_what_a_killed_owner_left_is_swept_and_nothing_else(monkeypatch):
    monkeypatch.setattr(testbed, "_PATIENCE_S", 0.3)
    before = left_behind()
    code = (
        "import signal; from legato.testbed.hosts import Hosts\n"
        f"with Hosts(2, 1e8) as hosts: hosts.popen(1, [{sys.executable!r}, '-c', {STUBBORN!r}]); signal.pause()"
    )
    with Hosts(1, 100 * MBIT) as mine:
        resident = mine.popen(0, ["sleep", "600"])
        with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as owner:
            child = int(owner.stdout.readline())
            owner.kill()
        foreign = f"legato-{owner.pid}"  # looks like one of ours, but is not named as ours are
        subprocess.run(["ip", "netns", "add", foreign], check=True)
        try:
            assert runs(child)
            swept = remove_stale()
            assert len(swept) == 3 and all(name.startswith(f"legato-{owner.pid}-") for name in swept)
            assert not runs(child) and resident.poll() is None
            assert left_behind() == before | {foreign} | set(mine._names)
            assert remove_stale() == []
        finally:
            subprocess.run(["ip", "netns", "delete", foreign], check=True)
    assert left_behind() == before


@needs_hosts
def test_nothing_is_left_behind_by_an_owner_that_is_told_to_end():
    before = left_behind(), interfaces()
    code = (
        "import signal; from legato.testbed.hosts import Hosts\n"
        f"with Hosts(2, 1e8) as hosts: hosts.popen(1, [{sys.executable!r}, '-c', {STUBBORN!r}]); signal.pause()"
    )
    with subprocess.Popen([sys.executable, "-c", code], env=unmeasured(), stdout=subprocess.PIPE, text=True) as owner:
        child = int(owner.stdout.readline())
        while owner.poll() is None:  # again and again, also while it removes what it made
            owner.terminate()
            time.sleep(0.02)
        assert owner.wait(60) == 128 + signal.SIGTERM
    assert not runs(child) and (left_behind(), interfaces()) == before


@needs_hosts
def test_an_owner_whose_id_went_to_another_process_is_gone():
    start = testbed._start_time(os.getpid())
    name = f"legato-{os.getpid()}-{start - 1}-00000000-0"
    subprocess.run(["ip", "netns", "add", name], check=True)
    assert remove_stale() == [name]


def test_why_not(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert re.fullmatch(r"shaped hosts need Linux and its `ip` on PATH \(install iproute2\)", why_unavailable())
    program = tmp_path / "ip"
    program.write_text("#!/bin/sh\necho 'mount failed: Operation not permitted' >&2\nexit 1\n")
    program.chmod(0o755)
    Path(tmp_path / "tc").symlink_to(program)
    assert why_unavailable().endswith("(ip: mount failed: Operation not permitted)")


@pytest.mark.parametrize(("count", "bandwidth_bps"), [(0, 1e9), (251, 1e9), (2, 0.0), (2, float("nan")), (2, 1e5)])
def test_what_makes_no_sense_is_refused(count, bandwidth_bps):
    with pytest.raises(InputError, match="expected"):
        Hosts(count, bandwidth_bps)
