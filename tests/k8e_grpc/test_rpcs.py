"""Each RPC on a real sandbox, and what each answers to bad input."""

import json
import time

import grpc
import pytest

from atoll.proto.sandbox.v1 import sandbox_pb2 as pb

WAIT = 60.0


def refusal(call, *args, **fields) -> grpc.RpcError:
    with pytest.raises(grpc.RpcError) as caught:
        answer = call(*args, **fields)
        if not hasattr(answer, "DESCRIPTOR"):
            list(answer)
    return caught.value


def code(call, *args, **fields) -> str:
    return refusal(call, *args, **fields).code().name


def poll(local, run_id: str):
    until = time.monotonic() + WAIT
    while (now := local.PollRun(run_id=run_id)).status in ("started", "running"):
        assert time.monotonic() < until
        time.sleep(0.05)
    return now


def command_lines(local, session: str) -> str:
    return "\n".join(p.cmdline for p in local.GetProcesses(session_id=session).processes)


def gone(local, session: str, mark: str) -> None:
    until = time.monotonic() + WAIT
    while mark in command_lines(local, session):
        assert time.monotonic() < until
        time.sleep(0.05)


# Sessions


def test_k8e_D38_everything_is_readable_right_after_create(local, session) -> None:
    seen = local.GetSession(session_id=session)
    assert seen.session_id == session
    assert session.startswith("sess-")
    assert seen.phase == "Active"
    assert seen.runtime_class in ("container", "gvisor", "microvm")
    assert seen.expires_at > time.time()
    assert session in {one.session_id for one in local.ListSessions().sessions}
    assert local.Exec(session_id=session, command="pwd").stdout == "/workspace\n"


def test_ids_work_with_and_without_prefix(local, session) -> None:
    bare = session.removeprefix("sess-")
    assert local.GetSession(session_id=bare).session_id == session
    assert local.Exec(session_id=bare, command="echo x").stdout == "x\n"


def test_a_chosen_id_is_kept(local) -> None:
    made = local.CreateSession(session_id="my-own.id", tenant_id="team", env={"A": "1"}, memory_mb=128)
    try:
        assert made.session_id == "my-own.id"
        seen = local.GetSession(session_id="my-own.id")
        assert (seen.session_id, seen.tenant_id, list(seen.env_keys)) == ("my-own.id", "team", ["A"])
        assert local.Exec(session_id="my-own.id", command="echo $A").stdout == "1\n"
        assert code(local.CreateSession, session_id="my-own.id") == "ALREADY_EXISTS"
    finally:
        local.DestroySession(session_id="my-own.id")
    assert code(local.GetSession, session_id="my-own.id") == "NOT_FOUND"


def test_the_health_probe_of_old_clients(local) -> None:
    error = refusal(local.DestroySession, session_id="healthcheck-probe-noop")
    assert "not found" in error.details()


def test_destroy_twice_is_not_found(local) -> None:
    made = local.CreateSession(memory_mb=128).session_id
    assert local.DestroySession(session_id=made).ok
    assert "not found" in refusal(local.DestroySession, session_id=made).details()
    assert code(local.Exec, session_id=made, command="true") == "NOT_FOUND"
    assert made not in {one.session_id for one in local.ListSessions(phase="all").sessions}


def test_pause_and_resume_keep_the_workspace(local) -> None:
    made = local.CreateSession(memory_mb=128, persistent=True).session_id
    try:
        local.WriteFile(session_id=made, path="/workspace/kept", content="still here")
        assert local.PauseSession(session_id=made).ok
        assert local.GetSession(session_id=made).phase == "Paused"
        assert made in {one.session_id for one in local.ListSessions(phase="Paused").sessions}
        assert made not in {one.session_id for one in local.ListSessions().sessions}
        assert code(local.Exec, session_id=made, command="true") == "FAILED_PRECONDITION"
        assert local.ResumeSession(session_id=made).ok
        assert local.ReadFile(session_id=made, path="/workspace/kept").content == "still here"
    finally:
        local.DestroySession(session_id=made)


