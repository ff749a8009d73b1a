//! Entry point of the agent of a sandbox on one machine.

use atoll_guest::start;

fn main() {
    let name = std::env::args_os().nth(1);
    let code = name.as_deref().and_then(|arg| arg.to_str()).and_then(start::command).unwrap_or_else(|| {
        eprintln!("usage: atoll-guest agent|version");
        2
    });
    std::process::exit(code);
}
