// The daemon of this user: where its socket is, and starting it when it does not run.
import { spawn } from "node:child_process";
import { existsSync, openSync } from "node:fs";
import { connect } from "node:net";
import { homedir } from "node:os";
import { basename, delimiter, dirname, join, resolve } from "node:path";
import { DaemonUnreachable } from "./error_table.js";

const LONGEST_NAME = 107; // bytes of a Unix socket's address
const START_DEADLINE_MS = 90_000;
const INSTALL =
  "install atoll so that `atoll` is on PATH, or name it in ATOLL_PROGRAM; a gateway elsewhere is named by ATOLL_ENDPOINT";

/** Return `ATOLL_HOME`, else `~/.atoll`. */
export function homeDirectory(): string {
  return resolve(process.env["ATOLL_HOME"] || join(homedir(), ".atoll"));
}

/** Return a gRPC target for the daemon's socket. */
export function localTarget(): string {
  const path = join(homeDirectory(), "grpc.sock");
  if (Buffer.byteLength(path) <= LONGEST_NAME) return `unix:${path}`;
  // A descriptor of its directory, kept for the process's life, makes the address short enough.
  return `unix:/proc/self/fd/${openSync(dirname(path), "r")}/${basename(path)}`;
}

/** Return when the local daemon answers, and start it when it does not run. */
export async function ensureDaemon(): Promise<void> {
  const path = join(homeDirectory(), "grpc.sock");
  if (await answers(path)) return;
  const said = await startDaemon(path);
  const until = Date.now() + START_DEADLINE_MS;
  while (!(await answers(path))) {
    if (Date.now() > until) throw unreachable(path, said, `see ${join(homeDirectory(), "daemon.log")}`);
    await new Promise((resolve) => setTimeout(resolve, 20));
  }
}

function answers(path: string): Promise<boolean> {
  if (!existsSync(path)) return Promise.resolve(false);
  const address = Buffer.byteLength(path) <= LONGEST_NAME ? path : localTarget().slice("unix:".length);
  return new Promise((resolve) => {
    const socket = connect(address, () => (socket.destroy(), resolve(true)));
    socket.on("error", () => resolve(false));
  });
}

/** Run the command line once: it starts the daemon, exactly once however many clients ask. */
function startDaemon(path: string): Promise<string> {
  const program = findProgram();
  if (!program) throw unreachable(path, "the program `atoll` was not found", INSTALL);
  return new Promise((resolve, reject) => {
    const env: NodeJS.ProcessEnv = { ...process.env };
    delete env["ATOLL_ENDPOINT"];
    delete env["K8E_SANDBOX_ENDPOINT"];
    const child = spawn(program, ["sandbox", "status"], { env, stdio: ["ignore", "pipe", "pipe"] });
    let said = "";
    child.stdout.on("data", (text) => (said += String(text)));
    child.stderr.on("data", (text) => (said += String(text)));
    child.on("error", (error) => reject(unreachable(path, error.message, INSTALL)));
    child.on("close", (code) =>
      code === 0 ? resolve(said) : reject(unreachable(path, said.trim(), "run `atoll doctor`")),
    );
  });
}

function findProgram(): string | undefined {
  const named = process.env["ATOLL_PROGRAM"];
  if (named) return named;
  const places = (process.env["PATH"] ?? "").split(delimiter);
  places.push(join(homedir(), ".local", "bin"));
  return places.filter(Boolean).map((place) => join(place, "atoll")).find(existsSync);
}

function unreachable(path: string, reason: string, hint: string): DaemonUnreachable {
  return new DaemonUnreachable(`no daemon answers at ${path}: ${reason}`, {
    code: "daemon_unreachable",
    retry: "yes",
    hint,
  });
}
