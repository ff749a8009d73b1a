"""A service for tests of the listener, with a unary call and two streams; its messages are made at run time."""

from types import SimpleNamespace

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool
from google.protobuf.message_factory import GetMessageClass

NAME = "mirror.v1.MirrorService"
_MESSAGES = {
    "CallRequest": {"method": "STRING", "target": "STRING", "body": "BYTES"},
    "CallResponse": {"status": "INT32", "body": "BYTES"},
    "StreamRequest": {"data": "BYTES"},
    "StreamResponse": {"data": "BYTES"},
    "ConnectRequest": {"data": "BYTES"},
    "ConnectResponse": {"data": "BYTES"},
}
_Field = descriptor_pb2.FieldDescriptorProto


def _describe() -> descriptor_pb2.FileDescriptorProto:
    file = descriptor_pb2.FileDescriptorProto(name="mirror.proto", package="mirror.v1", syntax="proto3")
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for number, (field, kind) in enumerate(fields.items(), 1):
            message.field.add(
                name=field, number=number, type=getattr(_Field, f"TYPE_{kind}"), label=_Field.LABEL_OPTIONAL
            )
    service = file.service.add(name="MirrorService")
    for name in ("Call", "Stream", "Connect"):
        streams = name != "Call"
        service.method.add(
            name=name,
            input_type=f".mirror.v1.{name}Request",
            output_type=f".mirror.v1.{name}Response",
            client_streaming=streams,
            server_streaming=streams,
        )
    return file


_pool = descriptor_pool.Default()
_pool.Add(_describe())
SERVICE = _pool.FindServiceByName(NAME)
pb = SimpleNamespace(**{name: GetMessageClass(_pool.FindMessageTypeByName(f"mirror.v1.{name}")) for name in _MESSAGES})


class Stub:
    """Calls the service over a channel."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        for name, kind in (("Call", "unary_unary"), ("Stream", "stream_stream"), ("Connect", "stream_stream")):
            asked, answered = (getattr(pb, f"{name}{end}") for end in ("Request", "Response"))
            make = getattr(channel, kind)
            setattr(self, name, make(f"/{NAME}/{name}", asked.SerializeToString, answered.FromString))
