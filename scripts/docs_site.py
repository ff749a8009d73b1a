"""Makes the pages of the site that come from code, and what a site needs beside pages: mkdocs calls the hooks of this file.

    mkdocs build --strict            builds the site (make docs)
    python scripts/docs_site.py      makes the pages and keeps none: fails where something has no words

The pages are written at each build and kept nowhere, so that they cannot be older than the code: commands with their flags, settings with
their defaults, routes, and the Python SDK.
"""

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def commands() -> str:
    """Return the page of every command of the command line."""
    from atoll.cli.verbs import VERBS

    parts = ["# Commands\n\nEvery command takes `--json`, `--endpoint`, `--apikey`, `--context` and `--help`.\n"]
    for verb in sorted(VERBS, key=lambda one: one.name):
        parts.append(
            f"## atoll {verb.name}\n\n`atoll {verb.name} {verb.positionals}`\n\n{_worded(verb.name, verb.help)}\n"
        )
        rows = []
        for flag in verb.flags:
            short = f"-{flag.short}, " if flag.short else ""
            value = f" {flag.value}" if flag.value else ""
            rows.append(
                f"| `{short}--{flag.name}{value}` | {_cell(_worded(f'{verb.name} --{flag.name}', flag.help))} |"
            )
        if rows:
            parts.append("| flag | meaning |\n|---|---|\n" + "\n".join(rows) + "\n")
        if verb.examples:
            parts.append("```bash\n" + "\n".join(verb.examples) + "\n```\n")
    return "\n".join(parts)


def settings() -> str:
    """Return the page of config.toml: each table with its keys and defaults."""
    import msgspec

    from atoll import config

    parts = [
        "# Settings\n\n`$ATOLL_HOME/config.toml`. An unknown key is an error. `atoll config show` prints what is in force.\n"
    ]

    def table(name: str, kind: Any) -> None:
        about = inspect.getdoc(kind) or ""
        rows, inner = [], []
        for one in msgspec.structs.fields(kind):
            if isinstance(one.type, type) and issubclass(one.type, msgspec.Struct):
                inner.append((f"{name}.{one.name}" if name else one.name, one.type))
                continue
            rows.append(f"| `{one.encode_name}` | `{_default(one)}` |")
        if name:
            parts.append(f"## [{name}]\n\n{_worded(name, about)}\n")
        if rows:
            parts.append("| key | default |\n|---|---|\n" + "\n".join(rows) + "\n")
        for below in inner:
            table(*below)

    table("", config.Config)
    return "\n".join(parts)


def _default(one: Any) -> str:
    import msgspec

    if one.default is not msgspec.NODEFAULT:
        return "none" if one.default is None or one.default is msgspec.UNSET else repr(one.default)
    return repr(one.default_factory()) if one.default_factory is not msgspec.NODEFAULT else "needed"


def rest() -> str:
    """Return the page of the REST interface, from the same document that the daemon serves."""
    import atoll.server.app  # noqa: F401  # its import fills the table of routes
    from atoll.surfaces.rest.openapi import document

    found: Any = document()
    parts = [
        "# REST\n\nOn the daemon's Unix socket, and with a key on the gateway's port. `GET /v1/openapi.json` is this as OpenAPI 3.1.\n"
    ]
    parts.append("| call | what it does | in the query |\n|---|---|---|")
    for path, methods in sorted(found["paths"].items()):
        for method, operation in methods.items():
            query = ", ".join(f"`{one['name']}`" for one in operation.get("parameters", ()) if one["in"] == "query")
            summary = _worded(f"{method} {path}", operation["summary"])
            parts.append(f"| `{method.upper()} {path}` | {_cell(summary)} | {query} |")
    return "\n".join(parts) + "\n"


def python() -> str:
    """Return the page of the Python SDK: its classes with the words of their methods."""
    import atoll

    parts = ["# Python\n\n`from atoll import ...`; `AsyncSandbox` and its parts have the same methods, with `await`.\n"]
    for name in sorted(atoll.__all__):
        kind = getattr(atoll, name)
        if not inspect.isclass(kind) or name.startswith("Async"):
            continue
        parts.append(f"## {name}\n\n{inspect.getdoc(kind) or ''}\n")
        methods = [(label, one) for label, one in vars(kind).items() if inspect.isfunction(one) and label[0] != "_"]
        for label, method in methods:
            parts.append(
                f"### {name}.{label}\n\n`{label}{inspect.signature(method)}`\n\n{inspect.getdoc(method) or ''}\n"
            )
    return "\n".join(parts)


def index() -> str:
    """Return the first page: the README."""
    return (ROOT / "README.md").read_text()


def llms() -> str:
    """Return llms.txt: what this is, and a line for each page, for programs that read."""
    head = "# atoll\n\n> A place for AI agents to run code that cannot hurt the machine it runs on.\n\n## Pages\n\n"
    rows = []
    for path in sorted((ROOT / "docs").rglob("*.md")):
        lines = path.read_text().splitlines()
        rows.append(f"- [{lines[0].lstrip('# ')}]({path.relative_to(ROOT / 'docs').with_suffix('.html')})")
    rows += [f"- [{name}]({name.removesuffix('.md')}.html)" for name in PAGES if name != "index.md"]
    return head + "\n".join(rows) + "\n"


PAGES: dict[str, Callable[[], str]] = {
    "index.md": index,
    "reference/commands.md": commands,
    "reference/settings.md": settings,
    "reference/rest.md": rest,
    "reference/python.md": python,
}


def _worded(name: str, text: str) -> str:
    if not text.strip():
        raise SystemExit(f"{name} has no words to be found in a reference")
    return text


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that come from code."""
    from mkdocs.structure.files import File

    for name, make in PAGES.items():
        files.append(File.generated(config, name, content=make()))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Name files of the repository instead of leading to them: the site has the pages alone."""
    own = r"(?:tests|src|guest|launcher|scripts|bench|sdk|proto|deploy)/[^)]*|[A-Z]+\.md"
    return re.sub(rf"\[([^\]]*)\]\((?:\.\./)*({own})\)", r"\1 (`\2`)", markdown)


def on_post_build(config: Any) -> None:
    Path(config["site_dir"], "llms.txt").write_text(llms())


if __name__ == "__main__":
    for make in PAGES.values():
        make()
