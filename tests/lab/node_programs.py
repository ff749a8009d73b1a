"""Programs for Node whose output says as much as possible about the process they run in, none of it random or timed.

Each must say the same, byte for byte, and end the same way, in a fresh Node and in one that waited.
"""

# One line each, given by `-e`.
LINES = [
    "console.log('hello')",
    "",
    "console.log(process.argv, process.execArgv, process._eval, process.argv0, process.execPath, process.title)",
    "console.log(Object.getOwnPropertyNames(globalThis).join(), Object.keys(globalThis))",
    "console.log(Object.getOwnPropertyNames(process).join(), Object.keys(process.env), process.env)",
    "console.log(module, module.paths, require.main === module, __filename, __dirname, typeof process.mainModule)",
    "console.log(Object.keys(require.cache), require('module').globalPaths, require('module')._pathCache)",
    "console.log(process.moduleLoadList.join(), process.listenerCount('warning'), process.eventNames())",
    "console.log(process.cwd(), process.umask(), process.getuid(), process.exitCode, process.connected, process.send)",
    "const fs = require('fs'); console.log(fs.readdirSync('/proc/self/fd').join(), fs.openSync('/dev/null'))",
    "console.log(require('fs').readdirSync('/proc/self/task').length, process.getActiveResourcesInfo())",
    "console.log([0, 1, 2].map((n) => require('fs').readlinkSync('/proc/self/fd/' + n).split(':')[0]))",
    "console.log(require('fs').readFileSync('/proc/self/status', 'utf8').match(/^(Sig[^Q]|Shd|Cap|NoNew).*/gm))",
    "console.log(new Error('here').stack, Error.stackTraceLimit)",
    "console.trace('here')",
    "throw new Error('é')",
    "import fs from 'fs'; console.log(typeof fs.readFileSync)",
    "import('fs').then((m) => console.log(typeof m.readFileSync, Object.keys(require.cache).length))",
    "import('./not_here.mjs').catch((e) => console.log(e.code, e.message))",
    "Promise.reject(new Error('r'))",
    "process.on('uncaughtException', (e, o) => console.log(e.message, o)); setTimeout(() => console.log(1)); throw new Error('u')",
    "setTimeout(() => { throw new Error('later') }, 1)",
    "process.nextTick(() => console.log(1)); Promise.resolve().then(() => console.log(2)); console.log(0)",
    "setImmediate(() => { console.log('i'); require('fs').stat('/', () => console.log('s')) })",
    "process.exit(7)",
    "process.exitCode = 3; process.on('exit', (c) => console.log('exit', c)); process.on('beforeExit', () => console.log('b'))",
    "process.abort()",
    "process.kill(process.pid, 'SIGTERM'); setTimeout(() => {}, 60000)",
    "process.on('SIGINT', () => { console.log('int'); process.exit(2) }); process.kill(process.pid, 'SIGINT');"
    " setTimeout(() => {}, 60000)",
    "console.log(require('fs').readFileSync(0, 'utf8'))",
    "process.stdin.on('data', (d) => console.log(String(d))).on('end', () => console.log('end'))",
    "require('readline').createInterface({ input: process.stdin }).on('line', (l) => console.log('L', l))",
    "console.log(process.stdin.constructor.name, process.stdout.constructor.name, process.stdin.isTTY, process.stdout._type)",
    "process.stdout.write('no newline'); process.stderr.write('neither')",
    "process.stdout.write('x'.repeat(300000)); console.error('é 漢字 \\u{1f600}')",
    "process.emitWarning('careful'); new Buffer(1)",
    "console.log(require('child_process').execFileSync('env').toString())",
    "console.log(require('child_process').spawnSync('cat', { stdio: ['inherit', 'pipe', 'pipe'] }).output.join())",
    "console.log(require('child_process').spawnSync('sh', ['-c', 'ls /proc/self/fd; kill -9 $$']).stdout)",
    "const { Worker } = require('worker_threads'); new Worker(`const w = require('worker_threads');"
    "console.log(w.workerData, process.argv, process.env.HOME, w.isMainThread)`, { eval: true, workerData: 5 })",
    "console.log(crypto.createHash ? crypto.createHash('md5').update('x').digest('hex') : typeof crypto.subtle)",
    "console.log(Intl.DateTimeFormat().resolvedOptions(), new Date(0).toString())",
    "const a = require('async_hooks'); console.log(a.executionAsyncId(), a.triggerAsyncId(), a.executionAsyncResource(),"
    " new a.AsyncResource('x').asyncId())",
    "const s = new (require('async_hooks').AsyncLocalStorage)(); s.run(1, () => setTimeout(() => console.log(s.getStore()), 1));"
    " s.enterWith(2); setImmediate(() => console.log(s.getStore())); Promise.resolve().then(() => console.log(s.getStore()))",
    "console.log(require('os').homedir(), process.noDeprecation, performance.getEntries().length, process.report.compact)",
]