@pytest.mark.parametrize(
    "fields",
    [{"tenant_id": "../.."}, {"tenant_id": "a/b"}, {"session_id": "../x"}, {"session_id": "a b"}, {"session_id": "x" * 300},
     {"runtime_class": "Not Valid"}, {"env": {"A=B": "1"}}, {"env": {"": "1"}}, {"env": {"A": "x\0"}}, {"env": {"K" * 257: ""}},
     {"env": {"A": "v" * 4097}}, {"env": {f"K{n}": "" for n in range(65)}}, {"env": {f"K{n}": "v" * 4000 for n in range(9)}},
     {"memory_mb": -5}, {"cpus": -1}, {"cpus": float("nan")}, {"lifetime_s": -1}, {"name": "a/b"}, {"image": "x" * 600},
     {"secret_refs": [pb.SecretRef(secret_name="a", key="b")]},
     {"secret_refs": [pb.SecretRef(secret_name="a", key="b", env_var="X")] * 2},
     {"secret_refs": [pb.SecretRef(secret_name="a", key="b", env_var=f"X{n}") for n in range(33)]}],
    ids=lambda fields: next(iter(fields)),
)  # fmt: skip
def test_create_refuses(local, fields) -> None:
    assert code(local.CreateSession, **fields) == "INVALID_ARGUMENT"


def test_a_runtime_that_is_not_there_is_a_clear_error(local) -> None:
    error = refusal(local.CreateSession, runtime_class="kata")
    assert error.code().name in ("FAILED_PRECONDITION", "INVALID_ARGUMENT")
    assert "kata" in error.details()


# Commands


def test_k8e_D01_exit_code_and_both_streams(local, shared) -> None:
    done = local.Exec(session_id=shared, command="echo out; echo err >&2; exit 7", language="bash")
    assert (done.stdout, done.stderr, done.exit_code, done.status) == ("out\n", "err\n", 7, "completed")
    assert (done.session_id, done.language) == (shared, "bash")
    assert local.Exec(session_id=shared, command="kill -9 $$").exit_code == 137


def test_k8e_D02_timeout_is_a_normal_answer(local, shared) -> None:
    done = local.Exec(session_id=shared, command="echo before; sleep 600", timeout=3)
    assert (done.stdout, done.exit_code, done.status) == ("before\n", -1, "timed_out")
    assert local.Exec(session_id=shared, command="echo alive").stdout == "alive\n"


def test_k8e_D05_bytes_beside_text(local, shared) -> None:
    done = local.Exec(session_id=shared, command=r"printf 'a\377\000b'; printf '\376' >&2")
    assert done.stdout_bytes == b"a\xff\0b"
    assert done.stderr_bytes == b"\xfe"
    assert done.stdout == "a\ufffd\0b"


def test_our_own_forms_of_exec(local, shared) -> None:
    assert local.Exec(session_id=shared, argv=["/bin/echo", "a b", "$HOME"]).stdout == "a b $HOME\n"
    assert local.Exec(session_id=shared, command="cat", stdin=b"\0in").stdout_bytes == b"\0in"
    assert local.Exec(session_id=shared, code="print(1)\nprint('`$x`')", language="python").stdout == "1\n`$x`\n"
    assert local.Exec(session_id=shared, command="echo $V", env={"V": "v"}, workdir="/tmp").stdout == "v\n"


@pytest.mark.parametrize(
    "fields",
    [{}, {"command": ""}, {"command": "  "}, {"command": "a\0b"}, {"command": "x", "timeout": -1}, {"command": "x", "timeout": 2**31 - 1},
     {"command": "x", "code": "y"}, {"argv": [""]}, {"argv": ["a\0"]}, {"command": "x", "env": {"A=": ""}},
     {"command": "x", "output_limit": -1}, {"command": "x", "command_id": "../x"}, {"command": "x", "user": "a b"},
     {"command": "x", "workdir": "a\0"}, {"code": " "}],
    ids=repr,
)  # fmt: skip
def test_exec_refuses(local, shared, fields) -> None:
    assert code(local.Exec, session_id=shared, **fields) == "INVALID_ARGUMENT"
    assert code(local.ExecStream, session_id=shared, **fields) == "INVALID_ARGUMENT"


def test_k8e_D10_missing_workdir_is_an_error(local, shared) -> None:
    assert code(local.Exec, session_id=shared, command="true", workdir="/no/such") == "NOT_FOUND"


def test_k8e_D03_a_repeated_command_id_runs_once(local, session) -> None:
    for _ in range(3):
        done = local.Exec(session_id=session, command="echo x >> /workspace/count", command_id="once")
        assert done.exit_code == 0
    assert local.ReadFile(session_id=session, path="/workspace/count").content == "x\n"


def test_stream_is_plain_text_with_the_rest_beside_it(local, shared) -> None:
    script = r"echo one; echo two >&2; echo; printf '\303'; sleep 0.2; printf '\251'; exit 5"
    messages = list(local.ExecStream(session_id=shared, command=script))
    assert messages[0].pid > 0
    text = {name: "".join(m.chunk for m in messages if m.stream == name) for name in ("stdout", "stderr")}
    assert text == {"stdout": "one\n\né", "stderr": "two\n"}
    assert b"".join(m.data for m in messages if m.stream == "stdout") == "one\n\né".encode()
    assert (messages[-1].done, messages[-1].exit_code, messages[-1].status) == (True, 5, "completed")
    assert sum(m.done for m in messages) == 1


