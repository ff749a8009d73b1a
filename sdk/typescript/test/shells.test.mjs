// Line 30: shell sessions and terminals, over the daemon's TLS port and over its own socket.
import assert from "node:assert/strict";
import { join } from "node:path";
import { after, before, test } from "node:test";
import { InvalidArgument, NotFound, Sandbox } from "../dist/esm/index.js";

let sandbox;
before(async () => {
  sandbox = await Sandbox.create();
});
after(() => sandbox.destroy());

async function readUntil(terminal, text, offset) {
  let seen = "";
  for await (const piece of terminal.output(offset)) {
    seen += Buffer.from(piece).toString();
    if (seen.includes(text)) return seen;
  }
  throw new Error(`the terminal ended: ${seen}`);
}

test("everyday 30: a shell keeps its directory and names, and tells each command's end", async () => {
  const shell = await sandbox.shell();
  await shell.run("cd /tmp && export A=1");
  const result = await shell.run("pwd; echo $A; cat; echo err >&2; (exit 3)", { stdin: "in" });
  assert.deepEqual([result.stdout, result.stderr, result.exitCode], ["/tmp\n1\nin", "err\n", 3]);
  const slow = await shell.run("sleep 100", { timeout: 1 });
  assert.deepEqual([slow.timedOut, slow.shellEnded], [true, false]);
  assert.deepEqual((await sandbox.shells()).map((one) => one.id), [shell.id]);
  assert.equal((await shell.run("exit 4")).shellEnded, true);
  await assert.rejects(shell.run("true"), NotFound);
  await shell.close();
});

test("everyday 30: a shell of another user, in Python", async () => {
  const shell = await sandbox.shell("python", { user: "nobody", cwd: "/" });
  assert.equal((await shell.run("import os\nx = os.getuid()")).exitCode, 0);
  assert.equal((await shell.run("x")).stdout, "65534\n");
  await shell.close();
  await assert.rejects(sandbox.shell("cobol"), InvalidArgument);
  await assert.rejects(sandbox.shell("bash", { user: "a b;c" }), InvalidArgument);
});

test("everyday 30: a terminal goes on without us and is joined again", async () => {
  const terminal = await sandbox.terminal(["sh"], { echo: false, env: { PS1: "" } });
  await terminal.write("x=5; echo fi''rst\n");
  assert.ok(!(await readUntil(terminal, "first\r\n")).includes("x=5")); // no echo
  const left = terminal.offset;
  await terminal.write("echo sec''ond-$x\n");
  const [again] = await sandbox.terminals();
  assert.equal(again.id, terminal.id);
  const later = await readUntil(again, "second-5", left);
  assert.ok(!later.includes("first"));
  assert.ok((await readUntil(sandbox.joinTerminal(terminal.id), "second-5")).includes("first"));
  await again.resize(33, 99);
  await again.write("stty size; exit 6\n");
  assert.deepEqual(await again.wait(), { exitCode: 6, signal: null });
  assert.equal(again.lost, 0);
  assert.deepEqual(await sandbox.terminals(), []);
});

test("everyday 30: bad terminals are refused with the server's words", async () => {
  await assert.rejects(sandbox.terminal(["sh"], { rows: 0 }), InvalidArgument);
  await assert.rejects(sandbox.terminal(["sh"], { echo: "no" }), InvalidArgument);
  await assert.rejects(sandbox.joinTerminal("nope").wait(), NotFound);
  await assert.rejects(sandbox.joinTerminal("../../x").write("x"), (error) =>
    ["not_found", "invalid_argument"].includes(error.code),
  );
  const nobody = Sandbox.connect("nope");
  await assert.rejects(nobody.shell(), NotFound);
  await nobody.disconnect();
});

test("everyday 30: over the local socket", async () => {
  const local = Sandbox.connect(sandbox.id, { endpoint: `unix:${join(process.env.ATOLL_HOME, "grpc.sock")}` });
  const shell = await local.shell();
  assert.equal((await shell.run("echo here")).stdout, "here\n");
  await shell.close();
  await local.disconnect();
});