# More of them, about JavaScript alone, which is the same on every runtime.
MORE = [
    "throw 5",
    "throw null",
    "null.f()",
    "x = (",
    "return 5",
    "await 1",
    "const f = () => f(); try { f() } catch (e) { console.log(e.message) }",
    "require('no_such_module_here')",
    "Promise.reject(7)",
    "process.on('unhandledRejection', (e) => console.log('rejected', e)); Promise.reject(1)",
    "process.nextTick(() => { throw new Error('tick') })",
    "(async () => { throw new Error('async') })()",
    "require('async_hooks').createHook({ init(...w) { require('fs').writeSync(1, w.slice(0, 3) + '\\n') } }).enable();"
    " setTimeout(() => {}, 1); Promise.resolve().then(() => {})",
    "const d = require('domain').create(); d.on('error', (e) => console.log('dom', e.message));"
    " d.run(() => setTimeout(() => { throw new Error('in') }, 1))",
    "console.log(this === globalThis, eval('typeof module'), require('vm').runInNewContext('1 + 1'), RegExp.lastMatch)",
    "console.log(Object.getOwnPropertyDescriptor(process, 'argv0'), Object.getOwnPropertyDescriptor(process, '_eval'))",
    "console.log(require('inspector').url(), process.debugPort, process.features, process.allowedNodeEnvironmentFlags.size)",
    "process.setUncaughtExceptionCaptureCallback((e) => console.log('caught', e.message)); throw new Error('z')",
    "const b = new SharedArrayBuffer(8); Atomics.add(new Int32Array(b), 0, 5); console.log(b, structuredClone({ a: [1] }))",
]

# Files by their name's end.
FILES = [
    (".js", "function f() {\n  throw new TypeError('deep')\n}\n\nf()\n"),
    (".js", "#!/usr/bin/env node\n'use strict'\nconsole.log(this === module.exports, module.id, module.loaded)\n"),
    (".js", "const m = require('./beside')\nconsole.log(m, Object.keys(require.cache), module.children.length)\n"),
    (".js", "const c = require('child_process').fork(__filename.replace('equal', 'equal_child'))\n"
            "c.on('message', (m) => console.log(m)).on('exit', (code) => console.log('child', code))\n"),
    (".js", "const { Worker, isMainThread: main } = require('worker_threads')\n"
            "if (main) new Worker(__filename)\nelse console.log(process.execArgv, process.argv, require.main === module)\n"),
    (".mjs", "console.log(import.meta.url, typeof require, process.argv, await Promise.resolve(5))\n"),
    (".mjs", "import { readFileSync } from 'node:fs'\nimport m from './beside.js'\nconsole.log(m, typeof readFileSync)\n"
             "export const x = 1\nthrow new Error('m')\n"),
    (".mjs", "import './not_here.js'\n"),
    (".mjs", "await new Promise(() => {})\n"),
    (".cjs", "console.log(typeof require, exports, __filename)\nprocess.exit(4)\n"),
]  # fmt: skip
