"""Processes that grade: their pool, their keepers, the pipes between them, and the judge."""
