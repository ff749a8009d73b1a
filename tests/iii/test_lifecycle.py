"""create, exec, run, stop and list on real sandboxes."""

import base64
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from lab.functions import FunctionLab, until


def test_iii_Q5_run_answers_and_leaves_nothing(fn: FunctionLab) -> None:
    """Run a snippet, give its output apart, and destroy its sandbox, also when it fails."""
    before = {one["sandbox_id"] for one in fn("sandbox::list")["sandboxes"]}
    code = "import sys; print('out'); print('err', file=sys.stderr); sys.exit(3)"
    done = fn("sandbox::run", image="python", lang="python", code=code)
    assert (done["stdout"], done["stderr"], done["exit_code"], done["success"]) == ("out\n", "err\n", 3, False)
    assert fn.refused("sandbox::exec", sandbox_id=done["sandbox_id"], cmd="true").code == "S004"  # named, and gone
    assert {one["sandbox_id"] for one in fn("sandbox::list")["sandboxes"]} <= before


@pytest.mark.parametrize(
    ("lang", "code", "out"),
    [
        ("python", "print(6*7)", "42\n"),
        ("py", "import sys; print(sys.argv[0])", "/tmp/run.py\n"),
        ("node", "console.log(6*7)", "42\n"),
        ("shell", "echo $((6*7)) | cat", "42\n"),
        ("sh", 'echo "$A"', "x y\n"),
        ("bash", "a=(1 2); echo ${a[1]}", "2\n"),
        ("cat", "as it is", "as it is"),
    ],
)
def test_iii_Q5_languages(fn: FunctionLab, lang: str, code: str, out: str) -> None:
    """Choose the interpreter by lang."""
    done = fn("sandbox::run", image="python", lang=lang, code=code, env={"A": "x y"})
    assert done["stdout"] == out, done


def test_iii_Q5_missing_interpreter_is_127(fn: FunctionLab) -> None:
    """Answer 127 when there is no such program."""
    done = fn("sandbox::run", image="python", lang="no-such-lang", code="x")
    assert done["exit_code"] == 127 and done["stderr"] and done["success"] is False


def test_iii_run_with_files_stdin_and_keep(fn: FunctionLab) -> None:
    """Place files first, feed stdin, and keep the sandbox when asked."""
    files = [{"path": "/data/a.txt", "content": "A"}, {"path": "b.bin", "content_b64": base64.b64encode(b"B").decode()}]
    code = "import sys; print(open('/data/a.txt').read() + open('/b.bin').read() + sys.stdin.read(), sys.argv[1:])"
    done = fn(
        "sandbox::run", image="python", lang="python", code=code, files=files, keep_sandbox=True, args=["z"],
        stdin=base64.b64encode(b"C").decode(),
    )  # fmt: skip
    assert done["stdout"] == "ABC ['z']\n"
    assert fn("sandbox::fs::stat", sandbox_id=done["sandbox_id"], path="/data/a.txt")["mode"] == "0644"
    fn("sandbox::stop", sandbox_id=done["sandbox_id"])


def test_iii_run_errors_name_the_step(fn: FunctionLab) -> None:
    """Keep the inner code, and say in which step it came up."""
    refused = fn.refused("sandbox::run", image="nope", lang="python", code="1")
    assert (refused.code, refused.fix) == (
        "S100",
        {"image": "python", "context": "create", "sandbox_id": "", "inner_code": "S100"},
    )
    refused = fn.refused(
        "sandbox::run", image="python", lang="python", code="1", files=[{"path": "/etc/passwd/x", "content": ""}]
    )
    assert refused.fix["context"] == "fs::write (sibling file)" and refused.fix["inner_code"] == refused.code
    refused = fn.refused("sandbox::run", image="python", lang="shell", code="echo so far; sleep 600", timeout_ms=6000)
    assert refused.code == "S200" and refused.fix["context"] == "exec" and refused.details["stdout"] == "so far\n"
    until(
        lambda: all(one["sandbox_id"] != refused.fix["sandbox_id"] for one in fn("sandbox::list")["sandboxes"]), "gone"
    )


