"""Who is calling and what they may do: principals, keys, quotas, approvals, secrets, the audit log."""
