"""The process: exit, restart, signals, several hosts, watchdog, goodput, malloc."""
