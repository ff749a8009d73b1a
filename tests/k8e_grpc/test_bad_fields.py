"""Every field of every RPC with every wrong value: the fields come from the descriptors, so that a new one is tried too.

An answer or a refusal that says what is wrong are both fine. An internal error, a hang, a dead daemon or a sandbox that
no longer works are not.
"""

import secrets
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import FieldDescriptor as F
from google.protobuf.message_factory import GetMessageClass

from atoll.proto.sandbox.v1 import sandbox_pb2 as pb

from .test_tenants import foreign_calls

METHODS = {method.name: method for method in pb.DESCRIPTOR.services_by_name["SandboxService"].methods}
LONG = "x" * 70_000
TEXTS = [
    "",
    "\0",
    "a\0b",
    "../../../etc/passwd",
    LONG,
    "é\u202e\U0001f4a9",
    "a\nb",
    " ",
    "-rf",
    "sess-",
    "%s%n",
    "'; id",
]
NUMBERS = {32: [-1, 0, 2**31 - 1, -(2**31)], 64: [-1, 0, 2**63 - 1, -(2**63)]}
FAST = dict.fromkeys(("write_burst", "write_rate", "read_burst", "read_rate"), 10**6)
LATE = ("image", "runtime_class", "profile", "mode")  # of a new session: what is looked at after the quota
REFUSALS = {"INVALID_ARGUMENT", "NOT_FOUND", "FAILED_PRECONDITION", "PERMISSION_DENIED", "RESOURCE_EXHAUSTED",
            "ALREADY_EXISTS", "UNIMPLEMENTED", "OUT_OF_RANGE"}  # fmt: skip


def values(field: F) -> list[Any]:
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        return [{}, {"": ""}, {"A=B": "x"}, {"A\0": "x"}, {"A": "\0"}, {"A": "x" * 5000}, {LONG: "x"}, {"é": "ü"}]
    if field.message_type is not None:
        made = GetMessageClass(field.message_type)
        return [[made()], [made(), made()], [made()] * 100] if field.is_repeated else [made()]
    kinds: dict[int, list[Any]] = {
        F.CPPTYPE_STRING: TEXTS if field.type == F.TYPE_STRING else [b"", b"\0", b"\xff\xfe" * 50_000],
        F.CPPTYPE_INT32: NUMBERS[32], F.CPPTYPE_INT64: NUMBERS[64],
        F.CPPTYPE_UINT32: [0, 2**32 - 1], F.CPPTYPE_UINT64: [0, 2**64 - 1],
        F.CPPTYPE_BOOL: [False, True], F.CPPTYPE_ENUM: [0, 99, -1],
        F.CPPTYPE_DOUBLE: [-1.0, 0.0, 1e308, float("nan"), float("inf"), float("-inf")],
        F.CPPTYPE_FLOAT: [-1.0, 0.0, float("nan"), float("inf"), float("-inf")],
    }  # fmt: skip
    found = kinds[field.cpp_type]
    if not field.is_repeated:
        return found
    return [[], *([value] for value in found), [found[-1]] * 3000]


