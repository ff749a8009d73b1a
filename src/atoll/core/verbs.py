"""The verbs of core, one row each: what is asked and answered, who may call it, what of it is recorded.

Every door reads this table. REST takes a route's scope, request and answer from the row that the route names, and the
OpenAPI document is made of those. `access/audited_verbs.py` checks the scope and writes the audit records around each
method that names a row (`@verb("commands.exec")`). A verb that is not here cannot be called through core.
"""

from typing import Any, Literal, NamedTuple

from atoll import model

# The scope of a key. `local`: only the daemon's own user. `own`: the verb itself decides.
Scope = Literal["use", "admin", "approve", "local", "own"]


class Verb(NamedTuple):
    """A row. `name` is the action in the audit log."""

    name: str
    request: type[Any] | None = None
    answer: Any = None
    scope: Scope = "use"
    audited: tuple[str, ...] = ()  # arguments, and fields of the request. Never env, content or secrets
    writes: bool = False  # changes something, so its beginning and its end are recorded
    repeatable: bool = False  # doing it twice is the same as once: a lost answer may be asked for again
    sandbox: bool = True  # its argument `ref` names the sandbox it is about
    ending: bool = False  # frees something or takes a right away: done even when it cannot be recorded
    door: Scope | None = None  # what gRPC asks of a key before; core itself answers as if nothing were there
    through: tuple[str, ...] = ()  # made of these verbs, which are recorded in its place


def _reading(name: str, request: type[Any] | None = None, answer: Any = None, scope: Scope = "use") -> Verb:
    return Verb(name, request, answer, scope, repeatable=True)


def _writing(
    name: str,
    request: type[Any] | None = None,
    answer: Any = None,
    *audited: str,
    scope: Scope = "use",
    repeatable: bool = False,
    sandbox: bool = True,
) -> Verb:
    return Verb(name, request, answer, scope, audited, True, repeatable, sandbox)


def _ending(
    name: str,
    request: type[Any] | None = None,
    answer: Any = None,
    *audited: str,
    scope: Scope = "use",
    repeatable: bool = False,
    sandbox: bool = True,
) -> Verb:
    return Verb(name, request, answer, scope, audited, True, repeatable, sandbox, ending=True)


_PATH = ("path", "path_b64", "user")
_PATHS = ("src", "src_b64", "dst", "dst_b64", "user")
_SANDBOX = ("name", "image", "runtime", "profile", "hosts", "more_hosts", "lifetime_s", "idle_timeout_s",
            "require_approval")  # fmt: skip
_COMMAND = ("command", "argv", "code", "language", "user")
_INFO = model.SandboxInfo

