"""The verbs of agentkernel's grammar and of images, for the one table in `cli/verbs.py`."""

from __future__ import annotations

from .grammar import Flag, Verb

_AT = "atoll.surfaces.agentkernel.cli."
ENV = Flag("env", "K=V", "an environment variable; may be repeated", kind="pair", repeat=True, short="e")
AS_JSON = Flag("json", "", "JSON instead of text")
AS_USER = Flag("user", "USER", "with the rights of this user inside", short="u")
BACKEND = Flag("backend", "NAME", "{runtimes}; docker and podman mean container", short="B")
RUNTIME = Flag("runtime", "NAME", "the same as --backend")
CONFIG = Flag("config", "FILE", "a project's file to use and trust", short="c")
TTL = Flag("ttl", "TIME", "remove it after so long: 30m, 1h, 3d; 0 is never")
ALLOW_HOST = Flag(
    "allow-host", "HOST", "one more name it may reach, besides its list; may be repeated", kind="csv", repeat=True
)
TEMPLATE = Flag("template", "NAME", "start from a template; see `template list`")
POLICY = (
    Flag("profile", "NAME", "permissive, moderate, restrictive or custom (default: moderate)", short="p"),
    Flag("compatibility-mode", "MODE", "native, claude, codex or gemini"),
    Flag("no-network", "", "no way out, whatever else is said"),
    ALLOW_HOST,
    Flag(
        "allowed-hosts",
        "CSV",
        "instead of its list: names it may reach, * for every public one, none for no host",
        kind="csv",
    ),
    Flag("cpus", "N", "CPUs, may be a fraction", kind="number"),
    Flag("memory", "MB", "memory", kind="int"),
)
VOLUME = Flag("volume", "NAME:/PATH[:ro]", "a volume of yours inside it; may be repeated", repeat=True)
CREATE = (
    Flag("agent", "NAME", "whose sandbox it is: claude, codex, gemini", short="a"),
    CONFIG, BACKEND, RUNTIME, TEMPLATE, TTL, ENV, *POLICY,
    Flag("dir", "PATH", "mount this directory, writable, at /workspace", short="d"),
    VOLUME,
    Flag("image", "IMAGE", "its image"),
    Flag("branch", "", "use a sandbox of that name if there is one"),
)  # fmt: skip

RUN = Verb(
    "run", _AT + "run:run", "CMD [ARG...]", "Run a command in a fresh sandbox of its own.",
    (
        CONFIG,
        Flag("keep", "", "leave the sandbox running afterwards, as run-<id>", short="k"),
        Flag("image", "IMAGE", "its image (default: what the command needs)", short="i"),
        Flag("build", "", "build the project's Dockerfile, and run in that image"),
        *POLICY, BACKEND, RUNTIME, TEMPLATE, TTL, ENV, VOLUME,
        Flag("timeout", "TIME", "kill it after so long (exit 124)"),
        Flag("publish", "[HERE:]PORT", "its TCP port on 127.0.0.1 while it runs; may be repeated", repeat=True, short="P"),
        Flag("fast", "", "a hint without meaning here: every run is", short="F"),
        Flag("raw", "", "control characters unescaped even on a terminal"),
    ),
    ("atoll run python3 -c 'print(1)'", "atoll run --profile restrictive sh -c 'id'", "atoll run --keep npm --version"),
    passes=1,
)  # fmt: skip

E2B = (
    Flag("e2b", "[=ADDRESS]", "E2B's interface instead, on 127.0.0.1:3676, until interrupted", kind="optional"),
    Flag("domain", "NAME", "with --e2b: the name under which a server in front of this one is reached"),
)

SERVE = (
    *E2B,
    Flag("agentkernel", "", "agentkernel's HTTP interface instead, on 127.0.0.1:18888, until interrupted"),
    Flag("host", "ADDRESS", "listen there (default: 127.0.0.1; any other needs AGENTKERNEL_API_KEY)", short="H"),
    Flag("port", "N", "the port (default: 18888; 0: a free one)", kind="int", short="p"),
    Flag("allow-host-access", "", "callers may ask for permissive and for every public host"),
    Flag("legacy-exit-errors", "", "a command that fails is answered with status 500, as old clients expect"),
    CONFIG,
)

