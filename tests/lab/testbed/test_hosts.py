"""Are the links really shaped, and is really nothing left behind?"""

import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest
from support import PATIENCE_S, environment, unmeasured
from support.rehearsing import NOBODY, ORDINARY_USER, needs_hosts, needs_hosts_without_root, processes_with, run

from legato.core.errors import InputError
from legato.lab.testbed import hosts as testbed
from legato.lab.testbed.hosts import Hosts, why_unavailable

pytestmark = pytest.mark.slow

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


def machine():
    """The machine's own interfaces, and its namespaces that have names."""
    named = Path("/run/netns")
    return set(os.listdir("/sys/class/net")), set(os.listdir(named)) if named.is_dir() else set()


@pytest.fixture
def started(tmp_path, monkeypatch):
    """Returns the processes that the test started and that still run; in the end, there must be none."""
    before = machine()
    monkeypatch.setenv("STARTED_BY_TEST", str(tmp_path))
    yield lambda: processes_with(f"STARTED_BY_TEST={tmp_path}")
    assert processes_with(f"STARTED_BY_TEST={tmp_path}") == set() and machine() == before


def soon(holds):
    deadline = time.monotonic() + PATIENCE_S
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.02)
    return holds()


@pytest.fixture(scope="module")
def four():
    before = machine()
    with Hosts(count=4, bandwidth_bps=LINK_BPS) as hosts:
        assert machine() == before, "the machine's own network got something"
        yield hosts
    assert machine() == before


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
        if LEAST * LINK_BPS < min(found) <= max(found) < MOST * LINK_BPS:
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
    look = "import os; print(sorted(n for _, n in __import__('socket').if_nameindex()), os.environ['A'])"
    process = four.popen(
        3, [sys.executable, "-c", look], env={**os.environ, "A": "b"}, stdout=subprocess.PIPE, text=True
    )
    said, _ = process.communicate()
    assert said == "['eth0', 'lo'] b\n"
    assert [four.address(i) for i in range(4)] == [f"10.77.0.{i}" for i in (1, 2, 3, 4)]
    with pytest.raises(IndexError):
        four.address(4)


@needs_hosts
def test_what_a_process_inside_writes_belongs_to_whoever_started_it(four, tmp_path):
    four.popen(0, ["sh", "-c", "id -u > here"], cwd=tmp_path).wait()
    written = tmp_path / "here"
    assert (written.stat().st_uid, written.stat().st_gid) == (os.getuid(), os.getgid())
    assert written.read_text() == "0\n"


#: Says when it is there, starts a child, and does not mind being asked to end.
STUBBORN = (
    "import signal, subprocess, sys; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
    "child = subprocess.Popen(['sleep', '600']); print('ready', flush=True); child.wait(); signal.pause()"
)
#: Makes hosts in which that runs.
OWNER = (
    "import signal; from legato.lab.testbed.hosts import Hosts\n"
    f"with Hosts(2, 1e8) as hosts: hosts.popen(1, [{sys.executable!r}, '-c', {STUBBORN!r}]); signal.pause()"
)


def start_stubborn(hosts):
    process = hosts.popen(1, [sys.executable, "-c", STUBBORN], stdout=subprocess.PIPE, text=True)
    with process.stdout as said:
        assert said.readline() == "ready\n"
    return process


@needs_hosts
@pytest.mark.parametrize("error", [None, ZeroDivisionError, KeyboardInterrupt])
def test_nothing_is_left_behind(started, error):
    with pytest.raises(error) if error else ExitStack(), Hosts(2, 100 * MBIT) as hosts:
        process = start_stubborn(hosts)
        assert started()
        if error:
            raise error
    assert process.returncode == -signal.SIGKILL


@needs_hosts
def test_nothing_is_left_behind_when_it_cannot_be_made(started, monkeypatch):
    """tc is what fails here, when all the namespaces are there already."""
    monkeypatch.setattr(testbed, "_QUEUE", "nonsense")
    with pytest.raises(InputError, match=r"^shaped hosts need Linux .* \(tc: .*nonsense"), Hosts(2, 100 * MBIT):
        pytest.fail("it was made")


