"""Write sdk/typescript/src/error_table.ts from the table of errors. With --check: say whether it is current."""

import sys
from pathlib import Path

from atoll import errors
from atoll.surfaces.k8e.grpc.status import meanings

TARGET = Path(__file__).parents[1] / "sdk" / "typescript" / "src" / "error_table.ts"


def classes() -> list[type[errors.AtollError]]:
    """Return every class of errors, each after its base."""
    found: list[type[errors.AtollError]] = []
    waiting = [errors.AtollError]
    while waiting:
        below = waiting.pop(0).__subclasses__()
        found += below
        waiting += below
    return found


def table() -> str:
    lines = [
        "// Made by scripts/gen_typescript_errors.py from src/atoll/errors.py; not edited by hand.",
        'import { AtollError, type ErrorFacts } from "./error_base.js";',
        "",
    ]
    for one in classes():
        said = (one.__doc__ or "").splitlines()[0]
        lines += [f"/** {said} */", f"export class {one.__name__} extends {one.__bases__[0].__name__} {{}}", ""]
    lines += ["export const kinds: Record<string, new (message: string, facts?: ErrorFacts) => AtollError> = {"]
    lines += [f"  {one.code}: {one.__name__}," for one in classes()]
    lines += ["};", "", "export const retryOf: Record<string, string> = {"]
    lines += [f'  {one.code}: "{one.retry}",' for one in classes()]
    lines += ["};", "", "/** What a status means when the peer did not say. */"]
    lines += ["export const codeOfStatus: Record<number, string> = {"]
    lines += [f'  {status.value[0]}: "{meant.code}",  // {status.name}' for status, meant in meanings()]
    return "\n".join([*lines, "};", ""])


def main() -> int:
    fresh = table()
    if "--check" in sys.argv:
        current = TARGET.exists() and TARGET.read_text() == fresh
        if not current:
            print("error_table.ts is stale: run scripts/gen_typescript_errors.py", file=sys.stderr)
        return 0 if current else 1
    TARGET.write_text(fresh)
    return 0


if __name__ == "__main__":
    sys.exit(main())
