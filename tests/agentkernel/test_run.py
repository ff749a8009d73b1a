"""`atoll run` on real sandboxes, by the promises' ids."""

import os
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from atoll.cli.grammar import Arguments
from atoll.client._sync.driver import Link
from atoll.surfaces.agentkernel.cli.policy import choose_image
from atoll.surfaces.agentkernel.cli.project import find

from .conftest import WAIT, Cli, until

# Asked of the kernel and not of files, which not every runtime has.
LINKS = "python3 -c 'import socket; print(*sorted(n for _, n in socket.if_nameindex()))'"
NO_NEW_PRIVILEGES = "python3 -c 'import ctypes; print(ctypes.CDLL(None).prctl(39, 0, 0, 0, 0))'"


def test_ak_P1_P2_runs_in_a_fresh_sandbox_and_prints(cli: Cli) -> None:
    assert cli.ok("run", "python3", "-c", "print(1+1)").stdout == b"2\n"
    assert cli.ok("run", "sh", "-c", "echo a && echo b").stdout == b"a\nb\n"
    assert cli.ok("run", "sh", "-c", "hostname; cat /proc/1/comm").stdout.split()[0].startswith(b"sandbox-")


def test_ak_K1_argv_arrives_unchanged(cli: Cli) -> None:
    words = ["a b", "'q'", '"d"', "$HOME", "`id`", "x\ny", "\\", "--flag", "-k", "*", "", "é"]
    code = "import sys, json; print(json.dumps(sys.argv[1:]))"
    assert cli.ok("run", "python3", "-c", code, *words).json == words
    assert cli.ok("run", "--", "python3", "-c", "print(1)").stdout == b"1\n"


def test_ak_K2_exit_codes_and_streams(cli: Cli) -> None:
    done = cli("run", "sh", "-c", "echo out; echo err >&2; exit 7")
    assert (done.code, done.stdout, done.stderr) == (7, b"out\n", b"err\n")
    assert cli("run", "sh", "-c", "kill -9 $$").code == 137
    missing = cli("run", "--image", "host", "nosuch-program")
    assert missing.code == 127 and b"nosuch-program" in missing.stderr and b"--image" in missing.stderr
    assert cli("run", "--image", "host", "/etc/nosuch").code == 127
    assert cli("run", "--image", "host", "/etc/passwd").code == 126
    slow = cli("run", "--timeout", "1s", "sh", "-c", "echo before; sleep 600")
    assert slow.code == 124 and slow.stdout == b"before\n"


def test_a_program_nothing_knows_fetches_no_image(cli: Cli) -> None:
    """A slip of the pen is told at once, and not after an image was built in which the program is missing too."""
    before = cli.ok("image", "list", "--json").json["images"]
    missing = cli("run", "pyhton3", "-c", "print(1)")
    assert missing.code == 127 and b"pyhton3" in missing.stderr
    assert cli.ok("image", "list", "--json").json["images"] == before


def test_ak_K3_stdin_is_passed_on_byte_for_byte(cli: Cli) -> None:
    data = bytes(range(256)) * 4000
    assert cli.ok("run", "cat", stdin=data).stdout == data
    assert cli.ok("run", "sh", "-c", "wc -c", stdin=b"").stdout.strip() == b"0"


def test_usage_errors_are_2_and_own_failures_125(cli: Cli) -> None:
    for words in (["--profile", "bogus"], ["--compatibility-mode", "bogus"], ["--timeout", "soon"], ["--nosuch"]):
        done = cli("run", *words, "true")
        assert done.code == 2, done
    assert cli("run").code == 2
    assert cli("run", "--image", "localhost:1/no/such:image", "true").code == 125
    assert cli("run", "--backend", "nosuch", "true").code == 125
    assert cli.called("agentkernel")("run", "--backend", "nosuch", "true").stderr.startswith(b"Error: ")


def test_ak_P3_the_command_picks_the_image(cli: Cli, project: Path) -> None:
    """A program this machine has runs from its own image; what was used is told."""
    assert cli.ok("run", "node", "-e", "console.log(1)").stdout == b"1\n"
    assert cli.ok("run", "bash", "-c", "echo $0").stdout == b"bash\n"
    (project / "Dockerfile").write_text("FROM scratch\nRUN touch /pwned\n")
    assert cli.ok("run", "--image", "host", "sh", "-c", "ls /pwned 2>/dev/null; echo ok").stdout == b"ok\n"


