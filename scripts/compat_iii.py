"""Writes docs/compat/iii.md: what the iii sandbox document promises, the error codes, and the tests that hold atoll to it.

    python scripts/compat_iii.py            writes the page
    python scripts/compat_iii.py --check    says whether it is up to date

A promise is named in a test's name (`test_iii_Q1_...`); the table is made by looking for those names.
"""

import re
from pathlib import Path

import compat_page

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/compat/iii.md"
NAMED = re.compile(r"^\s*(?:async )?def (test_\w*iii_[QD]\d+\w*)", re.M)

PROMISES = {
    "Q1": "sixteen functions with exact ids",
    "Q2": "each is callable by `trigger`, with nothing but registration",
    "Q3": "request and response schemas are registered",
    "Q4": "switched on by an `iii-sandbox` entry of config.yaml",
    "Q5": "`run` boots, executes by `lang`, answers and destroys, also on failure",
    "Q6": "files and processes stay between calls on one id",
    "Q7": "one command at a time; a second one is S003 at once",
    "Q8": "a detached server frees the slot",
    "Q9": "`exec` is no shell",
    "Q10": "`list` shows what lives, `stop` destroys",
    "Q11": "ready within a few hundred milliseconds",
    "Q12": "an idle sandbox is reaped",
    "Q13": "the strongest isolation that works, and the answer says which",
    "Q14": "file changes vanish and are private",
    "Q15": "isolation that cannot boot is S300 with the reason",
    "Q16": "images are catalogue names; unknown is S100; an empty list denies all",
    "Q17": "`catalog::list` names what can be booted",
    "Q18": "`fs::write` takes exactly one body: text, base64 or a channel",
    "Q19": "chmod, grep and sed",
    "Q20": "`env` in both forms",
    "Q21": "every error is an envelope with a fix that works",
    "Q22": "local URLs of the boot environment point at the gateway",
    "D1": "no file of one sandbox is seen in the next",
    "D2": "no host port that was not named, no metadata service",
    "D3": "parallel creates stay below the limit",
    "D4": "output of a killed command, flags for cut output, binary output",
    "D5": "a background process does not hold the call",
    "D6": "grep survives links, pipes and unreadable files",
    "D7": "answers too large are cut and flagged",
    "D8": "large streams are identical; a stall is S218, never a partial file",
    "D9": "sed leaves unmatched files untouched",
    "D10": "chmod stays in its tree; mv works across mounts",
    "D11": "a bad environment is reported before any pull",
    "D12": "a cap with one key does not refuse everything",
    "D13": "a crash leaves nothing",
    "D14": "every error parses and has a code",
    "D15": "HOME is set and writable",
    "D16": "`wait: true` returns when the process is gone",
    "D17": "a fork bomb or disk fill is bounded",
}

HEAD = """# iii

The sixteen `sandbox::*` functions of the iii sandbox worker, on atoll's sandboxes. Three ways in:

    atoll fn sandbox::run '{"image": "python", "lang": "python", "code": "print(1)"}'
    curl --unix-socket ~/.atoll/daemon.sock http://atoll/functions/sandbox::list -d '{}'
    atoll iii worker --engine ws://127.0.0.1:49134 --config config.yaml      (pip install 'atoll[iii]')

`iii-worker sandbox-daemon --config FILE` is the same worker for an engine that starts its own; other words go to the program
named by `III_WORKER_STOCK`. A worker's sandboxes end with it. `GET /functions` has every schema. Without a worker the
settings are `iii.yaml` in `ATOLL_HOME`; `atoll iii config` prints an entry to start from.

## What differs from a plain reading

- `python` and `node` are this machine's own files where it has the program (`oci_ref` is then `host`), else the catalog's image;
  `create` names what was used in `image_used`.
- `network: true` reaches every public name, through the broker: no raw addresses, no UDP but DNS, nothing private.
- The gateway is a name, `host.atoll.internal`; only ports named by URLs of the boot environment answer there, 64 at most.
- Over REST a Ref cannot be used. `fs::read` answers `body`, else `content_b64`, else `content_url` for large files; a raw body
  goes to `PUT /functions/sandbox::fs::write?sandbox_id=&path=&mode=&parents=`.
- `timeout_ms: 0` is S200 without starting anything. `idle_timeout_secs: 0` is reaped after five seconds without use.
- `III_INSECURE_REGISTRIES` is the worker's while it is connected; without a worker it is that of whoever started the daemon.
- The limit of open files is 65536, or what the daemon itself may have where that is less.
- uid and gid of `chmod` go to 65534, the ids a sandbox has.
- Ids of ended sandboxes stay known (the last 1024), also over a restart of the daemon.

## Error codes

On the bus and over REST an error is `{"code": "invocation_failed", "message": ENVELOPE}`; `atoll fn` prints the envelope and exits 1.
If `fix` is an object, merge it into the request and send that again: the merged request is known to be a good one. An unknown image
gets the nearest name, a cap its limit, a pattern that does not compile its literal form. What would destroy something is never in it.
`run` answers with `sandbox_id` always; without `keep_sandbox` that sandbox has ended.

"""


def found_tests() -> dict[str, set[str]]:
    """Promise -> files that test it."""
    found: dict[str, set[str]] = {}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for match in NAMED.finditer(path.read_text()):
            for promise in re.findall(r"_([QD]\d+)(?=_|$)", match[1]):
                found.setdefault(promise, set()).add(str(path.relative_to(ROOT)))
    return found


def codes() -> str:
    from atoll.surfaces.iii.failure import CODES

    rows = ["| code | type | retry | note |", "|---|---|---|---|"]
    for code, row in CODES.items():
        retry = "yes" if row.retryable else "no"
        rows.append(f'| <a id="{code}"></a>{code} | {row.type} | {retry} | {row.note or "says what is wrong"} |')
    return "\n".join(rows) + "\n"


def main() -> int:
    head = HEAD + codes() + "\n## Promises and their tests\n\n| id | promise | tests |\n|---|---|---|\n"
    foot = "\nThis page is made by `scripts/compat_iii.py` from the names of the tests.\n"
    return compat_page.write(PAGE, head + compat_page.table(PROMISES, found_tests()) + foot, "scripts/compat_iii.py")


if __name__ == "__main__":
    raise SystemExit(main())
