// Shell commands of OpenCode run in an atoll sandbox. If that is not possible they fail: they never run on the machine itself.
import type { Plugin } from "@opencode-ai/plugin"

const quote = (text: string) => `'${text.replaceAll("'", `'\\''`)}'`

export const Agentkernel: Plugin = async () => ({
  "tool.execute.before": async (input, output) => {
    if (input.tool !== "bash") return
    const command = output.args?.command
    if (typeof command !== "string" || !command) throw new Error("no command to put into a sandbox")
    output.args.command = `exec atoll run -- sh -c ${quote(command)}`
  },
})
