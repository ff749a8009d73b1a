"""Two keys, a third without rights, and a curious one: every RPC against somebody else's things."""

import hashlib
import secrets
import threading

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from atoll.client import calls
from atoll.client._sync.secure import RemoteLink
from atoll.errors import NotFound
from atoll.proto.sandbox.v1 import sandbox_pb2 as pb
from atoll.proto.sandbox.v1 import sandbox_pb2_grpc

from .test_rpcs import code, refusal


@pytest.fixture(scope="module")
def tenants(gateway):
    mark = secrets.token_hex(4)
    alice, bob = gateway.key(f"alice-{mark}"), gateway.key(f"bob-{mark}")
    one, two = gateway.stub(alice.secret), gateway.stub(bob.secret)
    one.key, one.name, two.key, two.name = alice.secret, alice.key.name, bob.secret, bob.key.name
    session = one.CreateSession(session_id=f"work-{mark}", memory_mb=256).session_id
    sid = one.GetSession(session_id=session)
    core = one.Exec(session_id=session, command="true", background=True).run_id.split("-bg-")[0]
    yield one, two, session, core
    one.DestroySession(session_id=session)
    assert sid.phase == "Active"


def foreign_calls(core: str, run: str, terminal: str) -> dict[str, dict]:
    """Every RPC that takes an id of a session, run or terminal, with otherwise good arguments."""
    s = {"session_id": core}
    return {
        "GetSession": s,
        "DestroySession": s,
        "PauseSession": s,
        "ResumeSession": s,
        "Exec": {**s, "command": "true"},
        "ExecStream": {**s, "command": "true"},
        "WriteFile": {**s, "path": "/workspace/x", "content": "x"},
        "ReadFile": {**s, "path": "/etc/passwd"},
        "ListFiles": s,
        "PipInstall": {**s, "packages": ["x"]},
        "RunSubAgent": {"parent_session_id": core},
        "ConfirmAction": {**s, "action": "do it"},
        "PollRun": {"run_id": run},
        "GetTranscript": s,
        "GetEvents": s,
        "GetProcesses": s,
        "CreateTerminal": {**s, "argv": ["sh"]},
        "TerminalStream": {"terminal_id": terminal},
        "TerminalWrite": {"terminal_id": terminal, "data": b"x"},
        "TerminalResize": {"terminal_id": terminal, "rows": 1, "cols": 1},
        "TerminalForeground": {"terminal_id": terminal},
        "TerminalSignal": {"terminal_id": terminal, "signal": pb.TERMINAL_SIGNAL_KILL},
        "TerminalDestroy": {"terminal_id": terminal},
        "ExposeService": {**s, "port": 80},
        "UnexposeService": {**s, "port": 80},
        "ListExposed": s,
        "UpdateAllowedHosts": {**s, "hosts": ["example.com"]},
    }


FOREIGN = sorted(foreign_calls("", "", ""))


@pytest.mark.parametrize("rpc", FOREIGN)
def test_k8e_D15_anothers_thing_answers_like_none(tenants, rpc) -> None:
    """Same status, same words but for the id: nothing tells a foreign session from one that never was."""
    one, two, session, core = tenants
    run = one.Exec(session_id=session, command="sleep 30", background=True, timeout=30).run_id
    terminal = one.CreateTerminal(session_id=session, argv=["cat"]).terminal_id
    nothing = "sess-" + "".join(secrets.choice("abcdefghij") for _ in range(20))
    bare, bare_nothing = core.removeprefix("sess-"), nothing.removeprefix("sess-")
    try:
        for foreign, missing in ((core, nothing), (session, "work-nothing")):
            theirs = foreign_calls(foreign, run, terminal)[rpc]
            none = foreign_calls(missing, run.replace(bare, bare_nothing), terminal.replace(bare, bare_nothing))[rpc]
            a, b = refusal(getattr(two, rpc), **theirs), refusal(getattr(two, rpc), **none)
            assert a.code() is b.code()
            assert a.code().name in ("NOT_FOUND", "FAILED_PRECONDITION")
            plain = [e.details().replace(x, "ID") for e, x in ((a, foreign), (b, missing))]
            plain = [text.replace(bare, "ID").replace(bare_nothing, "ID") for text in plain]
            assert plain[0] == plain[1]
    finally:
        one.TerminalDestroy(terminal_id=terminal, grace_ms=10)
        one.Exec(session_id=session, command="pkill -9 sleep; true")
    assert one.Exec(session_id=session, command="echo mine").stdout == "mine\n"


