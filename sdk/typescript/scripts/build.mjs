// Build both module kinds and carry the proto along, so that the package needs nothing beside it.
import { execFileSync } from "node:child_process";
import { cpSync, mkdirSync, rmSync, writeFileSync } from "node:fs";
import { fileURLToPath } from "node:url";
import { dirname, join } from "node:path";

const root = dirname(dirname(fileURLToPath(import.meta.url)));
process.chdir(root);
rmSync("dist", { recursive: true, force: true });
const tsc = join(root, "node_modules", "typescript", "bin", "tsc");
execFileSync(process.execPath, [tsc, "-p", "tsconfig.json"], { stdio: "inherit" });
execFileSync(process.execPath, [tsc, "-p", "tsconfig.cjs.json"], { stdio: "inherit" });
writeFileSync("dist/cjs/package.json", '{"type":"commonjs"}\n');
mkdirSync("proto/sandbox/v1", { recursive: true });
cpSync("../../proto/sandbox/v1/sandbox.proto", "proto/sandbox/v1/sandbox.proto");
