"""The behaviour and threat tests once more, by an ordinary user: pytest, the SDK, the command line and the daemon are all theirs.

Once with subordinate ids and control groups of the user's own, where every limit holds; once with neither, where what cannot be
held is said. What an ordinary user's sandboxes do differently is in SECURITY.md; a test that cannot run for one is named here.
"""

import os
import shutil
import xml.etree.ElementTree as xml
from collections.abc import Iterator
from pathlib import Path

import pytest
from lab.rootless import PATIENCE, User, delegated, ordinary_user
from lab.sandboxes import LONG

TESTS = Path(__file__).parents[1]
SUITES = ["behaviour", *(f"threats/{kind}" for kind in ("escape", "files", "resources", "lifecycle"))]
FOR_ROOT = {  # those who become another user for it, or have the daemon's parts in their own process
    "test_k8e_D15_another_user_sees_nothing": "tests/rootless/test_ordinary_user.py has it",
    **dict.fromkeys(
        (
            "test_distro_5_a_disk_the_host_unmounts_is_free",
            "test_distro_5_what_the_host_mounts_later_stays_outside",
            "test_distro_6_a_group_with_others_in_it_is_refused",
            "test_no_more_is_promised_than_there_is",
            "test_the_account_outlives_the_daemon",
            "test_kept_output_has_a_cap",
            "test_a_refused_call_writes_little",
            "test_everything_ends_on_a_full_disk",
            "test_deadlines_hold_on_a_full_disk",
            "test_a_daemon_starts_on_a_full_disk_and_ends_things",
            "test_nothing_acknowledged_is_lost",
        ),
        "mounts disks or gives files away",
    ),
    **dict.fromkeys(
        (
            "test_everyday_22_programs_see_their_limits",
            "test_everyday_22_java_sees_the_limits",
            "test_everyday_22_control_groups_tell_the_limits",
            "test_sandboxes_spread_over_the_processors",
        ),
        "without control groups no limit is held; Java wants v2 or root's groups",
    ),
    **dict.fromkeys(
        ("test_everyday_24_host_image_tools_for_users_work", "test_everyday_29_file_operations_as_a_user"),
        "several users need subordinate ids",
    ),
    **dict.fromkeys(
        (
            "test_planted_files_have_no_effect",
            "test_such_an_image_does_not_start",
            "test_links_go_only_when_no_process_is_left",
        ),
        "below, in a namespace",
    ),
}
THE_SAME = {  # run once, as root, and here in the long run: nothing in them depends on who the daemon belongs to
    **dict.fromkeys(
        (
            "test_k8e_D03_nothing_runs_twice",
            "test_k8e_D05_bytes_pass_intact",
            "test_k8e_D06_long_commands",
            "test_k8e_D09_blank_lines_survive",
            "test_k8e_D26_ak_K1_words_arrive_literally",
            "test_everyday_23_a_long_shell_line_keeps_its_lines",
            "test_everyday_23_a_shell_line_of_any_length_to_two_mebibytes",
            "test_everyday_23_arguments_of_nearly_two_mebibytes",
            "test_everyday_29_merged_stderr_is_in_true_order",
            "test_everyday_23_the_stdin_limit_counts_bytes",
            "test_everyday_20_async_close_of_a_terminal_that_is_being_read",
            "test_everyday_20_close_of_a_terminal_that_is_being_read",
            "test_everyday_30_a_terminal_without_echo",
            "test_everyday_30_bad_terminals",
            "test_everyday_30_what_is_no_longer_kept_is_told",
            "test_decoded_exactly_once",
            "test_a_slow_reader_gets_every_byte",
        ),
        "bytes between caller and agent: the same programs on both sides",
    ),
    **dict.fromkeys(
        (
            "test_k8e_D13_headers_in_pieces",
            "test_a_head_that_does_not_come_is_cut",
            "test_bodies_that_trickle_and_answers_nobody_takes_are_cut",
            "test_giant_and_deep_bodies_are_refused",
            "test_slow_requests_delay_nobody",
            "test_unknown_fields_are_refused",
            "test_listings_errors_and_logs_are_plain",
            "test_raw_is_raw_when_asked",
        ),
        "the daemon's HTTP and the command line's output",
    ),
    **dict.fromkeys(
        (
            "test_distro_1_the_id_map_is_written_line_by_line",
            "test_distro_3_the_state_of_each_engine_is_read",
            "test_an_old_kernel_is_below_the_floor",
            "test_each_wrong_setting_is_flagged",
            "test_what_is_safe_is_not_flagged",
            "test_host_packages_evaluate_nothing",
            "test_the_check_finds_what_it_looks_for",
        ),
        "no sandbox: they read the source or files made up for them",
    ),
}
IN_A_NAMESPACE = [
    "threats/escape/test_config_injection.py::test_planted_files_have_no_effect",
    "threats/escape/test_image_dev_symlink.py",
    "threats/lifecycle/test_teardown_order.py",
    "threats/egress/test_real_sandbox.py",
]
ON_GVISOR = [
    "threats/escape",
    *(f"threats/files/test_{name}.py" for name in ("symlink", "magic_links")),
    *(f"threats/resources/test_{name}.py" for name in ("forkbomb", "memory", "fds", "process_tree", "boot_log")),
]
SOME = "not gvisor and not relative and not nested"


