"""The worker on an engine's bus, driven by the real `iii-sdk` client: calls, errors, schemas, channels, ends."""

import asyncio
import hashlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lab.engine import PATIENCE, Engine
from lab.functions import PLAIN, Envelope, FunctionLab, until

pytest.importorskip("iii", reason="needs iii-sdk")

from iii import InitOptions, InvocationError, register_worker
from iii.channels import ChannelReader
from iii.helpers import create_channel_async
from iii.iii_types import StreamChannelRef

FS = "sandbox::fs::"


class Bus:
    """An engine, atoll's worker on it, and a caller with the stock client."""

    def __init__(self, lab: FunctionLab, directory: Path, **settings: Any) -> None:
        self.lab, self.engine = lab, Engine()
        self.config = directory / "config.yaml"
        block = {"name": "iii-sandbox", "config": {**PLAIN, "upload_idle_secs": 10, **settings}}
        self.config.write_text(json.dumps({"workers": [block]}))
        self.worker = self.start()
        until(lambda: len(self.engine.functions) == 16 or self.worker.poll() is not None, "sixteen functions")
        assert self.worker.poll() is None
        options = InitOptions(
            worker_name="caller", otel={"enabled": False}, enable_metrics_reporting=False, invocation_timeout_ms=90_000
        )
        self.client = register_worker(self.engine.url, options)

    def start(self) -> "subprocess.Popen[bytes]":
        words = ["iii", "worker", "--engine", self.engine.url, "--config", str(self.config)]
        return subprocess.Popen([sys.executable, "-m", "atoll", *words], env=self.lab.env, stderr=subprocess.DEVNULL)

    def __call__(self, function: str, /, **payload: Any) -> Any:
        try:
            return self.client.trigger({"function_id": function, "payload": payload, "timeout_ms": 90_000})
        except InvocationError as error:
            assert error.code == "invocation_failed", error
            raise Envelope(0, error.message) from None

    def refused(self, function: str, /, **payload: Any) -> Envelope:
        with pytest.raises(Envelope) as refused:
            self(function, **payload)
        return refused.value

    def run(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.client._loop).result(PATIENCE * 2)

    def create(self) -> str:
        return str(self("sandbox::create", image="python", memory_mb=256)["sandbox_id"])

    def sandboxes(self) -> set[str]:
        rows = self.lab.ask("GET", "/v1/sandboxes")[1]["sandboxes"]
        return {row["labels"]["iii-id"] for row in rows if row["labels"].get("iii", "").startswith("default/iii")}

    def close(self) -> None:
        self.client.shutdown()
        if self.worker.poll() is None:
            self.worker.terminate()
        self.worker.wait(PATIENCE)
        self.engine.close()
        until(lambda: not self.sandboxes(), "a worker's sandboxes end with it")


@pytest.fixture(scope="module")
def bus(fn: FunctionLab, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bus]:
    made = Bus(fn, tmp_path_factory.mktemp("bus"))
    yield made
    made.close()


@pytest.fixture(scope="module")
def box(bus: Bus) -> str:
    return bus.create()


def reader(bus: Bus, ref: dict[str, Any]) -> ChannelReader:
    return ChannelReader(bus.engine.url, StreamChannelRef(**ref))


async def send(bus: Bus, payload: dict[str, Any], pieces: list[bytes], *, finish: bool = True) -> Any:
    """An upload as the SDK's documentation has it: the reader's end in the payload, the writer filled."""
    channel = await create_channel_async(bus.client)
    ref = channel.reader_ref
    content = {"channel_id": ref.channel_id, "access_key": ref.access_key, "direction": "read"}
    request = {"function_id": FS + "write", "payload": {**payload, "content": content}, "timeout_ms": 170_000}
    answer = asyncio.ensure_future(bus.client.trigger_async(request))
    for piece in pieces:
        await channel.writer.write(piece)
    if finish:
        await channel.writer.close_async()
    try:
        return await answer
    except InvocationError as error:
        raise Envelope(0, error.message) from None


