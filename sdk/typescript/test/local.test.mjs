// A client without settings, by the documents' words: tsx on the source, the local daemon started on demand, errors with hints.
import assert from "node:assert/strict";
import { execFile, execFileSync } from "node:child_process";
import { mkdtempSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { delimiter, dirname, join } from "node:path";
import { test } from "node:test";
import { fileURLToPath } from "node:url";
import { promisify } from "node:util";
import { DaemonUnreachable, InvalidArgument, OutcomeUnknown, RateLimited, SandboxClient, fromGrpc } from "../dist/esm/index.js";

const root = dirname(dirname(fileURLToPath(import.meta.url)));
const bin = join(root, "..", "..", ".venv", "bin");
const tsx = join(root, "node_modules", ".bin", "tsx");

function environment(home, path = `${bin}${delimiter}${process.env.PATH}`) {
  const env = { ...process.env, ATOLL_HOME: home, PATH: path };
  for (const name of Object.keys(env)) if (name.startsWith("K8E_") || name === "ATOLL_ENDPOINT") delete env[name];
  return env;
}

async function runDocument(text, env) {
  const script = join(root, `document-${process.pid}.ts`); // beside sandbox_client.ts, as the document has it
  writeFileSync(script, text);
  try {
    return await promisify(execFile)(tsx, [script], { env });
  } finally {
    rmSync(script);
  }
}

const DOCUMENT = `
import { SandboxClient, sandboxRun } from "./sandbox_client";
async function main() {
  const client = new SandboxClient();
  console.log((await client.run("print('hello')", "python")).stdout.trim());
  await client.close();
  console.log((await sandboxRun("echo again")).stdout.trim());
}
main();
`;

test("everyday 7: the document's example under tsx starts the local daemon and runs", async () => {
  const home = mkdtempSync(join(tmpdir(), "atts-"));
  const env = environment(home);
  try {
    const { stdout } = await runDocument(DOCUMENT, env);
    assert.equal(stdout, "hello\nagain\n");
  } finally {
    execFileSync(join(bin, "atoll"), ["daemon", "stop", "--force"], { env, stdio: "ignore" });
    rmSync(home, { recursive: true, force: true });
  }
});

test("everyday 17: the program of the page runs as it stands", async () => {
  const page = readFileSync(join(root, "..", "..", "docs", "typescript.md"), "utf8");
  const home = mkdtempSync(join(tmpdir(), "atts-"));
  const env = environment(home);
  try {
    const { stdout } = await runDocument(page.match(/```ts\n([^]*?)```/)[1], env);
    assert.equal(stdout, "one line\n0 42\na,b\n1,2\n/tmp\n0\n");
  } finally {
    execFileSync(join(bin, "atoll"), ["daemon", "stop", "--force"], { env, stdio: "ignore" });
    rmSync(home, { recursive: true, force: true });
  }
});

test("everyday 7: without atoll on PATH the error says what to do", async () => {
  const home = mkdtempSync(join(tmpdir(), "atts-"));
  const old = { ...process.env };
  try {
    const env = environment(home, "/nowhere");
    for (const name of Object.keys(process.env)) if (!(name in env)) delete process.env[name];
    Object.assign(process.env, env, { HOME: home });
    const client = new SandboxClient();
    await assert.rejects(client.run("true"), (error) => {
      assert.ok(error instanceof DaemonUnreachable);
      assert.match(error.hint, /ATOLL_PROGRAM/);
      return true;
    });
    await client.close();
  } finally {
    for (const name of Object.keys(process.env)) if (!(name in old)) delete process.env[name];
    Object.assign(process.env, old);
    rmSync(home, { recursive: true, force: true });
  }
});

test("everyday 7: a port nobody listens on is an error with a hint", async () => {
  const client = new SandboxClient("127.0.0.1:1");
  await assert.rejects(client.run("true"), (error) => {
    assert.ok(error instanceof DaemonUnreachable && error.retryable);
    assert.match(error.hint, /atoll serve/);
    assert.match(error.message, /127\.0\.0\.1:1/);
    return true;
  });
  await client.close();
});

test("B6: the server's own hint, code and retry reach the caller", async () => {
  const client = new SandboxClient();
  try {
    const session = await client.createSession();
    await assert.rejects(client.pipInstall(session, ["--index-url=http://127.0.0.1/"]), (error) => {
      assert.ok(error instanceof InvalidArgument);
      assert.deepEqual([error.code, error.retry, error.retryable], ["invalid_argument", "no", false]);
      assert.match(error.hint, /pip install/);
      return true;
    });
    await client.destroySession(session);
  } finally {
    await client.close();
  }
});

test("B6: retryable is what the server says, not a list of the SDK's", () => {
  const trailers = (wire) => ({ code: 8, details: "x", metadata: { get: () => [Buffer.from(JSON.stringify(wire))] } });
  const full = fromGrpc(trailers({ code: "disk_full", message: "no space", retry: "no" }));
  assert.deepEqual([full.code, full.retryable], ["disk_full", false]);
  const limited = fromGrpc(trailers({ code: "rate_limited", message: "slow down", retry: "yes", hint: "wait" }));
  assert.ok(limited instanceof RateLimited && limited.retryable && limited.hint === "wait");
  const cut = fromGrpc({ code: 14, details: "Connection dropped" });
  assert.ok(cut instanceof OutcomeUnknown && !cut.retryable); // it may have run
});
