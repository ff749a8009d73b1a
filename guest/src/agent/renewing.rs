//! New secrets for a running agent: before its memory is saved, and when it wakes in a sandbox made of that memory.
//!
//! What a saved memory holds are secrets that were made for the save alone. The sandbox's own are overwritten before.

use std::sync::atomic::{compiler_fence, Ordering};
use std::time::Duration;

use rmpv::Value;

use super::ops::Outcome;
use super::Agent;
use crate::boot::is_secret;
use crate::op::{map, OpError, Req};
use crate::sys;

/// While the memory is saved nobody answers, and who wakes from it shall be found at once.
pub(super) const DIAL_QUIET: Duration = Duration::from_millis(20);

impl Agent {
    /// Takes the secrets of the next connection. `quiet`: the memory is about to be saved, so waiting interpreters end.
    /// `sandbox`: it is another sandbox from now on, and the clock may have jumped.
    pub(super) fn op_renew(&mut self, req: &Req) -> Outcome {
        let secret = |key: &str| {
            let value = req.str(key)?;
            is_secret(value).then(|| value.to_owned()).ok_or_else(|| OpError::invalid("a secret has 32 hex digits"))
        };
        let (agent, host) = (secret("agent_secret")?, secret("host_secret")?);
        wipe(std::mem::replace(&mut self.boot.agent_secret, agent));
        wipe(std::mem::replace(&mut self.boot.host_secret, host));
        self.quiet = req.opt_bool("quiet", false)?;
        if self.quiet {
            self.give_up_waiting();
        }
        if let Some(sandbox) = req.opt_str("sandbox")? {
            self.boot.sandbox = sandbox.to_owned();
            let fresh: [u8; 8] = sys::random();
            self.boot_id = fresh.iter().map(|b| format!("{b:02x}")).collect();
            crate::hosts::name_self();
        }
        Ok(Some(map([("boot", Value::from(self.boot_id.as_str()))])))
    }
}

/// Overwrites a secret before its memory is given back.
pub fn wipe(secret: String) {
    let mut bytes = secret.into_bytes();
    wipe_bytes(&mut bytes);
}

pub fn wipe_bytes(bytes: &mut [u8]) {
    for byte in bytes.iter_mut() {
        // SAFETY: a plain write to a byte of ours; volatile, so that it is not left out.
        unsafe { std::ptr::write_volatile(byte, 0) };
    }
    compiler_fence(Ordering::SeqCst);
}
