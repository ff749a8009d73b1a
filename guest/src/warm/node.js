// The waiting Node of a sandbox. The agent starts `node -e` with one line that evaluates this text, which arrives on
// descriptor 0. It stops in a read of the request, so that nothing of an event loop exists while it waits.
//
// The program then runs the way Node itself would run it: Node's own main script is called by the event loop from C++, with
// no frame of ours below it. The script is given a `require` in which the preparation of the process, already done, does nothing.
(() => {
  'use strict';
  const UNSUPPORTED = 3;
  const STDIN = 0, STDOUT = 1;
  const HIGHEST_MAJOR = 20, LOWEST_MAJOR = 20;
  const evalRequire = globalThis.require;
  const { closeSync, openSync, readSync, writeSync } = evalRequire('fs');

  // What a closure of Node's own start can see is the way to its inner parts. The inspector shows it without any option.
  function innerParts() {
    let answer;
    // The binding and not the module, which would load the one for workers: see `mendWorkers`.
    const session = new (process.binding('inspector').Connection)((text) => { answer = JSON.parse(text); });
    const ask = (method, params) => {
      session.dispatch(JSON.stringify({ id: 1, method, params }));
      if (!answer.result) throw new Error(method);
      return answer.result;
    };
    const properties = (objectId) => ask('Runtime.getProperties', { objectId, ownProperties: true });
    const variables = (expression) => {
      const { objectId } = ask('Runtime.evaluate', { expression }).result;
      const scopes = properties(objectId).internalProperties.find(({ name }) => name === '[[Scopes]]').value.objectId;
      const found = new Map();
      for (const scope of properties(scopes).result) {
        if (scope.value.description === 'Global') continue;
        for (const { name, value } of properties(scope.value.objectId).result) found.set(name, value);
      }
      return found;
    };
    const pick = (found, names) => {
      const box = {};
      handOver = (value, name) => { box[name] = value; };
      for (const name of names) {
        ask('Runtime.callFunctionOn', {
          functionDeclaration: 'function(name, take) { take(this, name); }',
          objectId: found.get(name).objectId,
          arguments: [{ value: name }, { objectId: taker() }],
        });
      }
      return box;
    };
    let handOver;
    const taker = () => {
      globalThis.__take = (value, name) => handOver(value, name);
      const { objectId } = ask('Runtime.evaluate', { expression: '__take' }).result;
      delete globalThis.__take;
      return objectId;
    };
    try {
      const realm = pick(variables('process.binding'), ['internalBinding', 'primordials', 'requireBuiltin', 'compileFunction']);
      globalThis.__options = realm.requireBuiltin('internal/options').getOptionValue;
      const { optionsDict } = pick(variables('__options'), ['optionsDict']);
      delete globalThis.__options;
      return { ...realm, optionsDict };
    } finally {
      session.disconnect();
    }
  }

  function exactly(length) {
    const data = Buffer.alloc(length);
    for (let at = 0; at < length;) {
      const got = readSync(STDIN, data, at, length - at, null);
      if (got === 0) process.reallyExit(0); // the agent has no use for this one any more
      at += got;
    }
    return data;
  }

  // stdin?, umask, directory or nothing, number of arguments, arguments, environment: separated by NUL.
  function receive() {
    const words = exactly(exactly(4).readUInt32LE()).toString().split('\0');
    const count = Number(words[3]);
    return {
      stdin: words[0] === '1', umask: parseInt(words[1], 8), directory: words[2],
      argv: words.slice(4, 4 + count), env: words.slice(4 + count),
    };
  }

  function takeEnvironment(env) {
    const now = Object.entries(process.env).map(([name, value]) => `${name}=${value}`);
    if (now.length === env.length && now.every((entry, at) => entry === env[at])) return;
    for (const name of Object.keys(process.env)) delete process.env[name];
    for (const entry of env) {
      const at = entry.indexOf('=');
      process.env[entry.slice(0, at)] = entry.slice(at + 1);
    }
    evalRequire('module')._initPaths();
  }

  function fixed(name, value) {
    if (value) Object.defineProperty(process, name, { writable: false, configurable: true, enumerable: true, value });
    else delete process[name];
  }

  // Leaves the process as a start with these arguments finds it just before its program.
  function become(inner, request) {
    const { argv } = request;
    const code = argv[1] === '-e' ? argv[2] : undefined;
    const rest = argv.slice(code === undefined ? 1 : 3);
    if (!request.stdin) {
      closeSync(STDIN);
      openSync('/dev/null', 'r');
    }
    process.umask(request.umask);
    if (request.directory) process.chdir(request.directory);
    takeEnvironment(request.env);
    process.argv.length = 1;
    process.argv.push(...rest);
    process.execArgv.length = 0;
    if (code !== undefined) process.execArgv.push('-e', code);
    fixed('_eval', code);
    inner.optionsDict['--eval'] = code ?? inner.noCode;
    inner.optionsDict['[has_eval_string]'] = code !== undefined;
    if (code !== undefined) return { script: 'internal/main/eval_string' };
    process.argv[1] = evalRequire('path').resolve(rest[0]);
    return { script: 'internal/main/run_main_module', entry: process.argv[1] };
  }

  // A worker thread would inherit the arguments this process was started with.
  function mendWorkers(inner) {
    const binding = inner.internalBinding('worker');
    binding.Worker = new Proxy(binding.Worker, {
      construct: (target, words, origin) => {
        words[2] ??= [];
        return Reflect.construct(target, words, origin);
      },
    });
  }

  // Has the event loop call Node's main script, as what is to be done when a handle has been closed. As in any main script the
  // asynchronous id is 1, caused by none.
  function schedule(inner, main, counter, loaded) {
    const { async_id_fields: ids, execution_async_resources: resources, constants } = inner.internalBinding('async_wrap');
    const { UDP } = inner.internalBinding('udp_wrap'); // a handle that opens no descriptor
    const began = () => {
      ids[constants.kAsyncIdCounter] = counter;
      resources[0] = {};
      process.moduleLoadList.length = loaded;
      delete globalThis.module; // the end of `-e` has put it back
      return main.entry;
    };
    const prepared = { prepareMainThreadExecution: began, markBootstrapComplete() {} };
    const give = (name) => (name === 'internal/process/pre_execution' ? prepared : inner.requireBuiltin(name));
    const start = main.compiled.bind(undefined, process, give, inner.internalBinding, inner.primordials);
    ids[constants.kAsyncIdCounter] = ids[constants.kDefaultTriggerAsyncId] = 0;
    const handle = new UDP();
    ids[constants.kDefaultTriggerAsyncId] = -1;
    handle.close(start);
  }

  // What almost every program needs for its first line of output is loaded and has been compiled.
  function practise(inner) {
    for (const name of ['internal/modules/run_main', 'net', 'tty']) inner.requireBuiltin(name);
    const { Writable } = inner.requireBuiltin('stream');
    const { Console } = inner.requireBuiltin('internal/console/constructor');
    const nowhere = new Writable({ write: (data, encoding, done) => done() });
    new Console({ stdout: nowhere, stderr: nowhere, colorMode: false }).log('%s', 'x', 1, { a: [1] });
  }

  const major = Number(process.versions.node.split('.')[0]);
  let inner, scripts;
  const loaded = process.moduleLoadList.length; // with `-e`; a file has not got those that come after the last of its own
  const bare = process.moduleLoadList.indexOf('NativeModule internal/dns/utils') + 1;
  let counter;
  try {
    if (major < LOWEST_MAJOR || major > HIGHEST_MAJOR) process.reallyExit(UNSUPPORTED);
    inner = innerParts();
    const { async_id_fields: ids, constants } = inner.internalBinding('async_wrap');
    counter = ids[constants.kAsyncIdCounter];
    mendWorkers(inner);
    scripts = {};
    for (const name of ['internal/main/eval_string', 'internal/main/run_main_module']) {
      scripts[name] = inner.compileFunction(name);
    }
    practise(inner);
    inner.noCode = undefined;
    // All that `-e` has put there: first the modules, in this order, then what belongs to the module.
    const names = Object.getOwnPropertyNames(globalThis);
    for (const name of names.slice(names.indexOf('assert'))) delete globalThis[name];
  } catch (error) {
    process.reallyExit(UNSUPPORTED);
  }
  if (ANNOUNCE) writeSync(STDOUT, 'r');
  const request = receive();
  const { script, entry } = become(inner, request);
  schedule(inner, { compiled: scripts[script], entry }, counter, entry ? bare : loaded);
})();
