//! The guest agent: everything but the entry point, so that tests can reach the parts.
#![deny(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

pub mod affinity;
pub mod agent;
pub mod boot;
pub mod bridge;
pub mod filter;
pub mod forward;
pub mod fs;
pub mod hosts;
pub mod launch;
pub mod link;
pub mod op;
pub mod pipes;
pub mod place;
pub mod plain;
#[cfg(feature = "pod")]
pub mod pod;
pub mod procs;
pub mod proctree;
pub mod ring;
pub mod shim;
pub mod spec;
pub mod start;
pub mod sys;
pub mod users;
pub mod vm;
mod vm_net;
pub mod warm;
pub mod wire;
