"""`python -m cli <command>`: parse, run, exit. The environment is read here alone."""

import argparse
import os
import sys

from cli import chat, check, down, logs, models, seed, status, up, users

COMMANDS = (up, down, status, logs, chat, check, models, seed, users)


def main() -> int:
    """The exit status: 0 well, 1 a finding or a failure, 2 a wrong call."""
    parser = argparse.ArgumentParser(prog="headworks", description=__doc__.partition(":")[0])
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for module in COMMANDS:
        module.add_parser(commands)
    arguments = parser.parse_args()
    run = arguments.run
    try:
        return int(run(arguments, dict(os.environ)))
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader (`| head`) has seen enough.
        sys.stderr.close()
        return 0


if __name__ == "__main__":
    sys.exit(main())
