"""Command-line arguments that training scripts of the DeepSpeed kind expect."""

import argparse


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add `--deepspeed` (a flag for the script's own use) and `--deepspeed_config PATH`, and return `parser`.

    The older `--deepscale` and `--deepscale_config` are taken too, without being listed.
    """
    group = parser.add_argument_group("DeepSpeed", "configuration in the DeepSpeed dialect")
    group.add_argument("--deepspeed", action="store_true", help="for the script's own use; changes nothing by itself")
    group.add_argument("--deepspeed_config", metavar="PATH", help="JSON file with the configuration")
    group.add_argument("--deepscale", action="store_true", help=argparse.SUPPRESS)
    group.add_argument("--deepscale_config", metavar="PATH", help=argparse.SUPPRESS)
    return parser