class Lab:
    def __init__(self, gateway: Any) -> None:
        self.gateway = gateway
        # Its one sandbox is there, so that a request for another is checked and then refused: hundreds would take minutes.
        key = gateway.key(f"bad-{secrets.token_hex(4)}", quotas={**FAST, "sandboxes": 1}).secret
        self.stub, self.metadata = gateway.stub(key), (("authorization", f"Bearer {key}"),)
        self.session = self.stub.CreateSession(memory_mb=256).session_id
        free = gateway.key(f"free-{secrets.token_hex(4)}", quotas=FAST).secret
        self.free, self.free_metadata = gateway.stub(free), (("authorization", f"Bearer {free}"),)
        self.channel = gateway.channel()
        self.run = self.stub.Exec(session_id=self.session, command="true", background=True).run_id

    def base(self, rpc: str) -> dict[str, Any]:
        """Fields that are good, so that the one under test is what is wrong. Terminals are fresh: some calls end them."""
        ended = (
            self.stub.CreateTerminal(session_id=self.session, argv=["true"]).terminal_id if "Terminal" in rpc else ""
        )
        known = foreign_calls(self.session, self.run, ended)
        extra = {"CreateSession": {"memory_mb": 64}, "SnapshotPut": {"name": "n", "layers": ["0" * 64]},
                 "SnapshotGet": {"name": "n"}, "ApproveAction": {"approval_id": "approval-x"}}  # fmt: skip
        return dict(known.get(rpc, extra.get(rpc, {})))

    def call(self, rpc: str, data: bytes, *, free: bool = False) -> tuple[str, str, list[Any]]:
        """The status of a request sent as bytes, what it says, and the answers."""
        method = METHODS[rpc]
        kind = self.channel.unary_stream if method.server_streaming else self.channel.unary_unary
        parse = GetMessageClass(method.output_type).FromString
        made = kind(f"/{method.containing_service.full_name}/{rpc}", response_deserializer=parse)
        try:
            answer = made(data, timeout=120, metadata=self.free_metadata if free else self.metadata)
            answers = list(answer) if method.server_streaming else [answer]
        except grpc.RpcError as refused:
            return refused.code().name, refused.details() or "", []
        return "OK", "", answers

    def check(self, rpc: str, said: str, status: str, text: str) -> None:
        assert status == "OK" or status in REFUSALS, f"{rpc} {said}: {status} {text}"
        assert "Traceback" not in text and "internal" not in text.lower(), f"{rpc} {said}: {text}"
        assert len(text) < 4096, f"{rpc} {said}: the refusal repeats what was sent"


@pytest.fixture(scope="module")
def lab(gateway):
    made = Lab(gateway)
    yield made
    made.stub.DestroySession(session_id=made.session)


def set_field(message: Any, field: F, value: Any) -> None:
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        message.ClearField(field.name)
        getattr(message, field.name).update(value)
    elif field.is_repeated:
        message.ClearField(field.name)
        getattr(message, field.name).extend(value)
    elif field.message_type is not None:
        getattr(message, field.name).CopyFrom(value)
    else:
        setattr(message, field.name, value)


@pytest.mark.parametrize("rpc", sorted(METHODS))
def test_every_field_with_every_wrong_value(lab, rpc) -> None:
    kind = GetMessageClass(METHODS[rpc].input_type)
    for field in METHODS[rpc].input_type.fields:
        for value in values(field):
            request = kind(**lab.base(rpc))
            set_field(request, field, value)
            free = rpc == "CreateSession" and field.name in LATE
            status, text, answers = lab.call(rpc, request.SerializeToString(), free=free)
            lab.check(rpc, f"{field.name}={value!r:.60}", status, text)
            for answer in answers if free else ():
                lab.free.DestroySession(session_id=answer.session_id)
    if rpc in ("DestroySession", "PauseSession"):
        return
    assert lab.stub.Exec(session_id=lab.session, command="echo alive").stdout == "alive\n"


@pytest.mark.parametrize("rpc", sorted(METHODS))
def test_bytes_that_are_no_message_of_that_kind(lab, rpc) -> None:
    """Each field with another wire type, text that is no UTF-8, a length beyond the end, and plain noise."""
    broken = [b"\xff" * 8, b"\x0a\xff\xff\xff\xff\x0f", b"\x0a", bytes(range(1, 65))]
    for field in METHODS[rpc].input_type.fields:
        number = field.number
        for wire, payload in ((0, b"\x01"), (1, bytes(8)), (2, b"\x02\xff\xfe"), (5, bytes(4)), (3, b""), (7, b"")):
            broken.append(_varint(number << 3 | wire) + payload)
    for data in broken:
        status, text, _ = lab.call(rpc, data)
        lab.check(rpc, data.hex()[:60], status, text)


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)
