"""A workload to rehearse, and the commands that do."""

import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from legato.core.workload import Op, Tensor, Workload
from legato.lab.testbed.hosts import why_unavailable
from support import PATIENCE_S, environment
from support.command import without_progress

WHY_NOT = why_unavailable()
needs_hosts = pytest.mark.skipif(WHY_NOT != "", reason=WHY_NOT)
#: Makes a command that of a user who is not root, but may read what whoever runs the tests may.
ORDINARY_USER = ("unshare", "--user", "--map-user=1000", "--map-group=1000")
#: Makes a command that of a user who may make no namespace at all.
NOBODY = (
    *("unshare", "--user", "--map-root-user", "sh", "-c"),
    'echo 0 > /proc/sys/user/max_user_namespaces && exec setpriv --inh-caps=-all --bounding-set=-all "$@"',
    "sh",
)
LAYERS = 6


def workload(nbytes=200_000, op_s=0.004):
    """A chain of layers, one parameter each."""
    forward = [Op(f"f{i}", "forward", op_s, (i - 1,) if i else ()) for i in range(LAYERS)]
    backward = [Op(f"b{i}", "backward", 2 * op_s, (LAYERS + i - 1,)) for i in range(LAYERS)]
    tensors = [Tensor(f"layer{LAYERS - 1 - i}.weight", nbytes, LAYERS + i, (LAYERS - 1 - i,)) for i in range(LAYERS)]
    return Workload("chain", (*forward, *backward), tuple(tensors))


def run(arguments, **options):
    return subprocess.run(arguments, capture_output=True, text=True, timeout=PATIENCE_S, check=False, **options)


def legato(*arguments, user=()):
    done = run([*user, sys.executable, "-m", "legato", *map(str, arguments)])
    done.stderr = without_progress(done.stderr)
    return done


def processes_with(word):
    """The processes in whose environment this is, which they inherit. A zombie has none."""
    found = set()
    for environ in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if word.encode() in environ.read_bytes():
                found.add(int(environ.parent.name))
    return found


def why_unavailable_to_ordinary_users():
    look = "from legato.lab.testbed.hosts import why_unavailable; print(why_unavailable())"
    done = run([*ORDINARY_USER, sys.executable, "-c", look], env=environment())
    return done.stdout.strip() if done.returncode == 0 else done.stderr.strip()


WHY_NOT_ORDINARY = why_unavailable_to_ordinary_users()
needs_hosts_without_root = pytest.mark.skipif(WHY_NOT_ORDINARY != "", reason=WHY_NOT_ORDINARY)
