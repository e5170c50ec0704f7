"""tests/durations.json: how many seconds each test file takes, in tests that are slow and in the others."""

import json
from collections import defaultdict
from pathlib import Path

FILE = Path(__file__).resolve().parents[1] / "durations.json"
#: More than this, in tests that are not marked `slow`, and a file has to mark some.
MOST_S = 20
UNKNOWN = {"slow": 0.0, "others": 0.0}


def name(path):
    """A test file as durations.json names it."""
    return Path(path).relative_to(FILE.parent).as_posix()


def kept():
    return json.loads(FILE.read_text()) if FILE.exists() else {}


class Measured:
    """Adds up what tests take, wherever they run, and keeps it if that is asked for."""

    def __init__(self, keep):
        self._keep, self._seconds = keep, defaultdict(dict)

    def pytest_runtest_logreport(self, report):
        file = report.nodeid.partition("::")[0].removeprefix("tests/")
        kind = "slow" if "slow" in report.keywords else "others"
        self._seconds[file][kind] = self._seconds[file].get(kind, 0.0) + report.duration

    def pytest_sessionfinish(self):
        if not self._keep:
            return
        before = kept()
        files = [file for file in sorted({*before, *self._seconds}) if (FILE.parent / file).exists()]
        spent = {file: {**UNKNOWN, **before.get(file, {}), **self._seconds[file]} for file in files}
        rounded = {file: {kind: round(seconds, 1) for kind, seconds in times.items()} for file, times in spent.items()}
        FILE.write_text("{\n" + ",\n".join(f" {json.dumps(f)}: {json.dumps(s)}" for f, s in rounded.items()) + "\n}\n")
