//! Entry point: picks the subcommand. `agent` is PID 1 of a sandbox.

use atoll_guest::{agent::Agent, boot};

fn main() {
    let code = match std::env::args_os().nth(1).as_deref().and_then(|arg| arg.to_str()) {
        Some("agent") => agent(),
        Some("version") => {
            println!("{}", env!("CARGO_PKG_VERSION"));
            0
        }
        _ => {
            eprintln!("usage: atoll-guest agent|version");
            2
        }
    };
    std::process::exit(code);
}

fn agent() -> i32 {
    boot::protect();
    let started = boot::receive().and_then(|message| {
        boot::apply(&message)?;
        let agent = Agent::new(message)?;
        boot::hush()?;
        Ok(agent)
    });
    match started {
        Ok(mut agent) => {
            boot::settle();
            agent.run();
            0
        }
        Err(error) => {
            eprintln!("atoll-guest: {error}");
            1
        }
    }
}
