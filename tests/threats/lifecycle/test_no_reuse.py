"""LIF-01: nothing of one sandbox is ever seen in another, whatever it leaves behind."""

from lab.sandboxes import LONG, Lab

MARK = "left-behind-by-the-first"
PLACES = [
    "/workspace",
    "/tmp",
    "/dev/shm",
    "/root",
    "/etc",
    "/usr/bin",
    "/usr/local/bin",
    "/var",
    "/home",
    "/opt",
    "/srv",
    "/run",
    "/mnt",
]
PLANT = f"""
import os, socket
for place in {PLACES!r}:
    try: open(place + '/{MARK}', 'w').write('{MARK}')
    except OSError: pass
for path in ('/etc/profile', '/etc/environment', '/root/.bashrc', '/etc/ld.so.preload.{MARK}'):
    try: open(path, 'a').write('\\n# {MARK}\\n')
    except OSError: pass
os.system('mkdir -p /var/spool/cron; echo "* * * * * touch /tmp/{MARK}" > /var/spool/cron/root')
if os.fork() == 0:
    os.setsid()
    socket.socket(socket.AF_UNIX).bind('\\0{MARK}')
    os.execvp('bash', ['{MARK}', '-c', 'sleep 671'])
"""
LOOK = f"""
import os
seen = [p for p in open('/proc/net/unix').read().splitlines() if '{MARK}' in p] if os.path.exists('/proc/net/unix') else []
seen += [k for k in os.environ if '{MARK}' in os.environ[k]]
for top in {PLACES!r}:
    for where, _, names in os.walk(top):
        seen += [os.path.join(where, n) for n in names if '{MARK}' in n]
for path in ('/etc/profile', '/etc/environment', '/root/.bashrc', '/var/spool/cron/root'):
    try: seen += [path] if '{MARK}' in open(path).read() else []
    except OSError: pass
for pid in filter(str.isdigit, os.listdir('/proc')):
    try: seen += [pid] if '671' in open(f'/proc/{{pid}}/cmdline').read() else []
    except OSError: pass
print(seen)
"""


def test_a_marker_is_never_seen_again(lab: Lab, runtime: str) -> None:
    """Files everywhere, a daemon, an abstract socket, environment: later sandboxes start from nothing."""
    first = lab.create(runtime=runtime, env={"MARK": MARK})
    assert first.run(PLANT).ok
    assert MARK in first.run(LOOK).stdout  # control: the look finds it where it is
    with lab.sandbox(runtime=runtime) as beside:
        assert beside.run(LOOK).stdout == "[]\n"
    first.destroy()
    first.close()
    for _ in range(200 if LONG else 3 if runtime == "container" else 1):
        with lab.sandbox(runtime=runtime) as later:
            assert later.run(LOOK).stdout == "[]\n"
