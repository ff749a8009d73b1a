// Build, start a daemon of our own with gRPC on a free loopback port, run the tests against it, and clean up.
import { execFileSync, spawn } from "node:child_process";
import { existsSync, mkdtempSync, rmSync } from "node:fs";
import { createServer, connect } from "node:net";
import { tmpdir } from "node:os";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";

const root = dirname(dirname(fileURLToPath(import.meta.url)));
const top = join(root, "..", "..");
process.chdir(root);
if (!existsSync("node_modules/typescript")) {
  execFileSync("npm", ["ci", "--no-audit", "--no-fund", "--silent"], { stdio: ["ignore", "ignore", "inherit"] });
}
execFileSync(process.execPath, ["scripts/build.mjs"], { stdio: "inherit" });

const port = await new Promise((resolve) => {
  const probe = createServer().listen(0, "127.0.0.1", () => {
    const { port } = probe.address();
    probe.close(() => resolve(port));
  });
});
const home = mkdtempSync(join(tmpdir(), "atts-"));
const env = { ...process.env, ATOLL_HOME: home, ATOLL_RUNTIME: process.env.ATOLL_RUNTIME ?? "container" };
for (const name of Object.keys(env)) if (name.startsWith("K8E_") || name === "ATOLL_ENDPOINT") delete env[name];
const python = join(top, ".venv", "bin", "python");
const daemon = spawn(python, ["-m", "atoll.server.daemon", "--home", home, "--grpc", `127.0.0.1:${port}`], {
  env,
  stdio: ["ignore", "inherit", "inherit"],
});

async function listening() {
  for (let i = 0; i < 600; i++) {
    if (daemon.exitCode !== null) throw new Error("the daemon ended before it listened");
    const up = await new Promise((resolve) => {
      const s = connect(port, "127.0.0.1", () => (s.destroy(), resolve(true))).on("error", () => resolve(false));
    });
    if (up && existsSync(join(home, "daemon.sock"))) return;
    await new Promise((r) => setTimeout(r, 100));
  }
  throw new Error("the daemon does not listen");
}

let code = 1;
try {
  await listening();
  env.ATOLL_ENDPOINT = `127.0.0.1:${port}`;
  const run = spawn(process.execPath, ["--test", "test/"], { env, stdio: "inherit" });
  code = await new Promise((resolve) => run.on("exit", (c) => resolve(c ?? 1)));
} finally {
  delete env.ATOLL_ENDPOINT; // the daemon is stopped through its socket
  try {
    execFileSync(python, ["-m", "atoll", "daemon", "stop", "--force"], { env, stdio: "ignore", timeout: 120_000 });
  } catch (error) {
    console.error(String(error));
    daemon.kill("SIGKILL");
    code ||= 1;
  }
  rmSync(home, { recursive: true, force: true });
}
process.exit(code);
