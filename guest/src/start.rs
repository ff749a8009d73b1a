//! Choose the program's work by its first argument. `agent` is PID 1 of a sandbox.

use crate::{agent::Agent, boot, shim, vm};

/// Does what the command says and returns its exit status; `None` for a command that does not exist.
pub fn command(name: &str) -> Option<i32> {
    let code = match name {
        "agent" => agent(),
        "shim" => adopt(),
        // The first process of a virtual machine, by the kernel's command line.
        "vm" => tell(vm::start().map_err(|error| error.to_string())),
        "version" => {
            println!("{}", env!("CARGO_PKG_VERSION"));
            0
        }
        // For the probe of a runtime: some kernels of sandboxes fail only when a program waits.
        "nap" => {
            std::thread::sleep(std::time::Duration::from_millis(100));
            0
        }
        _ => return None,
    };
    Some(code)
}

/// The exit status for a result; an error is told on standard error.
pub fn tell(result: Result<(), String>) -> i32 {
    match result {
        Ok(()) => 0,
        Err(error) => {
            eprintln!("atoll-guest: {error}");
            1
        }
    }
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
    tell(boot::receive().and_then(begin).map(|mut agent| {
        if agent.boot.dial.is_none() {
            boot::settle(); // not where a page that comes back is dear
        }
        agent.run();
    }))
}

/// Applies the boot message; the agent is ready to run.
pub fn begin(message: boot::Boot) -> Result<Agent, String> {
    boot::apply(&message)?;
    let agent = Agent::new(message)?;
    boot::hush()?;
    Ok(agent)
}
