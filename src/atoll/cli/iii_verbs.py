"""The verbs of the iii functions, for the one table in `cli/verbs.py`."""

from __future__ import annotations

from .grammar import Flag, Verb

PORT = Flag("port", "N", "the engine's port (default: 49134)", kind="int", default=49134)
ENV = Flag("env", "K=V", "an environment variable; may be repeated", repeat=True, short="e")
CPUS = Flag("cpus", "N", "CPUs", kind="int")
MEMORY = Flag("memory", "MB", "memory", kind="int")
TIMEOUT = Flag("timeout", "TIME", "500ms, 30s or 5m")

_AT = "atoll.surfaces.iii.cli."

VERBS = (
    Verb(
        "fn", _AT + "functions:call", "NAME [PAYLOAD]", "Call a sandbox:: function; the payload is JSON, - is standard input.", (),
        (
            "atoll fn sandbox::run '{\"image\": \"python\", \"lang\": \"python\", \"code\": \"print(1)\"}'",
            "atoll fn sandbox::catalog::list",
        ),
    ),
    Verb(
        "iii worker", _AT + "functions:worker", "", "Serve the sandbox:: functions to an iii engine.",
        (
            Flag("engine", "URL", "the engine (default: $III_URL, then ws://127.0.0.1:49134)"),
            Flag("config", "FILE", "the iii-sandbox settings, alone or inside an engine's config.yaml"),
            Flag("namespace", "NAME", "the engine's namespace"),
        ),
        ("atoll iii worker --engine ws://127.0.0.1:49134 --config config.yaml",),
    ),
    Verb("iii config", _AT + "functions:new_block", "", "Print an iii-sandbox entry for config.yaml."),
    Verb(
        "iii sandbox run", _AT + "engine:run", "IMAGE CMD [ARG...]", "Create, run one command, stop; the exit code is the command's.",
        (PORT, CPUS, MEMORY, TIMEOUT), passes=2,
    ),
    Verb(
        "iii sandbox create", _AT + "engine:create", "IMAGE", "Create a sandbox and print its id.",
        (
            PORT, CPUS, MEMORY, Flag("idle-timeout", "SECS", "reap it after so long without use", kind="int"),
            Flag("name", "NAME", "a label"), Flag("network", "", "let it out to public hosts"), ENV,
        ),
    ),
    Verb(
        "iii sandbox exec", _AT + "engine:execute", "ID CMD [ARG...]", "Run a command; 124 when it took too long.",
        (PORT, TIMEOUT, ENV), passes=2,
    ),
    Verb("iii sandbox list", _AT + "engine:list_all", "", "Sandboxes alive.", (PORT, Flag("all", "", "the same"))),
    Verb("iii sandbox stop", _AT + "engine:stop", "ID", "Destroy a sandbox.", (PORT,)),
    Verb(
        "iii sandbox upload", _AT + "engine:upload", "ID LOCAL REMOTE", "Stream a file in; - is standard input.",
        (PORT, Flag("mode", "OCTAL", "its mode (default: 0644)"), Flag("parents", "", "make missing directories")),
    ),
    Verb("iii sandbox download", _AT + "engine:download", "ID REMOTE LOCAL", "Stream a file out; - is standard output.", (PORT,)),
)  # fmt: skip