def test_iii_Q2_every_function_is_callable_by_trigger(bus: Bus, box: str) -> None:
    """Call through the engine as any client does."""
    done = bus("sandbox::run", image="python", lang="python", code="print(1+1)")
    assert done["stdout"] == "2\n" and done["success"] is True
    assert bus("sandbox::exec", sandbox_id=box, cmd="echo hi")["stdout"] == "hi\n"
    assert bus(FS + "write", sandbox_id=box, path="/tmp/a", content="text\n")["bytes_written"] == 5
    assert bus(FS + "grep", sandbox_id=box, path="/tmp/a", pattern="t.xt")["matches"][0]["line"] == 1
    assert bus(FS + "sed", sandbox_id=box, path="/tmp/a", pattern="t", replacement="T")["total_replacements"] == 2
    assert bus(FS + "mkdir", sandbox_id=box, path="/tmp/d")["created"] is True
    assert bus(FS + "mv", sandbox_id=box, src="/tmp/a", dst="/tmp/d/a")["moved"] is True
    assert bus(FS + "chmod", sandbox_id=box, path="/tmp/d/a", mode="600")["updated"] == 1
    assert bus(FS + "stat", sandbox_id=box, path="/tmp/d/a")["mode"] == "0600"
    assert [one["name"] for one in bus(FS + "ls", sandbox_id=box, path="/tmp/d")["entries"]] == ["a"]
    assert bus(FS + "rm", sandbox_id=box, path="/tmp/d", recursive=True)["removed"] is True
    assert box in {one["sandbox_id"] for one in bus("sandbox::list")["sandboxes"]}
    assert [one["name"] for one in bus("sandbox::catalog::list")["images"]] == ["python", "node"]


def test_iii_Q3_the_engine_has_the_schemas(bus: Bus) -> None:
    """Register request and answer formats with every function."""
    for name, (_, message) in bus.engine.functions.items():
        assert message["request_format"]["type"] == message["response_format"]["type"] == "object", name
        assert message["description"]
    info = bus("engine::functions::info", function_id="sandbox::exec")
    assert "sandbox_id" in info["request_format"]["required"]


def test_iii_Q21_errors_are_json_in_the_message(bus: Bus, box: str) -> None:
    """Send the envelope alone as the error's message."""
    refused = bus.refused(FS + "write", sandbox_id=box, path="/none/there", content="x")
    assert (refused.code, refused.fix) == ("S211", {"parents": True})
    assert bus.refused("sandbox::exec", cmd="x").code == "S001"
    assert bus.refused("sandbox::create", image="nope").code == "S100"
    assert bus.refused("sandbox::exec", sandbox_id=box, cmd="sleep 600", timeout_ms=500).code == "S200"
    ref = {"channel_id": "c", "access_key": "k", "direction": "write"}
    assert bus.refused(FS + "write", sandbox_id=box, path="/tmp/x", content=ref).code == "S001"
    assert bus.refused("sandbox::exec", sandbox_id=box, cmd=ref).code == "S001"


def test_iii_Q18_streams_go_in_and_out(bus: Bus, box: str) -> None:
    """Write from a channel and read into one; the answer to a write comes after the file is there."""
    assert bus.run(send(bus, {"sandbox_id": box, "path": "/tmp/s", "mode": "0640"}, [b"one", b"two"])) == {
        "bytes_written": 6, "path": "/tmp/s",
    }  # fmt: skip
    answer = bus(FS + "read", sandbox_id=box, path="/tmp/s")
    assert answer["body"] == "onetwo" and (answer["size"], answer["mode"]) == (6, "0640")
    assert bus.run(reader(bus, answer["content"]).read_all()) == b"onetwo"
    bus(FS + "write", sandbox_id=box, path="/tmp/empty", content="")
    answer = bus(FS + "read", sandbox_id=box, path="/tmp/empty")
    assert answer["body"] == "" and bus.run(reader(bus, answer["content"]).read_all()) == b""
    with pytest.raises(Envelope) as refused:
        bus.run(send(bus, {"sandbox_id": box, "path": "/no/dir/s"}, [b"x"]))
    assert (refused.value.code, refused.value.fix) == ("S211", {"parents": True})


def test_iii_D8_large_streams_are_identical(bus: Bus, box: str) -> None:
    """Bring many megabytes in and out unchanged, past a reader that takes its time, in frames of at most 64 KiB."""
    size = 100 if os.environ.get("ATOLL_TEST_LONG") else 12
    pieces = [os.urandom(1 << 20) for _ in range(size)]
    answer = bus.run(send(bus, {"sandbox_id": box, "path": "/tmp/large"}, pieces))
    assert answer["bytes_written"] == size << 20
    bus.engine.pause_reader = 0.005
    try:
        answer = bus(FS + "read", sandbox_id=box, path="/tmp/large")
        assert "body" not in answer and answer["size"] == size << 20
        got = bus.run(reader(bus, answer["content"]).read_all())
    finally:
        bus.engine.pause_reader = 0.0
    assert hashlib.sha256(got).digest() == hashlib.sha256(b"".join(pieces)).digest()
    assert max(bus.engine.channels[answer["content"]["channel_id"]].frames) <= 64 * 1024
    bus(FS + "rm", sandbox_id=box, path="/tmp/large")


