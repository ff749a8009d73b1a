//! The sandbox's filter of system calls, where the runtime below does not install it: a program of the host's making, for the agent
//! and everything it starts.

use std::io;

const MODE_FILTER: libc::c_uint = 1;
const STEP_BYTES: usize = 8;
/// The kernel takes no more.
const MOST_STEPS: usize = 4096;

/// A program from hexadecimal digits: `struct sock_filter`s as they lie in memory.
pub fn parse(text: &str) -> Option<Vec<libc::sock_filter>> {
    let digit = |byte: &u8| char::from(*byte).to_digit(16).and_then(|d| u8::try_from(d).ok());
    let mut raw = Vec::with_capacity(text.len() / 2);
    for pair in text.as_bytes().chunks(2) {
        let [high, low] = pair else { return None };
        raw.push(digit(high)? << 4 | digit(low)?);
    }
    if raw.is_empty() || raw.len() % STEP_BYTES != 0 || raw.len() / STEP_BYTES > MOST_STEPS {
        return None;
    }
    let step = |s: &[u8]| {
        let [a, b, jt, jf, c, d, e, f] = *s else { return None };
        Some(libc::sock_filter { code: u16::from_ne_bytes([a, b]), jt, jf, k: u32::from_ne_bytes([c, d, e, f]) })
    };
    raw.chunks(STEP_BYTES).map(step).collect()
}

/// From now on every call of this process and its children passes the program. Needs `no_new_privs`, which every sandbox has.
pub fn install(mut program: Vec<libc::sock_filter>) -> io::Result<()> {
    let head = libc::sock_fprog { len: u16::try_from(program.len()).unwrap_or(u16::MAX), filter: program.as_mut_ptr() };
    let done = unsafe { libc::syscall(libc::SYS_seccomp, MODE_FILTER, 0, &raw const head) };
    if done < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Load the number; if it is lgetxattr's fail with EOPNOTSUPP, else allow.
    fn refusing_one_call() -> String {
        let steps: [(u16, u8, u8, u32); 4] = [
            (0x20, 0, 0, 0),
            (0x15, 0, 1, u32::try_from(libc::SYS_lgetxattr).unwrap_or_default()),
            (0x06, 0, 0, 0x0005_0000 | libc::EOPNOTSUPP as u32),
            (0x06, 0, 0, 0x7fff_0000),
        ];
        let bytes = steps.iter().flat_map(|(code, jt, jf, k)| {
            let [a, b] = code.to_ne_bytes();
            let [c, d, e, f] = k.to_ne_bytes();
            [a, b, *jt, *jf, c, d, e, f]
        });
        bytes.map(|b| format!("{b:02x}")).collect()
    }

    #[test]
    fn a_refused_call_fails_with_its_error_and_others_do_not() {
        let program = parse(&refusing_one_call());
        let child = unsafe { libc::fork() };
        if child == 0 {
            let Some(program) = program else { unsafe { libc::_exit(10) } };
            unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) };
            if install(program).is_err() {
                unsafe { libc::_exit(11) };
            }
            let done = unsafe { libc::lgetxattr(c"/".as_ptr(), c"user.x".as_ptr(), std::ptr::null_mut(), 0) };
            let error = io::Error::last_os_error().raw_os_error();
            let alive = unsafe { libc::getpid() } > 0;
            let good = done == -1 && error == Some(libc::EOPNOTSUPP) && alive;
            unsafe { libc::_exit(if good { 0 } else { 12 }) };
        }
        let mut status = 0;
        unsafe { libc::waitpid(child, &raw mut status, 0) };
        assert_eq!(status, 0);
    }

    #[test]
    fn what_is_no_program_is_not_taken() {
        for text in ["", "0", "0g", "00", "zz00000000000000", "060000000000ff7", "06000000 0000ff7f"] {
            assert!(parse(text).is_none(), "{text:?}");
        }
        assert!(parse(&"06000000".repeat(2 * 4096)).is_some_and(|p| p.len() == 4096));
        assert!(parse(&"06000000".repeat(2 * 4097)).is_none());
    }
}
