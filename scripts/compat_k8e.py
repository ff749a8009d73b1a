"""Writes docs/compat/k8e.md: what K8E's documents promise, and the tests that hold atoll to it.

    python scripts/compat_k8e.py            writes the page
    python scripts/compat_k8e.py --check    says whether it is up to date

A promise is named in a test's name (`test_k8e_P01_...`); the table is made by looking for those names.
"""

import re
from pathlib import Path

import compat_page

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/compat/k8e.md"
NAMED = re.compile(
    r"^\s*(?:async )?def (test_\w*k8e_[PD]\d\d\w*)|^\s*(?:test|it)\(\s*[\"'`]([^\"'`]*k8e_[PD]\d\d[^\"'`]*)", re.M
)

PROMISES = {
    "P01": "`run` needs no set-up and answers with stdout, stderr, exit code and session",
    "P02": "bash unless `--lang` says python, node or ts",
    "P03": "code from the argument, else from stdin",
    "P04": "one line or many, in every language",
    "P05": "the exit status of `run` is the command's",
    "P06": "`--raw` shows output while it is produced",
    "P07": "30 s by default, `--timeout` is kept",
    "P08": "a session keeps files and packages",
    "P09": "two runs share the automatic session",
    "P10": "a tenant's session is found by another process",
    "P11": "manual sessions leave no state file",
    "P12": "a lost automatic session is replaced",
    "P13": "a workspace ends with its session; CPU and memory are capped",
    "P14": "write, append, read, list since",
    "P15": "a manifest or a git repository fills the workspace",
    "P16": "snapshot save, list, restore",
    "P17": "five hosts by default, no other",
    "P18": "a list at create replaces them, per session",
    "P19": "enforced outside the sandbox",
    "P20": "scenario: quick run",
    "P21": "scenario: install, then import",
    "P22": "scenario: script and data in, result out",
    "P23": "scenario: runtime and hosts chosen at create",
    "P24": "scenario: sub-agents share the workspace, one level deep",
    "P25": "scenario: confirm waits for approve",
    "P26": "exit codes: 2 unreachable, 1 refused, else the command's",
    "P27": "every error has `error`, `detail` and `ok: false`",
    "P28": "runtimes by name, or a clear error",
    "P29": "boot times, measured",
    "P30": "a warm claim to the first result under 500 ms",
    "P31": "an SDK call costs 1 to 5 ms",
    "P32": "local gateway found over TLS; endpoint and CA by environment",
    "P33": "a CLI for each platform",
    "P34": "one command to install",
    "P35": "skills for every agent",
    "P36": "the skill's header",
    "P37": "English triggers",
    "P38": "Chinese triggers",
    "P39": "the skill's rules",
    "P40": "MCP on stdio and HTTP",
    "P41": "MCP over HTTP: session event, answers twice, pings",
    "P42": "MCP client entry",
    "P43": "twelve MCP tools",
    "P44": "Python: generated stubs and `SandboxClient`",
    "P45": "Python: the documents' examples",
    "P46": "TypeScript: the same",
    "P47": "cluster: gateways, controller, agent-sandbox objects",
    "P48": "cluster: runtimes detected",
    "P49": "cluster: kubectl shows it",
    "P50": "cluster: workers join",
    "P51": "cluster: versions",
    "P52": "`make && make test`, reports, licence",
    "D01": "exit codes reach the caller in every mode",
    "D02": "timeouts hold, kill the tree and keep the output",
    "D03": "nothing runs twice",
    "D04": "floods of output never deadlock",
    "D05": "bytes pass intact",
    "D06": "long commands run",
    "D07": "file errors are typed",
    "D08": "process lists and watches under load",
    "D09": "blank lines survive, streams stay apart",
    "D10": "a child that holds stdout does not delay; a missing workdir is an error",
    "D11": "HOME, LANG, TERM, PATH",
    "D12": "a fresh workspace is empty; records cannot be forged",
    "D13": "requests in pieces, queries decoded",
    "D14": "transcripts and events are complete",
    "D15": "nobody sees another's session",
    "D16": "destroy leaves nothing",
    "D17": "secrets of the platform cannot be named",
    "D18": "revoked credentials cannot renew",
    "D19": "no key over unverified or plain connections",
    "D20": "no moment of free egress",
    "D21": "deny by default, limits inside",
    "D22": "the agent and exposed ports need a secret",
    "D23": "names are checked on both sides",
    "D24": "rates per identity, after authentication",
    "D25": "approval needs the right to approve",
    "D26": "`$`, backticks and quotes arrive",
    "D27": "parallel runs do not mix",
    "D28": "a crashed creator blocks nobody",
    "D29": "a sixth background run after five have ended",
    "D30": "commands run in sub-agents",
    "D31": "snapshots of any content and size",
    "D32": "pip constraints are kept",
    "D33": "manifest modes; failures abort",
    "D34": "every verb respects hosts and tenants given",
    "D35": "reset of certificates, honest repairs",
    "D36": "help and behaviour agree",
    "D37": "warm means ready",
    "D38": "everything readable right after create",
    "D39": "cluster: workspaces end with their session",
    "D40": "restarts lose nothing silently",
    "D41": "cluster: every field has an effect",
    "D42": "E2B details",
    "D43": "SDK fields, quoting, credentials",
    "D44": "MCP over HTTP is guarded",
    "D45": "tested end to end",
}

