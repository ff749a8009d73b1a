"""`atoll doctor`: what works on this machine, what does not, why, and the command that fixes it.

Runtimes are judged by the daemon, which really starts a sandbox with each; the rest is looked at from here.
"""

from __future__ import annotations

from ..client import calls
from ..errors import AtollError
from .doctor_machine import Machine, check, machine_checks
from .output import print_json, safe, tell, write
from .session import open_link

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from .doctor_machine import Check
    from .grammar import Arguments


def doctor(arguments: Arguments) -> int:
    told = _through_daemon(arguments)  # first: a daemon that starts may find more than this session has
    checks = [*machine_checks(Machine()), *told]
    problems = _count(checks)
    if arguments.json:
        print_json({"ok": not problems, "problems": problems, "fixed": 0, "checks": checks})
    else:
        _tell_all(checks, problems)
    return 1 if problems else 0


def sandbox_doctor(arguments: Arguments) -> int:
    """K8E's doctor: the connection and the skill, and this machine too where the daemon is local."""
    from .connection_checks import connection_checks, repair
    from .tables import for_people

    checks, local = connection_checks(arguments)
    if local:
        told = _through_daemon(arguments)
        checks += [*machine_checks(Machine()), *told]
    fixed = repair(checks, really=arguments.fix)
    problems = _count(checks)
    if for_people(arguments):
        _tell_all(checks, problems)
    else:
        print_json({"ok": not problems, "problems": problems, "fixed": fixed, "checks": checks})
    return 1 if problems else 0


def _count(checks: list[Check]) -> int:
    return sum(1 for check in checks if not check["ok"] and not check.get("optional"))


def _tell_all(checks: list[Check], problems: int) -> None:
    from .tables import coloured

    for row in checks:
        mark = "ok" if row["ok"] else "note" if row.get("optional") else "FAIL"
        text = safe(f"  {row['name'].ljust(19)} {row['detail']}\n")
        write(1, (coloured(mark.ljust(4), mark) + text).encode("utf-8", "replace"))
        if row.get("fix"):
            tell(f"      {' ' * 19} fix: {row['fix']}")
    tell("\nEverything needed works." if not problems else f"\n{problems} problem(s).")


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
        checks.append(check(f"runtime {item.get('name')}", works, detail, fix, optional=optional))
        if item.get("works") and item.get("warning"):
            checks.append(check("version floor", False, str(item["warning"]), _floor_fix(item), optional=True))
    return checks


def _floor_fix(item: Mapping[str, object]) -> str:
    from ..backends.local.runtimes.version_floor import judge

    found = judge(str(item.get("engine", "")).partition("-")[0], str(item.get("version", "")))
    return found.fix if found else ""
