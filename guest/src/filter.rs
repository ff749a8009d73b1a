//! Calls that are to fail with a given error, for the agent and everything it starts.
//!
//! Where the kernel below answers a call in a way that programs stumble over, and the runtime's own filter cannot name the error
//! they would take well, the host says so in the boot message and this filter gives the answer.

use std::io;

const LOAD: u16 = 0x20; // BPF_LD | BPF_W | BPF_ABS
const JUMP_IF_EQUAL: u16 = 0x15; // BPF_JMP | BPF_JEQ | BPF_K
const RETURN: u16 = 0x06; // BPF_RET | BPF_K
const NUMBER_AT: u32 = 0; // of struct seccomp_data
const ARCH_AT: u32 = 4;
const ALLOW: u32 = 0x7fff_0000;
const ERRNO: u32 = 0x0005_0000;
const MODE_FILTER: libc::c_uint = 1;
#[cfg(target_arch = "x86_64")]
const ARCH: u32 = 0xc000_003e;
#[cfg(target_arch = "aarch64")]
const ARCH: u32 = 0xc000_00b7;

/// Only what a host has reason to name.
pub fn number_of(name: &str) -> Option<u32> {
    let number = match name {
        "clone3" => libc::SYS_clone3,
        "lgetxattr" => libc::SYS_lgetxattr,
        "llistxattr" => libc::SYS_llistxattr,
        _ => return None,
    };
    u32::try_from(number).ok()
}

/// From now on each of these calls fails with its error. Needs `no_new_privs`, which every sandbox has.
pub fn refuse(calls: &[(u32, u16)]) -> io::Result<()> {
    if calls.is_empty() {
        return Ok(());
    }
    let mut program = program(calls);
    let head = libc::sock_fprog { len: u16::try_from(program.len()).unwrap_or(u16::MAX), filter: program.as_mut_ptr() };
    let done = unsafe { libc::syscall(libc::SYS_seccomp, MODE_FILTER, 0, &raw const head) };
    if done < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

fn program(calls: &[(u32, u16)]) -> Vec<libc::sock_filter> {
    let step = |code, jt, jf, k| libc::sock_filter { code, jt, jf, k };
    let mut steps = vec![
        step(LOAD, 0, 0, ARCH_AT),
        step(JUMP_IF_EQUAL, 1, 0, ARCH),
        step(RETURN, 0, 0, ALLOW), // another architecture is for the runtime's own filter to judge
        step(LOAD, 0, 0, NUMBER_AT),
    ];
    for (number, error) in calls {
        steps.push(step(JUMP_IF_EQUAL, 0, 1, *number));
        steps.push(step(RETURN, 0, 0, ERRNO | u32::from(*error)));
    }
    steps.push(step(RETURN, 0, 0, ALLOW));
    steps
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refused_call_fails_with_its_error_and_others_do_not() {
        let child = unsafe { libc::fork() };
        if child == 0 {
            let Some(number) = number_of("lgetxattr") else { unsafe { libc::_exit(10) } };
            unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) };
            if refuse(&[(number, libc::EOPNOTSUPP as u16)]).is_err() {
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
    fn an_unknown_name_has_no_number() {
        assert_eq!(number_of("read"), None);
    }
}
