"""E2B's wire contract: control plane, envd, and ports of sandboxes. Decisions: docs/e2b.md."""
