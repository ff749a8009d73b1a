//! Entry point of the agent of a pod. It is also the agent's program itself: warm interpreters come back to it.

use atoll_guest::{pod, start};

fn main() {
    let args: Vec<String> = std::env::args_os().map(|arg| arg.to_string_lossy().into_owned()).collect();
    let rest = args.get(2..).unwrap_or_default();
    let code = match args.get(1).map(String::as_str) {
        Some("pod") => pod::run(rest),
        Some("install") => start::tell(pod::install(rest)),
        other => other.and_then(start::command).unwrap_or_else(|| {
            eprintln!("usage: atoll-guest-pod pod --gateway-key KEY [--port N] | install DIRECTORY | version");
            2
        }),
    };
    std::process::exit(code);
}
