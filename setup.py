"""Adds the recipes to the package: configs/ is jzero.recipes in a wheel.

Everything else is in pyproject.toml, which cannot list a package outside of the folder jzero next
to the packages that setuptools finds.
"""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["jzero", "jzero.*"]), "jzero.recipes"],
    package_dir={"jzero.recipes": "configs"},
)
