"""Turns of phrase that a reader has to read twice stay out."""

import re
import token
import tokenize
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
#: Each turn, and what to write instead.
TURNS = {
    r'^"""(What|That|Those|Of|Whether)\b': "begin with Return, another verb, or a noun",
    r"\bth(at|ose) of\b": "repeat the noun, or say whose it is",
    r"\bbeside\b": "during, next to, besides",
    r"(?<!hidden )(?<!left )(?<!not )\bbehind\b(?! one (switch|network card)\b)": "after",
    r"\b(win|wins|won)\b": "save, gain",
    r"\b(so|in as) many\b": "this number of",
    r"\bin the mean\b": "on average",
    r"\b(is|are|was|were|be) waited for\b": "say who waits",
}
#: Comments, docstrings and other text; since Python 3.12, f-strings have a token of their own.
TEXT = {token.COMMENT, token.STRING, getattr(token, "FSTRING_MIDDLE", token.STRING)}


def prose(path):
    """Return (line, text) of what people read: a page without its blocks, the comments and strings of a module."""
    if path.suffix == ".py":
        with tokenize.open(path) as file:
            found = [(t.start[0], t.string) for t in tokenize.generate_tokens(file.readline) if t.type in TEXT]
        return [(line, re.sub(r"\{.*?\}|`[^`]*`", "", text)) for line, text in found if " " in text]
    page = re.sub(r"^```.*?^```", lambda block: "\n" * block[0].count("\n"), path.read_text("utf-8"), flags=re.M | re.S)
    return list(enumerate(page.splitlines(), 1))


def turns(text):
    return [f"{found[0]!r} ({instead})" for turn, instead in TURNS.items() for found in re.finditer(turn, text, re.I)]


def test_turns_are_found():
    assert len(turns('"""What the time beside that of a message won."""')) == 4
    assert not turns("Return the bytes that are hidden behind computation.")


def test_no_turn_comes_back():
    found = []
    for path in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "legato").rglob("*.py")):
        name = path.relative_to(ROOT).as_posix()
        found += [f"{name}:{line}: {turn}" for line, text in prose(path) for turn in turns(text)]
    assert not found, "\n".join(found)
