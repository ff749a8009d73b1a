// Drives every method of the stock JavaScript SDK once and prints what it found.
import { Sandbox } from 'e2b'

const found = {}
const name = async (work) => { try { await work(); return 'none' } catch (error) { return error.constructor.name } }
const box = await Sandbox.create({ timeoutMs: 300_000, envs: { FOO: 'bar' }, metadata: { mark: process.env.MARK } })
try {
  // Sandbox
  const info = await box.getInfo()
  found.info = [info.templateId, info.metadata.mark === process.env.MARK, info.state]
  found.running = await box.isRunning()
  await box.setTimeout(600_000)
  found.metrics = (await box.getMetrics()).length > 0
  found.host = box.getHost(3000) === `3000-${box.sandboxId}.${process.env.E2B_DOMAIN}`
  const pages = Sandbox.list({ query: { metadata: { mark: process.env.MARK } }, limit: 1 })
  found.list = (await pages.nextItems()).map((one) => one.sandboxId === box.sandboxId)
  const same = await Sandbox.connect(box.sandboxId)
  found.connect = (await same.commands.run('echo $FOO')).stdout
  await box.updateNetwork({ allowOut: ['example.com'], denyOut: ['0.0.0.0/0'] })
  found.fork = await name(() => box.fork())
  found.snapshot = await name(() => box.createSnapshot())
  found.snapshots = (await box.listSnapshots().nextItems()).length

  // Commands
  const out = []
  const done = await box.commands.run('echo out; echo err >&2', { onStdout: (data) => { out.push(data) } })
  found.run = [done.stdout, done.stderr, done.exitCode, out.join('')]
  found.exit = await box.commands.run('exit 5').catch((error) => [error.constructor.name, error.exitCode])
  found.timeout = await name(() => box.commands.run('sleep 1000', { timeoutMs: 1000 }))
  found.cwd = await name(() => box.commands.run('true', { cwd: '/nowhere' }))
  found.user = (await box.commands.run('id -un', { user: 'root' })).stdout
  const cat = await box.commands.run('cat', { background: true, stdin: true })
  found.listed = (await box.commands.list()).some((one) => one.pid === cat.pid)
  const reader = await box.commands.connect(cat.pid)
  await box.commands.sendStdin(cat.pid, 'typed\n')
  await box.commands.closeStdin(cat.pid)
  found.stdin = [(await cat.wait()).stdout, (await reader.wait()).stdout]
  const sleeper = await box.commands.run('sleep 1000', { background: true })
  found.kill = [await box.commands.kill(sleeper.pid), await box.commands.kill(sleeper.pid)]
  await sleeper.disconnect()

  // Pty
  let heard = ''
  const seen = new TextDecoder()
  const onData = (data) => { heard += seen.decode(data, { stream: true }) }
  const terminal = await box.pty.create({ cols: 80, rows: 24, onData, timeoutMs: 0 })
  const type = (text) => box.pty.sendInput(terminal.pid, new TextEncoder().encode(text))
  await box.pty.resize(terminal.pid, { cols: 100, rows: 30 })
  await type('stty size\n')
  const other = await box.pty.connect(terminal.pid, { onData: () => {} })
  await type('exit\n')
  await terminal.wait()
  await other.wait()
  found.pty = heard.includes('30 100')
  const ended = await box.pty.create({ cols: 80, rows: 24, onData: () => {} })
  found.ptyKill = await box.pty.kill(ended.pid)

  // Filesystem
  found.write = (await box.files.write('js/a file', 'grüße')).path
  found.read = [await box.files.read('js/a file'), (await box.files.read('js/a file', { format: 'bytes' })).length]
  found.blob = (await (await box.files.read('js/a file', { format: 'blob' })).text())
  const stream = await box.files.read('js/a file', { format: 'stream' })
  let size = 0
  for await (const piece of stream) size += piece.length
  found.stream = size
  found.many = (await box.files.writeFiles([{ path: 'js/b', data: 'b' }, { path: 'js/c', data: new Blob(['c']) }])).map((one) => one.name)
  found.dir = [await box.files.makeDir('js/dir'), await box.files.makeDir('js/dir')]
  found.names = (await box.files.list('js', { depth: 2 })).map((one) => [one.name, one.type])
  found.stat = (await box.files.getInfo('js/b')).size
  found.rename = (await box.files.rename('js/b', 'js/dir/d')).path
  found.exists = [await box.files.exists('js/dir/d'), await box.files.exists('js/b')]
  found.missing = await name(() => box.files.read('js/none'))
  const events = []
  const watch = await box.files.watchDir('js', (event) => { events.push(`${event.type} ${event.name}`) }, { recursive: true })
  await box.files.write('js/new', 'x')
  await box.files.remove('js/new')
  while (!events.includes('remove new')) await new Promise((resolve) => setTimeout(resolve, 20))
  await watch.stop()
  found.events = events
  const url = await box.downloadUrl('js/a file', { useSignatureExpiration: 600 })
  found.signed = await (await fetch(url)).text()
  const form = new FormData()
  form.append('file', new Blob(['sent']), 'ignored')
  found.sent = (await fetch(await box.uploadUrl('js/up'), { method: 'POST', body: form })).status
  found.up = await box.files.read('js/up')

  // The end
  found.pause = [await box.pause(), await box.pause(), await box.isRunning()]
  await box.connect()
  found.again = (await box.commands.run('cat js/up')).stdout
} finally {
  found.end = [await box.kill(), await box.kill(), await box.isRunning()]
}
found.gone = await name(() => Sandbox.connect(box.sandboxId))
console.log(JSON.stringify(found))
