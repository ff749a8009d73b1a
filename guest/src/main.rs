//! Entry point: picks the subcommand. `agent` is PID 1 of a sandbox.

use atoll_guest::{agent::Agent, boot, shim, vm};

fn main() {
    let code = match std::env::args_os().nth(1).as_deref().and_then(|arg| arg.to_str()) {
        Some("agent") => agent(),
        Some("shim") => adopt(),
        // The first process of a virtual machine, by the kernel's command line.
        Some("vm") => match vm::start() {
            Ok(()) => 0,
            Err(error) => {
                eprintln!("atoll-guest: {error}");
                1
            }
        },
        Some("version") => {
            println!("{}", env!("CARGO_PKG_VERSION"));
            0
        }
        // For the probe of a runtime: some kernels of sandboxes fail only when a program waits.
        Some("nap") => {
            std::thread::sleep(std::time::Duration::from_millis(100));
            0
        }
        _ => {
            eprintln!("usage: atoll-guest agent|version");
            2
        }
    };
    std::process::exit(code);
}

/// A warm interpreter's parent becomes its shim: `shim CONTROL PID`.
fn adopt() -> i32 {
    let numbers: Vec<i32> = std::env::args().skip(2).filter_map(|arg| arg.parse().ok()).collect();
    match numbers.as_slice() {
        [control, main] if *control > 2 => shim::adopt(*control, *main),
        _ => return 2,
    }
    0
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
            if agent.boot.dial.is_none() {
                boot::settle(); // not where a page that comes back is dear
            }
            agent.run();
            0
        }
        Err(error) => {
            eprintln!("atoll-guest: {error}");
            1
        }
    }
}
