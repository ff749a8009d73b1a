"""The tables, as each database wants them, and every change of them since the first version. Changes go forward only.

Both lists have the same number of steps, and step N of both makes the same tables: a version means the same in both.
"""

_SANDBOX = """
    CREATE TABLE sandbox(
        id TEXT PRIMARY KEY, owner TEXT NOT NULL, name TEXT, state TEXT NOT NULL, runtime TEXT NOT NULL,
        image TEXT NOT NULL, spec TEXT NOT NULL, record TEXT NOT NULL, created_at {real} NOT NULL, expires_at {real},
        idle_timeout {real}, last_active {real} NOT NULL, ended_at {real}, end_kind TEXT, end_detail TEXT, end_by TEXT,
        parent_id TEXT, workspace TEXT);
    CREATE UNIQUE INDEX sandbox_name ON sandbox(owner, name) WHERE state != 'ended';
    CREATE INDEX sandbox_owner ON sandbox(owner, created_at);
    CREATE INDEX sandbox_ended ON sandbox(ended_at);
    CREATE TABLE alias(owner TEXT, alias TEXT, sandbox_id TEXT NOT NULL, PRIMARY KEY(owner, alias));
    CREATE INDEX alias_sandbox ON alias(sandbox_id);
    CREATE TABLE command(
        sandbox_id TEXT, id TEXT, argv TEXT NOT NULL, language TEXT, background INTEGER NOT NULL, body TEXT NOT NULL,
        spec TEXT NOT NULL, pid INTEGER, started_at {real} NOT NULL, ended_at {real}, status TEXT NOT NULL, exit TEXT,
        PRIMARY KEY(sandbox_id, id)){keyed};
    CREATE TABLE event(
        seq {number}, sandbox_id TEXT, owner TEXT, at {real}, kind TEXT, data TEXT);
    CREATE INDEX event_sandbox ON event(sandbox_id, seq);
    CREATE INDEX event_owner ON event(owner, seq);
    CREATE TABLE journal(id TEXT, step TEXT, at {real});
    CREATE TABLE meta(key TEXT PRIMARY KEY, value TEXT);
"""
_APPROVAL = """
    CREATE TABLE approval(
        id TEXT PRIMARY KEY, sandbox_id TEXT NOT NULL, owner TEXT NOT NULL, kind TEXT NOT NULL, action TEXT NOT NULL,
        digest TEXT NOT NULL, status TEXT NOT NULL, requested_at {real} NOT NULL, expires_at {real} NOT NULL,
        sessions TEXT NOT NULL, decided_at {real}, decided_by TEXT, reason TEXT);
    CREATE INDEX approval_sandbox ON approval(sandbox_id);
"""
_PARENT = "CREATE INDEX sandbox_parent ON sandbox(parent_id) WHERE parent_id IS NOT NULL"
_REQUEST = """
    ALTER TABLE sandbox ADD COLUMN request_id TEXT;
    ALTER TABLE sandbox ADD COLUMN request_hash TEXT;
    CREATE UNIQUE INDEX sandbox_request ON sandbox(owner, request_id) WHERE request_id IS NOT NULL;
"""
_STEPS = (_SANDBOX, _APPROVAL, _PARENT, _REQUEST)
_SQLITE = {"real": "REAL", "number": "INTEGER PRIMARY KEY AUTOINCREMENT", "keyed": " WITHOUT ROWID"}
_POSTGRES = {
    "real": "DOUBLE PRECISION",
    "number": "BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY",
    "keyed": "",
}

SQLITE = tuple(step.format(**_SQLITE) for step in _STEPS)
POSTGRES = tuple(step.format(**_POSTGRES) for step in _STEPS)