def test_iii_Q6_files_and_processes_stay_between_calls(fn: FunctionLab, box: str) -> None:
    """Keep what one call leaves for the next."""
    fn.sh(box, "echo kept > /srv/file; nohup sleep 600 >/dev/null 2>&1 & echo $! > /tmp/pid")
    assert fn.sh(box, "cat /srv/file; kill -0 $(cat /tmp/pid) && echo alive")["stdout"] == "kept\nalive\n"
    assert fn.get(box, "/srv/file") == "kept\n"


def test_iii_Q7_one_command_at_a_time(fn: FunctionLab) -> None:
    """Refuse a second command at once, and take it when the first has ended; files are not held up."""
    sandbox = fn.create()["sandbox_id"]
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(fn.sh, sandbox, "while [ ! -e /tmp/go ]; do sleep 0.05; done; echo first")
        until(lambda: _of(fn, sandbox)["exec_in_progress"], "it runs")
        refused = fn.refused("sandbox::exec", sandbox_id=sandbox, cmd="true")
        assert refused.code == "S003" and "nohup" in refused.all["fix_note"]
        assert _of(fn, sandbox)["exec_slots_free"] == 0
        fn.put(sandbox, "/tmp/go", "")
        assert first.result(90)["stdout"] == "first\n"
    assert fn("sandbox::exec", sandbox_id=sandbox, cmd="echo", args=["second"])["stdout"] == "second\n"
    fn("sandbox::stop", sandbox_id=sandbox)


def _of(fn: FunctionLab, sandbox: str) -> Any:
    return next(one for one in fn("sandbox::list")["sandboxes"] if one["sandbox_id"] == sandbox)


def test_iii_Q8_a_detached_server_frees_the_slot(fn: FunctionLab, box: str) -> None:
    """Start a server detached and go on with commands."""
    fn.sh(box, "cd /tmp; nohup python3 -m http.server 8123 --bind 127.0.0.1 >/tmp/log 2>&1 &")
    code = "import urllib.request as u; print(u.urlopen('http://127.0.0.1:8123/').status)"
    until(lambda: fn("sandbox::exec", sandbox_id=box, argv=["python3", "-c", code])["stdout"] == "200\n", "it serves")


def test_iii_Q9_exec_is_no_shell(fn: FunctionLab, box: str) -> None:
    """Pass pipes, redirects and variables on as text; a shell gives them their meaning."""
    done = fn("sandbox::exec", sandbox_id=box, cmd="echo a && echo $HOME > /tmp/x | cat")
    assert done["stdout"] == "a && echo $HOME > /tmp/x | cat\n"
    assert fn.sh(box, "echo a | tr a b && echo $HOME")["stdout"] == "b\n/root\n"


def test_iii_D15_home_path_and_directory(fn: FunctionLab, box: str) -> None:
    """Start in a home that is set and can be written."""
    done = fn.sh(box, "pwd; echo $HOME; echo x > f && cat f; id -u; command -v python3 pip")
    assert done["stdout"].splitlines()[:4] == ["/root", "/root", "x", "0"] and done["exit_code"] == 0, done


