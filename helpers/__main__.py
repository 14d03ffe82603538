"""``python -m helpers COMMAND``: sets the environment up where it is missing, then runs the command in it."""

from __future__ import annotations

import os
import sys


def main() -> int:
    """Run one command; returns the exit code."""
    from helpers.errors import CourseError

    try:
        from helpers.bootstrap import ensure

        ensure(sys.argv[1:])
    except CourseError as error:
        if os.environ.get("PAPERS_DEBUG"):
            raise
        print(error, file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("\nInterrupted. The same command makes the environment anew; downloads are kept.", file=sys.stderr)
        return 130
    from helpers.cli import run_cli

    return run_cli(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
