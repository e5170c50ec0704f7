"""`legato watch` as users start it: the script's process is its own, weights are the same, and advise says the same."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support import PATIENCE_S, environment
from support.command import without_progress
from support.rehearsing import needs_hosts_without_root

from legato.lab.testbed.hosts import Hosts

SCRIPT = str(Path(__file__).parent.parent / "support" / "watched.py")
TORCHRUN = ("torch.distributed.run", "--nproc-per-node", "2", "--no-python", sys.executable)
WATCH = ("-m", "legato", "watch")
NO_STEP = (
    "legato: watch: no verdict: no optimizer of torch took a step in this process (processes that it starts are not "
    "watched: use torchrun)\n"
)

#: What a script sees of itself, its environment and what it starts.
MIRROR = """
import multiprocessing, os, pickle, sys
import __main__

class Mine:
    pass

def seen(one):
    return type(one).__module__, sys.argv, "LEGATO_WATCH" in os.environ, "legato" in sys.modules

if __name__ == "__main__":
    print(__name__, __file__, sys.argv, sys.path, sys.flags, sorted(__main__.__dict__))
    print(sorted((k, v) for k, v in os.environ.items() if k != "_"), "sitecustomize" in sys.modules)
    print(pickle.dumps(Mine()), [name for name in sys.modules if "legato" in name], sys.excepthook)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(pool.apply(seen, (Mine(),)))
"""


SLEEPER = """
import time
try:
    print(1, flush=True)
    time.sleep(100)
except KeyboardInterrupt:
    print(2)
    raise
