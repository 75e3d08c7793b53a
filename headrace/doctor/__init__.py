"""Checks of the machine, its devices and its cloud."""
