"""Tables of single notebooks.

curse_of_depth   01 and 02: learning rates, budgets of tokens, extreme depths
kernels          05: times, bytes and builds of kernels
attribution      07: methods of direct logit attribution, judged
gain_or_bound    08: a sweep over a norm's gain, with and without its bound
"""