@pytest.fixture(scope="module")
def tests(code: tuple[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The tests where an ordinary user can read them."""
    place = Path(f"/var/tmp/atoll-tests-{os.getpid()}-{os.urandom(4).hex()}")
    try:
        shutil.copytree(TESTS, place / "tests", ignore=shutil.ignore_patterns("node_modules"))
        shutil.copy(TESTS.parent / "pyproject.toml", place)
        place.chmod(0o755)
        yield place
    finally:
        shutil.rmtree(place, ignore_errors=True)


def outcome(
    user: User,
    tests: Path,
    suites: list[str],
    group: str | None,
    within: tuple[str, ...] = (),
    runtime: str = "container",
) -> dict[str, tuple[str, str]]:
    """How each test of the suite went for that user: passed, skipped, failed, and why."""
    report = user.home / "report.xml"
    report.unlink(missing_ok=True)
    place, images = user.home / "t", user.home / "images"
    for directory in (place, images):
        directory.mkdir(exist_ok=True)
        os.chown(directory, user.uid, user.uid)
    chosen = [SOME if within else runtime if runtime == "gvisor" else ""]
    chosen += [f"not {name}" for name in ([] if LONG else THE_SAME)]
    passed_on = {k: v for k, v in os.environ.items() if k in ("ATOLL_TEST_PATIENCE", "ATOLL_TEST_LONG")}
    done = user.run(
        *(*within, user.python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *(f"tests/{suite}" for suite in suites)),
        *(f"--junitxml={report}", "-k", " and ".join(filter(None, chosen))),
        env={
            "TMPDIR": str(place), "ATOLL_TEST_IMAGES": str(images), "PYTHONDONTWRITEBYTECODE": "1",
            "ATOLL_TEST_RUNTIMES": runtime, **passed_on, **({"ATOLL_TEST_DELEGATED": group} if group else {}),
        },
        cwd=tests, group=group, timeout=20 * PATIENCE,
    )  # fmt: skip
    assert report.exists(), done.stdout[-3000:] + done.stderr[-3000:]
    found = {}
    for case in xml.parse(report).getroot().iter("testcase"):
        kind, why = "passed", ""
        for child in case:
            if child.tag in ("failure", "error", "skipped"):
                kind = "skipped" if child.tag == "skipped" else "failed"
                why = str(child.get("message", "")) if kind == "skipped" else str(child.text)[-3000:]
        found[f"{case.get('classname')}::{case.get('name')}"] = (kind, why)
    return found


def judge(found: dict[str, tuple[str, str]]) -> None:
    failed = {name: why for name, (kind, why) in found.items() if kind == "failed"}
    assert not failed, "\n\n".join(f"{name}\n{why}" for name, why in failed.items())
    skipped = {
        name.rpartition("::")[2].partition("[")[0]: why for name, (kind, why) in found.items() if kind == "skipped"
    }
    assert set(skipped) <= set(FOR_ROOT), skipped
    assert [kind for kind, _ in found.values()].count("passed") >= 5


def test_what_is_left_out_exists() -> None:
    """A test that was renamed would be run, or skipped, unnoticed."""
    text = "".join(path.read_text() for path in (TESTS / "behaviour").glob("*.py"))
    text += "".join(path.read_text() for path in (TESTS / "threats").glob("*/*.py"))
    assert not [name for name in (*FOR_ROOT, *THE_SAME) if f"def {name}(" not in text]


@pytest.fixture(scope="module")
def well_off(code: tuple[str, str]) -> Iterator[tuple[User, str]]:
    with ordinary_user(code, many_ids=True) as user, delegated(user) as group:
        yield user, group


@pytest.mark.parametrize("suite", SUITES)
def test_with_ids_and_groups(well_off: tuple[User, str], tests: Path, suite: str) -> None:
    """Everything holds as it does for root."""
    judge(outcome(well_off[0], tests, [suite], well_off[1]))


@pytest.mark.skipif(not shutil.which("runsc"), reason="no runsc")
def test_on_gvisor(well_off: tuple[User, str], tests: Path) -> None:
    """The rows of escape and resources whose wall is gVisor's, which an ordinary user starts like root does."""
    judge(outcome(well_off[0], tests, ON_GVISOR, well_off[1], runtime="gvisor"))


def test_with_the_backend_in_the_test(well_off: tuple[User, str], tests: Path) -> None:
    """Those that need the daemon's parts or a test internet at hand, as root of namespaces like the daemon's."""
    within = ("unshare", "--user", "--mount", "--net", "--map-root-user", "--map-auto")
    found = outcome(well_off[0], tests, IN_A_NAMESPACE, well_off[1], within)
    judge(found)
    assert all(kind == "passed" for kind, _ in found.values()), found


@pytest.fixture(scope="module")
def bare(code: tuple[str, str]) -> Iterator[User]:
    with ordinary_user(code, many_ids=False) as user:
        yield user


def test_with_nothing_given(bare: User, tests: Path) -> None:
    """One id, no control groups: sandboxes behave the same, and pausing, which needs a group, is refused with a reason."""
    judge(outcome(bare, tests, ["behaviour"], None))
