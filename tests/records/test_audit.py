"""The audit log detects every kind of tampering and survives a crash."""

import json
from pathlib import Path

from atoll.core.access.audit import Audit, verify


def filled(directory: Path, count: int = 5) -> Path:
    log = Audit(directory)
    for i in range(count):
        log.record("uid:0", "exec", f"box{i}", argv=["echo", str(i)])
    log.close()
    return directory / "audit.jsonl"


def test_a_chain_holds_and_goes_on_after_a_restart(tmp_path: Path) -> None:
    filled(tmp_path)
    filled(tmp_path, 3)
    assert verify(tmp_path) == (True, 8, "")


def test_an_edit_is_found(tmp_path: Path) -> None:
    path = filled(tmp_path)
    path.write_text(path.read_text().replace('"box2"', '"box9"'))
    verdict = verify(tmp_path)
    assert not verdict.ok and "record 3 was changed" in verdict.problem


def test_a_removed_line_is_found(tmp_path: Path) -> None:
    path = filled(tmp_path)
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:2] + lines[3:]))
    assert not verify(tmp_path).ok


def test_a_cut_at_the_end_is_found(tmp_path: Path) -> None:
    path = filled(tmp_path)
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:-1]))
    assert "ends at record 4, but 5" in verify(tmp_path).problem


def test_newlines_in_what_callers_say_cannot_forge_a_record(tmp_path: Path) -> None:
    log = Audit(tmp_path)
    log.record("uid:0", "exec", "box", command='x"}}\n{"hash":"0","record":{"seq":99}}\n')
    log.close()
    assert len((tmp_path / "audit.jsonl").read_text().splitlines()) == 1
    assert verify(tmp_path) == (True, 1, "")


def test_half_a_line_of_a_crash_is_dropped_and_the_chain_goes_on(tmp_path: Path) -> None:
    path = filled(tmp_path)
    with open(path, "a") as file:
        file.write('{"hash":"ab')
    log = Audit(tmp_path)
    log.record("uid:0", "destroy", "box1")
    log.close()
    assert verify(tmp_path).ok
    assert [r["action"] for r in Audit(tmp_path).read(sandbox="box1")] == ["exec", "destroy"]


def test_rotation_keeps_the_chain(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("atoll.core.access.audit._ROTATE_BYTES", 500)
    filled(tmp_path, 20)
    assert len(list(tmp_path.glob("audit.*.jsonl"))) > 2
    assert verify(tmp_path) == (True, 20, "")
    segment = next(iter(tmp_path.glob("audit.*.jsonl")))
    first = json.loads(segment.read_text().splitlines()[0])
    assert len(first["hash"]) == 64


def test_the_oldest_part_goes_and_the_rest_stays_verifiable(tmp_path: Path, monkeypatch) -> None:
    """Beyond its cap the log loses whole segments; a record vouches for that, and without it the loss shows."""
    monkeypatch.setattr("atoll.core.access.audit._ROTATE_BYTES", 2000)
    log = Audit(tmp_path, keep=6000)
    for number in range(100):
        log.record("uid:0", "exec", f"box{number}")
    log.close()
    assert sum(path.stat().st_size for path in tmp_path.glob("audit*.jsonl")) < 12_000
    verdict = verify(tmp_path)
    assert verdict.ok and verdict.records > 100, verdict
    again = Audit(tmp_path, keep=6000)
    again.record("uid:0", "exec", "later")
    again.close()
    assert verify(tmp_path).ok
    oldest = min(tmp_path.glob("audit.*.jsonl"), key=lambda path: int(path.name.split(".")[1]))
    last = json.loads(oldest.read_text().splitlines()[-1])
    oldest.unlink()
    (tmp_path / "audit.anchor").write_text(f"{last['record']['seq']} {last['hash']}\n")  # as one would who hides it
    assert "no record says" in verify(tmp_path).problem


def test_a_record_is_bounded_whatever_its_caller_sends(tmp_path: Path) -> None:
    log = Audit(tmp_path)
    log.record("uid:0", "exec", "box", argv=["é" * 500] * 64, **{f"k{n}" * 100: "x" * 5000 for n in range(200)})
    log.close()
    line = (tmp_path / "audit.jsonl").read_text()
    assert len(line) < 4096 and len(json.loads(line)["record"]["details"]["cut"]["sha256"]) == 64
    assert verify(tmp_path).ok
