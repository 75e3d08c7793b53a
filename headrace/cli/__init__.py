"""The command line: argparse, and one function a command."""