def test_stream_timeout_ends_it(local, shared) -> None:
    last = list(local.ExecStream(session_id=shared, command="echo x; sleep 600", timeout=1))[-1]
    assert (last.exit_code, last.status) == (-1, "timed_out")


def test_stream_of_many_megabytes(local, shared) -> None:
    stream = local.ExecStream(session_id=shared, command="head -c 50000000 /dev/zero", timeout=100)
    assert sum(len(m.data) for m in stream) == 50_000_000


def test_cancel_kills_the_command(local, session) -> None:
    stream = local.ExecStream(session_id=session, command="echo go; exec sleep 7654", timeout=600)
    next(stream)
    next(stream)
    assert "7654" in command_lines(local, session)
    stream.cancel()
    gone(local, session, "7654")


def test_a_deadline_of_the_caller_kills_the_command(local, session) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        local.Exec(session_id=session, command="exec sleep 8765", timeout=600, deadline=2)
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    gone(local, session, "8765")


def test_background_and_poll(local, session) -> None:
    started = local.Exec(session_id=session, command="echo out; echo err >&2; exit 3", background=True)
    assert started.status == "started"
    assert "-bg-" in started.run_id
    done = poll(local, started.run_id)
    assert (done.status, done.stdout, done.stderr, done.exit_code) == ("completed", "out\n", "err\n", 3)


def test_k8e_D29_five_at_a_time_and_a_sixth_after(local, session) -> None:
    runs = [local.Exec(session_id=session, command="read x < /workspace/f", background=True).run_id for _ in range(1)]
    runs += [local.Exec(session_id=session, command="sleep 600", background=True).run_id for _ in range(4)]
    assert local.GetSession(session_id=session).background_runs >= 4
    poll(local, runs[0])  # the file is missing: it ends by itself
    sixth = local.Exec(session_id=session, command="sleep 600", background=True)
    assert sixth.run_id
    assert code(local.Exec, session_id=session, command="sleep 1", background=True) == "RESOURCE_EXHAUSTED"


@pytest.mark.parametrize("run", ["", "nonsense", "sess-" + "a" * 20 + "-bg-x", "sess-x-bg-y", "-bg-", "\0"])
def test_poll_of_nothing(local, run) -> None:
    assert code(local.PollRun, run_id=run) in ("NOT_FOUND", "INVALID_ARGUMENT")


def test_processes(local, session) -> None:
    run = local.Exec(session_id=session, command="exec -a marker-proc sleep 600", background=True)
    until = time.monotonic() + WAIT
    while "sleep" not in {p.comm for p in local.GetProcesses(session_id=session).processes}:
        assert time.monotonic() < until
        time.sleep(0.05)
    found = [p for p in local.GetProcesses(session_id=session).processes if p.comm == "sleep"]
    assert found[0].pid > 1
    assert len(found[0].state) == 1
    assert run.run_id


def test_k8e_D32_pip_install_keeps_constraints(local, session) -> None:
    """No network here: pip fails, but by its own words, and no file named after the constraint appears."""
    done = local.PipInstall(session_id=session, packages=["surely-no-such-package>=1"])
    assert done.exit_code != 0
    assert "surely-no-such-package>=1" in done.output
    assert [f.path for f in local.ListFiles(session_id=session).files] == []
    assert code(local.PipInstall, session_id=session) == "INVALID_ARGUMENT"
    assert code(local.PipInstall, session_id=session, packages=["a\0"]) == "INVALID_ARGUMENT"


# Files


def test_files_write_append_read_list(local, session) -> None:
    assert [f.path for f in local.ListFiles(session_id=session).files] == []
    assert local.WriteFile(session_id=session, path="/workspace/d/a.txt", content="one\n").ok
    assert local.WriteFile(session_id=session, path="/workspace/d/a.txt", content="two\n", mode="a").ok
    assert local.ReadFile(session_id=session, path="/workspace/d/a.txt").content == "one\ntwo\n"
    local.WriteFile(session_id=session, path="/workspace/bin", content_bytes=b"\0\xff", permissions=0o755)
    read = local.ReadFile(session_id=session, path="/workspace/bin")
    assert (read.content_bytes, read.content) == (b"\0\xff", "\0\ufffd")
    assert local.Exec(session_id=session, command="stat -c %a bin").stdout == "755\n"
    listed = {f.path: f for f in local.ListFiles(session_id=session).files}
    assert set(listed) == {"/workspace/d/a.txt", "/workspace/bin"}
    assert (listed["/workspace/bin"].type, listed["/workspace/bin"].size) == ("file", 2)
    later = listed["/workspace/bin"].modified + 1000
    assert not local.ListFiles(session_id=session, since=later).files