"""


def python(*arguments, cwd=None, status=0, **more):
    """What a Python with these arguments prints: standard output, and standard error."""
    done = subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        cwd=cwd,
        env={**environment(), **more},
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == status, done.stderr
    return done.stdout, done.stderr


@pytest.fixture
def script(tmp_path):
    def write(text, name="script.py"):
        path = tmp_path / name
        path.write_text(text)
        return str(path)

    return write


def test_the_scripts_process_is_its_own(script, tmp_path):
    path = script(MIRROR)
    plain = python(path, "a", "--b", "-o", "x")
    assert python(*WATCH, path, "a", "--b", "-o", "x") == (plain[0], plain[1] + NO_STEP)


def test_modules_run_as_modules(script, tmp_path):
    script(MIRROR)
    plain = python("-m", "script", "-m", "x", cwd=tmp_path)
    assert python(*WATCH, "-m", "script", "-m", "x", cwd=tmp_path) == (plain[0], plain[1] + NO_STEP)


@pytest.mark.parametrize("ends", ["sys.exit(3)", "1 / 0", "sys.exit('a word')", "os._exit(4)", "os.abort()"])
def test_a_script_ends_as_without_it(script, ends):
    path = script(f"import os, sys\ndef f():\n    {ends}\nf()\n")
    plain = subprocess.run([sys.executable, path], capture_output=True, text=True, check=False)
    out, err = python(*WATCH, path, status=plain.returncode)
    assert (out, err.replace(NO_STEP, "")) == (plain.stdout, plain.stderr)


def test_interrupts_are_the_scripts(script, tmp_path):
    path = script(SLEEPER)
    process = subprocess.Popen(
        [sys.executable, *WATCH, path],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a background job's tests ignore it
    )
    assert process.stdout.readline() == "1\n"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=PATIENCE_S)
    assert out == "2\n" and process.returncode == -signal.SIGINT
    assert err.startswith("Traceback") and "script.py" in err and "legato/" not in err


def test_the_users_sitecustomize_is_imported(script, tmp_path):
    script("print('mine', __name__)", "sitecustomize.py")
    out, _ = python(
        *WATCH,
        script("import sitecustomize, os; print(os.environ['PYTHONPATH'])"),
        PYTHONPATH=str(tmp_path) + os.pathsep + os.environ.get("PYTHONPATH", ""),
    )
    assert out.splitlines()[-2:] == [
        "mine sitecustomize",
        str(tmp_path) + os.pathsep + os.environ.get("PYTHONPATH", ""),
    ]


def test_wrong_input_is_a_line(tmp_path):
    assert python(*WATCH, "--every", "2", "x.py", status=2)[1].startswith("legato: --every 2: too few")
    assert "can't open file" in python(*WATCH, str(tmp_path / "none.py"), status=2)[1]
    assert "Missing argument" in python(*WATCH, status=2)[1]


# ---- trainings --------------------------------------------------------------------------


def trained(kind, *options, status=0, torchrun=TORCHRUN, **more):
    """The weights that a training prints on two ranks, watched if there are options, and what is said then."""
    crashes = {"PYTHONFAULTHANDLER": "1"}  # say where they were
    out, err = python(
        "-m", *torchrun, *(WATCH if options else ()), *options, SCRIPT, kind, status=status, **crashes, **more
    )
    return out, "".join(err[err.find("legato: watch: ") :]) if "legato: watch: " in err else ""


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    [
        "ddp",
        "fsdp",
        "tensor",
        "pipeline",
        "scaler",
        "accumulated",
        "adversarial",
        "many",
        "loaded",
        "compiled",
        "distributed",
        "accelerated",
        "lightning",
        "trainer",
        "paused",
    ],
)
def test_weights_are_the_same_and_advise_says_the_same(kind, tmp_path):
    plain, _ = trained(kind)
    weights, said = trained(kind, "-o", str(tmp_path))
    assert weights == plain
    first, _, verdict = said.partition("\n")
    assert first.startswith("legato: watch: steps 13 to 16, recorded on 2 of 2 ranks (")
    out, err = python("-u", "-m", "legato", "advise", str(tmp_path / "step-16"))
    assert without_progress(verdict) == without_progress(out + err)
    assert (tmp_path / "step-16.html").is_file()


@pytest.mark.slow
def test_a_script_that_profiles_itself_keeps_its_profile():
    plain, _ = trained("profiled")
    weights, said = trained("profiled", "--after", "10")
    assert weights == plain
    assert said.splitlines()[-1] == "legato: watch: no verdict: the script profiles itself"


@pytest.mark.slow
def test_too_few_steps_are_told():
    _, said = trained("ddp", "--after", "100")
    assert said == (
        "legato: watch: no verdict: the script ended after 30 steps, before steps 103 to 106 were recorded (see "
        "--after and --steps)\n"
    )


@pytest.mark.slow
def test_stop_ends_the_script_after_the_verdict():
    out, said = trained("ddp", "--stop", "--json")
    assert said.startswith("legato: watch: steps 13 to 16")
    (job,) = json.loads(out)["jobs"]  # and no weights: the script has not come to its end
    assert [rank["rank"] for rank in job["ranks"]] == [0, 1]


@pytest.mark.slow
def test_every_says_what_changed(tmp_path):
    plain, _ = trained("slowing")
    out, said = trained("slowing", "--every", "200", "--json", "-o", str(tmp_path))
    weights, _, document = out.partition("\n")
    assert weights + "\n" == plain
    assert said.count("legato: watch: steps ") == 2 and "An iteration is " in said
    assert json.loads(document)["changes"][0].endswith("after.")
    assert len(list(tmp_path.glob("step-*/rank*.json.gz"))) == 4


@pytest.mark.slow
def test_a_rank_that_dies_ends_the_job_as_without():
    for options in ((), ("--after", "10")):
        started = time.monotonic()
        trained("dying", *options, status=1)
        assert time.monotonic() - started < PATIENCE_S / 2


@pytest.mark.slow
def test_a_full_disk_is_a_line_and_the_script_goes_on(tmp_path):
    plain, _ = trained("ddp")
    limited = (
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--no-python",
        "prlimit",
        "--fsize=20000",
        sys.executable,
    )
    weights, said = trained("ddp", "--after", "10", torchrun=limited)
    assert weights == plain
    assert said.splitlines()[-1].startswith("legato: watch: no verdict: ")


@pytest.mark.slow
def test_elastic_restarts_have_a_verdict_of_their_own(tmp_path):
    torchrun = ("torch.distributed.run", "--standalone", "--max-restarts", "1", *TORCHRUN[1:])
    weights, said = trained("restarted", "-o", str(tmp_path), torchrun=torchrun)
    assert weights == trained("ddp")[0] and "recorded on 2 of 2 ranks" in said


@pytest.mark.slow
def test_a_script_that_runs_alone():
    plain = python(SCRIPT, "alone")
    out, err = python(*WATCH, SCRIPT, "alone")
    assert out == plain[0] and err.startswith(
        "legato: watch: steps 13 to 16, recorded on 1 of 1 rank, which communicates "
    )


@pytest.mark.slow
@needs_hosts_without_root
def test_two_nodes_share_no_disk(tmp_path):
    with Hosts(2, 1e9) as hosts:
        nodes = []
        for k in range(2):
            (temporary := tmp_path / f"tmp{k}").mkdir()
            rendezvous = ("--nnodes", "2", "--node-rank", str(k), "--master-addr", hosts.address(0))
            command = ("torch.distributed.run", *rendezvous, "--nproc-per-node", "1", "--no-python", sys.executable)
            variables = environment(TMPDIR=str(temporary), GLOO_SOCKET_IFNAME=hosts.interface)
            arguments = [sys.executable, "-m", *command, *WATCH, "-o", str(tmp_path / f"out{k}"), SCRIPT, "ddp"]
            nodes.append(hosts.popen(k, arguments, env=variables, stderr=subprocess.PIPE, text=True))
        said = [node.communicate(timeout=PATIENCE_S)[1] for node in nodes]
        assert [node.returncode for node in nodes] == [0, 0], said
    assert "legato: watch: steps 13 to 16, recorded on 2 of 2 ranks" in said[0] and "legato" not in said[1]
    assert sorted(path.name for path in tmp_path.glob("out*/step-16/*")) == ["rank0.json.gz", "rank1.json.gz"]
    assert not list(tmp_path.glob("tmp*/legato-*"))
