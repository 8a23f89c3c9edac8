"""Find the first block and site at which two models differ beyond rounding, and say why.

`diff`          compare two models, or a model and arrays of another framework, on the same tokens
`write_arrays`  write what each site of a model holds, to compare it elsewhere
`Difference`    the result: verdict, table, causes
"""

from normlab.differences.capture import read_arrays, write_arrays
from normlab.differences.compare import Difference, diff

__all__ = ["Difference", "diff", "read_arrays", "write_arrays"]
