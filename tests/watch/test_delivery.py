"""How traces come to rank 0: threads of one process stand for ranks, and a store without a server for the job's."""

import gzip
import re
import sys

import pytest
import torch.distributed as dist

from legato.core.errors import LegatoError
from legato.watch import Settings, delivery
from legato.watch.delivery import Delivery


@pytest.fixture
def said(monkeypatch):
    lines = []
    monkeypatch.setattr(delivery, "say", lines.append)
    return lines


def ranks_of(count, monkeypatch, tmp_path, judge=lambda self, traces: "verdict"):
    """The deliveries of all ranks; traces are what each rank's number says, repeated."""
    monkeypatch.setattr(Delivery, "_judged", judge)
    monkeypatch.setattr(delivery, "_PIECE_BYTES", 100)
    store = dist.FileStore(str(tmp_path / "store"), count)
    made = [
        Delivery(Settings(output=str(tmp_path)), rank, range(count), count, 12, store, None) for rank in range(count)
    ]
    for rank, one in enumerate(made):
        one.trace.write_text("".join(str((rank + 7) * k**3) for k in range(1000)))
    return made


def deliver(made):
    for one in made:
        one.start()
    for one in made:
        one.join()


def test_rank_0_gets_what_all_ranks_have_saved_and_nothing_is_left(said, monkeypatch, tmp_path):
    made = ranks_of(3, monkeypatch, tmp_path)
    texts = [one.trace.read_text() for one in made]
    deliver(made)
    for rank, text in enumerate(texts):
        assert gzip.decompress((tmp_path / "step-16" / f"rank{rank}.json.gz").read_bytes()).decode() == text
        assert not made[rank].folder.exists()
    assert said == ["steps 13 to 16, recorded on 3 of 3 ranks\nverdict"]


def test_ranks_without_a_trace_say_why(said, monkeypatch, tmp_path):
    made = ranks_of(4, monkeypatch, tmp_path)
    made[1].problem = made[2].problem = "the script profiles itself"
    deliver(made)
    assert said == [
        "no trace of rank 1, 2: the script profiles itself",
        "steps 13 to 16, recorded on 2 of 4 ranks\nverdict",
    ]


def test_without_any_trace_there_is_no_verdict(said, monkeypatch, tmp_path):
    made = ranks_of(2, monkeypatch, tmp_path)
    for one in made:
        one.problem = "the script profiles itself"
    deliver(made)
    assert said == ["no verdict: the script profiles itself"] and made[0].lacking


def test_a_rank_that_is_not_there_is_not_waited_for_without_end(said, monkeypatch, tmp_path):
    monkeypatch.setattr(delivery, "_TRACE_S", 1.0)
    made = ranks_of(2, monkeypatch, tmp_path)
    (tmp_path / "step-16").mkdir()
    (tmp_path / "step-16" / "rank1.json.gz").write_bytes(b"of a run before")
    monkeypatch.setattr(Delivery, "_packed", lambda self: self.trace)
    deliver(made[:1])
    assert said == [
        "no trace of rank 1: nothing arrived within 1 s",
        "steps 13 to 16, recorded on 1 of 2 ranks\nverdict",
    ]
    assert not (tmp_path / "step-16" / "rank1.json.gz").exists()
    made[1].drop()


def test_ranks_wait_no_longer_when_rank_0_takes_nothing_more(said, monkeypatch, tmp_path):
    made = ranks_of(2, monkeypatch, tmp_path)
    made[0].drop()
    deliver(made[1:])
    assert said == []


def test_traces_have_a_limit(said, monkeypatch, tmp_path):
    monkeypatch.setattr(delivery, "_MOST_BYTES", 1000)
    made = ranks_of(2, monkeypatch, tmp_path)
    made[0].trace.write_text("{}")
    deliver(made)
    assert re.fullmatch(r"no trace of rank 1: a trace of [\d.]+ KiB \(expected 1000 B: fewer --steps\)", said[0])


def test_a_full_disk_is_a_line(said, monkeypatch, tmp_path):
    made = ranks_of(2, monkeypatch, tmp_path)
    (tmp_path / "step-16").write_text("no folder can be made here, as on a full disk")
    deliver(made)
    assert len(said) == 1 and said[0].startswith("no verdict: FileExistsError:")


def test_what_the_judge_refuses_is_a_line(said, monkeypatch, tmp_path):
    (made,) = ranks_of(1, monkeypatch, tmp_path, Delivery._judged)
    deliver([made])
    assert len(said) == 1 and re.match(r"no verdict: .*rank0.json.gz: ", said[0])


def test_what_is_waited_for_ends_with_the_script(said, monkeypatch, tmp_path):
    made = ranks_of(2, monkeypatch, tmp_path)
    made[0].start()
    made[0].cancelled.set()
    made[0].join()
    assert "the script ended before the verdict" in said[0]
    made[1].drop()


def test_a_process_that_hangs_is_ended(said, monkeypatch, tmp_path):
    (made,) = ranks_of(1, monkeypatch, tmp_path)
    with pytest.raises(LegatoError, match="within 1 s"):
        made._process(["-c", "while True: pass"], 1.0)
    made.drop()
    assert sys.executable