def test_iii_D8_a_stalled_upload_is_S218_and_changes_nothing(bus: Bus, box: str) -> None:
    """Give up on an upload that stops, keep the old file and leave no other."""
    bus(FS + "write", sandbox_id=box, path="/u/f", content="old", parents=True)
    work = send(bus, {"sandbox_id": box, "path": "/u/f"}, [b"new" * 1000], finish=False)
    with pytest.raises(Envelope) as refused:
        bus.run(work)
    assert refused.value.code == "S218" and refused.value.all["retryable"] is True
    assert bus(FS + "read", sandbox_id=box, path="/u/f")["body"] == "old"
    assert [one["name"] for one in bus(FS + "ls", sandbox_id=box, path="/u")["entries"]] == ["f"]


def test_iii_cli_of_the_engine(bus: Bus, tmp_path: Path) -> None:
    """Drive the worker by the stock tool's verbs: run, create, exec, list, upload, download, stop."""

    def cli(*words: str, stdin: bytes = b"") -> Any:
        return bus.lab.cli("iii", "sandbox", words[0], "--port", str(bus.engine.port), *words[1:], stdin=stdin)

    done = cli("run", "python", "--", "sh", "-c", "echo out; echo err >&2; exit 5")
    assert (done.returncode, done.stdout, done.stderr) == (5, b"out\n", b"err\n")
    sandbox = cli("create", "--name", "mine", "-e", "A=b", "python").stdout.decode().strip()
    assert cli("exec", sandbox, "--", "sh", "-c", "echo $A").stdout == b"b\n"
    late = cli("exec", "--timeout", "6s", sandbox, "--", "sh", "-c", "echo part; sleep 600")
    assert late.returncode == 124 and late.stdout == b"part\n" and b"[S200]" in late.stderr
    assert f"{sandbox}  python" in cli("list").stdout.decode() and b"mine" in cli("list").stdout
    data = os.urandom(300_000)
    (tmp_path / "in").write_bytes(data)
    assert cli("upload", "--parents", "--mode", "0600", sandbox, str(tmp_path / "in"), "/deep/er/f").returncode == 0
    assert cli("download", sandbox, "/deep/er/f", str(tmp_path / "out")).returncode == 0
    assert (tmp_path / "out").read_bytes() == data
    assert cli("upload", sandbox, "-", "/tmp/in", stdin=b"piped").returncode == 0
    assert cli("download", sandbox, "/tmp/in", "-").stdout == b"piped"
    missing = cli("download", sandbox, "/none", "-")
    assert missing.returncode == 1 and missing.stderr.startswith(b"error: [S211]")
    assert cli("stop", sandbox).stdout.decode() == f"stopped {sandbox}\n"
    assert cli("exec", sandbox).returncode == 2


def test_iii_cli_says_at_once_that_no_engine_is_there(fn: FunctionLab) -> None:
    """Fail at once without an engine."""
    import socket

    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        done = fn.cli("iii", "sandbox", "list", "--port", str(sock.getsockname()[1]))
    assert done.returncode == 1 and b"no iii engine answers" in done.stderr


def test_iii_registration_is_replayed_after_a_lost_connection(bus: Bus) -> None:
    """Register again when the engine's connection was cut, and serve on."""
    bus.engine.drop("sandbox::list")
    until(lambda: len(bus.engine.functions) == 16, "registered again")
    assert "sandboxes" in bus("sandbox::list")


def test_iii_a_taken_name_is_fatal(fn: FunctionLab, tmp_path: Path) -> None:
    """Leave, and say what to do, when another worker has the name."""
    engine = Engine()
    engine.reserved.add("iii-sandbox")
    try:
        done = fn.cli("iii", "worker", "--engine", engine.url)
        assert done.returncode not in (0, 2) and b"namespace" in done.stderr
    finally:
        engine.close()


