"""What programs meet inside: their host name, long arguments and lines, merged output, who they are."""

import io
import json
import tarfile

import pytest
from lab.sandboxes import SEVERAL_IDS, Lab

from atoll import Sandbox, errors

OTHER_USERS = pytest.mark.skipif(not SEVERAL_IDS, reason="without subordinate ids a sandbox has one user")
SELF = "import socket; print(socket.gethostbyname(socket.gethostname()))"


def test_everyday_21_the_host_name_resolves(anywhere: Sandbox) -> None:
    found = anywhere.exec(["python3", "-c", SELF])
    assert (found.exit_code, found.stdout) == (0, "127.0.1.1\n"), found.stderr
    assert anywhere.exec("getent hosts localhost").exit_code == 0
    lines = anywhere.files.read_text("/etc/hosts").splitlines()
    assert sum(anywhere.exec("hostname").stdout.strip() in line for line in lines) == 1


def test_everyday_21_the_host_name_of_a_named_and_restarted_sandbox_resolves(lab: Lab, runtime: str) -> None:
    with lab.sandbox(runtime=runtime, name="my-build") as sandbox:
        for _ in range(2):
            found = sandbox.exec(["python3", "-c", SELF])
            assert (found.exit_code, found.stdout) == (0, "127.0.1.1\n"), found.stderr
            assert sandbox.files.read_text("/etc/hosts").count("my-build") == 1
            sandbox.stop()
            sandbox.restart()


def test_everyday_23_arguments_of_nearly_two_mebibytes(anywhere: Sandbox) -> None:
    """As Linux allows: 2 MiB with the environment, 128 KiB each."""
    words = ["a" * 100_000] * 19
    done = anywhere.exec(["python3", "-c", "import sys; print(sum(map(len, sys.argv[1:])))", *words])
    assert (done.exit_code, done.stdout) == (0, "1900000\n"), done.stderr
    many = anywhere.exec(["python3", "-c", "import sys; print(len(sys.argv))", *["x"] * 60_000])
    assert many.stdout == "60001\n"
    with pytest.raises(errors.InvalidArgument, match="too long"):
        anywhere.exec(["echo", *["a" * 100_000] * 25])


@pytest.mark.parametrize("size", [131_071, 131_072, 200_000, 1_500_000])
def test_everyday_23_a_shell_line_of_any_length_to_two_mebibytes(anywhere: Sandbox, size: int) -> None:
    head, tail = 'echo $# "$0"; x=\'', "é'; echo ${#x}; exit 9"
    line = head + "b" * (size - len(head) - len(tail.encode())) + tail
    assert len(line.encode()) == size
    done = anywhere.exec(line)
    shell = "/bin/bash"
    assert (done.exit_code, done.stdout) == (9, f"0 {shell}\n{size - len(head) - len(tail.encode()) + 1}\n"), (
        done.stderr
    )


def test_everyday_23_a_long_shell_line_keeps_its_lines(anywhere: Sandbox) -> None:
    """Several lines, a here document, a comment in the first place, a syntax error at the end."""
    filler = "# " + "c" * 150_000 + "\n"
    done = anywhere.exec(filler + "cat <<EOF\nhere $((1+1))\nEOF\nset -- a b; echo $#\n")
    assert (done.exit_code, done.stdout) == (0, "here 2\n2\n"), done.stderr
    broken = anywhere.exec(filler + "echo before\nif true; then\n")
    assert broken.exit_code != 0 and "syntax error" in broken.stderr


