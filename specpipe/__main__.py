"""`python -m specpipe` is the `specpipe` command."""

from specpipe.cli import main

main()
