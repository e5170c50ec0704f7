"""No test file takes long without saying so: a newcomer waits for `make test`."""

from support import durations


def test_every_file_has_its_durations():
    files = {durations.name(path) for path in durations.FILE.parent.rglob("test_*.py")}
    assert files == set(durations.kept()), "make durations"


def test_what_takes_long_is_marked_slow():
    long = {file: spent["others"] for file, spent in durations.kept().items() if spent["others"] > durations.MOST_S}
    assert not long, f"more than {durations.MOST_S} s in tests that are not marked slow"