_LIFE = {
    "start": "Start a stopped sandbox.",
    "stop": "End its processes and keep its files.",
    "remove": "Remove a sandbox with all that is in it.",
    "pause": "Freeze everything in it.",
    "resume": "Thaw a paused sandbox.",
}


_POSITIONAL = {"remove": "SANDBOX [SANDBOX...]"}
_MORE = {"start": (BACKEND,), "remove": (Flag("force", "", "one that does not exist is no error", short="f"),)}


def _both(name: str, handler: str, positionals: str, help: str, flags: tuple[Flag, ...] = ()) -> tuple[Verb, Verb]:
    """The flat and the grouped form."""
    return Verb(name, handler, positionals, help, flags), Verb("sandbox " + name, handler, positionals, help, flags)


VERBS = (
    RUN,
    Verb("create", _AT + "named:create", "NAME", "Make a sandbox to start later.", CREATE),
    *[
        verb
        for name, help in _LIFE.items()
        for verb in _both(name, f"{_AT}named:{name}", _POSITIONAL.get(name, "SANDBOX"), help, _MORE.get(name, ()))
    ],
    Verb("list", _AT + "named:list_all", "", "List your sandboxes.", (AS_JSON, Flag("project", "", "of this project"))),
    Verb("sandbox info", _AT + "named:info", "SANDBOX", "Show one sandbox.", (AS_JSON,)),
    Verb(
        "sandbox extend-ttl", _AT + "named:extend", "SANDBOX", "Move its end.",
        (Flag("by", "TIME", "so far from now (default: 1h)", default="1h"), AS_JSON),
    ),
    Verb("sandbox gc", _AT + "named:collect", "", "Remove sandboxes whose time is over.", (AS_JSON,)),
    Verb(
        "sandbox clean", _AT + "named:clean", "", "Remove stopped sandboxes.",
        (Flag("all", "", "running ones too"), AS_JSON),
    ),
    Verb("sandbox cp", "copy:copy", "SRC DST", "Copy files and trees; one side is NAME:/path.", (AS_USER,)),
    Verb(
        "sandbox export", _AT + "named:export", "SANDBOX", "Its file system as a tar.",
        (Flag("output", "FILE", "where to (default: NAME.tar)", short="o"), Flag("path", "PATH", "only this (default: /)")),
    ),
    Verb("sandbox export-config", _AT + "named:export_config", "SANDBOX", "What it was made with, as TOML."),
    Verb(
        "sandbox import-config", _AT + "named:import_config", "FILE", "Make a sandbox from such a TOML.",
        (Flag("as", "NAME", "its name"),),
    ),
    Verb("sandbox exec-list", _AT + "detached:list_all", "SANDBOX", "Commands started with exec -d."),
    Verb("sandbox exec-logs", _AT + "detached:logs", "SANDBOX ID", "Output of a command started with exec -d."),
    Verb("sandbox exec-kill", _AT + "detached:kill", "SANDBOX ID", "End a command started with exec -d."),
    Verb(
        "replay", _AT + "recording:replay", "FILE", "Play a recorded terminal session.",
        (
            Flag("speed", "X", "times as fast", kind="number", default=1.0, short="s"),
            Flag("max-idle", "SECONDS", "no pause longer than this", kind="number", default=2.0),
        ),
    ),
    Verb(
        "init", _AT + "init:init", "", "Write an agentkernel.toml for this project.",
        (
            Flag("name", "NAME", "the project's name (default: the directory's)", short="n"),
            Flag("agent", "NAME", "claude, codex or gemini (default: claude)", default="claude", short="a"),
        ),
    ),
    Verb("template list", _AT + "templates:list_all", "", "Templates, built in and your own.", (AS_JSON,)),
    Verb("template show", _AT + "templates:show", "NAME", "Print a template."),
    Verb("template add", _AT + "templates:add", "FILE [NAME]", "Keep a project's file as a template."),
    Verb(
        "template save", _AT + "templates:save", "NAME", "Keep what a sandbox was made with as a template.",
        (Flag("from", "SANDBOX", "the sandbox"),),
    ),
    Verb("template remove", _AT + "templates:remove", "NAME", "Forget a template of your own."),
    Verb(
        "session start", _AT + "sessions:start", "", "A sandbox for an agent, session-NAME.",
        (
            Flag("name", "NAME", "the session's name"),
            Flag("agent", "NAME", "claude, codex, gemini or native", default="claude", short="a"),
            BACKEND,
        ),
    ),
    Verb("session list", _AT + "sessions:list_all", "", "Sessions and how they stand.", (AS_JSON,)),
    Verb("session stop", _AT + "sessions:stop", "NAME", "Stop it and keep its files."),
    Verb("session resume", _AT + "sessions:resume", "NAME", "Start it again."),
    Verb("session save", _AT + "sessions:save", "NAME", "Keep its files as the snapshot session-NAME, and stop it."),
    Verb("session delete", _AT + "sessions:delete", "NAME", "Remove it."),
    Verb(
        "pipeline", _AT + "pipeline:pipeline", "FILE", "Run steps one after the other, each in a sandbox of its own.",
        (BACKEND, *POLICY[1:5]),
    ),
    Verb(
        "parallel", _AT + "pipeline:parallel", "", "Run jobs at once, each in a sandbox of its own.",
        (Flag("job", "NAME:IMAGE:COMMAND", "one job; may be repeated", repeat=True, short="j"), BACKEND, *POLICY[1:5]),
        ("atoll parallel -j 'lint:python:python3 -m compileall .' -j 'ver:node:node --version'",),
    ),
    Verb("alias install", _AT + "alias:install", "NAME [DIR]", "A link agentkernel, k8e or k8e-sandbox to this program."),
    Verb("alias remove", _AT + "alias:remove", "NAME [DIR]", "Take such a link away."),
    Verb("agents", _AT + "init:agents", "", "Coding agents on this machine, and whether their keys are set.", (AS_JSON,)),
    Verb(
        "snapshot take", _AT + "snapshots:take", "SANDBOX", "Keep its whole file system.",
        (Flag("name", "NAME", "the snapshot's name (default: SANDBOX-<date>)"),),
    ),
    Verb("snapshot list", _AT + "snapshots:list_all", "", "Snapshots of yours.", (AS_JSON,)),
    Verb("snapshot delete", _AT + "snapshots:delete", "NAME", "Delete a snapshot."),
    Verb(
        "snapshot restore", _AT + "snapshots:restore", "NAME", "A new sandbox with its files.",
        (Flag("as", "NAME", "the new one's name (default: <sandbox>-restored)"), BACKEND),
    ),
    Verb("image pull", "images:pull", "NAME", "Get an image: a reference, or a name of the catalog."),
    Verb(
        "image build", "image_builds:build", "CONTEXT",
        "Build an image: from a Dockerfile and a directory, or, with --debian, of Debian packages.",
        (
            Flag("file", "PATH", "the Dockerfile (default: Dockerfile in CONTEXT; - is stdin)", short="f"),
            Flag("tag", "NAME", "what to call it: a name of this machine's", short="t"),
            Flag("build-arg", "NAME=VALUE", "a value for an ARG", kind="pair", repeat=True),
            Flag("target", "STAGE", "build this stage and what it needs"),
            Flag("no-cache", "", "run every step again"),
            Flag("runtime", "NAME", "the runtime of the steps' sandboxes"),
            Flag("debian", "PACKAGES", "the packages, separated by commas; CONTEXT is then the name", kind="csv"),
        ),
        ("atoll image build -t app .", "atoll image build tools --debian python3,git"),
    ),
    Verb(
        "volume create", "volumes:create", "NAME", "Make a volume: a disk that outlives sandboxes.",
        (Flag("size", "MB", "how large (default: 1024, or the operator's)", kind="int"),),
        ("atoll volume create data --size 2048", "atoll run --volume data:/data sh -c 'date >> /data/log'"),
    ),
    Verb("volume list", "volumes:list_all", "", "List your volumes.", (AS_JSON,)),
    Verb("volume rm", "volumes:remove", "NAME", "Remove a volume with everything in it."),
    Verb("image list", "images:list_all", "", "Images on this machine.", (AS_JSON,)),
    Verb("image inspect", "images:inspect", "NAME", "What is known of an image."),
    Verb("image rm", "images:remove", "NAME", "Remove an image."),
    Verb("image prune", "images:prune", "", "Remove what no name and no sandbox needs.", (AS_JSON,)),
)  # fmt: skip