def test_iii_exec_results(fn: FunctionLab, box: str) -> None:
    """Tell exit codes, signals and missing programs as the contract does."""
    assert fn.sh(box, "exit 7")["exit_code"] == 7
    assert fn.sh(box, "kill -9 $$")["exit_code"] == 137
    missing = fn("sandbox::exec", sandbox_id=box, cmd="no-such-program")
    assert missing["exit_code"] == 127 and missing["stderr"].count("\n") == 1
    fn.put(box, "/tmp/plain", "x")
    assert fn("sandbox::exec", sandbox_id=box, cmd="/tmp/plain")["exit_code"] == 126
    assert fn("sandbox::exec", sandbox_id=box, cmd="pwd", workdir="/no/such")["exit_code"] == 127
    assert fn("sandbox::exec", sandbox_id=box, cmd="pwd", workdir="tmp")["stdout"] == "/tmp\n"
    assert fn("sandbox::exec", sandbox_id=box, cmd="cat")["stdout"] == ""
    assert fn("sandbox::exec", sandbox_id=box, cmd="cat", stdin="aGk=")["stdout"] == "hi"
    assert fn.refused("sandbox::exec", sandbox_id=box, cmd="cat", stdin="%%").code == "S001"
    assert fn.refused("sandbox::exec", sandbox_id=box, cmd="true", timeout_ms=0).code == "S200"


def test_iii_Q20_env_of_boot_and_call(fn: FunctionLab) -> None:
    """Inherit the boot environment; a call's own wins, for that call."""
    sandbox = fn.create(env=["A=boot", "B=1=2"])["sandbox_id"]
    assert fn.sh(sandbox, "echo $A $B $C", env={"A": "call", "C": "c"})["stdout"] == "call 1=2 c\n"
    assert fn.sh(sandbox, "echo $A $B $C")["stdout"] == "boot 1=2\n"
    fn("sandbox::stop", sandbox_id=sandbox)


def test_iii_D4_output_is_never_lost_silently(fn: FunctionLab, box: str) -> None:
    """Return what a killed command wrote, flag what was cut, and keep binary output whole."""
    late = fn.refused("sandbox::exec", sandbox_id=box, argv=["sh", "-c", "echo so far; sleep 600"], timeout_ms=6000)
    assert late.code == "S200" and late.details["stdout"] == "so far\n"
    long = fn.sh(box, "head -c 1500000 /dev/zero | tr '\\0' x")
    assert len(long["stdout"]) == 1_048_576 and long["stdout_truncated"] is True and long["stderr_truncated"] is False
    binary = fn.sh(box, "printf '\\377\\000a'")
    assert base64.b64decode(binary["stdout_b64"]) == b"\xff\x00a"
    assert fn.sh(box, "pgrep -c sleep || true")["exit_code"] == 0


def test_iii_D5_a_background_child_does_not_hold_the_call(fn: FunctionLab, box: str) -> None:
    """Return although something still holds the output, and say so; wait a moment for what ends soon."""
    done = fn.sh(box, "sleep 500 & echo now")
    assert done["stdout"] == "now\n" and done["background"] is True and done["exit_code"] == 0
    done = fn.sh(box, "(sleep 0.1; echo late) & echo now")
    assert done["stdout"] == "now\nlate\n" and done["background"] is False


def test_iii_Q10_list_and_stop(fn: FunctionLab) -> None:
    """Show what lives, oldest first, with both sets of fields; stop takes it away."""
    made = [fn.create(name=name)["sandbox_id"] for name in ("same", "same")]
    found = [one for one in fn("sandbox::list", {"any": 1})["sandboxes"] if one["sandbox_id"] in made]
    assert [one["sandbox_id"] for one in found] == made and found[0]["name"] == found[1]["name"] == "same"
    one = found[0]
    assert one["image"] == "python" and one["exec_in_flight"] == 0 and one["stopped"] is False
    assert one["status"] == "running" and one["memory_mb"] == 256 and one["network"] is False and one["isolation"]
    for sandbox in made:
        assert fn("sandbox::stop", sandbox_id=sandbox) == {"sandbox_id": sandbox, "stopped": True}
        assert fn("sandbox::stop", sandbox_id=sandbox)["stopped"] is True
    assert not [one for one in fn("sandbox::list")["sandboxes"] if one["sandbox_id"] in made]
    assert fn.refused("sandbox::exec", sandbox_id=made[0], cmd="true").code == "S004"
    assert fn.refused("sandbox::fs::ls", sandbox_id=made[0], path="/").code == "S004"