_ROWS = (
    # The life of sandboxes
    _writing("create", model.CreateSandbox, _INFO, *_SANDBOX, repeatable=True, sandbox=False),  # by request_id
    _reading("get", None, _INFO),
    _reading("list"),
    _reading("usage"),
    _ending("destroy", None, _INFO, "reason", repeatable=True),
    _ending("stop", model.Request, _INFO),
    _writing("start", model.Request, _INFO),
    _ending("pause", model.Request, _INFO),
    _writing("resume", model.Request, _INFO),
    _reading("metrics"),
    _reading("notes.get"),
    _writing("notes.change", None, None, "surface", repeatable=True),
    _writing("extend", model.Extend, _INFO, "lifetime_s", "idle_timeout_s"),
    _writing("subagents.create", model.SubAgent, _INFO, "name", "hosts"),
    Verb("run", model.RunOnce, model.ExecResult, writes=True, sandbox=False,
         through=("create", "files.write", "commands.stream", "destroy")),
    Verb("manifests.create", model.CreateFromManifest, _INFO, writes=True, sandbox=False,
         through=("create", "files.write", "files.mkdir", "commands.exec", "destroy")),
    _reading("sessions.find"),
    Verb("sessions.obtain", model.ObtainSession, model.SessionInfo, writes=True, repeatable=True, sandbox=False,
         through=("create", "start", "resume", "files.write", "files.mkdir", "commands.exec", "destroy")),
    # Commands
    _writing("commands.exec", model.ExecSpec, model.ExecResult, *_COMMAND),
    _writing("commands.stream", model.ExecSpec, model.ExecResult, *_COMMAND),
    _writing("commands.background", model.ExecSpec, model.CommandInfo, *_COMMAND),
    _writing("commands.spawn", model.ExecSpec, model.CommandInfo, *_COMMAND),
    _reading("commands.list"),
    _reading("commands.poll", None, model.CommandInfo),
    _reading("commands.attach"),
    _reading("commands.leftover"),
    _writing("commands.stdin", None, None, "command"),
    _ending("commands.signal", model.Signal, None, "command", "signal"),
    _ending("commands.kill", None, model.CommandInfo, "command", repeatable=True),
    _reading("commands.resize", model.Resize),  # a terminal's size is the viewer's
    _reading("commands.foreground"),
    _reading("commands.processes"),
    # Shell sessions: commands in the background, recorded as such
    Verb("shells.open", model.OpenShell, model.ShellInfo, writes=True, through=("commands.background",)),
    Verb("shells.run", model.ShellRun, model.ShellResult, writes=True, through=("commands.background",)),
    Verb("shells.close", None, model.ShellInfo, writes=True, repeatable=True, through=("commands.kill",)),
    _ending("shells.interrupt", None, model.ShellInfo, "shell"),
    _reading("shells.list"),
    # The code interpreter
    _writing("interpreter.run", model.RunCell, model.CellOutcome, "code", "language"),
    _reading("interpreter.contexts"),
    _writing("interpreter.create_context", model.NewContext, model.ContextInfo, "language", "cwd"),
    _writing("interpreter.restart_context", None, None, "context", repeatable=True),
    _ending("interpreter.remove_context", None, None, "context", repeatable=True),
    # History
    _reading("history.transcript"),
    _reading("history.events"),
    # Files
    _reading("files.read"),
    _reading("files.list", model.ListFiles),
    _reading("files.stat", model.StatFile),
    _reading("files.grep", model.Grep),
    _reading("files.du", model.PathOnly),
    _reading("files.tar_out"),
    _reading("files.watch"),
    _reading("files.accounts"),
    _reading("files.resolve"),
    _writing("files.write", None, None, "path", "user"),
    _writing("files.tar_in", None, None, "path", "user"),
    _writing("files.mkdir", model.MakeDirectory, None, *_PATH),
    _writing("files.remove", model.RemoveFile, None, *_PATH),
    _writing("files.move", model.MoveFile, None, *_PATHS),
    _writing("files.copy", model.CopyFile, None, *_PATHS),
    _writing("files.chmod", model.ChangeMode, None, *_PATH),
    _writing("files.symlink", model.MakeLink, None, *_PATH, "target", "target_b64"),
    _writing("files.sed", model.Sed, None, *_PATH, "files"),
    # The network
    _reading("hosts.get", None, model.HostsInfo),
    _writing("hosts.change", model.ChangeHosts, model.HostsInfo, "hosts", "add", "remove", repeatable=True),
    _reading("ports.connect"),
    _reading("ports.list"),
    _writing("ports.expose", model.Expose, model.Exposure, "port", "host", repeatable=True),
    _ending("ports.unexpose", None, None, "port", repeatable=True),
    # Secrets and approvals
    _reading("secrets.list"),
    _writing("secrets.set", model.SetSecret, None, "name", "key", repeatable=True, sandbox=False),
    _ending("secrets.remove", None, None, "name", "key", sandbox=False),
    _writing("approvals.request", model.AskApproval, model.ApprovalInfo, "action"),
    _reading("approvals.pending", scope="own"),
    _reading("approvals.get", None, model.ApprovalInfo, "own"),
    _writing("approvals.wait", model.WaitApproval, model.ApprovalInfo, "approval", scope="own", sandbox=False),
    _reading("approvals.challenge", model.Request, None, "own"),
    Verb("approvals.decide", model.DecideApproval, model.ApprovalInfo, "own", ("approval", "approved", "reason"),
         writes=True, sandbox=False, door="approve"),
    # Snapshots
    _writing("snapshots.save", model.SaveSnapshot, model.SnapshotInfo, "name", "full", "force"),
    _writing("snapshots.restore", model.RestoreSnapshot, _INFO, *_SANDBOX, sandbox=False),
    _ending("snapshots.delete", None, None, "name", sandbox=False),
    _writing("snapshots.bring_in", None, model.SnapshotInfo, "name", "force", sandbox=False),
    _writing("snapshots.put_manifest", None, None, "name", sandbox=False),
    _reading("snapshots.list"),
    _reading("snapshots.names"),
    _reading("snapshots.inspect", None, model.SnapshotDetails),
    _reading("snapshots.export"),
    _reading("snapshots.get_manifest"),
    _reading("snapshots.manifest_names"),
    # Saved memory
    _writing("checkpoints.save", model.SaveCheckpoint, model.CheckpointInfo, "name", "force"),
    _writing("checkpoints.restore", model.RestoreCheckpoint, _INFO, "name", "lifetime_s", sandbox=False),
    _ending("checkpoints.remove", None, None, "name", sandbox=False),
    _reading("checkpoints.list"),
    _writing("fork", model.Fork, None, "count"),
    # Images
    _reading("images.list"),
    _reading("images.inspect"),
    _reading("images.detect"),
    _reading("images.detect_here", model.DetectImage, None, "admin"),
    _writing("images.pull", model.PullImage, None, "name", scope="admin", sandbox=False),
    _writing("images.build", model.BuildImage, None, "name", "debian", scope="admin", sandbox=False),
    _writing("images.upload", scope="admin", sandbox=False),
    _writing("images.build_file", model.BuildFile, None, "name", "target", scope="admin", sandbox=False),
    _ending("images.remove", model.PullImage, None, "name", scope="admin", sandbox=False),
    _ending("images.prune", model.Request, None, scope="admin", sandbox=False),
    # Volumes
    _writing("volumes.create", model.CreateVolume, model.VolumeInfo, "name", "size_mb", sandbox=False),
    _reading("volumes.list"),
    _reading("volumes.get", None, model.VolumeInfo),
    _ending("volumes.remove", None, model.VolumeInfo, "name", sandbox=False),
    # Templates: images of an owner's own
    _writing("templates.begin", model.NewTemplate, None, "name", sandbox=False),
    _writing("templates.upload", None, None, "name", sandbox=False),
    _writing("templates.build", model.BuildTemplate, None, "build_id", "from_image", "from_template", sandbox=False),
    Verb("templates.create", model.CreateSandbox, _INFO, writes=True, sandbox=False,
         through=("create", "commands.spawn", "commands.exec", "destroy")),
    _reading("templates.list"),
    _reading("templates.get"),
    _writing("templates.tag", None, None, "tags", sandbox=False),
    _ending("templates.untag", None, None, "tags", sandbox=False),
    _ending("templates.remove", sandbox=False),
    # Keys
    _reading("keys.list", None, None, "admin"),
    _reading("keys.challenge", model.ChallengeKey, None, "admin"),
    _writing("keys.create", model.CreateKey, None, "name", "scopes", "ttl", scope="admin", sandbox=False),
    _writing("keys.import", model.ImportKeys, None, "scopes", scope="admin", sandbox=False),
    _ending("keys.revoke", model.NamedKey, None, "name", scope="admin", sandbox=False),
    _reading("certificates.list", None, None, "admin"),
    _ending("certificates.revoke", model.NamedCertificate, None, "fingerprint", scope="admin", sandbox=False),
    _writing("certificates.issue", None, None, "device", scope="own", sandbox=False),
    # The daemon
    _ending("daemon.stop", model.Stop, None, "force", scope="admin", sandbox=False),
    _writing("daemon.pin", model.Pin, None, "mode", scope="admin", repeatable=True, sandbox=False),
)  # fmt: skip

VERBS = {row.name: row for row in _ROWS}
