"""`python -m atoll`: the CLI."""

from atoll.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
