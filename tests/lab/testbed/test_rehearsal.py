"""Plans that are really carried out, between hosts and over loopback, and what the commands say of them."""

import html
import json
import os
import re
import sys

import pytest
from msgspec.structs import replace
from support import command
from support.ranks import run_script
from support.rehearsing import NOBODY, ORDINARY_USER, legato, needs_hosts, needs_hosts_without_root, run, workload

from legato.core import files
from legato.core.cluster import Cluster
from legato.core.errors import InputError
from legato.core.measurement import Measurement
from legato.core.plan import Plan
from legato.core.text import percent
from legato.core.timeline import Span, Timeline
from legato.core.units import format_seconds
from legato.lab.cli.rehearse import Results, tell
from legato.lab.testbed.rehearsal import BUCKETS, Rehearsal, Task, Trial, rehearse, select
from legato.schedule import SCHEDULERS

KEYS = {
    "scheduler",
    "measured_s",
    "quartiles_s",
    "predicted_s",
    "error",
    "speedup_over_ddp",
    "lower_bound_s",
    "num_messages",
}


@needs_hosts
@pytest.mark.slow
def test_plans_between_hosts(tmp_path, chain):
    done = legato(
        "rehearse", chain, "--workers", 2, "--bandwidth", "1Gbit", "--iterations", 2, "--json",
        "--scheduler", f"{BUCKETS},fifo,legato", "-o", tmp_path / "found",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert [row["scheduler"] for row in rows] == ["ddp", BUCKETS, "fifo", "legato"]
    assert all(set(row) == KEYS for row in rows)
    compute_s = workload().compute_s
    for row in rows:
        assert row["measured_s"] >= 0.999 * compute_s  # the device takes its time ...
        assert row["predicted_s"] >= row["lower_bound_s"] >= 0.999 * compute_s
        assert row["error"] == pytest.approx(row["predicted_s"] / row["measured_s"] - 1)
        for kind in ("predicted", "measured"):
            timeline = files.read(tmp_path / "found" / f"{row['scheduler']}.{kind}.json", Timeline)
            messages = [span for span in timeline.spans if span.kind == "message"]
            assert sum(span.nbytes for span in messages) >= workload().nbytes  # ... and the bytes are really sent
    assert rows[0]["speedup_over_ddp"] == 1
    saved = files.read(tmp_path / "found" / "measured.json", Measurement)
    assert saved.network == "2 workers, 1 Gbit/s"
    assert [(plan.scheduler, plan.measured_s) for plan in saved.plans] == [
        (row["scheduler"], row["measured_s"]) for row in rows
    ]
    plan = files.read(tmp_path / "found" / "legato.plan.json", Plan)
    assert len(plan.messages) == rows[3]["num_messages"]
    report = legato("report", tmp_path / "found", "-o", tmp_path / "report.html")
    assert report.returncode == 0, report.stderr


@needs_hosts
@pytest.mark.slow
def test_plans_in_compiled_models(tmp_path, chain):
    done = legato(
        "rehearse", chain, "--workers", 2, "--iterations", 2, "--json", "--compiled", "--scheduler", "caramel,legato",
        "-o", tmp_path / "found",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert [row["scheduler"] for row in rows] == ["ddp", "caramel", "legato"]
    assert all(row["measured_s"] >= 0.999 * workload().compute_s for row in rows)
    timeline = files.read(tmp_path / "found" / "caramel.measured.json", Timeline)
    assert sum(span.nbytes for span in timeline.spans if span.kind == "message") >= workload().nbytes


@needs_hosts_without_root
@pytest.mark.slow
def test_plans_between_hosts_without_root(tmp_path, chain):
    found, user = tmp_path / "found", ORDINARY_USER
    done = legato("rehearse", chain, "--workers", 2, "--iterations", 2, "-o", found, "--json", user=user)
    assert done.returncode == 0, done.stderr
    assert [row["scheduler"] for row in json.loads(done.stdout)] == ["ddp", "legato"]
    assert {path.stat().st_uid for path in (found, *found.iterdir())} == {os.getuid()}


@needs_hosts_without_root
@pytest.mark.parametrize("command", [["rehearse"], ["rehearse", "--servers", "1"]])
def test_where_hosts_are_forbidden_one_line_says_so(tmp_path, monkeypatch, chain, command):
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    done = legato(*command, chain, "--json", user=NOBODY)
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.strip().splitlines()) == 1
    assert "need root, or user namespaces, which user.max_user_namespaces=0 forbids" in done.stderr
    assert list(temporary.iterdir()) == []


@pytest.mark.slow
def test_a_cluster_verified_under_torchrun(chain):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--no-python"]
    command = [sys.executable, "-m", "legato", "verify", str(chain), "--iterations", "2", "--ratio", "0.25"]
    done = run([*torchrun, *command, "--scheduler", "p3,legato", "--json"])
    assert done.returncode == 0, done.stderr
    assert [row["scheduler"] for row in json.loads(done.stdout)] == ["ddp", "p3", "legato"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("option", "value", "names"),
    [
        ("--shard", "gradients", ["ddp", "legato", "ddp+zero", "legato sharded"]),
        ("--wire", "bf16", ["ddp", "legato", "ddp+hook", "legato rounded"]),
    ],
)
def test_the_rivals_of_shards_and_of_wire_formats(chain, tmp_path, option, value, names):
    command = ["verify", str(chain), "--iterations", "2", "--ratio", "0.25", "--scheduler", "legato", option, value]
    run_script(
        ["-c", "import sys; from legato.__main__ import main; main(sys.argv[1:])", *command, "--json"], tmp_path, 2
    )
    said = (tmp_path / "output of rank 0").read_text()
    rows, _ = json.JSONDecoder().raw_decode(said[re.search(r"^\[", said, re.MULTILINE).start() :])
    assert [row["scheduler"] for row in rows] == names
    assert [row["predicted_s"] is None for row in rows] == [name == "ddp+zero" for name in names]


def test_ddp_is_always_measured_and_first():
    assert select(["legato"]) == ("ddp", "legato")
    assert select(["fifo", "ddp", "fifo"]) == ("ddp", "fifo")
    assert set(select(["all"])) == {*SCHEDULERS, BUCKETS}
    assert select(["all"])[0] == "ddp"


@pytest.mark.parametrize(
    "field, value, said",
    [
        ("schedulers", ("ddp", "nonesuch"), "nonesuch"),
        ("schedulers", ("ddp", "ddp"), "named twice"),
        ("iterations", 0, "expected at least 1"),
        ("ratio", 0.0, "expected 1e-6 to 1e6"),
        ("ratio", float("nan"), "expected 1e-6 to 1e6"),
        ("shard", "all", "unknown shard 'all'"),
        ("wire", "fp8", "unknown wire 'fp8'"),
    ],
)
def test_tasks_that_make_no_sense(field, value, said):
    with pytest.raises(InputError, match=said):
        Task(**{"workload": workload(), "schedulers": ("ddp",), field: value})


def test_one_host_has_nothing_to_exchange():
    with pytest.raises(InputError, match="1 host: there is nothing to exchange"):
        rehearse(Task(workload(), ("ddp",)), 1, 1e9, lambda *_: None)


def rehearsal(bound_s=0.5, **measured):
    """A result: every prediction is one second."""
    trials = [
        Trial(name, tuple(seconds), Timeline(name, "predicted", 1.0, (), bound_s), bound_s, 1)
        for name, seconds in measured.items()
    ]
    return Rehearsal(workload(), Cluster.derive(2, 1e9, 0.0), 0.0, tuple(trials))


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (rehearsal(ddp=[1.0], legato=[0.5]), "predictions are off by 0.0% (ddp) and +100% (legato)"),
        (rehearsal(ddp=[1.0], p3=[0.8], legato=[0.5]), "predictions are off by 25.0% (median), 100% (worst)"),
        (rehearsal(ddp=[1.0], p3=[0.8], pace=[1.0], legato=[0.5]), "off by 12.5% (median), 100% (worst)"),
        (rehearsal(1.5, ddp=[1.0], legato=[0.75]), "(ddp, legato) are up to 50% below the lower bound"),
        (rehearsal(ddp=[1.0, 1.0, 2.0, 2.0]), "the machine was busy while measuring"),
    ],
)
def test_what_a_rehearsal_says_of_its_predictions_and_of_itself(capsys, found, said):
    tell(found, "2 workers", Results())
    assert said in capsys.readouterr().err
    tell(found, "2 workers", Results(json=True))
    err = capsys.readouterr().err  # doubts are also for those who read the JSON
    assert "predictions" not in err and (said in err) == ("off by" not in said)


