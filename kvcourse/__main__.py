"""`python -m kvcourse` is the command `kvcourse`."""

from kvcourse.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
