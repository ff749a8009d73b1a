//! The guest agent: everything but the entry point, so that tests can reach the parts.

pub mod fs;
pub mod op;
