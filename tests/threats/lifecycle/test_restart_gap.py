"""LIF-10: a restart of the daemon opens no gap in the network's wall. The broker's own: tests/threats/egress/test_every_path.py."""

import os
import signal
import socket
import threading

from lab.sandboxes import LONG, Lab, alive, until

PROBE = """
import os, socket, sys
tried = won = 0
while True:
    for host, port in ((sys.argv[1], int(sys.argv[2])), ('198.51.100.7', 443), ('169.254.169.254', 80)):
        sock = socket.socket(); sock.settimeout(0.2)
        try: sock.connect((host, port)); won += 1
        except OSError: pass
        finally: sock.close()
        tried += 1
    if tried % 30 == 0:
        with open('/workspace/half', 'w') as file: file.write(f'{tried} {won}')
        os.rename('/workspace/half', '/workspace/tried')
"""


def test_no_connection_is_let_through_while_the_daemon_changes(own_lab: Lab, runtime: str) -> None:
    """A prober inside knocks at a listener of this machine all the time, through kills and starts; the listener hears nothing."""
    heard = []
    with socket.create_server(("0.0.0.0", 0)) as server:
        port = server.getsockname()[1]
        address = own_address()

        def listen() -> None:
            while True:
                try:
                    link, peer = server.accept()
                except OSError:
                    return
                heard.append(peer)
                link.close()

        threading.Thread(target=listen, daemon=True).start()
        socket.create_connection((address, port), timeout=30).close()  # control: outside a sandbox it is reached
        until(lambda: len(heard) == 1, "the control connection is heard")
        with own_lab.sandbox(runtime=runtime, network=True, hosts=[]) as made:
            made.start(["python3", "-c", PROBE, address, str(port)])

            def tried() -> int:
                return (
                    int(made.files.read("/workspace/tried").split()[0]) if made.files.exists("/workspace/tried") else 0
                )

            until(lambda: tried() > 0, "the prober knocks")
            for _ in range(20 if LONG else 2 if runtime == "container" else 1):
                pid, before = own_lab.start(), tried()
                os.kill(pid, signal.SIGKILL)
                until(lambda pid=pid: not alive(pid), "it is gone")
                own_lab.start()
                until(lambda before=before: tried() > before, "it knocked on")
            assert made.files.read("/workspace/tried").split()[1] == b"0"
        assert len(heard) == 1, heard
        server.shutdown(socket.SHUT_RDWR)


def own_address() -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("198.51.100.1", 9))
            return str(probe.getsockname()[0])
        except OSError:
            return "127.0.0.1"
