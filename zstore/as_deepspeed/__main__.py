"""`python -m zstore.as_deepspeed SCRIPT ...`: a script of DeepSpeed's, on zstore."""

import sys

from zstore.tools.as_deepspeed import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
