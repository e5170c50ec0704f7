"""The documentation is true: its blocks run, the commands and names in it exist, and its links lead somewhere.

Each ```python block runs in a process of its own. The ```sh and ```console blocks of a
page run in order, in one folder. In a console block, commands stand behind `$ `, and
every other line must be among what they print (`...` stands for lines left out), but for
times that planning and simulating took. A ```text block after a ```python block is what
it prints. Words behind the language: `measured`, the output differs from run to run;
`notest`, the block does not run (it needs several machines, or minutes), but its syntax
is checked. With `LEGATO_WRITE_DOCS=1` set, pages are rewritten to show what is printed.
"""

import ast
import itertools
import json
import os
import pkgutil
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import typer
from markdown_it import MarkdownIt
from support import PATIENCE_S
from support.kineto_samples import record
from support.ranks import run_script

import legato
from legato.commands import app
from legato.schedule import SCHEDULERS, SERVER_SCHEDULERS
from legato.simulator.flow import FABRICS

ROOT = Path(__file__).resolve().parents[2]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted(p for p in (ROOT / "docs").rglob("*.md") if "_build" not in p.parts)]
VERBS = {
    name: {option for parameter in verb.params for option in (*parameter.opts, *parameter.secondary_opts)}
    for name, verb in typer.main.get_command(app).commands.items()
}

#: What the fragments on these pages assume: a model before its training, on one rank.
TRAINING = """
import torch, torch.distributed as dist, legato
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW
from torch import nn
torch.manual_seed(0)
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x, y, loss_of = torch.randn(3, 4), torch.randn(3, 2), nn.functional.mse_loss
"""
BEFORE = {
    "README.md": TRAINING,
    "docs/runtime.md": TRAINING + "model, optimizer = legato.distribute(model, optimizer)\n",
}


class Block(NamedTuple):
    line: int
    language: str
    words: tuple[str, ...]
    text: str

    @property
    def runs(self):
        return "notest" not in self.words and "notest:" not in self.words


def tokens(page):
    for token in MarkdownIt("commonmark").enable("table").parse(page.read_text(encoding="utf-8")):
        yield token
        yield from token.children or ()


def blocks(page):
    found = []
    for token in tokens(page):
        if token.type == "fence":
            language, *words = token.info.split() or [""]
            found.append(Block(token.map[0] + 1, "sh" if language == "bash" else language, tuple(words), token.content))
    return found


def name_of(page):
    return str(page.relative_to(ROOT))


def having(languages):
    return [page for page in PAGES if any(b.language in languages and b.runs for b in blocks(page))]


def run(command, folder, first=""):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment["PATH"] = f"{first}{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    done = subprocess.run(
        command, cwd=folder, env=environment, text=True, timeout=PATIENCE_S,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert done.returncode == 0, f"{command[-1]}\n{done.stdout}"
    return done.stdout


def without_times(text):
    """Printed lines without frames, and without the columns of tables that say how long something took here."""
    found, timed = [], []
    for line in text.splitlines():
        cells = re.split("[│┃]", line)
        if "┃" in line:
            timed = [i for i, cell in enumerate(cells) if cell.strip() in ("planned in", "simulated in")]
        elif "│" in line:
            cells = [cell for i, cell in enumerate(cells) if i not in timed]
        found.append(" ".join(re.sub("[━─┏┓┗┛┡┩┳┻╇└┘┴┼╋╈┷]", "", " ".join(cells)).split()))
    return found


def check(page, block, shown, printed):
    """Every line that a block shows must be among the printed ones; or write these into the page."""
    known = set(without_times(printed))
    missing = [line for line in without_times(shown) if line not in known and line != "..."]
    if missing and os.environ.get("LEGATO_WRITE_DOCS") and "..." not in shown.splitlines():
        text = page.read_text(encoding="utf-8")
        assert text.count(shown) == 1, f"{page.name}:{block.line}: shown twice"
        page.write_text(text.replace(shown, printed), encoding="utf-8")
        return
    assert not missing, f"{page.name}:{block.line}: {missing} not among\n{printed}"


@pytest.mark.slow
@pytest.mark.parametrize("page", having({"python"}), ids=name_of)
def test_python_blocks_run(page, tmp_path):
    before = BEFORE.get(name_of(page), "")
    if before:
        pytest.importorskip("torch")
    for block, after in itertools.pairwise([*blocks(page), None]):
        if block.language == "python" and block.runs:
            if before:
                run_script(["-c", before + block.text], tmp_path)
            else:
                printed = run([sys.executable, "-c", block.text], tmp_path)
                if printed and after is not None and after.language == "text":
                    check(page, after, after.text, printed)


