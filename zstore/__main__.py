"""`python -m zstore` is the `zstore` command (so `torchrun ... -m zstore train` works too)."""

from zstore.tools.cli import main

if __name__ == "__main__":
    main()
