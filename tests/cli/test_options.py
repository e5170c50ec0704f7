"""All options of all verbs, frozen: a new one is a decision, and one under a second name is none.

    PYTHONPATH=tests python -m cli.test_options > tests/cli/options.txt

writes the list as it is now.
"""

from pathlib import Path

import pytest
from support.command import run
from typer.main import get_command

from legato.cli import nouns
from legato.cli.options import taken_by
from legato.commands import app

FROZEN = Path(__file__).with_name("options.txt")
#: The options of all verbs together: fewer is better.
MOST = 282


def options():
    """A line for each verb: its options, without --help."""
    for verb, command in get_command(app).commands.items():
        flags = (option.opts[0] for option in command.params if option.opts[0].startswith("-"))
        yield f"{verb}: {' '.join(sorted(flags))}"


def test_no_option_comes_or_goes_unseen():
    assert "\n".join(options()) == FROZEN.read_text().strip()


def test_there_are_no_more_than_there_were():
    assert sum(len(line.split()) - 1 for line in options()) <= MOST


@pytest.mark.parametrize("verb", ["simulate", "sweep"])
def test_a_verb_has_the_options_of_its_nouns_and_its_own(verb):
    taken = {one.name for face in nouns.faces(verb) for one in taken_by(face).options}
    assert {option.name for option in get_command(app).commands[verb].params} == taken | {"workloads", "share"}


def test_help_is_short(capsys, monkeypatch):
    """Of the verb with the most options, in a terminal of 80 columns."""
    monkeypatch.setenv("COLUMNS", "80")
    assert len(run(capsys, "simulate", "--help")[1].splitlines()) < 200


if __name__ == "__main__":
    print("\n".join(options()))
