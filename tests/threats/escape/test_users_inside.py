"""Users inside one sandbox: another user reaches neither root's processes nor the interpreters that wait for root's next run."""

import json

from lab.sandboxes import Lab, until

HOLD = """
import os, time
kept = open('/root/private', 'w+'); os.chmod('/root/private', 0o600); kept.write('canary'); kept.flush()
ends = os.pipe(); os.write(ends[1], b'canary')
open('/tmp/ready', 'w').close(); time.sleep(600)
"""
REACH = """
import ctypes, json, os, signal
libc = ctypes.CDLL(None, use_errno=True)
found, looked = set(), 0
own = {os.readlink(f'/proc/self/fd/{n}') for n in (0, 1, 2)}  # its own streams, whose other ends the agent holds
def attempt(what, act):
    try:
        if act(): found.add(what)
    except OSError: pass
for pid in [int(p) for p in os.listdir('/proc') if p.isdigit()]:
    at = f'/proc/{pid}/'
    try:
        if os.stat(at).st_uid != 0: continue
        fds = os.listdir(at + 'fd')
    except OSError: fds = []
    looked += 1
    attempt('environ', lambda: b'canary' in open(at + 'environ', 'rb').read())
    attempt('memory', lambda: os.open(at + 'mem', os.O_RDONLY))
    attempt('memory', lambda: os.open(at + 'mem', os.O_RDWR))
    attempt('attach', lambda: libc.ptrace(16, pid, 0, 0) == 0 or libc.ptrace(0x4206, pid, 0, 0) == 0)
    attempt('signal', lambda: os.kill(pid, signal.SIGCONT) is None)
    STARVE
    for name in ('root', 'cwd'): attempt(name, lambda: os.listdir(at + name + '/root'))
    for number in fds:
        for flags in (os.O_RDONLY, os.O_WRONLY):
            def open_it():
                fd = os.open(at + 'fd/' + number, flags | os.O_NONBLOCK)
                at_hand = os.readlink(f'/proc/self/fd/{fd}')
                return not at_hand.startswith('/.atoll/memory/') and at_hand not in ('/dev/null', '/.atoll/guest', *own)
            attempt('descriptor', open_it)
print(json.dumps([sorted(found), looked]))
"""
STARVE = "attempt('limits', lambda: libc.prlimit(pid, 7, (ctypes.c_ulong * 2)(8, 8), None) == 0)"
# gVisor builds before 2026 show the environment of every process to every user of the sandbox: SECURITY.md.
SHOWN = {"container": ([],), "gvisor": ([], ["environ"])}


def test_another_user_reaches_nothing_of_roots(lab: Lab, runtime: str) -> None:
    """Memory, descriptors, signals, limits and directories of root's command, of the agent and of what it keeps warm."""
    with lab.sandbox(runtime=runtime) as made:
        made.run("pass")  # from here on an interpreter gets ready for the next run
        made.exec("chmod 700 /root")
        made.start(["python3", "-c", HOLD], env={"SECRET": "canary"}, user="root")
        until(lambda: made.files.exists("/tmp/ready"), "root's command holds something")
        found, looked = json.loads(made.exec(["python3", "-c", REACH.replace("STARVE", STARVE)], user="1000").stdout)
        assert found in SHOWN[runtime] and looked >= 3
        own, _ = json.loads(made.exec(["python3", "-c", REACH.replace("STARVE", "")], user="root").stdout)
        assert {"environ", "signal"} <= set(own), own  # control: root itself reaches its own
        assert made.run("print('as ever')").stdout == "as ever\n"