def test_iii_D16_wait_returns_when_it_is_gone(fn: FunctionLab) -> None:
    """With wait, answer only when no process is left."""
    sandbox = fn.create()["sandbox_id"]
    _, rows = fn.ask("GET", "/v1/sandboxes")
    pid = next(row["pid"] for row in rows["sandboxes"] if row["labels"].get("iii-id") == sandbox)
    fn("sandbox::stop", sandbox_id=sandbox, wait=True)
    with pytest.raises(ProcessLookupError):
        import os

        os.kill(pid, 0)


def test_iii_unknown_ids(fn: FunctionLab) -> None:
    """Tell an id that is none from one that was never here, and another door's sandbox from one's own."""
    assert fn.refused("sandbox::stop", sandbox_id="x").code == "S001"
    assert fn.refused("sandbox::stop", sandbox_id="6ba7b810-9dad-4ed1-80b4-00c04fd430c8").code == "S002"
    foreign = fn.create_foreign()
    assert fn.refused("sandbox::stop", sandbox_id=foreign).code == "S002"


def test_iii_S300_when_it_is_stopped_under_a_command(fn: FunctionLab) -> None:
    """End a command whose sandbox goes with S300."""
    sandbox = fn.create()["sandbox_id"]
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(fn.refused, "sandbox::exec", sandbox_id=sandbox, cmd="sleep 600")
        until(lambda: _of(fn, sandbox)["exec_in_progress"], "it runs")
        fn("sandbox::stop", sandbox_id=sandbox)
        assert running.result(90).code == "S300"


def test_iii_Q12_an_idle_sandbox_is_reaped(fn: FunctionLab) -> None:
    """End what nobody uses; afterwards it is known to have been."""
    sandbox = fn.create(idle_timeout_secs=1)["sandbox_id"]
    until(lambda: all(one["sandbox_id"] != sandbox for one in fn("sandbox::list")["sandboxes"]), "it is reaped")
    assert fn.refused("sandbox::exec", sandbox_id=sandbox, cmd="true").code == "S004"


def test_iii_Q14_D1_files_are_private_and_vanish(fn: FunctionLab) -> None:
    """Show nothing of one sandbox in the next, nor on the machine."""
    import os

    first = fn.create()["sandbox_id"]
    names = ["/usr/iii-private", "/etc/iii-private", "/root/iii-private"]
    for name in names:
        fn.put(first, name, "secret")
    second = fn.create()["sandbox_id"]
    for sandbox in (second, None):
        for name in names:
            if sandbox is not None:
                assert fn.refused("sandbox::fs::stat", sandbox_id=sandbox, path=name).code == "S211"
            assert not os.path.exists(name)
    for sandbox in (first, second):
        fn("sandbox::stop", sandbox_id=sandbox)


def test_iii_Q16_images_are_catalogue_names(fn: FunctionLab) -> None:
    """Refuse references and unknown names, and say what is allowed."""
    for image in ("docker.io/library/python:3", "unknown", "", "host"):
        refused = fn.refused("sandbox::create", image=image)
        assert refused.code == "S100" and "python" in refused.all["fix_note"]


def test_iii_Q13_Q17_catalog_says_what_boots_and_how(fn: FunctionLab) -> None:
    """List what create accepts, with where it comes from and how it is isolated; create says it too."""
    images = fn("sandbox::catalog::list")["images"]
    assert [(one["name"], one["kind"]) for one in images] == [("python", "preset"), ("node", "preset")]
    made = fn.create()
    assert made["image"] == "python" and made["isolation"] == images[0]["isolation"] == "container"
    assert made["image_used"] == "host" if images[0]["oci_ref"] == "host" else made["image_used"]
    fn("sandbox::stop", sandbox_id=made["sandbox_id"])


