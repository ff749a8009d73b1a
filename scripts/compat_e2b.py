"""Writes docs/compat/e2b.md: the methods of E2B's SDKs, and the tests that call each.

    python scripts/compat_e2b.py            writes the page
    python scripts/compat_e2b.py --check    says whether it is up to date

The table is made by looking for the calls in the tests: of the synchronous and the asynchronous Python SDK, and of the
JavaScript SDK.
"""

import re
from pathlib import Path

import compat_page

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/compat/e2b.md"
TESTS = ROOT / "tests/e2b"

# The name in Python, the name in JavaScript where it has the method, and a word about what differs.
METHODS = {
    "Sandbox": [
        ("create", "create", ""), ("connect", "connect", ""), ("list", "list", ""), ("get_info", "getInfo", ""),
        ("is_running", "isRunning", ""), ("set_timeout", "setTimeout", ""), ("get_metrics", "getMetrics", ""),
        ("pause", "pause", "memory stays in the machine; `keep_memory=False` keeps the disk alone"),
        ("update_network", "updateNetwork", "names only, or nothing"), ("kill", "kill", ""), ("get_host", "getHost", ""),
        ("download_url", "downloadUrl", ""), ("upload_url", "uploadUrl", ""), ("fork", "fork", "501"),
        ("create_snapshot", "createSnapshot", "of files; 501 with memory"), ("list_snapshots", "listSnapshots", ""),
        ("delete_snapshot", "", ""),
    ],
    "commands": [
        ("run", "run", ""), ("list", "list", ""), ("connect", "connect", ""), ("kill", "kill", ""),
        ("send_stdin", "sendStdin", ""), ("stream_input", "", ""), ("close_stdin", "closeStdin", ""),
    ],
    "files": [
        ("read", "read", ""), ("write", "write", "no metadata"), ("write_files", "writeFiles", ""), ("list", "list", ""),
        ("exists", "exists", ""), ("get_info", "getInfo", ""), ("make_dir", "makeDir", ""), ("rename", "rename", ""),
        ("remove", "remove", ""), ("watch_dir", "watchDir", ""),
    ],
    "code": [
        ("run_code", "runCode", ""), ("create_code_context", "createCodeContext", ""),
        ("list_code_contexts", "listCodeContexts", ""), ("restart_code_context", "restartCodeContext", ""),
        ("remove_code_context", "removeCodeContext", ""),
    ],
    "pty": [
        ("create", "create", ""), ("connect", "connect", ""), ("resize", "resize", ""), ("send_stdin", "sendInput", ""),
        ("stream_input", "", ""), ("kill", "kill", ""),
    ],
}  # fmt: skip

HEAD = """# E2B

`atoll serve --e2b` serves the stock SDKs: `e2b` 2.63.0 and
`e2b-code-interpreter` 2.11.5 from PyPI, `e2b` 2.51.0 and `@e2b/code-interpreter` 2.8.0 from npm, as they are. The decisions
behind it, what is refused and how: [e2b.md](../e2b.md). This page is made by `scripts/compat_e2b.py` from the calls in the
tests, which run on `container` and `gvisor`.

## What differs, on purpose

- Only loopback is listened on, in clear text; a server with TLS goes in front.
- Keys are atoll's, and their rate of calls counts on the control plane.
- Without a `network` a sandbox reaches the operator's list of hosts, not all of the internet.
- `pause()` freezes: memory stays in the machine and does not survive its reboot.
- There is no `sudo` inside; `user="root"` runs as root.
- Snapshots hold files (`mode="filesystem"`); with memory they are 501, as are forks, template builds, volumes and secrets.
- Metadata of files is refused.

| method | Python | asynchronous | JavaScript | differs |
|---|---|---|---|---|
"""


def called(text: str, holder: str, method: str) -> bool:
    """Return whether a text calls this method."""
    owners = {"Sandbox": r"(?:box|kept|same|Sandbox|AsyncSandbox)", "code": r"(?:code_)?box"}
    owner = owners.get(holder, rf"box\.{holder}")
    return bool(method) and re.search(rf"\b{owner}\.{method}\(", text) is not None


def cell(texts: dict[str, str], holder: str, method: str) -> str:
    found = [name for name, text in texts.items() if called(text, holder, method)]
    return ", ".join(f"[{name}](../../tests/e2b/{name})" for name in found) or ("none yet" if method else "-")


def page() -> str:
    read = {path.name: path.read_text() for path in sorted(TESTS.iterdir()) if path.suffix in (".py", ".mjs")}
    js = {name: text for name, text in read.items() if name.endswith(".mjs")}
    asynchronous = {name: text for name, text in read.items() if name.endswith("_async.py")}
    python = {
        name: text for name, text in read.items() if name.startswith("test_") and name not in (*asynchronous, *js)
    }
    rows = []
    for holder, methods in METHODS.items():
        for name, script, differs in methods:
            cells = cell(python, holder, name), cell(asynchronous, holder, name), cell(js, holder, script)
            rows.append(f"| `{holder}.{name}` | {' | '.join(cells)} | {differs} |")
    return HEAD + "\n".join(rows) + "\n"


def main() -> int:
    return compat_page.write(PAGE, page(), "scripts/compat_e2b.py")


if __name__ == "__main__":
    raise SystemExit(main())
