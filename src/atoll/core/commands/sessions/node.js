// A Node session inside a sandbox: runs one order after another in one global scope. It is given to `node -e`.
{
  const fs = require("fs"), net = require("net"), util = require("util"), vm = require("vm"), { Writable } = require("stream");
  const directory = process.argv[1];
  const orders = new net.Socket({ fd: fs.openSync(directory + "/orders", fs.constants.O_RDWR | fs.constants.O_NONBLOCK) });
  const told = fs.openSync("/proc/self/fd/1", "w");
  let interrupted = null;

  // The lowest free descriptor is the one just closed. 0 goes first, so each finds its own place.
  const put = (number, path, flags) => {
    fs.closeSync(number);
    const got = fs.openSync(path, flags);
    if (got !== number) throw new Error("the standard streams of this session are in use");
  };
  const hold = () => [0, 1, 2].forEach((n) => put(n, "/dev/null", n ? "w" : "r"));
  const write = (number, data) => {
    for (let at = 0; at < data.length; ) {
      try { at += fs.writeSync(number, data, at); } catch (error) { if (error.code !== "EAGAIN") throw error; }
    }
  };
  const stream = (number) => Object.assign(new Writable({
    decodeStrings: true,
    write(chunk, _, done) { try { write(number, chunk); done(); } catch (error) { done(error.code === "EPIPE" ? null : error); } },
  }), { fd: number });
  for (const [name, number] of [["stdout", 1], ["stderr", 2]]) {
    const made = stream(number);
    Object.defineProperty(process, name, { get: () => made, configurable: true });
  }
  global.console = new console.Console({ stdout: process.stdout, stderr: process.stderr });
  global.require = require;

  const shown = (error) => {
    const lines = String(error && error.stack ? error.stack : util.inspect(error)).split("\n");
    const ours = lines.findIndex((line) => /^    at .*(sigintHandlersWrap|node:vm:|\[eval\]:)/.test(line));
    return (ours < 0 ? lines : lines.slice(0, ours)).join("\n") + "\n";
  };
  const evaluate = (source) => {
    const options = { filename: "<shell>", breakOnSigint: true };
    try {
      return vm.runInThisContext(source, options);
    } catch (error) {
      if (!(error instanceof SyntaxError) || !/\bawait\b/.test(source)) throw error;
      return vm.runInThisContext(`(async () => {${source}\n})()`, options);
    }
  };
  const run = async (source) => {
    try {
      let value = evaluate(source);
      if (value instanceof Promise) {
        const stopped = new Promise((_, reject) => { interrupted = () => reject(new Error("interrupted")); });
        value = await Promise.race([value, stopped]);
      }
      if (value !== undefined) process.stdout.write(util.inspect(value) + "\n");
      return 0;
    } catch (error) {
      const stopped = error && (error.code === "ERR_SCRIPT_EXECUTION_INTERRUPTED" || error.message === "interrupted");
      process.stderr.write(shown(error));
      return stopped ? 130 : 1;
    } finally {
      interrupted = null;
    }
  };
  const serve = async (order) => {
    const [runner, name, given] = order.split(" ");
    let code = 1;
    if (fs.existsSync(`/proc/${runner}/fd/2`)) { // else whoever gave the order is gone already
      const source = fs.readFileSync(`${directory}/${name}`, "utf8");
      [0, 1, 2].forEach((n) => put(n, n ? `/proc/${runner}/fd/${n}` : given, n ? "a" : "r"));
      code = await run(source);
    }
    hold();
    const done = fs.openSync(directory + "/done", "r+");
    fs.writeSync(done, `${name} ${code}\n`);
    fs.closeSync(done);
    fs.writeSync(told, `${name} ${code}\n`);
  };

  process.on("SIGINT", () => { if (interrupted) interrupted(); });
  process.on("uncaughtException", (error) => { process.stderr.write(shown(error)); });
  let text = "";
  orders.setEncoding("utf8");
  orders.on("data", async (piece) => {
    text += piece;
    for (let end; (end = text.indexOf("\n")) >= 0; ) {
      const order = text.slice(0, end);
      text = text.slice(end + 1);
      await serve(order);
    }
  });
  process.argv.length = 1;
  fs.writeSync(told, `ready ${process.pid}\n`);
}