HEAD = """# K8E

atoll speaks K8E's gRPC service (`sandbox.v1.SandboxService`, all 34 RPCs), its CLI, its MCP tools and its Python and
TypeScript SDKs. This page is made by `scripts/compat_k8e.py` from the names of the tests; a row without a test is a promise
that no test holds atoll to yet.

## What differs, on purpose

- `ExecStream` sends output alone in `chunk`; pid, stream, exact bytes and exit code have fields of their own (100 and up).
  With metadata `x-sandbox-stream: sse`, or `frames: "sse"` in the request, `chunk` has K8E's frames: `data: {"pid":N}`, one frame for
  each line of output, `data: {"exit":N}`. A decoder that joins the frames in between with newlines has the output.
- `Exec`, `ExecStream`, `CreateTerminal` and the file RPCs have the rights of the user inside that metadata `x-sandbox-user`
  names (`NAME` or a number, with `:GROUP`); without it, root's. In the SDKs it is `user=` (Python) and `{ user }`
  (TypeScript) of exec and file calls.
- `GetEvents` has K8E's names where K8E has one (`exec_end`, `bg_submit`, `file_write`, `file_read`), with the session id its caller uses.
- `PipInstall` and `sandbox_pip_install` refuse options of pip, and stop after 120 s.
- `SnapshotPut` keeps a name and the digests it is given, as K8E's CLI publishes them; `snapshot delete` removes it. No content hangs on it.
- A nonzero exit, a timeout (`timed_out`, exit code -1) and a missing program are answers, not errors.
- A key that may use sandboxes cannot approve; that takes the `approve` scope. Rates bind keys, not local callers.
- A local caller needs no key: the Unix socket and loopback connections are known by their user id.
- Another's session answers exactly like one that does not exist.
- Client certificates (`Login`) live 90 days and never longer than their key.
- An empty `runtime_class` is the strongest runtime that works here; a named one never falls back.
- Errors carry `atoll-code`, `atoll-retry` and `atoll-error-bin` in the trailing metadata.

| id | promise | tests |
|---|---|---|
"""


def found_tests() -> dict[str, set[str]]:
    """Promise -> files that test it."""
    found: dict[str, set[str]] = {}
    folders = [ROOT / "tests", ROOT / "sdk/typescript/test"]
    for folder in folders:
        for path in sorted([*folder.rglob("test_*.py"), *folder.rglob("*.test.mjs")]):
            for match in NAMED.finditer(path.read_text()):
                for promise in re.findall(r"(?:k8e_|_)([PD]\d\d)(?=\D|$)", match[1] or match[2]):
                    found.setdefault(promise, set()).add(str(path.relative_to(ROOT)))
    return found


def main() -> int:
    return compat_page.write(PAGE, HEAD + compat_page.table(PROMISES, found_tests()), "scripts/compat_k8e.py")


if __name__ == "__main__":
    raise SystemExit(main())