@needs_hosts
def test_nothing_is_left_behind_by_an_owner_that_is_killed(started):
    with subprocess.Popen([sys.executable, "-c", OWNER], env=unmeasured(), stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout.readline() == "ready\n" and started() > {owner.pid}
        owner.kill()
    assert soon(lambda: not started())


@needs_hosts
def test_nothing_is_left_behind_by_an_owner_that_is_told_to_end(started):
    with subprocess.Popen([sys.executable, "-c", OWNER], env=unmeasured(), stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout.readline() == "ready\n"
        while owner.poll() is None:  # again and again, also while it removes what it made
            owner.terminate()
            time.sleep(0.02)
        assert owner.wait(60) == 128 + signal.SIGTERM and not started()


@needs_hosts
def test_what_is_killed_takes_its_program_along(started):
    with Hosts(2, 100 * MBIT) as hosts:
        before = started()
        process = hosts.popen(0, ["sh", "-c", "echo ready; exec sleep 600"], stdout=subprocess.PIPE, text=True)
        with process.stdout as said:
            assert said.readline() == "ready\n" and started() > before
        process.terminate()
        assert process.wait() == -signal.SIGTERM and soon(lambda: started() == before)


@needs_hosts
def test_hosts_outlive_the_thread_that_made_them(started):
    with ExitStack() as stack:
        with ThreadPoolExecutor(1) as pool:
            hosts = pool.submit(stack.enter_context, Hosts(2, 100 * MBIT)).result()
            process = pool.submit(start_stubborn, hosts).result()
        assert hosts.popen(0, ["true"]).wait() == 0 and process.poll() is None


@needs_hosts_without_root
@pytest.mark.skipif(os.getuid() != 0, reason="they all ran without root")
def test_all_this_holds_without_root(tmp_path):
    tests = ["-m", "pytest", __file__, "-p", "no:cacheprovider", "-p", "no:xdist", "--basetemp", tmp_path / "tests"]
    done = run([*ORDINARY_USER, sys.executable, *tests], cwd=Path(__file__).parents[2], env=environment())
    assert done.returncode == 0 and re.search(r"\d\d passed, 1 skipped", done.stdout), done.stdout


@needs_hosts_without_root
def test_where_namespaces_are_forbidden_one_line_says_what_to_do():
    look = "from legato.lab.testbed.hosts import why_unavailable; print(why_unavailable())"
    done = run([*NOBODY, sys.executable, "-c", look], env=environment())
    assert done.stdout == (
        "shaped hosts need root, or user namespaces, which user.max_user_namespaces=0 forbids: `sudo sysctl "
        "user.max_user_namespaces=1000` allows them (unshare: unshare failed: No space left on device)\n"
    ), done.stderr


@pytest.fixture
def programs(tmp_path, monkeypatch):
    """Makes the folder in which all programs are that fail, with these words."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(testbed, "_SBIN", ())

    def make(said):
        for name in testbed._PROGRAMS:
            program = tmp_path / name
            program.write_text(f"#!/bin/sh\necho '{said}' >&2\nexit 1\n")
            program.chmod(0o755)

    return make


def test_what_is_not_installed(programs):
    assert why_unavailable() == "shaped hosts need Linux and its `ip` on PATH (install iproute2)"
    programs("unshare: unshare failed: Invalid argument")
    assert why_unavailable() == (
        "shaped hosts need Linux with network namespaces, veth, bridge and tbf (unshare: unshare failed: "
        "Invalid argument)"
    )


@pytest.mark.parametrize(("name", "forbids", "allows"), testbed._OBSTACLES)
def test_the_setting_that_forbids_namespaces_is_named(programs, tmp_path, monkeypatch, name, forbids, allows):
    monkeypatch.setattr(testbed, "_SETTINGS", tmp_path)
    setting = tmp_path.joinpath(*name.split("."))
    setting.parent.mkdir()
    setting.write_text(f"{allows}\n")
    programs("unshare: write failed /proc/self/uid_map: Operation not permitted")
    assert name not in why_unavailable()
    setting.write_text(f"{forbids}\n")
    assert f"user namespaces, which {name}={forbids} forbids: `sudo sysctl {name}={allows}`" in why_unavailable()


@pytest.mark.parametrize(("count", "bandwidth_bps"), [(0, 1e9), (251, 1e9), (2, 0.0), (2, float("nan")), (2, 1e5)])
def test_what_makes_no_sense_is_refused(count, bandwidth_bps):
    with pytest.raises(InputError, match="expected"):
        Hosts(count, bandwidth_bps)