def test_file_names_of_any_bytes(local, session) -> None:
    name = b"/workspace/\xff'\" $(x)\n"
    local.WriteFile(session_id=session, path_bytes=name, content="odd")
    assert [f.path_bytes for f in local.ListFiles(session_id=session).files] == [name]
    assert local.ReadFile(session_id=session, path_bytes=name).content == "odd"


def test_file_errors_are_typed_and_the_session_lives(local, shared) -> None:
    assert code(local.ReadFile, session_id=shared, path="/workspace/missing") == "NOT_FOUND"
    assert code(local.ReadFile, session_id=shared, path="/workspace") == "FAILED_PRECONDITION"
    assert code(local.ReadFile, session_id=shared, path="") == "INVALID_ARGUMENT"
    assert code(local.ReadFile, session_id=shared, path="/a\0b") == "INVALID_ARGUMENT"
    assert code(local.WriteFile, session_id=shared, path="/proc/version/x", content="x") != "OK"
    assert code(local.WriteFile, session_id=shared, path="/workspace/x", content="x", mode="rw") == "INVALID_ARGUMENT"
    assert code(local.WriteFile, session_id=shared, path="/workspace/x", permissions=0o10000) == "INVALID_ARGUMENT"
    assert code(local.ListFiles, session_id=shared, since=-1) == "INVALID_ARGUMENT"
    assert local.Exec(session_id=shared, command="echo ok").stdout == "ok\n"


def test_a_large_file_and_one_too_large(local, session) -> None:
    data = bytes(range(256)) * (40 << 12)
    local.WriteFile(session_id=session, path="/workspace/big", content_bytes=data)
    assert local.ReadFile(session_id=session, path="/workspace/big").content_bytes == data
    local.Exec(session_id=session, command="truncate -s 200M /workspace/huge")
    assert code(local.ReadFile, session_id=session, path="/workspace/huge") == "INVALID_ARGUMENT"


# What happened


def test_transcript_and_events(local, session) -> None:
    empty = local.GetTranscript(session_id=session)
    assert (empty.output, empty.eof) == ("", True)
    for n in range(3):
        local.Exec(session_id=session, command=f"echo line-{n}")
    window = local.GetTranscript(session_id=session)
    assert "line-0" in window.output and "line-2" in window.output and window.eof
    part = local.GetTranscript(session_id=session, limit=80)
    assert part.output.endswith("\n") and not part.eof
    rest = local.GetTranscript(session_id=session, offset=part.next_offset)
    assert part.output + rest.output == window.output
    assert code(local.GetTranscript, session_id=session, offset=-1) == "INVALID_ARGUMENT"
    events = local.GetEvents(session_id=session)
    assert {json.loads(e)["sid"] for e in events.events} == {session}
    assert json.loads(events.events[0])["ev"] == "created"
    assert local.GetEvents(limit=1).truncated
    assert code(local.GetEvents, limit=-1) == "INVALID_ARGUMENT"


# Terminals


def read_until(stream, wanted: bytes) -> bytes:
    seen = b""
    for frame in stream:
        seen += frame.data
        if wanted in seen:
            return seen
    raise AssertionError(f"the terminal ended with {seen!r}")


def in_front(local, terminal, wanted) -> None:
    until = time.monotonic() + WAIT
    while not wanted(local.TerminalForeground(terminal_id=terminal.terminal_id).process_group_id):
        assert time.monotonic() < until
        time.sleep(0.05)


