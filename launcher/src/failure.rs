//! The one error type: which step failed, why, and the errno if the kernel said it.

pub type Result<T> = std::result::Result<T, Failure>;

#[derive(Debug)]
pub struct Failure {
    step: &'static str,
    message: String,
    errno: Option<i32>,
}

impl Failure {
    pub fn new(step: &'static str, message: String) -> Self {
        Failure { step, message, errno: None }
    }

    /// The errno of the call that just failed, with what it was about.
    pub fn last(step: &'static str, about: impl std::fmt::Display) -> Self {
        let error = std::io::Error::last_os_error();
        Failure { step, message: format!("{about}: {error}"), errno: error.raw_os_error() }
    }

    pub fn errno(&self) -> Option<i32> {
        self.errno
    }

    pub fn to_json(&self) -> String {
        serde_json::json!({"error": {"step": self.step, "message": self.message, "errno": self.errno}}).to_string()
    }
}

impl std::fmt::Display for Failure {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        write!(f, "{}: {}", self.step, self.message)
    }
}