@pytest.mark.slow
@pytest.mark.parametrize("page", having({"sh", "console"}), ids=name_of)
def test_commands_run_and_print_what_is_shown(page, tmp_path, at_hand):
    pytest.importorskip("torch")
    first = "" if page.name == "index.md" else at_hand  # whose commands start as a user's do
    for folder in ("examples", "docs"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    for rank in range(2):
        (tmp_path / f"rank{rank}.json").write_text(record(rank=rank, late_us=30).text())
    for block in blocks(page):
        if block.language == "sh" and block.runs:
            run(["bash", "-ec", block.text], tmp_path, first)
        elif block.language == "console" and block.runs:
            before, *commands = re.split(r"^\$ ", block.text, flags=re.MULTILINE)
            assert commands and not before, f"{page.name}:{block.line}: the first line does not begin with '$ '"
            for command, shown in (text.split("\n", 1) for text in commands):
                printed = run(["bash", "-ec", command], tmp_path, first)
                if "measured" not in block.words:
                    check(page, block, shown, printed)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_what_is_not_run_makes_sense(page):
    for block in blocks(page):
        if block.language == "python":
            ast.parse(block.text)
        elif block.language in ("sh", "console") and shutil.which("bash"):
            lines = [line.removeprefix("$ ") for line in block.text.splitlines() if line.startswith("$ ")]
            run(["bash", "-nc", "\n".join(lines) if block.language == "console" else block.text], ROOT)


#: `legato VERB` where a command begins: after a prompt, a path, an assignment or torchrun's options.
COMMAND = re.compile(r"(?:^|[\s;/])legato +([a-z]+(?:-[a-z]+)*)(?![\w.])([^\n;#]*)")


def command_lines(page):
    for token in tokens(page):
        if token.type in ("fence", "code_block", "code_inline"):
            if token.type == "fence" and token.info.split()[:1] not in ([], ["sh"], ["bash"], ["console"]):
                continue
            for verb, rest in COMMAND.findall(token.content.replace("\\\n", " ")):
                rest = re.split(r" \S+\.py\b| -m ", rest)[0] if verb == "watch" else rest  # the script's own follow
                if token.type == "code_inline" or verb in VERBS or re.search(r" -", rest):
                    yield verb, re.findall(r"(?<![\w-])--?[a-z][a-z-]*", rest)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_command_line_exists(page):
    for verb, options in command_lines(page):
        assert verb in VERBS, f"{page.name}: legato {verb}"
        assert set(options) <= VERBS[verb] | {"--help"}, f"{page.name}: legato {verb}: {options}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_files_and_names_exist(page):
    to_be_saved = re.findall(r"ave it as `([\w/.]+)`", page.read_text(encoding="utf-8"))
    for token in tokens(page):
        if token.type == "code_inline":
            text = token.content
            if re.fullmatch(r"(legato|tests|examples|benchmarks|docs)/[\w/.]+", text):
                assert text in to_be_saved or (ROOT / text).exists(), f"{page.name}: {text}"
            elif re.fullmatch(r"legato(\.\w+)+", text):
                pytest.importorskip("torch")
                pkgutil.resolve_name(text)


def anchors(page):
    """The anchors of a page's headings, as GitHub and the site make them."""
    titles = [after.content for token, after in itertools.pairwise(tokens(page)) if token.type == "heading_open"]
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page):
    for token in tokens(page):
        target = token.attrGet("href") if token.type == "link_open" else token.attrGet("src")
        if not target or re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        assert there.exists(), f"{page.name}: {target}"
        if anchor:
            assert anchor in anchors(there), f"{page.name}: {target}"


def test_the_citation_has_this_version():
    assert f"\nversion: {legato.__version__}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_site_builds_and_has_the_whole_api(tmp_path):
    pytest.importorskip("furo")
    pytest.importorskip("torch")
    run([sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", str(ROOT / "docs"), str(tmp_path / "site")], ROOT)
    from sphinx.util.inventory import InventoryFile

    with open(tmp_path / "site" / "objects.inv", "rb") as file:
        inventory = InventoryFile.load(file, "", lambda base, path: path)
    there = {name for kind, names in inventory.items() if kind.startswith("py:") for name in names}
    functions = (SCHEDULERS | SERVER_SCHEDULERS).values()
    public = {f"legato.{name}" for name in legato.__all__}
    public |= {f"{function.__module__}.{function.__name__}" for function in functions}
    public |= {f"{type(fabric).__module__}.{type(fabric).__name__}" for fabric in FABRICS.values()}
    assert public <= there, json.dumps(sorted(public - there))
