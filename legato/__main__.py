"""Run the command line: `python -m legato` does the same as `legato`."""

from legato.cli import main

if __name__ == "__main__":
    main()
