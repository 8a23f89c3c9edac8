"""Our own study: its sweeps and its tables. Nothing else in the library knows them.

presets          the runs of `normlab sweep`; `get_preset` also takes a reader's own file
league           the grid's schemes in one table; league_figures draws it; entry trains one more row
depths           which schemes train at extreme depths: tables of notebook 01
bound            what bounds BHyT, and what its gain does alone: tables of notebooks 02, 08 and 10
sizes            claims at two sizes of models: the table of notebook 10
"""
