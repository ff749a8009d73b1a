"""The kernels for JavaScript and TypeScript: a Jupyter kernel in front of one Node that keeps its variables.

Node runs in a session of its own, so an interrupt reaches this program alone, which passes it on as a request. Requests
and answers are JSON lines on two pipes; what Node prints comes through two others and is passed on as it is.
"""

import codecs
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from ipykernel.kernelapp import IPKernelApp
from ipykernel.kernelbase import Kernel

PIECE = 64 * 1024
MOST_LINE = 64 * 1024 * 1024  # of one answer
NODE = Path(__file__).with_name("node_kernel.js")
GRACE = 2.0  # seconds an interrupted cell has to end
POLL = 0.05


class NodeKernel(Kernel):
    implementation = "atoll"
    implementation_version = "1"
    banner = "JavaScript and TypeScript"
    language = "javascript"
    language_info = {"name": "javascript", "mimetype": "text/javascript", "file_extension": ".js"}

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self._node: subprocess.Popen[bytes] | None = None
        self._number = 0

    def _start(self) -> None:
        """Start Node with its two pipes: requests at descriptor 3, answers at 4."""
        asks_read, self._asks = os.pipe()
        self._answers, answers_write = os.pipe()

        def place() -> None:  # runs in the child
            held = [os.dup(asks_read), os.dup(answers_write)]
            high = [os.dup2(fd, 10 + at) for at, fd in enumerate(held)]
            os.dup2(high[0], 3)
            os.dup2(high[1], 4)

        self._node = subprocess.Popen(
            ["node", "--no-warnings", str(NODE)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            preexec_fn=place,
            close_fds=False,
            start_new_session=True,
        )
        os.close(asks_read)
        os.close(answers_write)
        assert self._node.stdout is not None and self._node.stderr is not None
        self._names = {self._node.stdout.fileno(): "stdout", self._node.stderr.fileno(): "stderr"}
        self._decoders = {fd: codecs.getincrementaldecoder("utf-8")("replace") for fd in self._names}
        self._line = bytearray()
        self._watch = selectors.DefaultSelector()
        for fd in (*self._names, self._answers):
            os.set_blocking(fd, False)
            self._watch.register(fd, selectors.EVENT_READ)

    def _end(self) -> None:
        if self._node is None:
            return
        try:
            os.killpg(self._node.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self._node.wait()
        for fd in (self._asks, self._answers):
            os.close(fd)
        self._watch.close()
        self._node = None

    def do_shutdown(self, restart: bool) -> Any:
        self._end()
        return {"status": "ok", "restart": restart}

    def do_execute(self, code: str, silent: bool, *_: Any, **__: Any) -> Any:
        if self._node is None or self._node.poll() is not None:
            self._end()
            self._start()
        self._number += 1
        self._ask({"id": self._number, "code": code, "typescript": self.language == "typescript"})
        answer = self._interruptible(silent)
        if answer is None:
            return self._failed("KernelDied", "node has ended; its variables are lost", [], silent)
        for shown in answer.get("shown", ()):
            if not silent and isinstance(shown, dict):
                self._send("display_data", {"data": shown, "metadata": {}})
        if "error" in answer:
            error = answer["error"]
            trace = str(error.get("stack") or "").splitlines()
            return self._failed(str(error.get("name")), str(error.get("message")), trace, silent)
        if answer.get("data") and not silent:
            content = {"execution_count": self.execution_count, "data": answer["data"], "metadata": {}}
            self._send("execute_result", content)
        return {"status": "ok", "execution_count": self.execution_count, "payload": [], "user_expressions": {}}

    def _interruptible(self, silent: bool) -> dict[str, Any] | None:
        try:
            return self._await_answer(silent, None)
        except KeyboardInterrupt:
            self._ask({"interrupt": True})
            try:
                return self._await_answer(silent, time.monotonic() + GRACE)
            except (KeyboardInterrupt, TimeoutError):
                self._end()  # it cannot be interrupted
                return {"error": {"name": "KeyboardInterrupt", "message": "interrupted; the variables are lost"}}

    def _ask(self, request: dict[str, Any]) -> None:
        data = json.dumps(request).encode() + b"\n"
        try:
            while data:
                data = data[os.write(self._asks, data) :]
        except BrokenPipeError:
            pass  # that it has ended is found where its answer is awaited

    def _await_answer(self, silent: bool, until: float | None) -> dict[str, Any] | None:
        """Pass on what is printed until the answer to the newest request is there; None when Node has ended.

        Node writes to its pipes at once, so what a cell has printed is there before its answer.
        """
        answer: dict[str, Any] | None = None
        while True:
            if until is not None and time.monotonic() > until:
                raise TimeoutError
            events = self._watch.select(0 if answer is not None else None if until is None else POLL)
            if answer is not None and not events:
                return answer
            for key, _ in events:
                data = os.read(key.fd, PIECE)
                if key.fd != self._answers:
                    if data:
                        self._print(key.fd, data, silent)
                    else:
                        self._watch.unregister(key.fd)
                elif not data:
                    return None
                else:
                    answer = self._take(data) or answer

    def _take(self, data: bytes) -> dict[str, Any] | None:
        """Return the answer that these bytes complete, if they do. Each byte is looked at once."""
        found = None
        at = 0
        while (end := data.find(b"\n", at)) >= 0:
            self._line += data[at:end]
            at = end + 1
            line, self._line = bytes(self._line), bytearray()
            try:
                told = json.loads(line)
            except ValueError:
                continue
            if isinstance(told, dict) and told.get("id") == self._number:
                found = told
        self._line += data[at:]
        if len(self._line) > MOST_LINE:
            self._line = bytearray()
            found = {"error": {"name": "RangeError", "message": "the result is too large to be shown"}}
        return found

    def _print(self, fd: int, data: bytes, silent: bool) -> None:
        text = self._decoders[fd].decode(data)
        if text and not silent:
            self._send("stream", {"name": self._names[fd], "text": text})

    def _failed(self, name: str, value: str, trace: list[str], silent: bool) -> dict[str, Any]:
        content = {"ename": name, "evalue": value, "traceback": trace or [f"{name}: {value}"]}
        if not silent:
            self._send("error", content)
        return {"status": "error", "execution_count": self.execution_count, **content}

    def _send(self, kind: str, content: dict[str, Any]) -> None:
        self.send_response(self.iopub_socket, kind, content)


class TypeScriptKernel(NodeKernel):
    language = "typescript"
    language_info = {"name": "typescript", "mimetype": "text/typescript", "file_extension": ".ts"}


if __name__ == "__main__":
    chosen = TypeScriptKernel if sys.argv.pop() == "typescript" else NodeKernel
    IPKernelApp.launch_instance(kernel_class=chosen)
