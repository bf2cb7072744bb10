"""The processes of a run on one or several hosts: joining, collectives, losses, interruption."""
