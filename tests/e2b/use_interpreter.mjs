// Drives every method of the stock JavaScript code interpreter SDK once and prints what it found.
import { Sandbox } from '@e2b/code-interpreter'

const found = {}
const name = async (work) => { try { await work(); return 'none' } catch (error) { return error.constructor.name } }
const patience = { timeoutMs: 240_000, requestTimeoutMs: 240_000 }
const box = await Sandbox.create({ timeoutMs: 600_000, envs: { FOO: 'bar' }, requestTimeoutMs: 240_000 })
try {
  const heard = []
  const done = await box.runCode("print('out'); import os; os.environ['FOO']", {
    ...patience, onStdout: (one) => { heard.push(one.line) }, onResult: (one) => { heard.push(one.text) } })
  found.python = [done.text, done.logs.stdout, heard, done.executionCount > 0]
  const wrong = await box.runCode('1/0', { ...patience, onError: (error) => { found.told = error.name } })
  found.error = [wrong.error.name, wrong.error.value]
  const drawn = await box.runCode('import matplotlib.pyplot as plt; plt.bar(["a"], [1]); plt.show()', patience)
  found.chart = [drawn.results[0].chart.type, drawn.results[0].png.length > 100]
  found.js = (await box.runCode('const a = [1, 2]; a.length', { ...patience, language: 'js' })).text
  found.envs = (await box.runCode('process.env.ONE', { ...patience, language: 'ts', envs: { ONE: 'x' } })).text
  const made = await box.createCodeContext({ cwd: '/tmp', ...patience })
  found.context = [made.language, made.cwd, (await box.runCode('import os; os.getcwd()', { ...patience, context: made })).text]
  found.listed = (await box.listCodeContexts()).some((one) => one.id === made.id)
  await box.restartCodeContext(made)
  await box.removeCodeContext(made)
  found.gone = await name(() => box.runCode('1', { ...patience, context: made }))
  found.slow = await name(() => box.runCode('while True: pass', { timeoutMs: 1000 }))
  found.after = (await box.runCode('2', patience)).text
} finally {
  await box.kill()
}
console.log(JSON.stringify(found))
process.exit(0) // the SDK leaves its timers behind