def test_ak_P5_P6_nothing_is_left_behind_unless_kept(cli: Cli) -> None:
    before = set(cli.names())
    assert cli("run", "sh", "-c", "exit 3").code == 3
    until(lambda: set(cli.names()) <= before)
    done = cli("run", "--keep", "sh", "-c", "echo data > /workspace/f; exit 4")
    assert done.code == 4
    (kept,) = [n for n in cli.names() if n.startswith("run-") and n.encode() in done.stderr]
    assert len(kept) == len("run-") + 8
    # P6: it can be entered, and removed
    assert cli.ok("exec", kept, "cat", "/workspace/f").stdout == b"data\n"
    cli.ok("sandbox", "remove", kept)
    assert kept not in cli.names()


def test_an_interrupted_run_leaves_nothing(cli: Cli) -> None:
    process = cli.popen("run", "sh", "-c", "echo up; sleep 600", stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == b"up\n"
    process.send_signal(signal.SIGINT)
    assert process.wait(WAIT) == 130
    until(lambda: not [n for n in cli.names() if n.startswith("ephemeral-")])


def test_output_that_nobody_reads_any_more_ends_the_run_quietly(cli: Cli) -> None:
    """`atoll run ... | head -1`: the line, no traceback, and no sandbox left that still writes."""
    process = cli.popen(
        "run", "sh", "-c", "yes", stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL
    )
    assert process.stdout is not None and process.stderr is not None
    assert process.stdout.readline() == b"y\n"
    process.stdout.close()
    assert process.stderr.read() == b"" and process.wait(WAIT) == 141
    process.stderr.close()
    until(lambda: not [n for n in cli.names() if n.startswith("ephemeral-")])


def test_a_killed_caller_takes_its_sandbox_along(cli: Cli) -> None:
    process = cli.popen("run", "sh", "-c", "echo up; sleep 600", stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == b"up\n"
    process.kill()
    process.wait(WAIT)
    until(lambda: not [n for n in cli.names() if n.startswith("ephemeral-")])


def test_ak_P8_P12_moderate_shows_nothing_of_the_host(cli: Cli, project: Path) -> None:
    (project / "here.txt").write_text("x")
    code = "pwd; ls -A /workspace; ls -A /home/user; env | grep -c SECRET_OF_THE_CALLER"
    done = cli("run", "sh", "-c", code, env={"SECRET_OF_THE_CALLER": "1"})
    assert done.stdout == b"/workspace\n0\n", done
    hint = cli("run", "cat", "here.txt")
    assert hint.code == 1 and b"hint:" in hint.stderr and b"--profile permissive" in hint.stderr


def test_everyday_11_the_hint_names_the_image_that_was_used(cli: Cli) -> None:
    done = cli("run", "--image", "host", "poetry", "--version")
    assert done.code == 127 and b"hint: the image host has no `poetry`" in done.stderr, done


def test_ak_P9_restrictive(cli: Cli) -> None:
    code = (
        "grep -E '^Cap(Eff|Prm|Bnd)' /proc/self/status | cut -f2 | sort -u; touch /x /usr/x /etc/x 2>/dev/null || echo ro;"
        " echo t > /tmp/t && echo tmp; cp /bin/true /tmp/p; /tmp/p 2>/dev/null || echo noexec;"
        f" {LINKS}; {NO_NEW_PRIVILEGES}"
    )
    done = cli("run", "--profile", "restrictive", "sh", "-c", code)
    assert done.stdout.split() == [b"0000000000000000", b"ro", b"tmp", b"noexec", b"lo", b"1"], done


def test_ak_K11_hardening_is_there_on_every_way_in(cli: Cli, name: str) -> None:
    code = f"{NO_NEW_PRIVILEGES}; grep Seccomp: /proc/self/status | cut -f2; unshare -U true 2>/dev/null && echo open"
    expected = [b"1", b"2"]
    assert cli("run", "sh", "-c", code).stdout.split() == expected
    assert cli("run", "--profile", "permissive", "sh", "-c", code).stdout.split() == expected
    cli.ok("create", name)
    cli.ok("start", name)
    assert cli("exec", name, "sh", "-c", code).stdout.split() == expected


def test_ak_K6_seccomp_of_a_mode_is_in_force(cli: Cli) -> None:
    code = (
        "import ctypes, os; c = ctypes.CDLL(None, use_errno=True); r = c.ptrace(0, 0, 0, 0);"
        "print(r, ctypes.get_errno())"
    )
    assert cli.ok("run", "python3", "-c", code).stdout == b"0 0\n"
    assert cli.ok("run", "--compatibility-mode", "claude", "python3", "-c", code).stdout == b"-1 1\n"
    assert cli.ok("run", "--profile", "restrictive", "python3", "-c", code).stdout == b"-1 1\n"


def test_ak_P10_permissive(cli: Cli, project: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"
    (home / ".atoll").mkdir(parents=True)
    (home / ".atoll" / "key").write_text("secret")
    (home / "note").write_text("mine\n")
    (project / "in.txt").write_text("in\n")
    code = (
        "pwd; cat in.txt; echo out > out.txt; cat /home/user/note; touch /home/user/x 2>/dev/null || echo ro;"
        " ls -A /home/user/.atoll; echo $MARK; echo $HOME"
    )
    env = {"HOME": str(home), "MARK": "seen"}
    done = cli("run", "--profile", "permissive", "sh", "-c", code, env=env)
    assert done.stdout.split()[:5] == [b"/workspace", b"in", b"mine", b"ro", b"seen"], done
    assert str(home).encode() not in done.stdout  # HOME is the sandbox's own
    assert (project / "out.txt").read_text() == "out\n"
    assert (project / "out.txt").stat().st_uid == os.geteuid()


def test_a_project_mount_keeps_its_levers_read_only(cli: Cli, project: Path) -> None:
    (project / ".git" / "hooks").mkdir(parents=True)
    (project / ".git" / "config").write_text("[core]\n")
    (project / ".mcp.json").write_text("{}")
    (project / ".vscode").mkdir()
    code = (
        "for f in .git/hooks/post-checkout .git/config .git/commondir .mcp.json .vscode/tasks.json; "
        "do echo x > $f 2>/dev/null && echo $f; done;"
        " mv .git .other 2>/dev/null && echo moved; mv .mcp.json m 2>/dev/null && echo moved; echo x > ok && echo fine"
    )
    done = cli("run", "--compatibility-mode", "claude", "sh", "-c", code)
    assert done.stdout == b"fine\n", done
    assert (project / ".git" / "config").read_text() == "[core]\n" and (project / ".mcp.json").read_text() == "{}"
    assert not list((project / ".git" / "hooks").iterdir()) and not (project / ".git" / "commondir").exists()


def test_ak_P11_K5_no_network_leaves_loopback_only(cli: Cli, project: Path) -> None:
    (project / "agentkernel.toml").write_text('[sandbox]\nname = "x"\n[security]\nnetwork = true\n')
    for words in (["--no-network"], ["--no-network", "--compatibility-mode", "claude"], ["--profile", "restrictive"]):
        done = cli("run", *words, "sh", "-c", LINKS)
        assert done.stdout.split() == [b"lo"], done


def test_ak_P14_P15_modes_by_flag_and_by_file(cli: Cli, project: Path) -> None:
    (project / "f.txt").write_text("f\n")
    code = "cat f.txt; echo $CLAUDE_CODE_SANDBOX"
    by_flag = cli.ok("run", "--compatibility-mode", "claude", "sh", "-c", code)
    (project / "agentkernel.toml").write_text('[sandbox]\nname = "x"\n[agent]\ncompatibility_mode = "claude"\n')
    by_file = cli.ok("run", "sh", "-c", code)
    assert by_flag.stdout == by_file.stdout == b"f\nagentkernel\n"
    (project / "agentkernel.toml").write_text(
        '[sandbox]\nname = "x"\n[agent]\ncompatibility_mode = "claude"\n[security]\nprofile = "restrictive"\n'
    )
    done = cli("run", "sh", "-c", f"ls f.txt; {LINKS}; touch /x")
    assert done.stdout == b"lo\n" and done.code == 1, done
    (project / "agentkernel.toml").write_text("")
    codex = cli("run", "--compatibility-mode", "codex", "sh", "-c", "cat f.txt; touch /x")
    assert codex.stdout == b"f\n" and b"Read-only" in codex.stderr


def test_ak_K12_a_greedy_project_file_is_refused(cli: Cli, project: Path) -> None:
    (project / "agentkernel.toml").write_text('[sandbox]\nname = "x"\n[security]\nprofile = "permissive"\n')
    done = cli("run", "true")
    assert done.code == 125 and b"--config agentkernel.toml" in done.stderr
    assert cli.ok("run", "--config", "agentkernel.toml", "sh", "-c", "ls").stdout == b"agentkernel.toml\n"
    (project / "agentkernel.toml").write_text('[sandbox]\nname = "x"\n[security.commands]\nblock = ["cat"]\n')
    assert cli("run", "cat", "/etc/passwd").code == 125


def test_ak_K6_files_env_and_limits_are_applied(cli: Cli, project: Path) -> None:
    (project / "seed").write_bytes(b"\x00\xff seed")
    (project / "agentkernel.toml").write_text(
        '[sandbox]\nname = "x"\n[resources]\nmemory_mb = 128\n[[files]]\nsource = "seed"\ndest = "/etc/x/seed"\nmode = "0600"\n'
    )
    done = cli.ok("run", "-e", "A=1 2", "sh", "-c", "stat -c %a /etc/x/seed; cat /etc/x/seed; echo; echo $A")
    assert done.stdout == b"600\n\x00\xff seed\n1 2\n"
    hungry = cli("run", "python3", "-c", "x = bytearray(400 << 20); print(len(x))")
    assert hungry.code == 137 and b"memory" in hungry.stderr, hungry


def test_ak_K19_output_arrives_while_the_command_runs(cli: Cli) -> None:
    code = "echo first; read line; echo got $line"
    process = cli.popen("run", "sh", "-c", code, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdin is not None
    assert process.stdout.readline() == b"first\n"
    process.stdin.write(b"word\n")
    process.stdin.flush()
    assert process.stdout.readline() == b"got word\n"
    process.stdin.close()
    assert process.wait(WAIT) == 0


def test_the_policy_that_applies_is_shown(cli: Cli) -> None:
    done = cli("run", "--keep", "--profile", "restrictive", "true")
    (kept,) = [n for n in cli.names() if n.startswith("run-") and n.encode() in done.stderr]
    try:
        info = cli.ok("sandbox", "get", kept).json
        isolation = info["policy"]["isolation"]
        assert (isolation["profile"], isolation["network"], isolation["read_only_root"]) == ("restrictive", False, True)
        assert isolation["capabilities"] == "none" and info["limits"]["memory_mb"]["value"] == 256
    finally:
        cli("remove", kept)


@pytest.mark.parametrize("called", ["atoll", "agentkernel"])
def test_hosts_by_default(cli: Cli, called: str) -> None:
    """As atoll what package tools need; as agentkernel every public name."""
    done = cli.called(called)("run", "--keep", "true")
    (kept,) = [n for n in cli.names() if n.startswith("run-") and n.encode() in done.stderr]
    try:
        hosts = cli.ok("sandbox", "get", kept).json["allowed_hosts"]
        assert hosts == ["*"] if called == "agentkernel" else "pypi.org" in hosts and "*" not in hosts
    finally:
        cli("remove", kept)


def test_ak_P3_the_directory_is_asked_when_the_command_says_nothing(
    cli: Cli, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own file, then the names of its files, then its Procfile; a name that is no text and a pipe do no harm."""
    link = Link(cli.home)
    monkeypatch.chdir(project)

    def chosen(*argv: str) -> tuple[str, str | None]:
        return choose_image(Arguments([], {"image": None}), find(None, str(project)), list(argv), link)

    os.mkfifo(project / "Procfile")
    (project / os.fsdecode(b"\xff\n.txt")).touch()
    assert cli.ok("run", "true").stdout == b""
    assert chosen("some-tool") == ("auto", "some-tool") and chosen() == ("base", "")
    (project / "Procfile").unlink()
    (project / "Procfile").write_text("# web: node x\nweb: python3 -m http.server\n")
    assert chosen("some-tool") == ("python", "some-tool") and chosen("node", "x") == ("node", "node")
    (project / "go.mod").touch()
    assert chosen("some-tool") == ("go", "some-tool")
    (project / "agentkernel.toml").write_text('[sandbox]\nname = "x"\nruntime = "ruby"\n')
    assert chosen("some-tool") == ("ruby", "some-tool") and chosen("node") == ("node", "node")
    (project / "agentkernel.toml").write_text('[sandbox]\nname = "x"\nruntime = "cobol"\n')
    assert b"cobol" in cli("run", "some-tool").stderr


def test_a_run_imports_nothing_heavy(cli: Cli) -> None:
    """The installed program too: what an interpreter loads before the first request is most of a warm run."""
    program = Path(__file__).parents[2] / "scripts" / "atoll"
    done = subprocess.run(
        [sys.executable, "-X", "importtime", str(program), "run", "python3", "-c", "print(1)"],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=WAIT, cwd=cli.directory, env=cli.env,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "1\n"), done.stderr
    loaded = [line.rpartition("|")[2].strip() for line in done.stderr.splitlines()]
    ours = set(loaded[loaded.index("site") :])
    heavy = {"re", "enum", "threading", "collections", "functools", "json", "typing", "socket", "subprocess", "tomllib"}
    assert "atoll.cli" in ours and not ours & heavy, sorted(ours & heavy)
    assert len(ours) <= 50, sorted(ours)


def test_ak_K6_published_ports_last_as_long_as_the_run(cli: Cli, project: Path) -> None:
    """By the flag and by a file that was named; a port in use, UDP and nonsense are refused before anything starts."""
    serve = "import http.server as h; h.HTTPServer(('127.0.0.1', 8000), h.SimpleHTTPRequestHandler).serve_forever()"
    (project / "named.toml").write_text('[sandbox]\nname = "x"\n[network]\nports = ["0:8000"]\n')
    for words in (("--publish", "0:8000"), ("--config", "named.toml")):
        process = cli.popen("run", *words, "python3", "-c", serve, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL)
        try:
            assert process.stderr is not None
            line = next(line for line in process.stderr if b"port 8000 is published at 127.0.0.1:" in line)
            port = int(line.rpartition(b":")[2])

            def fetched(port: int = port) -> bool:
                try:
                    with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=30) as answer:
                        return b"Directory listing" in answer.read()
                except OSError:
                    return False

            until(fetched)
            taken = cli("run", "-P", f"{port}:80", "true")
            assert taken.code == 125 and b"cannot be published" in taken.stderr
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(WAIT)
            process.stderr.close()
        until(lambda: not fetched())
    for bad in ("80/udp", "x", "1:2:3", "70000", "80:0", ":80:"):
        assert cli("run", "--publish", bad, "true").code == 125


def test_ak_K6_a_projects_file_is_never_without_effect_in_silence(cli: Cli, project: Path, name: str) -> None:
    text = '[sandbox]\nname = "x"\n'
    own = project / "agentkernel.toml"
    own.write_text(text + '[network]\nports = ["8000"]\n[daemon]\nmin_warm = 3\n')
    done = cli.ok("run", "true")
    assert b"ports" in done.stderr and b"[pool]" in done.stderr
    own.write_text(text + '[build]\ndockerfile = "Dockerfile"\n')
    missing = cli("run", "some-tool")
    assert missing.code == 125 and b"Dockerfile" in missing.stderr
    own.write_text(text + '[build]\ncontext = "/etc"\n')
    outside = cli("run", "some-tool")
    assert outside.code == 125 and b"outside the project" in outside.stderr
    own.unlink()
    (project / "f").write_text("x")
    (project / "named.toml").write_text(text + '[[files]]\nsource = "f"\ndest = "/tmp/f"\n')
    made = cli("create", name, "--config", "named.toml")
    assert made.code == 125 and b"`files` is for `run`" in made.stderr
