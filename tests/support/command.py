"""Runs `legato` commands in this process, as a user would type them."""

import pytest

from legato.cli import main


def run(capsys, *arguments):
    """Exit status, standard output and standard error of a command."""
    with pytest.raises(SystemExit) as end:
        main([str(a) for a in arguments])
    out, err = capsys.readouterr()
    return end.value.code, out, err
