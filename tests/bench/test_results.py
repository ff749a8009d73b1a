"""The benchmark's own arithmetic: what a round counts for, how goals are judged, and what people get to see of it."""

import shutil
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from lab.sandboxes import Lab

from bench import backtoback, chart, oneshot, programs, report, results, work
from bench.__main__ import wanted
from bench.measure import Contender, Goal, absent, figure_of, middle, race, worst_percent
from bench.rows import PLANS


def made(*rows: results.Row) -> results.Results:
    return results.Results(at="today", seconds=61.0, machine={"system": "Linux"}, rows=list(rows))


def row(unit: str, figures: dict[str, list[float]], goals: dict[str, Goal]) -> results.Row:
    contenders = [Contender(name, lambda: None, figures=list(values)) for name, values in figures.items()]
    return results.row_of("a-row", "a row", unit, contenders, goals)


def test_times_and_rates_have_their_bad_end_on_the_other_side() -> None:
    figures = [float(n) for n in range(1, 102)]
    assert middle(figures) == 51
    assert worst_percent(figures, "ms") == 100
    assert worst_percent(figures, "MB/s") == 2


def test_ak_K21_a_command_that_fails_is_no_figure(lab: Lab) -> None:
    """What is timed is a whole command with its exit status: of one that failed there is an error and no time."""
    if why := lab.works("container"):
        pytest.skip(f"container: {why}")
    good, bad = (
        Contender(code, partial(oneshot._atoll, lab, "container", code, "bash")) for code in ("exit 0", "exit 3")
    )
    shell, none = (Contender(code, programs.bare(["/bin/sh", "-c", code])) for code in ("exit 0", "exit 3"))
    race([good, bad, shell, none], 2, "ms", 0, warm_up=False, say=lambda text: None)
    assert [len(one.figures) for one in (good, bad, shell, none)] == [2, 0, 2, 0]
    assert not good.failures and not shell.failures
    assert all("exit 3" in text for text in (*bad.failures, *none.failures))


def test_a_figure_is_the_time_unless_the_work_gave_one() -> None:
    assert figure_of("ms", 0, 0.25, None) == 250
    assert figure_of("ms", 0, 9.0, 0.5) == 500
    assert figure_of("MB/s", 4_000_000, 2.0, None) == 2
    assert figure_of("%", 0, 2.0, 1.5) == 1.5
    assert figure_of("ms", 0, 0.25, True) == 250
    with pytest.raises(ValueError, match="return its figure"):
        figure_of("%", 0, 2.0, None)


def test_a_series_of_calls_counts_each_of_its_last() -> None:
    calls = iter(range(1, 11))
    asked = Contender("series", partial(backtoback.series, lambda: next(calls), 10, 4))
    race([asked], 1, "ms", 0, warm_up=False, say=lambda text: None)
    assert not asked.failures and len(asked.figures) == 4 and next(calls, None) is None


def test_real_work_finds_the_same_files_each_time_and_says_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every task twice over, on the bare host: what one leaves does not make the next one fail."""
    for name, count in (("FEW", 100), ("MANY", 100), ("SOURCES", 2)):
        monkeypatch.setattr(work, name, count)
    place = work._bare(SimpleNamespace(work=tmp_path), work._archive(tmp_path / "work.tar"))  # type: ignore[arg-type]
    for task in work.TASKS.values():
        if shutil.which(task.needs) is None or task.module:
            continue
        for _ in range(2):
            place(task.before or ":")
            place(task.script)
    assert len(list((tmp_path / "work-bare" / "clone").rglob("*.txt"))) == 1000 or shutil.which("git") is None
    with pytest.raises(RuntimeError, match="exit 7"):
        place("exit 7")


@pytest.mark.parametrize(
    ("goal", "figure", "met"),
    [
        (Goal("ratio", 2), 20.0, True), (Goal("ratio", 2), 20.1, False),
        (Goal("times", 2), 20.0, True), (Goal("times", 2), 19.9, False),
        (Goal("most", 5), 5.0, True), (Goal("most", 5), 6.0, False),
        (Goal("least", 5), 5.0, True), (Goal("least", 5), 4.0, False),
        (Goal("extra", 1), 11.0, True), (Goal("extra", 1), 12.0, False),
    ],
)  # fmt: skip
def test_goals(goal: Goal, figure: float, met: bool) -> None:
    found = row("ms", {"bare": [10.0], "atoll": [figure]}, {"atoll": goal})
    assert found.figures[1].met is met
    assert ("MISSED" in report.table(made(found))) is not met


def test_a_goal_with_a_failure_or_without_a_figure_is_missed() -> None:
    ran, broke = Contender("atoll", lambda: None, figures=[1.0], failures=["OSError: once"]), absent("other", "gone")
    found = results.row_of("r", "r", "ms", [ran, broke], {"atoll": Goal("most", 5), "other": Goal("most", 5)})
    assert [figure.met for figure in found.figures] == [False, False]
    assert "not run: gone" in report.table(made(found))


def test_without_a_baseline_there_is_no_ratio_and_its_goal_stays_open() -> None:
    contenders = [absent("podman run", "podman is not installed"), Contender("atoll", lambda: None, figures=[3.0])]
    found = results.row_of("r", "r", "ms", contenders, {"atoll": Goal("ratio", 2)})
    assert (found.figures[1].ratio, found.figures[1].met) == (None, None)
    assert "podman is not installed" in report.table(made(found)) and ": open" in report.table(made(found))


def test_contenders_take_turns_and_a_broken_one_is_left_out_after_three() -> None:
    order: list[str] = []

    def broken() -> None:
        order.append("b")
        raise OSError("no")

    a, b = Contender("a", lambda: order.append("a")), Contender("b", broken)
    race([a, b, absent("c", "not here")], 4, "ms", 0, say=lambda _: None)
    assert order == ["a", "b", "a", "b", "b", "a", "a", "a"]
    assert len(a.figures) == 4 and b.figures == [] and b.excuse == "failed: OSError: no"


def test_results_survive_the_file_and_fill_the_page(tmp_path: Path) -> None:
    found = made(row("ms", {"bare": [1.0, 2.0], "atoll <x>": [3.0, 5.0]}, {"atoll <x>": Goal("ratio", 4)}))
    results.save(found, tmp_path / "deep" / "results.json")
    again = results.load(tmp_path / "deep" / "results.json")
    assert again == found
    page = tmp_path / "page.md"
    page.write_text(f"before\n{report.BEGIN}\nold\n{report.END}\nafter\n")
    for _ in range(2):
        report.document(again, page)
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith("after\n") and "old" not in text
    assert "| atoll <x> | 4 ms | 5 ms | 2.67 | at most 4 x: met |" in text
    drawn = chart.chart(again)
    assert "atoll &lt;x&gt;" in drawn and drawn.startswith("<svg")
    page.write_text("nothing")
    with pytest.raises(ValueError, match="no place"):
        report.document(again, page)


def test_rows_are_declared_once_and_found_by_word_or_glob() -> None:
    idents = [plan.id for plan in PLANS]
    assert len(set(idents)) == len(idents)
    assert wanted("create-gvisor", "") and wanted("create-gvisor", "gvisor") and wanted("create-gvisor", "c*r,burst")
    assert not wanted("create-gvisor", "container")