def test_terminal_from_start_to_exit(local, session) -> None:
    made = local.CreateTerminal(session_id=session, argv=["bash", "--norc"], env={"PS1": "> "}, rows=30, cols=100)
    assert made.terminal_id.startswith("term-") and made.pid > 1
    stream = local.TerminalStream(terminal_id=made.terminal_id)
    local.TerminalWrite(terminal_id=made.terminal_id, data=b"stty size\n")
    read_until(stream, b"30 100")
    local.TerminalResize(terminal_id=made.terminal_id, rows=40, cols=120)
    local.TerminalWrite(terminal_id=made.terminal_id, data=b"stty size\n")
    read_until(stream, b"40 120")
    local.TerminalWrite(terminal_id=made.terminal_id, data=b"cat; echo after-$?\n")
    if local.TerminalForeground(terminal_id=made.terminal_id).process_group_id == -1:
        # gVisor does not tell who is in front; the terminal itself knows.
        read_until(stream, b"cat; echo")
        local.TerminalWrite(terminal_id=made.terminal_id, data=b"\x03")
        local.TerminalWrite(terminal_id=made.terminal_id, data=b"exit 9\n")
        assert list(stream)[-1].exit.exit_code == 9
        return
    in_front(local, made, lambda group: group not in (-1, made.pid))

    def interrupt(group: int) -> bool:
        """A shell's child that has not become its program yet may still swallow one."""
        if group != made.pid:
            hit = local.TerminalSignal(terminal_id=made.terminal_id, signal=pb.TERMINAL_SIGNAL_INT)
            assert hit.process_group_id > 1
        return group == made.pid

    in_front(local, made, interrupt)
    local.TerminalWrite(terminal_id=made.terminal_id, data=b"exit 9\n")
    frames = list(stream)
    assert [f.WhichOneof("frame") for f in frames].count("exit") == 1
    assert frames[-1].exit.exit_code == 9
    again = list(local.TerminalStream(terminal_id=made.terminal_id))
    assert b"30 100" in b"".join(f.data for f in again)
    assert again[-1].exit.exit_code == 9


def test_terminal_destroy_and_bad_input(local, session) -> None:
    made = local.CreateTerminal(session_id=session, argv=["sleep", "600"])
    assert code(local.TerminalSignal, terminal_id=made.terminal_id) == "INVALID_ARGUMENT"
    assert code(local.TerminalDestroy, terminal_id=made.terminal_id, grace_ms=-1) == "INVALID_ARGUMENT"
    assert local.TerminalDestroy(terminal_id=made.terminal_id, grace_ms=2000).ok
    last = list(local.TerminalStream(terminal_id=made.terminal_id))[-1]
    assert last.exit.signal in ("SIGTERM", "SIGKILL")
    assert local.TerminalDestroy(terminal_id=made.terminal_id).ok
    assert code(local.CreateTerminal, session_id=session) == "INVALID_ARGUMENT"
    assert code(local.CreateTerminal, session_id=session, argv=["bash"], rows=100_000) == "INVALID_ARGUMENT"
    assert code(local.CreateTerminal, session_id=session, argv=["/no/such/program"]) == "FAILED_PRECONDITION"
    for bad in ("term-x", "term-" + "a" * 20 + "-cx"):
        assert code(local.TerminalStream, terminal_id=bad) == "NOT_FOUND"
        assert code(local.TerminalWrite, terminal_id=bad, data=b"x") == "NOT_FOUND"


def test_terminals_are_not_counted_as_background_runs(local, session) -> None:
    terminals = [local.CreateTerminal(session_id=session, argv=["sleep", "600"]) for _ in range(7)]
    assert local.GetSession(session_id=session).background_runs == 0
    assert local.Exec(session_id=session, command="true", background=True).run_id
    assert len({t.terminal_id for t in terminals}) == 7


# Ports, snapshots, approvals: arguments are checked before anything else


@pytest.mark.parametrize("port", [0, -1, 65536])
def test_ports_out_of_range(local, shared, port) -> None:
    assert code(local.ExposeService, session_id=shared, port=port) == "INVALID_ARGUMENT"
    assert code(local.UnexposeService, session_id=shared, port=port) == "INVALID_ARGUMENT"


WITH_SESSION = (
    "GetSession DestroySession PauseSession ResumeSession Exec ExecStream WriteFile ReadFile ListFiles PipInstall "
    "GetTranscript GetProcesses CreateTerminal ListExposed UpdateAllowedHosts"
)


@pytest.mark.parametrize("rpc", WITH_SESSION.split())
def test_session_ids_that_are_none(local, rpc) -> None:
    extra = {"Exec": {"command": "x"}, "ExecStream": {"command": "x"}, "WriteFile": {"path": "/x"}, "ReadFile": {"path": "/x"},
             "PipInstall": {"packages": ["x"]}, "CreateTerminal": {"argv": ["x"]}}.get(rpc, {})  # fmt: skip
    call = getattr(local, rpc)
    assert code(call, session_id="", **extra) == "INVALID_ARGUMENT"
    for bad in ("sess-" + "a" * 20, "no-such", "../../etc/passwd", "日本", "' OR 1=1 --"):
        error = refusal(call, session_id=bad, **extra)
        assert error.code().name in ("NOT_FOUND", "FAILED_PRECONDITION"), error
    assert code(call, session_id="x" * 5000, **extra) == "INVALID_ARGUMENT"
