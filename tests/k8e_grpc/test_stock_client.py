"""A client made by grpc_tools.protoc from the published proto, with nothing of ours in it."""

import subprocess
import sys
from pathlib import Path

import pytest

PROTO = Path(__file__).parents[2] / "proto"

PROGRAM = """
import sys, grpc
from sandbox.v1 import sandbox_pb2 as pb, sandbox_pb2_grpc
endpoint, ca, key = sys.argv[1:4]
channel = grpc.secure_channel(endpoint, grpc.ssl_channel_credentials(open(ca, "rb").read()))
stub = sandbox_pb2_grpc.SandboxServiceStub(channel)
auth = [("authorization", "Bearer " + key)] if key else []
def call(name, request): return getattr(stub, name)(request, metadata=auth, timeout=120)
try:
    call("DestroySession", pb.DestroySessionRequest(session_id="healthcheck-probe-noop"))
except grpc.RpcError as error:
    assert "not found" in error.details(), error
sid = call("CreateSession", pb.CreateSessionRequest(tenant_id="t", env={"A": "b"})).session_id
assert sid.startswith("sess-")
done = call("Exec", pb.ExecRequest(session_id=sid, command="echo $A; echo e >&2; exit 7", timeout=30, workdir="/workspace"))
assert (done.stdout, done.stderr, done.exit_code) == ("b\\n", "e\\n", 7), done
text = "".join(m.chunk for m in call("ExecStream", pb.ExecRequest(session_id=sid, command="printf 'a\\n\\nb\\n'")))
assert text == "a\\n\\nb\\n", text
call("WriteFile", pb.WriteFileRequest(session_id=sid, path="/workspace/data.csv", content="x,y\\n1,2\\n"))
script = "import csv, json; print(json.dumps(list(csv.reader(open('data.csv')))))"
call("WriteFile", pb.WriteFileRequest(session_id=sid, path="/workspace/s.py", content=script))
done = call("Exec", pb.ExecRequest(session_id=sid, command="python3 s.py > r.json; cat r.json"))
assert call("ReadFile", pb.ReadFileRequest(session_id=sid, path="/workspace/r.json")).content == done.stdout
names = {f.path for f in call("ListFiles", pb.ListFilesRequest(session_id=sid)).files}
assert names == {"/workspace/data.csv", "/workspace/s.py", "/workspace/r.json"}
run = call("Exec", pb.ExecRequest(session_id=sid, command="echo bg", background=True)).run_id
while call("PollRun", pb.PollRunRequest(run_id=run)).status in ("started", "running"): pass
assert call("PollRun", pb.PollRunRequest(run_id=run)).stdout == "bg\\n"
assert call("GetSession", pb.GetSessionRequest(session_id=sid)).phase == "Active"
term = call("CreateTerminal", pb.CreateTerminalRequest(session_id=sid, argv=["sh", "-c", "echo tty; exit 3"]))
frames = list(call("TerminalStream", pb.TerminalStreamRequest(terminal_id=term.terminal_id)))
assert frames[-1].exit.exit_code == 3
assert call("DestroySession", pb.DestroySessionRequest(session_id=sid)).ok
assert not [name for name in sys.modules if name == "atoll" or name.startswith("atoll.")]
print("fine")
"""


@pytest.fixture(scope="module")
def stubs(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("stubs")
    command = [
        sys.executable,
        "-m",
        "grpc_tools.protoc",
        "-I",
        str(PROTO),
        f"--python_out={out}",
        f"--grpc_python_out={out}",
    ]
    subprocess.run([*command, str(PROTO / "sandbox/v1/sandbox.proto")], check=True, timeout=120)
    return out


@pytest.mark.parametrize("keyed", [True, False], ids=["with a key", "local without"])
def test_k8e_P22_P44_generated_client(gateway, stubs, keyed) -> None:
    key = gateway.key("stock").secret if keyed else ""
    ca = gateway.home / "tls" / "sandbox-ca.crt"
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, gateway.endpoint.replace("127.0.0.1", "localhost"), str(ca), key],
        cwd=stubs, env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(stubs)}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.stdout == "fine\n", done.stderr


def test_generated_code_is_up_to_date() -> None:
    root = PROTO.parent
    done = subprocess.run([root / "scripts/gen_proto.sh", "--check"], capture_output=True, text=True, timeout=120,
                          env={"PATH": "/usr/bin:/bin", "PYTHON": sys.executable})  # fmt: skip
    assert done.returncode == 0, done.stderr
