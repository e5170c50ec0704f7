"""Runs `legato` commands in this process, as a user would type them."""

import re

import pytest

from legato.__main__ import main


def run(capsys, *arguments):
    """Exit status, standard output and standard error of a command, without its progress."""
    with pytest.raises(SystemExit) as end:
        main([str(a) for a in arguments])
    out, err = capsys.readouterr()
    return end.value.code, out, without_progress(err)


def without_progress(err):
    """What a command says on standard error, without the lines on where its work is: a slow machine gets more."""
    return re.sub(r"^\w[^:\n]*(: \d+ of \d+)? \([\d.]+ (ms|s)\)\n", "", err, flags=re.MULTILINE)
