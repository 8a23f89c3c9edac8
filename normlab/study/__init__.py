"""Our own study: its sweeps, its questions and its tables. Nothing else in the library knows them.

presets          the runs of `normlab sweep`; `get_preset` also takes a reader's own file
questions        questions whose answers were worded before the runs
league           every scheme under one budget, as a table; league_figures draws it; entry trains one more row
rates            learning rates, budgets of tokens, extreme depths: tables of notebooks 01 and 02
bound            what bounds BHyT in a trained model: tables of notebook 02
gain_or_bound    a sweep over BHyT's gain: tables of notebook 08
"""