def test_lists_show_only_ones_own(tenants) -> None:
    one, two, session, _ = tenants
    assert session in {s.session_id for s in one.ListSessions(phase="all").sessions}
    assert not two.ListSessions(phase="all").sessions
    assert not two.GetEvents().events
    assert one.GetEvents().events


def test_names_are_free_for_everybody(tenants) -> None:
    """What another has called its session neither collides nor shows."""
    _, two, session, _ = tenants
    made = two.CreateSession(session_id=session, memory_mb=128)
    assert made.session_id == session
    assert two.Exec(session_id=session, command="ls /workspace").stdout == ""
    two.DestroySession(session_id=session)


EVERY = [method.name for method in pb.DESCRIPTOR.services_by_name["SandboxService"].methods]


@pytest.mark.parametrize("rpc", EVERY)
def test_without_a_good_key_nothing_is_even_parsed(gateway, rpc) -> None:
    for key in ("0" * 64, "zzz-wrong", "e2b_" + "f" * 64):
        error = refusal(getattr(gateway.stub(key), rpc))
        assert error.code() is grpc.StatusCode.UNAUTHENTICATED
        assert key not in error.details()


# RPCs that name nothing of a session, run or terminal, and the test that two callers are kept apart there.
ELSEWHERE = {
    "CreateSession": "test_names_are_free_for_everybody",
    "ListSessions": "test_lists_show_only_ones_own",
    "ApproveAction": "test_k8e_D25_a_plain_key_approves_nothing",
    "Login": "test_a_certificate_is_for_its_own_key",
    "SnapshotPut": "test_k8e_D15_snapshots_are_ones_own",
    "SnapshotGet": "test_k8e_D15_snapshots_are_ones_own",
    "SnapshotList": "test_k8e_D15_snapshots_are_ones_own",
}


def test_there_are_34_rpcs_and_each_is_tried_by_another() -> None:
    assert len(EVERY) == 34
    assert sorted((*FOREIGN, *ELSEWHERE)) == sorted(EVERY)
    assert all(test in globals() for test in ELSEWHERE.values())


def test_k8e_D15_snapshots_are_ones_own(tenants) -> None:
    """The content of another's snapshot can neither be listed, nor read, nor given a name of one's own by its digest."""
    one, two, session, _ = tenants
    name = f"snap-{secrets.token_hex(4)}"
    one.WriteFile(session_id=session, path="/workspace/secret", content=f"canary {name}")
    layer = hashlib.sha256(f"canary {name}".encode()).hexdigest()
    link = RemoteLink(two._gateway.endpoint, api_key=one.key, ca_cert=str(two._gateway.home / "tls" / "sandbox-ca.crt"))
    link.call(calls.post(f"/v1/sandboxes/{session}/snapshots", {"name": name}))
    assert name in one.SnapshotList().names and layer in one.SnapshotGet(name=name).layers
    assert name not in two.SnapshotList().names
    theirs, none = refusal(two.SnapshotGet, name=name), refusal(two.SnapshotGet, name="never-was")
    assert theirs.code() is none.code() is grpc.StatusCode.NOT_FOUND
    assert theirs.details().replace(name, "N") == none.details().replace("never-was", "N")
    for guess in (layer, "0" * 64):  # a digest is a word: it is written down alike, and nothing hangs on it
        assert two.SnapshotPut(name="mine", layers=[guess]).layers == 1
        assert list(two.SnapshotGet(name="mine").layers) == [guess]
    bob = RemoteLink(two._gateway.endpoint, api_key=two.key, ca_cert=str(two._gateway.home / "tls" / "sandbox-ca.crt"))
    with pytest.raises(NotFound):
        bob.call(calls.post("/v1/snapshots/mine/restore", {}))
    bob.call(calls.Call("DELETE", "/v1/snapshots/mine"))
    assert not two.SnapshotList().names
    bob.close()
    link.call(calls.Call("DELETE", f"/v1/snapshots/{name}"))
    link.close()


