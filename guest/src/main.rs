//! Entry point: picks the subcommand. `agent` is PID 1 of a sandbox.

fn main() {
    std::process::exit(2);
}
