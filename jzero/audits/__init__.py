"""The evidence of `jzero.audit`: logged rollouts (`log.py`), their scores under a model
(`scores.py`), and the causes that explain a difference (`causes.py`)."""