def test_iii_D14_malformed_calls_are_envelopes(fn: FunctionLab) -> None:
    """Answer every kind of nonsense with an envelope."""
    for body in (b"{", b"[]", b"null x", b'{"a": 1e999}', b"\xff", b'"x"', b"[" * 100_000):
        for name in ("sandbox::create", "sandbox::fs::grep"):
            refused = fn.refused(name, body)
            assert refused.code == "S001", body[:20]
    assert fn.refused("sandbox::exec", {"sandbox_id": 5}).code == "S001"
    missing = fn.refused("sandbox::run", {"image": "python"})
    assert "code" in missing.all["message"] and "lang" in missing.all["message"]


def test_iii_D11_env_comes_before_the_image(fn: FunctionLab) -> None:
    """Report a bad environment before anything is done about an image."""
    assert fn.refused("sandbox::create", image="unknown", env={"1A": "x"}).code == "S001"


def test_iii_ten_calls_at_once(fn: FunctionLab, box: str) -> None:
    """Serve many callers of files at once."""
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda n: fn("sandbox::fs::stat", sandbox_id=box, path="/")["is_dir"], range(64)))
    assert all(found)


def test_iii_cli_calls_functions(fn: FunctionLab, box: str) -> None:
    """Call a function from the command line; an error is its envelope and exit code 1."""
    import json

    done = fn.cli("fn", "sandbox::exec", json.dumps({"sandbox_id": box, "cmd": "echo hi"}))
    assert done.returncode == 0 and json.loads(done.stdout)["stdout"] == "hi\n", done
    done = fn.cli("fn", "sandbox::list", "-", stdin=b"{}")
    assert done.returncode == 0 and json.loads(done.stdout)["sandboxes"]
    done = fn.cli("fn", "sandbox::exec", "{")
    assert done.returncode == 1 and json.loads(done.stdout)["code"] == "S001"
    for name in ("sandbox::nope", "nope", "../v1/health", "sandbox::fs::é", "a b?c#d"):
        done = fn.cli("fn", name)
        told = json.loads(done.stdout)
        assert done.returncode == 1 and told["code"] == "S001" and "sandbox::run" in told["fix_note"], done


def test_iii_a_caller_that_goes_away_takes_its_run_along(fn: FunctionLab) -> None:
    """Destroy the sandbox of a run whose caller has gone."""
    import json
    import socket

    before = {one["sandbox_id"] for one in fn("sandbox::list")["sandboxes"]}
    body = json.dumps({"image": "python", "lang": "shell", "code": "sleep 600"}).encode()
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(f"{fn.home}/daemon.sock")
        sock.sendall(
            b"POST /functions/sandbox::run HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body
        )
        until(lambda: {one["sandbox_id"] for one in fn("sandbox::list")["sandboxes"]} - before, "it runs")
    until(lambda: not {one["sandbox_id"] for one in fn("sandbox::list")["sandboxes"]} - before, "it is gone")


def test_iii_threads_do_not_share_answers(fn: FunctionLab, box: str) -> None:
    """Give each caller its own answer."""
    barrier = threading.Barrier(4)

    def write(number: int) -> bool:
        barrier.wait(60)
        fn.put(box, f"/tmp/own-{number}", str(number))
        return fn.get(box, f"/tmp/own-{number}") == str(number)

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(write, range(4)))


def test_iii_Q11_a_sandbox_is_ready_when_create_answers(fn: FunctionLab) -> None:
    """Take commands and files at once; how long creating takes is measured by the benchmarks."""
    sandbox = fn.create(image="node")["sandbox_id"]
    assert fn("sandbox::exec", sandbox_id=sandbox, cmd="node -e 'console.log(1)'")["stdout"] == "1\n"
    fn("sandbox::stop", sandbox_id=sandbox, wait=True)
    assert fn("sandbox::stop", sandbox_id=sandbox, wait=True)["stopped"] is True