def drawn(name, seconds):
    """One measured iteration."""
    return Timeline(name, "measured", seconds, (Span(0, "compute", "op", 0.0, seconds / 2, "backward"),))


@pytest.mark.parametrize(
    ("ddp", "legato", "said", "doubt"),
    [
        ([1.48] * 4, [1.62] * 4, "An iteration takes 1.48 s under DDP (measured); no other plan is more than 0.5%", ""),
        ([1.62] * 4, [1.48] * 4, "An iteration takes 1.62 s under DDP (measured); legato is 1.09x as fast.", ""),
        ([1.0, 1.5, 1.5, 2.0], [1.0] * 4, "takes 1.5 s under DDP (measured); legato is 1.50x as fast.", "busy"),
    ],
)
@pytest.mark.parametrize("order", [1, -1], ids=["one iteration agrees", "one iteration does not"])
def test_the_report_of_the_folder_says_what_the_console_said(capsys, tmp_path, ddp, legato, said, doubt, order):
    """The iterations that are drawn say the opposite of the medians, and the predictions something else again."""
    found, ones = rehearsal(**{"ddp": ddp, "legato": legato, "ddp+hook": [9.0]}), (1.31, 1.0, 1.2)[::order]
    trials = [replace(t, measured=drawn(t.scheduler, s)) for t, s in zip(found.trials, ones, strict=True)]
    tell(replace(found, trials=tuple(trials)), "2 workers, 1 Gbit/s", Results(tmp_path))
    out, err = capsys.readouterr()
    assert said in err and ("Beware: " in err) == bool(doubt) and doubt in err
    assert command.run(capsys, "report", tmp_path, "-o", tmp_path / "page.html")[0] == 0
    page = (tmp_path / "page.html").read_text()
    text = re.sub(r"\s+", " ", re.sub("<[^>]*>", "", page.split("</main>")[0]))
    for line in err.splitlines():
        if " -> " not in line and "off by" not in line:
            assert html.escape(line, quote=False) in text, line
    for row in found.rows():
        shown = re.search(rf'data-sort="{re.escape(row["scheduler"])}">.*?</tr>', page, re.DOTALL)[0]
        mine = next(line for line in out.splitlines() if f"│ {row['scheduler']} " in line)
        assert all(cell in mine and cell in shown for cell in (
            format_seconds(row["measured_s"]), f"{row['speedup_over_ddp']:.2f}x", percent(row["error"], signed=True),
            " to ".join(map(format_seconds, row["quartiles_s"])),
        ))  # fmt: skip
    winner = min(found.trials, key=lambda t: t.median_s).scheduler
    assert re.search(rf'<tr class="best">\s*<td data-sort="{winner}">', page)


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["rehearse", "W", "--compiled", "--shard", "optimizer"], "compiled: given with shard or wire"),
        (
            ["rehearse", "W", "--servers", "1", "--wire", "bf16"],
            "--shard and --wire: not available with parameter servers",
        ),
        (["rehearse", "W", "--shard", "optimizer", "--wire", "bf16"], "wire"),
        (["rehearse", "nowhere.json"], "nowhere.json"),
        (["rehearse", "W", "--scheduler", "nonesuch"], "nonesuch"),
        (["rehearse", "W", "--bandwidth", "fast"], "fast"),
        (["rehearse", "W", "--workers", "1"], "nothing to exchange"),
        (["verify", "W"], "under torchrun"),
    ],
)
def test_bad_input_is_one_line(capsys, chain, arguments, said):
    status, _, err = command.run(capsys, *[chain if word == "W" else word for word in arguments])
    assert status == 2
    assert len(err.strip().splitlines()) == 1
    assert said in err
