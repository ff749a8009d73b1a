"""Writes docs/compat/agentkernel.md: what agentkernel's document promises, and the tests that hold atoll to it.

    python scripts/compat_agentkernel.py            writes the page
    python scripts/compat_agentkernel.py --check    says whether it is up to date

A promise is named in a test's name (`test_ak_P1_...`); the table is made by looking for those names.
"""

import re
from pathlib import Path

import compat_page

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/compat/agentkernel.md"
NAMED = re.compile(r"^\s*(?:async )?def (test_\w*ak_[PK]\d+\w*)", re.M)

PROMISES = {
    "P1": "`run CMD ARGS` executes in a fresh sandbox and prints its output",
    "P2": "argv reaches the sandbox unchanged, `sh -c 'a && b'` too",
    "P3": "the image is picked from the command",
    "P4": "`--image` beats detection",
    "P5": "nothing is left behind; `--keep` leaves `run-<id>`",
    "P6": "a kept sandbox can be entered and removed",
    "P7": "create, start, exec, stop, remove",
    "P8": "moderate by default: network, nothing of the host",
    "P9": "restrictive: no network, read-only, no capability",
    "P10": "permissive: network, working directory, home, environment",
    "P11": "`--no-network` wins over everything",
    "P12": "host files are invisible unless asked for",
    "P13": "the strongest runtime that works is used",
    "P14": "`--compatibility-mode` on run",
    "P15": "the mode in a project's file; a profile overrides it",
    "P16": "native: every public domain, no mount",
    "P17": "claude, codex, gemini: their API and registries only, project mounted",
    "P18": "metadata services are unreachable in every mode",
    "P19": "claude is the mode when its plugin drives the tool",
    "P20": "MCP on stdio with nine tools",
    "P21": "sandbox_run honours each of its arguments",
    "P22": "binary files come as base64",
    "P23": "the documented .mcp.json entry is enough",
    "P24": "reading changes nothing; no tool alters the host",
    "P25": "a warm pool with counts per agent",
    "P26": "warm runs are fast",
    "P27": "the pool is configurable",
    "K1": "quotes, spaces and `$` survive on every path",
    "K2": "exit codes and stderr are never lost",
    "K3": "no command corrupts or blocks the next",
    "K4": "two warm runs share nothing",
    "K5": "no-network and restrictive hold on every way in",
    "K6": "an accepted option is applied or refused",
    "K7": "limits, profile, mode and mounts are in force after create and start",
    "K8": "what was written before stop is there after start",
    "K9": "an explicit image is never replaced by a Dockerfile",
    "K10": "a recording replays with the same bytes",
    "K11": "hardening on every way in",
    "K12": "nothing in the working directory is trusted for being there",
    "K13": "a web page cannot call the HTTP server",
    "K14": "names and paths are validated everywhere",
    "K15": "a model cannot grant itself a permission",
    "K16": "`daemon stop` ends it and every instance",
    "K17": "a sandbox named `a` is not confused with `ab`",
    "K18": "concurrent creates and removes; stable order",
    "K19": "output arrives while the command runs",
    "K20": "truncation never splits a character",
    "K21": "speed figures time whole commands",
}

HEAD = """# agentkernel

The same program serves agentkernel's command line, HTTP interface and MCP tools; `atoll alias install agentkernel` gives
it that name, under which it prints text in the `sandbox` group, keeps to that document's paths and lets `run` reach every
public name. The published clients (`agentkernel-sdk` from PyPI, `agentkernel` from npm) work as they are against
`atoll serve --agentkernel`. Permissions: [policy.md](../policy.md).
This page is made by `scripts/compat_agentkernel.py` from the names of the tests.

## What differs, on purpose

- Exit codes: the command's own, 124 timeout, 125 atoll, 126 and 127 as a shell has them, 2 wrong usage.
- `run --keep` leaves the sandbox running for an hour (`--ttl`); `stop` keeps the file system.
- A failing command is HTTP 200 with `exit_code`. The published clients, known by their `User-Agent`, read nothing but `output`: they get
  the 500 of their own server, and `error` in a batch. `serve --legacy-exit-errors` answers everybody so.
- `sudo: true` changes nothing: commands are root of the sandbox already.
- An unknown field of a request, and an option this server does not have (volumes, secrets, source_url), is an error and never ignored.
- `permissive` and `native` over HTTP need `serve --allow-host-access`; there are no mounts over HTTP.
- Without a key only processes of the server's own user are served, known by the owner of their socket.
- Writable mounts keep hooks, editor and agent settings read-only.
- `run --publish` and `[network] ports` of a file that is named listen on 127.0.0.1, TCP only, while the run lasts.
- Templates, recordings and state live below `ATOLL_HOME`.

## Not here

Dockerfile builds (`--build`, `[build]`), volumes, `--source`, `--sudo`, ports of named sandboxes (`atoll sandbox expose`
gives them a URL) and over HTTP and MCP, `[daemon]` of a project's file (a warning says so). They are not offered, and refused
where a client sends them or a named file asks for them.

The pool is the operator's (`[pool]` of `config.toml`, `floor` and `ceiling`) and learns by itself what is used;
`daemon prewarm --mode M` wants sandboxes of a mode from the start. `daemon status` counts them per kind, not per agent: modes
that are isolated alike share theirs. A run that mounts the project is never served from it.

| id | promise | tests |
|---|---|---|
"""


def found_tests() -> dict[str, set[str]]:
    """Promise -> files that test it."""
    found: dict[str, set[str]] = {}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for match in NAMED.finditer(path.read_text()):
            for promise in re.findall(r"_([PK]\d+)(?=[a-z]?_|$)", match[1]):
                found.setdefault(promise, set()).add(str(path.relative_to(ROOT)))
    return found


def main() -> int:
    return compat_page.write(PAGE, HEAD + compat_page.table(PROMISES, found_tests()), "scripts/compat_agentkernel.py")


if __name__ == "__main__":
    raise SystemExit(main())
