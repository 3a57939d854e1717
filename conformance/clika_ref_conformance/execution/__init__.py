"""Doing what is planned: one check, a task in a worker of its own, a whole run with its accounts."""
