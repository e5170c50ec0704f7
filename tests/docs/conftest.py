import os
import subprocess
import sys
import time

import pytest
from support import PATIENCE_S, environment


@pytest.fixture(scope="session")
def at_hand(tmp_path_factory):
    """What `PATH` begins with, so that commands find `legato` as a fork of a process that has imported it."""
    folder, began = tmp_path_factory.mktemp("bin"), time.monotonic()
    command = [sys.executable, "-m", "support.at_hand", str(folder)]
    server = subprocess.Popen(command, env=environment(OMP_NUM_THREADS="1"), stdout=subprocess.DEVNULL)
    try:
        while not os.access(folder / "legato", os.X_OK):
            assert server.poll() is None and time.monotonic() - began < PATIENCE_S, "the server does not begin"
            time.sleep(0.05)
        yield f"{folder}{os.pathsep}"
    finally:
        server.kill()
        server.wait()
