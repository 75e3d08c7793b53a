"""The module system, sharding rules, and layers as functions."""
