"""The table of verbs: one entry drives the parser, the help, shell completion and `sandbox catalog`."""

from __future__ import annotations

from .agentkernel_verbs import ALLOW_HOST, AS_USER, SERVE
from .agentkernel_verbs import CREATE as NAMED
from .agentkernel_verbs import VERBS as AGENTKERNEL
from .agents_verbs import ALIASES as AGENTS_ALIASES
from .agents_verbs import VERBS as AGENTS
from .grammar import Flag, Verb
from .iii_verbs import VERBS as FUNCTIONS
from .k8e_verbs import ALIASES as K8E_ALIASES
from .k8e_verbs import GRPC
from .k8e_verbs import SHARED as SHARED
from .k8e_verbs import VERBS as K8E
from .kubernetes_verbs import VERBS as KUBERNETES

SESSION = Flag("session-id", "ID", "the sandbox to use; without it the tenant's own is found or created")
TENANT = Flag("tenant", "NAME", "whose automatic sandbox to use (default: default)")
RAW = Flag("raw", "", "the plain bytes as they come instead of JSON")
AS_JSON = Flag("json", "", "one JSON object instead of text")
ENV = Flag("env", "K=V", "an environment variable; may be repeated", kind="pair", repeat=True, short="e")

LIMITS = (
    Flag("runtime", "NAME", "{runtimes} (default: auto)"),
    Flag("image", "IMAGE", "root file system (default: host)"),
    Flag("cpus", "N", "CPUs, may be a fraction", kind="number"),
    Flag("memory", "MB", "memory", kind="int"),
    Flag("pids", "N", "processes and threads", kind="int"),
    Flag("files", "N", "open files", kind="int"),
    Flag("disk", "MB", "disk", kind="int"),
    Flag("shm", "MB", "/dev/shm, which is memory too (default: half of the memory)", kind="int"),
    Flag("lifetime", "SECONDS", "end it after so long", kind="number"),
    Flag("idle-timeout", "SECONDS", "end it after so long without use", kind="number"),
    Flag("profile", "NAME", "security profile: permissive, moderate, restrictive, custom"),
    ALLOW_HOST,
    Flag("allowed-hosts", "CSV", "instead of its list: names it may reach; none for no host", kind="csv"),
    Flag("no-network", "", "only loopback inside"),
    Flag(
        "host-access",
        "PORT",
        "let it reach this loopback port of the machine as host.atoll.internal; may be repeated",
        kind="int",
        repeat=True,
    ),
)

FILLING = (
    Flag("manifest", "FILE", "YAML with entries (file, dir, gitRepo) for its /workspace; - is standard input"),
    Flag("git-repo", "URL", "clone this repository into it"),
    Flag("git-ref", "REF", "branch or tag (default: main)"),
    Flag("git-path", "PATH", "where in /workspace (default: repo)"),
)

AUDIT = (
    Flag("follow", "", "go on until interrupted", short="f"),
    Flag("sandbox", "ID", "only this sandbox", short="s"),
    Flag("limit", "N", "at most so many of the past", kind="int", default=100),
    Flag("last", "N", "the same as --limit", kind="int", short="l"),
    Flag("path", "", "only say where the log is"),
    Flag("json", "", "one JSON object a line"),
)
SETUP = (
    Flag("yes", "", "accepted: nothing is asked", short="y"),
    Flag("check", "", "accepted: nothing but checks is done"),
    Flag("verify", "", "accepted: every runtime is tried"),
    AS_JSON,
)

