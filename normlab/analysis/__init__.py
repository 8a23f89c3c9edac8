"""Table in, table out: the step between the runs on disk and the figures.

selection   the rows of the long table that a figure shows
compare     differences between two schemes, paired by seed
verdicts    intervals, and when a difference is called different, equivalent or undecided
claims      the papers' claims on depth, one function per question
quantities  what is compared between runs, one definition each
outcomes    whether a scheme trains at all
profiles    one metric by layer at one training step, indexed for sliders
theory      closed-form predictions of layer statistics before training
published   values that papers print
attribution direct logit attribution against measured effects
kernels     times and builds of the kernels, from data/bench
"""