def test_everyday_23_the_stdin_limit_counts_bytes(lab: Lab, anywhere: Sandbox) -> None:
    """The same number of bytes passes whatever they are, and the refusal names it."""
    most = 32 * 1024 * 1024
    for data in (b"\0" * most, "\x01" * most, "é" * (most // 2)):
        assert anywhere.exec("wc -c", stdin=data).stdout.split() == [str(most)]
    for data in (b"a" * (most + 1), "é" * (most // 2 + 1)):
        with pytest.raises(errors.TooLarge, match=str(most)):
            anywhere.exec("wc -c", stdin=data)
    lab.start()
    body = {"command": "wc -c", "stdin": "a" * (most + 1)}
    status, answer = lab.ask("POST", f"/v1/sandboxes/{anywhere.id}/exec", json.dumps(body).encode())
    assert status == 400 and str(most) in answer["error"]["message"]


def test_everyday_29_merged_stderr_is_in_true_order(anywhere: Sandbox) -> None:
    line = "for i in $(seq 200); do echo out $i; echo err $i >&2; done"
    wanted = "".join(f"out {i}\nerr {i}\n" for i in range(1, 201))
    done = anywhere.exec(line, merge_stderr=True)
    assert (done.exit_code, done.stdout, done.stderr, done.stderr_bytes) == (0, wanted, "", 0)
    behind = anywhere.start(line, merge_stderr=True).wait()
    assert (behind.stdout, behind.stderr) == (wanted, "")
    code = "import os\nfor i in range(1, 201): os.write(1, b'out %d\\n' % i); os.write(2, b'err %d\\n' % i)"
    for _ in range(2):  # a warm interpreter too
        assert anywhere.exec(["python3", "-c", code], merge_stderr=True).stdout == wanted
    with pytest.raises(errors.InvalidArgument):
        list(anywhere.stream("print(1)", language="python", merge_stderr=True))


def test_everyday_29_unknown_users_and_programs_are_typed(anywhere: Sandbox) -> None:
    """By class and code, without reading a text."""
    for wrong in ("nobody-here", "root:no-such-group"):
        with pytest.raises(errors.UserNotFound) as refused:
            anywhere.exec("id", user=wrong)
        assert refused.value.code == "user_not_found"
        with pytest.raises(errors.UserNotFound):
            anywhere.files.read("/etc/hosts", user=wrong)
    anywhere.files.write("plain.txt", "no program\n", mode=0o644)
    refused_run = anywhere.exec(["/workspace/plain.txt"])
    assert (refused_run.exit_code, refused_run.error_code) == (126, "program_not_executable")
    missing = anywhere.exec(["no-such-program-anywhere"])
    assert (missing.exit_code, missing.error_code) == (127, "program_not_found")
    behind = anywhere.start(["/workspace/plain.txt"]).wait()
    assert (behind.exit_code, behind.error_code) == (126, "program_not_executable")
    assert anywhere.exec("exit 126").error_code is None


@OTHER_USERS
def test_everyday_29_file_operations_as_a_user(anywhere: Sandbox) -> None:
    """The rights are the user's, and so is what is made."""
    files = anywhere.files
    files.mkdir("/workspace/shared", mode=0o777)
    files.chmod("/workspace/shared", 0o777)
    files.write("/workspace/secret", "root's", mode=0o600)
    files.write("/workspace/open", "root's", mode=0o666)
    made = files.write("/workspace/shared/sub/mine", "hers", user="nobody", parents=True)
    assert (made.uid, made.gid) == (65534, 65534)
    assert files.stat("/workspace/shared/sub").uid == 65534
    assert files.read_text("/workspace/shared/sub/mine", user="nobody") == "hers"
    files.write("/workspace/shared/sub/mine", "hers again", user="nobody")
    files.write("/workspace/open", "written", user="nobody")
    assert (files.read_text("/workspace/open"), files.stat("/workspace/open").uid) == ("written", 0)
    for refused in (
        lambda: files.read("/workspace/secret", user="nobody"),
        lambda: files.write("/workspace/secret", "taken", user="nobody"),
        lambda: files.write("/workspace/new", "x", user="nobody"),
        lambda: files.remove("/workspace/secret", user="nobody"),
        lambda: files.move("/workspace/open", "/workspace/shared/open", user="nobody"),
        lambda: files.chmod("/workspace/open", 0o777, user="nobody"),
        lambda: files.chmod("/workspace/shared/sub/mine", uid=0, user="nobody"),
        lambda: files.mkdir("/etc/x", user="65534:65534"),
        lambda: files.symlink("x", "/workspace/link", user="nobody"),
        lambda: files.list("/root", user="nobody"),
        lambda: files.upload(__file__, "/workspace/up", user="nobody"),
    ):
        with pytest.raises(errors.FilePermission):
            refused()
    assert files.read_text("/workspace/secret") == "root's"
    assert files.list("/workspace/shared", recursive=True, user="nobody")
    files.copy("/workspace/open", "/workspace/shared/copy", user="nobody")
    assert files.stat("/workspace/shared/copy").uid == 65534
    assert files.grep("hers", "/workspace/shared", user="nobody")[0].path.endswith("mine")
    assert files.read_text("/workspace/secret") == "root's"  # the agent itself is root as before
    assert files.remove("/workspace/shared/sub", recursive=True, user="nobody") == 2
    with pytest.raises(errors.InvalidArgument):
        files.read("/etc/hosts", user="a b;c")


@OTHER_USERS
def test_everyday_24_host_image_tools_for_users_work(anywhere: Sandbox) -> None:
    """su, runuser, adduser and what they need in /etc and /run."""
    assert anywhere.exec("su nobody -s /bin/sh -c 'id -u'").stdout == "65534\n"
    assert anywhere.exec("runuser -u nobody -- id -u").stdout == "65534\n"
    assert anywhere.exec("stat -L -c %a /run/lock /var/lock").stdout == "1777\n1777\n"
    added = anywhere.exec("adduser --disabled-password --gecos '' bob && su bob -c 'cd && pwd && id -un && touch x'")
    assert added.exit_code == 0 and added.stdout.endswith("/home/bob\nbob\n"), added.stderr + added.stdout
    assert anywhere.files.stat("/home/bob/x").uid == anywhere.files.stat("/home/bob").uid >= 1000
    assert anywhere.exec("useradd -m ann && passwd -S ann && userdel -r ann").exit_code == 0
    denied = anywhere.exec("su root -c id", user="bob", stdin="\n")
    assert denied.exit_code != 0 and "uid=0" not in denied.stdout


def test_everyday_24_host_image_says_what_to_use_instead_of_apt(anywhere: Sandbox) -> None:
    for line in ("apt-get install -y hello", "apt update"):
        refused = anywhere.exec(line)
        assert refused.exit_code == 100 and "--image debian:12" in refused.stderr and "pip" in refused.stderr


def test_everyday_25_ids_above_the_range_of_a_sandbox(anywhere: Sandbox, runtime: str) -> None:
    """As docs/policy.md says: a container refuses to give a file to one, gVisor leaves the owner as it is."""
    make = (
        "import tarfile\n"
        "entry = tarfile.TarInfo('far'); entry.uid = entry.gid = 1234567\n"
        "with tarfile.open('far.tar', 'w') as tar: tar.addfile(entry)\n"
    )
    assert anywhere.run(make).exit_code == 0
    kept = anywhere.exec("tar xf far.tar")
    if runtime == "container":
        assert kept.exit_code == 2 and "Invalid argument" in kept.stderr
    else:
        assert kept.exit_code == 0 and anywhere.files.stat("far").uid == 0
    assert anywhere.exec("rm -f far && tar --no-same-owner -xf far.tar").exit_code == 0
    assert anywhere.files.stat("far").uid == 0


def test_everyday_25_archives_with_ids_the_sandbox_does_not_have(lab: Lab, anywhere: Sandbox, runtime: str) -> None:
    """Everything is unpacked; who cannot be the owner is said on container, and root is it on gVisor (docs/programs.md)."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        entry = tarfile.TarInfo("far")
        entry.size, entry.uid, entry.gid = 4, 1234567, 2**31
        archive.addfile(entry, io.BytesIO(b"data"))
    anywhere.files.write("/tmp/line25/a.tar", packed.getvalue(), parents=True)
    done = anywhere.exec("cd /tmp/line25 && tar xf a.tar")
    assert anywhere.exec("cat far; stat -c ' %u %g' far", cwd="/tmp/line25").stdout == "data 0 0\n"
    if runtime == "container":
        assert done.exit_code == 2 and "Cannot change ownership to uid 1234567" in done.stderr
    else:
        assert done.exit_code == 0, done
    for env, flags in ({}, "--no-same-owner"), ({"TAR_OPTIONS": "--no-same-owner"}, ""):
        assert anywhere.exec(f"rm far; tar xf a.tar {flags}", cwd="/tmp/line25", env=env).ok
    status, _ = lab.ask("PUT", f"/v1/sandboxes/{anywhere.id}/tar?path=/tmp/line25/up", packed.getvalue())
    assert status == 200
    assert anywhere.exec("cat far; stat -c ' %u %g' far", cwd="/tmp/line25/up").stdout == "data 0 0\n"
