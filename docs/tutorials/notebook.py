"""Make the notebook of a page: `python docs/tutorials/notebook.py` writes researcher.ipynb beside researcher.md.

Text becomes text. A ```python block becomes a cell, whose output is the ```text block below; without one, it is cut
into cells at its empty lines. A ```console block becomes a cell of commands, and what they print its output.
"""

import json
import re
from pathlib import Path

HERE = Path(__file__).resolve().parent
FENCE = re.compile(r"^```(\w+)([^\n]*)\n(.*?)^```$\n?", re.MULTILINE | re.DOTALL)


def notebook(page: str) -> str:
    """The notebook of a page in Markdown, as text: JSON of nbformat 4.5."""
    cells: list[dict] = []
    at = 0
    for block in FENCE.finditer(page):
        language, words, content = block.groups()
        _add_text(cells, page[at : block.start()])
        at = block.end()
        if "notest" in words:
            _add_text(cells, block[0])
        elif language == "python":
            whole = page[at:].lstrip().startswith("```text")
            for source in [content.strip()] if whole else re.split(r"\n\n+(?=\S)", content.strip()):
                cells.append(_cell("code", source, len(cells)))
        elif language == "console":
            lines = content.splitlines()
            commands = [f"!{line[2:]}" for line in lines if line.startswith("$ ")]
            cells.append(_cell("code", "\n".join(commands), len(cells)))
            _add_output(cells, "\n".join(line for line in lines if not line.startswith("$ ")))
        else:
            _add_output(cells, content)
    _add_text(cells, page[at:])
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    made = {"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(made, indent=1, ensure_ascii=False) + "\n"


def _cell(kind: str, source: str, number: int) -> dict:
    cell = {"cell_type": kind, "id": f"cell-{number}", "metadata": {}, "source": source.splitlines(keepends=True)}
    return cell | ({"execution_count": None, "outputs": []} if kind == "code" else {})


def _add_text(cells: list[dict], text: str) -> None:
    if text.strip():
        cells.append(_cell("markdown", text.strip(), len(cells)))


def _add_output(cells: list[dict], text: str) -> None:
    if text.strip():
        lines = f"{text.strip()}\n".splitlines(keepends=True)
        cells[-1]["outputs"].append({"output_type": "stream", "name": "stdout", "text": lines})


if __name__ == "__main__":
    (HERE / "researcher.ipynb").write_text(notebook((HERE / "researcher.md").read_text(encoding="utf-8")), "utf-8")
