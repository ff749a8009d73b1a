"""K8E's own clients: stream frames on request, its event names, one rule for packages, its manifest registry."""

import json
import secrets
import time

import grpc
import pytest

from atoll.proto.sandbox.v1 import sandbox_pb2 as pb
from atoll.proto.sandbox.v1 import sandbox_pb2_grpc

from .test_rpcs import WAIT, code, poll, refusal

COMMAND = "printf 'one\\n\\ntw'; sleep 0.2; printf 'o\\n{\"exit\":9}\\n'; exit 7"
OUTPUT = 'one\n\ntwo\n{"exit":9}\n'


def chunks_of(gateway, metadata=(), **fields) -> str:
    stub = sandbox_pb2_grpc.SandboxServiceStub(gateway.channel())
    answers = stub.ExecStream(pb.ExecRequest(**fields), timeout=WAIT, metadata=metadata)
    return "".join(answer.chunk for answer in answers)


def decode(body: str) -> tuple[int, str, int]:
    """The pid, the output and the exit code of K8E's frames, read as its decoder reads them."""
    frames = body.split("\n\n")
    assert frames.pop() == "" and all(frame.startswith("data: ") for frame in frames), body
    first, *lines, last = (frame.removeprefix("data: ") for frame in frames)
    return json.loads(first)["pid"], "\n".join(lines), json.loads(last)["exit"]


@pytest.mark.parametrize("how", ["field", "metadata"])
def test_everyday_27_exec_stream_sends_frames_on_request(gateway, shared, how) -> None:
    metadata = (("x-sandbox-stream", "sse"),) if how == "metadata" else ()
    fields = {"frames": "sse"} if how == "field" else {}
    pid, output, exit_code = decode(chunks_of(gateway, metadata, session_id=shared, command=COMMAND, **fields))
    assert (pid > 0, output, exit_code) == (True, OUTPUT, 7)


def test_everyday_27_exec_stream_is_plain_text_without_the_request(gateway, shared) -> None:
    assert chunks_of(gateway, session_id=shared, command=COMMAND) == OUTPUT


def test_everyday_27_an_unknown_kind_of_frames_is_refused(local, shared) -> None:
    assert code(local.ExecStream, session_id=shared, command="true", frames="xml") == "INVALID_ARGUMENT"


def test_everyday_27_a_timeout_ends_the_frames_with_an_exit(gateway, shared) -> None:
    _, output, exit_code = decode(
        chunks_of(gateway, session_id=shared, command="echo before; sleep 60", timeout=3, frames="sse")
    )
    assert (output, exit_code) == ("before\n", -1)


def events_of(local, **fields) -> list[dict]:
    return [json.loads(event) for event in local.GetEvents(**fields).events]


def test_everyday_27_events_have_k8e_names(local, session) -> None:
    local.WriteFile(session_id=session, path="/workspace/kept", content="text")
    local.ReadFile(session_id=session, path="/workspace/kept")
    local.Exec(session_id=session, command="exit 3")
    run = local.Exec(session_id=session, command="true", background=True).run_id
    poll(local, run)
    until = time.monotonic() + WAIT
    wanted = {"file_write", "file_read", "exec_end", "bg_submit"}
    while not wanted <= {one["ev"] for one in events_of(local, session_id=session)}:
        assert time.monotonic() < until, events_of(local, session_id=session)
        time.sleep(0.05)
    found = {one["ev"]: one for one in reversed(events_of(local, session_id=session))}
    assert found["file_write"]["path"] == found["file_read"]["path"] == "/workspace/kept"
    assert found["exec_end"]["exit_code"] == 3
    assert found["bg_submit"]["run_id"] == run
    assert all(abs(one["t"] - time.time()) < 600 for one in found.values())


def test_everyday_27_events_carry_the_callers_own_session_id(local) -> None:
    chosen = f"mine-{secrets.token_hex(4)}"
    local.CreateSession(session_id=chosen, memory_mb=128)
    try:
        child = local.RunSubAgent(parent_session_id=chosen).session_id
        local.Exec(session_id=chosen, command="true")
        assert {one["sid"] for one in events_of(local, session_id=chosen)} == {chosen}
        assert {one["sid"] for one in events_of(local, session_id=child)} == {child}
        assert {chosen, child} <= {one["sid"] for one in events_of(local)}
    finally:
        local.DestroySession(session_id=chosen)
    assert {chosen, child} <= {one["sid"] for one in events_of(local)}  # also after the end


