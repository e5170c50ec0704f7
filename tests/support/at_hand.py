"""`legato` for the shells of tests, each command a fork of one process that has imported, planned and simulated before.

`python -m support.at_hand FOLDER` serves the command that it writes into FOLDER, which belongs in front of `PATH`.
"""

import array
import json
import os
import socket
import sys
from contextlib import suppress
from pathlib import Path

#: Hands its arguments, folder, environment and streams to the server, and ends as the command does.
CLIENT = """#!{python} -SE
import array, json, os, socket, sys
server = socket.socket(socket.AF_UNIX)
server.connect({address!r})
asked = json.dumps([sys.argv[1:], os.getcwd(), dict(os.environ)]).encode()
streams = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0, 1, 2]))]
server.sendmsg([len(asked).to_bytes(8, "big")], streams)
server.sendall(asked)
sys.exit(server.recv(1)[0])
"""


def _received(client):
    """Arguments, folder, environment and streams of a command."""
    size, ancillary, *_ = client.recvmsg(8, socket.CMSG_LEN(3 * array.array("i").itemsize))
    streams = array.array("i", ancillary[0][2])
    with client.makefile("rb") as asked:
        return *json.loads(asked.read(int.from_bytes(size, "big"))), streams


def _become(client):
    """What `main` needs to be the command; its process ends like any other."""
    arguments, folder, variables, streams = _received(client)
    client.close()
    for stream, mine in enumerate(streams):
        os.dup2(mine, stream)
        os.close(mine)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(variables)
    return arguments


def serve(folder):
    from legato.__main__ import main

    sys.argv[0] = "legato"
    address, command, job = str(folder / "socket"), folder / "legato", str(folder / "job.json")
    link = ["--workers", "2", "--bandwidth", "1Gbit"]
    # What is compiled or loaded once is there for all.
    shared = ["simulate", job, job, "--share", "--fabric", "ring", "--scheduler", "single", *link]
    for arguments in (["workload", "resnet-v1-50", "-o", job], ["simulate", job, *link], ["plan", job, *link], shared):
        try:
            main(arguments)
        except SystemExit as end:
            assert not end.code, arguments
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(address)
        listening.listen(100)
        command.write_text(CLIENT.format(python=sys.executable, address=address))
        command.chmod(0o755)
        while True:
            client, _ = listening.accept()
            if not os.fork():
                listening.close()
                break
            client.close()
            with suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
    if child := os.fork():
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        client.sendall(bytes([status % 256]))
        os._exit(0)
    main(_become(client))


if __name__ == "__main__":
    serve(Path(sys.argv[1]))
