"""`python -m ignis` is `ignis`."""

from ignis.cli import main

main()
