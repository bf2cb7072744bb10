"""Rollouts: the paged engine, sampling, the scheduler that keeps slots busy, and their graders."""