def test_iii_Q4_drop_in_for_an_engine(own_fn: FunctionLab, tmp_path: Path) -> None:
    """Be `iii-worker sandbox-daemon`: configured by the engine, authenticated by its token, gone with its lifeline."""
    engine, (inside, outside) = Engine(), os.pipe()
    config = tmp_path / "config.yaml"
    config.write_text(json.dumps(PLAIN))
    code = "import sys; from atoll.surfaces.iii.cli.functions import drop_in; sys.exit(drop_in())"
    env = {**own_fn.env, "III_ENGINE_URL": engine.url, "III_LIFELINE_FD": str(inside), "III_TOKEN": "sesame"}
    worker = subprocess.Popen(
        [sys.executable, "-c", code, "sandbox-daemon", "--config", str(config)], env=env, pass_fds=(inside,),
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    os.close(inside)
    try:
        until(lambda: len(engine.functions) == 16, "sixteen functions")
        assert "Bearer sesame" in engine.tokens
        os.close(outside)
        assert worker.wait(PATIENCE) == 0
    finally:
        worker.kill()
        worker.wait(PATIENCE)
        engine.close()
    done = subprocess.run([sys.executable, "-c", code, "other"], env=own_fn.env, capture_output=True, timeout=PATIENCE)
    assert done.returncode == 2
    config.write_text("sandbox: {default_cpus: 1}\n")
    bad = subprocess.run(
        [sys.executable, "-c", code, "sandbox-daemon", f"--config={config}"], env=env | {"III_LIFELINE_FD": ""},
        capture_output=True, timeout=PATIENCE,
    )  # fmt: skip
    assert bad.returncode == 2 and b"`sandbox`" in bad.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_iii_D13_a_workers_end_is_its_sandboxes_end(own_fn: FunctionLab, tmp_path: Path, number: int) -> None:
    """End all sandboxes of a worker that stops or is killed; nothing of them is left."""
    bus = Bus(own_fn, tmp_path)
    try:
        sandbox = bus.create()
        assert bus.sandboxes() == {sandbox}
        bus.worker.send_signal(number)
        bus.worker.wait(PATIENCE)
        until(lambda: not bus.sandboxes(), "they are gone")
    finally:
        bus.close()


def test_iii_a_restarted_daemon_keeps_a_workers_sandboxes(own_fn: FunctionLab, tmp_path: Path) -> None:
    """Go on with the same sandboxes after the daemon was killed and started again."""
    bus = Bus(own_fn, tmp_path)
    try:
        sandbox = bus.create()
        bus(FS + "write", sandbox_id=sandbox, path="/tmp/kept", content="yes")
        os.kill(own_fn.start(), signal.SIGKILL)

        def answers() -> Any:
            try:
                return bus(FS + "read", sandbox_id=sandbox, path="/tmp/kept").get("body")
            except Envelope as refused:
                assert refused.code in ("S216", "S300"), refused.all
                return None

        assert until(answers, "it answers again") == "yes"
    finally:
        bus.close()


def test_iii_D13_leftovers_of_a_crash_are_removed_at_the_next_start(own_fn: FunctionLab, tmp_path: Path) -> None:
    """Remove what a worker left that was killed together with the daemon."""
    bus = Bus(own_fn, tmp_path)
    try:
        left = bus.create()
        bus.worker.kill()
        os.kill(own_fn.start(), signal.SIGKILL)
        bus.worker.wait(PATIENCE)
        until(lambda: not bus.engine.functions, "the engine has noticed")
        bus.worker = bus.start()
        until(lambda: len(bus.engine.functions) == 16, "sixteen functions")
        until(lambda: left not in bus.sandboxes(), "what was left is gone")
        assert bus.refused("sandbox::exec", sandbox_id=left, cmd="true").code == "S004"
    finally:
        bus.close()


@pytest.mark.parametrize("how", ["lifeline", "signal"])
def test_everyday_28_the_engines_other_daemon_stays_until_the_engine_goes(tmp_path: Path, how: str) -> None:
    """An engine starts `iii-worker worker-manager-daemon` again and again if it ends by itself."""
    inside, outside = os.pipe()
    code = "import sys; from atoll.surfaces.iii.cli.functions import drop_in; sys.exit(drop_in())"
    env = {**os.environ, "ATOLL_HOME": str(tmp_path), "III_LIFELINE_FD": str(inside)}
    env.pop("III_WORKER_STOCK", None)
    words = ["worker-manager-daemon", "--engine", "ws://127.0.0.1:1"]
    process = subprocess.Popen([sys.executable, "-c", code, *words], env=env, pass_fds=[inside], stderr=subprocess.PIPE)
    os.close(inside)
    assert process.stderr is not None
    assert b"III_WORKER_STOCK" in process.stderr.readline()
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(3)
    if how == "signal":
        process.send_signal(signal.SIGTERM)
    os.close(outside)
    assert process.wait(60) == 0
    process.stderr.close()
