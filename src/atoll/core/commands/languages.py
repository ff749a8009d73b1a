"""How code in a language becomes a program call. Code reaches the interpreter byte for byte.

One line goes on the command line; more, or much, goes into a file in /tmp of the sandbox, which is removed afterwards.
"""

from dataclasses import dataclass

from atoll import errors
from atoll.model import RunSpec

MAX_INLINE = 100_000  # the kernel takes 128 KiB in one argument
PREFIX = "/tmp/_k8e_run_"


@dataclass(frozen=True)
class Language:
    """`inline` precedes code on the command line, `file` precedes a file's name."""

    name: str
    inline: tuple[str, ...]
    file: tuple[str, ...]
    suffix: str


# tsx where the image has it, else Node's own type stripping where it is new enough.
_TYPESCRIPT = (
    'if command -v tsx >/dev/null 2>&1; then exec tsx "$@"; fi; '
    'set -- --experimental-strip-types --no-warnings "$@"; '
    "if node --experimental-strip-types -e 0 >/dev/null 2>&1; then "
    'if [ "$3" = -e ]; then exec node --input-type=commonjs-typescript "$@"; fi; exec node "$@"; fi; '
    "echo 'TypeScript needs tsx, or Node 22.7 or later, in the image: npm install -g tsx' >&2; exit 127"
)
_TS = ("/bin/sh", "-c", _TYPESCRIPT, "typescript")

PYTHON = Language("python", ("python3", "-c"), ("python3",), ".py")
NODE = Language("node", ("node", "-e"), ("node",), ".js")
TYPESCRIPT = Language("typescript", (*_TS, "-e"), _TS, ".ts")
BASH = Language("bash", ("bash", "-c"), ("bash",), ".sh")
SH = Language("sh", ("/bin/sh", "-c"), ("/bin/sh",), ".sh")

_NAMES = {
    PYTHON: ("python", "python3", "py"),
    NODE: ("node", "nodejs", "js", "javascript"),
    TYPESCRIPT: ("ts", "typescript"),
    BASH: ("bash", "shell", ""),
    SH: ("sh",),
}
BY_NAME = {name: language for language, names in _NAMES.items() for name in names}


@dataclass(frozen=True)
class Call:
    """The program to start, and the file that must be there first."""

    argv: list[str]
    language: Language
    path: str | None
    code: bytes
    env: dict[str, str]
    user: str | None = None


def call(spec: RunSpec, command_id: str, cwd: str) -> Call:
    language = BY_NAME.get(spec.language.lower())
    if language is None:
        raise errors.InvalidArgument(f"unknown language {spec.language!r}", hint="one of python, node, ts, bash, sh")
    try:
        code = spec.code.encode()
    except UnicodeEncodeError:
        raise errors.InvalidArgument("the code is not valid Unicode") from None
    shell = language in (BASH, SH)
    fits = len(code) <= MAX_INLINE and b"\0" not in code
    if fits and (shell or (b"\n" not in code and not spec.code.startswith("-"))):
        name = [language.name] if shell and spec.args else []
        return Call([*language.inline, spec.code, *name, *spec.args], language, None, code, spec.env)
    path = f"{PREFIX}{command_id}{language.suffix}"
    return Call([*language.file, path, *spec.args], language, path, code, {**_imports(language, cwd), **spec.env})


def _imports(language: Language, cwd: str) -> dict[str, str]:
    """Code in a file finds the modules beside its working directory, as code on the command line does."""
    if language is PYTHON:
        return {"PYTHONPATH": cwd}
    if language in (NODE, TYPESCRIPT):
        return {"NODE_PATH": f"{cwd}/node_modules"}
    return {}