def test_a_certificate_is_for_its_own_key(gateway, tenants) -> None:
    """Whatever name a request for a certificate says, the certificate says the key's."""
    one, two, session, _ = tenants
    secret = ec.generate_private_key(ec.SECP256R1())
    asked = x509.CertificateSigningRequestBuilder().subject_name(
        x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, one.name)])
    )
    csr = asked.sign(secret, hashes.SHA256()).public_bytes(serialization.Encoding.PEM).decode()
    made = two.Login(csr=csr)
    subject = x509.load_pem_x509_certificate(made.cert.encode()).subject
    assert subject.get_attributes_for_oid(x509.NameOID.COMMON_NAME)[0].value == two.name
    pem = secret.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    stub = sandbox_pb2_grpc.SandboxServiceStub(gateway.channel((pem, made.cert.encode())))
    assert not stub.ListSessions(pb.ListSessionsRequest(phase="all"), timeout=60).sessions
    with pytest.raises(grpc.RpcError) as caught:
        stub.GetSession(pb.GetSessionRequest(session_id=session), timeout=60)
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


def test_expired_and_revoked_keys(gateway) -> None:
    name = f"gone-{secrets.token_hex(4)}"
    made = gateway.key(name)
    stub = gateway.stub(made.secret)
    stub.ListSessions()
    gateway.revoke(name)
    assert code(stub.ListSessions) == "UNAUTHENTICATED"


def test_quotas_hold_under_a_race(gateway) -> None:
    """Twenty creates at once on a key for two: never more than two, and a place is free again after destroy."""
    made = gateway.key(
        f"tight-{secrets.token_hex(4)}", quotas={"sandboxes": 2, "write_burst": 1000, "write_rate": 1000}
    )
    stub = gateway.stub(made.secret)
    outcomes: list[str] = []

    def create() -> None:
        try:
            outcomes.append(stub.CreateSession(memory_mb=64).session_id)
        except grpc.RpcError as error:
            outcomes.append(error.code().name)

    threads = [threading.Thread(target=create) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(180)
    created = [o for o in outcomes if o.startswith("sess-")]
    assert len(created) == 2
    assert set(outcomes) - set(created) == {"RESOURCE_EXHAUSTED"}
    stub.DestroySession(session_id=created[0])
    created[0] = stub.CreateSession(memory_mb=64).session_id
    for session in created:
        stub.DestroySession(session_id=session)


def test_memory_and_cpu_quotas(gateway) -> None:
    rates = {"write_burst": 1000, "write_rate": 1000}
    stub = gateway.stub(
        gateway.key(f"m-{secrets.token_hex(4)}", quotas={"memory_mb": 300, "cpus": 1.5, **rates}).secret
    )
    assert code(stub.CreateSession, memory_mb=400) == "RESOURCE_EXHAUSTED"
    assert code(stub.CreateSession, memory_mb=100, cpus=2) == "RESOURCE_EXHAUSTED"
    made = stub.CreateSession(memory_mb=200, cpus=1).session_id
    assert code(stub.CreateSession, memory_mb=200, cpus=0.1) == "RESOURCE_EXHAUSTED"
    stub.DestroySession(session_id=made)


@pytest.mark.parametrize("fields", [{"allowed_hosts": ["*"]}, {"profile": "permissive"}, {"mode": "native"}], ids=repr)
def test_a_key_asks_only_below_its_ceiling(gateway, tenants, fields) -> None:
    _, two, _, _ = tenants
    assert code(two.CreateSession, **fields) == "PERMISSION_DENIED"


def test_k8e_D25_a_plain_key_approves_nothing(tenants) -> None:
    one, two, session, _ = tenants
    for stub in (one, two):
        assert code(stub.ApproveAction, approval_id=f"approval-{session}-x", approved=True) == "PERMISSION_DENIED"
