"""Callers and their rights: principals, keys, quotas, approvals, secrets, the audit log."""
