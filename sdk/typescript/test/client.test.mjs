// The examples of the contract and what they promise, against a real daemon (scripts/test.mjs starts it).
import assert from "node:assert/strict";
import { createRequire } from "node:module";
import { test } from "node:test";
import { FilePermission, InvalidArgument, NotFound, Sandbox, SandboxClient, Unavailable, sandboxRun } from "../dist/esm/index.js";

test("k8e_P46 run: ten random numbers and their mean", async () => {
  const client = new SandboxClient();
  try {
    const code = "import random; n=[random.randint(1,9) for _ in range(10)]; print(n, sum(n)/10)";
    const r = await client.run(code, "python");
    assert.equal(r.exitCode, 0);
    assert.match(r.stdout, /^\[.*\] \d/);
  } finally {
    await client.close();
  }
});

test("k8e_P46 two runs share a session", async () => {
  const client = new SandboxClient();
  try {
    await client.run("echo kept > note.txt", "bash");
    assert.equal((await client.run("cat note.txt", "bash")).stdout, "kept\n");
  } finally {
    await client.close();
  }
});

test("a lost default session is replaced, and told", async () => {
  const client = new SandboxClient();
  const other = new SandboxClient();
  try {
    const first = await client.run("echo $HOSTNAME > note.txt; pwd");
    assert.equal(first.sessionReplaced, undefined);
    const session = await client.defaultSession();
    await other.destroySession(session);
    const again = await client.run("ls");
    assert.equal(again.stdout, "");
    assert.deepEqual(again.sessionReplaced, { sessionId: session, reason: "destroyed", lost: "the files" });
    assert.equal((await client.run("true")).sessionReplaced, undefined, "it is told once");
  } finally {
    await client.close();
    await other.close();
  }
});

test("commands and files of another user", async () => {
  const client = new SandboxClient();
  const as = { user: "nobody" };
  try {
    const session = await client.createSession();
    await client.exec(session, "mkdir -m 777 shared; umask 077; echo root > private");
    assert.equal((await client.exec(session, "id -u", 30, as)).stdout, "65534\n");
    let text = "";
    for await (const piece of client.execStream(session, "id -u", 30, as)) text += piece;
    assert.equal(text, "65534\n");
    await client.writeFile(session, "/workspace/shared/f", "x", as);
    assert.equal((await client.exec(session, "stat -c %u shared/f")).stdout, "65534\n");
    assert.equal(await client.readFile(session, "/workspace/shared/f", as), "x");
    await assert.rejects(client.readBytes(session, "/workspace/private", as), FilePermission);
    await assert.rejects(client.listFiles(session, 0, { user: "a b;c" }), InvalidArgument);
    await client.destroySession(session);
  } finally {
    await client.close();
  }
});

test("two clients of a tenant share its session", async () => {
  const tenant = `team-${process.pid}`;
  const one = new SandboxClient(undefined, tenant);
  const two = new SandboxClient(undefined, tenant);
  try {
    const sessions = await Promise.all([one.defaultSession(), two.defaultSession()]);
    assert.equal(sessions[0], sessions[1]);
    await one.destroySession(sessions[0]);
  } finally {
    await one.close();
    await two.close();
  }
});

test("k8e_P46 createSession, writeFile, exec, readFile, listFiles, destroySession", async () => {
  const client = new SandboxClient();
  try {
    const session = await client.createSession({ runtimeClass: "container", allowedHosts: ["github.com"] });
    assert.match(session, /^sess-/);
    await client.writeFile(session, "/workspace/hello.py", "print('from a file')");
    const r = await client.exec(session, "python3 /workspace/hello.py");
    assert.equal(r.stdout, "from a file\n");
    assert.equal(await client.readFile(session, "/workspace/hello.py"), "print('from a file')");
    const files = await client.listFiles(session);
    assert.deepEqual(files.map((f) => f.path), ["/workspace/hello.py"]);
    await client.destroySession(session);
    await assert.rejects(client.exec(session, "true"), NotFound);
  } finally {
    await client.close();
  }
});

test("k8e_P46 execStream gives plain text while the command runs", async () => {
  const client = new SandboxClient();
  try {
    const session = await client.createSession();
    let text = "";
    for await (const chunk of client.execStream(session, "for i in 1 2 3; do echo line $i; done; echo; echo end")) text += chunk;
    assert.equal(text, "line 1\nline 2\nline 3\n\nend\n");
    await client.destroySession(session);
  } finally {
    await client.close();
  }
});

test("k8e_P46 sandboxRun", async () => {
  const { stdout } = await sandboxRun("echo hello");
  assert.equal(stdout, "hello\n");
});

test("k8e_D01 exit codes and both streams reach the caller", async () => {
  const box = await Sandbox.create();
  try {
    const r = await box.exec("echo out; echo err >&2; exit 7");
    assert.deepEqual([r.stdout, r.stderr, r.exitCode], ["out\n", "err\n", 7]);
    const events = [];
    for await (const e of box.stream("echo a; echo b >&2; exit 3")) events.push(e);
    assert.equal(events.at(-1).exitCode, 3);
    assert.deepEqual(new Set(events.slice(0, -1).map((e) => e.stream)), new Set(["stdout", "stderr"]));
    const late = await box.exec("sleep 600", 1);
    assert.equal(late.status, "timed_out");
  } finally {
    await box.destroy();
  }
});

test("k8e_D05 files and output are binary-safe", async () => {
  const box = await Sandbox.create();
  try {
    const bytes = Uint8Array.from({ length: 256 }, (_, i) => i);
    await box.files.write("/workspace/all", bytes);
    assert.deepEqual(new Uint8Array(await box.files.read("/workspace/all")), bytes);
    const r = await box.exec("cat /workspace/all");
    assert.deepEqual(new Uint8Array(r.stdoutBytes), bytes);
  } finally {
    await box.destroy();
  }
});

test("k8e_D26 code arrives literally", async () => {
  const box = await Sandbox.create();
  try {
    const text = "$HOME `id` \"q\" 'a' \\n $(x)";
    const r = await box.run(`print(${JSON.stringify(text)})`);
    assert.equal(r.stdout, text + "\n");
  } finally {
    await box.destroy();
  }
});

test("errors are typed", async () => {
  const client = new SandboxClient();
  try {
    await assert.rejects(client.exec("sess-nothing", "true"), NotFound);
    await assert.rejects(client.createSession({ env: { "A=B": "x" } }), InvalidArgument);
    const box = await Sandbox.create();
    await assert.rejects(box.files.read("/no/such/file"), (e) => e instanceof NotFound && e.code === "file_not_found");
    await box.destroy();
  } finally {
    await client.close();
  }
  const nowhere = new SandboxClient("127.0.0.1:1");
  await assert.rejects(nowhere.run("true"), Unavailable);
  await nowhere.close();
});

test("the CommonJS build works as well", async () => {
  const cjs = createRequire(import.meta.url)("../dist/cjs/index.js");
  assert.equal((await cjs.sandboxRun("echo cjs")).stdout, "cjs\n");
});