@pytest.mark.parametrize("package", ["--index-url=http://127.0.0.1/", "-r/workspace/x", "-e.", "", "a\0b"])
def test_B3_pip_install_refuses_options(local, shared, package) -> None:
    assert code(local.PipInstall, session_id=shared, packages=["idna", package]) == "INVALID_ARGUMENT"


def test_everyday_27_snapshot_put_registers_a_manifest(gateway, local) -> None:
    """K8E's CLI keeps layers on its own disk and publishes only their digests, in their order."""
    name = f"manifest-{secrets.token_hex(4)}"
    layers = [secrets.token_hex(32) for _ in range(3)]
    layers.append(layers[0])
    put = local.SnapshotPut(name=name, layers=layers)
    assert (put.name, put.layers) == (name, 4)
    assert list(local.SnapshotGet(name=name).layers) == layers
    assert name in local.SnapshotList().names
    assert local.SnapshotPut(name=name, layers=layers[:1]).layers == 1  # published again
    assert list(local.SnapshotGet(name=name).layers) == layers[:1]
    other = gateway.stub(gateway.key(f"key-{secrets.token_hex(4)}").secret)
    assert name not in other.SnapshotList().names
    assert code(other.SnapshotGet, name=name) == "NOT_FOUND"


def test_everyday_27_a_registry_of_manifests_is_bounded(local) -> None:
    many = refusal(local.SnapshotPut, name="many", layers=["0" * 64] * 5000)
    assert many.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_B7_open_files_can_be_limited_over_grpc(local) -> None:
    made = local.CreateSession(files=128, memory_mb=128).session_id
    try:
        assert local.Exec(session_id=made, command="ulimit -n").stdout == "128\n"
    finally:
        local.DestroySession(session_id=made)


def test_everyday_11_python_runs_where_python3_does(local, shared) -> None:
    done = local.Exec(session_id=shared, argv=["python", "-c", "import sys; print(sys.version_info.major)"])
    assert (done.stdout, done.exit_code) == ("3\n", 0), done.stderr


def test_everyday_29_file_calls_have_the_rights_of_a_user(gateway, shared) -> None:
    stub = sandbox_pb2_grpc.SandboxServiceStub(gateway.channel())

    def call(name: str, user: str | None, **fields):
        metadata = (("x-sandbox-user", user),) if user is not None else ()
        request = getattr(pb, f"{name}Request")(session_id=shared, **fields)
        return getattr(stub, name)(request, timeout=WAIT, metadata=metadata)

    call("Exec", None, command="mkdir -pm 777 /workspace/line29; umask 077; echo root > /workspace/line29/private")
    path = "/workspace/line29/theirs"
    call("WriteFile", "nobody", path=path, content="x")
    owner = call("Exec", None, command=f"stat -c %u {path}")
    assert owner.stdout == "65534\n" and call("ReadFile", "nobody", path=path).content == "x"
    assert path in {one.path for one in call("ListFiles", "nobody").files}
    for name, user, status in (
        ("ReadFile", "nobody", "PERMISSION_DENIED"), ("WriteFile", "65534:65534", "PERMISSION_DENIED"),
        ("ReadFile", "no-such-user", "INVALID_ARGUMENT"), ("ReadFile", "a b;c", "INVALID_ARGUMENT"),
        ("WriteFile", "x" * 5000, "INVALID_ARGUMENT"), ("ReadFile", "70000", "INVALID_ARGUMENT"),
    ):  # fmt: skip
        with pytest.raises(grpc.RpcError) as caught:
            call(name, user, path="/workspace/line29/private")
        assert caught.value.code().name == status, (name, user, caught.value)
    assert call("ReadFile", None, path="/workspace/line29/private").content == "root\n"
    assert call("Exec", "nobody", command="id -u").stdout == "65534\n"
    terminal = call("CreateTerminal", "nobody", argv=["id", "-u"]).terminal_id
    shown = b"".join(
        one.data for one in stub.TerminalStream(pb.TerminalStreamRequest(terminal_id=terminal), timeout=WAIT)
    )
    assert shown == b"65534\r\n"
    with pytest.raises(grpc.RpcError) as caught:
        call("Exec", "a b;c", command="true")
    assert caught.value.code().name == "INVALID_ARGUMENT"
