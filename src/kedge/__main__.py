"""``python -m kedge`` is the command line."""

from kedge.cli import main

if __name__ == "__main__":
    main()
