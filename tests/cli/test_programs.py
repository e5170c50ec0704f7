"""`legato import --program`, and `legato simulate` of what it writes, as a user meets them."""

import json

import pytest
from support.command import run
from support.mesh_samples import MeshJob

import legato
from legato.core.program import Program

FORMULAS = ("--fidelity", "formulas")


@pytest.fixture
def program(tmp_path, capsys):
    path = tmp_path / "program.json"
    status, _, err = run(capsys, "import", "kineto", *MeshJob().write(tmp_path), "--program", "-o", path)
    assert status == 0, err
    assert "rank0 on 4 workers (12 tensor, 6 data) -> " in err and "assumed: devices wait for their hosts" in err
    assert isinstance(legato.read(path), Program)
    return path


def test_the_step_as_traced_stands_beside_the_measured_and_the_predicted_one(program, capsys):
    status, out, err = run(capsys, "simulate", program, *FORMULAS)
    assert status == 0, err
    assert all(word in out for word in ("computing", "waiting for the host", "tensor", "data", "as traced", "step"))
    assert "the step as traced is off by 0.0%" in err and "hosts of 8 x h100: 400 Gbit/s a GPU" in err


def test_other_networks_and_more_workers_are_options(program, capsys):
    def found(*options):
        status, out, err = run(capsys, "simulate", program, *FORMULAS, "--json", *options)
        assert status == 0, err
        return json.loads(out)

    usual = found()
    assert usual["gpus"] == 4 and usual["as_traced"]["step_s"] == pytest.approx(usual["traced_s"])
    slow = found("--bandwidth", "1Gbit", "--gpus-per-host", 1)
    assert slow["predicted"]["step_s"] > usual["predicted"]["step_s"] and slow["as_traced"] == usual["as_traced"]
    assert found("--latency", "1us")["predicted"]["step_s"] < usual["predicted"]["step_s"]
    many = found("--workers", 64)
    assert many["gpus"] == 64 and many["as_traced"] is many["traced_s"] is None
    assert many["predicted"]["sent_nbytes"]["data"]["network"] > 0
    assert found("--workers", 4) == usual


def test_a_program_is_simulated_link_by_link(program, capsys):
    def step_s(*options):
        status, out, err = run(capsys, "simulate", program, "--json", "--bandwidth", "1Gbit", *options)
        assert status == 0, err
        return json.loads(out)["predicted"]["step_s"]

    apart = ("--gpus-per-host", 1)
    assert step_s(*apart) >= step_s(*apart, *FORMULAS) * (1 - 1e-9)
    assert step_s(*apart, "--disturb", "link:0:4:0") > step_s(*apart)
    assert step_s(*apart, "--racks", 2, "--oversubscription", 4) > step_s(*apart)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--fabric", "ring"], "--fabric: does not apply to a program"),
        (["--disturb", "link:4:2:0"], "link: 4 (expected 0 to 3)"),
        ([*FORMULAS, "--workers", 6], "workers: 6 (expected a multiple of the program's 4)"),
        ([*FORMULAS, "--racks", 2], "--racks: does not apply to --fidelity formulas (expected --fidelity flows)"),
    ],
)
def test_what_means_nothing_is_refused(program, capsys, options, message):
    status, out, err = run(capsys, "simulate", program, *options)
    assert (status, out) == (2, "") and message in err


def test_a_program_is_imported_from_kineto_alone(tmp_path, capsys):
    paths = MeshJob().write(tmp_path)
    out = tmp_path / "p.json"
    for options, message in (
        (["send-trace", *paths, "--program"], "--program does not apply to send-trace (expected kineto or chakra)"),
        (["kineto", *paths, "--program", "--rank", 1], "--rank does not apply to --program"),
        (["kineto", *paths[:3], "--program"], "traces of rank 3: missing (expected traces of all 4 ranks)"),
    ):
        status, _, err = run(capsys, "import", *options, "-o", out)
        assert status == 2 and message in err and not out.exists()
    status, text, err = run(capsys, "import", "kineto", *paths, "--program", "-o", out, "--json", "--idle", "drop")
    assert status == 0, err
    found = json.loads(text)
    assert (found["gpus"], found["num_communications"], found["kinds"]) == (4, 18, ["tensor", "data"])
