"""RES-01: a fork bomb. It meets its limit, the neighbour works on, and the sandbox can be ended."""

from pathlib import Path

from lab.sandboxes import Lab, group_values, left, until

from atoll import errors


def test_a_bomb_stays_in_its_sandbox(lab: Lab, runtime: str) -> None:
    """`:(){ :|:& };:` at full speed; limits hold on the host's counters; destroy leaves no process."""
    with lab.sandbox(runtime=runtime) as neighbour:
        bomb = lab.create(runtime=runtime, pids=64)
        ident = bomb.id
        bomb.start(["bash", "-c", ":(){ :|:& };:; wait"])
        until(lambda: crowded(bomb), "the bomb has reached its limit")
        for _ in range(5):
            assert neighbour.exec("echo fine").stdout == "fine\n"
        assert lab.ask("GET", "/v1/health")[0] == 200
        bomb.destroy()
        assert not any(group_values(lab.mark, ident, "cgroup.procs"))
        until(lambda: not [p for p in left(lab.mark, lab.home)["groups"] if ident in p], "its groups are gone")
        bomb.close()
        assert neighbour.exec("echo still").stdout == "still\n"


def crowded(sandbox: object) -> bool:
    """Forks fail inside: even the host's own commands cannot be started there any more, or the list is long."""
    try:
        if len(sandbox.processes()) >= 40:  # type: ignore[attr-defined]
            return True
        return "Resource temporarily unavailable" in sandbox.exec("(:) & (:) & wait", timeout=5).stderr  # type: ignore[attr-defined]
    except errors.AtollError:
        return True


def test_without_the_limit_the_host_would_give_more() -> None:
    """Control: the machine itself allows far more than a sandbox's limit."""
    assert int(Path("/proc/sys/kernel/threads-max").read_text()) > 10_000
