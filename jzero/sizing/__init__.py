"""Chooses the settings of a run from a model, a data set and the machine: `jzero train`.

data.py      reads the data set: columns, kinds of answers, texts
choices.py   chooses every setting that depends on the model, the data or the machine
recipe.py    writes the choices as a recipe, and prints them as a table
flags.py     the command `jzero train`: its flags
command.py   what the command does
table.py     what is chosen for known models on usual machines: `jzero plan --table`
"""
