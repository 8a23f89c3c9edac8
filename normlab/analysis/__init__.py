"""Table in, table out: what stands between the runs on disk and the figures.

selection   which rows of the long table a figure shows
compare     how two schemes differ, paired by seed
verdicts    when a difference is called one: different, equivalent, undecided
claims      what the papers claim of depth, a question a function, a verdict a row
rates       what a learning rate makes of a scheme
profiles    one metric by layer at one training step, indexed for sliders
published   the values that papers print
gain        a sweep over a norm's gain, with and without its bound
attribution ways to say who writes a logit, held against the logit and against what was measured
kernels     the kernels' tables: what was timed, and whether the bytes explain it
theory      what the long table will hold before training, in closed form
"""
