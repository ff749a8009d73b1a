//! Rights of the agent: signals, keyring, capabilities, the filter of system calls. All of it is for a process about to exec.

use crate::failure::{Failure, Result};
use crate::sys;

const STEP: &str = "rights";
const LAST_POSSIBLE: i32 = 63;

/// Nothing blocked, nothing ignored: what we or our parent ignore would stay so through exec.
pub fn fresh_signals() -> Result<()> {
    // SAFETY: plain data and numbers; signals that may not be set say so, and are as they should be.
    unsafe {
        for number in 1..=64 {
            libc::signal(number, libc::SIG_DFL);
        }
        let mut none: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&mut none);
        sys::check(libc::sigprocmask(libc::SIG_SETMASK, &none, std::ptr::null_mut()).into(), STEP, "sigprocmask")?;
        libc::umask(0o022);
    }
    Ok(())
}

/// A session keyring that is nobody else's. Kernels without keys have none to share.
pub fn own_keyring() -> Result<()> {
    const JOIN_SESSION_KEYRING: i32 = 1;
    // SAFETY: no name.
    let done = unsafe { libc::syscall(libc::SYS_keyctl, JOIN_SESSION_KEYRING, std::ptr::null::<libc::c_char>()) };
    if done < 0 && std::io::Error::last_os_error().raw_os_error() == Some(libc::ENOSYS) {
        return Ok(());
    }
    sys::check(done, STEP, "session keyring").map(|_| ())
}

/// No new privileges, and of the capabilities only these, in the bounding, permitted and effective sets.
pub fn give_up(kept: u64) -> Result<()> {
    const VERSION_3: u32 = 0x2008_0522;
    // SAFETY: numbers, and the kernel's layout of version 3: header, then two triples of 32 bits.
    unsafe {
        sys::check(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0).into(), STEP, "PR_SET_NO_NEW_PRIVS")?;
        for capability in (0..=LAST_POSSIBLE).filter(|n| kept & 1 << n == 0) {
            if libc::prctl(libc::PR_CAPBSET_READ, capability, 0, 0, 0) == 1 {
                sys::check(libc::prctl(libc::PR_CAPBSET_DROP, capability, 0, 0, 0).into(), STEP, "PR_CAPBSET_DROP")?;
            }
        }
        let cleared = libc::prctl(libc::PR_CAP_AMBIENT, libc::PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0);
        sys::check(cleared.into(), STEP, "PR_CAP_AMBIENT")?;
        let head: [u32; 2] = [VERSION_3, 0];
        let (low, high) = (kept as u32, (kept >> 32) as u32);
        let data: [u32; 6] = [low, low, 0, high, high, 0];
        sys::check(libc::syscall(libc::SYS_capset, head.as_ptr(), data.as_ptr()), STEP, "capset").map(|_| ())
    }
}

/// From now on every call passes the program; needs `no_new_privs`, or rights over the user namespace.
pub fn install(program: &[libc::sock_filter]) -> Result<()> {
    const MODE_FILTER: libc::c_uint = 1;
    let length = u16::try_from(program.len()).map_err(|_| Failure::new(STEP, "the filter is too long".into()))?;
    let head = libc::sock_fprog { len: length, filter: program.as_ptr().cast_mut() };
    // SAFETY: the program is as long as said; the kernel copies it.
    let done = unsafe { libc::syscall(libc::SYS_seccomp, MODE_FILTER, 0, std::ptr::addr_of!(head)) };
    sys::check(done, STEP, "seccomp").map(|_| ())
}

/// A program as `struct sock_filter`s in hexadecimal digits.
pub fn parse(text: &str) -> Result<Vec<libc::sock_filter>> {
    const STEP_BYTES: usize = 8;
    const MOST_STEPS: usize = 4096;
    let bad = || Failure::new("order", "the filter is not a program".into());
    let digit = |byte: u8| char::from(byte).to_digit(16).map(|d| d as u8).ok_or_else(bad);
    if text.is_empty() || text.len() % (2 * STEP_BYTES) != 0 || text.len() / (2 * STEP_BYTES) > MOST_STEPS {
        return Err(bad());
    }
    let bytes = text.as_bytes().chunks(2).map(|pair| match *pair {
        [high, low] => Ok(digit(high)? << 4 | digit(low)?),
        _ => Err(bad()),
    });
    let bytes = bytes.collect::<Result<Vec<u8>>>()?;
    let step = |s: &[u8]| match *s {
        [a, b, jt, jf, c, d, e, f] => {
            Ok(libc::sock_filter { code: u16::from_ne_bytes([a, b]), jt, jf, k: u32::from_ne_bytes([c, d, e, f]) })
        }
        _ => Err(bad()),
    };
    bytes.chunks(STEP_BYTES).map(step).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_filter_is_whole_or_refused() {
        assert_eq!(parse("0600000000000000").map(|p| p.len()).ok(), Some(1));
        for text in ["", "06", "06000000000000zz", "060000000000000000"] {
            assert!(parse(text).is_err(), "{text}");
        }
    }
}
