// Evaluates cells of JavaScript and TypeScript in one Node that keeps its variables.
//
// The main thread runs the code. A worker speaks with the kernel (requests at descriptor 3, answers at 4) and evaluates
// through the inspector in its console mode: `await` works at the top, and `let` and `const` may be declared again.
'use strict'
const { Worker, isMainThread, parentPort } = require('node:worker_threads')

const SHOWN = 256 // displays of one cell

if (isMainThread) {
  const { createRequire } = require('node:module')
  const { inspect } = require('node:util')
  const path = require('node:path')
  const { pathToFileURL } = require('node:url')
  const here = createRequire(path.join(process.cwd(), 'cell.js'))
  let shown = []
  const escape = (text) => text.replace(/[&<>]/g, (one) => ({ '&': '&amp;', '<': '&lt;', '>': '&gt;' })[one])
  const display = (bundle) => {
    if (shown.length >= SHOWN) throw new RangeError(`a cell displays at most ${SHOWN} things`)
    shown.push(bundle)
  }
  const set = (name, value) => Object.defineProperty(globalThis, name, { value, writable: true, configurable: true })
  set('require', here)
  set('display', {
    html: (text) => display({ 'text/html': String(text) }),
    markdown: (text) => display({ 'text/markdown': String(text) }),
    svg: (text) => display({ 'image/svg+xml': String(text) }),
    png: (data) => display({ 'image/png': Buffer.from(data).toString('base64') }),
    json: (value) => display({ 'application/json': JSON.parse(JSON.stringify(value)) }),
    text: (text) => display({ 'text/plain': escape(String(text)) }),
  })
  const bundle = (value) => {
    if (value === undefined) return null
    const data = { 'text/plain': typeof value === 'string' ? value : inspect(value, { depth: 4, maxArrayLength: 1000 }) }
    if (value && typeof value === 'object' && !Buffer.isBuffer(value)) {
      try { data['application/json'] = JSON.parse(JSON.stringify(value)) } catch { /* not for JSON */ }
      if (data['application/json'] === undefined) delete data['application/json']
    }
    return data
  }
  const failure = (error) => {
    const is = error !== null && typeof error === 'object'
    const message = is && 'message' in error ? error.message : inspect(error)
    return { name: is && error.name ? String(error.name) : 'Error', message: String(message), stack: is ? String(error.stack ?? '') : '' }
  }
  Object.defineProperty(globalThis, Symbol.for('atoll.cell'), { value: {
    load: async (name) => import(/^[./]/.test(name) ? pathToFileURL(path.resolve(name)).href
      : await Promise.resolve().then(() => { try { const at = here.resolve(name); return path.isAbsolute(at) ? pathToFileURL(at).href : at } catch { return name } })),
    take: () => { const taken = shown; shown = []; return taken },
    result: (value) => { try { return JSON.stringify({ data: bundle(value) }) } catch (error) { return JSON.stringify({ error: failure(error) }) } },
    failure: (error) => { try { return JSON.stringify({ error: failure(error) }) } catch { return '{"error":{"name":"Error","message":"unknown"}}' } },
  } })
  process.on('uncaughtException', (error) => { process.stderr.write(`${error?.stack ?? inspect(error)}\n`) })
  process.on('unhandledRejection', (error) => { process.stderr.write(`${error?.stack ?? inspect(error)}\n`) })
  const worker = new Worker(__filename)
  worker.on('error', (error) => { process.stderr.write(`${error.stack}\n`); process.exit(1) })
  setInterval(() => {}, 1 << 30)
} else {
  const fs = require('node:fs')
  const { Session } = require('node:inspector')
  const session = new Session()
  session.connectToMainThread()
  const post = (method, fields) => new Promise((resolve, reject) => {
    session.post(method, fields, (error, answer) => error ? reject(error) : resolve(answer))
  })
  let typescript
  const compiler = () => typescript ??= require(process.env.ATOLL_TYPESCRIPT ?? '/usr/local/lib/atoll-interpreter/typescript.js')

  // Types go, and imports become what a cell can run: names that stay for the next cells.
  const translate = (code, typed) => {
    if (!typed && !/\b(import|export)\b/.test(code)) return code
    const ts = compiler()
    if (typed) {
      const made = ts.transpileModule(code, { reportDiagnostics: true, fileName: 'cell.ts', compilerOptions: {
        target: ts.ScriptTarget.ES2022, module: ts.ModuleKind.ESNext, verbatimModuleSyntax: false, removeComments: false } })
      const wrong = (made.diagnostics ?? []).find((one) => one.category === ts.DiagnosticCategory.Error)
      if (wrong) throw new SyntaxError(ts.flattenDiagnosticMessageText(wrong.messageText, '\n'))
      code = made.outputText.replace(/^export \{\s*\};?\s*$/m, '')
    }
    const file = ts.createSourceFile('cell.js', code, ts.ScriptTarget.Latest, true, ts.ScriptKind.JS)
    const load = "globalThis[Symbol.for('atoll.cell')].load"
    const edits = []
    const walk = (node) => {
      if (ts.isImportDeclaration(node)) {
        const from = node.moduleSpecifier.getText(file), clause = node.importClause, names = clause?.namedBindings
        const parts = []
        if (clause?.name) parts.push(`default: ${clause.name.text}`)
        if (names && ts.isNamedImports(names)) {
          for (const one of names.elements) parts.push(one.propertyName ? `${one.propertyName.getText(file)}: ${one.name.text}` : one.name.text)
        }
        let text = parts.length ? `var { ${parts.join(', ')} } = await ${load}(${from});` : ''
        if (names && ts.isNamespaceImport(names)) text += `var ${names.name.text} = await ${load}(${from});`
        edits.push([node.getStart(file), node.end, text || `await ${load}(${from});`])
        return
      }
      if (ts.isCallExpression(node) && node.expression.kind === ts.SyntaxKind.ImportKeyword) {
        edits.push([node.expression.getStart(file), node.expression.end, load])
      }
      if (node.parent === file && node.modifiers) {
        for (const one of node.modifiers) if (one.kind === ts.SyntaxKind.ExportKeyword || one.kind === ts.SyntaxKind.DefaultKeyword) edits.push([one.getStart(file), one.end, ''])
      }
      ts.forEachChild(node, walk)
    }
    walk(file)
    for (const [start, end, text] of edits.sort((a, b) => b[0] - a[0])) code = code.slice(0, start) + text + code.slice(end)
    return code
  }

  const hidden = (expression, fields = {}) => post('Runtime.evaluate', { expression, returnByValue: true, ...fields })
  const CELL = "globalThis[Symbol.for('atoll.cell')]"
  const tell = async (remote, how) => {
    const answer = await post('Runtime.callFunctionOn', {
      functionDeclaration: `function (value) { return ${CELL}.${how}(value) }`, returnByValue: true, objectId: cell,
      arguments: [remote.objectId ? { objectId: remote.objectId } : 'unserializableValue' in remote
        ? { unserializableValue: remote.unserializableValue } : { value: remote.value }],
    })
    return JSON.parse(answer.result.value)
  }
  let cell
  const run = async (code, typed) => {
    cell ??= (await post('Runtime.evaluate', { expression: CELL, objectGroup: 'cell' })).result.objectId
    let translated
    try {
      translated = translate(code, typed)
    } catch (error) {
      return { error: { name: error.name, message: error.message, stack: `${error.name}: ${error.message}` } }
    }
    const done = await post('Runtime.evaluate', { expression: translated, replMode: true, awaitPromise: true, objectGroup: 'value' })
    try {
      if (done.exceptionDetails) {
        const thrown = done.exceptionDetails.exception
        return thrown ? await tell(thrown, 'failure') : { error: { name: 'KeyboardInterrupt', message: 'interrupted' } }
      }
      return await tell(done.result, 'result')
    } finally {
      await post('Runtime.releaseObjectGroup', { objectGroup: 'value' })
    }
  }
  const INTERRUPTED = { error: { name: 'KeyboardInterrupt', message: 'interrupted' } }
  let interrupt = () => {}
  const serve = async (asked) => {
    const stopped = new Promise((resolve) => { interrupt = () => {
      // A loop is cut; what only waits is left behind.
      post('Runtime.terminateExecution').catch(() => {})
      setTimeout(() => resolve(INTERRUPTED), 300)
    } })
    let answer
    try {
      answer = await Promise.race([run(asked.code, asked.typescript), stopped])
      const shown = await hidden(`${CELL}.take()`)
      answer.shown = shown.result.value ?? []
    } catch (error) {
      answer = /terminated/i.test(error.message) ? INTERRUPTED : { error: { name: error.name, message: error.message, stack: error.stack } }
    }
    fs.writeSync(4, JSON.stringify({ id: asked.id, ...answer }) + '\n')
  }
  let rest = []
  let queue = Promise.resolve()
  fs.createReadStream(null, { fd: 3 }).on('data', (data) => {
    let at = 0
    for (let end = data.indexOf(10); end >= 0; end = data.indexOf(10, at)) {
      const asked = JSON.parse(Buffer.concat([...rest, data.subarray(at, end)]).toString())
      rest = []
      at = end + 1
      if (asked.interrupt) interrupt()
      else queue = queue.then(() => serve(asked))
    }
    if (at < data.length) rest.push(data.subarray(at))
  }).on('end', () => process.exit(0))
}
