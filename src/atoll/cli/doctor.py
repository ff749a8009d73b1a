"""`atoll doctor`: what works on this machine, what does not, why, and the command that fixes it.

Runtimes are judged by the daemon, which really starts a sandbox with each; the rest is looked at from here.
"""

from __future__ import annotations

from ..client import calls
from ..errors import AtollError
from .doctor_causes import causes, public
from .doctor_fix import agreed, carry_out
from .doctor_machine import Machine, check, machine_checks
from .output import print_json, program_name, safe, tell, write
from .session import open_link

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from .doctor_fix import Done
    from .doctor_machine import Check
    from .grammar import Arguments


def doctor(arguments: Arguments) -> int:
    """Tell what works and what does not; with `--fix` do what is advised, after asking, and tell what is left."""
    machine = Machine()
    checks = _examine(arguments, machine)
    done: list[Done] = []
    fixed = 0
    if arguments.values.get("fix") and not all(one["ok"] for one in checks):
        before = causes(checks, machine)
        if agreed(before, yes=bool(arguments.values.get("yes"))):
            done = carry_out(before)
            checks = _examine(arguments, machine)
            still = {cause.run for cause in causes(checks, machine)}
            fixed = sum(1 for one in done if one["ok"] and one["command"] not in still)
    problems = _count(checks)
    if arguments.json:
        told = {"ok": not problems, "problems": problems, "fixed": fixed, "checks": public(checks)}
        left = [cause.as_json() for cause in causes(checks, machine)]
        print_json({**told, "causes": left, **({"done": done} if done else {})})
    else:
        _tell_all(checks, machine)
    return 1 if problems else 0


def _examine(arguments: Arguments, machine: Machine) -> list[Check]:
    """Return every check of this machine and of the daemon that serves it; one that starts may find more than this session has."""
    told = _through_daemon(arguments)
    served = any(row["name"] == "daemon" and row["ok"] for row in told)
    return [*machine_checks(machine, served=served), *told]


def sandbox_doctor(arguments: Arguments) -> int:
    """K8E's doctor: the connection and the skill, and this machine too where the daemon is local."""
    from .connection_checks import connection_checks, repair
    from .tables import for_people

    machine = Machine()
    checks, local = connection_checks(arguments)
    if local:
        checks += _examine(arguments, machine)
    fixed = repair(checks, really=arguments.fix)
    problems = _count(checks)
    if for_people(arguments):
        _tell_all(checks, machine)
    else:
        print_json({"ok": not problems, "problems": problems, "fixed": fixed, "checks": public(checks)})
    return 1 if problems else 0


def _count(checks: list[Check]) -> int:
    return sum(1 for check in checks if not check["ok"] and not check.get("optional"))


def _tell_all(checks: list[Check], machine: Machine) -> None:
    """Print a line for each cause, what helps most first, then a line for all that works."""
    found = causes(checks, machine)
    for cause in found:
        _tell_line("FAIL" if cause.needed else "note", ", ".join(cause.names), cause.detail)
        if cause.fix:
            tell(f"      {' ' * 19} fix: {cause.fix}")
    for row in checks:
        if row["ok"]:
            _tell_line("ok", row["name"], row["detail"])
    needed = sum(1 for cause in found if cause.needed)
    tell("\nEverything needed works." if not needed else f"\n{needed} problem(s).")
    if any(cause.run for cause in found):
        tell(f"{program_name()} doctor --fix does what it can of this, after asking.")


def _tell_line(mark: str, name: str, detail: str) -> None:
    from .tables import coloured

    text = safe(f"  {name.ljust(19)} {detail}\n")
    write(1, (coloured(mark.ljust(4), mark) + text).encode("utf-8", "replace"))


def _through_daemon(arguments: Arguments) -> list[Check]:
    try:
        link = open_link(arguments)
        health = link.call(calls.get("/v1/health"))
        answer = link.call(calls.get("/v1/runtimes"))
        egress = link.call(calls.get("/v1/egress"))
    except AtollError as error:
        return [check("daemon", False, error.message, error.hint or "atoll daemon start")]
    checks = [check("daemon", True, f"pid {health.get('pid')}, version {health.get('version')}")]
    detail = "allow lists are enforced" if egress.get("works") else f"no network: {egress.get('why')}"
    checks.append(check("egress", bool(egress.get("works")), detail, str(egress.get("fix") or ""), optional=True))
    runtimes = answer.get("runtimes") if isinstance(answer, dict) else answer
    return [*checks, *_runtimes(runtimes or [])]


def _runtimes(runtimes: list[Mapping[str, object]]) -> list[Check]:
    """A row for each runtime. When none works, that is one problem: the one that most machines can have says how to mend it."""
    checks: list[Check] = []
    working = any(item.get("works") for item in runtimes)
    if not working:
        first = next((item for item in runtimes if not item.get("optional", True)), runtimes[0] if runtimes else {})
        why = f"{first.get('name')}: {first.get('why') or 'does not work'}" if first else "the daemon knows none"
        checks.append(check("runtimes", False, f"none works here; {why}", str(first.get("fix") or "")))
    for item in runtimes:
        works, fix = bool(item.get("works")), str(item.get("fix") or "")
        said = [str(item.get("version") or "works")] if works else []
        detail = "; ".join(filter(None, [*said, str(item.get("why") or "")])) or "does not work"
        optional = bool(item.get("optional", True)) or not working
        row = check(f"runtime {item.get('name')}", works, detail, fix, optional=optional)
        if not works and item.get("why") == "not installed":
            _advise_install(row)
        checks.append(row)
        if item.get("works") and item.get("warning"):
            checks.append(check("version floor", False, str(item["warning"]), _floor_fix(item), optional=True))
    return checks


def _advise_install(row: Check) -> None:
    """Give a runtime's row the remedy that the row of its engine has, so that both are one cause."""
    from .doctor_machine import programs

    engine = row["name"].removeprefix("runtime ") + " engine"
    same = next((one for one in programs(Machine()) if one["name"] == engine and not one["ok"]), None)
    if same is None:  # this session finds it and the daemon does not
        return
    row.update({key: same[key] for key in ("fix", "_run", "_packages") if key in same})  # type: ignore[typeddict-item]


def _floor_fix(item: Mapping[str, object]) -> str:
    from ..backends.local.runtimes.version_floor import judge

    found = judge(str(item.get("engine", "")).partition("-")[0], str(item.get("version", "")))
    return found.fix if found else ""