OWN = (
    Verb(
        "sandbox run", "run:run", "[CODE]", "Run code; the exit code is the command's.",
        (
            Flag("lang", "NAME", "python, bash, node or ts (default: bash)", default="bash"),
            Flag("timeout", "SECONDS", "kill it after so long (default: 30)", kind="number"),
            SESSION, TENANT, RAW,
            Flag("background", "", "start it, print its run_id and return"),
            ENV,
            Flag("persistent", "", "a new one keeps its /workspace for the tenant: unused it is stopped, the next run starts it again"),
            *LIMITS,
            *FILLING,
        ),
        (
            "atoll sandbox run \"print('hello')\" --lang python",
            "atoll sandbox run --raw 'for i in 1 2 3; do echo $i; sleep 1; done'",
            "atoll sandbox run --lang python < script.py",
        ),
    ),
    Verb(
        "sandbox create", "sandbox:create", "[NAME]", "Create a sandbox and leave it running; with NAME, one to start later.",
        (
            *LIMITS,
            *[flag for flag in NAMED if flag.name not in {limit.name for limit in LIMITS} and flag.name != "env"],
            TENANT,
            Flag("session-id", "ID", "an id of your own choosing, besides the one it gets"),
            ENV,
            Flag("name", "NAME", "a name to refer to it by"),
            Flag("workdir", "PATH", "where commands start (default: /workspace)"),
            Flag("label", "K=V", "a label; may be repeated", kind="pair", repeat=True),
            Flag("read-only-root", "", "only /workspace and /tmp can be written"),
            Flag("persistent", "", "keep /workspace when it is stopped"),
            Flag(
                "secret", "VAR=NAME:KEY", "a secret as an environment variable of every command; may be repeated",
                kind="pair", repeat=True,
            ),
            Flag(
                "require-approval", "RULE", "command:GLOB, path:GLOB or host:GLOB waits for a person; may be repeated", repeat=True,
            ),
            *FILLING,
        ),
        ("atoll sandbox create --memory 1024 --cpus 2", "atoll sandbox create --name build --lifetime 3600"),
    ),
    Verb("sandbox get", "sandbox:get", "ID", "Show one sandbox.", (AS_JSON,)),
    Verb(
        "sandbox list", "sandbox:list_any", "[ID]", "List your sandboxes, or with an ID the files in its /workspace.",
        (
            Flag("since", "TIME", "only files changed at or after this Unix time", kind="number"),
            Flag("all", "", "ended sandboxes too"),
            AS_USER,
            AS_JSON,
        ),
    ),
    Verb(
        "sandbox sessions", "sandbox:sessions", "", "List your sandboxes in K8E's words.",
        (Flag("phase", "PHASE", "Active, Paused, Terminating or all", default="Active"), AS_JSON),
    ),
    Verb("sandbox destroy", "sandbox:destroy", "[ID]", "End a sandbox and all that runs in it.", (TENANT,)),
    Verb(
        "sandbox write", "sandbox:write_file", "ID PATH", "Write standard input to a file.",
        (Flag("mode", "w|a", "w replaces the file, a appends to it", default="w"), AS_USER),
        ("echo 1,2 | atoll sandbox write $ID /workspace/data.csv",),
    ),
    Verb("sandbox read", "sandbox:read", "ID PATH", "Read a file.", (RAW, AS_USER)),
    Verb("sandbox status", "sandbox:status", "", "Whether the service answers, and the tenant's sandbox.", (TENANT,)),
    Verb("sandbox ps", "sandbox:ps", "ID", "List the processes inside."),
    Verb(
        "sandbox log", "sandbox:log", "ID", "Print the transcript.",
        (
            Flag("offset", "BYTES", "start there", kind="int", default=0),
            Flag("limit", "BYTES", "at most so much (0: as much as one answer holds)", kind="int", default=0),
            Flag("follow", "", "go on until the sandbox ends", short="f"),
            RAW,
        ),
    ),
    Verb(
        "sandbox events", "sandbox:events", "[ID]", "What happened, newest last.",
        (Flag("limit", "N", "at most so many", kind="int", default=500), AS_JSON),
    ),
    Verb(
        "sandbox poll", "sandbox:poll", "RUN_ID", "State and output of a background run.",
        (Flag("follow", "", "show its output while it runs, and wait for its end", short="f"), RAW),
    ),
    Verb(
        "sandbox allow-hosts", "network:allow_hosts", "[SANDBOX] [HOST...]",
        "Show or change, at once, the hosts a sandbox may reach. Hosts alone replace the list; `none` is no host.",
        (
            SESSION, TENANT,
            Flag("hosts", "CSV", "the same as hosts after the verb", kind="csv"),
            Flag("add", "", "allow these too"),
            Flag("remove", "", "allow these no longer, and cut what is open to them"),
            Flag("clear", "", "the default list again"),
        ),
        (
            "atoll sandbox allow-hosts --add example.com *.example.org:8443 --session-id $ID",
            "atoll sandbox allow-hosts none --session-id $ID",
        ),
    ),
    Verb(
        "sandbox expose", "network:expose", "[SANDBOX] [PORT]", "A URL for a port inside: HTTP and WebSockets.",
        (
            Flag("port", "PORT", "the same as PORT", kind="int"), SESSION, TENANT,
            Flag("host", "ADDRESS", "where the program inside listens (default: 127.0.0.1)"),
        ),
        ("curl $(atoll sandbox expose 8000 --session-id $ID | jq -r .url)",),
    ),
    Verb(
        "sandbox unexpose", "network:unexpose", "[SANDBOX] [PORT]", "Take a port's URL away and cut what is open through it.",
        (Flag("port", "PORT", "the same as PORT", kind="int"), SESSION, TENANT),
    ),
    Verb("sandbox exposed", "network:exposed", "[SANDBOX]", "Ports that have a URL.", (SESSION, TENANT)),
    Verb(
        "sandbox snapshot save", "workspaces:save", "ID NAME", "Keep the files of a sandbox, running or stopped.",
        (
            Flag("full", "", "also what was changed or deleted outside /workspace"),
            Flag("force", "", "replace a snapshot of the same name"),
        ),
        ("atoll sandbox snapshot save $ID my-checkpoint",),
    ),
    Verb("sandbox snapshot list", "workspaces:list_snapshots", "", "Your snapshots."),
    Verb(
        "sandbox snapshot restore", "workspaces:restore", "NAME", "A new sandbox with a snapshot's files.",
        (
            *LIMITS, TENANT, Flag("name", "NAME", "a name for the new sandbox"),
            Flag("base", "[=NAME]", "say how much of it other snapshots share, and what is missing", kind="optional"),
        ),
        ("atoll sandbox snapshot restore my-checkpoint",),
    ),
    Verb("sandbox snapshot delete", "workspaces:delete", "NAME", "Delete a snapshot and the content only it has."),
    Verb("sandbox snapshot inspect", "workspaces:inspect", "NAME", "Its files, and what it shares with others."),
    Verb("sandbox snapshot export", "workspaces:export", "NAME FILE", "Write it to one file, - for standard output."),
    Verb(
        "sandbox snapshot import", "workspaces:bring_in", "FILE NAME", "A snapshot from such a file, - for standard input.",
        (Flag("force", "", "replace a snapshot of the same name"),),
    ),
    Verb(
        "sandbox checkpoint", "memory:save", "ID [NAME]", "Keep memory, processes and disk of a running sandbox; it goes on.",
        (Flag("force", "", "replace a checkpoint of the same name"),),
        ("atoll sandbox checkpoint $ID before-the-migration",),
    ),
    Verb(
        "sandbox restore", "memory:restore", "NAME", "A new sandbox that goes on from a checkpoint.",
        (
            Flag("name", "NAME", "a name for the new sandbox"),
            Flag("lifetime", "SECONDS", "end it after so long", kind="number"),
            Flag("no-network", "", "only loopback inside"),
        ),
        ("atoll sandbox restore before-the-migration",),
    ),
    Verb(
        "sandbox fork", "memory:fork", "ID", "New sandboxes that go on from this moment of a running one.",
        (Flag("count", "N", "how many, at most 32 (default: 1)", kind="int"),),
        ("atoll sandbox fork $ID --count 3",),
    ),
    Verb("sandbox checkpoints", "memory:list_checkpoints", "", "Your checkpoints."),
    Verb("sandbox checkpoints delete", "memory:delete", "NAME", "Delete a checkpoint; sandboxes made from it go on."),
    Verb(
        "sandbox subagent", "workspaces:subagent", "PARENT_ID",
        "A sandbox beside another on the same /workspace; it ends with its parent and may never have more.",
        (
            Flag("cpus", "N", "CPUs, at most the parent's", kind="number"),
            Flag("memory", "MB", "memory, at most the parent's", kind="int"),
            Flag("pids", "N", "processes, at most the parent's", kind="int"),
            Flag("allowed-hosts", "CSV", "some of the parent's hosts; none for no host", kind="csv"),
            Flag("no-network", "", "only loopback inside"),
            ENV,
            Flag("name", "NAME", "a name to refer to it by"),
        ),
        ("A=$(atoll sandbox subagent $PARENT | jq -r .session_id)",),
    ),
    Verb(
        "sandbox confirm", "approvals:confirm", "[ID] [ACTION]", "Ask a person to approve an action, and wait for it.",
        (
            Flag("timeout", "SECONDS", "wait so long (default: 30)", kind="number", default=30),
            Flag("no-wait", "", "print the approval's id and return"),
            Flag("approval-id", "APPROVAL_ID", "wait for one that was asked for earlier"),
        ),
        ("atoll sandbox confirm $ID 'delete the old branches' && ./delete.sh",),
    ),
    Verb(
        "sandbox approve", "approvals:approve", "APPROVAL_ID", "Approve what was asked; in a terminal of your own.",
        (Flag("reject", "", "reject it instead"), Flag("reason", "TEXT", "why")),
    ),
    Verb(
        "sandbox reject", "approvals:reject", "APPROVAL_ID", "Reject what was asked; in a terminal of your own.",
        (Flag("reason", "TEXT", "why"),),
    ),
    Verb("sandbox approvals", "approvals:pending", "", "What waits for a decision."),
    Verb("sandbox catalog", "help:catalog", "", "This list as JSON."),
    Verb(
        "exec", "execute:execute", "REF CMD [ARG...]", "Run a program in a sandbox.",
        (
            Flag("interactive", "", "pass standard input on", short="i"),
            Flag("tty", "", "on a terminal", short="t"),
            Flag("detach", "", "start it, print its id and return", short="d"),
            ENV,
            Flag("workdir", "PATH", "where it starts", short="w"),
            Flag("user", "USER", "as whom", short="u"),
            Flag("timeout", "SECONDS", "kill it after so long (exit 124)", kind="number"),
            ALLOW_HOST,
            Flag("raw", "", "control characters unescaped even on a terminal"),
        ),
        ("atoll exec build make -j2", "atoll exec -it build bash", "tar c . | atoll exec -i build tar x"),
        passes=2,
    ),
    Verb(
        "attach", "terminal:attach", "REF [CMD] [ARG...]", "A shell in a sandbox, on your terminal.",
        (
            ENV, Flag("workdir", "PATH", "where it starts", short="w"), Flag("user", "USER", "as whom", short="u"),
            ALLOW_HOST,
            Flag("record", "[=PATH]", "keep the session as an asciicast; see `replay`", kind="optional"),
            Flag("keep", "", "the terminal goes on when this ends; Ctrl-P Ctrl-Q leaves it"),
            Flag("join", "ID", "a terminal that was kept"),
            Flag("offset", "N", "with --join: its output from there on (-1: from now on)", kind="int"),
            Flag("list", "", "terminals that run in the sandbox"),
            Flag("no-echo", "", "what is typed is not written back"),
        ),
        ("atoll attach build", "atoll attach --keep build make", "atoll attach build --list"),
        passes=2,
    ),
    Verb(
        "shell", "shells:shell", "[SANDBOX]",
        "A session in which directory, environment and names stay; without a sandbox, in a new one that is gone afterwards.",
        (
            Flag("lang", "LANG", "bash (default), python or node", default="bash"),
            Flag("command", "CMD", "run this and return; without, lines are read", short="c"),
            Flag("session", "ID", "in this session, which stays open"),
            Flag("user", "USER", "as whom", short="u"),
            Flag("timeout", "SECONDS", "interrupt a command after so long (with -c: 30)", kind="number"),
            Flag("open", "", "open a session, print its id and return"),
            Flag("list", "", "sessions of the sandbox"),
            Flag("close", "", "end the session given with --session"),
        ),
        (
            "S=$(atoll shell build --open)", "atoll shell build --session $S -c 'cd src && export A=1'",
            "atoll shell build --session $S -c 'pwd; echo $A'",
        ),
    ),
    Verb(
        "interpreter", "interpreter:interpreter", "[SANDBOX]",
        "Run cells of code in Jupyter kernels, and show charts; without a sandbox, in a new one that is gone afterwards.",
        (
            Flag("lang", "LANG", "python (default), javascript, typescript or bash", default="python"),
            Flag("command", "CODE", "run this cell and return; without, lines are read", short="c"),
            Flag("timeout", "SECONDS", "interrupt a cell after so long (300)", kind="number"),
            Flag("save", "DIRECTORY", "save images there, also where the terminal could show them"),
        ),
        ("atoll interpreter", "atoll interpreter -c '1 + 1'", "atoll interpreter notes < cells.py"),
    ),
    Verb(
        "cp", "copy:copy", "SRC DST", "Copy files and trees; REF:/path is in a sandbox, - is standard input or output.",
        (AS_USER,),
        ("atoll cp data.csv build:/workspace/", "atoll cp build:/workspace/out ./out", "atoll cp build:/etc/hosts -"),
    ),
    Verb(
        "e2b env", "atoll.surfaces.e2b.cli.serve:env", "[NAME]", "Make a key for E2B's SDKs and print the lines to export.",
        (
            Flag("address", "ADDRESS", "where `atoll serve --e2b` listens (default: 127.0.0.1:3676)"),
            Flag("ttl", "TIME", "30d, 720h, days, or never (default: 30d)", default="30d"),
        ),
        ('eval "$(atoll e2b env)"',),
    ),
    Verb("serve", "service:serve", "", "The daemon in the foreground, with gRPC and TLS on TCP.", (GRPC, *SERVE)),
    Verb("daemon start", "service:start", "", "Start the daemon, or keep the running one from leaving."),
    Verb("daemon prewarm", "service:prewarm", "", "Keep the daemon and wait until its warm sandboxes are ready.",
         (Flag("mode", "MODE", "also sandboxes of this mode: native, claude, codex or gemini"),
          Flag("count", "N", "at least so many of them, up to `ceiling` of [pool]", kind="int"))),
    Verb("daemon stop", "service:stop", "", "Stop the daemon.", (Flag("force", "", "also when sandboxes live"),)),
    Verb("daemon status", "service:status", "", "Whether the daemon runs.", (AS_JSON,)),
    Verb("config show", "service:show_config", "", "Every setting of config.toml with its present value.", (AS_JSON,)),
    Verb(
        "egress log", "network:egress_log", "", "What was refused to sandboxes: time, sandbox, host and reason.",
        (
            Flag("follow", "", "go on until interrupted", short="f"),
            Flag("limit", "N", "at most so many of the past", kind="int", default=100),
            Flag("json", "", "one JSON object a line"),
        ),
    ),
    Verb(
        "audit", "audit:show", "", "Who did what to which sandbox, and how it ended, oldest first.", AUDIT,
        ("atoll audit -f", "atoll audit --sandbox $ID --json"),
    ),
    Verb("audit list", "audit:show", "", "The same as audit alone.", AUDIT),
    Verb("audit path", "audit:path", "", "Where this machine's audit log is."),
    Verb("audit verify", "audit:verify", "", "Check that no record was changed, removed or put in.", (AS_JSON,)),
    Verb(
        "secret set", "secrets:set_value", "NAME KEY", "Keep a secret; its value is standard input.",
        (Flag("from-env", "VAR", "take the value from this variable instead"),),
        ("printf %s \"$TOKEN\" | atoll secret set github token", "atoll sandbox create --secret GH_TOKEN=github:token"),
    ),
    Verb("secret list", "secrets:list_names", "", "Names and keys of your secrets, never values.", (AS_JSON,)),
    Verb("secret rm", "secrets:remove", "NAME [KEY]", "Forget a secret, or one key of it."),
    Verb(
        "doctor", "doctor:doctor", "", "What works here, what does not, and how to fix it.",
        (
            Flag("fix", "", "do what is advised, after showing it and asking"),
            Flag("yes", "", "with --fix: do not ask", short="y"), AS_JSON,
        ),
    ),
    Verb("setup", "doctor:doctor", "", "The same as doctor: nothing is fetched, what is missing is named.", SETUP),
    Verb("completion", "help:completion", "SHELL", "Completion script for bash, zsh or fish."),
    Verb(
        "version", "help:version", "", "Print the version.",
        (Flag("check", "", "also of the daemon, the agent and the store, and whether they fit"), AS_JSON),
    ),
    Verb(
        "help", "help:show", "[VERB] [VERB2]", "This text, a group's or a command's.",
        (Flag("all", "", "every command, with exit codes and environment"),),
    ),
)  # fmt: skip

VERBS: tuple[Verb, ...] = (*OWN, *K8E, *AGENTKERNEL, *AGENTS, *FUNCTIONS, *KUBERNETES)
BY_NAME = {verb.name: verb for verb in VERBS}
GROUPS = tuple(dict.fromkeys(verb.name.split()[0] for verb in VERBS if " " in verb.name))
ALIASES = {
    "sb": "sandbox",
    "status": "doctor",
    "completions": "completion",
    "images": "image list",
    **K8E_ALIASES,
    **AGENTS_ALIASES,
}
